/*
layer_cost.h -- the time that each layer takes in a pass over a micro-batch, from its operations.

    time = sum over operations of max(FLOP / rate, bytes / bandwidth) + a launch each

    cost_X, cost_X_backward    add the operations of layer X, as X does them

Sizes come from the table of parameters and from ModelConfig, FLOP and bytes from the functions
beside the operations. Experts share the rows of all tokens; the weights of all experts are read.
The activation counts as a pass of its own, even where a GPU fuses it into a matmul.
*/
#ifndef LLMC_LAYER_COST_H
#define LLMC_LAYER_COST_H

#include <math.h>
#include <stddef.h>

#include "llmc/base/enum_words.h"
#include "llmc/layers/attention_config.h"
#include "llmc/model/freeze.h"
#include "llmc/model/model.h"
#include "llmc/ops/activation.h"
#include "llmc/ops/attention.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/ops/distill.h"
#include "llmc/ops/dropout.h"
#include "llmc/ops/embedding.h"
#include "llmc/ops/matmul.h"
#include "llmc/ops/norm.h"
#include "llmc/ops/router.h"

// clang-format off
// Kinds of operations and their names. The first two have FLOP and bytes, the others up to UPDATE
// only bytes. LAUNCHES is the time to start operations; plan.h adds MOVES, and cost.h the transfers between
// the processes of a run.
#define COST_WORDS(X) \
    X(COST_MATMULS, "matmuls") \
    X(COST_ATTENTION, "attention") \
    X(COST_NORMS, "norms") \
    X(COST_ACTIVATION, "activation") \
    X(COST_CLASSIFIER, "losses") \
    X(COST_MEMORY, "other passes over memory") \
    X(COST_UPDATE, "update") \
    X(COST_LAUNCHES, "launches") \
    X(COST_MOVES, "offloading") \
    X(COST_TENSOR, "transfers of tensor groups") \
    X(COST_CONTEXT, "of context groups") \
    X(COST_EXPERTS, "of expert groups") \
    X(COST_PIPELINE, "idle pipelines") \
    X(COST_DATA, "ZeRO's transfers")
// clang-format on
typedef enum { COST_WORDS(WORDS_VALUE) COST_KINDS } CostKind;
enum { COST_RATES = COST_LAUNCHES };

// Rates that a device reaches: FLOP/s or bytes/s, by kind.
typedef struct {
    double per_s[COST_RATES];
    double launch_s;
    char basis[128];  // source of the rates, in words
    double fp8_per_s; // FLOP/s of matmuls in fp8; 0: none in the run, or not faster on the device
} CostRates;

// Time of a training step in seconds, by kind.
typedef struct {
    double s[COST_KINDS];
} CostUpdate;

// Returns the name of a kind; for the activation of a model, its own.
static inline const char* cost_word(CostKind kind, ActivationKind activation) {
    static const char* const words[] = {COST_WORDS(WORDS_NAME)};
    return kind == COST_ACTIVATION ? activation_word(activation) : words[kind];
}

static inline int cost_has_flops(CostKind kind) { return kind <= COST_ATTENTION; }

// A walk over the operations of a training step.
typedef struct {
    ModelConfig cfg;
    const Freeze* freeze;
    const CostRates* rates;
    TensorRow rows[MODEL_PARAMETER_ROWS];
    double times, N, T;          // micro-batches of a step; tokens of one, and of a sequence
    double stream;               // tokens of the residual stream in this process, of a tensor group
    int tensor_ranks;            // ranks that cut matrices to the sizes of `cfg`
    double size, gradient_bytes; // bytes of an element
    // true on a GPU, where residuals and gradients of biases are parts of other operations
    int is_fused;
    int l;           // layer of the block that the walk is in
    CostUpdate* sum; // result so far
} CostWalk;

// Adds the time of an operation `times` times.
static inline void cost_add_times_(const CostWalk* w, CostKind kind, double flops, double bytes,
                                   double times) {
    const CostRates* r = w->rates;
    const double by_bytes = bytes / r->per_s[cost_has_flops(kind) ? COST_MEMORY : kind];
    const double by_flops = cost_has_flops(kind) ? flops / r->per_s[kind] : 0;
    w->sum->s[kind] += times * fmax(by_flops, by_bytes);
    w->sum->s[COST_LAUNCHES] += times * r->launch_s;
}

// Adds the time of an operation, once per micro-batch.
static inline void cost_add(const CostWalk* w, CostKind kind, double flops, double bytes) {
    cost_add_times_(w, kind, flops, bytes, w->times);
}

// ---- linear.h ----

// Returns 1 if the layer of the walk has experts.
static inline int cost_has_experts_(const CostWalk* w) {
    return model_layer_has(w->cfg, LAYERS_EXPERTS, w->l);
}

// Counts the rows of the hidden layers: one for each expert that a token takes, and for each expert
// half a tile of padding on average.
static inline double cost_hidden_rows_(const CostWalk* w) {
    const ModelConfig cfg = w->cfg;
    return cost_has_experts_(w) ? w->N * cfg.E_used + cfg.E * (ROUTER_TILE - 1) / 2.0 : w->N;
}

// Adds a matmul of a weight, or one of each expert, that moves the weight or its gradient. A GPU
// starts the matmuls of all experts at once.
static inline void cost_matmul_of_(const CostWalk* w, const TensorRow* weight, double weight_bytes) {
    const double in = (double)weight->cols, out = (double)weight->rows / weight->experts,
                 N = weight->experts > 1 || weight->split == SPLIT_EXPERTS ? cost_hidden_rows_(w) : w->N;
    cost_add(w, COST_MATMULS, matmul_flops(N, in, out),
             w->size * N * (in + out) + weight_bytes * (double)tensor_layer_elements(weight));
    w->sum->s[COST_LAUNCHES] += w->is_fused ? 0 : w->times * (weight->experts - 1) * w->rates->launch_s;
}

static inline int cost_is_in_fp8_(const CostWalk* w, const TensorRow* weight) {
    const size_t members[] = {offsetof(ModelParameters, qkvw), offsetof(ModelParameters, fcw),
                              offsetof(ModelParameters, fcprojw), offsetof(ModelParameters, sfcw),
                              offsetof(ModelParameters, sfcprojw)};
    int is_in_fp8 = 0;
    for (int i = 0; i < 5; i++) {
        is_in_fp8 |= weight->member == members[i];
    }
    return is_in_fp8 && w->rates->fp8_per_s > 0 && weight->experts == 1;
}

// Adds a matmul in fp8 of an input with `in` columns. The kernel that makes the input also writes
// its codes; the weight's are made once per step.
static inline void cost_matmul_fp8_(const CostWalk* w, const TensorRow* weight, double in, double out) {
    const CostRates* r = w->rates;
    const double slower = r->per_s[COST_MATMULS] / r->fp8_per_s,
                 elements = (double)tensor_layer_elements(weight), codes = w->N * in;
    cost_add(w, COST_MATMULS, slower * matmul_flops(w->N, in, out),
             2 * codes + w->size * w->N * out + elements);
    cost_add_times_(w, COST_MEMORY, 0, (w->size + 1) * elements, 1);
}

// Adds out = inp weight^T, or the gradient of inp.
static inline void cost_matmul_(const CostWalk* w, const TensorRow* weight, int is_backward) {
    const double cols = (double)weight->cols, rows = (double)weight->rows;
    if (cost_is_in_fp8_(w, weight)) {
        cost_matmul_fp8_(w, weight, is_backward ? rows : cols, is_backward ? cols : rows);
    } else {
        cost_matmul_of_(w, weight, w->size);
    }
}

// Adds the gradient of a weight. With several micro-batches, it is also read.
static inline void cost_gradient_(const CostWalk* w, const TensorRow* weight) {
    cost_matmul_of_(w, weight, (w->times > 1 ? 2 : 1) * w->gradient_bytes);
}

// Returns the index of the row of the parameter at this offset in ModelParameters.
static inline int cost_row_(const CostWalk* w, size_t member) {
    int i = 0;
    while (w->rows[i].member != member) {
        i++;
    }
    return i;
}

// Add both passes of a layer whose weight and bias are at these offsets in ModelParameters.
static inline void cost_linear_(const CostWalk* w, size_t weight) {
    cost_matmul_(w, &w->rows[cost_row_(w, weight)], 0);
}
static inline void cost_linear_backward_(const CostWalk* w, size_t weight, size_t bias) {
    const int i = cost_row_(w, weight), b = cost_row_(w, bias);
    const double out = (double)w->rows[i].rows;
    cost_matmul_(w, &w->rows[i], 1);
    if (freeze_has(w->freeze, i, w->l)) {
        return;
    }
    cost_gradient_(w, &w->rows[i]);
    if (!w->is_fused && tensor_elements(&w->rows[b]) > 0 && !freeze_has(w->freeze, b, w->l)) {
        cost_add(w, COST_MEMORY, 0, w->size * w->N * out);
    }
}

// Adds a projection into the residual stream. With a norm after it, a factor or dropout it is added
// apart.
static inline void cost_residual_(const CostWalk* w, size_t weight) {
    const int is_apart =
        model_has_norms_after(w->cfg) || model_residual_factor(w->cfg) != 1 || w->cfg.dropout > 0;
    cost_linear_(w, weight);
    if (!w->is_fused || is_apart) {
        cost_add(w, model_has_norms_after(w->cfg) ? COST_NORMS : COST_MEMORY, 0,
                 3 * w->stream * w->cfg.C * w->size);
    }
}

// Adds the sum of the parts that tensor ranks add to the stream, or to its gradient.
static inline void cost_sum_of_parts(const CostWalk* w) {
    if (w->tensor_ranks > 1) {
        cost_add(w, COST_MEMORY, 0, (w->tensor_ranks + 2) * w->stream * w->cfg.C * w->size);
    }
}

// Adds a pass of dropout over the stream, in place or into a tensor of its own, if there is any.
static inline void cost_dropout_(const CostWalk* w) {
    if (w->cfg.dropout > 0) {
        cost_add(w, COST_MEMORY, 0, dropout_bytes(w->stream * w->cfg.C, w->size));
    }
}

// Adds passes over the embeddings, if they have a factor, and dropout.
static inline void cost_embedding_factor_(const CostWalk* w) {
    if (model_embedding_factor(w->cfg) != 1) {
        cost_add(w, COST_MEMORY, 0, 2 * w->stream * w->cfg.C * w->size);
    }
    cost_dropout_(w);
}

static inline void cost_embedding(const CostWalk* w) {
    cost_add(w, COST_MEMORY, 0, embedding_forward_bytes(w->stream, w->cfg.C, w->size));
    cost_embedding_factor_(w);
}

static inline void cost_embedding_backward(const CostWalk* w) {
    const double ids = fmin(w->N, w->cfg.V);
    if (!freeze_has(w->freeze, cost_row_(w, offsetof(ModelParameters, wte)), 0)) {
        cost_add(w, COST_MEMORY, 0,
                 embedding_backward_bytes(w->N, w->cfg.C, ids, w->size, w->gradient_bytes));
        cost_embedding_factor_(w);
    }
}

// ---- norm.h ----

static inline void cost_norm(const CostWalk* w) {
    cost_add(w, COST_NORMS, 0, norm_forward_bytes(w->stream, w->cfg.C, w->size));
}

static inline void cost_norm_backward(const CostWalk* w) {
    cost_add(w, COST_NORMS, 0, norm_backward_bytes(w->stream, w->cfg.C, w->size, 0));
}

// ---- stream.h ----

static inline void cost_stream(const CostWalk* w) {
    if (w->cfg.has_scales) {
        cost_add(w, COST_MEMORY, 0, stream_scale_bytes(w->stream * w->cfg.C, w->size));
    }
}

static inline void cost_stream_backward(const CostWalk* w) {
    cost_stream(w); // computed again
    if (w->cfg.has_scales) {
        cost_add(w, COST_MEMORY, 0, stream_scale_backward_bytes(w->stream * w->cfg.C, w->size));
    }
}

// ---- branch.h ----

// Adds the norm before a branch, if there is one.
static inline void cost_branch(const CostWalk* w) {
    if (model_has_norms_before(w->cfg)) {
        cost_norm(w);
    }
}

// Adds both ends of a branch in the backward pass: the norm before it, or a sum, and the norm after
// it, or a factor.
static inline void cost_branch_backward(const CostWalk* w) {
    const double row_bytes = w->stream * w->cfg.C * w->size;
    if (model_has_norms_before(w->cfg)) {
        cost_norm_backward(w);
    } else {
        cost_add(w, COST_MEMORY, 0, 3 * row_bytes);
    }
    if (model_has_norms_after(w->cfg)) {
        cost_add(w, COST_NORMS, 0, 3 * row_bytes); // dinp is set
    } else if (model_residual_factor(w->cfg) != 1 && w->cfg.dropout == 0) {
        cost_add(w, COST_MEMORY, 0, 2 * row_bytes);
    }
    cost_dropout_(w);
}

// ---- self_attention.h, with the projection after it ----

// Add what a value embedding costs before attention, and after it in the backward pass: as much,
// and the gradient of a table, as an embedding's.
static inline void cost_values_(const CostWalk* w) {
    if (model_layer_has(w->cfg, LAYERS_VALUES, w->l)) {
        cost_add(w, COST_MEMORY, 0, value_embedding_bytes(w->N, model_keys(w->cfg), w->size));
    }
}
static inline void cost_values_backward_(const CostWalk* w) {
    const double ids = fmin(w->N, w->cfg.V);
    cost_values_(w);
    if (model_layer_has(w->cfg, LAYERS_VALUES, w->l)) {
        cost_add(w, COST_MEMORY, 0,
                 embedding_backward_bytes(w->N, model_keys(w->cfg), ids, w->size, w->gradient_bytes) / 2);
    }
}

// Adds a pass of attention with these FLOP and bytes for a sequence without a window.
static inline void cost_attention_(const CostWalk* w, double flops, double bytes) {
    const double B = w->N / w->T, of_key = (model_heads(w->cfg) + model_attention_values(w->cfg)) / 2.0,
                 all = of_key * w->T, seen = model_attention_products(w->cfg, w->l, (int)w->T);
    cost_add(w, COST_ATTENTION, B * flops * (seen / all), B * bytes);
}

// Returns the bytes of a pass over queries, keys and values and what latents make of them, and over
// the values.
static inline double cost_latent_bytes_(const CostWalk* w) {
    const ModelWidths of = model_widths(w->cfg);
    return w->N * w->size * (of.Q + 2.0 * of.latent_up + of.QKV + of.values + of.Q);
}

// Add what latents cost between the first matrix and attention, if there are any.
static inline void cost_latent_(const CostWalk* w) {
    const ModelConfig cfg = w->cfg;
    if (!model_has_latent(cfg)) {
        return;
    }
    cost_add(w, COST_NORMS, 0, norm_forward_bytes(w->N, cfg.latent.rank + cfg.latent.query_rank, w->size));
    if (cfg.latent.query_rank > 0) {
        cost_linear_(w, offsetof(ModelParameters, qupw));
    }
    cost_linear_(w, offsetof(ModelParameters, kvupw));
    cost_add(w, COST_MEMORY, 0, cost_latent_bytes_(w));
}
static inline void cost_latent_backward_(const CostWalk* w) {
    const ModelConfig cfg = w->cfg;
    const size_t none = offsetof(ModelParameters, qkvb); // there are no biases
    if (!model_has_latent(cfg)) {
        return;
    }
    cost_add(w, COST_MEMORY, 0, cost_latent_bytes_(w));
    if (cfg.latent.query_rank > 0) {
        cost_linear_backward_(w, offsetof(ModelParameters, qupw), none);
    }
    cost_linear_backward_(w, offsetof(ModelParameters, kvupw), none);
    cost_add(w, COST_NORMS, 0,
             norm_backward_bytes(w->N, cfg.latent.rank + cfg.latent.query_rank, w->size, 0));
}

static inline void cost_self_attention(const CostWalk* w) {
    const AttentionSizes sizes = attention_config_sizes(w->cfg, 1, (int)w->T);
    cost_linear_(w, offsetof(ModelParameters, qkvw));
    cost_latent_(w);
    cost_values_(w);
    cost_attention_(w, attention_forward_flops(sizes), attention_forward_bytes(sizes, w->size));
    cost_residual_(w, offsetof(ModelParameters, attprojw));
    cost_sum_of_parts(w);
}

static inline void cost_self_attention_backward(const CostWalk* w) {
    const AttentionSizes sizes = attention_config_sizes(w->cfg, 1, (int)w->T);
    cost_linear_backward_(w, offsetof(ModelParameters, attprojw), offsetof(ModelParameters, attprojb));
    cost_attention_(w, attention_backward_flops(sizes), attention_backward_bytes(sizes, w->size));
    cost_latent_backward_(w);
    cost_values_backward_(w);
    cost_linear_backward_(w, offsetof(ModelParameters, qkvw), offsetof(ModelParameters, qkvb));
    cost_sum_of_parts(w);
}

// ---- mlp.h ----

static inline void cost_activation_(const CostWalk* w, double elements) {
    cost_add(w, COST_ACTIVATION, 0, activation_forward_bytes(elements, w->size, model_activation(w->cfg)));
}

// Return the elements of the hidden layers of a layer's MLP or experts, and of its shared expert.
static inline double cost_units_(const CostWalk* w) {
    return cost_hidden_rows_(w) * (cost_has_experts_(w) ? model_expert_hidden(w->cfg) : model_hidden(w->cfg));
}
static inline double cost_shared_units_(const CostWalk* w) {
    return cost_has_experts_(w) ? w->N * w->cfg.Fs : 0;
}

// Returns 1 if ranks divide the experts of the layer.
static inline int cost_divides_experts_(const CostWalk* w) {
    return cost_has_experts_(w) && model_divides_experts(w->cfg);
}

// Return the matrices into the hidden layer of the MLP or the experts, and out of it.
static inline size_t cost_fc_(const CostWalk* w) {
    return cost_has_experts_(w) ? offsetof(ModelParameters, efcw) : offsetof(ModelParameters, fcw);
}
static inline size_t cost_fcproj_(const CostWalk* w) {
    return cost_has_experts_(w) ? offsetof(ModelParameters, efcprojw) : offsetof(ModelParameters, fcprojw);
}

// Return their biases.
static inline size_t cost_fc_bias_(const CostWalk* w) {
    return cost_has_experts_(w) ? offsetof(ModelParameters, efcb) : offsetof(ModelParameters, fcb);
}
static inline size_t cost_fcproj_bias_(const CostWalk* w) {
    return cost_has_experts_(w) ? offsetof(ModelParameters, efcprojb) : offsetof(ModelParameters, fcprojb);
}

// Adds the activations that passes keep: divided experts keep none.
static inline void cost_mlp_activation(const CostWalk* w) {
    cost_activation_(w, (cost_divides_experts_(w) ? 0 : cost_units_(w)) + cost_shared_units_(w));
}

// Adds the hidden layers of divided experts, which each pass computes.
static inline void cost_divided_hidden_(const CostWalk* w) {
    if (cost_divides_experts_(w)) {
        cost_linear_(w, cost_fc_(w));
        cost_activation_(w, cost_units_(w));
    }
}

// Adds a pass over rows of C channels: the experts' rows, and `of_tokens` of each token.
static inline void cost_expert_rows_(const CostWalk* w, double of_experts, double of_tokens) {
    const double rows = of_experts * cost_hidden_rows_(w) + of_tokens * w->N;
    cost_add(w, COST_MEMORY, 0, rows * w->cfg.C * w->size);
}

// Adds a pass over the logits of the router.
static inline void cost_router_(const CostWalk* w, int arrays) {
    cost_add(w, COST_MEMORY, 0, arrays * w->N * w->cfg.E * sizeof(float));
}

static inline void cost_mlp_hidden(const CostWalk* w) {
    if (cost_has_experts_(w)) {
        cost_linear_(w, offsetof(ModelParameters, routerw));
        cost_router_(w, 1);
        cost_expert_rows_(w, 2, 0); // gather
    }
    if (cost_shared_units_(w) > 0) {
        cost_linear_(w, offsetof(ModelParameters, sfcw));
    }
    if (!cost_divides_experts_(w)) {
        cost_linear_(w, cost_fc_(w));
    }
    cost_mlp_activation(w);
}

static inline void cost_mlp(const CostWalk* w) {
    cost_divided_hidden_(w);
    if (cost_has_experts_(w)) {
        cost_expert_rows_(w, 1, 1); // sum of each token's rows
    }
    if (cost_shared_units_(w) > 0) {
        cost_linear_(w, offsetof(ModelParameters, sfcprojw));
    }
    cost_residual_(w, cost_fcproj_(w));
    cost_sum_of_parts(w);
}

// Adds the work of experts besides their matmuls: two gathers, the sum of the gradients of each
// token, and the router.
static inline void cost_experts_backward_(const CostWalk* w) {
    cost_expert_rows_(w, 2, 0);
    cost_expert_rows_(w, 2, 0);
    cost_expert_rows_(w, 1, 2);
    cost_router_(w, 2);
    cost_linear_backward_(w, offsetof(ModelParameters, routerw), offsetof(ModelParameters, routerwb));
}

static inline void cost_mlp_backward(const CostWalk* w) {
    const double elements = cost_units_(w) + cost_shared_units_(w);
    cost_divided_hidden_(w);
    cost_linear_backward_(w, cost_fcproj_(w), cost_fcproj_bias_(w));
    cost_add(w, COST_ACTIVATION, 0, activation_backward_bytes(elements, w->size, model_activation(w->cfg)));
    cost_linear_backward_(w, cost_fc_(w), cost_fc_bias_(w));
    cost_sum_of_parts(w);
    if (cost_has_experts_(w)) {
        cost_experts_backward_(w);
    }
    if (cost_shared_units_(w) > 0) {
        cost_linear_backward_(w, offsetof(ModelParameters, sfcprojw), offsetof(ModelParameters, fcprojb));
        cost_linear_backward_(w, offsetof(ModelParameters, sfcw), offsetof(ModelParameters, fcb));
        cost_expert_rows_(w, 0, 3); // sum with the other gradients
    }
}

// ---- lm_head.h ----

// Returns the row of the classifier's matrix.
static inline const TensorRow* cost_head_(const CostWalk* w) {
    const size_t member = w->cfg.has_head ? offsetof(ModelParameters, head) : offsetof(ModelParameters, wte);
    return &w->rows[cost_row_(w, member)];
}

// Returns the walk in parts of `chunk` tokens.
static inline CostWalk cost_chunks_(const CostWalk* w, double chunk) {
    CostWalk part = *w;
    part.times = w->times * ceil(w->N / chunk);
    part.N = w->N * w->times / part.times;
    return part;
}

// Adds the logits of a teacher, and the divergence from it.
static inline void cost_teaching(const CostWalk* teacher, double chunk) {
    const CostWalk part = cost_chunks_(teacher, chunk);
    cost_matmul_(&part, cost_head_(teacher), 0);
    cost_add(&part, COST_CLASSIFIER, 0, distill_bytes(part.N, teacher->cfg.V, teacher->size));
}

// Adds both passes of the classifier, `chunk` tokens at a time.
static inline void cost_lm_head(const CostWalk* w, double chunk) {
    const CostWalk part = cost_chunks_(w, chunk);
    const TensorRow* weight = cost_head_(w);
    cost_matmul_(&part, weight, 0);
    cost_add(&part, COST_CLASSIFIER, 0, cross_entropy_backward_bytes(part.N, w->cfg.Vp, w->size));
    cost_matmul_(&part, weight, 1);
    if (!freeze_has_classifier(w->freeze, w->cfg)) {
        cost_gradient_(&part, weight);
    }
}

#endif
