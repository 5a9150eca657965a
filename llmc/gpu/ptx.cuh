/*
ptx.cuh -- one function per PTX instruction: inline assembly for nvcc, plain C++ for the CPU device.

The twin of an instruction is our reading of the PTX ISA manual; dev/test/gpu/test_ptx.cu checks
both against the same tables, element by element. Lane l of a warp has g = l / 4 and t = l % 4; a
register of type unsigned holds two 16-bit elements, the lower half first. The operands of mma_16816
lie at

    a[i]   (16, 16)   row g + 8 (i % 2),   columns 2t + 8 (i / 2) and the next
    b[i]   (16, 8)    rows 2t + 8 i and the next,   column g
    d[i]   (16, 8)    row g + 8 (i / 2),   column 2t + i % 2
*/
#ifndef LLMC_PTX_CUH
#define LLMC_PTX_CUH

#include <float.h>

#include "llmc/gpu/gpu.cuh"

#ifdef __CUDACC__

__device__ inline unsigned ptx_shared_address_(const void* p) {
    return (unsigned)__cvta_generic_to_shared(p);
}

// Starts to copy `bytes` (0 ... 16) from global to shared memory, bypassing the L1 cache and the
// registers; the rest of the 16 bytes at `to` become 0. Both addresses are multiples of 16. If
// `bytes` is 0, `from` is not read and may point anywhere.
__device__ inline void cp_async_16(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(ptx_shared_address_(to)), "l"(from),
                 "r"(bytes)
                 : "memory");
}

// Waits for the copies that this thread started; those of others are complete after the next
// barrier.
__device__ inline void cp_async_wait_all(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Makes a group of the copies that this thread started since its last group.
__device__ inline void cp_async_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread but the last GROUPS.
template <int GROUPS> __device__ inline void cp_async_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements from shared memory: lane 8i+j gives the address of row
// j of matrix i, a multiple of 16 bytes; r[i] of lane l becomes elements 2t and 2t+1 of row g of
// matrix i.
__device__ inline void ldmatrix_x4(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(ptx_shared_address_(row))
                 : "memory");
}

// Loads them transposed: r[i] becomes elements g of rows 2t and 2t+1 of matrix i.
__device__ inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(ptx_shared_address_(row))
                 : "memory");
}

// Adds a b to d, for elements of type T, with sums in fp32.
template <class T>
__device__ inline void mma_16816(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <>
__device__ inline void mma_16816<bf16>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void mma_16816<fp16>(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Returns 2^x with a relative error below 2^-22; results below the smallest normal number are 0.
__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#else

inline void cp_async_16(void* to, const void* from, int bytes) { cusim_cp_async(to, from, 16, bytes); }

inline void cp_async_wait_all(void) {
    cusim_cp_async_commit();
    cusim_cp_async_wait(0);
}

inline void cp_async_commit(void) { cusim_cp_async_commit(); }

template <int GROUPS> inline void cp_async_wait(void) { cusim_cp_async_wait(GROUPS); }

// Sets a lane's part of matrix i: elements `first` and `second`, numbered along the rows.
inline void ptx_ldmatrix_(unsigned (&r)[4], const void* row, int first_row, int first_column, int second_row,
                          int second_column, CUSIM_LOC) {
    if ((uintptr_t)row % 16) {
        cusim_die("%s:%d: ldmatrix: the address of a row is no multiple of 16", CUSIM_L);
    }
    const unsigned char* all = cusim_warp_exchange(CUSIM_LDM, 0xffffffffu, &row, sizeof(row), CUSIM_L);
    for (int i = 0; i < 4; i++) {
        const uint16_t *first, *second;
        memcpy(&first, all + 16 * (8 * i + first_row), sizeof(first));
        memcpy(&second, all + 16 * (8 * i + second_row), sizeof(second));
        r[i] = first[first_column] | (unsigned)second[second_column] << 16;
    }
}

inline void ldmatrix_x4(unsigned (&r)[4], const void* row, CUSIM_LOC) {
    const int g = (int)cusim_lane() / 4, t = (int)cusim_lane() % 4;
    ptx_ldmatrix_(r, row, g, 2 * t, g, 2 * t + 1, CUSIM_L);
}

inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row, CUSIM_LOC) {
    const int g = (int)cusim_lane() / 4, t = (int)cusim_lane() % 4;
    ptx_ldmatrix_(r, row, 2 * t, g, 2 * t + 1, g, CUSIM_L);
}

// Registers of a lane in a matmul: inputs a and b, input and output d.
struct PtxMma_ {
    unsigned a[4], b[2];
    float d[4];
};
typedef float PtxRow_ __attribute__((vector_size(32))); // of eight columns

// Computes the matmul of a whole warp, in one lane. It accesses the registers of the others, which
// wait: these are no memory accesses, so ThreadSanitizer does not look.
template <class T> __attribute__((no_sanitize("thread"))) void ptx_mma_(void* const lanes[32]) {
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const int g = lane / 4, t = lane % 4;
        const PtxMma_ mine = *(const PtxMma_*)lanes[lane];
        float left[8], right[8];
        unpack<T>(left, make_int4((int)mine.a[0], (int)mine.a[1], (int)mine.a[2], (int)mine.a[3]));
        unpack<T>(right, make_int4((int)mine.b[0], (int)mine.b[1], 0, 0));
        for (int i = 0; i < 4; i++) {
            memcpy(&a[g + 8 * (i % 2)][2 * t + 8 * (i / 2)], left + 2 * i, 2 * sizeof(float));
            b[2 * t + 8 * (i / 2) + i % 2][g] = right[i];
            d[g + 8 * (i / 2)][2 * t + i % 2] = mine.d[i];
        }
    }
    PtxRow_ columns[16];
    memcpy(columns, b, sizeof(columns));
    for (int row = 0; row < 16; row++) {
        PtxRow_ sum;
        memcpy(&sum, d[row], sizeof(sum));
        for (int k = 0; k < 16; k++) {
            sum += a[row][k] * columns[k];
        }
        memcpy(d[row], &sum, sizeof(sum));
    }
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 4; i++) {
            ((PtxMma_*)lanes[lane])->d[i] = d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
        }
    }
}

template <class T>
inline void mma_16816(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, CUSIM_LOC) {
    PtxMma_ mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    cusim_warp_together(CUSIM_MMA, &mine, ptx_mma_<T>, CUSIM_L);
    memcpy(d, mine.d, sizeof(mine.d));
}

inline float exp2_approx(float x) {
    const float y = exp2f(x);
    return y < FLT_MIN ? 0.0f : y;
}

#endif

#endif
