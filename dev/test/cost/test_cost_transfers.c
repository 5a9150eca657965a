// test_cost_transfers.c -- cost_transfers.h and cost.h: what the processes of a grid wait for,
// against the formulas of each kind.
#include "llmc/cost/cost_transfers.h"

#include "dev/test/lib/settled_alone.h"
#include "dev/test/lib/test.h"
#include "llmc/plan/plan.h"

enum { T = 4096 };
#define NODE 300e9
#define FLOPS 500e12 // per second, in matmuls

// A GPT-2 of width C and 4 layers.
static ModelConfig model_of(int C) {
    const ModelConfig cfg = {T, 50257, 50304, 4, C / 128, C, SHARE_OFF};
    return cfg;
}

static Options options_of(int batch, int64_t total_batch, const char* option, const char* value) {
    char b[16], all[32];
    snprintf(b, sizeof(b), "%d", batch);
    snprintf(all, sizeof(all), "%lld", (long long)total_batch);
    const char* line[] = {"test", "--batch", b, "--total-batch", all, "--seq-len", "4096", option, value};
    Options o;
    options_parse(&o, option ? 9 : 7, (char**)line, options_program(OPTION_GPU));
    o.memory.recompute = o.memory.recompute == OPTION_AUTO ? RECOMPUTE_NONE : o.memory.recompute;
    o.ranks.zero = o.ranks.zero == OPTION_AUTO ? 2 : o.ranks.zero;
    return o;
}

// Returns the settings of a process in a stage, in machines of 8.
static Settled settled_in(ModelConfig cfg, const Options* o, GridShape shape, int stage) {
    Grid grid = grid_of(shape, 0);
    grid.stage = stage;
    const int all = shape.data * shape.context, shards = all < 8 / shape.tensor ? all
                                                         : 8 / shape.tensor > 0 ? 8 / shape.tensor
                                                                                : 1;
    const Ranks ranks = {grid, o->ranks.zero, shards, 8};
    return settled_of(o, cfg, USE_TRAIN, ranks, SAFETENSORS_BF16);
}

// Matmuls at FLOPS; nothing else takes time.
static CostUpdate update_of(const Settled* s) {
    CostRates rates = {{0}, 0, "made up"};
    for (int kind = 0; kind < COST_RATES; kind++) {
        rates.per_s[kind] = kind == COST_MATMULS ? FLOPS : INFINITY;
    }
    return cost_update(s, &rates);
}

// The transfers of a tensor group take 463 (t - 1) / C of the matmuls of the blocks: 10 of 2 N C
// (t - 1) / t bytes at 300 GB/s against 72 N C^2 / t FLOP at 500 TFLOP/s.
TEST(tensor) {
    for (int C = 4096; C <= 8192; C *= 2) {
        for (int t = 2; t <= 8; t *= 2) {
            const Options o = options_of(16, 16 * T, NULL, NULL);
            const GridShape shape = {t, 1, 1, 1, 1};
            const ModelConfig cfg = model_of(C);
            const Settled s = settled_in(cfg, &o, shape, 0);
            const CostUpdate update = update_of(&s);
            const double blocks = 72.0 * 16 * T * C * C * cfg.L / t / FLOPS,
                         calls = (10.0 * cfg.L + 4) * 25e-6,
                         share = (update.s[COST_TENSOR] - calls) * 10 * cfg.L / (10 * cfg.L + 4) / blocks;
            EXPECT_NEAR(share / (463.0 * (t - 1) / C), 1, 1e-3, "C %d, t %d: %.3f of the matmuls", C, t,
                        share);
            EXPECT_NEAR(update.s[COST_MATMULS] / (blocks * (1 + 50304.0 / (12.0 * C * cfg.L))), 1, 1e-9,
                        "each process has 1/%d of the matmuls", t);
        }
    }
}

// Recomputed blocks gather and add up once more.
TEST(tensor_recompute) {
    const GridShape shape = {2, 1, 1, 1, 1};
    const Options none = options_of(1, T, NULL, NULL), all = options_of(1, T, "--recompute", "3");
    const ModelConfig cfg = model_of(4096);
    const Settled s = settled_in(cfg, &none, shape, 0), again = settled_in(cfg, &all, shape, 0);
    EXPECT_NEAR(update_of(&again).s[COST_TENSOR] / update_of(&s).s[COST_TENSOR],
                (12.0 * 4 + 4) / (10 * 4 + 4), 1e-9, "12 instead of 10 a block");
}

// Keys and values: 3 of 4 T C bytes a block, less with fewer heads of keys; over machines the
// gathers use 8 cards, their gradients one.
TEST(context) {
    const Options o = options_of(1, T, NULL, NULL);
    ModelConfig cfg = model_of(4096);
    const GridShape near = {1, 8, 1, 1, 1}, far = {1, 16, 1, 1, 1};
    Settled s = settled_in(cfg, &o, near, 0);
    const double bytes = 4.0 * T * 4096 * cfg.L, calls = 3.0 * cfg.L * 25e-6;
    EXPECT_NEAR((update_of(&s).s[COST_CONTEXT] - calls) / (3 * bytes * 7 / 8 / NODE), 1, 1e-9,
                "in a machine");
    EXPECT_NEAR(update_of(&s).s[COST_MATMULS],
                6.0 * T / 8 * (12.0 * 4 * 4096 * 4096 + 50304.0 * 4096) / FLOPS, 1e-9,
                "an 8th of the tokens");
    s = settled_in(cfg, &o, far, 0);
    const double start = 30e-6 + 2 * 2e-6;
    EXPECT_NEAR((update_of(&s).s[COST_CONTEXT] - 3 * cfg.L * start) /
                    (bytes * (2 * 15.0 / 16 / NODE + 8.0 / 16 / 42e9)),
                1, 1e-9, "over two machines");
    cfg.arch = ARCH_LLAMA, cfg.KV = 4, cfg.F = 14336;
    s = settled_in(cfg, &o, near, 0);
    EXPECT_NEAR((update_of(&s).s[COST_CONTEXT] - calls) / (3 * bytes / 8 * 7 / 8 / NODE), 1, 1e-9,
                "8 heads of queries for each of keys");
}

// Returns the line of the plan, in memory that the next call overwrites.
static const char* traffic_line(const Settled* s) {
    static char text[256];
    memset(text, 0, sizeof(text));
    FILE* file = fmemopen(text, sizeof(text) - 1, "w");
    plan_print_traffic(file, s);
    fclose(file);
    return text;
}

// Each group's traffic, of 4 micro-batches a stage: 10 transfers of parts a block and 4 outside,
// in a process of 2; keys and values twice and their gradients, of 8 N K numbers of 2 bytes; the
// stream of each micro-batch forward, its gradient back, in a middle stage. The line names what
// there is.
TEST(traffic) {
    const Options o = options_of(1, 4 * T, "--zero", "1");
    ModelConfig cfg = model_of(1024);
    cfg.L = 4;
    const GridShape shape = {2, 2, 1, 4, 1}, plain = {1, 1, 8, 1, 1}, alone = {1, 1, 1, 1, 1},
                    tensor = {2, 1, 1, 1, 1};
    const Settled s = settled_in(cfg, &o, shape, 1);
    const CostTraffic traffic = cost_traffic(&s);
    const double N = T / 2, stream = 2.0 * N * 1024;
    EXPECT_NEAR(traffic.tensor / (4 * (10 + 4) * stream / 2), 1, 1e-12, "tensor: %g", traffic.tensor);
    EXPECT_NEAR(traffic.context / (4 * 3 * (2.0 * T * 2 * 1024 / 2) / 2), 1, 1e-12, "context: %g",
                traffic.context);
    EXPECT_NEAR(traffic.pipeline / (4 * 2 * stream / 2), 1, 1e-12, "pipeline: %g", traffic.pipeline);
    char wanted[128];
    snprintf(wanted, sizeof(wanted),
             " MiB to its data group, %.1f MiB to its tensor group, %.1f MiB to its context group, ",
             traffic.tensor / (1 << 20), traffic.context / (1 << 20));
    EXPECT(strstr(traffic_line(&s), wanted) && strstr(traffic_line(&s), " MiB to other stages\n"), "%s",
           traffic_line(&s));
    const Settled two = settled_in(cfg, &o, tensor, 0), eight = settled_in(cfg, &o, plain, 0),
                  one = settled_in(cfg, &o, alone, 0);
    EXPECT(strncmp(traffic_line(&two), "each update: every GPU sends ", 29) == 0 &&
               strstr(traffic_line(&two), " MiB to its tensor group\n") && !strchr(traffic_line(&two), ','),
           "%s", traffic_line(&two));
    EXPECT(!strstr(traffic_line(&eight), " to "), "%s", traffic_line(&eight));
    EXPECT(!*traffic_line(&one), "%s", traffic_line(&one));
}

// Muon gets whole matrices of a tensor group, and the group the parts of the results: each process
// sends its half of them, and receives as much.
TEST(traffic_of_matrices) {
    const Options adamw = options_of(1, T, NULL, NULL), muon = options_of(1, T, "--optimizer", "muon");
    const GridShape shape = {2, 1, 1, 1, 1};
    const ModelConfig cfg = model_of(1024);
    const Settled a = settled_in(cfg, &adamw, shape, 0), m = settled_in(cfg, &muon, shape, 0);
    EXPECT_NEAR((cost_traffic(&m).tensor - cost_traffic(&a).tensor) /
                    (2 * 4 * (12.0 * 1024 * 1024 * cfg.L / 2) / 2),
                1, 1e-12, "%g more bytes", cost_traffic(&m).tensor - cost_traffic(&a).tensor);
}

static ModelConfig mixtral_of(int C) {
    ModelConfig cfg = model_of(C);
    cfg.arch = ARCH_MIXTRAL;
    cfg.E = 8, cfg.E_used = 2, cfg.F = 2 * C;
    return cfg;
}

// Rows of 2 experts a token, of 2 C bytes, travel 5 times a block to 3 of 4 processes, in 3 rounds.
// The backward pass computes the hidden layers again: 4 C F FLOP a row.
TEST(experts) {
    const Options o = options_of(1, 8 * T, NULL, NULL);
    const GridShape shape = {1, 1, 8, 1, 4}, none = {1, 1, 8, 1, 1};
    const ModelConfig cfg = mixtral_of(1024);
    const Settled s = settled_in(cfg, &o, shape, 0), all = settled_in(cfg, &o, none, 0);
    const CostUpdate update = update_of(&s), of_all = update_of(&all);
    const double L = cfg.L, rows = 2.0 * T + 8 * 31 / 2.0, bytes = 2.0 * T * 2 * 1024;
    EXPECT_NEAR(update.s[COST_EXPERTS] / (5 * L * (bytes * 3 / 4 / 300e9 + 3 * 25e-6)), 1, 1e-9, "%g s",
                update.s[COST_EXPERTS]);
    EXPECT(of_all.s[COST_EXPERTS] == 0, "%g s", of_all.s[COST_EXPERTS]);
    EXPECT_NEAR((update.s[COST_MATMULS] - of_all.s[COST_MATMULS]) / (L * rows * 4 * 1024 * 2048 / FLOPS), 1,
                1e-6, "hidden layers again");
    EXPECT_NEAR(cost_traffic(&s).experts / (5 * L * bytes * 3 / 4), 1, 1e-9, "%g bytes",
                cost_traffic(&s).experts);
}

// P - 1 of M + P - 1 micro-batches are idle; messages are 2 N C bytes each way.
TEST(pipeline) {
    const Options o = options_of(1, 16 * T, "--zero", "1");
    const GridShape shape = {1, 1, 8, 4, 1};
    const ModelConfig cfg = model_of(4096);
    const Settled first = settled_in(cfg, &o, shape, 1);
    const CostUpdate update = update_of(&first);
    const double M = 2, send = 2.0 * T * 4096 / 42e9 + 30e-6 + 4 * 2e-6, work = update.s[COST_MATMULS],
                 idle = update.s[COST_PIPELINE] - (M + 3) * 2 * send;
    EXPECT_NEAR(idle / (idle + work), 3.0 / (M + 3), 1e-9, "idle: %g s, work: %g s", idle, work);
    EXPECT_NEAR(work, 72.0 * 16 / 8 * T * 4096 * 4096 * first.part.L / FLOPS, 1e-9,
                "its layers, without the classifier");
    const Settled last = settled_in(cfg, &o, shape, 3);
    EXPECT(update_of(&last).s[COST_MATMULS] > 72.0 * 2 * T * 4096 * 4096 * last.part.L / FLOPS,
           "the last stage has it");
}

// Returns the seconds of ZeRO's transfers with this many tokens in the micro-batch of a GPU.
static double data_s(int batch, int gpus, int zero, int net_gbps) {
    const char* const stages[] = {"0", "1", "2", "3"};
    Options o = options_of(batch, (int64_t)2 * batch * gpus * T, "--zero", stages[zero]);
    o.ranks.net_gbps = net_gbps;
    const GridShape shape = {1, 1, gpus, 1, 1};
    const Settled s = settled_in(model_of(4096), &o, shape, 0);
    return update_of(&s).s[COST_DATA];
}

// In a machine, blocks are hidden from 1,700 tokens on: then only transfers outside of the blocks
// are left.
TEST(data) {
    const double outside = (50304.0 + T + 2) * 4096, once = 2 * 2 * outside * 7 / 8 / NODE;
    const double hidden = data_s(1, 8, 3, 0);
    EXPECT(once < hidden && hidden < 1.1 * once + 1e-3, "4096 tokens: %g s of %g", hidden, once);
    EXPECT(data_s(1, 8, 2, 0) <= hidden, "stage 2 moves less");
    EXPECT(data_s(1, 8, 2, 0) == data_s(1, 8, 2, 1), "in a machine the network does not count");
    EXPECT(data_s(4, 64, 2, 42) < data_s(4, 64, 2, 1), "a slow network");
    EXPECT(data_s(1, 64, 2, 1) > data_s(8, 64, 2, 1), "more tokens hide more");
    EXPECT(data_s(1, 1, 0, 0) == 0, "one process sends nothing");
}

// On CPUs nothing is hidden.
TEST(cpu) {
    const char* line[] = {"test", "--batch", "1", "--total-batch", "8192", "--seq-len", "4096"};
    Options o;
    options_parse(&o, 7, (char**)line, options_program(OPTION_CPU));
    o.memory.recompute = RECOMPUTE_NONE;
    o.ranks.zero = 1;
    const ModelConfig cfg = model_of(1024);
    const Settled s = settled_of(&o, cfg, USE_TRAIN, ranks_of_data(0, 2, 1, 2), SAFETENSORS_F32);
    const double bytes = 4 * model_count_stored(cfg) / 2;
    const double moved = update_of(&s).s[COST_DATA];
    EXPECT(moved > 2 * bytes / 10e9 && moved < 2.1 * bytes / 10e9, "%g s", moved);
}
