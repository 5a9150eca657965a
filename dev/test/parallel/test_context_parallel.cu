// test_context_parallel.cu -- the kernels of context_parallel.cuh: keys and values of all ranks in
// the order of the sequence, and the sums of their gradients. test_collectives.cu has several
// ranks.
#include "llmc/parallel/context_parallel.cuh"
#include "dev/test/lib/attention_ranks.h"
#include "dev/test/lib/gpu_ops.h"

static AttentionSizes rank_of(AttentionSizes sizes, int rank) {
    sizes.chunks.rank = rank;
    return sizes;
}

// Each rank takes the keys and values of its rows; put together they are those of the whole
// sequences. Placed back, they are the rows of the ranks again.
template <class T> static void test_gather(AttentionSizes sizes, const Gpu* gpu) {
    const ContextRows_ rows = context_rows_(sizes);
    const int ranks = sizes.chunks.last + 1;
    const size_t QKV = (size_t)attention_qkv_size(sizes), own = rows.N * rows.columns, all = ranks * own;
    const float* qkv = normal<T>(ranks * rows.N * QKV, 1);
    T *moved = unset<T>(all, gpu), *kv = unset<T>(all, gpu), *back = unset<T>(all, gpu);
    for (int r = 0; r < ranks; r++) {
        float* of_rank = (float*)attention_rows_of(rank_of(sizes, r), qkv, QKV);
        T* on_gpu = upload<T>(of_rank, rows.N * QKV, 0, gpu);
        context_take_(moved + r * own, (const T*)on_gpu, rows, gpu);
        CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
        gpu_free(on_gpu);
    }
    context_place_(kv, (const T*)moved, rows, ranks, CONTEXT_TO_SEQUENCE_, gpu);
    context_place_(back, (const T*)kv, rows, ranks, CONTEXT_TO_RANKS_, gpu);
    const float* taken = download(moved, all, gpu);
    EXPECT(ops_same_bits(take_back(kv, all, gpu), attention_gathered(sizes, qkv, ranks * rows.N), all),
           "%d ranks of %d tokens, %s", ranks, sizes.T, dtype_name(DTYPE_OF(T)));
    EXPECT(ops_same_bits(take_back(back, all, gpu), taken, all), "%d ranks of %d tokens, back", ranks,
           sizes.T);
    gpu_free(moved);
    ops_close("gather");
}

// Columns of queries stay as they are; the others are the sums in fp32 in the order of ranks,
// rounded once.
template <class T> static void test_sum(AttentionSizes sizes, const Gpu* gpu) {
    const ContextRows_ rows = context_rows_(sizes);
    const int ranks = sizes.chunks.last + 1;
    const size_t Q = (size_t)attention_queries_size(sizes), QKV = (size_t)attention_qkv_size(sizes),
                 own = rows.N * rows.columns;
    float *pieces = ops_normal(ranks * own, 1), *before = ops_normal(rows.N * QKV, 1);
    T *d_pieces = upload<T>(pieces, ranks * own, 0, gpu), *dqkv = upload<T>(before, rows.N * QKV, 0, gpu);
    context_add_(dqkv, (const T*)d_pieces, ranks, rows, gpu);
    const float* got = take_back(dqkv, rows.N * QKV, gpu);
    int others = 0;
    for (size_t i = 0; i < rows.N * QKV; i++) {
        const size_t n = i / QKV, column = i % QKV;
        float want = column < Q ? before[i] : 0;
        for (int r = 0; r < ranks && column >= Q; r++) {
            want += pieces[r * own + n * rows.columns + column - Q];
        }
        others += got[i] != to_float(from_float<T>(want));
    }
    EXPECT(others == 0, "%d ranks of %d tokens, %s: %d of %zu elements", ranks, sizes.T,
           dtype_name(DTYPE_OF(T)), others, rows.N * QKV);
    gpu_free(d_pieces);
    ops_close("sum");
}

// 1e8 + 1 - 1e8 is 0 in fp32, in any other order 1.
static void test_order(const Gpu* gpu) {
    const AttentionSizes sizes = {1, 1, 1, 1, 1, 1, {2, 0}};
    float pieces[] = {1e8f, 1e8f, 1, 1, -1e8f, -1e8f}; // (3 ranks, 1, key and value)
    float *d_pieces = upload<float>(pieces, 6, 0, gpu), *dqkv = unset<float>(3, gpu);
    context_add_(dqkv, (const float*)d_pieces, 3, context_rows_(sizes), gpu);
    const float* got = take_back(dqkv, 3, gpu);
    EXPECT(isnan(got[0]) && got[1] == 0 && got[2] == 0, "the order of ranks: %g %g", got[1], got[2]);
    gpu_free(d_pieces);
    ops_close("order");
}

// Cases with heads of multiples of 8 take 16 bytes at a time.
template <class T> static void test_type(const Gpu* gpu) {
    const AttentionSizes cases[] = {{1, 2, 1, 1, 1, 1, {1, 0}},   {3, 6, 4, 2, 5, 1, {1, 0}},
                                    {2, 10, 3, 1, 31, 1, {3, 0}}, {2, 6, 3, 1, 8, 1, {2, 0}},
                                    {1, 4, 5, 5, 136, 1, {1, 0}}, // more than 128 threads take
                                    {1, 34, 2, 2, 33, 1, {6, 0}}};
    for (const AttentionSizes sizes : cases) {
        test_gather<T>(sizes, gpu);
        test_sum<T>(sizes, gpu);
    }
}

TEST_TYPES(context_parallel)

TEST(context_parallel_order) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_order(&gpu);
    gpu_close(&gpu);
}
