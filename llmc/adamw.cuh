/*
adamw.cuh -- adamw.h on the GPU, for all parameters in one launch; the gradient's norm; master weights;
stochastic rounding; the sum of losses.

Parameters are a full array, laid out by gpt2_sharded_rows_of; in stage 3 they are what is kept of it: zero_kept_cut. Gradients, master weights, m and v have what this
process updates of each group (zero.h), group after group: `owned` elements, which is all of them with one process.
All these arrays are updated over their whole length. What pads them is zero everywhere, and an update of zeros
leaves zeros. Arrays start at multiples of 16 bytes.

    params    (full)    T      set; without master weights also read
    master    (owned)   fp32   updated; NULL: there are none
    grads     (owned)   T or fp32
    m, v      (owned)   fp32   updated

With master weights the parameters are those, rounded to nearest. Without them a 16-bit parameter is updated
in fp32 and rounded stochastically: up or down with the probabilities that make the result right on average,
so that updates smaller than half a unit in the last place are not lost for ever. Element i of group g takes word
g 2^40 + i of stream "adamw" + t of `seed` (rand.h) in update t: the same whatever the launch and the number of
shards.

defines: MasterWeights, round_stochastic, AdamWPlan, adamw_open, adamw_close, AdamWUpdate, adamw_update,
         adamw_update_part, adamw_bytes, GradientNorm, gradient_norm_open, gradient_norm_close, gradient_square_sum,
         gradient_square_sum_bytes, sum_losses, sum_losses_bytes
*/
#ifndef LLMC_ADAMW_CUH
#define LLMC_ADAMW_CUH

#include <assert.h>
#include <float.h>
#include <limits.h>

#include "llmc/base/rand.h"
#include "llmc/base/wide_sum.h"
#include "llmc/adamw.h"
#include "llmc/gpt2.h"
#include "llmc/gpu.cuh"
#include "llmc/zero.h"

typedef enum { MASTER_NONE, MASTER_FP32 } MasterWeights;

// ---- stochastic rounding ----

__host__ __device__ inline uint32_t float_bits_(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
__host__ __device__ inline float bits_float_(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// x rounded to one of the two neighbors in T, with `random` uniform: on average exactly x, to 2^-32 of the
// distance of the neighbors. What T has is kept, NaN and infinity too; a finite x stays finite.
template <class T> __host__ __device__ inline T round_stochastic(float x, uint32_t random);

template <> __host__ __device__ inline float round_stochastic<float>(float x, uint32_t random) {
    (void)random;
    return x;
}

// bf16 is the upper half of a float: a random lower half is added, carries or not, and is cut off.
template <> __host__ __device__ inline bf16 round_stochastic<bf16>(float x, uint32_t random) {
    const uint32_t sign = float_bits_(x) & 0x80000000u, magnitude = float_bits_(x) ^ sign,
                   largest = 0x7F7F0000u;
    const uint32_t sum = (magnitude + (random >> 16)) & 0xFFFF0000u, rounded = sum < largest ? sum : largest;
    return from_float<bf16>(magnitude < 0x7F800000u ? bits_float_(sign | rounded) : x);
}

// The neighbors of x in fp16 are multiples of `unit`: 2^-10 of the power of two below |x|, at least 2^-24.
// All steps are exact: products with powers of two, and fewer than 2048 units.
template <> __host__ __device__ inline fp16 round_stochastic<fp16>(float x, uint32_t random) {
    const uint32_t exponent = float_bits_(fabsf(x)) >> 23, e = exponent > 113 ? exponent : 113; // 113: 2^-14
    if (exponent == 255) {
        return from_float<fp16>(x);
    }
    const float unit = bits_float_((e - 10) << 23), per_unit = bits_float_((264 - e) << 23);
    const float units = fabsf(x) * per_unit, whole = floorf(units);
    const float up = random < (uint32_t)((units - whole) * 0x1p32f) ? 1.0f : 0.0f;
    return from_float<fp16>(copysignf(fminf((whole + up) * unit, 65504.0f), x));
}

// rand_block of rand.h, on the device.
__device__ inline RandBlock adamw_rand_block_(uint64_t seed, uint64_t stream, uint64_t counter) {
    uint32_t x0 = (uint32_t)counter, x1 = (uint32_t)(counter >> 32);
    uint32_t x2 = (uint32_t)stream, x3 = (uint32_t)(stream >> 32);
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint64_t even = (uint64_t)0xD2511F53u * x0, odd = (uint64_t)0xCD9E8D57u * x2;
        x0 = (uint32_t)(odd >> 32) ^ x1 ^ key0;
        x1 = (uint32_t)odd;
        x2 = (uint32_t)(even >> 32) ^ x3 ^ key1;
        x3 = (uint32_t)even;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    const RandBlock block = {{x0, x1, x2, x3}};
    return block;
}

// ---- places ----

// A thread block updates a piece: four elements a thread. Groups and their shards are whole pieces.
enum { ADAMW_PIECE_ = GPT2_SHARD_UNIT, ADAMW_THREADS_ = ADAMW_PIECE_ / 4 };

// Numbers of pieces.
typedef struct {
    uint32_t once, block;  // that this process has of group 0, of each other group: part `rank` of `shards`
    uint32_t rank, shards; // equal parts
    uint32_t count;        // that it has in all
    uint32_t params_rank, params_shards; // the same in what is kept of a group of parameters
} AdamWPieces_;

// What belongs to a layout of parameters: where pieces lie, and which elements decay.
typedef struct {
    AdamWPieces_ pieces;
    uint8_t* decay; // on the GPU: for each TENSOR_ALIGN elements of group 0, and then of any one block
} AdamWPlan;

enum { ADAMW_DECAYS_ = ADAMW_PIECE_ / TENSOR_ALIGN }; // of a piece: one for each warp

// Which tensors decay. What lies between tensors is zero, and stays it either way.
static inline void adamw_set_decay_(uint8_t* decay, const TensorRow* rows) {
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        const size_t start = rows[i].offset_bytes / rows[i].element_bytes,
                     n = tensor_layer_elements(&rows[i]);
        assert(rows[i].rule == RULE_ADAMW && start % TENSOR_ALIGN == 0);
        memset(decay + start / TENSOR_ALIGN, rows[i].decay, ceil_div(n, (size_t)TENSOR_ALIGN));
    }
}

// What adamw_open allocates.
static inline size_t adamw_planned_bytes(const ZeroPlan* zero) {
    return (zero->once + zero->block) / TENSOR_ALIGN;
}

// `rows` are the parameters', for zero->size shards.
static inline void adamw_open(AdamWPlan* plan, const ZeroPlan* zero, const TensorRow* rows) {
    const ZeroCut own = zero_owned_cut(zero), in_kept = zero_owned_in_kept(zero);
    const size_t part = (size_t)own.parts * ADAMW_PIECE_, count = zero_owned_elements(zero) / ADAMW_PIECE_;
    const size_t decays = adamw_planned_bytes(zero);
    CHECK(count <= INT_MAX, "%zu pieces of parameters are too many for a launch", count);
    plan->pieces.once = (uint32_t)(zero->once / part);
    plan->pieces.block = (uint32_t)(zero->block / part);
    plan->pieces.rank = (uint32_t)own.part;
    plan->pieces.shards = (uint32_t)own.parts;
    plan->pieces.count = (uint32_t)count;
    plan->pieces.params_rank = (uint32_t)in_kept.part;
    plan->pieces.params_shards = (uint32_t)in_kept.parts;
    plan->decay = (uint8_t*)gpu_alloc(decays, 1, "weight decay of tensors");
    uint8_t* decay = (uint8_t*)check_alloc(decays, 1, "weight decay of tensors");
    adamw_set_decay_(decay, rows);
    CUDA_CHECK(cudaMemcpy(plan->decay, decay, decays, cudaMemcpyHostToDevice));
    free(decay);
}

static inline void adamw_close(AdamWPlan* plan) { gpu_free(plan->decay); }

// Where a piece of the owned arrays lies.
typedef struct {
    uint32_t full;   // the piece of the parameters
    uint32_t group;  //
    uint32_t offset; // pieces before it in its group
    uint32_t decays; // pieces before it in AdamWPlan.decay
} AdamWPlace_;

__device__ inline AdamWPlace_ adamw_place_(const AdamWPieces_& p, uint32_t piece) {
    const uint32_t group = piece < p.once ? 0 : 1 + (piece - p.once) / p.block;
    const uint32_t begin = group == 0 ? 0 : p.once + (group - 1) * p.block; // of the group, in owned arrays
    const uint32_t part = group == 0 ? p.once : p.block, offset = p.rank * part + (piece - begin);
    const AdamWPlace_ place = {begin * p.params_shards + p.params_rank * part + (piece - begin), group,
                               offset, (group == 0 ? 0 : p.once * p.shards) + offset};
    return place;
}

static inline int is_aligned_(const void* array) { return (uintptr_t)array % 16 == 0; }

// ---- four elements ----

template <size_t BYTES> struct Word_;
template <> struct Word_<8> { typedef int2 Type; };
template <> struct Word_<16> { typedef int4 Type; };

// In registers, and the type of one access to them.
template <class X> struct alignas(4 * sizeof(X)) Four_ {
    X element[4];
    typedef typename Word_<4 * sizeof(X)>::Type Word;
};

// The data passes once a step: it leaves the caches alone.
template <class X> __device__ inline Four_<X> four_load_(const X* from) {
    typedef typename Four_<X>::Word Word;
    Four_<X> four;
    *reinterpret_cast<Word*>(&four) = __ldcs(reinterpret_cast<const Word*>(from));
    return four;
}

template <class X> __device__ inline void four_store_(X* to, const Four_<X>& four) {
    typedef typename Four_<X>::Word Word;
    __stcs(reinterpret_cast<Word*>(to), *reinterpret_cast<const Word*>(&four));
}

template <class To, class From> __device__ inline Four_<To> four_convert_(const Four_<From>& from) {
    Four_<To> to;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        to.element[k] = from_float<To>(to_float(from.element[k]));
    }
    return to;
}

template <class T>
__device__ inline Four_<T> four_round_stochastic_(const Four_<float>& x, const RandBlock& random) {
    Four_<T> rounded;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        rounded.element[k] = round_stochastic<T>(x.element[k], random.word[k]);
    }
    return rounded;
}

// ---- the update ----

// What the update of one element needs of AdamW.
typedef struct {
    float beta1, beta2, eps, grad_scale;
    float step;         // lr / (1 - beta1^t)
    float v_correction; // 1 / (1 - beta2^t)
    float keep;         // 1 - lr weight_decay
} AdamWScalars_;

static inline AdamWScalars_ adamw_scalars_(AdamW opt) {
    AdamWScalars_ s;
    s.beta1 = opt.beta1, s.beta2 = opt.beta2, s.eps = opt.eps, s.grad_scale = opt.grad_scale;
    s.step = (float)(opt.lr / (1 - pow(opt.beta1, (double)opt.t)));
    s.v_correction = (float)(1 / (1 - pow(opt.beta2, (double)opt.t)));
    s.keep = (float)(1 - (double)opt.lr * opt.weight_decay);
    return s;
}

// The new parameter. Fused multiply-adds are written out: a compiler may choose others for another GPU, and
// the bits would differ.
__device__ inline float adamw_element_(float param, float grad, float* m, float* v, float keep,
                                       const AdamWScalars_& s) {
    const float g = grad * s.grad_scale;
    *m = fmaf(s.beta1, *m, (1.0f - s.beta1) * g);
    *v = fmaf(s.beta2, *v, (1.0f - s.beta2) * g * g);
    return fmaf(keep, param, -(s.step * *m / (sqrtf(*v * s.v_correction) + s.eps)));
}

// All that belongs to four elements, by the pointers to them.
template <class T, class G> struct AdamWFour_ {
    T* params;
    float* master; // NULL: there are none
    const G* grads;
    float *m, *v;
};

// Updates them. All is loaded before anything is computed. `random` is a block of stream `stream`.
template <class T, class G>
__device__ inline void adamw_four_(const AdamWFour_<T, G>& a, float keep, const AdamWScalars_& scalars,
                                   uint64_t seed, uint64_t stream, uint64_t random) {
    const Four_<G> g = four_load_(a.grads);
    Four_<float> m = four_load_(a.m), v = four_load_(a.v);
    Four_<float> x = a.master ? four_load_(a.master) : four_convert_<float>(four_load_(a.params));
#pragma unroll
    for (int k = 0; k < 4; k++) {
        x.element[k] =
            adamw_element_(x.element[k], to_float(g.element[k]), &m.element[k], &v.element[k], keep, scalars);
    }
    four_store_(a.m, m);
    four_store_(a.v, v);
    if (a.master) {
        four_store_(a.master, x);
        four_store_(a.params, four_convert_<T>(x));
    } else {
        // not computed for T = float, no use
        four_store_(a.params, four_round_stochastic_<T>(x, adamw_rand_block_(seed, stream, random)));
    }
}

// A thread updates four elements, a block of threads a piece: 16-byte accesses to fp32 data, 8-byte to 16-bit
// data, coalesced. A warp's elements decay or do not: they are TENSOR_ALIGN. Master weights, m and v start with piece
// `first`, all else with piece 0.
// grid   pieces      block   256      shared   none
// moves  adamw_bytes. Bound by memory: Philox takes some 30 instructions an element, the rest some 50,
//        together less than half of what an H100 can issue in the time.
// order  every element on its own
template <class T, class G>
__global__ void __launch_bounds__(ADAMW_THREADS_)
    adamw_kernel_(T* params, float* master, const G* grads, float* m, float* v, const uint8_t* decay,
                  const __grid_constant__ AdamWPieces_ pieces, uint32_t first,
                  const __grid_constant__ AdamWScalars_ scalars, uint64_t seed, uint64_t stream) {
    const uint32_t piece = first + blockIdx.x;
    const AdamWPlace_ place = adamw_place_(pieces, piece);
    const size_t state = (size_t)blockIdx.x * ADAMW_PIECE_ + 4 * threadIdx.x,
                 owned = (size_t)piece * ADAMW_PIECE_ + 4 * threadIdx.x,
                 full = (size_t)place.full * ADAMW_PIECE_ + 4 * threadIdx.x;
    const int decays = decay[(size_t)place.decays * ADAMW_DECAYS_ + threadIdx.x / 32];
    const uint64_t random =
        ((uint64_t)place.group << 38) + (uint64_t)place.offset * (ADAMW_PIECE_ / 4) + threadIdx.x;
    const AdamWFour_<T, G> four = {params + full, master ? master + state : NULL, grads + owned, m + state,
                                   v + state};
    adamw_four_(four, decays ? scalars.keep : 1.0f, scalars, seed, stream, random);
}

// All that an update takes; as above.
template <class T> struct AdamWUpdate {
    T* params;
    float* master; // NULL: there are none
    Gradient grads;
    float *m, *v;
    const AdamWPlan* plan;
    AdamW opt;
    uint64_t seed;
};

// The update of `count` elements from `first` on, both multiples of GPT2_SHARD_UNIT, of those that this process owns:
// master, m and v have only these.
template <class T>
static inline void adamw_update_part(const AdamWUpdate<T>& u, size_t first, size_t count, const Gpu* gpu) {
    const uint64_t stream = rand_stream("adamw") + (uint64_t)u.opt.t;
    assert(is_aligned_(u.params) && is_aligned_(u.master) && is_aligned_(u.grads.data) && is_aligned_(u.m) &&
           is_aligned_(u.v) && first % ADAMW_PIECE_ == 0 && count % ADAMW_PIECE_ == 0);
    GRADIENT_DISPATCH(u.grads, T,
                      launch(adamw_kernel_<T, G>, (unsigned)(count / ADAMW_PIECE_), ADAMW_THREADS_, 0, gpu,
                             u.params, u.master, (const G*)u.grads.data, u.m, u.v, u.plan->decay,
                             u.plan->pieces, (uint32_t)(first / ADAMW_PIECE_), adamw_scalars_(u.opt), u.seed,
                             stream));
}

// Of all of them.
template <class T> static inline void adamw_update(const AdamWUpdate<T>& u, const Gpu* gpu) {
    adamw_update_part(u, 0, (size_t)u.plan->pieces.count * ADAMW_PIECE_, gpu);
}

// Reads grad, m, v and the parameter or its master; writes m, v, the parameter and its master.
static inline double adamw_bytes(double n, DType params, DType grads, MasterWeights master) {
    const size_t moments = 4 * sizeof(float), p = dtype_bytes(params);
    const size_t weights = master == MASTER_FP32 ? 2 * sizeof(float) + p : 2 * p;
    return n * (double)(dtype_bytes(grads) + moments + weights);
}

// ---- the gradient's norm ----

enum { SUM_THREADS_ = 1024, NORM_THREADS_ = 256, NORM_UNITS_ = 16 };

// Memory for the sum of each unit of GRADIENT_BLOCK elements.
typedef struct {
    WideSum* partial; // each of NORM_UNITS_ units
    int units;
} GradientNorm;

// What gradient_norm_open allocates.
static inline size_t gradient_norm_planned_bytes(size_t n) {
    return ceil_div(n / GRADIENT_BLOCK, (size_t)NORM_UNITS_) * sizeof(WideSum);
}

// For gradients of n elements, a multiple of GRADIENT_BLOCK.
static inline void gradient_norm_open(GradientNorm* norm, size_t n) {
    const size_t units = n / GRADIENT_BLOCK;
    assert(n % GRADIENT_BLOCK == 0 && units <= INT_MAX);
    norm->units = (int)units;
    norm->partial =
        (WideSum*)gpu_alloc(gradient_norm_planned_bytes(n), 1, "partial sums of the gradient's norm");
}

static inline void gradient_norm_close(GradientNorm* norm) {
    gpu_free(norm->partial);
    memset(norm, 0, sizeof(*norm));
}

// The sum of the squares of a unit, by a warp, the same for all lanes: a lane adds up 32, a tree the lanes. fp16
// cannot overflow it, 65504^2 * 1024 is 4e12. Other types give infinity where gradients exceed 1e17, and that is
// what the caller should see.
template <class G> __device__ inline float unit_square_sum_(const G* unit) {
    constexpr int N = Pack<G>::SIZE;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < GRADIENT_BLOCK; i += 32 * N) {
        const Pack<G> pack = load_pack_once(unit + i + N * (threadIdx.x % 32));
#pragma unroll
        for (int k = 0; k < N; k++) {
            sum = fmaf(to_float(pack[k]), to_float(pack[k]), sum);
        }
    }
    return warp_sum(sum);
}

// A warp sums two units in fp32. What they and the warps of a block have is added as WideSum, so it does not show
// where the array is cut, if at multiples of a unit.
// grid   units / 16, rounded up      block   256      shared   8 WideSum
// moves  reads n G. Bound by memory.
// order  fixed, and the same on every GPU
template <class G>
__global__ void __launch_bounds__(NORM_THREADS_)
    square_sum_kernel_(WideSum* partial, const G* grads, int units) {
    SMEM_ARRAY(WideSum, of_warp, [NORM_THREADS_ / 32]);
    const int warp = threadIdx.x / 32, first = blockIdx.x * NORM_UNITS_;
    WideSum sum = {0, 0};
    for (int k = warp; k < NORM_UNITS_; k += NORM_THREADS_ / 32) {
        if (first + k < units) {
            wide_sum_add(&sum, unit_square_sum_(grads + (size_t)(first + k) * GRADIENT_BLOCK));
        }
    }
    if (threadIdx.x % 32 == 0) {
        of_warp[warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < NORM_THREADS_ / 32; w++) {
            wide_sum_merge(&sum, of_warp[w]);
        }
        partial[blockIdx.x] = sum;
    }
}

// Lane 0 gets the sum.
__device__ inline WideSum warp_wide_sum_(WideSum sum) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const WideSum other = {__shfl_down_sync(0xffffffffu, sum.high, distance),
                               __shfl_down_sync(0xffffffffu, sum.low, distance)};
        wide_sum_merge(&sum, other);
    }
    return sum;
}

// The sum of n sums.
// grid   1      block   1024      shared   32 WideSum
// moves  reads n WideSum. Bound by latency.
// order  fixed
__global__ void __launch_bounds__(SUM_THREADS_) sum_kernel_(WideSum* result, const WideSum* partial, int n) {
    SMEM_ARRAY(WideSum, of_warp, [32]);
    WideSum sum = {0, 0};
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < n; i += SUM_THREADS_) {
        wide_sum_merge(&sum, partial[i]);
    }
    sum = warp_wide_sum_(sum);
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    sum = warp_wide_sum_(of_warp[threadIdx.x % 32]);
    if (threadIdx.x == 0) {
        *result = sum;
    }
}

// Sets result, on the device, to the sum of the squares of the gradients, not yet scaled by grad_scale: as many
// elements as `norm` was opened for. NaN and infinity in any of them survive. Merging the sums of several processes
// gives the same bits as one sum over the whole gradient.
template <class T>
static inline void gradient_square_sum(WideSum* result, Gradient grads, GradientNorm* norm, const Gpu* gpu) {
    const int blocks = ceil_div(norm->units, (int)NORM_UNITS_);
    assert(is_aligned_(grads.data));
    GRADIENT_DISPATCH(grads, T,
                      launch(square_sum_kernel_<G>, blocks, NORM_THREADS_, 0, gpu, norm->partial,
                             (const G*)grads.data, norm->units));
    launch(sum_kernel_, 1, SUM_THREADS_, 0, gpu, result, norm->partial, blocks);
}

static inline double gradient_square_sum_bytes(double n, DType grads) {
    return n * (double)dtype_bytes(grads);
}

// ---- losses ----

__device__ inline double warp_sum_double_(double x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    }
    return x;
}

// Appends the sum of N losses, in double, to a list of `count`. Thread t adds up losses t, t + 1024, ..., and a tree
// the threads.
// grid   1      block   1024      shared   32 doubles
// moves  reads N fp32. Bound by latency.
// order  fixed
__global__ void __launch_bounds__(SUM_THREADS_)
    sum_losses_kernel_(double* sums, int64_t* count, const float* losses, int N) {
    SMEM_ARRAY(double, of_warp, [32]);
    double sum = 0;
#pragma unroll 8
    for (int i = (int)threadIdx.x; i < N; i += SUM_THREADS_) {
        sum += (double)losses[i];
    }
    sum = warp_sum_double_(sum);
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    sum = warp_sum_double_(of_warp[threadIdx.x % 32]);
    if (threadIdx.x == 0) {
        sums[(*count)++] = sum;
    }
}

// Appends the sum of the losses (N): sums[(*count)++], both on the device. So one CUDA graph serves all
// micro-steps. There must be room.
static inline void sum_losses(double* sums, int64_t* count, const float* losses, int N, const Gpu* gpu) {
    assert(N > 0);
    launch(sum_losses_kernel_, 1, SUM_THREADS_, 0, gpu, sums, count, losses, N);
}

static inline double sum_losses_bytes(double N) { return 4 * N; }

#endif
