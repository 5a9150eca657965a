/*
linear.cuh -- linear.h on the GPU: the layers that read a model's matrices (weight.h), floatX, or
with --quantize blocks of 8 bits.

    linear_forward             out  = inp weight^T + bias
    linear_forward_residual    out  = residual + inp weight^T + bias            out is not residual,
                                                                                which may be NULL
    linear_forward_gelu        pre  = inp weight^T + bias,  out = gelu(pre)
    linear_embedding           out  = wte[tokens[n]] + wpe[position of n]

    out, residual, pre, dout   (N, OC)      inp, dinp   (N, C)

With --matmul fp8, and only in micro-steps of training, those of qkv, fc and fcproj are multiplied
in fp8 (matmul_fp8.cuh) where autotune finds that faster, or does not look.

Few rows of input read blocks as they are; for more, a matrix is expanded to floatX before the
usual matmul. The backward pass is that of matmul.cuh.

linear_experts_* are the same for rows of experts, whose matrices follow w, that of expert 0
(expert_matmul.cuh). They read blocks of 8 bits an expert at a time.
*/
#ifndef LLMC_LINEAR_CUH
#define LLMC_LINEAR_CUH

#include "llmc/gpu/floatx.cuh"

#include "llmc/ops/embedding.cuh"
#include "llmc/ops/activation.cuh"
#include "llmc/ops/expert_matmul.cuh"
#include "llmc/model/model.h"
#include "llmc/ops/matmul.cuh"
#include "llmc/ops/matmul_fp8.cuh"
#include "llmc/ops/q8.cuh"
#include "llmc/layers/pass.h"
#include "llmc/layers/weight.h"

typedef struct {
    int is_quantized; // matrices are blocks
    floatX* expanded; // if they are: room for the largest matrix of a block
    int has_fp8;      // --matmul fp8
    int in_fp8;       // now: in passes of training
    MatmulFp8Factors fp8;
    MatmulGpu* matmul;
    const Gpu* gpu;
} LinearGpu;

// `matmul` and `gpu` stay the caller's.
static inline void linear_gpu_open(LinearGpu* linear, Memory* memory, ModelConfig cfg, int is_quantized,
                                   MatmulGpu* matmul, const Gpu* gpu) {
    linear->is_quantized = is_quantized;
    linear->expanded = NULL;
    linear->has_fp8 = linear->in_fp8 = 0;
    linear->matmul = matmul;
    linear->gpu = gpu;
    if (is_quantized) {
        linear->expanded = (floatX*)memory_take(memory, "expanded matrix", MEMORY_DEVICE,
                                                model_largest_matrix(cfg) * sizeof(floatX));
    }
}

// Opens matmuls in fp8 for inputs of up to N rows.
static inline void linear_gpu_open_fp8(LinearGpu* linear, Memory* memory, ModelConfig cfg, size_t N) {
    const size_t matrix = model_largest_matrix(cfg), C = (size_t)cfg.C, rows = matrix / C;
    linear->has_fp8 = 1;
    matmul_fp8_gpu_open(&linear->fp8, memory, N, rows > C ? rows : C, matrix);
}

// Say that the passes up to linear_trained are those of a micro-step of training.
static inline void linear_trains(LinearGpu* linear) { linear->in_fp8 = linear->has_fp8; }
static inline void linear_trained(LinearGpu* linear) { linear->in_fp8 = 0; }

// Returns the matrices of a slice of a layer, whose parameters are `p`. The sum of slices adds the
// biases into the stream (tensor_parallel.cuh).
static inline LayerWeights linear_weights(ModelConfig cfg, const ModelParameters* p) {
    const PackedParameters none = {};
    LayerWeights w = layer_weights(cfg, p, &none, &none);
    w.attproj.bias = model_is_sliced(cfg) ? NULL : w.attproj.bias;
    w.fcproj.bias = model_is_sliced(cfg) ? NULL : w.fcproj.bias;
    return w;
}

// Returns a matrix as the usual matmul reads it.
static inline const floatX* linear_expanded_(const Weight* w, LinearGpu* linear) {
    const size_t elements = (size_t)w->OC * w->C;
    if (!linear->is_quantized) {
        return w->data;
    }
    quantized_expand(linear->expanded, quantized_gpu_bind(w->data, elements), elements, linear->gpu);
    return linear->expanded;
}

// Returns true if a matmul of N rows of input reads blocks as they are.
static inline int linear_reads_blocks_(const LinearGpu* linear, int N) {
    return linear->is_quantized && N <= QUANTIZED_ROWS;
}

// Sets out = inp weight^T + bias, and adds `residual`, unless NULL, from blocks.
static inline void linear_forward_blocks_(floatX* out, const floatX* residual, const floatX* inp,
                                          const Weight* w, int N, LinearGpu* linear) {
    q8_matmul(out, residual, inp, quantized_gpu_bind(w->data, (size_t)w->OC * w->C), w->bias, N, w->C, w->OC,
              linear->gpu);
}

// ---- in fp8 ----

static inline int linear_is_in_fp8_(const LinearGpu* linear, const Weight* w) {
    return linear->in_fp8 && w->in_fp8;
}

// Sets out = residual + inp weight^T + bias; residual may be NULL.
static inline void linear_forward_fp8_(floatX* out, const floatX* residual, const floatX* inp,
                                       const Weight* w, int N, LinearGpu* linear) {
    const int C = w->C, OC = w->OC, adds = residual != NULL;
    MatmulGpu* matmul = linear->matmul;
    const auto in_fp8 = [&] {
        matmul_fp8_forward(out, residual, inp, w->data, w->bias, N, C, OC, &linear->fp8, matmul);
    };
    const auto without = [&] {
        if (residual) {
            matmul_forward_residual(out, residual, inp, w->data, w->bias, N, C, OC, matmul);
        } else {
            matmul_forward(out, inp, w->data, w->bias, N, C, OC, matmul);
        }
    };
    matmul_fp8_or<floatX>(N, OC, C, CUBLASLT_EPILOGUE_BIAS, adds, 1, matmul, in_fp8, without);
}

static inline void linear_forward_gelu_fp8_(floatX* out, floatX* pre, const floatX* inp, const Weight* w,
                                            int N, LinearGpu* linear) {
    const int C = w->C, OC = w->OC;
    const floatX* none = NULL;
    MatmulGpu* matmul = linear->matmul;
    const auto in_fp8 = [&] {
        matmul_fp8_forward(pre, none, inp, w->data, w->bias, N, C, OC, &linear->fp8, matmul);
        activation_forward(out, pre, N, OC, ACTIVATION_GELU, linear->gpu);
    };
    const auto without = [&] { matmul_forward_gelu(out, pre, inp, w->data, w->bias, N, C, OC, matmul); };
    matmul_fp8_or<floatX>(N, OC, C, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, 0, 1, matmul, in_fp8, without);
}

static inline void linear_backward_input_fp8_(floatX* dinp, const floatX* dout, const Weight* w, int N,
                                              LinearGpu* linear) {
    const int C = w->C, OC = w->OC;
    MatmulGpu* matmul = linear->matmul;
    const auto in_fp8 = [&] {
        matmul_fp8_backward_input(dinp, dout, w->data, N, C, OC, &linear->fp8, matmul);
    };
    const auto without = [&] { matmul_backward_input(dinp, dout, w->data, N, C, OC, matmul); };
    matmul_fp8_or<floatX>(N, C, OC, CUBLASLT_EPILOGUE_DEFAULT, 0, 1, matmul, in_fp8, without);
}

// A gradient of a bias that is added to cannot be computed repeatedly.
static inline void linear_backward_input_gelu_fp8_(floatX* dinp, Gradient dbias, const floatX* dout,
                                                   const Weight* w, const floatX* pre, int N,
                                                   GradientMode mode, LinearGpu* linear) {
    const int C = w->C, OC = w->OC, may_repeat = mode == GRADIENT_SET || !dbias.data;
    MatmulGpu* matmul = linear->matmul;
    const auto in_fp8 = [&] {
        matmul_fp8_backward_input(dinp, dout, w->data, N, C, OC, &linear->fp8, matmul);
        activation_backward(dinp, dinp, pre, N, C, ACTIVATION_GELU, linear->gpu);
        if (dbias.data) {
            matmul_backward_bias(dbias, (const floatX*)dinp, N, C, mode, matmul);
        }
    };
    const auto without = [&] {
        matmul_backward_input_gelu(dinp, dbias, dout, w->data, pre, N, C, OC, mode, matmul);
    };
    matmul_fp8_or<floatX>(N, C, OC, CUBLASLT_EPILOGUE_DGELU, 0, may_repeat, matmul, in_fp8, without);
}

// ---- the layers ----

static inline void linear_forward(floatX* out, const floatX* inp, const Weight* w, int N, LinearGpu* linear) {
    if (linear_is_in_fp8_(linear, w)) {
        linear_forward_fp8_(out, NULL, inp, w, N, linear);
    } else if (linear_reads_blocks_(linear, N)) {
        linear_forward_blocks_(out, NULL, inp, w, N, linear);
    } else {
        matmul_forward(out, inp, linear_expanded_(w, linear), w->bias, N, w->C, w->OC, linear->matmul);
    }
}

static inline void linear_forward_residual(floatX* out, const floatX* residual, const floatX* inp,
                                           const Weight* w, int N, LinearGpu* linear) {
    if (linear_is_in_fp8_(linear, w)) {
        linear_forward_fp8_(out, residual, inp, w, N, linear);
    } else if (linear_reads_blocks_(linear, N)) {
        linear_forward_blocks_(out, residual, inp, w, N, linear);
    } else if (!residual) {
        linear_forward(out, inp, w, N, linear);
    } else {
        matmul_forward_residual(out, residual, inp, linear_expanded_(w, linear), w->bias, N, w->C, w->OC,
                                linear->matmul);
    }
}

static inline void linear_forward_gelu(floatX* out, floatX* pre, const floatX* inp, const Weight* w, int N,
                                       LinearGpu* linear) {
    if (linear_is_in_fp8_(linear, w)) {
        linear_forward_gelu_fp8_(out, pre, inp, w, N, linear);
    } else if (linear->is_quantized) {
        linear_forward(pre, inp, w, N, linear);
        activation_forward(out, pre, N, w->OC, ACTIVATION_GELU, linear->gpu);
    } else {
        matmul_forward_gelu(out, pre, inp, w->data, w->bias, N, w->C, w->OC, linear->matmul);
    }
}

// Sets or adds to dweight (OC, C), unless it has no data.
static inline void linear_backward_weight(Gradient dweight, const floatX* dout, const floatX* inp,
                                          const Weight* w, int N, GradientMode mode, LinearGpu* linear) {
    if (dweight.data) {
        matmul_backward_weight(dweight, dout, inp, N, w->C, w->OC, mode, linear->matmul);
    }
}

// Sets dinp (N, C).
static inline void linear_backward_input(floatX* dinp, const floatX* dout, const Weight* w, int N,
                                         LinearGpu* linear) {
    if (linear_is_in_fp8_(linear, w)) {
        linear_backward_input_fp8_(dinp, dout, w, N, linear);
    } else {
        matmul_backward_input(dinp, dout, w->data, N, w->C, w->OC, linear->matmul);
    }
}

// Sets dinp to the gradient before GELU, and sets or adds to dbias, as matmul_backward_input_gelu.
static inline void linear_backward_input_gelu(floatX* dinp, Gradient dbias, const floatX* dout,
                                              const Weight* w, const floatX* pre, int N, GradientMode mode,
                                              LinearGpu* linear) {
    if (linear_is_in_fp8_(linear, w)) {
        linear_backward_input_gelu_fp8_(dinp, dbias, dout, w, pre, N, mode, linear);
    } else {
        matmul_backward_input_gelu(dinp, dbias, dout, w->data, pre, N, w->C, w->OC, mode, linear->matmul);
    }
}

// Sets dinp (N, C), and sets or adds to dweight. The gradient of the bias is summed where dout is
// made.
static inline void linear_backward(floatX* dinp, Gradient dweight, const floatX* dout, const floatX* inp,
                                   const Weight* w, int N, GradientMode mode, LinearGpu* linear) {
    linear_backward_weight(dweight, dout, inp, w, N, mode, linear);
    linear_backward_input(dinp, dout, w, N, linear);
}

// Sets out from blocks: the matrix of one expert after the other is expanded, of E in all.
static inline void linear_experts_forward_blocks_(floatX* out, const floatX* inp, const Weight* w,
                                                  const ExpertRows* rows, LinearGpu* linear) {
    const size_t elements = (size_t)w->OC * w->C;
    const QuantizedGpu all = quantized_gpu_bind(w->data, (size_t)rows->E * elements);
    for (int e = 0; e < rows->E; e++) {
        const QuantizedGpu expert = {all.q + e * elements, all.scales + e * elements / QUANTIZED_BLOCK};
        const ExpertRows own = {rows->first + e, 1, rows->rows, rows->all, rows->by};
        quantized_expand(linear->expanded, expert, elements, linear->gpu);
        expert_matmul_forward(out, inp, (const floatX*)linear->expanded, &own, w->C, w->OC, linear->gpu);
    }
}

static inline void linear_experts_forward(floatX* out, const floatX* inp, const Weight* w,
                                          const ExpertRows* rows, LinearGpu* linear) {
    if (linear->is_quantized) {
        linear_experts_forward_blocks_(out, inp, w, rows, linear);
    } else {
        expert_matmul_forward(out, inp, w->data, rows, w->C, w->OC, linear->gpu);
    }
}

// Sets or adds to the gradients of all experts' matrices, unless dweight has no data.
static inline void linear_experts_backward_weight(Gradient dweight, const floatX* dout, const floatX* inp,
                                                  const Weight* w, const ExpertRows* rows, GradientMode mode,
                                                  LinearGpu* linear) {
    if (dweight.data) {
        expert_matmul_backward_weight(dweight, dout, inp, rows, w->C, w->OC, mode, linear->gpu);
    }
}

// Sets out (N, C) from the embeddings of tokens and of positions.
static inline void linear_embedding(floatX* out, const Pass* pass, const Weight* wte, const floatX* wpe,
                                    LinearGpu* linear) {
    const int B = pass->B, T = pass->T, C = wte->C;
    if (linear->is_quantized) {
        const QuantizedGpu blocks = quantized_gpu_bind(wte->data, (size_t)wte->OC * C);
        q8_embedding(out, pass->inputs, blocks, wpe, B, T, pass->positions, C, linear->gpu);
    } else {
        embedding_forward(out, pass->inputs, wte->data, wpe, B, T, pass->positions, C, linear->gpu);
    }
}

// Sets out (N, C) from the embeddings of tokens among the words of a slice, which start at word
// `first`; the others get zeros.
static inline void linear_embedding_words(floatX* out, const Pass* pass, const Weight* wte, int first,
                                          LinearGpu* linear) {
    const EmbeddingWords words = {first, wte->OC};
    const int N = pass_tokens(pass), C = wte->C;
    if (linear->is_quantized) {
        const QuantizedGpu blocks = quantized_gpu_bind(wte->data, (size_t)wte->OC * C);
        q8_embedding_words(out, pass->inputs, blocks, words, N, C, linear->gpu);
    } else {
        embedding_words(out, pass->inputs, wte->data, words, N, C, linear->gpu);
    }
}

#endif
