/*
bench_cpu.c -- every CPU operation at the shapes of GPT-2 124M, as a share of this machine's peak.

    make bench-cpu

The same program measures the peaks: fp32 multiply-adds in registers on all threads; matmuls of bf16
with factors in the L1 cache by the kernel of this machine; memory bandwidth as the best of a copy
and a triad over arrays far larger than the caches; and for operations that only read, the bandwidth
of a sum over such an array. Each line gives the median of the repetitions and their range (10th to
90th percentile); operations bound by memory are given in GB/s of the bytes they must move.
*/
#include "llmc/ops/gradient_norm.h"
#include "llmc/optim/adafactor.h"
#include "llmc/optim/adamw.h"
#include "llmc/optim/adamw8bit.h"
#include "llmc/ops/attention.h"
#include "llmc/layers/mlp.h"
#include "llmc/layers/self_attention.h"
#include "llmc/bf16/tile_kernels.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/ops/delta_rule.h"
#include "llmc/ops/embedding.h"
#include "llmc/ops/gated_norm.h"
#include "llmc/ops/activation.h"
#include "llmc/ops/norm.h"
#include "llmc/optim/lion.h"
#include "llmc/ops/matmul.h"
#include "llmc/bf16/matmul_bf16.h"
#include "llmc/bf16/matvec.h"
#include "llmc/optim/muon.h"
#include "llmc/ops/q8.h"
#include "llmc/ops/short_conv.h"
#include "llmc/bf16/machine_peak.h"
#include "llmc/base/rand.h"
#include "llmc/optim/sgd.h"

enum { C = 768, NH = 12, VP = 50304, V = 50257, MOST = 101 };
enum { MATRICES = VP + 12 * 12 * C }; // all matrices of 124M as one, (MATRICES, C)

typedef struct {
    double peak, peak_bf16, bandwidth, read_bandwidth; // FLOP/s, bytes/s
    MatmulScratch matmul;
    MatmulBf16Scratch bf16;
} Bench;

static float* random_floats(size_t n) {
    float* x = check_alloc(n, sizeof(float), "bench");
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        x[i] = (float)rand_block(1, 0, i).word[0] * 0x1p-31f - 1.0f;
    }
    return x;
}

static int compare_doubles(const void* a, const void* b) {
    const double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// Runs `statement` for about half a second and prints a line; `work` is FLOP or bytes per run,
// `ceiling` their maximum per second.
#define BENCH(bench, name, work, ceiling, unit, statement)                                                   \
    do {                                                                                                     \
        double seconds_[MOST];                                                                               \
        int runs_ = 0;                                                                                       \
        const double begin_s_ = time_now_s();                                                                \
        statement;                                                                                           \
        while (runs_ < MOST && (runs_ < 5 || time_now_s() - begin_s_ < 0.5)) {                               \
            const double start_s_ = time_now_s();                                                            \
            statement;                                                                                       \
            seconds_[runs_++] = time_now_s() - start_s_;                                                     \
        }                                                                                                    \
        report(name, seconds_, runs_, work, ceiling, unit);                                                  \
    } while (0)

static void report(const char* name, double* s, int n, double work, double ceiling, const char* unit) {
    qsort(s, (size_t)n, sizeof(*s), compare_doubles);
    const double median = s[n / 2];
    printf("%-38s %9.3f ms  (%8.3f - %8.3f)  %7.1f %s  %5.1f %%\n", name, median * 1e3, s[n / 10] * 1e3,
           s[n - 1 - n / 10] * 1e3, work / median * 1e-9, unit, 100 * work / median / ceiling);
    fflush(stdout);
}

// Returns the best of a second: a processor needs time to reach full speed.
static double best_rate(double (*rate)(void)) {
    const double begin_s = time_now_s();
    double best = 0;
    while (time_now_s() - begin_s < 1) {
        best = fmax(best, rate());
    }
    return best;
}

static double bf16_rate(void) { return peak_bf16_flops_per_s(bf16_kernel()); }

static double measure_bandwidth(void) {
    const size_t n = (size_t)48 << 20; // 192 MiB per array
    float *a = random_floats(n), *b = random_floats(n), *c = random_floats(n);
    double best = 0;
    for (int repeat = 0; repeat < 10; repeat++) {
        double start_s = time_now_s();
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < n; i++) {
            a[i] = b[i];
        }
        const double copy = 8.0 * (double)n / (time_now_s() - start_s);
        start_s = time_now_s();
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < n; i++) {
            a[i] = b[i] + 0.5f * c[i];
        }
        const double triad = 12.0 * (double)n / (time_now_s() - start_s);
        best = copy > best ? copy : best;
        best = triad > best ? triad : best;
    }
    free(a);
    free(b);
    free(c);
    return best;
}

// Returns the bandwidth of reading. Every thread reads four places far apart: a single place gives
// three quarters of that.
static double measure_read_bandwidth(void) {
    enum { STREAMS = 4 };
    const size_t n = (size_t)48 << 20, run = n / STREAMS;
    float *a = random_floats(n), total = 0;
    double best = 0;
    for (int repeat = 0; repeat < 20; repeat++) {
        const double start_s = time_now_s();
#pragma omp parallel reduction(+ : total)
        {
            Vec sum[STREAMS];
            for (int s = 0; s < STREAMS; s++) {
                sum[s] = vec_all(0.0f);
            }
#pragma omp for schedule(static)
            for (size_t i = 0; i < run; i += LANES) {
                for (int s = 0; s < STREAMS; s++) {
                    sum[s] += vec_load(a + s * run + i);
                }
            }
            total += vec_hsum((sum[0] + sum[1]) + (sum[2] + sum[3]));
        }
        const double rate = 4.0 * (double)n / (time_now_s() - start_s);
        best = total == total && rate > best ? rate : best; // the sum keeps the work alive
    }
    free(a);
    return best;
}

static void bench_matmul(Bench* bench, int N, int in, int out) {
    float *inp = random_floats((size_t)N * in), *weight = random_floats((size_t)out * in),
          *dweight = random_floats((size_t)out * in);
    float *y = random_floats((size_t)N * out), *bias = random_floats((size_t)out);
    const double flops = matmul_flops(N, in, out);
    char name[64];
    snprintf(name, sizeof(name), "matmul forward  %4d x %4d -> %5d", N, in, out);
    BENCH(bench, name, flops, bench->peak, "GFLOP/s",
          matmul_forward_cpu(y, inp, weight, bias, (MatmulSizes){N, in, out}, &bench->matmul));
    snprintf(name, sizeof(name), "matmul dinp     %4d x %4d -> %5d", N, in, out);
    BENCH(bench, name, flops, bench->peak, "GFLOP/s",
          matmul_backward_input_cpu(inp, y, weight, (MatmulSizes){N, in, out}, &bench->matmul));
    snprintf(name, sizeof(name), "matmul dweight  %4d x %4d -> %5d", N, in, out);
    BENCH(
        bench, name, flops, bench->peak, "GFLOP/s",
        matmul_backward_weight_cpu(dweight, y, inp, (MatmulSizes){N, in, out}, GRADIENT_SET, &bench->matmul));
    free(inp);
    free(weight);
    free(dweight);
    free(y);
    free(bias);
}

// Measures a decoding step with all matrices of 124M, so that none stays in a cache: bound by
// reading them.
static void bench_matvec(Bench* bench, int N) {
    float *inp = random_floats((size_t)N * C), *out = random_floats((size_t)N * MATRICES),
          *weight = random_floats((size_t)MATRICES * C);
    char name[64];
    snprintf(name, sizeof(name), "matvec          %4d x %4d -> %d", N, C, MATRICES);
    BENCH(bench, name, matvec_bytes(C, MATRICES), bench->read_bandwidth, "GB/s   ",
          matvec_forward_cpu(out, inp, weight, NULL, (MatmulSizes){N, C, MATRICES}));
    free(weight);
    free(out);
    free(inp);
}

static uint32_t* packed_pairs(int lines, int k) {
    return (uint32_t*)check_alloc(matmul_bf16_pairs(lines, k), sizeof(uint32_t), "packed weight");
}

static void bench_matmul_bf16(Bench* bench, int N, int in, int out) {
    float *inp = random_floats((size_t)N * in), *weight = random_floats((size_t)out * in),
          *dweight = random_floats((size_t)out * in), *y = random_floats((size_t)N * out);
    uint32_t *forward = packed_pairs(out, in), *backward = packed_pairs(in, out);
    const double flops = matmul_flops(N, in, out), pack_bytes = 6.0 * in * out;
    char name[64];
    BENCH(
        bench, "bf16 pack, for the forward pass", pack_bytes, bench->bandwidth, "GB/s   ",
        matmul_bf16_pack(bench->bf16.kernel.pack, forward, matmul_bf16_forward_weight(weight, in), in, out));
    BENCH(bench, "bf16 pack, for dinp", pack_bytes, bench->bandwidth, "GB/s   ",
          matmul_bf16_pack(bench->bf16.kernel.pack, backward, matmul_bf16_backward_weight(weight, in), out,
                           in));
    snprintf(name, sizeof(name), "bf16 forward    %4d x %4d -> %5d", N, in, out);
    BENCH(bench, name, flops, bench->peak_bf16, "GFLOP/s",
          matmul_bf16_forward_cpu(y, inp, forward, NULL, (MatmulSizes){N, in, out}, &bench->bf16));
    snprintf(name, sizeof(name), "bf16 dinp       %4d x %4d -> %5d", N, in, out);
    BENCH(bench, name, flops, bench->peak_bf16, "GFLOP/s",
          matmul_bf16_backward_input_cpu(inp, y, backward, (MatmulSizes){N, in, out}, &bench->bf16));
    snprintf(name, sizeof(name), "bf16 dweight    %4d x %4d -> %5d", N, in, out);
    BENCH(bench, name, flops, bench->peak_bf16, "GFLOP/s",
          matmul_bf16_backward_weight_cpu(dweight, NULL, y, inp, (MatmulSizes){N, in, out}, GRADIENT_SET,
                                          &bench->bf16));
    free(inp);
    free(weight);
    free(dweight);
    free(y);
    free(forward);
    free(backward);
}

// Measures the classifier for one token per sequence: bound by reading its weights.
static void bench_matvec_bf16(Bench* bench, int N) {
    float *inp = random_floats((size_t)N * C), *y = random_floats((size_t)N * VP);
    uint32_t* packed = packed_pairs(VP, C);
    char name[64];
    snprintf(name, sizeof(name), "bf16 matvec     %4d x %4d -> %5d", N, C, VP);
    BENCH(bench, name, matvec_bf16_bytes(C, VP), bench->read_bandwidth, "GB/s   ",
          matvec_bf16_forward_cpu(y, inp, packed, NULL, (MatmulSizes){N, C, VP}));
    free(inp);
    free(y);
    free(packed);
}

static void bench_quantized(Bench* bench, int N) {
    QuantizedScratch scratch;
    float *inp = random_floats((size_t)N * C), *out = random_floats((size_t)N * MATRICES),
          *row = random_floats(C);
    const size_t blocks = C / QUANTIZED_BLOCK;
    QuantizedBlock* weight = check_alloc(MATRICES * blocks, sizeof(QuantizedBlock), "weights in 8 bits");
    for (size_t o = 0; o < MATRICES; o++) {
        quantized_encode(weight + o * blocks, row, C);
    }
    Memory memory = memory_on_host();
    quantized_open(&scratch, &memory, (size_t)N, C);
    char name[64];
    snprintf(name, sizeof(name), "8 bits          %4d x %4d -> %d", N, C, MATRICES);
    BENCH(bench, name, quantized_bytes(C, MATRICES), bench->read_bandwidth, "GB/s   ",
          q8_matmul_cpu(out, inp, weight, NULL, (MatmulSizes){N, C, MATRICES}, &scratch));
    memory_close(&memory);
    free(weight);
    free(row);
    free(out);
    free(inp);
}

static void bench_attention(Bench* bench, AttentionSizes sizes) {
    const int T = sizes.T, HS = sizes.HS;
    Attention fp32, bf16;
    Memory memory = memory_on_host();
    attention_either_open(&fp32, &memory, 0, T, HS);
    attention_either_open(&bf16, &memory, 1, T, HS);
    const size_t N = (size_t)sizes.B * T, Q = attention_queries_size(sizes), QKV = attention_qkv_size(sizes);
    float *qkv = random_floats(N * QKV), *dqkv = random_floats(N * QKV), *out = random_floats(N * Q);
    float *dout = random_floats(N * Q), *lse = random_floats(N * sizes.NH);
    const AttentionPass pass = {sizes, NULL, qkv, NULL, out, lse, NULL, NULL};
    const AttentionGradients d = {dout, dqkv, NULL};
    char name[64], shape[32];
    snprintf(shape, sizeof(shape), "B %d T %d, %d/%d", sizes.B, T, sizes.NH, sizes.KV);
    for (int i = 0; i < 2; i++) {
        Attention* a = i == 0 ? &fp32 : &bf16;
        const double peak = i == 0 ? bench->peak : bench->peak_bf16;
        const char* kind = i == 0 ? "" : "bf16 ";
        snprintf(name, sizeof(name), "%sattention forward   %s", kind, shape);
        BENCH(bench, name, attention_forward_flops(sizes), peak, "GFLOP/s",
              attention_either_forward_cpu(&pass, a));
        snprintf(name, sizeof(name), "%sattention backward  %s", kind, shape);
        BENCH(bench, name, attention_backward_flops(sizes), peak, "GFLOP/s",
              attention_either_backward_cpu(&d, &pass, a));
    }
    free(qkv);
    free(dqkv);
    free(out);
    free(dout);
    free(lse);
    memory_close(&memory);
}

// Measures both passes of an MLP without biases. If N is not a multiple of 32, its activation is a
// pass of its own over memory.
static void bench_mlp(Bench* bench, int N, int F, ActivationKind kind, const char* word) {
    const int H = activation_gates(kind) * F;
    const size_t nc = (size_t)N * C, nh = (size_t)N * H, hc = (size_t)H * C, cf = (size_t)C * F;
    float *inp = random_floats(nc), *out = random_floats(nc), *fch = random_floats(nh),
          *dfch = random_floats(nh), *act = random_floats((size_t)N * F), *dfcw = random_floats(hc),
          *dfcprojw = random_floats(cf);
    uint32_t* packed[] = {packed_pairs(H, C), packed_pairs(C, H), packed_pairs(C, F), packed_pairs(F, C)};
    const Bf16Pack pack = bench->bf16.kernel.pack;
    matmul_bf16_pack(pack, packed[0], matmul_bf16_forward_weight(dfcw, C), C, H);
    matmul_bf16_pack(pack, packed[1], matmul_bf16_backward_weight(dfcw, C), H, C);
    matmul_bf16_pack(pack, packed[2], matmul_bf16_forward_weight(dfcprojw, F), F, C);
    matmul_bf16_pack(pack, packed[3], matmul_bf16_backward_weight(dfcprojw, F), C, F);
    Linear linear = {.is_bf16 = 1, .bf16 = bench->bf16};
    const Mlp mlp = {.kind = kind,
                     .N = N,
                     .fc = {.forward = packed[0], .backward = packed[1], .OC = H, .C = C},
                     .proj = {.forward = packed[2], .backward = packed[3], .OC = C, .C = F},
                     .fch = fch,
                     .act = act,
                     .linear = &linear};
    const MlpLayerGradients d = {.mlp = {out, dfcw, NULL, dfcprojw, NULL, GRADIENT_SET, dfch, NULL, NULL}};
    const double flops = matmul_flops(N, C, H) + matmul_flops(N, F, C);
    char name[64];
    snprintf(name, sizeof(name), "bf16 MLP, %s, %d x %d -> %d", word, N, C, F);
    BENCH(bench, name, flops, bench->peak_bf16, "GFLOP/s", mlp_hidden_cpu(&mlp, inp);
          mlp_forward_cpu(out, &mlp));
    snprintf(name, sizeof(name), "and backward");
    BENCH(bench, name, 2 * flops, bench->peak_bf16, "GFLOP/s", mlp_backward_cpu(&mlp, &d, inp, inp));
    for (int i = 0; i < 4; i++) {
        free(packed[i]);
    }
    float* const arrays[] = {inp, out, fch, dfch, act, dfcw, dfcprojw};
    for (int i = 0; i < 7; i++) {
        free(arrays[i]);
    }
}

static void bench_mlps(Bench* bench, int N) {
    bench_mlp(bench, N, 4 * C, ACTIVATION_GELU, "gelu");
    bench_mlp(bench, N, 8 * C / 3, ACTIVATION_SWIGLU, "swiglu");
    bench_mlp(bench, N, 4 * C, ACTIVATION_RELU2, "relu2");
}

static void bench_rows(Bench* bench, int N) {
    const size_t n = (size_t)N * 4 * C;
    float *x = random_floats(n), *y = random_floats(n), *z = random_floats(n), *w = random_floats(4 * C),
          *b = random_floats(4 * C);
    float *mean = random_floats(N), *rstd = random_floats(N);
    const double row_bytes = 4.0 * N * C;
    const Norm norm = {NORM_LAYER, NORM_EPS, 1, w, b, mean, rstd, N, C},
               rms = {NORM_RMS, NORM_EPS, 1, w, NULL, NULL, rstd, N, C};
    const ResidualSum sum = {x, y, 1, NULL};
    BENCH(bench, "gelu forward", 8.0 * (double)n, bench->bandwidth, "GB/s   ",
          activation_forward_cpu(y, x, 1, n, ACTIVATION_GELU));
    BENCH(bench, "gelu backward", 12.0 * (double)n, bench->bandwidth, "GB/s   ",
          activation_backward_cpu(y, z, x, 1, n, ACTIVATION_GELU));
    BENCH(bench, "swiglu forward", 6.0 * (double)n, bench->bandwidth, "GB/s   ",
          activation_forward_cpu(y, x, N, 2 * C, ACTIVATION_SWIGLU));
    BENCH(bench, "swiglu backward", 10.0 * (double)n, bench->bandwidth, "GB/s   ",
          activation_backward_cpu(y, z, x, N, 2 * C, ACTIVATION_SWIGLU));
    BENCH(bench, "layernorm forward", 2 * row_bytes, bench->bandwidth, "GB/s   ",
          norm_forward_cpu(y, x, &norm));
    BENCH(bench, "residual + layernorm forward", 4 * row_bytes, bench->bandwidth, "GB/s   ",
          residual_norm_forward_cpu(y, z, &sum, &norm));
    BENCH(bench, "layernorm backward", 4 * row_bytes, bench->bandwidth, "GB/s   ",
          norm_backward_cpu(y, w, b, z, x, &norm, GRADIENT_ADD, GRADIENT_SET));
    BENCH(bench, "rms norm forward", 2 * row_bytes, bench->bandwidth, "GB/s   ",
          norm_forward_cpu(y, x, &rms));
    BENCH(bench, "rms norm backward", 4 * row_bytes, bench->bandwidth, "GB/s   ",
          norm_backward_cpu(y, w, NULL, z, x, &rms, GRADIENT_ADD, GRADIENT_SET));
    BENCH(bench, "bias gradient, 4C columns", 4 * row_bytes, bench->bandwidth, "GB/s   ",
          matmul_backward_bias_cpu(b, x, N, 4 * C, GRADIENT_SET));
    free(x);
    free(y);
    free(z);
    free(w);
    free(b);
    free(mean);
    free(rstd);
}

static void bench_conv(Bench* bench, const char* name, ShortConvKind kind, int N, int channels, int taps) {
    const size_t n = (size_t)N * channels, columns = (size_t)short_conv_columns(kind);
    float *inp = random_floats(n * columns), *dinp = random_floats(n * columns), *out = random_floats(n),
          *weight = random_floats((size_t)channels * taps), *dweight = random_floats((size_t)channels * taps);
    const ShortConv conv = {kind, 1, N, channels, taps, NULL, weight, NULL};
    char line[64];
    snprintf(line, sizeof(line), "%s forward", name);
    BENCH(bench, line, short_conv_forward_bytes(N, channels, 4, kind), bench->bandwidth, "GB/s   ",
          short_conv_forward_cpu(out, inp, &conv));
    snprintf(line, sizeof(line), "%s backward", name);
    BENCH(bench, line, short_conv_backward_bytes(N, channels, 4, kind), bench->bandwidth, "GB/s   ",
          short_conv_backward_cpu(dinp, dweight, NULL, out, inp, &conv, GRADIENT_SET));
    free(inp);
    free(dinp);
    free(out);
    free(weight);
    free(dweight);
}

// Measures the layer of Qwen 3.5 0.8B between its linear layers.
static void bench_delta(Bench* bench, int T) {
    const DeltaSizes s = {1, T, 16, 16, 128, 128};
    const size_t n = (size_t)T * delta_rule_columns(s), m = (size_t)T * delta_rule_out_columns(s);
    float *qkv = random_floats(n), *dqkv = random_floats(n), *out = random_floats(m),
          *dout = random_floats(m), *gate = random_floats(m), *ba = random_floats((size_t)T * 32),
          *dba = random_floats((size_t)T * 32), *heads = random_floats(64), *weight = random_floats(128),
          *rstd = random_floats((size_t)T * 16);
    const DeltaPass pass = {s, NULL, qkv, ba, heads, heads + 16, out, NULL};
    const DeltaGradients d = {dout, dqkv, dba, heads + 32, heads + 48, GRADIENT_SET};
    const GatedNorm norm = {1e-6f, gate, weight, rstd, T * 16, 128};
    DeltaScratch scratch;
    Memory memory = memory_on_host();
    char name[64];
    delta_rule_open(&scratch, &memory, s);
    snprintf(name, sizeof(name), "delta rule forward    B 1 T %d, 16/16", T);
    BENCH(bench, name, delta_rule_forward_flops(s), bench->peak, "GFLOP/s",
          delta_rule_forward_cpu(&pass, &scratch));
    snprintf(name, sizeof(name), "delta rule backward   B 1 T %d, 16/16", T);
    BENCH(bench, name, 3 * delta_rule_forward_flops(s), bench->peak, "GFLOP/s",
          delta_rule_backward_cpu(&d, &pass, &scratch));
    BENCH(bench, "gated norm forward", gated_norm_forward_bytes(16.0 * T, 128, 4), bench->bandwidth,
          "GB/s   ", gated_norm_forward_cpu(dout, out, &norm));
    BENCH(bench, "gated norm backward", gated_norm_backward_bytes(16.0 * T, 128, 4), bench->bandwidth,
          "GB/s   ", gated_norm_backward_cpu(out, dqkv, weight, dout, qkv, &norm, GRADIENT_SET));
    memory_close(&memory);
    float* const arrays[] = {qkv, dqkv, out, dout, gate, ba, dba, heads, weight, rstd};
    for (int i = 0; i < 10; i++) {
        free(arrays[i]);
    }
}

static void bench_classifier(Bench* bench, int N) {
    float *logits = random_floats((size_t)N * VP), *losses = random_floats(N);
    int* targets = check_alloc((size_t)N, sizeof(int), "targets");
    BENCH(bench, "classifier, loss and gradient in place", 8.0 * N * VP, bench->bandwidth, "GB/s   ",
          cross_entropy_backward_cpu(losses, logits, targets, 1.0f, (CrossEntropy){N, V, VP, 0, 0}));
    BENCH(bench, "the same with a softcap", 8.0 * N * VP, bench->bandwidth, "GB/s   ",
          cross_entropy_backward_cpu(losses, logits, targets, 1.0f, (CrossEntropy){N, V, VP, 15, 0}));
    free(logits);
    free(losses);
    free(targets);
}

static void bench_adamw8bit(Bench* bench, float* p, const float* g, size_t n) {
    const size_t block = 64;
    uint8_t *m = check_alloc(n, 1, "codes"), *v = check_alloc(n, 1, "codes");
    float* m_scale = check_alloc(n / block + 1, sizeof(float), "scales");
    float* v_scale = check_alloc(n / block + 1, sizeof(float), "scales");
    const AdamW8bitState state = {m, v, m_scale, v_scale};
    const AdamW opt = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1, DECAY_ALL};
    BENCH(bench, "adamw8bit, 124M parameters", adamw8bit_bytes((double)n, block), bench->bandwidth, "GB/s   ",
          adamw8bit_update_cpu(p, g, state, n, block, opt));
    free(m);
    free(v);
    free(m_scale);
    free(v_scale);
}

// Measures all parameters as one matrix.
static void bench_adafactor(Bench* bench, float* p, const float* g, size_t n) {
    const size_t rows = n / C;
    float *row = check_alloc(rows, sizeof(float), "rows"), *col = check_alloc(C, sizeof(float), "columns");
    void* scratch = check_alloc(adafactor_scratch_bytes(rows, C), 1, "scratch");
    const AdafactorMatrix x = {p, g, row, col, NULL, rows, C};
    const Adafactor opt = {
        .lr = 1e-4f, .beta2_cap = 1, .clip = 1, .weight_decay = 0.1f, .grad_scale = 1, .t = 1};
    BENCH(bench, "adafactor, 124M parameters", adafactor_bytes((double)n, opt), bench->bandwidth, "GB/s   ",
          adafactor_update_cpu(x, opt, scratch));
    free(row);
    free(col);
    free(scratch);
}

// Measures the matrix of q of one layer.
static void bench_muon(Bench* bench, float* p, const float* g, float* m) {
    const MuonScratch scratch = {check_alloc(muon_scratch_bytes(C, C), 1, "scratch"), &bench->matmul};
    const MuonMatrix x = {p, g, {m, NULL, NULL}, NULL, C, C, NULL};
    const Muon opt = {.lr = 1e-4f, .momentum = 0.95f, .weight_decay = 0.1f, .grad_scale = 1};
    BENCH(bench, "muon, 768 x 768", muon_flops(C, C), bench->peak, "GFLOP/s",
          muon_update_cpu(x, opt, &scratch));
    free(scratch.memory);
}

static void bench_other_rules(Bench* bench, float* p, const float* g, float* m, size_t n) {
    const Lion lion = {1e-4f, 0.9f, 0.99f, 0.1f, 1, DECAY_ALL};
    const Sgd sgd = {1e-4f, 0.9f, 0.1f, 1, DECAY_ALL};
    bench_adamw8bit(bench, p, g, n);
    bench_adafactor(bench, p, g, n);
    BENCH(bench, "lion, 124M parameters", lion_bytes((double)n), bench->bandwidth, "GB/s   ",
          lion_update_cpu(p, g, m, n, lion));
    BENCH(bench, "sgd, momentum, 124M parameters", sgd_bytes((double)n, sgd.momentum), bench->bandwidth,
          "GB/s   ", sgd_update_cpu(p, g, m, n, sgd));
    bench_muon(bench, p, g, m);
}

static void bench_update(Bench* bench) {
    const size_t n = 124439808;
    float *p = random_floats(n), *g = random_floats(n), *m = random_floats(n), *v = random_floats(n);
    double* partial = check_alloc(n / GRADIENT_BLOCK + 1, sizeof(double), "partial");
    WideSum sum = {0, 0};
    const AdamW opt = {.lr = 1e-4f,
                       .beta1 = 0.9f,
                       .beta2 = 0.95f,
                       .eps = 1e-8f,
                       .weight_decay = 0.1f,
                       .grad_scale = 1,
                       .t = 1};
    BENCH(bench, "adamw, 124M parameters", adamw_bytes((double)n), bench->bandwidth, "GB/s   ",
          adamw_update_cpu(p, g, m, v, n, opt));
    BENCH(bench, "gradient norm, 124M parameters", 4.0 * (double)n, bench->read_bandwidth, "GB/s   ",
          gradient_square_sum_cpu(&sum, g, n, partial));
    bench_other_rules(bench, p, g, m, n);
    free(p);
    free(g);
    free(m);
    free(v);
    free(partial);
}

int main(int argc, char** argv) {
    (void)argc;
    threads_wait_briefly(argv);
    Bench bench;
    const Bf16Kernel kernel = bf16_kernel();
    Memory memory = memory_on_host();
    matmul_open(&bench.matmul, &memory);
    matmul_bf16_open(&bench.bf16, &memory, kernel);
    bench.peak = best_rate(peak_flops_per_s);
    bench.peak_bf16 = best_rate(bf16_rate);
    bench.bandwidth = measure_bandwidth();
    bench.read_bandwidth = measure_read_bandwidth();
    printf("%d threads, %s: peak %.1f GFLOP/s fp32, %.1f bf16 by %s, %.1f GB/s memory, %.1f GB/s reading\n",
           threads_max(), VEC_ISA, bench.peak * 1e-9, bench.peak_bf16 * 1e-9, kernel.name,
           bench.bandwidth * 1e-9, bench.read_bandwidth * 1e-9);
    printf("%-38s %9s     (%8s - %8s)  %7s %s  %s\n", "operation", "median", "10 %", "90 %", "", "       ",
           "share of the ceiling");
    const int shapes[5][2] = {{C, 3 * C}, {C, C}, {C, 4 * C}, {4 * C, C}, {C, VP}};
    for (int N = 256; N <= 1024; N *= 4) {
        for (int i = 0; i < 5; i++) {
            bench_matmul(&bench, N, shapes[i][0], shapes[i][1]);
            bench_matmul_bf16(&bench, N, shapes[i][0], shapes[i][1]);
        }
    }
    bench_matvec(&bench, 1);
    bench_matvec(&bench, 8);
    bench_matvec_bf16(&bench, 1);
    bench_quantized(&bench, 1);
    bench_quantized(&bench, 8);
    bench_attention(&bench, attention_sizes(4, 64, NH, NH, C / NH));
    bench_attention(&bench, attention_sizes(1, 1024, NH, NH, C / NH));
    bench_attention(&bench, attention_sizes(1, 1024, 9, 3, 64)); // llama:135m
    AttentionSizes capped = attention_sizes(1, 1024, 8, 4, 256); // as in Gemma 2
    capped.cap = 50;
    bench_attention(&bench, capped);
    bench_delta(&bench, 1024);
    bench_conv(&bench, "conv of Qwen 3.5,", SHORT_CONV_SILU, 1024, 6144, 4);
    bench_conv(&bench, "conv of LFM 2,", SHORT_CONV_GATED, 1024, 2048, 3);
    bench_mlps(&bench, 1024);
    bench_mlps(&bench, 1023);
    bench_rows(&bench, 1024);
    bench_classifier(&bench, 256);
    bench_update(&bench);
    memory_close(&memory);
    return 0;
}
