// test_wgmma.cu -- where wgmma looks for an operand by its descriptor, and where TMA has put it:
// both by the rules of the PTX ISA manual, element by element; and matmuls of both.
#include "llmc/gpu/wgmma.cuh"
#include "dev/test/lib/test.h"

// Returns the place of an element of a panel, as TMA swizzles.
static unsigned tma_bytes(int row, int col) {
    return (unsigned)(row * 128 + (col / 8 ^ row % 8) * 16 + col % 8 * 2);
}

// Returns the address of element i of a side in step k, by TMA, of a tile at `base`.
static unsigned tma_address(unsigned base, int i, int k, int is_across) {
    return base + (is_across ? i / 64 * (64 * 128) + tma_bytes(k, i % 64) : tma_bytes(i, k));
}

// Returns it in a matmul of 16 steps, by a descriptor: rows of 128 bytes, eight of which lie as bit
// 32 says from the next eight; if sums cross rows, 64 elements lie as bit 16 says from the next 64.
// In the address, bits 4 to 6 change by bits 7 to 9.
static unsigned wgmma_address(uint64_t descriptor, int i, int k, int is_across) {
    const unsigned start = (unsigned)(descriptor & 0x3fff) << 4,
                   panel = (unsigned)(descriptor >> 16 & 0x3fff) << 4,
                   eight = (unsigned)(descriptor >> 32 & 0x3fff) << 4;
    const int row = is_across ? k : i, col = is_across ? i % 64 : k;
    const unsigned address =
        start + (is_across ? i / 64 * panel : 0) + row / 8 * eight + (unsigned)(row % 8 * 128 + col * 2);
    return address ^ (address >> 7 & 7) << 4;
}

TEST(wgmma_descriptors) {
    const unsigned bases[] = {1024, 16 << 10, 215 << 10};
    for (int is_across = 0; is_across < 2; is_across++) {
        for (const unsigned base : bases) {
            for (int k = 0; k < WGMMA_DEPTH; k++) {
                const uint64_t descriptor =
                    wgmma_descriptor(base, is_across * WGMMA_DEPTH) + k / 16 * wgmma_step(is_across);
                EXPECT(descriptor >> 62 == 1 && (descriptor >> 46 & 0xffff) == 0, "swizzle and offset");
                for (int i = 0; i < 256; i++) {
                    const unsigned got = wgmma_address(descriptor, i, k % 16, is_across),
                                   want = tma_address(base, i, k, is_across);
                    EXPECT(got == want, "element %d, step %d of a tile at %u, %s: address %u, wanted %u", i,
                           k, base, is_across ? "across" : "along", got, want);
                }
            }
        }
    }
}

#if PTX_HAS_WGMMA

// Copies an operand of `side` elements and 64 steps.
static __device__ void load_operand(unsigned char* to, const CUtensorMap* map, int side, int is_across,
                                    uint64_t* full) {
    for (int i = 0; i < (is_across ? side : 1); i += WGMMA_PANEL) {
        tma_load_3d(to + i * 128, map, i, 0, 0, full);
    }
}

// Sets d (64, N) = 2 a b, with a (64, 64) and b (64, N), added up in two parts; a passes through
// registers the second time, if its sums lie along the rows.
template <class T, int A_ACROSS, int B_ACROSS, int N>
__global__ void wgmma_kernel(const __grid_constant__ CUtensorMap a_map,
                             const __grid_constant__ CUtensorMap b_map, float* d) {
    SMEM_DYNAMIC(unsigned char, memory);
    SMEM_ARRAY(uint64_t, full, [1]);
    unsigned char *a = memory + (1024 - ptx_shared_address(memory) % 1024) % 1024, *b = a + 64 * 128;
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_publish();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(full, (64 + N) * 128);
        load_operand(a, &a_map, 64, A_ACROSS, full);
        load_operand(b, &b_map, N, B_ACROSS, full);
    }
    mbarrier_wait(full, 0);
    const uint64_t left = wgmma_descriptor(ptx_shared_address(a), A_ACROSS * 64),
                   right = wgmma_descriptor(ptx_shared_address(b), B_ACROSS * 64);
    float sums[N / 8][4];
    unsigned registers[4][4];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        wgmma<T, A_ACROSS, B_ACROSS>(sums, left + k * wgmma_step(A_ACROSS), right + k * wgmma_step(B_ACROSS),
                                     k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(sums);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int row = 16 * warp + lane % 16, chunk = 2 * k + lane / 16;
        ldmatrix_x4(registers[k], a + row * 128 + (chunk ^ row % 8) * 16);
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if constexpr (A_ACROSS || N > 128) {
            wgmma<T, A_ACROSS, B_ACROSS>(sums, left + k * wgmma_step(A_ACROSS),
                                         right + k * wgmma_step(B_ACROSS), 1);
        } else {
            wgmma_of_registers<T, B_ACROSS>(sums, registers[k], right + k * wgmma_step(B_ACROSS), 1);
        }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(sums);
    for (int i = 0; i < N / 2; i++) {
        const int row = 16 * warp + lane / 4 + 8 * (i % 4 / 2), col = i / 4 * 8 + lane % 4 * 2 + i % 2;
        d[row * N + col] = sums[i / 4][i % 4];
    }
}

// Element i of a side in step k: small numbers, whose sums are exact.
static int element(int i, int k, int seed) { return (i * 7 + k * (seed + 3) + i * k % 5) % 9 - 4; }

// Returns a map of `side` elements with 64 steps, on the GPU.
template <class T> static CUtensorMap operand(int side, int is_across, int seed, T** data, const Gpu* gpu) {
    static T host[256 * 64];
    for (int i = 0; i < side * 64; i++) {
        const int side_i = is_across ? i % side : i / 64, k = is_across ? i / side : i % 64;
        host[i] = from_float<T>((float)element(side_i, k, seed));
    }
    *data = (T*)gpu_alloc((size_t)side * 64, sizeof(T), "operand");
    gpu_copy(*data, host, (size_t)side * 64 * sizeof(T), gpu);
    return is_across ? tensor_map(*data, side, 64, 1, side, 64) : tensor_map(*data, 64, side, 1, 64, side);
}

template <class T, int A_ACROSS, int B_ACROSS, int N> static void test_matmul(const Gpu* gpu) {
    static float got[64 * 256];
    T *a, *b;
    const CUtensorMap a_map = operand(64, A_ACROSS, 1, &a, gpu), b_map = operand(N, B_ACROSS, 2, &b, gpu);
    float* d = (float*)gpu_alloc(64 * N, sizeof(float), "d");
    launch(wgmma_kernel<T, A_ACROSS, B_ACROSS, N>, 1, 128, 1024 + (64 + N) * 128, gpu, a_map, b_map, d);
    gpu_copy(got, d, 64 * N * sizeof(float), gpu);
    for (int i = 0; i < 64 * N; i++) {
        int want = 0;
        for (int k = 0; k < 64; k++) {
            want += 2 * element(i / N, k, 1) * element(i % N, k, 2);
        }
        EXPECT(got[i] == (float)want, "%s, across %d %d, %d columns: (%d, %d) is %g, wanted %d",
               dtype_name(DTYPE_OF(T)), A_ACROSS, B_ACROSS, N, i / N, i % N, got[i], want);
    }
    gpu_free(a);
    gpu_free(b);
    gpu_free(d);
}

template <class T, int N> static void test_matmuls(const Gpu* gpu) {
    test_matmul<T, 0, 0, N>(gpu);
    test_matmul<T, 0, 1, N>(gpu);
    test_matmul<T, 1, 0, N>(gpu);
    test_matmul<T, 1, 1, N>(gpu);
}

TEST(wgmma) {
    Gpu gpu;
    gpu_open(&gpu, 0);
    test_matmuls<bf16, 64>(&gpu);
    test_matmuls<bf16, 128>(&gpu);
    test_matmuls<bf16, 256>(&gpu);
    test_matmuls<fp16, 64>(&gpu);
    test_matmuls<fp16, 128>(&gpu);
    gpu_close(&gpu);
}

#endif
