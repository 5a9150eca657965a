/*
reference_model.h -- a whole model of the operations in reference.h: its loss, and the gradients.
*/
#ifndef LLMC_REFERENCE_MODEL_H
#define LLMC_REFERENCE_MODEL_H

#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/model/model.h"
#include "llmc/reference.h"
#include "llmc/reference_latent.h"
#include "llmc/reference_recurrent.h"

// Parameters of the table in model.h. The struct points to the tensors of one layer.
#define REF_MEMBER_(name, ...) Real* name;
typedef struct {
    MODEL_PARAMETERS(REF_MEMBER_)
} RefParameters;

// Sizes of a model, and the numbers in its formulas.
typedef struct {
    size_t B, T, N, C, NH, KV, HS, Q, QKV, F, Fe, V, Vp;
    size_t G;             // columns before the activation for each one after it: 2 with gates
    size_t E, Fs;         // experts, or 0; hidden units of the shared expert
    size_t before, after; // 1 if branches have a norm there
    // of mixers: sizes of the delta rule, columns of activations; of gates of attention
    size_t Hk, Hv, dk, dv, taps, mix_rows, mix_channels, mix_conv, mix_values, mix_out, gate;
    size_t first, values; // rows of attention's first matrix, columns of its result
    size_t query_rank, rank, latent_q, latent_up, padded; // of latents, or 0
    // columns that make the gates of value embeddings; of the stream with scales; or 0
    size_t gates, scaled;
    size_t A; // most columns of a layer's hidden layers: F, or Fe of each expert
    const Architecture* kinds;
} RefSizes;

static inline RefSizes ref_sizes(ModelConfig cfg, size_t B, size_t T) {
    const Architecture* kinds = model_architecture(cfg.arch);
    const size_t NH = (size_t)cfg.NH, KV = (size_t)model_key_heads(cfg), HS = (size_t)model_head_size(cfg),
                 F = (size_t)model_hidden(cfg);
    RefSizes s; // all members are set
    s.B = B, s.T = T, s.N = B * T, s.C = (size_t)cfg.C;
    s.NH = NH, s.KV = KV, s.HS = HS, s.Q = NH * HS, s.QKV = (NH + 2 * KV) * HS;
    s.F = F, s.V = (size_t)cfg.V, s.Vp = (size_t)cfg.Vp;
    s.G = (size_t)activation_gates(kinds->activation);
    s.E = (size_t)cfg.E, s.Fs = (size_t)cfg.Fs;
    s.Fe = (size_t)model_expert_hidden(cfg);
    s.A = s.E * s.Fe > F ? s.E * s.Fe : F;
    const ModelWidths w = model_widths(cfg);
    s.Hk = (size_t)cfg.mixer.key_heads, s.Hv = (size_t)w.mix_heads;
    s.dk = (size_t)cfg.mixer.key_size, s.dv = (size_t)cfg.mixer.value_size, s.taps = (size_t)w.mix_taps;
    s.mix_rows = (size_t)w.mix_rows, s.mix_channels = (size_t)w.mix_channels, s.mix_conv = (size_t)w.mix_conv;
    s.mix_values = (size_t)w.mix_values, s.mix_out = (size_t)w.mix_out, s.gate = (size_t)w.gate;
    s.first = (size_t)w.first, s.values = (size_t)w.values, s.query_rank = (size_t)w.query_rank;
    s.rank = (size_t)w.rank, s.latent_q = (size_t)w.latent_q, s.latent_up = (size_t)w.latent_up;
    s.padded = (size_t)(w.rank > 0 ? w.values : 0);
    s.gates = (size_t)w.value_gates;
    s.scaled = (size_t)w.scaled_C;
    s.before = (size_t)model_has_norms_before(cfg), s.after = (size_t)model_has_norms_after(cfg);
    s.kinds = kinds;
    return s;
}

static inline size_t ref_qk_rstd_(RefSizes s) {
    const HeadsKind kind = s.kinds->heads;
    return ref_normed_(kind, s.NH, s.HS).rows + ref_normed_(kind, s.KV, s.HS).rows;
}

// clang-format off
// Activations: name, layers, columns for each of N = B*T tokens; without columns, the model does
// not have it. The gradients of the activations are a second such set.
#define REF_ACTIVATIONS(X)                                                                                    \
    X(embedded,      1,     s.kinds->embedding == EMBEDDING_NORM ? s.C : 0)  /* (B, T, C)   the embedding, if it has a norm */ \
    X(embedded_rstd, 1,     s.kinds->embedding == EMBEDDING_NORM)   /* (B, T)      */                         \
    X(stream,        L + 1, s.C)   /* (B, T, C)   the residual stream that enters block l, after the last one too */ \
    X(scaled,        L,     s.scaled)                               /* (B, T, C)   what it reads */ \
    X(ln1,           L,     s.before ? s.C : 0)                     /* (B, T, C)   */                         \
    X(ln1_mean,      L,     norm_parts(s.kinds->norm).has_mean && s.before) /* (B, T) */                      \
    X(ln1_rstd,      L,     s.before)                                   /* (B, T)      */                         \
    X(first,         L,     s.rank ? s.first : 0)                   /* (B, T, R)   of latents: output of the first matrix */ \
    X(latent_q,      L,     s.query_rank)                           /* (B, T, query_rank) */ \
    X(latent_kv,     L,     s.rank)                                 /* (B, T, rank) */ \
    X(latent_q_norm, L,     s.query_rank)                           /* (B, T, query_rank) */ \
    X(latent_kv_norm, L,    s.rank)                                 /* (B, T, rank) */ \
    X(latent_q_rstd, L,     s.query_rank > 0)                       /* (B, T)      */ \
    X(latent_kv_rstd, L,    s.rank > 0)                             /* (B, T)      */ \
    X(latent_queries, L,    s.latent_q)                             /* (B, T, NH, HS) */ \
    X(latent_up,     L,     s.latent_up)                            /* (B, T, NH, P + V) */ \
    X(values,        L,     s.padded)                               /* (B, T, NH, V) */ \
    X(qkv,           L,     s.QKV)                                  /* (B, T, QKV) */                         \
    X(normed,        L,     s.QKV)                                  /* (B, T, QKV) after the norm of heads */ \
    X(qk_rstd,       L,     ref_qk_rstd_(s))                        /* (B, T, NH + KV), or (B, T, 2) */       \
    X(turned,        L,     s.QKV)                                  /* (B, T, QKV) after the rotation */      \
    X(atty,          L,     s.Q)                                    /* (B, T, NH, HS)  what the heads see */  \
    X(att_lse,       L,     s.NH)                                   /* (B, NH, T)  */                         \
    X(att_gate,      L,     s.gate)                                 /* (B, T, Q)   gates of atty */ \
    X(gated,         L,     s.gate)                                 /* (B, T, Q)   atty with them */ \
    X(mix,           L,     s.mix_rows)                             /* (B, T, R)   input of a mixer's convolution */ \
    X(mixconv,       L,     s.mix_conv)                             /* (B, T, R)   of the delta rule, its output */ \
    X(mixz,          L,     s.mix_values)                           /* (B, T, Hv dv) */ \
    X(mixba,         L,     2 * s.Hv)                               /* (B, T, 2 Hv) */ \
    X(mixo,          L,     s.mix_values)                           /* (B, T, Hv dv) output of the delta rule */ \
    X(mix_states,    L,     s.Hv * s.dk * s.dv)                     /* (B, T, Hv, dk, dv) */ \
    X(mix_rstd,      L,     s.Hv)                                   /* (B, T, Hv)  */ \
    X(mixy,          L,     s.mix_out)                              /* (B, T, Hv dv) or (B, T, C) */ \
    X(attproj,       L,     s.C)                                    /* (B, T, C)   what attention adds to the stream */ \
    X(ln1post,       L,     s.after ? s.C : 0)                      /* (B, T, C)   */                         \
    X(ln1post_rstd,  L,     s.after)                                /* (B, T)      */                         \
    X(residual2,     L,     s.C)                                    /* (B, T, C)   the stream after attention */ \
    X(ln2,           L,     s.before ? s.C : 0)                     /* (B, T, C)   */                         \
    X(ln2_mean,      L,     norm_parts(s.kinds->norm).has_mean && s.before) /* (B, T) */                      \
    X(ln2_rstd,      L,     s.before)                                   /* (B, T)      */                         \
    X(router_logits, L,     s.E)                                    /* (B, T, E)   */                         \
    X(expert_weights, L,    s.E)                                    /* (B, T, E)   */                         \
    X(fch,           L,     s.G * s.A)                              /* (B, T, E, G, F)  the hidden layer of each MLP */ \
    X(fch_act,       L,     s.A)                                    /* (B, T, E, F) */                        \
    X(sfch,          L,     s.G * s.Fs)                             /* (B, T, G, Fs) of the shared expert */  \
    X(sfch_act,      L,     s.Fs)                                   /* (B, T, Fs)  */                         \
    X(shared,        L,     s.Fs > 0 ? s.C : 0)                     /* (B, T, C)   its output */              \
    X(routed,        L,     s.Fs > 0 ? s.C : 0)                     /* (B, T, C)   the others' */             \
    X(fcproj,        L,     s.C)                                    /* (B, T, C)   what the MLP adds to the stream */ \
    X(ln2post,       L,     s.after ? s.C : 0)                      /* (B, T, C)   */                         \
    X(ln2post_rstd,  L,     s.after)                                /* (B, T)      */                         \
    X(lnf,           1,     s.C)                                    /* (B, T, C)   */                         \
    X(lnf_mean,      1,     norm_parts(s.kinds->norm).has_mean)    /* (B, T)      */                         \
    X(lnf_rstd,      1,     1)                                      /* (B, T)      */                         \
    X(logits,        1,     s.Vp)                                   /* (B, T, Vp)  */                         \
    X(logits_lse,    1,     1)                                      /* (B, T)      */                         \
    X(losses,        1,     1)                                      /* (B, T)      */
// clang-format on

typedef struct {
    REF_ACTIVATIONS(REF_MEMBER_)
} RefActivations;
#undef REF_MEMBER_

typedef struct {
    ModelConfig cfg;
    RefSizes sizes;
    Real eps, softcap, z_loss;            // of norms; of the classifier
    Real embedding_factor;                // not rounded
    Real router_balance, router_z;        // weights of the router's losses
    const int* lengths;                   // (B) tokens of each row, the rest is padding; NULL: T
    Real* frequency[2];                   // (HS / 2) of rotary positions; of layers with a window
    TensorRow rows[MODEL_PARAMETER_ROWS]; // layout of the tensors of params and grads
    size_t parameter_bytes, activation_bytes;
    Real *params, *grads, *acts, *dacts;
    const int* tokens; // (B, T) of the pass
} RefModel;

// Returns the tensors of layer l in `memory`, which is params or grads; tensors that all layers
// share are the same for every l.
static inline RefParameters ref_parameters_(const RefModel* m, Real* memory, int l) {
    RefParameters p;
    const TensorRow* row = m->rows;
// for each row of the table: p.wte = its address, then the next row
#define REF_TENSOR_(name, ...)                                                                               \
    p.name = row->layers > 0 && tensor_has_layer(row, l)                                                     \
                 ? (Real*)tensor_at_layer(row, memory, tensor_copy(row, l))                                  \
                 : NULL;                                                                                     \
    row++;
    MODEL_PARAMETERS(REF_TENSOR_)
#undef REF_TENSOR_
    return p;
}

// Returns the tensors of layer l in acts or dacts.
static inline RefActivations ref_activations_(const RefModel* m, Real* memory, int l) {
    const RefSizes s = m->sizes;
    const size_t L = (size_t)m->cfg.L;
    RefActivations a;
// for each activation: a.stream = its address at layer l; then `memory` moves past all its layers
#define REF_TENSOR_(name, layers, cols)                                                                      \
    a.name = (cols) > 0 ? memory + ((layers) == 1 ? 0 : (size_t)l * s.N * (size_t)(cols)) : NULL;            \
    memory += (size_t)(layers)*s.N * (size_t)(cols);
    REF_ACTIVATIONS(REF_TENSOR_)
#undef REF_TENSOR_
    return a;
}

// Returns the settings of rotary positions, or of those of layers with a window. They point into m.
static inline RopeSettings ref_rope_settings_(const RefModel* m, int is_window) {
    const ModelConfig* cfg = &m->cfg;
    return (RopeSettings){.HS = model_head_size(*cfg),
                          .dims = model_rope_dims(*cfg),
                          .base = is_window ? cfg->window_rope_base : model_rope_base(*cfg),
                          .scaling = is_window ? cfg->window_scaling : cfg->scaling,
                          .factors = &cfg->rope_factors};
}

static inline void ref_open_frequencies_(RefModel* m) {
    const size_t HS = (size_t)model_head_size(m->cfg);
    for (int w = 0; w < 2; w++) {
        const int is_there =
            m->sizes.kinds->positions == POSITIONS_ROPE && (w == 0 || m->cfg.window_rope_base > 0);
        m->frequency[w] =
            is_there ? (Real*)check_alloc(HS / 2, sizeof(Real), "reference: frequencies") : NULL;
        if (is_there) {
            ref_rope_frequencies(m->frequency[w], m->sizes.T, ref_rope_settings_(m, w));
        }
    }
}

// Returns the rotary positions of layer l.
static inline RefRope ref_rope_of_(const RefModel* m, int l) {
    const int is_window = model_window(m->cfg, l) > 0 && m->cfg.window_rope_base > 0,
              rests = layer_is_in(m->cfg.unrotated, l);
    const RopeScaling scaling = ref_rope_settings_(m, is_window).scaling;
    return (RefRope){rests ? NULL : m->frequency[is_window], scaling.attention > 0 ? scaling.attention : 1};
}

// Opens a model whose parameters are zero. The caller may change eps, the weights of losses, and
// lengths.
static inline void ref_model_open(RefModel* m, ModelConfig cfg, size_t B, size_t T) {
    const RefSizes s = ref_sizes(cfg, B, T);
    const size_t L = (size_t)cfg.L;
#define REF_COUNT_(name, layers, cols) +(size_t)(layers) * (size_t)(cols)
    m->cfg = cfg;
    m->sizes = s;
    m->eps = model_norm_eps(cfg);
    m->softcap = cfg.softcap;
    m->embedding_factor = model_architecture(cfg.arch)->embedding == EMBEDDING_ROOT ? sqrt(cfg.C)
                          : cfg.embedding_factor > 0                                ? cfg.embedding_factor
                                                                                    : 1;
    m->z_loss = m->router_balance = m->router_z = 0;
    m->lengths = NULL;
    ref_open_frequencies_(m);
    m->parameter_bytes = model_parameter_rows_of(m->rows, cfg, sizeof(Real));
    m->activation_bytes = s.N * (0 REF_ACTIVATIONS(REF_COUNT_)) * sizeof(Real);
    m->params = (Real*)check_alloc(m->parameter_bytes, 1, "reference: parameters");
    m->grads = (Real*)check_alloc(m->parameter_bytes, 1, "reference: gradients");
    m->acts = (Real*)check_alloc(m->activation_bytes, 1, "reference: activations");
    m->dacts = (Real*)check_alloc(m->activation_bytes, 1, "reference: gradients of activations");
#undef REF_COUNT_
}

static inline void ref_model_close(RefModel* m) {
    free(m->dacts);
    free(m->acts);
    free(m->grads);
    free(m->params);
    free(m->frequency[0]);
    free(m->frequency[1]);
}

static inline RefRouter ref_router_of_(const RefModel* m, const RefParameters* p, const int* starts) {
    const RefSizes s = m->sizes;
    return (RefRouter){.kind = s.kinds->router,
                       .B = s.B,
                       .T = s.T,
                       .E = s.E,
                       .used = (size_t)m->cfg.E_used,
                       .factor = model_router_factor(m->cfg),
                       .balance = m->router_balance,
                       .z_loss = m->router_z,
                       .bias = p->routerb,
                       .starts = starts,
                       .lengths = m->lengths,
                       .groups = (size_t)m->cfg.expert_groups,
                       .groups_used = (size_t)m->cfg.expert_groups_used};
}

// Returns the number of tokens of a batch, without padding.
static inline size_t ref_model_tokens_(const RefModel* m) {
    size_t tokens = m->lengths ? 0 : m->sizes.N;
    for (size_t b = 0; m->lengths && b < m->sizes.B; b++) {
        tokens += (size_t)m->lengths[b];
    }
    return tokens;
}

// Sizes of the MLP of a layer, or of its experts.
typedef struct {
    size_t E, F, A, Fs; // experts, or 0; hidden units of each, of all, of the shared one
} RefMlp;

static inline RefMlp ref_mlp_(RefSizes s, const RefParameters* p) {
    return p->efcw ? (RefMlp){s.E, s.Fe, s.E * s.Fe, s.Fs} : (RefMlp){0, s.F, s.F, 0};
}

// Computes the MLP of a block, or its experts: fcproj from ln2.
static inline void ref_mlp_forward_(const RefModel* m, const RefParameters* p, const RefActivations* a) {
    const RefSizes s = m->sizes;
    const RefMlp mlp = ref_mlp_(s, p);
    const size_t N = s.N, C = s.C, F = mlp.F, A = mlp.A, E = mlp.E, Fs = mlp.Fs;
    const ActivationKind kind = s.kinds->activation;
    const RefRouter router = ref_router_of_(m, p, NULL);
    ref_linear_forward(a->fch, a->ln2, E ? p->efcw : p->fcw, E ? p->efcb : p->fcb,
                       (RefLinear){N, C, s.G * A});
    ref_activation_forward(a->fch_act, a->fch, N * A / F, F, kind);
    if (E == 0) {
        ref_linear_forward(a->fcproj, a->fch_act, p->fcprojw, p->fcprojb, (RefLinear){N, F, C});
        return;
    }
    ref_linear_forward(a->router_logits, a->ln2, p->routerw, p->routerwb, (RefLinear){N, C, E});
    ref_router_forward(a->expert_weights, a->router_logits, &router);
    ref_experts_forward(Fs ? a->routed : a->fcproj,
                        (RefExperts){a->fch_act, a->expert_weights, p->efcprojw, p->efcprojb, N, E, F, C});
    if (Fs) { // the shared expert
        ref_linear_forward(a->sfch, a->ln2, p->sfcw, NULL, (RefLinear){N, C, s.G * Fs});
        ref_activation_forward(a->sfch_act, a->sfch, N, Fs, kind);
        ref_linear_forward(a->shared, a->sfch_act, p->sfcprojw, NULL, (RefLinear){N, Fs, C});
        ref_residual_forward(a->fcproj, a->routed, a->shared, 1, N * C);
    }
}

// Goes through the same steps backward.
static inline void ref_mlp_backward_(const RefModel* m, const RefParameters* p, const RefParameters* dp,
                                     const RefActivations* a, const RefActivations* da, const int* starts) {
    const RefSizes s = m->sizes;
    const RefMlp mlp = ref_mlp_(s, p);
    const size_t N = s.N, C = s.C, F = mlp.F, A = mlp.A, E = mlp.E, Fs = mlp.Fs;
    const ActivationKind kind = s.kinds->activation;
    const RefRouter router = ref_router_of_(m, p, starts);
    if (Fs) {
        ref_residual_backward(da->routed, da->shared, da->fcproj, 1, N * C);
        ref_linear_backward(da->sfch_act, dp->sfcprojw, NULL, da->shared, a->sfch_act, p->sfcprojw,
                            (RefLinear){N, Fs, C});
        ref_activation_backward(da->sfch, da->sfch_act, a->sfch, N, Fs, kind);
        ref_linear_backward(da->ln2, dp->sfcw, NULL, da->sfch, a->ln2, p->sfcw, (RefLinear){N, C, s.G * Fs});
    }
    if (E) {
        ref_experts_backward(
            da->fch_act, da->expert_weights, dp->efcprojw, dp->efcprojb, Fs ? da->routed : da->fcproj,
            (RefExperts){a->fch_act, a->expert_weights, p->efcprojw, p->efcprojb, N, E, F, C});
        ref_router_backward(da->router_logits, da->expert_weights, a->router_logits, a->expert_weights,
                            (Real)1 / ref_model_tokens_(m), &router);
        ref_linear_backward(da->ln2, dp->routerw, dp->routerwb, da->router_logits, a->ln2, p->routerw,
                            (RefLinear){N, C, E});
    } else {
        ref_linear_backward(da->fch_act, dp->fcprojw, dp->fcprojb, da->fcproj, a->fch_act, p->fcprojw,
                            (RefLinear){N, F, C});
    }
    ref_activation_backward(da->fch, da->fch_act, a->fch, N * A / F, F, kind);
    ref_linear_backward(da->ln2, E ? dp->efcw : dp->fcw, E ? dp->efcb : dp->fcb, da->fch, a->ln2,
                        E ? p->efcw : p->fcw, (RefLinear){N, C, s.G * A});
}

// Return the heads of layer l, and the norms of its queries and keys.
static inline RefHeads ref_heads_(const RefModel* m, const RefParameters* p, int l) {
    const RefSizes s = m->sizes;
    return (RefHeads){s.B,
                      s.T,
                      s.NH,
                      s.KV,
                      s.HS,
                      (size_t)model_window(m->cfg, l),
                      m->cfg.attention_scale,
                      m->cfg.attention_softcap,
                      p->sinks,
                      NULL};
}
static inline RefHeadNorm ref_head_norm_(const RefModel* m, const RefParameters* p, const RefActivations* a) {
    return (RefHeadNorm){m->sizes.kinds->heads,
                         p->qnormw,
                         p->knormw,
                         a->qk_rstd,
                         m->eps,
                         norm_parts(m->sizes.kinds->norm).offset};
}

// Returns a norm of the rows (N, C).
static inline RefNorm ref_row_norm_(const RefModel* m, const Real* weight, const Real* bias, Real* mean,
                                    Real* rstd) {
    return (RefNorm){m->sizes.kinds->norm, weight, bias, mean, rstd, m->eps, 1, m->sizes.N, m->sizes.C};
}

// Returns the norm of the embedding.
static inline RefNorm ref_embedded_norm_(const RefModel* m, const RefActivations* a) {
    return (RefNorm){NORM_RMS_ALONE, NULL, NULL, NULL, a->embedded_rstd, m->eps, 1, m->sizes.N, m->sizes.C};
}

static inline RefClassifier ref_classifier_(const RefModel* m) {
    return (RefClassifier){m->sizes.N, m->sizes.V, m->sizes.Vp, m->softcap, m->z_loss};
}

// Adds the output of a branch to the stream x: sum = x + factor branch, or with a norm (`normed` is
// not NULL), x + factor norm(branch).
static inline void ref_branch_forward_(const RefModel* m, Real* sum, const Real* x, Real* normed,
                                       const Real* branch, RefNorm norm) {
    const Real factor = m->cfg.residual_factor > 0 ? m->cfg.residual_factor : 1;
    if (normed) {
        ref_norm_forward(normed, branch, norm);
    }
    ref_residual_forward(sum, x, normed ? normed : branch, factor, m->sizes.N * m->sizes.C);
}

static inline void ref_branch_backward_(const RefModel* m, const Real* dsum, Real* dx, Real* dnormed,
                                        Real* dbranch, Real* dweight, const Real* branch, RefNorm norm) {
    const Real factor = m->cfg.residual_factor > 0 ? m->cfg.residual_factor : 1;
    ref_residual_backward(dx, dnormed ? dnormed : dbranch, dsum, factor, m->sizes.N * m->sizes.C);
    if (dnormed) {
        ref_norm_backward(dbranch, dweight, NULL, dnormed, branch, norm);
    }
}

// Returns the activations with the stream in the place of norms before branches that the model
// lacks.
static inline RefActivations ref_in_block_(RefActivations a) {
    a.ln1 = a.ln1 ? a.ln1 : a.stream;
    a.ln2 = a.ln2 ? a.ln2 : a.residual2;
    return a;
}

static inline RefLatent ref_latent_(const RefModel* m) {
    const RefSizes s = m->sizes;
    return (RefLatent){s.N,          s.NH,  s.HS, (size_t)m->cfg.rope_dims, (size_t)m->cfg.latent.value,
                       s.query_rank, s.rank};
}

// Returns the norm of a latent; eps as DeepSeek's code has it.
static inline RefNorm ref_latent_norm_(const RefModel* m, const Real* weight, Real* rstd, size_t C) {
    return (RefNorm){NORM_RMS, weight, NULL, NULL, rstd, 1e-6f, 1, m->sizes.N, C};
}

// Computes qkv of a block with latents from ln1.
static inline void ref_latent_branch_(const RefModel* m, const RefParameters* p, const RefActivations* a) {
    const RefSizes s = m->sizes;
    const RefLatent latent = ref_latent_(m);
    const size_t N = s.N, rank = s.rank, of_queries = ref_latent_queries(latent);
    ref_linear_forward(a->first, a->ln1, p->qkvw, NULL, (RefLinear){N, s.C, s.first});
    ref_latent_columns(a->latent_kv, a->first, latent, of_queries, rank);
    ref_norm_forward(a->latent_kv_norm, a->latent_kv, ref_latent_norm_(m, p->lnkvw, a->latent_kv_rstd, rank));
    ref_linear_forward(a->latent_up, a->latent_kv_norm, p->kvupw, NULL, (RefLinear){N, rank, s.latent_up});
    if (s.query_rank) {
        ref_latent_columns(a->latent_q, a->first, latent, 0, s.query_rank);
        ref_norm_forward(a->latent_q_norm, a->latent_q,
                         ref_latent_norm_(m, p->lnqw, a->latent_q_rstd, s.query_rank));
        ref_linear_forward(a->latent_queries, a->latent_q_norm, p->qupw, NULL,
                           (RefLinear){N, s.query_rank, s.Q});
    }
    ref_latent_heads_forward(a->qkv, a->first, a->latent_queries, a->latent_up, latent);
}

static inline void ref_latent_branch_backward_(const RefModel* m, const RefParameters* p,
                                               const RefParameters* dp, const RefActivations* a,
                                               const RefActivations* da) {
    const RefSizes s = m->sizes;
    const RefLatent latent = ref_latent_(m);
    const size_t N = s.N, rank = s.rank, of_queries = ref_latent_queries(latent);
    ref_latent_heads_backward(da->first, da->latent_queries, da->latent_up, da->qkv, latent);
    if (s.query_rank) {
        ref_linear_backward(da->latent_q_norm, dp->qupw, NULL, da->latent_queries, a->latent_q_norm, p->qupw,
                            (RefLinear){N, s.query_rank, s.Q});
        ref_norm_backward(da->latent_q, dp->lnqw, NULL, da->latent_q_norm, a->latent_q,
                          ref_latent_norm_(m, p->lnqw, a->latent_q_rstd, s.query_rank));
        ref_latent_columns_backward(da->first, da->latent_q, latent, 0, s.query_rank);
    }
    ref_linear_backward(da->latent_kv_norm, dp->kvupw, NULL, da->latent_up, a->latent_kv_norm, p->kvupw,
                        (RefLinear){N, rank, s.latent_up});
    ref_norm_backward(da->latent_kv, dp->lnkvw, NULL, da->latent_kv_norm, a->latent_kv,
                      ref_latent_norm_(m, p->lnkvw, a->latent_kv_rstd, rank));
    ref_latent_columns_backward(da->first, da->latent_kv, latent, of_queries, rank);
    ref_linear_backward(da->ln1, dp->qkvw, NULL, da->first, a->ln1, p->qkvw, (RefLinear){N, s.C, s.first});
}

// Returns what the projection reads: the heads' output, with gates, or without padding.
static inline Real* ref_attention_result_(const RefActivations* a) {
    return a->gated ? a->gated : a->values ? a->values : a->atty;
}

static inline RefValues ref_values_(const RefModel* m) {
    const RefSizes s = m->sizes;
    return (RefValues){s.N, s.C, s.QKV, s.KV, s.HS, s.gates};
}

// Returns the table of layer l among those of all layers, parameters or gradients.
static inline Real* ref_value_table_(const RefModel* m, Real* all, int l) {
    return all + (size_t)model_value_number(m->cfg, l) * m->sizes.V * m->sizes.KV * m->sizes.HS;
}

// Computes attention of a block: attproj from ln1.
static inline void ref_attention_branch_(const RefModel* m, int l, const int* starts, const RefParameters* p,
                                         const RefActivations* a) {
    const RefSizes s = m->sizes;
    const size_t N = s.N, C = s.C;
    const RefHeads heads = ref_heads_(m, p, l);
    if (s.rank) {
        ref_latent_branch_(m, p, a);
    } else {
        ref_linear_forward(a->qkv, a->ln1, p->qkvw, p->qkvb, (RefLinear){N, C, s.QKV});
    }
    if (p->value_gate) {
        ref_values_forward(a->qkv, a->ln1, p->value_gate, ref_value_table_(m, p->value_table, l), m->tokens,
                           ref_values_(m));
    }
    ref_heads_norm_forward(a->normed, a->qkv, ref_head_norm_(m, p, a), heads);
    ref_rope_forward(a->turned, a->normed, ref_rope_of_(m, l), heads);
    ref_attention_forward(a->atty, a->att_lse, a->turned, starts, heads);
    if (p->attgatew) {
        ref_linear_forward(a->att_gate, a->ln1, p->attgatew, NULL, (RefLinear){N, C, s.Q});
        ref_gate_forward(a->gated, a->atty, a->att_gate, N * s.Q);
    }
    if (a->values) {
        ref_latent_values_forward(a->values, a->atty, ref_latent_(m));
    }
    ref_linear_forward(a->attproj, ref_attention_result_(a), p->attprojw, p->attprojb,
                       (RefLinear){N, s.values, C});
}

static inline void ref_attention_branch_backward_(const RefModel* m, int l, const int* starts,
                                                  const RefParameters* p, const RefParameters* dp,
                                                  const RefActivations* a, const RefActivations* da) {
    const RefSizes s = m->sizes;
    const size_t N = s.N, C = s.C;
    const RefHeads heads = ref_heads_(m, p, l);
    ref_linear_backward(ref_attention_result_(da), dp->attprojw, dp->attprojb, da->attproj,
                        ref_attention_result_(a), p->attprojw, (RefLinear){N, s.values, C});
    if (a->values) {
        ref_latent_values_backward(da->atty, da->values, ref_latent_(m));
    }
    if (p->attgatew) {
        ref_gate_backward(da->atty, da->att_gate, da->gated, a->atty, a->att_gate, N * s.Q);
        ref_linear_backward(da->ln1, dp->attgatew, NULL, da->att_gate, a->ln1, p->attgatew,
                            (RefLinear){N, C, s.Q});
    }
    ref_attention_backward(da->turned, dp->sinks, da->atty, a->turned, a->atty, a->att_lse, starts, heads);
    ref_rope_backward(da->normed, da->turned, ref_rope_of_(m, l), heads);
    ref_heads_norm_backward(da->qkv, dp->qnormw, dp->knormw, da->normed, a->qkv, ref_head_norm_(m, p, a),
                            heads);
    if (p->value_gate) {
        ref_values_backward(da->ln1, dp->value_gate, ref_value_table_(m, dp->value_table, l), da->qkv, a->ln1,
                            p->value_gate, ref_value_table_(m, p->value_table, l), m->tokens, ref_values_(m));
    }
    if (s.rank) {
        ref_latent_branch_backward_(m, p, dp, a, da);
    } else {
        ref_linear_backward(da->ln1, dp->qkvw, dp->qkvb, da->qkv, a->ln1, p->qkvw, (RefLinear){N, C, s.QKV});
    }
}

static inline RefConv ref_mixer_conv_(const RefModel* m, const int* starts, const RefParameters* p,
                                      const RefActivations* a) {
    const RefSizes s = m->sizes;
    const ShortConvKind kind = s.mix_conv ? SHORT_CONV_SILU : SHORT_CONV_GATED;
    return (RefConv){kind, s.B, s.T, s.mix_channels, s.taps, starts, a->mix, p->mixconvw, NULL};
}
static inline RefDelta ref_mixer_delta_(const RefModel* m, const int* starts, const RefParameters* p,
                                        const RefActivations* a) {
    const RefSizes s = m->sizes;
    return (RefDelta){s.B,        s.T,      s.Hk,        s.Hv,       s.dk,  s.dv,
                      a->mixconv, a->mixba, p->mixdecay, p->mixstep, starts};
}
static inline RefNorm ref_mixer_norm_(const RefModel* m, const RefParameters* p, const RefActivations* a) {
    const size_t rows = m->sizes.N * m->sizes.Hv;
    return (RefNorm){NORM_RMS, p->mixnormw, NULL, NULL, a->mix_rstd, m->eps, 1, rows, m->sizes.dv};
}

// Computes what layers of a hybrid have in the place of attention (mixer.h).
static inline void ref_mixer_branch_(const RefModel* m, const int* starts, const RefParameters* p,
                                     const RefActivations* a) {
    const RefSizes s = m->sizes;
    const size_t N = s.N, C = s.C;
    const RefConv conv = ref_mixer_conv_(m, starts, p, a);
    const RefDelta delta = ref_mixer_delta_(m, starts, p, a);
    ref_linear_forward(a->mix, a->ln1, p->mixw, NULL, (RefLinear){N, C, s.mix_rows});
    ref_conv_forward(s.mix_conv ? a->mixconv : a->mixy, &conv);
    if (s.mix_conv) {
        ref_linear_forward(a->mixz, a->ln1, p->mixzw, NULL, (RefLinear){N, C, s.mix_values});
        ref_linear_forward(a->mixba, a->ln1, p->mixbaw, NULL, (RefLinear){N, C, 2 * s.Hv});
        ref_delta_forward(a->mixo, a->mix_states, &delta);
        ref_gated_norm_forward(a->mixy, a->mixo, a->mixz, ref_mixer_norm_(m, p, a));
    }
    ref_linear_forward(a->attproj, a->mixy, p->mixoutw, NULL, (RefLinear){N, s.mix_out, C});
}

// da->mix_states is memory.
static inline void ref_mixer_branch_backward_(const RefModel* m, const int* starts, const RefParameters* p,
                                              const RefParameters* dp, const RefActivations* a,
                                              const RefActivations* da) {
    const RefSizes s = m->sizes;
    const size_t N = s.N, C = s.C;
    const RefConv conv = ref_mixer_conv_(m, starts, p, a);
    const RefDelta delta = ref_mixer_delta_(m, starts, p, a);
    ref_linear_backward(da->mixy, dp->mixoutw, NULL, da->attproj, a->mixy, p->mixoutw,
                        (RefLinear){N, s.mix_out, C});
    if (s.mix_conv) {
        Real* dnormed = (Real*)check_alloc(N * s.mix_values, sizeof(Real), "reference: gradients");
        ref_gated_norm_backward(da->mixo, da->mixz, dp->mixnormw, dnormed, da->mixy, a->mixo, a->mixz,
                                ref_mixer_norm_(m, p, a));
        free(dnormed);
        ref_delta_backward(da->mixconv, da->mixba, dp->mixdecay, dp->mixstep, da->mix_states, da->mixo,
                           a->mix_states, &delta);
        ref_linear_backward(da->ln1, dp->mixzw, NULL, da->mixz, a->ln1, p->mixzw,
                            (RefLinear){N, C, s.mix_values});
        ref_linear_backward(da->ln1, dp->mixbaw, NULL, da->mixba, a->ln1, p->mixbaw,
                            (RefLinear){N, C, 2 * s.Hv});
    }
    ref_conv_backward(da->mix, dp->mixconvw, NULL, s.mix_conv ? da->mixconv : da->mixy, &conv);
    ref_linear_backward(da->ln1, dp->mixw, NULL, da->mix, a->ln1, p->mixw, (RefLinear){N, C, s.mix_rows});
}

// Returns the activations with what block l reads in the place of the stream.
static inline RefActivations ref_scaled_(RefActivations a) {
    a.stream = a.scaled ? a.scaled : a.stream;
    return ref_in_block_(a);
}

// Sets what a block reads: a x + b x0, if the model has such scales.
static inline void ref_enter_block_(const RefModel* m, const RefParameters* p, const RefActivations* a) {
    if (p->scales) {
        ref_scale_forward(a->scaled, a->stream, ref_activations_(m, m->acts, 0).stream, p->scales,
                          m->sizes.N * m->sizes.C);
    }
}

static inline void ref_enter_block_backward_(const RefModel* m, const RefParameters* p,
                                             const RefParameters* dp, const RefActivations* a,
                                             const RefActivations* da) {
    if (p->scales) {
        ref_scale_backward(da->stream, ref_activations_(m, m->dacts, 0).stream, dp->scales, da->scaled,
                           a->stream, ref_activations_(m, m->acts, 0).stream, p->scales,
                           m->sizes.N * m->sizes.C);
    }
}

// Computes block l. With the residual stream x, and weights of its own in each product:
//
//     y = norm(x), or x                y = norm(x), or x
//     qkv = y W^T + b                  h = y W^T + b
//     y = attention(turn(norm(qkv)))   y = activation(h)
//     x = x + norm(y W^T + b)          x = x + norm(y W^T + b), or of a sum of experts
//
// or without the norms after these products.
static inline void ref_block_forward_(RefModel* m, int l, const int* starts) {
    const RefSizes s = m->sizes;
    const RefParameters p = ref_parameters_(m, m->params, l);
    const RefActivations outer = ref_activations_(m, m->acts, l), a = ref_scaled_(outer),
                         next = ref_activations_(m, m->acts, l + 1);
    ref_enter_block_(m, &p, &outer);
    if (s.before) {
        ref_norm_forward(a.ln1, a.stream, ref_row_norm_(m, p.ln1w, p.ln1b, a.ln1_mean, a.ln1_rstd));
    }
    if (p.mixw) {
        ref_mixer_branch_(m, starts, &p, &a);
    } else {
        ref_attention_branch_(m, l, starts, &p, &a);
    }
    ref_branch_forward_(m, a.residual2, a.stream, a.ln1post, a.attproj,
                        ref_row_norm_(m, p.ln1postw, NULL, NULL, a.ln1post_rstd));
    if (s.before) {
        ref_norm_forward(a.ln2, a.residual2, ref_row_norm_(m, p.ln2w, p.ln2b, a.ln2_mean, a.ln2_rstd));
    }
    ref_mlp_forward_(m, &p, &a);
    ref_branch_forward_(m, next.stream, a.residual2, a.ln2post, a.fcproj,
                        ref_row_norm_(m, p.ln2postw, NULL, NULL, a.ln2post_rstd));
}

// Goes through the same steps backward; da, dp: gradients.
static inline void ref_block_backward_(RefModel* m, int l, const int* starts) {
    const RefSizes s = m->sizes;
    const RefParameters p = ref_parameters_(m, m->params, l), dp = ref_parameters_(m, m->grads, l);
    const RefActivations outer = ref_activations_(m, m->acts, l), a = ref_scaled_(outer);
    const RefActivations douter = ref_activations_(m, m->dacts, l), da = ref_scaled_(douter),
                         dnext = ref_activations_(m, m->dacts, l + 1);
    ref_branch_backward_(m, dnext.stream, da.residual2, da.ln2post, da.fcproj, dp.ln2postw, a.fcproj,
                         ref_row_norm_(m, p.ln2postw, NULL, NULL, a.ln2post_rstd));
    ref_mlp_backward_(m, &p, &dp, &a, &da, starts);
    if (s.before) {
        ref_norm_backward(da.residual2, dp.ln2w, dp.ln2b, da.ln2, a.residual2,
                          ref_row_norm_(m, p.ln2w, p.ln2b, a.ln2_mean, a.ln2_rstd));
    }
    ref_branch_backward_(m, da.residual2, da.stream, da.ln1post, da.attproj, dp.ln1postw, a.attproj,
                         ref_row_norm_(m, p.ln1postw, NULL, NULL, a.ln1post_rstd));
    if (p.mixw) {
        ref_mixer_branch_backward_(m, starts, &p, &dp, &a, &da);
    } else {
        ref_attention_branch_backward_(m, l, starts, &p, &dp, &a, &da);
    }
    if (s.before) {
        ref_norm_backward(da.stream, dp.ln1w, dp.ln1b, da.ln1, a.stream,
                          ref_row_norm_(m, p.ln1w, p.ln1b, a.ln1_mean, a.ln1_rstd));
    }
    ref_enter_block_backward_(m, &p, &dp, &outer, &douter);
}

// Multiplies n elements, or their gradients.
static inline void ref_multiply_(Real* x, Real factor, size_t n) {
    for (size_t i = 0; i < n; i++) {
        x[i] *= factor;
    }
}

// Divides the logits, or their gradients, as the model does.
static inline void ref_divide_logits_(const RefModel* m, Real* logits) {
    ref_multiply_(logits, m->cfg.logits_divisor > 0 ? 1 / (Real)m->cfg.logits_divisor : 1,
                  m->sizes.N * m->sizes.Vp);
}

// Returns the loss: the mean over the targets, without the z-loss. tokens, targets, starts (B, T);
// starts may be NULL.
static inline Real ref_model_forward(RefModel* m, const int* tokens, const int* targets, const int* starts) {
    const RefSizes s = m->sizes;
    const RefParameters p = ref_parameters_(m, m->params, 0);
    const RefActivations first = ref_activations_(m, m->acts, 0), a = ref_activations_(m, m->acts, m->cfg.L);
    Real* embedded = a.embedded ? a.embedded : first.stream;
    m->tokens = tokens;
    ref_embedding_forward(embedded, tokens, p.wte, p.wpe, s.B, s.T, s.C);
    ref_multiply_(embedded, m->embedding_factor, s.N * s.C);
    if (a.embedded) {
        ref_norm_forward(first.stream, a.embedded, ref_embedded_norm_(m, &a));
    }
    for (int l = 0; l < m->cfg.L; l++) {
        ref_block_forward_(m, l, starts);
    }
    ref_norm_forward(a.lnf, a.stream, ref_row_norm_(m, p.lnfw, p.lnfb, a.lnf_mean, a.lnf_rstd));
    ref_linear_forward(a.logits, a.lnf, p.head ? p.head : p.wte, NULL, (RefLinear){s.N, s.C, s.Vp});
    ref_divide_logits_(m, a.logits);
    ref_classifier_forward(a.losses, a.logits_lse, a.logits, targets, ref_classifier_(m));
    Real sum = 0;
    for (size_t n = 0; n < s.N; n++) {
        sum += a.losses[n];
    }
    return sum / targets_count(targets, (int)s.N);
}

// Sets the gradients of the loss, and of the losses that are not printed, after the forward pass on
// the same batch.
static inline void ref_model_backward(RefModel* m, const int* tokens, const int* targets, const int* starts) {
    const RefSizes s = m->sizes;
    const RefParameters p = ref_parameters_(m, m->params, 0), dp = ref_parameters_(m, m->grads, 0);
    const RefActivations a = ref_activations_(m, m->acts, m->cfg.L),
                         da = ref_activations_(m, m->dacts, m->cfg.L),
                         dfirst = ref_activations_(m, m->dacts, 0);
    const Real dloss = (Real)1 / targets_count(targets, (int)s.N);
    m->tokens = tokens;
    memset(m->grads, 0, m->parameter_bytes);
    memset(m->dacts, 0, m->activation_bytes);
    ref_classifier_backward(da.logits, a.logits, a.logits_lse, targets, dloss, ref_classifier_(m));
    ref_divide_logits_(m, da.logits);
    ref_linear_backward(da.lnf, p.head ? dp.head : dp.wte, NULL, da.logits, a.lnf, p.head ? p.head : p.wte,
                        (RefLinear){s.N, s.C, s.Vp});
    ref_norm_backward(da.stream, dp.lnfw, dp.lnfb, da.lnf, a.stream,
                      ref_row_norm_(m, p.lnfw, p.lnfb, a.lnf_mean, a.lnf_rstd));
    for (int l = m->cfg.L - 1; l >= 0; l--) {
        ref_block_backward_(m, l, starts);
    }
    if (a.embedded) {
        ref_norm_backward(da.embedded, NULL, NULL, dfirst.stream, a.embedded, ref_embedded_norm_(m, &a));
    }
    Real* dembedded = a.embedded ? da.embedded : dfirst.stream;
    ref_multiply_(dembedded, m->embedding_factor, s.N * s.C);
    ref_embedding_backward(dp.wte, dp.wpe, dembedded, tokens, s.B, s.T, s.C);
}

#endif
