/*
bpe_split.h -- splits a text into pieces by GPT-2's pattern, leftmost first, alternatives in order:

    '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

Any bytes are text: a byte that belongs to no valid UTF-8 character counts as one character that is
neither letter, number nor blank.

A piece has at most BPE_MAX_PIECE bytes. A longer match is cut off after its last whole character,
and the pattern starts again there. So the memory for a piece is bounded, and text without blanks
can be divided. It matters only for text like a megabyte of one letter, or of zeros.

    bpe_classes_open    tables of letters, numbers and blanks (unicode_tables.h); read-only
                        afterwards: threads may share them
    bpe_last_cut        the last position where a text may be divided without changing its pieces

The classes of 64 bytes at a time are bit masks, and the pattern's cuts are shifts of these masks
(gigatoken does so).
*/
#ifndef LLMC_BPE_SPLIT_H
#define LLMC_BPE_SPLIT_H

#include <assert.h>

#include "llmc/base/check.h"
#include "llmc/base/intrinsics.h"
#include "llmc/base/vec.h"
#include "llmc/tokenizer/unicode_tables.h"

#ifndef BPE_MAX_PIECE
#define BPE_MAX_PIECE (1 << 20) // bytes; tests make do with less
#endif

// ---- classes of characters ----

enum { BPE_OTHER_, BPE_LETTER_, BPE_NUMBER_, BPE_BLANK_ };

typedef struct {
    unsigned char* of; // class of each character below `end`, 2 bits each
    uint32_t end;      // all others are BPE_OTHER_
} BpeClasses;

static inline void bpe_set_class_(BpeClasses* classes, const uint32_t (*ranges)[2], int rows, int class_) {
    for (int row = 0; row < rows; row++) {
        for (uint32_t c = ranges[row][0]; c <= ranges[row][1]; c++) {
            classes->of[c / 4] |= (unsigned char)(class_ << 2 * (c % 4));
        }
    }
}

static inline void bpe_classes_open(BpeClasses* classes) {
    const uint32_t letters_end = unicode_letters[UNICODE_LETTERS - 1][1] + 1;
    const uint32_t numbers_end = unicode_numbers[UNICODE_NUMBERS - 1][1] + 1;
    classes->end = letters_end > numbers_end ? letters_end : numbers_end; // blanks are far below
    classes->of = (unsigned char*)check_alloc(classes->end / 4 + 1, 1, "classes of characters");
    bpe_set_class_(classes, unicode_letters, UNICODE_LETTERS, BPE_LETTER_);
    bpe_set_class_(classes, unicode_numbers, UNICODE_NUMBERS, BPE_NUMBER_);
    bpe_set_class_(classes, unicode_blanks, UNICODE_BLANKS, BPE_BLANK_);
}

static inline void bpe_classes_close(BpeClasses* classes) {
    free(classes->of);
    memset(classes, 0, sizeof(*classes));
}

// Returns the length of the character that starts with `lead` >= 0x80, judging by the lead alone; 0
// if none does.
static inline int bpe_length_(unsigned lead) {
    return lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
}

// Returns the length, and sets the class, of the non-ASCII character at the start of text[0 ..
// left); one byte of no class if it is invalid. Surrogates and values above U+10FFFF need no check:
// none has a class.
static inline int bpe_character_(const BpeClasses* classes, const unsigned char* text, size_t left,
                                 int* class_) {
    static const uint32_t smallest[5] = {0, 0, 0x80, 0x800, 0x10000}; // by length in bytes
    const int length = bpe_length_(text[0]);
    *class_ = BPE_OTHER_;
    if (length == 0 || (size_t)length > left) {
        return 1;
    }
    uint32_t c = text[0] & (0xFFu >> (length + 1));
    for (int i = 1; i < length; i++) {
        if ((text[i] & 0xC0) != 0x80) {
            return 1;
        }
        c = c << 6 | (text[i] & 0x3Fu);
    }
    if (c < smallest[length]) {
        return 1;
    }
    if (c < classes->end) {
        *class_ = classes->of[c / 4] >> 2 * (c % 4) & 3;
    }
    return length;
}

// ---- cutting text into pieces ----

// 64 bytes of text as bit masks; bits past the end of the text are 0.
typedef struct {
    uint64_t letter, number, blank, other; // all bytes of a character of this class
    uint64_t space, quote;                 // U+0020, U+0027
    uint64_t blank1, blank2, blank3;       // first bytes of blanks of 1, 2 and 3 bytes
} BpeBlock_;

typedef struct {
    const BpeClasses* classes;
    const unsigned char* text;
    size_t bytes;
    size_t first; // byte at which the first piece starts
    size_t at;    // start of `now`: `first`, or a multiple of 64 after it
    BpeBlock_ last, now, next;
    // bytes of the block after `next` that belong to a character begun in `next`, ...
    uint64_t spilled;
    int spilled_class;    // ... and that character's class
    uint64_t cut, joined; // cuts in `now` that a contraction begun in `last` adds and removes
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
    by_class[splitter->spilled_class] = splitter->spilled;
    wide &= ~splitter->spilled;
    splitter->spilled = 0;
    while (wide) {
        const int i = __builtin_ctzll(wide);
        int class_;
        const size_t at = begin + (size_t)i;
        const int length =
            bpe_character_(splitter->classes, splitter->text + at, splitter->bytes - at, &class_);
        const uint64_t all = ((uint64_t)1 << length) - 1;
        by_class[class_] |= all << i;
        wide &= ~(all << i);
        if (i + length > 64) {
            splitter->spilled = all >> (64 - i);
            splitter->spilled_class = class_;
        }
        if (class_ == BPE_BLANK_) {
            *(length == 2 ? &block->blank2 : &block->blank3) |= (uint64_t)1 << i;
        }
    }
    block->letter |= by_class[BPE_LETTER_];
    block->number |= by_class[BPE_NUMBER_];
    block->blank |= by_class[BPE_BLANK_];
}

// Classifies the 64 bytes from `begin` on. Call it block by block, in order.
ALWAYS_INLINE BpeBlock_ bpe_classify_(BpeSplitter* splitter, size_t begin) {
    BpeBlock_ block;
    memset(&block, 0, sizeof(block));
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
    }
    block.blank = block.blank1;
    if (wide) {
        bpe_classify_wide_(splitter, begin, wide, &block);
    }
    block.other = valid & ~(block.letter | block.number | block.blank);
    return block;
}

// Starts to split text[first .. bytes).
static inline BpeSplitter bpe_splitter(const BpeClasses* classes, const unsigned char* text, size_t first,
                                       size_t bytes) {
    BpeSplitter splitter;
    memset(&splitter, 0, sizeof(splitter));
    splitter.classes = classes;
    splitter.text = text;
    splitter.bytes = bytes;
    splitter.first = splitter.at = first;
    splitter.next = bpe_classify_(&splitter, first);
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

// Returns the bytes of the next block at which a piece starts, as bits.
ALWAYS_INLINE uint64_t bpe_cuts_(BpeSplitter* splitter) {
    splitter->last = splitter->now;
    splitter->now = splitter->next;
    splitter->next = bpe_classify_(splitter, splitter->at + 64);
    const BpeBlock_ *last = &splitter->last, *now = &splitter->now, *next = &splitter->next;
#define BPE_BEFORE_(class_) (now->class_ << 1 | last->class_ >> 63) // bytes after one of this class
    const uint64_t here = now->letter | now->number | now->other;   // not blank
    const uint64_t there = next->letter | next->number | next->other;
    // a run starts where the class changes, unless a space has joined it
    const uint64_t runs = (now->letter & ~BPE_BEFORE_(letter)) | (now->number & ~BPE_BEFORE_(number)) |
                          (now->other & ~BPE_BEFORE_(other));
    // the first blank starts a piece, and so does the last if something follows
    const uint64_t blanks = (now->blank & ~BPE_BEFORE_(blank)) | (now->blank1 & (here >> 1 | there << 63)) |
                            (now->blank2 & (here >> 2 | there << 62)) |
                            (now->blank3 & (here >> 3 | there << 61));
    uint64_t cuts = (runs & ~BPE_BEFORE_(space)) | blanks;
#undef BPE_BEFORE_
    cuts = (cuts & ~splitter->joined) | splitter->cut;
    splitter->joined = splitter->cut = 0;
    return bpe_cut_contractions_(splitter, cuts);
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

// Finds the cuts in the next blocks of the text, relative to the first block. The first byte of the
// text is not a cut.
static inline size_t bpe_split(BpeSplitter* splitter, uint16_t cuts[BPE_CUTS]) {
    size_t count = 0;
    for (uint32_t i = 0; i < BPE_BLOCKS_ && splitter->at < splitter->bytes; i++) {
        const uint64_t bits = bpe_cuts_(splitter) & ~(uint64_t)(splitter->at == splitter->first ? 1 : 0);
        count = bpe_places_(bits, 64 * i, cuts, count);
        splitter->at += 64;
    }
    return count;
}

// Returns the end of the piece at the start of text[0 .. bytes) that is longer than BPE_MAX_PIECE:
// no character is divided.
static inline size_t bpe_piece_end_(const BpeClasses* classes, const unsigned char* text, size_t bytes) {
    for (size_t n = 1; n <= 3; n++) {
        int class_;
        const size_t at = BPE_MAX_PIECE - n;
        if ((size_t)bpe_character_(classes, text + at, bytes - at, &class_) > n) {
            return at;
        }
    }
    return BPE_MAX_PIECE;
}

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
        begin + bpe_piece_end_(splitter->classes, splitter->text + begin, splitter->bytes - begin);
    *splitter = bpe_splitter(splitter->classes, splitter->text, end, splitter->bytes);
    return end;
}

// Returns the class of the character that ends before text[at], at > 0.
static inline int bpe_class_before_(const BpeClasses* classes, const unsigned char* text, size_t at) {
    int class_;
    size_t n = 1;
    // not yet the first byte of a character
    while (n < 4 && n < at && (text[at - n] & 0xC0) == 0x80) {
        n++;
    }
    const unsigned char first = text[at - n];
    if (first < 0x80) {
        return n == 1 ? classes->of[first / 4] >> 2 * (first % 4) & 3 : BPE_OTHER_;
    }
    return (size_t)bpe_character_(classes, text + at - n, n, &class_) == n ? class_ : BPE_OTHER_;
}

// True if a cut before text[at], at > 0, changes no piece. A blank after another character always
// starts a piece, and only blanks depend on what follows. Ignores non-ASCII blanks.
static inline int bpe_may_cut_(const BpeClasses* classes, const char* text, size_t at) {
    const unsigned char* bytes = (const unsigned char*)text;
    const int blank = bytes[at] == ' ' || ('\t' <= bytes[at] && bytes[at] <= '\r');
    return blank && bpe_class_before_(classes, bytes, at) != BPE_BLANK_;
}

// Counts the bytes at the end of a text that may mean something else with what follows: an
// incomplete character or contraction.
static inline size_t bpe_uncertain_(const unsigned char* text, size_t bytes) {
    for (size_t n = 1; n <= 3 && n <= bytes; n++) {
        if (text[bytes - n] >= 0xC0) {
            return (size_t)bpe_length_(text[bytes - n]) > n ? n : 0;
        }
    }
    const unsigned char end = bytes >= 2 && text[bytes - 2] == '\'' ? text[bytes - 1] : 0;
    return end == 'l' || end == 'v' || end == 'r' ? 2 : 0;
}

// True if the text may be divided at text[at], where a piece starts. If several blanks stand before
// another character, the last is a piece of its own only once that character is seen.
static inline int bpe_is_safe_(const BpeClasses* classes, const unsigned char* text, size_t bytes,
                               size_t at) {
    int class_ = classes->of[text[at] / 4] >> 2 * (text[at] % 4) & 3;
    if (text[at] >= 0x80) {
        bpe_character_(classes, text + at, bytes - at, &class_);
    }
    return class_ == BPE_BLANK_ || bpe_class_before_(classes, text, at) != BPE_BLANK_;
}

// Returns the last position where the text may be divided, whatever follows it: the ids of its
// parts are then those of the whole. 0 if none, which only a text below BPE_MAX_PIECE + 8 bytes can
// have.
static inline size_t bpe_last_cut(const BpeClasses* classes, const char* text, size_t bytes) {
    const unsigned char* at = (const unsigned char*)text;
    for (size_t i = bytes; i-- > 1;) { // nearly all text has a blank near its end
        if (bpe_may_cut_(classes, text, i)) {
            return i;
        }
    }
    const size_t certain = bytes - bpe_uncertain_(at, bytes);
    BpeSplitter splitter = bpe_splitter(classes, at, 0, certain);
    size_t begin = 0, last = 0;
    while (splitter.at < certain) {
        uint16_t cuts[BPE_CUTS];
        const size_t base = splitter.at, n = bpe_split(&splitter, cuts);
        const size_t cut_off = bpe_cut_off(&splitter, begin, base, cuts, n);
        if (cut_off) {
            begin = last = cut_off;
            continue;
        }
        begin = n > 0 ? base + cuts[n - 1] : begin;
        for (size_t i = n; i-- > 0;) {
            if (base + cuts[i] < certain && bpe_is_safe_(classes, at, certain, base + cuts[i])) {
                last = base + cuts[i];
                break;
            }
        }
    }
    return last;
}

#endif
