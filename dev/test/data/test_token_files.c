// test_token_files.c -- token_files.h: reads shards of every format, and refuses damaged ones.
#include "dev/test/lib/shards.h"
#define TOKEN_FILES_IMPLEMENTATION

#include <signal.h>
#include <sys/types.h>

#include "llmc/data/token_files.h"

enum { V = 50257 };

// Three shards of 50, 1 and 49 tokens, the second one wide: together tokens 0 .. 99 of the test
// data.
static const char* write_shards(void) {
    write_shard("train_2.bin", MAGIC_U16, 51, 49); // not written in name order
    write_shard("train_0.bin", MAGIC_U16, 0, 50);
    write_shard("train_1.bin", MAGIC_U32, 50, 1);
    return test_path("train_*.bin");
}

static TokenStream open_files(const char* pattern) {
    TokenStream stream;
    tokens_open_files(&stream, pattern, TOKENS_AUTO, V);
    return stream;
}

// ---- streams ----

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

TEST(shards) {
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

TEST(text) {
    test_write("b.txt", "xyz", 3);
    test_write("a", "\x01\xFFq", 3);
    char list[1024];
    snprintf(list, sizeof(list), "%s,%s", test_path("b*.txt"), test_path("a"));
    EXPECT(tokens_kind(list) == TOKENS_TEXT, "");
    TokenStream stream;
    tokens_open_files(&stream, list, TOKENS_AUTO, 257);
    const int wanted[8] = {256, 1, 255, 'q', 256, 'x', 'y', 'z'};
    int tokens[8];
    EXPECT(stream.count == 8, "%zu tokens", stream.count);
    tokens_fill(&stream, 0, 8, tokens);
    EXPECT(memcmp(tokens, wanted, sizeof(wanted)) == 0, "");
    tokens_close(&stream);
}

// A backslash makes a comma or a letter of a pattern part of a name; a directory is its text files.
TEST(names) {
    static const char* const files[] = {"a,b.txt", "c[1*.md", "d.jsonl.gz", "e.bin", "f"};
    char name[64], names[PATH_MAX];
    mkdir(test_path("n,?:"), 0777);
    for (int i = 0; i < 5; i++) {
        snprintf(name, sizeof(name), "n,?:/%s", files[i]);
        test_write(name, "text", 4);
    }
    char* escaped = tokens_escape(test_path("n,?:"));
    EXPECT(strstr(escaped, "n\\,\\?\\:"), "%s", escaped);
    snprintf(names, sizeof(names), ",%s/a\\,b.txt,,%s/c\\[1\\**", escaped, escaped);
    glob_t list = tokens_list(names);
    EXPECT(list.gl_pathc == 2 && strcmp(list.gl_pathv[0], test_path("n,?:/a,b.txt")) == 0 &&
               strcmp(list.gl_pathv[1], test_path("n,?:/c[1*.md")) == 0,
           "%s: %zu files, %s", names, list.gl_pathc, list.gl_pathv[0]);
    globfree(&list);
    list = tokens_list(escaped);
    EXPECT(list.gl_pathc == 3 && strcmp(list.gl_pathv[2], test_path("n,?:/d.jsonl.gz")) == 0,
           "%zu files of a directory", list.gl_pathc);
    globfree(&list);
    free(escaped);
}

// The fingerprint is of the contents, not of names or times.
TEST(fingerprint) {
    const char* names[3] = {write_shard("p.bin", MAGIC_U16, 0, 9), write_shard("q.bin", MAGIC_U16, 0, 9),
                            write_shard("r.bin", MAGIC_U16, 1, 9)};
    uint64_t value[3];
    for (int i = 0; i < 3; i++) {
        TokenStream stream = open_files(names[i]);
        value[i] = stream.fingerprint;
        tokens_close(&stream);
    }
    EXPECT(value[0] == value[1] && value[0] != 0, "the same contents");
    EXPECT(value[0] != value[2], "other tokens");
}

// ---- files that somebody writes to ----

typedef struct {
    const TokenStream* stream;
    size_t start, n;
    int out[16];
} Reading;

static void read_stream(void* reading_) {
    Reading* r = (Reading*)reading_;
    tokens_fill(r->stream, r->start, r->n, r->out);
}

static void expect_left(const TokenStream* stream, size_t start, MappedResult wanted, const char* message) {
    Reading reading = {stream, start, 4, {0}};
    char error[ERROR_BYTES] = "";
    const void* where;
    const MappedResult result = mapped_try(read_stream, &reading, &where);
    EXPECT(result == wanted, "at %zu: %d, wanted %d", start, result, wanted);
    if (result != MAPPED_READ) {
        EXPECT(tokens_describe(stream, result, where, error), "no file of the stream");
        EXPECT(strstr(error, message), "%s", error);
    }
}

static void patch(const char* path, long offset, const void* data, size_t bytes) {
    FILE* file = fopen(path, "r+b");
    EXPECT(file && fseek(file, offset, SEEK_SET) == 0 && fwrite(data, 1, bytes, file) == bytes, "%s", path);
    fclose(file);
}

static void check_stream(void* stream_) {
    const TokenStream* stream = (const TokenStream*)stream_;
    uint32_t largest = 0;
    EXPECT(tokens_find_bad_(&stream->spans[0], 0, stream->count, V, &largest) == 0, "came back");
}

// Reading stops in a file that has become shorter or has an id above the vocabulary. Tested twice,
// because the first time must not block the signal.
TEST(written_to) {
#ifdef __SANITIZE_THREAD__ // its handler of signals cannot be left by a jump
    printf("skipped: a file that becomes shorter: not with ThreadSanitizer\n");
    return;
#endif
    const char* path = write_shard("shrinks.bin", MAGIC_U32, 0, 10000);
    const uint32_t large = V, huge = UINT32_MAX;
    TokenStream stream = open_files(path);
    expect_left(&stream, 5000, MAPPED_READ, "");
    patch(path, 1024 + 4 * 5002, &large, 4);
    patch(path, 1024 + 4 * 6003, &huge, 4);
    expect_left(&stream, 5000, MAPPED_REFUSED,
                "shrinks.bin: a token became larger than the vocabulary while it "
                "was read: at token 5002 of 10000; was it written to?");
    expect_left(&stream, 6000, MAPPED_REFUSED, "at token 6003 of 10000");
    EXPECT(truncate(path, 0) == 0, "%s", path);
    expect_left(&stream, 9000, MAPPED_GONE, "shrinks.bin: became shorter while it was read: at token 900");
    expect_left(&stream, 9996, MAPPED_GONE, "of 10000; was it written to?");
    const void* where;
    EXPECT(mapped_try(check_stream, &stream, &where) == MAPPED_GONE, "the check when it is opened");
    tokens_close(&stream);
}

// Without mapped_try: the system's signal, or an error.
static void read_shorter(const void* path) {
    TokenStream stream = open_files((const char*)path);
    EXPECT(truncate((const char*)path, 0) == 0, "%s", (const char*)path);
    tokens_at(&stream, 9999);
}

static void read_larger(const void* path) {
    const uint32_t large = V;
    TokenStream stream = open_files((const char*)path);
    patch((const char*)path, 1024, &large, 4);
    tokens_at(&stream, 0);
}

TEST(unguarded) {
    const char* path = write_shard("dies.bin", MAGIC_U32, 0, 10000);
    EXPECT(test_dies(read_larger, path, EXIT_FAILURE, "dies.bin: a token became larger than the vocabulary"),
           "");
    const pid_t child = fork();
    if (child == 0) {
        fclose(stderr); // a sanitizer has much to say here
        read_shorter(write_shard("dies.bin", MAGIC_U32, 0, 10000));
        _exit(EXIT_SUCCESS);
    }
    int status;
    waitpid(child, &status, 0);
    EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS, "status %d", status);
}

TEST(split) {
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
        {pattern, 49, 100, 50},                                       // one token too short
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
        tokens_split_tail(&stream, &tail, cases[i].T, 0);
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

TEST(split_text) {
    char text[199];
    memset(text, 'x', sizeof(text));
    memcpy(text + 189, "0123456789", 10);
    TokenStream stream = open_files(test_write("long.txt", text, sizeof(text))), tail;
    tokens_split_tail(&stream, &tail, 4, 0);
    int tokens[10];
    EXPECT(stream.count == 190 && tail.count == 10, "%zu + %zu", stream.count, tail.count);
    tokens_fill(&tail, 0, 10, tokens);
    for (int i = 0; i < 10; i++) {
        EXPECT(tokens[i] == '0' + i, "token %d of the tail is %d", i, tokens[i]);
    }
    tokens_close(&tail);
    tokens_close(&stream);
}

// ---- errors ----

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

TEST(file_errors) {
    const char *text = test_write("c.txt", "text", 4), *shard = write_shard("c.bin", MAGIC_U16, 0, 9);
    char both[600];
    snprintf(both, sizeof(both), "%s,%s", text, shard);
    EXPECT(open_dies(both, "c.bin|c.txt|one kind"), "");
    EXPECT(open_dies(test_path("none_*.bin"), "none_*.bin|No such file"), "");
    EXPECT(open_dies(test_path("none.txt"), "none.txt|No such file"), "");
    EXPECT(open_dies("", "no file name"), "");
    EXPECT(open_dies(",,", "\",,\": no file name"), "");
    mkdir(test_path("dir"), 0777);
    EXPECT(open_dies(test_path("dir"), "/dir: contains no text files|'/tmp/|/*.bin' for shards"), "");
    EXPECT(open_dies(test_path("d?r"), "/dir: a directory, wanted a file"), "");
    EXPECT(open_dies("/dev/null", "/dev/null: not a regular file"), "");
    EXPECT(open_dies(test_write("empty.txt", "", 0), "empty.txt: empty file"), "");
    EXPECT(open_dies(test_write("empty.bin", "", 0), "empty.bin: empty file"), "");
    chmod(test_tmpdir(), 0755);
    chmod(shard, 0);
    EXPECT(test_dies(open_unreadable, shard, EXIT_FAILURE, "c.bin: |Permission denied"), "");
}

static void open_text_small_vocabulary(const void* path) {
    TokenStream stream;
    tokens_open_files(&stream, (const char*)path, TOKENS_AUTO, 256);
}

// A shard of 9 tokens with a header of these fields, and `bytes` bytes in all.
static int header_dies(uint32_t magic, int32_t version, int32_t count, size_t bytes, const char* wanted) {
    char file[2048] = {0}, words[256];
    memcpy(file, (const int32_t[]){(int32_t)magic, version, count}, 12);
    snprintf(words, sizeof(words), "error: |bad.bin: |%s", wanted);
    return open_dies(test_write("bad.bin", file, bytes), words);
}

TEST(header_errors) {
    const size_t full = 1024 + 2 * 9;
    EXPECT(header_dies(MAGIC_U16, 1, 9, 1023, "1023 bytes|header of 1024"), "");
    EXPECT(header_dies(12345, 1, 9, full, "magic 12345 (|--data-format nanogpt|wanted 20240520"), "");
    EXPECT(header_dies(__builtin_bswap32(MAGIC_U16), 1, 9, full, "bytes swapped"), "");
    EXPECT(header_dies(__builtin_bswap32(MAGIC_U32), 7, 9, full, "bytes swapped"), "");
    EXPECT(header_dies(50256, 464, 262, full, "bare tokens|--data-format nanogpt"), "");
    EXPECT(header_dies(464u << 16 | 50256, 464, 262, full, "bare tokens|--data-format nanogpt"), "");
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
    tokens_open_files(&stream, (const char*)path, TOKENS_AUTO,
                      token_at(6)); // the largest of the first tokens
}

enum { MANY = (3 << 20) + 5 }; // several blocks of the parallel scan, the last one short

static void open_many_with_bad(const void* position) {
    uint16_t* tokens = check_alloc(MANY, sizeof(uint16_t), "tokens");
    tokens[*(const size_t*)position] = 300;
    tokens[MANY - 1] = 500;
    TokenStream stream;
    tokens_open_memory(&stream, tokens, MANY, 300, "some memory");
}

TEST(bad_tokens) {
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
    test_write("program",
               "\x7F"
               "ELF\0\1",
               6);
    EXPECT(open_dies(test_path("program"), "program: not text: byte 4 is zero"), "a program is no text");
    EXPECT(test_dies(open_text_small_vocabulary, test_write("d.txt", "d", 1), EXIT_FAILURE,
                     "d.txt|257, found 256"),
           "");
}

static void split_too_few(const void* pattern) {
    TokenStream stream = open_files((const char*)pattern), tail;
    tokens_split_tail(&stream, &tail, 50, 0);
}

TEST(too_few) {
    EXPECT(test_dies(split_too_few, write_shards(), EXIT_FAILURE, "train_*.bin: 100 tokens, wanted 102"), "");
    EXPECT(test_dies(split_too_few, test_write("e.txt", "e", 1), EXIT_FAILURE, "e.txt: 2 tokens, wanted 102"),
           "");
}

// ---- other formats ----

static const int SEVEN[7] = {5, 6, 7, 8, 9, 10, 300};

TEST(nanogpt) {
    TokenStream stream;
    int tokens[7];
    tokens_open_files(&stream, write_tokens("bare.bin", "", 0, 2, SEVEN, 7), TOKENS_NANOGPT, 301);
    tokens_fill(&stream, 0, 7, tokens);
    EXPECT(stream.count == 7 && memcmp(tokens, SEVEN, sizeof(SEVEN)) == 0, "%zu", stream.count);
    tokens_close(&stream);
}

static void open_nanogpt(const void* path) {
    TokenStream stream;
    tokens_open_files(&stream, (const char*)path, TOKENS_NANOGPT, 300);
}

TEST(nanogpt_errors) {
    EXPECT(test_dies(open_nanogpt, test_write("odd.bin", "abc", 3), 1, "odd.bin: 3 bytes|whole tokens of 2"),
           "");
    EXPECT(test_dies(open_nanogpt, write_tokens("b.bin", "", 0, 2, SEVEN, 7), 1, "b.bin: token 6 has id 300"),
           "");
}

// ---- more than 2 GiB. Sparse files: what was not written reads as 0, and takes no room ----

// Creates a file of `bytes` bytes with `head` at its beginning and `tail` at its end; NULL if there
// is no room.
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

// The stream starts with tokens `first` and is zeros before the last 4 tokens.
static void expect_large(const TokenStream* stream, size_t count, int first) {
    int tokens[6];
    EXPECT(stream->count == count, "%zu tokens", stream->count);
    tokens_fill(stream, 1, 6, tokens);
    EXPECT(tokens[0] == first && tokens[5] == first, "the beginning");
    tokens_fill(stream, count - 6, 6, tokens);
    for (int i = 0; i < 6; i++) {
        EXPECT(tokens[i] == (i < 2 ? 0 : 11 * (i - 1)), "%d tokens before the end: %d", 6 - i, tokens[i]);
    }
}

static int test_large_text(void) {
    const size_t count = ((size_t)1 << 32) + 1024 + 1; // with the end-of-text token
    // where zeros would not be text
    char* head = (char*)check_alloc(TOKENS_TEXT_LOOKED_AT, 1, "text");
    memset(head, 'x', TOKENS_TEXT_LOOKED_AT);
    const char* path =
        write_sparse("large.txt", count - 1, head, TOKENS_TEXT_LOOKED_AT, (const char[]){11, 22, 33, 44}, 4);
    free(head);
    if (path) {
        TokenStream stream = open_files(path);
        expect_large(&stream, count, 'x');
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
        TokenStream stream = {.name = path, .V = V, .spans = check_alloc(1, sizeof(TokenSpan), "span")};
        TokenSpan span;
        char error[ERROR_BYTES];
        EXPECT(tokens_open_span_(&span, path, TOKENS_AUTO, error), "%s", error);
        tokens_append_(&stream, span);
        expect_large(&stream, count, 0);
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

SERIAL_TEST(large_scan) {
    EXPECT(test_dies(open_large_memory, NULL, EXIT_FAILURE, "large memory: token 1073741828 has id 7,"), "");
}

TEST(large_files) {
    if (!test_large_text() || !test_large_shard()) {
        printf("skipped: token_files: no sparse files of 2 GiB here\n");
    }
}
