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

#include "llmc/base/float8.h"
#include "llmc/gpu/gpu.cuh"

// Set if kernels are for compute capability 9.0 (ARCH=sm_90a): no other GPU has wgmma.
#if GPU_SM == 90
#define PTX_HAS_WGMMA 1
#include <cuda.h>
#else
#define PTX_HAS_WGMMA 0
#endif

#if defined(__CUDACC__) && GPU_SM >= 89
// Returns a pair of codes (float8.h), with `low` in the lower byte.
__device__ inline unsigned e4m3_from_floats(float low, float high) {
    unsigned short two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
    return two;
}
#else
__device__ inline unsigned e4m3_from_floats(float low, float high) {
    return e4m3_from_float(low) | (unsigned)e4m3_from_float(high) << 8;
}
#endif

#ifdef __CUDACC__

__device__ inline unsigned ptx_shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Starts to copy `bytes` (0 ... 16) from global to shared memory, bypassing the L1 cache and the
// registers; the rest of the 16 bytes at `to` become 0. Both addresses are multiples of 16. If
// `bytes` is 0, `from` is not read and may point anywhere.
__device__ inline void cp_async_16(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(ptx_shared_address(to)), "l"(from),
                 "r"(bytes)
                 : "memory");
}

// Waits for the copies that this thread started; other threads' are complete after the next
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
                 : "r"(ptx_shared_address(row))
                 : "memory");
}

// Loads them transposed: r[i] becomes elements g of rows 2t and 2t+1 of matrix i.
__device__ inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(ptx_shared_address(row))
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

#if PTX_HAS_WGMMA

// ---- barriers in shared memory, 8 bytes each, which also count bytes that TMA has copied ----

// Sets a barrier up for phases of `count` arrivals each. One thread calls it for all, then
// mbarrier_publish, then the block needs a barrier of its own.
__device__ inline void mbarrier_init(uint64_t* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ptx_shared_address(barrier)), "r"(count)
                 : "memory");
}

// Makes new barriers visible to TMA.
__device__ inline void mbarrier_publish(void) {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ inline void mbarrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ptx_shared_address(barrier)) : "memory");
}

// Arrives; the phase then ends only after `bytes` have come as well.
__device__ inline void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ptx_shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Waits until the phase of this parity has ended. In a new barrier, an imagined phase of parity 1
// before the first has already ended. With PTX_WAIT_LIMIT a wait that never ends stops the kernel
// after some seconds.
__device__ inline void mbarrier_wait(uint64_t* barrier, int parity) {
#ifdef PTX_WAIT_LIMIT
    unsigned polls = 0;
#endif
    unsigned has_ended = 0;
    while (!has_ended) {
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}"
                     : "=r"(has_ended)
                     : "r"(ptx_shared_address(barrier)), "r"(parity)
                     : "memory");
#ifdef PTX_WAIT_LIMIT
        if (++polls == 1u << 26) {
            __trap();
        }
#endif
    }
}

// Lets COUNT threads of a block wait for each other. Barriers have ids from 1 to 15.
template <int COUNT> __device__ inline void barrier_of(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}

// Sets the number of registers of each thread of this warpgroup; all its threads call it. Fewer
// than before: it gives the rest to the block; more: it waits for them. Kernels need
// __launch_bounds__ with a number of blocks.
template <int COUNT> __device__ inline void registers_fewer(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ inline void registers_more(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- TMA, and wgmma ----

// Start to copy the box at (x, y, z) or (x, y, z, w) of a tensor to shared memory, a multiple of
// 1024 bytes; they tell the barrier of its bytes. Elements outside of the tensor become 0, and
// count as copied.
__device__ inline void tma_load_3d(void* to, const CUtensorMap* map, int x, int y, int z, uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(ptx_shared_address(to)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(ptx_shared_address(barrier))
                 : "memory");
}
__device__ inline void tma_load_4d(void* to, const CUtensorMap* map, int x, int y, int z, int w,
                                   uint64_t* barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(ptx_shared_address(to)),
                 "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(ptx_shared_address(barrier))
                 : "memory");
}

// Starts to copy bytes to shared memory; addresses and their number are multiples of 16.
__device__ inline void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            ptx_shared_address(to)),
        "l"(from), "r"(bytes), "r"(ptx_shared_address(barrier))
        : "memory");
}

// Stores to shared memory for later access by TMA or wgmma: after a fence_async of this thread, and
// a barrier after that.
template <class T> __device__ inline void store_for_async(T* to, const T& value) { *to = value; }

// Orders this thread's stores to shared memory before accesses by TMA and wgmma after the next
// barrier.
__device__ inline void fence_async(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders accesses to sums and operands in registers, and stores before, before the next wgmma.
__device__ inline void wgmma_fence(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Makes a group of the matmuls since the last one.
__device__ inline void wgmma_commit(void) { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all groups but the last GROUPS.
template <int GROUPS> __device__ inline void wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// Keeps the compiler from reading the sums before this place.
template <int N> __device__ inline void wgmma_settle(float (&d)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) {
        asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
    }
}

// Start d = a b, or d += a b if `adds`: b (16, 8 N) by its descriptor (wgmma.cuh), a (64, 16) by
// descriptor or in registers. Warp w of the warpgroup has rows 16w to 16w + 15 of a and d, laid out
// as in mma_16816. TRANS_A: the rows of a are neighbors in memory; TRANS_B: the columns of b.
// Nothing may access d, nor change a, before a wait.
#define PTX_FOUR_(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define PTX_16_(i) PTX_FOUR_(i), PTX_FOUR_(i + 1), PTX_FOUR_(i + 2), PTX_FOUR_(i + 3)
#define PTX_32_(i) PTX_16_(i), PTX_16_(i + 4)
#define PTX_64_(i) PTX_32_(i), PTX_32_(i + 8)
#define PTX_WGMMA_(columns, type, registers, left, right, adds, trans)                                       \
    "{\n"                                                                                                    \
    ".reg .pred p;\n"                                                                                        \
    "setp.ne.b32 p, " adds ", 0;\n"                                                                          \
    "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" registers "}, " left           \
    ", " right ", p, 1, 1, " trans ";\n"                                                                     \
    "}"
#define PTX_128_(i) PTX_64_(i), PTX_64_(i + 16)
#define PTX_WGMMA_TYPED_(text, sums, ...)                                                                    \
    if constexpr (DTYPE_OF(T) == DTYPE_BF16) {                                                               \
        asm volatile(text("bf16") : sums(0) : __VA_ARGS__);                                                  \
    } else {                                                                                                 \
        asm volatile(text("f16") : sums(0) : __VA_ARGS__);                                                   \
    }
// clang-format off
#define PTX_NUMBERS_32_ \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PTX_NUMBERS_64_ PTX_NUMBERS_32_ \
        ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PTX_NUMBERS_128_ PTX_NUMBERS_64_ \
        ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PTX_WGMMA_64_(type) PTX_WGMMA_("64", type, PTX_NUMBERS_32_, "%32", "%33", "%34", "%35, %36")
#define PTX_WGMMA_128_(type) PTX_WGMMA_("128", type, PTX_NUMBERS_64_, "%64", "%65", "%66", "%67, %68")
#define PTX_WGMMA_256_(type) PTX_WGMMA_("256", type, PTX_NUMBERS_128_, "%128", "%129", "%130", "%131, %132")
#define PTX_WGMMA_OF_64_(type) PTX_WGMMA_("64", type, PTX_NUMBERS_32_, "{%32, %33, %34, %35}", "%36", "%37", "%38")
#define PTX_WGMMA_OF_128_(type) PTX_WGMMA_("128", type, PTX_NUMBERS_64_, "{%64, %65, %66, %67}", "%68", "%69", "%70")
#define PTX_WGMMA_OF_256_(type) PTX_WGMMA_("256", type, PTX_NUMBERS_128_, "{%128, %129, %130, %131}", "%132", "%133", "%134")
// clang-format on
template <class T, int TRANS_A, int TRANS_B, int N>
__device__ inline void wgmma(float (&d)[N][4], uint64_t a, uint64_t b, int adds) {
    static_assert(N == 8 || N == 16 || N == 32, "64, 128 or 256 columns");
    if constexpr (N == 8) {
        PTX_WGMMA_TYPED_(PTX_WGMMA_64_, PTX_32_, "l"(a), "l"(b), "r"(adds), "n"(TRANS_A), "n"(TRANS_B));
    } else if constexpr (N == 16) {
        PTX_WGMMA_TYPED_(PTX_WGMMA_128_, PTX_64_, "l"(a), "l"(b), "r"(adds), "n"(TRANS_A), "n"(TRANS_B));
    } else {
        PTX_WGMMA_TYPED_(PTX_WGMMA_256_, PTX_128_, "l"(a), "l"(b), "r"(adds), "n"(TRANS_A), "n"(TRANS_B));
    }
}
template <class T, int TRANS_B, int N>
__device__ inline void wgmma_of_registers(float (&d)[N][4], const unsigned (&a)[4], uint64_t b, int adds) {
    static_assert(N == 8 || N == 16 || N == 32, "64, 128 or 256 columns");
    if constexpr (N == 8) {
        PTX_WGMMA_TYPED_(PTX_WGMMA_OF_64_, PTX_32_, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                         "r"(adds), "n"(TRANS_B));
    } else if constexpr (N == 16) {
        PTX_WGMMA_TYPED_(PTX_WGMMA_OF_128_, PTX_64_, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                         "r"(adds), "n"(TRANS_B));
    } else {
        PTX_WGMMA_TYPED_(PTX_WGMMA_OF_256_, PTX_128_, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
                         "r"(adds), "n"(TRANS_B));
    }
}

#endif

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

#if PTX_HAS_WGMMA

inline unsigned ptx_shared_address(const void* p, CUSIM_LOC) { return cusim_shared_address(p, CUSIM_L); }

inline void mbarrier_init(uint64_t* barrier, int count) { cusim_mbar_init(barrier, (unsigned)count); }
inline void mbarrier_publish(void) { cusim_mbar_publish(); }
inline void mbarrier_arrive(uint64_t* barrier, CUSIM_LOC) { cusim_mbar_arrive(barrier, 0, CUSIM_L); }
inline void mbarrier_arrive_expect(uint64_t* barrier, int bytes, CUSIM_LOC) {
    cusim_mbar_arrive(barrier, (unsigned)bytes, CUSIM_L);
}
inline void mbarrier_wait(uint64_t* barrier, int parity, CUSIM_LOC) {
    cusim_mbar_wait(barrier, (unsigned)parity, CUSIM_L);
}

template <int COUNT> inline void barrier_of(int id, CUSIM_LOC) { cusim_bar_sync(id, COUNT, CUSIM_L); }

template <int COUNT> inline void registers_fewer(CUSIM_LOC) { cusim_setmaxnreg(COUNT, CUSIM_L); }
template <int COUNT> inline void registers_more(CUSIM_LOC) { cusim_setmaxnreg(COUNT, CUSIM_L); }

inline void tma_load_3d(void* to, const CUtensorMap* map, int x, int y, int z, uint64_t* barrier, CUSIM_LOC) {
    const int at[] = {x, y, z};
    cusim_tma_load(to, map, 3, at, barrier, CUSIM_L);
}
inline void tma_load_4d(void* to, const CUtensorMap* map, int x, int y, int z, int w, uint64_t* barrier,
                        CUSIM_LOC) {
    const int at[] = {x, y, z, w};
    cusim_tma_load(to, map, 4, at, barrier, CUSIM_L);
}
inline void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
    cusim_bulk_g2s(to, from, (unsigned)bytes, barrier);
}

template <class T> inline void store_for_async(T* to, const T& value, CUSIM_LOC) {
    cusim_store_for_async(to, sizeof(T), CUSIM_L);
    *to = value;
}
inline void fence_async(void) { cusim_fence_async(); }

inline void wgmma_fence(CUSIM_LOC) { cusim_wgmma_fence(CUSIM_L); }
inline void wgmma_commit(CUSIM_LOC) { cusim_wgmma_commit(CUSIM_L); }
template <int GROUPS> inline void wgmma_wait(CUSIM_LOC) { cusim_wgmma_wait(GROUPS, CUSIM_L); }
template <int N> inline void wgmma_settle(float (&)[N][4]) {}

template <class T, int TRANS_A, int TRANS_B, int N>
inline void wgmma(float (&d)[N][4], uint64_t a, uint64_t b, int adds, CUSIM_LOC) {
    static_assert(N == 8 || N == 16 || N == 32, "64, 128 or 256 columns");
    const CusimWgmma op = {d[0], NULL, a, b, 8 * N, DTYPE_OF(T) == DTYPE_FP16, adds, TRANS_A, TRANS_B};
    cusim_wgmma(&op, CUSIM_L);
}
template <class T, int TRANS_B, int N>
inline void wgmma_of_registers(float (&d)[N][4], const unsigned (&a)[4], uint64_t b, int adds, CUSIM_LOC) {
    static_assert(N == 8 || N == 16 || N == 32, "64, 128 or 256 columns");
    const CusimWgmma op = {d[0], a, 0, b, 8 * N, DTYPE_OF(T) == DTYPE_FP16, adds, 0, TRANS_B};
    cusim_wgmma(&op, CUSIM_L);
}

#endif

#endif

#endif
