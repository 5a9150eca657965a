/*
bf16_model.h -- the bf16 instructions of x86 in plain C, as Intel's manual describes them.

The kernels of tile_kernels.h are compiled with these functions, so that their source is tested on
any machine.

    vdpbf16ps   sum += a1 b1, then sum += a0 b0
    tdpbf16ps   even and odd products summed apart along the row, then both added to the result tile

Each multiplication and addition is fused and rounded to nearest; operands and results that are
denormal count as zero.
*/
#ifndef DEV_BF16_MODEL_H
#define DEV_BF16_MODEL_H

#include <math.h>

#include "llmc/base/float16.h"
#include "llmc/bf16/tile_kernels.h"
#include "dev/test/lib/amx_model.h"
#include "dev/test/lib/test.h"

static inline float model_flush_(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

// sum + a b of one half of two pairs.
static inline float model_multiply_add_(float sum, uint32_t a, uint32_t b, int odd) {
    const float x = bf16_to_float((uint16_t)(odd ? a >> 16 : a)),
                y = bf16_to_float((uint16_t)(odd ? b >> 16 : b));
    return model_flush_(fmaf(model_flush_(x), model_flush_(y), model_flush_(sum)));
}

// ---- vdpbf16ps ----

enum { model_LANES_ = 16 };
typedef struct {
    float lane[model_LANES_];
} model_Sums_;
typedef struct {
    uint32_t lane[model_LANES_];
} model_Pairs_;

static inline model_Sums_ model_load_(const float* p) {
    model_Sums_ v;
    memcpy(&v, p, sizeof(v));
    return v;
}
static inline model_Sums_ model_zero_(void) { return (model_Sums_){{0}}; }
static inline void model_store_(float* p, model_Sums_ v) { memcpy(p, &v, sizeof(v)); }
static inline model_Pairs_ model_load_pairs_(const uint32_t* p) {
    model_Pairs_ v;
    EXPECT((uintptr_t)p % 64 == 0, "pairs straddle a cache line");
    memcpy(&v, p, sizeof(v));
    return v;
}
static inline model_Pairs_ model_all_pairs_(uint32_t x) {
    model_Pairs_ v;
    for (int i = 0; i < model_LANES_; i++) {
        v.lane[i] = x;
    }
    return v;
}
static inline model_Sums_ model_dot_(model_Sums_ sum, model_Pairs_ a, model_Pairs_ b) {
    for (int i = 0; i < model_LANES_; i++) {
        sum.lane[i] = model_multiply_add_(sum.lane[i], a.lane[i], b.lane[i], 1);
        sum.lane[i] = model_multiply_add_(sum.lane[i], a.lane[i], b.lane[i], 0);
    }
    return sum;
}
BF16_LANES_KERNEL(model_product_avx512_, , model_, 8)

// ---- AMX ----

static inline void model_amx_begin_(void) { amx_model_begin(&bf16_shapes_); }
#define model_amx_zero_ amx_model_zero
#define model_amx_load_ amx_model_load
#define model_amx_stream_ amx_model_load
#define model_amx_store_ amx_model_store
static inline void model_amx_dot_(int to, int left, int right) {
    amx_model_check(to, left, right);
    uint32_t(*sums)[16] = amx_model_tile(to);
    uint32_t(*a)[16] = amx_model_tile(left);
    uint32_t(*b)[16] = amx_model_tile(right);
    for (int m = 0; m < 16; m++) {
        float sum[2][16] = {{0}};
        for (int k = 0; k < 16; k++) {
            for (int n = 0; n < 32; n++) {
                float* half = &sum[n % 2][n / 2];
                *half = model_multiply_add_(*half, a[m][k], b[k][n / 2], n % 2);
            }
        }
        for (int n = 0; n < 16; n++) {
            const float product = model_flush_(sum[0][n] + sum[1][n]);
            const float old = model_flush_(float_of_bits(sums[m][n]));
            sums[m][n] = float_bits(model_flush_(old + product));
        }
    }
}
BF16_TILES_KERNEL(model_product_amx_, , model_amx_)

// All kernels that can be tested here: those that this machine runs, and the models. Says which are
// left out.
enum { MODEL_KERNELS = BF16_KERNELS + 2 };
static inline int model_kernels(Bf16Kernel kernels[MODEL_KERNELS]) {
    Bf16Kernel known[BF16_KERNELS];
    const int count = bf16_kernels(known);
    int n = 0;
    for (int k = 0; k < count; k++) {
        if (known[k].runs) {
            kernels[n++] = known[k];
        } else {
            printf("skipped: bf16: this machine has no %s\n", known[k].name);
        }
    }
    kernels[n++] =
        (Bf16Kernel){"modeled AVX-512 BF16", model_product_avx512_, bf16_nothing_,     bf16_nothing_, 1, 1,
                     bf16_vec_pack,          bf16_vec_pack,         bf16_vec_pack_tile};
    kernels[n++] = (Bf16Kernel){"modeled AMX", model_product_amx_, model_amx_begin_,  amx_model_end, 1, 1,
                                bf16_vec_pack, bf16_vec_pack,      bf16_vec_pack_tile};
    return n;
}

#endif
