/*
options_table.h -- the options of the trainers: their struct, and their table.

The table is compiled with the implementation of options.h. To add an option, add one field and one
row, at the same place. If it only has an effect together with another option, its row says so:
NEEDS_.
*/
#ifndef LLMC_OPTIONS_TABLE_H
#define LLMC_OPTIONS_TABLE_H

#include <limits.h>
#include <stdint.h>

#include "llmc/model/presets.h"
#include "llmc/base/enum_words.h"
#include "llmc/setup/options.h"
#include "llmc/model/model.h"
#include "llmc/optim/schedule.h"
#include "llmc/tokenizer/chat_format.h"

#define TASKS_HELLASWAG "data/hellaswag/hellaswag_val.jsonl" // --hellaswag on

// --on-divergence
// clang-format off
#define DIVERGENCE_WORDS(X) \
    X(DIVERGENCE_SKIP, "skip") \
    X(DIVERGENCE_STOP, "stop") \
    X(DIVERGENCE_ROLLBACK, "rollback")
// clang-format on
typedef enum { DIVERGENCE_WORDS(WORDS_VALUE) } OnDivergence;

// --offload-optimizer
// clang-format off
#define OFFLOAD_WORDS(X) \
    X(OFFLOAD_OFF, "off") \
    X(OFFLOAD_HOST, "host") \
    X(OFFLOAD_DISK, "disk")
// clang-format on
typedef enum { OFFLOAD_WORDS(WORDS_VALUE) } OffloadPlace;

// --master-weights
// clang-format off
#define MASTER_WEIGHTS_WORDS(X) \
    X(MASTER_WEIGHTS_OFF, "off") \
    X(MASTER_WEIGHTS_ON, "on") \
    X(MASTER_WEIGHTS_24, "24")
// clang-format on
typedef enum { MASTER_WEIGHTS_WORDS(WORDS_VALUE) } MasterWeightsChoice;

// Conditions for an option to have an effect; NEEDS_(NAME) in its row refers to one.
// X(NAME, what becomes of an option that is given without it, condition, words)
// The condition is about Settled *s and its Options *o; some options are still "auto". REFUSED: the
// user asked for another kind of run. NOTED: the run is the same, and a line says so.
// clang-format off
#define OPTION_NEEDS(X) \
    X(OUT,         NOTED,   o->output.dir[0], "--out") \
    X(SAVES,       REFUSED, o->output.dir[0] || o->output.save_every <= 0, "a directory: --out") \
    X(DIRECTORY,   REFUSED, o->output.dir[0], "a directory: --out") \
    X(TIMED_SAVES, NOTED,   o->output.dir[0] && o->output.save_every == OPTION_AUTO, "--out and --save-every auto") \
    X(EXPORT_LLMC, NOTED,   o->output.export_llmc[0], "--export-llmc") \
    X(EXPORT_GGUF, NOTED,   o->output.export_gguf[0], "--export-gguf") \
    X(RESUME,      NOTED,   setup_resumes(o), "--resume") \
    X(VALIDATION,  NOTED,   setup_validates(s), "validations: --eval-every") \
    X(NEW_BEST,    REFUSED, setup_validates(s), "validations: --eval-every") \
    X(SAMPLES,     NOTED,   setup_samples(s), "samples: --samples and --sample-every above 0") \
    X(SAMPLING,    NOTED,   o->samples.count > 0 || !o->samples.every, "--samples above 0") \
    X(TASKS,       REFUSED, options_has_tasks(o), "--tasks, --hellaswag or --perplexity") \
    X(EVERY_TASKS, REFUSED, options_has_tasks(o) || o->tasks.every <= 0, "--tasks, --hellaswag or --perplexity") \
    X(PERPLEXITY,  REFUSED, o->tasks.perplexity[0], "--perplexity") \
    X(TEACHER,     REFUSED, settled_has_teacher(s), "--teacher") \
    X(LORA,        REFUSED, o->model.lora_rank > 0, "--lora-rank") \
    X(FIELDS,      NOTED,   setup_reads_fields(o), "JSON lines or Parquet") \
    X(BIN,         NOTED,   setup_reads_bin(o), "data in .bin files") \
    X(SHARED_ROWS, NOTED,   o->data.pack <= (int)PACK_BESTFIT, "documents that share a row: --pack stream, aligned or bestfit") \
    X(CHATS,       NOTED,   s->use == USE_GENERATE || o->data.train[0], "--interactive, or --train-data with chats") \
    X(EXPERTS,     REFUSED, s->cfg.E > 0, "a model with experts, as --arch mixtral") \
    X(BIASES,      REFUSED, model_architecture(s->cfg.arch)->router == ROUTER_SIGMOID, \
        "routers with biases, as --arch glm4moe has them") \
    X(GELU,        NOTED,   model_activation(s->cfg) == ACTIVATION_GELU, "an architecture with GELU: --arch gpt2") \
    X(DECAYING,    NOTED,   o->optimizer.schedule != SCHEDULE_CONSTANT, "a --schedule other than constant") \
    X(WSD,         REFUSED, o->optimizer.schedule == SCHEDULE_WSD, "--schedule wsd") \
    X(DECAY,       NOTED,   setup_decays(o), "--weight-decay above 0") \
    X(MEAN,        NOTED,   o->optimizer.name != OPTIMIZER_SGD && o->optimizer.name != OPTIMIZER_ADAFACTOR, \
        "an --optimizer other than sgd and adafactor") \
    X(SQUARES,     NOTED,   setup_has_squares(o), "--optimizer adamw, adamw8bit, muon or soap") \
    X(ADAFACTOR,   REFUSED, o->optimizer.name == OPTIMIZER_ADAFACTOR, "--optimizer adafactor") \
    X(MUON,        REFUSED, o->optimizer.name == OPTIMIZER_MUON, "--optimizer muon") \
    X(SOAP,        REFUSED, o->optimizer.name == OPTIMIZER_SOAP, "--optimizer soap") \
    X(SGD,         REFUSED, o->optimizer.name == OPTIMIZER_SGD, "--optimizer sgd") \
    X(SKIPS,       NOTED,   o->optimizer.on_divergence != DIVERGENCE_STOP, "--on-divergence skip or rollback") \
    X(DISK,        REFUSED, o->memory.offload_optimizer == OFFLOAD_DISK, "--offload-optimizer disk") \
    X(FP32,        NOTED,   s->dtype == SAFETENSORS_F32 || o->optimizer.name == OPTIMIZER_SOAP, \
        "a trainer that was built with PRECISION=FP32, or --optimizer soap") \
    X(PLANNING,    NOTED,   o->plan || o->memory.fit != 0, "--plan or --fit") \
    X(STAGES,      NOTED,   o->ranks.pipeline > 1, "--pipeline-parallel above 1")
// clang-format on
#define OPTION_NEED_VALUE_(name, ...) NEED_##name,
typedef enum { NEED_NOTHING, OPTION_NEEDS(OPTION_NEED_VALUE_) NEEDS_COUNT } OptionNeed;

enum { PLAN_OFF, PLAN_ON, PLAN_MAP }; // --plan

// Values of the options, in the order of the table, which explains them. The groups are the
// sections of --help, two of them divided: the teacher is apart from the optimizer, and samples
// from validations.
struct Options {
    struct {
        const char *train, *schedule, *val, *tokenizer, *text_field, *separator;
        int format, pack, doc_mask;
        float fim_rate;
        int shuffle;
        uint64_t seed;
    } data;
    struct {
        const char* path; // or the name of a size
        int weights, arch, layers, channels, heads, kv_heads, head_size, hidden, experts, experts_used,
            dense_layers, expert_hidden, shared_hidden, context, vocab_size, own_head, scales, values;
        float rope_base;
        int window;
        const char *window_pattern, *window_schedule;
        const char* layer_types;
        float softcap;
        const char* share_layers;
        const char* adapter;
        int lora_rank;
        float lora_alpha;
        const char* lora_targets;
    } model;
    struct {
        int size, seq_len;
        const char* seq_len_schedule;
        int64_t total;
        const char* schedule;
        int64_t steps;
        float epochs;
    } batch;
    struct {
        const char* path;
        int quantize;
        float weight, temperature;
    } teacher;
    struct {
        const char* freeze;
        int name;
        float lr;
        int find_lr, warmup;
        float final_lr_frac;
        int schedule;
        int64_t decay_steps;
        int decay_shape;
        float weight_decay;
        int cautious_decay;
        float dropout, attention_dropout;
        float beta1, beta2, eps, embedding_lr_scale, vector_lr_scale, z_loss, router_balance, router_z,
            router_bias_rate, sgd_momentum, adafactor_beta1;
        const char* mup;
        int adafactor_scale;
        float matrix_lr, matrix_weight_decay;
        int muon_scale, muon_polynomial, muon_momentum, muon_rows;
        float qk_clip;
        int soap_every, soap_max_side;
        const char* average;
        float grad_clip, skip_loss_z, skip_grad_z;
        int max_skips;
        float max_loss_rise;
        int on_divergence;
    } optimizer;
    struct {
        int every, batches, patience;
    } eval;
    struct {
        int every, tokens, count;
        const char* prompt;
        float temperature;
        int top_k;
        float top_p;
        int start_token;
    } samples;
    struct {
        const char* files;
        int hellaswag;
        const char* perplexity;
        int stride, every, max;
        const char* out_scores;
    } tasks;
    struct {
        int interactive, chat;
        const char *chat_date, *system, *suffix, *prompts, *out;
        int tokens;
        OptionList stop;
        int quantize;
    } texts;
    struct {
        const char* dir;
        int save_every;
        float save_minutes;
        int keep, keep_major, keep_best;
        float model_file_gb;
        const char* resume;
        int override;
        float max_hours;
        const char* export_llmc;
        int export_dtype;
        const char* export_gguf;
        int export_gguf_dtype, tensorboard, log_every, quiet, overfit;
    } output;
    struct {
        int recompute;
        float fit;
        int threads, matmul, logits_chunk, offload_optimizer;
        const char* offload_path;
        int offload_residuals, offload_params, update_in_backward, gradients, master_weights, tf32, attention,
            gelu_fusion, autotune, graph, device, gpu_report;
    } memory;
    struct {
        int processes, rank, per_node, init; // per_node: processes of a machine
        const char *server, *fs_path;
        int tensor, context, experts, pipeline; // ranks that divide them
        const char* pipeline_layers;
        int zero, shards;
        float node_gbps, net_gbps;
        int timeout;
    } ranks;
    struct {
        const char *report, *out_html, *compare, *follow, *stop_run;
    } reports;

    const char* config;
    int plan;
    const char* plan_gpu;
    int print_config;
    const char* help; // topic: a group or an option; options_given tells whether help was asked for
    int version;

    OptionsProgram program;
    int generates;                 // true if the program generates text instead of training
    char given[OPTION_ROWS_MAX];   // by row: true if on the command line or in the file of --config
    char follows[OPTION_ROWS_MAX]; // by row: true if it is of OPTION_FOLLOWS and was "auto"
    char* config_text;             // text of that file, which values point into; NULL: none
};

// Returns the size that --model names; NULL if it names none, or a file or directory of that name
// exists, which then is the model. A run's own --out does not count: a repeated command must mean
// the same, and a run does not start from its own output.
const ModelPreset* options_model_size(const Options* options);

// Returns true if the program only describes a run and writes nothing.
static inline int options_only_look(const Options* options) { return options->plan || options->print_config; }

// Divides the micro-batch by `parts`. A validation keeps its number of sequences.
static inline void options_divide_batch(Options* options, int parts) {
    options->batch.size /= parts;
    if (options->eval.batches > 0) {
        options->eval.batches =
            options->eval.batches <= INT_MAX / parts ? options->eval.batches * parts : INT_MAX;
    }
}

// Returns true if the run evaluates the model on more than its validation data.
static inline int options_has_tasks(const Options* options) {
    return options->tasks.files[0] || options->tasks.hellaswag || options->tasks.perplexity[0];
}

// Returns true if the run writes its final model for other programs.
static inline int options_exports(const Options* options) {
    return options->output.export_llmc[0] || options->output.export_gguf[0];
}

#endif

#ifdef OPTION_TABLE_ROWS_

#include "llmc/base/limits.h"
#include "llmc/data/packing.h"
#include "llmc/data/token_files.h"
#include "llmc/formats/gguf.h"
#include "llmc/formats/hf_model.h"
#include "llmc/formats/llmc_bin.h"
#include "llmc/setup/launcher.h"
#include "llmc/setup/options_removed.h"
#include "llmc/setup/options_synonyms.h"
#include "llmc/setup/recipes.h"
#include "llmc/ops/attention.h"
#include "llmc/model/model.h"
#include "llmc/optim/optimizer.h"
#include "llmc/layers/q8_weights.h"
#include "llmc/layers/weight.h"

// clang-format off
const OptionRow OPTION_TABLE[] = {
    // group, name, alias, type and field, min, max, flags, default
    //     unit or words, help
    {"data",        "train-data",     "i",  STRING_(data.train),                  0,       0, RUN_ | READS_(DATA) | BASIC_, "",
        "FILES", "training data, a pattern in quotes: token shards (.bin), text (.txt, .jsonl, .parquet, also .gz and "
        ".zst), or a directory of text; A:0.7,B:0.3 mixes sources by weight, web=A:0.7,books=B:0.3 also names them; escape "
        ", : * ? [ = in a name with a backslash; without it: the built-in stories"},
    {"data",        "data-schedule",  "",   STRING_(data.schedule),               0,       0, READS_(ONE), "",
        "FILE", "mixture weights that change during the run, for the sources that --train-data names (web=A,books=B); "
        "the line \"10000 web 3 books 1\" sets them after 10000 updates, \"5B tokens web 1\" after 5 billion tokens; "
        "after \"10000 ramp web 3 books 1\" they move linearly to the weights of the next line; needs --steps"},
    {"data",        "val-data",       "j",  STRING_(data.val),                    0,       0, READS_(DATA) | NEEDS_(VALIDATION), "",
        "FILES", "validation data, in the same forms; web=A,books=B name several sets, each with its own loss; the "
        "first one drives --keep-best and --patience; without it: the last shard, or the last 5 % of the text"},
    {"data",        "tokenizer",      "",   STRING_(data.tokenizer),              0,       0, RUN_ | BOTH_ | READS_(TOKENIZER) | BASIC_, "",
        "FILE", "encodes text and decodes samples: tokenizer.json, merges.txt, .tiktoken, or their directory; "
        "bpe:8192 trains one of 8192 tokens on the text and keeps it in --out; without it: the tokenizer in the "
        "--model directory, or plain bytes; one that extends the model's tokenizer adds tokens to the model"},
    {"data",        "text-field",     "",   STRING_(data.text_field),             0,       0, RUN_ | NEEDS_(FIELDS), "text",
        "NAME", "field of JSON lines, or column of Parquet, that holds the document; a line without it may have \"prompt\" and "
        "\"completion\", or a chat, \"messages\": then only answers are learned"},
    {"data",        "separator",      "",   STRING_(data.separator),              0,       0, RUN_, "",
        "TEXT", "text between two documents of a text file, for example '<|endoftext|>'; without it: one document per file"},
    {"data",        "data-format",    "",   CHOICE_(data.format),                 0,       0, RUN_ | NEEDS_(BIN), "auto",
        WORDS_CHOICE(TOKENS_FORMAT_WORDS), "format of .bin files; auto: llm.c's shards; nanogpt: bare "
        "uint16"},
    {"data",        "pack",           "",   CHOICE_(data.pack),                   0,       0, AUTO_ | RUN_, "auto",
        WORDS_CHOICE(PACKING_WORDS), "how documents become sequences; auto: for prompts and chats bestfit, or pad if positions are "
        "learned, else stream; "
        "stream: cut anywhere; "
        "aligned: a sequence starts with a document; bestfit: whole documents that fit together; pad: one document, "
        "padded to --seq-len; dynamic: padded to the longest of the batch; uniform: the same, in batches of similar "
        "length"},
    {"data",        "doc-mask",       "",   SWITCH_(data.doc_mask),               0,       0, AUTO_ | RUN_ | NEEDS_(SHARED_ROWS), "auto",
        "off|on", "attend only within a document; auto: on for prompts and chats, else off"},
    {"data",        "fim-rate",       "",   FLOAT_(data.fim_rate),                0,       1, RUN_, "0",
        "", "fill in the middle: share of the training documents, or of the parts that fit into a sequence, to "
        "rearrange as prefix, suffix, middle, each after its mark (dev/doc/data.md); 0: none"},
    {"data",        "shuffle",        "",   SWITCH_(data.shuffle),                0,       0, RUN_, "on",
        "off|on", "shuffle the training data; a new order in each epoch"},
    {"data",        "seed",           "",   SEED_(data.seed),                     0,       0, RUN_ | BOTH_, "42",
        "", "seed of the initial weights, the order of the data and the samples"},

    {"model",       "model",          "e",  STRING_(model.path),                  0,       0, RUN_ | BOTH_ | READS_(MODEL) | BASIC_, "",
        "SIZE|PATH", "a size (d12, gpt3:c768, llama:135m, qwen3:0.6b, nanochat:d12; speedrun also sets rates and steps), or weights "
        "to start from: a Hugging Face directory, the --out of a run, a .gguf or an llm.c .bin"},
    {"model",       "weights",        "",   CHOICE_(model.weights),               0,       0, BOTH_, "last",
        WORDS_CHOICE(HF_WEIGHTS_WORDS), "weights to read from --model DIR: the last ones, or the average that "
        "--average kept in model_average.safetensors"},
    {"model",       "arch",           "",   CHOICE_(model.arch),                  0,       0, AUTO_ | RUN_, "auto",
        WORDS_CHOICE(ARCHITECTURES), "architecture: which norms, positions, MLP and biases; auto, here and below: from --model, "
        "else gpt2"},
    {"model",       "layers",         "",   INT_(model.layers),                   1, MODEL_MAX_LAYERS, AUTO_ | RUN_, "auto",
        "blocks", "transformer blocks"},
    {"model",       "channels",       "",   INT_(model.channels),                 1,   65536, AUTO_ | RUN_, "auto",
        "", "width of the residual stream"},
    {"model",       "heads",          "",   INT_(model.heads),                    1,    1024, AUTO_ | RUN_, "auto",
        "", "attention heads; without --head-size they must divide the channels"},
    {"model",       "kv-heads",       "",   INT_(model.kv_heads),                 1,    1024, AUTO_ | RUN_ | FOLLOWS_, "auto",
        "", "heads of keys and values, each shared by a group of attention heads; auto: as many as --heads"},
    {"model",       "head-size",      "",   INT_(model.head_size),                1,   65536, AUTO_ | RUN_ | FOLLOWS_, "auto",
        "channels", "width of a head; auto: channels / heads"},
    {"model",       "hidden",         "",   INT_(model.hidden),                   1,  262144, AUTO_ | RUN_ | FOLLOWS_, "auto",
        "units", "hidden units of the MLP, or of an expert if all layers have experts; auto: 4 x channels; with SwiGLU, which has a second "
        "matrix, 8/3 x channels, divided by --experts-used"},
    {"model",       "experts",        "",   INT_(model.experts),                  1,    1024, AUTO_ | RUN_ | FOLLOWS_, "auto",
        "experts", "for mixtral, qwen3moe, olmoe, glm4moe, gptoss, deepseek3: MLPs in a block; a router picks some of them for each "
        "token; auto: 8; with --model DIR of a dense llama, mistral or qwen3, each expert starts as a copy of its MLP"},
    {"model",       "experts-used",   "",   INT_(model.experts_used),             1,      16, AUTO_ | RUN_ | FOLLOWS_, "auto",
        "experts", "experts that process a token; auto: 2"},
    {"model",       "dense-layers",   "",   INT_(model.dense_layers),             0, MODEL_MAX_LAYERS, AUTO_ | RUN_ | FOLLOWS_, "auto",
        "blocks", "for glm4moe, deepseek3: the first blocks, which have an MLP and no experts; auto: 0"},
    {"model",       "expert-hidden",  "",   INT_(model.expert_hidden),            1,  262144, AUTO_ | RUN_ | FOLLOWS_, "auto",
        "units", "with --dense-layers: hidden units of an expert; auto: 8/3 x channels, divided by --experts-used"},
    {"model",       "shared-hidden",  "",   INT_(model.shared_hidden),            0,  262144, AUTO_ | RUN_ | FOLLOWS_, "auto",
        "units", "for glm4moe, deepseek3: hidden units of one more expert, which processes all tokens; auto: those of the others"},
    {"model",       "context",        "",   INT_(model.context),                  1, 1048576, AUTO_ | RUN_, "auto",
        "tokens", "maximum sequence length of the model"},
    {"model",       "vocab-size",     "",   INT_(model.vocab_size),               1, 10000000, AUTO_ | RUN_, "auto",
        "tokens", "size of the vocabulary"},
    {"model",       "own-head",       "",   SWITCH_(model.own_head),              0,       0, AUTO_ | RUN_ | FOLLOWS_, "auto",
        "off|on", "give the output layer its own matrix instead of the token embedding's; auto: on for nanochat, olmo2, olmo3, phi3, glm4 and gptoss, else off"},
    {"model",       "residual-scales", "",  SWITCH_(model.scales),                0,       0, AUTO_ | RUN_ | FOLLOWS_, "auto",
        "off|on", "for llama, nanochat: each block reads a x + b x0, with trained numbers a and b, of the stream x and the "
        "embedding x0; auto: as the model has it, off for a new one"},
    {"model",       "value-embeddings", "", SWITCH_(model.values),                0,       0, AUTO_ | RUN_ | FOLLOWS_, "auto",
        "off|on", "for llama, nanochat: in every other layer, the values of each token get a row of a table of their own, with "
        "a gate for each head; auto: as the model has it, off for a new one"},
    {"model",       "rope-base",      "",   FLOAT_(model.rope_base),              0,   MANY_, AUTO_ | RUN_ | FOLLOWS_, "auto",
        "", "base of the angles of rotary positions (rope_theta); auto: 10000"},
    {"model",       "window",         "",   INT_(model.window),                   0, 1048576, AUTO_ | RUN_ | FOLLOWS_, "auto",
        "tokens", "for mistral, qwen2, qwen3, olmo3, gemma3, phi3, gptoss: how many tokens a token attends to, itself included; 0 or auto: all"},
    {"model",       "window-pattern", "",   STRING_(model.window_pattern),        0,       0, RUN_, "",
        "LETTERS", "for qwen2, qwen3: S for a layer with the window, L for one without; the letters repeat (SSSL), "
        "and the last layer is always L; without a pattern: the layers that have it in the family, or all"},
    {"model",       "window-schedule", "",  STRING_(model.window_schedule),       0,       0, RUN_, "",
        "STEP:TOKENS,...", "window during training in up to 8 growing stages, as 0:128,1000:256,3000:512; the last one is "
        "--window, at most --context; validations and tasks have the window of the step, samples the last one"},
    {"model",       "layer-types",    "",   STRING_(model.layer_types),           0,       0, RUN_, "",
        "TYPES", "for qwen35 and lfm2: layers with attention (full), and with the delta rule (delta) or a convolution (conv) in its place; "
        "the list repeats (3xdelta,full); without one: the layers of its family"},
    {"model",       "softcap",        "",   FLOAT_(model.softcap),                0,   MANY_, AUTO_ | RUN_ | FOLLOWS_, "auto",
        "", "for nanochat and gemma2: a logit x becomes softcap * tanh(x / softcap); 0: no cap; auto: 15, 30"},
    {"model",       "share-layers",   "",   STRING_(model.share_layers),          0,       0, RUN_, "off",
        "off|all|pairs|loop:K", "layers that share parameters; all: every layer has the same block; pairs: two in a "
        "row share one; loop:K: K blocks, repeated"},
    {"model",       "adapter",        "",   STRING_(model.adapter),               0,       0, RUN_ | BOTH_ | READS_(ADAPTER), "",
        "DIR", "low-rank adapter of --model (LoRA), as PEFT stores it: a directory with adapter_config.json, or the "
        "--out of a run; training continues it, all else uses the model with it; without it: none"},
    {"model",       "lora-rank",      "",   INT_(model.lora_rank),                0, MODEL_MAX_RANK, RUN_, "0",
        "", "train a new low-rank adapter of --model, whose weights stay frozen: the rank of its matrices; 0: none"},
    {"model",       "lora-alpha",     "",   FLOAT_(model.lora_alpha),             0,   MANY_, AUTO_ | RUN_ | NEEDS_(LORA), "auto",
        "", "an adapter's product counts alpha / rank times; auto: 2 rank"},
    {"model",       "lora-targets",   "",   STRING_(model.lora_targets),          0,       0, RUN_ | NEEDS_(LORA), "all",
        "all|attention|mlp|NAMES", "layers that get an adapter: all linear ones of attention and MLP, or names at Hugging "
        "Face, as q_proj,v_proj"},

    {"batch",       "batch",          "b",  INT_(batch.size),                     1, 1048576, AUTO_ | BOTH_ | BASIC_, "auto",
        "sequences", "micro-batch: sequences per forward and backward pass; with --prompts: how many texts are "
        "generated at a time, auto: 8 on a CPU, 32 on a GPU"},
    {"batch",       "seq-len",        "t",  INT_(batch.seq_len),                  1, 1048576, AUTO_ | RUN_ | BOTH_ | BASIC_, "auto",
        "tokens", "length of a training sequence, at most --context"},
    {"batch",       "seq-len-schedule", "", STRING_(batch.seq_len_schedule),      0,       0, RUN_, "",
        "STEP:TOKENS,...", "length of training sequences in up to 8 growing stages, as 0:256,1000:512,3000:1024; the "
        "last one is --seq-len, a multiple of each of the others: earlier stages cut its sequences into shorter ones"},
    {"batch",       "total-batch",    "d",  COUNT_(batch.total),                  1,    1e12, AUTO_ | MINUS_1_ | RUN_ | BASIC_, "auto",
        "tokens", "tokens per step, a multiple of --seq-len; auto: batch x seq-len; a larger one accumulates "
        "gradients"},
    {"batch",       "batch-schedule", "",   STRING_(batch.schedule),              0,       0, RUN_, "",
        "STEP:TOKENS,...", "batch of one update in up to 8 growing stages, as 0:131072,2000:262144; in earlier stages "
        "the learning rate is multiplied by sqrt(batch / last batch); without it: --total-batch"},
    {"batch",       "steps",          "x",  COUNT_(batch.steps),                  0,    1e12, AUTO_ | MINUS_1_ | RUN_ | BASIC_, "auto",
        "updates", "length of the run; auto or -1: one epoch; 0: only validate, sample and save"},
    {"batch",       "epochs",         "",   FLOAT_(batch.epochs),                 0,   MANY_, RUN_, "0",
        "epochs", "length of the run in epochs; 0: use --steps"},

    {"optimizer",   "teacher",        "",   STRING_(teacher.path),                0,       0, RUN_ | READS_(MODEL), "",
        "PATH", "a trained model whose predictions the new one also learns (distillation), of any size and architecture, with the same "
        "tokens: a Hugging Face directory, the --out of a run or an llm.c .bin; without it: none"},
    {"optimizer",   "teacher-quantize", "", CHOICE_(teacher.quantize),            0,       0, RUN_ | NEEDS_(TEACHER), "off",
        WORDS_CHOICE(QUANTIZE_WORDS), "q8_0: the teacher's matrices in 8 bits"},
    {"optimizer",   "distill-weight", "",   FLOAT_(teacher.weight),               0,       1, RUN_ | NEEDS_(TEACHER), "0.5",
        "", "weight of the teacher in the training loss; the rest is the loss on the text itself"},
    {"optimizer",   "distill-temperature", "", FLOAT_(teacher.temperature),       0,    1000, ABOVE_ | RUN_ | NEEDS_(TEACHER), "1",
        "", "divides the logits of both models before their predictions are compared; above 1: unlikely tokens count more"},

    {"optimizer",   "freeze",         "",   STRING_(optimizer.freeze),            0,       0, RUN_, "",
        "LIST", "parameters that training leaves unchanged: names such as wte, '*b', ln1? or Hugging Face's "
        "h.0.attn.c_attn, or embeddings, blocks, attention, mlp, norms; [2] or [0-5] after a name: only in these "
        "blocks; without it: none"},
    {"optimizer",   "optimizer",      "",   CHOICE_(optimizer.name),              0,       0, RUN_, "adamw",
        WORDS_CHOICE(OPTIMIZER_WORDS), "update rule: adamw; adamw8bit: its state in 8 bits; adafactor: hardly any "
        "state; muon, soap: for matrices, with adamw for the rest; lion: half the state; sgd: the gradient itself; "
        "dev/doc/optimizers.md compares them"},
    {"optimizer",   "lr",             "l",  FLOAT_(optimizer.lr),                 0,      10, AUTO_ | ABOVE_ | RUN_ | BASIC_, "auto",
        "", "peak learning rate; auto: 6e-4 x 768 / channels at 524288 tokens per step, lower with fewer tokens, "
        "higher in a short run (dev/doc/training.md); a tenth of a long run's rate when training starts from the "
        "weights of --model; sgd: 400 times as high; --find-lr tries rates"},
    {"optimizer",   "find-lr",        "",   FLAG_(optimizer.find_lr),             0,       0, ONCE_, "off",
        "off|on", "raise the learning rate for up to 150 steps, print and draw the loss at each rate, suggest a value "
        "for --lr, and exit; with --out also write find_lr.svg"},
    {"optimizer",   "warmup",         "u",  INT_(optimizer.warmup),               0,   MANY_, AUTO_ | RUN_, "auto",
        "steps", "steps over which the learning rate rises to its peak"},
    {"optimizer",   "final-lr-frac",  "q",  FLOAT_(optimizer.final_lr_frac),      0,       1, RUN_ | NEEDS_(DECAYING), "0",
        "", "final learning rate, as a fraction of the peak"},
    {"optimizer",   "schedule",       "k",  CHOICE_(optimizer.schedule),          0,       0, RUN_, "cosine",
        WORDS_CHOICE(SCHEDULE_WORDS), "shape of the learning rate after warmup"},
    {"optimizer",   "decay-steps",    "",   COUNT_(optimizer.decay_steps),        0,    1e12, AUTO_ | RUN_ | NEEDS_(WSD), "auto",
        "steps", "for wsd: number of steps at the end in which the rate falls; 0: it never falls; auto: a fifth of "
        "--steps"},
    {"optimizer",   "decay-shape",    "",   CHOICE_(optimizer.decay_shape),       0,       0, RUN_ | NEEDS_(WSD), "sqrt",
        WORDS_CHOICE(DECAY_WORDS), "for wsd: the rate falls as 1 - sqrt(t), or 1 - t with linear, for t from 0 to 1"},
    {"optimizer",   "weight-decay",   "c",  FLOAT_(optimizer.weight_decay),       0,      10, AUTO_ | RUN_, "auto",
        "", "decoupled weight decay, on matrices only; auto: 0.1; sgd: 0"},
    {"optimizer",   "cautious-decay", "",   SWITCH_(optimizer.cautious_decay),    0,       0, RUN_ | NEEDS_(DECAY), "off",
        "off|on", "for adamw, adamw8bit, muon, soap, lion, sgd: decay only weights that the update moves toward zero"},
    {"optimizer",   "dropout",        "",   FLOAT_(optimizer.dropout),            0,       1, BELOW_ | RUN_, "0",
        "", "probability with which training sets elements to 0, of the embeddings and of what each attention and MLP "
        "adds to the stream; 0.1 to 0.3 helps where a small text is read many times"},
    {"optimizer",   "attention-dropout", "", FLOAT_(optimizer.attention_dropout), 0,       1, CPU_ | BELOW_ | RUN_, "0",
        "", "the same for the weights of attention, which is computed in fp32 then"},
    {"optimizer",   "beta1",          "",   FLOAT_(optimizer.beta1),              0,       1, BELOW_ | RUN_ | NEEDS_(MEAN), "0.9",
        "", "decay of the running mean of the gradient"},
    {"optimizer",   "beta2",          "",   FLOAT_(optimizer.beta2),              0,       1, AUTO_ | BELOW_ | RUN_ | NEEDS_(MEAN), "auto",
        "", "decay of the running mean of the squared gradient; auto: 0.95 per 524288 tokens, at most 0.999 per step; "
        "lion: 0.99"},
    {"optimizer",   "eps",            "",   FLOAT_(optimizer.eps),                0,       1, ABOVE_ | RUN_ | NEEDS_(SQUARES), "1e-08",
        "", "added to the square root of the mean of squares, which divides the update"},
    {"optimizer",   "embedding-lr-scale", "", FLOAT_(optimizer.embedding_lr_scale), 0, MANY_, RUN_, "1",
        "", "factor of --lr for embeddings; without --own-head the token embedding is also the output layer"},
    {"optimizer",   "vector-lr-scale", "",  FLOAT_(optimizer.vector_lr_scale),    0,   MANY_, RUN_, "1",
        "", "factor of --lr for biases and norms"},
    {"optimizer",   "z-loss",         "",   FLOAT_(optimizer.z_loss),             0,       1, RUN_, "0",
        "", "weight of a loss that keeps logits small: the square of their log-sum-exp; 1e-4 is usual"},
    {"optimizer",   "router-balance", "",   FLOAT_(optimizer.router_balance),     0,       1, RUN_ | NEEDS_(EXPERTS), "0.01",
        "", "with experts: weight of the load-balancing loss, lowest when all experts of a block get equally many "
        "tokens"},
    {"optimizer",   "router-z",       "",   FLOAT_(optimizer.router_z),           0,       1, RUN_ | NEEDS_(EXPERTS), "0.001",
        "", "with experts: like --z-loss, for the router's logits"},
    {"optimizer",   "router-bias-rate", "", FLOAT_(optimizer.router_bias_rate),   0,       1, RUN_ | NEEDS_(BIASES), "0",
        "", "for routers with biases (glm4moe, deepseek3): after each update, how far the bias of an expert's scores moves up if fewer tokens took "
        "it than on average, else down; balances without a loss; DeepSeek V3 has 0.001"},
    {"optimizer",   "sgd-momentum",   "",   FLOAT_(optimizer.sgd_momentum),       0,       1, BELOW_ | RUN_ | NEEDS_(SGD), "0.9",
        "", "for sgd: fraction of the last update that is added to the next; 0: no state at all"},
    {"optimizer",   "adafactor-beta1", "",  FLOAT_(optimizer.adafactor_beta1),    0,       1, BELOW_ | RUN_ | NEEDS_(ADAFACTOR), "0",
        "", "for adafactor: decay of a running mean of updates; 0: no mean, and no memory for it"},
    {"optimizer",   "mup",            "",   STRING_(optimizer.mup),               0,       0, RUN_, "",
        "CHANNELS:LAYERS", "train at the learning rate of a small model of this size, as 256:4 (muP and CompleteP): "
        "sets the initial values, rate, decay and eps of each parameter"},
    {"optimizer",   "adafactor-scale", "",  SWITCH_(optimizer.adafactor_scale),   0,       0, RUN_ | NEEDS_(ADAFACTOR), "off",
        "off|on", "for adafactor: make updates proportional to the RMS of the parameter, with a rate of at most 1 / "
        "sqrt(step)"},
    {"optimizer",   "matrix-lr",      "",   FLOAT_(optimizer.matrix_lr),          0,      10, ABOVE_ | RUN_ | NEEDS_(MUON), "0.02",
        "", "for muon: peak learning rate of the blocks' matrices; everything else uses --lr"},
    {"optimizer",   "matrix-weight-decay", "", FLOAT_(optimizer.matrix_weight_decay), 0,  10, RUN_ | NEEDS_(MUON), "0.05",
        "", "for muon: weight decay of the blocks' matrices"},
    {"optimizer",   "muon-scale",     "",   CHOICE_(optimizer.muon_scale),        0,       0, RUN_ | NEEDS_(MUON), "spectral",
        WORDS_CHOICE(MUON_SCALE_WORDS), "for muon: how an update is scaled; spectral: by the shape of the matrix; "
        "rms: to the size of AdamW's updates, for which AdamW's --lr and --weight-decay are right"},
    {"optimizer",   "muon-polynomial", "",  CHOICE_(optimizer.muon_polynomial),   0,       0, RUN_ | NEEDS_(MUON), "jordan",
        WORDS_CHOICE(MUON_POLYNOMIAL_WORDS), "for muon: coefficients of the five steps that bring the singular values of an update "
        "to 1; jordan: the same in each step, for values of 0.7 to 1.2; polar-express: the best ones for each step"},
    {"optimizer",   "muon-momentum",  "",   CHOICE_(optimizer.muon_momentum),     0,       0, RUN_ | NEEDS_(MUON), "fp32",
        WORDS_CHOICE(MUON_MOMENTUM_WORDS), "for muon: momentum of the blocks' matrices; 8bit: as in adamw8bit, a quarter of the "
        "memory"},
    {"optimizer",   "muon-rows",      "",   SWITCH_(optimizer.muon_rows),         0,       0, RUN_ | NEEDS_(MUON), "off",
        "off|on", "for muon: normalize each row of an update by the running mean of its squares (NorMuon)"},
    {"optimizer",   "qk-clip",        "",   FLOAT_(optimizer.qk_clip),            0,   MANY_, RUN_, "0",
        "", "after an update, scale the queries and keys of each head whose largest attention score was above this (QK clip "
        "of MuonClip, which has 100); 0: off"},
    {"optimizer",   "soap-every",     "",   INT_(optimizer.soap_every),           1,   MANY_, RUN_ | NEEDS_(SOAP), "10",
        "updates", "for soap: updates between two changes of the eigenbases"},
    {"optimizer",   "soap-max-side",  "",   INT_(optimizer.soap_max_side),        0,   65536, RUN_ | NEEDS_(SOAP), "4096",
        "", "for soap: longest side of a matrix that gets an eigenbasis; 0: none does"},
    {"optimizer",   "average",        "",   STRING_(optimizer.average),           0,       0, 0, "off",
        "off|ema:D", "also keep an average of the weights; ema:0.999: each update counts 0.999 times as much as the "
        "next one; validations also show the loss of the average, and checkpoints contain it (--weights)"},
    {"optimizer",   "grad-clip",      "",   FLOAT_(optimizer.grad_clip),          0,   MANY_, RUN_, "1",
        "", "maximum norm of the whole gradient; 0: no clipping"},
    {"optimizer",   "skip-loss-z",    "sl", FLOAT_(optimizer.skip_loss_z),        0,   MANY_, RUN_, "0",
        "sigma", "skip updates whose loss is this many standard deviations above its recent mean; 0: never"},
    {"optimizer",   "skip-grad-z",    "sg", FLOAT_(optimizer.skip_grad_z),        0,   MANY_, RUN_, "0",
        "sigma", "the same for the gradient norm; 0: never"},
    {"optimizer",   "max-skips",      "",   INT_(optimizer.max_skips),            1, 1000000, NEEDS_(SKIPS), "10",
        "updates", "count the run as diverged after this many steps in a row with a NaN or an infinity"},
    {"optimizer",   "max-loss-rise",  "",   FLOAT_(optimizer.max_loss_rise),      0,   MANY_, 0, "0",
        "nats", "count the run as diverged when the mean loss of 128 steps is this far above its minimum; 0: never"},
    {"optimizer",   "on-divergence",  "",   CHOICE_(optimizer.on_divergence),     0,       0, 0, "skip",
        WORDS_CHOICE(DIVERGENCE_WORDS), "skip: skip updates with a NaN, stop when the run has diverged; stop: stop at "
        "a NaN; rollback: when diverged, restore a checkpoint and skip the data after it"},

    {"evaluation",  "eval-every",     "v",  INT_(eval.every),                     0,   MANY_, AUTO_, "auto",
        "steps", "steps between validations; 0: never; auto: a tenth of the run, at most 1000, or more if validations would take more than "
        "a tenth of the work"},
    {"evaluation",  "eval-batches",   "m",  INT_(eval.batches),                   0,   MANY_, AUTO_ | NEEDS_(VALIDATION), "auto",
        "micro-batches", "micro-batches per validation; 0: the whole validation set; auto: its first 20,480 tokens "
        "(on a GPU 1,048,576) for any --batch; fewer in a short run with --eval-every auto"},
    {"evaluation",  "patience",       "",   INT_(eval.patience),                  0,   MANY_, NEEDS_(NEW_BEST), "0",
        "validations", "end the run early, as if at its last step, after this many validations in a row without a new "
        "best; 0: never"},
    {"evaluation",  "sample-every",   "s",  INT_(samples.every),                  0,   MANY_, AUTO_ | NEEDS_(SAMPLING), "auto",
        "steps", "steps between samples; 0: never; auto: only at the end"},
    {"evaluation",  "sample-tokens",  "g",  INT_(samples.tokens),                 1,   MANY_, AUTO_ | NEEDS_(SAMPLES), "auto",
        "tokens", "length of a sample; auto: --seq-len, at most 256"},
    {"evaluation",  "samples",        "",   INT_(samples.count),                  0,     100, 0, "2",
        "texts", "number of samples each time"},
    {"evaluation",  "prompt",         "",   STRING_(samples.prompt),              0,       0, BOTH_ | NEEDS_(SAMPLES) | BASIC_ | WORK_, "",
        "TEXT", "start of the samples; with --model PATH and without --train-data, --steps or --out: generate a continuation"},
    {"evaluation",  "temperature",    "",   FLOAT_(samples.temperature),          0,     100, BOTH_ | NEEDS_(SAMPLES), "1",
        "", "sampling temperature; 0: always the most likely token"},
    {"evaluation",  "top-k",          "",   INT_(samples.top_k),                  0,   MANY_, BOTH_ | NEEDS_(SAMPLES), "0",
        "tokens", "sample from the k most likely tokens; 0: from all"},
    {"evaluation",  "top-p",          "",   FLOAT_(samples.top_p),                0,       1, ABOVE_ | BOTH_ | NEEDS_(SAMPLES), "1",
        "", "sample from the most likely tokens whose probabilities add up to this"},
    {"evaluation",  "start-token",    "",   SWITCH_(samples.start_token),         0,       0, BOTH_, "on",
        "off|on", "put the end-of-text token, which starts every document, before prompts and before the text of "
        "--perplexity; --export-gguf tells llama.cpp to do the same"},

    {"tasks",       "tasks",          "",   STRING_(tasks.files),                 0,       0, READS_(PATTERNS) | WORK_, "",
        "FILES", "multiple-choice and continuation tasks to evaluate the model on: JSON lines of HellaSwag or DCLM; "
        "with --steps 0 the program only evaluates, and needs no training data"},
    {"tasks",       "hellaswag",      "h",  SWITCH_(tasks.hellaswag),             0,       0, READS_(PATTERNS) | WORK_, "off",
        "off|on", "--tasks " TASKS_HELLASWAG " (scripts/get_data.sh hellaswag)"},
    {"tasks",       "perplexity",     "",   STRING_(tasks.perplexity),            0,       0, READS_(DATA) | WORK_, "",
        "FILES", "text or shards on which to measure loss, perplexity and bits per byte, over all tokens"},
    {"tasks",       "stride",         "",   INT_(tasks.stride),                   1, 1048576, AUTO_ | NEEDS_(PERPLEXITY), "auto",
        "tokens", "tokens scored per --perplexity window; the rest of --seq-len is context; auto: all of them"},
    {"tasks",       "tasks-every",    "",   INT_(tasks.every),                    0,   MANY_, AUTO_ | NEEDS_(EVERY_TASKS), "auto",
        "steps", "steps between these evaluations; 0: never; auto: only at the end"},
    {"tasks",       "tasks-max",      "",   INT_(tasks.max),                      0,   MANY_, NEEDS_(TASKS), "0",
        "examples", "evaluate only the first n examples of each file; 0: all"},
    {"tasks",       "out-scores",     "",   STRING_(tasks.out_scores),            0,       0, ONCE_ | WRITES_(ONE) | NEEDS_(TASKS) | WORK_, "",
        "FILE", "write a line of JSON for each example of the last evaluation: the model's choice, and the loss of each ending"},

    {"texts",       "interactive",    "",   FLAG_(texts.interactive),             0,       0, TEXTS_ | ONCE_ | BASIC_, "off",
        "off|on", "read prompts from the terminal, one per line, and continue each; end with Ctrl-D"},
    {"texts",       "chat",           "",   CHOICE_(texts.chat),                  0,       0, AUTO_ | RUN_ | BOTH_ | NEEDS_(CHATS), "auto",
        WORDS_CHOICE(CHAT_WORDS), "with --interactive: hold a conversation; each line is a message, and answers are "
        "kept as context; auto: on for a model that has learned chats (chat_template.jinja); a format such as chatml "
        "replaces that of the model, also for training on chats"},
    {"texts",       "chat-date",      "",   STRING_(texts.chat_date),             0,       0, RUN_ | BOTH_ | NEEDS_(CHATS), "",
        "YYYY-MM-DD", "date in chats, if the model's chat_template prints today's; empty: today, which a run that learns "
        "chats keeps"},
    {"texts",       "system",         "",   STRING_(texts.system),                0,       0, TEXTS_ | ONCE_, "",
        "TEXT", "first message of a chat, which says how to answer"},
    {"texts",       "suffix",         "",   STRING_(texts.suffix),                0,       0, TEXTS_ | ONCE_, "",
        "TEXT", "fill in the middle: generate the text between --prompt and this, by a model that was trained with --fim-rate"},
    {"texts",       "prompts",        "",   STRING_(texts.prompts),               0,       0, TEXTS_ | ONCE_ | READS_(ONE), "",
        "FILE.jsonl", "read prompts from a file of JSON lines: {\"prompt\": \"...\"}"},
    {"texts",       "out-texts",      "",   STRING_(texts.out),                   0,       0, TEXTS_ | ONCE_ | WRITES_(ONE), "",
        "FILE", "write the texts of --prompts to this file, as JSON lines with prompt, text, tokens and stop"},
    {"texts",       "tokens",         "",   INT_(texts.tokens),                   1,   MANY_, TEXTS_ | ONCE_, "256",
        "tokens", "maximum length of a generated text; it ends earlier with its document"},
    {"texts",       "stop",           "",   LIST_(texts.stop),                    0,       0, TEXTS_ | ONCE_, "",
        "TEXT", "end a text before this string; may be given several times; --stop-run stops a run"},
    {"texts",       "quantize",       "",   CHOICE_(texts.quantize),              0,       0, RUN_ | BOTH_, "off",
        WORDS_CHOICE(QUANTIZE_WORDS), "q8_0: the model's matrices in 8 bits, as in GGUF; for generating text, for tasks with "
        "--steps 0, and for training an adapter"},

    {"output",      "out",            "o",  STRING_(output.dir),                  0,       0, ONCE_ | EACH_ | READS_(RUNS) | WRITES_(RUNS) | BASIC_, "",
        "DIR", "directory for logs, checkpoints and the loss curve (curve.svg); without it: no files"},
    {"output",      "save-every",     "n",  INT_(output.save_every),              0,   MANY_, AUTO_ | NEEDS_(SAVES), "auto",
        "steps", "steps between checkpoints, besides the last step; auto: every --save-minutes if --out is given; 0: "
        "no checkpoints"},
    {"output",      "save-minutes",   "",   FLOAT_(output.save_minutes),          0,   MANY_, NEEDS_(TIMED_SAVES), "15",
        "minutes", "minutes between the checkpoints of --save-every auto; 0: only the last step"},
    {"output",      "keep",           "nk", INT_(output.keep),                    0,   MANY_, AUTO_ | NEEDS_(OUT), "auto",
        "checkpoints", "keep only the n newest checkpoints of the run; 0: all; auto: the 2 newest of those saved by "
        "--save-minutes or because the run was stopped, and all others"},
    {"output",      "keep-major",     "nm", INT_(output.keep_major),              0,   MANY_, NEEDS_(OUT), "0",
        "steps", "never delete checkpoints at multiples of this; 0: no exception"},
    {"output",      "keep-best",      "",   SWITCH_(output.keep_best),            0,       0, NEEDS_(DIRECTORY), "off",
        "off|on", "save at each validation that is the best so far, and never delete the best checkpoint, whatever "
        "--keep says"},
    {"output",      "model-file-gb",  "",   FLOAT_(output.model_file_gb),         0,   MANY_, ABOVE_ | NEEDS_(OUT), "5",
        "GB", "largest file of weights in a checkpoint; a larger model is split into several, with Hugging Face's index"},
    {"output",      "resume",         "y",  STRING_(output.resume),               0,       0, ONCE_ | READS_(MODEL) | BASIC_ | WORK_, "off",
        "off|on|auto|STEP|DIR", "on: continue from the newest valid checkpoint in --out; auto: the same, or a new run "
        "if none exists; STEP, DIR: continue from this checkpoint"},
    {"output",      "override",       "",   FLAG_(output.override),               0,       0, ONCE_ | NEEDS_(RESUME), "off",
        "off|on", "resume even if options that define the run have changed"},
    {"output",      "max-hours",      "",   FLOAT_(output.max_hours),             0,   MANY_, ONCE_ | NEEDS_(DIRECTORY), "0",
        "hours", "save and stop before this time is up; 0: no limit"},
    {"output",      "export-llmc",    "",   STRING_(output.export_llmc),          0,       0, ONCE_ | WRITES_(ONE) | WORK_, "",
        "FILE.bin", "write the final model in llm.c's format; with --model, --steps 0 and "
        "no --out the program only converts, and needs no data"},
    {"output",      "export-dtype",   "",   CHOICE_(output.export_dtype),         0,       0, ONCE_ | NEEDS_(EXPORT_LLMC), "fp32",
        WORDS_CHOICE(MODEL_DTYPE_WORDS), "precision of the weights in the file of --export-llmc"},
    {"output",      "export-gguf",    "",   STRING_(output.export_gguf),          0,       0, ONCE_ | WRITES_(ONE) | BASIC_ | WORK_, "",
        "FILE", "write the final model for llama.cpp (GGUF); with --model, --steps 0 and no --out the program only "
        "converts"},
    {"output",      "export-gguf-dtype", "", CHOICE_(output.export_gguf_dtype),   0,       0, ONCE_ | NEEDS_(EXPORT_GGUF), "f16",
        WORDS_CHOICE(GGUF_DTYPE_WORDS), "precision of the matrices in the file of --export-gguf"},
    {"output",      "tensorboard",    "",   SWITCH_(output.tensorboard),          0,       0, NEEDS_(DIRECTORY), "off",
        "off|on", "also log for TensorBoard, in the directory tensorboard in --out"},
    {"output",      "log-every",      "",   INT_(output.log_every),               1,   MANY_, AUTO_, "auto",
        "steps", "print every n-th step on the screen and in main.log; auto: every step in main.log; on the screen "
        "about a hundred, one more after 30 seconds of silence, and on a terminal always the latest; log.jsonl has "
        "every step"},
    {"output",      "quiet",          "",   SWITCH_(output.quiet),                0,       0, ONCE_, "off",
        "off|on", "print only errors, warnings, the results of tasks and the summary"},
    {"output",      "overfit",        "a",  SWITCH_(output.overfit),              0,       0, RUN_, "off",
        "off|on", "train on the first batch only, so that the loss falls towards 0"},

    {"memory, speed", "recompute",    "r",  CHOICE_(memory.recompute),            0,       0, AUTO_, "auto",
        WORDS_CHOICE(RECOMPUTE_WORDS), "activations to recompute instead of storing: 0 none, 1 the MLP's activation "
        "function, 2 also the norms, mlp also the matmul before the activation function, 3 whole blocks; auto: 1 on a "
        "CPU, the lowest that fits into memory on a GPU"},
    {"memory, speed", "fit",          "",   FLOAT_(memory.fit),                   0,   MANY_, AUTO_ | ONCE_, "0",
        "GiB", "fit into this much memory with the fastest choice of --batch (or a divisor of it), --recompute and, "
        "on a GPU, --offload-optimizer host; updates are identical up to rounding; auto: all free memory; 0: off"},
    {"memory, speed", "threads",      "",   INT_(memory.threads),                 0, LIMITS_MAX_THREADS, CPU_ | ONCE_ | BOTH_ | EACH_, "0",
        "threads", "CPU threads of a process; 0: OMP_NUM_THREADS, or else its share of this job's cores"},
    {"memory, speed", "matmul",       "",   CHOICE_(memory.matmul),               0,       0, RUN_ | BOTH_, "fp32",
        WORDS_CHOICE(MATMUL_WORDS), "precision of the inputs of matmuls and attention; bf16: rounded to bf16, with "
        "sums and everything else in fp32; fp8: in training, the matmuls of qkv and the MLP are rounded to E4M3 with "
        "a scale per row, except for the gradients of weights; auto: bf16 if this machine has fast instructions for "
        "it; on a GPU only fp8 has an effect, with compute capability 9.0: else it multiplies in the type that its "
        "trainer was built for"},
    {"memory, speed", "logits-chunk", "",   INT_(memory.logits_chunk),            1,   MANY_, AUTO_ | GPU_, "auto",
        "tokens", "tokens whose logits are in memory at a time; auto: a micro-batch, or the largest part of it that fits"},
    {"memory, speed", "offload-optimizer", "", CHOICE_(memory.offload_optimizer), 0,       0, GPU_, "off",
        WORDS_CHOICE(OFFLOAD_WORDS), "keep master weights, m and v in pinned host memory, or on a disk; results have "
        "the same bits"},
    {"memory, speed", "offload-path", "",   STRING_(memory.offload_path),         0,       0, GPU_ | READS_(SCRATCH) | WRITES_(SCRATCH) | NEEDS_(DISK), "",
        "DIR", "directory on a fast drive, for --offload-optimizer disk; its files disappear when the run ends"},
    {"memory, speed", "offload-residuals", "", SWITCH_(memory.offload_residuals), 0,       0, GPU_, "off",
        "off|on", "with --recompute 3: keep the residual stream between blocks in pinned host memory; results have "
        "the same bits"},
    {"memory, speed", "offload-params", "", SWITCH_(memory.offload_params),       0,       0, GPU_, "off",
        "off|on", "with --zero 3: keep this rank's part of parameters and gradients in pinned host memory; results "
        "have the same bits"},
    {"memory, speed", "update-in-backward", "", SWITCH_(memory.update_in_backward), 0,     0, RUN_, "off",
        "off|on", "update each block as soon as its gradient is ready, then discard the gradient: memory for the "
        "gradients of two blocks instead of all; a step is then one micro-batch, and is clipped block by block "
        "(dev/doc/memory.md)"},
    {"memory, speed", "gradients",    "",   CHOICE_(memory.gradients),            0,       0, GPU_ | RUN_, "model",
        "model|fp32", "dtype of the gradients: the weights' dtype, or fp32"},
    {"memory, speed", "master-weights", "w", CHOICE_(memory.master_weights),      0,       0, GPU_ | RUN_, "on",
        WORDS_CHOICE(MASTER_WEIGHTS_WORDS), "keep an fp32 copy of 16-bit weights for the optimizer; 24: 8 more bits "
        "for each bf16 weight; off: neither, updates are rounded stochastically"},
    {"memory, speed", "tf32",         "f",  SWITCH_(memory.tf32),                 0,       0, GPU_ | RUN_ | BOTH_ | NEEDS_(FP32), "on",
        "off|on", "compute fp32 matmuls on TF32 tensor cores, with 10-bit mantissas"},
    {"memory, speed", "attention",    "",   CHOICE_(memory.attention),            0,       0, GPU_ | RUN_ | BOTH_, "auto",
        WORDS_CHOICE(ATTENTION_WORDS), "kernels of attention; wgmma: for 16-bit types on GPUs of compute capability "
        "9.0, not yet tried on one; race: whichever --autotune finds faster; auto: mma, or cuDNN where it was built "
        "in"},
    {"memory, speed", "gelu-fusion",  "ge", INT_(memory.gelu_fusion),             0,       2, AUTO_ | GPU_ | BOTH_ | NEEDS_(GELU), "auto",
        "", "fuse GELU into matmuls: 0 no, 1 forward, 2 forward and backward; auto: whichever --autotune finds faster, without "
        "it 2 on cards of compute capability 9 and 10, else 0"},
    {"memory, speed", "autotune",     "",   SWITCH_(memory.autotune),             0,       0, GPU_, "on",
        "off|on", "time cuBLASLt's algorithms once per matmul shape, and keep the fastest; off in a pipeline"},
    {"memory, speed", "graph",        "",   SWITCH_(memory.graph),                0,       0, AUTO_ | GPU_ | BOTH_, "auto",
        "off|on", "replay a micro-step as one CUDA graph; off with --update-in-backward; auto: on, except in a "
        "pipeline, with replicas of a model (--shard-ranks), and where both layers and micro-batches are divided: no "
        "GPU has tried these"},
    {"memory, speed", "device",       "",   INT_(memory.device),                  0,    1023, AUTO_ | GPU_ | ONCE_ | BOTH_ | EACH_, "auto",
        "", "index of the GPU; auto: one for each process of a machine"},
    {"memory, speed", "gpu-report",   "lg", INT_(memory.gpu_report),              0,   MANY_, GPU_ | ONCE_ | EACH_, "0",
        "steps", "steps between lines about the GPU's temperature, power, clocks and memory; 0: none"},

    {"processes",   "num-processes",  "pn", INT_(ranks.processes),                1, 1048576, AUTO_ | ONCE_, "auto",
        "", "how many processes share the run; auto, here and below: from mpirun, srun or torchrun, else one"},
    {"processes",   "rank",           "pr", INT_(ranks.rank),                     0, 1048575, AUTO_ | ONCE_ | EACH_, "auto",
        "", "number of this process, from 0"},
    {"processes",   "gpus-per-node",  "pg", INT_(ranks.per_node),                 1,    1024, AUTO_ | ONCE_, "auto",
        "processes", "processes on each machine"},
    {"processes",   "init",           "pi", CHOICE_(ranks.init),                  0,       0, ONCE_ | EACH_, "auto",
        WORDS_CHOICE(LAUNCHER_INIT_WORDS), "how processes find each other; auto: as the launcher provides (dev/doc/processes.md); tcp and fs are for GPUs"},
    {"processes",   "server",         "ps", STRING_(ranks.server),                0,       0, ONCE_ | EACH_, "",
        "HOST[:PORT]", "address of rank 0, for --init tcp; the port is 29500 unless it is given"},
    {"processes",   "fs-path",        "pf", STRING_(ranks.fs_path),               0,       0, ONCE_ | EACH_ | READS_(SCRATCH) | WRITES_(SCRATCH), "",
        "DIR", "directory on a file system that all machines share, for --init fs; without it: --out"},
    {"processes",   "tensor-parallel", "tp", INT_(ranks.tensor),                  1,    1024, ONCE_ | BOTH_, "1",
        "processes", "processes that divide the matrices of each layer among themselves; best on one machine"},
    {"processes",   "context-parallel", "cp", INT_(ranks.context),                1,    1024, ONCE_, "1",
        "processes", "processes that divide the tokens of each sequence"},
    {"processes",   "expert-parallel", "ep", INT_(ranks.experts),                 1,    1024, ONCE_, "1",
        "processes", "processes that divide the experts of each layer among themselves: neighbors in the "
        "data-parallel group"},
    {"processes",   "pipeline-parallel", "pp", INT_(ranks.pipeline),              1,    1000, ONCE_, "1",
        "stages", "stages that divide the layers among themselves"},
    {"processes",   "pipeline-layers", "",  STRING_(ranks.pipeline_layers),       0,       0, ONCE_ | NEEDS_(STAGES), "",
        "LIST", "layers of each stage, as 9,9,8,6; without it: a division whose slowest stage is as fast as possible"},
    {"processes",   "zero",           "z",  INT_(ranks.zero),                     0,       3, AUTO_ | ONCE_, "auto",
        "", "what processes divide among themselves: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also "
        "parameters (GPUs only); auto: 2 for several processes, 1 with --pipeline-parallel"},
    {"processes",   "shard-ranks",    "",   INT_(ranks.shards),                   1, 1048576, AUTO_ | GPU_ | ONCE_, "auto",
        "processes", "processes that share one copy of what --zero divides; auto: those of a machine, or all if "
        "machines have unequal numbers of them"},
    {"processes",   "node-gbps",      "",   FLOAT_(ranks.node_gbps),              0,   MANY_, AUTO_ | ABOVE_ | ONCE_ | NEEDS_(PLANNING), "auto",
        "GB/s", "for --plan and --fit: bandwidth within a machine, sending and receiving this much at the same time; "
        "auto: 300 on GPUs (NVLink 4), 10 on CPUs; dev/bench/multi_gpu.sh measures both bandwidths"},
    {"processes",   "net-gbps",       "",   FLOAT_(ranks.net_gbps),               0,   MANY_, AUTO_ | ABOVE_ | ONCE_ | NEEDS_(PLANNING), "auto",
        "GB/s", "the same between machines; auto: 42 on GPUs (a card of 400 Gb/s for each), 2.5 on CPUs (25 Gb/s)"},
    {"processes",   "timeout",        "",   INT_(ranks.timeout),                  1,   MANY_, ONCE_ | EACH_, "50",
        "seconds", "abort a multi-process run after this long without progress; at least 5 times the longest step"},

    {"reports",     "report",         "",   STRING_(reports.report),              0,       0, ONCE_ | READS_(RUNS), "",
        "RUNS", "write a page of plots about runs, finished or not, and exit; give their directories or logs, "
        "separated by commas"},
    {"reports",     "out-html",       "",   STRING_(reports.out_html),            0,       0, ONCE_ | WRITES_(ONE), "",
        "FILE", "file for the page of --report; without it: report.html in the first run's directory"},
    {"reports",     "compare",        "",   STRING_(reports.compare),             0,       0, ONCE_ | READS_(RUNS), "",
        "RUNS", "print the results of runs side by side, and exit"},
    {"reports",     "follow",         "",   STRING_(reports.follow),              0,       0, ONCE_ | READS_(RUNS), "",
        "DIR", "show the run with this --out: loss curve, last step and sample, until you press q; not on a terminal: "
        "a line for each event, until the run ends"},
    {"reports",     "stop-run",       "",   STRING_(reports.stop_run),            0,       0, ONCE_ | READS_(RUNS) | WRITES_(RUNS), "",
        "DIR", "ask the run with this --out to save and end, wait until it has, and exit; also works from another "
        "machine that shares the directory"},

    {"other",       "config",         "",   STRING_(config),                      0,       0, ONCE_ | BOTH_ | READS_(ONE) | EACH_ | LINE_, "",
        "FILE", "read more options from a file of lines `name = value`, as --print-config prints them; # starts a "
        "comment; the command line wins"},
    {"other",       "plan",           "",   FLAG_(plan),                          0,       0, ONCE_ | BASIC_ | WORK_, "off",
        "off|on|map", "estimate memory, speed and time, and exit; --plan map: also print where each element of each tensor is"},
    {"other",       "plan-gpu",       "",   STRING_(plan_gpu),                    0,       0, GPU_ | ONCE_, "",
        "NAME", "with --plan: plan for this card, for example H200 or 'RTX 4090': its published speed and memory; without it: this "
        "machine's GPU, or else an H100"},
    {"other",       "print-config",   "",   FLAG_(print_config),                  0,       0, ONCE_ | WORK_, "off",
        "off|on", "print every option with its value, as a file for --config, and exit"},
    {"other",       "help",           "",   STRING_(help),                        0,       0, ONCE_ | BOTH_ | LINE_, "",
        "[GROUP|OPTION]", "print this help, or the part about a group or an option, and exit; basic: the options that most runs need"},
    {"other",       "version",        "",   FLAG_(version),                       0,       0, ONCE_ | BOTH_ | LINE_, "off",
        "off|on", "print the version, and exit"},
};
// clang-format on

#define OPTION_SYNONYMS OPTION_TRAINER_SYNONYMS
#define OPTION_REMOVED OPTION_TRAINER_REMOVED

#define OPTION_BASICS ", --help basic what most runs need"
#define OPTION_EXAMPLES                                                                                      \
    "\nWithout options it trains a small model on built-in stories. To start with:\n"                        \
    "  --train-data 'books/*.txt' --tokenizer bpe:4096 --out out/books     your own text\n"                  \
    "  --train-data 'books/*.txt' --steps 2000 --find-lr                   try learning rates first\n"       \
    "  --out out/books --resume on                                         continue after an interruption\n" \
    "  --out out/books --resume on --steps 9000                            train for longer\n"               \
    "  --model out/books --prompt 'It was'                                 generate text\n"                  \
    "  --model out/books --interactive                                     the same, line by line\n"         \
    "  --model DIR --train-data 'more/*.txt' --out out/more                finetune\n"                       \
    "  --model DIR --train-data chats.jsonl --out out/chat                 learn the answers of chats\n"     \
    "  --model DIR --steps 0 --export-gguf model.gguf                      convert\n"                        \
    "  --report out/books                                                  a page of plots\n"                \
    "  --follow out/books                                                  watch a run that continues\n"     \
    "Step lines show the mean loss in nats per token and the gradient norm before clipping, each with its\n" \
    "distance from the mean of the last 128 steps in standard deviations (z), and MFU, the share of this\n"  \
    "machine's peak FLOP/s that the model uses.\n"                                                           \
    "SIGTERM and SIGINT save and stop; SIGUSR1 saves; SIGUSR2 saves and stops, for mpirun, which forwards\n" \
    "it to all processes but kills them two seconds after SIGTERM.\n"

const ModelPreset* options_model_size(const Options* options) {
    const int is_here =
        access(options->model.path, F_OK) == 0 && strcmp(options->model.path, options->output.dir) != 0;
    return is_here ? NULL : model_preset_by_name(options->model.path);
}

int option_counts(const Options* options, const OptionRow* row) {
    return (row->flags & OPTION_BOTH) || !(row->flags & OPTION_TEXTS) == !options->generates;
}

// Returns the option's value if it is not given. --epochs replaces the steps of a recipe.
static const char* option_default_(const Options* options, const OptionRow* row) {
    const char* value = recipe_value(options->model.path, row->name);
    const int is_replaced = options->batch.epochs > 0 && row->offset == offsetof(Options, batch.steps);
    return value && !is_replaced && options_model_size(options) ? value : row->fallback;
}

// Returns true if a resumed run would inherit the option: an empty value clears it.
static int option_may_be_empty_(const Options* options, const OptionRow* row) {
    return !(row->flags & OPTION_NOT_SAVED) && options_given(options, "resume");
}

// Returns true if an option is given that starts a run: training, a plan or an export.
static int options_start_a_run_(const Options* options) {
    static const char* const runs[] = {"train-data",  "out",         "steps",  "epochs",
                                       "resume",      "overfit",     "plan",   "print-config",
                                       "export-gguf", "export-llmc", "find-lr"};
    int is_run = 0;
    for (size_t i = 0; i < sizeof(runs) / sizeof(runs[0]); i++) {
        is_run |= options_given(options, runs[i]);
    }
    return is_run;
}

// Returns true if an option is given that counts only in training.
static int options_are_of_training_(const Options* options) {
    int is_training = 0;
    for (int i = 0; i < OPTION_ROWS; i++) {
        is_training |= options->given[i] && !(OPTION_TABLE[i].flags & (OPTION_TEXTS | OPTION_BOTH));
    }
    return is_training;
}

// Returns true if the program generates text. --interactive and --prompts mean that. --prompt means
// it for a model with weights, unless other options start a training run, which then uses it for
// its samples. Without weights, --prompt alone is a mistake: it must not start training, and
// generate.h reports it.
static int options_generate_(const Options* options) {
    const int has_weights = options->model.path[0] && !options_model_size(options);
    const int is_run = has_weights ? options_start_a_run_(options) : options_are_of_training_(options);
    return options->texts.interactive || options_given(options, "prompts") ||
           (options_given(options, "prompt") && !is_run);
}

// Returns true if an option that asks for other work was given, and not to say that it is off.
static int options_ask_for_(const Options* options, const OptionRow* row) {
    char text[OPTION_TEXT_BYTES];
    const char* value = option_text(options, row, text);
    return (row->flags & OPTION_WORK) && strcmp(value, row->fallback) != 0 && strcmp(value, "0") != 0;
}

// Decides what the program does, and refuses options that have no effect on that.
static void options_decide_(Options* options) {
    options->generates = options_generate_(options);
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        if (options->given[i] && !option_counts(options, row)) {
            die_usage(options->generates
                          ? "--%s is for training, and this command generates text (--help: texts)"
                          : "--%s is for generating text: wanted --prompt TEXT, --interactive or --prompts "
                            "FILE, with "
                            "--model PATH and without --train-data, --steps or --out%s",
                      row->name, strcmp(row->name, "stop") == 0 ? "; --stop-run stops a run" : "");
        }
        if (options->optimizer.find_lr && options_ask_for_(options, row)) {
            die_usage("--find-lr cannot be combined with --%s: it only tries learning rates", row->name);
        }
    }
}

#endif // OPTION_TABLE_ROWS_
