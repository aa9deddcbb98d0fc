/* A Llama-like layer for a step of a few rows on a CPU; its matrix products and norms, and the best of logits, for any
   model.

   Compiled for a wheel (packaged.py) or on the machine it runs on (build.py), once per dtype of the activations: REAL16 for bfloat16,
   float32 otherwise. Sums are in float32, and results are rounded where transformers rounds them.

   A row's result does not depend on other rows. A product's sums run over the inputs in their order, DEEP at a
   time, for any number of rows. Those of attention run over the row's own columns, in the order of the text, in groups
   that begin at the first of them. With AMX a group's order is that of the processor's squares, wherever in
   a square a row is. So a node of a tree has the bits that the same token has in plain decoding,
   although its columns are elsewhere in the cache. To keep it so, the sums over columns are in functions that
   are never inlined: the compiler makes one form of each.

   A layer's hidden size is a multiple of 16, and the size of its heads of 32. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(REAL16) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define SQUARED /* products of squares of numbers (AMX), where the system allows them */
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

#define GROUP 16 /* columns whose products are summed together */
#define BLOCK 64 /* columns converted to float32 together */
#ifdef SQUARED
#define TILE 64
#else
#define TILE 60 /* queries that share a converted block: a multiple of any MOST */
#endif
#define FEW 6    /* queries for which a block of keys is not transposed */
#define PAIRED 2 /* vectors of numbers that a tile of queries is multiplied by together */
#define SMALL 32768 /* numbers below which one thread is faster than several */

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4)));

#ifdef REAL16
typedef uint16_t real;
typedef uint16_t reals __attribute__((vector_size(2 * LANES), aligned(2)));

static inline lanes load(const real *from) {
    return (lanes)(__builtin_convertvector(*(const reals *)from, bits) << 16);
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

static float *workspace(size_t numbers) {
    static _Thread_local float *kept;
    static _Thread_local size_t room;
    if (numbers > room) { /* kept until the process ends: pages that are new in every call would cost more */
        free(kept);
        kept = aligned_alloc(64, (numbers * sizeof(float) + 63) / 64 * 64);
        room = kept ? numbers : 0;
    }
    return kept;
}

static void widen(const real *from, long count, float *to) {
    const long whole = count / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) *(lanes *)(to + i) = load(from + i);
    real rest[LANES] = {0};
    if (count == whole) return;
    memcpy(rest, from + whole, (count - whole) * sizeof(real));
    const lanes last = load(rest);
    memcpy(to + whole, &last, (count - whole) * sizeof(float));
}

/* Products of rows with weights [outputs, inputs], which are packed in panels of WIDE vectors of outputs:
   [panels, inputs / PAIR, PANEL, PAIR], the last pair filled with zeros. For a tile of rows a panel's sums stay
   in registers. Its weights are read from memory once, for the first tile, and from the cache for the others;
   meanwhile the next panel is fetched. */
#if LANES == 16
#define WIDE 4
#define MOST 6 /* rows of a tile */
#else
#define WIDE 2
#define MOST 5
#endif
#define PANEL (WIDE * LANES)
#define TILES 16      /* tiles whose sums are kept at once */
#define LINE 64       /* bytes of a cache line */
#define DISTANCE 4096 /* bytes that a single tile fetches ahead */
#define DEEP 512      /* inputs that are summed together; their part of a panel stays in the cache */

#ifdef REAL16
#define PAIR 2
#else
#define PAIR 1
#endif

/* PAIR inputs' weights of a vector of outputs, and their product with a row's next PAIR inputs, added to the sums. */
#if defined(REAL16) && defined(__AVX512BF16__)
typedef __m512bh pairs;

static inline pairs pairs_of(const real *weights) { return (pairs)_mm512_loadu_si512(weights); }

static inline lanes step_of(lanes sum, const real *given, pairs weights) {
    int32_t pair;
    memcpy(&pair, given, sizeof pair);
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), weights);
}
#elif defined(REAL16)
typedef struct {
    lanes even, odd;
} pairs;

static inline pairs pairs_of(const real *weights) {
    const bits both = *(const bits *)weights;
    return (pairs){(lanes)(both << 16), (lanes)(both & 0xffff0000u)};
}

static inline lanes step_of(lanes sum, const real *given, pairs weights) {
    const bits zero = {0};
    sum += (lanes)(zero + ((uint32_t)given[0] << 16)) * weights.even;
    return sum + (lanes)(zero + ((uint32_t)given[1] << 16)) * weights.odd;
}
#else
typedef lanes pairs;

static inline pairs pairs_of(const real *weights) { return *(const lanes *)weights; }

static inline lanes step_of(lanes sum, const real *given, pairs weights) { return sum + *given * weights; }
#endif

/* Add the products of ``steps`` pairs of inputs of ``count`` rows to the sums. Tile ``turn`` of ``turns`` fetches
   its share of the bytes at ``ahead``. */
static inline __attribute__((always_inline)) void tile_of(int count, const real *given, long stride,
                                                          const real *weights, long steps, float *sums,
                                                          const char *ahead, int turn, int turns) {
    const long size = PANEL * PAIR * sizeof(real); /* bytes of a step */
    lanes sum[MOST][WIDE] = {0};
    for (long step = 0; step < steps; step++) {
        const char *next = ahead + step * size;
        if (turns == 1) {
            for (long at = 0; at < size; at += LINE) __builtin_prefetch(next + at, 0, 3);
        } else if (turn-- == 0) { /* not into the nearest cache, which holds this panel's */
            for (long at = 0; at < size; at += LINE) __builtin_prefetch(next + at, 0, 2);
            turn = turns - 1;
        }
        for (int part = 0; part < WIDE; part++) {
            const pairs own = pairs_of(weights + (step * PANEL + part * LANES) * PAIR);
            for (int row = 0; row < count; row++)
                sum[row][part] = step_of(sum[row][part], given + row * stride + step * PAIR, own);
        }
    }
    for (int row = 0; row < count; row++)
        for (int part = 0; part < WIDE; part++) *(lanes *)(sums + row * PANEL + part * LANES) += sum[row][part];
}

typedef void tile(const real *, long, const real *, long, float *, const char *, int, int);
#define FORM(count)                                                                                          \
    static __attribute__((noinline)) void tile_##count(const real *given, long stride, const real *weights,  \
                                                       long steps, float *sums, const char *ahead, int turn, \
                                                       int turns) {                                          \
        tile_of(count, given, stride, weights, steps, sums, ahead, turn, turns);                             \
    }
#if MOST == 6
#define FORMS FORM(1) FORM(2) FORM(3) FORM(4) FORM(5) FORM(6)
#define ALL(name) {name##1, name##2, name##3, name##4, name##5, name##6}
#else
#define FORMS FORM(1) FORM(2) FORM(3) FORM(4) FORM(5)
#define ALL(name) {name##1, name##2, name##3, name##4, name##5}
#endif
FORMS
static tile *const tiles[] = ALL(tile_);

#if PAIR == 2 && !defined(__AVX512BF16__)
#define WIDENED /* with many rows, weights and rows are converted to float32 once, not for each tile */
static inline __attribute__((always_inline)) void wide_tile_of(int count, const float *given, long stride,
                                                               const float *weights, long inputs, float *sums) {
    const lanes zero = {0};
    lanes sum[MOST][WIDE] = {0};
    for (long at = 0; at < inputs; at++)
        for (int part = 0; part < WIDE; part++) {
            const lanes own = *(const lanes *)(weights + at * PANEL + part * LANES);
            for (int row = 0; row < count; row++)
                sum[row][part] = fused(given[row * stride + at] - zero, own, sum[row][part]);
        }
    for (int row = 0; row < count; row++)
        for (int part = 0; part < WIDE; part++) *(lanes *)(sums + row * PANEL + part * LANES) += sum[row][part];
}

typedef void wide_tile(const float *, long, const float *, long, float *);
#undef FORM
#define FORM(count)                                                                                          \
    static __attribute__((noinline)) void wide_tile_##count(const float *given, long stride,                 \
                                                            const float *weights, long inputs, float *sums) { \
        wide_tile_of(count, given, stride, weights, inputs, sums);                                           \
    }
FORMS
static wide_tile *const wide_tiles[] = ALL(wide_tile_);

/* ``steps`` pairs of inputs' weights of a panel in float32: [2 * steps, PANEL]. */
static void widen_panel(const real *weights, long steps, float *to) {
    for (long step = 0; step < steps; step++)
        for (int part = 0; part < WIDE; part++) {
            const pairs own = pairs_of(weights + (step * PANEL + part * LANES) * PAIR);
            *(lanes *)(to + 2 * step * PANEL + part * LANES) = own.even;
            *(lanes *)(to + (2 * step + 1) * PANEL + part * LANES) = own.odd;
        }
}
#endif

#ifdef SQUARED
#define SIDE 16            /* rows, outputs or pairs of inputs of a square */
#define DEPTH (SIDE * PAIR) /* inputs of a square */

/* True if the system lets this process use the registers of squares. */
static int squared(void) {
    static int known; /* 1: no, 2: yes */
    if (!known) known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) ? 1 : 2;
    return known == 2;
}

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

/* gcc's intrinsics do not say that they read memory. */
#define SQUARE(register, from, stride)                                                                       \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #register ::"r"(from), "r"((long)(stride)) : "memory")
#define SQUARE_OUT(register, to, stride)                                                                     \
    __asm__ volatile("tilestored %%tmm" #register ", (%0,%1,1)" ::"r"(to), "r"((long)(stride)) : "memory")
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
static inline __attribute__((always_inline)) void squares_of(int high, int wide, const real *given, long stride,
                                                             const real *weights, long width, long steps,
                                                             float *sums, long apart, int fresh, int fetch) {
    const long line = width * PAIR * sizeof(real), next = apart * sizeof(float);
    float *const others = sums + (high == 2 ? SIDE * apart : 2 * SIDE);
    SQUARE_SUM(0, sums, next);
    SQUARE_SUM(1, sums + SIDE, next);
    if (high * wide == 4) {
        SQUARE_SUM(2, others, next);
        SQUARE_SUM(3, others + SIDE, next);
    }
    for (long step = 0; step < steps; step++, weights += SIDE * width * PAIR) {
        if (fetch)
            for (long at = 0; at < SIDE * line; at += LINE)
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
static void square(long count, const real *given, long stride, const real *weights, long width, long outputs,
                   long steps, float *sums, long apart, int fresh) {
    int shaped = 0; /* rows that the registers have */
    for (long row = 0; row < count; row += 2 * SIDE) {
        const int left = (int)(count - row < 2 * SIDE ? count - row : 2 * SIDE);
        const real *rows = given + row * stride;
        float *to = sums + row * apart;
        if (left != shaped) shape(left > SIDE ? SIDE : left, left > SIDE ? left - SIDE : left);
        shaped = left;
        for (long at = 0; at < outputs; at += 2 * SIDE) {
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

/* Numbers of outputs in a panel and of inputs in a pair, for packing. */
int panel_outputs(void) { return PANEL; }
int pair_inputs(void) { return PAIR; }

/* Weights as above, or in blocks of ``bits`` 8 or 4, and a bias [outputs] or NULL. */
struct product {
    long inputs, outputs, bits;
    const void *weights;
    const real *bias;
};

/* Products of rows with weights of 8 or 4 bits. Both are rounded in blocks of SHARE inputs: a row's to 8 bits and a
   scale; an output's to 8 bits and a scale, or to 4 bits (0 to 15), a scale and a zero. A block's product is a sum of
   integers, which has no order; blocks are summed in their order, so a row has the same bits among any rows.

   Weights: [panels of EIGHT outputs, blocks], each block with EIGHT scales, with 4 bits EIGHT zeros, both bfloat16, and
   numbers [QUADS of inputs, EIGHT, 4]. With 4 bits two quads share bytes; that of the block's first half has the low
   ones. */
#define EIGHT 8
#define SHARE 32
#define QUADS (SHARE / 4)
#define TOGETHER 4 /* rows whose sums are in registers together */

typedef float eight __attribute__((vector_size(32), aligned(4)));
typedef int32_t eight_ints __attribute__((vector_size(32), aligned(4)));
typedef uint32_t eight_bits __attribute__((vector_size(32), aligned(4)));
typedef int8_t few __attribute__((vector_size(LANES), aligned(1)));
typedef uint16_t eight_halves __attribute__((vector_size(16), aligned(2)));

/* A row's numbers, [blocks, SHARE], with each block's scale, and its sum times the scale. */
struct rounded_row {
    int8_t *numbers;
    float *scales, *sums;
};

/* The last block is filled with zeros. Where a number is not finite, all products are not. */
static void round_row(const real *row, long inputs, const struct rounded_row *to) {
    const lanes zero = {0};
    for (long block = 0; block * SHARE < inputs; block++) {
        const long count = inputs - block * SHARE < SHARE ? inputs - block * SHARE : SHARE;
        real part[SHARE] = {0};
        lanes most = zero, wrong = zero;
        ints sum = {0};
        memcpy(part, row + block * SHARE, count * sizeof(real));
        for (int i = 0; i < SHARE; i += LANES) {
            const lanes number = load(part + i), size = (lanes)((bits)number & 0x7fffffff);
            most = pick(size > most, size, most);
            wrong += number * 0.0f;
        }
        float top = most[0];
        for (int lane = 1; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
        const float inverse = top > 1e-30f ? 127.0f / top : 0, spoilt = total(wrong); /* 0, or not a number */
        for (int i = 0; i < SHARE; i += LANES) { /* the sum with a large number rounds to an integer */
            const lanes scaled = spoilt == 0 ? load(part + i) * inverse : zero;
            const ints number = __builtin_convertvector((scaled + 12582912.0f) - 12582912.0f, ints);
            *(few *)(to->numbers + block * SHARE + i) = __builtin_convertvector(number, few);
            sum += number;
        }
        int32_t whole = 0;
        for (int lane = 0; lane < LANES; lane++) whole += sum[lane];
        to->scales[block] = top / 127.0f + spoilt;
        to->sums[block] = to->scales[block] * (float)whole;
    }
}

static inline eight scales_of(const void *from) {
    return (eight)(__builtin_convertvector(*(const eight_halves *)from, eight_bits) << 16);
}

static inline eight fused_eight(eight a, eight b, eight c) {
#if defined(__AVX2__) && defined(__FMA__)
    return (eight)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

#if defined(__AVX2__)
/* Sums of four products each, of a quad of numbers with those of EIGHT outputs. */
static inline __m256i quad(const int8_t *numbers) {
    int32_t four;
    memcpy(&four, numbers, sizeof four);
    return _mm256_set1_epi32(four);
}

static inline __attribute__((always_inline)) void sums_of_8(int count, const int8_t *weights,
                                                            const int8_t *const *numbers, eight_ints *sums) {
    __m256i sum[TOGETHER];
    for (int row = 0; row < count; row++) sum[row] = _mm256_setzero_si256();
    for (int i = 0; i < QUADS; i++) {
        const __m256i own = _mm256_loadu_si256((const __m256i *)(weights + i * SHARE)), size = _mm256_abs_epi8(own);
        for (int row = 0; row < count; row++) {
            const __m256i signs = _mm256_sign_epi8(quad(numbers[row] + i * 4), own);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
            sum[row] = _mm256_dpbusd_epi32(sum[row], size, signs);
#else /* two products of 127 times 127 fit 16 bits */
            sum[row] = _mm256_add_epi32(
                sum[row], _mm256_madd_epi16(_mm256_maddubs_epi16(size, signs), _mm256_set1_epi16(1)));
#endif
        }
    }
    for (int row = 0; row < count; row++) sums[row] = (eight_ints)sum[row];
}

static inline __attribute__((always_inline)) void sums_of_4(int count, const int8_t *weights,
                                                            const int8_t *const *numbers, eight_ints *sums) {
    const __m256i low = _mm256_set1_epi8(15);
    __m256i sum[TOGETHER];
    for (int row = 0; row < count; row++) sum[row] = _mm256_setzero_si256();
    for (int i = 0; i < QUADS / 2; i++) {
        const __m256i both = _mm256_loadu_si256((const __m256i *)(weights + i * SHARE));
        const __m256i first = _mm256_and_si256(both, low), last = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        for (int row = 0; row < count; row++) {
            const __m256i former = quad(numbers[row] + i * 4), latter = quad(numbers[row] + SHARE / 2 + i * 4);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
            sum[row] = _mm256_dpbusd_epi32(_mm256_dpbusd_epi32(sum[row], first, former), last, latter);
#else /* sixteen products of 15 times 127 fit 16 bits */
            sum[row] = _mm256_add_epi16(sum[row], _mm256_add_epi16(_mm256_maddubs_epi16(first, former),
                                                                   _mm256_maddubs_epi16(last, latter)));
#endif
        }
    }
    for (int row = 0; row < count; row++)
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        sums[row] = (eight_ints)sum[row];
#else
        sums[row] = (eight_ints)_mm256_madd_epi16(sum[row], _mm256_set1_epi16(1));
#endif
}
#else
static inline void sums_of_8(int count, const int8_t *weights, const int8_t *const *numbers, eight_ints *sums) {
    for (int row = 0; row < count; row++)
        for (int output = 0; output < EIGHT; output++) {
            sums[row][output] = 0;
            for (int i = 0; i < SHARE; i++)
                sums[row][output] += weights[i / 4 * SHARE + output * 4 + i % 4] * numbers[row][i];
        }
}

static inline void sums_of_4(int count, const int8_t *weights, const int8_t *const *numbers, eight_ints *sums) {
    for (int row = 0; row < count; row++)
        for (int output = 0; output < EIGHT; output++) {
            sums[row][output] = 0;
            for (int i = 0; i < SHARE / 2; i++) {
                const uint8_t both = (uint8_t)weights[i / 4 * SHARE + output * 4 + i % 4];
                sums[row][output] += (both & 15) * numbers[row][i] + (both >> 4) * numbers[row][SHARE / 2 + i];
            }
        }
}
#endif

/* Products of ``count`` rows, at most TOGETHER, with a panel of ``size`` bytes a block: [count, EIGHT]. */
static inline __attribute__((always_inline)) void panel_of_blocks(int count, int bits, const char *weights,
                                                                  long blocks, const struct rounded_row *rows,
                                                                  eight *sums) {
    const long head = bits == 8 ? 2 * EIGHT : 4 * EIGHT, size = head + SHARE * EIGHT * bits / 8;
    for (int row = 0; row < count; row++) sums[row] = (eight){0};
    for (long block = 0; block < blocks; block++) {
        const char *own = weights + block * size;
        const int8_t *numbers[TOGETHER];
        eight_ints whole[TOGETHER];
        for (long at = 0; at < size; at += LINE) __builtin_prefetch(own + DISTANCE / 2 + at, 0, 3);
        for (int row = 0; row < count; row++) numbers[row] = rows[row].numbers + block * SHARE;
        if (bits == 8) sums_of_8(count, (const int8_t *)own + head, numbers, whole);
        else sums_of_4(count, (const int8_t *)own + head, numbers, whole);
        const eight scale = scales_of(own), none = {0};
        for (int row = 0; row < count; row++) {
            const eight exact = __builtin_convertvector(whole[row], eight);
            sums[row] = fused_eight(exact, scale * rows[row].scales[block], sums[row]);
            if (bits == 4)
                sums[row] = fused_eight(scales_of(own + 2 * EIGHT), rows[row].sums[block] - none, sums[row]);
        }
    }
}

typedef void panel_form(const char *, long, const struct rounded_row *, eight *);
#define PANEL_FORM(bits, count)                                                                              \
    static __attribute__((noinline)) void blocks_##bits##_##count(const char *weights, long blocks,          \
                                                                  const struct rounded_row *rows,            \
                                                                  eight *sums) {                             \
        panel_of_blocks(count, bits, weights, blocks, rows, sums);                                           \
    }
PANEL_FORM(8, 1) PANEL_FORM(8, 2) PANEL_FORM(8, 3) PANEL_FORM(8, 4)
PANEL_FORM(4, 1) PANEL_FORM(4, 2) PANEL_FORM(4, 3) PANEL_FORM(4, 4)
static panel_form *const forms_of_8[] = {blocks_8_1, blocks_8_2, blocks_8_3, blocks_8_4};
static panel_form *const forms_of_4[] = {blocks_4_1, blocks_4_2, blocks_4_3, blocks_4_4};

/* Add the biases of outputs from ``first`` on to a row's sums, and round them. */
static inline void finish(const struct product *product, long first, long count, const eight *sums, real *out) {
    float numbers[EIGHT > LANES ? EIGHT : LANES] = {0};
    real biases[EIGHT > LANES ? EIGHT : LANES] = {0}, line[EIGHT > LANES ? EIGHT : LANES];
    memcpy(numbers, sums, sizeof *sums);
    if (product->bias) memcpy(biases, product->bias + first, count * sizeof(real));
    for (int i = 0; i < EIGHT; i += LANES) store(line + i, *(lanes *)(numbers + i) + load(biases + i));
    memcpy(out + first, line, count * sizeof(real));
}

/* ``multiply`` for weights in blocks. Returns 1 if out of memory. */
static int multiply_blocks(const struct product *product, long rows, const real *given, real *out) {
    const long inputs = product->inputs, outputs = product->outputs, blocks = (inputs + SHARE - 1) / SHARE;
    const long panels = (outputs + EIGHT - 1) / EIGHT;
    const long size = blocks * ((product->bits == 8 ? 2 : 4) * EIGHT + SHARE * EIGHT * product->bits / 8);
    panel_form *const *forms = product->bits == 8 ? forms_of_8 : forms_of_4;
    float *const room = workspace(rows * blocks * (SHARE / 4 + 2) + rows * (sizeof(struct rounded_row) / 4));
    if (!room) return 1;
    struct rounded_row *const rounded = (struct rounded_row *)room;
    float *const scales = (float *)(rounded + rows);
    for (long row = 0; row < rows; row++) {
        float *const own = scales + row * blocks * (SHARE / 4 + 2);
        rounded[row] = (struct rounded_row){(int8_t *)(own + 2 * blocks), own, own + blocks};
    }
#pragma omp parallel if (rows * inputs * outputs > SMALL)
    {
#pragma omp for
        for (long row = 0; row < rows; row++) round_row(given + row * inputs, inputs, rounded + row);
#pragma omp for
        for (long panel = 0; panel < panels; panel++) {
            const long first = panel * EIGHT, count = outputs - first < EIGHT ? outputs - first : EIGHT;
            for (long row = 0; row < rows; row += TOGETHER) {
                const long some = rows - row < TOGETHER ? rows - row : TOGETHER;
                eight sums[TOGETHER];
                forms[some - 1]((const char *)product->weights + panel * size, blocks, rounded + row, sums);
                for (long i = 0; i < some; i++) finish(product, first, count, sums + i, out + (row + i) * outputs);
            }
        }
    }
    return 0;
}

/* Rows [rows, inputs] times the weights, plus the bias: [rows, outputs]. Returns 1 if out of memory. */
int multiply(const struct product *product, long rows, const real *given, real *out) {
    if (product->bits) return multiply_blocks(product, rows, given, out);
    const long inputs = product->inputs, outputs = product->outputs, odd = inputs % PAIR;
    const long panels = (outputs + PANEL - 1) / PANEL, whole = (inputs + PAIR - 1) / PAIR * PAIR;
#ifdef SQUARED
    const int by_squares = squared();
#endif
#ifdef WIDENED
    float *const numbers = rows > MOST + 1 ? workspace(rows * inputs) : NULL; /* if NULL, each tile converts */
    if (numbers) widen(given, rows * inputs, numbers);
#endif
#pragma omp parallel for if (inputs * outputs > SMALL)
    for (long panel = 0; panel < panels; panel++) {
        const long first = panel * PANEL, count = outputs - first < PANEL ? outputs - first : PANEL;
        const real *const own = (const real *)product->weights + panel * whole * PANEL;
        real biases[PANEL] = {0}, line[PANEL];
        float sums[TILES * MOST * PANEL];
        if (product->bias) memcpy(biases, product->bias + first, count * sizeof(real));
        for (long from = 0; from < rows; from += TILES * MOST) {
            const long left = rows - from < TILES * MOST ? rows - from : TILES * MOST;
            const int turns = (int)((left + MOST - 1) / MOST);
            memset(sums, 0, left * PANEL * sizeof(float));
            for (long at = 0; at < inputs; at += DEEP) {
                long deep = inputs - at < DEEP ? inputs - at : DEEP;
                const real *weights = own + at * PANEL, *numbers_at = given + from * inputs + at;
#ifdef SQUARED
                if (by_squares && deep >= DEPTH) {
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
                    const long row = left * turn / turns, next = left * (turn + 1) / turns;
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
            for (long row = 0; odd && row < left; row++) { /* a whole pair would reach into the next row */
                const real last[PAIR] = {given[(from + row + 1) * inputs - 1]};
                const real *weights = own + (inputs - 1) * PANEL;
                tiles[0](last, PAIR, weights, 1, sums + row * PANEL, (const char *)weights, 0, 1);
            }
            for (long row = 0; row < left; row++) {
                for (long i = 0; i < PANEL; i += LANES)
                    store(line + i, *(lanes *)(sums + row * PANEL + i) + load(biases + i));
                memcpy(out + (from + row) * outputs + first, line, count * sizeof(real));
            }
        }
#ifdef SQUARED
        if (by_squares) __asm__ volatile("tilerelease");
#endif
    }
    return 0;
}

static inline float norm_scale(const real *row, long size, float epsilon) {
    lanes sum = {0};
    for (long i = 0; i < size; i += LANES) sum += load(row + i) * load(row + i);
    return 1.0f / sqrtf(total(sum) / (float)size + epsilon);
}

/* Root mean square norm of rows [rows, size]; with ``more``, of their sum with it, which goes to ``sum``. */
void norm(long rows, long size, const real *given, const real *more, const real *weight, float epsilon,
          real *sum, real *out) {
#pragma omp parallel for if (rows * size > SMALL)
    for (long row = 0; row < rows; row++) {
        const real *own = given + row * size;
        if (more) {
            for (long i = 0; i < size; i += LANES)
                store(sum + row * size + i, load(own + i) + load(more + row * size + i));
            own = sum + row * size;
        }
        const float scale = norm_scale(own, size, epsilon);
        for (long i = 0; i < size; i += LANES)
            store(out + row * size + i, load(weight + i) * narrow(load(own + i) * scale));
    }
}

/* SiLU of ``gate`` times ``up``, rows [rows, size] ``stride`` apart; ``size`` is at least 16. */
void gated(long rows, long size, const real *gate, const real *up, long stride, real *out) {
#pragma omp parallel for if (rows * size > SMALL)
    for (long row = 0; row < rows; row++)
        for (long next = 0; next < size; next += LANES) {
            const long i = next < size - LANES ? next : size - LANES; /* the last ones may overlap */
            lanes value = load(gate + row * stride + i);
            value = narrow(value / (exponential(-value) + 1.0f));
            store(out + row * size + i, value * load(up + row * stride + i));
        }
}

/* The rows of a forward, and the columns that each attends to: ``run`` ones from ``first`` on, and then
   ``count - run`` ones in ``columns`` from ``start`` on, in ascending order; none for padding. */
struct rows {
    int32_t rows, sequences, heads, shared, size; /* ``shared``: heads that have keys */
    const int32_t *order, *begin; /* rows by sequence; where each sequence's begin, [sequences + 1] */
    const int32_t *sequence;      /* [rows] */
    const int32_t *place;         /* [rows]: the cache row that each is written to; -1 for padding */
    const int32_t *first, *run, *count, *start, *columns;
    const real *cosine, *sine; /* [rows, size] */
    float *queries;            /* [rows, heads, size]: workspace; of ``real`` for products of squares */
};

/* A layer's rows as its products gave them, ``stride`` apart, and where its keys and values are. */
struct heads {
    const real *query, *key, *value;
    int64_t query_stride, key_stride, value_stride;
    const real *query_norm, *key_norm; /* weights of the heads' norms, or NULL */
    float epsilon, scale;
    real *keys, *values;
    int64_t sequence_stride, head_stride; /* of keys and values */
    real *out;                            /* [rows, heads, size] */
};

static inline lanes normed(const real *head, const real *weight, float scale, int at) {
    return weight ? narrow(load(weight + at) * narrow(load(head + at) * scale)) : load(head + at);
}

/* Rotate a head's query or key, after its norm if it has one. To float32, scaled, or to ``real``. */
static inline void rotate(const struct rows *rows, long row, const real *head, const real *weight,
                          float epsilon, float factor, float *wide, real *out) {
    const int half = rows->size / 2;
    const real *cosine = rows->cosine + row * rows->size, *sine = rows->sine + row * rows->size;
    const float scale = weight ? norm_scale(head, rows->size, epsilon) : 1.0f;
    for (int i = 0; i < half; i += LANES) {
        lanes low = normed(head, weight, scale, i), high = normed(head, weight, scale, i + half);
        lanes first = low * load(cosine + i) - high * load(sine + i);
        lanes second = high * load(cosine + i + half) + low * load(sine + i + half);
        if (wide) {
            *(lanes *)(wide + i) = narrow(first) * factor;
            *(lanes *)(wide + i + half) = narrow(second) * factor;
        } else {
            store(out + i, first);
            store(out + i + half, second);
        }
    }
}

static void enter(const struct rows *rows, const struct heads *heads, long row) {
    const int size = rows->size;
    if (rows->place[row] < 0) return;
    for (int head = 0; head < rows->heads; head++) {
        const int64_t at = (row * rows->heads + head) * size;
#ifdef SQUARED
        float *const wide = squared() ? NULL : rows->queries + at;
#else
        float *const wide = rows->queries + at;
#endif
        rotate(rows, row, heads->query + row * heads->query_stride + head * size, heads->query_norm,
               heads->epsilon, heads->scale, wide, (real *)rows->queries + at);
    }
    for (int head = 0; head < rows->shared; head++) {
        const int64_t at = rows->sequence[row] * heads->sequence_stride + head * heads->head_stride +
                           (int64_t)rows->place[row] * size;
        rotate(rows, row, heads->key + row * heads->key_stride + head * size, heads->key_norm,
               heads->epsilon, 1.0f, NULL, heads->keys + at);
        const real *value = heads->value + row * heads->value_stride + head * size;
        for (int i = 0; i < size; i += LANES) store(heads->values + at + i, load(value + i));
    }
}

/* Dot products of a query with GROUP keys. */
static inline __attribute__((always_inline)) void dots_of(int parts, const float *query,
                                                          const float *const *keys, float *out) {
    for (int first = 0; first < GROUP; first += LANES) {
        lanes sums[LANES];
        for (int column = 0; column < LANES; column++) {
            const float *key = keys[first + column];
            lanes sum = *(const lanes *)query * *(const lanes *)key;
            for (int part = 1; part < parts; part++)
                sum = fused(*(const lanes *)(query + part * LANES), *(const lanes *)(key + part * LANES), sum);
            sums[column] = sum;
        }
        for (int left = LANES / 2; left; left /= 2)
            for (int i = 0; i < left; i++)
                sums[i] = __builtin_shufflevector(sums[2 * i], sums[2 * i + 1], EVEN) +
                          __builtin_shufflevector(sums[2 * i], sums[2 * i + 1], ODD);
        *(lanes *)(out + first) = sums[0];
    }
}

/* Add ``count`` values, at most GROUP, by their weights. */
static inline __attribute__((always_inline)) void mix_of(int parts, float *sums, const float *weights,
                                                         const float *const *values, int count) {
    const lanes zero = {0};
    lanes sum[parts];
    for (int part = 0; part < parts; part++) sum[part] = *(lanes *)(sums + part * LANES);
    for (int column = 0; column < count; column++)
        for (int part = 0; part < parts; part++)
            sum[part] = fused(weights[column] - zero, *(const lanes *)(values[column] + part * LANES), sum[part]);
    for (int part = 0; part < parts; part++) *(lanes *)(sums + part * LANES) = sum[part];
}

/* Loops of a known length are several times as fast, so the common sizes of heads have their own form. */
static __attribute__((noinline)) void dots(int size, const float *query, const float *const *keys, float *out) {
    if (size == 64) dots_of(64 / LANES, query, keys, out);
    else if (size == 128) dots_of(128 / LANES, query, keys, out);
    else dots_of(size / LANES, query, keys, out);
}

static __attribute__((noinline)) void mix(int size, float *sums, const float *weights,
                                          const float *const *values, int count) {
    if (size == 64) mix_of(64 / LANES, sums, weights, values, count);
    else if (size == 128) mix_of(128 / LANES, sums, weights, values, count);
    else mix_of(size / LANES, sums, weights, values, count);
}

/* Weights of scores [count], not yet divided by their sum, which is returned. */
static __attribute__((noinline)) float weigh(float *scores, int count) {
    const int whole = (count + LANES - 1) / LANES * LANES;
    for (int i = count; i < whole; i++) scores[i] = -INFINITY;
    lanes most = *(lanes *)scores, sum = {0};
    for (int i = LANES; i < whole; i += LANES) {
        lanes score = *(lanes *)(scores + i);
        most = pick(score > most, score, most);
    }
    float top = most[0];
    for (int lane = 1; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
    for (int i = 0; i < whole; i += LANES) {
        lanes weight = exponential(*(lanes *)(scores + i) - top);
        if (i + LANES > count)
            for (int lane = count - i; lane < LANES; lane++) weight[lane] = 0;
        *(lanes *)(scores + i) = weight;
        sum += weight;
    }
    return total(sum);
}

/* Transpose a square by interleaving its halves again and again. */
static inline void turn(lanes *square) {
    lanes next[LANES];
    for (int left = LANES / 2; left; left /= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = __builtin_shufflevector(square[i], square[i + LANES / 2], LOW);
            next[2 * i + 1] = __builtin_shufflevector(square[i], square[i + LANES / 2], HIGH);
        }
        memcpy(square, next, sizeof next);
    }
}

/* BLOCK keys, transposed: [size, BLOCK]. */
static void transpose(const real *from, int size, float *to) {
    for (int column = 0; column < BLOCK; column += LANES)
        for (int at = 0; at < size; at += LANES) {
            lanes square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = load(from + (column + i) * size + at);
            turn(square);
            for (int i = 0; i < LANES; i++) *(lanes *)(to + (at + i) * BLOCK + column) = square[i];
        }
}

/* Dot products of ``count`` queries with transposed keys, as ``dots`` has them to the last bit: each of its lanes is
   summed for itself, and the sums are added in the order of its tree. */
static inline __attribute__((always_inline)) void cross_of(int count, int size, const float *const *queries,
                                                           const float *keys, float *const *out) {
    const lanes zero = {0};
    for (int first = 0; first < BLOCK; first += PAIRED * LANES) {
        lanes levels[LEVELS + 1][MOST][PAIRED];
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++) {
            lanes sum[MOST][PAIRED];
            int level = 0;
            for (int part = 0; part < PAIRED; part++) {
                const lanes key = *(const lanes *)(keys + lane * BLOCK + first + part * LANES);
                for (int row = 0; row < count; row++) sum[row][part] = queries[row][lane] * key;
            }
            for (int at = lane + LANES; at < size; at += LANES)
                for (int part = 0; part < PAIRED; part++) {
                    const lanes key = *(const lanes *)(keys + at * BLOCK + first + part * LANES);
                    for (int row = 0; row < count; row++)
                        sum[row][part] = fused(queries[row][at] - zero, key, sum[row][part]);
                }
            for (; lane >> level & 1; level++)
                for (int row = 0; row < count; row++)
                    for (int part = 0; part < PAIRED; part++)
                        sum[row][part] = levels[level][row][part] + sum[row][part];
            for (int row = 0; row < count; row++)
                for (int part = 0; part < PAIRED; part++) levels[level][row][part] = sum[row][part];
        }
        for (int row = 0; row < count; row++)
            for (int part = 0; part < PAIRED; part++)
                *(lanes *)(out[row] + first + part * LANES) = levels[LEVELS][row][part];
    }
}

/* Add BLOCK values to the sums of ``count`` queries, by their weights, as ``mix`` does. */
static inline __attribute__((always_inline)) void blend_of(int count, int size, float *const *sums,
                                                           const float *const *weights, const float *values) {
    const lanes zero = {0};
    for (int at = 0; at < size; at += PAIRED * LANES) {
        lanes sum[MOST][PAIRED];
        for (int row = 0; row < count; row++)
            for (int part = 0; part < PAIRED; part++) sum[row][part] = *(lanes *)(sums[row] + at + part * LANES);
        for (int column = 0; column < BLOCK; column++)
            for (int part = 0; part < PAIRED; part++) {
                const lanes value = *(const lanes *)(values + column * size + at + part * LANES);
                for (int row = 0; row < count; row++)
                    sum[row][part] = fused(weights[row][column] - zero, value, sum[row][part]);
            }
        for (int row = 0; row < count; row++)
            for (int part = 0; part < PAIRED; part++) *(lanes *)(sums[row] + at + part * LANES) = sum[row][part];
    }
}

typedef void crossing(int, const float *const *, const float *, float *const *);
typedef void blending(int, float *const *, const float *const *, const float *);
#undef FORM
#define FORM(count)                                                                                          \
    static __attribute__((noinline)) void cross_##count(int size, const float *const *queries,               \
                                                        const float *keys, float *const *out) {              \
        if (size == 64) cross_of(count, 64, queries, keys, out);                                             \
        else if (size == 128) cross_of(count, 128, queries, keys, out);                                      \
        else cross_of(count, size, queries, keys, out);                                                      \
    }                                                                                                        \
    static __attribute__((noinline)) void blend_##count(int size, float *const *sums,                        \
                                                        const float *const *weights, const float *values) {  \
        if (size == 64) blend_of(count, 64, sums, weights, values);                                          \
        else if (size == 128) blend_of(count, 128, sums, weights, values);                                   \
        else blend_of(count, size, sums, weights, values);                                                   \
    }
FORMS
static crossing *const crossings[] = ALL(cross_);
static blending *const blendings[] = ALL(blend_);

/* Pointers to the rows of a query's columns ``from`` .. ``from + GROUP - 1``; beyond its last, to zeros. */
static inline void point(const struct rows *rows, int row, int from, const float *near, int begin,
                         const float *zeros, const float **to) {
    const int size = rows->size, first = rows->first[row], run = rows->run[row], count = rows->count[row];
    const int32_t *rest = rows->columns + rows->start[row] - run;
    for (int i = 0; i < GROUP; i++) {
        const int at = from + i;
        if (at >= count) to[i] = zeros;
        else to[i] = near + (int64_t)((at < run ? first + at : rest[at]) - begin) * size;
    }
}

/* Queries of one sequence and one head. All of them attend to the ``far`` columns from ``lead`` on, a multiple of
   BLOCK, which are converted a block at a time; the others, near ones, are among those from ``begin`` to ``end``. */
struct tile {
    int count, lead, far, begin, end, longest; /* ``longest``: number of columns of a query, at most */
    int row[TILE], skipped[TILE];              /* each query's row, and the number of its columns before far ones */
    const float *query[TILE];
    float *score[TILE], *sum[TILE], total[TILE];
    const float *near_keys, *near_values, *zeros;
    float *block; /* room for BLOCK rows */
};

/* Scores of a query's columns ``from`` .. ``to - 1``, which are near, and the sums of their values. */
static void score_near(const struct rows *rows, const struct tile *tile, int i, int from, int to) {
    const float *near[GROUP];
    for (int column = from; column < to; column += GROUP) {
        point(rows, tile->row[i], column, tile->near_keys, tile->begin, tile->zeros, near);
        dots(rows->size, tile->query[i], near, tile->score[i] + column);
    }
}

static void mix_near(const struct rows *rows, const struct tile *tile, int i, int from, int to) {
    const float *near[GROUP];
    for (int column = from; column < to; column += GROUP) {
        point(rows, tile->row[i], column, tile->near_values, tile->begin, tile->zeros, near);
        mix(rows->size, tile->sum[i], tile->score[i] + column, near, to - column < GROUP ? to - column : GROUP);
    }
}

/* The place in a table of the form for a tile's queries from one on. */
static inline int together(const struct tile *tile, int from) {
    return (tile->count - from < MOST ? tile->count - from : MOST) - 1;
}

/* Scores of the far columns, and the sums of their values; FEW queries and more share what they load. */
static void score_far(const struct tile *tile, int size, const real *keys) {
    const float *rows[BLOCK];
    float *out[TILE];
    for (int i = 0; i < BLOCK; i++) rows[i] = tile->block + i * size;
    for (int column = 0; column < tile->far; column += BLOCK) {
        for (int i = 0; i < tile->count; i++) out[i] = tile->score[i] + tile->skipped[i] + column;
        if (tile->count < FEW) {
            widen(keys + (int64_t)column * size, BLOCK * size, tile->block);
            for (int i = 0; i < tile->count; i++)
                for (int some = 0; some < BLOCK; some += GROUP)
                    dots(size, tile->query[i], rows + some, out[i] + some);
        } else {
            transpose(keys + (int64_t)column * size, size, tile->block);
            for (int i = 0; i < tile->count; i += MOST)
                crossings[together(tile, i)](size, tile->query + i, tile->block, out + i);
        }
    }
}

static void mix_far(const struct tile *tile, int size, const real *values) {
    const float *rows[BLOCK], *weights[TILE];
    for (int i = 0; i < BLOCK; i++) rows[i] = tile->block + i * size;
    for (int column = 0; column < tile->far; column += BLOCK) {
        widen(values + (int64_t)column * size, BLOCK * size, tile->block);
        for (int i = 0; i < tile->count; i++) weights[i] = tile->score[i] + tile->skipped[i] + column;
        if (tile->count < FEW) {
            for (int i = 0; i < tile->count; i++)
                for (int some = 0; some < BLOCK; some += GROUP)
                    mix(size, tile->sum[i], weights[i] + some, rows + some, GROUP);
        } else {
            for (int i = 0; i < tile->count; i += MOST)
                blendings[together(tile, i)](size, tile->sum + i, weights + i, tile->block);
        }
    }
}

/* The columns of the rows of queries ``from`` .. ``to - 1`` among those of a sequence and a head; rows of padding have
   none, and zeros as a result. */
static void survey(const struct rows *rows, const struct heads *heads, const int32_t *order, int head, int from,
                   int to, struct tile *tile) {
    const int size = rows->size, group = rows->heads / rows->shared;
    int least = INT32_MAX, whole = INT32_MAX; /* where the first row begins, where the first run ends */
    tile->count = tile->lead = tile->longest = tile->end = 0;
    for (int i = from; i < to; i++) {
        const int row = order[i / group], count = rows->count[row];
        const int first = rows->first[row], run = rows->run[row];
        const int64_t at = ((int64_t)row * rows->heads + head * group + i % group) * size;
        if (!count) {
            memset(heads->out + at, 0, size * sizeof(real));
            continue;
        }
        const int last = count > run ? rows->columns[rows->start[row] + count - run - 1] : first + run - 1;
        least = first < least ? first : least;
        whole = first + run < whole ? first + run : whole;
        if (first > tile->lead) tile->lead = first;
        if (count > tile->longest) tile->longest = count;
        if (last >= tile->end) tile->end = last + 1;
        tile->row[tile->count] = row;
        tile->skipped[tile->count] = first;
        tile->query[tile->count++] = rows->queries + at;
    }
    if (!tile->count) return;
    tile->far = whole > tile->lead ? (whole - tile->lead) / BLOCK * BLOCK : 0;
    tile->begin = tile->far && tile->lead == least ? tile->lead + tile->far : least;
    if (tile->end < tile->begin) tile->end = tile->begin;
    for (int i = 0; i < tile->count; i++) tile->skipped[i] = tile->far ? tile->lead - tile->skipped[i] : 0;
}

/* Attention of queries ``from`` .. ``to - 1`` of one sequence over one head's keys. Returns 1 if out of memory. */
static int attend(const struct rows *rows, const struct heads *heads, int sequence, int head, int from, int to) {
    const int size = rows->size;
    struct tile tile;
    survey(rows, heads, rows->order + rows->begin[sequence], head, from, to, &tile);
    if (!tile.count) return 0;
    const int64_t room = tile.longest + GROUP, near = (int64_t)(tile.end - tile.begin) * size;
    float *const scores = workspace(tile.count * (room + size) + (BLOCK + 1) * size + 2 * near + 64);
    if (!scores) return 1;
    float *const sums = scores + tile.count * room, *const zeros = sums + tile.count * size;
    float *const keys = zeros + size + BLOCK * size, *const values = keys + near;
    const int64_t at = sequence * heads->sequence_stride + head * heads->head_stride;
    memset(sums, 0, (tile.count + 1) * size * sizeof(float));
    widen(heads->keys + at + (int64_t)tile.begin * size, near, keys);
    widen(heads->values + at + (int64_t)tile.begin * size, near, values);
    tile.block = zeros + size;
    tile.zeros = zeros, tile.near_keys = keys, tile.near_values = values;
    for (int i = 0; i < tile.count; i++) {
        tile.score[i] = scores + i * room;
        tile.sum[i] = sums + i * size;
        score_near(rows, &tile, i, 0, tile.skipped[i]); /* before the others: its last group reaches into theirs */
    }
    score_far(&tile, size, heads->keys + at + (int64_t)tile.lead * size);
    for (int i = 0; i < tile.count; i++) {
        const int count = rows->count[tile.row[i]];
        score_near(rows, &tile, i, tile.skipped[i] + tile.far, count);
        tile.total[i] = weigh(tile.score[i], count);
        mix_near(rows, &tile, i, 0, tile.skipped[i]);
    }
    mix_far(&tile, size, heads->values + at + (int64_t)tile.lead * size);
    for (int i = 0; i < tile.count; i++) {
        real *out = heads->out + (tile.query[i] - rows->queries);
        mix_near(rows, &tile, i, tile.skipped[i] + tile.far, rows->count[tile.row[i]]);
        for (int part = 0; part < size; part += LANES)
            store(out + part, *(lanes *)(tile.sum[i] + part) / tile.total[i]);
    }
    return 0;
}

#ifdef SQUARED
#define PART 256 /* columns whose values are paired together, a multiple of BLOCK */

/* BLOCK keys, of which ``count`` are there, as weights of squares: [size / PAIR, BLOCK, PAIR]. */
static void pair_keys(const real *from, int count, int size, real *to) {
    for (int column = 0; column < BLOCK; column += SIDE)
        for (int at = 0; at < size; at += DEPTH) {
            lanes square[LANES] = {0};
            for (int i = 0; i < SIDE && column + i < count; i++)
                square[i] = *(const lanes *)(from + (column + i) * size + at);
            turn(square);
            for (int i = 0; i < SIDE; i++) *(lanes *)(to + ((at / PAIR + i) * BLOCK + column) * PAIR) = square[i];
        }
}

/* Values of DEPTH columns, NULL for none, as weights of squares: [SIDE, size, PAIR]. */
static inline void pair_values(const real *const *from, int size, real *to) {
    static const real none[DEPTH];
    const __m512i both = _mm512_set1_epi32(DEPTH << 16); /* an element of each: i and DEPTH + i */
    const __m512i first = _mm512_add_epi32(
        both, _mm512_mullo_epi32(_mm512_set1_epi32(0x10001), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)));
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(SIDE << 16 | SIDE));
    for (int i = 0; i < SIDE; i++)
        for (int at = 0; at < size; at += DEPTH) {
            const __m512i a = _mm512_loadu_si512(from[2 * i] ? from[2 * i] + at : none);
            const __m512i b = _mm512_loadu_si512(from[2 * i + 1] ? from[2 * i + 1] + at : none);
            real *out = to + (i * size + at) * PAIR;
            _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, first, b));
            _mm512_storeu_si512(out + DEPTH, _mm512_permutex2var_epi16(a, second, b));
        }
}

/* Weights of scores [count] times ``scale``, not yet divided by their sum, which is returned: in bfloat16 in the place of
   the scores, with zeros up to a multiple of DEPTH. */
static __attribute__((noinline)) float weigh_pairs(float *scores, int count, float scale) {
    const int whole = (count + LANES - 1) / LANES * LANES;
    const float powers = scale * 1.44269504f; /* of two, not of e */
    real *const to = (real *)scores;
    for (int i = count; i < whole; i++) scores[i] = -INFINITY;
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int i = 0; i < whole; i += LANES) most = _mm512_max_ps(_mm512_loadu_ps(scores + i), most);
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most) * powers), factor = _mm512_set1_ps(powers);
    const __m512 least = _mm512_set1_ps(-126.0f), round = _mm512_set1_ps(12582912.0f);
    for (int i = 0; i < whole; i += LANES) {
        const __m512 power = _mm512_max_ps(least, _mm512_fmsub_ps(_mm512_loadu_ps(scores + i), factor, top));
        const __m512 count_of = _mm512_add_ps(power, round);
        const __m512 rest = _mm512_sub_ps(power, _mm512_sub_ps(count_of, round));
        __m512 weight = _mm512_set1_ps(1.3333558e-3f); /* 2 to the power of the rest, to about 2e-7 of it */
        weight = _mm512_fmadd_ps(weight, rest, _mm512_set1_ps(9.6181291e-3f));
        weight = _mm512_fmadd_ps(weight, rest, _mm512_set1_ps(5.5504109e-2f));
        weight = _mm512_fmadd_ps(weight, rest, _mm512_set1_ps(2.4022651e-1f));
        weight = _mm512_fmadd_ps(weight, rest, _mm512_set1_ps(6.9314718e-1f));
        weight = _mm512_fmadd_ps(weight, rest, _mm512_set1_ps(1.0f));
        const __m512i raised = _mm512_slli_epi32(_mm512_castps_si512(count_of), 23);
        weight = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(weight), raised));
        if (i + LANES > count)
            weight = _mm512_maskz_mov_ps((__mmask16)((1u << (count - i)) - 1), weight);
        _mm256_storeu_si256((__m256i *)(to + i), (__m256i)_mm512_cvtneps_pbh(weight));
        sum = _mm512_add_ps(sum, weight);
    }
    if (whole % DEPTH) _mm256_storeu_si256((__m256i *)(to + whole), _mm256_setzero_si256());
    return total((lanes)sum);
}

/* ``attend`` by products of squares. Columns are multiplied DEPTH at a time from a query's first one on; those that all
   queries have in one place, together. Scores are of all columns from the least to the last, and a query takes its
   own. */
static int attend_squared(const struct rows *rows, const struct heads *heads, int sequence, int head, int from,
                          int to) {
    const int size = rows->size;
    struct tile tile;
    survey(rows, heads, rows->order + rows->begin[sequence], head, from, to, &tile);
    if (!tile.count) return 0;
    int apart = 0;
    for (int i = 0; i < tile.count; i++) apart |= tile.skipped[i];
    if (apart) tile.far = 0;
    const int wide = (tile.end - tile.begin + BLOCK - 1) / BLOCK * BLOCK;
    const int64_t room = (tile.longest + 2 * BLOCK) / LANES * LANES;
    float *const scores = workspace(tile.count * (room + wide + 2 * size) + (BLOCK + PART) * size);
    if (!scores) return 1;
    float *const near = scores + tile.count * room, *const sums = near + tile.count * wide;
    real *const queries = (real *)(sums + tile.count * size), *const paired = queries + tile.count * size;
    const int64_t at = sequence * heads->sequence_stride + head * heads->head_stride;
    const real *const keys = heads->keys + at, *const values = heads->values + at;
    memset(sums, 0, tile.count * size * sizeof(float));
    for (int i = 0; i < tile.count; i++)
        memcpy(queries + i * size, (const real *)rows->queries + (tile.query[i] - rows->queries), size * sizeof(real));
    for (int column = 0; column < tile.far; column += BLOCK) {
        pair_keys(keys + (int64_t)(tile.lead + column) * size, BLOCK, size, paired);
        square(tile.count, queries, size, paired, BLOCK, BLOCK, size / DEPTH, scores + column, room, 1);
    }
    for (int column = 0; column < wide; column += BLOCK) {
        pair_keys(keys + (int64_t)(tile.begin + column) * size, tile.end - tile.begin - column, size, paired);
        square(tile.count, queries, size, paired, BLOCK, BLOCK, size / DEPTH, near + column, wide, 1);
    }
    for (int i = 0; i < tile.count; i++) {
        const int row = tile.row[i], run = rows->run[row], count = rows->count[row];
        const float *own = near + (int64_t)i * wide - tile.begin;
        const int32_t *rest = rows->columns + rows->start[row] - run;
        if (run > tile.far)
            memcpy(scores + i * room + tile.far, own + rows->first[row] + tile.far, (run - tile.far) * sizeof(float));
        for (int column = run; column < count; column++) scores[i * room + column] = own[rest[column]];
        tile.total[i] = weigh_pairs(scores + i * room, count, heads->scale);
    }
    const real *places[DEPTH];
    for (int first = 0; first < tile.far; first += PART) {
        const int some = tile.far - first < PART ? tile.far - first : PART;
        for (int column = 0; column < some; column += DEPTH) {
            for (int i = 0; i < DEPTH; i++) places[i] = values + (int64_t)(tile.lead + first + column + i) * size;
            pair_values(places, size, paired + column * size);
        }
        square(tile.count, (const real *)scores + first, 2 * room, paired, size, size, some / DEPTH, sums, size, 0);
    }
    for (int i = 0; i < tile.count; i++) {
        const int row = tile.row[i], first = rows->first[row], run = rows->run[row], count = rows->count[row];
        const int32_t *rest = rows->columns + rows->start[row] - run;
        for (int column = tile.far; column < count; column += DEPTH) {
            for (int j = 0; j < DEPTH; j++) {
                const int place = column + j;
                places[j] = place < count ? values + (int64_t)(place < run ? first + place : rest[place]) * size : NULL;
            }
            pair_values(places, size, paired);
            square(1, (const real *)(scores + i * room) + column, 2 * room, paired, size, size, 1, sums + i * size,
                   size, 0);
        }
        real *out = heads->out + (tile.query[i] - rows->queries);
        for (int part = 0; part < size; part += LANES)
            store(out + part, *(lanes *)(sums + i * size + part) / tile.total[i]);
    }
    __asm__ volatile("tilerelease");
    return 0;
}
#endif

/* Rotate a layer's queries and keys, write its keys and values to the cache, attend. Returns 1 if out of memory. */
int attention(const struct rows *rows, const struct heads *heads) {
    const int group = rows->heads / rows->shared;
    int64_t work = 0;
    int failed = 0, most = 0;
    for (int row = 0; row < rows->rows; row++) work += (int64_t)rows->count[row] * rows->heads * rows->size;
    for (int i = 0; i < rows->sequences; i++)
        most = rows->begin[i + 1] - rows->begin[i] > most ? rows->begin[i + 1] - rows->begin[i] : most;
#ifdef SQUARED
    int (*const form)(const struct rows *, const struct heads *, int, int, int, int) =
        squared() ? attend_squared : attend;
#else
    int (*const form)(const struct rows *, const struct heads *, int, int, int, int) = attend;
#endif
    const int tiles = (most * group + TILE - 1) / TILE, items = rows->sequences * rows->shared * tiles;
#pragma omp parallel if (work > 8 * SMALL) reduction(| : failed)
    {
#pragma omp for
        for (int row = 0; row < rows->rows; row++) enter(rows, heads, row);
#pragma omp for schedule(dynamic)
        for (int item = 0; item < items; item++) {
            const int sequence = item / tiles / rows->shared, from = item % tiles * TILE;
            const int queries = (rows->begin[sequence + 1] - rows->begin[sequence]) * group;
            if (from < queries)
                failed |= form(rows, heads, sequence, item / tiles % rows->shared, from,
                                 from + TILE < queries ? from + TILE : queries);
        }
    }
    return failed;
}

/* LANES numbers of a row from a place on; minus infinity beyond its end. */
static inline lanes part_of(const real *row, long at, long size) {
    const lanes zero = {0};
    if (at + LANES <= size) return load(row + at);
    real line[LANES];
    store(line, zero - INFINITY);
    memcpy(line, row + at, (size - at) * sizeof(real));
    return load(line);
}

/* The ``count`` greatest numbers of each row [rows, size], at most all: in descending order, the first of equal ones
   first, with their places. ``totals``: the logarithm of the sum of the exponentials of a whole row. */
void best(long rows, long size, long count, const real *given, float *scores, int64_t *places, float *totals) {
    const lanes zero = {0};
#pragma omp parallel for if (rows * size > SMALL)
    for (long row = 0; row < rows; row++) {
        const real *own = given + row * size;
        float *top = scores + row * count;
        int64_t *where = places + row * count;
        long held = 0;
        for (long at = 0; at < size; at += LANES) {
            const lanes value = part_of(own, at, size);
            if (held == count) {
                const ints above = value > zero + top[count - 1];
                int32_t any = 0;
                for (int lane = 0; lane < LANES; lane++) any |= above[lane];
                if (!any) continue;
            }
            for (int lane = 0; lane < LANES && at + lane < size; lane++) {
                if (held == count && !(value[lane] > top[count - 1])) continue;
                long place = held < count ? held++ : count - 1;
                for (; place && value[lane] > top[place - 1]; place--) {
                    top[place] = top[place - 1];
                    where[place] = where[place - 1];
                }
                top[place] = value[lane];
                where[place] = at + lane;
            }
        }
        lanes sum = {0};
        for (long at = 0; at < size; at += LANES) sum += exponential(part_of(own, at, size) - top[0]);
        totals[row] = top[0] + logf(total(sum));
    }
}

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
