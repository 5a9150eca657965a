/*
context_parallel.h -- sequences that are divided among the ranks of a context group, on the CPU.

Rank q of c has T tokens of each of B sequences of W = c T tokens (token_chunks.h). All but
attention computes them by themselves. Attention needs the keys and values of all W:

    context_gather_cpu    kv (B, W, 2K), from the keys and values in each rank's qkv (B, T, QKV)
    context_sum_cpu       gradients of the rank's own keys and values: columns of dqkv (B, T, QKV),
                          from dkv (B, W, 2K) of each rank, added in fp32 in the order of ranks

Both are collective in the context group. Shapes and names are those of attention.h.
*/
#ifndef LLMC_CONTEXT_PARALLEL_H
#define LLMC_CONTEXT_PARALLEL_H

#include "llmc/base/host_device.h"
#include "llmc/base/memory.h"
#include "llmc/base/token_chunks.h"
#include "llmc/comm/group.h"
#include "llmc/ops/attention_sizes.h"

#ifdef __cplusplus
extern "C" {
#endif

// Memory of a rank for one layer at a time; none if sequences are whole.
typedef struct {
    Group* group;
    float *kv, *dkv; // (B, W, 2K)
    float* moved;    // (c, B, T, 2K) rows of each rank
} ContextParallel;

// Returns the row of (B, W) whose contents are row i of `moved`.
HOST_DEVICE size_t context_row(AttentionSizes sizes, size_t i) {
    const size_t N = (size_t)sizes.B * sizes.T, n = i % N;
    const TokenChunks of = {sizes.chunks.last, (int)(i / N)};
    return n / sizes.T * attention_keys(sizes) + token_chunks_position(of, (int)(n % sizes.T), sizes.T);
}

// Returns the elements of kv, of dkv and of `moved`; 0 if sequences are whole.
static inline size_t context_elements(AttentionSizes sizes) {
    return sizes.chunks.last > 0
               ? (size_t)sizes.B * attention_keys(sizes) * 2 * (size_t)attention_keys_size(sizes)
               : 0;
}

// Opens the memory for micro-batches of up to these sizes.
void context_open_cpu(ContextParallel* c, Memory* memory, AttentionSizes sizes, Group* group);

// Returns kv, which is valid until the next call.
const float* context_gather_cpu(const ContextParallel* c, const float* qkv, AttentionSizes sizes);

// Sets the columns of keys and values of dqkv. Overwrites kv.
void context_sum_cpu(float* dqkv, const ContextParallel* c, AttentionSizes sizes);

// Sets `all` (B, W) to the words of 4 bytes, losses for example, that ranks have for their tokens:
// `own` (B, T). Both may be the same memory.
void context_gather_tokens_cpu(void* all, const ContextParallel* c, const void* own, AttentionSizes sizes);

#ifdef __cplusplus
}
#endif

#ifdef CONTEXT_PARALLEL_IMPLEMENTATION

#include <string.h>

void context_open_cpu(ContextParallel* c, Memory* memory, AttentionSizes sizes, Group* group) {
    const size_t n = context_elements(sizes);
    memset(c, 0, sizeof(*c));
    c->group = group;
    if (n > 0) {
        float** const arrays[] = {&c->kv, &c->dkv, &c->moved};
        for (int i = 0; i < 3; i++) {
            *arrays[i] = (float*)memory_take(memory, "keys and values of other ranks", MEMORY_DEVICE,
                                             n * sizeof(float));
        }
    }
}

const float* context_gather_cpu(const ContextParallel* c, const float* qkv, AttentionSizes sizes) {
    const size_t N = (size_t)sizes.B * sizes.T, row = 2 * (size_t)attention_keys_size(sizes),
                 Q = (size_t)attention_queries_size(sizes), QKV = Q + row;
    float* own = c->moved + (size_t)sizes.chunks.rank * N * row;
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        memcpy(own + n * row, qkv + n * QKV + Q, row * sizeof(float));
    }
    group_all_gather_cpu(c->moved, own, N * row, c->group);
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < N * (size_t)c->group->size; i++) {
        memcpy(c->kv + context_row(sizes, i) * row, c->moved + i * row, row * sizeof(float));
    }
    return c->kv;
}

// Sets the columns of keys and values of a row of dqkv to the sums of `pieces` rows that are
// `piece` floats apart.
static void context_sum_row_(float* to, const float* from, size_t piece, int pieces, size_t columns) {
    for (size_t k = 0; k < columns; k++) {
        float sum = from[k];
        for (int r = 1; r < pieces; r++) {
            sum += from[(size_t)r * piece + k];
        }
        to[k] = sum;
    }
}

void context_sum_cpu(float* dqkv, const ContextParallel* c, AttentionSizes sizes) {
    const size_t N = (size_t)sizes.B * sizes.T, row = 2 * (size_t)attention_keys_size(sizes),
                 Q = (size_t)attention_queries_size(sizes), QKV = Q + row;
    const int ranks = c->group->size;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < N * (size_t)ranks; i++) {
        memcpy(c->moved + i * row, c->dkv + context_row(sizes, i) * row, row * sizeof(float));
    }
    group_all_to_all_cpu(c->kv, c->moved, N * row, c->group);
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < N; n++) {
        context_sum_row_(dqkv + n * QKV + Q, c->kv + n * row, N * row, ranks, row);
    }
}

void context_gather_tokens_cpu(void* all, const ContextParallel* c, const void* own, AttentionSizes sizes) {
    const size_t N = (size_t)sizes.B * sizes.T;
    if (sizes.chunks.last == 0) {
        memmove(all, own, N * sizeof(float));
        return;
    }
    group_all_gather_cpu(c->moved, (const float*)own, N, c->group);
    for (size_t i = 0; i < N * (size_t)c->group->size; i++) {
        memcpy((float*)all + context_row(sizes, i), c->moved + i, sizeof(float));
    }
}

#endif // CONTEXT_PARALLEL_IMPLEMENTATION

#endif
