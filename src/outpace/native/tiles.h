/* The layout of weights, and products of a tile of rows with a panel of them. */

#pragma once

#include "numbers.h"
#include "pool.h"

/* Weights in panels (below), or in blocks of ``bits`` 8 or 4 (rounded.h), and a bias [outputs] or NULL. */
struct product {
    int64_t inputs, outputs, bits;
    const void *weights;
    const real *bias;
};

/* Products of rows with weights [outputs, inputs], which are packed in panels of WIDE vectors of outputs:
   [panels, inputs / PAIR, PANEL, PAIR], the last pair filled with zeros. For a tile of rows a panel's sums stay
   in registers. Its weights are read from memory once, for the first tile, and from the cache for the others;
   meanwhile the next panel is fetched. */
#if LANES == 16 || defined(__aarch64__) /* with 32 registers */
#define WIDE 4
#define MOST 6 /* rows of a tile */
#else
#define WIDE 2
#define MOST 5
#endif
#define PANEL (WIDE * LANES)
#define TILES 16      /* tiles whose sums are kept at once */
#define LINE 64       /* bytes of a cache line */
#define DISTANCE 4096 /* bytes that a single tile fetches ahead */
#define DEEP 512      /* inputs that are summed together; their part of a panel stays in the cache */

/* What a panel costs, in weights that are read once: the first tile waits for memory, others for the processor. */
static inline int64_t work_of_panel(int64_t inputs, int64_t outputs, int64_t rows) { return inputs * outputs * ((rows + 7) / 8); }

#ifdef REAL16
#define PAIR 2
#else
#define PAIR 1
#endif

/* PAIR inputs' weights of a vector of outputs, and their product with a row's next PAIR inputs, added to the sums. */
#if defined(REAL16) && defined(__AVX512BF16__)
typedef __m512bh pairs;

static inline pairs pairs_of(const real *weights) { return (pairs)_mm512_loadu_si512(weights); }

static inline lanes step_of(lanes sum, const real *given, pairs weights) {
    int32_t pair;
    memcpy(&pair, given, sizeof pair);
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), weights);
}
#elif defined(REAL16) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define TWO_ROWS /* one instruction multiplies two rows with two outputs; its bits are those of two of ``step_of`` */
typedef bfloat16x8_t pairs;

static inline pairs pairs_of(const real *weights) { return vld1q_bf16((const bfloat16_t *)weights); }

static inline lanes step_of(lanes sum, const real *given, pairs weights) {
    uint32_t pair;
    memcpy(&pair, given, sizeof pair);
    return (lanes)vbfdotq_f32((float32x4_t)sum, weights, vreinterpretq_bf16_u32(vdupq_n_u32(pair)));
}
#elif defined(REAL16)
typedef struct {
    lanes even, odd;
} pairs;

static inline pairs pairs_of(const real *weights) {
    const bits both = *(const bits *)weights;
    return (pairs){(lanes)(both << 16), (lanes)(both & 0xffff0000u)};
}

static inline lanes step_of(lanes sum, const real *given, pairs weights) {
    const bits zero = {0};
    sum += (lanes)(zero + ((uint32_t)given[0] << 16)) * weights.even;
    return sum + (lanes)(zero + ((uint32_t)given[1] << 16)) * weights.odd;
}
#else
typedef lanes pairs;

static inline pairs pairs_of(const real *weights) { return *(const lanes *)weights; }

static inline lanes step_of(lanes sum, const real *given, pairs weights) { return sum + *given * weights; }
#endif

#ifdef TWO_ROWS
/* Add the products of two steps of ``count`` rows to the sums of ``tile_of``; of two rows, these are the outputs 0 and 1 of
   both in the first one's, 2 and 3 in the other's. */
static inline __attribute__((always_inline)) void two_steps(int count, const real *given, int64_t stride, pairs first,
                                                            pairs next, lanes (*sum)[WIDE], int part) {
    const uint32x4_t a = vreinterpretq_u32_bf16(first), b = vreinterpretq_u32_bf16(next);
    const pairs low = vreinterpretq_bf16_u32(vzip1q_u32(a, b)), high = vreinterpretq_bf16_u32(vzip2q_u32(a, b));
    for (int row = 0; row + 1 < count; row += 2) {
        const bfloat16_t *const own = (const bfloat16_t *)given + row * stride;
        const pairs two = vcombine_bf16(vld1_bf16(own), vld1_bf16(own + stride));
        sum[row][part] = (lanes)vbfmmlaq_f32((float32x4_t)sum[row][part], two, low);
        sum[row + 1][part] = (lanes)vbfmmlaq_f32((float32x4_t)sum[row + 1][part], two, high);
    }
    if (count % 2) {
        lanes *const last = &sum[count - 1][part];
        const real *const own = given + (count - 1) * stride;
        *last = step_of(step_of(*last, own, first), own + PAIR, next);
    }
}

/* The sums of two rows, each for itself. */
static inline void part_rows(lanes *one, lanes *other) {
    const float64x2_t a = (float64x2_t)*one, b = (float64x2_t)*other;
    *one = (lanes)vzip1q_f64(a, b);
    *other = (lanes)vzip2q_f64(a, b);
}
#endif

/* Add the products of ``steps`` pairs of inputs of ``count`` rows to the sums. Tile ``turn`` of ``turns`` fetches
   its share of the bytes at ``ahead``. */
static inline __attribute__((always_inline)) void tile_of(int count, const real *given, int64_t stride,
                                                          const real *weights, int64_t steps, float *sums,
                                                          const char *ahead, int turn, int turns) {
    const int64_t size = PANEL * PAIR * sizeof(real); /* bytes of a step */
    lanes sum[MOST][WIDE] = {0};
    int64_t step = 0;
#ifdef TWO_ROWS
    for (; step + 1 < steps; step += 2) {
        const real *const own = weights + step * PANEL * PAIR;
        for (int64_t at = 0; turns == 1 && at < 2 * size; at += LINE) __builtin_prefetch(ahead + step * size + at, 0, 3);
        for (int part = 0; part < WIDE; part++)
            two_steps(count, given + step * PAIR, stride, pairs_of(own + part * LANES * PAIR),
                      pairs_of(own + (PANEL + part * LANES) * PAIR), sum, part);
    }
    for (int row = 0; row + 1 < count; row += 2)
        for (int part = 0; part < WIDE; part++) part_rows(&sum[row][part], &sum[row + 1][part]);
#endif
    for (; step < steps; step++) {
        const char *next = ahead + step * size;
        if (turns == 1) {
            for (int64_t at = 0; at < size; at += LINE) __builtin_prefetch(next + at, 0, 3);
        } else if (turn-- == 0) { /* not into the nearest cache, which holds this panel's */
            for (int64_t at = 0; at < size; at += LINE) __builtin_prefetch(next + at, 0, 2);
            turn = turns - 1;
        }
        for (int part = 0; part < WIDE; part++) {
            const pairs own = pairs_of(weights + (step * PANEL + part * LANES) * PAIR);
            for (int row = 0; row < count; row++)
                sum[row][part] = step_of(sum[row][part], given + row * stride + step * PAIR, own);
        }
    }
    for (int row = 0; row < count; row++)
        for (int part = 0; part < WIDE; part++) *(lanes *)(sums + row * PANEL + part * LANES) += sum[row][part];
}

typedef void tile(const real *, int64_t, const real *, int64_t, float *, const char *, int, int);
#define FORM(count)                                                                                          \
    static __attribute__((noinline)) void tile_##count(const real *given, int64_t stride, const real *weights,  \
                                                       int64_t steps, float *sums, const char *ahead, int turn, \
                                                       int turns) {                                          \
        tile_of(count, given, stride, weights, steps, sums, ahead, turn, turns);                             \
    }
#if MOST == 6
#define FORMS FORM(1) FORM(2) FORM(3) FORM(4) FORM(5) FORM(6)
#define ALL(name) {name##1, name##2, name##3, name##4, name##5, name##6}
#else
#define FORMS FORM(1) FORM(2) FORM(3) FORM(4) FORM(5)
#define ALL(name) {name##1, name##2, name##3, name##4, name##5}
#endif
FORMS
static tile *const tiles[] = ALL(tile_);

#if PAIR == 2 && !defined(__AVX512BF16__) && !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define WIDENED /* with many rows, weights and rows are converted to float32 once, not for each tile */
static inline __attribute__((always_inline)) void wide_tile_of(int count, const float *given, int64_t stride,
                                                               const float *weights, int64_t inputs, float *sums) {
    const lanes zero = {0};
    lanes sum[MOST][WIDE] = {0};
    for (int64_t at = 0; at < inputs; at++)
        for (int part = 0; part < WIDE; part++) {
            const lanes own = *(const lanes *)(weights + at * PANEL + part * LANES);
            for (int row = 0; row < count; row++)
                sum[row][part] = fused(given[row * stride + at] - zero, own, sum[row][part]);
        }
    for (int row = 0; row < count; row++)
        for (int part = 0; part < WIDE; part++) *(lanes *)(sums + row * PANEL + part * LANES) += sum[row][part];
}

typedef void wide_tile(const float *, int64_t, const float *, int64_t, float *);
#undef FORM
#define FORM(count)                                                                                          \
    static __attribute__((noinline)) void wide_tile_##count(const float *given, int64_t stride,                 \
                                                            const float *weights, int64_t inputs, float *sums) { \
        wide_tile_of(count, given, stride, weights, inputs, sums);                                           \
    }
FORMS
static wide_tile *const wide_tiles[] = ALL(wide_tile_);

/* ``steps`` pairs of inputs' weights of a panel in float32: [2 * steps, PANEL]. */
static void widen_panel(const real *weights, int64_t steps, float *to) {
    for (int64_t step = 0; step < steps; step++)
        for (int part = 0; part < WIDE; part++) {
            const pairs own = pairs_of(weights + (step * PANEL + part * LANES) * PAIR);
            *(lanes *)(to + 2 * step * PANEL + part * LANES) = own.even;
            *(lanes *)(to + (2 * step + 1) * PANEL + part * LANES) = own.odd;
        }
}
#endif
