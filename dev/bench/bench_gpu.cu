/*
bench_gpu.cu -- every kernel and matmul of a training step, as a share of this GPU's peak.

    make bench                                  GPT-2 124M and 1558M
    build/cuda/<arch>-BF16/bench_gpu --model d12 --batch 64 --seq-len 1024 --json results.jsonl
    ... --model d12 --batch 16 --only experts,heads         some sections
    ... --model d12 --batch 64 --list operations.jsonl      runs each operation of a step once, and
                                                            lists its work

The same program first measures the peaks: a copy of 1 GiB inside the GPU's memory, and a square
matmul of random numbers. Each line gives the median of the repetitions and their range (10th to
90th percentile), timed with events after a warm-up; bytes are those that an operation must move
(the *_bytes functions), FLOP those of its formula. --seconds 0 runs everything once, as a test. All
data is random: matmuls of zeros draw less power and are faster.
*/
#include "llmc/gpu/floatx.cuh" // before model.h

#include "llmc/model/presets.h"
#include "llmc/ops/gradient_norm.cuh"
#include "llmc/optim/adafactor.cuh"
#include "llmc/optim/adamw.cuh"
#include "llmc/optim/adamw8bit.cuh"
#include "llmc/ops/attention.cuh"
#include "llmc/ops/cross_entropy.cuh"
#include "llmc/ops/embedding.cuh"
#include "llmc/ops/activation.cuh"
#include "llmc/ops/expert_matmul.cuh"
#include "llmc/ops/experts.cuh"
#include "llmc/ops/heads.cuh"
#include "llmc/ops/rope.cuh"
#include "llmc/ops/router.cuh"
#include "llmc/model/model.h"
#include "llmc/ops/norm_backward.cuh"
#include "llmc/ops/matmul.cuh"
#include "llmc/ops/matmul_fp8.cuh"
#include "llmc/optim/muon.cuh"
#include "llmc/optim/optimizer.cuh"

enum { SAMPLES_MOST = 201, SAMPLES_LEAST = 11, ARRAYS_MOST = 32 };

typedef struct {
    Gpu gpu;
    ModelConfig cfg;
    int B, T;
    int chunk;        // tokens whose logits are in memory at a time
    int ceiling_size; // size of the square matmul
    double seconds;   // time for the repetitions of one line
    FILE* json;       // NULL: none
    FILE* list;       // list of operations, each run once and not timed; NULL: they are timed
    cudaEvent_t start, stop;
    double bandwidth, product; // the ceilings: bytes/s, FLOP/s; 0 until measured
    void* arrays[ARRAYS_MOST]; // arrays of the current section
    int arrays_count;
} Bench;

// ---- random arrays on the device ----

static void* array_of_bytes(Bench* bench, size_t bytes) {
    CHECK(bench->arrays_count < ARRAYS_MOST, "more than %d arrays in a section", ARRAYS_MOST);
    return bench->arrays[bench->arrays_count++] = gpu_alloc(bytes, 1, "bench");
}

// Copies a block of the host repeatedly until n elements of the device are filled.
static void fill(const Bench* bench, void* memory, size_t bytes, const void* block, size_t block_bytes) {
    for (size_t at = 0; at < bytes; at += block_bytes) {
        const size_t count = bytes - at < block_bytes ? bytes - at : block_bytes;
        CUDA_CHECK(
            cudaMemcpyAsync((char*)memory + at, block, count, cudaMemcpyHostToDevice, bench->gpu.stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(bench->gpu.stream));
}

enum { BLOCK = 1 << 20 };

// Returns (n) normal numbers times `scale`, a million different ones.
template <class T> static T* random_array(Bench* bench, size_t n, float scale) {
    T* block = (T*)check_alloc(BLOCK, sizeof(T), "random numbers");
    const uint64_t stream = (uint64_t)bench->arrays_count;
    for (size_t i = 0; i < BLOCK && i < n; i++) {
        block[i] = from_float<T>(scale * rand_normal(1, stream, i));
    }
    T* memory = (T*)array_of_bytes(bench, n * sizeof(T));
    fill(bench, memory, n * sizeof(T), block, BLOCK * sizeof(T));
    free(block);
    return memory;
}

// Returns (n) token ids below V.
static int* random_ids(Bench* bench, size_t n) {
    int* block = (int*)check_alloc(n, sizeof(int), "random ids");
    Rand rng = rand_open(1, 2);
    for (size_t i = 0; i < n; i++) {
        block[i] = (int)rand_below(&rng, (uint32_t)bench->cfg.V);
    }
    int* memory = (int*)array_of_bytes(bench, n * sizeof(int));
    fill(bench, memory, n * sizeof(int), block, n * sizeof(int));
    free(block);
    return memory;
}

static void section_close(Bench* bench) {
    while (bench->arrays_count > 0) {
        gpu_free(bench->arrays[--bench->arrays_count]);
    }
}

// ---- measuring ----

static int compare_floats(const void* a, const void* b) {
    const float x = *(const float*)a, y = *(const float*)b;
    return (x > y) - (x < y);
}

// Returns the milliseconds of `times` runs in a row.
template <class F> static float time_runs(Bench* bench, int times, F run) {
    float ms;
    CUDA_CHECK(cudaEventRecord(bench->start, bench->gpu.stream));
    for (int i = 0; i < times; i++) {
        run();
    }
    CUDA_CHECK(cudaEventRecord(bench->stop, bench->gpu.stream));
    CUDA_CHECK(cudaEventSynchronize(bench->stop));
    CUDA_CHECK(cudaEventElapsedTime(&ms, bench->start, bench->stop));
    return ms;
}

// Work of an operation. Its rate is in FLOP/s if `flop` is set.
typedef struct {
    double flop, bytes;
} Work;

static void report(const Bench* bench, const char* name, const char* shape, const float* ms, int n,
                   Work work) {
    const double median_s = ms[n / 2] * 1e-3, rate = (work.flop > 0 ? work.flop : work.bytes) / median_s;
    const double ceiling = work.flop > 0 ? bench->product : bench->bandwidth;
    const double shown = work.flop > 0 ? rate * 1e-12 : rate * 1e-9, share = ceiling > 0 ? rate / ceiling : 1;
    printf("%-34s %-26s %9.4f ms (%8.4f - %8.4f) %8.1f %-7s %5.1f %%\n", name, shape, ms[n / 2], ms[n / 10],
           ms[n - 1 - n / 10], shown, work.flop > 0 ? "TFLOP/s" : "GB/s", 100 * share);
    fflush(stdout);
    if (bench->json) {
        fprintf(bench->json,
                "{\"kernel\":\"%s\",\"shape\":\"%s\",\"ms\":%.5f,\"p10\":%.5f,\"p90\":%.5f,\"%s\":%.2f,"
                "\"share\":%.4f}\n",
                name, shape, ms[n / 2], ms[n / 10], ms[n - 1 - n / 10],
                work.flop > 0 ? "tflop_per_s" : "gb_per_s", shown, share);
        fflush(bench->json);
    }
}

// Runs it once, and lists it.
template <class F>
static void list(const Bench* bench, const char* name, const char* shape, Work work, F run) {
    run();
    CUDA_CHECK(cudaStreamSynchronize(bench->gpu.stream));
    fprintf(bench->list, "{\"operation\":\"%s\",\"shape\":\"%s\",\"flop\":%.0f,\"bytes\":%.0f}\n", name,
            shape, work.flop, work.bytes);
    fflush(bench->list);
}

// Prints one line. Short operations are timed several at a time, so that the events do not count.
// Returns work per second.
template <class F>
static double measure(Bench* bench, const char* name, const char* shape, Work work, F run) {
    if (bench->list) {
        list(bench, name, shape, work, run);
        return 0;
    }
    float ms[SAMPLES_MOST];
    double total_s = 0;
    int n = 0;
    if (bench->seconds > 0) {
        time_runs(bench, 3, run);
    }
    const float once = time_runs(bench, 1, run);
    const int times = once < 0.2f ? (int)(0.2f / (once > 1e-3f ? once : 1e-3f)) : 1;
    const int least = bench->seconds > 0 ? SAMPLES_LEAST : 1;
    while (n < SAMPLES_MOST && (n < least || total_s < bench->seconds)) {
        const float all = time_runs(bench, times, run);
        total_s += all * 1e-3;
        ms[n++] = all / (float)times;
    }
    qsort(ms, (size_t)n, sizeof(*ms), compare_floats);
    report(bench, name, shape, ms, n, work);
    return (work.flop > 0 ? work.flop : work.bytes) / (ms[n / 2] * 1e-3);
}

// ---- peaks, and the operations of a GPT-2 ----

static void bench_ceilings(Bench* bench, MatmulGpu* matmul) {
    char shape[64];
    size_t free_bytes = 0, total_bytes = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    const size_t max = (size_t)1 << 30, bytes = free_bytes / 8 < max ? free_bytes / 8 : max;
    float* from = random_array<float>(bench, bytes / sizeof(float), 1);
    void* to = array_of_bytes(bench, bytes);
    snprintf(shape, sizeof(shape), "%.0f MiB", (double)bytes / (1 << 20));
    bench->bandwidth = measure(bench, "ceiling: copy", shape, Work{0, 2.0 * (double)bytes}, [=] {
        CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, bench->gpu.stream));
    });
    section_close(bench);

    const int n = bench->ceiling_size;
    const size_t elements = (size_t)n * n;
    floatX *inp = random_array<floatX>(bench, elements, 1),
           *weight = random_array<floatX>(bench, elements, 1);
    floatX* out = random_array<floatX>(bench, elements, 1);
    snprintf(shape, sizeof(shape), "%d^3", n);
    bench->product = measure(bench, "ceiling: matmul", shape, Work{matmul_flops(n, n, n), 0}, [=] {
        matmul_forward(out, inp, weight, (floatX*)NULL, {n, n, n}, matmul);
    });
    section_close(bench);
}

typedef enum { NO_BIAS, PLAIN, RESIDUAL, GELU } LayerKind; // what follows the matmul

// Returns memory for codes of rows and their scales.
static E4m3Rows array_of_rows(Bench* bench, int rows, int cols) {
    return {(uint8_t*)array_of_bytes(bench, (size_t)rows * (size_t)cols),
            (float*)array_of_bytes(bench, (size_t)rows * sizeof(float))};
}

// Measures the matmuls of a layer in fp8, of codes that exist, and the kernels that make them.
static void bench_layer_fp8(Bench* bench, MatmulGpu* matmul, const char* layer, int N, int C, int OC,
                            floatX* out, floatX* inp, const floatX* weight) {
    const Work work = {matmul_flops(N, C, OC), 0};
    const size_t elements = (size_t)OC * C;
    const Gpu* gpu = &bench->gpu;
    char shape[64], name[64];
    if (gpu->major != 9 || C % E4M3_UNIT || OC % E4M3_UNIT) {
        return;
    }
    const E4m3Rows in = array_of_rows(bench, N, C), d = array_of_rows(bench, N, OC),
                   rows = array_of_rows(bench, OC, C), turned = array_of_rows(bench, C, OC);
    uint32_t* largest = (uint32_t*)array_of_bytes(bench, (size_t)C * sizeof(uint32_t));
    const floatX *none = NULL, *from = inp;
    e4m3_rows(d, (const floatX*)out, N, OC, gpu);
    snprintf(shape, sizeof(shape), "%d x %d -> %d", N, C, OC);
    snprintf(name, sizeof(name), "%s fp8: rows of inp", layer);
    measure(bench, name, shape, Work{0, (double)N * C * (1 + sizeof(floatX))},
            [=] { e4m3_rows(in, from, N, C, gpu); });
    snprintf(name, sizeof(name), "%s fp8: rows of weight", layer);
    measure(bench, name, shape, Work{0, (double)elements * (1 + sizeof(floatX))},
            [=] { e4m3_rows(rows, weight, OC, C, gpu); });
    snprintf(name, sizeof(name), "%s fp8: columns of weight", layer);
    measure(bench, name, shape, Work{0, (double)elements * (1 + 2 * sizeof(floatX))},
            [=] { matmul_fp8_turned(turned, largest, weight, OC, C, gpu); });
    snprintf(name, sizeof(name), "%s forward in fp8", layer);
    measure(bench, name, shape, work, [=] { matmul_fp8(out, none, in, rows, none, {N, C, OC}, matmul); });
    snprintf(name, sizeof(name), "%s dinp in fp8", layer);
    measure(bench, name, shape, work, [=] { matmul_fp8(inp, none, d, turned, none, {N, OC, C}, matmul); });
}

// Measures a linear layer as the trainer uses it, all passes.
static void bench_layer(Bench* bench, MatmulGpu* matmul, const char* layer, int N, int C, int OC,
                        LayerKind kind) {
    const Work work = {matmul_flops(N, C, OC), 0};
    char shape[64], name[64];
    floatX *inp = random_array<floatX>(bench, (size_t)N * C, 1),
           *out = random_array<floatX>(bench, (size_t)N * OC, 1);
    floatX *weight = random_array<floatX>(bench, (size_t)OC * C, 0.02f),
           *bias = kind == NO_BIAS ? NULL : random_array<floatX>(bench, OC, 1);
    floatX *other = random_array<floatX>(bench, (size_t)N * OC, 1),
           *pre = random_array<floatX>(bench, (size_t)N * C, 1);
    const Gradient dweight = {random_array<floatX>(bench, (size_t)OC * C, 1), DTYPE_OF(floatX)};
    const Gradient dbias = {random_array<floatX>(bench, OC, 1), DTYPE_OF(floatX)},
                   before = {random_array<floatX>(bench, C, 1), DTYPE_OF(floatX)},
                   none = {NULL, DTYPE_OF(floatX)};
    snprintf(shape, sizeof(shape), "%d x %d -> %d", N, C, OC);
    snprintf(name, sizeof(name), "%s forward%s", layer,
             kind == GELU       ? " + gelu"
             : kind == RESIDUAL ? " + residual"
                                : "");
    measure(bench, name, shape, work, [=] {
        if (kind == GELU) {
            matmul_forward_gelu(out, other, inp, weight, bias, {N, C, OC}, matmul);
        } else if (kind == RESIDUAL) {
            matmul_forward_residual(out, other, inp, weight, bias, {N, C, OC}, matmul);
        } else {
            matmul_forward(out, inp, weight, bias, {N, C, OC}, matmul);
        }
    });
    snprintf(name, sizeof(name), "%s dinp", layer);
    measure(bench, name, shape, work, [=] { matmul_backward_input(inp, out, weight, {N, C, OC}, matmul); });
    if (kind != NO_BIAS && !bench->list) { // a step has them only with --matmul fp8
        bench_layer_fp8(bench, matmul, layer, N, C, OC, out, inp, weight);
    }
    snprintf(name, sizeof(name), "%s dinp + dgelu", layer);
    if (C > OC) { // the layer after GELU
        measure(bench, name, shape, work, [=] {
            matmul_backward_input_gelu<floatX>({inp, none, out, weight, pre, {N, C, OC}, GRADIENT_SET},
                                               matmul);
        });
        for (int fused = bench->list ? 1 : 0; fused < 2; fused++) { // a step has it fused
            matmul->settings.bias_fusion = fused;
            snprintf(name, sizeof(name), "%s dinp + dgelu + dbias%s", layer, fused ? ", fused" : "");
            measure(bench, name, shape, work, [=] {
                matmul_backward_input_gelu<floatX>({inp, before, out, weight, pre, {N, C, OC}, GRADIENT_SET},
                                                   matmul);
            });
        }
    }
    snprintf(name, sizeof(name), "%s dweight", layer);
    measure(bench, name, shape, work, [=] {
        matmul_backward_weight(dweight, out, inp, {N, C, OC}, GRADIENT_SET, matmul);
    });
    snprintf(name, sizeof(name), "%s dweight, added", layer);
    measure(bench, name, shape, work, [=] {
        matmul_backward_weight(dweight, out, inp, {N, C, OC}, GRADIENT_ADD, matmul);
    });
    if (bias &&
        // a step has it only where no other kernel sums: in fp32, after GELU
        (!bench->list || kind == GELU)) {
        snprintf(name, sizeof(name), "%s dbias", layer);
        measure(bench, name, shape, Work{0, column_sums_bytes(N, OC, sizeof(floatX))},
                [=] { matmul_backward_bias(dbias, out, N, OC, GRADIENT_SET, matmul); });
    }
    section_close(bench);
}

static void bench_attention(Bench* bench, MatmulGpu*) {
    const int B = bench->B, T = bench->T, C = bench->cfg.C, NH = bench->cfg.NH;
    const Gpu* gpu = &bench->gpu;
    const size_t n = (size_t)B * T * C;
    AttentionGpu scratch_memory, *scratch = &scratch_memory;
    char shape[64];
    floatX *qkv = random_array<floatX>(bench, 3 * n, 1), *dqkv = random_array<floatX>(bench, 3 * n, 1);
    floatX *out = random_array<floatX>(bench, n, 1), *dout = random_array<floatX>(bench, n, 1);
    float* lse = random_array<float>(bench, (size_t)B * T * NH, 1);
    const Gradient dbias = {random_array<floatX>(bench, 3 * C, 1), DTYPE_OF(floatX)};
    Memory memory = memory_on_gpu();
    const AttentionSizes sizes = attention_sizes(B, T, NH, NH, C / NH);
    const AttentionPassGpu<floatX> pass = {sizes, NULL, qkv, NULL, out, lse};
    const AttentionGradientsGpu<floatX> d = {dout, dqkv, NULL, dbias, GRADIENT_SET};
    attention_gpu_open<floatX>(scratch, &memory, sizes, sizes.T);
    snprintf(shape, sizeof(shape), "B %d T %d, %d heads of %d", B, T, NH, C / NH);
    measure(bench, "attention forward", shape,
            Work{attention_forward_flops(sizes), attention_forward_bytes(sizes, sizeof(floatX))},
            [=] { attention_forward(&pass, scratch, gpu); });
    measure(bench, "attention backward", shape,
            Work{attention_backward_flops(sizes), attention_backward_bytes(sizes, sizeof(floatX))},
            [=] { attention_backward(&d, &pass, scratch, gpu); });
    attention_gpu_close(scratch);
    memory_close(&memory);
    section_close(bench);
}

// Measures kernels of the rows (N, C) and (N, 4 C) that make their codes, too (--matmul fp8): x and
// z are read, y is set.
static void bench_rows_with_codes(Bench* bench, NormGpu<floatX> norm, NormGradients d, floatX* y,
                                  const floatX* x, const floatX* z, NormScratch* scratch) {
    const int N = norm.N, C = norm.C;
    const double n = (double)N * C, size = sizeof(floatX);
    const Gpu* gpu = &bench->gpu;
    char shape[64];
    if (C % E4M3_UNIT || bench->list) {
        return;
    }
    norm.codes = d.codes = array_of_rows(bench, N, C);
    const E4m3Rows wide = array_of_rows(bench, N, 4 * C);
    snprintf(shape, sizeof(shape), "%d x %d", N, C);
    measure(bench, "layernorm forward, codes", shape, Work{0, norm_forward_bytes(N, C, size) + n},
            [=] { norm_forward(y, x, &norm, gpu); });
    measure(bench, "layernorm backward, codes", shape,
            Work{0, norm_backward_bytes(N, C, size, norm_groups(N)) + n},
            [=] { norm_backward(y, GRADIENT_ADD, &d, z, x, &norm, scratch, gpu); });
    snprintf(shape, sizeof(shape), "%d x %d", N, 4 * C);
    measure(bench, "gelu forward, codes", shape,
            Work{0, activation_forward_bytes(4 * n, size, ACTIVATION_GELU) + 4 * n},
            [=] { activation_forward_codes(wide, y, x, N, 4 * C, ACTIVATION_GELU, gpu); });
    measure(bench, "gelu backward, codes", shape,
            Work{0, activation_backward_bytes(4 * n, size, ACTIVATION_GELU) + 4 * n},
            [=] { activation_backward_codes(wide, y, z, x, N, 4 * C, ACTIVATION_GELU, gpu); });
    snprintf(shape, sizeof(shape), "%d x %d", N, 2 * C);
    measure(bench, "swiglu forward, codes", shape,
            Work{0, activation_forward_bytes(2 * n, size, ACTIVATION_SWIGLU) + 2 * n},
            [=] { activation_forward_codes(wide, y, x, N, 2 * C, ACTIVATION_SWIGLU, gpu); });
    measure(bench, "swiglu backward, codes", shape,
            Work{0, activation_backward_bytes(2 * n, size, ACTIVATION_SWIGLU) + 4 * n},
            [=] { activation_backward_codes(wide, y, z, x, N, 2 * C, ACTIVATION_SWIGLU, gpu); });
}

static void bench_rows(Bench* bench, MatmulGpu*) {
    const int C = bench->cfg.C, N = bench->B * bench->T;
    const size_t n = (size_t)N * C, size = sizeof(floatX);
    const Gpu* gpu = &bench->gpu;
    NormScratch scratch_memory, *scratch = &scratch_memory;
    char shape[64];
    floatX *x = random_array<floatX>(bench, 4 * n, 1), *y = random_array<floatX>(bench, 4 * n, 1);
    floatX *z = random_array<floatX>(bench, 4 * n, 1), *sum = random_array<floatX>(bench, n, 1);
    floatX *weight = random_array<floatX>(bench, C, 1), *bias = random_array<floatX>(bench, C, 1);
    float *mean = random_array<float>(bench, N, 1), *rstd = random_array<float>(bench, N, 1);
    const Gradient dweight = {weight, DTYPE_OF(floatX)}, dbias = {bias, DTYPE_OF(floatX)},
                   dinp_sum = {random_array<floatX>(bench, C, 1), DTYPE_OF(floatX)};
    const NormGpu<floatX> norm = {NORM_LAYER, NORM_EPS, 1, weight, bias, mean, rstd, N, C, {}},
                          rms = {NORM_RMS, NORM_EPS, 1, weight, NULL, NULL, rstd, N, C, {}};
    const Gradient none = {NULL, dbias.dtype};
    const NormGradients sums = {dweight, dbias, GRADIENT_SET, dinp_sum, GRADIENT_SET, {}},
                        rms_sums = {dweight, none, GRADIENT_SET, none, GRADIENT_SET, {}};
    Memory memory = memory_on_gpu();
    norm_open(scratch, &memory, N, C);
    snprintf(shape, sizeof(shape), "%d x %d", N, C);
    measure(bench, "layernorm forward", shape, Work{0, norm_forward_bytes(N, C, size)},
            [=] { norm_forward(y, x, &norm, gpu); });
    measure(bench, "layernorm backward", shape, Work{0, norm_backward_bytes(N, C, size, norm_groups(N))},
            [=] { norm_backward(sum, GRADIENT_ADD, &sums, z, x, &norm, scratch, gpu); });
    measure(bench, "rms norm forward", shape, Work{0, norm_forward_bytes(N, C, size)},
            [=] { norm_forward(y, x, &rms, gpu); });
    measure(bench, "rms norm backward", shape, Work{0, norm_backward_bytes(N, C, size, norm_groups(N))},
            [=] { norm_backward(sum, GRADIENT_ADD, &rms_sums, z, x, &rms, scratch, gpu); });
    measure(bench, "norm in place", shape, Work{0, norm_unit_bytes(N, C, size)},
            [=] { norm_unit_forward(y, rstd, N, C, NORM_EPS, gpu); });
    measure(bench, "norm in place, backward", shape, Work{0, 1.5 * norm_unit_bytes(N, C, size)},
            [=] { norm_unit_backward(y, x, rstd, N, C, gpu); });
    snprintf(shape, sizeof(shape), "%d x %d", N, 2 * C);
    measure(bench, "swiglu forward", shape,
            Work{0, activation_forward_bytes(2.0 * (double)n, size, ACTIVATION_SWIGLU)},
            [=] { activation_forward(y, x, N, 2 * C, ACTIVATION_SWIGLU, gpu); });
    measure(bench, "swiglu backward", shape,
            Work{0, activation_backward_bytes(2.0 * (double)n, size, ACTIVATION_SWIGLU)},
            [=] { activation_backward(y, z, x, N, 2 * C, ACTIVATION_SWIGLU, gpu); });
    snprintf(shape, sizeof(shape), "%d x %d", N, 4 * C);
    measure(bench, "gelu forward", shape,
            Work{0, activation_forward_bytes(4.0 * (double)n, size, ACTIVATION_GELU)},
            [=] { activation_forward(y, x, 1, 4 * n, ACTIVATION_GELU, gpu); });
    measure(bench, "gelu backward", shape,
            Work{0, activation_backward_bytes(4.0 * (double)n, size, ACTIVATION_GELU)},
            [=] { activation_backward(y, z, x, 1, 4 * n, ACTIVATION_GELU, gpu); });
    bench_rows_with_codes(bench, norm, sums, y, x, z, scratch);
    memory_close(&memory);
    section_close(bench);
}

static void bench_tokens(Bench* bench, MatmulGpu*) {
    const ModelConfig cfg = bench->cfg;
    const int B = bench->B, T = bench->T, C = cfg.C, N = B * T, chunk = bench->chunk;
    const size_t size = sizeof(floatX);
    const Gpu* gpu = &bench->gpu;
    EmbeddingGpu scratch_memory, *scratch = &scratch_memory;
    char shape[64];
    const int *tokens = random_ids(bench, N), *targets = random_ids(bench, N);
    floatX *wte = random_array<floatX>(bench, (size_t)cfg.Vp * C, 1),
           *wpe = random_array<floatX>(bench, (size_t)cfg.max_T * C, 1);
    floatX *out = random_array<floatX>(bench, (size_t)N * C, 1),
           *logits = random_array<floatX>(bench, (size_t)chunk * cfg.Vp, 1);
    float* losses = random_array<float>(bench, N, 1);
    const Gradient dwte = {random_array<floatX>(bench, (size_t)cfg.Vp * C, 1), DTYPE_OF(floatX)};
    const Gradient dwpe = {random_array<floatX>(bench, (size_t)cfg.max_T * C, 1), DTYPE_OF(floatX)};
    Memory memory = memory_on_gpu();
    embedding_open(scratch, &memory, N, cfg.Vp, C);
    snprintf(shape, sizeof(shape), "%d x %d", N, C);
    measure(bench, "encoder forward", shape, Work{0, embedding_forward_bytes(N, C, size)}, [=] {
        embedding_forward(out, tokens, wte, wpe, embedding_batch(B, T, C, EmbeddingPositions{}), gpu);
    });
    measure(bench, "encoder backward", shape, Work{0, embedding_backward_bytes(N, C, cfg.V, size, size)},
            [=] {
                embedding_sort(scratch, tokens, N, gpu);
                embedding_backward(dwte, dwpe, out, tokens, {B, T, C, cfg.Vp, cfg.max_T}, GRADIENT_ADD,
                                   GRADIENT_SET, scratch, gpu);
            });
    snprintf(shape, sizeof(shape), "%d x %d", chunk, cfg.Vp);
    measure(bench, "classifier loss", shape, Work{0, cross_entropy_loss_bytes(chunk, cfg.V, size)}, [=] {
        cross_entropy_loss(losses, logits, targets, {chunk, cfg.V, cfg.Vp, 0, 0}, gpu);
    });
    measure(bench, "classifier backward", shape, Work{0, cross_entropy_backward_bytes(chunk, cfg.Vp, size)},
            [=] {
                cross_entropy_backward(losses, logits, targets, 1e-3f, {chunk, cfg.V, cfg.Vp, 0, 0}, gpu);
            });
    measure(bench, "classifier backward, softcap", shape,
            Work{0, cross_entropy_backward_bytes(chunk, cfg.Vp, size)}, [=] {
                cross_entropy_backward(losses, logits, targets, 1e-3f, {chunk, cfg.V, cfg.Vp, 15, 0}, gpu);
            });
    snprintf(shape, sizeof(shape), "%d", N);
    double* sums = (double*)array_of_bytes(bench, sizeof(double));
    int64_t* count = (int64_t*)array_of_bytes(bench, sizeof(int64_t));
    measure(bench, "sum of losses", shape, Work{0, sum_losses_bytes(N)}, [=] {
        CUDA_CHECK(cudaMemsetAsync(count, 0, sizeof(*count), gpu->stream));
        sum_losses(sums, count, losses, N, gpu);
    });
    memory_close(&memory);
    section_close(bench);
}

static void bench_norm(Bench* bench, Gradient grads, size_t n, const char* shape) {
    GradientNorm norm_memory, *norm = &norm_memory;
    const Gpu* gpu = &bench->gpu;
    WideSum* result = (WideSum*)array_of_bytes(bench, sizeof(WideSum));
    Memory memory = memory_on_gpu();
    gradient_norm_open(norm, &memory, n);
    measure(bench, "gradient norm", shape, Work{0, gradient_square_sum_bytes((double)n, grads.dtype)},
            [=] { gradient_square_sum<floatX>(result, grads, norm, gpu); });
    memory_close(&memory);
}

// Opens the map of a whole model with the state of an optimizer.
static Map whole_map(const Bench* bench, Memory* memory, Optimizer optimizer) {
    MapOf of = map_of_model(bench->cfg);
    Map map;
    optimizer_set_map(&of, optimizer);
    map_open(&map, memory, MEMORY_HOST, &of, 0);
    return map;
}

// Measures an update of all parameters.
static void bench_update(Bench* bench, const char* name, OptimizerName rule, MasterWeights master,
                         MatmulGpu* matmul) {
    const Gpu* gpu = &bench->gpu;
    Memory memory = memory_on_gpu();
    const Optimizer optimizer = optimizer_of(rule, rule == OPTIMIZER_SGD, master);
    const Map map = whole_map(bench, &memory, optimizer);
    const size_t n = map.totals.updated;
    OptimizerState state;
    OptimizerPlan plan_memory, *plan = &plan_memory;
    optimizer_state_open(&state, optimizer, &map);
    optimizer_open<floatX>(plan, &memory, &state);
    const Update by = {1e-4f,     0.9f, 0.95f,           1e-8f, 0.1f, 1.0f,         100,
                       DECAY_ALL, 0.9f, ADAFACTOR_FIXED, 0.02f, 0,    MUON_SPECTRAL};
    const Gradient grads = {random_array<floatX>(bench, n, 1e-3f), DTYPE_OF(floatX)};
    floatX* params = random_array<floatX>(bench, n, 0.02f);
    OptimizerUpdate<floatX> u = {params, grads, {NULL}, plan, by, 1, matmul, NULL};
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const size_t count = state.slots[slot].bytes / sizeof(float);
        u.slots[slot] =
            count ? random_array<float>(bench, count, state.slots[slot].least == 0 ? 0 : 1e-3f) : NULL;
    }
    char shape[64];
    snprintf(shape, sizeof(shape), "%.1fM parameters", (double)n / 1e6);
    measure(bench, name, shape, Work{0, optimizer_bytes(&state, sizeof(floatX), dtype_bytes(grads.dtype))},
            [=] { optimizer_update(u, gpu); });
    memory_close(&memory);
    section_close(bench);
}

static void bench_optimizer(Bench* bench, MatmulGpu* matmul) {
    const MapOf of = map_of_model(bench->cfg);
    const size_t n = map_totals(&of, 0).updated;
    const MasterWeights usual = DTYPE_OF(floatX) == DTYPE_FP32 ? MASTER_NONE : MASTER_FP32;
    char shape[64];
    snprintf(shape, sizeof(shape), "%.1fM parameters", (double)n / 1e6);
    bench_norm(bench, Gradient{random_array<floatX>(bench, n, 1e-3f), DTYPE_OF(floatX)}, n, shape);
    section_close(bench);
    bench_update(bench, "AdamW", OPTIMIZER_ADAMW, usual, matmul);
    if (!bench->list) {
        if (usual != MASTER_NONE) {
            bench_update(bench, "AdamW, no master weights", OPTIMIZER_ADAMW, MASTER_NONE, matmul);
        }
        bench_update(bench, "Lion", OPTIMIZER_LION, usual, matmul);
        bench_update(bench, "SGD", OPTIMIZER_SGD, usual, matmul);
    }
}

// Without master weights.
static void bench_adamw8bit(Bench* bench, MatmulGpu* matmul) {
    bench_update(bench, "AdamW 8-bit", OPTIMIZER_ADAMW8BIT, MASTER_NONE, matmul);
}
static void bench_adafactor(Bench* bench, MatmulGpu* matmul) {
    bench_update(bench, "Adafactor", OPTIMIZER_ADAFACTOR, MASTER_NONE, matmul);
}

// Measures a tensor of all blocks, whose layers lie one after the other.
static void bench_muon_tensor(Bench* bench, MatmulGpu* matmul, const TensorRow* row) {
    const Gpu* gpu = &bench->gpu;
    const int parts = row->rows == 3 * row->cols ? 3 : 1;
    const size_t layer = tensor_layer_elements(row), n = layer * row->layers;
    const MuonPlace place = {0, layer};
    MuonTensor tensor = owners_tensor(row->rows / parts, row->cols);
    tensor.params = tensor.master = tensor.grads = tensor.b = tensor.words = place;
    tensor.layers = row->layers, tensor.parts = parts, tensor.decay = row->decay, tensor.by_layer = 0;
    MuonGpu muon_memory, *muon = &muon_memory;
    char name[64], shape[64];
    Memory memory = memory_on_gpu();
    muon_open<floatX>(muon, &memory, &tensor, 1);
    const MuonUpdate<floatX> u = {{random_array<floatX>(bench, n, 0.02f), NULL, MASTER_NONE},
                                  {random_array<floatX>(bench, n, 1e-3f), DTYPE_OF(floatX)},
                                  {random_array<float>(bench, n, 1e-3f), NULL, NULL},
                                  NULL,
                                  muon,
                                  {0.02f, 0.95f, 0.05f, 1.0f, 0.0f, MUON_SPECTRAL, DECAY_ALL},
                                  100,
                                  1,
                                  matmul,
                                  NULL};
    snprintf(name, sizeof(name), "Muon %s", row->name);
    snprintf(shape, sizeof(shape), "%d of (%d, %d)", row->layers * parts, tensor.rows, tensor.cols);
    measure(bench, name, shape, Work{row->layers * parts * muon_flops(tensor.rows, tensor.cols), 0},
            [=] { muon_update(&tensor, u, 0, tensor.layers, gpu); });
    memory_close(&memory);
    section_close(bench);
}

static void bench_muon(Bench* bench, MatmulGpu* matmul) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows_of(rows, bench->cfg, 1);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (rows[i].kind == KIND_MATRIX) {
            bench_muon_tensor(bench, matmul, &rows[i]);
        }
    }
}

// ---- heads and experts, which GPT-2 does not have ----

// Measures norms and positions of queries and keys.
static void bench_heads_kind(Bench* bench, const char* name, HeadsKind kind, AttentionSizes sizes) {
    const Gpu* gpu = &bench->gpu;
    const int count = sizes.NH + sizes.KV;
    const size_t N = (size_t)sizes.B * sizes.T, n = N * attention_qkv_size(sizes);
    char shape[64], line[64];
    Memory memory = memory_on_gpu();
    HeadsGpu<floatX> heads = {kind, NORM_EPS, 0, sizes, {NULL, sizes.HS}, NULL, NULL, NULL, NULL, NULL};
    rope_gpu_open(&heads.rope, &memory,
                  {sizes.T, sizes.HS, sizes.HS, 1e4f, {ROPE_PLAIN, 0, 0, 0, 0, 0, 0}, NULL});
    floatX *qkv = random_array<floatX>(bench, n, 1), *dqkv = random_array<floatX>(bench, n, 1);
    heads.qnormw = random_array<floatX>(bench, (size_t)sizes.HS, 1);
    heads.knormw = random_array<floatX>(bench, (size_t)sizes.HS, 1);
    heads.raw = random_array<floatX>(bench, N * count * sizes.HS, 1);
    heads.rstd = random_array<float>(bench, N * count, 1);
    const HeadsGradientsGpu d = {{random_array<floatX>(bench, (size_t)sizes.HS, 1), DTYPE_OF(floatX)},
                                 {random_array<floatX>(bench, (size_t)sizes.HS, 1), DTYPE_OF(floatX)},
                                 GRADIENT_SET,
                                 random_array<float>(bench, heads_sums(sizes), 1)};
    const Work work = {0, heads_bytes(sizes, kind, sizeof(floatX))};
    snprintf(shape, sizeof(shape), "%d x %d of %d + %d", (int)N, sizes.HS, sizes.NH, sizes.KV);
    snprintf(line, sizeof(line), "%s forward", name);
    measure(bench, line, shape, work, [=] { heads_forward(qkv, &heads, gpu); });
    snprintf(line, sizeof(line), "%s backward", name);
    measure(bench, line, shape, work, [=] { heads_backward(dqkv, &d, (const floatX*)qkv, &heads, gpu); });
    memory_close(&memory);
    section_close(bench);
}

// Measures the model's heads, and, with as many tokens, those of Llama 3.2 1B and Qwen3 0.6B.
static void bench_heads(Bench* bench, MatmulGpu*) {
    const int B = bench->B, T = bench->T, NH = bench->cfg.NH;
    bench_heads_kind(bench, "rope", HEADS_PLAIN, attention_sizes(B, T, NH, NH, bench->cfg.C / NH));
    bench_heads_kind(bench, "rope", HEADS_PLAIN, attention_sizes(B, T, 32, 8, 64));
    bench_heads_kind(bench, "norm of heads, rope", HEADS_NORM, attention_sizes(B, T, 16, 8, 128));
    bench_heads_kind(bench, "unit norm of heads, rope", HEADS_UNIT_NORM, attention_sizes(B, T, 16, 8, 128));
}

// Returns a router with the rows of random logits.
static Router random_router(Bench* bench, int E, int used) {
    const size_t N = (size_t)bench->B * bench->T, M = router_rows(N, E, used);
    const Router router = {ROUTER_CHOSEN,
                           bench->B,
                           bench->T,
                           E,
                           used,
                           0,
                           0,
                           1,
                           NULL,
                           random_array<float>(bench, N * E, 1),
                           (int*)array_of_bytes(bench, N * used * sizeof(int)),
                           (int*)array_of_bytes(bench, N * used * sizeof(int)),
                           (int*)array_of_bytes(bench, M * sizeof(int)),
                           (int*)array_of_bytes(bench, ((size_t)E + 1) * sizeof(int)),
                           (float*)array_of_bytes(bench, M * sizeof(float))};
    router_forward(&router, &bench->gpu);
    return router;
}

// Measures the matmuls of experts with matrices of OC x C, by one kind of instructions.
static void bench_expert_matmul(Bench* bench, const char* layer, const ExpertRows* rows, int C, int OC) {
    const Gpu* gpu = &bench->gpu;
    const int first = bench->arrays_count, M = rows->all;
    const ExpertRows by = *rows;
    const Work work = {matmul_flops(rows->rows, C, OC), 0}; // padding is no work
    char shape[64], name[64];
    floatX *inp = random_array<floatX>(bench, (size_t)M * C, 1),
           *out = random_array<floatX>(bench, (size_t)M * OC, 1),
           *weight = random_array<floatX>(bench, (size_t)rows->E * OC * C, 0.02f);
    const Gradient dweight = {random_array<floatX>(bench, (size_t)rows->E * OC * C, 1), DTYPE_OF(floatX)};
    const char* how = rows->by == EXPERT_BY_WGMMA ? "wgmma" : "mma";
    snprintf(shape, sizeof(shape), "%d x %d -> %d", rows->rows, C, OC);
    snprintf(name, sizeof(name), "experts' %s forward, %s", layer, how);
    measure(bench, name, shape, work, [=] { expert_matmul_forward(out, inp, weight, &by, {C, OC}, gpu); });
    snprintf(name, sizeof(name), "experts' %s dinp, %s", layer, how);
    measure(bench, name, shape, work, [=] {
        expert_matmul_backward_input(inp, out, weight, &by, {C, OC}, GRADIENT_SET, gpu);
    });
    snprintf(name, sizeof(name), "experts' %s dweight, %s", layer, how);
    measure(bench, name, shape, work, [=] {
        expert_matmul_backward_weight(dweight, out, inp, &by, {C, OC}, GRADIENT_SET, gpu);
    });
    snprintf(name, sizeof(name), "experts' %s dweight, added, %s", layer, how);
    measure(bench, name, shape, work, [=] {
        expert_matmul_backward_weight(dweight, out, inp, &by, {C, OC}, GRADIENT_ADD, gpu);
    });
    while (bench->arrays_count > first) {
        gpu_free(bench->arrays[--bench->arrays_count]);
    }
}

// Measures the router, and what moves rows.
static void bench_expert_rows(Bench* bench, const Router* router, int C) {
    const Gpu* gpu = &bench->gpu;
    const Router r = *router;
    const int N = r.B * r.T, M = N * r.used, stride = router_stride(r.E);
    const size_t all = router_rows((size_t)N, r.E, r.used), size = sizeof(floatX);
    char shape[64];
    floatX *tokens = random_array<floatX>(bench, (size_t)N * C, 1),
           *out = random_array<floatX>(bench, (size_t)N * C, 1),
           *in_rows = random_array<floatX>(bench, all * C, 1),
           *dlogits = random_array<floatX>(bench, (size_t)N * stride, 1);
    float *entropies = random_array<float>(bench, router_entropies(&r), 1),
          *dscale = random_array<float>(bench, all, 1);
    snprintf(shape, sizeof(shape), "%d of %d experts, %d", r.used, r.E, N);
    measure(bench, "router forward", shape, Work{0, 4.0 * N * r.E + (3 * 4.0 + 4) * M},
            [=] { router_forward(&r, gpu); });
    measure(bench, "router backward", shape, Work{0, (4.0 * r.E + (double)size * stride) * N + 3 * 4.0 * M},
            [=] {
                router_backward(dlogits, entropies, dscale, &r, {0.01f, 0.001f, 1e-4f}, gpu);
            });
    snprintf(shape, sizeof(shape), "%d x %d", M, C);
    measure(bench, "experts' rows gathered", shape, Work{0, experts_gather_bytes(N, M, C, size)},
            [=] { experts_gather(in_rows, tokens, &r, C, gpu); });
    measure(bench, "experts' rows added", shape, Work{0, experts_sum_bytes(N, M, C, size)},
            [=] { experts_sum(out, (const floatX*)tokens, (const floatX*)in_rows, &r, C, gpu); });
}

// Measures eight experts, of which a token takes two: with the hidden units of moe:8x124m, 1024 for
// 768 channels, and with those of a dense model.
static void bench_experts(Bench* bench, MatmulGpu*) {
    const int C = bench->cfg.C, hidden[] = {ceil_div(4 * C / 3, 64) * 64, 4 * C};
    const Router router = random_router(bench, 8, 2);
    ExpertRows rows = experts_rows(&router);
    for (const ExpertInstructions by : {EXPERT_BY_MMA, EXPERT_BY_WGMMA}) {
        rows.by = by;
        for (const int F : hidden) {
            if (by == EXPERT_BY_MMA || expert_can_wgmma<floatX>(&rows)) {
                bench_expert_matmul(bench, "fc", &rows, C, 2 * F);
                bench_expert_matmul(bench, "fcproj", &rows, F, C);
            }
        }
    }
    bench_expert_rows(bench, &router, C);
    section_close(bench);
}

// ---- attention's instructions and tiles ----

// Measures both passes by each kind of instructions, and with each tiling of wgmma.
static void bench_attention_by(Bench* bench, AttentionSizes sizes) {
    const Gpu* gpu = &bench->gpu;
    const size_t tokens = (size_t)sizes.B * sizes.T, Q = attention_queries_size(sizes),
                 QKV = attention_qkv_size(sizes);
    AttentionFlash scratch_memory, *scratch = &scratch_memory;
    Memory memory = memory_on_gpu();
    char shape[64];
    floatX *qkv = random_array<floatX>(bench, tokens * QKV, 1),
           *dqkv = random_array<floatX>(bench, tokens * QKV, 1);
    floatX *out = random_array<floatX>(bench, tokens * Q, 1),
           *dout = random_array<floatX>(bench, tokens * Q, 1);
    float* lse = random_array<float>(bench, tokens * sizes.NH, 1);
    const Gradient dbias = {random_array<floatX>(bench, QKV, 1), DTYPE_OF(floatX)};
    const AttentionPassGpu<floatX> pass = {sizes, NULL, qkv, NULL, out, lse};
    const AttentionGradientsGpu<floatX> d = {dout, dqkv, NULL, dbias, GRADIENT_SET};
    const Work forward = {attention_forward_flops(sizes), attention_forward_bytes(sizes, sizeof(floatX))},
               backward = {attention_backward_flops(sizes), attention_backward_bytes(sizes, sizeof(floatX))};
    attention_gpu_open<floatX>(scratch, &memory, sizes, sizes.T);
    snprintf(shape, sizeof(shape), "B %d T %d, %d/%d heads of %d%s", sizes.B, sizes.T, sizes.NH, sizes.KV,
             sizes.HS, sizes.cap > 0 ? ", cap" : "");
    for (const AttentionInstructions by : {ATTENTION_BY_MMA, ATTENTION_BY_WGMMA}) {
        const int is_wgmma = by == ATTENTION_BY_WGMMA;
        if (is_wgmma && (!PTX_HAS_WGMMA || DTYPE_OF(floatX) == DTYPE_FP32)) {
            break;
        }
        attention_gpu_by(scratch, by);
        measure(bench, is_wgmma ? "attention forward, wgmma" : "attention forward, mma", shape, forward,
                [=] { attention_forward(&pass, scratch, gpu); });
        measure(bench, is_wgmma ? "attention backward, wgmma" : "attention backward, mma", shape, backward,
                [=] { attention_backward(&d, &pass, scratch, gpu); });
    }
#if PTX_HAS_WGMMA
    if constexpr (DTYPE_OF(floatX) != DTYPE_FP32) {
        const auto tiles = [=](const char* name, auto kernel) {
            measure(bench, name, shape, forward, [=] { kernel(&pass, scratch, attention_size(sizes), gpu); });
        };
#define FORWARD(Tiles) attention_forward_wgmma<Tiles, ATTENTION_CAUSAL, floatX>
        if (sizes.HS <= 64 && sizes.cap == 0) {
            tiles("forward, 64 keys, 2 groups, 2 blocks", FORWARD(AttentionForward64));
            tiles("forward, 128 keys, 2 groups", FORWARD(AttentionForward64Long));
            tiles("forward, 128 keys, 3 groups", FORWARD(AttentionForward64Longer));
            tiles("forward, 64 keys, 3 groups", FORWARD(AttentionForward64Three));
        } else if (sizes.HS <= 128 && sizes.cap == 0) {
            tiles("forward, 128 keys, 2 groups", FORWARD(AttentionForward128));
            tiles("forward, 128 keys, no overlap", FORWARD(AttentionForward128Apart));
        }
#undef FORWARD
        for (int way = 2; way < attention_ways<floatX>(scratch, sizes, 1); way++) {
            attention_gpu_way(scratch, way);
            measure(bench, "attention backward, no overlap", shape, backward,
                    [=] { attention_backward(&d, &pass, scratch, gpu); });
        }
    }
#endif
    memory_close(&memory);
    section_close(bench);
}

static void bench_attention_tiles(Bench* bench, MatmulGpu*) {
    const int B = bench->B, T = bench->T, NH = bench->cfg.NH;
    bench_attention_by(bench, attention_sizes(B, T, NH, NH, bench->cfg.C / NH));
    bench_attention_by(bench, attention_sizes(B, T, 16, 8, 128));
    bench_attention_by(bench, attention_sizes(B, T, 32, 8, 64));
    AttentionSizes gemma = attention_sizes(B, T, 8, 4, 256);
    bench_attention_by(bench, gemma);
    gemma.cap = 50;
    bench_attention_by(bench, gemma);
}

// ---- the sections ----

// Measures all linear layers.
static void bench_layers(Bench* bench, MatmulGpu* matmul) {
    const int N = bench->B * bench->T, C = bench->cfg.C;
    bench_layer(bench, matmul, "qkv", N, C, 3 * C, PLAIN);
    bench_layer(bench, matmul, "attproj", N, C, C, RESIDUAL);
    bench_layer(bench, matmul, "fc", N, C, 4 * C, GELU);
    bench_layer(bench, matmul, "fcproj", N, 4 * C, C, RESIDUAL);
    bench_layer(bench, matmul, "classifier", bench->chunk, C, bench->cfg.Vp, NO_BIAS);
}

typedef struct {
    const char* name;
    void (*measure)(Bench* bench, MatmulGpu* matmul);
    int is_usual; // part of a usual step
} Section;

static const Section SECTIONS[] = {{"layers", bench_layers, 1},
                                   {"attention", bench_attention, 1},
                                   {"rows", bench_rows, 1},
                                   {"tokens", bench_tokens, 1},
                                   {"optimizer", bench_optimizer, 1},
                                   {"heads", bench_heads, 0},
                                   {"experts", bench_experts, 0},
                                   {"attention-tiles", bench_attention_tiles, 0},
                                   {"adamw8bit", bench_adamw8bit, 0},
                                   {"adafactor", bench_adafactor, 0},
                                   {"muon", bench_muon, 0}};

// Returns 1 if `only`, names with commas between, is empty or has this one.
static int is_among(const char* name, const char* only) {
    const size_t length = strlen(name);
    for (const char* at = strstr(only, name); at; at = strstr(at + 1, name)) {
        if ((at == only || at[-1] == ',') && (at[length] == ',' || !at[length])) {
            return 1;
        }
    }
    return !only[0];
}

// Ends the program if `only` names no section.
static void check_only(const char* only) {
    char all[256] = "", one[64];
    for (const Section& section : SECTIONS) {
        snprintf(all + strlen(all), sizeof(all) - strlen(all), " %s", section.name);
    }
    for (const char* at = only; *at; at += strcspn(at, ",") + (at[strcspn(at, ",")] == ',')) {
        int found = 0;
        snprintf(one, sizeof(one), "%.*s", (int)strcspn(at, ","), at);
        for (const Section& section : SECTIONS) {
            found |= strcmp(one, section.name) == 0;
        }
        if (!found) {
            die_usage("--only %s: wanted some of%s", one, all);
        }
    }
}

// ---- the command line ----

typedef struct {
    const char *only, *model, *batch, *seq_len, *seconds, *ceiling, *json, *list, *chunk;
} Arguments;

static Arguments parse(int argc, char** argv) {
    Arguments a = {"", "d12", "64", "1024", "0.2", "8192", "", "", ""};
    const struct {
        const char *name, **value;
    } table[] = {{"--only", &a.only},       {"--model", &a.model},     {"--batch", &a.batch},
                 {"--seq-len", &a.seq_len}, {"--seconds", &a.seconds}, {"--ceiling", &a.ceiling},
                 {"--json", &a.json},       {"--list", &a.list},       {"--logits-chunk", &a.chunk}};
    const int rows = sizeof(table) / sizeof(table[0]);
    for (int i = 1; i < argc; i += 2) {
        int row = 0;
        while (row < rows && strcmp(argv[i], table[row].name) != 0) {
            row++;
        }
        if (row == rows || i + 1 >= argc) {
            die_usage("%s: wanted --model NAME --batch N --seq-len N --seconds S --ceiling N --json FILE "
                      "--list FILE --logits-chunk TOKENS --only SECTION,...",
                      argv[i]);
        }
        *table[row].value = argv[i + 1];
    }
    return a;
}

static int positive(const char* text, const char* name) {
    char* end;
    const long value = strtol(text, &end, 10);
    if (*end || value < 1 || value > 1 << 20) {
        die_usage("%s %s: wanted 1 to %d", name, text, 1 << 20);
    }
    return (int)value;
}

// Opens a file for lines; returns NULL for no name.
static FILE* open_for_lines(const char* path) {
    FILE* file = path[0] ? fopen(path, "a") : NULL;
    CHECK(!path[0] || file, "%s: cannot write", path);
    return file;
}

int main(int argc, char** argv) {
    const Arguments a = parse(argc, argv);
    const ModelPreset* named = model_preset_by_name(a.model);
    if (!named) {
        die_usage("--model %s: wanted a size, d12 or gpt3:c768 for example", a.model);
    }
    Bench bench;
    MatmulGpu matmul;
    const MatmulSettings settings = {1, GELU_FUSED, 1, a.list[0] == '\0', 0};
    memset(&bench, 0, sizeof(bench));
    bench.cfg = (ModelConfig){named->max_T, GPT2_VOCAB, model_padded_vocab(GPT2_VOCAB), named->L, named->NH,
                              named->C,     SHARE_OFF};
    check_only(a.only);
    bench.B = positive(a.batch, "--batch");
    bench.T = positive(a.seq_len, "--seq-len");
    bench.chunk = a.chunk[0] ? positive(a.chunk, "--logits-chunk") : bench.B * bench.T;
    bench.ceiling_size = positive(a.ceiling, "--ceiling");
    bench.seconds = strtod(a.seconds, NULL);
    bench.json = open_for_lines(a.json);
    bench.list = open_for_lines(a.list);
    gpu_open(&bench.gpu, 0);
    CUDA_CHECK(cudaEventCreate(&bench.start));
    CUDA_CHECK(cudaEventCreate(&bench.stop));
    Memory memory = memory_on_gpu();
    matmul_gpu_open(&matmul, &memory, &bench.gpu, settings);

    printf("%s, %s, %s, batch %d x %d\n", bench.gpu.name, dtype_name(DTYPE_OF(floatX)), a.model, bench.B,
           bench.T);
    if (!bench.list) {
        bench_ceilings(&bench, &matmul);
    }
    for (const Section& section : SECTIONS) {
        if (is_among(section.name, a.only) && (section.is_usual || !bench.list)) {
            section.measure(&bench, &matmul);
        }
    }
    if (!bench.list) {
        matmul_gpu_report(stdout, &matmul);
    }

    matmul_gpu_close(&matmul);
    memory_close(&memory);
    CUDA_CHECK(cudaEventDestroy(bench.stop));
    CUDA_CHECK(cudaEventDestroy(bench.start));
    gpu_close(&bench.gpu);
    for (FILE* file : {bench.json, bench.list}) {
        if (file) {
            fclose(file);
        }
    }
    return EXIT_SUCCESS;
}
