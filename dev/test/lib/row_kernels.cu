// row_kernels.cu -- kernels that are bound by memory, for dev/test/sass.sh: norms of rows and of
// heads, on rows of packs.
#include "llmc/ops/heads.cuh"
#include "llmc/ops/norm.cuh"

#define NORM(KIND)                                                                                           \
    template __global__ void norm_forward_kernel<bf16, 8, KIND>(bf16*, float*, float*, const bf16*,          \
                                                                const bf16*, const bf16*, int, int, float);
NORM(NORM_LAYER)
NORM(NORM_RMS)

#define HEADS_FORWARD(KIND)                                                                                  \
    template __global__ void heads_forward_kernel<bf16, 8, KIND>(bf16*, HeadsGpu<bf16>, float, int, int);
HEADS_FORWARD(HEADS_PLAIN)
HEADS_FORWARD(HEADS_NORM)
HEADS_FORWARD(HEADS_UNIT_NORM)

#define HEADS_BACKWARD(KIND)                                                                                 \
    template __global__ void heads_backward_kernel<bf16, 8, KIND>(bf16*, float*, const bf16*,                \
                                                                  HeadsGpu<bf16>, int, int);
HEADS_BACKWARD(HEADS_NORM)
HEADS_BACKWARD(HEADS_UNIT_NORM)
