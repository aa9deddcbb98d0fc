/* Norms, and the activation of a feed-forward layer. */

#pragma once

#include "numbers.h"
#include "pool.h"

enum norm_kind {
    NO_NORM,
    RMS_NORM,      /* root mean square; rounded before it is multiplied by the weight, as Llama's */
    WIDE_RMS_NORM, /* rounded after it, as Gemma's and OLMo's */
    LAYER_NORM
};

/* A norm. The weight is in float32, since Gemma's is one more than a number in ``real``. */
struct norm {
    const float *weight, *bias; /* a bias may be NULL */
    float epsilon;
    int32_t kind;
};

/* The norm of a row of ``size`` numbers, a multiple of LANES; ``out`` may be the row itself. */
static inline void norm_row(const struct norm *own, int64_t size, const real *row, real *out) {
    const lanes zero = {0};
    float mean = 0;
    if (own->kind == LAYER_NORM) {
        lanes sum = {0};
        for (int64_t i = 0; i < size; i += LANES) sum += load(row + i);
        mean = total(sum) / (float)size;
    }
    lanes squares = {0};
    for (int64_t i = 0; i < size; i += LANES) squares += (load(row + i) - mean) * (load(row + i) - mean);
    const float scale = 1.0f / sqrtf(total(squares) / (float)size + own->epsilon);
    for (int64_t i = 0; i < size; i += LANES) {
        lanes value = (load(row + i) - mean) * scale;
        if (own->kind == RMS_NORM) value = narrow(value);
        store(out + i, *(const lanes *)(own->weight + i) * value +
                           (own->bias ? *(const lanes *)(own->bias + i) : zero));
    }
}

struct norming {
    const struct norm *own;
    int64_t rows, size, each, stride, out_stride; /* ``each``: rows of a chunk */
    const real *given;
    real *out;
};

static void norm_some(void *given, int64_t chunk) {
    const struct norming *const job = given;
    const int64_t end = (chunk + 1) * job->each < job->rows ? (chunk + 1) * job->each : job->rows;
    for (int64_t row = chunk * job->each; row < end; row++) {
        const real *const from = job->given + row * job->stride;
        real *const to = job->out + row * job->out_stride;
        if (job->own->kind != NO_NORM) norm_row(job->own, job->size, from, to);
        else if (from != to) memcpy(to, from, job->size * sizeof(real));
    }
}

/* Norms of rows [rows, size], ``stride`` apart; without a norm, the rows. */
static void norm_rows(const struct norm *own, int64_t rows, int64_t size, const real *given, int64_t stride, real *out,
                      int64_t out_stride) {
    struct norming job = {own, rows, size, items_of_chunk(rows, size), stride, out_stride, given, out};
    share(chunks_of(rows, job.each), norm_some, &job);
}

enum activation { SILU, GELU_TANH, GELU };

static inline lanes activated(enum activation kind, lanes value) {
    if (kind == SILU) return narrow(value / (exponential(-value) + 1.0f));
    if (kind == GELU_TANH) /* half of one more than a hyperbolic tangent is a logistic function */
        return narrow(value / (exponential((value * value * 0.044715f + 1.0f) * value * -1.59576912f) + 1.0f));
    /* The error function to 1.5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26. */
    const lanes zero = {0}, size = pick(value < 0.0f, -value, value) * 0.70710678f;
    const lanes t = 1.0f / (size * 0.3275911f + 1.0f);
    lanes sum = t * 1.061405429f - 1.453152027f;
    sum = sum * t + 1.421413741f;
    sum = sum * t - 0.284496736f;
    sum = (sum * t + 0.254829592f) * t * exponential(-size * size);
    return narrow(pick(value < 0.0f, sum, zero + 2.0f - sum) * value * 0.5f);
}

struct activating {
    enum activation kind;
    int gated;
    int64_t rows, size, each;
    const real *given;
    real *out;
};

static void activate_some(void *given, int64_t chunk) {
    const struct activating *const job = given;
    const int64_t size = job->size, stride = job->gated ? 2 * size : size;
    const int64_t end = (chunk + 1) * job->each < job->rows ? (chunk + 1) * job->each : job->rows;
    for (int64_t row = chunk * job->each; row < end; row++)
        for (int64_t next = 0; next < size; next += LANES) {
            const int64_t i = next < size - LANES ? next : size - LANES; /* the last ones may overlap */
            const lanes value = activated(job->kind, load(job->given + row * stride + i));
            store(job->out + row * size + i, job->gated ? value * load(job->given + row * stride + size + i) : value);
        }
}

/* The activation of rows [rows, size], times the second half of [rows, 2 * size] where they are gated. */
static void activate(enum activation kind, int gated, int64_t rows, int64_t size, const real *given, real *out) {
    struct activating job = {kind, gated, rows, size, items_of_chunk(rows, 4 * size), given, out};
    share(chunks_of(rows, job.each), activate_some, &job);
}

/* ``norm_rows`` for Python. */
void norm(const struct norm *own, int64_t rows, int64_t size, const real *given, real *out) {
    norm_rows(own, rows, size, given, size, out, size);
}
