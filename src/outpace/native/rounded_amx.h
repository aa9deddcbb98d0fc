/* Products of many rows with weights in blocks, by squares of integers. A block's sums of integers are those of
   rounded.h, and are scaled and summed in its order: a row has the same bits by both. */

#pragma once

#include "amx.h"
#include "rounded.h"

#ifdef SQUARED_WHOLE
#define LEAST_SQUARED 7 /* rows, of which other instructions are no quicker */
#define AHEAD 2         /* blocks: a register waits long for memory that has just been written */
#define RING (2 * AHEAD)
#define MEASURES (2 * SIDE) /* of a block of a group of rows: their scales, and their sums times the scales */

/* Set the rows of the registers: 0 and 1 are sums, 4 the rows, of which ``share`` inputs are summed, 6 weights. */
static void shape_blocks(int rows, int share) {
    const uint8_t some = (uint8_t)rows, quads = (uint8_t)(share / 4);
    const struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } sizes = {.palette = 1, .bytes = {64, 64, [4] = (uint16_t)share, [6] = 64}, .rows = {some, some, [4] = some, [6] = quads}};
    __asm__ volatile("ldtilecfg %0" ::"m"(sizes));
}

/* Sums of all rows, in register ``sum``, [rows, ACROSS]. */
#define SUMS_OF_BLOCK(sum, type, numbers, stride, weights, to)                                               \
    do {                                                                                                     \
        __asm__ volatile("tilezero %%tmm" #sum ::);                                                          \
        SQUARE(4, numbers, stride);                                                                          \
        SQUARE(6, weights, QUAD);                                                                            \
        __asm__ volatile(type " %%tmm6, %%tmm4, %%tmm" #sum ::);                                             \
        SQUARE_OUT(sum, to, 4 * ACROSS);                                                                     \
    } while (0)

/* The numbers of a block of 4 bits, [QUADS, ACROSS, 4]. */
static inline __attribute__((always_inline)) void open_block(const char *weights, int8_t *to) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int i = 0; i < QUADS / 2; i++) {
        const __m512i both = _mm512_loadu_si512(weights + i * QUAD);
        _mm512_store_si512(to + i * QUAD, _mm512_and_si512(both, low));
        _mm512_store_si512(to + (QUADS / 2 + i) * QUAD, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
    }
}

/* Add a block's sums of integers, [rows, ACROSS], each scaled: with ``least`` by its rows' sums too. */
static inline __attribute__((always_inline)) void add_scaled(int rows, int least, const int32_t *whole,
                                                             const float *by, across scale, across lower,
                                                             across *sums) {
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++) {
        const across exact = __builtin_convertvector(*(const across_ints *)(whole + row * ACROSS), across);
        sums[row] = fused_across(exact, scale * by[row], sums[row]);
        if (least) sums[row] = fused_across(lower, by[SIDE + row] - (across){0}, sums[row]);
    }
}

/* Products of a group of rows, at most ``room``, whose numbers are ``stride`` bytes apart, with a panel: [room, ACROSS].
   ``measures``: [blocks, MEASURES]. */
static inline __attribute__((always_inline)) void squares_of_blocks(int room, int bits, const char *weights,
                                                                    int64_t blocks, const int8_t *numbers,
                                                                    int64_t stride, const float *measures,
                                                                    across *out) {
    const int64_t head = bits == 8 ? 2 * ACROSS : 4 * ACROSS, size = head + SHARE * ACROSS * bits / 8;
    const across none = {0};
    across sums[SIDE];
    int32_t whole[RING][SIDE * ACROSS] __attribute__((aligned(64)));
    int8_t opened[RING][QUADS * QUAD] __attribute__((aligned(64)));
#pragma GCC unroll 16
    for (int row = 0; row < room; row++) sums[row] = none;
    for (int64_t at = 0; at < blocks + 2 * AHEAD; at++) {
        const int64_t summed = at - AHEAD, scaled = at - 2 * AHEAD;
        if (at < blocks) {
            const char *const own = weights + at * size;
            for (int64_t i = 0; i < size; i += LINE) __builtin_prefetch(own + DISTANCE / 2 + i, 0, 3);
            if (bits == 4) open_block(own + head, opened[at % RING]);
        }
        if (summed >= 0 && summed < blocks) {
            const char *const own = weights + summed * size + head;
            const int8_t *const given = numbers + summed * SHARE;
            int32_t *const to = whole[summed % RING];
            if (bits == 8 && summed % 2) SUMS_OF_BLOCK(1, "tdpbssd", given, stride, own, to);
            else if (bits == 8) SUMS_OF_BLOCK(0, "tdpbssd", given, stride, own, to);
            else if (summed % 2) SUMS_OF_BLOCK(1, "tdpbsud", given, stride, opened[summed % RING], to);
            else SUMS_OF_BLOCK(0, "tdpbsud", given, stride, opened[summed % RING], to);
        }
        if (scaled >= 0) {
            const char *const own = weights + scaled * size;
            const across zero = bits == 4 ? scales_of(own + 2 * ACROSS) : none;
            const float *const by = measures + scaled * MEASURES;
            add_scaled(room, bits == 4, whole[scaled % RING], by, scales_of(own), zero, sums);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < room; row++) out[row] = sums[row];
}

typedef void squares_form(const char *, int64_t, const int8_t *, int64_t, const float *, across *);
#define SQUARES_FORM(bits, room)                                                                             \
    static __attribute__((noinline)) void squares_##bits##_##room(                                           \
        const char *weights, int64_t blocks, const int8_t *numbers, int64_t stride, const float *measures,   \
        across *out) {                                                                                       \
        squares_of_blocks(room, bits, weights, blocks, numbers, stride, measures, out);                      \
    }
SQUARES_FORM(8, 8) SQUARES_FORM(8, 16) SQUARES_FORM(4, 8) SQUARES_FORM(4, 16)

/* Where the measures of a row's group are, [blocks, MEASURES]. */
static inline float *measures_of(float *all, int64_t row, int64_t blocks) { return all + row / SIDE * blocks * MEASURES; }

static inline void measure_row(const struct rounded_row *from, float *all, int64_t row, int64_t blocks) {
    float *const to = measures_of(all, row, blocks) + row % SIDE;
    for (int64_t block = 0; block < blocks; block++) {
        to[block * MEASURES] = from->scales[block];
        to[block * MEASURES + SIDE] = from->sums[block];
    }
}
#endif
