/*
bf16_tile.h -- products of matrices whose factors are rounded to bf16, 32 x 32 results at a time: how factors are
packed, the kernels, and which of them this machine runs.

    out[i][j] = first[i][j] + sum_k left[i][k] right[k][j]        i, j < 32; sums in fp32

Factors are rounded to nearest, ties to even, while they are packed. Two neighbours along k are a pair, 32 bits
with the even one in the low half: the operand of every bf16 instruction. A step is 32 values of k:

    left    (steps, 32 rows, 16 pairs)
    right   (steps, 16 pairs, 32 columns)

What lies past the matrix is zero. All kernels read this layout: tiles of AMX (tdpbf16ps), AVX-512's vdpbf16ps,
NEON's bfdot, and for any machine vectors of fp32 that pairs are expanded to. Each is compiled for its own
instructions, whatever the program is built for, and chosen when the program runs. They differ in the order of
their sums; one kernel always gives the same bits.

needs:   packed data at multiples of 64 bytes: a row of a tile that straddles two cache lines is several times slower
defines: BF16_TILE, BF16_STEP, BF16_STEP_PAIRS, bf16_steps, bf16_round_row, bf16_pack_left, bf16_pack_right, Bf16Product, Bf16Kernel,
         Bf16Out, bf16_tile, BF16_KERNELS, bf16_kernels, bf16_kernel, BF16_LANES_KERNEL, BF16_TILES_KERNEL
*/
#ifndef LLMC_BF16_TILE_H
#define LLMC_BF16_TILE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/float16.h"
#include "llmc/base/int.h"
#include "llmc/base/vec.h"
#include "llmc/amx.h"
#include "llmc/gradient.h"
#include "llmc/matmul.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

enum {
    BF16_TILE = 32,       // rows and columns of the result
    BF16_STEP = 32,       // values of k
    BF16_STEP_PAIRS = 512 // of a step of either factor
};

static inline int bf16_steps(int k) { return int_ceil_div(k, BF16_STEP); }

// ---- packing ----

// x rounded to bf16, in the upper halves; the lower halves are left over. NaN stays NaN.
ALWAYS_INLINE VecBits bf16_round_(Vec x) {
    const VecBits bits = (VecBits)x, is_number = (VecBits)(x == x);
    const VecBits rounded = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    return (rounded & is_number) | (quiet & ~is_number);
}

ALWAYS_INLINE VecBits bf16_pairs_(Vec even, Vec odd) {
    return bf16_round_(even) >> 16 | (bf16_round_(odd) & 0xffff0000);
}

// Sets out to x rounded to bf16, as fp32, in an array with room for an even number of them; what that adds is zero.
static inline void bf16_round_row(float* out, const float* x, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec_store(out + i, (Vec)(bf16_round_(vec_load(x + i)) & 0xffff0000));
    }
    for (; i < n + n % 2; i++) {
        out[i] = i < n ? bf16_to_float(bf16_from_float(x[i])) : 0;
    }
}

// Lines are rows of the left factor, columns of the right one. A part of a factor: value k of line i is from[i *
// stride + k] or, if lines are contiguous, from[k * stride + i].
typedef struct {
    const float* from;
    size_t stride;
    int lines, k; // how many there are
} Bf16Part_;

// Where LANES lines from i0 and 2 LANES values from k0 can be read: in place, or as a copy with zeros behind the part.
ALWAYS_INLINE Bf16Part_ bf16_inside_(float copy[2 * LANES * LANES], Bf16Part_ part, int i0, int k0,
                                     const int k_contiguous) {
    const size_t at = k_contiguous ? i0 * part.stride + k0 : k0 * part.stride + i0;
    const int lines = int_min(part.lines - i0, LANES), k = int_min(part.k - k0, 2 * LANES);
    if (lines == LANES && k == 2 * LANES) {
        return (Bf16Part_){part.from + at, part.stride, lines, k};
    }
    memset(copy, 0, 2 * LANES * LANES * sizeof(float));
    for (int i = 0; i < lines; i++) {
        for (int p = 0; p < k; p++) {
            copy[k_contiguous ? i * 2 * LANES + p : p * LANES + i] =
                part.from[at + (k_contiguous ? i * part.stride + p : p * part.stride + i)];
        }
    }
    return (Bf16Part_){copy, (size_t)(k_contiguous ? 2 * LANES : LANES), lines, k};
}

// Sets LANES x LANES pairs: a line in each vector if k is contiguous, else a pair of each line.
ALWAYS_INLINE void bf16_square_(VecBits square[LANES], Bf16Part_ part, const int k_contiguous) {
    for (int i = 0; i < LANES; i++) {
        const float* even = part.from + (k_contiguous ? i : 2 * i) * part.stride;
        const float* odd = even + (k_contiguous ? LANES : part.stride);
        const Vec a = vec_load(even), b = vec_load(odd);
        square[i] = k_contiguous ? bf16_pairs_(vec_even(a, b), vec_odd(a, b)) : bf16_pairs_(a, b);
    }
}

ALWAYS_INLINE void bf16_transpose_(VecBits square[LANES]) {
    Vec row[LANES];
    memcpy(row, square, sizeof(row));
    vec_transpose(row);
    memcpy(square, row, sizeof(row));
}

// Packs up to 32 lines, square by square, in the order of memory.
ALWAYS_INLINE void bf16_pack_(uint32_t* to, Bf16Part_ part, const int k_contiguous, const int is_left) {
    const int across = BF16_TILE / LANES, along = bf16_steps(part.k) * (BF16_STEP / (2 * LANES));
    const int row = is_left ? BF16_STEP / 2 : BF16_TILE; // pairs
    for (int s = 0; s < across * along; s++) {
        const int i = (k_contiguous ? s / along : s % across) * LANES;
        const int k = (k_contiguous ? s % along : s / across) * 2 * LANES, pair = k % BF16_STEP / 2;
        float copy[2 * LANES * LANES];
        VecBits square[LANES];
        bf16_square_(square, bf16_inside_(copy, part, i, k, k_contiguous), k_contiguous);
        if (k_contiguous != is_left) {
            bf16_transpose_(square);
        }
        uint32_t* at = to + k / BF16_STEP * BF16_STEP_PAIRS + (is_left ? i * row + pair : pair * row + i);
        for (int r = 0; r < LANES; r++) {
            vec_store_bits(at + r * row, square[r]);
        }
    }
}

// Packs `rows` <= 32 rows of a left matrix from row i0, and the values of k from k0 to k0 + k.
static inline void bf16_pack_left(uint32_t* to, Matrix m, int i0, int k0, int rows, int k) {
    const float* from = m.data + i0 * m.row + k0 * m.col;
    if (m.col == 1) {
        bf16_pack_(to, (Bf16Part_){from, m.row, rows, k}, 1, 1);
    } else {
        bf16_pack_(to, (Bf16Part_){from, m.col, rows, k}, 0, 1);
    }
}

// The same of a right matrix: `cols` <= 32 columns from column j0.
static inline void bf16_pack_right(uint32_t* to, Matrix m, int k0, int j0, int k, int cols) {
    const float* from = m.data + k0 * m.row + j0 * m.col;
    if (m.col == 1) {
        bf16_pack_(to, (Bf16Part_){from, m.row, cols, k}, 0, 0);
    } else {
        bf16_pack_(to, (Bf16Part_){from, m.col, cols, k}, 1, 0);
    }
}

// ---- kernels ----

// Sets out (32, 32), whose rows are `stride` apart, to `first` plus the product. `first` has rows `first_stride` apart,
// may be out itself, or one row with stride 0; NULL stands for zeros.
typedef void (*Bf16Product)(float* out, size_t stride, const float* first, size_t first_stride,
                            const uint32_t* left, const uint32_t* right, int steps);

typedef struct {
    const char* name; // of the instructions
    Bf16Product product;
    void (*begin)(void); // by each thread, before its products
    void (*end)(void);   // and after them
    int is_hardware;     // has instructions for bf16
    int runs;            // on this machine
} Bf16Kernel;

// A kernel with vectors of P##LANES_ results: ROWS x 2 of them stay in registers while k runs. P##dot_(sum, a, b) adds the
// products of two pairs to each lane.
#define BF16_LANES_KERNEL(name, attributes, P, ROWS)                                                         \
    static inline attributes void name(float* out, size_t stride, const float* first, size_t first_stride,   \
                                       const uint32_t* left, const uint32_t* right, int steps) {             \
        for (int tile = 0; tile < BF16_TILE / (ROWS)*BF16_TILE / (2 * P##LANES_); tile++) {                  \
            const int i = tile % (BF16_TILE / (ROWS)) * (ROWS);                                              \
            const int j = tile / (BF16_TILE / (ROWS)) * 2 * P##LANES_;                                       \
            P##Sums_ sum[ROWS][2];                                                                           \
            _Pragma("GCC unroll 16") for (int r = 0; r < (ROWS); r++) {                                      \
                const float* row = first + (i + r) * first_stride + j;                                       \
                sum[r][0] = first ? P##load_(row) : P##zero_();                                              \
                sum[r][1] = first ? P##load_(row + P##LANES_) : P##zero_();                                  \
            }                                                                                                \
            for (int s = 0; s < steps; s++) {                                                                \
                const uint32_t* a = left + s * BF16_STEP_PAIRS + i * BF16_STEP / 2;                          \
                const uint32_t* b = right + s * BF16_STEP_PAIRS + j;                                         \
                for (int p = 0; p < BF16_STEP / 2; p++) {                                                    \
                    const P##Pairs_ low = P##load_pairs_(b + p * BF16_TILE);                                 \
                    const P##Pairs_ high = P##load_pairs_(b + p * BF16_TILE + P##LANES_);                    \
                    _Pragma("GCC unroll 16") for (int r = 0; r < (ROWS); r++) {                              \
                        const P##Pairs_ factor = P##all_pairs_(a[r * (BF16_STEP / 2) + p]);                  \
                        sum[r][0] = P##dot_(sum[r][0], factor, low);                                         \
                        sum[r][1] = P##dot_(sum[r][1], factor, high);                                        \
                    }                                                                                        \
                }                                                                                            \
            }                                                                                                \
            _Pragma("GCC unroll 16") for (int r = 0; r < (ROWS); r++) {                                      \
                P##store_(out + (i + r) * stride + j, sum[r][0]);                                            \
                P##store_(out + (i + r) * stride + j + P##LANES_, sum[r][1]);                                \
            }                                                                                                \
        }                                                                                                    \
    }

// A kernel with tiles of 16 rows of 64 bytes: four of results, two of each factor. P##dot_(0, 4, 6) adds the product of
// tiles 4 and 6 to tile 0.
#define BF16_TILES_KERNEL(name, attributes, P)                                                               \
    static inline attributes void name(float* out, size_t stride, const float* first, size_t first_stride,   \
                                       const uint32_t* left, const uint32_t* right, int steps) {             \
        enum { HALF = BF16_TILE / 2, LEFT_BYTES = 2 * BF16_STEP, RIGHT_BYTES = 4 * BF16_TILE };              \
        const size_t bytes = stride * sizeof(float), first_bytes = first_stride * sizeof(float);             \
        if (first) {                                                                                         \
            P##load_(0, first, first_bytes);                                                                 \
            P##load_(1, first + HALF, first_bytes);                                                          \
            P##load_(2, first + HALF * first_stride, first_bytes);                                           \
            P##load_(3, first + HALF * first_stride + HALF, first_bytes);                                    \
        } else {                                                                                             \
            P##zero_(0);                                                                                     \
            P##zero_(1);                                                                                     \
            P##zero_(2);                                                                                     \
            P##zero_(3);                                                                                     \
        }                                                                                                    \
        for (int s = 0; s < steps; s++) {                                                                    \
            const uint32_t *a = left + s * BF16_STEP_PAIRS, *b = right + s * BF16_STEP_PAIRS;                \
            P##load_(4, a, LEFT_BYTES);                                                                      \
            P##load_(6, b, RIGHT_BYTES);                                                                     \
            P##load_(7, b + HALF, RIGHT_BYTES);                                                              \
            P##load_(5, a + BF16_STEP_PAIRS / 2, LEFT_BYTES);                                                \
            P##dot_(0, 4, 6);                                                                                \
            P##dot_(1, 4, 7);                                                                                \
            P##dot_(2, 5, 6);                                                                                \
            P##dot_(3, 5, 7);                                                                                \
        }                                                                                                    \
        P##store_(0, out, bytes);                                                                            \
        P##store_(1, out + HALF, bytes);                                                                     \
        P##store_(2, out + HALF * stride, bytes);                                                            \
        P##store_(3, out + HALF * stride + HALF, bytes);                                                     \
    }

static inline void bf16_nothing_(void) {}

// Any machine: the pairs expanded to fp32. In each pair the odd values are multiplied first, as vdpbf16ps does.
typedef Vec bf16_vec_Sums_;
typedef VecBits bf16_vec_Pairs_;
#define bf16_vec_LANES_ LANES
#define bf16_vec_load_ vec_load
#define bf16_vec_store_ vec_store
#define bf16_vec_load_pairs_ vec_load_bits
ALWAYS_INLINE Vec bf16_vec_zero_(void) { return vec_all(0.0f); }
// As floats, lest a compiler expands each pair before it is in a vector.
ALWAYS_INLINE VecBits bf16_vec_all_pairs_(uint32_t pair) {
    float x;
    Vec v = {0};
    memcpy(&x, &pair, sizeof(x));
    for (int i = 0; i < LANES; i++) {
        v[i] = x;
    }
    return (VecBits)v;
}
ALWAYS_INLINE Vec bf16_vec_dot_(Vec sum, VecBits a, VecBits b) {
    sum += (Vec)(a & 0xffff0000) * (Vec)(b & 0xffff0000);
    sum += (Vec)(a << 16) * (Vec)(b << 16);
    return sum;
}
BF16_LANES_KERNEL(bf16_product_vec_, , bf16_vec_, VEC_REGISTERS / 4)

// AVX-512 and AMX; the compilers know them since gcc 11 and clang 12.
#if defined(__x86_64__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define BF16_AVX512_ __attribute__((target("avx512f,avx512bf16")))
typedef __m512 bf16_avx512_Sums_;
typedef __m512i bf16_avx512_Pairs_;
#define bf16_avx512_LANES_ 16
#define bf16_avx512_load_ _mm512_loadu_ps
#define bf16_avx512_store_ _mm512_storeu_ps
#define bf16_avx512_zero_ _mm512_setzero_ps
#define bf16_avx512_load_pairs_ _mm512_load_si512
#define bf16_avx512_all_pairs_(x) _mm512_set1_epi32((int)(x))
#define bf16_avx512_dot_(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
BF16_LANES_KERNEL(bf16_product_avx512_, BF16_AVX512_, bf16_avx512_, 8)

// Subleaf 1 of leaf 7; the compilers' own question does not know all of it.
static inline int bf16_has_avx512_(void) {
    unsigned eax = 0, ebx, ecx, edx;
    return __builtin_cpu_supports("avx512f") && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) &&
           eax >> 5 & 1;
}
#endif
// All tiles have 16 rows of 64 bytes.
static const AmxShapes bf16_shapes_ = {
    1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
#ifdef AMX_COMPILES
#define BF16_AMX_ __attribute__((target("amx-tile,amx-bf16")))
#define bf16_amx_load_ _tile_loadd
#define bf16_amx_store_ _tile_stored
#define bf16_amx_zero_ _tile_zero
#define bf16_amx_dot_ _tile_dpbf16ps
BF16_TILES_KERNEL(bf16_product_amx_, BF16_AMX_, bf16_amx_)
static inline BF16_AMX_ void bf16_begin_amx_(void) { _tile_loadconfig(&bf16_shapes_); }
static inline BF16_AMX_ void bf16_end_amx_(void) { _tile_release(); }
#endif

#if defined(__aarch64__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 16)
#define BF16_NEON_ __attribute__((target("arch=armv8.2-a+bf16")))
typedef float32x4_t bf16_neon_Sums_;
typedef uint32x4_t bf16_neon_Pairs_;
#define bf16_neon_LANES_ 4
#define bf16_neon_load_ vld1q_f32
#define bf16_neon_store_ vst1q_f32
#define bf16_neon_zero_() vdupq_n_f32(0)
#define bf16_neon_load_pairs_ vld1q_u32
#define bf16_neon_all_pairs_ vdupq_n_u32
#define bf16_neon_dot_(sum, a, b) vbfdotq_f32(sum, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b))
BF16_LANES_KERNEL(bf16_product_neon_, BF16_NEON_, bf16_neon_, 8)

static inline int bf16_has_neon_(void) { return getauxval(AT_HWCAP2) >> 14 & 1; } // HWCAP2_BF16
#endif

enum { BF16_KERNELS = 3 };

// All kernels of this kind of processor, the fastest first; returns how many. The last one runs everywhere.
static inline int bf16_kernels(Bf16Kernel kernels[BF16_KERNELS]) {
    int n = 0;
#ifdef BF16_AMX_
    kernels[n++] =
        (Bf16Kernel){"AMX", bf16_product_amx_, bf16_begin_amx_, bf16_end_amx_, 1, amx_runs(AMX_BF16)};
#endif
#ifdef BF16_AVX512_
    kernels[n++] = (Bf16Kernel){"AVX-512 BF16",    bf16_product_avx512_, bf16_nothing_, bf16_nothing_, 1,
                                bf16_has_avx512_()};
#endif
#ifdef BF16_NEON_
    kernels[n++] =
        (Bf16Kernel){"NEON BF16", bf16_product_neon_, bf16_nothing_, bf16_nothing_, 1, bf16_has_neon_()};
#endif
    kernels[n++] = (Bf16Kernel){VEC_ISA, bf16_product_vec_, bf16_nothing_, bf16_nothing_, 0, 1};
    return n;
}

// The fastest that runs here.
static inline Bf16Kernel bf16_kernel(void) {
    Bf16Kernel kernels[BF16_KERNELS];
    bf16_kernels(kernels);
    int k = 0;
    while (!kernels[k].runs) {
        k++;
    }
    return kernels[k];
}

// ---- a tile ----

// Where results go: up to 32 rows and columns, rows `stride` apart.
typedef struct {
    float* data;
    size_t stride;
    int rows, cols;
} Bf16Out;

static inline void bf16_copy_(float* to, size_t to_stride, const float* from, size_t stride, int rows,
                              int cols) {
    for (int i = 0; i < rows; i++) {
        memcpy(to + i * to_stride, from + i * stride, (size_t)cols * sizeof(float));
    }
}

// The same at the edge of the result: in memory of a whole tile.
static inline void bf16_edge_(const Bf16Kernel* kernel, Bf16Out out, const float* bias, GradientMode mode,
                              const uint32_t* left, const uint32_t* right, int steps) {
    __attribute__((aligned(64))) float tile[BF16_TILE * BF16_TILE] = {0};
    const int is_added = mode == GRADIENT_ADD;
    if (is_added) {
        bf16_copy_(tile, BF16_TILE, out.data, out.stride, out.rows, out.cols);
    } else if (bias) {
        bf16_copy_(tile, BF16_TILE, bias, 0, out.rows, out.cols);
    }
    kernel->product(tile, BF16_TILE, tile, BF16_TILE, left, right, steps);
    bf16_copy_(out.data, out.stride, tile, BF16_TILE, out.rows, out.cols);
}

// Sets or adds to a tile of results as `mode` says: left times right, and if it is set bias (cols), or NULL. The sums
// have the same order in a whole tile and at an edge.
static inline void bf16_tile(const Bf16Kernel* kernel, Bf16Out out, const float* bias, GradientMode mode,
                             const uint32_t* left, const uint32_t* right, int steps) {
    if (out.rows < BF16_TILE || out.cols < BF16_TILE) {
        bf16_edge_(kernel, out, bias, mode, left, right, steps);
    } else if (mode == GRADIENT_ADD) {
        kernel->product(out.data, out.stride, out.data, out.stride, left, right, steps);
    } else {
        kernel->product(out.data, out.stride, bias, 0, left, right, steps);
    }
}

#endif
