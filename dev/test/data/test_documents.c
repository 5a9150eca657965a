// test_documents.c -- documents.h and compressed_file.h: the documents in each kind of file; blocks
// hold whole documents and do not grow; reading continues from the start of any block; errors.
// test_encode_threads.c checks the tokens.
#define BPE_MAX_PIECE 5000
#define DOCUMENTS_IMPLEMENTATION
#include <sys/stat.h>

#include "llmc/data/documents.h"
#include "dev/test/lib/texts.h"

enum { MAX_DOCUMENTS = 4096 };

// All documents of a source, put together again from its blocks.
typedef struct {
    char* text;
    size_t bytes, begins[MAX_DOCUMENTS], count, num_blocks;
    TextPosition starts[MAX_DOCUMENTS];
    size_t at_start[MAX_DOCUMENTS]; // bytes before each block
    char error[ERROR_BYTES];        // "" for none
} ReadDocuments;

static TextOptions options_of(size_t block_bytes) {
    const TextOptions options = {TEXT_BY_NAME, "text", "", block_bytes};
    return options;
}

static void append(ReadDocuments* all, const TextBlock* block, size_t block_bytes) {
    EXPECT(block->bytes <= 2 * (block_bytes + BPE_MAX_PIECE + 8), "a block of %zu bytes", block->bytes);
    all->starts[all->num_blocks] = block->start;
    all->at_start[all->num_blocks++] = all->bytes;
    for (size_t i = 0; i < block->num_documents; i++) {
        EXPECT(block->documents[i] < block->bytes &&
                   (i == 0 || block->documents[i - 1] < block->documents[i]),
               "document %zu", i);
        all->begins[all->count++] = all->bytes + block->documents[i];
    }
    all->text = (char*)realloc(all->text, all->bytes + block->bytes);
    memcpy(all->text + all->bytes, block->text, block->bytes);
    all->bytes += block->bytes;
}

// Reads from `from` to the end.
static ReadDocuments* read_from(const char* const* paths, size_t n, TextOptions options, TextPosition from) {
    ReadDocuments* all = (ReadDocuments*)calloc(1, sizeof(*all));
    Documents* source = (Documents*)malloc(sizeof(*source));
    TextBlock block;
    memset(&block, 0, sizeof(block));
    documents_open(source, &options, paths, n);
    int more = from.file + from.document + from.offset == 0 || documents_seek(source, from) ? 1 : -1;
    while (more > 0 && (more = documents_next(source, &block)) > 0) {
        EXPECT(block.bytes > 0 && block.read_bytes <= source->total_bytes, "");
        append(all, &block, options.block_bytes);
    }
    EXPECT(more < 0 || block.read_bytes == source->total_bytes || all->bytes == 0, "%llu of %llu bytes",
           (unsigned long long)block.read_bytes, (unsigned long long)source->total_bytes);
    strcpy(all->error, more < 0 ? source->error : "");
    text_block_close(&block);
    documents_close(source);
    free(source);
    return all;
}

static ReadDocuments* read_all(const char* const* paths, size_t n, TextOptions options) {
    const TextPosition begin = {0, 0, 0};
    return read_from(paths, n, options, begin);
}

static void read_documents_end(ReadDocuments* all) {
    free(all->text);
    free(all);
}

static int is_document(const ReadDocuments* all, size_t i, const char* text, size_t bytes) {
    const size_t end = i + 1 < all->count ? all->begins[i + 1] : all->bytes;
    return i < all->count && end - all->begins[i] == bytes &&
           memcmp(all->text + all->begins[i], text, bytes) == 0;
}

// The documents of a file must be those in `wanted`, separated by '|'.
static void expect_documents(const char* path, TextOptions options, const char* wanted) {
    ReadDocuments* all = read_all(&path, 1, options);
    EXPECT(!all->error[0], "%s", all->error);
    size_t count = 0;
    for (const char* at = wanted; *at; count++) {
        const size_t bytes = strcspn(at, "|");
        EXPECT(is_document(all, count, at, bytes), "%s: document %zu", path, count);
        at += bytes + (at[bytes] == '|');
    }
    EXPECT(all->count == count, "%s: %zu documents, wanted %zu", path, all->count, count);
    read_documents_end(all);
}

static void expect_error(const char* path, TextOptions options, const char* wanted) {
    ReadDocuments* all = read_all(&path, 1, options);
    char words[256];
    snprintf(words, sizeof(words), "%s", wanted);
    for (char *save = NULL, *word = strtok_r(words, "|", &save); word; word = strtok_r(NULL, "|", &save)) {
        EXPECT(strstr(all->error, word), "\"%s\" is not in \"%s\"", word, all->error);
    }
    read_documents_end(all);
}

static const char* write_text(const char* name, const char* text) {
    return test_write(name, text, strlen(text));
}

// ---- kinds of files ----

TEST(plain) {
    const TextOptions options = options_of(TEXT_BLOCK_BYTES);
    TextOptions cut = options;
    cut.separator = "\n--\n";
    expect_documents(write_text("a.txt", "\n one\n\ntwo \n"), options, "\n one\n\ntwo \n");
    expect_documents(write_text("noname", "{\"text\": 1}\n"), options, "{\"text\": 1}\n");
    expect_documents(write_text("empty.txt", ""), options, "");
    expect_documents(write_text("cut.txt", "a\n--\nb\n--\n\n--\n\n--\n--\nc--d\n--"), cut,
                     "a|b|--\nc--d\n--");
    expect_documents(write_text("uncut.txt", "\n--"), cut, "\n--");
    expect_documents(write_text("only.txt", "\n--\n"), cut, "");
}

TEST(several) {
    const char* paths[] = {write_text("1.txt", "one"), write_text("2.txt", ""), write_text("3.txt", " "),
                           write_text("4.jsonl", "{\"text\":\"four\"}\n{\"text\":\"five\"}")};
    ReadDocuments* all = read_all(paths, 4, options_of(TEXT_BLOCK_BYTES));
    EXPECT(all->count == 4 && all->num_blocks == 1 && !all->error[0], "%s", all->error);
    EXPECT(is_document(all, 0, "one", 3) && is_document(all, 1, " ", 1) && is_document(all, 3, "five", 4),
           "");
    read_documents_end(all);
}

TEST(jsonl) {
    char open_brackets[101], close_brackets[101];
    memset(open_brackets, '[', sizeof(open_brackets));
    memset(close_brackets, ']', sizeof(close_brackets));
    TextOptions options = options_of(TEXT_BLOCK_BYTES);
    expect_documents(write_text("a.jsonl",
                                "{\"text\": \"one\"}\n\n  \t\r\n{\"id\": [1, {\"text\": null}], \"text\":"
                                " \"t\\u0077\\no\", \"x\": \"\\u0000\\ud800\"}\r\n{\"text\":\"\"}\n"
                                "{\"text\":null}\n{\"text\":\"three\"}"),
                     options, "one|tw\no|three");
    char odd[3000], *at = odd; // keys that are no names, and values inside each other
    at += sprintf(at, "{\"\":1,\"a\\u0000\\n\":2,\"text\\u0000\":3,\"%0600d\":[", 0);
    at += sprintf(at, "%.*s{\"text\":8}%.*s],\"text\":\"a\"}\n", 100, open_brackets, 100, close_brackets);
    expect_documents(write_text("odd.jsonl", odd), options, "a");
    options.field = "";
    expect_documents(write_text("unnamed.jsonl", "{\"a\":1,\"\":\"b\"}\n"), options, "b");
    options.field = "content";
    expect_documents(write_text("a.ndjson", "{\"text\":\"a\",\"content\":\"b\"}\n"), options, "b");
    options.format = TEXT_JSONL;
    expect_documents(write_text("a.other", "{\"content\":\"\xC3\xA9\\u00e9\\\"\"}\n"), options,
                     "\xC3\xA9\xC3\xA9\"");
    options.format = TEXT_PLAIN;
    expect_documents(write_text("b.jsonl", "{}\n"), options, "{}\n");
}

// A byte-order mark at the start of a file, packed or not, is no text; elsewhere it is. Documents
// are found again behind it.
TEST(byte_order_marks) {
    const int screen = dup(STDERR_FILENO); // the notes are for test_tokenize.sh
    EXPECT(freopen("/dev/null", "w", stderr) != NULL, "");
    TextOptions options = options_of(TEXT_BLOCK_BYTES), cut = options, small = options_of(1);
    cut.separator = "--";
    expect_documents(write_text("marked.txt", "\xEF\xBB\xBF"
                                              "one \xEF\xBB\xBF two"),
                     options, "one \xEF\xBB\xBF two");
    expect_documents(write_text("marked.txt", "\xEF\xBB\xBF"
                                              "a--b"),
                     cut, "a|b");
    expect_documents(write_text("marked.jsonl", "\xEF\xBB\xBF{\"text\":\"one\"}\r\n{\"text\":\"two\"}\r\n"),
                     options, "one|two");
    expect_documents(write_text("mark.txt", "\xEF\xBB\xBF"), options, "");
    expect_documents(write_text("short.txt", "\xEF\xBB"), options, "\xEF\xBB");
    expect_error(write_text("wide.jsonl", "\xFF\xFE{\0"), options,
                 "wide.jsonl: UTF-16, by its byte-order mark|iconv -f UTF-16");
    expect_error(write_text("wide.txt", "\xFE\xFF"), options, "wide.txt: UTF-16");
    expect_error(test_write("wider.txt", "\xFF\xFE\0\0", 4), options, "wider.txt: UTF-32");
    const char* paths[] = {write_text("1.txt", "\xEF\xBB\xBF"
                                               "a b c d e f"),
                           write_text("2.txt", "\xEF\xBB\xBFz")};
    ReadDocuments* all = read_all(paths, 2, small);
    EXPECT(all->count == 2 && is_document(all, 0, "a b c d e f", 11) && is_document(all, 1, "z", 1), "%s",
           all->error);
    for (size_t block = 1; block < all->num_blocks; block++) {
        ReadDocuments* rest = read_from(paths, 2, small, all->starts[block]);
        EXPECT(rest->bytes == all->bytes - all->at_start[block] &&
                   memcmp(rest->text, all->text + all->at_start[block], rest->bytes) == 0,
               "from block %zu: %s", block, rest->error);
        read_documents_end(rest);
    }
    read_documents_end(all);
    options.format = TEXT_PLAIN;
    expect_documents(write_text("wide.txt", "\xFF\xFE"), options, "\xFF\xFE");
    fflush(stderr);
    dup2(screen, STDERR_FILENO);
    close(screen);
}

// texts.bin: for each row uint32 bytes, 0xffffffff of a null, and the bytes
// (dev/ref/make_parquet_fixtures.py).
TEST(parquet) {
    const char* path = "dev/ref/fixtures/parquet/pyarrow_plain.parquet";
    FILE* file = fopen("dev/ref/fixtures/parquet/texts.bin", "rb");
    EXPECT(file, "run the tests from the top of the repository");
    static const size_t sizes[] = {50, TEXT_BLOCK_BYTES};
    for (int i = 0; file && i < 2; i++) {
        ReadDocuments* all = read_all(&path, 1, options_of(sizes[i]));
        static char text[1 << 16];
        size_t count = 0;
        for (uint32_t bytes; fread(&bytes, sizeof(bytes), 1, file) == 1;) {
            if (bytes != UINT32_MAX && bytes != 0) {
                EXPECT(fread(text, 1, bytes, file) == bytes && is_document(all, count, text, bytes),
                       "row %zu: %s", count, all->error);
                count++;
            }
        }
        EXPECT(all->count == count && count > 50, "%zu of %zu documents", all->count, count);
        ReadDocuments* rest = read_from(&path, 1, options_of(10), all->starts[all->num_blocks / 2]);
        EXPECT(rest->bytes == all->bytes - all->at_start[all->num_blocks / 2], "%s", rest->error);
        read_documents_end(rest);
        read_documents_end(all);
        rewind(file);
    }
    if (file) {
        fclose(file);
    }
}

// ---- errors ----

TEST(json_errors) {
    static const struct {
        const char *text, *wanted;
    } cases[] = {
        {"{\"text\":\"a\"}\n{\"text\":1}\n", "bad.jsonl:2: byte 8: found '1', wanted '\"'"},
        {"\n\n{\"id\":1,\"body\":\"\"}\n", "bad.jsonl:3: no field \"text\", found \"id\", \"body\""},
        {"{}", "bad.jsonl:1: no field \"text\", found none at all"},
        {"{\"text\":\"a\",\"text\":\"b\"}", "bad.jsonl:1: the field \"text\" appears twice"},
        {"{\"text\":\"a\"", "bad.jsonl:1: byte 11: found the end of the text"},
        {"{\"text\":\"a\n\"}", "bad.jsonl:1: byte 10: found the end of the text, wanted the end of a string"},
        {"{\"text\":\"a\"} {\"text\":\"b\"}", "bad.jsonl:1: byte 13: found '{', wanted nothing"},
        {"[\"text\"]", "bad.jsonl:1: byte 0: found '[', wanted '{'"},
        {"{\"text\":\"\xC3\x28\"}", "bad.jsonl:1: byte 9: found the byte 0xc3, wanted UTF-8"},
        {"{\"text\":\"a\",\"x\":nul}", "bad.jsonl:1: byte 16"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        expect_error(write_text("bad.jsonl", cases[i].text), options_of(TEXT_BLOCK_BYTES), cases[i].wanted);
    }
}

TEST(parquet_errors) {
    TextOptions options = options_of(TEXT_BLOCK_BYTES);
    expect_error(write_text("bad.parquet", "PAR1 is not enough"), options, "bad.parquet: ");
    expect_error(write_text("bad.parquet.gz", "x"), options, "bad.parquet.gz: Parquet is already compressed");
    options.field = "none";
    expect_error("dev/ref/fixtures/parquet/pyarrow_plain.parquet", options, "none|text");
}

typedef struct {
    const char* path;
} OpenCase;

static void open_one(const void* argument) {
    const OpenCase* open_case = (const OpenCase*)argument;
    const TextOptions options = options_of(TEXT_BLOCK_BYTES);
    Documents source;
    documents_open(&source, &options, &open_case->path, 1);
}

TEST(open_errors) {
    write_text("a.txt", "x");
    const OpenCase missing = {test_path("missing.txt")}, directory = {test_tmpdir()};
    const OpenCase packed = {write_text("a.txt.xz", "x")}, shard = {write_text("a.bin", "x")};
    EXPECT(test_dies(open_one, &missing, EXIT_FAILURE, "missing.txt: cannot open: No such file"), "");
    EXPECT(test_dies(open_one, &directory, EXIT_FAILURE, "a directory, wanted files: |/*."), "");
    EXPECT(test_dies(open_one, &packed, EXIT_FAILURE, "a.txt.xz: not text, by its name: an archive"), "");
    EXPECT(test_dies(open_one, &shard, EXIT_FAILURE, "a.bin: not text, by its name: binary"), "");
    static const char* const others[][2] = {{"a.txt.gz.gz", "compressed twice"},
                                            {"a.json", "name it .jsonl"},
                                            {"a.CSV", "a table"},
                                            {"a.csv.gz", "a table"},
                                            {"a.pdf", "extract its text"},
                                            {"a.tar.gz", "an archive"},
                                            {"a.npy", "binary data"}};
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        const OpenCase other = {write_text(others[i][0], "x")};
        EXPECT(test_dies(open_one, &other, EXIT_FAILURE, others[i][1]), "%s", others[i][0]);
    }
    expect_documents(write_text("dir.csv_a.md", "x"), options_of(10), "x");
}

// documents_check on one file: its error, or "".
static const char* check_one(const char* path, TextFormat format) {
    static Documents source;
    static char error[ERROR_BYTES];
    TextOptions options = options_of(100);
    options.format = format;
    documents_open(&source, &options, &path, 1);
    strcpy(error, documents_check(&source) ? "" : source.error);
    documents_close(&source);
    return error;
}

// Bytes that are no text, found before any work, or while a stream is read.
TEST(no_text) {
    static char text[70000];
    memset(text, 'a', sizeof(text));
    text[65535] = '\0';
    const char* path = test_write("late.txt", text, 65536);
    const char* error = check_one(path, TEXT_BY_NAME);
    EXPECT(strstr(error, "late.txt: not text: byte 65535 is zero"), "%s", error);
    EXPECT(!*check_one(path, TEXT_PLAIN), "");
    expect_error(path, options_of(100), "late.txt: not text: byte 65535 is zero");
    TextOptions lines = options_of(100);
    lines.separator = "\n";
    expect_error(path, lines, "late.txt: not text: byte 65535 is zero");
    text[65535] = 'a';
    text[65536] = '\0';
    path = test_write("later.txt", text, sizeof(text));
    EXPECT(!*check_one(path, TEXT_BY_NAME), "");
    expect_documents(write_text("empty.txt", ""), options_of(100), "");
    error = check_one(write_text("bad.parquet", "x"), TEXT_BY_NAME);
    EXPECT(strstr(error, "bad.parquet: "), "%s", error);
    error = check_one(write_text("bad.txt.gz", "no gzip"), TEXT_BY_NAME);
    EXPECT(strstr(error, "bad.txt.gz: "), "%s", error);
    const TextPosition behind = {0, 0, 65500}; // where a run is continued is not looked at again
    ReadDocuments* rest = read_from(&path, 1, options_of(100), behind);
    EXPECT(rest->bytes == sizeof(text) - 65500, "%s", rest->error);
    read_documents_end(rest);
}

// ---- packed files ----

#if defined(HAVE_ISAL) || defined(HAVE_ZLIB) || defined(HAVE_ZSTD)
static char* pack(const char* command, const char* from, const char* to) {
    static char line[1024];
    snprintf(line, sizeof(line), "%s < '%s' %s '%s'", command, from, strncmp(to, ">>", 2) ? ">" : ">>",
             strncmp(to, ">>", 2) ? to : to + 2);
    EXPECT(system(line) == 0, "%s", line);
    return line;
}

// A file of two members is one text; each shorter one is truncated, but for the first member alone.
static void test_packed(const char* command, const char* ending, const char* what) {
    const TextOptions options = options_of(4096);
    uint64_t state = 7;
    enum { BYTES = 300000 };
    char *text = (char*)malloc(BYTES), name[32], append_to[300];
    const size_t bytes = random_text(&state, text, BYTES, 0), half = bytes / 3;
    snprintf(name, sizeof(name), "packed.txt%s", ending);
    const char* path = test_path(name);
    pack(command, test_write("first", text, half), path);
    struct stat info;
    EXPECT(stat(path, &info) == 0, "");
    const size_t first_bytes = (size_t)info.st_size;
    snprintf(append_to, sizeof(append_to), ">>%s", path);
    pack(command, test_write("second", text + half, bytes - half), append_to);
    ReadDocuments* all = read_all(&path, 1, options);
    EXPECT(all->count == 1 && is_document(all, 0, text, bytes), "%s", all->error);
    read_documents_end(all);

    FILE* file = fopen(path, "rb");
    char* packed = (char*)malloc(BYTES);
    const size_t packed_bytes = fread(packed, 1, BYTES, file);
    fclose(file);
    for (size_t n = 0; n < packed_bytes; n += 1 + packed_bytes / 50) {
        snprintf(name, sizeof(name), "short%s", ending);
        expect_error(test_write(name, packed, n), options, n ? what : "truncated");
    }
    snprintf(name, sizeof(name), "first%s", ending);
    path = test_write(name, packed, first_bytes);
    all = read_all(&path, 1, options);
    EXPECT(is_document(all, 0, text, half), "%s", all->error);
    read_documents_end(all);
    snprintf(name, sizeof(name), "longer%s", ending);
    packed[packed_bytes] = 'x';
    expect_error(test_write(name, packed, packed_bytes + 1), options, name);
    for (size_t at = 0; at < packed_bytes;
         at += 1 + packed_bytes / 50) { // damaged: an error, or the same text
        packed[at] ^= 0x41;
        snprintf(name, sizeof(name), "damaged%s", ending);
        path = test_write(name, packed, packed_bytes);
        packed[at] ^= 0x41;
        all = read_all(&path, 1, options);
        EXPECT(strstr(all->error, name) || is_document(all, 0, text, bytes), "byte %zu", at);
        read_documents_end(all);
    }
    free(packed);
    free(text);
}
#endif

#if defined(HAVE_ISAL) || defined(HAVE_ZLIB)
// Zeros behind a member, few or many, as gzip has it; something else behind them is damage.
static void test_gzip_zeros(void) {
    static char packed[600000];
    const char* path = test_path("zeros.txt.gz");
    pack("gzip -c", write_text("zeros", "a b"), path);
    FILE* file = fopen(path, "rb");
    const size_t bytes = fread(packed, 1, 1000, file);
    fclose(file);
    for (size_t more = 1; more < 300000; more *= 7) {
        expect_documents(test_write("zeros.txt.gz", packed, bytes + more), options_of(1), "a b");
        packed[bytes + more] = 'x';
        expect_error(test_write("zeros.txt.gz", packed, bytes + more + 1), options_of(1),
                     "zeros.txt.gz: damaged");
        packed[bytes + more] = '\0';
    }
    expect_error(test_write("only.txt.gz", packed + bytes, 100), options_of(1), "only.txt.gz: ");
}
#endif

#ifdef HAVE_ZSTD
// A frame without a checksum is read to its last byte when most of its text is still to come.
static void test_last_frame(void) {
    enum { BYTES = 100000 };
    static char text[BYTES];
    uint64_t state = 9;
    const size_t bytes = random_text(&state, text, BYTES, 1);
    const char* path = test_path("last.txt.zst");
    pack("zstd -qc --no-check", test_write("last", text, bytes), path);
    ReadDocuments* all = read_all(&path, 1, options_of(100));
    EXPECT(is_document(all, 0, text, bytes), "%s", all->error);
    read_documents_end(all);
}
#endif

#ifdef HAVE_ZSTD
// A raw block of four bytes in a frame that asks for a window of 2^log bytes: more than 2 GiB is no
// damage.
static void test_windows(void) {
    char frame[] = "\x28\xB5\x2F\xFD\0_\x21\0\0a b\n";
    frame[5] = (20 - 10) << 3;
    expect_documents(test_write("small.txt.zst", frame, sizeof(frame) - 1), options_of(100), "a b\n");
    frame[5] = (char)((32 - 10) << 3);
    expect_error(test_write("large.txt.zst", frame, sizeof(frame) - 1), options_of(100),
                 "large.txt.zst: needs a window of 4096 MiB|wanted at most 2048 MiB|--long=31");
}
#endif

// Either reads such files, or names the missing library.
TEST(packing) {
#if defined(HAVE_ISAL) || defined(HAVE_ZLIB)
    test_packed("gzip -c", ".gz", "truncated: its gzip data");
    test_gzip_zeros();
#else
    expect_error(write_text("a.txt.gz", "x"), options_of(4096),
                 "a.txt.gz: built without zlib: install zlib1g-dev or libisal-dev");
#endif
#ifdef HAVE_ZSTD
    test_windows();
    if (system("command -v zstd >/dev/null") == 0) {
        test_packed("zstd -qc --check", ".zst", "truncated: its Zstandard data");
        test_last_frame();
    } else {
        printf("skipped: text_source: .zst: zstd is missing (scripts/install_deps.sh --test)\n");
    }
#else
    expect_error(write_text("a.txt.zst", "x"), options_of(4096),
                 "a.txt.zst: built without zstd: install libzstd-dev");
#endif
}

// ---- blocks ----

// A document is the same in blocks of all sizes, and from the start of every block.
TEST(blocks) {
    uint64_t state = 3;
    char text[3000], line[20000], *at = line;
    const size_t bytes = random_text(&state, text, sizeof(text), 1);
    at += sprintf(at, "{\"text\":\"short\"}\n\n{\"text\":\"");
    for (size_t i = 0; i < bytes; i++) {
        at += sprintf(at, (unsigned char)text[i] < ' ' ? "\\u%04x" : "%c", text[i]);
    }
    at += sprintf(at, "\"}\n{\"text\":\"end\"}\n");
    TextOptions options = options_of(1);
    options.separator = "==";
    char cut[4000];
    const size_t cut_bytes = (size_t)sprintf(cut, "a==%.*s====b", (int)bytes, text);
    const char* paths[] = {write_text("first.txt", "a b"), test_write("b.jsonl", line, (size_t)(at - line)),
                           test_write("cut.txt", cut, cut_bytes), test_write("c.txt", text, bytes)};
    static const size_t sizes[] = {1, 2, 7, 64, 500, 3000, 10000};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        for (int with_separator = 0; with_separator < 2; with_separator++) {
            options.block_bytes = sizes[i];
            options.separator = with_separator ? "==" : "";
            ReadDocuments* all = read_all(paths, 4, options);
            EXPECT(all->count == (with_separator ? 8 : 6) && is_document(all, 0, "a b", 3) &&
                       is_document(all, 1, "short", 5) && is_document(all, 2, text, bytes) &&
                       is_document(all, all->count - 1, text, bytes),
                   "%zu documents, %s", all->count, all->error);
            EXPECT(all->num_blocks >= all->bytes / (sizes[i] + 400), "%zu blocks of %zu", all->num_blocks,
                   sizes[i]);
            for (size_t block = 1; block < all->num_blocks; block += 1 + all->num_blocks / 50) {
                ReadDocuments* rest = read_from(paths, 4, options, all->starts[block]);
                const int same = rest->bytes == all->bytes - all->at_start[block] &&
                                 memcmp(rest->text, all->text + all->at_start[block], rest->bytes) == 0;
                EXPECT(same && rest->count <= all->count, "from block %zu of %zu: %s", block, all->num_blocks,
                       rest->error);
                read_documents_end(rest);
            }
            read_documents_end(all);
        }
    }
}

// A document without any place to divide it but where its piece is too long.
TEST(long_piece) {
    enum { BYTES = 100000 };
    static char text[BYTES];
    memset(text, 'a', BYTES);
    const char* path = test_write("long.txt", text, BYTES);
    ReadDocuments* all = read_all(&path, 1, options_of(1000));
    EXPECT(all->count == 1 && is_document(all, 0, text, BYTES), "%s", all->error);
    EXPECT(all->num_blocks == BYTES / BPE_MAX_PIECE, "%zu blocks", all->num_blocks);
    ReadDocuments* rest = read_from(&path, 1, options_of(10), all->starts[7]);
    EXPECT(rest->bytes == BYTES - 7 * BPE_MAX_PIECE, "%zu bytes", rest->bytes);
    read_documents_end(rest);
    read_documents_end(all);
}

TEST(seek_errors) {
    const char *text = write_text("seek.txt", "a b"),
               *lines = write_text("seek.jsonl", "{\"text\":\"a b\"}\n");
    const TextPosition far = {0, 0, 4}, late = {0, 1, 0}, end = {1, 0, 0};
    ReadDocuments* all = read_from(&text, 1, options_of(100), far);
    EXPECT(strstr(all->error, "seek.txt: ends 1 bytes before"), "%s", all->error);
    read_documents_end(all);
    all = read_from(&lines, 1, options_of(100), late);
    EXPECT(strstr(all->error, "seek.jsonl: document 1 has disappeared"), "%s", all->error);
    read_documents_end(all);
    all = read_from(&lines, 1, options_of(100), end);
    EXPECT(!all->error[0] && all->bytes == 0, "%s", all->error);
    read_documents_end(all);
}
