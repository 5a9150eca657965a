// Tests of llmc/dataloader.h.
#include "test.h"
#include "llmc/dataloader.h"

enum { MAGIC_U16 = 20240520, MAGIC_U32 = 20240801, V = 50257 };

// Token `i` of the test data: no short run of them occurs twice.
static int token_at(size_t i) { return (int)(i * 7919 % 50021); }

// Writes a shard of the tokens [first, first + n) of the test data.
static const char* write_shard(const char* name, int32_t magic, size_t first, size_t n) {
    int32_t header[256] = {magic, magic == MAGIC_U16 ? 1 : 7, (int32_t)n};
    const size_t width = magic == MAGIC_U16 ? 2 : 4;
    char* bytes = check_alloc(sizeof(header) + n * width, 1, name);
    memcpy(bytes, header, sizeof(header));
    for (size_t i = 0; i < n; i++) {
        const uint32_t token = (uint32_t)token_at(first + i);
        memcpy(bytes + sizeof(header) + i * width, &token, width); // little endian
    }
    const char* path = test_write(name, bytes, sizeof(header) + n * width);
    free(bytes);
    return path;
}

// Three shards of 50, 1 and 49 tokens, the second one wide: together tokens 0 .. 99 of the test data.
static const char* write_shards(void) {
    write_shard("train_2.bin", MAGIC_U16, 51, 49); // not written in name order
    write_shard("train_0.bin", MAGIC_U16, 0, 50);
    write_shard("train_1.bin", MAGIC_U32, 50, 1);
    return test_path("train_*.bin");
}

static TokenStream open_files(const char* pattern) {
    TokenStream stream;
    tokens_open_files(&stream, pattern, V);
    return stream;
}

// ---- streams

static void expect_test_data(const TokenStream* stream, size_t first, size_t count, const char* what) {
    int tokens[128];
    EXPECT(stream->count == count, "%s: %zu tokens, wanted %zu", what, stream->count, count);
    for (size_t start = 0; start <= stream->count; start++) {
        for (size_t n = 0; start + n <= stream->count; n++) {
            tokens[n] = -1;
            tokens_fill(stream, start, n, tokens);
            EXPECT(tokens[n] == -1, "%s: wrote past the end", what);
            for (size_t i = 0; i < n; i++) {
                EXPECT(tokens[i] == token_at(first + start + i), "%s: token %zu", what, start + i);
            }
        }
    }
}

static void test_shards(void) {
    const char* pattern = write_shards();
    char list[1024];
    snprintf(list, sizeof(list), "%s,%s,%s", test_path("train_2.bin"), test_path("train_0.bin"),
             test_path("train_[1x].bin"));
    const char* patterns[] = {pattern, list};
    for (int i = 0; i < 2; i++) {
        TokenStream stream = open_files(patterns[i]);
        expect_test_data(&stream, 0, 100, patterns[i]);
        tokens_close(&stream);
    }
    TokenStream stream = open_files(test_path("train_2.bin"));
    expect_test_data(&stream, 51, 49, "a plain path");
    tokens_close(&stream);
    EXPECT(tokens_kind(pattern) == TOKENS_SHARDS, "");
}

static void test_text(void) {
    test_write("b.txt", "xyz", 3);
    test_write("a", "\x00\xFFq", 3);
    char list[1024];
    snprintf(list, sizeof(list), "%s,%s", test_path("b*.txt"), test_path("a"));
    EXPECT(tokens_kind(list) == TOKENS_TEXT, "");
    TokenStream stream;
    tokens_open_files(&stream, list, 257);
    const int wanted[8] = {256, 0, 255, 'q', 256, 'x', 'y', 'z'};
    int tokens[8];
    EXPECT(stream.count == 8, "%zu tokens", stream.count);
    tokens_fill(&stream, 0, 8, tokens);
    EXPECT(memcmp(tokens, wanted, sizeof(wanted)) == 0, "");
    tokens_close(&stream);
}

static void test_split(void) {
    uint16_t memory[400];
    for (size_t i = 0; i < 400; i++) {
        memory[i] = (uint16_t)token_at(i);
    }
    const char* pattern = write_shards();
    char two[600];
    snprintf(two, sizeof(two), "%s,%s", test_path("train_0.bin"), test_path("train_1.bin"));
    const struct {
        const char* pattern; // NULL: the memory
        int T;
        size_t count, tail;
    } cases[] = {
        {pattern, 4, 100, 49},                                        // the last shard
        {pattern, 48, 100, 49},                                       // just long enough
        {pattern, 49, 100, 50},                                       // one token too short for a sequence
        {two, 9, 51, 10},       {test_path("train_0.bin"), 1, 50, 2}, // 5 % of a single shard
        {NULL, 4, 400, 20},     {NULL, 19, 400, 20},
        {NULL, 20, 400, 21},    {NULL, 199, 400, 200},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        TokenStream stream, tail;
        if (cases[i].pattern) {
            stream = open_files(cases[i].pattern);
        } else {
            tokens_open_memory(&stream, memory, 400, V, "memory");
        }
        tokens_split_tail(&stream, &tail, cases[i].T);
        const size_t rest = cases[i].count - cases[i].tail;
        EXPECT(stream.count == rest && tail.count == cases[i].tail, "case %zu: %zu + %zu", i, stream.count,
               tail.count);
        if (cases[i].count <= 100) {
            expect_test_data(&stream, 0, rest, "training part");
            expect_test_data(&tail, rest, cases[i].tail, "validation part");
        }
        tokens_close(&tail);
        tokens_close(&stream);
    }
}

static void test_split_text(void) {
    char text[199];
    memset(text, 'x', sizeof(text));
    memcpy(text + 189, "0123456789", 10);
    TokenStream stream = open_files(test_write("long.txt", text, sizeof(text))), tail;
    tokens_split_tail(&stream, &tail, 4);
    int tokens[10];
    EXPECT(stream.count == 190 && tail.count == 10, "%zu + %zu", stream.count, tail.count);
    tokens_fill(&tail, 0, 10, tokens);
    for (int i = 0; i < 10; i++) {
        EXPECT(tokens[i] == '0' + i, "token %d of the tail is %d", i, tokens[i]);
    }
    tokens_close(&tail);
    tokens_close(&stream);
}

// ---- batches

// The sequence k that a row of a batch holds, after checking all of the row.
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

// The order of the first RUN sequences, by steps of B; with `seek`, found one batch at a time from the end.
static void run_order(const TokenStream* stream, int B, Shuffle shuffle, uint64_t seed, int seek,
                      size_t* order) {
    Dataloader loader;
    dataloader_open(&loader, stream, B, 4, shuffle, seed);
    EXPECT(loader.num_sequences == (stream->count - 1) / 4, "%zu sequences", (size_t)loader.num_sequences);
    for (int i = 0; i < RUN / B; i++) {
        const int step = seek ? RUN / B - 1 - i : i;
        if (seek) {
            dataloader_seek(&loader, (uint64_t)step * (uint64_t)B);
        }
        const Batch batch = dataloader_next(&loader);
        EXPECT(batch.B == B && batch.T == 4, "");
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

static void test_order(const TokenStream* stream) {
    const size_t S = (stream->count - 1) / 4;
    size_t order[RUN], shuffled[RUN], other[RUN];
    run_order(stream, 1, SHUFFLE_OFF, 42, 0, order);
    for (size_t p = 0; p < RUN; p++) {
        EXPECT(order[p] == p % S, "in order: %zu at %zu", order[p], p);
    }
    run_order(stream, 1, SHUFFLE_ON, 42, 0, shuffled);
    expect_epochs(shuffled, S);
    expect_same_order(order, shuffled, 0, "shuffled is not in order");
    EXPECT(memcmp(shuffled, shuffled + S, S * sizeof(size_t)) != 0, "two epochs have one order");
    for (int B = 1; B <= 12; B += B == 1 ? 3 : 8) { // 1, 4, 12: S is a multiple of none or some of them
        run_order(stream, B, SHUFFLE_ON, 42, 0, other);
        expect_same_order(shuffled, other, 1, "B does not matter");
        run_order(stream, B, SHUFFLE_ON, 42, 1, other);
        expect_same_order(shuffled, other, 1, "seeking is stepping");
        run_order(stream, B, SHUFFLE_OFF, 0, 1, other);
        expect_same_order(order, other, 1, "seeking is stepping, in order");
    }
    run_order(stream, 1, SHUFFLE_ON, 43, 0, other);
    expect_same_order(shuffled, other, 0, "another seed, another order");
}

static void test_batches(void) {
    TokenStream stream = open_files(write_shards()), tail;
    test_order(&stream); // 100 tokens: 24 sequences, 3 tokens left over
    tokens_split_tail(&stream, &tail, 4);
    test_order(&tail); // 49 tokens: 12 sequences to the very last token
    tokens_close(&tail);
    tokens_close(&stream);
}

// B and T that exceed the data: the epoch repeats inside the batch.
static void test_one_sequence(void) {
    const uint16_t tokens[] = {5, 6, 7, 8};
    TokenStream stream;
    Dataloader loader;
    tokens_open_memory(&stream, tokens, 4, 9, "memory");
    dataloader_open(&loader, &stream, 3, 3, SHUFFLE_ON, 1);
    dataloader_seek(&loader, UINT64_C(1) << 60);
    const Batch batch = dataloader_next(&loader);
    EXPECT(loader.num_sequences == 1, "");
    for (int i = 0; i < 9; i++) {
        EXPECT(batch.inputs[i] == 5 + i % 3 && batch.targets[i] == 6 + i % 3, "%d", i);
    }
    dataloader_close(&loader);
    tokens_close(&stream);
}

// ---- errors

static void open_path(const void* pattern) { open_files((const char*)pattern); }

static void open_unreadable(const void* path) {
    if (setuid(65534) != 0 && geteuid() == 0) { // root reads everything
        fprintf(stderr, "setuid failed\n");
    }
    open_files((const char*)path);
}

static int open_dies(const char* pattern, const char* wanted) {
    return test_dies(open_path, pattern, EXIT_FAILURE, wanted);
}

static void test_file_errors(void) {
    const char *text = test_write("c.txt", "text", 4), *shard = write_shard("c.bin", MAGIC_U16, 0, 9);
    char both[600];
    snprintf(both, sizeof(both), "%s,%s", text, shard);
    EXPECT(open_dies(both, "c.bin|c.txt|one kind"), "");
    EXPECT(open_dies(test_path("none_*.bin"), "none_*.bin|No such file"), "");
    EXPECT(open_dies(test_path("none.txt"), "none.txt|No such file"), "");
    EXPECT(open_dies("", "names no file"), "");
    EXPECT(open_dies(",,", "\",,\": names no file"), "");
    EXPECT(open_dies(test_tmpdir(), "/tmp/|a directory"), "");
    EXPECT(open_dies("/dev/null", "/dev/null: not a regular file"), "");
    EXPECT(open_dies(test_write("empty.txt", "", 0), "empty.txt: empty file"), "");
    EXPECT(open_dies(test_write("empty.bin", "", 0), "empty.bin: empty file"), "");
    chmod(test_tmpdir(), 0755);
    chmod(shard, 0);
    EXPECT(test_dies(open_unreadable, shard, EXIT_FAILURE, "c.bin: |Permission denied"), "");
}

static void open_text_small_vocabulary(const void* path) {
    TokenStream stream;
    tokens_open_files(&stream, (const char*)path, 256);
}

// A shard of 9 tokens with a header of these fields, and `bytes` bytes in all.
static int header_dies(uint32_t magic, int32_t version, int32_t count, size_t bytes, const char* wanted) {
    char file[2048] = {0}, words[256];
    memcpy(file, (const int32_t[]){(int32_t)magic, version, count}, 12);
    snprintf(words, sizeof(words), "error: |bad.bin: |%s", wanted);
    return open_dies(test_write("bad.bin", file, bytes), words);
}

static void test_header_errors(void) {
    const size_t full = 1024 + 2 * 9;
    EXPECT(header_dies(MAGIC_U16, 1, 9, 1023, "1023 bytes|header of 1024"), "");
    EXPECT(header_dies(12345, 1, 9, full, "magic 12345,|wanted 20240520"), "");
    EXPECT(header_dies(__builtin_bswap32(MAGIC_U16), 1, 9, full, "bytes swapped"), "");
    EXPECT(header_dies(__builtin_bswap32(MAGIC_U32), 7, 9, full, "bytes swapped"), "");
    EXPECT(header_dies(50256, 464, 262, full, "bare tokens"), "");
    EXPECT(header_dies(464u << 16 | 50256, 464, 262, full, "bare tokens"), "");
    EXPECT(header_dies(20240326, 3, 1024, full, "a model"), "");
    EXPECT(header_dies(MAGIC_U16, 7, 9, full, "version 7, wanted 1"), "");
    EXPECT(header_dies(MAGIC_U32, 1, 9, 1024 + 4 * 9, "version 1, wanted 7"), "");
    EXPECT(header_dies(MAGIC_U16, 1, 0, 1024, "0 tokens, wanted at least 1"), "");
    EXPECT(header_dies(MAGIC_U16, 1, -9, full, "-9 tokens, wanted at least 1"), "");
    EXPECT(header_dies(MAGIC_U16, 1, 9, full - 1, "truncated: 1041 bytes, wanted 1042 for 9 tokens"), "");
    EXPECT(header_dies(MAGIC_U16, 1, 9, full + 1, "too long: 1043 bytes, wanted 1042"), "");
    EXPECT(header_dies(MAGIC_U32, 7, 9, full, "truncated: 1042 bytes, wanted 1060"), "");
    EXPECT(header_dies(MAGIC_U16, 1, INT32_MAX, full, "truncated: 1042 bytes, wanted 4294968318"), "");
}

static void open_shard_small_vocabulary(const void* path) {
    TokenStream stream;
    tokens_open_files(&stream, (const char*)path, token_at(6)); // the largest of the first tokens
}

enum { MANY = (3 << 20) + 5 }; // several blocks of the parallel scan, the last one short

static void open_many_with_bad(const void* position) {
    uint16_t* tokens = check_alloc(MANY, sizeof(uint16_t), "tokens");
    tokens[*(const size_t*)position] = 300;
    tokens[MANY - 1] = 500;
    TokenStream stream;
    tokens_open_memory(&stream, tokens, MANY, 300, "some memory");
}

static void test_bad_tokens(void) {
    char wanted[100];
    const int32_t magics[] = {MAGIC_U16, MAGIC_U32};
    for (int i = 0; i < 2; i++) {
        snprintf(wanted, sizeof(wanted), "c2.bin: token 6 has id %d,|size %d", token_at(6), token_at(6));
        const char* path = write_shard("c2.bin", magics[i], 0, 7);
        EXPECT(test_dies(open_shard_small_vocabulary, path, EXIT_FAILURE, wanted), "");
    }
    const size_t positions[] = {0, (1 << 20) - 1, 1 << 20, (2 << 20) + 7, 3 << 20};
    for (size_t i = 0; i < sizeof(positions) / sizeof(positions[0]); i++) {
        snprintf(wanted, sizeof(wanted), "some memory: token %zu has id 300, wanted|size 300", positions[i]);
        EXPECT(test_dies(open_many_with_bad, &positions[i], EXIT_FAILURE, wanted), "position %zu",
               positions[i]);
    }
    EXPECT(test_dies(open_text_small_vocabulary, test_write("d.txt", "d", 1), EXIT_FAILURE,
                     "d.txt|257, found 256"),
           "");
}

static void load_too_few(const void* unused) {
    static const uint16_t tokens[4] = {1, 2, 3, 4};
    TokenStream stream;
    Dataloader loader;
    (void)unused;
    tokens_open_memory(&stream, tokens, 4, V, "four");
    dataloader_open(&loader, &stream, 1, 4, SHUFFLE_OFF, 0);
}

static void split_too_few(const void* pattern) {
    TokenStream stream = open_files((const char*)pattern), tail;
    tokens_split_tail(&stream, &tail, 50);
}

static void test_too_few(void) {
    EXPECT(test_dies(load_too_few, NULL, EXIT_FAILURE, "four: 4 tokens, wanted 5"), "");
    EXPECT(test_dies(split_too_few, write_shards(), EXIT_FAILURE, "train_*.bin: 100 tokens, wanted 102"), "");
    EXPECT(test_dies(split_too_few, test_write("e.txt", "e", 1), EXIT_FAILURE, "e.txt: 2 tokens, wanted 102"),
           "");
}

// ---- more than 2 GiB. Sparse files: what was not written reads as 0, and takes no room.

// Creates a file of `bytes` bytes with `head` at its beginning and `tail` at its end; NULL if there is no
// room.
static const char* write_sparse(const char* name, size_t bytes, const void* head, size_t head_bytes,
                                const void* tail, size_t tail_bytes) {
    const char* path = test_path(name);
    const int fd = open(path, O_CREAT | O_WRONLY, 0600);
    const int ok = fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 &&
                   pwrite(fd, head, head_bytes, 0) == (ssize_t)head_bytes &&
                   pwrite(fd, tail, tail_bytes, (off_t)(bytes - tail_bytes)) == (ssize_t)tail_bytes;
    close(fd);
    return ok ? path : NULL;
}

// The stream is zeros up to the last 4 tokens, which are the last targets.
static void expect_large(const TokenStream* stream, size_t count) {
    const int T = 1024; // count is 1 more than a multiple
    Dataloader loader;
    EXPECT(stream->count == count, "%zu tokens", stream->count);
    dataloader_open(&loader, stream, 1, T, SHUFFLE_OFF, 0);
    dataloader_seek(&loader, 1);
    EXPECT(dataloader_next(&loader).targets[T - 1] == 0, "sequence 1");
    dataloader_seek(&loader, loader.num_sequences - 1);
    const Batch batch = dataloader_next(&loader);
    for (int t = 0; t < T; t++) {
        const int wanted = t < T - 4 ? 0 : 11 * (t - (T - 5)); // ..., 0, 11, 22, 33, 44
        EXPECT(batch.targets[t] == wanted, "target %d is %d", t, batch.targets[t]);
        EXPECT(t == 0 || batch.inputs[t] == batch.targets[t - 1], "input %d", t);
    }
    dataloader_close(&loader);
}

static int test_large_text(void) {
    const size_t count = ((size_t)1 << 32) + 1024 + 1; // with the end-of-text token
    const char* path = write_sparse("large.txt", count - 1, "", 1, (const char[]){11, 22, 33, 44}, 4);
    if (path) {
        TokenStream stream = open_files(path);
        expect_large(&stream, count);
        tokens_close(&stream);
    }
    return path != NULL;
}

// Without the scan of the tokens, which would fill the memory with the pages of the file.
static int test_large_shard(void) {
    const size_t count = ((size_t)1 << 30) + 1024 + 1;
    const int32_t header[3] = {MAGIC_U16, 1, (int32_t)count};
    const char* path = write_sparse("large.bin", 1024 + 2 * count, header, sizeof(header),
                                    (const uint16_t[]){11, 22, 33, 44}, 8);
    if (path) {
        TokenStream stream = {.name = path, .spans = check_alloc(1, sizeof(TokenSpan), "span")};
        TokenSpan span = tokens_map_(path);
        tokens_read_header_(&span, path);
        tokens_append_(&stream, span);
        expect_large(&stream, count);
        tokens_close(&stream);
    }
    return path != NULL;
}

// The scan, over the zero page again and again.
static void open_large_memory(const void* unused) {
    const size_t count = ((size_t)1 << 30) + 5;
    uint16_t* tokens =
        mmap(NULL, 2 * count, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TokenStream stream;
    (void)unused;
    CHECK(tokens != MAP_FAILED, "no room for large memory: token 1073741828 has id 7,");
    tokens[count - 1] = 7;
    tokens_open_memory(&stream, tokens, count, 7, "large memory");
}

static void test_large_scan(void) {
    EXPECT(test_dies(open_large_memory, NULL, EXIT_FAILURE, "large memory: token 1073741828 has id 7,"), "");
}

int main(void) {
    // Programs that die come first: a child of a process whose OpenMP threads have run cannot start its own.
    test_bad_tokens();
    test_large_scan();
    test_file_errors();
    test_header_errors();
    test_too_few();
    test_shards();
    test_text();
    test_split();
    test_split_text();
    test_batches();
    test_one_sequence();
    const int large = test_large_text() && test_large_shard();
    return test_done(large ? "dataloader" : "dataloader (no sparse files of 2 GiB here: without them)");
}
