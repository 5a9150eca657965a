/*
decode.h -- a model's input when it generates, and the activations that this takes; on the CPU
and the GPU.

    prefill    forgets sequence number `sequence` and reads `count` <= T tokens of a new one
    step       reads one more token of each sequence, ids[i] at positions[i]

The model's forward pass takes either. The logits of a sequence depend on its own tokens alone, bit
for bit.
*/
#ifndef LLMC_DECODE_H
#define LLMC_DECODE_H

#include <string.h>

#include "llmc/base/memory.h"
#include "llmc/model/model.h"
#include "llmc/layers/pass.h"

typedef struct {
    int sequences, T; // at a time; tokens of each at most
    TensorRow rows[MODEL_ACTIVATION_ROWS];
    ModelActivations acts; // with the keys and values of all sequences
} Decoder;

// Sets the rows of the activations for `sequences` of up to T tokens; returns their bytes.
static inline size_t decoder_activation_rows(TensorRow rows[MODEL_ACTIVATION_ROWS], ModelConfig cfg,
                                             int sequences, int T) {
    return model_activation_rows(rows, cfg, sequences, T, RECOMPUTE_NEVER, cfg.L, 0, (size_t)sequences);
}

// Counts the activations of a run that trains with `trained` bytes, and returns their bytes: it
// decodes in the same memory, in turns. Without training (0), keys and values are counted apart.
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

// `memory` has room for decoder_activation_rows. Training does not need it between two steps.
static inline void decoder_bind(Decoder* decoder, ModelConfig cfg, int sequences, int T, void* memory) {
    decoder->sequences = sequences;
    decoder->T = T;
    decoder_activation_rows(decoder->rows, cfg, sequences, T);
    tensor_rows_bind(&decoder->acts, decoder->rows, MODEL_ACTIVATION_ROWS, memory);
}

static inline Pass decoder_pass_(const Decoder* decoder, const int* ids, int B, int T) {
    Pass pass;
    memset(&pass, 0, sizeof(pass));
    pass.inputs = ids;
    pass.B = B;
    pass.T = T;
    pass.acts = &decoder->acts;
    pass.activation_rows = decoder->rows;
    pass.cached = decoder->T;
    return pass;
}

static inline Pass decoder_prefill_pass(const Decoder* decoder, int sequence, const int* ids, int count) {
    Pass pass = decoder_pass_(decoder, ids, 1, count);
    pass.sequence = sequence;
    return pass;
}

static inline Pass decoder_step_pass(const Decoder* decoder, const int* ids, const int* positions,
                                     int sequences) {
    Pass pass = decoder_pass_(decoder, ids, sequences, 1);
    pass.positions.given = positions;
    return pass;
}

#endif
