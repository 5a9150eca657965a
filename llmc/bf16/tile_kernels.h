/*
tile_kernels.h -- matmuls of factors rounded to bf16, 32 x 32 results at a time: the kernels, and
which of them this machine runs.

    out[i][j] = first[i][j] + sum_k left[i][k] right[k][j]        i, j < 32; sums in fp32

Factors are packed as described in tile_layout.h. Kernels: tiles of AMX (tdpbf16ps), AVX-512's
vdpbf16ps, NEON's bfdot, and for any machine fp32 vectors, to which pairs are expanded. Each is
compiled for its own instructions, whatever the program is built for, and chosen when the program
runs. They differ in the order of their sums; one kernel always gives the same bits.

needs:   packed data at multiples of 64 bytes: a row of a tile that straddles two cache lines is
         several times slower
*/
#ifndef LLMC_TILE_KERNELS_H
#define LLMC_TILE_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/vec.h"
#include "llmc/base/amx.h"
#include "llmc/bf16/tile_layout.h"
#include "llmc/ops/gradient.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- kernels ----

// Processes a tile of final sums: called for its rows [begin, end), from 0 to 32 in order.
typedef void (*Bf16Finish)(const void* tile, int begin, int end);

// Work of a kernel beside its matmul. It may prefetch, with each step, the next `lines` cache lines
// from `read` on, and the next `rows` of the 32 rows at `touch`, 128 bytes each: processors
// prefetch for vectors by themselves, but hardly for tiles. It finishes another tile, `rows` with
// each step, while it waits for its own sums: steps * rows >= 32.
typedef struct {
    const uint32_t* read;
    int lines, rows;
    const float* touch; // or NULL
    size_t stride;
    Bf16Finish finish; // or NULL
    const void* tile;
} Bf16Ahead;

__attribute__((unused)) static const Bf16Ahead bf16_nothing_ahead = {NULL, 0, 0, NULL, 0, NULL, NULL};

// Sets out (32, 32), rows `stride` apart, to `first` plus left times right. `first` has rows
// `first_stride` apart, may be out itself, or one row with stride 0; NULL means zeros. `ahead` is a
// pointer: a struct by value is written field by field and copied by one wide load, which waits for
// all earlier stores, including stores of tiles.
typedef void (*Bf16Product)(float* out, size_t stride, const float* first, size_t first_stride,
                            const uint32_t* left, const uint32_t* right, int steps, const Bf16Ahead* ahead);

typedef struct {
    const char* name; // name of the instructions
    Bf16Product product;
    void (*begin)(void); // called by each thread before its matmuls
    void (*end)(void);   // called by each thread after its matmuls
    int is_hardware;     // has instructions for bf16
    int runs;            // 1 if this machine can run it
    Bf16Pack pack;       // the fastest packing on this machine
    Bf16Pack pack_away;  // packs past the caches: for data that is not read soon
    Bf16PackTile pack_tile;
} Bf16Kernel;

// Defines a kernel with vectors of P##LANES_ results: ROWS x 2 of them stay in registers while k
// runs. P##dot_(sum, a, b) adds the products of two pairs to each lane.
#define BF16_LANES_KERNEL(name, attributes, P, ROWS)                                                         \
    static inline attributes void name(float* out, size_t stride, const float* first, size_t first_stride,   \
                                       const uint32_t* left, const uint32_t* right, int steps,               \
                                       const Bf16Ahead* ahead) {                                             \
        if (ahead->finish) {                                                                                 \
            ahead->finish(ahead->tile, 0, BF16_TILE);                                                        \
        }                                                                                                    \
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

ALWAYS_INLINE void bf16_beside_(const Bf16Ahead* ahead, int step) {
    for (int i = step * ahead->lines; i < (step + 1) * ahead->lines; i++) {
        __builtin_prefetch(ahead->read + (size_t)i * BF16_LINE_PAIRS, 0, 2);
    }
    const int row = step * ahead->rows, end = int_min(row + ahead->rows, BF16_TILE);
    for (int i = row; ahead->touch && i < end; i++) {
        __builtin_prefetch(ahead->touch + i * ahead->stride, 1);
        __builtin_prefetch(ahead->touch + i * ahead->stride + BF16_TILE / 2, 1);
    }
    if (ahead->finish && row < end) {
        ahead->finish(ahead->tile, row, end);
    }
}

// Defines a kernel with tiles of 16 rows of 64 bytes: four of results, two of each factor.
// P##dot_(0, 4, 6) adds the product of tiles 4 and 6 to tile 0. P##stream_ loads data that is not
// read again soon: the L1 cache keeps the right factor.
#define BF16_TILES_KERNEL(name, attributes, P)                                                               \
    static inline attributes void name(float* out, size_t stride, const float* first, size_t first_stride,   \
                                       const uint32_t* left, const uint32_t* right, int steps,               \
                                       const Bf16Ahead* ahead) {                                             \
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
            P##stream_(4, a, LEFT_BYTES);                                                                    \
            P##load_(6, b, RIGHT_BYTES);                                                                     \
            P##load_(7, b + HALF, RIGHT_BYTES);                                                              \
            P##stream_(5, a + BF16_STEP_PAIRS / 2, LEFT_BYTES);                                              \
            bf16_beside_(ahead, s);                                                                          \
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

// Shapes of the tiles: 16 rows of 64 bytes each.
__attribute__((unused)) static const AmxShapes bf16_shapes_ = {
    1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

enum { BF16_KERNELS = 3 };

// Lists all kernels for this kind of processor, the fastest first; returns their number. The last
// one runs everywhere.
int bf16_kernels(Bf16Kernel kernels[BF16_KERNELS]);

// Returns the fastest kernel that runs on this machine.
Bf16Kernel bf16_kernel(void);

// ---- a tile ----

// Destination of results: up to 32 rows and columns, rows `stride` apart.
typedef struct {
    float* data;
    size_t stride;
    int rows, cols;
} Bf16Out;

void bf16_copy_rows(float* to, size_t to_stride, const float* from, size_t stride, int rows, int cols);

// Sets or adds to a tile of results, according to `mode`: left times right, plus bias (cols),
// unless NULL, if the tile is set. The sums have the same order in a whole tile and at an edge.
void bf16_tile(const Bf16Kernel* kernel, Bf16Out out, const float* bias, GradientMode mode,
               const uint32_t* left, const uint32_t* right, int steps);

#ifdef __cplusplus
}
#endif

#ifdef TILE_KERNELS_IMPLEMENTATION

#include "llmc/base/intrinsics.h"

#if defined(ARM_INTRINSICS) && defined(__linux__)
#include <sys/auxv.h>
#endif

// The kernel for any machine: pairs are expanded to fp32. In each pair the odd values are
// multiplied first, as vdpbf16ps does.
typedef Vec bf16_vec_Sums_;

typedef VecBits bf16_vec_Pairs_;

#define bf16_vec_LANES_ LANES

#define bf16_vec_load_ vec_load

#define bf16_vec_store_ vec_store

#define bf16_vec_load_pairs_ vec_load_bits

ALWAYS_INLINE Vec bf16_vec_zero_(void) { return vec_all(0.0f); }

// Sets all lanes as floats, because a compiler might otherwise expand each pair before it is in a
// vector.
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

#ifdef BF16_AVX512
typedef __m512 bf16_avx512_Sums_;
typedef __m512i bf16_avx512_Pairs_;
#define bf16_avx512_LANES_ 16
#define bf16_avx512_load_ _mm512_loadu_ps
#define bf16_avx512_store_ _mm512_storeu_ps
#define bf16_avx512_zero_ _mm512_setzero_ps
#define bf16_avx512_load_pairs_ _mm512_load_si512
#define bf16_avx512_all_pairs_(x) _mm512_set1_epi32((int)(x))
#define bf16_avx512_dot_(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
BF16_LANES_KERNEL(bf16_product_avx512_, BF16_AVX512, bf16_avx512_, 8)
#endif

#ifdef AMX_COMPILES
#define BF16_AMX_ __attribute__((target("amx-tile,amx-bf16")))
#define bf16_amx_load_ _tile_loadd
#define bf16_amx_stream_ _tile_stream_loadd
#define bf16_amx_store_ _tile_stored
#define bf16_amx_zero_ _tile_zero
#define bf16_amx_dot_ _tile_dpbf16ps
BF16_TILES_KERNEL(bf16_product_amx_, BF16_AMX_, bf16_amx_)
static inline BF16_AMX_ void bf16_begin_amx_(void) { _tile_loadconfig(&bf16_shapes_); }
static inline BF16_AMX_ void bf16_end_amx_(void) { _tile_release(); }
#endif

#if defined(ARM_INTRINSICS) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 16)
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

int bf16_kernels(Bf16Kernel kernels[BF16_KERNELS]) {
    int n = 0;
    Bf16Pack pack = bf16_vec_pack, away = bf16_vec_pack;
    Bf16PackTile tile = bf16_vec_pack_tile;
#ifdef BF16_AVX512
    const int has_avx512 = bf16_has_avx512();
    pack = has_avx512 ? bf16_avx512_pack : pack;
    away = has_avx512 ? bf16_avx512_pack_away : away;
    tile = has_avx512 ? bf16_avx512_pack_tile : tile;
#endif
#ifdef BF16_AMX_
    kernels[n++] = (Bf16Kernel){
        "AMX", bf16_product_amx_, bf16_begin_amx_, bf16_end_amx_, 1, amx_runs(AMX_BF16), pack, away, tile};
#endif
#ifdef BF16_AVX512
    kernels[n++] = (Bf16Kernel){
        "AVX-512 BF16", bf16_product_avx512_, bf16_nothing_, bf16_nothing_, 1, has_avx512, pack, away, tile};
#endif
#ifdef BF16_NEON_
    kernels[n++] = (Bf16Kernel){
        "NEON BF16", bf16_product_neon_, bf16_nothing_, bf16_nothing_, 1, bf16_has_neon_(), pack, away, tile};
#endif
    kernels[n++] =
        (Bf16Kernel){VEC_ISA, bf16_product_vec_, bf16_nothing_, bf16_nothing_, 0, 1, pack, away, tile};
    return n;
}

Bf16Kernel bf16_kernel(void) {
    Bf16Kernel kernels[BF16_KERNELS];
    bf16_kernels(kernels);
    int k = 0;
    while (!kernels[k].runs) {
        k++;
    }
    return kernels[k];
}

void bf16_copy_rows(float* to, size_t to_stride, const float* from, size_t stride, int rows, int cols) {
    for (int i = 0; i < rows; i++) {
        memcpy(to + i * to_stride, from + i * stride, (size_t)cols * sizeof(float));
    }
}

// Sets or adds to a tile at the edge of the result, in a copy of a whole tile.
static void bf16_edge_(const Bf16Kernel* kernel, Bf16Out out, const float* bias, GradientMode mode,
                       const uint32_t* left, const uint32_t* right, int steps) {
    __attribute__((aligned(64))) float tile[BF16_TILE * BF16_TILE] = {0};
    const int is_added = mode == GRADIENT_ADD;
    if (is_added) {
        bf16_copy_rows(tile, BF16_TILE, out.data, out.stride, out.rows, out.cols);
    } else if (bias) {
        bf16_copy_rows(tile, BF16_TILE, bias, 0, out.rows, out.cols);
    }
    kernel->product(tile, BF16_TILE, tile, BF16_TILE, left, right, steps, &bf16_nothing_ahead);
    bf16_copy_rows(out.data, out.stride, tile, BF16_TILE, out.rows, out.cols);
}

void bf16_tile(const Bf16Kernel* kernel, Bf16Out out, const float* bias, GradientMode mode,
               const uint32_t* left, const uint32_t* right, int steps) {
    if (out.rows < BF16_TILE || out.cols < BF16_TILE) {
        bf16_edge_(kernel, out, bias, mode, left, right, steps);
    } else if (mode == GRADIENT_ADD) {
        kernel->product(out.data, out.stride, out.data, out.stride, left, right, steps, &bf16_nothing_ahead);
    } else {
        kernel->product(out.data, out.stride, bias, 0, left, right, steps, &bf16_nothing_ahead);
    }
}

#endif // TILE_KERNELS_IMPLEMENTATION

#endif
