/* Attention of the queries of a sequence and a head. */

#pragma once

#include "rows.h"
#include "dots.h"

#ifdef SQUARED
#define TILE 64
#else
#define TILE 60 /* queries that share a converted block: a multiple of any MOST */
#endif
#define FEW 6    /* queries for which a block of keys is not transposed */

/* Pointers to the rows of a query's columns ``from`` .. ``from + GROUP - 1``; beyond its last, to zeros. */
static inline void point(const struct rows *rows, int row, int from, const float *near, int begin,
                         const float *zeros, const float **to) {
    const int size = rows->size, first = rows->first[row], run = rows->run[row], count = rows->count[row];
    const int32_t *rest = rows->columns + rows->start[row] - run;
    for (int i = 0; i < GROUP; i++) {
        const int at = from + i;
        if (at >= count) to[i] = zeros;
        else to[i] = near + (int64_t)((at < run ? first + at : rest[at]) - begin) * size;
    }
}

/* Queries of one sequence and one head. All of them attend to the ``far`` columns from ``lead`` on, a multiple of
   BLOCK, which are converted a block at a time; the others, near ones, are among those from ``begin`` to ``end``. */
struct tile {
    int count, lead, far, begin, end, longest; /* ``longest``: number of columns of a query, at most */
    int row[TILE], skipped[TILE];              /* each query's row, and the number of its columns before far ones */
    const float *query[TILE];
    float *score[TILE], *sum[TILE], total[TILE];
    const float *near_keys, *near_values, *zeros;
    float *block; /* room for BLOCK rows */
};

/* Scores of a query's columns ``from`` .. ``to - 1``, which are near, and the sums of their values. */
static void score_near(const struct rows *rows, const struct tile *tile, int i, int from, int to) {
    const float *near[GROUP];
    for (int column = from; column < to; column += GROUP) {
        point(rows, tile->row[i], column, tile->near_keys, tile->begin, tile->zeros, near);
        dots(rows->size, tile->query[i], near, tile->score[i] + column);
    }
}

static void mix_near(const struct rows *rows, const struct tile *tile, int i, int from, int to) {
    const float *near[GROUP];
    for (int column = from; column < to; column += GROUP) {
        point(rows, tile->row[i], column, tile->near_values, tile->begin, tile->zeros, near);
        mix(rows->size, tile->sum[i], tile->score[i] + column, near, to - column < GROUP ? to - column : GROUP);
    }
}

/* The place in a table of the form for a tile's queries from one on. */
static inline int together(const struct tile *tile, int from) {
    return (tile->count - from < MOST ? tile->count - from : MOST) - 1;
}

/* Scores of the far columns, and the sums of their values; FEW queries and more share what they load. */
static void score_far(const struct tile *tile, int size, const real *keys) {
    const float *rows[BLOCK];
    float *out[TILE];
    for (int i = 0; i < BLOCK; i++) rows[i] = tile->block + i * size;
    for (int column = 0; column < tile->far; column += BLOCK) {
        for (int i = 0; i < tile->count; i++) out[i] = tile->score[i] + tile->skipped[i] + column;
        if (tile->count < FEW) {
            widen(keys + (int64_t)column * size, BLOCK * size, tile->block);
            for (int i = 0; i < tile->count; i++)
                for (int some = 0; some < BLOCK; some += GROUP)
                    dots(size, tile->query[i], rows + some, out[i] + some);
        } else {
            transpose(keys + (int64_t)column * size, size, tile->block);
            for (int i = 0; i < tile->count; i += MOST)
                crossings[together(tile, i)](size, tile->query + i, tile->block, out + i);
        }
    }
}

static void mix_far(const struct tile *tile, int size, const real *values) {
    const float *rows[BLOCK], *weights[TILE];
    for (int i = 0; i < BLOCK; i++) rows[i] = tile->block + i * size;
    for (int column = 0; column < tile->far; column += BLOCK) {
        widen(values + (int64_t)column * size, BLOCK * size, tile->block);
        for (int i = 0; i < tile->count; i++) weights[i] = tile->score[i] + tile->skipped[i] + column;
        if (tile->count < FEW) {
            for (int i = 0; i < tile->count; i++)
                for (int some = 0; some < BLOCK; some += GROUP)
                    mix(size, tile->sum[i], weights[i] + some, rows + some, GROUP);
        } else {
            for (int i = 0; i < tile->count; i += MOST)
                blendings[together(tile, i)](size, tile->sum + i, weights + i, tile->block);
        }
    }
}

/* The columns of the rows of queries ``from`` .. ``to - 1`` among those of a sequence and a head; rows of padding have
   none, and zeros as a result. */
static void survey(const struct rows *rows, const struct heads *heads, const int32_t *order, int head, int from,
                   int to, struct tile *tile) {
    const int size = rows->size, group = rows->heads / rows->shared;
    int least = INT32_MAX, whole = INT32_MAX; /* where the first row begins, where the first run ends */
    tile->count = tile->lead = tile->longest = tile->end = 0;
    for (int i = from; i < to; i++) {
        const int row = order[i / group], count = rows->count[row];
        const int first = rows->first[row], run = rows->run[row];
        const int64_t at = ((int64_t)row * rows->heads + head * group + i % group) * size;
        if (!count) {
            memset(heads->out + at, 0, size * sizeof(real));
            continue;
        }
        const int last = count > run ? rows->columns[rows->start[row] + count - run - 1] : first + run - 1;
        least = first < least ? first : least;
        whole = first + run < whole ? first + run : whole;
        if (first > tile->lead) tile->lead = first;
        if (count > tile->longest) tile->longest = count;
        if (last >= tile->end) tile->end = last + 1;
        tile->row[tile->count] = row;
        tile->skipped[tile->count] = first;
        tile->query[tile->count++] = rows->queries + at;
    }
    if (!tile->count) return;
    tile->far = whole > tile->lead ? (whole - tile->lead) / BLOCK * BLOCK : 0;
    tile->begin = tile->far && tile->lead == least ? tile->lead + tile->far : least;
    if (tile->end < tile->begin) tile->end = tile->begin;
    for (int i = 0; i < tile->count; i++) tile->skipped[i] = tile->far ? tile->lead - tile->skipped[i] : 0;
}

/* Attention of queries ``from`` .. ``to - 1`` of one sequence over one head's keys. Returns 1 if out of memory. */
static int attend(const struct rows *rows, const struct heads *heads, int sequence, int head, int from, int to) {
    const int size = rows->size;
    struct tile tile;
    survey(rows, heads, rows->order + rows->begin[sequence], head, from, to, &tile);
    if (!tile.count) return 0;
    const int64_t room = tile.longest + GROUP, near = (int64_t)(tile.end - tile.begin) * size;
    float *const scores = workspace(tile.count * (room + size) + (BLOCK + 1) * size + 2 * near + 64);
    if (!scores) return 1;
    float *const sums = scores + tile.count * room, *const zeros = sums + tile.count * size;
    float *const keys = zeros + size + BLOCK * size, *const values = keys + near;
    const struct held held = held_of(heads, sequence);
    const real *const own_keys = held.keys + head * held.head_stride, *const own_values = held.values + head * held.head_stride;
    memset(sums, 0, (tile.count + 1) * size * sizeof(float));
    widen(own_keys + (int64_t)tile.begin * size, near, keys);
    widen(own_values + (int64_t)tile.begin * size, near, values);
    tile.block = zeros + size;
    tile.zeros = zeros, tile.near_keys = keys, tile.near_values = values;
    for (int i = 0; i < tile.count; i++) {
        tile.score[i] = scores + i * room;
        tile.sum[i] = sums + i * size;
        score_near(rows, &tile, i, 0, tile.skipped[i]); /* before the others: its last group reaches into theirs */
    }
    score_far(&tile, size, own_keys + (int64_t)tile.lead * size);
    for (int i = 0; i < tile.count; i++) {
        const int count = rows->count[tile.row[i]];
        score_near(rows, &tile, i, tile.skipped[i] + tile.far, count);
        if (heads->cap) bend(tile.score[i], count, 1.0f, heads->cap);
        tile.total[i] = weigh(tile.score[i], count);
        mix_near(rows, &tile, i, 0, tile.skipped[i]);
    }
    mix_far(&tile, size, own_values + (int64_t)tile.lead * size);
    for (int i = 0; i < tile.count; i++) {
        real *out = heads->out + (tile.query[i] - rows->queries);
        mix_near(rows, &tile, i, tile.skipped[i] + tile.far, rows->count[tile.row[i]]);
        for (int part = 0; part < size; part += LANES)
            store(out + part, *(lanes *)(tile.sum[i] + part) / tile.total[i]);
    }
    return 0;
}
