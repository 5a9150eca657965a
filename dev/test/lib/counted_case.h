/*
counted_case.h -- sequences with documents and padding, for tests of what counts.
*/
#ifndef DEV_TEST_COUNTED_CASE_H
#define DEV_TEST_COUNTED_CASE_H

#include "llmc/ops/counted.h"
#include "dev/test/lib/ops.h"

// Returns B sequences of T tokens: sequence b ends b + 1 tokens early, all of the last one is
// padding, documents have 1, 2, 3, ... tokens, and half of the tokens of the update are targets.
static inline Counted counted_ragged(int B, int T) {
    int* lengths = (int*)(void*)ops_bytes((size_t)B * sizeof(int));
    int* starts = (int*)(void*)ops_bytes((size_t)(B * T) * sizeof(int));
    float* share = ops_floats(1);
    const TokenChunks whole = {0, 0};
    for (int b = 0; b < B; b++) {
        lengths[b] = b + 1 < B && T > b + 1 ? T - b - 1 : 0;
        for (int t = 0, start = 0, size = 1; t < T; t++) {
            if (t == start + size || t >= lengths[b]) {
                start = t;
                size++;
            }
            starts[b * T + t] = start;
        }
    }
    *share = 0.5f;
    const Counted counted = {lengths, starts, share, whole};
    return counted;
}

#endif
