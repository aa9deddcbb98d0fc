/* Norms, and the gate of a feed-forward layer. */

#pragma once

#include "numbers.h"
#include "pool.h"

static inline float norm_scale(const real *row, long size, float epsilon) {
    lanes sum = {0};
    for (long i = 0; i < size; i += LANES) sum += load(row + i) * load(row + i);
    return 1.0f / sqrtf(total(sum) / (float)size + epsilon);
}

struct norming {
    long rows, size, each; /* ``each``: rows of a chunk */
    const real *given, *more, *weight;
    float epsilon;
    real *sum, *out;
};

static void norm_row(const struct norming *job, long row) {
    const long size = job->size;
    const real *own = job->given + row * size;
    if (job->more) {
        for (long i = 0; i < size; i += LANES)
            store(job->sum + row * size + i, load(own + i) + load(job->more + row * size + i));
        own = job->sum + row * size;
    }
    const float scale = norm_scale(own, size, job->epsilon);
    for (long i = 0; i < size; i += LANES)
        store(job->out + row * size + i, load(job->weight + i) * narrow(load(own + i) * scale));
}

static void norm_rows(void *given, long chunk) {
    const struct norming *const job = given;
    const long end = (chunk + 1) * job->each < job->rows ? (chunk + 1) * job->each : job->rows;
    for (long row = chunk * job->each; row < end; row++) norm_row(job, row);
}

/* Root mean square norm of rows [rows, size]; with ``more``, of their sum with it, which goes to ``sum``. */
void norm(long rows, long size, const real *given, const real *more, const real *weight, float epsilon,
          real *sum, real *out) {
    struct norming job = {rows, size, items_of_chunk(rows, size), given, more, weight, epsilon, sum, out};
    share(chunks_of(rows, job.each), norm_rows, &job);
}

struct gating {
    long rows, size, each, stride;
    const real *gate, *up;
    real *out;
};

static void gate_rows(void *given, long chunk) {
    const struct gating *const job = given;
    const long size = job->size, end = (chunk + 1) * job->each < job->rows ? (chunk + 1) * job->each : job->rows;
    for (long row = chunk * job->each; row < end; row++)
        for (long next = 0; next < size; next += LANES) {
            const long i = next < size - LANES ? next : size - LANES; /* the last ones may overlap */
            lanes value = load(job->gate + row * job->stride + i);
            value = narrow(value / (exponential(-value) + 1.0f));
            store(job->out + row * size + i, value * load(job->up + row * job->stride + i));
        }
}

/* SiLU of ``gate`` times ``up``, rows [rows, size] ``stride`` apart; ``size`` is at least 16. */
void gated(long rows, long size, const real *gate, const real *up, long stride, real *out) {
    struct gating job = {rows, size, items_of_chunk(rows, 4 * size), stride, gate, up, out};
    share(chunks_of(rows, job.each), gate_rows, &job);
}
