/*
linear.cuh -- linear.h on the GPU: the layers that read a model's matrices (weight.h), floatX, or
with --quantize blocks of 8 bits.

    linear_forward             out  = inp weight^T + bias
    linear_forward_residual    out  = residual + inp weight^T + bias            out is not residual,
                                                                                which may be NULL
    linear_forward_gelu        pre  = inp weight^T + bias,  out = gelu(pre)
    linear_embedding           out  = wte[tokens[n]] + wpe[position of n]

    out, residual, pre, dout   (N, OC)      inp, dinp   (N, C)

With --matmul fp8, and only in micro-steps of training, qkv, fc and fcproj are multiplied in fp8
(matmul_fp8.cuh) where autotune finds that faster, or does not measure it. Weights are quantized
once per step, in its first forward pass, unless ZeRO or offloading keeps only some of them here.

    linear_norm_forward, linear_activation_*      norm_forward, activation_*, whose result the
                                                  matmul of `reader` reads next

If that matmul is in fp8, their kernels also make the codes; so does the GELU that follows a matmul
in fp8, and a norm's backward pass, into linear_codes_below. For inputs from elsewhere, such as
dqkv, a separate kernel makes them.

Few rows of input read blocks as they are; for more, a matrix is expanded to floatX before the
usual matmul, in the backward pass, too.

linear_experts_* do the same for rows of experts (expert_matmul.cuh): w is the matrix of expert 0,
and the others follow it. They read blocks of 8 bits one expert at a time.
*/
#ifndef LLMC_LINEAR_CUH
#define LLMC_LINEAR_CUH

#include <string.h>

#include "llmc/gpu/floatx.cuh"

#include "llmc/ops/embedding.cuh"
#include "llmc/ops/activation.cuh"
#include "llmc/ops/adapter.cuh"
#include "llmc/ops/dropout.cuh"
#include "llmc/ops/expert_matmul.cuh"
#include "llmc/model/model.h"
#include "llmc/ops/matmul.cuh"
#include "llmc/ops/matmul_fp8.cuh"
#include "llmc/ops/norm_backward.cuh"
#include "llmc/ops/q8.cuh"
#include "llmc/layers/pass.h"
#include "llmc/layers/weight.h"
#include "llmc/parallel/tensor_parallel.cuh"
#include "llmc/parallel/zero.cuh"

// A parameter's gradient, without data if it is frozen, and whether it is set or added to.
typedef struct {
    Gradient to;
    GradientMode mode;
} LinearGradient;

// Room for the codes of an input, and the tensor whose codes they are, for the matmul that reads it
// next; NULL: none.
typedef struct {
    E4m3Rows rows;
    const floatX* of;
} LinearCodes;

typedef struct {
    int is_quantized;           // matrices are blocks
    floatX* expanded;           // if they are: room for the largest matrix of a block
    int has_fp8;                // --matmul fp8
    int in_fp8;                 // now: in passes of training
    int renews;                 // forward passes quantize the weights, which are new
    LinearCodes stream, hidden; // of inputs that norms make, (N, C), and of others
    E4m3Rows matrix;            // codes for one matmul, if none are kept for a step
    uint32_t* largest;          // magnitudes of the columns of a matrix
    char* weights;              // codes of all blocks' matrices, or NULL
    size_t weights_bytes;       // of a block
    MatmulGpu* matmul;
    const Gpu* gpu;
    AdapterScratchGpu<floatX> adapter; // if the model has one
    DType gradients;                   // of the adapter's factors
} LinearGpu;

// A layer in a pass: its sizes, parameters, activations and matrices.
typedef struct {
    ModelConfig cfg; // of the part that this rank has
    int l;
    const Pass* pass;
    ModelParameters p;
    ModelActivations a;
    LayerWeights weights;
    TensorParallelGpu tensor;
    LinearGpu* linear;
} LayerPassGpu;

// Return the depth of the layer in the whole model; and the dropout of a tensor of the stream.
static inline int layer_depth(const LayerPassGpu* layer) { return layer->cfg.part.first_layer + layer->l; }
static inline Dropout layer_dropout(const LayerPassGpu* layer, uint32_t place) {
    return pass_dropout(layer->pass, layer->cfg.dropout, place, tensor_rows(layer->tensor.cut).first);
}

// Returns a norm of the layer's residual stream, of the R rows that this rank has.
static inline NormGpu<floatX> layer_norm(const LayerPassGpu* layer, const floatX* weight, const floatX* bias,
                                         float* mean, float* rstd) {
    const ModelConfig cfg = layer->cfg;
    return {model_norm(cfg),
            model_norm_eps(cfg),
            1,
            weight,
            bias,
            mean,
            rstd,
            tensor_rows(layer->tensor.cut).count,
            cfg.C,
            {}};
}

// Returns the norm before the classifier, given any layer in the pass. It also divides the logits.
static inline NormGpu<floatX> layer_last_norm(const LayerPassGpu* layer) {
    const ModelActivations* a = &layer->a;
    NormGpu<floatX> norm = layer_norm(layer, layer->p.lnfw, layer->p.lnfb, a->lnf_mean, a->lnf_rstd);
    norm.factor = model_logits_factor(layer->cfg);
    return norm;
}

// `matmul` and `gpu` stay the caller's.
static inline void linear_gpu_open(LinearGpu* linear, Memory* memory, ModelConfig cfg, int is_quantized,
                                   MatmulGpu* matmul, const Gpu* gpu) {
    memset((void*)linear, 0, sizeof(*linear));
    linear->is_quantized = is_quantized;
    linear->matmul = matmul;
    linear->gpu = gpu;
    if (is_quantized) { // an adapter trains through the classifier, too
        const size_t block = model_largest_matrix(cfg), head = (size_t)cfg.Vp * (size_t)cfg.C,
                     most = model_has_adapter(cfg) && head > block ? head : block;
        linear->expanded =
            (floatX*)memory_take(memory, "expanded matrix", MEMORY_DEVICE, most * sizeof(floatX));
    }
}

// Opens the products of the model's adapter, if it has one, for inputs of up to N rows; its
// gradients have the type `gradients`.
static inline void linear_gpu_open_adapter(LinearGpu* linear, Memory* memory, ModelConfig cfg, size_t N,
                                           DType gradients) {
    const size_t most = model_adapter_rows(cfg);
    linear->gradients = gradients;
    if (most > 0) {
        adapter_gpu_open(&linear->adapter, memory, linear->matmul, N, most, model_adapter_widest(cfg));
    }
}

// Lists the matrices of a block that are multiplied in fp8. Returns their number.
enum { LINEAR_IN_FP8_ = 5 };
static inline int linear_in_fp8_(Weight** list, LayerWeights* w) {
    Weight* const all[LINEAR_IN_FP8_] = {&w->qkv, &w->fc, &w->fcproj, &w->shared_fc, &w->shared_fcproj};
    int count = 0;
    for (Weight* weight : all) {
        if (weight->in_fp8 && weight->OC > 0 && weight->C > 0) {
            list[count++] = weight;
        }
    }
    return count;
}

// Gives each matrix of a block in fp8 its codes at `at`, unless that is NULL. Returns the bytes of
// all.
static inline size_t linear_cut_codes_(LayerWeights* w, char* at) {
    Weight* list[LINEAR_IN_FP8_];
    const int count = linear_in_fp8_(list, w);
    size_t bytes = 0;
    for (int i = 0; i < count; i++) {
        const size_t OC = (size_t)list[i]->OC, C = (size_t)list[i]->C;
        list[i]->fp8.rows = matmul_fp8_cut(&at, OC, C);
        list[i]->fp8.turned = matmul_fp8_cut(&at, C, OC);
        bytes += matmul_fp8_bytes(OC, C) + matmul_fp8_bytes(C, OC);
    }
    return bytes;
}

// Opens matmuls in fp8 for inputs of up to N rows. `keeps_weights`: all weights stay here until the
// next update, so several micro-steps can read their codes.
static inline void linear_gpu_open_fp8(LinearGpu* linear, Memory* memory, ModelConfig cfg, size_t N,
                                       int keeps_weights) {
    const ModelParameters none = {};
    const PackedParameters unpacked = {};
    const size_t C = (size_t)cfg.C, rows = model_largest_matrix(cfg) / C, widest = rows > C ? rows : C,
                 matrix = keeps_weights ? 0 : matmul_fp8_bytes(widest, C);
    char* at = (char*)memory_take(memory, "factors in fp8", MEMORY_DEVICE,
                                  matmul_fp8_bytes(N, C) + matmul_fp8_bytes(N, widest) + matrix +
                                      widest * sizeof(uint32_t));
    linear->has_fp8 = 1;
    linear->stream.rows = matmul_fp8_cut(&at, N, C);
    linear->hidden.rows = matmul_fp8_cut(&at, N, widest);
    for (int l = 0; l < cfg.L; l++) {
        const int has_experts = model_layer_has(cfg, LAYERS_EXPERTS, l);
        LayerWeights sizes = layer_weights(cfg, has_experts, &none, &unpacked, &unpacked);
        const size_t bytes = linear_cut_codes_(&sizes, NULL);
        linear->weights_bytes = bytes > linear->weights_bytes ? bytes : linear->weights_bytes;
    }
    if (keeps_weights) {
        linear->weights = (char*)memory_take(memory, "weights in fp8", MEMORY_DEVICE,
                                             (size_t)model_copies(cfg) * linear->weights_bytes);
    } else {
        linear->matrix = matmul_fp8_cut(&at, widest, C); // or (C, widest): a scale for each row
    }
    linear->largest = (uint32_t*)(void*)at;
}

// Say that the passes up to linear_trained belong to a micro-step of training, and that weights
// have changed before.
static inline void linear_trains(LinearGpu* linear) {
    linear->in_fp8 = linear->has_fp8;
    linear->stream.of = linear->hidden.of = NULL;
}
static inline void linear_trained(LinearGpu* linear) { linear->in_fp8 = linear->renews = 0; }

// Names the codes of the matrices of block k of this process.
static inline void linear_bind_codes(LayerWeights* w, const LinearGpu* linear, int k) {
    if (linear->weights) {
        linear_cut_codes_(w, linear->weights + (size_t)k * linear->weights_bytes);
    }
}

// Quantizes the matrices of a block, if they are new and have codes.
static inline void linear_renew(LayerWeights* w, const LinearGpu* linear) {
    Weight* list[LINEAR_IN_FP8_];
    const int count = linear->renews && linear->weights ? linear_in_fp8_(list, w) : 0;
    for (int i = 0; i < count; i++) {
        const int OC = list[i]->OC, C = list[i]->C;
        if (!list[i]->data) {
            continue; // of attention, in a layer with a mixer
        }
        e4m3_rows(list[i]->fp8.rows, list[i]->data, OC, C, linear->gpu);
        matmul_fp8_turned(list[i]->fp8.turned, linear->largest, list[i]->data, OC, C, linear->gpu);
    }
}

// Returns the matrices of layer l, whose parameters are `p`. If several ranks cut them, the sum of
// their parts adds the biases into the stream (tensor_parallel.cuh).
static inline LayerWeights linear_weights(ModelConfig cfg, const ModelParameters* p, int l) {
    const PackedParameters none = {};
    LayerWeights w = layer_weights(cfg, model_layer_has(cfg, LAYERS_EXPERTS, l), p, &none, &none);
    w.attproj.bias = model_is_cut(cfg) ? NULL : w.attproj.bias;
    w.fcproj.bias = model_is_cut(cfg) ? NULL : w.fcproj.bias;
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
    q8_matmul(out, residual, inp, quantized_gpu_bind(w->data, (size_t)w->OC * w->C), w->bias,
              {N, w->C, w->OC}, linear->gpu);
}

// ---- in fp8: factors ----

static inline int linear_is_in_fp8_(const LinearGpu* linear, const Weight* w) {
    return linear->in_fp8 && w->in_fp8;
}

// Returns an input (N, cols) in E4M3: its codes, if its kernel has made them.
static inline E4m3Rows linear_input_fp8_(LinearGpu* linear, const floatX* x, int N, int cols) {
    LinearCodes* hidden = &linear->hidden;
    if (linear->stream.of == x) {
        return linear->stream.rows;
    }
    if (hidden->of != x) {
        hidden->of = NULL;
        e4m3_rows(hidden->rows, x, N, cols, linear->gpu);
    }
    return hidden->rows;
}

// Return a matrix, or its transpose, in E4M3.
static inline E4m3Rows linear_weight_fp8_(LinearGpu* linear, const Weight* w) {
    if (!w->fp8.rows.codes) {
        e4m3_rows(linear->matrix, w->data, w->OC, w->C, linear->gpu);
    }
    return w->fp8.rows.codes ? w->fp8.rows : linear->matrix;
}
static inline E4m3Rows linear_turned_fp8_(LinearGpu* linear, const Weight* w) {
    if (!w->fp8.turned.codes) {
        matmul_fp8_turned(linear->matrix, linear->largest, w->data, w->OC, w->C, linear->gpu);
    }
    return w->fp8.turned.codes ? w->fp8.turned : linear->matrix;
}

// Forgets the codes of a matmul's input, and of the output that it overwrites.
static inline void linear_used_(LinearGpu* linear, const floatX* inp, const floatX* out) {
    LinearCodes* const all[] = {&linear->stream, &linear->hidden};
    for (LinearCodes* codes : all) {
        codes->of = codes->of == inp || codes->of == out ? NULL : codes->of;
    }
}

// Returns where to put the codes of x, which is about to be set, if a matmul in fp8 reads them
// next; else none.
static inline E4m3Rows linear_codes_for_(LinearGpu* linear, LinearCodes* codes, const floatX* x,
                                         int is_read) {
    const E4m3Rows none = {NULL, NULL};
    linear_used_(linear, x, x); // older ones
    codes->of = is_read ? x : codes->of;
    return is_read ? codes->rows : none;
}
static inline int linear_may_read_(const LinearGpu* linear, const Weight* reader, int N) {
    return linear_is_in_fp8_(linear, reader) &&
           matmul_fp8_may_win<floatX>({N, reader->C, reader->OC}, 1, linear->matmul);
}
static inline int linear_may_read_back_(const LinearGpu* linear, const Weight* reader, int N) {
    return linear_is_in_fp8_(linear, reader) &&
           matmul_fp8_may_win<floatX>({N, reader->OC, reader->C}, 0, linear->matmul);
}

// Sets out, which the matmul of `reader` reads next, on N rows; other ranks may have some of these.
static inline void linear_norm_forward(floatX* out, const floatX* inp, const NormGpu<floatX>* norm,
                                       const Weight* reader, int N, LinearGpu* linear) {
    const int is_read = norm->N == N && linear_may_read_(linear, reader, N);
    NormGpu<floatX> with_codes = *norm;
    with_codes.codes = linear_codes_for_(linear, &linear->stream, out, is_read);
    norm_forward(out, inp, &with_codes, linear->gpu);
}

// Returns where to put the codes of dstream (rows, C), which the gradient of the input of `reader`
// reads next, on N rows; none if they are not read.
static inline E4m3Rows linear_codes_below(const floatX* dstream, int rows, const Weight* reader, int N,
                                          LinearGpu* linear) {
    return linear_codes_for_(linear, &linear->stream, dstream,
                             rows == N && linear_may_read_back_(linear, reader, N));
}

// Sets act (N, F), which the matmul of `reader` reads next.
static inline void linear_activation_forward(floatX* act, const floatX* pre, const Weight* reader, int N,
                                             ActivationKind kind, LinearGpu* linear) {
    const E4m3Rows codes =
        linear_codes_for_(linear, &linear->hidden, act, linear_may_read_(linear, reader, N));
    if (codes.codes) {
        activation_forward_codes(codes, act, pre, N, reader->C, kind, linear->gpu);
    } else {
        activation_forward(act, pre, N, reader->C, kind, linear->gpu);
    }
}

// Sets dpre (N, gates F). The gradient of the input of `reader` is computed from it next.
static inline void linear_activation_backward(floatX* dpre, const floatX* dact, const floatX* pre,
                                              const Weight* reader, int N, ActivationKind kind,
                                              LinearGpu* linear) {
    const size_t F = (size_t)(reader->OC / activation_gates(kind));
    const E4m3Rows codes =
        linear_codes_for_(linear, &linear->hidden, dpre, linear_may_read_back_(linear, reader, N));
    if (codes.codes) {
        activation_backward_codes(codes, dpre, dact, pre, N, F, kind, linear->gpu);
    } else {
        activation_backward(dpre, dact, pre, N, F, kind, linear->gpu);
    }
}

// Returns the sizes of the matrix that reads GELU's result, or computes its input: in an MLP, the
// sizes of `w` the other way round.
static inline Weight linear_mirrored_(const Weight* w) {
    Weight mirrored = *w;
    mirrored.OC = w->C;
    mirrored.C = w->OC;
    return mirrored;
}

// ---- in fp8: layers ----

// Sets out = residual + inp weight^T + bias; residual may be NULL.
static inline void linear_forward_fp8_(floatX* out, const floatX* residual, const floatX* inp,
                                       const Weight* w, int N, LinearGpu* linear) {
    const int C = w->C, OC = w->OC;
    MatmulGpu* matmul = linear->matmul;
    const auto in_fp8 = [&] {
        matmul_fp8(out, residual, linear_input_fp8_(linear, inp, N, C), linear_weight_fp8_(linear, w),
                   w->bias, {N, C, OC}, matmul);
    };
    const auto without = [&] {
        matmul_forward_residual(out, residual, inp, w->data, w->bias, {N, C, OC}, matmul);
    };
    matmul_fp8_or(matmul_fp8_key<floatX>({N, C, OC}, CUBLASLT_EPILOGUE_BIAS, residual != NULL), 1, matmul,
                  in_fp8, without);
    linear_used_(linear, inp, out);
}

static inline void linear_forward_gelu_fp8_(floatX* out, floatX* pre, const floatX* inp, const Weight* w,
                                            int N, LinearGpu* linear) {
    const int C = w->C, OC = w->OC;
    const floatX* none = NULL;
    const Weight reader = linear_mirrored_(w);
    MatmulGpu* matmul = linear->matmul;
    const auto in_fp8 = [&] {
        matmul_fp8(pre, none, linear_input_fp8_(linear, inp, N, C), linear_weight_fp8_(linear, w), w->bias,
                   {N, C, OC}, matmul);
        linear_activation_forward(out, pre, &reader, N, ACTIVATION_GELU, linear);
    };
    const auto without = [&] {
        linear_used_(linear, out, pre);
        matmul_forward_gelu(out, pre, inp, w->data, w->bias, {N, C, OC}, matmul);
    };
    matmul_fp8_or(matmul_fp8_key<floatX>({N, C, OC}, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, 0), 1, matmul, in_fp8,
                  without);
    linear_used_(linear, inp, pre);
}

static inline void linear_backward_input_fp8_(floatX* dinp, const floatX* dout, const Weight* w, int N,
                                              LinearGpu* linear) {
    const int C = w->C, OC = w->OC;
    const floatX* none = NULL;
    MatmulGpu* matmul = linear->matmul;
    const auto in_fp8 = [&] {
        matmul_fp8(dinp, none, linear_input_fp8_(linear, dout, N, OC), linear_turned_fp8_(linear, w), none,
                   {N, OC, C}, matmul);
    };
    const auto without = [&] { matmul_backward_input(dinp, dout, w->data, {N, C, OC}, matmul); };
    matmul_fp8_or(matmul_fp8_key<floatX>({N, OC, C}, CUBLASLT_EPILOGUE_DEFAULT, 0), 1, matmul, in_fp8,
                  without);
    linear_used_(linear, dout, dinp);
}

// A gradient of a bias that is added to cannot be computed repeatedly.
static inline void linear_backward_input_gelu_fp8_(floatX* dinp, LinearGradient dbias, const floatX* dout,
                                                   const Weight* w, const floatX* pre, int N,
                                                   LinearGpu* linear) {
    const int C = w->C, OC = w->OC, may_repeat = dbias.mode == GRADIENT_SET || !dbias.to.data;
    const floatX* none = NULL;
    const Weight reader = linear_mirrored_(w);
    MatmulGpu* matmul = linear->matmul;
    const auto in_fp8 = [&] {
        matmul_fp8(dinp, none, linear_input_fp8_(linear, dout, N, OC), linear_turned_fp8_(linear, w), none,
                   {N, OC, C}, matmul);
        linear_activation_backward(dinp, dinp, pre, &reader, N, ACTIVATION_GELU, linear);
        if (dbias.to.data) {
            matmul_backward_bias(dbias.to, (const floatX*)dinp, N, C, dbias.mode, matmul);
        }
    };
    const auto without = [&] {
        linear_used_(linear, dinp, dinp);
        matmul_backward_input_gelu<floatX>({dinp, dbias.to, dout, w->data, pre, {N, C, OC}, dbias.mode},
                                           matmul);
    };
    matmul_fp8_or(matmul_fp8_key<floatX>({N, OC, C}, CUBLASLT_EPILOGUE_DGELU, 0), may_repeat, matmul, in_fp8,
                  without);
    linear_used_(linear, dout, dout);
}

// ---- the layers ----

// Names the gradients of a layer's adapters, `d`, which a backward pass sets or adds to as `mode`
// says.
static inline void linear_adapter_gradients(LayerWeights* w, const ModelGradients* d, GradientMode mode) {
    const AdapterGradient all[ADAPT_MATRICES] = {{d->qkvw_a.data, d->qkvw_b.data},
                                                 {d->attprojw_a.data, d->attprojw_b.data},
                                                 {d->fcw_a.data, d->fcw_b.data},
                                                 {d->fcprojw_a.data, d->fcprojw_b.data}};
    layer_adapter_gradients(w, all, mode);
}

static inline void linear_forward_base_(floatX* out, const floatX* residual, const floatX* inp,
                                        const Weight* w, int N, LinearGpu* linear) {
    if (linear_is_in_fp8_(linear, w)) {
        linear_forward_fp8_(out, residual, inp, w, N, linear);
    } else if (linear_reads_blocks_(linear, N)) {
        linear_forward_blocks_(out, residual, inp, w, N, linear);
    } else {
        matmul_forward_residual(out, residual, inp, linear_expanded_(w, linear), w->bias, {N, w->C, w->OC},
                                linear->matmul);
    }
}

static inline void linear_forward_residual(floatX* out, const floatX* residual, const floatX* inp,
                                           const Weight* w, int N, LinearGpu* linear) {
    const WeightAdapter* x = &w->adapter;
    linear_forward_base_(out, residual, inp, w, N, linear);
    if (weight_has_adapter(x)) {
        adapter_forward(out, inp, x->a, x->b, x->shape, {N, w->C, w->OC}, &linear->adapter);
    }
}

static inline void linear_forward(floatX* out, const floatX* inp, const Weight* w, int N, LinearGpu* linear) {
    linear_forward_residual(out, NULL, inp, w, N, linear);
}

static inline void linear_forward_gelu(floatX* out, floatX* pre, const floatX* inp, const Weight* w, int N,
                                       LinearGpu* linear) {
    if (linear_is_in_fp8_(linear, w)) {
        linear_forward_gelu_fp8_(out, pre, inp, w, N, linear);
    } else if (linear->is_quantized || weight_has_adapter(&w->adapter)) {
        linear_forward(pre, inp, w, N, linear);
        activation_forward(out, pre, N, w->OC, ACTIVATION_GELU, linear->gpu);
    } else {
        matmul_forward_gelu(out, pre, inp, w->data, w->bias, {N, w->C, w->OC}, linear->matmul);
    }
}

// Sets or adds to dweight (OC, C), unless it has no data, and to the gradients of the adapter.
static inline void linear_backward_weight(LinearGradient dweight, const floatX* dout, const floatX* inp,
                                          const Weight* w, int N, LinearGpu* linear) {
    const WeightAdapter* x = &w->adapter;
    if (weight_has_adapter(x)) {
        adapter_backward_weights<floatX>({x->da, linear->gradients}, {x->db, linear->gradients}, dout, inp,
                                         x->a, x->b, x->shape, {N, w->C, w->OC}, x->mode, &linear->adapter);
    }
    if (dweight.to.data) {
        matmul_backward_weight(dweight.to, dout, inp, {N, w->C, w->OC}, dweight.mode, linear->matmul);
    }
}

// Sets dinp (N, C).
static inline void linear_backward_input(floatX* dinp, const floatX* dout, const Weight* w, int N,
                                         LinearGpu* linear) {
    if (linear_is_in_fp8_(linear, w)) {
        linear_backward_input_fp8_(dinp, dout, w, N, linear);
    } else {
        matmul_backward_input(dinp, dout, linear_expanded_(w, linear), {N, w->C, w->OC}, linear->matmul);
    }
    if (weight_has_adapter(&w->adapter)) {
        adapter_backward_input(dinp, dout, w->adapter.a, w->adapter.b, w->adapter.shape, {N, w->C, w->OC},
                               &linear->adapter);
    }
}

// Sets dinp to the gradient before GELU, and sets or adds to dbias, as matmul_backward_input_gelu.
static inline void linear_backward_input_gelu(floatX* dinp, LinearGradient dbias, const floatX* dout,
                                              const Weight* w, const floatX* pre, int N, LinearGpu* linear) {
    if (linear_is_in_fp8_(linear, w)) {
        linear_backward_input_gelu_fp8_(dinp, dbias, dout, w, pre, N, linear);
    } else if (linear->is_quantized || weight_has_adapter(&w->adapter)) {
        linear_backward_input(dinp, dout, w, N, linear);
        activation_backward(dinp, (const floatX*)dinp, pre, N, (size_t)w->C, ACTIVATION_GELU, linear->gpu);
        if (dbias.to.data) {
            matmul_backward_bias(dbias.to, (const floatX*)dinp, N, w->C, dbias.mode, linear->matmul);
        }
    } else {
        matmul_backward_input_gelu<floatX>({dinp, dbias.to, dout, w->data, pre, {N, w->C, w->OC}, dbias.mode},
                                           linear->matmul);
    }
}

// Sets dinp (N, C), and sets or adds to dweight. The gradient of the bias is summed where dout is
// made.
static inline void linear_backward(floatX* dinp, LinearGradient dweight, const floatX* dout,
                                   const floatX* inp, const Weight* w, int N, LinearGpu* linear) {
    linear_backward_weight(dweight, dout, inp, w, N, linear);
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
        expert_matmul_forward(out, inp, (const floatX*)linear->expanded, &own, {w->C, w->OC}, linear->gpu);
    }
}

static inline void linear_experts_forward(floatX* out, const floatX* inp, const Weight* w,
                                          const ExpertRows* rows, LinearGpu* linear) {
    if (linear->is_quantized) {
        linear_experts_forward_blocks_(out, inp, w, rows, linear);
    } else {
        expert_matmul_forward(out, inp, w->data, rows, {w->C, w->OC}, linear->gpu);
    }
}

// Sets or adds to the gradients of all experts' matrices, unless dweight has no data.
static inline void linear_experts_backward_weight(Gradient dweight, const floatX* dout, const floatX* inp,
                                                  const Weight* w, const ExpertRows* rows, GradientMode mode,
                                                  LinearGpu* linear) {
    if (dweight.data) {
        expert_matmul_backward_weight(dweight, dout, inp, rows, {w->C, w->OC}, mode, linear->gpu);
    }
}

static inline void linear_embed_(floatX* out, const int* tokens, const Weight* wte, const floatX* wpe,
                                 EmbeddingBatch batch, LinearGpu* linear) {
    if (linear->is_quantized) {
        const QuantizedGpu blocks = quantized_gpu_bind(wte->data, (size_t)wte->OC * wte->C);
        q8_embedding(out, tokens, blocks, wpe, batch, linear->gpu);
    } else {
        embedding_forward(out, tokens, wte->data, wpe, batch, linear->gpu);
    }
}

// Sets encoded (R, C), if tensor ranks cut wte. A rank's part is zero for tokens whose rows other
// ranks have.
static inline void linear_embedding_cut_(const LayerPassGpu* layer) {
    const Pass* pass = layer->pass;
    const TensorParallelGpu* tensor = &layer->tensor;
    const Weight* wte = &layer->weights.wte;
    const EmbeddingWords words = {tensor->cut.rank * wte->OC, wte->OC};
    const TensorTokens rows = tensor_rows(tensor->cut);
    linear_embed_(tensor->parts, pass->inputs, wte, NULL, embedding_slice(pass_tokens(pass), wte->C, words),
                  layer->linear);
    tensor_sum(tensor, layer->a.encoded, NULL, NULL);
    if (layer->p.wpe) {
        embedding_positions(layer->a.encoded, layer->p.wpe, rows.first, rows.count, pass->T, pass->positions,
                            wte->C, layer->linear->gpu);
    }
}

// Returns the factor of embeddings; a root of C is rounded as the model's dtype rounds it.
static inline float linear_embedding_factor_(ModelConfig cfg) {
    const float factor = model_embedding_factor(cfg);
    const int is_root = model_architecture(cfg.arch)->embedding == EMBEDDING_ROOT;
    return is_root ? to_float(from_float<floatX>(factor)) : factor;
}

// Sets encoded (R, C) from the embeddings of tokens and of positions. Collective.
static inline void linear_embedding_sum_(const LayerPassGpu* layer) {
    const Pass* pass = layer->pass;
    const ModelActivations* a = &layer->a;
    if (tensor_is_cut(layer->tensor.cut)) {
        linear_embedding_cut_(layer);
    } else {
        linear_embed_(a->encoded, pass->inputs, &layer->weights.wte, layer->p.wpe,
                      embedding_batch(pass->B, pass->T, layer->cfg.C, pass->positions), layer->linear);
    }
    const int R = tensor_rows(layer->tensor.cut).count, C = layer->cfg.C;
    const float factor = linear_embedding_factor_(layer->cfg);
    if (a->encoded_rstd) {
        norm_unit_forward(a->encoded, a->encoded_rstd, R, C, model_norm_eps(layer->cfg), layer->linear->gpu);
    }
    if (factor != 1) {
        residual_sum(a->encoded, (const floatX*)NULL, (const floatX*)a->encoded, factor,
                     (size_t)R * (size_t)C, layer->linear->gpu);
    }
}

// Applies dropout to x (R, C), encoded or its gradient, in place.
static inline void linear_embedding_dropout_(floatX* x, const LayerPassGpu* layer) {
    const Dropout dropout = layer_dropout(layer, dropout_of_embedding());
    if (dropout_is_on(&dropout)) {
        dropout_sum(x, (const floatX*)NULL, (const floatX*)x, &dropout, 1,
                    tensor_rows(layer->tensor.cut).count, layer->cfg.C, layer->linear->gpu);
    }
}

// Sets encoded (R, C), the residual stream that enters the first block. Collective.
static inline void linear_embedding(const LayerPassGpu* layer) {
    linear_embedding_sum_(layer);
    linear_embedding_dropout_(layer->a.encoded, layer);
}

// Turns dencoded (R, C), the gradient of encoded, into that of the sum of embeddings, in place. A
// norm needs encoded without dropout: it is set again. Collective.
static inline void linear_embedding_backward(floatX* dencoded, const LayerPassGpu* layer) {
    const ModelActivations* a = &layer->a;
    const int R = tensor_rows(layer->tensor.cut).count, C = layer->cfg.C;
    const float factor = linear_embedding_factor_(layer->cfg);
    linear_embedding_dropout_(dencoded, layer);
    if (a->encoded_rstd && layer->pass->dropout && layer->cfg.dropout > 0) {
        linear_embedding_sum_(layer);
    }
    if (a->encoded_rstd) {
        norm_unit_backward(dencoded, (const floatX*)a->encoded, a->encoded_rstd, R, C, layer->linear->gpu);
    }
    if (factor != 1) {
        residual_sum(dencoded, (const floatX*)NULL, (const floatX*)dencoded, factor, (size_t)R * (size_t)C,
                     layer->linear->gpu);
    }
}

#endif
