/*
linear.h -- the layers that read a model's matrices, on the CPU: floats, or with --quantize blocks of 8 bits; with
--matmul bf16 the copies that bf16_weights.h keeps.

    out[n][o]  = sum_c inp[n][c] weight[o][c] + bias[o]
    encoded[n] = wte[tokens[n]] + wpe[position of n]

    out      (N, OC)     inp      (N, C)     weight   (OC, C)     bias   (OC), may be NULL
    encoded  (B*T, C)    tokens   (B*T)      wte      (Vp, C)     wpe    (maxT, C)

They set their output. Pointers to matrices in 8 bits are those of ModelParameters (q8_weights.h). A matrix with a
copy is named by its place in fp32; after a change linear_pack makes the copies anew. linear_few_cpu is linear_forward_cpu
for the few rows of a step of generation. The backward pass is that of matmul.h.
*/
#ifndef LLMC_LINEAR_H
#define LLMC_LINEAR_H

#include "llmc/base/memory.h"
#include "llmc/base/enum_words.h"
#include "llmc/ops/embedding.h"
#include "llmc/model/model.h"
#include "llmc/ops/gradient.h"
#include "llmc/ops/matmul.h"
#include "llmc/bf16/matmul_bf16.h"
#include "llmc/bf16/matvec.h"
#include "llmc/layers/bf16_weights.h"
#include "llmc/ops/q8.h"
#include "llmc/layers/q8_weights.h"

// --matmul
// clang-format off
#define MATMUL_WORDS(X) X(MATMUL_FP32, "fp32") X(MATMUL_BF16, "bf16") X(MATMUL_AUTO, "auto")
// clang-format on
typedef enum { MATMUL_WORDS(WORDS_VALUE) } MatmulPrecision;

typedef struct {
    int is_quantized; // matrices are blocks
    int is_bf16;      // matmuls read copies of matrices
    MatmulScratch matmul;
    QuantizedScratch quantized; // if they are
    MatmulBf16Scratch bf16;     // if they do
    Bf16Weights packed;
} Linear;

// For inputs of up to N rows and C columns.
static inline void linear_open(Linear* linear, Memory* memory, int is_quantized, size_t N, size_t C) {
    linear->is_quantized = is_quantized;
    linear->is_bf16 = 0;
    matmul_open(&linear->matmul, memory);
    if (is_quantized) {
        quantized_open(&linear->quantized, memory, N, C);
    }
}

// Matmuls in bf16, of matrices in fp32 that are laid out by `rows`; `kinds` of copies as bf16_weights.h says.
static inline void linear_open_bf16(Linear* linear, Memory* memory, const TensorRow* rows, void* params,
                                    int kinds) {
    linear->is_bf16 = 1;
    matmul_bf16_open(&linear->bf16, memory, bf16_kernel());
    bf16_weights_open(&linear->packed, memory, rows, params, kinds, linear->bf16.kernel.pack_away);
}

// After every change of the matrices.
static inline void linear_pack(Linear* linear) {
    if (linear->is_bf16) {
        bf16_weights_pack(&linear->packed);
    }
}

// Whether a parameter has copies, by its row in the table.
static inline int linear_packs(const Linear* linear, int row) {
    return linear->is_bf16 && quantized_is_matrix(&linear->packed.rows[row]);
}

// The copy of a matrix for matmuls in bf16, or NULL.
static inline const uint32_t* linear_packed(const Linear* linear, const float* weight, PackedFor kind) {
    return (int)kind < linear->packed.kinds ? bf16_weights_find(&linear->packed, weight, kind) : NULL;
}

static inline void linear_forward_cpu(float* out, const float* inp, const float* weight, const float* bias,
                                      int N, int C, int OC, Linear* linear) {
    if (linear->is_quantized) {
        const QuantizedBlock* blocks = (const QuantizedBlock*)(const void*)weight;
        q8_matmul_cpu(out, inp, blocks, bias, N, C, OC, &linear->quantized);
    } else if (linear->is_bf16) {
        const uint32_t* packed = linear_packed(linear, weight, PACKED_FORWARD);
        matmul_bf16_forward_cpu(out, inp, packed, bias, N, C, OC, &linear->bf16);
    } else {
        matmul_forward_cpu(out, inp, weight, bias, N, C, OC, &linear->matmul);
    }
}

static inline void linear_few_cpu(float* out, const float* inp, const float* weight, const float* bias, int N,
                                  int C, int OC, Linear* linear) {
    if (linear->is_quantized) {
        linear_forward_cpu(out, inp, weight, bias, N, C, OC, linear);
    } else if (linear->is_bf16) {
        const uint32_t* packed = linear_packed(linear, weight, PACKED_FORWARD);
        matvec_bf16_forward_cpu(out, inp, packed, bias, N, C, OC);
    } else {
        matvec_forward_cpu(out, inp, weight, bias, N, C, OC);
    }
}

// Sets dinp (N, C).
static inline void linear_backward_input_cpu(float* dinp, const float* dout, const float* weight, int N,
                                             int C, int OC, Linear* linear) {
    if (linear->is_bf16) {
        const uint32_t* packed = linear_packed(linear, weight, PACKED_BACKWARD);
        matmul_bf16_backward_input_cpu(dinp, dout, packed, N, C, OC, &linear->bf16);
    } else {
        matmul_backward_input_cpu(dinp, dout, weight, N, C, OC, &linear->matmul);
    }
}

// Sets or adds to dweight (OC, C) and dbias (OC), each or NULL, as `mode` says.
static inline void linear_backward_weight_cpu(float* dweight, float* dbias, const float* dout,
                                              const float* inp, int N, int C, int OC, GradientMode mode,
                                              Linear* linear) {
    if (dweight && linear->is_bf16) { // reads dout once for both
        matmul_bf16_backward_weight_cpu(dweight, dbias, dout, inp, N, C, OC, mode, &linear->bf16);
        return;
    }
    if (dweight) {
        matmul_backward_weight_cpu(dweight, dout, inp, N, C, OC, mode, &linear->matmul);
    }
    if (dbias) {
        matmul_backward_bias_cpu(dbias, dout, N, OC, mode);
    }
}

static inline void linear_embedding_cpu(float* encoded, const int* tokens, ModelParameters params, int B,
                                        int T, EmbeddingPositions positions, int C, const Linear* linear) {
    if (linear->is_quantized) {
        const QuantizedBlock* blocks = (const QuantizedBlock*)(const void*)params.wte;
        q8_embedding_cpu(encoded, tokens, blocks, params.wpe, B, T, positions, C);
    } else {
        embedding_forward_cpu(encoded, tokens, params.wte, params.wpe, B, T, positions, C);
    }
}

#endif
