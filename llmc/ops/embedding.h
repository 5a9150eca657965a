/*
embedding.h -- token and position embeddings: the contract, and the CPU version.

    out[b][t] = wte[tokens[b][t]] + wpe[position of (b, t)]

    out, dout       (B, T, C)
    tokens          (B, T)      int32, each below V
    wte, dwte       (Vp, C)
    wpe, dwpe       (maxT, C)   T <= maxT; NULL: no position embeddings

Positions are given (B, T), or those in the sequence: t, or of a rank's chunks of sequences of W
tokens the place there (token_chunks.h). With `starts` (B, W) they are counted from the start of the
token's document.

The forward pass sets out. The backward pass (positions in the sequence) sets or adds to dwte
according to `token_mode`, which is ADD if dwte holds the classifier's gradient of a shared weight,
and to dwpe according to `mode`. Setting zeroes the rows of tokens and positions that are not used.
Each of the two may be NULL.

If the vocabulary is cut into slices (part.h), a slice has the rows of wte from `first` on. Its
forward pass sets the rows of other tokens to zeros, and its backward pass skips them. The sum of
all slices is exact; then the positions are added.
*/
#ifndef LLMC_EMBEDDING_H
#define LLMC_EMBEDDING_H

#include <limits.h>
#include <stddef.h>

#include "llmc/base/host_device.h"
#include "llmc/base/token_chunks.h"
#include "llmc/ops/gradient.h"

#ifdef __cplusplus
extern "C" {
#endif

// Positions of a batch: `given`, each below maxT, or those in the sequence, counted from `starts`;
// arrays as above, or NULL.
typedef struct {
    const int *given, *starts;
    TokenChunks chunks;
} EmbeddingPositions;

// Returns the position of row n of (B, T).
HOST_DEVICE int embedding_position(EmbeddingPositions positions, int n, int T) {
    const int t = token_chunks_position(positions.chunks, n % T, T);
    return positions.given    ? positions.given[n]
           : positions.starts ? t - positions.starts[n / T * token_chunks_length(positions.chunks, T) + t]
                              : t;
}

// Sizes of a backward pass: of the batch, and the rows of dwte and of dwpe; which tokens of their
// sequences are in the batch; the token of the first row of dwte.
typedef struct {
    int B, T, C, Vp, maxT;
    TokenChunks chunks;
    int first;
} EmbeddingSizes;

// Vocabulary rows [first, first + count).
typedef struct {
    int first, count;
} EmbeddingWords;

// Sizes of a forward pass: N rows, sequences of T tokens, C columns; their positions; and the rows
// of wte.
typedef struct {
    int N, T, C;
    EmbeddingPositions positions;
    EmbeddingWords words;
} EmbeddingBatch;

// Returns the sizes for a whole vocabulary.
static inline EmbeddingBatch embedding_batch(int B, int T, int C, EmbeddingPositions positions) {
    const EmbeddingBatch batch = {B * T, T, C, positions, {0, INT_MAX}};
    return batch;
}

// Returns the sizes for the vocabulary rows of a slice, without positions.
static inline EmbeddingBatch embedding_slice(int N, int C, EmbeddingWords words) {
    const EmbeddingBatch batch = {N, N, C, {NULL, NULL, {0, 0}}, words};
    return batch;
}

// Returns the row of a token in the matrix of these vocabulary rows; -1: another slice has it.
HOST_DEVICE int embedding_row(EmbeddingWords words, int token) {
    const int row = token - words.first;
    return 0 <= row && row < words.count ? row : -1;
}

// Return the bytes of memory traffic.
static inline double embedding_forward_bytes(double N, double C, double element_bytes) {
    return 2 * N * C * element_bytes + 4 * N; // rows of positions are cached
}

// Each of the two gradients reads dout once; `ids` is the number of different tokens.
static inline double embedding_backward_bytes(double N, double C, double ids, double element_bytes,
                                              double gradient_bytes) {
    return 2 * N * C * element_bytes + 2 * ids * C * gradient_bytes;
}

// wte (words.count, C).
void embedding_forward_cpu(float* out, const int* tokens, const float* wte, const float* wpe,
                           EmbeddingBatch batch);

// Adds the embeddings of positions to out (count, C), the rows of (B, T) from `first` on.
void embedding_positions_cpu(float* out, const float* wpe, int first, int count, int T,
                             EmbeddingPositions positions, int C);

// Each thread owns some columns of every row, so two tokens with the same id never race, and sums
// follow the order of the batch.
void embedding_backward_cpu(float* dwte, float* dwpe, const float* dout, const int* tokens,
                            EmbeddingSizes sizes, GradientMode token_mode, GradientMode mode);

#ifdef __cplusplus
}
#endif

#ifdef EMBEDDING_IMPLEMENTATION

#include <string.h>

#include "llmc/base/sizes.h"
#include "llmc/base/vec.h"

void embedding_forward_cpu(float* out, const int* tokens, const float* wte, const float* wpe,
                           EmbeddingBatch batch) {
    const int C = batch.C;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < batch.N; n++) {
        const int row = embedding_row(batch.words, tokens[n]);
        float* to = out + (size_t)n * C;
        if (row < 0) {
            memset(to, 0, (size_t)C * sizeof(float));
        } else {
            memcpy(to, wte + (size_t)row * C, (size_t)C * sizeof(float));
        }
        if (wpe) {
            const float* position = wpe + (size_t)embedding_position(batch.positions, n, batch.T) * C;
            for (int c = 0; c < C; c++) {
                to[c] += position[c];
            }
        }
    }
}

void embedding_positions_cpu(float* out, const float* wpe, int first, int count, int T,
                             EmbeddingPositions positions, int C) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < count; n++) {
        const float* position = wpe + (size_t)embedding_position(positions, first + n, T) * C;
        for (int c = 0; c < C; c++) {
            out[(size_t)n * C + c] += position[c];
        }
    }
}

// Adds columns c0 ... end - 1 of a row of dout to the row of a gradient that starts at `row`.
static void embedding_add_row_(float* grads, size_t row, const float* dout, int c0, int end) {
    for (int c = c0; grads && c < end; c++) {
        grads[row + (size_t)c] += dout[c];
    }
}

void embedding_backward_cpu(float* dwte, float* dwpe, const float* dout, const int* tokens,
                            EmbeddingSizes sizes, GradientMode token_mode, GradientMode mode) {
    const int block = 2 * LANES, B = sizes.B, T = sizes.T, C = sizes.C;
    const EmbeddingWords words = {sizes.first, sizes.Vp};
    if (dwte && token_mode == GRADIENT_SET) {
        memset(dwte, 0, (size_t)sizes.Vp * C * sizeof(float));
    }
    if (dwpe && mode == GRADIENT_SET) {
        memset(dwpe, 0, (size_t)sizes.maxT * C * sizeof(float));
    }
#pragma omp parallel for schedule(static)
    for (int c0 = 0; c0 < C; c0 += block) {
        const int end = int_min(c0 + block, C);
        for (int n = 0; n < B * T; n++) {
            const int row = embedding_row(words, tokens[n]);
            embedding_add_row_(row < 0 ? NULL : dwte, (size_t)int_max(row, 0) * C, dout + (size_t)n * C, c0,
                               end);
            embedding_add_row_(dwpe, (size_t)token_chunks_position(sizes.chunks, n % T, T) * C,
                               dout + (size_t)n * C, c0, end);
        }
    }
}

#endif // EMBEDDING_IMPLEMENTATION

#endif
