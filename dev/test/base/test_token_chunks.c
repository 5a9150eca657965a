// test_token_chunks.c -- chunks of sequences: all tokens once, in order, the same work for all
// ranks.
#include "llmc/base/token_chunks.h"

#include "dev/test/lib/test.h"

enum { MOST = 8 * 12 };

// Returns the sum of the keys that a rank's queries see.
static int check_rank(TokenChunks chunks, int T, int* times) {
    const int W = token_chunks_length(chunks, T);
    int keys = 0;
    for (int t = 0, before = -1; t < T; t++) {
        const int position = token_chunks_position(chunks, t, T), end = token_chunks_end(chunks, t, T);
        EXPECT(position > before && position < W, "token %d at %d", t, position);
        EXPECT(end > t && token_chunks_position(chunks, end - 1, T) == position + end - 1 - t,
               "tokens %d to %d do not follow each other", t, end - 1);
        times[position]++;
        keys += position + 1;
        before = position;
    }
    for (int position = 0, t = 0; position <= W; position++) {
        while (t < T && token_chunks_position(chunks, t, T) < position) {
            t++;
        }
        EXPECT(token_chunks_from(chunks, position, T) == t, "from %d: token %d, wanted %d", position,
               token_chunks_from(chunks, position, T), t);
    }
    return keys;
}

TEST(token_chunks) {
    for (int ranks = 1; ranks <= 8; ranks++) {
        for (int T = ranks == 1 ? 1 : 2; T <= 12; T += ranks == 1 ? 1 : 2) {
            int times[MOST] = {0};
            for (int q = 0; q < ranks; q++) {
                const TokenChunks chunks = {ranks - 1, q};
                const int W = ranks * T, keys = check_rank(chunks, T, times);
                EXPECT(keys * ranks == W * (W + 1) / 2, "rank %d of %d, %d tokens: %d keys", q, ranks, T,
                       keys);
            }
            for (int t = 0; t < ranks * T; t++) {
                EXPECT(times[t] == 1, "%d ranks have token %d of %d", times[t], t, ranks * T);
            }
        }
    }
}
