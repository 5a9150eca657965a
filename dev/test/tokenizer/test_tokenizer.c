// test_tokenizer.c -- tokenizer.h: all kinds of tokenizers; with GPT2_VOCAB=.../gpt2.tiktoken also
// GPT-2's vocabulary.
#include "dev/test/lib/test.h"
#include <sys/stat.h>

#include "llmc/base/file.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/tokenizer.h"

static int decodes_to(const Tokenizer* tokenizer, int id, const char* wanted) {
    int length = 0;
    const char* text = tokenizer_decode(tokenizer, id, &length);
    return (size_t)length == strlen(wanted) && memcmp(text, wanted, (size_t)length) == 0;
}

TEST(bytes) {
    Tokenizer tokenizer;
    tokenizer_open_bytes(&tokenizer);
    EXPECT(tokenizer.vocab_size == 257 && tokenizer.eot == 256 && strcmp(tokenizer.kind, "bytes") == 0, "");
    char text[256];
    int ids[256];
    for (int i = 0; i < 256; i++) {
        text[i] = (char)(255 - i);
    }
    EXPECT(tokenizer_encode(&tokenizer, text, 256, ids) == 256, "");
    for (int i = 0; i < 256; i++) {
        int length = 0;
        const char* byte = tokenizer_decode(&tokenizer, i, &length);
        EXPECT(ids[i] == 255 - i, "id %d is %d", i, ids[i]);
        EXPECT(length == 1 && (unsigned char)byte[0] == i, "byte %d", i);
    }
    EXPECT(decodes_to(&tokenizer, 256, "<|endoftext|>"), "");
    EXPECT(tokenizer_encode(&tokenizer, "<|endoftext|>", 13, ids) == 13, "end-of-text comes out of text");
    tokenizer_close(&tokenizer);
}

// clang-format off
static const char *const WORDS[] = {" the", " dragon", " dragonfly", " flew", ".", "\n", " fl", "fly", " a", "Once"};
// clang-format on
enum { NUM_WORDS = sizeof(WORDS) / sizeof(WORDS[0]) };

// Encodes with WORDS and compares with `count` ids.
static int words_give(const char* text, const int* wanted, size_t count) {
    int ids[64];
    Tokenizer tokenizer;
    tokenizer_open_words(&tokenizer, WORDS, NUM_WORDS);
    const size_t got = tokenizer_encode(&tokenizer, text, strlen(text), ids);
    tokenizer_close(&tokenizer);
    return got == count && memcmp(ids, wanted, count * sizeof(int)) == 0;
}

TEST(words) {
    Tokenizer tokenizer;
    tokenizer_open_words(&tokenizer, WORDS, NUM_WORDS);
    EXPECT(tokenizer.vocab_size == NUM_WORDS + 1 && tokenizer.eot == NUM_WORDS, "");
    for (int id = 0; id < NUM_WORDS; id++) {
        EXPECT(decodes_to(&tokenizer, id, WORDS[id]), "word %d", id);
    }
    EXPECT(decodes_to(&tokenizer, tokenizer.eot, "<|endoftext|>"), "");
    EXPECT(tokenizer_bytes(&tokenizer, 1) == (int)strlen(WORDS[1]) &&
               tokenizer_bytes(&tokenizer, tokenizer.eot) == 0 &&
               tokenizer_bytes(&tokenizer, NUM_WORDS + 1) == 0,
           "bytes of a word, of end-of-text, of no token");
    tokenizer_close(&tokenizer);

    EXPECT(words_give("", (const int[]){0}, 0), "");
    EXPECT(words_give(" the dragon flew.\n", (const int[]){0, 1, 3, 4, 5}, 5), "");
    EXPECT(words_give(" dragonfly fl", (const int[]){2, 6}, 2), "the longest match");
    EXPECT(words_give("dragon a", (const int[]){1, 8}, 2), "a blank is added at the start");
    EXPECT(words_give("fly", (const int[]){7}, 1), "no blank is added where a word matches without");
    EXPECT(words_give("Once a", (const int[]){9, 8}, 2), "");
}

static void encode_words(const void* text) { words_give((const char*)text, (const int[]){0}, 0); }

TEST(words_errors) {
    EXPECT(test_dies(encode_words, " the drago flew", EXIT_USAGE,
                     "error: prompt: no word|\" drago flew\"|byte 4"),
           "");
    EXPECT(test_dies(encode_words, "the dragon.a", EXIT_USAGE, "at \"a\""), "a blank only at the start");
    EXPECT(test_dies(encode_words, " the<|endoftext|>", EXIT_USAGE, "\"<|endoftext"), "");
    EXPECT(test_dies(encode_words, "x\ty and so on and on and on and on and on", EXIT_USAGE,
                     "\"x?y and so|...\""),
           "");
}

// ---- files: bpe_files.h knows their formats ----

static void open_file(const void* path) {
    Tokenizer tokenizer;
    tokenizer_open_file(&tokenizer, (const char*)path);
    tokenizer_close(&tokenizer);
}

static void encode_file(const void* path) {
    int ids[1];
    Tokenizer tokenizer;
    tokenizer_open_file(&tokenizer, (const char*)path);
    tokenizer_encode(&tokenizer, "a", 1, ids);
}

static void decode_bad_id(const void* id) {
    int length;
    Tokenizer tokenizer;
    tokenizer_open_bytes(&tokenizer);
    tokenizer_decode(&tokenizer, *(const int*)id, &length);
}

static void expect_the(const char* path) {
    int ids[32];
    Tokenizer tokenizer;
    tokenizer_open_file(&tokenizer, path);
    EXPECT(tokenizer.vocab_size == 259 && tokenizer.eot == 258 && strcmp(tokenizer.kind, "gpt2") == 0, "");
    EXPECT(decodes_to(&tokenizer, 0, "!") && decodes_to(&tokenizer, 257, "the"), "%s", path);
    EXPECT(decodes_to(&tokenizer, 258, "<|endoftext|>") && tokenizer_longest(&tokenizer) == 13, "");
    EXPECT(tokenizer_encode(&tokenizer, "the th\xFF", 7, ids) == 4, "");
    EXPECT(ids[0] == 257 && ids[1] == 220 && ids[2] == 256 && ids[3] == 187, "%d %d %d", ids[0], ids[1],
           ids[2]);
    EXPECT(tokenizer_encode(&tokenizer, "<|endoftext|>", 13, ids) == 13, "end-of-text comes out of text");
    EXPECT(tokenizer_encode(&tokenizer, "", 0, ids) == 0, "");
    tokenizer_close(&tokenizer);
}

TEST(files) {
    static const char merges[] = "#version: 0.2\nt h\nth e\n";
    const char* path = test_write("merges.txt", merges, sizeof(merges) - 1);
    expect_the(path);
    expect_the(test_tmpdir()); // a directory with a merges.txt
    Bpe bpe;
    bpe_open(&bpe, path);
    bpe_write(&bpe, test_path("the.json"));
    bpe_close(&bpe);
    expect_the(test_path("the.json"));
    EXPECT(test_dies(open_file, test_path("none.bin"), EXIT_FAILURE, "none.bin: cannot open the tokenizer"),
           "");
    EXPECT(test_dies(decode_bad_id, &(int){257}, EXIT_FAILURE, "257|0 to 256"), "");
    EXPECT(test_dies(decode_bad_id, &(int){-1}, EXIT_FAILURE, "-1|0 to 256"), "");
}

// ---- as Hugging Face's files, and back ----

static void make_directory(const char* path) { EXPECT(mkdir(path, 0777) == 0, "%s", path); }

static int same_ids(const Tokenizer* a, const Tokenizer* b, const char* text, size_t bytes) {
    int ids[2][512];
    const size_t count = tokenizer_encode(a, text, bytes, ids[0]);
    return tokenizer_encode(b, text, bytes, ids[1]) == count &&
           memcmp(ids[0], ids[1], count * sizeof(int)) == 0;
}

TEST(written_bytes) {
    Tokenizer bytes, again;
    char text[256];
    for (int i = 0; i < 256; i++) {
        text[i] = (char)(i * 7);
    }
    make_directory(test_path("bytes"));
    tokenizer_open_bytes(&bytes);
    const ModelCard card = tokenizer_card(&bytes);
    tokenizer_write_hf(&bytes, &card, test_path("bytes"), 64);
    tokenizer_open_file(&again, test_path("bytes"));
    EXPECT(again.vocab_size == 257 && again.eot == 256, "%d, %d", again.vocab_size, again.eot);
    EXPECT(same_ids(&bytes, &again, text, sizeof(text)), "");
    EXPECT(tokenizer_bpe(&bytes) && bpe_checksum(tokenizer_bpe(&bytes)) == bpe_checksum(again.bpe), "");
    tokenizer_close(&bytes);
    tokenizer_close(&again);
}

// Two words that a regular expression and JSON spell in another way, and two of the same length.
static const char* const ODD[] = {" a", "b", "\"\\|", "\n\t", " \xC3\xA9", "(?.", " aa", "#-"};
enum { NUM_ODD = sizeof(ODD) / sizeof(ODD[0]) };

// Writes the files of a vocabulary of words into the directory `words`.
static Tokenizer write_words(void) {
    Tokenizer words;
    make_directory(test_path("words"));
    tokenizer_open_words(&words, ODD, NUM_ODD);
    const ModelCard card = tokenizer_card(&words);
    tokenizer_write_hf(&words, &card, test_path("words"), 64);
    return words;
}

TEST(written_words) {
    static const char text[] = "aab\"\\|\n\t \xC3\xA9(?. a";
    Tokenizer words = write_words(), again;
    tokenizer_open_file(&again, test_path("words"));
    EXPECT(again.vocab_size == NUM_ODD + 1 && again.eot == NUM_ODD && strcmp(again.kind, "words") == 0, "");
    for (int id = 0; id < NUM_ODD; id++) {
        EXPECT(decodes_to(&again, id, ODD[id]), "word %d", id);
    }
    EXPECT(decodes_to(&again, NUM_ODD, "<|endoftext|>"), "");
    EXPECT(same_ids(&words, &again, text, strlen(text)), "");
    EXPECT(!tokenizer_bpe(&again), "words are no BPE");
    tokenizer_close(&again);
    tokenizer_open_file(&again, test_path("words/tokenizer.json"));
    EXPECT(strcmp(again.kind, "words") == 0, "a file");
    tokenizer_close(&again);
    tokenizer_close(&words);
}

// The file of ODD, changed.
static const char* changed_words(const char* from, const char* to) {
    char *text, error[ERROR_BYTES], changed[8192];
    size_t bytes;
    CHECK(file_try_read(test_path("words/tokenizer.json"), sizeof(changed), &text, &bytes, error), "%s",
          error);
    const char* at = strstr(text, from);
    CHECK(at, "no %s", from);
    const int length =
        snprintf(changed, sizeof(changed), "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    free(text);
    return test_write("changed.json", changed, (size_t)length);
}

TEST(changed_words) {
    static const char* const cases[][3] = {
        {"\" a\": 0", "\" a\": 1", "token 0 has the id 1"},
        {"\"b\": 1, ", "", "token 1 has the id 2"},
        {"\" a\": 0", "\"\": 0", "token 0 has the id 0"},
        {", \"<|endoftext|>\": 8}", "}", "no token <|endoftext|>"},
        {"\"<|endoftext|>\": 8}", "\"<|endoftext|>\": 8, \"c\": 9}", "token 8 has the id 9"},
        {"\"#-\": 7", "\"#+\": 7",
         "changed.json: byte|wanted another character"}, // the patterns have the old word
        {"\"Isolated\"", "\"Removed\"", "changed.json: byte"},
        {"\"Fuse\"", "\"ByteLevel\"", "changed.json: byte"},
        {"\"<unk>\"", "\"b\"", "changed.json: byte"},
        {"\"normalizer\": {", "\"normalizer\": null, \"x\": {", "changed.json: byte"},
        {"\"id\": 8", "\"id\": 0", "changed.json: byte"},
        {"\"WordLevel\"", "\"Unigram\"", "normalization by Prepend"},
    };
    Tokenizer words = write_words();
    tokenizer_close(&words);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        EXPECT(test_dies(open_file, changed_words(cases[i][0], cases[i][1]), EXIT_FAILURE, cases[i][2]),
               "%zu", i);
    }
    open_file(changed_words("\"vocab\": {\" a\": 0, \"b\"", "\n\"vocab\":{\"\\u0020a\"\t:0,\"\\u0062\""));
}

static void test_gpt2(const char* path) {
    static const char text[] = "hello world<|endoftext|>";
    static const int wanted[] = {31373, 995, 27, 91, 437, 1659, 5239, 91, 29};
    int ids[sizeof(text)];
    Tokenizer tokenizer;
    tokenizer_open_file(&tokenizer, path);
    EXPECT(tokenizer.vocab_size == 50257 && tokenizer.eot == 50256, "");
    EXPECT(tokenizer_encode(&tokenizer, text, strlen(text), ids) == 9, "");
    EXPECT(memcmp(ids, wanted, sizeof(wanted)) == 0, "%d %d %d %d", ids[0], ids[1], ids[2], ids[3]);
    EXPECT(decodes_to(&tokenizer, 24598, "0000000") && decodes_to(&tokenizer, 50256, "<|endoftext|>"), "");
    EXPECT(tokenizer_bytes(&tokenizer, 262) == 4 && tokenizer_bytes(&tokenizer, tokenizer.eot) == 0 &&
               tokenizer_bytes(&tokenizer, 50300) == 0,
           "bytes of a token, of end-of-text, of none");
    EXPECT(tokenizer_longest(&tokenizer) == 128, "%d", tokenizer_longest(&tokenizer));
    tokenizer_close(&tokenizer);
}

TEST(gpt2) {
    const char* vocabulary = getenv("GPT2_VOCAB");
    if (vocabulary) {
        test_gpt2(vocabulary);
    } else {
        printf("skipped: tokenizer with the vocabulary of GPT-2: GPT2_VOCAB is unset\n");
    }
}
