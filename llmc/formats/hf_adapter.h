/*
hf_adapter.h -- adapters (adapter.h) as PEFT stores them, in a directory:

    adapter_config.json          r, lora_alpha, target_modules, use_rslora, rank_pattern, ...
    adapter_model.safetensors    base_model.model.MODULE.lora_A.weight (R, in)
                                 base_model.model.MODULE.lora_B.weight (out, R)

MODULE is a linear layer of the model at Hugging Face, without .weight. Its rows may be a part of
our matrix, and in another order: those of lora_B are then, too.

An adapter that this program does not compute as PEFT does is refused by the name of its key:
dropout, DoRA, biases, single layers, weights that change the base. So are layers of other kinds: of
experts, mixers, latents and the vocabulary. Parts of one matrix of ours have one rank.

    rows    of a model's adapter (model.h), with elements of the file's type when writing, fp32 when
            reading
*/
#ifndef LLMC_HF_ADAPTER_H
#define LLMC_HF_ADAPTER_H

#include <stdint.h>

#include "llmc/base/file_list.h"
#include "llmc/formats/safetensors.h"
#include "llmc/model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HF_ADAPTER_CONFIG "adapter_config.json"
#define HF_ADAPTER_STEM "adapter_model"
#define HF_ADAPTER_FILE HF_ADAPTER_STEM ".safetensors"

// Sets a new adapter of a model. `targets`: all, attention, mlp, or names of layers such as
// q_proj,v_proj. Returns 0 and the reason in `error` if one of them has none.
int hf_adapter_choose(ModelAdapter* adapter, ModelConfig cfg, int rank, float alpha, const char* targets,
                      char* error);

// True if a directory has an adapter.
int hf_adapter_is_in(const char* directory);

// Adds the files of the adapter in a directory.
void hf_adapter_list_files(FileList* files, const char* option, const char* directory);

// Returns the adapter of a directory, for a model.
ModelAdapter hf_adapter_read_config(const char* directory, ModelConfig cfg);

// Writes adapter_config.json; `base` is the model that the adapter is for, by path.
void hf_adapter_write_config(const char* directory, ModelConfig cfg, const char* base);

// Writes adapter_model.safetensors from all groups of an adapter; returns its checksum (xxh64).
uint64_t hf_adapter_write(const char* directory, ModelConfig cfg, const TensorRow* rows, const void* groups,
                          SafeTensorsDtype dtype);

// ---- reading the weights ----

typedef struct {
    SafeTensors file;
    ModelConfig cfg; // with the adapter
} HfAdapter;

// Opens the adapter of a directory for a model `cfg`, without or with it. All tensors must exist,
// and no others.
void hf_adapter_open(HfAdapter* adapter, const char* directory, ModelConfig cfg);

// Sets the tensors of group g, in memory that has only this group.
void hf_adapter_read(const HfAdapter* adapter, const TensorRow* rows, int g, void* group);

// Adds the adapter to the matrices of group g of its base, which is laid out by `base_rows`.
void hf_adapter_merge(const HfAdapter* adapter, const TensorRow* base_rows, int g, void* group);

void hf_adapter_close(HfAdapter* adapter);

#ifdef __cplusplus
}
#endif

#ifdef HF_ADAPTER_IMPLEMENTATION

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/formats/hf_config_families.h"
#include "llmc/model/families.h"

// ---- layers of a model that may have an adapter ----

// A layer as files have it: a part of a matrix of ours.
typedef struct {
    const FileTensor* tensor;
    FileTensorName name; // as a target
    AdaptedMatrix matrix;
    int part; // its bit, or ADAPTER_WHOLE
} HfAdapted_;

enum { HF_ADAPTED_MOST_ = 16 };

static int hf_adapted_matrix_(int row) {
    int m = 0;
    while (m < ADAPT_MATRICES && model_adapted_row((AdaptedMatrix)m) != row) {
        m++;
    }
    return m;
}

// Returns the bit of a tensor's part; 0 if such a part has no adapter.
static int hf_adapted_part_(const FileTensor* tensor) {
    if (tensor->form != FILE_PLAIN && tensor->form != FILE_HEADS && tensor->form != FILE_QKV &&
        tensor->form != FILE_CONV1D) {
        return 0;
    }
    switch (tensor->rows) {
    case ROWS_ALL:
        return ADAPTER_WHOLE;
    case ROWS_Q:
    case ROWS_GATE:
        return 1;
    case ROWS_K:
    case ROWS_UP:
        return 2;
    case ROWS_V:
        return 4;
    case ROWS_TURNS:
    case ROWS_LATENT_Q:
    case ROWS_LATENT_KV:
    case ROWS_HEAD_KEYS:
    case ROWS_HEAD_VALUES:
        break;
    }
    return 0;
}

// Returns the name of the layer's module: its tensor's without .weight.
static FileTensorName hf_module_(const FileTensor* tensor, int l) {
    FileTensorName name = file_tensor_name(tensor->hf_name, l, 0);
    char* end = strstr(name.text, ".weight");
    *(end ? end : name.text) = '\0';
    return name;
}

// True if `target` is the module's name, or its end from a dot on.
static int hf_module_is_(const FileTensor* tensor, const char* target) {
    const FileTensorName module = hf_module_(tensor, 0);
    const size_t all = strlen(module.text), end = strlen(target);
    const char* at = module.text + all - (end < all ? end : all);
    return end > 0 && strcmp(at, target) == 0 && (at == module.text || at[-1] == '.');
}

// True if a target also means another layer of the model than `module`, with or without an adapter.
static int hf_module_has_like_(const char* module, const char* target, const TensorRow* rows, Arch arch) {
    int found = 0;
    for (int i = 0; i < FILE_TENSOR_ROWS; i++) {
        const FileTensor* tensor = file_tensors() + i;
        found |= file_tensor_layers(tensor, tensor->hf_name, rows, arch) > 0 &&
                 hf_module_is_(tensor, target) && strcmp(hf_module_(tensor, 0).text, module) != 0;
    }
    return found;
}

// Returns the shortest name, of those that begin after a dot, that means only this layer.
static FileTensorName hf_module_short_(const FileTensor* tensor, const TensorRow* rows, Arch arch) {
    const FileTensorName module = hf_module_(tensor, 0);
    const char* target = module.text + strlen(module.text);
    FileTensorName name;
    do {
        target--;
        while (target > module.text && target[-1] != '.') {
            target--;
        }
    } while (target > module.text && hf_module_has_like_(module.text, target, rows, arch));
    snprintf(name.text, sizeof(name.text), "%s", target);
    return name;
}

// Lists the layers of a model that may have an adapter; returns their number.
static int hf_adapted_layers_(HfAdapted_ layers[HF_ADAPTED_MOST_], ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    int count = 0;
    model_parameter_rows_of(rows, model_of_base(cfg), sizeof(float));
    for (int i = 0; i < FILE_TENSOR_ROWS; i++) {
        const FileTensor* tensor = file_tensors() + i;
        const int m = hf_adapted_matrix_(tensor->row), part = hf_adapted_part_(tensor);
        if (m < ADAPT_MATRICES && part && file_tensor_layers(tensor, tensor->hf_name, rows, cfg.arch) > 0) {
            CHECK(count < HF_ADAPTED_MOST_, "more than %d layers with an adapter", (int)HF_ADAPTED_MOST_);
            layers[count++] =
                (HfAdapted_){tensor, hf_module_short_(tensor, rows, cfg.arch), (AdaptedMatrix)m, part};
        }
    }
    return count;
}

static int hf_adapter_has_(const ModelAdapter* adapter, const HfAdapted_* layer) {
    return adapter->rank[layer->matrix] > 0 && (adapter->parts[layer->matrix] & layer->part);
}

// ---- choosing ----

// Ranks and factors of the layers of a model, before its matrices get them.
typedef struct {
    HfAdapted_ layers[HF_ADAPTED_MOST_];
    int count, rank[HF_ADAPTED_MOST_]; // 0: none
    float alpha[HF_ADAPTED_MOST_];
} HfChoice_;

static void hf_choice_names_(const HfChoice_* c, char* text, size_t room) {
    text[0] = '\0';
    for (int i = 0; i < c->count; i++) {
        const size_t used = strlen(text);
        snprintf(text + used, room - used, "%s%s", i ? ", " : "", c->layers[i].name.text);
    }
}

// Sets the rank and alpha of the layers that `target` names; 0: leaves them. Returns their number.
static int hf_choice_set_(HfChoice_* c, const char* target, int rank, float alpha) {
    const int is_all = strcmp(target, "all") == 0 || strcmp(target, "all-linear") == 0;
    int found = 0;
    for (int i = 0; i < c->count; i++) {
        const AdaptedMatrix m = c->layers[i].matrix;
        const int is_attention = model_adapted_layers(m) == LAYERS_ATTENTION;
        if (is_all || (strcmp(target, "attention") == 0 && is_attention) ||
            (strcmp(target, "mlp") == 0 && !is_attention) || hf_module_is_(c->layers[i].tensor, target)) {
            c->rank[i] = rank > 0 ? rank : c->rank[i];
            c->alpha[i] = alpha > 0 ? alpha : c->alpha[i];
            found++;
        }
    }
    return found;
}

// Returns the layer whose name in one block `target` is, as PEFT lists all-linear; -1: none.
static int hf_choice_in_block_(const HfChoice_* c, const char* target, int L) {
    for (int i = 0; i < c->count * L; i++) {
        const FileTensorName module = hf_module_(c->layers[i / L].tensor, i % L);
        if (strcmp(module.text, target) == 0) {
            return i / L;
        }
    }
    return -1;
}

static int hf_choice_unknown_(const HfChoice_* c, const char* path, const char* target, char* error) {
    char names[512];
    hf_choice_names_(c, names, sizeof(names));
    return error_set(error, path, "no layer called '%s' can have an adapter; wanted %s%s", target,
                     names[0] ? "all, attention, mlp, or some of " : "another model: this one has none such",
                     names);
}

// Gives the matrices what their layers have; returns 0 if these differ in one.
static int hf_choice_end_(const HfChoice_* c, ModelAdapter* adapter, const char* path, char* error) {
    for (int i = 0; i < c->count; i++) {
        const int m = c->layers[i].matrix;
        if (c->rank[i] == 0) {
            continue;
        }
        if (adapter->rank[m] > 0 && (adapter->rank[m] != c->rank[i] || adapter->alpha[m] != c->alpha[i])) {
            return error_set(error, path,
                             "%s has rank %d and alpha %g, another layer of the same matrix %d and %g; "
                             "wanted one rank and alpha for them",
                             c->layers[i].name.text, c->rank[i], (double)c->alpha[i], adapter->rank[m],
                             (double)adapter->alpha[m]);
        }
        adapter->rank[m] = c->rank[i];
        adapter->alpha[m] = c->alpha[i];
        adapter->parts[m] |= c->layers[i].part;
    }
    return 1;
}

int hf_adapter_choose(ModelAdapter* adapter, ModelConfig cfg, int rank, float alpha, const char* targets,
                      char* error) {
    HfChoice_ c;
    memset(&c, 0, sizeof(c));
    memset(adapter, 0, sizeof(*adapter));
    c.count = hf_adapted_layers_(c.layers, cfg);
    for (const char* at = targets; *at || at == targets;) {
        const size_t length = strcspn(at, ",");
        char target[128];
        snprintf(target, sizeof(target), "%.*s", (int)length, at);
        if (!hf_choice_set_(&c, target, rank, alpha)) {
            return hf_choice_unknown_(&c, "--lora-targets", target, error);
        }
        at += length + (at[length] == ',');
        if (at[-1] == ',' && !*at) {
            return hf_choice_unknown_(&c, "--lora-targets", "", error);
        }
    }
    return hf_choice_end_(&c, adapter, "--lora-targets", error);
}

// ---- the configuration ----

enum { HF_ADAPTER_TARGETS_ = 8192, HF_ADAPTER_PATTERNS_ = 64, HF_ADAPTER_CONFIG_BYTES_ = 1 << 20 };

// A layer's name with a number of its own.
typedef struct {
    const char* name;
    double value;
} HfPattern_;

typedef struct {
    double rank, alpha;
    int by_root, is_lora;
    const char* targets[HF_ADAPTER_TARGETS_];
    int num_targets, num_ranks, num_alphas;
    HfPattern_ ranks[HF_ADAPTER_PATTERNS_], alphas[HF_ADAPTER_PATTERNS_];
} HfAdapterConfig_;

// Keys that must be switched off: null, false, 0, "none", [] or {}. So must all ways to compute
// something else, and to start from other weights of the base.
static int hf_adapter_must_be_off_(const char* key) {
    static const char* const keys[] = {"lora_dropout",
                                       "bias",
                                       "lora_bias",
                                       "modules_to_save",
                                       "layers_to_transform",
                                       "exclude_modules",
                                       "layer_replication",
                                       "target_parameters",
                                       "trainable_token_indices",
                                       "alora_invocation_tokens"};
    const size_t length = strlen(key);
    int is_off = strncmp(key, "use_", 4) == 0 || (length > 7 && strcmp(key + length - 7, "_config") == 0);
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        is_off |= strcmp(key, keys[i]) == 0;
    }
    return is_off;
}

static int hf_adapter_refuse_(JsonReader* text, const char* key, const char* found, const char* wanted) {
    return error_set(text->error, text->path, "%s is %s, wanted %s", key, found, wanted);
}

// Reads a value that must be switched off; with `is_base` it may also be true or "gaussian".
static int hf_adapter_off_(JsonReader* text, const char* key, int is_base) {
    const int first = json_peek(text);
    const char* word = "a list";
    double number;
    int flag;
    if (first == 'n') {
        return json_skip(text);
    }
    if (first == 't' || first == 'f') {
        return json_bool(text, &flag) && (!flag || is_base || hf_adapter_refuse_(text, key, "true", "false"));
    }
    if (first == '"') {
        const char* wanted = is_base ? "true, false or gaussian" : "none";
        return json_name(text, &word) && (strcmp(word, is_base ? "gaussian" : "none") == 0 ||
                                          hf_adapter_refuse_(text, key, word, wanted));
    }
    if (first == '[' || first == '{') {
        JsonWalk walk = json_walk(text, (char)first);
        if (json_step(&walk, &word)) {
            return hf_adapter_refuse_(text, key, "set", "null");
        }
        return walk.ok;
    }
    char found[32];
    if (!json_number(text, &number)) {
        return 0;
    }
    snprintf(found, sizeof(found), "%g", number);
    return number == 0 || hf_adapter_refuse_(text, key, found, "0");
}

static int hf_adapter_targets_(JsonReader* text, HfAdapterConfig_* config) {
    const char* word;
    if (json_peek(text) == '"') { // PEFT takes such a text for a pattern
        return json_name(text, &word) &&
               (strcmp(word, "all-linear") == 0
                    ? (config->targets[config->num_targets++] = word) != NULL
                    : hf_adapter_refuse_(text, "target_modules", word, "a list of names, or all-linear"));
    }
    JsonWalk walk = json_walk(text, '[');
    while (json_step(&walk, NULL)) {
        walk.ok = config->num_targets < HF_ADAPTER_TARGETS_
                      ? json_name(text, &config->targets[config->num_targets++])
                      : hf_adapter_refuse_(text, "target_modules", "a longer list", "at most 8192 names");
    }
    return walk.ok;
}

static int hf_adapter_pattern_(JsonReader* text, const char* key, HfPattern_* patterns, int* count) {
    const char* name;
    if (json_peek(text) == 'n') {
        return json_skip(text);
    }
    JsonWalk walk = json_walk(text, '{');
    while (json_step(&walk, &name)) {
        if (*count == HF_ADAPTER_PATTERNS_) {
            return hf_adapter_refuse_(text, key, "longer", "at most 64 names");
        }
        patterns[*count].name = name;
        walk.ok = json_number(text, &patterns[(*count)++].value);
    }
    return walk.ok;
}

static int hf_adapter_value_(JsonReader* text, const char* key, HfAdapterConfig_* config) {
    const char* word;
    if (strcmp(key, "peft_type") == 0) {
        config->is_lora = json_name(text, &word) && strcmp(word, "LORA") == 0;
        return config->is_lora || hf_adapter_refuse_(text, key, "another", "LORA");
    }
    return strcmp(key, "r") == 0                ? json_number(text, &config->rank)
           : strcmp(key, "lora_alpha") == 0     ? json_number(text, &config->alpha)
           : strcmp(key, "use_rslora") == 0     ? json_bool(text, &config->by_root)
           : strcmp(key, "target_modules") == 0 ? hf_adapter_targets_(text, config)
           : strcmp(key, "rank_pattern") == 0
               ? hf_adapter_pattern_(text, key, config->ranks, &config->num_ranks)
           : strcmp(key, "alpha_pattern") == 0
               ? hf_adapter_pattern_(text, key, config->alphas, &config->num_alphas)
           : strcmp(key, "init_lora_weights") == 0 ? hf_adapter_off_(text, key, 1)
           : hf_adapter_must_be_off_(key)          ? hf_adapter_off_(text, key, 0)
                                                   : json_skip(text);
}

static int hf_adapter_is_rank_(double rank) {
    return rank >= 1 && rank <= MODEL_MAX_RANK && rank == floor(rank);
}

// Gives the targets of the configuration their rank. Layers that are named block by block must be
// those of all blocks.
static int hf_adapter_targets_set_(HfChoice_* c, const HfAdapterConfig_* config, ModelConfig cfg,
                                   JsonReader* text) {
    int blocks[HF_ADAPTED_MOST_] = {0};
    for (int i = 0; i < config->num_targets; i++) {
        const char* target = config->targets[i];
        const int in_block = hf_choice_in_block_(c, target, cfg.L);
        if (in_block >= 0) {
            blocks[in_block]++;
        } else if (!hf_choice_set_(c, target, (int)config->rank, (float)config->alpha)) {
            return hf_choice_unknown_(c, text->path, target, text->error);
        }
    }
    for (int i = 0; i < c->count; i++) {
        const int all = model_layers_of(cfg, model_adapted_layers(c->layers[i].matrix));
        const FileTensorName name = hf_module_(c->layers[i].tensor, 0);
        if (blocks[i] > 0 && blocks[i] != all) {
            return error_set(text->error, text->path,
                             "%s and its like are targets in %d blocks, wanted all %d", name.text, blocks[i],
                             all);
        }
        c->rank[i] = blocks[i] > 0 ? (int)config->rank : c->rank[i];
        c->alpha[i] = blocks[i] > 0 ? (float)config->alpha : c->alpha[i];
    }
    return 1;
}

// Sets the layers of the configuration.
static int hf_adapter_settle_(JsonReader* text, const HfAdapterConfig_* config, ModelConfig cfg,
                              ModelAdapter* adapter) {
    HfChoice_ c;
    memset(&c, 0, sizeof(c));
    memset(adapter, 0, sizeof(*adapter));
    c.count = hf_adapted_layers_(c.layers, cfg);
    adapter->by_root = config->by_root;
    if (!config->is_lora || !hf_adapter_is_rank_(config->rank) || !(config->alpha > 0)) {
        return error_set(text->error, text->path,
                         "peft_type, r or lora_alpha is missing or not possible: r %g, "
                         "lora_alpha %g; wanted LORA, 1 to %d, above 0",
                         config->rank, config->alpha, (int)MODEL_MAX_RANK);
    }
    if (!hf_adapter_targets_set_(&c, config, cfg, text)) {
        return 0;
    }
    for (int i = 0; i < config->num_ranks + config->num_alphas; i++) {
        const int is_rank = i < config->num_ranks;
        const HfPattern_ p = is_rank ? config->ranks[i] : config->alphas[i - config->num_ranks];
        HfChoice_ own = c;
        const int is_possible = is_rank ? hf_adapter_is_rank_(p.value) : p.value > 0;
        if (!is_possible ||
            !hf_choice_set_(&own, p.name, is_rank ? (int)p.value : 0, is_rank ? 0 : (float)p.value)) {
            return error_set(
                text->error, text->path,
                "%s_pattern gives %s %g; wanted a layer's name for all blocks, and a number above 0",
                is_rank ? "rank" : "alpha", p.name, p.value);
        }
        for (int k = 0; k < c.count; k++) { // only of targets
            own.rank[k] = c.rank[k] ? own.rank[k] : 0;
        }
        c = own;
    }
    return hf_choice_end_(&c, adapter, text->path, text->error) &&
           (config->num_targets > 0 ||
            hf_adapter_refuse_(text, "target_modules", "missing", "a list of names"));
}

int hf_adapter_is_in(const char* directory) {
    char path[PATH_MAX];
    file_join(path, directory, HF_ADAPTER_CONFIG);
    return file_exists(path);
}

void hf_adapter_list_files(FileList* files, const char* option, const char* directory) {
    file_list_add_in(files, option, directory, HF_ADAPTER_CONFIG);
    file_list_add_in(files, option, directory, HF_ADAPTER_FILE);
}

ModelAdapter hf_adapter_read_config(const char* directory, ModelConfig cfg) {
    char path[PATH_MAX], error[ERROR_BYTES], *text;
    size_t bytes;
    const char* key;
    ModelAdapter adapter;
    HfAdapterConfig_ config;
    memset(&config, 0, sizeof(config));
    file_join(path, directory, HF_ADAPTER_CONFIG);
    CHECK(byte_order_text(path, HF_ADAPTER_CONFIG_BYTES_, &text, &bytes, error), "%s", error);
    JsonReader reader = json_reader(path, text, bytes, error);
    JsonWalk walk = json_walk(&reader, '{');
    while (json_step(&walk, &key)) {
        walk.ok = hf_adapter_value_(&reader, key, &config);
    }
    CHECK(walk.ok && json_end(&reader) && hf_adapter_settle_(&reader, &config, cfg, &adapter), "%s", error);
    free(text);
    return adapter;
}

// Prints the members of rank_pattern or alpha_pattern: of layers that differ from the first one.
static void hf_adapter_print_pattern_(FILE* file, const HfAdapted_* layers, int count,
                                      const ModelAdapter* adapter, int first, int is_rank) {
    const char* separator = "";
    for (int i = 0; i < count; i++) {
        const int m = layers[i].matrix;
        const double value = is_rank ? adapter->rank[m] : (double)adapter->alpha[m],
                     usual = is_rank ? adapter->rank[first] : (double)adapter->alpha[first];
        if (hf_adapter_has_(adapter, &layers[i]) && value != usual) {
            fprintf(file, "%s\"%s\": %.9g", separator, layers[i].name.text, value);
            separator = ", ";
        }
    }
}

void hf_adapter_write_config(const char* directory, ModelConfig cfg, const char* base) {
    HfAdapted_ layers[HF_ADAPTED_MOST_];
    const ModelAdapter* adapter = &cfg.adapter;
    const int count = hf_adapted_layers_(layers, cfg);
    const char* separator = "";
    char path[PATH_MAX];
    FileWriter writer;
    int first = 0;
    while (adapter->rank[first] == 0) {
        first++;
    }
    file_join(path, directory, HF_ADAPTER_CONFIG);
    file_open(&writer, path);
    fputs("{\n  \"peft_type\": \"LORA\",\n  \"task_type\": \"CAUSAL_LM\",\n  \"base_model_name_or_path\": ",
          writer.file);
    json_print_string(writer.file, base, strlen(base));
    fprintf(writer.file,
            ",\n  \"r\": %d,\n  \"lora_alpha\": %.9g,\n  \"use_rslora\": %s,\n  \"target_modules\": [",
            adapter->rank[first], (double)adapter->alpha[first], adapter->by_root ? "true" : "false");
    for (int i = 0; i < count; i++) {
        if (hf_adapter_has_(adapter, &layers[i])) {
            fprintf(writer.file, "%s\"%s\"", separator, layers[i].name.text);
            separator = ", ";
        }
    }
    fputs("],\n  \"rank_pattern\": {", writer.file);
    hf_adapter_print_pattern_(writer.file, layers, count, adapter, first, 1);
    fputs("},\n  \"alpha_pattern\": {", writer.file);
    hf_adapter_print_pattern_(writer.file, layers, count, adapter, first, 0);
    fprintf(writer.file,
            "},\n  \"bias\": \"none\",\n  \"lora_dropout\": 0.0,\n  \"fan_in_fan_out\": %s,\n"
            "  \"inference_mode\": true,\n  \"init_lora_weights\": true\n}\n",
            cfg.arch == ARCH_GPT2 ? "true" : "false");
    file_commit(&writer);
}

// ---- the weights ----

// The adapter of a layer in a file, and where it is in memory.
typedef struct {
    const HfAdapted_* layer;
    AdapterShape shape;
    const TensorRow *a, *b;
    int l;
    size_t a_first, b_first; // rows of the layer's part
    size_t b_rows;
} HfFactors_;

static HfFactors_ hf_factors_(const HfAdapted_* layer, ModelConfig cfg, const TensorRow* rows, int l) {
    const AdapterShape s = model_adapter_shape(cfg, layer->matrix);
    const int at = model_adapter_row(layer->matrix);
    int p = 0, first = 0;
    for (int bit = 1; bit < layer->part && layer->part != ADAPTER_WHOLE; bit *= 2) {
        if (cfg.adapter.parts[layer->matrix] & bit) {
            first += s.parts.rows[p++];
        }
    }
    return (HfFactors_){
        layer, s, &rows[at], &rows[at + 1], l, (size_t)(p * s.rank), (size_t)first, (size_t)s.parts.rows[p]};
}

static FileTensorName hf_factor_name_(const HfFactors_* f, char factor) {
    const FileTensorName module = hf_module_(f->layer->tensor, f->l);
    FileTensorName name;
    snprintf(name.text, sizeof(name.text), "base_model.model.%.80s.lora_%c.weight", module.text, factor);
    return name;
}

// Returns the row in memory for row i of lora_B, of the layer's.
static size_t hf_factor_row_(const HfFactors_* f, ModelConfig cfg, size_t i) {
    const FileOrder order = {cfg.latent.in_halves ? ORDER_HALVES : hf_families[cfg.arch].order, 0};
    return f->b_first + file_tensor_line(f->layer->tensor, order, cfg, f->b_rows, i);
}

// Steps through the layers' adapters in a file: `at` counts from 0. Returns 0 after the last.
static int hf_factors_next_(HfFactors_* f, int* at, const HfAdapted_* layers, int count, ModelConfig cfg,
                            const TensorRow* rows) {
    for (; *at < count * cfg.L; (*at)++) {
        const HfAdapted_* layer = &layers[*at % count];
        if (hf_adapter_has_(&cfg.adapter, layer)) {
            *f = hf_factors_(layer, cfg, rows, *at / count);
            if (tensor_has_layer(f->a, f->l)) {
                (*at)++;
                return 1;
            }
        }
    }
    return 0;
}

static void hf_factors_write_(SafeTensorsWriter* writer, const HfFactors_* f, ModelConfig cfg,
                              const char* group) {
    const size_t bytes = f->a->element_bytes, R = (size_t)f->shape.rank;
    const char *a = (const char*)tensor_in_group(f->a, group), *b = (const char*)tensor_in_group(f->b, group);
    safetensors_write_raw(writer, a + f->a_first * f->a->cols * bytes, R * f->a->cols * bytes);
    for (size_t i = 0; i < f->b_rows; i++) {
        safetensors_write_raw(writer, b + hf_factor_row_(f, cfg, i) * R * bytes, R * bytes);
    }
}

uint64_t hf_adapter_write(const char* directory, ModelConfig cfg, const TensorRow* rows, const void* groups,
                          SafeTensorsDtype dtype) {
    HfAdapted_ layers[HF_ADAPTED_MOST_];
    const int count = hf_adapted_layers_(layers, cfg);
    char path[PATH_MAX];
    SafeTensorsWriter writer;
    HfFactors_ f;
    file_join(path, directory, HF_ADAPTER_FILE);
    safetensors_writer_open(&writer, path);
    for (int at = 0; hf_factors_next_(&f, &at, layers, count, cfg, rows);) {
        const size_t R = (size_t)f.shape.rank, a[] = {R, f.a->cols}, b[] = {f.b_rows, R};
        safetensors_writer_declare(&writer, hf_factor_name_(&f, 'A').text, dtype, 2, a);
        safetensors_writer_declare(&writer, hf_factor_name_(&f, 'B').text, dtype, 2, b);
    }
    safetensors_writer_begin(&writer);
    for (int at = 0; hf_factors_next_(&f, &at, layers, count, cfg, rows);) {
        const size_t group = tensor_group_offset_bytes(rows, model_group(cfg, f.l));
        hf_factors_write_(&writer, &f, cfg, (const char*)groups + group);
    }
    return safetensors_writer_commit(&writer);
}

// Returns a factor in the file; the name may have PEFT's name of the adapter in it.
static const SafeTensorsView* hf_factor_find_(const HfAdapter* adapter, const HfFactors_* f, char factor) {
    const size_t R = (size_t)f->shape.rank, a[] = {R, f->a->cols}, b[] = {f->b_rows, R};
    return safetensors_require(&adapter->file, hf_factor_name_(f, factor).text, 2, factor == 'A' ? a : b);
}

void hf_adapter_open(HfAdapter* adapter, const char* directory, ModelConfig cfg) {
    HfAdapted_ layers[HF_ADAPTED_MOST_];
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const int count = hf_adapted_layers_(layers, cfg);
    char path[PATH_MAX];
    HfFactors_ f;
    size_t used = 0;
    adapter->cfg = cfg;
    adapter->cfg.adapter = hf_adapter_read_config(directory, model_of_base(cfg));
    model_parameter_rows_of(rows, adapter->cfg, sizeof(float));
    file_join(path, directory, HF_ADAPTER_FILE);
    safetensors_open(&adapter->file, path);
    for (int at = 0; hf_factors_next_(&f, &at, layers, count, adapter->cfg, rows);) {
        hf_factor_find_(adapter, &f, 'A');
        hf_factor_find_(adapter, &f, 'B');
        used += 2;
    }
    for (size_t i = 0; i < adapter->file.num_tensors && used < adapter->file.num_tensors; i++) {
        int is_known = 0;
        for (int at = 0; hf_factors_next_(&f, &at, layers, count, adapter->cfg, rows);) {
            is_known |= strcmp(adapter->file.tensors[i].name, hf_factor_name_(&f, 'A').text) == 0 ||
                        strcmp(adapter->file.tensors[i].name, hf_factor_name_(&f, 'B').text) == 0;
        }
        CHECK(is_known, "%s: tensor %s is of no layer that " HF_ADAPTER_CONFIG " names as a target", path,
              adapter->file.tensors[i].name);
    }
}

// Sets elements from a tensor of the file, which must be finite.
static void hf_factor_read_(const SafeTensorsView* view, size_t first, size_t count, float* to) {
    safetensors_read_f32_part(view, first, count, to);
    for (size_t i = 0; i < count; i++) {
        CHECK(isfinite(to[i]), "%s: tensor %s, element %zu is %f, wanted a finite number", view->path,
              view->name, first + i, (double)to[i]);
    }
}

void hf_adapter_read(const HfAdapter* adapter, const TensorRow* rows, int g, void* group) {
    HfAdapted_ layers[HF_ADAPTED_MOST_];
    const ModelConfig cfg = adapter->cfg;
    const int count = hf_adapted_layers_(layers, cfg);
    HfFactors_ f;
    for (int at = 0; hf_factors_next_(&f, &at, layers, count, cfg, rows);) {
        if (model_group(cfg, f.l) != g) {
            continue;
        }
        const size_t R = (size_t)f.shape.rank;
        const SafeTensorsView* b = hf_factor_find_(adapter, &f, 'B');
        hf_factor_read_(hf_factor_find_(adapter, &f, 'A'), 0, R * f.a->cols,
                        (float*)tensor_in_group(f.a, group) + f.a_first * f.a->cols);
        for (size_t i = 0; i < f.b_rows; i++) {
            hf_factor_read_(b, i * R, R,
                            (float*)tensor_in_group(f.b, group) + hf_factor_row_(&f, cfg, i) * R);
        }
    }
}

void hf_adapter_merge(const HfAdapter* adapter, const TensorRow* base_rows, int g, void* group) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows_of(rows, adapter->cfg, sizeof(float));
    if (g == 0) {
        return;
    }
    float* own =
        (float*)check_alloc(rows[model_adapter_row(ADAPT_QKV)].block_bytes, 1, "a group of an adapter");
    hf_adapter_read(adapter, rows, g, own);
    for (int m = 0; m < ADAPT_MATRICES; m++) {
        const AdapterShape s = model_adapter_shape(adapter->cfg, (AdaptedMatrix)m);
        const TensorRow *a = &rows[model_adapter_row((AdaptedMatrix)m)],
                        *w = &base_rows[model_adapted_row((AdaptedMatrix)m)];
        if (s.rank > 0 && tensor_is_in_group(a, g)) {
            adapter_merge_cpu((float*)tensor_in_group(w, group), (const float*)tensor_in_group(a, own),
                              (const float*)tensor_in_group(a + 1, own), s, (int)w->cols);
        }
    }
    free(own);
}

void hf_adapter_close(HfAdapter* adapter) { safetensors_close(&adapter->file); }

#endif // HF_ADAPTER_IMPLEMENTATION

#endif
