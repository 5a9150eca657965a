// test_dedup.c -- dedup_keys.h and dedup_groups.h: MinHash against exact Jaccard similarities; how
// many pairs share a key; groups against a plain loop, in any amount of memory.
#define DEDUP_GROUPS_IMPLEMENTATION
#include "llmc/corpus/dedup_groups.h"
#include <math.h>

#include "dev/test/lib/test.h"

static uint32_t random_number(uint64_t* state, uint32_t n) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 33) % n);
}

// ---- keys ----

typedef struct {
    BpeRules rules;
    DedupFunctions functions;
    Words words;
} Tool;

static void tool_open(Tool* tool) {
    const BpePattern pattern = {.style = BPE_GPT2, .normalizes = 1};
    memset(tool, 0, sizeof(*tool));
    bpe_rules_open(&tool->rules, pattern);
    dedup_functions(&tool->functions);
}

static void tool_close(Tool* tool) {
    words_close(&tool->words);
    bpe_rules_close(&tool->rules);
}

static void keys_of(Tool* tool, DedupKey* keys, Dedup dedup, const char* text) {
    words_split(&tool->words, &tool->rules, text, strlen(text));
    dedup_keys(keys, dedup, &tool->functions, &tool->words, text, strlen(text));
}

static int shares_key(Tool* tool, Dedup dedup, const char* a, const char* b) {
    DedupKey x[DEDUP_BANDS], y[DEDUP_BANDS];
    int shares = 0;
    keys_of(tool, x, dedup, a);
    keys_of(tool, y, dedup, b);
    for (int i = 0; i < dedup_num_keys(dedup); i++) {
        shares |= memcmp(&x[i], &y[i], sizeof(DedupKey)) == 0;
    }
    return shares;
}

TEST(exact) {
    Tool tool;
    tool_open(&tool);
    EXPECT(shares_key(&tool, DEDUP_EXACT, "a\r\nb\n\r\n", "a\nb\r\n\n"), "line ends");
    EXPECT(!shares_key(&tool, DEDUP_EXACT, "a\rb", "a\nb") &&
               !shares_key(&tool, DEDUP_EXACT, "a\r\r\nb", "a\nb"),
           "CR");
    EXPECT(!shares_key(&tool, DEDUP_EXACT, "a b", "a  b") && !shares_key(&tool, DEDUP_EXACT, "a", "A"), "");
    EXPECT(!shares_key(&tool, DEDUP_EXACT, "a", "a "), "a blank at the end");
    tool_close(&tool);
}

TEST(near_edges) {
    Tool tool;
    tool_open(&tool);
    EXPECT(shares_key(&tool, DEDUP_NEAR, "One two.", "one, two") &&
               !shares_key(&tool, DEDUP_NEAR, "one two", "two one"),
           "few words");
    EXPECT(shares_key(&tool, DEDUP_NEAR, "...", "...") && !shares_key(&tool, DEDUP_NEAR, "...", "..!"),
           "no words");
    tool_close(&tool);
}

// Two texts of `length` different words that share the first `shared`.
enum { LENGTH = 300 };
static void make_pair(uint64_t* state, int shared, char* a, char* b) {
    for (int i = 0; i < LENGTH; i++) {
        const uint32_t word = random_number(state, 1u << 30);
        a += sprintf(a, "%u ", word);
        b += sprintf(b, "%u ", i < shared ? word : random_number(state, 1u << 30));
    }
}

// Their exact similarity: all shingles differ, but for those within the shared words.
static double similarity(int shared) {
    const double both = shared - DEDUP_SHINGLE + 1, each = LENGTH - DEDUP_SHINGLE + 1;
    return both / (2 * each - both);
}

// The part of equal smallest values estimates the similarity s: over 40 pairs its mean has the
// standard deviation sqrt(s (1 - s) / (40 * 112)), and the number of pairs that share a key that of
// a binomial; both must be within 5 of these.
TEST(similarity) {
    enum { PAIRS = 40 };
    static const int shared[] = {140, 205, 240, 265, 285};
    static char a[LENGTH * 12], b[LENGTH * 12];
    uint32_t x[DEDUP_HASHES], y[DEDUP_HASHES];
    uint64_t state = 3;
    Tool tool;
    tool_open(&tool);
    for (size_t i = 0; i < sizeof(shared) / sizeof(shared[0]); i++) {
        const double s = similarity(shared[i]), p = 1 - pow(1 - pow(s, DEDUP_ROWS), DEDUP_BANDS);
        int equal = 0, pairs = 0;
        for (int n = 0; n < PAIRS; n++) {
            make_pair(&state, shared[i], a, b);
            words_split(&tool.words, &tool.rules, a, strlen(a));
            dedup_smallest(x, &tool.functions, &tool.words);
            words_split(&tool.words, &tool.rules, b, strlen(b));
            dedup_smallest(y, &tool.functions, &tool.words);
            for (int k = 0; k < DEDUP_HASHES; k++) {
                equal += x[k] == y[k];
            }
            pairs += shares_key(&tool, DEDUP_NEAR, a, b);
        }
        const double part = (double)equal / (PAIRS * DEDUP_HASHES), found = (double)pairs / PAIRS;
        EXPECT(fabs(part - s) < 5 * sqrt(s * (1 - s) / (PAIRS * DEDUP_HASHES)), "%.3f, wanted %.3f", part, s);
        EXPECT(fabs(found - p) < 5 * sqrt(p * (1 - p) / PAIRS) + 1e-3, "%.3f of pairs, wanted %.3f", found,
               p);
    }
    tool_close(&tool);
}

// The values of different functions at the same shingle are independent: equal bands are as rare as
// the formula says for unrelated texts, which is never.
TEST(unrelated) {
    static char a[LENGTH * 12], b[LENGTH * 12];
    uint64_t state = 9;
    Tool tool;
    tool_open(&tool);
    for (int n = 0; n < 200; n++) {
        make_pair(&state, 0, a, b);
        EXPECT(!shares_key(&tool, DEDUP_NEAR, a, b), "pair %d", n);
    }
    tool_close(&tool);
}

// ---- groups ----

enum { DOCUMENTS = 150000, KEYS = 3 };

// Few documents share a key, so that groups are chains of several documents.
static DedupKey key_of(int key, int document) {
    const uint64_t value =
        random_number(&(uint64_t){(uint64_t)document * 31 + (uint64_t)key * 7777777}, DOCUMENTS) *
        UINT64_C(0x9E3779B97F4A7C15);
    const DedupKey k = {value * 77773 + 5, value ^ value << 29};
    return k;
}

static void make_groups(DedupGroups* groups, uint64_t bytes) {
    dedup_groups_open(groups, DOCUMENTS, bytes);
    for (int key = 0; key < KEYS; key++) {
        for (uint64_t part = 0; part < groups->parts; part++) {
            dedup_groups_start(groups, part);
            for (int i = 0; i < DOCUMENTS; i++) {
                dedup_groups_add(groups, (uint32_t)i, key_of(key, i));
            }
        }
    }
    dedup_groups_finish(groups);
}

// Takes the smaller of two documents' firsts over every shared key until nothing changes.
static void plain_groups(uint32_t* first) {
    int changed = 1;
    static uint32_t by_key[DOCUMENTS];
    for (int i = 0; i < DOCUMENTS; i++) {
        first[i] = (uint32_t)i;
    }
    while (changed) {
        changed = 0;
        for (int key = 0; key < KEYS; key++) {
            memset(by_key, 0xFF, sizeof(by_key));
            for (int pass = 0; pass < 2; pass++) {
                for (int i = 0; i < DOCUMENTS; i++) {
                    const uint32_t value =
                        random_number(&(uint64_t){(uint64_t)i * 31 + (uint64_t)key * 7777777}, DOCUMENTS);
                    const uint32_t lowest = by_key[value] < first[i] ? by_key[value] : first[i];
                    changed |= lowest != first[i];
                    first[i] = by_key[value] = lowest;
                }
            }
        }
    }
}

TEST(groups) {
    static uint32_t wanted[DOCUMENTS];
    const uint64_t least = DOCUMENTS * 4 + DEDUP_FIXED_BYTES_;
    const uint64_t bytes[] = {least, least + 1000000, dedup_most_documents(1 << 30), 1 << 30};
    DedupGroups groups;
    plain_groups(wanted);
    EXPECT(dedup_most_documents(least) == DOCUMENTS, "%llu", (unsigned long long)dedup_most_documents(least));
    EXPECT(dedup_most_in_one_part(1 << 30) == (1 << 30) / 44, "");
    for (int i = 0; i < 4; i++) {
        make_groups(&groups, bytes[i]);
        EXPECT(groups.parts == (i == 0 ? 5 : i == 1 ? 3 : 1), "%llu parts", (unsigned long long)groups.parts);
        EXPECT(memcmp(groups.first, wanted, sizeof(wanted)) == 0, "in %llu bytes",
               (unsigned long long)bytes[i]);
        dedup_groups_close(&groups);
    }
}
