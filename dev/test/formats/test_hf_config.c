// test_hf_config.c -- hf_config.h: each family's config.json, its defaults and older keys, is read
// and written; whatever changes what a model computes, and is not supported, is refused by name.
#define HF_CONFIG_IMPLEMENTATION
#define HF_CONFIG_WRITE_IMPLEMENTATION

#include <sys/stat.h>

#include "llmc/formats/hf_config.h"
#include "llmc/formats/hf_config_write.h"
#include "dev/test/lib/test.h"

// Sizes that all families but GPT-2 must have, with intermediate_size.
#define SIZES_OF(hidden, heads)                                                                              \
    "'vocab_size':61,'hidden_size':" hidden ",'num_hidden_layers':3,'num_attention_heads':" heads            \
    ",'max_position_embeddings':64"
#define SIZES SIZES_OF("24", "4")

// Writes a config.json with ' for ".
static const char* write_config(const char* members) {
    char text[4096];
    const char* directory = test_path("config");
    mkdir(directory, 0777);
    const int length = snprintf(text, sizeof(text), "{%s}", members);
    EXPECT(0 < length && length < (int)sizeof(text), "%s", members);
    for (char* c = text; *c; c++) {
        *c = *c == '\'' ? '"' : *c;
    }
    test_write("config/config.json", text, (size_t)length);
    return directory;
}

static ModelConfig read_members(const char* type, const char* members) {
    char text[4096];
    snprintf(text, sizeof(text), "'model_type':'%s'," SIZES ",'intermediate_size':40%s%s", type,
             members[0] ? "," : "", members);
    return hf_config_read(write_config(text));
}

// A missing key has the value that the family's class gives it in transformers 5.23.
TEST(defaults) {
    static const struct {
        const char* type;
        Arch arch;
        float eps, softcap;
        int KV, HS, window;
    } cases[] = {
        {"llama", ARCH_LLAMA, 1e-6f, 0, 4, 6, 0},  {"mistral", ARCH_MISTRAL, 1e-6f, 0, 8, 6, 4096},
        {"qwen2", ARCH_QWEN2, 1e-6f, 0, 32, 6, 0}, {"qwen3", ARCH_QWEN3, 1e-6f, 0, 32, 128, 0},
        {"arcee", ARCH_ARCEE, 1e-5f, 0, 4, 6, 0},  {"nanochat", ARCH_NANOCHAT, 1e-6f, 15, 4, 6, 0},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        // 64 heads fit every default number of key heads
        char text[1024];
        snprintf(text, sizeof(text), "'model_type':'%s','intermediate_size':40,%s", cases[i].type,
                 cases[i].KV > 4 ? SIZES_OF("384", "64") : SIZES);
        const ModelConfig cfg = hf_config_read(write_config(text));
        EXPECT(cfg.arch == cases[i].arch && model_norm_eps(cfg) == cases[i].eps &&
                   cfg.softcap == cases[i].softcap && model_key_heads(cfg) == cases[i].KV &&
                   model_head_size(cfg) == cases[i].HS && cfg.window == cases[i].window && cfg.has_head &&
                   model_rope_base(cfg) == 10000 && cfg.scaling.kind == ROPE_PLAIN && model_hidden(cfg) == 40,
               "%s: eps %g, softcap %g, %d key heads of %d, window %d", cases[i].type,
               (double)model_norm_eps(cfg), (double)cfg.softcap, model_key_heads(cfg), model_head_size(cfg),
               cfg.window);
    }
}

// Keys of experts' families that have no default, or another than what we compute.
static const char* experts_members(const char* type) {
    return strcmp(type, "qwen3_moe") == 0  ? "'moe_intermediate_size':16,'norm_topk_prob':true"
           : strcmp(type, "glm4_moe") == 0 ? "'moe_intermediate_size':16,'attention_bias':true,'use_qk_norm':"
                                             "true,'first_k_dense_replace':0"
                                           : "'norm_topk_prob':false";
}

static ModelConfig read_experts(const char* type, const char* members) {
    char text[2048];
    snprintf(text, sizeof(text), "'num_key_value_heads':2,%s%s%s", experts_members(type),
             members[0] ? "," : "", members);
    return read_members(type, text);
}

TEST(experts) {
    // clang-format off
    static const struct {
        const char *type, *members;
        float eps, base;
        int E, E_used, F, Fs, rope_dims, window;
        float factor;
    } cases[] = {
        {"mixtral", "", 1e-5f, 1e6f, 8, 2, 40, 0, 6, 0, 1},
        {"mixtral", "'num_local_experts':4,'num_experts_per_tok':1,'rope_theta':5e5,'sliding_window':7",
         1e-5f, 5e5f, 4, 1, 40, 0, 6, 7, 1},
        {"mixtral", "'num_experts':4,'router_jitter_noise':0.0,'output_router_logits':true",
         1e-5f, 1e6f, 4, 2, 40, 0, 6, 0, 1},
        {"qwen3_moe", "", 1e-6f, 1e4f, 128, 8, 16, 0, 6, 0, 1},
        {"qwen3_moe", "'num_experts':4,'num_local_experts':4,'num_experts_per_tok':3,'mlp_only_layers':null,"
                      "'decoder_sparse_step':1,'sliding_window':7", 1e-6f, 1e4f, 4, 3, 16, 0, 6, 0, 1},
        {"qwen3_moe", "'use_sliding_window':true,'sliding_window':7,'mlp_only_layers':[]",
         1e-6f, 1e4f, 128, 8, 16, 0, 6, 7, 1},
        {"olmoe", "", 1e-5f, 1e4f, 64, 8, 40, 0, 6, 0, 1},
        {"olmoe", "'num_experts':4,'num_experts_per_tok':2,'clip_qkv':null", 1e-5f, 1e4f, 4, 2, 40, 0, 6, 0, 1},
        {"glm4_moe", "'head_dim':8", 1e-5f, 1e4f, 128, 8, 16, 16, 4, 0, 1},
        {"glm4_moe", "'head_dim':8,'n_routed_experts':4,'n_shared_experts':2,'num_experts_per_tok':2,'n_group':1,"
                     "'topk_group':1,'routed_scaling_factor':2.5,'scoring_func':'sigmoid','partial_rotary_factor':1.0",
         1e-5f, 1e4f, 4, 2, 16, 32, 8, 0, 2.5f},
        {"glm4_moe", "'head_dim':8,'rope_parameters':{'rope_type':'default','rope_theta':2e4,"
                     "'partial_rotary_factor':0.25}", 1e-5f, 2e4f, 128, 8, 16, 16, 2, 0, 1},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const ModelConfig cfg = read_experts(cases[i].type, cases[i].members);
        EXPECT(model_norm_eps(cfg) == cases[i].eps && model_rope_base(cfg) == cases[i].base &&
                   cfg.E == cases[i].E && cfg.E_used == cases[i].E_used && cfg.F == cases[i].F &&
                   cfg.Fs == cases[i].Fs && model_rope_dims(cfg) == cases[i].rope_dims &&
                   cfg.window == cases[i].window && model_router_factor(cfg) == cases[i].factor,
               "%s, %s: %d of %d experts of %d, %d shared, %d channels turn, window %d", cases[i].type,
               cases[i].members, cfg.E_used, cfg.E, cfg.F, cfg.Fs, model_rope_dims(cfg), cfg.window);
    }
}

static int has_windows(ModelConfig cfg, const char* pattern) {
    int same = (int)strlen(pattern) == cfg.L;
    for (int l = 0; l < cfg.L && same; l++) {
        same = model_window(cfg, l) == (pattern[l] == 'S' ? cfg.window : 0);
    }
    return same;
}

TEST(windows) {
    static const struct {
        const char *type, *members, *pattern;
        int window;
    } cases[] = {
        {"mistral", "'num_key_value_heads':2,'sliding_window':null", "LLL", 0},
        {"mistral", "'num_key_value_heads':2,'sliding_window':7", "SSS", 7},
        {"mistral",
         "'num_key_value_heads':2,'sliding_window':7,'layer_types':['sliding_attention','sliding_attention',"
         "'sliding_attention']",
         "SSS", 7},
        {"llama", "'sliding_window':7", "LLL", 0}, // transformers' class does not read it
        {"qwen2", "'num_key_value_heads':2,'sliding_window':7", "LLL", 0},
        {"qwen2", "'num_key_value_heads':2,'use_sliding_window':true,'sliding_window':7", "LLL",
         0}, // from 28
        {"qwen2",
         "'num_key_value_heads':2,'use_sliding_window':true,'sliding_window':7,'max_window_layers':1", "LSS",
         7},
        {"qwen2",
         "'num_key_value_heads':2,'use_sliding_window':true,'sliding_window':7,'max_window_layers':1,"
         "'layer_types':['sliding_attention','full_attention','sliding_attention']",
         "SLS", 7},
        {"qwen3", "'num_key_value_heads':2,'use_sliding_window':true,'max_window_layers':2", "LLS", 4096},
        {"qwen3",
         "'num_key_value_heads':2,'use_sliding_window':true,'sliding_window':null,'max_window_layers':0",
         "LLL", 0},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const ModelConfig cfg = read_members(cases[i].type, cases[i].members);
        EXPECT(cfg.window == cases[i].window && has_windows(cfg, cases[i].pattern), "%s, %s: window %d",
               cases[i].type, cases[i].members, cfg.window);
    }
}

#define FACTORS "'short_factor':[1,1.5,2],'long_factor':[4.0,5,60]"

TEST(rotary_positions) {
    static const char llama3[] = "'factor':8.0,'low_freq_factor':1,'high_freq_factor':4.0";
    static const struct {
        const char* members;
        float base;
        RopeScaling scaling;
    } cases[] = {
        {"'rope_theta':5e5", 5e5f, {ROPE_PLAIN}},
        {"'rope_theta':5e5,'rope_scaling':null,'rope_parameters':{'rope_theta':500000,'rope_type':'default'}",
         5e5f,
         {ROPE_PLAIN}},
        {"'rope_parameters':{'rope_theta':20000.0,'rope_type':'linear','factor':2}", 20000, {ROPE_LINEAR, 2}},
        {"'rope_scaling':{'type':'linear','factor':2.5}", 10000, {ROPE_LINEAR, 2.5f}},
        {"'rope_scaling':{'rope_type':'llama3',%s,'original_max_position_embeddings':32}",
         10000,
         {ROPE_LLAMA3, 8, 1, 4, 32}},
        {"'rope_parameters':{'rope_theta':5e5,'rope_type':'llama3',%s}", 5e5f, {ROPE_LLAMA3, 8, 1, 4, 64}},
        {"'original_max_position_embeddings':16,'rope_scaling':{'rope_type':'llama3',%s}", // wins
         10000,
         {ROPE_LLAMA3, 8, 1, 4, 16}},
        {"'rope_scaling':{'type':'yarn','factor':8.0,'original_max_position_embeddings':32,'beta_fast':null}",
         10000,
         {ROPE_YARN, 8, 1, 32, 32, 1.2079441541679836f}},
        {"'rope_parameters':{'rope_type':'yarn','rope_theta':1e4,'factor':32.0,'truncate':false,"
         "'beta_fast':16,'beta_slow':0,'mscale':0}",
         10000,
         {ROPE_YARN, 32, 1, 16, 64, 1.3465735902799727f, 1}},
        {"'rope_scaling':{'type':'yarn','factor':40,'mscale':1.0,'mscale_all_dim':1.0}",
         10000,
         {ROPE_YARN, 40, 1, 32, 64, 1}},
        {"'rope_scaling':{'type':'yarn','factor':40,'mscale':0.707}",
         10000,
         {ROPE_YARN, 40, 1, 32, 64, 1.3688879454f}},
        {"'rope_scaling':{'type':'yarn','factor':null,'original_max_position_embeddings':16,"
         "'attention_factor':1.5}",
         10000,
         {ROPE_YARN, 4, 1, 32, 16, 1.5f}},
        {"'rope_scaling':{'type':'su'," FACTORS "},'original_max_position_embeddings':4",
         10000,
         {ROPE_LONG, 16, 0, 0, 4, 1.7320508f}},                               // sqrt(1 + 4 / 2)
        {"'rope_scaling':{'type':'yarn'," FACTORS ",'attention_factor':2.0}", // old files of Phi 3
         10000,
         {ROPE_LONG, 1, 0, 0, 64, 2}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char members[512];
        snprintf(members, sizeof(members), cases[i].members, llama3);
        const ModelConfig cfg = read_members("llama", members);
        EXPECT(model_rope_base(cfg) == cases[i].base &&
                   memcmp(&cfg.scaling, &cases[i].scaling, sizeof(cfg.scaling)) == 0,
               "%s: base %g, kind %d, factor %g, a %.9g", members, (double)model_rope_base(cfg),
               cfg.scaling.kind, (double)cfg.scaling.factor, (double)cfg.scaling.attention);
        const RopeFactors none = {{0}, {0}}, factors = {{1, 1.5f, 2}, {4, 5, 60}};
        EXPECT(memcmp(&cfg.rope_factors, cfg.scaling.kind == ROPE_LONG ? &factors : &none, sizeof(none)) == 0,
               "%s: factors", members);
    }
}

// ---- rotary positions by layer ----

// Reads members as the file of a family that differs from Qwen 3.
static ModelConfig read_as(HfFamily family, const char* members) {
    char text[2048], error[ERROR_BYTES] = "";
    HfConfig_ config;
    snprintf(text, sizeof(text),
             "{" SIZES ",'intermediate_size':40,'num_key_value_heads':2,'head_dim':8%s%s}",
             members[0] ? "," : "", members);
    for (char* c = text; *c; c++) {
        *c = *c == '\'' ? '"' : *c;
    }
    memset(&config, 0, sizeof(config));
    config.cfg.arch = ARCH_QWEN3;
    config.family = &family;
    JsonReader reader = json_reader("config.json", text, strlen(text), error);
    CHECK(hf_config_parse_as_(&reader, &config), "%s", error);
    free(config.keys);
    return config.cfg;
}

// Writes the rotary positions and windows of a model, and reads them as above.
static ModelConfig write_as(HfFamily family, ModelConfig cfg) {
    char path[PATH_MAX], *text, error[ERROR_BYTES];
    size_t bytes;
    snprintf(path, sizeof(path), "%s", test_path("positions.json"));
    FILE* file = fopen(path, "w");
    hf_write_rope_(file, cfg, &family);
    hf_write_windows_(file, cfg);
    fprintf(file, "  \"head_dim\": 8"); // cut off again, with the comma
    fclose(file);
    CHECK(file_try_read(path, 1 << 16, &text, &bytes, error), "%s", error);
    text[bytes - strlen(",\n  \"head_dim\": 8")] = '\0';
    const ModelConfig again = read_as(family, text);
    free(text);
    return again;
}

// Layers with a window have positions of their own, in the new form and in the old one.
TEST(positions_by_window) {
#define WINDOW                                                                                               \
    "'use_sliding_window':true,'sliding_window':7,'layer_types':['sliding_attention','full_attention','"     \
    "sliding_attention']"
#define YARN "'rope_type':'yarn','factor':8.0,'original_max_position_embeddings':32"
    static const RopeScaling plain = {ROPE_PLAIN}, linear = {ROPE_LINEAR, 8},
                             yarn = {ROPE_YARN, 8, 1, 32, 32, 1.2079441541679836f},
                             exact = {ROPE_YARN, 8, 1, 32, 32, 1.2079441541679836f, 1};
    static const struct {
        const char* members;
        float base, window_base;
        RopeScaling scaling, window_scaling;
    } cases[] = {
        {WINDOW, 1e6f, 1e4f, plain, plain},
        {WINDOW
         ",'rope_theta':5e5,'rope_local_base_freq':2e4,'rope_scaling':{'rope_type':'linear','factor':8}",
         5e5f, 2e4f, linear, plain},
        {WINDOW ",'rope_parameters':{'full_attention':{'rope_type':'linear','factor':8,'rope_theta':5e5},"
                "'sliding_attention':{'rope_type':'default','rope_theta':2e4}}",
         5e5f, 2e4f, linear, plain},
        {WINDOW ",'rope_parameters':{'full_attention':{" YARN ",'truncate':false},'sliding_attention':null}",
         1e6f, 1e4f, yarn, plain}, // not read there by transformers 5.23
        {WINDOW ",'rope_parameters':{'truncate':false,'full_attention':null,'sliding_attention':{" YARN "}}",
         1e6f, 1e4f, plain, exact},
        {WINDOW ",'rope_theta':1e4", 1e4f, 0, plain, plain}, // the same in all layers
        {"'rope_theta':5e5", 5e5f, 0, plain, plain},
    };
    HfFamily family = hf_families[ARCH_QWEN3];
    family.rope_base = 1e6f, family.window_base = 1e4f;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const ModelConfig cfg = read_as(family, cases[i].members);
        EXPECT(cfg.rope_base == cases[i].base && cfg.window_rope_base == cases[i].window_base &&
                   memcmp(&cfg.scaling, &cases[i].scaling, sizeof(cfg.scaling)) == 0 &&
                   memcmp(&cfg.window_scaling, &cases[i].window_scaling, sizeof(cfg.scaling)) == 0,
               "%s: bases %g and %g, kinds %d and %d", cases[i].members, (double)cfg.rope_base,
               (double)cfg.window_rope_base, cfg.scaling.kind, cfg.window_scaling.kind);
        const ModelConfig again = write_as(family, cfg);
        EXPECT(i == 4 || memcmp(&again, &cfg, sizeof(cfg)) == 0, "%s: written", cases[i].members);
    }
}

static void expect_unrotated(HfFamily family, const char* members, uint8_t unrotated, uint8_t windows) {
    char error[ERROR_BYTES] = "";
    const ModelConfig cfg = read_as(family, members), again = write_as(family, cfg);
    EXPECT(cfg.unrotated[0] == unrotated && cfg.windows[0] == windows, "%s: unrotated %d, windows %d",
           members, cfg.unrotated[0], cfg.windows[0]);
    EXPECT(hf_check_rope_(cfg, &family, error), "%s: %s", members, error);
    EXPECT(memcmp(&again, &cfg, sizeof(cfg)) == 0, "%s: written", members);
    EXPECT(hf_check_rope_(cfg, &hf_families[ARCH_QWEN3], error) == !unrotated, "%s: of Qwen 3", members);
}

// Layers that do not turn: every n-th one, those of a list, those without a window beside windows.
TEST(layers_without_positions) {
    HfFamily listed = hf_families[ARCH_QWEN3], by_window = listed;
    listed.unrotated_every = 3, by_window.rests_without_window = 1;
    expect_unrotated(listed, "'use_cache':true", 4, 0);
    expect_unrotated(listed, "'no_rope_layer_interval':2", 2, 0);
    expect_unrotated(listed, "'no_rope_layers':[1,0,1],'no_rope_layer_interval':1", 2, 0);
    expect_unrotated(listed, "'no_rope_layers':[0,1,1],'use_sliding_window':true,'sliding_window':7", 1, 1);
    expect_unrotated(listed, "'no_rope_layers':null," WINDOW, 4, 5);
    expect_unrotated(by_window, WINDOW, 2, 5);
    expect_unrotated(by_window, "'sliding_window':null", 0, 0);
#undef WINDOW
}

// Families whose layers differ: the values of missing keys, and old keys.
TEST(kinds_of_layers) {
    // clang-format off
#define HYBRID_ "'num_local_experts':0,'shared_intermediate_size':36,'layer_types':["
    static const struct {
        const char *type, *members;
        float base, window_base;
        int KV, F, window;
        uint8_t windows, unrotated;
    } cases[] = {
        {"smollm3", "", 2e6f, 0, 4, 40, 0, 0, 0},
        {"smollm3", "'rope_theta':5e6,'no_rope_layer_interval':2,'use_sliding_window':true,'sliding_window':7",
         5e6f, 0, 4, 40, 7, 2, 2},
        {"olmo3", "", 5e5f, 0, 4, 40, 4096, 7, 0},
        {"olmo3", "'rope_theta':2e4,'rope_scaling':{'rope_type':'yarn','factor':8.0},'layer_types':"
                  "['full_attention','sliding_attention','full_attention']", 2e4f, 5e5f, 4, 40, 4096, 2, 0},
        {"exaone4", "'num_key_value_heads':2,'sliding_window_pattern':2", 1e4f, 0, 2, 40, 4096, 5, 2},
        {"exaone4", "'num_key_value_heads':2,'sliding_window':null,'sliding_window_pattern':null",
         1e4f, 0, 2, 40, 0, 0, 0},
        {"exaone4", "'num_key_value_heads':2,'sliding_window':9,'sliding_window_pattern':'LG','layer_types':"
                    "['full_attention','sliding_attention','full_attention']", 1e4f, 0, 2, 40, 9, 2, 5},
        {"granitemoehybrid", HYBRID_ "'attention','attention','attention'],'position_embedding_type':'rope'",
         1e4f, 0, 4, 36, 0, 0, 0},
        {"granitemoehybrid", HYBRID_ "'full_attention','full_attention','full_attention']", 1e4f, 0, 4, 36, 0, 0, 7},
    };
    // clang-format on
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const ModelConfig cfg = read_members(cases[i].type, cases[i].members);
        EXPECT(model_rope_base(cfg) == cases[i].base && cfg.window_rope_base == cases[i].window_base &&
                   cfg.KV == cases[i].KV && cfg.F == cases[i].F && cfg.window == cases[i].window &&
                   cfg.windows[0] == cases[i].windows && cfg.unrotated[0] == cases[i].unrotated,
               "%s, %s: bases %g and %g, %d heads of keys, %d hidden, window %d in %d, unrotated %d",
               cases[i].type, cases[i].members, (double)cfg.rope_base, (double)cfg.window_rope_base, cfg.KV,
               cfg.F, cfg.window, cfg.windows[0], cfg.unrotated[0]);
    }
}

// Layers with a mixer in the place of attention, and its sizes; LFM2's rule for hidden units.
TEST(layers_without_attention) {
    // clang-format off
#define KV_ "'num_key_value_heads':2"
#define TYPES_(type) "'layer_types':['" type "','full_attention','" type "']"
    static const struct {
        const char *type, *members;
        uint8_t mixed;
        int F, has_head, rope_dims;
        ModelMixer mixer;
    } cases[] = {
        {"qwen3_5_text", "", 7, 40, 1, 64, {4, 16, 32, 128, 128}},
        {"qwen3_5_text", "'full_attention_interval':2,'partial_rotary_factor':0.5", 5, 40, 1, 128, {4, 16, 32, 128, 128}},
        {"qwen3_5_text", "'full_attention_interval':3," TYPES_("linear_attention") ",'linear_conv_kernel_dim':2,"
         "'linear_num_key_heads':3,'linear_num_value_heads':6,'linear_key_head_dim':8,'linear_value_head_dim':16,"
         "'attn_output_gate':true,'rope_parameters':{'mrope_section':[11,11,10],'mrope_interleaved':true,"
         "'rope_type':'default','rope_theta':1e4}", 5, 40, 1, 64, {2, 3, 6, 8, 16}},
        {"lfm2", KV_, 0, 256, 0, 0, {3, 0, 0, 0, 0}},
        {"lfm2", KV_ ",'full_attn_idxs':[1],'tie_word_embeddings':true,'tie_embedding':false,"
         "'block_auto_adjust_ff_dim':false", 5, 40, 1, 0, {3, 0, 0, 0, 0}},
        {"lfm2", KV_ "," TYPES_("conv") ",'block_ff_dim':3001,'conv_L_cache':4,'block_ffn_dim_multiplier':1.25,"
         "'block_multiple_of':10", 5, 2500, 0, 0, {4, 0, 0, 0, 0}},
    };
#undef KV_
#undef TYPES_
    // clang-format on
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const ModelConfig cfg = read_members(cases[i].type, cases[i].members);
        EXPECT(cfg.mixed[0] == cases[i].mixed && cfg.F == cases[i].F && cfg.has_head == cases[i].has_head &&
                   cfg.rope_dims == cases[i].rope_dims &&
                   memcmp(&cfg.mixer, &cases[i].mixer, sizeof(cfg.mixer)) == 0,
               "%s, %s: mixers in %d, %d hidden, head %d, %d channels turn", cases[i].type, cases[i].members,
               cfg.mixed[0], cfg.F, cfg.has_head, cfg.rope_dims);
    }
}

// Half of a head turns, in halves or in pairs that lie side by side; the rest stays in its place.
TEST(partial_positions) {
    HfFamily partial = hf_families[ARCH_QWEN3];
    partial.turned = 0.5f;
    const ModelConfig cfg = read_as(partial, "'use_cache':true"), again = write_as(partial, cfg),
                      all = read_as(partial, "'partial_rotary_factor':1.0");
    EXPECT(cfg.rope_dims == 4 && all.rope_dims == 0, "%d, %d", cfg.rope_dims, all.rope_dims);
    EXPECT(memcmp(&again, &cfg, sizeof(cfg)) == 0, "written");
    static const size_t halves[8] = {0, 2, 1, 3, 4, 5, 6, 7};
    for (size_t line = 0; line < 16; line++) {
        EXPECT(file_head_line(ORDER_PAIRS, cfg, line) == line, "pairs, %zu", line);
        EXPECT(file_head_line(ORDER_HALVES, cfg, line) == line / 8 * 8 + halves[line % 8], "halves, %zu",
               line);
    }
}

typedef struct {
    const char *type, *members;
} Refused;

static void body_read(const void* context) {
    const Refused* refused = (const Refused*)context;
    read_members(refused->type, refused->members);
}

TEST(refusals) {
    static const struct {
        Refused config;
        const char* words;
    } cases[] = {
        {{"gemma", ""}, "model_type is gemma, wanted one of gpt2, llama, mistral, qwen2"},
        {{"llama", "'hidden_act':'gelu'"}, "hidden_act is gelu, wanted silu"},
        {{"arcee", "'hidden_act':'silu'"}, "hidden_act is silu, wanted relu2"},
        {{"llama", "'attention_bias':true"}, "attention_bias is true, wanted false"},
        {{"nanochat", "'attention_bias':true"}, "attention_bias is true"},
        {{"llama", "'mlp_bias':true"}, "mlp_bias is true"},
        {{"llama", "'rms_norm_eps':0"}, "rms_norm_eps is 0, wanted a positive number"},
        {{"llama", "'quantization_config':{'bits':4}"},
         "quantization_config changes what the model computes"},
        {{"llama", "'residual_multiplier':0.22"}, "residual_multiplier changes"},
        {{"qwen3", "'num_key_value_heads':2,'final_logit_softcapping':30.0"},
         "final_logit_softcapping changes"},
        {{"llama", "'partial_rotary_factor':0.5"}, "partial_rotary_factor changes"},
        {{"llama", "'rope_parameters':{'rope_theta':1e4,'rope_type':'default','partial_rotary_factor':0.5}"},
         "partial_rotary_factor changes"},
        {{"llama", "'rope_scaling':{'rope_type':'dynamic','factor':4.0}"},
         "rope_type is dynamic, wanted default, linear, llama3, yarn or longrope"},
        {{"llama", "'rope_scaling':{'rope_type':'yarn','factor':0.5}"}, "factor of rope_parameters is 0.5"},
        {{"llama", "'rope_scaling':{'rope_type':'yarn','factor':4,'low_freq_factor':2}"},
         "low_freq_factor changes"},
        {{"llama", "'rope_scaling':{'rope_type':'yarn','factor':4,'beta_slow':33}"},
         "beta_slow of rope_parameters is 33, wanted at most beta_fast, 32"},
        {{"llama", "'rope_scaling':{'rope_type':'yarn','factor':4,'beta_fast':-1}"}, "beta_fast is -1"},
        {{"llama", "'rope_scaling':{'rope_type':'default','truncate':false}"}, "truncate changes"},
        {{"llama", "'rope_scaling':{'rope_type':'llama3','factor':8,'low_freq_factor':1,'high_freq_factor':4,"
                   "'attention_factor':1.5}"},
         "attention_factor changes"},
        {{"llama", "'rope_scaling':{'rope_type':'longrope','short_factor':[1,2],'long_factor':[1,2,3]}"},
         "short_factor and long_factor have 2 and 3 numbers, wanted 3"},
        {{"llama", "'rope_scaling':{'rope_type':'longrope','short_factor':[1,2,3]}"},
         "short_factor and long_factor have 3 and 0 numbers, wanted 3"},
        {{"llama", "'rope_scaling':{'rope_type':'longrope','short_factor':[1,0,3],'long_factor':[1,2,3]}"},
         "short_factor has 0 in place 2"},
        {{"nanochat", "'rope_scaling':{'rope_type':'yarn','factor':4.0}"},
         "rotary positions with an attention factor, which the norm"},
        {{"llama", "'rope_parameters':{'full_attention':{'rope_type':'default'}}"}, "full_attention changes"},
        {{"llama", "'no_rope_layers':[1,1,0]"}, "no_rope_layers changes"},
        {{"llama", "'rope_scaling':{'rope_type':'linear'}"}, "factor of rope_parameters is 0"},
        {{"llama", "'rope_scaling':{'rope_type':'llama3','factor':8}"},
         "low_freq_factor of rope_parameters is 0"},
        {{"llama", "'rope_scaling':{'rope_type':'linear','factor':2,'beta_fast':32}"}, "beta_fast changes"},
        {{"llama", "'rope_scaling':{'type':'linear','factor':2},'rope_parameters':{'rope_type':'default'}"},
         "rope_parameters and rope_scaling differ"},
        {{"llama", "'rope_theta':1e4,'rope_parameters':{'rope_type':'default','rope_theta':2e4}"},
         "rope_theta is 10000, but 20000 in rope_parameters"},
        {{"llama", "'rope_theta':-1"}, "rope_theta is -1"},
        {{"llama", "'num_key_value_heads':3"}, "config.json"},
        {{"llama", "'num_key_value_heads':0"}, "num_key_value_heads is 0, wanted 1 or more, or null"},
        {{"llama", "'head_dim':7"}, "config.json"},
        {{"nanochat", "'final_logit_softcapping':-15"}, "final_logit_softcapping is -15"},
        {{"llama", "'layer_types':['full_attention','sliding_attention','full_attention']"},
         "layer 1 is sliding_attention in layer_types, but the model has no sliding_window"},
        {{"mistral",
          "'num_key_value_heads':2,'layer_types':['full_attention','full_attention','full_attention']"},
         "layer 0 is full_attention in layer_types, but all layers have the sliding_window"},
        {{"qwen2",
          "'num_key_value_heads':2,'layer_types':['full_attention','sliding_attention','full_attention']"},
         "layer 1 is sliding_attention in layer_types, but the model has no sliding_window"},
        {{"qwen3", "'num_key_value_heads':2,'layer_types':['full_attention']"},
         "layer_types has 1 layers, wanted 3"},
        {{"qwen3", "'num_key_value_heads':2,'layer_types':['linear_attention']"},
         "layer_types has linear_attention"},
        {{"llama", "'hidden_size':24"}, "key hidden_size appears twice"},
        {{"gemma3_text", "'use_bidirectional_attention':true"}, "use_bidirectional_attention changes"},
        {{"gemma3_text", "'final_logit_softcapping':30.0"}, "final_logit_softcapping changes"},
        {{"gemma3", ""}, "no text_config"},
        {{"glm4", "'num_key_value_heads':2,'attention_bias':false"}, "attention_bias is false, wanted true"},
        {{"gpt_oss", "'attention_bias':false"}, "attention_bias is false, wanted true"},
        {{"gpt_oss", "'swiglu_limit':10.0"}, "swiglu_limit is 10, wanted 7"},
        {{"gpt_oss", "'swiglu_alpha':1.5"}, "swiglu_alpha is 1.5, wanted 1.702"},
        {{"gpt_oss", "'quantization_config':{'quant_method':'awq'}"},
         "quant_method of quantization_config is awq, wanted mxfp4"},
        {{"gpt_oss", "'quantization_config':{'bits':4}"}, "quantization_config is missing, wanted mxfp4"},
        {{"gpt_oss", "'num_key_value_heads':2"}, "no rope_parameters or rope_scaling"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char words[256];
        snprintf(words, sizeof(words), "config.json: |%s", cases[i].words);
        EXPECT(test_dies(body_read, &cases[i].config, EXIT_FAILURE, words), "%s: %s", cases[i].config.type,
               cases[i].config.members);
    }
}

static void body_read_experts(const void* context) {
    const Refused* refused = (const Refused*)context;
    read_experts(refused->type, refused->members);
}

TEST(refusals_of_experts) {
    static const struct {
        Refused config;
        const char* words;
    } cases[] = {
        {{"mixtral", "'num_local_experts':0"}, "0 experts, wanted 1 to"},
        {{"mixtral", "'num_experts_per_tok':9"}, "a token takes 9 of 8 experts"},
        {{"mixtral", "'num_local_experts':4,'num_experts':8"},
         "num_experts is 8, but num_local_experts is 4"},
        {{"mixtral", "'router_jitter_noise':0.01"}, "router_jitter_noise changes what"},
        {{"qwen3_moe", "'decoder_sparse_step':2"}, "decoder_sparse_step changes what"},
        {{"qwen3_moe", "'mlp_only_layers':[0]"}, "mlp_only_layers changes what"},
        {{"qwen3_moe", "'scoring_func':'sigmoid'"}, "scoring_func is sigmoid, wanted softmax"},
        {{"qwen3_moe", "'attention_bias':true"}, "attention_bias is true"},
        {{"olmoe", "'clip_qkv':8.0"}, "clip_qkv changes what"},
        {{"olmoe", "'clip_qkv':1"}, "clip_qkv changes what"},
        {{"olmoe", "'partial_rotary_factor':0.5"}, "partial_rotary_factor changes what"},
        {{"glm4_moe", "'head_dim':8,'n_group':3,'topk_group':1"}, "1 of 3 groups of the 128 experts"},
        {{"glm4_moe", "'head_dim':8,'n_group':2,'topk_group':3"}, "3 of 2 groups of the 128 experts"},
        {{"glm4_moe", "'n_shared_experts':0"}, "n_shared_experts is 0, wanted 1 to"},
        {{"glm4_moe", "'partial_rotary_factor':0"}, "partial_rotary_factor is 0, wanted above 0"},
        {{"glm4_moe", ""}, "partial_rotary_factor 0.5 turns 3 of 6 channels"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char words[256];
        snprintf(words, sizeof(words), "config.json: |%s", cases[i].words);
        EXPECT(test_dies(body_read_experts, &cases[i].config, EXIT_FAILURE, words), "%s: %s",
               cases[i].config.type, cases[i].config.members);
    }
}

// A missing key whose default is not what we compute is refused.
TEST(missing_keys_of_experts) {
#define GLM_ "'num_key_value_heads':2,'moe_intermediate_size':16,"
#define DEEPSEEK_ "'first_k_dense_replace':1,'moe_intermediate_size':16,"
    static const struct {
        Refused config;
        const char* words;
    } cases[] = {
        {{"qwen3_moe", "'moe_intermediate_size':16"}, "norm_topk_prob is missing, wanted true"},
        {{"qwen3_moe", "'norm_topk_prob':true"}, "no moe_intermediate_size"},
        {{"olmoe", "'norm_topk_prob':true"}, "norm_topk_prob is true, wanted false"},
        {{"glm4_moe", GLM_ "'use_qk_norm':true,'first_k_dense_replace':0"},
         "attention_bias is missing, wanted true"},
        {{"glm4_moe", GLM_ "'attention_bias':true,'first_k_dense_replace':0"},
         "use_qk_norm is missing, wanted true"},
        {{"glm4_moe", GLM_ "'attention_bias':true,'use_qk_norm':true,'first_k_dense_replace':4"},
         "4 layers without experts, wanted 0 to 2"},
        {{"glm4_moe", "'num_key_value_heads':2,'attention_bias':true,'use_qk_norm':true"},
         "no moe_intermediate_size"},
        {{"deepseek_v3", DEEPSEEK_ "'quantization_config':{'quant_method':'fp8'}"},
         "quantization_config: weights in fp8 are not read; wanted bf16"},
        {{"deepseek_v3", DEEPSEEK_ "'topk_method':'greedy'"}, "topk_method is greedy, wanted noaux_tc"},
        {{"deepseek_v3", DEEPSEEK_ "'norm_topk_prob':false"}, "norm_topk_prob is false, wanted true"},
        {{"deepseek_v3", DEEPSEEK_ "'attention_bias':true"}, "attention_bias is true, wanted false"},
        {{"deepseek_v3", DEEPSEEK_ "'num_key_value_heads':2"},
         "4 heads with 2 heads of keys, wanted as many"},
        {{"deepseek_v3", DEEPSEEK_ "'kv_lora_rank':0"}, "latents of 0 channels"},
        {{"deepseek_v3", DEEPSEEK_ "'v_head_dim':193"}, "values of 193|values of 1 to 192"},
        {{"deepseek_v3", "'first_k_dense_replace':1"}, "no moe_intermediate_size"},
        {{"granitemoehybrid", HYBRID_ "'attention','mamba','attention']"}, "layer_types has mamba"},
        {{"granitemoehybrid", "'shared_intermediate_size':36,'num_local_experts':0"},
         "layer_types is missing, wanted full_attention"},
        {{"granitemoehybrid", "'num_local_experts':8"}, "num_local_experts changes"},
        {{"granitemoehybrid",
          "'shared_intermediate_size':36,'layer_types':['attention','attention','attention']"},
         "num_local_experts is missing, wanted 0"},
        {{"granitemoehybrid",
          HYBRID_ "'attention','attention','attention'],'position_embedding_type':'alibi'"},
         "position_embedding_type is alibi, wanted rope or nope"},
        {{"exaone4", "'num_key_value_heads':2,'sliding_window_pattern':'LLG'"},
         "has letters, wanted layer_types"},
        {{"lfm2", "'num_key_value_heads':2,'conv_bias':true"}, "conv_bias is true, wanted false"},
        {{"lfm2", "'num_key_value_heads':2,'conv_L_cache':9"}, "a convolution of 9 taps, wanted 2 to 8"},
        {{"lfm2", "'num_key_value_heads':2,'layer_types':['sliding_attention','conv','conv']"},
         "layer_types has sliding_attention, wanted full_attention and conv"},
        {{"qwen3_5_text", "'attention_bias':true"}, "attention_bias is true, wanted false"},
        {{"qwen3_5_text", "'attn_output_gate':false"}, "attn_output_gate is false, wanted true"},
        {{"qwen3_5_text", "'linear_key_head_dim':12"}, "keys of 12 channels|multiples of 8"},
        {{"qwen3_5_text", "'linear_num_value_heads':24"}, "24 heads of values and 16 of keys"},
    };
#undef GLM_
#undef DEEPSEEK_
#undef HYBRID_
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char words[256];
        snprintf(words, sizeof(words), "config.json: |%s", cases[i].words);
        EXPECT(test_dies(body_read, &cases[i].config, EXIT_FAILURE, words), "%s: %s", cases[i].config.type,
               cases[i].config.members);
    }
}

// Missing sizes of latents are DeepSeek V3's; published files have yarn in an older form.
TEST(latents) {
    ModelConfig cfg = read_members(
        "deepseek_v3",
        "'first_k_dense_replace':1,'moe_intermediate_size':16,'num_key_value_heads':4,'head_dim':64,"
        "'rope_scaling':{'beta_fast':32,'beta_slow':1,'factor':40,'mscale':1.0,'mscale_all_dim':1.0,"
        "'original_max_position_embeddings':4096,'type':'yarn'}");
    EXPECT(cfg.HS == 192 && cfg.rope_dims == 64 && cfg.latent.query_rank == 1536 && cfg.latent.rank == 512 &&
               cfg.latent.value == 128 && !cfg.latent.in_halves,
           "heads of %d, latents of %d and %d", cfg.HS, cfg.latent.query_rank, cfg.latent.rank);
    EXPECT(cfg.E == 256 && cfg.E_used == 8 && cfg.expert_groups == 8 && cfg.expert_groups_used == 4 &&
               cfg.router_factor == 2.5f,
           "%d of %d experts", cfg.E_used, cfg.E);
    EXPECT(cfg.attention_scale == 0.13523377f && rope_attention(cfg.scaling) == 1, "%.9g",
           (double)cfg.attention_scale);
    cfg = read_members(
        "deepseek_v3",
        "'first_k_dense_replace':1,'moe_intermediate_size':16,'q_lora_rank':null,"
        "'rope_interleave':false,'n_group':1,'topk_group':1,'n_routed_experts':64,'num_experts_per_tok':6");
    EXPECT(cfg.latent.query_rank == 0 && cfg.latent.in_halves && cfg.expert_groups == 0 &&
               cfg.attention_scale == 0,
           "plain queries, halves, no groups");
}

// A missing size is refused, not guessed.
static void body_read_text(const void* context) { hf_config_read(write_config((const char*)context)); }
TEST(missing_size) {
    EXPECT(test_dies(body_read_text, "'model_type':'llama'," SIZES, EXIT_FAILURE,
                     "|config.json: no intermediate_size"),
           "intermediate_size");
}

// Keys of the family that change nothing are accepted.
TEST(harmless_keys) {
    const ModelConfig cfg = read_members(
        "llama", "'pretraining_tp':1,'torch_dtype':'bfloat16','attention_multiplier':1.0,"
                 "'logit_scale':null,'use_qk_norm':false,'_name_or_path':'x','auto_map':{'a':'b'},"
                 "'head_dim':null,'num_key_value_heads':null,'hidden_act':'silu'");
    EXPECT(cfg.HS == 6 && cfg.KV == 4, "%d, %d", cfg.HS, cfg.KV);
    EXPECT_NEAR(hf_config_dropout(test_path("config")), 0, 0, "no dropout");
    read_members("llama", "'attention_dropout':0.25");
    EXPECT_NEAR(hf_config_dropout(test_path("config")), 0.25, 0, "dropout");
}

// transformers refuses an integer where its class has a float.
TEST(numbers_are_floats) {
    static const struct {
        float x;
        const char* text;
    } cases[] = {{15, "15.0"},    {12.5f, "12.5"}, {1e-5f, "1e-05"},
                 {1e6f, "1e+06"}, {5e5f, "5e+05"}, {0.1f, "0.1"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        EXPECT(strcmp(hf_number_(cases[i].x).text, cases[i].text) == 0, "%s", hf_number_(cases[i].x).text);
    }
}

#define SMALL .max_T = 64, .V = 61, .Vp = 128, .NH = 4, .C = 24

// Whatever a class can hold is written and read back; sizes that were implied have a number then.
TEST(written) {
    // clang-format off
    static const ModelConfig cases[] = {
        {SMALL, .L = 3, .arch = ARCH_LLAMA, .KV = 2, .HS = 8, .F = 40},
        {SMALL, .L = 3, .arch = ARCH_LLAMA, .has_head = 1, .norm_eps = 3e-6f, .rope_base = 5e5f,
         .scaling = {ROPE_LLAMA3, 32, 1, 4, 16}},
        {SMALL, .L = 3, .arch = ARCH_ARCEE, .scaling = {ROPE_LINEAR, 2.7f}},
        {SMALL, .L = 3, .arch = ARCH_LLAMA, .scaling = {ROPE_YARN, 4, 1.5f, 32, 16, 1.125f}},
        {SMALL, .L = 3, .arch = ARCH_QWEN3, .HS = 8, .scaling = {ROPE_YARN, 4, 1, 16, 16, 1, 1}},
        {SMALL, .L = 3, .arch = ARCH_LLAMA, .scaling = {ROPE_LONG, 4, 0, 0, 16, 1.1f},
         .rope_factors = {{1, 1.1f, 2}, {3, 4.7f, 50}}},
        {SMALL, .L = 3, .arch = ARCH_MISTRAL, .window = 9, .windows = {7}},
        {SMALL, .L = 3, .arch = ARCH_MISTRAL},
        {SMALL, .L = 3, .arch = ARCH_QWEN2, .window = 9, .windows = {6}},
        {SMALL, .L = 10, .arch = ARCH_QWEN3, .HS = 128, .window = 9, .windows = {0x55, 1}},
        {SMALL, .L = 3, .arch = ARCH_NANOCHAT, .softcap = 12.5f},
        {SMALL, .L = 3, .arch = ARCH_NANOCHAT},
        {SMALL, .L = 3, .arch = ARCH_NANOCHAT, .has_scales = 1},
        {SMALL, .L = 3, .arch = ARCH_LLAMA, .has_scales = 1, .has_values = 1},
        {SMALL, .L = 3, .arch = ARCH_MIXTRAL, .E = 8, .E_used = 2, .window = 9, .windows = {7}},
        {SMALL, .L = 3, .arch = ARCH_QWEN3MOE, .E = 6, .E_used = 3, .F = 16, .window = 9, .windows = {7}},
        {SMALL, .L = 3, .arch = ARCH_QWEN3MOE, .E = 6, .E_used = 3},
        {SMALL, .L = 3, .arch = ARCH_OLMOE, .E = 4, .E_used = 1},
        {SMALL, .L = 3, .arch = ARCH_GLM4MOE, .E = 4, .E_used = 2, .F = 16, .Fs = 48, .HS = 14, .rope_dims = 6,
         .router_factor = 2.5f},
        {SMALL, .L = 3, .arch = ARCH_GLM4MOE, .E = 4, .E_used = 2, .F = 16, .Fs = 16, .router_factor = 1},
        {SMALL, .L = 3, .arch = ARCH_GLM4MOE, .E = 8, .E_used = 2, .expert_groups = 4, .expert_groups_used = 2, .F = 16,
         .Fs = 16, .router_factor = 1},
        {SMALL, .L = 3, .arch = ARCH_GLM4MOE, .E = 4, .E_used = 2, .dense_layers = 2, .F = 40, .Fe = 16, .Fs = 32,
         .router_factor = 1},
        {SMALL, .L = 3, .arch = ARCH_DEEPSEEK3, .has_head = 1, .E = 4, .E_used = 2, .F = 16, .Fs = 16, .router_factor = 1,
         .HS = 10, .rope_dims = 4, .latent = {12, 8, 6, 0}},
        // (0.1 0.7 ln(40) + 1)^2 / sqrt(10)
        {SMALL, .L = 3, .arch = ARCH_DEEPSEEK3, .E = 8, .E_used = 2, .expert_groups = 4, .expert_groups_used = 2, .dense_layers = 2,
         .F = 40, .Fe = 16, .Fs = 32, .router_factor = 2.5f, .HS = 10, .rope_dims = 4, .latent = {0, 8, 10, 1},
         .attention_scale = 0.50062698f, .scaling = {ROPE_YARN, 40, 1, 32, 16, 1.125f}},
        {SMALL, .L = 3, .arch = ARCH_SMOLLM3, .unrotated = {1}, .window = 9, .windows = {6}},
        {SMALL, .L = 3, .arch = ARCH_SMOLLM3, .has_head = 1, .HS = 8},
        {SMALL, .L = 3, .arch = ARCH_OLMO3, .has_head = 1, .window = 9, .windows = {5}, .window_rope_base = 300,
         .window_scaling = {ROPE_LINEAR, 2}, .scaling = {ROPE_YARN, 4, 1.5f, 32, 16, 1.125f}},
        {SMALL, .L = 3, .arch = ARCH_OLMO3, .scaling = {ROPE_YARN, 4, 1.5f, 32, 16, 1.125f}},
        {SMALL, .L = 3, .arch = ARCH_EXAONE4, .window = 9, .windows = {3}, .unrotated = {4}},
        {SMALL, .L = 3, .arch = ARCH_EXAONE4, .has_head = 1, .scaling = {ROPE_LLAMA3, 16, 1, 4, 16}},
        {SMALL, .L = 3, .arch = ARCH_GRANITE4, .F = 40, .attention_scale = 0.25f, .embedding_factor = 12,
         .residual_factor = 0.22f, .logits_divisor = 8},
        {SMALL, .L = 3, .arch = ARCH_GRANITE4, .attention_scale = 1, .embedding_factor = 1, .residual_factor = 1,
         .logits_divisor = 1, .unrotated = {7}},
    };
    // clang-format on
    const char* directory = test_path("config");
    mkdir(directory, 0777);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ModelConfig wanted = cases[i];
        wanted.KV = model_key_heads(wanted);
        wanted.HS = model_head_size(wanted);
        wanted.F = model_hidden(wanted);
        wanted.norm_eps = model_norm_eps(wanted);
        wanted.rope_base = model_rope_base(wanted);
        char error[ERROR_BYTES];
        EXPECT(hf_config_check(wanted, error), "case %zu: %s", i, error);
        hf_config_write(directory, cases[i], SAFETENSORS_F32, model_card_of(60), NULL);
        const ModelConfig cfg = hf_config_read(directory);
        EXPECT(memcmp(&cfg, &wanted, sizeof(cfg)) == 0, "case %zu, %s", i,
               model_architecture(cases[i].arch)->word);
    }
}

// Several ends of a text are a list, one is a number, in both files.
TEST(document_tokens) {
    static const char* const files[] = {"tokens/config.json", "tokens/generation_config.json"};
    static const ModelConfig cfg = {SMALL, .L = 1};
    const ModelCard one = model_card_of(60), many = {.start = 58, .ends = {60, 59}, .num_ends = 2, .pad = -1};
    char *text, error[ERROR_BYTES];
    size_t bytes;
    mkdir(test_path("tokens"), 0777);
    for (int i = 0; i < 4; i++) {
        hf_config_write(test_path("tokens"), cfg, SAFETENSORS_F32, i < 2 ? one : many, NULL);
        const char* wanted = i < 2 ? "\"bos_token_id\": 60,\n  \"eos_token_id\": 60"
                                   : "\"bos_token_id\": 58,\n  \"eos_token_id\": [60, 59]";
        EXPECT(file_try_read(test_path(files[i % 2]), 1 << 16, &text, &bytes, error), "%s", error);
        EXPECT(strstr(text, wanted), "%s: %s", files[i % 2], text);
        free(text);
    }
    EXPECT(hf_config_read(test_path("tokens")).V == cfg.V, "is read");
    // its class would take a padding token beyond the vocabulary
    hf_config_write(test_path("tokens"), (ModelConfig){SMALL, .L = 1, .arch = ARCH_SMOLLM3}, SAFETENSORS_F32,
                    one, NULL);
    EXPECT(file_try_read(test_path(files[0]), 1 << 16, &text, &bytes, error), "%s", error);
    EXPECT(strstr(text, "\"pad_token_id\": null"), "%s", text);
    free(text);
}

// Scores that no family's class computes are refused, by name.
TEST(scores) {
    static const ModelConfig scale = {SMALL, .L = 1, .arch = ARCH_LLAMA, .attention_scale = 0.0625f},
                             cap = {SMALL, .L = 1, .arch = ARCH_QWEN3, .attention_softcap = 50};
    char error[ERROR_BYTES] = "";
    EXPECT(!hf_config_check(scale, error) && strstr(error, "llama divides scores by sqrt(6), not by 16"),
           "%s", error);
    EXPECT(!hf_config_check(cap, error) && strstr(error, "qwen3 has no cap of scores, which is 50 here"),
           "%s", error);
}

// Published files of Gemma 3, as transformers reads them: with its defaults and older keys; 4B and
// larger ones inside a model that sees pictures.
TEST(gemma3) {
    static const struct {
        const char* text;
        int V, NH, HS, max_T, window;
        uint8_t windows;
        float base, window_base, scale;
        RopeScaling scaling;
    } cases[] = {
        {"'model_type':'gemma3_text','hidden_size':640,'intermediate_size':2048,'num_hidden_layers':7,"
         "'num_attention_heads':4,'num_key_value_heads':1,'vocab_size':262144,'sliding_window':512,"
         "'max_position_embeddings':32768,'rope_theta':1000000.0,'rope_local_base_freq':10000.0,"
         "'_sliding_window_pattern':6,'use_bidirectional_attention':false,'attn_logit_softcapping':null",
         262144,
         4,
         256,
         32768,
         512,
         0x5f,
         1e6f,
         1e4f,
         0.0625f,
         {ROPE_PLAIN}},
        {"'boi_token_index':255999,'model_type':'gemma3','text_config':{'hidden_size':2560,"
         "'intermediate_size':10240,'model_type':'gemma3_text','num_hidden_layers':8,'sliding_window':1024,"
         "'rope_scaling':{'factor':8.0,'rope_type':'linear'}},'vision_config':{'hidden_size':1152}",
         262208,
         8,
         256,
         131072,
         1024,
         0xdf,
         1e6f,
         1e4f,
         0.0625f,
         {ROPE_LINEAR, 8}},
        {"'text_config':{'hidden_size':5376,'intermediate_size':21504,'model_type':'gemma3_text',"
         "'num_hidden_layers':5,'num_attention_heads':32,'num_key_value_heads':16,'head_dim':128,"
         "'query_pre_attn_scalar':168,'sliding_window_pattern':3},'model_type':'gemma3'",
         262208,
         32,
         128,
         131072,
         4096,
         0x1b,
         1e6f,
         1e4f,
         0.0771516725f,
         {ROPE_PLAIN}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const ModelConfig cfg = hf_config_read(write_config(cases[i].text));
        EXPECT(cfg.arch == ARCH_GEMMA3 && !cfg.has_head && cfg.V == cases[i].V && cfg.NH == cases[i].NH &&
                   model_head_size(cfg) == cases[i].HS && cfg.max_T == cases[i].max_T,
               "case %zu: %d words, %d heads of %d, context %d", i, cfg.V, cfg.NH, model_head_size(cfg),
               cfg.max_T);
        EXPECT(cfg.window == cases[i].window && cfg.windows[0] == cases[i].windows &&
                   cfg.rope_base == cases[i].base && cfg.window_rope_base == cases[i].window_base &&
                   memcmp(&cfg.scaling, &cases[i].scaling, sizeof(cfg.scaling)) == 0,
               "case %zu: window %d in %x, bases %g, %g", i, cfg.window, cfg.windows[0],
               (double)cfg.rope_base, (double)cfg.window_rope_base);
        EXPECT_NEAR(cfg.attention_scale, cases[i].scale, 1e-8, "case %zu: scale", i);
    }
}

// Phi 3 and 4 mini, and GLM 4, with the keys of their published files.
TEST(phi3_and_glm4) {
    const ModelConfig phi = read_members(
        "phi3", "'original_max_position_embeddings':16,'partial_rotary_factor':0.75,'head_dim':8,"
                "'num_key_value_heads':2,'rope_scaling':{'type':'su'," FACTORS "},'sliding_window':262144");
    EXPECT(phi.rope_dims == 6 && phi.scaling.kind == ROPE_LONG && phi.scaling.original_context == 16 &&
               phi.scaling.factor == 4 && phi.window == 262144 && phi.windows[0] == 7 && phi.has_head,
           "%d channels turn, factor %g, context %d, window %d", phi.rope_dims, (double)phi.scaling.factor,
           phi.scaling.original_context, phi.window);
    const ModelConfig old = read_members("phi3", "'rope_scaling':{'type':'longrope'," FACTORS "}"),
                      glm = read_members("glm4", "'head_dim':8,'attention_bias':true,'rope_theta':1e5");
    EXPECT(old.scaling.original_context == 4096 && old.scaling.attention == 1 && old.window == 0, "%d, %g",
           old.scaling.original_context, (double)old.scaling.attention);
    EXPECT(glm.rope_dims == 4 && model_key_heads(glm) == 2 && glm.norm_eps == 1.5625e-7f && glm.has_head,
           "%d channels turn, %d heads of keys, eps %g", glm.rope_dims, model_key_heads(glm),
           (double)glm.norm_eps);
}
