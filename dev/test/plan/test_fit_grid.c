// test_fit_grid.c -- fit_grid.h: which grid of processes --fit chooses, and which grids it tries.
#include "llmc/plan/fit_grid.h"

#include "dev/test/lib/settled_alone.h"
#include "dev/test/lib/test.h"

// Memory of the parameters, and of what a micro-batch keeps.
static void fake_model(ModelPlan* plan, const Settled* s) {
    const Options* o = &s->options;
    const GridShape shape = s->ranks.grid.shape;
    const double parameters = 16 * model_count_stored(s->part) / (o->ranks.zero == 3 ? s->ranks.shards : 1),
                 kept = (double)o->batch.size * o->batch.seq_len / shape.context / shape.tensor * s->part.C *
                        s->part.L * (32 - 6 * o->memory.recompute);
    plan->memory = memory_dry();
    memory_count(&plan->memory, "parameters", MEMORY_DEVICE, (size_t)parameters);
    memory_count(&plan->memory, "activations", MEMORY_DEVICE, (size_t)kept);
}

static const CostRates RATES = {{600e12, 450e12, 2.7e12, 2.7e12, 2.7e12, 2.7e12, 2.7e12}, 2e-6, "made up"};

static FitDevice device_of(double gib) {
    const FitDevice device = {fake_model, (size_t)(gib * (1 << 30)), SIZE_MAX, 0, RATES};
    return device;
}

// A plan of this many GPUs in machines of 8; -1: an option that is not given.
static Settled settled_for(ModelConfig cfg, int gpus, int64_t sequences, int T, int zero) {
    char total[32], length[16], stage[8];
    snprintf(total, sizeof(total), "%lld", (long long)sequences * T);
    snprintf(length, sizeof(length), "%d", T);
    snprintf(stage, sizeof(stage), "%d", zero);
    const char* line[] = {"test", "--plan",    "--batch", "8",      "--total-batch",
                          total,  "--seq-len", length,    "--zero", stage};
    Options o;
    options_parse(&o, zero < 0 ? 8 : 10, (char**)line, options_program(OPTION_GPU));
    o.ranks.zero = zero < 0 ? 2 : zero;
    o.memory.recompute = RECOMPUTE_NONE;
    Ranks ranks = ranks_of_data(0, gpus, o.ranks.zero, gpus < 8 ? gpus : 8);
    ranks.node_ranks = gpus < 8 ? gpus : 8;
    return settled_of(&o, cfg, USE_TRAIN, ranks, SAFETENSORS_BF16);
}

static const ModelConfig SMALL = {4096, 50257, 50304, 12, 12, 768, SHARE_OFF},
                         WIDE = {131072, 50257, 50304, 32, 32, 4096, SHARE_OFF};

static FitWay choice_of(const Settled* s, double gib, FitGrids* grids) {
    const FitDevice device = device_of(gib);
    fit_grids(grids, s, &device);
    return grids->ways[fit_grids_choice(grids)];
}

static int is_grid(FitWay way, int t, int c, int P) {
    return way.shape.tensor == t && way.shape.context == c && way.shape.pipeline == P;
}

// Small models with sequences enough divide data alone.
TEST(data_alone) {
    static FitGrids grids;
    const Settled s = settled_for(SMALL, 8, 64, 1024, -1);
    const FitWay way = choice_of(&s, 80, &grids);
    EXPECT(is_grid(way, 1, 1, 1) && way.zero == 2 && way.shards == 8 && way.parts == 1,
           "--zero %d of %d, 1/%d", way.zero, way.shards, way.parts);
    EXPECT(grids.count >= FIT_SHOWN, "%d grids", grids.count);
    for (int i = 1; i < grids.count; i++) {
        const FitWay *a = &grids.ways[i - 1], *b = &grids.ways[i];
        EXPECT(a->update_s <= b->update_s && !fit_same_grid_(a->shape, b->shape),
               "%d: each grid once, in order", i);
    }
}

// Fewer sequences than GPUs: several share one.
TEST(few_sequences) {
    static FitGrids grids;
    Settled s = settled_for(WIDE, 64, 32, 4096, -1);
    FitWay way = choice_of(&s, 80, &grids);
    EXPECT(way.shape.tensor * way.shape.context == 2 && way.shape.pipeline == 1 && way.shape.data == 32,
           "tensor %d, context %d, pipeline %d", way.shape.tensor, way.shape.context, way.shape.pipeline);
    s = settled_for(WIDE, 64, 8, 4096, -1);
    way = choice_of(&s, 80, &grids);
    EXPECT(way.shape.tensor > 1 && way.shape.data == 8, "very few: tensor %d", way.shape.tensor);
    s = settled_for(WIDE, 64, 8, 131072, -1);
    way = choice_of(&s, 80, &grids);
    EXPECT(way.shape.tensor * way.shape.context == 8 && way.shape.context > 1,
           "long ones: tensor %d, context %d", way.shape.tensor, way.shape.context);
}

// A way that does not fit is not chosen, and less memory never makes an update faster.
TEST(memory) {
    static FitGrids grids;
    const Settled s = settled_for(WIDE, 8, 512, 4096, -1);
    double before = 0;
    for (double gib = 200; gib > 12; gib /= 1.5) {
        const FitWay way = choice_of(&s, gib, &grids);
        const FitDevice device = device_of(gib);
        FitWay again = way;
        again.bytes = 0;
        EXPECT(way.bytes <= device.limit && fit_way_fits_(&again, &s, &device) && again.bytes == way.bytes,
               "%.0f GiB: it takes %zu bytes", gib, way.bytes);
        EXPECT(grids.ways[0].update_s >= before, "%.0f GiB: %g s", gib, grids.ways[0].update_s);
        before = grids.ways[0].update_s;
    }
}

// A grid that is hardly faster does not win over a simpler one.
TEST(simple_grids_win) {
    static FitGrids grids;
    const FitWay plain = {{1, 1, 8, 1, 1}, 2, 8, 1, 0, 0, 1.02, 1},
                 tensor = {{2, 1, 4, 1, 2}, 2, 4, 1, 0, 0, 1, 1},
                 slow = {{1, 1, 8, 1, 1}, 2, 8, 1, 0, 0, 1.04, 1},
                 context = {{1, 2, 4, 1, 1}, 2, 8, 1, 0, 0, 1, 1};
    grids.count = 2;
    grids.ways[0] = tensor, grids.ways[1] = plain;
    EXPECT(fit_grids_choice(&grids) == 1, "2 %% slower");
    grids.ways[1] = slow;
    EXPECT(fit_grids_choice(&grids) == 0, "4 %% slower");
    grids.ways[0] = context, grids.ways[1] = tensor;
    EXPECT(fit_grids_choice(&grids) == 1, "tensor groups are simpler than context groups");
}

// Options of the command line stay. A stage has at least 4 micro-batches; ZeRO 3 has no stages.
TEST(tries) {
    FitWays ways = {NULL, 0};
    const Settled s = settled_for(WIDE, 64, 256, 4096, 3), any = settled_for(WIDE, 64, 256, 4096, -1);
    const FitDevice device = device_of(80);
    fit_add_grids_(&ways, &s, &device);
    EXPECT(ways.count > 0, "some");
    for (int i = 0; i < ways.count; i++) {
        EXPECT(ways.all[i].zero == 3 && ways.all[i].shape.pipeline == 1, "--zero 3 stays");
    }
    ways.count = 0;
    fit_add_grids_(&ways, &any, &device);
    int most_stages = 1, most_context = 1;
    for (int i = 0; i < ways.count; i++) {
        const FitWay* way = &ways.all[i];
        const int P = way->shape.pipeline, D = way->shape.data, B = 8 / way->parts;
        most_stages = P > most_stages ? P : most_stages;
        most_context = way->shape.context > most_context ? way->shape.context : most_context;
        EXPECT(P == 1 || (256 / (B * D) >= 4 * P && way->zero == (D * way->shape.context > 1)),
               "%d stages, batch %d, data %d, zero %d", P, B, D, way->zero);
        EXPECT(8 % way->shape.tensor == 0 && 32 % P == 0 && (D * way->shape.context) % way->shards == 0,
               "tensor %d, %d stages, shards of %d", way->shape.tensor, P, way->shards);
    }
    EXPECT(most_stages == 32 && most_context >= 8, "up to %d stages, contexts of %d", most_stages,
           most_context);
    free(ways.all);
}

// A run has only grids that its program can run; a plan has all.
TEST(gate) {
    static FitGrids grids;
    Settled s = settled_for(WIDE, 8, 4, 4096, -1);
    const FitDevice device = device_of(80);
    s.options.memory.update_in_backward = 1;
    fit_grids(&grids, &s, &device);
    EXPECT(grids.count == 1 && is_grid(grids.ways[0], 1, 1, 1), "--update-in-backward: %d grids",
           grids.count);
}

static void nothing_fits_body(const void* s) {
    const FitDevice device = device_of(0.001);
    FILE* nowhere = fopen("/dev/null", "w");
    fit_choose_grid(nowhere, (const Settled*)s, &device);
    fclose(nowhere);
}

TEST(nothing_fits) {
    const Settled s = settled_for(SMALL, 8, 64, 1024, -1);
    EXPECT(test_dies(nothing_fits_body, &s, 1, "ways fits into 1.0 MiB; wanted more processes or memory"),
           "an error");
}
