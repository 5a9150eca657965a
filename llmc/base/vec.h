/*
vec.h -- vectors of floats as wide as the machine's registers, through the compiler's vector
extensions.

The same source becomes AVX-512, AVX2, SSE or NEON code. Machines differ only in LANES, the number
of floats in a vector (16, 8 or 4), and in the number of registers. + - * / and comparisons work
lane by lane; a comparison gives a VecMask of all ones or all zeros.
*/
#ifndef LLMC_VEC_H
#define LLMC_VEC_H

#include <stdint.h>
#include <string.h>

#include "llmc/base/intrinsics.h"

#if defined(__AVX512F__)
#define LANES 16
#define VEC_REGISTERS 32
#define VEC_ISA "AVX-512"
#elif defined(__AVX2__)
#define LANES 8
#define VEC_REGISTERS 16
#define VEC_ISA "AVX2"
#elif defined(__aarch64__)
#define LANES 4
#define VEC_REGISTERS 32
#define VEC_ISA "NEON"
#else
#define LANES 4
#define VEC_REGISTERS 16
#define VEC_ISA "128-bit"
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t VecMask __attribute__((vector_size(4 * LANES)));
typedef uint32_t VecBits __attribute__((vector_size(4 * LANES)));
typedef float VecUnaligned_ __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t VecBitsUnaligned_ __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// From now on, in this thread and those it starts, flushes denormal results to zero, and treats
// denormal operands as zero. They occur where attention is sharp, and cost a hundred cycles each:
// one run became four times slower.
static inline void vec_flush_denormals(void) {
#if defined(__SSE__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040u); // FTZ and DAZ
#elif defined(__aarch64__)
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    __asm__ volatile("msr fpcr, %0" : : "r"(control | (uint64_t)1 << 24)); // FZ
#endif
}

ALWAYS_INLINE Vec vec_load(const float* p) { return *(const VecUnaligned_*)p; }
ALWAYS_INLINE void vec_store(float* p, Vec v) { *(VecUnaligned_*)p = v; }
// Stores past the caches; p is a multiple of the vector's size. Other threads see it after the next
// barrier: on x86 its locked instruction waits for such stores.
ALWAYS_INLINE void vec_stream(float* p, Vec v) {
#if defined(__clang__)
    __builtin_nontemporal_store(v, (Vec*)(void*)p);
#elif defined(__AVX512F__)
    __builtin_ia32_movntps512(p, v);
#elif defined(__AVX2__)
    __builtin_ia32_movntps256(p, v);
#elif defined(__SSE__)
    __builtin_ia32_movntps(p, v);
#else
    vec_store(p, v);
#endif
}
ALWAYS_INLINE Vec vec_all(float x) { // x in every lane
    const Vec zero = {0};
    return x - zero;
}

// For the innermost loops of matmuls, with gcc: VEC_UNROLL unrolls the loop that follows. clang
// ignores it, because it would unroll the loop before inlining, when the trip count is unknown, and
// keep the sums in memory.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define VEC_PRAGMA_(text) _Pragma(#text)
#define VEC_UNROLL(times) VEC_PRAGMA_(GCC unroll times)
#else
#define VEC_UNROLL(times)
#endif
// sum += a * b, as one instruction that keeps the sum and the factors in registers. From plain C,
// gcc 12 sometimes reloads a factor for each use, or overwrites factors and spills sums, in one
// copy of a loop and not in the next; clang 14 spills factors. The memory sanitizer gets plain C,
// because it takes the result of such an instruction as initialized.
#if defined(__has_feature) // of clang
#define VEC_MEMORY_SANITIZER_ __has_feature(memory_sanitizer)
#else
#define VEC_MEMORY_SANITIZER_ 0
#endif
ALWAYS_INLINE void vec_add_product(Vec* sum, Vec a, Vec b) {
#if defined(__GNUC__) && !defined(__CUDACC__) && defined(__FMA__) && !VEC_MEMORY_SANITIZER_ &&               \
    !defined(EMULATED_X86)
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(*sum) : "v"(a), "v"(b));
#else
    *sum += a * b;
#endif
}

ALWAYS_INLINE VecBits vec_load_bits(const uint32_t* p) { return *(const VecBitsUnaligned_*)p; }
ALWAYS_INLINE void vec_store_bits(uint32_t* p, VecBits v) { *(VecBitsUnaligned_*)p = v; }
ALWAYS_INLINE Vec vec_select(VecMask mask, Vec yes, Vec no) {
    return (Vec)(((VecMask)yes & mask) | ((VecMask)no & ~mask));
}
// Returns a > b ? a : b, or a < b ? a : b: if either is NaN, b, as x86's instructions do.
#if defined(X86_INTRINSICS) && defined(__AVX512F__)
ALWAYS_INLINE Vec vec_max(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
ALWAYS_INLINE Vec vec_min(Vec a, Vec b) { return (Vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(X86_INTRINSICS) && defined(__AVX2__)
ALWAYS_INLINE Vec vec_max(Vec a, Vec b) { return (Vec)_mm256_max_ps((__m256)a, (__m256)b); }
ALWAYS_INLINE Vec vec_min(Vec a, Vec b) { return (Vec)_mm256_min_ps((__m256)a, (__m256)b); }
#else
ALWAYS_INLINE Vec vec_max(Vec a, Vec b) { return vec_select(a > b, a, b); }
ALWAYS_INLINE Vec vec_min(Vec a, Vec b) { return vec_select(a < b, a, b); }
#endif

// Returns 1 / x to 2e-7, for x above the smallest normal numbers.
ALWAYS_INLINE Vec vec_reciprocal(Vec x) {
#if defined(X86_INTRINSICS) && defined(__AVX512F__)
    const Vec r = (Vec)_mm512_rcp14_ps((__m512)x);
    return r * (2.0f - x * r); // a step of Newton's method
#else
    return 1.0f / x;
#endif
}

// Returns all ones in the lanes below n, which may be negative or more than LANES.
ALWAYS_INLINE VecMask vec_first(int n) {
    VecMask index;
    for (int i = 0; i < LANES; i++) {
        index[i] = i;
    }
    return index < n;
}

// Return the sum and the maximum of the lanes, always in the order of the lanes.
ALWAYS_INLINE float vec_hsum(Vec v) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) {
        sum += v[i];
    }
    return sum;
}
ALWAYS_INLINE float vec_hmax(Vec v) {
    float max = v[0];
    for (int i = 1; i < LANES; i++) {
        max = v[i] > max ? v[i] : max;
    }
    return max;
}

// Returns the dot product of n elements, summed in an order that depends on n alone.
ALWAYS_INLINE float vec_dot(const float* a, const float* b, int n) {
    Vec sum = vec_all(0.0f);
    float rest = 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        sum += vec_load(a + i) * vec_load(b + i);
    }
    for (; i < n; i++) {
        rest += a[i] * b[i];
    }
    return vec_hsum(sum) + rest;
}

// Returns e^x lane by lane, relative error below 2e-7; below -87.3 it stays at 1.2e-38, above 88.3
// at 2.2e38, NaN stays NaN. e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln(2)/2, and a
// polynomial of degree 6 (Chebyshev nodes) for e^r.
ALWAYS_INLINE Vec vec_exp(Vec x) {
    // adding it rounds to an integer n and leaves n + 127, the exponent field of 2^n, in the low
    // bits
    const float round_magic = 12582912.0f + 127; // 1.5 2^23
    x = vec_max(vec_all(-87.3f), vec_min(vec_all(88.3f), x));
    const Vec shifted = x * 1.44269504f + round_magic;
    const Vec n = shifted - round_magic;
    const Vec r =
        // ln 2 in two parts: the first product is exact
        (x - n * 0.693359375f) - n * -2.12194440e-4f;
    Vec p = r * 1.39411084e-3f + 8.37512640e-3f;
    p = p * r + 4.16663529e-2f;
    p = p * r + 1.66664155e-1f;
    p = p * r + 5.00000005e-1f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (Vec)((VecMask)shifted << 23); // multiplies, so that NaN stays NaN
}

#define LOG2_E 1.44269504f // e^x = 2^(x LOG2_E)

// Returns 2^x lane by lane, with AVX-512 in half the instructions of vec_exp: relative error below
// 3e-7 from -126 to 127. Below, the result is between 0 and 1.2e-38; above, between 1.7e38 and
// infinity; NaN stays NaN. 2^x = 2^n 2^f, with the polynomial of degree 5 of least relative error
// for 2^f.
ALWAYS_INLINE Vec vec_exp2(Vec x) {
#if defined(X86_INTRINSICS) && defined(__AVX512DQ__)
    // 0 <= f < 1
    const Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vec p = f * 1.87757665e-3f + 8.98934016e-3f;
    p = p * f + 5.58263180e-2f;
    p = p * f + 2.40153617e-1f;
    p = p * f + 6.93153073e-1f;
    p = p * f + 9.99999925e-1f;
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)x); // takes 2^n from x
#else
    const float round_magic = 12582912.0f + 127; // as above
    x = vec_max(vec_all(-126.0f), vec_min(vec_all(127.4f), x));
    const Vec shifted = x + round_magic, f = x - (shifted - round_magic); // |f| <= 1/2
    Vec p = f * 1.32764718e-3f + 9.67554133e-3f;
    p = p * f + 5.55071327e-2f;
    p = p * f + 2.40221197e-1f;
    p = p * f + 6.93146967e-1f;
    p = p * f + 1.00000007f;
    return p * (Vec)((VecMask)shifted << 23);
#endif
}

// Interleaves two vectors: the low halves (a0 b0 a1 b1 ...) or the high halves.
#if defined(__clang__)
#define VEC_SHUFFLE_(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define VEC_SHUFFLE_(a, b, ...) __builtin_shuffle(a, b, (VecMask){__VA_ARGS__})
#endif
#if LANES == 16
#define VEC_EVEN_ 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define VEC_ODD_ 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define VEC_LOW_ 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define VEC_HIGH_ 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define VEC_EVEN_ 0, 2, 4, 6, 8, 10, 12, 14
#define VEC_ODD_ 1, 3, 5, 7, 9, 11, 13, 15
#define VEC_LOW_ 0, 8, 1, 9, 2, 10, 3, 11
#define VEC_HIGH_ 4, 12, 5, 13, 6, 14, 7, 15
#else
#define VEC_EVEN_ 0, 2, 4, 6
#define VEC_ODD_ 1, 3, 5, 7
#define VEC_LOW_ 0, 4, 1, 5
#define VEC_HIGH_ 2, 6, 3, 7
#endif

// Returns the even or the odd lanes of two vectors, a's first.
ALWAYS_INLINE Vec vec_even(Vec a, Vec b) { return VEC_SHUFFLE_(a, b, VEC_EVEN_); }
ALWAYS_INLINE Vec vec_odd(Vec a, Vec b) { return VEC_SHUFFLE_(a, b, VEC_ODD_); }

// Eight numbers looked up lane by lane: index i selects number i mod 8.
typedef struct {
    float at[LANES < 8 ? 8 : LANES];
} VecTable;
static inline VecTable vec_table(const float eight[8]) {
    VecTable table;
    for (size_t i = 0; i < sizeof(table.at) / sizeof(table.at[0]); i++) {
        table.at[i] = eight[i % 8];
    }
    return table;
}
ALWAYS_INLINE Vec vec_lookup(const VecTable* table, VecMask index) {
#if defined(X86_INTRINSICS) && defined(__AVX512F__)
    return (Vec)_mm512_permutexvar_ps((__m512i)index, (__m512)vec_load(table->at));
#elif defined(X86_INTRINSICS) && defined(__AVX2__)
    return (Vec)_mm256_permutevar8x32_ps((__m256)vec_load(table->at), (__m256i)index);
#elif defined(__clang__) || defined(__CUDACC__) // __builtin_shufflevector wants constants
    Vec found;
    for (int i = 0; i < LANES; i++) {
        found[i] = table->at[index[i] & 7];
    }
    return found;
#else
    return __builtin_shuffle(vec_load(table->at), vec_load(table->at + 4), index);
#endif
}

// Convert lane by lane, towards zero.
#ifdef __CUDACC__ // nvcc cannot convert vectors
ALWAYS_INLINE VecMask vec_to_ints(Vec x) {
    VecMask ints;
    for (int i = 0; i < LANES; i++) {
        ints[i] = (int32_t)x[i];
    }
    return ints;
}
ALWAYS_INLINE Vec vec_from_ints(VecMask ints) {
    Vec x;
    for (int i = 0; i < LANES; i++) {
        x[i] = (float)ints[i];
    }
    return x;
}
#else
ALWAYS_INLINE VecMask vec_to_ints(Vec x) { return __builtin_convertvector(x, VecMask); }
ALWAYS_INLINE Vec vec_from_ints(VecMask ints) { return __builtin_convertvector(ints, Vec); }
#endif

// Transposes a LANES x LANES square in place: log2(LANES) perfect shuffles of its rows.
ALWAYS_INLINE void vec_transpose(Vec row[LANES]) {
    Vec next[LANES];
#pragma GCC unroll 4
    for (int done = 1; done < LANES; done *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = VEC_SHUFFLE_(row[i], row[i + LANES / 2], VEC_LOW_);
            next[2 * i + 1] = VEC_SHUFFLE_(row[i], row[i + LANES / 2], VEC_HIGH_);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            row[i] = next[i];
        }
    }
}

#endif
