/*
text_rows.h -- what a model reads when it generates, and the activations that this takes; on the CPU and the GPU.

A new text is read whole. Then one token of each text is read at a time, at its own position: attention sees the
keys and values that were kept of the tokens before it.
*/
#ifndef LLMC_TEXT_ROWS_H
#define LLMC_TEXT_ROWS_H

#include "llmc/model/model.h"

// Rows of tokens that are read together: the tokens of a text that is new, or one token of each text.
typedef struct {
    const int* ids;
    int count;
    int text;             // that is read, from its first token on; or
    const int* positions; // the place of each token in its text: row r is of text r
} TextRows;

// The rows of the activations for `texts` of up to T tokens, and their bytes.
static inline size_t text_activation_rows(TensorRow rows[MODEL_ACTIVATION_ROWS], ModelConfig cfg, int texts,
                                          int T) {
    return model_activation_rows(rows, cfg, texts, T, RECOMPUTE_NEVER, cfg.L, 0, (size_t)texts);
}

#endif
