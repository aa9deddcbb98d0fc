/* The best of logits. */

#pragma once

#include "numbers.h"
#include "pool.h"

/* LANES numbers of a row from a place on; minus infinity beyond its end. */
static inline lanes part_of(const real *row, int64_t at, int64_t size) {
    const lanes zero = {0};
    if (at + LANES <= size) return load(row + at);
    real line[LANES];
    store(line, zero - INFINITY);
    memcpy(line, row + at, (size - at) * sizeof(real));
    return load(line);
}

struct ranking {
    int64_t size, count;
    const real *given;
    float *scores;
    int64_t *places;
    float *totals;
};

static void rank_row(void *given, int64_t row) {
    const lanes zero = {0};
    const struct ranking *const job = given;
    const int64_t size = job->size, count = job->count;
    const real *own = job->given + row * size;
    float *top = job->scores + row * count;
    int64_t *where = job->places + row * count;
    int64_t held = 0;
    for (int64_t at = 0; at < size; at += LANES) {
        const lanes value = part_of(own, at, size);
        if (held == count) {
            const ints above = value > zero + top[count - 1];
            int32_t any = 0;
            for (int lane = 0; lane < LANES; lane++) any |= above[lane];
            if (!any) continue;
        }
        for (int lane = 0; lane < LANES && at + lane < size; lane++) {
            if (held == count && !(value[lane] > top[count - 1])) continue;
            int64_t place = held < count ? held++ : count - 1;
            for (; place && value[lane] > top[place - 1]; place--) {
                top[place] = top[place - 1];
                where[place] = where[place - 1];
            }
            top[place] = value[lane];
            where[place] = at + lane;
        }
    }
    lanes sum = {0};
    for (int64_t at = 0; at < size; at += LANES) sum += exponential(part_of(own, at, size) - top[0]);
    job->totals[row] = top[0] + logf(total(sum));
}

/* The ``count`` greatest numbers of each row [rows, size], at most all: in descending order, the first of equal ones
   first, with their places. ``totals``: the logarithm of the sum of the exponentials of a whole row. */
void best(int64_t rows, int64_t size, int64_t count, const real *given, float *scores, int64_t *places, float *totals) {
    struct ranking job = {size, count, given, scores, places, totals};
    share(rows, rank_row, &job);
}
