/*
linear.h -- the layers that read a model's matrices, which are floats, or with --quantize blocks of 8 bits, on the CPU.

    out[n][o]  = sum_c inp[n][c] weight[o][c] + bias[o]
    encoded[n] = wte[tokens[n]] + wpe[position of n]

    out      (N, OC)     inp      (N, C)     weight   (OC, C)     bias   (OC), may be NULL
    encoded  (B*T, C)    tokens   (B*T)      wte      (Vp, C)     wpe    (maxT, C)

They set their output. Pointers to matrices in 8 bits are those of GPT2Parameters (quantized_model.h).

defines: Linear, linear_scratch_bytes, linear_open, linear_close, linear_forward_cpu, linear_encoder_cpu
*/
#ifndef LLMC_LINEAR_H
#define LLMC_LINEAR_H

#include "llmc/encoder.h"
#include "llmc/gpt2.h"
#include "llmc/matmul.h"
#include "llmc/quantized.h"
#include "llmc/quantized_model.h"

typedef struct {
    int is_quantized; // matrices are blocks
    MatmulScratch matmul;
    QuantizedScratch quantized; // if they are
} Linear;

// What linear_open allocates.
static inline size_t linear_scratch_bytes(int is_quantized, size_t N, size_t C) {
    return matmul_scratch_bytes() + (is_quantized ? quantized_rows_bytes(N, C) : 0);
}

// For inputs of up to N rows and C columns.
static inline void linear_open(Linear* linear, int is_quantized, size_t N, size_t C) {
    linear->is_quantized = is_quantized;
    matmul_open(&linear->matmul);
    if (is_quantized) {
        quantized_open(&linear->quantized, N, C);
    }
}

static inline void linear_close(Linear* linear) {
    if (linear->is_quantized) {
        quantized_close(&linear->quantized);
    }
    matmul_close(&linear->matmul);
}

static inline void linear_forward_cpu(float* out, const float* inp, const float* weight, const float* bias,
                                      int N, int C, int OC, Linear* linear) {
    if (linear->is_quantized) {
        const QuantizedBlock* blocks = (const QuantizedBlock*)(const void*)weight;
        quantized_matmul_cpu(out, inp, blocks, bias, N, C, OC, &linear->quantized);
    } else {
        matmul_forward_cpu(out, inp, weight, bias, N, C, OC, &linear->matmul);
    }
}

static inline void linear_encoder_cpu(float* encoded, const int* tokens, GPT2Parameters params, int B, int T,
                                      EncoderPositions positions, int C, const Linear* linear) {
    if (linear->is_quantized) {
        const QuantizedBlock* blocks = (const QuantizedBlock*)(const void*)params.wte;
        quantized_encoder_cpu(encoded, tokens, blocks, params.wpe, B, T, positions, C);
    } else {
        encoder_forward_cpu(encoded, tokens, params.wte, params.wpe, B, T, positions, C);
    }
}

#endif
