// test_q8.cu -- 8-bit weights on the GPU against exact sums of the numbers that blocks stand for.
#include "llmc/ops/q8.cuh"
#include "dev/test/lib/gpu_ops.h"

typedef struct {
    void* memory; // on the GPU
    QuantizedGpu matrix;
    float* values; // (OC, C) that it stands for
} Weight;

static Weight weight_of(size_t OC, size_t C, const Gpu* gpu) {
    const size_t elements = OC * C, bytes = quantized_gpu_bytes(elements);
    QuantizedBlock* blocks =
        (QuantizedBlock*)check_alloc(elements / QUANTIZED_BLOCK, sizeof(QuantizedBlock), "blocks");
    Weight w = {gpu_alloc(bytes, 1, "weight"), {}, ops_floats(elements)};
    void* staging = check_alloc(bytes, 1, "staging");
    quantized_encode(blocks, ops_normal(elements, 0.05f), elements);
    quantized_decode(w.values, blocks, elements);
    quantized_upload(w.memory, staging, blocks, elements, gpu);
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    w.matrix = quantized_gpu_bind(w.memory, elements);
    free(staging);
    free(blocks);
    return w;
}

// fp32 sums of C terms, in lanes and then across them, and one rounding to T.
template <class T> static void test_size(int N, int C, int OC, const Gpu* gpu) {
    const size_t rows = (size_t)N, n = rows * (size_t)OC;
    const Weight w = weight_of((size_t)OC, (size_t)C, gpu);
    float *x = ops_normal(rows * (size_t)C, 1), *b = ops_normal((size_t)OC, 1), *nothing = ops_floats(n);
    T *inp = upload<T>(x, rows * (size_t)C, 0, gpu), *bias = upload<T>(b, (size_t)OC, 0, gpu);
    float* a = ops_normal(n, 1);
    T *out = upload<T>(nothing, n, 0, gpu), *add = upload<T>(a, n, 0, gpu);
    q8_matmul(out, C % 64 ? add : (const T*)NULL, inp, w.matrix, OC % 2 ? bias : (const T*)NULL, {N, C, OC},
              gpu);
    const float* got = download(out, n, gpu);
    for (int i = 0; i < N * OC; i++) {
        double want = (OC % 2 ? b[i % OC] : 0) + (C % 64 ? a[i] : 0.0), magnitude = fabs(want);
        for (int c = 0; c < C; c++) {
            const double product = (double)x[i / OC * C + c] * (double)w.values[i % OC * C + c];
            want += product;
            magnitude += fabs(product);
        }
        EXPECT_NEAR(got[i], want, roundoff<T>() * fabs(want) + (C / 32.0 + 8) * 0x1p-24 * magnitude,
                    "%d x %d x %d, element %d, %s", N, C, OC, i, dtype_name(DTYPE_OF(T)));
    }
    gpu_free(add);
    gpu_free(out);
    gpu_free(bias);
    gpu_free(inp);
    gpu_free(w.memory);
    ops_close("sizes");
}

template <class T> static void test_expand(const Gpu* gpu) {
    enum { OC = 37, C = 96 };
    const Weight w = weight_of(OC, C, gpu);
    float* nothing = ops_floats(OC * C);
    T* out = upload<T>(nothing, OC * C, 0, gpu);
    quantized_expand(out, w.matrix, OC * C, gpu);
    const float* got = download(out, OC * C, gpu);
    for (int i = 0; i < OC * C; i++) {
        EXPECT(got[i] == to_float(from_float<T>(w.values[i])), "element %d is %g, wanted %g", i,
               (double)got[i], (double)w.values[i]);
    }
    gpu_free(out);
    gpu_free(w.memory);
    ops_close("expand");
}

// Rows of tokens, at given positions, in a sequence, and in several: one rounding.
template <class T> static void test_encoder(const Gpu* gpu) {
    enum { V = 11, C = 96, N = 6 };
    const Weight w = weight_of(V, C, gpu);
    const int ids[N] = {10, 0, 3, 7, 1, 9}, places[N] = {4, 0, 5, 2, 2, 1};
    float *p = ops_normal(N * C, 1), *nothing = ops_floats(N * C);
    T *wpe = upload<T>(p, N * C, 0, gpu), *out = upload<T>(nothing, N * C, 0, gpu);
    int *tokens = upload_ints(ids, N, gpu), *given = upload_ints(places, N, gpu);
    // tokens of a sequence; 0: positions are given
    for (int length = 0; length <= N; length += N / 2) {
        const EmbeddingPositions positions = {length ? NULL : given, NULL};
        q8_embedding(out, tokens, w.matrix, wpe,
                     embedding_batch(length ? N / length : 1, length ? length : N, C, positions), gpu);
        const float* got = download(out, N * C, gpu);
        for (int i = 0; i < N * C; i++) {
            const int n = i / C, position = length ? n % length : places[n];
            const float want = w.values[ids[n] * C + i % C] + p[position * C + i % C];
            EXPECT_NEAR(got[i], want, roundoff<T>() * fabs(want), "element %d of %s", i,
                        dtype_name(DTYPE_OF(T)));
        }
    }
    gpu_free(given);
    gpu_free(tokens);
    gpu_free(out);
    gpu_free(wpe);
    gpu_free(w.memory);
    ops_close("encoder");
}

// A row has the same bits whatever other rows there are.
template <class T> static void test_same_bits(const Gpu* gpu) {
    enum { N = QUANTIZED_ROWS, C = 544, OC = 9 };
    const Weight w = weight_of(OC, C, gpu);
    float *x = ops_normal(N * C, 1), *nothing = ops_floats(N * OC);
    T *inp = upload<T>(x, N * C, 0, gpu), *out = upload<T>(nothing, N * OC, 0, gpu);
    q8_matmul(out, (const T*)NULL, inp, w.matrix, (const T*)NULL, {N, C, OC}, gpu);
    const float* together = download(out, N * OC, gpu);
    for (int n = 0; n < N; n++) {
        q8_matmul(out, (const T*)NULL, inp + n * C, w.matrix, (const T*)NULL, {1, C, OC}, gpu);
        EXPECT(ops_same_bits(download(out, OC, gpu), together + n * OC, OC), "row %d", n);
    }
    gpu_free(out);
    gpu_free(inp);
    gpu_free(w.memory);
    ops_close("same bits");
}

template <class T> static void test_type(const Gpu* gpu) {
    const int sizes[][3] = {{1, 32, 1}, {1, 768, 17}, {2, 64, 8}, {4, 544, 5}, {5, 96, 33}, {8, 1056, 6}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        test_size<T>(sizes[i][0], sizes[i][1], sizes[i][2], gpu);
    }
    test_expand<T>(gpu);
    test_encoder<T>(gpu);
    test_same_bits<T>(gpu);
}

TEST_TYPES(q8)
