// test_cross_entropy_bf16.c -- cross-entropy with bf16 matmuls: every kernel against the formulas
// in double precision: sizes, tokens that do not count, logits too far apart for fp32; the same
// bits for any number of threads.
#include "llmc/base/float16.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/bf16/cross_entropy_bf16.h"
#include "llmc/base/threads.h"
#include "dev/test/lib/bf16_kernels.h"
#include "dev/test/lib/ops.h"

// The target's part of a gradient reads factors in fp32, the rest rounded ones.
typedef struct {
    int N, C, V, Vp, tokens; // that memory is lent for
    float scale, softcap, z_loss;
    const float *inp, *wte;
    int* target;
    double *loss, *dinp, *dwte;                // what is wanted,
    double *loss_size, *dinp_size, *dwte_size; // and the sums of absolute values
} Case;

static double rounded(float x) { return bf16_to_float(bf16_from_float(x)); }

// Sets what one token adds; `logits` and `size` are (V), for its use. e^x ends at FLT_MIN.
static void expect_token(const Case* p, int n, double* logits, double* size) {
    const float* x = p->inp + (size_t)n * p->C;
    double max = -INFINITY, sum = 0, largest = 0;
    for (int v = 0; v < p->V; v++) {
        logits[v] = size[v] = 0;
        for (int c = 0; c < p->C; c++) {
            const double term = rounded(x[c]) * rounded(p->wte[(size_t)v * p->C + c]);
            logits[v] += term;
            size[v] += fabs(term);
        }
        size[v] += 2 * p->softcap; // a capped logit is wrong by a few roundings of softcap
        logits[v] = p->softcap > 0 ? p->softcap * tanh(logits[v] / p->softcap) : logits[v];
        max = fmax(max, logits[v]);
        largest = fmax(largest, size[v]);
    }
    for (int v = 0; v < p->V; v++) {
        sum += exp(logits[v] - max);
    }
    const int target = p->target[n];
    const double z = 1 + 2 * p->z_loss * (log(sum) + max),
                 z_size = 1 + 2 * p->z_loss * (2 * largest + log(p->V));
    p->loss[n] = log(sum) + max - logits[target];
    p->loss_size[n] = 2 * largest + log(p->V) + 1;
    for (int v = 0; v < p->V; v++) {
        const double prob = exp(logits[v] - max) / sum, is_target = v == target;
        const double capped = p->softcap > 0 ? logits[v] / p->softcap : 0;
        const double d = p->scale * (prob * z - is_target) * (1 - capped * capped),
                     error = p->scale * (prob * z_size * (1 + largest) + is_target + FLT_MIN / FLT_EPSILON);
        for (int c = 0; c < p->C; c++) {
            const size_t i = (size_t)n * p->C + c, w = (size_t)v * p->C + c;
            p->dinp[i] += d * (is_target ? p->wte[w] : rounded(p->wte[w]));
            p->dwte[w] += d * x[c];
            p->dinp_size[i] += error * fabs(p->wte[w]);
            p->dwte_size[w] += error * fabs(x[c]);
        }
    }
}

// Without what is wanted.
static Case case_open(int N, int C, int V, int Vp, int tokens, float spread) {
    const size_t nc = (size_t)N * C, vc = (size_t)Vp * C;
    const float* inp = ops_normal(nc, spread);
    float* wte = ops_normal(vc, 1 / sqrtf((float)C));
    memset(wte + (size_t)V * C, 0, (size_t)(Vp - V) * C * sizeof(float));
    const Case p = {N,
                    C,
                    V,
                    Vp,
                    tokens,
                    0.3f,
                    0,
                    0,
                    inp,
                    wte,
                    ops_below(N, V),
                    ops_doubles(N),
                    ops_doubles(nc),
                    ops_doubles(vc),
                    ops_doubles(N),
                    ops_doubles(nc),
                    ops_doubles(vc)};
    for (int n = 0; n < N; n += 7) {
        p.target[n] = NO_TARGET;
    }
    return p;
}

static void expect(const Case* p) {
    double *logits = ops_doubles(p->V), *size = ops_doubles(p->V);
    for (int n = 0; n < p->N; n++) {
        if (p->target[n] != NO_TARGET) {
            expect_token(p, n, logits, size);
        }
    }
}

typedef struct {
    float *loss, *only_loss, *dinp, *set, *dwte;
} Results;

// Returns the results of a kernel. dwte is set, and then added to once more.
static Results results_of(const Bf16Kernel* kernel, const Case* p) {
    const size_t vc = (size_t)p->Vp * p->C;
    const int Vp = p->Vp;
    const size_t forward_pairs = matmul_bf16_pairs(Vp, p->C), backward_pairs = matmul_bf16_pairs(p->C, Vp);
    Results r = {ops_floats(p->N), ops_floats(p->N), ops_floats((size_t)p->N * p->C), NULL, ops_floats(vc)};
    MatmulBf16Scratch matmul;
    CrossEntropyBf16Scratch scratch;
    Group alone = group_alone(NULL);
    const size_t lent = cross_entropy_bf16_rows(p->tokens, Vp) * Vp;
    // ends where a page ends, and starts at a multiple of 64 bytes
    float* memory = ops_floats((lent + BF16_LINE_PAIRS - 1) / BF16_LINE_PAIRS * BF16_LINE_PAIRS);
    EXPECT(lent >= matmul_bf16_pairs(Vp, p->tokens), "too little memory for %d tokens", p->tokens);
    uint32_t* forward = (uint32_t*)(void*)ops_floats(forward_pairs);
    uint32_t* backward = (uint32_t*)(void*)ops_floats(backward_pairs);
    Memory ledger = memory_on_host();
    matmul_bf16_open(&matmul, &ledger, *kernel);
    cross_entropy_bf16_open(&scratch, &ledger, memory, p->tokens, p->N, p->C, Vp, 1);
    matmul_bf16_pack(kernel->pack, forward, matmul_bf16_forward_weight(p->wte, p->C), p->C, Vp);
    matmul_bf16_pack(kernel->pack, backward, matmul_bf16_backward_weight(p->wte, p->C), Vp, p->C);
    const CrossEntropyBf16 of = {p->inp, p->wte, forward, backward,   p->target, p->N,
                                 p->C,   p->V,   Vp,      p->softcap, p->z_loss, &alone};
    cross_entropy_bf16_losses_cpu(r.only_loss, &of, &scratch, &matmul);
    cross_entropy_bf16_gradients_cpu(r.loss, r.dinp, NULL, &of, p->scale, GRADIENT_SET, &scratch, &matmul);
    const float* dinp = ops_copy(r.dinp, (size_t)p->N * p->C);
    cross_entropy_bf16_gradients_cpu(r.loss, r.dinp, r.dwte, &of, p->scale, GRADIENT_SET, &scratch, &matmul);
    EXPECT(ops_same_bits(dinp, r.dinp, (size_t)p->N * p->C), "%s: dinp without dwte", kernel->name);
    r.set = ops_copy(r.dwte, vc);
    cross_entropy_bf16_gradients_cpu(r.loss, r.dinp, r.dwte, &of, p->scale, GRADIENT_ADD, &scratch, &matmul);
    memory_close(&ledger);
    return r;
}

// Losses err as sums in fp32 do. Two factors of a gradient are rounded to bf16: by 2^-9 each, 2^14
// epsilons of fp32.
static void check(const Bf16Kernel* kernel, const Case* p, const Results* r) {
    const double limit = 4 + sqrt(p->V), of_factors = 2 * (1 << 14) + limit;
    const size_t nc = (size_t)p->N * p->C, vc = (size_t)p->Vp * p->C;
    for (size_t i = 0; i < vc; i++) {
        r->dwte[i] /= 2;
    }
    EXPECT_NEAR(ops_error(r->loss, p->loss, p->loss_size, p->N), 0, limit, "%s: loss of %d x %d x %d",
                kernel->name, p->N, p->C, p->V);
    EXPECT(ops_same_bits(r->loss, r->only_loss, p->N), "%s: the two losses differ", kernel->name);
    EXPECT_NEAR(ops_error(r->dinp, p->dinp, p->dinp_size, nc), 0, of_factors, "%s: dinp of %d x %d x %d",
                kernel->name, p->N, p->C, p->V);
    EXPECT_NEAR(ops_error(r->dwte, p->dwte, p->dwte_size, vc), 0, of_factors, "%s: dwte of %d x %d x %d",
                kernel->name, p->N, p->C, p->V);
    EXPECT_NEAR(ops_error(r->set, p->dwte, p->dwte_size, vc), 0, of_factors, "%s: dwte set of %d x %d x %d",
                kernel->name, p->N, p->C, p->V);
    for (size_t i = (size_t)p->V * p->C; i < vc; i++) {
        EXPECT(r->dwte[i] == 0 && r->set[i] == 0, "%s: gradient %g of padding", kernel->name,
               (double)r->dwte[i]);
    }
}

static void test_size(const Bf16Kernel* kernel, int N, int C, int V, int Vp, int tokens, float spread) {
    const float softcaps[] = {0, 3, 15}, z_losses[] = {0, 0, 0.01f};
    for (int i = 0; i < 3; i++) {
        Case p = case_open(N, C, V, Vp, tokens, spread);
        p.softcap = softcaps[i];
        p.z_loss = z_losses[i];
        expect(&p);
        const Results r = results_of(kernel, &p);
        check(kernel, &p, &r);
        ops_close("classifier");
    }
}

// A token that counts nowhere may hold anything.
static void test_no_target(const Bf16Kernel* kernel) {
    enum { N = 40, C = 33, V = 70 };
    Case p = case_open(N, C, V, V, 32, 1);
    expect(&p);
    float* inp = ops_copy(p.inp, N * C);
    p.inp = inp;
    for (int n = 0; n < N; n++) {
        inp[n * C + n % C] = p.target[n] == NO_TARGET ? (n % 2 ? NAN : INFINITY) : inp[n * C + n % C];
    }
    const Results r = results_of(kernel, &p);
    check(kernel, &p, &r);
    for (int i = 0; i < N * C; i++) {
        EXPECT(p.target[i / C] != NO_TARGET || r.dinp[i] == 0, "%s: gradient %g of token %d", kernel->name,
               (double)r.dinp[i], i / C);
    }
    ops_close("no target");
}

// NaN in a token that counts stays visible in its loss, and in no other one's.
static void test_nan(const Bf16Kernel* kernel) {
    enum { N = 34, C = 5, V = 40, BAD = 3 };
    Case p = case_open(N, C, V, V, N, 1);
    float* inp = ops_copy(p.inp, N * C);
    p.inp = inp;
    inp[BAD * C] = NAN;
    const Results r = results_of(kernel, &p);
    for (int n = 0; n < N; n++) {
        EXPECT(isnan(r.loss[n]) == (n == BAD), "%s: loss %g of token %d", kernel->name, (double)r.loss[n], n);
    }
    ops_close("NaN");
}

// Logits far below those of padding, which are zero, and far from each other.
static void test_negative(const Bf16Kernel* kernel) {
    enum { N = 33, C = 20, V = 50, Vp = 64 };
    const Case p = case_open(N, C, V, Vp, N, 100);
    float *inp = (float*)p.inp, *wte = (float*)p.wte;
    for (int n = 0; n < N; n++) {
        inp[n * C] = 100;
    }
    for (int v = 0; v < V; v++) {
        wte[v * C] = -20;
    }
    expect(&p);
    const Results r = results_of(kernel, &p);
    check(kernel, &p, &r);
    ops_close("negative logits");
}

static void test_threads(const Bf16Kernel* kernel, int N, int C, int V, int Vp, int tokens) {
    const Case p = case_open(N, C, V, Vp, tokens, 1);
    const int threads[] = {1, 2, 5}, before = threads_max();
    Results r[3];
    for (int t = 0; t < 3; t++) {
        threads_set(threads[t]);
        r[t] = results_of(kernel, &p);
        EXPECT(ops_same_bits(r[t].loss, r[0].loss, N), "%s: loss with %d threads", kernel->name, threads[t]);
        EXPECT(ops_same_bits(r[t].dinp, r[0].dinp, (size_t)N * C), "%s: dinp with %d threads", kernel->name,
               threads[t]);
        EXPECT(ops_same_bits(r[t].dwte, r[0].dwte, (size_t)Vp * C), "%s: dwte with %d threads", kernel->name,
               threads[t]);
    }
    threads_set(before);
    ops_close("threads");
}

TEST(cross_entropy_bf16) {
    Bf16Kernel kernels[BF16_KERNELS];
    vec_flush_denormals(); // as the trainer does
    const int count = tested_kernels(kernels);
    for (int k = 0; k < count; k++) {
        test_size(&kernels[k], 1, 1, 1, 1, 1, 1);
        test_size(&kernels[k], 2, 5, 31, 31, 2, 1);
        test_size(&kernels[k], 33, 40, 100, 128, 33, 1);
        test_size(&kernels[k], 70, 64, 64, 64, 32, 1);
        test_size(&kernels[k], 126, 64, 100, 128, 32, 1);         // e waits in dwte
        LARGE(test_size(&kernels[k], 30, 33, 2100, 2112, 64, 2)); // two chunks of words
        // logits of hundreds: from the largest one
        test_size(&kernels[k], 40, 16, 300, 304, 40, 100);
        test_size(&kernels[k], 9, 3, 50, 50, 9, 1e4f);
        LARGE(test_size(&kernels[k], 150, 20, 2500, 2528, 96, 1));
        // two chunks of words
        test_no_target(&kernels[k]);
        test_nan(&kernels[k]);
        test_negative(&kernels[k]);
    }
    LARGE(test_size(&kernels[0], 1024, 512, 90, 96, 96, 1));
    LARGE(test_size(&kernels[0], 520, 1100, 90, 96, 520, 1));   // several slabs of C
    LARGE(test_size(&kernels[0], 520, 20, 2500, 2528, 520, 1)); // several slabs of words
    LARGE(test_threads(&kernels[0], 150, 70, 5000, 5024, 96));
    LARGE(test_threads(&kernels[0], 520, 1100, 300, 320, 520)); // several slabs of C
    // e waits in dwte, several slabs of words
    LARGE(test_threads(&kernels[0], 520, 264, 2500, 2528, 96));
}
