/* Weights as GGUF files have them: blocks of few bits. A file's block, its panel, the products of rows with it.

   A code is an unsigned number of ``low + high`` bits, or with 8 a signed one. The weight is (code - offset) or
   table[code], times a scale, plus a least number or minus one. Scales are a half of 32 inputs; or of 256 inputs, times
   whole numbers of 32 or of 16 inputs. All of these are in a panel as they are in the file.

   A panel has ACROSS outputs: first the scales of groups of inputs, of each its halves, then for 32 inputs whole scales
   and whole least numbers; from a whole line on, for 32 inputs, the codes' low bits in quads as in rounded.h, and their
   high bits. So a vector of codes lies in one line. Rows are rounded to 8 bits as in rounded.h. A product of
   32 or 16 inputs is a sum of integers, which has no order; blocks are summed in theirs, so a row has the same bits among any
   rows. Weights in floats have panels [inputs, ACROSS], and rows are not rounded. */

#pragma once

#include "rounded.h"

#define long int64_t /* of 64 bits on every system: on Windows it has 32 */

/* The types by ggml's numbers. */
enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
       Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39, QUANT_TYPES = 40 };
#define LONGEST 256 /* numbers of a block, at most */
#define MARKED 1    /* ``bits`` of a product whose weights are a ``struct quants`` */

/* How a type's weights are coded. ``fine``: whole scales of a block of 32 inputs, 0 to 2. ``least``: there are least
   numbers, added (1), or subtracted (-1) times a whole number. ``power``: scales are bfloat16. */
struct coded {
    int low, high, offset, fine, least, power;
    const int8_t *table;
    int bytes; /* of a block in a file */
};

static const int8_t curved[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static inline __attribute__((always_inline)) struct coded coded_as(int type) {
    switch (type) {
    case Q4_0: return (struct coded){4, 0, 8, 0, 0, 0, NULL, 18};
    case Q4_1: return (struct coded){4, 0, 0, 0, 1, 0, NULL, 20};
    case Q5_0: return (struct coded){4, 1, 16, 0, 0, 0, NULL, 22};
    case Q5_1: return (struct coded){4, 1, 0, 0, 1, 0, NULL, 24};
    case Q8_0: return (struct coded){8, 0, 0, 0, 0, 0, NULL, 34};
    case Q2_K: return (struct coded){2, 0, 0, 2, -1, 0, NULL, 84};
    case Q3_K: return (struct coded){2, 1, 4, 2, 0, 0, NULL, 110};
    case Q4_K: return (struct coded){4, 0, 0, 1, -1, 0, NULL, 144};
    case Q5_K: return (struct coded){4, 1, 0, 1, -1, 0, NULL, 176};
    case Q6_K: return (struct coded){4, 2, 32, 2, 0, 0, NULL, 210};
    case IQ4_NL: return (struct coded){4, 0, 0, 0, 0, 0, curved, 18};
    case IQ4_XS: return (struct coded){4, 0, 0, 1, 0, 0, curved, 136};
    case MXFP4: return (struct coded){4, 0, 0, 0, 0, 1, doubled, 17};
    default: return (struct coded){0};
    }
}

static inline int float_bytes(int type) { return type == F32 ? 4 : type == F16 || type == BF16 ? 2 : 0; }

/* Blocks of 32 inputs that share the halves. */
static inline int group_of(struct coded as) { return as.fine ? 8 : 1; }
static inline long head_bytes(struct coded as) { return 2 * ACROSS * (as.least ? 2 : 1); }
static inline long code_bytes(struct coded as) { return (as.low + as.high) * SHARE * ACROSS / 8; }
/* Whole scales and least numbers of 32 inputs; all scales of a group. */
static inline long fine_bytes(struct coded as) { return ACROSS * as.fine * (as.least ? 2 : 1); }
static inline long scale_bytes(struct coded as) { return head_bytes(as) + group_of(as) * fine_bytes(as); }

/* Where a panel's codes begin. */
static inline long codes_at(struct coded as, long inputs) {
    return (inputs / SHARE / group_of(as) * scale_bytes(as) + LINE - 1) / LINE * LINE;
}

/* Numbers of a block of a type in a file, and its bytes; 0 for a type that is not known here. */
SHOWN long quant_numbers(int type) { return float_bytes(type) ? 1 : coded_as(type).low ? SHARE * group_of(coded_as(type)) : 0; }
SHOWN long quant_bytes(int type) { return float_bytes(type) ? float_bytes(type) : coded_as(type).bytes; }

/* Bytes of a panel of rows of ``inputs`` numbers. */
SHOWN long quant_panel(int type, long inputs) {
    if (float_bytes(type)) return inputs * ACROSS * float_bytes(type);
    const struct coded as = coded_as(type);
    return codes_at(as, inputs) + inputs / SHARE * code_bytes(as);
}

static inline float float_of_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, rest = half & 1023;
    uint32_t bits_of = sign | (exponent + 112) << 23 | rest << 13;
    if (exponent == 31) bits_of = sign | 0x7f800000 | rest << 13;
    float value;
    if (!exponent) {
        value = (float)rest * 0x1p-24f;
        return sign ? -value : value;
    }
    memcpy(&value, &bits_of, sizeof value);
    return value;
}

static inline float float_of_brain(uint16_t brain) {
    const uint32_t bits_of = (uint32_t)brain << 16;
    float value;
    memcpy(&value, &bits_of, sizeof value);
    return value;
}

/* A block of a file, or one output's of a panel. */
struct plain {
    uint16_t scale, least;
    int8_t scales[16], leasts[16]; /* [blocks of 32 inputs, ``fine``] */
    uint8_t codes[LONGEST];
};

static inline uint16_t half_at(const uint8_t *from) { return (uint16_t)(from[0] | from[1] << 8); }

/* Low and high nibbles of 16 bytes, one after the other. */
static inline void nibbles(const uint8_t *from, int count, uint8_t *to) {
    for (int i = 0; i < count; i++) {
        to[i] = from[i] & 15;
        to[count + i] = from[i] >> 4;
    }
}

static inline void fifth_bits(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < SHARE / 8; i++) { /* bit i of a byte to byte i of eight, there to bit 4 */
        uint64_t eight, bits_of = (uint64_t)from[i] * 0x0101010101010101u & 0x8040201008040201u;
        memcpy(&eight, codes + 8 * i, sizeof eight);
        eight |= ((bits_of + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u) >> 3;
        memcpy(codes + 8 * i, &eight, sizeof eight);
    }
}

/* The whole scales and least numbers of Q4_K and Q5_K: six bits each. */
static inline void sixes(const uint8_t *from, struct plain *to) {
    for (int i = 0; i < 4; i++) {
        to->scales[i] = (int8_t)(from[i] & 63);
        to->leasts[i] = (int8_t)(from[4 + i] & 63);
        to->scales[4 + i] = (int8_t)((from[8 + i] & 15) | (from[i] >> 6) << 4);
        to->leasts[4 + i] = (int8_t)(from[8 + i] >> 4 | (from[4 + i] >> 6) << 4);
    }
}

static inline void read_fours(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < 4; i++) nibbles(from + i * SHARE, SHARE, codes + 2 * i * SHARE);
}

static void read_q2_k(const uint8_t *from, struct plain *to) {
    for (int i = 0; i < 16; i++) {
        to->scales[i] = (int8_t)(from[i] & 15);
        to->leasts[i] = (int8_t)(from[i] >> 4);
    }
    for (int i = 0; i < LONGEST; i++) to->codes[i] = from[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
    to->scale = half_at(from + 80);
    to->least = half_at(from + 82);
}

static void read_q3_k(const uint8_t *from, struct plain *to) {
    const uint8_t *const own = from + 32, *const scales = from + 96;
    for (int i = 0; i < 16; i++) {
        const int low = scales[i % 8] >> i / 8 * 4 & 15, high = scales[8 + i % 4] >> i / 4 * 2 & 3;
        to->scales[i] = (int8_t)((low | high << 4) - 32);
    }
    for (int i = 0; i < LONGEST; i++) /* the bit is set where 4 is not subtracted */
        to->codes[i] = (uint8_t)((own[i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) | (from[i % 32] >> i / 32 & 1) << 2);
    to->scale = half_at(from + 108);
}

static void read_q6_k(const uint8_t *from, struct plain *to) {
    for (int half = 0; half < 2; half++) {
        uint8_t *const codes = to->codes + half * 128;
        nibbles(from + half * 64, 64, codes);
        for (int i = 0; i < 128; i++)
            codes[i] |= (uint8_t)((from[128 + half * 32 + i % 32] >> i / 32 * 2 & 3) << 4);
    }
    memcpy(to->scales, from + 192, 16);
    to->scale = half_at(from + 208);
}

static void read_iq4_xs(const uint8_t *from, struct plain *to) {
    const int high = half_at(from + 2);
    for (int i = 0; i < 8; i++) {
        to->scales[i] = (int8_t)(((from[4 + i / 2] >> i % 2 * 4 & 15) | (high >> 2 * i & 3) << 4) - 32);
        nibbles(from + 8 + i * 16, 16, to->codes + i * SHARE);
    }
    to->scale = half_at(from);
}

static void read_block(int type, const uint8_t *from, struct plain *to) {
    switch (type) {
    case Q2_K: read_q2_k(from, to); return;
    case Q3_K: read_q3_k(from, to); return;
    case Q6_K: read_q6_k(from, to); return;
    case IQ4_XS: read_iq4_xs(from, to); return;
    case MXFP4: /* a power of two, halved, as bfloat16 */
        to->scale = (uint16_t)(from[0] < 2 ? 0x20 << from[0] : (from[0] - 1) << 7);
        nibbles(from + 1, 16, to->codes);
        return;
    default: to->scale = half_at(from);
    }
    switch (type) {
    case Q4_0: case IQ4_NL: nibbles(from + 2, 16, to->codes); return;
    case Q8_0: memcpy(to->codes, from + 2, SHARE); return;
    case Q5_0:
        nibbles(from + 6, 16, to->codes);
        fifth_bits(from + 2, to->codes);
        return;
    }
    to->least = half_at(from + 2);
    switch (type) {
    case Q4_1: nibbles(from + 4, 16, to->codes); return;
    case Q5_1:
        nibbles(from + 8, 16, to->codes);
        fifth_bits(from + 4, to->codes);
        return;
    case Q4_K:
        sixes(from + 4, to);
        read_fours(from + 16, to->codes);
        return;
    case Q5_K:
        sixes(from + 4, to);
        read_fours(from + 48, to->codes);
        for (int i = 0; i < LONGEST; i++) to->codes[i] |= (uint8_t)((from[16 + i % 32] >> i / 32 & 1) << 4);
        return;
    }
}

/* A block's numbers. Each product is exact in float32, so there is one way to round. */
static void numbers_of(int type, const struct plain *from, float *to) {
    const struct coded as = coded_as(type);
    const float scale = as.power ? float_of_brain(from->scale) : float_of_half(from->scale);
    const float least = as.least ? float_of_half(from->least) : 0;
    for (int i = 0; i < SHARE * group_of(as); i++) {
        const int fine = as.fine ? i / (SHARE / as.fine) : 0, code = from->codes[i];
        const float own = as.fine ? scale * from->scales[fine] : scale;
        const int number = as.table ? as.table[code] : as.low == 8 ? (int8_t)code : code - as.offset;
        to[i] = own * (float)number;
        if (as.least > 0) to[i] += least;
        if (as.least < 0) to[i] -= least * from->leasts[fine];
    }
}

static inline float float_at(int type, const uint8_t *from) {
    float value;
    if (type != F32) return type == F16 ? float_of_half(half_at(from)) : float_of_brain(half_at(from));
    memcpy(&value, from, sizeof value);
    return value;
}

/* Rows of a matrix in a file, by their numbers, in float32: [count, inputs]. */
SHOWN void quant_rows(int type, const uint8_t *from, long inputs, const int64_t *rows, long count, float *to) {
    const long numbers = quant_numbers(type), bytes = quant_bytes(type), line = inputs / numbers * bytes;
    struct plain block;
    for (long row = 0; row < count; row++)
        for (long at = 0; at < inputs; at += numbers) {
            const uint8_t *const own = from + rows[row] * line + at / numbers * bytes;
            float *const out = to + row * inputs + at;
            if (float_bytes(type)) *out = float_at(type, own);
            else {
                read_block(type, own, &block);
                numbers_of(type, &block, out);
            }
        }
}

struct quant_packing {
    int type;
    const uint8_t *from;
    const int32_t *order; /* [outputs]: the file's row of each; or NULL */
    long inputs, outputs;
    uint8_t *to;
};

static inline uint32_t four_at(const uint8_t *from) {
    uint32_t four;
    memcpy(&four, from, sizeof four);
    return four;
}

/* Codes of 32 inputs of an output, quads of which share bytes: the low bits' of a quad, and their high ones'. */
static inline void place_codes(struct coded as, const uint8_t *codes, uint8_t *to) {
    const int quads = as.low == 8 ? QUADS : as.low == 4 ? QUADS / 2 : 2; /* vectors of low bits */
    uint32_t own[QUADS] = {0}, high[2] = {0};
    const uint32_t kept = as.low == 8 ? 0xffffffffu : ((1u << as.low) - 1) * 0x01010101u;
    for (int i = 0; i < QUADS; i++) {
        const uint32_t four = four_at(codes + 4 * i), top = (four & ~kept) >> as.low;
        own[i % quads] |= (four & kept) << i / quads * as.low;
        if (as.high == 1) high[0] |= top << i;
        if (as.high == 2) high[i % 2] |= top << i / 2 * 2;
    }
    for (int i = 0; i < quads; i++) memcpy(to + i * QUAD, own + i, 4);
    for (int i = 0; i < as.high; i++) memcpy(to + (quads + i) * QUAD, high + i, 4);
}

static inline void take_codes(struct coded as, const uint8_t *from, uint8_t *codes) {
    const int quads = as.low == 8 ? QUADS : as.low == 4 ? QUADS / 2 : 2;
    const uint32_t kept = as.low == 8 ? 0xffffffffu : ((1u << as.low) - 1) * 0x01010101u;
    for (int i = 0; i < QUADS; i++) {
        uint32_t four = four_at(from + i % quads * QUAD) >> i / quads * as.low & kept;
        if (as.high == 1) four |= (four_at(from + quads * QUAD) >> i & 0x01010101u) << as.low;
        if (as.high == 2) four |= (four_at(from + (quads + i % 2) * QUAD) >> i / 2 * 2 & 0x03030303u) << as.low;
        memcpy(codes + 4 * i, &four, 4);
    }
}

/* Move one output's block into a group of a panel, or out of it. */
static inline __attribute__((always_inline)) void place_block(struct coded as, int output, uint8_t *scales,
                                                              uint8_t *codes, struct plain *block, int out) {
    memcpy(out ? (void *)&block->scale : scales + 2 * output, out ? scales + 2 * output : (void *)&block->scale, 2);
    if (as.least) {
        uint8_t *const at = scales + 2 * (ACROSS + output);
        memcpy(out ? (void *)&block->least : at, out ? at : (void *)&block->least, 2);
    }
    for (int i = 0; i < group_of(as); i++, codes += code_bytes(as)) {
        uint8_t *at = scales + head_bytes(as) + i * fine_bytes(as);
        for (int fine = 0; fine < as.fine; fine++, at += ACROSS) {
            if (out) block->scales[i * as.fine + fine] = (int8_t)at[output];
            else at[output] = (uint8_t)block->scales[i * as.fine + fine];
        }
        for (int fine = 0; as.least && fine < as.fine; fine++, at += ACROSS) {
            if (out) block->leasts[i * as.fine + fine] = (int8_t)at[output];
            else at[output] = (uint8_t)block->leasts[i * as.fine + fine];
        }
        if (out) take_codes(as, codes + 4 * output, block->codes + i * SHARE);
        else place_codes(as, block->codes + i * SHARE, codes + 4 * output);
    }
}

static inline __attribute__((always_inline)) void pack_quant_panel_as(int type, const struct quant_packing *job, long panel) {
    const struct coded as = coded_as(type);
    const long numbers = SHARE * group_of(as), line = job->inputs / numbers * as.bytes;
    uint8_t *const to = job->to + panel * quant_panel(type, job->inputs), *const codes = to + codes_at(as, job->inputs);
    struct plain block;
    for (long i = 0; i < ACROSS && panel * ACROSS + i < job->outputs; i++) {
        const long output = panel * ACROSS + i, row = job->order ? job->order[output] : output;
        const uint8_t *from = job->from + row * line;
        for (long at = 0; at < job->inputs / numbers; at++) {
            read_block(type, from + at * as.bytes, &block);
            place_block(as, (int)i, to + at * scale_bytes(as), codes + at * group_of(as) * code_bytes(as), &block, 0);
        }
    }
}

static void pack_floats(const struct quant_packing *job, long panel) {
    const long bytes = float_bytes(job->type), inputs = job->inputs;
    for (long i = 0; i < ACROSS && panel * ACROSS + i < job->outputs; i++) {
        const long output = panel * ACROSS + i, row = job->order ? job->order[output] : output;
        for (long at = 0; at < inputs; at++)
            memcpy(job->to + ((panel * inputs + at) * ACROSS + i) * bytes, job->from + (row * inputs + at) * bytes, bytes);
    }
}

#define OF_TYPES(of)                                                                                         \
    of(Q4_0) of(Q4_1) of(Q5_0) of(Q5_1) of(Q8_0) of(Q2_K) of(Q3_K) of(Q4_K) of(Q5_K) of(Q6_K) of(IQ4_NL)      \
        of(IQ4_XS) of(MXFP4)

static void pack_quant_panel(void *given, long panel) {
    const struct quant_packing *const job = given;
    switch (job->type) {
#define OF_TYPE(type) case type: pack_quant_panel_as(type, job, panel); return;
    OF_TYPES(OF_TYPE)
#undef OF_TYPE
    default: pack_floats(job, panel);
    }
}

/* Pack a matrix of a file, [outputs, blocks of inputs], to panels, which are zero: [panels, quant_panel]. */
SHOWN void quant_pack(int type, const uint8_t *from, const int32_t *order, long inputs, long outputs, uint8_t *to) {
    struct quant_packing job = {type, from, order, inputs, outputs, to};
    share(chunks_of(outputs, ACROSS), pack_quant_panel, &job);
}

/* The numbers that panels hold, [outputs, inputs]. */
SHOWN void quant_unpack(int type, const uint8_t *from, long inputs, long outputs, float *to) {
    const struct coded as = coded_as(type);
    const long numbers = quant_numbers(type);
    struct plain block;
    for (long output = 0; output < outputs; output++)
        for (long at = 0; at < inputs; at += numbers) {
            uint8_t *const panel = (uint8_t *)from + output / ACROSS * quant_panel(type, inputs);
            const int own = (int)(output % ACROSS);
            float *const out = to + output * inputs + at;
            if (float_bytes(type)) *out = float_at(type, panel + (at * ACROSS + own) * float_bytes(type));
            else {
                place_block(as, own, panel + at / numbers * scale_bytes(as),
                            panel + codes_at(as, inputs) + at / SHARE * code_bytes(as), &block, 1);
                numbers_of(type, &block, out);
            }
        }
}
