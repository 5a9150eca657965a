// test_short_conv.cu -- the short convolution on the GPU against the CPU: both kinds and passes,
// all types, documents, runs that end anywhere, gradients set and added, decoding.
#include "llmc/ops/short_conv.cuh"
#include "dev/test/lib/gpu_ops.h"

struct Case {
    ShortConvKind kind;
    int B, T, C, W, has_bias, document; // document: tokens of each; 0: a row is one
};

static size_t inp_size(const Case* c) { return (size_t)c->B * c->T * c->C * short_conv_columns(c->kind); }
static size_t out_size(const Case* c) { return (size_t)c->B * c->T * c->C; }

static int* documents(const Case* c) {
    int* starts = ops_below((size_t)c->B * c->T, 1);
    for (int n = 0; n < c->B * c->T; n++) {
        starts[n] = n % c->T / c->document * c->document;
    }
    return starts;
}

// Within `tolerance` of each element and of the largest.
static void expect_near(const float* got, const float* want, size_t n, double tolerance, const char* what,
                        const Case* c) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs((double)want[i]));
    }
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(got[i], want[i], tolerance * largest, "%s of kind %d, %d x %d x %d, %d taps, element %zu",
                    what, c->kind, c->B, c->T, c->C, c->W, i);
    }
}

template <class X> static void check(Case c, const Gpu* gpu) {
    const size_t taps = (size_t)c.C * c.W, in = inp_size(&c), out_n = out_size(&c);
    // one rounding of the result; sums over tokens differ by their order
    const double u = roundoff<X>() + 16 * FLT_EPSILON,
                 sums = (16 + 2 * sqrt((double)c.B * c.T)) * FLT_EPSILON;
    float *inp = normal<X>(in, 1), *weight = normal<X>(taps, 1), *bias = normal<X>(c.C, 1),
          *dout = normal<X>(out_n, 1);
    int *starts = c.document ? documents(&c) : NULL, *starts_gpu = NULL;
    float *out = ops_floats(out_n), *dinp = ops_floats(in), *dweight = ops_floats(taps),
          *dbias = ops_floats(c.C);
    const ShortConv cpu = {c.kind, c.B, c.T, c.C, c.W, starts, weight, c.has_bias ? bias : NULL};
    short_conv_forward_cpu(out, inp, &cpu);
    short_conv_backward_cpu(dinp, dweight, dbias, dout, inp, &cpu, GRADIENT_SET);
    if (starts) {
        starts_gpu = upload_ints(starts, (size_t)c.B * c.T, gpu);
    }
    X *x = upload_rounded<X>(inp, in, 0, gpu), *w = upload_rounded<X>(weight, taps, 0, gpu),
      *b = upload_rounded<X>(bias, c.C, 0, gpu), *dy = upload_rounded<X>(dout, out_n, 0, gpu),
      *y = unset<X>(out_n, gpu), *dx = unset<X>(in, gpu);
    float *dw = unset<float>(taps, gpu), *db = unset<float>(c.C, gpu),
          *partial = unset<float>(short_conv_partial(c.B * c.T, c.C, c.W), gpu);
    const ShortConvGpu<X> conv = {c.kind, c.B, c.T, c.C, c.W, starts_gpu, w, c.has_bias ? b : NULL};
    ShortConvGradientsGpu d = {{dw, DTYPE_FP32}, {db, DTYPE_FP32}, GRADIENT_SET, partial};
    short_conv_forward(y, (const X*)x, &conv, gpu);
    short_conv_backward(dx, &d, (const X*)dy, (const X*)x, &conv, gpu);
    float* once = download(dw, taps, gpu);
    d.mode = GRADIENT_ADD, d.dbias.data = NULL;
    short_conv_backward(dx, &d, (const X*)dy, (const X*)x, &conv, gpu);
    float* twice = take_back(dw, taps, gpu);
    expect_near(take_back(y, out_n, gpu), out, out_n, u, "out", &c);
    expect_near(take_back(dx, in, gpu), dinp, in, u, "dinp", &c);
    expect_near(once, dweight, taps, sums, "dweight", &c);
    expect_near(take_back(db, c.C, gpu), dbias, c.C, sums, "dbias", &c);
    for (size_t i = 0; i < taps; i++) {
        EXPECT(twice[i] == 2 * once[i], "dweight %zu is not added", i);
    }
    void* const arrays[] = {x, w, b, dy, partial, starts_gpu};
    for (int i = 0; i < 6; i++) {
        gpu_free(arrays[i]);
    }
    ops_close("short_conv");
}

// The last tokens of two sequences, read one by one, give the results of a whole pass.
template <class X> static void check_steps(ShortConvKind kind, int W, int first, const Gpu* gpu) {
    enum { B = 2, T = 10, C = 40 };
    const size_t columns = (size_t)short_conv_columns(kind) * C, state_size = (size_t)(W - 1) * C;
    float *inp = normal<X>(B * T * columns, 1), *weight = normal<X>((size_t)C * W, 1);
    X *x = upload_rounded<X>(inp, B * T * columns, 0, gpu),
      *w = upload_rounded<X>(weight, (size_t)C * W, 0, gpu), *y = unset<X>(B * T * C, gpu),
      *row = unset<X>(B * columns, gpu), *out = unset<X>(B * C, gpu);
    float* state = unset<float>(B * state_size, gpu);
    ShortConvGpu<X> conv = {kind, B, T, C, W, NULL, w, NULL};
    short_conv_forward(y, (const X*)x, &conv, gpu);
    float* whole = take_back(y, B * T * C, gpu);
    conv.B = 1, conv.T = first;
    for (int b = 0; b < B; b++) {
        short_conv_store(state + b * state_size, (const X*)x + b * T * columns, &conv, gpu);
    }
    conv.B = B, conv.T = 1;
    for (int t = first; t < T; t++) {
        for (int b = 0; b < B; b++) {
            gpu_copy(row + b * columns, x + (b * T + t) * columns, columns * sizeof(X), gpu);
        }
        short_conv_step(out, state, (const X*)row, &conv, gpu);
        float* got = download(out, B * C, gpu);
        for (int i = 0; i < B * C; i++) {
            const float want = whole[(i / C * T + t) * C + i % C];
            EXPECT_NEAR(got[i], want, 2 * roundoff<X>() * fabs(want) + 32 * FLT_EPSILON,
                        "kind %d, %d taps: token %d, element %d", kind, W, t, i);
        }
    }
    void* const arrays[] = {x, w, row, out, state};
    for (int i = 0; i < 5; i++) {
        gpu_free(arrays[i]);
    }
    ops_close("steps");
}

template <class X> static void test_type(const Gpu* gpu) {
    const int sizes[][4] = {{1, 1, 8, 0}, {2, 3, 16, 2}, {1, 31, 24, 5}, {3, 50, 40, 7}, {1, 300, 64, 33}};
    for (int i = 0; i < 5; i++) {
        for (int W = 2; W <= SHORT_CONV_MOST; W += 1 + W / 4) {
            for (int k = 0; k < 2; k++) {
                check<X>({k ? SHORT_CONV_GATED : SHORT_CONV_SILU, sizes[i][0], sizes[i][1], sizes[i][2], W,
                          W % 2, (W + k) % 2 ? sizes[i][3] : 0},
                         gpu);
            }
        }
    }
    for (int W = 2; W <= SHORT_CONV_MOST; W += 2) {
        check_steps<X>(SHORT_CONV_SILU, W, W, gpu);
        check_steps<X>(SHORT_CONV_GATED, W, 1, gpu);
    }
}

TEST_TYPES(short_conv)
