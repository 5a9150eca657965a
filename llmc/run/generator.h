/*
generator.h -- texts sampled from a model: a prompt, then token after token until the document ends.

The model is a function: given the first `known` tokens, the first `seen` of which it saw in the previous
call, it returns the logits (V, fp32, on the host) of the token that follows. When the T tokens of its context
are full, the older half is forgotten and the rest is read again, at its new positions.

defines: NextLogits, GeneratorStop, Generator, generator_open, generator_close, generator_log
*/
#ifndef LLMC_GENERATOR_H
#define LLMC_GENERATOR_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "llmc/base/rand.h"
#include "llmc/run/log.h"
#include "llmc/run/options.h"
#include "llmc/run/sampler.h"
#include "llmc/run/setup.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef const float* (*NextLogits)(void* model, const int* ids, int known, int seen);

// Whether the run is to stop; asked before each token.
typedef int (*GeneratorStop)(void* run);

enum { GENERATOR_NUMBER_BYTES = 16 }; // an id as text

typedef struct {
    NextLogits next_logits;
    void* model;
    int V, T;
    const RunData* data;
    const Options* options;
    Sampler sampler;
    Rand rng;
    int eot;
    int *prompt, prompt_tokens; // (T + 1)
    int* ids;                   // (T + 1) what the model sees
    char* text;                 // what it wrote, after the prompt
    size_t text_bytes, text_capacity;
} Generator;

// For a model with a vocabulary of V and a context of T. `data` and `options` must stay.
void generator_open(Generator* g, NextLogits next_logits, void* model, int V, int T, const RunData* data,
                    const Options* options);

void generator_close(Generator* g);

// As many texts as --samples says, each to the log. Returns 0 if the run is to stop: the random numbers are
// then where they were before, and all texts are to be sampled again.
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

void generator_open(Generator* g, NextLogits next_logits, void* model, int V, int T, const RunData* data,
                    const Options* options) {
    memset(g, 0, sizeof(*g));
    g->next_logits = next_logits;
    g->model = model;
    g->V = V;
    g->T = T;
    g->data = data;
    g->options = options;
    sampler_open(&g->sampler, V);
    g->rng = rand_open(options->seed, rand_stream("samples"));
    g->eot = setup_eot(data, V);
    g->prompt = (int*)check_alloc((size_t)T + 1, sizeof(int), "prompt");
    g->prompt_tokens = setup_prompt(g->prompt, T, data, options, V);
    g->ids = (int*)check_alloc((size_t)T + 1, sizeof(int), "sample");
    const int longest = data->has_tokenizer ? tokenizer_longest(&data->tokenizer) : 0;
    const size_t tokens = (size_t)options->sample_tokens + (size_t)g->prompt_tokens;
    g->text_capacity = tokens * (size_t)(longest > GENERATOR_NUMBER_BYTES ? longest : GENERATOR_NUMBER_BYTES);
    g->text = (char*)check_alloc(g->text_capacity, 1, "sample");
}

void generator_close(Generator* g) {
    free(g->text);
    free(g->ids);
    free(g->prompt);
    sampler_close(&g->sampler);
}

// Adds a token to the text; its number if there is no tokenizer, or it does not know the token.
static void generator_append_(Generator* g, int id) {
    char number[GENERATOR_NUMBER_BYTES];
    int length = snprintf(number, sizeof(number), "%d ", id);
    const char* token = number;
    if (g->data->has_tokenizer && id < g->data->tokenizer.vocab_size) {
        token = tokenizer_decode(&g->data->tokenizer, id, &length);
    }
    assert(g->text_bytes + (size_t)length <= g->text_capacity);
    memcpy(g->text + g->text_bytes, token, (size_t)length);
    g->text_bytes += (size_t)length;
}

// How a text ended: as it should, because the run is to stop, or because no token could be drawn.
typedef enum { GENERATOR_DONE_, GENERATOR_STOPPED_, GENERATOR_DIVERGED_ } GeneratorEnd_;

// Sets g->text: the prompt and up to --sample-tokens more, ending with the document.
static GeneratorEnd_ generator_sample_(Generator* g, GeneratorStop stop, void* run) {
    const Options* o = g->options;
    int known = g->prompt_tokens, seen = 0;
    memcpy(g->ids, g->prompt, (size_t)known * sizeof(int));
    g->text_bytes = 0;
    for (int i = 1; i < known; i++) {
        generator_append_(g, g->ids[i]);
    }
    for (int i = 0; i < o->sample_tokens; i++) {
        if (known > g->T) {
            known -= g->T / 2 + 1;
            memmove(g->ids, g->ids + g->T / 2 + 1, (size_t)known * sizeof(int));
            seen = 0;
        }
        if (stop(run)) {
            return GENERATOR_STOPPED_;
        }
        const float* logits = g->next_logits(g->model, g->ids, known, seen);
        if (!sampler_can_draw(logits, g->V)) {
            return GENERATOR_DIVERGED_;
        }
        const int next = sampler_next(logits, g->V, o->temperature, o->top_k, o->top_p,
                                      (float)rand_uniform(&g->rng), &g->sampler);
        if (next == g->eot) {
            break;
        }
        seen = known;
        g->ids[known++] = next;
        generator_append_(g, next);
    }
    return GENERATOR_DONE_;
}

int generator_log(Generator* g, RunLog* log, int64_t step, GeneratorStop stop, void* run) {
    const uint64_t before = g->rng.at;
    for (int i = 0; i < g->options->samples; i++) {
        const GeneratorEnd_ end = generator_sample_(g, stop, run);
        if (end == GENERATOR_STOPPED_) {
            rand_seek(&g->rng, before);
            return 0;
        }
        if (end == GENERATOR_DIVERGED_) { // which the next update will find out, too
            log_note(log, "no sample: the model's logits are not finite");
        } else {
            log_sample(log, step, g->text, g->text_bytes);
        }
    }
    return 1;
}

#endif // GENERATOR_IMPLEMENTATION

#endif
