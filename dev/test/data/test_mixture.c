// test_mixture.c -- mixture.h: lists with weights, and the order in which sources take turns.
#include "dev/test/lib/shards.h"
#define MIXTURE_IMPLEMENTATION

#include "llmc/data/mixture.h"
#include "dev/test/lib/kept_mixture.h"

enum { V = 50257 };

static void write_files(void) {
    write_shard("a_0.bin", MAGIC_U16, 0, 50);
    write_shard("a_1.bin", MAGIC_U16, 50, 51);
    write_shard("b.bin", MAGIC_U32, 1000, 401);
    write_shard("c.bin", MAGIC_U16, 2000, 31);
    test_write("t.txt", "text", 4);
}

// A list with % for the directory of the files.
static const char* list_of(const char* text) {
    static char list[4096];
    char* end = list;
    for (; *text; text++) {
        end += *text == '%' ? sprintf(end, "%s", test_tmpdir()) : sprintf(end, "%c", *text);
    }
    *end = '\0';
    return list;
}

static void open_list(DataSources* sources, const char* text, int T) {
    mixture_open_files(sources, list_of(text), TOKENS_AUTO, V);
    mixture_pack(sources, PACK_STREAM, T, V - 1, DOCUMENT_MASK_OFF);
}

static void test_lists(void) {
    DataSources sources;
    open_list(&sources, "%/a_*.bin,%/c.bin", 10);
    EXPECT(sources.count == 1 && sources.order.stretch[0].cycle == 1 && sources.tokens == 132, "one source");
    EXPECT(mixture_epoch(&sources) == 13, "an epoch of one source is its rows");
    mixture_close(&sources);
    open_list(&sources, "%/a_*.bin:0.50,%/b.bin:.3,%/c.bin:00.200000", 10);
    EXPECT(sources.count == 3 && sources.order.stretch[0].cycle == 10 && sources.tokens == 101 + 401 + 31,
           "three");
    const uint64_t* share = sources.order.stretch[0].share;
    EXPECT(share[0] == 5 && share[1] == 3 && share[2] == 2, "shares");
    EXPECT(strcmp(sources.source[2].stream.name, test_path("c.bin")) == 0, "%s",
           sources.source[2].stream.name);
    EXPECT(tokens_at(&sources.source[1].stream, 0) == token_at(1000), "its tokens");
    mixture_close(&sources);
    open_list(&sources, "%/b.bin:6,%/c.bin:2", 10);
    EXPECT(sources.count == 2 && sources.order.stretch[0].cycle == 4 &&
               sources.order.stretch[0].share[0] == 3,
           "not normalized");
    mixture_close(&sources);
    EXPECT(mixture_kind(list_of("%/a_*.bin:0.5,%/b.bin:.5")) == TOKENS_SHARDS, "");
    EXPECT(mixture_kind(list_of("%/t.txt:1")) == TOKENS_TEXT, "");
    EXPECT(mixture_kind(list_of("%/t.txt")) == TOKENS_TEXT, "");
}

// Weights whose sources are all the same small file.
static void open_weights(DataSources* sources, const uint64_t* weights, int count) {
    char list[4096] = "";
    for (int i = 0; i < count; i++) {
        sprintf(list + strlen(list), "%s%%/c.bin:%d", i ? "," : "", (int)weights[i]);
    }
    open_list(sources, list, 10);
}

// After any number of sequences every source has given its weight's part, within less than one, and
// its rows in their order.
static void test_turns(void) {
    static const uint64_t cases[][6] = {{7, 3},
                                        {1, 1, 1},
                                        {1, 999},
                                        {333, 333, 334},
                                        {1, 2, 3, 4, 5, 6},
                                        {500, 1, 1, 1, 1},
                                        {89, 55, 34, 21, 13, 8}};
    for (size_t k = 0; k < sizeof(cases) / sizeof(cases[0]); k++) {
        DataSources sources;
        uint64_t given[6] = {0};
        int count = 6;
        while (cases[k][count - 1] == 0) {
            count--;
        }
        open_weights(&sources, cases[k], count);
        const Stretch* stretch = &sources.order.stretch[0];
        for (uint64_t p = 0; p < 2500; p++) {
            uint64_t j;
            const int s = mixture_find(&sources, p, &j);
            EXPECT(j == given[s]++, "case %d, sequence %d of source %d", (int)k, (int)p, s);
            for (int i = 0; i < count; i++) {
                const double wanted = (double)(p + 1) * (double)stretch->share[i] / (double)stretch->cycle;
                EXPECT(fabs((double)given[i] - wanted) < 1 - 1e-9, "case %d: source %d after %d", (int)k, i,
                       (int)p);
            }
        }
        mixture_close(&sources);
    }
}

// A large cycle, and positions far out.
static void test_far(void) {
    const uint64_t weights[] = {500000, 499999, 1};
    DataSources sources;
    uint64_t j;
    open_weights(&sources, weights, 3);
    EXPECT(sources.order.stretch[0].cycle == 1000000, "%d", (int)sources.order.stretch[0].cycle);
    const uint64_t p = UINT64_C(1000000000000000);
    const int s = mixture_find(&sources, p + 12345, &j);
    uint64_t near;
    EXPECT(mixture_find(&sources, 12345, &near) == s, "the order repeats");
    EXPECT(j == p / 1000000 * weights[s] + near, "the number continues");
    mixture_close(&sources);
}

static void test_epoch(void) {
    DataSources sources;
    open_list(&sources, "%/b.bin:3,%/c.bin:1", 10); // 40 rows and 3
    uint64_t seen[2] = {0}, j;
    const uint64_t epoch = mixture_epoch(&sources);
    for (uint64_t p = 0; p < epoch; p++) {
        seen[mixture_find(&sources, p, &j)]++;
    }
    EXPECT(seen[0] <= 40 && seen[1] == 3, "%d and %d", (int)seen[0], (int)seen[1]);
    EXPECT(mixture_find(&sources, epoch, &j) == 1 && j == 3, "the next would be a repetition");
    mixture_close(&sources);
}

static void test_tail(void) {
    DataSources sources, tail;
    mixture_open_files(&sources, list_of("%/a_*.bin:3,%/b.bin:1"), TOKENS_AUTO, V);
    mixture_split_tail(&sources, &tail, 10, 0);
    EXPECT(tail.count == 2 && tail.order.stretch[0].cycle == 4 && tail.order.stretch[0].share[0] == 3,
           "the same weights");
    EXPECT(tail.source[0].stream.count == 51 && tail.source[1].stream.count == 20, "a shard, and 5 %%");
    EXPECT(sources.tokens == 50 + 381 && tail.tokens == 71, "%zu and %zu", sources.tokens, tail.tokens);
    EXPECT(tokens_at(&tail.source[1].stream, 0) == token_at(1381), "the end of b");
    mixture_close(&tail);
    mixture_close(&sources);
}

// ---- messages ----

static void test_print(void) {
    const uint16_t tokens[] = {9, 1, 2, 9, 1, 9, 1, 2, 3, 4};
    char text[1024] = "";
    DataSources sources;
    FILE* file = tmpfile();
    open_list(&sources, "%/b.bin:3,%/c.bin:1", 10);
    mixture_print(file, &sources, 80);
    mixture_close(&sources);
    mixture_open_memory(&sources, tokens, 10, 10, "memory");
    mixture_pack(&sources, PACK_PAD, 4, 9, DOCUMENT_MASK_OFF);
    mixture_print(file, &sources, 2);
    mixture_close(&sources);
    rewind(file);
    EXPECT(fread(text, 1, sizeof(text) - 1, file) > 0, "");
    EXPECT(strstr(text, "b.bin: 401 tokens, weight 0.75, 1.5 epochs\n"), "%s", text);
    EXPECT(strstr(text, "c.bin: 31 tokens, weight 0.25, 6.667 epochs\n"), "%s", text);
    EXPECT(strstr(text,
                  "source memory: 10 tokens, weight 1, 0.5 epochs; 3 documents, packed (pad) into 4 rows, "
                  "0.00 % discarded, 37.50 % padding\n"),
           "%s", text);
    fclose(file);
}

// ---- names and contents ----

static void test_names(void) {
    DataSources sources;
    write_shard("x,y:5.bin", MAGIC_U16, 0, 50);
    open_list(&sources, "%/x\\,y\\:5.bin:1,%/c.bin:1", 10);
    EXPECT(sources.count == 2 && sources.source[0].stream.count == 50, "%d sources", sources.count);
    EXPECT(strcmp(sources.source[0].name, list_of("%/x\\,y\\:5.bin")) == 0, "%s", sources.source[0].name);
    mixture_rename(&sources, "books/*.txt:1,other:1");
    EXPECT(strcmp(sources.source[0].stream.name, "books/*.txt") == 0, "%s", sources.source[0].stream.name);
    EXPECT(!sources.is_named, "");
    EXPECT(strcmp(sources.source[1].name, "other") == 0, "%s", sources.source[1].name);
    mixture_close(&sources);
    open_list(&sources, "web=%/x\\,y\\:5.bin:3,b_2=%/c.bin:1", 10);
    EXPECT(sources.is_named && strcmp(sources.source[0].name, "web") == 0, "%s", sources.source[0].name);
    EXPECT(strcmp(sources.source[0].pattern, list_of("%/x\\,y\\:5.bin")) == 0, "%s",
           sources.source[0].pattern);
    EXPECT(sources.order.stretch[0].share[0] == 3 && sources.source[1].number == 1, "weights");
    mixture_close(&sources);
    write_shard("a=b.bin", MAGIC_U16, 0, 60);
    open_list(&sources, "%/a\\=b.bin", 10);
    EXPECT(!sources.is_named && sources.tokens == 60, "no name");
    mixture_close(&sources);
    open_list(&sources, "web=%/b.bin", 10);
    EXPECT(sources.is_named && sources.count == 1 && sources.tokens == 401, "one");
    mixture_close(&sources);
}

static uint64_t fingerprint_of(const char* list) {
    DataSources sources, tail;
    mixture_open_files(&sources, list_of(list), TOKENS_AUTO, V);
    mixture_split_tail(&sources, &tail, 10, 0);
    const uint64_t value = sources.fingerprint;
    EXPECT(value && tail.fingerprint == value, "%s", list);
    mixture_close(&tail);
    mixture_close(&sources);
    return value;
}

// The data is the same under other names, and another one in another order.
static void test_fingerprint(void) {
    const uint16_t tokens[20] = {0};
    DataSources memory;
    write_shard("moved.bin", MAGIC_U32, 1000, 401);
    EXPECT(fingerprint_of("%/b.bin:1,%/c.bin:1") == fingerprint_of("%/moved.bin:1,%/c.bin:1"), "moved");
    EXPECT(fingerprint_of("%/b.bin:1,%/c.bin:1") != fingerprint_of("%/c.bin:1,%/b.bin:1"), "another order");
    EXPECT(fingerprint_of("%/a_*.bin") != fingerprint_of("%/b.bin"), "other data");
    mixture_open_memory(&memory, tokens, 20, V, "memory");
    EXPECT(memory.fingerprint == 0, "memory has none");
    mixture_close(&memory);
}

// ---- errors ----

static void open_it(const void* list) {
    DataSources sources;
    open_list(&sources, (const char*)list, 10);
}

// A file that becomes shorter before its documents are looked for.
static void pack_shorter(const void* unused) {
    DataSources sources;
    (void)unused;
    mixture_open_files(&sources, write_shard("shorter.bin", MAGIC_U16, 0, 10000), TOKENS_AUTO, V);
    EXPECT(truncate(test_path("shorter.bin"), 0) == 0, "truncate");
    mixture_pack(&sources, PACK_PAD, 10, V - 1, DOCUMENT_MASK_OFF);
}

static void test_errors(void) {
    EXPECT(test_dies(open_it, "%/a_0.bin:0.5,%/b.bin", 2, "1 of 2 items have a weight; wanted all or none"),
           "");
    EXPECT(test_dies(open_it, "%/a_0.bin:0,%/b.bin:1", 2, "a_0.bin:0: weight \"0\"; wanted a positive"), "");
    EXPECT(test_dies(open_it, "%/a_0.bin:-1,%/b.bin:1", 2, "weight \"-1\""), "");
    EXPECT(test_dies(open_it, "%/a_0.bin:1e3,%/b.bin:1", 2, "weight \"1e3\""), "");
    EXPECT(test_dies(open_it, "%/a_0.bin:0.1234567,%/b.bin:1", 2, "weight \"0.1234567\"|six digits"), "");
    EXPECT(test_dies(open_it, "%/a_0.bin:1.2.3,%/b.bin:1", 2, "weight \"1.2.3\""), "");
    EXPECT(
        test_dies(open_it, "%/a_0.bin:0.123457,%/b.bin:1", 2, "repeat after 1123457 sequences|fewer digits"),
        "");
    EXPECT(test_dies(open_it, "%/none.bin:1,%/b.bin:1", 1, "none.bin: cannot open|No such file"), "");
    EXPECT(test_dies(pack_shorter, NULL, 1, "shorter.bin: became shorter while"), "");
    EXPECT(test_dies(open_it, "%/b.bin:1,%/c.bin:x", 2, "1 of 2 items have a weight"),
           "no number: part of the name");
    EXPECT(test_dies(open_it, "a=%/b.bin,%/c.bin", 2, "1 of 2 items have a name; wanted all or none"), "");
    EXPECT(test_dies(open_it, "a=%/b.bin:1,a=%/c.bin:1", 2, "two sources are called a"), "");
    EXPECT(test_dies(open_it, "ramp=%/b.bin:1", 2, "ramp=|wanted NAME=FILES, with a name other than"), "");
    EXPECT(test_dies(open_it, "a=", 2, "data a=: wanted NAME=FILES"), "");
}

// ---- checkpoints ----

static int number_of(const DataSources* sources, const char* name) {
    for (int s = 0; s < sources->count; s++) {
        if (strcmp(sources->source[s].name, name) == 0) {
            return sources->source[s].number;
        }
    }
    return -1;
}

// Sources keep their numbers and places in any order of the list, under new names, and while they
// are away.
static void test_continue(void) {
    DataSources sources;
    MixtureState state = {.count = 0};
    uint64_t given[SOURCES_MAX];
    open_list(&sources, "a=%/a_*.bin:1,b=%/b.bin:2", 10);
    kept_mixture_close(&state, &sources, 31);
    EXPECT(state.count == 2 && state.source[0].given == 10 && state.source[1].given == 21, "%d",
           (int)state.source[0].given);

    open_list(&sources, "b=%/b.bin:2,a=%/a_*.bin:1", 10);
    EXPECT(mixture_continue(&sources, &state, 31), "another order is the same mixture");
    EXPECT(number_of(&sources, "a") == 0 && number_of(&sources, "b") == 1, "numbers");
    EXPECT(sources.order.stretch[0].first == 0 && sources.order.stretch[0].base[0] == 0, "from the start");
    mixture_close(&sources);

    open_list(&sources, "b=%/b.bin:1,c=%/c.bin:1", 10);
    EXPECT(!mixture_continue(&sources, &state, 31), "another mixture");
    EXPECT(number_of(&sources, "b") == 1 && number_of(&sources, "c") == 2, "numbers");
    EXPECT(sources.num_past == 1 && sources.past[0].given == 10 && sources.past[0].share == 0, "a is away");
    source_order_given(&sources.order, 35, given);
    EXPECT(given[0] == 23 && given[1] == 2, "%d, %d", (int)given[0], (int)given[1]);
    kept_mixture_close(&state, &sources, 35);

    open_list(&sources, "c=%/c.bin:1,news=%/b.bin:1,a=%/a_*.bin:2", 10);
    EXPECT(!mixture_continue(&sources, &state, 35), "another mixture");
    EXPECT(number_of(&sources, "news") == 1 && number_of(&sources, "a") == 0, "b under a new name");
    source_order_given(&sources.order, 35, given);
    EXPECT(given[0] == 2 && given[1] == 23 && given[2] == 10 && sources.num_past == 0, "all continue");
    mixture_close(&sources);

    open_list(&sources, "b=%/c.bin:1,c=%/b.bin:1", 10);
    const SourceMatch match = mixture_match(&sources, &state);
    EXPECT(match.fate[0] == SOURCE_CHANGED && match.fate[1] == SOURCE_CHANGED, "names are not contents");
    mixture_close(&sources);
    kept_mixture_free(&state);
}

static void kind_of(const void* list) { mixture_kind(list_of((const char*)list)); }

TEST(mixture) {
    write_files();
    test_errors();
    EXPECT(test_dies(kind_of, "%/a_0.bin:1,%/t.txt:1", 1, "a_0.bin and |t.txt: shards (.bin) and text"), "");
    test_lists();
    test_turns();
    test_far();
    test_epoch();
    test_tail();
    test_print();
    test_names();
    test_fingerprint();
    test_continue();
}
