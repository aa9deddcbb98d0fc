/* A part of a step, some times over: counted PART ROWS TIMES (arm_instructions.sh). PART: 0 for a product with bfloat16
   weights, 8, 4, or 100 and a type of GGUF files; norm; attention. With -DDRAWS any PART is draws. */

#ifdef DRAWS
#include "draw.c"

#define VOCABULARY 32000

int main(int count, char **words) {
    if (count != 4) return 2;
    const int rows = atoi(words[2]), times = atoi(words[3]);
    float *const scores = malloc(rows * VOCABULARY * sizeof(float));
    uint64_t *const hashed = malloc(VOCABULARY * sizeof(uint64_t));
    struct draw *const draws = calloc(rows, sizeof(struct draw));
    for (int i = 0; i < rows * VOCABULARY; i++) scores[i] = (float)(i % VOCABULARY * 7919 % VOCABULARY) / 3200.0f;
    for (int i = 0; i < VOCABULARY; i++) hashed[i] = mixed(i);
    for (int row = 0; row < rows; row++)
        draws[row] = (struct draw){.key = row, .top_k = VOCABULARY, .temperature = 1, .top_p = 1, .margin = 1e-6};
    for (int i = 0; i < times; i++) draw_rows(rows, VOCABULARY, scores, hashed, draws);
    for (int row = 0; row < rows; row++)
        if (draws[row].token < 0) return 1;
    return 0;
}
#else
#include "layers.c"

#define INPUTS 1024
#define OUTPUTS 256
#define HEADS 8
#define SHARED 2
#define SIZE 64
#define COLUMNS 512 /* before the rows */
#define LONGER 1024 /* columns that the cache has room for */

static int attend_to(int rows, const real *given, real *out, int times) {
    int32_t *const numbers = calloc(6 * rows, sizeof(int32_t)), begin[2] = {0, rows};
    int32_t *const order = numbers, *const place = numbers + rows, *const run = numbers + 2 * rows;
    for (int row = 0; row < rows; row++) order[row] = row, place[row] = COLUMNS + row, run[row] = COLUMNS + row + 1;
    const struct rows own = {.rows = rows, .sequences = 1, .heads = HEADS, .shared = SHARED, .size = SIZE, .rotary = SIZE,
        .order = order, .begin = begin, .sequence = numbers + 3 * rows, .place = place, .first = numbers + 4 * rows, .run = run,
        .count = run, .start = numbers + 5 * rows, .cosine = given, .sine = given,
        .queries = malloc(rows * HEADS * SIZE * sizeof(float))};
    real *const cache = calloc(2 * SHARED * LONGER * SIZE, sizeof(real));
    const struct heads heads = {.query = given, .key = given, .value = given, .query_stride = HEADS * SIZE,
        .key_stride = SHARED * SIZE, .value_stride = SHARED * SIZE, .scale = 0.125f, .keys = cache,
        .values = cache + SHARED * LONGER * SIZE, .sequence_stride = SHARED * LONGER * SIZE, .head_stride = LONGER * SIZE,
        .out = out};
    for (int i = 0; i < times; i++)
        if (attention(&own, &heads)) return 1;
    return 0;
}

int main(int count, char **words) {
    if (count != 4) return 2;
    const int bits_of = atoi(words[1]), rows = atoi(words[2]), times = atoi(words[3]);
    uint8_t *const weights = aligned_alloc(64, 4 << 20);
    real *const given = malloc(rows * INPUTS * sizeof(real)), *const out = malloc(rows * INPUTS * sizeof(real));
    for (int i = 0; i < 4 << 20; i++) weights[i] = (uint8_t)(i * 7 % 23);
    for (int i = 0; i < rows * INPUTS; i += LANES) store(given + i, (lanes){1, 2, 3, 4});
    if (words[1][0] == 'a') return attend_to(rows, given, out, times);
    if (words[1][0] == 'n') {
        const struct norm own = {.weight = (const float *)weights, .epsilon = 1e-6f, .kind = RMS_NORM};
        for (int i = 0; i < times; i++) norm(&own, rows, INPUTS, given, out);
        return 0;
    }
    const struct quant_part part = {OUTPUTS, bits_of - 100, weights};
    const struct quants quants = {1, &part};
    struct product product = {INPUTS, OUTPUTS, bits_of, weights, NULL};
    if (bits_of >= 100) product.bits = MARKED, product.weights = &quants;
    for (int i = 0; i < times; i++)
        if (multiply(&product, rows, given, out)) return 1;
    return 0;
}
#endif
