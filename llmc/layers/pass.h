/*
pass.h -- a pass through the model: the tokens that it reads, and the activations that it leaves;
on the CPU and the GPU.

    training, evaluation    a batch: B sequences of T tokens
    prefill                 all tokens of one new sequence; keys and values are kept (decode.h)
    a step of decoding      one token of each sequence, at its own position, which sees those kept
*/
#ifndef LLMC_PASS_H
#define LLMC_PASS_H

#include "llmc/model/model.h"
#include "llmc/ops/embedding.h"

typedef struct {
    const int *inputs, *targets; // (B, T); no targets without losses
    // (B, T): first token that attention sees; NULL: the first of the sequence
    const int* starts;
    int B, T;
    EmbeddingPositions positions;
    const ModelActivations* acts;
    const TensorRow* activation_rows; // their layout
    // tokens of a sequence that the cache has room for; 0: no cache
    int cached;
    int sequence; // prefill: its place in the cache
} Pass;

static inline int pass_tokens(const Pass* pass) { return pass->B * pass->T; }

// Sets the first token that attention sees through a window of the last `window` tokens.
static inline void pass_window_starts(int* starts, const Pass* pass, int window) {
    for (int n = 0; n < pass_tokens(pass); n++) {
        const int first = n % pass->T - window + 1, start = pass->starts ? pass->starts[n] : 0;
        starts[n] = first > start ? first : start;
    }
}

// Returns true for a step of decoding: row r is a token of sequence r.
static inline int pass_is_step(const Pass* pass) { return pass->cached && pass->positions.given; }

#endif
