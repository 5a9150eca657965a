// test_bpe_encode.c -- bpe_encode.h: against a slow reference with its own vocabulary, and with
// GPT2_VOCAB=.../gpt2.tiktoken against tiktoken's ids for dev/ref/fixtures/bpe_cases.bin.
#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/bpe_files.h"
#include "dev/test/lib/slow_regex.h"
#include "dev/test/lib/test.h"
#include "dev/test/lib/texts.h"
#include <time.h>

static uint64_t random_state = 20240328;

// ---- ids in memory of exactly their size: the address sanitizer sees writes past it ----

typedef struct {
    int* ids;
    size_t count;
} Ids;

static Ids encode(BpeEncoder* encoder, Text text) {
    Ids out = {(int*)malloc((text.length ? text.length : 1) * sizeof(int)), 0};
    out.count = bpe_encode(encoder, text.bytes, text.length, out.ids);
    return out;
}

static int same_ids(Ids a, Ids b) {
    return a.count == b.count && memcmp(a.ids, b.ids, a.count * sizeof(int)) == 0;
}

// The text comes in pieces of 1 to `max` bytes, as from a pipe, and is encoded up to the last cut.
static Ids encode_in_parts(BpeEncoder* encoder, Text text, uint32_t max) {
    Ids out = {(int*)malloc((text.length ? text.length : 1) * sizeof(int)), 0};
    for (size_t begin = 0, end = 0; begin < text.length;) {
        end += 1 + random_below(&random_state, max);
        end = end < text.length ? end : text.length;
        const Text known = text_of(text.bytes + begin, end - begin);
        const size_t bytes =
            end < text.length ? bpe_last_cut(&encoder->bpe->rules, known.bytes, known.length) : known.length;
        out.count += bpe_encode(encoder, known.bytes, bytes, out.ids + out.count);
        begin += bytes;
        free(known.bytes);
    }
    return out;
}

static int decodes_to(const Bpe* bpe, Ids ids, Text text) {
    size_t at = 0;
    for (size_t i = 0; i < ids.count; i++) {
        int length;
        const char* token = bpe_token(bpe, ids.ids[i], &length);
        if ((size_t)length > text.length - at || memcmp(token, text.bytes + at, (size_t)length) != 0) {
            return 0;
        }
        at += (size_t)length;
    }
    return at == text.length;
}

// ---- the reference: splitting and merging by their definitions ----

static Ids reference_encode(const Bpe* bpe, const SlowPattern* pattern, Text text) {
    Ids out = {(int*)malloc((text.length ? text.length : 1) * sizeof(int)), 0};
    // where the tokens of a piece begin
    size_t* cuts = (size_t*)malloc((text.length + 1) * sizeof(size_t));
    for (size_t begin = 0, end; begin < text.length; begin = end) {
        end = slow_end(pattern, text.bytes, text.length, begin);
        size_t n = end - begin;
        for (size_t i = 0; i <= n; i++) {
            cuts[i] = begin + i;
        }
        for (;;) {
            int lowest = INT_MAX;
            size_t at = 0;
            for (size_t i = 0; i + 2 <= n; i++) {
                const int id = bpe_find(bpe, text.bytes + cuts[i], cuts[i + 2] - cuts[i]);
                if (0 <= id && id < lowest) {
                    lowest = id;
                    at = i;
                }
            }
            if (lowest == INT_MAX) {
                break;
            }
            memmove(&cuts[at + 1], &cuts[at + 2], (n - at - 1) * sizeof(size_t));
            n--;
        }
        for (size_t i = 0; i < n; i++) {
            out.ids[out.count++] = bpe_find(bpe, text.bytes + cuts[i], cuts[i + 1] - cuts[i]);
        }
    }
    free(cuts);
    return out;
}

// ---- a small vocabulary ----

static const char small_merges[] =
    "#version: 0.2\n"
    "a a\naa aa\naa a\naaaa aaaa\n" // 256 ..
    "t h\nth e\n\xC4\xA0 the\n"     // 260 ..; U+0120 spells the space
    "' s\n' t\nl l\n\xC4\xA0 \xC4\xA0\n\xC4\x8A \xC4\x8A\n1 1\n! !\n\xC3\x83 \xC2\xA9\n";

static Bpe open_small(void) {
    Bpe bpe;
    bpe_open(&bpe, test_write("small.bpe", small_merges, strlen(small_merges)));
    return bpe;
}

static void test_small(void) {
    Bpe bpe = open_small();
    EXPECT(bpe.vocab_size == 256 + 15 + 1 && bpe.eot == 271, "");
    EXPECT(bpe_find(&bpe, "!", 1) == 0 && bpe_find(&bpe, "~", 1) == 93 && bpe_find(&bpe, "\xA1", 1) == 94,
           "");
    EXPECT(bpe_find(&bpe, "\0", 1) == 188 && bpe_find(&bpe, " ", 1) == 220 &&
               bpe_find(&bpe, "\xAD", 1) == 255,
           "");
    EXPECT(bpe_find(&bpe, " the", 4) == 262 && bpe_find(&bpe, "\n\n", 2) == 267, "");
    EXPECT(bpe_find(&bpe, "\xC3\xA9", 2) == 270 && bpe_find(&bpe, "x the", 5) == -1, "");
    EXPECT(bpe_find(&bpe, "<|endoftext|>", 13) == -1 && bpe_find(&bpe, "", 0) == -1, "");
    int length;
    EXPECT(memcmp(bpe_token(&bpe, 271, &length), "<|endoftext|>", 13) == 0 && length == 13, "");

    BpeEncoder encoder;
    bpe_encoder_open(&encoder, &bpe);
    const Text text = text_of("the the's aaaaa", 15);
    const Ids ids = encode(&encoder, text);
    const int wanted[] = {261, 262, 263, 220, 257, 64};
    EXPECT(ids.count == 6 && memcmp(ids.ids, wanted, sizeof(wanted)) == 0, "%zu ids", ids.count);
    free(text.bytes);
    free(ids.ids);
    const Text empty = text_of("", 0);
    const Ids none = encode(&encoder, empty);
    EXPECT(none.count == 0, "");
    free(empty.bytes);
    free(none.ids);
    bpe_encoder_close(&encoder);
    bpe_close(&bpe);
}

// A text of up to `max` units of all kinds, each a few times; `valid` without bytes that are no
// UTF-8.
static Text random_pieces(uint32_t max, int valid) {
    static const char* units[] = {
        "a", "aa", "t", "the", " ", " ", "\n", "\t", "\v", "'", "s", "'s", "'ll", "'v", "e", "1", "!", "\r",
        "S", "\xC5\xBF", "\xC3\xA9", "\xC2\xA0", "\xE3\x80\x80", "\xE6\xBC\xA2", "\xF0\xA0\x80\x80",
        "\xF0\x9F\x98\x80", "\xC2\xBD", "\xE2\x80\x99", "\xC2\x85",
        // no UTF-8: lone continuation, cut characters, too long forms, a surrogate, above U+10FFFF,
        // no lead at all
        "\x80", "\xC3", "\xE3\x80", "\xF0\x9F\x98", "\xC0\x80", "\xC1\xBF", "\xE0\x80\xA0", "\xED\xA0\x80",
        "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xF0\x80\x80\xA0"};
    char bytes[8192];
    size_t length = 0;
    for (uint32_t i = 0, n = random_below(&random_state, max + 1); i < n; i++) {
        const char* unit = units[random_below(&random_state, valid ? 29 : sizeof(units) / sizeof(units[0]))];
        for (uint32_t times = random_below(&random_state, 8) ? 1 : 1 + random_below(&random_state, 9);
             times > 0; times--) {
            memcpy(bytes + length, unit, strlen(unit));
            length += strlen(unit);
        }
    }
    return text_of(bytes, length);
}

// Encodes with this pattern.
static void test_against_reference(Bpe* bpe, const SlowPattern* pattern, int rounds) {
    bpe_rules_close(&bpe->rules);
    bpe_rules_open(&bpe->rules, pattern->pattern);
    BpeEncoder encoder;
    bpe_encoder_open(&encoder, bpe);
    for (int i = 0; i < rounds; i++) {
        const Text text = random_pieces(i % 4 ? 60 : 200, i % 2);
        const Ids want = reference_encode(bpe, pattern, text);
        for (int again = 0; again < 2; again++) { // the second time out of the cache
            const Ids got = encode(&encoder, text);
            EXPECT(same_ids(got, want), "text %d of %zu bytes, time %d", i, text.length, again);
            EXPECT(decodes_to(bpe, got, text), "text %d", i);
            free(got.ids);
        }
        const Ids parts = encode_in_parts(&encoder, text, i % 3 == 0 ? 1 : i % 3 == 1 ? 5 : 200);
        EXPECT(same_ids(parts, want), "text %d of %zu bytes, in parts", i, text.length);
        free(parts.ids);
        free(want.ids);
        free(text.bytes);
    }
    bpe_encoder_close(&encoder);
}

// Both ways of merging, on pieces that look like tokens put together.
static void test_merging(const Bpe* bpe, int rounds) {
    BpeMerger_ merger;
    bpe_merger_open_(&merger, bpe->num_ranks);
    for (int i = 0; i < rounds; i++) {
        unsigned char piece[BPE_SHORT_];
        int short_ids[BPE_SHORT_], long_ids[BPE_SHORT_];
        const size_t n = 1 + random_below(&random_state, BPE_SHORT_);
        for (size_t at = 0; at < n;) {
            int length;
            const char* token = bpe_token(bpe, (int)random_below(&random_state, (uint32_t)bpe->eot), &length);
            for (uint32_t times = 1 + random_below(&random_state, 4); times > 0; times--) {
                const size_t part = (size_t)length < n - at ? (size_t)length : n - at;
                memcpy(piece + at, token, part);
                at += part;
            }
        }
        const size_t short_count = (size_t)bpe_merge_short_(bpe, piece, (int)n, short_ids);
        const size_t long_count = bpe_merge_long_(bpe, &merger, piece, n, long_ids);
        const Ids a = {short_ids, short_count}, b = {long_ids, long_count};
        EXPECT(same_ids(a, b), "piece %d of %zu bytes: %zu and %zu ids", i, n, short_count, long_count);
    }
    bpe_merger_close_(&merger);
}

// Word number k of many: 1 to 60 letters that rarely merge.
static size_t spell_word(uint32_t k, char word[64]) {
    static const char letters[] = "aaaattthhheeesrx";
    uint64_t state = ((uint64_t)k + 1) * 0x9E3779B97F4A7C15;
    const size_t n = 1 + (state >> 60 ? (size_t)(state >> 40) % 12 : (size_t)(state >> 40) % 60);
    for (size_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        word[i] = letters[state >> 60];
    }
    return n;
}

// Encodes more different words than the cache holds. Most appear once, some appear again soon.
static void test_many_pieces(const Bpe* bpe, int words) {
    const size_t room = 62 * (size_t)words;
    Text text = {(char*)malloc(room), 0};
    Ids want = {(int*)malloc(room * sizeof(int)), 0};
    BpeMerger_ merger;
    BpeEncoder encoder;
    bpe_merger_open_(&merger, bpe->num_ranks);
    bpe_encoder_open(&encoder, bpe);
    for (int i = 0; i < words; i++) {
        char* piece = text.bytes + text.length;
        piece[0] = ' ';
        const uint32_t k =
            i % 3 ? (uint32_t)i : (uint32_t)i - random_below(&random_state, (uint32_t)(i < 40 ? i + 1 : 40));
        const size_t n = 1 + spell_word(k, piece + 1);
        want.count += bpe_merge_long_(bpe, &merger, (unsigned char*)piece, n, want.ids + want.count);
        text.length += n;
    }
    for (int again = 0; again < 2; again++) {
        const Ids got = encode(&encoder, text);
        EXPECT(same_ids(got, want), "%d words, time %d: %zu ids, wanted %zu", words, again, got.count,
               want.count);
        free(got.ids);
    }
    bpe_encoder_close(&encoder);
    bpe_merger_close_(&merger);
    free(text.bytes);
    free(want.ids);
}

enum { PAIRS = 700 };

// Opens a vocabulary of pairs of bytes, and looks up all others, too.
static Bpe open_byte_pairs(const int pairs[PAIRS][2]) {
    Bpe bpe;
    int* union_of = (int*)calloc(256 * 256, sizeof(int));
    bpe_open_merges(&bpe, pairs, PAIRS, "pairs");
    for (int i = 0; i < PAIRS; i++) {
        union_of[256 * pairs[i][0] + pairs[i][1]] = 256 + i;
    }
    int wrong = 0;
    for (int pair = 0; pair < 256 * 256; pair++) {
        const int id = bpe_pair_(&bpe.pairs, pair / 256, pair % 256);
        wrong += id != (union_of[pair] ? union_of[pair] : BPE_NONE_);
    }
    EXPECT(wrong == 0, "%d pairs", wrong);
    free(union_of);
    return bpe;
}

// Pairs are found wherever the hash puts them: all over the table, or many behind its last bucket.
static void test_pairs(void) {
    int pairs[PAIRS][2];
    for (int i = 0; i < PAIRS; i++) {
        const int pair = i * 997 % (256 * 256); // 997 and 65536 have no common divisor
        pairs[i][0] = pair / 256;
        pairs[i][1] = pair % 256;
    }
    Bpe bpe = open_byte_pairs(pairs);
    const uint64_t last = ((uint64_t)1 << bpe.pairs.bits) - BPE_BUCKET_;
    int count = 0;
    for (int pair = 0; pair < 256 * 256 && count < 100; pair++) {
        int found = 0;
        for (int i = 0; i < PAIRS; i++) {
            found |= pairs[i][0] == pair / 256 && pairs[i][1] == pair % 256;
        }
        if (!found && bpe_pair_bucket_(&bpe.pairs, pair / 256, pair % 256) == last) {
            pairs[count][0] = pair / 256;
            pairs[count++][1] = pair % 256;
        }
    }
    EXPECT(count == 100, "%d", count);
    bpe_close(&bpe);
    bpe = open_byte_pairs(pairs);
    bpe_close(&bpe);
}

static void open_merges(const void* pairs) {
    Bpe bpe;
    bpe_open_merges(&bpe, (const int(*)[2])pairs, 3, "the pairs");
}

static void test_merges_in_memory(void) {
    const int a = 'a' - '!'; // printable ASCII starts at id 0
    const int good[3][2] = {{a, a + 1}, {a + 1, a + 2}, {256, 257}};
    Bpe bpe;
    bpe_open_merges(&bpe, good, 3, "good");
    EXPECT(bpe.vocab_size == 260 && bpe.eot == 259, "");
    EXPECT(bpe_find(&bpe, "ab", 2) == 256 && bpe_find(&bpe, "abbc", 4) == 258, "");
    EXPECT(bpe_find(&bpe, "\xAD", 1) == 255 && bpe_pair_(&bpe.pairs, 256, 257) == 258, "");
    bpe_close(&bpe);
    bpe_open_merges(&bpe, good, 0, "bytes");
    EXPECT(bpe.vocab_size == 257 && bpe.eot == 256, "");
    bpe_close(&bpe);

    const int later[3][2] = {{a, a}, {257, a}, {a, a + 1}}, none[3][2] = {{a, a}, {a, a + 1}, {a, -1}};
    const int again[3][2] = {{a, a}, {256, a}, {a, 256}},
              never[3][2] = {{a, a + 1}, {a + 1, a + 2}, {a, 257}};
    EXPECT(test_dies(open_merges, later, EXIT_FAILURE, "the pairs: merge 1 has the id 257, wanted 0 to 256"),
           "");
    EXPECT(test_dies(open_merges, none, EXIT_FAILURE, "the pairs: merge 2 has the id -1"), "");
    EXPECT(test_dies(open_merges, again, EXIT_FAILURE, "the pairs: merge 2 makes token 257 again"), "");
    EXPECT(test_dies(open_merges, never, EXIT_FAILURE, "the pairs: merge 2: the merges before never leave"),
           "");
}

// ---- the vocabulary of GPT-2 ----

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// A piece as long as the text. Merging that is quadratic would take hours.
static void test_one_long_piece(const Bpe* bpe) {
    static const char* units[] = {"a", " ", "=", "ab", "the"};
    BpeEncoder encoder;
    bpe_encoder_open(&encoder, bpe);
    for (int i = 0; i < 5; i++) {
        const Text text = text_repeat(units[i], strlen(units[i]), (1 << 20) / strlen(units[i]));
        const double start = seconds();
        const Ids ids = encode(&encoder, text);
        const double s = seconds() - start;
        EXPECT(s < 10, "%zu times \"%s\": %.1f s", text.length / strlen(units[i]), units[i], s);
        EXPECT(decodes_to(bpe, ids, text), "\"%s\"", units[i]);
        free(ids.ids);
        free(text.bytes);
    }
    bpe_encoder_close(&encoder);
}

static uint64_t fnv1a_uint16(Ids ids) {
    uint64_t hash = 0xCBF29CE484222325;
    for (size_t i = 0; i < ids.count; i++) {
        hash = (hash ^ (ids.ids[i] & 255)) * 0x100000001B3;
        hash = (hash ^ (uint64_t)(ids.ids[i] >> 8)) * 0x100000001B3;
    }
    return hash;
}

static void test_fixture(const Bpe* bpe) {
    const char* path = "dev/ref/fixtures/bpe_cases.bin";
    FILE* file = fopen(path, "rb");
    char magic[8];
    uint32_t cases = 0, header[3];
    EXPECT(file && fread(magic, 1, 8, file) == 8 && memcmp(magic, "bpecases", 8) == 0, "%s", path);
    EXPECT(file && fread(&cases, 4, 1, file) == 1 && cases > 4000, "%u cases", cases);
    BpeEncoder encoder;
    bpe_encoder_open(&encoder, bpe);
    for (uint32_t i = 0; i < cases; i++) {
        uint64_t hash;
        char unit[4096];
        EXPECT(fread(header, 4, 3, file) == 3 && fread(&hash, 8, 1, file) == 1 && header[0] <= sizeof(unit) &&
                   fread(unit, 1, header[0], file) == header[0],
               "case %u of %s", i, path);
        const Text text = text_repeat(unit, header[0], header[1]);
        for (int again = 0; again < 2; again++) {
            const Ids ids = encode(&encoder, text);
            EXPECT(ids.count == header[2] && fnv1a_uint16(ids) == hash,
                   "case %u: %u x \"%.*s\", %zu ids, wanted %u", i, header[1], (int)header[0], unit,
                   ids.count, header[2]);
            free(ids.ids);
        }
        if (text.length <= 4096) {
            const Ids parts = encode_in_parts(&encoder, text, i % 2 ? 3 : 40);
            EXPECT(parts.count == header[2] && fnv1a_uint16(parts) == hash, "case %u in parts: \"%.*s\"", i,
                   (int)header[0], unit);
            free(parts.ids);
        }
        free(text.bytes);
    }
    if (file) {
        EXPECT(fgetc(file) == EOF, "%s continues", path);
        fclose(file);
    }
    bpe_encoder_close(&encoder);
}

static int is_utf8(Text text) {
    for (size_t at = 0; at < text.length;) {
        const SlowCharacter c = slow_character(text.bytes, text.length, at);
        if (c.value == UINT32_MAX) {
            return 0;
        }
        at += c.length;
    }
    return 1;
}

static void test_every_token(const Bpe* bpe) {
    BpeEncoder encoder;
    bpe_encoder_open(&encoder, bpe);
    for (int id = 0; id < bpe->eot; id++) {
        int length;
        const char* token = bpe_token(bpe, id, &length);
        const Text text = text_of(token, (size_t)length);
        const Ids ids = encode(&encoder, text);
        EXPECT(bpe_find(bpe, text.bytes, text.length) == id, "token %d", id);
        EXPECT(decodes_to(bpe, ids, text), "token %d", id);
        EXPECT(!is_utf8(text) || (ids.count == 1 && ids.ids[0] == id), "token %d is %zu ids", id, ids.count);
        free(text.bytes);
        free(ids.ids);
    }
    bpe_encoder_close(&encoder);
}

static void test_gpt2(const char* path) {
    Bpe bpe;
    bpe_open(&bpe, path);
    EXPECT(bpe.vocab_size == 50257 && bpe.eot == 50256, "");
    test_fixture(&bpe);
    test_every_token(&bpe);
    test_against_reference(&bpe, &slow_patterns[0], 200);
    test_merging(&bpe, 20000);
    test_many_pieces(&bpe, 100000);
    test_one_long_piece(&bpe);
    bpe_close(&bpe);
}

TEST(bpe_encode) {
    test_small();
    Bpe small = open_small();
    for (int i = SLOW_PATTERNS; i-- > 0;) { // GPT-2's last, for the other tests
        test_against_reference(&small, &slow_patterns[i], 2000);
    }
    test_merging(&small, 5000);
    test_many_pieces(&small, 300000);
    test_one_long_piece(&small);
    bpe_close(&small);
    test_merges_in_memory();
    test_pairs();
    const char* vocabulary = getenv("GPT2_VOCAB");
    if (vocabulary) {
        test_gpt2(vocabulary);
    } else {
        printf("skipped: bpe with the vocabulary of GPT-2: GPT2_VOCAB is unset\n");
    }
}
