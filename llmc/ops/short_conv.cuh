/*
short_conv.cuh -- short_conv.h on the GPU: the same functions on X = float, bf16 or fp16, computed
in fp32. States are fp32.
*/
#ifndef LLMC_SHORT_CONV_CUH
#define LLMC_SHORT_CONV_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/column_sums.cuh"
#include "llmc/ops/short_conv.h"

enum {
    SHORT_CONV_THREADS = 128,
    SHORT_CONV_RUN = 16,       // tokens of a thread in the forward pass
    SHORT_CONV_GROUPS = 128,   // most runs in the backward pass, which sum gradients of taps
    SHORT_CONV_GROUP_ROWS = 32 // tokens of such a run, at least
};

template <class X> struct ShortConvGpu {
    ShortConvKind kind;
    int B, T, C, W;
    const int* starts;
    const X *weight, *bias;
};

// Gradients of weight and bias (data may be NULL), and room for their partial sums.
typedef struct {
    Gradient dweight, dbias;
    GradientMode mode;
    float* partial; // short_conv_partial floats
} ShortConvGradientsGpu;

static inline int short_conv_group_rows_(int N) {
    const int rows = ceil_div(N, (int)SHORT_CONV_GROUPS);
    return rows > SHORT_CONV_GROUP_ROWS ? rows : SHORT_CONV_GROUP_ROWS;
}

static inline int short_conv_groups_(int N) { return N > 0 ? ceil_div(N, short_conv_group_rows_(N)) : 0; }

// Returns the floats of partial sums for up to N tokens.
static inline size_t short_conv_partial(int N, int C, int W) {
    const int groups = ceil_div(N, (int)SHORT_CONV_GROUP_ROWS);
    return (size_t)(groups < SHORT_CONV_GROUPS ? groups : SHORT_CONV_GROUPS) * (size_t)C * (size_t)(W + 1);
}

// ---- a pack of channels of one token ----

// Taps in the order of the past: tap[i] multiplies the input of i tokens ago. WIDE is W, or more,
// with taps of 0.
template <class X, int WIDE> struct ShortConvTaps_ { float tap[WIDE][Pack<X>::SIZE], bias[Pack<X>::SIZE]; };

template <class X, int WIDE>
__device__ inline void short_conv_load_taps_(ShortConvTaps_<X, WIDE>& taps, const ShortConvGpu<X>& conv,
                                             int c) {
#pragma unroll
    for (int e = 0; e < Pack<X>::SIZE; e++) {
        const X* of = conv.weight + (size_t)(c + e) * conv.W;
#pragma unroll
        for (int i = 0; i < WIDE; i++) {
            taps.tap[i][e] = i < conv.W ? to_float(of[conv.W - 1 - i]) : 0.0f;
        }
        taps.bias[e] = conv.bias ? to_float(conv.bias[c + e]) : 0.0f;
    }
}

// Inputs of a token: u, and for GATED its factors.
template <class X> struct ShortConvInput_ { float u[Pack<X>::SIZE], b[Pack<X>::SIZE], x[Pack<X>::SIZE]; };

template <class X, ShortConvKind KIND>
__device__ inline void short_conv_load_(ShortConvInput_<X>& in, const X* inp, const ShortConvGpu<X>& conv,
                                        int n, int c) {
    constexpr int SIZE = Pack<X>::SIZE;
    if constexpr (KIND == SHORT_CONV_GATED) {
        const X* row = inp + (size_t)n * 3 * conv.C + c;
        unpack(in.b, load_pack(row));
        unpack(in.x, load_pack(row + 2 * conv.C));
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            in.u[e] = in.b[e] * in.x[e];
        }
    } else {
        unpack(in.u, load_pack(inp + (size_t)n * conv.C + c));
    }
}

// Returns the number of tokens before n that are of its document and have a tap.
template <class X> __device__ inline int short_conv_past_(const ShortConvGpu<X>& conv, int n) {
    const int t = n % conv.T, start = conv.starts ? conv.starts[n] : 0;
    return min(conv.W - 1, t - start);
}

template <class X> __device__ inline Pack<X> short_conv_pack_(const float* from) {
    Pack<X> pack;
#pragma unroll
    for (int e = 0; e < Pack<X>::SIZE; e++) {
        pack[e] = from_float<X>(from[e]);
    }
    return pack;
}

// Sets conv from the inputs of this token and those before it, the newest first.
template <class X, int WIDE>
__device__ inline void short_conv_sum_(float* conv, const ShortConvTaps_<X, WIDE>& taps,
                                       const float (&u)[WIDE][Pack<X>::SIZE], int past) {
#pragma unroll
    for (int e = 0; e < Pack<X>::SIZE; e++) {
        conv[e] = taps.bias[e];
    }
#pragma unroll
    for (int i = 0; i < WIDE; i++) {
#pragma unroll
        for (int e = 0; e < Pack<X>::SIZE; e++) {
            conv[e] += i <= past ? taps.tap[i][e] * u[i][e] : 0.0f;
        }
    }
}

// Moves rows one place towards the past; the first becomes `next`.
template <int WIDE, int SIZE>
__device__ inline void short_conv_shift_(float (&rows)[WIDE][SIZE], const float* next) {
#pragma unroll
    for (int i = WIDE - 1; i >= 0; i--) {
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            rows[i][e] = i > 0 ? rows[i > 0 ? i - 1 : 0][e] : next[e];
        }
    }
}

// Loads the inputs of the WIDE-1 tokens before n; those before the first of all stay 0.
template <class X, ShortConvKind KIND, int WIDE>
__device__ inline void short_conv_load_past_(float (&u)[WIDE][Pack<X>::SIZE], const X* inp,
                                             const ShortConvGpu<X>& conv, int n, int c) {
#pragma unroll
    for (int i = WIDE - 1; i > 0; i--) {
        ShortConvInput_<X> in = {};
        if (n >= i && i < conv.W) {
            short_conv_load_<X, KIND>(in, inp, conv, n - i, c);
        }
        short_conv_shift_(u, in.u);
    }
}

// ---- kernels ----

// A thread computes a pack of channels of a run of tokens, with the last inputs in registers.
// grid   ceil(C/SIZE * ceil(N/16) / 128)      block   128      shared   none
// moves  columns*N*C in, and an eighth more from L2; N*C out. Bound by memory.
// order  fixed
// needs  C a multiple of 8, addresses of 16 bytes
template <class X, ShortConvKind KIND, int WIDE>
__global__ void __launch_bounds__(SHORT_CONV_THREADS)
    short_conv_forward_kernel(X* out, const X* inp, ShortConvGpu<X> conv) {
    constexpr int SIZE = Pack<X>::SIZE;
    const int packs = conv.C / SIZE, i = (int)(blockIdx.x * SHORT_CONV_THREADS + threadIdx.x),
              c = i % packs * SIZE, N = conv.B * conv.T, first = i / packs * SHORT_CONV_RUN,
              end = min(first + SHORT_CONV_RUN, N);
    ShortConvTaps_<X, WIDE> taps;
    float u[WIDE][SIZE] = {}, sum[SIZE], gate[SIZE];
    if (first >= N) {
        return;
    }
    short_conv_load_taps_(taps, conv, c);
    short_conv_load_past_<X, KIND, WIDE>(u, inp, conv, first, c);
#pragma unroll 4
    for (int n = first; n < end; n++) {
        ShortConvInput_<X> in;
        short_conv_load_<X, KIND>(in, inp, conv, n, c);
        short_conv_shift_(u, in.u);
        short_conv_sum_(sum, taps, u, short_conv_past_(conv, n));
        if constexpr (KIND == SHORT_CONV_GATED) {
            unpack(gate, load_pack(inp + (size_t)n * 3 * conv.C + conv.C + c));
        }
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            sum[e] = KIND == SHORT_CONV_GATED ? gate[e] * sum[e] : sum[e] / (1.0f + expf(-sum[e]));
        }
        store_pack(out + (size_t)n * conv.C + c, short_conv_pack_<X>(sum));
    }
}

// Gradients of a thread's taps and biases, summed over its run; and those of the inputs of the last
// tokens, as far as they are known.
template <class X, int WIDE> struct ShortConvSums_ {
    float tap[WIDE][Pack<X>::SIZE], bias[Pack<X>::SIZE], du[WIDE][Pack<X>::SIZE];
};

// Turns dout of token n into dconv; for GATED stores the gradient of c if the token is the run's
// own.
template <class X, ShortConvKind KIND>
__device__ inline void short_conv_out_backward_(float* dconv, X* dinp, const X* dout, const X* inp,
                                                const float* sum, const ShortConvGpu<X>& conv, int n, int c,
                                                bool is_own) {
    constexpr int SIZE = Pack<X>::SIZE;
    float gate[SIZE], dgate[SIZE];
    unpack(dconv, load_pack(dout + (size_t)n * conv.C + c));
    if constexpr (KIND == SHORT_CONV_GATED) {
        const size_t at = (size_t)n * 3 * conv.C + conv.C + c;
        unpack(gate, load_pack(inp + at));
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            dgate[e] = dconv[e] * sum[e];
            dconv[e] *= gate[e];
        }
        if (is_own) {
            store_pack(dinp + at, short_conv_pack_<X>(dgate));
        }
    } else {
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            const float s = 1.0f / (1.0f + expf(-sum[e]));
            dconv[e] *= s * (1.0f + sum[e] * (1.0f - s));
        }
    }
}

// Stores the gradients of the inputs of token n.
template <class X, ShortConvKind KIND>
__device__ inline void short_conv_store_inputs_(X* dinp, const float* du, const X* inp,
                                                const ShortConvGpu<X>& conv, int n, int c) {
    constexpr int SIZE = Pack<X>::SIZE;
    if constexpr (KIND == SHORT_CONV_GATED) {
        ShortConvInput_<X> in;
        float db[SIZE], dx[SIZE];
        X* row = dinp + (size_t)n * 3 * conv.C + c;
        short_conv_load_<X, KIND>(in, inp, conv, n, c);
#pragma unroll
        for (int e = 0; e < SIZE; e++) {
            db[e] = du[e] * in.x[e];
            dx[e] = du[e] * in.b[e];
        }
        store_pack(row, short_conv_pack_<X>(db));
        store_pack(row + 2 * conv.C, short_conv_pack_<X>(dx));
    } else {
        store_pack(dinp + (size_t)n * conv.C + c, short_conv_pack_<X>(du));
    }
}

// A thread computes a pack of channels of a run of tokens, from the first on. It also computes
// dconv of the WIDE-1 tokens after the run, whose taps reach back into it.
// grid   ceil(C/SIZE * groups / 128)      block   128      shared   none
// moves  (2*columns+1)*N*C, and groups*C*(W+1) fp32 out. Bound by memory. With more than 4 taps, 16
//        bits: registers spill.
// order  fixed
template <class X, ShortConvKind KIND, int WIDE>
__global__ void __launch_bounds__(SHORT_CONV_THREADS)
    short_conv_backward_kernel(X* dinp, float* partial, const X* dout, const X* inp, ShortConvGpu<X> conv,
                               int rows) {
    constexpr int SIZE = Pack<X>::SIZE;
    const int packs = conv.C / SIZE, i = (int)(blockIdx.x * SHORT_CONV_THREADS + threadIdx.x),
              c = i % packs * SIZE, N = conv.B * conv.T, group = i / packs, first = group * rows,
              end = min(first + rows, N);
    ShortConvTaps_<X, WIDE> taps;
    ShortConvSums_<X, WIDE> d = {};
    float u[WIDE][SIZE] = {}, sum[SIZE], dconv[SIZE], zero[SIZE] = {};
    if (first >= N) {
        return;
    }
    short_conv_load_taps_(taps, conv, c);
    short_conv_load_past_<X, KIND, WIDE>(u, inp, conv, first, c);
#pragma unroll 1
    for (int n = first; n < end + WIDE - 1; n++) {
        const bool is_own = n < end;
        short_conv_shift_(d.du, zero);
        if (n < N) {
            const int past = short_conv_past_(conv, n);
            ShortConvInput_<X> in;
            short_conv_load_<X, KIND>(in, inp, conv, n, c);
            short_conv_shift_(u, in.u);
            short_conv_sum_(sum, taps, u, past);
            short_conv_out_backward_<X, KIND>(dconv, dinp, dout, inp, sum, conv, n, c, is_own);
#pragma unroll
            for (int j = 0; j < WIDE * SIZE; j++) {
                const int ago = j / SIZE, e = j % SIZE;
                const float dy = ago <= past ? dconv[e] : 0.0f;
                d.du[ago][e] += dy * taps.tap[ago][e];
                d.tap[ago][e] += is_own ? dy * u[ago][e] : 0.0f;
                d.bias[e] += is_own && ago == 0 ? dy : 0.0f;
            }
        }
        const int known = n - (WIDE - 1); // no later token reaches it
        if (known >= first && known < end) {
            short_conv_store_inputs_<X, KIND>(dinp, d.du[WIDE - 1], inp, conv, known, c);
        }
    }
    float* to = partial + (size_t)group * conv.C * (conv.W + 1);
#pragma unroll
    for (int e = 0; e < SIZE; e++) {
        to[(size_t)conv.C * conv.W + c + e] = d.bias[e];
#pragma unroll
        for (int ago = 0; ago < WIDE; ago++) {
            if (ago < conv.W) {
                to[(size_t)(c + e) * conv.W + conv.W - 1 - ago] = d.tap[ago][e];
            }
        }
    }
}

// Returns u of token n, channel c.
template <class X>
__device__ inline float short_conv_input_(const X* inp, const ShortConvGpu<X>& conv, int n, int c) {
    const X* row = inp + (size_t)n * (conv.kind == SHORT_CONV_GATED ? 3 : 1) * conv.C + c;
    return conv.kind == SHORT_CONV_GATED ? to_float(row[0]) * to_float(row[2 * conv.C]) : to_float(row[0]);
}

// A thread stores a number of the state.
// grid   ceil(B*(W-1)*C / 256)      block   256      shared   none
// moves  B*(W-1)*C fp32 out. Bound by launching.
// order  fixed: no sums.
template <class X> __global__ void short_conv_store_kernel(float* state, const X* inp, ShortConvGpu<X> conv) {
    const int past = conv.W - 1, i = (int)(blockIdx.x * blockDim.x + threadIdx.x), c = i % conv.C,
              row = i / conv.C, b = row / past, ago = past - 1 - row % past, last = (b + 1) * conv.T - 1;
    if (b < conv.B) {
        state[i] = ago <= short_conv_past_(conv, last) ? short_conv_input_(inp, conv, last - ago, c) : 0.0f;
    }
}

// A thread reads the next token of a channel of a sequence.
// grid   ceil(B*C / 256)      block   256      shared   none
// moves  2*B*(W-1)*C fp32. Bound by launching.
// order  fixed
template <class X>
__global__ void short_conv_step_kernel(X* out, float* state, const X* inp, ShortConvGpu<X> conv) {
    const int past = conv.W - 1, i = (int)(blockIdx.x * blockDim.x + threadIdx.x), c = i % conv.C,
              b = i / conv.C;
    if (b >= conv.B) {
        return;
    }
    float* of = state + (size_t)b * past * conv.C + c;
    const X* taps = conv.weight + (size_t)c * conv.W;
    const float u = short_conv_input_(inp, conv, b, c);
    float sum = (conv.bias ? to_float(conv.bias[c]) : 0.0f) + to_float(taps[past]) * u;
    for (int j = past - 1; j >= 0; j--) {
        sum += to_float(taps[j]) * of[(size_t)j * conv.C];
    }
    for (int j = 0; j < past; j++) {
        of[(size_t)j * conv.C] = j + 1 < past ? of[(size_t)(j + 1) * conv.C] : u;
    }
    const float y = conv.kind == SHORT_CONV_GATED ? to_float(inp[(size_t)b * 3 * conv.C + conv.C + c]) * sum
                                                  : sum / (1.0f + expf(-sum));
    out[i] = from_float<X>(y);
}

// ---- launchers ----

// Runs the statement with KIND and WIDE as constants: of the models that exist, and 8.
#define SHORT_CONV_DISPATCH_(conv, ...)                                                                      \
    do {                                                                                                     \
        assert((conv)->C % SHORT_CONV_PACK == 0 && (conv)->W >= 2 && (conv)->W <= SHORT_CONV_MOST);          \
        if ((conv)->kind == SHORT_CONV_SILU && (conv)->W <= 4) {                                             \
            constexpr ShortConvKind KIND = SHORT_CONV_SILU;                                                  \
            constexpr int WIDE = 4;                                                                          \
            __VA_ARGS__;                                                                                     \
        } else if ((conv)->kind == SHORT_CONV_SILU) {                                                        \
            constexpr ShortConvKind KIND = SHORT_CONV_SILU;                                                  \
            constexpr int WIDE = SHORT_CONV_MOST;                                                            \
            __VA_ARGS__;                                                                                     \
        } else if ((conv)->W <= 4) {                                                                         \
            constexpr ShortConvKind KIND = SHORT_CONV_GATED;                                                 \
            constexpr int WIDE = 4;                                                                          \
            __VA_ARGS__;                                                                                     \
        } else {                                                                                             \
            constexpr ShortConvKind KIND = SHORT_CONV_GATED;                                                 \
            constexpr int WIDE = SHORT_CONV_MOST;                                                            \
            __VA_ARGS__;                                                                                     \
        }                                                                                                    \
    } while (0)

// Returns the blocks of a kernel with a thread for each pack of channels of each run.
template <class X> static inline unsigned short_conv_blocks_(const ShortConvGpu<X>* conv, int runs) {
    return (unsigned)ceil_div((size_t)runs * (size_t)(conv->C / Pack<X>::SIZE), (size_t)SHORT_CONV_THREADS);
}

template <class X>
static inline void short_conv_forward(X* out, const X* inp, const ShortConvGpu<X>* conv, const Gpu* gpu) {
    const int N = conv->B * conv->T;
    SHORT_CONV_DISPATCH_(conv, launch(short_conv_forward_kernel<X, KIND, WIDE>,
                                      short_conv_blocks_(conv, ceil_div(N, (int)SHORT_CONV_RUN)),
                                      SHORT_CONV_THREADS, 0, gpu, out, inp, *conv));
}

template <class X>
static inline void short_conv_backward(X* dinp, const ShortConvGradientsGpu* d, const X* dout, const X* inp,
                                       const ShortConvGpu<X>* conv, const Gpu* gpu) {
    const int N = conv->B * conv->T, C = conv->C, W = conv->W, groups = short_conv_groups_(N);
    SHORT_CONV_DISPATCH_(conv, launch(short_conv_backward_kernel<X, KIND, WIDE>,
                                      short_conv_blocks_(conv, groups), SHORT_CONV_THREADS, 0, gpu, dinp,
                                      d->partial, dout, inp, *conv, short_conv_group_rows_(N)));
    if (d->dweight.data) {
        column_sums_finish<X>(&d->dweight, 1, ColumnPartials<float>{d->partial, groups, C * (W + 1), C * W},
                              d->mode, gpu);
    }
    if (d->dbias.data) {
        column_sums_finish<X>(&d->dbias, 1,
                              ColumnPartials<float>{d->partial + (size_t)C * W, groups, C * (W + 1), C},
                              d->mode, gpu);
    }
}

template <class X>
static inline void short_conv_store(float* state, const X* inp, const ShortConvGpu<X>* conv, const Gpu* gpu) {
    const size_t n = (size_t)conv->B * (size_t)(conv->W - 1) * (size_t)conv->C;
    launch(short_conv_store_kernel<X>, (unsigned)ceil_div(n, (size_t)256), 256, 0, gpu, state, inp, *conv);
}

template <class X>
static inline void short_conv_step(X* out, float* state, const X* inp, const ShortConvGpu<X>* conv,
                                   const Gpu* gpu) {
    assert(conv->T == 1);
    launch(short_conv_step_kernel<X>, (unsigned)ceil_div(conv->B * conv->C, 256), 256, 0, gpu, out, state,
           inp, *conv);
}

#endif
