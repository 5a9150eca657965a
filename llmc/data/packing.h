/*
packing.h -- how documents become the rows that a run reads.

A stream of N tokens consists of documents: one starts at its first token, and one at each
end-of-text token. If a stream is only a part of its files, as validation data are, a part of a
document counts as a document. A row is up to T tokens, each with a target, the token that follows
it in the stream:

    stream    row k is the tokens [k T, (k+1) T), across document boundaries.
    aligned   T tokens from the start of a document, continuing into the following ones. If the row
              ends inside a document of more than T tokens, the next row continues it; the rest of a
              shorter one is dropped.
    bestfit   whole documents, packed by best-fit decreasing over windows of 65536 documents (Ding
              et al., "Fewer truncations improve language modeling", 2024). A document longer than T
              is cut into pieces of T and a rest, which is packed like a document. No token is
              dropped.
    pad       one document; if it is longer than T, pieces of T and a rest, one per row. No token is
              dropped.
    dynamic   the same rows, in batches as wide as their longest row (dataloader.h).
    uniform   the same rows sorted by length, for batches of rows of similar length.

In the last four, every token is in exactly one row. The target of a document's last token is the
end-of-text token that follows it in the stream. At the end of the files, end-of-text follows a
document that starts with it. A row shorter than T is padded with end-of-text tokens, whose targets
are -1. A piece without any target (a single last token) is dropped.

Some pieces may be rearranged with marks (fill_in_middle.h): they are cut so that the marks fit into
the row, and no other token is dropped to make room. Then rows of stream and aligned consist of
pieces as well, one for each document in them.

Targets that a mask hides (target_mask.h) are -1. Pieces whose targets are all hidden are dropped,
and with stream and aligned such rows: then row k is the k-th of the others. No stream with a mask
is rearranged.

Row k of R is found in O(1), through a table of the pieces (8 bytes each) that is made when the rows
are opened.
*/
#ifndef LLMC_PACKING_H
#define LLMC_PACKING_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/base/enum_words.h"
#include "llmc/data/document_starts.h"
#include "llmc/data/fill_in_middle.h"
#include "llmc/data/token_files.h"

#ifdef __cplusplus
extern "C" {
#endif

// --pack
// clang-format off
#define PACKING_WORDS(X) \
    X(PACK_STREAM, "stream") \
    X(PACK_ALIGNED, "aligned") \
    X(PACK_BESTFIT, "bestfit") \
    X(PACK_PAD, "pad") \
    X(PACK_DYNAMIC, "dynamic") \
    X(PACK_UNIFORM, "uniform")
// clang-format on
typedef enum { PACKING_WORDS(WORDS_VALUE) } Packing;
typedef enum { DOCUMENT_MASK_OFF, DOCUMENT_MASK_ON } DocumentMask;

typedef struct {
    const TokenStream* stream; // must stay valid
    Packing pack;
    int T, eot;
    FillInMiddle fim;
    uint64_t count; // R
    // start of each document, ascending, the first at 0; empty if not needed
    PositionList documents;
    PositionList pieces;     // pieces (piece_) of all rows, in order; empty: row k starts at k T
    PositionList row_pieces; // (R + 1) first piece of each row; empty: piece k is row k
    // tokens of the stream in the rows, so N - tokens are dropped; and marks: the rest of R T is
    // padding
    uint64_t tokens, marks;
    int has_mask;           // some targets are hidden
    uint64_t targets;       // of all rows; only with a mask
    uint64_t hidden_pieces; // dropped because of the mask
} Rows;

// ---- best fit ----

enum { BESTFIT_WINDOW = 1 << 16 }; // documents

// ---- rows ----

// Opens the rows of `stream`, which must stay unchanged. `eot` is the end-of-text token, also used
// as padding. `fim` rearranges pieces; NULL: none. Searches for documents only if they are needed.
void rows_open(Rows* rows, const TokenStream* stream, Packing pack, int T, int eot, DocumentMask mask,
               const FillInMiddle* fim);

void rows_close(Rows* rows);

// Returns the number of documents that are longer than a row; 0 if documents were not searched for.
uint64_t rows_count_cut(const Rows* rows);

// Returns the number of tokens of a row, with marks, without padding.
int rows_length(const Rows* rows, uint64_t row);

// Tokens of rows, with marks, without padding; and targets.
typedef struct {
    int64_t tokens, targets;
} RowCounts;

// Adds the counts of a row, the same in every epoch.
void rows_add_counts(const Rows* rows, uint64_t row, RowCounts* counts);

// Sets inputs, targets and, unless NULL, starts (T each, T at least the row's length) of a row in
// an epoch. Returns the number of targets. starts: position in the row where each token's document
// starts; each padding token is a document of its own.
int rows_fill(const Rows* rows, uint64_t row, uint64_t epoch, int T, int* inputs, int* targets, int* starts);

// Prints where a row comes from: the tokens of each piece, and its document, counted from 0 in the
// stream, if they are known.
void rows_print_place(FILE* file, const Rows* rows, uint64_t row);

// Returns the sum of a value over the targets of a row without rearranged pieces; `values` has one
// for each token of the stream, which has no mask. Adds the number of targets to *counted.
double rows_sum_targets(const Rows* rows, uint64_t row, const float* values, uint64_t* counted);

#ifdef __cplusplus
}
#endif

#ifdef PACKING_IMPLEMENTATION

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"

// Returns the end of document d.
static uint64_t document_end_(const Rows* rows, size_t d) {
    return d + 1 < rows->documents.count ? rows->documents.at[d + 1] : rows->stream->count;
}

// ---- pieces: tokens of a row that follow each other from a position, and marks ----

enum { PIECE_LENGTH_BITS_ = 20 }; // --seq-len is at most 2^20

static uint64_t piece_(uint64_t start, uint64_t length) { return start << PIECE_LENGTH_BITS_ | (length - 1); }

static uint64_t piece_start_(uint64_t piece) { return piece >> PIECE_LENGTH_BITS_; }

static int piece_length_(uint64_t piece) { return (int)(piece & ((1 << PIECE_LENGTH_BITS_) - 1)) + 1; }

// Returns the number of marks in a piece.
static uint64_t piece_marks_(const Rows* rows, uint64_t piece) {
    const int is_long = piece_length_(piece) >= FIM_LEAST;
    return is_long && fim_chooses(&rows->fim, piece_start_(piece)) ? FIM_MARKS : 0;
}

// Returns the position after the last token of a piece.
static uint64_t piece_end_(const Rows* rows, uint64_t piece) {
    return piece_start_(piece) + (uint64_t)piece_length_(piece) - piece_marks_(rows, piece);
}

// Returns the piece that starts at `at` in a document that ends at `end`, of at most `room` tokens.
// One that would be chosen, but is too short for marks, stays shorter than FIM_LEAST.
static uint64_t piece_at_(const Rows* rows, uint64_t at, uint64_t end, uint64_t room) {
    const int fits = end - at >= FIM_LEAST - FIM_MARKS && room >= FIM_LEAST;
    const uint64_t length = end - at + (fits && fim_chooses(&rows->fim, at) ? FIM_MARKS : 0);
    return piece_(at, length < room ? length : room);
}

// Adds a piece to the number of tokens in rows.
static void rows_count_(Rows* rows, uint64_t piece) {
    const uint64_t marks = piece_marks_(rows, piece);
    rows->tokens += (uint64_t)piece_length_(piece) - marks;
    rows->marks += marks;
}

// Returns the target of the last token of the stream: end-of-text, if it follows in the files, or
// would: at their end, if the last document starts with it, but does not end with it.
static int rows_last_target_(const Rows* rows) {
    const TokenStream* stream = rows->stream;
    const TokenSpan* span = &stream->spans[stream->num_spans - 1];
    const size_t start = (size_t)rows->documents.at[rows->documents.count - 1], N = stream->count;
    const int is_part = stream->begin + N < span->first + span->count;
    TokenStream longer = *stream;
    longer.count += (size_t)is_part;
    const int ends = is_part ? tokens_at(&longer, N) == rows->eot
                             : tokens_at(stream, start) == rows->eot && tokens_at(stream, N - 1) != rows->eot;
    return ends ? rows->eot : -1;
}

// Returns the target of the token before position `next` at the end of a piece.
static int rows_target_(const Rows* rows, uint64_t next) {
    return next == rows->stream->count ? rows_last_target_(rows) : tokens_at(rows->stream, (size_t)next);
}

// Returns the number of targets of a piece of n tokens: with `target` for the last of them, -1 if
// it has none.
static int piece_targets_(const Rows* rows, uint64_t at, int n, int target) {
    const size_t last = (size_t)at + (size_t)n - 1;
    const int hidden = rows->has_mask ? (int)tokens_count_hidden(rows->stream, (size_t)at, (size_t)n) : 0;
    const int hides_none = target < 0 && rows->has_mask && tokens_count_hidden(rows->stream, last, 1);
    return n - (target < 0) - hidden + hides_none;
}

// ---- making rows ----

// Adds a piece, unless it has no target. The target of its last token may be missing if `ends`.
static void rows_add_(Rows* rows, PositionList* list, uint64_t piece, int ends) {
    const uint64_t at = piece_start_(piece), end = piece_end_(rows, piece);
    const int n = (int)(end - at);
    // a search, so only where the number of targets depends on it
    const int target = ends && (n == 1 || rows->has_mask) ? rows_target_(rows, end) : 0;
    const int counted = piece_targets_(rows, at, n, target);
    if (counted > 0) {
        positions_add(list, piece);
        rows_count_(rows, piece);
        rows->targets += (uint64_t)counted;
    }
    rows->hidden_pieces += counted == 0 && n - (target < 0) > 0;
}

// Makes the rows of a stream with a mask.
static void rows_cut_stream_(Rows* rows) {
    const uint64_t T = (uint64_t)rows->T, N = rows->stream->count;
    for (uint64_t start = 0; start + T < N; start += T) {
        rows_add_(rows, &rows->pieces, piece_(start, T), 0);
    }
}

// Returns the start of the row after one that ended at `next`. *d moves up to the document there.
static uint64_t rows_next_(const Rows* rows, size_t* d, uint64_t next) {
    while (document_end_(rows, *d) <= next) {
        ++*d;
    }
    const uint64_t begin = rows->documents.at[*d], end = document_end_(rows, *d);
    const int continues = begin == next || end - begin > (uint64_t)rows->T;
    return rows->pack == PACK_STREAM || continues ? next : end;
}

static void rows_align_(Rows* rows) {
    const uint64_t T = (uint64_t)rows->T, N = rows->stream->count;
    size_t d = 0; // document of the token after the row
    for (uint64_t start = 0; start + T < N; start = rows_next_(rows, &d, start + T)) {
        rows_add_(rows, &rows->pieces, piece_(start, T), 0);
    }
}

// Adds a row of T tokens from `start` on, in document d: a piece for each document. Returns the
// position after it; N, without a row, if no target would be left for its last token.
static uint64_t rows_join_one_(Rows* rows, size_t d, uint64_t start) {
    const uint64_t N = rows->stream->count, tokens = rows->tokens, marks = rows->marks;
    const size_t first = rows->pieces.count;
    uint64_t at = start, room = (uint64_t)rows->T;
    for (; room > 0 && at < N; d++) {
        const uint64_t piece = piece_at_(rows, at, document_end_(rows, d), room);
        positions_add(&rows->pieces, piece);
        rows_count_(rows, piece);
        room -= (uint64_t)piece_length_(piece);
        at = piece_end_(rows, piece);
    }
    if (room > 0 || at == N) {
        rows->pieces.count = first;
        rows->tokens = tokens;
        rows->marks = marks;
        return N;
    }
    positions_add(&rows->row_pieces, first);
    return at;
}

// Makes rows of stream and aligned in which pieces are rearranged.
static void rows_join_(Rows* rows) {
    const uint64_t N = rows->stream->count;
    size_t d = 0;
    for (uint64_t start = 0; start < N;) {
        const uint64_t next = rows_join_one_(rows, d, start);
        start = next < N ? rows_next_(rows, &d, next) : N;
        d += start < N && start == document_end_(rows, d);
    }
    positions_add(&rows->row_pieces, rows->pieces.count);
}

// Cuts document d: pieces of T tokens go to `whole`, the rest to `rests`.
static void rows_cut_(Rows* rows, size_t d, PositionList* whole, PositionList* rests) {
    const uint64_t end = document_end_(rows, d);
    for (uint64_t at = rows->documents.at[d], next; at < end; at = next) {
        const uint64_t piece = piece_at_(rows, at, end, (uint64_t)rows->T);
        next = piece_end_(rows, piece);
        rows_add_(rows, piece_length_(piece) < rows->T ? rests : whole, piece, next == end);
    }
}

static void rows_pad_(Rows* rows) {
    for (size_t d = 0; d < rows->documents.count; d++) {
        rows_cut_(rows, d, &rows->pieces, &rows->pieces);
    }
}

// Sorts pieces by length; equal lengths keep their order.
static void rows_sort_(const uint64_t* pieces, uint64_t* sorted, size_t count, int T) {
    size_t* first = (size_t*)check_alloc((size_t)T + 2, sizeof(size_t), "lengths of documents");
    for (size_t i = 0; i < count; i++) {
        first[piece_length_(pieces[i]) + 1]++;
    }
    for (int length = 1; length <= T; length++) {
        first[length + 1] += first[length];
    }
    for (size_t i = 0; i < count; i++) {
        sorted[first[piece_length_(pieces[i])]++] = pieces[i];
    }
    free(first);
}

static void rows_make_uniform_(Rows* rows) {
    rows_pad_(rows);
    uint64_t* sorted = (uint64_t*)check_alloc(rows->pieces.count, sizeof(uint64_t), "sorted documents");
    rows_sort_(rows->pieces.at, sorted, rows->pieces.count, rows->T);
    free(rows->pieces.at);
    rows->pieces.at = sorted;
    rows->pieces.room = rows->pieces.count;
}

// ---- best fit ----

// Rows of a window that are being filled.
typedef struct {
    int T;
    PositionList pieces, sorted; // (BESTFIT_WINDOW) pieces of less than T tokens
    PositionList whole, order;   // pieces of T tokens; the rows in the order they are added
    int num_rows;
    // (BESTFIT_WINDOW) by row: its first and last piece, as indices into `sorted`
    int *first, *last;
    // (BESTFIT_WINDOW) by row: free tokens, and the next row with as many, or -1
    int *space, *below;
    int* next;      // (BESTFIT_WINDOW) by piece: the next one of its row, or -1
    int* top;       // (T + 1) by space: the row made last, or -1
    uint64_t* some; // bits by space: set if a row has it
} Bestfit_;

static void bestfit_open_(Bestfit_* fit, int T) {
    int* memory = (int*)check_alloc(5 * (size_t)BESTFIT_WINDOW + (size_t)T + 1, sizeof(int), "packing");
    memset(fit, 0, sizeof(*fit));
    fit->T = T;
    positions_reserve(&fit->pieces, BESTFIT_WINDOW);
    positions_reserve(&fit->sorted, BESTFIT_WINDOW);
    positions_reserve(&fit->order, BESTFIT_WINDOW);
    fit->first = memory;
    fit->last = memory + BESTFIT_WINDOW;
    fit->space = memory + 2 * BESTFIT_WINDOW;
    fit->below = memory + 3 * BESTFIT_WINDOW;
    fit->next = memory + 4 * BESTFIT_WINDOW;
    fit->top = memory + 5 * BESTFIT_WINDOW;
    fit->some = (uint64_t*)check_alloc((size_t)T / 64 + 1, sizeof(uint64_t), "packing");
}

static void bestfit_close_(Bestfit_* fit) {
    free(fit->some);
    free(fit->first);
    free(fit->order.at);
    free(fit->whole.at);
    free(fit->sorted.at);
    free(fit->pieces.at);
}

// Returns the smallest free space of a row that is at least `length`; -1 if no row has it.
static int bestfit_find_(const Bestfit_* fit, int length) {
    const int words = fit->T / 64 + 1;
    uint64_t bits = fit->some[length / 64] & (UINT64_MAX << length % 64);
    for (int word = length / 64;; bits = fit->some[word]) {
        if (bits) {
            return 64 * word + __builtin_ctzll(bits);
        }
        if (++word == words) {
            return -1;
        }
    }
}

static void bestfit_push_(Bestfit_* fit, int row) {
    const int space = fit->space[row];
    fit->below[row] = fit->top[space];
    fit->top[space] = row;
    fit->some[space / 64] |= UINT64_C(1) << space % 64;
}

// Removes and returns a row with this space, which exists.
static int bestfit_pop_(Bestfit_* fit, int space) {
    const int row = fit->top[space];
    fit->top[space] = fit->below[row];
    if (fit->top[space] < 0) {
        fit->some[space / 64] &= ~(UINT64_C(1) << space % 64);
    }
    return row;
}

static void bestfit_place_(Bestfit_* fit, int piece) {
    const int length = piece_length_(fit->sorted.at[piece]), space = bestfit_find_(fit, length);
    int row = fit->num_rows;
    fit->next[piece] = -1;
    if (space < 0) {
        fit->num_rows++;
        fit->space[row] = fit->T;
        fit->first[row] = piece;
    } else {
        row = bestfit_pop_(fit, space);
        fit->next[fit->last[row]] = piece;
    }
    fit->last[row] = piece;
    fit->space[row] -= length;
    bestfit_push_(fit, row);
}

static int bestfit_compare_(const void* a, const void* b) {
    const uint64_t one = *(const uint64_t*)a, other = *(const uint64_t*)b;
    return (one > other) - (one < other);
}

// Adds the rows of the window, and the whole pieces of T tokens, in the order of their first pieces
// in the stream: the data must not start with long documents only.
static void bestfit_add_rows_(Bestfit_* fit, Rows* rows) {
    size_t whole = 0;
    fit->order.count = 0;
    for (int row = 0; row < fit->num_rows; row++) {
        positions_add(&fit->order,
                      piece_start_(fit->sorted.at[fit->first[row]]) * BESTFIT_WINDOW + (uint64_t)row);
    }
    if (fit->order.count > 0) { // qsort does not take a missing array
        qsort(fit->order.at, fit->order.count, sizeof(uint64_t), bestfit_compare_);
    }
    for (size_t i = 0; i <= fit->order.count; i++) {
        const uint64_t key = i < fit->order.count ? fit->order.at[i] : UINT64_MAX;
        for (; whole < fit->whole.count && piece_start_(fit->whole.at[whole]) < key / BESTFIT_WINDOW;
             whole++) {
            positions_add(&rows->row_pieces, rows->pieces.count);
            positions_add(&rows->pieces, fit->whole.at[whole]);
        }
        if (i == fit->order.count) {
            return;
        }
        positions_add(&rows->row_pieces, rows->pieces.count);
        for (int piece = fit->first[key % BESTFIT_WINDOW]; piece >= 0; piece = fit->next[piece]) {
            positions_add(&rows->pieces, fit->sorted.at[piece]);
        }
    }
}

// Packs the pieces of a window, each shorter than T, the longest first, and adds the rows.
static void bestfit_window_(Bestfit_* fit, Rows* rows) {
    fit->num_rows = 0;
    memset(fit->top, -1, ((size_t)fit->T + 1) * sizeof(int));
    memset(fit->some, 0, ((size_t)fit->T / 64 + 1) * sizeof(uint64_t));
    rows_sort_(fit->pieces.at, fit->sorted.at, fit->pieces.count, fit->T);
    for (int piece = (int)fit->pieces.count - 1; piece >= 0; piece--) {
        bestfit_place_(fit, piece);
    }
    bestfit_add_rows_(fit, rows);
    fit->pieces.count = fit->whole.count = 0;
}

static void rows_bestfit_(Rows* rows) {
    Bestfit_ fit;
    bestfit_open_(&fit, rows->T);
    for (size_t d = 0; d < rows->documents.count; d++) {
        rows_cut_(rows, d, &fit.whole, &fit.pieces);
        if ((d + 1) % BESTFIT_WINDOW == 0 || d + 1 == rows->documents.count) {
            bestfit_window_(&fit, rows);
        }
    }
    positions_add(&rows->row_pieces, rows->pieces.count);
    bestfit_close_(&fit);
}

// ---- rows ----

// Returns true if each row is T tokens of the stream end to end.
static int rows_are_whole_(const Rows* rows) {
    return rows->pack <= PACK_ALIGNED && rows->row_pieces.count == 0;
}

// Makes the table of the rows, if they need one.
static void rows_make_(Rows* rows) {
    switch (rows->pack) {
    case PACK_STREAM:
        if (rows->has_mask) {
            rows_cut_stream_(rows);
        }
        break;
    case PACK_ALIGNED:
        rows_align_(rows);
        break;
    case PACK_BESTFIT:
        rows_bestfit_(rows);
        break;
    case PACK_UNIFORM:
        rows_make_uniform_(rows);
        break;
    default:
        rows_pad_(rows);
        break;
    }
}

// Counts the rows.
static uint64_t rows_of_(const Rows* rows) {
    const int are_even = rows->pack == PACK_STREAM && !rows->has_mask;
    if (rows->row_pieces.count > 0) {
        return rows->row_pieces.count - 1;
    }
    return are_even ? (rows->stream->count - 1) / (uint64_t)rows->T : rows->pieces.count;
}

void rows_open(Rows* rows, const TokenStream* stream, Packing pack, int T, int eot, DocumentMask mask,
               const FillInMiddle* fim) {
    const Rows empty = {
        .stream = stream, .pack = pack, .T = T, .eot = eot, .has_mask = tokens_have_mask(stream)};
    *rows = empty;
    if (fim) {
        rows->fim = *fim;
    }
    assert(T > 0 && T <= 1 << PIECE_LENGTH_BITS_);
    CHECK(!rows->has_mask || rows->fim.rate == 0,
          "%s: has prompts or chats, wanted --fim-rate 0: rearranged, an answer would precede its question",
          stream->name);
    CHECK(stream->count > (size_t)T || pack > PACK_ALIGNED,
          "%s: %zu tokens, wanted %zu for a sequence of %d and its next token", stream->name, stream->count,
          (size_t)T + 1, T);
    CHECK(stream->count >> (64 - PIECE_LENGTH_BITS_) == 0, "%s: %zu tokens, wanted less than 2^44",
          stream->name, stream->count);
    if (pack != PACK_STREAM || mask == DOCUMENT_MASK_ON || rows->fim.rate > 0) {
        documents_find(&rows->documents, stream, eot);
    }
    if (pack <= PACK_ALIGNED && rows->fim.rate > 0) {
        rows_join_(rows);
    } else {
        rows_make_(rows);
    }
    rows->count = rows_of_(rows);
    if (rows_are_whole_(rows)) {
        rows->tokens = rows->count * (uint64_t)T;
    }
    CHECK(rows->count > 0 || !rows->hidden_pieces, "%s: no answer in any of its rows of %d tokens",
          stream->name, T);
    CHECK(rows->count > 0, "%s: no row of %d tokens can be made of its %zu", stream->name, T, stream->count);
}

void rows_close(Rows* rows) {
    free(rows->row_pieces.at);
    free(rows->pieces.at);
    free(rows->documents.at);
    memset(rows, 0, sizeof(*rows));
}

// Sets [*first, *end) to the indices of the pieces of a row.
static void rows_pieces_(const Rows* rows, uint64_t row, uint64_t* first, uint64_t* end) {
    const int several = rows->row_pieces.count > 0;
    *first = several ? rows->row_pieces.at[row] : row;
    *end = several ? rows->row_pieces.at[row + 1] : row + 1;
}

// Returns the start of a row of T tokens end to end.
static uint64_t rows_start_(const Rows* rows, uint64_t row) {
    return rows->pieces.count == 0 ? row * (uint64_t)rows->T : piece_start_(rows->pieces.at[row]);
}

uint64_t rows_count_cut(const Rows* rows) {
    const PositionList* list = &rows->documents;
    uint64_t cut = 0;
    for (size_t i = 0; i < list->count; i++) {
        const uint64_t end = i + 1 < list->count ? list->at[i + 1] : rows->stream->count;
        cut += end - list->at[i] > (uint64_t)rows->T;
    }
    return cut;
}

int rows_length(const Rows* rows, uint64_t row) {
    uint64_t first, end;
    int length = 0;
    if (rows_are_whole_(rows)) {
        return rows->T;
    }
    rows_pieces_(rows, row, &first, &end);
    for (uint64_t piece = first; piece < end; piece++) {
        length += piece_length_(rows->pieces.at[piece]);
    }
    return length;
}

// Sets starts (n) of tokens in a row, from position `at` of the stream: where each token's document
// starts; one that started earlier starts with the row.
static void rows_mark_(const Rows* rows, uint64_t at, int n, int* starts) {
    size_t next = positions_until(&rows->documents, at);
    for (int t = 0, start = 0; t < n; t++) {
        if (next < rows->documents.count && rows->documents.at[next] == at + (uint64_t)t) {
            start = t;
            next++;
        }
        starts[t] = start;
    }
}

// Hides the targets (n) of a piece where the mask says so.
static void rows_hide_(const Rows* rows, uint64_t at, int n, int* targets) {
    if (rows->has_mask) {
        tokens_hide(rows->stream, (size_t)at, (size_t)n, targets);
    }
}

// Fills a row with T tokens end to end.
static int rows_fill_whole_(const Rows* rows, uint64_t at, int* inputs, int* targets, int* starts) {
    const size_t T = (size_t)rows->T;
    tokens_fill(rows->stream, (size_t)at, T, inputs);
    memcpy(targets, inputs + 1, (T - 1) * sizeof(int));
    targets[T - 1] = tokens_at(rows->stream, (size_t)at + T);
    if (starts) {
        rows_mark_(rows, at, rows->T, starts);
    }
    rows_hide_(rows, at, rows->T, targets);
    return piece_targets_(rows, at, rows->T, 0);
}

// Returns the target of a piece's last token. A middle (fill_in_middle.h) ends with end-of-text.
static int piece_last_target_(const Rows* rows, uint64_t piece) {
    const uint64_t end = piece_end_(rows, piece);
    const int has_end =
        piece_marks_(rows, piece) == 0 || tokens_at(rows->stream, (size_t)end - 1) == rows->eot;
    return has_end ? rows_target_(rows, end) : rows->eot;
}

// Sets the tokens of a piece in an epoch.
static void rows_fill_piece_(const Rows* rows, uint64_t piece, uint64_t epoch, int* inputs) {
    const uint64_t at = piece_start_(piece);
    const size_t n = (size_t)(piece_end_(rows, piece) - at);
    if (piece_marks_(rows, piece) == 0) {
        tokens_fill(rows->stream, (size_t)at, n, inputs);
    } else {
        fim_fill(&rows->fim, rows->stream, at, n, rows->eot, epoch, inputs);
    }
}

int rows_fill(const Rows* rows, uint64_t row, uint64_t epoch, int T, int* inputs, int* targets, int* starts) {
    uint64_t piece, end;
    int t = 0, counted = 0;
    if (rows_are_whole_(rows)) {
        return rows_fill_whole_(rows, rows_start_(rows, row), inputs, targets, starts);
    }
    rows_pieces_(rows, row, &piece, &end);
    for (; piece < end; piece++) {
        const int n = piece_length_(rows->pieces.at[piece]), begin = t;
        const int last = piece_last_target_(rows, rows->pieces.at[piece]);
        rows_fill_piece_(rows, rows->pieces.at[piece], epoch, inputs + t);
        memcpy(targets + t, inputs + t + 1, ((size_t)n - 1) * sizeof(int));
        targets[t + n - 1] = last;
        counted += piece_targets_(rows, piece_start_(rows->pieces.at[piece]), n, last);
        rows_hide_(rows, piece_start_(rows->pieces.at[piece]), n, targets + t);
        for (; t < begin + n; t++) {
            if (starts) {
                starts[t] = begin;
            }
        }
    }
    for (; t < T; t++) {
        inputs[t] = rows->eot;
        targets[t] = -1;
        if (starts) {
            starts[t] = t;
        }
    }
    return counted;
}

void rows_add_counts(const Rows* rows, uint64_t row, RowCounts* counts) {
    uint64_t first, end;
    if (rows_are_whole_(rows)) {
        counts->tokens += rows->T;
        counts->targets += piece_targets_(rows, rows_start_(rows, row), rows->T, 0);
        return;
    }
    rows_pieces_(rows, row, &first, &end);
    for (uint64_t i = first; i < end; i++) {
        const uint64_t piece = rows->pieces.at[i];
        const int n = piece_length_(piece);
        counts->tokens += n;
        counts->targets += piece_targets_(rows, piece_start_(piece), n, piece_last_target_(rows, piece));
    }
}

// Prints where a piece comes from.
static void rows_print_piece_(FILE* file, const Rows* rows, uint64_t start, uint64_t length) {
    const PositionList* documents = &rows->documents;
    tokens_print_place(file, rows->stream, start, length);
    if (documents->count > 0) {
        const size_t first = positions_until(documents, start),
                     last = positions_until(documents, start + length - 1);
        fprintf(file, first == last ? " (document %zu)" : " (documents %zu-%zu)", first - 1, last - 1);
    }
}

void rows_print_place(FILE* file, const Rows* rows, uint64_t row) {
    enum { MOST = 4 };
    uint64_t first, end;
    if (rows_are_whole_(rows)) {
        rows_print_piece_(file, rows, rows_start_(rows, row), (uint64_t)rows->T);
        return;
    }
    rows_pieces_(rows, row, &first, &end);
    for (uint64_t i = first; i < end && i < first + MOST; i++) {
        const uint64_t piece = rows->pieces.at[i];
        fputs(i > first ? ", " : "", file);
        rows_print_piece_(file, rows, piece_start_(piece),
                          (uint64_t)piece_length_(piece) - piece_marks_(rows, piece));
    }
    if (end > first + MOST) {
        fprintf(file, " and %llu more", (unsigned long long)(end - first - MOST));
    }
}

double rows_sum_targets(const Rows* rows, uint64_t row, const float* values, uint64_t* counted) {
    uint64_t first = 0, end = 1;
    double sum = 0;
    assert(rows->fim.rate == 0);
    if (rows->pack != PACK_STREAM) {
        rows_pieces_(rows, row, &first, &end);
    }
    for (uint64_t i = first; i < end; i++) {
        const uint64_t piece = rows->pack == PACK_STREAM ? piece_(row * (uint64_t)rows->T, (uint64_t)rows->T)
                                                         : rows->pieces.at[i];
        const uint64_t next = piece_start_(piece) + (uint64_t)piece_length_(piece);
        const int is_open = // the last token has a target, and that a value
            rows->pack <= PACK_ALIGNED || next < rows->stream->count;
        for (uint64_t at = piece_start_(piece) + 1; at < next + (uint64_t)is_open; at++) {
            sum += values[at];
            ++*counted;
        }
    }
    return sum;
}

#endif // PACKING_IMPLEMENTATION

#endif
