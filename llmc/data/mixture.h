/*
mixture.h -- the data of a run: one source of rows, or several, mixed by weight.

A list names files and patterns, separated by commas. Without weights they are one source. With
weights (A*.bin:0.7,B*.bin:0.3; positive decimals, scaled to a sum of 1) each item is a source of
its own. Sequence p of the run is then row j of source s, counted over that source's epochs; (s, j)
is found in O(1) for any p. After any n sequences, source s has given n w_s, to within less than
one.

The order repeats after `cycle` sequences, the smallest number of which every source gives a whole
number, so the mixture stays exact forever. Within a cycle, the next turn goes to the source that
must have one soonest, among those that it would not put more than one ahead: that always works (R.
Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980).
*/
#ifndef LLMC_MIXTURE_H
#define LLMC_MIXTURE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/data/packing.h"
#include "llmc/data/token_files.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char* name; // its pattern of files, as the user gave it; owned
    TokenStream stream;
    Rows rows;      // set by mixture_pack
    uint64_t share; // sequences per cycle
} DataSource;

typedef struct {
    DataSource* source; // (count)
    int count;
    size_t tokens;        // of all sources
    uint64_t fingerprint; // checksum of the contents of all files in order; 0 for memory
    Packing pack;         // set by mixture_pack, like the next two
    int T;
    DocumentMask mask;
    uint64_t cycle;
    uint8_t* turn; // (cycle) source of each sequence
    uint32_t* nth; // (cycle) how many of that source come before it in the cycle
} DataSources;

enum { SOURCES_MAX_ = 64 };

// ---- the list ----

typedef struct {
    char* text;
    const char* names[SOURCES_MAX_];
    uint64_t weights[SOURCES_MAX_];
    int count;
} SourceList;

// Splits a list into names, each with its weight in millionths. The caller frees list->text.
void mixture_read_list(SourceList* list, const char* text);

// Returns what the list names, tokens or text. Opens nothing.
TokensKind mixture_kind(const char* text);

// ---- opening ----

void mixture_open_files(DataSources* sources, const char* text, TokensFormat format, int vocab_size);

// Renames the sources after another list of the same length: the text that was encoded.
void mixture_rename(DataSources* sources, const char* text);

// Opens one source of tokens that the caller keeps.
void mixture_open_memory(DataSources* sources, const uint16_t* tokens, size_t count, int vocab_size,
                         const char* name);

// Takes the validation data from the end of each source, which is not packed yet
// (tokens_split_tail). Close `tail` first.
void mixture_split_tail(DataSources* sources, DataSources* tail, int T);

// Makes the rows of all sources (rows_open). `sources` must not move from now on.
void mixture_pack(DataSources* sources, Packing pack, int T, int eot, DocumentMask mask);

void mixture_close(DataSources* sources);

// ---- using ----

// Returns the source of sequence p, and sets *j to how many of that source come before it.
int mixture_find(const DataSources* sources, uint64_t p, uint64_t* j);

// Returns the number of sequences until the first source has given all its rows: one epoch; of a
// mixture, all sequences that are new.
uint64_t mixture_epoch(const DataSources* sources);

// Returns the largest token of all sources.
int mixture_largest_token(const DataSources* sources);

// Prints a line for each source if there are several, or if they are packed. The run has
// `sequences`.
void mixture_print(FILE* file, const DataSources* sources, uint64_t sequences);

#ifdef __cplusplus
}
#endif

#ifdef MIXTURE_IMPLEMENTATION

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/mapped_file.h"
#include "llmc/base/enum_words.h"
#include "llmc/base/xxh64.h"

#define SOURCES_CYCLE_MAX_ ((uint64_t)1 << 20)
#define SOURCES_WEIGHT_DIGITS_ 6 // digits after the decimal point

// ---- the list ----

// Reads "0.7": the weight in millionths; 0 unless it is a positive decimal of at most six digits
// before and six after the point.
static uint64_t mixture_read_weight_(const char* text) {
    const size_t whole = strspn(text, "0123456789");
    const char* fraction = text[whole] == '.' ? text + whole + 1 : "";
    const size_t after = strspn(fraction, "0123456789");
    if (whole > SOURCES_WEIGHT_DIGITS_ || after > SOURCES_WEIGHT_DIGITS_ || fraction[after] ||
        (text[whole] && text[whole] != '.')) {
        return 0;
    }
    uint64_t value = 0;
    for (size_t i = 0; i < whole; i++) {
        value = 10 * value + (uint64_t)(text[i] - '0');
    }
    for (size_t i = 0; i < SOURCES_WEIGHT_DIGITS_; i++) {
        value = 10 * value + (i < after ? (uint64_t)(fraction[i] - '0') : 0);
    }
    return value;
}

// Cuts the weight off an item of the list; 0 if it has none. A suffix that is not a number is part
// of the name.
static uint64_t mixture_take_weight_(char* item) {
    char* colon = strrchr(item, ':');
    const int is_name = colon && colon > item && colon[-1] == '\\'; // A\:5 is a file
    if (!colon || is_name || !colon[1] || colon[1 + strspn(colon + 1, "+-.0123456789eE")]) {
        return 0;
    }
    const uint64_t weight = mixture_read_weight_(colon + 1);
    if (!weight) {
        die_usage("data %s: weight \"%s\"; wanted a positive decimal with at most six digits before and six "
                  "after the point",
                  item, colon + 1);
    }
    *colon = '\0';
    return weight;
}

// Splits a list into names and weights, both of SOURCES_MAX_; the names point into `list`, which is
// modified. Returns their number; a list without weights is one name, its unmodified copy `text`,
// with weight 1.
static int mixture_cut_list_(char* list, const char* text, const char* names[SOURCES_MAX_],
                             uint64_t weights[SOURCES_MAX_]) {
    char *next = list, *item;
    int items = 0, count = 0;
    for (; (item = tokens_next_item(&next)) != NULL; items++) {
        const uint64_t weight = mixture_take_weight_(item);
        if (weight && count == SOURCES_MAX_) {
            die_usage("data \"%s\": more than %d weighted sources", text, SOURCES_MAX_);
        }
        if (weight) {
            names[count] = item;
            weights[count++] = weight;
        }
    }
    if (count && count != items) {
        die_usage("data \"%s\": %d of %d items have a weight; wanted all or none", text, count, items);
    }
    if (count == 0) {
        strcpy(list, text);
        names[0] = list;
        weights[0] = 1;
    }
    return count ? count : 1;
}

void mixture_read_list(SourceList* list, const char* text) {
    list->text = strdup(text);
    CHECK(list->text, "%s: no memory", text);
    list->count = mixture_cut_list_(list->text, text, list->names, list->weights);
}

TokensKind mixture_kind(const char* text) {
    SourceList list;
    mixture_read_list(&list, text);
    const TokensKind kind = tokens_kind(list.names[0]);
    for (int i = 1; i < list.count; i++) {
        CHECK(tokens_kind(list.names[i]) == kind,
              "%s and %s: shards (.bin) and text, wanted one kind of data", list.names[0], list.names[i]);
    }
    free(list.text);
    return kind;
}

// ---- the order ----

// Reduces the shares of the weights to lowest terms.
static void mixture_set_shares_(DataSources* sources, const uint64_t* weights) {
    uint64_t divisor = 0;
    sources->cycle = 0;
    for (int i = 0; i < sources->count; i++) {
        for (uint64_t rest = weights[i]; rest;) { // Euclid
            const uint64_t next = divisor % rest;
            divisor = rest;
            rest = next;
        }
    }
    for (int i = 0; i < sources->count; i++) {
        sources->source[i].share = weights[i] / divisor;
        sources->cycle += sources->source[i].share;
    }
    if (sources->cycle > SOURCES_CYCLE_MAX_) {
        die_usage("the weights of %s and the others repeat after %llu sequences only; wanted at most %llu: "
                  "fewer digits",
                  sources->source[0].name, (unsigned long long)sources->cycle,
                  (unsigned long long)SOURCES_CYCLE_MAX_);
    }
}

// Assigns every sequence of the cycle to a source.
static void mixture_take_turns_(DataSources* sources) {
    const uint64_t cycle = sources->cycle;
    uint64_t given[SOURCES_MAX_] = {0};
    sources->turn = (uint8_t*)check_alloc(cycle, sizeof(uint8_t), "order of the sources");
    sources->nth = (uint32_t*)check_alloc(cycle, sizeof(uint32_t), "order of the sources");
    for (uint64_t n = 0; n < cycle; n++) {
        int soonest = -1;
        uint64_t soonest_end = 0;
        for (int i = 0; i < sources->count; i++) {
            const uint64_t share = sources->source[i].share;
            const uint64_t end =
                ((given[i] + 1) * cycle + share - 1) / share; // its next turn must come before this
            if (given[i] * cycle < (n + 1) * share && (soonest < 0 || end < soonest_end)) {
                soonest = i;
                soonest_end = end;
            }
        }
        assert(soonest >= 0 && soonest_end > n);
        sources->turn[n] = (uint8_t)soonest;
        sources->nth[n] = (uint32_t)given[soonest]++;
    }
}

// ---- opening ----

// Allocates `count` sources of these names.
static void mixture_open_(DataSources* sources, const char* const* names, int count) {
    memset(sources, 0, sizeof(*sources));
    sources->count = count;
    sources->source = (DataSource*)check_alloc((size_t)count, sizeof(DataSource), "data");
    for (int i = 0; i < count; i++) {
        sources->source[i].name = strdup(names[i]);
        CHECK(sources->source[i].name, "%s: no memory", names[i]);
    }
}

void mixture_open_files(DataSources* sources, const char* text, TokensFormat format, int vocab_size) {
    SourceList list;
    mixture_read_list(&list, text);
    mixture_open_(sources, list.names, list.count);
    mixture_set_shares_(sources, list.weights);
    mixture_take_turns_(sources);
    for (int i = 0; i < list.count; i++) {
        DataSource* source = &sources->source[i];
        tokens_open_files(&source->stream, source->name, format, vocab_size);
        sources->tokens += source->stream.count;
        const uint64_t sums[2] = {sources->fingerprint, source->stream.fingerprint};
        sources->fingerprint = xxh64(sums, sizeof(sums));
    }
    free(list.text);
}

void mixture_rename(DataSources* sources, const char* text) {
    SourceList list;
    mixture_read_list(&list, text);
    assert(list.count == sources->count);
    for (int i = 0; i < list.count; i++) {
        DataSource* source = &sources->source[i];
        free(source->name);
        source->name = strdup(list.names[i]);
        CHECK(source->name, "%s: no memory", list.names[i]);
        source->stream.name = source->name;
    }
    free(list.text);
}

void mixture_open_memory(DataSources* sources, const uint16_t* tokens, size_t count, int vocab_size,
                         const char* name) {
    const uint64_t weight = 1;
    mixture_open_(sources, &name, 1);
    mixture_set_shares_(sources, &weight);
    mixture_take_turns_(sources);
    tokens_open_memory(&sources->source[0].stream, tokens, count, vocab_size, sources->source[0].name);
    sources->tokens = count;
}

void mixture_split_tail(DataSources* sources, DataSources* tail, int T) {
    const char* names[SOURCES_MAX_] = {NULL};
    uint64_t shares[SOURCES_MAX_] = {0};
    for (int i = 0; i < sources->count; i++) {
        names[i] = sources->source[i].name;
        shares[i] = sources->source[i].share;
    }
    mixture_open_(tail, names, sources->count);
    mixture_set_shares_(tail, shares);
    mixture_take_turns_(tail);
    for (int i = 0; i < sources->count; i++) {
        tokens_split_tail(&sources->source[i].stream, &tail->source[i].stream, T);
        tail->tokens += tail->source[i].stream.count;
        tail->source[i].stream.name = tail->source[i].name;
    }
    sources->tokens -= tail->tokens;
    tail->fingerprint = sources->fingerprint;
}

// Rows being made, for mapped_try.
typedef struct {
    const DataSources* sources;
    DataSource* source;
    int eot;
} SourcePacking_;

static void mixture_pack_one_(void* packing_) {
    SourcePacking_* p = (SourcePacking_*)packing_;
    rows_open(&p->source->rows, &p->source->stream, p->sources->pack, p->sources->T, p->eot,
              p->sources->mask);
}

void mixture_pack(DataSources* sources, Packing pack, int T, int eot, DocumentMask mask) {
    sources->pack = pack;
    sources->T = T;
    sources->mask = mask;
    for (int i = 0; i < sources->count; i++) {
        SourcePacking_ packing = {sources, &sources->source[i], eot};
        char error[ERROR_BYTES];
        const void* where;
        const MappedResult result = mapped_try(mixture_pack_one_, &packing, &where);
        if (result != MAPPED_READ) {
            tokens_describe(&packing.source->stream, result, where, error);
            CHECK(0, "%s", error);
        }
    }
}

void mixture_close(DataSources* sources) {
    for (int i = 0; i < sources->count; i++) {
        rows_close(&sources->source[i].rows);
        tokens_close(&sources->source[i].stream);
        free(sources->source[i].name);
    }
    free(sources->nth);
    free(sources->turn);
    free(sources->source);
    memset(sources, 0, sizeof(*sources));
}

// ---- using ----

int mixture_find(const DataSources* sources, uint64_t p, uint64_t* j) {
    const uint64_t at = p % sources->cycle;
    const int s = sources->turn[at];
    *j = p / sources->cycle * sources->source[s].share + sources->nth[at];
    return s;
}

// Counts the sequences of source s among the first n.
static uint64_t mixture_given_(const DataSources* sources, int s, uint64_t n) {
    uint64_t given = n / sources->cycle * sources->source[s].share;
    for (uint64_t at = 0; at < n % sources->cycle; at++) {
        given += sources->turn[at] == s;
    }
    return given;
}

int mixture_largest_token(const DataSources* sources) {
    uint32_t largest = 0;
    for (int s = 0; s < sources->count; s++) {
        const uint32_t token = sources->source[s].stream.largest;
        largest = token > largest ? token : largest;
    }
    return (int)largest;
}

uint64_t mixture_epoch(const DataSources* sources) {
    uint64_t epoch = UINT64_MAX;
    for (int s = 0; s < sources->count; s++) {
        const uint64_t share = sources->source[s].share, rows = sources->source[s].rows.count;
        uint64_t at = 0; // place in the cycle of the first turn for which it has no row
        while (sources->turn[at] != s || sources->nth[at] != rows % share) {
            at++;
        }
        const uint64_t until = rows / share * sources->cycle + at;
        epoch = until < epoch ? until : epoch;
    }
    return epoch;
}

// Describes the rows of a source.
static void mixture_print_rows_(FILE* file, const Rows* rows) {
    static const char* const pack_name[] = {PACKING_WORDS(WORDS_NAME)};
    const double tokens = (double)rows->tokens, room = (double)rows->count * rows->T;
    fprintf(file, "; %zu document%s, packed (%s) into %llu row%s, %.2f %% discarded", rows->documents.count,
            words_s((double)rows->documents.count), pack_name[rows->pack], (unsigned long long)rows->count,
            words_s((double)rows->count), 100 * (1 - tokens / (double)rows->stream->count));
    if (rows->pack == PACK_BESTFIT || rows->pack == PACK_PAD) {
        fprintf(file, ", %.2f %% padding", 100 * (1 - tokens / room));
    }
}

void mixture_print(FILE* file, const DataSources* sources, uint64_t sequences) {
    for (int s = 0; s < sources->count && (sources->count > 1 || sources->pack != PACK_STREAM); s++) {
        const DataSource* source = &sources->source[s];
        fprintf(file, "source %s: %zu tokens, weight %.6g, %.4g epochs", source->name, source->stream.count,
                (double)source->share / (double)sources->cycle,
                (double)mixture_given_(sources, s, sequences) / (double)source->rows.count);
        if (sources->pack != PACK_STREAM) {
            mixture_print_rows_(file, &source->rows);
        }
        fputc('\n', file);
    }
}

#endif // MIXTURE_IMPLEMENTATION

#endif
