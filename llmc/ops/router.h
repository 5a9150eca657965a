/*
router.h -- which experts each token takes, and with which weight.

    logits (N, E) = inp routerw^T                        in fp32
    ROUTER_CHOSEN    the E_used largest logits; weights: softmax over these
    ROUTER_SOFTMAX   the E_used largest logits; weights: softmax over all E, not divided again
    ROUTER_SIGMOID   the E_used largest s + bias, s = sigmoid(logits); weights: factor s / sum of s

Of equal scores the lower expert comes first, so the choice is the same on every platform.

The rows of the experts' matrices are sorted by expert, and by token within an expert. Each expert's
rows are filled up to a multiple of 32 with rows of zeros, whose place is -1.
*/
#ifndef LLMC_ROUTER_H
#define LLMC_ROUTER_H

#include <stddef.h>

typedef enum { ROUTER_NONE, ROUTER_CHOSEN, ROUTER_SOFTMAX, ROUTER_SIGMOID } RouterKind;

enum { ROUTER_TILE = 32, ROUTER_MAX_USED = 16 };

// Returns the most rows that N tokens have in all experts, a multiple of ROUTER_TILE.
static inline size_t router_rows(size_t N, int E, int used) {
    const size_t rows = N * (size_t)used, padding = (size_t)E * (ROUTER_TILE - 1);
    return (rows + padding) / ROUTER_TILE * ROUTER_TILE;
}

#endif
