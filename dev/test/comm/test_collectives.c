// test_collectives.c -- ranks, their collectives and their end. A single rank returns at once from
// everything. Under mpirun (test_ranks.sh):
//
//     test_collectives                      checks the results of collectives in each rank
//     test_collectives MODE [--option ...]  one rank makes a mistake, and all must end: see MODES
#include <pthread.h>
#include <signal.h>

#include "llmc/base/check.h"
#include "llmc/base/signals.h"
#include "llmc/base/threads.h"
#include "llmc/comm/comm.h"
#include "llmc/comm/group.h"
#include "llmc/parallel/context_parallel.h"
#include "llmc/parallel/expert_parallel.h"
#include "llmc/parallel/groups.h"
#include "llmc/setup/launcher.h"
#include "llmc/setup/options.h"

#include "dev/test/lib/test.h"

// More than one message each, and no multiple of it.
enum { MANY = (4 << 20) + 1001 };

static float value_of(int from, int to, size_t i) {
    return (float)(from * 100 + to) + (float)(i % 997) / 1024;
}

static void test_small(Comm* c) {
    int64_t word = c->rank == 0 ? 4711 : 0, all[64];
    comm_barrier(c);
    comm_broadcast(c, &word, sizeof(word));
    EXPECT(word == 4711, "%lld on rank %d", (long long)word, c->rank);
    word = 10 * c->rank + 1;
    comm_all_gather(c, all, &word, sizeof(word));
    for (int r = 0; r < c->size; r++) {
        EXPECT(all[r] == 10 * r + 1, "%lld from rank %d", (long long)all[r], r);
    }
    comm_agree(c, "the weather", 7, "sun");
    comm_progress(c, COMM_FORWARD, 1, "block 1");
}

static void test_all_to_all(Group* g, size_t count) {
    const size_t all = g->size * count;
    float* send = (float*)check_alloc(all, sizeof(float), "send");
    float* recv = (float*)check_alloc(all, sizeof(float), "recv");
    for (size_t i = 0; i < all; i++) {
        send[i] = value_of(g->rank, (int)(i / count), i % count);
    }
    group_all_to_all_cpu(recv, send, count, g);
    size_t wrong = 0;
    for (size_t i = 0; i < all; i++) {
        wrong += recv[i] != value_of((int)(i / count), g->rank, i % count);
    }
    EXPECT(wrong == 0, "%zu of %zu elements", wrong, all);
    free(send);
    free(recv);
}

static void test_all_gather(Group* g, size_t count, int in_place) {
    const size_t all = g->size * count;
    float* recv = (float*)check_alloc(all, sizeof(float), "recv");
    float* send = in_place ? recv + g->rank * count : (float*)check_alloc(count, sizeof(float), "send");
    for (size_t i = 0; i < count; i++) {
        send[i] = value_of(g->rank, 0, i);
    }
    group_all_gather_cpu(recv, send, count, g);
    size_t wrong = 0;
    for (size_t i = 0; i < all; i++) {
        wrong += recv[i] != value_of((int)(i / count), 0, i % count);
    }
    EXPECT(wrong == 0, "%zu of %zu elements", wrong, all);
    if (!in_place) {
        free(send);
    }
    free(recv);
}

// Each rank sends two messages of different sizes to every rank from itself on, around the group.
static void test_exchange(Group* g, size_t count) {
    const size_t sizes[2] = {count, count / 3};
    GroupMove* moves = (GroupMove*)check_alloc(4 * (size_t)g->size, sizeof(GroupMove), "moves");
    float* data = (float*)check_alloc(4 * (size_t)g->size * count + 1, sizeof(float), "data");
    int n = 0;
    for (int peer = 0; peer < g->size; peer++) {
        for (int k = 0; k < 4; k++, n++) {
            const GroupMove move = {peer, data + (size_t)n * count, sizes[k / 2] * sizeof(float), k % 2};
            moves[n] = move;
            for (size_t i = 0; k % 2 && i < sizes[k / 2]; i++) {
                ((float*)move.data)[i] = value_of(g->rank, peer + k, i);
            }
        }
    }
    group_exchange_cpu(g, moves, n);
    for (int m = 0; m < n; m++) {
        size_t wrong = 0;
        for (size_t i = 0; !moves[m].sends && i < moves[m].bytes / sizeof(float); i++) {
            wrong += ((float*)moves[m].data)[i] != value_of(moves[m].peer, g->rank + m % 4 + 1, i);
        }
        EXPECT(wrong == 0, "%zu of %zu elements of message %d", wrong, count, m);
    }
    free(data);
    free(moves);
}

static void test_bulk(Group* g) {
    const size_t counts[] = {0, 1, 1023, MANY};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        test_all_to_all(g, counts[i]);
        test_all_gather(g, counts[i], 0);
        test_all_gather(g, counts[i], 1);
        test_exchange(g, counts[i]);
    }
}

// Even and odd ranks, those in reverse order; rank 2 is in no group.
static void test_split(Comm* c) {
    Group half;
    const int odd = c->rank % 2, none = c->rank == 2;
    group_open(&half, c, none ? -1 : odd, odd ? -c->rank : c->rank);
    const int in_half = odd ? c->size / 2 : (c->size + 1) / 2 - (c->size > 2);
    EXPECT(half.size == (none ? 0 : in_half), "%d, rank %d of %d", half.size, c->rank, c->size);
    if (!none) {
        const int rank = odd ? c->size / 2 - 1 - c->rank / 2 : c->rank / 2 - (c->rank > 2);
        EXPECT(half.rank == rank, "%d, rank %d of %d", half.rank, c->rank, c->size);
        test_bulk(&half);
    }
    group_close(&half);
}

// All groups of every grid of these ranks have the members that grid.h says.
static void test_grid(Comm* c) {
    for (int t = 1; t <= c->size; t++) {
        for (int P = 1; t * P <= c->size; P++) {
            const int D = c->size / (t * P);
            const GridShape shape = {t, 1, D, P, D % 2 == 0 ? 2 : 1};
            GridGroups groups;
            if (grid_size(shape) != c->size) {
                continue;
            }
            grid_groups_open(&groups, grid_of(shape, c->rank), c);
            Group* all[GRID_GROUPS] = {&groups.tensor, &groups.context, &groups.data,
                                       &groups.pipe,   &groups.experts, &groups.same_experts};
            for (int i = 0; i < GRID_GROUPS; i++) {
                const GridMember member = grid_member(&groups.grid, (GridGroup)i);
                EXPECT(all[i]->rank == member.rank && all[i]->size == member.size, "group %d", i);
                float ranks[64], rank = (float)c->rank;
                group_all_gather_cpu(ranks, &rank, 1, all[i]);
                EXPECT((int)ranks[0] == member.first && (int)ranks[member.rank] == c->rank, "group %d", i);
            }
            grid_groups_close(&groups);
        }
    }
}

// The value of a key or value, column k of token t of sequence b: its gradient of rank r is r + 1
// times as large.
static float key_of(int b, int t, int k) { return (float)(1000 * b + 10 * t + k); }

// Keys and values of each rank's chunks, in the order of the sequence; the sums of their gradients.
static void test_context(Group* g) {
    enum { B = 2, CHUNK = 3, T = 2 * CHUNK, NH = 2, HS = 3, COLUMNS = 2 * HS, QKV = NH * HS + COLUMNS };
    AttentionSizes sizes = attention_sizes(B, T, NH, 1, HS);
    sizes.chunks = (TokenChunks){g->size - 1, g->rank};
    const int W = attention_keys(sizes), size = g->size;
    ContextParallel context;
    Memory memory = memory_on_host();
    context_open_cpu(&context, &memory, sizes, g);
    float qkv[B * T * QKV], dqkv[B * T * QKV], words[B * T];
    for (int i = 0; i < B * T * QKV; i++) {
        const int n = i / QKV, k = i % QKV - NH * HS, t = token_chunks_position(sizes.chunks, n % T, T);
        qkv[i] = k >= 0 ? key_of(n / T, t, k) : -1;
        dqkv[i] = -1;
        words[n] = key_of(n / T, t, 0);
    }
    const float* kv = context_gather_cpu(&context, qkv, sizes);
    int wrong = 0;
    for (int i = 0; i < B * W * COLUMNS; i++) {
        const float key = key_of(i / COLUMNS / W, i / COLUMNS % W, i % COLUMNS);
        wrong += kv[i] != key;
        context.dkv[i] = (float)(g->rank + 1) * key;
    }
    EXPECT(wrong == 0, "%d keys and values of %d ranks", wrong, size);
    context_sum_cpu(dqkv, &context, sizes);
    for (int i = 0; i < B * T * QKV; i++) {
        const float want = qkv[i] < 0 ? -1 : qkv[i] * (float)(size * (size + 1) / 2);
        EXPECT(dqkv[i] == want, "gradient %d: %g, wanted %g", i, (double)dqkv[i], (double)want);
    }
    float* all = (float*)check_alloc((size_t)(B * W), sizeof(float), "words");
    context_gather_tokens_cpu(all, &context, words, sizes);
    for (int i = 0; i < B * W; i++) {
        EXPECT(all[i] == key_of(i / W, i % W, 0), "word %d", i);
    }
    free(all);
    memory_close(&memory);
}

// The results of the experts of all ranks, on rows with one column: the weight of a row plus a
// thousand times its expert. Tokens take experts evenly, all the same one, or those of one rank.
static void test_experts(Group* g, int way) {
    enum { USED = 2, T = 40, OWN = 2 };
    const int E = OWN * g->size, N = g->rank == 1 ? 0 : T; // rank 1 has no tokens
    const size_t rows = router_rows(T, E, USED);
    Memory memory = memory_on_host();
    float* logits = (float*)memory_allocate(&memory, "test", MEMORY_HOST, (size_t)(T * E) * sizeof(float));
    int* ints =
        (int*)memory_allocate(&memory, "test", MEMORY_HOST,
                              (2 * T * USED + 2 * rows + 2 * (size_t)E + 2 + (size_t)(g->size * E)) * 4);
    float* floats = (float*)memory_allocate(&memory, "test", MEMORY_HOST, 5 * rows * sizeof(float));
    int *first = ints + 2 * T * USED, *order = first + E + 1, *counts = order + rows;
    const Router router = {.kind = ROUTER_CHOSEN,
                           .B = 1,
                           .T = N,
                           .E = E,
                           .used = USED,
                           .factor = 1,
                           .logits = logits,
                           .chosen = ints,
                           .rows = ints + T * USED,
                           .order = order,
                           .first = first,
                           .scale = floats};
    const ExpertParallel x = {g,
                              counts,
                              floats + 2 * rows,
                              floats + 3 * rows,
                              floats + 4 * rows,
                              NULL,
                              counts + g->size * E,
                              counts + g->size * E + rows};
    for (int i = 0; i < N * E; i++) {
        const int n = i / E, e = i % E;
        logits[i] = way == 0 ? (float)((n * 7 + e * 5) % E) : way == 1 ? (float)e : (float)(e / OWN == 0);
    }
    router_forward_cpu(&router);
    expert_counts_cpu(&x, &router);
    for (int k = 0; k < g->size; k++) {
        const ExpertRound round = expert_round(x.group->rank, x.group->size, k);
        const ExpertArray sent = {router.scale, x.scale, 1}, returned = {floats + rows, x.out, 1};
        const Router arrived = expert_arrived_cpu(&x, &router, round.from);
        expert_send_cpu(&x, &router, round, &sent, 1);
        for (int e = 0; e < OWN; e++) {
            for (int m = arrived.first[e]; m < arrived.first[e + 1]; m++) {
                x.out[m] = x.scale[m] + (float)(1000 * (g->rank * OWN + e));
                EXPECT((x.scale[m] == 0) == (arrived.order[m] < 0), "row %d of expert %d is padding", m, e);
            }
        }
        expert_return_cpu(&x, &router, round, &returned, 1);
    }
    for (int i = 0; i < N * USED; i++) {
        const int m = router.rows[i];
        const float wanted = router.scale[m] + (float)(1000 * router.chosen[i]);
        EXPECT(floats[rows + (size_t)m] == wanted, "way %d, choice %d: %g, wanted %g", way, i,
               (double)floats[rows + (size_t)m], (double)wanted);
    }
    memory_close(&memory);
}

static void test_collectives(Comm* c) {
    Group all;
    test_small(c);
    group_open(&all, c, 0, c->rank);
    EXPECT(all.rank == c->rank && all.size == c->size, "%d of %d", all.rank, all.size);
    test_bulk(&all);
    if (all.size > 1) {
        test_context(&all);
        for (int way = 0; way < 3; way++) {
            test_experts(&all, way);
        }
    }
    group_close(&all);
    test_split(c);
    test_grid(c);
}

static void test_places(const Comm* c) {
    const char* nodes = getenv("LLMC_NODES");
    EXPECT(c->local_rank >= 0 && c->local_rank < c->local_size && c->local_size <= c->size, "%d of %d",
           c->local_rank, c->local_size);
    EXPECT(c->nodes == (nodes ? atoi(nodes) : 1), "%d", c->nodes);
    EXPECT(c->node == (nodes ? c->rank / ((c->size + c->nodes - 1) / c->nodes) : 0), "%d", c->node);
    EXPECT(*c->host && !*c->library == (c->size == 1), "%s, %s", c->host, c->library);
}

// ---- the ends ----

// Only the last rank does `wrong`; the others wait for it.
static void* fail_in_thread(void* unused) {
    (void)unused;
    CHECK(0, "disk full");
    return NULL;
}

static void end_fail(Comm* c) { CHECK(c->rank != c->size - 1, "disk full"); }

static void end_first(Comm* c) { CHECK(c->rank != 0, "disk full"); }

static void end_all_fail(Comm* c) {
    (void)c;
    CHECK(0, "disk full");
}

static void end_thread(Comm* c) {
    pthread_t thread;
    if (c->rank == c->size - 1) {
        pthread_create(&thread, NULL, fail_in_thread, NULL);
        pthread_join(thread, NULL);
    }
}

static void end_exit(Comm* c) {
    if (c->rank == c->size - 1) {
        exit(EXIT_SUCCESS); // without comm_close
    }
}

static void end_kill(Comm* c) {
    if (c->rank == c->size - 1) {
        raise(SIGKILL);
    }
}

static void end_stuck(Comm* c) {
    if (c->rank == c->size - 1) {
        comm_progress(c, COMM_DATA, 12, "loading data");
        raise(SIGSTOP);
    }
}

static void end_slow(Comm* c) {
    if (c->rank == c->size - 1) {
        comm_progress(c, COMM_DATA, 12, "loading data");
        sleep(60);
    }
}

// Longer than the watchdog waits, but all get on.
static void end_alive(Comm* c) {
    for (int i = 0; i < 12; i++) {
        usleep(500000);
        comm_alive(c);
    }
}

static void end_agree(Comm* c) {
    const char* words = c->rank == 1 ? "43" : "42";
    comm_agree(c, "--seed", strtoul(words, NULL, 10), words);
}

// With something to clean up.
static void end_files(Comm* c) { CHECK(c->rank != c->size - 1, "%s: is lost", test_write("x", "x", 1)); }

static void end_signal(Comm* c) {
    comm_progress(c, COMM_FIRST, 1, "waiting for SIGUSR2");
    if (c->rank == 0) {
        kill(getppid(), SIGUSR2);
    }
    for (int ms = 0; !signals_stop() && ms < 10000; ms++) {
        usleep(1000);
    }
    comm_close(c);
    exit(signals_stop() == SIGUSR2 ? EXIT_INTERRUPTED : EXIT_FAILURE);
}

static const struct {
    const char* name;
    void (*run)(Comm* c);
} MODES[] = {
    {"fail", end_fail},   {"first", end_first}, {"all", end_all_fail},  {"thread", end_thread},
    {"exit", end_exit},   {"kill", end_kill},   {"stuck", end_stuck},   {"slow", end_slow},
    {"agree", end_agree}, {"files", end_files}, {"signal", end_signal}, {"alive", end_alive},
};

static void run_mode(Comm* c, const char* name) {
    comm_progress(c, COMM_FORWARD, 11, "block 1");
    usleep(600000); // long enough for the watchdog to see a whole step
    for (size_t i = 0; i < sizeof(MODES) / sizeof(MODES[0]); i++) {
        if (strcmp(MODES[i].name, name) == 0) {
            comm_progress(c, COMM_BACKWARD, 12, "reduce of block 7");
            MODES[i].run(c);
            comm_barrier(c);
            return;
        }
    }
    die_usage("unknown mode %s", name);
}

// Starts and ends as a program with several ranks does.
int main(int argc, char** argv) {
    const char* mode = argc > 1 && argv[1][0] != '-' ? argv[1] : NULL;
    Comm comm;
    Options options;
    signals_open();
    comm_expect(&comm, launcher_expect());
    options_parse(&options, argc - !!mode, argv + !!mode, options_program(OPTION_CPU));
    const Launcher launch = launcher_find(&options);
    comm_open(&comm, launch.place, &launch.meeting, options.ranks.timeout);
    threads_open(options.memory.threads, comm.local_size, launch.launcher);
    if (mode) {
        run_mode(&comm, mode);
    } else {
        test_places(&comm);
        test_collectives(&comm);
        comm_agree(&comm, "the results of test_collectives", test_failures_ > 0,
                   test_failures_ ? "failures" : "ok");
    }
    comm_close(&comm);
    return test_done("test_collectives");
}
