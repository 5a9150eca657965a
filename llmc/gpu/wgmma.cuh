/*
wgmma.cuh -- tiles of matrices in shared memory, for matmuls by wgmma (ptx.cuh) on GPUs of compute
capability 9.0; and TMA, which fills them.

A tile consists of panels. A row of a panel has 64 elements of 16 bits, 128 bytes; TMA swizzles
them: 16 bytes number c of row r lie at place c ^ r % 8. An operand of a matmul has either

    its sums along the rows     element i of a side in step k: row i, column k; a panel for 64 steps
    its sums across them        element i in step k: panel i / 64, row k, column i % 64

A descriptor tells wgmma where an operand of 16 steps lies.
*/
#ifndef LLMC_WGMMA_CUH
#define LLMC_WGMMA_CUH

#include "llmc/base/host_device.h"
#include "llmc/base/xxh64.h"
#include "llmc/gpu/ptx.cuh"

enum {
    WGMMA_PANEL = 64,                  // elements of a row
    WGMMA_DEPTH = 64,                  // steps of the sums in a tile: rows of a panel if across
    WGMMA_EIGHT_ROWS_BYTES_ = 8 * 128, // the swizzle repeats after them
    TENSOR_MAPS_KEPT_ = 1024
};

// Returns the descriptor of the operand at a shared address. Its fields, in units of 16 bytes: the
// address; from bit 16 on the distance of panels, 1 if unused; from bit 32 on the distance of eight
// rows; 1 in bit 62: the swizzle. `across_rows` are the rows of a panel if sums lie across them, or
// else 0.
HOST_DEVICE uint64_t wgmma_descriptor(unsigned address, int across_rows) {
    const uint64_t panel_bytes = across_rows ? (uint64_t)across_rows * 128 : 16;
    return (uint64_t)((address & 0x3ffff) >> 4) | panel_bytes >> 4 << 16 |
           (uint64_t)(WGMMA_EIGHT_ROWS_BYTES_ >> 4) << 32 | (uint64_t)1 << 62;
}

// Returns how much larger the descriptor of an operand is 16 steps later. Within the 128 bytes of a
// row the hardware swizzles the address itself, so the distance is added to it as it is.
HOST_DEVICE uint64_t wgmma_step(int is_across) { return (is_across ? 16 * 128 : 16 * 2) >> 4; }

#if PTX_HAS_WGMMA

#include <cudaTypedefs.h>

// Takes the next of a kernel's tiles for a block; returns -1 if none is left. One thread of each
// block calls it until then: the last block turns the counter back to 0. So no block waits for
// another one's multiprocessor, which NCCL may use.
__device__ inline int tile_take(unsigned* taken, unsigned tiles) {
    const unsigned next = atomicInc(taken, tiles + gridDim.x - 1);
    return next < tiles ? (int)next : -1;
}

// Returns the driver's function that makes maps of tensors.
static inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_maker_(void) {
    void* function = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                                &found));
#else
    CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found));
#endif
    CHECK(found == cudaDriverEntryPointSuccess, "the GPU's driver has no cuTensorMapEncodeTiled");
    return (PFN_cuTensorMapEncodeTiled_v12000)function;
}

// All that a map is made of; sizes are in elements, strides in bytes.
typedef struct {
    const void* data;
    cuuint64_t sizes[5], strides[4];
    cuuint32_t boxes[5];
    int rank;
    CUtensorMapDataType type;
} TensorMapOf_;

static inline CUtensorMap tensor_map_make_(const TensorMapOf_* of) {
    static const PFN_cuTensorMapEncodeTiled_v12000 encode = tensor_map_maker_(); // looked up once
    const cuuint32_t every[] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    const CUresult result =
        encode(&map, of->type, (cuuint32_t)of->rank, (void*)of->data, of->sizes, of->strides, of->boxes,
               every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    CHECK(result == CUDA_SUCCESS,
          "no map of a tensor of %zu x %zu x %zu, distance of rows %zu bytes: CUDA's error %d",
          (size_t)of->sizes[2], (size_t)of->sizes[1], (size_t)of->sizes[0], (size_t)of->strides[0],
          (int)result);
    return map;
}

// Returns a map, made now unless it is among the last ones made: without a graph, each launch would
// wait for the driver to make it again. For one thread.
static inline CUtensorMap tensor_map_kept_(const TensorMapOf_* of) {
    static struct {
        TensorMapOf_ of;
        CUtensorMap map;
    } kept[TENSOR_MAPS_KEPT_];
    const int i = (int)(xxh64(of, sizeof(*of)) % TENSOR_MAPS_KEPT_);
    if (memcmp(&kept[i].of, of, sizeof(*of)) != 0) {
        kept[i].map = tensor_map_make_(of);
        memcpy(&kept[i].of, of, sizeof(*of)); // an assignment may leave out padding
    }
    return kept[i].map;
}

// Returns a map of a tensor of `rank` dimensions, of T; distances of all but the fastest are in
// elements. TMA copies boxes of 64 elements by `box` of dimension box_dim. Addresses and distances
// are multiples of 16 bytes.
template <class T>
static inline CUtensorMap tensor_map_of(const T* data, int rank, const size_t* sizes, const size_t* distances,
                                        int box_dim, int box) {
    TensorMapOf_ of;
    memset(&of, 0, sizeof(of)); // including padding, which is compared
    of.data = data;
    of.rank = rank;
    of.type = DTYPE_OF(T) == DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    for (int i = 0; i < rank; i++) {
        of.sizes[i] = sizes[i];
        of.boxes[i] = i == 0 ? (cuuint32_t)WGMMA_PANEL : i == box_dim ? (cuuint32_t)box : 1;
        if (i > 0) {
            of.strides[i - 1] = distances[i - 1] * sizeof(T);
        }
    }
    return tensor_map_kept_(&of);
}

// Returns a map of matrices of rows x cols elements of T, one after the other, whose rows lie
// `stride` elements apart; TMA copies 64 columns of `box` rows.
template <class T>
static inline CUtensorMap tensor_map(const T* data, int cols, int rows, int matrices, int stride, int box) {
    const size_t sizes[] = {(size_t)cols, (size_t)rows, (size_t)matrices},
                 distances[] = {(size_t)stride, (size_t)rows * (size_t)stride};
    return tensor_map_of(data, 3, sizes, distances, 1, box);
}

#endif

#endif
