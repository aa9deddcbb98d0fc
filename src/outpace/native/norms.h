/* Norms, and the activation of a feed-forward layer. */

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
static inline void norm_row(const struct norm *own, long size, const real *row, real *out) {
    const lanes zero = {0};
    float mean = 0;
    if (own->kind == LAYER_NORM) {
        lanes sum = {0};
        for (long i = 0; i < size; i += LANES) sum += load(row + i);
        mean = total(sum) / (float)size;
    }
    lanes squares = {0};
    for (long i = 0; i < size; i += LANES) squares += (load(row + i) - mean) * (load(row + i) - mean);
    const float scale = 1.0f / sqrtf(total(squares) / (float)size + own->epsilon);
    for (long i = 0; i < size; i += LANES) {
        lanes value = (load(row + i) - mean) * scale;
        if (own->kind == RMS_NORM) value = narrow(value);
        store(out + i, *(const lanes *)(own->weight + i) * value +
                           (own->bias ? *(const lanes *)(own->bias + i) : zero));
    }
}

/* Norms of rows [rows, size], ``stride`` apart; without a norm, the rows. */
static void norm_rows(const struct norm *own, long rows, long size, const real *given, long stride, real *out,
                      long out_stride) {
#pragma omp parallel for if (rows * size > SMALL)
    for (long row = 0; row < rows; row++) {
        if (own->kind != NO_NORM) norm_row(own, size, given + row * stride, out + row * out_stride);
        else if (out != given) memcpy(out + row * out_stride, given + row * stride, size * sizeof(real));
    }
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

/* The activation of rows [rows, size], times the second half of [rows, 2 * size] where they are gated. */
static void activate(enum activation kind, int gated, long rows, long size, const real *given, real *out) {
    const long stride = gated ? 2 * size : size;
#pragma omp parallel for if (rows * size > SMALL)
    for (long row = 0; row < rows; row++)
        for (long next = 0; next < size; next += LANES) {
            const long i = next < size - LANES ? next : size - LANES; /* the last ones may overlap */
            const lanes value = activated(kind, load(given + row * stride + i));
            store(out + row * size + i, gated ? value * load(given + row * stride + size + i) : value);
        }
}
