// test_cross_entropy.c -- softmax and cross-entropy: sizes, padding, huge logits, NaN, rows that do
// not count.
#include "llmc/base/vec.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/base/threads.h"
#include "llmc/reference.h"
#include "dev/test/lib/ops.h"

typedef struct {
    int N, V, Vp;
    CrossEntropy of;
    double scale;
    double* logits;
    const int* target;
    double *loss, *dlogits;
    double *loss_magnitude, *dlogits_magnitude;
} Classifier;

// How far roundings of one epsilon can move loss and dlogits: log(sum) + max - logits[target] by
// its three terms and by those of the sum, whose weights p are the smaller the farther a logit is
// from the maximum, so that sum p (max - x) <= log V; a probability by its exponent x - max. e^x
// ends at FLT_MIN. A capped logit is wrong by a few roundings of softcap, and its slope by as
// many of 1. lse, a factor of p with a z-loss, errs as the loss does.
static void magnitudes(const Classifier* l, const double* lse) {
    for (int n = 0; n < l->N; n++) {
        const double softcap = l->of.softcap;
        double *x = ops_doubles(l->V), max = -INFINITY;
        for (int v = 0; v < l->V; v++) {
            x[v] = ref_softcap_(l->logits[n * l->Vp + v], softcap);
        }
        for (int v = 0; v < l->V; v++) {
            max = fmax(max, x[v]);
        }
        l->loss_magnitude[n] = fabs(max) + fabs(x[l->target[n]]) + log(l->V) + 1 + 2 * softcap;
        const double z = 1 + 2 * l->of.z_loss * l->loss_magnitude[n];
        for (int v = 0; v < l->V; v++) {
            const double p = exp(x[v] - lse[n]), is_target = v == l->target[n];
            l->dlogits_magnitude[n * l->Vp + v] =
                ((p * (1 + max - x[v] + 2 * softcap) + FLT_MIN / FLT_EPSILON) * z + is_target) * l->scale;
        }
    }
}

// The last factor: a sum of V positive terms in LANES partial sums makes V / LANES roundings one
// after the other, which add up like the square root.
static double limit(int V) { return 4 + sqrt(V / LANES); }

static Classifier classifier_open(CrossEntropy of, const float* logits, float scale) {
    const int N = of.N, V = of.V, Vp = of.Vp;
    const size_t nv = (size_t)N * Vp;
    const Classifier l = {N,
                          V,
                          Vp,
                          of,
                          scale,
                          ops_widen(logits, nv),
                          ops_below(N, V),
                          ops_doubles(N),
                          ops_doubles(nv),
                          ops_doubles(N),
                          ops_doubles(nv)};
    double* lse = ops_doubles(N);
    ref_classifier_forward(l.loss, lse, l.logits, l.target, (RefClassifier){N, V, Vp, of.softcap, 0});
    ref_classifier_backward(l.dlogits, l.logits, lse, l.target, scale,
                            (RefClassifier){N, V, Vp, of.softcap, of.z_loss});
    magnitudes(&l, lse);
    return l;
}

// Checks losses and gradients from slices of the words, each with logits of its own; the last ones
// may be nothing but padding.
static void test_slices(const Classifier* l, const float* logits, int slices) {
    const int N = l->N, V = l->V, words = (l->Vp + slices - 1) / slices + 2, all = slices * words;
    CrossEntropySlice* rows = (CrossEntropySlice*)(void*)ops_floats((size_t)4 * N * slices);
    float *loss = ops_floats(N), *whole = ops_floats((size_t)N * l->Vp);
    int *is_top = (int*)(void*)ops_floats(N), *wanted_top = (int*)(void*)ops_floats(N);
    float* own[8];
    CrossEntropy of[8];
    for (int i = 0; i < slices; i++) {
        const int left = V - i * words, used = left < 0 ? 0 : left < words ? left : words;
        own[i] = ops_floats((size_t)N * words);
        of[i] = (CrossEntropy){N, used, words, l->of.softcap, l->of.z_loss};
        for (int n = 0; n < N; n++) {
            for (int w = 0; w < words; w++) {
                own[i][n * words + w] = w < used ? logits[n * l->Vp + i * words + w] : NAN;
            }
        }
        cross_entropy_slice_exp_cpu(rows + (size_t)i * N, own[i], l->target, i * words, of[i]);
    }
    cross_entropy_combine_cpu(loss, is_top, rows, slices, l->target, l->of);
    cross_entropy_top_cpu(wanted_top, logits, l->target, l->of);
    EXPECT_NEAR(ops_error(loss, l->loss, l->loss_magnitude, N), 0, limit(V), "%d slices, loss of %d x %d",
                slices, N, V);
    EXPECT(memcmp(is_top, wanted_top, (size_t)N * sizeof(int)) == 0, "%d slices, top of %d x %d", slices, N,
           V);
    for (int i = 0; i < slices; i++) {
        cross_entropy_slice_backward_cpu(own[i], rows, slices, i, l->target, i * words, (float)l->scale,
                                         of[i]);
        for (int n = 0; n < N; n++) {
            for (int w = 0; w < words && i * words + w < l->Vp; w++) {
                whole[n * l->Vp + i * words + w] = own[i][n * words + w];
            }
        }
    }
    EXPECT_NEAR(ops_error(whole, l->dlogits, l->dlogits_magnitude, (size_t)N * l->Vp), 0, limit(V) + 4,
                "%d slices, gradient of %d x %d in %d", slices, N, V, all);
}

// Columns past V are not looked at, and their gradient is exactly 0.
static void test_size_of(CrossEntropy of, float spread) {
    const int N = of.N, V = of.V, Vp = of.Vp;
    const size_t nv = (size_t)N * Vp;
    const float scale = 0.3f, padding[] = {0, -1e30f, 1e30f, INFINITY, NAN};
    float *logits = ops_normal(nv, spread), *dlogits = ops_floats(nv), *loss = ops_floats(N);
    const Classifier l = classifier_open(of, logits, scale);
    for (size_t i = 0; i < nv; i++) {
        logits[i] = i % Vp < (size_t)V ? logits[i] : padding[i % 5];
    }
    const float* unchanged = ops_copy(logits, nv);
    cross_entropy_loss_cpu(loss, logits, l.target, of);
    EXPECT_NEAR(ops_error(loss, l.loss, l.loss_magnitude, N), 0, limit(V), "loss of %d x %d (%d)", N, V, Vp);
    EXPECT(ops_same_bits(logits, unchanged, nv), "cross_entropy_loss wrote to the logits, %d x %d (%d)", N, V,
           Vp);

    for (int slices = 1; slices <= 8; slices *= 2) {
        test_slices(&l, logits, slices);
    }
    memcpy(dlogits, logits, nv * sizeof(float));
    float* loss_again = ops_floats(N);
    cross_entropy_backward_cpu(loss_again, dlogits, l.target, scale, of);
    EXPECT(ops_same_bits(loss, loss_again, N), "the two losses differ, %d x %d (%d)", N, V, Vp);
    EXPECT_NEAR(ops_error(dlogits, l.dlogits, l.dlogits_magnitude, nv), 0, limit(V),
                "gradient of %d x %d (%d)", N, V, Vp);
    for (size_t i = 0; i < nv; i++) {
        EXPECT(i % Vp < (size_t)V || dlogits[i] == 0, "gradient %g in padded column %zu of %d x %d (%d)",
               dlogits[i], i % Vp, N, V, Vp);
    }
    ops_close("sizes");
}

// Without and with each of the two numbers.
static void test_size(int N, int V, int Vp, float spread) {
    const float softcaps[] = {0, 3, 0, 15}, z_losses[] = {0, 0, 0.01f, 0.01f};
    for (int i = 0; i < 4; i++) {
        test_size_of((CrossEntropy){N, V, Vp, softcaps[i], z_losses[i]}, spread);
    }
}

TEST(sizes) {
    for (int V = 1; V <= 4 * LANES + 1; V++) {
        test_size(1 + V % 3, V, V + V % 4, 1);
    }
    test_size(31, 31, 128, 1);
    test_size(33, 33, 33, 1);
    test_size(5, 769, 896, 3);
    test_size(2, 50257, 50304, 1);
}

// Logits of thousands: exp() of any of them would overflow, or all would underflow.
TEST(huge) {
    enum { N = 4, V = 100, Vp = 128 };
    test_size(N, V, Vp, 1e4f);
    for (int sign = -1; sign <= 1; sign += 2) { // all near +10,000, all near -10,000
        float *logits = ops_normal(N * Vp, 1), *loss = ops_floats(N);
        for (int i = 0; i < N * Vp; i++) {
            logits[i] += sign * 1e4f;
        }
        const Classifier l = classifier_open((CrossEntropy){N, V, Vp, 0, 0}, logits, 1);
        cross_entropy_backward_cpu(loss, logits, l.target, 1, (CrossEntropy){N, V, Vp, 0, 0});
        EXPECT_NEAR(ops_error(loss, l.loss, l.loss_magnitude, N), 0, limit(V), "loss at logits of %de4",
                    sign);
        EXPECT_NEAR(ops_error(logits, l.dlogits, l.dlogits_magnitude, N * Vp), 0, limit(V),
                    "gradient at %de4", sign);
        ops_close("huge logits");
    }
}

// One NaN anywhere makes the loss and the gradient of its row NaN, and of no other row.
static void test_nan(float softcap) {
    enum { N = 3, V = 2 * LANES + 3, Vp = V + 2 };
    for (int v = 0; v < V; v++) {
        float *logits = ops_normal(N * Vp, 1), *loss = ops_floats(N), *loss_again = ops_floats(N);
        const int* target = ops_below(N, V);
        const uint32_t nan = v % 2 ? 0xFFFFFFFF : 0x7FC00000; // unset memory, or the result of 0/0
        memcpy(logits + Vp + v, &nan, sizeof(nan));
        cross_entropy_loss_cpu(loss, logits, target, (CrossEntropy){N, V, Vp, softcap, 0});
        cross_entropy_backward_cpu(loss_again, logits, target, 1, (CrossEntropy){N, V, Vp, softcap, 0});
        for (int n = 0; n < N; n++) {
            EXPECT(isnan(loss[n]) == (n == 1) && isnan(loss_again[n]) == (n == 1),
                   "NaN in row 1, column %d: losses %g and %g in row %d", v, loss[n], loss_again[n], n);
            EXPECT(isnan(logits[n * Vp + (v + 1) % V]) == (n == 1),
                   "NaN in row 1, column %d: gradient in row %d", v, n);
        }
        ops_close("NaN");
    }
}

TEST(nan) {
    test_nan(0);
    test_nan(15);
}

// Rows without a target: nothing but zeros comes out of them, and the others do not notice.
TEST(no_target) {
    enum { N = 7, V = 2 * LANES + 3, Vp = V + 5 };
    float *logits = ops_normal(N * Vp, 2), *dlogits = ops_copy(logits, N * Vp),
          *want = ops_copy(logits, N * Vp);
    float *loss = ops_floats(N), *loss_only = ops_floats(N), *want_loss = ops_floats(N);
    int* target = ops_below(N, V);
    cross_entropy_backward_cpu(want_loss, want, target, 0.25f, (CrossEntropy){N, V, Vp, 0, 0});
    logits[2 * Vp + 1] = dlogits[2 * Vp + 1] = NAN;
    const int without[] = {0, 2, 3, 6};
    for (int i = 0; i < 4; i++) {
        target[without[i]] = NO_TARGET;
        want_loss[without[i]] = 0;
        memset(want + without[i] * Vp, 0, Vp * sizeof(float));
    }
    cross_entropy_loss_cpu(loss_only, logits, target, (CrossEntropy){N, V, Vp, 0, 0});
    cross_entropy_backward_cpu(loss, dlogits, target, 0.25f, (CrossEntropy){N, V, Vp, 0, 0});
    EXPECT(ops_same_bits(loss, want_loss, N) && ops_same_bits(loss_only, want_loss, N), "losses");
    EXPECT(ops_same_bits(dlogits, want, N * Vp), "gradient");
    EXPECT(targets_count(target, N) == 3, "%d targets count", targets_count(target, N));
    EXPECT(targets_factor(7, 7) == 1 && targets_factor(9, 3) == 3 && isnan(targets_factor(1, 0)), "factors");
    ops_close("no target");
}

TEST(threads) {
    enum { N = 33, V = 1000, Vp = 1024 };
    float *logits = ops_normal(N * Vp, 2), *loss[4], *loss_only[4], *dlogits[4];
    const int* target = ops_below(N, V);
    for (int t = 1; t <= 3; t++) {
        threads_set(t);
        loss[t] = ops_floats(N), loss_only[t] = ops_floats(N), dlogits[t] = ops_copy(logits, N * Vp);
        cross_entropy_loss_cpu(loss_only[t], logits, target, (CrossEntropy){N, V, Vp, 0, 0});
        cross_entropy_backward_cpu(loss[t], dlogits[t], target, 0.1f, (CrossEntropy){N, V, Vp, 0, 0});
        EXPECT(ops_same_bits(loss_only[t], loss[1], N), "loss alone with %d threads", t);
        EXPECT(ops_same_bits(loss[t], loss[1], N), "loss with %d threads", t);
        EXPECT(ops_same_bits(dlogits[t], dlogits[1], N * Vp), "gradient with %d threads", t);
    }
    ops_close("threads");
}

// The target is the most likely token: among others, among equals, beside padding and NaN.
TEST(top) {
    enum { N = 8, V = 5, Vp = 7 };
    const float logits[N * Vp] = {1,  2,  3,  2,  1,         9, 9, // 2 is
                                  1,  2,  3,  2,  1,         9, 9, // 1 is not
                                  1,  3,  3,  2,  1,         0, 0, // 1, the first of two
                                  1,  3,  3,  2,  1,         0, 0, // 2, the second
                                  1,  3,  4,  2,  NAN,       0, 0, NAN, 3, 4, 2, 1, 0, 0,
                                  -1, -2, -3, -4, -INFINITY, 0, 0, 7,   7, 7, 7, 7, 7, 7};
    const int target[N] = {2, 1, 1, 2, 2, 0, 0, NO_TARGET}, want[N] = {1, 0, 1, 0, 0, 0, 1, 0};
    int is_top[N];
    cross_entropy_top_cpu(is_top, logits, target, (CrossEntropy){N, V, Vp, 0, 0});
    for (int n = 0; n < N; n++) {
        EXPECT(is_top[n] == want[n], "row %d: %d", n, is_top[n]);
    }
}
