/* Keyed draws from rows of scores (draws/many_rows.py).

   A row's draw is the token with the highest score plus Gumbel noise among those that top-k, top-p and min-p
   keep. The noise of a token is -log(-log(u)), with u from a hash of its word and the row's key. Two logarithms
   for each token of a large vocabulary would take a millisecond, so they are computed only for tokens that may
   be the best: with w = exp(score - peak) and the best noisy score b so far, -log(u) must be below
   w exp(peak - b), and 1 - u is below -log(u). */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "pool.h"

#define UNDECIDED -2
#define BLOCK 64   /* tokens whose noise is bounded together */
#define GROUP 32   /* tokens of which top-k looks at the best one first */
#define CLOSE 1e-9 /* rounding of a logarithm may swap noisy scores that differ by less */
#define LOWEST 42  /* above the lowest noise of the best token, as a factor: exp(3.7) */
#define SLACK 1.0001f
#define LANES 16 /* numbers that a compiler takes together: sums of every sixteenth, as it may not reorder one sum */

struct draw {
    uint64_t key;
    int64_t top_k; /* from 1 to the size */
    double temperature, top_p, margin, min_p;
    int64_t token; /* the result */
};

/* The size of the struct that Python fills, which it compares with its own. */
int64_t size_of_draw(void) { return sizeof(struct draw); }

/* e to the power of x, at most 0, to about 1e-7 of it; 0 where x is so low that the token is never drawn. */
static inline float exponential(float x) {
    float kept = x < -60.0f ? -60.0f : x;
    float count = (kept * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounds to an integer */
    float rest = kept - count * 0.693359375f + count * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    union {
        int32_t bits;
        float value;
    } power = {((int32_t)count + 127) << 23};
    return x < -60.0f ? 0.0f : sum * power.value;
}

/* The finaliser of splitmix64. */
static inline uint64_t mixed(uint64_t word) {
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
    word = (word ^ word >> 27) * 0x94D049BB133111EBu;
    return word ^ word >> 31;
}

static double noise(uint64_t word) { return -log(-log(((double)(mixed(word) >> 12) + 0.5) * 0x1p-52)); }

/* Room of this thread for a number of floats; NULL if there is no memory. */
static float *workspace(size_t numbers) {
    static _Thread_local float *room;
    static _Thread_local size_t held;
    if (numbers > held) {
        free(room);
        room = malloc(numbers * sizeof *room);
        held = room ? numbers : 0;
    }
    return room;
}

/* The highest of some numbers, none of them NaN. */
static inline float highest(const float *numbers, int64_t count) {
    float peaks[LANES], peak = -INFINITY;
    const int64_t whole = count / LANES * LANES;
    for (int lane = 0; lane < LANES; lane++) peaks[lane] = -INFINITY;
    for (int64_t at = 0; at < whole; at += LANES)
        for (int lane = 0; lane < LANES; lane++)
            peaks[lane] = numbers[at + lane] > peaks[lane] ? numbers[at + lane] : peaks[lane];
    for (int lane = 0; lane < LANES; lane++) peak = peaks[lane] > peak ? peaks[lane] : peak;
    for (int64_t at = whole; at < count; at++) peak = numbers[at] > peak ? numbers[at] : peak;
    return peak;
}

/* The sum of the weights of scores that are above a floor. */
static double weight_above(float floor, const float *scores, const float *weights, int64_t count) {
    double sums[LANES] = {0}, sum = 0;
    const int64_t whole = count / LANES * LANES;
    for (int64_t at = 0; at < whole; at += LANES)
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] += scores[at + lane] > floor ? weights[at + lane] : 0.0f;
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    for (int64_t at = whole; at < count; at++) sum += scores[at] > floor ? weights[at] : 0.0f;
    return sum;
}

/* The k-th largest of some numbers, 1 being the first, which are reordered. */
static float ranked(float *numbers, int64_t count, int64_t k) {
    int64_t low = 0, high = count - 1, place = k - 1;
    while (low < high) {
        float pivot = numbers[(low + high) / 2];
        int64_t left = low, right = high;
        while (left <= right) {
            while (numbers[left] > pivot) left++;
            while (numbers[right] < pivot) right--;
            if (left > right) break;
            float other = numbers[left];
            numbers[left++] = numbers[right];
            numbers[right--] = other;
        }
        if (place <= right) high = right;
        else if (place >= left) low = left;
        else break;
    }
    return numbers[place];
}

/* The k-th largest score. At least k scores reach the k-th largest of the groups' best ones, so it is among those
   that do. ``room`` is for size + size / GROUP + 1 numbers. */
static float kth(const float *scores, int64_t size, int64_t k, float *room) {
    int64_t groups = (size + GROUP - 1) / GROUP, count = 0;
    float *best = room + size, least = -INFINITY;
    for (int64_t group = 0; group < groups; group++) {
        int64_t end = (group + 1) * GROUP < size ? (group + 1) * GROUP : size;
        best[group] = highest(scores + group * GROUP, end - group * GROUP);
    }
    if (k <= groups) {
        for (int64_t group = 0; group < groups; group++) room[group] = best[group];
        least = ranked(room, groups, k);
    }
    for (int64_t group = 0; group < groups; group++) {
        if (best[group] < least) continue;
        int64_t end = (group + 1) * GROUP < size ? (group + 1) * GROUP : size;
        for (int64_t token = group * GROUP; token < end; token++)
            if (scores[token] >= least) room[count++] = scores[token];
    }
    return ranked(room, count, k);
}

/* The token with the best noisy score among those whose scores are above the floor; UNDECIDED if the next one is
   too close, or there is none. */
static int64_t best_above(float floor, const float *scores, const float *weights, int64_t size, float peak,
                       const uint64_t *words, uint64_t key) {
    double first = -INFINITY, second = -INFINITY;
    int64_t found = UNDECIDED;
    float bound = LOWEST;
    for (int64_t start = 0; start < size; start += BLOCK) {
        int64_t end = start + BLOCK < size ? start + BLOCK : size;
        float slack[BLOCK];
        int any = 0;
        for (int64_t token = start; token < end; token++) {
            /* 1 - u from below, from the highest 24 bits of the hash. */
            uint32_t high = (uint32_t)(mixed(words[token] ^ key) >> 40);
            float rest = (float)(int32_t)(0xFFFFFF - high) * 0x1p-24f;
            float weight = scores[token] > floor ? weights[token] : 0.0f;
            float own = rest - weight * bound;
            slack[token - start] = own;
            any |= own < 0;
        }
        if (!any) continue;
        for (int64_t token = start; token < end; token++) {
            if (!(slack[token - start] < 0)) continue;
            double noisy = (double)scores[token] + noise(words[token] ^ key);
            if (noisy > first) {
                second = first;
                first = noisy;
                found = token;
                bound = fminf(bound, (float)exp((double)peak - first) * SLACK);
            } else if (noisy > second) {
                second = noisy;
            }
        }
    }
    return second < first - CLOSE ? found : UNDECIDED;
}

/* Whether top-p and min-p keep a token: 1 if certainly, -1 if certainly not, 0 if rounding decides. */
static int keeps(int64_t token, const float *scores, const float *weights, int64_t size, double total,
                 const struct draw *own) {
    float value = scores[token];
    double weight = weights[token], from = 0, above = 0;
    if (own->top_p < 1) {
        from = weight_above(nextafterf(value, -INFINITY), scores, weights, size);
        above = weight_above(value, scores, weights, size);
    }
    /* The order of ties is up to the reference's sort: all but the token itself may come before it. */
    double before = from - weight;
    int certain = before <= 0 || before < (own->top_p - own->margin) * total;
    if (certain && weight > own->min_p * (1 + 1e-5)) return 1;
    return above > (own->top_p + own->margin) * total || weight < own->min_p * (1 - 1e-5) ? -1 : 0;
}

static int64_t drawn(const float *given, int64_t size, const uint64_t *words, const struct draw *own) {
    float *scores = workspace(3 * size + size / GROUP + 1);
    if (!scores) return UNDECIDED;
    float *weights = scores + size, peak, least = -INFINITY, temperature = (float)own->temperature;
    int wrong = 0;
    for (int64_t token = 0; token < size; token++) {
        float score = given[token] / temperature;
        wrong |= score != score;
        scores[token] = score;
    }
    if (wrong) return UNDECIDED;
    peak = highest(scores, size);
    if (!isfinite(peak)) return UNDECIDED;
    if (own->top_k < size) least = kth(scores, size, own->top_k, weights + size);
    /* Two loops: the compiler vectorises neither the exponential nor the sum in a common one. */
    for (int64_t token = 0; token < size; token++) {
        float weight = exponential(scores[token] - peak);
        weights[token] = scores[token] < least ? 0.0f : weight;
    }
    const double total = weight_above(-INFINITY, scores, weights, size);
    float floor = -INFINITY;
    for (;;) {
        int64_t token = best_above(floor, scores, weights, size, peak, words, own->key);
        if (token < 0) return UNDECIDED;
        int kept = keeps(token, scores, weights, size, total, own);
        if (kept > 0) return token;
        if (!kept) return UNDECIDED;
        floor = scores[token]; /* a token that is not kept takes all with it whose scores are not higher */
    }
}

struct drawing {
    int64_t size;
    const float *scores;
    const uint64_t *words;
    struct draw *draws;
};

static void draw_row(void *given, int64_t row) {
    const struct drawing *const job = given;
    job->draws[row].token = drawn(job->scores + row * job->size, job->size, job->words, job->draws + row);
}

/* Draw a token from each of some rows of scores, [rows, size]; UNDECIDED if rounding decides, or a row has no finite
   best score. */
void draw_rows(int64_t rows, int64_t size, const float *scores, const uint64_t *words, struct draw *draws) {
    struct drawing job = {size, scores, words, draws};
    share(rows, draw_row, &job);
}

struct widening {
    int64_t count, each;
    const uint16_t *given;
    uint32_t *out;
};

static void widen_some(void *given, int64_t chunk) {
    const struct widening *const job = given;
    const int64_t end = (chunk + 1) * job->each < job->count ? (chunk + 1) * job->each : job->count;
    for (int64_t i = chunk * job->each; i < end; i++) job->out[i] = (uint32_t)job->given[i] << 16;
}

/* Bfloat16 numbers as float32: they are its upper halves. */
void widen(int64_t count, const uint16_t *given, uint32_t *out) {
    struct widening job = {count, items_of_chunk(count, 1), given, out};
    share(chunks_of(count, job.each), widen_some, &job);
}
