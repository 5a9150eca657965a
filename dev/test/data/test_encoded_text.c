// test_encoded_text.c -- encoded_text.h: text becomes shards once. They are kept for the next run,
// and made again if the text, the vocabulary or the shards have changed. Lists keep their weights;
// a vocabulary is trained and kept; files are verified.
#include <fcntl.h>
#include <sys/types.h>

#include "llmc/base/file.h"
#include "llmc/data/encoded_text.h"
#include "dev/test/lib/shards.h"
#include "dev/test/lib/test.h"

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

static void train_vocabulary(Bpe* bpe, const char* list, int vocab_size, FILE* screen) {
    const EncodedText text = {.field = "text", .separator = "", .screen = screen};
    encoded_text_train(bpe, &text, list, vocab_size);
    EXPECT(bpe->vocab_size == vocab_size, "%d tokens, wanted %d", bpe->vocab_size, vocab_size);
}

// Encodes into the directory `tokens` of the tests.
static EncodedText encoding(const Bpe* bpe, FILE* screen) {
    const EncodedText text = {bpe, "text", "", test_path("tokens"), screen, TEXT_DATA_ENCODE, 1, 0};
    file_make_directory(text.directory);
    return text;
}

// Files in the directory `tokens` whose names have the word.
static int count_files(const char* word) {
    struct dirent* entry;
    DIR* entries = opendir(test_path("tokens"));
    int n = 0;
    while ((entry = readdir(entries))) {
        n += entry->d_name[0] != '.' && strstr(entry->d_name, word) != NULL;
    }
    closedir(entries);
    return n;
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

// The list of the shards of a text, which decode to `wanted`; `kept`: they were there before. The
// caller frees it.
static char* expect_shards(const EncodedText* data, const char* path, const char* wanted, int kept) {
    const int before = count_lines(data->screen, "earlier run");
    char* shards = encoded_text_shards(data, path);
    EXPECT(count_lines(data->screen, "earlier run") - before == kept, "%s: %s", path,
           kept ? "not kept" : "kept");
    expect_text(shards, data->bpe, wanted);
    return shards;
}

TEST(shards) {
    FILE* screen = tmpfile();
    Bpe bpe, other;
    char path[PATH_MAX], text[8192] = "";
    snprintf(path, sizeof(path), "%s", write_tale("tale.txt", 20));
    train_vocabulary(&bpe, path, 280, screen);
    train_vocabulary(&other, path, 270, screen);
    for (int i = 0; i < 20; i++) {
        strcat(text, TALE);
    }
    const EncodedText data = encoding(&bpe, screen), others = encoding(&other, screen);
    char* first = expect_shards(&data, path, text, 0);
    write_tale("tale.txt", 20); // another time, the same contents
    char* again = expect_shards(&data, path, text, 1);
    EXPECT(strcmp(first, again) == 0 && count_files("") == 2, "%s, then %s", first, again);
    char* smaller = expect_shards(&others, path, text, 0);
    EXPECT(strcmp(first, smaller) != 0 && count_files("") == 2, "another vocabulary: %d files",
           count_files(""));

    write_tale("other.txt", 3); // another source: its shards stay
    free(encoded_text_shards(&data, test_path("other.txt")));
    write_tale("tale.txt", 21);
    test_write("tokens/0123456789abcdef_train_000000.bin", "unfinished", 10);
    test_write("tokens/0123456789abcdef_train_000000.bin.99.part", "unfinished", 10);
    test_write("tokens/mine_train_000000.bin", "not ours", 8);
    strcat(text, TALE);
    char* longer = expect_shards(&data, path, text, 0);
    EXPECT(strcmp(first, longer) != 0, "another text, the same shards");
    EXPECT(count_files("") == 5 && count_files("mine") == 1, "old shards are removed: %d files",
           count_files(""));

    glob_t files = tokens_list(longer); // a shard that is missing is made again
    unlink(files.gl_pathv[0]);
    globfree(&files);
    char* repaired = expect_shards(&data, path, text, 0);
    EXPECT(strcmp(longer, repaired) == 0, "%s, wanted %s", repaired, longer);
    free(repaired), free(longer), free(smaller), free(again), free(first);
    bpe_close(&other);
    bpe_close(&bpe);
    fclose(screen);
}

// Shards that are not what was written are named, and made again.
TEST(damage) {
    static const struct {
        off_t size;
        const char* words;
    } cases[] = {{0, "_train_000000.bin: checksum "}, {3000, "_train_000000.bin: 3000 bytes, wanted "}};
    FILE* screen = tmpfile();
    Bpe bpe;
    char text[8192] = "";
    const char* path = write_tale("damaged.txt", 100);
    train_vocabulary(&bpe, path, 280, screen);
    for (int i = 0; i < 100; i++) {
        strcat(text, TALE);
    }
    const EncodedText data = encoding(&bpe, screen);
    free(expect_shards(&data, path, text, 0));
    for (int i = 0; i < 2; i++) {
        EncodedText find = data;
        find.mode = TEXT_DATA_FIND;
        char* shards = encoded_text_shards(&find, path);
        glob_t files = tokens_list(shards);
        const int fd = open(files.gl_pathv[0], O_WRONLY);
        EXPECT(cases[i].size ? ftruncate(fd, cases[i].size) == 0 : pwrite(fd, "\1\1", 2, 1500) == 2, "%s",
               shards);
        close(fd);
        EXPECT(encoded_text_shards(&find, path) == NULL, "damaged shards are found");
        EXPECT(count_lines(screen, cases[i].words) == 1, "what was found is not said");
        free(expect_shards(&data, path, text, 0));
        globfree(&files);
        free(shards);
    }
    bpe_close(&bpe);
    fclose(screen);
}

// Documents are what stands between separators; without one, what looks like one is said once.
TEST(separator) {
    static const char text[] = "one fish<|endoftext|>two fish<|endoftext|>red fish";
    FILE* screen = tmpfile();
    TokenStream stream;
    Bpe bytes;
    bpe_open_bytes(&bytes);
    EncodedText data = encoding(&bytes, screen);
    const char* path = test_write("fish.txt", text, strlen(text));
    char* one = expect_shards(&data, path, text, 0);
    EXPECT(count_lines(screen, "--separator '<|endoftext|>'") == 1, "no warning");
    data.separator = "<|endoftext|>";
    char* three = encoded_text_shards(&data, path);
    EXPECT(count_lines(screen, "--separator") == 1, "a warning in spite of a separator");
    tokens_open_files(&stream, three, TOKENS_AUTO, 257);
    EXPECT(stream.count == 3 + 3 * 8 && tokens_at(&stream, 9) == 256 && tokens_at(&stream, 10) == 't',
           "%zu tokens of three documents", stream.count);
    tokens_close(&stream);

    DataSources sources; // the same text as bytes
    mixture_open_files(&sources, path, TOKENS_AUTO, 257);
    encoded_text_warn(screen, &sources);
    EXPECT(count_lines(screen, "fish.txt contains <|endoftext|>") == 2, "no warning of bytes");
    mixture_close(&sources);
    free(three), free(one);
    bpe_close(&bytes);
    fclose(screen);
}

TEST(weights) {
    FILE* screen = tmpfile();
    Bpe bpe;
    char list[3 * PATH_MAX], one[PATH_MAX];
    snprintf(one, sizeof(one), "%s", write_tale("one.txt", 3));
    static const char lines[] = "{\"text\":\"blue fish\"}\n{\"id\":1,\"text\":\"red\"}\n";
    test_write("two.jsonl", lines, strlen(lines));
    snprintf(list, sizeof(list), "%s:0.75,%s:0.25", one, test_path("two.jsonl"));
    train_vocabulary(&bpe, list, 280, screen);
    const EncodedText data = encoding(&bpe, screen);
    char* shards = encoded_text_shards(&data, list);
    DataSources sources;
    mixture_open_files(&sources, shards, TOKENS_AUTO, bpe.vocab_size);
    EXPECT(sources.count == 2 && sources.order.stretch[0].share[0] == 3 &&
               sources.order.stretch[0].share[1] == 1,
           "%s: other weights", shards);
    EXPECT(tokens_at(&sources.source[1].stream, 0) == bpe.eot, "no end of text before a document");
    mixture_close(&sources);
    free(shards);
    bpe_close(&bpe);
    fclose(screen);
}

static void encode(const void* data) {
    encoded_text_shards((const EncodedText*)data, test_path("empty.jsonl"));
}

static void encode_zeros(const void* data) {
    encoded_text_shards((const EncodedText*)data, test_path("zeros.txt"));
}
static void train_on_zeros(const void* screen) {
    Bpe bpe;
    train_vocabulary(&bpe, test_path("zeros.txt"), 280, (FILE*)screen);
}

TEST(errors) {
    Bpe bpe;
    FILE* screen = tmpfile();
    train_vocabulary(&bpe, write_tale("tale.txt", 3), 280, screen);
    fclose(screen);
    test_write("empty.jsonl", "\n\n", 2);
    const EncodedText data = encoding(&bpe, stdout);
    EXPECT(test_dies(encode, &data, EXIT_FAILURE, "no text in it"), "an empty source");
    test_write("zeros.txt", "a\0b", 3);
    EXPECT(test_dies(encode_zeros, &data, EXIT_FAILURE, "zeros.txt: not text: byte 1 is zero"), "");
    EXPECT(test_dies(train_on_zeros, stdout, EXIT_FAILURE, "zeros.txt: not text: byte 1 is zero"), "");
    EXPECT(!encoded_text_is_plain(test_path("empty.jsonl")), "bytes of JSON");
    EXPECT(encoded_text_is_plain(test_path("tale.txt")), "");
    bpe_close(&bpe);
}

// A directory whose name is a pattern.
TEST(directory) {
    FILE* screen = tmpfile();
    Bpe bytes;
    bpe_open_bytes(&bytes);
    EncodedText data = encoding(&bytes, screen);
    data.directory = test_path("a*[b,c:5");
    file_make_directory(data.directory);
    free(expect_shards(&data, write_tale("tale.txt", 1), TALE, 0));
    bpe_close(&bytes);
    fclose(screen);
}
