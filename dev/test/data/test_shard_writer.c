// test_shard_writer.c -- shard_writer.h: the data loader reads what it writes, and shards end where
// they should.
#include "llmc/data/shard_writer.h"
#include "llmc/data/token_files.h"
#include "dev/test/lib/test.h"

enum { TOKENS = 100000 };

static int ids[TOKENS];

// Adds tokens [from, to), at most `max` at a time, as far as the writer takes them.
static void add(ShardWriter* writer, size_t from, size_t to, size_t max) {
    while (from < to) {
        const size_t n = to - from < max ? to - from : max, taken = shard_writer_add(writer, ids + from, n);
        EXPECT(0 < taken && taken <= n, "%zu of %zu", taken, n);
        from += taken;
    }
}

static void expect_shard(const char* name, int V, int width, size_t from, size_t to) {
    TokenStream stream;
    const char* path = test_path(name);
    static int got[TOKENS];
    tokens_open_files(&stream, path, TOKENS_AUTO, V);
    EXPECT(stream.count == to - from && stream.spans[0].width == width, "%s: %zu tokens of %d bytes", name,
           stream.count, stream.spans[0].width);
    tokens_fill(&stream, 0, to - from, got);
    EXPECT(memcmp(got, ids + from, (to - from) * sizeof(int)) == 0, "%s", name);
    tokens_close(&stream);
}

static void expect_none(const char* name) { EXPECT(access(test_path(name), F_OK) != 0, "%s", name); }

static void test_shards(void) {
    ShardWriter writer;
    char prefix[256];
    strcpy(prefix, test_path("a"));
    shard_writer_open(&writer, prefix, 65536, 30000, 40000);
    add(&writer, 0, 95000, 7777);
    EXPECT(writer.number == 3 && writer.tokens == 70000 && writer.count == 25000, "%llu",
           (unsigned long long)writer.number);
    expect_none("a_train_000003.bin"); // not before it is whole
    shard_writer_close(&writer);
    EXPECT(writer.number == 4 && writer.tokens == 95000 &&
               shard_writer_bytes(&writer, 1, 95000) == 1024 + 20000,
           "");
    expect_shard("a_val_000000.bin", 65536, 2, 0, 30000);
    expect_shard("a_val_000001.bin", 65536, 2, 30000, 40000);
    expect_shard("a_train_000002.bin", 65536, 2, 40000, 70000);
    expect_shard("a_train_000003.bin", 65536, 2, 70000, 95000);
    expect_none("a_train_000004.bin");
}

static void test_wide(void) {
    ShardWriter writer;
    char prefix[256];
    strcpy(prefix, test_path("w"));
    ids[5] = 65536;
    shard_writer_open(&writer, prefix, 65537, 10, 0);
    add(&writer, 0, 20, 20);
    shard_writer_close(&writer);
    expect_shard("w_train_000000.bin", 65537, 4, 0, 10);
    expect_shard("w_train_000001.bin", 65537, 4, 10, 20);
    expect_none("w_train_000002.bin"); // no empty shards
    ids[5] = 5;
}

static void test_resume(void) {
    ShardWriter writer;
    char prefix[256];
    strcpy(prefix, test_path("r"));
    shard_writer_open(&writer, prefix, 50257, 1000, 1500);
    shard_writer_resume(&writer, 3);
    EXPECT(writer.number == 3 && writer.tokens == 2500, "%llu tokens", (unsigned long long)writer.tokens);
    add(&writer, 2500, 2600, 1000);
    shard_writer_close(&writer);
    expect_shard("r_train_000003.bin", 50257, 2, 2500, 2600);
    const uint64_t wanted[4] = {1000, 500, 1000, 100};
    for (uint64_t i = 0; i < 4; i++) {
        const uint64_t bytes = shard_writer_bytes(&writer, i, writer.tokens);
        EXPECT(bytes == 1024 + 2 * wanted[i], "shard %d: %d bytes", (int)i, (int)bytes);
    }
    EXPECT(shard_writer_bytes(&writer, 0, 7) == 1024 + 14, "");
    add(&writer, 2600, 2700, 1000);
    shard_writer_discard(&writer);
    expect_none("r_train_000004.bin");
}

TEST(shard_writer) {
    for (int i = 0; i < TOKENS; i++) {
        ids[i] = i % 50257;
    }
    test_shards();
    test_wide();
    test_resume();
}
