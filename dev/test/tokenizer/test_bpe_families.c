// test_bpe_families.c -- tokenizers in the form of each family
// (dev/ref/make_tokenizer_fixtures.py): the ids are those of Hugging Face's library, and what is
// written is read as the same.
#include <sys/stat.h>

#include "llmc/base/file.h"
#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/bpe_gguf.h"
#include "llmc/tokenizer/bpe_train.h"
#include "dev/test/lib/test.h"

#define FIXTURES "dev/ref/fixtures/tokenizers"
enum { MAX_FAMILIES = 16 };

typedef struct {
    char name[17];
    Bpe bpe;
    BpeEncoder encoder;
} Family;

typedef struct {
    FILE* file; // of the cases
    uint32_t num_families, num_cases;
    Family families[MAX_FAMILIES];
} Families;

static void families_open(Families* all) {
    char magic[8];
    memset(all, 0, sizeof(*all));
    all->file = fopen(FIXTURES "/cases.bin", "rb");
    CHECK(all->file && fread(magic, 1, 8, all->file) == 8 && memcmp(magic, "tokcases", 8) == 0, FIXTURES);
    CHECK(fread(&all->num_families, 4, 1, all->file) == 1 && all->num_families <= MAX_FAMILIES, FIXTURES);
    CHECK(fread(&all->num_cases, 4, 1, all->file) == 1, FIXTURES);
    for (uint32_t i = 0; i < all->num_families; i++) {
        Family* family = &all->families[i];
        char path[PATH_MAX];
        CHECK(fread(family->name, 1, 16, all->file) == 16, FIXTURES);
        snprintf(path, sizeof(path), FIXTURES "/%s.json", family->name);
        bpe_open(&family->bpe, path);
        bpe_encoder_open(&family->encoder, &family->bpe);
    }
}

static void families_close(Families* all) {
    for (uint32_t i = 0; i < all->num_families; i++) {
        bpe_encoder_close(&all->families[i].encoder);
        bpe_close(&all->families[i].bpe);
    }
    fclose(all->file);
}

static const Family* family_of(const Families* all, const char* name) {
    for (uint32_t i = 0; i < all->num_families; i++) {
        if (strcmp(all->families[i].name, name) == 0) {
            return &all->families[i];
        }
    }
    CHECK(0, "no family %s", name);
    return NULL;
}

static uint32_t hash_of(const int* ids, size_t count) {
    uint64_t hash = 0xCBF29CE484222325;
    for (size_t i = 0; i < count; i++) {
        hash = (hash ^ (ids[i] & 255)) * 0x100000001B3;
        hash = (hash ^ (uint64_t)(ids[i] >> 8)) * 0x100000001B3;
    }
    return (uint32_t)hash;
}

// Encodes a text that lies in memory of exactly its size.
static size_t encode(Family* family, const char* text, size_t bytes, int* ids) {
    char* copy = (char*)malloc(bytes + 1);
    memcpy(copy + 1, text, bytes);
    const size_t count = bpe_encode(&family->encoder, copy + 1, bytes, ids);
    free(copy);
    return count;
}

// Encodes a text that is divided where it may be as soon as `step` more bytes are known.
static size_t encode_in_parts(Family* family, const char* text, size_t bytes, size_t step, int* ids) {
    size_t count = 0;
    for (size_t begin = 0, end = 0; begin < bytes;) {
        end = end + step < bytes ? end + step : bytes;
        const size_t n =
            end < bytes ? bpe_last_cut(&family->bpe.rules, text + begin, end - begin) : end - begin;
        count += encode(family, text + begin, n, ids + count);
        begin += n;
    }
    return count;
}

static void test_case(Families* all, uint32_t number, const char* text, size_t bytes,
                      const uint32_t* wanted) {
    static const size_t steps[] = {1, 3, 17, 64};
    for (uint32_t i = 0; i < all->num_families; i++) {
        Family* family = &all->families[i];
        int* ids = (int*)malloc((bpe_most_ids(&family->bpe, bytes) + 1) * sizeof(int));
        for (int again = 0; again < 2; again++) { // then out of the cache
            EXPECT(hash_of(ids, encode(family, text, bytes, ids)) == wanted[i], "%s, case %u: \"%.*s\"",
                   family->name, number, (int)(bytes < 100 ? bytes : 100), text);
        }
        if (bytes <= 2048) {
            const size_t count = encode_in_parts(family, text, bytes, steps[number % 4], ids);
            EXPECT(hash_of(ids, count) == wanted[i], "%s, case %u in parts: \"%.*s\"", family->name, number,
                   (int)(bytes < 100 ? bytes : 100), text);
        }
        free(ids);
    }
}

static void test_cases(Families* all) {
    EXPECT(all->num_cases > 5000, "%u cases", all->num_cases);
    for (uint32_t number = 0; number < all->num_cases; number++) {
        uint32_t header[2], wanted[MAX_FAMILIES];
        CHECK(fread(header, 4, 2, all->file) == 2, FIXTURES);
        const size_t unit = header[0], bytes = unit * header[1];
        char* text = (char*)malloc(bytes + 1);
        CHECK(fread(text, 1, unit, all->file) == unit, FIXTURES);
        for (size_t at = unit; at < bytes; at++) {
            text[at] = text[at - unit];
        }
        CHECK(fread(wanted, 4, all->num_families, all->file) == all->num_families, FIXTURES);
        test_case(all, number, text, bytes, wanted);
        free(text);
    }
    EXPECT(fgetc(all->file) == EOF, "cases.bin continues");
}

// Both ways of merging give the same, in any order of ranks.
static void test_merging(Families* all) {
    uint64_t state = 1;
    BpeMerger_ merger;
    for (uint32_t i = 0; i < all->num_families; i++) {
        const Bpe* bpe = &all->families[i].bpe;
        bpe_merger_open_(&merger, bpe->num_ranks);
        for (int round = 0; round < 3000; round++) {
            unsigned char piece[BPE_SHORT_];
            int short_ids[BPE_SHORT_], long_ids[BPE_SHORT_], length;
            size_t n = 0;
            while (n < BPE_SHORT_) {
                state = state * 6364136223846793005u + 1442695040888963407u;
                const char* token = bpe_token(bpe, (int)((state >> 33) % (uint64_t)bpe->vocab_size), &length);
                for (int at = 0; at < length && n < BPE_SHORT_; at++) {
                    piece[n++] = (unsigned char)token[at];
                }
            }
            const size_t count = (size_t)bpe_merge_short_(bpe, piece, (int)n, short_ids);
            EXPECT(bpe_merge_long_(bpe, &merger, piece, n, long_ids) == count &&
                       memcmp(short_ids, long_ids, count * sizeof(int)) == 0,
                   "%s, piece %d", all->families[i].name, round);
        }
        bpe_merger_close_(&merger);
    }
}

// Which tokens stand before a document and end one, and what GGUF calls the form.
static void test_roles(const Families* all) {
    static const struct {
        const char *name, *start, *pre;
    } wanted[] = {{"gpt2", "<|endoftext|>", "gpt-2"},
                  {"smollm2", "<|endoftext|>", "smollm"},
                  {"qwen2", "<|endoftext|>", "qwen2"},
                  {"olmo", "<|endoftext|>", "olmo"},
                  {"llama3", "<|begin_of_text|>", "llama-bpe"},
                  {"shuffled", "<|endoftext|>", NULL},
                  {"nanochat", "<|bos|>", NULL},
                  {"glm4", "<|endoftext|>", "dbrx"},
                  {"gptoss", "<|endoftext|>", "gpt-4o"}};
    EXPECT(sizeof(wanted) / sizeof(wanted[0]) == all->num_families, "");
    for (uint32_t i = 0; i < all->num_families; i++) {
        const Bpe* bpe = &family_of(all, wanted[i].name)->bpe;
        int length;
        const char *start = bpe_token(bpe, bpe->eot, &length), *pre = bpe_gguf_pre(bpe);
        EXPECT((size_t)length == strlen(wanted[i].start) &&
                   memcmp(start, wanted[i].start, (size_t)length) == 0 && bpe_is_name(bpe, bpe->eot) &&
                   bpe_is_end(bpe, bpe->eot),
               "%s starts with %.*s", wanted[i].name, length, start);
        EXPECT(pre && wanted[i].pre ? strcmp(pre, wanted[i].pre) == 0 : pre == wanted[i].pre, "%s: %s",
               wanted[i].name, pre ? pre : "none");
        EXPECT(!bpe_is_like_gpt2(bpe), "%s", wanted[i].name);
    }
}

// Reads what was written: the same tokenizer, also where it was made again instead of kept.
static void test_written(Families* all) {
    for (uint32_t i = 0; i < all->num_families; i++) {
        Bpe *bpe = &all->families[i].bpe, again;
        char name[64], *written, *kept, error[ERROR_BYTES], path[PATH_MAX];
        size_t written_bytes, kept_bytes;
        snprintf(name, sizeof(name), "%s", all->families[i].name);
        const char* directory = test_path(name);
        mkdir(directory, 0777);
        bpe_write_hf(bpe, &bpe->card, directory, 64);
        bpe_path(path, directory, "tokenizer.json");
        CHECK(file_try_read(path, 1 << 20, &written, &written_bytes, error), "%s", error);
        snprintf(path, sizeof(path), FIXTURES "/%s.json", all->families[i].name);
        CHECK(file_try_read(path, 1 << 20, &kept, &kept_bytes, error), "%s", error);
        EXPECT(written_bytes == kept_bytes && memcmp(written, kept, kept_bytes) == 0, "%s", name);
        free(written);
        free(kept);

        const int num_kept = bpe->num_kept;
        bpe->num_kept = 0;
        bpe_write_hf(bpe, &bpe->card, directory, 64);
        bpe->num_kept = num_kept;
        bpe_open(&again, directory);
        EXPECT(bpe_checksum(&again) == bpe_checksum(bpe) && again.vocab_size == bpe->vocab_size &&
                   again.has_template == bpe->has_template,
               "%s", name);
        bpe_close(&again);
    }
}

enum { ADDED = 40 };

// Counts the neighbors in a text as `bpe` encodes it, and returns how often the most frequent pair
// that makes no token already stands there. Pieces are told by their blanks.
static int best_count(const Bpe* bpe, const int* ids, size_t count) {
    int best = 0;
    for (size_t i = 0; i + 1 < count; i++) {
        int here = 0, left_bytes, right_bytes;
        char both[1024];
        const char *left = bpe_token(bpe, ids[i], &left_bytes),
                   *right = bpe_token(bpe, ids[i + 1], &right_bytes);
        memcpy(both, left, (size_t)left_bytes);
        memcpy(both + left_bytes, right, (size_t)right_bytes);
        for (size_t k = i; k + 1 < count; k++) {
            here += ids[k] == ids[i] && ids[k + 1] == ids[i + 1];
        }
        const int is_inside = right[0] != ' ' && bpe_find(bpe, both, (size_t)(left_bytes + right_bytes)) < 0;
        best = is_inside && here > best ? here : best;
    }
    return best;
}

// A larger vocabulary has the tokens of the old one under their ids. Text encodes to the old
// tokens, some of them joined; the first new token is the most frequent pair.
static void test_extended(Family* family) {
    static const char word[] = " zygomorph"; // blank and letters are one piece in all patterns
    enum { WORDS = 300, ROOM = WORDS * (sizeof(word) - 1) };
    const int V = family->bpe.vocab_size;
    char text[ROOM];
    int old_ids[ROOM], ids[ROOM], length, old_length;
    for (size_t i = 0; i < ROOM; i++) { // words of different endings
        text[i] = i % 10 > 5 ? (char)('a' + i * 2654435761u % 4294967291u / 1000 % 6) : word[i % 10];
    }
    Bpe bpe, again;
    BpeTrainer trainer;
    BpeEncoder encoder;
    bpe_trainer_open(&trainer, 1);
    bpe_trainer_split_as(&trainer, &family->bpe);
    bpe_trainer_add(&trainer, 0, text, ROOM);
    bpe_trainer_extend(&trainer, &family->bpe, V + ADDED, NULL, NULL, &bpe);
    bpe_trainer_close(&trainer);
    for (int id = 0; id < V; id++) {
        const char *token = bpe_token(&bpe, id, &length), *old = bpe_token(&family->bpe, id, &old_length);
        EXPECT(length == old_length && memcmp(token, old, (size_t)length) == 0, "%s, token %d", family->name,
               id);
    }
    bpe_encoder_open(&encoder, &bpe);
    const size_t old_count = encode(family, text, ROOM, old_ids);
    const size_t count = bpe_encode(&encoder, text, ROOM, ids);
    int first = 0;
    for (size_t i = 0, at = 0; i < count; i++) { // each token is one of the old ones, or several
        bpe_token(&bpe, ids[i], &length);
        for (int left = length; left > 0 && at < old_count; left -= old_length, at++) {
            bpe_token(&family->bpe, old_ids[at], &old_length);
            EXPECT(old_length <= left, "%s, token %zu", family->name, i);
        }
    }
    const char* token = bpe_token(&bpe, V, &length);
    for (size_t i = 0; i + 1 < old_count; i++) { // where its two tokens stand side by side
        int left, right;
        const char* a = bpe_token(&family->bpe, old_ids[i], &left);
        const char* b = bpe_token(&family->bpe, old_ids[i + 1], &right);
        first += left + right == length && memcmp(token, a, (size_t)left) == 0 &&
                 memcmp(token + left, b, (size_t)right) == 0;
    }
    EXPECT(first == best_count(&family->bpe, old_ids, old_count), "%s: the first pair stands %d times",
           family->name, first);
    EXPECT(count < old_count - WORDS, "%s: %zu ids, before %zu", family->name, count, old_count);
    bpe_write(&bpe, test_path("tokenizer.json"));
    bpe_open(&again, test_path("tokenizer.json"));
    EXPECT(bpe_checksum(&again) == bpe_checksum(&bpe), "%s", family->name);
    bpe_close(&again);
    bpe_encoder_close(&encoder);
    bpe_close(&bpe);
}

TEST(bpe_families) {
    static Families all;
    families_open(&all);
    test_roles(&all);
    test_merging(&all);
    test_cases(&all);
    test_written(&all);
    for (uint32_t i = 0; i < all.num_families; i++) {
        test_extended(&all.families[i]);
    }
    families_close(&all);
}

// Ends of texts are in the files beside tokenizer.json, which are kept.
TEST(bpe_beside) {
    static const char generation[] = "{\"bos_token_id\": 640, \"eos_token_id\": [641, 642]}";
    static const char config[] =
        "{\"tokenizer_class\": \"X\", \"eos_token\": {\"content\": \"<|eot_id|>\"}, \"pad_token\": null}";
    char *text, error[ERROR_BYTES];
    size_t bytes;
    mkdir(test_path("beside"), 0777);
    mkdir(test_path("saved"), 0777);
    CHECK(file_try_read(FIXTURES "/llama3.json", 1 << 20, &text, &bytes, error), "%s", error);
    test_write("beside/tokenizer.json", text, bytes);
    test_write("beside/generation_config.json", generation, strlen(generation));
    test_write("beside/tokenizer_config.json", config, strlen(config));
    free(text);
    Bpe bpe;
    bpe_open(&bpe, test_path("beside"));
    const int eot = bpe.eot;
    EXPECT(bpe.card.num_ends >= 1 && bpe_is_end(&bpe, eot) && bpe_is_end(&bpe, eot + 2) &&
               !bpe_is_end(&bpe, 0),
           "");
    EXPECT(bpe_is_end(&bpe, 641) && bpe_is_end(&bpe, 642) && bpe.card.pad == -1, "");
    const ModelCard tokens = bpe.card; // the start token is no end
    EXPECT(tokens.start == eot && tokens.num_ends == 3 && tokens.ends[0] == 641 && tokens.ends[1] == 642 &&
               tokens.ends[2] == eot + 2,
           "%d ends, first %d", tokens.num_ends, tokens.ends[0]);
    bpe_write_hf(&bpe, &bpe.card, test_path("saved"), 64);
    bpe_close(&bpe);
    CHECK(file_try_read(test_path("saved/tokenizer_config.json"), 1 << 20, &text, &bytes, error), "%s",
          error);
    EXPECT(bytes == strlen(config) && memcmp(text, config, bytes) == 0, "%s", text);
    free(text);
}

static void open_split(const void* path) {
    Bpe bpe;
    bpe_open(&bpe, (const char*)path);
}

// A Split by a literal text is none by an expression; a refusal says what is wrong.
TEST(bpe_split_variants) {
    static const char* const cases[][3] = {
        {"{\"Regex\":", "{\"String\":", "splits text at the literal string"},
        {"{\"Regex\":", "{\"Glob\":", "a pattern of kind Glob, wanted Regex or String"},
        {"\"invert\":false", "\"invert\":true",
         "behavior Isolated and invert true, wanted Isolated and false"},
        {"{\"SpecialToken\":", "{\"Special\":", "the post_processor has a Special, wanted SpecialToken"},
    };
    char *text, error[ERROR_BYTES];
    size_t bytes;
    CHECK(file_try_read(FIXTURES "/llama3.json", 1 << 20, &text, &bytes, error), "%s", error);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char* at = strstr(text, cases[i][0]);
        char* changed = (char*)check_alloc(bytes + 64, 1, "a tokenizer");
        CHECK(at, "%s is not in the fixture", cases[i][0]);
        snprintf(changed, bytes + 64, "%.*s%s%s", (int)(at - text), text, cases[i][1],
                 at + strlen(cases[i][0]));
        EXPECT(test_dies(open_split, test_write("split.json", changed, strlen(changed)), EXIT_FAILURE,
                         cases[i][2]),
               "%s", cases[i][1]);
        free(changed);
    }
    free(text);
}
