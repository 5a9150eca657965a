// test_encoder.c -- token and position embeddings: sums over repeated tokens, positions in use and not in
// use.
#include "llmc/base/threads.h"
#include "llmc/encoder.h"
#include "ops.h"

enum { V = 5, Vp = 7, EXTRA = 3 }; // few tokens, so that they repeat; positions beyond those in use

typedef struct {
    int B, T, C;
    const int* tokens;
    double *wte, *wpe, *dout;
    double *out, *dwte, *dwpe;
} Encoder;

static void reference_forward(const Encoder* l) {
    for (int n = 0; n < l->B * l->T; n++) {
        for (int c = 0; c < l->C; c++) {
            l->out[n * l->C + c] = l->wte[l->tokens[n] * l->C + c] + l->wpe[n % l->T * l->C + c];
        }
    }
}

static void reference_backward(const Encoder* l, const double* dout) { // adds to the gradients
    for (int n = 0; n < l->B * l->T; n++) {
        for (int c = 0; c < l->C; c++) {
            l->dwte[l->tokens[n] * l->C + c] += dout[n * l->C + c];
            l->dwpe[n % l->T * l->C + c] += dout[n * l->C + c];
        }
    }
}

static Encoder encoder_open(int B, int T, int C, const int* tokens, const double* wte, const double* wpe,
                            const double* dout) {
    const Encoder l = {B,
                       T,
                       C,
                       tokens,
                       (double*)wte,
                       (double*)wpe,
                       (double*)dout,
                       ops_doubles((size_t)B * T * C),
                       ops_doubles((size_t)Vp * C),
                       ops_doubles((size_t)(T + EXTRA) * C)};
    return l;
}

static double loss(const void* arg) {
    const Encoder* l = arg;
    double sum = 0;
    reference_forward(l);
    for (int i = 0; i < l->B * l->T * l->C; i++) {
        sum += l->out[i] * l->dout[i];
    }
    return sum;
}

static void test_reference(void) {
    enum { B = 3, T = 4, C = 2, MAX_T = T + EXTRA };
    const Encoder l = encoder_open(B, T, C, ops_below(B * T, V), ops_widen(ops_normal(Vp * C, 1), Vp * C),
                                   ops_widen(ops_normal(MAX_T * C, 1), MAX_T * C),
                                   ops_widen(ops_normal(B * T * C, 1), B * T * C));
    reference_backward(&l, l.dout);
    ops_expect_gradient("dwte", loss, &l, l.wte, l.dwte, Vp * C);
    ops_expect_gradient("dwpe", loss, &l, l.wpe, l.dwpe, MAX_T * C);
    ops_close("reference");
}

static void test_forward(int B, int T, int C) {
    const size_t nc = (size_t)B * T * C;
    const int maxT = T + EXTRA;
    float *wte = ops_normal(Vp * C, 1), *wpe = ops_normal((size_t)maxT * C, 1);
    const int* tokens = ops_below((size_t)B * T, V);
    for (int first = 0; first <= EXTRA; first++) {
        float* out = ops_floats(nc);
        encoder_forward_cpu(out, tokens, wte, wpe, B, T, first, C);
        for (size_t i = 0; i < nc; i++) {
            const size_t n = i / C, c = i % C;
            EXPECT(out[i] == wte[tokens[n] * C + c] + wpe[(first + n % T) * C + c],
                   "out of %d x %d x %d from position %d, element %zu", B, T, C, first, i);
        }
    }
    ops_close("forward");
}

// A row receives at most B*T terms in turn, with a rounding of half an epsilon of the partial sum each.
static void test_backward(int B, int T, int C) {
    const size_t nc = (size_t)B * T * C, te = (size_t)Vp * C, pe = (size_t)(T + EXTRA) * C;
    const int maxT = T + EXTRA;
    const double limit = 4;
    float *dout = ops_normal(nc, 1), *dwte = ops_normal(te, 1), *dwpe = ops_floats(pe),
          *held_wpe = ops_normal(pe, 1);
    const double *held_te = ops_widen(dwte, te), *held_pe = ops_widen(held_wpe, pe);
    const Encoder l = encoder_open(B, T, C, ops_below((size_t)B * T, V), NULL, NULL, ops_widen(dout, nc));
    const Encoder m = encoder_open(B, T, C, l.tokens, NULL, NULL, ops_absolute(l.dout, nc)); // magnitudes
    reference_backward(&l, l.dout);
    reference_backward(&m, m.dout);

    encoder_backward_cpu(dwte, dwpe, dout, l.tokens, B, T, maxT, C, GRADIENT_SET);
    const double *want = ops_sum(held_te, l.dwte, te), *size = ops_sum(ops_absolute(held_te, te), m.dwte, te);
    EXPECT_NEAR(ops_error(dwte, want, size, te), 0, limit, "dwte added, %d x %d x %d", B, T, C);
    EXPECT_NEAR(ops_error(dwpe, l.dwpe, m.dwpe, pe), 0, limit, "dwpe of %d x %d x %d", B, T, C);

    encoder_backward_cpu(dwte, held_wpe, dout, l.tokens, B, T, maxT, C, GRADIENT_ADD);
    EXPECT_NEAR(ops_error(dwte, ops_sum(want, l.dwte, te), ops_sum(size, m.dwte, te), te), 0, limit,
                "dwte added twice, %d x %d x %d", B, T, C);
    EXPECT_NEAR(
        ops_error(held_wpe, ops_sum(held_pe, l.dwpe, pe), ops_sum(ops_absolute(held_pe, pe), m.dwpe, pe), pe),
        0, limit, "dwpe added, %d x %d x %d", B, T, C);
    for (int i = V * C; i < Vp * C; i++) { // padding of the vocabulary: rows that no token has
        EXPECT(dwte[i] == held_te[i], "dwte of row %d, which is not in the batch", i / C);
    }
    for (size_t i = (size_t)T * C; i < pe; i++) {
        EXPECT(dwpe[i] == 0, "dwpe of position %zu, which is not in use, is %g", i / C, dwpe[i]);
        EXPECT(held_wpe[i] == held_pe[i], "position %zu, which is not in use, was added to", i / C);
    }
    ops_close("backward");
}

static void test_sizes(void) {
    const int sizes[] = {1, 31, 33};
    for (int i = 0; i < 27; i++) {
        const int B = sizes[i / 9] / 10 + 1, T = sizes[i / 3 % 3], C = sizes[i % 3];
        test_forward(B, T, C);
        test_backward(B, T, C);
    }
    for (int C = 2 * LANES - 1; C <= 4 * LANES + 1; C++) { // 2 LANES columns are one thread's share
        test_backward(2, 3, C);
    }
    test_forward(2, 5, 768);
    test_backward(2, 5, 768);
}

static void test_threads(void) {
    enum { B = 3, T = 33, C = 769, MAX_T = T + EXTRA };
    float *wte = ops_normal(Vp * C, 1), *wpe = ops_normal(MAX_T * C, 1), *dout = ops_normal(B * T * C, 1);
    float *held = ops_normal(Vp * C, 1), *out[4], *dwte[4], *dwpe[4];
    const int* tokens = ops_below(B * T, V);
    for (int t = 1; t <= 3; t++) {
        threads_set(t);
        out[t] = ops_floats(B * T * C), dwte[t] = ops_copy(held, Vp * C), dwpe[t] = ops_floats(MAX_T * C);
        encoder_forward_cpu(out[t], tokens, wte, wpe, B, T, 0, C);
        encoder_backward_cpu(dwte[t], dwpe[t], dout, tokens, B, T, MAX_T, C, GRADIENT_SET);
        EXPECT(ops_same_bits(out[t], out[1], B * T * C), "out with %d threads", t);
        EXPECT(ops_same_bits(dwte[t], dwte[1], Vp * C), "dwte with %d threads", t);
        EXPECT(ops_same_bits(dwpe[t], dwpe[1], MAX_T * C), "dwpe with %d threads", t);
    }
    ops_close("threads");
}

int main(int argc, char** argv) {
    (void)argc;
    threads_wait_briefly(argv);
    test_reference();
    test_sizes();
    test_threads();
    return test_done("encoder");
}
