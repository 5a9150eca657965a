// test_ptx.cu -- ptx.cuh: where each instruction puts every element, and that nothing else changes.
#include <float.h>

#include "llmc/gpu/ptx.cuh"
#include "dev/test/lib/test.h"

// Thread i copies bytes[i] of the i-th 16 bytes, over what was there.
__global__ void cp_async_kernel(unsigned char* out, const unsigned char* from, const int* bytes, int n) {
    SMEM_DYNAMIC(unsigned char, shared);
    for (int i = threadIdx.x; i < 16 * n; i += blockDim.x) {
        shared[i] = 0xEE;
    }
    __syncthreads();
    if ((int)threadIdx.x < n) {
        const size_t nowhere = (size_t)1 << 40; // of no bytes, the address does not matter
        cp_async_16(shared + 16 * threadIdx.x, from + (bytes[threadIdx.x] ? 16 * threadIdx.x : nowhere),
                    bytes[threadIdx.x]);
    }
    cp_async_wait_all();
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * n; i += blockDim.x) { // other threads' copies
        out[i] = shared[16 * n - 1 - i];
    }
}

// Copies two groups, and reads the first one when all but one have arrived.
__global__ void cp_async_groups_kernel(int4* out, const int4* from) {
    SMEM_ARRAY(int4, shared, [64]);
    for (int i = (int)threadIdx.x; i < 64; i += 32) {
        cp_async_16(shared + i, from + i, 16);
        cp_async_commit();
    }
    cp_async_wait<1>();
    out[threadIdx.x] = shared[threadIdx.x];
    cp_async_wait<0>();
    out[32 + threadIdx.x] = shared[32 + threadIdx.x];
}

static void test_cp_async_groups(const Gpu* gpu) {
    int host[256], got[256];
    for (int i = 0; i < 256; i++) {
        host[i] = 1000 + i;
    }
    int4 *from = (int4*)gpu_alloc(64, sizeof(int4), "from"), *out = (int4*)gpu_alloc(64, sizeof(int4), "out");
    gpu_copy(from, host, sizeof(host), gpu);
    launch(cp_async_groups_kernel, 1, 32, 0, gpu, out, from);
    gpu_copy(got, out, sizeof(got), gpu);
    EXPECT(memcmp(got, host, sizeof(got)) == 0, "groups of copies");
    gpu_free(from);
    gpu_free(out);
}

static void test_cp_async(const Gpu* gpu) {
    enum { N = 40 };
    unsigned char host[16 * N], got[16 * N];
    int host_bytes[N];
    for (int i = 0; i < 16 * N; i++) {
        host[i] = (unsigned char)(i % 251 + 1);
    }
    for (int i = 0; i < N; i++) {
        host_bytes[i] = i % 3 == 0 ? 16 : i % 3 == 1 ? 0 : i % 17;
    }
    unsigned char* from = (unsigned char*)gpu_alloc(16 * N, 1, "from");
    unsigned char* out = (unsigned char*)gpu_alloc(16 * N, 1, "out");
    int* bytes = (int*)gpu_alloc(N, sizeof(int), "bytes");
    CUDA_CHECK(cudaMemcpyAsync(from, host, sizeof(host), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaMemcpyAsync(bytes, host_bytes, sizeof(host_bytes), cudaMemcpyHostToDevice, gpu->stream));
    launch(cp_async_kernel, 1, 64, 16 * N, gpu, out, from, bytes, N);
    CUDA_CHECK(cudaMemcpyAsync(got, out, sizeof(got), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (int i = 0; i < 16 * N; i++) {
        const int want = i % 16 < host_bytes[i / 16] ? host[i] : 0;
        EXPECT(got[16 * N - 1 - i] == want, "cp.async of %d bytes: byte %d is %d, wanted %d",
               host_bytes[i / 16], i % 16, got[16 * N - 1 - i], want);
    }
    gpu_free(from);
    gpu_free(out);
    gpu_free(bytes);
}

// Element (row, column) of matrix i has the number 64 i + 8 row + column; the rows lie in shared
// memory in another order, each 16 bytes from the next one. out (2, 32, 4): registers, plain and
// transposed.
__global__ void ldmatrix_kernel(unsigned* out) {
    SMEM_DYNAMIC(uint16_t, shared);
    const int lane = threadIdx.x, at = 16 * (lane * 5 % 32);
    for (int column = 0; column < 8; column++) {
        shared[at + column] = (uint16_t)(8 * lane + column);
        shared[at + 8 + column] = 0xEEEE;
    }
    __syncthreads();
    unsigned r[4];
    ldmatrix_x4(r, shared + at);
    for (int i = 0; i < 4; i++) {
        out[4 * lane + i] = r[i];
    }
    ldmatrix_x4_trans(r, shared + at);
    for (int i = 0; i < 4; i++) {
        out[128 + 4 * lane + i] = r[i];
    }
}

static void test_ldmatrix(const Gpu* gpu) {
    unsigned got[256];
    unsigned* out = (unsigned*)gpu_alloc(256, sizeof(unsigned), "out");
    launch(ldmatrix_kernel, 1, 32, 32 * 32, gpu, out);
    CUDA_CHECK(cudaMemcpyAsync(got, out, sizeof(got), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (int at = 0; at < 128; at++) {
        const int lane = at / 4, i = at % 4, g = lane / 4, t = lane % 4;
        const unsigned plain = 64 * i + 8 * g + 2 * t, transposed = 64 * i + 8 * 2 * t + g;
        EXPECT(got[at] == (plain | (plain + 1) << 16), "ldmatrix: r[%d] of lane %d is %x", i, lane, got[at]);
        EXPECT(got[128 + at] == (transposed | (transposed + 8) << 16),
               "ldmatrix.trans: r[%d] of lane %d is %x", i, lane, got[128 + at]);
    }
    gpu_free(out);
}

template <class T> __device__ unsigned pair(float low, float high) {
    const T x[2] = {from_float<T>(low), from_float<T>(high)};
    return *reinterpret_cast<const unsigned*>(x);
}

// d (16, 8) = c + a (16, 16) b (16, 8), matrices of floats, by one warp.
template <class T> __global__ void mma_kernel(float* d, const float* c, const float* a, const float* b) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    unsigned left[4], right[2];
    float sum[4];
    for (int i = 0; i < 4; i++) {
        const float* at = a + 16 * (g + 8 * (i % 2)) + 2 * t + 8 * (i / 2);
        left[i] = pair<T>(at[0], at[1]);
        sum[i] = c[8 * (g + 8 * (i / 2)) + 2 * t + i % 2];
    }
    for (int i = 0; i < 2; i++) {
        const float* at = b + 8 * (2 * t + 8 * i) + g;
        right[i] = pair<T>(at[0], at[8]);
    }
    mma_16816<T>(sum, left, right[0], right[1]);
    for (int i = 0; i < 4; i++) {
        d[8 * (g + 8 * (i / 2)) + 2 * t + i % 2] = sum[i];
    }
}

enum { D = 0, C = 128, A = 256, B = 512, ALL = 640 }; // where the four matrices are in one array

template <class T>
static void expect_mma(const Gpu* gpu, float* device, const float* host, const char* what) {
    float got[128];
    CUDA_CHECK(cudaMemcpyAsync(device, host, ALL * sizeof(float), cudaMemcpyHostToDevice, gpu->stream));
    launch(mma_kernel<T>, 1, 32, 0, gpu, device + D, device + C, device + A, device + B);
    CUDA_CHECK(cudaMemcpyAsync(got, device + D, sizeof(got), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (int i = 0; i < 128; i++) {
        float want = host[C + i];
        for (int k = 0; k < 16; k++) {
            want += host[A + i / 8 * 16 + k] * host[B + 8 * k + i % 8];
        }
        EXPECT(got[i] == want, "mma of %s, %s: (%d, %d) is %g, wanted %g", dtype_name(DTYPE_OF(T)), what,
               i / 8, i % 8, got[i], want);
    }
}

// Small integers, so that all sums are exact. A single 1 in a or b shows where each element of it
// goes.
template <class T> static void test_mma(const Gpu* gpu) {
    float host[ALL];
    float* device = (float*)gpu_alloc(ALL, sizeof(float), "matrices");
    for (int i = 0; i < ALL; i++) {
        host[i] = (float)(i * 37 % 23) - 11;
    }
    expect_mma<T>(gpu, device, host, "full");
    for (int one = A; one < ALL; one += 5) {
        for (int i = 0; i < ALL; i++) {
            host[i] =
                i >= (one < B ? B : A) && i < (one < B ? ALL : B) ? (float)(i % 128 + 1) : (float)(i == one);
        }
        expect_mma<T>(gpu, device, host, "one");
    }
    gpu_free(device);
}

__global__ void exp2_kernel(float* y, const float* x) { y[threadIdx.x] = exp2_approx(x[threadIdx.x]); }

static void test_exp2(const Gpu* gpu) {
    const float host[12] = {0, 1, -1, 10, -100, 0.5f, -0.3f, 126.9f, -125.9f, -INFINITY, -150, NAN};
    float got[12];
    float *x = (float*)gpu_alloc(12, sizeof(float), "x"), *y = (float*)gpu_alloc(12, sizeof(float), "y");
    CUDA_CHECK(cudaMemcpyAsync(x, host, sizeof(host), cudaMemcpyHostToDevice, gpu->stream));
    launch(exp2_kernel, 1, 12, 0, gpu, y, x);
    CUDA_CHECK(cudaMemcpyAsync(got, y, sizeof(got), cudaMemcpyDeviceToHost, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    for (int i = 0; i < 9; i++) {
        EXPECT_NEAR(got[i], exp2((double)host[i]), exp2((double)host[i]) * 0x1p-22, "2^%g", host[i]);
    }
    EXPECT(got[9] == 0 && got[10] == 0 && isnan(got[11]), "2^-inf %g, 2^-150 %g, 2^NaN %g", got[9], got[10],
           got[11]);
    gpu_free(x);
    gpu_free(y);
}

__global__ void e4m3_kernel(uint8_t* codes, const float* x, int n) {
    for (int i = 2 * (int)threadIdx.x; i < n; i += 2 * (int)blockDim.x) {
        const unsigned two = e4m3_from_floats(x[i], x[i + 1]);
        codes[i] = (uint8_t)two;
        codes[i + 1] = (uint8_t)(two >> 8);
    }
}

// All numbers of bf16, and the fp32 numbers beside them.
static void test_e4m3(const Gpu* gpu) {
    enum { N = 3 * 65536 };
    float* x = (float*)check_alloc(N, sizeof(float), "numbers");
    uint8_t* got = (uint8_t*)check_alloc(N, 1, "codes");
    for (int i = 0; i < N; i++) {
        x[i] = float_of_bits(((uint32_t)(i / 3) << 16) + (uint32_t)(i % 3) - 1);
    }
    float* from = (float*)gpu_alloc(N, sizeof(float), "numbers");
    uint8_t* codes = (uint8_t*)gpu_alloc(N, 1, "codes");
    gpu_copy(from, x, N * sizeof(float), gpu);
    launch(e4m3_kernel, 1, 128, 0, gpu, codes, (const float*)from, (int)N);
    gpu_copy(got, codes, N, gpu);
    for (int i = 0; i < N; i++) {
        EXPECT(got[i] == e4m3_from_float(x[i]), "e4m3 of %a is %02x, wanted %02x", (double)x[i], got[i],
               e4m3_from_float(x[i]));
    }
    gpu_free(codes);
    gpu_free(from);
    free(got);
    free(x);
}

TEST(ptx) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_e4m3(&gpu);
    test_cp_async(&gpu);
    test_cp_async_groups(&gpu);
    test_ldmatrix(&gpu);
    test_mma<bf16>(&gpu);
    test_mma<fp16>(&gpu);
    test_exp2(&gpu);
    gpu_close(&gpu);
}
