// test_bpe_split.c -- bpe_split.h: pieces longer than BPE_MAX_PIECE are cut where it says, and a
// text that is divided at bpe_last_cut has the same ids as the whole text.
#define BPE_MAX_PIECE 5000
#define BPE_ENCODE_IMPLEMENTATION
#include "dev/test/lib/slow_regex.h"
#include "dev/test/lib/texts.h"

enum { MOST = 40000 };

typedef struct {
    int ids[MOST];
    size_t count;
} Ids;

// Appends the ids of a text, which lies in memory of exactly its size, for the address sanitizer.
static void encode(BpeEncoder* encoder, const char* text, size_t bytes, Ids* out) {
    char* copy = (char*)malloc(bytes + 1);
    memcpy(copy + 1, text, bytes);
    out->count += bpe_encode(encoder, copy + 1, bytes, out->ids + out->count);
    free(copy);
}

// Returns bpe_last_cut of a text in memory of exactly its size.
static size_t last_cut(const BpeEncoder* encoder, const char* text, size_t bytes) {
    char* copy = (char*)malloc(bytes + 1);
    memcpy(copy + 1, text, bytes);
    const size_t cut = bpe_last_cut(&encoder->bpe->rules, copy + 1, bytes);
    free(copy);
    return cut;
}

static void expect_same(const Ids* got, const Ids* want, const char* what, int round) {
    EXPECT(got->count == want->count && memcmp(got->ids, want->ids, want->count * sizeof(int)) == 0,
           "%s, text %d: %zu ids, wanted %zu", what, round, got->count, want->count);
}

// A run of one character has the ids of its parts of as many whole characters as fit into
// BPE_MAX_PIECE.
static void test_runs(BpeEncoder* encoder) {
    static Ids whole, parts;
    static char text[MOST];
    for (int i = 0; i < TEXT_UNITS; i++) {
        const size_t n = strlen(text_units[i]), part = BPE_MAX_PIECE / n * n;
        size_t bytes = 0;
        for (; bytes + n <= 3 * BPE_MAX_PIECE + 100; bytes += n) {
            memcpy(text + bytes, text_units[i], n);
        }
        const int digits = encoder->bpe->rules.pattern.digits; // of a piece
        const int is_cut = text_units[i][0] == '1' && digits > 0 && BPE_MAX_PIECE % digits != 0;
        const int is_run =
            !is_cut && strchr("\n\t -!'astA/1\xC3\xC2\xE3\xE6\xE2\xF0", text_units[i][0]) && n != 2;
        for (size_t extra = 0; is_run && extra < 5; extra++) {
            whole.count = parts.count = 0;
            const size_t end = 3 * part + extra * n;
            for (size_t at = 0; at < end; at += part) {
                encode(encoder, text + at, end - at < part ? end - at : part, &parts);
            }
            encode(encoder, text, end, &whole);
            expect_same(&whole, &parts, text_units[i], (int)extra);
        }
    }
}

// Units one after another, many of them often enough for a piece that is too long, or nearly.
static size_t random_runs(uint64_t* state, char* text, int valid) {
    size_t bytes = 0;
    while (random_below(state, 12)) {
        const char* unit = text_units[random_below(state, valid ? TEXT_VALID_UNITS : TEXT_UNITS)];
        const size_t n = strlen(unit), near = BPE_MAX_PIECE / n - 2 + random_below(state, 5);
        const size_t kind = random_below(state, 4);
        size_t times = kind == 0 ? near : kind == 1 ? random_below(state, 3 * BPE_MAX_PIECE) / n : 1;
        for (; times > 0 && bytes + n <= MOST; times--, bytes += n) {
            memcpy(text + bytes, unit, n);
        }
    }
    return bytes;
}

// Each block of a text ends where bpe_last_cut says, and grows while it says nothing.
static void encode_blocks(BpeEncoder* encoder, const char* text, size_t bytes, size_t block_bytes, Ids* out) {
    for (size_t begin = 0, n; begin < bytes; begin += n) {
        size_t known = block_bytes < bytes - begin ? block_bytes : bytes - begin;
        for (n = bytes - begin; known < bytes - begin; known++) {
            const size_t cut = last_cut(encoder, text + begin, known);
            EXPECT(cut > 0 || known < 2 * BPE_MAX_PIECE + 8, "%zu bytes without a cut", known);
            if (cut > 0) {
                n = cut;
                break;
            }
            known += known < BPE_MAX_PIECE - 100 ? 100 : 0;
        }
        encode(encoder, text + begin, n, out);
    }
}

static void test_divided(BpeEncoder* encoder, int rounds) {
    static const size_t blocks[] = {1, 100, 4999, 5001, 12000};
    static Ids whole, divided;
    static char text[MOST];
    uint64_t state = 17;
    for (int round = 0; round < rounds; round++) {
        const int has_runs = round % 3;
        const size_t bytes = has_runs ? random_runs(&state, text, round % 2)
                                      : random_text(&state, text, random_below(&state, 300), round % 2);
        whole.count = 0;
        encode(encoder, text, bytes, &whole);
        divided.count = 0;
        encode_blocks(encoder, text, bytes, blocks[round % 5], &divided);
        expect_same(&divided, &whole, "blocks", round);
    }
}

// Every end of a short text: a cut is safe whatever follows.
static void test_short(BpeEncoder* encoder, int rounds) {
    static Ids whole, parts;
    uint64_t state = 1;
    size_t num_cuts = 0;
    for (int round = 0; round < rounds; round++) {
        char text[64];
        const size_t bytes = random_text(&state, text, 1 + random_below(&state, sizeof(text)), round % 2);
        whole.count = 0;
        encode(encoder, text, bytes, &whole);
        for (size_t known = 1; known <= bytes; known++) {
            const size_t cut = last_cut(encoder, text, known);
            parts.count = 0;
            encode(encoder, text, cut, &parts);
            encode(encoder, text + cut, bytes - cut, &parts);
            EXPECT(cut < known, "%zu", cut);
            expect_same(&parts, &whole, "short", round);
            num_cuts += cut > 0;
        }
    }
    EXPECT(num_cuts > 16 * (size_t)rounds, "%zu", num_cuts);
}

// Pieces are those of the regular expression, wherever they lie in blocks of 64 bytes.
static void test_pieces(BpeRules* rules, const SlowPattern* slow) {
    uint64_t state = 3;
    for (int round = 0; round < 2000; round++) {
        char text[400];
        const size_t bytes = random_text(&state, text, 1 + random_below(&state, sizeof(text)), round % 2);
        BpeSplitter splitter = bpe_splitter(rules, (const unsigned char*)text, 0, bytes);
        size_t end = 0;
        while (splitter.at < bytes) {
            uint16_t cuts[BPE_CUTS];
            const size_t base = splitter.at, n = bpe_split(&splitter, cuts);
            for (size_t i = 0; i < n; i++) {
                end = slow_end(slow, text, bytes, end);
                EXPECT(end == base + cuts[i], "text %d: a piece ends at %zu, wanted %zu", round,
                       base + cuts[i], end);
            }
        }
        EXPECT(end == bytes || slow_end(slow, text, bytes, end) == bytes, "text %d", round);
    }
}

// A blank that starts in one block and ends in the next, and runs of blanks of many blocks.
static void test_blanks(BpeRules* rules, const SlowPattern* slow) {
    static const char* const ends[] = {"", "\n", "a", "1", "!", "\x80", "\r\n a"};
    for (size_t before = 0; before < 70; before += 1 + before % 3) {
        for (size_t blanks = 0; blanks < 230; blanks += 1 + blanks / 4) {
            for (size_t kind = 0; kind < 3 * sizeof(ends) / sizeof(ends[0]); kind++) {
                char text[1000] = "";
                memset(text, '!', before);
                strcpy(text + before, "x\n");
                for (size_t i = 0; i < blanks; i++) {
                    strcat(text, kind % 3 == 0 ? " " : kind % 3 == 1 ? "\xE3\x80\x80" : i % 2 ? "\n" : "\t");
                }
                strcat(text, ends[kind / 3]);
                const size_t bytes = strlen(text);
                BpeSplitter splitter = bpe_splitter(rules, (const unsigned char*)text, 0, bytes);
                uint16_t cuts[BPE_CUTS];
                const size_t n = bpe_split(&splitter, cuts);
                for (size_t i = 0, end = 0; i < n; i++) {
                    end = slow_end(slow, text, bytes, end);
                    EXPECT(end == cuts[i], "%zu before %zu blanks, %zu: %d, wanted %zu", before, blanks, kind,
                           cuts[i], end);
                }
            }
        }
    }
}

TEST(bpe_split) {
    Bpe bpe = open_pairs();
    for (int i = 0; i < SLOW_PATTERNS; i++) {
        BpeEncoder encoder;
        bpe_rules_close(&bpe.rules);
        bpe_rules_open(&bpe.rules, slow_patterns[i].pattern);
        test_pieces(&bpe.rules, &slow_patterns[i]);
        test_blanks(&bpe.rules, &slow_patterns[i]);
        bpe_encoder_open(&encoder, &bpe);
        test_runs(&encoder);
        test_divided(&encoder, i == 0 ? 300 : 40);
        test_short(&encoder, i == 0 ? 3000 : 500);
        bpe_encoder_close(&encoder);
    }
    bpe_close(&bpe);
}
