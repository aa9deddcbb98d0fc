/* Rows of a cache moved within their slots (lanes.py). */

#include <string.h>

/* A buffer is [layers, places, heads, rows, row bytes]; strides are in bytes. Moves are made in their order. */
void move_rows(char *buffer, long layers, long heads, long layer_stride, long place_stride, long head_stride, long row,
               long count, const long *places, const long *sources, const long *targets) {
    for (long layer = 0; layer < layers; layer++)
        for (long head = 0; head < heads; head++)
            for (long move = 0; move < count; move++) {
                char *rows = buffer + layer * layer_stride + places[move] * place_stride + head * head_stride;
                memcpy(rows + targets[move] * row, rows + sources[move] * row, row);
            }
}
