/*
bpe.h -- byte-pair encoding with a vocabulary like GPT-2's.

Each piece of a text (bpe_split.h) starts as its bytes. The two neighbors whose union has the lowest
id become one token, leftmost first, until no two neighbors form a token.

    bpe_open            opens a vocabulary file (bpe_files.h); read-only afterwards, so threads may
                        share it
    bpe_open_merges     opens one from merges in memory

In most vocabularies every token longer than a byte is the union of two tokens of lower ids, as it
is when merges were trained. In GPT-2's order, which merges files imply, ids 0 to 255 are the single
bytes, then comes one id per merge, and end-of-text is the last.

A tokenizer.json may list its merges in another order than its ids, several merges of a token, and
none of others. Two neighbors are then joined by the rank of their merge in the list (`made`); a
token without a merge is a whole piece (`finds_pieces`), or nothing.

Pieces of SentencePiece's kind (bpe_sentence.h) start as their characters instead, and as the bytes
of those that are no token.

A vocabulary may also have names: end-of-text, and special tokens like <pad>. They have ids and can
be decoded, but no text encodes to them, not even the characters of the name.
*/
#ifndef LLMC_BPE_H
#define LLMC_BPE_H

#include <assert.h>
#include <limits.h>

#include "llmc/base/check.h"
#include "llmc/base/intrinsics.h"
#include "llmc/base/vec.h"
#include "llmc/tokenizer/bpe_rules.h"
#include "llmc/tokenizer/bpe_words.h"
#include "llmc/tokenizer/model_card.h"

#define BPE_EOT_TEXT "<|endoftext|>" // name of the end-of-text token

enum {
    BPE_MAX_VOCAB = (1 << 21) - 1, // three ids fit in 64 bits, with one value left for
    BPE_NONE_ = BPE_MAX_VOCAB,     // no token; above every id
    BPE_BUCKET_ = 8,               // pairs per cache line
    BPE_MAX_KEPT = 8,              // files that are kept
};

typedef enum {
    BPE_TOKEN, // made by merges, or a whole piece
    BPE_NAME,  // no text encodes to it: end-of-text and special tokens like <pad>
    BPE_WORD,  // cut out of the text (bpe_words.h)
    BPE_BYTE,  // a byte of a character that is no token, of SentencePiece's kind
} BpeKind;

typedef struct {
    const unsigned char* text; // any bytes, no terminating zero
    uint32_t length;           // at least 1
    BpeKind kind;
} BpeToken_;

// Hash table with open addressing; an empty entry is 0. Loops copy it, so that the compiler need
// not load it again.
typedef struct {
    uint64_t* entries; // (2^bits), aligned to a cache line; bpe_merge_of_ unpacks one
    int bits;
    const int* made; // (num_ranks) token that the merge of a rank makes; NULL: ranks are ids
} BpePairs_;

// File that a vocabulary was read from.
typedef struct {
    const char* name; // without a directory
    unsigned char* bytes;
    size_t count;
} BpeKept;

typedef struct {
    int vocab_size;        // V
    int eot;               // end-of-text id: stands before each document
    ModelCard card;        // of the files beside it; it owns the card's texts
    BpeToken_* tokens;     // (V), into `buffer`
    unsigned char* buffer; // bytes of all tokens
    int byte_ids[256];     // tokens of single bytes
    // (256, 256) unions of two bytes, or BPE_NONE_: most merging starts and ends here
    int* byte_pairs;
    BpePairs_ pairs;  // unions of two tokens
    int num_ranks;    // above all ranks of merges; V if they are ids
    int finds_pieces; // 1: a piece that is a token is this token, without merging
    BpeWords words;
    int has_template;           // 1: Hugging Face's tokenizers put end-of-text before each text
    BpeKept kept[BPE_MAX_KEPT]; // tokenizer.json first, if any; written as they were read
    int num_kept;
    uint64_t* by_bytes; // (2^bits) tokens by their bytes: 32 bits of the hash, and the id + 1
    int bits;
    BpeRules rules; // of splitting
} Bpe;

// ---- hash tables ----

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

// Returns the entry of the token with these bytes, or the empty entry where it belongs.
static inline uint64_t* bpe_entry_(const Bpe* bpe, const unsigned char* bytes, size_t n, uint32_t* tag) {
    const uint64_t hash = bpe_hash_(bytes, n), mask = ((uint64_t)1 << bpe->bits) - 1;
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

// Returns the id of the token with exactly these bytes, or -1. Never a name.
static inline int bpe_find(const Bpe* bpe, const char* bytes, size_t n) {
    uint32_t tag;
    return (int)(uint32_t)*bpe_entry_(bpe, (const unsigned char*)bytes, n, &tag) - 1;
}

// Unpacked entry of BpePairs_. The id is stored as its distance from BPE_NONE_, so an empty entry
// gives BPE_NONE_.
typedef struct {
    int left, right, id; // 21 bits each
} BpeMerge_;

ALWAYS_INLINE BpeMerge_ bpe_merge_of_(uint64_t entry) {
    const BpeMerge_ merge = {(int)(entry >> 42), (int)(entry >> 21 & BPE_NONE_),
                             BPE_NONE_ - (int)(entry & BPE_NONE_)};
    return merge;
}

// Returns the index of a pair's bucket. The high bits of the product depend on all bits of the
// pair.
ALWAYS_INLINE uint64_t bpe_pair_bucket_(const BpePairs_* pairs, int left, int right) {
    const uint64_t pair = (uint64_t)left << 21 | (uint64_t)right;
    return pair * BPE_HASH_MULTIPLIER_ >> (64 - pairs->bits) & ~(uint64_t)(BPE_BUCKET_ - 1);
}

// Returns the entry of a pair in its bucket, a cache line; 0 if it is absent. No branch, because
// its position in the bucket is unpredictable.
ALWAYS_INLINE uint64_t bpe_in_bucket_(const uint64_t* bucket, uint64_t pair) {
#if defined(X86_INTRINSICS) && defined(__AVX512F__)
    const __m512i entries = _mm512_load_si512(bucket), wanted = _mm512_set1_epi64((long long)pair);
    const __mmask8 equal = _mm512_cmpeq_epi64_mask(_mm512_srli_epi64(entries, 21), wanted);
    return (uint64_t)_mm_cvtsi128_si64(_mm512_castsi512_si128(_mm512_maskz_compress_epi64(equal, entries)));
#else
    uint64_t entry = 0;
    for (int i = 0; i < BPE_BUCKET_; i++) {
        entry |= bucket[i] >> 21 == pair ? bucket[i] : 0;
    }
    return entry;
#endif
}

// Returns the id of the union of two tokens, or BPE_NONE_.
ALWAYS_INLINE int bpe_pair_(const BpePairs_* pairs, int left, int right) {
    const uint64_t pair = (uint64_t)left << 21 | (uint64_t)right, mask = ((uint64_t)1 << pairs->bits) - 1;
    for (uint64_t i = bpe_pair_bucket_(pairs, left, right);; i = (i + BPE_BUCKET_) & mask) {
        const uint64_t entry = bpe_in_bucket_(&pairs->entries[i], pair);
        const int is_full = pairs->entries[i + BPE_BUCKET_ - 1] != 0;
        if (__builtin_expect(!is_full, 1) || entry) {
            return bpe_merge_of_(entry).id;
        }
    }
}

// Prefetches the bucket of a pair.
ALWAYS_INLINE void bpe_pair_fetch_(const BpePairs_* pairs, int left, int right) {
    __builtin_prefetch(&pairs->entries[bpe_pair_bucket_(pairs, left, right)]);
}

static inline void bpe_add_pair_(BpePairs_* pairs, int left, int right, int id) {
    const uint64_t pair = (uint64_t)left << 21 | (uint64_t)right, mask = ((uint64_t)1 << pairs->bits) - 1;
    uint64_t i = bpe_pair_bucket_(pairs, left, right);
    while (pairs->entries[i] != 0) {
        i = (i + 1) & mask;
    }
    pairs->entries[i] = pair << 21 | (uint64_t)(BPE_NONE_ - id);
}

// Sets the key of a piece of n < 8 * words bytes (8 * words bytes are readable). Returns its hash,
// whose high bits depend on the whole key.
ALWAYS_INLINE uint64_t bpe_key_(const unsigned char* piece, size_t n, int words, uint64_t* key) {
    // from offset 32 - n on, the first n bytes are 0xFF
    static const uint64_t window[8]
        __attribute__((aligned(64))) = {~(uint64_t)0, ~(uint64_t)0, ~(uint64_t)0, ~(uint64_t)0, 0, 0, 0, 0};
    // odd, with irregular bits: sums of different keys collide as rarely as random ones
    static const uint64_t multipliers[4] = {0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                            0xD6E8FEB86659FD93};
    const unsigned char* masks = (const unsigned char*)window + 32 - n;
    uint64_t hash = 0;
    for (int i = 0; i < words; i++) {
        key[i] = bpe_load8_(piece + 8 * i) & bpe_load8_(masks + 8 * i);
    }
    key[words - 1] |= (uint64_t)n << 56;
    for (int i = 0; i < words; i++) {
        hash += key[i] * multipliers[i];
    }
    return hash;
}

// ---- merging ----

// Longest piece for which searching all pairs is faster than keeping them sorted.
enum { BPE_SHORT_ = 48 };

// Token of a piece during merging, at the position of its first byte.
typedef struct {
    int id;
    // id of the union with the next token, or BPE_NONE_; also where no token starts any more
    int rank;
    uint32_t next, last; // positions of the neighbors, BPE_NOWHERE_ at the ends
} BpePart_;

typedef struct {
    uint32_t place; // of the left part
    uint32_t next;  // next waiting pair of the same rank
} BpeWaiting_;

#define BPE_NOWHERE_ UINT32_MAX

typedef struct {
    BpePart_* parts;      // (capacity)
    BpeWaiting_* waiting; // (3 * capacity)
    size_t capacity;      // length of the longest piece so far
    uint32_t* first;      // (num_ranks) first waiting pair of each rank
    uint64_t* ranks;      // (num_ranks) bits: ranks with waiting pairs
    uint32_t waiting_count;
    uint64_t* heap; // (3 * capacity) if ranks are not ids: rank << 32 | place, the lowest on top
    size_t heap_count, heap_room;
} BpeMerger_;

static inline void bpe_merger_open_(BpeMerger_* merger, int num_ranks) {
    memset(merger, 0, sizeof(*merger));
    merger->first = (uint32_t*)check_alloc((size_t)num_ranks, sizeof(uint32_t), "BPE merging");
    merger->ranks = (uint64_t*)check_alloc((size_t)num_ranks / 64 + 1, sizeof(uint64_t), "BPE merging");
}

static inline void bpe_merger_close_(BpeMerger_* merger) {
    free(merger->parts);
    free(merger->waiting);
    free(merger->first);
    free(merger->ranks);
    free(merger->heap);
    memset(merger, 0, sizeof(*merger));
}

// Piece of up to BPE_SHORT_ bytes during merging. The tokens are parts[1 .. count]; the entries
// around them are no tokens, so that each has two neighbors. The arrays have room to move 16
// entries at a time.
typedef struct {
    int parts[BPE_SHORT_ + 20];
    // ranks[i], i < count: id of the union of parts i and i + 1, or BPE_NONE_
    int ranks[BPE_SHORT_ + 20];
    int count;
    int at; // latest union
} BpeShortMerge_;

// Sets the tokens that merging a piece of SentencePiece's kind starts from. Returns their number,
// at most n.
static inline size_t bpe_characters_(const Bpe* bpe, const unsigned char* piece, size_t n, int* ids) {
    size_t count = 0, length;
    for (size_t i = 0; i < n; i += length) {
        uint32_t c;
        length = (size_t)utf8_decode(piece + i, n - i, &c);
        const int id = length == 1 ? bpe->byte_ids[piece[i]] : bpe_find(bpe, (const char*)piece + i, length);
        for (size_t k = 0; k < (id < 0 ? length : 1); k++) {
            ids[count++] = id < 0 ? bpe->byte_ids[piece[i + k]] : id;
        }
    }
    return count;
}

static inline void bpe_short_merge_open_(const Bpe* bpe, const unsigned char* piece, int n,
                                         BpeShortMerge_* merge) {
    assert(0 < n && n <= BPE_SHORT_);
    merge->parts[0] = merge->ranks[0] = BPE_NONE_;
    if (bpe->rules.pattern.style == BPE_SENTENCE) {
        merge->count = (int)bpe_characters_(bpe, piece, (size_t)n, &merge->parts[1]);
        merge->parts[merge->count + 1] = BPE_NONE_;
        for (int i = 1; i < merge->count; i++) {
            merge->ranks[i] = bpe_pair_(&bpe->pairs, merge->parts[i], merge->parts[i + 1]);
        }
        return;
    }
    merge->count = n;
    merge->parts[n + 1] = BPE_NONE_;
    for (int i = 0; i < n; i++) {
        merge->parts[i + 1] = bpe->byte_ids[piece[i]];
    }
    for (int i = 1; i < n; i++) {
        merge->ranks[i] = bpe->byte_pairs[256 * piece[i - 1] + piece[i]];
    }
}

// Returns the lowest of n ranks in the higher bits, its index in the lower 6; the leftmost of
// equals.
ALWAYS_INLINE int bpe_lowest_(const int* ranks, int n) {
    int lowest = BPE_NONE_ << 6;
#if defined(X86_INTRINSICS) && defined(__AVX512F__)
    __m512i places = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int i = 0; i < n; i += 16) {
        const __mmask16 in = (__mmask16)(0xFFFFu >> (n - i < 16 ? 16 - (n - i) : 0));
        const __m512i here = _mm512_maskz_loadu_epi32(in, ranks + i);
        const int first =
            _mm512_mask_reduce_min_epi32(in, _mm512_or_si512(_mm512_slli_epi32(here, 6), places));
        lowest = first < lowest ? first : lowest;
        places = _mm512_add_epi32(places, _mm512_set1_epi32(16));
    }
#else
    for (int i = 0; i < n; i++) {
        const int here = ranks[i] << 6 | i; // no branch to predict
        lowest = here < lowest ? here : lowest;
    }
#endif
    return lowest;
}

// Moves row[from + 1 .. n], and what follows it, one to the left, 16 at a time and at least once:
// usually once is enough, which the processor predicts.
ALWAYS_INLINE void bpe_close_gap_(int* row, int from, int n) {
    int i = from;
    do {
        int sixteen[16];
        memcpy(sixteen, row + i + 1, sizeof(sixteen));
        memcpy(row + i, sixteen, sizeof(sixteen));
        i += 16;
    } while (__builtin_expect(i < n, 0));
}

// Looks up the ranks on both sides of the latest union.
ALWAYS_INLINE void bpe_short_merge_rank_(const BpePairs_* pairs, BpeShortMerge_* merge) {
    const int *parts = merge->parts, at = merge->at;
    merge->ranks[at - 1] = bpe_pair_(pairs, parts[at - 1], parts[at]);
    merge->ranks[at] = bpe_pair_(pairs, parts[at], parts[at + 1]);
}

// Merges the two tokens whose union has the lowest id, leftmost first, and prefetches what the next
// step needs. Returns 0 if no two form a token: parts[1 .. count] are the result.
ALWAYS_INLINE int bpe_short_merge_step_(const BpePairs_* pairs, BpeShortMerge_* merge) {
    int *parts = merge->parts, *ranks = merge->ranks;
    const int lowest = bpe_lowest_(ranks, merge->count), at = lowest & 63;
    if (lowest >> 6 == BPE_NONE_) {
        return 0;
    }
    bpe_close_gap_(parts, at + 1, merge->count + 1);
    bpe_close_gap_(ranks, at + 1, merge->count);
    parts[at] = pairs->made ? pairs->made[lowest >> 6] : lowest >> 6;
    merge->count--;
    merge->at = at;
    bpe_pair_fetch_(pairs, parts[at - 1], parts[at]);
    bpe_pair_fetch_(pairs, parts[at], parts[at + 1]);
    return 1;
}

// Merges a piece of at most BPE_SHORT_ bytes. Returns the number of ids.
static inline int bpe_merge_short_(const Bpe* bpe, const unsigned char* piece, int n, int* ids) {
    BpeShortMerge_ merge;
    bpe_short_merge_open_(bpe, piece, n, &merge);
    while (bpe_short_merge_step_(&bpe->pairs, &merge)) {
        bpe_short_merge_rank_(&bpe->pairs, &merge);
    }
    memcpy(ids, &merge.parts[1], (size_t)merge.count * sizeof(int));
    return merge.count;
}

// Sets the rank of the part at `place` and its next, and queues the pair.
ALWAYS_INLINE void bpe_wait_(BpeMerger_* merger, uint32_t place, int rank) {
    merger->parts[place].rank = rank;
    if (rank == BPE_NONE_) {
        return;
    }
    uint64_t* word = &merger->ranks[rank / 64];
    const uint64_t bit = (uint64_t)1 << rank % 64;
    const BpeWaiting_ pair = {place, *word & bit ? merger->first[rank] : BPE_NOWHERE_};
    *word |= bit;
    merger->first[rank] = merger->waiting_count;
    merger->waiting[merger->waiting_count++] = pair;
}

static inline void bpe_rank_(BpeMerger_* merger, const Bpe* bpe, uint32_t place) {
    const BpePart_* part = &merger->parts[place];
    const int is_last = part->next == BPE_NOWHERE_;
    bpe_wait_(merger, place,
              is_last ? BPE_NONE_ : bpe_pair_(&bpe->pairs, part->id, merger->parts[part->next].id));
}

// Merges the part at `place` with its next.
static inline void bpe_join_(BpeMerger_* merger, const Bpe* bpe, uint32_t place) {
    BpePart_ *part = &merger->parts[place], *gone = &merger->parts[part->next];
    const int rank = part->rank;
    part->id = rank;
    part->next = gone->next;
    gone->rank = BPE_NONE_;
    if (part->next != BPE_NOWHERE_) {
        merger->parts[part->next].last = place;
    }
    if (part->next != BPE_NOWHERE_ && merger->parts[part->next].rank == rank) {
        part->rank = BPE_NONE_; // the next is about to be joined, which ranks this one
    } else {
        bpe_rank_(merger, bpe, place);
    }
    if (part->last != BPE_NOWHERE_) {
        bpe_rank_(merger, bpe, part->last);
    }
}

// Merges all pairs of this rank, leftmost first. Order matters only where the parts are equal, as
// in a a a: from any pair of such a run, this goes back to its start and merges the whole run.
static inline void bpe_join_rank_(BpeMerger_* merger, const Bpe* bpe, int rank) {
    BpePart_* parts = merger->parts;
    for (uint32_t i = merger->first[rank]; i != BPE_NOWHERE_; i = merger->waiting[i].next) {
        uint32_t place = merger->waiting[i].place;
        if (parts[place].rank != rank) {
            continue; // one of its parts has been merged
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

// Sets the parts of a piece to its bytes, or its characters. `ids` has room for n. Returns their
// number.
static inline size_t bpe_place_parts_(const Bpe* bpe, BpeMerger_* merger, const unsigned char* piece,
                                      size_t n, int* ids) {
    CHECK(n < BPE_NOWHERE_ / 3, "a piece of text of %zu bytes without a cut, wanted fewer than %u", n,
          BPE_NOWHERE_ / 3);
    if (n > merger->capacity) {
        free(merger->parts);
        free(merger->waiting);
        merger->capacity = n + n / 2;
        merger->parts =
            (BpePart_*)check_alloc_unset(merger->capacity, sizeof(BpePart_), "merging a piece of text");
        merger->waiting = (BpeWaiting_*)check_alloc_unset(3 * merger->capacity, sizeof(BpeWaiting_),
                                                          "merging a piece of text");
    }
    const int has_characters = bpe->rules.pattern.style == BPE_SENTENCE;
    n = has_characters ? bpe_characters_(bpe, piece, n, ids) : n;
    for (size_t i = 0; i < n; i++) {
        merger->parts[i].id = has_characters ? ids[i] : bpe->byte_ids[piece[i]];
        merger->parts[i].next = i + 1 < n ? (uint32_t)i + 1 : BPE_NOWHERE_;
        merger->parts[i].last = i > 0 ? (uint32_t)i - 1 : BPE_NOWHERE_;
    }
    return n;
}

// Merges the parts where ranks are ids. A union has a higher id than its parts, so merging the
// pairs of one rank only adds pairs of higher ranks: one pass over the ranks in ascending order is
// enough, and the cost is linear in the length and the bits of the vocabulary.
static inline void bpe_merge_ids_(const Bpe* bpe, BpeMerger_* merger, const unsigned char* piece, size_t n) {
    merger->waiting_count = 0;
    for (size_t i = 0; i < n; i++) {
        bpe_wait_(merger, (uint32_t)i,
                  i + 1 < n ? bpe->byte_pairs[256 * piece[i] + piece[i + 1]] : BPE_NONE_);
    }
    for (int word = 0; word <= bpe->vocab_size / 64; word++) {
        while (merger->ranks[word]) { // joining sets higher bits of this 64-bit word
            const int rank = 64 * word + __builtin_ctzll(merger->ranks[word]);
            merger->ranks[word] &= merger->ranks[word] - 1;
            bpe_join_rank_(merger, bpe, rank);
        }
    }
}

static inline void bpe_heap_push_(BpeMerger_* merger, uint64_t pair) {
    merger->heap = (uint64_t*)check_reserve(merger->heap, &merger->heap_room, merger->heap_count + 1,
                                            sizeof(uint64_t), "merging a piece of text");
    size_t at = merger->heap_count++;
    for (; at > 0 && pair < merger->heap[(at - 1) / 2]; at = (at - 1) / 2) {
        merger->heap[at] = merger->heap[(at - 1) / 2];
    }
    merger->heap[at] = pair;
}

static inline uint64_t bpe_heap_pop_(BpeMerger_* merger) {
    const uint64_t top = merger->heap[0], sinking = merger->heap[--merger->heap_count];
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < merger->heap_count; at = child) {
        child += child + 1 < merger->heap_count && merger->heap[child + 1] < merger->heap[child];
        if (sinking <= merger->heap[child]) {
            break;
        }
        merger->heap[at] = merger->heap[child];
    }
    merger->heap[at] = sinking;
    return top;
}

// Sets the rank of the part at `place` and its next, and queues the pair.
static inline void bpe_queue_(const Bpe* bpe, BpeMerger_* merger, uint32_t place) {
    BpePart_* part = &merger->parts[place];
    part->rank = part->next == BPE_NOWHERE_ ? BPE_NONE_
                                            : bpe_pair_(&bpe->pairs, part->id, merger->parts[part->next].id);
    if (part->rank != BPE_NONE_) {
        bpe_heap_push_(merger, (uint64_t)part->rank << 32 | place);
    }
}

// Merges the parts by the ranks of a list: a merge may add pairs of lower ranks, which are next
// then.
static inline void bpe_merge_ranks_(const Bpe* bpe, BpeMerger_* merger, size_t n) {
    merger->heap_count = 0;
    for (size_t i = 0; i < n; i++) {
        bpe_queue_(bpe, merger, (uint32_t)i);
    }
    while (merger->heap_count > 0) {
        const uint64_t top = bpe_heap_pop_(merger);
        const uint32_t place = (uint32_t)top;
        BpePart_* part = &merger->parts[place];
        if (part->rank != (int)(top >> 32)) {
            continue; // one of its parts has been merged
        }
        BpePart_* gone = &merger->parts[part->next];
        part->id = bpe->pairs.made[part->rank];
        part->next = gone->next;
        gone->rank = BPE_NONE_;
        if (part->next != BPE_NOWHERE_) {
            merger->parts[part->next].last = place;
        }
        bpe_queue_(bpe, merger, place);
        if (part->last != BPE_NOWHERE_) {
            bpe_queue_(bpe, merger, part->last);
        }
    }
}

// Merges a piece of any length. Returns the number of ids.
static inline size_t bpe_merge_long_(const Bpe* bpe, BpeMerger_* merger, const unsigned char* piece, size_t n,
                                     int* ids) {
    const size_t parts = bpe_place_parts_(bpe, merger, piece, n, ids);
    if (bpe->pairs.made) {
        bpe_merge_ranks_(bpe, merger, parts);
    } else {
        bpe_merge_ids_(bpe, merger, piece, n);
    }
    size_t count = 0;
    for (uint32_t place = 0; place != BPE_NOWHERE_; place = merger->parts[place].next) {
        ids[count++] = merger->parts[place].id;
    }
    return count;
}

// Returns the token that a piece is without merging, or -1.
static inline int bpe_whole_piece_(const Bpe* bpe, const unsigned char* piece, size_t n) {
    return bpe->finds_pieces ? bpe_find(bpe, (const char*)piece, n) : -1;
}

static inline size_t bpe_merge_(const Bpe* bpe, BpeMerger_* merger, const unsigned char* piece, size_t n,
                                int* ids) {
    const int whole = bpe_whole_piece_(bpe, piece, n);
    if (whole >= 0) {
        ids[0] = whole;
        return 1;
    }
    return n <= BPE_SHORT_ ? (size_t)bpe_merge_short_(bpe, piece, (int)n, ids)
                           : bpe_merge_long_(bpe, merger, piece, n, ids);
}

// ---- a vocabulary ----

// Sets a token that no text encodes to.
static inline void bpe_name_token_(Bpe* bpe, int id, const unsigned char* name, size_t length) {
    const BpeToken_ token = {name, (uint32_t)length, BPE_NAME};
    bpe->tokens[id] = token;
}

// Opens a vocabulary of V ids, which owns the buffer. All tokens but end-of-text are empty.
static inline void bpe_open_ids_(Bpe* bpe, const char* name, unsigned char* buffer, size_t V, size_t eot) {
    const BpePattern pattern = {BPE_GPT2, 0, 0, 0, 0};
    CHECK(0 < V && V <= BPE_MAX_VOCAB, "%s: %zu tokens with end-of-text, wanted 1 to %d", name, V,
          BPE_MAX_VOCAB);
    memset(bpe, 0, sizeof(*bpe));
    bpe->vocab_size = bpe->num_ranks = (int)V;
    bpe->eot = (int)eot;
    bpe->card = model_card_of((int)eot);
    memset(bpe->byte_ids, -1, sizeof(bpe->byte_ids));
    bpe_rules_open(&bpe->rules, pattern);
    bpe->buffer = buffer;
    bpe->tokens = (BpeToken_*)check_alloc(V, sizeof(BpeToken_), "vocabulary");
    bpe_name_token_(bpe, (int)eot, (const unsigned char*)BPE_EOT_TEXT, strlen(BPE_EOT_TEXT));
    for (bpe->bits = 9; (size_t)1 << bpe->bits < 2 * V; bpe->bits++) {
    }
    bpe->by_bytes = (uint64_t*)check_alloc((size_t)1 << bpe->bits, sizeof(uint64_t), "vocabulary");
    bpe->pairs.bits = bpe->bits;
    bpe->pairs.entries = (uint64_t*)check_alloc((size_t)1 << bpe->bits, sizeof(uint64_t), "vocabulary");
}

// Sets a token's bytes, which must be unique. Returns 0 if another token has them.
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

// Sets the bytes in the order of their ids: first those that GPT-2's files spell as themselves
// (visible Latin-1 characters), then the others, spelled as the characters from U+0100 on.
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

// Opens the vocabulary of n merges: the single bytes in GPT-2's order, the unions to come,
// end-of-text. The buffer holds the bytes of all tokens.
static inline void bpe_begin_merges_(Bpe* bpe, const char* name, unsigned char* buffer, size_t n) {
    uint16_t spelling[256];
    bpe_open_ids_(bpe, name, buffer, 256 + n + 1, 256 + n);
    bpe_spelled_bytes_(buffer, spelling);
    for (int id = 0; id < 256; id++) {
        bpe_set_token_(bpe, id, buffer + id, 1);
    }
}

// Sets token `id`, the one after the last, to the union of two. Returns the token of these bytes,
// an earlier one if they are not new.
static inline int bpe_add_merge_(Bpe* bpe, int id, int left, int right) {
    const BpeToken_ before = bpe->tokens[id - 1], a = bpe->tokens[left], b = bpe->tokens[right];
    unsigned char* text = (unsigned char*)before.text + before.length; // in bpe->buffer
    memcpy(text, a.text, a.length);
    memcpy(text + a.length, b.text, b.length);
    bpe_set_token_(bpe, id, text, a.length + b.length);
    return bpe_find(bpe, (const char*)text, a.length + b.length);
}

// Sets the tokens of single bytes. Returns 0 with the reason in `error` if one has none.
static inline int bpe_finish_bytes_(Bpe* bpe, const char* name, char* error) {
    free(bpe->byte_pairs);
    bpe->byte_pairs = (int*)check_alloc(256 * 256, sizeof(int), "vocabulary");
    for (int pair = 0; pair < 256 * 256; pair++) {
        bpe->byte_pairs[pair] = BPE_NONE_;
    }
    for (int byte = 0; byte < 256; byte++) {
        const char text = (char)byte;
        const int id = bpe_find(bpe, &text, 1);
        bpe->byte_ids[byte] = id < 0 ? bpe->byte_ids[byte] : id; // of SentencePiece's kind: <0x0A>
        if (bpe->byte_ids[byte] < 0) {
            return error_set(error, name, "no token is the byte 0x%02X, wanted all 256", (unsigned)byte);
        }
    }
    return 1;
}

// Merge of a list: the tokens that it joins, and the one that it makes.
typedef struct {
    int left, right, made, rank; // merges of one rank make the same token
} BpeListed_;

// Completes the vocabulary once its tokens are set, with a list of n merges in the order of their
// ranks. Returns 0 with the reason in `error`.
static inline int bpe_finish_ranks_(Bpe* bpe, const char* name, const BpeListed_* list, int n, char* error) {
    const int num_ranks = n > 0 ? list[n - 1].rank + 1 : 0;
    int* made = (int*)check_alloc((size_t)num_ranks + 1, sizeof(int), "vocabulary");
    free(bpe->pairs.entries);
    while ((size_t)1 << bpe->pairs.bits < 2 * (size_t)n) {
        bpe->pairs.bits++;
    }
    bpe->pairs.entries = (uint64_t*)check_alloc((size_t)1 << bpe->pairs.bits, sizeof(uint64_t), "vocabulary");
    bpe->pairs.made = made;
    bpe->num_ranks = num_ranks;
    if (!bpe_finish_bytes_(bpe, name, error)) {
        return 0;
    }
    for (int i = 0; i < n; i++) {
        const BpeListed_ merge = list[i];
        const BpeToken_ left = bpe->tokens[merge.left], right = bpe->tokens[merge.right];
        const int before = bpe_pair_(&bpe->pairs, merge.left, merge.right);
        if (before != BPE_NONE_) {
            return error_set(error, name, "merges[%d] is merges[%d] again", merge.rank, before);
        }
        bpe_add_pair_(&bpe->pairs, merge.left, merge.right, merge.rank);
        made[merge.rank] = merge.made;
        if (left.length == 1 && right.length == 1) {
            bpe->byte_pairs[256 * left.text[0] + right.text[0]] = merge.rank;
        }
    }
    return 1;
}

// Completes the vocabulary once its tokens are set. Finds for each token the two whose union it is:
// what its bytes merge to with the tokens before it. In any text it then arises only from these
// two: as long as no token crosses its borders, the merges inside are the same as if it stood
// alone. Returns 0 with the reason in `error` if merging cannot produce the tokens.
static inline int bpe_finish_(Bpe* bpe, const char* name, char* error) {
    if (!bpe_finish_bytes_(bpe, name, error)) {
        return 0;
    }
    size_t longest = 0;
    for (int id = 0; id < bpe->vocab_size; id++) {
        longest = bpe->tokens[id].length > longest ? bpe->tokens[id].length : longest;
    }
    BpeMerger_ merger;
    bpe_merger_open_(&merger, bpe->num_ranks);
    int* parts = (int*)check_alloc(longest, sizeof(int), "vocabulary");
    int ok = 1;
    for (int id = 0; ok && id < bpe->vocab_size; id++) {
        const BpeToken_ token = bpe->tokens[id];
        if (token.length == 1 || token.kind != BPE_TOKEN) {
            continue;
        }
        const size_t n = bpe_merge_(bpe, &merger, token.text, token.length, parts);
        ok = n == 2 && parts[0] < id && parts[1] < id;
        if (ok) {
            bpe_add_pair_(&bpe->pairs, parts[0], parts[1], id);
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

// Returns the first merge whose parts differ from those bpe_finish_ found: no text ever has them
// side by side at their turn. Returns -1 if none.
static inline int bpe_wrong_merge_(const Bpe* bpe, const int (*pairs)[2]) {
    for (int id = 256; id < bpe->eot; id++) {
        if (bpe_pair_(&bpe->pairs, pairs[id - 256][0], pairs[id - 256][1]) != id) {
            return id - 256;
        }
    }
    return -1;
}

// Opens the vocabulary of merges in their order, pairs[i] = (left id, right id): ids 0 to 255 are
// the single bytes in GPT-2's order, 256 + i is the union of pairs[i], end-of-text is the last.
// `name` is for errors.
static inline void bpe_open_merges(Bpe* bpe, const int (*pairs)[2], int num_merges, const char* name) {
    assert(0 <= num_merges);
    // of the tokens
    size_t* ends = (size_t*)check_alloc(256 + (size_t)num_merges, sizeof(size_t), "merges");
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

// Opens the vocabulary of plain bytes (tokenizer.h): byte b is id b, end-of-text is 256, and no
// merges.
static inline void bpe_open_bytes(Bpe* bpe) {
    char error[ERROR_BYTES];
    unsigned char* buffer = (unsigned char*)check_alloc(256, 1, "vocabulary");
    bpe_open_ids_(bpe, "bytes", buffer, 257, 256);
    for (int byte = 0; byte < 256; byte++) {
        buffer[byte] = (unsigned char)byte;
        bpe_set_token_(bpe, byte, buffer + byte, 1);
    }
    CHECK(bpe_finish_(bpe, "bytes", error), "%s", error);
}

static inline void bpe_close(Bpe* bpe) {
    free(bpe->tokens);
    free(bpe->buffer);
    free(bpe->by_bytes);
    free(bpe->pairs.entries);
    free(bpe->byte_pairs);
    free((void*)bpe->pairs.made);
    bpe_words_close(&bpe->words);
    for (int i = 0; i < bpe->num_kept; i++) {
        free(bpe->kept[i].bytes);
    }
    free((void*)bpe->card.chat_template);
    chat_format_close(&bpe->card.chat);
    free((void*)bpe->card.generation);
    bpe_rules_close(&bpe->rules);
    memset(bpe, 0, sizeof(*bpe));
}

// Returns the bytes of a token, without a terminating zero; valid until the vocabulary is closed.
static inline const char* bpe_token(const Bpe* bpe, int id, int* length) {
    CHECK(0 <= id && id < bpe->vocab_size, "token id %d, wanted 0 to %d", id, bpe->vocab_size - 1);
    *length = (int)bpe->tokens[id].length;
    return (const char*)bpe->tokens[id].text;
}

// True if no text encodes to this token: bpe_token gives its name.
static inline int bpe_is_name(const Bpe* bpe, int id) { return bpe->tokens[id].kind == BPE_NAME; }

// Returns the id of an added token, a name or a word; -1 if there is none of this name.
static inline int bpe_find_added(const Bpe* bpe, const char* name) {
    const size_t bytes = strlen(name);
    for (int id = 0; id < bpe->vocab_size; id++) {
        const BpeToken_ token = bpe->tokens[id];
        const int is_added = token.kind == BPE_NAME || token.kind == BPE_WORD;
        if (is_added && token.length == bytes && memcmp(token.text, name, bytes) == 0) {
            return id;
        }
    }
    return -1;
}

// Returns an upper bound of the ids of a text of `bytes` bytes: normalization may lengthen it. A
// blank before each text between words at most doubles it.
static inline size_t bpe_most_ids(const Bpe* bpe, size_t bytes) {
    const BpePattern pattern = bpe->rules.pattern;
    return bytes * (pattern.normalizes ? NFC_MOST_GROWTH : pattern.style == BPE_SENTENCE ? 2 : 1);
}

// True if a text ends with this token: end-of-text, or another that the model's files name.
static inline int bpe_is_end(const Bpe* bpe, int id) {
    return id == bpe->eot || model_card_is_end(&bpe->card, id);
}

// Returns the smallest vocabulary that a model needs for any text: up to the last token that text
// encodes to, and end-of-text.
static inline int bpe_least_vocab(const Bpe* bpe) {
    int V = bpe->vocab_size;
    while (V - 1 > bpe->eot && bpe_is_name(bpe, V - 1)) {
        V--;
    }
    return V;
}

#endif
