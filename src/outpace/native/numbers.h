/* Numbers of activations (REAL16: bfloat16, otherwise float32) and vectors of LANES of them in float32, as wide
   as the processor has them. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(_WIN32) && !defined(__clang__)
#error "gcc does not align vectors on the stack of Windows; set CC to zig or clang"
#endif

#if defined(__linux__) && defined(REAL16) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define SQUARED /* products of squares of numbers (AMX), where the system allows them */
#endif
#if defined(__linux__) && defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define SQUARED_WHOLE /* of integers */
#endif
#if defined(SQUARED) || defined(SQUARED_WHOLE)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX2__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_FMA)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define LEVELS 4 /* LANES is 2 to the power of it */
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
#define LANES 8
#define LEVELS 3
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LANES 4
#define LEVELS 2
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4)));

#ifdef __clang__
#define shuffled __builtin_shufflevector
#else /* gcc 11 lacks that */
#define shuffled(one, other, ...) __builtin_shuffle(one, other, (ints){__VA_ARGS__})
#endif

#ifdef REAL16
typedef uint16_t real;
typedef uint16_t reals __attribute__((vector_size(2 * LANES), aligned(2)));

static inline lanes load(const real *from) {
#if LANES == 16 /* gcc 12 converts halves of it */
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    return (lanes)(__builtin_convertvector(*(const reals *)from, bits) << 16);
#endif
}

static inline bits rounded(lanes value) {
    bits raw = (bits)value, nan = (bits)(value != value);
    bits even = raw + 0x7fff + ((raw >> 16) & 1);
    return ((even & ~nan) | (0x7fc00000 & nan)) >> 16;
}

static inline void store(real *to, lanes value) {
    *(reals *)to = __builtin_convertvector(rounded(value), reals);
}

static inline lanes narrow(lanes value) { return (lanes)(rounded(value) << 16); }
#else
typedef float real;

static inline lanes load(const real *from) { return *(const lanes *)from; }

static inline void store(real *to, lanes value) { *(lanes *)to = value; }

static inline lanes narrow(lanes value) { return value; }
#endif

static inline lanes pick(ints which, lanes yes, lanes no) {
    return (lanes)(((ints)yes & which) | ((ints)no & ~which));
}

/* a * b + c, rounded once where the processor can: what a compiler makes of a sum of two products is its choice. */
static inline lanes fused(lanes a, lanes b, lanes c) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && LANES == 8
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FMA__)
    return (lanes)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif defined(__ARM_FEATURE_FMA)
    return (lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

static inline float total(lanes value) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += value[lane];
    return sum;
}

/* e to the power of x, to about 1e-7 of it; NaN stays. */
static inline lanes exponential(lanes x) {
    const lanes zero = {0};
    x = pick(x < -87.0f, zero - 87.0f, x);
    x = pick(x > 88.0f, zero + 88.0f, x);
    lanes count = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounds to an integer */
    lanes rest = x - count * 0.693359375f;
    rest = rest + count * 2.12194440e-4f;
    lanes sum = zero + 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * (lanes)((__builtin_convertvector(count, ints) + 127) << 23);
}

/* The hyperbolic tangent, to about 1e-7. */
static inline lanes bent(lanes x) { return 1.0f - 2.0f / (exponential(x * 2.0f) + 1.0f); }

#ifdef _WIN32
#include <malloc.h>
#define aligned_alloc(alignment, bytes) _aligned_malloc(bytes, alignment)
#define free_aligned _aligned_free
#else
#define free_aligned free
#endif

static float *workspace(size_t numbers) {
    static _Thread_local float *kept;
    static _Thread_local size_t room;
    if (numbers > room) { /* kept until the process ends: pages that are new in every call would cost more */
        free_aligned(kept);
        kept = aligned_alloc(64, (numbers * sizeof(float) + 63) / 64 * 64);
        room = kept ? numbers : 0;
    }
    return kept;
}

static void widen(const real *from, int64_t count, float *to) {
    const int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) *(lanes *)(to + i) = load(from + i);
    real rest[LANES] = {0};
    if (count == whole) return;
    memcpy(rest, from + whole, (count - whole) * sizeof(real));
    const lanes last = load(rest);
    memcpy(to + whole, &last, (count - whole) * sizeof(float));
}
