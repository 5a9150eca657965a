/*
tile_layout.h -- factors of matmuls rounded to bf16 and packed, as the kernels of tile_kernels.h
read them.

Factors are rounded to nearest, ties to even. Two neighbors along k are a pair, 32 bits with the
even one in the low half: the operand of every bf16 instruction. A step is 32 values of k:

    left    (steps, 32 rows, 16 pairs)
    right   (steps, 16 pairs, 32 columns)

Packed values past the matrix are zero. bf16_vec_pack runs everywhere. bf16_avx512_pack, for
processors that have AVX-512 with BF16, gives the same bits except for denormals, which become zero;
the trainer's matmuls treat them as zero anyway.
*/
#ifndef LLMC_TILE_LAYOUT_H
#define LLMC_TILE_LAYOUT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/sizes.h"
#include "llmc/base/intrinsics.h"
#include "llmc/base/vec.h"
#include "llmc/ops/matmul.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    BF16_TILE = 32,        // rows and columns of the result
    BF16_STEP = 32,        // values of k
    BF16_STEP_PAIRS = 512, // pairs of a step of either factor
    BF16_LINE_PAIRS = 16   // pairs of a cache line
};

static inline int bf16_steps(int k) { return int_ceil_div(k, BF16_STEP); }

// Sets out to x rounded to bf16, as fp32; if n is odd, appends a zero, for which out must have
// room.
void bf16_round_row(float* out, const float* x, int n);

// A part of a factor. Lines are rows of a left factor, columns of a right one; 32 lines are a tile.
// Value k of line i is from[i * stride + k] or, if lines are contiguous, from[k * stride + i].
typedef struct {
    const float* from;
    size_t stride;
    int lines, k; // their number
} Bf16Part;

// Packs a part as a left or a right factor; its tiles are `tile` pairs apart. `part` is a pointer
// for the same reason as Bf16Product's `ahead` (tile_kernels.h).
typedef void (*Bf16Pack)(uint32_t* to, size_t tile, const Bf16Part* part, int k_contiguous, int is_left);

// Returns `lanes` lines from i0 and twice as many values from k0: in place, or as a copy with zeros
// after the part.
ALWAYS_INLINE Bf16Part bf16_inside_(float* copy, Bf16Part part, int i0, int k0, const int k_contiguous,
                                    const int lanes) {
    const size_t at = k_contiguous ? i0 * part.stride + k0 : k0 * part.stride + i0;
    const int lines = int_min(part.lines - i0, lanes), k = int_min(part.k - k0, 2 * lanes);
    if (lines == lanes && k == 2 * lanes) {
        return (Bf16Part){part.from + at, part.stride, lines, k};
    }
    memset(copy, 0, 2 * (size_t)lanes * lanes * sizeof(float));
    for (int i = 0; i < lines; i++) {
        for (int p = 0; p < k; p++) {
            copy[k_contiguous ? i * 2 * lanes + p : p * lanes + i] =
                part.from[at + (k_contiguous ? i * part.stride + p : p * part.stride + i)];
        }
    }
    return (Bf16Part){copy, (size_t)(k_contiguous ? 2 * lanes : lanes), lines, k};
}

// Destinations of a packed tile (32, 32), or NULL: as left factors, whose lines are its rows or its
// columns, and as right factors over its rows or its columns.
typedef struct {
    uint32_t *rows, *cols, *over_rows, *over_cols;
} Bf16TilePacked;

typedef void (*Bf16PackTile)(const Bf16TilePacked* to, const float* tile);

// Packs squares of `lanes` lines and pairs in the order of memory: caches and prefetchers like long
// rows. P##square_ reads a square: a line in each vector if k is contiguous, else a pair of each
// line; P##transpose_ turns one into the other. This is the body of a Bf16Pack.
#define BF16_PACK_SQUARES_(P, lanes, store)                                                                  \
    const int across = int_ceil_div(part->lines, BF16_TILE) * (BF16_TILE / (lanes));                         \
    const int along = bf16_steps(part->k) * (BF16_STEP / (2 * (lanes)));                                     \
    const int row = is_left ? BF16_STEP / 2 : BF16_TILE; /* pairs */                                         \
    const int rows = k_contiguous ? across : along, cols = k_contiguous ? along : across;                    \
    for (int r = 0; r < rows; r++) {                                                                         \
        for (int c = 0; c < cols; c++) {                                                                     \
            const int i = (k_contiguous ? r : c) * (lanes), line = i % BF16_TILE;                            \
            const int k = (k_contiguous ? c : r) * 2 * (lanes), pair = k % BF16_STEP / 2;                    \
            uint32_t* at = to + i / BF16_TILE * tile + k / BF16_STEP * BF16_STEP_PAIRS;                      \
            float copy[2 * (lanes) * (lanes)];                                                               \
            P##Pairs_ square[lanes];                                                                         \
            if (k_contiguous) {                                                                              \
                P##square_(square, bf16_inside_(copy, *part, i, k, 1, lanes), 1);                            \
            } else {                                                                                         \
                P##square_(square, bf16_inside_(copy, *part, i, k, 0, lanes), 0);                            \
            }                                                                                                \
            if (k_contiguous != is_left) {                                                                   \
                P##transpose_(square);                                                                       \
            }                                                                                                \
            at += is_left ? line * row + pair : pair * row + line;                                           \
            _Pragma("GCC unroll 16") for (int p = 0; p < (lanes); p++) { store(at + p * row, square[p]); }   \
        }                                                                                                    \
    }

// ---- any machine ----

void bf16_vec_pack(uint32_t* to, size_t tile, const Bf16Part* part, int k_contiguous, int is_left);

void bf16_vec_pack_tile(const Bf16TilePacked* to, const float* tile);

// ---- AVX-512, from gcc 11 and clang 12 on ----

#if defined(X86_INTRINSICS) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define BF16_AVX512 __attribute__((target("avx512f,avx512bw,avx512bf16")))
#define BF16_AVX512_INLINE_                                                                                  \
    static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512bf16")))

// Returns 1 if the CPU has AVX-512 BF16: subleaf 1 of leaf 7. Not every compiler's
// __builtin_cpu_supports knows it.
static inline int bf16_has_avx512(void) {
    unsigned eax = 0, ebx, ecx, edx;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax >> 5 & 1;
}

typedef __m512i bf16_pack_avx512_Pairs_;
// Permutation that interleaves 16 values and 16 more into 16 pairs.
static const __attribute__((aligned(64)))
uint16_t bf16_interleave_[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
BF16_AVX512_INLINE_ void bf16_pack_avx512_square_(__m512i square[16], Bf16Part part, const int k_contiguous) {
    const __m512i interleave = _mm512_load_si512(bf16_interleave_);
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) {
        const float* low = part.from + (k_contiguous ? i : 2 * i) * part.stride;
        const float* high = low + (k_contiguous ? 16 : part.stride);
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(high), _mm512_loadu_ps(low));
        square[i] = k_contiguous ? both : _mm512_permutexvar_epi16(interleave, both);
    }
}
// Transposes a square by four perfect shuffles, like vec_transpose.
BF16_AVX512_INLINE_ void bf16_pack_avx512_transpose_(__m512i square[16]) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    __m512i next[16];
    _Pragma("GCC unroll 4") for (int done = 1; done < 16; done *= 2) {
        _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
            next[2 * i] = _mm512_permutex2var_epi32(square[i], low, square[i + 8]);
            next[2 * i + 1] = _mm512_permutex2var_epi32(square[i], high, square[i + 8]);
        }
        _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) { square[i] = next[i]; }
    }
}
static inline BF16_AVX512 void bf16_avx512_pack(uint32_t* to, size_t tile, const Bf16Part* part,
                                                int k_contiguous, int is_left) {
    BF16_PACK_SQUARES_(bf16_pack_avx512_, 16, _mm512_store_si512)
}
// Packs past the caches.
#define bf16_pack_avx512_stream_(p, v) _mm512_stream_si512((__m512i*)(void*)(p), v)
static inline BF16_AVX512 void bf16_avx512_pack_away(uint32_t* to, size_t tile, const Bf16Part* part,
                                                     int k_contiguous, int is_left){
    BF16_PACK_SQUARES_(bf16_pack_avx512_, 16, bf16_pack_avx512_stream_)}
// Stores 16 rows of 16 pairs, `stride` apart.
BF16_AVX512_INLINE_ void bf16_avx512_store_square_(uint32_t* to, const int stride, const __m512i square[16]) {
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) { _mm512_store_si512(to + i * stride, square[i]); }
}
// Packs pairs along the rows: 16 rows from `i` on.
BF16_AVX512_INLINE_ void bf16_avx512_pack_rows_(const Bf16TilePacked* to, const float* tile, int i) {
    const Bf16Part part = {tile + i * BF16_TILE, BF16_TILE, 16, BF16_STEP};
    __m512i square[16];
    bf16_pack_avx512_square_(square, part, 1);
    if (to->rows) {
        bf16_avx512_store_square_(to->rows + i * 16, 16, square);
    }
    if (to->over_cols) {
        bf16_pack_avx512_transpose_(square);
        bf16_avx512_store_square_(to->over_cols + i, BF16_TILE, square);
    }
}
// Packs pairs along the columns: 16 columns from `j` on.
BF16_AVX512_INLINE_ void bf16_avx512_pack_cols_(const Bf16TilePacked* to, const float* tile, int j) {
    const Bf16Part part = {tile + j, BF16_TILE, 16, BF16_STEP};
    __m512i square[16];
    bf16_pack_avx512_square_(square, part, 0);
    if (to->over_rows) {
        bf16_avx512_store_square_(to->over_rows + j, BF16_TILE, square);
    }
    if (to->cols) {
        bf16_pack_avx512_transpose_(square);
        bf16_avx512_store_square_(to->cols + j * 16, 16, square);
    }
}
static inline BF16_AVX512 void bf16_avx512_pack_tile(const Bf16TilePacked* to, const float* tile) {
    for (int i = 0; i < BF16_TILE && (to->rows || to->over_cols); i += 16) {
        bf16_avx512_pack_rows_(to, tile, i);
    }
    for (int j = 0; j < BF16_TILE && (to->cols || to->over_rows); j += 16) {
        bf16_avx512_pack_cols_(to, tile, j);
    }
}
#endif

// ---- parts of matrices ----

// Packs `rows` rows of a left matrix, and k values; tiles of 32 rows are `tile` pairs apart.
void bf16_pack_left(Bf16Pack pack, uint32_t* to, size_t tile, Matrix m, int rows, int k);

// Packs `cols` columns of a right matrix, and k values; tiles of 32 columns are `tile` pairs apart.
void bf16_pack_right(Bf16Pack pack, uint32_t* to, size_t tile, Matrix m, int k, int cols);

#ifdef __cplusplus
}
#endif

#ifdef TILE_LAYOUT_IMPLEMENTATION

#include "llmc/base/float16.h"

// Rounds x to bf16, in the upper halves; the lower halves are undefined. NaN stays NaN.
ALWAYS_INLINE VecBits bf16_round_(Vec x) {
    const VecBits bits = (VecBits)x, is_number = (VecBits)(x == x);
    const VecBits rounded = bits + 0x7fff + (bits >> 16 & 1), quiet = bits | 0x400000;
    return (rounded & is_number) | (quiet & ~is_number);
}

ALWAYS_INLINE VecBits bf16_pairs_(Vec even, Vec odd) {
    return bf16_round_(even) >> 16 | (bf16_round_(odd) & 0xffff0000);
}

void bf16_round_row(float* out, const float* x, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec_store(out + i, (Vec)(bf16_round_(vec_load(x + i)) & 0xffff0000));
    }
    for (; i < n + n % 2; i++) {
        out[i] = i < n ? bf16_to_float(bf16_from_float(x[i])) : 0;
    }
}

typedef VecBits bf16_pack_vec_Pairs_;

ALWAYS_INLINE void bf16_pack_vec_square_(VecBits square[LANES], Bf16Part part, const int k_contiguous) {
    for (int i = 0; i < LANES; i++) {
        const float* even = part.from + (k_contiguous ? i : 2 * i) * part.stride;
        const float* odd = even + (k_contiguous ? LANES : part.stride);
        const Vec a = vec_load(even), b = vec_load(odd);
        square[i] = k_contiguous ? bf16_pairs_(vec_even(a, b), vec_odd(a, b)) : bf16_pairs_(a, b);
    }
}

ALWAYS_INLINE void bf16_pack_vec_transpose_(VecBits square[LANES]) {
    Vec row[LANES];
    memcpy(row, square, sizeof(row));
    vec_transpose(row);
    memcpy(square, row, sizeof(row));
}

void bf16_vec_pack(uint32_t* to, size_t tile, const Bf16Part* part, int k_contiguous, int is_left) {
    BF16_PACK_SQUARES_(bf16_pack_vec_, LANES, vec_store_bits)
}

void bf16_vec_pack_tile(const Bf16TilePacked* to, const float* tile) {
    uint32_t* const packed[4] = {to->over_rows, to->cols, to->over_cols, to->rows};
    const Bf16Part part = {tile, BF16_TILE, BF16_TILE, BF16_STEP};
    for (int i = 0; i < 4; i++) {
        if (packed[i]) {
            bf16_vec_pack(packed[i], 0, &part, i / 2, i % 2);
        }
    }
}

void bf16_pack_left(Bf16Pack pack, uint32_t* to, size_t tile, Matrix m, int rows, int k) {
    const int k_contiguous = m.col == 1;
    const Bf16Part part = {m.data, k_contiguous ? m.row : m.col, rows, k};
    pack(to, tile, &part, k_contiguous, 1);
}

void bf16_pack_right(Bf16Pack pack, uint32_t* to, size_t tile, Matrix m, int k, int cols) {
    const int k_contiguous = m.col != 1;
    const Bf16Part part = {m.data, k_contiguous ? m.col : m.row, cols, k};
    pack(to, tile, &part, k_contiguous, 0);
}

#endif // TILE_LAYOUT_IMPLEMENTATION

#endif
