/* Attention by products of squares. */

#pragma once

#include "amx.h"
#include "attention.h"

#ifdef SQUARED
#define PART 256 /* columns whose values are paired together, a multiple of BLOCK */

/* BLOCK keys, of which ``count`` are there, as weights of squares: [size / PAIR, BLOCK, PAIR]. */
static void pair_keys(const real *from, int count, int size, real *to) {
    for (int column = 0; column < BLOCK; column += SIDE)
        for (int at = 0; at < size; at += DEPTH) {
            lanes square[LANES] = {0};
            for (int i = 0; i < SIDE && column + i < count; i++)
                square[i] = *(const lanes *)(from + (column + i) * size + at);
            turn(square);
            for (int i = 0; i < SIDE; i++) *(lanes *)(to + ((at / PAIR + i) * BLOCK + column) * PAIR) = square[i];
        }
}

/* Values of DEPTH columns, NULL for none, as weights of squares: [SIDE, size, PAIR]. */
static inline void pair_values(const real *const *from, int size, real *to) {
    static const real none[DEPTH];
    const __m512i both = _mm512_set1_epi32(DEPTH << 16); /* an element of each: i and DEPTH + i */
    const __m512i first = _mm512_add_epi32(
        both, _mm512_mullo_epi32(_mm512_set1_epi32(0x10001), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)));
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(SIDE << 16 | SIDE));
    for (int i = 0; i < SIDE; i++)
        for (int at = 0; at < size; at += DEPTH) {
            const __m512i a = _mm512_loadu_si512(from[2 * i] ? from[2 * i] + at : none);
            const __m512i b = _mm512_loadu_si512(from[2 * i + 1] ? from[2 * i + 1] + at : none);
            real *out = to + (i * size + at) * PAIR;
            _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, first, b));
            _mm512_storeu_si512(out + DEPTH, _mm512_permutex2var_epi16(a, second, b));
        }
}

/* Weights of scores [count] times ``scale``, not yet divided by their sum, which is returned: in bfloat16 in the place of
   the scores, with zeros up to a multiple of DEPTH. */
static __attribute__((noinline)) float weigh_pairs(float *scores, int count, float scale) {
    const int whole = (count + LANES - 1) / LANES * LANES;
    const float powers = scale * 1.44269504f; /* of two, not of e */
    real *const to = (real *)scores;
    for (int i = count; i < whole; i++) scores[i] = -INFINITY;
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int i = 0; i < whole; i += LANES) most = _mm512_max_ps(_mm512_loadu_ps(scores + i), most);
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most) * powers), factor = _mm512_set1_ps(powers);
    const __m512 least = _mm512_set1_ps(-126.0f), round = _mm512_set1_ps(12582912.0f);
    for (int i = 0; i < whole; i += LANES) {
        const __m512 power = _mm512_max_ps(least, _mm512_fmsub_ps(_mm512_loadu_ps(scores + i), factor, top));
        const __m512 count_of = _mm512_add_ps(power, round);
        const __m512 rest = _mm512_sub_ps(power, _mm512_sub_ps(count_of, round));
        __m512 weight = _mm512_set1_ps(1.3333558e-3f); /* 2 to the power of the rest, to about 2e-7 of it */
        weight = _mm512_fmadd_ps(weight, rest, _mm512_set1_ps(9.6181291e-3f));
        weight = _mm512_fmadd_ps(weight, rest, _mm512_set1_ps(5.5504109e-2f));
        weight = _mm512_fmadd_ps(weight, rest, _mm512_set1_ps(2.4022651e-1f));
        weight = _mm512_fmadd_ps(weight, rest, _mm512_set1_ps(6.9314718e-1f));
        weight = _mm512_fmadd_ps(weight, rest, _mm512_set1_ps(1.0f));
        const __m512i raised = _mm512_slli_epi32(_mm512_castps_si512(count_of), 23);
        weight = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(weight), raised));
        if (i + LANES > count)
            weight = _mm512_maskz_mov_ps((__mmask16)((1u << (count - i)) - 1), weight);
        _mm256_storeu_si256((__m256i *)(to + i), (__m256i)_mm512_cvtneps_pbh(weight));
        sum = _mm512_add_ps(sum, weight);
    }
    if (whole % DEPTH) _mm256_storeu_si256((__m256i *)(to + whole), _mm256_setzero_si256());
    return total((lanes)sum);
}

/* ``attend`` by products of squares. Columns are multiplied DEPTH at a time from a query's first one on; those that all
   queries have in one place, together. Scores are of all columns from the least to the last, and a query takes its
   own. */
static int attend_squared(const struct rows *rows, const struct heads *heads, int sequence, int head, int from,
                          int to) {
    const int size = rows->size;
    struct tile tile;
    survey(rows, heads, rows->order + rows->begin[sequence], head, from, to, &tile);
    if (!tile.count) return 0;
    int apart = 0;
    for (int i = 0; i < tile.count; i++) apart |= tile.skipped[i];
    if (apart) tile.far = 0;
    const int wide = (tile.end - tile.begin + BLOCK - 1) / BLOCK * BLOCK;
    const int64_t room = (tile.longest + 2 * BLOCK) / LANES * LANES;
    float *const scores = workspace(tile.count * (room + wide + 2 * size) + (BLOCK + PART) * size);
    if (!scores) return 1;
    float *const near = scores + tile.count * room, *const sums = near + tile.count * wide;
    real *const queries = (real *)(sums + tile.count * size), *const paired = queries + tile.count * size;
    const struct held held = held_of(heads, sequence);
    const real *const keys = held.keys + head * held.head_stride, *const values = held.values + head * held.head_stride;
    memset(sums, 0, tile.count * size * sizeof(float));
    for (int i = 0; i < tile.count; i++)
        memcpy(queries + i * size, (const real *)rows->queries + (tile.query[i] - rows->queries), size * sizeof(real));
    for (int column = 0; column < tile.far; column += BLOCK) {
        pair_keys(keys + (int64_t)(tile.lead + column) * size, BLOCK, size, paired);
        square(tile.count, queries, size, paired, BLOCK, BLOCK, size / DEPTH, scores + column, room, 1);
    }
    for (int column = 0; column < wide; column += BLOCK) {
        pair_keys(keys + (int64_t)(tile.begin + column) * size, tile.end - tile.begin - column, size, paired);
        square(tile.count, queries, size, paired, BLOCK, BLOCK, size / DEPTH, near + column, wide, 1);
    }
    for (int i = 0; i < tile.count; i++) {
        const int row = tile.row[i], run = rows->run[row], count = rows->count[row];
        const float *own = near + (int64_t)i * wide - tile.begin;
        const int32_t *rest = rows->columns + rows->start[row] - run;
        if (run > tile.far)
            memcpy(scores + i * room + tile.far, own + rows->first[row] + tile.far, (run - tile.far) * sizeof(float));
        for (int column = run; column < count; column++) scores[i * room + column] = own[rest[column]];
        if (heads->cap) bend(scores + i * room, count, heads->scale, heads->cap);
        tile.total[i] = weigh_pairs(scores + i * room, count, heads->cap ? 1.0f : heads->scale);
    }
    const real *places[DEPTH];
    for (int first = 0; first < tile.far; first += PART) {
        const int some = tile.far - first < PART ? tile.far - first : PART;
        for (int column = 0; column < some; column += DEPTH) {
            for (int i = 0; i < DEPTH; i++) places[i] = values + (int64_t)(tile.lead + first + column + i) * size;
            pair_values(places, size, paired + column * size);
        }
        square(tile.count, (const real *)scores + first, 2 * room, paired, size, size, some / DEPTH, sums, size, 0);
    }
    for (int i = 0; i < tile.count; i++) {
        const int row = tile.row[i], first = rows->first[row], run = rows->run[row], count = rows->count[row];
        const int32_t *rest = rows->columns + rows->start[row] - run;
        for (int column = tile.far; column < count; column += DEPTH) {
            for (int j = 0; j < DEPTH; j++) {
                const int place = column + j;
                places[j] = place < count ? values + (int64_t)(place < run ? first + place : rest[place]) * size : NULL;
            }
            pair_values(places, size, paired);
            square(1, (const real *)(scores + i * room) + column, 2 * room, paired, size, size, 1, sums + i * size,
                   size, 0);
        }
        real *out = heads->out + (tile.query[i] - rows->queries);
        for (int part = 0; part < size; part += LANES)
            store(out + part, *(lanes *)(sums + i * size + part) / tile.total[i]);
    }
    __asm__ volatile("tilerelease");
    return 0;
}
#endif
