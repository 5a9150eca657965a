// test_dataloader.c -- dataloader.h: the order of sequences in a run, and the batches that a thread
// prepares.
#include "dev/test/lib/kept_mixture.h"
#include "dev/test/lib/shards.h"
#define DATALOADER_IMPLEMENTATION

#include <fcntl.h>

#include "llmc/base/xxh64.h"
#include "llmc/data/dataloader.h"

enum { V = 50257, EOT = V - 1 };

static DataloaderSettings settings_of(int B, Shuffle shuffle, uint64_t seed) {
    const DataloaderSettings settings = {
        .B = B, .sequences = B, .shuffle = shuffle, .seed = seed, .group = 1, .num_processes = 1};
    return settings;
}

// ---- the order of one source ----

// The sequence k of T tokens that a row of a batch holds, after checking all of the row.
static size_t row_sequence(Batch batch, int b, size_t first) {
    const int* inputs = batch.inputs + (size_t)b * (size_t)batch.T;
    const int* targets = batch.targets + (size_t)b * (size_t)batch.T;
    size_t k = 0;
    while (k < 1000 && inputs[0] != token_at(first + k * (size_t)batch.T)) {
        k++;
    }
    for (int t = 0; t < batch.T; t++) {
        const size_t at = first + k * (size_t)batch.T + (size_t)t;
        EXPECT(inputs[t] == token_at(at), "sequence %zu, input %d", k, t);
        EXPECT(targets[t] == token_at(at + 1), "sequence %zu, target %d", k, t);
    }
    return k;
}

enum { RUN = 60 }; // sequences of the runs below; 2 epochs and a half of 24

typedef enum { STEP, SEEK } Way;

// The order of the first RUN sequences, by steps of B; with SEEK, found one batch at a time from
// the end.
static void run_order(const DataSources* sources, int B, Shuffle shuffle, uint64_t seed, Way way,
                      size_t* order) {
    const TokenStream* stream = &sources->source[0].stream;
    Dataloader loader;
    dataloader_open(&loader, sources, settings_of(B, shuffle, seed));
    EXPECT(loader.num_sequences == (stream->count - 1) / 4, "%zu sequences", (size_t)loader.num_sequences);
    for (int i = 0; i < RUN / B; i++) {
        const int step = way == SEEK ? RUN / B - 1 - i : i;
        if (way == SEEK) {
            dataloader_seek(&loader, (uint64_t)step * (uint64_t)B);
        }
        const Batch batch = dataloader_next(&loader);
        EXPECT(batch.B == B && batch.T == 4 && batch.counted == 4 * B && !batch.starts, "");
        for (int b = 0; b < B; b++) {
            order[step * B + b] = row_sequence(batch, b, stream->begin);
        }
    }
    dataloader_close(&loader);
}

static void expect_same_order(const size_t* order, const size_t* other, int same, const char* what) {
    EXPECT((memcmp(order, other, RUN * sizeof(size_t)) == 0) == same, "%s", what);
}

// Each epoch holds every sequence once, up to where the run ends.
static void expect_epochs(const size_t* order, size_t S) {
    for (size_t epoch = 0; epoch * S < RUN; epoch++) {
        int seen[100] = {0};
        for (size_t i = epoch * S; i < RUN && i < (epoch + 1) * S; i++) {
            EXPECT(order[i] < S && !seen[order[i]]++, "epoch %zu: sequence %zu", epoch, order[i]);
        }
    }
}

static void test_order(const DataSources* sources) {
    const size_t S = (size_t)sources->source[0].rows.count;
    size_t order[RUN], shuffled[RUN], other[RUN];
    run_order(sources, 1, SHUFFLE_OFF, 42, STEP, order);
    for (size_t p = 0; p < RUN; p++) {
        EXPECT(order[p] == p % S, "in order: %zu at %zu", order[p], p);
    }
    run_order(sources, 1, SHUFFLE_ON, 42, STEP, shuffled);
    expect_epochs(shuffled, S);
    expect_same_order(order, shuffled, 0, "shuffled is not in order");
    EXPECT(memcmp(shuffled, shuffled + S, S * sizeof(size_t)) != 0, "two epochs have one order");
    // 1, 4, 12: S is a multiple of none or some of them
    for (int B = 1; B <= 12; B += B == 1 ? 3 : 8) {
        run_order(sources, B, SHUFFLE_ON, 42, STEP, other);
        expect_same_order(shuffled, other, 1, "B does not matter");
        run_order(sources, B, SHUFFLE_ON, 42, SEEK, other);
        expect_same_order(shuffled, other, 1, "seeking is stepping");
        run_order(sources, B, SHUFFLE_OFF, 0, SEEK, other);
        expect_same_order(order, other, 1, "seeking is stepping, in order");
    }
    run_order(sources, 1, SHUFFLE_ON, 43, STEP, other);
    expect_same_order(shuffled, other, 0, "another seed, another order");
}

static void test_orders(void) {
    DataSources sources, tail;
    write_shard("train_0.bin", MAGIC_U16, 0, 51);
    write_shard("train_1.bin", MAGIC_U32, 51, 49);
    mixture_open_files(&sources, test_path("train_*.bin"), TOKENS_AUTO, V);
    mixture_pack(&sources, PACK_STREAM, 4, EOT, DOCUMENT_MASK_OFF);
    test_order(&sources); // 100 tokens: 24 sequences, 3 tokens left over
    rows_close(&sources.source[0].rows);
    mixture_split_tail(&sources, &tail, 4, 0);
    mixture_pack(&tail, PACK_STREAM, 4, EOT, DOCUMENT_MASK_OFF);
    test_order(&tail); // 49 tokens: 12 sequences to the very last token
    mixture_close(&tail);
    mixture_close(&sources);
}

// B and T that exceed the data: the epoch repeats inside the batch.
static void test_one_sequence(void) {
    const uint16_t tokens[] = {5, 6, 7, 8};
    DataSources sources;
    Dataloader loader;
    mixture_open_memory(&sources, tokens, 4, 9, "memory");
    mixture_pack(&sources, PACK_STREAM, 3, 8, DOCUMENT_MASK_OFF);
    dataloader_open(&loader, &sources, settings_of(3, SHUFFLE_ON, 1));
    dataloader_seek(&loader, UINT64_C(1) << 60);
    const Batch batch = dataloader_next(&loader);
    EXPECT(loader.num_sequences == 1, "");
    for (int i = 0; i < 9; i++) {
        EXPECT(batch.inputs[i] == 5 + i % 3 && batch.targets[i] == 6 + i % 3, "%d", i);
    }
    dataloader_close(&loader);
    mixture_close(&sources);
}

// ---- any packing, several sources, any partition ----

// Documents of 1 to 40 tokens in three files: the first token of a row tells where it is from.
static const char* write_documents(void) {
    int32_t header[256] = {MAGIC_U16, 1};
    static char list[600];
    int* tokens = (int*)check_alloc(20000, sizeof(int), "documents");
    Rand rng = rand_open(7, 7);
    for (int file = 0; file < 3; file++) {
        size_t n = 0;
        for (int d = 0; d < 150; d++) {
            for (uint32_t i = 0, length = 1 + rand_below(&rng, 40); i < length; i++) {
                tokens[n] = i ? token_at(n + 1000 * (size_t)file) : EOT;
                n++;
            }
        }
        header[2] = (int32_t)n;
        write_tokens(file == 0 ? "d0.bin" : file == 1 ? "d1.bin" : "d2.bin", header, 1024, 2, tokens, n);
    }
    free(tokens);
    snprintf(list, sizeof(list), "%s:0.7,%s:0.3", test_path("d0.bin"), test_path("d1.bin"));
    return list;
}

enum { T = 24, STEPS = 40, UPDATE = 12 }; // an update is 12 sequences

typedef struct {
    uint64_t hash[STEPS * UPDATE]; // of each sequence: its tokens, targets and starts
    int width[STEPS * UPDATE], counted;
    RowCounts found[STEPS], said[STEPS]; // of each update: in its batches, and as they say
} Trace;

static uint64_t row_hash(Batch batch, int b, int pad) {
    const size_t at = (size_t)b * (size_t)batch.T;
    Xxh64 hash;
    xxh64_open(&hash);
    for (int t = 0; t < batch.T; t++) {
        const int token[3] = {batch.inputs[at + (size_t)t], batch.targets[at + (size_t)t],
                              batch.starts[at + (size_t)t]};
        if (!pad || token[1] >= 0 || token[0] != EOT) { // so that the width does not matter
            xxh64_add(&hash, token, sizeof(token));
        }
    }
    return xxh64_value(&hash);
}

// Behind its length a sequence has padding, and its last token is none.
static void expect_length(Batch batch, int b) {
    const int* end = batch.inputs + (size_t)b * (size_t)batch.T + batch.lengths[b];
    const int* target = batch.targets + (end - batch.inputs);
    EXPECT(batch.lengths[b] > 0 && batch.lengths[b] <= batch.T, "%d tokens of %d", batch.lengths[b], batch.T);
    EXPECT(end[-1] != EOT || target[-1] >= 0, "the last token of sequence %d is padding", b);
    for (int t = 0; t < batch.T - batch.lengths[b]; t++) {
        EXPECT(end[t] == EOT && target[t] == -1, "sequence %d, behind its end", b);
    }
}

// Takes a batch that starts at sequence p down.
static void trace_batch(Trace* trace, Batch batch, int p) {
    int counted = 0;
    for (int i = 0; i < batch.B * batch.T; i++) {
        counted += batch.targets[i] >= 0;
    }
    EXPECT(counted == batch.counted && batch.T <= T, "%d targets of %d", batch.counted, counted);
    trace->counted += counted;
    for (int b = 0; b < batch.B; b++) {
        RowCounts* found = &trace->found[p / UPDATE];
        found->targets += b == 0 ? counted : 0;
        found->tokens += batch.lengths[b];
        trace->said[p / UPDATE] = batch.update;
        trace->hash[p + b] = row_hash(batch, b, 1);
        trace->width[p + b] = batch.T;
        expect_length(batch, b);
    }
}

// Takes the sequences of one of n processes with micro-batches of B down.
static void trace_run(Trace* trace, const DataSources* sources, int B, int n, int rank, int group) {
    DataloaderSettings settings = settings_of(B, SHUFFLE_ON, 5);
    Dataloader loader;
    settings.rank = rank;
    settings.num_processes = n;
    settings.group = group;
    settings.sequences = UPDATE;
    settings.counts_updates = 1;
    dataloader_open(&loader, sources, settings);
    for (int update = 0; update < STEPS; update++) {
        for (int micro = 0; micro * n * B < UPDATE; micro++) {
            const int begin = (micro * n + rank) * B, left = begin < UPDATE ? UPDATE - begin : 0;
            EXPECT(loader.next == (uint64_t)(update * UPDATE + micro * n * B), "next: %d", (int)loader.next);
            const Batch batch = dataloader_next(&loader);
            EXPECT(batch.B == (left < B ? left : B), "%d sequences, %d are left", batch.B, left);
            EXPECT(!loader.is_full || (batch.B == B && batch.T == T && (micro + 1) * n * B <= UPDATE),
                   "is_full");
            trace_batch(trace, batch, update * UPDATE + begin);
        }
    }
    dataloader_close(&loader);
}

// Sequences and their places do not depend on the micro-batch or the number of ranks.
static void test_partitions(const char* list, Packing pack) {
    static const int parts[][2] = {{1, 1}, {12, 1}, {3, 1}, {1, 3}, {2, 3}, {4, 3}, {5, 1}, {7, 2}, {5, 4}};
    static Trace traces[9];
    DataSources sources;
    memset(traces, 0, sizeof(traces));
    mixture_open_files(&sources, list, TOKENS_AUTO, V);
    mixture_pack(&sources, pack, T, EOT, DOCUMENT_MASK_ON);
    for (int i = 0; i < 9; i++) {
        for (int rank = 0; rank < parts[i][1]; rank++) {
            trace_run(&traces[i], &sources, parts[i][0], parts[i][1], rank, 6);
        }
        EXPECT(memcmp(traces[0].hash, traces[i].hash, sizeof(traces[0].hash)) == 0, "pack %d, partition %d",
               pack, i);
        EXPECT(traces[0].counted == traces[i].counted, "pack %d, partition %d", pack, i);
        EXPECT(memcmp(traces[i].found, traces[i].said, sizeof(traces[i].said)) == 0,
               "pack %d, partition %d: tokens of updates", pack, i);
    }
    mixture_close(&sources);
}

// ---- mixtures that change ----

// Opens three sources, or those of `list` of them, whose weights change at some sequences.
static void open_changing(DataSources* sources, const char* list, const char* schedule) {
    const char* names[SOURCES_MAX];
    DataSchedule d;
    mixture_open_files(sources, list, TOKENS_AUTO, V);
    mixture_pack(sources, PACK_BESTFIT, T, EOT, DOCUMENT_MASK_ON);
    for (int s = 0; s < sources->count; s++) {
        names[s] = sources->source[s].name;
    }
    data_schedule_read(&d, test_write("schedule.txt", schedule, strlen(schedule)), names, sources->count);
    for (int i = 0; i < d.count; i++) {
        d.line[i].first = d.line[i].from;
    }
    mixture_set_schedule(sources, d);
}

// Any number of ranks and of resumes read the same sequences.
static void test_resumes(void) {
    static const char schedule[] =
        "0 a 3 b 1\n70 ramp a 3 b 1\n200 b 1 c 1\n301 c 5\n330 ramp a 1 b 1 c 1\n420 a 1";
    static Trace traces[4];
    char list[600];
    Rand rng = rand_open(1, 9);
    snprintf(list, sizeof(list), "a=%s,b=%s,c=%s", test_path("d0.bin"), test_path("d1.bin"),
             test_path("d2.bin"));
    memset(traces, 0, sizeof(traces));
    for (int n = 1; n <= 3; n++) {
        for (int rank = 0; rank < n; rank++) {
            DataSources sources;
            open_changing(&sources, list, schedule);
            EXPECT(sources.order.count > 6, "%zu stretches", sources.order.count);
            trace_run(&traces[n - 1], &sources, 4, n, rank, 1);
            mixture_close(&sources);
        }
        EXPECT(memcmp(traces[0].hash, traces[n - 1].hash, sizeof(traces[0].hash)) == 0, "%d ranks", n);
    }
    for (int trial = 0; trial < 10; trial++) {
        MixtureState state = {.count = 0};
        uint64_t p = 0;
        while (p < STEPS * UPDATE) {
            const uint64_t left = STEPS * UPDATE - p, some = 1 + rand_below(&rng, 120);
            DataSources sources;
            Dataloader loader;
            open_changing(&sources, list, schedule);
            EXPECT(p == 0 || mixture_continue(&sources, &state, p), "nothing changes at %d", (int)p);
            dataloader_open(&loader, &sources, settings_of(1, SHUFFLE_ON, 5));
            dataloader_seek(&loader, p);
            for (uint64_t end = p + (some < left ? some : left); p < end; p++) {
                EXPECT(row_hash(dataloader_next(&loader), 0, 1) == traces[0].hash[p], "trial %d, sequence %d",
                       trial, (int)p);
            }
            dataloader_close(&loader);
            kept_mixture_close(&state, &sources, p);
        }
        kept_mixture_free(&state);
    }
}

// Adds a line with random weights of these sources from sequence `from` on.
static void add_weights(char* schedule, Rand* rng, uint64_t from, const char* const* names, const int* of,
                        int count) {
    sprintf(schedule + strlen(schedule), "%d ", (int)from);
    for (int i = 0; i < count; i++) {
        sprintf(schedule + strlen(schedule), "%s %d ", names[of[i]], 1 + (int)rand_below(rng, 9));
    }
    strcat(schedule, "\n");
}

// Sources that come, go, return and change their weights: every row of each is read once before any
// is read twice.
static void test_changes(void) {
    static const char* const names[] = {"a", "b", "c"};
    Rand rng = rand_open(2, 9);
    for (int trial = 0; trial < 20; trial++) {
        MixtureState state = {.count = 0};
        uint64_t p = 0, times[3][400] = {{0}}, given[3] = {0}, rows[3] = {0};
        while (p < 1500) {
            char list[700] = "", schedule[200] = "";
            int first = (int)rand_below(&rng, 3), count = 1 + (int)rand_below(&rng, 3), of[3];
            DataSources sources;
            Dataloader loader;
            for (int i = 0; i < count; i++) {
                of[i] = (first + i) % 3;
                sprintf(list + strlen(list), "%s%s=%s/d%d.bin", i ? "," : "", names[of[i]], test_tmpdir(),
                        of[i]);
            }
            add_weights(schedule, &rng, 0, names, of, count);
            add_weights(schedule, &rng, p + 1 + rand_below(&rng, 50), names, of, count);
            open_changing(&sources, list, schedule);
            if (p > 0) {
                mixture_continue(&sources, &state, p);
            }
            dataloader_open(&loader, &sources, settings_of(1, SHUFFLE_ON, 5));
            for (uint64_t end = p + 1 + rand_below(&rng, 100); p < end; p++) {
                uint64_t j;
                const int s = of[mixture_find(&sources, p, &j)];
                const DataloaderRow_ at = dataloader_find_(&loader, p);
                rows[s] = at.rows->count;
                EXPECT(at.rows->count < 400 && times[s][at.row]++ == at.epoch &&
                           at.epoch == given[s]++ / at.rows->count,
                       "trial %d: row %d of %s", trial, (int)at.row, names[s]);
            }
            dataloader_close(&loader);
            kept_mixture_close(&state, &sources, p);
        }
        kept_mixture_free(&state);
        EXPECT(given[0] > rows[0] && given[1] > rows[1], "more than an epoch");
    }
}

// Each source's sequences are all of its rows once per epoch, in another order in each.
static void test_mixture(const char* list) {
    DataSources sources;
    Dataloader loader;
    mixture_open_files(&sources, list, TOKENS_AUTO, V);
    mixture_pack(&sources, PACK_BESTFIT, T, EOT, DOCUMENT_MASK_OFF);
    dataloader_open(&loader, &sources, settings_of(1, SHUFFLE_ON, 5));
    uint64_t *order[2][2], given[2] = {0};
    for (int s = 0; s < 2; s++) {
        for (int epoch = 0; epoch < 2; epoch++) {
            order[s][epoch] = (uint64_t*)check_alloc(sources.source[s].rows.count, 8, "order");
        }
    }
    for (uint64_t p = 0; p < 1000; p++) {
        uint64_t j;
        const DataloaderRow_ at = dataloader_find_(&loader, p);
        const Rows* rows = at.rows;
        const uint64_t row = at.row;
        const int s = mixture_find(&sources, p, &j);
        EXPECT(rows == &sources.source[s].rows && row < rows->count && j == given[s]++, "p %d", (int)p);
        if (j < 2 * rows->count) {
            order[s][j / rows->count][row] += 1 + j % rows->count;
        }
    }
    for (int s = 0; s < 2; s++) {
        const uint64_t S = sources.source[s].rows.count;
        int moved = 0;
        EXPECT(given[s] >= 2 * S, "two epochs of source %d", s);
        for (uint64_t row = 0; row < S; row++) {
            EXPECT(order[s][0][row] >= 1 && order[s][0][row] <= S, "source %d: row %d once", s, (int)row);
            moved += order[s][0][row] != order[s][1][row];
        }
        EXPECT(moved > (int)S / 2, "source %d: %d rows moved", s, moved);
        free(order[s][0]);
        free(order[s][1]);
    }
    dataloader_close(&loader);
    mixture_close(&sources);
}

// A file that is listed twice is two sources, each with its own order.
static void test_twice(void) {
    char list[600];
    DataSources sources;
    Dataloader loader;
    int same = 0;
    snprintf(list, sizeof(list), "%s:1,%s:1", test_path("d0.bin"), test_path("d0.bin"));
    mixture_open_files(&sources, list, TOKENS_AUTO, V);
    mixture_pack(&sources, PACK_STREAM, T, EOT, DOCUMENT_MASK_OFF);
    dataloader_open(&loader, &sources, settings_of(1, SHUFFLE_ON, 5));
    const uint64_t S = sources.source[0].rows.count;
    for (uint64_t j = 0; j < S; j++) {
        same += dataloader_row_(&loader, 0, j) == dataloader_row_(&loader, 1, j);
    }
    EXPECT(same < (int)S / 4, "%d of %d rows at the same place", same, (int)S);
    dataloader_close(&loader);
    mixture_close(&sources);
}

// A batch is as long as its longest row, up to the next multiple of 8, and of uniform ones little
// is padding.
static void test_widths(void) {
    double padding[2];
    for (int uniform = 0; uniform < 2; uniform++) {
        DataSources sources;
        Dataloader loader;
        DataloaderSettings settings = settings_of(4, SHUFFLE_ON, 3);
        int shorter = 0;
        settings.group = 4;
        mixture_open_files(&sources, test_path("d0.bin"), TOKENS_AUTO, V);
        mixture_pack(&sources, uniform ? PACK_UNIFORM : PACK_DYNAMIC, 39, EOT, DOCUMENT_MASK_OFF);
        dataloader_open(&loader, &sources, settings);
        const int batches = (int)(loader.num_sequences / 4);
        for (int i = 0; i < batches; i++) {
            const Batch batch = dataloader_next(&loader);
            int longest = 0;
            for (int b = 0; b < 4; b++) {
                const int length = dataloader_length_(&loader, (uint64_t)(4 * i + b));
                longest = length > longest ? length : longest;
            }
            EXPECT(batch.T >= longest && (batch.T < longest + 8) && (batch.T % 8 == 0 || batch.T == 39),
                   "%d for %d", batch.T, longest);
            shorter += batch.T < 39;
        }
        EXPECT(shorter > 0, "all batches are as long as can be");
        padding[uniform] = dataloader_padding(&loader, batches);
        dataloader_close(&loader);
        mixture_close(&sources);
    }
    EXPECT(padding[1] < 0.2 && padding[0] > 1.5 * padding[1], "%g, uniform %g", padding[0], padding[1]);
}

// The last batch and those before it stay as they were, while the thread fills the next ones; also
// after the last batch of an update.
static void test_earlier(const char* list) {
    enum { EARLIER = 3, BATCHES = 24 };
    DataSources sources;
    Dataloader loader;
    DataloaderSettings settings = settings_of(2, SHUFFLE_ON, 3);
    uint64_t hashes[BATCHES];
    settings.earlier = EARLIER;
    settings.sequences = 10;
    mixture_open_files(&sources, list, TOKENS_AUTO, V);
    mixture_pack(&sources, PACK_BESTFIT, 39, EOT, DOCUMENT_MASK_ON);
    dataloader_open(&loader, &sources, settings);
    for (int i = 0; i < BATCHES; i++) {
        hashes[i] = row_hash(dataloader_next(&loader), 0, 0);
        usleep(2000); // for the thread
        for (int back = 0; back <= EARLIER && back <= i; back++) {
            const Batch batch = dataloader_earlier(&loader, back);
            EXPECT(batch.B == 2 && row_hash(batch, 0, 0) == hashes[i - back], "batch %d, %d back", i, back);
        }
        EXPECT(i == 0 || hashes[i] != hashes[i - 1], "batch %d is the one before", i);
    }
    dataloader_close(&loader);
    mixture_close(&sources);
}

// Uniform: every row once in an epoch, also those of the short group at its end.
static void test_uniform_epoch(void) {
    DataSources sources;
    Dataloader loader;
    DataloaderSettings settings = settings_of(1, SHUFFLE_ON, 3);
    settings.group = 8;
    mixture_open_files(&sources, test_path("d0.bin"), TOKENS_AUTO, V);
    mixture_pack(&sources, PACK_UNIFORM, T, EOT, DOCUMENT_MASK_OFF);
    dataloader_open(&loader, &sources, settings);
    const uint64_t S = loader.num_sequences;
    uint8_t* seen = (uint8_t*)check_alloc(S, 1, "rows");
    for (uint64_t p = 0; p < S; p++) {
        const uint64_t row = dataloader_find_(&loader, p).row;
        EXPECT(row < S && !seen[row]++, "row %d", (int)row);
    }
    EXPECT(S % 8 != 0, "a short group is part of the test");
    free(seen);
    dataloader_close(&loader);
    mixture_close(&sources);
}

// ---- the thread ----

// Updates of 1, 2, ... sequences, in micro-batches of at most 3, continue where the last one ended.
static void test_resizing(const char* list) {
    DataSources sources;
    Dataloader loader, plain;
    mixture_open_files(&sources, list, TOKENS_AUTO, V);
    mixture_pack(&sources, PACK_PAD, T, EOT, DOCUMENT_MASK_ON);
    dataloader_open(&plain, &sources, settings_of(1, SHUFFLE_ON, 5));
    dataloader_open(&loader, &sources, settings_of(3, SHUFFLE_ON, 5));
    uint64_t p = 0;
    for (int size = 1; size <= 8; size++) {
        for (int update = 0; update < 2; update++) {
            dataloader_resize(&loader, size, T);
            usleep(size % 2 ? 500 : 0); // the thread may fill all slots
            for (int left = size; left > 0; left -= 3) {
                const Batch batch = dataloader_next(&loader);
                EXPECT(batch.B == (left < 3 ? left : 3), "%d of %d", batch.B, left);
                for (int b = 0; b < batch.B; b++, p++) {
                    EXPECT(row_hash(batch, b, 0) == row_hash(dataloader_next(&plain), 0, 0), "size %d", size);
                }
            }
            EXPECT(loader.next == p, "position after an update of %d", size);
        }
    }
    dataloader_close(&loader);
    dataloader_close(&plain);
    mixture_close(&sources);
}

// Compares a batch of rows that were cut into sequences of `length` with the whole rows.
static void expect_cut(Batch cut, Batch whole, int length) {
    const int is_cut = whole.T > length, width = is_cut ? (whole.T + length - 1) / length * length : whole.T;
    EXPECT(cut.T == (is_cut ? length : whole.T) && cut.B * cut.T == whole.B * width &&
               cut.counted == whole.counted,
           "(%d, %d) of (%d, %d), %d targets", cut.B, cut.T, whole.B, whole.T, cut.counted);
    for (int n = 0; n < whole.B * width; n++) {
        const int t = n % width, at = n / width * whole.T + t, first = n % cut.T;
        EXPECT((first < cut.lengths[n / cut.T]) == (t < whole.lengths[n / width]), "length at %d", n);
        const int is_padding = t >= whole.T, start = is_padding ? first : whole.starts[at] - (t - first);
        EXPECT(cut.inputs[n] == (is_padding ? EOT : whole.inputs[at]), "input %d", n);
        EXPECT(cut.targets[n] == (is_padding ? -1 : whole.targets[at]), "target %d", n);
        EXPECT(cut.starts[n] == (start > 0 ? start : 0), "start %d is %d", n, cut.starts[n]);
    }
}

// Updates with rows of 24 tokens, cut into shorter and shorter sequences. The same rows follow each
// other, whatever their cut.
static void test_cutting(const char* list, Packing pack) {
    static const int lengths[] = {24, 12, 8, 24, 3, 1};
    DataSources sources;
    Dataloader loader, plain;
    int is_cut = 0;
    mixture_open_files(&sources, list, TOKENS_AUTO, V);
    mixture_pack(&sources, pack, 24, EOT, DOCUMENT_MASK_ON);
    dataloader_open(&plain, &sources, settings_of(3, SHUFFLE_ON, 5));
    dataloader_open(&loader, &sources, settings_of(3, SHUFFLE_ON, 5));
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        dataloader_resize(&loader, 3, lengths[i]);
        for (int update = 0; update < 6; update++) {
            const Batch cut = dataloader_next(&loader);
            expect_cut(cut, dataloader_next(&plain), lengths[i]);
            is_cut += cut.B > 3;
            EXPECT(loader.next == plain.next, "at sequence %d", (int)loader.next);
        }
    }
    EXPECT(is_cut >= 3 * 6, "%d batches are cut", is_cut);
    dataloader_close(&loader);
    dataloader_close(&plain);
    mixture_close(&sources);
}

// Seeks at random, right after opening and between batches; each batch is the one that stepping
// finds there. The batch before the last stays as it was.
static void test_seeking(const char* list) {
    DataSources sources;
    Dataloader loader, plain;
    Rand rng = rand_open(1, 2);
    mixture_open_files(&sources, list, TOKENS_AUTO, V);
    mixture_pack(&sources, PACK_PAD, T, EOT, DOCUMENT_MASK_ON);
    dataloader_open(&plain, &sources, settings_of(2, SHUFFLE_ON, 5));
    uint64_t wanted[300];
    for (int i = 0; i < 150; i++) {
        const Batch batch = dataloader_next(&plain);
        wanted[2 * i] = row_hash(batch, 0, 0);
        wanted[2 * i + 1] = row_hash(batch, 1, 0);
    }
    dataloader_close(&plain);
    for (int run = 0; run < 20; run++) {
        dataloader_open(&loader, &sources, settings_of(2, SHUFFLE_ON, 5));
        uint64_t p = 0;
        for (int i = 0; i < 60; i++) {
            if (rand_below(&rng, 3) == 0) {
                p = 2 * rand_below(&rng, 150);
                dataloader_seek(&loader, p);
            }
            if (p + 2 > 300) {
                break;
            }
            EXPECT(loader.next == p, "position");
            const Batch batch = dataloader_next(&loader);
            // the thread may fill all slots, but this one
            usleep(rand_below(&rng, 4) == 0 ? 100 : 0);
            EXPECT(row_hash(batch, 0, 0) == wanted[p] && row_hash(batch, 1, 0) == wanted[p + 1], "at %d",
                   (int)p);
            p += 2;
        }
        dataloader_close(&loader);
    }
    mixture_close(&sources);
}

// wait_s grows while the caller waits, and not while batches are ready.
static void test_wait(const char* list) {
    DataSources sources;
    Dataloader loader;
    mixture_open_files(&sources, list, TOKENS_AUTO, V);
    mixture_pack(&sources, PACK_STREAM, T, EOT, DOCUMENT_MASK_OFF);
    dataloader_open(&loader, &sources, settings_of(1000, SHUFFLE_ON, 5));
    dataloader_next(&loader);
    const double first_s = loader.wait_s;
    EXPECT(first_s >= 0 && first_s < 60, "%g", first_s);
    for (int i = 0; i < 500; i++) {
        usleep(1000);
        pthread_mutex_lock(&loader.mutex);
        const int ready = loader.produced - loader.consumed == 2;
        pthread_mutex_unlock(&loader.mutex);
        if (ready) {
            break;
        }
    }
    dataloader_next(&loader);
    EXPECT(loader.wait_s == first_s, "waited for a batch that was ready");
    for (int i = 0; i < 1000 && loader.wait_s == first_s;
         i++) { // on a busy machine a batch may overtake the caller
        dataloader_seek(&loader, 12345 + (uint64_t)i);
        dataloader_next(&loader);
    }
    EXPECT(loader.wait_s > first_s, "never waited for one that was not");
    dataloader_close(&loader);
    mixture_close(&sources);
}

// ---- files that somebody writes to ----

// Takes batches until there is an error; what comes before is sound, and all that comes after are
// zeros.
static void expect_broken(Dataloader* loader, const char* words) {
    int batches = 0;
    while (!dataloader_error(loader) && batches < 10000) {
        dataloader_next(loader);
        batches++;
    }
    const char* error = dataloader_error(loader);
    EXPECT(error && strstr(error, words), "after %d batches: %s, wanted %s", batches, error ? error : "",
           words);
    for (int i = 0; i < 8; i++) {
        if (i == 4) {
            dataloader_seek(loader, 0);
        }
        const Batch batch = dataloader_next(loader);
        EXPECT(batch.counted == batch.B * batch.T, "%d targets", batch.counted);
        for (int b = 0; b < batch.B; b++) {
            EXPECT(batch.lengths[b] == batch.T, "sequence %d: %d tokens", b, batch.lengths[b]);
        }
        for (int t = 0; t < batch.B * batch.T; t++) {
            EXPECT(batch.inputs[t] == 0 && batch.targets[t] == 0 && (!batch.starts || batch.starts[t] == 0),
                   "place %d: %d", t, batch.inputs[t]);
        }
    }
}

// A file that becomes shorter, and one that gets a token above the vocabulary, in each packing.
static void test_written_to(Packing pack) {
    const uint16_t large = V;
    for (int way = 0; way < 2; way++) {
        DataSources sources;
        Dataloader loader;
        char path[256];
        write_documents();
        snprintf(path, sizeof(path), "%s", test_path("d1.bin"));
        char list[600];
        snprintf(list, sizeof(list), "%s:0.5,%s:0.5", test_path("d0.bin"), path);
        mixture_open_files(&sources, list, TOKENS_AUTO, V);
        mixture_pack(&sources, pack, T, EOT, DOCUMENT_MASK_ON);
        dataloader_open(&loader, &sources, settings_of(2, SHUFFLE_ON, 5));
        dataloader_next(&loader);
        EXPECT(!dataloader_error(&loader), "%s", dataloader_error(&loader));
        if (way == 0) {
            EXPECT(truncate(path, 0) == 0, "%s", path);
        } else {
            const int fd = open(path, O_WRONLY);
            EXPECT(pwrite(fd, &large, 2, 1024 + 2 * 1000) == 2, "%s", path);
            close(fd);
        }
        expect_broken(&loader, way == 0 ? "d1.bin: became shorter while it was read: at token "
                                        : "d1.bin: a token became larger than the vocabulary while it was "
                                          "read: at token 1000 of ");
        dataloader_close(&loader);
        mixture_close(&sources);
    }
}

// A rank's batches have its tokens of the same sequences, and all starts.
static void test_chunks(const char* list) {
    enum { RANKS = 2, MOST = 64 * 64 };
    DataSources sources;
    Dataloader loader[1 + RANKS];
    mixture_open_files(&sources, list, TOKENS_AUTO, V);
    mixture_pack(&sources, PACK_BESTFIT, T, EOT, DOCUMENT_MASK_ON);
    for (int i = 0; i <= RANKS; i++) {
        DataloaderSettings settings = settings_of(2, SHUFFLE_ON, 5);
        settings.chunks = i > 0 ? (TokenChunks){RANKS - 1, i - 1} : (TokenChunks){0, 0};
        dataloader_open(&loader[i], &sources, settings);
    }
    for (int step = 0; step < 5; step++) {
        const Batch whole = dataloader_next(&loader[0]);
        int counted = 0;
        for (int i = 1; i <= RANKS; i++) {
            const Batch part = dataloader_next(&loader[i]);
            const int own = part.T;
            EXPECT(part.B == whole.B && own * RANKS == whole.T && batch_length(part) == whole.T, "T %d", own);
            EXPECT(memcmp(part.starts, whole.starts, (size_t)(whole.B * whole.T) * sizeof(int)) == 0,
                   "starts");
            EXPECT(memcmp(part.lengths, whole.lengths, (size_t)whole.B * sizeof(int)) == 0, "lengths");
            for (int n = 0; n < part.B * own; n++) {
                const int from = n / own * whole.T + token_chunks_position(part.chunks, n % own, own);
                EXPECT(part.inputs[n] == whole.inputs[from] && part.targets[n] == whole.targets[from],
                       "token %d of rank %d", n, i - 1);
            }
            counted += part.counted;
        }
        EXPECT(counted == whole.counted, "%d targets, wanted %d", counted, whole.counted);
    }
    for (int i = 0; i <= RANKS; i++) {
        dataloader_close(&loader[i]);
    }
    mixture_close(&sources);
}

static void test_divide(void) {
    int inputs[8], targets[8], starts[8] = {0};
    for (int i = 0; i < 8; i++) {
        inputs[i] = targets[i] = i;
    }
    targets[0] = -1;
    Batch batch = {.inputs = inputs, .targets = targets, .starts = starts, .B = 2, .T = 4, .counted = 8};
    batch_divide(&batch, (TokenChunks){1, 0}); // tokens 0 and 3 of each
    const int wanted[] = {0, 3, 4, 7};
    for (int i = 0; i < 4; i++) {
        EXPECT(inputs[i] == wanted[i], "token %d", i);
    }
    EXPECT(batch.T == 2 && batch.counted == 3, "%d counted", batch.counted);
}

TEST(dataloader) {
    const char* list = write_documents();
    test_orders();
    test_one_sequence();
    for (int pack = PACK_STREAM; pack <= PACK_DYNAMIC; pack++) {
        test_partitions(list, (Packing)pack);
    }
    test_partitions(test_path("d0.bin"), PACK_UNIFORM);
    test_mixture(list);
    test_resumes();
    test_changes();
    test_twice();
    test_earlier(list);
    test_widths();
    test_uniform_epoch();
    test_resizing(list);
    for (int pack = PACK_STREAM; pack <= PACK_DYNAMIC; pack++) {
        test_cutting(list, (Packing)pack);
    }
    test_cutting(test_path("d0.bin"), PACK_UNIFORM);
    test_chunks(list);
    test_divide();
    test_seeking(list);
    test_wait(list);
    test_written_to(PACK_STREAM);
    test_written_to(PACK_BESTFIT);
    test_written_to(PACK_DYNAMIC);
}
