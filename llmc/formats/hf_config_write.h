/*
hf_config_write.h -- writes config.json (hf_config.h) for transformers 4 and 5.
*/
#ifndef LLMC_HF_CONFIG_WRITE_H
#define LLMC_HF_CONFIG_WRITE_H

#include "llmc/formats/tensor_types.h"
#include "llmc/model/config.h"
#include "llmc/tokenizer/model_card.h"

#ifdef __cplusplus
extern "C" {
#endif

// Returns 1 if the family's class in transformers can hold such a model; if not, 0 and the reason
// in `error`.
int hf_config_check(ModelConfig cfg, char* error);

// Writes config.json and generation_config.json. `dtype` is the dtype of the weights, written under
// its names of transformers 4 and 5; kept as above, NULL for a new model.
void hf_config_write(const char* directory, ModelConfig cfg, SafeTensorsDtype dtype, ModelCard card,
                     const char* kept);

#ifdef __cplusplus
}
#endif

#ifdef HF_CONFIG_WRITE_IMPLEMENTATION

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/number_text.h"
#include "llmc/formats/hf_config_families.h"
#include "llmc/formats/hf_rope.h"

// Returns 1 if the files of a family can say that layer l does not turn, or that it does.
static int hf_can_rotate_(ModelConfig cfg, const HfFamily* family, int l) {
    const int by_window = family->rests_without_window && cfg.window > 0 && !model_window(cfg, l),
              rests = FAMILY_GRANITE4 >> cfg.arch & 1 ? layer_is_in(cfg.unrotated, 0) : by_window;
    return family->unrotated_every > 0 || layer_is_in(cfg.unrotated, l) == rests;
}

static int hf_check_rope_(ModelConfig cfg, const HfFamily* family, char* error) {
    const int HS = model_head_size(cfg);
    for (int l = 0; l < cfg.L; l++) {
        if (!hf_can_rotate_(cfg, family, l)) {
            return error_set(error, "--arch", "in transformers layer %d of %s %s", l, family->type,
                             layer_is_in(cfg.unrotated, l) ? "has rotary positions" : "has none");
        }
    }
    if (FAMILY_PHI3 >> cfg.arch & 1 && cfg.scaling.kind != ROPE_PLAIN && cfg.scaling.kind != ROPE_LONG) {
        return error_set(error, "--arch",
                         "in transformers rotary positions of %s are scaled by longrope only", family->type);
    }
    if (cfg.window_rope_base > 0 && family->window_base == 0) {
        return error_set(error, "--arch", "in transformers all layers of %s have the same rotary positions",
                         family->type);
    }
    return model_rope_dims(cfg) == HS || family->turned > 0 || model_has_latent(cfg) ||
           error_set(error, "--arch", "in transformers %s turns all channels of a head, not %d of %d",
                     family->type, model_rope_dims(cfg), HS);
}

// Return the factor of scores, and the whole number whose root divides them; 0: there is none.
static float hf_score_scale_(ModelConfig cfg) {
    return cfg.attention_scale > 0 ? cfg.attention_scale : 1 / sqrtf((float)model_head_size(cfg));
}
static int hf_query_scalar_(ModelConfig cfg) {
    const float scale = hf_score_scale_(cfg), whole = roundf(1 / (scale * scale));
    return 1 / sqrtf(whole) == scale ? (int)whole : 0;
}

// Returns the number that, as mscale_all_dim of yarn, gives DeepSeek's factor of scores; 0: it is
// the usual one; NAN: none does.
static float hf_mscale_all_(ModelConfig cfg) {
    const float scale = hf_score_scale_(cfg), factor = cfg.scaling.factor;
    const int HS = model_head_size(cfg);
    if (!model_has_latent(cfg) || scale == 1 / sqrtf((float)HS)) {
        return 0;
    }
    const double m = sqrt((double)scale * sqrt((double)HS)), exact = (m - 1) / (0.1 * log((double)factor));
    for (int digits = 1; digits < 10 && cfg.scaling.kind == ROPE_YARN && factor > 1; digits++) {
        char text[NUMBER_BYTES];
        snprintf(text, sizeof(text), "%.*g", digits, exact);
        const float number = strtof(text, NULL);
        if (number > 0 && hf_rope_score_scale(HS, factor, number) == scale) {
            return number;
        }
    }
    return NAN;
}

// Returns 1 if the family has keys for the scores of such a model.
static int hf_check_scores_(ModelConfig cfg, char* error) {
    const char* word = model_architecture(cfg.arch)->word;
    const int has_key =
        FAMILY_ATTENTION_SCALE >> cfg.arch & 1 || (model_has_latent(cfg) && !isnan(hf_mscale_all_(cfg)));
    if (cfg.attention_scale > 0 && !has_key) {
        return error_set(error, "--arch", "in transformers %s divides scores by sqrt(%d), not by %g", word,
                         model_head_size(cfg), 1 / (double)cfg.attention_scale);
    }
    return cfg.attention_softcap == 0 || FAMILY_ATTENTION_CAP >> cfg.arch & 1 ||
           error_set(error, "--arch", "in transformers %s has no cap of scores, which is %g here", word,
                     (double)cfg.attention_softcap);
}

int hf_config_check(ModelConfig cfg, char* error) {
    const int HS = model_head_size(cfg);
    const char* word = model_architecture(cfg.arch)->word;
    if (!hf_check_scores_(cfg, error)) {
        return 0;
    }
    if (FAMILY_WHOLE_HEADS >> cfg.arch & 1 && cfg.C % cfg.NH) {
        return error_set(
            error, "--arch",
            "transformers wants the %d channels of %s to be a multiple of its %d heads; mistral and "
            "qwen3 have any",
            cfg.C, word, cfg.NH);
    }
    if (FAMILY_FULL_HEADS >> cfg.arch & 1 && model_heads(cfg) != cfg.C) {
        return error_set(error, "--arch",
                         "transformers wants heads of channels / heads in %s, not %d x %d of %d channels",
                         word, cfg.NH, HS, cfg.C);
    }
    if (model_architecture(cfg.arch)->router == ROUTER_SIGMOID &&
        (cfg.E < 2 || cfg.Fs == 0 || cfg.Fs % model_expert_hidden(cfg))) {
        return error_set(error, "--arch",
                         "transformers wants two experts or more in %s, and one that all tokens take, with a "
                         "multiple of their %d hidden units, not %d and %d",
                         word, model_expert_hidden(cfg), cfg.E, cfg.Fs);
    }
    if (hf_families[cfg.arch].query_scalar > 0 && hf_query_scalar_(cfg) == 0) {
        return error_set(error, "--arch", "transformers divides scores of %s by the root of a whole number",
                         word);
    }
    return hf_check_rope_(cfg, &hf_families[cfg.arch], error);
}

// Number that is never written as an integer: transformers checks types.
typedef struct {
    char text[NUMBER_BYTES];
} HfNumber_;

static HfNumber_ hf_number_(float x) {
    HfNumber_ number;
    number_exact(x, number.text);
    if (!strpbrk(number.text, ".e")) {
        snprintf(number.text + strlen(number.text), 3, ".0");
    }
    return number;
}

// Returns the shortest fraction of HS channels that transformers makes `dims` of.
static HfNumber_ hf_part_(int dims, int HS) {
    HfNumber_ number;
    int digits = 1;
    do {
        snprintf(number.text, sizeof(number.text), "%.*f", digits, (double)dims / HS);
    } while (digits++ < 20 && (int)(HS * strtod(number.text, NULL)) != dims);
    return number;
}

static void hf_write_gpt2_(FILE* file, ModelConfig cfg) {
    fprintf(file,
            "  \"n_positions\": %d,\n  \"n_ctx\": %d,\n"
            "  \"n_embd\": %d,\n  \"n_layer\": %d,\n  \"n_head\": %d,\n  \"n_inner\": null,\n"
            "  \"activation_function\": \"%s\",\n  \"layer_norm_epsilon\": %s,\n"
            "  \"resid_pdrop\": 0.0,\n  \"embd_pdrop\": 0.0,\n  \"attn_pdrop\": 0.0,\n",
            cfg.max_T, cfg.max_T, cfg.C, cfg.L, cfg.NH, hf_families[ARCH_GPT2].activations[0],
            hf_number_(model_norm_eps(cfg)).text);
}

// Writes a list of numbers as a member.
static void hf_write_factors_(FILE* file, const char* key, const float* factors, int count) {
    fprintf(file, ", \"%s\": [", key);
    for (int i = 0; i < count; i++) {
        fprintf(file, "%s%s", i ? ", " : "", hf_number_(factors[i]).text);
    }
    fprintf(file, "]");
}

// Returns the mscale that, beside mscale_all, gives the attention factor, for programs that do not
// read this.
static float hf_mscale_(RopeScaling s, float mscale_all) {
    const double m = hf_rope_mscale((double)s.factor, (double)mscale_all);
    return roundf((float)(1e6 * ((double)rope_attention(s) * m - 1) / (0.1 * log((double)s.factor)))) / 1e6f;
}

// Writes the members of a scaling; mscale_all is DeepSeek's, or 0.
static void hf_write_scaling_(FILE* file, RopeSettings s, float mscale_all) {
    const RopeScaling scaling = s.scaling;
    const char *low = "low_freq_factor", *high = "high_freq_factor";
    fprintf(file, "\"rope_type\": \"%s\"", hf_rope_kinds[scaling.kind]);
    switch (scaling.kind) {
    case ROPE_PLAIN:
    case ROPE_KINDS:
        return;
    case ROPE_LINEAR:
    case ROPE_LLAMA3:
        break;
    case ROPE_YARN:
        low = "beta_slow", high = "beta_fast";
        fprintf(file, ", \"truncate\": %s", scaling.is_exact ? "false" : "true");
        break;
    case ROPE_LONG:
        hf_write_factors_(file, "short_factor", s.factors->near, s.dims / 2);
        hf_write_factors_(file, "long_factor", s.factors->far, s.dims / 2);
        break;
    }
    fprintf(file, ", \"factor\": %s", hf_number_(scaling.factor).text);
    if (scaling.low_freq_factor > 0) {
        fprintf(file, ", \"%s\": %s, \"%s\": %s", low, hf_number_(scaling.low_freq_factor).text, high,
                hf_number_(scaling.high_freq_factor).text);
    }
    if (scaling.original_context > 0) {
        fprintf(file, ", \"original_max_position_embeddings\": %d", scaling.original_context);
    }
    if (scaling.attention > 0) {
        fprintf(file, ", \"attention_factor\": %s", hf_number_(scaling.attention).text);
    }
    if (mscale_all > 0) {
        fprintf(file, ", \"mscale\": %s, \"mscale_all_dim\": %s",
                hf_number_(hf_mscale_(scaling, mscale_all)).text, hf_number_(mscale_all).text);
    }
}

// Writes an object of rope_parameters.
static void hf_write_rope_object_(FILE* file, RopeSettings s, int is_partial, float mscale_all) {
    fprintf(file, "{\"rope_theta\": %s, ", hf_number_(s.base).text);
    if (is_partial) {
        fprintf(file, "\"partial_rotary_factor\": %s, ", hf_part_(s.dims, s.HS).text);
    }
    hf_write_scaling_(file, s, mscale_all);
    fprintf(file, "}");
}

// Writes the layers that turn.
static void hf_write_rotated_(FILE* file, ModelConfig cfg, const HfFamily* family) {
    if (family->unrotated_every == 0) {
        return;
    }
    fprintf(file, "  \"no_rope_layer_interval\": %d,\n  \"no_rope_layers\": [", family->unrotated_every);
    for (int l = 0; l < cfg.L; l++) {
        fprintf(file, "%s%d", l ? ", " : "", !layer_is_in(cfg.unrotated, l));
    }
    fprintf(file, "],\n");
}

// Writes rotary positions for transformers 4 and 5.
static void hf_write_rope_(FILE* file, ModelConfig cfg, const HfFamily* family) {
    const int is_partial = family->turned > 0, by_window = cfg.window_rope_base > 0;
    const RopeSettings all = {0,           model_head_size(cfg), model_rope_dims(cfg), model_rope_base(cfg),
                              cfg.scaling, &cfg.rope_factors};
    const float mscale_all = hf_mscale_all_(cfg);
    RopeSettings windows = all;
    windows.base = by_window ? cfg.window_rope_base : cfg.window > 0 ? all.base : family->window_base;
    windows.scaling = by_window ? cfg.window_scaling : cfg.window > 0 ? all.scaling : cfg.window_scaling;
    if (is_partial) {
        fprintf(file, "  \"partial_rotary_factor\": %s,\n", hf_part_(all.dims, all.HS).text);
    }
    if (hf_defaults[cfg.arch].original_context > 0 && cfg.scaling.original_context > 0) {
        fprintf(file, "  \"original_max_position_embeddings\": %d,\n", cfg.scaling.original_context);
    }
    fprintf(file, "  \"rope_theta\": %s,\n  \"rope_scaling\": ", hf_number_(all.base).text);
    if (cfg.scaling.kind == ROPE_PLAIN) {
        fprintf(file, "null");
    } else {
        fprintf(file, "{");
        hf_write_scaling_(file, all, mscale_all);
        fprintf(file, "}");
    }
    fprintf(file, ",\n  \"rope_parameters\": ");
    if (family->window_base > 0) {
        fprintf(file, "{\"full_attention\": ");
        hf_write_rope_object_(file, all, is_partial, 0);
        fprintf(file, ", \"sliding_attention\": ");
        hf_write_rope_object_(file, windows, is_partial, 0);
        fprintf(file, "},\n  \"rope_local_base_freq\": %s,\n", hf_number_(windows.base).text);
    } else {
        hf_write_rope_object_(file, all, is_partial, mscale_all);
        fprintf(file, ",\n");
    }
    hf_write_rotated_(file, cfg, family);
}

// Writes the types of layers. GraniteMoeHybrid has attention in all, by its name of transformers 4.
static void hf_write_layer_types_(FILE* file, ModelConfig cfg) {
    fprintf(file, "  \"layer_types\": [");
    for (int l = 0; l < cfg.L; l++) {
        const char* type = layer_is_in(cfg.mixed, l)         ? hf_families[cfg.arch].mixed_type
                           : FAMILY_GRANITE4 >> cfg.arch & 1 ? "attention"
                           : model_window(cfg, l)            ? "sliding_attention"
                                                             : "full_attention";
        fprintf(file, "%s\"%s\"", l ? ", " : "", type);
    }
    fprintf(file, "],\n");
}

// Writes which layers have a window: as a list, and for transformers 4 as the number of layers
// before the first.
static void hf_write_windows_(FILE* file, ModelConfig cfg) {
    const WindowsKind kind = model_architecture(cfg.arch)->windows;
    int full = 0;
    if (kind == WINDOWS_NONE) {
        return;
    }
    while (full < cfg.L && !model_window(cfg, full)) {
        full++;
    }
    if (full < cfg.L) {
        fprintf(file, "  \"sliding_window\": %d,\n", cfg.window);
    } else {
        fprintf(file, "  \"sliding_window\": null,\n");
    }
    if (FAMILY_SWITCHED >> cfg.arch & 1) {
        fprintf(file, "  \"use_sliding_window\": %s,\n", full < cfg.L ? "true" : "false");
    }
    if (kind == WINDOWS_ANY) {
        fprintf(file, "  \"max_window_layers\": %d,\n", full);
        hf_write_layer_types_(file, cfg);
    }
}

// Writes which layers have a mixer, and its sizes.
static void hf_write_mixer_(FILE* file, ModelConfig cfg) {
    const ModelMixer m = cfg.mixer;
    switch (model_mixer(cfg)) {
    case MIXER_NONE:
        return;
    case MIXER_DELTA:
        fprintf(file,
                "  \"linear_conv_kernel_dim\": %d,\n  \"linear_num_key_heads\": %d,\n"
                "  \"linear_num_value_heads\": %d,\n  \"linear_key_head_dim\": %d,\n"
                "  \"linear_value_head_dim\": %d,\n",
                m.taps, m.key_heads, m.value_heads, m.key_size, m.value_size);
        break;
    case MIXER_CONV:
        fprintf(file, "  \"conv_L_cache\": %d,\n", m.taps);
        break;
    }
    hf_write_layer_types_(file, cfg);
}

// Writes the constants of a family, and the keys of experts.
static void hf_write_experts_(FILE* file, ModelConfig cfg) {
    const HfFamily* family = &hf_families[cfg.arch];
    fputs(family->constants ? family->constants : "", file);
    if (FAMILY_OWN_HIDDEN >> cfg.arch & 1) {
        fprintf(file, "  \"%s\": %d,\n", family->hidden, model_expert_hidden(cfg));
    }
    if (FAMILY_GRANITE4 >> cfg.arch & 1) {
        fprintf(file, "  \"position_embedding_type\": %s,\n",
                layer_is_in(cfg.unrotated, 0) ? "null" : "\"rope\"");
        hf_write_layer_types_(file, cfg);
    }
    if (!family->experts) {
        return;
    }
    fprintf(file, "  \"%s\": %d,\n  \"num_experts_per_tok\": %d,\n", family->experts, cfg.E, cfg.E_used);
    if (model_architecture(cfg.arch)->router == ROUTER_SIGMOID) {
        fprintf(file,
                "  \"n_shared_experts\": %d,\n  \"routed_scaling_factor\": %s,\n"
                "  \"first_k_dense_replace\": %d,\n  \"n_group\": %d,\n  \"topk_group\": %d,\n",
                cfg.Fs / model_expert_hidden(cfg), hf_number_(model_router_factor(cfg)).text,
                cfg.dense_layers, cfg.expert_groups > 0 ? cfg.expert_groups : 1,
                cfg.expert_groups > 0 ? cfg.expert_groups_used : 1);
    }
}

// Writes how scores are scaled and capped.
static void hf_write_scores_(FILE* file, ModelConfig cfg) {
    const HfFamily* family = &hf_families[cfg.arch];
    if (family->query_scalar > 0) {
        fprintf(file, "  \"query_pre_attn_scalar\": %d,\n  \"attn_logit_softcapping\": %s,\n",
                hf_query_scalar_(cfg),
                cfg.attention_softcap > 0 ? hf_number_(cfg.attention_softcap).text : "null");
    } else if (family->attention_scale > 0) {
        fprintf(file, "  \"attention_multiplier\": %s,\n", hf_number_(hf_score_scale_(cfg)).text);
    }
}

// Writes the sizes of latents.
static void hf_write_latent_(FILE* file, ModelConfig cfg) {
    const ModelLatent m = cfg.latent;
    if (!model_has_latent(cfg)) {
        return;
    }
    if (m.query_rank > 0) {
        fprintf(file, "  \"q_lora_rank\": %d,\n", m.query_rank);
    } else {
        fprintf(file, "  \"q_lora_rank\": null,\n");
    }
    fprintf(file,
            "  \"kv_lora_rank\": %d,\n  \"qk_rope_head_dim\": %d,\n  \"qk_nope_head_dim\": %d,\n"
            "  \"v_head_dim\": %d,\n  \"rope_interleave\": %s,\n",
            m.rank, cfg.rope_dims, model_head_size(cfg) - cfg.rope_dims, m.value,
            m.in_halves ? "false" : "true");
}

// Writes the keys that the families with rotary positions have in common.
static void hf_write_common_(FILE* file, ModelConfig cfg) {
    fprintf(file,
            "  \"max_position_embeddings\": %d,\n  \"hidden_size\": %d,\n  \"intermediate_size\": %d,\n"
            "  \"num_hidden_layers\": %d,\n  \"num_attention_heads\": %d,\n  \"num_key_value_heads\": %d,\n"
            "  \"head_dim\": %d,\n  \"hidden_act\": \"%s\",\n  \"%s\": %s,\n"
            "  \"attention_dropout\": 0.0,\n",
            cfg.max_T, cfg.C, model_hidden(cfg), cfg.L, cfg.NH, model_key_heads(cfg),
            model_has_latent(cfg) ? cfg.rope_dims : model_head_size(cfg), // the class says so
            hf_families[cfg.arch].activations[0],
            FAMILY_RMS_EPS >> cfg.arch & 1 ? "rms_norm_eps" : "norm_eps",
            hf_number_(model_norm_eps(cfg)).text);
    if (!(FAMILY_BIASES >> cfg.arch & 1)) { // others have theirs in the class, or among constants
        fprintf(file, "  \"attention_bias\": false,\n  \"mlp_bias\": false,\n");
    }
    if (model_architecture(cfg.arch)->softcap > 0) {
        fprintf(file, "  \"final_logit_softcapping\": %s,\n",
                cfg.softcap > 0 ? hf_number_(cfg.softcap).text : "null");
    }
    hf_write_scores_(file, cfg);
    hf_write_latent_(file, cfg);
    if (FAMILY_GRANITE >> cfg.arch & 1) {
        fprintf(
            file,
            "  \"embedding_multiplier\": %s,\n  \"residual_multiplier\": %s,\n  \"logits_scaling\": %s,\n",
            hf_number_(model_embedding_factor(cfg)).text, hf_number_(model_residual_factor(cfg)).text,
            hf_number_(cfg.logits_divisor > 0 ? cfg.logits_divisor : 1).text);
    }
    hf_write_rope_(file, cfg, &hf_families[cfg.arch]);
    hf_write_windows_(file, cfg);
    hf_write_mixer_(file, cfg);
    hf_write_experts_(file, cfg);
    if (cfg.has_scales) {
        fprintf(file, "  \"residual_scales\": true,\n");
    }
    if (cfg.has_values) {
        fprintf(file, "  \"value_embeddings\": true,\n");
    }
}

// Writes the tokens around texts. What is kept may have the padding token.
static void hf_write_tokens_(FILE* file, Arch arch, const ModelCard* card, const char* kept) {
    char ends[CARD_ENDS_BYTES];
    const int has_pad = kept && strstr(kept, "\"pad_token_id\"");
    fprintf(file, "  \"bos_token_id\": %d,\n  \"eos_token_id\": %s,\n", card->start,
            card_print_ends(card, ends));
    if (card->pad >= 0 && !has_pad) {
        fprintf(file, "  \"pad_token_id\": %d,\n", card->pad);
    } else if (FAMILY_PADDED >> arch & 1 && !has_pad) {
        fprintf(file, "  \"pad_token_id\": null,\n");
    }
}

void hf_config_write(const char* directory, ModelConfig cfg, SafeTensorsDtype dtype, ModelCard card,
                     const char* kept) {
    char path[PATH_MAX];
    FileWriter writer;
    const HfFamily* family = &hf_families[cfg.arch];
    const int is_own = model_has_additions(cfg); // transformers would compute another model
    const char* type = dtype == SAFETENSORS_BF16  ? "bfloat16"
                       : dtype == SAFETENSORS_F16 ? "float16"
                                                  : "float32";
    file_join(path, directory, "config.json");
    file_open(&writer, path);
    fprintf(writer.file,
            "{\n  \"architectures\": [\"%s%s\"],\n  \"model_type\": \"%s%s\",\n  \"vocab_size\": %d,\n",
            is_own ? HF_OWN_CLASS : "", family->class_name, is_own ? HF_OWN_TYPE : "", family->type, cfg.V);
    (cfg.arch == ARCH_GPT2 ? hf_write_gpt2_ : hf_write_common_)(writer.file, cfg);
    hf_write_tokens_(writer.file, cfg.arch, &card, kept);
    fprintf(writer.file,
            "%s  \"tie_word_embeddings\": %s,\n  \"dtype\": \"%s\",\n  \"torch_dtype\": \"%s\"\n}\n",
            kept ? kept : "", cfg.has_head ? "false" : "true", type, type);
    file_commit(&writer);
    card_write_generation(&card, directory);
}

#endif // HF_CONFIG_WRITE_IMPLEMENTATION

#endif
