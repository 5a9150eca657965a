/*
adamw.cuh -- adamw.h on the GPU, for all parameters in one launch; the gradient's norm; master weights;
stochastic rounding; the mean loss.

Parameters (T), gradients (T or fp32), master weights, m and v (fp32) are one allocation each, and all are cut
alike: element i of one belongs to element i of the others. AdamWSegments lists the tensors in them; what lies
between segments is padding and is neither read nor written. Arrays begin at multiples of 16 bytes.

    params    (n)   T      set; without master weights also read
    master    (n)   fp32   updated; NULL: there are none
    grads     (n)   T or fp32
    m, v      (n)   fp32   updated

With master weights the parameters are those, rounded to nearest. Without them a 16-bit parameter is updated
in fp32 and rounded stochastically: up or down with the probabilities that make the result right on average,
so that updates smaller than half a unit in the last place are not lost for ever. Element i of update t takes
word i of stream "adamw" + t of `seed` (rand.h): the same on every rank, whatever the launch. A rank that
holds a part of the model under other indices takes other words, which is as good.

defines: ADAMW_SEGMENTS, AdamWSegments, MasterWeights, round_stochastic, adamw_update, adamw_bytes,
         params_from_master, master_from_params, GradientNorm, gradient_norm_open, gradient_norm_close,
         gradient_square_sum, gradient_square_sum_bytes, mean_loss, mean_loss_bytes
*/
#ifndef LLMC_ADAMW_CUH
#define LLMC_ADAMW_CUH

#include <assert.h>
#include <float.h>
#include <limits.h>

#include "llmc/base/rand.h"
#include "llmc/adamw.h"
#include "llmc/gpu.cuh"
#include "llmc/gradient.h"

enum { ADAMW_SEGMENTS = 32 };

// Tensor s is elements start[s] ... end[s]-1; starts are multiples of 8. Weight decay acts where decay[s].
typedef struct {
    int count;
    size_t start[ADAMW_SEGMENTS], end[ADAMW_SEGMENTS];
    int decay[ADAMW_SEGMENTS];
} AdamWSegments;

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

// Word j; an array that is indexed at run time would leave the registers.
__device__ inline uint32_t rand_word_(const RandBlock& block, int j) {
    const uint32_t* word = block.word;
    return j < 2 ? (j == 0 ? word[0] : word[1]) : (j == 2 ? word[2] : word[3]);
}

// ---- segments ----

// Segments are cut into pieces of equal size, one per thread block, so that one launch updates all tensors.

typedef struct {
    AdamWSegments segments;
    int first[ADAMW_SEGMENTS]; // the first piece of each segment; INT_MAX where there is no segment
    int count, piece_elements; // pieces in all
} SegmentPieces_;

typedef struct {
    size_t start, end;
    int segment;
} Piece_;

static inline SegmentPieces_ segment_pieces_(const AdamWSegments& segments, int piece_elements) {
    SegmentPieces_ pieces;
    size_t count = 0;
    CHECK(0 <= segments.count && segments.count <= ADAMW_SEGMENTS,
          "%d segments of parameters; wanted at most %d", segments.count, ADAMW_SEGMENTS);
    memset(&pieces, 0, sizeof(pieces));
    pieces.segments = segments;
    pieces.piece_elements = piece_elements;
    for (int s = 0; s < ADAMW_SEGMENTS; s++) {
        pieces.first[s] = s < segments.count ? (int)count : INT_MAX;
        if (s < segments.count) {
            const size_t start = segments.start[s], end = segments.end[s];
            CHECK(start % 8 == 0 && start <= end,
                  "segment %d of the parameters is %zu ... %zu; wanted a start that is a multiple of 8", s,
                  start, end);
            count += ceil_div(end - start, (size_t)piece_elements);
            CHECK(count < INT_MAX, "%zu pieces of parameters are too many for a launch", count);
        }
    }
    pieces.count = (int)count;
    return pieces;
}

static inline int is_aligned_(const void* array) { return (uintptr_t)array % 16 == 0; }

// Finds this block's piece: the segment is the last one that starts at or before it. All threads look at the
// same words, which is what constant memory, where kernel arguments are, is good at.
__device__ inline Piece_ segment_piece_(const SegmentPieces_& pieces) {
    const int block = (int)blockIdx.x;
    int s = 0;
#pragma unroll
    for (int step = ADAMW_SEGMENTS / 2; step > 0; step /= 2) {
        if (pieces.first[s + step] <= block) {
            s += step;
        }
    }
    const size_t start = pieces.segments.start[s] + (size_t)(block - pieces.first[s]) * pieces.piece_elements;
    const size_t end = pieces.segments.end[s], full_end = start + pieces.piece_elements;
    const Piece_ piece = {start, full_end < end ? full_end : end, s};
    return piece;
}

template <size_t BYTES> struct Word_;
template <> struct Word_<2> { typedef short Type; };
template <> struct Word_<4> { typedef int Type; };
template <> struct Word_<8> { typedef int2 Type; };
template <> struct Word_<16> { typedef int4 Type; };

// N elements in registers, and the type of one access to them.
template <class X, int N> struct alignas(N * sizeof(X)) Few_ {
    X element[N];
    typedef typename Word_<N * sizeof(X)>::Type Word;
};

// Elements i ... i+N-1 of x; i is a multiple of N. The data passes once a step: it leaves the caches alone.
template <int N, class X> __device__ inline Few_<X, N> few_load_(const X* x, size_t i) {
    typedef typename Few_<X, N>::Word Word;
    Few_<X, N> few;
    *reinterpret_cast<Word*>(&few) = __ldcs(reinterpret_cast<const Word*>(x + i));
    return few;
}

template <int N, class X> __device__ inline void few_store_(X* x, const Few_<X, N>& few, size_t i) {
    typedef typename Few_<X, N>::Word Word;
    __stcs(reinterpret_cast<Word*>(x + i), *reinterpret_cast<const Word*>(&few));
}

template <class To, class From, int N> __device__ inline Few_<To, N> few_convert_(const Few_<From, N>& from) {
    Few_<To, N> to;
#pragma unroll
    for (int k = 0; k < N; k++) {
        to.element[k] = from_float<To>(to_float(from.element[k]));
    }
    return to;
}

// ---- the update ----

enum { ADAMW_THREADS_ = 256, ADAMW_PIECE_ = 4 * ADAMW_THREADS_ };

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

template <class T, int N>
__device__ inline Few_<T, N> few_round_stochastic_(const Few_<float, N>& x, uint64_t seed, uint64_t stream,
                                                   size_t i) {
    const RandBlock random = adamw_rand_block_(seed, stream, i / 4); // not computed for T = float, no use
    Few_<T, N> rounded;
#pragma unroll
    for (int k = 0; k < N; k++) {
        rounded.element[k] = round_stochastic<T>(x.element[k], rand_word_(random, N == 4 ? k : (int)(i % 4)));
    }
    return rounded;
}

template <class T, class G> struct AdamWArrays_ {
    T* params;
    float* master;
    const G* grads;
    float *m, *v;
};

// Elements i ... i+N-1. All is loaded before anything is computed.
template <int N, class T, class G>
__device__ inline void adamw_few_(const AdamWArrays_<T, G>& a, size_t i, float keep,
                                  const AdamWScalars_& scalars, uint64_t seed, uint64_t stream) {
    const Few_<G, N> g = few_load_<N>(a.grads, i);
    Few_<float, N> m = few_load_<N>(a.m, i), v = few_load_<N>(a.v, i);
    Few_<float, N> x = a.master ? few_load_<N>(a.master, i) : few_convert_<float>(few_load_<N>(a.params, i));
#pragma unroll
    for (int k = 0; k < N; k++) {
        x.element[k] =
            adamw_element_(x.element[k], to_float(g.element[k]), &m.element[k], &v.element[k], keep, scalars);
    }
    few_store_(a.m, m, i);
    few_store_(a.v, v, i);
    if (a.master) {
        few_store_(a.master, x, i);
        few_store_(a.params, few_convert_<T>(x), i);
    } else {
        few_store_(a.params, few_round_stochastic_<T>(x, seed, stream, i), i);
    }
}

// A thread updates four elements, a block 1024 of one segment: 16-byte accesses to fp32 data, 8-byte to
// 16-bit data, coalesced. The last one to three elements of a segment go one by one.
// grid   pieces of 1024 elements      block   256      shared   none
// moves  adamw_bytes. Bound by memory: Philox takes some 30 instructions an element, the rest some 50,
//        together less than half of what an H100 can issue in the time.
// order  every element on its own
template <class T, class G>
__global__ void __launch_bounds__(ADAMW_THREADS_)
    adamw_kernel_(T* params, float* master, const G* grads, float* m, float* v,
                  const __grid_constant__ SegmentPieces_ pieces,
                  const __grid_constant__ AdamWScalars_ scalars, uint64_t seed, uint64_t stream) {
    const AdamWArrays_<T, G> arrays = {params, master, grads, m, v};
    const Piece_ piece = segment_piece_(pieces);
    const float keep = pieces.segments.decay[piece.segment] ? scalars.keep : 1.0f;
    size_t i = piece.start + 4 * threadIdx.x;
    if (i + 4 <= piece.end) {
        adamw_few_<4>(arrays, i, keep, scalars, seed, stream);
    } else {
        for (; i < piece.end; i++) {
            adamw_few_<1>(arrays, i, keep, scalars, seed, stream);
        }
    }
}

template <class T>
static inline void adamw_update(T* params, float* master, Gradient grads, float* m, float* v,
                                AdamWSegments segments, AdamW opt, uint64_t seed, const Gpu* gpu) {
    const SegmentPieces_ pieces = segment_pieces_(segments, ADAMW_PIECE_);
    const uint64_t stream = rand_stream("adamw") + (uint64_t)opt.t;
    assert(is_aligned_(params) && is_aligned_(master) && is_aligned_(grads.data) && is_aligned_(m) &&
           is_aligned_(v));
    if (pieces.count > 0) {
        GRADIENT_DISPATCH(grads, T,
                          launch(adamw_kernel_<T, G>, pieces.count, ADAMW_THREADS_, 0, gpu, params, master,
                                 (const G*)grads.data, m, v, pieces, adamw_scalars_(opt), seed, stream));
    }
}

// Reads grad, m, v and the parameter or its master; writes m, v, the parameter and its master.
static inline double adamw_bytes(double n, DType params, DType grads, MasterWeights master) {
    const size_t moments = 4 * sizeof(float), p = dtype_bytes(params);
    const size_t weights = master == MASTER_FP32 ? 2 * sizeof(float) + p : 2 * p;
    return n * (double)(dtype_bytes(grads) + moments + weights);
}

// ---- master weights ----

// Converts all segments; a thread takes four elements.
// grid   pieces of 1024 elements      block   256      shared   none
// moves  reads n From, writes n To. Bound by memory.
// order  every element on its own
template <class To, class From>
__global__ void __launch_bounds__(ADAMW_THREADS_)
    segments_convert_kernel_(To* to, const From* from, const __grid_constant__ SegmentPieces_ pieces) {
    const Piece_ piece = segment_piece_(pieces);
    size_t i = piece.start + 4 * threadIdx.x;
    if (i + 4 <= piece.end) {
        few_store_(to, few_convert_<To>(few_load_<4>(from, i)), i);
    } else {
        for (; i < piece.end; i++) {
            to[i] = from_float<To>(to_float(from[i]));
        }
    }
}

template <class To, class From>
static inline void segments_convert_(To* to, const From* from, const AdamWSegments& segments,
                                     const Gpu* gpu) {
    const SegmentPieces_ pieces = segment_pieces_(segments, ADAMW_PIECE_);
    assert(is_aligned_(to) && is_aligned_(from));
    if (pieces.count > 0) {
        launch(segments_convert_kernel_<To, From>, pieces.count, ADAMW_THREADS_, 0, gpu, to, from, pieces);
    }
}

// Sets the parameters to the master weights, rounded to nearest.
template <class T>
static inline void params_from_master(T* params, const float* master, AdamWSegments segments,
                                      const Gpu* gpu) {
    segments_convert_(params, master, segments, gpu);
}

template <class T>
static inline void master_from_params(float* master, const T* params, AdamWSegments segments,
                                      const Gpu* gpu) {
    segments_convert_(master, params, segments, gpu);
}

// ---- sums ----

enum { SUM_THREADS_ = 1024 };

__device__ inline double warp_sum_double_(double x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    }
    return x;
}

// The sum of x (n) by one block of SUM_THREADS_, the same for all threads: thread t adds up elements t,
// t + 1024, ..., and a tree the threads. Once in a kernel: the array is not free for a second sum.
__device__ inline double sum_by_block_(const float* x, int n) {
    SMEM_ARRAY(double, of_warp, [32]);
    double sum = 0;
#pragma unroll 8
    for (int i = (int)threadIdx.x; i < n; i += SUM_THREADS_) {
        sum += (double)x[i];
    }
    sum = warp_sum_double_(sum);
    if (threadIdx.x % 32 == 0) {
        of_warp[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    return warp_sum_double_(of_warp[threadIdx.x % 32]);
}

enum { GRADIENT_PIECE_ = 16384 };

// Room for the sums of all pieces of GRADIENT_PIECE_ elements.
typedef struct {
    float* partial;
    int count;
} GradientNorm;

static inline void gradient_norm_open(GradientNorm* norm, AdamWSegments segments) {
    norm->count = segment_pieces_(segments, GRADIENT_PIECE_).count;
    norm->partial =
        (float*)gpu_alloc((size_t)norm->count, sizeof(float), "partial sums of the gradient's norm");
}

static inline void gradient_norm_close(GradientNorm* norm) {
    gpu_free(norm->partial);
    memset(norm, 0, sizeof(*norm));
}

template <class G> __device__ inline float pack_square_sum_(const Pack<G>& g, float sum) {
#pragma unroll
    for (int k = 0; k < Pack<G>::SIZE; k++) {
        sum = fmaf(to_float(g[k]), to_float(g[k]), sum);
    }
    return sum;
}

// A block sums the squares of a piece of GRADIENT_PIECE_ elements, in fp32: a thread at most 65, then a tree.
// fp16 cannot overflow it, 65504^2 * GRADIENT_PIECE_ is 7e13. Other types give infinity where gradients exceed
// 1e17, and that is what the caller should see.
// grid   pieces of 16384 elements      block   256      shared   of block_sum
// moves  reads n G. Bound by memory.
// order  fixed, and the same on every GPU
template <class G>
__global__ void __launch_bounds__(ADAMW_THREADS_)
    square_sum_kernel_(float* partial, const G* grads, const __grid_constant__ SegmentPieces_ pieces) {
    constexpr int N = Pack<G>::SIZE;
    const Piece_ piece = segment_piece_(pieces);
    const G* g = grads + piece.start;
    const int n = (int)(piece.end - piece.start), packed = n / N * N;
    float sum = 0;
#pragma unroll 4
    for (int i = N * (int)threadIdx.x; i < packed; i += N * ADAMW_THREADS_) {
        sum = pack_square_sum_(load_pack_once(g + i), sum);
    }
    const int last = packed + (int)threadIdx.x; // the end that fills no pack
    if (last < n) {
        sum = fmaf(to_float(g[last]), to_float(g[last]), sum);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
    }
}

// The sum of n partial sums, in double.
// grid   1      block   1024      shared   32 doubles
// moves  reads n fp32. Bound by latency.
// order  fixed
__global__ void __launch_bounds__(SUM_THREADS_) sum_kernel_(double* result, const float* partial, int n) {
    const double sum = sum_by_block_(partial, n);
    if (threadIdx.x == 0) {
        *result = sum;
    }
}

// Sets result, one double on the device, to the sum of the squares of all gradients in the segments, not yet
// scaled by grad_scale. NaN and infinity in any of them survive.
template <class T>
static inline void gradient_square_sum(double* result, Gradient grads, AdamWSegments segments,
                                       GradientNorm* norm, const Gpu* gpu) {
    const SegmentPieces_ pieces = segment_pieces_(segments, GRADIENT_PIECE_);
    assert(pieces.count <= norm->count && is_aligned_(grads.data));
    if (pieces.count > 0) {
        GRADIENT_DISPATCH(grads, T,
                          launch(square_sum_kernel_<G>, pieces.count, ADAMW_THREADS_, 0, gpu, norm->partial,
                                 (const G*)grads.data, pieces));
    }
    launch(sum_kernel_, 1, SUM_THREADS_, 0, gpu, result, norm->partial, pieces.count);
}

static inline double gradient_square_sum_bytes(double n, DType grads) {
    return n * (double)dtype_bytes(grads);
}

// Sets the sum of N losses over `tokens`, or adds it; summed in double.
// grid   1      block   1024      shared   32 doubles
// moves  reads N fp32. Bound by latency.
// order  fixed
__global__ void __launch_bounds__(SUM_THREADS_)
    mean_loss_kernel_(float* result, const float* losses, int N, int tokens, GradientMode mode) {
    const double mean = sum_by_block_(losses, N) / tokens;
    if (threadIdx.x == 0) {
        *result = (float)(mode == GRADIENT_ADD ? *result + mean : mean);
    }
}

// Sets or adds to result, one float on the device, the sum of the losses (N) divided by `tokens`: their mean,
// if the losses of all other tokens are 0.
static inline void mean_loss(float* result, const float* losses, int N, int tokens, GradientMode mode,
                             const Gpu* gpu) {
    assert(N > 0 && tokens > 0);
    launch(mean_loss_kernel_, 1, SUM_THREADS_, 0, gpu, result, losses, N, tokens, mode);
}

static inline double mean_loss_bytes(double N) { return 4 * N; }

#endif
