// test_parquet.c -- parquet.h: reads a column of text from files of different writers. Every fault
// of a file is an error that names it, never a read out of bounds. dev/ref/make_parquet_fixtures.py
// makes the files.
#define PARQUET_IMPLEMENTATION

#include "llmc/data/parquet.h"
#include "llmc/data/parquet_footer.h"
#include "dev/test/lib/test.h"

#define FIXTURES "dev/ref/fixtures/parquet/"

// Texts one behind another, each as uint32 bytes and the bytes.
typedef struct {
    char* data;
    size_t bytes, texts;
} Texts;

static void texts_add(Texts* texts, const char* text, size_t bytes) {
    const uint32_t length = (uint32_t)bytes;
    texts->data = (char*)realloc(texts->data, texts->bytes + 4 + bytes);
    CHECK(texts->data, "no memory for texts");
    memcpy(texts->data + texts->bytes, &length, 4);
    memcpy(texts->data + texts->bytes + 4, text, bytes);
    texts->bytes += 4 + bytes;
    texts->texts++;
}

static int texts_equal(Texts a, Texts b) {
    return a.texts == b.texts && a.bytes == b.bytes && (a.bytes == 0 || memcmp(a.data, b.data, a.bytes) == 0);
}

// The first `rows` rows of the table, without those that are null.
static Texts texts_wanted(size_t rows) {
    static char buffer[1 << 16];
    Texts texts = {NULL, 0, 0};
    FILE* file = fopen(FIXTURES "texts.bin", "rb");
    CHECK(file, FIXTURES "texts.bin: cannot open");
    for (uint32_t bytes; rows-- && fread(&bytes, 4, 1, file) == 1;) {
        if (bytes != UINT32_MAX) {
            CHECK(bytes <= sizeof(buffer) && fread(buffer, 1, bytes, file) == bytes, FIXTURES "texts.bin");
            texts_add(&texts, buffer, bytes);
        }
    }
    fclose(file);
    return texts;
}

// Opens and reads all. 0: the error is in p->error.
static int texts_read(Parquet* p, const char* path, const char* column, Texts* texts) {
    const char* text;
    size_t bytes;
    int more;
    memset(texts, 0, sizeof(*texts));
    if (!parquet_open(p, path, column)) {
        return 0;
    }
    while ((more = parquet_next(p, &text, &bytes)) > 0) {
        if (text) {
            texts_add(texts, text, bytes);
        }
    }
    parquet_close(p);
    return more == 0;
}

// ---- good files ----

enum { ALL = 1 << 20, NULLS = 0 };

static const struct {
    const char* name;
    int codec;
    size_t rows; // of the table
} FILES[] = {
    {"pyarrow_plain", PARQUET_UNCOMPRESSED_, ALL},
    {"pyarrow_snappy", PARQUET_SNAPPY_, ALL},
    {"pyarrow_zstd", PARQUET_ZSTD_, ALL},
    {"pyarrow_gzip", PARQUET_GZIP_, ALL},
    {"pyarrow_gzip_pages", PARQUET_GZIP_, ALL},
    {"pyarrow_fallback", PARQUET_SNAPPY_, ALL},
    {"pyarrow_lengths_v1", PARQUET_ZSTD_, ALL},
    {"pyarrow_lengths_v2", PARQUET_ZSTD_, ALL},
    {"pyarrow_prefixes_v1", PARQUET_ZSTD_, ALL},
    {"pyarrow_prefixes_v2", PARQUET_ZSTD_, ALL},
    {"pyarrow_groups", PARQUET_ZSTD_, ALL},
    {"pyarrow_checksums", PARQUET_UNCOMPRESSED_, 16},
    {"pyarrow_required", PARQUET_SNAPPY_, ALL},
    {"pyarrow_required_v2", PARQUET_ZSTD_, ALL},
    {"pyarrow_empty", PARQUET_UNCOMPRESSED_, NULLS},
    {"pyarrow_nulls_v1", PARQUET_SNAPPY_, NULLS},
    {"pyarrow_nulls_v2", PARQUET_SNAPPY_, NULLS},
    {"polars_zstd", PARQUET_ZSTD_, ALL},
    {"polars_groups", PARQUET_SNAPPY_, ALL},
    {"duckdb_snappy", PARQUET_SNAPPY_, ALL},
    {"duckdb_zstd_v2", PARQUET_ZSTD_, ALL},
    {"duckdb_gzip_v2", PARQUET_GZIP_, ALL},
    {"fastparquet_snappy", PARQUET_SNAPPY_, ALL},
};
enum { NUM_FILES = sizeof(FILES) / sizeof(FILES[0]) };

static const char* fixture_path(const char* name) {
    static char path[256];
    snprintf(path, sizeof(path), FIXTURES "%s.parquet", name);
    return path;
}

// Each file has the rows of the table. In a build without the library of its codec, the error says
// what to install.
TEST(files) {
    static Parquet p;
    for (int i = 0; i < NUM_FILES; i++) {
        const char *path = fixture_path(FILES[i].name), *package = parquet_codec_package(FILES[i].codec);
        Texts got, wanted = texts_wanted(FILES[i].rows);
        const int ok = texts_read(&p, path, "text", &got);
        if (package) {
            EXPECT(!ok && strncmp(p.error, path, strlen(path)) == 0 && strstr(p.error, package) &&
                       strstr(p.error, parquet_codec_name(FILES[i].codec)),
                   "%s", p.error);
        } else {
            EXPECT(ok, "%s", p.error);
            EXPECT(texts_equal(got, wanted), "%s: %zu texts, wanted %zu", path, got.texts, wanted.texts);
        }
        free(got.data);
        free(wanted.data);
    }
}

// The format allows more than the programs that made the other files write: rows "0" to "39".
TEST(hand) {
    static const char* const names[2] = {"hand_dictionary", "hand_odd"};
    static Parquet p;
    Texts got, wanted = {NULL, 0, 0};
    char text[8];
    for (int i = 0; i < 40; i++) {
        texts_add(&wanted, text, (size_t)snprintf(text, sizeof(text), "%d", i));
    }
    for (int i = 0; i < (parquet_codec_package(PARQUET_GZIP_) ? 1 : 2); i++) {
        EXPECT(texts_read(&p, fixture_path(names[i]), "text", &got), "%s", p.error);
        EXPECT(texts_equal(got, wanted), "%s: %zu texts", names[i], got.texts);
        free(got.data);
    }
    free(wanted.data);
}

TEST(rows) {
    static const size_t rows[2] = {135, 16};
    for (int i = 0; i < 2; i++) {
        static Parquet p;
        const char* text;
        size_t bytes, present = 0, nulls = 0;
        EXPECT(parquet_open(&p, fixture_path(i ? "pyarrow_checksums" : "pyarrow_plain"), "text"), "%s",
               p.error);
        EXPECT(parquet_rows(&p) == rows[i], "%llu rows", (unsigned long long)parquet_rows(&p));
        while (parquet_next(&p, &text, &bytes) > 0) {
            present += text != NULL;
            nulls += !text && bytes == 0;
        }
        EXPECT(parquet_next(&p, &text, &bytes) == 0, "the end stays the end");
        EXPECT(nulls > 0 && present + nulls == rows[i], "%zu texts, %zu nulls", present, nulls);
        parquet_close(&p);
    }
}

// Not the first column, and not the first column of a row group's; bytes that nobody calls a
// string.
TEST(other_columns) {
    static Parquet p;
    Texts got;
    char wanted[64];
    EXPECT(texts_read(&p, fixture_path("pyarrow_plain"), "url", &got), "%s", p.error);
    EXPECT(got.texts == 135, "%zu texts", got.texts);
    for (size_t i = 0, at = 0; i < got.texts; i++) {
        const int length = snprintf(wanted, sizeof(wanted), "https://example.org/%zu", i);
        EXPECT(memcmp(got.data + at + 4, wanted, (size_t)length) == 0, "%.30s", got.data + at + 4);
        at += 4 + (size_t)length;
    }
    free(got.data);
    EXPECT(texts_read(&p, fixture_path("pyarrow_plain"), "raw", &got) && got.texts == 135, "%s", p.error);
    EXPECT(memcmp(got.data, "\5\0\0\0bytes", 9) == 0, "%s", got.data);
    free(got.data);
}

// ---- refused files ----

static void expect_refused(const char* path, const char* column, const char* wanted) {
    static Parquet p;
    Texts got;
    const int ok = texts_read(&p, path, column, &got);
    EXPECT(!ok && strncmp(p.error, path, strlen(path)) == 0 && strstr(p.error, wanted),
           "\"%s\" instead of \"%s\"", ok ? "accepted" : p.error, wanted);
    free(got.data);
}

TEST(refused_columns) {
    const char* path = fixture_path("pyarrow_plain");
    expect_refused(path, "Text", "no column \"Text\"; its columns of text: text, url, raw");
    expect_refused(path, "", "no column");
    expect_refused(path, "language", "no column");
    expect_refused(path, "id", "column \"id\" is INT64, wanted text; its columns of text: text, url, raw");
    expect_refused(path, "meta", "column \"meta\" is nested");
    expect_refused(path, "tags", "column \"tags\" is nested");
}

TEST(refused_files) {
    expect_refused("none.parquet", "text", "cannot open: No such file");
    expect_refused(test_tmpdir(), "text", "not a regular file");
    expect_refused(test_write("short", "PAR1", 4), "text", "4 bytes, wanted a Parquet file");
    expect_refused(test_write("text", "just a text, no table", 21), "text", "not a Parquet file");
    expect_refused(test_write("encrypted", "PARE\1\2\3\4\0\0\0\0PARE", 16), "text", "encrypted");
    expect_refused(test_write("footer", "PAR1\1\2\3\4\4\5\6\7PAR1", 16), "text", "footer of");
    expect_refused(test_write("nothing", "PAR1\0\0\0\0PAR1", 12), "text", "damaged footer");
    expect_refused(fixture_path("bad_lz4"), "text",
                   "compressed by LZ4_RAW (7), wanted UNCOMPRESSED, SNAPPY, GZIP or ZSTD");
}

TEST(refused_pages) {
    static const char* const cases[][2] = {
        {"bad_level_encoding", "page 0: definition levels of encoding 4, wanted RLE"},
        {"bad_level", "page 0: damaged: a definition level above the highest"},
        {"bad_rest", "page 0: values are left"},
        {"bad_missing", "page 1: missing: the row group ends 1 rows too early"},
        {"bad_index", "page 1: damaged: an index is beyond the dictionary"},
        {"bad_no_dictionary", "page 0: indices without a dictionary"},
        {"bad_prefix", "page 0: damaged: a prefix is longer than the value before"},
        {"bad_lengths", "page 0: damaged lengths: lengths end too early"},
        {"bad_stored", "page 0: 41 bytes, 41 when decompressed, in 40 bytes of pages"},
        {"bad_dictionary", "page 0: a dictionary of 1073741824 values in 230 bytes"},
        {"bad_encoding", "page 0: encoding 9, wanted PLAIN (0)"},
        {"bad_size", "page 0: 40 bytes cannot become 1073741824 by UNCOMPRESSED"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        expect_refused(fixture_path(cases[i][0]), "text", cases[i][1]);
    }
}

// ---- damage ----

// Errors name the file, and behind the footer the row group and page. What is read in spite of the
// damage must be the same, where the file has checksums; that no page is read beyond its end is for
// the sanitizer to see.
static void expect_harmless(const char* path, Texts wanted, int has_checksums, size_t at) {
    static Parquet p;
    Texts got;
    const int ok = texts_read(&p, path, "text", &got);
    if (!ok) {
        EXPECT(strncmp(p.error, path, strlen(path)) == 0, "byte %zu: %s", at, p.error);
    } else if (has_checksums) {
        EXPECT(texts_equal(got, wanted), "byte %zu: other texts", at);
    }
    free(got.data);
}

// Each bit of every byte; or one bit each of n bytes.
static void test_flips(const char* name, size_t rows, int bits, size_t max, int has_checksums) {
    const TestFile file = test_read(fixture_path(name));
    const char* path = test_write(name, file.data, file.bytes);
    const Texts wanted = texts_wanted(rows);
    const int fd = open(path, O_RDWR);
    CHECK(fd >= 0, "%s: %s", path, strerror(errno));
    const size_t step = file.bytes / max + 1;
    for (size_t at = 0; at < file.bytes; at += step) {
        for (int i = 0; i < bits; i++) {
            const unsigned char byte =
                file.data[at] ^ (unsigned char)(1 << (bits == 8 ? i : (int)(at * 5 % 8)));
            CHECK(pwrite(fd, &byte, 1, (off_t)at) == 1, "%s: %s", path, strerror(errno));
            expect_harmless(path, wanted, has_checksums, at);
        }
        CHECK(pwrite(fd, &file.data[at], 1, (off_t)at) == 1, "%s: %s", path, strerror(errno));
    }
    close(fd);
    free(wanted.data);
    free(file.data);
}

// Cut short at every length; and with something missing in the middle, where the footer is whole.
static void test_truncated(const char* name) {
    const TestFile file = test_read(fixture_path(name));
    uint32_t footer_bytes;
    static Parquet p;
    Texts got;
    memcpy(&footer_bytes, file.data + file.bytes - 8, 4);
    const size_t footer_at = file.bytes - 8 - footer_bytes;
    for (size_t bytes = 0; bytes < file.bytes; bytes++) {
        const char* path = test_write("truncated", file.data, bytes);
        EXPECT(!texts_read(&p, path, "text", &got) && strncmp(p.error, path, strlen(path)) == 0, "%zu bytes",
               bytes);
        free(got.data);
    }
    memmove(file.data + footer_at - 1, file.data + footer_at, 8 + footer_bytes);
    expect_refused(test_write("holed", file.data, file.bytes - 1), "text", "row group 1: ");
    free(file.data);
}

// Where in the file the damage is.
TEST(place) {
    const TestFile file = test_read(fixture_path("pyarrow_checksums"));
    const char* found = (const char*)memmem(file.data, file.bytes, "\25\0\0\0prefix and more of it", 25);
    CHECK(found, "no text in the fixture");
    file.data[(size_t)(found - (const char*)file.data) + 6] ^= 1;
    const char* path = test_write("place", file.data, file.bytes);
#ifdef HAVE_ZLIB
    expect_refused(path, "text", "row group 1, page 0: checksum ");
#endif
    // the length of a text instead: it goes beyond the page, whatever the checksum
    file.data[(size_t)(found - (const char*)file.data) + 3] = 0x7F;
    path = test_write("place", file.data, file.bytes);
    expect_refused(path, "text", "row group 1, page 0: ");
    free(file.data);
}

TEST(truncated) { test_truncated("pyarrow_checksums"); }

SERIAL_TEST(flips) {
#ifdef HAVE_ZLIB
    test_flips("pyarrow_checksums", 16, 8, SIZE_MAX, 1);
#endif
    for (int i = 0; i < NUM_FILES; i++) {
        test_flips(FILES[i].name, FILES[i].rows, 1, 400, 0);
    }
}
