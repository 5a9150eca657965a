// test_owners.c -- owners.h: each owner gets whole matrices, and each rank its parts of the
// results, for all ranks of a grid. The messages of the ranks are copied here.
#include <string.h>

#include "dev/test/lib/map_test.h"
#include "dev/test/lib/test.h"
#include "llmc/model/part.h"
#include "llmc/optim/owners.h"

static const ModelConfig LLAMA = {.max_T = 7,
                                  .V = 131,
                                  .Vp = 256,
                                  .L = 3,
                                  .NH = 8,
                                  .C = 64,
                                  .arch = ARCH_LLAMA,
                                  .KV = 4,
                                  .HS = 16,
                                  .F = 192,
                                  .has_head = 1},
                         GPT = {.max_T = 7, .V = 100, .Vp = 128, .L = 2, .NH = 4, .C = 48};

enum { MOST_RANKS = 12 };

typedef struct {
    Memory memory;
    Map map;
    OptimizerState state;
    Owners owners;
    OwnersDeal deal;
    GroupMove moves[4 * MOST_RANKS * 4];
    int count; // of messages
} Rank;

// Returns what stands for an element of a whole tensor.
static float value_of(OwnedMatrix x, size_t element) {
    return (float)((element * 7 + (size_t)x.of->row * 1013 + (size_t)x.copy * 131) % 100003);
}

// Returns the number in the whole tensor of an element of a rank's part.
static size_t whole_of(const Rank* rank, const OwnersItem* item, size_t element) {
    const ModelConfig cfg = rank->map.cfg;
    return part_run(&rank->state.rows[item->x.of->row], model_of_part(cfg), cfg.part, element).whole;
}

// Copies the messages of ranks first, first + step, ...: message number k from one to another meets
// the other's number k.
static void exchange(Rank* ranks, int first, int step, int count) {
    for (int to = 0; to < count; to++) {
        const Rank* receiver = &ranks[first + to * step];
        int sent[MOST_RANKS] = {0};
        for (int i = 0; i < receiver->count; i++) {
            const GroupMove* m = &receiver->moves[i];
            if (m->sends) {
                continue;
            }
            const Rank* sender = &ranks[first + m->peer * step];
            int k = sent[m->peer];
            while (k < sender->count && !(sender->moves[k].sends && sender->moves[k].peer == to)) {
                k++;
            }
            sent[m->peer] = k + 1;
            EXPECT(k < sender->count && sender->moves[k].bytes == m->bytes,
                   "a message of %zu bytes from %d to %d", m->bytes, m->peer, to);
            memcpy(m->data, sender->moves[k].data, m->bytes);
        }
    }
}

// A grid of W data ranks in a stage of ZeRO and t tensor ranks: rank d t + j.
typedef struct {
    Rank* ranks;
    int stage, W, t, count; // items of a round
} Ranks;

static void exchange_data(Ranks* all, OwnersWay way) {
    for (int r = 0; r < all->W * all->t; r++) {
        Rank* rank = &all->ranks[r];
        rank->count = owners_moves_of_data(&rank->owners, all->count, way, r / all->t);
        memcpy(rank->moves, rank->owners.moves, (size_t)rank->count * sizeof(GroupMove));
    }
    for (int j = 0; j < all->t; j++) {
        exchange(all->ranks, j, all->t, all->W);
    }
}

static void exchange_tensor(Ranks* all, OwnersWay way) {
    for (int r = 0; r < all->W * all->t; r++) {
        Rank* rank = &all->ranks[r];
        rank->count = owners_moves_of_tensor(&rank->owners, all->count, way);
        memcpy(rank->moves, rank->owners.moves, (size_t)rank->count * sizeof(GroupMove));
    }
    for (int d = 0; d < all->W; d++) {
        exchange(all->ranks, d * all->t, 1, all->t);
    }
}

static void set_operands(Rank* rank, int count) {
    Owners* o = &rank->owners;
    for (int i = 0; i < count; i++) {
        const OwnersItem* item = &o->items[i];
        const MapRange range = item->share;
        float* share = o->shares + item->share_at;
        for (size_t e = 0; e < range.count; e++) {
            share[e] = value_of(item->x, whole_of(rank, item, range.before + e));
            if (o->has_weights) {
                share[o->shares_room + e] = share[e] + 0.5f;
            }
        }
    }
}

// Looks at the matrix that a rank owns, and makes the results.
static void turn(Rank* rank, const OwnersItem* item) {
    Owners* o = &rank->owners;
    const size_t n = matrix_elements(item->x),
                 first = item->x.of->first + (size_t)item->x.number * item->x.of->rows;
    const size_t room = item->is_cut ? o->matrix_room : o->pieces_room;
    float* matrix = owners_matrix(o, item);
    size_t wrong = 0;
    for (int half = 0; half <= o->has_weights && item->is_cut; half++) {
        owners_copy_runs(o, item, o->parts + (size_t)half * room, matrix + (size_t)half * room, OWNERS_THERE);
    }
    for (size_t e = 0; e < n; e++) {
        const float want = value_of(item->x, first * item->x.of->cols + e);
        wrong += matrix[e] != want || (o->has_weights && matrix[room + e] != want + 0.5f);
        matrix[e] = -want;
    }
    EXPECT(wrong == 0, "%zu of %zu elements of %s, copy %d, matrix %d are wrong", wrong, n,
           rank->state.rows[item->x.of->row].name, item->x.copy, item->x.number);
    if (item->is_cut) {
        owners_copy_runs(o, item, o->parts, matrix, OWNERS_BACK);
    }
    (item->is_cut ? o->parts : matrix)[n] = (float)matrix_number(item->x);
}

static void expect_results(const Rank* rank, int count, size_t* elements) {
    const Owners* o = &rank->owners;
    for (int i = 0; i < count; i++) {
        const OwnersItem* item = &o->items[i];
        const MapRange range = item->share;
        const float* share = o->shares + item->share_at;
        size_t wrong = 0;
        for (size_t e = 0; e < range.count; e++) {
            wrong += share[e] != -value_of(item->x, whole_of(rank, item, range.before + e));
        }
        EXPECT(wrong == 0, "%zu of %zu results of %s are wrong", wrong, range.count,
               rank->state.rows[item->x.of->row].name);
        EXPECT(!o->has_weights || range.count == 0 || share[range.count] == (float)matrix_number(item->x),
               "the rate");
        *elements += range.count;
    }
}

static void test_round(Ranks* all, size_t* elements) {
    const int ranks = all->W * all->t;
    for (int r = 0; r < ranks; r++) {
        set_operands(&all->ranks[r], all->count);
    }
    exchange_data(all, OWNERS_THERE);
    exchange_tensor(all, OWNERS_THERE);
    for (int r = 0; r < ranks; r++) {
        for (int i = 0; i < all->count; i++) {
            if (owners_owns(&all->ranks[r].owners.items[i])) {
                turn(&all->ranks[r], &all->ranks[r].owners.items[i]);
            }
        }
    }
    exchange_tensor(all, OWNERS_BACK);
    exchange_data(all, OWNERS_BACK);
    for (int r = 0; r < ranks; r++) {
        expect_results(&all->ranks[r], all->count, elements);
    }
}

static void rank_open(Rank* rank, ModelConfig cfg, Optimizer optimizer, const Ranks* all, int r) {
    MapOf of = map_of_model(cfg);
    of.stage = all->stage;
    of.data = of.replica = all->W;
    of.tensor = all->t;
    rank->memory = memory_on_host();
    map_test_state(&rank->state, &rank->map, &rank->memory, of, r, optimizer);
    owners_open(&rank->owners, &rank->memory, MEMORY_DEVICE, &rank->state);
}

static void test_grid(ModelConfig cfg, Optimizer optimizer, int stage, int W, int t) {
    static const TensorPlace places[] = {PLACE_ONCE, PLACE_BLOCK};
    Ranks all = {(Rank*)check_alloc(MOST_RANKS, sizeof(Rank), "ranks"), stage, W, t, 0};
    size_t elements = 0, wanted = 0;
    for (int r = 0; r < W * t; r++) {
        rank_open(&all.ranks[r], cfg, optimizer, &all, r);
    }
    const OptimizerState* state = &all.ranks[0].state;
    for (int k = 0; k < state->num_matrices; k++) {
        const Matrices* m = &state->matrices[k];
        const size_t copies =
            (stage == 0 ? (size_t)W : 1) * (state->rows[m->row].split == SPLIT_NONE ? (size_t)t : 1);
        wanted += copies * matrices_all(m) * m->rows * m->cols;
    }
    for (int p = 0; p < 2 && all.ranks[0].owners.most > 0; p++) {
        do {
            for (int r = 0; r < W * t; r++) {
                Rank* rank = &all.ranks[r];
                rank->deal = rank->deal.end == 0 ? owners_deal(&rank->owners, places[p], 0, 100) : rank->deal;
                all.count = owners_round(&rank->owners, &rank->deal);
            }
            if (all.count > 0) {
                test_round(&all, &elements);
            }
        } while (all.count >= 0);
        for (int r = 0; r < W * t; r++) {
            memset(&all.ranks[r].deal, 0, sizeof(OwnersDeal));
        }
    }
    EXPECT(elements == (W * t > 1 && (stage > 0 || t > 1) ? wanted : 0),
           "%s, stage %d, %d x %d ranks: %zu elements come back, wanted %zu", optimizer_word(optimizer.name),
           stage, W, t, elements, wanted);
    for (int r = 0; r < W * t; r++) {
        memory_close(&all.ranks[r].memory);
    }
    free(all.ranks);
}

TEST(owners_travel) {
    static const int grids[][2] = {{1, 1}, {2, 1}, {3, 1}, {7, 1}, {1, 2}, {1, 4}, {2, 2}, {3, 4}, {5, 2}};
    static const OptimizerName names[] = {OPTIMIZER_MUON, OPTIMIZER_SOAP, OPTIMIZER_ADAFACTOR};
    for (size_t g = 0; g < sizeof(grids) / sizeof(grids[0]); g++) {
        for (int i = 0; i < 3; i++) {
            Optimizer optimizer = optimizer_of(names[i], 0, MASTER_NONE);
            optimizer.sums_weights = i == 2 && g % 2;
            for (int stage = 0; stage <= 2; stage++) {
                test_grid(LLAMA, optimizer, stage, grids[g][0], grids[g][1]);
                test_grid(GPT, optimizer, stage, grids[g][0], grids[g][1]);
            }
        }
    }
}
