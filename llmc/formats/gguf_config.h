/*
gguf_config.h -- the configuration of the model in a GGUF file, from the keys of gguf_keys.h.

It is turned into keys again: one that the file has with another value, or that is not in the table
and changes what the model computes, is refused by name.

Several architectures have the same name in GGUF: the file's experts and window decide. llama3's
scaling is only there as divisors of frequencies; its original context is found from them.
*/
#ifndef LLMC_GGUF_CONFIG_H
#define LLMC_GGUF_CONFIG_H

#include "llmc/model/config.h"

#ifdef __cplusplus
extern "C" {
#endif

// Reads the sizes and kinds of the model in a file.
ModelConfig gguf_config_read(const char* path);

#ifdef __cplusplus
}
#endif

#ifdef GGUF_CONFIG_IMPLEMENTATION

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/gguf_file.h"
#include "llmc/formats/gguf_keys.h"
#include "llmc/formats/gguf_tensors.h"

// File whose keys are read.
typedef struct {
    const GgufFile* f;
    const SafeTensors* tensors;
    Arch arch;
    const char* name; // of the architecture in GGUF
    GgufValues found;
    int has[GGUF_KEYS];
} GgufConfig_;

// ---- values ----

// Returns the pair of a key of an architecture: "llama.block_count".
static const GgufPair* gguf_own_pair_(const GgufFile* f, const char* name, const char* key) {
    char own[GGUF_NAME];
    snprintf(own, sizeof(own), "%s.%s", name, key);
    return gguf_pair(f, own);
}

static double gguf_scaling_of_(const GgufPair* pair) {
    for (int kind = 0; kind < ROPE_KINDS; kind++) {
        const char* word = gguf_scaling_word((RopeScalingKind)kind);
        if (word && gguf_pair_is(pair, word)) {
            return kind;
        }
    }
    return (double)NAN;
}

// Returns every how many layers one has no window, if a list is that of the architecture; 0: there
// are no windows; NAN: the list is another one.
static double gguf_layers_of_(const GgufPair* pair, int every) {
    int any = 0, is_own = every > 0;
    for (size_t l = 0; l < pair->count; l++) {
        const int slides = gguf_number(pair, l) != 0;
        any |= slides;
        is_own = is_own && slides == ((l + 1) % (size_t)every != 0);
    }
    return !pair->is_list ? gguf_number(pair, 0) : !any ? 0 : is_own ? every : (double)NAN;
}

// Returns the heads of keys of the layers that have any; NAN: they have others.
static double gguf_keys_of_(const GgufPair* pair, GgufMixed mixed) {
    double most = 0;
    for (size_t l = 0; l < pair->count; l++) {
        most = fmax(most, gguf_number(pair, l));
    }
    for (size_t l = 0; l < pair->count; l++) {
        const double keys = gguf_number(pair, l);
        most = keys == most || (keys == 0 && mixed == GGUF_MIXED_KEYS) ? most : (double)NAN;
    }
    return most;
}

// Returns the pairs that turn; NAN: some of them by a position that text does not have.
static double gguf_pairs_of_(const GgufPair* pair) {
    double pairs = 0;
    int is_own = pair->count == 4;
    for (size_t i = 0; i < pair->count; i++) {
        pairs += gguf_number(pair, i);
    }
    for (int i = 0; i < 4 && is_own && pairs < 1 << 16; i++) {
        is_own = gguf_number(pair, (size_t)i) == gguf_section((int)pairs, i);
    }
    return is_own ? pairs : (double)NAN;
}

// Returns the value of a key; NAN: it is not one that is wanted.
static double gguf_value_of_(const GgufKey* key, const GgufPair* pair, const GgufArch* arch) {
    switch (key->kind) {
    case GGUF_WHOLE:
    case GGUF_REAL:
    case GGUF_SWITCH:
        break;
    case GGUF_SCALING:
        return gguf_scaling_of_(pair);
    case GGUF_LAYERS:
        return gguf_layers_of_(pair, arch->full_every);
    case GGUF_KEYS_OF:
        return gguf_keys_of_(pair, arch->mixed);
    case GGUF_SECTIONS:
        return gguf_pairs_of_(pair);
    }
    return pair->is_list ? (double)NAN : gguf_number(pair, 0);
}

// Returns what is wanted of a key.
static const char* gguf_wanted_(GgufKeyKind kind) {
    switch (kind) {
    case GGUF_WHOLE:
    case GGUF_REAL:
    case GGUF_SWITCH:
        return "one number for all layers";
    case GGUF_SCALING:
        return "none, linear, yarn or longrope";
    case GGUF_LAYERS:
        return "windows in the layers that have them in llama.cpp";
    case GGUF_KEYS_OF:
        return "the same number for all layers with attention";
    case GGUF_SECTIONS:
        return "as many pairs by each of the first three positions";
    }
    return NULL;
}

static void gguf_read_value_(GgufConfig_* c, int i) {
    const GgufKey* key = &gguf_keys[i];
    const GgufPair* pair = gguf_own_pair_(c->f, c->name, key->key);
    char* member = (char*)&c->found + key->member;
    if (!pair) {
        return;
    }
    const double value = gguf_value_of_(key, pair, &gguf_archs[c->arch]);
    CHECK(isfinite(value), "%s: %s: wanted %s", c->f->path, pair->name, gguf_wanted_(key->kind));
    c->has[i] = 1;
    if (key->kind == GGUF_REAL) {
        *(float*)(void*)member = (float)value;
        return;
    }
    CHECK(value >= 0 && value < INT_MAX && value == floor(value), "%s: %s is %g, wanted a size", c->f->path,
          pair->name, value);
    *(int*)(void*)member = (int)value;
}

// Finds the architecture: with the file's experts, and with its window.
static Arch gguf_find_arch_(const GgufFile* f) {
    const GgufPair* pair = gguf_pair(f, "general.architecture");
    char known[256] = "";
    Arch arch = ARCH_COUNT;
    size_t at = 0;
    for (int i = 0; i < ARCH_COUNT; i++) {
        const char* name = gguf_archs[i].name;
        const size_t used = strlen(known);
        if (name && (i == 0 || !gguf_archs[i - 1].name || strcmp(gguf_archs[i - 1].name, name) != 0)) {
            snprintf(known + used, sizeof(known) - used, "%s%s", i ? ", " : "", name);
        }
        if (name && gguf_pair_is(pair, name)) {
            const int has_experts = gguf_number(gguf_own_pair_(f, name, "expert_count"), 0) > 0,
                      slides = gguf_number(gguf_own_pair_(f, name, "attention.sliding_window"), 0) > 0;
            const int fits = has_experts == (model_architecture((Arch)i)->router != ROUTER_NONE);
            arch = fits && (arch == ARCH_COUNT || (slides && gguf_archs[i].full_every)) ? (Arch)i : arch;
        }
    }
    const GgufText found = gguf_text(pair, &at);
    CHECK(arch < ARCH_COUNT,
          "%s: general.architecture is %.*s, or its experts are not supported; wanted one of %s", f->path,
          found.length < 64 ? (int)found.length : 64, found.text, known);
    return arch;
}

// ---- rotary positions ----

// Sets out to the divisors of frequencies of a tensor. Returns 0 if the file does not have it.
static int gguf_read_factors_(const GgufConfig_* c, const char* name, size_t pairs, float* out) {
    if (!safetensors_find(c->tensors, name)) {
        return 0;
    }
    CHECK(pairs <= ROPE_MAX_FACTORS, "%s: %zu rotary pairs, wanted at most %d", c->f->path, pairs,
          ROPE_MAX_FACTORS);
    safetensors_read_f32(safetensors_require(c->tensors, name, 1, &pairs), out);
    return 1;
}

// True if a model has these divisors of frequencies, but for rounding.
static int gguf_has_factors_(const float* found, ModelConfig cfg) {
    int ok = 1;
    for (int k = 0; k < model_rope_dims(cfg) / 2; k++) {
        ok = ok && fabsf(found[k] - gguf_factor(cfg, 0, k)) <= 1e-5f * found[k];
    }
    return ok;
}

// Sets llama3's scaling from its divisors: the last is the factor, 1 and 4 are the usual ends, and
// the original context is a power of 2.
static void gguf_find_llama3_(const GgufConfig_* c, ModelConfig* cfg) {
    const char* name = gguf_factors_name(ROPE_LLAMA3, 0);
    const size_t pairs = (size_t)model_rope_dims(*cfg) / 2;
    float found[ROPE_MAX_FACTORS];
    if (!gguf_read_factors_(c, name, pairs, found)) {
        return;
    }
    const float last = found[pairs - 1], rounded = rintf(last * 64) / 64;
    cfg->scaling =
        (RopeScaling){ROPE_LLAMA3, fabsf(last - rounded) < 1e-5f * last ? rounded : last, 1, 4, 16, 0, 0};
    while (cfg->scaling.original_context < 1 << 22 && !gguf_has_factors_(found, *cfg)) {
        cfg->scaling.original_context *= 2;
    }
    CHECK(gguf_archs[c->arch].has_llama3 && gguf_has_factors_(found, *cfg),
          "%s: tensor %s is not a scaling of llama3 with the ends 1 and 4, or %s has none", c->f->path, name,
          c->name);
    if (cfg->scaling.factor == 1) {
        memset(&cfg->scaling, 0, sizeof(cfg->scaling));
    }
}

static float gguf_or_(float value, float missing) { return value > 0 ? value : missing; }

// Sets the scaling. Missing values are llama.cpp's.
static void gguf_set_scaling_(const GgufConfig_* c, ModelConfig* cfg) {
    RopeScaling* s = &cfg->scaling;
    if (s->kind == ROPE_PLAIN) {
        memset(s, 0, sizeof(*s)); // the other keys mean nothing
        gguf_find_llama3_(c, cfg);
        return;
    }
    s->factor = gguf_or_(s->factor, 1);
    if (s->kind >= ROPE_YARN) {
        const double own = model_has_latent(*cfg) ? 1 : gguf_own_attention(s->kind, (double)s->factor);
        s->original_context = s->original_context > 0 ? s->original_context : cfg->max_T;
        s->attention = (float)((double)gguf_or_(s->attention, 1) * own);
    }
    if (s->kind == ROPE_YARN) {
        s->high_freq_factor = gguf_or_(s->high_freq_factor, 32);
        s->low_freq_factor = gguf_or_(s->low_freq_factor, 1);
    }
    for (int i = 0; i < GGUF_FACTORS && s->kind == ROPE_LONG; i++) {
        const char* name = gguf_factors_name(ROPE_LONG, i);
        CHECK(gguf_read_factors_(c, name, (size_t)model_rope_dims(*cfg) / 2,
                                 i == 0 ? cfg->rope_factors.far : cfg->rope_factors.near),
              "%s: no tensor %s", c->f->path, name);
    }
}

// ---- the configuration ----

// Sets the layers without attention, and the sizes of their mixers.
static void gguf_set_mixer_sizes_(const GgufConfig_* c, ModelConfig* cfg) {
    const GgufValues* v = &c->found;
    const GgufPair* keys = gguf_own_pair_(c->f, c->name, "attention.head_count_kv");
    const int every = v->attention_every > 0 ? v->attention_every : 4; // llama.cpp's
    const GgufMixed mixed = gguf_archs[c->arch].mixed;
    if (mixed == GGUF_MIXED_EVERY) {
        CHECK(cfg->mixer.value_heads > 0 && v->inner_size % cfg->mixer.value_heads == 0,
              "%s: %s.ssm.inner_size is %d for %d heads, wanted a multiple", c->f->path, c->name,
              v->inner_size, cfg->mixer.value_heads);
        cfg->mixer.value_size = v->inner_size / cfg->mixer.value_heads;
    } else {
        cfg->mixer.taps = v->short_taps;
    }
    CHECK(mixed == GGUF_MIXED_EVERY || !keys || !keys->is_list || keys->count == (size_t)cfg->L,
          "%s: %s.attention.head_count_kv has %zu layers, wanted %d", c->f->path, c->name, keys->count,
          cfg->L);
    for (int l = 0; l < cfg->L; l++) {
        const int is_mixed = mixed == GGUF_MIXED_EVERY
                                 ? (l + 1) % every != 0
                                 : keys && keys->is_list && gguf_number(keys, (size_t)l) == 0;
        if (is_mixed) {
            layer_add(cfg->mixed, l);
        }
    }
}

// Sets the sizes that the keys give. GPT-2 implies the others.
static void gguf_set_sizes_(const GgufConfig_* c, ModelConfig* cfg) {
    const GgufValues* v = &c->found;
    const SafeTensorsView* words = safetensors_find(c->tensors, "token_embd.weight");
    CHECK(words && words->ndim == 2 && words->shape[0] < INT_MAX - MODEL_VOCAB_ALIGN,
          "%s: no tensor token_embd.weight of 2 dimensions", c->f->path);
    *cfg = v->cfg;
    cfg->arch = c->arch;
    cfg->V = (int)words->shape[0];
    cfg->Vp = model_padded_vocab(cfg->V);
    cfg->dense_layers = v->dense_layers;
    cfg->Fe = cfg->dense_layers > 0 ? v->expert_hidden : 0;
    cfg->F = c->arch == ARCH_GPT2 ? 0 : cfg->Fe == 0 && v->expert_hidden > 0 ? v->expert_hidden : cfg->F;
    CHECK(c->arch == ARCH_GPT2 || cfg->F > 0, "%s: no hidden units", c->f->path);
    if (c->arch != ARCH_GPT2) {
        cfg->has_head = safetensors_find(c->tensors, "output.weight") != NULL;
        cfg->KV = model_key_heads(*cfg);
        cfg->HS = cfg->HS > 0 || cfg->NH == 0 ? cfg->HS : cfg->C / cfg->NH;
        if (model_has_latent(*cfg)) {
            cfg->HS = v->key_size_mla, cfg->KV = cfg->NH, cfg->latent.value = v->value_size_mla;
        }
        cfg->rope_dims = cfg->rope_dims == cfg->HS ? 0 : cfg->rope_dims;
        cfg->rope_base = model_rope_base(*cfg);
        const int Fe = model_expert_hidden(*cfg);
        cfg->Fs = v->shared_experts < 1024 && Fe <= 1 << 20 ? v->shared_experts * Fe : -1;
    }
}

// Returns the configuration that the keys give.
static ModelConfig gguf_config_of_(const GgufConfig_* c) {
    const GgufArch* arch = &gguf_archs[c->arch];
    char error[ERROR_BYTES];
    ModelConfig cfg;
    gguf_set_sizes_(c, &cfg);
    if (arch->mixed != GGUF_MIXED_NONE && cfg.L <= MODEL_MAX_LAYERS) {
        gguf_set_mixer_sizes_(c, &cfg);
    }
    CHECK(model_check_config(cfg, c->f->path, error), "%s", error);
    if (c->arch != ARCH_GPT2) {
        gguf_set_scaling_(c, &cfg);
        cfg.window_rope_base = gguf_or_(cfg.window_rope_base, 10000);
        for (int l = 0; l < cfg.L && cfg.window > 0; l++) { // Phi 3's; others know which
            cfg.windows[l / 8] |= (uint8_t)(1 << l % 8);
        }
        gguf_set_layers(&cfg);
        CHECK(cfg.window > 0 || gguf_full_every(cfg) == 0, "%s: no key %s.attention.sliding_window",
              c->f->path, c->name);
        const float scale = gguf_score_scale(cfg), usual = 1 / sqrtf((float)cfg.HS);
        cfg.attention_scale = FAMILY_GRANITE >> c->arch & 1 || scale == usual ? cfg.attention_scale : scale;
        if (model_has_latent(cfg) && c->found.log_multiplier > 0) {
            cfg.attention_scale = gguf_latent_scale(cfg, c->found.log_multiplier);
        }
        cfg.router_factor = model_architecture(c->arch)->router == ROUTER_SIGMOID ? cfg.router_factor : 0;
        // missing caps are Gemma 2's
        cfg.attention_softcap = arch->has_caps ? gguf_or_(cfg.attention_softcap, 50) : 0;
        cfg.softcap = arch->has_caps ? gguf_or_(cfg.softcap, 30) : 0;
        CHECK(model_check_config(cfg, c->f->path, error), "%s", error);
    }
    return cfg;
}

// ---- what is refused ----

// Refuses a key with another value than the model's. The context may go beyond a window that
// llama.cpp does not know; layers with a window may have the base of the others; hidden units of
// dense layers mean nothing where all layers have experts.
static void gguf_check_values_(const GgufConfig_* c, ModelConfig cfg) {
    const GgufValues own = gguf_values(cfg);
    for (int i = 0; i < GGUF_KEYS; i++) {
        const GgufKey* key = &gguf_keys[i];
        const double found = gguf_value(&c->found, key), wanted = gguf_value(&own, key);
        const size_t m = key->member;
        const int is_free =
            m == GGUF_MEMBER(cfg.max_T) ||
            (m == GGUF_MEMBER(cfg.F) && c->found.expert_hidden > 0 && cfg.dense_layers == 0) ||
            (m == GGUF_MEMBER(cfg.window_rope_base) && found == (double)model_rope_base(cfg)) ||
            (m == GGUF_MEMBER(cfg.router_factor) && found == 1);
        CHECK(!c->has[i] || is_free || fabs(found - wanted) <= 1e-6 * fabs(wanted),
              "%s: %s.%s is %g, and this program computes only %s with %g", c->f->path, c->name, key->key,
              found, c->name, wanted);
    }
}

// True for keys whose value changes nothing that we compute.
static int gguf_is_neutral_(const char* key) {
    static const char* const keys[] = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"};
    size_t i = 0;
    while (i < sizeof(keys) / sizeof(keys[0]) && strcmp(key, keys[i]) != 0) {
        i++;
    }
    return i < sizeof(keys) / sizeof(keys[0]);
}

// Refuses keys of the architecture that are not in the table, unless they switch something off: by
// false, or by a number that is 0 or, for a factor or a group, 1.
static void gguf_check_others_(const GgufConfig_* c) {
    const size_t length = strlen(c->name);
    for (const GgufPair* pair = c->f->pairs; pair < c->f->pairs + c->f->num_pairs; pair++) {
        const char* key = pair->name + length + 1;
        if (strncmp(pair->name, c->name, length) != 0 || pair->name[length] != '.' || gguf_is_neutral_(key)) {
            continue;
        }
        int i = 0;
        while (i < GGUF_KEYS && strcmp(gguf_keys[i].key, key) != 0) {
            i++;
        }
        const double value = gguf_number(pair, 0);
        const int is_off = value == 0 || (value == 1 && pair->type != GGUF_BOOL) ||
                           (value == 1 && strcmp(key, "attention.causal") == 0);
        CHECK(i < GGUF_KEYS || (is_off && !pair->is_list),
              "%s: %s changes what the model computes, which is not supported", c->f->path, pair->name);
    }
}

static ModelConfig gguf_config_(GgufFile* f) {
    SafeTensors tensors = gguf_tensors(f);
    GgufConfig_ c;
    memset(&c, 0, sizeof(c));
    c.f = f, c.tensors = &tensors;
    c.arch = gguf_find_arch_(f);
    c.name = gguf_archs[c.arch].name;
    for (int i = 0; i < GGUF_KEYS; i++) {
        gguf_read_value_(&c, i);
    }
    const ModelConfig cfg = gguf_config_of_(&c);
    gguf_check_values_(&c, cfg);
    gguf_check_others_(&c);
    safetensors_close(&tensors);
    return cfg;
}

ModelConfig gguf_config_read(const char* path) {
    GgufFile f;
    gguf_file_open(&f, path);
    const ModelConfig cfg = gguf_config_(&f);
    gguf_file_close(&f);
    return cfg;
}

#endif // GGUF_CONFIG_IMPLEMENTATION

#endif
