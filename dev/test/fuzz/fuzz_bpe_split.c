// fuzz_bpe_split.c -- splits random texts by every pattern: the pieces are those of the regular
// expression (slow_regex.h), also after the text is divided at bpe_last_cut. Run by
// dev/test/fuzz/fuzz.sh.
#include "dev/test/lib/slow_regex.h"
#include "llmc/tokenizer/bpe_split.h"

enum { MOST = 300 }; // bytes of a text

static void fuzz_expect(int ok) {
    if (!ok) {
        abort();
    }
}

// Splits text[begin .. end) as a text of its own; its pieces end where those of the whole text do.
static void fuzz_part(const BpeRules* rules, const char* is_end, const unsigned char* text, size_t begin,
                      size_t end) {
    uint16_t cuts[BPE_CUTS];
    size_t next = begin;
    unsigned char* copy = (unsigned char*)malloc(end - begin);
    memcpy(copy, text + begin, end - begin);
    BpeSplitter splitter = bpe_splitter(rules, copy, 0, end - begin);
    const size_t count = bpe_split(&splitter, cuts);
    fuzz_expect(splitter.at >= end - begin);
    for (size_t i = 0; i <= count; i++) {
        const size_t cut = i < count ? begin + cuts[i] : end;
        for (next++; next < cut; next++) {
            fuzz_expect(!is_end[next]);
        }
        fuzz_expect(is_end[cut]);
    }
    free(copy);
}

static void fuzz_pattern(const SlowPattern* slow, const unsigned char* text, size_t bytes) {
    static BpeRules rules[SLOW_PATTERNS];
    BpeRules* mine = &rules[slow - slow_patterns];
    char is_end[MOST + 1] = "";
    if (!mine->of) {
        bpe_rules_open(mine, slow->pattern);
    }
    for (size_t end = 0; end < bytes;) {
        end = slow_end(slow, (const char*)text, bytes, end);
        is_end[end] = 1;
    }
    fuzz_part(mine, is_end, text, 0, bytes);
    for (size_t known = 1; known < bytes; known++) {
        const size_t cut = bpe_last_cut(mine, (const char*)text, known);
        if (cut > 0) {
            fuzz_part(mine, is_end, text, 0, cut);
            fuzz_part(mine, is_end, text, cut, bytes);
        }
    }
}

int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t bytes) {
    for (int i = 0; 0 < bytes && bytes <= MOST && i < SLOW_PATTERNS; i++) {
        fuzz_pattern(&slow_patterns[i], data, bytes);
    }
    return 0;
}
