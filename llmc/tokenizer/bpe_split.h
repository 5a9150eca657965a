/*
bpe_split.h -- splits a text into pieces by the pattern of a vocabulary (bpe_rules.h).

A piece has at most BPE_MAX_PIECE bytes. A longer match is cut off after its last whole character,
and the pattern starts again there. So the memory for a piece is bounded, and text without blanks
can be divided. It matters only for text like a megabyte of one letter, or of zeros.

    bpe_split           finds the cuts of the next blocks of a text
    bpe_last_cut        the last position where a text may be divided without changing its pieces

The classes of 64 bytes at a time are bit masks, and the pattern's cuts are shifts of these masks,
as in gigatoken. O200K, whose words depend on letters far after a cut, is matched character by
character, and sees no more of a text than a piece may have: so it does not matter what follows.
*/
#ifndef LLMC_BPE_SPLIT_H
#define LLMC_BPE_SPLIT_H

#include <assert.h>

#include "llmc/base/intrinsics.h"
#include "llmc/base/vec.h"
#include "llmc/tokenizer/bpe_rules.h"

#ifndef BPE_MAX_PIECE
#define BPE_MAX_PIECE (1 << 20) // bytes; tests make do with less
#endif

// ---- cutting text into pieces ----

// 64 bytes of text as bit masks; bits past the end of the text are 0.
typedef struct {
    uint64_t letter, number, blank, other; // all bytes of a character of this class
    uint64_t space, quote;                 // U+0020, U+0027
    uint64_t blank1, blank2, blank3;       // first bytes of blanks of 1, 2 and 3 bytes
} BpeBlock_;

// Masks of a block that GPT-2's pattern does without, apart from the others: it would be 1/10
// slower.
typedef struct {
    uint64_t inside; // bytes of characters after the first
    uint64_t line;   // \r and \n
} BpeMore_;

typedef struct {
    const BpeRules* rules;
    const unsigned char* text;
    size_t bytes;
    size_t first; // byte at which the first piece starts
    size_t at;    // start of `now`: `first`, or a multiple of 64 after it
    BpeBlock_ last, now, next;
    BpeMore_ last_more, more, next_more; // unused with GPT-2's pattern
    // bytes of the block after `next` that belong to a character begun in `next`, ...
    uint64_t spilled;
    int spilled_class;    // ... and that character's class
    uint64_t cut, joined; // cuts in `now` that a contraction begun in `last` adds and removes
    int number;           // characters of the number's piece at the end of `last`
    // CL100K: 1 if the carry of characters that stand alone moves into `now`; \r and \n of `last`
    // that belong to the piece before them
    uint64_t alone, taken;
    size_t piece; // O200K: start of the first piece that is not cut yet
} BpeSplitter;

#if defined(X86_INTRINSICS) && defined(__AVX512BW__)
#define BPE_LANES_ 64
#elif defined(X86_INTRINSICS) && defined(__AVX2__)
#define BPE_LANES_ 32
#else
#define BPE_LANES_ 16
#endif

typedef uint8_t BpeVec_ __attribute__((vector_size(BPE_LANES_)));
typedef int8_t BpeVecMask_ __attribute__((vector_size(BPE_LANES_)));

// Returns the highest bit of each lane.
ALWAYS_INLINE uint64_t bpe_bits_(BpeVecMask_ lanes) {
#if defined(X86_INTRINSICS) && defined(__AVX512BW__)
    return _mm512_movepi8_mask((__m512i)lanes);
#elif defined(X86_INTRINSICS) && defined(__AVX2__)
    return (uint32_t)_mm256_movemask_epi8((__m256i)lanes);
#else
    uint64_t halves[2];
    memcpy(halves, &lanes, sizeof(halves));
    for (int i = 0; i < 2; i++) { // bit 8 j moves to bit 56 + j
        halves[i] = (halves[i] >> 7 & 0x0101010101010101) * 0x0102040810204080 >> 56;
    }
    return halves[0] | halves[1] << 8;
#endif
}

// Moves the bits of non-ASCII bytes into the classes of their characters.
static inline void bpe_classify_wide_(BpeSplitter* splitter, size_t begin, uint64_t wide, BpeBlock_* block) {
    uint64_t by_class[4] = {0, 0, 0, 0};
    by_class[splitter->spilled_class] = splitter->next_more.inside = splitter->spilled;
    wide &= ~splitter->spilled;
    splitter->spilled = 0;
    while (wide) {
        const int i = __builtin_ctzll(wide);
        int class_;
        const size_t at = begin + (size_t)i;
        const int length = bpe_character(splitter->rules, splitter->text + at, splitter->bytes - at, &class_);
        const uint64_t all = ((uint64_t)1 << length) - 1;
        by_class[class_] |= all << i;
        splitter->next_more.inside |= (all & ~(uint64_t)1) << i;
        wide &= ~(all << i);
        if (i + length > 64) {
            splitter->spilled = all >> (64 - i);
            splitter->spilled_class = class_;
        }
        if (class_ == BPE_BLANK) {
            *(length == 2 ? &block->blank2 : &block->blank3) |= (uint64_t)1 << i;
        }
    }
    block->letter |= by_class[BPE_LETTER];
    block->number |= by_class[BPE_NUMBER];
    block->blank |= by_class[BPE_BLANK];
}

// Classifies the 64 bytes from `begin` on. Call it block by block, in order.
ALWAYS_INLINE BpeBlock_ bpe_classify_(BpeSplitter* splitter, int has_more, size_t begin) {
    BpeBlock_ block;
    memset(&block, 0, sizeof(block));
    if (has_more) {
        memset(&splitter->next_more, 0, sizeof(splitter->next_more));
    }
    if (begin >= splitter->bytes) {
        return block;
    }
    const unsigned char* text = splitter->text + begin;
    const size_t left = splitter->bytes - begin;
    uint64_t valid = ~(uint64_t)0, wide = 0;
    // hardware prefetching ends at each page: without this, 1/10 slower
    __builtin_prefetch(text + 2048);
    unsigned char padded[64];
    if (left < 64) {
        memset(padded, 0, sizeof(padded));
        memcpy(padded, text, left);
        text = padded;
        valid = ((uint64_t)1 << left) - 1;
    }
    for (int i = 0; i < 64; i += BPE_LANES_) {
        BpeVec_ v;
        memcpy(&v, text + i, sizeof(v));
        const BpeVecMask_ space = v == ' ';
        block.letter |= bpe_bits_((BpeVecMask_)((v | 0x20) - 'a' < 26)) << i;
        block.number |= bpe_bits_((BpeVecMask_)(v - '0' < 10)) << i;
        block.blank1 |= bpe_bits_((BpeVecMask_)(v - '\t' < 5) | space) << i; // \t \n \v \f \r
        block.space |= bpe_bits_(space) << i;
        block.quote |= bpe_bits_((BpeVecMask_)(v == '\'')) << i;
        wide |= bpe_bits_((BpeVecMask_)v) << i;
        if (has_more) {
            const BpeVecMask_ line = (BpeVecMask_)(v == '\n') | (BpeVecMask_)(v == '\r');
            splitter->next_more.line |= bpe_bits_(line) << i;
        }
    }
    block.blank = block.blank1;
    if (wide) {
        bpe_classify_wide_(splitter, begin, wide, &block);
    }
    block.other = valid & ~(block.letter | block.number | block.blank);
    return block;
}

// Starts to split text[first .. bytes).
static inline BpeSplitter bpe_splitter(const BpeRules* rules, const unsigned char* text, size_t first,
                                       size_t bytes) {
    BpeSplitter splitter;
    memset(&splitter, 0, sizeof(splitter));
    splitter.rules = rules;
    splitter.text = text;
    splitter.bytes = bytes;
    splitter.first = splitter.at = splitter.piece = first;
    splitter.next = bpe_classify_(&splitter, 1, first);
    return splitter;
}

// Returns the length of the contraction at the start of text[0 .. left), which starts with '; 0 if
// none.
static inline int bpe_contraction_(const unsigned char* text, size_t left) {
    const unsigned char a = left > 1 ? text[1] : 0, b = left > 2 ? text[2] : 0;
    return a == 's' || a == 't' || a == 'd' || a == 'm'                                 ? 2
           : (a == 'l' && b == 'l') || (a == 'v' && b == 'e') || (a == 'r' && b == 'e') ? 3
                                                                                        : 0;
}

// Adjusts the cuts for contractions: a contraction takes letters from the start of a run, so the
// cut moves behind them.
static inline uint64_t bpe_cut_contractions_(BpeSplitter* splitter, uint64_t cuts) {
    for (uint64_t quotes = cuts & splitter->now.quote; quotes; quotes &= quotes - 1) {
        const int i = __builtin_ctzll(quotes);
        const size_t at = splitter->at + (size_t)i;
        const int length = bpe_contraction_(splitter->text + at, splitter->bytes - at), after = i + length;
        if (length == 0) {
            continue;
        }
        if (i + 1 < 64) {
            cuts &= ~((uint64_t)1 << (i + 1));
        } else {
            splitter->joined = 1;
        }
        *(after < 64 ? &cuts : &splitter->cut) |= (uint64_t)1 << after % 64;
    }
    return cuts;
}

// Moves on by one block.
ALWAYS_INLINE void bpe_advance_(BpeSplitter* splitter, int has_more) {
    splitter->last = splitter->now;
    splitter->now = splitter->next;
    if (has_more) {
        splitter->last_more = splitter->more;
        splitter->more = splitter->next_more;
    }
    splitter->next = bpe_classify_(splitter, has_more, splitter->at + 64);
}

// Returns the cuts of numbers in `now`: each run, and every n-th character of it; n = 0: no others.
static inline uint64_t bpe_cut_numbers_(BpeSplitter* splitter, int n) {
    const uint64_t number = splitter->now.number,
                   runs = number & ~(number << 1 | splitter->last.number >> 63);
    uint64_t cuts = n == 0 ? runs : 0;
    for (uint64_t bits = number & ~splitter->more.inside; n > 0 && bits; bits &= bits - 1) {
        const uint64_t first = bits & -bits;
        splitter->number = first & runs || splitter->number == n ? 0 : splitter->number;
        cuts |= splitter->number++ == 0 ? first : 0;
    }
    return cuts;
}

#define BPE_BEFORE_(class_) (now->class_ << 1 | last->class_ >> 63) // bytes after one of this class

// Returns the last blank before each of the bytes `here` of `now` and `there` of `next`.
ALWAYS_INLINE uint64_t bpe_last_blanks_(const BpeBlock_* now, uint64_t here, uint64_t there) {
    return (now->blank1 & (here >> 1 | there << 63)) | (now->blank2 & (here >> 2 | there << 62)) |
           (now->blank3 & (here >> 3 | there << 61));
}

// Returns the bytes of the next block at which a piece starts by GPT-2's pattern, as bits. With
// digits_first each number stands between two texts, so blanks before it are at a text's end.
ALWAYS_INLINE uint64_t bpe_cuts_gpt2_(BpeSplitter* splitter, int digits_first) {
    bpe_advance_(splitter, digits_first);
    const BpeBlock_ *last = &splitter->last, *now = &splitter->now, *next = &splitter->next;
    const uint64_t here = now->letter | now->other | (digits_first ? 0 : now->number); // not blank
    const uint64_t there = next->letter | next->other | (digits_first ? 0 : next->number);
    // a run starts where the class changes, unless a space has joined it
    uint64_t runs = (now->letter & ~BPE_BEFORE_(letter)) | (now->other & ~BPE_BEFORE_(other));
    runs |= digits_first ? 0 : now->number & ~BPE_BEFORE_(number);
    // the first blank starts a piece, and so does the last if something follows
    const uint64_t blanks = (now->blank & ~BPE_BEFORE_(blank)) | bpe_last_blanks_(now, here, there);
    uint64_t cuts = (runs & ~BPE_BEFORE_(space)) | blanks;
    cuts |= digits_first ? bpe_cut_numbers_(splitter, splitter->rules->pattern.digits) : 0;
    cuts = (cuts & ~splitter->joined) | splitter->cut;
    splitter->joined = splitter->cut = 0;
    return bpe_cut_contractions_(splitter, cuts);
}

// Returns the length of the contraction at the start of text[0 .. left), in upper or lower case; 0
// if none. U+017F is another lower case of S.
static inline int bpe_contraction_any_case_(const unsigned char* text, size_t left) {
    const unsigned char small[3] = {'\'', (unsigned char)(left > 1 ? text[1] | 0x20 : 0),
                                    (unsigned char)(left > 2 ? text[2] | 0x20 : 0)};
    return left > 2 && text[1] == 0xC5 && text[2] == 0xBF ? 3 : bpe_contraction_(small, left);
}

// Returns the ends of the contractions at these apostrophes.
static inline uint64_t bpe_ends_of_contractions_(BpeSplitter* splitter, uint64_t quotes) {
    uint64_t ends = splitter->cut;
    splitter->cut = 0;
    for (; quotes; quotes &= quotes - 1) {
        const int i = __builtin_ctzll(quotes);
        const size_t at = splitter->at + (size_t)i;
        const int length = bpe_contraction_any_case_(splitter->text + at, splitter->bytes - at),
                  end = i + length;
        if (length > 0) {
            *(end < 64 ? &ends : &splitter->cut) |= (uint64_t)1 << end % 64;
        }
    }
    return ends;
}

// True if the blanks from byte i of `now` on, itself neither \r nor \n, lead to a \r or \n. Looks
// no further than the longest piece, so that any text can be divided.
static inline int bpe_reach_line_(const BpeSplitter* splitter, int i) {
    const uint64_t after = ~(splitter->now.blank & ~splitter->more.line) >> i;
    if (after) {
        return (int)(splitter->more.line >> (i + __builtin_ctzll(after)) & 1);
    }
    const size_t most = splitter->at + (size_t)i + BPE_MAX_PIECE;
    size_t at = splitter->at + 64;
    for (; at < splitter->bytes && (splitter->text[at] & 0xC0) == 0x80; at--) { // inside of a blank
    }
    for (int class_ = BPE_BLANK; at < splitter->bytes && at <= most && class_ == BPE_BLANK;) {
        if (bpe_is_line_end(splitter->text[at])) {
            return 1;
        }
        at += (size_t)bpe_class_at(splitter->rules, splitter->text + at, splitter->bytes - at, &class_);
    }
    return 0;
}

// Returns the cuts in runs of blanks: after the last \r or \n of a run; in a run without them
// before its last blank, if something follows. `taken`: \r and \n that belong to the piece before
// the run.
ALWAYS_INLINE uint64_t bpe_cut_blanks_(const BpeSplitter* splitter, uint64_t taken) {
    const BpeBlock_ *last = &splitter->last, *now = &splitter->now, *next = &splitter->next;
    const BpeMore_* more = &splitter->more;
    const uint64_t after_lines = more->line << 1 | splitter->last_more.line >> 63;
    const uint64_t here = now->letter | now->number | now->other;
    const uint64_t there = next->letter | next->number | next->other;
    const uint64_t rest = now->blank & ~taken, rest_before = last->blank & ~splitter->taken;
    uint64_t cuts =
        (rest & ~(rest << 1 | rest_before >> 63)) | (bpe_last_blanks_(now, here, there) & ~more->line);
    for (uint64_t bits = now->blank & ~more->line & after_lines & ~cuts; bits; bits &= bits - 1) {
        cuts |= bpe_reach_line_(splitter, __builtin_ctzll(bits)) ? 0 : bits & -bits;
    }
    return cuts;
}

// Returns the bytes of the next block at which a piece starts by the pattern of cl100k, as bits.
ALWAYS_INLINE uint64_t bpe_cuts_cl100k_(BpeSplitter* splitter) {
    bpe_advance_(splitter, 1);
    const BpeBlock_ *last = &splitter->last, *now = &splitter->now;
    const BpeMore_ *last_more = &splitter->last_more, *more = &splitter->more;
    // others that start a piece; if one stands alone, the letters after it join it: the addition
    // moves its bit across its bytes
    const uint64_t others = now->other & ~BPE_BEFORE_(other), first = others & ~BPE_BEFORE_(space);
    const uint64_t inside = now->other & more->inside;
    uint64_t after;
    const int spills = __builtin_add_overflow(first << 1 | splitter->alone, inside, &after);
    splitter->alone = first >> 63 | (uint64_t)spills;
    // a blank also joins the letters after it
    const uint64_t blank = now->blank & ~more->line, blank_before = last->blank & ~last_more->line;
    const uint64_t letters =
        now->letter & ~BPE_BEFORE_(letter) & ~(blank << 1 | blank_before >> 63) & ~(after & ~inside);
    // line ends after others belong to their piece: the addition clears the run that it starts in
    const uint64_t lines = more->line & (BPE_BEFORE_(other) | splitter->taken >> 63);
    const uint64_t taken = more->line & ~(more->line + lines);
    uint64_t cuts = first | letters | bpe_cut_blanks_(splitter, taken);
    cuts |= now->number ? bpe_cut_numbers_(splitter, splitter->rules->pattern.digits) : 0;
    splitter->taken = taken;
    return cuts | bpe_ends_of_contractions_(splitter, first & now->quote);
}

#undef BPE_BEFORE_

// ---- O200K, character by character ----

// A text up to the last byte that the piece which is matched may have.
typedef struct {
    const BpeRules* rules;
    const unsigned char* text;
    size_t bytes;
} BpePiece_;

// Returns the end of a piece at the start of text[0 .. bytes) that is cut off, bytes >
// BPE_MAX_PIECE: no character is divided.
static inline size_t bpe_piece_end_(const BpeRules* rules, const unsigned char* text, size_t bytes) {
    for (size_t n = 1; n <= 3 && (text[BPE_MAX_PIECE] & 0xC0) == 0x80; n++) {
        int class_;
        const size_t at = BPE_MAX_PIECE - n;
        if ((size_t)bpe_character(rules, text + at, bytes - at, &class_) > n) {
            return at;
        }
    }
    return BPE_MAX_PIECE;
}

// Returns the end of the characters from `at` on that have one of these cases; *both is the end of
// the last of them that has both.
static inline size_t bpe_cased_end_(const BpePiece_* p, size_t at, int cases, size_t* both) {
    int class_, case_;
    while (at < p->bytes) {
        const size_t length = (size_t)bpe_case_at(p->rules, p->text + at, p->bytes - at, &class_, &case_);
        if (!(case_ & cases)) {
            break;
        }
        at += length;
        *both = case_ == BPE_MARK ? at : *both;
    }
    return at;
}

// Returns the end of U*L+ from `at` on, or if `is_capital` of U+L*; 0: none.
static inline size_t bpe_word_end_(const BpePiece_* p, size_t at, int is_capital) {
    size_t both = 0, none = 0;
    const size_t upper = bpe_cased_end_(p, at, BPE_CAPITAL, &both),
                 end = bpe_cased_end_(p, upper, BPE_MINUSCULE, &none);
    if (is_capital) {
        return upper > at ? end : 0;
    }
    // without a minuscule, U* leaves the last character of both to L+
    return end > upper ? end : both;
}

// Returns the end of a word that starts at `at`, a character of this class and length; 0: none.
static inline size_t bpe_whole_word_(const BpePiece_* p, size_t at, size_t length, int class_) {
    const int has_start =
        class_ != BPE_LETTER && class_ != BPE_NUMBER && !bpe_is_line_end(p->text[at]); // before it
    size_t end = 0;
    for (int is_capital = 0; is_capital < 2 && end == 0; is_capital++) {
        end = has_start ? bpe_word_end_(p, at + length, is_capital) : 0;
        end = end ? end : bpe_word_end_(p, at, is_capital);
    }
    const int is_contraction = end > 0 && end < p->bytes && p->text[end] == '\'';
    return end + (size_t)(is_contraction ? bpe_contraction_any_case_(p->text + end, p->bytes - end) : 0);
}

// Returns the end of the characters of a class from `at` on, at most `count`.
static inline size_t bpe_class_end_(const BpePiece_* p, size_t at, int class_, size_t count) {
    int found;
    for (size_t n = 0; n < count && at < p->bytes; n++) {
        const size_t length = (size_t)bpe_class_at(p->rules, p->text + at, p->bytes - at, &found);
        if (found != class_) {
            break;
        }
        at += length;
    }
    return at;
}

// Returns the end of the blanks from `at` on that are a piece: up to the last line end, or all but
// the last blank before another character.
static inline size_t bpe_blanks_end_(const BpePiece_* p, size_t at) {
    const size_t end = bpe_class_end_(p, at, BPE_BLANK, SIZE_MAX);
    size_t line = end, last = end - 1;
    while (line > at && !bpe_is_line_end(p->text[line - 1])) {
        line--;
    }
    while (last > at && (p->text[last] & 0xC0) == 0x80) {
        last--;
    }
    return line > at ? line : end == p->bytes || last == at ? end : last;
}

// Returns the end of the piece at text[at], at < bytes.
static inline size_t bpe_end_o200k_(const BpeRules* rules, const unsigned char* text, size_t bytes,
                                    size_t at) {
    bytes = bytes - at > BPE_MAX_PIECE ? at + bpe_piece_end_(rules, text + at, bytes - at) : bytes;
    const BpePiece_ p = {rules, text, bytes};
    int class_;
    const size_t length = (size_t)bpe_class_at(rules, text + at, bytes - at, &class_),
                 word = bpe_whole_word_(&p, at, length, class_),
                 others = at + (text[at] == ' '); // after the blank that joins them
    size_t end = word ? word
                 : class_ == BPE_NUMBER
                     ? bpe_class_end_(&p, at, BPE_NUMBER,
                                      rules->pattern.digits ? (size_t)rules->pattern.digits : SIZE_MAX)
                     : bpe_class_end_(&p, others, BPE_OTHER, SIZE_MAX);
    if (word || class_ == BPE_NUMBER) {
        return end;
    }
    if (end == others) {
        return bpe_blanks_end_(&p, at);
    }
    while (end < bytes && (bpe_is_line_end(text[end]) || text[end] == '/')) {
        end++;
    }
    return end;
}

// Appends the indices of the set bits, plus `base`, to places[count ..]. Returns the new count.
// Writes up to 7 more, because a loop of nearly constant length is predicted.
ALWAYS_INLINE size_t bpe_places_(uint64_t bits, uint32_t base, uint16_t* places, size_t count) {
    const int n = __builtin_popcountll(bits);
#if defined(X86_INTRINSICS) && defined(__AVX512VBMI2__)
    const __m512i numbers =
        _mm512_set_epi8(63, 62, 61, 60, 59, 58, 57, 56, 55, 54, 53, 52, 51, 50, 49, 48, 47, 46, 45, 44, 43,
                        42, 41, 40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 30, 29, 28, 27, 26, 25, 24, 23, 22,
                        21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i first = _mm512_set1_epi16((short)base), set = _mm512_maskz_compress_epi8(bits, numbers);
    _mm512_storeu_si512(places + count,
                        _mm512_add_epi16(first, _mm512_cvtepu8_epi16(_mm512_castsi512_si256(set))));
    if (__builtin_expect(n > 32, 0)) {
        _mm512_storeu_si512(places + count + 32,
                            _mm512_add_epi16(first, _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(set, 1))));
    }
#else
    for (int done = 0; done < n; done += 8) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            places[count + (size_t)(done + i)] =
                // undefined for 0
                (uint16_t)(base + (uint32_t)__builtin_ctzll(bits | (uint64_t)1 << 63));
            bits &= bits - 1;
        }
    }
#endif
    return count + (size_t)n;
}

// blocks per call, and room for their cuts
enum { BPE_BLOCKS_ = 64, BPE_CUTS = 64 * BPE_BLOCKS_ + 32 };

#define BPE_SPLIT_(next_cuts)                                                                                \
    for (uint32_t i = 0; i < BPE_BLOCKS_ && splitter->at < splitter->bytes; i++) {                           \
        const uint64_t bits = (next_cuts) & ~(uint64_t)(splitter->at == splitter->first ? 1 : 0);            \
        count = bpe_places_(bits, 64 * i, cuts, count);                                                      \
        splitter->at += 64;                                                                                  \
    }
// Finds the cuts of a text of SentencePiece's kind, as bpe_split does.
static inline size_t bpe_split_joins_(BpeSplitter* splitter, uint16_t cuts[BPE_CUTS]) {
    const unsigned char* text = splitter->text;
    const uint64_t* joins = splitter->rules->joins;
    const size_t begin = splitter->at, left = splitter->bytes - begin,
                 end = begin + (left < 64 * BPE_BLOCKS_ ? left : 64 * BPE_BLOCKS_);
    size_t count = 0;
    for (size_t i = begin == splitter->first ? begin + 1 : begin; i < end; i++) {
        const unsigned pair = 256u * text[i - 1] + text[i];
        cuts[count] = (uint16_t)(i - begin); // no branch to predict
        count += ~joins[pair / 64] >> pair % 64 & 1;
    }
    splitter->at = begin + 64 * BPE_BLOCKS_;
    return count;
}

// Finds the cuts of a text by the pattern of O200K, as bpe_split does.
static inline size_t bpe_split_o200k_(BpeSplitter* splitter, uint16_t cuts[BPE_CUTS]) {
    const size_t begin = splitter->at, end = begin + 64 * BPE_BLOCKS_;
    size_t count = 0;
    while (splitter->piece < end && splitter->piece < splitter->bytes) {
        if (splitter->piece > splitter->first) {
            cuts[count++] = (uint16_t)(splitter->piece - begin);
        }
        splitter->piece = bpe_end_o200k_(splitter->rules, splitter->text, splitter->bytes, splitter->piece);
    }
    splitter->at = end;
    return count;
}

// Finds the cuts in the next blocks of the text, relative to the first block. The first byte of the
// text is not a cut.
static inline size_t bpe_split(BpeSplitter* splitter, uint16_t cuts[BPE_CUTS]) {
    const BpePattern pattern = splitter->rules->pattern;
    size_t count = 0;
    if (pattern.style == BPE_SENTENCE) {
        return bpe_split_joins_(splitter, cuts);
    }
    if (pattern.style == BPE_O200K) {
        return bpe_split_o200k_(splitter, cuts);
    }
    if (pattern.style == BPE_CL100K) {
        BPE_SPLIT_(bpe_cuts_cl100k_(splitter))
    } else if (pattern.digits_first) {
        BPE_SPLIT_(bpe_cuts_gpt2_(splitter, 1))
    } else {
        BPE_SPLIT_(bpe_cuts_gpt2_(splitter, 0))
    }
    return count;
}
#undef BPE_SPLIT_

// If the piece that starts at `begin` is too long, restarts the splitter where it is cut off, and
// returns that position; otherwise returns 0. `cuts` are those just found, from `base` on.
static inline size_t bpe_cut_off(BpeSplitter* splitter, size_t begin, size_t base, const uint16_t* cuts,
                                 size_t count) {
    assert(BPE_MAX_PIECE > BPE_CUTS); // so only the first cut can be too far away
    const size_t known = splitter->at < splitter->bytes ? splitter->at : splitter->bytes;
    if (__builtin_expect((count > 0 ? base + cuts[0] : known) - begin <= BPE_MAX_PIECE, 1)) {
        return 0;
    }
    const size_t end =
        begin + bpe_piece_end_(splitter->rules, splitter->text + begin, splitter->bytes - begin);
    *splitter = bpe_splitter(splitter->rules, splitter->text, end, splitter->bytes);
    return end;
}

// Returns the class of the character that ends before text[at], at > 0.
static inline int bpe_class_before_(const BpeRules* rules, const unsigned char* text, size_t at) {
    int class_;
    size_t n = 1;
    // not yet the first byte of a character
    while (n < 4 && n < at && (text[at - n] & 0xC0) == 0x80) {
        n++;
    }
    const unsigned char first = text[at - n];
    if (first < 0x80) {
        return n == 1 ? rules->of[first / 4] >> 2 * (first % 4) & 3 : BPE_OTHER;
    }
    return (size_t)bpe_character(rules, text + at - n, n, &class_) == n ? class_ : BPE_OTHER;
}

// True if pieces may end with line ends.
static inline int bpe_has_lines_(const BpeRules* rules) {
    return rules->pattern.style == BPE_CL100K || rules->pattern.style == BPE_O200K;
}

// True if the character at the start of text[0 .. 4) is not a blank, and normalization keeps it.
static inline int bpe_starts_line_(const BpeRules* rules, const unsigned char* text) {
    int class_;
    uint32_t c = text[0];
    bpe_class_at(rules, text, 4, &class_);
    if (c >= 0x80) {
        utf8_decode(text, 4, &c);
    }
    return class_ != BPE_BLANK && !(rules->pattern.normalizes && nfc_may_change(&rules->nfc, c));
}

// True if a text of SentencePiece's kind may be divided before text[at], at > 0: at a blank that
// follows no blank, nor U+2581, which is one, and no word that changes it.
static inline int bpe_may_cut_sentence_(int blanks, const unsigned char* text, size_t at) {
    const unsigned char before = text[at - 1];
    const int is_alnum = ('0' <= before && before <= '9') || ('a' <= (before | 32) && (before | 32) <= 'z');
    return ((text[at] == ' ' && blanks & BPE_BLANK_CUTS) || (text[at] == '\n' && blanks & BPE_LINE_CUTS)) &&
           before > ' ' && before != 0x81 && (is_alnum || !(blanks & BPE_WORD_CHANGES));
}

// True if the text may be divided before text[at], at > 0, as far as its bytes nearby tell: ASCII
// blanks after another character always start a piece, except line ends that CL100K and O200K give
// to the piece before; there, a character after a line end starts one, but for O200K's /.
static inline int bpe_may_cut_(const BpeRules* rules, const unsigned char* text, size_t bytes, size_t at) {
    const int is_lines = bpe_has_lines_(rules);
    if (rules->pattern.style == BPE_SENTENCE) {
        return bpe_may_cut_sentence_(rules->pattern.digits, text, at);
    }
    const int normalizes = rules->pattern.normalizes; // the class before a line end may change
    if (text[at] == ' ' || ('\t' <= text[at] && text[at] <= '\r')) {
        const int before = bpe_class_before_(rules, text, at);
        return before != BPE_BLANK &&
               !(is_lines && bpe_is_line_end(text[at]) && (before == BPE_OTHER || normalizes));
    }
    return is_lines && bpe_is_line_end(text[at - 1]) && bytes - at >= 4 &&
           !(rules->pattern.style == BPE_O200K && text[at] == '/') && bpe_starts_line_(rules, text + at);
}

// Counts the bytes at the end of a text whose meaning may depend on the bytes that follow: an
// incomplete character or contraction. O200K's contractions belong to the word before.
static inline size_t bpe_uncertain_(const BpeRules* rules, const unsigned char* text, size_t bytes) {
    for (size_t n = rules->pattern.style == BPE_O200K ? 3 : 0; n >= 1; n--) {
        if (n <= bytes && text[bytes - n] == '\'') {
            return n;
        }
    }
    for (size_t n = 1; n <= 3 && n <= bytes; n++) {
        if (text[bytes - n] >= 0xC0) {
            return (size_t)utf8_length(text[bytes - n]) > n ? n : 0;
        }
    }
    const unsigned char end = bytes >= 2 && text[bytes - 2] == '\'' ? text[bytes - 1] : 0;
    return end == 'l' || end == 'v' || end == 'r' ? 2 : 0;
}

// Returns the start of the blanks at the end of a text.
static inline size_t bpe_last_blanks_begin_(const BpeRules* rules, const unsigned char* text, size_t bytes) {
    size_t at = bytes;
    while (at > 0 && bpe_class_before_(rules, text, at) == BPE_BLANK) {
        for (at--; at > 0 && (text[at] & 0xC0) == 0x80; at--) {
        }
    }
    return at;
}

// True if nothing but capitals, marks and letters without a case follows text[at]: then a minuscule
// after the text may join them to letters before them.
static inline int bpe_is_open_word_(const BpeRules* rules, const unsigned char* text, size_t bytes,
                                    size_t at) {
    const BpePiece_ p = {rules, text, bytes};
    size_t both;
    return bpe_cased_end_(&p, at, BPE_CAPITAL, &both) == bytes;
}

// True if the text may be divided at text[at], where a piece ends that starts at text[begin]. If
// several blanks stand before another character, the last is a piece of its own only once that
// character is seen. Nothing that follows changes a piece of O200K after BPE_MAX_PIECE bytes.
static inline int bpe_is_safe_(const BpeRules* rules, const unsigned char* text, size_t bytes, size_t begin,
                               size_t at) {
    int class_;
    bpe_class_at(rules, text + at, bytes - at, &class_);
    const int may_change = rules->pattern.style == BPE_O200K && bytes - begin <= BPE_MAX_PIECE;
    return !(may_change && bpe_is_open_word_(rules, text, bytes, at)) &&
           (class_ == BPE_BLANK || bpe_class_before_(rules, text, at) != BPE_BLANK ||
            (bpe_has_lines_(rules) && bpe_is_line_end(text[at - 1])));
}

// True if text[begin .. at), a piece of O200K, is as long as a piece may be.
static inline int bpe_is_cut_off_(const BpeRules* rules, const unsigned char* text, size_t bytes,
                                  size_t begin, size_t at) {
    return rules->pattern.style == BPE_O200K && bytes - begin > BPE_MAX_PIECE &&
           at - begin == bpe_piece_end_(rules, text + begin, bytes - begin);
}

// Returns the end of the part of a text that starts at text[begin], of at most BPE_MAX_PIECE bytes.
// A text that is normalized, or that added tokens are cut out of, is encoded part by part. Parts
// end where the text may be divided, if there is such a place.
static inline size_t bpe_part_end(const BpeRules* rules, const unsigned char* text, size_t bytes,
                                  size_t begin) {
    if (bytes - begin <= BPE_MAX_PIECE) {
        return bytes;
    }
    size_t end = begin + BPE_MAX_PIECE;
    while (end > begin && !bpe_may_cut_(rules, text, bytes, end)) {
        end--;
    }
    return end > begin ? end : begin + bpe_piece_end_(rules, text + begin, bytes - begin);
}

// Returns the last position where the text may be divided without changing its ids, whatever
// follows it. 0 if none, which only a text below 2 * BPE_MAX_PIECE + 8 bytes
// can have.
static inline size_t bpe_last_cut(const BpeRules* rules, const char* text, size_t bytes) {
    const unsigned char* at = (const unsigned char*)text;
    for (size_t i = bytes; i-- > 1;) { // nearly all text has a blank near its end
        if (bpe_may_cut_(rules, at, bytes, i)) {
            return i;
        }
    }
    if (rules->pattern.normalizes || rules->pattern.cuts_words || rules->pattern.style == BPE_SENTENCE) {
        return bytes >= BPE_MAX_PIECE + 8 ? bpe_piece_end_(rules, at, bytes) : 0;
    }
    const size_t certain = bytes - bpe_uncertain_(rules, at, bytes);
    // how a run of blanks is cut depends on its end
    const size_t known = bpe_last_blanks_begin_(rules, at, certain);
    BpeSplitter splitter = bpe_splitter(rules, at, 0, certain);
    size_t begin = 0, last = 0;
    while (splitter.at < certain) {
        uint16_t cuts[BPE_CUTS];
        const size_t base = splitter.at, n = bpe_split(&splitter, cuts);
        const size_t cut_off = bpe_cut_off(&splitter, begin, base, cuts, n);
        if (cut_off) {
            begin = last = cut_off;
            continue;
        }
        for (size_t i = n; i-- > 0;) {
            const size_t from = i > 0 ? base + cuts[i - 1] : begin, to = base + cuts[i];
            if (bpe_is_cut_off_(rules, at, certain, from, to) ||
                (to <= known && to < certain && bpe_is_safe_(rules, at, certain, from, to))) {
                last = to;
                break;
            }
        }
        begin = n > 0 ? base + cuts[n - 1] : begin;
    }
    return last;
}

#endif
