/*
matmul.cuh -- the linear layer on the GPU: matmuls by cublasLt, with bias, residual and GELU.

The functions of matmul.h, for T in {float, bf16, fp16}; three that do more in the same pass over
memory:

    matmul_forward_residual      out  = residual + inp weight^T + bias         out is not residual
    matmul_forward_gelu          pre  = inp weight^T + bias,  out = gelu(pre)  pre, out (N, OC)
    matmul_backward_input_gelu   dinp = (dout weight) * gelu'(pre)             pre (N, C), not dinp
                                 dbias_c (+)= sum_n dinp_nc                    of the layer before

and one for many small matmuls (Muon):

    matmul_batch                 out_i = scale left_i right_i + add_scale add_i       i < batch

They set their outputs, except dbias, which is set or added to according to `mode`, and may have no
data. bias may be NULL. dweight and dbias are fp32 or T. Any size works, but matmuls are slow unless
C and OC are multiples of 8. Sums are fp32 and rounded once, with three exceptions. If cublasLt
cannot fuse bias or GELU into a matmul, a kernel applies it to the rounded result. If cublasLt
computes dbias, the sum of a micro-batch is rounded before it is added; so is dweight if its
algorithm splits the sum (seen on an H200).

matmul_plans.cuh chooses and keeps the algorithms.
*/
#ifndef LLMC_MATMUL_CUH
#define LLMC_MATMUL_CUH

#include <assert.h>

#include "llmc/base/sizes.h"
#include "llmc/ops/activation.cuh"
#include "llmc/ops/column_sums.cuh"
#include "llmc/ops/matmul.h"
#include "llmc/ops/matmul_plans.cuh"
#include "llmc/ops/matmul_race.cuh"
#include "llmc/gpu/elements.cuh"
#include "llmc/gpu/gpu.cuh"

// Returns ways `first` ... of an operation with GELU.
static inline MatmulWays matmul_gelu_ways_(GeluWay_ first, GeluWay_ standard) {
    static const char* const words[] = {"with the gradient of the bias in the product", "in the product",
                                        "in separate steps"};
    return {first, GELU_WAYS_, standard, words, ""};
}

// ---- kernels: the bias, where cublasLt does not add it ----

// Returns 1 if rows of `cols` elements can be read in packs.
template <class T> static inline int matmul_packs_(const T* rows, int cols) {
    return cols % Pack<T>::SIZE == 0 && (uintptr_t)rows % sizeof(Pack<T>) == 0;
}

// A thread adds WIDTH elements of the bias to their columns in rows y, y + gridDim.y, ...
// grid   ceil(OC / (256 * WIDTH)), up to 1024 rows      block   256      shared   none
// moves  N*OC in, N*OC out. Bound by memory.
// order  fixed.
// needs  WIDTH a pack: OC a multiple of it, out and bias aligned to 16 bytes.
template <class T, int WIDTH>
__global__ void __launch_bounds__(256) matmul_add_bias_kernel(T* out, const T* bias, int N, int OC) {
    const int column = (int)(blockIdx.x * blockDim.x + threadIdx.x) * WIDTH;
    if (column >= OC) {
        return;
    }
    float add[WIDTH], x[WIDTH];
    load_floats<WIDTH>(add, bias + column);
    for (int row = (int)blockIdx.y; row < N; row += (int)gridDim.y) {
        T* to = out + (size_t)row * OC + column;
        load_floats<WIDTH>(x, to);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            x[i] += add[i];
        }
        store_floats<WIDTH>(to, x);
    }
}

template <class T> static inline void matmul_add_bias_(T* out, const T* bias, int N, int OC, const Gpu* gpu) {
    const int SIZE = Pack<T>::SIZE;
    const unsigned rows = (unsigned)int_min(N, 1024);
    if (matmul_packs_(out, OC) && matmul_packs_(bias, OC)) {
        launch(matmul_add_bias_kernel<T, Pack<T>::SIZE>, dim3((unsigned)ceil_div(OC, 256 * SIZE), rows), 256,
               0, gpu, out, bias, N, OC);
    } else {
        launch(matmul_add_bias_kernel<T, 1>, dim3((unsigned)ceil_div(OC, 256), rows), 256, 0, gpu, out, bias,
               N, OC);
    }
}

// ---- the layer ----

// Returns the key of inp weight^T.
template <class T> static inline MatmulKey matmul_key_(MatmulSizes sizes, int epilogue, int adds) {
    return {sizes.N, sizes.OC, sizes.C, 0, 1, DTYPE_OF(T), DTYPE_OF(T), epilogue, adds, 0, 1};
}

// Returns the key of dout weight.
template <class T> static inline MatmulKey matmul_input_key_(MatmulSizes sizes, int epilogue) {
    return {sizes.N, sizes.C, sizes.OC, 0, 0, DTYPE_OF(T), DTYPE_OF(T), epilogue, 0, 0, 1};
}

// Sets out = add + inp weight^T + bias; add and bias may be NULL.
template <class T>
static inline void matmul_linear_(T* out, const T* add, const T* inp, const T* weight, const T* bias,
                                  MatmulSizes sizes, MatmulGpu* ctx) {
    MatmulKey key = matmul_key_<T>(sizes, CUBLASLT_EPILOGUE_BIAS, add != NULL);
    MatmulOperands x = {out, add, inp, weight, bias, NULL, NULL, NULL, NULL};
    if (bias && matmul_try(key, x, ctx)) {
        return;
    }
    key.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    x.bias = NULL;
    matmul_product(key, x, ctx);
    if (bias) {
        matmul_add_bias_(out, bias, sizes.N, sizes.OC, ctx->gpu);
    }
}

template <class T>
static inline void matmul_forward(T* out, const T* inp, const T* weight, const T* bias, MatmulSizes sizes,
                                  MatmulGpu* ctx) {
    matmul_linear_(out, (const T*)NULL, inp, weight, bias, sizes, ctx);
}

template <class T>
static inline void matmul_forward_residual(T* out, const T* residual, const T* inp, const T* weight,
                                           const T* bias, MatmulSizes sizes, MatmulGpu* ctx) {
    assert(out != residual);
    matmul_linear_(out, residual, inp, weight, bias, sizes, ctx);
}

// Adds inp weight^T to out.
template <class T>
static inline void matmul_forward_add(T* out, const T* inp, const T* weight, MatmulSizes sizes,
                                      MatmulGpu* ctx) {
    matmul_linear_(out, (const T*)out, inp, weight, (const T*)NULL, sizes, ctx);
}

// Returns 1 if cublasLt may be asked to apply GELU, or to race for it. It wants rows of `pre` to be
// multiples of 8 elements. Not in fp32: its tanh may be an approximation too coarse for that type.
template <class T> static inline int matmul_fuses_(GeluFusion which, int cols, const MatmulGpu* ctx) {
    return (ctx->settings.gelu_fusion & which) && cols % 8 == 0 && DTYPE_OF(T) != DTYPE_FP32;
}

template <class T>
static inline void matmul_forward_gelu(T* out, T* pre, const T* inp, const T* weight, const T* bias,
                                       MatmulSizes sizes, MatmulGpu* ctx) {
    const int epilogue = bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    const MatmulKey key = matmul_key_<T>(sizes, epilogue, 0);
    const MatmulOperands x = {out, NULL, inp, weight, bias, pre, NULL, NULL, NULL};
    const GeluWay_ standard =
        matmul_fuses_<T>(GELU_FUSED_FORWARD, sizes.OC, ctx) ? GELU_IN_MATMUL_ : GELU_IN_STEPS_;
    MatmulRace race = matmul_race(key, matmul_gelu_ways_(GELU_IN_MATMUL_, standard),
                                  matmul_fuses_<T>(GELU_RACE_FORWARD, sizes.OC, ctx), ctx);
    assert(out != pre);
    do {
        if (race.way == GELU_IN_STEPS_ || !matmul_try(key, x, ctx)) {
            matmul_forward(pre, inp, weight, bias, sizes, ctx);
            activation_forward(out, pre, sizes.N, sizes.OC, ACTIVATION_GELU, ctx->gpu);
        }
    } while (matmul_race_continues(&race, ctx));
}

template <class T>
static inline void matmul_backward_input(T* dinp, const T* dout, const T* weight, MatmulSizes sizes,
                                         MatmulGpu* ctx) {
    const MatmulKey key = matmul_input_key_<T>(sizes, CUBLASLT_EPILOGUE_DEFAULT);
    const MatmulOperands x = {dinp, NULL, dout, weight, NULL, NULL, NULL, NULL, NULL};
    matmul_product(key, x, ctx);
}

// Adds dout weight to dinp.
template <class T>
static inline void matmul_backward_input_add(T* dinp, const T* dout, const T* weight, MatmulSizes sizes,
                                             MatmulGpu* ctx) {
    MatmulKey key = matmul_input_key_<T>(sizes, CUBLASLT_EPILOGUE_DEFAULT);
    const MatmulOperands x = {dinp, dinp, dout, weight, NULL, NULL, NULL, NULL, NULL};
    key.adds = 1;
    matmul_product(key, x, ctx);
}

template <class T>
static inline void matmul_backward_bias(Gradient dbias, const T* dout, int N, int OC, GradientMode mode,
                                        MatmulGpu* ctx) {
    const size_t bytes = (size_t)column_sums_groups(N, OC) * OC * sizeof(float);
    CHECK(bytes <= ctx->workspace_bytes,
          "matmul: bias of %d: partial sums of %zu bytes need more than the workspace of %zu", OC, bytes,
          ctx->workspace_bytes);
    column_sums(dbias, (float*)ctx->workspace, dout, N, OC, mode, ctx->gpu);
}

// A linear layer after GELU, and what its backward pass sets.
template <class T> struct MatmulAfterGelu {
    T* dinp;        // gradient of the values before GELU
    Gradient dbias; // of the layer before, or without data
    const T *dout, *weight, *pre;
    MatmulSizes sizes;
    GradientMode mode; // of dbias
};

template <class T>
static inline MatmulOperands matmul_gelu_operands_(const MatmulAfterGelu<T>* x, void* bias) {
    return {x->dinp, NULL, x->dout, x->weight, bias, (void*)x->pre, NULL, NULL, NULL};
}

// Does all of matmul_backward_input_gelu in one matmul: cublasLt's DGELU_BGRAD. This can only set
// the gradient of the bias, in the type of the result; to add, it sets scratch memory, which is
// then added. Returns 0, having done nothing, if cublasLt refuses.
template <class T> static inline int matmul_try_gelu_bias_(const MatmulAfterGelu<T>* x, MatmulGpu* ctx) {
    void* sums = x->mode == GRADIENT_ADD ? ctx->bias_sums : x->dbias.data;
    const int C = x->sizes.C;
    if (!matmul_try(matmul_input_key_<T>(x->sizes, CUBLASLT_EPILOGUE_DGELU_BGRAD),
                    matmul_gelu_operands_(x, sums), ctx)) {
        return 0;
    }
    if (x->mode == GRADIENT_ADD) {
        column_sums_finish<T>(&x->dbias, 1, ColumnPartials<T>{(const T*)sums, 1, C, C}, x->mode, ctx->gpu);
    }
    return 1;
}

// Does matmul_backward_input_gelu in a certain way, or in the next one that cublasLt accepts.
template <class T>
static inline void matmul_backward_gelu_(int way, const MatmulAfterGelu<T>* x, MatmulGpu* ctx) {
    const MatmulSizes sizes = x->sizes;
    if (way == GELU_WITH_BIAS_GRADIENT_ && matmul_try_gelu_bias_(x, ctx)) {
        return;
    }
    if (way == GELU_IN_STEPS_ || !matmul_try(matmul_input_key_<T>(sizes, CUBLASLT_EPILOGUE_DGELU),
                                             matmul_gelu_operands_(x, NULL), ctx)) {
        matmul_backward_input(x->dinp, x->dout, x->weight, sizes, ctx);
        activation_backward(x->dinp, (const T*)x->dinp, x->pre, sizes.N, sizes.C, ACTIVATION_GELU, ctx->gpu);
    }
    if (x->dbias.data) {
        matmul_backward_bias(x->dbias, (const T*)x->dinp, sizes.N, sizes.C, x->mode, ctx);
    }
}

// Sets dinp; sets or adds to dbias. A gradient that is added to cannot be computed repeatedly, so
// it uses the way of an earlier race, or the standard one.
template <class T> static inline void matmul_backward_input_gelu(MatmulAfterGelu<T> x, MatmulGpu* ctx) {
    const Gradient dbias = x.dbias;
    const int C = x.sizes.C, sums_bias = dbias.data && ctx->settings.bias_fusion &&
                                         dbias.dtype == DTYPE_OF(T) && C <= COLUMN_SUMS_FLOATS;
    const GeluWay_ first = sums_bias ? GELU_WITH_BIAS_GRADIENT_ : GELU_IN_MATMUL_;
    const GeluWay_ standard = matmul_fuses_<T>(GELU_FUSED_BACKWARD, C, ctx) ? first : GELU_IN_STEPS_;
    const MatmulKey asked =
        matmul_input_key_<T>(x.sizes, sums_bias ? CUBLASLT_EPILOGUE_DGELU_BGRAD : CUBLASLT_EPILOGUE_DGELU);
    const int may_race = matmul_fuses_<T>(GELU_RACE_BACKWARD, C, ctx) &&
                         (x.mode == GRADIENT_SET || !dbias.data || matmul_decision(&asked, ctx));
    MatmulRace race = matmul_race(asked, matmul_gelu_ways_(first, standard), may_race, ctx);
    assert(x.dinp != x.pre);
    do {
        matmul_backward_gelu_(race.way, &x, ctx);
    } while (matmul_race_continues(&race, ctx));
}

template <class T>
static inline void matmul_backward_weight(Gradient dweight, const T* dout, const T* inp, MatmulSizes sizes,
                                          GradientMode mode, MatmulGpu* ctx) {
    const int adds = mode == GRADIENT_ADD;
    const MatmulKey key = {
        sizes.OC, sizes.C, sizes.N, 1, 0, DTYPE_OF(T), (int)dweight.dtype, CUBLASLT_EPILOGUE_DEFAULT,
        adds,     0,       1};
    const MatmulOperands x = {dweight.data, adds ? dweight.data : NULL, dout, inp, NULL, NULL, NULL, NULL,
                              NULL};
    assert(dweight.dtype == DTYPE_FP32 || dweight.dtype == DTYPE_OF(T));
    matmul_product(key, x, ctx);
}

// Matmuls of one shape: out (rows, cols) = left (rows, depth) right (depth, cols). A transposed
// factor lies in memory as (depth, rows) or (cols, depth). The `batch` matrices of each kind lie
// one after the other.
typedef struct {
    int rows, cols, depth;
    int left_transposed, right_transposed;
    int batch;
    float scale, add_scale;
} MatmulBatch;

// Sets out. add may be NULL. It and the factors are not out.
template <class T>
static inline void matmul_batch(T* out, const T* add, const T* left, const T* right, MatmulBatch b,
                                MatmulGpu* ctx) {
    const float scales[2] = {b.scale, b.add_scale};
    const MatmulKey key = {b.rows,
                           b.cols,
                           b.depth,
                           b.left_transposed,
                           b.right_transposed,
                           DTYPE_OF(T),
                           DTYPE_OF(T),
                           CUBLASLT_EPILOGUE_DEFAULT,
                           add != NULL,
                           0,
                           b.batch};
    const MatmulOperands x = {out, add, left, right, NULL, NULL, scales, NULL, NULL};
    assert(out != add && out != left && out != right && b.batch > 0);
    matmul_product(key, x, ctx);
}

#endif
