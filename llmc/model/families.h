/*
families.h -- tensors in the files of other programs: their names at Hugging Face and in GGUF, the
parameter they hold, and how it lies there.

All readers and writers of such files are loops over this table, in the order of the files.
*/
#ifndef LLMC_FAMILIES_H
#define LLMC_FAMILIES_H

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "llmc/model/model.h"

typedef enum {
    FILE_PLAIN, // as in memory: (rows, cols), or (cols) for a vector
    FILE_CONV1D // (cols, rows) at Hugging Face, where GPT-2's code computes x W, ours x W^T
} FileForm;

typedef struct {
    const char *hf_name, *gguf_name; // %d is the layer
    int row;                         // of the parameter in the table of model.h
    FileForm form;
} FileTensor;

// clang-format off
//  Hugging Face                          GGUF                        parameter  form
#define FILE_TENSORS(X) \
  X("transformer.wte.weight",             "token_embd.weight",        wte,       PLAIN) \
  X("transformer.wpe.weight",             "position_embd.weight",     wpe,       PLAIN) \
  X("transformer.h.%d.ln_1.weight",       "blk.%d.attn_norm.weight",  ln1w,      PLAIN) \
  X("transformer.h.%d.ln_1.bias",         "blk.%d.attn_norm.bias",    ln1b,      PLAIN) \
  X("transformer.h.%d.attn.c_attn.weight", "blk.%d.attn_qkv.weight",  qkvw,      CONV1D) \
  X("transformer.h.%d.attn.c_attn.bias",  "blk.%d.attn_qkv.bias",     qkvb,      PLAIN) \
  X("transformer.h.%d.attn.c_proj.weight", "blk.%d.attn_output.weight", attprojw, CONV1D) \
  X("transformer.h.%d.attn.c_proj.bias",  "blk.%d.attn_output.bias",  attprojb,  PLAIN) \
  X("transformer.h.%d.ln_2.weight",       "blk.%d.ffn_norm.weight",   ln2w,      PLAIN) \
  X("transformer.h.%d.ln_2.bias",         "blk.%d.ffn_norm.bias",     ln2b,      PLAIN) \
  X("transformer.h.%d.mlp.c_fc.weight",   "blk.%d.ffn_up.weight",     fcw,       CONV1D) \
  X("transformer.h.%d.mlp.c_fc.bias",     "blk.%d.ffn_up.bias",       fcb,       PLAIN) \
  X("transformer.h.%d.mlp.c_proj.weight", "blk.%d.ffn_down.weight",   fcprojw,   CONV1D) \
  X("transformer.h.%d.mlp.c_proj.bias",   "blk.%d.ffn_down.bias",     fcprojb,   PLAIN) \
  X("transformer.ln_f.weight",            "output_norm.weight",       lnfw,      PLAIN) \
  X("transformer.ln_f.bias",              "output_norm.bias",         lnfb,      PLAIN)
// clang-format on

#define FILE_TENSOR_COUNT_(...) +1
enum { FILE_TENSOR_ROWS = 0 FILE_TENSORS(FILE_TENSOR_COUNT_) };
#undef FILE_TENSOR_COUNT_

static inline const FileTensor* file_tensors(void) {
#define FILE_TENSOR_(hf_name, gguf_name, parameter, form)                                                    \
    {hf_name, gguf_name, offsetof(ModelParameters, parameter) / sizeof(floatX*), FILE_##form},
    static const FileTensor tensors[FILE_TENSOR_ROWS] = {FILE_TENSORS(FILE_TENSOR_)};
#undef FILE_TENSOR_
    return tensors;
}

// Name of a tensor of one layer.
typedef struct {
    char text[128];
} FileTensorName;

static inline FileTensorName file_tensor_name(const char* name, int l) {
    FileTensorName of_layer;
    snprintf(of_layer.text, sizeof(of_layer.text), name, l);
    return of_layer;
}

// Returns a name at Hugging Face without the prefix of the model, which files of the model without
// its classifier do not have.
static inline const char* file_tensor_bare_name(const char* name) {
    static const char prefix[] = "transformer.";
    const size_t length = strlen(prefix);
    return strncmp(name, prefix, length) == 0 ? name + length : name;
}

#endif
