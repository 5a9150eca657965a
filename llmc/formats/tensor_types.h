/*
tensor_types.h -- types of tensors' elements in files: names, sizes, and their numbers as fp32.

Q8_0, Q4_0 and MXFP4 are only in GGUF files: 32 elements x = scale q of a row are a block, an fp16
scale and then their q, as int8 or as pairs of 4 bits, 8 more than q; or a scale of one byte and
numbers of 4 bits (mxfp4.h). Of pairs, elements i and i + 16 share a byte.
*/
#ifndef LLMC_TENSOR_TYPES_H
#define LLMC_TENSOR_TYPES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/float16.h"
#include "llmc/formats/mxfp4.h"

// X(name in files, elements of a block, bytes of a block)
// clang-format off
#define SAFETENSORS_TYPES_(X) \
    X(F32, 1, 4) X(F16, 1, 2) X(BF16, 1, 2) X(F64, 1, 8) X(I64, 1, 8) X(I32, 1, 4) X(I16, 1, 2) X(I8, 1, 1) \
    X(U64, 1, 8) X(U32, 1, 4) X(U16, 1, 2) X(U8, 1, 1) X(BOOL, 1, 1)
#define SAFETENSORS_GGUF_TYPES_(X) X(Q8_0, 32, 34) X(Q4_0, 32, 18) X(MXFP4, 32, 17)
#define SAFETENSORS_VALUE_(name, elements, bytes) SAFETENSORS_##name,
// clang-format on
// safetensors' own come before SAFETENSORS_DTYPES
typedef enum {
    SAFETENSORS_TYPES_(SAFETENSORS_VALUE_) SAFETENSORS_DTYPES,
    SAFETENSORS_OTHER_ = SAFETENSORS_DTYPES - 1,
    SAFETENSORS_GGUF_TYPES_(SAFETENSORS_VALUE_) SAFETENSORS_ALL_DTYPES
} SafeTensorsDtype;

typedef struct {
    const char* name;
    size_t elements, bytes; // of a block
} SafeTensorsType_;

static inline SafeTensorsType_ safetensors_type_(SafeTensorsDtype dtype) {
#define SAFETENSORS_TYPE_(name, elements, bytes) {#name, elements, bytes},
    static const SafeTensorsType_ types[] = {SAFETENSORS_TYPES_(SAFETENSORS_TYPE_)
                                                 SAFETENSORS_GGUF_TYPES_(SAFETENSORS_TYPE_)};
#undef SAFETENSORS_TYPE_
    return types[dtype];
}

static inline const char* safetensors_dtype_name(SafeTensorsDtype dtype) {
    return safetensors_type_(dtype).name;
}

// Returns the elements of a block; 1: there are no blocks.
static inline size_t safetensors_dtype_block(SafeTensorsDtype dtype) {
    return safetensors_type_(dtype).elements;
}

// Returns the bytes of a block.
static inline size_t safetensors_dtype_bytes(SafeTensorsDtype dtype) {
    return safetensors_type_(dtype).bytes;
}

// Returns the bytes of the whole blocks among `count` elements.
static inline size_t safetensors_bytes(SafeTensorsDtype dtype, size_t count) {
    return count / safetensors_dtype_block(dtype) * safetensors_dtype_bytes(dtype);
}

// True for types of weights.
static inline int safetensors_dtype_is_real(SafeTensorsDtype dtype) {
    return dtype <= SAFETENSORS_BF16 || dtype >= SAFETENSORS_DTYPES;
}

// Returns number i of 16 bits, at any address.
static inline float safetensors_narrow_(const void* elements, SafeTensorsDtype dtype, size_t i) {
    uint16_t bits;
    memcpy(&bits, (const char*)elements + i * sizeof(bits), sizeof(bits));
    return dtype == SAFETENSORS_BF16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

// Returns element i of blocks.
static inline float safetensors_quantized_(const void* elements, SafeTensorsDtype dtype, size_t i) {
    const size_t block = i / 32, j = i % 32;
    const unsigned char* at = (const unsigned char*)elements + block * safetensors_dtype_bytes(dtype);
    const int shift = j < 16 ? 0 : 4;
    switch (dtype) {
    case SAFETENSORS_Q8_0:
        return safetensors_narrow_(at, SAFETENSORS_F16, 0) * (float)(int8_t)at[2 + j];
    case SAFETENSORS_Q4_0:
        return safetensors_narrow_(at, SAFETENSORS_F16, 0) * (float)((at[2 + j % 16] >> shift & 15) - 8);
    case SAFETENSORS_MXFP4:
        return mxfp4_scale(at[0]) * mxfp4_value(at[1 + j % 16] >> shift);
    default:
        return NAN; // not a type of blocks
    }
}

// Sets out (count) to the elements from `start` on, of a type of weights.
static inline void safetensors_decode(float* out, const void* elements, SafeTensorsDtype dtype, size_t start,
                                      size_t count) {
    if (dtype == SAFETENSORS_F32 && count > 0) {
        memcpy(out, (const char*)elements + start * sizeof(float), count * sizeof(float));
    }
    for (size_t i = 0; dtype != SAFETENSORS_F32 && i < count; i++) {
        out[i] = dtype >= SAFETENSORS_DTYPES ? safetensors_quantized_(elements, dtype, start + i)
                                             : safetensors_narrow_(elements, dtype, start + i);
    }
}

// Converts `count` elements of F32, F16 or BF16 to fp32, in place.
static inline void safetensors_widen(void* elements, SafeTensorsDtype dtype, size_t count) {
    float* wide = (float*)elements;
    for (size_t i = count; dtype != SAFETENSORS_F32 && i-- > 0;) { // from the end
        wide[i] = safetensors_narrow_(elements, dtype, i);
    }
}

#endif
