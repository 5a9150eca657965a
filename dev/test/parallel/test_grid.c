// test_grid.c -- grid.h: ranks and places, groups, legal grids and the nearest ones.
#include <stdlib.h>
#include <string.h>

#include "llmc/model/presets.h"
#include "llmc/parallel/grid.h"
#include "dev/test/lib/test.h"

// The two processes are in the same group of a kind.
static int are_together(const Grid* a, const Grid* b, GridGroup group) {
    const int j = a->tensor_rank == b->tensor_rank, q = a->context_rank == b->context_rank,
              d = a->data_rank == b->data_rank, p = a->stage == b->stage;
    const int e = grid_experts(a->shape), D = a->shape.data,
              share = e == 1 ? d : a->data_rank / e == b->data_rank / e,
              same = e == 1 ? d : (a->data_rank + D - b->data_rank) % e == 0;
    return group == GRID_TENSOR    ? q && d && p
           : group == GRID_CONTEXT ? j && d && p
           : group == GRID_DATA    ? j && p
           : group == GRID_PIPE    ? j && q && d
                                   : j && q && p && (group == GRID_EXPERTS ? share : same);
}

// Each group has ranks 0 ... size - 1 in the order of all ranks, and a number of its own.
static void expect_group(GridShape shape, int rank, GridGroup group) {
    const Grid grid = grid_of(shape, rank);
    const GridMember mine = grid_member(&grid, group);
    int before = 0, size = 0, first = -1;
    for (int r = 0; r < grid_size(shape); r++) {
        const Grid other = grid_of(shape, r);
        const int together = are_together(&grid, &other, group);
        EXPECT(together == (grid_member(&other, group).first == mine.first), "ranks %d and %d", rank, r);
        first = together && first < 0 ? r : first;
        size += together;
        before += together && r < rank;
    }
    EXPECT(mine.first == first && mine.size == size && mine.rank == before,
           "group %d of rank %d: rank %d of %d from %d", group, rank, mine.rank, mine.size, mine.first);
}

static void test_shape(GridShape shape) {
    int telling = 0;
    for (int rank = 0; rank < grid_size(shape); rank++) {
        const Grid grid = grid_of(shape, rank);
        EXPECT(grid.tensor_rank < shape.tensor && grid.context_rank < shape.context &&
                   grid.data_rank < shape.data && grid.stage < shape.pipeline,
               "rank %d", rank);
        EXPECT(grid_rank(&grid) == rank, "%d, wanted %d", grid_rank(&grid), rank);
        const int by_formula =
            ((grid.stage * shape.data + grid.data_rank) * shape.context + grid.context_rank) * shape.tensor +
            grid.tensor_rank;
        EXPECT(by_formula == rank, "%d, wanted %d", by_formula, rank);
        telling += grid_tells(&grid);
        for (int group = 0; group < GRID_GROUPS; group++) {
            expect_group(shape, rank, (GridGroup)group);
        }
    }
    // each token once
    EXPECT(telling == shape.data * shape.context, "%d ranks tell", telling);
}

TEST(places) {
    for (int t = 1; t <= 64; t++) {
        for (int c = 1; t * c <= 64; c++) {
            for (int D = 1; t * c * D <= 64; D++) {
                for (int P = 1; t * c * D * P <= 64; P++) {
                    const GridShape shape = {t, c, D, P, D % 3 == 0 ? 3 : D % 2 == 0 ? 2 : 1};
                    test_shape(shape);
                }
            }
        }
    }
}

static void expect_place(GridShape shape, int rank, const char* wanted) {
    char text[96];
    const Grid grid = grid_of(shape, rank);
    grid_place(text, sizeof(text), &grid);
    EXPECT(strcmp(text, wanted) == 0, "rank %d: %s, wanted %s", rank, text, wanted);
}

TEST(names) {
    const GridShape plain = {1, 1, 8, 1, 1}, tensor = {2, 1, 1, 4, 1}, all = {2, 2, 2, 2, 2};
    expect_place(plain, 5, "");
    expect_place(tensor, 5, "tensor 1, stage 2");
    expect_place(all, 13, "tensor 1, context 0, data 1, experts 1, stage 1");
}

// ---- legal grids ----

// A GPT-2 model of this size on `ranks` processes of one machine, in bf16.
static GridRun run_of(const char* model, int T, int ranks) {
    GridRun run = {model_preset_config(model_preset_by_name(model), 50257), T, ranks, ranks, GRID_UNIT};
    return run;
}

static void expect_check(const GridRun* run, GridShape shape, const char* wanted) {
    char error[GRID_ERROR_BYTES] = "not set";
    const int ok = grid_check(shape, run, error);
    EXPECT(ok == !*wanted && strcmp(error, wanted) == 0, "%d, %s, wanted %s", ok, error, wanted);
}

TEST(refusals) {
    GridRun small = run_of("gpt2:d12", 1024, 8), large = run_of("gpt2:d48", 1024, 8);
    const GridShape none = {1, 1, 0, 1, 0}, thirds = {3, 1, 0, 1, 0}, eights = {8, 1, 0, 1, 0},
                    contexts = {2, 3, 0, 1, 0}, stages = {1, 1, 0, 3, 0}, deep = {1, 1, 0, 16, 0},
                    all = {2, 2, 0, 2, 0};
    expect_check(&small, none, "");
    expect_check(&small, all, "");
    expect_check(&small, thirds, "--tensor-parallel 3, 8 processes; wanted 2 or 4");
    expect_check(&small, eights, "--tensor-parallel 8, 12 heads; wanted 4");
    expect_check(&small, contexts, "--context-parallel 3, 8 processes in groups of 2; wanted 2 or 4");
    expect_check(&small, stages, "--pipeline-parallel 3, 8 processes; wanted 2 or 4");
    expect_check(&large, thirds, "--tensor-parallel 3, 8 processes; wanted 1"); // 25 heads
    small.ranks = 16;
    expect_check(&small, deep, "--pipeline-parallel 16, 12 layers; wanted 8");
}

TEST(refusals_of_sizes) {
    GridRun run = run_of("gpt2:d12", 1000, 8), experts = run_of("gpt2:d12", 1024, 12);
    const GridShape contexts = {2, 4, 0, 1, 0}, two = {2, 1, 0, 1, 0}, six = {6, 1, 0, 1, 0};
    expect_check(&run, contexts,
                 "--seq-len 1000, --context-parallel 4, --tensor-parallel 2; wanted a multiple of 16");
    run.T = 1026, run.unit = 64, run.ranks = 12;
    expect_check(&run, six, "");
    run.unit = 256;
    expect_check(&run, six, "--tensor-parallel 6, parts of 128 channels, no multiple of 256; wanted 3");
    experts.cfg.E = 4;
    expect_check(&experts, two, "--tensor-parallel 2, experts are not cut; wanted 1");
    experts.cfg.E = 0, experts.T = 1026;
    experts.cfg.arch = ARCH_LLAMA, experts.cfg.KV = 3;
    expect_check(&experts, two, "--tensor-parallel 2, 3 heads of keys; wanted 3");
    expect_check(&experts, six, "--tensor-parallel 6, 3 heads of keys; wanted 3");
    experts.cfg.KV = 0, experts.cfg.F = 3000;
    expect_check(&experts, two,
                 "--tensor-parallel 2, parts of 1500 hidden units, no multiple of 8; wanted 3");
}

TEST(refusals_of_experts) {
    GridRun run = run_of("llama:135m", 1024, 12);
    const GridShape two = {1, 1, 0, 1, 2}, three = {1, 1, 0, 1, 3}, five = {1, 1, 0, 1, 5},
                    four_of_stages = {1, 1, 0, 2, 4};
    expect_check(&run, two, "--expert-parallel 2, a model without experts; wanted 1");
    run.cfg.E = 8;
    expect_check(&run, two, "");
    expect_check(&run, three, "--expert-parallel 3, 8 experts; wanted 2 or 4");
    expect_check(&run, five, "--expert-parallel 5, 12 processes; wanted 4");
    expect_check(&run, four_of_stages, "--expert-parallel 4, 12 processes in groups of 2; wanted 2");
    run.cfg.L = 0;
    expect_check(&run, three, "");
}

// Before the model is known, only the processes count.
TEST(processes) {
    const GridRun run = {.ranks = 8, .node_ranks = 8, .unit = GRID_UNIT},
                  one = {.ranks = 1, .unit = GRID_UNIT};
    const GridShape two = {2, 1, 0, 1, 0}, thirds = {3, 1, 0, 1, 0}, deep = {1, 1, 0, 8, 0};
    expect_check(&run, two, "");
    expect_check(&run, deep, "");
    expect_check(&run, thirds, "--tensor-parallel 3, 8 processes; wanted 2 or 4");
    expect_check(&one, two, "--tensor-parallel 2, 1 process; wanted 1");
}

// grid_next finds what grid_check allows, each once.
TEST(search) {
    const char* const models[] = {"gpt2:d12", "gpt2:d36", "gpt2:d48"};
    for (size_t m = 0; m < sizeof(models) / sizeof(models[0]); m++) {
        for (int W = 1; W <= 64; W++) {
            const GridRun run = run_of(models[m], 1024, W);
            char error[GRID_ERROR_BYTES];
            int found = 0, legal = 0;
            for (GridShape shape = {0, 0, 0, 0, 0}; grid_next(&shape, &run); found++) {
                EXPECT(grid_check(shape, &run, error) && grid_size(shape) == W, "%s", error);
                EXPECT(found > 0 || (grid_is_plain(shape) && shape.data == W), "the first of %d", W);
            }
            for (int t = 1; t <= W; t++) {
                for (int c = 1; c <= W; c *= 2) {
                    for (int P = 1; P <= W; P++) {
                        const GridShape shape = {t, c, 0, P, 0};
                        legal += grid_check(shape, &run, error);
                    }
                }
            }
            EXPECT(found == legal, "%d of %d grids of %d", found, legal, W);
        }
    }
}
