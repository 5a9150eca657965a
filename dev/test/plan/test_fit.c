// test_fit.c -- fit.h: which settings --fit chooses, that the update stays the same, and what it
// refuses.
#include "llmc/plan/fit.h"

#include "dev/test/lib/settled_alone.h"
#include "dev/test/lib/test.h"

// Memory by batch and level: 100 a sequence at level 0, less at each further one; 50 for the state,
// which may be on the host, and then goes over the bus so often that it takes a second.
static void fake_model(ModelPlan* plan, const Settled* s) {
    const Options* o = &s->options;
    const int on_host = o->memory.offload_optimizer == OFFLOAD_HOST;
    plan->memory = memory_dry();
    memory_count(&plan->memory, "activations", MEMORY_DEVICE,
                 (size_t)(o->batch.size * (100 - 20 * o->memory.recompute)));
    memory_set_moves(memory_count(&plan->memory, "state", on_host ? MEMORY_HOST : MEMORY_DEVICE, 50),
                     1e9 * on_host, 1e9 * on_host);
}

static const ModelConfig CFG = {64, 100, 128, 2, 2, 64, SHARE_OFF};

static Settled settled_for(int trainer, const char* recompute) {
    const char* line[] = {"test",   "--batch",        "8", "--total-batch", "1024", "--seq-len",
                          "64",     "--eval-batches", "3", "--steps",       "2",    "--recompute",
                          recompute};
    const int count = (int)(sizeof(line) / sizeof(line[0]));
    Options o;
    options_parse(&o, recompute ? count : count - 2, (char**)line, options_program(trainer));
    o.ranks.zero = 0;
    return settled_alone(&o, CFG, USE_TRAIN, SAFETENSORS_F32);
}

static FitDevice device_of(size_t limit, int can_offload) {
    const CostRates rates = {{1e12, 1e12, 1e12, 1e12, 1e12, 1e12, 1e12}, 0, "made up"};
    const FitDevice device = {fake_model, limit, SIZE_MAX, can_offload, rates};
    return device;
}

static Settled fit(const Settled* s, FitDevice device) {
    FILE* nowhere = fopen("/dev/null", "w");
    const Settled fitted = fit_choose(nowhere, s, &device);
    fclose(nowhere);
    return fitted;
}

static void no_room_body(const void* device) {
    const Settled asked = settled_for(OPTION_GPU, NULL);
    fit(&asked, *(const FitDevice*)device);
}

TEST(choice) {
    const Settled asked = settled_for(OPTION_CPU, NULL);
    Settled s = fit(&asked, device_of(850, 0));
    const Options* o = &s.options;
    EXPECT(o->batch.size == 8 && o->memory.recompute == 0 && o->eval.batches == 3,
           "what was asked for fits: %d, %d", o->batch.size, o->memory.recompute);
    s = fit(&asked, device_of(75, 0));
    EXPECT(o->batch.size == 1 && o->memory.recompute == RECOMPUTE_BLOCK, "only the least: %d, %d",
           o->batch.size, o->memory.recompute);
    EXPECT(o->eval.batches == 24, "as many sequences are validated: %d x 1", o->eval.batches);
    EXPECT(o->batch.total == 1024 && o->batch.steps == 2, "an update stays");
    EXPECT(s.sequences == 16 && s.micro_batches == 16 && asked.micro_batches == 2, "the facts follow: %d",
           (int)s.micro_batches);
    for (size_t limit = 75; limit < 850; limit += 50) {
        const FitDevice device = device_of(limit, 0);
        const double chosen = fit_update_s(&s, &device);
        s = fit(&asked, device);
        EXPECT(fit_update_s(&s, &device) <= chosen || limit == 75, "%zu: more memory, no slower", limit);
        const ModelPlan plan = plan_model(fake_model, &s);
        const size_t bytes = memory_bytes(&plan.memory, MEMORY_DEVICE);
        EXPECT(bytes <= limit, "%zu: %zu bytes", limit, bytes);
        EXPECT(o->batch.size * o->eval.batches == 24, "%zu: %d x %d are validated", limit, o->batch.size,
               o->eval.batches);
    }
}

TEST(given) {
    const Settled asked = settled_for(OPTION_CPU, "2"), s = fit(&asked, device_of(300, 0));
    EXPECT(s.options.memory.recompute == 2 && s.options.batch.size == 4, "--recompute 2 stays: %d, %d",
           s.options.memory.recompute, s.options.batch.size);
}

TEST(automatic_recompute) {
    const Settled asked = settled_for(OPTION_CPU, "auto"), usual = settled_for(OPTION_CPU, NULL);
    const Settled s = fit(&asked, device_of(75, 0)), same = fit(&usual, device_of(75, 0));
    EXPECT(s.options.memory.recompute == RECOMPUTE_BLOCK && same.options.memory.recompute == RECOMPUTE_BLOCK,
           "--recompute auto tries every level: %d, %d", s.options.memory.recompute,
           same.options.memory.recompute);
}

TEST(offload) {
    const Settled asked = settled_for(OPTION_GPU, NULL);
    Settled s = fit(&asked, device_of(45, 1));
    EXPECT(s.options.memory.offload_optimizer == OFFLOAD_HOST && s.options.batch.size == 1,
           "the state does not fit: %d", s.options.memory.offload_optimizer);
    EXPECT(s.optimizer.by_block && !asked.optimizer.by_block, "the facts follow");
    s = fit(&asked, device_of(90, 1));
    EXPECT(s.options.memory.offload_optimizer == OFFLOAD_OFF, "what fits without the bus is faster");
    FitDevice device = device_of(45, 1);
    device.host_limit = 40;
    EXPECT(test_dies(no_room_body, &device, 1, "none of 40 ways fits into 0.0 MiB"), "no room on the host");
}
