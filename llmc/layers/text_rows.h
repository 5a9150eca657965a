/*
text_rows.h -- what a model reads when it generates, and the activations that this takes; on the CPU and the GPU.

A new sequence is read whole. Then one token of each sequence is read at a time, at its own position: attention sees the
keys and values that were kept of the tokens before it.
*/
#ifndef LLMC_TEXT_ROWS_H
#define LLMC_TEXT_ROWS_H

#include "llmc/base/memory.h"
#include "llmc/model/model.h"

// Rows of tokens that are read together: the tokens of a sequence that is new, or one token of each sequence.
typedef struct {
    const int* ids;
    int count;
    int sequence;         // that is read, from its first token on; or
    const int* positions; // the place of each token in its sequence: row r is of sequence r
} SequenceRows;

// The rows of the activations for `sequences` of up to T tokens, and their bytes.
static inline size_t decoder_activation_rows(TensorRow rows[MODEL_ACTIVATION_ROWS], ModelConfig cfg,
                                             int sequences, int T) {
    return model_activation_rows(rows, cfg, sequences, T, RECOMPUTE_NEVER, cfg.L, 0, (size_t)sequences);
}

// Counts the activations of a run that trains with `trained` bytes, and returns their bytes: it generates in the same memory,
// in turns. Without training (0), keys and values are counted apart.
static inline size_t decoder_count_activations(Memory* memory, ModelConfig cfg, int sequences, int T,
                                               size_t trained) {
    TensorRow rows[MODEL_ACTIVATION_ROWS];
    const size_t bytes = decoder_activation_rows(rows, cfg, sequences, T),
                 most = trained > bytes ? trained : bytes;
    size_t kv = 0;
    for (int i = 0; i < MODEL_ACTIVATION_ROWS && trained == 0; i++) {
        kv += rows[i].member == offsetof(ModelActivations, kv)
                  ? tensor_elements(&rows[i]) * rows[i].element_bytes
                  : 0;
    }
    memory_count(memory, "keys and values", MEMORY_DEVICE, kv);
    memory_count(memory, "activations", MEMORY_DEVICE, most - kv);
    return most;
}

#endif
