/*
floatx.cuh -- floatX, the type of weights, activations and their gradients on the GPU, set by
PRECISION; and the number of logits that the classifier computes at a time if memory is short.
Include it before model.h.
*/
#ifndef LLMC_FLOATX_CUH
#define LLMC_FLOATX_CUH

#include "llmc/gpu/gpu.cuh"

#if defined(PRECISION_FP32)
#define floatX float
#define PRECISION_NAME "FP32"
#elif defined(PRECISION_FP16)
#define floatX fp16
#define PRECISION_NAME "FP16"
#elif defined(PRECISION_BF16)
#define floatX bf16
#define PRECISION_NAME "BF16"
#else
#error "no precision: wanted -DPRECISION_BF16, -DPRECISION_FP16 or -DPRECISION_FP32"
#endif

#ifndef MODEL_CHUNK_LOGITS
#define MODEL_CHUNK_LOGITS ((size_t)1 << 30) // 2 GiB of 16-bit logits
#endif

#endif
