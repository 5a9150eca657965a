/*
plan_test.h -- random runs, whose memory the trainers' tests compare with the plan, byte by byte.

    plan_test_run        returns the settings of run number k
    plan_test_count      starts to count the bytes of check_alloc
    plan_test_counted    stops and returns the sum
    plan_test_compare    expects that a run was planned, and allocated, as its ledger says
*/
#ifndef DEV_TEST_PLAN_TEST_H
#define DEV_TEST_PLAN_TEST_H

#include "llmc/base/check.h"
#include "llmc/base/memory.h"
#include "llmc/base/rand.h"
#include "llmc/model/freeze.h"
#include "llmc/optim/optimizer.h"
#include "llmc/model/share_layers.h"
#include "llmc/setup/settled.h"
#include "llmc/plan/plan.h"
#include "dev/test/lib/settled_alone.h"

enum { PLAN_TEST_RUNS = 40 };

static size_t plan_test_bytes_;

static void plan_test_add_(const char* what, size_t bytes) {
    // No part of the plan: the first three take a few bytes for a block at most, the others are
    // freed before the model is open.
    static const char* const unplanned[] = {
        "algorithms of matmuls", "events",           "chunks of the optimizer's state",
        "tensors of an update",  "files of a model", "ranges of an update",
        "adafactor: tensors",    "adafactor: tiles", "the teacher"};
    for (size_t i = 0; i < sizeof(unplanned) / sizeof(unplanned[0]); i++) {
        if (strcmp(what, unplanned[i]) == 0) {
            return;
        }
    }
    plan_test_bytes_ += bytes;
}

static void plan_test_count(void) {
    plan_test_bytes_ = 0;
    check_allocated = plan_test_add_;
}

static size_t plan_test_counted(void) {
    check_allocated = NULL;
    return plan_test_bytes_;
}

static int plan_test_one_of_(Rand* rng, int n) { return (int)rand_below(rng, (uint32_t)n); }

// A part of the processes that divide a run.
static Ranks plan_test_ranks_(Rand* rng, int most_zero) {
    const int size = 1 + plan_test_one_of_(rng, 3), rank = plan_test_one_of_(rng, size);
    return ranks_of_data(rank, size, plan_test_one_of_(rng, most_zero + 1), size);
}

// Sets the options that only the GPU trainer has.
static void plan_test_gpu_(Options* o, Ranks* ranks, Rand* rng) {
    o->memory.device = 0;
    o->memory.logits_chunk = 1 + plan_test_one_of_(rng, 100);
    o->memory.gradients = plan_test_one_of_(rng, 2);
    o->memory.master_weights = plan_test_one_of_(rng, 3);
    o->memory.autotune = 0;
    o->memory.offload_optimizer = plan_test_one_of_(rng, 4) ? OFFLOAD_OFF : OFFLOAD_HOST;
    o->memory.offload_residuals = o->memory.recompute == RECOMPUTE_BLOCK && plan_test_one_of_(rng, 2);
    o->memory.offload_params = o->ranks.zero == 3 && plan_test_one_of_(rng, 2);
    const int size = ranks_size(ranks);
    ranks->shards = size == 3 && o->ranks.zero > 0 && plan_test_one_of_(rng, 2) ? 1 : size;
}

// Layers with the same parameters, where that is not refused.
static void plan_test_share_(ModelConfig* cfg, Options* o, Rand* rng) {
    static const char* const words[] = {"off", "all", "pairs", "loop:2"};
    const char* word = words[plan_test_one_of_(rng, sizeof(words) / sizeof(words[0]))];
    const Freeze freeze = freeze_of(*cfg, o->optimizer.freeze);
    ModelConfig shared = *cfg;
    char error[ERROR_BYTES];
    if (share_parse(&shared.share, cfg->L, word, error) && freeze_check_shared(&freeze, shared, error) &&
        !(share_is_loop(shared) && (o->ranks.zero > 1 || o->memory.update_in_backward))) {
        *cfg = shared;
        o->model.share_layers = word;
    }
}

// For the trainer that `program` names. The text of numbers only lives until the next call.
static Settled plan_test_run(int k, OptionsProgram program, SafeTensorsDtype dtype) {
    static const char* const frozen[] = {"", "embeddings,attention", "wpe,ln1w,mlp,blocks[0]"};
    static const OptimizerName optimizers[] = {OPTIMIZER_WORDS(WORDS_VALUE)};
    static char number[3][16];
    Rand rng = rand_open(42, (uint64_t)k);
    const int batch = 1 + plan_test_one_of_(&rng, 5), T = 1 + plan_test_one_of_(&rng, 40);
    const int heads = 1 + plan_test_one_of_(&rng, 3);
    ModelConfig cfg = {40, 100, 128, 1 + plan_test_one_of_(&rng, 4), heads, 32 * heads, SHARE_OFF};
    snprintf(number[0], sizeof(number[0]), "%d", batch);
    snprintf(number[1], sizeof(number[1]), "%d", T);
    snprintf(number[2], sizeof(number[2]), "%d", T * (1 + plan_test_one_of_(&rng, 20)));
    const char* line[] = {"test",    "--batch", number[0], "--seq-len", number[1], "--total-batch",
                          number[2], "--steps", "10",      "--threads", "2"};
    const int count = (int)(sizeof(line) / sizeof(line[0])) - (program.trainer == OPTION_GPU ? 2 : 0);
    Options options, *o = &options;
    ModelUse use = USE_TRAIN;
    options_parse(o, count, (char**)line, program);
    o->memory.recompute = plan_test_one_of_(&rng, RECOMPUTE_BLOCK + 1);
    Ranks ranks = plan_test_ranks_(&rng, program.trainer == OPTION_GPU ? 3 : 2);
    o->ranks.zero = ranks.zero;
    plan_test_gpu_(o, &ranks, &rng);
    o->optimizer.freeze = frozen[plan_test_one_of_(&rng, cfg.L > 1 ? 3 : 2)];
    o->optimizer.name = optimizers[plan_test_one_of_(&rng, sizeof(optimizers) / sizeof(optimizers[0]))];
    o->optimizer.sgd_momentum = plan_test_one_of_(&rng, 2) ? 0.9f : 0;
    o->optimizer.muon_rows = o->optimizer.sgd_momentum > 0;
    o->optimizer.muon_momentum =
        o->optimizer.name == OPTIMIZER_MUON && heads == 2 && ranks.grid.shape.tensor == 1;
    o->optimizer.adafactor_scale = o->optimizer.sgd_momentum > 0;
    o->optimizer.adafactor_beta1 = o->optimizer.name == OPTIMIZER_ADAFACTOR ? o->optimizer.sgd_momentum : 0;
    if (o->memory.offload_optimizer && o->optimizer.name == OPTIMIZER_SGD) {
        o->optimizer.name = OPTIMIZER_ADAMW; // it may have no state, and is refused then
    }
    o->output.save_every = 3 * plan_test_one_of_(&rng, 2);
    if (k % 8 == 7) { // generation
        use = USE_GENERATE;
        ranks = ranks_of_data(0, 1, 0, 1);
        o->ranks.zero = o->output.save_every = 0;
        o->memory.logits_chunk = batch;
        o->memory.offload_optimizer = o->memory.offload_residuals = o->memory.offload_params = 0;
        o->texts.quantize = plan_test_one_of_(&rng, 2);
    } else if (k % 8 == 6) { // only tasks
        use = USE_EVALUATE;
        o->batch.steps = o->output.save_every = 0;
        o->memory.master_weights = o->ranks.zero = o->memory.offload_optimizer = o->memory.offload_residuals =
            o->memory.offload_params = 0;
        o->tasks.files = "tasks.jsonl";
        o->texts.quantize = plan_test_one_of_(&rng, 2);
    } else if (ranks_size(&ranks) == 1 && o->ranks.zero < 2 && !o->memory.offload_optimizer) {
        o->memory.update_in_backward = plan_test_one_of_(&rng, 2);
    }
    plan_test_share_(&cfg, o, &rng);
    Settled s = settled_of(o, cfg, use, ranks, dtype);
    if (use == USE_TRAIN && k % 3 == 1) {
        const ModelConfig teacher = {50, 130, 256, 2, 2, 64, SHARE_OFF};
        s.teacher = teacher;
        s.options.teacher.quantize = plan_test_one_of_(&rng, 2);
    }
    return s;
}

static void plan_test_print_(const char* words, const Memory* memory) {
    printf("%s:", words);
    for (int i = 0; i < memory->num_entries; i++) {
        printf(" %s %zu", memory->entries[i].kind, memory->entries[i].bytes);
    }
    printf("\n");
}

static void plan_test_compare(int k, const Memory* planned, const Memory* taken, MemoryPlace place,
                              size_t allocated) {
    const size_t bytes = memory_bytes(taken, place);
    memory_check(taken, planned);
    memory_check(planned, taken);
    EXPECT(allocated == bytes, "run %d, place %d: %zu bytes were allocated, %zu taken", k, (int)place,
           allocated, bytes);
    if (allocated != bytes) {
        plan_test_print_("taken", taken);
    }
}

#endif
