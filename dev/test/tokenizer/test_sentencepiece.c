// test_sentencepiece.c -- tokenizers of SentencePiece's kind (dev/ref/make_sentence_fixtures.py): the
// ids and the decoded texts are those of sentencepiece and of Hugging Face's tokenizers.
//
//     test_tokenizer --decode VOCABULARY < IDS    prints the text of ids
#include <sys/stat.h>

#include "llmc/base/file.h"
#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/bpe_files.h"
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
        const char* token =
            i == 0 ? bpe_first_token(bpe, ids[i], &length) : bpe_token(bpe, ids[i], &length);
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
        count += bpe_encode_at(&one->encoder, begin > 0 ? BPE_REST : BPE_DOCUMENT, copy + 1 + begin, n, ids + count);
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
            EXPECT(hash_of(ids, count) == wanted[i][0], "%s, case %u, pass %d: \"%.*s\"", one->name, number, again,
                   (int)(bytes < 100 ? bytes : 100), text);
            EXPECT(wanted[i][1] == 0 || hash_bytes(0xCBF29CE484222325, decoded, decoded_bytes) == wanted[i][1],
                   "%s, case %u decoded: \"%.*s\", from \"%.*s\"", one->name, number,
                   (int)(decoded_bytes < 100 ? decoded_bytes : 100), decoded, (int)(bytes < 100 ? bytes : 100), text);
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
