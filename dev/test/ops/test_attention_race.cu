// test_attention_race.cu -- the faster kernels of attention are found, are used again from a file,
// have the bits that they have without a race, and add to a gradient once. Without a race attention
// is by mma. Which kernels are fast is known on the simulated GPU only.
#include "llmc/ops/attention_race.cuh"
#include "dev/test/lib/gpu_ops.h"

#ifdef CUSIM
static const int is_simulated = 1;
#else
static const int is_simulated = 0;
#endif

enum { T = 256, NH = 2, KV = 1, HS = 64, Q = NH * HS, QKV = Q + 2 * KV * HS };

// Settings of a race, and slow kernels, by a text in their names.
typedef struct {
    AttentionInstructions by;
    int autotune, has_chosen;
    const char* slow;
    const char* directory; // choices are read from it and written to it; NULL: none
} Case;

typedef struct {
    const float *qkv, *dout; // (T, QKV), (T, Q)
} Inputs;

// The ways that were chosen, forward and backward, -1 without a race; and what both passes compute.
typedef struct {
    int forward, backward;
    float *out, *dqkv, *dbias;
} Results;

static Results passes(Inputs inputs, AttentionGpu* attention, MatmulGpu* matmul, const Gpu* gpu) {
    const AttentionSizes sizes = attention_sizes(1, T, NH, KV, HS);
    bf16 *qkv = upload_rounded<bf16>(inputs.qkv, T * QKV, 0, gpu),
         *dout = upload_rounded<bf16>(inputs.dout, T * Q, 0, gpu),
         *out = (bf16*)gpu_alloc(T * Q, sizeof(bf16), "out"),
         *dqkv = (bf16*)gpu_alloc(T * QKV, sizeof(bf16), "dqkv");
    float *lse = (float*)gpu_alloc(NH * T, sizeof(float), "lse"),
          *dbias = (float*)gpu_alloc(QKV, sizeof(float), "dbias"); // zeros
    const AttentionPassGpu<bf16> pass = {sizes, NULL, qkv, NULL, out, lse};
    const AttentionGradientsGpu<bf16> d = {dout, dqkv, NULL, {dbias, DTYPE_FP32}, GRADIENT_ADD};
    attention_raced_forward(&pass, attention, matmul);
    attention_raced_backward(&d, &pass, attention, matmul);
    const int races = matmul->decisions_count;
    EXPECT(races == 0 || races == 2, "%d races", races);
    const Results r = {races ? matmul->decisions[0].way : -1, races ? matmul->decisions[1].way : -1,
                       take_back(out, T * Q, gpu), take_back(dqkv, T * QKV, gpu), take_back(dbias, QKV, gpu)};
    gpu_free(qkv);
    gpu_free(dout);
    gpu_free(lse);
    return r;
}

static Results run(Case c, Inputs inputs, const Gpu* gpu) {
    const MatmulSettings settings = {0, GELU_SEPARATE, 0, c.autotune, 0};
    char error[ERROR_BYTES] = "";
    Memory memory = memory_on_gpu();
    MatmulGpu matmul;
    AttentionGpu attention;
    setenv("CUSIM_SLOW_KERNELS", c.slow, 1);
    matmul_gpu_open(&matmul, &memory, gpu, settings);
    matmul.has_chosen = c.has_chosen;
    attention_gpu_open<bf16>(&attention, &memory, attention_sizes(1, T, NH, KV, HS), T);
    attention_gpu_by(&attention, c.by);
    if (c.directory) {
        EXPECT(matmul_gpu_load_plans(&matmul, c.directory, error), "%s", error);
    }
    const Results r = passes(inputs, &attention, &matmul, gpu);
    if (c.directory) {
        matmul_gpu_save_plans(&matmul, c.directory);
    }
    attention_gpu_close(&attention);
    matmul_gpu_close(&matmul);
    memory_close(&memory);
    unsetenv("CUSIM_SLOW_KERNELS");
    return r;
}

// Runs a case, which chooses these ways, and has the bits of `want`, unless that is NULL.
static void check(const char* what, Case c, int forward, int backward, const Results* want, Inputs inputs,
                  const Gpu* gpu) {
    const Results r = run(c, inputs, gpu);
    if (is_simulated) {
        EXPECT(r.forward == forward && r.backward == backward, "%s: ways %d and %d, wanted %d and %d", what,
               r.forward, r.backward, forward, backward);
    }
    if (want && (is_simulated || r.forward < 0)) {
        EXPECT(ops_same_bits(r.out, want->out, T * Q) && ops_same_bits(r.dqkv, want->dqkv, T * QKV) &&
                   ops_same_bits(r.dbias, want->dbias, QKV),
               "%s: other bits", what);
    }
}

// Returns the output of the forward pass in a certain way.
static float* forward_by(int way, Inputs inputs, const Gpu* gpu) {
    const AttentionSizes sizes = attention_sizes(1, T, NH, KV, HS);
    Memory memory = memory_on_gpu();
    AttentionGpu attention;
    const bf16* qkv = upload_rounded<bf16>(inputs.qkv, T * QKV, 0, gpu);
    bf16* out = (bf16*)gpu_alloc(T * Q, sizeof(bf16), "out");
    float* lse = (float*)gpu_alloc(NH * T, sizeof(float), "lse");
    attention_gpu_open<bf16>(&attention, &memory, sizes, T);
    attention_gpu_by(&attention, ATTENTION_RACED);
    attention_gpu_way(&attention, way);
    const AttentionPassGpu<bf16> pass = {sizes, NULL, qkv, NULL, out, lse};
    attention_forward(&pass, &attention, gpu);
    float* got = take_back(out, T * Q, gpu);
    gpu_free((void*)qkv);
    gpu_free(lse);
    attention_gpu_close(&attention);
    memory_close(&memory);
    return got;
}

// Gathered keys have no tiles for three warpgroups: the others must have the same bits.
static void test_same_keys(Inputs inputs, const Gpu* gpu) {
    const float *two = forward_by(1, inputs, gpu), *three = forward_by(3, inputs, gpu);
    EXPECT(ops_same_bits(two, three, T * Q), "two and three warpgroups, 64 keys: other bits");
}

TEST(attention_race) {
    Gpu gpu;
    const char *mma = "kernel_I", *wgmma = "wgmma", *first_tiles = "AttentionTilesILi64ELi1ELi64ELi2E";
    gpu_open(&gpu, 0);
    const Inputs inputs = {normal<bf16>(T * QKV, 1), normal<bf16>(T * Q, 1)};
    const Results by_mma = run({ATTENTION_BY_MMA, 0, 0, "", NULL}, inputs, &gpu);
    check("without autotuning", {ATTENTION_DEFAULT, 0, 0, mma, NULL}, -1, -1, &by_mma, inputs, &gpu);
    check("auto with autotuning", {ATTENTION_DEFAULT, 1, 0, mma, NULL}, -1, -1, &by_mma, inputs, &gpu);
    check("mma with autotuning", {ATTENTION_BY_MMA, 1, 0, mma, NULL}, -1, -1, &by_mma, inputs, &gpu);
    check("when all have chosen", {ATTENTION_RACED, 1, 1, mma, NULL}, -1, -1, &by_mma, inputs, &gpu);
    if (PTX_HAS_WGMMA) {
        const Results by_wgmma = run({ATTENTION_BY_WGMMA, 0, 0, "", NULL}, inputs, &gpu);
        const char* directory = test_tmpdir();
        check("slow wgmma", {ATTENTION_RACED, 1, 0, wgmma, NULL}, 0, 0, &by_mma, inputs, &gpu);
        check("slow mma", {ATTENTION_RACED, 1, 0, mma, directory}, 1, 1, &by_wgmma, inputs, &gpu);
        check("kept", {ATTENTION_RACED, 1, 0, wgmma, directory}, 1, 1, &by_wgmma, inputs, &gpu);
        test_same_keys(inputs, &gpu);
        check("tilings", {ATTENTION_BY_WGMMA, 1, 0, first_tiles, NULL}, 2, 1, NULL, inputs, &gpu);
    }
    ops_close("attention race");
    gpu_close(&gpu);
}
