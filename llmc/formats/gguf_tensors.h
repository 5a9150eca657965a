/*
gguf_tensors.h -- the tensors of a GGUF file (gguf_file.h), as those of other files (safetensors.h).

Types, sizes and places are checked before any tensor is used; so is that no name comes twice.
*/
#ifndef LLMC_GGUF_TENSORS_H
#define LLMC_GGUF_TENSORS_H

#include "llmc/base/gguf_file.h"
#include "llmc/formats/safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns the number that GGUF has for a type; -1: it is not among those that we read.
int gguf_type_number(SafeTensorsDtype dtype);

// Returns the tensors of a file, their last dimension fastest. They take over the file's memory:
// its pairs can be read until safetensors_close.
SafeTensors gguf_tensors(GgufFile* f);

// Opens the tensors of a file.
void gguf_tensors_open(SafeTensorsSet* set, const char* path);

#ifdef __cplusplus
}
#endif

#ifdef GGUF_TENSORS_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"

int gguf_type_number(SafeTensorsDtype dtype) {
    switch (dtype) {
    case SAFETENSORS_F32:
        return 0;
    case SAFETENSORS_F16:
        return 1;
    case SAFETENSORS_Q4_0:
        return 2;
    case SAFETENSORS_Q8_0:
        return 8;
    case SAFETENSORS_BF16:
        return 30;
    default:
        return -1;
    }
}

static SafeTensorsDtype gguf_dtype_(const GgufFile* f, const GgufTensor* t) {
    static const char* const names[] = {
        "F32",   "F16",    "Q4_0", "Q4_1", "Q4_2", "Q4_3",    "Q5_0",   "Q5_1",    "Q8_0",  "Q8_1",   "Q2_K",
        "Q3_K",  "Q4_K",   "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S",
        "IQ2_S", "IQ4_XS", "I8",   "I16",  "I32",  "I64",     "F64",    "IQ1_M",   "BF16"};
    const char* name = t->type < sizeof(names) / sizeof(names[0]) ? names[t->type] : "not known";
    for (int dtype = 0; dtype <= SAFETENSORS_Q4_0; dtype++) {
        if (gguf_type_number((SafeTensorsDtype)dtype) == (int)t->type) {
            return (SafeTensorsDtype)dtype;
        }
    }
    CHECK(0,
          "%s: tensor %s is %s (type %u), wanted F32, F16, BF16, Q8_0 or Q4_0; llama.cpp's llama-quantize "
          "--allow-requantize writes these",
          f->path, t->name, name, t->type);
    return SAFETENSORS_F32;
}

static SafeTensorsView gguf_view_(const GgufFile* f, const GgufTensor* t, const char* path) {
    SafeTensorsView view = {.path = path, .name = t->name, .dtype = gguf_dtype_(f, t), .ndim = t->ndim};
    for (int i = 0; i < t->ndim; i++) {
        view.shape[i] = t->sizes[t->ndim - 1 - i];
    }
    CHECK(safetensors_set_sizes(&view), "%s: tensor %s is too large", path, t->name);
    CHECK(t->sizes[0] % safetensors_dtype_block(view.dtype) == 0,
          "%s: tensor %s is %s with rows of %zu, wanted blocks of %zu", path, t->name,
          safetensors_dtype_name(view.dtype), t->sizes[0], safetensors_dtype_block(view.dtype));
    const size_t room = f->data < f->bytes ? f->bytes - f->data : 0;
    CHECK(t->offset % f->align == 0 && t->offset <= room && view.bytes <= room - t->offset,
          "%s: tensor %s has %zu bytes at %llu of the data, wanted them among %zu, at a multiple of %zu", path,
          t->name, view.bytes, (unsigned long long)t->offset, room, f->align);
    view.data = f->map + f->data + t->offset;
    return view;
}

SafeTensors gguf_tensors(GgufFile* f) {
    SafeTensors st = {.path = strdup(f->path), .map = f->map, .map_bytes = f->bytes};
    st.header = (unsigned char*)f->tensors; // it has the names
    st.num_tensors = f->num_tensors;
    st.tensors = (SafeTensorsView*)check_alloc(st.num_tensors + 1, sizeof(SafeTensorsView), f->path);
    for (size_t i = 0; i < st.num_tensors; i++) {
        st.tensors[i] = gguf_view_(f, &f->tensors[i], st.path);
    }
    CHECK(safetensors_sort_names(&st), "%s", st.error);
    f->map = NULL, f->bytes = 0, f->tensors = NULL;
    return st;
}

void gguf_tensors_open(SafeTensorsSet* set, const char* path) {
    GgufFile f;
    memset(set, 0, sizeof(*set));
    gguf_file_open(&f, path);
    set->path = strdup(path);
    set->files = (SafeTensors*)check_alloc(1, sizeof(SafeTensors), path);
    set->files[0] = gguf_tensors(&f);
    set->num_files = 1;
    gguf_file_close(&f);
}

#endif // GGUF_TENSORS_IMPLEMENTATION

#endif
