/*
tensor_parallel.h -- tensor parallelism on the CPU: the processes of a tensor group (grid.h) divide
the slices of each layer (part.h).

A run has s slices, and a process has s / t of them. The N tokens of a micro-batch are cut into s
token slices of N / s. Between blocks a process has the token slices with the numbers of its slices:
R rows of the residual stream. A layer sees all tokens.

    gather   all (N, C)    = the rows of every process
    part i   (N, C)        the matmul of slice i into the stream
    sum      rows (R, C)   = part_0 + part_1 + ... + bias            in fp32

Slices are summed in their order, whichever process has them, and each part is the same call on the
same data. So the bits depend on s, and not on the number of processes. Without slices, part 0 is
the result, gather and sum do nothing, and the matmul adds the bias.

Tensors that are not cut (norms, biases into the stream) have a gradient from each token slice, or
from each slice's heads. They are summed in the order of the slices, once a backward pass
(WholeGradients).

In a pass of generation, with few tokens, the stream is not cut: a sum is made in every process.

Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing activation recomputation in large
transformer models", 2022.
*/
#ifndef LLMC_TENSOR_PARALLEL_H
#define LLMC_TENSOR_PARALLEL_H

#include <stddef.h>

#include "llmc/base/memory.h"
#include "llmc/comm/group.h"
#include "llmc/model/model.h"
#include "llmc/ops/gradient.h"
#include "llmc/ops/norm.h"
#include "llmc/parallel/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// The slices of a process in a pass.
typedef struct {
    int slices, first, of; // slices of this process, number of its first one, all
    Group* group;          // processes that divide them
    int N, C;              // tokens of the pass; channels
    int cuts_tokens;       // 0: each process has the whole stream
    size_t whole;          // elements from the WholeGradients of a slice to those of the next
    // memory (model.h): (2, N, C); (slices, N, C); (of, R, C)
    float *gathered, *parts, *arrived;
} TensorParallel;

// Consecutive tokens of a pass.
typedef struct {
    int first, count;
} TensorTokens;

static inline int tensor_is_sliced(const TensorParallel* tp) { return tp->of > 1; }

// Returns the token slices from `slice` on.
TensorTokens tensor_token_slices(const TensorParallel* tp, int slice, int count);

// Return the tokens of the stream that this process has, and those of a rank of its group.
TensorTokens tensor_rows(const TensorParallel* tp);
TensorTokens tensor_rows_of(const TensorParallel* tp, int rank);

// Returns token slice i of this process, counted from its first row.
TensorTokens tensor_own_slice(const TensorParallel* tp, int i);

// Returns all tokens (N, C) of a tensor of the stream, of which this process has `rows` (R, C):
// `rows` itself if it has all, else array `which` (0 or 1) of `gathered`. Collective.
const float* tensor_gather_cpu(const TensorParallel* tp, int which, const float* rows);

// Returns the place of the part of slice i of this process; without slices, `out`.
static inline float* tensor_part(const TensorParallel* tp, int i, float* out) {
    return tensor_is_sliced(tp) ? tp->parts + (size_t)i * (size_t)tp->N * (size_t)tp->C : out;
}

// Sets out (R, C) to the sum of the parts of all slices, and of bias (C), which may be NULL.
// Collective.
void tensor_sum_cpu(const TensorParallel* tp, float* out, const float* bias);

// Returns the bias that the matmul of a slice adds, or its gradient that the matmul computes: NULL
// if there are slices, because tensor_sum_cpu and tensor_bias_backward_cpu do that.
static inline float* tensor_of_matmul(const TensorParallel* tp, float* bias) {
    return tensor_is_sliced(tp) ? NULL : bias;
}

// Gathers all (s, count), in which this process has set its slices. Collective.
static inline void tensor_gather_slices_cpu(const TensorParallel* tp, void* all, size_t count) {
    float* slices = (float*)all;
    if (tp->group->size > 1) {
        group_all_gather_cpu(slices, slices + (size_t)tp->first * count, (size_t)tp->slices * count,
                             tp->group);
    }
}

// ---- gradients of tensors that are not cut ----

// A gradient for each slice. wpe has none: every process computes all of its gradient.
typedef struct {
    int slices, first, of;
    size_t count;                       // elements of a slice; 0 without slices
    size_t begin[MODEL_PARAMETER_ROWS]; // of a tensor's copies in a slice
    const TensorRow* rows;              // of the model's gradients
    unsigned has;                       // bit i: row i is one of them
    float *grads, *copies;              // the model's gradients; (s, count)
} WholeGradients;

// Opens them for gradients laid out by `rows`, which must outlive them.
void whole_gradients_open(WholeGradients* w, Memory* memory, ModelConfig cfg, const ZeroPlan* plan,
                          const TensorRow* rows, float* grads);

// Moves the pointers in `d` to tensors that are not cut, unless they are NULL, to the gradients of
// slice i of this process.
void whole_gradients_at_slice(const WholeGradients* w, ModelParameters* d, int i);

// Sets the model's gradients to the sums over all slices, after a backward pass. Collective.
void whole_gradients_sum_cpu(const WholeGradients* w, Group* group);

// Does what norm_backward_cpu does, for the rows of this process; dweight and dbias are those of
// its first slice, and get the sums over the token slice.
void tensor_norm_backward_cpu(const TensorParallel* tp, float* dinp, float* dweight, float* dbias,
                              const float* dout, const float* inp, const Norm* norm, GradientMode dinp_mode,
                              GradientMode mode);

// Sets or adds to the gradient of a bias of a sum: the columns of dout (R, C), token slice by token
// slice. Without slices the matmul has done so.
void tensor_bias_backward_cpu(const TensorParallel* tp, float* dbias, const float* dout, GradientMode mode);

#ifdef __cplusplus
}
#endif

#ifdef TENSOR_PARALLEL_IMPLEMENTATION

#include <string.h>

#include "llmc/base/sizes.h"
#include "llmc/ops/matmul.h"

TensorTokens tensor_token_slices(const TensorParallel* tp, int slice, int count) {
    const int tokens = int_ceil_div(tp->N, tp->of), begin = int_min(slice * tokens, tp->N),
              end = int_min((slice + count) * tokens, tp->N);
    const TensorTokens result = {begin, end - begin};
    return result;
}

// Returns the rows of a process of the group.
TensorTokens tensor_rows_of(const TensorParallel* tp, int rank) {
    const TensorTokens all = {0, tp->N};
    return tp->cuts_tokens ? tensor_token_slices(tp, rank * tp->slices, tp->slices) : all;
}

TensorTokens tensor_rows(const TensorParallel* tp) { return tensor_rows_of(tp, tp->group->rank); }

// ---- exchange ----

static GroupMove tensor_move_(const TensorParallel* tp, int peer, const float* data, TensorTokens tokens,
                              int sends) {
    const size_t C = (size_t)tp->C;
    const GroupMove move = {peer, (void*)data, (size_t)tokens.count * C * sizeof(float), sends};
    return move;
}

const float* tensor_gather_cpu(const TensorParallel* tp, int which, const float* rows) {
    const int ranks = tp->group->size;
    float* all = tp->gathered + (size_t)which * (size_t)tp->N * (size_t)tp->C;
    if (ranks == 1 || !tp->cuts_tokens) {
        return rows;
    }
    GroupMove moves[2 * MODEL_MAX_SLICES];
    for (int r = 0; r < ranks; r++) {
        const TensorTokens from = tensor_rows_of(tp, r);
        moves[r] = tensor_move_(tp, r, all + (size_t)from.first * (size_t)tp->C, from, 0);
        moves[ranks + r] = tensor_move_(tp, r, rows, tensor_rows(tp), 1);
    }
    group_exchange_cpu(tp->group, moves, 2 * ranks);
    return all;
}

// Sends the part of each slice to the processes that have its rows; sets `arrived`.
static void tensor_exchange_parts_(const TensorParallel* tp) {
    const int ranks = tp->group->size, own = tensor_rows(tp).count;
    const size_t C = (size_t)tp->C;
    GroupMove moves[2 * MODEL_MAX_SLICES], *move = moves;
    for (int r = 0; r < ranks; r++) {
        const TensorTokens to = tensor_rows_of(tp, r);
        for (int i = 0; i < tp->slices; i++) {
            const float* part = tensor_part(tp, i, NULL) + (size_t)to.first * C;
            float* arrived = tp->arrived + (size_t)(r * tp->slices + i) * (size_t)own * C;
            *move++ = tensor_move_(tp, r, part, to, 1);
            *move++ = tensor_move_(tp, r, arrived, tensor_rows(tp), 0);
        }
    }
    group_exchange_cpu(tp->group, moves, 2 * tp->of);
}

void tensor_sum_cpu(const TensorParallel* tp, float* out, const float* bias) {
    const int rows = tensor_rows(tp).count, C = tp->C;
    const size_t stride = (size_t)rows * (size_t)C; // parts of a process alone have N rows, too
    const float* parts = tp->parts;
    if (!tensor_is_sliced(tp)) {
        return;
    }
    if (tp->group->size > 1) {
        tensor_exchange_parts_(tp);
        parts = tp->arrived;
    }
#pragma omp parallel for schedule(static)
    for (int n = 0; n < rows; n++) {
        float* row = out + (size_t)n * C;
        const float* part = parts + (size_t)n * C;
        memcpy(row, part, (size_t)C * sizeof(float));
        for (int i = 1; i < tp->of; i++) {
            for (int c = 0; c < C; c++) {
                row[c] += part[(size_t)i * stride + c];
            }
        }
        for (int c = 0; bias && c < C; c++) {
            row[c] += bias[c];
        }
    }
}

// ---- gradients of tensors that are not cut ----

// True if row i of the gradients is summed over slices.
static int whole_gradients_has_(const TensorRow* row, const ZeroPlan* plan, int i) {
    return row->split == SPLIT_NONE && row->kind != KIND_EMBEDDING && !tensor_is_absent(row) &&
           zero_has_row(plan, i);
}

void whole_gradients_open(WholeGradients* w, Memory* memory, ModelConfig cfg, const ZeroPlan* plan,
                          const TensorRow* rows, float* grads) {
    memset(w, 0, sizeof(*w));
    w->slices = model_slices(cfg);
    w->first = cfg.part.first_slice;
    w->of = cfg.part.of_slices;
    w->rows = rows;
    w->grads = grads;
    for (int i = 0; i < MODEL_PARAMETER_ROWS && model_is_sliced(cfg); i++) {
        if (whole_gradients_has_(&rows[i], plan, i)) {
            w->has |= 1u << i;
            w->begin[i] = w->count;
            w->count += tensor_room_in_group(&rows[i]);
        }
    }
    if (w->count > 0) {
        w->copies = (float*)memory_take(memory, "gradients: slices", MEMORY_DEVICE,
                                        (size_t)w->of * w->count * sizeof(float));
    }
}

// Returns the begin of a row in the model's gradients.
static float* whole_gradients_row_(const WholeGradients* w, int i) {
    return (float*)tensor_at_layer(&w->rows[i], w->grads, 0);
}

void whole_gradients_at_slice(const WholeGradients* w, ModelParameters* d, int i) {
    float* copy = w->copies + (size_t)(w->first + i) * w->count;
    for (int row = 0; row < MODEL_PARAMETER_ROWS; row++) {
        float* tensor;
        memcpy(&tensor, (char*)d + w->rows[row].member, sizeof(tensor));
        if (w->has >> row & 1 && tensor) {
            tensor = copy + w->begin[row] + (tensor - whole_gradients_row_(w, row));
            memcpy((char*)d + w->rows[row].member, &tensor, sizeof(tensor));
        }
    }
}

// Sets n gradients to the sums over all slices, whose copies begin at `copies`.
static void whole_gradients_sum_row_(float* grads, const float* copies, size_t n, int of, size_t stride) {
#pragma omp parallel for schedule(static)
    for (size_t e = 0; e < n; e++) {
        float sum = copies[e];
        for (int i = 1; i < of; i++) {
            sum += copies[(size_t)i * stride + e];
        }
        grads[e] = sum;
    }
}

void whole_gradients_sum_cpu(const WholeGradients* w, Group* group) {
    if (w->count > 0 && group->size > 1) {
        group_all_gather_cpu(w->copies, w->copies + (size_t)w->first * w->count, (size_t)w->slices * w->count,
                             group);
    }
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (w->has >> i & 1) {
            whole_gradients_sum_row_(whole_gradients_row_(w, i), w->copies + w->begin[i],
                                     tensor_room_in_group(&w->rows[i]), w->of, w->count);
        }
    }
}

// Returns the rows of token slice i of this process, counted from its first row.
TensorTokens tensor_own_slice(const TensorParallel* tp, int i) {
    TensorTokens tokens = tensor_token_slices(tp, tp->first + i, 1);
    tokens.first -= tensor_rows(tp).first;
    return tokens;
}

// Returns the gradient of slice i. `first` is the gradient of this process's first slice, or NULL.
static float* tensor_copy_of_(const TensorParallel* tp, float* gradient, int i) {
    return gradient ? gradient + (size_t)i * tp->whole : NULL;
}

void tensor_norm_backward_cpu(const TensorParallel* tp, float* dinp, float* dweight, float* dbias,
                              const float* dout, const float* inp, const Norm* norm, GradientMode dinp_mode,
                              GradientMode mode) {
    for (int i = 0; i < tp->slices; i++) {
        const TensorTokens tokens = tensor_own_slice(tp, i);
        const size_t at = (size_t)tokens.first * (size_t)tp->C;
        Norm of_slice = *norm;
        of_slice.N = tokens.count;
        of_slice.mean = norm->mean ? norm->mean + tokens.first : NULL;
        of_slice.rstd = norm->rstd + tokens.first;
        norm_backward_cpu(dinp + at, tensor_copy_of_(tp, dweight, i), tensor_copy_of_(tp, dbias, i),
                          dout + at, inp + at, &of_slice, dinp_mode, mode);
    }
}

void tensor_bias_backward_cpu(const TensorParallel* tp, float* dbias, const float* dout, GradientMode mode) {
    for (int i = 0; i < tp->slices && dbias && tensor_is_sliced(tp); i++) {
        const TensorTokens tokens = tensor_own_slice(tp, i);
        matmul_backward_bias_cpu(tensor_copy_of_(tp, dbias, i), dout + (size_t)tokens.first * (size_t)tp->C,
                                 tokens.count, tp->C, mode);
    }
}

#endif // TENSOR_PARALLEL_IMPLEMENTATION

#endif
