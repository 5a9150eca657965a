/*
expert_parallel.h -- the experts of a layer divided among the ranks of an expert group, on the CPU:
the rows of experts (router.h) travel to the rank that has the expert, and back.

Rank r of e has experts r E/e, ..., (r + 1) E/e - 1. Each rank routes its own tokens over all E
experts. Its rows are sorted by expert, so the rows for a rank are neighbors. In round k = 0, ...,
e - 1 of a layer

    rank r sends its rows for the experts of rank r + k (mod e), and gets rows of rank r - k
    computes on these, with its own experts
    sends the results back, and gets its own: they have the place that the rows had

So no token is dropped, whatever the router chooses, and memory holds the rows of one other rank at
a time: at most as many as a rank has for its own tokens. An expert's matmul sees the tokens of one
rank, in their order, as if each rank had all experts: the bits are the same for every e. The
gradients of weights are kept apart for each rank's tokens (zero.h).

    counts    (e, E)    tokens of each rank that take each expert: gathered once in a forward pass
*/
#ifndef LLMC_EXPERT_PARALLEL_H
#define LLMC_EXPERT_PARALLEL_H

#include <stddef.h>

#include "llmc/comm/group.h"
#include "llmc/ops/router.h"

#ifdef __cplusplus
extern "C" {
#endif

// The expert group of a layer, with memory for the rows that arrive.
typedef struct {
    Group* group; // NULL: nothing is divided
    int* counts;
    float *in, *out;       // (rows, C)
    float *scale, *dscale; // (rows)
    int *order, *first;    // (rows), (E / e + 1)
} ExpertParallel;

// Returns e.
static inline int expert_parallel_ranks(const ExpertParallel* x) { return x->group ? x->group->size : 1; }

// The ranks of round k of e, as a rank sees it: rows go to one, and arrive from another.
typedef struct {
    int to, from;
} ExpertRound;

static inline ExpertRound expert_round(int rank, int e, int k) {
    const ExpertRound round = {(rank + k) % e, (rank + e - k) % e};
    return round;
}

// Sets the counts from the router of each rank, after its forward pass. Collective.
void expert_counts_cpu(const ExpertParallel* x, const Router* own);

// Returns the router of the rows that arrive from a rank: its experts are those of this rank, and
// `order` only tells padding (-1) from tokens. Scale is memory.
Router expert_arrived_cpu(const ExpertParallel* x, const Router* own, int from);

// An array of rows, and memory for those that arrive.
typedef struct {
    float *own, *arrived; // (M, cols), (rows, cols)
    int cols;
} ExpertArray;

// Move rows of `count` arrays: to the experts of a round, or back to where they came from.
void expert_send_cpu(const ExpertParallel* x, const Router* own, ExpertRound round, const ExpertArray* arrays,
                     int count);
void expert_return_cpu(const ExpertParallel* x, const Router* own, ExpertRound round,
                       const ExpertArray* arrays, int count);

#ifdef __cplusplus
}
#endif

#ifdef EXPERT_PARALLEL_IMPLEMENTATION

#include <assert.h>
#include <string.h>

void expert_counts_cpu(const ExpertParallel* x, const Router* own) {
    int* mine = x->counts + (size_t)x->group->rank * (size_t)own->E;
    for (int e = 0; e < own->E; e++) {
        mine[e] = router_count(own, e);
    }
    // bytes of ints move like those of floats
    group_all_gather_cpu((float*)(void*)x->counts, (const float*)(const void*)mine, (size_t)own->E, x->group);
}

// Returns the experts of a rank.
static int expert_parallel_own_(const ExpertParallel* x, const Router* own) {
    return own->E / x->group->size;
}

Router expert_arrived_cpu(const ExpertParallel* x, const Router* own, int from) {
    const int experts = expert_parallel_own_(x, own);
    const int* counts = x->counts + (size_t)from * (size_t)own->E + (size_t)x->group->rank * (size_t)experts;
    Router arrived = *own;
    arrived.E = experts;
    arrived.first = x->first;
    arrived.order = x->order;
    arrived.scale = x->scale;
    arrived.first[0] = 0;
    for (int e = 0; e < experts; e++) {
        arrived.first[e + 1] = arrived.first[e] + (counts[e] + ROUTER_TILE - 1) / ROUTER_TILE * ROUTER_TILE;
        for (int m = arrived.first[e]; m < arrived.first[e + 1]; m++) {
            arrived.order[m] = m - arrived.first[e] < counts[e] ? 0 : -1;
        }
    }
    return arrived;
}

enum { EXPERT_ARRAYS_ = 3 }; // at most, that move together

// Moves rows between this rank's own, of the experts of rank `to`, and those that arrived.
static void expert_move_(const ExpertParallel* x, const Router* own, ExpertRound round,
                         const ExpertArray* arrays, int count, int returns) {
    const int experts = expert_parallel_own_(x, own);
    const size_t first = (size_t)own->first[round.to * experts],
                 rows = (size_t)own->first[(round.to + 1) * experts] - first,
                 arrived = (size_t)x->first[experts];
    GroupMove moves[2 * EXPERT_ARRAYS_];
    assert(count <= EXPERT_ARRAYS_);
    for (int i = 0; i < count; i++) {
        const size_t cols = (size_t)arrays[i].cols, bytes = cols * sizeof(float);
        const GroupMove mine = {round.to, arrays[i].own + first * cols, rows * bytes, !returns},
                        theirs = {round.from, arrays[i].arrived, arrived * bytes, returns};
        moves[2 * i] = mine;
        moves[2 * i + 1] = theirs;
    }
    group_exchange_cpu(x->group, moves, 2 * count);
}

void expert_send_cpu(const ExpertParallel* x, const Router* own, ExpertRound round, const ExpertArray* arrays,
                     int count) {
    expert_move_(x, own, round, arrays, count, 0);
}

void expert_return_cpu(const ExpertParallel* x, const Router* own, ExpertRound round,
                       const ExpertArray* arrays, int count) {
    expert_move_(x, own, round, arrays, count, 1);
}

#endif // EXPERT_PARALLEL_IMPLEMENTATION

#endif
