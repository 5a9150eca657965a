/*
q8.h -- weights in 8 bits, and the linear layer with them. Inference only.

    out[n][o] = sum_c inp[n][c] weight[o][c] + bias[o]

    out     (N, OC)       fp32
    inp     (N, C)        fp32; C a multiple of QUANTIZED_BLOCK
    weight  (OC, C / 32)  blocks
    bias    (OC)          fp32; may be NULL

A block is GGUF's Q8_0: 32 numbers of a row with one scale, w = scale q, scale = max |w| / 127 in
fp16, q = round(w / scale): 34 bytes, 1.06 per number. The input is rounded to 8 bits in the same
way, with scales in fp32. 8-bit products are summed over a block in integers, exactly. Blocks are
added up in fp32: block b is added to sum b % 8, and the eight sums to each other in a fixed order.
So a result has the same bits with any instructions, any other rows, and any number of threads.

A kernel multiplies a row of weights with 1 or 4 rows of input. The program chooses one when it
runs: VNNI (AVX-512 or AVX), AVX2, NEON's dot products, or plain C. With AMX, inputs of more rows
use the tiles of q8_amx.h instead.
*/
#ifndef LLMC_Q8_H
#define LLMC_Q8_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/memory.h"
#include "llmc/base/float16.h"
#include "llmc/base/sizes.h"
#include "llmc/base/threads.h"
#include "llmc/ops/matmul.h"
#include "llmc/ops/q8_amx.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { QUANTIZED_TILE = 4, QUANTIZED_STREAMS_ = 4, QUANTIZED_CHUNK_ = 8 };

typedef struct {
    uint16_t scale; // fp16
    int8_t q[QUANTIZED_BLOCK];
} QuantizedBlock;

// Rows of input in 8 bits, followed by padding up to a whole number of tiles.
typedef struct {
    int8_t* q;     // (N, C)
    float* scales; // (N, C / QUANTIZED_BLOCK)
} QuantizedRows;

// Sets sums[0 ... rows) to the products of a row of weights, `blocks` blocks, with 1 or
// QUANTIZED_TILE rows of input, which are `blocks` blocks apart.
typedef void (*QuantizedProduct)(float* sums, const QuantizedBlock* weight, const int8_t* q,
                                 const float* scales, int rows, int blocks);

typedef struct {
    const char* name; // name of the instructions
    QuantizedProduct product;
    int runs; // 1 if this machine can run it
} QuantizedKernel;

typedef struct {
    QuantizedProduct product;    // the fastest kernel of this machine
    QuantizedTileKernel tile;    // no product without AMX
    void* rows;                  // quantized_rows_bytes of the largest input
    QuantizedPanelBlock* panels; // panel of each thread, for the tiles
    size_t panel_blocks;         // blocks of the widest panel
} QuantizedScratch;

// ---- encoding ----

static inline int quantized_fits(size_t cols) { return cols % QUANTIZED_BLOCK == 0; }

// The smallest number whose block has an infinite scale.
#define QUANTIZED_OVERFLOW (127 * FP16_OVERFLOW)

// Encodes a row of `cols` numbers.
void quantized_encode(QuantizedBlock* out, const float* x, size_t cols);

void quantized_decode(float* out, const QuantizedBlock* weight, size_t cols);

// Return the bytes of N rows of C numbers, and the rows in such memory.
static inline size_t quantized_padded_(size_t N) {
    return (N + QUANTIZED_SIDE - 1) / QUANTIZED_SIDE * QUANTIZED_SIDE;
}

static inline size_t quantized_rows_bytes(size_t N, size_t C) {
    return quantized_padded_(N) * (C + C / QUANTIZED_BLOCK * sizeof(float));
}

QuantizedRows quantized_rows_bind(void* memory, size_t N, size_t C);

// Encodes inp (N, C).
void quantized_rows(QuantizedRows rows, const float* inp, size_t N, size_t C);

// ---- kernels ----

static inline void quantized_product_plain_(float* sums, const QuantizedBlock* weight, const int8_t* q,
                                            const float* scales, int rows, int blocks) {
    for (int r = 0; r < rows; r++) {
        const int8_t* x = q + (size_t)r * blocks * QUANTIZED_BLOCK;
        float sum[QUANTIZED_SUMS] = {0};
        for (int b = 0; b < blocks; b++) {
            int32_t dot = 0;
            for (int i = 0; i < QUANTIZED_BLOCK; i++) {
                dot += weight[b].q[i] * x[b * QUANTIZED_BLOCK + i];
            }
            const float scale = fp16_to_float(weight[b].scale) * scales[r * blocks + b];
            sum[b % QUANTIZED_SUMS] = fmaf((float)dot, scale, sum[b % QUANTIZED_SUMS]);
        }
        sums[r] = quantized_total(sum, 1);
    }
}

enum { QUANTIZED_KERNELS = 4 };

// Lists all kernels for this kind of processor, the fastest first; returns their number.
int quantized_kernels(QuantizedKernel kernels[QUANTIZED_KERNELS]);

// Returns the fastest kernel that runs on this machine.
QuantizedKernel quantized_kernel(void);

// ---- the layer ----

typedef struct {
    float* out;
    QuantizedRows inp;
    const QuantizedBlock* weight;
    const float* bias;
    int N, blocks, OC; // blocks: of a row
} QuantizedLayer_;

// Returns the length of a run of rows. For few rows of input the rows of the weights are cut into
// QUANTIZED_STREAMS_ runs, which are read in parallel, as in matvec.h. For more rows, arithmetic
// takes longer than reading.
static inline int quantized_run_(int N, int OC) {
    return N < QUANTIZED_TILE ? int_ceil_div(OC, QUANTIZED_STREAMS_) : OC;
}

// Multiplies rows [i0, i1) of each run with all rows of the input.
static inline void quantized_chunk_(const QuantizedLayer_* layer, int i0, int i1, QuantizedProduct product) {
    const int N = layer->N, OC = layer->OC, run = quantized_run_(N, OC);
    for (int n = 0, rows; n < N; n += rows) {
        rows = N - n >= QUANTIZED_TILE ? QUANTIZED_TILE : 1;
        const size_t at = (size_t)n * layer->blocks;
        for (int i = i0; i < i1; i++) {
            for (int o = i; o < OC; o += run) {
                float sums[QUANTIZED_TILE];
                product(sums, layer->weight + (size_t)o * layer->blocks, layer->inp.q + at * QUANTIZED_BLOCK,
                        layer->inp.scales + at, rows, layer->blocks);
                for (int r = 0; r < rows; r++) {
                    layer->out[(size_t)(n + r) * OC + o] = sums[r] + (layer->bias ? layer->bias[o] : 0);
                }
            }
        }
    }
}

// Returns the bytes of panels for as many threads as the next parallel region would have.
static inline size_t quantized_panels_bytes_(QuantizedTileKernel tile, size_t C) {
    return tile.product ? (size_t)threads_max() * C / QUANTIZED_BLOCK * sizeof(QuantizedPanelBlock) : 0;
}

static inline void quantized_open_(QuantizedScratch* scratch, Memory* memory, QuantizedTileKernel tile,
                                   size_t N, size_t C) {
    const size_t panels = quantized_panels_bytes_(tile, C);
    scratch->product = quantized_kernel().product;
    scratch->tile = tile;
    scratch->rows =
        memory_take(memory, "scratch: inputs in 8 bits", MEMORY_DEVICE, quantized_rows_bytes(N, C));
    scratch->panel_blocks = C / QUANTIZED_BLOCK;
    scratch->panels =
        (QuantizedPanelBlock*)memory_take(memory, "scratch: panels in 8 bits", MEMORY_DEVICE, panels);
}

// Allocates scratch for inputs of up to N rows of C numbers.
static inline void quantized_open(QuantizedScratch* scratch, Memory* memory, size_t N, size_t C) {
    quantized_open_(scratch, memory, quantized_tile_kernel(), N, C);
}

// Returns the bytes of weights that a matmul reads.
static inline double quantized_bytes(double C, double OC) {
    return C * OC / QUANTIZED_BLOCK * sizeof(QuantizedBlock);
}

// Sets out (N, OC).
void q8_matmul_cpu(float* out, const float* inp, const QuantizedBlock* weight, const float* bias,
                   MatmulSizes sizes, const QuantizedScratch* scratch);

#ifdef __cplusplus
}
#endif

#ifdef Q8_IMPLEMENTATION

#include <assert.h>

#include "llmc/base/intrinsics.h"

static_assert(sizeof(QuantizedBlock) == 34, "the block of the file format has no padding");

// Returns the scale of 32 numbers: max |x| / 127; NaN if one of them is not finite.
static float quantized_scale_(const float x[QUANTIZED_BLOCK]) {
    uint32_t bits[QUANTIZED_BLOCK], largest = 0; // positive floats compare like their bits
    memcpy(bits, x, sizeof(bits));
    for (int i = 0; i < QUANTIZED_BLOCK; i++) {
        const uint32_t magnitude = bits[i] & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    float value;
    memcpy(&value, &largest, sizeof(value));
    return largest < 0x7f800000 ? value / 127 : NAN;
}

// Sets q[i] = round(x[i] / scale), ties away from zero; 0 for scales that are 0 or NaN.
static void quantized_round_(int8_t q[QUANTIZED_BLOCK], const float x[QUANTIZED_BLOCK], float scale) {
    const float inverse = scale > 0 ? 1 / scale : 0;
    for (int i = 0; i < QUANTIZED_BLOCK; i++) {
        const float value = scale > 0 ? x[i] * inverse : 0;
        const int whole = (int)value;
        const float rest = value - (float)whole; // exact
        q[i] = (int8_t)(whole + (rest >= 0.5f) - (rest <= -0.5f));
    }
}

void quantized_encode(QuantizedBlock* out, const float* x, size_t cols) {
    for (size_t b = 0; b < cols / QUANTIZED_BLOCK; b++) {
        const float scale = quantized_scale_(x + b * QUANTIZED_BLOCK);
        out[b].scale = fp16_from_float(scale);
        quantized_round_(out[b].q, x + b * QUANTIZED_BLOCK, scale);
    }
}

void quantized_decode(float* out, const QuantizedBlock* weight, size_t cols) {
    for (size_t b = 0; b < cols / QUANTIZED_BLOCK; b++) {
        const float scale = fp16_to_float(weight[b].scale);
        const int8_t* q = weight[b].q;
        float* to = out + b * QUANTIZED_BLOCK;
#pragma omp simd // to the compiler, writes of `to` might change q
        for (int i = 0; i < QUANTIZED_BLOCK; i++) {
            to[i] = scale * q[i];
        }
    }
}

QuantizedRows quantized_rows_bind(void* memory, size_t N, size_t C) {
    float* scales = (float*)memory;
    return (QuantizedRows){(int8_t*)(scales + quantized_padded_(N) * C / QUANTIZED_BLOCK), scales};
}

void quantized_rows(QuantizedRows rows, const float* inp, size_t N, size_t C) {
    for (size_t b = 0; b < N * C / QUANTIZED_BLOCK; b++) {
        rows.scales[b] = quantized_scale_(inp + b * QUANTIZED_BLOCK);
        quantized_round_(rows.q + b * QUANTIZED_BLOCK, inp + b * QUANTIZED_BLOCK, rows.scales[b]);
    }
}

#if defined(X86_INTRINSICS)
#define QUANTIZED_AVX2_ __attribute__((target("avx2,fma,f16c"), always_inline))

// Returns the sums of the lanes of each of eight vectors, in their order.
static inline QUANTIZED_AVX2_ __m256i quantized_add_lanes_(const __m256i v[QUANTIZED_SUMS]) {
    const __m256i low = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3])),
                  high = _mm256_hadd_epi32(_mm256_hadd_epi32(v[4], v[5]), _mm256_hadd_epi32(v[6], v[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                            _mm256_permute2x128_si256(low, high, 0x31));
}

// Returns the scales of eight blocks; zero from block `count` on.
static inline QUANTIZED_AVX2_ __m256 quantized_scales_of_(const QuantizedBlock* block, const int count) {
#define QUANTIZED_SCALE_(i) (short)((i) < count ? block[i].scale : 0)
    return _mm256_cvtph_ps(_mm_setr_epi16(QUANTIZED_SCALE_(0), QUANTIZED_SCALE_(1), QUANTIZED_SCALE_(2),
                                          QUANTIZED_SCALE_(3), QUANTIZED_SCALE_(4), QUANTIZED_SCALE_(5),
                                          QUANTIZED_SCALE_(6), QUANTIZED_SCALE_(7)));
#undef QUANTIZED_SCALE_
}

static inline QUANTIZED_AVX2_ __m256 quantized_load_scales_(const float* scales, const int count) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return count == QUANTIZED_SUMS
               ? _mm256_loadu_ps(scales)
               : _mm256_maskload_ps(scales, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
}

// Multiplies by x86 instructions, which take unsigned and signed numbers: |w| times x with the sign
// of w. DOT(magnitudes, signed) gives 8 sums of four products each; AVX2 adds pairs in 16 bits,
// where |w|, |x| <= 127 fit. Eight blocks are processed at a time, and their sums are the lanes of
// a vector.
#define QUANTIZED_X86_(name, targets, DOT)                                                                   \
    static inline __attribute__((target(targets), always_inline))                                            \
    __m256i name##dots_(const QuantizedBlock* block, const int8_t* q, const int count) {                     \
        __m256i dot[QUANTIZED_SUMS];                                                                         \
        _Pragma("GCC unroll 8") for (int i = 0; i < QUANTIZED_SUMS; i++) {                                   \
            if (i < count) {                                                                                 \
                const __m256i w = _mm256_loadu_si256((const __m256i*)block[i].q);                            \
                const __m256i x = _mm256_loadu_si256((const __m256i*)(q + i * QUANTIZED_BLOCK));             \
                dot[i] = DOT(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));                                    \
            } else {                                                                                         \
                dot[i] = _mm256_setzero_si256();                                                             \
            }                                                                                                \
        }                                                                                                    \
        return quantized_add_lanes_(dot);                                                                    \
    }                                                                                                        \
    static inline __attribute__((target(targets), always_inline)) void name##add_(                           \
        __m256* sum, const QuantizedBlock* block, const int8_t* q, const float* scales, const int rows,      \
        int blocks, const int count) {                                                                       \
        const __m256 scale = quantized_scales_of_(block, count);                                             \
        _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {                                             \
            const size_t at = (size_t)r * blocks;                                                            \
            const __m256 dots = _mm256_cvtepi32_ps(name##dots_(block, q + at * QUANTIZED_BLOCK, count));     \
            const __m256 both = _mm256_mul_ps(scale, quantized_load_scales_(scales + at, count));            \
            sum[r] = _mm256_fmadd_ps(dots, both, sum[r]);                                                    \
        }                                                                                                    \
    }                                                                                                        \
    static inline __attribute__((target(targets), always_inline)) void name##rows_(                          \
        float* sums, const QuantizedBlock* weight, const int8_t* q, const float* scales, const int rows,     \
        int blocks) {                                                                                        \
        __m256 sum[QUANTIZED_TILE];                                                                          \
        int b = 0;                                                                                           \
        _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) { sum[r] = _mm256_setzero_ps(); }             \
        for (; b + QUANTIZED_SUMS <= blocks; b += QUANTIZED_SUMS) {                                          \
            name##add_(sum, weight + b, q + b * QUANTIZED_BLOCK, scales + b, rows, blocks, QUANTIZED_SUMS);  \
        }                                                                                                    \
        if (b < blocks) {                                                                                    \
            name##add_(sum, weight + b, q + b * QUANTIZED_BLOCK, scales + b, rows, blocks, blocks - b);      \
        }                                                                                                    \
        for (int r = 0; r < rows; r++) {                                                                     \
            float lanes[QUANTIZED_SUMS];                                                                     \
            _mm256_storeu_ps(lanes, sum[r]);                                                                 \
            sums[r] = quantized_total(lanes, 1);                                                             \
        }                                                                                                    \
    }                                                                                                        \
    static inline __attribute__((target(targets))) void name(float* sums, const QuantizedBlock* weight,      \
                                                             const int8_t* q, const float* scales, int rows, \
                                                             int blocks) {                                   \
        if (rows == 1) {                                                                                     \
            name##rows_(sums, weight, q, scales, 1, blocks);                                                 \
        } else {                                                                                             \
            name##rows_(sums, weight, q, scales, QUANTIZED_TILE, blocks);                                    \
        }                                                                                                    \
    }
#define QUANTIZED_DOT_AVX2_(a, b) _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1))
#define QUANTIZED_DOT_VNNI512_(a, b) _mm256_dpbusd_epi32(_mm256_setzero_si256(), a, b)
#define QUANTIZED_DOT_VNNI_(a, b) _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), a, b)
QUANTIZED_X86_(quantized_product_avx2_, "avx2,fma,f16c", QUANTIZED_DOT_AVX2_)
QUANTIZED_X86_(quantized_product_vnni512_, "avx2,fma,f16c,avx512vnni,avx512vl", QUANTIZED_DOT_VNNI512_)
QUANTIZED_X86_(quantized_product_vnni_, "avx2,fma,f16c,avxvnni", QUANTIZED_DOT_VNNI_)
#elif defined(ARM_INTRINSICS) && defined(__ARM_FEATURE_DOTPROD)
// Returns four sums of products of block i; zeros from block `count` on.
static inline int32x4_t quantized_neon_dot_(const QuantizedBlock* block, const int8_t* q, int i, int count) {
    if (i >= count) {
        return vdupq_n_s32(0);
    }
    const int8_t *w = block[i].q, *x = q + i * QUANTIZED_BLOCK;
    const int32x4_t low = vdotq_s32(vdupq_n_s32(0), vld1q_s8(w), vld1q_s8(x));
    return vdotq_s32(low, vld1q_s8(w + 16), vld1q_s8(x + 16));
}

// Adds four blocks to four sums; only `count` if that is less.
static inline float32x4_t quantized_neon_add_(float32x4_t sum, const QuantizedBlock* block, const int8_t* q,
                                              const float* scales, int count) {
    float scale[4] = {0};
    int32x4_t dot[4];
    for (int i = 0; i < 4; i++) {
        scale[i] = i < count ? fp16_to_float(block[i].scale) * scales[i] : 0;
        dot[i] = quantized_neon_dot_(block, q, i, count);
    }
    const int32x4_t dots = vpaddq_s32(vpaddq_s32(dot[0], dot[1]), vpaddq_s32(dot[2], dot[3]));
    return vfmaq_f32(sum, vcvtq_f32_s32(dots), vld1q_f32(scale));
}

static inline void quantized_product_neon_(float* sums, const QuantizedBlock* weight, const int8_t* q,
                                           const float* scales, int rows, int blocks) {
    for (int r = 0; r < rows; r++) {
        float lanes[QUANTIZED_SUMS] = {0};
        for (int b = 0; b < blocks; b += 4) {
            const size_t at = (size_t)r * blocks + b;
            float* sum = lanes + b % QUANTIZED_SUMS;
            vst1q_f32(sum, quantized_neon_add_(vld1q_f32(sum), weight + b, q + at * QUANTIZED_BLOCK,
                                               scales + at, blocks - b));
        }
        sums[r] = quantized_total(lanes, 1);
    }
}
#endif

#if defined(X86_INTRINSICS)
// Returns 1 if the CPU has AVX-VNNI, which some compilers' __builtin_cpu_supports does not know.
static inline int quantized_has_vnni_(void) {
    unsigned eax = 0, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax >> 4 & 1;
}
#endif

int quantized_kernels(QuantizedKernel kernels[QUANTIZED_KERNELS]) {
    int n = 0;
#if defined(X86_INTRINSICS)
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int vnni512 = avx2 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
    kernels[n++] = (QuantizedKernel){"AVX-512 VNNI", quantized_product_vnni512_, vnni512};
    kernels[n++] = (QuantizedKernel){"AVX-VNNI", quantized_product_vnni_, avx2 && quantized_has_vnni_()};
    kernels[n++] = (QuantizedKernel){"AVX2", quantized_product_avx2_, avx2};
#elif defined(ARM_INTRINSICS) && defined(__ARM_FEATURE_DOTPROD)
    kernels[n++] = (QuantizedKernel){"NEON dot products", quantized_product_neon_, 1};
#endif
    kernels[n++] = (QuantizedKernel){"plain C", quantized_product_plain_, 1};
    return n;
}

QuantizedKernel quantized_kernel(void) {
    QuantizedKernel kernels[QUANTIZED_KERNELS];
    const int count = quantized_kernels(kernels);
    int k = 0;
    while (k < count - 1 && !kernels[k].runs) {
        k++;
    }
    return kernels[k];
}

// Copies rows [o, o + rows) of the weights. The results of the panel's other rows are not used.
static void quantized_pack_panel_(QuantizedPanelBlock* panel, const QuantizedBlock* weight, int blocks, int o,
                                  int rows) {
    for (int i = 0; i < rows; i++) {
        const QuantizedBlock* row = weight + (size_t)(o + i) * blocks;
        for (int b = 0; b < blocks; b++) {
            quantized_panel_set(&panel[b], i, row[b].q, fp16_to_float(row[b].scale));
        }
    }
}

// Sets up to 16 columns of the result, from column o on.
static void quantized_columns_(const QuantizedLayer_* layer, int o, QuantizedPanelBlock* panel,
                               QuantizedTileProduct product) {
    const int cols = int_min(QUANTIZED_SIDE, layer->OC - o);
    __attribute__((aligned(64))) float tile[QUANTIZED_SIDE * QUANTIZED_SIDE];
    quantized_pack_panel_(panel, layer->weight, layer->blocks, o, cols);
    for (int n = 0; n < layer->N; n += QUANTIZED_SIDE) {
        const size_t at = (size_t)n * layer->blocks;
        product(tile, layer->inp.q + at * QUANTIZED_BLOCK, layer->inp.scales + at, panel, layer->blocks);
        for (int r = 0; r < int_min(QUANTIZED_SIDE, layer->N - n); r++) {
            for (int i = 0; i < cols; i++) {
                layer->out[(size_t)(n + r) * layer->OC + o + i] =
                    tile[r * QUANTIZED_SIDE + i] + (layer->bias ? layer->bias[o + i] : 0);
            }
        }
    }
}

static void quantized_by_tiles_(const QuantizedLayer_* layer, const QuantizedScratch* scratch) {
#pragma omp parallel
    {
        scratch->tile.begin();
#pragma omp for schedule(static)
        for (int o = 0; o < layer->OC; o += QUANTIZED_SIDE) {
            quantized_columns_(layer, o, scratch->panels + (size_t)thread_index() * scratch->panel_blocks,
                               scratch->tile.product);
        }
        scratch->tile.end();
    }
}

static void quantized_by_rows_(const QuantizedLayer_* layer, const QuantizedScratch* scratch) {
    const int run = quantized_run_(layer->N, layer->OC);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < run; i += QUANTIZED_CHUNK_) {
        quantized_chunk_(layer, i, int_min(i + QUANTIZED_CHUNK_, run), scratch->product);
    }
}

void q8_matmul_cpu(float* out, const float* inp, const QuantizedBlock* weight, const float* bias,
                   MatmulSizes sizes, const QuantizedScratch* scratch) {
    const int N = sizes.N, C = sizes.C;
    const QuantizedRows rows = quantized_rows_bind(scratch->rows, (size_t)N, (size_t)C);
    const size_t blocks = (size_t)C / QUANTIZED_BLOCK;
    const QuantizedLayer_ layer = {out, rows, weight, bias, N, (int)blocks, sizes.OC};
#pragma omp parallel for schedule(static) if (N > 1)
    for (int n = 0; n < N; n++) {
        const QuantizedRows row = {rows.q + (size_t)n * C, rows.scales + n * blocks};
        quantized_rows(row, inp + (size_t)n * C, 1, (size_t)C);
    }
    if (scratch->tile.product && N >= QUANTIZED_TILE) {
        quantized_by_tiles_(&layer, scratch);
    } else {
        quantized_by_rows_(&layer, scratch);
    }
}

#endif // Q8_IMPLEMENTATION

#endif
