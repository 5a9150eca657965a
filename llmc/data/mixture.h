/*
mixture.h -- the data of a run: one source of rows, or several, mixed by weight.

A list names files and patterns, separated by commas. Without names and weights they are one source.
With weights (A*.bin:0.7,B*.bin:0.3; positive decimals, scaled to a sum of 1) each item is a source
of its own, called by its pattern, or by a name of its own (web=A*.bin:0.7). Sources with names may
have no weights: then a schedule has them (data_schedule.h), and they may change during the run.

Sequence p of the run is row j of source s (source_order.h), counted over that source's epochs.

A checkpoint keeps how many rows each source has given, even one no longer used (MixtureState). A
run that resumes with the same weights continues its stretch, with the same bits. Other weights, new
and fewer sources start a new stretch: each source continues after its last row, even if it was
away for a while. A source is known by its name, or under a new name by its contents.
*/
#ifndef LLMC_MIXTURE_H
#define LLMC_MIXTURE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/data/data_schedule.h"
#include "llmc/data/fill_in_middle.h"
#include "llmc/data/packing.h"
#include "llmc/data/source_order.h"
#include "llmc/data/token_files.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char* name;    // given by the user, or the pattern; owned
    char* pattern; // of its files; owned
    TokenStream stream;
    Rows rows;  // set by mixture_pack
    int number; // key of the order of its rows, which a source keeps as long as the run lives
} DataSource;

// A place in a run: the updates, tokens and sequences before it.
typedef struct {
    int64_t step, tokens, sequence;
} DataPlace;

// A source in a checkpoint.
typedef struct {
    const char* name;
    uint64_t fingerprint; // checksum of its contents; 0 for memory
    int64_t tokens, number;
    int64_t given; // sequences that it has given so far
    int64_t share; // its weight in the stretch of the next sequence, in lowest terms
} SourceState;

// The mixture in a checkpoint.
typedef struct {
    SourceState* source; // (count) all sources that the run has had
    int count;
    int64_t first; // first sequence of the stretch of the next sequence
    DataPlace from;
} MixtureState;

typedef struct {
    DataSource* source; // (count)
    int count;
    int is_named;         // the user has named them
    size_t tokens;        // of all sources
    uint64_t fingerprint; // checksum of the contents of all files in order; 0 for memory
    FillInMiddle fim;     // of all sources; set before mixture_pack
    Packing pack;         // set by mixture_pack, like the next two
    int T;
    DocumentMask mask;
    DataSchedule schedule;
    DataPlace from; // where the lines of the schedule count from
    SourceOrder order;
    SourceState* past; // (num_past) earlier sources of the run; their names are the checkpoint's
    int num_past;
} DataSources;

enum { SOURCES_EVER = 1024 }; // most sources that a run ever has

// ---- the list ----

typedef struct {
    char* text;
    const char* names[SOURCES_MAX]; // given by the user, or the patterns
    const char* patterns[SOURCES_MAX];
    uint64_t weights[SOURCES_MAX];
    int count;
    int is_named, is_weighted; // all items have names, weights
} SourceList;

// Splits a list into items, each with its weight in millionths, or 1. The caller frees list->text.
void mixture_read_list(SourceList* list, const char* text);

// Returns the number of sources in a list, and true if it has their weights.
int mixture_count(const char* text);
int mixture_has_weights(const char* text);

// Returns what the list names, tokens or text. Opens nothing.
TokensKind mixture_kind(const char* text);

// Adds the files of all sources of a list, and those that belong to them.
void mixture_list_files(FileList* files, const char* option, const char* text);

// ---- opening ----

void mixture_open_files(DataSources* sources, const char* text, TokensFormat format, int vocab_size);

// Calls the sources and their files as another list of the same length: the text that was encoded.
void mixture_rename(DataSources* sources, const char* text);

// Opens one source of tokens that the caller keeps.
void mixture_open_memory(DataSources* sources, const uint16_t* tokens, size_t count, int vocab_size,
                         const char* name);

// Takes the validation data from the end of each source, which is not packed yet
// (tokens_split_tail). Close `tail` first.
void mixture_split_tail(DataSources* sources, DataSources* tail, int T, int eot);

// Makes the rows of all sources (rows_open). `sources` must not move from now on.
void mixture_pack(DataSources* sources, Packing pack, int T, int eot, DocumentMask mask);

void mixture_close(DataSources* sources);

// Opens source s of others, which are packed, as a source alone. They must outlive it.
void mixture_open_view(DataSources* view, const DataSources* sources, int s);
void mixture_close_view(DataSources* view);

// ---- the order ----

// Sets the schedule of a new run, whose lines have their first sequences, and owns it.
void mixture_set_schedule(DataSources* sources, DataSchedule schedule);

// Orders all sources from their start and from sequence 0 on, after lines of the schedule moved.
void mixture_restart(DataSources* sources);

// Returns a checksum of the order and of the schedule.
uint64_t mixture_checksum(const DataSources* sources);

typedef enum { SOURCE_NEW, SOURCE_CONTINUES, SOURCE_CHANGED } SourceFate;

// The sources as they were in a checkpoint.
typedef struct {
    int before[SOURCES_MAX]; // index of each source there; -1: none
    SourceFate fate[SOURCES_MAX];
} SourceMatch;

// Finds the sources in a checkpoint. SOURCE_CHANGED: the same name, with other contents.
SourceMatch mixture_match(const DataSources* sources, const MixtureState* saved);

// Continues at sequence p of the run after `saved`, whose numbers and names must outlive `sources`.
// A source that has changed starts over. Returns true if the stretch of the checkpoint continues.
int mixture_continue(DataSources* sources, const MixtureState* saved, uint64_t p);

// Returns the mixture as a checkpoint before sequence p keeps it; without data, no sources. The
// caller frees its sources.
MixtureState mixture_state(const DataSources* sources, uint64_t p);

// ---- using ----

// Returns the source of sequence p, and sets *j to how many of that source come before it.
static inline int mixture_find(const DataSources* sources, uint64_t p, uint64_t* j) {
    return source_order_find(&sources->order, p, j);
}

// Returns the number of sequences until the first source has given all its rows: one epoch; of a
// mixture, all sequences that are new.
uint64_t mixture_epoch(const DataSources* sources);

// True if a source has targets that do not count.
int mixture_has_mask(const DataSources* sources);

// Returns the largest token of all sources.
int mixture_largest_token(const DataSources* sources);

// Amounts that a source has given before some sequence.
typedef struct {
    double share, tokens, epochs; // share of the sequences so far
} SourceUse;

// Sets what each source has given before sequence p.
void mixture_use(SourceUse use[SOURCES_MAX], const DataSources* sources, uint64_t p);

// Prints a line for each source if there are several, or if they are packed, and the schedule. The
// run ends before sequence `end`.
void mixture_print(FILE* file, const DataSources* sources, uint64_t end);

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
#include "llmc/base/number_text.h"
#include "llmc/base/xxh64.h"

#define SOURCES_WEIGHT_DIGITS_ 6 // digits before the decimal point

// ---- the list ----

// Cuts the weight off an item of the list; 0 if it has none. A suffix that is not a number is part
// of the name.
static uint64_t mixture_take_weight_(char* item) {
    char* colon = strrchr(item, ':');
    const int is_name = colon && colon > item && colon[-1] == '\\'; // A\:5 is a file
    if (!colon || is_name || !colon[1] || colon[1 + strspn(colon + 1, "+-.0123456789eE")]) {
        return 0;
    }
    uint64_t weight;
    if (!number_read_millionths(&weight, colon + 1, SOURCES_WEIGHT_DIGITS_) || !weight) {
        die_usage("data %s: weight \"%s\"; wanted a positive decimal with at most six digits before and six "
                  "after the point",
                  item, colon + 1);
    }
    *colon = '\0';
    return weight;
}

// Cuts NAME= off an item; NULL if it has none.
static const char* mixture_take_name_(char** item) {
    static const char legal[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    char *name = *item, *equals = name + strspn(name, legal);
    if (*equals != '=' || equals == name) {
        return NULL;
    }
    *equals = '\0';
    *item = equals + 1;
    if (!**item || strcmp(name, "ramp") == 0 || strcmp(name, "tokens") == 0) {
        die_usage("data %s=%s: wanted NAME=FILES, with a name other than \"ramp\" and \"tokens\"", name,
                  *item);
    }
    return name;
}

// Returns true if all items have what `have` of them have. Refuses a list where only some do.
static int mixture_all_have_(const char* text, int have, int items, const char* what) {
    if (have && have != items) {
        die_usage("data \"%s\": %d of %d items have a %s; wanted all or none", text, have, items, what);
    }
    return have > 0;
}

// Refuses two sources of one name.
static void mixture_check_names_(const SourceList* list, const char* text) {
    for (int i = 0; i < list->count && list->is_named; i++) {
        for (int k = 0; k < i; k++) {
            if (strcmp(list->names[i], list->names[k]) == 0) {
                die_usage("data \"%s\": two sources are called %s", text, list->names[i]);
            }
        }
    }
}

// Adds an item as a source, unless it has neither a name nor a weight.
static void mixture_read_item_(SourceList* list, const char* text, char* item) {
    const uint64_t weight = mixture_take_weight_(item);
    const char* name = mixture_take_name_(&item);
    if (!weight && !name) {
        return;
    }
    if (list->count == SOURCES_MAX) {
        die_usage("data \"%s\": more than %d sources", text, SOURCES_MAX);
    }
    list->is_weighted += weight > 0;
    list->is_named += name != NULL;
    list->patterns[list->count] = item;
    list->names[list->count] = name ? name : item;
    list->weights[list->count++] = weight ? weight : 1;
}

void mixture_read_list(SourceList* list, const char* text) {
    char *next, *item;
    int items = 0;
    memset(list, 0, sizeof(*list));
    list->text = next = strdup(text);
    CHECK(list->text, "%s: no memory", text);
    for (; (item = tokens_next_item(&next)) != NULL; items++) {
        mixture_read_item_(list, text, item);
    }
    list->is_weighted = mixture_all_have_(text, list->is_weighted, items, "weight");
    list->is_named = mixture_all_have_(text, list->is_named, items, "name");
    mixture_check_names_(list, text);
    if (list->count == 0) {
        strcpy(list->text, text);
        list->names[0] = list->patterns[0] = list->text;
        list->weights[0] = list->count = 1;
    }
}

int mixture_count(const char* text) {
    SourceList list;
    mixture_read_list(&list, text);
    free(list.text);
    return list.count;
}

int mixture_has_weights(const char* text) {
    SourceList list;
    mixture_read_list(&list, text);
    free(list.text);
    return list.is_weighted;
}

TokensKind mixture_kind(const char* text) {
    SourceList list;
    mixture_read_list(&list, text);
    const TokensKind kind = tokens_kind(list.patterns[0]);
    for (int i = 1; i < list.count; i++) {
        CHECK(tokens_kind(list.patterns[i]) == kind,
              "%s and %s: shards (.bin) and text, wanted one kind of data", list.patterns[0],
              list.patterns[i]);
    }
    free(list.text);
    return kind;
}

void mixture_list_files(FileList* files, const char* option, const char* text) {
    SourceList list;
    mixture_read_list(&list, text);
    for (int i = 0; i < list.count; i++) {
        tokens_list_files(files, option, list.patterns[i]);
    }
    free(list.text);
}

// ---- the order ----

// Lays the pieces of the schedule from sequence p on.
static void mixture_lay_(DataSources* sources, const SchedulePiece* pieces, size_t count, uint64_t p) {
    for (size_t i = 0; i < count; i++) {
        if (pieces[i].end > (int64_t)p) {
            const uint64_t first = pieces[i].first > (int64_t)p ? (uint64_t)pieces[i].first : p;
            source_order_add(&sources->order, first, pieces[i].weights);
        }
    }
}

void mixture_restart(DataSources* sources) {
    size_t count;
    SchedulePiece* pieces = data_schedule_cut(&sources->schedule, &count);
    source_order_close(&sources->order);
    source_order_open(&sources->order, sources->count);
    mixture_lay_(sources, pieces, count, 0);
    free(pieces);
}

void mixture_set_schedule(DataSources* sources, DataSchedule schedule) {
    data_schedule_close(&sources->schedule);
    sources->schedule = schedule;
    mixture_restart(sources);
}

// Sets weights that do not change.
static void mixture_set_weights_(DataSources* sources, const uint64_t* weights) {
    uint64_t lowest[SOURCES_MAX];
    memcpy(lowest, weights, (size_t)sources->count * sizeof(*weights));
    const uint64_t cycle = source_order_reduce(lowest, sources->count);
    if (cycle > SOURCES_CYCLE_MAX) {
        die_usage("the weights of %s and the others repeat after %llu sequences only; wanted at most %llu: "
                  "fewer digits",
                  sources->source[0].name, (unsigned long long)cycle, (unsigned long long)SOURCES_CYCLE_MAX);
    }
    mixture_set_schedule(sources, data_schedule_constant(lowest, sources->count));
}

uint64_t mixture_checksum(const DataSources* sources) {
    Xxh64 hash;
    xxh64_open(&hash);
    for (int s = 0; s < sources->count; s++) {
        xxh64_add(&hash, &sources->source[s].number, sizeof(int));
    }
    for (size_t i = 0; i < sources->order.count; i++) {
        const Stretch* stretch = &sources->order.stretch[i];
        xxh64_add(&hash, &stretch->first, sizeof(stretch->first));
        xxh64_add(&hash, stretch->share, sizeof(stretch->share));
        xxh64_add(&hash, stretch->base, sizeof(stretch->base));
    }
    return xxh64_value(&hash);
}

// ---- checkpoints ----

// Returns true if a source has the contents that it had. A run of other length has more or fewer
// tokens in memory.
static int mixture_is_same_(const DataSource* source, const SourceState* saved) {
    const uint64_t now = source->stream.fingerprint;
    const int64_t tokens = (int64_t)source->stream.count;
    return now == saved->fingerprint && (tokens == saved->tokens || (!now && tokens > saved->tokens));
}

// Finds a source in a checkpoint by its name or its contents; -1 if absent or already taken.
static int mixture_find_before_(const DataSource* source, const MixtureState* saved, const char* taken,
                                int by_name) {
    for (int i = 0; i < saved->count; i++) {
        const SourceState* before = &saved->source[i];
        const int is_it = by_name ? strcmp(source->name, before->name) == 0
                                  : before->fingerprint && mixture_is_same_(source, before);
        if (is_it && !taken[i]) {
            return i;
        }
    }
    return -1;
}

SourceMatch mixture_match(const DataSources* sources, const MixtureState* saved) {
    SourceMatch match;
    char taken[SOURCES_EVER] = {0};
    for (int s = 0; s < sources->count; s++) {
        match.before[s] = -1;
    }
    for (int by_name = 1; by_name >= 0; by_name--) {
        for (int s = 0; s < sources->count; s++) {
            const DataSource* source = &sources->source[s];
            const int i = match.before[s] < 0 ? mixture_find_before_(source, saved, taken, by_name) : -1;
            if (i >= 0) {
                match.before[s] = i;
                taken[i] = 1;
            }
        }
    }
    for (int s = 0; s < sources->count; s++) {
        const int i = match.before[s];
        match.fate[s] = i < 0                                                      ? SOURCE_NEW
                        : mixture_is_same_(&sources->source[s], &saved->source[i]) ? SOURCE_CONTINUES
                                                                                   : SOURCE_CHANGED;
    }
    return match;
}

// Gives each source the number it had, or the next one, and keeps the sources that are not used.
static void mixture_take_over_(DataSources* sources, const MixtureState* saved, const SourceMatch* match) {
    char taken[SOURCES_EVER] = {0};
    int next = 0;
    sources->past = (SourceState*)check_alloc((size_t)saved->count, sizeof(SourceState), "sources");
    sources->num_past = 0;
    for (int i = 0; i < saved->count; i++) {
        next = saved->source[i].number >= next ? (int)saved->source[i].number + 1 : next;
    }
    for (int s = 0; s < sources->count; s++) {
        const int i = match->before[s];
        sources->source[s].number = i < 0 ? next++ : (int)saved->source[i].number;
        if (i >= 0) {
            taken[i] = 1;
        }
    }
    for (int i = 0; i < saved->count; i++) {
        if (!taken[i]) {
            sources->past[sources->num_past] = saved->source[i];
            sources->past[sources->num_past++].share = 0;
        }
    }
    CHECK(sources->count + sources->num_past <= SOURCES_EVER, "the run has had more than %d sources",
          SOURCES_EVER);
}

// Returns true if a checkpoint has the weights of `piece`.
static int mixture_keeps_weights_(const DataSources* sources, const MixtureState* saved,
                                  const SourceMatch* match, const SchedulePiece* piece) {
    int64_t left = 0; // of the shares in the checkpoint
    for (int i = 0; i < saved->count; i++) {
        left += saved->source[i].share;
    }
    for (int s = 0; s < sources->count; s++) {
        const int64_t before = match->before[s] < 0 ? 0 : saved->source[match->before[s]].share;
        if (match->fate[s] == SOURCE_CHANGED || before != (int64_t)piece->weights[s]) {
            return 0;
        }
        left -= before;
    }
    return left == 0;
}

// Lays the stretch of sequence p as it was in the checkpoint, or a new one from p on.
static void mixture_lay_first_(DataSources* sources, const SchedulePiece* piece, uint64_t first, uint64_t p,
                               const uint64_t* given) {
    uint64_t since[SOURCES_MAX], base[SOURCES_MAX];
    source_order_add(&sources->order, first, piece->weights);
    source_order_given(&sources->order, p, since);
    for (int s = 0; s < sources->count; s++) {
        base[s] = given[s] - since[s];
    }
    source_order_start(&sources->order, base);
}

int mixture_continue(DataSources* sources, const MixtureState* saved, uint64_t p) {
    const SourceMatch match = mixture_match(sources, saved);
    uint64_t given[SOURCES_MAX] = {0};
    size_t count, now = 0;
    mixture_take_over_(sources, saved, &match);
    for (int s = 0; s < sources->count; s++) {
        given[s] = match.fate[s] == SOURCE_CONTINUES ? (uint64_t)saved->source[match.before[s]].given : 0;
    }
    SchedulePiece* pieces = data_schedule_cut(&sources->schedule, &count);
    while (pieces[now].end <= (int64_t)p) {
        now++;
    }
    const int keeps = mixture_keeps_weights_(sources, saved, &match, &pieces[now]);
    source_order_close(&sources->order);
    source_order_open(&sources->order, sources->count);
    mixture_lay_first_(sources, &pieces[now], keeps ? (uint64_t)saved->first : p, p, given);
    mixture_lay_(sources, pieces, count, p);
    free(pieces);
    return keeps;
}

MixtureState mixture_state(const DataSources* sources, uint64_t p) {
    if (sources->count == 0) {
        return (MixtureState){.count = 0};
    }
    const Stretch* stretch = source_order_at(&sources->order, p);
    const int all = sources->count + sources->num_past;
    uint64_t given[SOURCES_MAX];
    MixtureState state = {(SourceState*)check_alloc((size_t)all, sizeof(SourceState), "sources"), all,
                          (int64_t)stretch->first, sources->from};
    source_order_given(&sources->order, p, given);
    for (int s = 0; s < sources->count; s++) {
        const DataSource* source = &sources->source[s];
        const SourceState now = {source->name,   source->stream.fingerprint, (int64_t)source->stream.count,
                                 source->number, (int64_t)given[s],          (int64_t)stretch->share[s]};
        state.source[s] = now;
    }
    for (int i = 0; i < sources->num_past; i++) {
        state.source[sources->count + i] = sources->past[i];
    }
    return state;
}

// ---- opening ----

// Sets the name and the pattern of a source.
static void mixture_call_(DataSource* source, const char* name, const char* pattern) {
    free(source->name);
    free(source->pattern);
    source->name = strdup(name);
    source->pattern = strdup(pattern);
    CHECK(source->name && source->pattern, "%s: no memory", pattern);
    source->stream.name = source->pattern;
}

// Allocates the sources of a list.
static void mixture_open_(DataSources* sources, const SourceList* list) {
    memset(sources, 0, sizeof(*sources));
    sources->count = list->count;
    sources->is_named = list->is_named;
    sources->source = (DataSource*)check_alloc((size_t)list->count, sizeof(DataSource), "data");
    for (int s = 0; s < list->count; s++) {
        mixture_call_(&sources->source[s], list->names[s], list->patterns[s]);
        sources->source[s].number = s;
    }
    mixture_set_weights_(sources, list->weights);
}

void mixture_open_files(DataSources* sources, const char* text, TokensFormat format, int vocab_size) {
    SourceList list;
    mixture_read_list(&list, text);
    mixture_open_(sources, &list);
    for (int i = 0; i < list.count; i++) {
        DataSource* source = &sources->source[i];
        tokens_open_files(&source->stream, source->pattern, format, vocab_size);
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
    sources->is_named = list.is_named;
    for (int i = 0; i < list.count; i++) {
        mixture_call_(&sources->source[i], list.names[i], list.patterns[i]);
    }
    free(list.text);
}

void mixture_open_memory(DataSources* sources, const uint16_t* tokens, size_t count, int vocab_size,
                         const char* name) {
    const SourceList list = {.names = {name}, .patterns = {name}, .weights = {1}, .count = 1};
    mixture_open_(sources, &list);
    tokens_open_memory(&sources->source[0].stream, tokens, count, vocab_size, sources->source[0].pattern);
    sources->tokens = count;
}

void mixture_split_tail(DataSources* sources, DataSources* tail, int T, int eot) {
    SourceList list = {.count = sources->count, .is_named = sources->is_named};
    for (int s = 0; s < sources->count; s++) {
        list.names[s] = sources->source[s].name;
        list.patterns[s] = sources->source[s].pattern;
        list.weights[s] = sources->schedule.line[0].weights[s];
    }
    mixture_open_(tail, &list);
    for (int s = 0; s < sources->count; s++) {
        tokens_split_tail(&sources->source[s].stream, &tail->source[s].stream, T, eot);
        tail->tokens += tail->source[s].stream.count;
        tail->source[s].stream.name = tail->source[s].pattern;
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
    rows_open(&p->source->rows, &p->source->stream, p->sources->pack, p->sources->T, p->eot, p->sources->mask,
              &p->sources->fim);
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
        free(sources->source[i].pattern);
        free(sources->source[i].name);
    }
    free(sources->past);
    source_order_close(&sources->order);
    data_schedule_close(&sources->schedule);
    free(sources->source);
    memset(sources, 0, sizeof(*sources));
}

void mixture_open_view(DataSources* view, const DataSources* sources, int s) {
    const uint64_t weight = 1;
    memset(view, 0, sizeof(*view));
    view->source = &sources->source[s];
    view->count = 1;
    view->is_named = sources->is_named;
    view->tokens = view->source->stream.count;
    view->fingerprint = view->source->stream.fingerprint;
    view->pack = sources->pack;
    view->T = sources->T;
    view->mask = sources->mask;
    mixture_set_weights_(view, &weight);
}

void mixture_close_view(DataSources* view) {
    source_order_close(&view->order);
    data_schedule_close(&view->schedule);
}

// ---- using ----

int mixture_has_mask(const DataSources* sources) {
    int has_mask = 0;
    for (int s = 0; s < sources->count; s++) {
        has_mask |= tokens_have_mask(&sources->source[s].stream);
    }
    return has_mask;
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
        const uint64_t until = source_order_reach(&sources->order, s, sources->source[s].rows.count);
        epoch = until < epoch ? until : epoch;
    }
    return epoch;
}

void mixture_use(SourceUse use[SOURCES_MAX], const DataSources* sources, uint64_t p) {
    uint64_t given[SOURCES_MAX];
    double all = 0;
    source_order_given(&sources->order, p, given);
    for (int s = 0; s < sources->count; s++) {
        all += (double)given[s];
    }
    for (int i = 0; i < sources->num_past; i++) {
        all += (double)sources->past[i].given;
    }
    for (int s = 0; s < sources->count; s++) {
        const Rows* rows = &sources->source[s].rows;
        const double epochs = (double)given[s] / (double)rows->count;
        const SourceUse one = {all > 0 ? (double)given[s] / all : 0, epochs * (double)rows->tokens, epochs};
        use[s] = one;
    }
}

// Describes the rows of a source.
static void mixture_print_rows_(FILE* file, const Rows* rows) {
    static const char* const pack_name[] = {PACKING_WORDS(WORDS_NAME)};
    const double tokens = (double)rows->tokens, marks = (double)rows->marks,
                 room = (double)rows->count * rows->T;
    fprintf(file, "; %zu document%s, packed (%s) into %llu row%s, %.2f %% discarded", rows->documents.count,
            words_s((double)rows->documents.count), pack_name[rows->pack], (unsigned long long)rows->count,
            words_s((double)rows->count), 100 * (1 - tokens / (double)rows->stream->count));
    if (rows->pack == PACK_BESTFIT || rows->pack == PACK_PAD) {
        fprintf(file, ", %.2f %% padding", 100 * (1 - (tokens + marks) / room));
    }
    if (rows->fim.rate > 0) {
        fprintf(file, ", %.0f pieces rearranged", marks / FIM_MARKS);
    }
}

// Describes the answers of a source that has them, and what --seq-len takes from them.
static void mixture_print_answers_(FILE* file, const Rows* rows) {
    const double hidden = (double)rows->hidden_pieces, cut = (double)rows_count_cut(rows);
    fprintf(file, "; %.2f %% of the tokens are answers", 100 * (double)rows->targets / (double)rows->tokens);
    if (cut > 0) {
        fprintf(file, "; %.0f document%s longer than --seq-len %d and cut", cut, cut == 1 ? " is" : "s are",
                rows->T);
    }
    if (hidden > 0) {
        fprintf(file, "; %.0f piece%s without an answer %s dropped", hidden, words_s(hidden),
                hidden == 1 ? "is" : "are");
    }
}

// Prints the lines of the schedule.
static void mixture_print_schedule_(FILE* file, const DataSources* sources) {
    const char* names[SOURCES_MAX];
    for (int s = 0; s < sources->count; s++) {
        names[s] = sources->source[s].name;
    }
    data_schedule_print(file, &sources->schedule, names);
}

void mixture_print(FILE* file, const DataSources* sources, uint64_t end) {
    const Stretch* now = &sources->order.stretch[0];
    const int changes = sources->schedule.path != NULL,
              are_packed = sources->pack != PACK_STREAM || sources->fim.rate > 0;
    SourceUse use[SOURCES_MAX];
    mixture_use(use, sources, end > now->first ? end : now->first);
    for (int s = 0; s < sources->count; s++) {
        const DataSource* source = &sources->source[s];
        if (sources->count == 1 && !are_packed && !source->rows.has_mask) {
            continue;
        }
        fprintf(file, "source %s: %zu tokens, %s %.6g, %.4g epochs", source->name, source->stream.count,
                changes ? "share of the run" : "weight",
                changes ? use[s].share : (double)now->share[s] / (double)now->cycle, use[s].epochs);
        if (are_packed) {
            mixture_print_rows_(file, &source->rows);
        }
        if (source->rows.has_mask) {
            mixture_print_answers_(file, &source->rows);
        }
        fputc('\n', file);
    }
    if (changes) {
        mixture_print_schedule_(file, sources);
    }
}

#endif // MIXTURE_IMPLEMENTATION

#endif
