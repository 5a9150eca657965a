// test_attention_bf16.c -- attention with bf16 factors: every kernel against double precision,
// within the rounding of probabilities and their gradients; documents; the same bits for any number
// of threads.
#include "llmc/base/float16.h"
#include "llmc/bf16/attention_bf16.h"
#include "llmc/bf16/matmul_bf16.h"
#include "llmc/reference.h"
#include "dev/test/lib/attention_ranks.h"
#include "dev/test/lib/bf16_kernels.h"
#include "dev/test/lib/ops.h"

typedef struct {
    AttentionSizes sizes;
    const int* starts;
    float *qkv, *dout, *out, *lse, *dqkv;
} Run;

// Elements of out, lse and qkv.
static size_t outs(AttentionSizes s) { return (size_t)s.B * s.T * attention_queries_size(s); }
static size_t lses(AttentionSizes s) { return (size_t)s.B * s.NH * s.T; }
static size_t qkvs(AttentionSizes s) { return (size_t)s.B * s.T * attention_qkv_size(s); }

// Factors that are bf16 numbers already: then scores and dp are rounded by nothing but fp32 sums.
static float* bf16_normal(size_t n) {
    float* x = ops_normal(n, 1);
    for (size_t i = 0; i < n; i++) {
        x[i] = bf16_to_float(bf16_from_float(x[i]));
    }
    return x;
}

static Run run_of(const Bf16Kernel* kernel, AttentionSizes sizes, float* qkv, float* dout,
                  const int* starts) {
    const Run r = {
        sizes, starts, qkv, dout, ops_floats(outs(sizes)), ops_floats(lses(sizes)), ops_floats(qkvs(sizes))};
    AttentionBf16Scratch scratch;
    Memory memory = memory_on_host();
    attention_bf16_open(&scratch, &memory, *kernel, sizes.T, sizes.HS);
    const AttentionPass pass = {sizes, starts, qkv, NULL, r.out, r.lse, NULL, NULL};
    attention_bf16_forward_cpu(&pass, &scratch);
    attention_bf16_backward_cpu(&(AttentionGradients){dout, r.dqkv, NULL}, &pass, &scratch);
    memory_close(&memory);
    return r;
}

// Bounds of the change that one rounding of each p and ds to bf16, by up to 2^-8, can cause. |x|
// stands for sums of absolute values:
//     out     sum_u p |v| = outs
//     delta   sum_d |dout| outs = deltas
//     dv      sum_t p |dout|
//     dq      sum_u (|ds| + p deltas / root) |k|
//     dk      the same over t with |q|
// The last bound is the size of the values that fp32 rounds in lse = log(sum_u exp(score)): 1, for
// exponentials, which may be off by 3e-7, |lse|, and the sums that are scores,
// sum_u p |q| |k| / root. Capped scores err by some roundings of the cap.
typedef struct {
    double *out, *dqkv; // in units of 2^-8
    double* lse;        // to be multiplied by a few FLT_EPSILON
} Bounds;

// Query t of a head: adds to the bounds of its row and of the keys' rows. lse and bounds.lse begin
// with the head's token 0.
static void bound_query(const Run* r, Bounds bounds, const double* lse, const double* out, size_t token,
                        int h, int start, int t) {
    const AttentionSizes sizes = r->sizes;
    const int HS = sizes.HS;
    const size_t row = (size_t)attention_qkv_size(sizes), Q = (size_t)attention_queries_size(sizes),
                 at = (token + t) * Q + h * HS, query = (token + t) * row + h * HS;
    const float *q = r->qkv + query, *dout = r->dout + at;
    double deltas = 0, delta = 0;
    for (int pass = 0; pass < 2; pass++) { // outs and delta, then what follows from them
        for (int u = start; u <= t; u++) {
            const size_t key = (token + u) * row + Q + h / attention_group(sizes) * HS,
                         value = key + attention_keys_size(sizes);
            const float *k = r->qkv + key, *v = r->qkv + value;
            double score = 0, scores = 0, dp = 0;
            for (int d = 0; d < HS; d++) {
                score += (double)q[d] * k[d];
                scores += fabs((double)q[d] * k[d]);
                dp += (double)dout[d] * v[d];
            }
            const double root = sizes.root, cap = sizes.cap, y = cap > 0 ? tanh(score / root / cap) : 0,
                         p = exp((cap > 0 ? cap * y : score / root) - lse[t]);
            const double ds = (fabs(p * (dp - delta)) + p * deltas) / root * (1 - y * y);
            bounds.lse[t] += pass == 0 ? p * (scores / root + 4 * cap) : 0;
            for (int d = 0; d < HS; d++) {
                if (pass == 0) {
                    bounds.out[at + d] += p * fabs(v[d]);
                } else {
                    bounds.dqkv[query + d] += ds * fabs(k[d]);
                    bounds.dqkv[key + d] += ds * fabs(q[d]);
                    bounds.dqkv[value + d] += p * fabs(dout[d]);
                }
            }
        }
        for (int d = 0; d < HS && pass == 0; d++) {
            delta += dout[d] * out[at + d];
            deltas += fabs(dout[d]) * bounds.out[at + d];
        }
    }
}

// Also allowed: 1 % for the rounding of a ds whose delta is off already, and the errors of fp32,
// 1e-5 of the largest result.
static void expect_within(const char* name, const float* got, const double* want, const double* bound,
                          size_t n, const Run* r, const char* what) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs(want[i]));
    }
    for (size_t i = 0; i < n; i++) {
        const double allowed = 1.01 * bound[i] * 0x1p-8 + 1e-5 * largest;
        if (!(fabs(got[i] - want[i]) <= allowed)) {
            EXPECT_NEAR(got[i], want[i], allowed, "%s: element %zu of %s, B %d T %d NH %d KV %d HS %d", name,
                        i, what, r->sizes.B, r->sizes.T, r->sizes.NH, r->sizes.KV, r->sizes.HS);
            return;
        }
    }
}

// q and k are `sharp` times normal numbers.
static void check_sharp(const Bf16Kernel* kernel, AttentionSizes sizes, const int* starts, float sharp) {
    const int T = sizes.T, NH = sizes.NH, qk = attention_queries_size(sizes) + attention_keys_size(sizes);
    const size_t n = outs(sizes), rows = lses(sizes);
    float* input = bf16_normal(qkvs(sizes));
    for (size_t i = 0; i < qkvs(sizes); i++) {
        input[i] *= (int)(i % (size_t)attention_qkv_size(sizes)) < qk ? sharp : 1;
    }
    const Run r = run_of(kernel, sizes, input, bf16_normal(n), starts);
    double *out = ops_doubles(n), *lse = ops_doubles(rows), *dqkv = ops_doubles(qkvs(sizes));
    const double* qkv = ops_widen(r.qkv, qkvs(sizes));
    const Bounds bounds = {ops_doubles(n), ops_doubles(qkvs(sizes)), ops_doubles(rows)};
    const RefHeads heads = {sizes.B, sizes.T, NH, sizes.KV, sizes.HS, 0, 1.0 / sizes.root, sizes.cap};
    ref_attention_forward(out, lse, qkv, starts, heads);
    ref_attention_backward(dqkv, NULL, ops_widen(r.dout, n), qkv, out, lse, starts, heads);
    for (int i = 0; i < (int)rows; i++) {
        const int t = i % T, h = i / T % NH, b = i / T / NH;
        const size_t token = (size_t)b * T;
        const Bounds of_head = {bounds.out, bounds.dqkv, bounds.lse + (size_t)(b * NH + h) * T};
        bounds.lse[i] += 1 + fabs(lse[i]);
        bound_query(&r, of_head, lse + (size_t)(b * NH + h) * T, out, token, h,
                    starts ? starts[token + t] : 0, t);
    }
    expect_within(kernel->name, r.out, out, bounds.out, n, &r, "out");
    expect_within(kernel->name, r.dqkv, dqkv, bounds.dqkv, qkvs(sizes), &r, "dqkv");
    EXPECT_NEAR(ops_error(r.lse, lse, bounds.lse, rows), 0, 4, "%s: lse of %d x %d x %d/%d x %d",
                kernel->name, sizes.B, T, NH, sizes.KV, sizes.HS);
    ops_close(kernel->name);
}

static void check(const Bf16Kernel* kernel, int B, int T, int NH, int HS, const int* starts) {
    check_sharp(kernel, attention_sizes(B, T, NH, NH, HS), starts, 1);
}

// (1, T): documents of up to `longest` tokens.
static int* documents(int T, int longest) {
    int *starts = ops_below((size_t)T, longest), start = 0;
    for (int t = 0; t < T; t++) {
        start = starts[t] == 0 ? t : start;
        starts[t] = start;
    }
    return starts;
}

// Every edge of a tile and of a block of queries, and of a tile of dimensions; documents that cross
// them.
static void test_sizes(const Bf16Kernel* kernel) {
    const int T[] = {1, 31, 32, 33, 129}, HS[] = {1, 12, 64, 33, 3};
    for (int i = 0; i < 5; i++) {
        check(kernel, 1 + i % 2, T[i], 1 + i % 3, HS[i], NULL);
        check(kernel, 1, T[i], 2, 5, documents(T[i], 40));
    }
    check(kernel, 1, ATTENTION_BF16_ROWS + 70, 1, 16, documents(ATTENTION_BF16_ROWS + 70, 90));
    check(kernel, 1, 2 * ATTENTION_BF16_ROWS + 1, 1, 4, NULL);
}

// A row longer than a block of keys of attention.h, and the size of a head of GPT-2.
static void test_long(const Bf16Kernel* kernel) { check(kernel, 1, ATTENTION_KEYS + 33, 1, 64, NULL); }

// Scores of some hundreds: fp32 has no exponential of the difference between the largest score and
// the token's score with itself.
static void test_sharp(const Bf16Kernel* kernel) {
    check_sharp(kernel, attention_sizes(1, 70, 2, 2, 16), NULL, 16);
    check_sharp(kernel, attention_sizes(1, 70, 1, 1, 64), documents(70, 20), 16);
}

// Heads of queries that share keys; each token sees a window.
static void test_groups(const Bf16Kernel* kernel) {
    const int HS[] = {8, 32, 48, 64, 80, 128}, T[] = {1, 31, 33, 150}, heads[][2] = {{4, 1}, {6, 2}, {3, 1}},
              window[] = {1, 7, 150};
    for (int i = 0; i < 12; i++) {
        const int t = T[i % 4], *group = heads[i % 3];
        int starts[150];
        for (int n = 0; n < t; n++) {
            starts[n] = int_max(0, n - window[i / 4] + 1);
        }
        check_sharp(kernel, attention_sizes(1 + i % 2, t, group[0], group[1], HS[i % 6]), NULL, 1);
        check_sharp(kernel, attention_sizes(1, t, group[0], group[1], HS[i % 6]), starts, 1);
    }
}

// Scores below the cap and far above it, so that shifts must be found again; another scale; heads
// of 256.
static void test_caps(const Bf16Kernel* kernel) {
    const float caps[] = {1, 20, 60};
    for (int i = 0; i < 3; i++) {
        AttentionSizes sizes = attention_sizes(1, 70, 4, 2, 16);
        sizes.cap = caps[i];
        check_sharp(kernel, sizes, NULL, 1);
        check_sharp(kernel, sizes, documents(70, 20), 16);
        sizes.root = 2;
        check_sharp(kernel, sizes, documents(70, 20), 2);
    }
    AttentionSizes wide = attention_sizes(1, 100, 2, 1, 256);
    check_sharp(kernel, wide, NULL, 1);
    wide.cap = 3;
    check_sharp(kernel, wide, NULL, 1);
}

// A token sees itself and earlier ones: others do not change one bit of its results, though rounded
// together with them.
static void test_causality(const Bf16Kernel* kernel) {
    enum { T = 70, NH = 2, HS = 12, C = NH * HS };
    const AttentionSizes sizes = attention_sizes(1, T, NH, NH, HS);
    const int places[] = {0, 30, 31, 32, 63};
    for (int i = 0; i < 5; i++) {
        const int t = places[i];
        float *qkv = ops_normal(T * 3 * C, 1), *changed = ops_normal(T * 3 * C, 30),
              *dout = ops_normal(T * C, 0);
        memcpy(changed, qkv, (size_t)(t + 1) * 3 * C * sizeof(float));
        dout[t * C] = 1;
        const Run a = run_of(kernel, sizes, qkv, dout, NULL), b = run_of(kernel, sizes, changed, dout, NULL);
        EXPECT(ops_same_bits(a.out, b.out, (size_t)(t + 1) * C),
               "%s: tokens after %d changed an output up to it", kernel->name, t);
        for (int j = (t + 1) * 3 * C; j < T * 3 * C; j++) {
            EXPECT(a.dqkv[j] == 0, "%s: a gradient at token %d reaches token %d", kernel->name, t,
                   j / (3 * C));
        }
        ops_close("causality");
    }
}

// With scratch for longer rows, full of NaN from others, too.
static void test_scratch(const Bf16Kernel* kernel) {
    enum { T = 40, LONG = 150, HS = 20 };
    const AttentionSizes sizes = attention_sizes(1, T, 1, 1, HS), large = attention_sizes(1, LONG, 1, 1, HS);
    float *qkv = ops_normal(3 * T * HS, 1), *dout = ops_normal(T * HS, 1);
    const Run want = run_of(kernel, sizes, qkv, dout, NULL);
    AttentionBf16Scratch scratch;
    threads_set(1);
    Memory memory = memory_on_host();
    attention_bf16_open(&scratch, &memory, *kernel, LONG, HS);
    float *out = ops_floats(LONG * HS), *lse = ops_floats(LONG), *dqkv = ops_floats(3 * LONG * HS);
    float *nan = ops_floats(3 * LONG * HS), *nan_dout = ops_floats(LONG * HS);
    const AttentionPass of_nan = {large, NULL, nan, NULL, out, lse},
                        pass = {sizes, NULL, qkv, NULL, out, lse};
    attention_bf16_forward_cpu(&of_nan, &scratch);
    attention_bf16_backward_cpu(&(AttentionGradients){nan_dout, dqkv, NULL}, &of_nan, &scratch);
    attention_bf16_forward_cpu(&pass, &scratch);
    attention_bf16_backward_cpu(&(AttentionGradients){dout, dqkv, NULL}, &pass, &scratch);
    EXPECT(ops_same_bits(out, want.out, T * HS), "%s: out after NaN", kernel->name);
    EXPECT(ops_same_bits(dqkv, want.dqkv, 3 * T * HS), "%s: dqkv after NaN", kernel->name);
    memory_close(&memory);
    threads_set(2);
    ops_close("scratch");
}

// Value (line, k) of a left factor, lines of K values.
static float left_at(const uint32_t* packed, int line, int k, int K) {
    const uint32_t* tile =
        packed + line / BF16_TILE * matmul_bf16_pairs(1, K) + k / BF16_STEP * BF16_STEP_PAIRS;
    return bf16_to_float(
        (uint16_t)(tile[line % BF16_TILE * BF16_STEP / 2 + k % BF16_STEP / 2] >> k % 2 * 16));
}

// q, k and v that come packed give the same bits as in fp32, and dqkv is the same rounded, by
// tokens and by channels; its sums are those of columns within the rounding of T additions.
static void test_packed(const Bf16Kernel* kernel, int NH, int KV) {
    enum { B = 2, T = ATTENTION_BF16_ROWS + 64, HS = 64, N = B * T };
    const AttentionSizes sizes = attention_sizes(B, T, NH, KV, HS);
    const int Q = attention_queries_size(sizes), QKV = attention_qkv_size(sizes);
    int starts[N];
    memcpy(starts, documents(T, 90), T * sizeof(int));
    memcpy(starts + T, documents(T, 40), T * sizeof(int));
    const Run want = run_of(kernel, sizes, bf16_normal(N * QKV), bf16_normal(N * Q), starts);
    AttentionBf16Scratch scratch;
    Memory memory = memory_on_host();
    attention_bf16_open(&scratch, &memory, *kernel, T, HS);
    float *out = ops_floats(N * Q), *lse = ops_floats(N * NH), *sums = ops_floats(B * QKV);
    uint32_t *qkv = (uint32_t*)check_alloc((size_t)N * QKV, sizeof(float), "qkv"),
             *dqkv = (uint32_t*)check_alloc((size_t)N * QKV, sizeof(float), "dqkv");
    for (int row = 0; row < N; row += BF16_TILE) {
        for (int col = 0; col < QKV; col += BF16_TILE) {
            float tile[BF16_TILE * BF16_TILE];
            bf16_copy_rows(tile, BF16_TILE, want.qkv + row * QKV + col, QKV, BF16_TILE, BF16_TILE);
            attention_bf16_pack_qkv(kernel, qkv, tile, row, col, sizes);
        }
    }
    const AttentionBf16Gradient gradient = {dqkv, sums, {NULL, HS}};
    const AttentionPass pass = {sizes, starts, NULL, NULL, out, lse, NULL, NULL};
    attention_bf16_packed_forward_cpu(qkv, &pass, &scratch);
    attention_bf16_packed_backward_cpu(gradient, want.dout, qkv, &pass, &scratch);
    EXPECT(ops_same_bits(out, want.out, N * Q) && ops_same_bits(lse, want.lse, N * NH), "%s: packed qkv",
           kernel->name);
    for (int i = 0; i < N * QKV; i++) {
        const int row = i / QKV, col = i % QKV;
        const float rounded = bf16_to_float(bf16_from_float(want.dqkv[i]));
        EXPECT(left_at(dqkv, row, col, QKV) == rounded, "%s: dqkv by tokens, %d %d", kernel->name, row, col);
        EXPECT(left_at(dqkv + matmul_bf16_pairs(N, QKV), col, row, N) == rounded,
               "%s: dqkv by channels, %d %d", kernel->name, row, col);
    }
    for (int i = 0; i < B * QKV; i++) {
        double sum = 0, size = 0;
        for (int t = 0; t < T; t++) {
            const float x = want.dqkv[(i / QKV * T + t) * QKV + i % QKV];
            sum += x;
            size += fabsf(x);
        }
        EXPECT_NEAR(sums[i], sum, T * size * FLT_EPSILON, "%s: sum %d of dqkv", kernel->name, i);
    }
    free(qkv);
    free(dqkv);
    memory_close(&memory);
    ops_close("packed");
}

static AttentionResults run_either(AttentionSizes s, AttentionInputs in, const void* scratch) {
    AttentionBf16Scratch* a = (AttentionBf16Scratch*)scratch;
    const AttentionResults r = {ops_floats(outs(s)), ops_floats(lses(s)), ops_floats(qkvs(s)),
                                ops_floats((size_t)s.B * attention_keys(s) * 2 * attention_keys_size(s))};
    const AttentionPass pass = {s, in.starts, in.qkv, in.kv, r.out, r.lse, NULL, NULL};
    attention_bf16_forward_cpu(&pass, a);
    attention_bf16_backward_cpu(&(AttentionGradients){in.dout, r.dqkv, r.dkv}, &pass, a);
    return r;
}

// Sequences divided among ranks, in chunks that are not whole blocks.
static void test_ranks(const Bf16Kernel* kernel) {
    const int among[] = {2, 4, 8}, tiles[] = {3, 1, 1};
    for (int i = 0; i < 3; i++) {
        const int ranks = among[i], T = 2 * ranks * tiles[i] * BF16_TILE;
        AttentionSizes sizes = attention_sizes(1, T, 4, 1 + i % 2, i % 2 ? 12 : 32);
        sizes.cap = i == 1 ? 2 : 0;
        AttentionBf16Scratch scratch;
        Memory memory = memory_on_host();
        attention_bf16_open(&scratch, &memory, *kernel, T, sizes.HS);
        for (int k = 0; k < 2; k++) {
            const AttentionInputs in = {ops_normal(qkvs(sizes), 1), NULL, ops_normal(outs(sizes), 1),
                                        k ? documents(T, 60) : NULL};
            expect_attention_divided(sizes, in, ranks, 0, run_either, &scratch);
        }
        memory_close(&memory);
    }
}

static void test_threads(const Bf16Kernel* kernel) {
    enum { B = 2, T = 100, NH = 5, HS = 16, C = NH * HS };
    const AttentionSizes sizes = attention_sizes(B, T, NH, NH, HS);
    float *qkv = ops_normal(B * T * 3 * C, 1), *dout = ops_normal(B * T * C, 1);
    const int threads[] = {1, 2, 5};
    Run r[3];
    for (int i = 0; i < 3; i++) {
        threads_set(threads[i]);
        r[i] = run_of(kernel, sizes, qkv, dout, NULL);
        EXPECT(ops_same_bits(r[i].out, r[0].out, B * T * C) &&
                   ops_same_bits(r[i].dqkv, r[0].dqkv, 3 * B * T * C),
               "%s: %d threads", kernel->name, threads[i]);
    }
    threads_set(2);
    ops_close("threads");
}

// With factors that bf16 holds exactly, the largest scores equal those of fp32; padding does not
// count.
static void test_largest(const Bf16Kernel* kernel) {
    const AttentionSizes s = attention_sizes(2, 100, 4, 2, 16);
    const int lengths[] = {70, 100};
    float *qkv = bf16_normal(qkvs(s)), *out = ops_floats(outs(s)), *lse = ops_floats(lses(s));
    double got[4] = {0, 0, 0, 1e6}, want[4] = {0, 0, 0, 1e6};
    const AttentionPass pass = {s, NULL, qkv, NULL, out, lse, lengths, got},
                        in_fp32 = {s, NULL, qkv, NULL, out, lse, lengths, want};
    AttentionBf16Scratch scratch;
    AttentionScratch fp32;
    Memory memory = memory_on_host();
    for (size_t i = 80 * (size_t)attention_qkv_size(s); i < 100 * (size_t)attention_qkv_size(s); i++) {
        qkv[i] *= 8; // padding
    }
    attention_bf16_open(&scratch, &memory, *kernel, s.T, s.HS);
    attention_open(&fp32, &memory, s.T, s.HS);
    attention_bf16_forward_cpu(&pass, &scratch);
    attention_forward_cpu(&in_fp32, &fp32);
    for (int h = 0; h < 4; h++) {
        EXPECT_NEAR(got[h], want[h], 1e-6 * want[h], "%s: the largest score of head %d", kernel->name, h);
    }
    memory_close(&memory);
    ops_close("largest");
}

TEST(attention_bf16) {
    vec_flush_denormals(); // as the trainer does
    threads_set(2);
    Bf16Kernel kernels[BF16_KERNELS];
    const int count = tested_kernels(kernels);
    for (int k = 0; k < count; k++) {
        test_sizes(&kernels[k]);
        test_causality(&kernels[k]);
        test_scratch(&kernels[k]);
        test_threads(&kernels[k]);
        test_ranks(&kernels[k]);
        test_packed(&kernels[k], 2, 2);
        test_packed(&kernels[k], 3, 1);
        test_groups(&kernels[k]);
        test_caps(&kernels[k]);
        test_largest(&kernels[k]);
    }
    LARGE(test_long(&kernels[0]));
    test_sharp(&kernels[0]);
}
