/* Products of squares of numbers by AMX, where the compiler knows it (SQUARED) and the system allows it. */

#pragma once

#include "tiles.h"

#if defined(SQUARED) || defined(SQUARED_WHOLE)
#define SIDE 16            /* rows, outputs or pairs of inputs of a square */
#define DEPTH (SIDE * PAIR) /* inputs of a square */

/* True if the system lets this process use the registers of squares. */
static int squared(void) {
    static int known; /* 1: no, 2: yes */
    if (!known) known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) ? 1 : 2;
    return known == 2;
}

/* gcc's intrinsics do not say that they read memory. */
#define SQUARE(register, from, stride)                                                                       \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #register ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define SQUARE_OUT(register, to, stride)                                                                     \
    __asm__ volatile("tilestored %%tmm" #register ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
#endif

#ifdef SQUARED
/* Set the rows of the registers: 0, 1 (sums) and 4 (rows) have ``first``, 2, 3 and 5 ``second``; 6 and 7 are weights.
   Other code has other shapes, and the system keeps these for a thread until ``tilerelease``. */
static void shape(int first, int second) {
    const uint8_t a = (uint8_t)first, b = (uint8_t)second;
    const struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } sizes = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {a, a, b, b, a, b, SIDE, SIDE}};
    __asm__ volatile("ldtilecfg %0" ::"m"(sizes));
}

#define SQUARE_ADD(sum, rows, weights)                                                                       \
    __asm__ volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sum ::)
#define SQUARE_SUM(register, from, stride)                                                                   \
    do {                                                                                                     \
        if (fresh) __asm__ volatile("tilezero %%tmm" #register ::);                                          \
        else SQUARE(register, from, stride);                                                                 \
    } while (0)

/* Add to the sums, ``apart`` floats apart, or if ``fresh`` to zero, the products of ``steps`` times DEPTH inputs of
   rows ``stride`` apart with weights [pairs of inputs, width, PAIR]: of up to ``high`` times SIDE rows and of ``wide``
   times SIDE outputs. A sum has the same bits anywhere in a square. */
static inline __attribute__((always_inline)) void squares_of(int high, int wide, const real *given, int64_t stride,
                                                             const real *weights, int64_t width, int64_t steps,
                                                             float *sums, int64_t apart, int fresh, int fetch) {
    const int64_t line = width * PAIR * sizeof(real), next = apart * sizeof(float);
    float *const others = sums + (high == 2 ? SIDE * apart : 2 * SIDE);
    SQUARE_SUM(0, sums, next);
    SQUARE_SUM(1, sums + SIDE, next);
    if (high * wide == 4) {
        SQUARE_SUM(2, others, next);
        SQUARE_SUM(3, others + SIDE, next);
    }
    for (int64_t step = 0; step < steps; step++, weights += SIDE * width * PAIR) {
        if (fetch)
            for (int64_t at = 0; at < SIDE * line; at += LINE)
                __builtin_prefetch((const char *)weights + DISTANCE + at, 0, 3);
        SQUARE(4, given + step * DEPTH, stride * sizeof(real));
        SQUARE(6, weights, line);
        SQUARE_ADD(0, 4, 6);
        SQUARE(7, weights + DEPTH, line);
        SQUARE_ADD(1, 4, 7);
        if (high == 2) {
            SQUARE(5, given + SIDE * stride + step * DEPTH, stride * sizeof(real));
            SQUARE_ADD(2, 5, 6);
            SQUARE_ADD(3, 5, 7);
        }
        if (wide == 4) {
            SQUARE(6, weights + 2 * DEPTH, line);
            SQUARE_ADD(2, 4, 6);
            SQUARE(7, weights + 3 * DEPTH, line);
            SQUARE_ADD(3, 4, 7);
        }
    }
    SQUARE_OUT(0, sums, next);
    SQUARE_OUT(1, sums + SIDE, next);
    if (high * wide == 4) {
        SQUARE_OUT(2, others, next);
        SQUARE_OUT(3, others + SIDE, next);
    }
}

/* The same for any number of rows and ``outputs``, a multiple of 2 * SIDE. */
static void square(int64_t count, const real *given, int64_t stride, const real *weights, int64_t width, int64_t outputs,
                   int64_t steps, float *sums, int64_t apart, int fresh) {
    int shaped = 0; /* rows that the registers have */
    for (int64_t row = 0; row < count; row += 2 * SIDE) {
        const int left = (int)(count - row < 2 * SIDE ? count - row : 2 * SIDE);
        const real *rows = given + row * stride;
        float *to = sums + row * apart;
        if (left != shaped) shape(left > SIDE ? SIDE : left, left > SIDE ? left - SIDE : left);
        shaped = left;
        for (int64_t at = 0; at < outputs; at += 2 * SIDE) {
            const real *own = weights + at * PAIR;
            if (left > SIDE) squares_of(2, 2, rows, stride, own, width, steps, to + at, apart, fresh, 0);
            else if (outputs - at >= 4 * SIDE) {
                squares_of(1, 4, rows, stride, own, width, steps, to + at, apart, fresh, count == left);
                at += 2 * SIDE;
            } else squares_of(1, 2, rows, stride, own, width, steps, to + at, apart, fresh, 0);
        }
    }
}
#endif
