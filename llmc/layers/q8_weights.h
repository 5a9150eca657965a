/*
q8_weights.h -- a model whose matrices are in 8 bits (q8.h), for --quantize. Inference only.

    wte, qkvw, qupw, kvupw, attprojw, fcw, fcprojw, sfcw, sfcprojw, head
                  blocks: a tensor of (rows, cols / 32) elements of 34 bytes
    all others    as they are without

The rows of the parameters say so, and members of ModelParameters point to the blocks. On a GPU a
layer of a matrix takes as many bytes, as q8.cuh lays them out. The columns of each matrix must be a
multiple of 32.

    encoded[n] = wte[tokens[n]] + wpe[position of n]

    encoded (N, C)   tokens (N)   wte (Vp, C / 32) blocks   wpe (maxT, C)
*/
#ifndef LLMC_Q8_WEIGHTS_H
#define LLMC_Q8_WEIGHTS_H

#include <assert.h>
#include <stddef.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/float16.h"
#include "llmc/base/enum_words.h"
#include "llmc/ops/embedding.h"
#include "llmc/model/model.h"
#include "llmc/ops/q8.h"

// --quantize
// clang-format off
#define QUANTIZE_WORDS(X) X(QUANTIZE_OFF, "off") X(QUANTIZE_Q8_0, "q8_0")
// clang-format on
typedef enum { QUANTIZE_WORDS(WORDS_VALUE) } Quantize;

// Returns true for the matrices of matmuls; wpe is only added.
static inline int quantized_is_matrix(const TensorRow* row) {
    return row->kind == KIND_MATRIX || row->init == INIT_VOCAB;
}

// Returns 0, or the columns of a matrix that do not fill blocks: C, those of attention's result, F,
// an expert's or the shared one's, a mixer's, or a latent's.
static inline int quantized_unfit_columns(ModelConfig cfg) {
    const int cols[] = {cfg.C,  model_attention_values(cfg), model_hidden(cfg),     model_expert_hidden(cfg),
                        cfg.Fs, model_mixer_values(cfg),     cfg.latent.query_rank, cfg.latent.rank};
    for (size_t i = 0; i < sizeof(cols) / sizeof(cols[0]); i++) {
        if (!quantized_fits((size_t)cols[i])) {
            return cols[i];
        }
    }
    return 0;
}

// Sets the rows of the parameters, and returns their bytes; parameters that stay as they are have
// elements of `element_bytes`.
static inline size_t quantized_parameter_rows(TensorRow rows[MODEL_PARAMETER_ROWS], ModelConfig cfg,
                                              size_t element_bytes) {
    model_parameter_rows_of(rows, cfg, element_bytes);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (quantized_is_matrix(&rows[i])) {
            assert(quantized_fits(rows[i].cols));
            rows[i].cols /= QUANTIZED_BLOCK;
            rows[i].element_bytes = sizeof(QuantizedBlock);
        }
    }
    return tensor_rows_layout(rows, MODEL_PARAMETER_ROWS);
}

// Encodes a matrix of `elements` numbers, whose rows are multiples of a block.
static inline void quantized_encode_matrix(QuantizedBlock* out, const float* x, size_t elements) {
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < elements / QUANTIZED_BLOCK; b++) {
        quantized_encode(out + b, x + b * QUANTIZED_BLOCK, QUANTIZED_BLOCK);
    }
}

// Sets a tensor of a model, or a layer of it, at its place `to`, from `elements` numbers.
typedef void (*QuantizedSet)(const void* model, void* to, const float* from, size_t elements);

// The parameters of a model, laid out by `rows`, and how they are set.
typedef struct {
    const void* model;
    const TensorRow* rows;
    void* memory;
    QuantizedSet set_blocks, set_floats;
} QuantizedParameters;

// Ends the program if a weight of a matrix is finite, and would not be in 8 bits.
static inline void quantized_check_(const TensorRow* row, int copy, const float* from, size_t elements) {
    const size_t bad = float16_find_beyond(from, elements, QUANTIZED_OVERFLOW);
    CHECK(bad == elements,
          "--quantize q8_0: element %zu of %s, copy %d, is %g, wanted less than %g; --quantize off works",
          bad, row->name, copy, (double)from[bad], (double)QUANTIZED_OVERFLOW);
}

// Sets the copies of a tensor in group g.
static inline void quantized_set_tensor_(QuantizedParameters to, int g, const TensorRow* to_row,
                                         const TensorRow* row, const float* group) {
    const QuantizedSet set = quantized_is_matrix(row) ? to.set_blocks : to.set_floats;
    const int first = tensor_first_copy_in_group(row, g), end = first + tensor_copies_in_group(row);
    const char* from = (const char*)tensor_in_group(row, group);
    for (int k = first; k < end; k++, from += row->layer_bytes) {
        if (set == to.set_blocks) {
            quantized_check_(row, k, (const float*)from, tensor_layer_elements(row));
        }
        set(to.model, tensor_at_layer(to_row, to.memory, k), (const float*)from, tensor_layer_elements(row));
    }
}

// Sets group g from fp32 values in memory that has only this group, laid out by `rows`.
static inline void quantized_set_group(QuantizedParameters to, int g, const TensorRow* rows,
                                       const float* group) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (tensor_is_in_group(&rows[i], g)) {
            quantized_set_tensor_(to, g, &to.rows[i], &rows[i], group);
        }
    }
}

static inline void quantized_set_blocks_(const void* model, void* to, const float* from, size_t elements) {
    (void)model;
    quantized_encode_matrix((QuantizedBlock*)to, from, elements);
}

static inline void quantized_set_floats_(const void* model, void* to, const float* from, size_t elements) {
    (void)model;
    memcpy(to, from, elements * sizeof(float));
}

// Sets group g of parameters on the host, laid out by `rows`, from fp32 values that are alone in
// memory.
static inline void quantized_set_group_cpu(const TensorRow* rows, void* memory, ModelConfig cfg, int g,
                                           const float* group) {
    const QuantizedParameters to = {NULL, rows, memory, quantized_set_blocks_, quantized_set_floats_};
    TensorRow of_group[MODEL_PARAMETER_ROWS];
    model_parameter_rows_of(of_group, cfg, sizeof(float));
    quantized_set_group(to, g, of_group, group);
}

// Sets the same as embedding_forward_cpu, from blocks of wte.
static inline void q8_embedding_cpu(float* encoded, const int* tokens, const QuantizedBlock* wte,
                                    const float* wpe, EmbeddingBatch batch) {
    const size_t cols = (size_t)batch.C, blocks = cols / QUANTIZED_BLOCK;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < batch.N; n++) {
        const int row = embedding_row(batch.words, tokens[n]);
        float* out = encoded + (size_t)n * cols;
        if (row < 0) {
            memset(out, 0, cols * sizeof(float));
        } else {
            quantized_decode(out, wte + (size_t)row * blocks, cols);
        }
        for (size_t c = 0; c < cols && wpe; c++) {
            out[c] += wpe[(size_t)embedding_position(batch.positions, n, batch.T) * cols + c];
        }
    }
}

#endif
