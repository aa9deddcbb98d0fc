/* Products of any number of rows with weights in blocks. */

#pragma once

#include "rounded_amx.h"

#ifdef SQUARED_WHOLE
#define MOST_TOGETHER SIDE
#else
#define MOST_TOGETHER TOGETHER
#endif

struct multiplying_blocks {
    const struct product *product;
    int64_t rows, each, blocks, size; /* ``each``: panels of a chunk; ``size``: bytes of a panel */
    const real *given;
    real *out;
    struct rounded_row *rounded;
    float *measures; /* of groups of rows, by squares alone; otherwise NULL */
};

static void round_given(void *given, int64_t row) {
    const struct multiplying_blocks *const job = given;
    round_row(job->given + row * job->product->inputs, job->product->inputs, job->rounded + row);
#ifdef SQUARED_WHOLE
    if (job->measures) measure_row(job->rounded + row, job->measures, row, job->blocks);
#endif
}

#ifdef SQUARED_WHOLE
/* The products of a panel with a group of ``count`` rows. */
static void square_blocks(const struct multiplying_blocks *job, const char *weights, int64_t row, int64_t count, int shaped,
                          across *sums) {
    if (count != shaped) shape_blocks((int)count, SHARE);
    squares_form *const form = job->product->bits == 8 ? (count > 8 ? squares_8_16 : squares_8_8)
                                                       : (count > 8 ? squares_4_16 : squares_4_8);
    const int8_t *const numbers = job->rounded[row].numbers;
    const int64_t stride = job->rows > 1 ? job->rounded[1].numbers - job->rounded[0].numbers : 0;
    form(weights, job->blocks, numbers, stride, measures_of(job->measures, row, job->blocks), sums);
}
#endif

static void multiply_panels_of_blocks(void *given, int64_t chunk) {
    const struct multiplying_blocks *const job = given;
    const struct product *const product = job->product;
    const int64_t rows = job->rows, outputs = product->outputs, panels = chunks_of(outputs, ACROSS);
    const int64_t end = (chunk + 1) * job->each < panels ? (chunk + 1) * job->each : panels;
    panel_form *const *forms = product->bits == 8 ? forms_of_8 : forms_of_4;
#ifdef SQUARED_WHOLE
    int shaped = 0; /* rows that the registers have */
#endif
    for (int64_t panel = chunk * job->each; panel < end; panel++) {
        const int64_t first = panel * ACROSS, count = outputs - first < ACROSS ? outputs - first : ACROSS;
        const char *const weights = (const char *)product->weights + panel * job->size;
        for (int64_t row = 0, some; row < rows; row += some) {
            const int64_t left = rows - row;
            across sums[MOST_TOGETHER];
#ifdef SQUARED_WHOLE
            if (job->measures && left >= LEAST_SQUARED) {
                some = left < SIDE ? left : SIDE;
                square_blocks(job, weights, row, some, shaped, sums);
                shaped = (int)some;
            } else
#endif
            {
                some = left < TOGETHER ? left : TOGETHER;
                forms[some - 1](weights, job->blocks, job->rounded + row, sums);
            }
            for (int64_t i = 0; i < some; i++) finish(product, first, count, sums + i, job->out + (row + i) * outputs);
        }
    }
#ifdef SQUARED_WHOLE
    if (shaped) __asm__ volatile("tilerelease");
#endif
}

/* ``multiply`` for weights in blocks. Returns 1 if out of memory. */
static int multiply_blocks(const struct product *product, int64_t rows, const real *given, real *out) {
    const int64_t inputs = product->inputs, blocks = (inputs + SHARE - 1) / SHARE;
    const int64_t panels = chunks_of(product->outputs, ACROSS), own = blocks * NUMBERS_OF_BLOCK; /* of a row */
    const int64_t size = blocks * ((product->bits == 8 ? 2 : 4) * ACROSS + SHARE * ACROSS * product->bits / 8);
    int64_t measures = 0;
#ifdef SQUARED_WHOLE
    if (rows >= LEAST_SQUARED && squared()) measures = chunks_of(rows, SIDE) * blocks * MEASURES;
#endif
    float *const room = workspace(rows * own + measures + rows * (sizeof(struct rounded_row) / 4));
    if (!room) return 1;
    if (measures) memset(room + rows * (own + sizeof(struct rounded_row) / 4), 0, measures * sizeof(float));
    struct rounded_row *const rounded = (struct rounded_row *)room;
    float *const scales = (float *)(rounded + rows);
    for (int64_t row = 0; row < rows; row++) rounded[row] = rounded_row_at(scales + row * own, blocks);
    const int64_t each = items_of_chunk(panels, work_of_panel(inputs, ACROSS, rows));
    struct multiplying_blocks job = {product, rows, each, blocks, size, given, out, rounded,
                                      measures ? scales + rows * own : NULL};
    if (rows * inputs > CHUNK) share(rows, round_given, &job);
    else
        for (int64_t row = 0; row < rows; row++) round_given(&job, row);
    share(chunks_of(panels, each), multiply_panels_of_blocks, &job);
    return 0;
}
