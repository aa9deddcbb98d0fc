/* Products of rows with weights, of any layout. */

#pragma once

#include "amx.h"
#include "block_products.h"
#include "quant_products.h"
#include "tiles.h"

/* Numbers of outputs in a panel, also of rounded weights, and of inputs in a pair, for packing. */
int panel_outputs(void) { return PANEL; }
int rounded_outputs(void) { return ACROSS; }
int pair_inputs(void) { return PAIR; }

struct multiplying {
    const struct product *product;
    int64_t rows, each; /* ``each``: panels of a chunk */
    const real *given;
    real *out;
    const float *numbers; /* ``given`` in float32, or NULL */
    int by_squares;
};

/* The products of all rows with a panel. */
static inline void multiply_panel(const struct multiplying *job, int64_t panel) {
    const struct product *const product = job->product;
    const real *const given = job->given;
    const int64_t rows = job->rows, inputs = product->inputs, outputs = product->outputs, odd = inputs % PAIR;
    const int64_t whole = (inputs + PAIR - 1) / PAIR * PAIR;
#ifdef WIDENED
    const float *const numbers = job->numbers;
#endif
    const int64_t first = panel * PANEL, count = outputs - first < PANEL ? outputs - first : PANEL;
    const real *const own = (const real *)product->weights + panel * whole * PANEL;
    real biases[PANEL] = {0}, line[PANEL];
    float sums[TILES * MOST * PANEL];
    if (product->bias) memcpy(biases, product->bias + first, count * sizeof(real));
    for (int64_t from = 0; from < rows; from += TILES * MOST) {
        const int64_t left = rows - from < TILES * MOST ? rows - from : TILES * MOST;
        const int turns = (int)((left + MOST - 1) / MOST);
        memset(sums, 0, left * PANEL * sizeof(float));
        for (int64_t at = 0; at < inputs; at += DEEP) {
            int64_t deep = inputs - at < DEEP ? inputs - at : DEEP;
            const real *weights = own + at * PANEL, *numbers_at = given + from * inputs + at;
#ifdef SQUARED
            if (job->by_squares && deep >= DEPTH) {
                square(left, numbers_at, inputs, weights, PANEL, PANEL, deep / DEPTH, sums, PANEL, 0);
                weights += deep / DEPTH * DEPTH * PANEL;
                numbers_at += deep / DEPTH * DEPTH;
                if ((deep %= DEPTH) < PAIR) continue;
            }
#endif
            const char *ahead = (const char *)weights + (turns > 1 ? deep * PANEL * sizeof(real) : DISTANCE);
#ifdef WIDENED
            float wide[DEEP * PANEL];
            if (numbers && turns > 1) widen_panel(weights, deep / PAIR, wide);
#endif
            for (int turn = 0; turn < turns; turn++) {
                const int64_t row = left * turn / turns, next = left * (turn + 1) / turns;
                float *const to = sums + row * PANEL;
#ifdef WIDENED
                if (numbers && turns > 1) {
                    wide_tiles[next - row - 1](numbers + (from + row) * inputs + at, inputs, wide,
                                               deep / PAIR * PAIR, to);
                    continue;
                }
#endif
                tiles[next - row - 1](numbers_at + row * inputs, inputs, weights, deep / PAIR, to,
                                      ahead, turn, turns);
            }
        }
        for (int64_t row = 0; odd && row < left; row++) { /* a whole pair would reach into the next row */
            const real last[PAIR] = {given[(from + row + 1) * inputs - 1]};
            const real *weights = own + (inputs - 1) * PANEL;
            tiles[0](last, PAIR, weights, 1, sums + row * PANEL, (const char *)weights, 0, 1);
        }
        for (int64_t row = 0; row < left; row++) {
            for (int64_t i = 0; i < PANEL; i += LANES)
                store(line + i, *(lanes *)(sums + row * PANEL + i) + load(biases + i));
            memcpy(job->out + (from + row) * outputs + first, line, count * sizeof(real));
        }
    }
}

static void multiply_panels(void *given, int64_t chunk) {
    const struct multiplying *const job = given;
    const int64_t panels = chunks_of(job->product->outputs, PANEL), end = (chunk + 1) * job->each;
    for (int64_t panel = chunk * job->each; panel < panels && panel < end; panel++) multiply_panel(job, panel);
#ifdef SQUARED
    if (job->by_squares) __asm__ volatile("tilerelease");
#endif
}

/* Rows [rows, inputs] times the weights, plus the bias: [rows, outputs]. Returns 1 if out of memory. */
int multiply(const struct product *product, int64_t rows, const real *given, real *out) {
    if (product->bits == MARKED) return multiply_quants(product, rows, given, out);
    if (product->bits) return multiply_blocks(product, rows, given, out);
    const int64_t panels = chunks_of(product->outputs, PANEL);
    const int64_t each = items_of_chunk(panels, work_of_panel(product->inputs, PANEL, rows));
    struct multiplying job = {product, rows, each, given, out, NULL, 0};
#ifdef SQUARED
    job.by_squares = squared();
#endif
#ifdef WIDENED
    float *const numbers = rows > MOST + 1 ? workspace(rows * product->inputs) : NULL; /* if NULL, each tile converts */
    if (numbers) widen(given, rows * product->inputs, numbers);
    job.numbers = numbers;
#endif
    share(chunks_of(panels, each), multiply_panels, &job);
    return 0;
}
