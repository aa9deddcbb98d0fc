/* Rows of a cache moved within their slots (lanes.py). */

#include <stdint.h>
#include <string.h>

/* A buffer is [layers, places, heads, rows, row bytes]; strides are in bytes. Moves are made in their order. */
void move_rows(char *buffer, int64_t layers, int64_t heads, int64_t layer_stride, int64_t place_stride,
               int64_t head_stride, int64_t row, int64_t count, const int64_t *places, const int64_t *sources,
               const int64_t *targets) {
    for (int64_t layer = 0; layer < layers; layer++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t move = 0; move < count; move++) {
                char *rows = buffer + layer * layer_stride + places[move] * place_stride + head * head_stride;
                memcpy(rows + targets[move] * row, rows + sources[move] * row, row);
            }
}
