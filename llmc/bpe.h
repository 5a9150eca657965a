/*
bpe.h -- GPT-2's tokens of a text: byte-pair encoding, the same ids as tiktoken's encode_ordinary.

A text is cut into pieces by the pattern, leftmost first, alternatives in order,

    '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

and in each piece, beginning with its bytes, the two neighbours whose union has the lowest id become one
token, leftmost first, until no two neighbours make a token. No token is ever made from the characters of
"<|endoftext|>": it is text like any other. Any bytes are text: a byte that belongs to no valid UTF-8
character counts as one character that is neither letter, number nor blank, so decoding gives it back.

    bpe_open            a vocabulary, out of a file (bpe_files.h); read-only afterwards: threads may share it
    bpe_open_merges     the same from merges in memory
    bpe_encoder_open    what one thread needs to encode: a cache of pieces, and memory for merging

In every vocabulary each token longer than a byte must be what two tokens of lower ids merge to, as it is
where training by merges has made it. In the order of GPT-2, which files of merges imply, ids 0 to 255 are the
single bytes, then comes one id per merge, and end-of-text is the last.

Speed. Classes of characters come as bits, 64 bytes at a time, and the pattern's cuts from shifts of these
bits (gigatoken does so). Most pieces are then found in a cache by their first 15 or 31 bytes, several at a
time, so that they come from memory together. Merging is linear in the length of the piece (bpe_merge_long_),
so no text is slow. dev/bench/results has what was measured (make bench-tokenizer).

needs:   check.h, vec.h (ALWAYS_INLINE), unicode_tables.h
defines: Bpe, BPE_MAX_VOCAB, BPE_EOT_TEXT, bpe_open_merges, bpe_close, bpe_token, bpe_find, bpe_cut,
BpeEncoder, bpe_encoder_open, bpe_encoder_close, BpeMore, BPE_ENDS, BPE_CONTINUES, bpe_encode
*/
#ifndef LLMC_BPE_H
#define LLMC_BPE_H

#include <assert.h>
#include <limits.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "check.h"
#include "unicode_tables.h"
#include "vec.h"

#define BPE_EOT_TEXT "<|endoftext|>" // the name of the end-of-text token

enum {
    BPE_MAX_VOCAB = (1 << 21) - 1, // three ids fit in 64 bits, and one value is left for
    BPE_NONE_ = BPE_MAX_VOCAB,     // no token; above every id
};

typedef struct {
    const unsigned char* text; // any bytes, no terminating zero
    uint32_t length;           // at least 1
} BpeToken_;

typedef struct {
    int vocab_size;        // V
    int eot;               // end-of-text id
    BpeToken_* tokens;     // (V), into `buffer`
    unsigned char* buffer; // the bytes of all tokens
    int byte_ids[256];     // the tokens of single bytes
    int* byte_pairs;    // (256, 256) the union of two bytes, or BPE_NONE_: where most merging begins and ends
    int hash_bits;      // both tables have 2^hash_bits entries, open addressing, 0 is empty:
    uint64_t* by_bytes; // 32 bits of the hash of a token's bytes, and its id + 1
    uint64_t* by_pair;  // left id, right id, id of their union: 21 bits each
    unsigned char* classes; // the class of each character below `classes_end`, 2 bits each
    uint32_t classes_end;
} Bpe;

// ---- hash tables

static const uint64_t BPE_HASH_MULTIPLIER_ = 0x9E3779B97F4A7C15; // 2^64 / golden ratio

ALWAYS_INLINE uint64_t bpe_load8_(const unsigned char* bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof(word));
    return word;
}

static inline uint64_t bpe_hash_(const unsigned char* bytes, size_t n) {
    uint64_t hash = n, tail = 0;
    for (; n >= 8; n -= 8, bytes += 8) {
        hash = (hash ^ bpe_load8_(bytes)) * BPE_HASH_MULTIPLIER_;
        hash ^= hash >> 29;
    }
    memcpy(&tail, bytes, n);
    hash = (hash ^ tail) * BPE_HASH_MULTIPLIER_;
    return hash ^ hash >> 32;
}

// The entry of the token with these bytes, or the empty entry where it belongs.
static inline uint64_t* bpe_entry_(const Bpe* bpe, const unsigned char* bytes, size_t n, uint32_t* tag) {
    const uint64_t hash = bpe_hash_(bytes, n), mask = ((uint64_t)1 << bpe->hash_bits) - 1;
    *tag = (uint32_t)(hash >> 32);
    for (uint64_t i = hash & mask;; i = (i + 1) & mask) {
        const uint64_t entry = bpe->by_bytes[i];
        if (entry == 0) {
            return &bpe->by_bytes[i];
        }
        if (entry >> 32 == *tag) {
            const BpeToken_ token = bpe->tokens[(uint32_t)entry - 1];
            if (token.length == n && memcmp(token.text, bytes, n) == 0) {
                return &bpe->by_bytes[i];
            }
        }
    }
}

// The id of the token with exactly these bytes, or -1. Never the end-of-text id.
static inline int bpe_find(const Bpe* bpe, const char* bytes, size_t n) {
    uint32_t tag;
    return (int)(uint32_t)*bpe_entry_(bpe, (const unsigned char*)bytes, n, &tag) - 1;
}

// The index of a pair's first entry. The high bits of the product depend on all bits of the pair.
ALWAYS_INLINE uint64_t bpe_pair_index_(const Bpe* bpe, uint64_t pair) {
    return pair * BPE_HASH_MULTIPLIER_ >> (64 - bpe->hash_bits);
}

// The id of the union of two tokens, or BPE_NONE_.
static inline int bpe_pair_(const Bpe* bpe, int left, int right) {
    const uint64_t pair = (uint64_t)left << 21 | (uint64_t)right, mask = ((uint64_t)1 << bpe->hash_bits) - 1;
    for (uint64_t i = bpe_pair_index_(bpe, pair);; i = (i + 1) & mask) {
        const uint64_t entry = bpe->by_pair[i];
        if (entry == 0) {
            return BPE_NONE_;
        }
        if (entry >> 21 == pair) {
            return (int)(entry & BPE_NONE_);
        }
    }
}

// The union has a higher id than its parts, so an entry is never 0.
static inline void bpe_add_pair_(Bpe* bpe, int left, int right, int id) {
    const uint64_t pair = (uint64_t)left << 21 | (uint64_t)right, mask = ((uint64_t)1 << bpe->hash_bits) - 1;
    uint64_t i = bpe_pair_index_(bpe, pair);
    while (bpe->by_pair[i] != 0) {
        i = (i + 1) & mask;
    }
    bpe->by_pair[i] = pair << 21 | (uint64_t)id;
}

// ---- merging

enum {
    BPE_SHORT_ = 48
}; // bytes of a piece up to which searching all pairs is faster than keeping them sorted

// A token of a piece while it is merged, at the place of its first byte.
typedef struct {
    int id;
    int rank; // id of the union with the next token, or BPE_NONE_; also where no token begins any more
    uint32_t next, last; // places of the neighbours, BPE_NOWHERE_ at the ends
} BpePart_;

typedef struct {
    uint32_t place; // of the left part
    uint32_t next;  // another waiting pair of the same rank
} BpeWaiting_;

#define BPE_NOWHERE_ UINT32_MAX

typedef struct {
    BpePart_* parts;      // (capacity)
    BpeWaiting_* waiting; // (3 * capacity)
    size_t capacity;      // bytes of the longest piece so far
    uint32_t* first;      // (V) for each rank the first of its waiting pairs
    uint64_t* ranks;      // (V) bits: the ranks that have waiting pairs
    uint32_t waiting_count;
} BpeMerger_;

static inline void bpe_merger_open_(BpeMerger_* merger, int V) {
    memset(merger, 0, sizeof(*merger));
    merger->first = (uint32_t*)check_alloc((size_t)V, sizeof(uint32_t), "BPE merging");
    merger->ranks = (uint64_t*)check_alloc((size_t)V / 64 + 1, sizeof(uint64_t), "BPE merging");
}

static inline void bpe_merger_close_(BpeMerger_* merger) {
    free(merger->parts);
    free(merger->waiting);
    free(merger->first);
    free(merger->ranks);
    memset(merger, 0, sizeof(*merger));
}

// Merges a piece of at most BPE_SHORT_ bytes and returns the number of ids: looks through all pairs each
// time.
static inline int bpe_merge_short_(const Bpe* bpe, const unsigned char* piece, int n, int* ids) {
    int part[BPE_SHORT_], rank[BPE_SHORT_];
    assert(0 < n && n <= BPE_SHORT_);
    for (int i = 0; i < n; i++) {
        part[i] = bpe->byte_ids[piece[i]];
    }
    for (int i = 0; i + 1 < n; i++) {
        rank[i] = bpe->byte_pairs[256 * piece[i] + piece[i + 1]];
    }
    while (n > 1) {
        int first = BPE_NONE_ << 6; // the lowest rank, and its place in the lower bits: no branch to predict
        for (int i = 0; i + 1 < n; i++) {
            const int here = rank[i] << 6 | i;
            first = here < first ? here : first;
        }
        const int lowest = first >> 6, at = first & 63;
        if (lowest == BPE_NONE_) {
            break;
        }
        n--;
        part[at] = lowest;
        for (int i = at + 1; i < n; i++) {
            part[i] = part[i + 1];
            rank[i - 1] = rank[i];
        }
        if (at > 0) {
            rank[at - 1] = bpe_pair_(bpe, part[at - 1], lowest);
        }
        if (at + 1 < n) {
            rank[at] = bpe_pair_(bpe, lowest, part[at + 1]);
        }
    }
    memcpy(ids, part, (size_t)n * sizeof(int));
    return n;
}

// Sets the rank of the part at `place` and its next, and lets the pair wait for its turn.
static inline void bpe_rank_(BpeMerger_* merger, const Bpe* bpe, uint32_t place) {
    BpePart_* part = &merger->parts[place];
    part->rank =
        part->next == BPE_NOWHERE_ ? BPE_NONE_ : bpe_pair_(bpe, part->id, merger->parts[part->next].id);
    if (part->rank == BPE_NONE_) {
        return;
    }
    uint64_t* word = &merger->ranks[part->rank / 64];
    const uint64_t bit = (uint64_t)1 << part->rank % 64;
    const BpeWaiting_ pair = {place, *word & bit ? merger->first[part->rank] : BPE_NOWHERE_};
    *word |= bit;
    merger->first[part->rank] = merger->waiting_count;
    merger->waiting[merger->waiting_count++] = pair;
}

// Makes one token of the part at `place` and its next.
static inline void bpe_join_(BpeMerger_* merger, const Bpe* bpe, uint32_t place) {
    BpePart_ *part = &merger->parts[place], *gone = &merger->parts[part->next];
    part->id = part->rank;
    part->next = gone->next;
    gone->rank = BPE_NONE_;
    if (part->next != BPE_NOWHERE_) {
        merger->parts[part->next].last = place;
    }
    bpe_rank_(merger, bpe, place);
    if (part->last != BPE_NOWHERE_) {
        bpe_rank_(merger, bpe, part->last);
    }
}

// Makes the tokens `rank` of all pairs of this rank, leftmost first. Order matters only where the parts are
// equal, as in a a a: from any pair of such a run we go back to its beginning and merge the run at once.
static inline void bpe_join_rank_(BpeMerger_* merger, const Bpe* bpe, int rank) {
    BpePart_* parts = merger->parts;
    for (uint32_t i = merger->first[rank]; i != BPE_NOWHERE_; i = merger->waiting[i].next) {
        uint32_t place = merger->waiting[i].place;
        if (parts[place].rank != rank) {
            continue; // one of its parts has gone into another token
        }
        const int id = parts[place].id;
        if (id == parts[parts[place].next].id) {
            while (parts[place].last != BPE_NOWHERE_ && parts[parts[place].last].id == id) {
                place = parts[place].last;
            }
        }
        while (place != BPE_NOWHERE_ && parts[place].rank == rank) {
            bpe_join_(merger, bpe, place);
            place = parts[place].next;
        }
    }
}

// Merges a piece of any length and returns the number of ids. The union has a higher id than its parts: while
// the pairs of one rank are merged, new ones come up only at higher ranks. So the ranks are gone through
// once, in ascending order, and the whole is linear in the length and the vocabulary's bits.
static inline size_t bpe_merge_long_(const Bpe* bpe, BpeMerger_* merger, const unsigned char* piece, size_t n,
                                     int* ids) {
    CHECK(n < BPE_NOWHERE_ / 3, "a piece of text of %zu bytes without a cut, wanted fewer than %u", n,
          BPE_NOWHERE_ / 3);
    if (n > merger->capacity) {
        free(merger->parts);
        free(merger->waiting);
        merger->capacity = n + n / 2;
        // not zeroed: most of it is never touched
        merger->parts = (BpePart_*)malloc(array_bytes(merger->capacity, sizeof(BpePart_)));
        merger->waiting = (BpeWaiting_*)malloc(array_bytes(3 * merger->capacity, sizeof(BpeWaiting_)));
        CHECK(merger->parts && merger->waiting, "no memory to merge a piece of text of %zu bytes", n);
    }
    for (size_t i = 0; i < n; i++) {
        merger->parts[i].id = bpe->byte_ids[piece[i]];
        merger->parts[i].next = i + 1 < n ? (uint32_t)i + 1 : BPE_NOWHERE_;
        merger->parts[i].last = i > 0 ? (uint32_t)i - 1 : BPE_NOWHERE_;
    }
    merger->waiting_count = 0;
    for (size_t i = 0; i < n; i++) {
        bpe_rank_(merger, bpe, (uint32_t)i);
    }
    for (int word = 0; word <= bpe->vocab_size / 64; word++) {
        while (merger->ranks[word]) { // joining sets higher bits of this word
            const int rank = 64 * word + __builtin_ctzll(merger->ranks[word]);
            merger->ranks[word] &= merger->ranks[word] - 1;
            bpe_join_rank_(merger, bpe, rank);
        }
    }
    size_t count = 0;
    for (uint32_t place = 0; place != BPE_NOWHERE_; place = merger->parts[place].next) {
        ids[count++] = merger->parts[place].id;
    }
    return count;
}

static inline size_t bpe_merge_(const Bpe* bpe, BpeMerger_* merger, const unsigned char* piece, size_t n,
                                int* ids) {
    return n <= BPE_SHORT_ ? (size_t)bpe_merge_short_(bpe, piece, (int)n, ids)
                           : bpe_merge_long_(bpe, merger, piece, n, ids);
}

// ---- classes of characters

enum { BPE_OTHER_, BPE_LETTER_, BPE_NUMBER_, BPE_BLANK_ };

static inline void bpe_set_class_(Bpe* bpe, const uint32_t (*ranges)[2], int rows, int class_) {
    for (int row = 0; row < rows; row++) {
        for (uint32_t c = ranges[row][0]; c <= ranges[row][1]; c++) {
            bpe->classes[c / 4] |= (unsigned char)(class_ << 2 * (c % 4));
        }
    }
}

static inline void bpe_open_classes_(Bpe* bpe) {
    const uint32_t letters_end = unicode_letters[UNICODE_LETTERS - 1][1] + 1;
    const uint32_t numbers_end = unicode_numbers[UNICODE_NUMBERS - 1][1] + 1;
    bpe->classes_end = letters_end > numbers_end ? letters_end : numbers_end; // blanks are far below
    bpe->classes = (unsigned char*)check_alloc(bpe->classes_end / 4 + 1, 1, "classes of characters");
    bpe_set_class_(bpe, unicode_letters, UNICODE_LETTERS, BPE_LETTER_);
    bpe_set_class_(bpe, unicode_numbers, UNICODE_NUMBERS, BPE_NUMBER_);
    bpe_set_class_(bpe, unicode_blanks, UNICODE_BLANKS, BPE_BLANK_);
}

// Bytes of the character that begins with `lead` >= 0x80, as far as the lead tells; 0 if none begins so.
static inline int bpe_length_(unsigned lead) {
    return lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
}

// Bytes and class of the character at the start of text[0 .. left), which is not ASCII; one byte of no class
// where there is none. Surrogates and what lies above U+10FFFF are no characters either, but that is the
// same: none has a class.
static inline int bpe_character_(const Bpe* bpe, const unsigned char* text, size_t left, int* class_) {
    static const uint32_t smallest[5] = {0, 0, 0x80, 0x800, 0x10000}; // character of so many bytes
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
    if (c < bpe->classes_end) {
        *class_ = bpe->classes[c / 4] >> 2 * (c % 4) & 3;
    }
    return length;
}

// ---- cutting text into pieces

// 64 bytes of text, one bit for each; past the end of the text all bits are 0.
typedef struct {
    uint64_t letter, number, blank, other; // all bytes of a character of this class
    uint64_t space, quote;                 // U+0020, U+0027
    uint64_t blank1, blank2, blank3;       // first bytes of blanks of 1, 2 and 3 bytes
} BpeBlock_;

typedef struct {
    const Bpe* bpe;
    const unsigned char* text;
    size_t bytes;
    size_t at; // where `now` begins, a multiple of 64
    BpeBlock_ last, now, next;
    uint64_t spilled;     // bytes of the block after `next` that end a character begun in `next`, ...
    int spilled_class;    // ... and the class of this character
    uint64_t cut, joined; // cuts in `now` that a contraction begun in `last` makes and removes
} BpeSplitter_;

#if defined(__AVX512BW__)
#define BPE_LANES_ 64
#elif defined(__AVX2__)
#define BPE_LANES_ 32
#else
#define BPE_LANES_ 16
#endif

typedef uint8_t BpeVec_ __attribute__((vector_size(BPE_LANES_)));
typedef int8_t BpeVecMask_ __attribute__((vector_size(BPE_LANES_)));

// The highest bit of each lane.
ALWAYS_INLINE uint64_t bpe_bits_(BpeVecMask_ lanes) {
#if defined(__AVX512BW__)
    return _mm512_movepi8_mask((__m512i)lanes);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_epi8((__m256i)lanes);
#else
    uint64_t halves[2];
    memcpy(halves, &lanes, sizeof(halves));
    for (int i = 0; i < 2; i++) { // bit 8 j goes to bit 56 + j
        halves[i] = (halves[i] >> 7 & 0x0101010101010101) * 0x0102040810204080 >> 56;
    }
    return halves[0] | halves[1] << 8;
#endif
}

// Moves the bits of bytes that are no ASCII into the classes of their characters.
static inline void bpe_classify_wide_(BpeSplitter_* splitter, size_t begin, uint64_t wide, BpeBlock_* block) {
    uint64_t by_class[4] = {0, 0, 0, 0};
    by_class[splitter->spilled_class] = splitter->spilled;
    wide &= ~splitter->spilled;
    splitter->spilled = 0;
    while (wide) {
        const int i = __builtin_ctzll(wide);
        int class_;
        const size_t at = begin + (size_t)i;
        const int length = bpe_character_(splitter->bpe, splitter->text + at, splitter->bytes - at, &class_);
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

// The bits of the 64 bytes from `begin`. Blocks are to be asked for in order.
ALWAYS_INLINE BpeBlock_ bpe_classify_(BpeSplitter_* splitter, size_t begin) {
    BpeBlock_ block;
    memset(&block, 0, sizeof(block));
    if (begin >= splitter->bytes) {
        return block;
    }
    const unsigned char* text = splitter->text + begin;
    const size_t left = splitter->bytes - begin;
    uint64_t valid = ~(uint64_t)0, wide = 0;
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

static inline BpeSplitter_ bpe_splitter_(const Bpe* bpe, const unsigned char* text, size_t bytes) {
    BpeSplitter_ splitter;
    memset(&splitter, 0, sizeof(splitter));
    splitter.bpe = bpe;
    splitter.text = text;
    splitter.bytes = bytes;
    splitter.next = bpe_classify_(&splitter, 0);
    return splitter;
}

// Bytes of the contraction that text[0 .. left), which begins with ', begins with; 0 for none.
static inline int bpe_contraction_(const unsigned char* text, size_t left) {
    const unsigned char a = left > 1 ? text[1] : 0, b = left > 2 ? text[2] : 0;
    return a == 's' || a == 't' || a == 'd' || a == 'm'                                 ? 2
           : (a == 'l' && b == 'l') || (a == 'v' && b == 'e') || (a == 'r' && b == 'e') ? 3
                                                                                        : 0;
}

// A contraction takes letters away from the run that they would begin: no cut before them, one after them.
static inline uint64_t bpe_cut_contractions_(BpeSplitter_* splitter, uint64_t cuts) {
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

// The bytes at which a piece begins, as bits of the next block.
ALWAYS_INLINE uint64_t bpe_cuts_(BpeSplitter_* splitter) {
    splitter->last = splitter->now;
    splitter->now = splitter->next;
    splitter->next = bpe_classify_(splitter, splitter->at + 64);
    const BpeBlock_ *last = &splitter->last, *now = &splitter->now, *next = &splitter->next;
#define BPE_BEFORE_(class_) (now->class_ << 1 | last->class_ >> 63) // bytes that follow one of this class
    const uint64_t here = now->letter | now->number | now->other;   // not blank
    const uint64_t there = next->letter | next->number | next->other;
    // a run begins where the class changes, but a space has joined it already
    const uint64_t runs = (now->letter & ~BPE_BEFORE_(letter)) | (now->number & ~BPE_BEFORE_(number)) |
                          (now->other & ~BPE_BEFORE_(other));
    // of blanks the first begins a piece, and so does the last, but only if something follows
    const uint64_t blanks = (now->blank & ~BPE_BEFORE_(blank)) | (now->blank1 & (here >> 1 | there << 63)) |
                            (now->blank2 & (here >> 2 | there << 62)) |
                            (now->blank3 & (here >> 3 | there << 61));
    uint64_t cuts = (runs & ~BPE_BEFORE_(space)) | blanks;
#undef BPE_BEFORE_
    cuts = (cuts & ~splitter->joined) | splitter->cut;
    splitter->joined = splitter->cut = 0;
    return bpe_cut_contractions_(splitter, cuts);
}

// Appends the numbers of the bits, plus `base`, to places[count ..] and returns the new count. Writes up to 7
// places more: a loop whose length rarely changes is predicted.
ALWAYS_INLINE size_t bpe_places_(uint64_t bits, uint32_t base, uint32_t* places, size_t count) {
    const int n = __builtin_popcountll(bits);
    for (int done = 0; done < n; done += 8) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            places[count + (size_t)(done + i)] =
                base + (uint32_t)__builtin_ctzll(bits | (uint64_t)1 << 63); // of 0 it is not defined
            bits &= bits - 1;
        }
    }
    return count + (size_t)n;
}

enum { BPE_BLOCKS_ = 64, BPE_CUTS_ = 64 * BPE_BLOCKS_ + 8 }; // blocks cut at a time, and room for their cuts

// The cuts in the next blocks of the text, relative to the first of them; byte 0 of the text is not one of
// them.
static inline size_t bpe_split_(BpeSplitter_* splitter, uint32_t cuts[BPE_CUTS_]) {
    size_t count = 0;
    for (uint32_t i = 0; i < BPE_BLOCKS_ && splitter->at < splitter->bytes; i++) {
        const uint64_t bits = bpe_cuts_(splitter) & ~(uint64_t)(splitter->at == 0 ? 1 : 0);
        count = bpe_places_(bits, 64 * i, cuts, count);
        splitter->at += 64;
    }
    return count;
}

// Class of the character that ends before text[at], at > 0.
static inline int bpe_class_before_(const Bpe* bpe, const unsigned char* text, size_t at) {
    int class_;
    size_t n = 1;
    while (n < 4 && n < at && (text[at - n] & 0xC0) == 0x80) { // not yet where a character may begin
        n++;
    }
    const unsigned char first = text[at - n];
    if (first < 0x80) {
        return n == 1 ? bpe->classes[first / 4] >> 2 * (first % 4) & 3 : BPE_OTHER_;
    }
    return (size_t)bpe_character_(bpe, text + at - n, n, &class_) == n ? class_ : BPE_OTHER_;
}

// Whether a cut before text[at], at > 0, leaves all pieces as they were. A blank after another character
// always begins a piece, and only blanks depend on what follows them. Blanks that are no ASCII are passed by.
static inline int bpe_may_cut_(const Bpe* bpe, const char* text, size_t at) {
    const unsigned char* bytes = (const unsigned char*)text;
    const int blank = bytes[at] == ' ' || ('\t' <= bytes[at] && bytes[at] <= '\r');
    return blank && bpe_class_before_(bpe, bytes, at) != BPE_BLANK_;
}

// The first place from `at` on where the text may be divided: the ids of its parts are then those of the
// whole. 0 for 0, and `bytes` if there is none.
static inline size_t bpe_cut(const Bpe* bpe, const char* text, size_t bytes, size_t at) {
    while (0 < at && at < bytes && !bpe_may_cut_(bpe, text, at)) {
        at++;
    }
    return at;
}

// ---- a vocabulary

// Begins a vocabulary of V ids, which becomes the owner of the buffer. All tokens but end-of-text are empty.
static inline void bpe_open_ids_(Bpe* bpe, const char* name, unsigned char* buffer, size_t V, size_t eot) {
    CHECK(0 < V && V <= BPE_MAX_VOCAB, "%s: %zu tokens with end-of-text, wanted 1 to %d", name, V,
          BPE_MAX_VOCAB);
    memset(bpe, 0, sizeof(*bpe));
    bpe->vocab_size = (int)V;
    bpe->eot = (int)eot;
    bpe->buffer = buffer;
    bpe->tokens = (BpeToken_*)check_alloc(V, sizeof(BpeToken_), "vocabulary");
    bpe->tokens[eot].text = (const unsigned char*)BPE_EOT_TEXT;
    bpe->tokens[eot].length = strlen(BPE_EOT_TEXT);
    for (bpe->hash_bits = 9; (size_t)1 << bpe->hash_bits < 2 * V; bpe->hash_bits++) {
    }
    bpe->by_bytes = (uint64_t*)check_alloc((size_t)1 << bpe->hash_bits, sizeof(uint64_t), "vocabulary");
    bpe->by_pair = (uint64_t*)check_alloc((size_t)1 << bpe->hash_bits, sizeof(uint64_t), "vocabulary");
}

// Sets a token's bytes; no other may have the same. Returns false if one has.
static inline int bpe_set_token_(Bpe* bpe, int id, const unsigned char* text, size_t length) {
    uint32_t tag;
    uint64_t* entry = bpe_entry_(bpe, text, length, &tag);
    if (*entry != 0) {
        return 0;
    }
    *entry = (uint64_t)tag << 32 | (uint32_t)(id + 1);
    bpe->tokens[id].text = text;
    bpe->tokens[id].length = (uint32_t)length;
    return 1;
}

// The bytes in the order of their ids: first those that GPT-2's files spell as themselves (Latin-1 characters
// that can be seen), then the others, spelled as the characters from U+0100.
static inline void bpe_spelled_bytes_(unsigned char order[256], uint16_t spelling[256]) {
    int n = 0;
    for (int seen = 1; seen >= 0; seen--) {
        for (int byte = 0, other = 0; byte < 256; byte++) {
            const int is_seen = (0x21 <= byte && byte <= 0x7E) || (0xA1 <= byte && byte != 0xAD);
            if (is_seen == seen) {
                spelling[n] = (uint16_t)(seen ? byte : 0x100 + other++);
                order[n++] = (unsigned char)byte;
            }
        }
    }
}

// Begins the vocabulary of n merges: the single bytes in the order of GPT-2, the unions to come, end-of-text.
// The buffer is for the bytes of all tokens.
static inline void bpe_begin_merges_(Bpe* bpe, const char* name, unsigned char* buffer, size_t n) {
    uint16_t spelling[256];
    bpe_open_ids_(bpe, name, buffer, 256 + n + 1, 256 + n);
    bpe_spelled_bytes_(buffer, spelling);
    for (int id = 0; id < 256; id++) {
        bpe_set_token_(bpe, id, buffer + id, 1);
    }
}

// Sets token `id`, the one after the last so far, to the union of two. Returns the token of these bytes,
// which is another if there was one already.
static inline int bpe_add_merge_(Bpe* bpe, int id, int left, int right) {
    const BpeToken_ before = bpe->tokens[id - 1], a = bpe->tokens[left], b = bpe->tokens[right];
    unsigned char* text = (unsigned char*)before.text + before.length; // in bpe->buffer
    memcpy(text, a.text, a.length);
    memcpy(text + a.length, b.text, b.length);
    bpe_set_token_(bpe, id, text, a.length + b.length);
    return bpe_find(bpe, (const char*)text, a.length + b.length);
}

// The tokens are there: adds all else. Finds for each token the two whose union it is: what its bytes merge
// to with the tokens before it. In any text it then arises from these two only: as long as no token crosses
// its borders, the merges inside them are the same as if it stood alone. Returns 0, with the reason in
// `error`, where merging cannot make the tokens.
static inline int bpe_finish_(Bpe* bpe, const char* name, char* error) {
    bpe_open_classes_(bpe);
    bpe->byte_pairs = (int*)check_alloc(256 * 256, sizeof(int), "vocabulary");
    for (int pair = 0; pair < 256 * 256; pair++) {
        bpe->byte_pairs[pair] = BPE_NONE_;
    }
    for (int byte = 0; byte < 256; byte++) {
        const char text = (char)byte;
        bpe->byte_ids[byte] = bpe_find(bpe, &text, 1);
        if (bpe->byte_ids[byte] < 0) {
            return error_set(error, name, "no token is the byte 0x%02X, wanted all 256", (unsigned)byte);
        }
    }
    size_t longest = 0;
    for (int id = 0; id < bpe->vocab_size; id++) {
        longest = bpe->tokens[id].length > longest ? bpe->tokens[id].length : longest;
    }
    BpeMerger_ merger;
    bpe_merger_open_(&merger, bpe->vocab_size);
    int* parts = (int*)check_alloc(longest, sizeof(int), "vocabulary");
    int ok = 1;
    for (int id = 0; ok && id < bpe->vocab_size; id++) {
        const BpeToken_ token = bpe->tokens[id];
        if (token.length == 1 || id == bpe->eot) {
            continue;
        }
        const size_t n = bpe_merge_(bpe, &merger, token.text, token.length, parts);
        ok = n == 2 && parts[0] < id && parts[1] < id;
        if (ok) {
            bpe_add_pair_(bpe, parts[0], parts[1], id);
            if (token.length == 2) {
                bpe->byte_pairs[256 * token.text[0] + token.text[1]] = id;
            }
        } else {
            error_set(error, name, "token %d merges to %zu tokens, wanted two of lower ids", id, n);
        }
    }
    free(parts);
    bpe_merger_close_(&merger);
    return ok;
}

// The first merge whose parts are not those that bpe_finish_ found: no text ever has them side by side
// when it is their turn. -1 if there is none.
static inline int bpe_wrong_merge_(const Bpe* bpe, const int (*pairs)[2]) {
    for (int id = 256; id < bpe->eot; id++) {
        if (bpe_pair_(bpe, pairs[id - 256][0], pairs[id - 256][1]) != id) {
            return id - 256;
        }
    }
    return -1;
}

// The vocabulary of merges in their order, pairs[i] = (left id, right id): ids 0 to 255 are the single bytes
// in the order of GPT-2, 256 + i is the union of pairs[i], end-of-text is the last. `name` is for errors.
static inline void bpe_open_merges(Bpe* bpe, const int (*pairs)[2], int num_merges, const char* name) {
    assert(0 <= num_merges);
    size_t* ends = (size_t*)check_alloc(256 + (size_t)num_merges, sizeof(size_t), "merges"); // of the tokens
    for (int id = 0; id < 256; id++) {
        ends[id] = (size_t)id + 1;
    }
    for (int id = 256, i = 0; i < num_merges; id++, i++) {
        size_t bytes = 0;
        for (int side = 0; side < 2; side++) {
            const int part = pairs[i][side];
            CHECK(0 <= part && part < id, "%s: merge %d has the id %d, wanted 0 to %d", name, i, part,
                  id - 1);
            bytes += ends[part] - (part > 0 ? ends[part - 1] : 0);
        }
        CHECK(bytes <= INT_MAX, "%s: merge %d makes a token of %zu bytes, wanted at most %d", name, i, bytes,
              INT_MAX);
        ends[id] = ends[id - 1] + bytes;
    }
    unsigned char* buffer = (unsigned char*)check_alloc(ends[255 + num_merges], 1, "vocabulary");
    free(ends);
    bpe_begin_merges_(bpe, name, buffer, (size_t)num_merges);
    for (int i = 0; i < num_merges; i++) {
        const int made = bpe_add_merge_(bpe, 256 + i, pairs[i][0], pairs[i][1]);
        CHECK(made == 256 + i, "%s: merge %d makes token %d again", name, i, made);
    }
    char error[ERROR_BYTES];
    CHECK(bpe_finish_(bpe, name, error), "%s", error);
    const int wrong = bpe_wrong_merge_(bpe, pairs);
    CHECK(wrong < 0, "%s: merge %d: the merges before never leave its two tokens side by side", name, wrong);
}

static inline void bpe_close(Bpe* bpe) {
    free(bpe->tokens);
    free(bpe->buffer);
    free(bpe->by_bytes);
    free(bpe->by_pair);
    free(bpe->byte_pairs);
    free(bpe->classes);
    memset(bpe, 0, sizeof(*bpe));
}

// The bytes of one token; they are not terminated, and stay valid until the vocabulary is closed.
static inline const char* bpe_token(const Bpe* bpe, int id, int* length) {
    CHECK(0 <= id && id < bpe->vocab_size, "token id %d, wanted 0 to %d", id, bpe->vocab_size - 1);
    *length = (int)bpe->tokens[id].length;
    return (const char*)bpe->tokens[id].text;
}

// ---- encoding

// A piece of up to 15 bytes (as its key, which is never 0) and its ids, if it has no more than 4; two slots
// fill a cache line.
typedef struct {
    uint64_t key[2];
    uint32_t ids[4]; // and in the highest byte of the first their number
} BpeShortSlot_;

// A piece of up to 31 bytes, a key of 4 words; after it come the number of ids and the ids. A cache line.
typedef union {
    uint64_t key[8];
    int32_t ids[16];
} BpeSlot_;

// 16 MiB and 4 MiB, from where check_alloc asks for huge pages. Half of the short ones is 1/5 slower on text
// seen before (110 MB, 281,708 different pieces), twice of them is slower on new text.
enum { BPE_SHORT_SLOTS_BITS_ = 19, BPE_LONG_SLOTS_BITS_ = 16, BPE_SHORT_IDS_ = 4, BPE_LONG_IDS_ = 7 };

enum { BPE_LOOKUPS_ = 32 }; // pieces whose slots come from memory at a time

typedef struct {
    const Bpe* bpe;
    BpeShortSlot_* short_slots; // of either a piece has two slots side by side, the latest used first
    BpeSlot_* long_slots;
    BpeMerger_ merger;
} BpeEncoder;

static inline void bpe_encoder_open(BpeEncoder* encoder, const Bpe* bpe) {
    encoder->bpe = bpe;
    encoder->short_slots =
        (BpeShortSlot_*)check_alloc((size_t)1 << BPE_SHORT_SLOTS_BITS_, sizeof(BpeShortSlot_), "BPE cache");
    encoder->long_slots =
        (BpeSlot_*)check_alloc((size_t)1 << BPE_LONG_SLOTS_BITS_, sizeof(BpeSlot_), "BPE cache");
    bpe_merger_open_(&encoder->merger, bpe->vocab_size);
}

static inline void bpe_encoder_close(BpeEncoder* encoder) {
    free(encoder->short_slots);
    free(encoder->long_slots);
    bpe_merger_close_(&encoder->merger);
    memset(encoder, 0, sizeof(*encoder));
}

// The ids of a piece, without the cache. A whole token is found at once; the rest is merged.
static inline size_t bpe_encode_piece_(BpeEncoder* encoder, const unsigned char* piece, size_t n, int* ids) {
    const int id = bpe_find(encoder->bpe, (const char*)piece, n);
    if (id >= 0) {
        ids[0] = id;
        return 1;
    }
    return bpe_merge_(encoder->bpe, &encoder->merger, piece, n, ids);
}

// Sets the key of a piece of n < 8 * words bytes, of which 8 * words can be read, and returns its hash, whose
// high bits depend on all of the key.
ALWAYS_INLINE uint64_t bpe_key_(const unsigned char* piece, size_t n, int words, uint64_t* key) {
    // 32 - n bytes in, the first n bytes are 0xFF
    static const uint64_t window[8]
        __attribute__((aligned(64))) = {~(uint64_t)0, ~(uint64_t)0, ~(uint64_t)0, ~(uint64_t)0, 0, 0, 0, 0};
    const unsigned char* masks = (const unsigned char*)window + 32 - n;
    uint64_t hash = 0;
    for (int i = 0; i < words; i++) {
        key[i] = bpe_load8_(piece + 8 * i) & bpe_load8_(masks + 8 * i);
    }
    key[words - 1] |= (uint64_t)n << 56;
    for (int i = 0; i < words; i++) {
        hash = (hash ^ key[i]) * BPE_HASH_MULTIPLIER_;
        hash ^= hash >> 32;
    }
    return hash * BPE_HASH_MULTIPLIER_;
}

// A piece on its way to its ids.
typedef struct {
    const unsigned char* text;
    size_t bytes;
    BpeShortSlot_* short_slots; // the two in which it may be, on their way from memory,
    BpeSlot_* long_slots;       // or these; both NULL if it is too long
    uint64_t key[4];
} BpeLookup_;

ALWAYS_INLINE void bpe_look_up_long_(const BpeEncoder* encoder, const unsigned char* piece, size_t n,
                                     BpeLookup_* lookup) {
    const uint64_t hash = bpe_key_(piece, n, 4, lookup->key);
    lookup->long_slots = &encoder->long_slots[hash >> (65 - BPE_LONG_SLOTS_BITS_) << 1];
}

// Begins to look up a piece, behind whose start `left` bytes can be read.
ALWAYS_INLINE void bpe_look_up_(const BpeEncoder* encoder, const unsigned char* piece, size_t n, size_t left,
                                BpeLookup_* lookup) {
    lookup->text = piece;
    lookup->bytes = n;
    lookup->short_slots = NULL;
    lookup->long_slots = NULL;
    if (n < 16 && left >= 16) {
        const uint64_t hash = bpe_key_(piece, n, 2, lookup->key);
        lookup->short_slots = &encoder->short_slots[hash >> (65 - BPE_SHORT_SLOTS_BITS_) << 1];
        __builtin_prefetch(lookup->short_slots);
    } else if (n < 32 && left >= 32) {
        bpe_look_up_long_(encoder, piece, n, lookup);
        __builtin_prefetch(lookup->long_slots);
    }
}

// The ids of a piece that is in its long slots, or should be: afterwards it is, if it has no more ids than
// fit.
__attribute__((noinline, unused)) static size_t bpe_encode_long_(BpeEncoder* encoder,
                                                                 const BpeLookup_* lookup, int* ids) {
    BpeSlot_ *slots = lookup->long_slots, slot = slots[0];
    const int in_first = memcmp(slot.key, lookup->key, sizeof(lookup->key)) == 0;
    slot = in_first ? slot : slots[1];
    size_t count = (size_t)slot.ids[8];
    if (memcmp(slot.key, lookup->key, sizeof(lookup->key)) == 0) {
        memcpy(ids, &slot.ids[9], count * sizeof(int));
    } else {
        count = bpe_encode_piece_(encoder, lookup->text, lookup->bytes, ids);
        if (count > BPE_LONG_IDS_) {
            return count;
        }
        memcpy(slot.key, lookup->key, sizeof(lookup->key));
        slot.ids[8] = (int32_t)count;
        memcpy(&slot.ids[9], ids, count * sizeof(int));
    }
    if (!in_first) {
        slots[1] = slots[0];
        slots[0] = slot;
    }
    return count;
}

// The ids of a short piece that is not in the first of its slots; afterwards it is, if it has no more ids
// than fit. If it is not in the second either, it may be in a long one.
__attribute__((noinline, unused)) static size_t bpe_encode_miss_(BpeEncoder* encoder,
                                                                 const BpeLookup_* lookup, int* ids) {
    BpeShortSlot_ *slots = lookup->short_slots, slot = slots[1];
    size_t count = slot.ids[0] >> 24;
    if (memcmp(slot.key, lookup->key, sizeof(slot.key)) == 0) {
        memcpy(ids, slot.ids, count * sizeof(int));
        ids[0] &= BPE_NONE_;
    } else {
        unsigned char padded[32] = {0};
        BpeLookup_ again = *lookup;
        memcpy(padded, lookup->text, lookup->bytes);
        bpe_look_up_long_(encoder, padded, lookup->bytes, &again);
        count = bpe_encode_long_(encoder, &again, ids);
        if (count > BPE_SHORT_IDS_) {
            return count;
        }
        memcpy(slot.key, lookup->key, sizeof(slot.key));
        memcpy(slot.ids, ids, count * sizeof(int));
        slot.ids[0] |= (uint32_t)count << 24;
    }
    slots[1] = slots[0];
    slots[0] = slot;
    return count;
}

// The ids of a short piece; room for 4.
ALWAYS_INLINE size_t bpe_encode_short_(BpeEncoder* encoder, const BpeLookup_* lookup, int* ids) {
    const BpeShortSlot_* slot = lookup->short_slots;
    if (__builtin_expect(((slot->key[0] ^ lookup->key[0]) | (slot->key[1] ^ lookup->key[1])) != 0, 0)) {
        return bpe_encode_miss_(encoder, lookup, ids);
    }
    memcpy(ids, slot->ids, sizeof(slot->ids));
    ids[0] &= BPE_NONE_;
    return slot->ids[0] >> 24;
}

// The ids of pieces that have been looked up, one after another.
ALWAYS_INLINE size_t bpe_encode_lookups_(BpeEncoder* encoder, const BpeLookup_* lookups, size_t n, int* ids) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        const BpeLookup_* lookup = &lookups[i];
        count += lookup->short_slots  ? bpe_encode_short_(encoder, lookup, ids + count)
                 : lookup->long_slots ? bpe_encode_long_(encoder, lookup, ids + count)
                                      : bpe_encode_piece_(encoder, lookup->text, lookup->bytes, ids + count);
    }
    return count;
}

typedef enum {
    BPE_ENDS,     // the text ends here
    BPE_CONTINUES // more text follows
} BpeMore;

// Bytes at the end of a text that continues which may mean something else with what follows: the beginning of
// a character, and of a contraction.
static inline size_t bpe_uncertain_(const unsigned char* text, size_t bytes) {
    for (size_t n = 1; n <= 3 && n <= bytes; n++) {
        if (text[bytes - n] >= 0xC0) {
            return (size_t)bpe_length_(text[bytes - n]) > n ? n : 0;
        }
    }
    const unsigned char end = bytes >= 2 && text[bytes - 2] == '\'' ? text[bytes - 1] : 0;
    return end == 'l' || end == 'v' || end == 'r' ? 2 : 0;
}

// Sets ids, which has room for `bytes` of them, to the tokens of the text and returns their number. Sets
// *consumed to the bytes that they stand for: all of a text that ends; of one that continues only pieces that
// no following text can change, which is all but the last or the last two. The rest is to come again, with
// what follows it, at the start of the next text: the ids are then those of the whole, wherever it was
// divided. Nothing is consumed before the second piece has begun, so the caller's buffer must be able to
// grow.
static inline size_t bpe_encode(BpeEncoder* encoder, const char* text, size_t bytes, BpeMore more, int* ids,
                                size_t* consumed) {
    const unsigned char* at = (const unsigned char*)text;
    const size_t certain = more == BPE_ENDS ? bytes : bytes - bpe_uncertain_(at, bytes);
    BpeSplitter_ splitter = bpe_splitter_(encoder->bpe, at, certain);
    BpeLookup_ lookups[BPE_LOOKUPS_];
    size_t begin = 0, count = 0;
    while (splitter.at < certain) {
        uint32_t cuts[BPE_CUTS_];
        const size_t base = splitter.at;
        size_t n = bpe_split_(&splitter, cuts);
        if (more == BPE_ENDS && splitter.at >= certain && (n == 0 || base + cuts[n - 1] < certain)) {
            cuts[n++] = (uint32_t)(certain - base); // the end of the last piece; of a contraction it is a cut
        }
        for (size_t first = 0; first < n; first += BPE_LOOKUPS_) {
            const size_t batch = n - first < (size_t)BPE_LOOKUPS_ ? n - first : (size_t)BPE_LOOKUPS_;
            for (size_t i = 0; i < batch; i++) {
                const size_t end = base + cuts[first + i];
                bpe_look_up_(encoder, at + begin, end - begin, bytes - begin, &lookups[i]);
                begin = end;
            }
            count += bpe_encode_lookups_(encoder, lookups, batch, ids + count);
        }
    }
    *consumed = begin;
    return count;
}

#endif
