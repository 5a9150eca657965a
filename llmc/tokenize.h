/*
tokenize.h -- the tokens of many files: a pipeline of threads from a TextSource to a function of the caller.

    reader thread  ->  blocks of text  ->  encoders, one a thread  ->  ids, in order  ->  sink, in the caller

The ids are an end-of-text token before each document, and the document's own. They do not depend on the
number of threads, nor on how the documents are divided into blocks (text_source.h). What the pipeline holds
at a time is 2 * threads + 2 blocks with their ids, whatever the size of the files.

A sink takes the blocks one after another in the order of the input. It returns 0 to end the run early.

needs:   bpe.h check.h text_source.h; pthreads
defines: TokenBlock, TokenSink, tokenize_run, tokenize_cores
*/
#ifndef LLMC_TOKENIZE_H
#define LLMC_TOKENIZE_H

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include "bpe.h"
#include "check.h"
#include "text_source.h"

// What the encoders made of a block of text. The sink may keep nothing of it.
typedef struct {
    const int* ids; // (count)
    size_t count;
    const TextBlock* text;
} TokenBlock;

typedef int (*TokenSink)(void* context, const TokenBlock* block);

typedef struct {
    TextBlock text;
    int* ids;
    size_t ids_room, count;
    int is_encoded;
} TokenizeSlot_;

// Block number n is in slot n % num_slots. Blocks below `sunk` are done, those below `taken` with an encoder
// or encoded, those below `read` have text.
typedef struct {
    TextSource* source;
    const Bpe* bpe;
    TokenizeSlot_* slots;
    uint64_t num_slots;
    pthread_mutex_t lock; // of all that follows
    pthread_cond_t changed;
    uint64_t sunk, taken, read;
    int source_is_done; // no block follows those that were read
    int failed;         // because of an error
    int is_stopped;     // the sink wants no more
} Tokenize_;

// The processors that this process may use.
static inline int tokenize_cores(void) {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        return CPU_COUNT(&set);
    }
#endif
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return cores > 0 ? (int)cores : 1;
}

// ---- the threads

// The lock is held before and after; others go on meanwhile.
static inline void tokenize_wait_(Tokenize_* run) { pthread_cond_wait(&run->changed, &run->lock); }

static inline void tokenize_tell_(Tokenize_* run) { pthread_cond_broadcast(&run->changed); }

static inline void* tokenize_read_(void* argument) {
    Tokenize_* run = (Tokenize_*)argument;
    pthread_mutex_lock(&run->lock);
    while (!run->source_is_done && !run->is_stopped) {
        if (run->read - run->sunk == run->num_slots) {
            tokenize_wait_(run);
            continue;
        }
        TokenizeSlot_* slot = &run->slots[run->read % run->num_slots];
        pthread_mutex_unlock(&run->lock);
        const int more = text_source_next(run->source, &slot->text);
        pthread_mutex_lock(&run->lock);
        slot->is_encoded = 0;
        run->read += more > 0 ? 1 : 0;
        run->source_is_done = more <= 0;
        run->failed = more < 0;
        tokenize_tell_(run);
    }
    pthread_mutex_unlock(&run->lock);
    return NULL;
}

// Encodes a block: its parts are what its documents' beginnings cut it into.
static inline void tokenize_encode_(TokenizeSlot_* slot, BpeEncoder* encoder) {
    const TextBlock* text = &slot->text;
    text_reserve((void**)&slot->ids, &slot->ids_room, text->bytes + text->num_documents, sizeof(int));
    slot->count = 0;
    for (size_t i = 0, begin = 0; begin < text->bytes; i++) {
        size_t end = i < text->num_documents ? text->documents[i] : text->bytes;
        size_t consumed;
        slot->count += bpe_encode(encoder, text->text + begin, end - begin, BPE_ENDS, slot->ids + slot->count,
                                  &consumed);
        if (i < text->num_documents) {
            slot->ids[slot->count++] = encoder->bpe->eot;
        }
        begin = end;
    }
}

static inline void* tokenize_work_(void* argument) {
    Tokenize_* run = (Tokenize_*)argument;
    BpeEncoder encoder;
    bpe_encoder_open(&encoder, run->bpe);
    pthread_mutex_lock(&run->lock);
    while (!run->is_stopped && !(run->source_is_done && run->taken == run->read)) {
        if (run->taken == run->read) {
            tokenize_wait_(run);
            continue;
        }
        TokenizeSlot_* slot = &run->slots[run->taken++ % run->num_slots];
        pthread_mutex_unlock(&run->lock);
        tokenize_encode_(slot, &encoder);
        pthread_mutex_lock(&run->lock);
        slot->is_encoded = 1;
        tokenize_tell_(run);
    }
    pthread_mutex_unlock(&run->lock);
    bpe_encoder_close(&encoder);
    return NULL;
}

// Hands the blocks to the sink, in order, until there are no more or it wants no more.
static inline void tokenize_sink_(Tokenize_* run, TokenSink sink, void* context) {
    pthread_mutex_lock(&run->lock);
    while (!run->is_stopped && !(run->source_is_done && run->sunk == run->read)) {
        TokenizeSlot_* slot = &run->slots[run->sunk % run->num_slots];
        if (run->sunk == run->taken || !slot->is_encoded) {
            tokenize_wait_(run);
            continue;
        }
        pthread_mutex_unlock(&run->lock);
        const TokenBlock block = {slot->ids, slot->count, &slot->text};
        const int goes_on = sink(context, &block);
        pthread_mutex_lock(&run->lock);
        run->sunk++;
        run->is_stopped = !goes_on;
        tokenize_tell_(run);
    }
    pthread_mutex_unlock(&run->lock);
}

// ---- the whole

// Runs the source to its end, or until the sink returns 0, with so many encoders. Returns 0 with
// source->error after an error, when the sink has got all blocks before it.
static inline int tokenize_run(TextSource* source, const Bpe* bpe, int threads, TokenSink sink,
                               void* context) {
    Tokenize_ run;
    memset(&run, 0, sizeof(run));
    run.source = source;
    run.bpe = bpe;
    run.num_slots = 2 * (uint64_t)threads + 2;
    run.slots = (TokenizeSlot_*)check_alloc(run.num_slots, sizeof(TokenizeSlot_), "blocks of text");
    pthread_mutex_init(&run.lock, NULL);
    pthread_cond_init(&run.changed, NULL);
    const size_t num_threads = (size_t)threads + 1;
    pthread_t* ids = (pthread_t*)check_alloc(num_threads, sizeof(pthread_t), "threads");
    for (size_t i = 0; i < num_threads; i++) {
        const int reason = pthread_create(&ids[i], NULL, i ? tokenize_work_ : tokenize_read_, &run);
        CHECK(reason == 0, "cannot start thread %zu of %zu: %s", i + 1, num_threads, strerror(reason));
    }
    tokenize_sink_(&run, sink, context);
    for (size_t i = 0; i < num_threads; i++) {
        pthread_join(ids[i], NULL);
    }
    pthread_cond_destroy(&run.changed);
    pthread_mutex_destroy(&run.lock);
    for (uint64_t i = 0; i < run.num_slots; i++) {
        text_block_close(&run.slots[i].text);
        free(run.slots[i].ids);
    }
    free(run.slots);
    free(ids);
    return !run.failed;
}

#endif
