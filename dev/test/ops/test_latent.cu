// test_latent.cu -- heads out of latents on the GPU against the CPU: both passes, and decoding with
// what is kept, in all types and in 8 bits.
#include "llmc/ops/latent.cuh"
#include "dev/test/lib/gpu_ops.h"

// Moves are exact; other results are within `tolerance` of the largest.
static void expect_near(const float* got, const float* want, size_t n, double tolerance, const char* what) {
    double largest = 0;
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs((double)want[i]));
    }
    for (size_t i = 0; i < n; i++) {
        EXPECT_NEAR(got[i], want[i], tolerance * largest, "%s, element %zu", what, i);
    }
}

template <class X> static X* upload(const float* x, size_t n, const Gpu* gpu) {
    return n > 0 ? upload_rounded<X>(x, n, 0, gpu) : NULL;
}

template <class X> static void check(LatentSizes s, const Gpu* gpu) {
    const size_t N = s.N, Q = N * s.NH * s.HS, R = N * latent_first(s), UP = N * latent_up(s),
                 V = N * s.NH * s.value, QR = N * s.query_rank, C = N * s.rank;
    const int has_q = s.query_rank > 0;
    float *first = normal<X>(R, 1), *q = normal<X>(Q, 1), *up = normal<X>(UP, 1), *dqkv = normal<X>(3 * Q, 1),
          *atty = normal<X>(Q, 1), *dvalues = normal<X>(V, 1);
    float *qkv = ops_floats(3 * Q), *c = ops_floats(C), *latent = ops_floats(QR), *values = ops_floats(V),
          *dfirst = ops_floats(R), *dq = ops_floats(Q), *dup = ops_floats(UP), *datty = ops_floats(Q);
    latent_split_cpu(latent, c, first, s);
    latent_heads_cpu(qkv, first, has_q ? q : NULL, up, s);
    latent_heads_backward_cpu(dfirst, has_q ? dq : NULL, dup, dqkv, s);
    latent_join_cpu(dfirst, latent, c, s);
    latent_values_cpu(values, atty, s);
    latent_values_backward_cpu(datty, dvalues, s);

    X *first_x = upload<X>(first, R, gpu), *q_x = has_q ? upload<X>(q, Q, gpu) : NULL,
      *up_x = upload<X>(up, UP, gpu), *dqkv_x = upload<X>(dqkv, 3 * Q, gpu),
      *atty_x = upload<X>(atty, Q, gpu), *dvalues_x = upload<X>(dvalues, V, gpu),
      *latent_x = unset<X>(QR + 1, gpu), *c_x = unset<X>(C, gpu), *qkv_x = unset<X>(3 * Q, gpu),
      *dfirst_x = unset<X>(R, gpu), *dq_x = has_q ? unset<X>(Q, gpu) : NULL, *dup_x = unset<X>(UP, gpu),
      *values_x = unset<X>(V, gpu), *datty_x = unset<X>(Q, gpu);
    latent_split(latent_x, c_x, (const X*)first_x, s, gpu);
    latent_heads(qkv_x, (const X*)first_x, (const X*)q_x, (const X*)up_x, s, gpu);
    latent_heads_backward(dfirst_x, dq_x, dup_x, (const X*)dqkv_x, s, gpu);
    latent_join(dfirst_x, (const X*)latent_x, (const X*)c_x, s, gpu);
    latent_values(values_x, (const X*)atty_x, s, gpu);
    latent_values_backward(datty_x, (const X*)dvalues_x, s, gpu);
    expect_near(take_back(qkv_x, 3 * Q, gpu), qkv, 3 * Q, 0, "qkv");
    expect_near(take_back(c_x, C, gpu), c, C, 0, "c");
    expect_near(take_back(dup_x, UP, gpu), dup, UP, 0, "dup");
    expect_near(take_back(values_x, V, gpu), values, V, 0, "values");
    expect_near(take_back(datty_x, Q, gpu), datty, Q, 0, "datty");
    expect_near(take_back(dfirst_x, R, gpu), dfirst, R, roundoff<X>(), "dfirst"); // sums
    if (has_q) {
        expect_near(take_back(dq_x, Q, gpu), dq, Q, 0, "dq");
    }
    void* const arrays[] = {first_x, up_x, dqkv_x, atty_x, dvalues_x, latent_x};
    for (void* array : arrays) {
        gpu_free(array);
    }
    if (has_q) {
        gpu_free(q_x);
    }
    ops_close("latent");
}

// Sets the memory of a matrix in 8 bits, and what its blocks hold.
static QuantizedGpu quantize(float* matrix, size_t elements, void** memory, const Gpu* gpu) {
    const size_t bytes = quantized_gpu_bytes(elements);
    QuantizedBlock* blocks = (QuantizedBlock*)(void*)ops_bytes(elements / QUANTIZED_BLOCK * sizeof(*blocks));
    void* staging = ops_bytes(bytes);
    *memory = gpu_alloc(bytes, 1, "test");
    quantized_encode(blocks, matrix, elements);
    quantized_decode(matrix, blocks, elements);
    quantized_upload(*memory, staging, blocks, elements, gpu);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    return quantized_gpu_bind(*memory, elements);
}

template <class X> static void check_cached(LatentSizes s, int maxT, int is_quantized, const Gpu* gpu) {
    Memory memory = memory_on_host();
    LatentScratch scratch;
    const size_t N = s.N, Q = N * s.NH * s.HS, V = N * s.NH * s.value, kept = latent_kept(s),
                 elements = (size_t)latent_up(s) * s.rank;
    const float scale = 0.3f;
    float *matrix = normal<X>(elements, 0.3f), *qkv = normal<X>(3 * Q, 1), *values = ops_floats(V),
          *c = normal<X>((size_t)maxT * s.rank, 1), *others = normal<X>((size_t)maxT * 3 * Q / N, 1),
          *newest = normal<X>(N * s.rank, 1);
    const LatentCache cache = {ops_floats(N * maxT * kept), maxT};
    LatentSizes prefill = s;
    prefill.N = maxT;
    void* blocks = NULL;
    LatentWeightGpu<X> weight = {NULL, {}};
    if (is_quantized) {
        weight.q8 = quantize(matrix, elements, &blocks, gpu);
    } else {
        weight.data = upload<X>(matrix, elements, gpu);
    }
    int *positions = ops_below(N, maxT), *positions_x = (int*)gpu_alloc(N, sizeof(int), "test");
    positions[0] = maxT - 1;
    CUDA_CHECK(cudaMemcpyAsync(positions_x, positions, N * sizeof(int), cudaMemcpyHostToDevice, gpu->stream));
    X *c_x = upload<X>(c, (size_t)maxT * s.rank, gpu), *others_x = upload<X>(others, maxT * 3 * Q / N, gpu),
      *newest_x = upload<X>(newest, N * s.rank, gpu), *qkv_x = upload<X>(qkv, 3 * Q, gpu),
      *values_x = unset<X>(V, gpu);
    LatentCacheGpu<X> cache_x = {unset<X>(N * maxT * kept, gpu), maxT};
    latent_open(&scratch, &memory, s, maxT);
    for (int n = 0; n < s.N; n++) {
        latent_store_cpu(cache, c, others, n, 0, maxT, s);
        latent_store_cpu(cache, newest + n * s.rank, qkv + n * 3 * Q / N, n, positions[n], 1, s);
        latent_store(cache_x, (const X*)c_x, (const X*)others_x, (const int*)NULL, n, prefill, gpu);
    }
    latent_store(cache_x, (const X*)newest_x, (const X*)qkv_x, (const int*)positions_x, 0, s, gpu);
    latent_cached_cpu(values, qkv, positions, {matrix, NULL}, scale, cache, &scratch, s);
    latent_cached(values_x, (const X*)qkv_x, (const int*)positions_x, weight, scale, cache_x, s, gpu);
    expect_near(take_back(cache_x.data, N * maxT * kept, gpu), cache.data, N * maxT * kept, 0, "cache");
    expect_near(take_back(values_x, V, gpu), values, V, roundoff<X>() + 200 * FLT_EPSILON, "values");
    void* const arrays[] = {c_x,   others_x,    newest_x,
                            qkv_x, positions_x, blocks ? blocks : (void*)const_cast<X*>(weight.data)};
    for (void* array : arrays) {
        gpu_free(array);
    }
    memory_close(&memory);
    ops_close("latents kept");
}

template <class X> static void test_type(const Gpu* gpu) {
    check<X>({5, 3, 10, 4, 6, 7, 9}, gpu);
    check<X>({5, 3, 10, 4, 10, 0, 9}, gpu);
    check<X>({2, 1, 3, 2, 1, 1, 1}, gpu);
    check<X>({9, 4, 48, 16, 32, 0, 300}, gpu);
    check_cached<X>({3, 3, 10, 4, 6, 7, 9}, 19, 0, gpu);
    check_cached<X>({2, 2, 24, 8, 16, 0, 160}, 131, 0,
                    gpu); // columns for some threads twice; two tiles of keys
    check_cached<X>({2, 2, 24, 8, 16, 0, 32}, 19, 1, gpu);
    check_cached<X>({1, 1, 3, 2, 1, 0, 1}, 1, 0, gpu);
}

TEST_TYPES(latent)
