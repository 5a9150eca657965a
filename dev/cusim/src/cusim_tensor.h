/*
cusim_tensor.h -- CUtensorMap as the CPU device stores it, in the 128 bytes of the driver's type.
*/
#ifndef CUSIM_TENSOR_H
#define CUSIM_TENSOR_H

#include <cstddef>
#include <cstdint>

enum { TENSOR_RANK_MAX = 5 };

struct TensorMap {
    uint32_t magic; // TENSOR_MAGIC
    uint8_t rank, element_bytes;
    uint16_t box[TENSOR_RANK_MAX];
    const char* data;
    uint64_t sizes[TENSOR_RANK_MAX], strides[TENSOR_RANK_MAX - 1]; // elements; bytes
};
static_assert(sizeof(TensorMap) <= 128, "fits into a CUtensorMap");
static const uint32_t TENSOR_MAGIC = 0x7450AD3Eu;

#endif
