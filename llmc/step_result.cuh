/*
step_result.cuh -- what the host reads back of an update or a validation's batch, on the GPU and in pinned memory.

defines: StepResult, step_result_bytes
*/
#ifndef LLMC_STEP_RESULT_CUH
#define LLMC_STEP_RESULT_CUH

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/wide_sum.h"

typedef struct {
    WideSum square_sum;          // of the gradient
    unsigned long long checksum; // of the parameters
    int64_t count;               // of losses
    double losses[];             // sum of each micro-step
} StepResult;

static inline size_t step_result_bytes(int64_t losses) {
    return sizeof(StepResult) + (size_t)losses * sizeof(double);
}

#endif
