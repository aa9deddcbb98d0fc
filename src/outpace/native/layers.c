/* A Llama-like layer for a step of a few rows on a CPU; its matrix products and norms, and the best of logits, for any
   model. One library: this file includes the parts, which are to be read in this order: numbers.h (vectors, rounding),
   tiles.h, amx.h, rounded.h and products.h (matrix products), norms.h, rows.h (what a forward's rows are),
   dots.h, attention.h and attention_amx.h, best.h.

   Compiled for a wheel (packaged.py) or on the machine it runs on (build.py), once per dtype of the activations:
   REAL16 for bfloat16, float32 otherwise. Sums are in float32, and results are rounded where transformers rounds them.

   A row's result does not depend on other rows. A product's sums run over the inputs in their order, DEEP at a
   time, for any number of rows. Those of attention run over the row's own columns, in the order of the text, in groups
   that begin at the first of them. With AMX a group's order is that of the processor's squares, wherever in
   a square a row is. So a node of a tree has the bits that the same token has in plain decoding,
   although its columns are elsewhere in the cache. To keep it so, the sums over columns are in functions that
   are never inlined: the compiler makes one form of each.

   A layer's hidden size is a multiple of 16, and the size of its heads of 32. */

#include "products.h"
#include "norms.h"
#include "attention.h"
#include "attention_amx.h"
#include "forward.h"
#include "best.h"

/* A layer's products and norms. */
struct block {
    struct product joined, output, gates, down; /* queries, keys and values; gate and up */
    const real *before, *between;               /* weights of the norms before attention and before the gate */
    float epsilon;
};

/* Room for the intermediate results of a layer, [rows, ...]. */
struct room {
    real *state, *joined, *attended, *both, *inner;
};

/* A layer of rows [rows, hidden size], its attention per window. Rows of no window keep what ``attended`` has for
   them. Returns 1 if out of memory. */
static int layer(const struct block *own, const struct room *room, long rows, const real *given, real *result,
                 int windows, const struct rows *const *parts, const struct heads *heads) {
    const long hidden = own->joined.inputs, inner = own->down.inputs;
    norm(rows, hidden, given, NULL, own->before, own->epsilon, NULL, room->state);
    if (multiply(&own->joined, rows, room->state, room->joined)) return 1;
    for (int window = 0; window < windows; window++)
        if (attention(parts[window], heads + window)) return 1;
    if (multiply(&own->output, rows, room->attended, room->state)) return 1;
    norm(rows, hidden, given, room->state, own->between, own->epsilon, result, room->state);
    if (multiply(&own->gates, rows, room->state, room->both)) return 1;
    gated(rows, inner, room->both, room->both + inner, 2 * inner, room->inner);
    if (multiply(&own->down, rows, room->inner, room->state)) return 1;
    for (long i = 0; i < rows * hidden; i += LANES) store(result + i, load(result + i) + load(room->state + i));
    return 0;
}

/* Run layers one after the other, each with its result and, per window, its rows and heads. Returns 1 if out of
   memory. */
int layers(int count, const struct block *const *blocks, const struct room *room, long rows, const real *given,
           real *const *results, int windows, const struct rows *const *parts, const struct heads *heads) {
    for (int i = 0; i < count; i++)
        if (layer(blocks[i], room, rows, i ? results[i - 1] : given, results[i], windows, parts + i * windows,
                  heads + i * windows))
            return 1;
    return 0;
}

/* Sizes of the structs that Python fills, which it compares with its own. */
long size_of_product(void) { return sizeof(struct product); }
long size_of_rows(void) { return sizeof(struct rows); }
long size_of_heads(void) { return sizeof(struct heads); }
long size_of_block(void) { return sizeof(struct block); }
long size_of_room(void) { return sizeof(struct room); }
long size_of_decoder(void) { return sizeof(struct decoder); }
long size_of_batch(void) { return sizeof(struct batch); }
long size_of_layer(void) { return sizeof(struct layer); }
long size_of_view(void) { return sizeof(struct view); }
long size_of_lane(void) { return sizeof(struct lane); }
long size_of_norm(void) { return sizeof(struct norm); }
long size_of_forward_room(void) { return sizeof(struct forward_room); }

/* Read a boolean mask [sequences * width, columns]: the columns that each row attends to, as ``struct rows``
   has them. ``cells`` are the rows' places in it; those of padding (``place`` -1) attend to none. Returns the
   number of ``columns``, which are written if there is room for them, ``columns`` not being NULL. */
int64_t read_mask(const uint8_t *mask, int32_t rows, int32_t width, const int32_t *cells, const int32_t *place,
                  int32_t *first, int32_t *run, int32_t *count, int32_t *start, int32_t *columns) {
    int64_t listed = 0;
    for (int row = 0; row < rows; row++) {
        const uint8_t *own = mask + (int64_t)cells[row] * width;
        int at = 0;
        start[row] = (int32_t)listed;
        first[row] = run[row] = count[row] = 0;
        if (place[row] < 0) continue;
        while (at < width && !own[at]) at++;
        first[row] = at < width ? at : 0;
        while (at < width && own[at]) at++;
        run[row] = count[row] = at - first[row];
        for (; at < width; at++)
            if (own[at]) {
                if (columns) columns[listed] = at;
                listed++;
                count[row]++;
            }
    }
    return listed;
}
