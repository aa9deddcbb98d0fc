/* The rows of a forward, and how they come into attention: normed, rotated, written to the cache. */

#pragma once

#include "amx.h"
#include "norms.h"

/* The rows of a forward, and the columns that each attends to: ``run`` ones from ``first`` on, and then
   ``count - run`` ones in ``columns`` from ``start`` on, in ascending order; none for padding. */
struct rows {
    int32_t rows, sequences, heads, shared, size; /* ``shared``: heads that have keys */
    int32_t rotary, interleaved;  /* numbers of a head that are rotated; neighbours together, or halves */
    const int32_t *order, *begin; /* rows by sequence; where each sequence's begin, [sequences + 1] */
    const int32_t *sequence;      /* [rows] */
    const int32_t *place;         /* [rows]: the cache row that each is written to; -1 for padding */
    const int32_t *first, *run, *count, *start, *columns;
    const int32_t *angle;         /* [rows]: the row of the angles; NULL: each row has its own */
    const real *cosine, *sine; /* [angles, rotary]; NULL: queries are rotated, keys and values in the cache already */
    float *queries;            /* [rows, heads, size]: workspace; of ``real`` for products of squares */
};

/* The keys and values of a sequence in a layer's cache; each head's ``head_stride`` apart. */
struct held {
    real *keys, *values;
    int64_t head_stride;
};

/* A layer's rows as its products gave them, ``stride`` apart, and where its keys and values are. */
struct heads {
    const real *query, *key, *value;
    int64_t query_stride, key_stride, value_stride;
    float scale;
    float cap;                        /* scores are bent below it; 0: none */
    const struct norm *each_query, *each_key; /* norms of each head, or NULL */
    real *keys, *values;
    int64_t sequence_stride, head_stride; /* of keys and values */
    const struct held *held;              /* [sequences]; NULL: as the strides say */
    real *out;                            /* [rows, heads, size] */
};

static inline struct held held_of(const struct heads *heads, int sequence) {
    if (heads->held) return heads->held[sequence];
    const int64_t at = sequence * heads->sequence_stride;
    return (struct held){heads->keys + at, heads->values + at, heads->head_stride};
}

static inline int64_t angles_of(const struct rows *rows, int64_t row) {
    return (int64_t)(rows->angle ? rows->angle[row] : row) * rows->rotary;
}

/* Rotate a head's query or key. To float32, scaled, or to ``real``. */
static inline void rotate(const struct rows *rows, int64_t row, const real *head, float factor, float *wide, real *out) {
    const int half = rows->size / 2;
    const real *cosine = rows->cosine + angles_of(rows, row), *sine = rows->sine + angles_of(rows, row);
    for (int i = 0; i < half; i += LANES) {
        lanes low = load(head + i), high = load(head + i + half);
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

/* ``rotate`` for heads of which a part is rotated, or neighbours together. */
static void rotate_part(const struct rows *rows, int64_t row, const real *head, float factor, float *wide, real *out) {
    const int rotary = rows->rotary, half = rotary / 2, next = rows->interleaved ? 1 : half;
    float line[rows->size], cosine[rotary + 1], sine[rotary + 1];
    widen(head, rows->size, line);
    widen(rows->cosine + angles_of(rows, row), rotary, cosine);
    widen(rows->sine + angles_of(rows, row), rotary, sine);
    for (int i = 0; i < half; i++) {
        const int at = rows->interleaved ? 2 * i : i;
        const float low = line[at], high = line[at + next];
        line[at] = low * cosine[i] - high * sine[i];
        line[at + next] = high * cosine[i] + low * sine[i];
    }
    for (int i = 0; i < rows->size; i += LANES)
        if (wide) *(lanes *)(wide + i) = narrow(*(lanes *)(line + i)) * factor;
        else store(out + i, *(lanes *)(line + i));
}

/* A head's query or key after its norm, in ``room`` if it has one. */
static inline const real *own_norm(const struct norm *norm, int64_t size, const real *head, real *room) {
    if (!norm || !norm->kind) return head;
    norm_row(norm, size, head, room);
    return room;
}

/* A query as it is: to float32, scaled, or to ``real``. */
static inline void take(const struct rows *rows, const real *head, float factor, float *wide, real *out) {
    for (int i = 0; i < rows->size; i += LANES)
        if (wide) *(lanes *)(wide + i) = load(head + i) * factor;
        else store(out + i, load(head + i));
}

static void enter(const struct rows *rows, const struct heads *heads, int64_t row) {
    const int size = rows->size;
    const int part = rows->cosine && (rows->rotary < size || rows->interleaved);
    real room[size];
    if (rows->place[row] < 0) return;
    for (int head = 0; head < rows->heads; head++) {
        const int64_t at = (row * rows->heads + head) * size;
#ifdef SQUARED
        float *const wide = squared() ? NULL : rows->queries + at;
#else
        float *const wide = rows->queries + at;
#endif
        const real *const query =
            own_norm(heads->each_query, size, heads->query + row * heads->query_stride + head * size, room);
        real *const out = (real *)rows->queries + at;
        if (part) rotate_part(rows, row, query, heads->scale, wide, out);
        else if (rows->cosine) rotate(rows, row, query, heads->scale, wide, out);
        else take(rows, query, heads->scale, wide, out);
    }
    if (!rows->cosine) return;
    const struct held held = held_of(heads, rows->sequence[row]);
    for (int head = 0; head < rows->shared; head++) {
        const int64_t at = head * held.head_stride + (int64_t)rows->place[row] * size;
        const real *const key =
            own_norm(heads->each_key, size, heads->key + row * heads->key_stride + head * size, room);
        if (part) rotate_part(rows, row, key, 1.0f, NULL, held.keys + at);
        else rotate(rows, row, key, 1.0f, NULL, held.keys + at);
        const real *value = heads->value + row * heads->value_stride + head * size;
        for (int i = 0; i < size; i += LANES) store(held.values + at + i, load(value + i));
    }
}
