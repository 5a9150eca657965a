/*
whole_model.h -- reads and writes a whole model on the host at once: all its groups, in the layout
of the rows.
*/
#ifndef TEST_WHOLE_MODEL_H
#define TEST_WHOLE_MODEL_H

#include "llmc/formats/llmc_bin.h"
#include "llmc/checkpoint/initial_weights.h"

// The weights in a directory or a file, fp32.
static inline void whole_model_read(const char* path, ModelConfig cfg, const TensorRow* rows, void* memory) {
    const Mup none = {0, 0};
    FirstWeights weights;
    weights_open(&weights, cfg, path, HF_LAST, 0, none);
    for (int g = 0; g < model_groups(cfg); g++) {
        weights_read(&weights, rows, g, (char*)memory + tensor_group_offset_bytes(rows, g));
    }
    weights_close(&weights);
}

// directory/model.safetensors; returns its checksum.
static inline uint64_t whole_model_write(const char* directory, ModelConfig cfg, const TensorRow* rows,
                                         const void* memory, SafeTensorsDtype dtype) {
    const HfModelFile all = {0, model_groups(cfg)};
    return hf_model_write(directory, "model.safetensors", all, cfg, rows, memory, dtype);
}

// llm.c's .bin. The last groups come first: the order is the writer's.
static inline void whole_model_write_bin(const char* path, ModelConfig cfg, const TensorRow* rows,
                                         const void* memory, ModelDtype dtype) {
    LlmcBinWriter writer;
    llmc_bin_create(&writer, path, cfg, dtype);
    for (int g = model_groups(cfg) - 1; g >= 0; g--) {
        llmc_bin_put(&writer, rows, g, (const char*)memory + tensor_group_offset_bytes(rows, g));
    }
    llmc_bin_commit(&writer);
}

#endif
