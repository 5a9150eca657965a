/*
update_in_backward.cuh -- the updates of update_in_backward.h on a GPU, beside the backward pass.

When the gradient of a group is there, the other stream (zero.cuh) gets its square sum, and a copy of it for the host. The
host waits for that copy only when most of the backward pass of the next block is queued, decides, and queues the update of
the group: the GPU has work meanwhile.

needs:   one process, one micro-step an update
*/
#ifndef LLMC_UPDATE_IN_BACKWARD_CUH
#define LLMC_UPDATE_IN_BACKWARD_CUH

#include "llmc/ops/gradient_norm.cuh"
#include "llmc/gpu/floatx.cuh"

#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/optimizer.cuh"
#include "llmc/optim/update_in_backward.h"
#include "llmc/gpu/results.cuh"
#include "llmc/parallel/zero.cuh"
#include "llmc/parallel/zero.h"

typedef struct {
    // Of the caller, who sets them before in_backward_gpu_open and keeps what they point to.
    ZeroGpu* zero;
    GradientNorm* norm;
    StepResults* results;
    const OptimizerUpdate<floatX>* update; // all but the gradient and its settings

    InBackward* decides; // NULL: the backward pass makes no update. Of the caller, too, for each pass
    int group;           // whose gradient was summed up last, and which is not yet updated; -1: none
    cudaEvent_t summed;  // the host has its square sum, and the losses
} InBackwardGpu;

static inline void in_backward_gpu_open(InBackwardGpu* n) {
    n->decides = NULL;
    n->group = -1;
    CUDA_CHECK(cudaEventCreateWithFlags(&n->summed, cudaEventDisableTiming));
}

static inline void in_backward_gpu_close(InBackwardGpu* n) { CUDA_CHECK(cudaEventDestroy(n->summed)); }

// Queues the square sum of the gradient of group g.
static inline void in_backward_sum_(InBackwardGpu* n, int g) {
    const Gpu* beside = zero_begin_update(n->zero);
    gradient_square_sum_of<floatX>(&n->results->on_gpu->square_sum, zero_group_gradient(n->zero, g),
                                   zero_trained_elements(&n->zero->plan, g), n->norm, beside);
    CUDA_CHECK(cudaMemcpyAsync(n->results->on_host, n->results->on_gpu, step_result_bytes(1),
                               cudaMemcpyDeviceToHost, beside->stream));
    CUDA_CHECK(cudaEventRecord(n->summed, beside->stream));
    n->group = g;
}

// Waits for that sum, and queues the update of its group if it is to be made.
static inline void in_backward_update_(InBackwardGpu* n) {
    const ZeroPlan* plan = &n->zero->plan;
    const StepResult* result = n->results->on_host;
    const int g = n->group, last = plan->groups - 1;
    const int is_first = g == last || plan->first_block == last; // all blocks are frozen
    const ZeroPiece piece = zero_piece(plan, g, ZERO_TRAINED);
    OptimizerUpdate<floatX> u = *n->update;
    CUDA_CHECK(cudaEventSynchronize(n->summed));
    if (is_first) {
        in_backward_losses(n->decides, result->losses[0]);
    }
    if (in_backward_group(n->decides, g, result->square_sum, &u.update)) {
        u.grads = zero_gradient_at_group(n->zero, g);
        optimizer_update_part(u, piece.owned, piece.count, &n->zero->comm);
    }
    zero_end_update(n->zero, g);
    n->group = -1;
}

// The group that is left: before its buffer of gradients is written again, and after the pass.
static inline void in_backward_gpu_rest(InBackwardGpu* n) {
    if (n->group >= 0) {
        in_backward_update_(n);
    }
}

// After the backward pass has left the gradient of group g.
static inline void in_backward_gpu_group_done(InBackwardGpu* n, int g) {
    in_backward_gpu_rest(n);
    in_backward_sum_(n, g);
}

#endif
