/* Norms, and the gate of a feed-forward layer. */

#pragma once

#include "numbers.h"

static inline float norm_scale(const real *row, long size, float epsilon) {
    lanes sum = {0};
    for (long i = 0; i < size; i += LANES) sum += load(row + i) * load(row + i);
    return 1.0f / sqrtf(total(sum) / (float)size + epsilon);
}

/* Root mean square norm of rows [rows, size]; with ``more``, of their sum with it, which goes to ``sum``. */
void norm(long rows, long size, const real *given, const real *more, const real *weight, float epsilon,
          real *sum, real *out) {
#pragma omp parallel for if (rows * size > SMALL)
    for (long row = 0; row < rows; row++) {
        const real *own = given + row * size;
        if (more) {
            for (long i = 0; i < size; i += LANES)
                store(sum + row * size + i, load(own + i) + load(more + row * size + i));
            own = sum + row * size;
        }
        const float scale = norm_scale(own, size, epsilon);
        for (long i = 0; i < size; i += LANES)
            store(out + row * size + i, load(weight + i) * narrow(load(own + i) * scale));
    }
}

/* SiLU of ``gate`` times ``up``, rows [rows, size] ``stride`` apart; ``size`` is at least 16. */
void gated(long rows, long size, const real *gate, const real *up, long stride, real *out) {
#pragma omp parallel for if (rows * size > SMALL)
    for (long row = 0; row < rows; row++)
        for (long next = 0; next < size; next += LANES) {
            const long i = next < size - LANES ? next : size - LANES; /* the last ones may overlap */
            lanes value = load(gate + row * stride + i);
            value = narrow(value / (exponential(-value) + 1.0f));
            store(out + row * size + i, value * load(up + row * stride + i));
        }
}
