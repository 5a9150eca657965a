/*
model.h -- the description of the model: its sizes, its names, and every tensor it has, each in one row of a
table.

Parameters and activations are two lists (X-macros). The structs of pointers, the memory, the initialization, the update,
the decay, the optimizer's state (optimizer.h), the files, the tests and the memory report are loops over their rows;
nothing else in the program lists the tensors.

    B  sequences in a micro-batch     T   tokens of a sequence     N = B*T
    C  channels                       NH  heads                    HS = their size, C/NH
    F  hidden size of the MLP, 4C     QKV size of queries, keys and values together, 3C
    L  layers (blocks)                V   vocabulary               Vp = V rounded up to a multiple of 128

Layers may have the same parameters (--share-layers): then there are fewer blocks of parameters than layers, or parameters of
all layers lie outside of the blocks.

GPT-2: Radford et al., "Language models are unsupervised multitask learners", 2019; pre-norm blocks, learned
positions, GELU in tanh form, the token embedding shared with the classifier.
*/
#ifndef LLMC_MODEL_H
#define LLMC_MODEL_H

#include <assert.h>
#include <math.h>
#include <stddef.h>

#include "llmc/base/check.h"
#include "llmc/base/rand.h"
#include "llmc/base/enum_words.h"

#ifndef floatX
#define floatX float
#endif

// Which layers have the same parameters: none; their attention, or their MLP, with the norm before it; two in a row; or a
// loop of blocks is repeated. Memory has a copy of each, and files have every layer (share_layers.h).
typedef enum { SHARE_OFF, SHARE_ATTENTION, SHARE_MLP, SHARE_PAIRS, SHARE_LOOP } ShareLayers;

typedef struct {
    int max_T; // context: the longest sequence, the rows of wpe
    int V, Vp;
    int L, NH, C;
    int share; // SHARE_...; of a loop SHARE_LOOP + its blocks
} ModelConfig;

enum { MODEL_MAX_LAYERS = 1000 };

// Blocks of parameters in memory, copy 0 and on; and layers in a row that have the same one.
static inline int model_copies(ModelConfig cfg) {
    return cfg.share == SHARE_PAIRS ? cfg.L / 2 : cfg.share >= SHARE_LOOP ? cfg.share - SHARE_LOOP : cfg.L;
}
static inline int model_copy_repeats(ModelConfig cfg) { return cfg.share == SHARE_PAIRS ? 2 : 1; }

// The copy that layer l has.
static inline int model_copy(ModelConfig cfg, int l) {
    return l / model_copy_repeats(cfg) % model_copies(cfg);
}

static inline int model_hidden(ModelConfig cfg) { return 4 * cfg.C; }
static inline int model_qkv_size(ModelConfig cfg) { return 3 * cfg.C; }
static inline int model_head_size(ModelConfig cfg) { return cfg.C / cfg.NH; }

typedef enum {
    INIT_ZERO,
    INIT_ONE,
    INIT_NORMAL,       // N(0, std), std = 0.02, more in narrow models (model_initial_std_)
    INIT_VOCAB,        // the same for the V rows of the vocabulary, zero for its padding
    INIT_NORMAL_SCALED // N(0, std / sqrt(2L)): projections into the residual stream, which adds up 2L of them
} TensorInit;

// What a parameter is: optimizers have rules for each kind (optimizer.h).
typedef enum {
    KIND_MATRIX,    // of a product
    KIND_EMBEDDING, // a table of rows; wte is the classifier's matrix, too
    KIND_VECTOR,    // a bias, or of a norm
    TENSOR_KINDS
} TensorKind;

// Where the model has a parameter: outside of the blocks, or in the attention or the MLP of each, with the norm before it.
typedef enum { PART_OUTSIDE, PART_ATTENTION, PART_MLP } TensorPart;

// Where memory has it: once, or in each block of parameters.
typedef enum { PLACE_ONCE, PLACE_BLOCK } TensorPlace;

static inline TensorPlace model_place(ModelConfig cfg, TensorPart part) {
    const int is_shared = (cfg.share == SHARE_ATTENTION && part == PART_ATTENTION) ||
                          (cfg.share == SHARE_MLP && part == PART_MLP);
    return part == PART_OUTSIDE || is_shared ? PLACE_ONCE : PLACE_BLOCK;
}

typedef enum { LIVE_ALWAYS, LIVE_BLOCK, LIVE_CLASSIFIER } TensorLife;

typedef enum {
    FILE_VECTOR, // (cols)
    FILE_TABLE,  // (rows, cols); of the vocabulary, only the rows that have a token
    FILE_CONV1D  // (cols, rows): GPT-2's code computes x W, ours x W^T
} TensorInFiles;

// clang-format off
// Levels of --recompute and their words: what the backward pass computes again instead of keeping it, each with all before.
#define RECOMPUTE_WORDS(X) \
    X(RECOMPUTE_NONE, "0") \
    X(RECOMPUTE_GELU, "1")  /* GELU */ \
    X(RECOMPUTE_NORMS, "2") /* and both norms of a block */ \
    X(RECOMPUTE_MLP, "mlp") /* and the product before GELU */ \
    X(RECOMPUTE_BLOCK, "3") /* and the rest of it: only the residual stream between blocks is kept */
typedef enum {
    RECOMPUTE_WORDS(WORDS_VALUE)
    RECOMPUTE_NEVER // generation: no backward pass, so nothing is kept for it; but keys and values of all layers are
} RecomputeLevel;

// Parameters, in the order of llm.c's model files: `rows` x `cols`, in a part of the model (PART_...); a vector is one row.
// Matrices are (out, in). Padding rows of wte (V ... Vp-1) are zero. %d in a name is the layer. `kind` (KIND_...) decides
// how an update changes it, and `decay` whether weight decay does, too. `in files` says how Hugging Face stores a layer of it, and
// under which name; GGUF's names come last.
//  name        part       rows        cols      init                 decay  kind       in files      Hugging Face name             GGUF name
#define MODEL_PARAMETERS(X) \
  X(wte,        OUTSIDE,   cfg.Vp,     cfg.C,    INIT_VOCAB,          1,     EMBEDDING, FILE_TABLE,   "wte.weight",                 "token_embd.weight")   /* token embedding = classifier weight */ \
  X(wpe,        OUTSIDE,   cfg.max_T,  cfg.C,    INIT_NORMAL,         1,     EMBEDDING, FILE_TABLE,   "wpe.weight",                 "position_embd.weight") /* position embedding */ \
  X(ln1w,       ATTENTION, 1,          cfg.C,    INIT_ONE,            0,     VECTOR,    FILE_VECTOR,  "h.%d.ln_1.weight",           "blk.%d.attn_norm.weight") /* norm before attention */ \
  X(ln1b,       ATTENTION, 1,          cfg.C,    INIT_ZERO,           0,     VECTOR,    FILE_VECTOR,  "h.%d.ln_1.bias",             "blk.%d.attn_norm.bias") \
  X(qkvw,       ATTENTION, QKV,        cfg.C,    INIT_NORMAL,         1,     MATRIX,    FILE_CONV1D,  "h.%d.attn.c_attn.weight",    "blk.%d.attn_qkv.weight") /* queries, keys, values */ \
  X(qkvb,       ATTENTION, 1,          QKV,      INIT_ZERO,           0,     VECTOR,    FILE_VECTOR,  "h.%d.attn.c_attn.bias",      "blk.%d.attn_qkv.bias") \
  X(attprojw,   ATTENTION, cfg.C,      cfg.C,    INIT_NORMAL_SCALED,  1,     MATRIX,    FILE_CONV1D,  "h.%d.attn.c_proj.weight",    "blk.%d.attn_output.weight") /* into the residual stream */ \
  X(attprojb,   ATTENTION, 1,          cfg.C,    INIT_ZERO,           0,     VECTOR,    FILE_VECTOR,  "h.%d.attn.c_proj.bias",      "blk.%d.attn_output.bias") \
  X(ln2w,       MLP,       1,          cfg.C,    INIT_ONE,            0,     VECTOR,    FILE_VECTOR,  "h.%d.ln_2.weight",           "blk.%d.ffn_norm.weight") /* norm before the MLP */ \
  X(ln2b,       MLP,       1,          cfg.C,    INIT_ZERO,           0,     VECTOR,    FILE_VECTOR,  "h.%d.ln_2.bias",             "blk.%d.ffn_norm.bias") \
  X(fcw,        MLP,       F,          cfg.C,    INIT_NORMAL,         1,     MATRIX,    FILE_CONV1D,  "h.%d.mlp.c_fc.weight",       "blk.%d.ffn_up.weight") /* into the MLP's hidden layer */ \
  X(fcb,        MLP,       1,          F,        INIT_ZERO,           0,     VECTOR,    FILE_VECTOR,  "h.%d.mlp.c_fc.bias",         "blk.%d.ffn_up.bias") \
  X(fcprojw,    MLP,       cfg.C,      F,        INIT_NORMAL_SCALED,  1,     MATRIX,    FILE_CONV1D,  "h.%d.mlp.c_proj.weight",     "blk.%d.ffn_down.weight") /* into the residual stream */ \
  X(fcprojb,    MLP,       1,          cfg.C,    INIT_ZERO,           0,     VECTOR,    FILE_VECTOR,  "h.%d.mlp.c_proj.bias",       "blk.%d.ffn_down.bias") \
  X(lnfw,       OUTSIDE,   1,          cfg.C,    INIT_ONE,            0,     VECTOR,    FILE_VECTOR,  "ln_f.weight",                "output_norm.weight")  /* norm before the classifier */ \
  X(lnfb,       OUTSIDE,   1,          cfg.C,    INIT_ZERO,           0,     VECTOR,    FILE_VECTOR,  "ln_f.bias",                  "output_norm.bias")

// Activations, for N = B*T tokens. A tensor of cfg.L layers is kept for the backward pass, one a layer, up to
// the level of recomputation (RECOMPUTE_...) named `kept`; up to BLOCK is always. When it is not kept, all
// layers share one buffer and the backward pass computes it again. Of residual3 there are `residuals` copies: cfg.L, or
// fewer that the layers take in turn (layer l copy l % residuals). Blocks below `first_block` are not kept: all have copy 0,
// and `blocks` are kept. Logits exist for `chunk` tokens at a time.
// Without a backward pass `trained` is 0, and `cached` the room for keys and values; else it is the other way round.
// `life`: what lives only inside a block, as such shared buffers do, takes the same memory as what lives only
// in the classifier.
//  name        layers  tokens  kept   cols                 dtype    life
#define MODEL_ACTIVATIONS(X) \
  X(encoded,    1,      N,      BLOCK, cfg.C,               floatX,  LIVE_ALWAYS)  /* the residual stream that enters the first block */ \
  X(ln1,        blocks, N,      GELU,  cfg.C,               floatX,  LIVE_ALWAYS) \
  X(ln1_mean,   blocks, N,      MLP,   1,                   float,   LIVE_ALWAYS) \
  X(ln1_rstd,   blocks, N,      MLP,   1,                   float,   LIVE_ALWAYS) \
  X(qkv,        blocks, N,      MLP,   QKV,                 floatX,  LIVE_ALWAYS)  /* (B, T, 3, NH, HS) */ \
  X(atty,       blocks, N,      MLP,   cfg.C,               floatX,  LIVE_ALWAYS)  /* attention's output, before its projection */ \
  X(att_lse,    blocks, N,      MLP,   cfg.NH,              float,   LIVE_ALWAYS)   /* (B, NH, T) log of the sum of exponentials */ \
  X(residual2,  blocks, N,      MLP,   cfg.C,               floatX,  LIVE_ALWAYS)  /* the stream after attention */ \
  X(ln2,        blocks, N,      GELU,  cfg.C,               floatX,  LIVE_ALWAYS) \
  X(ln2_mean,   blocks, N,      MLP,   1,                   float,   LIVE_ALWAYS) \
  X(ln2_rstd,   blocks, N,      MLP,   1,                   float,   LIVE_ALWAYS) \
  X(fch,        blocks, N,      NORMS, F,                   floatX,  LIVE_ALWAYS)  /* hidden layer before GELU */ \
  X(fch_gelu,   blocks, N,      NONE,  F,                   floatX,  LIVE_ALWAYS)  /* and after */ \
  X(residual3,  residuals, N,   BLOCK, cfg.C,               floatX,  LIVE_ALWAYS)  /* the stream after the block */ \
  X(lnf,        1,      N,      BLOCK, cfg.C,               floatX,  LIVE_ALWAYS) \
  X(lnf_mean,   1,      N,      BLOCK, 1,                   float,   LIVE_ALWAYS) \
  X(lnf_rstd,   1,      N,      BLOCK, 1,                   float,   LIVE_ALWAYS) \
  X(logits,     1,      chunk,  BLOCK, cfg.Vp,              floatX,  LIVE_CLASSIFIER)  /* become dlogits in place */ \
  X(kv,         cfg.L,  cached, NEVER, 2*cfg.C,       floatX,  LIVE_ALWAYS)  /* of B texts: (B, 2, NH, T, HS) */ \
  X(losses,     1,      trained, BLOCK, 1,                  float,   LIVE_ALWAYS)   /* nats, per token */ \
  X(branch,     1,      N,      BLOCK, cfg.C,               floatX,  LIVE_ALWAYS)  /* what a block adds to the stream, and its gradient */ \
  X(dresidual,  1,      trained, BLOCK, cfg.C,               floatX,  LIVE_ALWAYS)  /* gradient of the residual stream */ \
  X(dqkv,       1,      trained, BLOCK, QKV,                 floatX,  LIVE_BLOCK) \
  X(dfch,       1,      trained, BLOCK, F,                   floatX,  LIVE_BLOCK)
// clang-format on

#define MODEL_MEMBER_(name, ...) floatX* name;
typedef struct {
    MODEL_PARAMETERS(MODEL_MEMBER_)
} ModelParameters;
#undef MODEL_MEMBER_

#define MODEL_MEMBER_(name, layers, tokens, kept, cols, dtype, life) dtype* name;
typedef struct {
    MODEL_ACTIVATIONS(MODEL_MEMBER_)
} ModelActivations;
#undef MODEL_MEMBER_

#define MODEL_COUNT_(...) +1
enum {
    MODEL_PARAMETER_ROWS = 0 MODEL_PARAMETERS(MODEL_COUNT_),
    MODEL_ACTIVATION_ROWS = 0 MODEL_ACTIVATIONS(MODEL_COUNT_)
};
#undef MODEL_COUNT_

// One row of a table, with the sizes filled in. Tensors start at multiples of TENSOR_ALIGN elements.
#define TENSOR_ALIGN 128
typedef struct {
    const char* name;
    const char *hf_name, *gguf_name; // parameters only
    int layers;                      // copies in memory: 1 when all layers share one, 2 when they take turns
    int repeats;                     // layers in a row that have the same copy
    int uses;                        // parameters only: layers of the model that have one of the copies
    int first_layer;                 // that has copy 0, with those below it: they are not kept
    size_t rows, cols;               // of one layer
    size_t element_bytes;            //
    TensorInit init;                 // parameters only
    int decay;                       // parameters only
    TensorKind kind;                 // parameters only
    TensorPart part;                 // parameters only
    TensorPlace place;               // parameters only
    TensorInFiles form;              // parameters only
    TensorLife life;                 //
    size_t offset_bytes;             // in the allocation: of layer 0
    size_t group_bytes;              // parameters only: where the group of layer 0 begins
    size_t layer_bytes;              // from a layer to the next; 0 if there is one
    size_t member;                   // offset of the pointer in the struct
    uint64_t stream;                 // parameters only: of their first values
} TensorRow;

static inline size_t tensor_layer_elements(const TensorRow* row) { return row->rows * row->cols; }
static inline size_t tensor_elements(const TensorRow* row) {
    return row->layers * tensor_layer_elements(row);
}

// Lays the rows of one life out from `at`; returns the end.
static inline size_t tensor_rows_place_(TensorRow* rows, int count, TensorLife life, size_t at) {
    for (int i = 0; i < count; i++) {
        const size_t align = TENSOR_ALIGN * rows[i].element_bytes;
        if (rows[i].life == life) {
            rows[i].offset_bytes = (at + align - 1) / align * align;
            rows[i].layer_bytes =
                rows[i].layers > 1 ? tensor_layer_elements(&rows[i]) * rows[i].element_bytes : 0;
            at = rows[i].offset_bytes + array_bytes(tensor_elements(&rows[i]), rows[i].element_bytes);
        }
    }
    return at;
}

// Fills in the offsets; returns the bytes of the whole allocation.
static inline size_t tensor_rows_layout(TensorRow* rows, int count) {
    const size_t always = tensor_rows_place_(rows, count, LIVE_ALWAYS, 0);
    const size_t block = tensor_rows_place_(rows, count, LIVE_BLOCK, always);
    const size_t classifier = tensor_rows_place_(rows, count, LIVE_CLASSIFIER, always);
    const size_t end = block > classifier ? block : classifier, align = TENSOR_ALIGN * sizeof(float);
    return (end + align - 1) / align * align;
}

enum { MODEL_SHARD_UNIT = 1024 }; // elements

static inline size_t model_units_(size_t elements, size_t unit) { return (elements + unit - 1) / unit; }

// What a tensor takes in memory, with the padding behind it.
static inline size_t model_tensor_room_(const TensorRow* row) {
    return model_units_(tensor_layer_elements(row), TENSOR_ALIGN) * TENSOR_ALIGN;
}

// Places the trained tensors of one group (below) from element `at` on; returns the end of the last one. They lie as if
// nothing were frozen, without the whole units between them: norms add up gradients unit by unit (adamw.h), and get the same bits.
static inline size_t model_place_trained_(TensorRow rows[MODEL_PARAMETER_ROWS], TensorPlace place,
                                          unsigned frozen, size_t at) {
    size_t next = 0, end = 0; // as if none was frozen: of the next tensor, and of the last trained one
    size_t left_out = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const size_t room = rows[i].place == place ? model_tensor_room_(&rows[i]) : 0;
        if (room > 0 && !(frozen >> i & 1)) {
            const size_t from = model_units_(end, MODEL_SHARD_UNIT), to = next / MODEL_SHARD_UNIT;
            left_out += from < to ? (to - from) * MODEL_SHARD_UNIT : 0;
            rows[i].offset_bytes = array_bytes(at + next - left_out, rows[i].element_bytes);
            end = next + room;
        }
        next += room;
    }
    return at + end - left_out;
}

// And the frozen ones, one after the other.
static inline size_t model_place_frozen_(TensorRow rows[MODEL_PARAMETER_ROWS], TensorPlace place,
                                         unsigned frozen, size_t at) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (rows[i].place == place && frozen >> i & 1) {
            rows[i].offset_bytes = array_bytes(at, rows[i].element_bytes);
            at += model_tensor_room_(&rows[i]);
        }
    }
    return at;
}

// Places a group; returns its end.
static inline size_t model_place_group_(TensorRow rows[MODEL_PARAMETER_ROWS], TensorPlace place,
                                        unsigned frozen, size_t begin, int shards) {
    const size_t unit = (size_t)shards * MODEL_SHARD_UNIT;
    const size_t trained = model_place_trained_(rows, place, frozen, begin) - begin,
                 middle = begin + model_units_(trained, unit) * unit;
    return middle + model_units_(model_place_frozen_(rows, place, frozen, middle) - middle, unit) * unit;
}

// Places all groups, with so many blocks; returns the bytes of the allocation.
static inline size_t model_place_groups_(TensorRow rows[MODEL_PARAMETER_ROWS], int copies, unsigned frozen,
                                         int shards) {
    const size_t bytes = rows[0].element_bytes;
    const size_t blocks = model_place_group_(rows, PLACE_ONCE, frozen, 0, shards);
    const size_t block = model_place_group_(rows, PLACE_BLOCK, frozen, blocks, shards) - blocks;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        rows[i].group_bytes = rows[i].place == PLACE_BLOCK ? blocks * bytes : 0;
        rows[i].layer_bytes = rows[i].layers > 1 ? block * bytes : 0;
    }
    return array_bytes(blocks + (size_t)copies * block, bytes);
}

// The rows of the parameter table for a configuration, for elements of a given size; returns the bytes of one
// allocation that holds them all. In it the parameters lie in groups: what is ONCE, then block 0, block 1, ... (model_copies)
// All blocks look alike. A group has two parts: its tensors that are trained, and those whose bit is set in `frozen`. Each
// can be cut into `shards` equal parts, each a multiple of MODEL_SHARD_UNIT elements; what is added at its end is zero for ever.
static inline size_t model_sharded_rows_of(TensorRow rows[MODEL_PARAMETER_ROWS], ModelConfig cfg,
                                           size_t element_bytes, int shards, unsigned frozen) {
    const int F = model_hidden(cfg), QKV = model_qkv_size(cfg);
    TensorRow* row = rows;
#define MODEL_ROW_(name_, part_, rows_, cols_, init_, decay_, kind_, form_, hf_name_, gguf_name_)            \
    row->name = #name_;                                                                                      \
    row->hf_name = hf_name_;                                                                                 \
    row->gguf_name = gguf_name_;                                                                             \
    row->form = form_;                                                                                       \
    row->part = PART_##part_;                                                                                \
    row->place = model_place(cfg, row->part);                                                                \
    row->layers = row->place == PLACE_BLOCK ? model_copies(cfg) : 1;                                         \
    row->repeats = model_copy_repeats(cfg);                                                                  \
    row->uses = row->part == PART_OUTSIDE ? 1 : cfg.L;                                                       \
    row->first_layer = 0;                                                                                    \
    row->rows = (size_t)(rows_);                                                                             \
    row->cols = (size_t)(cols_);                                                                             \
    row->element_bytes = element_bytes;                                                                      \
    row->init = init_;                                                                                       \
    row->stream = rand_stream(#name_);                                                                       \
    row->decay = decay_;                                                                                     \
    row->kind = KIND_##kind_;                                                                                \
    row->life = LIVE_ALWAYS;                                                                                 \
    row->member = offsetof(ModelParameters, name_);                                                          \
    row++;
    MODEL_PARAMETERS(MODEL_ROW_)
#undef MODEL_ROW_
    return model_place_groups_(rows, model_copies(cfg), frozen, shards);
}

// The same in one part, as in copies on the host and in files.
static inline size_t model_parameter_rows_of(TensorRow rows[MODEL_PARAMETER_ROWS], ModelConfig cfg,
                                             size_t element_bytes) {
    return model_sharded_rows_of(rows, cfg, element_bytes, 1, 0);
}

// The same, for the parameters themselves.
static inline size_t model_parameter_rows(TensorRow rows[MODEL_PARAMETER_ROWS], ModelConfig cfg) {
    return model_parameter_rows_of(rows, cfg, sizeof(floatX));
}

static inline const char* model_recompute_word(int level) {
    static const char* const words[] = {RECOMPUTE_WORDS(WORDS_NAME)};
    assert(0 <= level && level < RECOMPUTE_NEVER);
    return words[level];
}

// Tokens that the classifier takes at a time, out of N: equal parts of about this many logits at most (64 MiB
// of fp32), but at most eight parts, as each adds to the whole gradient of wte.
#ifndef MODEL_CHUNK_LOGITS
#define MODEL_CHUNK_LOGITS ((size_t)1 << 24)
#endif
static inline size_t model_classifier_chunk(ModelConfig cfg, size_t N) {
    const size_t max = MODEL_CHUNK_LOGITS / (size_t)cfg.Vp + 1, wanted = (N + max - 1) / max;
    const size_t parts = wanted < 8 ? wanted : 8;
    return (N + parts - 1) / parts;
}

// The rows of the activation table for micro-batches of B sequences of T tokens, at a level of recomputation, with
// `residuals` copies of residual3, or fewer if fewer blocks are kept: those from `first_block` on. The classifier takes
// `chunk` tokens at a time. At RECOMPUTE_NEVER: for B texts of up to T tokens, of which one is read at once, and then a
// token of each at a time.
static inline size_t model_activation_rows(TensorRow rows[MODEL_ACTIVATION_ROWS], ModelConfig cfg, int B,
                                           int T, int recompute, int residuals, int first_block,
                                           size_t chunk) {
    const int is_trained = recompute != RECOMPUTE_NEVER;
    const int blocks = first_block < cfg.L ? cfg.L - first_block : 1;
    residuals = residuals < blocks ? residuals : blocks;
    const size_t BT = (size_t)B * (size_t)T, N = is_trained ? BT : (size_t)(B > T ? B : T);
    const size_t trained = is_trained ? N : 0, cached = is_trained ? 0 : BT;
    const int F = model_hidden(cfg), QKV = model_qkv_size(cfg);
    TensorRow* row = rows;
#define MODEL_ROW_(name_, layers_, tokens_, kept_, cols_, dtype_, life_)                                     \
    row->name = #name_;                                                                                      \
    row->hf_name = row->gguf_name = NULL;                                                                    \
    row->form = FILE_TABLE;                                                                                  \
    row->layers = recompute > RECOMPUTE_##kept_ ? 1 : layers_;                                               \
    row->repeats = row->uses = 1;                                                                            \
    row->first_layer = first_block;                                                                          \
    row->rows = tokens_;                                                                                     \
    row->cols = (size_t)(cols_);                                                                             \
    row->element_bytes = sizeof(dtype_);                                                                     \
    row->init = INIT_ZERO;                                                                                   \
    row->stream = 0;                                                                                         \
    row->decay = 0;                                                                                          \
    row->kind = KIND_MATRIX;                                                                                 \
    row->part = PART_OUTSIDE;                                                                                \
    row->place = PLACE_BLOCK;                                                                                \
    row->group_bytes = 0;                                                                                    \
    row->life = recompute > RECOMPUTE_##kept_ ? LIVE_BLOCK : life_;                                          \
    row->member = offsetof(ModelActivations, name_);                                                         \
    row++;
    MODEL_ACTIVATIONS(MODEL_ROW_)
#undef MODEL_ROW_
    return tensor_rows_layout(rows, MODEL_ACTIVATION_ROWS);
}

// Points every member of `pointers` (a ModelParameters or ModelActivations) at its tensor in `memory`.
static inline void tensor_rows_bind(void* pointers, const TensorRow* rows, int count, void* memory) {
    for (int i = 0; i < count; i++) {
        char* tensor = (char*)memory + rows[i].offset_bytes;
        memcpy((char*)pointers + rows[i].member, &tensor, sizeof(tensor));
    }
}

// Copy k of a tensor in `memory`: layer k's if layers share none; the one copy if there is only one.
static inline void* tensor_at_layer(const TensorRow* row, const void* memory, int k) {
    return (char*)memory + row->offset_bytes + (size_t)k * row->layer_bytes;
}

// The copy of a tensor that layer l has, counted from first_layer.
static inline int tensor_copy(const TensorRow* row, int l) {
    const int kept = l > row->first_layer ? l - row->first_layer : 0;
    return kept / row->repeats % row->layers;
}

// And the lowest layer that has copy k.
static inline int tensor_lowest_layer(const TensorRow* row, int k) { return k * row->repeats; }

// Groups of parameters: 0 is what is ONCE, 1 + k is block k, copy k of what is in blocks. The lowest layer that has a group.
static inline int model_groups(ModelConfig cfg) { return 1 + model_copies(cfg); }
static inline int model_group_copy(int g) { return g > 0 ? g - 1 : 0; }
static inline int model_group_layer(ModelConfig cfg, int g) {
    return model_group_copy(g) * model_copy_repeats(cfg);
}
static inline int tensor_is_in_group(const TensorRow* row, int g) {
    return (row->place == PLACE_BLOCK) == (g > 0);
}

// The group that has a parameter of layer l.
static inline int tensor_group(const TensorRow* row, int l) {
    return row->place == PLACE_BLOCK ? 1 + tensor_copy(row, l) : 0;
}

// Where group g begins in memory laid out by the rows of the parameters.
static inline size_t model_group_offset_bytes(const TensorRow rows[MODEL_PARAMETER_ROWS], int g) {
    int i = 0;
    while (!tensor_is_in_group(&rows[i], g)) {
        i++;
    }
    return rows[i].group_bytes + (size_t)model_group_copy(g) * rows[i].layer_bytes;
}

// Where a parameter begins in its group; and the parameter, in memory that has only that group, or that of another layer.
static inline size_t tensor_offset_in_group(const TensorRow* row) {
    return row->offset_bytes - row->group_bytes;
}
static inline void* tensor_in_group(const TensorRow* row, const void* group) {
    return (char*)group + tensor_offset_in_group(row);
}

// Moves the pointer of a row in `pointers` from copy 0 to copy k.
static inline void tensor_advance_(void* pointers, const TensorRow* row, int k) {
    char* tensor;
    memcpy(&tensor, (char*)pointers + row->member, sizeof(tensor));
    tensor += (size_t)k * row->layer_bytes;
    memcpy((char*)pointers + row->member, &tensor, sizeof(tensor));
}

// The same struct, seen from layer l: .qkvw is layer l's,
static inline ModelParameters model_parameters_at_layer(ModelParameters all, const TensorRow* rows, int l) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        tensor_advance_(&all, &rows[i], tensor_copy(&rows[i], l));
    }
    return all;
}
static inline ModelActivations model_activations_at_layer(ModelActivations all, const TensorRow* rows,
                                                          int l) {
    for (int i = 0; i < MODEL_ACTIVATION_ROWS; i++) {
        tensor_advance_(&all, &rows[i], tensor_copy(&rows[i], l));
    }
    return all;
}

// or from copy k of the blocks of parameters.
static inline ModelParameters model_parameters_at_copy(ModelParameters all, const TensorRow* rows, int k) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        tensor_advance_(&all, &rows[i], k);
    }
    return all;
}

// ---- sizes and names ----

#define GPT2_VOCAB 50257
#define MODEL_VOCAB_ALIGN 128

static inline int model_padded_vocab(int V) {
    return (V + MODEL_VOCAB_ALIGN - 1) / MODEL_VOCAB_ALIGN * MODEL_VOCAB_ALIGN;
}

// Models with a name. GPT-2's are called by their depth (gpt2:d12, or d12), GPT-3's by their width
// (gpt3:c768); GPT-2's published ones also as Hugging Face calls them.
typedef struct {
    const char* name;
    int L, C, NH, max_T;
} ModelPreset;

static inline const ModelPreset* model_presets(int* count) {
    // clang-format off
    static const ModelPreset models[] = {
        {"gpt2:d6",      6,   384,  6, 1024}, {"gpt2:d12",    12,   768, 12, 1024}, // d12: GPT-2 124M
        {"gpt2:d24",    24,  1024, 16, 1024}, {"gpt2:d36",    36,  1280, 20, 1024}, // 350M, 774M
        {"gpt2:d48",    48,  1600, 25, 1024}, {"gpt2:d60",    60,  1920, 30, 1024}, // 1558M
        {"gpt2:d72",    72,  2880, 30, 1024}, {"gpt2:d84",    84,  3456, 36, 1024},
        {"gpt3:c384",    6,   384,  6, 2048}, {"gpt3:c768",   12,   768, 12, 2048}, // c768: GPT-3 125M
        {"gpt3:c1024",  24,  1024, 16, 2048}, {"gpt3:c1536",  24,  1536, 16, 2048}, // 350M, 760M
        {"gpt3:c2048",  24,  2048, 16, 2048}, {"gpt3:c2560",  32,  2560, 32, 2048}, // 1.3B, 2.7B
        {"gpt3:c4096",  32,  4096, 32, 2048}, {"gpt3:c5120",  40,  5120, 40, 2048}, // 6.7B, 13B
        {"gpt3:c5140",  40,  5120, 40, 2048},                                       // 13B as the paper misprints it
        {"gpt3:c12288", 96, 12288, 96, 2048},                                       // 175B
        {"gpt2",        12,   768, 12, 1024}, {"gpt2-medium", 24,  1024, 16, 1024},
        {"gpt2-large",  36,  1280, 20, 1024}, {"gpt2-xl",     48,  1600, 25, 1024},
    };
    // clang-format on
    *count = (int)(sizeof(models) / sizeof(models[0]));
    return models;
}

// The model called `name` (the prefix "gpt2:" may be left out), or NULL.
static inline const ModelPreset* model_preset_by_name(const char* name) {
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

// Whether sizes read from the file `path` can be those of a model; if not, 0 and the reason in `error`.
static inline int model_check_config(ModelConfig cfg, const char* path, char* error) {
    static const char* const names[6] = {"context", "vocabulary", "layers",
                                         "heads",   "channels",   "padded vocabulary"};
    static const int max[6] = {1 << 20, 10000000, MODEL_MAX_LAYERS,
                               1024,    65536,    10000000 + MODEL_VOCAB_ALIGN};
    const int sizes[6] = {cfg.max_T, cfg.V, cfg.L, cfg.NH, cfg.C, cfg.Vp};
    for (int i = 0; i < 6; i++) {
        if (sizes[i] < 1 || sizes[i] > max[i]) {
            return error_set(error, path, "%s of %d, wanted 1 to %d", names[i], sizes[i], max[i]);
        }
    }
    if (cfg.C % cfg.NH) {
        return error_set(error, path, "%d channels in %d heads, wanted a multiple", cfg.C, cfg.NH);
    }
    if (cfg.Vp < cfg.V) {
        return error_set(error, path, "padded vocabulary of %d below the vocabulary of %d", cfg.Vp, cfg.V);
    }
    return 1;
}

// Of all layers, those with the same parameters too.
static inline double model_count_elements_(ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows(rows, cfg);
    double count = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        count += (double)rows[i].uses * (double)tensor_layer_elements(&rows[i]);
    }
    return count;
}

// Parameters of the model that is computed, as its files have them: padding rows of the vocabulary are not counted.
static inline double model_count_parameters(ModelConfig cfg) {
    return model_count_elements_(cfg) - (double)(cfg.Vp - cfg.V) * cfg.C;
}

// And of those in memory, which are trained: what layers share counts once.
static inline double model_count_stored(ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    double count = -(double)(cfg.Vp - cfg.V) * cfg.C;
    model_parameter_rows(rows, cfg);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        count += (double)tensor_elements(&rows[i]);
    }
    return count;
}

// Floating-point operations to train on one token, as the field counts them: 6 per weight of each layer (with the padded
// vocabulary and the embeddings, as llm.c does), and 6 L C T for causal attention.
static inline double model_flops_per_token(ModelConfig cfg, int T) {
    return 6 * model_count_elements_(cfg) + 6.0 * cfg.L * cfg.C * T;
}

// ---- random weights ----

// GPT-2's 0.02 fits its 768 channels and more; in narrower models the sums of a row would be too small for
// attention to find its patterns soon, so they begin with as large sums.
static inline double model_initial_std_(ModelConfig cfg) {
    return 0.02 * sqrt(cfg.C < 768 ? 768.0 / cfg.C : 1);
}

// Value of element (r, c) of layer l of a parameter in a new model: a function of the seed, the tensor's name
// and the place alone, so the same on every platform, thread count and sharding. Padding rows of the
// vocabulary are zero.
static inline float model_initial_value(const TensorRow* row, ModelConfig cfg, uint64_t seed, int l, size_t r,
                                        size_t c) {
    if (row->init == INIT_ZERO || row->init == INIT_ONE || (row->init == INIT_VOCAB && r >= (size_t)cfg.V)) {
        return row->init == INIT_ONE ? 1.0f : 0.0f;
    }
    const double std = model_initial_std_(cfg) / (row->init == INIT_NORMAL_SCALED ? sqrt(2.0 * cfg.L) : 1);
    const uint64_t index = (l * row->rows + r) * row->cols + c;
    return (float)(rand_normal(seed, row->stream, index) * std);
}

// The rows of a parameter, or of its state, that files outside of llm.c hold: all, but not the vocabulary's
// padding.
static inline size_t model_rows_in_files(const TensorRow* row, ModelConfig cfg) {
    return row->init == INIT_VOCAB && row->rows > (size_t)cfg.V ? (size_t)cfg.V : row->rows;
}

// Sets the parameters of group g of a new model, fp32, that lie in `group` as the rows say.
static inline void model_random_group(const TensorRow rows[MODEL_PARAMETER_ROWS], ModelConfig cfg,
                                      uint64_t seed, int g, void* group) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &rows[i];
        assert(row->element_bytes == sizeof(float));
        if (!tensor_is_in_group(row, g)) {
            continue;
        }
        float* tensor = (float*)tensor_in_group(row, group);
#pragma omp parallel for schedule(static)
        for (size_t r = 0; r < row->rows; r++) {
            for (size_t c = 0; c < row->cols; c++) {
                tensor[r * row->cols + c] =
                    model_initial_value(row, cfg, seed, model_group_layer(cfg, g), r, c);
            }
        }
    }
}

#endif
