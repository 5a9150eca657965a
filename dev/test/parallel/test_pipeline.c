// test_pipeline.c -- pipeline.h: the cut, the order of the passes, and their messages, which never
// wait for each other in a circle.
#include <stdlib.h>
#include <string.h>

#include "llmc/model/presets.h"
#include "llmc/parallel/pipeline.h"
#include "dev/test/lib/test.h"

enum { STAGES = 8, MICRO_STEPS = 64, ACTIONS = 2 * MICRO_STEPS };

// ---- the cut ----

static ModelConfig model_of(int L, int share) {
    ModelConfig cfg;
    memset(&cfg, 0, sizeof(cfg));
    cfg.max_T = 64, cfg.V = 1000, cfg.Vp = 1024, cfg.L = L, cfg.NH = 4, cfg.C = 64, cfg.share = share;
    return cfg;
}

static void expect_cut(ModelConfig cfg, int P, const int* wanted) {
    int layers[STAGES];
    pipeline_cut(layers, cfg, P);
    for (int p = 0; p < P; p++) {
        EXPECT(layers[p] == wanted[p], "%d layers in %d stages: stage %d has %d, wanted %d", cfg.L, P, p,
               layers[p], wanted[p]);
    }
}

TEST(cut) {
    ModelConfig cfg = model_of(12, SHARE_OFF); // the head is worth 1024 / (12 * 64) = 1.3 layers
    expect_cut(cfg, 1, (int[]){12});
    expect_cut(cfg, 2, (int[]){7, 5});
    expect_cut(cfg, 4, (int[]){3, 3, 4, 2});
    expect_cut(model_of(4, SHARE_OFF), 4, (int[]){1, 1, 1, 1});
    expect_cut(model_of(12, SHARE_PAIRS), 2, (int[]){6, 6});
    cfg.Vp = 65536; // 85 layers
    expect_cut(cfg, 3, (int[]){5, 6, 1});
}

// Every stage has a layer, and no other number of layers in the last one has a smaller largest
// load.
TEST(cut_is_best) {
    for (int L = 1; L <= 40; L++) {
        for (int P = 1; P <= STAGES && P <= L; P++) {
            const double head = 1024.0 / (12 * 64);
            int layers[STAGES], sum = 0;
            double most = 0, least = 1e9;
            pipeline_cut(layers, model_of(L, SHARE_OFF), P);
            for (int p = 0; p < P; p++) {
                sum += layers[p];
                most = fmax(most, layers[p] + (p == P - 1 ? head : 0));
                EXPECT(layers[p] > 0, "%d layers, stage %d of %d", L, p, P);
            }
            for (int n = 1; n <= L - P + 1 && P > 1; n++) {
                least = fmin(least, fmax(n + head, (L - n + P - 2) / (P - 1)));
            }
            EXPECT(sum == L, "%d layers, wanted %d", sum, L);
            EXPECT(P == 1 || most <= least, "%d layers in %d stages: %g, wanted %g", L, P, most, least);
        }
    }
}

TEST(layers) {
    static const struct {
        const char *list, *error;
    } bad[] = {
        {"9,9,8", "--pipeline-layers: 9,9,8; wanted 4 numbers, like 3,2 for two stages"},
        {"9,9,8,6,1", "--pipeline-layers: 9,9,8,6,1; wanted 4 numbers, like 3,2 for two stages"},
        {"9,9,8,", "--pipeline-layers: 9,9,8,; wanted 4 numbers, like 3,2 for two stages"},
        {"9,9,8,6x", "--pipeline-layers: 9,9,8,6x; wanted 4 numbers, like 3,2 for two stages"},
        {"9,9,8,99999999999999999999",
         "--pipeline-layers: 9,9,8,99999999999999999999; wanted 4 numbers, like 3,2 for two stages"},
        {"9,14,0,9", "--pipeline-layers: 9,14,0,9: a stage of 0 layers; wanted a multiple of 1"},
        {"9,9,8,7", "--pipeline-layers: 9,9,8,7, 33 layers; wanted the model's 32"},
    };
    int layers[4];
    char error[ERROR_BYTES];
    EXPECT(pipeline_parse_layers(layers, model_of(32, SHARE_OFF), 4, "9,9,8,6", error), "%s", error);
    EXPECT(layers[0] == 9 && layers[1] == 9 && layers[2] == 8 && layers[3] == 6, "%d %d %d %d", layers[0],
           layers[1], layers[2], layers[3]);
    EXPECT(!pipeline_parse_layers(layers, model_of(32, SHARE_PAIRS), 2, "17,15", error), "pairs");
    EXPECT(!strcmp(error, "--pipeline-layers: 17,15: a stage of 17 layers; wanted a multiple of 2"), "%s",
           error);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        EXPECT(!pipeline_parse_layers(layers, model_of(32, SHARE_OFF), 4, bad[i].list, error), "%s",
               bad[i].list);
        EXPECT(!strcmp(error, bad[i].error), "%s", error);
    }
}

// ---- the order ----

// Every micro-batch goes forward once, and then backward once, both in order; at most
// pipeline_places are kept.
static void expect_order(int P, int p, int M) {
    PipelineAction action;
    int forward = 0, backward = 0, kept = 0;
    for (int64_t i = 0; pipeline_action(P, p, M, i, &action); i++) {
        int* next = action.pass == PIPELINE_FORWARD ? &forward : &backward;
        EXPECT(action.micro_step == *next, "action %d of stage %d of %d: %d, wanted %d", (int)i, p, P,
               (int)action.micro_step, *next);
        ++*next;
        EXPECT(backward <= forward, "action %d of stage %d of %d", (int)i, p, P);
        kept = forward - backward > kept ? forward - backward : kept;
    }
    EXPECT(action.pass == PIPELINE_NOTHING, "%d", (int)action.pass);
    EXPECT(forward == M && backward == M, "%d and %d, wanted %d", forward, backward, M);
    EXPECT(kept == pipeline_places(P, p, M), "stage %d of %d, %d micro-batches: %d kept, wanted %d", p, P, M,
           kept, pipeline_places(P, p, M));
}

// Returns the time of an update if each pass takes one, and messages none.
static int length_of(int P, int M) {
    static int done[STAGES][3][MICRO_STEPS];
    int at[STAGES] = {0}, time[STAGES] = {0}, left = P, longest = 0;
    PipelineAction action;
    memset(done, 0, sizeof(done));
    for (int p = 0; left > 0; p = (p + 1) % P) {
        if (!pipeline_action(P, p, M, at[p], &action)) {
            left -= at[p] == 2 * M;
            at[p] = 2 * M + 1; // counted
            continue;
        }
        const int is_forward = action.pass == PIPELINE_FORWARD, k = (int)action.micro_step,
                  other = is_forward ? p - 1 : p + 1, waits = 0 <= other && other < P,
                  ready = waits ? done[other][action.pass][k] : 1;
        if (ready) {
            time[p] = (time[p] > ready - 1 ? time[p] : ready - 1) + 1;
            done[p][action.pass][k] = time[p] + 1;
            longest = time[p] > longest ? time[p] : longest;
            at[p]++;
        }
    }
    return longest;
}

TEST(order) {
    for (int P = 1; P <= STAGES; P++) {
        for (int M = 1; M <= MICRO_STEPS; M++) {
            for (int p = 0; p < P; p++) {
                expect_order(P, p, M);
            }
            EXPECT(length_of(P, M) == 2 * (M + P - 1), "%d stages, %d micro-batches: %d, wanted %d", P, M,
                   length_of(P, M), 2 * (M + P - 1));
        }
    }
}

// ---- messages ----

// A message of a stage: a send or a receive, and of which pass over which micro-batch.
typedef struct {
    int peer, sends, pass, micro_step;
} Message;

// Groups of messages of a stage in its order: the stage passes on when its peers have the same.
typedef struct {
    Message group[4 * ACTIONS][PIPELINE_MOVES];
    int count[4 * ACTIONS], groups;
} Messages;

// Sets the messages of a stage: exchanges, or one message at a time, sends first.
static void set_messages(Messages* all, int P, int p, int M, int apart) {
    const PipelineAction none = {PIPELINE_NOTHING, 0, 0};
    const PipelineStream stream = {NULL, NULL, NULL, NULL, 4};
    PipelineAction before = none, next;
    int is_left = 1;
    all->groups = 0;
    for (int64_t i = 0; is_left; before = next, i++) {
        GroupMove moves[PIPELINE_MOVES];
        is_left = pipeline_action(P, p, M, i, &next);
        next.tokens = is_left ? 1 + (int)next.micro_step : 0;
        const int count = pipeline_moves(moves, P, p, before, next, stream);
        for (int m = 0; m < count; m++) {
            const PipelineAction* of = moves[m].sends ? &before : &next;
            const Message message = {moves[m].peer, moves[m].sends, of->pass, (int)of->micro_step};
            EXPECT(moves[m].bytes == 4 * (size_t)of->tokens, "%zu bytes", moves[m].bytes);
            const int joins = m > 0 && !apart, g = all->groups - joins;
            all->group[g][joins] = message;
            all->count[g] = 1 + joins;
            all->groups = g + 1;
        }
    }
}

// Stages on their way: the groups that each has reached, and which messages of these are done.
typedef struct {
    const Messages* all;
    int at[STAGES];
    char done[STAGES][PIPELINE_MOVES];
} Meeting;

static int count_of(const Meeting* m, int p) {
    return m->at[p] < m->all[p].groups ? m->all[p].count[m->at[p]] : 0;
}

// Does message k of stage p if its peer has reached the counterpart; returns 1 then.
static int meet(Meeting* m, int p, int k) {
    const Message* mine = &m->all[p].group[m->at[p]][k];
    const int peer = mine->peer;
    for (int j = 0; j < count_of(m, peer) && !m->done[p][k]; j++) {
        const Message* other = &m->all[peer].group[m->at[peer]][j];
        if (other->peer == p && other->sends != mine->sends && !m->done[peer][j]) {
            EXPECT(other->pass == mine->pass && other->micro_step == mine->micro_step,
                   "stage %d has %d of micro-batch %d, its peer %d of %d", p, mine->pass, mine->micro_step,
                   other->pass, other->micro_step);
            m->done[p][k] = m->done[peer][j] = 1;
            return 1;
        }
    }
    return 0;
}

// Passes on to the next group if all messages of this one are done; returns 1 then.
static int pass_on(Meeting* m, int p) {
    const int count = count_of(m, p);
    for (int k = 0; k < count; k++) {
        if (!m->done[p][k]) {
            return 0;
        }
    }
    memset(m->done[p], 0, sizeof(m->done[p]));
    m->at[p] += count > 0;
    return count > 0;
}

// Transfers as rendezvous: a message is done when both sides have reached it, a group when all its
// messages are. Returns 1 if all stages come to their end.
static int ends(const Messages* all, int P) {
    Meeting m = {all, {0}, {{0}}};
    int moved = 1, left = 0;
    while (moved) {
        moved = 0;
        for (int p = 0; p < P; p++) {
            for (int k = 0; k < count_of(&m, p); k++) {
                moved += meet(&m, p, k);
            }
        }
        for (int p = 0; p < P; p++) {
            moved += pass_on(&m, p);
        }
    }
    for (int p = 0; p < P; p++) {
        left += m.at[p] < all[p].groups;
    }
    return left == 0;
}

// Returns how many numbers of stages and micro-batches end.
static int count_ends(int apart) {
    Messages* all = (Messages*)calloc(STAGES, sizeof(Messages));
    int count = 0;
    for (int P = 2; P <= STAGES; P++) {
        for (int M = 1; M <= MICRO_STEPS; M++) {
            for (int p = 0; p < P; p++) {
                set_messages(&all[p], P, p, M, apart);
            }
            count += ends(all, P);
        }
    }
    free(all);
    return count;
}

TEST(exchanges_never_wait_in_a_circle) {
    const int all = (STAGES - 1) * MICRO_STEPS, together = count_ends(0), apart = count_ends(1);
    EXPECT(together == all, "%d of %d end", together, all);
    // with one micro-batch nothing is sent while something is received
    EXPECT(apart == STAGES - 1, "sent, then received: %d of %d end", apart, all);
}
