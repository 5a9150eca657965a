/*
qk_clip.h -- QK clip: after an update, the weights of a head whose attention scores grew too large
are scaled until the scores of that update would reach the limit and no more.

    S_h     the largest score (q . k / root) of head h of queries in the update's forward passes:
            over all tokens but padding, all micro-steps, and all ranks; a sink is no score
    r_h     min(1, limit / S_h), by which the scores of head h shrink
    c_j     sqrt(max r_h over the heads h that read head j of keys)

    weights and biases of the keys of head j       times c_j
    weights and biases of the queries of head h    times r_h / c_j

So each score of head h has the factor r_h, whatever the other heads of its group need: the keys
take no more than all of them need, the queries the rest. With as many heads of keys as of queries
both take sqrt(r_h). Rotation by positions is linear, and keeps the factors.

With latents (latent.h) a head's channels that do not turn take sqrt(r_h) in queries and in keys.
The turning key belongs to all heads and stays; the queries of these channels take r_h.

Layers that share their weights have one S_h, the largest of all. The state of the optimizer stays
as it is.

Kimi Team, "Kimi K2", arXiv 2507.20534, section 2.1; groups of heads are our own.
*/
#ifndef LLMC_QK_CLIP_H
#define LLMC_QK_CLIP_H

#include <stddef.h>

#include "llmc/layers/attention_config.h"
#include "llmc/model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

// Tensors that a clip scales, and their rows among the parameters.
enum { QK_CLIP_TENSORS = 4 };
static inline int qk_clip_row(int i) {
    static const size_t members[QK_CLIP_TENSORS] = {
        offsetof(ModelParameters, qkvw), offsetof(ModelParameters, qkvb), offsetof(ModelParameters, qupw),
        offsetof(ModelParameters, kvupw)};
    return (int)(members[i] / sizeof(floatX*));
}

// Clips the heads of layer l of this process's part of the model, if it is the first of those that
// share its weights, in the parameters of that layer. `scores` (layers, heads) are those of the
// whole model. Returns true if it has changed any weight.
int qk_clip_layer_cpu(const ModelParameters* p, ModelConfig part, int l, const double* scores, float limit);

// Rows of the tensors of a layer that a clip scales, and where the factors of each tensor begin
// among those of the layer: the bias of qkv has those of its weight.
typedef struct {
    int rows, at[QK_CLIP_TENSORS];
} QkClipFactors;
QkClipFactors qk_clip_factors(ModelConfig part);

// Sets the factors (rows) by which qk_clip_layer_cpu multiplies the rows of layer l. Returns the
// same.
int qk_clip_layer_factors(float* factors, ModelConfig part, int l, const double* scores, float limit);

#ifdef __cplusplus
}
#endif

#ifdef QK_CLIP_IMPLEMENTATION

#include <math.h>
#include <string.h>

// Scales `count` rows of a matrix, from row `first` on. data NULL: there is none.
static void qk_clip_rows_(float* data, size_t cols, int first, int count, double factor) {
    float* rows = data ? data + (size_t)first * cols : NULL;
    for (size_t i = 0; rows && factor != 1 && i < (size_t)count * cols; i++) {
        rows[i] *= (float)factor;
    }
}

// The heads of a layer, and of those that share its weights.
typedef struct {
    const ModelParameters* p;
    ModelConfig cfg; // of this process's part
    int l;
    const double* scores; // of the whole model
    double limit;
    int is_of_factors; // p has a factor in place of each row
} QkClipLayer_;

// Returns the elements of a row of `cols`.
static size_t qk_clip_cols_(const QkClipLayer_* layer, int cols) {
    return layer->is_of_factors ? 1 : (size_t)cols;
}

// Returns r_h.
static double qk_clip_shrink_(const QkClipLayer_* layer, int h) {
    const ModelConfig cfg = layer->cfg;
    double largest = 0;
    for (int l = layer->l; l < cfg.L; l++) {
        if (model_group(cfg, l) == model_group(cfg, layer->l)) {
            largest = fmax(largest, attention_config_scores_at((double*)layer->scores, cfg, l)[h]);
        }
    }
    return largest > layer->limit ? layer->limit / largest : 1;
}

// Scales the queries and keys of the heads that read head j of keys.
static void qk_clip_group_(const QkClipLayer_* layer, int j) {
    const ModelConfig cfg = layer->cfg;
    const ModelParameters* p = layer->p;
    const int HS = model_head_size(cfg), group = cfg.NH / model_key_heads(cfg), first = j * group,
              key = (cfg.NH + j) * HS;
    const size_t C = qk_clip_cols_(layer, cfg.C);
    double most = 0;
    for (int h = first; h < first + group; h++) {
        most = fmax(most, qk_clip_shrink_(layer, h));
    }
    qk_clip_rows_(p->qkvw, C, key, HS, sqrt(most));
    qk_clip_rows_(p->qkvb, 1, key, HS, sqrt(most));
    for (int h = first; h < first + group; h++) {
        const double factor = qk_clip_shrink_(layer, h) / sqrt(most);
        qk_clip_rows_(p->qkvw, C, h * HS, HS, factor);
        qk_clip_rows_(p->qkvb, 1, h * HS, HS, factor);
    }
}

// Scales head h of a model with latents: of its HS channels the first D turn.
static void qk_clip_latent_(const QkClipLayer_* layer, int h) {
    const ModelParameters* p = layer->p;
    const LatentSizes s = attention_config_latents(layer->cfg, 0);
    const size_t cols = qk_clip_cols_(layer, s.query_rank > 0 ? s.query_rank : layer->cfg.C);
    const double shrink = qk_clip_shrink_(layer, h);
    float* queries = s.query_rank > 0 ? p->qupw : p->qkvw;
    qk_clip_rows_(queries, cols, h * s.HS, s.D, shrink);
    qk_clip_rows_(queries, cols, h * s.HS + s.D, s.HS - s.D, sqrt(shrink));
    qk_clip_rows_(p->kvupw, qk_clip_cols_(layer, s.rank), h * latent_head_up(s), s.HS - s.D, sqrt(shrink));
}

// Clips the heads of a layer, if it is the first of those that share its weights.
static int qk_clip_layer_(const QkClipLayer_* layer) {
    const ModelConfig part = layer->cfg;
    const int l = layer->l;
    int clips = 0;
    if (!model_layer_has(part, LAYERS_ATTENTION, l) || model_group_layer(part, model_group(part, l)) != l) {
        return 0;
    }
    for (int h = 0; h < part.NH; h++) {
        clips |= qk_clip_shrink_(layer, h) < 1;
    }
    for (int h = 0; h < part.NH && clips && model_has_latent(part); h++) {
        qk_clip_latent_(layer, h);
    }
    for (int j = 0; j < model_key_heads(part) && clips && !model_has_latent(part); j++) {
        qk_clip_group_(layer, j);
    }
    return clips;
}

int qk_clip_layer_cpu(const ModelParameters* p, ModelConfig part, int l, const double* scores, float limit) {
    const QkClipLayer_ layer = {p, part, l, scores, (double)limit, 0};
    return qk_clip_layer_(&layer);
}

QkClipFactors qk_clip_factors(ModelConfig part) {
    const ModelWidths w = model_widths(part);
    const QkClipFactors of = {w.first + w.latent_q + w.latent_up, {0, 0, w.first, w.first + w.latent_q}};
    return of;
}

int qk_clip_layer_factors(float* factors, ModelConfig part, int l, const double* scores, float limit) {
    const QkClipFactors of = qk_clip_factors(part);
    ModelParameters p;
    memset(&p, 0, sizeof(p));
    p.qkvw = factors, p.qupw = factors + of.at[2], p.kvupw = factors + of.at[3];
    for (int i = 0; i < of.rows; i++) {
        factors[i] = 1;
    }
    const QkClipLayer_ layer = {&p, part, l, scores, (double)limit, 1};
    return qk_clip_layer_(&layer);
}

#endif // QK_CLIP_IMPLEMENTATION

#endif
