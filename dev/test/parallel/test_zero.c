// test_zero.c -- zero.h: each element belongs to one rank, for any number of ranks; the order of a
// reduction.
#include <stdlib.h>

#include "llmc/model/presets.h"
#include "llmc/model/freeze.h"
#include "llmc/parallel/zero.h"
#include "dev/test/lib/test.h"

// By where it begins.
static int by_logical(const void* a, const void* b) {
    const ZeroRange *x = (const ZeroRange*)a, *y = (const ZeroRange*)b;
    return (x->logical > y->logical) - (x->logical < y->logical);
}

// The pieces of one process fill its owned arrays: those of trained parts in the order of the
// gradient, then the frozen ones.
static void expect_pieces(const ZeroPlan* plan) {
    size_t at = 0;
    for (int part = 0; part < ZERO_PARTS; part++) {
        EXPECT(at == (part == ZERO_TRAINED ? 0 : zero_count(plan, ZERO_UPDATED)), "part %d begins at %zu",
               part, at);
        for (int g = 0; g < plan->groups; g++) {
            const ZeroPiece piece = zero_piece(plan, g, (ZeroPart)part);
            EXPECT(piece.owned == at && piece.count % TENSOR_SHARD_UNIT == 0, "part %d of group %d", part, g);
            EXPECT(part == ZERO_FROZEN || plan->stage == 0 || at == zero_shard_begin(plan, g),
                   "group %d of the gradient", g);
            at += piece.count;
        }
    }
    EXPECT(at == zero_count(plan, ZERO_OWNED), "%zu elements in pieces", at);
}

// Ranges of one process lie in its pieces, each where it is in the full arrays; frozen rows in
// frozen ones.
static void expect_places(const ZeroPlan* plan, const ZeroRange* ranges, int count, const TensorRow* rows) {
    for (int i = 0; i < count; i++) {
        const ZeroRange* r = &ranges[i];
        const int is_trained = zero_has_row(plan, r->row) && zero_has_gradient(plan, r->group);
        const ZeroPiece piece = zero_piece(plan, r->group, is_trained ? ZERO_TRAINED : ZERO_FROZEN);
        const size_t in_piece = r->owned - piece.owned;
        EXPECT(r->count > 0 && in_piece + r->count <= piece.count, "range %d of %d", i, count);
        EXPECT(r->full == piece.full + in_piece, "range %d is at %zu", i, r->full);
        EXPECT((rows[r->row].place == PLACE_ONCE) == (r->group == 0) && r->group < plan->groups, "group %d",
               r->group);
    }
}

// The ranges of all processes are all elements, each once, wherever they lie in memory.
static void test_cover_frozen(ModelConfig cfg, int stage, int size, int shards, unsigned frozen, int first) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const size_t max = (size_t)zero_max_ranges(cfg);
    ZeroRange* all = (ZeroRange*)check_alloc((size_t)size * max, sizeof(ZeroRange), "ranges");
    size_t count = 0, at = 0;
    for (int rank = 0; rank < (stage == 0 ? 1 : size); rank++) {
        ZeroPlan plan = zero_plan_two_levels(cfg, stage, rank, size, shards);
        zero_plan_freeze(&plan, cfg, frozen, first);
        zero_parameter_rows(rows, &plan, cfg, 2);
        const int own = zero_ranges(&plan, rows, cfg, all + count);
        EXPECT((size_t)own <= max && zero_group_begin(&plan, 1 + cfg.L) == zero_count(&plan, ZERO_FULL),
               "%d ranges", own);
        EXPECT(plan.once % ((size_t)size * 1024) == 0 && plan.block % ((size_t)size * 1024) == 0 &&
                   plan.trained_once % ((size_t)size * 1024) == 0 &&
                   plan.trained_block % ((size_t)size * 1024) == 0,
               "the groups");
        expect_pieces(&plan);
        expect_places(&plan, all + count, own, rows);
        count += (size_t)own;
    }
    qsort(all, count, sizeof(ZeroRange), by_logical);
    for (size_t i = 0; i < count && all[i].logical == at; i++) {
        at += all[i].count;
    }
    EXPECT((double)at == model_count_parameters(cfg), "%d processes, stage %d, %d channels: %zu elements",
           size, stage, cfg.C, at);
    free(all);
}

static void test_cover(ModelConfig cfg, int stage, int size, int shards) {
    test_cover_frozen(cfg, stage, size, shards, 0, 0);
}

// Trained parameters lie in the order of the table, each in units of its own, and the gradient has
// nothing but them.
static void test_frozen_layout(ModelConfig cfg, const char* list) {
    TensorRow rows[MODEL_PARAMETER_ROWS], grads[MODEL_PARAMETER_ROWS];
    ZeroPlan plan = zero_plan(cfg, 0, 0, 1);
    size_t next[2] = {0, 0}; // place of the next tensor in group 0, and in a block
    zero_plan_freeze(&plan, cfg, freeze_of(cfg, list).rows, 0);
    zero_parameter_rows(rows, &plan, cfg, 1);
    zero_gradient_rows(grads, &plan, cfg, 1);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const int b = rows[i].place == PLACE_BLOCK;
        const size_t at = tensor_offset_in_group(&rows[i]);
        if (!tensor_is_absent(&rows[i]) && zero_has_row(&plan, i)) {
            EXPECT(at == next[b], "%s: %s is at %zu, wanted %zu", list, rows[i].name, at, next[b]);
            EXPECT(grads[i].offset_bytes == zero_gradient_begin(&plan, b) + at, "%s: gradient of %s", list,
                   rows[i].name);
            next[b] += (tensor_layer_elements(&rows[i]) + 1023) / 1024 * 1024;
        }
        EXPECT(tensor_is_absent(&rows[i]) ||
                   zero_has_row(&plan, i) == (at < (b ? plan.trained_block : plan.trained_once)),
               "%s: %s", list, rows[i].name);
    }
    EXPECT(plan.trained_once == next[0] && plan.trained_block == next[1], "%s: trained parts", list);
}

// Two levels: each rank has a shard of its own, inside of its slice, and the replicas' parts of a
// slice are neighbors.
static void test_levels(ModelConfig cfg, int size, int shards) {
    char* is_taken = (char*)check_alloc((size_t)size, 1, "shards");
    const int replicas = size / shards;
    for (int rank = 0; rank < size; rank++) {
        const ZeroPlan two = zero_plan_two_levels(cfg, 2, rank, size, shards),
                       three = zero_plan_two_levels(cfg, 3, rank, size, shards);
        const ZeroCut own = zero_owned_cut(&two, 0), kept = zero_kept_cut(&three);
        EXPECT(own.parts == size && kept.parts == shards && own.part / replicas == kept.part &&
                   own.part % replicas == rank / shards && zero_kept_cut(&two).parts == 1,
               "rank %d of %d by %d: part %d, slice %d", rank, size, shards, own.part, kept.part);
        EXPECT(!is_taken[own.part], "part %d is taken", own.part);
        is_taken[own.part] = 1;
        EXPECT(zero_slice_elements(&three, 1) == (size_t)replicas * zero_shard_elements(&three, 1) &&
                   zero_count(&three, ZERO_SLICES) == (size_t)replicas * zero_count(&three, ZERO_SHARDS),
               "slices");
        int added = 0;
        for (int active = 0; active <= size; active++) { // ranks 0, 1, ... have a micro-batch
            const MicroStep step = {0, active, active, 1};
            const int before = rank / shards * shards, here = active - before;
            added = zero_adds_(&two, step);
            EXPECT(added == (here < 0        ? 0
                             : here > shards ? shards
                                             : here),
                   "%d of %d add in rank %d", added, active, rank);
        }
    }
    free(is_taken);
}

TEST(covers) {
    static const ModelConfig odd = {7, 131, 201, 3, 3, 33, SHARE_OFF},
                             one_layer = {8, 5, 128, 1, 1, 1, SHARE_OFF};
    int count;
    const ModelPreset* models = model_presets(&count);
    for (int size = 1; size <= 70; size++) {
        test_cover(odd, 2, size, size);
        test_cover(odd, 3, 2 * size, 2);
        test_cover(one_layer, 1, size, size);
        test_cover_frozen(odd, 1 + size % 2, size, size, freeze_of(odd, "wpe,ln1w,qkvw,fcb").rows, size % 4);
        test_cover_frozen(odd, size % 3, size, 1, freeze_of(odd, "embeddings,lnf?").rows, 0);
        test_cover_frozen(one_layer, 2, size, size, freeze_of(one_layer, "blocks").rows, 1);
        for (int shards = 1; shards <= size; shards++) {
            if (size % shards == 0) {
                test_levels(odd, size, shards);
            }
        }
    }
    for (int i = 0; i < count; i++) {
        const ModelConfig cfg = model_preset_config(&models[i], models[i].V ? models[i].V : GPT2_VOCAB);
        test_cover(cfg, 0, 3, 3);
        test_cover(cfg, 1, 1, 1);
        test_cover(cfg, 2, 2 + 7 * i % 69, 2 + 7 * i % 69);
    }
}

// An element is the same in full arrays and in a shard: a tensor of a layer is at the place that
// its row says.
TEST(full_places) {
    static const ModelConfig cfg = {7, 131, 201, 3, 3, 33, SHARE_OFF};
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const ZeroPlan plan = zero_plan(cfg, 0, 0, 4);
    zero_parameter_rows(rows, &plan, cfg, sizeof(float));
    ZeroRange* ranges = (ZeroRange*)check_alloc((size_t)zero_max_ranges(cfg), sizeof(ZeroRange), "ranges");
    const int count = zero_ranges(&plan, rows, cfg, ranges);
    EXPECT(count == 4 + 12 * 3, "%d ranges", count);
    for (int i = 0; i < count; i++) {
        const int l = ranges[i].group > 0 ? ranges[i].group - 1 : 0;
        char* memory = NULL;
        EXPECT((char*)tensor_at_layer(&rows[ranges[i].row], memory, l) - memory ==
                       (ptrdiff_t)(ranges[i].full * sizeof(float)) &&
                   ranges[i].owned == ranges[i].full,
               "range %d", i);
    }
    free(ranges);
}

// Memory of stages 0, 1 and 2.
TEST(memory) {
    static const ModelConfig cfg = {1024, GPT2_VOCAB, 50304, 12, 12, 768, SHARE_OFF};
    const ZeroPlan all = zero_plan(cfg, 0, 1, 8), one = zero_plan(cfg, 1, 1, 8),
                   two = zero_plan(cfg, 2, 1, 8);
    const size_t full = zero_count(&all, ZERO_FULL);
    EXPECT(zero_count(&all, ZERO_OWNED) == full && zero_count(&one, ZERO_OWNED) == full / 8 &&
               zero_count(&two, ZERO_OWNED) == full / 8,
           "what is updated");
    EXPECT(zero_grads_elements(&all, 1) == full && zero_grads_elements(&one, 1) == full &&
               zero_grads_elements(&two, 1) == two.once + two.block,
           "gradients");
    EXPECT((double)full < 1.002 * model_count_parameters(cfg) + 47.0 * 768, "little padding: %zu", full);
    static const char* const frozen[] = {"",    "embeddings", "embeddings,lnf?",           "attproj?,qkv?",
                                         "fc*", "ln1w",       "wpe,ln1b,attprojb,fcb,lnfw"};
    static const ModelConfig odd = {7, 131, 201, 3, 3, 33, SHARE_OFF};
    for (size_t i = 0; i < sizeof(frozen) / sizeof(frozen[0]); i++) {
        test_frozen_layout(cfg, frozen[i]);
        test_frozen_layout(odd, frozen[i]);
    }
}

// Returns the settings of `size` ranks in replicas of `replica`.
static MapOf data_ranks(ModelConfig cfg, int stage, int size, int replica) {
    MapOf of = map_of_model(cfg);
    of.stage = stage;
    of.data = size;
    of.replica = replica;
    return of;
}

// Frozen rows and blocks cause no traffic.
TEST(frozen_traffic) {
    static const ModelConfig cfg = {7, 131, 201, 5, 3, 33, SHARE_OFF};
    for (int stage = 0; stage <= 2; stage++) {
        char error[ERROR_BYTES];
        MapOf of = data_ranks(cfg, stage, 4, 4);
        EXPECT(freeze_parse(&of.freeze, cfg, "wte,qkvw,blocks[0-1]", error), "%s", error);
        const double n = (double)map_totals(&of, 0).elements[MAP_GRADIENTS];
        const ZeroTraffic a = zero_traffic(&of, 0, 2, 4, 2, 0);
        EXPECT(a.within == 0.75 * n * ((stage < 2 ? 4 : 8) + (stage == 0 ? 4 : 2)), "stage %d: %g", stage,
               a.within);
    }
}

// Computes the traffic of an update of two micro-steps.
TEST(traffic) {
    static const ModelConfig cfg = {7, 131, 201, 5, 3, 33, SHARE_OFF};
    for (int stage = 0; stage <= 3; stage++) {
        const MapOf one = data_ranks(cfg, stage, 4, 4), two = data_ranks(cfg, stage, 4, 2);
        MapOf ring = one;
        ring.ring_parameters = 1;
        const double n = (double)map_totals(&one, 0).elements[MAP_PARAMETERS],
                     block = (n - (double)map_totals(&ring, 0).elements[MAP_PARAMETERS]) / 4,
                     once = n - 5 * block;
        const ZeroTraffic a = zero_traffic(&one, 0, 2, 4, 2, 0), b = zero_traffic(&two, 0, 2, 4, 2, 0),
                          more = zero_traffic(&two, 0, 2, 4, 2, 800);
        // stage 3 collects 5 + 3 + 3 + 3 blocks
        const double shared[] = {4 * n, 2 * n, 2 * n, 2 * (once + 14 * block)};
        const double bytes = (stage < 2 ? 4 * n : 8 * n) + shared[stage];
        EXPECT(a.within == 0.75 * bytes && a.between == 0, "stage %d: %g", stage, a.within);
        EXPECT(b.within == 0.5 * bytes && b.between == 0.5 * (n / 2) * (stage == 0 ? 8 : 6),
               "stage %d in two levels: %g, %g", stage, b.within, b.between);
        EXPECT(more.within == b.within + 400 && more.between == b.between + 200, "800 bytes of operands");
    }
    const MapOf alone = data_ranks(cfg, 2, 1, 1);
    EXPECT(zero_traffic(&alone, 0, 2, 4, 2, 0).within == 0, "one process");
}

// The micro-batches of an update are dealt out in turn.
TEST(steps) {
    for (int sequences = 1; sequences <= 40; sequences++) {
        for (int B = 1; B <= 7; B++) {
            for (int size = 1; size <= 5; size++) {
                MicroSteps steps = micro_steps(sequences, B, size);
                const int64_t count = micro_steps_count(&steps);
                int batches = 0, m = 0, first = 0;
                for (MicroStep step; micro_steps_next(&steps, &step); m++) {
                    first = m == 0 ? step.active : first;
                    EXPECT(step.number == m && 0 < step.active && step.active <= size, "%d are active",
                           step.active);
                    EXPECT(step.of_update == first && step.is_last == (m + 1 == count),
                           "%d are active in the update, last %d", step.of_update, step.is_last);
                    batches += step.active;
                }
                EXPECT(batches == (sequences + B - 1) / B && m == (batches + size - 1) / size && m == count,
                       "%d sequences by %d, %d processes: %d micro-batches in %d micro-steps", sequences, B,
                       size, batches, m);
            }
        }
    }
}

// The sum of micro-batches, added one after another, is the same however many come at a time: what
// the others left behind in their pieces is not looked at.
TEST(order) {
    enum { N = 1000, BATCHES = 7 };
    static float batch[BATCHES][N], pieces[BATCHES * N], want[N], got[N];
    Rand rng = rand_open(1, 2);
    for (int k = 0; k < BATCHES; k++) {
        for (int i = 0; i < N; i++) {
            batch[k][i] = (float)rand_uniform(&rng) - 0.5f;
            want[i] += batch[k][i];
        }
    }
    const ZeroPieces of = {N, 0, 1};
    for (int size = 1; size <= BATCHES; size++) {
        MicroSteps steps = micro_steps(BATCHES, 1, size);
        for (MicroStep step; micro_steps_next(&steps, &step);) {
            for (int r = 0; r < size; r++) {
                for (int i = 0; i < N; i++) {
                    pieces[r * N + i] = r < step.active ? batch[step.number * size + r][i] : NAN;
                }
            }
            zero_add_pieces_cpu(got, pieces, of, step.active, step.number == 0);
        }
        EXPECT(memcmp(got, want, sizeof(want)) == 0, "%d processes", size);
    }
}

// ---- the embedding's gradient apart ----

// The embedding's gradient comes after all others, in pieces that shards can have, and changes no
// other place.
static void test_apart(ModelConfig cfg, int stage, int size) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const ZeroPlan joined = zero_plan(cfg, stage, size - 1, size);
    ZeroPlan apart = joined;
    zero_plan_apart(&apart, cfg);
    zero_parameter_rows(rows, &apart, cfg, 1);
    const int g = apart.groups;
    const size_t wte = rows[0].rows * rows[0].cols, unit = (size_t)size * TENSOR_SHARD_UNIT;
    EXPECT(apart.embedding >= wte && apart.embedding < wte + TENSOR_SHARD_UNIT && rows[0].offset_bytes == 0,
           "%zu elements, wte has %zu", apart.embedding, wte);
    EXPECT(zero_trained_elements(&apart, g) >= apart.embedding &&
               zero_trained_elements(&apart, g) % unit == 0,
           "%zu elements", zero_trained_elements(&apart, g));
    EXPECT(zero_gradient_begin(&apart, g) == zero_gradient_begin(&joined, g) &&
               zero_count(&apart, ZERO_GRADIENT) ==
                   zero_count(&joined, ZERO_GRADIENT) + zero_trained_elements(&apart, g),
           "stage %d, %d ranks: it begins at %zu", stage, size, zero_gradient_begin(&apart, g));
    EXPECT(zero_count(&apart, ZERO_UPDATED) == zero_count(&joined, ZERO_UPDATED) &&
               zero_count(&apart, ZERO_OWNED) == zero_count(&joined, ZERO_OWNED),
           "stage %d, %d ranks", stage, size);
    EXPECT(zero_grads_elements(&apart, 1) ==
               zero_grads_elements(&joined, 1) + zero_trained_elements(&apart, g),
           "%zu elements", zero_grads_elements(&apart, 1));
}

TEST(apart) {
    for (int stage = 0; stage <= 2; stage++) {
        for (int size = 1; size <= 5; size++) {
            ModelConfig cfg = model_preset_config(model_preset_by_name("gpt2:d12"), 999);
            cfg.L = 3;
            cfg.V = 999, cfg.Vp = 1024, cfg.C = 12, cfg.NH = 2, cfg.max_T = 7;
            cfg.part = (ModelPart){.layers = 3, .of_layers = 3};
            test_apart(cfg, stage, size);
        }
    }
}

// The first stage sums the embedding's gradient and has no state of wte; the last one owns wte; a
// model whose classifier has a matrix of its own needs neither.
TEST(stages_of_wte) {
    for (int has_head = 0; has_head < 2; has_head++) {
        for (int stage = 0; stage < 3; stage++) {
            const Freeze nothing = {0};
            ModelConfig cfg = model_preset_config(model_preset_by_name("gpt2:d12"), 999);
            cfg.has_head = has_head;
            cfg.L = 1;
            cfg.part = (ModelPart){.first_layer = stage, .layers = 1, .of_layers = 3};
            const Freeze freeze = freeze_of_part(&nothing, cfg);
            ZeroPlan plan = zero_plan(cfg, 1, 0, 2);
            zero_plan_freeze(&plan, cfg, freeze.rows, 0);
            zero_plan_apart(&plan, cfg);
            TensorRow rows[MODEL_PARAMETER_ROWS];
            zero_parameter_rows(rows, &plan, cfg, 1);
            const int is_tied = !has_head && stage != 1;
            EXPECT((plan.embedding > 0) == is_tied && plan.sums_embedding == (is_tied && stage == 0),
                   "stage %d", stage);
            EXPECT((freeze.rows & 1) == (is_tied && stage == 0) &&
                       (freeze.in_block[0] & 1) == (freeze.rows & 1),
                   "stage %d: frozen %x", stage, freeze.rows);
            EXPECT(tensor_is_absent(&rows[0]) == (has_head ? stage > 0 : stage == 1), "stage %d", stage);
            EXPECT(zero_has_gradient(&plan, 0) == (stage != 1), "stage %d", stage);
        }
    }
}
