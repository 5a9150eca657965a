/*
tensor_parallel.h -- tensor parallelism on the CPU: the ranks of a tensor group (grid.h) cut the
matrices of each layer (part.h).

Between blocks each of the t ranks has R = N / t rows of the residual stream, those of its tokens. A
layer sees all tokens:

    gather   all (N, C)    = the rows of every rank
    part     (N, C)        the matmul of a rank's matrix into the stream
    sum      rows (R, C)   = part of rank 0 + part of rank 1 + ... + bias     in fp32

The functions of the layers (linear.h, mlp.h, self_attention.h, lm_head.h) do this. With one rank
its part is the result, gather and sum do nothing, and the matmul adds the bias.

Tensors that are not cut (norms, biases into the stream) have a gradient in each rank, from its
tokens or its heads. Once a step these parts are added up in the order of the ranks (TensorParts).

In a pass of generation, with few tokens, the stream is not cut: every rank makes all sums.

Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation in large
transformer models", 2022.
*/
#ifndef LLMC_TENSOR_PARALLEL_H
#define LLMC_TENSOR_PARALLEL_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/memory.h"
#include "llmc/comm/group.h"
#include "llmc/model/map.h"
#include "llmc/model/config.h"
#include "llmc/parallel/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// A pass in a tensor group.
typedef struct {
    int rank, ranks; // this rank's number; t
    int N, C;        // tokens of the pass; channels
    int cuts_tokens; // 0: each rank has the whole stream
} TensorCut;

// Consecutive tokens of a pass.
typedef struct {
    int first, count;
} TensorTokens;

// Return the tokens of the stream that a rank has, and those of this rank.
TensorTokens tensor_tokens(TensorCut cut, int rank);

static inline TensorTokens tensor_rows(TensorCut cut) { return tensor_tokens(cut, cut.rank); }

static inline int tensor_is_cut(TensorCut cut) { return cut.ranks > 1; }

// A pass on the CPU, with memory (model.h).
typedef struct {
    TensorCut cut;
    Group* group;
    float *gathered, *parts, *arrived; // (2, N, C); (N, C); (t, R, C)
} TensorParallel;

// Returns all tokens (N, C) of a tensor of the stream, of which this rank has `rows` (R, C): `rows`
// itself if it has all, else array `which` (0 or 1) of `gathered`. Collective.
const float* tensor_gather_cpu(const TensorParallel* tp, int which, const float* rows);

// Returns the place of this rank's part; with one rank, `out`.
static inline float* tensor_part(const TensorParallel* tp, float* out) {
    return tensor_is_cut(tp->cut) ? tp->parts : out;
}

// Sets out (R, C) to the sum of the parts of all ranks, and of bias (C), which may be NULL.
// Collective.
void tensor_sum_cpu(const TensorParallel* tp, float* out, const float* bias);

// Gathers all (t, count), in which this rank has set its own. Collective.
static inline void tensor_gather_all_cpu(const TensorParallel* tp, void* all, size_t count) {
    float* to = (float*)all;
    if (tensor_is_cut(tp->cut)) {
        group_all_gather_cpu(to, to + (size_t)tp->cut.rank * count, count, tp->group);
    }
}

// Sets or adds to the gradient of a bias of a sum, the columns of dout (R, C). With one rank the
// matmul has done so.
void tensor_bias_backward_cpu(const TensorParallel* tp, float* dbias, const float* dout, GradientMode mode);

// ---- gradients of tensors that are not cut ----

// Units of TENSOR_SHARD_UNIT gradients in an array, by number.
typedef struct {
    size_t count;
    uint32_t* numbers;
} TensorUnits;

// The units that are parts: in the reduced gradient of a rank and, if all ranks of its data group
// update all parameters, in the whole gradient.
typedef struct {
    TensorUnits reduced, whole;
    void* mail; // (t, count, TENSOR_SHARD_UNIT) of fp32 or of the gradients' type
} TensorParts;

// Opens them, with their numbers in memory that the device reads.
void tensor_parts_open(TensorParts* p, Memory* memory, MemoryPlace numbers, const Map* map);

// Replaces the parts in the reduced gradient of a step by their sums over the group. Collective.
void tensor_parts_sum_cpu(const TensorParts* p, const Zero* z, Group* group);

#ifdef __cplusplus
}
#endif

#ifdef TENSOR_PARALLEL_IMPLEMENTATION

#include <string.h>

#include "llmc/base/sizes.h"
#include "llmc/ops/matmul.h"

TensorTokens tensor_tokens(TensorCut cut, int rank) {
    const int each = int_ceil_div(cut.N, cut.ranks), begin = int_min(rank * each, cut.N),
              end = int_min(begin + each, cut.N);
    const TensorTokens all = {0, cut.N}, own = {begin, end - begin};
    return cut.cuts_tokens ? own : all;
}

// ---- exchange ----

static GroupMove tensor_move_(const TensorParallel* tp, int peer, const float* data, TensorTokens tokens,
                              int sends) {
    const GroupMove move = {peer, (void*)data, (size_t)tokens.count * (size_t)tp->cut.C * sizeof(float),
                            sends};
    return move;
}

const float* tensor_gather_cpu(const TensorParallel* tp, int which, const float* rows) {
    const TensorCut cut = tp->cut;
    const size_t C = (size_t)cut.C;
    float* all = tp->gathered + (size_t)which * (size_t)cut.N * C;
    if (!tensor_is_cut(cut) || !cut.cuts_tokens) {
        return rows;
    }
    GroupMove moves[2 * MODEL_MAX_TENSOR_RANKS];
    for (int r = 0; r < cut.ranks; r++) {
        const TensorTokens from = tensor_tokens(cut, r);
        moves[r] = tensor_move_(tp, r, all + (size_t)from.first * C, from, 0);
        moves[cut.ranks + r] = tensor_move_(tp, r, rows, tensor_rows(cut), 1);
    }
    group_exchange_cpu(tp->group, moves, 2 * cut.ranks);
    return all;
}

// Sends the rows of this rank's part to the ranks that have them; sets `arrived`.
static void tensor_exchange_parts_(const TensorParallel* tp) {
    const TensorCut cut = tp->cut;
    const size_t C = (size_t)cut.C, own = (size_t)tensor_rows(cut).count * C;
    GroupMove moves[2 * MODEL_MAX_TENSOR_RANKS];
    for (int r = 0; r < cut.ranks; r++) {
        const TensorTokens to = tensor_tokens(cut, r);
        moves[2 * r] = tensor_move_(tp, r, tp->parts + (size_t)to.first * C, to, 1);
        moves[2 * r + 1] = tensor_move_(tp, r, tp->arrived + (size_t)r * own, tensor_rows(cut), 0);
    }
    group_exchange_cpu(tp->group, moves, 2 * cut.ranks);
}

// Sets out (R, C) to the sum of parts (t, R, C), and of bias.
static void tensor_add_parts_(float* out, const float* parts, const float* bias, TensorCut cut) {
    const int rows = tensor_rows(cut).count, C = cut.C;
    const size_t stride = (size_t)rows * (size_t)C;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < rows; n++) {
        float* row = out + (size_t)n * C;
        const float* part = parts + (size_t)n * C;
        memcpy(row, part, (size_t)C * sizeof(float));
        for (int r = 1; r < cut.ranks; r++) {
            for (int c = 0; c < C; c++) {
                row[c] += part[(size_t)r * stride + c];
            }
        }
        for (int c = 0; bias && c < C; c++) {
            row[c] += bias[c];
        }
    }
}

void tensor_sum_cpu(const TensorParallel* tp, float* out, const float* bias) {
    if (tensor_is_cut(tp->cut)) {
        tensor_exchange_parts_(tp);
        tensor_add_parts_(out, tp->arrived, bias, tp->cut);
    }
}

void tensor_bias_backward_cpu(const TensorParallel* tp, float* dbias, const float* dout, GradientMode mode) {
    if (dbias && tensor_is_cut(tp->cut)) {
        matmul_backward_bias_cpu(dbias, dout, tensor_rows(tp->cut).count, tp->cut.C, mode);
    }
}

// ---- gradients of tensors that are not cut ----

// Units of a space that a walk counts, and lists unless they have no memory.
typedef struct {
    MapSpace space;
    TensorUnits units;
} TensorWalk_;

// Adds those of a shard that is a part. A tensor starts at a unit, and only units cut it.
static void tensor_take_units_(void* context, const Bucket* b, const Shard* s) {
    TensorWalk_* walk = (TensorWalk_*)context;
    TensorUnits* units = &walk->units;
    const MapSpan in = b->in[walk->space];
    if (!s || !(s->flags & SHARD_SUMS) || s->offset < in.from || s->offset >= in.from + in.count) {
        return;
    }
    const size_t at = in.begin + (s->offset - in.from);
    for (size_t e = 0; e < s->piece.count; e += TENSOR_SHARD_UNIT, units->count++) {
        if (units->numbers) {
            units->numbers[units->count] = (uint32_t)((at + e) / TENSOR_SHARD_UNIT);
        }
    }
}

// Lists the parts in a space.
static TensorUnits tensor_part_units_(Memory* memory, MemoryPlace place, const Map* map, MapSpace space) {
    TensorWalk_ walk = {space, {0, NULL}};
    map_walk(&map->of, map->rank, tensor_take_units_, &walk);
    if (walk.units.count > 0) {
        walk.units.numbers = (uint32_t*)memory_take(memory, "scratch: parts of gradients", place,
                                                    walk.units.count * sizeof(uint32_t));
        walk.units.count = 0;
        map_walk(&map->of, map->rank, tensor_take_units_, &walk);
    }
    return walk.units;
}

void tensor_parts_open(TensorParts* p, Memory* memory, MemoryPlace numbers, const Map* map) {
    memset(p, 0, sizeof(*p));
    if (map->of.tensor == 1) {
        return;
    }
    p->reduced = tensor_part_units_(memory, numbers, map, MAP_REDUCED);
    if (map->of.stage == 0 && map->of.data > 1) {
        p->whole = tensor_part_units_(memory, numbers, map, MAP_GRADIENTS);
    }
    const size_t most = p->whole.count > p->reduced.count ? p->whole.count : p->reduced.count;
    p->mail = memory_take(memory, "gradients: parts", MEMORY_DEVICE,
                          (size_t)map->of.tensor * most * TENSOR_SHARD_UNIT * sizeof(float));
}

// Copies the parts of an array to mail, one after the other.
static void tensor_parts_take_(float* mail, const float* array, TensorUnits parts) {
    for (size_t i = 0; i < parts.count; i++) {
        memcpy(mail + i * TENSOR_SHARD_UNIT, array + (size_t)parts.numbers[i] * TENSOR_SHARD_UNIT,
               TENSOR_SHARD_UNIT * sizeof(float));
    }
}

// Sets the parts of an array to the sums of the mail (ranks, count, TENSOR_SHARD_UNIT).
static void tensor_parts_put_(float* array, const float* mail, TensorUnits parts, int ranks) {
    const size_t stride = parts.count * TENSOR_SHARD_UNIT;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < parts.count; i++) {
        float* sums = array + (size_t)parts.numbers[i] * TENSOR_SHARD_UNIT;
        for (size_t e = 0; e < TENSOR_SHARD_UNIT; e++) {
            sums[e] = mail[i * TENSOR_SHARD_UNIT + e];
            for (int r = 1; r < ranks; r++) {
                sums[e] += mail[(size_t)r * stride + i * TENSOR_SHARD_UNIT + e];
            }
        }
    }
}

static void tensor_parts_sum_array_(float* array, float* mail, TensorUnits parts, Group* group) {
    const size_t elements = parts.count * TENSOR_SHARD_UNIT;
    float* own = mail + (size_t)group->rank * elements;
    if (parts.count > 0) {
        tensor_parts_take_(own, array, parts);
        group_all_gather_cpu(mail, own, elements, group);
        tensor_parts_put_(array, mail, parts, group->size);
    }
}

void tensor_parts_sum_cpu(const TensorParts* p, const Zero* z, Group* group) {
    tensor_parts_sum_array_(z->shard, (float*)p->mail, p->reduced, group);
    tensor_parts_sum_array_(z->grads, (float*)p->mail, p->whole, group);
}

#endif // TENSOR_PARALLEL_IMPLEMENTATION

#endif
