// test_parquet.c -- the texts of a column, whoever wrote the file and however; and whatever is wrong with a
// file is an error that names it, never a read out of bounds. The files are made by
// dev/ref/make_parquet_fixtures.py.
#include "llmc/parquet.h"
#include "test.h"

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
    if (!parquet_try_open(p, path, column)) {
        return 0;
    }
    while ((more = parquet_try_next(p, &text, &bytes)) > 0) {
        texts_add(texts, text, bytes);
    }
    parquet_close(p);
    return more == 0;
}

// ---- good files

enum { ALL = 1 << 20, NULLS = 0 };

static const struct {
    const char* name;
    int codec;
    size_t rows, present; // of the table; in the file
} FILES[] = {
    {"pyarrow_plain", PARQUET_UNCOMPRESSED_, ALL, 0},
    {"pyarrow_snappy", PARQUET_SNAPPY_, ALL, 0},
    {"pyarrow_zstd", PARQUET_ZSTD_, ALL, 0},
    {"pyarrow_gzip", PARQUET_GZIP_, ALL, 0},
    {"pyarrow_gzip_pages", PARQUET_GZIP_, ALL, 0},
    {"pyarrow_fallback", PARQUET_SNAPPY_, ALL, 0},
    {"pyarrow_lengths_v1", PARQUET_ZSTD_, ALL, 0},
    {"pyarrow_lengths_v2", PARQUET_ZSTD_, ALL, 0},
    {"pyarrow_prefixes_v1", PARQUET_ZSTD_, ALL, 0},
    {"pyarrow_prefixes_v2", PARQUET_ZSTD_, ALL, 0},
    {"pyarrow_groups", PARQUET_ZSTD_, ALL, 0},
    {"pyarrow_checksums", PARQUET_UNCOMPRESSED_, 16, 16},
    {"pyarrow_required", PARQUET_SNAPPY_, ALL, 0},
    {"pyarrow_required_v2", PARQUET_ZSTD_, ALL, 0},
    {"pyarrow_empty", PARQUET_UNCOMPRESSED_, NULLS, 0},
    {"pyarrow_nulls_v1", PARQUET_SNAPPY_, NULLS, 100},
    {"pyarrow_nulls_v2", PARQUET_SNAPPY_, NULLS, 100},
    {"polars_zstd", PARQUET_ZSTD_, ALL, 0},
    {"polars_groups", PARQUET_SNAPPY_, ALL, 0},
    {"duckdb_snappy", PARQUET_SNAPPY_, ALL, 0},
    {"duckdb_zstd_v2", PARQUET_ZSTD_, ALL, 0},
    {"duckdb_gzip_v2", PARQUET_GZIP_, ALL, 0},
};
enum { NUM_FILES = sizeof(FILES) / sizeof(FILES[0]) };

int main(void) {
    static Parquet p;
    for (int i = 0; i < NUM_FILES; i++) {
        char path[256];
        snprintf(path, sizeof(path), FIXTURES "%s.parquet", FILES[i].name);
        Texts t, w = texts_wanted(FILES[i].rows);
        const int ok = texts_read(&p, path, "text", &t);
        EXPECT(ok, "%s", p.error);
        EXPECT(texts_equal(t, w), "%s %zu %zu texts", path, t.texts, w.texts);
    }
    return test_done("parquet");
}
