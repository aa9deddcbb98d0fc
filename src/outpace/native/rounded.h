/* Products of rows with weights of 8 or 4 bits. Both are rounded in blocks of SHARE inputs: a row's to 8 bits and a
   scale; an output's to 8 bits and a scale, or to 4 bits (0 to 15), a scale and a zero. A block's product is a sum of
   integers, which has no order; blocks are summed in their order, so a row has the same bits among any rows.

   Weights: [panels of EIGHT outputs, blocks], each block with EIGHT scales, with 4 bits EIGHT zeros, both bfloat16, and
   numbers [QUADS of inputs, EIGHT, 4]. With 4 bits two quads share bytes; that of the block's first half has the low
   ones. */

#pragma once

#include "tiles.h"

#define EIGHT 8
#define SHARE 32
#define QUADS (SHARE / 4)
#define TOGETHER 4 /* rows whose sums are in registers together */

typedef float eight __attribute__((vector_size(32), aligned(4)));
typedef int32_t eight_ints __attribute__((vector_size(32), aligned(4)));
typedef uint32_t eight_bits __attribute__((vector_size(32), aligned(4)));
typedef int8_t few __attribute__((vector_size(LANES), aligned(1)));
typedef uint16_t eight_halves __attribute__((vector_size(16), aligned(2)));

/* A row's numbers, [blocks, SHARE], with each block's scale, and its sum times the scale. */
struct rounded_row {
    int8_t *numbers;
    float *scales, *sums;
};

/* The last block is filled with zeros. Where a number is not finite, all products are not. */
static void round_row(const real *row, long inputs, const struct rounded_row *to) {
    const lanes zero = {0};
    for (long block = 0; block * SHARE < inputs; block++) {
        const long count = inputs - block * SHARE < SHARE ? inputs - block * SHARE : SHARE;
        real part[SHARE] = {0};
        lanes most = zero, wrong = zero;
        ints sum = {0};
        memcpy(part, row + block * SHARE, count * sizeof(real));
        for (int i = 0; i < SHARE; i += LANES) {
            const lanes number = load(part + i), size = (lanes)((bits)number & 0x7fffffff);
            most = pick(size > most, size, most);
            wrong += number * 0.0f;
        }
        float top = most[0];
        for (int lane = 1; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
        const float inverse = top > 1e-30f ? 127.0f / top : 0, spoilt = total(wrong); /* 0, or not a number */
        for (int i = 0; i < SHARE; i += LANES) { /* the sum with a large number rounds to an integer */
            const lanes scaled = spoilt == 0 ? load(part + i) * inverse : zero;
            const ints number = __builtin_convertvector((scaled + 12582912.0f) - 12582912.0f, ints);
            *(few *)(to->numbers + block * SHARE + i) = __builtin_convertvector(number, few);
            sum += number;
        }
        int32_t whole = 0;
        for (int lane = 0; lane < LANES; lane++) whole += sum[lane];
        to->scales[block] = top / 127.0f + spoilt;
        to->sums[block] = to->scales[block] * (float)whole;
    }
}

static inline eight scales_of(const void *from) {
    return (eight)(__builtin_convertvector(*(const eight_halves *)from, eight_bits) << 16);
}

static inline eight fused_eight(eight a, eight b, eight c) {
#if defined(__AVX2__) && defined(__FMA__)
    return (eight)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

#if defined(__AVX2__)
/* Sums of four products each, of a quad of numbers with those of EIGHT outputs. */
static inline __m256i quad(const int8_t *numbers) {
    int32_t four;
    memcpy(&four, numbers, sizeof four);
    return _mm256_set1_epi32(four);
}

static inline __attribute__((always_inline)) void sums_of_8(int count, const int8_t *weights,
                                                            const int8_t *const *numbers, eight_ints *sums) {
    __m256i sum[TOGETHER];
    for (int row = 0; row < count; row++) sum[row] = _mm256_setzero_si256();
    for (int i = 0; i < QUADS; i++) {
        const __m256i own = _mm256_loadu_si256((const __m256i *)(weights + i * SHARE)), size = _mm256_abs_epi8(own);
        for (int row = 0; row < count; row++) {
            const __m256i signs = _mm256_sign_epi8(quad(numbers[row] + i * 4), own);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
            sum[row] = _mm256_dpbusd_epi32(sum[row], size, signs);
#else /* two products of 127 times 127 fit 16 bits */
            sum[row] = _mm256_add_epi32(
                sum[row], _mm256_madd_epi16(_mm256_maddubs_epi16(size, signs), _mm256_set1_epi16(1)));
#endif
        }
    }
    for (int row = 0; row < count; row++) sums[row] = (eight_ints)sum[row];
}

static inline __attribute__((always_inline)) void sums_of_4(int count, const int8_t *weights,
                                                            const int8_t *const *numbers, eight_ints *sums) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i sum[TOGETHER];
    for (int row = 0; row < count; row++) sum[row] = _mm256_setzero_si256();
    for (int i = 0; i < QUADS / 2; i++) {
        const __m256i both = _mm256_loadu_si256((const __m256i *)(weights + i * SHARE));
        const __m256i first = _mm256_and_si256(both, low), last = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        for (int row = 0; row < count; row++) {
            const __m256i former = quad(numbers[row] + i * 4), latter = quad(numbers[row] + SHARE / 2 + i * 4);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
            sum[row] = _mm256_dpbusd_epi32(_mm256_dpbusd_epi32(sum[row], first, former), last, latter);
#else /* sixteen products of 15 times 127 fit 16 bits */
            sum[row] = _mm256_add_epi16(sum[row], _mm256_add_epi16(_mm256_maddubs_epi16(first, former),
                                                                   _mm256_maddubs_epi16(last, latter)));
#endif
        }
    }
    for (int row = 0; row < count; row++)
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        sums[row] = (eight_ints)sum[row];
#else
        sums[row] = (eight_ints)_mm256_madd_epi16(sum[row], _mm256_set1_epi16(1));
#endif
}
#else
static inline void sums_of_8(int count, const int8_t *weights, const int8_t *const *numbers, eight_ints *sums) {
    for (int row = 0; row < count; row++)
        for (int output = 0; output < EIGHT; output++) {
            sums[row][output] = 0;
            for (int i = 0; i < SHARE; i++)
                sums[row][output] += weights[i / 4 * SHARE + output * 4 + i % 4] * numbers[row][i];
        }
}

static inline void sums_of_4(int count, const int8_t *weights, const int8_t *const *numbers, eight_ints *sums) {
    for (int row = 0; row < count; row++)
        for (int output = 0; output < EIGHT; output++) {
            sums[row][output] = 0;
            for (int i = 0; i < SHARE / 2; i++) {
                const uint8_t both = (uint8_t)weights[i / 4 * SHARE + output * 4 + i % 4];
                sums[row][output] += (both & 15) * numbers[row][i] + (both >> 4) * numbers[row][SHARE / 2 + i];
            }
        }
}
#endif

/* Products of ``count`` rows, at most TOGETHER, with a panel of ``size`` bytes a block: [count, EIGHT]. */
static inline __attribute__((always_inline)) void panel_of_blocks(int count, int bits, const char *weights,
                                                                  long blocks, const struct rounded_row *rows,
                                                                  eight *sums) {
    const long head = bits == 8 ? 2 * EIGHT : 4 * EIGHT, size = head + SHARE * EIGHT * bits / 8;
    for (int row = 0; row < count; row++) sums[row] = (eight){0};
    for (long block = 0; block < blocks; block++) {
        const char *own = weights + block * size;
        const int8_t *numbers[TOGETHER];
        eight_ints whole[TOGETHER];
        for (long at = 0; at < size; at += LINE) __builtin_prefetch(own + DISTANCE / 2 + at, 0, 3);
        for (int row = 0; row < count; row++) numbers[row] = rows[row].numbers + block * SHARE;
        if (bits == 8) sums_of_8(count, (const int8_t *)own + head, numbers, whole);
        else sums_of_4(count, (const int8_t *)own + head, numbers, whole);
        const eight scale = scales_of(own), none = {0};
        for (int row = 0; row < count; row++) {
            const eight exact = __builtin_convertvector(whole[row], eight);
            sums[row] = fused_eight(exact, scale * rows[row].scales[block], sums[row]);
            if (bits == 4)
                sums[row] = fused_eight(scales_of(own + 2 * EIGHT), rows[row].sums[block] - none, sums[row]);
        }
    }
}

typedef void panel_form(const char *, long, const struct rounded_row *, eight *);
#define PANEL_FORM(bits, count)                                                                              \
    static __attribute__((noinline)) void blocks_##bits##_##count(const char *weights, long blocks,          \
                                                                  const struct rounded_row *rows,            \
                                                                  eight *sums) {                             \
        panel_of_blocks(count, bits, weights, blocks, rows, sums);                                           \
    }
PANEL_FORM(8, 1) PANEL_FORM(8, 2) PANEL_FORM(8, 3) PANEL_FORM(8, 4)
PANEL_FORM(4, 1) PANEL_FORM(4, 2) PANEL_FORM(4, 3) PANEL_FORM(4, 4)
static panel_form *const forms_of_8[] = {blocks_8_1, blocks_8_2, blocks_8_3, blocks_8_4};
static panel_form *const forms_of_4[] = {blocks_4_1, blocks_4_2, blocks_4_3, blocks_4_4};

/* Add the biases of outputs from ``first`` on to a row's sums, and round them. */
static inline void finish(const struct product *product, long first, long count, const eight *sums, real *out) {
    float numbers[EIGHT > LANES ? EIGHT : LANES] = {0};
    real biases[EIGHT > LANES ? EIGHT : LANES] = {0}, line[EIGHT > LANES ? EIGHT : LANES];
    memcpy(numbers, sums, sizeof *sums);
    if (product->bias) memcpy(biases, product->bias + first, count * sizeof(real));
    for (int i = 0; i < EIGHT; i += LANES) store(line + i, *(lanes *)(numbers + i) + load(biases + i));
    memcpy(out + first, line, count * sizeof(real));
}

/* ``multiply`` for weights in blocks. Returns 1 if out of memory. */
static int multiply_blocks(const struct product *product, long rows, const real *given, real *out) {
    const long inputs = product->inputs, outputs = product->outputs, blocks = (inputs + SHARE - 1) / SHARE;
    const long panels = (outputs + EIGHT - 1) / EIGHT;
    const long size = blocks * ((product->bits == 8 ? 2 : 4) * EIGHT + SHARE * EIGHT * product->bits / 8);
    panel_form *const *forms = product->bits == 8 ? forms_of_8 : forms_of_4;
    float *const room = workspace(rows * blocks * (SHARE / 4 + 2) + rows * (sizeof(struct rounded_row) / 4));
    if (!room) return 1;
    struct rounded_row *const rounded = (struct rounded_row *)room;
    float *const scales = (float *)(rounded + rows);
    for (long row = 0; row < rows; row++) {
        float *const own = scales + row * blocks * (SHARE / 4 + 2);
        rounded[row] = (struct rounded_row){(int8_t *)(own + 2 * blocks), own, own + blocks};
    }
#pragma omp parallel if (rows * inputs * outputs > SMALL)
    {
#pragma omp for
        for (long row = 0; row < rows; row++) round_row(given + row * inputs, inputs, rounded + row);
#pragma omp for
        for (long panel = 0; panel < panels; panel++) {
            const long first = panel * EIGHT, count = outputs - first < EIGHT ? outputs - first : EIGHT;
            for (long row = 0; row < rows; row += TOGETHER) {
                const long some = rows - row < TOGETHER ? rows - row : TOGETHER;
                eight sums[TOGETHER];
                forms[some - 1]((const char *)product->weights + panel * size, blocks, rounded + row, sums);
                for (long i = 0; i < some; i++) finish(product, first, count, sums + i, out + (row + i) * outputs);
            }
        }
    }
    return 0;
}
