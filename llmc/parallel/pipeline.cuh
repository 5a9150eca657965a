/*
pipeline.cuh -- the messages of pipeline.h between GPUs.

They are queued on the stream of communication, behind what this process has queued there before. So
each process has only one operation of its data group or of the pipeline under way, and these cannot
wait for each other in a circle. A message waits for all work queued on the main stream so far: this
makes the data to send, and is the last reader of the memory to receive into. The main stream waits
for the message at once: then received data are there, and sent data may be overwritten.
*/
#ifndef LLMC_PIPELINE_CUH
#define LLMC_PIPELINE_CUH

#include "llmc/comm/comm_nccl.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/parallel/pipeline.h"
#include "llmc/parallel/zero.cuh"

typedef struct {
    const GroupGpu* group;      // its ranks are the stages
    Gpu main, comm;             // the GPU with the main stream; with the communication stream
    cudaEvent_t ready, arrived; // last work of the main stream; last messages
} PipelineGpu;

// Opens the messages of a pipe group. The streams and the group must outlive them.
static inline void pipeline_open(PipelineGpu* p, const GroupGpu* group, const Gpu* main, const Gpu* comm) {
    p->group = group;
    p->main = *main;
    p->comm = *comm;
    CUDA_CHECK(cudaEventCreateWithFlags(&p->ready, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&p->arrived, cudaEventDisableTiming));
}

static inline void pipeline_close(PipelineGpu* p) {
    CUDA_CHECK(cudaEventDestroy(p->arrived));
    CUDA_CHECK(cudaEventDestroy(p->ready));
}

// Sends and receives these messages, as one exchange.
static inline void pipeline_move_(const PipelineGpu* p, const GroupMove* moves, int count) {
    if (count > 0) {
        CUDA_CHECK(cudaEventRecord(p->ready, p->main.stream));
        CUDA_CHECK(cudaStreamWaitEvent(p->comm.stream, p->ready, 0));
        group_exchange(moves, count, p->group, p->comm.stream);
        CUDA_CHECK(cudaEventRecord(p->arrived, p->comm.stream));
        CUDA_CHECK(cudaStreamWaitEvent(p->main.stream, p->arrived, 0));
    }
}

// Sends the results of the action before and receives the inputs of the next one, as one exchange.
// The watchdog is not told (pipeline_watch): the host waits for none of them.
static inline void pipeline_exchange(const PipelineGpu* p, PipelineAction before, PipelineAction next,
                                     PipelineStream stream) {
    GroupMove moves[PIPELINE_MOVES];
    const int count = pipeline_moves(moves, p->group->size, p->group->rank, before, next, stream);
    pipeline_move_(p, moves, count);
}

// Moves data from one stage to another; the others do nothing.
static inline void pipeline_hand_over(const PipelineGpu* p, int from, int to, void* data, size_t bytes) {
    const int sends = p->group->rank == from;
    const GroupMove move = {sends ? to : from, data, bytes, sends};
    if (sends || p->group->rank == to) {
        pipeline_move_(p, &move, 1);
    }
}

// Do what the functions of the same names do.
static inline void stage_enter(PipelineStage* s, const PipelineGpu* p, ModelActivations* acts,
                               PipelineAction next) {
    pipeline_exchange(p, s->last, next, stage_turn(s, acts, next));
    s->last = next;
}
static inline void stage_leave(PipelineStage* s, const PipelineGpu* p, ModelActivations* acts) {
    stage_enter(s, p, acts, pipeline_rest());
}

template <class T> static inline void stage_join_embedding(ZeroGpu* zero, const PipelineGpu* p) {
    const Gradient embedding = zero_embedding_gradient(zero);
    const int last = p->group->size - 1;
    if (embedding.data) {
        pipeline_hand_over(p, 0, last, embedding.data,
                           zero_embedding_elements(zero->map) * dtype_bytes(embedding.dtype));
    }
    if (embedding.data && p->group->rank == last) {
        zero_add_embedding<T>(zero);
    }
}

static inline void stage_share_embedding(void* wte, const ZeroGpu* zero, const PipelineGpu* p) {
    if (map_embedding(zero->map)) {
        pipeline_hand_over(p, p->group->size - 1, 0, wte,
                           zero_embedding_elements(zero->map) * dtype_bytes(zero->dtype));
    }
}

// Sends data of the last stage to all others.
static inline void pipeline_tell(const PipelineGpu* p, void* data, size_t bytes) {
    for (int stage = 0; stage < p->group->size - 1; stage++) {
        pipeline_hand_over(p, p->group->size - 1, stage, data, bytes);
    }
}

#endif
