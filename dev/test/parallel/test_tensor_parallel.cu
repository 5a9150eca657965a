// test_tensor_parallel.cu -- sums over slices on the GPU: their order, biases, residuals, every
// type, awkward sizes; gradients of tensors that are not cut, slice by slice.
#define PRECISION_FP32
#include "llmc/parallel/tensor_parallel.cuh"
#include "llmc/model/part.h"
#include "dev/test/lib/gpu_ops.h"

// Each element is the sum in fp32, slice after slice, then the bias, then the residual, rounded
// once: the bits of a plain loop.
template <class T>
static void test_sum(int slices, int rows, int C, int has_bias, int has_residual, size_t shift,
                     const Gpu* gpu) {
    const size_t n = (size_t)rows * C;
    float *parts = ops_normal(slices * n, 1), *bias = ops_normal(C, 1), *residual = ops_normal(n, 1);
    T *d_parts = upload<T>(parts, slices * n, shift, gpu), *d_bias = upload<T>(bias, C, shift, gpu),
      *d_residual = upload<T>(residual, n, shift, gpu), *out = unset<T>(n + shift, gpu) + shift;
    tensor_sum_parts(out, has_residual ? d_residual : NULL, d_parts, has_bias ? d_bias : NULL, slices, rows,
                     C, gpu);
    const float* got = download(out, n, gpu);
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int k = 0; k < slices; k++) {
            sum += parts[k * n + i];
        }
        sum += has_bias ? bias[i % C] : 0;
        sum += has_residual ? residual[i] : 0;
        EXPECT(got[i] == to_float(from_float<T>(sum)), "%d slices, %d x %d, element %zu: %g, wanted %g, %s",
               slices, rows, C, i, got[i], sum, dtype_name(DTYPE_OF(T)));
    }
    // in place of the residual
    tensor_sum_parts(d_residual, d_residual, d_parts, has_bias ? d_bias : NULL, slices, rows, C, gpu);
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
    EXPECT(download(out, 1, gpu)[0] == 0, "the order of slices");
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

static const ModelConfig WHOLE = {8, 192, 192, 3, 4, 32, SHARE_OFF};

// Gives each slice's copy of each such gradient numbers of its own, by way of the pointers of a
// slice, and compares the sums with those of a loop in the slices' order; wpe keeps what it has.
template <class T, class G> static void test_whole(unsigned frozen, const Gpu* gpu) {
    const ModelPart all = {0, 4, 4, 0, 0, 0};
    const ModelConfig cfg = model_part_of(WHOLE, all);
    ZeroPlan plan = zero_plan(cfg, 0, 0, 1);
    zero_plan_freeze(&plan, cfg, frozen, 0);
    TensorRow rows[MODEL_PARAMETER_ROWS];
    zero_gradient_rows(rows, &plan, cfg, sizeof(G));
    const size_t count = zero_count(&plan, ZERO_GRADIENT);
    G* grads = upload<G>(ops_normal(count, 1), count, 0, gpu);
    float* before = download(grads, count, gpu);
    Memory memory = memory_on_gpu();
    WholeGradientsGpu whole;
    const GroupGpu alone = {0, 1, NULL, NULL, "", NULL};
    whole_gradients_gpu_open(&whole, &memory, cfg, &plan, rows, Gradient{grads, DTYPE_OF(G)});
    float* want = ops_copy(before, count);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &rows[i];
        const int is_summed = row->split == SPLIT_NONE && row->kind != KIND_EMBEDDING;
        const size_t elements = tensor_layer_elements(row);
        for (int l = 0; l < row->layers && is_summed && zero_has_row(&plan, i); l++) {
            G* at = (G*)tensor_at_layer(row, grads, l);
            for (int slice = 0; slice < 4; slice++) {
                const float* values = ops_normal(elements, 1);
                const Gradient g = whole_gradients_in_(&whole, i, Gradient{at, DTYPE_OF(G)},
                                                       whole.of.copies + slice * whole.of.count);
                EXPECT(g.dtype == DTYPE_FP32, "copies are fp32");
                CUDA_CHECK(cudaMemcpy(g.data, values, elements * sizeof(float), cudaMemcpyHostToDevice));
                for (size_t e = 0; e < elements; e++) {
                    float* sum = &want[(size_t)(at - grads) + e];
                    *sum = slice == 0 ? values[e] : *sum + values[e];
                }
            }
            for (size_t e = 0; e < elements; e++) {
                float* sum = &want[(size_t)(at - grads) + e];
                *sum = to_float(from_float<G>(*sum));
            }
        }
    }
    whole_gradients_sum<T>(&whole, &alone, gpu);
    const float* got = download(grads, count, gpu);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &rows[i];
        for (int l = 0; l < row->layers && zero_has_row(&plan, i); l++) {
            const size_t at = (size_t)((G*)tensor_at_layer(row, grads, l) - grads);
            EXPECT(ops_same_bits(got + at, want + at, tensor_layer_elements(row)), "%s of layer %d",
                   row->name, l);
        }
    }
    memory_close(&memory);
    gpu_free(grads);
    ops_close("whole");
}

TEST(whole_gradients) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_whole<float, float>(0, &gpu);
    test_whole<bf16, bf16>(0, &gpu);
    test_whole<bf16, float>(1 << 2 | 1 << 9, &gpu); // ln1w and attprojb are frozen
    gpu_close(&gpu);
}
