/*
dedup_groups.h -- groups of documents that share keys (dedup_keys.h), in a fixed amount of memory.

    dedup_groups_open(&groups, n, bytes);
    for (int key = 0; key < keys; key++) {
        for (uint64_t part = 0; part < groups.parts; part++) {
            dedup_groups_start(&groups, part);
            dedup_groups_add(&groups, document, k);    // key number `key` of every document
        }
    }
    dedup_groups_finish(&groups);                      // groups.first

A document is in the group of every document that it shares a key with. So groups are connected: two
documents of a group may share no key with each other. The first of a group is its lowest number; it
does not depend on the order of the calls.

A table holds the different keys of one number, each with a document that has it. If there are too
many for the memory, they are divided into parts by their values, and the caller passes all of them
once for each part: less memory costs time, never a duplicate. Each document takes 4 bytes besides.
*/
#ifndef LLMC_DEDUP_GROUPS_H
#define LLMC_DEDUP_GROUPS_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/corpus/dedup_keys.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DEDUP_MAX_DOCUMENTS ((uint64_t)UINT32_MAX - 1)

typedef struct {
    uint64_t n;
    // (n) a document of the same group, at most the document itself; dedup_groups_finish: the first
    uint32_t* first;
    DedupKey* keys;      // (slots) table
    uint32_t* documents; // (slots) that have the keys, plus 1; 0: the slot is free
    uint64_t slots, used;
    uint64_t part, parts;
} DedupGroups;

// Returns the most documents that fit into so much memory, and that fit in one part.
uint64_t dedup_most_documents(uint64_t bytes);
uint64_t dedup_most_in_one_part(uint64_t bytes);

// Opens groups of one document each; n <= dedup_most_documents(bytes).
void dedup_groups_open(DedupGroups* groups, uint64_t n, uint64_t bytes);

// Empties the table, for keys of this part.
void dedup_groups_start(DedupGroups* groups, uint64_t part);

// Adds a document with a key, which is left out if it is of another part.
void dedup_groups_add(DedupGroups* groups, uint32_t document, DedupKey key);

// Sets `first` to the first document of each document's group.
void dedup_groups_finish(DedupGroups* groups);

void dedup_groups_close(DedupGroups* groups);

#ifdef __cplusplus
}
#endif

#ifdef DEDUP_GROUPS_IMPLEMENTATION

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"

enum {
    DEDUP_SLOT_BYTES_ = sizeof(DedupKey) + sizeof(uint32_t),
    DEDUP_SPARE_ = 2,             // slots for each key
    DEDUP_FEWEST_SLOTS_ = 1 << 16 // so that parts have almost equal numbers of keys
};
#define DEDUP_FIXED_BYTES_ ((uint64_t)DEDUP_FEWEST_SLOTS_ * DEDUP_SLOT_BYTES_)

uint64_t dedup_most_documents(uint64_t bytes) {
    const uint64_t n = bytes < DEDUP_FIXED_BYTES_ ? 0 : (bytes - DEDUP_FIXED_BYTES_) / sizeof(uint32_t);
    return n < DEDUP_MAX_DOCUMENTS ? n : DEDUP_MAX_DOCUMENTS;
}

uint64_t dedup_most_in_one_part(uint64_t bytes) {
    const uint64_t n = bytes / (sizeof(uint32_t) + DEDUP_SPARE_ * DEDUP_SLOT_BYTES_);
    const uint64_t most = dedup_most_documents(bytes);
    return n < most ? n : most;
}

void dedup_groups_open(DedupGroups* groups, uint64_t n, uint64_t bytes) {
    assert(n <= dedup_most_documents(bytes));
    memset(groups, 0, sizeof(*groups));
    const uint64_t most = (bytes - sizeof(uint32_t) * n) / DEDUP_SLOT_BYTES_;
    const uint64_t wanted =
        DEDUP_SPARE_ * n > DEDUP_FEWEST_SLOTS_ ? DEDUP_SPARE_ * n : (uint64_t)DEDUP_FEWEST_SLOTS_;
    groups->n = n;
    groups->slots = wanted < most ? wanted : most;
    groups->parts = (DEDUP_SPARE_ * n + groups->slots - 1) / groups->slots;
    groups->parts = groups->parts ? groups->parts : 1;
    groups->first = (uint32_t*)check_alloc_unset(n, sizeof(uint32_t), "--dedup: documents");
    groups->keys = (DedupKey*)check_alloc_unset(groups->slots, sizeof(DedupKey), "--dedup: keys");
    groups->documents = (uint32_t*)check_alloc_unset(groups->slots, sizeof(uint32_t), "--dedup: keys");
    for (uint64_t i = 0; i < n; i++) {
        groups->first[i] = (uint32_t)i;
    }
}

void dedup_groups_start(DedupGroups* groups, uint64_t part) {
    groups->part = part;
    groups->used = 0;
    memset(groups->documents, 0, groups->slots * sizeof(uint32_t));
}

// Returns the first document of a group so far, and shortens the way to it.
static uint32_t dedup_first_(DedupGroups* groups, uint32_t document) {
    uint32_t* first = groups->first;
    while (first[document] != document) {
        first[document] = first[first[document]];
        document = first[document];
    }
    return document;
}

// Scales a number of 64 bits to 0 .. n - 1.
static uint64_t dedup_scale_(uint64_t x, uint64_t n) { return (uint64_t)((unsigned __int128)x * n >> 64); }

void dedup_groups_add(DedupGroups* groups, uint32_t document, DedupKey key) {
    if (dedup_scale_(key.high, groups->parts) != groups->part) {
        return;
    }
    uint64_t slot = dedup_scale_(key.low, groups->slots);
    while (groups->documents[slot] &&
           (groups->keys[slot].low != key.low || groups->keys[slot].high != key.high)) {
        slot = slot + 1 == groups->slots ? 0 : slot + 1;
    }
    if (!groups->documents[slot]) {
        CHECK(++groups->used < groups->slots, "--dedup: a table of %llu keys is full",
              (unsigned long long)groups->slots);
        groups->keys[slot] = key;
        groups->documents[slot] = document + 1;
        return;
    }
    const uint32_t a = dedup_first_(groups, document), b = dedup_first_(groups, groups->documents[slot] - 1);
    groups->first[a > b ? a : b] = a < b ? a : b;
}

void dedup_groups_finish(DedupGroups* groups) {
    for (uint64_t i = 0; i < groups->n; i++) {
        groups->first[i] = dedup_first_(groups, (uint32_t)i);
    }
}

void dedup_groups_close(DedupGroups* groups) {
    free(groups->first);
    free(groups->keys);
    free(groups->documents);
    memset(groups, 0, sizeof(*groups));
}

#endif // DEDUP_GROUPS_IMPLEMENTATION

#endif
