// test_cross_entropy.cu -- softmax and cross-entropy on the GPU against reference.h: every type,
// both ways of reading the row, padding, extremes, rows that do not count, slices of the words.
#include "llmc/ops/cross_entropy.cuh"
#include "llmc/reference.h"
#include "dev/test/lib/gpu_ops.h"

typedef struct {
    int N, V, Vp;
    CrossEntropy of;
    float* logits; // on the host, rounded to T
    int* target;
    double *loss, *dlogits; // what the reference says
} Case;

static double largest_logit(const Case* k, int n) {
    double largest = 0;
    for (int v = 0; v < k->V; v++) {
        const double size = fabs(k->logits[(size_t)n * k->Vp + v]);
        largest = isfinite(size) && size > largest ? size : largest;
    }
    return largest;
}

// The fast exponentials, the logarithm and what is made of them are wrong by 2^-18 at most.
// Probabilities are wrong by half a unit in the last place of the largest logit besides, which the
// losses are not. Capped logits are wrong by 2^-19 of the softcap, and slopes by as much of 1. A
// z-loss multiplies p, and its error, by a factor.
template <class T>
static void compare(const Case* k, const float* loss, const float* dlogits, float scale, const char* what) {
    const double wrong = 0x1p-18;
    for (int n = 0; n < k->N; n++) {
        const double capped = k->of.softcap * 0x1p-18;
        EXPECT_NEAR(loss[n], k->loss[n], wrong * (1 + fabs(k->loss[n])) + capped, "%s: row %d, V %d, %s",
                    what, n, k->V, dtype_name(DTYPE_OF(T)));
        const double z = 1 + 2 * k->of.z_loss * (largest_logit(k, n) + log(k->V));
        const double p_wrong = (wrong + capped + 0x1p-24 * largest_logit(k, n)) * z;
        for (int v = 0; v < k->Vp && dlogits; v++) {
            const double want = k->dlogits[(size_t)n * k->Vp + v];
            const double terms = (k->of.softcap > 0 ? scale : fabs(want)) +
                                 (v == k->target[n] ? scale : 0); // p scale and scale
            const double tolerance = v < k->V ? roundoff<T>() * fabs(want) + p_wrong * terms + 0x1p-25 : 0;
            EXPECT_NEAR(dlogits[(size_t)n * k->Vp + v], want, tolerance, "%s: row %d, column %d of %d, %s",
                        what, n, v, k->V, dtype_name(DTYPE_OF(T)));
        }
    }
}

// Sets loss and dlogits, on the host, from `gpu`.
template <class T>
static void backward(float** loss, float** dlogits, const Case* k, float scale, size_t shift,
                     const Gpu* gpu) {
    const size_t n = (size_t)k->N * k->Vp;
    T* logits = upload<T>(k->logits, n, shift, gpu);
    int* target = upload_ints(k->target, k->N, gpu);
    float* losses = upload<float>(ops_floats(k->N), k->N, 0, gpu);
    cross_entropy_backward(losses, logits, target, scale, k->of, gpu);
    *loss = download(losses, k->N, gpu);
    *dlogits = download(logits, n, gpu);
    gpu_free(losses);
    gpu_free(target);
    gpu_free(logits - shift);
}

template <class T> static float* loss_only(const Case* k, size_t shift, const Gpu* gpu) {
    const size_t n = (size_t)k->N * k->Vp;
    T* logits = upload<T>(k->logits, n, shift, gpu);
    int* target = upload_ints(k->target, k->N, gpu);
    float* losses = upload<float>(ops_floats(k->N), k->N, 0, gpu);
    cross_entropy_loss(losses, logits, target, k->of, gpu);
    EXPECT(ops_same_bits(download(logits, n, gpu), k->logits, n), "cross_entropy_loss wrote to the logits");
    float* loss = download(losses, k->N, gpu);
    gpu_free(losses);
    gpu_free(target);
    gpu_free(logits - shift);
    return loss;
}

static Case case_open(int N, int V, int Vp) {
    const Case k = {N, V, Vp, {N, V, Vp, 0, 0}, ops_normal((size_t)N * Vp, 4), ops_below(N, V), NULL, NULL};
    for (int i = 0; i < N * Vp; i++) { // what stands in the padding must not matter
        k.logits[i] = i % Vp < V ? k.logits[i] : 10000.0f;
    }
    return k;
}

// Sets the losses and gradients of the rounded logits, in float64.
static void set_reference(Case* k, float scale) {
    const double* logits = ops_widen(k->logits, (size_t)k->N * k->Vp);
    double* lse = ops_doubles(k->N);
    k->loss = ops_doubles(k->N), k->dlogits = ops_doubles((size_t)k->N * k->Vp);
    ref_classifier_forward(k->loss, lse, logits, k->target,
                           {(size_t)k->N, (size_t)k->V, (size_t)k->Vp, k->of.softcap, 0});
    ref_classifier_backward(k->dlogits, logits, lse, k->target, scale,
                            {(size_t)k->N, (size_t)k->V, (size_t)k->Vp, k->of.softcap, k->of.z_loss});
}

template <class T> static void test_case(Case* k, size_t shift, const Gpu* gpu) {
    const float scale = 0.25f;
    Gpu small = *gpu; // has no shared memory for a row
    small.shared_bytes = 1024;
    float *loss, *dlogits, *loss_again, *dlogits_again;
    backward<T>(&loss, &dlogits, k, scale, shift, gpu); // rounds the logits
    set_reference(k, scale);
    compare<T>(k, loss, dlogits, scale, "one reading");
    backward<T>(&loss_again, &dlogits_again, k, scale, shift, &small);
    EXPECT(ops_same_bits(loss, loss_again, k->N), "loss of two readings, %d x %d", k->N, k->V);
    EXPECT(ops_same_bits(dlogits, dlogits_again, (size_t)k->N * k->Vp), "dlogits of two readings, %d x %d",
           k->N, k->V);
    compare<T>(k, loss_only<T>(k, shift, gpu), NULL, scale, "loss only");
}

template <class T> static void test_size(int N, int V, int Vp, size_t shift, const Gpu* gpu) {
    const float softcaps[] = {0, 3, 0, 15}, z_losses[] = {0, 0, 0.01f, 0.01f};
    for (int i = 0; i < 4; i++) {
        Case k = case_open(N, V, Vp);
        k.of.softcap = softcaps[i];
        k.of.z_loss = z_losses[i];
        test_case<T>(&k, shift, gpu);
        ops_close("sizes");
    }
}

// Rows of equal logits, of masked ones (-infinity), one that rules the others, and large ones.
template <class T> static void test_extremes(const Gpu* gpu) {
    enum { V = 2000, VP = 2048 };
    Case k = case_open(5, V, VP);
    for (int v = 0; v < V; v++) {
        k.logits[0 * VP + v] = -3;
        k.logits[1 * VP + v] = v % 100 == 7 ? k.logits[VP + v] : -INFINITY;
        k.logits[2 * VP + v] = v == 1999 ? 500.0f : k.logits[2 * VP + v];
        k.logits[3 * VP + v] += 10000;
        k.logits[4 * VP + v] = -(float)v; // every element a smaller one
    }
    k.target[1] = 107;
    test_case<T>(&k, 0, gpu);
    ops_close("extremes");
}

// NaN and +infinity anywhere, the target or not, give a loss of NaN in their row and no other.
template <class T> static void test_nan(float softcap, const Gpu* gpu) {
    enum { V = 777, VP = 784 };
    Case k = case_open(5, V, VP);
    k.of.softcap = softcap;
    k.logits[1 * VP + 0] = NAN;
    k.logits[2 * VP + V - 1] = NAN;
    k.logits[3 * VP + 400] = softcap > 0 ? NAN : INFINITY; // capped, infinity is a number
    k.logits[4 * VP + V] = NAN;                            // in the padding
    k.target[1] = 5;
    k.target[2] = V - 1;
    float *loss, *dlogits;
    const float* only = loss_only<T>(&k, 0, gpu);
    backward<T>(&loss, &dlogits, &k, 1, 0, gpu);
    for (int n = 0; n < 5; n++) {
        const int wanted = n == 1 || n == 2 || n == 3;
        EXPECT(isnan(loss[n]) == wanted && isnan(only[n]) == wanted, "row %d: %g %g", n, loss[n], only[n]);
        EXPECT(isnan(dlogits[n * VP + 3]) == wanted, "row %d: dlogits %g", n, dlogits[n * VP + 3]);
        EXPECT(dlogits[n * VP + V] == 0, "row %d: dlogits %g in the padding", n, dlogits[n * VP + V]);
    }
    ops_close("nan");
}

// Rows without a target, whatever they hold, give zeros, and the others what they give alone.
template <class T> static void test_no_target(int V, int Vp, const Gpu* gpu) {
    enum { N = 4 };
    Case k = case_open(N, V, Vp);
    float *loss, *dlogits, *want_loss, *want;
    backward<T>(&want_loss, &want, &k, 0.5f, 0, gpu);
    for (int n = 0; n < N; n += 3) {
        k.target[n] = NO_TARGET;
        k.logits[(size_t)n * Vp + V / 2] = NAN;
        want_loss[n] = 0;
        memset(want + (size_t)n * Vp, 0, (size_t)Vp * sizeof(float));
    }
    k.logits[V / 3] = INFINITY;
    backward<T>(&loss, &dlogits, &k, 0.5f, 0, gpu);
    const float* only = loss_only<T>(&k, 0, gpu);
    EXPECT(only[0] == 0 && only[3] == 0 && ops_same_bits(only + 1, want_loss + 1, 2), "V %d: loss alone", V);
    EXPECT(ops_same_bits(loss, want_loss, N), "V %d: loss", V);
    EXPECT(ops_same_bits(dlogits, want, (size_t)N * Vp), "V %d: gradient", V);
    ops_close("no target");
}

// Tests is_top as on the CPU: every target of a few rows with equal logits, a NaN, and a target
// that does not count.
template <class T> static void test_top(int V, int Vp, const Gpu* gpu) {
    enum { N = 6 };
    Case k = case_open(N, V, Vp);
    int want[N];
    for (int n = 0; n < N; n++) {
        float* row = k.logits + (size_t)n * Vp;
        for (int v = 0; v < V; v++) {
            row[v] = (float)((v * 7 + n) % 11); // exact in every type
        }
        k.target[n] = (V - 1) * n / (N - 1);
        row[k.target[n]] = n % 2 ? 10.0f : row[k.target[n]];
    }
    k.logits[(size_t)4 * Vp + V / 2] = NAN;
    k.target[5] = NO_TARGET;
    cross_entropy_top_cpu(want, k.logits, k.target, k.of);
    T* logits = upload<T>(k.logits, (size_t)N * Vp, 0, gpu);
    int* target = upload_ints(k.target, N, gpu);
    int* is_top = upload_ints(k.target, N, gpu);
    int got[N];
    cross_entropy_top(is_top, logits, target, k.of, gpu);
    CUDA_CHECK(cudaMemcpyAsync(got, is_top, sizeof(got), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (int n = 0; n < N; n++) {
        EXPECT(got[n] == want[n], "row %d, V %d: %d, wanted %d", n, V, got[n], want[n]);
    }
    gpu_free(is_top);
    gpu_free(target);
    gpu_free(logits);
    ops_close("top");
}

// Logits in slices of the words, each a matrix of its own, one after the other: slice i of `of` has
// words [i Vp/of, (i+1) Vp/of).
static float* cut(const float* logits, int N, int Vp, int of) {
    float* slices = ops_floats((size_t)N * Vp);
    const int words = Vp / of;
    for (int i = 0; i < of; i++) {
        for (int n = 0; n < N; n++) {
            memcpy(slices + ((size_t)i * N + n) * words, logits + (size_t)n * Vp + (size_t)i * words,
                   (size_t)words * sizeof(float));
        }
    }
    return slices;
}

static float* join(const float* slices, int N, int Vp, int of) {
    float* logits = ops_floats((size_t)N * Vp);
    const int words = Vp / of;
    for (int i = 0; i < of; i++) {
        for (int n = 0; n < N; n++) {
            memcpy(logits + (size_t)n * Vp + (size_t)i * words, slices + ((size_t)i * N + n) * words,
                   (size_t)words * sizeof(float));
        }
    }
    return logits;
}

// The sizes of slice i; its padding starts at word V.
static CrossEntropy slice_of(const Case* k, int i, int of) {
    CrossEntropy slice = k->of;
    const int words = k->Vp / of, left = k->V - i * words;
    slice.Vp = words;
    slice.V = left < 0 ? 0 : left < words ? left : words;
    return slice;
}

// Sets losses and is_top on the host, and logits to their gradient.
template <class T>
static void in_slices(float** loss, float** dlogits, int* is_top, const Case* k, float scale, int of,
                      const Gpu* gpu) {
    const int N = k->N, words = k->Vp / of;
    const size_t elements = (size_t)N * words;
    T* logits = upload<T>(cut(k->logits, N, k->Vp, of), of * elements, 0, gpu);
    int *target = upload_ints(k->target, N, gpu), *top = upload_ints(k->target, N, gpu);
    float* losses = unset<float>(N, gpu);
    CrossEntropySum *sums = unset<CrossEntropySum>((size_t)of * N, gpu), *whole = sums;
    CrossEntropyTop* tops = unset<CrossEntropyTop>((size_t)of * N, gpu);
    for (int i = 0; i < of; i++) {
        const T* own = logits + i * elements;
        const size_t at = (size_t)i * N;
        cross_entropy_slice(sums + at, own, target, i * words, slice_of(k, i, of), gpu);
        cross_entropy_slice_top(tops + at, own, i * words, slice_of(k, i, of), gpu);
    }
    cross_entropy_combine(losses, whole, sums, target, of, N, gpu);
    cross_entropy_combine_top(top, tops, target, of, N, gpu);
    for (int i = 0; i < of; i++) {
        cross_entropy_slice_backward(logits + i * elements, whole, target, i * words, scale,
                                     slice_of(k, i, of), gpu);
    }
    *loss = take_back(losses, N, gpu);
    *dlogits = join(take_back(logits, of * elements, gpu), N, k->Vp, of);
    CUDA_CHECK(cudaMemcpy(is_top, top, (size_t)N * sizeof(int), cudaMemcpyDeviceToHost));
    gpu_free(tops);
    gpu_free(sums);
    gpu_free(top);
    gpu_free(target);
}

// Compares the numbers of slices with the reference; with one slice they have the bits of the
// whole.
template <class T> static void test_slices(Case* k, int of, const Gpu* gpu) {
    const float scale = 0.25f;
    float *loss, *dlogits, *whole_loss, *whole;
    int *is_top = (int*)check_alloc((size_t)k->N, sizeof(int), "top"),
        *want_top = (int*)check_alloc((size_t)k->N, sizeof(int), "top");
    backward<T>(&whole_loss, &whole, k, scale, 0, gpu); // rounds the logits
    set_reference(k, scale);
    in_slices<T>(&loss, &dlogits, is_top, k, scale, of, gpu);
    compare<T>(k, loss, dlogits, scale, "slices");
    cross_entropy_top_cpu(want_top, k->logits, k->target, k->of);
    for (int n = 0; n < k->N; n++) {
        EXPECT(is_top[n] == want_top[n], "row %d of %d slices: is_top %d", n, of, is_top[n]);
    }
    EXPECT(of > 1 || ops_same_bits(loss, whole_loss, k->N), "one slice: losses");
    EXPECT(of > 1 || ops_same_bits(dlogits, whole, (size_t)k->N * k->Vp), "one slice: gradients");
    free(want_top);
    free(is_top);
}

// Slices of several sizes, the last of which may have only padding, with the target in each of
// them, equal largest logits in two of them, and a row that does not count.
template <class T> static void test_cut(int V, int Vp, const Gpu* gpu) {
    const float softcaps[] = {0, 15, 0}, z_losses[] = {0, 0, 0.01f};
    for (const int of : {1, 2, 4}) {
        for (int i = 0; i < 3; i++) {
            Case k = case_open(9, V, Vp);
            k.of.softcap = softcaps[i];
            k.of.z_loss = z_losses[i];
            for (int n = 0; n < 8; n++) {
                k.target[n] = (V - 1) * n / 7;
                k.logits[(size_t)n * Vp + k.target[n]] = n % 2 ? 30.0f : -1.0f;
            }
            k.logits[(size_t)1 * Vp + V - 1] = 30.0f; // the first one counts
            k.logits[(size_t)7 * Vp + 0] = 30.0f;
            k.target[8] = NO_TARGET;
            test_slices<T>(&k, of, gpu);
            ops_close("slices");
        }
    }
}

// NaN in one slice is one in the loss, is no top, and does not spread to other rows.
template <class T> static void test_cut_nan(const Gpu* gpu) {
    enum { V = 100, VP = 128 };
    Case k = case_open(3, V, VP);
    float *loss, *dlogits;
    int is_top[3];
    k.target[0] = k.target[1] = k.target[2] = 70;
    k.logits[1 * VP + 70] = 30.0f;
    k.logits[1 * VP + 3] = NAN;
    k.logits[2 * VP + 70] = 30.0f;
    in_slices<T>(&loss, &dlogits, is_top, &k, 1, 4, gpu);
    EXPECT(!isnan(loss[0]) && isnan(loss[1]) && !isnan(loss[2]), "losses %g %g %g", loss[0], loss[1],
           loss[2]);
    EXPECT(is_top[1] == 0 && is_top[2] == 1, "is_top %d %d", is_top[1], is_top[2]);
    ops_close("nan of a slice");
}

template <class T> static void test_type(const Gpu* gpu) {
    const int sizes[][3] = {{1, 1, 1},     {3, 1, 8},       {31, 31, 31},    {33, 33, 128},    {2, 768, 768},
                            {2, 769, 777}, {2, 1000, 1024}, {1, 9000, 9001}, {2, 50257, 50304}};
    for (const int* size : sizes) {
        test_size<T>(size[0], size[1], size[2], 0, gpu);
    }
    test_size<T>(3, 500, 512, 1, gpu); // no pack can be read here
    test_extremes<T>(gpu);
    test_nan<T>(0, gpu);
    test_nan<T>(15, gpu);
    test_no_target<T>(33, 40, gpu);
    test_no_target<T>(769, 777, gpu); // no packs
    for (const int V : {1, 33, 2500}) {
        test_top<T>(V, V + 7, gpu);
    }
    test_cut<T>(100, 128, gpu); // the last of four slices has words 96 to 99
    test_cut<T>(90, 128, gpu);  // only padding
    test_cut<T>(1000, 1004, gpu);
    test_cut_nan<T>(gpu);
}

TEST(cross_entropy) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    // Rows of 48 KiB, all that a block gets without asking: with the kernel's static arrays it is
    // too much. Before longer rows, for which the kernel asks.
    test_size<float>(1, 12170, 12288, 0, &gpu);
    test_size<bf16>(1, 24570, 24576, 0, &gpu);
    test_type<float>(&gpu);
    test_type<bf16>(&gpu);
    UNSANITIZED(test_type<fp16>(&gpu));
    gpu_close(&gpu);
}
