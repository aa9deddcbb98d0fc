/* Sums of attention over groups and blocks of columns: dot products of queries with keys, weights, sums of values. */

#pragma once

#include "tiles.h"

#define GROUP 16 /* columns whose products are summed together */
#define BLOCK 64 /* columns converted to float32 together */
#define PAIRED 2 /* vectors of numbers that a tile of queries is multiplied by together */

/* Dot products of a query with GROUP keys. */
static inline __attribute__((always_inline)) void dots_of(int parts, const float *query,
                                                          const float *const *keys, float *out) {
    for (int first = 0; first < GROUP; first += LANES) {
        lanes sums[LANES];
        for (int column = 0; column < LANES; column++) {
            const float *key = keys[first + column];
            lanes sum = *(const lanes *)query * *(const lanes *)key;
            for (int part = 1; part < parts; part++)
                sum = fused(*(const lanes *)(query + part * LANES), *(const lanes *)(key + part * LANES), sum);
            sums[column] = sum;
        }
        for (int left = LANES / 2; left; left /= 2)
            for (int i = 0; i < left; i++)
                sums[i] = shuffled(sums[2 * i], sums[2 * i + 1], EVEN) +
                          shuffled(sums[2 * i], sums[2 * i + 1], ODD);
        *(lanes *)(out + first) = sums[0];
    }
}

/* Add ``count`` values, at most GROUP, by their weights. */
static inline __attribute__((always_inline)) void mix_of(int parts, float *sums, const float *weights,
                                                         const float *const *values, int count) {
    const lanes zero = {0};
    lanes sum[parts];
    for (int part = 0; part < parts; part++) sum[part] = *(lanes *)(sums + part * LANES);
    for (int column = 0; column < count; column++)
        for (int part = 0; part < parts; part++)
            sum[part] = fused(weights[column] - zero, *(const lanes *)(values[column] + part * LANES), sum[part]);
    for (int part = 0; part < parts; part++) *(lanes *)(sums + part * LANES) = sum[part];
}

/* Loops of a known length are several times as fast, so the common sizes of heads have their own form. */
static __attribute__((noinline)) void dots(int size, const float *query, const float *const *keys, float *out) {
    if (size == 64) dots_of(64 / LANES, query, keys, out);
    else if (size == 128) dots_of(128 / LANES, query, keys, out);
    else dots_of(size / LANES, query, keys, out);
}

static __attribute__((noinline)) void mix(int size, float *sums, const float *weights,
                                          const float *const *values, int count) {
    if (size == 64) mix_of(64 / LANES, sums, weights, values, count);
    else if (size == 128) mix_of(128 / LANES, sums, weights, values, count);
    else mix_of(size / LANES, sums, weights, values, count);
}

/* Scores [count] times ``scale``, bent below ``cap``; the numbers up to a multiple of LANES change too. */
static __attribute__((noinline)) void bend(float *scores, int count, float scale, float cap) {
    for (int i = 0; i < count; i += LANES)
        *(lanes *)(scores + i) = bent(*(lanes *)(scores + i) * (scale / cap)) * cap;
}

/* Weights of scores [count], not yet divided by their sum, which is returned. */
static __attribute__((noinline)) float weigh(float *scores, int count) {
    const int whole = (count + LANES - 1) / LANES * LANES;
    for (int i = count; i < whole; i++) scores[i] = -INFINITY;
    lanes most = *(lanes *)scores, sum = {0};
    for (int i = LANES; i < whole; i += LANES) {
        lanes score = *(lanes *)(scores + i);
        most = pick(score > most, score, most);
    }
    float top = most[0];
    for (int lane = 1; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
    for (int i = 0; i < whole; i += LANES) {
        lanes weight = exponential(*(lanes *)(scores + i) - top);
        if (i + LANES > count)
            for (int lane = count - i; lane < LANES; lane++) weight[lane] = 0;
        *(lanes *)(scores + i) = weight;
        sum += weight;
    }
    return total(sum);
}

/* Transpose a square by interleaving its halves again and again. */
static inline void turn(lanes *square) {
    lanes next[LANES];
    for (int left = LANES / 2; left; left /= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = shuffled(square[i], square[i + LANES / 2], LOW);
            next[2 * i + 1] = shuffled(square[i], square[i + LANES / 2], HIGH);
        }
        memcpy(square, next, sizeof next);
    }
}

/* BLOCK keys, transposed: [size, BLOCK]. */
static void transpose(const real *from, int size, float *to) {
    for (int column = 0; column < BLOCK; column += LANES)
        for (int at = 0; at < size; at += LANES) {
            lanes square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = load(from + (column + i) * size + at);
            turn(square);
            for (int i = 0; i < LANES; i++) *(lanes *)(to + (at + i) * BLOCK + column) = square[i];
        }
}

/* Dot products of ``count`` queries with transposed keys, as ``dots`` has them to the last bit: each of its lanes is
   summed for itself, and the sums are added in the order of its tree. */
static inline __attribute__((always_inline)) void cross_of(int count, int size, const float *const *queries,
                                                           const float *keys, float *const *out) {
    const lanes zero = {0};
    for (int first = 0; first < BLOCK; first += PAIRED * LANES) {
        lanes levels[LEVELS + 1][MOST][PAIRED];
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++) {
            lanes sum[MOST][PAIRED];
            int level = 0;
            for (int part = 0; part < PAIRED; part++) {
                const lanes key = *(const lanes *)(keys + lane * BLOCK + first + part * LANES);
                for (int row = 0; row < count; row++) sum[row][part] = queries[row][lane] * key;
            }
            for (int at = lane + LANES; at < size; at += LANES)
                for (int part = 0; part < PAIRED; part++) {
                    const lanes key = *(const lanes *)(keys + at * BLOCK + first + part * LANES);
                    for (int row = 0; row < count; row++)
                        sum[row][part] = fused(queries[row][at] - zero, key, sum[row][part]);
                }
            for (; lane >> level & 1; level++)
                for (int row = 0; row < count; row++)
                    for (int part = 0; part < PAIRED; part++)
                        sum[row][part] = levels[level][row][part] + sum[row][part];
            for (int row = 0; row < count; row++)
                for (int part = 0; part < PAIRED; part++) levels[level][row][part] = sum[row][part];
        }
        for (int row = 0; row < count; row++)
            for (int part = 0; part < PAIRED; part++)
                *(lanes *)(out[row] + first + part * LANES) = levels[LEVELS][row][part];
    }
}

/* Add BLOCK values to the sums of ``count`` queries, by their weights, as ``mix`` does. */
static inline __attribute__((always_inline)) void blend_of(int count, int size, float *const *sums,
                                                           const float *const *weights, const float *values) {
    const lanes zero = {0};
    for (int at = 0; at < size; at += PAIRED * LANES) {
        lanes sum[MOST][PAIRED];
        for (int row = 0; row < count; row++)
            for (int part = 0; part < PAIRED; part++) sum[row][part] = *(lanes *)(sums[row] + at + part * LANES);
        for (int column = 0; column < BLOCK; column++)
            for (int part = 0; part < PAIRED; part++) {
                const lanes value = *(const lanes *)(values + column * size + at + part * LANES);
                for (int row = 0; row < count; row++)
                    sum[row][part] = fused(weights[row][column] - zero, value, sum[row][part]);
            }
        for (int row = 0; row < count; row++)
            for (int part = 0; part < PAIRED; part++) *(lanes *)(sums[row] + at + part * LANES) = sum[row][part];
    }
}

typedef void crossing(int, const float *const *, const float *, float *const *);
typedef void blending(int, float *const *, const float *const *, const float *);
#undef FORM
#define FORM(count)                                                                                          \
    static __attribute__((noinline)) void cross_##count(int size, const float *const *queries,               \
                                                        const float *keys, float *const *out) {              \
        if (size == 64) cross_of(count, 64, queries, keys, out);                                             \
        else if (size == 128) cross_of(count, 128, queries, keys, out);                                      \
        else cross_of(count, size, queries, keys, out);                                                      \
    }                                                                                                        \
    static __attribute__((noinline)) void blend_##count(int size, float *const *sums,                        \
                                                        const float *const *weights, const float *values) {  \
        if (size == 64) blend_of(count, 64, sums, weights, values);                                          \
        else if (size == 128) blend_of(count, 128, sums, weights, values);                                   \
        else blend_of(count, size, sums, weights, values);                                                   \
    }
FORMS
static crossing *const crossings[] = ALL(cross_);
static blending *const blendings[] = ALL(blend_);
