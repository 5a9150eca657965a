// test_shared_keys.c -- heads of keys that several slices have: the order of the sum, one copy in
// the norm, all copies after it, and messages that meet. Several processes: test_ranks.sh.
#include "dev/test/lib/test.h"
#include "llmc/model/part.h"
#include "llmc/parallel/shared_keys.h"

enum { S = 8, L = 2, C = 64, HS = 8 };

static ModelConfig part_of(int KV, int t, int rank) {
    ModelConfig cfg = {.max_T = 8, .V = 96, .Vp = 128, .L = L, .NH = S, .C = C, .arch = ARCH_QWEN2};
    cfg.KV = KV, cfg.HS = HS, cfg.F = 128;
    return model_part_of(cfg, (ModelPart){.first_slice = rank * S / t, .slices = S / t, .of_slices = S});
}

// Calls in one process with all slices: 1e8 + 1 - 1e8 + 3 is 3 in fp32, in this order alone.
static void test_sum(int KV, int stage) {
    const float values[4] = {1e8f, 1, -1e8f, 3};
    const ModelConfig cfg = part_of(KV, 1, 0);
    const ZeroPlan plan = zero_plan(cfg, stage, 0, 1);
    const int share = S / KV;
    Memory memory = memory_on_host();
    TensorRow rows[MODEL_PARAMETER_ROWS];
    ModelParameters all;
    SharedKeys keys;
    Zero zero = {.plan = plan};
    Group alone = group_alone(NULL);
    zero_gradient_rows(rows, &plan, cfg, sizeof(float));
    zero.shard = zero.grads = (float*)memory_take(&memory, "gradients", MEMORY_DEVICE,
                                                  zero_count(&plan, ZERO_GRADIENT) * sizeof(float));
    tensor_rows_bind(&all, rows, MODEL_PARAMETER_ROWS, zero.shard);
    shared_keys_open(&keys, &memory, cfg, &plan, rows);
    for (int l = 0; l < L; l++) {
        for (int i = 0; i < S; i++) {
            const ModelParameters d = model_parameters_at_slice(all, rows, l, i);
            for (int e = 0; e < 3 * HS; e++) {
                d.qkvb[e] = d.qkvw[e * C] = d.qkvw[e * C + C - 1] = values[i % share % 4] + (float)(l * e);
            }
        }
    }
    for (SharedKeysStep step = SHARED_KEYS_ADD; step <= SHARED_KEYS_COPY; step++) {
        shared_keys_step_cpu(&keys, step, &zero, &alone);
        for (int k = 0; k < L * S; k++) {
            const int i = k % S, l = k / S, is_set = i % share == 0 || step == SHARED_KEYS_COPY;
            const ModelParameters d = model_parameters_at_slice(all, rows, l, i);
            for (int e = 0; e < 3 * HS; e++) {
                float sum = 0;
                for (int j = 0; j < share; j++) {
                    sum += values[j % 4] + (float)(l * e);
                }
                const float own = values[i % share % 4] + (float)(l * e), wanted = e < HS   ? own
                                                                                   : is_set ? sum
                                                                                            : 0;
                EXPECT(d.qkvb[e] == wanted && d.qkvw[e * C] == wanted && d.qkvw[e * C + C - 1] == wanted,
                       "%d heads, step %d, layer %d, slice %d, row %d: %g, wanted %g", KV, (int)step, l, i, e,
                       (double)d.qkvw[e * C], (double)wanted);
            }
        }
    }
    memory_close(&memory);
}

TEST(shared_keys_sum) {
    test_sum(1, 0);
    test_sum(2, 0);
    test_sum(4, 2);
    test_sum(8, 2); // none is shared
}

// Sets the messages of a rank of t, which divides its shard among `data`.
static int moves_of(int KV, int t, int rank, ZeroCut cut, SharedKeysStep step, GroupMove* moves) {
    static float memory[1 << 20];
    const ModelConfig cfg = part_of(KV, t, rank);
    const ZeroPlan plan = zero_plan(cfg, 2, cut.part, cut.parts);
    TensorRow rows[MODEL_PARAMETER_ROWS];
    Memory dry = memory_dry();
    SharedKeys keys;
    zero_gradient_rows(rows, &plan, cfg, sizeof(float));
    shared_keys_open(&keys, &dry, cfg, &plan, rows);
    keys.arrived = memory;
    const SharedKeysLayer layer = {(char*)memory, sizeof(float), cut, 1};
    return shared_keys_moves(&keys, step, &layer, moves);
}

// Message number k from a rank to another meets number k there, with as many bytes.
static size_t test_pair(int KV, int t, ZeroCut cut, SharedKeysStep step, int a, int b) {
    GroupMove of_a[SHARED_KEYS_MOVES], of_b[SHARED_KEYS_MOVES];
    const int count_a = moves_of(KV, t, a, cut, step, of_a), count_b = moves_of(KV, t, b, cut, step, of_b);
    size_t bytes = 0;
    int at = 0;
    for (int i = 0; i < count_a; i++) {
        if (of_a[i].peer == b && of_a[i].sends) {
            while (at < count_b && (of_b[at].peer != a || of_b[at].sends)) {
                at++;
            }
            EXPECT(at < count_b && of_b[at].bytes == of_a[i].bytes, "%d heads, %d ranks: %d to %d", KV, t, a,
                   b);
            bytes += of_a[i].bytes;
            at++;
        }
    }
    return bytes;
}

// All copies but those in the process of the first one travel, once each: 2 HS rows and biases.
TEST(shared_keys_moves) {
    for (int KV = 1; KV <= S; KV *= 2) {
        for (int t = 1; t <= S; t *= 2) {
            size_t bytes = 0;
            for (int k = 0; k < 3 * 2 * t * t; k++) {
                const ZeroCut cut = {3, k / (2 * t * t)};
                bytes += test_pair(KV, t, cut, k / (t * t) % 2 ? SHARED_KEYS_COPY : SHARED_KEYS_ADD,
                                   k / t % t, k % t);
            }
            const int share = S / KV, u = S / t, others = share > u ? (S / share) * (share - u) : 0;
            EXPECT(bytes == 2 * (size_t)others * 2 * HS * (C + 1) * sizeof(float), "%d heads, %d ranks: %zu",
                   KV, t, bytes);
        }
    }
}
