/*
router.cuh -- router.h on the GPU: the same functions, computed in fp32. dlogits are of X = float,
bf16 or fp16.

    dlogits   (N, E)   rows are router_stride(E) elements apart, with zeros after E, as
                       expert_matmul.cuh reads them

NaN is the smallest score, so that the choice is always a valid one. The counts of rows are
integers: atomics on them give the same result in any order.
*/
#ifndef LLMC_ROUTER_CUH
#define LLMC_ROUTER_CUH

#include "llmc/gpu/gpu.cuh"
#include "llmc/ops/expert_rows.cuh"
#include "llmc/ops/router.h"

enum {
    ROUTER_WARPS = 8,
    ROUTER_THREADS = 32 * ROUTER_WARPS,
    // blocks of a multiprocessor, at least; without it ptxas 13.0 saves registers, and spills
    ROUTER_BLOCKS = 4,
    ROUTER_BLOCK = 1024, // threads of a block that counts; also the most experts
    ROUTER_PLACES = 4,   // places in `chosen` that such a thread looks at together
    ROUTER_TOKENS = 128  // tokens of a block in the backward pass
};
static_assert((int)ROUTER_BLOCK == (int)ROUTER_MAX_EXPERTS, "a thread for each expert");

static inline int router_stride(int E) { return expert_padded(E); }

__device__ inline float router_sigmoid_(float x) { return 1.0f / (1.0f + expf(-x)); }

// ---- one token, by a warp: lane i has experts i, i + 32, ... ----

// Largest logit of a token, and the sum of all exp(l - max).
typedef struct {
    float max, sum;
} RouterSoftmax_;

__device__ inline RouterSoftmax_ router_softmax_(const float* l, int E) {
    float max = -INFINITY, sum = 0.0f;
    for (int e = (int)threadIdx.x % 32; e < E; e += 32) {
        max = fmaxf(max, l[e]);
    }
    max = warp_max(max);
    for (int e = (int)threadIdx.x % 32; e < E; e += 32) {
        sum += expf(l[e] - max);
    }
    return {max, warp_sum(sum)};
}

// Returns p of a logit.
__device__ inline float router_probability_(float l, const RouterSoftmax_& of) {
    return expf(l - of.max) / of.sum;
}

// Returns the sum of s over all experts.
__device__ inline float router_sigmoids_(const float* l, int E) {
    float sum = 0.0f;
    for (int e = (int)threadIdx.x % 32; e < E; e += 32) {
        sum += router_sigmoid_(l[e]);
    }
    return warp_sum(sum) + ROUTER_TINY;
}

// An expert and its score; expert E: none.
typedef struct {
    float score;
    int e;
} RouterBest_;

__device__ inline RouterBest_ router_better_(RouterBest_ a, RouterBest_ b, int E) {
    const int is_b = b.e < E && (a.e == E || b.score > a.score || (b.score == a.score && b.e < a.e));
    return is_b ? b : a;
}

// Returns the best expert of all lanes, to every lane.
__device__ inline RouterBest_ router_best_(RouterBest_ best, int E) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        const RouterBest_ other = {__shfl_xor_sync(0xffffffffu, best.score, distance),
                                   __shfl_xor_sync(0xffffffffu, best.e, distance)};
        best = router_better_(best, other, E);
    }
    return best;
}

__device__ inline float router_score_(const Router& r, const float* l, int e) {
    const float score = r.kind == ROUTER_SIGMOID ? router_sigmoid_(l[e]) + (r.bias ? r.bias[e] : 0.0f) : l[e];
    return fmaxf(score, -INFINITY); // drops NaN
}

// ---- forward ----

// Returns the best expert first ... first + count - 1 but `but`, to every lane.
__device__ inline RouterBest_ router_best_of_(const Router& r, const float* l, int first, int count,
                                              int but) {
    RouterBest_ best = {-INFINITY, r.E};
    for (int e = first + (int)threadIdx.x % 32; e < first + count; e += 32) {
        if (e != but) {
            best = router_better_(best, {router_score_(r, l, e), e}, r.E);
        }
    }
    return router_best_(best, r.E);
}

// Returns the groups that a token uses: bit g. Lane g has the sum of group g.
__device__ inline unsigned router_choose_groups_(const Router& r, const float* l) {
    const int count = r.E / r.groups, lane = (int)threadIdx.x % 32;
    float own = -INFINITY;
    for (int g = 0; g < r.groups; g++) {
        const RouterBest_ first = router_best_of_(r, l, g * count, count, -1),
                          second = router_best_of_(r, l, g * count, count, first.e);
        own = lane == g ? first.score + second.score : own;
    }
    unsigned chosen = 0;
    for (int k = 0; k < r.groups_used; k++) {
        const int is_left = lane < r.groups && !(chosen >> lane & 1);
        const RouterBest_ best = router_best_({own, is_left ? lane : r.groups}, r.groups);
        chosen |= 1u << best.e;
    }
    return chosen;
}

// A warp chooses the experts of a token, the best one first.
// grid   ceil(N / 8)      block   256 = 8 tokens      shared   none
// moves  N*E fp32 in, `used` times from L1, with groups twice more; N*used out. Bound by memory.
// order  fixed
// needs  E <= 1024: a lane has a bit for each of its experts
__global__ void __launch_bounds__(ROUTER_THREADS, ROUTER_BLOCKS) router_choose_kernel(Router r) {
    const int n = (int)(blockIdx.x * ROUTER_WARPS + threadIdx.x / 32), lane = (int)threadIdx.x % 32;
    const float* l = r.logits + (size_t)n * r.E;
    unsigned taken = 0; // bit i: expert lane + 32 i
    if (n >= r.B * r.T) {
        return; // the whole warp
    }
    const int count = r.groups > 1 ? r.E / r.groups : r.E;
    const unsigned groups = r.groups > 1 ? router_choose_groups_(r, l) : 1;
    for (int k = 0; k < r.used; k++) {
        RouterBest_ best = {-INFINITY, r.E};
        for (int e = lane; e < r.E; e += 32) {
            if (!(taken >> e / 32 & 1) && groups >> e / count & 1) {
                best = router_better_(best, {router_score_(r, l, e), e}, r.E);
            }
        }
        best = router_best_(best, r.E);
        taken |= best.e % 32 == lane ? 1u << best.e / 32 : 0;
        if (lane == 0) {
            r.chosen[(size_t)n * r.used + k] = best.e;
        }
    }
}

// Sets count (E), in shared memory, of the experts in `places` places; the whole block calls it.
__device__ inline void router_count_(int* count, const int* chosen, int places, int E) {
    for (int e = (int)threadIdx.x; e < E; e += (int)blockDim.x) {
        count[e] = 0;
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < places; i += (int)blockDim.x) {
        atomicAdd(&count[chosen[i]], 1);
    }
    __syncthreads();
}

// Sets count (E), in shared memory, of the experts that tokens take, not padding; the whole block
// calls it.
__device__ inline void router_count_tokens_(int* count, const Router& r) {
    for (int e = (int)threadIdx.x; e < r.E; e += (int)blockDim.x) {
        count[e] = 0;
    }
    __syncthreads();
    for (int n = (int)threadIdx.x; n < r.B * r.T; n += (int)blockDim.x) {
        for (int k = 0; k < r.used && counted_is_token(&r.counted, n / r.T, n % r.T, r.T); k++) {
            atomicAdd(&count[r.chosen[(size_t)n * r.used + k]], 1);
        }
    }
    __syncthreads();
}

// One block counts the rows of each expert, and sets `first`.
// grid   1      block   1024      shared   4 KiB
// moves  N*used in. Bound by latency: some microseconds.
// order  free, but the counts do not depend on it
__global__ void __launch_bounds__(ROUTER_BLOCK) router_first_kernel(Router r) {
    SMEM_ARRAY(int, count, [ROUTER_MAX_EXPERTS]);
    const int e = (int)threadIdx.x;
    router_count_(count, r.chosen, r.B * r.T * r.used, r.E);
    const int rows = e < r.E ? ceil_div(count[e], (int)ROUTER_TILE) * ROUTER_TILE : 0;
    const int below = block_scan(rows);
    if (e < r.E) {
        r.first[e] = below;
    }
    if (e == r.E - 1) {
        r.first[r.E] = below + rows;
    }
}

// A block gives a row to each place in `chosen` that names its expert.
// grid   E      block   1024      shared   none
// moves  N*used in for each block, from L2; N*used out, and as many rows. Bound by latency.
// order  fixed: by place
__global__ void __launch_bounds__(ROUTER_BLOCK) router_place_kernel(Router r) {
    SMEM_ARRAY(int, end, [1]);
    const int e = (int)blockIdx.x, places = r.B * r.T * r.used, last = r.first[e + 1];
    int next = r.first[e];
    for (int begin = 0; begin < places; begin += ROUTER_PLACES * ROUTER_BLOCK) {
        const int i = begin + ROUTER_PLACES * (int)threadIdx.x;
        int is_mine[ROUTER_PLACES], count = 0;
#pragma unroll
        for (int j = 0; j < ROUTER_PLACES; j++) {
            is_mine[j] = i + j < places && r.chosen[i + j] == e;
            count += is_mine[j];
        }
        int row = next + block_scan(count);
#pragma unroll
        for (int j = 0; j < ROUTER_PLACES; j++) {
            if (is_mine[j]) {
                r.rows[i + j] = row;
                r.order[row++] = i + j;
            }
        }
        if (threadIdx.x == ROUTER_BLOCK - 1) {
            end[0] = row;
        }
        __syncthreads();
        next = end[0]; // block_scan has barriers before the next one
    }
    for (int m = next + (int)threadIdx.x; m < last; m += ROUTER_BLOCK) {
        r.order[m] = -1;
        r.scale[m] = 0.0f;
    }
}

// A warp sets the weights of a token's experts; lane k sets slot k's.
// grid   ceil(N / 8)      block   256 = 8 tokens      shared   none
// moves  N*used logits in, with ROUTER_SOFTMAX N*E; N*used out. Bound by latency.
// order  fixed
__global__ void __launch_bounds__(ROUTER_THREADS, ROUTER_BLOCKS) router_weigh_kernel(Router r) {
    const int n = (int)(blockIdx.x * ROUTER_WARPS + threadIdx.x / 32), k = (int)threadIdx.x % 32;
    const float* l = r.logits + (size_t)n * r.E;
    const size_t place = (size_t)n * r.used + k;
    const int is_slot = k < r.used;
    if (n >= r.B * r.T) {
        return; // the whole warp
    }
    const float logit = is_slot ? l[r.chosen[place]] : -INFINITY;
    float w;
    if (r.kind == ROUTER_CHOSEN) {
        const float max = warp_max(logit), e = is_slot ? expf(logit - max) : 0.0f;
        w = e / warp_sum(e);
    } else if (r.kind == ROUTER_SOFTMAX) {
        w = router_probability_(logit, router_softmax_(l, r.E));
    } else {
        const float s = is_slot ? router_sigmoid_(logit) : 0.0f;
        w = r.factor * s / (warp_sum(s) + ROUTER_TINY);
    }
    if (is_slot) {
        r.scale[r.rows[place]] = w;
    }
}

// ---- backward ----

// A token's slot in lane k: its expert (-1 after the last), weight, gradient of the weight; and the
// sum of w dw.
typedef struct {
    int e;
    float w, dw, sum;
} RouterSlot_;

__device__ inline RouterSlot_ router_slot_(const Router& r, const float* dscale, int n) {
    const int k = (int)threadIdx.x % 32;
    const size_t place = (size_t)n * r.used + k;
    RouterSlot_ slot = {-1, 0.0f, 0.0f, 0.0f};
    if (k < r.used) {
        slot = {r.chosen[place], r.scale[r.rows[place]], dscale[r.rows[place]], 0.0f};
    }
    slot.sum = warp_sum(slot.w * slot.dw);
    return slot;
}

// Returns the gradient of expert e's logit l, of probability p, from the gradients of the weights.
// All lanes call it.
__device__ inline float router_weigh_backward_(const Router& r, const RouterSlot_& slot, int e, float l,
                                               float p) {
    float dl = r.kind == ROUTER_SOFTMAX ? -p * slot.sum : 0.0f;
    for (int k = 0; k < r.used; k++) {
        const float w = __shfl_sync(0xffffffffu, slot.w, k), dw = __shfl_sync(0xffffffffu, slot.dw, k);
        if (__shfl_sync(0xffffffffu, slot.e, k) == e) {
            dl = r.kind == ROUTER_SIGMOID ? (1.0f - router_sigmoid_(l)) * w * (dw - slot.sum / r.factor)
                                          : w * (dw - slot.sum);
        }
    }
    return dl;
}

// A token's distributions p, and q, which with ROUTER_SIGMOID is s / `sigmoids`.
typedef struct {
    RouterSoftmax_ softmax;
    float sigmoids;
} RouterToken_;

__device__ inline RouterToken_ router_token_(const Router& r, const float* l) {
    return {router_softmax_(l, r.E), r.kind == ROUTER_SIGMOID ? router_sigmoids_(l, r.E) : 1.0f};
}

__device__ inline float router_q_(const Router& r, const RouterToken_& token, float l) {
    return r.kind == ROUTER_SIGMOID ? router_sigmoid_(l) / token.sigmoids
                                    : router_probability_(l, token.softmax);
}

// How many of a document's tokens take each expert.
typedef struct {
    const int* count; // (E)
    float tokens;
} RouterLoad_;

// Returns the mean of f over q: f is the share of a document's tokens that take an expert.
__device__ inline float router_mean_load_(const Router& r, const RouterToken_& token, const float* l,
                                          const RouterLoad_& load) {
    float mean = 0.0f;
    for (int e = (int)threadIdx.x % 32; e < r.E; e += 32) {
        mean += router_q_(r, token, l[e]) * ((float)load.count[e] / load.tokens);
    }
    return warp_sum(mean);
}

// Sets dl (stride) of token n; returns the entropy of q. `load` is of the token's document; dloss
// is the weight of a token.
template <class X>
__device__ inline float router_token_backward_(X* dl, const float* dscale, const Router& r, int n,
                                               const RouterLoad_& load, const RouterLosses& of, int stride) {
    const float* l = r.logits + (size_t)n * r.E;
    const RouterSlot_ slot = router_slot_(r, dscale, n);
    const RouterToken_ token = router_token_(r, l);
    const float mean = of.balance > 0.0f ? router_mean_load_(r, token, l, load) : 0.0f,
                lse = token.softmax.max + logf(token.softmax.sum);
    float entropy = 0.0f;
    for (int e0 = 0; e0 < stride; e0 += 32) { // all lanes stay together
        const int e = e0 + (int)threadIdx.x % 32, is_expert = e < r.E;
        const float logit = is_expert ? l[e] : -INFINITY, p = router_probability_(logit, token.softmax),
                    q = router_q_(r, token, logit);
        float d = router_weigh_backward_(r, slot, e, logit, p);
        if (of.balance > 0.0f && is_expert) {
            const float slope = r.kind == ROUTER_SIGMOID ? q * (1.0f - router_sigmoid_(logit)) : q;
            d += of.dloss * of.balance * (float)r.E * slope * ((float)load.count[e] / load.tokens - mean);
        }
        d += of.z_loss > 0.0f ? of.dloss * 2.0f * of.z_loss * lse * p : 0.0f;
        entropy -= is_expert && q > 0.0f ? q * logf(q) : 0.0f;
        if (e < stride) {
            dl[e] = from_float<X>(is_expert ? d : 0.0f);
        }
    }
    return warp_sum(entropy);
}

// Clears dl (stride) of a padding token.
template <class X> __device__ inline void router_clear_(X* dl, int stride) {
    for (int e = (int)threadIdx.x % 32; e < stride; e += 32) {
        dl[e] = from_float<X>(0.0f);
    }
}

// Returns the tokens of sequence b, from token t to `end` at most, that a block does together: of
// one document, whose loads it sets in count (E); without a balance, and of padding, all. The whole
// block calls it.
__device__ inline CountedSpan router_together_(int* count, RouterLoad_* load, const Router& r, int b, int t,
                                               int end, const RouterLosses& of) {
    if (!(of.balance > 0.0f && counted_is_token(&r.counted, b, t, r.T))) {
        return {t, end};
    }
    const CountedSpan document = counted_document(&r.counted, b, t, r.T);
    const int tokens = document.end - document.begin;
    __syncthreads(); // all warps are done with the document before
    router_count_(count, r.chosen + ((size_t)b * r.T + document.begin) * r.used, tokens * r.used, r.E);
    *load = {count, (float)tokens};
    return {t, min(document.end, end)};
}

// A block computes dlogits of up to 128 tokens of a sequence, document by document, a warp one
// token at a time; and the sum of their entropies.
// grid   ceil(T / 128), B      block   256      shared   4.1 KiB
// moves  N*E fp32 in, N*E of X out; with a balance loss N*used * T/128 in, from L2. Bound by
//        memory.
// order  fixed
template <class X>
__global__ void __launch_bounds__(ROUTER_THREADS, ROUTER_BLOCKS)
    router_backward_kernel(X* dlogits, float* entropies, const float* dscale, Router r, RouterLosses losses,
                           int stride) {
    SMEM_ARRAY(int, count, [ROUTER_MAX_EXPERTS]);
    SMEM_ARRAY(float, of_warp, [ROUTER_WARPS]);
    const int warp = (int)threadIdx.x / 32, b = (int)blockIdx.y, begin = (int)blockIdx.x * ROUTER_TOKENS,
              end = min(begin + ROUTER_TOKENS, r.T);
    RouterLoad_ load = {count, 1.0f};
    float entropy = 0.0f;
    losses.dloss = counted_token_weight(&r.counted, losses.dloss);
    for (int t0 = begin; t0 < end;) {
        const CountedSpan span = router_together_(count, &load, r, b, t0, end, losses);
        for (int t = span.begin + warp; t < span.end; t += ROUTER_WARPS) {
            X* dl = dlogits + ((size_t)b * r.T + t) * stride;
            if (counted_is_token(&r.counted, b, t, r.T)) {
                entropy += router_token_backward_(dl, dscale, r, b * r.T + t, load, losses, stride);
            } else {
                router_clear_(dl, stride);
            }
        }
        t0 = span.end;
    }
    if (threadIdx.x % 32 == 0) {
        of_warp[warp] = entropy;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < ROUTER_WARPS; w++) {
            entropy += of_warp[w];
        }
        entropies[blockIdx.y * gridDim.x + blockIdx.x] = entropy;
    }
}

// One block adds the tokens of each expert, and the sum of the entropies.
// grid   1      block   1024      shared   4 KiB
// moves  N*used in. Bound by latency.
// order  fixed for the entropies; it does not matter for the counts
__global__ void __launch_bounds__(ROUTER_BLOCK)
    router_statistics_kernel(double* statistics, const float* entropies, int parts, Router r) {
    SMEM_ARRAY(int, count, [ROUTER_MAX_EXPERTS]);
    const int e = (int)threadIdx.x;
    float sum = 0.0f;
    router_count_tokens_(count, r);
    for (int i = (int)threadIdx.x; i < parts; i += ROUTER_BLOCK) {
        sum += entropies[i];
    }
    sum = block_sum(sum);
    if (e < r.E) {
        statistics[e] += count[e];
    }
    if (e == 0) {
        statistics[r.E] += sum;
    }
}

// ---- launchers ----

static inline void router_forward(const Router* r, const Gpu* gpu) {
    const unsigned blocks = (unsigned)ceil_div(r->B * r->T, (int)ROUTER_WARPS);
    assert(r->E <= ROUTER_MAX_EXPERTS && r->used <= ROUTER_MAX_USED && r->groups <= ROUTER_MAX_GROUPS);
    launch(router_choose_kernel, blocks, ROUTER_THREADS, 0, gpu, *r);
    launch(router_first_kernel, 1, ROUTER_BLOCK, 0, gpu, *r);
    launch(router_place_kernel, (unsigned)r->E, ROUTER_BLOCK, 0, gpu, *r);
    launch(router_weigh_kernel, blocks, ROUTER_THREADS, 0, gpu, *r);
}

// Sets `first` of a router without tokens, which no other pass can run.
static inline void router_without_tokens(const Router* r, const Gpu* gpu) {
    CUDA_CHECK(cudaMemsetAsync(r->first, 0, (size_t)(r->E + 1) * sizeof(int), gpu->stream));
}

// Returns the floats of `entropies`.
static inline size_t router_entropies(const Router* r) {
    return (size_t)r->B * (size_t)ceil_div(r->T, (int)ROUTER_TOKENS);
}

// Sets dlogits, and `entropies`, sums over some tokens each, for router_statistics_add.
template <class X>
static inline void router_backward(X* dlogits, float* entropies, const float* dscale, const Router* r,
                                   RouterLosses losses, const Gpu* gpu) {
    assert(losses.balance == 0 || r->counted.chunks.last == 0);
    launch(router_backward_kernel<X>, dim3((unsigned)ceil_div(r->T, (int)ROUTER_TOKENS), (unsigned)r->B),
           ROUTER_THREADS, 0, gpu, dlogits, entropies, dscale, *r, losses, router_stride(r->E));
}

static inline void router_statistics_add(double* statistics, const float* entropies, const Router* r,
                                         const Gpu* gpu) {
    launch(router_statistics_kernel, 1, ROUTER_BLOCK, 0, gpu, statistics, entropies, (int)router_entropies(r),
           *r);
}

#endif
