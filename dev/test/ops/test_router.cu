// test_router.cu -- the router and the rows of experts on the GPU against those of the CPU: every
// kind and type, ties, more experts than a warp has lanes, one expert for all tokens, padding and
// documents.
#include "llmc/ops/expert_bias.cuh"
#include "llmc/ops/experts.cuh"
#include "llmc/ops/router.cuh"
#include "dev/test/lib/counted_case.h"
#include "dev/test/lib/gpu_ops.h"

static int* ints(size_t n) { return (int*)(void*)ops_bytes(n * sizeof(int)); }

typedef enum { ALL_TOKENS, RAGGED, RAGGED_CHUNKS } Tokens;

typedef struct {
    RouterKind kind;
    int B, T, E, used;
    Tokens counted;
} Case;

// The balance needs whole sequences.
static RouterLosses losses_of(const Case* c) {
    return {c->counted == RAGGED_CHUNKS ? 0.0f : 0.3f, 0.1f, 0.25f};
}

static Counted counted_of(const Case* c) {
    Counted counted = counted_ragged(c->B, c->counted == RAGGED_CHUNKS ? 2 * c->T : c->T);
    counted.chunks = {c->counted == RAGGED_CHUNKS, 0};
    return c->counted == ALL_TOKENS ? Counted{} : counted;
}

static size_t tokens(const Case* c) { return (size_t)c->B * c->T; }
static size_t places(const Case* c) { return tokens(c) * c->used; }
static size_t most_rows(const Case* c) { return router_rows(tokens(c), c->E, c->used); }

// Multiples of 1/2 and 1/4, so that many scores are equal and all others are far apart.
static void round_to_steps(float* x, size_t n, float step) {
    for (size_t i = 0; i < n; i++) {
        x[i] = roundf(x[i] / step) * step;
    }
}

// Returns the groups of experts in which a token chooses them.
static int groups_of(const Case* c) {
    return c->kind != ROUTER_SIGMOID || c->E % 8 ? 0 : c->E / 8 < 4 ? 4 : int_min(c->E / 8, 32);
}

static Router on_cpu(const Case* c, float* logits, const float* bias) {
    const size_t M = most_rows(c);
    return {c->kind,
            c->B,
            c->T,
            c->E,
            c->used,
            groups_of(c),
            groups_of(c) / 2,
            1.5f,
            c->kind == ROUTER_SIGMOID ? bias : NULL,
            logits,
            ints(places(c)),
            ints(places(c)),
            ints(M),
            ints((size_t)c->E + 1),
            ops_floats(M),
            counted_of(c)};
}

static Router on_gpu(const Case* c, const Router* cpu, const Gpu* gpu) {
    const size_t M = most_rows(c), n = places(c);
    Router r = *cpu;
    r.bias = NULL;
    r.logits = upload_rounded<float>(cpu->logits, tokens(c) * c->E, 0, gpu);
    r.chosen = unset<int>(n, gpu), r.rows = unset<int>(n, gpu), r.order = unset<int>(M, gpu);
    r.first = unset<int>((size_t)c->E + 1, gpu), r.scale = unset<float>(M, gpu);
    if (c->counted != ALL_TOKENS) {
        const Counted* of = &cpu->counted;
        r.counted.lengths = upload_ints(of->lengths, c->B, gpu);
        r.counted.starts = upload_ints(of->starts, tokens(c) * (of->chunks.last + 1), gpu);
        r.counted.targets_per_token = upload_rounded<float>(of->targets_per_token, 1, 0, gpu);
    }
    return r;
}

static void expect_ints(const int* on_gpu, const int* want, size_t n, const char* what, const Case* c,
                        const Gpu* gpu) {
    int* got = ints(n);
    gpu_copy(got, on_gpu, n * sizeof(int), gpu);
    size_t same = 0;
    while (same < n && got[same] == want[same]) {
        same++;
    }
    EXPECT(same == n, "%s of kind %d, %d x %d, %d of %d: element %zu is %d, wanted %d", what, c->kind, c->B,
           c->T, c->used, c->E, same, got[same], want[same]);
}

// Within `relative` of each element, and `absolute` of the largest.
static void expect_near(const float* got, const float* want, size_t n, double relative, double absolute,
                        const char* what, const Case* c) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs((double)want[i]));
    }
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(got[i], want[i], relative * fabs((double)want[i]) + absolute * largest,
                    "%s of kind %d, %d x %d, %d of %d, element %zu", what, c->kind, c->B, c->T, c->used, c->E,
                    i);
    }
}

static void close_router(Router* r) {
    gpu_free(r->logits);
    gpu_free(r->chosen);
    gpu_free(r->rows);
    gpu_free(r->order);
    gpu_free(r->first);
    gpu_free(r->scale);
    gpu_free((void*)r->counted.lengths);
    gpu_free((void*)r->counted.starts);
    gpu_free((void*)r->counted.targets_per_token);
}

static void check_statistics(const Router* cpu, const Router* r, const float* entropies, const Case* c,
                             const Gpu* gpu) {
    const size_t n = (size_t)c->E + 1;
    double *want = ops_doubles(n), *got = ops_doubles(n);
    double* on_gpu = (double*)gpu_alloc(n, sizeof(double), "statistics");
    memset(want, 0, n * sizeof(double));
    for (int i = 0; i < 2; i++) { // added to
        router_statistics_add_cpu(want, cpu);
        router_statistics_add(on_gpu, entropies, r, gpu);
    }
    gpu_copy(got, on_gpu, n * sizeof(double), gpu);
    for (int e = 0; e < c->E; e++) {
        EXPECT(got[e] == want[e], "tokens of expert %d: %g, wanted %g", e, got[e], want[e]);
    }
    EXPECT_NEAR(got[c->E], want[c->E], 64 * FLT_EPSILON * want[c->E], "entropy of kind %d", c->kind);
    gpu_free(on_gpu);
}

// The sums of E exponentials and products in fp32 err by some epsilons.
template <class X>
static void check_backward(const Router* cpu, const Router* r, const Case* c, const Gpu* gpu) {
    const size_t N = tokens(c), M = most_rows(c), stride = router_stride(c->E);
    float *dscale = ops_normal(M, 1), *want = ops_floats(N * c->E), *got = ops_floats(N * c->E);
    float* dscale_gpu = upload_rounded<float>(dscale, M, 0, gpu);
    float* entropies = (float*)gpu_alloc(router_entropies(r), sizeof(float), "entropies");
    X* dlogits = unset<X>(N * stride, gpu);
    router_backward_cpu(want, dscale, cpu, losses_of(c));
    router_backward(dlogits, entropies, dscale_gpu, r, losses_of(c), gpu);
    const float* padded = take_back(dlogits, N * stride, gpu);
    for (size_t n = 0; n < N; n++) {
        memcpy(got + n * c->E, padded + n * stride, (size_t)c->E * sizeof(float));
        for (size_t e = c->E; e < stride; e++) {
            EXPECT(padded[n * stride + e] == 0, "padding of dlogits is %g", padded[n * stride + e]);
        }
    }
    expect_near(got, want, N * c->E, roundoff<X>(), 128 * FLT_EPSILON, "dlogits", c);
    check_statistics(cpu, r, entropies, c, gpu);
    gpu_free(entropies);
    gpu_free(dscale_gpu);
}

// Rows of experts: C and F of one, three and 33 packs.
template <class X>
static void check_rows(const Router* cpu, const Router* r, const Case* c, int C, int F, const Gpu* gpu) {
    const size_t N = tokens(c), M = (size_t)cpu->first[c->E];
    float *x = normal<X>(N * C, 1), *rows = ops_floats(M * C), *out = ops_floats(N * C);
    X *x_gpu = upload_rounded<X>(x, N * C, 0, gpu), *rows_gpu = unset<X>(M * C, gpu);
    experts_gather_cpu(rows, x, cpu, C);
    experts_gather(rows_gpu, x_gpu, r, C, gpu);
    EXPECT(ops_same_bits(download(rows_gpu, M * C, gpu), rows, M * C), "gathered rows");
    memcpy(out, x, N * C * sizeof(float));
    experts_sum_cpu(out, rows, cpu, C, GRADIENT_ADD);
    experts_sum(x_gpu, x_gpu, rows_gpu, r, C, gpu);
    expect_near(take_back(x_gpu, N * C, gpu), out, N * C, roundoff<X>(), 16 * FLT_EPSILON, "sum", c);
    X* sum = unset<X>(N * C, gpu);
    experts_sum_cpu(out, rows, cpu, C, GRADIENT_SET);
    experts_sum(sum, (const X*)NULL, rows_gpu, r, C, gpu);
    expect_near(take_back(sum, N * C, gpu), out, N * C, roundoff<X>(), 16 * FLT_EPSILON, "sum", c);
    gpu_free(rows_gpu);

    float *fch = normal<X>(M * 2 * F, 2), *act = ops_floats(M * F), *dact = normal<X>(M * F, 1),
          *dfch = ops_floats(M * 2 * F), *dscale = ops_floats(M);
    X *fch_gpu = upload_rounded<X>(fch, M * 2 * F, 0, gpu), *act_gpu = unset<X>(M * F, gpu),
      *dact_gpu = upload_rounded<X>(dact, M * F, 0, gpu), *dfch_gpu = unset<X>(M * 2 * F, gpu);
    float* dscale_gpu = unset<float>(M, gpu);
    memset(dfch, 0, M * 2 * F * sizeof(float)); // padding
    memset(dscale, 0, M * sizeof(float));
    experts_activate_cpu(act, fch, cpu, F, ACTIVATION_SWIGLU);
    experts_activate(act_gpu, fch_gpu, r, F, ACTIVATION_SWIGLU, gpu);
    // the fast exponential and division err by 2^-19
    expect_near(take_back(act_gpu, M * F, gpu), act, M * F, roundoff<X>(), 0x1p-19, "act", c);
    experts_activate_backward_cpu(dfch, dscale, dact, fch, cpu, F, ACTIVATION_SWIGLU);
    experts_activate_backward(dfch_gpu, dscale_gpu, dact_gpu, fch_gpu, r, F, ACTIVATION_SWIGLU, gpu);
    expect_near(take_back(dfch_gpu, M * 2 * F, gpu), dfch, M * 2 * F, roundoff<X>(), 0x1p-18, "dfch", c);
    float* got = take_back(dscale_gpu, M, gpu);
    for (size_t m = 0; m < M; m++) {
        got[m] = cpu->order[m] < 0 ? 0.0f : got[m]; // never read
    }
    expect_near(got, dscale, M, 0, 0x1p-18 * sqrt((double)F), "dscale", c);
    gpu_free(fch_gpu);
    gpu_free(dact_gpu);
}

// Biases of C columns, with gradients that are added to; then those of a router's logits, one
// matrix for all tokens, whose gradient is set.
template <class X>
static void check_biases(const Router* cpu, const Router* r, const Case* c, int C, const Gpu* gpu) {
    const size_t M = (size_t)cpu->first[c->E], all = (size_t)c->E * C, N = tokens(c);
    const ExpertRows rows = experts_rows(r), one = {NULL, 1, (int)N, (int)N, EXPERT_BY_DEFAULT};
    float *bias = normal<X>(all, 1), *x = normal<X>(M * C, 1), *dbias = ops_normal(all, 1),
          *dscale = ops_normal(M, 1);
    for (size_t m = 0; m < M; m++) {
        for (int i = 0; i < C && cpu->order[m] < 0; i++) {
            x[m * C + i] = 0; // as gathered
        }
    }
    X *bias_gpu = upload_rounded<X>(bias, all, 0, gpu), *x_gpu = upload_rounded<X>(x, M * C, 0, gpu);
    float *dbias_gpu = upload_rounded<float>(dbias, all, 0, gpu),
          *dscale_gpu = upload_rounded<float>(dscale, M, 0, gpu);
    expert_bias_backward({dbias_gpu, DTYPE_FP32}, (const X*)x_gpu, r->scale, &rows, C, GRADIENT_ADD, gpu);
    expert_bias_scale(dscale_gpu, (const X*)x_gpu, (const X*)bias_gpu, &rows, C, gpu);
    expert_bias_forward(x_gpu, (const X*)bias_gpu, r->scale, &rows, C, gpu);
    experts_bias_backward_cpu(dbias, dscale, x, bias, cpu, C, GRADIENT_ADD);
    experts_bias_cpu(x, bias, cpu, C);
    expect_near(take_back(x_gpu, M * C, gpu), x, M * C, roundoff<X>(), 4 * FLT_EPSILON, "biased", c);
    expect_near(take_back(dbias_gpu, all, gpu), dbias, all, 0, 32 * FLT_EPSILON, "dbias", c);
    expect_near(take_back(dscale_gpu, M, gpu), dscale, M, 0, 32 * FLT_EPSILON, "dscale of biases", c);

    const size_t stride = expert_padded(c->E);
    float *logits = ops_normal(N * c->E, 1), *dlogits = normal<X>(N * stride, 1), *sums = ops_floats(c->E);
    memset(sums, 0, (size_t)c->E * sizeof(float));
    float* logits_gpu = upload_rounded<float>(logits, N * c->E, 0, gpu);
    X *dlogits_gpu = upload_rounded<X>(dlogits, N * stride, 0, gpu), *sums_gpu = unset<X>(c->E, gpu);
    expert_bias_forward(logits_gpu, (const X*)bias_gpu, NULL, &one, c->E, gpu);
    expert_bias_backward({sums_gpu, DTYPE_OF(X)}, (const X*)dlogits_gpu, NULL, &one, c->E, GRADIENT_SET, gpu);
    for (size_t i = 0; i < N * c->E; i++) {
        logits[i] += bias[i % c->E];
        sums[i % c->E] += dlogits[i / c->E * stride + i % c->E];
    }
    expect_near(take_back(logits_gpu, N * c->E, gpu), logits, N * c->E, 0, FLT_EPSILON, "biased logits", c);
    expect_near(take_back(sums_gpu, c->E, gpu), sums, c->E, roundoff<X>(), 64 * FLT_EPSILON, "their bias", c);
    gpu_free(bias_gpu);
    gpu_free(dlogits_gpu);
}

template <class X> static void check(Case c, int C, int F, const Gpu* gpu) {
    float *logits = ops_normal(tokens(&c) * c.E, 1), *bias = ops_normal(c.E, 0.5f);
    round_to_steps(logits, tokens(&c) * c.E, 0.5f);
    round_to_steps(bias, c.E, 0.25f);
    for (size_t n = 0; n < tokens(&c) && c.E == 7; n++) { // then all tokens take expert 3
        logits[n * c.E + 3] = 9;
    }
    Router cpu = on_cpu(&c, logits, bias), r = on_gpu(&c, &cpu, gpu);
    float* bias_gpu = upload_rounded<float>(bias, c.E, 0, gpu);
    r.bias = bias_gpu;
    router_forward_cpu(&cpu);
    router_forward(&r, gpu);
    const size_t M = (size_t)cpu.first[c.E];
    expect_ints(r.chosen, cpu.chosen, places(&c), "chosen", &c, gpu);
    expect_ints(r.first, cpu.first, (size_t)c.E + 1, "first", &c, gpu);
    expect_ints(r.rows, cpu.rows, places(&c), "rows", &c, gpu);
    expect_ints(r.order, cpu.order, M, "order", &c, gpu);
    expect_near(download(r.scale, M, gpu), cpu.scale, M, 32 * FLT_EPSILON, 0, "scale", &c);
    check_backward<X>(&cpu, &r, &c, gpu);
    check_rows<X>(&cpu, &r, &c, C, F, gpu);
    check_biases<X>(&cpu, &r, &c, C, gpu);
    gpu_free(bias_gpu);
    close_router(&r);
    ops_close("router");
}

template <class X> static void test_type(const Gpu* gpu) {
    for (int kind = ROUTER_CHOSEN; kind <= ROUTER_SIGMOID; kind++) {
        const RouterKind k = (RouterKind)kind;
        check<X>({k, 1, 1, 2, 1}, 8, 8, gpu);
        check<X>({k, 2, 31, 5, 2}, 24, 264, gpu);
        check<X>({k, 1, 33, 7, 3}, 264, 24, gpu);
        check<X>({k, 3, 140, 64, 8}, 8, 24, gpu);
        check<X>({k, 1, 7, 4, 4}, 8, 8, gpu);
        check<X>({k, 3, 140, 64, 8, RAGGED}, 8, 24, gpu);
        check<X>({k, 3, 140, 6, 2, RAGGED_CHUNKS}, 8, 24, gpu);
    }
}

TEST(router) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_type<float>(&gpu);
    check<float>({ROUTER_SIGMOID, 1, 5, 1024, 16}, 8, 8, &gpu);
    // more places than a block looks at at a time
    check<float>({ROUTER_CHOSEN, 2, 700, 33, 4}, 8, 8, &gpu);
    UNSANITIZED(test_type<bf16>(&gpu));
    UNSANITIZED(test_type<fp16>(&gpu));
    gpu_close(&gpu);
}
