/*
token_chunks.h -- the tokens of a sequence that one of several ranks has.

The sequence is cut into chunks, two for each rank; rank q of n has chunks q and 2 n - 1 - q, one
after the other. Under a causal mask a chunk sees those before it, so all ranks have the same work.
T is the number of tokens that the rank has: a chunk has T / 2.
*/
#ifndef LLMC_TOKEN_CHUNKS_H
#define LLMC_TOKEN_CHUNKS_H

#include "llmc/base/host_device.h"

// Rank `rank` of 0 ... last. Zeros: one rank has the whole sequence.
typedef struct {
    int last, rank;
} TokenChunks;

// Returns the length of the sequence.
HOST_DEVICE int token_chunks_length(TokenChunks chunks, int T) { return (chunks.last + 1) * T; }

// Returns the position in the sequence of token t of the rank's T.
HOST_DEVICE int token_chunks_position(TokenChunks chunks, int t, int T) {
    return t + (t < T / 2 ? chunks.rank : 2 * chunks.last - chunks.rank) * (T / 2);
}

// Returns the end of the tokens from t on that follow each other in the sequence.
HOST_DEVICE int token_chunks_end(TokenChunks chunks, int t, int T) {
    return chunks.last > 0 && t < T / 2 ? T / 2 : T;
}

// Returns the rank's first token at a position or after it; T if it has none.
HOST_DEVICE int token_chunks_from(TokenChunks chunks, int position, int T) {
    for (int t = 0; t < T; t = token_chunks_end(chunks, t, T)) {
        const int ahead = position - token_chunks_position(chunks, t, T);
        if (ahead < token_chunks_end(chunks, t, T) - t) {
            return ahead > 0 ? t + ahead : t;
        }
    }
    return T;
}

#endif
