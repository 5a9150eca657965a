/*
dataloader.h -- the order in which a run reads its rows, and the batches made of them, ahead of
time.

The sequences of a run are p = 0, 1, 2, ... Sequence p is row j of a source (mixture.h), counted
over the source's epochs of S rows. With e = j / S and i = j mod S it is

    row i                              in order
    row permute_e(i)                   shuffled, by one bijection per epoch
    row permute_e(i / G) G + i mod G   shuffled, PACK_UNIFORM: groups of G rows of about the same
                                       length stay together; a last, short group ends the epoch

Any p is found in O(1), so a run can resume anywhere. A step takes the next S sequences, in
micro-batches of B, the last one maybe smaller; micro-batch k belongs to rank k mod n in micro-step
k div n. In the last micro-step some ranks may have none: a batch of no sequences. So the sequences
of a step depend on neither B nor n.

A batch is T tokens wide. With PACK_DYNAMIC and PACK_UNIFORM, T is the length of its longest row,
rounded up to a multiple of 8; with the others, the T that the rows were made for.

dataloader_resize cuts the rows of the next steps into shorter sequences: a batch (B, T) becomes
(B T / length, length), with the same tokens in the same places. If a cut divides a document, its
second part counts as a new document. Batches that are no wider than a sequence are not cut.

If several ranks divide each sequence (token_chunks.h), a batch has this rank's tokens, but `starts`
and `lengths` of all.

Tokens and targets of a whole step are counted before its first batch, from the tables of the rows,
so every rank knows them (counts_updates).

A thread fills the next batches while the caller works on one. `wait_s` is the time the caller
waited for it.

If a file changes during the run, so that it becomes shorter or has a token that is not below V, the
batch that hit it and all later ones have zeros for tokens, and dataloader_error has the reason.
*/
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/base/check.h"
#include "llmc/base/sizes.h"
#include "llmc/base/token_chunks.h"
#include "llmc/data/mixture.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { SHUFFLE_OFF, SHUFFLE_ON } Shuffle;

// Owned by the loader; valid until its next batch or seek, or longer (DataloaderSettings).
typedef struct {
    const int *inputs, *targets; // (B, T); targets of -1 are ignored
    // (B, W), of whole sequences: start of each token's document in its sequence; or NULL
    const int* starts;
    int B, T;
    int counted;        // number of targets that are not -1
    TokenChunks chunks; // the rank's T tokens of each sequence of W
    const int* lengths; // (B) tokens of each whole sequence, the rest is padding; NULL: W
    const int* sources; // (B) source of each sequence (mixture.h); NULL: all have one
    // (sources) how many of `counted` each has, on the host
    const int* counted_of_source;
    RowCounts update; // of the whole step, the same on all ranks; zeros if they are not counted
    int64_t first;    // number of its first row in the step
    int pieces;       // sequences that each row is cut into
    uint64_t random;  // key of the step's dropout in training (dropout.h); else 0
} Batch;

// Returns W, the length of the sequences of a batch.
static inline int batch_length(Batch batch) { return token_chunks_length(batch.chunks, batch.T); }

// Returns targets / tokens of the whole step that a batch belongs to (counted.h); 1 without counts.
static inline float batch_targets_per_token(const Batch* batch) {
    return batch->update.tokens > 0 ? (float)((double)batch->update.targets / (double)batch->update.tokens)
                                    : 1;
}

// Cuts a batch of whole sequences down to the rank's tokens, in place; `starts` stays whole.
void batch_divide(Batch* batch, TokenChunks chunks);

typedef struct {
    int B;             // rows per batch
    int64_t sequences; // S, sequences per step
    Shuffle shuffle;
    uint64_t seed;
    int group; // G, for PACK_UNIFORM only
    int rank, num_processes;
    int earlier;        // how many batches before the last one also stay valid
    int counts_updates; // 1: batches have the counts of their step
    TokenChunks chunks; // tokens of each sequence that the rank reads
} DataloaderSettings;

// A micro-step of the step that starts at sequence `first`.
typedef struct {
    uint64_t first;
    int64_t micro_step;
} DataloaderPlace_;

enum {
    // G: a few micro-batches of similar length, and several lengths in a step
    DATALOADER_GROUP = 64,
    DATALOADER_SLOTS_ = 3, // one with the caller, one ready, one being filled; and earlier ones
    DATALOADER_WIDTH = 8   // rows of a batch are padded to a multiple of this
};

typedef struct {
    const DataSources* sources;
    DataloaderSettings settings;
    int B, T;
    int length;             // sequences that rows are cut into; T: whole rows
    uint64_t num_sequences; // of an epoch (mixture_epoch)
    uint64_t next;          // p of the next micro-step, all ranks together
    double wait_s;          // seconds that dataloader_next has waited so far
    // the last batch was full on every rank: as many rows, and as wide, as possible
    int is_full;

    int* memory;      // inputs, targets, starts and lengths of all slots
    RowCounts counts; // of the step that the thread fills
    int slots;
    Batch* slot;
    pthread_t thread;
    pthread_mutex_t mutex; // guards everything below, and the slots from consumed + 1 to produced
    pthread_cond_t changed;
    uint64_t consumed, produced;  // batches; batch k is in slot k % slots
    DataloaderPlace_ at, to_fill; // position of the next batch, and of the next to fill
    int is_filling, stop;

    char* are_full;  // by slot: is_full
    char* has_zeros; // by slot: the data could not be read
    int is_broken;   // such a batch was returned
    // belongs to the thread before that; once it is set, nothing more is read
    char error[ERROR_BYTES];
} Dataloader;

// ---- the interface ----

// Opens a loader, which must not move. `sources` are packed (mixture_pack), and closed after the
// loader.
void dataloader_open(Dataloader* loader, const DataSources* sources, DataloaderSettings settings);

// Makes the next step start at sequence p of the run, counted over epochs.
void dataloader_seek(Dataloader* loader, uint64_t sequence);

// Sets the number of rows of the next steps, and the length of the sequences that each row is cut
// into, a divisor of T. Call it only between two steps.
void dataloader_resize(Dataloader* loader, int64_t rows, int length);

// Returns the next micro-batch of this rank: at most B rows, possibly none; an epoch may end
// inside.
Batch dataloader_next(Dataloader* loader);

// Returns the micro-batch that dataloader_next returned `back` calls before the last one: at most
// `earlier` of the settings, with no seek since.
Batch dataloader_earlier(const Dataloader* loader, int64_t back);

// Returns the reason why the last batch, or an earlier one, has zeros for tokens, in one line; NULL
// if none has.
const char* dataloader_error(const Dataloader* loader);

// A range of the run's sequences.
typedef struct {
    uint64_t begin, end;
} DataloaderSpan;

// Returns the sequences of micro-batch k, of all ranks, in a step of the present size that starts
// at `first`.
DataloaderSpan dataloader_micro_batch(const Dataloader* loader, uint64_t first, int64_t k);

// Returns the number of targets in some sequences.
int64_t dataloader_targets(const Dataloader* loader, DataloaderSpan span);

// Prints which sequences these are, and from which sources, files, tokens and documents; of many
// only the first few.
void dataloader_print_place(FILE* file, const Dataloader* loader, DataloaderSpan span);

// Returns the share of padding in the run's first `batches` batches of one rank.
double dataloader_padding(const Dataloader* loader, int batches);

void dataloader_close(Dataloader* loader);

#ifdef __cplusplus
}
#endif

#ifdef DATALOADER_IMPLEMENTATION

#include <assert.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/clock.h"
#include "llmc/base/mapped_file.h"
#include "llmc/base/rand.h"
#include "llmc/data/packing.h"
#include "llmc/data/token_files.h"

// ---- the order ----

static uint64_t dataloader_row_(const Dataloader* loader, int s, uint64_t j) {
    const DataloaderSettings* o = &loader->settings;
    const DataSource* source = &loader->sources->source[s];
    const Rows* rows = &source->rows;
    const uint64_t S = rows->count, i = j % S, G = (uint64_t)o->group;
    const uint64_t stream =
        rand_stream("data order") + j / S + ((uint64_t)source->number << 48); // 2^48 epochs apart
    if (o->shuffle == SHUFFLE_OFF || (rows->pack == PACK_UNIFORM && i >= S / G * G)) {
        return i;
    }
    return rows->pack == PACK_UNIFORM ? rand_permute(o->seed, stream, S / G, i / G) * G + i % G
                                      : rand_permute(o->seed, stream, S, i);
}

// A sequence of the run: a row of a source, in an epoch of the source.
typedef struct {
    const Rows* rows;
    int source;
    uint64_t row, epoch;
} DataloaderRow_;

static DataloaderRow_ dataloader_find_(const Dataloader* loader, uint64_t p) {
    uint64_t j;
    const int s = mixture_find(loader->sources, p, &j);
    const Rows* rows = &loader->sources->source[s].rows;
    const DataloaderRow_ found = {rows, s, dataloader_row_(loader, s, j), j / rows->count};
    return found;
}

// Returns the length of sequence p, without padding.
static int dataloader_length_(const Dataloader* loader, uint64_t p) {
    const DataloaderRow_ found = dataloader_find_(loader, p);
    return rows_length(found.rows, found.row);
}

// ---- batches ----

// Returns T of a batch of B sequences from p on.
static int dataloader_width_(const Dataloader* loader, uint64_t p, int B) {
    if (loader->sources->pack != PACK_DYNAMIC && loader->sources->pack != PACK_UNIFORM) {
        return loader->T;
    }
    int longest = 0;
    for (int b = 0; b < B; b++) {
        const int length = dataloader_length_(loader, p + (uint64_t)b);
        longest = length > longest ? length : longest;
    }
    int width = (longest + DATALOADER_WIDTH - 1) / DATALOADER_WIDTH * DATALOADER_WIDTH;
    if (width > loader->length) { // whole sequences
        width = (width + loader->length - 1) / loader->length * loader->length;
    }
    return width < loader->T ? width : loader->T;
}

// Slot being filled, for mapped_try.
typedef struct {
    Dataloader* loader;
    Batch* slot;
    DataloaderPlace_ at;
    uint64_t p;
} DataloaderFilling_;

// Counts the tokens and targets of the step that starts at `first`.
static RowCounts dataloader_count_(const Dataloader* loader, uint64_t first) {
    RowCounts counts = {0, 0};
    for (int64_t i = 0; i < loader->settings.sequences; i++) {
        const DataloaderRow_ found = dataloader_find_(loader, first + (uint64_t)i);
        rows_add_counts(found.rows, found.row, &counts);
    }
    return counts;
}

// Reads the sequences of a slot, from p on.
static void dataloader_read_(void* filling_) {
    const DataloaderFilling_* filling = (const DataloaderFilling_*)filling_;
    Dataloader* loader = filling->loader;
    Batch* slot = filling->slot;
    const uint64_t p = filling->p;
    if (loader->settings.counts_updates && filling->at.micro_step == 0) {
        loader->counts = dataloader_count_(loader, filling->at.first);
    }
    slot->update = loader->counts;
    slot->T = dataloader_width_(loader, p, slot->B);
    slot->counted = 0;
    for (int b = 0; b < slot->B; b++) {
        const size_t at = (size_t)b * (size_t)slot->T;
        const DataloaderRow_ found = dataloader_find_(loader, p + (uint64_t)b);
        slot->counted += rows_fill(found.rows, found.row, found.epoch, slot->T, (int*)slot->inputs + at,
                                   (int*)slot->targets + at, slot->starts ? (int*)slot->starts + at : NULL);
        ((int*)slot->lengths)[b] = rows_length(found.rows, found.row);
        if (slot->sources) {
            ((int*)slot->sources)[b] = found.source;
        }
    }
}

// Fills a batch with zeros, a token that every model knows.
static void dataloader_fill_zeros_(Dataloader* loader, Batch* slot) {
    const size_t bytes = (size_t)slot->B * (size_t)loader->T * sizeof(int);
    slot->T = loader->T;
    slot->counted = slot->B * loader->T;
    loader->has_zeros[slot - loader->slot] = 1;
    slot->update = (RowCounts){slot->counted, slot->counted}; // it is not made
    for (int b = 0; b < slot->B; b++) {
        ((int*)slot->lengths)[b] = loader->T;
        if (slot->sources) {
            ((int*)slot->sources)[b] = 0;
        }
    }
    memset((int*)slot->inputs, 0, bytes);
    memset((int*)slot->targets, 0, bytes);
    if (slot->starts) {
        memset((int*)slot->starts, 0, bytes);
    }
}

// Sets the error that occurred while a batch was read.
static void dataloader_break_(Dataloader* loader, MappedResult result, const void* where) {
    const DataSources* sources = loader->sources;
    int found = 0;
    for (int s = 0; s < sources->count && !found; s++) {
        found = tokens_describe(&sources->source[s].stream, result, where, loader->error);
    }
}

// Cuts the rows of a slot into sequences, in place.
static void dataloader_cut_(const Dataloader* loader, Batch* slot) {
    const int T = slot->T, length = loader->length;
    if (T <= length) {
        return;
    }
    for (int n = 0; slot->starts && n < slot->B * T; n++) {
        const int cut = n % T / length * length, start = slot->starts[n];
        ((int*)slot->starts)[n] = start > cut ? start - cut : 0;
    }
    for (int b = slot->B * (T / length) - 1; b >= 0; b--) { // none is read after it was set
        const int left = slot->lengths[b / (T / length)] - b % (T / length) * length;
        ((int*)slot->lengths)[b] = int_max(0, int_min(left, length));
        if (slot->sources) {
            ((int*)slot->sources)[b] = slot->sources[b / (T / length)];
        }
    }
    slot->B *= T / length;
    slot->T = length;
    slot->pieces = T / length;
}

// Cuts rows of W tokens down to the rank's chunks, in place.
static void batch_keep_(const int* tokens, int rows, int W, TokenChunks chunks) {
    const int T = W / (chunks.last + 1);
    for (int n = 0; n < rows * T; n++) { // no token moves up
        ((int*)tokens)[n] = tokens[n / T * W + token_chunks_position(chunks, n % T, T)];
    }
}

void batch_divide(Batch* batch, TokenChunks chunks) {
    const int W = batch->T, T = W / (chunks.last + 1);
    if (chunks.last == 0) {
        return;
    }
    assert(W % (2 * (chunks.last + 1)) == 0);
    batch_keep_(batch->inputs, batch->B, W, chunks);
    batch_keep_(batch->targets, batch->B, W, chunks);
    batch->T = T;
    batch->chunks = chunks;
    batch->counted = 0;
    for (int n = 0; n < batch->B * T; n++) {
        batch->counted += batch->targets[n] != -1;
    }
}

// Counts the targets of each source in a slot, which has been cut and divided.
static void dataloader_count_sources_(const Dataloader* loader, Batch* slot) {
    int* counted = (int*)slot->counted_of_source;
    memset(counted, 0, (size_t)loader->sources->count * sizeof(int));
    for (int n = 0; n < slot->B * slot->T; n++) {
        counted[slot->sources[n / slot->T]] += slot->targets[n] != -1;
    }
}

// Returns the sequence at which micro-batch k of a step starts, or the end of the step.
static uint64_t dataloader_begin_(const Dataloader* loader, uint64_t first, int64_t k) {
    const int64_t sequence = k * loader->B, S = loader->settings.sequences;
    return first + (uint64_t)(sequence < S ? sequence : S);
}

// True if every rank has a full micro-batch in this micro-step.
static int dataloader_are_full_(const Dataloader* loader, DataloaderPlace_ at) {
    const int64_t n = loader->settings.num_processes, k = at.micro_step * n;
    if ((k + n) * loader->B > loader->settings.sequences) {
        return 0;
    }
    for (int r = 0; r < n; r++) {
        if (dataloader_width_(loader, dataloader_begin_(loader, at.first, k + r), loader->B) < loader->T) {
            return 0;
        }
    }
    return 1;
}

// Fills a slot with this rank's micro-batch.
static void dataloader_fill_(Dataloader* loader, Batch* slot, DataloaderPlace_ at) {
    const int64_t k = at.micro_step * loader->settings.num_processes + loader->settings.rank;
    const uint64_t p = dataloader_begin_(loader, at.first, k);
    slot->B = (int)(dataloader_begin_(loader, at.first, k + 1) - p);
    slot->first = (int64_t)(p - at.first);
    slot->pieces = 1;
    loader->are_full[slot - loader->slot] = (char)dataloader_are_full_(loader, at);
    DataloaderFilling_ filling = {loader, slot, at, p};
    const void* where;
    const MappedResult result =
        loader->error[0] ? MAPPED_READ : mapped_try(dataloader_read_, &filling, &where);
    if (result != MAPPED_READ) {
        dataloader_break_(loader, result, where);
    }
    if (loader->error[0]) {
        dataloader_fill_zeros_(loader, slot);
    }
    dataloader_cut_(loader, slot);
    batch_divide(slot, loader->settings.chunks);
    if (slot->sources) {
        dataloader_count_sources_(loader, slot);
    }
}

static DataloaderPlace_ dataloader_after_(const Dataloader* loader, DataloaderPlace_ at) {
    const uint64_t end = at.first + (uint64_t)loader->settings.sequences;
    const DataloaderPlace_ update = {end, 0}, next = {at.first, at.micro_step + 1};
    const int64_t k = next.micro_step * loader->settings.num_processes;
    return dataloader_begin_(loader, at.first, k) == end ? update : next;
}

// ---- the thread ----

static void* dataloader_run_(void* loader_) {
    Dataloader* loader = (Dataloader*)loader_;
    pthread_mutex_lock(&loader->mutex);
    for (;;) {
        while (!loader->stop && loader->produced - loader->consumed == DATALOADER_SLOTS_ - 1) {
            pthread_cond_wait(&loader->changed, &loader->mutex);
        }
        if (loader->stop) {
            break;
        }
        const DataloaderPlace_ at = loader->to_fill;
        Batch* slot = &loader->slot[loader->produced % (uint64_t)loader->slots];
        loader->is_filling = 1;
        pthread_mutex_unlock(&loader->mutex);
        dataloader_fill_(loader, slot, at);
        pthread_mutex_lock(&loader->mutex);
        loader->is_filling = 0;
        loader->produced++;
        loader->to_fill = dataloader_after_(loader, loader->to_fill);
        pthread_cond_broadcast(&loader->changed);
    }
    pthread_mutex_unlock(&loader->mutex);
    return NULL;
}

// Starts the thread with all signals blocked, because the main thread handles them, except the one
// that its own reads may raise.
static void dataloader_start_(Dataloader* loader) {
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    pthread_mutex_init(&loader->mutex, NULL);
    pthread_cond_init(&loader->changed, NULL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&loader->thread, NULL, dataloader_run_, loader);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    CHECK(!failed, "data: cannot start a thread: %s", strerror(failed));
}

// ---- the interface ----

void dataloader_open(Dataloader* loader, const DataSources* sources, DataloaderSettings settings) {
    const int B = settings.B, T = sources->T, has_starts = sources->mask == DOCUMENT_MASK_ON,
              has_sources = sources->count > 1, arrays = 3 + has_starts + has_sources;
    assert(B > 0 && T > 0 && settings.sequences > 0 && settings.rank >= 0 &&
           settings.rank < settings.num_processes);
    assert(sources->pack != PACK_UNIFORM || settings.group > 0);
    memset(loader, 0, sizeof(*loader));
    loader->sources = sources;
    loader->settings = settings;
    loader->B = B;
    loader->T = loader->length = T;
    loader->num_sequences = mixture_epoch(sources);
    loader->slots = DATALOADER_SLOTS_ + settings.earlier;
    loader->slot = (Batch*)check_alloc((size_t)loader->slots, sizeof(Batch), "batches");
    loader->are_full = (char*)check_alloc((size_t)loader->slots, 2, "batches");
    loader->has_zeros = loader->are_full + loader->slots;
    const size_t tokens = array_bytes((size_t)B, (size_t)T);
    const size_t room = array_bytes(tokens, (size_t)arrays) + (size_t)sources->count; // of a slot
    loader->memory = (int*)check_alloc(array_bytes(room, (size_t)loader->slots), sizeof(int), "batches");
    for (size_t i = 0; i < (size_t)loader->slots; i++) {
        int* memory = loader->memory + i * room;
        const Batch slot = {.inputs = memory,
                            .targets = memory + tokens,
                            .lengths = memory + 2 * tokens,
                            .sources = has_sources ? memory + 3 * tokens : NULL,
                            .starts = has_starts ? memory + (size_t)(arrays - 1) * tokens : NULL,
                            .counted_of_source = memory + (size_t)arrays * tokens,
                            .B = B,
                            .T = T};
        loader->slot[i] = slot;
    }
    dataloader_start_(loader);
}

// Restarts at sequence p with steps of this many rows. Drops the batches that are ready.
static void dataloader_restart_(Dataloader* loader, uint64_t sequence, int64_t rows, int length) {
    pthread_mutex_lock(&loader->mutex);
    while (loader->is_filling) {
        pthread_cond_wait(&loader->changed, &loader->mutex);
    }
    loader->produced = loader->consumed;
    const DataloaderPlace_ at = {sequence, 0};
    loader->at = loader->to_fill = at;
    loader->next = sequence;
    loader->settings.sequences = rows;
    loader->length = length;
    pthread_cond_broadcast(&loader->changed);
    pthread_mutex_unlock(&loader->mutex);
}

void dataloader_seek(Dataloader* loader, uint64_t sequence) {
    if (loader->at.first != sequence || loader->at.micro_step != 0) {
        dataloader_restart_(loader, sequence, loader->settings.sequences, loader->length);
    }
}

void dataloader_resize(Dataloader* loader, int64_t rows, int length) {
    assert(loader->at.micro_step == 0 && rows > 0 && length > 0 && loader->T % length == 0);
    if (loader->settings.sequences != rows || loader->length != length) {
        dataloader_restart_(loader, loader->at.first, rows, length);
    }
}

Batch dataloader_next(Dataloader* loader) {
    pthread_mutex_lock(&loader->mutex);
    if (loader->produced == loader->consumed) {
        const double start_s = time_now_s();
        while (loader->produced == loader->consumed) {
            pthread_cond_wait(&loader->changed, &loader->mutex);
        }
        loader->wait_s += time_now_s() - start_s;
    }
    const Batch batch = loader->slot[loader->consumed % (uint64_t)loader->slots];
    loader->is_broken |= loader->has_zeros[loader->consumed % (uint64_t)loader->slots];
    loader->is_full = loader->are_full[loader->consumed % (uint64_t)loader->slots];
    loader->consumed++; // frees the slot of the oldest batch with the caller
    loader->at = dataloader_after_(loader, loader->at);
    loader->next =
        dataloader_begin_(loader, loader->at.first, loader->at.micro_step * loader->settings.num_processes);
    pthread_cond_broadcast(&loader->changed);
    pthread_mutex_unlock(&loader->mutex);
    return batch;
}

Batch dataloader_earlier(const Dataloader* loader, int64_t back) {
    assert(0 <= back && back <= loader->settings.earlier && (uint64_t)back < loader->consumed);
    return loader->slot[(loader->consumed - 1 - (uint64_t)back) % (uint64_t)loader->slots];
}

DataloaderSpan dataloader_micro_batch(const Dataloader* loader, uint64_t first, int64_t k) {
    const DataloaderSpan span = {dataloader_begin_(loader, first, k),
                                 dataloader_begin_(loader, first, k + 1)};
    return span;
}

int64_t dataloader_targets(const Dataloader* loader, DataloaderSpan span) {
    RowCounts counts = {0, 0};
    for (uint64_t p = span.begin; p < span.end; p++) {
        const DataloaderRow_ found = dataloader_find_(loader, p);
        rows_add_counts(found.rows, found.row, &counts);
    }
    return counts.targets;
}

void dataloader_print_place(FILE* file, const Dataloader* loader, DataloaderSpan span) {
    enum { MOST = 8 };
    const uint64_t count = span.end - span.begin;
    fprintf(file, count > 1 ? "sequences %llu-%llu: " : "sequence %llu: ", (unsigned long long)span.begin,
            (unsigned long long)span.end - 1);
    for (uint64_t p = span.begin; p < span.end && p < span.begin + MOST; p++) {
        const DataloaderRow_ found = dataloader_find_(loader, p);
        fputs(p > span.begin ? "; " : "", file);
        if (loader->sources->is_named) {
            fprintf(file, "%s: ", loader->sources->source[found.source].name);
        }
        rows_print_place(file, found.rows, found.row);
    }
    if (count > MOST) {
        fprintf(file, "; and %llu more sequences", (unsigned long long)(count - MOST));
    }
}

const char* dataloader_error(const Dataloader* loader) { return loader->is_broken ? loader->error : NULL; }

double dataloader_padding(const Dataloader* loader, int batches) {
    double tokens = 0, room = 0;
    for (int i = 0; i < batches; i++) {
        const uint64_t p = (uint64_t)i * (uint64_t)loader->B;
        room += (double)loader->B * dataloader_width_(loader, p, loader->B);
        for (int b = 0; b < loader->B; b++) {
            tokens += dataloader_length_(loader, p + (uint64_t)b);
        }
    }
    return 1 - tokens / room;
}

void dataloader_close(Dataloader* loader) {
    pthread_mutex_lock(&loader->mutex);
    loader->stop = 1;
    pthread_cond_broadcast(&loader->changed);
    pthread_mutex_unlock(&loader->mutex);
    pthread_join(loader->thread, NULL);
    pthread_cond_destroy(&loader->changed);
    pthread_mutex_destroy(&loader->mutex);
    free(loader->memory);
    free(loader->are_full);
    free(loader->slot);
    memset(loader, 0, sizeof(*loader));
}

#endif // DATALOADER_IMPLEMENTATION

#endif
