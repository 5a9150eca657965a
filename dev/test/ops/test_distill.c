// test_distill.c -- cross-entropy with a teacher, against reference.h:
// sizes, padding, temperatures, rows that do not count, threads.
#include "llmc/base/vec.h"
#include "llmc/base/threads.h"
#include "llmc/ops/distill.h"
#include "llmc/reference.h"
#include "dev/test/lib/ops.h"

typedef struct {
    CrossEntropy of;
    Distill how;
    int teacher_Vp;
    float teacher_softcap, scale, spread;
    int slices; // of the vocabulary
} Case;

typedef struct {
    float *logits, *teacher;
    int* target;
    double *loss, *kl, *dlogits; // results in double
} Data;

static Data data_open(const Case* c) {
    const size_t N = c->of.N, V = c->of.V, Vp = c->of.Vp;
    Data d = {ops_normal(N * Vp, c->spread),
              ops_normal(N * c->teacher_Vp, c->spread),
              ops_below(N, (int)V),
              ops_doubles(N),
              ops_doubles(N),
              ops_doubles(N * Vp)};
    double *log_q = ops_doubles(N * V), *log_pt = ops_doubles(N * V), *lse = ops_doubles(N);
    const double *logits = ops_widen(d.logits, N * Vp), *teacher = ops_widen(d.teacher, N * c->teacher_Vp);
    if (N > 2) {
        d.target[1] = NO_TARGET;
    }
    ref_log_probs(log_q, teacher, c->how.temperature,
                  (RefClassifier){N, V, (size_t)c->teacher_Vp, c->teacher_softcap, 0});
    ref_log_probs(log_pt, logits, c->how.temperature, (RefClassifier){N, V, Vp, c->of.softcap, 0});
    ref_classifier_forward(d.loss, lse, logits, d.target, (RefClassifier){N, V, Vp, c->of.softcap, 0});
    ref_distill(d.kl, d.dlogits,
                (RefDistill){{N, V, Vp, c->of.softcap, c->of.z_loss},
                             logits,
                             lse,
                             log_pt,
                             log_q,
                             d.target,
                             c->scale,
                             c->how.weight,
                             c->how.temperature});
    return d;
}

// Runs the operation on copies.
static void run(float* loss, float* kl, float* dlogits, const Data* d, const Case* c) {
    const size_t N = c->of.N;
    memcpy(dlogits, d->logits, N * c->of.Vp * sizeof(float));
    distill_logits_cpu(
        loss, kl, dlogits,
        (DistillTeacher){ops_copy(d->teacher, N * c->teacher_Vp), c->teacher_Vp, c->teacher_softcap},
        (DistillTokens){d->target, c->scale, c->of, c->how});
}

// Copies columns, of rows `from_Vp` and `to_Vp` long.
static void copy_columns(float* to, int to_Vp, const float* from, int from_Vp, int N, int count) {
    for (int n = 0; n < N; n++) {
        memcpy(to + (size_t)n * to_Vp, from + (size_t)n * from_Vp, (size_t)count * sizeof(float));
    }
}

// Does so with slices of the vocabulary, which are all of one width.
static void run_slices(float* loss, float* kl, float* dlogits, const Data* d, const Case* c) {
    const int N = c->of.N, s = c->slices, V = c->of.V, words = (V + s - 1) / s + 1, Vp = words + 3;
    const size_t size = (size_t)N * Vp;
    float *logits = ops_floats(s * size), *teacher = ops_floats(s * size);
    CrossEntropySlice* rows = (CrossEntropySlice*)(void*)ops_floats(sizeof(*rows) / sizeof(float) * s * N);
    DistillSlice* sums = (DistillSlice*)(void*)ops_floats(sizeof(*sums) / sizeof(float) * s * N);
    const DistillSlices slices = {s, rows, sums, loss, d->target};
    CrossEntropy of = c->of;
    of.Vp = Vp;
    for (int pass = 0; pass < 3; pass++) {
        for (int i = 0; i < s; i++) {
            const int first = i * words, here = first >= V ? 0 : V - first < words ? V - first : words;
            const DistillTeacher from = {teacher + i * size, Vp, c->teacher_softcap};
            float* own = logits + i * size;
            of.V = here;
            if (pass == 0) {
                copy_columns(own, Vp, d->logits + first, c->of.Vp, N, here);
                copy_columns(teacher + i * size, Vp, d->teacher + first, c->teacher_Vp, N, here);
                cross_entropy_slice_cpu(rows + i * N, own, d->target, first, of);
            } else if (pass == 1) {
                distill_slice_cpu(&slices, i, own, from, of, c->how);
            } else {
                distill_slice_backward_cpu(&slices, own, from, first, c->scale, of, c->how);
                copy_columns(dlogits + first, c->of.Vp, own, Vp, N, here);
                EXPECT(own[Vp - 1] == 0 && own[size - 1] == 0, "gradient of padding");
            }
        }
        if (pass == 0) {
            cross_entropy_combine_cpu(loss, NULL, rows, s, d->target, of);
        }
    }
    distill_combine_cpu(kl, &slices, of, c->how);
}

// Exponents err by roundings of the logits and of lse, which are up to `most`, over the temperature
// where that is below 1; a sum of V terms in LANES partial sums by the square root of its length. A
// probability has that relative error, and the divergence that many roundings of the exponents.
// Returns the limit of kl, and of a gradient relative to scale.
static double tolerance(const Case* c, const Data* d) {
    double most = 1;
    for (size_t i = 0; i < (size_t)c->of.N * c->of.Vp; i++) {
        most = i % c->of.Vp < (size_t)c->of.V ? fmax(most, fabs(d->logits[i])) : most;
    }
    for (size_t i = 0; i < (size_t)c->of.N * c->teacher_Vp; i++) {
        most = fmax(most, fabs(d->teacher[i]));
    }
    const double capped = c->of.softcap + c->teacher_softcap, t = fmin(1, c->how.temperature);
    return FLT_EPSILON * (8 + sqrt(c->of.V / LANES) + 8 * (most + capped + log(c->of.V)) / t);
}

static void test_case(const Case* c) {
    const int N = c->of.N, V = c->of.V, Vp = c->of.Vp;
    const Data d = data_open(c);
    float *loss = ops_floats(N), *only = ops_floats(N), *kl = ops_floats(N), *dlogits = ops_floats(N * Vp);
    float* padded = d.logits;
    for (int i = 0; i < N * Vp; i++) {
        padded[i] = i % Vp < V ? padded[i] : i % 2 ? NAN : INFINITY;
    }
    cross_entropy_loss_cpu(only, d.logits, d.target, c->of);
    if (c->slices > 1) {
        memset(dlogits, 0, (size_t)N * Vp * sizeof(float));
        run_slices(loss, kl, dlogits, &d, c);
    } else {
        run(loss, kl, dlogits, &d, c);
        EXPECT(ops_same_bits(loss, only, N), "loss of %d x %d", N, V);
    }
    const double limit = tolerance(c, &d), t = c->how.temperature, a = c->how.weight;
    for (int n = 0; n < N; n++) {
        const double size = 1 + 2 * c->of.z_loss * (fabs(d.loss[n]) + 4 * c->spread + 20) + a * t;
        EXPECT_NEAR(kl[n], d.kl[n], limit * (2 + 2 * fabs(d.kl[n]) + log(V)), "kl of row %d of %d x %d, t %g",
                    n, N, V, t);
        for (int v = 0; v < Vp; v++) {
            const double want = d.dlogits[n * Vp + v];
            EXPECT_NEAR(dlogits[n * Vp + v], want,
                        v < V && d.target[n] != NO_TARGET ? limit * size * c->scale : 0,
                        "gradient of %d, %d of %d x %d (%d), t %g, a %g", n, v, N, V, Vp, t, a);
        }
    }
    ops_close("distill");
}

// Every temperature with every form of the logits.
static void test_size(int N, int V, int Vp, float spread) {
    const float temperatures[] = {1, 2, 0.5f, 1}, weights[] = {0.5f, 0.9f, 1, 0.25f};
    const float softcaps[] = {0, 15, 3, 0}, z_losses[] = {0, 0, 0.01f, 0.01f}, of_teacher[] = {0, 0, 15, 15};
    for (int i = 0; i < 4; i++) {
        Case c = {{N, V, Vp, softcaps[i], z_losses[i]},
                  {weights[i], temperatures[i]},
                  V + i,
                  of_teacher[i],
                  0.3f,
                  spread,
                  1};
        test_case(&c);
        c.slices = 2 + i;
        test_case(&c);
    }
}

TEST(teacher) {
    for (int V = 1; V <= 3 * LANES + 1; V++) {
        test_size(1 + V % 4, V, V + V % 3, 1);
    }
    test_size(33, 769, 896, 3);
    test_size(2, 50257, 50304, 1);
}

// A teacher that is the student leaves only cross-entropy, with 1 - a.
TEST(own_teacher) {
    enum { N = 3, V = 100, Vp = 128 };
    float *logits = ops_normal(N * Vp, 2), *same = ops_copy(logits, N * Vp),
          *plain = ops_copy(logits, N * Vp);
    float *loss = ops_floats(N), *kl = ops_floats(N);
    const int* target = ops_below(N, V);
    const CrossEntropy of = {N, V, Vp, 0, 0};
    cross_entropy_backward_cpu(loss, plain, target, 0.75f, of);
    distill_logits_cpu(loss, kl, logits, (DistillTeacher){same, Vp, 0},
                       (DistillTokens){target, 1, of, {0.25f, 3}});
    for (int i = 0; i < N * Vp; i++) {
        EXPECT_NEAR(logits[i], plain[i], 1e-6, "gradient %d", i);
    }
    for (int n = 0; n < N; n++) {
        EXPECT_NEAR(kl[n], 0, 1e-6, "kl of row %d", n);
    }
    ops_close("own teacher");
}

TEST(distill_threads) {
    const Case c = {{33, 1000, 1024, 0, 0.01f}, {0.5f, 2}, 1100, 0, 0.1f, 2, 1};
    const Data d = data_open(&c);
    float *loss[4], *kl[4], *dlogits[4];
    for (int t = 1; t <= 3; t++) {
        threads_set(t);
        loss[t] = ops_floats(33), kl[t] = ops_floats(33), dlogits[t] = ops_floats(33 * 1024);
        run(loss[t], kl[t], dlogits[t], &d, &c);
        EXPECT(ops_same_bits(kl[t], kl[1], 33) && ops_same_bits(dlogits[t], dlogits[1], 33 * 1024),
               "bits with %d threads", t);
    }
    ops_close("threads");
}
