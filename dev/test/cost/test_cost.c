// test_cost.c -- cost.h: the planned time of an update: its FLOP follow the formulas, and it grows
// with the work.
#include "llmc/cost/cost.h"

#include "dev/test/lib/settled_alone.h"
#include "dev/test/lib/test.h"
#include "llmc/plan/plan.h"
#include "llmc/cost/cost_measured.h"

static const ModelConfig CFG = {256, 1000, 1024, 4, 4, 256, SHARE_OFF};

static Options options_of(int trainer, const char* option, const char* value) {
    const char* line[] = {"test", "--batch", "4", "--total-batch", "2048", "--seq-len", "256", option, value};
    Options o;
    options_parse(&o, option ? 9 : 7, (char**)line, options_program(trainer));
    o.ranks.zero = 0;
    o.memory.recompute = option && strcmp(option, "--recompute") == 0 ? o.memory.recompute : RECOMPUTE_NONE;
    return o;
}

// A device whose only limit is one kind of work, a second for each unit; all others take no time.
static CostRates rates_of(CostKind kind) {
    CostRates rates = {{0}, 0, "made up"};
    for (int i = 0; i < COST_RATES; i++) {
        rates.per_s[i] = i == (int)kind ? 1 : INFINITY;
    }
    rates.launch_s = kind == COST_LAUNCHES;
    return rates;
}

static Settled settled_for(ModelConfig cfg, const Options* o) {
    return settled_alone(o, cfg, USE_TRAIN, SAFETENSORS_F32);
}

static double seconds_of(const Settled* s, CostKind kind) {
    const CostRates rates = rates_of(kind);
    const CostUpdate update = cost_update(s, &rates);
    double seconds = 0;
    for (int i = 0; i < COST_MOVES; i++) { // without transfers
        seconds += update.s[i];
    }
    return seconds;
}

// Returns the planned seconds of one rank.
static double seconds(ModelConfig cfg, const Options* o, CostKind kind) {
    const Settled s = settled_for(cfg, o);
    return seconds_of(&s, kind);
}

static double seconds_of_ranks(int size, const Options* o, CostKind kind) {
    const Ranks ranks = ranks_of_data(0, size, o->ranks.zero, size);
    const Settled s = settled_of(o, CFG, USE_TRAIN, ranks, SAFETENSORS_F32);
    return seconds_of(&s, kind);
}

// More processes than there are sequences, or tokens: the work of one that has anything to do.
TEST(many_processes) {
    const Options o = options_of(OPTION_CPU, NULL, NULL);
    const double least = seconds_of_ranks(8, &o, COST_MATMULS); // a sequence each
    for (int ranks = 16; ranks <= 1 << 20; ranks *= 16) {
        const double now = seconds_of_ranks(ranks, &o, COST_MATMULS);
        EXPECT(now == least, "%d ranks: %.0f of %.0f", ranks, now, least);
    }
}

static const double TOKENS = 2048, BLOCK = 12.0 * 256 * 256, HEAD = 1024.0 * 256;

TEST(flops) {
    const Options o = options_of(OPTION_CPU, NULL, NULL),
                  muon = options_of(OPTION_CPU, "--optimizer", "muon"),
                  soap = options_of(OPTION_CPU, "--optimizer", "soap");
    const double matmuls = 6 * TOKENS * (4 * BLOCK + HEAD), attention = 7.0 * TOKENS * 256 * 256 * 4;
    EXPECT(seconds(CFG, &o, COST_MATMULS) == matmuls, "matmuls: %.0f of %.0f", seconds(CFG, &o, COST_MATMULS),
           matmuls);
    EXPECT(seconds(CFG, &o, COST_ATTENTION) == attention, "attention: %.0f of %.0f",
           seconds(CFG, &o, COST_ATTENTION), attention);
    const double layer = 4 * muon_flops(256, 256) + 2 * muon_flops(256, 1024);
    EXPECT(seconds(CFG, &muon, COST_MATMULS) == matmuls + 4 * layer, "Muon's own matmuls");
    const double turned = 4 * soap_flops(256, 256, 256, 256, 10) + 2 * soap_flops(256, 1024, 256, 1024, 10);
    EXPECT_NEAR(seconds(CFG, &soap, COST_MATMULS) / (matmuls + 4 * turned), 1, 1e-12, "SOAP's own matmuls");
    const double updated = seconds(CFG, &o, COST_UPDATE), n = model_count_stored(CFG);
    EXPECT(updated >= adamw_bytes(n) && updated < 1.02 * adamw_bytes(n), "AdamW: %.0f bytes of %.0f", updated,
           adamw_bytes(n));
}

// A teacher adds its forward pass: a third of training it.
TEST(teacher) {
    const Options o = options_of(OPTION_CPU, NULL, NULL);
    Settled s = settled_for(CFG, &o);
    const double alone = seconds_of(&s, COST_MATMULS), losses = seconds_of(&s, COST_CLASSIFIER);
    s.teacher = CFG;
    s.teacher.L = 7;
    const double forward = 2 * TOKENS * (7 * BLOCK + HEAD);
    EXPECT(seconds_of(&s, COST_MATMULS) == alone + forward, "matmuls: %.0f, and %.0f alone",
           seconds_of(&s, COST_MATMULS), alone);
    EXPECT(seconds_of(&s, COST_CLASSIFIER) > losses, "losses");
}

// Returns the bytes of other passes over memory.
static double passes(ModelConfig cfg, const Options* o) {
    const CostRates rates = rates_of(COST_MEMORY);
    const Settled s = settled_for(cfg, o);
    return cost_update(&s, &rates).s[COST_MEMORY];
}

// Grouped heads, gates, a head of its own, windows: each layer takes its sizes from the model.
TEST(architectures) {
    const Options o = options_of(OPTION_CPU, NULL, NULL);
    ModelConfig cfg = CFG; // of 4 heads of 64
    cfg.arch = ARCH_LLAMA;
    cfg.KV = 2;
    cfg.F = 512;
    cfg.has_head = 1;
    const double block = 256.0 * (256 + 2 * 128) + 256.0 * 256 + 3 * 256.0 * 512;
    const double matmuls = 6 * TOKENS * (4 * block + HEAD), activation = TOKENS * 512 * 4.0 * 4 * (3 + 5);
    EXPECT(seconds(cfg, &o, COST_MATMULS) == matmuls, "matmuls: %.0f of %.0f", seconds(cfg, &o, COST_MATMULS),
           matmuls);
    EXPECT(seconds(cfg, &o, COST_ACTIVATION) == activation, "activations: %.0f of %.0f",
           seconds(cfg, &o, COST_ACTIVATION), activation);
    ModelConfig biased = cfg;
    biased.arch = ARCH_QWEN2; // biases of queries, keys and values
    const double sums = TOKENS * 4 * 4.0 * (256 + 2 * 128), more = passes(biased, &o) - passes(cfg, &o);
    EXPECT(fabs(more - sums) < 0.001 * sums, "gradients of biases: %.0f bytes of %.0f", more, sums);
    cfg.window = 64;
    cfg.windows[0] = 5; // layers 0 and 2
    const double all = 256.0 * 256, near = 2 * 256.0 * 64 * (1 - 64 / 512.0);
    EXPECT(seconds(cfg, &o, COST_ATTENTION) == 7.0 * TOKENS * (2 * all + 2 * near), "windows: %.0f FLOP",
           seconds(cfg, &o, COST_ATTENTION));
}

// Each token pays for the experts that it takes, and for the padding of all; all are updated. The
// CPU starts the matmuls of each expert.
TEST(experts) {
    const Options o = options_of(OPTION_CPU, NULL, NULL), gpu = options_of(OPTION_GPU, NULL, NULL);
    ModelConfig dense = CFG, cfg = CFG;
    dense.arch = ARCH_QWEN2, dense.KV = 4, dense.HS = 64, dense.F = 512;
    cfg = dense;
    cfg.arch = ARCH_GLM4MOE, cfg.E = 8, cfg.E_used = 2, cfg.F = 256, cfg.Fs = 256;
    const double rows = 2 * TOKENS + 2 * 8 * 15.5, // of two micro-batches
        router = 256.0 * 8, of_experts = 3 * 256.0 * 256, shared = 3 * 256.0 * 256,
                 attention = 4 * 256.0 * 256;
    const double wanted =
        6 * (4 * (TOKENS * (attention + router + shared) + rows * of_experts) + TOKENS * HEAD);
    EXPECT(seconds(cfg, &o, COST_MATMULS) == wanted, "matmuls: %.0f of %.0f", seconds(cfg, &o, COST_MATMULS),
           wanted);
    const double activation = (rows + TOKENS) * 256 * 4.0 * 4 * (3 + 5);
    EXPECT(seconds(cfg, &o, COST_ACTIVATION) == activation, "activations: %.0f of %.0f",
           seconds(cfg, &o, COST_ACTIVATION), activation);
    const double updated = seconds(cfg, &o, COST_UPDATE), n = model_count_stored(cfg);
    EXPECT(updated >= adamw_bytes(n) && updated < 1.02 * adamw_bytes(n), "AdamW: %.0f bytes of %.0f", updated,
           adamw_bytes(n));
    const double more = seconds(cfg, &o, COST_LAUNCHES) - seconds(dense, &o, COST_LAUNCHES),
                 one = seconds(cfg, &gpu, COST_LAUNCHES) - seconds(dense, &gpu, COST_LAUNCHES);
    EXPECT(more - one == 2 * 4 * 6 * 7.0, "launches: %.0f more on a CPU, %.0f on a GPU", more, one);
    const double moved = passes(cfg, &o) - passes(dense, &o), least = 4 * 4.0 * 256 * 8 * rows;
    EXPECT(moved > least && moved < 3 * least, "gathers and sums: %.0f bytes of %.0f", moved, least);
    cfg.E_used = 4;
    EXPECT(seconds(cfg, &o, COST_MATMULS) - wanted == 6 * 4 * 2 * TOKENS * of_experts, "two more experts");
}

// Three sequences in two micro-batches: each has one and a half.
TEST(parts_of_a_sequence) {
    Options o = options_of(OPTION_CPU, NULL, NULL);
    o.batch.total = 3 * 256;
    o.batch.size = 2;
    const double attention = 7.0 * 3 * 256 * 256 * 256 * 4;
    EXPECT(seconds(CFG, &o, COST_ATTENTION) == attention, "attention: %.0f of %.0f",
           seconds(CFG, &o, COST_ATTENTION), attention);
}

// Counts the work that a level repeats in the forward pass, in FLOP of matmuls.
TEST(recompute) {
    static const double again[] = {0, 0, 0, 4.0 / 12, 8.0 / 12};
    static const char* const words[] = {"0", "1", "2", "mlp", "3"};
    const Options none = options_of(OPTION_CPU, NULL, NULL);
    for (int level = RECOMPUTE_NONE; level <= RECOMPUTE_BLOCK; level++) {
        const Options o = options_of(OPTION_CPU, "--recompute", words[level]);
        const double more = seconds(CFG, &o, COST_MATMULS) - seconds(CFG, &none, COST_MATMULS),
                     wanted = again[level] * 2 * TOKENS * 4 * BLOCK;
        EXPECT(fabs(more - wanted) <= 1e-9 * wanted, "--recompute %s: %.0f FLOP of %.0f", words[level], more,
               wanted);
        const double norms = seconds(CFG, &o, COST_NORMS) / seconds(CFG, &none, COST_NORMS),
                     gelu = seconds(CFG, &o, COST_ACTIVATION) / seconds(CFG, &none, COST_ACTIVATION);
        EXPECT(level < RECOMPUTE_NORMS ? norms == 1 : norms > 1.29 && norms < 1.34,
               "--recompute %s: norms %g", words[level], norms);
        EXPECT(level < RECOMPUTE_ACTIVATION ? gelu == 1 : fabs(gelu - 7.0 / 5) < 1e-9,
               "--recompute %s: GELU %g", words[level], gelu);
    }
    const Options all = options_of(OPTION_CPU, "--recompute", "3");
    EXPECT(seconds(CFG, &all, COST_ATTENTION) == seconds(CFG, &none, COST_ATTENTION) * 9 / 7,
           "and attention");
}

TEST(growth) {
    ModelConfig twice = CFG;
    twice.L = 8;
    for (int kind = 0; kind < COST_MOVES; kind++) {
        Options o = options_of(OPTION_CPU, NULL, NULL);
        const double one = seconds(CFG, &o, (CostKind)kind);
        const double two = seconds(twice, &o, (CostKind)kind);
        const char* word = cost_word((CostKind)kind, ACTIVATION_GELU);
        EXPECT(two <= 2 * one && (kind == COST_CLASSIFIER ? two == one : two > 1.6 * one),
               "twice the layers, %s: %g s of %g s", word, two, one);
        o.batch.total *= 2; // four micro-batches instead of two
        const double more = seconds(CFG, &o, (CostKind)kind);
        EXPECT(kind == COST_UPDATE ? more == one : more > 1.7 * one && more <= 2 * one,
               "twice the tokens, %s: %g s of %g s", word, more, one);
    }
}

TEST(options) {
    const Options o = options_of(OPTION_CPU, NULL, NULL), gpu = options_of(OPTION_GPU, NULL, NULL);
    const Options frozen = options_of(OPTION_CPU, "--freeze", "embeddings,blocks[0-1]");
    // two blocks and the classifier: forward; gradient of the inputs of all but two blocks; two
    // blocks' weights
    const double matmuls =
        2 * TOKENS * (4 * BLOCK + HEAD) + 2 * TOKENS * (2 * BLOCK + HEAD) + 2 * TOKENS * 2 * BLOCK;
    EXPECT(seconds(CFG, &frozen, COST_MATMULS) == matmuls, "--freeze: %.0f of %.0f",
           seconds(CFG, &frozen, COST_MATMULS), matmuls);
    EXPECT(seconds(CFG, &frozen, COST_UPDATE) < seconds(CFG, &o, COST_UPDATE), "frozen: less to update");
    EXPECT(seconds(CFG, &gpu, COST_MEMORY) < seconds(CFG, &o, COST_MEMORY), "a GPU fuses residuals");
    Options of_two = o;
    of_two.ranks.zero = 1;
    EXPECT(seconds_of_ranks(2, &of_two, COST_MATMULS) == seconds(CFG, &o, COST_MATMULS) / 2,
           "two processes share the tokens");
    const double share = seconds_of_ranks(2, &of_two, COST_UPDATE) / seconds(CFG, &o, COST_UPDATE);
    EXPECT(0.5 <= share && share < 0.51, "and with --zero 1 the update: %g", share);
    const Options fcw = options_of(OPTION_CPU, "--freeze", "fcw");
    EXPECT(seconds(CFG, &o, COST_MATMULS) - seconds(CFG, &fcw, COST_MATMULS) == 2 * TOKENS * 4 * BLOCK / 3,
           "--freeze fcw: its gradient's product is left out");
    Options chunks = gpu, small = o;
    chunks.memory.logits_chunk = 256; // four of a micro-batch
    EXPECT(seconds(CFG, &chunks, COST_MATMULS) == seconds(CFG, &gpu, COST_MATMULS) &&
               seconds(CFG, &chunks, COST_LAUNCHES) == seconds(CFG, &gpu, COST_LAUNCHES) + 2 * 3 * 4,
           "the classifier in chunks: the same work, more launches");
    small.batch.size = 8;
    const double less = seconds(CFG, &o, COST_MEMORY) - seconds(CFG, &small, COST_MEMORY);
    EXPECT(less > 4 * (5 * 4 * BLOCK + 5 * HEAD),
           "one micro-batch reads fewer weights, and adds to no gradients: %.0f", less);
    small.batch.size = 1;
    EXPECT(seconds(CFG, &small, COST_LAUNCHES) > 3 * seconds(CFG, &o, COST_LAUNCHES),
           "small micro-batches: more launches");
}

// Bytes count where they take longer than FLOP.
TEST(bound) {
    const Options o = options_of(OPTION_CPU, NULL, NULL);
    const Settled s = settled_for(CFG, &o);
    CostRates rates = rates_of(COST_MEMORY);
    const CostUpdate slow = cost_update(&s, &rates);
    rates.per_s[COST_MATMULS] = 1e-6;
    const CostUpdate slower = cost_update(&s, &rates);
    EXPECT(slow.s[COST_MATMULS] > 0, "matmuls read their matrices");
    EXPECT(slower.s[COST_MATMULS] == 6e6 * TOKENS * (4 * BLOCK + HEAD), "the larger one, not the sum");
}

// Twice as fast in fp8: eleven twelfths of a block, in two of three passes.
TEST(fp8) {
    const Options o = options_of(OPTION_GPU, NULL, NULL);
    const Settled s = settled_for(CFG, &o);
    CostRates rates = rates_of(COST_MATMULS);
    rates.fp8_per_s = 2;
    const double got = cost_update(&s, &rates).s[COST_MATMULS],
                 want = 6 * TOKENS * (4 * BLOCK * (1 - 2.0 / 3 * 11 / 12 / 2) + HEAD);
    EXPECT_NEAR(got, want, 1e-9 * want, "matmuls");
}

// On this machine, at sizes that are quick.
TEST(rates) {
    Options o = options_of(OPTION_CPU, NULL, NULL);
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
        CostRates rates = {{0}, 0, ""};
        o.memory.matmul = is_bf16 ? MATMUL_BF16 : MATMUL_FP32;
        const Settled s = settled_for(CFG, &o);
        rates_measure(&rates, &s);
        for (int kind = 0; kind < COST_RATES; kind++) {
            EXPECT(rates.per_s[kind] > 1e6 && rates.per_s[kind] < 1e15, "%s: %g per second",
                   cost_word((CostKind)kind, ACTIVATION_GELU), rates.per_s[kind]);
        }
        EXPECT(rates.launch_s > 0 && rates.launch_s < 0.1, "a launch: %g s", rates.launch_s);
    }
}

TEST(moves) {
    Memory memory = memory_dry();
    memory_set_moves(memory_count(&memory, "state", MEMORY_HOST, 1000), 2, 1);
    memory_set_moves(memory_count(&memory, "file", MEMORY_DISK, 300), 1, 1);
    const Options o = options_of(OPTION_CPU, NULL, NULL);
    const Settled s = settled_for(CFG, &o);
    const CostRates rates = rates_of(COST_KINDS);
    const CostUpdate update = plan_update(&s, &rates, &memory);
    EXPECT(cost_total_s(&update) == 2000 / PLAN_BUS_BYTES_PER_S + 600 / PLAN_DRIVE_BYTES_PER_S,
           "offloading: %g s", cost_total_s(&update));
}

// The widest models and heads: operations stay within their arrays, as the address sanitizer sees,
// and reach something.
TEST(rates_of_wide_models) {
    static const ModelConfig wide = {4096, 2000000, 2000000, 1, 85, 65280, SHARE_OFF};
    for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
        CostRates rates;
        Options o = options_of(OPTION_CPU, NULL, NULL);
        o.batch.seq_len = 32;
        o.memory.matmul = is_bf16 ? MATMUL_BF16 : MATMUL_FP32;
        const Settled s = settled_for(wide, &o);
        rates_measure(&rates, &s);
        for (int kind = 0; kind < COST_RATES; kind++) {
            EXPECT(rates.per_s[kind] > 0 && isfinite(rates.per_s[kind]), "bf16 %d, %s: %g", is_bf16,
                   cost_word((CostKind)kind, ACTIVATION_GELU), rates.per_s[kind]);
        }
    }
    for (int HS = 1; HS <= 768; HS++) { // with many tokens: at least one head, and no more than fit
        Rates_ r = {.C = 85 * HS, .NH = 85, .HS = HS};
        rates_set_rows_(&r, 4096, 3 * HS);
        const AttentionSizes sizes = rates_attention_sizes_(&r);
        EXPECT(sizes.NH >= 1 && sizes.HS == HS &&
                   (size_t)sizes.T * attention_qkv_size(sizes) <= RATES_ELEMENTS_,
               "heads of size %d: %d of them, %d tokens", HS, sizes.NH, sizes.T);
    }
}
