// test_sentencepiece.c -- tokenizers of SentencePiece's kind (dev/ref/make_sentence_fixtures.py):
// the ids and the decoded texts are those of sentencepiece and of Hugging Face's tokenizers.
//
//     test_tokenizer --decode VOCABULARY < IDS    prints the text of ids
#include <sys/stat.h>

#include "llmc/base/file.h"
#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/bpe_gguf.h"
#include "llmc/tokenizer/bpe_train.h"
#include "llmc/tokenizer/chat_marks.h"
#include "llmc/tokenizer/tokenizer.h"
#include "dev/test/lib/test.h"

#define FIXTURES "dev/ref/fixtures/sentencepiece"
enum { MAX_FILES = 16 };

typedef struct {
    char name[17];
    Bpe bpe;
    BpeEncoder encoder;
} Sentence;

typedef struct {
    FILE* file; // of the cases
    uint32_t num_files, num_cases;
    Sentence of[MAX_FILES];
} Sentences;

static void open_named(Sentence* one, const char* name) {
    char path[PATH_MAX];
    snprintf(one->name, sizeof(one->name), "%s", name);
    snprintf(path, sizeof(path), FIXTURES "/%s", name);
    bpe_open(&one->bpe, path);
    bpe_encoder_open(&one->encoder, &one->bpe);
}

static void close_sentence(Sentence* one) {
    bpe_encoder_close(&one->encoder);
    bpe_close(&one->bpe);
}

static void open_all(Sentences* all) {
    char magic[8], name[17] = "";
    memset(all, 0, sizeof(*all));
    all->file = fopen(FIXTURES "/cases.bin", "rb");
    CHECK(all->file && fread(magic, 1, 8, all->file) == 8 && memcmp(magic, "spmcases", 8) == 0, FIXTURES);
    CHECK(fread(&all->num_files, 4, 1, all->file) == 1 && all->num_files <= MAX_FILES, FIXTURES);
    CHECK(fread(&all->num_cases, 4, 1, all->file) == 1, FIXTURES);
    for (uint32_t i = 0; i < all->num_files; i++) {
        CHECK(fread(name, 1, 16, all->file) == 16, FIXTURES);
        open_named(&all->of[i], name);
    }
}

static void close_all(Sentences* all) {
    for (uint32_t i = 0; i < all->num_files; i++) {
        close_sentence(&all->of[i]);
    }
    fclose(all->file);
}

static uint32_t hash_bytes(uint64_t hash, const char* bytes, size_t n) {
    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001B3;
    }
    return (uint32_t)hash;
}

static uint32_t hash_of(const int* ids, size_t count) {
    uint16_t* shorts = (uint16_t*)malloc(2 * count + 1);
    for (size_t i = 0; i < count; i++) {
        shorts[i] = (uint16_t)ids[i];
    }
    const uint32_t hash = hash_bytes(0xCBF29CE484222325, (char*)shorts, 2 * count);
    free(shorts);
    return hash;
}

// Decodes token by token, as generation does. Returns the text, which the caller frees.
static char* decode(const Bpe* bpe, const int* ids, size_t count, size_t* bytes) {
    char* text = NULL;
    FILE* file = open_memstream(&text, bytes);
    for (size_t i = 0; i < count; i++) {
        int length;
        const char* token = i == 0 ? bpe_first_token(bpe, ids[i], &length) : bpe_token(bpe, ids[i], &length);
        fwrite(token, 1, (size_t)length, file);
    }
    fclose(file);
    return text;
}

// Encodes a text that lies in memory of exactly its size, in parts as soon as `step` more bytes are
// known.
static size_t encode(Sentence* one, const char* text, size_t bytes, size_t step, int* ids) {
    char* copy = (char*)malloc(bytes + 1);
    size_t count = 0;
    memcpy(copy + 1, text, bytes);
    for (size_t begin = 0, end = 0; begin < bytes;) {
        end = end + step < bytes ? end + step : bytes;
        const size_t n =
            end < bytes ? bpe_last_cut(&one->bpe.rules, copy + 1 + begin, end - begin) : end - begin;
        count += bpe_encode_at(&one->encoder, begin > 0 ? BPE_REST : BPE_DOCUMENT, copy + 1 + begin, n,
                               ids + count);
        begin += n;
    }
    free(copy);
    return count;
}

static void test_case(Sentences* all, uint32_t number, const char* text, size_t bytes,
                      const uint32_t (*wanted)[2]) {
    static const size_t steps[] = {1, 3, 17, 64};
    for (uint32_t i = 0; i < all->num_files; i++) {
        Sentence* one = &all->of[i];
        int* ids = (int*)malloc((bpe_most_ids(&one->bpe, bytes) + 1) * sizeof(int));
        for (int again = 0; again < 3; again++) { // then out of the cache, then in parts
            const size_t step = again < 2 || bytes > 2048 ? bytes : steps[number % 4],
                         count = encode(one, text, bytes, step, ids);
            size_t decoded_bytes;
            char* decoded = decode(&one->bpe, ids, count, &decoded_bytes);
            EXPECT(hash_of(ids, count) == wanted[i][0], "%s, case %u, pass %d: \"%.*s\"", one->name, number,
                   again, (int)(bytes < 100 ? bytes : 100), text);
            EXPECT(wanted[i][1] == 0 ||
                       hash_bytes(0xCBF29CE484222325, decoded, decoded_bytes) == wanted[i][1],
                   "%s, case %u decoded: \"%.*s\", from \"%.*s\"", one->name, number,
                   (int)(decoded_bytes < 100 ? decoded_bytes : 100), decoded,
                   (int)(bytes < 100 ? bytes : 100), text);
            free(decoded);
        }
        free(ids);
    }
}

TEST(sentence_cases) {
    static Sentences all;
    open_all(&all);
    EXPECT(all.num_cases > 700, "%u cases", all.num_cases);
    for (uint32_t number = 0; number < all.num_cases; number++) {
        uint32_t header[2], wanted[MAX_FILES][2];
        CHECK(fread(header, 4, 2, all.file) == 2, FIXTURES);
        const size_t unit = header[0], bytes = unit * header[1];
        char* text = (char*)malloc(bytes + 1);
        CHECK(fread(text, 1, unit, all.file) == unit, FIXTURES);
        for (size_t at = unit; at < bytes; at++) {
            text[at] = text[at - unit];
        }
        CHECK(fread(wanted, 8, all.num_files, all.file) == all.num_files, FIXTURES);
        test_case(&all, number, text, bytes, (const uint32_t(*)[2])wanted);
        free(text);
    }
    EXPECT(fgetc(all.file) == EOF, "cases.bin continues");
    close_all(&all);
}

// Bytes that are no UTF-8 are characters of their own, and come back.
TEST(sentence_bytes) {
    static const char* const names[] = {"llama2.model", "gemma.model", "crossing.model", "llama2.json",
                                        "always.json"};
    enum { BYTES = 3000 };
    for (size_t k = 0; k < sizeof(names) / sizeof(names[0]); k++) {
        Sentence one;
        char text[BYTES];
        int ids[2 * BYTES];
        size_t bytes;
        uint64_t state = k + 1;
        open_named(&one, names[k]);
        for (int i = 0; i < BYTES; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            text[i] = (char)(state >> (state >> 62 ? 40 : 33) & (state >> 63 ? 0xFF : 0x7F));
        }
        text[0] = 'a';
        const size_t count = encode(&one, text, BYTES, BYTES, ids);
        char* decoded = decode(&one.bpe, ids, count, &bytes);
        EXPECT(bytes == BYTES && memcmp(decoded, text, BYTES) == 0, "%s", names[k]);
        free(decoded);
        close_sentence(&one);
    }
}

// Merging a piece of any length gives the same by both ways.
TEST(sentence_merging) {
    static const char* const names[] = {"llama2.model", "gemma.json", "mistral.json"};
    for (size_t k = 0; k < sizeof(names) / sizeof(names[0]); k++) {
        Sentence one;
        uint64_t state = 1;
        open_named(&one, names[k]);
        for (int round = 0; round < 2000; round++) {
            unsigned char piece[BPE_SHORT_];
            int short_ids[BPE_SHORT_], long_ids[BPE_SHORT_], length;
            size_t n = 0;
            while (n < BPE_SHORT_) {
                state = state * 6364136223846793005u + 1442695040888963407u;
                const char* token =
                    bpe_token(&one.bpe, (int)((state >> 33) % (uint64_t)one.bpe.vocab_size), &length);
                for (int at = 0; at < length && n < BPE_SHORT_; at++) {
                    piece[n++] = (unsigned char)token[at];
                }
            }
            const size_t count = (size_t)bpe_merge_short_(&one.bpe, piece, (int)n, short_ids);
            EXPECT(bpe_merge_long_(&one.bpe, &one.encoder.merger, piece, n, long_ids) == count &&
                       memcmp(short_ids, long_ids, count * sizeof(int)) == 0,
                   "%s, piece %d", names[k], round);
        }
        close_sentence(&one);
    }
}

static void open_path(const void* path) {
    Bpe bpe;
    bpe_open(&bpe, (const char*)path);
    bpe_close(&bpe);
}

static char* read_fixture(const char* name, size_t* bytes) {
    char path[PATH_MAX], *text, error[ERROR_BYTES];
    snprintf(path, sizeof(path), FIXTURES "/%s", name);
    CHECK(file_try_read(path, 1 << 20, &text, bytes, error), "%s", error);
    return text;
}

// Anything else is refused by name.
TEST(sentence_refused) {
    static const char* const cases[][4] = {
        {"llama2.json", "\"pre_tokenizer\":null",
         "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false}",
         "blanks are U+2581, but the pre_tokenizer has a pattern, wanted null or Metaspace"},
        {"llama2.json", "\"pre_tokenizer\":null",
         "\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\xE2\x96\x81\"}",
         "wanted U+2581, the schemes first, always or never, and split false"},
        {"llama2.json", "\"pre_tokenizer\":null",
         "\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\xE2\x96\x81\","
         "\"prepend_scheme\":\"first\",\"split\":false}",
         "wanted only one of them"},
        {"llama2.json", "\"type\":\"Prepend\",\"prepend\":\"\xE2\x96\x81\"", "\"type\":\"NFC\"",
         "and text by another step"},
        {"llama2.json", "\"prepend\":\"\xE2\x96\x81\"", "\"prepend\":\"_\"",
         "normalization by Prepend, wanted U+2581"},
        {"llama2.json", "\"content\":\"\xE2\x96\x81\"", "\"content\":\"_\"",
         "normalization by Replace, wanted U+2581"},
        {"mistral.json", "\"replacement\":\"\xE2\x96\x81\"", "\"replacement\":\"_\"",
         "Metaspace with the scheme first"},
        {"mistral.json", "\"prepend_scheme\":\"first\"", "\"prepend_scheme\":\"last\"",
         "Metaspace with the scheme last"},
        {"gemma.json",
         "\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"\xE2\x96\x81\"}",
         "\"normalizer\":null", "byte_fallback is on, wanted it where blanks are U+2581"},
        {"llama2.json", "\"byte_fallback\":true", "\"byte_fallback\":false", "byte_fallback is off"},
        {"llama2.json", "\"ignore_merges\":false", "\"ignore_merges\":true", "ignore_merges, and U+2581"},
        {"llama2.json", "<0x1F>", "<0x1G>", "no token is the byte 0x1F, wanted all 256"},
        {"phi3.json",
         "\"content\":\"<tag>\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,\"normalized\":false",
         "\"content\":\"<tag>\",\"normalized\":true", "the added token <tag> is normalized, with its blanks"},
        {"phi3.json", "\"content\":\"<tag>\",\"single_word\":false",
         "\"content\":\"<tag>\",\"single_word\":true", "<tag> has single_word, lstrip or rstrip"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t bytes;
        char *text = read_fixture(cases[i][0], &bytes), *at = strstr(text, cases[i][1]);
        char* changed = (char*)check_alloc(bytes + 128, 1, "a tokenizer");
        CHECK(at, "%s is not in %s", cases[i][1], cases[i][0]);
        snprintf(changed, bytes + 128, "%.*s%s%s", (int)(at - text), text, cases[i][2],
                 at + strlen(cases[i][1]));
        EXPECT(test_dies(open_path, test_write("changed.json", changed, strlen(changed)), EXIT_FAILURE,
                         cases[i][3]),
               "%s", cases[i][2]);
        free(changed);
        free(text);
    }
}

// Fields at the end of a model are read after, and over, those before.
TEST(sentence_model_refused) {
    static const struct {
        const char *more, *wanted;
        size_t bytes;
    } cases[] = {
        {"\x12\x02\x18\x01", "a model of type unigram, wanted BPE", 4},
        {"\x12\x02\x18\x04", "a model of type char, wanted BPE", 4},
        {"\x1A\x0D\x0A\x08nmt_nfkc\x12\x01x", "normalization by nmt_nfkc, wanted identity", 15},
        {"\x1A\x02\x28\x00", "escape_whitespaces is off", 4},
        {"\x1A\x02\x20\x01", "remove_extra_whitespaces is on", 4},
        {"\x12\x03\xC0\x01\x01", "treat_whitespace_as_suffix", 5},
        {"\x12\x16\xC8\x02\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01\xD0\x02\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF"
         "\xFF\x01",
         "no control piece starts or ends a text", 0},
        {"\x0A\x05\x0A\x01q\x18\x05", "q, is of type 5, wanted normal", 7},
        {"\x0A\x05\x0A\x01q\x18\x09", "q, is of type 9, wanted normal", 7},
        {"\x0A\x05\x0A\x03"
         "a b",
         "has a blank, wanted U+2581", 7},
        {"\x0A\x03\x0A\x01"
         "e",
         "again", 5},
        {"\x0A\x00", "is empty", 2},
        {"\x0A\x09\x0A\x02zq\x15\x00\x00\x00\x00", "have the same score", 11},
        {"\x0A\x0A\x0A\x03"
         "zqz"
         "\x15\x00\x00\xC0\x7F",
         "is not finite", 12},
        {"\x0A\x0B\x0A\x04\xE2\x82\xAC"
         "e"
         "\x15\x00\x00\x80\x40",
         "has a character that is no piece", 13},
        {"\x0A\x07\x0A\x03"
         "abc"
         "\x18\x06",
         "is a byte, but not of the form", 9},
        {"\x0A", "it ends too early", 1},
        {"\x0A\x7F"
         "abc",
         "it ends too early", 5},
        {"\x0B", "a field of wire type 3", 1},
        {"\x08\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF", "more than 64 bits", 12},
    };
    size_t bytes;
    char* text = read_fixture("llama2.model", &bytes);
    text = (char*)realloc(text, bytes + 64);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        if (cases[i].bytes > 0) {
            memcpy(text + bytes, cases[i].more, cases[i].bytes);
            EXPECT(test_dies(open_path, test_write("changed.model", text, bytes + cases[i].bytes),
                             EXIT_FAILURE, cases[i].wanted),
                   "%zu", i);
        }
    }
    memcpy(text + bytes, "\xF8\x07\x01\xFA\x07\x02hi", 8); // fields that are not known
    open_path(test_write("more.model", text, bytes + 8));
    free(text);
    mkdir(test_path("tiktoken"), 0777);
    test_write("tiktoken/tokenizer.model", "YQ== 0\n", 7);
    EXPECT(test_dies(open_path, test_path("tiktoken"), EXIT_FAILURE, "not SentencePiece's"), "");
}

// Roles of tokens, and what GGUF has for each file. The pieces that sentencepiece trained have the
// scores 0, -1, -2 ... after those of bytes and roles.
TEST(sentence_roles) {
    static const struct {
        const char *name, *start, *end;
        int is_in_gguf;
    } wanted[] = {{"llama2.model", "<s>", "</s>", 1},   {"gemma.model", "<bos>", "<eos>", 1},
                  {"crossing.model", "<s>", "</s>", 1}, {"llama2.json", "<s>", NULL, 1},
                  {"gemma.json", "<bos>", NULL, 1},     {"mistral.json", "<s>", NULL, 1},
                  {"always.json", "<s>", NULL, 1}};
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        Sentence one;
        open_named(&one, wanted[i].name);
        const Bpe* bpe = &one.bpe;
        const char* end = wanted[i].end ? wanted[i].end : wanted[i].start;
        EXPECT(bpe->eot == bpe_find_added(bpe, wanted[i].start) && bpe_is_end(bpe, bpe_find_added(bpe, end)),
               "%s", wanted[i].name);
        EXPECT(bpe->card.num_ends == 1 && bpe->card.ends[0] == bpe_find_added(bpe, end), "%s",
               wanted[i].name);
        const char* pre = bpe_gguf_pre(bpe);
        EXPECT(wanted[i].is_in_gguf ? pre && strcmp(pre, "default") == 0 : !pre, "%s", wanted[i].name);
        EXPECT(bpe->has_template && !bpe_is_like_gpt2(bpe), "%s", wanted[i].name);
        close_sentence(&one);
    }
    Sentence one;
    float scores[4096];
    open_named(&one, "llama2.model");
    CHECK(one.bpe.vocab_size <= 4096 && bpe_gguf_scores(&one.bpe, scores), "scores");
    for (int id = 3 + 256; scores[id] != scores[one.bpe.vocab_size - 1]; id++) { // a character
        EXPECT(scores[id] == (float)(259 - id - 1), "%d: %g", id, scores[id]);
    }
    close_sentence(&one);
}

// A directory of a model is read and written with the tokenizer's own file.
TEST(sentence_directory) {
    static const char* const names[][2] = {{"llama2.model", "tokenizer.model"},
                                           {"gemma.json", "tokenizer.json"}};
    for (int k = 0; k < 2; k++) {
        size_t bytes, again_bytes;
        char path[PATH_MAX], error[ERROR_BYTES], *again;
        char* text = read_fixture(names[k][0], &bytes);
        const char* directory = test_path(k ? "of_json" : "of_model");
        mkdir(directory, 0777);
        bpe_path(path, directory, names[k][1]);
        FILE* file = fopen(path, "wb");
        fwrite(text, 1, bytes, file);
        fclose(file);
        Tokenizer tokenizer, other;
        EXPECT(tokenizer_is_in(directory), "");
        tokenizer_open_file(&tokenizer, directory);
        mkdir(test_path("written"), 0777);
        tokenizer_write_hf(&tokenizer, &tokenizer.bpe->card, test_path("written"), 64);
        bpe_path(path, test_path("written"), names[k][1]);
        CHECK(file_try_read(path, 1 << 20, &again, &again_bytes, error), "%s", error);
        EXPECT(again_bytes == bytes && memcmp(again, text, bytes) == 0, "%s", names[k][0]);
        tokenizer_open_file(&other, test_path("written"));
        EXPECT(tokenizer_is_same(&tokenizer, &other) &&
                   bpe_checksum(tokenizer.bpe) == bpe_checksum(other.bpe),
               "");
        tokenizer_close(&other);
        tokenizer_close(&tokenizer);
        remove(path);
        free(again);
        free(text);
    }
}

// A text that continues another gets no blank before it, nor does its first token lose one.
TEST(sentence_places) {
    Tokenizer tokenizer;
    int whole[64], ids[64], length;
    size_t count, first, rest;
    tokenizer_open_file(&tokenizer, FIXTURES "/llama2.model");
    count = tokenizer_encode(&tokenizer, "the king shall", 14, whole);
    first = tokenizer_encode(&tokenizer, "the", 3, ids);
    rest = tokenizer_encode_rest(&tokenizer, " king shall", 11, ids + first);
    EXPECT(first + rest == count && memcmp(ids, whole, count * sizeof(int)) == 0, "");
    EXPECT(tokenizer_decode(&tokenizer, ids[0], &length)[0] == ' ' && length == 4, "%d", length);
    EXPECT(tokenizer_decode_first(&tokenizer, ids[0], &length)[0] == 't' && length == 3, "%d", length);
    EXPECT(tokenizer_is_end(&tokenizer, tokenizer_find_added(&tokenizer, "</s>")), "");

    ChatMarks marks; // a prompt and its completion are one text
    const ChatMessage messages[] = {{CHAT_PROMPT, "the", 3}, {CHAT_COMPLETION, " king shall", 11}};
    int pair[128] = {tokenizer.eot};
    chat_marks_open(&marks, tokenizer.bpe);
    const size_t all = chat_encode(&marks, tokenizer.encoder, messages, 2, CHAT_WHOLE, pair);
    EXPECT(all == count + 1, "%zu ids, wanted %zu", all, count + 1);
    for (size_t i = 0; i < count && all == count + 1; i++) {
        EXPECT((pair[i + 1] & ~TOKEN_NO_TARGET) == whole[i], "%zu", i);
    }
    tokenizer_close(&tokenizer);
}

static void extend(const void* bpe) {
    BpeTrainer trainer;
    bpe_trainer_open(&trainer, 1);
    bpe_trainer_split_as(&trainer, (const Bpe*)bpe);
}

TEST(sentence_extended) {
    Sentence one;
    open_named(&one, "llama2.model");
    EXPECT(test_dies(extend, &one.bpe, EXIT_FAILURE, "cannot be extended"), "");
    close_sentence(&one);
}

COMMAND(decode) { // VOCABULARY < IDS
    Bpe bpe;
    int id;
    CHECK(argc == 1, "%d arguments; wanted VOCABULARY", argc);
    bpe_open(&bpe, argv[0]);
    for (int is_first = 1; scanf("%d", &id) == 1; is_first = 0) {
        int length;
        const char* token = is_first ? bpe_first_token(&bpe, id, &length) : bpe_token(&bpe, id, &length);
        fwrite(token, 1, (size_t)length, stdout);
    }
    bpe_close(&bpe);
    return EXIT_SUCCESS;
}
