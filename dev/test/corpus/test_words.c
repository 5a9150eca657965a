// test_words.c -- words.h: which texts have the same words; the runs of words against a plain loop.
#include "llmc/corpus/words.h"
#include "dev/test/lib/test.h"

static BpeRules test_rules(void) {
    const BpePattern pattern = {BPE_GPT2, 0, 0, 0, 0};
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
