/*
attention_sizes.h -- sizes of attention (attention.h), and how its scores are scaled and capped.
*/
#ifndef LLMC_ATTENTION_SIZES_H
#define LLMC_ATTENTION_SIZES_H

#include <math.h>

#include "llmc/base/host_device.h"
#include "llmc/base/token_chunks.h"

typedef struct {
    int B, T;   // sequences, and their tokens
    int NH, KV; // heads of queries; heads of keys and of values, a divisor of NH
    int HS;     // size of a head
    float root; // divisor of the scores
    // which tokens of their sequences these are
    TokenChunks chunks;
    float cap; // of the scores (softcap.h); 0: none
} AttentionSizes;

// Returns sizes of whole sequences with scores divided by sqrt(HS), without a cap.
static inline AttentionSizes attention_sizes(int B, int T, int NH, int KV, int HS) {
    const AttentionSizes sizes = {B, T, NH, KV, HS, sqrtf((float)HS), {0, 0}, 0};
    return sizes;
}

// How kernels compute scores: s = factor q . k without a cap, factor softcap_tanh(q . k, width)
// with one. The gradient of q . k is ds scale, with a cap also times softcap_slope.
typedef struct {
    float scale, factor, width; // 1 / root; scale or cap; cap root, or 0
} AttentionScale;

HOST_DEVICE AttentionScale attention_scale(float root, float cap) {
    const AttentionScale scale = {1.0f / root, cap > 0 ? cap : 1.0f / root, cap * root};
    return scale;
}

// Returns W, the number of keys of a sequence.
HOST_DEVICE int attention_keys(AttentionSizes sizes) { return token_chunks_length(sizes.chunks, sizes.T); }

static inline int attention_same_sizes(AttentionSizes a, AttentionSizes b) {
    return a.B == b.B && a.T == b.T && a.NH == b.NH && a.KV == b.KV && a.HS == b.HS && a.root == b.root &&
           a.cap == b.cap && a.chunks.last == b.chunks.last && a.chunks.rank == b.chunks.rank;
}

// Returns the number of heads of queries that read the same keys and values.
HOST_DEVICE int attention_group(AttentionSizes sizes) { return sizes.NH / sizes.KV; }

// Return the columns of a token's queries, of its keys or values, of queries and keys, and of its
// row of qkv.
HOST_DEVICE int attention_queries_size(AttentionSizes sizes) { return sizes.NH * sizes.HS; }
HOST_DEVICE int attention_keys_size(AttentionSizes sizes) { return sizes.KV * sizes.HS; }
HOST_DEVICE int attention_query_key_size(AttentionSizes sizes) { return (sizes.NH + sizes.KV) * sizes.HS; }
HOST_DEVICE int attention_qkv_size(AttentionSizes sizes) { return (sizes.NH + 2 * sizes.KV) * sizes.HS; }

#endif
