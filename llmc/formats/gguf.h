/*
gguf.h -- writes a model as one GGUF file (version 3), the format of llama.cpp and its relatives.

    "GGUF", u32 3, u64 tensors, u64 pairs
    pairs             key, type, value: the architecture, its sizes, the tokenizer
    tensor infos      name, dimensions (fastest first), type, offset in the data
    data              each tensor at a multiple of 32 bytes; matrices (out, in), as ours, but in the
                      parts of families.h; without the padding of the vocabulary

The matrices of a layer's experts are one tensor of three dimensions.

Little endian. Matrices have the requested type; vectors, routers and position embeddings stay fp32,
as their readers want them. A finite number that would become infinite in the file is an error. Q8_0
is made of q8.h's blocks; matrices whose rows are not whole blocks are fp16 instead.

A tokenizer of bytes becomes a BPE without merges. A model without a BPE tokenizer gets "no_vocab":
its tokens are only numbers, and llama.cpp can neither read nor print text with it.

Architectures and keys are those of gguf_arch.h and gguf_keys.h.
*/
#ifndef LLMC_GGUF_H
#define LLMC_GGUF_H

#include "llmc/base/file.h"
#include "llmc/base/enum_words.h"
#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/model_card.h"
#include "llmc/formats/gguf_arch.h"
#include "llmc/model/families.h"
#include "llmc/model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

// --export-gguf-dtype
#define GGUF_DTYPE_WORDS(X) X(GGUF_F32, "f32") X(GGUF_F16, "f16") X(GGUF_BF16, "bf16") X(GGUF_Q8_0, "q8_0")
typedef enum { GGUF_DTYPE_WORDS(WORDS_VALUE) } GgufDtype;

// Tells readers to put end-of-text before a text, as training had it before each document.
typedef enum { GGUF_NO_START_TOKEN, GGUF_START_TOKEN } GgufStart;

// ---- tensors ----

// File written a group of parameters at a time, in any order; complete or absent.
typedef struct {
    FileWriter file;
    ModelConfig cfg;
    GgufDtype dtype;
    size_t at; // offset of the next byte
    uint64_t tensors, pairs;
    size_t data; // offset of the next tensor's data; then of the first in the file
} GgufWriter;

// Model in such a file.
typedef struct {
    const char* name; // a path, whose last part is the name
    ModelConfig cfg;
    GgufDtype dtype;
    const Bpe* bpe; // tokenizer, which has a bpe_gguf_pre; NULL: no tokenizer and no card
    ModelCard card;
    GgufStart start;
} GgufModel;

void gguf_create(GgufWriter* w, const char* path, const GgufModel* model);

// Writes the tensors of group g (model.h) from fp32 memory that has only this group, laid out by
// `rows`.
void gguf_put(GgufWriter* w, const TensorRow* rows, int g, const void* group);

// Completes the file; call it after all groups.
void gguf_commit(GgufWriter* w);

#ifdef __cplusplus
}
#endif

#ifdef GGUF_IMPLEMENTATION

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/float16.h"
#include "llmc/base/gguf_file.h"
#include "llmc/base/json.h"
#include "llmc/base/text_buffer.h"
#include "llmc/formats/gguf_keys.h"
#include "llmc/formats/gguf_tensors.h"
#include "llmc/ops/q8.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/bpe_gguf.h"
#include "llmc/tokenizer/bpe_model.h"
#include "llmc/tokenizer/bpe_sentence.h"

static void gguf_put_bytes_(GgufWriter* w, const void* data, size_t bytes) {
    file_put(&w->file, data, bytes);
    w->at += bytes;
}

static void gguf_put_u32_(GgufWriter* w, uint32_t value) { gguf_put_bytes_(w, &value, sizeof(value)); }
static void gguf_put_u64_(GgufWriter* w, uint64_t value) { gguf_put_bytes_(w, &value, sizeof(value)); }

static void gguf_put_string_(GgufWriter* w, const char* text, size_t length) {
    gguf_put_u64_(w, length);
    gguf_put_bytes_(w, text, length);
}

static void gguf_pad_(GgufWriter* w) {
    static const char zeros[GGUF_ALIGN] = {0};
    gguf_put_bytes_(w, zeros, (GGUF_ALIGN - w->at % GGUF_ALIGN) % GGUF_ALIGN);
}

// ---- pairs ----

static void gguf_key_(GgufWriter* w, const char* key, uint32_t type) {
    gguf_put_string_(w, key, strlen(key));
    gguf_put_u32_(w, type);
    w->pairs++;
}

static void gguf_pair_u32_(GgufWriter* w, const char* key, int value) {
    gguf_key_(w, key, GGUF_U32);
    gguf_put_u32_(w, (uint32_t)value);
}

static void gguf_pair_string_(GgufWriter* w, const char* key, const char* value) {
    gguf_key_(w, key, GGUF_STRING);
    gguf_put_string_(w, value, strlen(value));
}

// Key of the architecture: "llama.block_count".
typedef struct {
    char text[96];
} GgufKey_;

static GgufKey_ gguf_own_key_(const GgufWriter* w, const char* key) {
    GgufKey_ own;
    snprintf(own.text, sizeof(own.text), "%s.%s", gguf_archs[w->cfg.arch].name, key);
    return own;
}

static void gguf_pair_bool_(GgufWriter* w, const char* key, int value) {
    const char byte = value != 0;
    gguf_key_(w, key, GGUF_BOOL);
    gguf_put_bytes_(w, &byte, 1);
}

// Starts a list of `count` values, which follow.
static void gguf_list_(GgufWriter* w, const char* key, GgufType type, uint64_t count) {
    gguf_key_(w, key, GGUF_ARRAY);
    gguf_put_u32_(w, type);
    gguf_put_u64_(w, count);
}

// Writes the tokens. Those of the model that the tokenizer lacks are called [PAD50257] and so on.
static void gguf_put_tokens_(GgufWriter* w, const Bpe* bpe, int V) {
    gguf_list_(w, "tokenizer.ggml.tokens", GGUF_STRING, (uint64_t)V);
    for (int id = 0; id < V; id++) {
        TextBuffer buffer;
        text_buffer_open(&buffer, w->file.path);
        if (id < bpe->vocab_size) {
            bpe_print_token(bpe, id, buffer.file);
        } else {
            fprintf(buffer.file, "[PAD%d]", id);
        }
        char* text = text_buffer_close(&buffer);
        gguf_put_string_(w, text, buffer.bytes);
        free(text);
    }
}

static void gguf_put_merges_(GgufWriter* w, const Bpe* bpe) {
    TextBuffer buffer;
    uint64_t lines = 0;
    text_buffer_open(&buffer, w->file.path);
    bpe_print_merges(bpe, buffer.file);
    char* text = text_buffer_close(&buffer);
    for (size_t i = 0; i < buffer.bytes; i++) {
        lines += text[i] == '\n';
    }
    gguf_list_(w, "tokenizer.ggml.merges", GGUF_STRING, lines);
    for (size_t at = 0, length; at < buffer.bytes; at += length + 1) {
        length = (size_t)((const char*)memchr(text + at, '\n', buffer.bytes - at) - (text + at));
        gguf_put_string_(w, text + at, length);
    }
    free(text);
}

// Returns the token of unknown characters of SentencePiece's kind; -1: none.
static int gguf_unknown_(const Bpe* bpe) {
    return bpe->rules.pattern.style == BPE_SENTENCE ? bpe_find_added(bpe, "<unk>") : -1;
}

// Writes the tokens around texts and the template of chats. The file has two ends of a text: the
// document's, and the end of an answer or another one.
static void gguf_put_card_(GgufWriter* w, const Bpe* bpe, const ModelCard* card) {
    const int unknown = gguf_unknown_(bpe);
    int eos = 0;
    while (eos + 1 < card->num_ends && card->ends[eos] == card->turn_end) {
        eos++;
    }
    const int other = card->num_ends > 1 ? card->ends[eos == 0] : -1,
              eot = card->turn_end >= 0 ? card->turn_end : other;
    gguf_pair_u32_(w, "tokenizer.ggml.bos_token_id", card->start);
    gguf_pair_u32_(w, "tokenizer.ggml.eos_token_id", card->ends[eos]);
    gguf_pair_u32_(w, "tokenizer.ggml.unknown_token_id", unknown >= 0 ? unknown : card->start);
    if (eot >= 0) {
        gguf_pair_u32_(w, "tokenizer.ggml.eot_token_id", eot);
    }
    if (card->pad >= 0) {
        gguf_pair_u32_(w, "tokenizer.ggml.padding_token_id", card->pad);
    }
    if (card->chat_template) {
        gguf_pair_string_(w, "tokenizer.chat_template", card->chat_template);
    }
}

static uint32_t gguf_token_type_(const Bpe* bpe, int id, int unknown) {
    if (id >= bpe->vocab_size) {
        return SPM_UNUSED;
    }
    const BpeKind kind = bpe->tokens[id].kind;
    return id == unknown      ? SPM_UNKNOWN
           : kind == BPE_NAME ? SPM_CONTROL
           : kind == BPE_BYTE ? SPM_BYTE
           : kind == BPE_WORD ? SPM_USER
                              : SPM_NORMAL;
}

// Writes what SentencePiece's kind has beside its tokens.
static void gguf_put_sentence_(GgufWriter* w, const Bpe* bpe, int V) {
    float* scores = (float*)check_alloc((size_t)V + (size_t)bpe->vocab_size, sizeof(float), w->file.path);
    bpe_gguf_scores(bpe, scores);
    gguf_list_(w, "tokenizer.ggml.scores", GGUF_FLOAT, (uint64_t)V);
    gguf_put_bytes_(w, scores, (size_t)V * sizeof(float));
    gguf_pair_bool_(w, "tokenizer.ggml.add_space_prefix", bpe_puts_blank(bpe));
    gguf_pair_bool_(w, "tokenizer.ggml.remove_extra_whitespaces", 0);
    free(scores);
}

static void gguf_put_tokenizer_(GgufWriter* w, const Bpe* bpe, const ModelCard* card, GgufStart start,
                                int V) {
    if (!bpe) {
        gguf_pair_string_(w, "tokenizer.ggml.model", "no_vocab");
        gguf_pair_u32_(w, gguf_own_key_(w, "vocab_size").text, V);
        return;
    }
    const int is_sentence = bpe->rules.pattern.style == BPE_SENTENCE, unknown = gguf_unknown_(bpe);
    gguf_pair_string_(w, "tokenizer.ggml.model", is_sentence ? "llama" : "gpt2");
    gguf_pair_string_(w, "tokenizer.ggml.pre", bpe_gguf_pre(bpe));
    gguf_put_tokens_(w, bpe, V);
    if (is_sentence) {
        gguf_put_sentence_(w, bpe, V);
    }
    gguf_list_(w, "tokenizer.ggml.token_type", GGUF_I32, (uint64_t)V);
    for (int id = 0; id < V; id++) {
        gguf_put_u32_(w, gguf_token_type_(bpe, id, unknown));
    }
    if (!is_sentence) {
        gguf_put_merges_(w, bpe);
    }
    gguf_put_card_(w, bpe, card);
    gguf_pair_bool_(w, "tokenizer.ggml.add_bos_token", start == GGUF_START_TOKEN);
    gguf_pair_bool_(w, "tokenizer.ggml.add_eos_token", 0);
}

// Name of a model, or a description of its size.
typedef struct {
    char text[NAME_MAX + 1];
} GgufText_;

// Returns the last part of a path, without ".gguf"; bytes that are not UTF-8 become '?'.
static GgufText_ gguf_title_(const char* path) {
    static const char ending[] = ".gguf";
    GgufText_ name;
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/') {
        end--;
    }
    size_t begin = end;
    while (begin > 0 && path[begin - 1] != '/') {
        begin--;
    }
    const size_t length = end - begin, suffix = strlen(ending);
    const int is_file = length > suffix && strncmp(path + end - suffix, ending, suffix) == 0;
    snprintf(name.text, sizeof(name.text), "%.*s", (int)(is_file ? length - suffix : length), path + begin);
    for (size_t i = 0, used; name.text[i]; i += used ? used : 1) {
        used = json_utf8_length((const unsigned char*)name.text + i, strlen(name.text + i));
        name.text[i] = used ? name.text[i] : '?';
    }
    return name;
}

// Returns "124M" or "1.6B": at least two digits, as llama.cpp's converter rounds them.
static GgufText_ gguf_size_label_(double parameters) {
    GgufText_ label;
    const double unit = parameters > 1e12 ? 1e12 : parameters > 1e9 ? 1e9 : parameters > 1e6 ? 1e6 : 1e3;
    const double rounded = nearbyint(parameters / unit);
    const int decimals = rounded >= 10 ? 0 : rounded >= 1 ? 1 : 2;
    const char letter = unit == 1e12 ? 'T' : unit == 1e9 ? 'B' : unit == 1e6 ? 'M' : 'K';
    snprintf(label.text, sizeof(label.text), "%.*f%c", decimals, parameters / unit, letter);
    return label;
}

// Writes which layers have a window.
static void gguf_put_layers_(GgufWriter* w) {
    gguf_put_u32_(w, GGUF_BOOL);
    gguf_put_u64_(w, (uint64_t)w->cfg.L);
    for (int l = 0; l < w->cfg.L; l++) {
        const char slides = model_window(w->cfg, l) > 0;
        gguf_put_bytes_(w, &slides, 1);
    }
}

// Writes the numbers of a list.
static void gguf_put_wholes_(GgufWriter* w, const int* numbers, int count) {
    gguf_put_u32_(w, GGUF_U32);
    gguf_put_u64_(w, (uint64_t)count);
    for (int i = 0; i < count; i++) {
        gguf_put_u32_(w, (uint32_t)numbers[i]);
    }
}

// Writes the heads of keys of each layer.
static void gguf_put_keys_of_(GgufWriter* w, int keys) {
    int heads[MODEL_MAX_LAYERS];
    for (int l = 0; l < w->cfg.L; l++) {
        heads[l] = layer_is_in(w->cfg.mixed, l) ? 0 : keys;
    }
    gguf_put_wholes_(w, heads, w->cfg.L);
}

static GgufType gguf_key_type_(const GgufWriter* w, GgufKeyKind kind) {
    switch (kind) {
    case GGUF_WHOLE:
        return GGUF_U32;
    case GGUF_REAL:
        return GGUF_FLOAT;
    case GGUF_SWITCH:
        return GGUF_BOOL;
    case GGUF_SCALING:
        return GGUF_STRING;
    case GGUF_KEYS_OF:
        return gguf_archs[w->cfg.arch].mixed == GGUF_MIXED_KEYS ? GGUF_ARRAY : GGUF_U32;
    case GGUF_LAYERS:
    case GGUF_SECTIONS:
        break;
    }
    return GGUF_ARRAY;
}

static void gguf_put_value_(GgufWriter* w, const GgufKey* key, double value) {
    const GgufType type = gguf_key_type_(w, key->kind);
    const float real = (float)value;
    const char is_on = value != 0;
    gguf_key_(w, gguf_own_key_(w, key->key).text, type);
    switch (key->kind) {
    case GGUF_WHOLE:
        gguf_put_u32_(w, (uint32_t)value);
        break;
    case GGUF_REAL:
        gguf_put_bytes_(w, &real, sizeof(real));
        break;
    case GGUF_SWITCH:
        gguf_put_bytes_(w, &is_on, 1);
        break;
    case GGUF_SCALING: {
        const char* word = gguf_scaling_word((RopeScalingKind)value);
        gguf_put_string_(w, word, strlen(word));
        break;
    }
    case GGUF_LAYERS:
        gguf_put_layers_(w);
        break;
    case GGUF_KEYS_OF:
        if (type == GGUF_U32) {
            gguf_put_u32_(w, (uint32_t)value);
        } else {
            gguf_put_keys_of_(w, (int)value);
        }
        break;
    case GGUF_SECTIONS: {
        const int n = (int)value,
                  sections[] = {gguf_section(n, 0), gguf_section(n, 1), gguf_section(n, 2), 0};
        gguf_put_wholes_(w, sections, 4);
    }
    }
}

static void gguf_put_values_(GgufWriter* w) {
    const GgufValues values = gguf_values(w->cfg);
    for (const GgufKey* key = gguf_keys; key < gguf_keys + GGUF_KEYS; key++) {
        const double value = gguf_value(&values, key);
        if (value != 0 || key->always >> w->cfg.arch & 1) {
            gguf_put_value_(w, key, value);
        }
    }
}

// Returns 1 if llama.cpp opens a model of this name: for one with "phi3" or "phi-3" in it, it looks
// up four tokens of Phi 3, and ends if one is missing.
static int gguf_can_have_name_(const Bpe* bpe, const char* name) {
    static const char* const tokens[] = {"<unk>", "<s>", "</s>", "<|endoftext|>"};
    int can = 1;
    for (int i = 0; i < 4 && bpe && (strcasestr(name, "phi3") || strcasestr(name, "phi-3")); i++) {
        can &= bpe_find_added(bpe, tokens[i]) >= 0;
    }
    return can;
}

static void gguf_put_pairs_(GgufWriter* w, const GgufModel* model) {
    static const int file_types[4] = {0, 1, 32, 7};
    const ModelConfig cfg = model->cfg;
    gguf_pair_string_(w, "general.architecture", gguf_archs[cfg.arch].name);
    gguf_pair_string_(w, "general.type", "model");
    if (gguf_can_have_name_(model->bpe, gguf_title_(model->name).text)) {
        gguf_pair_string_(w, "general.name", gguf_title_(model->name).text);
    }
    gguf_pair_string_(w, "general.size_label", gguf_size_label_(model_count_parameters(cfg)).text);
    gguf_pair_u32_(w, "general.alignment", GGUF_ALIGN);
    gguf_pair_u32_(w, "general.file_type", file_types[model->dtype]);
    gguf_pair_u32_(w, "general.quantization_version", 2);
    gguf_put_values_(w);
    gguf_put_tokenizer_(w, model->bpe, &model->card, model->start, cfg.V);
}

// ---- tensors ----

static SafeTensorsDtype gguf_type_(const TensorRow* row, size_t cols, GgufDtype dtype) {
    if (row->kind == KIND_VECTOR || row->kind == KIND_FIXED || row->kind == KIND_ROUTER ||
        strcmp(row->name, "wpe") == 0 || dtype == GGUF_F32) {
        return SAFETENSORS_F32;
    }
    if (dtype == GGUF_Q8_0 && quantized_fits(cols)) {
        return SAFETENSORS_Q8_0;
    }
    return dtype == GGUF_BF16 ? SAFETENSORS_BF16 : SAFETENSORS_F16;
}

// Returns the type and shape of a tensor: (rows) or (rows, cols), and with experts or heads apart
// (experts, ...) or (heads, ...).
static SafeTensorsView gguf_view_(const GgufWriter* w, const FileTensor* tensor, const TensorRow* row) {
    const FileLines lines = file_tensor_lines(tensor, row, w->cfg, 0);
    const int is_vector = file_is_vector(row), is_by_head = file_tensor_is_by_head(tensor),
              has_stack = is_by_head || file_tensor_is_of_expert(tensor);
    SafeTensorsView view = {.dtype = gguf_type_(row, lines.width, w->dtype),
                            .ndim = 2 - is_vector + has_stack};
    const size_t stack = (size_t)(is_by_head ? w->cfg.NH : row->experts),
                 count = file_tensor_is_half(tensor) ? 2 * lines.count : lines.count,
                 shape[] = {stack, is_by_head ? count / stack : count, lines.width};
    memcpy(view.shape, shape + (has_stack ? 0 : 1), (size_t)view.ndim * sizeof(size_t));
    safetensors_set_sizes(&view);
    return view;
}

static SafeTensorsView gguf_factors_view_(ModelConfig cfg) {
    SafeTensorsView view = {.dtype = SAFETENSORS_F32, .ndim = 1, .shape = {(size_t)model_rope_dims(cfg) / 2}};
    safetensors_set_sizes(&view);
    return view;
}

// Returns the bytes of a tensor, including the gap before the next.
static size_t gguf_room_(const SafeTensorsView* view) {
    return (view->bytes + GGUF_ALIGN - 1) / GGUF_ALIGN * GGUF_ALIGN;
}

// Writes name, dimensions, the last first, type and place of the next tensor.
static void gguf_put_info_(GgufWriter* w, const char* name, const SafeTensorsView* view) {
    gguf_put_string_(w, name, strlen(name));
    gguf_put_u32_(w, (uint32_t)view->ndim);
    for (int i = view->ndim - 1; i >= 0; i--) {
        gguf_put_u64_(w, view->shape[i]);
    }
    gguf_put_u32_(w, (uint32_t)gguf_type_number(view->dtype));
    gguf_put_u64_(w, w->data);
    w->data += gguf_room_(view);
    w->tensors++;
}

// Returns for how many layers the file has a tensor. Gates are written with the queries.
static int gguf_layers_(const GgufWriter* w, const FileTensor* tensor, const TensorRow* rows) {
    const int is_written = tensor->form != FILE_GATES;
    return is_written ? file_tensor_layers(tensor, tensor->gguf_name, rows, w->cfg.arch) : 0;
}

static void gguf_put_infos_(GgufWriter* w, const TensorRow* rows) {
    const FileTensor* tensors = file_tensors();
    const SafeTensorsView factors = gguf_factors_view_(w->cfg);
    for (int i = 0; i < GGUF_FACTORS && gguf_factors_name(w->cfg.scaling.kind, i); i++) {
        gguf_put_info_(w, gguf_factors_name(w->cfg.scaling.kind, i), &factors);
    }
    for (const FileTensor* t = tensors; t < tensors + FILE_TENSOR_ROWS; t++) {
        const SafeTensorsView view = gguf_view_(w, t, &rows[t->row]);
        for (int n = 0; n < gguf_layers_(w, t, rows); n++) {
            const int l = tensor_layer(&rows[t->row], n);
            gguf_put_info_(w, file_tensor_name(t->gguf_name, l, 0).text, &view);
        }
    }
}

static void gguf_put_factors_(GgufWriter* w) {
    for (int i = 0; i < GGUF_FACTORS && gguf_factors_name(w->cfg.scaling.kind, i); i++) {
        for (int k = 0; k < model_rope_dims(w->cfg) / 2; k++) {
            const float factor = gguf_factor(w->cfg, i, k);
            gguf_put_bytes_(w, &factor, sizeof(factor));
        }
        gguf_pad_(w);
    }
}

// Converts a row of `cols` numbers into out.
static void gguf_convert_(unsigned char* out, const float* x, size_t cols, SafeTensorsDtype type) {
    if (type == SAFETENSORS_Q8_0) {
        quantized_encode((QuantizedBlock*)(void*)out, x, cols);
        return;
    }
    for (size_t i = 0; i < cols; i++) {
        const uint16_t bits = type == SAFETENSORS_BF16 ? bf16_from_float(x[i]) : fp16_from_float(x[i]);
        memcpy(out + 2 * i, &bits, sizeof(bits));
    }
}

// Ends the program if a finite number of a tensor, from element `first` on, would become infinite
// in the file.
static void gguf_check_(GgufWriter* w, const char* name, const float* x, size_t first, size_t count,
                        SafeTensorsDtype type) {
    const float limit = type == SAFETENSORS_F16    ? FP16_OVERFLOW
                        : type == SAFETENSORS_BF16 ? BF16_OVERFLOW
                        : type == SAFETENSORS_Q8_0 ? QUANTIZED_OVERFLOW
                                                   : INFINITY;
    const size_t bad = float16_find_beyond(x, count, limit);
    if (bad < count) {
        file_discard(&w->file);
        CHECK(0, "%s: tensor %s, element %zu is %g, wanted less than %g; --export-gguf-dtype %s works",
              w->file.path, name, first + bad, (double)x[bad], (double)limit,
              fabsf(x[bad]) < BF16_OVERFLOW ? "bf16" : "f32");
    }
}

// Sets `out` to line i of a tensor, of the lines `from` in memory. Norms have what the model adds
// to their weights: llama.cpp multiplies by the sum.
static void gguf_take_line_(const GgufWriter* w, const FileTensor* tensor, const TensorRow* row,
                            FileLines lines, size_t i, const float* from, float* out) {
    const ModelConfig cfg = w->cfg;
    const float offset = row->init == INIT_ONE ? model_norm_offset(cfg) : 0;
    const float* line = from + file_tensor_line(tensor, gguf_order(cfg), cfg, lines.count, i) * lines.width;
    for (size_t col = 0; col < lines.width; col++) {
        out[col] = tensor->form == FILE_VALUE_COLS  ? line[file_value_line(cfg, lines.width, col)]
                   : tensor->form == FILE_HEAD_KEYS ? from[file_key_element(cfg, i, col)]
                                                    : line[col];
    }
    out[0] = offset != 0 ? out[0] + offset : out[0]; // a norm's lines have one element
    out[0] = tensor->form == FILE_DECAY ? (float)-exp((double)out[0]) : out[0];
}

// Writes the lines of a tensor, or of an expert in it, from the parameter that holds them. A tensor
// of queries and gates has two parameters: it alternates between the rows of a head from each.
static void gguf_put_lines_(GgufWriter* w, const FileTensor* tensor, const char* name, int expert,
                            const TensorRow* rows, const float* group) {
    const TensorRow* row = &rows[tensor->row];
    const FileLines lines = file_tensor_lines(tensor, row, w->cfg, expert);
    const SafeTensorsDtype type = gguf_type_(row, lines.width, w->dtype);
    const size_t halves = 1 + (size_t)file_tensor_is_half(tensor), HS = (size_t)model_head_size(w->cfg),
                 turn = halves == 1 ? lines.count : HS;
    float* line = (float*)check_alloc(2 * lines.width, sizeof(float), w->file.path);
    unsigned char* bytes = (unsigned char*)(line + lines.width);
    for (size_t n = 0; n < halves * lines.count; n++) {
        const size_t h = n / turn % halves, i = n / turn / halves * turn + n % turn;
        const float* x = (const float*)tensor_in_group(&rows[tensor[h].row], group);
        gguf_take_line_(w, &tensor[h], row, lines, i, x + lines.first * lines.width, line);
        gguf_check_(w, name, line, n * lines.width, lines.width, type);
        if (type != SAFETENSORS_F32) {
            gguf_convert_(bytes, line, lines.width, type);
        }
        gguf_put_bytes_(w, type == SAFETENSORS_F32 ? (const void*)line : bytes,
                        safetensors_bytes(type, lines.width));
    }
    free(line);
}

// Writes a tensor, and zeros up to the next.
static void gguf_put_tensor_(GgufWriter* w, const FileTensor* tensor, const TensorRow* rows, int l,
                             const float* group) {
    const FileTensorName name = file_tensor_name(tensor->gguf_name, l, 0);
    for (int e = 0; e < rows[tensor->row].experts; e++) {
        gguf_put_lines_(w, tensor, name.text, e, rows, group);
    }
    gguf_pad_(w);
}

void gguf_create(GgufWriter* w, const char* path, const GgufModel* model) {
    const ModelConfig cfg = model->cfg;
    TensorRow rows[MODEL_PARAMETER_ROWS];
    char error[ERROR_BYTES];
    CHECK(gguf_check(cfg, error), "%s", error);
    memset(w, 0, sizeof(*w));
    w->cfg = cfg;
    w->dtype = model->dtype;
    model_parameter_rows_of(rows, cfg, sizeof(float));
    file_open(&w->file, path);
    gguf_put_bytes_(w, "GGUF", 4);
    gguf_put_u32_(w, 3);
    const size_t counts = w->at;
    gguf_put_u64_(w, 0); // tensors, pairs: set below
    gguf_put_u64_(w, 0);
    gguf_put_pairs_(w, model);
    gguf_put_infos_(w, rows);
    gguf_pad_(w);
    gguf_put_factors_(w);
    w->data = w->at;
    file_seek(&w->file, counts);
    file_put(&w->file, &w->tensors, sizeof(w->tensors));
    file_put(&w->file, &w->pairs, sizeof(w->pairs));
}

void gguf_put(GgufWriter* w, const TensorRow* rows, int g, const void* group) {
    const FileTensor* tensors = file_tensors();
    size_t begin = w->data; // of the tensor
    for (const FileTensor* t = tensors; t < tensors + FILE_TENSOR_ROWS; t++) {
        const TensorRow* row = &rows[t->row];
        const SafeTensorsView view = gguf_view_(w, t, row);
        assert(row->element_bytes == sizeof(float));
        for (int n = 0; n < gguf_layers_(w, t, rows); n++, begin += gguf_room_(&view)) {
            const int l = tensor_layer(row, n);
            if (tensor_group(row, l) == g) {
                w->at = begin;
                file_seek(&w->file, w->at);
                gguf_put_tensor_(w, t, rows, l, (const float*)group);
            }
        }
    }
}

void gguf_commit(GgufWriter* w) { file_commit(&w->file); }

#endif // GGUF_IMPLEMENTATION

#endif
