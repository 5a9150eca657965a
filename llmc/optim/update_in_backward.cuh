/*
update_in_backward.cuh -- the updates of update_in_backward.h on a GPU, beside the backward pass.

When the gradient of a group is complete, the other stream (zero.cuh) sums its squares and copies
the sum to the host. The host waits for it only after it has queued most of the backward pass of the
next block, so that the GPU has work meanwhile. It then decides on the group and queues its update.

needs:   one rank, one micro-step an update, no graph
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

typedef struct {
    ZeroGpu* zero;
    GradientNorm* norm;
    StepResults* results;
    OptimizerUpdate<floatX> update; // without the gradient and the settings
    MatmulGpu matmul;               // of an update that has some
    int has_matmul;

    InBackward* hook; // decides on the pending group
    // the pending group: its squares are summed up, it is not updated yet; -1: none
    int group;
    cudaEvent_t summed; // the host has the sum of its squares, and the losses
} InBackwardGpu;

// Opens the matmuls of updates beside the backward pass. They are not timed: the GPU does other
// work meanwhile.
static inline void in_backward_open_matmul_(InBackwardGpu* n, Memory* memory) {
    MatmulSettings settings = n->update.matmul->settings;
    settings.autotune = settings.bias_fusion = 0;
    matmul_gpu_open(&n->matmul, memory, &n->zero->comm, settings);
    n->update.matmul = &n->matmul;
    n->has_matmul = 1;
}

// Opens updates in the backward pass, if a run makes them there (is_used). `norm` and `results`
// must outlive it.
static inline void in_backward_gpu_open(InBackwardGpu* n, Memory* memory,
                                        const OptimizerUpdate<floatX>* update, GradientNorm* norm,
                                        StepResults* results, int is_used) {
    n->zero = update->zero;
    n->norm = norm;
    n->results = results;
    n->update = *update;
    n->has_matmul = 0;
    n->group = -1;
    const OptimizerName name = update->plan->state->optimizer.name;
    if (is_used && (name == OPTIMIZER_MUON || name == OPTIMIZER_SOAP)) {
        in_backward_open_matmul_(n, memory);
    }
    if (!memory_is_dry(memory)) {
        CUDA_CHECK(cudaEventCreateWithFlags(&n->summed, cudaEventDisableTiming));
    }
}

static inline void in_backward_gpu_close(InBackwardGpu* n) {
    CUDA_CHECK(cudaEventDestroy(n->summed));
    if (n->has_matmul) {
        matmul_gpu_close(&n->matmul);
    }
}

// Queues the sum of squares of the gradient of group g, which is then pending.
static inline void in_backward_sum_(InBackwardGpu* n, int g, InBackward* hook) {
    const Gpu* beside = zero_begin_update(n->zero);
    const MapSpan in = map_trained(n->update.plan->state->map, g)->in[MAP_GRADIENTS];
    const Gradient all = zero_update_gradient(n->zero),
                   group = {(char*)all.data + in.begin * dtype_bytes(all.dtype), all.dtype};
    gradient_square_sum_of<floatX>(&n->results->on_gpu->square_sum, group, in.count, GRADIENT_SET, n->norm,
                                   beside);
    CUDA_CHECK(cudaMemcpyAsync(n->results->on_host, n->results->on_gpu, step_result_bytes(1),
                               cudaMemcpyDeviceToHost, beside->stream));
    step_results_copy_statistics(n->results, beside->stream);
    CUDA_CHECK(cudaEventRecord(n->summed, beside->stream));
    n->group = g;
    n->hook = hook;
}

// Decides on the pending group, if any, and queues its update: before its buffer of gradients is
// written again.
static inline void update_pending_group(InBackwardGpu* n) {
    const Map* map = n->update.plan->state->map;
    const StepResult* result = n->results->on_host;
    const int g = n->group, last = model_groups(map->cfg) - 1;
    OptimizerUpdate<floatX> u = n->update;
    if (g < 0) {
        return;
    }
    const MapSpan own = update_owned(map, g);
    CUDA_CHECK(cudaEventSynchronize(n->summed));
    if (g == last || !map_trained(map, last)) { // or all blocks are frozen
        in_backward_losses(n->hook, result->losses[0]);
    }
    if (in_backward_group(n->hook, g, result->square_sum, &u.update)) {
        u.grads = zero_update_gradient(n->zero);
        optimizer_update_part(u, own.begin, own.count, &n->zero->comm);
    }
    zero_end_update(n->zero, g);
    n->group = -1;
}

// Starts the update of group g, whose gradient is complete. Does nothing without a hook.
static inline void update_group_in_backward(InBackwardGpu* n, int g, InBackward* hook) {
    if (hook && map_trained(n->update.plan->state->map, g)) {
        update_pending_group(n);
        in_backward_sum_(n, g, hook);
    }
}

// Ends the updates of a pass: what follows on the main stream comes after them.
static inline void in_backward_gpu_end(InBackwardGpu* n) {
    update_pending_group(n);
    zero_join_updates(n->zero);
}

#endif
