/*
bpe_encode.h -- encodes text: the same ids as tiktoken's encode_ordinary.

No token is ever made from the characters of "<|endoftext|>": it is text like any other. Each byte
that is not valid UTF-8 counts as a character of its own, so decoding restores it.

    bpe_encoder_open    the state of a thread that encodes: a cache of pieces, memory for merging

Speed. Most pieces are found in a cache by their first 15 or 31 bytes. Slots are prefetched long
before they are needed, so that they come from memory together. For the same reason, new pieces
leave a gap among the ids and are merged 16 at a time, step by step in turn. Merging is linear in
the length of the piece (bpe_merge_long_), so no text is slow; and no piece has more than
BPE_MAX_PIECE bytes (bpe_split.h), so no text takes much memory. Measurements are in
dev/bench/results (make bench-tokenizer).
*/
#ifndef LLMC_BPE_ENCODE_H
#define LLMC_BPE_ENCODE_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_split.h"
#include "llmc/tokenizer/bpe_texts.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- the cache ----

// Slot of a piece of up to 15 bytes (as its key, which is never 0) with up to 4 ids; two slots fill
// a cache line.
typedef struct {
    uint64_t key[2]; // with BPE_SEE_LONG_ if the ids are in a long slot
    uint32_t ids[4]; // the highest byte of the first has their number
} BpeShortSlot_;

// Slot of a piece of up to 31 bytes with up to 7 ids. A cache line.
typedef struct {
    uint64_t key[4];
    int count;
    int ids[7];
} BpeLongSlot_;

// Key and slot of a piece.
typedef struct {
    uint64_t key[2];
    uint32_t slot; // first of two
} BpeLookup_;

// Pieces that end in some blocks of text, and wait for their ids.
typedef struct {
    const unsigned char* text; // (bytes)
    size_t bytes;
    size_t base;             // start of the blocks
    size_t begin;            // start of the first piece, at or before base
    size_t count;            // number of pieces
    uint16_t ends[BPE_CUTS]; // end of each piece, relative to base
    BpeLookup_ lookups[BPE_CUTS];
} BpePieces_;

// Piece that was not in the cache. Room for `bytes` ids is reserved for it.
typedef struct {
    BpeLookup_ lookup;
    const unsigned char* text;
    size_t bytes, left; // length of the piece; bytes from its start to the end of the text
    size_t ids_begin;   // index of its first id
    BpeShortMerge_ merge;
} BpeNew_;

typedef struct {
    const Bpe* bpe;
    BpeShortSlot_* short_slots; // each piece has two slots side by side, the latest used first
    BpeLongSlot_* long_slots;
    BpePieces_* pieces;
    BpeNew_* new_pieces; // (BPE_NEW_), in the order of the text
    size_t num_new;
    BpeMerger_ merger;
    NfcText normal; // a part of a text, normalized
} BpeEncoder;

void bpe_encoder_open(BpeEncoder* encoder, const Bpe* bpe);

void bpe_encoder_close(BpeEncoder* encoder);

// ---- encoding ----

// Sets ids, with room for bpe_most_ids of them, to the tokens of the text. Returns their number. A
// text may be encoded in parts that end at cuts of bpe_last_cut: all but the first are BPE_REST.
size_t bpe_encode_at(BpeEncoder* encoder, BpePlace place, const char* text, size_t bytes, int* ids);

// Encodes the start of a document, or all of it.
size_t bpe_encode(BpeEncoder* encoder, const char* text, size_t bytes, int* ids);

#ifdef __cplusplus
}
#endif

#ifdef BPE_ENCODE_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/vec.h"

// ---- the cache ----

// 16 MiB and 4 MiB, large enough for huge pages (check_alloc). With half the short slots, text seen
// before (110 MB, 281,708 different pieces) is 1/5 slower; with twice as many, new text is.
enum { BPE_SHORT_SLOTS_BITS_ = 19, BPE_LONG_SLOTS_BITS_ = 16, BPE_SHORT_IDS_ = 4, BPE_LONG_IDS_ = 7 };

static const uint64_t BPE_SEE_LONG_ = (uint64_t)1 << 63;
// Key of an empty short slot: no piece has it.
static const uint64_t BPE_NO_KEY_ = (uint64_t)1 << 62;

// pieces merged at a time; 8 are slower, 32 no faster: more pieces come twice
enum { BPE_NEW_ = 16 };

void bpe_encoder_open(BpeEncoder* encoder, const Bpe* bpe) {
    memset(encoder, 0, sizeof(*encoder));
    encoder->bpe = bpe;
    encoder->short_slots =
        (BpeShortSlot_*)check_alloc((size_t)1 << BPE_SHORT_SLOTS_BITS_, sizeof(BpeShortSlot_), "BPE cache");
    encoder->long_slots =
        (BpeLongSlot_*)check_alloc((size_t)1 << BPE_LONG_SLOTS_BITS_, sizeof(BpeLongSlot_), "BPE cache");
    encoder->pieces = (BpePieces_*)check_alloc(1, sizeof(BpePieces_), "pieces of text");
    encoder->new_pieces = (BpeNew_*)check_alloc(BPE_NEW_, sizeof(BpeNew_), "pieces of text");
    bpe_merger_open_(&encoder->merger, bpe->num_ranks);
}

void bpe_encoder_close(BpeEncoder* encoder) {
    free(encoder->short_slots);
    free(encoder->long_slots);
    free(encoder->pieces);
    free(encoder->new_pieces);
    nfc_text_close(&encoder->normal);
    bpe_merger_close_(&encoder->merger);
    memset(encoder, 0, sizeof(*encoder));
}

// Sets the key of a piece of n < 32 bytes; `left` bytes can be read from its start. Returns the
// first of its two long slots.
ALWAYS_INLINE BpeLongSlot_* bpe_long_slots_(const BpeEncoder* encoder, const unsigned char* piece, size_t n,
                                            size_t left, uint64_t key[4]) {
    unsigned char padded[32];
    if (left < sizeof(padded)) {
        memcpy(padded, piece, n);
        piece = padded;
    }
    return &encoder->long_slots[bpe_key_(piece, n, 4, key) >> (65 - BPE_LONG_SLOTS_BITS_) << 1];
}

// Moves the slot of this key to the front of the two. Returns 0 if neither has it.
static int bpe_find_long_(BpeLongSlot_* slots, const uint64_t key[4]) {
    if (memcmp(slots[0].key, key, sizeof(slots[0].key)) == 0) {
        return 1;
    }
    if (memcmp(slots[1].key, key, sizeof(slots[1].key)) != 0) {
        return 0;
    }
    const BpeLongSlot_ slot = slots[1];
    slots[1] = slots[0];
    slots[0] = slot;
    return 1;
}

// Copies the ids of a short slot, and returns their number. Always copies 4; those past the number
// are garbage.
ALWAYS_INLINE size_t bpe_take_(const BpeShortSlot_* slot, int* ids) {
    memcpy(ids, slot->ids, sizeof(slot->ids));
    ids[0] &= BPE_NONE_;
    return slot->ids[0] >> 24;
}

// Compares a short slot with a piece: 0 if it has the piece's ids, BPE_SEE_LONG_ if a long slot has
// them, anything else if the slot holds another piece.
ALWAYS_INLINE uint64_t bpe_differs_(const BpeShortSlot_* slot, const BpeLookup_* lookup) {
    return (slot->key[0] ^ lookup->key[0]) | (slot->key[1] ^ lookup->key[1]);
}

// Puts the ids of a new piece into the cache, if they fit. It may be there already.
static void bpe_remember_(const BpeEncoder* encoder, const BpeNew_* piece) {
    const int *ids = &piece->merge.parts[1], count = piece->merge.count;
    const BpeLookup_* lookup = &piece->lookup;
    const int is_long = lookup->key[1] == BPE_NO_KEY_ || count > BPE_SHORT_IDS_;
    if (piece->bytes >= 32 || count > BPE_LONG_IDS_) {
        return;
    }
    if (is_long) {
        BpeLongSlot_ slot,
            *slots = bpe_long_slots_(encoder, piece->text, piece->bytes, piece->left, slot.key);
        if (!bpe_find_long_(slots, slot.key)) {
            slot.count = count;
            memcpy(slot.ids, ids, sizeof(slot.ids));
            slots[1] = slots[0];
            slots[0] = slot;
        }
    }
    BpeShortSlot_ slot, *slots = &encoder->short_slots[lookup->slot];
    if (lookup->key[1] != BPE_NO_KEY_ && (bpe_differs_(slots, lookup) & ~BPE_SEE_LONG_)) {
        slot.key[0] = lookup->key[0];
        slot.key[1] = lookup->key[1] | (is_long ? BPE_SEE_LONG_ : 0);
        memcpy(slot.ids, ids, sizeof(slot.ids));
        slot.ids[0] |= (uint32_t)count << 24;
        slots[1] = slots[0];
        slots[0] = slot;
    }
}

// ---- encoding ----

// Starts to look up all pieces: prefetches their slots.
static void bpe_look_up_(const BpeEncoder* encoder) {
    BpePieces_* pieces = encoder->pieces;
    const unsigned char* text = pieces->text; // copies, for the compiler: no store changes them
    const size_t count = pieces->count, base = pieces->base, bytes = pieces->bytes;
    const BpeShortSlot_* short_slots = encoder->short_slots;
    size_t begin = pieces->begin;
    for (size_t i = 0; i < count; i++) {
        BpeLookup_* lookup = &pieces->lookups[i];
        const size_t end = base + pieces->ends[i], n = end - begin;
        const unsigned char* piece = text + begin;
        if (__builtin_expect((n < 16) & (begin + 16 <= bytes), 1)) {
            const uint64_t hash = bpe_key_(piece, n, 2, lookup->key);
            lookup->slot = (uint32_t)(hash >> (65 - BPE_SHORT_SLOTS_BITS_) << 1);
            __builtin_prefetch(&short_slots[lookup->slot]);
        } else {
            uint64_t key[4];
            lookup->key[0] = 0;
            lookup->key[1] = BPE_NO_KEY_;
            lookup->slot = 0;
            if (n < 32) {
                __builtin_prefetch(bpe_long_slots_(encoder, piece, n, bytes - begin, key));
            }
        }
        begin = end;
    }
}

// Merges the new pieces in turn, step by step: while one is being merged, the pairs of the others
// come from memory. Caches them, and closes the gaps left for their ids among the first `count`.
// Returns the new count.
__attribute__((noinline, unused)) static size_t bpe_encode_new_(BpeEncoder* encoder, int* ids, size_t count) {
    BpeShortMerge_* active[BPE_NEW_];
    const BpePairs_ pairs = encoder->bpe->pairs;
    BpeNew_* pieces = encoder->new_pieces;
    const size_t num_new = encoder->num_new;
    for (size_t i = 0; i < num_new; i++) {
        active[i] = &pieces[i].merge;
    }
    for (size_t left = num_new; left > 0;) {
        for (size_t i = 0; i < left; i++) {
            if (!bpe_short_merge_step_(&pairs, active[i])) {
                active[i--] = active[--left];
            }
        }
        for (size_t i = 0; i < left; i++) {
            bpe_short_merge_rank_(&pairs, active[i]);
        }
    }
    size_t to = num_new > 0 ? pieces[0].ids_begin : count;
    for (size_t i = 0; i < num_new; i++) {
        const size_t n = (size_t)pieces[i].merge.count, from = pieces[i].ids_begin + pieces[i].bytes;
        const size_t end = i + 1 < num_new ? pieces[i + 1].ids_begin : count;
        bpe_remember_(encoder, &pieces[i]);
        memcpy(ids + to, &pieces[i].merge.parts[1], n * sizeof(int));
        memmove(ids + to + n, ids + from, (end - from) * sizeof(int));
        to += n + end - from;
    }
    encoder->num_new = 0;
    return to;
}

// Appends the ids of piece i, which is not in its first short slot, to ids[0 .. count), or leaves a
// gap for them if it is new. Returns the new count.
__attribute__((noinline, unused)) static size_t bpe_encode_other_(BpeEncoder* encoder, size_t i, int* ids,
                                                                  size_t count) {
    const BpePieces_* pieces = encoder->pieces;
    const BpeLookup_* lookup = &pieces->lookups[i];
    BpeShortSlot_* slots = &encoder->short_slots[lookup->slot];
    if (bpe_differs_(&slots[1], lookup) == 0) {
        const BpeShortSlot_ slot = slots[1];
        slots[1] = slots[0];
        slots[0] = slot;
        return count + bpe_take_(&slot, ids + count);
    }
    const size_t begin = i == 0 ? pieces->begin : pieces->base + pieces->ends[i - 1];
    const size_t n = pieces->base + pieces->ends[i] - begin, left = pieces->bytes - begin;
    const unsigned char* piece = pieces->text + begin;
    const int may_be_long = lookup->key[1] == BPE_NO_KEY_ ||
                            bpe_differs_(&slots[0], lookup) == BPE_SEE_LONG_ ||
                            bpe_differs_(&slots[1], lookup) == BPE_SEE_LONG_;
    if (n < 32 && may_be_long) {
        uint64_t key[4];
        BpeLongSlot_* slot = bpe_long_slots_(encoder, piece, n, left, key);
        if (bpe_find_long_(slot, key)) {
            memcpy(ids + count, slot->ids, (size_t)slot->count * sizeof(int));
            return count + (size_t)slot->count;
        }
    }
    if (n > BPE_SHORT_) {
        return count + bpe_merge_(encoder->bpe, &encoder->merger, piece, n, ids + count);
    }
    if (encoder->num_new == BPE_NEW_) {
        count = bpe_encode_new_(encoder, ids, count);
    }
    BpeNew_* new_piece = &encoder->new_pieces[encoder->num_new++];
    new_piece->lookup = *lookup;
    new_piece->text = piece;
    new_piece->bytes = n;
    new_piece->left = left;
    new_piece->ids_begin = count;
    bpe_short_merge_open_(encoder->bpe, piece, (int)n, &new_piece->merge);
    const int whole = bpe_whole_piece_(encoder->bpe, piece, n);
    if (whole >= 0) {
        new_piece->merge.count = 1;
        new_piece->merge.parts[1] = whole;
    }
    return count + n;
}

// Appends the ids of all pieces, with gaps for new ones, to ids[0 .. count). Returns the new count.
static size_t bpe_encode_pieces_(BpeEncoder* encoder, int* ids, size_t count) {
    const BpePieces_* pieces = encoder->pieces;
    const BpeShortSlot_* short_slots = encoder->short_slots;
    const size_t n = pieces->count;
    for (size_t i = 0; i < n; i++) {
        const BpeLookup_* lookup = &pieces->lookups[i];
        const BpeShortSlot_* slot = &short_slots[lookup->slot];
        count = __builtin_expect(bpe_differs_(slot, lookup) == 0, 1)
                    ? count + bpe_take_(slot, ids + count)
                    : bpe_encode_other_(encoder, i, ids, count);
    }
    return count;
}

// Encodes a text that is already normalized and has no added tokens in it.
static size_t bpe_encode_plain_(BpeEncoder* encoder, const unsigned char* at, size_t bytes, int* ids) {
    BpeSplitter splitter = bpe_splitter(&encoder->bpe->rules, at, 0, bytes);
    BpePieces_* pieces = encoder->pieces;
    pieces->text = at;
    pieces->bytes = bytes;
    pieces->begin = 0;
    size_t count = 0;
    while (splitter.at < bytes) {
        pieces->base = splitter.at;
        pieces->count = bpe_split(&splitter, pieces->ends);
        const size_t begin = pieces->begin;
        const size_t cut_off = bpe_cut_off(&splitter, begin, pieces->base, pieces->ends, pieces->count);
        if (cut_off) {
            count += bpe_merge_(encoder->bpe, &encoder->merger, at + begin, cut_off - begin, ids + count);
            pieces->begin = cut_off;
            continue;
        }
        const uint16_t here = (uint16_t)((splitter.at < bytes ? splitter.at : bytes) - pieces->base);
        // by a contraction
        const int is_cut = pieces->count > 0 && pieces->ends[pieces->count - 1] == here;
        if (splitter.at >= bytes && !is_cut) {
            pieces->ends[pieces->count++] = here; // end of the last piece
        }
        bpe_look_up_(encoder);
        count = bpe_encode_pieces_(encoder, ids, count);
        if (pieces->count > 0) {
            pieces->begin = pieces->base + pieces->ends[pieces->count - 1];
        }
    }
    return bpe_encode_new_(encoder, ids, count);
}

// Ids of a text that is not split as it is.
typedef struct {
    BpeEncoder* encoder;
    int* ids;
    size_t count;
} BpeEncoding_;

static void bpe_encode_text_(void* context, const unsigned char* text, size_t bytes) {
    BpeEncoding_* encoding = (BpeEncoding_*)context;
    encoding->count += bpe_encode_plain_(encoding->encoder, text, bytes, encoding->ids + encoding->count);
}

static void bpe_encode_word_(void* context, int id) {
    BpeEncoding_* encoding = (BpeEncoding_*)context;
    encoding->ids[encoding->count++] = id;
}

size_t bpe_encode_at(BpeEncoder* encoder, BpePlace place, const char* text, size_t bytes, int* ids) {
    const Bpe* bpe = encoder->bpe;
    const unsigned char* at = (const unsigned char*)text;
    if (bpe_texts_are_whole(&bpe->rules)) {
        return bpe_encode_plain_(encoder, at, bytes, ids);
    }
    BpeEncoding_ encoding = {encoder, ids, 0};
    const BpeTexts texts = {&bpe->rules,      &bpe->words,      &encoder->normal,
                            bpe_encode_text_, bpe_encode_word_, &encoding};
    bpe_texts_visit(&texts, place, at, bytes);
    return encoding.count;
}

size_t bpe_encode(BpeEncoder* encoder, const char* text, size_t bytes, int* ids) {
    return bpe_encode_at(encoder, BPE_DOCUMENT, text, bytes, ids);
}

#endif // BPE_ENCODE_IMPLEMENTATION

#endif
