/*
model.h -- every tensor of a model, each in one row of a table; config.h says what the sizes are.

Parameters and activations are two lists (X-macros). The structs of pointers, memory,
initialization, updates, weight decay, optimizer state (optimizer.h), files, tests and the memory
report are loops over their rows; nothing else in the program lists the tensors.

Layers may share parameters (--share-layers): then memory has fewer blocks of parameters than the
model has layers.
*/
#ifndef LLMC_MODEL_H
#define LLMC_MODEL_H

#include <stddef.h>

#include "llmc/base/rand.h"
#include "llmc/model/config.h"
#include "llmc/ops/stream_scale.h"

#ifndef floatX
#define floatX float
#endif

typedef struct Model Model; // a model with its memory: each trainer has its own

// clang-format off
// Levels of --recompute and their words. The backward pass recomputes this, and everything above
// it, instead of keeping it.
#define RECOMPUTE_WORDS(X) \
    X(RECOMPUTE_NONE, "0") \
    X(RECOMPUTE_ACTIVATION, "1") /* the activation function */ \
    X(RECOMPUTE_NORMS, "2") /* both norms of a block */ \
    X(RECOMPUTE_MLP, "mlp") /* the matmul before the activation function */ \
    X(RECOMPUTE_BLOCK, "3") /* everything but the residual stream between blocks */
typedef enum {
    RECOMPUTE_WORDS(WORDS_VALUE)
    RECOMPUTE_NEVER // generation: no backward pass; only the keys and values of all layers are kept
} RecomputeLevel;

// Parameters, in the order of llm.c's model files: `rows` x `cols`, in the blocks of `layers`
// (LAYERS_...), or once in the model. A vector is one row; matrices are (out, in). A tensor that a
// kind does not need has no elements (w: ModelWidths). Padding rows of wte and head (V ... Vp-1)
// are zero. An update treats each of `parts` equal matrices, one below the other, and one of
// `apart` rows above them, alone. `init` and `decay`: first values, and whether weight decay
// applies. `kind` (KIND_...) selects the optimizer's rule, `split` (SPLIT_...) how part.h cuts it.
// Names in files are in families.h.
//  name      layers   rows                cols              apart    parts         init                decay  kind       split
#define MODEL_PARAMETERS(X) \
  X(wte,      ONCE,    w.words,            cfg.C,            0,       1,            INIT_VOCAB,         1,     EMBEDDING, WORDS) /* token embedding; the classifier's weight, too, if it has no head */ \
  X(value_table, ONCE, w.value_rows,       w.value_cols,     0,       1,            INIT_NORMAL,        1,     EMBEDDING, NONE)  /* value embeddings of all layers that have one (value_embedding.h), one below the other */ \
  X(wpe,      ONCE,    w.positions,        cfg.C,            0,       1,            INIT_NORMAL,        1,     EMBEDDING, NONE)  /* position embedding */ \
  X(scales,   ALL,     1,                  w.scales,         0,       1,            INIT_SCALES,        0,     VECTOR,    NONE)  /* of the stream and of the embedding before a block (stream_scale.h) */ \
  X(ln1w,     ALL,     1,                  w.norm,           0,       1,            INIT_ONE,           0,     VECTOR,    NONE)  /* norm before attention */ \
  X(ln1b,     ALL,     1,                  w.norm_bias,      0,       1,            INIT_ZERO,          0,     VECTOR,    NONE) \
  X(qkvw,     ATTENTION,     w.first,            cfg.C,            w.apart, w.parts,      INIT_NORMAL,        1,     MATRIX,    HEADS) /* queries, keys, values; or queries or their latent, the latent of keys and values, the key that turns */ \
  X(lnqw,    ATTENTION,     1,                  w.query_rank,     0,       1,            INIT_ONE,           0,     VECTOR,    NONE)  /* norms of these latents, */ \
  X(lnkvw,   ATTENTION,     1,                  w.rank,           0,       1,            INIT_ONE,           0,     VECTOR,    NONE) \
  X(qupw,  ATTENTION,     w.latent_q,         w.query_rank,     0,       1,            INIT_NORMAL,        1,     MATRIX,    NONE)  /* and what makes the queries of them, */ \
  X(kvupw, ATTENTION,     w.latent_up,        w.rank,           0,       1,            INIT_NORMAL,        1,     MATRIX,    NONE)  /* and of each head the keys, then the values */ \
  X(qkvb,     ATTENTION,     1,                  w.qkv_bias,       0,       1,            INIT_ZERO,          0,     VECTOR,    HEADS) \
  X(qnormw,   ATTENTION,     1,                  w.query_norm,     0,       1,            INIT_ONE,           0,     VECTOR,    COLS)  /* norm of the queries, */ \
  X(knormw,   ATTENTION,     1,                  w.key_norm,       0,       1,            INIT_ONE,           0,     VECTOR,    COLS)  /* and of the keys; not cut if it is of each head */ \
  X(sinks,    ATTENTION,     1,                  w.sinks,          0,       1,            INIT_NORMAL,        0,     VECTOR,    NONE)  /* of attention, one logit of each head */ \
  X(attprojw, ATTENTION,     cfg.C,              w.values,              0,       1,            INIT_NORMAL_SCALED, 1,     MATRIX,    COLS)  /* into the residual stream */ \
  X(attprojb, ATTENTION,     1,                  w.bias,           0,       1,            INIT_ZERO_INTO,     0,     VECTOR,    NONE) \
  X(value_gate, VALUES, w.value_heads,     w.value_gates,    0,       1,            INIT_ZERO,          0,     VECTOR,    NONE)  /* gates of a value embedding */ \
  X(attgatew, ATTENTION, w.gate,           cfg.C,            0,       1,            INIT_NORMAL,        1,     MATRIX,    NONE)  /* gates of the heads' output */ \
  X(mixw,     MIXED,   w.mix_rows,         w.mix_C,          0,       1,            INIT_NORMAL,        1,     MATRIX,    NONE)  /* into a mixer: queries, keys and values; or b, c and x of a convolution */ \
  X(mixzw,    MIXED,   w.mix_values,       w.mix_C,          0,       1,            INIT_NORMAL,        1,     MATRIX,    NONE)  /* gates of the delta rule's norm */ \
  X(mixbaw,   MIXED,   2 * w.mix_heads,    w.mix_C,          0,       2,            INIT_NORMAL,        1,     MATRIX,    NONE)  /* its beta, then its decay */ \
  X(mixconvw, MIXED,   w.mix_channels,     w.mix_taps,       0,       1,            INIT_NORMAL,        0,     VECTOR,    NONE)  /* taps of the convolution */ \
  X(mixdecay, MIXED,   1,                  w.mix_heads,      0,       1,            INIT_DECAY,         0,     VECTOR,    NONE)  /* A_log: log of the decay */ \
  X(mixstep,  MIXED,   1,                  w.mix_heads,      0,       1,            INIT_UNIT,          0,     VECTOR,    NONE)  /* dt_bias: added to the decay's input */ \
  X(mixnormw, MIXED,   1,                  w.mix_norm,       0,       1,            INIT_UNIT,          0,     VECTOR,    NONE) \
  X(mixoutw,  MIXED,   w.mix_C,            w.mix_out,        0,       1,            INIT_NORMAL_SCALED, 1,     MATRIX,    NONE)  /* into the residual stream */ \
  X(ln1postw, ALL,     1,                  w.norm_after,     0,       1,            INIT_ONE,           0,     VECTOR,    NONE)  /* norm after attention */ \
  X(ln2w,     ALL,     1,                  w.norm,           0,       1,            INIT_ONE,           0,     VECTOR,    NONE)  /* norm before the MLP */ \
  X(ln2b,     ALL,     1,                  w.norm_bias,      0,       1,            INIT_ZERO,          0,     VECTOR,    NONE) \
  X(fcw,      DENSE,   w.G * w.F,          cfg.C,            0,       w.G,          INIT_NORMAL,        1,     MATRIX,    ROWS)  /* into the MLP's hidden layer: gate, then up */ \
  X(fcb,      DENSE,   1,                  w.hidden_bias,    0,       1,            INIT_ZERO,          0,     VECTOR,    ROWS) \
  X(fcprojw,  DENSE,   cfg.C,              w.F,              0,       1,            INIT_NORMAL_SCALED, 1,     MATRIX,    COLS)  /* into the residual stream */ \
  X(fcprojb,  DENSE,   1,                  w.bias,           0,       1,            INIT_ZERO_INTO,     0,     VECTOR,    NONE) \
  X(routerw,  EXPERTS, w.E,                cfg.C,            0,       1,            INIT_NORMAL,        1,     ROUTER,    NONE)  /* logits of the experts */ \
  X(routerwb, EXPERTS, 1,                  w.logits_bias,    0,       1,            INIT_ZERO,          0,     VECTOR,    NONE)  /* their bias */ \
  X(routerb,  EXPERTS, 1,                  w.router_bias,    0,       1,            INIT_ZERO,          0,     FIXED,     NONE)  /* added to their scores where experts are chosen */ \
  X(efcw,     EXPERTS, w.mlps * w.G * w.Fe, cfg.C,          0,       w.mlps * w.G, INIT_NORMAL,        1,     MATRIX,    EXPERTS) /* the MLPs of all experts: gate, then up of each */ \
  X(efcb,     EXPERTS, 1,                  w.expert_hidden_bias, 0,   1,            INIT_ZERO,          0,     VECTOR,    EXPERTS) /* of each expert, one after the other; so is efcprojb */ \
  X(efcprojw, EXPERTS, w.mlps * cfg.C,     w.Fe,             0,       w.mlps,       INIT_NORMAL_SCALED, 1,     MATRIX,    EXPERTS) \
  X(efcprojb, EXPERTS, 1,                  w.expert_bias,    0,       1,            INIT_ZERO_INTO,     0,     VECTOR,    EXPERTS) \
  X(sfcw,     EXPERTS, w.G * w.Fs,         cfg.C,            0,       w.G,          INIT_NORMAL,        1,     MATRIX,    NONE)  /* of the expert that all tokens take */ \
  X(sfcprojw, EXPERTS, w.shared,           w.Fs,             0,       1,            INIT_NORMAL_SCALED, 1,     MATRIX,    NONE) \
  X(ln2postw, ALL,     1,                  w.norm_after,     0,       1,            INIT_ONE,           0,     VECTOR,    NONE)  /* norm after the MLP */ \
  X(lnfw,     ONCE,    1,                  w.last_norm,      0,       1,            INIT_ONE,           0,     VECTOR,    NONE)  /* norm before the classifier */ \
  X(lnfb,     ONCE,    1,                  w.last_norm_bias, 0,       1,            INIT_ZERO,          0,     VECTOR,    NONE) \
  X(head,     ONCE,    w.head,             cfg.C,            0,       1,            INIT_VOCAB,         1,     HEAD,      WORDS) /* the classifier's weight, if it is not wte */ \
  X(qkvw_a,   ATTENTION, w.adapt_a[ADAPT_QKV], cfg.C,        0,       w.adapt_parts[ADAPT_QKV], INIT_ADAPTER, 1,  ADAPTER,   NONE)  /* adapters of these matrices (adapter.h) */ \
  X(qkvw_b,   ATTENTION, w.adapt_b[ADAPT_QKV], w.adapt_rank[ADAPT_QKV], 0, 1,       INIT_ZERO,          1,     ADAPTER,   NONE) \
  X(attprojw_a, ATTENTION, w.adapt_a[ADAPT_ATTPROJ], w.values, 0,     1,            INIT_ADAPTER,       1,     ADAPTER,   NONE) \
  X(attprojw_b, ATTENTION, w.adapt_b[ADAPT_ATTPROJ], w.adapt_rank[ADAPT_ATTPROJ], 0, 1, INIT_ZERO,      1,     ADAPTER,   NONE) \
  X(fcw_a,    DENSE,   w.adapt_a[ADAPT_FC], cfg.C,           0,       w.adapt_parts[ADAPT_FC], INIT_ADAPTER, 1,  ADAPTER,   NONE) \
  X(fcw_b,    DENSE,   w.adapt_b[ADAPT_FC], w.adapt_rank[ADAPT_FC], 0, 1,           INIT_ZERO,          1,     ADAPTER,   NONE) \
  X(fcprojw_a, DENSE,  w.adapt_a[ADAPT_FCPROJ], w.F,         0,       1,            INIT_ADAPTER,       1,     ADAPTER,   NONE) \
  X(fcprojw_b, DENSE,  w.adapt_b[ADAPT_FCPROJ], w.adapt_rank[ADAPT_FCPROJ], 0, 1,   INIT_ZERO,          1,     ADAPTER,   NONE)

// Activations, for N = B*T tokens, of the layers `of` (LAYERS_...). A tensor with `blocks` layers is
// kept for the backward pass, one per such layer, up to the recomputation level `kept` (RECOMPUTE_...); BLOCK means always. A tensor
// that is not kept has one buffer for all layers, and the backward pass recomputes it. residual3
// has `residuals` copies: one per layer, or fewer, which the layers use in turn (layer l uses copy
// l % residuals). Blocks below `first_block` keep nothing and use copy 0. Logits exist for `chunk`
// tokens at a time. The hidden layers of the MLPs have M rows (model_expert_rows); `trained_M` is M
// with a backward pass, else 0. Without a backward pass `trained` is 0 and `cached` the rows of
// keys and values; with one it is the other way round. `life`: tensors that live only inside a
// block, like these shared buffers, use the same memory as those that live only in the classifier.
//
// Tensor ranks (part.h) cut the residual stream by tokens: R of the N are here, `trained_R` with a
// backward pass; a pass of generation has all. `traveling` rows of parts arrive from these ranks.
//
// If ranks divide experts, hidden layers have H rows, of one rank's tokens at a time; no layer
// keeps them. `arriving` rows come from the other ranks (expert_parallel.h).
//  name        of   layers  tokens kept   cols             dtype    life
#define MODEL_ACTIVATIONS(X) \
  X(encoded,    ALL, 1,      R,      BLOCK, cfg.C,               floatX,  LIVE_ALWAYS)  /* the residual stream that enters the first block */ \
  X(encoded_rstd, ALL, 1,    R,      BLOCK, w.embedding_rstd,    float,   LIVE_ALWAYS)  /* if the embedding has a norm */ \
  X(ln1,        ALL, blocks, R,      ACTIVATION, w.before_C,     floatX,  LIVE_ALWAYS) \
  X(ln1_mean,   ALL, blocks, R,      MLP,   w.mean,              float,   LIVE_ALWAYS) \
  X(ln1_rstd,   ALL, blocks, R,      MLP,   w.before,            float,   LIVE_ALWAYS) \
  X(qkv,        ATTENTION, blocks, N,      MLP,   w.QKV,               floatX,  LIVE_ALWAYS)  /* queries (NH, HS), keys (KV, HS), values (KV, HS) of each token */ \
  X(latent_q,   ATTENTION, blocks, N,      MLP,   w.query_rank,        floatX,  LIVE_ALWAYS)  /* latent of the queries, and of keys and values; with their norms */ \
  X(latent_kv,  ATTENTION, blocks, N,      MLP,   w.rank,              floatX,  LIVE_ALWAYS) \
  X(latent_q_norm, ATTENTION, blocks, N,   MLP,   w.query_rank,        floatX,  LIVE_ALWAYS) \
  X(latent_kv_norm, ATTENTION, blocks, N,  MLP,   w.rank,              floatX,  LIVE_ALWAYS) \
  X(latent_q_rstd, ATTENTION, blocks, N,   MLP,   w.query_rank > 0,    float,   LIVE_ALWAYS) \
  X(latent_kv_rstd, ATTENTION, blocks, N,  MLP,   w.rank > 0,          float,   LIVE_ALWAYS) \
  X(qk_raw,     ATTENTION, blocks, N,      MLP,   w.raw,               floatX,  LIVE_ALWAYS)  /* queries and keys before a norm with weights */ \
  X(qk_rstd,    ATTENTION, blocks, N,      MLP,   w.unit_rstd,         float,   LIVE_ALWAYS)  /* of a norm without weights: (NH + KV) */ \
  X(atty,       ATTENTION, blocks, N,      MLP,   w.Q,                 floatX,  LIVE_ALWAYS)  /* attention's output, before its projection */ \
  X(att_lse,    ATTENTION, blocks, N,      MLP,   cfg.NH,              float,   LIVE_ALWAYS)   /* (B, NH, T) log of the sum of exponentials */ \
  X(att_gate,   ATTENTION, blocks, N,  MLP,   w.gate,              floatX,  LIVE_ALWAYS)  /* gates of atty, before their sigmoid */ \
  X(mix,        MIXED, blocks, N,     MLP,   w.mix_rows,          floatX,  LIVE_ALWAYS)  /* input of the mixer's convolution */ \
  X(mixconv,    MIXED, blocks, N,     MLP,   w.mix_conv,          floatX,  LIVE_ALWAYS)  /* its output: queries, keys, values of the delta rule */ \
  X(mixz,       MIXED, blocks, N,     MLP,   w.mix_values,        floatX,  LIVE_ALWAYS) \
  X(mixba,      MIXED, blocks, N,     MLP,   2 * w.mix_heads,     floatX,  LIVE_ALWAYS) \
  X(mixo,       MIXED, blocks, N,     MLP,   w.mix_values,        floatX,  LIVE_ALWAYS)  /* output of the delta rule */ \
  X(mix_rstd,   MIXED, blocks, N,     MLP,   w.mix_heads,         float,   LIVE_ALWAYS)  /* of its norm */ \
  X(mixy,       MIXED, blocks, N,     MLP,   w.mix_out,           floatX,  LIVE_ALWAYS)  /* output of the mixer, before its projection */ \
  X(ln1post_in, ALL, blocks, R,      MLP,   w.after_C,           floatX,  LIVE_ALWAYS)  /* output of attention, if it has a norm */ \
  X(ln1post_rstd, ALL, blocks, R,    MLP,   w.after,             float,   LIVE_ALWAYS) \
  X(residual2,  ALL, blocks, R,      MLP,   cfg.C,               floatX,  LIVE_ALWAYS)  /* the stream after attention */ \
  X(ln2,        ALL, blocks, R,      ACTIVATION, w.before_C,     floatX,  LIVE_ALWAYS) \
  X(ln2_mean,   ALL, blocks, R,      MLP,   w.mean,              float,   LIVE_ALWAYS) \
  X(ln2_rstd,   ALL, blocks, R,      MLP,   w.before,            float,   LIVE_ALWAYS) \
  X(router_logits, EXPERTS, blocks, N,   BLOCK, w.E,                 float,   LIVE_ALWAYS)  /* logits of the experts; with the next five: a Router */ \
  X(chosen,     EXPERTS, blocks, N,      BLOCK, w.E_used,            int32_t, LIVE_ALWAYS)  /* experts that each token takes */ \
  X(expert_rows, EXPERTS, blocks, N,     BLOCK, w.E_used,            int32_t, LIVE_ALWAYS)  /* row of each of them */ \
  X(expert_order, EXPERTS, blocks, M,    BLOCK, w.has_experts,       int32_t, LIVE_ALWAYS)  /* place in `chosen` that each row comes from */ \
  X(expert_first, EXPERTS, blocks, 1,    BLOCK, w.expert_first,      int32_t, LIVE_ALWAYS)  /* first row of each expert; E + 1 */ \
  X(expert_scale, EXPERTS, blocks, M,    BLOCK, w.has_experts,       float,   LIVE_ALWAYS)  /* weight of each row in its token's sum */ \
  X(expert_counts, EXPERTS, blocks, 1,   BLOCK, w.expert_counts,     int32_t, LIVE_ALWAYS)  /* tokens of each rank that take each expert, if ranks divide them */ \
  X(fch,        DENSE, blocks, N,     NORMS, w.G * w.F,           floatX,  LIVE_ALWAYS)  /* hidden layer before the activation function */ \
  X(fch_act,    DENSE, blocks, N,     NONE,  w.F,                 floatX,  LIVE_ALWAYS)  /* hidden layer after it */ \
  X(efch,       EXPERTS, hidden, H,   NORMS, w.G * w.Fe,          floatX,  LIVE_ALWAYS)  /* of the experts, the same */ \
  X(efch_act,   EXPERTS, hidden, H,   NONE,  w.Fe,                floatX,  LIVE_ALWAYS) \
  X(sfch,       EXPERTS, blocks, N,      NORMS, w.G * w.Fs,          floatX,  LIVE_ALWAYS)  /* of the expert that all tokens take */ \
  X(sfch_act,   EXPERTS, blocks, N,      NONE,  w.Fs,                floatX,  LIVE_ALWAYS) \
  X(ln2post_in, ALL, blocks, R,      MLP,   w.after_C,           floatX,  LIVE_ALWAYS)  /* output of the MLP, if it has a norm */ \
  X(ln2post_rstd, ALL, blocks, R,    BLOCK, w.after,             float,   LIVE_ALWAYS) \
  X(residual3,  ALL, residuals, R,   BLOCK, cfg.C,               floatX,  LIVE_ALWAYS)  /* the stream after the block */ \
  X(lnf,        ALL, 1,      R,      BLOCK, w.last_C,              floatX,  LIVE_ALWAYS) \
  X(lnf_mean,   ALL, 1,      R,      BLOCK, w.last_mean,         float,   LIVE_ALWAYS) \
  X(lnf_rstd,   ALL, 1,      R,      BLOCK, w.is_last,           float,   LIVE_ALWAYS) \
  X(logits,     ALL, 1,      chunk,  BLOCK, w.last_words,        floatX,  LIVE_CLASSIFIER)  /* become dlogits in place */ \
  X(word_rows,  ALL, 1,      ranks * chunk, BLOCK, w.word_rows, float, LIVE_CLASSIFIER)  /* what each tensor rank keeps of a token's logits (cross_entropy.h) */ \
  X(all_logits, ALL, 1,      decoded, NEVER, w.all_words,        floatX,  LIVE_PASS)  /* of all tensor ranks, one after the other; then token by token */ \
  X(kv,         ATTENTION, cfg.L,  cached, NEVER, w.kept,              floatX,  LIVE_PASS)  /* of B sequences: (B, 2, KV, T, HS), or latents (latent.h) */ \
  X(mix_inputs, MIXED, cfg.L,  caches, NEVER, w.mix_inputs,       float,   LIVE_PASS)  /* of B sequences: the last inputs of the convolution */ \
  X(mix_state,  MIXED, cfg.L,  caches, NEVER, w.mix_state,        float,   LIVE_PASS)  /* and the states of the delta rule */ \
  X(losses,     ALL, 1,      trained, BLOCK, w.is_last,          float,   LIVE_PASS)   /* nats, per token */ \
  X(branch,     ALL, 1,      R,      BLOCK, w.branch,            floatX,  LIVE_PASS)  /* output of attention or MLP, added to the stream; and its gradient, or that of atty */ \
  X(dbranch,    ALL, 1,      trained_R, BLOCK, w.dbranch,         floatX,  LIVE_PASS)  /* gradient of that output, if it has a norm, a factor or dropout */ \
  X(gathered,   ALL, 1,      2 * trained, BLOCK, w.cut_C, floatX, LIVE_PASS) /* two tensors of the stream, of all tokens */ \
  X(parts,      ALL, 1,      N,     BLOCK, w.cut_C,           floatX,  LIVE_PASS)  /* matmul of this rank, a part of a sum */ \
  X(arrived,    ALL, 1,      traveling, BLOCK, w.cut_C,  floatX,  LIVE_PASS)  /* parts of all tensor ranks, of this rank's tokens */ \
  X(dresidual,  ALL, 1,      trained_R, BLOCK, cfg.C,               floatX,  LIVE_SENT)  /* gradient of the residual stream */ \
  X(dfirst,     ALL, 1,      trained_R, BLOCK, w.scaled_C,          floatX,  LIVE_PASS)   /* gradient of the embedding in all blocks, if the stream has scales */ \
  X(below,      ALL, 1,      below,  BLOCK, w.scaled_C,          floatX,  LIVE_ALWAYS)  /* with scales, the stream between blocks that the backward pass does not reach: these leave encoded alone */ \
  X(scaled,     ALL, 1,      R,      BLOCK, w.scaled_C,          floatX,  LIVE_BLOCK)   /* the stream that enters a block, with its scales */ \
  X(scale_parts, ALL, 1,     1,      BLOCK, w.scale_parts,       double,  LIVE_BLOCK)   /* sums for their gradients */ \
  X(dvalues,    ALL, 1,      trained, BLOCK, w.value_cols,      floatX,  LIVE_BLOCK)   /* gradient of each token's value embedding */ \
  X(dvalue_gates, ALL, 1,    trained, BLOCK, w.value_heads,     float,   LIVE_BLOCK)   /* gradient of their gates, before the sigmoid */ \
  X(value_parts, ALL, 1,     1,      BLOCK, w.value_parts,       float,   LIVE_BLOCK)   /* sums for the gradient of the gates' weights */ \
  X(expert_in,  ALL, 1,      M,      BLOCK, w.expert,            floatX,  LIVE_BLOCK)   /* rows of the experts' input, in their order */ \
  X(expert_out, ALL, 1,      M,      BLOCK, w.expert,            floatX,  LIVE_BLOCK)   /* rows of their output; gradients of both */ \
  X(arrived_in, ALL, 1,      arriving, BLOCK, w.arrived_C,       floatX,  LIVE_BLOCK)   /* rows of another rank that this rank's experts take; so are the next ones */ \
  X(arrived_out, ALL, 1,     arriving, BLOCK, w.arrived_C,       floatX,  LIVE_BLOCK) \
  X(arrived_order, ALL, 1,   arriving, BLOCK, w.arrived,         int32_t, LIVE_BLOCK) \
  X(arrived_first, ALL, 1,   1,      BLOCK, w.arrived_first,     int32_t, LIVE_BLOCK) \
  X(arrived_scale, ALL, 1,   arriving, BLOCK, w.arrived,         float,   LIVE_BLOCK) \
  X(darrived_scale, ALL, 1,  arriving, BLOCK, w.arrived,         float,   LIVE_BLOCK) \
  X(dexpert_scale, ALL, 1,   trained_M, BLOCK, w.dscale,         float,   LIVE_BLOCK)   /* gradient of expert_scale (M), then memory for its parts */ \
  X(drouter_logits, ALL, 1,  trained, BLOCK, w.dlogits,          float,   LIVE_BLOCK)   /* gradient of the logits of experts; on a GPU its rows are multiples of 8 columns */ \
  X(qk_sums,    ALL, 1,      ranks * N, BLOCK, w.qk_sums,          float,   LIVE_BLOCK)   /* of norms of all heads together, if tensor ranks cut them: HeadsSums of all ranks */ \
  X(att_gated,  ALL, 1,      N,     BLOCK, w.gate,              floatX,  LIVE_BLOCK)   /* atty times its gates, then the gradient of atty */ \
  X(datt_gate,  ALL, 1,      trained, BLOCK, w.gate,            floatX,  LIVE_BLOCK)   /* gradient of att_gate */ \
  X(latent_first, ALL, 1,    N,     BLOCK, w.latent_first,      floatX,  LIVE_BLOCK)   /* output of latent attention's first matrix, then its gradient; so are the next two */ \
  X(latent_queries, ALL, 1,  N,     BLOCK, w.latent_q,          floatX,  LIVE_BLOCK)   /* queries out of their latent */ \
  X(latent_up,  ALL, 1,      N,     BLOCK, w.latent_up,         floatX,  LIVE_BLOCK)   /* keys and values out of theirs */ \
  X(att_values, ALL, 1,      N,     BLOCK, w.latent_values,     floatX,  LIVE_BLOCK)   /* values of atty without what pads them, then the gradient of atty */ \
  X(dlatent_q,  ALL, 1,      trained, BLOCK, w.query_rank,      floatX,  LIVE_BLOCK)   /* gradients of latents, and of their norms */ \
  X(dlatent_kv, ALL, 1,      trained, BLOCK, w.rank,            floatX,  LIVE_BLOCK) \
  X(dlatent_q_norm, ALL, 1,  trained, BLOCK, w.query_rank,      floatX,  LIVE_BLOCK) \
  X(dlatent_kv_norm, ALL, 1, trained, BLOCK, w.rank,            floatX,  LIVE_BLOCK) \
  X(dmix,       ALL, 1,      trained, BLOCK, w.mix_rows,        floatX,  LIVE_BLOCK)   /* gradients of a mixer's activations */ \
  X(dmixconv,   ALL, 1,      trained, BLOCK, w.mix_conv,        floatX,  LIVE_BLOCK) \
  X(dmixz,      ALL, 1,      trained, BLOCK, w.mix_values,      floatX,  LIVE_BLOCK) \
  X(dmixba,     ALL, 1,      trained, BLOCK, 2 * w.mix_heads,   floatX,  LIVE_BLOCK) \
  X(dmixy,      ALL, 1,      trained, BLOCK, w.mix_out,         floatX,  LIVE_BLOCK) \
  X(dpart,      ALL, 1,      trained, BLOCK, w.part,            floatX,  LIVE_BLOCK)   /* one of several gradients of a branch's input */ \
  X(dqkv,       ALL, 1,      trained, BLOCK, w.dqkv,              floatX,  LIVE_BLOCK)  /* memory for sums in the MLP's turn */ \
  X(dfch,       ALL, 1,       trained, BLOCK, dfch,             floatX,  LIVE_BLOCK)  /* gradient of a hidden layer: (N, G F), (H, G Fe) or (N, G Fs); memory for sums (B, QKV) in attention's turn */
// clang-format on

#define MODEL_MEMBER_(name, ...) floatX* name;
typedef struct {
    MODEL_PARAMETERS(MODEL_MEMBER_)
} ModelParameters;
#undef MODEL_MEMBER_

#define MODEL_MEMBER_(name, of, layers, tokens, kept, cols, dtype, life) dtype* name;
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

// Return the row of a matrix that an adapter may change, and that of the adapter's first factor;
// the second one follows.
static inline int model_adapted_row(AdaptedMatrix m) {
    static const size_t members[ADAPT_MATRICES] = {
        offsetof(ModelParameters, qkvw), offsetof(ModelParameters, attprojw), offsetof(ModelParameters, fcw),
        offsetof(ModelParameters, fcprojw)};
    return (int)(members[m] / sizeof(floatX*));
}
static inline int model_adapter_row(AdaptedMatrix m) {
    return (int)(offsetof(ModelParameters, qkvw_a) / sizeof(floatX*)) + 2 * (int)m;
}

// Rows and columns of the tables; 0 for a tensor that the architecture's kinds do not need. K:
// columns of all keys. words, positions and head are rows: of wte, of wpe, of the classifier's own
// matrix; then follow vectors, and columns of activations.
typedef struct {
    int Q, K, QKV, F, Fe, G;
    int words, positions, head;
    int last_norm, last_norm_bias;
    int is_last, last_C, last_mean, last_words; // sizes of what only the last stage has
    int apart, parts; // rows of the queries' matrix, if another size than the keys'; equal matrices
    int norm, norm_bias, qkv_bias, bias, hidden_bias, query_norm, key_norm, sinks;
    int norm_after, before, before_C, after, after_C, dbranch; // norms of branches
    int mean, embedding_rstd, raw, unit_rstd, branch, dqkv;
    int scales, scaled_C, scale_parts;                                 // of the residual stream
    int value_rows, value_cols, value_heads, value_gates, value_parts; // of value embeddings
    int cut_C, word_rows, all_words, qk_sums;                          // if tensors are cut
    int mlps, Fs, shared;                                              // experts; of the shared one
    int has_experts, E, E_used, expert_first, expert, dscale, dlogits, router_bias, logits_bias;
    int expert_hidden_bias, expert_bias;
    int gate; // of the heads' output
    // rows of attention's first matrix; columns of its result, and those that generation keeps
    int first, values, kept;
    int query_rank, rank, latent_q, latent_up, latent_first, latent_values; // of latents
    // of layers with a mixer; channels of the model, if there are such layers
    int mix_C, mix_rows, mix_channels, mix_conv, mix_values, mix_heads, mix_taps, mix_norm, mix_out;
    int mix_inputs, mix_state, part;
    int expert_counts, arrived, arrived_first, arrived_C; // if ranks divide experts
    // of adapters: rows of both factors, the rank, and parts; 1 without
    int adapt_a[ADAPT_MATRICES], adapt_b[ADAPT_MATRICES], adapt_rank[ADAPT_MATRICES],
        adapt_parts[ADAPT_MATRICES];
} ModelWidths;

static inline void model_adapter_widths_(ModelWidths* w, ModelConfig cfg) {
    for (int m = 0; m < ADAPT_MATRICES; m++) {
        const AdapterShape s = model_adapter_shape(cfg, (AdaptedMatrix)m);
        w->adapt_a[m] = adapter_a_rows(s);
        w->adapt_b[m] = adapter_b_rows(s);
        w->adapt_rank[m] = s.rank;
        w->adapt_parts[m] = s.parts.count > 0 ? s.parts.count : 1;
    }
}

static inline void model_expert_widths_(ModelWidths* w, ModelConfig cfg) {
    w->mlps = model_mlps(cfg);
    w->Fe = model_expert_hidden(cfg);
    w->Fs = cfg.Fs;
    w->shared = cfg.Fs > 0 ? cfg.C : 0;
    w->has_experts = cfg.E > 0;
    w->E = cfg.E, w->E_used = cfg.E_used;
    w->expert_first = cfg.E > 0 ? cfg.E + 1 : 0;
    w->expert = cfg.E > 0 ? cfg.C : 0;
    w->dscale = cfg.E > 0 ? 1 + w->Fe / 32 : 0;
    w->arrived = model_divides_experts(cfg);
    w->expert_counts = w->arrived * cfg.part.expert_ranks * cfg.E;
    w->arrived_first = w->arrived * (w->mlps + 1);
    w->arrived_C = w->arrived * cfg.C;
    w->dlogits = (cfg.E + 7) / 8 * 8;
    w->router_bias = model_architecture(cfg.arch)->router == ROUTER_SIGMOID ? cfg.E : 0;
    w->logits_bias = w->bias > 0 ? cfg.E : 0;
    w->expert_hidden_bias = w->bias > 0 ? w->mlps * w->G * w->Fe : 0;
    w->expert_bias = w->mlps * w->bias;
}

static inline void model_mixer_widths_(ModelWidths* w, ModelConfig cfg) {
    const ModelMixer m = cfg.mixer;
    const MixerParts parts = mixer_parts(model_mixer(cfg));
    w->gate = parts.has_gates ? w->Q * model_tensor_ranks(cfg) : 0; // not cut
    w->mix_C = model_mixer(cfg) != MIXER_NONE ? cfg.C : 0;
    w->mix_rows = model_mixer_rows(cfg), w->mix_channels = model_mixer_channels(cfg);
    w->mix_out = model_mixer_values(cfg);
    w->mix_conv = parts.has_heads * w->mix_channels, w->mix_values = parts.has_heads * w->mix_out;
    w->mix_heads = m.value_heads, w->mix_norm = m.value_size, w->mix_taps = m.taps;
    w->mix_inputs = (m.taps - 1) * w->mix_channels;
    w->mix_state = m.value_heads * m.key_size * m.value_size;
    w->part = parts.has_heads * cfg.C;
}

static inline void model_latent_widths_(ModelWidths* w, ModelConfig cfg) {
    const int has_latent = model_has_latent(cfg);
    w->first = model_attention_rows(cfg);
    w->values = model_attention_values(cfg);
    w->kept = model_kept_keys(cfg);
    w->query_rank = has_latent * cfg.latent.query_rank;
    w->rank = has_latent * cfg.latent.rank;
    w->latent_q = w->query_rank > 0 ? w->Q : 0;
    w->latent_up = has_latent ? model_latent_up(cfg) : 0;
    w->latent_first = has_latent * w->first;
    w->latent_values = has_latent * w->Q;
    w->apart = has_latent ? model_latent_queries(cfg) : w->apart;
    w->parts = has_latent ? 1 : w->parts;
}

static inline void model_addition_widths_(ModelWidths* w, ModelConfig cfg) {
    const int has = cfg.has_values;
    w->scales = 2 * cfg.has_scales, w->scaled_C = cfg.has_scales * cfg.C;
    w->scale_parts = w->scales * STREAM_PARTS;
    w->value_rows = model_layers_of(cfg, LAYERS_VALUES) * cfg.V;
    w->value_cols = has * model_keys(cfg), w->value_heads = has * model_key_heads(cfg);
    w->value_gates = has * model_value_gates(cfg);
    w->value_parts = VALUE_PARTS * w->value_heads * w->value_gates;
}

static inline ModelWidths model_widths(ModelConfig cfg) {
    const Architecture* kinds = model_architecture(cfg.arch);
    const HeadsParts heads = heads_parts(kinds->heads);
    const int Q = model_heads(cfg), K = model_keys(cfg), HS = model_head_size(cfg), F = model_hidden(cfg),
              G = model_gates(cfg), has_biases = kinds->biases == BIASES_ALL;
    const NormParts norm = norm_parts(kinds->norm);
    ModelWidths w;
    w.Q = Q, w.K = K, w.QKV = Q + 2 * K, w.F = F, w.G = G;
    w.apart = Q == K ? 0 : Q;
    w.parts = Q == K ? 3 : 2;
    w.words = model_has_first(cfg) || (model_has_last(cfg) && !cfg.has_head) ? cfg.Vp : 0;
    w.positions = kinds->positions == POSITIONS_LEARNED && model_has_first(cfg) ? cfg.max_T : 0;
    w.before = model_has_norms_before(cfg), w.after = model_has_norms_after(cfg);
    w.before_C = w.before * cfg.C, w.after_C = w.after * cfg.C;
    w.norm = norm.has_weight * w.before_C;
    w.norm_bias = norm.has_bias * w.before_C;
    w.norm_after = norm.has_weight * w.after_C;
    w.dbranch = w.after || model_residual_factor(cfg) != 1 || cfg.dropout > 0 ? cfg.C : 0;
    w.last_norm = model_has_last(cfg) && norm.has_weight ? cfg.C : 0;
    w.last_norm_bias = model_has_last(cfg) && norm.has_bias ? cfg.C : 0;
    w.qkv_bias = kinds->biases == BIASES_NONE ? 0 : w.QKV;
    w.bias = has_biases ? cfg.C : 0;
    w.hidden_bias = has_biases ? G * F : 0;
    w.query_norm = !heads.has_weights ? 0 : heads.is_together ? Q : HS;
    w.key_norm = heads.is_together ? K : w.query_norm;
    w.sinks = kinds->has_sinks ? cfg.NH : 0;
    w.head = cfg.has_head && model_has_last(cfg) ? cfg.Vp : 0;
    w.mean = norm.has_mean * w.before;
    w.is_last = model_has_last(cfg);
    w.last_C = w.is_last * cfg.C, w.last_mean = w.is_last * norm.has_mean, w.last_words = w.is_last * cfg.Vp;
    w.embedding_rstd = kinds->embedding == EMBEDDING_NORM && model_has_first(cfg);
    w.raw = w.query_norm > 0 ? Q + K : 0;
    w.unit_rstd = heads.keeps_rstd ? cfg.NH + model_key_heads(cfg) : 0;
    const int all_Q = Q * model_tensor_ranks(cfg);
    w.branch = all_Q > cfg.C ? all_Q : cfg.C;
    w.cut_C = model_is_cut(cfg) ? cfg.C : 0;
    w.word_rows = model_is_cut(cfg) && w.is_last ? 4 : 0; // sizeof(CrossEntropySlice) / 4
    w.qk_sums = model_is_cut(cfg) && heads.is_together ? (int)(sizeof(HeadsSums) / sizeof(float)) : 0;
    w.all_words = model_is_cut(cfg) ? w.last_words * model_tensor_ranks(cfg) : 0;
    const int sums = G * model_most_hidden(cfg) / 32; // (N/32, G F)
    w.dqkv = w.QKV > sums ? w.QKV : sums;
    model_expert_widths_(&w, cfg);
    model_mixer_widths_(&w, cfg);
    model_latent_widths_(&w, cfg);
    model_adapter_widths_(&w, cfg);
    model_addition_widths_(&w, cfg);
    return w;
}

// Returns how a parameter is cut: as its row says, or if experts are divided, into whole experts.
// All heads have the same norm, unless it is of all together.
static inline TensorSplit model_split_(TensorSplit split, size_t member, ModelConfig cfg) {
    const int is_expert = split == SPLIT_EXPERTS, is_of_heads = member == offsetof(ModelParameters, qnormw) ||
                                                                member == offsetof(ModelParameters, knormw);
    if (is_of_heads && !heads_parts(model_architecture(cfg.arch)->heads).is_together) {
        return SPLIT_NONE;
    }
    return model_divides_experts(cfg) == is_expert ? split : SPLIT_NONE;
}

// Sets the layers of a row: `most` copies if all layers have the tensor. It is absent if none has.
static inline void model_row_layers_(TensorRow* row, ModelConfig cfg, LayersKind kind, int most) {
    const int has = kind == LAYERS_ALL || kind == LAYERS_ONCE ? cfg.L : model_layers_of(cfg, kind);
    row->rows = has > 0 ? row->rows : 0;
    row->cols = has > 0 ? row->cols : 0;
    row->blocks = tensor_is_absent(row) ? 0 : most;
    row->is_partial = !tensor_is_absent(row) && has < cfg.L;
    row->uses = tensor_is_absent(row) ? 0 : kind == LAYERS_ONCE ? 1 : has;
    memset(row->without, 0xff, sizeof(row->without));
    for (int l = 0; l < cfg.L && row->is_partial; l++) {
        row->without[l / 8] ^= (uint8_t)(model_layer_has(cfg, kind, l) << l % 8);
    }
    const int copies = most > 1 ? tensor_copies_before(row, row->blocks) : row->blocks;
    row->layers = copies > 0 || tensor_is_absent(row) ? copies : 1; // others share it
}

// Returns the rows of a parameter: none if it is the frozen base's of an adapter.
static inline size_t model_rows_of_kind_(ModelConfig cfg, TensorKind kind, int rows) {
    return model_has_adapter(cfg) == (kind == KIND_ADAPTER) ? (size_t)rows : 0;
}

// Fills in the rows of the parameter table for a configuration, with elements of this size; returns
// the bytes of one allocation for all of them. Parameters lie in groups: first those outside of
// blocks (PLACE_ONCE), then block 0, block 1, ... (model_copies). All blocks are laid out alike. In
// a model with divided experts, tensors that are not cut lie outside of blocks. A group
// has two parts: its trained tensors, and those whose bit is set in `frozen`. Each part can be cut
// into `shards` equal pieces, multiples of TENSOR_SHARD_UNIT elements; the padding at its end is
// always zero.
static inline size_t model_sharded_rows_of(TensorRow rows[MODEL_PARAMETER_ROWS], ModelConfig cfg,
                                           size_t element_bytes, int shards, TensorSet frozen) {
    const ModelWidths w = model_widths(cfg);
    const int has_cuts = model_divides_experts(cfg);
    TensorRow* row = rows;
#define MODEL_ROW_(name_, layers_, rows_, cols_, apart_, parts_, init_, decay_, kind_, split_)               \
    row->name = #name_;                                                                                      \
    row->split = model_split_(SPLIT_##split_, offsetof(ModelParameters, name_), cfg);                        \
    row->places = 1;                                                                                         \
    row->in_block = LAYERS_##layers_ != LAYERS_ONCE;                                                         \
    row->place = row->in_block && !(has_cuts && row->split == SPLIT_NONE) ? PLACE_BLOCK : PLACE_ONCE;        \
    row->rows = model_rows_of_kind_(cfg, KIND_##kind_, rows_);                                               \
    row->cols = (size_t)(cols_);                                                                             \
    row->repeats = model_copy_repeats(cfg);                                                                  \
    row->first_layer = 0;                                                                                    \
    model_row_layers_(row, cfg, LAYERS_##layers_, row->in_block ? model_copies(cfg) : 1);                    \
    row->element_bytes = element_bytes;                                                                      \
    row->apart = (size_t)(apart_);                                                                           \
    row->parts = parts_;                                                                                     \
    row->init = init_;                                                                                       \
    row->stream = rand_stream(#name_);                                                                       \
    row->decay = decay_;                                                                                     \
    row->kind = KIND_##kind_;                                                                                \
    row->life = LIVE_ALWAYS;                                                                                 \
    row->member = offsetof(ModelParameters, name_);                                                          \
    row->experts = SPLIT_##split_ == SPLIT_EXPERTS ? w.mlps : 1;                                             \
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

// Returns the columns of N rows in which any gradient of a hidden layer has room: of N tokens, or H
// rows of experts.
static inline size_t model_hidden_columns_(ModelConfig cfg, const ModelWidths* w, size_t N, size_t H) {
    const int F = model_layers_of(cfg, LAYERS_DENSE) > 0 ? w->F : 0, most = w->G * (F > w->Fs ? F : w->Fs);
    const size_t tokens = (size_t)(most > w->QKV ? most : w->QKV),
                 experts = cfg.E > 0 ? (H * (size_t)(w->G * w->Fe) + N - 1) / N : 0;
    return tokens > experts ? tokens : experts;
}

// Returns how many micro-batches need a tensor at a time.
static inline int model_places_of_(ModelConfig cfg, TensorLife life) {
    return life == LIVE_ALWAYS ? model_places(cfg) : life == LIVE_SENT && model_is_stage(cfg) ? 2 : 1;
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
    const size_t trained = is_trained ? N : 0, cached = is_trained ? 0 : BT,
                 caches = is_trained ? 0 : (size_t)B;
    const size_t ranks = (size_t)model_tensor_ranks(cfg), R = is_trained ? model_stream_rows(cfg, N) : N,
                 trained_R = is_trained ? R : 0, below = is_trained && first_block == 0 ? 0 : R,
                 traveling = ranks * R, decoded = is_trained ? 0 : 2 * chunk;
    const size_t M = model_expert_rows(cfg, N), trained_M = is_trained ? M : 0, H = model_hidden_rows(cfg, N),
                 arriving = H;
    const int hidden = model_divides_experts(cfg) ? 1 : blocks;
    ModelWidths w = model_widths(cfg);
    const size_t dfch = model_hidden_columns_(cfg, &w, N, H);
    if (!is_trained) { // every stage samples
        w.last_words = cfg.Vp;
        w.all_words = model_is_cut(cfg) ? cfg.Vp * (int)ranks : 0;
    }
    TensorRow* row = rows;
#define MODEL_ROW_(name_, of_, layers_, tokens_, kept_, cols_, dtype_, life_)                                \
    row->name = #name_;                                                                                      \
    row->rows = tokens_;                                                                                     \
    row->cols = (size_t)(cols_);                                                                             \
    row->split = SPLIT_NONE;                                                                                 \
    row->repeats = 1;                                                                                        \
    row->first_layer = first_block;                                                                          \
    model_row_layers_(row, cfg, LAYERS_##of_, recompute > RECOMPUTE_##kept_ ? 1 : layers_);                  \
    row->element_bytes = sizeof(dtype_);                                                                     \
    row->init = INIT_ZERO;                                                                                   \
    row->stream = 0;                                                                                         \
    row->decay = 0;                                                                                          \
    row->kind = KIND_MATRIX;                                                                                 \
    row->in_block = 0;                                                                                       \
    row->place = PLACE_BLOCK;                                                                                \
    row->group_bytes = 0;                                                                                    \
    row->life = recompute > RECOMPUTE_##kept_ ? LIVE_BLOCK : life_;                                          \
    row->places = model_places_of_(cfg, row->life);                                                          \
    row->member = offsetof(ModelActivations, name_);                                                         \
    row++;
    MODEL_ACTIVATIONS(MODEL_ROW_)
#undef MODEL_ROW_
    return tensor_rows_layout(rows, MODEL_ACTIVATION_ROWS);
}

// Returns the bytes of the logits that are in memory at a time.
static inline size_t model_logits_bytes(const TensorRow rows[MODEL_ACTIVATION_ROWS]) {
    size_t bytes = 0;
    for (int i = 0; i < MODEL_ACTIVATION_ROWS; i++) {
        bytes += rows[i].member == offsetof(ModelActivations, logits) ? tensor_place_bytes(&rows[i]) : 0;
    }
    return bytes;
}

// Return the number of groups (0: everything outside of blocks; 1 + k: block k), the lowest layer
// that uses group g, and the group of layer l.
static inline int model_groups(ModelConfig cfg) { return 1 + model_copies(cfg); }
static inline int model_group_layer(ModelConfig cfg, int g) {
    return tensor_group_copy(g) * model_copy_repeats(cfg);
}
static inline int model_group(ModelConfig cfg, int l) { return 1 + model_copy(cfg, l); }

// Moves the pointer of a row in `pointers` from the first copy to that of layer l; NULL: none.
static inline void model_advance_(void* pointers, const TensorRow* row, int l) {
    if (tensor_has_layer(row, l)) {
        tensor_advance(pointers, row, tensor_copy(row, l));
    } else {
        tensor_clear(pointers, row);
    }
}

// Return the pointers of layer l: .qkvw is that layer's.
static inline ModelParameters model_parameters_at_layer(ModelParameters all, const TensorRow* rows, int l) {
    for (int row = 0; row < MODEL_PARAMETER_ROWS; row++) {
        model_advance_(&all, &rows[row], l);
    }
    return all;
}
static inline ModelActivations model_activations_at_layer(ModelActivations all, const TensorRow* rows,
                                                          int l) {
    for (int row = 0; row < MODEL_ACTIVATION_ROWS; row++) {
        model_advance_(&all, &rows[row], l);
    }
    return all;
}

// Sets the pointers of an adapter's layer that are NULL to those of its base.
static inline void model_join_parameters(ModelParameters* adapter, const ModelParameters* base) {
#define MODEL_JOIN_(name, ...) adapter->name = adapter->name ? adapter->name : base->name;
    MODEL_PARAMETERS(MODEL_JOIN_)
#undef MODEL_JOIN_
}

// Returns the pointers of a micro-batch in an update; `all` points to the first micro-batch's.
static inline ModelActivations model_activations_of(ModelActivations all, const TensorRow* rows,
                                                    int64_t micro_step) {
    for (int row = 0; row < MODEL_ACTIVATION_ROWS; row++) {
        tensor_move(&all, &rows[row],
                    (size_t)(micro_step % rows[row].places) * tensor_place_bytes(&rows[row]));
    }
    return all;
}

// Returns the residual stream that enters layer l, (R, C). The backward pass does not reach layers
// below first_block, so they keep no copy of it: these read and write it in one place, encoded, or
// beside it if all blocks read the embedding.
static inline floatX* model_stream_into(const ModelActivations* all, const TensorRow* rows, int first_block,
                                        int l) {
    floatX* below = l > 0 && all->below ? all->below : all->encoded;
    return l <= first_block ? below : model_activations_at_layer(*all, rows, l - 1).residual3;
}

// ---- counts ----

// Returns the rows of a parameter, or of its state, in files of other programs: all but the
// vocabulary's padding.
static inline size_t model_rows_in_files(const TensorRow* row, ModelConfig cfg) {
    return row->init == INIT_VOCAB && row->rows > (size_t)cfg.V ? (size_t)cfg.V : row->rows;
}

// Returns this number of rows for the part of a tensor rank.
static inline size_t model_rows_of_part(const TensorRow* row, ModelConfig cfg) {
    const size_t first = (size_t)cfg.part.tensor_rank * row->rows, V = (size_t)cfg.V,
                 used = first < V ? V - first : 0;
    return row->init == INIT_VOCAB && used < row->rows ? used : row->rows;
}

// Counts the parameters of the model as its files have them: every layer, without the padding rows
// of the vocabulary.
static inline double model_count_parameters(ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    double count = 0;
    model_parameter_rows(rows, cfg);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        count += (double)rows[i].uses * (double)(model_rows_in_files(&rows[i], cfg) * rows[i].cols);
    }
    return count;
}

// Counts the parameters that process one token: of experts, only those that it is routed to.
static inline double model_count_active(ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    double others = 0;
    model_parameter_rows(rows, cfg);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const double share = rows[i].experts > 1 ? (double)(cfg.E - cfg.E_used) / cfg.E : 0;
        others += share * rows[i].uses * (double)tensor_layer_elements(&rows[i]);
    }
    return model_count_parameters(cfg) - others;
}

// Counts the parameters in memory: shared layers count once.
static inline double model_count_stored(ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    double count = 0;
    model_parameter_rows(rows, cfg);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        count += (double)rows[i].layers * (double)(model_rows_in_files(&rows[i], cfg) * rows[i].cols);
    }
    return count;
}

// Returns the elements of a layer of a parameter that count as multiplied with every token: all, as
// in llm.c, even embeddings; but not wte if the classifier has a matrix of its own, and of the
// experts only as many as a token uses.
static inline double model_multiplied_elements(const TensorRow* row, ModelConfig cfg) {
    const int is_lookup = (cfg.has_head && row->member == offsetof(ModelParameters, wte)) ||
                          row->member == offsetof(ModelParameters, value_table);
    const double share = row->experts > 1 ? (double)cfg.E_used / row->experts : 1;
    return is_lookup ? 0 : share * (double)tensor_layer_elements(row);
}

// Returns the multiply-adds of attention for one token in layer l, forward: for every key that a
// query sees, T/2 on average, fewer with a window, the scores cost Q, and the values their columns.
// The delta rule reads and writes its state in every token.
static inline double model_attention_products(ModelConfig cfg, int l, int T) {
    const ModelMixer m = cfg.mixer;
    if (model_layer_has(cfg, LAYERS_MIXED, l)) {
        return 3.0 * m.value_heads * m.key_size * m.value_size;
    }
    const int window = model_window(cfg, l), W = 0 < window && window < T ? window : T;
    return ((double)model_heads(cfg) + model_attention_values(cfg)) * W * (1 - W / (2.0 * T));
}

// Returns the elements of all layers that count as multiplied.
static inline double model_multiplied_(ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    double weights = 0;
    model_parameter_rows(rows, cfg);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        weights += rows[i].uses * model_multiplied_elements(&rows[i], cfg);
    }
    return weights;
}

// Returns the floating-point operations to train on one token, as the field counts them: 6 per
// weight of each layer (with the padded vocabulary), 4 if it is frozen under an adapter, and 6 per
// multiply-add of attention.
static inline double model_flops_per_token(ModelConfig cfg, int T) {
    double weights = model_multiplied_(cfg), products = 0;
    if (model_has_adapter(cfg)) {
        weights += 4.0 / 6 * model_multiplied_(model_of_base(cfg));
    }
    for (int l = 0; l < cfg.L; l++) {
        products += model_attention_products(cfg, l, T);
    }
    return 6 * weights + 6 * products;
}

// ---- random weights ----

// True if a tensor is the weight or the bias of a layer whose output the residual stream adds up.
static inline int model_adds_to_residual(const TensorRow* row) {
    return row->init == INIT_NORMAL_SCALED || row->init == INIT_ZERO_INTO;
}

// Returns the standard deviation of random first values: GPT-2's 0.02 from its 768 channels on.
// Narrower models get a larger one, because smaller sums over a row would hide patterns from
// attention at first.
static inline double model_initial_std(const TensorRow* row, ModelConfig cfg) {
    const double std = 0.02 * sqrt(cfg.C < 768 ? 768.0 / cfg.C : 1);
    return std / (row->init == INIT_NORMAL_SCALED ? sqrt(2.0 * cfg.L) : 1);
}

// Returns the value of element (r, c) of layer l of a parameter in a new model. It depends only on
// the seed, the tensor's name and the place, so it is the same on every platform and for any number
// of threads and shards. Padding rows of the vocabulary are zero.
static inline float model_initial_value(const TensorRow* row, ModelConfig cfg, uint64_t seed, int l, size_t r,
                                        size_t c) {
    const int is_out = row->init == INIT_NORMAL_SCALED || row->kind == KIND_HEAD,
              is_zero = row->init == INIT_ZERO || row->init == INIT_ZERO_INTO ||
                        (row->init == INIT_VOCAB && r >= (size_t)cfg.V) ||
                        (is_out && cfg.initial == INITIAL_ZERO_OUT);
    if (row->init == INIT_UNIT || row->init == INIT_SCALES) {
        return row->init == INIT_UNIT || c == 0;
    }
    if (row->init == INIT_ADAPTER) {
        Rand rng = rand_open(seed, row->stream);
        rand_seek(&rng, (l * row->rows + r) * row->cols + c);
        return (float)((2 * rand_uniform(&rng) - 1) / sqrt((double)row->cols));
    }
    if (row->init == INIT_DECAY) {
        return rand_log_uniform(seed, row->stream, l * row->cols + c, 16);
    }
    if (is_zero || row->init == INIT_ONE) {
        return is_zero ? 0.0f : 1 - model_norm_offset(cfg);
    }
    const double std = model_initial_std(row, cfg);
    const uint64_t index = (l * row->rows + r) * row->cols + c;
    return (float)(rand_normal(seed, row->stream, index) * std);
}

// Sets a parameter of group g of a new model, in fp32; `group` is laid out by the rows.
static inline void model_random_row(const TensorRow* row, ModelConfig cfg, uint64_t seed, int g,
                                    void* group) {
    float* tensor = (float*)tensor_in_group(row, group);
#pragma omp parallel for schedule(static)
    for (size_t r = 0; r < row->rows; r++) {
        for (size_t c = 0; c < row->cols; c++) {
            tensor[r * row->cols + c] = model_initial_value(row, cfg, seed, model_group_layer(cfg, g), r, c);
        }
    }
}

// Sets all parameters of group g of a new model.
static inline void model_random_group(const TensorRow rows[MODEL_PARAMETER_ROWS], ModelConfig cfg,
                                      uint64_t seed, int g, void* group) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &rows[i];
        assert(row->element_bytes == sizeof(float));
        if (tensor_is_in_group(row, g)) {
            model_random_row(row, cfg, seed, g, group);
        }
    }
}

#endif
