/*
families.h -- tensors in the files of other programs: their names at Hugging Face and in GGUF, the
parameter they hold, which of its rows, and how these lie there.

All readers and writers of such files are loops over this table, in the order of the files. A file
has the tensors of its architecture whose parameters the model has.
*/
#ifndef LLMC_FAMILIES_H
#define LLMC_FAMILIES_H

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "llmc/model/model.h"

// Rows of a parameter that a tensor of a file has: all; the queries', keys' or values'; the first
// half, in an MLP its gate, or the second; of both, in turns. With experts: the rows of one expert.
// With latents, of their first matrix: the queries' latent; that of keys, and the key that turns;
// of the matrix out of the latter: the keys of all heads, or the values.
typedef enum {
    ROWS_ALL,
    ROWS_Q,
    ROWS_K,
    ROWS_V,
    ROWS_GATE,
    ROWS_UP,
    ROWS_TURNS,
    ROWS_LATENT_Q,
    ROWS_LATENT_KV,
    ROWS_HEAD_KEYS,
    ROWS_HEAD_VALUES
} FileRows;

typedef enum {
    FILE_PLAIN,  // as in memory: (rows, cols), or (cols) for a vector
    FILE_CONV1D, // (cols, rows) at Hugging Face, where GPT-2's code computes x W, ours x W^T
    FILE_STACK,  // so is each expert's matrix: (experts, cols, rows); vectors are (experts, rows)
    FILE_HEADS,  // the rows of each head, or the elements of a vector, are in the file's HeadOrder
    FILE_QKV,    // so are those of queries and keys; values follow as in memory
    // so are the rows that turn, which follow the others of a head, and of a latent
    FILE_TURNS_LAST,
    FILE_KEY_TURNS,
    FILE_HEAD_VALUES, // (heads, rows, cols): a part of the rows of each head
    FILE_HEAD_KEYS,   // so is (heads, cols, rows)
    // one tensor of two parameters: of each head the rows of queries, as FILE_HEADS, then of gates
    FILE_QUERIES,
    FILE_GATES,
    // FILE_VALUES of a convolution of each channel alone: (rows, 1, cols), in GGUF (rows, cols)
    FILE_TAPS,
    // lines of the delta rule's heads of values, perhaps after others. In memory the heads that
    // share a key follow each other; GGUF has the first head of each key, then the second of each
    FILE_VALUES,
    FILE_VALUE_COLS, // so are the columns of a matrix
    FILE_DECAY       // FILE_VALUES of the logarithm of a decay; GGUF has the decay, negative
} FileForm;

// Orders of the channels of a head that rotary positions turn in pairs.
typedef enum {
    ORDER_HALVES, // pair i is (i, i + dims / 2)
    ORDER_PAIRS,  // pair i is (2i, 2i + 1), as in memory
    ORDER_SWAPPED // pair i is (i + dims / 2, i): nanochat turns the other way round
} HeadOrder;

// Orders of the lines of a file: of the channels of a head, and of the heads of values of the delta
// rule (FILE_VALUES), 1: GGUF's.
typedef struct {
    HeadOrder channels;
    int values_by_turns;
} FileOrder;

// Sets of architectures.
enum {
    FAMILY_GPT2 = 1 << ARCH_GPT2,
    FAMILY_ARCEE = 1 << ARCH_ARCEE,
    FAMILY_NANOCHAT = 1 << ARCH_NANOCHAT,
    FAMILY_MIXTRAL = 1 << ARCH_MIXTRAL,
    FAMILY_GLM = 1 << ARCH_GLM4MOE,
    FAMILY_GRANITE4 = 1 << ARCH_GRANITE4, // GraniteMoeHybrid, dense: the shared expert
    FAMILY_GRANITE = 1 << ARCH_GRANITE | FAMILY_GRANITE4,
    FAMILY_GEMMA2 = 1 << ARCH_GEMMA2,
    FAMILY_GEMMA3 = 1 << ARCH_GEMMA3,
    FAMILY_GEMMA = FAMILY_GEMMA2 | FAMILY_GEMMA3,
    FAMILY_PHI3 = 1 << ARCH_PHI3,
    FAMILY_GLM4 = 1 << ARCH_GLM4,
    FAMILY_FUSED = FAMILY_PHI3 | FAMILY_GLM4, // gate and up are one matrix
    // norms after branches
    FAMILY_POST_NORM = 1 << ARCH_OLMO2 | 1 << ARCH_OLMO3 | 1 << ARCH_EXAONE4 | FAMILY_GEMMA,
    FAMILY_GATED = 1 << ARCH_LLAMA | 1 << ARCH_MISTRAL | 1 << ARCH_QWEN2 | 1 << ARCH_QWEN3 |
                   FAMILY_POST_NORM | 1 << ARCH_GRANITE | 1 << ARCH_SMOLLM3,
    FAMILY_LLAMAS = FAMILY_GATED | FAMILY_ARCEE | FAMILY_FUSED,
    FAMILY_GPTOSS = 1 << ARCH_GPTOSS,
    FAMILY_QWEN35 = 1 << ARCH_QWEN35,
    FAMILY_LFM2 = 1 << ARCH_LFM2,
    FAMILY_DEEPSEEK = 1 << ARCH_DEEPSEEK3,
    FAMILY_SHARED = FAMILY_GLM | FAMILY_DEEPSEEK, // experts: some of sigmoids, one of all tokens
    FAMILY_HYBRID = FAMILY_QWEN35 | FAMILY_LFM2,  // layers without attention
    // with an MLP in some layers, gate and up apart; in matrices of any form
    FAMILY_GATE_UP = FAMILY_GATED | FAMILY_SHARED | FAMILY_QWEN35,
    FAMILY_DOWN = FAMILY_LLAMAS | FAMILY_SHARED | FAMILY_QWEN35,
    FAMILY_MOE = 1 << ARCH_QWEN3MOE | 1 << ARCH_OLMOE | FAMILY_SHARED,
    FAMILY_EXPERTS = FAMILY_MIXTRAL | FAMILY_MOE | FAMILY_GPTOSS,
    // GGUF has another name for the norm before the MLP
    FAMILY_POST_NAMED = FAMILY_GLM | FAMILY_GPTOSS | FAMILY_QWEN35,
    FAMILY_ROPE = FAMILY_LLAMAS | FAMILY_NANOCHAT | FAMILY_EXPERTS | FAMILY_GRANITE4 | FAMILY_HYBRID,
    // of norms and the heads' projection
    FAMILY_LLAMA_NAMES = FAMILY_ROPE & ~FAMILY_LFM2,
    FAMILY_QKV_APART = FAMILY_ROPE & ~FAMILY_PHI3 & ~FAMILY_DEEPSEEK, // a matrix each
    FAMILY_Q_ALONE = FAMILY_QKV_APART & ~FAMILY_QWEN35,
    // names of the norm before the MLP differ
    FAMILY_FFN_NORM = FAMILY_LLAMA_NAMES & ~FAMILY_POST_NAMED & ~FAMILY_POST_NORM
};

typedef struct {
    int architectures; // FAMILY_...
    // %d is the layer, a second one the expert; NULL: these files have it in other tensors
    const char *hf_name, *gguf_name;
    int row; // of the parameter in the table of model.h
    FileRows rows;
    FileForm form;
} FileTensor;

// clang-format off
//  files     Hugging Face                                       GGUF                        parameter  rows  form
#define FILE_TENSORS(X) \
  X(GPT2,     "transformer.wte.weight",                          "token_embd.weight",        wte,       ALL,  PLAIN) \
  X(GPT2,     "transformer.wpe.weight",                          "position_embd.weight",     wpe,       ALL,  PLAIN) \
  X(GPT2,     "transformer.h.%d.ln_1.weight",                    "blk.%d.attn_norm.weight",  ln1w,      ALL,  PLAIN) \
  X(GPT2,     "transformer.h.%d.ln_1.bias",                      "blk.%d.attn_norm.bias",    ln1b,      ALL,  PLAIN) \
  X(GPT2,     "transformer.h.%d.attn.c_attn.weight",             "blk.%d.attn_qkv.weight",   qkvw,      ALL,  CONV1D) \
  X(GPT2,     "transformer.h.%d.attn.c_attn.bias",               "blk.%d.attn_qkv.bias",     qkvb,      ALL,  PLAIN) \
  X(GPT2,     "transformer.h.%d.attn.c_proj.weight",             "blk.%d.attn_output.weight", attprojw, ALL,  CONV1D) \
  X(GPT2,     "transformer.h.%d.attn.c_proj.bias",               "blk.%d.attn_output.bias",  attprojb,  ALL,  PLAIN) \
  X(GPT2,     "transformer.h.%d.ln_2.weight",                    "blk.%d.ffn_norm.weight",   ln2w,      ALL,  PLAIN) \
  X(GPT2,     "transformer.h.%d.ln_2.bias",                      "blk.%d.ffn_norm.bias",     ln2b,      ALL,  PLAIN) \
  X(GPT2,     "transformer.h.%d.mlp.c_fc.weight",                "blk.%d.ffn_up.weight",     fcw,       ALL,  CONV1D) \
  X(GPT2,     "transformer.h.%d.mlp.c_fc.bias",                  "blk.%d.ffn_up.bias",       fcb,       ALL,  PLAIN) \
  X(GPT2,     "transformer.h.%d.mlp.c_proj.weight",              "blk.%d.ffn_down.weight",   fcprojw,   ALL,  CONV1D) \
  X(GPT2,     "transformer.h.%d.mlp.c_proj.bias",                "blk.%d.ffn_down.bias",     fcprojb,   ALL,  PLAIN) \
  X(GPT2,     "transformer.ln_f.weight",                         "output_norm.weight",       lnfw,      ALL,  PLAIN) \
  X(GPT2,     "transformer.ln_f.bias",                           "output_norm.bias",         lnfb,      ALL,  PLAIN) \
  X(ROPE,     "model.embed_tokens.weight",                       "token_embd.weight",        wte,       ALL,  PLAIN) \
  X(LLAMA_NAMES, "model.layers.%d.input_layernorm.weight",       "blk.%d.attn_norm.weight",  ln1w,      ALL,  PLAIN) \
  X(Q_ALONE,  "model.layers.%d.self_attn.q_proj.weight",         "blk.%d.attn_q.weight",     qkvw,      Q,    HEADS) \
  X(QWEN35,   "model.layers.%d.self_attn.q_proj.weight",          "blk.%d.attn_q.weight",     qkvw,      Q,    QUERIES) \
  X(QWEN35,   "model.layers.%d.self_attn.q_proj.weight",          "blk.%d.attn_q.weight",     attgatew,  ALL,  GATES) \
  X(QKV_APART, "model.layers.%d.self_attn.k_proj.weight",        "blk.%d.attn_k.weight",     qkvw,      K,    HEADS) \
  X(QKV_APART, "model.layers.%d.self_attn.v_proj.weight",        "blk.%d.attn_v.weight",     qkvw,      V,    PLAIN) \
  X(PHI3,     "model.layers.%d.self_attn.qkv_proj.weight",       "blk.%d.attn_qkv.weight",   qkvw,      ALL,  QKV)   \
  X(DEEPSEEK, "model.layers.%d.self_attn.q_proj.weight",         "blk.%d.attn_q.weight",     qkvw,      Q,    TURNS_LAST) \
  X(DEEPSEEK, "model.layers.%d.self_attn.q_a_proj.weight",       "blk.%d.attn_q_a.weight",   qkvw,      LATENT_Q, PLAIN) \
  X(DEEPSEEK, "model.layers.%d.self_attn.q_a_layernorm.weight",  "blk.%d.attn_q_a_norm.weight", lnqw,   ALL,  PLAIN) \
  X(DEEPSEEK, "model.layers.%d.self_attn.q_b_proj.weight",       "blk.%d.attn_q_b.weight",   qupw,      ALL,  TURNS_LAST) \
  X(DEEPSEEK, "model.layers.%d.self_attn.kv_a_proj_with_mqa.weight", "blk.%d.attn_kv_a_mqa.weight", qkvw, LATENT_KV, KEY_TURNS) \
  X(DEEPSEEK, "model.layers.%d.self_attn.kv_a_layernorm.weight", "blk.%d.attn_kv_a_norm.weight", lnkvw, ALL,  PLAIN) \
  X(DEEPSEEK, "model.layers.%d.self_attn.kv_b_proj.weight",      NULL,                       kvupw,     ALL,  PLAIN) \
  X(DEEPSEEK, NULL,                                              "blk.%d.attn_k_b.weight",   kvupw,     HEAD_KEYS, HEAD_KEYS) \
  X(DEEPSEEK, NULL,                                              "blk.%d.attn_v_b.weight",   kvupw,     HEAD_VALUES, HEAD_VALUES) \
  X(ROPE,     "model.layers.%d.self_attn.q_proj.bias",           "blk.%d.attn_q.bias",       qkvb,      Q,    HEADS) \
  X(ROPE,     "model.layers.%d.self_attn.k_proj.bias",           "blk.%d.attn_k.bias",       qkvb,      K,    HEADS) \
  X(ROPE,     "model.layers.%d.self_attn.v_proj.bias",           "blk.%d.attn_v.bias",       qkvb,      V,    PLAIN) \
  X(LLAMA_NAMES, "model.layers.%d.self_attn.q_norm.weight",      "blk.%d.attn_q_norm.weight", qnormw,   ALL,  HEADS) \
  X(LLAMA_NAMES, "model.layers.%d.self_attn.k_norm.weight",      "blk.%d.attn_k_norm.weight", knormw,   ALL,  HEADS) \
  X(ROPE,     "model.layers.%d.self_attn.sinks",                "blk.%d.attn_sinks.weight", sinks,     ALL,  PLAIN) \
  X(LLAMA_NAMES, "model.layers.%d.self_attn.o_proj.weight",      "blk.%d.attn_output.weight", attprojw, ALL,  PLAIN) \
  X(FFN_NORM, "model.layers.%d.post_attention_layernorm.weight", "blk.%d.ffn_norm.weight",   ln2w,      ALL,  PLAIN) \
  X(ROPE,     "model.layers.%d.self_attn.o_proj.bias",           "blk.%d.attn_output.bias",  attprojb,  ALL,  PLAIN) \
  X(POST_NAMED, "model.layers.%d.post_attention_layernorm.weight", "blk.%d.post_attention_norm.weight", ln2w, ALL, PLAIN) \
  X(POST_NORM, "model.layers.%d.post_attention_layernorm.weight", "blk.%d.post_attention_norm.weight", ln1postw, ALL, PLAIN) \
  X(POST_NORM, "model.layers.%d.pre_feedforward_layernorm.weight", "blk.%d.ffn_norm.weight", ln2w,      ALL,  PLAIN) \
  X(POST_NORM, "model.layers.%d.post_feedforward_layernorm.weight", "blk.%d.post_ffw_norm.weight", ln2postw, ALL, PLAIN) \
  X(GLM4,     "model.layers.%d.post_self_attn_layernorm.weight", "blk.%d.post_attention_norm.weight", ln1postw, ALL, PLAIN) \
  X(GLM4,     "model.layers.%d.post_mlp_layernorm.weight",       "blk.%d.post_ffw_norm.weight", ln2postw, ALL, PLAIN) \
  X(MIXTRAL,  "model.layers.%d.block_sparse_moe.gate.weight",    "blk.%d.ffn_gate_inp.weight", routerw, ALL,  PLAIN) \
  X(MOE,      "model.layers.%d.mlp.gate.weight",                 "blk.%d.ffn_gate_inp.weight", routerw, ALL,  PLAIN) \
  X(SHARED,   "model.layers.%d.mlp.gate.e_score_correction_bias", "blk.%d.exp_probs_b.bias", routerb,   ALL,  PLAIN) \
  X(GPTOSS,   "model.layers.%d.mlp.router.weight",               "blk.%d.ffn_gate_inp.weight", routerw, ALL,  PLAIN) \
  X(GPTOSS,   "model.layers.%d.mlp.router.bias",                 "blk.%d.ffn_gate_inp.bias", routerwb,  ALL,  PLAIN) \
  X(GPTOSS,   "model.layers.%d.mlp.experts.gate_up_proj",        NULL,                       efcw,      TURNS, STACK) \
  X(GPTOSS,   "model.layers.%d.mlp.experts.gate_up_proj_bias",   NULL,                       efcb,      TURNS, STACK) \
  X(GPTOSS,   "model.layers.%d.mlp.experts.down_proj",           NULL,                       efcprojw,  ALL,  STACK) \
  X(GPTOSS,   "model.layers.%d.mlp.experts.down_proj_bias",      NULL,                       efcprojb,  ALL,  STACK) \
  X(GPTOSS,   NULL,                                              "blk.%d.ffn_gate_exps.weight", efcw,   GATE, PLAIN) \
  X(GPTOSS,   NULL,                                              "blk.%d.ffn_gate_exps.bias", efcb,     GATE, PLAIN) \
  X(GPTOSS,   NULL,                                              "blk.%d.ffn_up_exps.weight", efcw,     UP,   PLAIN) \
  X(GPTOSS,   NULL,                                              "blk.%d.ffn_up_exps.bias",  efcb,      UP,   PLAIN) \
  X(GPTOSS,   NULL,                                              "blk.%d.ffn_down_exps.weight", efcprojw, ALL, PLAIN) \
  X(GPTOSS,   NULL,                                              "blk.%d.ffn_down_exps.bias", efcprojb, ALL,  PLAIN) \
  X(GATE_UP,  "model.layers.%d.mlp.gate_proj.weight",            "blk.%d.ffn_gate.weight",   fcw,       GATE, PLAIN) \
  X(GATE_UP,  "model.layers.%d.mlp.up_proj.weight",              "blk.%d.ffn_up.weight",     fcw,       UP,   PLAIN) \
  X(GRANITE4, "model.layers.%d.shared_mlp.input_linear.weight",  NULL,                       fcw,       ALL,  PLAIN) \
  X(GRANITE4, NULL,                                              "blk.%d.ffn_gate.weight",   fcw,       GATE, PLAIN) \
  X(GRANITE4, NULL,                                              "blk.%d.ffn_up.weight",     fcw,       UP,   PLAIN) \
  X(FUSED,    "model.layers.%d.mlp.gate_up_proj.weight",         "blk.%d.ffn_up.weight",     fcw,       ALL,  PLAIN) \
  X(ARCEE,    "model.layers.%d.mlp.up_proj.weight",              "blk.%d.ffn_up.weight",     fcw,       ALL,  PLAIN) \
  X(NANOCHAT, "model.layers.%d.mlp.fc1.weight",                  NULL,                       fcw,       ALL,  PLAIN) \
  X(MIXTRAL,  "model.layers.%d.block_sparse_moe.experts.%d.w1.weight", "blk.%d.ffn_gate_exps.weight", efcw, GATE, PLAIN) \
  X(MIXTRAL,  "model.layers.%d.block_sparse_moe.experts.%d.w3.weight", "blk.%d.ffn_up_exps.weight", efcw, UP, PLAIN) \
  X(MOE,      "model.layers.%d.mlp.experts.%d.gate_proj.weight", "blk.%d.ffn_gate_exps.weight", efcw,   GATE, PLAIN) \
  X(MOE,      "model.layers.%d.mlp.experts.%d.up_proj.weight",   "blk.%d.ffn_up_exps.weight", efcw,     UP,   PLAIN) \
  X(DOWN,     "model.layers.%d.mlp.down_proj.weight",            "blk.%d.ffn_down.weight",   fcprojw,   ALL,  PLAIN) \
  X(GRANITE4, "model.layers.%d.shared_mlp.output_linear.weight", "blk.%d.ffn_down.weight",   fcprojw,   ALL,  PLAIN) \
  X(NANOCHAT, "model.layers.%d.mlp.fc2.weight",                  NULL,                       fcprojw,   ALL,  PLAIN) \
  X(MIXTRAL,  "model.layers.%d.block_sparse_moe.experts.%d.w2.weight", "blk.%d.ffn_down_exps.weight", efcprojw, ALL, PLAIN) \
  X(MOE,      "model.layers.%d.mlp.experts.%d.down_proj.weight", "blk.%d.ffn_down_exps.weight", efcprojw, ALL, PLAIN) \
  X(SHARED,   "model.layers.%d.mlp.shared_experts.gate_proj.weight", "blk.%d.ffn_gate_shexp.weight", sfcw, GATE, PLAIN) \
  X(SHARED,   "model.layers.%d.mlp.shared_experts.up_proj.weight", "blk.%d.ffn_up_shexp.weight", sfcw,  UP,   PLAIN) \
  X(SHARED,   "model.layers.%d.mlp.shared_experts.down_proj.weight", "blk.%d.ffn_down_shexp.weight", sfcprojw, ALL, PLAIN) \
  X(LFM2,     "model.layers.%d.operator_norm.weight",          "blk.%d.attn_norm.weight",  ln1w,      ALL,  PLAIN) \
  X(LFM2,     "model.layers.%d.self_attn.q_layernorm.weight",  "blk.%d.attn_q_norm.weight", qnormw,    ALL,  HEADS) \
  X(LFM2,     "model.layers.%d.self_attn.k_layernorm.weight",  "blk.%d.attn_k_norm.weight", knormw,    ALL,  HEADS) \
  X(LFM2,     "model.layers.%d.self_attn.out_proj.weight",     "blk.%d.attn_output.weight", attprojw,  ALL,  PLAIN) \
  X(LFM2,     "model.layers.%d.conv.in_proj.weight",           "blk.%d.shortconv.in_proj.weight", mixw,      ALL,  PLAIN) \
  X(LFM2,     "model.layers.%d.conv.conv.weight",              "blk.%d.shortconv.conv.weight", mixconvw,  ALL,  TAPS) \
  X(LFM2,     "model.layers.%d.conv.out_proj.weight",          "blk.%d.shortconv.out_proj.weight", mixoutw,   ALL,  PLAIN) \
  X(LFM2,     "model.layers.%d.ffn_norm.weight",               "blk.%d.ffn_norm.weight",   ln2w,      ALL,  PLAIN) \
  X(LFM2,     "model.layers.%d.feed_forward.w1.weight",        "blk.%d.ffn_gate.weight",   fcw,       GATE, PLAIN) \
  X(LFM2,     "model.layers.%d.feed_forward.w3.weight",        "blk.%d.ffn_up.weight",     fcw,       UP,   PLAIN) \
  X(LFM2,     "model.layers.%d.feed_forward.w2.weight",        "blk.%d.ffn_down.weight",   fcprojw,   ALL,  PLAIN) \
  X(QWEN35,   "model.layers.%d.linear_attn.in_proj_qkv.weight", "blk.%d.attn_qkv.weight",   mixw,      ALL,  VALUES) \
  X(QWEN35,   "model.layers.%d.linear_attn.in_proj_z.weight",  "blk.%d.attn_gate.weight",  mixzw,     ALL,  VALUES) \
  X(QWEN35,   "model.layers.%d.linear_attn.in_proj_b.weight",  "blk.%d.ssm_beta.weight",   mixbaw,    GATE, VALUES) \
  X(QWEN35,   "model.layers.%d.linear_attn.in_proj_a.weight",  "blk.%d.ssm_alpha.weight",  mixbaw,    UP,   VALUES) \
  X(QWEN35,   "model.layers.%d.linear_attn.conv1d.weight",     "blk.%d.ssm_conv1d.weight", mixconvw,  ALL,  TAPS) \
  X(QWEN35,   "model.layers.%d.linear_attn.A_log",             "blk.%d.ssm_a",             mixdecay,  ALL,  DECAY) \
  X(QWEN35,   "model.layers.%d.linear_attn.dt_bias",           "blk.%d.ssm_dt.bias",       mixstep,   ALL,  VALUES) \
  X(QWEN35,   "model.layers.%d.linear_attn.norm.weight",       "blk.%d.ssm_norm.weight",   mixnormw,  ALL,  PLAIN) \
  X(QWEN35,   "model.layers.%d.linear_attn.out_proj.weight",   "blk.%d.ssm_out.weight",    mixoutw,   ALL,  VALUE_COLS) \
  X(ROPE,     "model.value_embeddings.weight",                   NULL,                       value_table, ALL, PLAIN) \
  X(ROPE,     "model.layers.%d.self_attn.value_gate.weight",     NULL,                       value_gate, ALL, PLAIN) \
  X(ROPE,     "model.layers.%d.residual_scales",                 NULL,                       scales,    ALL,  PLAIN) \
  X(LFM2,     "model.embedding_norm.weight",                   "token_embd_norm.weight",   lnfw,      ALL,  PLAIN) \
  X(LLAMA_NAMES, "model.norm.weight",                            "output_norm.weight",       lnfw,      ALL,  PLAIN) \
  X(ROPE,     "lm_head.weight",                                  "output.weight",            head,      ALL,  PLAIN)
// clang-format on

#define FILE_TENSOR_COUNT_(...) +1
enum { FILE_TENSOR_ROWS = 0 FILE_TENSORS(FILE_TENSOR_COUNT_) };
#undef FILE_TENSOR_COUNT_

static inline const FileTensor* file_tensors(void) {
#define FILE_TENSOR_(files, hf_name, gguf_name, parameter, rows, form)                                       \
    {FAMILY_##files, hf_name,    gguf_name, offsetof(ModelParameters, parameter) / sizeof(floatX*),          \
     ROWS_##rows,    FILE_##form},
    static const FileTensor tensors[FILE_TENSOR_ROWS] = {FILE_TENSORS(FILE_TENSOR_)};
#undef FILE_TENSOR_
    return tensors;
}

// Returns the row of the parameter that gets a tensor of files of an architecture. If these have an
// MLP in all layers and the model experts, each of them gets it.
static inline const TensorRow* file_tensor_row(const FileTensor* tensor, const TensorRow* rows, Arch arch) {
    enum {
        FC = offsetof(ModelParameters, fcw) / sizeof(floatX*),
        FCPROJ = offsetof(ModelParameters, fcprojw) / sizeof(floatX*),
        EFC = offsetof(ModelParameters, efcw) / sizeof(floatX*),
        EFCPROJ = offsetof(ModelParameters, efcprojw) / sizeof(floatX*)
    };
    const int is_copied = model_architecture(arch)->router == ROUTER_NONE && tensor_is_absent(&rows[FC]);
    return &rows[is_copied && tensor->row == FC       ? EFC
                 : is_copied && tensor->row == FCPROJ ? EFCPROJ
                                                      : tensor->row];
}

// Returns 1 if a tensor of queries is of a model whose queries have a latent, or have none, as this
// one's.
static inline int file_tensor_is_of_queries_(const FileTensor* tensor, const TensorRow* rows) {
    const int has_latent = !tensor_is_absent(&rows[offsetof(ModelParameters, qupw) / sizeof(floatX*)]);
    return tensor->rows == ROWS_LATENT_Q                               ? has_latent
           : tensor->rows == ROWS_Q && tensor->form == FILE_TURNS_LAST ? !has_latent
                                                                       : 1;
}

// Returns for how many layers files of an architecture have the tensor (tensor_layer); `name` is
// the tensor's in such files, `rows` the table of parameters.
static inline int file_tensor_layers(const FileTensor* tensor, const char* name, const TensorRow* rows,
                                     Arch arch) {
    return name && tensor->architectures >> arch & 1 && file_tensor_is_of_queries_(tensor, rows)
               ? file_tensor_row(tensor, rows, arch)->uses
               : 0;
}

// Returns true for a tensor of one expert, which GGUF has for all experts of a layer at once.
static inline int file_tensor_is_of_expert(const FileTensor* tensor) {
    return tensor->gguf_name && strstr(tensor->gguf_name, "_exps.");
}

// Returns true for parameters whose tensors have one dimension.
static inline int file_is_vector(const TensorRow* row) {
    return row->rows == 1 && (row->kind == KIND_VECTOR || row->kind == KIND_FIXED);
}

// Lines of a parameter in a tensor of a file: rows of a matrix, elements of a vector.
typedef struct {
    size_t first, count;
    size_t width; // elements of a line
} FileLines;

static inline FileLines file_lines_(size_t first, size_t count, size_t width) {
    const FileLines lines = {first, count, width};
    return lines;
}

// Returns the tensors that a file has of a parameter in a layer: one for each expert, or one.
static inline int file_tensor_parts(const FileTensor* tensor, const TensorRow* row) {
    return tensor->form == FILE_STACK ? 1 : row->experts;
}

// Rows of a head in the matrix out of the latent of keys and values.
typedef struct {
    size_t keys, values;
} FileHeadPart_;

static inline FileHeadPart_ file_head_part_(ModelConfig cfg) {
    const FileHeadPart_ part = {(size_t)(model_head_size(cfg) - cfg.rope_dims), (size_t)cfg.latent.value};
    return part;
}

// Returns the lines of an expert, 0 without experts.
static inline FileLines file_tensor_lines(const FileTensor* tensor, const TensorRow* row, ModelConfig cfg,
                                          int expert) {
    const size_t Q = (size_t)model_heads(cfg), K = (size_t)model_keys(cfg);
    const size_t width = file_is_vector(row) ? 1 : row->cols;
    const size_t all =
                     (file_is_vector(row) ? row->cols : model_rows_in_files(row, cfg)) / (size_t)row->experts,
                 first = (size_t)expert * all;
    switch (tensor->rows) {
    case ROWS_Q:
        return file_lines_(0, Q, width);
    case ROWS_K:
        return file_lines_(Q, K, width);
    case ROWS_V:
        return file_lines_(Q + K, K, width);
    case ROWS_GATE:
        return file_lines_(first, all / 2, width);
    case ROWS_UP:
        return file_lines_(first + all / 2, all / 2, width);
    case ROWS_LATENT_Q:
        return file_lines_(0, (size_t)model_latent_queries(cfg), width);
    case ROWS_LATENT_KV:
        return file_lines_((size_t)model_latent_queries(cfg), (size_t)model_latent_keys(cfg), width);
    case ROWS_HEAD_KEYS:
        return file_lines_(0, (size_t)(cfg.NH * cfg.latent.rank), file_head_part_(cfg).keys);
    case ROWS_HEAD_VALUES:
        return file_lines_(0, (size_t)(cfg.NH * cfg.latent.value), width);
    case ROWS_TURNS:
    case ROWS_ALL:
        break;
    }
    return file_lines_(first, all, width);
}

// Returns the channel in memory for channel `at` of a head in a file, below `dims`, which turn.
static inline size_t file_turning_channel_(HeadOrder order, size_t dims, size_t at) {
    const size_t half = dims / 2;
    const int is_upper = at >= half, is_second = is_upper != (order == ORDER_SWAPPED);
    return order == ORDER_PAIRS ? at : 2 * (at - (is_upper ? half : 0)) + (size_t)is_second;
}

// Returns the line in memory for line `line` of a file, among the lines of all heads of a
// parameter.
static inline size_t file_head_line(HeadOrder order, ModelConfig cfg, size_t line) {
    const size_t HS = (size_t)model_head_size(cfg), dims = (size_t)model_rope_dims(cfg) / 2 * 2,
                 at = line % HS;
    return at < dims ? line - at + file_turning_channel_(order, dims, at) : line;
}

// Returns it if channels that turn are the last of a head in the file, and the first in memory.
static inline size_t file_last_line_(HeadOrder order, ModelConfig cfg, size_t line) {
    const size_t HS = (size_t)model_head_size(cfg), dims = (size_t)cfg.rope_dims, at = line % HS,
                 rest = HS - dims;
    return line - at + (at < rest ? dims + at : file_turning_channel_(order, dims, at - rest));
}

// Returns the line in memory for line `line` of a GGUF file, among `count` whose last ones are of
// the delta rule's heads of values: numbers of each of them, or one.
static inline size_t file_value_line(ModelConfig cfg, size_t count, size_t line) {
    const size_t heads = (size_t)cfg.mixer.value_heads, keys = (size_t)cfg.mixer.key_heads,
                 size = (size_t)cfg.mixer.value_size, each = count < heads * size ? 1 : size,
                 others = count - heads * each;
    if (heads == 0 || line < others) {
        return line;
    }
    const size_t at = line - others, head = at / each;
    return others + (head % keys * (heads / keys) + head / keys) * each + at % each;
}

// Returns the line in memory for line `line` of the `count` that a tensor has.
static inline size_t file_tensor_line(const FileTensor* tensor, FileOrder order, ModelConfig cfg,
                                      size_t count, size_t line) {
    const size_t turned = (size_t)model_heads(cfg) + (size_t)model_keys(cfg), rank = (size_t)cfg.latent.rank,
                 values = (size_t)cfg.latent.value;
    switch (tensor->form) {
    case FILE_HEADS:
    case FILE_QUERIES:
        return file_head_line(order.channels, cfg, line);
    case FILE_QKV:
        return line < turned ? file_head_line(order.channels, cfg, line) : line;
    case FILE_TURNS_LAST:
        return file_last_line_(order.channels, cfg, line);
    case FILE_KEY_TURNS:
        return line < rank ? line
                           : rank + file_turning_channel_(order.channels, (size_t)cfg.rope_dims, line - rank);
    case FILE_HEAD_VALUES: {
        const FileHeadPart_ part = file_head_part_(cfg);
        return line / values * (part.keys + part.values) + part.keys + line % values;
    }
    case FILE_TAPS:
    case FILE_VALUES:
    case FILE_DECAY:
        return order.values_by_turns ? file_value_line(cfg, count, line) : line;
    case FILE_PLAIN:
    case FILE_CONV1D:
    case FILE_STACK:
    case FILE_GATES:
    case FILE_VALUE_COLS:
    case FILE_HEAD_KEYS: // a line is a column of a head
        break;
    }
    return line;
}

// Returns the place in memory of element `i` of line `line` of FILE_HEAD_KEYS, whose lines are the
// columns of each head's keys.
static inline size_t file_key_element(ModelConfig cfg, size_t line, size_t i) {
    const FileHeadPart_ part = file_head_part_(cfg);
    const size_t rank = (size_t)cfg.latent.rank, head = line / rank;
    return (head * (part.keys + part.values) + i) * rank + line % rank;
}

// Returns true for a tensor that has a part of the rows of each head.
static inline int file_tensor_is_by_head(const FileTensor* tensor) {
    return tensor->form == FILE_HEAD_KEYS || tensor->form == FILE_HEAD_VALUES;
}

// Returns true for one of the two parameters of a tensor.
static inline int file_tensor_is_half(const FileTensor* tensor) {
    return tensor->form == FILE_QUERIES || tensor->form == FILE_GATES;
}

// Returns the place in a file for line `line` of what a tensor has of a parameter.
static inline size_t file_half_line(const FileTensor* tensor, ModelConfig cfg, size_t line) {
    const size_t HS = (size_t)model_head_size(cfg), head = line / HS;
    return file_tensor_is_half(tensor) ? line + (head + (tensor->form == FILE_GATES)) * HS : line;
}

// Returns the place among the lines of a file for line `line` in memory, of `count` lines of
// `matrices` in turns.
static inline size_t file_turns_line(size_t count, size_t matrices, size_t line) {
    return line % (count / matrices) * matrices + line / (count / matrices);
}

// Name of a tensor of one layer, or of an expert of it.
typedef struct {
    char text[128];
} FileTensorName;

static inline FileTensorName file_tensor_name(const char* name, int l, int expert) {
    FileTensorName of_layer;
    snprintf(of_layer.text, sizeof(of_layer.text), name, l, expert);
    return of_layer;
}

// Returns a Hugging Face name without the model's prefix, which files without a classifier omit.
static inline const char* file_tensor_bare_name(const char* name) {
    static const char* const prefixes[] = {"transformer.", "model."};
    for (size_t i = 0; i < sizeof(prefixes) / sizeof(prefixes[0]); i++) {
        const size_t length = strlen(prefixes[i]);
        if (strncmp(name, prefixes[i], length) == 0) {
            return name + length;
        }
    }
    return name;
}

#endif
