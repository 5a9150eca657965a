// test_qk_clip.c -- QK clip: every score of a head shrinks by its own factor, whatever the other
// heads of its group need; layers that share weights; latents.
#include "llmc/optim/qk_clip.h"
#include "dev/test/lib/ops.h"

enum { L = 2, C = 24, NH = 6, HS = 4 };

// One token's activations (C) times a row of a matrix, plus a bias.
static double product(const float* weight, const float* bias, size_t row, const float* x, int cols) {
    double sum = bias ? (double)bias[row] : 0;
    for (int c = 0; c < cols; c++) {
        sum += (double)weight[row * (size_t)cols + (size_t)c] * x[c];
    }
    return sum;
}

// The product of the query of x and the key of y: of head h.
static double score(const ModelParameters* p, ModelConfig cfg, int h, const float* x, const float* y) {
    const int key = NH + h / (NH / model_key_heads(cfg));
    double sum = 0;
    for (int d = 0; d < HS; d++) {
        sum += product(p->qkvw, p->qkvb, (size_t)(h * HS + d), x, C) *
               product(p->qkvw, p->qkvb, (size_t)(key * HS + d), y, C);
    }
    return sum;
}

static ModelParameters parameters(ModelConfig cfg) {
    const size_t rows = (size_t)model_qkv_size(cfg);
    ModelParameters p;
    memset(&p, 0, sizeof(p));
    p.qkvw = ops_normal(rows * C, 1);
    p.qkvb = ops_normal(rows, 1);
    return p;
}

// Clips with these scores at 4: wanted are the factors of the heads.
static void check_heads(ModelConfig cfg, const double* scores, const double* wanted) {
    ModelParameters p = parameters(cfg), before = p;
    const float *x = ops_normal(C, 1), *y = ops_normal(C, 1);
    const size_t rows = (size_t)model_qkv_size(cfg), values = (size_t)(NH + model_key_heads(cfg)) * HS;
    before.qkvw = ops_copy(p.qkvw, rows * C);
    before.qkvb = ops_copy(p.qkvb, rows);
    int clips = 0;
    for (int h = 0; h < NH; h++) {
        clips |= wanted[h] < 1;
    }
    EXPECT(qk_clip_layer_cpu(&p, cfg, 0, scores, 4) == clips, "clips or not");
    for (int h = 0; h < NH; h++) {
        const double want = wanted[h] * score(&before, cfg, h, x, y);
        EXPECT_NEAR(score(&p, cfg, h, x, y), want, 1e-6 * C * C, "head %d with %d heads of keys", h,
                    model_key_heads(cfg));
    }
    EXPECT(ops_same_bits(p.qkvw + values * C, before.qkvw + values * C, (rows - values) * C) &&
               ops_same_bits(p.qkvb + values, before.qkvb + values, rows - values),
           "values change");
    ops_close("heads");
}

TEST(qk_clip) {
    // of two layers; heads of one group need different factors, and one of them none
    const double scores[L * NH] = {8, 2, 16, 5, 4, 3.9, 1, 40, 1, 1, 1, 1},
                            alone[NH] = {0.5, 1, 0.25, 0.8, 1, 1}, shared[NH] = {0.5, 0.1, 0.25, 0.8, 1, 1},
                            none[L * NH] = {4, 1, 0, 0, 3, 4}, ones[NH] = {1, 1, 1, 1, 1, 1};
    ModelConfig cfg = {.max_T = 8, .V = 8, .Vp = 128, .L = L, .NH = NH, .C = C};
    const int keys[] = {NH, 3, 2, 1};
    for (int i = 0; i < 4; i++) {
        cfg.KV = keys[i];
        check_heads(cfg, scores, alone);
        check_heads(cfg, none, ones);
    }
    cfg.share = SHARE_LOOP + 1; // both layers have the weights of the first
    check_heads(cfg, scores, shared);
    const ModelParameters p = parameters(cfg);
    EXPECT(!qk_clip_layer_cpu(&p, cfg, 1, scores, 4), "the second layer clips again");
    ops_close("shared layers");
}

// A head of D turning channels and P others: what turns shrinks in the queries alone.
TEST(qk_clip_latent) {
    enum { D = 2, P = HS - D, RANK = 5, V = 3, UP = P + V };
    const double scores[NH] = {1, 16, 1, 1, 1, 1};
    ModelConfig cfg = {.max_T = 8, .V = 8, .Vp = 128, .L = 1, .NH = NH, .C = C, .arch = ARCH_DEEPSEEK3};
    cfg.HS = HS, cfg.rope_dims = D, cfg.latent.rank = RANK, cfg.latent.value = V;
    ModelParameters p;
    memset(&p, 0, sizeof(p));
    const size_t rows = NH * HS + RANK + D;
    p.qkvw = ops_normal(rows * C, 1);
    p.kvupw = ops_normal(NH * UP * RANK, 1);
    const float *first = ops_copy(p.qkvw, rows * C), *up = ops_copy(p.kvupw, NH * UP * RANK);
    EXPECT(qk_clip_layer_cpu(&p, cfg, 0, scores, 4), "clips");
    for (size_t i = 0; i < rows * C; i++) {
        const size_t row = i / C, d = row - HS;
        const float factor = row < HS || row >= 2 * HS ? 1 : d < D ? 0.25f : 0.5f;
        EXPECT(p.qkvw[i] == first[i] * factor, "row %zu of the first matrix", row);
    }
    for (size_t i = 0; i < NH * UP * RANK; i++) {
        const size_t row = i / RANK;
        const float factor = row >= UP && row < UP + P ? 0.5f : 1;
        EXPECT(p.kvupw[i] == up[i] * factor, "row %zu of the second matrix", row);
    }
    ops_close("latents");
}
