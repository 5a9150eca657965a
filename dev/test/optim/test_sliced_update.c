// test_sliced_update.c -- matrices that are cut into slices, against the update of the whole ones.
// Several processes are tested by test_ranks.sh.
#include <math.h>

#include "dev/test/lib/test.h"
#include "llmc/base/rand.h"
#include "llmc/model/part.h"
#include "llmc/optim/sliced_update.h"

enum { S = 4, UPDATES = 3 };

// Parameters, gradients and state of a model, or of its slices, in one process.
typedef struct {
    ModelConfig cfg;
    Memory memory;
    ZeroPlan plan;
    TensorRow rows[MODEL_PARAMETER_ROWS];
    OptimizerState state;
    Zero zero;
    MatmulScratch matmul;
    MuonScratch scratch;
} Side;

static void side_open(Side* x, ModelConfig cfg, Optimizer optimizer, Group* data) {
    x->cfg = cfg;
    x->memory = memory_on_host();
    x->plan = zero_plan(cfg, 0, 0, 1);
    const size_t bytes = zero_parameter_rows(x->rows, &x->plan, cfg, sizeof(float));
    optimizer_state_open(&x->state, optimizer, &x->plan, cfg);
    optimizer_state_take(&x->state, &x->memory);
    matmul_open(&x->matmul, &x->memory);
    x->scratch.matmul = &x->matmul;
    x->scratch.memory = memory_take(&x->memory, "scratch", MEMORY_DEVICE, optimizer_scratch_bytes(&x->state));
    float *params = (float*)memory_take(&x->memory, "parameters", MEMORY_DEVICE, bytes),
          *grads = (float*)memory_take(&x->memory, "gradients", MEMORY_DEVICE, bytes);
    zero_open_cpu(&x->zero, &x->memory, x->plan, cfg, x->rows, params, grads, data, data);
}

static PartGroup group_of(const Side* x, float* array, int g) {
    const PartGroup group = {x->rows, g, array + zero_group_begin(&x->plan, g)};
    return group;
}

// Copies the slices of an array out of the array of the whole model.
static void take(const Side* slices, float* to, const Side* whole, float* from) {
    for (int g = 0; g < slices->plan.groups; g++) {
        for (int h = 0; h < whole->plan.groups; h++) {
            part_copy_group(PART_TAKE, group_of(slices, to, g), slices->cfg.part, group_of(whole, from, h),
                            whole->cfg);
        }
    }
}

// Fills an array with random numbers, but for its padding.
static void fill(const Side* x, float* array, float scale, int seed) {
    for (int i = 0; i < x->zero.num_ranges; i++) {
        const ZeroRange* range = &x->zero.ranges[i];
        for (size_t e = 0; e < range->count; e++) {
            array[range->full + e] = scale * (float)rand_normal((uint64_t)seed, 1, range->full + e);
        }
    }
}

static void update_whole(Side* x, Update u) {
    for (int i = 0; i < x->zero.num_ranges; i++) {
        const ZeroRange* range = &x->zero.ranges[i];
        optimizer_update_cpu(&x->state, range, x->zero.params + range->full,
                             zero_range_gradient_cpu(&x->zero, range), NULL, u, &x->scratch);
    }
}

static void update_slices(Side* x, SlicedUpdate* sliced, Update u) {
    for (int i = 0; i < x->zero.num_ranges; i++) { // the operand takes the gradient's place
        const ZeroRange* range = &x->zero.ranges[i];
        float* grad = x->zero.grads + range->full;
        if (sliced_update_has(&x->state, range->row)) {
            optimizer_operand_cpu(&x->state, range, grad, grad, u);
        }
    }
    sliced_update_cpu(sliced, 0, u);
    for (int g = 1; g < x->plan.groups; g += S) {
        sliced_update_cpu(sliced, g, u);
    }
}

// Expects the same weights in all matrices that are cut; returns how many there are.
static int compare(const Side* slices, const float* wanted, double tolerance, const char* what, int update) {
    int tensors = 0;
    for (int i = 0; i < slices->zero.num_ranges; i++) {
        const ZeroRange* range = &slices->zero.ranges[i];
        const int is_here = sliced_update_has(&slices->state, range->row);
        double worst = 0, moved = 0;
        for (size_t e = range->full; e < range->full + range->count && is_here; e++) {
            worst = fmax(worst, fabs((double)slices->zero.params[e] - wanted[e]));
            moved = fmax(moved, fabs((double)wanted[e]));
        }
        EXPECT(!is_here || (moved > 0 && worst <= tolerance), "%s, update %d, %s, copy %d: %g of %g", what,
               update, slices->rows[range->row].name, range->copy, worst, moved);
        tensors += is_here;
    }
    return tensors;
}

static void test_slices(const char* what, ModelConfig cfg, Optimizer optimizer, double tolerance,
                        int tensors) {
    cfg.Vp = model_padded_vocab_of_slices(cfg.V, S);
    Group alone = group_alone(NULL);
    Side whole, slices;
    SlicedUpdate sliced;
    side_open(&whole, cfg, optimizer, &alone);
    side_open(&slices, model_part_of(cfg, (ModelPart){.slices = S, .of_slices = S}), optimizer, &alone);
    sliced_update_open(&sliced, &slices.memory, &slices.state, &slices.plan);
    sliced.zero = &slices.zero, sliced.group = &alone, sliced.scratch = slices.scratch;
    float* wanted = (float*)memory_take(&slices.memory, "wanted", MEMORY_DEVICE,
                                        zero_count(&slices.plan, ZERO_FULL) * sizeof(float));
    fill(&whole, whole.zero.params, 0.02f, 1);
    take(&slices, slices.zero.params, &whole, whole.zero.params);
    for (int t = 1; t <= UPDATES; t++) {
        const Update u = {.lr = 0.01f,
                          .muon_lr = 0.02f,
                          .beta1 = 0.9f,
                          .beta2 = 0.95f,
                          .eps = 1e-8f,
                          .weight_decay = 0.1f,
                          .muon_weight_decay = 0.1f,
                          .grad_scale = 0.5f,
                          .t = t,
                          .momentum = 0.9f,
                          .adafactor_rate = ADAFACTOR_RELATIVE};
        fill(&whole, whole.zero.grads, 1e-3f, 1 + t);
        take(&slices, slices.zero.grads, &whole, whole.zero.grads);
        update_whole(&whole, u);
        update_slices(&slices, &sliced, u);
        take(&slices, wanted, &whole, whole.zero.params);
        const int found = compare(&slices, wanted, tolerance, what, t);
        EXPECT(found == tensors, "%s: %d slices of tensors, wanted %d", what, found, tensors);
    }
    memory_close(&slices.memory);
    memory_close(&whole.memory);
}

TEST(sliced_updates) {
    const ModelConfig
        gpt2 = {.max_T = 8, .V = 150, .L = 2, .NH = 4, .C = 64},
        qwen2 = {.max_T = 8, .V = 130, .L = 2, .NH = 8, .C = 64, .KV = 2, .F = 96, .arch = ARCH_QWEN2};
    const Optimizer muon = optimizer_of(OPTIMIZER_MUON, 0, MASTER_NONE),
                    rows = optimizer_of(OPTIMIZER_MUON, 1, MASTER_NONE),
                    adafactor = optimizer_of(OPTIMIZER_ADAFACTOR, 1, MASTER_NONE);
    const double rounding = 0.05 * FLT_EPSILON * UPDATES; // of steps of 0.01 and weights of 0.1
    // whole matrices are the same ones: 4 matrices of 2 layers in 4 slices
    test_slices("muon", gpt2, muon, 0, 32);
    test_slices("muon, rows", qwen2, rows, 0, 32);
    // with qkvb, fcb and wte: its last slices are padding
    test_slices("adafactor", gpt2, adafactor, rounding, 48 + 3);
    test_slices("adafactor, copies of heads", qwen2, adafactor, rounding, 40 + 3);
}
