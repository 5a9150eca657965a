/*
hf_config_write.h -- writes config.json (hf_config.h) for transformers 4 and 5.
*/
#ifndef LLMC_HF_CONFIG_WRITE_H
#define LLMC_HF_CONFIG_WRITE_H

#include "llmc/formats/safetensors.h"
#include "llmc/model/model.h"
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
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/number_text.h"
#include "llmc/formats/hf_config_families.h"

// Returns 1 if the family has keys for the scores of such a model.
static int hf_check_scores_(ModelConfig cfg, char* error) {
    const char* word = model_architecture(cfg.arch)->word;
    if (cfg.attention_scale > 0 && !(FAMILY_ATTENTION_SCALE >> cfg.arch & 1)) {
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
    if ((cfg.arch == ARCH_LLAMA || cfg.arch == ARCH_ARCEE) && cfg.C % cfg.NH) {
        return error_set(
            error, "--arch",
            "transformers wants the %d channels of %s to be a multiple of its %d heads; mistral and "
            "qwen3 have any",
            cfg.C, word, cfg.NH);
    }
    if (cfg.arch == ARCH_OLMOE && model_heads(cfg) != cfg.C) {
        return error_set(error, "--arch",
                         "transformers wants heads of channels / heads in olmoe, not %d x %d of %d channels",
                         cfg.NH, HS, cfg.C);
    }
    if (cfg.arch == ARCH_GLM4MOE && (cfg.E < 2 || cfg.Fs == 0 || cfg.Fs % model_hidden(cfg))) {
        return error_set(
            error, "--arch",
            "transformers wants two experts or more in glm4moe, and one that all tokens take, with a "
            "multiple of their %d hidden units, not %d and %d",
            model_hidden(cfg), cfg.E, cfg.Fs);
    }
    return model_rope_dims(cfg) == HS || cfg.arch == ARCH_GLM4MOE ||
           error_set(error, "--arch", "in transformers %s turns all channels of a head, not %d of %d", word,
                     model_rope_dims(cfg), HS);
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

// Writes the members of a scaling, with a comma after each.
static void hf_write_scaling_(FILE* file, RopeScaling scaling) {
    if (scaling.kind == ROPE_LINEAR) {
        fprintf(file, "\"rope_type\": \"linear\", \"factor\": %s", hf_number_(scaling.factor).text);
    } else if (scaling.kind == ROPE_LLAMA3) {
        fprintf(
            file,
            "\"rope_type\": \"llama3\", \"factor\": %s, \"low_freq_factor\": %s, \"high_freq_factor\": %s, "
            "\"original_max_position_embeddings\": %d",
            hf_number_(scaling.factor).text, hf_number_(scaling.low_freq_factor).text,
            hf_number_(scaling.high_freq_factor).text, scaling.original_context);
    } else {
        fprintf(file, "\"rope_type\": \"default\"");
    }
}

// Writes rotary positions for transformers 4 and 5.
static void hf_write_rope_(FILE* file, ModelConfig cfg) {
    const HfNumber_ base = hf_number_(model_rope_base(cfg)),
                    part = hf_part_(model_rope_dims(cfg), model_head_size(cfg));
    if (cfg.arch == ARCH_GLM4MOE) {
        fprintf(file, "  \"partial_rotary_factor\": %s,\n", part.text);
    }
    fprintf(file, "  \"rope_theta\": %s,\n  \"rope_scaling\": ", base.text);
    if (cfg.scaling.kind == ROPE_PLAIN) {
        fprintf(file, "null");
    } else {
        fprintf(file, "{");
        hf_write_scaling_(file, cfg.scaling);
        fprintf(file, "}");
    }
    fprintf(file, ",\n  \"rope_parameters\": {\"rope_theta\": %s, ", base.text);
    if (cfg.arch == ARCH_GLM4MOE) {
        fprintf(file, "\"partial_rotary_factor\": %s, ", part.text);
    }
    hf_write_scaling_(file, cfg.scaling);
    fprintf(file, "},\n");
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
        fprintf(file, "  \"max_window_layers\": %d,\n  \"layer_types\": [", full);
        for (int l = 0; l < cfg.L; l++) {
            fprintf(file, "%s\"%s_attention\"", l ? ", " : "", model_window(cfg, l) ? "sliding" : "full");
        }
        fprintf(file, "],\n");
    }
}

// Writes the keys of experts.
static void hf_write_experts_(FILE* file, ModelConfig cfg) {
    const HfFamily* family = &hf_families[cfg.arch];
    if (!family->experts) {
        return;
    }
    fprintf(file, "  \"%s\": %d,\n  \"num_experts_per_tok\": %d,\n", family->experts, cfg.E, cfg.E_used);
    if (FAMILY_OWN_HIDDEN >> cfg.arch & 1) {
        fprintf(file, "  \"%s\": %d,\n", family->hidden, model_hidden(cfg));
    }
    if (cfg.arch == ARCH_GLM4MOE) {
        fprintf(file, "  \"n_shared_experts\": %d,\n  \"routed_scaling_factor\": %s,\n",
                cfg.Fs / model_hidden(cfg), hf_number_(model_router_factor(cfg)).text);
    }
    fputs(family->constants, file);
}

// Writes the keys that the families with rotary positions have in common.
static void hf_write_common_(FILE* file, ModelConfig cfg) {
    fprintf(file,
            "  \"max_position_embeddings\": %d,\n  \"hidden_size\": %d,\n  \"intermediate_size\": %d,\n"
            "  \"num_hidden_layers\": %d,\n  \"num_attention_heads\": %d,\n  \"num_key_value_heads\": %d,\n"
            "  \"head_dim\": %d,\n  \"hidden_act\": \"%s\",\n  \"rms_norm_eps\": %s,\n"
            "  \"attention_dropout\": 0.0,\n",
            cfg.max_T, cfg.C, model_hidden(cfg), cfg.L, cfg.NH, model_key_heads(cfg), model_head_size(cfg),
            hf_families[cfg.arch].activations[0], hf_number_(model_norm_eps(cfg)).text);
    if (!(FAMILY_BIASES >> cfg.arch & 1)) { // others have theirs in the class, or among constants
        fprintf(file, "  \"attention_bias\": false,\n  \"mlp_bias\": false,\n");
    }
    if (model_architecture(cfg.arch)->softcap > 0) {
        fprintf(file, "  \"final_logit_softcapping\": %s,\n",
                cfg.softcap > 0 ? hf_number_(cfg.softcap).text : "null");
    }
    hf_write_rope_(file, cfg);
    hf_write_windows_(file, cfg);
    hf_write_experts_(file, cfg);
}

// Writes the tokens around texts. What is kept may have the padding token.
static void hf_write_tokens_(FILE* file, const ModelCard* card, const char* kept) {
    char ends[CARD_ENDS_BYTES];
    fprintf(file, "  \"bos_token_id\": %d,\n  \"eos_token_id\": %s,\n", card->start,
            card_print_ends(card, ends));
    if (card->pad >= 0 && !(kept && strstr(kept, "\"pad_token_id\""))) {
        fprintf(file, "  \"pad_token_id\": %d,\n", card->pad);
    }
}

void hf_config_write(const char* directory, ModelConfig cfg, SafeTensorsDtype dtype, ModelCard card,
                     const char* kept) {
    char path[PATH_MAX];
    FileWriter writer;
    const HfFamily* family = &hf_families[cfg.arch];
    const char* type = dtype == SAFETENSORS_BF16  ? "bfloat16"
                       : dtype == SAFETENSORS_F16 ? "float16"
                                                  : "float32";
    file_join(path, directory, "config.json");
    file_open(&writer, path);
    fprintf(writer.file,
            "{\n  \"architectures\": [\"%s\"],\n  \"model_type\": \"%s\",\n  \"vocab_size\": %d,\n",
            family->class_name, family->type, cfg.V);
    (cfg.arch == ARCH_GPT2 ? hf_write_gpt2_ : hf_write_common_)(writer.file, cfg);
    hf_write_tokens_(writer.file, &card, kept);
    fprintf(writer.file,
            "%s  \"tie_word_embeddings\": %s,\n  \"dtype\": \"%s\",\n  \"torch_dtype\": \"%s\"\n}\n",
            kept ? kept : "", cfg.has_head ? "false" : "true", type, type);
    file_commit(&writer);
    card_write_generation(&card, directory);
}

#endif // HF_CONFIG_WRITE_IMPLEMENTATION

#endif
