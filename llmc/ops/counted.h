/*
counted.h -- which tokens of a batch count in a sum over tokens, and with which weight.

The sequences of a batch are padded to one length, and some of their tokens have no target
(cross_entropy.h). Each mean that a run takes over tokens is one of two kinds. Both divide by the
count of the whole step: all micro-batches of all ranks.

    over targets   loss, z-loss of the classifier, divergence from a teacher   tokens with a target
    over tokens    router: balance, z-loss, loads, entropy                     tokens, no padding

In the gradient of a step a target weighs dloss, and a token dloss times targets / tokens. So
neither padding nor the number of learned tokens changes the weight of a router's loss, and no mean
depends on how a step is divided into micro-batches.

A document is a part of a sequence. Without `starts`, the sequence is one document.
*/
#ifndef LLMC_COUNTED_H
#define LLMC_COUNTED_H

#include <stddef.h>

#include "llmc/base/host_device.h"
#include "llmc/base/token_chunks.h"

// B sequences of W tokens; a rank has T tokens of each. All zeros: every token has a target.
typedef struct {
    const int* lengths;             // (B) tokens of each sequence, the rest is padding; NULL: W
    const int* starts;              // (B, W) start of each token's document, ascending; or NULL
    const float* targets_per_token; // of the step, one number in the memory of lengths; NULL: 1
    TokenChunks chunks;             // the tokens that the rank has
} Counted;

// Returns true if token t of the rank's T in sequence b is no padding.
HOST_DEVICE int counted_is_token(const Counted* c, int b, int t, int T) {
    return !c->lengths || token_chunks_position(c->chunks, t, T) < c->lengths[b];
}

// Returns the weight of a token, where a target weighs dloss.
HOST_DEVICE float counted_token_weight(const Counted* c, float dloss) {
    return c->targets_per_token ? dloss * *c->targets_per_token : dloss;
}

// Tokens begin ... end - 1 of a sequence.
typedef struct {
    int begin, end;
} CountedSpan;

// Returns the document of token t, no padding, in sequence b of T tokens, which the rank has whole.
HOST_DEVICE CountedSpan counted_document(const Counted* c, int b, int t, int T) {
    const int* starts = c->starts ? c->starts + (size_t)b * (size_t)T : NULL;
    const int begin = starts ? starts[t] : 0, length = c->lengths ? c->lengths[b] : T;
    int low = t + 1, high = length; // the end is in low ... high
    while (starts && low < high) {
        const int middle = low + (high - low) / 2;
        if (starts[middle] > begin) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    const CountedSpan document = {begin, high};
    return document;
}

#endif
