// test_embedding.c -- token and position embeddings: sums over repeated tokens, used and unused
// positions.
#include <stddef.h>

#include "llmc/base/vec.h"
#include "llmc/base/threads.h"
#include "llmc/ops/embedding.h"
#include "llmc/reference.h"
#include "dev/test/lib/ops.h"

enum { V = 5, Vp = 7, EXTRA = 3 }; // few tokens, so that they repeat; positions beyond those in use

static void test_forward(int B, int T, int C) {
    const size_t nc = (size_t)B * T * C, te = (size_t)Vp * C, pe = (size_t)(T + EXTRA) * C;
    float *wte = ops_normal(te, 1), *wpe = ops_normal(pe, 1);
    const double *wide_te = ops_widen(wte, te), *wide_pe = ops_widen(wpe, pe);
    const int* tokens = ops_below((size_t)B * T, V);
    for (int first = 0; first <= EXTRA; first++) {
        float* out = ops_floats(nc);
        double* want = ops_doubles(nc);
        int* positions = check_alloc((size_t)B * T, sizeof(int), "positions");
        for (int n = 0; n < B * T; n++) {
            positions[n] = first + n % T;
        }
        embedding_forward_cpu(out, tokens, wte, wpe,
                              embedding_batch(B, T, C, (EmbeddingPositions){first ? positions : NULL, NULL}));
        free(positions);
        ref_embedding_forward(want, tokens, wide_te, wide_pe + (size_t)first * C, B, T, C);
        for (size_t i = 0; i < nc; i++) {
            EXPECT(out[i] == (float)want[i], "out of %d x %d x %d from position %d, element %zu", B, T, C,
                   first, i);
        }
    }
    ops_close("forward");
}

// Positions that count from the start of each document, of three tokens.
static void test_documents(int B, int T, int C) {
    const size_t nc = (size_t)B * T * C;
    float *wte = ops_normal((size_t)Vp * C, 1), *wpe = ops_normal((size_t)(T + EXTRA) * C, 1),
          *out = ops_floats(nc);
    const int* tokens = ops_below((size_t)B * T, V);
    int* starts = ops_below((size_t)B * T, 1);
    for (int n = 0; n < B * T; n++) {
        starts[n] = n % T / 3 * 3;
    }
    embedding_forward_cpu(out, tokens, wte, wpe, embedding_batch(B, T, C, (EmbeddingPositions){0, starts}));
    for (size_t i = 0; i < nc; i++) {
        const size_t n = i / (size_t)C, c = i % (size_t)C, position = n % (size_t)T - (size_t)starts[n];
        EXPECT(out[i] == wte[(size_t)tokens[n] * C + c] + wpe[position * C + c], "documents, element %zu", i);
    }
    ops_close("documents");
}

// A row receives at most B*T terms in turn, with a rounding of half an epsilon of the partial sum
// each.
static void test_backward(int B, int T, int C) {
    const size_t nc = (size_t)B * T * C, te = (size_t)Vp * C, pe = (size_t)(T + EXTRA) * C;
    const int maxT = T + EXTRA;
    const double limit = 4;
    float *dout = ops_normal(nc, 1), *dwte = ops_normal(te, 1), *dwpe = ops_floats(pe),
          *held_wpe = ops_normal(pe, 1);
    const int* tokens = ops_below((size_t)B * T, V);
    const double *wide = ops_widen(dout, nc), *absolute = ops_absolute(wide, nc);
    const double *held_te = ops_widen(dwte, te), *held_pe = ops_widen(held_wpe, pe);
    double *want_te = ops_widen(dwte, te),
           *size_te = ops_absolute(held_te, te); // sums and sums of absolute values
    double *want_pe = ops_doubles(pe), *size_pe = ops_doubles(pe);

    const EmbeddingSizes sizes = {B, T, C, Vp, maxT};
    embedding_backward_cpu(dwte, dwpe, dout, tokens, sizes, GRADIENT_ADD, GRADIENT_SET);
    ref_embedding_backward(want_te, want_pe, wide, tokens, B, T, C);
    ref_embedding_backward(size_te, size_pe, absolute, tokens, B, T, C);
    EXPECT_NEAR(ops_error(dwte, want_te, size_te, te), 0, limit, "dwte added, %d x %d x %d", B, T, C);
    EXPECT_NEAR(ops_error(dwpe, want_pe, size_pe, pe), 0, limit, "dwpe of %d x %d x %d", B, T, C);

    want_pe = ops_widen(held_wpe, pe), size_pe = ops_absolute(want_pe, pe);
    embedding_backward_cpu(dwte, held_wpe, dout, tokens, sizes, GRADIENT_ADD, GRADIENT_ADD);
    ref_embedding_backward(want_te, want_pe, wide, tokens, B, T, C);
    ref_embedding_backward(size_te, size_pe, absolute, tokens, B, T, C);
    EXPECT_NEAR(ops_error(dwte, want_te, size_te, te), 0, limit, "dwte added twice, %d x %d x %d", B, T, C);
    EXPECT_NEAR(ops_error(held_wpe, want_pe, size_pe, pe), 0, limit, "dwpe added, %d x %d x %d", B, T, C);
    for (int i = V * C; i < Vp * C; i++) { // padding of the vocabulary: rows that no token has
        EXPECT(dwte[i] == held_te[i], "dwte of row %d, which is not in the batch", i / C);
    }
    for (size_t i = (size_t)T * C; i < pe; i++) {
        EXPECT(dwpe[i] == 0, "dwpe of position %zu, which is not in use, is %g", i / C, dwpe[i]);
        EXPECT(held_wpe[i] == held_pe[i], "position %zu, which is not in use, was added to", i / C);
    }
    ops_close("backward");
}

// Without positions: the rows of the tokens, and their sums, which are set.
static void test_tokens(int B, int T, int C) {
    const size_t nc = (size_t)B * T * C, te = (size_t)Vp * C;
    float *wte = ops_normal(te, 1), *dout = ops_normal(nc, 1), *out = ops_floats(nc), *dwte = ops_floats(te);
    double *want = ops_doubles(te), *size = ops_doubles(te);
    const int* tokens = ops_below((size_t)B * T, V);
    embedding_forward_cpu(out, tokens, wte, NULL, embedding_batch(B, T, C, (EmbeddingPositions){NULL, NULL}));
    for (size_t i = 0; i < nc; i++) {
        EXPECT(out[i] == wte[(size_t)tokens[i / C] * C + i % C], "out of %d x %d x %d, element %zu", B, T, C,
               i);
    }
    embedding_backward_cpu(dwte, NULL, dout, tokens, (EmbeddingSizes){B, T, C, Vp, T}, GRADIENT_SET,
                           GRADIENT_SET);
    ref_embedding_backward(want, NULL, ops_widen(dout, nc), tokens, B, T, C);
    ref_embedding_backward(size, NULL, ops_absolute(ops_widen(dout, nc), nc), tokens, B, T, C);
    EXPECT_NEAR(ops_error(dwte, want, size, te), 0, 4, "dwte set, %d x %d x %d", B, T, C);
    ops_close("tokens");
}

TEST(sizes) {
    const int sizes[] = {1, 31, 33};
    for (int i = 0; i < 27; i++) {
        const int B = sizes[i / 9] / 10 + 1, T = sizes[i / 3 % 3], C = sizes[i % 3];
        test_forward(B, T, C);
        test_documents(B, T, C);
        test_backward(B, T, C);
        test_tokens(B, T, C);
    }
    for (int C = 2 * LANES - 1; C <= 4 * LANES + 1; C++) { // 2 LANES columns are one thread's share
        test_backward(2, 3, C);
    }
    test_forward(2, 5, 768);
    test_backward(2, 5, 768);
}

// The rows of a rank's chunks are those of whole sequences, with documents, too; the position
// gradients are those of its own tokens, and 0 elsewhere.
static void test_chunks(int ranks, int chunk) {
    enum { B = 2, C = 5 };
    const int T = 2 * chunk, W = ranks * T, maxT = W + EXTRA;
    float *wte = ops_normal(Vp * C, 1), *wpe = ops_normal((size_t)maxT * C, 1),
          *whole = ops_floats((size_t)B * W * C), *dout = ops_normal((size_t)B * W * C, 1),
          *dwpe = ops_floats((size_t)maxT * C);
    int *tokens = ops_below((size_t)B * W, V), *starts = ops_below((size_t)B * W, 1);
    for (int n = 0; n < B * W; n++) {
        starts[n] = n % W / 3 * 3;
    }
    embedding_forward_cpu(whole, tokens, wte, wpe,
                          embedding_batch(B, W, C, (EmbeddingPositions){NULL, starts, {0, 0}}));
    embedding_backward_cpu(NULL, dwpe, dout, tokens, (EmbeddingSizes){B, W, C, Vp, maxT, {0, 0}},
                           GRADIENT_SET, GRADIENT_SET);
    for (int q = 0; q < ranks; q++) {
        const TokenChunks chunks = {ranks - 1, q};
        float *out = ops_floats((size_t)B * T * C), *own = ops_floats((size_t)B * T * C),
              *part = ops_floats((size_t)maxT * C);
        int* ids = ops_below((size_t)B * T, 1);
        for (int n = 0; n < B * T; n++) {
            const int from = n / T * W + token_chunks_position(chunks, n % T, T);
            ids[n] = tokens[from];
            memcpy(own + (size_t)n * C, dout + (size_t)from * C, C * sizeof(float));
        }
        embedding_forward_cpu(out, ids, wte, wpe,
                              embedding_batch(B, T, C, (EmbeddingPositions){NULL, starts, chunks}));
        embedding_backward_cpu(NULL, part, own, ids, (EmbeddingSizes){B, T, C, Vp, maxT, chunks},
                               GRADIENT_SET, GRADIENT_SET);
        for (int n = 0; n < B * T; n++) {
            const int at = token_chunks_position(chunks, n % T, T);
            EXPECT(ops_same_bits(out + (size_t)n * C, whole + (size_t)(n / T * W + at) * C, C), "token %d",
                   n);
            EXPECT(ops_same_bits(part + (size_t)at * C, dwpe + (size_t)at * C, C), "position %d", at);
        }
        int others = 0;
        for (int i = 0; i < maxT * C; i++) {
            others += part[i] != 0;
        }
        EXPECT(others == T * C, "%d gradients of positions, wanted %d", others, T * C);
    }
    ops_close("chunks");
}

TEST(chunks) {
    test_chunks(2, 1);
    test_chunks(2, 7);
    test_chunks(4, 3);
}

TEST(threads) {
    enum { B = 3, T = 33, C = 769, MAX_T = T + EXTRA };
    float *wte = ops_normal(Vp * C, 1), *wpe = ops_normal(MAX_T * C, 1), *dout = ops_normal(B * T * C, 1);
    float *held = ops_normal(Vp * C, 1), *out[4], *dwte[4], *dwpe[4];
    const int* tokens = ops_below(B * T, V);
    for (int t = 1; t <= 3; t++) {
        threads_set(t);
        out[t] = ops_floats(B * T * C), dwte[t] = ops_copy(held, Vp * C), dwpe[t] = ops_floats(MAX_T * C);
        embedding_forward_cpu(out[t], tokens, wte, wpe,
                              embedding_batch(B, T, C, (EmbeddingPositions){NULL, NULL}));
        embedding_backward_cpu(dwte[t], dwpe[t], dout, tokens, (EmbeddingSizes){B, T, C, Vp, MAX_T},
                               GRADIENT_ADD, GRADIENT_SET);
        EXPECT(ops_same_bits(out[t], out[1], B * T * C), "out with %d threads", t);
        EXPECT(ops_same_bits(dwte[t], dwte[1], Vp * C), "dwte with %d threads", t);
        EXPECT(ops_same_bits(dwpe[t], dwpe[1], MAX_T * C), "dwpe with %d threads", t);
    }
    ops_close("threads");
}
