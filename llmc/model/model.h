/*
model.h -- the description of the model: its sizes and every tensor it has, each in one row of a
table.

Parameters and activations are two lists (X-macros). The structs of pointers, memory,
initialization, updates, weight decay, optimizer state (optimizer.h), files, tests and the memory
report are loops over their rows; nothing else in the program lists the tensors.

    B  sequences in a micro-batch     T   tokens of a sequence      N = B*T
    C  channels                       NH  heads                     HS = head size, C/NH
    F  hidden size of the MLP, 4C     QKV size of queries, keys and values together, 3C
    L  layers (blocks)                V   vocabulary size           Vp = V rounded up to 128

Layers may share parameters (--share-layers): then memory has fewer blocks of parameters than the
model has layers, or the parameters of all layers lie outside of the blocks.

GPT-2: Radford et al., "Language models are unsupervised multitask learners", 2019; pre-norm blocks,
learned positions, GELU in tanh form, the token embedding shared with the classifier.
*/
#ifndef LLMC_MODEL_H
#define LLMC_MODEL_H

#include <assert.h>
#include <math.h>
#include <stddef.h>

#include "llmc/base/check.h"
#include "llmc/base/rand.h"
#include "llmc/model/tensors.h"
#include "llmc/base/enum_words.h"

#ifndef floatX
#define floatX float
#endif

typedef struct Model Model; // a model with its memory: each trainer has its own

// Layers that share parameters: none; the attention, or the MLP, of all layers, with the norm
// before it; two consecutive layers; or a loop of blocks is repeated. Memory has one copy of shared
// parameters, files have every layer (share_layers.h).
typedef enum { SHARE_OFF, SHARE_ATTENTION, SHARE_MLP, SHARE_PAIRS, SHARE_LOOP } ShareLayers;

// Purposes of an open model.
typedef enum {
    USE_TRAIN,
    USE_EVALUATE, // also exports: no gradients, no optimizer, nothing to save
    USE_GENERATE
} ModelUse;

typedef struct {
    int max_T; // context: the longest sequence, the rows of wpe
    int V, Vp;
    int L, NH, C;
    int share; // SHARE_...; for a loop, SHARE_LOOP + its number of blocks
} ModelConfig;

enum { MODEL_MAX_LAYERS = 1000 };

// Return the number of blocks of parameters in memory (copy 0, 1, ...), and the number of
// consecutive layers that share one.
static inline int model_copies(ModelConfig cfg) {
    return cfg.share == SHARE_PAIRS ? cfg.L / 2 : cfg.share >= SHARE_LOOP ? cfg.share - SHARE_LOOP : cfg.L;
}
static inline int model_copy_repeats(ModelConfig cfg) { return cfg.share == SHARE_PAIRS ? 2 : 1; }

// Returns the copy that layer l uses.
static inline int model_copy(ModelConfig cfg, int l) {
    return l / model_copy_repeats(cfg) % model_copies(cfg);
}

static inline int model_hidden(ModelConfig cfg) { return 4 * cfg.C; }
static inline int model_qkv_size(ModelConfig cfg) { return 3 * cfg.C; }
static inline int model_head_size(ModelConfig cfg) { return cfg.C / cfg.NH; }

static inline TensorPlace model_place(ModelConfig cfg, TensorPart part) {
    const int is_shared = (cfg.share == SHARE_ATTENTION && part == PART_ATTENTION) ||
                          (cfg.share == SHARE_MLP && part == PART_MLP);
    return part == PART_OUTSIDE || is_shared ? PLACE_ONCE : PLACE_BLOCK;
}

// clang-format off
// Levels of --recompute and their words. The backward pass recomputes this, and everything above
// it, instead of keeping it.
#define RECOMPUTE_WORDS(X) \
    X(RECOMPUTE_NONE, "0") \
    X(RECOMPUTE_GELU, "1")  /* GELU */ \
    X(RECOMPUTE_NORMS, "2") /* both norms of a block */ \
    X(RECOMPUTE_MLP, "mlp") /* the matmul before GELU */ \
    X(RECOMPUTE_BLOCK, "3") /* everything but the residual stream between blocks */
typedef enum {
    RECOMPUTE_WORDS(WORDS_VALUE)
    RECOMPUTE_NEVER // generation: no backward pass; only the keys and values of all layers are kept
} RecomputeLevel;

// Parameters, in the order of llm.c's model files: `rows` x `cols`, in a part of the model
// (PART_...). A vector is one row; matrices are (out, in). Padding rows of wte (V ... Vp-1) are
// zero. An update treats each of `parts` matrices, one below the other, alone. `init` and `decay`:
// first values, and whether weight decay applies. `kind` (KIND_...) selects the optimizer's rule.
// Names in files are in families.h.
//  name        part       rows        cols      parts  init                 decay  kind
#define MODEL_PARAMETERS(X) \
  X(wte,        OUTSIDE,   cfg.Vp,     cfg.C,    1,     INIT_VOCAB,          1,     EMBEDDING)   /* token embedding = classifier weight */ \
  X(wpe,        OUTSIDE,   cfg.max_T,  cfg.C,    1,     INIT_NORMAL,         1,     EMBEDDING) /* position embedding */ \
  X(ln1w,       ATTENTION, 1,          cfg.C,    1,     INIT_ONE,            0,     VECTOR) /* norm before attention */ \
  X(ln1b,       ATTENTION, 1,          cfg.C,    1,     INIT_ZERO,           0,     VECTOR) \
  X(qkvw,       ATTENTION, QKV,        cfg.C,    3,     INIT_NORMAL,         1,     MATRIX) /* queries, keys, values */ \
  X(qkvb,       ATTENTION, 1,          QKV,      1,     INIT_ZERO,           0,     VECTOR) \
  X(attprojw,   ATTENTION, cfg.C,      cfg.C,    1,     INIT_NORMAL_SCALED,  1,     MATRIX) /* into the residual stream */ \
  X(attprojb,   ATTENTION, 1,          cfg.C,    1,     INIT_ZERO,           0,     VECTOR) \
  X(ln2w,       MLP,       1,          cfg.C,    1,     INIT_ONE,            0,     VECTOR) /* norm before the MLP */ \
  X(ln2b,       MLP,       1,          cfg.C,    1,     INIT_ZERO,           0,     VECTOR) \
  X(fcw,        MLP,       F,          cfg.C,    1,     INIT_NORMAL,         1,     MATRIX) /* into the MLP's hidden layer */ \
  X(fcb,        MLP,       1,          F,        1,     INIT_ZERO,           0,     VECTOR) \
  X(fcprojw,    MLP,       cfg.C,      F,        1,     INIT_NORMAL_SCALED,  1,     MATRIX) /* into the residual stream */ \
  X(fcprojb,    MLP,       1,          cfg.C,    1,     INIT_ZERO,           0,     VECTOR) \
  X(lnfw,       OUTSIDE,   1,          cfg.C,    1,     INIT_ONE,            0,     VECTOR)  /* norm before the classifier */ \
  X(lnfb,       OUTSIDE,   1,          cfg.C,    1,     INIT_ZERO,           0,     VECTOR)

// Activations, for N = B*T tokens. A tensor with `blocks` layers is kept for the backward pass, one
// per layer, up to the recomputation level `kept` (RECOMPUTE_...); BLOCK means always. A tensor
// that is not kept has one buffer for all layers, and the backward pass recomputes it. residual3
// has `residuals` copies: one per layer, or fewer, which the layers use in turn (layer l uses copy
// l % residuals). Blocks below `first_block` keep nothing and use copy 0. Logits exist for `chunk`
// tokens at a time. Without a backward pass `trained` is 0 and `cached` the rows of keys and
// values; with one it is the other way round. `life`: tensors that live only inside a block, like
// these shared buffers, use the same memory as those that live only in the classifier.
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
  X(fch_gelu,   blocks, N,      NONE,  F,                   floatX,  LIVE_ALWAYS)  /* hidden layer after GELU */ \
  X(residual3,  residuals, N,   BLOCK, cfg.C,               floatX,  LIVE_ALWAYS)  /* the stream after the block */ \
  X(lnf,        1,      N,      BLOCK, cfg.C,               floatX,  LIVE_ALWAYS) \
  X(lnf_mean,   1,      N,      BLOCK, 1,                   float,   LIVE_ALWAYS) \
  X(lnf_rstd,   1,      N,      BLOCK, 1,                   float,   LIVE_ALWAYS) \
  X(logits,     1,      chunk,  BLOCK, cfg.Vp,              floatX,  LIVE_CLASSIFIER)  /* become dlogits in place */ \
  X(kv,         cfg.L,  cached, NEVER, 2*cfg.C,       floatX,  LIVE_ALWAYS)  /* of B sequences: (B, 2, NH, T, HS) */ \
  X(losses,     1,      trained, BLOCK, 1,                  float,   LIVE_ALWAYS)   /* nats, per token */ \
  X(branch,     1,      N,      BLOCK, cfg.C,               floatX,  LIVE_ALWAYS)  /* output of attention or MLP, added to the stream; and its gradient */ \
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

// Fills in the rows of the parameter table for a configuration, with elements of this size; returns
// the bytes of one allocation for all of them. Parameters lie in groups: first those that memory
// has once (PLACE_ONCE), then block 0, block 1, ... (model_copies). All blocks are laid out alike.
// A group has two parts: its trained tensors, and those whose bit is set in `frozen`. Each part can
// be cut into `shards` equal pieces, multiples of TENSOR_SHARD_UNIT elements; the padding at its
// end is always zero.
static inline size_t model_sharded_rows_of(TensorRow rows[MODEL_PARAMETER_ROWS], ModelConfig cfg,
                                           size_t element_bytes, int shards, unsigned frozen) {
    const int F = model_hidden(cfg), QKV = model_qkv_size(cfg);
    TensorRow* row = rows;
#define MODEL_ROW_(name_, part_, rows_, cols_, parts_, init_, decay_, kind_)                                 \
    row->name = #name_;                                                                                      \
    row->part = PART_##part_;                                                                                \
    row->place = model_place(cfg, row->part);                                                                \
    row->layers = row->place == PLACE_BLOCK ? model_copies(cfg) : 1;                                         \
    row->repeats = model_copy_repeats(cfg);                                                                  \
    row->uses = row->part == PART_OUTSIDE ? 1 : cfg.L;                                                       \
    row->first_layer = 0;                                                                                    \
    row->rows = (size_t)(rows_);                                                                             \
    row->cols = (size_t)(cols_);                                                                             \
    row->element_bytes = element_bytes;                                                                      \
    row->parts = parts_;                                                                                     \
    row->init = init_;                                                                                       \
    row->stream = rand_stream(#name_);                                                                       \
    row->decay = decay_;                                                                                     \
    row->kind = KIND_##kind_;                                                                                \
    row->life = LIVE_ALWAYS;                                                                                 \
    row->member = offsetof(ModelParameters, name_);                                                          \
    row++;
    MODEL_PARAMETERS(MODEL_ROW_)
#undef MODEL_ROW_
    return tensor_place_groups(rows, MODEL_PARAMETER_ROWS, model_copies(cfg), frozen, shards);
}

// Fills in the rows with every group in one part, as in files and in copies on the host.
static inline size_t model_parameter_rows_of(TensorRow rows[MODEL_PARAMETER_ROWS], ModelConfig cfg,
                                             size_t element_bytes) {
    return model_sharded_rows_of(rows, cfg, element_bytes, 1, 0);
}

// Fills in the rows for elements of type floatX.
static inline size_t model_parameter_rows(TensorRow rows[MODEL_PARAMETER_ROWS], ModelConfig cfg) {
    return model_parameter_rows_of(rows, cfg, sizeof(floatX));
}

static inline const char* model_recompute_word(int level) {
    static const char* const words[] = {RECOMPUTE_WORDS(WORDS_NAME)};
    assert(0 <= level && level < RECOMPUTE_NEVER);
    return words[level];
}

// Returns the tokens, out of N, that the classifier processes at a time: equal chunks of about this
// many logits at most (64 MiB of fp32), but at most eight chunks, as each adds to the whole
// gradient of wte.
#ifndef MODEL_CHUNK_LOGITS
#define MODEL_CHUNK_LOGITS ((size_t)1 << 24)
#endif
static inline size_t model_classifier_chunk(ModelConfig cfg, size_t N) {
    const size_t max = MODEL_CHUNK_LOGITS / (size_t)cfg.Vp + 1, wanted = (N + max - 1) / max;
    const size_t parts = wanted < 8 ? wanted : 8;
    return (N + parts - 1) / parts;
}

// Fills in the rows of the activation table for micro-batches of B sequences of T tokens, at a
// level of recomputation; returns the bytes of the allocation. residual3 gets `residuals` copies,
// or fewer if fewer blocks are kept: those from `first_block` on. The classifier processes `chunk`
// tokens at a time. At RECOMPUTE_NEVER: for B sequences of up to T tokens, with prefill of one
// sequence at a time, then decode of one token of each.
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

// Return the number of groups (0: everything that memory has once; 1 + k: block k), and the lowest
// layer that uses group g.
static inline int model_groups(ModelConfig cfg) { return 1 + model_copies(cfg); }
static inline int model_group_layer(ModelConfig cfg, int g) {
    return tensor_group_copy(g) * model_copy_repeats(cfg);
}
// Returns the pointers of layer l: .qkvw is layer l's.
static inline ModelParameters model_parameters_at_layer(ModelParameters all, const TensorRow* rows, int l) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        tensor_advance(&all, &rows[i], tensor_copy(&rows[i], l));
    }
    return all;
}
static inline ModelActivations model_activations_at_layer(ModelActivations all, const TensorRow* rows,
                                                          int l) {
    for (int i = 0; i < MODEL_ACTIVATION_ROWS; i++) {
        tensor_advance(&all, &rows[i], tensor_copy(&rows[i], l));
    }
    return all;
}

// Returns the pointers of copy k of the blocks of parameters.
static inline ModelParameters model_parameters_at_copy(ModelParameters all, const TensorRow* rows, int k) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        tensor_advance(&all, &rows[i], k);
    }
    return all;
}

// ---- sizes and names ----

#define MODEL_VOCAB_ALIGN 128

static inline int model_padded_vocab(int V) {
    return (V + MODEL_VOCAB_ALIGN - 1) / MODEL_VOCAB_ALIGN * MODEL_VOCAB_ALIGN;
}

// Returns 1 if sizes read from the file `path` are possible for a model; if not, 0 and the reason
// in `error`.
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

// Counts a shared layer once for every layer that uses it.
static inline double model_count_elements_(ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows(rows, cfg);
    double count = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        count += (double)rows[i].uses * (double)tensor_layer_elements(&rows[i]);
    }
    return count;
}

// Counts the parameters of the model as its files have them, without the padding rows of the
// vocabulary.
static inline double model_count_parameters(ModelConfig cfg) {
    return model_count_elements_(cfg) - (double)(cfg.Vp - cfg.V) * cfg.C;
}

// Counts the parameters in memory: shared layers count once.
static inline double model_count_stored(ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    double count = -(double)(cfg.Vp - cfg.V) * cfg.C;
    model_parameter_rows(rows, cfg);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        count += (double)tensor_elements(&rows[i]);
    }
    return count;
}

// Returns the floating-point operations to train on one token, as the field counts them: 6 per
// weight of each layer (with the padded vocabulary and the embeddings, as llm.c does), and 6 L C T
// for causal attention.
static inline double model_flops_per_token(ModelConfig cfg, int T) {
    return 6 * model_count_elements_(cfg) + 6.0 * cfg.L * cfg.C * T;
}

// ---- random weights ----

// Returns GPT-2's 0.02 for its 768 channels and more. In narrower models the sums over a row would
// be too small for attention to find its patterns soon, so std grows until they are as large.
static inline double model_initial_std_(ModelConfig cfg) {
    return 0.02 * sqrt(cfg.C < 768 ? 768.0 / cfg.C : 1);
}

// Returns the value of element (r, c) of layer l of a parameter in a new model. It depends only on
// the seed, the tensor's name and the place, so it is the same on every platform and for any number
// of threads and shards. Padding rows of the vocabulary are zero.
static inline float model_initial_value(const TensorRow* row, ModelConfig cfg, uint64_t seed, int l, size_t r,
                                        size_t c) {
    if (row->init == INIT_ZERO || row->init == INIT_ONE || (row->init == INIT_VOCAB && r >= (size_t)cfg.V)) {
        return row->init == INIT_ONE ? 1.0f : 0.0f;
    }
    const double std = model_initial_std_(cfg) / (row->init == INIT_NORMAL_SCALED ? sqrt(2.0 * cfg.L) : 1);
    const uint64_t index = (l * row->rows + r) * row->cols + c;
    return (float)(rand_normal(seed, row->stream, index) * std);
}

// Returns the rows of a parameter, or of its state, in files of other programs: all but the
// vocabulary's padding.
static inline size_t model_rows_in_files(const TensorRow* row, ModelConfig cfg) {
    return row->init == INIT_VOCAB && row->rows > (size_t)cfg.V ? (size_t)cfg.V : row->rows;
}

// Sets the parameters of group g of a new model, in fp32; `group` is laid out by the rows.
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
