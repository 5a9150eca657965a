/*
hf_config.h -- config.json, which describes a model in a Hugging Face directory: its sizes, under
GPT-2's names n_layer, n_head, n_embd, n_positions, vocab_size.

A config.json may ask for more than GPT-2 has (other activations, scales by layer, a classifier of
its own): whatever we do not compute is refused by name. Dropout, which belongs to training, is
ignored with a note on stderr.
*/
#ifndef LLMC_HF_CONFIG_H
#define LLMC_HF_CONFIG_H

#include "llmc/formats/safetensors.h"
#include "llmc/model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

// Reads the sizes of the model in a directory.
ModelConfig hf_config_read(const char* directory);

// Returns the largest dropout of its configuration.
double hf_config_dropout(const char* directory);

// Returns the fields of the config.json in a directory that change nothing here, as text for
// hf_config_write: a model that is trained further keeps them. The caller frees it.
char* hf_config_kept(const char* directory);

// Writes config.json and generation_config.json. `dtype` is the dtype of the weights, written under
// its names of transformers 4 and 5; eot the token that starts and ends documents; kept as above,
// NULL for a new model.
void hf_config_write(const char* directory, ModelConfig cfg, SafeTensorsDtype dtype, int eot,
                     const char* kept);

#ifdef __cplusplus
}
#endif

#ifdef HF_CONFIG_IMPLEMENTATION

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/text_buffer.h"

#define HF_NORM_EPSILON_ 1e-5
#define HF_MAX_CONFIG_ ((size_t)1 << 20) // largest config.json

typedef struct {
    ModelConfig cfg;
    size_t hidden; // hidden units of the MLP; 0: 4 C
    int is_gpt2;
    double dropout;    // largest one
    const char** keys; // all keys read so far, in the text
    size_t num_keys;
} HfConfig_;

// Stores a number as the size of this key. Returns 1 if done, -1 if the key is no size, 0 after an
// error.
static int hf_config_size_(JsonReader* text, const char* key, HfConfig_* config) {
    const struct {
        const char* key;
        int* size;
    } sizes[5] = {{"n_layer", &config->cfg.L},
                  {"n_head", &config->cfg.NH},
                  {"n_embd", &config->cfg.C},
                  {"n_positions", &config->cfg.max_T},
                  {"vocab_size", &config->cfg.V}};
    for (int i = 0; i < 5; i++) {
        size_t value;
        if (strcmp(key, sizes[i].key) == 0) {
            if (!json_natural(text, &value)) {
                return 0;
            }
            *sizes[i].size = value < INT_MAX ? (int)value : INT_MAX;
            return 1;
        }
    }
    return -1;
}

// Reads a string that must be in a list, which ends with NULL.
static int hf_config_word_(JsonReader* text, const char* key, const char* const* words) {
    const char* word;
    if (!json_name(text, &word)) {
        return 0;
    }
    for (int i = 0; words[i]; i++) {
        if (strcmp(word, words[i]) == 0) {
            return 1;
        }
    }
    return error_set(text->error, text->path, "%s is %s, wanted %s", key, word, words[0]);
}

// Reads a switch that must be as we compute.
static int hf_config_switch_(JsonReader* text, const char* key, int wanted) {
    int found;
    if (!json_bool(text, &found)) {
        return 0;
    }
    return found == wanted || error_set(text->error, text->path, "%s is %s, wanted %s", key,
                                        found ? "true" : "false", wanted ? "true" : "false");
}

static int hf_config_epsilon_(JsonReader* text) {
    double epsilon;
    if (!json_number(text, &epsilon)) {
        return 0;
    }
    return fabs(epsilon - HF_NORM_EPSILON_) < 1e-12 ||
           error_set(text->error, text->path, "layer_norm_epsilon is %g, wanted %g", epsilon,
                     HF_NORM_EPSILON_);
}

static int hf_config_dropout_(JsonReader* text, HfConfig_* config) {
    double dropout;
    if (!json_number(text, &dropout)) {
        return 0;
    }
    config->dropout = fmax(config->dropout, dropout);
    return 1;
}

// Reads the value of a key.
static int hf_config_value_(JsonReader* text, const char* key, HfConfig_* config) {
    static const struct {
        const char* key;
        int wanted;
    } switches[] = {{"scale_attn_weights", 1},
                    {"tie_word_embeddings", 1},
                    {"scale_attn_by_inverse_layer_idx", 0},
                    {"add_cross_attention", 0}};
    static const char* const types[] = {"gpt2", NULL};
    static const char* const activations[] = {"gelu_new", "gelu_pytorch_tanh", "gelu_fast",
                                              NULL}; // all mean GELU with tanh
    const int size = hf_config_size_(text, key, config);
    if (size >= 0) {
        return size;
    }
    for (size_t i = 0; i < sizeof(switches) / sizeof(switches[0]); i++) {
        if (strcmp(key, switches[i].key) == 0) {
            return hf_config_switch_(text, key, switches[i].wanted);
        }
    }
    if (strcmp(key, "model_type") == 0) {
        config->is_gpt2 = 1;
        return hf_config_word_(text, key, types);
    }
    if (strcmp(key, "activation_function") == 0) {
        return hf_config_word_(text, key, activations);
    }
    if (strcmp(key, "resid_pdrop") == 0 || strcmp(key, "embd_pdrop") == 0 || strcmp(key, "attn_pdrop") == 0) {
        return hf_config_dropout_(text, config);
    }
    if (strcmp(key, "n_inner") == 0 && json_peek(text) != 'n') {
        return json_natural(text, &config->hidden);
    }
    return strcmp(key, "layer_norm_epsilon") == 0 ? hf_config_epsilon_(text) : json_skip(text);
}

static int hf_by_name_(const void* a, const void* b) {
    return strcmp(*(const char* const*)a, *(const char* const*)b);
}

// Reads all keys and their values; none may come twice.
static int hf_config_members_(JsonReader* text, HfConfig_* config) {
    const char* key;
    int more = json_take(text, '{') ? 1 : -1;
    for (JsonPlace place = JSON_FIRST; more > 0; place = JSON_NEXT) {
        if ((more = json_member(text, place, &key)) <= 0) {
            break;
        }
        config->keys =
            (const char**)check_grow(config->keys, config->num_keys, sizeof(key), "list of tensors");
        config->keys[config->num_keys++] = key;
        if (!hf_config_value_(text, key, config)) {
            return 0;
        }
    }
    if (more < 0 || !json_end(text)) {
        return 0;
    }
    safetensors_sort(config->keys, config->num_keys, sizeof(key), hf_by_name_);
    for (size_t i = 1; i < config->num_keys; i++) {
        if (strcmp(config->keys[i - 1], config->keys[i]) == 0) {
            return error_set(text->error, text->path, "key %s appears twice", config->keys[i]);
        }
    }
    return 1;
}

// Reads the text of config.json; 0 with text->error set if it is not a model that we compute.
static int hf_config_parse_(JsonReader* text, HfConfig_* config) {
    ModelConfig* cfg = &config->cfg;
    if (!hf_config_members_(text, config)) {
        return 0;
    }
    if (!config->is_gpt2) {
        return error_set(text->error, text->path, "no model_type, wanted gpt2");
    }
    cfg->Vp = cfg->V < INT_MAX - MODEL_VOCAB_ALIGN ? model_padded_vocab(cfg->V) : cfg->V;
    if (config->hidden && config->hidden != 4 * (size_t)cfg->C) {
        return error_set(text->error, text->path, "n_inner is %zu, wanted 4 x n_embd = %zu", config->hidden,
                         4 * (size_t)cfg->C);
    }
    return model_check_config(*cfg, text->path, text->error);
}

static HfConfig_ hf_config_load_(const char* directory) {
    char path[PATH_MAX], error[ERROR_BYTES];
    char* copy;
    size_t bytes;
    HfConfig_ config;
    memset(&config, 0, sizeof(config));
    file_join(path, directory, "config.json");
    CHECK(file_try_read(path, HF_MAX_CONFIG_, &copy, &bytes, error), "%s", error);
    JsonReader text = json_reader(path, copy, bytes, error);
    CHECK(hf_config_parse_(&text, &config), "%s", error);
    free(config.keys);
    free(copy);
    return config;
}

ModelConfig hf_config_read(const char* directory) { return hf_config_load_(directory).cfg; }

double hf_config_dropout(const char* directory) { return hf_config_load_(directory).dropout; }

// True for fields that change nothing that we compute, and are kept for other readers.
static int hf_config_is_kept_(const char* key) {
    static const char* const keys[] = {
        "initializer_range",     "pad_token_id",        "use_cache",          "reorder_and_upcast_attn",
        "summary_type",          "summary_use_proj",    "summary_activation", "summary_proj_to_labels",
        "summary_first_dropout", "task_specific_params"};
    size_t i = 0;
    while (i < sizeof(keys) / sizeof(keys[0]) && strcmp(key, keys[i]) != 0) {
        i++;
    }
    return i < sizeof(keys) / sizeof(keys[0]);
}

char* hf_config_kept(const char* directory) {
    char path[PATH_MAX], error[ERROR_BYTES], *text;
    const char* key;
    size_t bytes;
    TextBuffer kept;
    file_join(path, directory, "config.json");
    CHECK(file_try_read(path, HF_MAX_CONFIG_, &text, &bytes, error), "%s", error);
    char* copy = (char*)check_alloc(bytes + 1, 1, path); // a reader decodes strings in place
    memcpy(copy, text, bytes);
    JsonReader reader = json_reader(path, copy, bytes, error);
    text_buffer_open(&kept, path);
    int more = json_take(&reader, '{') ? 1 : -1;
    for (JsonPlace place = JSON_FIRST; more > 0; place = JSON_NEXT) {
        if ((more = json_member(&reader, place, &key)) <= 0) {
            break;
        }
        json_peek(&reader);
        const size_t begin = reader.at;
        const int is_kept = hf_config_is_kept_(key);
        more = json_skip(&reader) ? 1 : -1;
        if (is_kept) {
            fprintf(kept.file, "  \"%s\": %.*s,\n", key, (int)(reader.at - begin), text + begin);
        }
    }
    CHECK(more == 0, "%s", error);
    free(copy);
    free(text);
    return text_buffer_close(&kept);
}

void hf_config_write(const char* directory, ModelConfig cfg, SafeTensorsDtype dtype, int eot,
                     const char* kept) {
    char path[PATH_MAX];
    FileWriter writer;
    const char* type = dtype == SAFETENSORS_BF16  ? "bfloat16"
                       : dtype == SAFETENSORS_F16 ? "float16"
                                                  : "float32";
    file_join(path, directory, "config.json");
    file_open(&writer, path);
    fprintf(writer.file,
            "{\n"
            "  \"architectures\": [\"GPT2LMHeadModel\"],\n"
            "  \"model_type\": \"gpt2\",\n"
            "  \"vocab_size\": %d,\n  \"n_positions\": %d,\n  \"n_ctx\": %d,\n"
            "  \"n_embd\": %d,\n  \"n_layer\": %d,\n  \"n_head\": %d,\n  \"n_inner\": null,\n"
            "  \"activation_function\": \"gelu_new\",\n  \"layer_norm_epsilon\": %g,\n"
            "  \"resid_pdrop\": 0.0,\n  \"embd_pdrop\": 0.0,\n  \"attn_pdrop\": 0.0,\n"
            "  \"bos_token_id\": %d,\n  \"eos_token_id\": %d,\n%s"
            "  \"tie_word_embeddings\": true,\n  \"dtype\": \"%s\",\n  \"torch_dtype\": \"%s\"\n}\n",
            cfg.V, cfg.max_T, cfg.max_T, cfg.C, cfg.L, cfg.NH, HF_NORM_EPSILON_, eot, eot, kept ? kept : "",
            type, type);
    file_commit(&writer);
    file_join(path, directory, "generation_config.json");
    file_open(&writer, path);
    fprintf(writer.file, "{\n  \"bos_token_id\": %d,\n  \"eos_token_id\": %d\n}\n", eot, eot);
    file_commit(&writer);
}

#endif // HF_CONFIG_IMPLEMENTATION

#endif
