/*
attention_race.cuh -- chooses the kernels of attention, with --attention race and autotuning: mma
kernels (attention_mma.cuh), or wgmma kernels with one of their tilings (attention_wgmma.cuh).

Each pass has a race, like the ways of a matmul (matmul.cuh): the winner is kept in the same files,
and rank 0 chooses for all. It depends on the heads, their size, the keys of a sequence and the
type, but not on the batch, its documents or the number of ranks that share a sequence: so the bits
are the same for any number of ranks. Without autotuning, mma is used. With --attention wgmma only
tilings race. `auto` is mma until a GPU has run the others. Sequences of fewer than
ATTENTION_RACE_KEYS keys are not worth a race.

    attention_raced_forward     attention_forward
    attention_raced_backward    attention_backward, which may also add to dbias, once
*/
#ifndef LLMC_ATTENTION_RACE_CUH
#define LLMC_ATTENTION_RACE_CUH

#include "llmc/ops/attention.cuh"
#include "llmc/ops/matmul_race.cuh"

enum { ATTENTION_RACE_KEYS = 256 };

typedef enum { ATTENTION_FORWARD_RACE, ATTENTION_BACKWARD_RACE } AttentionRaceOf_;

static inline const char* const* attention_race_words_(AttentionRaceOf_ pass, AttentionSizes sizes) {
    static const char* const of_64[] = {"by mma", "by wgmma, tiles of 64 keys", "by wgmma, tiles of 128 keys",
                                        "by wgmma, three warpgroups"};
    static const char* const of_128[] = {"by mma", "by wgmma", "by wgmma, without overlap"};
    return pass == ATTENTION_FORWARD_RACE && sizes.HS <= 64 && sizes.cap == 0 ? of_64 : of_128;
}

// Starts a race of a pass, unless it was decided, has one way only or is too short.
template <class X>
static inline MatmulRace attention_race_(AttentionRaceOf_ pass, AttentionSizes sizes,
                                         const AttentionGpu* attention, MatmulGpu* matmul) {
    const int ways = attention_ways<X>(attention, sizes, pass == ATTENTION_BACKWARD_RACE),
              first = attention_by(attention) == ATTENTION_BY_WGMMA,
              standard = first ? 1 + attention_wgmma_tiling(sizes, pass == ATTENTION_BACKWARD_RACE) : 0;
    const MatmulKey key = {
        attention_keys(sizes),    sizes.HS, sizes.NH, first,   sizes.cap > 0, DTYPE_OF(X), DTYPE_OF(X),
        MATMUL_OTHER + (int)pass, 0,        0,        sizes.KV};
    MatmulWays of = {first, ways, standard, attention_race_words_(pass, sizes), ""};
    snprintf(of.name, sizeof(of.name), "attention %s, %d/%d heads of %d, %d keys",
             pass == ATTENTION_FORWARD_RACE ? "forward" : "backward", sizes.NH, sizes.KV, sizes.HS,
             attention_keys(sizes));
    return matmul_race(key, of, ways > first + 1 && attention_keys(sizes) >= ATTENTION_RACE_KEYS, matmul);
}

template <class X>
static inline void attention_raced_forward(const AttentionPassGpu<X>* pass, AttentionGpu* attention,
                                           MatmulGpu* matmul) {
    MatmulRace race = attention_race_<X>(ATTENTION_FORWARD_RACE, pass->sizes, attention, matmul);
    do {
        attention_gpu_way(attention, race.way);
        attention_forward(pass, attention, matmul->gpu);
    } while (matmul_race_continues(&race, matmul));
    attention_gpu_way(attention, 0);
}

template <class X>
static inline void attention_raced_backward(const AttentionGradientsGpu<X>* d,
                                            const AttentionPassGpu<X>* pass, AttentionGpu* attention,
                                            MatmulGpu* matmul) {
    MatmulRace race = attention_race_<X>(ATTENTION_BACKWARD_RACE, pass->sizes, attention, matmul);
    AttentionGradientsGpu<X> now = *d;
    do {
        attention_gpu_way(attention, race.way);
        now.dbias.data = matmul_race_is_over(&race) ? d->dbias.data : NULL; // the last one adds
        attention_backward(&now, pass, attention, matmul->gpu);
    } while (matmul_race_continues(&race, matmul));
    attention_gpu_way(attention, 0);
}

#endif
