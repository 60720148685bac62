/* Vectors of 16 floats, and the two element types that rows are stored in. */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(64)));
typedef float vec8 __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));
typedef uint16_t bf16;

INLINE vec fill(float x) { return x - (vec){0}; }

/* Ask for memory that is read soon: pages lie apart, so the processor does not see the next one coming. */
INLINE void fetch(const void *from, int64_t size) {
    for (const char *at = from; at < (const char *)from + size; at += 64) __builtin_prefetch(at, 0, 2);
}

INLINE vec load_f32(const float *at) {
    vec x;
    memcpy(&x, at, sizeof x);
    return x;
}

INLINE void store_f32(float *at, vec x) { memcpy(at, &x, sizeof x); }

INLINE vec load_bf16(const bf16 *at) {
    hvec half;
    memcpy(&half, at, sizeof half);
#ifdef __AVX512F__ /* one instruction, for which compilers take three */
    return (vec)((uvec)_mm512_cvtepu16_epi32((__m256i)half) << 16);
#else
    return (vec)(__builtin_convertvector(half, uvec) << 16);
#endif
}

/* To the nearest, ties to even. Enough for every value that this arithmetic makes: a NaN of the processor's own, or one
 * that came from a bf16, stays one; only NaNs with a payload in their lowest bits would not. */
INLINE uvec round_bits(vec x) {
    uvec bits = (uvec)x;
    return bits + ((bits >> 16) & 1) + 0x7fff;
}

INLINE void store_bf16(bf16 *at, vec x) {
    hvec half = __builtin_convertvector(round_bits(x) >> 16, hvec);
    memcpy(at, &half, sizeof half);
}

INLINE float load_one_f32(const float *at) { return *at; }

INLINE float load_one_bf16(const bf16 *at) {
    uint32_t bits = (uint32_t)*at << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE void store_one_f32(float *at, float x) { *at = x; }

INLINE void store_one_bf16(bf16 *at, float x) { *at = (bf16)(round_bits(fill(x))[0] >> 16); }

INLINE vec round_f32(vec x) { return x; }

INLINE vec round_bf16(vec x) { return (vec)(round_bits(x) & 0xffff0000u); }

#define HALVES(x, op)                                                                                                  \
    vec8 eight = op(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),                                             \
                    __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));                                      \
    vec4 four = op(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),                                                  \
                   __builtin_shufflevector(eight, eight, 4, 5, 6, 7));

INLINE float sum_of(vec x) {
#define ADD(a, b) ((a) + (b))
    HALVES(x, ADD)
    return (four[0] + four[1]) + (four[2] + four[3]);
}

/* Lane i of the result is the sum of all lanes of x[i]: four levels of pairwise shuffles, where one sum after the other
 * would take twelve instructions each. */
INLINE vec sums_of(const vec *x) {
    vec two[8], four[4], eight[2];
#define PAIR(a, b, low, high) (__builtin_shufflevector(a, b, low) + __builtin_shufflevector(a, b, high))
#define LOW8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW4 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define HIGH4 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#define LOW2 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29
#define HIGH2 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
    for (int i = 0; i < 8; i++) two[i] = PAIR(x[2 * i], x[2 * i + 1], LOW8, HIGH8);
    for (int i = 0; i < 4; i++) four[i] = PAIR(two[2 * i], two[2 * i + 1], LOW4, HIGH4);
    for (int i = 0; i < 2; i++) eight[i] = PAIR(four[2 * i], four[2 * i + 1], LOW2, HIGH2);
    return PAIR(eight[0], eight[1], EVEN, ODD);
}

INLINE vec choose(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }

INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }

INLINE float max_of(vec x) {
    float top = x[0];
    for (int lane = 1; lane < LANES; lane++) top = x[lane] > top ? x[lane] : top;
    return top;
}

/* e^x, relative error below 2e-7; 0 below -87.3, the largest finite power of two's neighbourhood above 88.3. */
INLINE vec exp_of(vec x) {
    vec low = fill(-87.3f), high = fill(88.3f);
    ivec tiny = x < low;
    x = choose(x > high, high, x);
    x = choose(tiny, low, x);
    vec whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vec rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    vec sum = fill(1.9875691500e-4f);
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    ivec power = (__builtin_convertvector(whole, ivec) + 127) << 23;
    return (vec)((ivec)(sum * (vec)power) & ~tiny);
}

#ifdef __AVX512BF16__
/* sum + the products of 32 pairs of bf16, two of them in each lane. */
INLINE vec add_pairs(vec sum, const bf16 *a, const bf16 *b) {
    __m512bh left, right;
    memcpy(&left, a, sizeof left);
    memcpy(&right, b, sizeof right);
    return (vec)_mm512_dpbf16_ps((__m512)sum, left, right);
}
#endif
