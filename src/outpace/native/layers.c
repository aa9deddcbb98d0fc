/* A decoder's forward on a CPU, and its parts for other models: matrix products, norms, attention, the best of logits.
   One library: this file includes the parts, which are to be read in this order: numbers.h (vectors, rounding),
   pool.h (threads), tiles.h, amx.h, rounded.h, rounded_amx.h, block_products.h, quants.h, quant_products.h and products.h
   (matrix products), norms.h, rows.h (what a forward's rows are), dots.h, attention.h and attention_amx.h, forward.h (a model and a batch), best.h, packing.h.

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
#include "packing.h"

/* Sizes of the structs that Python fills, which it compares with its own. */
int64_t size_of_product(void) { return sizeof(struct product); }
int64_t size_of_rows(void) { return sizeof(struct rows); }
int64_t size_of_heads(void) { return sizeof(struct heads); }
int64_t size_of_decoder(void) { return sizeof(struct decoder); }
int64_t size_of_batch(void) { return sizeof(struct batch); }
int64_t size_of_layer(void) { return sizeof(struct layer); }
int64_t size_of_view(void) { return sizeof(struct view); }
int64_t size_of_lane(void) { return sizeof(struct lane); }
int64_t size_of_norm(void) { return sizeof(struct norm); }
int64_t size_of_forward_room(void) { return sizeof(struct forward_room); }

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
