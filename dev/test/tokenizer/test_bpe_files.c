// test_bpe_files.c -- bpe_files.h: all formats of a vocabulary. With GPT2_VOCAB=.../gpt2.tiktoken,
// the files equal GPT-2's public ones.
//
//     test_tokenizer --write_bpe VOCABULARY DIRECTORY    for
//                                                        dev/ref/check_tokenizer_files.py
//     test_tokenizer --bpe_ids VOCABULARY < TEXT         prints the ids of a text
#define BPE_FILES_IMPLEMENTATION

#include "llmc/base/xxh64.h"
#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/bpe_files.h"
#include "dev/test/lib/test.h"

static const char small_merges[] =
    "#version: 0.2\na a\naa aa\nt h\nth e\n\xC4\xA0 the\n\xC3\x83 \xC2\xA9\n\" \\\n";

static Bpe open_small(void) {
    Bpe bpe;
    bpe_open(&bpe, test_write("small.bpe", small_merges, strlen(small_merges)));
    return bpe;
}

// Returns the output of a writer of llmc/tokenizer/bpe_files.h; the caller frees it. Not inlined,
// because gcc 12 then thinks it returns &text.
__attribute__((noinline)) static char* text_of(const Bpe* bpe, void (*put)(const Bpe*, FILE*),
                                               size_t* bytes) {
    char* text = NULL;
    FILE* file = open_memstream(&text, bytes);
    put(bpe, file);
    fclose(file);
    return text;
}

// Two vocabularies in all that they say, up to the merges that encoding uses.
static int same(const Bpe* a, const Bpe* b) {
    int equal = a->vocab_size == b->vocab_size && a->eot == b->eot;
    for (int id = 0; equal && id < a->vocab_size; id++) {
        int a_length, b_length;
        const char *a_text = bpe_token(a, id, &a_length), *b_text = bpe_token(b, id, &b_length);
        equal = a_length == b_length && memcmp(a_text, b_text, (size_t)a_length) == 0;
    }
    return equal && memcmp(a->pairs.entries, b->pairs.entries, sizeof(uint64_t) << a->pairs.bits) == 0;
}

static int reads_back(const Bpe* bpe, const char* path) {
    Bpe read;
    bpe_open(&read, path);
    const int ok = same(bpe, &read);
    bpe_close(&read);
    return ok;
}

// ---- files that are none ----

static void open_path(const void* path) {
    Bpe bpe;
    bpe_open(&bpe, (const char*)path);
}

static int dies(const char* data, size_t bytes, const char* wanted) {
    char words[256];
    snprintf(words, sizeof(words), "error: |bad.vocab|%s", wanted);
    return test_dies(open_path, test_write("bad.vocab", data, bytes), EXIT_FAILURE, words);
}

TEST(merges_errors) {
    static const struct {
        const char *lines, *wanted;
    } cases[] = {
        {"a b\na\n", "bad.vocab:3: wanted two tokens"},
        {"a b\n\n", "bad.vocab:3: wanted two tokens"},
        {"a b c\n", "bad.vocab:2: wanted two tokens"},
        {"a b\r\n", "bad.vocab:2: wanted two tokens"},
        {"a  b\n", "bad.vocab:2: wanted two tokens"},
        {"a \xC5\x84\n", "bad.vocab:2: wanted two tokens"}, // U+0144 is no byte
        {"a \xC4\n", "bad.vocab:2: wanted two tokens"},
        {"a \xC2\xAD\n", "bad.vocab:2: wanted two tokens"}, // the soft hyphen is spelled U+0143
        {"a b\nabc d\n", "bad.vocab:3: its left side"},
        {"a b\nc bd\n", "bad.vocab:3: its right side"},
        {"a b\na b\n", "bad.vocab:3: makes token 256 again"},
        {"a b\nb c\na bc\n", "bad.vocab:4: the lines before never leave"}, // a b c is ab c
        {"a b\nb c\nab bc\nab c\n", ""},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char text[256];
        snprintf(text, sizeof(text), "#version: 0.2\n%s", cases[i].lines);
        if (cases[i].wanted[0]) {
            EXPECT(dies(text, strlen(text), cases[i].wanted), "case %zu", i);
        } else {
            Bpe bpe;
            bpe_open(&bpe, test_write("good.bpe", text, strlen(text)));
            bpe_close(&bpe);
        }
    }
    Bpe bytes; // no newline, no merges
    bpe_open(&bytes, test_write("bytes.bpe", "#version", 8));
    EXPECT(bytes.vocab_size == 257, "");
    bpe_close(&bytes);
}

static void open_and_close(const char* path, int vocab_size) {
    Bpe bpe;
    bpe_open(&bpe, path);
    EXPECT(bpe.vocab_size == vocab_size, "%d ids", bpe.vocab_size);
    bpe_close(&bpe);
}

// Writes the 256 bytes and "th" as a .tiktoken to `text`, with another line instead of line `at`,
// from 0, or after the last. Returns its bytes.
static size_t tiktoken_with(char text[8192], int at, const char* instead) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t length = 0;
    for (int id = 0; id < 258; id++) {
        if (id == at) {
            length += (size_t)sprintf(text + length, "%s\n", instead);
        } else if (id < 256) {
            length +=
                (size_t)sprintf(text + length, "%c%c== %d\n", digits[id >> 2], digits[(id & 3) << 4], id);
        } else if (id == 256) {
            length += (size_t)sprintf(text + length, "dGg= %d\n", id);
        }
    }
    return length;
}

TEST(tiktoken_errors) {
    static const struct {
        int at;
        const char *instead, *wanted;
    } cases[] = {
        {100, "*A== 100", "bad.vocab:101: wanted a token in base64"},
        {100, "ZA= 100", "bad.vocab:101: wanted a token in base64"},
        {100, "ZB== 100", "bad.vocab:101: wanted a token in base64"}, // bits beyond the byte
        {100, "ZA==", "bad.vocab:101: wanted a token in base64"},
        {100, "", "bad.vocab:101: wanted a token in base64"},
        {100, " 100", "bad.vocab:101: wanted a token in base64"},
        {100, "ZA== ", "bad.vocab:101: id \"\""},
        {100, "ZA== 100\r", "bad.vocab:101: id \"100?\""},
        {100, "ZA== -100", "bad.vocab:101: id \"-100\", wanted 0 to 256 in a file of 257 lines"},
        {100, "ZA== 257", "bad.vocab:101: id \"257\""},
        {100, "ZA== 99999999999999999999999999", "bad.vocab:101: id \"99999999999999999999999\""},
        {100, "ZA== 99", "bad.vocab:101: id 99 appears twice"},
        {257, "dGg= 257", "bad.vocab:258: token 257 is token 256 again"},
        {100, "dGho 100", "no token is the byte 0x64"},
        {257, "dGhlcmU= 257", "token 257 merges to 4 tokens"}, // th e r e
        {0, "not a vocabulary", "wanted a tokenizer"},
        {0, "{\"version\": \"1.0\",", "byte 19: found"},
    };
    char text[8192];
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const size_t bytes = tiktoken_with(text, cases[i].at, cases[i].instead);
        EXPECT(dies(text, bytes, cases[i].wanted), "case %zu", i);
    }
    size_t bytes = tiktoken_with(text, 100, "ZGQ= 100"); // "dd" before "d"
    bytes += (size_t)sprintf(text + bytes, "ZA== 257\n");
    EXPECT(dies(text, bytes, "token 100 merges to 2 tokens, wanted two of lower ids"), "");
    bytes = tiktoken_with(text, 257, "dGhl 257");
    open_and_close(test_write("good.tiktoken", text, bytes), 259);
    // the last line without its newline
    open_and_close(test_write("good.tiktoken", text, bytes - 1), 259);
}

// ---- other files ----

TEST(other_files) {
    const uint32_t tokenizer[256] = {20240328, 2};
    EXPECT(dies("", 0, "empty file"), "");
    EXPECT(dies("x", 1, "wanted a tokenizer"), "");
    EXPECT(test_dies(open_path, test_path("none.bin"), EXIT_FAILURE, "none.bin|No such file"), "");
    EXPECT(test_dies(open_path, "/dev/null", EXIT_FAILURE, "not a regular file"), "");
    EXPECT(test_dies(open_path, test_write("tokenizer.bin", tokenizer, sizeof(tokenizer)), EXIT_FAILURE,
                     "tokenizer.bin: wanted a tokenizer|not llm.c's .bin"),
           "");
}

// ---- JSON ----

// `text` with the first `from` replaced by `to`; the caller frees it.
static char* replaced(const char* text, const char* from, const char* to) {
    const char* at = strstr(text, from);
    char* out = (char*)malloc(strlen(text) + strlen(to) + 1);
    EXPECT(at, "%s", from);
    sprintf(out, "%.*s%s%s", (int)(at ? at - text : 0), text, to, at ? at + strlen(from) : "");
    return out;
}

TEST(json_variants) {
    static const struct {
        const char *from, *to, *wanted; // NULL: is read as the same
    } cases[] = {
        {"\"type\": \"BPE\", ", "", NULL},
        {"\"dropout\": null, ", "", NULL},
        {"\"continuing_subword_prefix\": null", "\"continuing_subword_prefix\": \"\"", NULL},
        {"\"a a\", \"aa aa\"", "[\"a\",\"a\"], [\"aa\", \"aa\"]", NULL},
        {"\"\\u0120 the\"", "\"\xC4\xA0 the\"", NULL},
        {"\"truncation\": null", "\"truncation\": {\"a\": [1, {\"b\": \"\\\"\"}]}", NULL},
        {", \"<|endoftext|>\": 263", "", NULL},
        {"[{\"id\": 263, ", "[], \"x\": [{\"id\": 263, ", NULL},
        {"\"use_regex\": true", "\"other\": 1", NULL},
        {"\"aa\": 256, \"aaaa\": 257", "\"aaaa\": 257, \"aa\": 256", NULL},
        {"{\n", " \n{\n", NULL},

        {"\"type\": \"BPE\"", "\"type\": \"Unigram\"", "a model of type Unigram, wanted BPE"},
        {"\"dropout\": null", "\"dropout\": 0.1", "the model has a dropout, wanted null"},
        {"\"end_of_word_suffix\": null", "\"end_of_word_suffix\": \"</w>\"",
         "the model has a end_of_word_suffix"},
        {"\"normalizer\": null", "\"normalizer\": {\"type\": \"NFKC\"}",
         "normalization by NFKC, wanted none, NFC, Prepend or Replace"},
        {"\"normalizer\": null", "\"normalizer\": {}", "normalization by without a type, wanted none, NFC"},
        {"\"normalizer\": null",
         "\"normalizer\": {\"type\": \"Sequence\", \"normalizers\": [{\"type\": \"Prepend\"}]}",
         "normalization by Prepend, wanted U+2581, for a blank"},
        {"\"byte_fallback\": false", "\"byte_fallback\": true",
         "byte_fallback is on, wanted it where blanks are U+2581, and only there"},
        {"\"pre_tokenizer\": {\"type\": \"ByteLevel\"", "\"pre_tokenizer\": {\"type\": \"Whitespace\"",
         "the pre_tokenizer Whitespace, wanted ByteLevel"},
        {"\"pre_tokenizer\": {", "\"pre_tokenizer\": null, \"x\": {", "no pre_tokenizer, wanted ByteLevel"},
        {"\"pre_tokenizer\": {", "\"x\": {", "no pre_tokenizer, wanted ByteLevel"},
        {"\"add_prefix_space\": false", "\"add_prefix_space\": true",
         "ByteLevel, wanted it with add_prefix_space false"},
        {"\"add_prefix_space\": false, ", "", "add_prefix_space false"},
        {"\"use_regex\": true", "\"use_regex\": false", "ByteLevel, wanted it with use_regex true"},
        {"\"a a\", ", "", "6 merges make 6 of the 7 tokens that are longer than a byte"},
        {"\"a a\", ", "\"a a\", \"a a\", ", "merges[1] is merges[0] again"},
        {"\"aa aa\"", "\"a b\"", "merges[1] makes no token of 64 and 65"},
        {"\"aa aa\"", "\"aa aaa\"", "the right side of merges[1] is no token"},
        {"\"aa aa\"", "\"aaaa\"", "merges[1] is not two tokens"},
        {"\"aa aa\"", "\"aa a a\"", "merges[1] is not two tokens"},
        {"\"aa aa\"", "[\"aa\", \"aa\", \"aa\"]", "found ',', wanted ']'"},
        {"\"aa\": 256", "\"aa\": 264", "token id 264, wanted 0 to 263"},
        {"\"aa\": 256", "\"aa\": 257", "id 257 appears twice"},
        {"\"aa\": 256", "\"aa\": 263", "id 263 appears twice"},
        {"\"aa\": 256", "\"a\": 256", "token 256 is token 64 again"},
        {"\"aa\": 256", "\"aab\": 256", "merges[0] makes no token of 64 and 64"},
        {"\"aa\": 256", "\"\xE2\x82\xAC\": 256", "token 256 is not in the spelling"},
        {"\"aa\": 256", "\"\": 256", "token 256 is not in the spelling"},
        {"\"aa\": 256", "\"aa\": -1", "found '-', wanted a whole number"},
        {"\"!\": 0, ", "", "the added token <|endoftext|> has the id 263, wanted at most 262"},
        {"\"!\": 0, ", "\"!!\": 0, ", "7 merges make 7 of the 8 tokens"},
        {"[{\"id\": 263", "[{\"id\": 5", "<|endoftext|> is token 5, and token 263"},
        {"\"<|endoftext|>\": 263", "\"<|endoftext|>\": 5", "<|endoftext|> is token 263, and token 5"},
        {"\"content\": \"<|endoftext|>\"", "\"content\": \"<pad>\"", "id 263 appears twice"},
        {"}],\n", "}, {\"id\": 264}],\n", "the added token 264 is empty"},
        {"}],\n", "}, {\"id\": 264, \"content\": \"a b\"}],\n",
         "added token \"a b\" has a blank among other"},
        {"}],\n", "}, {\"id\": 264, \"content\": \"new\", \"lstrip\": true}],\n",
         "new has single_word, lstrip or"},
        {"}],\n", "}, {\"id\": 264, \"content\": \"a\\n\", \"special\": true}],\n",
         "without control characters"},
        {"}],\n", "}, {\"id\": 265, \"content\": \"<pad>\", \"special\": true}],\n",
         "the added token <pad> has the id 265, wanted at most 264"},
        {"}],\n", "}, {\"id\": 256, \"content\": \"<pad>\", \"special\": true}],\n", "id 256 appears twice"},
        {"]}\n}\n", "]}\n", "the end of the text"},
        {"]}\n}\n", "]}\n}}", "nothing but blanks"},
    };
    Bpe bpe = open_small();
    size_t bytes;
    char* good = text_of(&bpe, bpe_put_tokenizer_json_, &bytes);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char* text = replaced(good, cases[i].from, cases[i].to);
        if (cases[i].wanted) {
            EXPECT(dies(text, strlen(text), cases[i].wanted), "case %zu", i);
        } else {
            EXPECT(reads_back(&bpe, test_write("x.json", text, strlen(text))), "case %zu: %s", i,
                   cases[i].to);
        }
        free(text);
    }
    for (size_t i = 0; i < bytes; i += 37) { // cut anywhere
        EXPECT(dies(good, i ? i : 1, ""), "the first %zu bytes", i);
    }
    free(good);
    EXPECT(dies("{}", 2, "neither a model nor tokens"), "");
    EXPECT(dies("{\"a\": 0}", 8, "no token <|endoftext|>"), "");
    bpe_close(&bpe);
}

// ---- writing ----

typedef struct {
    const Bpe* bpe;
    const char* path;
} Writing;

static void write_path(const void* writing) {
    const Writing* w = (const Writing*)writing;
    bpe_write(w->bpe, w->path);
}

static int write_dies(const Bpe* bpe, const char* name, const char* wanted) {
    const Writing writing = {bpe, test_path(name)};
    return test_dies(write_path, &writing, EXIT_FAILURE, wanted) && access(writing.path, F_OK) != 0;
}

// Ids in another order, as other programs train them: end-of-text first, then the bytes as they
// are.
static Bpe open_reordered(void) {
    Bpe small = open_small(), bpe;
    const BpeSpelling spelling = bpe_spelling();
    const char* path = test_path("reordered.json");
    FILE* file = fopen(path, "wb");
    fputs("{\"<|endoftext|>\": 0", file);
    for (int id = 1; id < small.vocab_size; id++) {
        const unsigned char byte = (unsigned char)(id - 1);
        const BpeToken_ token = {&byte, 1, 0};
        fputs(", \"", file);
        bpe_put_spelled(&spelling, id <= 256 ? token : small.tokens[id - 1], BPE_JSON, file);
        fprintf(file, "\": %d", id);
    }
    fputs("}", file);
    fclose(file);
    bpe_close(&small);
    bpe_open(&bpe, path);
    EXPECT(bpe.eot == 0 && bpe.byte_ids['a'] == 1 + 'a', "");
    return bpe;
}

// Each file that is written for transformers is a vocabulary of its own.
static void test_round_trips(const Bpe* bpe) {
    static const char* const names[] = {"tokenizer.json", "vocab.json", "merges.txt"};
    mkdir(test_path("all"), 0777);
    bpe_write_hf(bpe, &bpe->card, test_path("all"), 64);
    for (int i = 0; i < 3; i++) {
        char path[PATH_MAX];
        bpe_path(path, test_path("all"), names[i]);
        EXPECT(reads_back(bpe, path), "%s", names[i]);
    }
}

TEST(writes) {
    Bpe bpe = open_reordered();
    mkdir(test_path("y"), 0777);
    bpe_write_hf(&bpe, &bpe.card, test_path("y"), 64); // whose merges.txt goes with vocab.json
    EXPECT(reads_back(&bpe, test_path("y")) && reads_back(&bpe, test_path("y/vocab.json")), "");
    bpe_close(&bpe);

    bpe = open_small();
    EXPECT(write_dies(&bpe, "none/new.json", "none/new.json: cannot write: No such file"), "");
    bpe_close(&bpe);

    const int a = 'a' - '!', doubling[8][2] = {{a, a},     {256, 256}, {257, 257}, {258, 258},
                                               {259, 259}, {260, 260}, {261, 261}, {262, 262}};
    bpe_open_merges(&bpe, doubling, 8, "doubling");
    bpe_write(&bpe, test_path("tokenizer.json")); // a token of 256 bytes
    EXPECT(reads_back(&bpe, test_path("tokenizer.json")), "");
    bpe_close(&bpe);
}

// Special tokens that were added behind the vocabulary and inside of it, with names that bytes are
// not spelled with.
TEST(added_tokens) {
    static const char behind[] = "}, {\"id\": 264, \"content\": \"[PAD]\", \"special\": true}, {\"id\": 265, "
                                 "\"content\": \"<\xEF\xBD\x9C \\\" \xEF\xBD\x9C>\", \"special\": true}],\n";
    static const char config[] = "{\"x\": [1], \"pad_token\": {\"content\": \"[PAD]\", \"special\": true}}";
    Bpe small = open_small(), bpe, again;
    BpeEncoder encoder;
    size_t bytes;
    int length, ids[16];
    char* good = text_of(&small, bpe_put_tokenizer_json_, &bytes);
    char* text = replaced(good, "}],\n", behind);
    mkdir(test_path("added"), 0777);
    test_write("added/tokenizer.json", text, strlen(text));
    test_write("added/tokenizer_config.json", config, strlen(config));
    bpe_open(&bpe, test_path("added"));
    EXPECT(bpe.vocab_size == 266 && bpe.eot == 263 && bpe.card.pad == 264 && bpe_least_vocab(&bpe) == 264,
           "");
    EXPECT(bpe_is_name(&bpe, 264) && bpe_is_name(&bpe, 263) && !bpe_is_name(&bpe, 262), "");
    EXPECT(strncmp(bpe_token(&bpe, 264, &length), "[PAD]", 5) == 0 && length == 5, "");
    bpe_encoder_open(&encoder, &bpe);
    EXPECT(bpe_encode(&encoder, "[PAD]", 5, ids) == 5 && ids[0] == bpe.byte_ids['['], "its name is text");
    bpe_encoder_close(&encoder);
    EXPECT(bpe_checksum(&bpe) != bpe_checksum(&small), "");
    mkdir(test_path("saved"), 0777);
    bpe_write_hf(&bpe, &bpe.card, test_path("saved"), 64);
    EXPECT(reads_back(&bpe, test_path("saved")), "");
    bpe_open(&again, test_path("saved"));
    EXPECT(again.card.pad == 264 && bpe_is_name(&again, 265) && bpe_checksum(&again) == bpe_checksum(&bpe),
           "");
    bpe_close(&again);
    bpe_close(&bpe);
    free(text);

    // as a trainer of tokenizers has it: in the vocabulary and among the added tokens
    char* listed =
        replaced(good, "}],\n", "}, {\"id\": 256, \"content\": \"\xEF\xBD\x9C\", \"special\": true}],\n");
    char* named = replaced(listed, "\"aa\": 256", "\"\xEF\xBD\x9C\": 256");
    char* shorter = replaced(named, "\"a a\", \"aa aa\", ", "");
    text = replaced(shorter, "\"aaaa\": 257", "\"!!\": 257");
    char* merges = replaced(text, "\"merges\": [", "\"merges\": [\"! !\", ");
    bpe_open(&bpe, test_write("listed.json", merges, strlen(merges)));
    EXPECT(bpe.vocab_size == 264 && bpe_is_name(&bpe, 256) && bpe_least_vocab(&bpe) == 264 &&
               bpe.card.pad == -1,
           "");
    bpe_write(&bpe, test_path("saved/tokenizer.json"));
    EXPECT(reads_back(&bpe, test_path("saved/tokenizer.json")), "");
    bpe_close(&bpe);
    free(merges);
    free(text);
    free(shorter);
    free(named);
    free(listed);
    free(good);
    bpe_close(&small);
}

TEST(directories) {
    Bpe bpe = open_small(), other = open_reordered();
    const char* directory = test_path("hf");
    EXPECT(mkdir(directory, 0777) == 0, "");
    EXPECT(test_dies(open_path, directory, EXIT_FAILURE, "hf: no tokenizer.json or merges.txt"), "");
    test_write("hf/merges.txt", small_merges, strlen(small_merges));
    EXPECT(reads_back(&bpe, directory), "merges.txt alone");
    bpe_write_as_(&bpe, test_path("hf/vocab.json"), bpe_put_vocab_);
    EXPECT(reads_back(&bpe, directory), "with vocab.json");
    bpe_write_as_(&other, test_path("hf/vocab.json"), bpe_put_vocab_);
    EXPECT(test_dies(open_path, directory, EXIT_FAILURE,
                     "hf/vocab.json: end-of-text is 0 of 264 tokens|merges.txt"),
           "");
    bpe_write(&other, test_path("hf/tokenizer.json"));
    EXPECT(reads_back(&other, directory), "tokenizer.json counts");
    bpe_close(&other);
    bpe_close(&bpe);
}

// ---- the vocabulary of GPT-2 ----

// The files as published, whose SHA-256 dev/ref/check_tokenizer_files.py knows.
static void test_gpt2(const char* vocabulary) {
    static const struct {
        const char* name;
        uint64_t xxh64;
    } published[] = {{"all/merges.txt", 0xF161FCE364073FBC}, {"all/vocab.json", 0x5D53372B6061C4C7}};
    Bpe bpe;
    bpe_open(&bpe, vocabulary);
    test_round_trips(&bpe);
    for (int i = 0; i < 2; i++) {
        const BpeFile file = bpe_read_(test_path(published[i].name));
        const uint64_t hash = xxh64(file.data, file.bytes);
        EXPECT(hash == published[i].xxh64, "%s: 0x%016llX", published[i].name, (unsigned long long)hash);
        free(file.data);
    }
    bpe_close(&bpe);
}

// ---- for other programs ----

COMMAND(write_bpe) { // VOCABULARY DIRECTORY
    Bpe bpe;
    CHECK(argc == 2, "%d arguments; wanted VOCABULARY DIRECTORY", argc);
    const char *vocabulary = argv[0], *directory = argv[1];
    bpe_open(&bpe, vocabulary);
    bpe_write_hf(&bpe, &bpe.card, directory, 1024);
    bpe_close(&bpe);
    return EXIT_SUCCESS;
}

COMMAND(bpe_ids) { // VOCABULARY < TEXT
    Bpe bpe;
    BpeEncoder encoder;
    CHECK(argc == 1, "%d arguments; wanted VOCABULARY", argc);
    bpe_open(&bpe, argv[0]);
    bpe_encoder_open(&encoder, &bpe);
    char* text = NULL;
    size_t bytes = 0;
    FILE* all = open_memstream(&text, &bytes);
    for (int c; (c = getchar()) != EOF;) {
        fputc(c, all);
    }
    fclose(all);
    int* ids = (int*)malloc((bpe_most_ids(&bpe, bytes) + 1) * sizeof(int));
    const size_t count = bpe_encode(&encoder, text, bytes, ids);
    for (size_t i = 0; i < count; i++) {
        printf("%d\n", ids[i]);
    }
    free(ids);
    free(text);
    bpe_encoder_close(&encoder);
    bpe_close(&bpe);
    return EXIT_SUCCESS;
}

TEST(round_trips) {
    Bpe small = open_small();
    test_round_trips(&small);
    bpe_close(&small);
}

TEST(gpt2) {
    const char* vocabulary = getenv("GPT2_VOCAB");
    if (vocabulary) {
        test_gpt2(vocabulary);
    } else {
        printf("skipped: bpe_files with the vocabulary of GPT-2: GPT2_VOCAB is unset\n");
    }
}
