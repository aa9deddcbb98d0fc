/* A product, some times over: product BITS ROWS TIMES (arm_instructions.sh). BITS: 0 for bfloat16 weights, 8, 4, or 100 and
   a type of GGUF files. */

#include "layers.c"

#define INPUTS 1024
#define OUTPUTS 256

int main(int count, char **words) {
    if (count != 4) return 2;
    const int bits_of = atoi(words[1]), rows = atoi(words[2]), times = atoi(words[3]);
    uint8_t *const weights = aligned_alloc(64, 4 << 20);
    real *const given = malloc(rows * INPUTS * sizeof(real)), *const out = malloc(rows * OUTPUTS * sizeof(real));
    for (int i = 0; i < 4 << 20; i++) weights[i] = (uint8_t)(i * 7 % 23);
    for (int i = 0; i < rows * INPUTS; i += LANES) store(given + i, (lanes){1, 2, 3, 4});
    const struct quant_part part = {OUTPUTS, bits_of - 100, weights};
    const struct quants quants = {1, &part};
    struct product product = {INPUTS, OUTPUTS, bits_of, weights, NULL};
    if (bits_of >= 100) product.bits = MARKED, product.weights = &quants;
    for (int i = 0; i < times; i++)
        if (multiply(&product, rows, given, out)) return 1;
    return 0;
}
