/*
matmul_race.cuh -- races between ways to do an operation: autotune measures each way, and keeps the
fastest with the plans (matmul_plans.cuh).
*/
#ifndef LLMC_MATMUL_RACE_CUH
#define LLMC_MATMUL_RACE_CUH

#include "llmc/ops/matmul_algorithms.h"
#include "llmc/ops/matmul_plans.cuh"

// The caller repeats the operation in the way that the race asks for, until the race is over. The
// last time is in the winning way, so it leaves the result. With one rank or several, the same
// operations come in the same order.
typedef struct {
    MatmulKey key;
    MatmulWays ways;
    int way;       // way to take now
    int round, at; // -1: no race; the way being measured, after one run that hides launch latency
    float ms[MATMUL_WAYS];
} MatmulRace;

// Returns 1 if the race is over, or never was: what is added to may be added to now.
static inline int matmul_race_is_over(const MatmulRace* race) { return race->round < 0; }

static inline MatmulDecision* matmul_decision(const MatmulKey* key, MatmulGpu* ctx) {
    for (int i = 0; i < ctx->decisions_count; i++) {
        if (memcmp(&ctx->decisions[i].key, key, sizeof(*key)) == 0) {
            return &ctx->decisions[i];
        }
    }
    return NULL;
}

// Returns the way that an earlier run of rank 0 has found fastest, or -1.
static inline int matmul_kept_way_(const MatmulRace* race, MatmulGpu* ctx) {
    const MatmulChoice* choice = matmul_choices_find(&ctx->chosen, &race->key);
    choice = choice ? choice : matmul_choices_find(&ctx->cached, &race->key);
    int way =
        choice && choice->chosen >= race->ways.first && choice->chosen < race->ways.end ? choice->chosen : -1;
    if (ctx->comm) {
        comm_broadcast(ctx->comm, &way, sizeof(way));
    }
    return way;
}

// Decides on a way, for this run and for others.
static inline void matmul_decide_(MatmulRace* race, int way, MatmulGpu* ctx) {
    MatmulDecision decision = {race->key, race->ways, way, {0}};
    MatmulChoice choice = {race->key, way, race->ways.end - race->ways.first, race->ms[way], {0}};
    memcpy(decision.ms, race->ms, sizeof(decision.ms));
    CHECK(ctx->decisions_count < MATMUL_DECISIONS, "matmul %s: already %d decisions, which is the maximum",
          matmul_name(&race->key).text, MATMUL_DECISIONS);
    ctx->decisions[ctx->decisions_count++] = decision;
    matmul_choices_add(&ctx->chosen, &choice);
    ctx->cache_is_old |= matmul_choices_add(&ctx->cached, &choice);
    race->way = way;
    race->round = -1;
}

// Starts a race between the ways of an operation, if `may_race` and none has decided it. `key`
// names the matmul of the first way, or the operation.
static inline MatmulRace matmul_race(MatmulKey key, MatmulWays ways, int may_race, MatmulGpu* ctx) {
    MatmulRace race = {key, ways, ways.standard, -1, ways.first - 1, {0}};
    const MatmulDecision* decision = matmul_decision(&key, ctx);
    if (!may_race || !ctx->settings.autotune || (ctx->has_chosen && !decision)) {
        return race;
    }
    const int kept = decision ? decision->way : matmul_kept_way_(&race, ctx);
    if (decision) {
        race.way = kept;
    } else if (kept >= 0) {
        matmul_decide_(&race, kept, ctx);
    } else {
        race.round = 0;
    }
    return race;
}

// Returns the fastest way; the standard one unless another is clearly faster. Rank 0 decides for
// all.
static inline int matmul_fastest_way_(const MatmulRace* race, MatmulGpu* ctx) {
    int best = race->ways.standard;
    for (int way = race->ways.first; way < race->ways.end; way++) {
        best = race->ms[way] < race->ms[best] ? way : best;
    }
    best = race->ms[best] < MATMUL_WORTHWHILE * race->ms[race->ways.standard] ? best : race->ways.standard;
    if (ctx->comm) {
        comm_broadcast(ctx->comm, &best, sizeof(best));
    }
    return best;
}

// Ends a round of all ways: keeps the shortest times. The first round has made plans and loaded
// kernels.
static inline void matmul_end_round_(MatmulRace* race, MatmulGpu* ctx) {
    CUDA_CHECK(cudaEventSynchronize(ctx->events[race->ways.end]));
    for (int way = race->ways.first; way < race->ways.end; way++) {
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, ctx->events[way], ctx->events[way + 1]));
        race->ms[way] = race->round <= 1 || ms < race->ms[way] ? ms : race->ms[way];
    }
    race->round++;
    race->at = race->ways.first - 1;
}

// Returns 1, after an operation, if it must be repeated in the way that the race now asks for.
static inline int matmul_race_continues(MatmulRace* race, MatmulGpu* ctx) {
    if (matmul_race_is_over(race)) {
        return 0;
    }
    CUDA_CHECK(cudaEventRecord(ctx->events[++race->at], ctx->gpu->stream));
    if (race->at == race->ways.end) {
        matmul_end_round_(race, ctx);
    }
    race->way = race->at < race->ways.first ? race->ways.standard : race->at;
    if (race->round > MATMUL_ROUNDS) {
        matmul_decide_(race, matmul_fastest_way_(race, ctx), ctx);
    }
    return 1;
}

#endif
