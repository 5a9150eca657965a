/*
pass.h -- a pass through the model: the tokens that it reads, and the activations that it leaves;
on the CPU and the GPU.

    training, evaluation    a batch: B sequences of T tokens, or a rank's T tokens of each
    prefill                 all tokens of one new sequence; keys and values are kept (decode.h)
    a step of decoding      one token of each sequence, at its own position, which sees those kept
*/
#ifndef LLMC_PASS_H
#define LLMC_PASS_H

#include "llmc/base/host_device.h"
#include "llmc/base/token_chunks.h"
#include "llmc/data/dataloader.h"
#include "llmc/model/model.h"
#include "llmc/ops/counted.h"
#include "llmc/ops/dropout.h"
#include "llmc/ops/embedding.h"

typedef struct {
    const int *inputs, *targets; // (B, T); no targets without losses
    // (B, W), of whole sequences: first token that attention sees; NULL: the first of the sequence
    const int* starts;
    // (B) tokens of each whole sequence, the rest is padding; NULL: all. And counted.h's factor
    const int* lengths;
    const float* targets_per_token;
    int B, T;
    EmbeddingPositions positions; // and which tokens of their sequences these are
    const ModelActivations* acts;
    const TensorRow* activation_rows; // their layout
    // tokens of a sequence that the cache has room for; 0: no cache
    int cached;
    int sequence; // prefill: its place in the cache
    // of a pass in training, where the model is; NULL: no dropout
    const DropoutBatch* dropout;
} Pass;

// Returns the random numbers for a batch, which has them in training (Batch.random).
static inline DropoutBatch pass_random(Batch batch) {
    const DropoutBatch random = {batch.random, batch.first, batch.pieces};
    return random;
}

// Returns the pass over a batch, whose arrays are where the model is. Positions count from the
// first token of each sequence.
static inline Pass pass_of_batch(Batch batch, const ModelActivations* acts, const TensorRow* rows,
                                 const float* targets_per_token, const DropoutBatch* dropout) {
    const EmbeddingPositions positions = {NULL, NULL, batch.chunks};
    const Pass pass = {batch.inputs,
                       batch.targets,
                       batch.starts,
                       batch.lengths,
                       targets_per_token,
                       batch.B,
                       batch.T,
                       positions,
                       acts,
                       rows,
                       0,
                       0,
                       dropout};
    return pass;
}

static inline int pass_tokens(const Pass* pass) { return pass->B * pass->T; }

// Returns the dropout of a tensor whose row 0 is token `first` of the pass.
static inline Dropout pass_dropout(const Pass* pass, float p, uint32_t place, int first) {
    return dropout_open(pass->dropout, p, place, pass->positions.chunks, pass->T, first);
}

// Returns true for a step of decoding: row r is a token of sequence r.
static inline int pass_is_step(const Pass* pass) { return pass->cached && pass->positions.given; }

// Returns which tokens of a pass count in sums.
static inline Counted pass_counted(const Pass* pass) {
    const Counted counted = {pass->lengths, pass->starts, pass->targets_per_token, pass->positions.chunks};
    return counted;
}

// Returns W, the length of the sequences, which a rank may have only a part of.
static inline int pass_length(const Pass* pass) {
    return token_chunks_length(pass->positions.chunks, pass->T);
}

// Returns the first token that token t sees through a window of the last `window` tokens, in a
// document that starts at `start`.
HOST_DEVICE int pass_window_start(int t, int start, int window) {
    const int first = t - window + 1;
    return first > start ? first : start;
}

// Sets the first token that attention sees in layers with a window, for each token of the sequences
// of a pass. A step of decoding needs none, nor does a model without windows (NULL).
static inline void pass_window_starts_cpu(int* starts, const Pass* pass, int window) {
    const int W = pass_length(pass), N = starts && !pass_is_step(pass) ? pass->B * W : 0;
    for (int n = 0; n < N; n++) {
        starts[n] = pass_window_start(n % W, pass->starts ? pass->starts[n] : 0, window);
    }
}

#endif
