// test_update.cu -- weights as updates read and write them: split master weights, elements one at a time and four.
// test_adamw.cu has stochastic rounding.
#include "llmc/update.cuh"
#include "gpu_ops.h"

static float from_bits(uint32_t bits) { return float_of_bits(bits); }

// Both halves give the number back, and the upper one is the nearest bf16, away from zero at ties.
static void test_split_of(uint32_t bits) {
    const float x = from_bits(bits);
    const SplitFloat split = split_float(x);
    const float upper = to_float(split.upper);
    EXPECT(float_bits(split_join(split.upper, split.lower)) == bits, "%08x came back as %08x", bits,
           float_bits(split_join(split.upper, split.lower)));
    const int is_tie = (bits & 0xFFFF) == 0x8000;
    const uint32_t nearest =
        is_tie ? (bits + 0x8000u) & 0xFFFF0000u : float_bits(to_float(from_float<bf16>(x)));
    EXPECT(float_bits(upper) == nearest, "%08x: the upper half is %08x, wanted %08x", bits, float_bits(upper),
           nearest);
}

// Around all bf16 and the middles between them, both signs, to the largest finite number.
static void test_split(void) {
    const uint32_t lower[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    for (uint32_t upper = 0; upper < 0x7F80; upper++) {
        for (int i = 0; i < 6; i++) {
            test_split_of(upper << 16 | lower[i]);
            test_split_of(0x80000000u | upper << 16 | lower[i]);
        }
    }
    const float odd[] = {INFINITY, -INFINITY};
    for (int i = 0; i < 2; i++) {
        test_split_of(float_bits(odd[i]));
    }
    const SplitFloat nan = split_float(from_bits(0x7FFFFFFFu)); // CUDA's own
    EXPECT(isnan(to_float(nan.upper)) && isnan(split_join(nan.upper, nan.lower)), "NaN became %g",
           to_float(nan.upper));
}

// x + `add`, by one thread for each W elements.
// grid   ceil(n / (32 W))      block   32
template <class T, int W>
__global__ void add_kernel(T* params, void* master, MasterWeights kind, float add,
                           const __grid_constant__ RoundingWords words, size_t n) {
    const size_t i = ((size_t)blockIdx.x * 32 + threadIdx.x) * W;
    const Weights<T> w = {params, master, kind};
    if (i < n) {
        Elements<float, W> x = weights_load<W>(w, i);
        for (int k = 0; k < W; k++) {
            x[k] += add;
        }
        weights_store(w, i, x, words);
    }
}

template <class T, int W>
static float* add(const float* x, float* master, MasterWeights kind, size_t n, const Gpu* gpu) {
    const RoundingWords words = rounding_words(3, 5, 2, 1024);
    float* copy = ops_copy(x, n);
    T* params = upload<T>(copy, n, 0, gpu);
    void* device_master = gpu_alloc(n, sizeof(float), "master");
    uint16_t* halves = (uint16_t*)check_alloc(n, sizeof(uint16_t), "halves");
    for (size_t i = 0; i < n; i++) {
        halves[i] = split_float(master[i]).lower;
    }
    CUDA_CHECK(cudaMemcpy(device_master, kind == MASTER_SPLIT ? (void*)halves : (void*)master,
                          n * master_bytes(kind), cudaMemcpyHostToDevice));
    launch(add_kernel<T, W>, (unsigned)ceil_div(n, (size_t)(32 * W)), 32, 0, gpu, params, device_master, kind,
           0.01f, words, n);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    float* got = download<T>(params, n, gpu);
    CUDA_CHECK(cudaMemcpy(kind == MASTER_SPLIT ? (void*)halves : (void*)master, device_master,
                          n * master_bytes(kind), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n && kind == MASTER_SPLIT; i++) {
        master[i] = split_join(from_float<bf16>(got[i]), halves[i]);
    }
    free(halves);
    gpu_free(params);
    gpu_free(device_master);
    return got;
}

// What is added is there exactly in master weights of both kinds; without them, words 2^41 + 1024 + i round.
template <class T> static void test_weights(const Gpu* gpu) {
    const size_t n = 1000;
    const char* what = dtype_name(DTYPE_OF(T));
    float *x = ops_normal(n, 1), *master = ops_normal(n, 1);
    for (int kind = MASTER_NONE; kind <= (DTYPE_OF(T) == DTYPE_BF16 ? MASTER_SPLIT : MASTER_FP32); kind++) {
        float* start = ops_floats(n);
        for (size_t i = 0; i < n; i++) {
            const float upper = to_float(split_float(master[i]).upper);
            start[i] = kind == MASTER_SPLIT ? upper : to_float(from_float<T>(x[i]));
        }
        float *master4 = ops_copy(master, n), *master1 = ops_copy(master, n);
        const float* four = add<T, 4>(start, master4, (MasterWeights)kind, n, gpu);
        const float* one = add<T, 1>(start, master1, (MasterWeights)kind, n, gpu);
        EXPECT(ops_same_bits(four, one, n) && ops_same_bits(master4, master1, n),
               "%s: one by one has other bits", what);
        for (size_t i = 0; i < n; i++) {
            const uint64_t word = (2ull << 40) + 1024 + i;
            const uint32_t random = rand_block(3, rand_stream("adamw") + 5, word / 4).word[word % 4];
            const float sum = (kind == MASTER_NONE ? start[i] : master[i]) + 0.01f;
            const float want = kind == MASTER_NONE   ? to_float(round_stochastic<T>(sum, random))
                               : kind == MASTER_FP32 ? to_float(from_float<T>(sum))
                                                     : to_float(split_float(sum).upper);
            EXPECT(four[i] == want, "%s, master %d: params at %zu: %.9g, wanted %.9g", what, kind, i, four[i],
                   want);
            EXPECT(kind == MASTER_NONE || master4[i] == sum, "%s, master %d at %zu: %.9g, wanted %.9g", what,
                   kind, i, master4[i], sum);
        }
    }
    ops_close("weights");
}

int main(void) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_split();
    test_weights<float>(&gpu);
    test_weights<bf16>(&gpu);
    test_weights<fp16>(&gpu);
    EXPECT(master_bytes(MASTER_NONE) == 0 && master_bytes(MASTER_SPLIT) == 2 &&
               master_bytes(MASTER_FP32) == 4,
           "bytes");
    gpu_close(&gpu);
    return test_done("update.cuh");
}
