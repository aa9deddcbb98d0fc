/* The rows of a forward, and how they come into attention: normed, rotated, written to the cache. */

#pragma once

#include "amx.h"
#include "norms.h"

/* The rows of a forward, and the columns that each attends to: ``run`` ones from ``first`` on, and then
   ``count - run`` ones in ``columns`` from ``start`` on, in ascending order; none for padding. */
struct rows {
    int32_t rows, sequences, heads, shared, size; /* ``shared``: heads that have keys */
    const int32_t *order, *begin; /* rows by sequence; where each sequence's begin, [sequences + 1] */
    const int32_t *sequence;      /* [rows] */
    const int32_t *place;         /* [rows]: the cache row that each is written to; -1 for padding */
    const int32_t *first, *run, *count, *start, *columns;
    const real *cosine, *sine; /* [rows, size]; NULL: queries are rotated, keys and values in the cache already */
    float *queries;            /* [rows, heads, size]: workspace; of ``real`` for products of squares */
};

/* A layer's rows as its products gave them, ``stride`` apart, and where its keys and values are. */
struct heads {
    const real *query, *key, *value;
    int64_t query_stride, key_stride, value_stride;
    const real *query_norm, *key_norm; /* weights of the heads' norms, or NULL */
    float epsilon, scale;
    real *keys, *values;
    int64_t sequence_stride, head_stride; /* of keys and values */
    real *out;                            /* [rows, heads, size] */
};

static inline lanes normed(const real *head, const real *weight, float scale, int at) {
    return weight ? narrow(load(weight + at) * narrow(load(head + at) * scale)) : load(head + at);
}

/* Rotate a head's query or key, after its norm if it has one. To float32, scaled, or to ``real``. */
static inline void rotate(const struct rows *rows, long row, const real *head, const real *weight,
                          float epsilon, float factor, float *wide, real *out) {
    const int half = rows->size / 2;
    const real *cosine = rows->cosine + row * rows->size, *sine = rows->sine + row * rows->size;
    const float scale = weight ? norm_scale(head, rows->size, epsilon) : 1.0f;
    for (int i = 0; i < half; i += LANES) {
        lanes low = normed(head, weight, scale, i), high = normed(head, weight, scale, i + half);
        lanes first = low * load(cosine + i) - high * load(sine + i);
        lanes second = high * load(cosine + i + half) + low * load(sine + i + half);
        if (wide) {
            *(lanes *)(wide + i) = narrow(first) * factor;
            *(lanes *)(wide + i + half) = narrow(second) * factor;
        } else {
            store(out + i, first);
            store(out + i + half, second);
        }
    }
}

/* A query as it is: to float32, scaled, or to ``real``. */
static inline void take(const struct rows *rows, const real *head, float factor, float *wide, real *out) {
    for (int i = 0; i < rows->size; i += LANES)
        if (wide) *(lanes *)(wide + i) = load(head + i) * factor;
        else store(out + i, load(head + i));
}

static void enter(const struct rows *rows, const struct heads *heads, long row) {
    const int size = rows->size;
    if (rows->place[row] < 0) return;
    for (int head = 0; head < rows->heads; head++) {
        const int64_t at = (row * rows->heads + head) * size;
#ifdef SQUARED
        float *const wide = squared() ? NULL : rows->queries + at;
#else
        float *const wide = rows->queries + at;
#endif
        const real *const query = heads->query + row * heads->query_stride + head * size;
        real *const out = (real *)rows->queries + at;
        if (rows->cosine) rotate(rows, row, query, heads->query_norm, heads->epsilon, heads->scale, wide, out);
        else take(rows, query, heads->scale, wide, out);
    }
    if (!rows->cosine) return;
    for (int head = 0; head < rows->shared; head++) {
        const int64_t at = rows->sequence[row] * heads->sequence_stride + head * heads->head_stride +
                           (int64_t)rows->place[row] * size;
        rotate(rows, row, heads->key + row * heads->key_stride + head * size, heads->key_norm,
               heads->epsilon, 1.0f, NULL, heads->keys + at);
        const real *value = heads->value + row * heads->value_stride + head * size;
        for (int i = 0; i < size; i += LANES) store(heads->values + at + i, load(value + i));
    }
}
