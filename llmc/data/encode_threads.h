/*
encode_threads.h -- encodes many files: a pipeline of threads from the files to a function of the
caller.

    reader thread -> blocks of text -> encoder threads -> ids, in order -> sink, in the caller

The ids are an end-of-text token before each document, and the document's own. In documents with
parts, TOKEN_NO_TARGET marks ids after which no answer follows (chat_marks.h). The ids depend
neither on the number of threads, nor on how the documents are divided into blocks (documents.h).
The pipeline holds 2 * threads + 2 blocks with their ids at a time, whatever the size of the files.

pipeline_train counts pieces instead, to train a vocabulary: the same pipeline with a BpeTrainer's
threads, and blocks without ids.

The sink takes the blocks one by one in the order of the input. It returns 0 to stop early.
*/
#ifndef LLMC_ENCODE_THREADS_H
#define LLMC_ENCODE_THREADS_H

#include <stddef.h>

#include "llmc/data/documents.h"
#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_train.h"

#ifdef __cplusplus
extern "C" {
#endif

// Tokens of a block of text. The sink may not keep pointers into it.
typedef struct {
    const int* ids; // (count)
    size_t count;
    const TextBlock* text;
} TokenBlock;

typedef int (*TokenSink)(void* context, const TokenBlock* block);

// ---- encoding ----

// Encodes the source to its end, or until the sink returns 0, with this many encoders. Returns 0
// with source->error after an error; the sink has then received all blocks before it.
int pipeline_run(Documents* source, const Bpe* bpe, int threads, TokenSink sink, void* context);

// ---- training ----

// Adds the pieces of all documents to the trainer instead, on as many threads as it was opened for.
int pipeline_train(Documents* source, BpeTrainer* trainer, TokenSink sink, void* context);

#ifdef __cplusplus
}
#endif

#ifdef ENCODE_THREADS_IMPLEMENTATION

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/chat_format.h"
#include "llmc/tokenizer/chat_marks.h"

// Ids of a block.
typedef struct {
    int* ids; // reused for later blocks
    size_t room, count;
} PipelineIds_;

// Works on a block, with a thread's own `tool`.
typedef void (*PipelineWork_)(const TextBlock* text, PipelineIds_* ids, void* tool);

typedef struct {
    TextBlock text;
    PipelineIds_ ids;
    int is_worked;
} PipelineSlot_;

// Block n is in slot n % num_slots. Blocks below `sunk` are done, those below `taken` are done or
// with a worker, those below `read` have text.
typedef struct {
    Documents* source;
    PipelineWork_ work;
    PipelineSlot_* slots;
    uint64_t num_slots;
    pthread_mutex_t lock; // guards everything below
    pthread_cond_t changed;
    uint64_t sunk, taken, read;
    int source_is_done; // no more blocks will be read
    int failed;         // an error occurred
    int is_stopped;     // the sink has returned 0
} Pipeline_;

// ---- the threads ----

// Waits for a change. Releases the lock while it waits; it is held before and after.
static void pipeline_wait_(Pipeline_* run) { pthread_cond_wait(&run->changed, &run->lock); }

static void pipeline_tell_(Pipeline_* run) { pthread_cond_broadcast(&run->changed); }

static void* pipeline_read_(void* argument) {
    Pipeline_* run = (Pipeline_*)argument;
    pthread_mutex_lock(&run->lock);
    while (!run->source_is_done && !run->is_stopped) {
        if (run->read - run->sunk == run->num_slots) {
            pipeline_wait_(run);
            continue;
        }
        PipelineSlot_* slot = &run->slots[run->read % run->num_slots];
        pthread_mutex_unlock(&run->lock);
        const int more = documents_next(run->source, &slot->text);
        pthread_mutex_lock(&run->lock);
        slot->is_worked = 0;
        run->read += more > 0 ? 1 : 0;
        run->source_is_done = more <= 0;
        run->failed = more < 0;
        pipeline_tell_(run);
    }
    pthread_mutex_unlock(&run->lock);
    return NULL;
}

typedef struct {
    Pipeline_* run;
    void* tool;
} PipelineWorker_;

static void* pipeline_work_(void* argument) {
    const PipelineWorker_* worker = (const PipelineWorker_*)argument;
    Pipeline_* run = worker->run;
    pthread_mutex_lock(&run->lock);
    while (!run->is_stopped && !(run->source_is_done && run->taken == run->read)) {
        if (run->taken == run->read) {
            pipeline_wait_(run);
            continue;
        }
        PipelineSlot_* slot = &run->slots[run->taken++ % run->num_slots];
        pthread_mutex_unlock(&run->lock);
        run->work(&slot->text, &slot->ids, worker->tool);
        pthread_mutex_lock(&run->lock);
        slot->is_worked = 1;
        pipeline_tell_(run);
    }
    pthread_mutex_unlock(&run->lock);
    return NULL;
}

// Passes the blocks to the sink, in order, until none is left or it returns 0.
static void pipeline_sink_(Pipeline_* run, TokenSink sink, void* context) {
    pthread_mutex_lock(&run->lock);
    while (!run->is_stopped && !(run->source_is_done && run->sunk == run->read)) {
        PipelineSlot_* slot = &run->slots[run->sunk % run->num_slots];
        if (run->sunk == run->taken || !slot->is_worked) {
            pipeline_wait_(run);
            continue;
        }
        pthread_mutex_unlock(&run->lock);
        const TokenBlock block = {slot->ids.ids, slot->ids.count, &slot->text};
        const int goes_on = sink(context, &block);
        pthread_mutex_lock(&run->lock);
        run->sunk++;
        run->is_stopped = !goes_on;
        pipeline_tell_(run);
    }
    pthread_mutex_unlock(&run->lock);
}

// Starts the reader and one worker per tool, and waits until they have finished.
static void pipeline_threads_(Pipeline_* run, void** tools, size_t num_tools, TokenSink sink, void* context) {
    pthread_t* threads = (pthread_t*)check_alloc(num_tools + 1, sizeof(pthread_t), "threads");
    PipelineWorker_* workers = (PipelineWorker_*)check_alloc(num_tools, sizeof(PipelineWorker_), "threads");
    int reason = pthread_create(&threads[num_tools], NULL, pipeline_read_, run);
    for (size_t i = 0; reason == 0 && i < num_tools; i++) {
        workers[i].run = run;
        workers[i].tool = tools[i];
        reason = pthread_create(&threads[i], NULL, pipeline_work_, &workers[i]);
    }
    CHECK(reason == 0, "cannot start %zu threads: %s", num_tools + 1, strerror(reason));
    pipeline_sink_(run, sink, context);
    for (size_t i = 0; i <= num_tools; i++) {
        pthread_join(threads[i], NULL);
    }
    free(workers);
    free(threads);
}

// Runs the source with a thread per tool.
static int pipeline_over_(Documents* source, PipelineWork_ work, void** tools, size_t num_tools,
                          TokenSink sink, void* context) {
    Pipeline_ run;
    memset(&run, 0, sizeof(run));
    run.source = source;
    run.work = work;
    run.num_slots = 2 * num_tools + 2;
    run.slots = (PipelineSlot_*)check_alloc(run.num_slots, sizeof(PipelineSlot_), "blocks of text");
    pthread_mutex_init(&run.lock, NULL);
    pthread_cond_init(&run.changed, NULL);
    pipeline_threads_(&run, tools, num_tools, sink, context);
    pthread_cond_destroy(&run.changed);
    pthread_mutex_destroy(&run.lock);
    for (uint64_t i = 0; i < run.num_slots; i++) {
        text_block_close(&run.slots[i].text);
        free(run.slots[i].ids.ids);
    }
    free(run.slots);
    return !run.failed;
}

// ---- encoding ----

// Encoder of a thread.
typedef struct {
    BpeEncoder encoder;
    const ChatMarks* marks;
    ChatMessage* messages; // of a document
    size_t room;
} PipelineEncoder_;

// Encodes the parts of a document that starts with id number `first`. Returns the new count of ids.
static size_t pipeline_encode_parts_(PipelineEncoder_* tool, const TextBlock* text, size_t* part,
                                     size_t document, int* ids, size_t first) {
    size_t count = 0;
    for (; *part < text->num_parts && text->parts[*part].document == document; ++*part) {
        const TextPart* p = &text->parts[*part];
        tool->messages = (ChatMessage*)check_reserve(tool->messages, &tool->room, count + 1,
                                                     sizeof(ChatMessage), "messages");
        tool->messages[count++] = (ChatMessage){p->role, text->text + p->begin, p->end - p->begin};
    }
    return first + chat_encode(tool->marks, &tool->encoder, tool->messages, count, CHAT_WHOLE, ids + first);
}

// Returns an upper bound of the ids of a block.
static size_t pipeline_most_ids_(const PipelineEncoder_* tool, const TextBlock* text) {
    const Bpe* bpe = tool->encoder.bpe;
    const size_t plain = bpe_most_ids(bpe, text->bytes) + text->num_documents;
    return text->num_parts == 0
               ? plain
               : plain + chat_most_ids(tool->marks, bpe, text->bytes, text->num_parts + text->num_documents);
}

// Encodes a block document by document.
static void pipeline_encode_(const TextBlock* text, PipelineIds_* out, void* tool_) {
    PipelineEncoder_* tool = (PipelineEncoder_*)tool_;
    const Bpe* bpe = tool->encoder.bpe;
    const size_t room = pipeline_most_ids_(tool, text);
    int* ids = out->ids = (int*)check_reserve(out->ids, &out->room, room, sizeof(int), "text");
    size_t count = 0, part = 0;
    for (size_t i = 0, begin = 0; i <= text->num_documents; i++) {
        const size_t end = i < text->num_documents ? text->documents[i] : text->bytes;
        const int has_parts = part < text->num_parts && text->parts[part].document == i;
        count = has_parts ? pipeline_encode_parts_(tool, text, &part, i, ids, count - 1)
                          : count + bpe_encode_at(&tool->encoder, i == 0 ? BPE_REST : BPE_DOCUMENT,
                                                  text->text + begin, end - begin, ids + count);
        if (i < text->num_documents) {
            ids[count++] = bpe->eot;
        }
        begin = end;
    }
    out->count = count;
}

int pipeline_run(Documents* source, const Bpe* bpe, int threads, TokenSink sink, void* context) {
    const size_t n = (size_t)threads;
    PipelineEncoder_* encoders = (PipelineEncoder_*)check_alloc(n, sizeof(PipelineEncoder_), "encoders");
    void** tools = (void**)check_alloc(n, sizeof(void*), "encoders");
    ChatMarks marks;
    documents_set_pattern(source, bpe->rules.pattern);
    for (size_t i = 0; i < n; i++) {
        bpe_encoder_open(&encoders[i].encoder, bpe);
        encoders[i].marks = &marks;
        tools[i] = &encoders[i];
    }
    chat_marks_open(&marks, bpe);
    const int ok = pipeline_over_(source, pipeline_encode_, tools, n, sink, context);
    for (size_t i = 0; i < n; i++) {
        bpe_encoder_close(&encoders[i].encoder);
        free(encoders[i].messages);
    }
    free(tools);
    free(encoders);
    return ok;
}

// ---- training ----

typedef struct {
    BpeTrainer* trainer;
    int thread;
} PipelineCounter_;

static void pipeline_count_(const TextBlock* text, PipelineIds_* ids, void* tool) {
    const PipelineCounter_* counter = (const PipelineCounter_*)tool;
    ids->count = 0;
    for (size_t i = 0, begin = 0; i <= text->num_documents; i++) {
        const size_t end = i < text->num_documents ? text->documents[i] : text->bytes;
        bpe_trainer_add(counter->trainer, counter->thread, text->text + begin, end - begin);
        begin = end;
    }
}

int pipeline_train(Documents* source, BpeTrainer* trainer, TokenSink sink, void* context) {
    const size_t n = (size_t)trainer->threads;
    PipelineCounter_* counters = (PipelineCounter_*)check_alloc(n, sizeof(PipelineCounter_), "counters");
    void** tools = (void**)check_alloc(n, sizeof(void*), "counters");
    documents_set_pattern(source, trainer->rules.pattern);
    for (size_t i = 0; i < n; i++) {
        counters[i].trainer = trainer;
        counters[i].thread = (int)i;
        tools[i] = &counters[i];
    }
    const int ok = pipeline_over_(source, pipeline_count_, tools, n, sink, context);
    free(tools);
    free(counters);
    return ok;
}

#endif // ENCODE_THREADS_IMPLEMENTATION

#endif
