/*
hf_model.h -- GPT-2 as Hugging Face stores it: a directory with config.json and model.safetensors.

    config.json          sizes under GPT-2's names: n_layer, n_head, n_embd, n_positions, vocab_size
    model.safetensors    tensors "transformer." + the names in the table of gpt2.h, one for each layer

Matrices inside the blocks are (in, out) there, the transpose of ours. The vocabulary has no padding there: it
is left out on writing, and zero after reading. The classifier is the token embedding, as here. A config.json
may ask for more than GPT-2 has (other activations, scales by layer, a classifier of its own): what we do not
compute is refused by name, and so is a tensor that config.json does not account for. Dropout, which belongs
to training, and heads for other tasks are left out with a note on stderr.

Read are models in one file or in several (model.safetensors.index.json), in fp32, fp16 or bf16, with and
without "transformer."; into fp32, exactly. A weight that is not finite is an error that names its tensor.

    memory    as the rows say (gpt2_parameter_rows_of), with elements of the type that the file has

defines: hf_config_read, hf_config_write, hf_model_read, hf_model_write, hf_model_bytes
*/
#ifndef LLMC_HF_MODEL_H
#define LLMC_HF_MODEL_H

#include <stdint.h>

#include "llmc/formats/safetensors.h"
#include "llmc/gpt2.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- config.json ----

// The sizes of the model in a directory.
GPT2Config hf_config_read(const char* directory);

// Writes config.json and generation_config.json. `dtype` is the dtype of the weights, eot the token that
// starts and ends documents.
void hf_config_write(const char* directory, GPT2Config cfg, SafeTensorsDtype dtype, int eot);

// ---- model.safetensors ----

// Writes directory/model.safetensors, whole or not at all; `dtype` is the dtype in memory. Returns
// the file's checksum (xxh64).
uint64_t hf_model_write(const char* directory, GPT2Config cfg, const TensorRow* rows, const void* memory,
                        SafeTensorsDtype dtype);

// About the bytes of model.safetensors: the data, and room for its header.
double hf_model_bytes(GPT2Config cfg, SafeTensorsDtype dtype);

// Reads a directory's model into `memory`: fp32, laid out by `rows` for the directory's own configuration.
void hf_model_read(const char* directory, GPT2Config cfg, const TensorRow* rows, void* memory);

#ifdef __cplusplus
}
#endif

#ifdef HF_MODEL_IMPLEMENTATION

#include <assert.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"

#define HF_NORM_EPSILON_ 1e-5
#define HF_MAX_CONFIG_ ((size_t)1 << 20) // bytes
#define HF_CHUNK_ ((size_t)1 << 16)      // elements transposed at a time, or one row if that is more

// ---- config.json ----

typedef struct {
    GPT2Config cfg;
    size_t hidden; // of the MLP; 0: 4 C
    int is_gpt2;
    double dropout;    // the largest
    const char** keys; // all that came, in the text
    size_t num_keys;
} HfConfig_;

// Puts a number into the size of this key. 1: done; -1: the key is no size; 0: an error.
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

// A string that must be one of a list, which ends with NULL.
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

// A switch that must stand as we compute.
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

// The value of a key.
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
                                              NULL}; // all are GELU with tanh
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
    GPT2Config* cfg = &config->cfg;
    if (!hf_config_members_(text, config)) {
        return 0;
    }
    if (!config->is_gpt2) {
        return error_set(text->error, text->path, "no model_type, wanted gpt2");
    }
    cfg->Vp = cfg->V < INT_MAX - GPT2_VOCAB_ALIGN ? gpt2_padded_vocab(cfg->V) : cfg->V;
    if (config->hidden && config->hidden != 4 * (size_t)cfg->C) {
        return error_set(text->error, text->path, "n_inner is %zu, wanted 4 x n_embd = %zu", config->hidden,
                         4 * (size_t)cfg->C);
    }
    return gpt2_check_config(*cfg, text->path, text->error);
}

GPT2Config hf_config_read(const char* directory) {
    char path[PATH_MAX], error[ERROR_BYTES];
    char* copy;
    size_t bytes;
    HfConfig_ config;
    memset(&config, 0, sizeof(config));
    file_join(path, directory, "config.json");
    CHECK(file_try_read(path, HF_MAX_CONFIG_, &copy, &bytes, error), "%s", error);
    JsonReader text = json_reader(path, copy, bytes, error);
    CHECK(hf_config_parse_(&text, &config), "%s", error);
    if (config.dropout > 0) {
        fprintf(stderr, "note: %s: it was trained with dropout (%g), which is not used here\n", path,
                config.dropout);
    }
    free(config.keys);
    free(copy);
    return config.cfg;
}

static void hf_write_text_(const char* directory, const char* name, const char* text) {
    char path[PATH_MAX];
    file_join(path, directory, name);
    file_write_text(path, text, strlen(text));
}

void hf_config_write(const char* directory, GPT2Config cfg, SafeTensorsDtype dtype, int eot) {
    char text[2048];
    const char* type = dtype == SAFETENSORS_BF16  ? "bfloat16"
                       : dtype == SAFETENSORS_F16 ? "float16"
                                                  : "float32";
    const int length =
        snprintf(text, sizeof(text),
                 "{\n"
                 "  \"architectures\": [\"GPT2LMHeadModel\"],\n"
                 "  \"model_type\": \"gpt2\",\n"
                 "  \"vocab_size\": %d,\n  \"n_positions\": %d,\n  \"n_ctx\": %d,\n"
                 "  \"n_embd\": %d,\n  \"n_layer\": %d,\n  \"n_head\": %d,\n  \"n_inner\": null,\n"
                 "  \"activation_function\": \"gelu_new\",\n  \"layer_norm_epsilon\": %g,\n"
                 "  \"resid_pdrop\": 0.0,\n  \"embd_pdrop\": 0.0,\n  \"attn_pdrop\": 0.0,\n"
                 "  \"bos_token_id\": %d,\n  \"eos_token_id\": %d,\n"
                 "  \"tie_word_embeddings\": true,\n  \"torch_dtype\": \"%s\"\n}\n",
                 cfg.V, cfg.max_T, cfg.max_T, cfg.C, cfg.L, cfg.NH, HF_NORM_EPSILON_, eot, eot, type);
    assert(length < (int)sizeof(text));
    (void)length;
    hf_write_text_(directory, "config.json", text);
    snprintf(text, sizeof(text), "{\n  \"bos_token_id\": %d,\n  \"eos_token_id\": %d\n}\n", eot, eot);
    hf_write_text_(directory, "generation_config.json", text);
}

// ---- model.safetensors ----

// A layer of a tensor, as the file has it.
typedef struct {
    char name[256];
    int ndim;
    size_t shape[2];
} HfTensor_;

static HfTensor_ hf_tensor_(const TensorRow* row, GPT2Config cfg, int l) {
    HfTensor_ tensor;
    const size_t rows = gpt2_rows_in_files(row, cfg);
    const int is_matrix = row->form != FILE_VECTOR, is_turned = row->form == FILE_CONV1D;
    char name[128];
    snprintf(name, sizeof(name), row->hf_name, l);
    snprintf(tensor.name, sizeof(tensor.name), SAFETENSORS_PREFIX "%s", name);
    tensor.ndim = is_matrix ? 2 : 1;
    tensor.shape[0] = is_matrix && !is_turned ? rows : row->cols;
    tensor.shape[1] = is_turned ? rows : row->cols;
    return tensor;
}

// out (n, rows) = columns first ... first + n - 1 of in (rows, cols), for elements of 2 or 4 bytes.
static void hf_turn_(void* out, const void* in, size_t rows, size_t cols, size_t first, size_t n,
                     size_t element_bytes) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t j = 0; j < n; j++) {
            if (element_bytes == 4) {
                ((uint32_t*)out)[j * rows + r] = ((const uint32_t*)in)[r * cols + first + j];
            } else {
                ((uint16_t*)out)[j * rows + r] = ((const uint16_t*)in)[r * cols + first + j];
            }
        }
    }
}

// Columns of a matrix that are turned at a time.
static size_t hf_chunk_columns_(const TensorRow* row) {
    const size_t columns = HF_CHUNK_ / row->rows;
    return columns ? columns : 1;
}

// Room for hf_chunk_columns_ of any matrix, with elements of 4 bytes.
static void* hf_chunk_open_(const TensorRow* rows) {
    size_t max = HF_CHUNK_;
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        max = rows[i].rows > max ? rows[i].rows : max;
    }
    return check_alloc(max, sizeof(float), "a piece of a matrix");
}

static void hf_write_layer_(SafeTensorsWriter* writer, const TensorRow* row, GPT2Config cfg,
                            const char* layer, void* chunk) {
    if (row->form != FILE_CONV1D) {
        safetensors_write_raw(writer, layer, gpt2_rows_in_files(row, cfg) * row->cols * row->element_bytes);
        return;
    }
    const size_t columns = hf_chunk_columns_(row);
    for (size_t at = 0; at < row->cols; at += columns) {
        const size_t n = row->cols - at < columns ? row->cols - at : columns;
        hf_turn_(chunk, layer, row->rows, row->cols, at, n, row->element_bytes);
        safetensors_write_raw(writer, chunk, n * row->rows * row->element_bytes);
    }
}

uint64_t hf_model_write(const char* directory, GPT2Config cfg, const TensorRow* rows, const void* memory,
                        SafeTensorsDtype dtype) {
    char path[PATH_MAX];
    SafeTensorsWriter writer;
    void* chunk = hf_chunk_open_(rows);
    assert(rows[0].element_bytes == safetensors_dtype_bytes(dtype));
    file_join(path, directory, "model.safetensors");
    safetensors_writer_open(&writer, path);
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        for (int l = 0; l < rows[i].layers; l++) {
            const HfTensor_ tensor = hf_tensor_(&rows[i], cfg, l);
            safetensors_writer_declare(&writer, tensor.name, dtype, tensor.ndim, tensor.shape);
        }
    }
    safetensors_writer_begin(&writer);
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        for (int l = 0; l < rows[i].layers; l++) {
            hf_write_layer_(&writer, &rows[i], cfg, (const char*)tensor_at_layer(&rows[i], memory, l), chunk);
        }
    }
    free(chunk);
    return safetensors_writer_commit(&writer);
}

double hf_model_bytes(GPT2Config cfg, SafeTensorsDtype dtype) {
    const double header = (double)GPT2_PARAMETER_ROWS * cfg.L * 160 + 4096;
    return gpt2_count_parameters(cfg) * (double)safetensors_dtype_bytes(dtype) + header;
}

static void hf_check_finite_(const SafeTensorsView* view, const float* values, size_t first, size_t n) {
    for (size_t i = 0; i < n; i++) {
        CHECK(isfinite(values[i]), "%s: tensor %s, element %zu is %f, wanted a finite number", view->path,
              view->name, first + i, (double)values[i]);
    }
}

// Sets a layer (rows, cols) from a tensor of the file.
static void hf_read_layer_(const SafeTensorsView* view, const TensorRow* row, float* layer, float* chunk) {
    if (row->form != FILE_CONV1D) {
        safetensors_read_f32(view, layer);
        hf_check_finite_(view, layer, 0, view->elements);
        return;
    }
    const size_t columns = hf_chunk_columns_(row);
    for (size_t at = 0; at < row->cols; at += columns) {
        const size_t n = row->cols - at < columns ? row->cols - at : columns;
        safetensors_read_f32_part(view, at * row->rows, n * row->rows, chunk);
        hf_check_finite_(view, chunk, at * row->rows, n * row->rows);
        for (size_t r = 0; r < row->rows; r++) {
            for (size_t j = 0; j < n; j++) {
                layer[r * row->cols + at + j] = chunk[j * row->rows + r];
            }
        }
    }
}

// A classifier with weights of its own is not GPT-2's; a copy of the embedding is.
static void hf_check_classifier_(const SafeTensorsSet* set, const SafeTensorsView* embedding) {
    const SafeTensorsView* head = safetensors_set_find(set, "lm_head.weight");
    CHECK(!head || (head->dtype == embedding->dtype && head->bytes == embedding->bytes &&
                    memcmp(head->data, embedding->data, head->bytes) == 0),
          "%s: tensor lm_head.weight is not the token embedding, wanted a model with tied embeddings",
          set->path);
}

// What a tensor is that none of the rows asked for.
typedef enum { HF_UNEXPECTED_, HF_KNOWN_, HF_HEAD_ } HfOther_;

// The causal mask and its value, which old versions of transformers saved beside the weights: h.0.attn.bias.
static int hf_is_mask_(const char* name) {
    const size_t prefix = strlen(SAFETENSORS_PREFIX);
    int l;
    char what[16], end;
    return sscanf(strncmp(name, SAFETENSORS_PREFIX, prefix) == 0 ? name + prefix : name, "h.%d.attn.%15s%c",
                  &l, what, &end) == 2 &&
           (strcmp(what, "bias") == 0 || strcmp(what, "masked_bias") == 0);
}

static HfOther_ hf_other_(const char* name) {
    static const char* const heads[] = {"score.", "multiple_choice_head.", "qa_outputs.", "classifier.",
                                        "v_head."};
    if (hf_is_mask_(name) || strcmp(name, "lm_head.weight") == 0) { // hf_check_classifier_
        return HF_KNOWN_;
    }
    for (size_t i = 0; i < sizeof(heads) / sizeof(heads[0]); i++) {
        if (strncmp(name, heads[i], strlen(heads[i])) == 0) {
            return HF_HEAD_;
        }
    }
    return HF_UNEXPECTED_;
}

// The first names of a list, for a message.
typedef struct {
    int count;
    char text[512];
} HfNames_;

static void hf_add_name_(HfNames_* names, const char* name) {
    const size_t used = strlen(names->text);
    if (names->count < 4) {
        snprintf(names->text + used, sizeof(names->text) - used, "%s%s", names->count ? ", " : "", name);
    } else if (names->count == 4) {
        snprintf(names->text + used, sizeof(names->text) - used, ", ...");
    }
    names->count++;
}

// No tensor may be left out in silence: `used` are those that were read.
static void hf_check_others_(const SafeTensorsSet* set, GPT2Config cfg, const SafeTensorsView** used,
                             size_t num_used) {
    HfNames_ unexpected = {0, ""}, heads = {0, ""};
    for (size_t f = 0; f < set->num_files; f++) {
        for (size_t t = 0; t < set->files[f].num_tensors; t++) {
            const SafeTensorsView* view = &set->files[f].tensors[t];
            size_t i = 0;
            while (i < num_used && used[i] != view) {
                i++;
            }
            const HfOther_ other = i < num_used ? HF_KNOWN_ : hf_other_(view->name);
            if (other != HF_KNOWN_) {
                hf_add_name_(other == HF_HEAD_ ? &heads : &unexpected, view->name);
            }
        }
    }
    CHECK(!unexpected.count, "%s: unexpected tensors: %s (%d; config.json says %d layers)", set->path,
          unexpected.text, unexpected.count, cfg.L);
    if (heads.count) {
        fprintf(stderr, "note: %s: ignored heads for other tasks: %s\n", set->path, heads.text);
    }
}

void hf_model_read(const char* directory, GPT2Config cfg, const TensorRow* rows, void* memory) {
    SafeTensorsSet set;
    float* chunk = (float*)hf_chunk_open_(rows);
    const SafeTensorsView** used = (const SafeTensorsView**)check_alloc(GPT2_PARAMETER_ROWS * (size_t)cfg.L,
                                                                        sizeof(*used), "tensors of a model");
    size_t num_used = 0;
    safetensors_set_open(&set, directory);
    for (int i = 0; i < GPT2_PARAMETER_ROWS; i++) {
        assert(rows[i].element_bytes == sizeof(float));
        for (int l = 0; l < rows[i].layers; l++) {
            float* layer = (float*)tensor_at_layer(&rows[i], memory, l);
            const HfTensor_ tensor = hf_tensor_(&rows[i], cfg, l);
            const SafeTensorsView* view =
                safetensors_set_require(&set, tensor.name, tensor.ndim, tensor.shape);
            used[num_used++] = view;
            memset(layer, 0, tensor_layer_elements(&rows[i]) * sizeof(float)); // padding of the vocabulary
            hf_read_layer_(view, &rows[i], layer, chunk);
            if (rows[i].init == INIT_VOCAB) {
                hf_check_classifier_(&set, view);
            }
        }
    }
    hf_check_others_(&set, cfg, used, num_used);
    safetensors_set_close(&set);
    free(used);
    free(chunk);
}

#endif // HF_MODEL_IMPLEMENTATION

#endif
