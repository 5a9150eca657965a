/*
hf_config_families.h -- the families of models in transformers, as config.json names them.
*/
#ifndef LLMC_HF_CONFIG_FAMILIES_H
#define LLMC_HF_CONFIG_FAMILIES_H

#include "llmc/model/families.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HF_FULL_LAYERS 28 // max_window_layers of all classes that have it

#define HF_OWN_TYPE "llmc_" // before the type of a model that no class of transformers computes
#define HF_OWN_CLASS "Llmc" // before its class

// Family of models in transformers: its names in config.json, and the values of missing keys; 0
// means the same as in ModelConfig.
typedef struct {
    const char *type, *class_name;
    const char* activations[3]; // words for the only activation it computes; the first is written
    float norm_eps;
    int KV, HS; // key heads, and size of a head
    int window;
    float softcap;
    int is_tied; // the classifier is the token embedding
    float rope_base;
    int E, E_used, dense_layers;
    const char* hidden;       // key of the MLP's hidden units; NULL: intermediate_size
    const char* experts;      // key of the number of experts
    const char* constants;    // members that say what our kinds compute; NULL: none
    HeadOrder order;          // of the channels of a head in files
    float turned;             // part of a head's channels that turns; 0: all, in all models
    float window_base;        // rope_base of layers with a window; 0: they have the same positions
    int unrotated_every;      // every n-th layer does not turn, unless they are listed; 0: all do
    int rests_without_window; // layers without a window do not turn if there is a sliding_window
    int full_every;           // every n-th layer has no window, unless listed; 0: max_window_layers
    // scores: factor, and number whose root divides them, 0: 1 / sqrt(HS); cap, 0: none
    float attention_scale, query_scalar, attention_softcap;
    const char* mixed_type; // of a layer with a mixer, in layer_types
    ModelMixer mixer;       // values of missing keys of its sizes
    struct {
        ModelLatent sizes;
        int turning, resting; // channels of a head that turn, and that do not
    } latent;                 // so are these
    int groups, groups_used;  // of experts
    float router_factor;
} HfFamily;

extern const HfFamily hf_families[ARCH_COUNT];

// Values of keys that published files of a family leave out; 0: they have them.
typedef struct {
    const char* wrapper; // type of a model that has this one as its text_config
    int V, NH, max_T;
    int original_context; // original_max_position_embeddings
} HfDefaults;

extern const HfDefaults hf_defaults[ARCH_COUNT];

// The bit of an architecture that may have additions: the last column of ARCHITECTURES.
#define FAMILY_ADDITION_(arch, word, positions, norm, place, heads, act, biases, windows, router, embed,     \
                         head, cap, initial, sinks, mixer, additions)                                        \
    | (additions) << arch
enum {
    FAMILY_EXAONE4 = 1 << ARCH_EXAONE4,
    FAMILY_SWITCHED = 1 << ARCH_QWEN2 | 1 << ARCH_QWEN3 | 1 << ARCH_QWEN3MOE | 1 << ARCH_SMOLLM3,
    FAMILY_WINDOWS = 1 << ARCH_MISTRAL | 1 << ARCH_MIXTRAL | FAMILY_GEMMA | FAMILY_PHI3 | FAMILY_SWITCHED |
                     1 << ARCH_OLMO3 | FAMILY_EXAONE4 | FAMILY_GPTOSS,
    FAMILY_WHOLE_HEADS = 1 << ARCH_LLAMA | 1 << ARCH_ARCEE | FAMILY_GEMMA, // divide channels
    FAMILY_ADDITIONS = 0 ARCHITECTURES(FAMILY_ADDITION_),                  // of ours
    FAMILY_CAPPED = 1 << ARCH_NANOCHAT | FAMILY_GEMMA2,                    // logits
    FAMILY_QWEN3MOE = 1 << ARCH_QWEN3MOE,
    FAMILY_OLMOE = 1 << ARCH_OLMOE,
    FAMILY_RMS_EPS = FAMILY_ROPE & ~FAMILY_LFM2,    // by that name
    FAMILY_FULL_HEADS = FAMILY_OLMOE | FAMILY_PHI3, // heads x head size are the channels
    FAMILY_MOE_HIDDEN = FAMILY_QWEN3MOE | FAMILY_SHARED,
    FAMILY_OWN_HIDDEN = FAMILY_MOE_HIDDEN | FAMILY_GRANITE4, // intermediate_size is another one
    FAMILY_BIASES = 1 << ARCH_QWEN2 | FAMILY_GLM | FAMILY_GLM4 | FAMILY_GPTOSS,
    FAMILY_PADDED = 1 << ARCH_SMOLLM3 | FAMILY_FUSED, // a missing pad_token_id is a large id
    // with keys of the scale and the cap of attention's scores
    FAMILY_ATTENTION_SCALE = FAMILY_GEMMA | FAMILY_GRANITE,
    FAMILY_ATTENTION_CAP = FAMILY_GEMMA2,
    FAMILY_ALL = (1 << ARCH_COUNT) - 1
};

#ifdef __cplusplus
}
#endif

#ifdef HF_CONFIG_FAMILIES_IMPLEMENTATION

// clang-format off
const HfFamily hf_families[ARCH_COUNT] = {
    [ARCH_GPT2] = {"gpt2", "GPT2LMHeadModel", {"gelu_new", "gelu_pytorch_tanh", "gelu_fast"}, .norm_eps = 1e-5f,
     .is_tied = 1, .hidden = "n_inner"},
    [ARCH_LLAMA] = {"llama", "LlamaForCausalLM", {"silu", "swish"}, .norm_eps = 1e-6f},
    [ARCH_MISTRAL] = {"mistral", "MistralForCausalLM", {"silu", "swish"}, .norm_eps = 1e-6f, .KV = 8, .window = 4096},
    [ARCH_QWEN2] = {"qwen2", "Qwen2ForCausalLM", {"silu", "swish"}, .norm_eps = 1e-6f, .KV = 32, .window = 4096},
    [ARCH_QWEN3] = {"qwen3", "Qwen3ForCausalLM", {"silu", "swish"}, .norm_eps = 1e-6f,
     .KV = 32, .HS = 128, .window = 4096},
    [ARCH_ARCEE] = {"arcee", "ArceeForCausalLM", {"relu2"}, .norm_eps = 1e-5f},
    [ARCH_NANOCHAT] = {"nanochat", "NanoChatForCausalLM", {"relu2"}, .norm_eps = 1e-6f,
     .softcap = 15, .order = ORDER_SWAPPED},
    [ARCH_MIXTRAL] = {"mixtral", "MixtralForCausalLM", {"silu", "swish"}, .norm_eps = 1e-5f,
     .KV = 8, .rope_base = 1e6, .E = 8, .E_used = 2, .experts = "num_local_experts",
     .constants = "  \"router_jitter_noise\": 0.0,\n"},
    [ARCH_QWEN3MOE] = {"qwen3_moe", "Qwen3MoeForCausalLM", {"silu", "swish"}, .norm_eps = 1e-6f,
     .KV = 4, .window = 4096, .E = 128, .E_used = 8, .hidden = "moe_intermediate_size",
     .experts = "num_experts",
     .constants = "  \"norm_topk_prob\": true,\n  \"decoder_sparse_step\": 1,\n  \"mlp_only_layers\": [],\n"},
    [ARCH_OLMOE] = {"olmoe", "OlmoeForCausalLM", {"silu", "swish"}, .norm_eps = 1e-5f,
     .E = 64, .E_used = 8, .experts = "num_experts",
     .constants = "  \"norm_topk_prob\": false,\n  \"clip_qkv\": null,\n"},
    [ARCH_GLM4MOE] = {"glm4_moe", "Glm4MoeForCausalLM", {"silu", "swish"}, .norm_eps = 1e-5f,
     .KV = 8, .E = 128, .E_used = 8, .dense_layers = 1, .hidden = "moe_intermediate_size",
     .experts = "n_routed_experts",
     .constants = "  \"attention_bias\": true,\n  \"use_qk_norm\": true,\n  \"norm_topk_prob\": true,\n"
         "  \"num_nextn_predict_layers\": 0,\n",
     .turned = 0.5f},
    [ARCH_OLMO2] = {"olmo2", "Olmo2ForCausalLM", {"silu", "swish"}, .norm_eps = 1e-5f},
    [ARCH_GEMMA2] = {"gemma2", "Gemma2ForCausalLM", {"gelu_pytorch_tanh"}, .norm_eps = 1e-6f,
     .KV = 4, .HS = 256, .window = 4096, .softcap = 30, .is_tied = 1,
     .constants = "  \"hidden_activation\": \"gelu_pytorch_tanh\",\n", .full_every = 2,
     .query_scalar = 256, .attention_softcap = 50},
    [ARCH_GRANITE] = {"granite", "GraniteForCausalLM", {"silu", "swish"}, .norm_eps = 1e-6f, .attention_scale = 1},
    [ARCH_SMOLLM3] = {"smollm3", "SmolLM3ForCausalLM", {"silu", "swish"}, .norm_eps = 1e-6f,
     .KV = 4, .is_tied = 1, .rope_base = 2e6, .unrotated_every = 4},
    [ARCH_OLMO3] = {"olmo3", "Olmo3ForCausalLM", {"silu", "swish"}, .norm_eps = 1e-5f,
     .window = 4096, .rope_base = 5e5, .window_base = 5e5, .full_every = 4},
    [ARCH_EXAONE4] = {"exaone4", "Exaone4ForCausalLM", {"silu", "swish"}, .norm_eps = 1e-5f,
     .KV = 32, .window = 4096, .rests_without_window = 1, .full_every = 4},
    [ARCH_GRANITE4] = {"granitemoehybrid", "GraniteMoeHybridForCausalLM", {"silu", "swish"}, .norm_eps = 1e-6f,
     .hidden = "shared_intermediate_size",
     .constants = "  \"num_local_experts\": 0,\n  \"num_experts_per_tok\": 0,\n  \"mamba_n_heads\": 1,\n",
     .attention_scale = 1},
    [ARCH_GEMMA3] = {"gemma3_text", "Gemma3ForCausalLM", {"gelu_pytorch_tanh"}, .norm_eps = 1e-6f,
     .KV = 4, .HS = 256, .window = 4096, .is_tied = 1, .rope_base = 1e6,
     .constants = "  \"hidden_activation\": \"gelu_pytorch_tanh\",\n", .window_base = 1e4f,
     .full_every = 6, .query_scalar = 256},
    [ARCH_PHI3] = {"phi3", "Phi3ForCausalLM", {"silu", "swish"}, .norm_eps = 1e-5f, .turned = 1},
    [ARCH_GLM4] = {"glm4", "Glm4ForCausalLM", {"silu", "swish"}, .norm_eps = 1.5625e-7f,
     .KV = 2, .HS = 128, .constants = "  \"attention_bias\": true,\n", .order = ORDER_PAIRS,
     .turned = 0.5f},
    [ARCH_GPTOSS] = {"gpt_oss", "GptOssForCausalLM", {"silu", "swish"}, .norm_eps = 1e-5f,
     .KV = 8, .HS = 64, .window = 128, .rope_base = 1.5e5f, .E = 128, .E_used = 4,
     .experts = "num_local_experts",
     .constants = "  \"attention_bias\": true,\n  \"swiglu_limit\": 7.0,\n  \"swiglu_alpha\": 1.702,\n",
     .full_every = 2},
    [ARCH_QWEN35] = {"qwen3_5_text", "Qwen3_5ForCausalLM", {"silu", "swish"}, .norm_eps = 1e-6f,
     .KV = 4, .HS = 256, .turned = 0.25f, .mixed_type = "linear_attention",
     .mixer = {.taps = 4, .key_heads = 16, .value_heads = 32, .key_size = 128, .value_size = 128}},
    [ARCH_LFM2] = {"lfm2", "Lfm2ForCausalLM", {"silu", "swish"}, .norm_eps = 1e-5f,
     .KV = 8, .is_tied = 1, .rope_base = 1e6,
     .constants = "  \"conv_bias\": false,\n  \"block_auto_adjust_ff_dim\": false,\n",
     .mixed_type = "conv", .mixer = {.taps = 3}},
    [ARCH_DEEPSEEK3] = {"deepseek_v3", "DeepseekV3ForCausalLM", {"silu", "swish"}, .norm_eps = 1e-6f,
     .E = 256, .E_used = 8, .dense_layers = 3, .hidden = "moe_intermediate_size",
     .experts = "n_routed_experts",
     .constants = "  \"norm_topk_prob\": true,\n  \"scoring_func\": \"sigmoid\",\n  \"topk_method\": \"noaux_tc\",\n"
         "  \"moe_layer_freq\": 1,\n  \"num_nextn_predict_layers\": 0,\n",
     .order = ORDER_PAIRS, .latent = {.sizes = {.query_rank = 1536, .rank = 512, .value = 128}, .turning = 64, .resting = 128},
     .groups = 8, .groups_used = 4, .router_factor = 2.5f},
};

const HfDefaults hf_defaults[ARCH_COUNT] = {
    [ARCH_GEMMA3] = {.wrapper = "gemma3", .V = 262208, .NH = 8, .max_T = 131072},
    [ARCH_PHI3] = {.original_context = 4096},
    [ARCH_QWEN35] = {.wrapper = "qwen3_5", .V = 248320, .NH = 16, .max_T = 32768},
    [ARCH_LFM2] = {.V = 65536, .NH = 32, .max_T = 128000},
};
// clang-format on

#endif // HF_CONFIG_FAMILIES_IMPLEMENTATION

#endif
