/*
gguf_config.h -- the configuration of the model in a GGUF file, from the keys of gguf_keys.h.

It is turned into keys again: one that the file has with another value, or that is not in the table
and changes what the model computes, is refused by name.

Several architectures have the same name in GGUF: the file's experts and window decide. llama3's
scaling is only there as divisors of frequencies; its original context is found from them.
*/
#ifndef LLMC_GGUF_CONFIG_H
#define LLMC_GGUF_CONFIG_H

#include "llmc/model/model.h"

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

static int gguf_scaling_of_(const GgufConfig_* c, const GgufPair* pair) {
    for (int kind = 0; kind < ROPE_KINDS; kind++) {
        const char* word = gguf_scaling_word((RopeScalingKind)kind);
        if (word && gguf_pair_is(pair, word)) {
            return kind;
        }
    }
    CHECK(0, "%s: %s is not one of none, linear, yarn and longrope", c->f->path, pair->name);
    return 0;
}

// Returns every how many layers one has no window, as the architecture does; 0: there are no
// windows.
static double gguf_layers_of_(const GgufConfig_* c, const GgufPair* pair) {
    const int every = gguf_archs[c->arch].full_every;
    int any = 0;
    for (size_t l = 0; l < pair->count; l++) {
        any |= gguf_number(pair, l) != 0;
    }
    for (size_t l = 0; l < pair->count && any && pair->is_list; l++) {
        const int slides = every > 0 && (l + 1) % (size_t)every != 0;
        CHECK((gguf_number(pair, l) != 0) == slides, "%s: %s: layer %zu has %s window, and in %s it has %s",
              c->f->path, pair->name, l, slides ? "no" : "a", c->name, slides ? "one" : "none");
    }
    return pair->is_list ? (any ? every : 0) : gguf_number(pair, 0);
}

static void gguf_read_value_(GgufConfig_* c, int i) {
    const GgufKey* key = &gguf_keys[i];
    const GgufPair* pair = gguf_own_pair_(c->f, c->name, key->key);
    char* member = (char*)&c->found + key->member;
    if (!pair) {
        return;
    }
    const double value = key->kind == GGUF_SCALING  ? gguf_scaling_of_(c, pair)
                         : key->kind == GGUF_LAYERS ? gguf_layers_of_(c, pair)
                                                    : gguf_number(pair, 0);
    CHECK(isfinite(value) && (!pair->is_list || key->kind == GGUF_LAYERS),
          "%s: %s is not a number, wanted one for all layers", c->f->path, pair->name);
    c->has[i] = 1;
    if (key->kind == GGUF_REAL) {
        *(float*)(void*)member = (float)value;
        return;
    }
    CHECK(value >= 0 && value < INT_MAX && value == floor(value), "%s: %s is %g, wanted a size", c->f->path,
          pair->name, value);
    *(int*)(void*)member = (int)value;
}

// True if no architecture before this one has its name.
static int gguf_is_new_name_(int arch) {
    int i = 0;
    while (!gguf_archs[i].name || strcmp(gguf_archs[i].name, gguf_archs[arch].name) != 0) {
        i++;
    }
    return i == arch;
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
        if (name && gguf_is_new_name_(i)) {
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

// ---- the configuration ----

// Sets out to the divisors of frequencies of a tensor.
static void gguf_read_factors_(const GgufConfig_* c, const char* name, size_t pairs, float* out) {
    CHECK(pairs <= ROPE_MAX_FACTORS, "%s: %zu rotary pairs, wanted at most %d", c->f->path, pairs,
          ROPE_MAX_FACTORS);
    safetensors_read_f32(safetensors_require(c->tensors, name, 1, &pairs), out);
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
    if (!safetensors_find(c->tensors, name)) {
        return;
    }
    CHECK(gguf_archs[c->arch].has_llama3, "%s: tensor %s, which %s does not have", c->f->path, name, c->name);
    gguf_read_factors_(c, name, pairs, found);
    const float last = found[pairs - 1], rounded = rintf(last * 64) / 64;
    const float factor = fabsf(last - rounded) < 1e-5f * last ? rounded : last;
    cfg->scaling = (RopeScaling){ROPE_LLAMA3, factor, 1, 4, 16, 0, 0};
    while (cfg->scaling.original_context < 1 << 22 && !gguf_has_factors_(found, *cfg)) {
        cfg->scaling.original_context *= 2;
    }
    CHECK(gguf_has_factors_(found, *cfg), "%s: tensor %s is not a scaling of llama3 with the ends 1 and 4",
          c->f->path, name);
    if (factor == 1) {
        memset(&cfg->scaling, 0, sizeof(cfg->scaling));
    }
}

// Sets positions, and which layers have a window and turn, as llama.cpp knows them. Missing values
// are its own.
static void gguf_set_positions_(const GgufConfig_* c, ModelConfig* cfg) {
    RopeScaling* s = &cfg->scaling;
    if (s->kind == ROPE_PLAIN) {
        memset(s, 0, sizeof(*s));
        gguf_find_llama3_(c, cfg);
    } else {
        s->factor = s->factor > 0 ? s->factor : 1;
    }
    if (s->kind >= ROPE_YARN) {
        s->original_context = s->original_context > 0 ? s->original_context : cfg->max_T;
        s->attention = (float)((s->attention > 0 ? (double)s->attention : 1) *
                               gguf_own_attention(s->kind, (double)s->factor));
    }
    if (s->kind == ROPE_YARN) {
        s->high_freq_factor = s->high_freq_factor > 0 ? s->high_freq_factor : 32;
        s->low_freq_factor = s->low_freq_factor > 0 ? s->low_freq_factor : 1;
    } else if (s->kind == ROPE_LONG) {
        const size_t pairs = (size_t)model_rope_dims(*cfg) / 2;
        gguf_read_factors_(c, gguf_factors_name(ROPE_LONG, 0), pairs, cfg->rope_factors.far);
        gguf_read_factors_(c, gguf_factors_name(ROPE_LONG, 1), pairs, cfg->rope_factors.near);
    }
    const int full_every = gguf_full_every(*cfg), rests_every = gguf_unrotated_every(*cfg);
    for (int l = 0; l < cfg->L; l++) {
        const int slides = cfg->window > 0 && (full_every == 0 || (l + 1) % full_every != 0),
                  rests = rests_every > 0 && (l + 1) % rests_every == 0;
        cfg->windows[l / 8] |= (uint8_t)(slides << l % 8);
        cfg->unrotated[l / 8] |= (uint8_t)(rests << l % 8);
    }
}

// Sets the base of layers with a window; 0: they have the same positions as others.
static void gguf_set_window_base_(ModelConfig* cfg) {
    const GgufWindowRope kind = gguf_archs[cfg->arch].window_rope;
    const float base = kind == GGUF_ROPE_UNSCALED     ? cfg->rope_base
                       : cfg->window_rope_base > 0 ? cfg->window_rope_base
                                                   : 10000;
    const int is_same = base == cfg->rope_base && cfg->scaling.kind == ROPE_PLAIN;
    cfg->window_rope_base = kind == GGUF_ROPE_SAME || is_same || cfg->window == 0 ? 0 : base;
}

// Sets what the keys say of a model of another family than GPT-2, which implies it.
static void gguf_set_family_(const GgufConfig_* c, ModelConfig* cfg) {
    const GgufValues* v = &c->found;
    const Arch arch = cfg->arch;
    ModelConfig read = v->cfg;
    read.arch = arch, read.V = cfg->V, read.Vp = cfg->Vp;
    read.has_head = safetensors_find(c->tensors, "output.weight") != NULL;
    read.KV = model_key_heads(read);
    read.HS = read.HS > 0 || read.NH == 0 ? read.HS : read.C / read.NH;
    read.rope_dims = read.rope_dims == read.HS ? 0 : read.rope_dims;
    read.rope_base = model_rope_base(read);
    read.F = v->expert_hidden > 0 ? v->expert_hidden : read.F;
    read.Fs = v->shared_experts < 1024 && read.F <= 1 << 20 ? v->shared_experts * read.F : -1;
    read.router_factor = model_architecture(arch)->router == ROUTER_SIGMOID ? read.router_factor : 0;
    if (gguf_archs[arch].has_caps) { // Gemma 2's
        read.attention_softcap = read.attention_softcap > 0 ? read.attention_softcap : 50;
        read.softcap = read.softcap > 0 ? read.softcap : 30;
    }
    *cfg = read;
}

// Returns the configuration that the keys give.
static ModelConfig gguf_config_of_(const GgufConfig_* c) {
    const SafeTensorsView* words = safetensors_find(c->tensors, "token_embd.weight");
    const ModelConfig* found = &c->found.cfg;
    const int is_gpt2 = c->arch == ARCH_GPT2;
    char error[ERROR_BYTES];
    ModelConfig cfg = {.arch = c->arch, .max_T = found->max_T, .C = found->C, .L = found->L, .NH = found->NH};
    CHECK(words && words->ndim == 2 && words->shape[0] < INT_MAX - MODEL_VOCAB_ALIGN,
          "%s: no tensor token_embd.weight of 2 dimensions", c->f->path);
    cfg.V = (int)words->shape[0];
    cfg.Vp = model_padded_vocab(cfg.V);
    if (!is_gpt2) {
        gguf_set_family_(c, &cfg);
    }
    CHECK(is_gpt2 || cfg.F > 0, "%s: no hidden units", c->f->path);
    CHECK(model_check_config(cfg, c->f->path, error), "%s", error);
    if (!is_gpt2) {
        gguf_set_positions_(c, &cfg);
        gguf_set_window_base_(&cfg);
        const float scale = gguf_score_scale(cfg), usual = 1 / sqrtf((float)cfg.HS);
        cfg.attention_scale = FAMILY_GRANITE >> c->arch & 1 ? cfg.attention_scale
                              : scale != usual              ? scale
                                                            : 0;
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
            m == GGUF_MEMBER_(cfg.max_T) || (m == GGUF_MEMBER_(cfg.F) && c->found.expert_hidden > 0) ||
            (m == GGUF_MEMBER_(cfg.window_rope_base) && found == (double)model_rope_base(cfg)) ||
            (m == GGUF_MEMBER_(cfg.router_factor) && found == 1);
        CHECK(!c->has[i] || is_free || fabs(found - wanted) <= 1e-6 * fabs(wanted),
              "%s: %s.%s is %g, and this program computes only %s with %g", c->f->path, c->name, key->key,
              found, c->name, wanted);
    }
}

// Returns the value of a key that changes nothing: NAN: any; 0 of keys that are not listed.
static double gguf_neutral_(const char* key) {
    static const struct {
        const char* key;
        double value;
    } keys[] = {{"vocab_size", (double)NAN},
                {"rope.scaling.finetuned", (double)NAN},
                {"tensor_data_layout", (double)NAN},
                {"attention.causal", 1},
                {"expert_group_count", 1},
                {"expert_group_used_count", 1},
                {"rope.scale_linear", 1},
                {"rope.scaling.yarn_attn_factor", 1},
                {"rope.scaling.yarn_ext_factor", 1}};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        if (strcmp(keys[i].key, key) == 0) {
            return keys[i].value;
        }
    }
    return 0;
}

// Refuses keys of the architecture that are not in the table, unless they change nothing.
static void gguf_check_others_(const GgufConfig_* c) {
    const size_t length = strlen(c->name);
    for (const GgufPair* pair = c->f->pairs; pair < c->f->pairs + c->f->num_pairs; pair++) {
        if (strncmp(pair->name, c->name, length) != 0 || pair->name[length] != '.') {
            continue;
        }
        const char* key = pair->name + length + 1;
        int i = 0;
        while (i < GGUF_KEYS && strcmp(gguf_keys[i].key, key) != 0) {
            i++;
        }
        const double neutral = gguf_neutral_(key);
        CHECK(i < GGUF_KEYS || isnan(neutral) || gguf_number(pair, 0) == neutral,
              "%s: %s changes what the model computes, which is not supported", c->f->path, pair->name);
    }
}

ModelConfig gguf_config_read(const char* path) {
    GgufFile f;
    gguf_file_open(&f, path);
    SafeTensors tensors = gguf_tensors(&f);
    GgufConfig_ c;
    memset(&c, 0, sizeof(c));
    c.f = &f, c.tensors = &tensors;
    c.arch = gguf_find_arch_(&f);
    c.name = gguf_archs[c.arch].name;
    for (int i = 0; i < GGUF_KEYS; i++) {
        gguf_read_value_(&c, i);
    }
    const ModelConfig cfg = gguf_config_of_(&c);
    gguf_check_values_(&c, cfg);
    gguf_check_others_(&c);
    safetensors_close(&tensors);
    gguf_file_close(&f);
    return cfg;
}

#endif // GGUF_CONFIG_IMPLEMENTATION

#endif
