/*
linear.cuh -- linear.h on the GPU: the layers that read a model's matrices, floatX, or with --quantize blocks of 8 bits.

    linear_forward               out  = inp weight^T + bias
    linear_forward_residual      out  = residual + inp weight^T + bias            out is not residual
    linear_forward_gelu          pre  = inp weight^T + bias,  out = gelu(pre)
    linear_logits                out  = inp wte^T
    linear_embedding               out  = wte[tokens[n]] + wpe[position of n]

Arguments are those of matmul.cuh and embedding.cuh. Pointers to matrices in 8 bits are those of ModelParameters. Few rows of
input read blocks as they are; for more, a matrix is expanded to floatX before the usual product. The backward pass is that
of matmul.cuh.
*/
#ifndef LLMC_LINEAR_CUH
#define LLMC_LINEAR_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/ops/embedding.cuh"
#include "llmc/ops/activation.cuh"
#include "llmc/model/model.h"
#include "llmc/ops/matmul.cuh"
#include "llmc/ops/q8.cuh"

typedef struct {
    ModelConfig cfg;
    int is_quantized; // matrices are blocks
    floatX* expanded; // if they are: room for one
    MatmulGpu* matmul;
    const Gpu* gpu;
} LinearGpu;

// What linear_gpu_open allocates: room for the largest matrix of a block.
static inline size_t linear_planned_bytes(ModelConfig cfg, int is_quantized) {
    return is_quantized ? (size_t)model_hidden(cfg) * cfg.C * sizeof(floatX) : 0;
}

// `matmul` and `gpu` stay the caller's.
static inline void linear_gpu_open(LinearGpu* linear, ModelConfig cfg, int is_quantized, MatmulGpu* matmul,
                                   const Gpu* gpu) {
    linear->cfg = cfg;
    linear->is_quantized = is_quantized;
    linear->expanded = NULL;
    linear->matmul = matmul;
    linear->gpu = gpu;
    if (is_quantized) {
        linear->expanded = (floatX*)gpu_alloc(linear_planned_bytes(cfg, is_quantized), 1, "expanded matrix");
    }
}

static inline void linear_gpu_close(LinearGpu* linear) { gpu_free(linear->expanded); }

// A matrix as the usual product reads it.
static inline const floatX* linear_expanded_(const floatX* weight, size_t elements, LinearGpu* linear) {
    if (!linear->is_quantized) {
        return weight;
    }
    quantized_expand(linear->expanded, quantized_gpu_bind(weight, elements), elements, linear->gpu);
    return linear->expanded;
}

// Whether a product of N rows of input reads blocks as they are.
static inline int linear_reads_blocks_(const LinearGpu* linear, int N) {
    return linear->is_quantized && N <= QUANTIZED_ROWS;
}

static inline void linear_forward(floatX* out, const floatX* inp, const floatX* weight, const floatX* bias,
                                  int N, int C, int OC, LinearGpu* linear) {
    const size_t elements = (size_t)OC * C;
    if (linear_reads_blocks_(linear, N)) {
        q8_matmul(out, (const floatX*)NULL, inp, quantized_gpu_bind(weight, elements), bias, N, C, OC,
                  linear->gpu);
    } else {
        matmul_forward(out, inp, linear_expanded_(weight, elements, linear), bias, N, C, OC, linear->matmul);
    }
}

static inline void linear_forward_residual(floatX* out, const floatX* residual, const floatX* inp,
                                           const floatX* weight, const floatX* bias, int N, int C, int OC,
                                           LinearGpu* linear) {
    const size_t elements = (size_t)OC * C;
    if (linear_reads_blocks_(linear, N)) {
        q8_matmul(out, residual, inp, quantized_gpu_bind(weight, elements), bias, N, C, OC, linear->gpu);
    } else {
        matmul_forward_residual(out, residual, inp, linear_expanded_(weight, elements, linear), bias, N, C,
                                OC, linear->matmul);
    }
}

static inline void linear_forward_gelu(floatX* out, floatX* pre, const floatX* inp, const floatX* weight,
                                       const floatX* bias, int N, int C, int OC, LinearGpu* linear) {
    if (linear->is_quantized) {
        linear_forward(pre, inp, weight, bias, N, C, OC, linear);
        gelu_forward(out, pre, (size_t)N * OC, linear->gpu);
    } else {
        matmul_forward_gelu(out, pre, inp, weight, bias, N, C, OC, linear->matmul);
    }
}

// Sets out (count, Vp). Blocks of wte are never expanded: it is larger than what is to be saved.
static inline void linear_logits(floatX* out, const floatX* inp, const floatX* wte, int count,
                                 LinearGpu* linear) {
    const int C = linear->cfg.C, Vp = linear->cfg.Vp, most = linear->is_quantized ? QUANTIZED_ROWS : count;
    for (int n = 0; n < count; n += most) {
        const int rows = count - n < most ? count - n : most;
        linear_forward(out + (size_t)n * Vp, inp + (size_t)n * C, wte, NULL, rows, C, Vp, linear);
    }
}

// Sets out (B, T, C).
static inline void linear_embedding(floatX* out, const int* tokens, ModelParameters params, int B, int T,
                                    EmbeddingPositions positions, LinearGpu* linear) {
    const int C = linear->cfg.C;
    if (linear->is_quantized) {
        const QuantizedGpu wte = quantized_gpu_bind(params.wte, (size_t)linear->cfg.Vp * C);
        q8_embedding(out, tokens, wte, params.wpe, B, T, positions, C, linear->gpu);
    } else {
        embedding_forward(out, tokens, params.wte, params.wpe, B, T, positions, C, linear->gpu);
    }
}

#endif
