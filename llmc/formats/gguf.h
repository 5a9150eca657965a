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

llama.cpp does not know the windows of most models' layers, so the context in the file is the
window: up to there both are the same model.
*/
#ifndef LLMC_GGUF_H
#define LLMC_GGUF_H

#include "llmc/base/file.h"
#include "llmc/base/enum_words.h"
#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/model_card.h"
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
    uint64_t pairs;
    size_t data; // offset of the tensors
} GgufWriter;

// Returns 1 if llama.cpp computes such a model; if not, 0 and the reason in `error`.
int gguf_check(ModelConfig cfg, char* error);

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
#include "llmc/base/json.h"
#include "llmc/base/text_buffer.h"
#include "llmc/ops/q8.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/bpe_sentence.h"

enum { GGUF_ALIGN_ = 32 };

// Rotary positions of layers with a window: as in other layers; with a base of their own, or that
// of other layers, and never scaled.
typedef enum { GGUF_ROPE_SAME_, GGUF_ROPE_OWN_, GGUF_ROPE_UNSCALED_ } GgufWindowRope_;

// Architecture as llama.cpp knows it, and what its loader of it demands.
typedef struct {
    const char* name; // NULL: not at all
    HeadOrder order;
    int fills_channels; // 1: heads x head size are the channels
    int own_head;       // 1: output.weight must be in the file
    // scalings by factors of each pair, which are tensors: 1: llama3, 2: longrope; a sum
    int rope_factors;
    GgufWindowRope_ window_rope;
    int unrotated_every; // every n-th layer does not turn; 0: all do
    // every n-th layer has no window, the others have it; 0: it knows no windows
    int full_every;
    // only models of so many layers have them; 0: those with a window, -1: all
    int windows_from_layers;
} GgufArch_;

// clang-format off
static const GgufArch_ gguf_archs_[ARCH_COUNT] = {
    [ARCH_GPT2] =     {"gpt2",     ORDER_PAIRS,  1, 0, 0, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_LLAMA] =    {"llama",    ORDER_PAIRS,  0, 0, 3, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_MISTRAL] =  {"llama",    ORDER_PAIRS,  0, 0, 3, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_QWEN2] =    {"qwen2",    ORDER_HALVES, 1, 0, 0, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_QWEN3] =    {"qwen3",    ORDER_HALVES, 0, 0, 0, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_ARCEE] =    {"arcee",    ORDER_PAIRS,  0, 0, 1, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_NANOCHAT] = {NULL,       ORDER_PAIRS,  0, 0, 0, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_MIXTRAL] =  {"llama",    ORDER_PAIRS,  0, 0, 3, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_QWEN3MOE] = {"qwen3moe", ORDER_HALVES, 0, 0, 0, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_OLMOE] =    {"olmoe",    ORDER_HALVES, 1, 1, 0, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_GLM4MOE] =  {"glm4moe",  ORDER_HALVES, 0, 0, 0, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_OLMO2] =    {"olmo2",    ORDER_HALVES, 1, 1, 0, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_GEMMA2] =   {NULL,       ORDER_HALVES, 0, 0, 0, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_GRANITE] =  {"granite",  ORDER_PAIRS,  1, 0, 0, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_SMOLLM3] =  {"smollm3",  ORDER_PAIRS,  0, 0, 0, GGUF_ROPE_SAME_, 4, 0, 0},
    [ARCH_OLMO3] =    {"olmo2",    ORDER_HALVES, 1, 1, 0, GGUF_ROPE_UNSCALED_, 0, 4, 0},
    [ARCH_EXAONE4] =  {"exaone4",  ORDER_HALVES, 0, 0, 1, GGUF_ROPE_SAME_, 4, 4, 64},
    [ARCH_GRANITE4] = {"granite",  ORDER_PAIRS,  1, 0, 0, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_GEMMA3] =   {"gemma3",   ORDER_HALVES, 0, 0, 0, GGUF_ROPE_OWN_, 0, 6, -1},
    [ARCH_PHI3] =     {"phi3",     ORDER_HALVES, 1, 0, 2, GGUF_ROPE_SAME_, 0, 0, 0},
    [ARCH_GLM4] =     {"glm4",     ORDER_PAIRS,  1, 0, 0, GGUF_ROPE_SAME_, 0, 0, 0},
};
// clang-format on

// Returns n if in llama.cpp every n-th layer of such a model has no window and all others have it;
// 0: it computes the model without windows.
static int gguf_full_every_(ModelConfig cfg) {
    const GgufArch_* arch = &gguf_archs_[cfg.arch];
    const int from = arch->windows_from_layers,
              has_windows = from > 0 ? cfg.L == from : from < 0 || cfg.window > 0;
    return has_windows ? arch->full_every : 0;
}

// Returns 1 if llama.cpp has the model's windows, or knows none.
static int gguf_check_windows_(ModelConfig cfg, char* error) {
    const int every = gguf_full_every_(cfg);
    for (int l = 0; l < cfg.L && every > 0; l++) {
        const int slides = (l + 1) % every != 0;
        if ((model_window(cfg, l) > 0) != slides) {
            return error_set(error, "--export-gguf",
                             "in llama.cpp layer %d of %s with %d layers %s; --out DIR works", l,
                             gguf_archs_[cfg.arch].name, cfg.L, slides ? "has a window" : "has no window");
        }
    }
    return 1;
}

// Returns 1 if layers with a window have the rotary positions that llama.cpp gives them.
static int gguf_has_window_rope_(ModelConfig cfg) {
    const GgufWindowRope_ kind = gguf_archs_[cfg.arch].window_rope;
    const int has_own = cfg.window_rope_base > 0;
    const RopeScaling scaling = has_own ? cfg.window_scaling : cfg.scaling;
    const float base = has_own ? cfg.window_rope_base : model_rope_base(cfg);
    const int is_unscaled =
        scaling.kind == ROPE_PLAIN && (kind == GGUF_ROPE_OWN_ || base == model_rope_base(cfg));
    return cfg.window == 0 || (kind == GGUF_ROPE_SAME_ ? !has_own : is_unscaled);
}

// Returns 1 if llama.cpp has such rotary positions.
static int gguf_check_rope_(ModelConfig cfg, char* error) {
    const GgufArch_* arch = &gguf_archs_[cfg.arch];
    const RopeScaling scaling = cfg.scaling;
    const int wanted = scaling.kind == ROPE_LLAMA3 ? 1 : scaling.kind == ROPE_LONG ? 2 : 0;
    if ((arch->rope_factors & wanted) != wanted) {
        return error_set(error, "--export-gguf",
                         "llama.cpp's %s has no factors of rotary positions; --out DIR works", arch->name);
    }
    if (scaling.is_exact) {
        return error_set(error, "--export-gguf",
                         "llama.cpp rounds the ends of yarn, and this model does not (truncate is false); "
                         "--out DIR works");
    }
    if (!gguf_has_window_rope_(cfg)) {
        return error_set(error, "--export-gguf", "in llama.cpp %s of %s %s; --out DIR works",
                         arch->window_rope == GGUF_ROPE_OWN_ ? "layers" : "all layers", arch->name,
                         arch->window_rope == GGUF_ROPE_SAME_ ? "have the same rotary positions"
                         : arch->window_rope == GGUF_ROPE_OWN_
                             ? "with a window do not scale their positions"
                             : "have the same rotary base, and those with a "
                               "window do not scale it");
    }
    const int every = arch->windows_from_layers && gguf_full_every_(cfg) == 0 ? 0 : arch->unrotated_every;
    for (int l = 0; l < cfg.L; l++) {
        const int rests = every > 0 && (l + 1) % every == 0;
        if (layer_is_in(cfg.unrotated, l) != rests) {
            return error_set(error, "--export-gguf", "in llama.cpp layer %d of %s %s; --out DIR works", l,
                             arch->name, rests ? "has no rotary positions" : "has rotary positions");
        }
    }
    return 1;
}

// Returns the factor by which llama.cpp multiplies scores of a model; for its largest Gemma 3, of
// 62 layers, another one.
static float gguf_score_scale_(ModelConfig cfg) {
    const int is_large = cfg.arch == ARCH_GEMMA3 && cfg.L == 62;
    return 1 / sqrtf((float)(is_large ? cfg.C / cfg.NH : model_head_size(cfg)));
}

int gguf_check(ModelConfig cfg, char* error) {
    const GgufArch_* arch = &gguf_archs_[cfg.arch];
    const char* word = model_architecture(cfg.arch)->word;
    if (!arch->name) {
        return error_set(error, "--export-gguf", "llama.cpp has no %s; --out DIR works", word);
    }
    if (arch->fills_channels && model_heads(cfg) != cfg.C) {
        return error_set(
            error, "--export-gguf",
            "llama.cpp's %s has heads x head size = channels, not %d x %d of %d; wanted such a --head-size, "
            "or --out DIR, which works",
            word, cfg.NH, model_head_size(cfg), cfg.C);
    }
    if (cfg.expert_groups > 0) {
        return error_set(error, "--export-gguf", "%d groups of experts are not written; --out DIR works",
                         cfg.expert_groups);
    }
    const int has_scale = FAMILY_GRANITE >> cfg.arch & 1;
    const float own = gguf_score_scale_(cfg), scale = cfg.attention_scale > 0
                                                          ? cfg.attention_scale
                                                          : 1 / sqrtf((float)model_head_size(cfg));
    if ((scale != own && !has_scale) || cfg.attention_softcap > 0) {
        return error_set(error, "--export-gguf",
                         "llama.cpp's %s divides scores by %g, without a cap, not by %g with a cap of %g",
                         word, 1 / (double)own, 1 / (double)scale, (double)cfg.attention_softcap);
    }
    if (arch->own_head && !cfg.has_head) {
        return error_set(error, "--export-gguf",
                         "llama.cpp's %s has an output layer of its own; wanted --own-head on, or --out DIR, "
                         "which works",
                         word);
    }
    return gguf_check_windows_(cfg, error) && gguf_check_rope_(cfg, error);
}

enum {
    GGUF_U32_ = 4,
    GGUF_I32_ = 5,
    GGUF_FLOAT_ = 6,
    GGUF_BOOL_ = 7,
    GGUF_STRING_ = 8,
    GGUF_ARRAY_ = 9
}; // types of values

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
    static const char zeros[GGUF_ALIGN_] = {0};
    gguf_put_bytes_(w, zeros, (GGUF_ALIGN_ - w->at % GGUF_ALIGN_) % GGUF_ALIGN_);
}

// ---- pairs ----

static void gguf_key_(GgufWriter* w, const char* key, uint32_t type) {
    gguf_put_string_(w, key, strlen(key));
    gguf_put_u32_(w, type);
    w->pairs++;
}

static void gguf_pair_u32_(GgufWriter* w, const char* key, int value) {
    gguf_key_(w, key, GGUF_U32_);
    gguf_put_u32_(w, (uint32_t)value);
}

static void gguf_pair_string_(GgufWriter* w, const char* key, const char* value) {
    gguf_key_(w, key, GGUF_STRING_);
    gguf_put_string_(w, value, strlen(value));
}

// Key of the architecture: "llama.block_count".
typedef struct {
    char text[96];
} GgufKey_;

static GgufKey_ gguf_own_key_(const GgufWriter* w, const char* key) {
    GgufKey_ own;
    snprintf(own.text, sizeof(own.text), "%s.%s", gguf_archs_[w->cfg.arch].name, key);
    return own;
}

static void gguf_own_u32_(GgufWriter* w, const char* key, int value) {
    gguf_pair_u32_(w, gguf_own_key_(w, key).text, value);
}

static void gguf_own_float_(GgufWriter* w, const char* key, float value) {
    gguf_key_(w, gguf_own_key_(w, key).text, GGUF_FLOAT_);
    gguf_put_bytes_(w, &value, sizeof(value));
}

static void gguf_pair_bool_(GgufWriter* w, const char* key, int value) {
    const char byte = value != 0;
    gguf_key_(w, key, GGUF_BOOL_);
    gguf_put_bytes_(w, &byte, 1);
}

// Writes the lines of a text as an array.
static void gguf_pair_lines_(GgufWriter* w, const char* key, const char* text, size_t bytes) {
    uint64_t lines = 0;
    for (size_t i = 0; i < bytes; i++) {
        lines += text[i] == '\n';
    }
    gguf_key_(w, key, GGUF_ARRAY_);
    gguf_put_u32_(w, GGUF_STRING_);
    gguf_put_u64_(w, lines);
    for (size_t at = 0, length; at < bytes; at += length + 1) {
        length = (size_t)((const char*)memchr(text + at, '\n', bytes - at) - (text + at));
        gguf_put_string_(w, text + at, length);
    }
}

// Prints the tokens. Those of the model that the tokenizer lacks are called [PAD50257] and so on.
static void gguf_print_tokens_(const Bpe* bpe, int V, FILE* file) {
    bpe_print_tokens(bpe, V, file);
    for (int id = bpe->vocab_size; id < V; id++) {
        fprintf(file, "[PAD%d]\n", id);
    }
}

// Kinds of arrays of strings.
typedef enum { GGUF_TOKENS_, GGUF_MERGES_ } GgufLines_;

static void gguf_pair_tokenizer_(GgufWriter* w, GgufLines_ which, const Bpe* bpe, int V) {
    TextBuffer buffer;
    text_buffer_open(&buffer, w->file.path);
    if (which == GGUF_TOKENS_) {
        gguf_print_tokens_(bpe, V, buffer.file);
    } else {
        bpe_print_merges(bpe, buffer.file);
    }
    char* text = text_buffer_close(&buffer);
    gguf_pair_lines_(w, which == GGUF_TOKENS_ ? "tokenizer.ggml.tokens" : "tokenizer.ggml.merges", text,
                     buffer.bytes);
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

// Types of tokens.
enum { GGUF_NORMAL_ = 1, GGUF_UNKNOWN_, GGUF_CONTROL_, GGUF_USER_, GGUF_UNUSED_, GGUF_BYTE_ };

static uint32_t gguf_token_type_(const Bpe* bpe, int id, int unknown) {
    if (id >= bpe->vocab_size) {
        return GGUF_UNUSED_;
    }
    const BpeKind kind = bpe->tokens[id].kind;
    const int is_sentence = bpe->rules.pattern.style == BPE_SENTENCE;
    return id == unknown                     ? GGUF_UNKNOWN_
           : kind == BPE_NAME                ? GGUF_CONTROL_
           : kind == BPE_BYTE                ? GGUF_BYTE_
           : is_sentence && kind == BPE_WORD ? GGUF_USER_
                                             : GGUF_NORMAL_;
}

// Writes the tokens of SentencePiece's kind, which may have any characters, and their scores.
static void gguf_put_sentence_(GgufWriter* w, const Bpe* bpe, int V) {
    float* scores = (float*)check_alloc((size_t)V + (size_t)bpe->vocab_size, sizeof(float), w->file.path);
    bpe_gguf_scores(bpe, scores);
    gguf_key_(w, "tokenizer.ggml.tokens", GGUF_ARRAY_);
    gguf_put_u32_(w, GGUF_STRING_);
    gguf_put_u64_(w, (uint64_t)V);
    for (int id = 0; id < V; id++) {
        TextBuffer buffer;
        text_buffer_open(&buffer, w->file.path);
        if (id < bpe->vocab_size) {
            bpe_print_sentence_token(bpe->tokens[id], buffer.file);
        } else {
            fprintf(buffer.file, "[PAD%d]", id);
        }
        char* text = text_buffer_close(&buffer);
        gguf_put_string_(w, text, buffer.bytes);
        free(text);
    }
    gguf_key_(w, "tokenizer.ggml.scores", GGUF_ARRAY_);
    gguf_put_u32_(w, GGUF_FLOAT_);
    gguf_put_u64_(w, (uint64_t)V);
    gguf_put_bytes_(w, scores, (size_t)V * sizeof(float));
    gguf_pair_bool_(w, "tokenizer.ggml.add_space_prefix", bpe_puts_blank(bpe));
    gguf_pair_bool_(w, "tokenizer.ggml.remove_extra_whitespaces", 0);
    free(scores);
}

static void gguf_put_tokenizer_(GgufWriter* w, const Bpe* bpe, const ModelCard* card, GgufStart start,
                                int V) {
    if (!bpe) {
        gguf_pair_string_(w, "tokenizer.ggml.model", "no_vocab");
        gguf_own_u32_(w, "vocab_size", V);
        return;
    }
    const int is_sentence = bpe->rules.pattern.style == BPE_SENTENCE, unknown = gguf_unknown_(bpe);
    gguf_pair_string_(w, "tokenizer.ggml.model", is_sentence ? "llama" : "gpt2");
    gguf_pair_string_(w, "tokenizer.ggml.pre", bpe_gguf_pre(bpe));
    if (is_sentence) {
        gguf_put_sentence_(w, bpe, V);
    } else {
        gguf_pair_tokenizer_(w, GGUF_TOKENS_, bpe, V);
    }
    gguf_key_(w, "tokenizer.ggml.token_type", GGUF_ARRAY_);
    gguf_put_u32_(w, GGUF_I32_);
    gguf_put_u64_(w, (uint64_t)V);
    for (int id = 0; id < V; id++) {
        gguf_put_u32_(w, gguf_token_type_(bpe, id, unknown));
    }
    if (!is_sentence) {
        gguf_pair_tokenizer_(w, GGUF_MERGES_, bpe, V);
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

// Returns the longest text for which the model is what llama.cpp computes: up to the window, if it
// knows none.
static int gguf_context_(ModelConfig cfg) {
    const int is_cut = cfg.window > 0 && gguf_full_every_(cfg) == 0;
    return is_cut && cfg.window < cfg.max_T ? cfg.window : cfg.max_T;
}

// Writes the window, and the layers that have it.
static void gguf_put_windows_(GgufWriter* w, ModelConfig cfg) {
    if (gguf_full_every_(cfg) > 0 || FAMILY_PHI3 >> cfg.arch & 1) { // Phi's is not used
        gguf_own_u32_(w, "attention.sliding_window", cfg.window);
    }
    if (gguf_full_every_(cfg) == 0) {
        return;
    }
    gguf_key_(w, gguf_own_key_(w, "attention.sliding_window_pattern").text, GGUF_ARRAY_);
    gguf_put_u32_(w, GGUF_BOOL_);
    gguf_put_u64_(w, (uint64_t)cfg.L);
    for (int l = 0; l < cfg.L; l++) {
        const char slides = model_window(cfg, l) > 0;
        gguf_put_bytes_(w, &slides, 1);
    }
}

// Writes a scaling of rotary positions; llama3's is a tensor. llama.cpp multiplies yarn's attention
// factor by 1 + ln(factor) / 10.
static void gguf_put_scaling_(GgufWriter* w, RopeScaling scaling) {
    static const char* const types[ROPE_KINDS] = {
        [ROPE_LINEAR] = "linear", [ROPE_YARN] = "yarn", [ROPE_LONG] = "longrope"};
    if (!types[scaling.kind]) {
        return;
    }
    gguf_pair_string_(w, gguf_own_key_(w, "rope.scaling.type").text, types[scaling.kind]);
    if (scaling.kind != ROPE_LONG) {
        gguf_own_float_(w, "rope.scaling.factor", scaling.factor);
    }
    if (scaling.kind >= ROPE_YARN) {
        const double own = scaling.kind == ROPE_YARN ? 1 + 0.1 * log(scaling.factor) : 1;
        gguf_own_u32_(w, "rope.scaling.original_context_length", scaling.original_context);
        gguf_own_float_(w, "rope.scaling.attn_factor", (float)(rope_attention(scaling) / own));
    }
    if (scaling.kind == ROPE_YARN) {
        gguf_own_float_(w, "rope.scaling.yarn_beta_fast", scaling.high_freq_factor);
        gguf_own_float_(w, "rope.scaling.yarn_beta_slow", scaling.low_freq_factor);
    }
}

static void gguf_put_heads_(GgufWriter* w, ModelConfig cfg) {
    gguf_own_u32_(w, "attention.head_count_kv", model_key_heads(cfg));
    gguf_own_u32_(w, "attention.key_length", model_head_size(cfg));
    gguf_own_u32_(w, "attention.value_length", model_head_size(cfg));
    gguf_own_u32_(w, "rope.dimension_count", model_rope_dims(cfg));
    gguf_own_float_(w, "rope.freq_base", model_rope_base(cfg));
    if (gguf_archs_[cfg.arch].window_rope == GGUF_ROPE_OWN_) {
        gguf_own_float_(w, "rope.freq_base_swa",
                        cfg.window_rope_base > 0 ? cfg.window_rope_base : model_rope_base(cfg));
    }
    gguf_put_scaling_(w, cfg.scaling);
    gguf_put_windows_(w, cfg);
}

static void gguf_own_bool_(GgufWriter* w, const char* key, int value) {
    gguf_pair_bool_(w, gguf_own_key_(w, key).text, value);
}

// Writes how experts are chosen: by softmax (1) or sigmoid (2), and whether their weights are
// divided by the sum.
static void gguf_put_experts_(GgufWriter* w, ModelConfig cfg) {
    const RouterKind router = model_architecture(cfg.arch)->router;
    gguf_own_u32_(w, "expert_count", cfg.E);
    gguf_own_u32_(w, "expert_used_count", cfg.E_used);
    gguf_own_u32_(w, "expert_feed_forward_length", model_expert_hidden(cfg));
    gguf_own_u32_(w, "expert_gating_func", router == ROUTER_SIGMOID ? 2 : 1);
    gguf_own_bool_(w, "expert_weights_norm", router != ROUTER_SOFTMAX);
    if (router == ROUTER_SIGMOID) {
        gguf_own_float_(w, "expert_weights_scale", model_router_factor(cfg));
    }
    if (cfg.Fs > 0) {
        gguf_own_u32_(w, "expert_shared_count", cfg.Fs / model_expert_hidden(cfg));
        gguf_own_u32_(w, "leading_dense_block_count", cfg.dense_layers);
    }
}

static void gguf_put_sizes_(GgufWriter* w, ModelConfig cfg) {
    const Architecture* kinds = model_architecture(cfg.arch);
    gguf_own_u32_(w, "context_length", gguf_context_(cfg));
    gguf_own_u32_(w, "embedding_length", cfg.C);
    gguf_own_u32_(w, "block_count", cfg.L);
    gguf_own_u32_(w, "feed_forward_length", model_hidden(cfg));
    gguf_own_u32_(w, "attention.head_count", cfg.NH);
    gguf_own_float_(
        w, kinds->norm == NORM_LAYER ? "attention.layer_norm_epsilon" : "attention.layer_norm_rms_epsilon",
        model_norm_eps(cfg));
    if (kinds->positions == POSITIONS_ROPE) {
        gguf_put_heads_(w, cfg);
    }
    if (kinds->router != ROUTER_NONE) {
        gguf_put_experts_(w, cfg);
    }
    if (FAMILY_GRANITE >> cfg.arch & 1) { // all four must be there
        gguf_own_float_(w, "attention.scale",
                        cfg.attention_scale > 0 ? cfg.attention_scale
                                                : 1 / sqrtf((float)model_head_size(cfg)));
        gguf_own_float_(w, "embedding_scale", model_embedding_factor(cfg));
        gguf_own_float_(w, "residual_scale", model_residual_factor(cfg));
        gguf_own_float_(w, "logit_scale", cfg.logits_divisor > 0 ? cfg.logits_divisor : 1);
    }
}

static void gguf_put_pairs_(GgufWriter* w, const GgufModel* model) {
    static const int file_types[4] = {0, 1, 32, 7};
    const ModelConfig cfg = model->cfg;
    gguf_pair_string_(w, "general.architecture", gguf_archs_[cfg.arch].name);
    gguf_pair_string_(w, "general.type", "model");
    gguf_pair_string_(w, "general.name", gguf_title_(model->name).text);
    gguf_pair_string_(w, "general.size_label", gguf_size_label_(model_count_parameters(cfg)).text);
    gguf_pair_u32_(w, "general.alignment", GGUF_ALIGN_);
    gguf_pair_u32_(w, "general.file_type", file_types[model->dtype]);
    gguf_pair_u32_(w, "general.quantization_version", 2);
    gguf_put_sizes_(w, cfg);
    gguf_put_tokenizer_(w, model->bpe, &model->card, model->start, cfg.V);
}

// ---- tensors ----

// Tensor types, as GGUF numbers them.
enum { GGUF_TYPE_F32_ = 0, GGUF_TYPE_F16_ = 1, GGUF_TYPE_Q8_0_ = 8, GGUF_TYPE_BF16_ = 30 };

static uint32_t gguf_type_(const TensorRow* row, GgufDtype dtype) {
    if (file_is_vector(row) || row->kind == KIND_ROUTER || strcmp(row->name, "wpe") == 0 ||
        dtype == GGUF_F32) {
        return GGUF_TYPE_F32_;
    }
    if (dtype == GGUF_Q8_0 && quantized_fits(row->cols)) {
        return GGUF_TYPE_Q8_0_;
    }
    return dtype == GGUF_BF16 ? GGUF_TYPE_BF16_ : GGUF_TYPE_F16_;
}

// Returns the bytes of a row of `cols` numbers.
static size_t gguf_row_bytes_(uint32_t type, size_t cols) {
    return type == GGUF_TYPE_F32_    ? 4 * cols
           : type == GGUF_TYPE_Q8_0_ ? cols / QUANTIZED_BLOCK * sizeof(QuantizedBlock)
                                     : 2 * cols;
}

// Shape of a tensor: (rows), (rows, cols), or (experts, rows, cols).
typedef struct {
    int ndim;
    size_t experts, rows, cols;
} GgufShape_;

static GgufShape_ gguf_shape_(const FileTensor* tensor, const TensorRow* row, ModelConfig cfg) {
    const FileLines lines = file_tensor_lines(tensor, row, cfg, 0);
    const int ndim = file_is_vector(row) ? 1 : file_tensor_is_of_expert(tensor) ? 3 : 2;
    return (GgufShape_){ndim, (size_t)row->experts, lines.count, lines.width};
}

// Returns the bytes of a tensor, including the gap before the next.
static size_t gguf_tensor_bytes_(GgufShape_ shape, uint32_t type) {
    const size_t bytes = shape.experts * shape.rows * gguf_row_bytes_(type, shape.cols);
    return (bytes + GGUF_ALIGN_ - 1) / GGUF_ALIGN_ * GGUF_ALIGN_;
}

// Writes name, dimensions, the last first, type and place of a tensor.
static void gguf_put_info_(GgufWriter* w, const char* name, GgufShape_ shape, uint32_t type, size_t offset) {
    gguf_put_string_(w, name, strlen(name));
    gguf_put_u32_(w, (uint32_t)shape.ndim);
    if (shape.ndim > 1) {
        gguf_put_u64_(w, shape.cols);
    }
    gguf_put_u64_(w, shape.rows);
    if (shape.ndim > 2) {
        gguf_put_u64_(w, shape.experts);
    }
    gguf_put_u32_(w, type);
    gguf_put_u64_(w, offset);
}

// ---- factors of rotary positions ----

// Tensors of such factors: those of llama3; or of longrope, far and near.
enum { GGUF_FACTORS_ = 2 };

typedef struct {
    const char* name; // NULL: no such tensor
    GgufShape_ shape;
} GgufFactors_;

static GgufFactors_ gguf_factors_(ModelConfig cfg, int i) {
    static const char* const names[ROPE_KINDS][GGUF_FACTORS_] = {
        [ROPE_LLAMA3] = {"rope_freqs.weight"},
        [ROPE_LONG] = {"rope_factors_long.weight", "rope_factors_short.weight"}};
    return (GgufFactors_){names[cfg.scaling.kind][i], {1, 1, (size_t)model_rope_dims(cfg) / 2, 1}};
}

// Returns the number by which the frequency of pair k is divided.
static float gguf_factor_(ModelConfig cfg, int i, int k) {
    const RopeScaling none = {.kind = ROPE_PLAIN};
    if (cfg.scaling.kind == ROPE_LONG) {
        return (i == 0 ? cfg.rope_factors.far : cfg.rope_factors.near)[k];
    }
    RopeSettings s = {0, model_head_size(cfg), model_rope_dims(cfg), model_rope_base(cfg), none, NULL};
    const float plain = rope_frequency(s, k, 0);
    s.scaling = cfg.scaling;
    return plain / rope_frequency(s, k, 0);
}

static void gguf_put_factors_(GgufWriter* w) {
    for (int i = 0; i < GGUF_FACTORS_; i++) {
        const GgufFactors_ factors = gguf_factors_(w->cfg, i);
        for (int k = 0; k < (int)factors.shape.rows && factors.name; k++) {
            const float factor = gguf_factor_(w->cfg, i, k);
            gguf_put_bytes_(w, &factor, sizeof(factor));
        }
        gguf_pad_(w);
    }
}

// ---- all tensors ----

static void gguf_put_infos_(GgufWriter* w, const TensorRow* rows) {
    const FileTensor* tensors = file_tensors();
    size_t offset = 0;
    for (int i = 0; i < GGUF_FACTORS_; i++) {
        const GgufFactors_ factors = gguf_factors_(w->cfg, i);
        if (factors.name) {
            gguf_put_info_(w, factors.name, factors.shape, GGUF_TYPE_F32_, offset);
            offset += gguf_tensor_bytes_(factors.shape, GGUF_TYPE_F32_);
        }
    }
    for (const FileTensor* t = tensors; t < tensors + FILE_TENSOR_ROWS; t++) {
        const TensorRow* row = &rows[t->row];
        const GgufShape_ shape = gguf_shape_(t, row, w->cfg);
        for (int n = 0; n < file_tensor_layers(t, t->gguf_name, rows, w->cfg.arch); n++) {
            const int l = tensor_layer(row, n);
            gguf_put_info_(w, file_tensor_name(t->gguf_name, l, 0).text, shape, gguf_type_(row, w->dtype),
                           offset);
            offset += gguf_tensor_bytes_(shape, gguf_type_(row, w->dtype));
        }
    }
}

// Converts a row of `cols` numbers into out.
static void gguf_convert_(unsigned char* out, const float* x, size_t cols, uint32_t type) {
    if (type == GGUF_TYPE_Q8_0_) {
        quantized_encode((QuantizedBlock*)(void*)out, x, cols);
        return;
    }
    for (size_t i = 0; i < cols; i++) {
        const uint16_t bits = type == GGUF_TYPE_BF16_ ? bf16_from_float(x[i]) : fp16_from_float(x[i]);
        memcpy(out + 2 * i, &bits, sizeof(bits));
    }
}

// Ends the program if a finite number of a tensor would become infinite in the file.
static void gguf_check_(GgufWriter* w, const char* name, const float* x, size_t count, uint32_t type) {
    const float limit = type == GGUF_TYPE_F16_    ? FP16_OVERFLOW
                        : type == GGUF_TYPE_BF16_ ? BF16_OVERFLOW
                        : type == GGUF_TYPE_Q8_0_ ? QUANTIZED_OVERFLOW
                                                  : INFINITY;
    const size_t bad = float16_find_beyond(x, count, limit);
    if (bad < count) {
        file_discard(&w->file);
        CHECK(0, "%s: tensor %s, element %zu is %g, wanted less than %g; --export-gguf-dtype %s works",
              w->file.path, name, bad, (double)x[bad], (double)limit,
              fabsf(x[bad]) < BF16_OVERFLOW ? "bf16" : "f32");
    }
}

// Writes the lines of a tensor, or of an expert in it, from the parameter that holds them.
static void gguf_put_lines_(GgufWriter* w, const FileTensor* tensor, const char* name, FileLines lines,
                            uint32_t type, const float* parameter) {
    const float* x = parameter + lines.first * lines.width;
    gguf_check_(w, name, x, lines.count * lines.width, type);
    unsigned char* buffer = (unsigned char*)check_alloc(lines.width, sizeof(float), w->file.path);
    for (size_t i = 0; i < lines.count; i++) {
        const float* from =
            x + file_tensor_line(tensor, gguf_archs_[w->cfg.arch].order, w->cfg, i) * lines.width;
        if (type != GGUF_TYPE_F32_) {
            gguf_convert_(buffer, from, lines.width, type);
        }
        gguf_put_bytes_(w, type == GGUF_TYPE_F32_ ? (const void*)from : buffer,
                        gguf_row_bytes_(type, lines.width));
    }
    free(buffer);
}

// Writes weights of a norm with what the model adds to each: llama.cpp multiplies by them.
static void gguf_put_norm_(GgufWriter* w, const FileTensor* tensor, const char* name, const TensorRow* row,
                           const float* parameter) {
    float* sums = (float*)check_alloc(row->cols, sizeof(float), w->file.path);
    for (size_t i = 0; i < row->cols; i++) {
        sums[i] = parameter[i] + model_norm_offset(w->cfg);
    }
    gguf_put_lines_(w, tensor, name, file_tensor_lines(tensor, row, w->cfg, 0), GGUF_TYPE_F32_, sums);
    free(sums);
}

// Writes a tensor, and zeros up to the next.
static void gguf_put_tensor_(GgufWriter* w, const FileTensor* tensor, const TensorRow* row, int l,
                             const float* parameter) {
    const FileTensorName name = file_tensor_name(tensor->gguf_name, l, 0);
    const int is_norm = row->init == INIT_ONE;
    if (is_norm) {
        gguf_put_norm_(w, tensor, name.text, row, parameter);
    }
    for (int e = 0; e < row->experts && !is_norm; e++) {
        gguf_put_lines_(w, tensor, name.text, file_tensor_lines(tensor, row, w->cfg, e),
                        gguf_type_(row, w->dtype), parameter);
    }
    gguf_pad_(w);
}

static uint64_t gguf_count_tensors_(ModelConfig cfg, const TensorRow* rows) {
    const FileTensor* tensors = file_tensors();
    uint64_t count = 0;
    for (int i = 0; i < GGUF_FACTORS_; i++) {
        count += gguf_factors_(cfg, i).name != NULL;
    }
    for (const FileTensor* t = tensors; t < tensors + FILE_TENSOR_ROWS; t++) {
        count += (uint64_t)file_tensor_layers(t, t->gguf_name, rows, cfg.arch);
    }
    return count;
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
    gguf_put_u64_(w, gguf_count_tensors_(cfg, rows));
    const size_t count = w->at;
    gguf_put_u64_(w, 0); // pairs: set below
    gguf_put_pairs_(w, model);
    gguf_put_infos_(w, rows);
    gguf_pad_(w);
    gguf_put_factors_(w);
    w->data = w->at;
    file_seek(&w->file, count);
    file_put(&w->file, &w->pairs, sizeof(w->pairs));
}

void gguf_put(GgufWriter* w, const TensorRow* rows, int g, const void* group) {
    const FileTensor* tensors = file_tensors();
    size_t begin = w->data; // of the tensor
    for (const FileTensor* t = tensors; t < tensors + FILE_TENSOR_ROWS; t++) {
        const TensorRow* row = &rows[t->row];
        const size_t bytes = gguf_tensor_bytes_(gguf_shape_(t, row, w->cfg), gguf_type_(row, w->dtype));
        assert(row->element_bytes == sizeof(float));
        for (int n = 0; n < file_tensor_layers(t, t->gguf_name, rows, w->cfg.arch); n++, begin += bytes) {
            const int l = tensor_layer(row, n);
            if (tensor_group(row, l) == g) {
                w->at = begin;
                file_seek(&w->file, w->at);
                gguf_put_tensor_(w, t, row, l, (const float*)tensor_in_group(row, group));
            }
        }
    }
}

void gguf_commit(GgufWriter* w) { file_commit(&w->file); }

#endif // GGUF_IMPLEMENTATION

#endif
