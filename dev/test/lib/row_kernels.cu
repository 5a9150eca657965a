// row_kernels.cu -- kernels that are bound by memory, for dev/test/sass.sh: norms of rows and of
// heads, and those that make codes of E4M3, on rows of packs.
#include "llmc/ops/activation.cuh"
#include "llmc/ops/heads.cuh"
#include "llmc/ops/norm_backward.cuh"

#define NORM(KIND, CODES)                                                                                    \
    template __global__ void norm_forward_kernel<bf16, 8, KIND, CODES>(                                      \
        bf16*, E4m3Rows, float*, float*, const bf16*, const bf16*, const bf16*, NormPlus_<bf16>, int, int,   \
        float);
NORM(NORM_LAYER, false)
NORM(NORM_RMS, false)
NORM(NORM_RMS_PLUS, false)
NORM(NORM_LAYER, true)
NORM(NORM_RMS, true)

#define NORM_BACKWARD(KIND, WARPS)                                                                           \
    template __global__ void norm_backward_kernel<bf16, KIND, 8, 1, WARPS, true>(                            \
        bf16*, E4m3Rows, float*, const bf16*, const bf16*, const bf16*, NormPlus_<bf16>, const float*,       \
        const float*, int, int, int, GradientMode);
NORM_BACKWARD(NORM_LAYER, 3)
NORM_BACKWARD(NORM_LAYER, 7)
NORM_BACKWARD(NORM_RMS, 0)

#define ACTIVATION(NAME)                                                                                     \
    template __global__ void activation_rows_forward_kernel<bf16, NAME##_activation_>(                       \
        E4m3Rows, bf16*, const bf16*, int, int);                                                             \
    template __global__ void activation_rows_backward_kernel<bf16, NAME##_activation_>(                      \
        E4m3Rows, bf16*, const bf16*, const bf16*, int, int);
ACTIVATION(gelu)
ACTIVATION(swiglu)

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
