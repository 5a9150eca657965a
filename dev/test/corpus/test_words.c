// test_words.c -- words.h: which texts have the same words, by Python
// (dev/ref/make_case_fixtures.py) and by hand; the runs of words against a plain loop.
#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/corpus/words.h"
#include "dev/test/lib/test.h"

static BpeRules test_rules(void) {
    const BpePattern pattern = {.style = BPE_GPT2, .normalizes = 1};
    BpeRules rules;
    bpe_rules_open(&rules, pattern);
    return rules;
}

// The words of `text` must be those of `wanted`, whose words one blank separates.
static void expect_words(const char* text, const char* wanted) {
    BpeRules rules = test_rules();
    Words a = {.count = 0}, b = {.count = 0};
    words_split(&a, &rules, text, strlen(text));
    size_t n = 0;
    for (const char* at = wanted; *at; n++) {
        const size_t bytes = strcspn(at, " ");
        words_split(&b, &rules, at, bytes);
        EXPECT(b.count == 1 && n < a.count && a.list[n].hash == b.list[0].hash, "'%s': word %zu is not %.*s",
               text, n, (int)bytes, at);
        at += bytes + (at[bytes] == ' ');
    }
    EXPECT(a.count == n, "'%s': %zu words, wanted %zu", text, a.count, n);
    words_close(&a);
    words_close(&b);
    bpe_rules_close(&rules);
}

TEST(split) {
    expect_words("", "");
    expect_words(" ... -- !\n", "");
    expect_words("The cat's Hat,\n\t(well-known)  \xC2\xA0 e.g. 3.14", "the cats hat wellknown eg 314");
    expect_words("Gr\xC3\xBC\xC3\x9F"
                 "e \xE2\x80\x9Chi\xE2\x80\x9D",
                 "Gr\xC3\xBC\xC3\x9F"
                 "e hi");
    expect_words("\xE4\xB8\x96\xE7\x95\x8C\xE3\x80\x82"
                 "abc\xE4\xB8\x96",
                 "\xE4\xB8\x96 \xE7\x95\x8C abc \xE4\xB8\x96");
    expect_words("a\xFF"
                 "b \x80",
                 "ab"); // bytes that are no UTF-8
}

// Case does not count, nor how accents are written.
TEST(canonical) {
    expect_words("STRASSE stra\xC3\x9F"
                 "e Stra\xE1\xBA\x9E"
                 "e",
                 "strasse strasse strasse");
    expect_words("cafe\xCC\x81 CAFE\xCC\x81S CAF\xC3\x89", "caf\xC3\xA9 caf\xC3\xA9s caf\xC3\xA9");
    expect_words("\xE3\x81\x8B\xE3\x82\x99\xE3\x81\x8B", "\xE3\x81\x8C \xE3\x81\x8B");
    expect_words("\xE1\x84\x92\xE1\x85\xA1\xE1\x86\xAB \xCE\x90", "\xED\x95\x9C \xCE\xAA\xCC\x81");
    expect_words("a\xCC\x81\xFF"
                 "b",
                 "\xC3\xA1"
                 "b");
}

// Sets the hash of the first word of a text.
static uint64_t hash_of(const BpeRules* rules, Words* words, const char* text, size_t bytes) {
    words_split(words, rules, text, bytes);
    EXPECT(words->count == 1, "%.*s: %zu words", (int)bytes, text, words->count);
    return words->list[0].hash;
}

// Words that Python folds alike have the same hash, others do not.
TEST(case_folding) {
    BpeRules rules = test_rules();
    Words words = {.count = 0};
    size_t bytes, count = 0;
    char *text, error[ERROR_BYTES];
    CHECK(file_try_read("dev/ref/fixtures/case_folding.txt", 1 << 20, &text, &bytes, error), "%s", error);
    uint64_t last = 0;
    const char* last_text = "";
    size_t last_bytes = 0;
    for (const char* at = text; *at; count++) {
        const size_t word = strcspn(at, "\t"), folded = strcspn(at + word + 1, "\n");
        const char* wanted = at + word + 1;
        const uint64_t hash = hash_of(&rules, &words, at, word);
        EXPECT(hash == hash_of(&rules, &words, wanted, folded), "%.*s is not %.*s", (int)word, at,
               (int)folded, wanted);
        const int is_same = folded == last_bytes && memcmp(wanted, last_text, folded) == 0;
        EXPECT((hash == last) == is_same, "%.*s and the one before", (int)word, at);
        last = hash;
        last_text = wanted;
        last_bytes = folded;
        at = wanted + folded + 1;
    }
    EXPECT(count > 4000, "%zu", count);
    free(text);
    words_close(&words);
    bpe_rules_close(&rules);
}

TEST(places) {
    static const char text[] = " \"Two, words\".";
    BpeRules rules = test_rules();
    Words words = {.count = 0};
    words_split(&words, &rules, text, strlen(text));
    EXPECT(words.count == 2 && words.list[0].begin == 2 && words.list[0].end == 5 &&
               words.list[1].begin == 7 && words.list[1].end == 12,
           "");
    words_close(&words);
    bpe_rules_close(&rules);
}

// Two runs have the same hash if and only if they have the same words: 400 words of 3 kinds have
// each run of 4 words about 5 times.
TEST(runs) {
    enum { WORDS_ = 400, RUN = 4 };
    BpeRules rules = test_rules();
    Words words = {.count = 0};
    char text[2 * WORDS_];
    uint64_t state = 7;
    for (int i = 0; i < WORDS_; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        text[2 * i] = (char)('a' + (state >> 33) % 3);
        text[2 * i + 1] = ' ';
    }
    words_split(&words, &rules, text, sizeof(text));
    words_runs(&words, RUN);
    EXPECT(words.num_runs == WORDS_ - RUN + 1, "%zu", words.num_runs);
    for (size_t i = 0; i < words.num_runs; i++) {
        for (size_t j = 0; j < i; j++) {
            const int same = memcmp(text + 2 * i, text + 2 * j, 2 * RUN) == 0;
            EXPECT((words.runs[i] == words.runs[j]) == same, "%zu, %zu", i, j);
        }
    }
    words_runs(&words, WORDS_);
    EXPECT(words.num_runs == 1, "");
    words_runs(&words, WORDS_ + 1);
    EXPECT(words.num_runs == 0, "");
    words_close(&words);
    bpe_rules_close(&rules);
}
