/* Products of rows with weights of 8 or 4 bits. Both are rounded in blocks of SHARE inputs: a row's to 8 bits and a
   scale; an output's to 8 bits and a scale, or to 4 bits (0 to 15), a scale and a zero. A block's product is a sum of
   integers, which has no order; blocks are summed in their order, so a row has the same bits among any rows.

   Weights: [panels of ACROSS outputs, blocks], each block with ACROSS scales, with 4 bits ACROSS zeros, both bfloat16,
   and numbers [QUADS of inputs, ACROSS, 4]. With 4 bits two quads share bytes; that of the block's first half has the low
   ones. */

#pragma once

#include "tiles.h"

#define SHARE 32
#define QUADS (SHARE / 4)
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define ACROSS 16  /* outputs of a panel */
#define TOGETHER 8 /* rows whose sums are in registers together */
#else
#define ACROSS 8
#define TOGETHER 4
#endif
#define QUAD (4 * ACROSS) /* numbers of a panel's quad */

typedef float across __attribute__((vector_size(4 * ACROSS), aligned(4)));
typedef int32_t across_ints __attribute__((vector_size(4 * ACROSS), aligned(4)));
typedef uint32_t across_bits __attribute__((vector_size(4 * ACROSS), aligned(4)));
typedef uint16_t across_halves __attribute__((vector_size(2 * ACROSS), aligned(2)));
typedef int8_t few __attribute__((vector_size(LANES), aligned(1)));

/* A row's numbers, [blocks, SHARE], with each block's scale, its sum times the scale, and the sums of its halves. */
struct rounded_row {
    int8_t *numbers;
    float *scales, *sums;
    int32_t *halves;
    const float *given; /* the row as it was, behind these, if it is needed */
};
#define NUMBERS_OF_BLOCK (SHARE / 4 + 4)

/* A row in memory for ``blocks`` times NUMBERS_OF_BLOCK floats. */
static inline struct rounded_row rounded_row_at(float *at, int64_t blocks) {
    return (struct rounded_row){.numbers = (int8_t *)(at + 4 * blocks),
                                .scales = at,
                                .sums = at + blocks,
                                .halves = (int32_t *)(at + 2 * blocks),
                                .given = at + NUMBERS_OF_BLOCK * blocks};
}

/* The greatest of integers, and their sum: one by one, they would take most of the time of rounding. */
static inline int32_t greatest(ints of) {
#if LANES == 16
    return _mm512_reduce_max_epi32((__m512i)of);
#elif defined(__aarch64__)
    return vmaxvq_s32((int32x4_t)of);
#else
    int32_t top = of[0];
    for (int lane = 1; lane < LANES; lane++) top = of[lane] > top ? of[lane] : top;
    return top;
#endif
}

static inline int32_t sum_of(ints of) {
#if LANES == 16
    return _mm512_reduce_add_epi32((__m512i)of);
#elif defined(__aarch64__)
    return vaddvq_s32((int32x4_t)of);
#else
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += of[lane];
    return sum;
#endif
}

/* The last block is filled with zeros. Where a number is not finite, all products are not. */
static void round_row(const real *row, int64_t inputs, const struct rounded_row *to) {
    const lanes zero = {0};
    for (int64_t block = 0; block * SHARE < inputs; block++) {
        const int64_t count = inputs - block * SHARE < SHARE ? inputs - block * SHARE : SHARE;
        real part[SHARE] = {0};
        if (count < SHARE) memcpy(part, row + block * SHARE, count * sizeof(real));
        const real *const from = count < SHARE ? part : row + block * SHARE;
        ints most = {0}; /* without their signs floats have the order of integers, and those that are not finite are last */
        int32_t halves[2] = {0};
        for (int i = 0; i < SHARE; i += LANES) {
            const ints size = (ints)load(from + i) & 0x7fffffff;
            most = (ints)pick(size > most, (lanes)size, (lanes)most);
        }
        const int32_t raw = greatest(most);
        const int spoilt = raw >= 0x7f800000;
        float top;
        memcpy(&top, &raw, sizeof top);
        const float inverse = !spoilt && top > 1e-30f ? 127.0f / top : 0;
        for (int i = 0; i < SHARE; i += LANES) { /* the sum with a large number rounds to an integer */
            const lanes scaled = spoilt ? zero : load(from + i) * inverse;
            const ints number = __builtin_convertvector((scaled + 12582912.0f) - 12582912.0f, ints);
            *(few *)(to->numbers + block * SHARE + i) = __builtin_convertvector(number, few);
            halves[i / (SHARE / 2)] += sum_of(number);
        }
        to->scales[block] = spoilt ? NAN : top / 127.0f;
        to->sums[block] = to->scales[block] * (float)(halves[0] + halves[1]);
        memcpy(to->halves + 2 * block, halves, sizeof halves);
    }
}

static inline across scales_of(const char *from) {
#if ACROSS == 16 /* gcc 12 converts halves of it */
    return (across)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    return (across)(__builtin_convertvector(*(const across_halves *)from, across_bits) << 16);
#endif
}

#if defined(__aarch64__) /* gcc converts vectors of two registers one by one */
static inline across floats_of_wholes(across_ints wholes) {
    int32x4_t from[2];
    memcpy(from, &wholes, sizeof from);
    const float32x4_t to[2] = {vcvtq_f32_s32(from[0]), vcvtq_f32_s32(from[1])};
    across floats;
    memcpy(&floats, to, sizeof to);
    return floats;
}
#else
#define floats_of_wholes(wholes) __builtin_convertvector(wholes, across)
#endif

static inline across fused_across(across a, across b, across c) {
#if ACROSS == 16
    return (across)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (across)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

#if ACROSS == 16
/* Sums of four products each, of a quad of numbers with those of ACROSS outputs. */
static inline __m512i quad(const int8_t *numbers) {
    int32_t four;
    memcpy(&four, numbers, sizeof four);
    return _mm512_set1_epi32(four);
}

/* Sums of products of a block of ``count`` rows. The instruction takes weights without signs: 128 is added to those of
   8 bits, and sums begin with minus what that adds. */
static inline __attribute__((always_inline)) void sums_of(int count, int bits, const int8_t *weights,
                                                          const struct rounded_row *rows, int64_t block,
                                                          across_ints *sums) {
    const __m512i low = _mm512_set1_epi8(15), above = _mm512_set1_epi8(-128);
    __m512i sum[TOGETHER];
    for (int row = 0; row < count; row++)
        sum[row] = bits == 8 ? _mm512_set1_epi32(-128 * (rows[row].halves[2 * block] + rows[row].halves[2 * block + 1]))
                             : _mm512_setzero_si512();
    for (int i = 0; i < QUADS * bits / 8; i++) {
        const __m512i own = _mm512_loadu_si512(weights + i * QUAD);
        const __m512i first = bits == 8 ? _mm512_xor_si512(own, above) : _mm512_and_si512(own, low);
        const __m512i last = _mm512_and_si512(_mm512_srli_epi16(own, 4), low);
        for (int row = 0; row < count; row++) {
            const int8_t *numbers = rows[row].numbers + block * SHARE + i * 4;
            sum[row] = _mm512_dpbusd_epi32(sum[row], first, quad(numbers));
            if (bits == 4) sum[row] = _mm512_dpbusd_epi32(sum[row], last, quad(numbers + SHARE / 2));
        }
    }
    for (int row = 0; row < count; row++) sums[row] = (across_ints)sum[row];
}
#else
#if defined(__AVX2__)
/* Sums of four products each, of a quad of numbers with those of ACROSS outputs. */
static inline __m256i quad(const int8_t *numbers) {
    int32_t four;
    memcpy(&four, numbers, sizeof four);
    return _mm256_set1_epi32(four);
}

static inline __attribute__((always_inline)) void sums_of_8(int count, const int8_t *weights,
                                                            const int8_t *const *numbers, across_ints *sums) {
    __m256i sum[TOGETHER];
    for (int row = 0; row < count; row++) sum[row] = _mm256_setzero_si256();
    for (int i = 0; i < QUADS; i++) {
        const __m256i own = _mm256_loadu_si256((const __m256i *)(weights + i * QUAD)), size = _mm256_abs_epi8(own);
        for (int row = 0; row < count; row++) { /* two products of 127 times 127 fit 16 bits */
            const __m256i signs = _mm256_sign_epi8(quad(numbers[row] + i * 4), own);
            sum[row] = _mm256_add_epi32(
                sum[row], _mm256_madd_epi16(_mm256_maddubs_epi16(size, signs), _mm256_set1_epi16(1)));
        }
    }
    for (int row = 0; row < count; row++) sums[row] = (across_ints)sum[row];
}

static inline __attribute__((always_inline)) void sums_of_4(int count, const int8_t *weights,
                                                            const int8_t *const *numbers, across_ints *sums) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i sum[TOGETHER];
    for (int row = 0; row < count; row++) sum[row] = _mm256_setzero_si256();
    for (int i = 0; i < QUADS / 2; i++) {
        const __m256i both = _mm256_loadu_si256((const __m256i *)(weights + i * QUAD));
        const __m256i first = _mm256_and_si256(both, low), last = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        for (int row = 0; row < count; row++) { /* sixteen products of 15 times 127 fit 16 bits */
            const __m256i former = quad(numbers[row] + i * 4), latter = quad(numbers[row] + SHARE / 2 + i * 4);
            sum[row] = _mm256_add_epi16(sum[row], _mm256_add_epi16(_mm256_maddubs_epi16(first, former),
                                                                   _mm256_maddubs_epi16(last, latter)));
        }
    }
    for (int row = 0; row < count; row++)
        sums[row] = (across_ints)_mm256_madd_epi16(sum[row], _mm256_set1_epi16(1));
}
#elif defined(__aarch64__)
/* Four numbers, in each four lanes. */
static inline int8x16_t quad(const int8_t *numbers) {
    int32_t four;
    memcpy(&four, numbers, sizeof four);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

/* Four sums of four products each, added to sums; two products, of which at most one number is -128, fit 16 bits. */
static inline int32x4_t dot(int32x4_t sums, int8x16_t one, int8x16_t other) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sums, one, other);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(one), vget_low_s8(other)), high = vmull_high_s8(one, other);
    return vpadalq_s16(sums, vpaddq_s16(low, high));
#endif
}

/* Sums of four products each, of a quad of numbers with those of ACROSS outputs, added to the sums. */
static inline __attribute__((always_inline)) across_ints plus_products(across_ints sums, int8x16_t first, int8x16_t last,
                                                                       int8x16_t numbers) {
    int32x4_t half[2];
    memcpy(half, &sums, sizeof half);
    half[0] = dot(half[0], first, numbers);
    half[1] = dot(half[1], last, numbers);
    memcpy(&sums, half, sizeof half);
    return sums;
}

/* Add the products of eight of the numbers of ``count`` rows, from ``at`` on, with two quads of ACROSS outputs. One
   instruction multiplies two rows with two outputs: then these are the four sums, until ``put_sums``. */
static inline __attribute__((always_inline)) void plus_eight(int count, const int8x16_t *first, const int8x16_t *last,
                                                             const int8_t *const *numbers, int at,
                                                             int32x4_t (*sums)[2]) {
    int row = 0;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    for (; row + 1 < count; row += 2) {
        const int8x16_t two = vcombine_s8(vld1_s8(numbers[row] + at), vld1_s8(numbers[row + 1] + at));
        for (int half = 0; half < 2; half++) {
            const int32x4_t a = vreinterpretq_s32_s8(first[half]), b = vreinterpretq_s32_s8(last[half]);
            sums[row][half] = vmmlaq_s32(sums[row][half], two, vreinterpretq_s8_s32(vzip1q_s32(a, b)));
            sums[row + 1][half] = vmmlaq_s32(sums[row + 1][half], two, vreinterpretq_s8_s32(vzip2q_s32(a, b)));
        }
    }
#endif
    for (; row < count; row++)
        for (int half = 0; half < 2; half++) {
            sums[row][half] = dot(sums[row][half], first[half], quad(numbers[row] + at));
            sums[row][half] = dot(sums[row][half], last[half], quad(numbers[row] + at + 4));
        }
}

static inline __attribute__((always_inline)) void put_sums(int count, int32x4_t (*from)[2], across_ints *sums) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    for (int row = 0; row + 1 < count; row += 2)
        for (int half = 0; half < 2; half++) {
            const int64x2_t a = vreinterpretq_s64_s32(from[row][half]), b = vreinterpretq_s64_s32(from[row + 1][half]);
            from[row][half] = vreinterpretq_s32_s64(vzip1q_s64(a, b));
            from[row + 1][half] = vreinterpretq_s32_s64(vzip2q_s64(a, b));
        }
#endif
    for (int row = 0; row < count; row++) memcpy(sums + row, from[row], sizeof *sums);
}

static inline __attribute__((always_inline)) void sums_of_8(int count, const int8_t *weights,
                                                            const int8_t *const *numbers, across_ints *sums) {
    int32x4_t sum[TOGETHER][2] = {0};
    for (int i = 0; i < QUADS; i += 2) {
        int8x16_t own[2][2];
        memcpy(own, weights + i * QUAD, sizeof own);
        plus_eight(count, own[0], own[1], numbers, i * 4, sum);
    }
    put_sums(count, sum, sums);
}

static inline __attribute__((always_inline)) void sums_of_4(int count, const int8_t *weights,
                                                            const int8_t *const *numbers, across_ints *sums) {
    int32x4_t sum[TOGETHER][2] = {0};
    for (int i = 0; i < QUADS / 2; i += 2) {
        uint8x16_t own[4];
        int8x16_t low[4], high[4];
        memcpy(own, weights + i * QUAD, sizeof own);
        for (int part = 0; part < 4; part++) {
            low[part] = vreinterpretq_s8_u8(vandq_u8(own[part], vdupq_n_u8(15)));
            high[part] = vreinterpretq_s8_u8(vshrq_n_u8(own[part], 4));
        }
        plus_eight(count, low, low + 2, numbers, i * 4, sum);
        plus_eight(count, high, high + 2, numbers, SHARE / 2 + i * 4, sum);
    }
    put_sums(count, sum, sums);
}
#else
static inline void sums_of_8(int count, const int8_t *weights, const int8_t *const *numbers, across_ints *sums) {
    for (int row = 0; row < count; row++)
        for (int output = 0; output < ACROSS; output++) {
            sums[row][output] = 0;
            for (int i = 0; i < SHARE; i++)
                sums[row][output] += weights[i / 4 * QUAD + output * 4 + i % 4] * numbers[row][i];
        }
}

static inline void sums_of_4(int count, const int8_t *weights, const int8_t *const *numbers, across_ints *sums) {
    for (int row = 0; row < count; row++)
        for (int output = 0; output < ACROSS; output++) {
            sums[row][output] = 0;
            for (int i = 0; i < SHARE / 2; i++) {
                const uint8_t both = (uint8_t)weights[i / 4 * QUAD + output * 4 + i % 4];
                sums[row][output] += (both & 15) * numbers[row][i] + (both >> 4) * numbers[row][SHARE / 2 + i];
            }
        }
}
#endif

static inline __attribute__((always_inline)) void sums_of(int count, int bits, const int8_t *weights,
                                                          const struct rounded_row *rows, int64_t block,
                                                          across_ints *sums) {
    const int8_t *numbers[TOGETHER];
    for (int row = 0; row < count; row++) numbers[row] = rows[row].numbers + block * SHARE;
    if (bits == 8) sums_of_8(count, weights, numbers, sums);
    else sums_of_4(count, weights, numbers, sums);
}
#endif

/* Products of ``count`` rows, at most TOGETHER, with a panel: [count, ACROSS]. */
static inline __attribute__((always_inline)) void panel_of_blocks(int count, int bits, const char *weights,
                                                                  int64_t blocks, const struct rounded_row *rows,
                                                                  across *out) {
    const int64_t head = bits == 8 ? 2 * ACROSS : 4 * ACROSS, size = head + SHARE * ACROSS * bits / 8;
    const across none = {0};
    across sums[TOGETHER];
    for (int row = 0; row < count; row++) sums[row] = none;
    for (int64_t block = 0; block < blocks; block++) {
        const char *own = weights + block * size;
        across_ints whole[TOGETHER];
        for (int64_t at = 0; at < size; at += LINE) __builtin_prefetch(own + DISTANCE / 2 + at, 0, 3);
        sums_of(count, bits, (const int8_t *)own + head, rows, block, whole);
        const across scale = scales_of(own);
        for (int row = 0; row < count; row++) {
            const across exact = floats_of_wholes(whole[row]);
            sums[row] = fused_across(exact, scale * rows[row].scales[block], sums[row]);
            if (bits == 4)
                sums[row] = fused_across(scales_of(own + 2 * ACROSS), rows[row].sums[block] - none, sums[row]);
        }
    }
    for (int row = 0; row < count; row++) out[row] = sums[row];
}

typedef void panel_form(const char *, int64_t, const struct rounded_row *, across *);
#define PANEL_FORM(bits, count)                                                                              \
    static __attribute__((noinline)) void blocks_##bits##_##count(                                           \
        const char *weights, int64_t blocks, const struct rounded_row *rows, across *out) {                     \
        panel_of_blocks(count, bits, weights, blocks, rows, out);                                            \
    }
PANEL_FORM(8, 1) PANEL_FORM(8, 2) PANEL_FORM(8, 3) PANEL_FORM(8, 4)
PANEL_FORM(4, 1) PANEL_FORM(4, 2) PANEL_FORM(4, 3) PANEL_FORM(4, 4)
#if TOGETHER == 8
PANEL_FORM(8, 5) PANEL_FORM(8, 6) PANEL_FORM(8, 7) PANEL_FORM(8, 8)
PANEL_FORM(4, 5) PANEL_FORM(4, 6) PANEL_FORM(4, 7) PANEL_FORM(4, 8)
#define ALL_FORMS(name) {name##1, name##2, name##3, name##4, name##5, name##6, name##7, name##8}
#else
#define ALL_FORMS(name) {name##1, name##2, name##3, name##4}
#endif
static panel_form *const forms_of_8[] = ALL_FORMS(blocks_8_), *const forms_of_4[] = ALL_FORMS(blocks_4_);

/* Add the biases of outputs from ``first`` on to a row's sums, and round them. */
static inline void finish(const struct product *product, int64_t first, int64_t count, const across *sums, real *out) {
#if ACROSS < LANES
    const lanes numbers[1] = {(lanes)_mm512_zextps256_ps512((__m256)*sums)}; /* waits for no store */
    const int64_t room = LANES;
#else
    const int64_t room = ACROSS;
    const float *const numbers = (const float *)sums;
#endif
    real biases[ACROSS > LANES ? ACROSS : LANES] = {0}, line[ACROSS > LANES ? ACROSS : LANES];
    const int whole = count == room;
    if (product->bias && !whole) memcpy(biases, product->bias + first, count * sizeof(real));
    const real *const bias = product->bias && whole ? product->bias + first : biases;
    real *const to = whole ? out + first : line;
    for (int64_t i = 0; i < ACROSS; i += LANES) store(to + i, *(const lanes *)((const float *)numbers + i) + load(bias + i));
    if (!whole) memcpy(out + first, line, count * sizeof(real));
}
