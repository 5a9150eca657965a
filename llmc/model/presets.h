/*
presets.h -- named models: the published sizes of GPT-2 and GPT-3.
*/
#ifndef LLMC_PRESETS_H
#define LLMC_PRESETS_H

#include <stddef.h>
#include <string.h>

#define GPT2_VOCAB 50257
// Model with a name. GPT-2's are called by their depth (gpt2:d12, or d12), GPT-3's by their width
// (gpt3:c768); the published sizes of GPT-2 also have Hugging Face's names.
typedef struct {
    const char* name;
    int L, C, NH, max_T;
} ModelPreset;

static inline const ModelPreset* model_presets(int* count) {
    // clang-format off
    static const ModelPreset models[] = {
        {"gpt2:d6",      6,   384,  6, 1024}, {"gpt2:d12",    12,   768, 12, 1024}, // d12: GPT-2 124M
        {"gpt2:d24",    24,  1024, 16, 1024}, {"gpt2:d36",    36,  1280, 20, 1024}, // 350M, 774M
        {"gpt2:d48",    48,  1600, 25, 1024}, {"gpt2:d60",    60,  1920, 30, 1024}, // 1558M
        {"gpt2:d72",    72,  2880, 30, 1024}, {"gpt2:d84",    84,  3456, 36, 1024},
        {"gpt3:c384",    6,   384,  6, 2048}, {"gpt3:c768",   12,   768, 12, 2048}, // c768: GPT-3 125M
        {"gpt3:c1024",  24,  1024, 16, 2048}, {"gpt3:c1536",  24,  1536, 16, 2048}, // 350M, 760M
        {"gpt3:c2048",  24,  2048, 16, 2048}, {"gpt3:c2560",  32,  2560, 32, 2048}, // 1.3B, 2.7B
        {"gpt3:c4096",  32,  4096, 32, 2048}, {"gpt3:c5120",  40,  5120, 40, 2048}, // 6.7B, 13B
        {"gpt3:c5140",  40,  5120, 40, 2048},                                       // 13B as the paper misprints it
        {"gpt3:c12288", 96, 12288, 96, 2048},                                       // 175B
        {"gpt2",        12,   768, 12, 1024}, {"gpt2-medium", 24,  1024, 16, 1024},
        {"gpt2-large",  36,  1280, 20, 1024}, {"gpt2-xl",     48,  1600, 25, 1024},
    };
    // clang-format on
    *count = (int)(sizeof(models) / sizeof(models[0]));
    return models;
}

// Returns the model called `name` (the prefix "gpt2:" is optional), or NULL.
static inline const ModelPreset* model_preset_by_name(const char* name) {
    int count;
    const ModelPreset* models = model_presets(&count);
    for (int i = 0; i < count; i++) {
        const int prefixed = strcmp(models[i].name, name) == 0;
        if (prefixed || (strncmp(models[i].name, "gpt2:", 5) == 0 && strcmp(models[i].name + 5, name) == 0)) {
            return &models[i];
        }
    }
    return NULL;
}

#endif
