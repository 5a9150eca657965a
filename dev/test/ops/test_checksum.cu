// test_checksum.cu -- the GPU's checksum against the CPU's.
#include "llmc/base/check.h"
#include "llmc/base/rand.h"
#include "llmc/ops/checksum.cuh"

#include "dev/test/lib/test.h"

static void test_count(size_t count, const Gpu* gpu) {
    uint64_t* words = (uint64_t*)check_alloc(count + 1, sizeof(uint64_t), "words");
    uint64_t* on_gpu = (uint64_t*)gpu_alloc(count + 1, sizeof(uint64_t), "words");
    unsigned long long* sum = (unsigned long long*)gpu_alloc(1, sizeof(*sum), "sum");
    unsigned long long found = 1;
    Rand rng = rand_open(count, 0);
    for (size_t i = 0; i < count; i++) {
        words[i] = (uint64_t)rand_u32(&rng) << 32 | rand_u32(&rng);
    }
    CUDA_CHECK(cudaMemcpyAsync(on_gpu, words, count * sizeof(uint64_t), cudaMemcpyDefault, gpu->stream));
    for (int i = 0; i < 2; i++) { // it is set, not added to
        checksum_words(sum, on_gpu, count, 5, gpu);
    }
    CUDA_CHECK(cudaMemcpyAsync(&found, sum, sizeof(found), cudaMemcpyDefault, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    EXPECT(found == checksum_words_cpu(words, count, 5), "of %zu words", count);
    gpu_free(sum);
    gpu_free(on_gpu);
    free(words);
}

TEST(checksum) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    const size_t counts[] = {0, 1, 31, 33, 255, 1024, 300001};
    for (size_t count : counts) {
        test_count(count, &gpu);
    }
    gpu_close(&gpu);
}
