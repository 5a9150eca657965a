// test_text_data.c -- text becomes shards once: the tokens are those of the text, kept for the next run, made
// anew when a file or the vocabulary changes; lists keep their weights; a vocabulary is trained and kept.
#include "llmc/setup.h"
#include "test.h"

static const char* const TALE = "one fish two fish red fish blue fish. this one has a little star; ";

// A file of the tale, told `times` times.
static const char* write_tale(const char* name, int times) {
    char text[8192] = "";
    for (int i = 0; i < times; i++) {
        strcat(text, TALE);
    }
    test_write(name, text, strlen(text));
    return test_path(name);
}

static void train_vocabulary(Bpe* bpe, const char* text, FILE* screen) {
    text_data_train(bpe, text, "text", 280, screen);
    EXPECT(bpe->vocab_size == 280, "%d tokens, wanted 280", bpe->vocab_size);
}

// The tokens of the shards are end-of-text and those of the text, so decoding gives it back.
static void expect_text(const char* shards, const Bpe* bpe, const char* text) {
    TokenStream stream;
    char got[8192];
    size_t bytes = 0;
    tokens_open_files(&stream, shards, TOKENS_AUTO, bpe->vocab_size);
    for (size_t i = 0; i < stream.count; i++) {
        const int id = tokens_at(&stream, i);
        int length = 0;
        const char* token = id == bpe->eot ? "" : bpe_token(bpe, id, &length);
        EXPECT((id == bpe->eot) == (i == 0), "token %zu is %d", i, id);
        memcpy(got + bytes, token, (size_t)length);
        bytes += (size_t)length;
    }
    EXPECT(bytes == strlen(text) && memcmp(got, text, bytes) == 0, "%s: %zu bytes, wanted %zu of the text",
           shards, bytes, strlen(text));
    tokens_close(&stream);
}

// Lines of the screen that have the word.
static int count_lines(FILE* screen, const char* word) {
    char line[PATH_MAX + 100];
    int n = 0;
    rewind(screen);
    while (fgets(line, sizeof(line), screen)) {
        n += strstr(line, word) != NULL;
    }
    fseek(screen, 0, SEEK_END);
    return n;
}

static void test_shards(void) {
    FILE* screen = tmpfile();
    Bpe bpe, other;
    char path[PATH_MAX], tokens[PATH_MAX], text[8192] = "";
    snprintf(path, sizeof(path), "%s", write_tale("tale.txt", 20));
    snprintf(tokens, sizeof(tokens), "%s", test_path("tokens"));
    file_make_directory(tokens);
    train_vocabulary(&bpe, path, screen);
    text_data_train(&other, path, "text", 270, screen);
    for (int i = 0; i < 20; i++) {
        strcat(text, TALE);
    }
    const TextData data = {&bpe, "text", tokens, screen}, others = {&other, "text", tokens, screen};
    char* first = text_data_shards(&data, path);
    expect_text(first, &bpe, text);
    char* again = text_data_shards(&data, path);
    EXPECT(strcmp(first, again) == 0 && count_lines(screen, "earlier run") == 1, "not kept: %s, %s", first,
           again);
    char* smaller = text_data_shards(&others, path);
    EXPECT(strcmp(first, smaller) != 0, "another vocabulary, the same shards");
    expect_text(smaller, &other, text);

    write_tale("tale.txt", 21);
    char* longer = text_data_shards(&data, path);
    strcat(text, TALE);
    EXPECT(strcmp(first, longer) != 0, "another text, the same shards");
    expect_text(longer, &bpe, text);

    glob_t files = tokens_list(longer); // a shard that is missing is made again
    unlink(files.gl_pathv[0]);
    globfree(&files);
    char* repaired = text_data_shards(&data, path);
    EXPECT(strcmp(longer, repaired) == 0, "%s, wanted %s", repaired, longer);
    expect_text(repaired, &bpe, text);
    free(repaired), free(longer), free(smaller), free(again), free(first);
    bpe_close(&other);
    bpe_close(&bpe);
    fclose(screen);
}

static void test_weights(void) {
    FILE* screen = tmpfile();
    Bpe bpe;
    char list[3 * PATH_MAX], one[PATH_MAX], tokens[PATH_MAX];
    snprintf(one, sizeof(one), "%s", write_tale("one.txt", 3));
    static const char lines[] = "{\"text\":\"blue fish\"}\n{\"id\":1,\"text\":\"red\"}\n";
    test_write("two.jsonl", lines, strlen(lines));
    snprintf(list, sizeof(list), "%s:0.75,%s:0.25", one, test_path("two.jsonl"));
    snprintf(tokens, sizeof(tokens), "%s", test_path("tokens"));
    train_vocabulary(&bpe, list, screen);
    const TextData data = {&bpe, "text", tokens, screen};
    char* shards = text_data_shards(&data, list);
    DataSources sources;
    sources_open_files(&sources, shards, TOKENS_AUTO, bpe.vocab_size);
    EXPECT(sources.count == 2 && sources.source[0].share == 3 && sources.source[1].share == 1,
           "%s: other weights", shards);
    EXPECT(tokens_at(&sources.source[1].stream, 0) == bpe.eot, "no end of text before a document");
    sources_close(&sources);
    free(shards);
    bpe_close(&bpe);
    fclose(screen);
}

static void require_plain(const void* list) { text_data_require_plain((const char*)list); }
static void encode(const void* data) { text_data_shards((const TextData*)data, test_path("empty.jsonl")); }

static void encode_zeros(const void* data) {
    text_data_shards((const TextData*)data, test_path("zeros.txt"));
}
static void train_on_zeros(const void* screen) {
    Bpe bpe;
    text_data_train(&bpe, test_path("zeros.txt"), "text", 280, (FILE*)screen);
}

static void test_errors(void) {
    Bpe bpe;
    FILE* screen = tmpfile();
    train_vocabulary(&bpe, write_tale("tale.txt", 3), screen);
    fclose(screen);
    test_write("empty.jsonl", "\n\n", 2);
    TextData data = {&bpe, "text", test_path("tokens"), stdout};
    EXPECT(test_dies(encode, &data, EXIT_FAILURE, "no text in it"), "an empty source");
    test_write("zeros.txt", "a\0b", 3);
    EXPECT(test_dies(encode_zeros, &data, EXIT_FAILURE, "zeros.txt: no text: byte 1 is zero"), "");
    EXPECT(test_dies(train_on_zeros, stdout, EXIT_FAILURE, "zeros.txt: no text: byte 1 is zero"), "");
    data.directory = "a*b";
    EXPECT(test_dies(encode, &data, EXIT_USAGE, "--out a*b: wanted a name without"),
           "a pattern as a directory");
    EXPECT(test_dies(require_plain, test_path("empty.jsonl"), EXIT_USAGE, "needs a vocabulary: --tokenizer"),
           "bytes of JSON");
    text_data_require_plain(test_path("tale.txt"));
    bpe_close(&bpe);
}

int main(void) {
    test_shards();
    test_weights();
    test_errors();
    return test_done("text_data");
}
