/*
presets.h -- named models: published sizes.
*/
#ifndef LLMC_PRESETS_H
#define LLMC_PRESETS_H

#include <stddef.h>

#include "llmc/model/config.h"

#define GPT2_VOCAB 50257
// Model with a name. GPT-2's are called by their depth (gpt2:d12, or d12), GPT-3's by their width
// (gpt3:c768); the published sizes of GPT-2 also have Hugging Face's names. 0 means the same as in
// ModelConfig; with a vocabulary of 0 the tokenizer decides.
typedef struct {
    const char* name;
    Arch arch;
    int L, C, NH, KV, HS, F, max_T, V, has_head;
    float norm_eps, rope_base, softcap;
    RopeScaling scaling;
    int E, E_used;
    int window;        // of the layers that have one in its family
    float window_base; // rope_base of these layers; 0: all have the same positions
    float attention_scale, embedding_factor, residual_factor, logits_divisor;
    int rope_dims;
    float attention_softcap;
    const char* layer_types; // --layer-types; NULL: those of the family
    ModelMixer mixer;        // 0: derived from the heads
    int dense_layers, Fe, Fs, expert_groups, expert_groups_used;
    float router_factor;
    ModelLatent latent; // 0: derived from the heads
} ModelPreset;

#ifdef __cplusplus
extern "C" {
#endif

// All models with a name; their number in *count.
const ModelPreset* model_presets(int* count);

// Returns the model called `name` (the prefix "gpt2:" is optional), or NULL.
const ModelPreset* model_preset_by_name(const char* name);

// Sets `text` to all names, sizes after their family: "gpt2:d6 d12 ..., llama:135m ...".
void model_preset_names(char* text, size_t room);

// Returns the sizes of a named model with a vocabulary of V. The family decides which layers have a
// window, and which turn (settle_model.h).
ModelConfig model_preset_config(const ModelPreset* preset, int V);

#ifdef __cplusplus
}
#endif

#ifdef PRESETS_IMPLEMENTATION

#include <stdio.h>
#include <string.h>

#define MODEL_(name_, arch_, l, c, nh, kv, hs, f, t, v, head, eps, ...)                                      \
    {                                                                                                        \
        .name = name_, .arch = arch_, .L = l, .C = c, .NH = nh, .KV = kv, .HS = hs, .F = f, .max_T = t,      \
        .V = v, .has_head = head, .norm_eps = eps, __VA_ARGS__                                               \
    }
#define EXPERTS_(name, arch, l, c, nh, kv, hs, f, e, used, t, v, head, eps, ...)                             \
    MODEL_(name, arch, l, c, nh, kv, hs, f, t, v, head, eps, .E = e, .E_used = used, __VA_ARGS__)
#define LLAMA3_SCALING_(times)                                                                               \
    { ROPE_LLAMA3, times, 1, 4, 8192, 0, 0 }
#define YARN_(times, original, attention, is_exact)                                                          \
    { ROPE_YARN, times, 1, 32, original, attention, is_exact }
#define GPT_(name_, l, c, nh, t)                                                                             \
    { .name = name_, .arch = ARCH_GPT2, .L = l, .C = c, .NH = nh, .max_T = t }
#define LLAMA3_(name, l, c, nh, kv, f, head, times)                                                          \
    MODEL_(name, ARCH_LLAMA, l, c, nh, kv, 0, f, 131072, 128256, head, 1e-5f, .rope_base = 5e5f,             \
           .scaling = LLAMA3_SCALING_(times))
#define NANOCHAT_(name, l, c, nh, t, v)                                                                      \
    MODEL_(name, ARCH_NANOCHAT, l, c, nh, 0, 0, 0, t, v, 1, 1e-6f, .rope_base = 1e4f, .softcap = 15)
#define OLMO3_(name, l, c, nh, kv, f)                                                                        \
    MODEL_(name, ARCH_OLMO3, l, c, nh, kv, 0, f, 65536, 100278, 1, 1e-6f, .rope_base = 5e5f,                 \
           .scaling = YARN_(8, 8192, 1.2079441541679836f, 0), .window = 4096, .window_base = 5e5f)
#define GEMMA2_(name, l, c, nh, kv, f)                                                                       \
    MODEL_(name, ARCH_GEMMA2, l, c, nh, kv, 256, f, 8192, 256000, 0, 1e-6f, .rope_base = 1e4f,               \
           .softcap = 30, .window = 4096, .attention_softcap = 50)
#define GEMMA3_(name, l, c, nh, kv, f, t, v, ...)                                                            \
    MODEL_(name, ARCH_GEMMA3, l, c, nh, kv, 256, f, t, v, 0, 1e-6f, .rope_base = 1e6f, .window_base = 1e4f,  \
           __VA_ARGS__)
#define GRANITE_(name, arch, l, c, nh, kv, f, v, scale, divisor)                                             \
    MODEL_(name, arch, l, c, nh, kv, 0, f, 131072, v, 0, 1e-5f, .rope_base = 1e7f, .attention_scale = scale, \
           .embedding_factor = 12, .residual_factor = 0.22f, .logits_divisor = divisor)
#define QWEN35_(name, l, c, nh, kv, f, heads)                                                                \
    MODEL_(name, ARCH_QWEN35, l, c, nh, kv, 256, f, 262144, 248320, 0, 1e-6f, .rope_base = 1e7f,             \
           .rope_dims = 64, .mixer = {4, 16, heads, 128, 128})
#define DEEPSEEK_(name, l, c, nh, f, fe, e, used, t, v, head, eps, base, ...)                                \
    MODEL_(name, ARCH_DEEPSEEK3, l, c, nh, 0, 192, f, t, v, head, eps, .rope_base = base, .E = e,            \
           .E_used = used, .Fe = fe, .rope_dims = 64, __VA_ARGS__)
#define LFM2_(name, c, nh, f)                                                                                \
    MODEL_(name, ARCH_LFM2, 16, c, nh, 8, 64, f, 128000, 65536, 0, 1e-5f, .rope_base = 1e6f,                 \
           .mixer.taps = 3,                                                                                  \
           .layer_types = "2xconv,full,2xconv,full,2xconv,full,conv,full,conv,full,conv,full,conv")

// clang-format off
static const ModelPreset models_[] = {
    GPT_("gpt2:d6",      6,   384,  6, 1024), GPT_("gpt2:d12",    12,   768, 12, 1024), // d12: GPT-2 124M
    GPT_("gpt2:d24",    24,  1024, 16, 1024), GPT_("gpt2:d36",    36,  1280, 20, 1024), // 350M, 774M
    GPT_("gpt2:d48",    48,  1600, 25, 1024), GPT_("gpt2:d60",    60,  1920, 30, 1024), // 1558M
    GPT_("gpt2:d72",    72,  2880, 30, 1024), GPT_("gpt2:d84",    84,  3456, 36, 1024),
    GPT_("gpt3:c384",    6,   384,  6, 2048), GPT_("gpt3:c768",   12,   768, 12, 2048), // c768: GPT-3 125M
    GPT_("gpt3:c1024",  24,  1024, 16, 2048), GPT_("gpt3:c1536",  24,  1536, 16, 2048), // 350M, 760M
    GPT_("gpt3:c2048",  24,  2048, 16, 2048), GPT_("gpt3:c2560",  32,  2560, 32, 2048), // 1.3B, 2.7B
    GPT_("gpt3:c4096",  32,  4096, 32, 2048), GPT_("gpt3:c5120",  40,  5120, 40, 2048), // 6.7B, 13B
    GPT_("gpt3:c5140",  40,  5120, 40, 2048),                                           // 13B as the paper misprints it
    GPT_("gpt3:c12288", 96, 12288, 96, 2048),                                           // 175B
    GPT_("gpt2",        12,   768, 12, 1024), GPT_("gpt2-medium", 24,  1024, 16, 1024),
    GPT_("gpt2-large",  36,  1280, 20, 1024), GPT_("gpt2-xl",     48,  1600, 25, 1024),
    //     name          architecture  L     C  NH KV   HS     F   max_T       V  head    eps
    MODEL_("llama:135m", ARCH_LLAMA,  30,  576,  9, 3,   0, 1536,   8192,  49152, 0, 1e-5f, .rope_base = 1e5f), // SmolLM2
    MODEL_("llama:360m", ARCH_LLAMA,  32,  960, 15, 5,   0, 2560,   8192,  49152, 0, 1e-5f, .rope_base = 1e5f),
    MODEL_("llama:1.1b", ARCH_LLAMA,  22, 2048, 32, 4,   0, 5632,   2048,  32000, 1, 1e-5f, .rope_base = 1e4f), // TinyLlama
    LLAMA3_("llama:1b",               16, 2048, 32, 8,       8192, 0, 32), // Llama 3.2
    LLAMA3_("llama:3b",               28, 3072, 24, 8,       8192, 0, 32),
    LLAMA3_("llama:8b",               32, 4096, 32, 8,      14336, 1, 8), // Llama 3.1
    LLAMA3_("llama:70b",              80, 8192, 64, 8,      28672, 1, 8),
    MODEL_("mistral:7b", ARCH_MISTRAL, 32, 4096, 32, 8,  0, 14336, 32768,  32768, 1, 1e-5f, .rope_base = 1e6f), // v0.3: no window
    MODEL_("qwen2:0.5b", ARCH_QWEN2,  24,  896, 14, 2,   0, 4864,  32768, 151936, 0, 1e-6f, .rope_base = 1e6f),
    MODEL_("qwen2:1.5b", ARCH_QWEN2,  28, 1536, 12, 2,   0, 8960,  32768, 151936, 0, 1e-6f, .rope_base = 1e6f),
    MODEL_("qwen2:3b",   ARCH_QWEN2,  36, 2048, 16, 2,   0, 11008, 32768, 151936, 0, 1e-6f, .rope_base = 1e6f),
    MODEL_("qwen2:7b",   ARCH_QWEN2,  28, 3584, 28, 4,   0, 18944, 32768, 152064, 1, 1e-6f, .rope_base = 1e6f),
    MODEL_("qwen3:0.6b", ARCH_QWEN3,  28, 1024, 16, 8, 128, 3072,  40960, 151936, 0, 1e-6f, .rope_base = 1e6f),
    MODEL_("qwen3:1.7b", ARCH_QWEN3,  28, 2048, 16, 8, 128, 6144,  40960, 151936, 0, 1e-6f, .rope_base = 1e6f),
    MODEL_("qwen3:4b",   ARCH_QWEN3,  36, 2560, 32, 8, 128, 9728,  40960, 151936, 0, 1e-6f, .rope_base = 1e6f),
    MODEL_("qwen3:8b",   ARCH_QWEN3,  36, 4096, 32, 8, 128, 12288, 40960, 151936, 1, 1e-6f, .rope_base = 1e6f),
    MODEL_("smollm3:3b", ARCH_SMOLLM3, 36, 2048, 16, 4,  0, 11008, 65536, 128256, 0, 1e-6f, .rope_base = 5e6f),
    MODEL_("olmo2:1b",   ARCH_OLMO2,  16, 2048, 16, 0,   0, 8192,   4096, 100352, 1, 1e-6f, .rope_base = 5e5f),
    MODEL_("olmo2:7b",   ARCH_OLMO2,  32, 4096, 32, 0,   0, 11008,  4096, 100352, 1, 1e-6f, .rope_base = 5e5f),
    OLMO3_("olmo3:7b",                32, 4096, 32, 32,     11008),
    OLMO3_("olmo3:32b",               64, 5120, 40, 8,      27648),
    GRANITE_("granite:2b", ARCH_GRANITE,  40, 2048, 32, 8,   8192,          49159, 0.015625f, 8), // 3.3
    GRANITE_("granite:8b", ARCH_GRANITE,  40, 4096, 32, 8,  12800,          49159, 0.0078125f, 16),
    GRANITE_("granite4:1b", ARCH_GRANITE4, 40, 2048, 16, 4,  4096,         100352, 0.0078125f, 8),
    GRANITE_("granite4:3b", ARCH_GRANITE4, 40, 2560, 40, 8,  8192,         100352, 0.015625f, 10), // micro
    GEMMA2_("gemma2:2b",   26, 2304,  8, 4,  9216),
    GEMMA2_("gemma2:9b",   42, 3584, 16, 8, 14336),
    GEMMA3_("gemma3:270m", 18,  640,  4, 1,  2048,  32768, 262144, .window = 512),
    GEMMA3_("gemma3:1b",   26, 1152,  4, 1,  6912,  32768, 262144, .window = 512),
    GEMMA3_("gemma3:4b",   34, 2560,  8, 4, 10240, 131072, 262208, .window = 1024, .scaling = {.kind = ROPE_LINEAR, .factor = 8}),
    MODEL_("phi3:mini",  ARCH_PHI3,   32, 3072, 32, 0,   0, 8192,   4096,  32064, 1, 1e-5f, .rope_base = 1e4f, .window = 2047),
    MODEL_("glm4:9b",    ARCH_GLM4,   40, 4096, 32, 2, 128, 13696, 32768, 151552, 1, 1e-5f, .rope_base = 1e4f, .rope_dims = 64),
    MODEL_("exaone4:1.2b", ARCH_EXAONE4, 30, 2048, 32, 8, 64, 4096, 65536, 102400, 0, 1e-5f, .rope_base = 1e6f, .scaling = LLAMA3_SCALING_(16)),
    QWEN35_("qwen35:0.8b", 24, 1024,  8, 2, 3584, 16),
    QWEN35_("qwen35:2b",   24, 2048,  8, 2, 6144, 16),
    QWEN35_("qwen35:4b",   32, 2560, 16, 4, 9216, 32),
    // A hybrid that a laptop trains. The tokenizer decides its vocabulary.
    MODEL_("delta:25m", ARCH_QWEN35, 8, 512, 4, 2, 128, 1024, 2048, 0, 0, 1e-6f, .rope_base = 1e4f, .rope_dims = 32, .mixer = {4, 4, 4, 128, 128}),
    LFM2_("lfm2:350m", 1024, 16, 4608), LFM2_("lfm2:1.2b", 2048, 32, 8192),
    //       name               architecture    L     C  NH KV   HS      F    E used  max_T      V  head   eps
    EXPERTS_("moe:8x124m",      ARCH_MIXTRAL,  12,  768, 12, 0,   0,  1024,   8, 2,  1024,     0, 0, 1e-5f, .rope_base = 1e4f),
    EXPERTS_("mixtral:8x7b",    ARCH_MIXTRAL,  32, 4096, 32, 8,   0, 14336,   8, 2, 32768, 32000, 1, 1e-5f, .rope_base = 1e6f),
    EXPERTS_("olmoe:1b-7b",     ARCH_OLMOE,    16, 2048, 16, 0,   0,  1024,  64, 8,  4096, 50304, 1, 1e-5f, .rope_base = 1e4f),
    EXPERTS_("qwen3moe:30b-a3b", ARCH_QWEN3MOE, 48, 2048, 32, 4, 128,   768, 128, 8, 40960, 151936, 1, 1e-6f, .rope_base = 1e6f),
    EXPERTS_("gpt-oss:20b",     ARCH_GPTOSS,   24, 2880, 64, 8,  64,  2880,  32, 4, 131072, 201088, 1, 1e-5f, .rope_base = 1.5e5f, .window = 128,
        .scaling = YARN_(32, 4096, 1.3465735902799727f, 1)),
    DEEPSEEK_("moonlight:16b",      27, 2048, 16, 11264, 1408, 64, 6, 8192, 163840, 1, 1e-5f, 5e4f, .Fs = 2816, .dense_layers = 1,
        .router_factor = 2.446f, .latent = {.rank = 512, .value = 128}),
    DEEPSEEK_("deepseek3:671b",     61, 7168, 128, 18432, 2048, 256, 8, 163840, 129280, 1, 1e-6f, 1e4f, .Fs = 2048, .dense_layers = 3,
        .router_factor = 2.5f, .expert_groups = 8, .expert_groups_used = 4, .latent = {.query_rank = 1536, .rank = 512, .value = 128},
        .scaling = YARN_(40, 4096, 1, 0), .attention_scale = 0.13523377f), // (1 + ln(40) / 10)^2 / sqrt(192)
    // of about 50M parameters with a tokenizer of 24,000 tokens, a token uses 25M
    MODEL_("mla:moe-50m", ARCH_DEEPSEEK3, 8, 384, 6, 0, 96, 1024, 1024, 0, 0, 1e-6f, .rope_base = 1e4f, .rope_dims = 32, .E = 16, .E_used = 4,
        .Fe = 256, .Fs = 256, .dense_layers = 1, .latent = {.query_rank = 192, .rank = 128, .value = 64}),
    NANOCHAT_("nanochat:d12", 12, 768, 6, 2048, 65536),
    NANOCHAT_("nanochat:d20", 20, 1280, 10, 2048, 65536),
    NANOCHAT_("speedrun", 12, 768, 6, 1024, 0), // it also has a recipe (recipes.h)
};
// clang-format on

#undef MODEL_
#undef EXPERTS_
#undef LLAMA3_SCALING_
#undef YARN_
#undef GPT_
#undef LLAMA3_
#undef NANOCHAT_
#undef OLMO3_
#undef GEMMA2_
#undef GEMMA3_
#undef GRANITE_
#undef QWEN35_
#undef LFM2_
#undef DEEPSEEK_

const ModelPreset* model_presets(int* count) {
    *count = (int)(sizeof(models_) / sizeof(models_[0]));
    return models_;
}

const ModelPreset* model_preset_by_name(const char* name) {
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

void model_preset_names(char* text, size_t room) {
    int count;
    const ModelPreset* models = model_presets(&count);
    size_t used = 0, before = 0;
    text[0] = '\0';
    for (int i = 0; i < count && used < room; i++) {
        const char* name = models[i].name;
        const size_t family = strcspn(name, ":") + 1, length = strlen(name);
        const int is_next =
            i > 0 && family <= length && family == before && strncmp(name, models[i - 1].name, family) == 0;
        used += (size_t)snprintf(text + used, room - used, "%s%s",
                                 i == 0    ? ""
                                 : is_next ? " "
                                           : ", ",
                                 is_next ? name + family : name);
        before = family;
    }
}

ModelConfig model_preset_config(const ModelPreset* preset, int V) {
    ModelConfig cfg;
    memset(&cfg, 0, sizeof(cfg));
    cfg.max_T = preset->max_T, cfg.V = V, cfg.Vp = model_padded_vocab(V);
    cfg.L = preset->L, cfg.NH = preset->NH, cfg.C = preset->C;
    cfg.arch = preset->arch;
    cfg.KV = preset->KV, cfg.HS = preset->HS, cfg.F = preset->F;
    cfg.has_head = preset->has_head;
    cfg.norm_eps = preset->norm_eps, cfg.rope_base = preset->rope_base, cfg.softcap = preset->softcap;
    cfg.scaling = preset->scaling;
    cfg.E = preset->E, cfg.E_used = preset->E_used;
    cfg.window = preset->window, cfg.window_rope_base = preset->window_base;
    cfg.rope_dims = preset->rope_dims;
    cfg.attention_scale = preset->attention_scale, cfg.embedding_factor = preset->embedding_factor;
    cfg.residual_factor = preset->residual_factor, cfg.logits_divisor = preset->logits_divisor;
    cfg.attention_softcap = preset->attention_softcap;
    cfg.mixer = preset->mixer;
    cfg.dense_layers = preset->dense_layers, cfg.Fe = preset->Fe, cfg.Fs = preset->Fs;
    cfg.expert_groups = preset->expert_groups, cfg.expert_groups_used = preset->expert_groups_used;
    cfg.router_factor = preset->router_factor;
    cfg.latent = preset->latent;
    return cfg;
}

#endif // PRESETS_IMPLEMENTATION

#endif
