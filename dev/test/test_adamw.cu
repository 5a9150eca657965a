// test_adamw.cu -- the update against reference.h with and without master weights, stochastic rounding, the
// gradient's norm, conversions and the mean loss.
#include "llmc/adamw.cuh"
#include "llmc/reference.h"
#include "ops.h"

// ---- arrays on the device ----

// x (n), in host memory, as elements of T on the device; the caller frees it.
template <class T> static T* upload(const float* x, size_t n, const Gpu* gpu) {
    T* host = (T*)check_alloc(n, sizeof(T), "host");
    for (size_t i = 0; i < n; i++) {
        host[i] = from_float<T>(x[i]);
    }
    T* device = (T*)gpu_alloc(n, sizeof(T), "device");
    CUDA_CHECK(cudaMemcpyAsync(device, host, n * sizeof(T), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    free(host);
    return device;
}

// Frees x and returns what was in it, as floats that live until ops_close.
template <class T> static float* download(T* x, size_t n, const Gpu* gpu) {
    T* host = (T*)check_alloc(n, sizeof(T), "host");
    float* result = ops_floats(n);
    CUDA_CHECK(cudaMemcpyAsync(host, x, n * sizeof(T), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (size_t i = 0; i < n; i++) {
        result[i] = to_float(host[i]);
    }
    free(host);
    gpu_free(x);
    return result;
}

template <class T> static float* rounded(float* x, size_t n) {
    for (size_t i = 0; i < n; i++) {
        x[i] = to_float(from_float<T>(x[i]));
    }
    return x;
}

// ---- segments ----

enum { LENGTH = 3584 }; // of the allocations

// One element, awkward sizes, neighbors without padding, nothing, several blocks, the end of the allocation.
static AdamWSegments awkward_segments(void) {
    const size_t bounds[][2] = {{0, 1},       {128, 159},   {256, 289},   {384, 1152},
                                {1152, 1280}, {1280, 1280}, {1280, 3463}, {3464, 3584}};
    AdamWSegments segments;
    memset(&segments, 0, sizeof(segments));
    segments.count = 8;
    for (int s = 0; s < 8; s++) {
        segments.start[s] = bounds[s][0];
        segments.end[s] = bounds[s][1];
        segments.decay[s] = s % 2;
    }
    return segments;
}

static AdamWSegments one_segment(size_t start, size_t end) {
    AdamWSegments segments;
    memset(&segments, 0, sizeof(segments));
    segments.count = 1;
    segments.start[0] = start;
    segments.end[0] = end;
    segments.decay[0] = 1;
    return segments;
}

// The segment of element i, -1 in padding.
static int segment_of(const AdamWSegments* segments, size_t i) {
    for (int s = 0; s < segments->count; s++) {
        if (segments->start[s] <= i && i < segments->end[s]) {
            return s;
        }
    }
    return -1;
}

// ---- the update ----

static const AdamW defaults = {0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.37f, 1};

// The state of an optimizer in host memory, LENGTH floats each.
typedef struct {
    float *param, *master, *m, *v;
} State;

static State state_random(void) {
    State s = {ops_normal(LENGTH, 1), ops_normal(LENGTH, 1), ops_normal(LENGTH, 0.1f),
               ops_normal(LENGTH, 0.1f)};
    for (int i = 0; i < LENGTH; i++) {
        s.v[i] = fabsf(s.v[i]);
    }
    return s;
}

// One update on the device of a state; the gradients are rounded to G.
template <class T, class G>
static State update(State s, const float* grad, AdamWSegments segments, AdamW opt, uint64_t seed,
                    MasterWeights with, const Gpu* gpu) {
    T* param = upload<T>(s.param, LENGTH, gpu);
    float* master = with == MASTER_FP32 ? upload<float>(s.master, LENGTH, gpu) : NULL;
    float *m = upload<float>(s.m, LENGTH, gpu), *v = upload<float>(s.v, LENGTH, gpu);
    G* device_grad = upload<G>(grad, LENGTH, gpu);
    const Gradient gradient = {device_grad, DTYPE_OF(G)};
    adamw_update(param, master, gradient, m, v, segments, opt, seed, gpu);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    gpu_free(device_grad);
    const State result = {download(param, LENGTH, gpu), master ? download(master, LENGTH, gpu) : NULL,
                          download(m, LENGTH, gpu), download(v, LENGTH, gpu)};
    return result;
}

typedef struct {
    double *weights, *m, *v;
} Wanted;

// What the reference makes of the same: `weights` are the parameters or the master weights.
static Wanted reference(State s, const float* weights, const float* grad, const AdamWSegments* segments,
                        AdamW opt) {
    const Wanted want = {ops_widen(weights, LENGTH), ops_widen(s.m, LENGTH), ops_widen(s.v, LENGTH)};
    const double* wide = ops_widen(grad, LENGTH);
    for (int i = 0; i < segments->count; i++) {
        const size_t start = segments->start[i], n = segments->end[i] - start;
        AdamW of_segment = opt;
        of_segment.weight_decay = segments->decay[i] ? opt.weight_decay : 0;
        ref_adamw(want.weights + start, wide + start, want.m + start, want.v + start, n, of_segment);
    }
    return want;
}

// The update is computed in fp32, with a handful of roundings of half an epsilon each in m, v and the step, and
// one in the sum; the step is at most a few lr.
static void expect_state(const char* what, State got, const float* weights, Wanted want) {
    double* magnitude = ops_doubles(LENGTH);
    for (int i = 0; i < LENGTH; i++) {
        magnitude[i] = fabs(want.weights[i]) + 10 * defaults.lr;
    }
    EXPECT_NEAR(ops_error(weights, want.weights, magnitude, LENGTH), 0, 2, "%s: weights", what);
    EXPECT_NEAR(ops_error(got.m, want.m, NULL, LENGTH), 0, 2, "%s: m", what);
    EXPECT_NEAR(ops_error(got.v, want.v, NULL, LENGTH), 0, 2, "%s: v", what);
}

// Padding as it was, and whether anything else is as it was.
static void expect_padding(const char* what, const float* got, const float* before,
                           const AdamWSegments* segments) {
    int changed = 0;
    for (size_t i = 0; i < LENGTH; i++) {
        if (segment_of(segments, i) < 0) {
            EXPECT(memcmp(&got[i], &before[i], sizeof(float)) == 0, "%s: padding at %zu: %g, was %g", what, i,
                   got[i], before[i]);
        } else {
            changed += got[i] != before[i];
        }
    }
    EXPECT(changed > LENGTH / 2, "%s: only %d elements changed", what, changed);
}

// Padding of the gradients is NaN: it may not be read.
template <class G> static float* random_gradient(const AdamWSegments* segments) {
    float* grad = rounded<G>(ops_normal(LENGTH, 1), LENGTH);
    for (size_t i = 0; i < LENGTH; i++) {
        grad[i] = segment_of(segments, i) < 0 ? NAN : grad[i];
    }
    return grad;
}

template <class T, class G> static void test_with_master(const Gpu* gpu) {
    const AdamWSegments segments = awkward_segments();
    const char* what = dtype_name(DTYPE_OF(T));
    const State s = state_random();
    rounded<T>(s.param, LENGTH);
    AdamW opt = defaults;
    for (opt.t = 1; opt.t <= 1001; opt.t += 500) {
        float* grad = random_gradient<G>(&segments);
        const State got = update<T, G>(s, grad, segments, opt, 1, MASTER_FP32, gpu);
        expect_state(what, got, got.master, reference(s, s.master, grad, &segments, opt));
        expect_padding("params", got.param, s.param, &segments);
        expect_padding("master", got.master, s.master, &segments);
        expect_padding("m", got.m, s.m, &segments);
        expect_padding("v", got.v, s.v, &segments);
        for (size_t i = 0; i < LENGTH; i++) { // rounded to nearest
            const float want =
                segment_of(&segments, i) < 0 ? s.param[i] : to_float(from_float<T>(got.master[i]));
            EXPECT(got.param[i] == want, "%s: params at %zu: %g, wanted %g", what, i, got.param[i], want);
        }
        const State again = update<T, G>(s, grad, segments, opt, 2, MASTER_FP32, gpu); // the seed is not used
        EXPECT(ops_same_bits(got.param, again.param, LENGTH) &&
                   ops_same_bits(got.master, again.master, LENGTH),
               "%s: two runs differ", what);
    }
    ops_close("with master weights");
}

// Without master weights, T rounds what the update in fp32 gives, with the words of rand.h.
template <class T, class G> static void test_without_master(const Gpu* gpu) {
    const AdamWSegments segments = awkward_segments();
    const char* what = dtype_name(DTYPE_OF(T));
    const uint64_t seed = 0x123456789ABCDEF;
    State s = state_random();
    rounded<T>(s.param, LENGTH);
    AdamW opt = defaults;
    opt.t = 7;
    float* grad = random_gradient<G>(&segments);
    const State exact = update<float, float>(s, grad, segments, opt, seed, MASTER_NONE, gpu);
    const State got = update<T, G>(s, grad, segments, opt, seed, MASTER_NONE, gpu);
    expect_state(what, exact, exact.param, reference(s, s.param, grad, &segments, opt));
    expect_padding("params", got.param, s.param, &segments);
    EXPECT(ops_same_bits(got.m, exact.m, LENGTH) && ops_same_bits(got.v, exact.v, LENGTH), "%s: moments",
           what);
    for (size_t i = 0; i < LENGTH; i++) {
        const uint32_t random = rand_block(seed, rand_stream("adamw") + 7, i / 4).word[i % 4];
        const float want = to_float(round_stochastic<T>(exact.param[i], random));
        EXPECT(segment_of(&segments, i) < 0 || got.param[i] == want, "%s: params at %zu: %.9g, wanted %.9g",
               what, i, got.param[i], want);
    }
    ops_close("without master weights");
}

// Where an element lies in the launch does not matter; the seed and the number of the update do.
template <class T> static void test_random_words(const Gpu* gpu) {
    State s = state_random();
    const float* grad = ops_normal(LENGTH, 1);
    AdamW opt = defaults;
    AdamWSegments parts = one_segment(0, LENGTH);
    parts.count = 2;
    parts.end[0] = parts.start[1] = 1352; // not where a block of the whole ends
    parts.end[1] = LENGTH;
    parts.decay[1] = 1;
    const State whole = update<T, float>(s, grad, one_segment(0, LENGTH), opt, 1, MASTER_NONE, gpu);
    const State cut = update<T, float>(s, grad, parts, opt, 1, MASTER_NONE, gpu);
    const State other = update<T, float>(s, grad, parts, opt, 2, MASTER_NONE, gpu);
    EXPECT(ops_same_bits(whole.param, cut.param, LENGTH), "the bits depend on the segments");
    EXPECT(!ops_same_bits(whole.param, other.param, LENGTH), "the bits do not depend on the seed");
    opt.lr = 0; // parameters that T has do not change, whatever is added to the moments
    opt.t = 3;
    rounded<T>(s.param, LENGTH);
    const State still = update<T, float>(s, grad, parts, opt, 1, MASTER_NONE, gpu);
    EXPECT(ops_same_bits(still.param, s.param, LENGTH), "an update of nothing changed parameters");
    ops_close("random words");
}

// Updates of a hundredth of the distance to the next number: rounded to nearest, none would ever happen. The
// mean over LENGTH elements of 20 updates has a standard deviation of sqrt(20 * 0.01 / LENGTH) distances.
template <class T> static void test_small_updates(const Gpu* gpu) {
    const double distance = DTYPE_OF(T) == DTYPE_BF16 ? 0x1p-7 : 0x1p-10; // from 1 upwards
    State s = state_random();
    AdamW opt = defaults;
    opt.lr = (float)(distance / 100);
    opt.weight_decay = 0;
    opt.grad_scale = 1;
    float* grad = ops_floats(LENGTH);
    for (int i = 0; i < LENGTH; i++) {
        s.param[i] = 1, s.m[i] = 0, s.v[i] = 0, grad[i] = -1; // each update is lr upwards
    }
    for (opt.t = 1; opt.t <= 20; opt.t++) {
        s = update<T, float>(s, grad, one_segment(0, LENGTH), opt, 5, MASTER_NONE, gpu);
    }
    double mean = 0;
    for (int i = 0; i < LENGTH; i++) {
        mean += (s.param[i] - 1) / distance / LENGTH;
    }
    EXPECT_NEAR(mean, 20 * 0.01, 5 * sqrt(20 * 0.01 / LENGTH), "%s: way made", dtype_name(DTYPE_OF(T)));
    ops_close("small updates");
}

// A NaN or infinity in a gradient reaches its own element only.
template <class T> static void test_nonfinite_gradient(const Gpu* gpu, MasterWeights with) {
    const State s = state_random();
    float* grad = ops_normal(LENGTH, 1);
    grad[33] = NAN;
    grad[77] = INFINITY;
    const State got = update<T, T>(s, grad, one_segment(0, LENGTH), defaults, 1, with, gpu);
    for (int i = 0; i < LENGTH; i++) {
        const int bad = i == 33 || i == 77;
        EXPECT((isnan(got.param[i]) != 0) == bad, "%s: params at %d: %g", dtype_name(DTYPE_OF(T)), i,
               got.param[i]);
        EXPECT(isfinite(got.m[i]) == !bad && isfinite(got.v[i]) == !bad, "moments at %d: %g %g", i, got.m[i],
               got.v[i]);
    }
    ops_close("not finite");
}

// ---- stochastic rounding ----

template <class T> static T from_bits(uint16_t bits) {
    T x;
    memcpy((void*)&x, &bits, sizeof(x));
    return x;
}

// Every number of T is kept, infinities and NaN too.
template <class T> static void test_representable(void) {
    const uint32_t random[] = {0, 1, 0x80000000u, 0xFFFF0000u, 0xFFFFFFFFu};
    for (int bits = 0; bits < 65536; bits++) {
        const float x = to_float(from_bits<T>((uint16_t)bits));
        for (int r = 0; r < 5; r++) {
            const float got = to_float(round_stochastic<T>(x, random[r]));
            EXPECT(isnan(x) ? isnan(got) : float_bits_(got) == float_bits_(x), "%s: %.9g became %.9g",
                   dtype_name(DTYPE_OF(T)), x, got);
        }
    }
}

// Between the neighbors number `bits` and `bits` + 1 of T, at nine fractions of the way: with the words 0,
// 2^16, ... the share of the upper one is the fraction, to 2^-16; with all smaller and larger words it is one
// of the two.
template <class T> static void test_unbiased(uint16_t bits) {
    const double lower = to_float(from_bits<T>(bits)), upper = to_float(from_bits<T>((uint16_t)(bits + 1)));
    for (int part = 1; part < 10; part++) {
        const float x = (float)(lower + (upper - lower) * part / 10);
        int ups = 0;
        for (uint32_t high = 0; high < 65536; high++) {
            const float got = to_float(round_stochastic<T>(x, high << 16));
            ups += got == (float)upper;
            if (got != (float)upper && got != (float)lower) {
                EXPECT(0, "%s: %.9g became %.9g, wanted %.9g or %.9g", dtype_name(DTYPE_OF(T)), x, got, lower,
                       upper);
                return;
            }
        }
        EXPECT_NEAR(ups / 65536.0, (x - lower) / (upper - lower), 1.01 / 65536,
                    "%s: share of %.9g between %.9g, %.9g", dtype_name(DTYPE_OF(T)), x, lower, upper);
    }
}

// Subnormals, the smallest normals, powers of two from both sides, the largest; both signs.
template <class T> static void test_unbiased_everywhere(void) {
    const uint16_t one = DTYPE_OF(T) == DTYPE_BF16 ? 0x3F80 : 0x3C00;
    const uint16_t normal = DTYPE_OF(T) == DTYPE_BF16 ? 0x0080 : 0x0400;
    const uint16_t infinite = DTYPE_OF(T) == DTYPE_BF16 ? 0x7F80 : 0x7C00;
    const uint16_t below[] = {0,
                              1,
                              2,
                              (uint16_t)(normal / 2),
                              (uint16_t)(normal - 1),
                              normal,
                              (uint16_t)(one - 1),
                              one,
                              0x1234,
                              (uint16_t)(infinite - 2)};
    for (int i = 0; i < 10; i++) {
        test_unbiased<T>(below[i]);
        test_unbiased<T>((uint16_t)(below[i] | 0x8000));
    }
    const float large[] = {65504.01f, 65519, 65520, 1e5f, 3.3895313e38f, 3.39e38f, FLT_MAX};
    for (int i = 0; i < 7; i++) {
        const float up = to_float(round_stochastic<T>(large[i], 0xFFFFFFFFu));
        const float down = to_float(round_stochastic<T>(-large[i], 0xFFFFFFFFu));
        EXPECT(isfinite(up) && up == -down, "%s: %g became %g, %g", dtype_name(DTYPE_OF(T)), large[i], up,
               down);
    }
    EXPECT(to_float(round_stochastic<T>(1e-30f, 0)) >= 0 && round_stochastic<float>(0.1f, 7) == 0.1f,
           "tiny; float");
}

// ---- conversions ----

template <class T> static void test_conversions(const Gpu* gpu) {
    const AdamWSegments segments = awkward_segments();
    float *x = ops_normal(LENGTH, 1), *before = ops_normal(LENGTH, 0);
    float* master = upload<float>(x, LENGTH, gpu);
    T* params = upload<T>(before, LENGTH, gpu);
    float* back = upload<float>(before, LENGTH, gpu);
    params_from_master(params, master, segments, gpu);
    master_from_params(back, params, segments, gpu);
    const float *got = download(params, LENGTH, gpu), *got_back = download(back, LENGTH, gpu);
    for (size_t i = 0; i < LENGTH; i++) {
        const float want = segment_of(&segments, i) < 0 ? before[i] : to_float(from_float<T>(x[i]));
        EXPECT(got[i] == want && got_back[i] == want, "%s at %zu: %g and %g, wanted %g",
               dtype_name(DTYPE_OF(T)), i, got[i], got_back[i], want);
    }
    EXPECT(ops_same_bits(download(master, LENGTH, gpu), x, LENGTH), "the master weights changed");
    ops_close("conversions");
}

// ---- sums ----

// T is the type of the weights, G of the gradients.
template <class T, class G>
static double square_sum(const float* grad, size_t n, AdamWSegments segments, const Gpu* gpu) {
    GradientNorm norm;
    gradient_norm_open(&norm, segments);
    const float unset[2] = {NAN, NAN};
    double* result = (double*)upload<float>(unset, 2, gpu);
    G* device_grad = upload<G>(grad, n, gpu);
    const Gradient gradient = {device_grad, DTYPE_OF(G)};
    double sum;
    gradient_square_sum<T>(result, gradient, segments, &norm, gpu);
    CUDA_CHECK(cudaMemcpyAsync(&sum, result, sizeof(sum), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    gpu_free(result);
    gpu_free(device_grad);
    gradient_norm_close(&norm);
    return sum;
}

// A thread adds at most 65 squares in fp32, a tree of 8 levels the threads: fewer than 75 roundings of half
// an epsilon, which add up like the square root of their number.
template <class T, class G> static void test_square_sum(size_t start, size_t n, const Gpu* gpu) {
    const AdamWSegments segments = one_segment(start, start + n);
    float* grad = rounded<G>(ops_normal(start + n + 8, 0.1f), start + n + 8);
    double want = 0;
    for (size_t i = 0; i < start + n + 8; i++) {
        grad[i] = i < start || i >= start + n ? NAN : grad[i];
        want += i < start || i >= start + n ? 0 : (double)grad[i] * grad[i];
    }
    const double got = square_sum<T, G>(grad, start + n + 8, segments, gpu);
    EXPECT_NEAR(got, want, want * sqrt(75) / 2 * FLT_EPSILON, "%s, n %zu", dtype_name(DTYPE_OF(G)), n);
    EXPECT((square_sum<T, G>(grad, start + n + 8, segments, gpu) == got), "two runs differ");
    if (n > 0) {
        const float kept = grad[start + n - 1];
        grad[start + n - 1] = INFINITY;
        EXPECT((square_sum<T, G>(grad, start + n + 8, segments, gpu) == INFINITY),
               "an infinity at the end is lost");
        grad[start + n - 1] = kept;
        grad[start + n / 2] = NAN;
        EXPECT((isnan(square_sum<T, G>(grad, start + n + 8, segments, gpu))), "a NaN is lost");
    }
    ops_close("square sum");
}

template <class T, class G> static void test_square_sums(const Gpu* gpu) {
    const size_t sizes[] = {0, 1, 31, 33, 768, GRADIENT_PIECE_ - 1, GRADIENT_PIECE_ + 1};
    for (int i = 0; i < 7; i++) {
        test_square_sum<T, G>(i % 2 ? 128 : 0, sizes[i], gpu);
    }
    const AdamWSegments segments = awkward_segments();
    float* ones = ops_floats(LENGTH);
    double want = 0;
    for (size_t i = 0; i < LENGTH; i++) {
        ones[i] = segment_of(&segments, i) < 0 ? NAN : 1;
        want += segment_of(&segments, i) >= 0;
    }
    EXPECT((square_sum<T, G>(ones, LENGTH, segments, gpu) == want), "ones in awkward segments");
    ops_close("square sums");
}

// The largest fp16 everywhere: 65504^2 n is far beyond fp16 and far below the end of fp32. In bf16 the sums
// of the blocks are 2^52, 1 and 1: only a double holds them all.
static void test_square_sum_range(const Gpu* gpu) {
    const size_t n = 2 * GRADIENT_PIECE_ + 1;
    float* grad = ops_floats(n);
    for (size_t i = 0; i < n; i++) {
        grad[i] = 65504;
    }
    const double want = 65504.0 * 65504.0 * (double)n;
    EXPECT_NEAR((square_sum<fp16, fp16>(grad, n, one_segment(0, n), gpu)), want, want * 1e-6, "fp16");
    memset(grad, 0, n * sizeof(float));
    grad[0] = 0x1p26f; // 2^52
    grad[GRADIENT_PIECE_] = grad[2 * GRADIENT_PIECE_] = 1;
    EXPECT((square_sum<bf16, bf16>(grad, n, one_segment(0, n), gpu) == 0x1p52 + 2),
           "blocks are not summed in double");
    ops_close("square sum range");
}

// Summed in double, rounded once to fp32; a sum with what was there is rounded once too.
static void test_mean_loss(int N, const Gpu* gpu) {
    float* losses = ops_normal((size_t)N, 2);
    double want = 0;
    for (int i = 0; i < N; i++) {
        losses[i] += 10;
        want += (double)losses[i] / N;
    }
    float* device = upload<float>(losses, (size_t)N, gpu);
    const float unset[3] = {NAN, 100, NAN};
    float* result = upload<float>(unset, 3, gpu);
    mean_loss(result, device, N, N, GRADIENT_SET, gpu);
    mean_loss(result + 1, device, N, N, GRADIENT_ADD, gpu);
    mean_loss(result + 2, device, N, 2 * N, GRADIENT_SET, gpu);
    const float* got = download(result, 3, gpu);
    EXPECT_NEAR(got[0], want, 10 * FLT_EPSILON, "N %d", N);
    EXPECT_NEAR(got[1], 100 + want, 110 * FLT_EPSILON, "N %d, added", N);
    EXPECT(got[0] == 2 * got[2], "N %d: over twice as many tokens: %.9g %.9g", N, got[0], got[2]);
    gpu_free(device);

    losses[N - 1] = NAN;
    device = upload<float>(losses, (size_t)N, gpu);
    result = upload<float>(unset, 2, gpu);
    mean_loss(result, device, N, N, GRADIENT_SET, gpu);
    EXPECT(isnan(download(result, 2, gpu)[0]), "N %d: a NaN is lost", N);
    gpu_free(device);
    ops_close("mean loss");
}

// ---- limits ----

static void too_many_segments(const void* arg) {
    AdamWSegments segments = one_segment(0, 8);
    segments.count = 33;
    segment_pieces_(segments, *(const int*)arg);
}

static void odd_start(const void* arg) { segment_pieces_(one_segment(4, 8), *(const int*)arg); }

// All 32 segments are found, the last one too.
static void test_full_table(const Gpu* gpu) {
    AdamWSegments segments = one_segment(0, 0);
    const int piece = 1024;
    segments.count = ADAMW_SEGMENTS;
    for (int s = 0; s < ADAMW_SEGMENTS; s++) {
        segments.start[s] = (size_t)s * 112;
        segments.end[s] = (size_t)s * 112 + 100;
        segments.decay[s] = 1;
    }
    const State s = state_random();
    const State got =
        update<float, float>(s, random_gradient<float>(&segments), segments, defaults, 1, MASTER_NONE, gpu);
    expect_padding("32 segments", got.param, s.param, &segments);
    for (int i = 0; i < LENGTH; i++) {
        EXPECT(segment_of(&segments, (size_t)i) < 0 || got.m[i] != s.m[i], "element %d was left out", i);
    }
    EXPECT(test_dies(too_many_segments, &piece, EXIT_FAILURE, "33 segments|32"), "33 segments");
    EXPECT(test_dies(odd_start, &piece, EXIT_FAILURE, "4 ... 8|multiple of 8"), "a start at 4");
    ops_close("32 segments");
}

static void test_bytes(void) {
    EXPECT(adamw_bytes(1, DTYPE_FP32, DTYPE_FP32, MASTER_NONE) == adamw_bytes(1), "as on the CPU");
    EXPECT(adamw_bytes(10, DTYPE_BF16, DTYPE_BF16, MASTER_FP32) == 280, "g 2, m 8, v 8, master 8, param 2");
    EXPECT(adamw_bytes(10, DTYPE_BF16, DTYPE_FP32, MASTER_NONE) == 240, "g 4, m 8, v 8, param 4");
    EXPECT(gradient_square_sum_bytes(10, DTYPE_FP16) == 20, "2 each");
}

template <class T> static void test_type(const Gpu* gpu) {
    test_with_master<T, float>(gpu);
    test_with_master<T, T>(gpu);
    test_without_master<T, float>(gpu);
    test_without_master<T, T>(gpu);
    test_nonfinite_gradient<T>(gpu, MASTER_NONE);
    test_nonfinite_gradient<T>(gpu, MASTER_FP32);
    test_conversions<T>(gpu);
    test_square_sums<T, float>(gpu);
    test_square_sums<T, T>(gpu);
}

template <class T> static void test_16_bit(const Gpu* gpu) {
    test_random_words<T>(gpu);
    test_small_updates<T>(gpu);
    test_representable<T>();
    test_unbiased_everywhere<T>();
}

int main(void) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_type<float>(&gpu);
    test_type<bf16>(&gpu);
    test_type<fp16>(&gpu);
    test_16_bit<bf16>(&gpu);
    test_16_bit<fp16>(&gpu);
    test_square_sum_range(&gpu);
    test_full_table(&gpu);
    const int sizes[] = {1, 31, 33, 768, 1025, 5000};
    for (int i = 0; i < 6; i++) {
        test_mean_loss(sizes[i], &gpu);
    }
    test_bytes();
    gpu_close(&gpu);
    return test_done("adamw.cuh");
}
