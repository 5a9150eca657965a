// test_tensor_parallel.c -- the order of sums, the tokens of ranks, and the gradients of tensors
// that are not cut. Several processes are tested by test_ranks.sh.
#define TENSOR_PARALLEL_IMPLEMENTATION
#include "llmc/parallel/tensor_parallel.h"

#include "dev/test/lib/test.h"
#include "llmc/model/part.h"

enum { N = 12, C = 8, RANKS = 4 };

// 1e8 + 1 - 1e8 is 0 in fp32, in this order alone.
TEST(tensor_sum_order) {
    const float values[RANKS] = {1e8f, 1, -1e8f, 3};
    const TensorCut cut = {1, RANKS, N, C, 1};
    const int elements = N / RANKS * C;
    float parts[RANKS * N / RANKS * C], out[N / RANKS * C], bias[C];
    for (int i = 0; i < RANKS * elements; i++) {
        parts[i] = values[i / elements];
    }
    for (int c = 0; c < C; c++) {
        bias[c] = (float)c;
    }
    tensor_add_parts_(out, parts, bias, cut);
    for (int i = 0; i < elements; i++) {
        EXPECT(out[i] == 3 + (float)(i % C), "%g at %d", (double)out[i], i);
    }
}

TEST(tensor_alone) {
    float out[N * C] = {7}, bias[C] = {1};
    Group alone = group_alone(NULL);
    const TensorParallel tp = {{0, 1, N, C, 1}, &alone, NULL, NULL, NULL};
    tensor_sum_cpu(&tp, out, bias);
    tensor_bias_backward_cpu(&tp, bias, out, GRADIENT_ADD);
    EXPECT(out[0] == 7 && bias[0] == 1 && tensor_part(&tp, out) == out &&
               tensor_gather_cpu(&tp, 0, out) == out,
           "the matmul's result is the sum");
}

// The tokens of ranks cover all once, in order, also if they are not equally many.
TEST(tensor_tokens) {
    for (int t = 1; t <= 16; t++) {
        int next = 0;
        for (int r = 0; r < t; r++) {
            const TensorCut cut = {r, t, N, C, 1}, whole = {r, t, N, C, 0};
            const TensorTokens tokens = tensor_rows(cut);
            EXPECT(tokens.count == 0 || tokens.first == next, "rank %d of %d", r, t);
            EXPECT(tensor_rows(whole).first == 0 && tensor_rows(whole).count == N, "a pass with a cache");
            next += tokens.count;
        }
        EXPECT(next == N, "%d tokens of %d ranks", next, t);
    }
}

// Elements of tensors that are not cut, wpe apart, in all shards of a data group.
static size_t uncut_elements(const TensorRow* rows) {
    size_t elements = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const int is_part = rows[i].split == SPLIT_NONE && rows[i].kind != KIND_EMBEDDING;
        elements += is_part ? (size_t)rows[i].layers * tensor_room_in_group(&rows[i]) : 0;
    }
    return elements;
}

// Every element of such a tensor is in one shard of the data group, and gets the sum in the order
// of the tensor ranks; all others keep what they have. The first tensor rank counts all elements in
// the norm, the others count those of tensors that are cut.
static void test_parts(int size) {
    const ModelConfig whole = {.max_T = 8, .V = 96, .Vp = 384, .L = 2, .NH = 3, .C = 48};
    const ModelConfig cfg = model_part_of(whole, (ModelPart){.tensor_rank = 1, .tensor_ranks = 3});
    size_t found = 0, counted = 0, cut = 0, all = 0;
    TensorRow rows[MODEL_PARAMETER_ROWS];
    for (int r = 0; r < size; r++) {
        const ZeroPlan plan = zero_plan(cfg, 1, r, size);
        const size_t count = zero_count(&plan, ZERO_SHARDS);
        Memory memory = memory_on_host();
        TensorParts parts;
        ZeroSpan spans[ZERO_SPANS];
        zero_gradient_rows(rows, &plan, cfg, sizeof(float));
        tensor_parts_open(&parts, &memory, cfg, &plan, rows);
        const size_t elements = tensor_parts_elements(parts.shard, parts.in_shard);
        float *shard = (float*)memory_take(&memory, "shard", MEMORY_DEVICE, count * sizeof(float)),
              *mail = (float*)parts.mail;
        for (size_t i = 0; i < count; i++) {
            shard[i] = 1;
        }
        tensor_parts_take_(mail + elements, shard, parts.shard, parts.in_shard);
        for (size_t i = 0; i < elements; i++) {
            EXPECT(mail[elements + i] == 1, "the own part");
            mail[i] = 1e8f, mail[2 * elements + i] = -1e8f;
        }
        tensor_parts_put_(shard, mail, parts.shard, parts.in_shard, 3);
        for (size_t i = 0; i < count; i++) {
            found += shard[i] == 0;
        }
        for (int i = zero_counted_spans(&plan, rows, cfg, spans) - 1; i >= 0; i--) {
            counted += (size_t)spans[i].copies * spans[i].count;
        }
        all += count;
        memory_close(&memory);
    }
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        cut += rows[i].split != SPLIT_NONE ? (size_t)rows[i].layers * tensor_room_in_group(&rows[i]) : 0;
    }
    EXPECT(found == uncut_elements(rows), "%zu sums in %d shards, wanted %zu", found, size,
           uncut_elements(rows));
    EXPECT(counted == cut, "%zu elements count, wanted %zu of %zu", counted, cut, all);
}

TEST(tensor_parts) {
    test_parts(1);
    test_parts(2);
    test_parts(5);
}
