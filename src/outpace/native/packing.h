/* Weights in the layouts that products read (tiles.h, rounded.h), from the rows [inputs] of a model's own matrices, which
   may be anywhere. What is written is read back by other code and compared with the rows, while it is in the cache: so a
   mistake in a layout is seen in every layer, at the price of reading memory once. */

#pragma once

#include <stdatomic.h>

#include "dots.h"
#include "products.h"

struct packing {
    int64_t inputs, outputs, bits, panel, each; /* ``panel``: outputs of one; ``each``: panels of a chunk */
    const real *const *rows;
    char *to;
    int64_t size; /* bytes of a panel */
    atomic_long wrong;
};

/* A panel of the numbers as they are, the pairs of inputs one by one. */
static void pack_panel(const struct packing *job, const real *const *rows, int64_t count, char *panel) {
    const int64_t pairs = job->inputs / PAIR, whole = pairs / LANES * LANES;
    const int64_t all = (job->inputs + PAIR - 1) / PAIR, bytes = PAIR * sizeof(real);
    const int64_t step = PANEL * bytes; /* of a pair of all outputs */
    if (count < PANEL || all > pairs) memset(panel, 0, all * step);
    for (int64_t at = 0; at < whole; at += LANES)
        for (int64_t first = 0; first < count; first += LANES) {
            lanes square[LANES] = {0};
            for (int64_t i = 0; i < LANES && first + i < count; i++)
                memcpy(square + i, rows[first + i] + at * PAIR, sizeof(lanes));
            turn(square);
            for (int64_t i = 0; i < LANES; i++) memcpy(panel + (at + i) * step + first * bytes, square + i, sizeof(lanes));
        }
    for (int64_t output = 0; output < count; output++)
        for (int64_t at = whole * PAIR; at < job->inputs; at++)
            memcpy(panel + at / PAIR * step + output * bytes + at % PAIR * sizeof(real), rows[output] + at, sizeof(real));
}

/* 1 unless a panel has its outputs' numbers, to the last bit. */
static int panel_differs(const struct packing *job, const real *const *rows, int64_t count, const char *panel) {
    const real *own = (const real *)panel;
    uint32_t differs = 0, packed, given;
    for (int64_t at = 0; at + PAIR <= job->inputs; at += PAIR, own += PANEL * PAIR)
        for (int64_t output = 0; output < count; output++) {
            memcpy(&packed, own + output * PAIR, sizeof packed);
            memcpy(&given, rows[output] + at, sizeof given);
            differs |= packed ^ given;
        }
    for (int64_t at = job->inputs / PAIR * PAIR; at < job->inputs; at++)
        for (int64_t output = 0; output < count; output++)
            differs |= memcmp(own + output * PAIR, rows[output] + at, sizeof(real)) != 0;
    return differs != 0;
}

/* Numbers' upper halves, rounded to the nearest, to the even one between two. */
static inline across_bits half_bits_of(across number) {
    const across_bits raw = (across_bits)number, nan = (across_bits)(number != number);
    return (((raw + 0x7fff + ((raw >> 16) & 1)) & ~nan) | (0x7fc00000 & nan)) >> 16;
}

static inline across across_pick(across_ints which, across yes, across no) {
    return (across)(((across_ints)yes & which) | ((across_ints)no & ~which));
}

/* A block's numbers in float32, and zeros where the row has ended. */
static inline void block_of(const real *row, int64_t left, float *to) {
    real part[SHARE] = {0};
    if (left < SHARE) memcpy(part, row, left * sizeof(real));
    for (int i = 0; i < SHARE; i += LANES) *(lanes *)(to + i) = load((left < SHARE ? part : row) + i);
}

/* A block of all outputs, input by input; zeros for outputs that there are not. */
static inline void turned_block(const real *const *rows, int64_t count, int64_t at, int64_t left, across *to) {
    float block[ACROSS][SHARE] = {0};
    for (int64_t output = 0; output < count; output++) block_of(rows[output] + at, left, block[output]);
#if LANES == ACROSS
    for (int first = 0; first < SHARE; first += LANES) {
        lanes square[LANES];
        for (int i = 0; i < LANES; i++) square[i] = *(const lanes *)(block[i] + first);
        turn(square);
        for (int i = 0; i < LANES; i++) to[first + i] = (across)square[i];
    }
#else
    for (int i = 0; i < SHARE; i++)
        for (int output = 0; output < ACROSS; output++) to[i][output] = block[output][i];
#endif
}

/* A block's scales, with 4 bits its zeros, and its numbers. They are chosen for scales and zeros as these are kept, in 16
   bits. */
static inline __attribute__((always_inline)) void round_block(const across *block, int bits, char *to) {
    const across none = {0}, bottom = none + (bits == 4 ? 0.0f : -127.0f), top = none + (bits == 4 ? 15.0f : 127.0f);
    across low = block[0], high = block[0];
    for (int i = 1; i < SHARE; i++) {
        low = across_pick(block[i] < low, block[i], low);
        high = across_pick(block[i] > high, block[i], high);
    }
    across span = bits == 4 ? (high - low) / 15 : across_pick(high > -low, high, -low) / 127;
    span = across_pick(span < 1e-30f, none + 1e-30f, span); /* so that a block of zeros is not divided by zero */
    const across_bits kept = half_bits_of(span), begin = bits == 4 ? half_bits_of(low) : (across_bits){0};
    const across scale = (across)(kept << 16), zero = (across)(begin << 16);
    across_ints quads[QUADS] = {0}; /* four inputs' numbers in one */
    for (int i = 0; i < SHARE; i++) {
        across number = (block[i] - zero) / scale;
        number = across_pick(number > bottom, number, bottom);
        number = across_pick(number < top, number, top);
        number = (number + 12582912.0f) - 12582912.0f; /* rounds to an integer */
        quads[i / 4] |= (__builtin_convertvector(number, across_ints) & 255) << 8 * (i % 4);
    }
    *(across_halves *)to = __builtin_convertvector(kept, across_halves);
    if (bits == 4) ((across_halves *)to)[1] = __builtin_convertvector(begin, across_halves);
    across_ints *const own = (across_ints *)(to + (bits == 4 ? 4 : 2) * ACROSS);
    for (int quad = 0; quad < QUADS * bits / 8; quad++)
        own[quad] = bits == 4 ? quads[quad] | quads[quad + QUADS / 2] << 4 : quads[quad];
}

/* Bytes of a block of ACROSS outputs. */
static inline int64_t bytes_of_block(int64_t bits) { return ((bits == 4 ? 4 : 2) + SHARE * bits / 8) * ACROSS; }

static void round_panel(const struct packing *job, const real *const *rows, int64_t count, char *panel) {
    across block[SHARE];
    for (int64_t at = 0; at < job->inputs; at += SHARE, panel += bytes_of_block(job->bits)) {
        turned_block(rows, count, at, job->inputs - at, block);
        if (job->bits == 4) round_block(block, 4, panel);
        else round_block(block, 8, panel);
    }
}

static inline float whole_of(uint16_t half) {
    const uint32_t raw = (uint32_t)half << 16;
    float number;
    memcpy(&number, &raw, sizeof number);
    return number;
}

/* A block's numbers in float32, output by output. */
static inline void read_rounded_block(const across_ints *quads, int four, float (*to)[SHARE]) {
    across turned[SHARE];
    for (int i = 0; i < SHARE; i++) {
        const int place = four ? i % (SHARE / 2) : i;
        const across_ints own = quads[place / 4] >> 8 * (place % 4);
        turned[i] = __builtin_convertvector(!four ? own << 24 >> 24 : (i < SHARE / 2 ? own : own >> 4) & 15, across);
    }
#if LANES == ACROSS
    for (int first = 0; first < SHARE; first += LANES) {
        turn((lanes *)turned + first);
        for (int i = 0; i < LANES; i++) *(lanes *)(to[i] + first) = (lanes)turned[first + i];
    }
#else
    for (int i = 0; i < SHARE; i++)
        for (int output = 0; output < ACROSS; output++) to[output][i] = turned[i][output];
#endif
}

/* 1 unless each of a panel's numbers is within half a step of its output's, or what 16 bits change in its ends. */
static int rounded_differs(const struct packing *job, const real *const *rows, int64_t count, const char *panel) {
    const int four = job->bits == 4;
    ints far = {0};
    for (int64_t at = 0; at < job->inputs; at += SHARE, panel += bytes_of_block(job->bits)) {
        const uint16_t *const halves = (const uint16_t *)panel;
        float read[ACROSS][SHARE], block[SHARE];
        read_rounded_block((const across_ints *)(panel + (four ? 4 : 2) * ACROSS), four, read);
        for (int64_t output = 0; output < count; output++) {
            const float scale = whole_of(halves[output]), zero = four ? whole_of(halves[ACROSS + output]) : 0;
            block_of(rows[output] + at, job->inputs - at, block);
            for (int i = 0; i < SHARE; i += LANES) {
                const lanes own = *(const lanes *)(block + i), found = *(const lanes *)(read[output] + i);
                const lanes off = (lanes)((bits)(own - (found * scale + zero)) & 0x7fffffff);
                const lanes size = (lanes)((bits)own & 0x7fffffff) + (zero < 0 ? -zero : zero);
                far |= ~(off <= size * (1 / 128.0f) + 0.51f * scale);
            }
        }
    }
    int differs = 0;
    for (int lane = 0; lane < LANES; lane++) differs |= far[lane] != 0;
    return differs;
}

static void pack_panels(void *given, int64_t chunk) {
    struct packing *const job = given;
    const int64_t panels = chunks_of(job->outputs, job->panel), end = (chunk + 1) * job->each;
    for (int64_t number = chunk * job->each; number < panels && number < end; number++) {
        const int64_t first = number * job->panel, left = job->outputs - first;
        const int64_t count = left < job->panel ? left : job->panel;
        char *const panel = job->to + number * job->size;
        if (job->bits) round_panel(job, job->rows + first, count, panel);
        else pack_panel(job, job->rows + first, count, panel);
        if ((job->bits ? rounded_differs : panel_differs)(job, job->rows + first, count, panel))
            atomic_fetch_add(&job->wrong, 1);
    }
}

/* Write a product's weights from its outputs' rows. Returns how many panels do not have what the rows have. */
int64_t pack(const struct product *to, const real *const *rows) {
    const int64_t inputs = to->inputs, panel = to->bits ? ACROSS : PANEL;
    struct packing job = {.inputs = inputs, .outputs = to->outputs, .bits = to->bits, .panel = panel, .rows = rows};
    job.to = (char *)to->weights;
    job.size = to->bits ? chunks_of(inputs, SHARE) * bytes_of_block(to->bits)
                        : chunks_of(inputs, PAIR) * (int64_t)(PANEL * PAIR * sizeof(real));
    job.each = items_of_chunk(chunks_of(to->outputs, panel), panel * inputs);
    share(chunks_of(chunks_of(to->outputs, panel), job.each), pack_panels, &job);
    return job.wrong;
}

struct unpacking {
    const struct product *from;
    real *to;
    int64_t each;
};

static void unpack_panels(void *given, int64_t chunk) {
    const struct unpacking *const job = given;
    const int64_t inputs = job->from->inputs, outputs = job->from->outputs, pairs = chunks_of(inputs, PAIR);
    const int64_t panels = chunks_of(outputs, PANEL), end = (chunk + 1) * job->each;
    for (int64_t number = chunk * job->each; number < panels && number < end; number++) {
        const real *const panel = (const real *)job->from->weights + number * pairs * PANEL * PAIR;
        for (int64_t output = 0; output < PANEL && number * PANEL + output < outputs; output++) {
            real *const row = job->to + (number * PANEL + output) * inputs;
            for (int64_t at = 0; at < inputs; at++) row[at] = panel[(at / PAIR * PANEL + output) * PAIR + at % PAIR];
        }
    }
}

/* The rows [outputs, inputs] of weights in panels. */
void unpack(const struct product *from, real *to) {
    struct unpacking job = {from, to, items_of_chunk(chunks_of(from->outputs, PANEL), PANEL * from->inputs)};
    share(chunks_of(chunks_of(from->outputs, PANEL), job.each), unpack_panels, &job);
}
