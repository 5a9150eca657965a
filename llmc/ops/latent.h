/*
latent.h -- attention whose keys and values come from a latent that all heads share: the contract,
and the CPU version of what it does between its matmuls and attention.

    first (N, R)          = inp weight^T: of each token [q', c', r]: a latent of queries, or the
                            queries themselves; a latent of keys and values; a key that turns
    q (N, NH HS)          = norm(q') times a matrix, or q'
    c (N, rank)           = norm(c')
    up (N, NH (P + V))    = c times a matrix: of each head P channels of its key, then its value
    qkv (N, 3 NH HS)      query h = q_h     key h = [r, up_h's first P]     value h = up_h's last V

A head has HS = D + P channels, of which the first D turn; those of its key are r, in all heads. In
qkv a value is padded with zeros to HS channels, so attention and rotary positions (heads.h) are as
in any model; of attention's result (N, NH HS), the padding is taken out again:

    values (N, NH V)      = the first V channels of each head

    dq = dqkv's queries   dup = dqkv's keys and values without r and padding
    dr = the sum of dqkv's first D channels of keys, over the heads in their order

Generation keeps c and r, after its turn, of each token:

    cache (B, maxT, rank + D)   of B sequences of up to maxT tokens

and a step of decoding does not expand them. With a head's rows K (P, rank) and U (V, rank) of the
matrix that makes up,

    p_j = softmax of scale (q_D . r_j + (K^T q_P) . c_j)      value = U (sum_j p_j c_j)

which is the same but for rounding. DeepSeek-AI, "DeepSeek-V2", 2024.
*/
#ifndef LLMC_LATENT_H
#define LLMC_LATENT_H

#include <stddef.h>

#include "llmc/base/host_device.h"
#include "llmc/base/memory.h"
#include "llmc/ops/q8.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LATENT_NORM_EPS 1e-6f // of the norms of latents, whatever a model's other norms add

// D: channels of a head that turn; value: V. query_rank 0: queries have no latent.
typedef struct {
    int N, NH, HS, D, value, query_rank, rank;
} LatentSizes;

// Return columns: of queries in `first`; where r is there; of all; of up; and of the cache.
HOST_DEVICE int latent_queries(LatentSizes s) { return s.query_rank > 0 ? s.query_rank : s.NH * s.HS; }
HOST_DEVICE int latent_turning(LatentSizes s) { return latent_queries(s) + s.rank; }
HOST_DEVICE int latent_first(LatentSizes s) { return latent_turning(s) + s.D; }
HOST_DEVICE int latent_head_up(LatentSizes s) { return s.HS - s.D + s.value; }
HOST_DEVICE int latent_up(LatentSizes s) { return s.NH * latent_head_up(s); }
HOST_DEVICE int latent_kept(LatentSizes s) { return s.rank + s.D; }

// Sets the latents, q (N, query_rank), unless queries have none, and c (N, rank), from first.
void latent_split_cpu(float* q, float* c, const float* first, LatentSizes s);

// Sets the columns of dfirst that latent_split_cpu reads, from gradients of its results.
void latent_join_cpu(float* dfirst, const float* dq, const float* dc, LatentSizes s);

// Sets qkv. q (N, NH HS): NULL if queries have no latent. Without `up` it sets queries and r only;
// the rest are zeros.
void latent_heads_cpu(float* qkv, const float* first, const float* q, const float* up, LatentSizes s);

// Sets dq, or the queries' columns of dfirst, dup, and r's columns of dfirst.
void latent_heads_backward_cpu(float* dfirst, float* dq, float* dup, const float* dqkv, LatentSizes s);

// Sets values (N, NH V) from atty (N, NH HS), and datty from dvalues.
void latent_values_cpu(float* values, const float* atty, LatentSizes s);
void latent_values_backward_cpu(float* datty, const float* dvalues, LatentSizes s);

typedef struct {
    float* data;
    int maxT;
} LatentCache;

// Keeps row n of c and qkv, for each of `count` rows, as tokens first ... of sequence b.
void latent_store_cpu(LatentCache cache, const float* c, const float* qkv, int b, int first, int count,
                      LatentSizes s);

// The matrix that makes up: (NH (P + V), rank), or its blocks of 8 bits.
typedef struct {
    const float* data;
    const QuantizedBlock* blocks; // NULL: data
} LatentWeight;

// Memory of a step of decoding: `each` floats for each thread.
typedef struct {
    float* memory;
    size_t each;
} LatentScratch;

void latent_open(LatentScratch* scratch, Memory* memory, LatentSizes s, int maxT);

// Sets values (N, NH V) of the queries in qkv: row n is token positions[n] of sequence n, which
// sees all that are kept before, and itself. `scale` multiplies scores.
void latent_cached_cpu(float* values, const float* qkv, const int* positions, LatentWeight up, float scale,
                       LatentCache cache, LatentScratch* scratch, LatentSizes s);

#ifdef __cplusplus
}
#endif

#ifdef LATENT_IMPLEMENTATION

#include <assert.h>
#include <math.h>
#include <string.h>

#include "llmc/base/threads.h"
#include "llmc/base/vec.h"

static void latent_copy_(float* to, const float* from, int n) { memcpy(to, from, (size_t)n * sizeof(float)); }

void latent_split_cpu(float* q, float* c, const float* first, LatentSizes s) {
    const size_t R = (size_t)latent_first(s), rank = (size_t)s.rank, query_rank = (size_t)s.query_rank;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < s.N; n++) {
        const float* row = first + (size_t)n * R;
        if (s.query_rank > 0) {
            latent_copy_(q + (size_t)n * query_rank, row, s.query_rank);
        }
        latent_copy_(c + (size_t)n * rank, row + latent_queries(s), s.rank);
    }
}

void latent_join_cpu(float* dfirst, const float* dq, const float* dc, LatentSizes s) {
    const size_t R = (size_t)latent_first(s), rank = (size_t)s.rank, query_rank = (size_t)s.query_rank;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < s.N; n++) {
        float* row = dfirst + (size_t)n * R;
        if (s.query_rank > 0) {
            latent_copy_(row, dq + (size_t)n * query_rank, s.query_rank);
        }
        latent_copy_(row + latent_queries(s), dc + (size_t)n * rank, s.rank);
    }
}

// Sets key and value h of a token, (HS) each; `up` is the head's, or NULL.
static void latent_head_(float* key, float* value, const float* turning, const float* up, LatentSizes s) {
    const int P = s.HS - s.D;
    latent_copy_(key, turning, s.D);
    memset(value, 0, (size_t)s.HS * sizeof(float));
    if (up) {
        latent_copy_(key + s.D, up, P);
        latent_copy_(value, up + P, s.value);
    } else {
        memset(key + s.D, 0, (size_t)P * sizeof(float));
    }
}

void latent_heads_cpu(float* qkv, const float* first, const float* q, const float* up, LatentSizes s) {
    const size_t R = (size_t)latent_first(s), Q = (size_t)s.NH * (size_t)s.HS, UP = (size_t)latent_up(s);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < s.N; n++) {
        const float* row = first + (size_t)n * R;
        float *queries = qkv + (size_t)n * 3 * Q, *keys = queries + Q, *values = keys + Q;
        memcpy(queries, q ? q + (size_t)n * Q : row, Q * sizeof(float));
        for (int h = 0; h < s.NH; h++) {
            latent_head_(keys + (size_t)h * s.HS, values + (size_t)h * s.HS, row + latent_turning(s),
                         up ? up + (size_t)n * UP + (size_t)h * latent_head_up(s) : NULL, s);
        }
    }
}

void latent_heads_backward_cpu(float* dfirst, float* dq, float* dup, const float* dqkv, LatentSizes s) {
    const size_t R = (size_t)latent_first(s), Q = (size_t)s.NH * (size_t)s.HS, UP = (size_t)latent_up(s);
    const int P = s.HS - s.D;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < s.N; n++) {
        const float *queries = dqkv + (size_t)n * 3 * Q, *keys = queries + Q, *values = keys + Q;
        float *row = dfirst + (size_t)n * R, *turning = row + latent_turning(s);
        memcpy(dq ? dq + (size_t)n * Q : row, queries, Q * sizeof(float));
        latent_copy_(turning, keys, s.D);
        for (int h = 0; h < s.NH; h++) {
            const float* key = keys + (size_t)h * s.HS;
            float* up = dup + (size_t)n * UP + (size_t)h * latent_head_up(s);
            for (int d = 0; d < s.D && h > 0; d++) {
                turning[d] += key[d];
            }
            latent_copy_(up, key + s.D, P);
            latent_copy_(up + P, values + (size_t)h * s.HS, s.value);
        }
    }
}

void latent_values_cpu(float* values, const float* atty, LatentSizes s) {
#pragma omp parallel for schedule(static)
    for (int i = 0; i < s.N * s.NH; i++) {
        latent_copy_(values + (size_t)i * s.value, atty + (size_t)i * s.HS, s.value);
    }
}

void latent_values_backward_cpu(float* datty, const float* dvalues, LatentSizes s) {
#pragma omp parallel for schedule(static)
    for (int i = 0; i < s.N * s.NH; i++) {
        float* to = datty + (size_t)i * s.HS;
        latent_copy_(to, dvalues + (size_t)i * s.value, s.value);
        memset(to + s.value, 0, (size_t)(s.HS - s.value) * sizeof(float));
    }
}

// ---- generation ----

void latent_store_cpu(LatentCache cache, const float* c, const float* qkv, int b, int first, int count,
                      LatentSizes s) {
    const size_t kept = (size_t)latent_kept(s), Q = (size_t)s.NH * (size_t)s.HS;
    float* to = cache.data + ((size_t)b * (size_t)cache.maxT + (size_t)first) * kept;
    assert(first + count <= cache.maxT);
    for (int t = 0; t < count; t++, to += kept) {
        latent_copy_(to, c + (size_t)t * s.rank, s.rank);
        latent_copy_(to + s.rank, qkv + (size_t)t * 3 * Q + Q, s.D); // of the first head's key
    }
}

// Floats of a thread: a query, a sum of latents, a row of the matrix, and scores of maxT tokens.
void latent_open(LatentScratch* scratch, Memory* memory, LatentSizes s, int maxT) {
    scratch->each = (size_t)latent_kept(s) + 2 * (size_t)s.rank + (size_t)maxT;
    scratch->memory = (float*)memory_take(memory, "scratch: attention of latents", MEMORY_DEVICE,
                                          (size_t)threads_max() * scratch->each * sizeof(float));
}

// Returns row `row` of the matrix, perhaps in `room`.
static const float* latent_row_(LatentWeight up, size_t row, float* room, LatentSizes s) {
    const size_t rank = (size_t)s.rank;
    if (!up.blocks) {
        return up.data + row * rank;
    }
    quantized_decode(room, up.blocks + row * (rank / QUANTIZED_BLOCK), rank);
    return room;
}

static void latent_add_(float* to, float factor, const float* x, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec_store(to + i, vec_load(to + i) + factor * vec_load(x + i));
    }
    for (; i < n; i++) {
        to[i] += factor * x[i];
    }
}

// Sets the query of a head as latents and turning keys see it, (rank + D).
static void latent_query_(float* to, const float* q, LatentWeight up, size_t first_row, float* room,
                          LatentSizes s) {
    memset(to, 0, (size_t)s.rank * sizeof(float));
    for (int i = 0; i < s.HS - s.D; i++) {
        latent_add_(to, q[s.D + i], latent_row_(up, first_row + (size_t)i, room, s), s.rank);
    }
    latent_copy_(to + s.rank, q, s.D);
}

// Sets the sum of `count` latents that a query sees.
static void latent_see_(float* sum, const float* query, const float* kept, int count, float* scores,
                        float scale, LatentSizes s) {
    const int row = latent_kept(s);
    float max = -INFINITY, total = 0;
    for (int u = 0; u < count; u++) {
        scores[u] = scale * vec_dot(query, kept + (size_t)u * (size_t)row, row);
        max = fmaxf(max, scores[u]);
    }
    memset(sum, 0, (size_t)s.rank * sizeof(float));
    for (int u = 0; u < count; u++) {
        const float p = expf(scores[u] - max);
        total += p;
        latent_add_(sum, p, kept + (size_t)u * (size_t)row, s.rank);
    }
    for (int i = 0; i < s.rank; i++) {
        sum[i] /= total;
    }
}

void latent_cached_cpu(float* values, const float* qkv, const int* positions, LatentWeight up, float scale,
                       LatentCache cache, LatentScratch* scratch, LatentSizes s) {
    const size_t Q = (size_t)s.NH * (size_t)s.HS, kept = (size_t)latent_kept(s);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < s.N * s.NH; i++) {
        const int n = i / s.NH, h = i % s.NH;
        const size_t row = (size_t)h * (size_t)latent_head_up(s), of_value = row + (size_t)(s.HS - s.D);
        float *query = scratch->memory + (size_t)thread_index() * scratch->each, *sum = query + kept,
              *room = sum + s.rank, *scores = room + s.rank;
        latent_query_(query, qkv + (size_t)n * 3 * Q + (size_t)h * s.HS, up, row, room, s);
        latent_see_(sum, query, cache.data + (size_t)n * (size_t)cache.maxT * kept, positions[n] + 1, scores,
                    scale, s);
        for (int v = 0; v < s.value; v++) {
            values[(size_t)i * s.value + v] =
                vec_dot(latent_row_(up, of_value + (size_t)v, room, s), sum, s.rank);
        }
    }
}

#endif // LATENT_IMPLEMENTATION

#endif
