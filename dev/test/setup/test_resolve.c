// test_resolve.c -- resolve.h: the value of every "auto", options that override it, and refused
// combinations, for built-in stories, text, shards and model files.
#define PACKING_IMPLEMENTATION
#define RUN_DATA_IMPLEMENTATION
#define RESOLVE_IMPLEMENTATION
#define ENCODED_TEXT_IMPLEMENTATION

#include "llmc/data/fill_in_middle.h"
#include "llmc/formats/hf_config_write.h"
#include "llmc/model/presets.h"
#include "llmc/checkpoint/model_path.h"
#include "llmc/setup/run_data.h"
#include "llmc/setup/resolve.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/bpe_train.h"
#include "dev/test/lib/settled_alone.h"
#include "dev/test/lib/test.h"
#include "dev/test/lib/whole_model.h"

// A run as far as main takes it before it asks for memory.
typedef struct {
    Settled settled;
    RunData data;
    const char* model_path; // NULL: random weights
} Run;

// Built-in stories for a run of the default length take 0.2 s.
static int trains_on_stories(const char* line) {
    static const char* const others[] = {"--steps",  "--epochs",      "--train-data",
                                         "--prompt", "--interactive", "--tokenizer"};
    int has_other = 0;
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        has_other |= strstr(line, others[i]) != NULL;
    }
    return !has_other;
}

// Parses a command line; a % in it stands for the temporary directory. The words stay where they
// are for the run's lifetime, in one of a few buffers.
static Options parse(const char* line) {
    static char buffers[4][4096];
    static int next = 0;
    char *buffer = buffers[next++ % 4], *end = buffer, *argv[64], *save = NULL;
    int argc = 0;
    for (const char* c = line; *c; c++) {
        end += *c == '%' ? sprintf(end, "%s", test_tmpdir()) : sprintf(end, "%c", *c);
    }
    if (trains_on_stories(line)) {
        end += sprintf(end, " --steps 100");
    }
    *end = '\0';
    argv[argc++] = (char*)"train_gpt2";
    for (char* word = strtok_r(buffer, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        argv[argc++] = word;
    }
    Options options;
    options_parse(&options, argc, argv, options_program(OPTION_CPU));
    return options;
}

static Run run_open_as(const char* line, Ranks ranks, SafeTensorsDtype dtype) {
    static char newest[PATH_MAX];
    const Options options = parse(line);
    Run run;
    run.model_path = model_path_find(&options, newest);
    const SettleInput input = {ranks, dtype, run.model_path, setup_read_model(run.model_path), 0};
    run.settled = settle(&run.data, &options, &input);
    return run;
}

static Run run_open(const char* line) {
    return run_open_as(line, ranks_of_data(0, 1, 0, 1), SAFETENSORS_F32);
}

static void run_close(Run* run) { run_data_close(&run->data); }

static void body_run(const void* line) {
    Run run = run_open((const char*)line);
    int ids[64];
    const int T = run.settled.options.batch.seq_len < 63 ? run.settled.options.batch.seq_len : 63;
    run_data_prompt(ids, T, &run.data, &run.settled.options, run.settled.cfg.V);
    run_close(&run);
}

// The run of rank 0 of --num-processes.
static Run run_open_grid(const char* line) {
    const Options options = parse(line);
    const Grid grid = launcher_grid(&options, 0, options.ranks.processes);
    const Ranks ranks = {grid, launcher_zero(&options, &grid), grid_member(&grid, GRID_DATA).size};
    return run_open_as(line, ranks, SAFETENSORS_F32);
}

static void body_grid(const void* line) {
    Run run = run_open_grid((const char*)line);
    run_close(&run);
}

// 2: a bad command line, 1: a bad file. Our messages begin with what they are about.
static void expect_refused(const char* line, int status, const char* words) {
    char wanted[512];
    snprintf(wanted, sizeof(wanted), "error: |%s", words);
    EXPECT(test_dies(body_run, line, status, wanted), "%s", line);
}

static const char* write_shard(const char* name, int count, int first_token) {
    enum { MOST = 4096 };
    int32_t header[256] = {20240520, 1, count};
    char bytes[sizeof(header) + 2 * MOST];
    memcpy(bytes, header, sizeof(header));
    for (int i = 0; i < count && i < MOST; i++) {
        const uint16_t token = (uint16_t)(first_token + i % 10);
        memcpy(bytes + sizeof(header) + 2 * i, &token, 2);
    }
    return test_write(name, bytes, sizeof(header) + 2 * (size_t)count);
}

// A model of 2 layers, context 32, V = 400, not padded as we would.
static void write_model(const char* name) {
    const ModelConfig cfg = {.max_T = 32, .V = 400, .Vp = 416, .L = 2, .NH = 2, .C = 8};
    TensorRow rows[MODEL_PARAMETER_ROWS];
    void* memory = check_alloc(model_parameter_rows(rows, cfg), 1, "model");
    whole_model_write_bin(test_path(name), cfg, rows, memory, MODEL_FP32);
    free(memory);
}

// A Hugging Face directory with the sizes of write_model.
static void write_hf_model(const char* name) {
    const ModelConfig cfg = {.max_T = 32, .V = 400, .Vp = 512, .L = 2, .NH = 2, .C = 8};
    TensorRow rows[MODEL_PARAMETER_ROWS];
    void* memory = check_alloc(model_parameter_rows(rows, cfg), 1, "model");
    EXPECT(mkdir(test_path(name), 0777) == 0, "directory");
    hf_config_write(test_path(name), cfg, SAFETENSORS_F32, model_card_of(399), NULL);
    whole_model_write(test_path(name), cfg, rows, memory, SAFETENSORS_F32);
    free(memory);
}

// A vocabulary of `count` ids: the merges are two printable characters each.
static void write_tokenizer(const char* name, int count) {
    char text[4096] = "#version: 0.2\n";
    size_t n = strlen(text);
    for (int i = 0; i < count - 257; i++) {
        n += (size_t)snprintf(text + n, sizeof(text) - n, "%c %c\n", '!' + i / 90, '#' + i % 90);
    }
    test_write(name, text, n);
}

static void write_files(void) {
    char text[2000];
    memset(text, 'a', sizeof(text));
    test_write("text.txt", text, sizeof(text));
    test_write("val.txt", text, 500);
    write_shard("train.bin", 1000, 100);
    write_shard("val.bin", 200, 100);
    write_shard("large.bin", 1000, 395); // up to 404
    write_model("model.bin");
    write_hf_model("step_00000003");
    write_tokenizer("tokenizer.txt", 300);
    const char merges[] = "#version: 0.2\nt h\nth e\n";
    test_write("merges.txt", merges, strlen(merges));
}

// ---- the model ----

static void expect_model(const char* line, ModelConfig wanted) {
    Run run = run_open(line);
    const ModelConfig got = run.settled.cfg;
    const Options* o = &run.settled.options;
    EXPECT(got.max_T == wanted.max_T && got.V == wanted.V && got.L == wanted.L && got.NH == wanted.NH &&
               got.C == wanted.C && got.Vp == wanted.Vp,
           "%s: T %d V %d Vp %d L %d NH %d C %d", line, got.max_T, got.V, got.Vp, got.L, got.NH, got.C);
    EXPECT(o->model.layers == got.L && o->model.channels == got.C && o->model.heads == got.NH &&
               o->model.context == got.max_T && o->model.vocab_size == got.V,
           "%s: the options say what the model is", line);
    run_close(&run);
}

#define TEXT "--train-data %/text.txt "
#define SHARDS "--train-data %/train.bin "

static void test_model(void) {
    const int V = GPT2_VOCAB, Vp = 50304;
    expect_model(
        TEXT, (ModelConfig){SETUP_CONTEXT, 257, 384, SETUP_LAYERS, SETUP_HEADS, SETUP_CHANNELS, SHARE_OFF});
    expect_model(SHARDS,
                 (ModelConfig){SETUP_CONTEXT, V, Vp, SETUP_LAYERS, SETUP_HEADS, SETUP_CHANNELS, SHARE_OFF});
    expect_model(TEXT "--seq-len 100",
                 (ModelConfig){100, 257, 384, SETUP_LAYERS, SETUP_HEADS, SETUP_CHANNELS, SHARE_OFF});
    expect_model(TEXT "--seq-len 16 --context 20",
                 (ModelConfig){20, 257, 384, SETUP_LAYERS, SETUP_HEADS, SETUP_CHANNELS, SHARE_OFF});
    expect_model(TEXT "--layers 1 --channels 12 --heads 3",
                 (ModelConfig){SETUP_CONTEXT, 257, 384, 1, 3, 12, SHARE_OFF});
    expect_model(TEXT "--vocab-size 300", (ModelConfig){SETUP_CONTEXT, 300, 384, SETUP_LAYERS, SETUP_HEADS,
                                                        SETUP_CHANNELS, SHARE_OFF});
    expect_model(SHARDS "--vocab-size 110", (ModelConfig){SETUP_CONTEXT, 110, 128, SETUP_LAYERS, SETUP_HEADS,
                                                          SETUP_CHANNELS, SHARE_OFF});
    expect_model(SHARDS "--tokenizer %/tokenizer.txt", (ModelConfig){SETUP_CONTEXT, 300, 384, SETUP_LAYERS,
                                                                     SETUP_HEADS, SETUP_CHANNELS, SHARE_OFF});
    expect_model(SHARDS "--seq-len 64 --model d12", (ModelConfig){1024, V, Vp, 12, 12, 768, SHARE_OFF});
    expect_model(SHARDS "--seq-len 64 --model gpt2:d12 --layers 3 --context 64",
                 (ModelConfig){64, V, Vp, 3, 12, 768, SHARE_OFF});
    expect_model(SHARDS "--seq-len 64 --model gpt3:c5140",
                 (ModelConfig){2048, V, Vp, 40, 40, 5120, SHARE_OFF});
    expect_model(TEXT "--seq-len 64 -e d6", (ModelConfig){1024, 257, 384, 6, 6, 384, SHARE_OFF});

    expect_refused(TEXT "--channels 130", 2, "--channels 130|--heads 4");
    expect_refused(TEXT "--vocab-size 256", 2, "256|257|bytes");
    expect_refused(SHARDS "--tokenizer %/tokenizer.txt --vocab-size 299", 2, "299|300|gpt2");
    // its tokens go up to 109
    expect_refused(SHARDS "--vocab-size 109", 1, "train.bin|token 9|109");
    expect_refused(TEXT "--model d13", 2,
                   "--model d13|neither a file nor a known size: gpt2:d6 d12 |, llama:135m 360m |, "
                   "qwen3:0.6b 1.7b 4b 8b,|speedrun");
    expect_refused(TEXT "--model gpt4", 2, "--model gpt4");
}

// Wants the sizes of --arch in the banner only if they are given.
static void expect_sizes_in_banner(const char* options, const char* wanted) {
    char line[256], *banner = NULL;
    size_t bytes;
    snprintf(line, sizeof(line), "%s--seq-len 16 %s", TEXT, options);
    Run run = run_open(line);
    FILE* file = open_memstream(&banner, &bytes);
    options_print_banner(file, &run.settled.options, "prog");
    fclose(file);
    for (char* at; (at = strstr(banner, " \\\n    "));) {
        memmove(at, at + 6, strlen(at + 6) + 1); // a wrapped line
    }
    EXPECT(strstr(banner, wanted), "%s: %s, wanted %s", options, banner, wanted);
    free(banner);
    run_close(&run);
}

static void test_banner(void) {
    expect_sizes_in_banner("", "--heads 4 --context 16 --vocab-size 257 --batch");
    expect_sizes_in_banner("--arch llama --kv-heads 2 --rope-base 1234",
                           "--heads 4 --kv-heads 2 --context 16 --vocab-size 257 --rope-base 1234 --batch");
}

static void expect_architecture(const char* options, ModelConfig wanted) {
    char line[256];
    snprintf(line, sizeof(line), "%s--seq-len 16 %s", TEXT, options);
    Run run = run_open(line);
    const ModelConfig got = run.settled.cfg;
    const Options* o = &run.settled.options;
    EXPECT(got.arch == wanted.arch && got.C == wanted.C && got.NH == wanted.NH && got.KV == wanted.KV &&
               got.HS == wanted.HS && got.F == wanted.F && got.has_head == wanted.has_head,
           "%s: C %d NH %d KV %d HS %d F %d head %d", options, got.C, got.NH, got.KV, got.HS, got.F,
           got.has_head);
    EXPECT(got.E == wanted.E && got.E_used == wanted.E_used && got.Fs == wanted.Fs,
           "%s: E %d, %d used, Fs %d", options, got.E, got.E_used, got.Fs);
    EXPECT(got.window == wanted.window && memcmp(got.windows, wanted.windows, sizeof(got.windows)) == 0,
           "%s: window %d in layers %x", options, got.window, got.windows[0]);
    EXPECT(got.mixed[0] == wanted.mixed[0] && memcmp(&got.mixer, &wanted.mixer, sizeof(got.mixer)) == 0,
           "%s: layers %x have a mixer of %d taps", options, got.mixed[0], got.mixer.taps);
    EXPECT(got.rope_dims == wanted.rope_dims && memcmp(&got.latent, &wanted.latent, sizeof(got.latent)) == 0,
           "%s: %d channels turn, latents of %d and %d, values of %d", options, got.rope_dims,
           got.latent.query_rank, got.latent.rank, got.latent.value);
    EXPECT(got.unrotated[0] == wanted.unrotated[0] && got.window_rope_base == wanted.window_rope_base,
           "%s: layers %x do not turn, base with windows %g", options, got.unrotated[0],
           (double)got.window_rope_base);
    EXPECT(got.rope_base == wanted.rope_base && got.softcap == wanted.softcap &&
               got.norm_eps == wanted.norm_eps && got.scaling.kind == wanted.scaling.kind &&
               got.initial == wanted.initial,
           "%s: base %g, cap %g, eps %g", options, (double)got.rope_base, (double)got.softcap,
           (double)got.norm_eps);
    EXPECT(o->model.arch == (int)got.arch && o->model.kv_heads == model_key_heads(got) &&
               o->model.head_size == model_head_size(got) && o->model.hidden == model_hidden(got) &&
               o->model.own_head == got.has_head && o->model.window == got.window &&
               o->model.experts == (got.E ? got.E : OPTION_AUTO) &&
               o->model.experts_used == (got.E ? got.E_used : OPTION_AUTO) &&
               o->model.shared_hidden == (got.E ? got.Fs : OPTION_AUTO),
           "%s: the options say what the model is", options);
    run_close(&run);
}

// Returns the sizes of a new model of an architecture with SwiGLU, without a name.
static ModelConfig sizes_of(Arch arch) {
    return (ModelConfig){.arch = arch, .C = 128, .NH = 4, .KV = 4, .HS = 32, .F = 384, .rope_base = 1e4f};
}

// Adds a window of 5 tokens in these layers.
static ModelConfig with_windows(ModelConfig cfg, uint8_t layers) {
    cfg.window = 5;
    cfg.windows[0] = layers;
    return cfg;
}

// A new model has windows, and layers that do not turn, where its family has them.
static void test_kinds_of_layers(void) {
    ModelConfig olmo3 = with_windows(sizes_of(ARCH_OLMO3), 7 | 16 | 32), smollm3 = sizes_of(ARCH_SMOLLM3),
                exaone4 = with_windows(sizes_of(ARCH_EXAONE4), 1);
    olmo3.has_head = 1, smollm3.unrotated[0] = 8, exaone4.unrotated[0] = 2 | 4;
    expect_architecture("--arch olmo3 --layers 6 --window 5", olmo3);
    expect_architecture("--arch exaone4 --layers 3 --window 5 --window-pattern SL", exaone4);
    expect_architecture("--arch smollm3 --layers 4", smollm3);
    olmo3 = (ModelConfig){
        .arch = ARCH_OLMO3, .C = 4096, .NH = 32, .KV = 32, .HS = 128, .F = 11008, .has_head = 1};
    olmo3.rope_base = olmo3.window_rope_base = 5e5f, olmo3.norm_eps = 1e-6f, olmo3.scaling.kind = ROPE_YARN;
    olmo3.window = 4096, olmo3.windows[0] = 7;
    expect_architecture("--model olmo3:7b --layers 4", olmo3);
    olmo3.window = 0, olmo3.windows[0] = 0, olmo3.window_rope_base = 0;
    expect_architecture("--model olmo3:7b --layers 4 --window 0", olmo3);
}

// Layers without attention: named by the list, which repeats, else by the family or the name.
static void test_layer_types(void) {
    ModelConfig qwen35 = sizes_of(ARCH_QWEN35), lfm2 = sizes_of(ARCH_LFM2);
    qwen35.mixer = (ModelMixer){4, 4, 4, 32, 32}, qwen35.mixed[0] = 7 | 16;
    lfm2.mixer.taps = 3, lfm2.mixed[0] = 3 | 8 | 16;
    expect_architecture("--arch qwen35 --layers 5", qwen35);
    expect_architecture("--arch lfm2 --layers 5", lfm2);
    lfm2.mixed[0] = 2 | 4 | 16;
    expect_architecture("--arch lfm2 --layers 5 --layer-types full,2xconv", lfm2);
    lfm2 = (ModelConfig){.arch = ARCH_LFM2, .C = 1024, .NH = 16, .KV = 8, .HS = 64, .F = 4608};
    lfm2.rope_base = 1e6f, lfm2.norm_eps = 1e-5f, lfm2.mixer.taps = 3;
    lfm2.mixed[0] = 0xff & ~(4 | 32);
    expect_architecture("--model lfm2:350m --layers 8", lfm2);
}

// Named hybrids have the parameters that transformers counts.
static void test_named_hybrids(void) {
    static const struct {
        const char* options;
        double parameters;
    } models[] = {{"--model qwen35:0.8b --vocab-size 248320", 752393024},
                  {"--model qwen35:2b --vocab-size 248320", 1881825088},
                  {"--model qwen35:4b --vocab-size 248320", 4205751296},
                  {"--model lfm2:350m --vocab-size 65536", 354483968},
                  {"--model lfm2:1.2b --vocab-size 65536", 1170340608}};
    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]); i++) {
        char line[256];
        snprintf(line, sizeof(line), "%s--seq-len 16 %s", TEXT, models[i].options);
        Run run = run_open(line);
        const double got = model_count_parameters(run.settled.cfg);
        EXPECT(got == models[i].parameters, "%s: %.0f", models[i].options, got);
        run_close(&run);
    }
}

// Sizes come from the name or the options, and else from the architecture. GPT-2 has none of them.
static void test_architectures(void) {
    ModelConfig nanochat = sizes_of(ARCH_NANOCHAT), llama = sizes_of(ARCH_LLAMA);
    nanochat.F = 512, nanochat.has_head = 1, nanochat.softcap = 15, nanochat.initial = INITIAL_ZERO_OUT;
    expect_architecture("", (ModelConfig){.C = 128, .NH = 4});
    expect_architecture("--head-size 32 --kv-heads 4 --hidden 512 --own-head off --rope-base 0 --window 0",
                        (ModelConfig){.C = 128, .NH = 4});
    expect_architecture("--arch llama", llama);
    llama.NH = 8, llama.KV = 2, llama.HS = 10, llama.F = 40, llama.has_head = 1, llama.rope_base = 500;
    expect_architecture("--arch llama --heads 8 --kv-heads 2 --head-size 10 --hidden 40 --own-head on "
                        "--rope-base 500",
                        llama);
    expect_architecture("--arch mistral --layers 3 --window 5", with_windows(sizes_of(ARCH_MISTRAL), 7));
    expect_architecture("--arch qwen3 --layers 6 --window 5 --window-pattern SSL",
                        with_windows(sizes_of(ARCH_QWEN3), 1 | 2 | 8 | 16));
    expect_architecture("--arch qwen2 --layers 4 --window 5 --window-pattern S",
                        with_windows(sizes_of(ARCH_QWEN2), 7));
    expect_architecture("--arch nanochat", nanochat);
    expect_architecture("--model llama:1b", (ModelConfig){.arch = ARCH_LLAMA,
                                                          .C = 2048,
                                                          .NH = 32,
                                                          .KV = 8,
                                                          .HS = 64,
                                                          .F = 8192,
                                                          .rope_base = 5e5f,
                                                          .norm_eps = 1e-5f,
                                                          .scaling = {.kind = ROPE_LLAMA3}});
    expect_architecture("--model qwen3:0.6b --layers 2 --kv-heads 4", (ModelConfig){.arch = ARCH_QWEN3,
                                                                                    .C = 1024,
                                                                                    .NH = 16,
                                                                                    .KV = 4,
                                                                                    .HS = 128,
                                                                                    .F = 3072,
                                                                                    .rope_base = 1e6f,
                                                                                    .norm_eps = 1e-6f});

    expect_refused(TEXT "--kv-heads 2", 2, "--kv-heads|no meaning with --arch gpt2|llama");
    expect_refused(TEXT "--hidden 100", 2, "--hidden|no meaning with --arch gpt2");
    expect_refused(TEXT "--own-head on", 2, "--own-head|no meaning with --arch gpt2");
    expect_refused(TEXT "--rope-base 500", 2, "--rope-base|no meaning with --arch gpt2");
    expect_refused(TEXT "--arch llama --rope-base 0", 2, "--rope-base 0|above 0");
    expect_refused(TEXT "--arch llama --head-size 7", 2, "the model: rotary positions|7 of 7 channels|even");
    expect_refused(TEXT "--heads 3 --head-size 42", 2, "--channels 128|--heads 3");
    expect_refused(TEXT "--arch llama --kv-heads 3", 2,
                   "the model: 4 heads with 3 heads of keys|wanted a multiple");
    expect_refused(TEXT "--arch llama --heads 3", 2, "--channels 128|--heads 3");
    expect_refused(TEXT "--arch llama --window 5", 2, "--window|no meaning with --arch llama|qwen3");
    expect_refused(TEXT "--arch mistral --window 5 --window-pattern SL", 2,
                   "--window-pattern|no meaning with --arch mistral|qwen2, qwen3");
    expect_refused(TEXT "--arch qwen3 --window 5 --window-pattern SX", 2, "--window-pattern SX|S and L");
    expect_refused(TEXT "--arch qwen3 --window-pattern SL", 2, "--window-pattern SL|with --window");
    expect_refused(TEXT "--arch llama --layer-types full", 2,
                   "--layer-types|no meaning with --arch llama|lfm2");
    expect_refused(TEXT "--arch qwen35 --layer-types 2xconv,full", 2,
                   "--layer-types 2xconv,full|full and delta");
    expect_refused(TEXT "--arch lfm2 --layer-types 0xconv", 2, "--layer-types 0xconv|full and conv");
    expect_refused(TEXT "--arch lfm2 --layer-types conv,", 2, "--layer-types conv,|full and conv");
    expect_refused(TEXT "--arch qwen35 --share-layers pairs --layers 4", 2,
                   "--share-layers|layers 2 and 3|only layer 3 has attention");
    expect_refused(TEXT "--arch llama --softcap 15", 2, "--softcap|no meaning with --arch llama|nanochat");
    expect_refused(TEXT "--arch qwen2 --model llama:1b", 2, "--arch qwen2|llama:1b is a llama");
    expect_refused(TEXT "--arch llama --hidden 96 --optimizer muon --muon-momentum 8bit", 2,
                   "--muon-momentum 8bit|96 hidden units|multiple of 64|--muon-momentum fp32 works");
    expect_refused(TEXT "--arch llama --hidden 96 --optimizer adamw8bit", 2,
                   "96 hidden units|64|adamw works");
}

// Experts of a new model share the hidden units of a dense one.
static void test_experts(void) {
    ModelConfig model = sizes_of(ARCH_MIXTRAL);
    model.E = 8, model.E_used = 2, model.F = 192;
    expect_architecture("--arch mixtral", model);
    expect_architecture("--arch mixtral --layers 3 --window 5", with_windows(model, 7));
    model.E = 1, model.E_used = 1, model.F = 384;
    expect_architecture("--arch mixtral --experts 1", model);
    model.arch = ARCH_OLMOE, model.E = 6, model.E_used = 3, model.F = 40;
    expect_architecture("--arch olmoe --experts 6 --experts-used 3 --hidden 40", model);
    model = sizes_of(ARCH_GLM4MOE);
    model.E = 8, model.E_used = 4, model.F = model.Fs = 128;
    expect_architecture("--arch glm4moe --experts-used 4", model);
    model.Fs = 256;
    expect_architecture("--arch glm4moe --experts-used 4 --shared-hidden 256", model);

    model = sizes_of(ARCH_DEEPSEEK3);
    model.E = 8, model.E_used = 2, model.F = model.Fs = 192, model.has_head = 1;
    model.rope_dims = 16, model.latent = (ModelLatent){128, 64, 32, 0};
    expect_architecture("--arch deepseek3", model);
    model.HS = 48, model.rope_dims = 24, model.latent.value = 48;
    expect_architecture("--arch deepseek3 --head-size 48", model);
    expect_refused(TEXT "--arch deepseek3 --kv-heads 2", 2,
                   "--kv-heads 2, --heads 4|share a latent; wanted as many");
    expect_refused(TEXT "--model mla:moe-50m --head-size 32", 2, "heads of 32 channels of which 32 turn");
    expect_refused(TEXT "--arch deepseek3 --mup 64:1", 2, "--mup 64:1: the latents of deepseek3");

    expect_refused(TEXT "--arch mixtral --channels 64 --hidden 40 --matmul bf16", 2,
                   "a matrix of an expert has 40 rows or columns, wanted a multiple of 32");
    expect_refused(TEXT "--arch glm4moe --experts-used 4 --shared-hidden 0", 2,
                   "transformers wants two experts or more in glm4moe, and one that all tokens take");
    expect_refused(TEXT "--experts 4", 2, "--experts has no meaning with --arch gpt2|mixtral");
    static const char* const divide[] = {TEXT "--experts 4 --experts-used 1 --arch mixtral",
                                         TEXT "--experts 4 --experts-used 1 --arch qwen3moe",
                                         TEXT "--experts 4 --experts-used 1 --arch glm4moe"};
    for (int i = 0; i < 3; i++) {
        expect_refused(divide[i], 2, "--experts-used 1|divides|2 or more|--arch olmoe");
    }
    expect_refused(TEXT "--arch llama --experts-used 4", 2,
                   "--experts-used has no meaning with --arch llama|mixtral");
    expect_refused(TEXT "--arch qwen3 --shared-hidden 64", 2,
                   "--shared-hidden has no meaning with --arch qwen3");
    expect_refused(TEXT "--arch mixtral --shared-hidden 64", 2,
                   "--shared-hidden has no meaning with --arch mixtral|glm4moe");
    expect_refused(TEXT "--arch mixtral --experts 4 --experts-used 5", 2,
                   "the model: a token takes 5 of 4 experts|wanted 1 to 4");
    expect_refused(TEXT "--arch llama --router-balance 0.1", 2,
                   "--router-balance 0.1 needs a model with experts|mixtral");
    expect_refused(TEXT "--router-z 0", 2, "--router-z 0 needs a model with experts");
}

// Sets `notes` to what settling prints about options without an effect.
static void notes_of(char* notes, size_t room, const char* line) {
    const Options options = parse(line);
    Run run = run_open(line);
    FILE* file = fmemopen(notes, room, "w");
    setup_check_needs(file, &run.settled, &options);
    setup_note_late(file, &run.settled, &run.data);
    fclose(file);
    run_close(&run);
}

static void expect_note(const char* line, const char* note) {
    char found[1024] = "", wanted[256] = "";
    if (note[0]) {
        snprintf(wanted, sizeof(wanted), "note: %s\n", note);
    }
    notes_of(found, sizeof(found), line);
    EXPECT(strcmp(found, wanted) == 0, "%s: %s", line, found);
}

// --fit tries levels of recomputation unless one is given, so they stay "auto" until then.
TEST(fit_decides_recompute) {
    static const char* const lines[] = {"--steps 1", "--steps 1 --fit 1",
                                        "--steps 1 --fit 1 --recompute auto"};
    for (int i = 0; i < 3; i++) {
        Run run = run_open(lines[i]);
        const int level = run.settled.options.memory.recompute;
        EXPECT(level == (i ? OPTION_AUTO : (int)RECOMPUTE_ACTIVATION), "%s: %d", lines[i], level);
        run_close(&run);
    }
}

TEST(notes_options_without_effect) {
    const char* quiet = "samples: --samples and --sample-every above 0";
    char note[256];
    test_write("text.txt", "some text, and more of it, and more of it still, to the end", 59);
    test_write("mix.txt", "0 a 1 b 1\n2 a 1\n9 b 1\n", 22);
    expect_note("--keep 3", "--keep 3 has no effect without --out");
    expect_note("--keep 3 --out %/out", "");
    expect_note("--keep auto --keep-major 0", "");
    expect_note("--save-minutes 1 --save-every 5 --out %/out",
                "--save-minutes 1 has no effect without --out and --save-every auto");
    expect_note("--export-dtype bf16", "--export-dtype bf16 has no effect without --export-llmc");
    expect_note("--export-dtype bf16 --export-llmc %/model.bin", "");
    expect_note("--eval-batches 2 --eval-every 0",
                "--eval-batches 2 has no effect without validations: --eval-every");
    snprintf(note, sizeof(note), "--top-k 3 has no effect without %s", quiet);
    expect_note("--top-k 3 --samples 0", note);
    expect_note("--top-k 3 --sample-every 0", note);
    expect_note("--top-k 3", "");
    expect_note("--samples 0 --sample-every 0", "");
    expect_note("--optimizer sgd --beta1 0.8",
                "--beta1 0.8 has no effect without an --optimizer other than sgd and adafactor");
    expect_note("--cautious-decay on --weight-decay 0",
                "--cautious-decay on has no effect without --weight-decay above 0");
    expect_note("--override", "--override has no effect without --resume");
    expect_note("--train-data %/text.txt --seq-len 8 --text-field body",
                "--text-field body has no effect without JSON lines or Parquet");
    expect_note("--train-data %/text.txt --seq-len 8 --data-format nanogpt",
                "--data-format nanogpt has no effect without data in .bin files");
    expect_note("--train-data %/text.txt --seq-len 8 --pack pad --doc-mask on",
                "--doc-mask on has no effect without documents that share a row: --pack stream, aligned or "
                "bestfit");
    expect_note("--train-data %/text.txt --seq-len 8 --doc-mask on", "");
    expect_note("--chat chatml",
                "--chat chatml has no effect without --interactive, or --train-data with chats");
    expect_note("--steps 9 --batch 2 --batch 4 -b 8",
                "--batch is given several times; the last one counts: 8");
    expect_note("--steps 9 --plan --plan", "");
    expect_note("--steps 9 --warmup 10",
                "--warmup 10, --steps 9: the run ends before the rate is at its peak");
    expect_note("--steps 9 --warmup 1 --schedule wsd --decay-steps 9",
                "--decay-steps 9, --steps 9: the rate falls as soon as the warm-up ends");
    expect_note("--steps 9 --seq-len 64 --batch-schedule 0:64,9:128",
                "--batch-schedule 0:64,9:128: the run ends at step 9, before the stage of step 9");
    snprintf(note, sizeof(note), "--data-schedule %s: the run ends at step 5, before the line of step 9",
             test_path("mix.txt"));
    expect_note("--train-data a=%/text.txt,b=%/text.txt --data-schedule %/mix.txt --seq-len 4 --steps 5",
                note);
}

// An option of another optimizer, of experts or of tasks makes a run another than was asked for.
TEST(refuses_options_without_what_they_need) {
    expect_refused("--matrix-lr 0.1", 2, "--matrix-lr 0.1 needs --optimizer muon");
    expect_refused("--stride 5", 2, "--stride 5 needs --perplexity");
    expect_refused("--tasks-max 5", 2, "--tasks-max 5 needs --tasks");
    expect_refused("--distill-weight 0.2", 2, "--distill-weight 0.2 needs --teacher");
    expect_refused("--max-hours 1", 2, "--max-hours 1 needs a directory: --out");
    expect_refused("--patience 2 --eval-every 0", 2, "--patience 2 needs validations");
}

// The recipe's options are settled like given ones, and refused where they cannot apply.
static void test_recipe(void) {
    ModelConfig sizes = {.arch = ARCH_NANOCHAT,
                         .C = 768,
                         .NH = 6,
                         .KV = 6,
                         .HS = 128,
                         .F = 3072,
                         .has_head = 1,
                         .rope_base = 1e4f,
                         .norm_eps = 1e-6f,
                         .softcap = 15,
                         .initial = INITIAL_ZERO_OUT};
    expect_architecture("--model speedrun", sizes);
    sizes.C = 64, sizes.NH = sizes.KV = 2, sizes.HS = 32, sizes.F = 256;
    expect_architecture("--model speedrun --layers 2 --channels 64 --heads 2", sizes);
    Run run = run_open("--model speedrun --layers 1 --channels 64 --heads 2 --total-batch 2048 --steps 100");
    const Options* o = &run.settled.options;
    EXPECT(o->optimizer.name == OPTIMIZER_MUON && o->optimizer.lr == 0.004f && o->optimizer.warmup == 5 &&
               o->batch.seq_len == 1024 && o->optimizer.embedding_lr_scale == 175,
           "lr %g, warmup %d, seq-len %d", (double)o->optimizer.lr, o->optimizer.warmup, o->batch.seq_len);
    run_close(&run);
    expect_refused("--model speedrun --optimizer adamw", 2,
                   "speedrun|muon|has --optimizer adamw|nanochat:d12");
    expect_refused("--model speedrun --own-head off", 2, "--own-head off|--embedding-lr-scale");
    expect_refused("--model speedrun --seq-len 1000", 2, "--total-batch is 524288|--seq-len 1000");
}

// The files hold zeros; random weights are none.
static void expect_weights(const char* options, int is_random) {
    char line[256];
    TensorRow rows[MODEL_PARAMETER_ROWS];
    snprintf(line, sizeof(line), "%s%s", TEXT, options);
    Run run = run_open(line);
    float* memory = (float*)check_alloc(model_parameter_rows(rows, run.settled.cfg), 1, "model");
    memory[0] = memory[7] = 1;
    whole_model_read(run.model_path, run.settled.cfg, rows, memory);
    EXPECT((memory[7] != 0) == is_random && memory[0] != 1, "%s: %g", line, (double)memory[7]);
    free(memory);
    run_close(&run);
}

static void test_model_file(void) {
    const ModelConfig cfg = {32, 400, 416, 2, 2, 8, SHARE_OFF}, padded = {32, 400, 512, 2, 2, 8, SHARE_OFF};
    expect_model(TEXT "--model %/model.bin --vocab-size 400", cfg);
    // that file does not say how much padding there was
    expect_model(TEXT "--model %/step_00000003 --vocab-size 400", padded);
    expect_model(TEXT "--model %/step_00000003/ --vocab-size 400", padded);
    expect_model(SHARDS "--model %/model.bin --layers 2 --channels 8 --heads 2 --context 32 --vocab-size 400",
                 cfg);
    expect_model("--model %/model.bin --steps 1 --train-data %/train.bin --seq-len 16", cfg);
    expect_weights("--model %/step_00000003 --vocab-size 400", 0);
    expect_weights("--model %/model.bin --vocab-size 400", 0);
    expect_weights("--layers 2", 1);

    expect_refused(TEXT "--model %/model.bin --layers 3", 2, "--layers is 3|model.bin has 2");
    expect_refused(TEXT "--model %/model.bin --channels 16", 2, "--channels is 16|has 8");
    expect_refused(TEXT "--model %/model.bin --heads 4", 2, "--heads is 4|has 2");
    expect_refused(TEXT "--model %/model.bin --context 64", 2, "--context is 64|has 32");
    expect_refused(TEXT "--model %/model.bin --vocab-size 257", 2, "--vocab-size is 257|has 400");
    expect_refused(TEXT "--model %/model.bin --vocab-size 400 --seq-len 33", 2, "--seq-len is 33|32");
    // text as bytes, and words of the stories, are other tokens than the model's
    expect_refused(TEXT "--model %/model.bin", 2,
                   "model.bin has a vocabulary of 400|257 tokens (bytes)|--tokenizer");
    expect_refused("--model %/model.bin --seq-len 16 --steps 1", 2, "a vocabulary of 400|(words)");
    expect_refused("--model %/model.bin --seq-len 16 --train-data %/train.bin --tokenizer %/merges.txt", 2,
                   "a vocabulary of 400|259 tokens|merges.txt");
    expect_refused("--train-data %/large.bin --model %/model.bin", 1, "large.bin|token 5|400");
    expect_refused(TEXT "--model %/none.bin", 1, "none.bin|cannot read the model|No such file");
    expect_refused(TEXT "--model %/none", 1, "/none|cannot read the model");
    expect_refused(TEXT "--model none.bin", 1, "none.bin|cannot read the model");
    mkdir(test_path("step_00000004"), 0777);
    expect_refused(TEXT "--model %/step_00000004", 1, "step_00000004/config.json|No such file");
    expect_refused(TEXT "--model %/text.txt", 1, "text.txt|magic number");
}

// ---- the data ----

static void test_data(void) {
    Run run = run_open(TEXT "--seq-len 16");
    EXPECT(run.data.kind == DATA_TEXT && run.data.has_tokenizer, "text");
    EXPECT(run.data.train.tokens + run.data.val.tokens == 2001, "a text and its end-of-text token");
    EXPECT(run.data.val.tokens == 100, "%zu tokens to validate, wanted 5 %%", run.data.val.tokens);
    run_close(&run);
    run = run_open(SHARDS "--seq-len 16 --val-data %/val.bin");
    EXPECT(run.data.kind == DATA_SHARDS && !run.data.has_tokenizer, "shards");
    EXPECT(run.data.train.tokens == 1000 && run.data.val.tokens == 200, "their tokens");
    run_close(&run);

    expect_refused("--tokenizer %/tokenizer.txt --steps 1", 2, "--tokenizer|its own tokenizer");
    expect_refused(SHARDS "--tokenizer %/none.bin", 1, "none.bin|tokenizer");
    expect_refused("--val-data %/val.bin --steps 1", 2, "--val-data|--train-data");
    expect_refused(TEXT "--val-data %/val.bin", 2, "--val-data|--train-data|both");
    expect_refused(SHARDS "--val-data %/val.txt", 2, "--val-data|--train-data|both");
    expect_refused("--train-data %/none*.bin", 1, "none*.bin|No such file");
    expect_refused("--train-data %/none.txt", 1, "none.txt|No such file");
    expect_refused(SHARDS "--seq-len 600", 1, "train.bin|1000 tokens|wanted 1202");
    expect_refused(SHARDS "--val-data %/none.bin", 1, "none.bin|No such file");
}

static void test_stories(void) {
    Run run = run_open("--steps 3 --batch 2 --seq-len 16 --total-batch 64 --eval-batches 5");
    EXPECT(run.data.kind == DATA_STORIES && run.data.has_tokenizer, "no data named");
    EXPECT(run.data.train.tokens == 3 * 64 + 1, "%zu tokens, none read twice", run.data.train.tokens);
    EXPECT(run.data.val.tokens == 5 * 32 + 1, "%zu tokens to validate", run.data.val.tokens);
    EXPECT(run.settled.cfg.V == run.data.tokenizer.vocab_size &&
               run.settled.cfg.V == run.data.stories->eot + 1,
           "words");
    EXPECT(run_data_eot(&run.data, run.settled.cfg.V) == run.data.stories->eot, "end of text");
    run_close(&run);
    run = run_open("--steps 0 --batch 2 --seq-len 16 --eval-batches 0"); // only validation
    EXPECT(run.data.train.tokens == 33 && run.data.val.tokens == RUN_DATA_EVAL_CPU + 1,
           "at least a batch, and a validation");
    run_close(&run);
}

// ---- sources and documents ----

// 40 documents of 25 tokens; the first of each is the end of text, 110.
static void write_documents(const char* name) {
    int32_t header[256] = {20240520, 1, 1000};
    char bytes[sizeof(header) + 2000];
    memcpy(bytes, header, sizeof(header));
    for (int i = 0; i < 1000; i++) {
        const uint16_t token = (uint16_t)(i % 25 ? i % 25 : 110);
        memcpy(bytes + sizeof(header) + 2 * i, &token, 2);
    }
    test_write(name, bytes, sizeof(bytes));
}

#define DOCUMENTS                                                                                            \
    "--train-data %/documents.bin --val-data %/documents.bin --vocab-size 111 --seq-len 16 --batch 2 "

// The rows of each kind, and one epoch of them in steps; validation is never sorted.
static void test_pack(void) {
    static const struct {
        const char* option;
        Packing train, val;
        uint64_t rows;
    } cases[] = {{"--pack stream", PACK_STREAM, PACK_STREAM, 62},
                 {"--pack aligned", PACK_ALIGNED, PACK_ALIGNED, 62},
                 {"--pack bestfit", PACK_BESTFIT, PACK_BESTFIT, 80}, // 40 of 16 tokens, 40 of 9
                 {"--pack pad", PACK_PAD, PACK_PAD, 80},
                 {"--pack dynamic --doc-mask on", PACK_DYNAMIC, PACK_DYNAMIC, 80},
                 {"--pack uniform", PACK_UNIFORM, PACK_DYNAMIC, 80}};
    write_documents("documents.bin");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char line[256];
        snprintf(line, sizeof(line), "%s%s", DOCUMENTS, cases[i].option);
        Run run = run_open(line);
        const DataSource *train = &run.data.train.source[0], *val = &run.data.val.source[0];
        EXPECT(train->rows.pack == cases[i].train && val->rows.pack == cases[i].val, "%s", line);
        EXPECT(train->rows.count == cases[i].rows, "%s: %d rows", line, (int)train->rows.count);
        EXPECT(run.settled.options.batch.steps == (int64_t)cases[i].rows / 2, "%s: %d steps", line,
               (int)run.settled.options.batch.steps);
        EXPECT(run.data.train.mask == (DocumentMask)run.settled.options.data.doc_mask, "%s", line);
        run_close(&run);
    }
    expect_refused("--train-data %/documents.bin:1,%/train.bin:2 --vocab-size 111 --pack uniform", 2,
                   "--pack uniform|one source|has 2");
    expect_refused(SHARDS "--pack pad", 1, "train.bin: no token 50256 (end of text)|--pack stream");
}

// The mean, in the order of the rows, of what each target costs.
static void test_packed_floor(void) {
    Run run = run_open("--steps 1 --batch 2 --seq-len 16 --eval-batches 20 --pack bestfit");
    const Rows* rows = &run.data.val.source[0].rows;
    double sum = 0;
    int inputs[16], targets[16], count = 0;
    for (uint64_t row = 0; row < 4; row++) {
        uint64_t piece, end;
        int t = 0;
        rows_pieces_(rows, row, &piece, &end);
        rows_fill(rows, row, 0, 16, inputs, targets, NULL);
        for (; piece < end; piece++) {
            for (int i = 0; i < piece_length_(rows->pieces.at[piece]); i++, t++) {
                sum += targets[t] < 0
                           ? 0
                           : run.data.val_nats[piece_start_(rows->pieces.at[piece]) + (size_t)i + 1];
                count += targets[t] >= 0;
            }
        }
    }
    EXPECT_NEAR(run_data_floor(&run.data, 2 * run.settled.options.batch.size), sum / count, 1e-12,
                "two batches");
    run_close(&run);
}

static void test_sources(void) {
    Run run = run_open("--train-data %/train.bin:3,%/large.bin:1 --seq-len 16 --batch 1");
    EXPECT(run.data.train.count == 2 && run.data.train.order.stretch[0].cycle == 4 && run.data.val.count == 2,
           "two sources");
    EXPECT(run.settled.options.batch.steps == 19 * 4 + 2,
           "%d: until the first source, of 59 rows, is at its end", (int)run.settled.options.batch.steps);
    EXPECT(run.data.train.tokens == 1900 && run.data.val.tokens == 100, "5 %% of each to validate");
    run_close(&run);
}

static int is_there(const char* name) { return access(test_path(name), F_OK) == 0; }

// Bytes with a separator are documents; the end of one text is a document, too, in every packing.
static void test_documents_of_text(void) {
    static const char text[] =
        "one fish.two fish.red fish.blue fish.and one more, which is longer than the others.";
    test_write("fish.txt", text, strlen(text));
    Run run = run_open("--train-data %/fish.txt --separator . --pack pad --seq-len 16 --out %/fish");
    EXPECT(run.data.is_encoded && run.data.kind == DATA_TEXT && run.settled.cfg.V == 257, "bytes, encoded");
    EXPECT(run.data.train.source[0].rows.documents.count == 5, "%zu documents",
           run.data.train.source[0].rows.documents.count);
    EXPECT(strcmp(run.data.train.source[0].name, test_path("fish.txt")) == 0, "%s",
           run.data.train.source[0].name);
    EXPECT(is_there("fish/tokens"), "kept");
    run_close(&run);
    for (int pack = 1; pack < 6; pack++) {
        static const char* const names[] = {"", "aligned", "bestfit", "pad", "dynamic", "uniform"};
        char line[256];
        snprintf(line, sizeof(line), "%s--pack %s", TEXT "--seq-len 16 --doc-mask on ", names[pack]);
        run = run_open(line);
        EXPECT(run.data.val.source[0].rows.documents.count == 1 && run.data.val.tokens == 100, "%s", line);
        run_close(&run);
    }
    expect_refused(SHARDS "--separator x", 2, "--separator x|train.bin");
    expect_refused("--separator x --steps 1", 2, "--separator x needs --train-data");
}

// --plan and --print-config write nothing: without kept shards the data is unknown.
static void test_dry(void) {
    static const char* const dry[] = {" --plan", " --print-config"};
    char line[256];
    for (int i = 0; i < 2; i++) {
        snprintf(line, sizeof(line), "%s%s", TEXT "--seq-len 16 --tokenizer bpe:300 --out %/dry", dry[i]);
        Run run = run_open(line);
        EXPECT(run.data.is_unknown && run.settled.cfg.V == 300 &&
                   run.settled.options.batch.steps == OPTION_AUTO,
               "%s", line);
        run_close(&run);
        snprintf(line, sizeof(line), "%s%s", TEXT "--seq-len 16 --tokenizer %/merges.txt --steps 7", dry[i]);
        run = run_open(line);
        EXPECT(run.data.is_unknown && run.settled.cfg.V == 259 && run.settled.options.batch.steps == 7, "%s",
               line);
        run_close(&run);
    }
    EXPECT(!is_there("dry"), "a directory");
    Run run = run_open(TEXT "--seq-len 16 --tokenizer %/merges.txt --out %/dry");
    const int64_t steps = run.settled.options.batch.steps;
    run_close(&run);
    run = run_open(TEXT "--seq-len 16 --tokenizer %/merges.txt --out %/dry --plan");
    EXPECT(!run.data.is_unknown && run.settled.options.batch.steps == steps && run.data.train.tokens > 0,
           "kept tokens");
    run_close(&run);
}

// More files than the system maps are made into shards, of the same tokens.
static void test_many_files(void) {
    char name[64];
    mkdir(test_path("many"), 0777);
    for (int i = 0; i <= RUN_DATA_MAPPED_FILES; i++) {
        snprintf(name, sizeof(name), "many/%06d.txt", i);
        test_write(name, name + 5, 6);
    }
    Run run = run_open("--train-data %/many --seq-len 16");
    const TokenStream* stream = &run.data.train.source[0].stream;
    EXPECT(run.data.is_encoded && stream->num_spans == 1, "%zu spans", stream->num_spans);
    EXPECT(run.data.train.tokens + run.data.val.tokens == 7 * (RUN_DATA_MAPPED_FILES + 1),
           "bytes, and ends of text");
    EXPECT(tokens_at(stream, 7) == 256 && tokens_at(stream, 8) == '0' && tokens_at(stream, 13) == '1',
           "bytes");
    run_close(&run);
    EXPECT(encoded_text_temporary_[0] == '\0', "%s is left", encoded_text_temporary_);
}

// The loaders that both trainers open.
static void test_loaders(void) {
    Run run = run_open(DOCUMENTS "--pack uniform --total-batch 128 --eval-batches 20");
    Dataloader train, val;
    fflush(stdout);
    const int screen = dup(STDOUT_FILENO);
    EXPECT(freopen(test_path("screen"), "w", stdout) != NULL, "");
    run_data_open_loaders(&train, &val, &run.data, &run.settled);
    fflush(stdout);
    dup2(screen, STDOUT_FILENO);
    EXPECT(train.B == 2 && val.B == 2 && train.settings.group == 8, "groups no larger than an update");
    EXPECT(train.settings.shuffle == SHUFFLE_ON && val.settings.shuffle == SHUFFLE_OFF,
           "validation in order");
    EXPECT(run_data_eval_sequences(&run.settled.options, val.num_sequences) == 40 && val.num_sequences == 80,
           "");
    const Batch batch = dataloader_next(&val);
    EXPECT(batch.T == 16 && batch.counted == 16 + 9 && batch.inputs[0] == 110, "%d", batch.counted);
    dataloader_close(&val);
    dataloader_close(&train);
    run_close(&run);
}

// Training text depends on the seed, validation text does not.
static void test_stories_seed(void) {
    Run one = run_open("--steps 5 --batch 8 --seq-len 32 --seed 1");
    Run two = run_open("--steps 5 --batch 8 --seq-len 32 --seed 2");
    EXPECT(memcmp(one.data.train_stories, two.data.train_stories, 2 * one.data.train.tokens) != 0,
           "training");
    EXPECT(memcmp(one.data.val_stories, two.data.val_stories, 2 * one.data.val.tokens) == 0, "validation");
    run_close(&two);
    run_close(&one);
}

// Sizes that people ask for must neither overflow nor fill the memory.
static void test_stories_limit(void) {
    const size_t max = ((size_t)1 << 27) + 1;
    EXPECT(run_data_stories_tokens_(4096000) == 4096001, "below the limit");
    EXPECT(run_data_stories_tokens_(ldexp(1, 78)) == max, "beyond 64 bits");
    EXPECT(run_data_stories_tokens_(ldexp(1, 27)) == max, "the limit itself");
    Run run = run_open("--steps 0 --batch 2 --seq-len 16");
    EXPECT(run.data.train.tokens == 33, "one batch at least: %zu", run.data.train.tokens);
    run_close(&run);
    run = run_open("--steps 6 --batch 2 --seq-len 16 --batch-schedule 0:32,4:64");
    EXPECT(run.data.train.tokens == 4 * 32 + 2 * 64 + 1, "of two stages: %zu", run.data.train.tokens);
    run_close(&run);
}

static void test_floor(void) {
    Run run = run_open("--steps 1 --batch 2 --seq-len 16 --eval-batches 4");
    double sum = 0;
    for (int i = 1; i <= 64; i++) { // targets of the first two batches
        sum += run.data.val_nats[i];
    }
    EXPECT_NEAR(run_data_floor(&run.data, 2 * run.settled.options.batch.size), sum / 64, 1e-12,
                "two batches");
    const double all = run_data_floor(&run.data, 4 * run.settled.options.batch.size);
    EXPECT(all > 0.1 && all < 3, "%g nats per token", all);
    EXPECT(run_data_floor(&run.data, 1000 * run.settled.options.batch.size) == all, "no more than there is");
    run_close(&run);
    run = run_open(TEXT "--seq-len 16");
    EXPECT(isnan(run_data_floor(&run.data, 1)), "unknown for other text");
    run_close(&run);
}

// ---- batches ----

static void expect_batch(const char* line, int batch, int seq_len, int64_t total) {
    Run run = run_open(line);
    const Options* o = &run.settled.options;
    EXPECT(o->batch.size == batch && o->batch.seq_len == seq_len && o->batch.total == total,
           "%s: %d x %d, %lld tokens, wanted %d x %d, %lld", line, o->batch.size, o->batch.seq_len,
           (long long)o->batch.total, batch, seq_len, (long long)total);
    run_close(&run);
}

static void test_batch(void) {
    const int usual = SETUP_BATCH_TOKENS; // about this many tokens, in whole sequences
    expect_batch(TEXT, usual / SETUP_CONTEXT, SETUP_CONTEXT, usual);
    expect_batch(TEXT "--seq-len 100", usual / 100, 100, usual / 100 * 100);
    expect_batch(TEXT "--context 64", usual / 64, 64, usual);
    expect_batch("--seq-len 5000 --steps 1 --eval-batches 1", 1, 5000, 5000);
    expect_batch(TEXT "--batch 3 --seq-len 16", 3, 16, 48);
    expect_batch(TEXT "--batch 3 --seq-len 16 --total-batch 96", 3, 16, 96);
    expect_batch(TEXT "--seq-len 16 --total-batch -1", usual / 16, 16, usual);
    expect_batch(TEXT "--seq-len 16 --total-batch 96", 6, 16, 96); // less than the usual
    // 2 x 509 sequences: 2 divides them
    expect_batch(TEXT "--seq-len 16 --total-batch 16288", 2, 16, 16288);
    expect_refused(TEXT "--seq-len 16 --total-batch 100", 2, "--total-batch is 100|--seq-len 16");
    expect_refused(TEXT "--batch 3 --seq-len 16 --total-batch 100", 2, "--total-batch is 100|--seq-len 16");
    expect_batch(TEXT "--seq-len 16 --batch 4 --total-batch 32", 4, 16, 32);
    expect_refused(TEXT "--seq-len 65 --context 64", 2, "--seq-len is 65|context of 64");
    expect_refused("--seq-len 1025 --model d12 --steps 1", 2, "--seq-len is 1025|1024");
}

static void test_eval_batches(void) {
    static const struct {
        int eval_batches, B;
        uint64_t sequences;
        int64_t wanted;
    } cases[] = {{20, 4, 1000, 80},
                 {20, 4, 40, 40},
                 {0, 4, 40, 40},
                 {0, 4, 41, 41},
                 {20, 4, 1, 1}, //
                 {OPTION_AUTO, 1, 5000, 1280},
                 {OPTION_AUTO, 64, 5000, 1280},
                 {OPTION_AUTO, 4, 700, 700}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Options options = parse("");
        options.batch.size = cases[i].B;
        options.batch.seq_len = 16;
        options.eval.batches = cases[i].eval_batches;
        EXPECT(run_data_eval_sequences(&options, cases[i].sequences) == cases[i].wanted, "case %d", (int)i);
    }
}

// ---- the run ----

static void test_steps(void) {
    static const struct {
        const char* line;
        int64_t steps;
    } cases[] = {
        {TEXT "--seq-len 16 --batch 4", 1888 / 64}, // one epoch of the 118 sequences of 1901 tokens
        {TEXT "--seq-len 16 --batch 4 --steps -1", 1888 / 64},
        {TEXT "--seq-len 100 --batch 1", 18}, // 19 inputs of 1900 tokens, the last without target
        {TEXT "--seq-len 16 --batch 512", 1}, // less than one batch
        {TEXT "--seq-len 16 --steps 0", 0},
        {TEXT "--seq-len 16 --batch 4 --epochs 1", 1888 / 64},
        {TEXT "--seq-len 16 --batch 4 --epochs 2.5 --steps auto", (int)(2.5 * 1888 / 64)},
        {TEXT "--seq-len 16 --batch 4 --epochs 0.001", 1},
        {TEXT "--seq-len 16 --steps 77", 77},
        {"--seq-len 1 --batch 1 --eval-batches 1 --steps auto", RUN_DATA_STORIES_STEPS},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Run run = run_open(cases[i].line);
        EXPECT(run.settled.options.batch.steps == cases[i].steps, "%s: %lld", cases[i].line,
               (long long)run.settled.options.batch.steps);
        EXPECT(run.settled.options.batch.epochs == 0, "said by --steps from now on");
        EXPECT(run.data.kind == DATA_STORIES
                   ? run.data.epochs == 0
                   : run.data.epochs * (double)mixture_epoch(&run.data.train) *
                             run.settled.options.batch.seq_len ==
                         (double)run.settled.options.batch.steps * (double)run.settled.options.batch.total,
               "%s: %g epochs", cases[i].line, run.data.epochs);
        run_close(&run);
    }
    expect_refused(TEXT "--epochs 2 --steps 7", 2, "--epochs 2 and --steps 7: wanted only one of them");
    expect_refused("--epochs 2", 2, "--epochs 2 needs --train-data");
    expect_refused(TEXT "--epochs 1e9 --seq-len 1 --batch 1", 2,
                   "--epochs 1e+09 is 1.9e+12 steps; wanted at most");
}

// Validations take a tenth of the work of the updates, or what two of them take on an update's
// sequences, whatever the micro-batch is.
static void test_validations(void) {
    static const struct {
        const char* line;
        int every, batches;
        int64_t sequences;
    } cases[] = {
        {"--seq-len 128 --steps 3600", 360, OPTION_AUTO, 160}, // as ever
        {"--seq-len 128 --steps 1000", 100, OPTION_AUTO, 160},
        {"--seq-len 128 --steps 300", 100, OPTION_AUTO, 160}, // 4.5 fit, with the first one
        {"--seq-len 128 --steps 100", 100, 15, 120},
        {"--seq-len 128 --steps 100 --batch 2 --total-batch 1024", 100, 60, 120},
        {"--seq-len 64 --batch 4 --steps 20", 20, 3, 12},
        {"--seq-len 64 --batch 4 --steps 20 --average ema:0.9", 10, 1, 4}, // each twice
        {"--seq-len 64 --batch 4 --steps 2", 2, 1, 4},
        {"--seq-len 64 --batch 4 --steps 2 --total-batch 65536", 2, OPTION_AUTO, 320},
        {"--seq-len 64 --batch 4 --steps 20 --eval-batches 2", 10, 2, 8},
        {"--seq-len 64 --batch 4 --steps 20 --eval-every 5", 5, OPTION_AUTO, 320}, // as asked for
        {"--seq-len 64 --batch 4 --steps 0", 1, OPTION_AUTO, 320},
        {TEXT "--val-data %/val.txt --seq-len 16 --batch 4 --steps 300", 30, OPTION_AUTO, 31},
        {TEXT "--val-data a=%/val.txt,b=%/val.txt --seq-len 16 --batch 4 --steps 100", 100, 7, 56},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Run run = run_open(cases[i].line);
        const Options* o = &run.settled.options;
        const int64_t sequences = run_data_all_eval_sequences(&run.data, o);
        EXPECT(o->eval.every == cases[i].every && o->eval.batches == cases[i].batches &&
                   sequences == cases[i].sequences,
               "%s: every %d, %d batches, %lld sequences", cases[i].line, o->eval.every, o->eval.batches,
               (long long)sequences);
        if (o->batch.steps >= 20 && !strstr(cases[i].line, "--eval-every")) {
            EXPECT(setup_validation_share(&run.settled, &run.data) <= 0.1 + 1e-9, "%s: %g", cases[i].line,
                   setup_validation_share(&run.settled, &run.data));
        }
        run_close(&run);
    }
}

static void test_times(void) {
    Run run = run_open(TEXT "--seq-len 16 --steps 100 --out %/out");
    const Options* o = &run.settled.options;
    EXPECT(o->output.save_every == OPTION_AUTO, "a checkpoint at the end");
    EXPECT(o->optimizer.warmup == 5 && o->eval.every == 10 && o->samples.every == 100 &&
               o->samples.tokens == 16,
           "%d %d", o->optimizer.warmup, o->eval.every);
    run_close(&run);
    run = run_open(TEXT "--seq-len 256 --context 512 --steps 3000000000");
    EXPECT(o->output.save_every == OPTION_AUTO, "for whoever adds a directory");
    EXPECT(o->optimizer.warmup == 2000 && o->eval.every == 1000 && o->samples.every == 1000000000 &&
               o->samples.tokens == 256,
           "%d %d", o->optimizer.warmup, o->eval.every);
    run_close(&run);
    run = run_open(TEXT "--seq-len 16 --steps 0 --out %/out");
    EXPECT(o->output.save_every == OPTION_AUTO && o->optimizer.warmup == 0 && o->eval.every == 1 &&
               o->samples.every == 1,
           "no steps");
    run_close(&run);
    run = run_open(TEXT "--seq-len 16 --steps 100 --warmup 3 --eval-every 0 --sample-every 0 "
                        "--sample-tokens 7 --save-every 0 --lr 0.5 --out %/out");
    EXPECT(o->optimizer.warmup == 3 && o->eval.every == 0 && o->samples.every == 0 &&
               o->samples.tokens == 7 && o->output.save_every == 0 && o->optimizer.lr == 0.5f,
           "given options stay");
    run_close(&run);
    expect_refused(TEXT "--save-every 5", 2, "--save-every 5|--out");
}

static void test_learning_rate(void) {
    static const struct {
        const char* line;
        float lr;
    } cases[] = {
        {SHARDS "--seq-len 16 --model d12 --total-batch 524288 --steps 19560", 6e-4f},
        {SHARDS "--seq-len 16 --model d12 --total-batch 1048576 --steps 9", 6e-4f},
        {SHARDS "--seq-len 16 --model d12 --total-batch 32768 --steps 19560", 3e-4f}, // 1/16: half
        {SHARDS "--seq-len 16 --model d12 --total-batch 32768 --steps 625", 0.4f / 768},
        {SHARDS "--seq-len 16 --model d48 --total-batch 524288 --steps 19560", 6e-4f * 768 / 1600},
        {SHARDS "--seq-len 16 --channels 8 --total-batch 524288 --steps 19560", 4e-3f},
        // what the built-in run had before it knew its length
        {"--seq-len 128 --steps 3600", 6e-4f * 6 * 0.21022410f},
        {"--seq-len 128 --steps 1250", 0.2f / 128},
        {"--seq-len 128 --steps 0", 6e-4f * 6 * 0.21022410f},
        {"--seq-len 128 --steps 300 --optimizer sgd", 400 * 0.4f / 128},
        // at the rate of the small model
        {"--layers 2 --channels 256 --heads 8 --mup 128:2 --seq-len 128 --steps 300", 0.4f / 128},
        // weights with no long way to go
        {SHARDS "--seq-len 16 --model %/step_00000003 --steps 9 --total-batch 524288", 4e-4f},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Run run = run_open(cases[i].line);
        EXPECT_NEAR(run.settled.options.optimizer.lr, cases[i].lr, 1e-9, "%s", cases[i].line);
        run_close(&run);
    }
}

// SGD's rate and decay, and Lion's beta2, but only where nothing is given.
static void test_optimizers(void) {
    static const struct {
        const char* line;
        float lr, decay, beta2;
    } cases[] = {{"--optimizer sgd", 400, 0, 1},
                 {"--optimizer sgd --weight-decay 0.01", 400, 0.01f, 1},
                 {"--optimizer lion", 1, 0.1f, 0.99f},
                 {"--optimizer lion --beta2 0.5", 1, 0.1f, 0.5f}};
    char line[256];
    snprintf(line, sizeof(line), "%s", SHARDS "--seq-len 16 --batch 1");
    Run adamw = run_open(line);
    EXPECT(adamw.settled.options.optimizer.weight_decay == 0.1f, "AdamW's decay");
    for (int i = 0; i < 4; i++) {
        snprintf(line, sizeof(line), "%s %s", SHARDS "--seq-len 16 --batch 1", cases[i].line);
        Run run = run_open(line);
        const float beta2 = cases[i].beta2 == 1 ? adamw.settled.options.optimizer.beta2 : cases[i].beta2;
        EXPECT_NEAR(run.settled.options.optimizer.lr, cases[i].lr * adamw.settled.options.optimizer.lr,
                    1e-6 * run.settled.options.optimizer.lr, "%s: rate", line);
        EXPECT(run.settled.options.optimizer.weight_decay == cases[i].decay &&
                   run.settled.options.optimizer.beta2 == beta2,
               "%s: %f, %f", line, (double)run.settled.options.optimizer.weight_decay,
               (double)run.settled.options.optimizer.beta2);
        run_close(&run);
    }
    run_close(&adamw);
}

// 0.95 for half a million tokens and more, and for less the same memory in tokens, up to a thousand
// updates.
static void test_beta2(void) {
    static const struct {
        const char* line;
        float beta2;
    } cases[] = {{SHARDS "--seq-len 16 --batch 1 --total-batch 524288", 0.95f},
                 {SHARDS "--seq-len 16 --batch 1 --total-batch 1048576", 0.95f},
                 {SHARDS "--seq-len 16 --batch 1 --total-batch 262144", 0.974679f}, // sqrt(0.95)
                 {SHARDS "--seq-len 16 --batch 1", 0.999f},
                 {SHARDS "--seq-len 16 --batch 1 --beta2 0.5", 0.5f}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        Run run = run_open(cases[i].line);
        EXPECT_NEAR(run.settled.options.optimizer.beta2, cases[i].beta2, 1e-6, "%s", cases[i].line);
        run_close(&run);
    }
}

// ---- facts that follow ----

static void expect_use(const char* line, ModelUse use) {
    Run run = run_open(line);
    EXPECT(run.settled.use == use, "%s: use %d, wanted %d", line, (int)run.settled.use, (int)use);
    run_close(&run);
}

static void test_use(void) {
    expect_use(TEXT "--seq-len 16", USE_TRAIN);
    expect_use(TEXT "--seq-len 16 --steps 0", USE_TRAIN);
    expect_use("--model %/step_00000003 --steps 0 --perplexity %/val.bin", USE_EVALUATE);
    expect_use("--model %/step_00000003 --steps 0 --export-gguf %/x.gguf", USE_EVALUATE);
    expect_use("--layers 1 --steps 0 --export-gguf %/x.gguf", USE_TRAIN); // its random weights
    write_tokenizer("tokenizer400.txt", 400);
    expect_use("--model %/step_00000003 --tokenizer %/tokenizer400.txt --prompt x", USE_GENERATE);
}

// Two ranks of a run with frozen parameters; and the same ranks where they only evaluate.
static void test_facts(void) {
    const Ranks ranks = ranks_of_data(1, 2, 2, 2);
    Run run = run_open_as(SHARDS "--seq-len 16 --batch 2 --total-batch 160 --freeze wpe,blocks[0]", ranks,
                          SAFETENSORS_BF16);
    const Settled* s = &run.settled;
    EXPECT(s->sequences == 10 && s->micro_batches == 5 && s->decode_batch == 1, "sizes");
    EXPECT(s->zero.stage == 2 && s->zero.rank == 1 && s->zero.size == 2, "ZeRO");
    EXPECT(s->freeze.first_block == 0 && s->optimizer.frozen == s->freeze.rows && s->freeze.rows, "frozen");
    EXPECT(s->optimizer.master == MASTER_SPLIT && s->saved_dtype == SAFETENSORS_F32, "master weights");
    EXPECT(s->element_bytes == 2 && s->gradient_bytes == 2 && s->optimizer.by_block, "types");
    EXPECT(s->options.ranks.zero == 2, "--zero auto");
    run_close(&run);
    run = run_open_as("--model %/step_00000003 --steps 0 --perplexity %/val.bin", ranks, SAFETENSORS_BF16);
    EXPECT(s->zero.stage == 0 && s->zero.size == 1, "each rank has the whole model");
    EXPECT(s->optimizer.master == MASTER_NONE && s->saved_dtype == SAFETENSORS_BF16, "no master weights");
    run_close(&run);
}

// ---- samples ----

static void test_prompt(void) {
    int ids[17];
    Run run = run_open(TEXT "--seq-len 16 --prompt Once");
    EXPECT(run_data_prompt(ids, 16, &run.data, &run.settled.options, run.settled.cfg.V) == 5,
           "end of text and four bytes");
    EXPECT(ids[0] == 256 && ids[1] == 'O' && ids[4] == 'e', "%d %d %d", ids[0], ids[1], ids[4]);
    EXPECT(run_data_prompt(ids, 5, &run.data, &run.settled.options, run.settled.cfg.V) == 5, "it just fits");
    run_close(&run);
    run = run_open(TEXT "--seq-len 16 --prompt Once --start-token off");
    EXPECT(run_data_prompt(ids, 4, &run.data, &run.settled.options, run.settled.cfg.V) == 4 && ids[0] == 'O',
           "four bytes, which fit");
    run_close(&run);
    run = run_open(TEXT "--seq-len 16 --start-token off");
    EXPECT(run_data_prompt(ids, 16, &run.data, &run.settled.options, run.settled.cfg.V) == 1 && ids[0] == 256,
           "no text needs a start");
    run_close(&run);
    run = run_open(SHARDS "--seq-len 16");
    EXPECT(run_data_prompt(ids, 16, &run.data, &run.settled.options, run.settled.cfg.V) == 1 &&
               ids[0] == 50256,
           "none");
    run_close(&run);
    run = run_open(SHARDS "--seq-len 16 --vocab-size 400 --tokenizer %/tokenizer.txt");
    EXPECT(run_data_prompt(ids, 16, &run.data, &run.settled.options, run.settled.cfg.V) == 1 && ids[0] == 299,
           "tokenizer's");
    run_close(&run);
    run = run_open(SHARDS "--seq-len 16 --tokenizer %/merges.txt --prompt the");
    EXPECT(run_data_prompt(ids, 16, &run.data, &run.settled.options, run.settled.cfg.V) == 2,
           "end of text and a token");
    EXPECT(ids[0] == 258 && ids[1] == 257, "%d %d", ids[0], ids[1]);
    run_close(&run);

    expect_refused(TEXT "--seq-len 4 --prompt Once", 2, "--prompt|4 tokens|at most 3");
    expect_refused(SHARDS "--seq-len 16 --prompt Once", 2, "--prompt|--tokenizer");
    expect_refused("--seq-len 16 --steps 1 --prompt qqq", 2, "qqq");
}

static void expect_no_grid(const char* options, const char* words) {
    char line[512], wanted[512];
    snprintf(line, sizeof(line), "%s--layers 4 --channels 96 --heads 4 --seq-len 32 --batch 1 %s", SHARDS,
             options);
    snprintf(wanted, sizeof(wanted), "error: %s", words);
    EXPECT(test_dies(body_grid, line, 2, wanted), "%s", options);
}

// Returns 1 if --fit may choose a grid for two ranks.
static int allows(GridShape shape, const char* options) {
    char line[512];
    snprintf(line, sizeof(line), "%s--layers 4 --channels 96 --heads 4 --seq-len 32 --batch 1 -pn 2 %s",
             SHARDS, options);
    Run run = run_open_grid(line);
    const int is_allowed = setup_allows_grid(&run.settled, shape);
    run_close(&run);
    return is_allowed;
}

static void test_allowed_grids(void) {
    const GridShape context = {1, 2, 1, 1, 1}, tensor = {2, 1, 1, 1, 1}, stages = {1, 1, 1, 2, 1};
    EXPECT(allows(context, ""), "chunks of 8 tokens");
    EXPECT(!allows(context, "--matmul bf16"), "no whole tiles");
    EXPECT(!allows(context, "--arch mixtral --experts 4"), "a balance loss");
    EXPECT(allows(context, "--arch mixtral --experts 4 --router-balance 0"), "experts");
    EXPECT(allows(tensor, ""), "two tensor ranks");
    EXPECT(allows(tensor, "--optimizer muon"), "whole matrices");
    EXPECT(allows(tensor, "--optimizer soap"), "whole bases");
    EXPECT(!allows(tensor, "--arch llama --kv-heads 1"), "one head of keys");
    EXPECT(allows(tensor, "--arch llama --kv-heads 2 --share-layers all"), "shared by layers, too");
    EXPECT(allows(tensor, "--freeze ln1w[0]"), "a block's norm");
    EXPECT(allows(stages, "--optimizer muon"), "two stages");
    EXPECT(!allows(stages, "--share-layers all"), "shared layers");
}

// Grids that no model of this size, or no run of this kind, can have.
static void test_grids(void) {
    expect_no_grid("-pn 8 -tp 3", "--tensor-parallel 3, 8 processes; wanted 2 or 4");
    expect_no_grid("-pn 8 -tp 8", "--tensor-parallel 8, 4 heads; wanted 4");
    expect_no_grid("-pn 4 -tp 4 --arch llama --kv-heads 2", "--tensor-parallel 4, 2 heads of keys; wanted 2");
    expect_no_grid("-pn 2 --tensor-slices 2",
                   "--tensor-slices was removed: each of the ranks of --tensor-parallel has one part");
    expect_no_grid("-pn 8 -tp 2 -cp 3", "--context-parallel 3, 8 processes in groups of 2; wanted 2 or 4");
    expect_no_grid("-pn 8 -pp 3", "--pipeline-parallel 3, 8 processes; wanted 2");
    expect_no_grid("-pn 8 -pp 8", "--pipeline-parallel 8, 4 layers; wanted 4");
    expect_no_grid("-pn 6 -cp 3", "--seq-len 32, --context-parallel 3; wanted a multiple of 6");
    expect_no_grid("-pn 2 -cp 2 --matmul bf16",
                   "--seq-len 32, --context-parallel 2; wanted a multiple of 128: "
                   "two chunks for each process, in whole tiles of 32 tokens");
    expect_no_grid("-pn 2 -cp 2 --seq-len-schedule 0:2,3:32",
                   "--seq-len-schedule 0:2,3:32: 2 tokens; wanted multiples of 4");
    expect_no_grid("-pn 2 -cp 2 --arch mixtral --experts 4 --router-balance 0.01",
                   "--context-parallel 2, --router-balance 0.01, which is a loss of all tokens of a "
                   "micro-batch; wanted 0");
    expect_no_grid("-pn 4 -tp 4 --optimizer adamw8bit",
                   "--tensor-parallel 4, parts of 24 channels, no multiple of 64; wanted 1");
    expect_no_grid("-pn 8 -cp 8 --pack dynamic",
                   "--pack dynamic, --context-parallel 8: batches are multiples of 8");
    expect_no_grid("-pn 2 -pp 2 --share-layers all",
                   "--pipeline-parallel 2, --share-layers all; wanted pairs or off");
    expect_no_grid("-pn 2 -pp 2 --freeze embeddings,blocks[0]",
                   "--pipeline-parallel 2, --freeze embeddings,blocks[0]; wanted "
                   "--pipeline-parallel 1");
    expect_no_grid("-pn 2 -pp 2 --arch llama --residual-scales on",
                   "--pipeline-parallel 2, --residual-scales on, with which blocks of all stages");
    expect_no_grid("-pn 2 -tp 2 --arch llama --value-embeddings on",
                   "--tensor-parallel 2, --value-embeddings on, whose tables are not cut");
    expect_no_grid("-pn 2 -pp 2 --update-in-backward on",
                   "--pipeline-parallel 2, --update-in-backward on; wanted off");
    expect_no_grid("-pn 2 -pp 2 --pipeline-layers 3,2",
                   "--pipeline-layers: 3,2, 5 layers; wanted the model's 4");
    expect_no_grid("-pn 2 -pp 2 --pipeline-layers 3", "--pipeline-layers: 3; wanted 2 numbers");
    expect_no_grid("-pn 2 -pp 2 --pipeline-layers 3,1,", "--pipeline-layers: 3,1,; wanted 2 numbers");
    expect_no_grid("-pn 2 -pp 2 --pipeline-layers x,1", "--pipeline-layers: x,1; wanted 2 numbers");
    expect_no_grid("-pn 1 --pipeline-layers 2,2", "--pipeline-layers: 2,2; wanted 1 numbers");
    expect_no_grid("-pn 2 -tp 2 --update-in-backward on",
                   "--tensor-parallel 2, --update-in-backward on; wanted off");
}

// Only training data are rearranged, with the tokenizer's marks, which the model must have.
static void test_fim(void) {
    const char* marks = "--fim-rate 0.5 --seed 7 --tokenizer %/fim.tokenizer.json ";
    char line[256];
    Bpe bpe;
    bpe_open_bytes(&bpe);
    bpe_add_names(&bpe, fim_names().of, FIM_MARKS);
    bpe_write(&bpe, test_path("fim.tokenizer.json"));
    bpe_close(&bpe);
    for (int pack = 0; pack < 2; pack++) {
        snprintf(line, sizeof(line), "%s%s--pack %s", TEXT, marks, pack ? "bestfit" : "stream");
        Run run = run_open(line);
        const FillInMiddle fim = run.data.train.source[0].rows.fim;
        EXPECT(fim.rate == 0.5f && fim.spm_rate == 0.5f && fim.seed == 7 && fim.prefix == 257 &&
                   fim.suffix == 258 && fim.middle == 259,
               "%s", line);
        EXPECT(run.data.val.source[0].rows.fim.rate == 0, "%s: validation", line);
        run_close(&run);
    }
    Run run = run_open(TEXT "--tokenizer %/fim.tokenizer.json --prompt ab");
    run.settled.options.texts.suffix = "c";
    int ids[17];
    const int wanted[7] = {256, 257, 'a', 'b', 258, 'c', 259}; // end-of-text, PRE ab SUF c MID
    EXPECT(run_data_infill(ids, 7, &run.data, &run.settled.options, 260) == 7 &&
               memcmp(ids, wanted, sizeof(wanted)) == 0,
           "%d %d %d %d %d %d %d", ids[0], ids[1], ids[2], ids[3], ids[4], ids[5], ids[6]);
    run_close(&run);
    expect_refused(TEXT "--fim-rate 0.5", 2,
                   "--fim-rate 0.5 needs marks|the tokenizer of these data has none");
    expect_refused(SHARDS "--fim-rate 0.5", 2, "--fim-rate 0.5 needs marks|<|fim_prefix|>");
    expect_refused("--fim-rate 0.5", 2, "--fim-rate 0.5 needs marks");
    expect_refused(SHARDS "--tokenizer %/tokenizer.txt --fim-rate 1", 2,
                   "--fim-rate 1 needs marks|tokenizer.txt has none");
    expect_refused(TEXT "--fim-rate 1.5", 2, "--fim-rate|1.5");
#define MARKS TEXT "--tokenizer %/fim.tokenizer.json --fim-rate 0.5 "
    expect_refused(MARKS "--vocab-size 258", 2, "258");
    expect_refused(MARKS "--seq-len 4", 2, "--fim-rate 0.5, --seq-len 4; wanted at least 5");
    expect_refused(MARKS "--seq-len-schedule 0:8,2:16", 2, "--fim-rate 0.5, --seq-len-schedule 0:8,2:16");
    expect_refused(TEXT "--tokenizer bpe:259 --out never --fim-rate 0.5", 2, "bpe:259|from 260 to");
}

TEST(resolve) {
    write_files();
    test_documents_of_text();
    test_dry();
    test_many_files();
    test_model();
    test_architectures();
    test_kinds_of_layers();
    test_layer_types();
    test_named_hybrids();
    test_banner();
    test_experts();
    test_recipe();
    test_model_file();
    test_data();
    test_stories();
    test_stories_seed();
    test_stories_limit();
    test_pack();
    test_packed_floor();
    test_fim();
    test_sources();
    test_loaders();
    test_floor();
    test_batch();
    test_eval_batches();
    test_steps();
    test_validations();
    test_times();
    test_learning_rate();
    test_beta2();
    test_optimizers();
    test_use();
    test_facts();
    test_grids();
    test_allowed_grids();
    test_prompt();
}
