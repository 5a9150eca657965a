/*
initial_weights.h -- the weights that a model starts with.

They are random, or come from a Hugging Face directory (a checkpoint is one), a GGUF file, or an
llm.c file; an adapter has its own directory. They are read one group of parameters (model.h) at a
time, so that a rank needs memory for one group.

A model with experts may come from the files of a dense one (upcycling): each expert gets the MLP of
the files, and routers are random. As the weights of a token's experts add up to 1, the new model
computes what the dense one does. Komatsuzaki et al., "Sparse Upcycling", 2023.
*/
#ifndef LLMC_INITIAL_WEIGHTS_H
#define LLMC_INITIAL_WEIGHTS_H

#include <stdint.h>

#include "llmc/base/gguf_file.h"
#include "llmc/formats/gguf_config.h"
#include "llmc/formats/hf_adapter.h"
#include "llmc/formats/hf_config.h"
#include "llmc/formats/hf_model.h"
#include "llmc/formats/llmc_bin.h"
#include "llmc/model/model.h"
#include "llmc/optim/mup.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { WEIGHTS_RANDOM, WEIGHTS_MODEL, WEIGHTS_FILE, WEIGHTS_ADAPTER } WeightsKind;

typedef struct {
    WeightsKind kind;
    ModelConfig cfg;
    uint64_t seed;
    Mup mup; // of random weights
    HfModel model;
    LlmcBin bin;
    HfAdapter adapter;
} FirstWeights;

// Opens the weights in `path`: of a model with the configuration `cfg`, or of its dense form; or of
// the adapter that `cfg` has. `which` chooses among those of a directory. NULL: random weights,
// which depend only on the seed and on muP.
void weights_open(FirstWeights* w, ModelConfig cfg, const char* path, HfWeights which, uint64_t seed,
                  Mup mup);

// Sets the tensors of group g, as fp32, in memory that has only this group, laid out by `rows`.
// Bytes between the tensors are left as they are.
void weights_read(FirstWeights* w, const TensorRow* rows, int g, void* group);

// Sets at least the elements [first, end) of group g, for a rank that needs only these.
void weights_read_part(FirstWeights* w, const TensorRow* rows, int g, size_t first, size_t end, void* group);

void weights_close(FirstWeights* w);

#ifdef __cplusplus
}
#endif

#ifdef INITIAL_WEIGHTS_IMPLEMENTATION

#include "llmc/base/file.h"

void weights_open(FirstWeights* w, ModelConfig cfg, const char* path, HfWeights which, uint64_t seed,
                  Mup mup) {
    const int is_gguf = path && gguf_is_file(path), is_model = path && (is_gguf || file_is_directory(path));
    w->kind = !path                    ? WEIGHTS_RANDOM
              : model_has_adapter(cfg) ? WEIGHTS_ADAPTER
              : is_model               ? WEIGHTS_MODEL
                                       : WEIGHTS_FILE;
    w->cfg = cfg;
    w->seed = seed;
    w->mup = mup;
    if (w->kind == WEIGHTS_ADAPTER) {
        hf_adapter_open(&w->adapter, path, cfg);
    } else if (w->kind == WEIGHTS_MODEL) {
        const ModelConfig read = is_gguf ? gguf_config_read(path) : hf_config_read(path);
        hf_model_open(&w->model, path, which, cfg, read.arch);
    } else if (w->kind == WEIGHTS_FILE) {
        llmc_bin_open(&w->bin, path);
    }
}

// Sets the routers of a model that comes from the files of a dense one.
static void weights_random_routers_(const FirstWeights* w, const TensorRow* rows, int g, void* group) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS && w->model.arch != w->cfg.arch; i++) {
        if (rows[i].kind == KIND_ROUTER && tensor_is_in_group(&rows[i], g)) {
            model_random_row(&rows[i], w->cfg, w->seed, g, group);
        }
    }
}

void weights_read_part(FirstWeights* w, const TensorRow* rows, int g, size_t first, size_t end, void* group) {
    switch (w->kind) {
    case WEIGHTS_RANDOM:
        model_random_group(rows, w->cfg, w->seed, g, group);
        mup_scale_group(w->mup, rows, w->cfg, g, group);
        break;
    case WEIGHTS_MODEL:
        hf_model_read(&w->model, rows, g, first, end, group);
        weights_random_routers_(w, rows, g, group);
        break;
    case WEIGHTS_FILE:
        llmc_bin_read(&w->bin, rows, g, group);
        break;
    case WEIGHTS_ADAPTER:
        hf_adapter_read(&w->adapter, rows, g, group);
        break;
    }
}

void weights_read(FirstWeights* w, const TensorRow* rows, int g, void* group) {
    weights_read_part(w, rows, g, 0, SIZE_MAX, group);
}

void weights_close(FirstWeights* w) {
    if (w->kind == WEIGHTS_ADAPTER) {
        hf_adapter_close(&w->adapter);
    } else if (w->kind == WEIGHTS_MODEL) {
        hf_model_close(&w->model);
    } else if (w->kind == WEIGHTS_FILE) {
        llmc_bin_close(&w->bin);
    }
}

#endif // INITIAL_WEIGHTS_IMPLEMENTATION

#endif
