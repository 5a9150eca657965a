// Tests of llmc/tokenizer.h. With GPT2_VOCAB=.../gpt2.tiktoken also the real GPT-2 vocabulary.
#include "test.h"
#include "llmc/tokenizer.h"

static int decodes_to(const Tokenizer* tokenizer, int id, const char* wanted) {
    int length = 0;
    const char* text = tokenizer_decode(tokenizer, id, &length);
    return (size_t)length == strlen(wanted) && memcmp(text, wanted, (size_t)length) == 0;
}

static void test_bytes(void) {
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

static void test_words(void) {
    Tokenizer tokenizer;
    tokenizer_open_words(&tokenizer, WORDS, NUM_WORDS);
    EXPECT(tokenizer.vocab_size == NUM_WORDS + 1 && tokenizer.eot == NUM_WORDS, "");
    for (int id = 0; id < NUM_WORDS; id++) {
        EXPECT(decodes_to(&tokenizer, id, WORDS[id]), "word %d", id);
    }
    EXPECT(decodes_to(&tokenizer, tokenizer.eot, "<|endoftext|>"), "");
    tokenizer_close(&tokenizer);

    EXPECT(words_give("", (const int[]){0}, 0), "");
    EXPECT(words_give(" the dragon flew.\n", (const int[]){0, 1, 3, 4, 5}, 5), "");
    EXPECT(words_give(" dragonfly fl", (const int[]){2, 6}, 2), "the longest match");
    EXPECT(words_give("dragon a", (const int[]){1, 8}, 2), "a blank is added at the start");
    EXPECT(words_give("fly", (const int[]){7}, 1), "no blank is added where a word matches without");
    EXPECT(words_give("Once a", (const int[]){9, 8}, 2), "");
}

static void encode_words(const void* text) { words_give((const char*)text, (const int[]){0}, 0); }

static void test_words_errors(void) {
    EXPECT(test_dies(encode_words, " the drago flew", EXIT_USAGE,
                     "error: prompt: no word|\" drago flew\"|byte 4"),
           "");
    EXPECT(test_dies(encode_words, "the dragon.a", EXIT_USAGE, "at \"a\""), "a blank only at the start");
    EXPECT(test_dies(encode_words, " the<|endoftext|>", EXIT_USAGE, "\"<|endoftext"), "");
    EXPECT(test_dies(encode_words, "x\ty and so on and on and on and on and on", EXIT_USAGE,
                     "\"x?y and so|...\""),
           "");
}

// ---- files

typedef struct {
    uint32_t header[256];
    unsigned char body[128];
    size_t body_bytes;
} BinFile;

static BinFile bin_file(uint32_t version, uint32_t n, uint32_t eot) {
    static const unsigned char tokens[] = {1, 'a', 3, ' ', 'b', 0xFF, 2, 0, 'c', 1, '<'};
    BinFile file = {.header = {20240328, version, n, eot}, .body_bytes = sizeof(tokens)};
    memcpy(file.body, tokens, sizeof(tokens));
    return file;
}

static const char* bin_write(const char* name, BinFile file) {
    char bytes[sizeof(file.header) + sizeof(file.body)];
    memcpy(bytes, file.header, sizeof(file.header));
    memcpy(bytes + sizeof(file.header), file.body, file.body_bytes);
    return test_write(name, bytes, sizeof(file.header) + file.body_bytes);
}

static void open_file(const void* path) {
    Tokenizer tokenizer;
    tokenizer_open_file(&tokenizer, (const char*)path);
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

static void test_bin(void) {
    Tokenizer tokenizer;
    tokenizer_open_file(&tokenizer, bin_write("good.bin", bin_file(2, 4, 3)));
    EXPECT(tokenizer.vocab_size == 4 && tokenizer.eot == 3 && strcmp(tokenizer.kind, "gpt2") == 0, "");
    int length = 0;
    EXPECT(decodes_to(&tokenizer, 0, "a") && decodes_to(&tokenizer, 1, " b\xFF") &&
               decodes_to(&tokenizer, 3, "<"),
           "");
    const char* text = tokenizer_decode(&tokenizer, 2, &length);
    EXPECT(length == 2 && memcmp(text, "\0c", 2) == 0, "a zero byte in a token");
    tokenizer_close(&tokenizer);
    EXPECT(test_dies(encode_file, test_path("good.bin"), EXIT_FAILURE, "decode-only"), "");
    EXPECT(test_dies(decode_bad_id, &(int){257}, EXIT_FAILURE, "257|0 to 256"), "");
    EXPECT(test_dies(decode_bad_id, &(int){-1}, EXIT_FAILURE, "-1|0 to 256"), "");
}

// A .bin whose header field `field` is `value`, or with `body_bytes` bytes of tokens.
static int bin_dies(int field, uint32_t value, size_t body_bytes, const char* wanted) {
    BinFile file = bin_file(2, 4, 3);
    file.header[field] = value;
    file.body_bytes = body_bytes;
    char words[256];
    snprintf(words, sizeof(words), "error: |bad.bin: |%s", wanted);
    return test_dies(open_file, bin_write("bad.bin", file), EXIT_FAILURE, words);
}

static void test_bin_errors(void) {
    const size_t all = bin_file(2, 4, 3).body_bytes;
    EXPECT(bin_dies(0, 20240520, all, "magic 20240520|wanted 20240328"), "");
    EXPECT(bin_dies(1, 3, all, "version 3|wanted 1 or 2"), "");
    EXPECT(bin_dies(1, 0, all, "version 0"), "");
    EXPECT(bin_dies(1, 1, all, "end-of-text id 50256|4 tokens"), "version 1 has the end-of-text id of GPT-2");
    EXPECT(bin_dies(2, 0, all, "0 tokens"), "");
    EXPECT(bin_dies(2, 0xFFFFFFFF, all, "4294967295 tokens"), "");
    EXPECT(bin_dies(2, 0x80000000, all, "2147483648 tokens"), "");
    EXPECT(bin_dies(2, 5, all, "ends before token 4"), "one token more than there is");
    EXPECT(bin_dies(2, 4, all - 11, "4 tokens cannot be in 1024 bytes"), "");
    EXPECT(bin_dies(3, 4, all, "end-of-text id 4|4 tokens"), "");
    EXPECT(bin_dies(3, 0xFFFFFFFF, all, "end-of-text id 4294967295"), "");
    EXPECT(bin_dies(0, 20240328, all - 1, "token 3 of 1 bytes|0 left"), "the last token is cut");
    EXPECT(bin_dies(0, 20240328, all - 2, "ends before token 3"), "");
    EXPECT(bin_dies(0, 20240328, all + 1, "1 bytes after the last"), "");

    BinFile empty = bin_file(2, 4, 3);
    empty.body[0] = 0;
    EXPECT(test_dies(open_file, bin_write("bad.bin", bin_file(2, 3, 2)), EXIT_FAILURE,
                     "2 bytes after the last of 3"),
           "one token fewer than there is");
    EXPECT(test_dies(open_file, bin_write("bad.bin", empty), EXIT_FAILURE, "bad.bin|token 0 of 0 bytes"), "");
    EXPECT(test_dies(open_file, test_write("short.bin", "x", 1), EXIT_FAILURE, "short.bin|header of 1024"),
           "");
    EXPECT(test_dies(open_file, test_write("empty.bin", "", 0), EXIT_FAILURE, "empty.bin: empty file"), "");
    EXPECT(test_dies(open_file, test_path("none.bin"), EXIT_FAILURE, "none.bin|No such file"), "");
    EXPECT(test_dies(open_file, test_tmpdir(), EXIT_FAILURE, "not a regular file"), "");
}

static const char* tiktoken_write(const char* text) { return test_write("x.tiktoken", text, strlen(text)); }

static void test_tiktoken(void) {
    const char* files[] = {"YQ== 0\nIGI= 1\nAP8/ 2\n+/+/ 3\n", "+/+/ 3\nIGI= 1\nYQ== 0\nAP8/ 2"};
    for (int i = 0; i < 2; i++) {
        Tokenizer tokenizer;
        tokenizer_open_file(&tokenizer, tiktoken_write(files[i]));
        EXPECT(tokenizer.vocab_size == 5 && tokenizer.eot == 4 && strcmp(tokenizer.kind, "gpt2") == 0, "");
        EXPECT(decodes_to(&tokenizer, 0, "a") && decodes_to(&tokenizer, 1, " b"), "");
        EXPECT(decodes_to(&tokenizer, 3, "\xFB\xFF\xBF") && decodes_to(&tokenizer, 4, "<|endoftext|>"), "");
        int length = 0;
        EXPECT(memcmp(tokenizer_decode(&tokenizer, 2, &length), "\0\xFF?", 3) == 0 && length == 3, "");
        tokenizer_close(&tokenizer);
    }
}

static void test_tiktoken_errors(void) {
    static const struct {
        const char *text, *wanted;
    } cases[] = {
        {"YQ== 0\nYg== 2\n", "x.tiktoken:2: rank \"2\"|0 to 1|2 lines"}, // 1 is missing
        {"YQ== 0\nYg== 0\n", "x.tiktoken:2: rank 0|twice"},
        {"YQ== 0\nYg==\n", "x.tiktoken:2: wanted a token in base64"},
        {"YQ== 0\n\nYg== 1\n", "x.tiktoken:2: "},
        {"YQ== 0\n 1\n", "x.tiktoken:2: "}, // an empty token
        {"YQ= 0\n", "x.tiktoken:1: "},
        {"Y=== 0\n", "x.tiktoken:1: "},
        {"Y*== 0\n", "x.tiktoken:1: "},
        {"YQ==\n", "x.tiktoken:1: "},
        {"YQ== \n", "x.tiktoken:1: rank \"\""},
        {"YQ== -1\n", "x.tiktoken:1: rank \"-1\""},
        {"YQ== 0x\n", "x.tiktoken:1: rank \"0x\""},
        {"YQ== 0\r\n", "x.tiktoken:1: rank \"0?\""},
        {"YQ== 99999999999999999999\n", "x.tiktoken:1: rank \"99999999999999999999\""},
        {"not a vocabulary", "x.tiktoken:1: "},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        EXPECT(test_dies(open_file, tiktoken_write(cases[i].text), EXIT_FAILURE, cases[i].wanted), "case %zu",
               i);
    }
}

// Writes a tokenizer as a llm.c .bin and reads it back.
static void expect_same_through_bin(const Tokenizer* tokenizer, uint32_t version) {
    const char* path = test_path("gpt2.bin");
    const uint32_t header[256] = {20240328, version, (uint32_t)tokenizer->vocab_size,
                                  version == 2 ? (uint32_t)tokenizer->eot : 0};
    FILE* file = fopen(path, "wb");
    fwrite(header, sizeof(header), 1, file);
    for (int id = 0, length; id < tokenizer->vocab_size; id++) {
        const char* text = tokenizer_decode(tokenizer, id, &length);
        fputc(length, file);
        fwrite(text, 1, (size_t)length, file);
    }
    fclose(file);
    Tokenizer copy;
    tokenizer_open_file(&copy, path);
    EXPECT(copy.vocab_size == tokenizer->vocab_size && copy.eot == tokenizer->eot, "version %u", version);
    for (int id = 0, length, copy_length; id < tokenizer->vocab_size; id++) {
        const char* text = tokenizer_decode(tokenizer, id, &length);
        const char* copy_text = tokenizer_decode(&copy, id, &copy_length);
        EXPECT(length == copy_length && memcmp(text, copy_text, (size_t)length) == 0, "token %d", id);
    }
    tokenizer_close(&copy);
}

static void test_gpt2(const char* path) {
    Tokenizer tokenizer;
    tokenizer_open_file(&tokenizer, path);
    EXPECT(tokenizer.vocab_size == 50257 && tokenizer.eot == 50256, "");
    EXPECT(decodes_to(&tokenizer, 31373, "hello") && decodes_to(&tokenizer, 995, " world"), "");
    EXPECT(decodes_to(&tokenizer, 24598, "0000000") && decodes_to(&tokenizer, 220, " "), "");
    EXPECT(decodes_to(&tokenizer, 50256, "<|endoftext|>"), "");
    int longest = 0;
    for (int id = 0, length; id < tokenizer.vocab_size; id++) {
        tokenizer_decode(&tokenizer, id, &length);
        longest = length > longest ? length : longest;
    }
    EXPECT(longest == 128, "the longest token has %d bytes", longest);
    expect_same_through_bin(&tokenizer, 1);
    expect_same_through_bin(&tokenizer, 2);
    tokenizer_close(&tokenizer);
}

int main(void) {
    test_bytes();
    test_words();
    test_words_errors();
    test_bin();
    test_bin_errors();
    test_tiktoken();
    test_tiktoken_errors();
    const char* vocabulary = getenv("GPT2_VOCAB");
    if (vocabulary) {
        test_gpt2(vocabulary);
    }
    return test_done(vocabulary ? "tokenizer" : "tokenizer (GPT2_VOCAB unset: without the GPT-2 vocabulary)");
}
