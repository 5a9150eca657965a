/*
bpe_train.h -- trains a byte-pair encoding vocabulary on text.

The text is split into pieces by GPT-2's pattern (bpe_split.h); at first each byte of a piece is a
token. The most frequent pair of neighbors is merged into a new token everywhere, leftmost first,
again and again until the vocabulary is full: 256 bytes, the merges in their order, end-of-text.
Among equally frequent pairs, the one with the lowest left id is merged, then the lowest right id.

The vocabulary depends only on the counts of the pieces, not on the order of the texts, on where
they were divided, or on the number of threads.

    bpe_trainer_open        for a number of threads
    bpe_trainer_add         counts the pieces of a document, or of a part of one between two cuts
                            (bpe_last_cut). Threads of the caller have numbers, and may count at
                            the same time
    bpe_trainer_run         opens a vocabulary of vocab_size ids. The counts stay: more may be added
                            and it may run again. Calls `progress`, if not NULL, after each merge
    bpe_trainer_extend      opens a larger vocabulary that starts with all tokens of another; the
                            new ones are merged from pieces as the other one encodes them
    bpe_trainer_close

How it works. Each different piece is kept once, with its count. All pieces lie in one array of
places, one per byte. A pair is listed with its places at the step that makes the younger of its
tokens: all its places arise at that step, and later steps only remove some. So its count only
falls, and a heap whose counts may be too high finds the best pair: if the top's count is outdated,
it sinks to its place. A step costs as much as its pair has places, and all steps together join at
most as often as the different pieces have bytes.

Memory grows with the different pieces, not with the text: per thread, 64 to 128 bytes for each that
it has seen, and the bytes of those longer than 15. Merging takes at most 20 bytes for each byte of
the different pieces, 28 for each piece, and 160 for each different pair. 789 MB of documentation
and sources have 1.1 million different pieces; 50,257 ids took 577 MB on 2 threads.
*/
#ifndef LLMC_BPE_TRAIN_H
#define LLMC_BPE_TRAIN_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_split.h"
#include "llmc/tokenizer/bpe_texts.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- counting pieces ----

// Count of a piece. A piece of up to 15 bytes is its own key (bpe_key_); the key of a longer one is
// a hash, and its length with all bits set where a short one has its length.
typedef struct {
    uint64_t key[2];
    uint64_t count; // 0: an empty entry
    size_t text;    // start of a longer piece in the bytes of longer pieces
} BpeCount_;

typedef struct {
    BpeCount_* counts; // (2^bits), open addressing, at most half of them used
    int bits;
    size_t used;
    unsigned char* text; // bytes of longer pieces
    size_t text_bytes, text_capacity;
} BpeCounts_;

typedef struct {
    BpeRules rules;        // of splitting
    const BpeWords* words; // if rules.pattern.cuts_words; borrowed
    int threads;
    BpeCounts_* counts; // (threads)
} BpeTrainer;

typedef void (*BpeTrainProgress)(void* context, int merges, int merges_wanted);

void bpe_trainer_add(BpeTrainer* trainer, int thread, const char* text, size_t bytes);

void bpe_trainer_open(BpeTrainer* trainer, int threads);

// Splits text from now on as this vocabulary does, which must stay open.
void bpe_trainer_split_as(BpeTrainer* trainer, const Bpe* bpe);

void bpe_trainer_close(BpeTrainer* trainer);

// ---- merging ----

void bpe_trainer_run(BpeTrainer* trainer, int vocab_size, BpeTrainProgress progress, void* context, Bpe* bpe);

void bpe_trainer_extend(BpeTrainer* trainer, const Bpe* old, int vocab_size, BpeTrainProgress progress,
                        void* context, Bpe* bpe);

// ---- special tokens ----

// Adds special tokens, which no text encodes to, after all ids. The names must outlive `bpe`.
void bpe_add_names(Bpe* bpe, const char* const* names, int n);

#ifdef __cplusplus
}
#endif

#ifdef BPE_TRAIN_IMPLEMENTATION

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/vec.h"

// ---- counting pieces ----

enum { BPE_KEY_BYTES_ = 16 }; // a piece shorter than this is its own key
static const uint64_t BPE_LONG_KEY_ = (uint64_t)0xFF << 56;

static void bpe_counts_open_(BpeCounts_* counts) {
    memset(counts, 0, sizeof(*counts));
    counts->bits = 10;
    counts->counts =
        (BpeCount_*)check_alloc((size_t)1 << counts->bits, sizeof(BpeCount_), "counts of pieces");
}

static void bpe_counts_close_(BpeCounts_* counts) {
    free(counts->counts);
    free(counts->text);
    memset(counts, 0, sizeof(*counts));
}

static size_t bpe_count_bytes_(const BpeCount_* entry) {
    return (size_t)(entry->key[1] < BPE_LONG_KEY_ ? entry->key[1] >> 56 : entry->key[1] & ~BPE_LONG_KEY_);
}

// Returns the bytes of a piece.
static const unsigned char* bpe_count_text_(const BpeCounts_* counts, const BpeCount_* entry) {
    return entry->key[1] < BPE_LONG_KEY_ ? (const unsigned char*)entry->key : counts->text + entry->text;
}

// Returns the entry of a piece, or the empty entry where it belongs. Reads `text` only if it is
// longer than its key.
ALWAYS_INLINE BpeCount_* bpe_count_entry_(const BpeCounts_* counts, const uint64_t key[2], uint64_t hash,
                                          const unsigned char* text) {
    const uint64_t mask = ((uint64_t)1 << counts->bits) - 1;
    for (uint64_t i = hash >> (64 - counts->bits);; i = (i + 1) & mask) {
        BpeCount_* entry = &counts->counts[i];
        if (entry->count == 0) {
            return entry;
        }
        if (((entry->key[0] ^ key[0]) | (entry->key[1] ^ key[1])) == 0 &&
            (key[1] < BPE_LONG_KEY_ ||
             memcmp(counts->text + entry->text, text, bpe_count_bytes_(entry)) == 0)) {
            return entry;
        }
    }
}

static uint64_t bpe_count_hash_(const uint64_t key[2]) {
    uint64_t again[2];
    return key[1] < BPE_LONG_KEY_ ? bpe_key_((const unsigned char*)key, (size_t)(key[1] >> 56), 2, again)
                                  : key[0];
}

static void bpe_counts_grow_(BpeCounts_* counts) {
    BpeCounts_ grown = *counts;
    grown.bits++;
    grown.counts = (BpeCount_*)check_alloc((size_t)1 << grown.bits, sizeof(BpeCount_), "counts of pieces");
    for (size_t i = 0; i < (size_t)1 << counts->bits; i++) {
        const BpeCount_* from = &counts->counts[i];
        if (from->count != 0) {
            // an empty entry is wanted, and no piece appears twice
            *bpe_count_entry_(&grown, from->key, bpe_count_hash_(from->key), bpe_count_text_(counts, from)) =
                *from;
        }
    }
    free(counts->counts);
    *counts = grown;
}

// Counts a piece for the first time, in its empty entry, which may then move.
__attribute__((noinline, unused)) static void bpe_count_first_(BpeCounts_* counts, BpeCount_* entry,
                                                               const uint64_t key[2], uint64_t times,
                                                               const unsigned char* text) {
    const BpeCount_ first = {{key[0], key[1]}, times, counts->text_bytes};
    *entry = first;
    if (key[1] >= BPE_LONG_KEY_) {
        const size_t n = bpe_count_bytes_(entry), bytes = counts->text_bytes + n;
        counts->text =
            (unsigned char*)check_reserve(counts->text, &counts->text_capacity, bytes, 1, "counts of pieces");
        memcpy(counts->text + counts->text_bytes, text, n);
        counts->text_bytes = bytes;
    }
    if (++counts->used > (size_t)1 << (counts->bits - 1)) {
        bpe_counts_grow_(counts);
    }
}

ALWAYS_INLINE void bpe_count_key_(BpeCounts_* counts, const uint64_t key[2], uint64_t hash, uint64_t times,
                                  const unsigned char* text) {
    BpeCount_* entry = bpe_count_entry_(counts, key, hash, text);
    if (__builtin_expect(entry->count == 0, 0)) {
        bpe_count_first_(counts, entry, key, times, text);
    } else {
        entry->count += times;
    }
}

// Counts a piece of n bytes; `left` bytes can be read from its start.
ALWAYS_INLINE void bpe_count_piece_(BpeCounts_* counts, const unsigned char* piece, size_t n, size_t left) {
    uint64_t key[2], hash;
    unsigned char padded[BPE_KEY_BYTES_];
    if (n >= BPE_KEY_BYTES_) {
        key[0] = hash = bpe_hash_(piece, n) * BPE_HASH_MULTIPLIER_;
        key[1] = BPE_LONG_KEY_ | n;
    } else {
        if (left < BPE_KEY_BYTES_) {
            memcpy(padded, piece, n);
            piece = padded;
        }
        hash = bpe_key_(piece, n, 2, key);
    }
    bpe_count_key_(counts, key, hash, 1, piece);
}

// Counts the pieces of a text that is already normalized and has no added tokens in it.
static void bpe_count_text_pieces_(const BpeTrainer* trainer, BpeCounts_* counts, const unsigned char* at,
                                   size_t bytes) {
    BpeSplitter splitter = bpe_splitter(&trainer->rules, at, 0, bytes);
    size_t begin = 0;
    while (splitter.at < bytes) {
        uint16_t cuts[BPE_CUTS];
        const size_t base = splitter.at, n = bpe_split(&splitter, cuts);
        const size_t cut_off = bpe_cut_off(&splitter, begin, base, cuts, n);
        if (cut_off) {
            bpe_count_piece_(counts, at + begin, cut_off - begin, bytes - begin);
            begin = cut_off;
            continue;
        }
        for (size_t i = 0; i < n; i++) {
            const size_t end = base + cuts[i];
            bpe_count_piece_(counts, at + begin, end - begin, bytes - begin);
            begin = end;
        }
    }
    if (begin < bytes) {
        bpe_count_piece_(counts, at + begin, bytes - begin, bytes - begin);
    }
}

typedef struct {
    const BpeTrainer* trainer;
    BpeCounts_* counts;
} BpeCounting_;

static void bpe_count_between_(void* context, const unsigned char* text, size_t bytes) {
    const BpeCounting_* counting = (const BpeCounting_*)context;
    bpe_count_text_pieces_(counting->trainer, counting->counts, text, bytes);
}

void bpe_trainer_add(BpeTrainer* trainer, int thread, const char* text, size_t bytes) {
    BpeCounting_ counting = {trainer, &trainer->counts[thread]};
    if (bpe_texts_are_whole(&trainer->rules)) {
        bpe_count_between_(&counting, (const unsigned char*)text, bytes);
        return;
    }
    NfcText normal;
    memset(&normal, 0, sizeof(normal));
    const BpeTexts texts = {&trainer->rules, trainer->words, &normal, bpe_count_between_, NULL, &counting};
    bpe_texts_visit(&texts, BPE_DOCUMENT, (const unsigned char*)text, bytes);
    nfc_text_close(&normal);
}

void bpe_trainer_open(BpeTrainer* trainer, int threads) {
    assert(threads > 0);
    memset(trainer, 0, sizeof(*trainer));
    const BpePattern pattern = {BPE_GPT2, 0, 0, 0, 0};
    bpe_rules_open(&trainer->rules, pattern);
    trainer->threads = threads;
    trainer->counts = (BpeCounts_*)check_alloc((size_t)threads, sizeof(BpeCounts_), "counts of pieces");
    for (int thread = 0; thread < threads; thread++) {
        bpe_counts_open_(&trainer->counts[thread]);
    }
}

void bpe_trainer_split_as(BpeTrainer* trainer, const Bpe* bpe) {
    CHECK(bpe->rules.pattern.style != BPE_SENTENCE,
          "a vocabulary of SentencePiece's kind cannot be extended, wanted byte-level BPE");
    bpe_rules_close(&trainer->rules);
    bpe_rules_open(&trainer->rules, bpe->rules.pattern);
    trainer->words = &bpe->words;
}

void bpe_trainer_close(BpeTrainer* trainer) {
    for (int thread = 0; thread < trainer->threads; thread++) {
        bpe_counts_close_(&trainer->counts[thread]);
    }
    free(trainer->counts);
    bpe_rules_close(&trainer->rules);
    memset(trainer, 0, sizeof(*trainer));
}

// Adds the counts of all threads to the first thread's.
static void bpe_gather_counts_(BpeTrainer* trainer) {
    for (int thread = 1; thread < trainer->threads; thread++) {
        BpeCounts_* from = &trainer->counts[thread];
        for (size_t i = 0; i < (size_t)1 << from->bits; i++) {
            const BpeCount_* entry = &from->counts[i];
            if (entry->count != 0) {
                bpe_count_key_(&trainer->counts[0], entry->key, bpe_count_hash_(entry->key), entry->count,
                               bpe_count_text_(from, entry));
            }
        }
        bpe_counts_close_(from);
        bpe_counts_open_(from);
    }
}

// ---- merging ----

enum { BPE_BORDER_ = -1, BPE_INSIDE_ = -2 };

// Byte of a piece, or the border after a piece.
typedef struct {
    // token that starts or ends here. Not kept up to date inside of tokens, but a former start of a
    // token has an id that its token never had
    int id;
    uint32_t piece; // number of the piece
} BpePlace_;

// Two tokens that are neighbors somewhere.
typedef struct {
    uint64_t pair;   // left id << 21 | right id
    int64_t count;   // in the text; falls as they are merged into other tokens
    size_t list;     // start of its places in `lists`
    uint32_t places; // of the left token, ascending, including former ones; 0: an empty entry
} BpeNeighbors_;

typedef struct {
    int64_t count; // at least the current count
    uint64_t pair;
} BpeBest_;

// Pair whose places are being collected.
typedef struct {
    int64_t count;
    size_t list; // position of its next place
    uint32_t places;
} BpeGroup_;

typedef struct {
    int vocab_size;
    int (*merges)[2];  // (num_merges) pairs that become tokens
    BpePlace_* places; // (num_places) border, piece, border, piece, ..., border
    size_t num_places;
    uint64_t* counts;     // count of each piece
    uint32_t* lists;      // lists of places of all pairs
    size_t lists_used;    // at most 3 * num_places: one list for each place, two more for each join
    uint32_t* lengths;    // (V) length of each token
    BpeNeighbors_* pairs; // (2^pair_bits), open addressing, at most half of them used
    int pair_bits;
    size_t pairs_used;
    BpeBest_* heap; // best pair on top
    size_t heap_size, heap_capacity;
    BpeGroup_* groups; // (2 V), zero except those in use
    uint32_t* groups_used;
    size_t num_groups_used;
} BpeTraining_;

ALWAYS_INLINE uint64_t bpe_neighbors_(int left, int right) { return (uint64_t)left << 21 | (uint64_t)right; }

// Returns the entry of a pair, or the empty entry where it belongs.
static BpeNeighbors_* bpe_neighbors_entry_(const BpeTraining_* training, uint64_t pair) {
    const uint64_t mask = ((uint64_t)1 << training->pair_bits) - 1;
    for (uint64_t i = pair * BPE_HASH_MULTIPLIER_ >> (64 - training->pair_bits);; i = (i + 1) & mask) {
        BpeNeighbors_* entry = &training->pairs[i];
        if (entry->places == 0 || entry->pair == pair) {
            return entry;
        }
    }
}

static void bpe_open_pairs_(BpeTraining_* training, int bits) {
    training->pair_bits = bits;
    training->pairs_used = 0;
    training->pairs =
        (BpeNeighbors_*)check_alloc((size_t)1 << bits, sizeof(BpeNeighbors_), "counts of pairs");
}

// Drops pairs that no longer exist, and enlarges the table if that was not enough.
static void bpe_grow_pairs_(BpeTraining_* training) {
    const BpeTraining_ old = *training;
    size_t alive = 0;
    for (size_t i = 0; i < (size_t)1 << old.pair_bits; i++) {
        alive += old.pairs[i].count > 0;
    }
    bpe_open_pairs_(training, old.pair_bits + (alive > (size_t)1 << (old.pair_bits - 2)));
    for (size_t i = 0; i < (size_t)1 << old.pair_bits; i++) {
        if (old.pairs[i].count > 0) {
            *bpe_neighbors_entry_(training, old.pairs[i].pair) = old.pairs[i];
            training->pairs_used++;
        }
    }
    free(old.pairs);
}

static int bpe_better_(BpeBest_ a, BpeBest_ b) {
    return a.count != b.count ? a.count > b.count : a.pair < b.pair;
}

static void bpe_heap_add_(BpeTraining_* training, BpeBest_ added) {
    training->heap =
        (BpeBest_*)check_reserve(training->heap, &training->heap_capacity, training->heap_size + 1,
                                 sizeof(BpeBest_), "pairs of BPE training");
    size_t at = training->heap_size++;
    for (; at > 0 && bpe_better_(added, training->heap[(at - 1) / 2]); at = (at - 1) / 2) {
        training->heap[at] = training->heap[(at - 1) / 2];
    }
    training->heap[at] = added;
}

// Replaces the top, and lets the new pair sink to its place.
static void bpe_heap_sink_(BpeTraining_* training, BpeBest_ sinking) {
    size_t at = 0;
    for (size_t child; (child = 2 * at + 1) < training->heap_size; at = child) {
        child +=
            child + 1 < training->heap_size && bpe_better_(training->heap[child + 1], training->heap[child]);
        if (!bpe_better_(training->heap[child], sinking)) {
            break;
        }
        training->heap[at] = training->heap[child];
    }
    training->heap[at] = sinking;
}

// Takes the best pair from the heap; NULL if no token has a neighbor any more.
static BpeNeighbors_* bpe_take_best_(BpeTraining_* training) {
    while (training->heap_size > 0) {
        BpeBest_ top = training->heap[0];
        // empty, so 0, if it was dropped
        BpeNeighbors_* entry = bpe_neighbors_entry_(training, top.pair);
        const int is_right = entry->count == top.count;
        top.count = entry->count;
        bpe_heap_sink_(training, is_right || top.count == 0 ? training->heap[--training->heap_size] : top);
        if (is_right) {
            return entry;
        }
    }
    return NULL;
}

// Passes over the places of a step, which collect its pairs.
typedef enum {
    BPE_COUNTING_, // counts, and numbers of places
    BPE_LISTING_   // places
} BpePass_;

static void bpe_collect_(BpeTraining_* training, size_t group_index, uint32_t place, BpePass_ pass) {
    BpeGroup_* group = &training->groups[group_index];
    if (pass == BPE_LISTING_) {
        training->lists[group->list++] = place;
        return;
    }
    if (group->places++ == 0) {
        training->groups_used[training->num_groups_used++] = (uint32_t)group_index;
    }
    group->count += (int64_t)training->counts[training->places[place].piece];
}

// Moves *at to the next token with a right neighbor, and returns the pair; UINT64_MAX at the end.
static uint64_t bpe_next_pair_(const BpeTraining_* training, size_t* at) {
    for (size_t next; *at < training->num_places; *at = next) {
        const int left = training->places[*at].id;
        next = *at + (left >= 0 ? training->lengths[left] : 1);
        if (left >= 0 && training->places[next].id >= 0) {
            return bpe_neighbors_(left, training->places[next].id);
        }
    }
    return UINT64_MAX;
}

// Counts all pairs.
static void bpe_count_all_(BpeTraining_* training) {
    uint64_t pair;
    for (size_t at = 0; (pair = bpe_next_pair_(training, &at)) != UINT64_MAX;) {
        BpeNeighbors_* entry = bpe_neighbors_entry_(training, pair);
        entry->pair = pair;
        entry->count += (int64_t)training->counts[training->places[at].piece];
        at += training->lengths[training->places[at].id];
        if (entry->places++ == 0 && ++training->pairs_used > (size_t)1 << (training->pair_bits - 1)) {
            bpe_grow_pairs_(training);
        }
    }
}

// Collects all pairs, each with its places, in the heap.
static void bpe_collect_all_(BpeTraining_* training) {
    bpe_count_all_(training);
    for (size_t i = 0; i < (size_t)1 << training->pair_bits; i++) {
        BpeNeighbors_* entry = &training->pairs[i];
        const BpeBest_ best = {entry->count, entry->pair};
        if (entry->places > 0) {
            entry->list = training->lists_used;
            training->lists_used += entry->places;
            bpe_heap_add_(training, best);
        }
    }
    uint64_t pair;
    for (size_t at = 0; (pair = bpe_next_pair_(training, &at)) != UINT64_MAX;) {
        training->lists[bpe_neighbors_entry_(training, pair)->list++] = (uint32_t)at;
        at += training->lengths[training->places[at].id];
    }
    for (size_t i = 0; i < (size_t)1 << training->pair_bits; i++) {
        training->pairs[i].list -= training->pairs[i].places; // to the first place again
    }
}

// Collects the pairs that the token `made` is part of, at each of its places; group left, or V +
// right. For two such tokens side by side, the left one adds the pair.
static void bpe_collect_made_(BpeTraining_* training, const uint32_t* made_places, size_t n, int made,
                              BpePass_ pass) {
    for (size_t i = 0; i < n; i++) {
        const uint32_t place = made_places[i], after = place + training->lengths[made];
        const int left = training->places[place - 1].id, right = training->places[after].id;
        if (left >= 0 && left != made) {
            bpe_collect_(training, (size_t)left, place - training->lengths[left], pass);
        }
        if (right >= 0) {
            bpe_collect_(training, (size_t)(training->vocab_size + right), place, pass);
        }
    }
}

// Gives each counted pair its entry, a place in the heap, and room for its places.
static void bpe_add_groups_(BpeTraining_* training, int made) {
    for (size_t i = 0; i < training->num_groups_used; i++) {
        const int V = training->vocab_size, group_index = (int)training->groups_used[i];
        BpeGroup_* group = &training->groups[group_index];
        const uint64_t pair =
            group_index < V ? bpe_neighbors_(group_index, made) : bpe_neighbors_(made, group_index - V);
        const BpeNeighbors_ neighbors = {pair, group->count, training->lists_used, group->places};
        const BpeBest_ best = {group->count, pair};
        *bpe_neighbors_entry_(training, pair) = neighbors;
        if (++training->pairs_used > (size_t)1 << (training->pair_bits - 1)) {
            bpe_grow_pairs_(training);
        }
        bpe_heap_add_(training, best);
        group->list = training->lists_used;
        training->lists_used += group->places;
    }
}

static void bpe_clear_groups_(BpeTraining_* training) {
    for (size_t i = 0; i < training->num_groups_used; i++) {
        memset(&training->groups[training->groups_used[i]], 0, sizeof(BpeGroup_));
    }
    training->num_groups_used = 0;
}

static void bpe_lose_(BpeTraining_* training, int left, int right, uint64_t count) {
    BpeNeighbors_* entry = bpe_neighbors_entry_(training, bpe_neighbors_(left, right));
    assert(entry->places > 0);
    entry->count -= (int64_t)count;
}

// Joins the pair everywhere, in order, and subtracts from the counts of the surrounding pairs.
// Leaves the places of the new token in its list, and returns their number.
static size_t bpe_join_places_(BpeTraining_* training, BpeNeighbors_ pair, int made) {
    const int a = (int)(pair.pair >> 21), b = (int)(pair.pair & BPE_NONE_);
    const uint32_t a_bytes = training->lengths[a], b_bytes = training->lengths[b];
    BpePlace_* places = training->places;
    uint32_t* list = training->lists + pair.list;
    size_t joined = 0;
    for (uint32_t i = 0; i < pair.places; i++) {
        const uint32_t first = list[i], second = first + a_bytes, after = second + b_bytes;
        if (places[first].id != a || places[second].id != b) {
            continue; // one of the two has been merged
        }
        const int left = places[first - 1].id, right = places[after].id;
        const uint64_t count = training->counts[places[first].piece];
        if (left >= 0 && left != made) { // if a `made` precedes, it has already subtracted this
            bpe_lose_(training, left, a, count);
        }
        if (right >= 0) {
            bpe_lose_(training, b, right, count);
        }
        places[second].id = BPE_INSIDE_;
        places[first].id = places[after - 1].id = made;
        list[joined++] = first;
    }
    return joined;
}

// Merges a pair, which is no longer in the heap, into the token `made`.
static void bpe_merge_pair_(BpeTraining_* training, BpeNeighbors_* entry, int made) {
    const BpeNeighbors_ pair = *entry;
    training->lengths[made] = training->lengths[pair.pair >> 21] + training->lengths[pair.pair & BPE_NONE_];
    const size_t joined = bpe_join_places_(training, pair, made);
    entry->count = 0;
    bpe_collect_made_(training, training->lists + pair.list, joined, made, BPE_COUNTING_);
    bpe_add_groups_(training, made);
    bpe_collect_made_(training, training->lists + pair.list, joined, made, BPE_LISTING_);
    bpe_clear_groups_(training);
}

// Sets a token that starts at places[0].
static void bpe_place_token_(BpePlace_* places, int id, uint32_t bytes) {
    for (uint32_t i = 1; i + 1 < bytes; i++) {
        places[i].id = BPE_INSIDE_;
    }
    places[0].id = places[bytes - 1].id = id;
}

// Lays out the pieces as places, as `old` encodes them.
static void bpe_place_pieces_(BpeTraining_* training, const BpeCounts_* counts, const Bpe* old) {
    BpeMerger_ merger;
    int* ids = (int*)check_alloc(training->num_places, sizeof(int), "BPE training");
    size_t at = 0;
    uint32_t piece = 0;
    bpe_merger_open_(&merger, old->num_ranks);
    for (int id = 0; id < old->vocab_size; id++) {
        training->lengths[id] = old->tokens[id].length;
    }
    training->places[at++].id = BPE_BORDER_;
    for (size_t i = 0; i < (size_t)1 << counts->bits; i++) {
        const BpeCount_* entry = &counts->counts[i];
        if (entry->count == 0) {
            continue;
        }
        const size_t bytes = bpe_count_bytes_(entry);
        const size_t n = bpe_merge_(old, &merger, bpe_count_text_(counts, entry), bytes, ids);
        for (size_t k = 0; k < bytes; k++) {
            training->places[at + k].piece = piece;
        }
        for (size_t k = 0; k < n; at += training->lengths[ids[k++]]) {
            bpe_place_token_(&training->places[at], ids[k], training->lengths[ids[k]]);
        }
        training->places[at++].id = BPE_BORDER_;
        training->counts[piece++] = entry->count;
    }
    assert(at == training->num_places && piece == counts->used);
    bpe_merger_close_(&merger);
    free(ids);
}

static void bpe_training_open_(BpeTraining_* training, const BpeCounts_* counts, const Bpe* old, int V) {
    memset(training, 0, sizeof(*training));
    training->vocab_size = V;
    training->num_places = 1;
    for (size_t i = 0; i < (size_t)1 << counts->bits; i++) {
        if (counts->counts[i].count != 0) {
            training->num_places += bpe_count_bytes_(&counts->counts[i]) + 1;
        }
    }
    CHECK(training->num_places <= UINT32_MAX,
          "BPE training: different pieces of %zu bytes, wanted at most %u", training->num_places, UINT32_MAX);
    const size_t num_groups = 2 * (size_t)V;
    training->merges = (int(*)[2])check_alloc((size_t)V, sizeof(*training->merges), "BPE training");
    training->places = (BpePlace_*)check_alloc(training->num_places, sizeof(BpePlace_), "BPE training");
    training->counts = (uint64_t*)check_alloc(counts->used, sizeof(uint64_t), "BPE training");
    training->lengths = (uint32_t*)check_alloc((size_t)V, sizeof(uint32_t), "BPE training");
    training->groups = (BpeGroup_*)check_alloc(num_groups, sizeof(BpeGroup_), "BPE training");
    training->groups_used = (uint32_t*)check_alloc(num_groups, sizeof(uint32_t), "BPE training");
    // not zeroed: much of it is never touched
    training->lists = (uint32_t*)malloc(array_bytes(3 * training->num_places, sizeof(uint32_t)));
    CHECK(training->lists, "BPE training: no memory for different pieces of %zu bytes", training->num_places);
    bpe_open_pairs_(training, 18);
    bpe_place_pieces_(training, counts, old);
    bpe_collect_all_(training);
}

static void bpe_training_close_(BpeTraining_* training) {
    free(training->merges);
    free(training->places);
    free(training->counts);
    free(training->lengths);
    free(training->groups);
    free(training->groups_used);
    free(training->lists);
    free(training->pairs);
    free(training->heap);
    memset(training, 0, sizeof(*training));
}

// Opens a vocabulary of V ids with the tokens of another, whose first ids they are.
static void bpe_open_extended_(Bpe* bpe, const Bpe* old, int V) {
    bpe_open_ids_(bpe, "BPE training", NULL, (size_t)V, (size_t)old->eot);
    bpe_rules_close(&bpe->rules);
    bpe_rules_open(&bpe->rules, old->rules.pattern);
    bpe->finds_pieces = old->finds_pieces;
    bpe->has_template = old->has_template;
    bpe->card = old->card;
    bpe->card.chat_template = bpe->card.generation = NULL; // which `old` owns
    memset(&bpe->card.chat, 0, sizeof(bpe->card.chat));
    for (int id = 0; id < old->vocab_size; id++) {
        const BpeToken_ token = old->tokens[id];
        if (bpe_find(old, (const char*)token.text, token.length) == id) {
            bpe_set_token_(bpe, id, token.text, token.length);
        }
        bpe->tokens[id] = token;
    }
}

// Sets token `id` to the union of two, whose bytes are allocated. Returns 0 if they are a token
// already.
static int bpe_add_union_(Bpe* bpe, int id, int left, int right) {
    const BpeToken_ a = bpe->tokens[left], b = bpe->tokens[right];
    unsigned char* text = (unsigned char*)check_alloc(a.length + b.length, 1, "BPE training");
    memcpy(text, a.text, a.length);
    memcpy(text + a.length, b.text, b.length);
    if (!bpe_set_token_(bpe, id, text, a.length + b.length)) {
        free(text);
        return 0;
    }
    return 1;
}

// Moves the bytes of all tokens into the vocabulary's own buffer. Tokens from `first` on had theirs
// allocated.
static void bpe_own_texts_(Bpe* bpe, int first) {
    size_t bytes = 0;
    for (int id = 0; id < bpe->vocab_size; id++) {
        bytes += bpe->tokens[id].length;
    }
    unsigned char* at = bpe->buffer = (unsigned char*)check_alloc(bytes, 1, "vocabulary");
    for (int id = 0; id < bpe->vocab_size; at += bpe->tokens[id++].length) {
        const unsigned char* text = bpe->tokens[id].text;
        memcpy(at, text, bpe->tokens[id].length);
        bpe->tokens[id].text = at;
        if (id >= first) {
            free((void*)text);
        }
    }
}

// Completes the vocabulary: the merges of the other, then its own.
static void bpe_finish_extended_(Bpe* bpe, const Bpe* old, const int (*merges)[2], int n) {
    char error[ERROR_BYTES];
    bpe_own_texts_(bpe, old->vocab_size);
    for (size_t i = 0; i < old->words.count; i++) {
        BpeWord word = old->words.words[i];
        word.text = bpe->tokens[word.id].text;
        bpe_words_add(&bpe->words, word);
    }
    bpe_words_finish(&bpe->words);
    if (!old->pairs.made) {
        CHECK(bpe_finish_(bpe, "BPE training", error), "%s", error);
        return;
    }
    BpeListed_* list = (BpeListed_*)check_alloc((size_t)(old->num_ranks + n), sizeof(BpeListed_), "merges");
    for (size_t i = 0; i < (size_t)1 << old->pairs.bits; i++) {
        const BpeMerge_ merge = bpe_merge_of_(old->pairs.entries[i]);
        const BpeListed_ listed = {merge.left, merge.right,
                                   merge.id < old->num_ranks ? old->pairs.made[merge.id] : 0, merge.id};
        if (old->pairs.entries[i] != 0) {
            list[merge.id] = listed;
        }
    }
    for (int i = 0; i < n; i++) {
        const BpeListed_ listed = {merges[i][0], merges[i][1], old->vocab_size + i, old->num_ranks + i};
        list[old->num_ranks + i] = listed;
    }
    CHECK(bpe_finish_ranks_(bpe, "BPE training", list, old->num_ranks + n, error), "%s", error);
    free(list);
}

// Merges the best pairs into `wanted` tokens from `first` on. With `texts`, skips pairs whose bytes
// are already a token, and adds the new tokens to `texts`. Returns the number of merges.
static int bpe_train_merges_(BpeTraining_* training, int first, int wanted, Bpe* texts,
                             BpeTrainProgress progress, void* context) {
    BpeNeighbors_* entry;
    int n = 0;
    while (n < wanted && (entry = bpe_take_best_(training)) != NULL) {
        int* merge = training->merges[n];
        merge[0] = (int)(entry->pair >> 21);
        merge[1] = (int)(entry->pair & BPE_NONE_);
        if (texts && !bpe_add_union_(texts, first + n, merge[0], merge[1])) {
            continue;
        }
        bpe_merge_pair_(training, entry, first + n);
        n++;
        if (progress) {
            progress(context, n, wanted);
        }
    }
    return n;
}

void bpe_trainer_run(BpeTrainer* trainer, int vocab_size, BpeTrainProgress progress, void* context,
                     Bpe* bpe) {
    CHECK(257 <= vocab_size && vocab_size <= BPE_MAX_VOCAB, "a vocabulary of %d ids, wanted 257 to %d",
          vocab_size, BPE_MAX_VOCAB);
    const int wanted = vocab_size - 257;
    BpeTraining_ training;
    Bpe bytes;
    bpe_gather_counts_(trainer);
    bpe_open_merges(&bytes, NULL, 0, "bytes");
    bpe_training_open_(&training, &trainer->counts[0], &bytes, vocab_size);
    bpe_close(&bytes);
    const int n = bpe_train_merges_(&training, 256, wanted, NULL, progress, context);
    CHECK(n == wanted,
          "a vocabulary of %d ids needs %d merges: the text allows only %d, so at most %d ids; "
          "wanted --train-bpe %d (./tokenize), --tokenizer bpe:%d (train_gpt2), or more text",
          vocab_size, wanted, n, 257 + n, 257 + n, 257 + n);
    bpe_open_merges(bpe, (const int(*)[2])training.merges, wanted, "BPE training");
    bpe_training_close_(&training);
}

void bpe_trainer_extend(BpeTrainer* trainer, const Bpe* old, int vocab_size, BpeTrainProgress progress,
                        void* context, Bpe* bpe) {
    const int first = old->vocab_size, wanted = vocab_size - first;
    CHECK(first < vocab_size && vocab_size <= BPE_MAX_VOCAB, "a vocabulary of %d ids, wanted %d to %d",
          vocab_size, first + 1, BPE_MAX_VOCAB);
    BpeTraining_ training;
    bpe_gather_counts_(trainer);
    bpe_training_open_(&training, &trainer->counts[0], old, vocab_size);
    bpe_open_extended_(bpe, old, vocab_size);
    const int n = bpe_train_merges_(&training, first, wanted, bpe, progress, context);
    CHECK(n == wanted,
          "a vocabulary of %d ids needs %d merges more: the text allows only %d, so at most %d ids",
          vocab_size, wanted, n, first + n);
    bpe_finish_extended_(bpe, old, (const int(*)[2])training.merges, wanted);
    bpe_training_close_(&training);
}

// ---- special tokens ----

void bpe_add_names(Bpe* bpe, const char* const* names, int n) {
    const int V = bpe->vocab_size;
    CHECK(V + n <= BPE_MAX_VOCAB, "a vocabulary of %d ids, wanted at most %d", V + n, BPE_MAX_VOCAB);
    BpeToken_* tokens = (BpeToken_*)check_alloc((size_t)(V + n), sizeof(BpeToken_), "vocabulary");
    memcpy(tokens, bpe->tokens, (size_t)V * sizeof(BpeToken_));
    free(bpe->tokens);
    bpe->tokens = tokens;
    bpe->vocab_size = V + n;
    bpe->num_ranks = bpe->pairs.made ? bpe->num_ranks : V + n;
    for (int i = 0; i < n; i++) {
        bpe_name_token_(bpe, V + i, (const unsigned char*)names[i], strlen(names[i]));
    }
}

#endif // BPE_TRAIN_IMPLEMENTATION

#endif
