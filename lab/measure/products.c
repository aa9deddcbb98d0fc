/* Processor time of llama.cpp's products of several rows, as multiples of one row's, with one thread.
 *
 *   cc -O2 -I GGML/include lab/measure/products.c -o products -L LIB -lggml-cpu -lggml-base
 *   LD_LIBRARY_PATH=LIB ./products f16|bf16 COLUMNS OUTPUTS MATRICES
 *
 * GGML is llama.cpp's folder ggml, LIB the folder of its libraries. The matrices, of OUTPUTS rows of COLUMNS
 * numbers, should exceed the processor's caches together. Numbers of rows take turns; a "!" marks those whose
 * first row has other bits than alone.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ggml-cpu.h"
#include "ggml.h"

enum { COUNTS = 8, TURNS = 9 };
static const int ROWS[COUNTS] = {1, 2, 3, 4, 6, 8, 16, 32};

static double seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static int ascending(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

static double uniform(void) { return (double)rand() / RAND_MAX - 0.5; }

static void fill(struct ggml_tensor *matrix, float *row) {
    for (int64_t i = 0; i < matrix->ne[1]; i++) {
        char *place = (char *)matrix->data + i * matrix->nb[1];
        for (int64_t j = 0; j < matrix->ne[0]; j++) row[j] = 0.1 * uniform();
        if (matrix->type == GGML_TYPE_F16)
            ggml_fp32_to_fp16_row(row, (ggml_fp16_t *)place, matrix->ne[0]);
        else
            ggml_fp32_to_bf16_row(row, (ggml_bf16_t *)place, matrix->ne[0]);
    }
}

int main(int given, char **arguments) {
    if (given != 5) {
        fprintf(stderr, "usage: products f16|bf16 COLUMNS OUTPUTS MATRICES\n");
        return 2;
    }
    enum ggml_type type = strcmp(arguments[1], "f16") ? GGML_TYPE_BF16 : GGML_TYPE_F16;
    int columns = atoi(arguments[2]), outputs = atoi(arguments[3]), matrices = atoi(arguments[4]);
    size_t results = (size_t)matrices * outputs * 4 * 80; /* of all numbers of rows, which are 72 */
    size_t weights = (size_t)matrices * columns * outputs * 2;
    struct ggml_init_params sizes = {weights + results + ((size_t)64 << 20), NULL, false};
    struct ggml_context *context = ggml_init(sizes);
    struct ggml_tensor **matrix = malloc(matrices * sizeof *matrix);
    float *row = malloc(columns * sizeof *row);
    for (int i = 0; i < matrices; i++)
        fill(matrix[i] = ggml_new_tensor_2d(context, type, columns, outputs), row);
    struct ggml_cgraph *graph[COUNTS];
    struct ggml_cplan plan[COUNTS];
    struct ggml_tensor *product[COUNTS];
    for (int c = 0; c < COUNTS; c++) {
        struct ggml_tensor *rows = ggml_new_tensor_2d(context, GGML_TYPE_F32, columns, ROWS[c]);
        srand(7);
        for (int i = 0; i < columns * ROWS[c]; i++) ((float *)rows->data)[i] = uniform();
        graph[c] = ggml_new_graph(context);
        for (int i = 0; i < matrices; i++)
            ggml_build_forward_expand(graph[c], product[c] = ggml_mul_mat(context, matrix[i], rows));
        plan[c] = ggml_graph_plan(graph[c], 1, NULL);
        plan[c].work_data = malloc(plan[c].work_size + 64);
    }
    static double ratio[COUNTS][TURNS];
    for (int turn = 0; turn < TURNS; turn++) {
        double alone = 0;
        for (int c = 0; c < COUNTS; c++) {
            double began = seconds();
            ggml_graph_compute(graph[c], &plan[c]);
            double took = seconds() - began;
            if (!c) alone = took;
            ratio[c][turn] = took / alone;
        }
    }
    printf("%s, %d columns:", arguments[1], columns);
    for (int c = 0; c < COUNTS; c++) {
        qsort(ratio[c], TURNS, sizeof(double), ascending);
        int differ = memcmp(product[c]->data, product[0]->data, outputs * sizeof(float));
        printf("  %d: %.2f%s", ROWS[c], ratio[c][TURNS / 2], differ ? "!" : "");
    }
    printf("\n");
    return 0;
}
