/*
gguf_arch.h -- architectures as llama.cpp knows them, and whether it computes a model.

Its loaders choose much by the architecture alone: which layers have a window or rotary positions,
the scale of scores. A model that differs is refused by name, because nothing in a file says so.
*/
#ifndef LLMC_GGUF_ARCH_H
#define LLMC_GGUF_ARCH_H

#include <math.h>

#include "llmc/model/families.h"
#include "llmc/model/config.h"

#ifdef __cplusplus
extern "C" {
#endif

// Rotary positions of layers with a window: as in other layers; with a base of their own, or that
// of other layers, and never scaled.
typedef enum { GGUF_ROPE_SAME, GGUF_ROPE_OWN, GGUF_ROPE_UNSCALED } GgufWindowRope;

// Output layer: may be a matrix of its own; must be; cannot be.
typedef enum { GGUF_HEAD_ANY, GGUF_HEAD_OWN, GGUF_HEAD_TIED } GgufHead;

// Architecture, and what its loader demands.
typedef struct {
    const char* name; // NULL: not known
    HeadOrder order;
    int fills_channels; // 1: heads x head size are the channels; 2: also those of keys
    GgufHead head;
    int has_llama3, has_longrope; // scalings by factors of each pair, which are tensors
    int has_caps;                 // of scores and of logits: both
    GgufWindowRope window_rope;
    int unrotated_every; // every n-th layer does not turn; 0: all do
    // every n-th layer has no window, the others have it; 0: it knows no windows
    int full_every;
    // only models of so many layers have them; 0: those with a window, -1: all
    int windows_from_layers;
    int large_layers; // a model of so many layers divides scores by sqrt(C / NH), not by sqrt(HS)
} GgufArch;

extern const GgufArch gguf_archs[ARCH_COUNT];

// Returns n if in llama.cpp every n-th layer of such a model has no window and all others have it;
// 0: it computes the model without windows.
int gguf_full_every(ModelConfig cfg);

// Sets which layers have a window, if llama.cpp knows it, and which turn; and the positions of
// layers with a window.
void gguf_set_layers(ModelConfig* cfg);

// Returns the factor of scores.
float gguf_score_scale(ModelConfig cfg);

// With latents, yarn multiplies scores by m^2, m = 1 + log_multiplier ln(factor). Return it for a
// model's factor of scores, and the factor for a multiplier.
static inline float gguf_log_multiplier(ModelConfig cfg) {
    const double m = sqrt((double)cfg.attention_scale * sqrt((double)model_head_size(cfg)));
    return (float)((m - 1) / log((double)cfg.scaling.factor));
}
static inline float gguf_latent_scale(ModelConfig cfg, float log_multiplier) {
    const double m = 1 + (double)log_multiplier * log((double)cfg.scaling.factor);
    return (float)(m * m / sqrt((double)model_head_size(cfg)));
}

// Returns 1 if llama.cpp computes such a model; if not, 0 and the reason in `error`.
int gguf_check(ModelConfig cfg, char* error);

#ifdef __cplusplus
}
#endif

#ifdef GGUF_ARCH_IMPLEMENTATION

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/check.h"

// clang-format off
const GgufArch gguf_archs[ARCH_COUNT] = {
    [ARCH_GPT2] =     {.name = "gpt2", .fills_channels = 1},
    [ARCH_LLAMA] =    {.name = "llama", .order = ORDER_PAIRS, .has_llama3 = 1, .has_longrope = 1},
    [ARCH_MISTRAL] =  {.name = "llama", .order = ORDER_PAIRS, .has_llama3 = 1, .has_longrope = 1},
    [ARCH_MIXTRAL] =  {.name = "llama", .order = ORDER_PAIRS, .has_llama3 = 1, .has_longrope = 1},
    [ARCH_QWEN2] =    {.name = "qwen2", .fills_channels = 1},
    [ARCH_QWEN3] =    {.name = "qwen3"},
    [ARCH_ARCEE] =    {.name = "arcee", .order = ORDER_PAIRS, .has_llama3 = 1},
    [ARCH_NANOCHAT] = {.name = NULL},
    [ARCH_QWEN3MOE] = {.name = "qwen3moe"},
    [ARCH_OLMOE] =    {.name = "olmoe", .fills_channels = 2, .head = GGUF_HEAD_OWN},
    [ARCH_GLM4MOE] =  {.name = "glm4moe"},
    [ARCH_OLMO2] =    {.name = "olmo2", .fills_channels = 1, .head = GGUF_HEAD_OWN},
    [ARCH_OLMO3] =    {.name = "olmo2", .fills_channels = 1, .head = GGUF_HEAD_OWN,
                       .window_rope = GGUF_ROPE_UNSCALED, .full_every = 4},
    [ARCH_GEMMA2] =   {.name = "gemma2", .head = GGUF_HEAD_TIED, .has_caps = 1,
                       .full_every = 2, .windows_from_layers = -1, .large_layers = 46},
    [ARCH_GEMMA3] =   {.name = "gemma3", .window_rope = GGUF_ROPE_OWN,
                       .full_every = 6, .windows_from_layers = -1, .large_layers = 62},
    [ARCH_GRANITE] =  {.name = "granite", .order = ORDER_PAIRS, .has_llama3 = 1},
    [ARCH_GRANITE4] = {.name = "granite", .order = ORDER_PAIRS, .has_llama3 = 1},
    [ARCH_SMOLLM3] =  {.name = "smollm3", .order = ORDER_PAIRS, .unrotated_every = 4},
    [ARCH_EXAONE4] =  {.name = "exaone4", .has_llama3 = 1, .unrotated_every = 4,
                       .full_every = 4, .windows_from_layers = 64},
    [ARCH_PHI3] =     {.name = "phi3", .fills_channels = 1, .has_longrope = 1},
    [ARCH_GLM4] =     {.name = "glm4", .order = ORDER_PAIRS},
    [ARCH_QWEN35] =   {.name = NULL},
    [ARCH_LFM2] =     {.name = NULL},
    [ARCH_DEEPSEEK3] = {.name = "deepseek2", .order = ORDER_PAIRS},
};
// clang-format on

int gguf_full_every(ModelConfig cfg) {
    const GgufArch* arch = &gguf_archs[cfg.arch];
    const int from = arch->windows_from_layers,
              has_windows = from > 0 ? cfg.L == from : from < 0 || cfg.window > 0;
    return has_windows ? arch->full_every : 0;
}

// EXAONE 4 turns all layers where it has no windows.
void gguf_set_layers(ModelConfig* cfg) {
    const GgufArch* arch = &gguf_archs[cfg->arch];
    const int full_every = gguf_full_every(*cfg),
              rests_every = arch->windows_from_layers && full_every == 0 ? 0 : arch->unrotated_every;
    for (int l = 0; l < cfg->L; l++) {
        const int bit = 1 << l % 8, slides = full_every > 0 && (l + 1) % full_every != 0,
                  rests = rests_every > 0 && (l + 1) % rests_every == 0;
        uint8_t *windows = &cfg->windows[l / 8], *unrotated = &cfg->unrotated[l / 8];
        *windows = (uint8_t)(full_every == 0 ? *windows : slides ? *windows | bit : *windows & ~bit);
        *unrotated = (uint8_t)(rests ? *unrotated | bit : *unrotated & ~bit);
    }
    const float own = arch->window_rope == GGUF_ROPE_OWN ? cfg->window_rope_base : 0,
                base = own > 0 ? own : model_rope_base(*cfg);
    const int is_same = arch->window_rope == GGUF_ROPE_SAME || cfg->window == 0 ||
                        (base == model_rope_base(*cfg) && cfg->scaling.kind == ROPE_PLAIN);
    cfg->window_rope_base = is_same ? 0 : base;
    memset(&cfg->window_scaling, 0, sizeof(cfg->window_scaling));
}

float gguf_score_scale(ModelConfig cfg) {
    const int large = gguf_archs[cfg.arch].large_layers, is_large = large > 0 && cfg.L == large;
    return 1 / sqrtf((float)(is_large ? cfg.C / cfg.NH : model_head_size(cfg)));
}

// Returns 1 if llama.cpp gives layers their windows and positions.
static int gguf_check_layers_(ModelConfig cfg, char* error) {
    const char* name = gguf_archs[cfg.arch].name;
    ModelConfig own = cfg;
    gguf_set_layers(&own);
    for (int l = 0; l < cfg.L; l++) {
        const int slides = layer_is_in(own.windows, l), rests = layer_is_in(own.unrotated, l);
        const char* other = layer_is_in(cfg.windows, l) != slides ? (slides ? "a window" : "no window")
                            : layer_is_in(cfg.unrotated, l) != rests
                                ? (rests ? "no rotary positions" : "rotary positions")
                                : NULL;
        if (other) {
            return error_set(error, "--export-gguf",
                             "in llama.cpp layer %d of %s with %d layers has %s; --out DIR works", l, name,
                             cfg.L, other);
        }
    }
    const float found = cfg.window_rope_base > 0 ? cfg.window_rope_base : model_rope_base(cfg),
                wanted = own.window_rope_base > 0 ? own.window_rope_base : model_rope_base(cfg);
    const RopeScaling scaling = cfg.window_rope_base > 0 ? cfg.window_scaling : cfg.scaling,
                      own_scaling = own.window_rope_base > 0 ? own.window_scaling : cfg.scaling;
    return cfg.window == 0 || (found == wanted && memcmp(&scaling, &own_scaling, sizeof(scaling)) == 0) ||
           error_set(error, "--export-gguf",
                     "in llama.cpp layers of %s with a window have the rotary base %g, %s; --out DIR works",
                     name, (double)wanted, own_scaling.kind == ROPE_PLAIN ? "unscaled" : "scaled as others");
}

// Returns 1 if llama.cpp has such rotary positions.
static int gguf_check_rope_(ModelConfig cfg, char* error) {
    const GgufArch* arch = &gguf_archs[cfg.arch];
    const RopeScalingKind kind = cfg.scaling.kind;
    if ((kind == ROPE_LLAMA3 && !arch->has_llama3) || (kind == ROPE_LONG && !arch->has_longrope)) {
        return error_set(error, "--export-gguf",
                         "llama.cpp's %s has no factors of rotary positions; --out DIR works", arch->name);
    }
    if (cfg.scaling.is_exact) {
        return error_set(error, "--export-gguf",
                         "llama.cpp rounds the ends of yarn, and this model does not (truncate is false); "
                         "--out DIR works");
    }
    return gguf_check_layers_(cfg, error);
}

// Returns 1 if llama.cpp opens such latents: by the layers it knows whether queries have one.
static int gguf_check_latent_(ModelConfig cfg, char* error) {
    const int is_lite = cfg.L == 26 || cfg.L == 27, has_queries = cfg.latent.query_rank > 0;
    return !model_has_latent(cfg) || is_lite != has_queries ||
           error_set(error, "--export-gguf",
                     "llama.cpp's deepseek2 with %d layers has %s latent of queries; --out DIR works", cfg.L,
                     is_lite ? "no" : "a");
}

// Returns 1 if llama.cpp computes such scores and logits.
static int gguf_check_scores_(ModelConfig cfg, char* error) {
    const int by_yarn = model_has_latent(cfg) && cfg.scaling.kind == ROPE_YARN,
              has_scale = FAMILY_GRANITE >> cfg.arch & 1 || by_yarn, has_caps = gguf_archs[cfg.arch].has_caps;
    const char* word = model_architecture(cfg.arch)->word;
    const float own = gguf_score_scale(cfg), scale = cfg.attention_scale > 0
                                                         ? cfg.attention_scale
                                                         : 1 / sqrtf((float)model_head_size(cfg));
    if (by_yarn && (rope_attention(cfg.scaling) != 1 || scale <= own)) {
        return error_set(error, "--export-gguf",
                         "llama.cpp's %s scales all of a head with yarn, and this model only what turns; "
                         "--out DIR works",
                         word);
    }
    if (scale != own && !has_scale) {
        return error_set(error, "--export-gguf",
                         "llama.cpp's %s divides scores by %g, not by %g; --out DIR works", word,
                         1 / (double)own, 1 / (double)scale);
    }
    if ((cfg.attention_softcap > 0) != has_caps || (cfg.softcap > 0) != has_caps) {
        return error_set(error, "--export-gguf",
                         "llama.cpp's %s has %s caps of scores and of logits, not %g and %g; --out DIR works",
                         word, has_caps ? "both" : "no", (double)cfg.attention_softcap, (double)cfg.softcap);
    }
    return 1;
}

int gguf_check(ModelConfig cfg, char* error) {
    const GgufArch* arch = &gguf_archs[cfg.arch];
    const char* word = model_architecture(cfg.arch)->word;
    if (!arch->name) {
        return error_set(error, "--export-gguf", "llama.cpp has no %s; --out DIR works", word);
    }
    if (cfg.expert_groups > 0) {
        return error_set(error, "--export-gguf", "%d groups of experts are not written; --out DIR works",
                         cfg.expert_groups);
    }
    if (arch->fills_channels && model_heads(cfg) != cfg.C) {
        return error_set(
            error, "--export-gguf",
            "llama.cpp's %s has heads x head size = channels, not %d x %d of %d; wanted such a --head-size, "
            "or --out DIR, which works",
            word, cfg.NH, model_head_size(cfg), cfg.C);
    }
    if (arch->fills_channels == 2 && model_key_heads(cfg) != cfg.NH) {
        return error_set(
            error, "--export-gguf",
            "llama.cpp's %s has as many heads of keys as of queries, not %d and %d; --out DIR works", word,
            model_key_heads(cfg), cfg.NH);
    }
    if (arch->head != GGUF_HEAD_ANY && cfg.has_head != (arch->head == GGUF_HEAD_OWN)) {
        return error_set(error, "--export-gguf",
                         "llama.cpp's %s has %s output layer of its own; wanted --own-head %s, or --out DIR, "
                         "which works",
                         word, cfg.has_head ? "no" : "an", cfg.has_head ? "off" : "on");
    }
    if (cfg.expert_groups > 0) {
        return error_set(error, "--export-gguf", "%d groups of experts are not written; --out DIR works",
                         cfg.expert_groups);
    }
    return gguf_check_latent_(cfg, error) && gguf_check_scores_(cfg, error) && gguf_check_rope_(cfg, error);
}

#endif // GGUF_ARCH_IMPLEMENTATION

#endif
