/*
q8_amx.h -- matmuls of 8-bit numbers (q8.h), 16 x 16 results at a time, by AMX.

    out[r][i] = sum_b scales[r][b] panel[b].scales[i] sum_k q[r][b][k] w[i][b][k]  r, i < 16; k < 32

A block of 32 numbers has its own scale. So one tile operation (tdpbssd) covers one block, half of
its possible depth, and AVX-512 scales its 256 integers and adds them up in fp32, 16 at a time. By
arithmetic, not by measurement: 16 conversions, 16 multiplications and 16 fused multiply-adds at two
per cycle need 24 cycles, longer than tdpbssd itself with one row per cycle. By rows, VNNI needs
eight or more instructions for each of the 256 pairs of blocks: 340 cycles at six per cycle.

Blocks are added up in the order of q8.h. A panel is a copy of 16 rows of weights in the layout that
tdpbssd reads: four neighbors of a row form 32 bits; next to them are the 32 bits of the other rows.

needs:   q, panel and out at multiples of 64 bytes: a row of a tile that straddles two cache lines
         is several times slower
*/
#ifndef LLMC_Q8_AMX_H
#define LLMC_Q8_AMX_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/amx.h"
#include "llmc/base/vec.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    QUANTIZED_BLOCK = 32,
    QUANTIZED_SUMS = 8,  // sums of a result: block b belongs to sum b % 8
    QUANTIZED_SIDE = 16, // rows and columns of a tile of results
    QUANTIZED_SIDE_RESULTS_ = QUANTIZED_SIDE * QUANTIZED_SIDE
};

// Returns the total of a result's sums, which are `apart` from each other.
ALWAYS_INLINE float quantized_total(const float* sum, size_t apart) {
    const float even = (sum[0] + sum[4 * apart]) + (sum[2 * apart] + sum[6 * apart]),
                odd = (sum[apart] + sum[5 * apart]) + (sum[3 * apart] + sum[7 * apart]);
    return even + odd;
}

// One block of each of 16 rows.
typedef struct {
    int8_t fours[QUANTIZED_BLOCK / 4][QUANTIZED_SIDE][4];
    float scales[QUANTIZED_SIDE];
} QuantizedPanelBlock;

// Sets row i of a block of a panel.
void quantized_panel_set(QuantizedPanelBlock* block, int i, const int8_t q[QUANTIZED_BLOCK], float scale);

// Sets out (16, 16). The rows of q and scales are `blocks` blocks apart.
typedef void (*QuantizedTileProduct)(float* out, const int8_t* q, const float* scales,
                                     const QuantizedPanelBlock* panel, int blocks);

typedef struct {
    QuantizedTileProduct product; // NULL: this machine has none
    void (*begin)(void);          // called by each thread before its matmuls
    void (*end)(void);            // called by each thread after its matmuls
} QuantizedTileKernel;

// Shapes of the tiles: 0 and 1 are results, 2 and 4 a block of 16 rows of input, 3 and 5 a block of
// a panel.
__attribute__((unused)) static const AmxShapes quantized_shapes = {
    1, 0, {0}, {64, 64, 32, 64, 32, 64}, {16, 16, 16, 8, 16, 8}};

// Computes one of the sums of 16 x 16 results: blocks s, s + 8, ... Two blocks at a time, to hide
// the latency of tdpbssd. P##dot_(0, 2, 3) adds the product of tiles 2 and 3 to tile 0;
// P##scale_(sum, dots, a, b) adds 16 dots, each times b and its a.
#define QUANTIZED_TILES_KERNEL(name, attributes, P)                                                          \
    static inline attributes void name##sum_(float* out, const int8_t* q, const float* scales,               \
                                             const QuantizedPanelBlock* panel, int blocks, int s) {          \
        enum { SIDE = QUANTIZED_SIDE, NEXT = QUANTIZED_SUMS };                                               \
        const size_t row_bytes = (size_t)blocks * QUANTIZED_BLOCK;                                           \
        __attribute__((aligned(64))) int32_t dots[2][QUANTIZED_SIDE_RESULTS_];                               \
        P##Sums_ sum[SIDE];                                                                                  \
        _Pragma("GCC unroll 16") for (int r = 0; r < SIDE; r++) { sum[r] = P##none_(); }                     \
        for (int b = s; b < blocks; b += 2 * NEXT) {                                                         \
            const int count = b + NEXT < blocks ? 2 : 1;                                                     \
            P##zero_(0);                                                                                     \
            P##load_(2, q + b * QUANTIZED_BLOCK, row_bytes);                                                 \
            P##load_(3, panel[b].fours, 4 * SIDE);                                                           \
            P##dot_(0, 2, 3);                                                                                \
            if (count == 2) {                                                                                \
                P##zero_(1);                                                                                 \
                P##load_(4, q + (b + NEXT) * QUANTIZED_BLOCK, row_bytes);                                    \
                P##load_(5, panel[b + NEXT].fours, 4 * SIDE);                                                \
                P##dot_(1, 4, 5);                                                                            \
            }                                                                                                \
            P##store_(0, dots[0], 4 * SIDE);                                                                 \
            if (count == 2) {                                                                                \
                P##store_(1, dots[1], 4 * SIDE);                                                             \
            }                                                                                                \
            for (int i = 0; i < count; i++) {                                                                \
                const int at = b + i * NEXT;                                                                 \
                _Pragma("GCC unroll 16") for (int r = 0; r < SIDE; r++) {                                    \
                    sum[r] = P##scale_(sum[r], dots[i] + r * SIDE, panel[at].scales,                         \
                                       scales[(size_t)r * blocks + at]);                                     \
                }                                                                                            \
            }                                                                                                \
        }                                                                                                    \
        _Pragma("GCC unroll 16") for (int r = 0; r < SIDE; r++) { P##keep_(out + r * SIDE, sum[r]); }        \
    }                                                                                                        \
    static inline attributes void name(float* out, const int8_t* q, const float* scales,                     \
                                       const QuantizedPanelBlock* panel, int blocks) {                       \
        __attribute__((aligned(64))) float sums[QUANTIZED_SUMS][QUANTIZED_SIDE_RESULTS_];                    \
        for (int s = 0; s < QUANTIZED_SUMS; s++) {                                                           \
            name##sum_(sums[s], q, scales, panel, blocks, s);                                                \
        }                                                                                                    \
        for (int i = 0; i < QUANTIZED_SIDE_RESULTS_; i++) {                                                  \
            out[i] = quantized_total(sums[0] + i, QUANTIZED_SIDE_RESULTS_);                                  \
        }                                                                                                    \
    }

QuantizedTileKernel quantized_tile_kernel(void);

#ifdef __cplusplus
}
#endif

#ifdef Q8_AMX_IMPLEMENTATION

void quantized_panel_set(QuantizedPanelBlock* block, int i, const int8_t q[QUANTIZED_BLOCK], float scale) {
    block->scales[i] = scale;
    for (int k = 0; k < QUANTIZED_BLOCK / 4; k++) {
        memcpy(block->fours[k][i], q + 4 * k, 4);
    }
}

#ifdef AMX_COMPILES
#define QUANTIZED_AMX_ __attribute__((target("amx-tile,amx-int8,avx512f")))
typedef __m512 quantized_amx_Sums_;
#define quantized_amx_none_ _mm512_setzero_ps
#define quantized_amx_keep_ _mm512_store_ps
#define quantized_amx_zero_ _tile_zero
#define quantized_amx_load_ _tile_loadd
#define quantized_amx_store_ _tile_stored
#define quantized_amx_dot_ _tile_dpbssd
#define quantized_amx_scale_(sum, dots, a, b)                                                                \
    _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(dots)),                                             \
                    _mm512_mul_ps(_mm512_load_ps(a), _mm512_set1_ps(b)), sum)
QUANTIZED_TILES_KERNEL(quantized_tile_amx_, QUANTIZED_AMX_, quantized_amx_)
static inline QUANTIZED_AMX_ void quantized_begin_amx_(void) { _tile_loadconfig(&quantized_shapes); }
static inline QUANTIZED_AMX_ void quantized_end_amx_(void) { _tile_release(); }
#endif

QuantizedTileKernel quantized_tile_kernel(void) {
    QuantizedTileKernel kernel = {NULL, NULL, NULL};
#ifdef AMX_COMPILES
    if (__builtin_cpu_supports("avx512f") && amx_runs(AMX_INT8)) {
        kernel = (QuantizedTileKernel){quantized_tile_amx_, quantized_begin_amx_, quantized_end_amx_};
    }
#endif
    return kernel;
}

#endif // Q8_AMX_IMPLEMENTATION

#endif
