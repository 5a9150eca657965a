// test_tensor_parallel.c -- slices of one process: the order of sums, token slices, and the
// gradients of tensors that are not cut. Several processes are tested by test_tensor.sh.
#include "dev/test/lib/test.h"
#include "llmc/base/check.h"
#include "llmc/model/part.h"
#include "llmc/parallel/tensor_parallel.h"

enum { N = 10, C = 8, MOST = 4 };

static TensorParallel slices_of(int s, Group* group, float* parts) {
    const TensorParallel tp = {s, 0, s, group, N, C, 1, 0, NULL, parts, NULL};
    return tp;
}

// 1e8 + 1 - 1e8 is 0 in fp32, in this order alone.
TEST(tensor_sum_order) {
    const float values[MOST] = {1e8f, 1, -1e8f, 3};
    float parts[MOST][N * C], out[N * C], bias[C];
    Group alone = group_alone(NULL);
    for (int i = 0; i < MOST * N * C; i++) {
        parts[i / (N * C)][i % (N * C)] = values[i / (N * C)];
    }
    for (int c = 0; c < C; c++) {
        bias[c] = (float)c;
    }
    const TensorParallel tp = slices_of(MOST, &alone, parts[0]);
    tensor_sum_cpu(&tp, out, bias);
    for (int i = 0; i < N * C; i++) {
        EXPECT(out[i] == 3 + (float)(i % C), "%g at %d", out[i], i);
    }
    EXPECT(tensor_gather_cpu(&tp, 0, out) == out && tensor_part(&tp, 2, NULL) == parts[2], "places");
}

TEST(tensor_without_slices) {
    float out[N * C] = {7}, bias[C] = {1};
    Group alone = group_alone(NULL);
    const TensorParallel tp = slices_of(1, &alone, NULL);
    tensor_sum_cpu(&tp, out, bias);
    EXPECT(out[0] == 7 && tensor_part(&tp, 0, out) == out && tensor_of_matmul(&tp, bias) == bias,
           "the matmul's result is the sum");
}

// Token slices cover the tokens once, in order, also when they are not equal.
TEST(tensor_token_slices) {
    Group alone = group_alone(NULL);
    for (int s = 1; s <= 16; s++) {
        const TensorParallel tp = slices_of(s, &alone, NULL);
        int next = 0;
        for (int i = 0; i < s; i++) {
            const TensorTokens t = tensor_token_slices(&tp, i, 1);
            EXPECT(t.count == 0 || t.first == next, "slice %d of %d", i, s);
            next += t.count;
        }
        EXPECT(next == N && tensor_rows(&tp).count == N, "%d tokens of %d slices", next, s);
    }
}

// A process has both its token slices' sums apart, and adds them in order.
TEST(tensor_whole_gradients) {
    enum { S = 3, L = 2 };
    ModelConfig cfg = {.max_T = 8, .V = 96, .Vp = 384, .L = L, .NH = 3, .C = 48};
    const ModelConfig part = model_part_of(cfg, (ModelPart){.slices = S, .of_slices = S});
    const ZeroPlan plan = zero_plan(part, 0, 0, 1);
    Memory memory = memory_on_host();
    TensorRow rows[MODEL_PARAMETER_ROWS];
    WholeGradients whole;
    ModelParameters all;
    Group alone = group_alone(NULL);
    zero_gradient_rows(rows, &plan, part, sizeof(float));
    float* grads = (float*)memory_take(&memory, "gradients", MEMORY_DEVICE,
                                       zero_count(&plan, ZERO_GRADIENT) * sizeof(float));
    tensor_rows_bind(&all, rows, MODEL_PARAMETER_ROWS, grads);
    whole_gradients_open(&whole, &memory, part, &plan, rows, grads);
    for (int l = 0; l < L; l++) {
        for (int i = 0; i < S; i++) {
            const float values[S] = {1e8f, 1, -1e8f};
            ModelParameters d = model_parameters_at_slice(all, rows, l, i);
            const ModelParameters before = d;
            whole_gradients_at_slice(&whole, &d, i);
            EXPECT(d.qkvw == before.qkvw && d.wpe == before.wpe && d.wte == before.wte, "others stay");
            for (int c = 0; c < 48; c++) {
                d.ln2w[c] = values[i] + (float)(l == 1 && i == 2 ? 5e8f : 0);
                d.fcprojb[c] = (float)(i + 10 * l);
            }
        }
    }
    whole_gradients_sum_cpu(&whole, &alone);
    for (int l = 0; l < L; l++) {
        const ModelParameters d = model_parameters_at_slice(all, rows, l, 1);
        EXPECT(d.ln2w[47] == (l == 0 ? 0 : 5e8f) && d.fcprojb[3] == (float)(3 + 30 * l), "layer %d: %g %g", l,
               d.ln2w[47], d.fcprojb[3]);
    }
    memory_close(&memory);
}
