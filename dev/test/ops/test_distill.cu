// test_distill.cu -- cross-entropy with a teacher on the GPU against the CPU: every type, packs and
// single elements, temperatures, caps, padding, rows that do not count; and the sum of divergences.
#include "llmc/ops/distill.cuh"
#include "dev/test/lib/gpu_ops.h"

typedef struct {
    CrossEntropy of;
    Distill how;
    int teacher_Vp;
    float teacher_softcap;
    int slices; // of the vocabulary
} Case;

typedef struct {
    float *logits, *teacher;
    int* target;
} Data;

static const float SCALE = 0.25f;

// Random rows, which are rounded when they are uploaded.
static Data data_open(const Case* c) {
    const size_t N = c->of.N;
    const Data d = {ops_normal(N * c->of.Vp, 3), ops_normal(N * c->teacher_Vp, 3), ops_below(N, c->of.V)};
    if (N > 2) {
        d.target[1] = NO_TARGET;
        d.logits[c->of.Vp] = NAN;
    }
    for (size_t i = 0; i < N * (size_t)c->of.Vp; i++) {
        d.logits[i] = i % c->of.Vp < (size_t)c->of.V ? d.logits[i] : 10000.0f;
    }
    return d;
}

template <class T>
static void run_gpu(float** loss, float** kl, float** dlogits, Data* d, const Case* c, size_t shift,
                    const Gpu* gpu) {
    const size_t N = c->of.N;
    T *logits = upload<T>(d->logits, N * c->of.Vp, shift, gpu),
      *teacher = upload<T>(d->teacher, N * c->teacher_Vp, shift, gpu);
    float *losses = unset<float>(N, gpu), *divergences = unset<float>(N, gpu);
    int* target = upload_ints(d->target, N, gpu);
    distill_logits(losses, divergences, logits, {teacher, c->teacher_Vp, c->teacher_softcap},
                   {target, NULL, NULL, SCALE, c->of, c->how}, gpu);
    *loss = download(losses, N, gpu), *kl = download(divergences, N, gpu);
    *dlogits = download(logits, N * c->of.Vp, gpu);
    gpu_free(target), gpu_free(divergences), gpu_free(losses);
    gpu_free(teacher - shift), gpu_free(logits - shift);
}

// Returns columns of rows that are `Vp` long: slices of `words` columns, one after the other; or,
// if it goes `back`, from slices to rows. Columns that are missing are 10000.
static float* in_slices(const float* x, int N, int Vp, int words, int slices, int back) {
    float* out = ops_floats((size_t)N * (back ? Vp : words * slices));
    for (int n = 0; n < N; n++) {
        for (int v = 0; v < words * slices; v++) {
            const size_t in_row = (size_t)n * Vp + v,
                         in_slice = ((size_t)(v / words) * N + n) * words + v % words;
            if (v < Vp && back) {
                out[in_row] = x[in_slice];
            } else if (!back) {
                out[in_slice] = v < Vp ? x[in_row] : 10000.0f;
            }
        }
        for (int v = words * slices; v < Vp && back; v++) {
            out[(size_t)n * Vp + v] = 0;
        }
    }
    return out;
}

// Does what run_gpu does, with slices of the vocabulary.
template <class T>
static void run_slices(float** loss, float** kl, float** dlogits, Data* d, const Case* c, size_t shift,
                       const Gpu* gpu) {
    const int N = c->of.N, s = c->slices, V = c->of.V, words = ceil_div(ceil_div(V, s), 8) * 8;
    const size_t size = (size_t)N * words;
    float *cut = in_slices(d->logits, N, c->of.Vp, words, s, 0),
          *of_teacher = in_slices(d->teacher, N, c->teacher_Vp, words, s, 0);
    T *logits = upload<T>(cut, s * size, shift, gpu), *teacher = upload<T>(of_teacher, s * size, shift, gpu);
    d->logits = in_slices(cut, N, c->of.Vp, words, s, 1); // rounded, as upload leaves them
    d->teacher = in_slices(of_teacher, N, c->teacher_Vp, words, s, 1);
    float *losses = unset<float>(N, gpu), *divergences = unset<float>(N, gpu);
    int* target = upload_ints(d->target, N, gpu);
    CrossEntropySum* whole = (CrossEntropySum*)gpu_alloc((size_t)s * N, sizeof(*whole), "numbers");
    DistillSlice* sums = (DistillSlice*)gpu_alloc((size_t)s * N, sizeof(*sums), "sums");
    for (int pass = 0; pass < 3; pass++) {
        for (int i = 0; i < s; i++) {
            CrossEntropy of = c->of;
            const int first = i * words;
            const DistillTeacherGpu<T> from = {teacher + i * size, words, c->teacher_softcap};
            of.Vp = words;
            of.V = max(0, min(V - first, words));
            if (pass == 0) {
                cross_entropy_slice(whole + i * N, (const T*)logits + i * size, target, first, of, gpu);
            } else if (pass == 1) {
                distill_slice(sums + i * N, (const T*)logits + i * size, from,
                              {target, losses, whole, SCALE, of, c->how}, gpu);
            } else {
                distill_slice_backward(logits + i * size, from, sums, first,
                                       {target, losses, whole, SCALE, of, c->how}, gpu);
            }
        }
        if (pass == 0) {
            cross_entropy_combine(losses, whole, whole, target, s, N, gpu);
        } else if (pass == 1) {
            distill_combine(divergences, sums, s, {target, losses, whole, SCALE, c->of, c->how}, gpu);
        }
    }
    *loss = download(losses, N, gpu), *kl = download(divergences, N, gpu);
    *dlogits = in_slices(download(logits, s * size, gpu), N, c->of.Vp, words, s, 1);
    gpu_free(sums), gpu_free(whole), gpu_free(target), gpu_free(divergences), gpu_free(losses);
    gpu_free(teacher - shift), gpu_free(logits - shift);
}

// The hardware's exponentials and logarithms are wrong by 2^-18 at most, capped logits by 2^-18 of
// the softcap; exponents also by roundings of logits of up to 16, over the temperature. So are
// probabilities, relatively. The gradient is rounded to T besides.
template <class T> static void test_case(const Case* c, size_t shift, const Gpu* gpu) {
    const int N = c->of.N, V = c->of.V, Vp = c->of.Vp;
    Data d = data_open(c);
    float *loss, *kl, *got;
    (c->slices > 1 ? run_slices<T> : run_gpu<T>)(&loss, &kl, &got, &d, c, shift, gpu);
    float *want = ops_copy(d.logits, (size_t)N * Vp), *want_loss = ops_floats(N), *want_kl = ops_floats(N);
    distill_logits_cpu(want_loss, want_kl, want,
                       {ops_copy(d.teacher, (size_t)N * c->teacher_Vp), c->teacher_Vp, c->teacher_softcap},
                       {d.target, SCALE, c->of, c->how});
    const double capped = (c->of.softcap + c->teacher_softcap) * 0x1p-18, t = fmin(c->how.temperature, 1),
                 wrong = 0x1p-17 + (capped + 16 * 0x1p-22) / t, a = c->how.weight;
    for (int n = 0; n < N; n++) {
        const double size = 1 + 2 * c->of.z_loss * 32 + a * c->how.temperature;
        EXPECT_NEAR(loss[n], want_loss[n], wrong * (1 + fabs(want_loss[n])), "loss %d, V %d", n, V);
        EXPECT_NEAR(kl[n], want_kl[n], 4 * wrong * (1 + fabs(want_kl[n]) + log(V)), "kl %d, V %d, t %g, %s",
                    n, V, c->how.temperature, dtype_name(DTYPE_OF(T)));
        for (int v = 0; v < Vp; v++) {
            const double w = want[(size_t)n * Vp + v];
            const double limit = v < V && d.target[n] != NO_TARGET
                                     ? roundoff<T>() * fabs(w) + 4 * wrong * size * SCALE + 0x1p-25
                                     : 0;
            EXPECT_NEAR(got[(size_t)n * Vp + v], w, limit, "gradient %d, %d of %d (%d), t %g, a %g, %s", n, v,
                        V, Vp, c->how.temperature, a, dtype_name(DTYPE_OF(T)));
        }
    }
    ops_close("distill");
}

template <class T> static void test_size(int N, int V, int Vp, int teacher_Vp, size_t shift, const Gpu* gpu) {
    const float temperatures[] = {1, 2, 0.5f}, weights[] = {0.5f, 0.9f, 1}, softcaps[] = {0, 15, 3},
                z_losses[] = {0, 0.01f, 0.01f}, of_teacher[] = {15, 0, 15};
    for (int i = 0; i < 3; i++) {
        Case c = {{N, V, Vp, softcaps[i], z_losses[i]},
                  {weights[i], temperatures[i]},
                  teacher_Vp,
                  of_teacher[i],
                  1};
        test_case<T>(&c, shift, gpu);
        c.slices = 2 + i;
        test_case<T>(&c, shift, gpu);
    }
}

template <class T> static void test_type(const Gpu* gpu) {
    const int sizes[][4] = {{1, 1, 1, 2}, {3, 33, 40, 48}, {4, 769, 777, 800}, {3, 5000, 5120, 5008}};
    for (const int* size : sizes) {
        test_size<T>(size[0], size[1], size[2], size[3], 0, gpu);
    }
    test_size<T>(3, 500, 512, 512, 1, gpu); // no pack can be read here
}

TEST_TYPES(distill)

// The sum does not depend on how the rows are divided.
TEST(divergences) {
    enum { N = 1000 };
    Gpu gpu;
    gpu_open(&gpu, 0);
    float* kl = ops_normal(N, 1);
    const float* on_gpu = upload<float>(kl, N, 0, &gpu);
    WideSum want = {0, 0}, got, *sum = (WideSum*)gpu_alloc(2, sizeof(WideSum), "sums");
    for (int n = 0; n < N; n++) {
        wide_sum_add(&want, kl[n]);
    }
    for (int first = 1; first < N; first += 333) {
        CUDA_CHECK(cudaMemsetAsync(sum, 0, sizeof(*sum), gpu.stream));
        sum_divergences(sum, on_gpu, first, &gpu);
        sum_divergences(sum, on_gpu + first, N - first, &gpu);
        gpu_copy(&got, sum, sizeof(got), &gpu);
        EXPECT(wide_sum_value(got) == wide_sum_value(want), "%.17g, wanted %.17g", wide_sum_value(got),
               wide_sum_value(want));
    }
    gpu_free(sum);
    gpu_free((void*)on_gpu);
    gpu_close(&gpu);
    ops_close("divergences");
}
