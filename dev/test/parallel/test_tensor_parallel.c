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

// Returns the elements of tensors that are not cut, wpe apart, or that are cut, in whole units.
static size_t elements_of(ModelConfig cfg, int is_cut) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    size_t elements = 0;
    model_parameter_rows_of(rows, cfg, 1);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const int is_part = is_cut ? rows[i].split != SPLIT_NONE
                                   : rows[i].split == SPLIT_NONE && rows[i].kind != KIND_EMBEDDING;
        elements += is_part ? (size_t)rows[i].layers * tensor_room_in_group(&rows[i]) : 0;
    }
    return elements;
}

// Sums the parts of a shard that is 1 everywhere: 1e8 + 1 - 1e8 is 0 in this order alone. Returns
// the elements that become 0.
static size_t sum_parts(const TensorParts* parts, float* shard, size_t count) {
    const size_t elements = parts->reduced.count * TENSOR_SHARD_UNIT;
    float* mail = (float*)parts->mail;
    size_t found = 0;
    for (size_t i = 0; i < count; i++) {
        shard[i] = 1;
    }
    tensor_parts_take_(mail + elements, shard, parts->reduced);
    for (size_t i = 0; i < elements; i++) {
        EXPECT(mail[elements + i] == 1, "the own part");
        mail[i] = 1e8f, mail[2 * elements + i] = -1e8f;
    }
    tensor_parts_put_(shard, mail, parts->reduced, 3);
    for (size_t i = 0; i < count; i++) {
        EXPECT(shard[i] == 0 || shard[i] == 1, "element %zu is %g", i, (double)shard[i]);
        found += shard[i] == 0;
    }
    return found;
}

// Every element of such a tensor is in one shard of the data group, and gets the sum in the order
// of the tensor ranks; all others keep what they have. This tensor rank counts only tensors that
// are cut in the norm.
static void test_parts(int size) {
    const ModelConfig whole = {.max_T = 8, .V = 384, .Vp = 384, .L = 2, .NH = 3, .C = 48};
    MapOf of = map_of_model(whole);
    of.tensor = 3, of.data = of.replica = size, of.stage = 1;
    const ModelConfig cfg = map_part(&of, 1);
    size_t found = 0, counted = 0;
    for (int r = 0; r < size; r++) {
        Memory memory = memory_on_host();
        TensorParts parts;
        Map map;
        MapSpan span;
        map_open(&map, &memory, MEMORY_HOST, &of, r * 3 + 1);
        tensor_parts_open(&parts, &memory, MEMORY_DEVICE, &map);
        EXPECT(parts.whole.count == 0, "no rank has all of the gradient");
        const size_t count = map.totals.elements[size == 1 ? MAP_GRADIENTS : MAP_REDUCED];
        float* shard = (float*)memory_take(&memory, "shard", MEMORY_DEVICE, count * sizeof(float));
        found += sum_parts(&parts, shard, count);
        for (int i = 0; (i = map_counted(&map, i, &span)) > 0;) {
            counted += span.count;
        }
        memory_close(&memory);
    }
    EXPECT(found == elements_of(cfg, 0), "%zu sums in %d shards, wanted %zu", found, size,
           elements_of(cfg, 0));
    EXPECT(counted == elements_of(cfg, 1), "%zu elements count, wanted %zu", counted, elements_of(cfg, 1));
}

TEST(tensor_parts) {
    test_parts(1);
    test_parts(2);
    test_parts(5);
}
