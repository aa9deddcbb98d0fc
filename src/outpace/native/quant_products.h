/* Products of rows with panels of quants.h. */

#pragma once

#include "quants.h"
#include "rounded_amx.h"

struct quant_part {
    int64_t outputs;
    int32_t type;
    const uint8_t *weights; /* [panels, quant_panel] */
};

/* The weights of a product: of some outputs each, one after the other. */
struct quants {
    int32_t parts;
    const struct quant_part *part;
};

typedef uint8_t quad_codes __attribute__((vector_size(QUAD), aligned(1)));
typedef uint16_t quad_pairs __attribute__((vector_size(QUAD), aligned(1)));

static inline across halves_of(const uint8_t *from) {
#if ACROSS == 16
    return (across)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    return (across)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    across value;
    const float16x8_t halves = vreinterpretq_f16_u8(vld1q_u8(from));
    const float32x4_t parts[2] = {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
    memcpy(&value, parts, sizeof value);
    return value;
#else
    across value;
    for (int i = 0; i < ACROSS; i++) value[i] = float_of_half(half_at(from + 2 * i));
    return value;
#endif
}

static inline across wholes_of(const uint8_t *from) {
    across_ints wide; /* a compiler may convert bytes one by one */
#if ACROSS == 16
    wide = (across_ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    wide = (across_ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#elif defined(__aarch64__)
    const int16x8_t numbers = vmovl_s8(vld1_s8((const int8_t *)from));
    const int32x4_t parts[2] = {vmovl_s16(vget_low_s16(numbers)), vmovl_high_s16(numbers)};
    memcpy(&wide, parts, sizeof wide);
#else
    for (int i = 0; i < ACROSS; i++) wide[i] = (int8_t)from[i];
#endif
    return floats_of_wholes(wide);
}

static inline quad_codes looked_up(const int8_t *table, quad_codes codes) {
#if ACROSS == 16
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    return (quad_codes)_mm512_shuffle_epi8(all, (__m512i)codes);
#elif defined(__AVX2__)
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (quad_codes)_mm256_shuffle_epi8(all, (__m256i)codes);
#elif defined(__aarch64__)
    const uint8x16_t all = vld1q_u8((const uint8_t *)table);
    uint8x16_t half[2];
    memcpy(half, &codes, sizeof half);
    for (int i = 0; i < 2; i++) half[i] = vqtbl1q_u8(all, half[i]);
    memcpy(&codes, half, sizeof half);
    return codes;
#else
    for (int i = 0; i < QUAD; i++) codes[i] = (uint8_t)table[codes[i]];
    return codes;
#endif
}

/* Bits moved right, or left; those that come from a neighbour are to be masked. */
static inline __attribute__((always_inline)) quad_codes moved(quad_codes codes, int right) {
    return (quad_codes)(right >= 0 ? (quad_pairs)codes >> right : (quad_pairs)codes << -right);
}

/* Codes of a quad of inputs, of all outputs. With a table, or of 8 bits, they are signed. */
static inline __attribute__((always_inline)) quad_codes codes_of(struct coded as, const uint8_t *from, int i) {
    const int quads = as.low == 8 ? QUADS : as.low == 4 ? QUADS / 2 : 2;
    quad_codes codes = *(const quad_codes *)(from + i % quads * QUAD);
    if (as.low < 8) codes = moved(codes, i / quads * as.low) & (uint8_t)((1 << as.low) - 1);
    if (as.high) {
        const int place = as.high == 1 ? i : i / 2 * 2;
        const quad_codes high = *(const quad_codes *)(from + (quads + (as.high == 2 ? i % 2 : 0)) * QUAD);
        codes |= moved(high, place - as.low) & (uint8_t)(((1 << as.high) - 1) << as.low);
    }
    return as.table ? looked_up(as.table, codes) : codes;
}

/* What is added to codes, signed or not, for the processor's instruction: sums begin with minus what that adds. */
static inline __attribute__((always_inline)) int shift_of(struct coded as) {
#if ACROSS == 16
    return as.low == 8 || as.table ? 128 : as.offset;
#else
    return as.offset;
#endif
}

#if ACROSS == 16 || defined(__AVX2__) || defined(__aarch64__)
#define IN_VECTORS static inline __attribute__((always_inline))
#else
#define IN_VECTORS static __attribute__((noinline)) /* in each form it would take a minute to compile */
#endif
/* Add the products of a quad of a row's numbers with those of all outputs. */
IN_VECTORS across_ints plus_quad(struct coded as, across_ints sum, quad_codes codes,
                                                                   const int8_t *numbers) {
    const int with_sign = as.low == 8 || as.table;
#if ACROSS == 16
    (void)with_sign;
    return (across_ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, quad(numbers));
#elif defined(__AVX2__)
    const __m256i own = (__m256i)codes, given = quad(numbers);
    const __m256i pairs_of_two = with_sign ? _mm256_maddubs_epi16(_mm256_abs_epi8(own), _mm256_sign_epi8(given, own))
                                           : _mm256_maddubs_epi16(own, given);
    return (across_ints)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs_of_two, _mm256_set1_epi16(1)));
#elif defined(__aarch64__)
    (void)with_sign; /* codes without one have 6 bits at most */
    int8x16_t half[2];
    memcpy(half, &codes, sizeof half);
    return plus_products(sum, half[0], half[1], quad(numbers));
#else
    for (int output = 0; output < ACROSS; output++)
        for (int i = 0; i < 4; i++) {
            const uint8_t code = codes[4 * output + i];
            sum[output] += (with_sign ? (int8_t)code : code) * numbers[i];
        }
    return sum;
#endif
}

/* What is the same for a panel's outputs in any product: codes as the processor's instruction takes them, and scales.
   ``whole``: codes as numbers with signs, of which nothing is to be subtracted. */
static inline __attribute__((always_inline)) quad_codes ready_codes(struct coded as, int whole, const uint8_t *from, int i) {
    const quad_codes codes = codes_of(as, from, i);
    if (whole) return codes - (uint8_t)as.offset;
    return ACROSS == 16 && (as.low == 8 || as.table) ? codes ^ 128 : codes;
}

static inline across scale_of(struct coded as, const uint8_t *scales) {
    return as.power ? scales_of((const char *)scales) : halves_of(scales);
}

static inline across least_of(struct coded as, const uint8_t *scales) {
    const across none = {0};
    return as.least ? halves_of(scales + 2 * ACROSS) : none;
}

static inline across factor_of(struct coded as, across scale, const uint8_t *wholes, int span) {
    return as.fine ? scale * wholes_of(wholes + span * ACROSS) : scale;
}

static inline across lower_of(struct coded as, across least, const uint8_t *wholes, int span) {
    return as.least < 0 ? -least * wholes_of(wholes + (as.fine + span) * ACROSS) : least;
}

/* These of some inputs, for many rows. */
struct unpacked {
    across factors[2 * DEEP / SHARE], lowers[2 * DEEP / SHARE]; /* [blocks, spans] */
    quad_codes codes[DEEP / 4];
};

static inline __attribute__((always_inline)) void fetch(const uint8_t *from, long bytes) {
    for (long at = 0; at < bytes; at += LINE) __builtin_prefetch(from + at, 0, 3);
}

static inline __attribute__((always_inline)) void unpack_codes(int type, int whole, const uint8_t *panel, long inputs, long from,
                                                               long end, struct unpacked *to) {
    const struct coded as = coded_as(type);
    const int spans = as.fine == 2 ? 2 : 1;
    const long begin = codes_at(as, inputs), size = code_bytes(as), ahead = DEEP / SHARE;
    const uint8_t *scales = panel + from / group_of(as) * scale_bytes(as), *codes = panel + begin + from * size;
    long at = 0;
    for (long block = from; block < end; scales += scale_bytes(as)) {
        const across scale = scale_of(as, scales), least = least_of(as, scales);
        fetch(scales + quant_panel(type, inputs), scale_bytes(as)); /* of the next panel */
        for (int part = 0; part < group_of(as); part++, block++, codes += size) {
            const uint8_t *const wholes = scales + head_bytes(as) + part * fine_bytes(as);
            fetch(codes + ahead * size + (block + ahead < inputs / SHARE ? 0 : begin), size);
            for (int span = 0; span < spans; span++, at++) {
                to->factors[at] = factor_of(as, scale, wholes, span);
                if (as.least) to->lowers[at] = lower_of(as, least, wholes, span);
            }
#pragma GCC unroll 8
            for (int i = 0; i < QUADS; i++) to->codes[(block - from) * QUADS + i] = ready_codes(as, whole, codes, i);
        }
    }
}

/* Rows that are multiplied together, block by block: numbers [count, SHARE], then of each row its scale, its sum times
   the scale, and minus the sums of the block and its halves. So one register leads to all of a block. */
struct beside {
    float scale, sum;
    int32_t whole, halves[2];
};
#define BESIDE(count) ((count) * (long)(SHARE + sizeof(struct beside))) /* bytes of a block */

/* Rows of the form that multiplies ``rows``, or one of several groups of them. */
static inline long width_of(long rows) {
#if TOGETHER == 4 && !defined(__AVX2__) && !defined(__aarch64__)
    return rows > 1 ? 4 : 1;
#else
    return rows > 4 ? TOGETHER : rows > 2 ? 4 : rows;
#endif
}

/* Put a row among those of its group. */
static inline void place_row(const struct rounded_row *from, long blocks, long count, long row, char *to) {
    for (long block = 0; block < blocks; block++, to += BESIDE(count)) {
        const int32_t *const halves = from->halves + 2 * block;
        const struct beside of = {from->scales[block], from->sums[block], -(halves[0] + halves[1]), {-halves[0], -halves[1]}};
        memcpy(to + row * SHARE, from->numbers + block * SHARE, SHARE);
        memcpy(to + count * SHARE + row * sizeof of, &of, sizeof of);
    }
}

/* Add the products of ``count`` rows, at most TOGETHER, with the blocks ``from`` to ``end`` of a panel to the sums,
   [count, ACROSS]. ``wide``: they are unpacked, and the panel is not read. */
static inline __attribute__((always_inline)) void panel_of_codes(int count, int type, int wide, const uint8_t *panel,
                                                                 long inputs, long from, long end,
                                                                 const struct unpacked *ready,
                                                                 const char *rows, across *out) {
    const struct coded as = coded_as(type);
    const across none = {0};
    const across_ints zero = {0};
    const int spans = as.fine == 2 ? 2 : 1, quads = QUADS / spans, shift = shift_of(as);
    const long begin = codes_at(as, inputs), size = code_bytes(as), apart = begin + inputs / SHARE * size;
    const long last = inputs / SHARE - DISTANCE / 2 / size; /* from there on, what is ahead is in the next panel */
    const uint8_t *scales = panel, *codes = panel + begin;
    across sums[TOGETHER];
    for (int row = 0; row < count; row++) sums[row] = out[row];
    long at = 0;
    rows += from * BESIDE(count);
    for (long block = from; block < end;) {
        across scale = none, least = none;
        if (!wide) {
            scale = scale_of(as, scales);
            least = least_of(as, scales);
            fetch(scales + apart, scale_bytes(as)); /* of the next panel */
        }
        for (int part = 0; part < group_of(as); part++, block++, codes += size, rows += BESIDE(count)) {
            const uint8_t *const wholes = scales + head_bytes(as) + part * fine_bytes(as);
            const int8_t *const numbers = (const int8_t *)rows;
            const struct beside *const beside = (const struct beside *)(rows + count * SHARE);
            if (!wide) fetch(codes + DISTANCE / 2 + (block < last ? 0 : begin), size);
#pragma GCC unroll 2
            for (int span = 0; span < spans; span++, at++) {
                across_ints whole[TOGETHER];
                for (int row = 0; row < count; row++)
                    whole[row] = shift ? (zero + (spans == 2 ? beside[row].halves[span] : beside[row].whole)) * shift : zero;
#if defined(__ARM_FEATURE_MATMUL_INT8) /* two rows with two quads at once: codes without a sign have 6 bits at most */
                const int8_t *given[TOGETHER];
                int32x4_t products[TOGETHER][2] = {0};
                across_ints added[TOGETHER];
                for (int row = 0; row < count; row++) given[row] = numbers + row * SHARE;
#pragma GCC unroll 4
                for (int i = span * quads; i < (span + 1) * quads; i += 2) {
                    int8x16_t own[2][2];
                    for (int next = 0; next < 2; next++) {
                        const quad_codes codes_of_quad = wide ? ready->codes[(block - from) * QUADS + i + next]
                                                              : ready_codes(as, 0, codes, i + next);
                        memcpy(own[next], &codes_of_quad, sizeof codes_of_quad);
                    }
                    plus_eight(count, own[0], own[1], given, i * 4, products);
                }
                put_sums(count, products, added);
                for (int row = 0; row < count; row++) whole[row] += added[row];
#else
#pragma GCC unroll 8
                for (int i = 0; i < quads; i++) {
                    const quad_codes own = wide ? ready->codes[(block - from) * QUADS + span * quads + i]
                                                : ready_codes(as, 0, codes, span * quads + i);
                    for (int row = 0; row < count; row++)
                        whole[row] = plus_quad(as, whole[row], own, numbers + row * SHARE + (span * quads + i) * 4);
                }
#endif
                const across factor = wide ? ready->factors[at] : factor_of(as, scale, wholes, span);
                const across lower = !as.least ? none : wide ? ready->lowers[at] : lower_of(as, least, wholes, span);
                for (int row = 0; row < count; row++) {
                    const float by = beside[row].scale;
                    sums[row] = fused_across(floats_of_wholes(whole[row]), factor * by, sums[row]);
                    if (as.least) {
                        const float sum = spans == 2 ? by * (float)-beside[row].halves[span] : beside[row].sum;
                        sums[row] = fused_across(lower, sum - none, sums[row]);
                    }
                }
            }
        }
        scales += scale_bytes(as);
    }
    for (int row = 0; row < count; row++) out[row] = sums[row];
}

static inline across floats_of(int type, const uint8_t *from) {
    return type == F32 ? *(const across *)from : type == F16 ? halves_of(from) : scales_of((const char *)from);
}

/* The same with weights in floats, all of them; even and odd inputs have their sums. */
static inline __attribute__((always_inline)) void panel_of_floats(int count, int type, const uint8_t *weights,
                                                                  long inputs, const struct rounded_row *rows,
                                                                  across *out) {
    const across none = {0};
    const long size = ACROSS * float_bytes(type);
    across sums[2][TOGETHER];
    for (int row = 0; row < count; row++) sums[0][row] = sums[1][row] = none;
    for (long i = 0; i < inputs; i++) {
        const across own = floats_of(type, weights + i * size);
        __builtin_prefetch(weights + i * size + DISTANCE, 0, 3);
        for (int row = 0; row < count; row++)
            sums[i % 2][row] = fused_across(own, rows[row].given[i] - none, sums[i % 2][row]);
    }
    for (int row = 0; row < count; row++) out[row] = sums[0][row] + sums[1][row];
}

typedef void quant_form(const uint8_t *, long, const char *, const struct rounded_row *, across *);
typedef void unpacking_form(const uint8_t *, long, long, long, struct unpacked *);
typedef void wide_form(long, long, const struct unpacked *, const char *, across *);
#define FLOAT_FORM(type, count)                                                                              \
    static __attribute__((noinline)) void quant_##type##_##count(                                            \
        const uint8_t *panel, long inputs, const char *group, const struct rounded_row *rows, across *out) { \
        (void)group;                                                                                         \
        panel_of_floats(count, type, panel, inputs, rows, out);                                              \
    }
#define QUANT_FORM(type, count)                                                                              \
    static __attribute__((noinline)) void quant_##type##_##count(                                            \
        const uint8_t *panel, long inputs, const char *group, const struct rounded_row *rows, across *out) { \
        const across none = {0};                                                                             \
        (void)rows;                                                                                          \
        for (int row = 0; row < count; row++) out[row] = none;                                               \
        panel_of_codes(count, type, 0, panel, inputs, 0, inputs / SHARE, NULL, group, out);                  \
    }
#define WIDE_FORM(type)                                                                                      \
    static __attribute__((noinline)) void unpack_##type(const uint8_t *panel, long inputs, long from,        \
                                                        long end, struct unpacked *to) {                     \
        unpack_codes(type, 0, panel, inputs, from, end, to);                                                 \
    }                                                                                                        \
    static __attribute__((noinline)) void wide_##type(long from, long end, const struct unpacked *ready,     \
                                                      const char *group, across *out) {                      \
        panel_of_codes(TOGETHER, type, 1, NULL, 0, from, end, ready, group, out);                            \
    }
/* There are forms of some numbers of rows: see width_of. */
#if TOGETHER == 8
#define FORMS_OF(form, type) form(type, 1) form(type, 2) form(type, 4) form(type, 8)
#define ALL_QUANT(type) [type] = {[1] = quant_##type##_1, [2] = quant_##type##_2, [4] = quant_##type##_4, [8] = quant_##type##_8},
#elif defined(__AVX2__) || defined(__aarch64__)
#define FORMS_OF(form, type) form(type, 1) form(type, 2) form(type, 4)
#define ALL_QUANT(type) [type] = {[1] = quant_##type##_1, [2] = quant_##type##_2, [4] = quant_##type##_4},
#else
#define FORMS_OF(form, type) form(type, 1) form(type, 4)
#define ALL_QUANT(type) [type] = {[1] = quant_##type##_1, [4] = quant_##type##_4},
#endif
#define CODED(type) FORMS_OF(QUANT_FORM, type) WIDE_FORM(type)
OF_TYPES(CODED)
FORMS_OF(FLOAT_FORM, F32) FORMS_OF(FLOAT_FORM, F16) FORMS_OF(FLOAT_FORM, BF16)
#ifdef SQUARED_WHOLE
#define LATER 4 /* blocks, after which sums that went through memory are scaled */
/* The same by squares, of a group of rows; codes are whole. */
static inline __attribute__((always_inline)) void squares_of_codes(int spans, int least, long from, long end,
                                                                   const struct unpacked *ready,
                                                                   const int8_t *numbers, long stride,
                                                                   const float *measures, across *out) {
    const long steps = (end - from) * spans, share = SHARE / spans;
    across sums[SIDE];
    int32_t whole[LATER][SIDE * ACROSS] __attribute__((aligned(64)));
#pragma GCC unroll 16
    for (int row = 0; row < SIDE; row++) sums[row] = out[row];
    for (long at = 0; at < steps + LATER; at++) {
        const long scaled = at - LATER;
        if (scaled >= 0) { /* before its place is taken */
            const float *const by = measures + (from + scaled / spans) * MEASURES;
            const across factor = ready->factors[scaled], lower = least ? ready->lowers[scaled] : factor;
            add_scaled(SIDE, least, whole[scaled % LATER], by, factor, lower, sums);
        }
        if (at < steps) {
            const int8_t *const given = numbers + from * SHARE + at * share;
            const quad_codes *const codes = ready->codes + at * (QUADS / spans);
            if (at % 2) SUMS_OF_BLOCK(1, "tdpbssd", given, stride, codes, whole[at % LATER]);
            else SUMS_OF_BLOCK(0, "tdpbssd", given, stride, codes, whole[at % LATER]);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < SIDE; row++) out[row] = sums[row];
}

typedef void code_squares(long, long, const struct unpacked *, const int8_t *, long, const float *, across *);
#define CODE_SQUARES(name, spans, least)                                                                     \
    static __attribute__((noinline)) void name(long from, long end, const struct unpacked *ready,            \
                                               const int8_t *numbers, long stride, const float *measures,    \
                                               across *out) {                                                \
        squares_of_codes(spans, least, from, end, ready, numbers, stride, measures, out);                    \
    }
CODE_SQUARES(squares_of_scales, 1, 0)
CODE_SQUARES(squares_with_least, 1, 1)
CODE_SQUARES(squares_of_halves, 2, 0)
#define WHOLE_FORM(type)                                                                                     \
    static __attribute__((noinline)) void unpack_whole_##type(const uint8_t *panel, long inputs, long from,  \
                                                              long end, struct unpacked *to) {               \
        unpack_codes(type, 1, panel, inputs, from, end, to);                                                 \
    }
OF_TYPES(WHOLE_FORM)
#define UNPACKING_WHOLE(type) [type] = unpack_whole_##type,
static unpacking_form *const whole_forms[QUANT_TYPES] = {OF_TYPES(UNPACKING_WHOLE)};

/* NULL for a type whose sums of halves have least numbers too. */
static code_squares *squares_of_type(int type) {
    const struct coded as = coded_as(type);
    if (as.fine == 2) return as.least ? NULL : squares_of_halves;
    return as.least ? squares_with_least : squares_of_scales;
}
#endif

#define UNPACKING(type) [type] = unpack_##type,
#define WIDELY(type) [type] = wide_##type,
static quant_form *const quant_forms[QUANT_TYPES][TOGETHER + 1] = {OF_TYPES(ALL_QUANT) ALL_QUANT(F32) ALL_QUANT(F16)
                                                                   ALL_QUANT(BF16)};
static unpacking_form *const unpacking_forms[QUANT_TYPES] = {OF_TYPES(UNPACKING)};
static wide_form *const wide_forms[QUANT_TYPES] = {OF_TYPES(WIDELY)};

#define SOME_ROWS 64 /* whose sums are kept at once; a multiple of TOGETHER */

/* Products of ``rows``, at most SOME_ROWS, with a panel: [rows, ACROSS]. Many rows share the unpacking of codes.
   ``groups`` of ``width`` rows each, of which the first may be missing if it is multiplied by squares. ``measures`` of the
   rows: they are multiplied by squares; or NULL. */
static void products_of_panel(int type, const uint8_t *panel, long inputs, long rows, const struct rounded_row *rounded,
                              const char *groups, long width, const float *measures, across *sums) {
    const across none = {0};
    const long blocks = inputs / SHARE, size = blocks * BESIDE(width);
    _Alignas(LINE) struct unpacked ready;
    long done = 0;
    if (rows > TOGETHER) /* forms of fewer rows begin with none */
        for (long row = 0; row < SOME_ROWS; row++) sums[row] = none;
#ifdef SQUARED_WHOLE
    code_squares *const squares = measures && !float_bytes(type) && rows > TOGETHER ? squares_of_type(type) : NULL;
    if (squares) {
        const int share = coded_as(type).fine == 2 ? SHARE / 2 : SHARE;
        const long stride = rounded[1].numbers - rounded[0].numbers;
        done = rows % SIDE > TOGETHER ? rows : rows / SIDE * SIDE;
        for (long from = 0, end; from < blocks; from = end) {
            end = from + DEEP / SHARE < blocks ? from + DEEP / SHARE : blocks;
            whole_forms[type](panel, inputs, from, end, &ready);
            for (long row = 0; row < done; row += SIDE) {
                if (!row || done - row < SIDE) shape_blocks(done - row < SIDE ? (int)(done - row) : SIDE, share);
                squares(from, end, &ready, rounded[row].numbers, stride, measures + row / SIDE * blocks * MEASURES,
                        sums + row);
            }
        }
    }
#else
    (void)measures;
#endif
    if (rows - done <= TOGETHER || float_bytes(type)) {
        for (long row = done; row < rows; row += TOGETHER) {
            const long form = float_bytes(type) ? width_of(rows - row) : width;
            quant_forms[type][form](panel, inputs, groups + row / TOGETHER * size, rounded + row, sums + row);
        }
        return;
    }
    for (long from = 0, end; from < blocks; from = end) {
        end = from + DEEP / SHARE < blocks ? from + DEEP / SHARE : blocks;
        unpacking_forms[type](panel, inputs, from, end, &ready);
        for (long row = 0; row < rows; row += TOGETHER)
            wide_forms[type](from, end, &ready, groups + row / TOGETHER * size, sums + row);
    }
}

struct multiplying_quants {
    const struct product *product;
    long rows, each; /* ``each``: panels of a chunk */
    const real *given;
    real *out;
    struct rounded_row *rounded; /* [rows + TOGETHER]: the last one again and again */
    int floats, codes;           /* which of a row's forms are read */
    char *groups;                /* of ``width`` rows each, from row ``grouped`` on */
    long width, grouped;
    float *measures;             /* of groups of rows, by squares alone; otherwise NULL */
};

/* A row's group; rows before ``grouped`` have none. */
static inline char *group_of_row(const struct multiplying_quants *job, long row) {
    return job->groups + (row - job->grouped) / TOGETHER * (job->product->inputs / SHARE * BESIDE(job->width));
}

static void round_quants(void *given, long row) {
    const struct multiplying_quants *const job = given;
    const real *const from = job->given + row * job->product->inputs;
    if (job->codes) round_row(from, job->product->inputs, job->rounded + row);
#ifdef SQUARED_WHOLE
    if (job->measures) measure_row(job->rounded + row, job->measures, row, job->product->inputs / SHARE);
#endif
    if (job->codes && row >= job->grouped)
        place_row(job->rounded + row, job->product->inputs / SHARE, job->width, row % TOGETHER, group_of_row(job, row));
    if (job->floats) widen(from, job->product->inputs, (float *)job->rounded[row].given);
}

static void multiply_panels_of_quants(void *given, long chunk) {
    const struct multiplying_quants *const job = given;
    const struct product *const product = job->product;
    const struct quants *const all = product->weights;
    const long rows = job->rows, from = chunk * job->each, to = from + job->each;
    long panels = 0, begin = 0; /* of the parts before */
    for (int i = 0; i < all->parts; begin += all->part[i++].outputs) {
        const struct quant_part *const part = all->part + i;
        const long before = panels, size = quant_panel(part->type, product->inputs);
        panels += chunks_of(part->outputs, ACROSS);
        for (long panel = from > before ? from : before; panel < panels && panel < to; panel++) {
            const long at = (panel - before) * ACROSS;
            const long count = part->outputs - at < ACROSS ? part->outputs - at : ACROSS;
            for (long row = 0; row < rows; row += SOME_ROWS) {
                const long some = rows - row < SOME_ROWS ? rows - row : SOME_ROWS;
                _Alignas(LINE) across sums[SOME_ROWS];
                const float *measures = NULL;
#ifdef SQUARED_WHOLE
                if (job->measures) measures = measures_of(job->measures, row, product->inputs / SHARE);
#endif
                products_of_panel(part->type, part->weights + (panel - before) * size, product->inputs, some,
                                  job->rounded + row, group_of_row(job, row), job->width, measures, sums);
                for (long i = 0; i < some; i++)
                    finish(product, begin + at, count, sums + i, job->out + (row + i) * product->outputs);
            }
        }
    }
#ifdef SQUARED_WHOLE
    if (job->measures) __asm__ volatile("tilerelease");
#endif
}

/* ``multiply`` for weights of a GGUF file. Returns 1 if out of memory. */
static int multiply_quants(const struct product *product, long rows, const real *given, real *out) {
    const struct quants *const all = product->weights;
    const long inputs = product->inputs, blocks = (inputs + SHARE - 1) / SHARE;
    struct multiplying_quants job = {.product = product, .rows = rows, .given = given, .out = out, .width = width_of(rows)};
    long measures = 0;
    long panels = 0;
    for (int i = 0; i < all->parts; i++) {
        panels += chunks_of(all->part[i].outputs, ACROSS);
        if (float_bytes(all->part[i].type)) job.floats = 1;
        else job.codes = 1;
    }
    if (!rows) return 0;
    const long own = blocks * NUMBERS_OF_BLOCK + (job.floats ? inputs : 0);
#ifdef SQUARED_WHOLE
    if (rows > TOGETHER && job.codes && squared()) {
        measures = chunks_of(rows, SIDE) * blocks * MEASURES;
        job.grouped = rows % SIDE > TOGETHER ? rows : rows / SIDE * SIDE;
        for (int i = 0; i < all->parts; i++)
            if (!float_bytes(all->part[i].type) && !squares_of_type(all->part[i].type)) job.grouped = 0;
    }
#endif
    const long groups = job.codes ? chunks_of(rows - job.grouped, TOGETHER) * blocks * BESIDE(job.width) / 4 : 0;
    float *const room = workspace(rows * own + measures + groups + (rows + TOGETHER) * (sizeof(struct rounded_row) / 4));
    if (!room) return 1;
    job.rounded = (struct rounded_row *)room;
    for (long row = 0; row < rows; row++)
        job.rounded[row] = rounded_row_at((float *)(job.rounded + rows + TOGETHER) + row * own, blocks);
    if (measures) {
        job.measures = (float *)(job.rounded + rows + TOGETHER) + rows * own;
        memset(job.measures, 0, measures * sizeof(float));
    }
    job.groups = (char *)((float *)(job.rounded + rows + TOGETHER) + rows * own + measures);
    if ((rows - job.grouped) % job.width) memset(job.groups, 0, groups * sizeof(float));
    for (int i = 0; i < TOGETHER; i++) job.rounded[rows + i] = job.rounded[rows - 1];
    if (rows * inputs > CHUNK) share(rows, round_quants, &job);
    else
        for (long row = 0; row < rows; row++) round_quants(&job, row);
    job.each = items_of_chunk(panels, work_of_panel(inputs, ACROSS, rows));
    share(chunks_of(panels, job.each), multiply_panels_of_quants, &job);
    return 0;
}

SHOWN long size_of_quant_part(void) { return sizeof(struct quant_part); }
SHOWN long size_of_quants(void) { return sizeof(struct quants); }
#undef long
