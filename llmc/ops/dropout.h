/*
dropout.h -- dropout: in training some elements become 0, at random, and the others are scaled up.
The contract, and the CPU version.

    m = 0 with probability p, else 1 / (1 - p)

    out, inp     (R, C)    out[r][c] = factor m inp[r][c]; the gradient of inp is the same function
    weights      of attention: p[t][u] m (attention.h)

No mask is kept: m is a function of the seed, the update, the place in the model, the row of the
data, the position in it, and the column. So recomputation, any micro-batch, any ranks and a resumed
run find the same one. The random bits are Philox's (rand.h):

    key        a hash of the seed and the update
    counter    place 2^96 + row 2^64 + position 2^32 + column / 4, of which word column mod 4 counts

    place      the embeddings; the branch of a block, by the depth of the block; for weights of
               attention the depth and the head of the whole model; so shared layers differ
    row        number of the row in the update, of all micro-batches and ranks. If rows are cut into
               shorter sequences, positions count from the start of the row
    column     the channel, or the position of the key in its sequence

Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", 2014; on the
weights of attention as in Vaswani et al., 2017.
*/
#ifndef LLMC_DROPOUT_H
#define LLMC_DROPOUT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/host_device.h"
#include "llmc/base/rand.h"
#include "llmc/base/token_chunks.h"

#ifdef __cplusplus
extern "C" {
#endif

// Random numbers of a micro-batch of training.
typedef struct {
    uint64_t key;  // of the seed and the update
    int64_t first; // number of its first row in the update
    int pieces;    // sequences that each row is cut into
} DropoutBatch;

// A dropout of a tensor in a pass; zeros: none.
typedef struct {
    const DropoutBatch* batch; // where the tensor is; NULL: no dropout
    uint32_t place;
    uint32_t threshold; // words below it become 0
    float scale;        // 1 / (1 - p)
    TokenChunks chunks; // of sequences
    int T;              // tokens of each
    int first;          // token of the pass that is row 0 of the tensor
} Dropout;

// A row of the counter: its upper half, and the lower one of column 0.
typedef struct {
    uint64_t stream, counter;
} DropoutRow;

// Returns the key of an update; never 0.
static inline uint64_t dropout_key(uint64_t seed, int64_t update) {
    const RandBlock block = rand_block(seed, rand_stream("dropout"), (uint64_t)update);
    const uint64_t key = (uint64_t)block.word[1] << 32 | block.word[0];
    return key > 0 ? key : 1;
}

// Return places: of the embeddings; of branch 0 (attention) or 1 (the MLP) of the block at depth l;
// of head h of its attention.
static inline uint32_t dropout_of_embedding(void) { return 0; }
static inline uint32_t dropout_of_branch(int l, int branch) { return 1 + 2 * (uint32_t)l + (uint32_t)branch; }
HOST_DEVICE uint32_t dropout_of_head(int l, int h) { return (uint32_t)(l + 1) << 16 | (uint32_t)h; }

// Returns the dropout with probability p of a tensor; none if `batch` is NULL or p is 0.
static inline Dropout dropout_open(const DropoutBatch* batch, float p, uint32_t place, TokenChunks chunks,
                                   int T, int first) {
    const Dropout none = {NULL, 0, 0, 1, {0, 0}, 0, 0},
                  dropout = {batch, place, (uint32_t)((double)p * 0x1p32), 1 / (1 - p), chunks, T, first};
    return batch && p > 0 ? dropout : none;
}

// Returns true if anything can become 0.
HOST_DEVICE int dropout_is_on(const Dropout* d) { return d->batch != NULL; }

// Returns the row of the counter for row r of the tensor.
HOST_DEVICE DropoutRow dropout_row(const Dropout* d, int r) {
    const DropoutBatch* batch = d->batch;
    const int n = d->first + r, b = n / d->T, W = token_chunks_length(d->chunks, d->T);
    const uint64_t row = (uint64_t)batch->first + (uint64_t)(b / batch->pieces),
                   position = (uint64_t)(b % batch->pieces) * (uint64_t)W +
                              (uint64_t)token_chunks_position(d->chunks, n % d->T, d->T);
    const DropoutRow at = {(uint64_t)d->place << 32 | row, position << 32};
    return at;
}

// Returns m for a random word.
HOST_DEVICE float dropout_factor(const Dropout* d, uint32_t word) {
    return word >= d->threshold ? d->scale : 0.0f;
}

// Returns the bytes of memory traffic of a pass over n elements.
static inline double dropout_bytes(double n, double element_bytes) { return 2 * n * element_bytes; }

// Sets factors[i] to m of row r and column `column` + i, 0 <= i < count. `column` is a multiple of
// 4.
void dropout_factors_cpu(float* factors, const Dropout* d, int r, int column, int count);

// Sets row r, `out` (C), to residual + factor m inp; residual may be NULL, and out may be either.
void dropout_row_cpu(float* out, const float* residual, const float* inp, const Dropout* d, float factor,
                     int r, int C);

// Sets out (R, C) = factor m inp; out may be inp.
void dropout_cpu(float* out, const float* inp, const Dropout* d, float factor, int R, int C);

#ifdef __cplusplus
}
#endif

#ifdef DROPOUT_IMPLEMENTATION

#include "llmc/base/sizes.h"

enum { DROPOUT_BLOCKS_ = 16, DROPOUT_WORDS_ = 4 * DROPOUT_BLOCKS_ }; // at a time

// Sets words[w][i] to word w of block `counter` + i, in a loop that compilers turn into vectors.
static void dropout_blocks_(uint32_t words[4][DROPOUT_BLOCKS_], uint64_t key, uint64_t stream,
                            uint64_t counter) {
    for (int i = 0; i < DROPOUT_BLOCKS_; i++) {
        const RandBlock block = rand_block(key, stream, counter + (uint64_t)i);
        for (int w = 0; w < 4; w++) {
            words[w][i] = block.word[w];
        }
    }
}

void dropout_factors_cpu(float* factors, const Dropout* d, int r, int column, int count) {
    const DropoutRow at = dropout_row(d, r);
    uint32_t words[4][DROPOUT_BLOCKS_];
    float m[DROPOUT_WORDS_];
    for (int i = 0; i < count; i += DROPOUT_WORDS_) {
        dropout_blocks_(words, d->batch->key, at.stream, at.counter + (uint64_t)(column + i) / 4);
        for (int k = 0; k < DROPOUT_BLOCKS_; k++) {
            for (int w = 0; w < 4; w++) {
                m[4 * k + w] = dropout_factor(d, words[w][k]);
            }
        }
        memcpy(factors + i, m, (size_t)int_min(DROPOUT_WORDS_, count - i) * sizeof(float));
    }
}

void dropout_row_cpu(float* out, const float* residual, const float* inp, const Dropout* d, float factor,
                     int r, int C) {
    float m[DROPOUT_WORDS_];
    for (int c0 = 0; c0 < C; c0 += DROPOUT_WORDS_) {
        const int count = int_min(DROPOUT_WORDS_, C - c0);
        dropout_factors_cpu(m, d, r, c0, count);
        for (int i = 0; i < count; i++) {
            out[c0 + i] = multiply_add(factor * m[i], inp[c0 + i], residual ? residual[c0 + i] : 0.0f);
        }
    }
}

void dropout_cpu(float* out, const float* inp, const Dropout* d, float factor, int R, int C) {
#pragma omp parallel for schedule(static)
    for (int r = 0; r < R; r++) {
        dropout_row_cpu(out + (size_t)r * C, NULL, inp + (size_t)r * C, d, factor, r, C);
    }
}

#endif // DROPOUT_IMPLEMENTATION

#endif
