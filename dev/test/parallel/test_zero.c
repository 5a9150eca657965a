// test_zero.c -- zero.h: micro-steps, memory and traffic; the order of a reduction.
#include "dev/test/lib/map_test.h"
#include "dev/test/lib/test.h"
#include "llmc/model/freeze.h"
#include "llmc/parallel/zero.h"

// With two levels, a replica adds the gradients of its ranks that have a micro-batch.
TEST(adds) {
    for (int size = 1; size <= 70; size++) {
        for (int shards = 1; shards <= size; shards++) {
            for (int rank = 0; rank < size && size % shards == 0; rank++) {
                const ZeroPlan plan = {2, rank, size, shards, 1};
                for (int active = 0; active <= size; active++) { // ranks 0, 1, ... have one
                    const MicroStep step = {0, active, active, 1};
                    const int here = active - rank / shards * shards, added = zero_adds_(&plan, step);
                    EXPECT(added == (here < 0        ? 0
                                     : here > shards ? shards
                                                     : here),
                           "%d of %d add in rank %d", added, active, rank);
                }
            }
        }
    }
}

// Memory of stages 0, 1 and 2.
TEST(memory) {
    static const ModelConfig cfg = {1024, 50257, 50304, 12, 12, 768, SHARE_OFF};
    size_t full = 0, ring = 0;
    for (int stage = 0; stage <= 2; stage++) {
        MapOf of = map_test_data(cfg, stage, 8, 8);
        of.ring_gradients = stage >= 2;
        const MapTotals totals = map_totals(&of, 1);
        full = stage == 0 ? totals.elements[MAP_PARAMETERS] : full;
        ring = totals.elements[MAP_GRADIENTS];
        EXPECT(totals.elements[MAP_OWNED] == full / (stage == 0 ? 1 : 8), "stage %d: what is updated", stage);
        EXPECT(stage == 2 || ring == full, "stage %d: gradients", stage);
    }
    // those outside of the blocks, and of one block
    const double once = (50257.0 + 1024 + 2) * 768, block = 12.0 * 768 * 768 + 13 * 768;
    EXPECT((double)ring >= once + block && (double)ring < 1.01 * (once + block), "%zu gradients", ring);
    EXPECT((double)full < 1.002 * model_count_parameters(cfg) + 47.0 * 768, "little padding: %zu", full);
}

// Frozen rows and blocks cause no traffic.
TEST(frozen_traffic) {
    static const ModelConfig cfg = {7, 131, 201, 5, 3, 33, SHARE_OFF};
    for (int stage = 0; stage <= 2; stage++) {
        char error[ERROR_BYTES];
        MapOf of = map_test_data(cfg, stage, 4, 4);
        EXPECT(freeze_parse(&of.freeze, cfg, "wte,qkvw,blocks[0-1]", error), "%s", error);
        const double n = (double)map_totals(&of, 0).elements[MAP_GRADIENTS];
        const ZeroTraffic a = zero_traffic(&of, 0, 2, 4, 2, 0);
        EXPECT(a.within == 0.75 * n * ((stage < 2 ? 4 : 8) + (stage == 0 ? 4 : 2)), "stage %d: %g", stage,
               a.within);
    }
}

// Computes the traffic of an update of two micro-steps.
TEST(traffic) {
    static const ModelConfig cfg = {7, 131, 201, 5, 3, 33, SHARE_OFF};
    for (int stage = 0; stage <= 3; stage++) {
        const MapOf one = map_test_data(cfg, stage, 4, 4), two = map_test_data(cfg, stage, 4, 2);
        MapOf ring = one;
        ring.ring_parameters = 1;
        const double n = (double)map_totals(&one, 0).elements[MAP_PARAMETERS],
                     block = (n - (double)map_totals(&ring, 0).elements[MAP_PARAMETERS]) / 4,
                     once = n - 5 * block;
        const ZeroTraffic a = zero_traffic(&one, 0, 2, 4, 2, 0), b = zero_traffic(&two, 0, 2, 4, 2, 0),
                          more = zero_traffic(&two, 0, 2, 4, 2, 800);
        // stage 3 collects 5 + 3 + 3 + 3 blocks
        const double shared[] = {4 * n, 2 * n, 2 * n, 2 * (once + 14 * block)};
        const double bytes = (stage < 2 ? 4 * n : 8 * n) + shared[stage];
        EXPECT(a.within == 0.75 * bytes && a.between == 0, "stage %d: %g", stage, a.within);
        EXPECT(b.within == 0.5 * bytes && b.between == 0.5 * (n / 2) * (stage == 0 ? 8 : 6),
               "stage %d in two levels: %g, %g", stage, b.within, b.between);
        EXPECT(more.within == b.within + 400 && more.between == b.between + 200, "800 bytes of operands");
    }
    const MapOf alone = map_test_data(cfg, 2, 1, 1);
    EXPECT(zero_traffic(&alone, 0, 2, 4, 2, 0).within == 0, "one process");
}

// The micro-batches of an update are dealt out in turn.
TEST(steps) {
    for (int sequences = 1; sequences <= 40; sequences++) {
        for (int B = 1; B <= 7; B++) {
            for (int size = 1; size <= 5; size++) {
                MicroSteps steps = micro_steps(sequences, B, size);
                const int64_t count = micro_steps_count(&steps);
                int batches = 0, m = 0, first = 0;
                for (MicroStep step; micro_steps_next(&steps, &step); m++) {
                    first = m == 0 ? step.active : first;
                    EXPECT(step.number == m && 0 < step.active && step.active <= size, "%d are active",
                           step.active);
                    EXPECT(step.of_update == first && step.is_last == (m + 1 == count),
                           "%d are active in the update, last %d", step.of_update, step.is_last);
                    batches += step.active;
                }
                EXPECT(batches == (sequences + B - 1) / B && m == (batches + size - 1) / size && m == count,
                       "%d sequences by %d, %d processes: %d micro-batches in %d micro-steps", sequences, B,
                       size, batches, m);
            }
        }
    }
}

// The sum of micro-batches, added one after another, is the same however many come at a time: what
// the others left behind in their pieces is not looked at.
TEST(order) {
    enum { N = 1000, BATCHES = 7 };
    static float batch[BATCHES][N], pieces[BATCHES * N], want[N], got[N];
    Rand rng = rand_open(1, 2);
    for (int k = 0; k < BATCHES; k++) {
        for (int i = 0; i < N; i++) {
            batch[k][i] = (float)rand_uniform(&rng) - 0.5f;
            want[i] += batch[k][i];
        }
    }
    const ZeroPieces of = {N, 0, 1};
    for (int size = 1; size <= BATCHES; size++) {
        MicroSteps steps = micro_steps(BATCHES, 1, size);
        for (MicroStep step; micro_steps_next(&steps, &step);) {
            for (int r = 0; r < size; r++) {
                for (int i = 0; i < N; i++) {
                    pieces[r * N + i] = r < step.active ? batch[step.number * size + r][i] : NAN;
                }
            }
            zero_add_pieces_cpu(got, pieces, of, step.active, step.number == 0);
        }
        EXPECT(memcmp(got, want, sizeof(want)) == 0, "%d processes", size);
    }
}
