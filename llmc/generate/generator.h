/*
generator.h -- generates text: a prompt, then token after token until the document ends.

Several sequences are decoded at a time, each in a slot of its own, at its own position and with its
own random numbers. They do not affect each other. When the T tokens of its context are full, a
sequence forgets the older half, and the rest is read again, at its new positions. A model may also
want its sequences read again at a certain position (attention_config_rereads_at).

The model is two functions. Both return logits in fp32 on the host, Vp for each sequence, valid
until the next call:

    prefill    forgets the sequence in a slot and reads the first `count` <= T tokens of a new one;
               returns the logits of the next token
    decode     reads one more token in each slot, ids[slot] at positions[slot]; returns the logits
               of the next token of each

An empty slot gets token 0 at position 0.
*/
#ifndef LLMC_GENERATOR_H
#define LLMC_GENERATOR_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "llmc/base/rand.h"
#include "llmc/log/log.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_tokens.h"
#include "llmc/generate/sampler.h"
#include "llmc/generate/text_stream.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef const float* (*PrefillSequence)(Model* model, int slot, const int* ids, int count);
typedef const float* (*DecodeStep)(Model* model, const int* ids, const int* positions, int slots);

typedef struct {
    Model* model;
    PrefillSequence prefill;
    DecodeStep decode;
    int V, Vp, T;
    int slots;
    int rereads_at; // position at which a sequence is read again; 0: none
} GeneratorModel;

// Returns true to stop; called before each token.
typedef int (*GeneratorStop)(void* run);

enum { GENERATOR_NUMBER_BYTES = 16 }; // id as text

// How a sequence ended: with its document, at a stop string, at --tokens, or because no token could
// be drawn.
typedef enum {
    STILL_GENERATING,
    GENERATOR_EOT,
    GENERATOR_STRING,
    GENERATOR_TOKENS,
    GENERATOR_DIVERGED
} GeneratorEnd;

// Sequence being generated, or one that has ended and still has to be collected.
typedef struct {
    int in_use; // the slot is in use
    GeneratorEnd end;
    int* ids;             // (T + 1) tokens that the model sees; it has read all but the last
    int count;            // number of ids
    int generated, limit; // tokens after the prompt: so far; at most
    Rand* rng;            // the caller's
    TextStream stream;    // its text, with or without the prompt
} GeneratorSequence;

typedef struct {
    GeneratorModel model;
    const RunData* data;
    const Options* options;
    Sampler sampler;
    int eot;
    int turn_end; // token that ends a message of a chat; -1: none
    // ids below this have a token; others, which pad the vocabulary, are not drawn
    int known_ids;
    GeneratorSequence* sequences; // (slots)
    int *ids, *positions;         // (slots) next token of each slot
    Rand rng;                     // for samples
    int *prompt, prompt_tokens;   // (T + 1) prompt of samples
} Generator;

// Opens a generator. `data` and `options` must stay valid. --prompt is used only for the samples of
// a run.
void generator_open(Generator* g, GeneratorModel model, const RunData* data, const Options* options);

void generator_close(Generator* g);

// Starts a sequence in a free slot: reads the prompt, 1 <= `count` <= T tokens, and draws the first
// token. `rng` must stay valid until the sequence has ended.
void generator_begin(Generator* g, int slot, const int* prompt, int count, int limit, Rand* rng);

// Appends a token to each unfinished sequence.
void generator_advance(Generator* g);

// Logs as many samples as --samples says. Returns 0 if the run should stop: the random numbers are
// then reset, and all samples are to be drawn again.
int generator_log(Generator* g, RunLog* log, int64_t step, GeneratorStop stop, void* run);

#ifdef __cplusplus
}
#endif

#ifdef GENERATOR_IMPLEMENTATION

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/tokenizer/tokenizer.h"

void generator_open(Generator* g, GeneratorModel model, const RunData* data, const Options* options) {
    const size_t slots = (size_t)model.slots, room = (size_t)model.T + 1;
    memset(g, 0, sizeof(*g));
    g->model = model;
    g->data = data;
    g->options = options;
    sampler_open(&g->sampler, model.V);
    g->eot = run_data_eot(data, model.V);
    g->turn_end = -1;
    g->known_ids =
        data->has_tokenizer && data->tokenizer.vocab_size < model.V ? data->tokenizer.vocab_size : model.V;
    g->sequences = (GeneratorSequence*)check_alloc(slots, sizeof(GeneratorSequence), "sequences");
    g->ids = (int*)check_alloc(slots, sizeof(int), "sequences");
    g->positions = (int*)check_alloc(slots, sizeof(int), "sequences");
    for (int s = 0; s < model.slots; s++) {
        g->sequences[s].ids = (int*)check_alloc(room, sizeof(int), "sequences");
        text_stream_open(&g->sequences[s].stream, &options->texts.stop);
    }
    g->rng = rand_open(options->data.seed, rand_stream("samples"));
    g->prompt = (int*)check_alloc(room, sizeof(int), "prompt");
    if (!options->generates) {
        g->prompt_tokens = run_data_prompt(g->prompt, model.T, data, options, model.V);
    }
}

void generator_close(Generator* g) {
    for (int s = 0; s < g->model.slots; s++) {
        text_stream_close(&g->sequences[s].stream);
        free(g->sequences[s].ids);
    }
    free(g->sequences);
    free(g->ids);
    free(g->positions);
    free(g->prompt);
    sampler_close(&g->sampler);
}

// Adds a token to the text, or its number without a tokenizer.
// is_first: 1 for the first token of a text, which may have a blank that encoding put there.
static void generator_write_(const Generator* g, TextStream* stream, int id, int is_first) {
    char number[GENERATOR_NUMBER_BYTES];
    int length = snprintf(number, sizeof(number), "%d ", id);
    const char* token = number;
    if (g->data->has_tokenizer && id < g->data->tokenizer.vocab_size) {
        token = (is_first ? tokenizer_decode_first : tokenizer_decode)(&g->data->tokenizer, id, &length);
    }
    text_stream_add(stream, token, (size_t)length);
}

// Draws the next token of a sequence, and appends it.
static void generator_draw_(Generator* g, GeneratorSequence* sequence, const float* logits) {
    const Options* o = g->options;
    if (!sampler_can_draw(logits, g->known_ids)) {
        sequence->end = GENERATOR_DIVERGED;
        return;
    }
    const int next = sampler_next(logits, g->known_ids, o->samples.temperature, o->samples.top_k,
                                  o->samples.top_p, (float)rand_uniform(sequence->rng), &g->sampler);
    if (next == g->eot || next == g->turn_end ||
        (g->data->has_tokenizer && tokenizer_is_end(&g->data->tokenizer, next))) {
        sequence->end = GENERATOR_EOT;
        return;
    }
    sequence->ids[sequence->count++] = next;
    sequence->generated++;
    generator_write_(g, &sequence->stream, next, sequence->count == 1 + (sequence->ids[0] == g->eot));
    sequence->end = sequence->stream.is_stopped              ? GENERATOR_STRING
                    : sequence->generated == sequence->limit ? GENERATOR_TOKENS
                                                             : STILL_GENERATING;
}

static void generator_read_(Generator* g, int slot) {
    GeneratorSequence* sequence = &g->sequences[slot];
    generator_draw_(g, sequence, g->model.prefill(g->model.model, slot, sequence->ids, sequence->count));
}

void generator_begin(Generator* g, int slot, const int* prompt, int count, int limit, Rand* rng) {
    GeneratorSequence* sequence = &g->sequences[slot];
    assert(!sequence->in_use && count <= g->model.T && limit > 0);
    sequence->in_use = 1;
    sequence->end = STILL_GENERATING;
    sequence->count = count;
    sequence->generated = 0;
    sequence->limit = limit;
    sequence->rng = rng;
    memcpy(sequence->ids, prompt, (size_t)count * sizeof(int));
    generator_read_(g, slot);
}

// Reads a sequence again, without the older half if its context is full.
static void generator_reread_(Generator* g, int slot) {
    GeneratorSequence* sequence = &g->sequences[slot];
    const int dropped = sequence->count > g->model.T ? g->model.T / 2 + 1 : 0;
    sequence->count -= dropped;
    memmove(sequence->ids, sequence->ids + dropped, (size_t)sequence->count * sizeof(int));
    generator_read_(g, slot);
}

static int generator_is_generating_(const GeneratorSequence* sequence) {
    return sequence->in_use && sequence->end == STILL_GENERATING;
}

void generator_advance(Generator* g) {
    const GeneratorModel* m = &g->model;
    int steps = 0;
    for (int s = 0; s < m->slots; s++) {
        const GeneratorSequence* sequence = &g->sequences[s];
        const int is_one =
            // else empty, or all is read again
            generator_is_generating_(sequence) && sequence->count <= m->T &&
            sequence->count - 1 != m->rereads_at;
        g->ids[s] = is_one ? sequence->ids[sequence->count - 1] : 0;
        g->positions[s] = is_one ? sequence->count - 1 : 0;
        steps += is_one;
    }
    const float* logits = steps ? m->decode(m->model, g->ids, g->positions, m->slots) : NULL;
    for (int s = 0; s < m->slots && steps; s++) { // before prefill, which overwrites the logits
        if (g->positions[s] > 0) {
            generator_draw_(g, &g->sequences[s], logits + (size_t)s * (size_t)m->Vp);
        }
    }
    for (int s = 0; s < m->slots; s++) {
        if (g->positions[s] == 0 && generator_is_generating_(&g->sequences[s])) {
            generator_reread_(g, s);
        }
    }
}

// Generates the sample in slot 0, with its prompt. Returns 0 if the run should stop.
static int generator_sample_(Generator* g, GeneratorStop stop, void* run) {
    GeneratorSequence* sequence = &g->sequences[0];
    text_stream_begin(&sequence->stream);
    for (int i = g->prompt[0] == g->eot; i < g->prompt_tokens;
         i++) { // end-of-text before the prompt is not shown
        generator_write_(g, &sequence->stream, g->prompt[i], i == (g->prompt[0] == g->eot));
    }
    if (stop(run)) {
        return 0;
    }
    generator_begin(g, 0, g->prompt, g->prompt_tokens, g->options->samples.tokens, &g->rng);
    while (sequence->end == STILL_GENERATING && !stop(run)) {
        generator_advance(g);
    }
    sequence->in_use = 0;
    return sequence->end != STILL_GENERATING;
}

int generator_log(Generator* g, RunLog* log, int64_t step, GeneratorStop stop, void* run) {
    const uint64_t before = g->rng.at;
    const GeneratorSequence* sequence = &g->sequences[0];
    for (int i = 0; i < g->options->samples.count; i++) {
        if (!generator_sample_(g, stop, run)) {
            rand_seek(&g->rng, before);
            return 0;
        }
        if (sequence->end == GENERATOR_DIVERGED) { // the next step will also notice
            log_note(log, "no sample: the model's logits are not finite");
        } else {
            log_sample(log, step, sequence->stream.bytes, sequence->stream.count);
        }
    }
    return 1;
}

#endif // GENERATOR_IMPLEMENTATION

#endif
