/*
share.h -- --share-layers: layers with the same parameters.

    off          each layer has its own
    all          all have the same
    attention    all have the same attention, with the norm before it; each its own MLP
    mlp          all have the same MLP, with the norm before it; each its own attention
    pairs        layers 0 and 1 have the same, 2 and 3, ...
    loop:K       layers 0 ... K-1 are repeated: layer l has what layer l mod K has

The computation is that of a model whose layers have equal parameters; the gradient of a parameter is the sum over its
layers. Memory, optimizer state and traffic count each parameter once. Files of models have every layer.

Lan et al., "ALBERT", 2019: all, attention, mlp. Liu et al., "MobileLLM", 2024: pairs.

needs:   nothing
defines: share_parse
*/
#ifndef LLMC_SHARE_H
#define LLMC_SHARE_H

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/gpt2.h"

// K of "loop:K", 0 if the text is nothing like it.
static inline int share_loop_(const char* text) {
    const char *prefix = "loop:", *number = text + strlen(prefix);
    const int is_loop = strncmp(text, prefix, strlen(prefix)) == 0;
    const size_t digits = is_loop ? strspn(number, "0123456789") : 0;
    return 0 < digits && digits < 5 && !number[digits] ? atoi(number) : 0;
}

// Sets GPT2Config's `share` from the option, for a model of L layers. Returns 0 and the reason in `error` if it means nothing
// there.
static inline int share_parse(int* share, int L, const char* text, char* error) {
    static const char* const words[] = {"off", "attention", "mlp", "pairs"}; // of SHARE_OFF, ...
    const int blocks = strcmp(text, "all") == 0 ? 1 : share_loop_(text);
    int word = SHARE_OFF;
    *share = SHARE_OFF;
    while (word < SHARE_LOOP && strcmp(text, words[word]) != 0) {
        word++;
    }
    if (word == SHARE_LOOP && blocks == 0) {
        return error_set(error, "--share-layers",
                         "'%s'; wanted off, all, attention, mlp, pairs or loop:K with K of 1 or more", text);
    }
    if ((word == SHARE_PAIRS && L % 2) || (word == SHARE_LOOP && L % blocks)) {
        return error_set(error, "--share-layers", "%s with %d layers; wanted a multiple of %d", text, L,
                         word == SHARE_PAIRS ? 2 : blocks);
    }
    *share = word == SHARE_LOOP ? SHARE_LOOP + blocks : word;
    return 1;
}

#endif
