// test_answers.c -- prompts and chats: their tokens and learned tokens are those of transformers
// (dev/ref/make_chat_fixtures.py), the shards have them in their masks, and rows hide the others.
#include "dev/test/lib/shards.h"

#include "llmc/base/file.h"
#include "llmc/base/rand.h"
#include "llmc/data/documents.h"
#include "llmc/data/encode_threads.h"
#include "llmc/data/packing.h"
#include "llmc/data/shard_writer.h"
#include "llmc/data/target_mask.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/chat_marks.h"

#define CHATS "dev/ref/fixtures/chats"
enum { MOST = 4096 };

// Ids of a source, with TOKEN_NO_TARGET.
typedef struct {
    int ids[MOST];
    size_t count;
} Ids;

static int take_ids(void* context, const TokenBlock* block) {
    Ids* got = (Ids*)context;
    CHECK(got->count + block->count <= MOST, "too many ids");
    memcpy(got->ids + got->count, block->ids, block->count * sizeof(int));
    got->count += block->count;
    return 1;
}

// Encodes a file in blocks of about `block_bytes`.
static Ids ids_of(const char* file, const Bpe* bpe, size_t block_bytes, int threads) {
    const TextOptions options = {TEXT_BY_NAME, "text", "", block_bytes};
    Documents source;
    Ids got = {.count = 0};
    documents_open(&source, &options, &file, 1);
    EXPECT(pipeline_run(&source, bpe, threads, take_ids, &got), "%s", source.error);
    documents_close(&source);
    return got;
}

static int is_learned(const Ids* got, size_t i) { return i > 0 && !(got->ids[i - 1] & TOKEN_NO_TARGET); }

// Compares the ids with the lines of a file: each document, with a star at learned tokens, and the
// end-of-text of the next one, which the last one lacks.
static void compare_with(const Ids* got, const char* path) {
    char error[ERROR_BYTES], *text, *next;
    size_t bytes, at = 0;
    int is_first = 1; // the end-of-text before the document
    CHECK(file_try_read(path, 1 << 20, &text, &bytes, error), "%s", error);
    for (next = text; *next; next++) {
        const long id = strtol(next, &next, 10);
        const int star = *next == '*';
        next += star;
        const int is_end = *next == '\n';
        if (at < got->count || next[1]) {
            EXPECT(at < got->count && (got->ids[at] & ~TOKEN_NO_TARGET) == id, "%s: id %zu is not %ld", path,
                   at, id);
            EXPECT(is_first || is_learned(got, at) == star, "%s: token %zu: star %d", path, at, star);
        }
        at += !is_end;
        is_first = is_end;
    }
    EXPECT(at == got->count, "%s: %zu ids, wanted %zu", path, got->count, at);
    free(text);
}

TEST(tokens_of_transformers) {
    static const struct {
        const char *tokenizer, *expected;
    } cases[] = {{"dev/ref/fixtures/tokenizers/qwen2.json", CHATS "/expected_qwen2.txt"},
                 {"dev/ref/fixtures/tokenizers/smollm2.json", CHATS "/expected_smollm2.txt"},
                 {CHATS "/llama3.json", CHATS "/expected_llama3.txt"}};
    for (int i = 0; i < 3; i++) {
        Bpe bpe;
        bpe_open(&bpe, cases[i].tokenizer);
        const Ids got = ids_of(CHATS "/documents.jsonl", &bpe, TEXT_BLOCK_BYTES, 1);
        compare_with(&got, cases[i].expected);
        for (size_t bytes = 1; bytes < 500; bytes = bytes * 3 + 1) {
            const Ids again = ids_of(CHATS "/documents.jsonl", &bpe, bytes, 2);
            EXPECT(again.count == got.count && !memcmp(again.ids, got.ids, got.count * sizeof(int)),
                   "%s: blocks of %zu bytes", cases[i].tokenizer, bytes);
        }
        bpe_close(&bpe);
    }
}

static void write_text(const char* name, const char* text) {
    FILE* file = fopen(test_path(name), "wb");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0, "%s", name);
}

// The characters of a mark in a content are text, and without special tokens the marks are, too.
TEST(marks) {
    const char* line = "{\"messages\":[{\"role\":\"user\",\"content\":\"<|im_end|>\"},"
                       "{\"role\":\"assistant\",\"content\":\"<|im_start|>a\"}]}\n";
    char path[1024], plain[256] = "";
    Bpe bpe;
    size_t marks = 0, learned = 0;
    write_text("marks.jsonl", line);
    snprintf(path, sizeof(path), "%s", test_path("marks.jsonl"));
    bpe_open(&bpe, "dev/ref/fixtures/tokenizers/qwen2.json");
    const Ids special = ids_of(path, &bpe, 100, 1);
    for (size_t i = 0; i < special.count; i++) {
        marks += bpe_is_name(&bpe, special.ids[i] & ~TOKEN_NO_TARGET);
    }
    EXPECT(marks == 1 + 4, "%zu special tokens, wanted end-of-text and 4 marks", marks);
    bpe_close(&bpe);
    bpe_open_bytes(&bpe);
    const Ids bytes = ids_of(path, &bpe, 100, 1);
    for (size_t i = 1; i < bytes.count; i++) {
        plain[i - 1] = (char)(bytes.ids[i] & ~TOKEN_NO_TARGET);
        learned += (size_t)is_learned(&bytes, i);
    }
    EXPECT(strcmp(plain, "<|im_start|>user\n<|im_end|><|im_end|>\n"
                         "<|im_start|>assistant\n<|im_start|>a<|im_end|>\n") == 0,
           "%s", plain);
    EXPECT(learned == strlen("<|im_start|>a<|im_end|>"), "%zu learned tokens", learned);
    bpe_close(&bpe);
}

// Fields that are null are absent, as in lines of a table that has all columns.
TEST(null_fields) {
    const TextOptions options = {TEXT_BY_NAME, "text", "", 100};
    char path[1024];
    const char* list = path;
    Documents source;
    TextBlock block;
    write_text("null.jsonl", "{\"messages\":null,\"prompt\":\"a\",\"completion\":\"b\"}\n"
                             "{\"messages\":[{\"role\":\"assistant\",\"content\":\"c\"}],\"prompt\":null}\n");
    snprintf(path, sizeof(path), "%s", test_path("null.jsonl"));
    memset(&block, 0, sizeof(block));
    documents_open(&source, &options, &list, 1);
    EXPECT(documents_next(&source, &block) > 0 && block.num_documents == 2 && block.num_parts == 3, "%s",
           source.error);
    EXPECT(block.bytes == 4 && memcmp(block.text, "a\nbc", 4) == 0, "%zu bytes", block.bytes);
    documents_close(&source);
    text_block_close(&block);
}

TEST(bad_lines) {
    static const struct {
        const char *line, *wanted;
    } cases[] = {
        {"{\"prompt\":\"a\"}", "no prompt with its completion"},
        {"{\"prompt\":\"a\",\"completion\":\"\"}", "the completion is empty"},
        {"{\"prompt\":\"a\",\"completion\":3}", "no prompt with its completion"},
        {"{\"prompt\":true,\"completion\":\"b\"}", "no prompt with its completion"},
        {"{\"prompt\":\"a\",\"prompt\":\"a\",\"completion\":\"b\"}", "no prompt with its completion"},
        {"{\"messages\":[]}", "no message of the assistant"},
        {"{\"messages\":\"a\"}", "\"messages\": wanted a list"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}", "no message of the assistant"},
        {"{\"messages\":[{\"role\":\"tool\",\"content\":\"a\"}]}", "message 1: role \"tool\", wanted"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"\"}]}",
         "message 2: the assistant's content is empty"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[\"a\"]}]}",
         "message 1: \"content\": wanted one string"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":null}]}",
         "message 1: \"content\": wanted one string"},
        {"{\"messages\":[{\"content\":\"a\"}]}", "message 1: wanted {\"role\""},
        {"{\"messages\":[\"a\"]}", "message 1: wanted {\"role\""},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}", "bad.jsonl:2"},
        {"[1]", "bad.jsonl:2"},
        {"hello", "bad.jsonl:2"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const TextOptions options = {TEXT_BY_NAME, "text", "", 100};
        char path[1024], text[512];
        const char* list = path;
        Documents source;
        TextBlock block;
        int more = 1;
        snprintf(text, sizeof(text), "{\"prompt\":\"a\",\"completion\":\"b\"}\n%s\n", cases[i].line);
        write_text("bad.jsonl", text);
        snprintf(path, sizeof(path), "%s", test_path("bad.jsonl"));
        memset(&block, 0, sizeof(block));
        documents_open(&source, &options, &list, 1);
        while (more > 0) {
            more = documents_next(&source, &block);
        }
        EXPECT(more < 0 && strstr(source.error, "bad.jsonl:2") && strstr(source.error, cases[i].wanted),
               "%s: \"%s\"", cases[i].line, source.error);
        documents_close(&source);
        text_block_close(&block);
    }
}

// A line with --field is this text, whatever else it has, unless the field is a list of messages.
TEST(field_comes_first) {
    static const struct {
        const char* field;
        size_t parts;
    } cases[] = {{"text", 0}, {"completion", 0}, {"messages", 1}};
    write_text("both.jsonl",
               "{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\\\"\"},7],\"text\":\"t\","
               "\"completion\":\"c\"}\n");
    for (int i = 0; i < 3; i++) {
        const TextOptions options = {TEXT_BY_NAME, cases[i].field, "", 100};
        char path[1024];
        const char* list = path;
        Documents source;
        TextBlock block;
        snprintf(path, sizeof(path), "%s", test_path("both.jsonl"));
        memset(&block, 0, sizeof(block));
        documents_open(&source, &options, &list, 1);
        const int more = documents_next(&source, &block);
        if (cases[i].parts) {
            EXPECT(more < 0 && strstr(source.error, "message 2"), "%s", source.error);
        } else {
            EXPECT(more > 0 && block.num_parts == 0 && block.text[0] == cases[i].field[0], "%s",
                   source.error);
        }
        documents_close(&source);
        text_block_close(&block);
    }
}

// ---- shards and rows ----

enum { EOT = 3000, V = 3001, TOKENS = 3000, T = 16 };

// Random documents; `hidden` tells which tokens have no target.
typedef struct {
    int ids[TOKENS];
    char hidden[TOKENS];
} Marked;

static Marked marked_open(uint64_t seed) {
    Marked text;
    Rand rng = rand_open(seed, 1);
    int is_hidden = 0;
    for (int i = 0; i < TOKENS; i++) {
        const int is_start = i == 0 || (text.ids[i - 1] != EOT && rand_below(&rng, 25) == 0);
        is_hidden = is_start || rand_below(&rng, 9) == 0 ? (int)rand_below(&rng, 3) > 0 : is_hidden;
        text.ids[i] = is_start ? EOT : i; // tells where it stands
        text.hidden[i] = (char)is_hidden;
    }
    text.hidden[TOKENS - 2] = 0;
    text.hidden[TOKENS - 1] = (char)(seed % 2); // the end of the last document
    return text;
}

// Writes the text into shards, added in parts of random sizes.
static uint64_t write_shards(const Marked* text, const char* prefix, int vocab, uint64_t shard_tokens) {
    ShardWriter writer;
    Rand rng = rand_open(7, 2);
    int ids[TOKENS];
    shard_writer_open(&writer, prefix, vocab, shard_tokens, 0);
    for (int i = 0; i < TOKENS; i++) {
        ids[i] = text->ids[i] | (text->hidden[i] ? TOKEN_NO_TARGET : 0);
    }
    for (size_t at = 0; at < TOKENS;) {
        const size_t n = 1 + rand_below(&rng, 700), left = TOKENS - at;
        at += shard_writer_add(&writer, ids + at, n < left ? n : left);
    }
    shard_writer_close(&writer);
    return writer.number;
}

// The plain loop: targets of the tokens [at, at + n), whose document ends at `end`.
static int expect_piece(const Marked* text, const int* inputs, const int* targets, size_t at, int n,
                        Packing pack) {
    int counted = 0;
    for (int t = 0; t < n; t++) {
        const size_t next = at + (size_t)t + 1;
        const int wanted = text->hidden[next - 1] ? -1 : next < TOKENS ? text->ids[next] : EOT;
        EXPECT(inputs[t] == text->ids[at + (size_t)t] && targets[t] == wanted,
               "pack %d: token %zu: %d, target %d, wanted %d, %d", pack, next - 1, inputs[t], targets[t],
               text->ids[next - 1], wanted);
        counted += wanted >= 0;
    }
    return counted;
}

// Finds where a piece of a row starts in the text.
static size_t find_piece(const Marked* text, const int* inputs, int n, const char* used) {
    for (size_t at = 0; at + (size_t)n <= TOKENS; at++) {
        int i = 0;
        while (i < n && text->ids[at + (size_t)i] == inputs[i]) {
            i++;
        }
        if (i == n && !used[at]) {
            return at;
        }
    }
    return SIZE_MAX;
}

static void test_rows(const Marked* text, const TokenStream* stream, Packing pack) {
    Rows rows;
    int inputs[T], targets[T], starts[T];
    uint64_t all = 0, wanted = 0;
    char used[TOKENS] = {0};
    rows_open(&rows, stream, pack, T, EOT, DOCUMENT_MASK_ON, NULL);
    for (uint64_t k = 0; k < rows.count; k++) {
        const int counted = rows_fill(&rows, k, 0, T, inputs, targets, starts),
                  length = rows_length(&rows, k);
        int found = 0;
        EXPECT(counted > 0, "pack %d: row %d has no target", pack, (int)k);
        for (int begin = 0, end; begin < length; begin = end) {
            end = begin + 1;
            while (end < length && (pack <= PACK_ALIGNED || starts[end] == begin)) {
                end++;
            }
            const size_t at = find_piece(text, inputs + begin, end - begin, used);
            CHECK(at != SIZE_MAX, "pack %d: row %d is not in the text", pack, (int)k);
            found += expect_piece(text, inputs + begin, targets + begin, at, end - begin, pack);
            memset(used + at, 1, (size_t)(end - begin));
        }
        for (int t = length; t < T; t++) {
            EXPECT(targets[t] == -1, "padding");
        }
        EXPECT(counted == found, "pack %d: row %d: %d targets, wanted %d", pack, (int)k, counted, found);
        all += (uint64_t)counted;
    }
    for (int i = 0; i < TOKENS; i++) { // aligned leaves out the ends of documents
        wanted += !text->hidden[i] && (used[i] || pack != PACK_ALIGNED) && (pack || i < (TOKENS - 1) / T * T);
    }
    EXPECT(all == wanted && rows.targets == all, "pack %d: %llu targets, wanted %llu, known %llu", pack,
           (unsigned long long)all, (unsigned long long)wanted, (unsigned long long)rows.targets);
    EXPECT(rows.hidden_pieces > 0, "pack %d drops no piece", pack);
    rows_close(&rows);
}

TEST(masked_rows) {
    for (uint64_t seed = 1; seed <= 4; seed++) {
        const Marked text = marked_open(seed);
        const uint64_t shard_tokens[] = {TOKENS, 997, 64};
        for (int i = 0; i < 3; i++) {
            char prefix[1024], pattern[1100];
            TokenStream stream;
            snprintf(prefix, sizeof(prefix), "%s", test_path("rows"));
            snprintf(pattern, sizeof(pattern), "%s_train_*.bin", prefix);
            const uint64_t shards = write_shards(&text, prefix, i == 1 ? 100000 : V, shard_tokens[i]);
            tokens_open_files(&stream, pattern, TOKENS_AUTO, V);
            EXPECT(stream.count == TOKENS && stream.num_spans == shards, "%zu tokens", stream.count);
            for (int pack = PACK_STREAM; pack <= PACK_UNIFORM; pack++) {
                test_rows(&text, &stream, (Packing)pack);
            }
            tokens_close(&stream);
            for (uint64_t k = 0; k < shards; k++) {
                char path[1200];
                snprintf(path, sizeof(path), "%s_train_%06d.bin", prefix, (int)k);
                target_mask_remove(path);
                remove(path);
            }
        }
    }
}

// Sets path (1100) to the only shard of a text.
static void one_shard(const Marked* text, const char* name, char* path) {
    char prefix[1024];
    snprintf(prefix, sizeof(prefix), "%s", test_path(name));
    write_shards(text, prefix, V, TOKENS);
    snprintf(path, 1100, "%s_train_000000.bin", prefix);
}

// A mask that does not fit its shard, or is damaged, is refused; one without bits is not written.
TEST(masks) {
    Marked text = marked_open(3);
    char path[1100], mask_path[PATH_MAX], error[ERROR_BYTES];
    unsigned char bytes[1024];
    uint64_t sum = 5, other = 5;
    TargetMask mask;
    one_shard(&text, "masks", path);
    target_mask_path(mask_path, path);
    EXPECT(target_mask_open(&mask, path, TOKENS, error), "%s", error);
    for (int i = 0; i < TOKENS; i++) {
        EXPECT(target_mask_hides(&mask, (size_t)i) == text.hidden[i], "bit %d", i);
    }
    for (size_t start = 0; start < 200; start += 7) {
        for (size_t n = 0; n < 300; n += 13) {
            size_t count = 0;
            for (size_t i = start; i < start + n; i++) {
                count += (size_t)text.hidden[i];
            }
            EXPECT(target_mask_count(&mask, start, n) == count, "%zu bits from %zu on", n, start);
        }
    }
    target_mask_close(&mask);
    EXPECT(!target_mask_open(&mask, path, TOKENS + 1, error) && strstr(error, "a mask of 3000 tokens"), "%s",
           error);
    target_mask_close(&mask);
    FILE* file = fopen(mask_path, "rb");
    const size_t count = fread(bytes, 1, sizeof(bytes), file);
    fclose(file);
    for (int way = 0; way < 3; way++) { // a bit, the start, the length
        unsigned char bad[1024];
        memcpy(bad, bytes, count);
        bad[way == 0 ? 100 : 0] ^= way < 2 ? 1 : 0;
        file = fopen(mask_path, "wb");
        fwrite(bad, 1, count - (way == 2), file);
        fclose(file);
        EXPECT(!target_mask_open(&mask, path, TOKENS, error) && strstr(error, ".bin.mask"), "way %d: %s", way,
               error);
        target_mask_close(&mask);
    }
    EXPECT(target_mask_mix(&sum, path, file_fingerprint, error) && sum != other, "%s", error);
    memset(text.hidden, 0, sizeof(text.hidden));
    one_shard(&text, "masks", path);
    EXPECT(!target_mask_exists(path), "the old mask is still there");
    EXPECT(target_mask_mix(&other, path, file_fingerprint, error) && other == 5, "%s", error);
}

// Validation data from the end of a stream start with a document.
TEST(masked_tail) {
    const Marked text = marked_open(5);
    char path[1100];
    TokenStream stream, tail;
    one_shard(&text, "tail", path);
    tokens_open_files(&stream, path, TOKENS_AUTO, V);
    tokens_split_tail(&stream, &tail, 2900, EOT);
    EXPECT(tokens_at(&tail, 0) == EOT && stream.count + tail.count == TOKENS && tail.count >= TOKENS / 20 &&
               tail.count < TOKENS / 10,
           "%zu tokens", tail.count);
    tokens_close(&tail);
    tokens_close(&stream);
}
