// test_tensor_parallel.cu -- sums over tensor ranks on the GPU: their order, biases, residuals,
// every type, awkward sizes; gradients of tensors that are not cut.
#define PRECISION_FP32
#include "llmc/parallel/tensor_parallel.cuh"
#include "llmc/model/part.h"
#include "dev/test/lib/gpu_ops.h"

// Each element is the sum in fp32, rank after rank, then the bias, then the residual, rounded
// once: the bits of a plain loop.
template <class T>
static void test_sum(int ranks, int rows, int C, int has_bias, int has_residual, size_t shift,
                     const Gpu* gpu) {
    const size_t n = (size_t)rows * C;
    float *parts = ops_normal(ranks * n, 1), *bias = ops_normal(C, 1), *residual = ops_normal(n, 1);
    T *d_parts = upload<T>(parts, ranks * n, shift, gpu), *d_bias = upload<T>(bias, C, shift, gpu),
      *d_residual = upload<T>(residual, n, shift, gpu), *out = unset<T>(n + shift, gpu) + shift;
    tensor_sum_parts(out, has_residual ? d_residual : NULL, d_parts, has_bias ? d_bias : NULL, ranks, rows, C,
                     gpu);
    const float* got = download(out, n, gpu);
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int k = 0; k < ranks; k++) {
            sum += parts[k * n + i];
        }
        sum += has_bias ? bias[i % C] : 0;
        sum += has_residual ? residual[i] : 0;
        EXPECT(got[i] == to_float(from_float<T>(sum)), "%d ranks, %d x %d, element %zu: %g, wanted %g, %s",
               ranks, rows, C, i, got[i], sum, dtype_name(DTYPE_OF(T)));
    }
    // in place of the residual
    tensor_sum_parts(d_residual, d_residual, d_parts, has_bias ? d_bias : NULL, ranks, rows, C, gpu);
    const float* in_place = download(d_residual, n, gpu);
    EXPECT(!has_residual || ops_same_bits(in_place, got, n), "in place");
    for (T* array : {out, d_residual, d_bias, d_parts}) {
        gpu_free(array - shift);
    }
    ops_close("sums");
}

// 1e8 + 1 - 1e8 is 0 in fp32, in any other order 1.
static void test_order(const Gpu* gpu) {
    float parts[3] = {1e8f, 1, -1e8f};
    float *d_parts = upload<float>(parts, 3, 0, gpu), *out = unset<float>(1, gpu);
    tensor_sum_parts(out, (const float*)NULL, (const float*)d_parts, (const float*)NULL, 3, 1, 1, gpu);
    EXPECT(download(out, 1, gpu)[0] == 0, "the order of ranks");
    gpu_free(out);
    gpu_free(d_parts);
    ops_close("order");
}

template <class T> static void test_type(const Gpu* gpu) {
    const int sizes[][3] = {{2, 1, 1}, {4, 31, 33}, {2, 33, 31}, {8, 7, 768}, {3, 64, 40}};
    for (const int* size : sizes) {
        for (int with = 0; with < 4; with++) {
            test_sum<T>(size[0], size[1], size[2], with & 1, with >> 1, 0, gpu);
        }
    }
    test_sum<T>(4, 5, 64, 1, 1, 1, gpu); // no pack can be read here
}

TEST_TYPES(tensor_sum)

TEST(tensor_sum_order) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_order(&gpu);
    gpu_close(&gpu);
}

// ---- gradients of tensors that are not cut ----

static const ModelConfig WHOLE = {8, 192, 192, 3, 3, 48, SHARE_OFF};

// Sums in an array with gaps: the bits of a loop over the ranks; all else stays as it is.
template <class G> static void test_parts(const Gpu* gpu) {
    enum { RANKS = 3, UNIT = TENSOR_SHARD_UNIT };
    MapOf of = map_of_model(WHOLE);
    of.tensor = RANKS;
    Memory memory = memory_on_gpu();
    Map map;
    TensorParts parts;
    map_open(&map, &memory, MEMORY_HOST, &of, 1);
    tensor_parts_open(&parts, &memory, MEMORY_PINNED, &map);
    const size_t count = map.totals.elements[MAP_GRADIENTS], units = parts.reduced.count;
    float *grads = ops_normal(count, 1), *mail = ops_normal(RANKS * units * UNIT, 1);
    G *on_gpu = upload<G>(grads, count, 0, gpu), *mail_on_gpu = upload<G>(mail, RANKS * units * UNIT, 0, gpu);
    launch(tensor_parts_take_kernel<G>, (unsigned)units, TENSOR_THREADS_, 0, gpu, mail_on_gpu + units * UNIT,
           (const G*)on_gpu, (const uint32_t*)parts.reduced.numbers);
    tensor_parts_put_(on_gpu, (const G*)mail_on_gpu, parts.reduced, RANKS, gpu);
    for (size_t i = 0; i < units * UNIT; i++) {
        float* own = grads + (size_t)parts.reduced.numbers[i / UNIT] * UNIT + i % UNIT;
        *own = to_float(from_float<G>(mail[i] + *own + mail[2 * units * UNIT + i]));
    }
    EXPECT(units > 0 && parts.whole.count == 0, "%zu units", units);
    EXPECT(ops_same_bits(download(on_gpu, count, gpu), grads, count), "sums in %s", dtype_name(DTYPE_OF(G)));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    memory_close(&memory);
    gpu_free(on_gpu);
    gpu_free(mail_on_gpu);
    ops_close("parts");
}

TEST(tensor_parts) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_parts<float>(&gpu);
    test_parts<bf16>(&gpu);
    gpu_close(&gpu);
}
