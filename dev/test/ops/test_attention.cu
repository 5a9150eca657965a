// test_attention.cu -- flash attention on the GPU against the CPU's reference: both passes and all
// types at awkward sizes, gradients of the bias set and added, documents, decoding, huge scores,
// causality, dirty scratch memory, the same bits in every run.
#include "llmc/ops/attention.cuh"
#include "llmc/reference.h"
#include "dev/test/lib/attention_ranks.h"
#include "dev/test/lib/gpu_ops.h"

struct Shape {
    int B, T, NH, HS;
    const int* starts = NULL; // (B, T) on the host; NULL: one document a row
    int KV = NH;
    float cap = 0, root = sqrtf((float)HS); // of scores
};

static AttentionSizes sizes_of(const Shape* s) {
    AttentionSizes sizes = attention_sizes(s->B, s->T, s->NH, s->KV, s->HS);
    sizes.cap = s->cap, sizes.root = s->root;
    return sizes;
}

static size_t outs(const Shape* s) { return (size_t)s->B * s->T * s->NH * s->HS; }
static size_t lses(const Shape* s) { return (size_t)s->B * s->NH * s->T; }
static int columns(const Shape* s) { return attention_qkv_size(sizes_of(s)); }
static size_t qkvs(const Shape* s) { return (size_t)s->B * s->T * columns(s); }

static AttentionInstructions instructions; // of the kernels that are tested now

template <class X> static void open_scratch(AttentionGpu* scratch, Memory* memory, AttentionSizes sizes) {
    attention_gpu_open<X>(scratch, memory, sizes, sizes.T);
    attention_gpu_by(scratch, instructions);
}

// ---- arrays on the device ----

static int* upload_starts(const Shape* s, const Gpu* gpu) { // NULL if there are none
    if (!s->starts) {
        return NULL;
    }
    const size_t n = (size_t)s->B * s->T;
    return upload_ints(s->starts, n, gpu);
}

// ---- what the code under test and the reference make of the same inputs ----

typedef struct {
    float *out, *lse, *dqkv;
    float *dbias_set, *dbias_added; // fp32; of X, added to BIAS_ONTO
} Results;

static const float BIAS_ONTO = 3;

// Without dout only the forward pass. The gradient of the bias is left out
// once, set once and added once.
template <class X>
static Results run(const Shape* s, const float* qkv, const float* dout, AttentionGpu* scratch,
                   const Gpu* gpu) {
    const size_t n = outs(s), QKV = columns(s);
    const AttentionSizes sizes = sizes_of(s);
    X *qkv_x = upload_rounded<X>(qkv, qkvs(s), 0, gpu), *out = unset<X>(n, gpu);
    int* starts = upload_starts(s, gpu);
    float* lse = unset<float>(lses(s), gpu);
    Results r = {};
    const AttentionPassGpu<X> pass = {sizes, starts, qkv_x, NULL, out, lse};
    attention_forward(&pass, scratch, gpu);
    if (dout) {
        float* onto = ops_floats(QKV);
        for (size_t c = 0; c < QKV; c++) {
            onto[c] = BIAS_ONTO;
        }
        X *dout_x = upload_rounded<X>(dout, n, 0, gpu), *dqkv = unset<X>(qkvs(s), gpu),
          *added = upload_rounded<X>(onto, QKV, 0, gpu);
        float* set = unset<float>(QKV, gpu);
        const Gradient dbias[] = {{NULL, DTYPE_FP32}, {set, DTYPE_FP32}, {added, DTYPE_OF(X)}};
        for (int i = 0; i < 3; i++) {
            const AttentionGradientsGpu<X> d = {dout_x, dqkv, NULL, dbias[i],
                                                i == 2 ? GRADIENT_ADD : GRADIENT_SET};
            attention_backward(&d, &pass, scratch, gpu);
        }
        r.dqkv = take_back(dqkv, qkvs(s), gpu);
        r.dbias_set = take_back(set, QKV, gpu);
        r.dbias_added = take_back(added, QKV, gpu);
        gpu_free(dout_x);
    }
    r.out = take_back(out, n, gpu);
    r.lse = take_back(lse, lses(s), gpu);
    gpu_free(starts);
    gpu_free(qkv_x);
    return r;
}

template <class X>
static Results run_alone(const Shape* s, const float* qkv, const float* dout, const Gpu* gpu) {
    AttentionGpu scratch;
    Memory memory = memory_on_gpu();
    open_scratch<X>(&scratch, &memory, sizes_of(s));
    const Results r = run<X>(s, qkv, dout, &scratch, gpu);
    attention_gpu_close(&scratch);
    memory_close(&memory);
    return r;
}

// The gradients are those of the out that `got` has stored: the backward pass reads it, and with
// large queries and keys its rounding alone can be more than all of dq and dk.
static Results reference(const Shape* s, const float* qkv, const float* dout, const Results* got) {
    const Results r = {ops_floats(outs(s)), ops_floats(lses(s)), ops_floats(qkvs(s)), NULL, NULL};
    const double* wide = ops_widen(qkv, qkvs(s));
    double *out = ops_doubles(outs(s)), *lse = ops_doubles(lses(s)), *dqkv = ops_doubles(qkvs(s));
    const RefHeads heads = {(size_t)s->B,  (size_t)s->T, (size_t)s->NH, (size_t)s->KV, (size_t)s->HS, 0,
                            1.0 / s->root, s->cap};
    ref_attention_forward(out, lse, wide, s->starts, heads);
    ref_attention_backward(dqkv, NULL, ops_widen(dout, outs(s)), wide, ops_widen(got->out, outs(s)), lse,
                           s->starts, heads);
    ops_narrow(r.out, out, outs(s));
    ops_narrow(r.lse, lse, lses(s));
    ops_narrow(r.dqkv, dqkv, qkvs(s));
    return r;
}

// Every element within `tolerance`, in units of the largest wanted one; NaN fails.
static void expect_near(const float* got, const float* want, size_t n, double tolerance, const char* what,
                        const Shape* s, DType dtype) {
    double largest = 0, worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs((double)want[i]));
    }
    for (size_t i = 0; i < n; i++) {
        const double error = fabs((double)got[i] - want[i]);
        if (!(error <= worst)) {
            worst = error;
            at = i;
        }
        if (isnan(worst)) {
            break;
        }
    }
    EXPECT(worst <= tolerance * largest, "%s of %d x %d x %d/%d x %d, %s: element %zu is %g, wanted %g +- %g",
           what, s->B, s->T, s->NH, s->KV, s->HS, dtype_name(dtype), at, got[at], want[at],
           tolerance * largest);
}

// The sums of dqkv as it was stored, in double. Sums in fp32 err by some epsilon of the sizes of
// their terms; what is added to is rounded to X.
template <class X> static void expect_bias(const Results* r, const Shape* s) {
    const int QKV = columns(s);
    for (int c = 0; c < QKV; c++) {
        double sum = 0, magnitude = 0;
        for (int t = 0; t < s->B * s->T; t++) {
            sum += r->dqkv[(size_t)t * QKV + c];
            magnitude += fabs(r->dqkv[(size_t)t * QKV + c]);
        }
        const double error = 8 * FLT_EPSILON * magnitude, added = sum + BIAS_ONTO;
        EXPECT_NEAR(r->dbias_set[c], sum, error, "dbias of %d x %d x %d x %d, %s, column %d", s->B, s->T,
                    s->NH, s->HS, dtype_name(DTYPE_OF(X)), c);
        EXPECT_NEAR(r->dbias_added[c], added, error + roundoff<X>() * fabs(added) * 1.01,
                    "dbias added of %d x %d x %d x %d, %s, column %d", s->B, s->T, s->NH, s->HS,
                    dtype_name(DTYPE_OF(X)), c);
    }
}

static void expect_same(const Results* a, const Results* b, const Shape* s, const char* what) {
    EXPECT(ops_same_bits(a->out, b->out, outs(s)), "out: %s", what);
    EXPECT(ops_same_bits(a->lse, b->lse, lses(s)), "lse: %s", what);
    EXPECT(ops_same_bits(a->dqkv, b->dqkv, qkvs(s)), "dqkv: %s", what);
    EXPECT(ops_same_bits(a->dbias_set, b->dbias_set, columns(s)), "dbias: %s", what);
}

// With u the unit roundoff of X, the GPU rounds p to X (out errs by u sum p |v|, at most u max |v|)
// and then out (another u); ds (dq and dk err by u sum |ds| |k|), and then the gradients. Signs are
// random, so 2 u of the largest element are enough for out, and 3 u for the gradients. Besides,
// sums are fp32: a score is a sum of HS terms of about 1 / sqrt(HS), and its rounding, times
// `spread`, is the relative error of a probability; exp2 adds 2^-22. So is that of a capped score,
// up to 2^-21 of the cap. lse may be smaller than the terms of a score, or than the cap.
template <class X> static void check(Shape s, float spread, const Gpu* gpu) {
    const size_t n = outs(&s), QKV = columns(&s);
    float *qkv = ops_normal(qkvs(&s), 1), *dout = normal<X>(n, 1);
    for (size_t i = 0; i < qkvs(&s); i++) {
        qkv[i] = to_float(from_float<X>(qkv[i] * (i % QKV < (size_t)s.NH * s.HS ? spread : 1)));
    }
    const double sums = (8 + 2 * sqrt(s.HS) * spread + 4 * s.cap) * FLT_EPSILON, u = roundoff<X>();
    const Results got = run_alone<X>(&s, qkv, dout, gpu), want = reference(&s, qkv, dout, &got);
    double largest = 0;
    for (size_t i = 0; i < lses(&s); i++) {
        largest = fmax(largest, fabs((double)want.lse[i]));
    }
    expect_near(got.out, want.out, n, 2 * u + sums, "out", &s, DTYPE_OF(X));
    expect_near(got.lse, want.lse, lses(&s),
                (8 + 2 * sqrt(s.HS) * (s.cap > 0 ? spread : 1)) * FLT_EPSILON *
                    fmax(1, (1 + s.cap) / largest),
                "lse", &s, DTYPE_OF(X));
    expect_near(got.dqkv, want.dqkv, qkvs(&s), 3 * u + sums, "dqkv", &s, DTYPE_OF(X));
    expect_bias<X>(&got, &s);
    ops_close("sizes");
}

// Both sides of every width and of every tile; heads that fill a width and that do not; with HS 12
// the rows of 16-bit heads are no multiple of 16 bytes, with 3 and 1 those of fp32 neither.
template <class X> static void test_sizes(const Gpu* gpu) {
    const Shape shapes[] = {{1, 1, 1, 64},  {2, 31, 2, 64},  {1, 33, 2, 80}, {1, 130, 1, 96}, {1, 65, 1, 128},
                            {1, 70, 2, 16}, {1, 257, 1, 64}, {3, 2, 3, 8},   {1, 31, 2, 24},  {1, 64, 1, 32},
                            {1, 17, 2, 40}, {2, 16, 1, 48},  {1, 63, 1, 72}, {1, 32, 1, 104}, {1, 97, 2, 12},
                            {2, 34, 3, 3},  {1, 129, 1, 1},  {1, 15, 1, 100}};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        check<X>(shapes[i], 1, gpu);
    }
}

// (B, T) of documents of about `length` tokens, but a border at token `border` of each row, if that
// is > 0.
static const int* documents(int B, int T, int length, int border) {
    int *starts = ops_below((size_t)B * T, length), start = 0;
    for (int n = 0; n < B * T; n++) {
        const int t = n % T;
        if (t == 0 || t == border || starts[n] == 0) {
            start = t;
        }
        starts[n] = start;
    }
    return starts;
}

// Documents of a token, of a few, longer than a tile; borders at ends of tiles and beside them;
// every width.
template <class X> static void test_documents(const Gpu* gpu) {
    const int shapes[][6] = {{1, 1, 1, 64, 2, 0},      {2, 31, 2, 64, 9, 0},       {1, 33, 1, 80, 40, 32},
                             {1, 130, 1, 96, 60, 64},  {2, 65, 1, 128, 1000, 64},  {1, 70, 2, 16, 1, 0},
                             {1, 200, 1, 64, 90, 128}, {1, 150, 1, 64, 1000, 129}, {1, 180, 1, 16, 1000, 129},
                             {3, 34, 3, 3, 20, 0},     {1, 140, 1, 32, 70, 63},    {1, 97, 1, 12, 1000, 31}};
    for (const int* x : shapes) {
        check<X>({x[0], x[1], x[2], x[3], documents(x[0], x[1], x[4], x[5])}, 1, gpu);
    }
}

// (B, T): each token sees `window` tokens, up to itself.
static const int* windows(int B, int T, int window) {
    int* starts = ops_below((size_t)B * T, 1);
    for (int n = 0; n < B * T; n++) {
        starts[n] = n % T >= window ? n % T - window + 1 : 0;
    }
    return starts;
}

// Heads of queries that share keys, in all widths, with windows, too: dk and dv are sums over them.
// They are up to NH / KV times as many roundings of ds as `check` allows for, of random signs.
template <class X> static void test_groups(const Gpu* gpu) {
    const int shapes[][6] = {{1, 1, 4, 1, 8, 1},    {2, 31, 6, 2, 32, 7}, {1, 33, 3, 1, 48, 33},
                             {1, 130, 2, 1, 64, 7}, {1, 70, 4, 2, 80, 1}, {1, 65, 3, 1, 128, 65},
                             {2, 17, 3, 1, 12, 7}};
    for (const int* x : shapes) {
        check<X>({x[0], x[1], x[2], x[4], NULL, x[3]}, 1, gpu);
        check<X>({x[0], x[1], x[2], x[4], windows(x[0], x[1], x[5]), x[3]}, 1, gpu);
    }
}

// Capped scores, mostly below the cap and mostly above it; another scale; heads of 256 with a cap
// and without; documents, windows and grouped keys. Documents put masked scores into every tile.
template <class X> static void test_caps(const Gpu* gpu) {
    check<X>({1, 130, 2, 64, NULL, 1, 50, 12}, 4, gpu);
    check<X>({1, 150, 1, 64, documents(1, 150, 40, 129), 1, 3}, 4, gpu);
    check<X>({2, 65, 2, 12, windows(2, 65, 7), 1, 2}, 1, gpu);
    check<X>({1, 97, 1, 80, NULL, 1, 5}, 2, gpu);
    check<X>({1, 150, 1, 128, documents(1, 150, 1000, 64), 1, 2}, 4, gpu);
    if (sizeof(X) == 4 && TILE_MEMORY_IS_SMALL) {
        return; // refused
    }
    check<X>({1, 33, 1, 256}, 1, gpu);
    check<X>({1, 100, 2, 256, windows(1, 100, 33), 1}, 1, gpu);
    check<X>({1, 90, 2, 256, NULL, 1, 50, 12}, 4, gpu);
    check<X>({1, 70, 1, 200, documents(1, 70, 30, 64), 1, 2}, 4, gpu);
}

// A row of one document is what it is without starts; a document's results do not depend on the
// others.
template <class X> static void test_documents_apart(const Gpu* gpu) {
    const int T = 170, begin = 50, end = 131;
    const Shape plain = {1, T, 1, 32, NULL}, whole = {1, T, 1, 32, ops_below((size_t)T, 1)};
    int* starts = ops_below((size_t)T, 1);
    for (int t = begin; t < T; t++) {
        starts[t] = t < end ? begin : end;
    }
    const Shape three = {1, T, 1, 32, starts};
    const size_t C = 32, count = (size_t)(end - begin);
    float *qkv = normal<X>(3 * T * C, 1), *dout = normal<X>(T * C, 1);
    const Results a = run_alone<X>(&plain, qkv, dout, gpu), b = run_alone<X>(&whole, qkv, dout, gpu);
    expect_same(&a, &b, &plain, "starts all 0");
    float *other = normal<X>(3 * T * C, 9), *other_dout = normal<X>(T * C, 9);
    memcpy(other + 3 * begin * C, qkv + 3 * begin * C, 3 * count * C * sizeof(float));
    memcpy(other_dout + begin * C, dout + begin * C, count * C * sizeof(float));
    const Results c = run_alone<X>(&three, qkv, dout, gpu), d = run_alone<X>(&three, other, other_dout, gpu);
    EXPECT(ops_same_bits(c.out + begin * C, d.out + begin * C, count * C), "out beside other documents");
    EXPECT(ops_same_bits(c.dqkv + 3 * begin * C, d.dqkv + 3 * begin * C, 3 * count * C),
           "dqkv beside other documents");
    ops_close("documents apart");
}

// With scores in the thousands, hardly more than one key in a row keeps a probability.
template <class X> static void test_huge_scores(const Gpu* gpu) { check<X>({1, 40, 1, 64}, 1e3f, gpu); }

// Keys of later tiles with larger scores: what was summed up before is scaled, in some rows and not
// in others.
template <class X> static void test_growing_scores(const Gpu* gpu) {
    const Shape s = {1, 250, 1, 64};
    const size_t n = outs(&s), C = s.HS;
    const float spread = 13; // the largest factor below
    float *qkv = ops_normal(3 * n, 1), *dout = normal<X>(n, 1);
    for (size_t i = 0; i < 3 * n; i++) {
        qkv[i] = to_float(from_float<X>(qkv[i] * (i / C % 3 == 1 ? 1 + 4 * (i / (3 * C) / 64) : 1)));
    }
    const double sums = (8 + 2 * sqrt(s.HS) * spread) * FLT_EPSILON, u = roundoff<X>();
    const Results got = run_alone<X>(&s, qkv, NULL, gpu), want = reference(&s, qkv, dout, &got);
    expect_near(got.out, want.out, n, 2 * u + sums, "out of growing scores", &s, DTYPE_OF(X));
    expect_near(got.lse, want.lse, lses(&s), (8 + 2 * sqrt(s.HS)) * FLT_EPSILON, "lse of growing scores", &s,
                DTYPE_OF(X));
    ops_close("growing scores");
}

// Texts of different lengths: a query over stored keys and values is the last row of the whole
// text's attention. Only the text's own room is written, and the bits are those of a text alone.
template <class X>
static void test_cached(int NH, int KV, int HS, int window, const Gpu* gpu, float cap = 0) {
    enum { TEXTS = 3, MAX_T = 150 };
    const int lengths[TEXTS] = {1, 31, 150};
    AttentionSizes step = attention_sizes(TEXTS, 1, NH, KV, HS);
    step.cap = cap;
    const int Q = attention_queries_size(step), QKV = attention_qkv_size(step);
    const size_t room = (size_t)2 * attention_keys_size(step) * MAX_T;
    AttentionCacheGpu<X> cache = {unset<X>(TEXTS * room, gpu), MAX_T};
    float* last = ops_floats(TEXTS * QKV);
    int positions[TEXTS];
    Results want[TEXTS];
    for (int b = 0; b < TEXTS; b++) {
        const int T = lengths[b];
        const Shape s = {1, T, NH, HS, window ? windows(1, T, window) : NULL, KV, cap};
        float* qkv = normal<X>(qkvs(&s), 1);
        X* rows = upload_rounded<X>(qkv, qkvs(&s), 0, gpu);
        positions[b] = T - 1;
        attention_cache_store(cache, rows, (const int*)NULL, b,
                              attention_sizes(1, T - 1 > 0 ? T - 1 : 1, NH, KV, HS), gpu);
        memcpy(last + b * QKV, qkv + (size_t)positions[b] * QKV, (size_t)QKV * sizeof(float));
        want[b] = run_alone<X>(&s, qkv, NULL, gpu);
    }
    X *queries = upload_rounded<X>(last, TEXTS * QKV, 0, gpu), *out = unset<X>(TEXTS * Q, gpu);
    int* places = (int*)gpu_alloc(TEXTS, sizeof(int), "positions");
    CUDA_CHECK(cudaMemcpyAsync(places, positions, sizeof(positions), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    attention_cache_store(cache, queries, places, 0, step, gpu);
    const AttentionPassGpu<X> pass = {step, NULL, queries,
                                      NULL, out,  (float*)gpu_alloc(TEXTS * NH, 4, "lse")};
    attention_cached(&pass, places, window, cache, gpu);
    const float *got = take_back(out, TEXTS * Q, gpu), *kept = take_back(cache.data, TEXTS * room, gpu);
    for (int b = 0; b < TEXTS; b++) {
        for (int c = 0; c < Q; c++) {
            const float w = want[b].out[(size_t)positions[b] * Q + c];
            EXPECT_NEAR(got[b * Q + c], w, 4 * roundoff<X>() + 1e-6,
                        "text %d, column %d, %d/%d heads of %d, window %d, %s", b, c, NH, KV, HS, window,
                        dtype_name(DTYPE_OF(X)));
        }
        for (size_t i = 0; i < room; i++) {
            EXPECT(isnan(kept[b * room + i]) == ((int)(i / HS % MAX_T) >= lengths[b]), "text %d, element %zu",
                   b, i);
        }
    }
    gpu_free(places);
    ops_close("cached");
}

// Later tokens do not change one bit of a result, and a gradient that enters at a token reaches
// nothing later.
template <class X> static void test_causality(const Gpu* gpu) {
    const Shape s = {1, 70, 1, 16};
    const int C = s.NH * s.HS;
    for (int t = 0; t < s.T; t += 23) {
        float *qkv = normal<X>(3 * outs(&s), 1), *changed = normal<X>(3 * outs(&s), 30),
              *dout = normal<X>(outs(&s), 0);
        memcpy(changed, qkv, (t + 1) * 3 * C * sizeof(float));
        dout[t * C] = 1;
        const Results a = run_alone<X>(&s, qkv, dout, gpu), b = run_alone<X>(&s, changed, dout, gpu);
        EXPECT(ops_same_bits(a.out, b.out, (t + 1) * C), "tokens after %d changed an output up to it", t);
        EXPECT(ops_same_bits(a.lse, b.lse, t + 1), "tokens after %d changed lse up to it", t);
        for (int i = 0; i < s.T * 3 * C; i++) {
            EXPECT(i < (t + 1) * 3 * C ? a.dqkv[i] == b.dqkv[i] : a.dqkv[i] == 0,
                   "a gradient at token %d: element %d of dqkv is %g, and %g with other tokens later", t, i,
                   a.dqkv[i], b.dqkv[i]);
        }
        ops_close("causality");
    }
}

// Two runs give the same bits, also in scratch memory for longer sequences and more heads that
// others left full of NaN.
template <class X> static void test_scratch(const Gpu* gpu) {
    const Shape s = {2, 45, 2, 40}, longer = {2, 150, 3, 32};
    float *qkv = normal<X>(3 * outs(&s), 1), *dout = normal<X>(outs(&s), 1);
    AttentionGpu scratch;
    Memory memory = memory_on_gpu();
    open_scratch<X>(&scratch, &memory, sizes_of(&longer));
    const Results alone = run_alone<X>(&s, qkv, dout, gpu), again = run_alone<X>(&s, qkv, dout, gpu);
    const Results fresh = run<X>(&s, qkv, dout, &scratch, gpu);
    run<X>(&longer, ops_floats(3 * outs(&longer)), ops_floats(outs(&longer)), &scratch, gpu);
    const Results used = run<X>(&s, qkv, dout, &scratch, gpu);
    expect_same(&alone, &again, &s, "a second run");
    expect_same(&fresh, &used, &s, "in scratch memory full of NaN");
    attention_gpu_close(&scratch);
    memory_close(&memory);
    ops_close("scratch");
}

// NaN in one query is seen in its output and its gradient.
template <class X> static void test_nan(const Gpu* gpu) {
    const Shape s = {1, 20, 1, 16};
    float *qkv = normal<X>(3 * outs(&s), 1), *dout = normal<X>(outs(&s), 1);
    qkv[7 * 3 * s.HS] = NAN;
    const Results r = run_alone<X>(&s, qkv, dout, gpu);
    EXPECT(isnan(r.out[7 * s.HS]) && isnan(r.lse[7]) && isnan(r.dqkv[7 * 3 * s.HS]), "%s: NaN got lost",
           dtype_name(DTYPE_OF(X)));
    EXPECT(!isnan(r.out[8 * s.HS]) && !isnan(r.lse[6]), "%s: NaN got to other tokens",
           dtype_name(DTYPE_OF(X)));
    ops_close("NaN");
}

// Sequences divided among ranks: results of whole sequences, or of a rank with gathered keys.
typedef struct {
    AttentionGpu* scratch;
    const Gpu* gpu;
} Device;

template <class X>
static AttentionResults run_either(AttentionSizes sizes, AttentionInputs in, const void* device) {
    const Device* on = (const Device*)device;
    const Gpu* gpu = on->gpu;
    const size_t N = (size_t)sizes.B * sizes.T, outs = N * attention_queries_size(sizes),
                 qkvs = N * attention_qkv_size(sizes), lses = N * sizes.NH,
                 keys = (size_t)sizes.B * attention_keys(sizes), kvs = keys * 2 * attention_keys_size(sizes);
    X *qkv = upload_rounded<X>(in.qkv, qkvs, 0, gpu), *dout = upload_rounded<X>(in.dout, outs, 0, gpu),
      *out = unset<X>(outs, gpu), *dqkv = unset<X>(qkvs, gpu), *dkv = unset<X>(kvs, gpu);
    float* lse = unset<float>(lses, gpu);
    int* starts = in.starts ? upload_ints(in.starts, keys, gpu) : NULL;
    X* kv = in.kv ? upload_rounded<X>(in.kv, kvs, 0, gpu) : NULL;
    const AttentionPassGpu<X> pass = {sizes, starts, qkv, kv, out, lse};
    const AttentionGradientsGpu<X> d = {dout, dqkv, dkv, {NULL, DTYPE_FP32}, GRADIENT_SET};
    attention_forward(&pass, on->scratch, gpu);
    attention_backward(&d, &pass, on->scratch, gpu);
    const AttentionResults r = {take_back(out, outs, gpu), take_back(lse, lses, gpu),
                                take_back(dqkv, qkvs, gpu), take_back(dkv, kvs, gpu)};
    gpu_free(qkv);
    gpu_free(kv);
    gpu_free(dout);
    gpu_free(starts);
    return r;
}

template <class X>
static void test_ranks_of(AttentionSizes sizes, const int* starts, int ranks, const Gpu* gpu) {
    const size_t N = (size_t)sizes.B * sizes.T;
    AttentionGpu scratch;
    Memory memory = memory_on_gpu();
    open_scratch<X>(&scratch, &memory, sizes);
    const Device on = {&scratch, gpu};
    const AttentionInputs in = {ops_normal(N * attention_qkv_size(sizes), 1), NULL,
                                ops_normal(N * attention_queries_size(sizes), 1), starts};
    expect_attention_divided(sizes, in, ranks, roundoff<X>(), run_either<X>, &on);
    attention_gpu_close(&scratch);
    memory_close(&memory);
}

template <class X> static void test_ranks(const Gpu* gpu) {
    const int shapes[][7] = {{2, 512, 2, 2, 16, 2, 0}, {1, 512, 2, 1, 72, 2, 0}, {1, 1024, 1, 1, 12, 4, 2}};
    for (const int* x : shapes) {
        AttentionSizes sizes = attention_sizes(x[0], x[1], x[2], x[3], x[4]);
        sizes.cap = (float)x[6];
        test_ranks_of<X>(sizes, NULL, x[5], gpu);
        test_ranks_of<X>(sizes, documents(sizes.B, sizes.T, 90, 257), x[5], gpu);
        test_ranks_of<X>(sizes, windows(sizes.B, sizes.T, 200), x[5], gpu);
    }
}

// A forked child cannot use its parent's GPU.
#ifdef CUSIM
static const int simulated = 1;
#else
static const int simulated = 0;
#endif

static void forward_too_large(const void* gpu) {
    AttentionGpu scratch;
    Memory memory = memory_on_gpu();
    const AttentionSizes sizes = attention_sizes(1, 1, 1, 1, 257);
    attention_gpu_open<float>(&scratch, &memory, sizes, sizes.T);
    const AttentionPassGpu<float> pass = {sizes, NULL, NULL, NULL, NULL, NULL};
    attention_forward(&pass, &scratch, (const Gpu*)gpu);
}

// Elements of the kernels by wgmma and by mma differ by two roundings of X, beside some
// probabilities that are rounded the other way. Heads up to 64 have tiles of 64 keys in both, and
// so the same maxima of rows: hardly any element differs.
template <class X>
static void expect_alike(const float* a, const float* b, size_t n, const char* what, const Shape* s) {
    const double u = roundoff<X>();
    double largest = 0, worst = 0;
    size_t differ = 0;
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs((double)b[i]));
    }
    for (size_t i = 0; i < n; i++) {
        const double error = fabs((double)a[i] - b[i]) - 2 * u * fabs((double)b[i]);
        differ += a[i] != b[i];
        worst = error > worst || isnan(error) ? error : worst;
    }
    EXPECT(worst <= u / 4 * largest && differ <= (s->HS <= 64 ? n / 100 : n / 2),
           "%s by wgmma of %d x %d x %d/%d x %d, %s: %zu of %zu elements differ, up to %g", what, s->B, s->T,
           s->NH, s->KV, s->HS, dtype_name(DTYPE_OF(X)), differ, n, worst);
}

template <class X> static void test_instructions(const Gpu* gpu) {
    const Shape shapes[] = {
        {1, 300, 2, 64, NULL, 1}, {1, 200, 1, 128}, {2, 190, 2, 96, documents(2, 190, 70, 129), 1}};
    int differ = 0; // with heads of 64 all bits may be the same
    for (const Shape& s : shapes) {
        float *qkv = normal<X>(qkvs(&s), 1), *dout = normal<X>(outs(&s), 1);
        instructions = ATTENTION_BY_MMA;
        const Results mma = run_alone<X>(&s, qkv, dout, gpu);
        instructions = ATTENTION_BY_WGMMA;
        const Results wgmma = run_alone<X>(&s, qkv, dout, gpu);
        expect_alike<X>(wgmma.out, mma.out, outs(&s), "out", &s);
        expect_alike<X>(wgmma.dqkv, mma.dqkv, qkvs(&s), "dqkv", &s);
        differ += !ops_same_bits(wgmma.dqkv, mma.dqkv, qkvs(&s));
    }
    EXPECT(differ > 0, "the same kernels");
    ops_close("instructions");
}

// The largest score of head h of tokens that are no padding, and at least 0, by plain loops.
static double plain_largest(AttentionSizes s, const float* qkv, const int* starts, const int* lengths,
                            int h) {
    const size_t row = (size_t)attention_qkv_size(s),
                 key = (size_t)(attention_queries_size(s) + h / attention_group(s) * s.HS);
    double largest = 0;
    for (int n = 0; n < s.B * s.T; n++) {
        const int b = n / s.T, end = n % s.T < lengths[b] ? n % s.T + 1 : 0;
        for (int u = starts ? starts[n] : 0; u < end; u++) {
            const float *q = qkv + n * row + h * s.HS, *k = qkv + (size_t)(b * s.T + u) * row + key;
            double score = 0;
            for (int d = 0; d < s.HS; d++) {
                score += (double)q[d] * k[d];
            }
            largest = fmax(largest, score / s.root);
        }
    }
    return largest;
}

// Raises `largest` (NH) to the scores of a rank's queries, or of all.
template <class X>
static void raise_largest(double* largest, AttentionSizes sizes, AttentionInputs in, const int* lengths,
                          const Gpu* gpu) {
    const size_t N = (size_t)sizes.B * sizes.T, keys = (size_t)sizes.B * attention_keys(sizes);
    X* qkv = upload_rounded<X>(in.qkv, N * attention_qkv_size(sizes), 0, gpu);
    X* kv = in.kv ? upload_rounded<X>(in.kv, keys * 2 * attention_keys_size(sizes), 0, gpu) : NULL;
    int *starts = in.starts ? upload_ints(in.starts, keys, gpu) : NULL,
        *of_texts = lengths ? upload_ints(lengths, (size_t)sizes.B, gpu) : NULL;
    double* to = (double*)gpu_alloc((size_t)sizes.NH, sizeof(double), "scores");
    const AttentionPassGpu<X> pass = {sizes, starts, qkv, kv, NULL, NULL};
    gpu_upload(to, largest, (size_t)sizes.NH * sizeof(double));
    attention_largest_scores(to, &pass, of_texts, gpu);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    CUDA_CHECK(cudaMemcpy(largest, to, (size_t)sizes.NH * sizeof(double), cudaMemcpyDeviceToHost));
    gpu_free(qkv);
    gpu_free(kv);
    gpu_free(starts);
    gpu_free(of_texts);
    gpu_free(to);
}

// Padding, whose scores are the largest, does not count, nor do other documents and later keys, and
// a number that is larger already stays; so it is if ranks divide the sequences. The products of
// factors in X are exact, their sums are fp32.
template <class X> static void check_largest(AttentionSizes s, const int* starts, int ranks, const Gpu* gpu) {
    const int lengths[] = {s.T - 5 > 1 ? s.T - 5 : 1, s.T, s.T / 2 + 1};
    const int all[] = {s.T, s.T, s.T}, *counted = starts ? lengths : all;
    const size_t QKV = (size_t)attention_qkv_size(s), N = (size_t)s.B * s.T;
    float* qkv = normal<X>(N * QKV, 1);
    double largest[4] = {0, 0, 0, 1e6};
    for (size_t i = 0; i < N * QKV; i++) {
        const int is_padding = (int)(i / QKV % s.T) >= counted[i / QKV / s.T];
        qkv[i] = is_padding || (int)(i / QKV % s.T) == s.T - 1 ? 8 * qkv[i] : qkv[i];
    }
    const float* kv = ranks > 1 ? attention_gathered(s, qkv, N) : NULL;
    for (int q = 0; q < ranks; q++) {
        AttentionSizes rank = s;
        rank.T = s.T / ranks;
        rank.chunks = TokenChunks{ranks - 1, q};
        const float* rows = ranks > 1 ? (const float*)attention_rows_of(rank, qkv, QKV) : qkv;
        raise_largest<X>(largest, rank, AttentionInputs{rows, kv, NULL, starts}, starts ? lengths : NULL,
                         gpu);
    }
    for (int h = 0; h < s.NH; h++) {
        const double want = h == 3 ? 1e6 : plain_largest(s, qkv, starts, counted, h);
        EXPECT_NEAR(largest[h], want, (8 + 2 * sqrt(s.HS)) * FLT_EPSILON * (want + 1),
                    "largest score of %d x %d x %d/%d x %d, %s, head %d", s.B, s.T, s.NH, s.KV, s.HS,
                    dtype_name(DTYPE_OF(X)), h);
    }
    ops_close("largest scores");
}

template <class X> static void test_largest(const Gpu* gpu) {
    const int shapes[][6] = {{1, 1, 1, 1, 16, 1},   {3, 33, 4, 2, 8, 1},   {2, 131, 4, 1, 40, 1},
                             {3, 70, 4, 4, 3, 1},   {1, 150, 2, 2, 64, 1}, {1, 65, 2, 1, 80, 1},
                             {2, 97, 1, 1, 128, 1}, {2, 512, 4, 2, 16, 2}};
    for (const int* x : shapes) {
        const AttentionSizes s = attention_sizes(x[0], x[1], x[2], x[3], x[4]);
        check_largest<X>(s, NULL, x[5], gpu);
        check_largest<X>(s, documents(s.B, s.T, 40, 64), x[5], gpu);
        check_largest<X>(s, windows(s.B, s.T, 7), x[5], gpu);
    }
    if (sizeof(X) == 2 || !TILE_MEMORY_IS_SMALL) {
        check_largest<X>(attention_sizes(1, 100, 2, 1, 200), NULL, 1, gpu);
    }
}

// Sequences for which there are larger tiles.
template <class X> static void test_long(const Gpu* gpu) {
    const int T = 2 * 1024 + 70;
    check<X>({1, T, 1, 16, documents(1, T, 700, 1025)}, 1, gpu);
    check<X>({1, T, 1, 64}, 1, gpu);
    test_ranks_of<X>(attention_sizes(1, 2048, 1, 1, 16), windows(1, 2048, 200), 2, gpu);
}

template <class X> static void test_type(const Gpu* gpu) {
    test_sizes<X>(gpu);
    test_huge_scores<X>(gpu);
    test_cached<X>(2, 2, 24, 0, gpu);
    test_cached<X>(2, 2, 5, 0, gpu);
    test_cached<X>(6, 2, 8, 7, gpu);
    test_cached<X>(3, 1, 24, 140, gpu);
    test_cached<X>(2, 1, 256, 0, gpu, 2);
    test_cached<X>(2, 1, 24, 7, gpu, 1.5f);
    test_groups<X>(gpu);
    test_caps<X>(gpu);
    test_ranks<X>(gpu);
    test_causality<X>(gpu);
    test_scratch<X>(gpu);
    test_nan<X>(gpu);
    test_documents<X>(gpu);
    test_documents_apart<X>(gpu);
    test_growing_scores<X>(gpu);
    test_largest<X>(gpu);
}

#if PTX_HAS_WGMMA
TEST(attention_by_wgmma) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_instructions<bf16>(&gpu);
    test_type<bf16>(&gpu);
    test_long<bf16>(&gpu);
    UNSANITIZED({
        test_instructions<fp16>(&gpu);
        test_sizes<fp16>(&gpu);
        test_growing_scores<fp16>(&gpu);
    });
    instructions = ATTENTION_DEFAULT;
    gpu_close(&gpu);
}
#endif

TEST(attention) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    if (test_has_case(1)) {
        test_type<float>(&gpu);
    }
    if (test_has_case(2)) {
        test_type<bf16>(&gpu);
    }
    if (test_has_case(3)) {
        UNSANITIZED(test_type<fp16>(&gpu));
    }
    EXPECT(!simulated || test_dies(forward_too_large, &gpu, EXIT_FAILURE,
                                   "attention: heads of size 257|wanted at most 256"),
           "large heads");
    gpu_close(&gpu);
}
