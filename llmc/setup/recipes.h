/*
recipes.h -- settings that come with a named model: its optimizer, rates and length of a run.

A setting of a recipe is the default of its option while --model names that model: the command line
and the file of --config win.

speedrun is a model of NanoChat's architecture, as large as GPT-2 124M, trained with Muon as in
track 3 of modded-nanogpt (https://github.com/KellerJordan/modded-nanogpt). Like that run it keeps
its rates for 30 % of the steps, then lowers them linearly to 0. A run of at most 2450 steps lowers
them from the end of its warm-up.
*/
#ifndef LLMC_RECIPES_H
#define LLMC_RECIPES_H

#ifdef __cplusplus
extern "C" {
#endif

// Returns the value that the recipe of a named model gives an option; NULL if it gives none.
const char* recipe_value(const char* model, const char* option);

#ifdef __cplusplus
}
#endif

#ifdef RECIPES_IMPLEMENTATION

#include <stddef.h>
#include <string.h>

// clang-format off
static const struct { const char *model, *option, *value; } RECIPES_[] = {
    {"speedrun", "total-batch",         "524288"},
    {"speedrun", "steps",               "3500"},
    {"speedrun", "optimizer",           "muon"},
    {"speedrun", "matrix-lr",           "0.025"},
    {"speedrun", "matrix-weight-decay", "0.05"},
    {"speedrun", "lr",                  "0.004"},
    {"speedrun", "embedding-lr-scale",  "175"},   // 0.7
    {"speedrun", "vector-lr-scale",     "3.75"},  // 0.015
    {"speedrun", "weight-decay",        "0.001"},
    {"speedrun", "beta1",               "0.8"},
    {"speedrun", "eps",                 "1e-10"},
    {"speedrun", "schedule",            "wsd"},
    {"speedrun", "decay-steps",         "2450"},
    {"speedrun", "decay-shape",         "linear"},
};
// clang-format on

const char* recipe_value(const char* model, const char* option) {
    for (size_t i = 0; i < sizeof(RECIPES_) / sizeof(RECIPES_[0]); i++) {
        if (strcmp(RECIPES_[i].model, model) == 0 && strcmp(RECIPES_[i].option, option) == 0) {
            return RECIPES_[i].value;
        }
    }
    return NULL;
}

#endif // RECIPES_IMPLEMENTATION

#endif
