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
    case SAFETENSORS_MXFP4:
        return 39;
    default:
        return -1;
    }
}

static SafeTensorsDtype gguf_dtype_(const GgufFile* f, const char* tensor, uint64_t type) {
    static const char* const names[] = {
        "F32",   "F16",    "Q4_0", "Q4_1", "Q4_2", "Q4_3",    "Q5_0",   "Q5_1",    "Q8_0",  "Q8_1",   "Q2_K",
        "Q3_K",  "Q4_K",   "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S",
        "IQ2_S", "IQ4_XS", "I8",   "I16",  "I32",  "I64",     "F64",    "IQ1_M",   "BF16"};
    int dtype = 0;
    while (dtype < SAFETENSORS_ALL_DTYPES && gguf_type_number((SafeTensorsDtype)dtype) != (int)type) {
        dtype++;
    }
    CHECK(dtype < SAFETENSORS_ALL_DTYPES,
          "%s: tensor %s is %s (type %d), wanted F32, F16, BF16, Q8_0, Q4_0 or MXFP4; llama.cpp's "
          "llama-quantize "
          "--allow-requantize writes these",
          f->path, tensor, type < sizeof(names) / sizeof(names[0]) ? names[type] : "not known", (int)type);
    return (SafeTensorsDtype)dtype;
}

// Reads the info of a tensor. Returns its offset in the data.
static uint64_t gguf_take_view_(GgufFile* f, SafeTensorsView* view, char name[GGUF_NAME]) {
    gguf_take_name(f, name);
    view->name = name;
    const uint64_t ndim = gguf_take_number(f, 4);
    CHECK(0 < ndim && ndim <= 4, "%s: tensor %s has %d dimensions, wanted 1 to 4", f->path, name, (int)ndim);
    view->ndim = (int)ndim;
    for (size_t i = ndim; i-- > 0;) {
        view->shape[i] = gguf_take_number(f, 8);
    }
    view->dtype = gguf_dtype_(f, name, gguf_take_number(f, 4));
    const size_t row = view->shape[ndim - 1], block = safetensors_dtype_block(view->dtype);
    CHECK(safetensors_set_sizes(view), "%s: tensor %s is too large", f->path, name);
    CHECK(row % block == 0, "%s: tensor %s is %s with rows of %zu, wanted blocks of %zu", f->path, name,
          safetensors_dtype_name(view->dtype), row, block);
    return gguf_take_number(f, 8);
}

// Sets the places of tensors, whose offsets in the data are known.
static void gguf_place_(const GgufFile* f, SafeTensors* st, const uint64_t* offsets) {
    const GgufPair* pair = gguf_pair(f, "general.alignment");
    const double number = pair ? gguf_number(pair, 0) : GGUF_ALIGN;
    CHECK(number >= 8 && number <= 1 << 20 && !((size_t)number & ((size_t)number - 1)),
          "%s: general.alignment is %g, wanted a power of 2 from 8 on", f->path, number);
    const size_t align = (size_t)number, data = (f->at + align - 1) / align * align,
                 room = data < f->bytes ? f->bytes - data : 0;
    for (size_t i = 0; i < st->num_tensors; i++) {
        SafeTensorsView* view = &st->tensors[i];
        CHECK(offsets[i] % align == 0 && offsets[i] <= room && view->bytes <= room - offsets[i],
              "%s: tensor %s has %zu bytes at %llu of the data, wanted them among %zu, at a multiple of %zu",
              f->path, view->name, view->bytes, (unsigned long long)offsets[i], room, align);
        view->data = f->map + data + offsets[i];
    }
}

SafeTensors gguf_tensors(GgufFile* f) {
    SafeTensors st = {.path = strdup(f->path), .map = f->map, .map_bytes = f->bytes};
    st.num_tensors = f->num_tensors;
    st.tensors = (SafeTensorsView*)check_alloc(st.num_tensors + 1, sizeof(SafeTensorsView), f->path);
    st.header = (unsigned char*)check_alloc(st.num_tensors + 1, GGUF_NAME, f->path); // the names
    uint64_t* offsets = (uint64_t*)check_alloc(st.num_tensors + 1, sizeof(uint64_t), f->path);
    for (size_t i = 0; i < st.num_tensors; i++) {
        st.tensors[i].path = st.path;
        offsets[i] = gguf_take_view_(f, &st.tensors[i], (char*)st.header + i * GGUF_NAME);
    }
    gguf_place_(f, &st, offsets);
    free(offsets);
    CHECK(safetensors_sort_names(&st), "%s", st.error);
    f->map = NULL;
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
