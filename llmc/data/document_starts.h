/*
document_starts.h -- finds the documents of a stream of tokens: one starts at its first token, and
one at each end-of-text token.
*/
#ifndef LLMC_DOCUMENT_STARTS_H
#define LLMC_DOCUMENT_STARTS_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/data/token_files.h"

#ifdef __cplusplus
extern "C" {
#endif

// Growing list of positions.
typedef struct {
    uint64_t* at;
    size_t count, room;
} PositionList;

// ---- lists ----

void positions_reserve(PositionList* list, size_t more);

void positions_add(PositionList* list, uint64_t position);

// Counts the positions of the list up to and including `position`.
size_t positions_until(const PositionList* list, uint64_t position);

// ---- documents ----

// Adds the documents of the stream, in parallel; none at all is an error.
void documents_find(PositionList* list, const TokenStream* stream, int eot);

#ifdef __cplusplus
}
#endif

#ifdef DOCUMENT_STARTS_IMPLEMENTATION

#include "llmc/base/check.h"
#include "llmc/base/mapped_file.h"

// ---- lists ----

void positions_reserve(PositionList* list, size_t more) {
    list->at =
        (uint64_t*)check_reserve(list->at, &list->room, list->count + more, sizeof(uint64_t), "documents");
}

void positions_add(PositionList* list, uint64_t position) {
    positions_reserve(list, 1);
    list->at[list->count++] = position;
}

size_t positions_until(const PositionList* list, uint64_t position) {
    size_t low = 0, high = list->count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (list->at[middle] <= position) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// ---- documents ----

// Counts in sums as wide as a token, which compilers vectorize: at most 2^15 tokens.
static size_t documents_count_u16_(const uint16_t* tokens, size_t n, uint16_t eot) {
    uint16_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count = (uint16_t)(count + (tokens[i] == eot));
    }
    return count;
}

static size_t documents_count_u32_(const uint32_t* tokens, size_t n, uint32_t eot) {
    uint32_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += tokens[i] == eot;
    }
    return count;
}

// Counts the end-of-text tokens among n tokens of 2 or 4 bytes.
static size_t documents_count_(const TokenSpan* span, size_t start, size_t n, int eot) {
    const size_t step = 1 << 15;
    size_t count = 0;
    if (span->width == 2 && eot > UINT16_MAX) {
        return 0;
    }
    for (size_t i = 0; i < n; i += step) {
        const size_t take = n - i < step ? n - i : step;
        count += span->width == 2
                     ? documents_count_u16_((const uint16_t*)span->tokens + start + i, take, (uint16_t)eot)
                     : documents_count_u32_((const uint32_t*)span->tokens + start + i, take, (uint32_t)eot);
    }
    return count;
}

// Writes their positions, plus `base`, to [out, out_end); searches only blocks that have some.
// Returns the end of what was written.
static uint64_t* documents_write_(const TokenSpan* span, size_t start, size_t n, int eot, uint64_t base,
                                  uint64_t* out, const uint64_t* out_end) {
    const size_t step = 64;
    for (size_t i = 0; i < n; i += step) {
        const size_t end = n - i < step ? n : i + step;
        if (documents_count_(span, start + i, end - i, eot) == 0) {
            continue;
        }
        for (size_t j = start + i; j < start + end; j++) {
            const uint32_t token =
                span->width == 2 ? ((const uint16_t*)span->tokens)[j] : ((const uint32_t*)span->tokens)[j];
            if (token == (uint32_t)eot && out < out_end) {
                *out++ = base + j;
            }
        }
    }
    return out;
}

// Part of a span, for mapped_try: counts its documents, or writes their positions.
typedef struct {
    const TokenSpan* span;
    size_t start, n;
    int eot;
    uint64_t base;
    size_t count;
    uint64_t* out; // NULL: count
} DocumentsBlock_;

static void documents_read_block_(void* block_) {
    DocumentsBlock_* b = (DocumentsBlock_*)block_;
    if (!b->out) {
        b->count = documents_count_(b->span, b->start, b->n, b->eot);
        return;
    }
    const uint64_t* end = b->out + b->count;
    CHECK(documents_write_(b->span, b->start, b->n, b->eot, b->base, b->out, end) == end,
          "%s: changed while it was searched for documents; was it written to?", b->span->path);
}

// Counts the documents of the block (out NULL) or writes their positions; ends the program if the
// file has become shorter.
static size_t documents_try_(DocumentsBlock_ block) {
    const void* where;
    CHECK(mapped_try(documents_read_block_, &block, &where) == MAPPED_READ,
          "%s: became shorter while it was searched for documents; was it written to?", block.span->path);
    return block.count;
}

// Adds the end-of-text tokens [start, end) of a span, in parallel: each round first counts some
// blocks, then writes, while they are in the cache or at least in memory.
static void documents_scan_(PositionList* list, const TokenSpan* span, size_t start, size_t end, int eot,
                            uint64_t base) {
    enum { BLOCKS = 64 };
    const size_t max = (size_t)1 << 18; // tokens per block
    size_t at[BLOCKS + 1], place[BLOCKS + 1];
    for (; start < end; start = at[BLOCKS]) {
        for (size_t i = 0; i <= BLOCKS; i++) {
            at[i] = end - start < i * max ? end : start + i * max;
        }
        place[0] = list->count;
#ifdef _OPENMP
#pragma omp parallel for if (at[1] < end)
#endif
        for (int i = 0; i < BLOCKS; i++) {
            const DocumentsBlock_ block = {span, at[i], at[i + 1] - at[i], eot, base, 0, NULL};
            place[i + 1] = documents_try_(block);
        }
        for (int i = 0; i < BLOCKS; i++) {
            place[i + 1] += place[i];
        }
        positions_reserve(list, place[BLOCKS] - place[0]);
        uint64_t* out = list->at;
#ifdef _OPENMP
#pragma omp parallel for if (at[1] < end)
#endif
        for (int i = 0; i < BLOCKS; i++) {
            const DocumentsBlock_ block = {
                span, at[i], at[i + 1] - at[i], eot, base, place[i + 1] - place[i], out + place[i]};
            documents_try_(block);
        }
        list->count = place[BLOCKS];
    }
}

// True if the files of the stream have an end-of-text token anywhere: a part of them may lie inside
// one document.
static int documents_are_marked_(const TokenStream* stream, int eot) {
    const size_t step = (size_t)1 << 20;
    for (size_t i = 0; i < stream->num_spans; i++) {
        const TokenSpan* span = &stream->spans[i];
        // bytes have none
        for (size_t start = 0; span->width > 1 && start < span->count; start += step) {
            const size_t left = span->count - start;
            if (documents_count_(span, start, left < step ? left : step, eot) > 0) {
                return 1;
            }
        }
    }
    return 0;
}

void documents_find(PositionList* list, const TokenStream* stream, int eot) {
    const size_t from = stream->begin, to = stream->begin + stream->count;
    positions_add(list, 0);
    for (size_t i = 0; i < stream->num_spans; i++) {
        const TokenSpan* span = &stream->spans[i];
        const size_t first = span->first, last = span->first + span->count;
        if (last <= from || first >= to || span->width == 1) { // bytes contain no end-of-text token
            continue;
        }
        const size_t start = first < from ? from - first : 0, end = last > to ? to - first : span->count;
        // modulo 2^64 if the span starts before the stream
        const uint64_t base = (uint64_t)first - from;
        documents_scan_(list, span, start, end, eot, base);
    }
    CHECK(list->count > 1 || documents_are_marked_(stream, eot),
          "%s: no token %d (end of text), wanted documents that begin with it: is the tokenizer another one, "
          "or --pack stream?",
          stream->name, eot);
    if (list->count > 1 && list->at[1] == 0) { // the first token was found again
        memmove(list->at, list->at + 1, --list->count * sizeof(uint64_t));
    }
}

#endif // DOCUMENT_STARTS_IMPLEMENTATION

#endif
