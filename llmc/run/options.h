/*
options.h -- the command line: one table of rows, and every use of it a loop over the rows.

The parser, --help, the start-up banner, --print-config and the JSON of the log header all come from
OPTION_TABLE below, so an option is added by one field of Options and one row. Options are written `--name
value` or `--name=value`, or by alias, `-b value` (llm.c's letters, so that its run scripts work). A value
that starts like an option needs the equals sign. Everything is strict: an option that is unknown, malformed,
out of range, missing its value or given twice ends the program with status 2 before any work.

A program with its own options defines OPTION_TABLE_FILE, a file with its Options and OPTION_TABLE, and
OPTION_ARGUMENTS, the help text for other arguments, before it includes this file (dev/data/tokenize.c).

An option whose value may be "auto" holds OPTION_AUTO until the trainer has put the resolved value there.

defines: Options, DIVERGENCE_WORDS, OnDivergence, OFFLOAD_WORDS, OffloadPlace, MASTER_WEIGHTS_WORDS,
         MasterWeightsChoice, OPTION_AUTO, TASKS_HELLASWAG, LLMC_VERSION, options_parse,
         options_parse_arguments, options_given, options_changed, options_only_look, options_has_tasks, options_only_evaluates,
         options_version, options_print_help, options_print_banner, options_print_config, options_print_json, OptionType,
         OptionList, OptionRow, option_applies, option_counts, option_text, option_set, option_find, OptionsProgram,
         options_program
*/
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/base/words.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TASKS_HELLASWAG "data/hellaswag/hellaswag_val.jsonl" // --hellaswag on
#define OPTION_AUTO (-1)     // the value of an option that the trainer chooses
#define OPTION_ROWS_MAX 128  // maximum number of rows
#define OPTION_NAME_BYTES 32 // the longest name, including the zero
#define OPTION_TEXT_BYTES 64 // the longest number or word, or range, including the zero

#ifdef GIT_COMMIT // the Makefile's, in the programs
#define LLMC_VERSION "0.1.0 (" GIT_COMMIT ")"
#else
#define LLMC_VERSION "0.1.0"
#endif

// Which program reads the options: OPTION_CPU or OPTION_GPU, for rows that only one trainer has, and its
// version.
typedef struct {
    int trainer;
    const char* version;
} OptionsProgram;

static inline OptionsProgram options_program(int trainer) {
    const OptionsProgram program = {trainer, LLMC_VERSION};
    return program;
}

typedef enum {
    OPTION_INT,    // int
    OPTION_COUNT,  // int64_t
    OPTION_SEED,   // uint64_t, any
    OPTION_FLOAT,  // float
    OPTION_SWITCH, // int, 0 or 1, written off or on (or 0 or 1)
    OPTION_CHOICE, // int, the place of the word in the row's list; a word can be a number
    OPTION_STRING, // const char *, pointing into argv; never NULL
    OPTION_LIST,   // OptionList: texts, each pointing into argv; the option may be given several times
    OPTION_FLAG    // int, 1 if given; takes no value: an action, not a setting
} OptionType;

enum { OPTION_LIST_MAX = 16 };
typedef struct {
    int count;
    const char* text[OPTION_LIST_MAX];
} OptionList;

// Flags of a row. An option counts in training runs only, unless OPTION_TEXTS or OPTION_BOTH says otherwise.
enum {
    AUTO_ = 1,               // may be "auto"
    MINUS_1_ = 2,            // -1 means auto, as in llm.c
    ABOVE_ = 4,              // must be above its minimum
    BELOW_ = 8,              // must be below its maximum
    OPTION_CPU = 16,         // only the CPU trainer has it
    OPTION_GPU = 32,         // only the GPU trainer has it
    OPTION_CHANGES_RUN = 64, // defines the run: resuming with another value needs --override
    OPTION_NOT_SAVED = 128,  // for one start of the program; a resumed run does not inherit it
    OPTION_TEXTS = 256,      // counts where the program only generates texts (options_generate)
    OPTION_BOTH = 512,       // counts there and in training
};

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

#ifdef OPTION_TABLE_FILE
#include OPTION_TABLE_FILE
#else
// In the order of the table, which explains them.
typedef struct {
    const char *train_data, *val_data, *tokenizer, *text_field, *separator;
    int data_format, pack, doc_mask, shuffle;
    uint64_t seed;

    const char* model;
    int layers, channels, heads, context, vocab_size;
    const char* share_layers;

    int batch, seq_len;
    int64_t total_batch, steps;
    float epochs;

    const char* freeze;
    int optimizer;
    float lr;
    int warmup;
    float final_lr_frac;
    int schedule;
    float weight_decay;
    int cautious_decay;
    float beta1, beta2, eps, embedding_lr_scale, vector_lr_scale, sgd_momentum, adafactor_beta1;
    int adafactor_scale;
    float matrix_lr, matrix_weight_decay;
    int muon_scale, muon_rows;
    float grad_clip, skip_loss_z, skip_grad_z;
    int max_skips;
    float max_loss_rise;
    int on_divergence;

    int eval_every, eval_batches, sample_every, sample_tokens, samples;
    const char* prompt;
    float temperature;
    int top_k;
    float top_p;

    const char* tasks;
    int hellaswag;
    const char* perplexity;
    int stride, tasks_every, tasks_max;
    int interactive;
    const char *prompts, *out_texts;
    int tokens;
    OptionList stop;
    int quantize;

    const char* out;
    int save_every, keep, keep_major;
    float model_file_gb;
    const char* resume;
    int override;
    float max_hours;
    const char* export_llmc;
    int export_dtype;
    const char* export_gguf;
    int export_gguf_dtype, tensorboard, overfit;

    int recompute;
    float fit;
    int threads, products, logits_chunk;
    int offload_optimizer;
    const char* offload_path;
    int offload_residuals, offload_params;
    int update_in_backward, gradients, master_weights, tf32, gelu_fusion, bias_fusion, autotune, graph,
        device, gpu_report;

    int num_processes, rank, gpus_per_node, init;
    const char *server, *fs_path;
    int zero, shard_ranks, timeout;

    const char *report, *out_html, *compare;

    int plan, verify_data, print_config, help, version;

    OptionsProgram program;
    int generates;               // texts, instead of training
    int process, processes;      // which of how many this is, as launch.h found out
    int shards;                  // processes of a replica (zero.h), as launch.h found out
    char given[OPTION_ROWS_MAX]; // by row: was it on the command line?
} Options;

// Whether the program only describes a run, and writes nothing.
static inline int options_only_look(const Options* options) {
    return options->plan || options->print_config || options->verify_data;
}

// Whether the run is given something to evaluate the model on, besides its validation data.
static inline int options_has_tasks(const Options* options) {
    return options->tasks[0] || options->hellaswag || options->perplexity[0];
}

// Whether that is all it does: it needs no training data, has no training state and saves nothing.
static inline int options_only_evaluates(const Options* options) {
    return options->steps == 0 && options_has_tasks(options);
}
#endif

typedef struct {
    const char *group, *name;
    const char* alias; // one or two letters; "" if it has none
    OptionType type;
    size_t offset;        // of its field in Options
    double min, max;      // of a number
    int flags;            // AUTO_ and so on
    const char* fallback; // the default, as the command line and the banner would write it
    const char* unit;     // of a number; or the words of a choice, "zero|one|two"; or what a text is, "FILE"
    const char* help;
} OptionRow;

extern const OptionRow OPTION_TABLE[];
extern const int OPTION_ROWS; // of the table

// Does the row belong to this trainer?
int option_applies(const Options* options, const OptionRow* row);

// Does the row count in what the program does: training, or generating texts?
int option_counts(const Options* options, const OptionRow* row);

// ---- values ----

// The value of an option as text that reads back as the same value: the string itself, or written into
// buffer.
const char* option_text(const Options* options, const OptionRow* row, char buffer[OPTION_TEXT_BYTES]);

// Sets an option from text; 0 if the text is not a legal value of it.
int option_set(Options* options, const OptionRow* row, const char* text);

// ---- parsing ----

// The row named by the first `length` bytes of arg, dashes included; NULL if unknown.
const OptionRow* option_find(const char* arg, size_t length);

// ---- printing ----

// The program's name, its version and its compiler.
void options_version(char* text, size_t room, const Options* options, const char* name);

enum { OPTION_WANTED_WIDTH = 30, OPTION_HELP_COLUMN = 65, OPTION_HELP_WIDTH = 45 };

void options_print_help(FILE* file, const Options* options, const char* program);

// Prints a command line that repeats this run and can be pasted back: the program and every option that is
// not at its default, also one that was "auto" and has been resolved.
void options_print_banner(FILE* file, const Options* options, const char* program);

// Prints every setting, one `--name value` on a line, in groups; a shell reads it back.
void options_print_config(FILE* file, const Options* options);

// Prints every setting as one JSON object on one line, without a newline after it: numbers as numbers, an
// unresolved "auto" as null, switches as true or false, the rest as strings.
void options_print_json(FILE* file, const Options* options);

// ---- the whole ----

// Sets every option to its default, then to its value on the command line. --help and --version print and end
// the program. The strings point into argv. Sets `arguments` (argc) to the arguments that are not options, or
// that follow --, and returns their number; NULL: none are allowed.
int options_parse_arguments(Options* options, int argc, char** argv, OptionsProgram program,
                            const char** arguments);

void options_parse(Options* options, int argc, char** argv, OptionsProgram program);

// Was this option on the command line? `name` is the long name, without dashes.
int options_given(const Options* options, const char* name);

// Whether it has another value than its default.
int options_changed(const Options* options, const char* name);

#ifdef __cplusplus
}
#endif

#ifdef OPTIONS_IMPLEMENTATION

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/json.h"
#include "llmc/tokenizer/unicode_tables.h"
#ifndef OPTION_TABLE_FILE
#include "llmc/data/pack.h"
#include "llmc/data/tokens.h"
#include "llmc/formats/gguf.h"
#include "llmc/formats/llmc_bin.h"
#include "llmc/run/launch.h"
#include "llmc/run/schedule.h"
#include "llmc/gpt2.h"
#include "llmc/linear.h"
#include "llmc/optimizer.h"
#include "llmc/quantized_model.h"
#endif

// A row's type and offset. A field of another C type does not compile: the comparison is never evaluated.
#define OPTION_AT_(ctype, field)                                                                             \
    (offsetof(Options, field) + 0 * sizeof((const ctype*)0 == &((const Options*)0)->field))
#define INT_(field) OPTION_INT, OPTION_AT_(int, field)
#define COUNT_(field) OPTION_COUNT, OPTION_AT_(int64_t, field)
#define SEED_(field) OPTION_SEED, OPTION_AT_(uint64_t, field)
#define FLOAT_(field) OPTION_FLOAT, OPTION_AT_(float, field)
#define SWITCH_(field) OPTION_SWITCH, OPTION_AT_(int, field)
#define CHOICE_(field) OPTION_CHOICE, OPTION_AT_(int, field)
#define STRING_(field) OPTION_STRING, OPTION_AT_(char* const, field)
#define LIST_(field) OPTION_LIST, OPTION_AT_(OptionList, field)
#define FLAG_(field) OPTION_FLAG, OPTION_AT_(int, field)
// Short names of flags, for the table.
#define CPU_ OPTION_CPU
#define GPU_ OPTION_GPU
#define RUN_ OPTION_CHANGES_RUN
#define ONCE_ OPTION_NOT_SAVED
#define TEXTS_ OPTION_TEXTS
#define BOTH_ OPTION_BOTH
#define OPTION_UNLIMITED_ 1000000000 // more tokens, steps or files than this is a typo
#define MANY_ OPTION_UNLIMITED_

#ifdef OPTION_TABLE_FILE
#define OPTION_TABLE_ROWS_
#include OPTION_TABLE_FILE
#else
// clang-format off
const OptionRow OPTION_TABLE[] = {
    // group, name, alias, type and field, min, max, flags, default
    //     unit or words, help
    {"data",       "train-data",    "i",  STRING_(train_data),     0,        0, RUN_,             "",
        "FILES", "training data, a pattern in quotes: token shards (.bin), text (.txt, .jsonl, .parquet, also .gz and "
        ".zst), or a directory of text; A:0.7,B:0.3 mixes sources by weight; escape , : * ? [ in a name with a "
        "backslash; empty: the built-in stories"},
    {"data",       "val-data",      "j",  STRING_(val_data),       0,        0, 0,                "",
        "FILES", "validation data, likewise; empty: the last shard, or the last 5 % of the text"},
    {"data",       "tokenizer",     "",   STRING_(tokenizer),      0,        0, RUN_ | BOTH_,     "",
        "FILE", "encodes text, and decodes samples: tokenizer.json, merges.txt, .tiktoken, .bin, or their directory; "
        "bpe:8192 trains one of 8192 tokens on the text and keeps it in --out; empty: from the --model directory, "
        "or plain bytes"},
    {"data",       "text-field",    "",   STRING_(text_field),     0,        0, RUN_,             "text",
        "NAME", "field of JSON lines, or column of Parquet, that holds the document"},
    {"data",       "separator",     "",   STRING_(separator),      0,        0, RUN_,             "",
        "TEXT", "separates documents in a text file, for example '<|endoftext|>'; empty: one document per file"},
    {"data",       "data-format",   "",   CHOICE_(data_format),    0,        0, RUN_,             "auto",
        WORDS_CHOICE(TOKENS_FORMAT_WORDS), "format of .bin files; auto: llm.c's shards, or Megatron's with their .idx; nanogpt: bare "
        "uint16"},
    {"data",       "pack",          "",   CHOICE_(pack),           0,        0, RUN_,             "stream",
        WORDS_CHOICE(PACKING_WORDS), "how documents become sequences; stream: cut anywhere; "
        "aligned: a sequence starts with a document; bestfit: whole documents that fit together; pad: one document, "
        "padded to --seq-len; dynamic: padded to the longest of the batch; uniform: the same, in batches of similar "
        "length"},
    {"data",       "doc-mask",      "",   SWITCH_(doc_mask),       0,        0, RUN_,             "off",
        "off|on", "attend only within a document"},
    {"data",       "shuffle",       "",   SWITCH_(shuffle),        0,        0, RUN_,             "on",
        "off|on", "shuffle the training data; a new order in each epoch"},
    {"data",       "seed",          "",   SEED_(seed),             0,        0, RUN_ | BOTH_,     "42",
        "", "for initial weights, data order and samples"},

    {"model",      "model",         "e",  STRING_(model),          0,        0, RUN_ | BOTH_,     "",
        "SIZE|PATH", "a size (d12, gpt3:c768), or weights to start from: a Hugging Face directory, the --out of a run "
        "or an llm.c .bin"},
    {"model",      "layers",        "",   INT_(layers),            1, GPT2_MAX_LAYERS, AUTO_ | RUN_,     "auto",
        "blocks", "transformer blocks; auto, here and below: from --model"},
    {"model",      "channels",      "",   INT_(channels),          1,    65536, AUTO_ | RUN_,     "auto",
        "", "width of the residual stream"},
    {"model",      "heads",         "",   INT_(heads),             1,     1024, AUTO_ | RUN_,     "auto",
        "", "attention heads; must divide the channels"},
    {"model",      "context",       "",   INT_(context),           1,  1048576, AUTO_ | RUN_,     "auto",
        "tokens", "maximum sequence length of the model"},
    {"model",      "vocab-size",    "",   INT_(vocab_size),        1, 10000000, AUTO_ | RUN_,     "auto",
        "tokens", "size of the vocabulary"},
    {"model",      "share-layers",  "",   STRING_(share_layers),   0,        0, RUN_,             "off",
        "off|all|attention|mlp|pairs|loop:K", "layers with the same parameters: all; their attention, or their MLP; pairs: "
        "two in a row; loop:K: K blocks, repeated"},

    {"batch",      "batch",         "b",  INT_(batch),             1,  1048576, AUTO_ | BOTH_,    "auto",
        "sequences", "micro-batch: sequences per forward and backward pass; with --prompts: texts at a time, auto: 8 on a "
        "CPU, 32 on a GPU"},
    {"batch",      "seq-len",       "t",  INT_(seq_len),           1,  1048576, AUTO_ | RUN_ | BOTH_, "auto",
        "tokens", "length of a training sequence, at most --context"},
    {"batch",      "total-batch",   "d",  COUNT_(total_batch),     1,     1e12, AUTO_ | MINUS_1_ | RUN_,  "auto",
        "tokens", "batch of one update, a multiple of seq-len; auto: batch x seq-len; more accumulates gradients"},
    {"batch",      "steps",         "x",  COUNT_(steps),           0,     1e12, AUTO_ | MINUS_1_ | RUN_,  "auto",
        "updates", "length of the run; auto or -1: one epoch; 0: only validate, sample and save"},
    {"batch",      "epochs",        "",   FLOAT_(epochs),          0,    MANY_, RUN_,             "0",
        "epochs", "length of the run in epochs; 0: use --steps"},

    {"optimizer",  "freeze",        "",   STRING_(freeze),         0,        0, RUN_,             "",
        "LIST", "parameters to leave as they are: names as wte, wpe, '*b', ln1?, or embeddings, blocks, attention, mlp, "
        "norms; with [2] or [0-5] in these blocks only; empty: none"},
    {"optimizer",  "optimizer",     "",   CHOICE_(optimizer),      0,        0, RUN_,             "adamw",
        WORDS_CHOICE(OPTIMIZER_WORDS), "update rule: adamw; adamw8bit: its state in 8 bits; adafactor: hardly any "
        "state; muon: for matrices, adamw for the rest; lion: half the state; sgd: the gradient itself; "
        "dev/doc/optimizers.md compares them"},
    {"optimizer",  "lr",            "l",  FLOAT_(lr),              0,       10, AUTO_ | ABOVE_ | RUN_,  "auto",
        "", "peak learning rate; auto: 6e-4 x 768 / channels at 524288 tokens per update, less for fewer; a tenth "
        "of that if --model has weights; sgd: 400 times as much"},
    {"optimizer",  "warmup",        "u",  INT_(warmup),            0,    MANY_, AUTO_ | RUN_,     "auto",
        "steps", "of rising learning rate, before its peak"},
    {"optimizer",  "final-lr-frac", "q",  FLOAT_(final_lr_frac),   0,        1, RUN_,             "0",
        "", "final learning rate, as a fraction of the peak"},
    {"optimizer",  "schedule",      "k",  CHOICE_(schedule),       0,        0, RUN_,             "cosine",
        WORDS_CHOICE(SCHEDULE_WORDS), "shape of the learning rate after warmup"},
    {"optimizer",  "weight-decay",  "c",  FLOAT_(weight_decay),    0,       10, AUTO_ | RUN_,     "auto",
        "", "decoupled weight decay, on matrices only; auto: 0.1; sgd: 0"},
    {"optimizer",  "cautious-decay", "",  SWITCH_(cautious_decay), 0,        0, RUN_,             "off",
        "off|on", "of adamw, adamw8bit, muon, lion: only weights that the update moves towards zero decay"},
    {"optimizer",  "beta1",         "",   FLOAT_(beta1),           0,        1, BELOW_ | RUN_,    "0.9",
        "", "decay of the running mean of the gradient"},
    {"optimizer",  "beta2",         "",   FLOAT_(beta2),           0,        1, AUTO_ | BELOW_ | RUN_,  "auto",
        "", "decay of the running mean of its square; auto: 0.95 per 524288 tokens, at most 0.999 per update; "
        "lion: 0.99"},
    {"optimizer",  "eps",           "",   FLOAT_(eps),             0,        1, ABOVE_ | RUN_,    "1e-08",
        "", "added to the square root of that mean"},
    {"optimizer",  "embedding-lr-scale", "", FLOAT_(embedding_lr_scale), 0, MANY_, RUN_,          "1",
        "", "factor of --lr for embeddings; that of tokens is also the classifier"},
    {"optimizer",  "vector-lr-scale", "", FLOAT_(vector_lr_scale), 0,    MANY_, RUN_,             "1",
        "", "factor of --lr for biases and norms"},
    {"optimizer",  "sgd-momentum",  "",   FLOAT_(sgd_momentum),    0,        1, BELOW_ | RUN_,    "0.9",
        "", "of sgd: share of the last update that is in the next one; 0: no state at all"},
    {"optimizer",  "adafactor-beta1", "", FLOAT_(adafactor_beta1), 0,        1, BELOW_ | RUN_,    "0",
        "", "of adafactor: decay of a running mean of updates; 0: none, which saves its state"},
    {"optimizer",  "adafactor-scale", "", SWITCH_(adafactor_scale), 0,       0, RUN_,             "off",
        "off|on", "of adafactor: updates relative to the size of a parameter, and a rate of at most 1 / sqrt(update)"},
    {"optimizer",  "matrix-lr",     "",   FLOAT_(matrix_lr),       0,       10, ABOVE_ | RUN_,    "0.02",
        "", "of muon: peak learning rate of the blocks' matrices; all else has --lr"},
    {"optimizer",  "matrix-weight-decay", "", FLOAT_(matrix_weight_decay), 0, 10, RUN_,           "0.05",
        "", "of muon: their weight decay"},
    {"optimizer",  "muon-scale",    "",   CHOICE_(muon_scale),     0,        0, RUN_,             "spectral",
        WORDS_CHOICE(MUON_SCALE_WORDS), "of muon: size of an update; spectral: by the shape of the matrix; rms: as AdamW's, "
        "whose rate and decay then serve"},
    {"optimizer",  "muon-rows",     "",   SWITCH_(muon_rows),      0,        0, RUN_,             "off",
        "off|on", "of muon: give the rows of an update the same size, by a running mean of their squares (NorMuon)"},
    {"optimizer",  "grad-clip",     "",   FLOAT_(grad_clip),       0,    MANY_, RUN_,             "1",
        "", "maximum norm of the whole gradient; 0: no clipping"},
    {"optimizer",  "skip-loss-z",   "sl", FLOAT_(skip_loss_z),     0,    MANY_, RUN_,             "0",
        "sigma", "skip an update whose loss is n standard deviations above its recent mean; 0: never"},
    {"optimizer",  "skip-grad-z",   "sg", FLOAT_(skip_grad_z),     0,    MANY_, RUN_,             "0",
        "sigma", "the same for the gradient norm"},
    {"optimizer",  "max-skips",     "",   INT_(max_skips),         1,  1000000, 0,                "10",
        "updates", "the run has diverged after n updates in a row with a NaN or an infinity"},
    {"optimizer",  "max-loss-rise", "",   FLOAT_(max_loss_rise),   0,    MANY_, 0,                "0",
        "nats", "the run has diverged when the mean loss of 128 updates is n above its minimum; 0: never"},
    {"optimizer",  "on-divergence", "",   CHOICE_(on_divergence),  0,        0, 0,                "skip",
        WORDS_CHOICE(DIVERGENCE_WORDS), "skip: skip updates with a NaN, stop when the run has diverged; stop: stop at "
        "a NaN; rollback: when diverged, restore a checkpoint and skip the data after it"},

    {"evaluation", "eval-every",    "v",  INT_(eval_every),        0,    MANY_, AUTO_,            "auto",
        "steps", "between validations; 0: never; auto: a tenth of the run, at most 1000"},
    {"evaluation", "eval-batches",  "m",  INT_(eval_batches),      0,    MANY_, 0,                "20",
        "micro-batches", "per validation; 0: the whole validation set"},
    {"evaluation", "sample-every",  "s",  INT_(sample_every),      0,    MANY_, AUTO_,            "auto",
        "steps", "between samples; 0: never"},
    {"evaluation", "sample-tokens", "g",  INT_(sample_tokens),     1,    MANY_, AUTO_,            "auto",
        "tokens", "length of a sample"},
    {"evaluation", "samples",       "",   INT_(samples),           0,      100, 0,                "2",
        "texts", "sampled each time"},
    {"evaluation", "prompt",        "",   STRING_(prompt),         0,        0, BOTH_,            "",
        "TEXT", "start of the samples; with --model PATH and without --train-data, --steps or --out: generate the text that "
        "follows"},
    {"evaluation", "temperature",   "",   FLOAT_(temperature),     0,      100, BOTH_,            "1",
        "", "sampling temperature; 0: always the most likely token"},
    {"evaluation", "top-k",         "",   INT_(top_k),             0,    MANY_, BOTH_,            "0",
        "tokens", "sample from the k most likely; 0: from all"},
    {"evaluation", "top-p",         "",   FLOAT_(top_p),           0,        1, ABOVE_ | BOTH_,   "1",
        "", "sample from the most likely tokens whose probabilities add up to this"},

    {"tasks",      "tasks",         "",   STRING_(tasks),          0,        0, 0,                "",
        "FILES", "choices and continuations to evaluate the model on: HellaSwag's .jsonl, llm.c's .bin, DCLM's .jsonl; "
        "with --steps 0 nothing else is done, without training data"},
    {"tasks",      "hellaswag",     "h",  SWITCH_(hellaswag),      0,        0, 0,                "off",
        "off|on", "--tasks " TASKS_HELLASWAG " (scripts/get_data.sh hellaswag)"},
    {"tasks",      "perplexity",    "",   STRING_(perplexity),     0,        0, 0,                "",
        "FILES", "text or shards: loss, perplexity and bits per byte of all of it"},
    {"tasks",      "stride",        "",   INT_(stride),            1,  1048576, AUTO_,            "auto",
        "tokens", "scored in each window of --perplexity, the rest of --seq-len is context; auto: all of them"},
    {"tasks",      "tasks-every",   "",   INT_(tasks_every),       0,    MANY_, AUTO_,            "auto",
        "steps", "between these evaluations; 0: never; auto: only at the end"},
    {"tasks",      "tasks-max",     "",   INT_(tasks_max),         0,    MANY_, 0,                "0",
        "examples", "of each file, the first n; 0: all"},

    {"texts",      "interactive",   "",   FLAG_(interactive),      0,        0, TEXTS_ | ONCE_,    "off",
        "off|on", "read prompts from the terminal, one a line, and answer each; end with Ctrl-D"},
    {"texts",      "prompts",       "",   STRING_(prompts),        0,        0, TEXTS_ | ONCE_,    "",
        "FILE.jsonl", "read prompts from a file of JSON lines: {\"prompt\": \"...\"}"},
    {"texts",      "out-texts",     "",   STRING_(out_texts),      0,        0, TEXTS_ | ONCE_,    "",
        "FILE", "of --prompts: write the texts there, as JSON lines with prompt, text, tokens and stop"},
    {"texts",      "tokens",        "",   INT_(tokens),            1,    MANY_, TEXTS_ | ONCE_,    "256",
        "tokens", "length of a text at most; it ends earlier with its document"},
    {"texts",      "stop",          "",   LIST_(stop),             0,        0, TEXTS_ | ONCE_,    "",
        "TEXT", "end a text before this string; may be given several times"},
    {"texts",      "quantize",      "",   CHOICE_(quantize),       0,        0, ONCE_ | BOTH_,    "off",
        WORDS_CHOICE(QUANTIZE_WORDS), "q8_0: the model's matrices in 8 bits, as in GGUF; for generating text, and for tasks with "
        "--steps 0"},

    {"output",     "out",           "o",  STRING_(out),            0,        0, ONCE_,            "",
        "DIR", "directory for logs, checkpoints and the loss curve (curve.svg); empty: no files"},
    {"output",     "save-every",    "n",  INT_(save_every),        0,    MANY_, AUTO_,            "auto",
        "steps", "between checkpoints; the last step is saved, too; auto: only the last, if --out is given; 0: none"},
    {"output",     "keep",          "nk", INT_(keep),              0,    MANY_, 0,                "0",
        "checkpoints", "keep only the n newest; 0: all"},
    {"output",     "keep-major",    "nm", INT_(keep_major),        0,    MANY_, 0,                "0",
        "steps", "never delete those at multiples of this; 0: none"},
    {"output",     "model-file-gb", "",   FLOAT_(model_file_gb),   0,    MANY_, ABOVE_,           "5",
        "GB", "largest file of weights in a checkpoint; larger models have several and an index, as Hugging Face's do"},
    {"output",     "resume",        "y",  STRING_(resume),         0,        0, ONCE_,            "off",
        "off|on|auto|STEP|DIR", "on: continue from the newest valid checkpoint in --out; auto: the same, or a new run "
        "without one; or a certain checkpoint"},
    {"output",     "override",      "",   FLAG_(override),         0,        0, ONCE_,            "off",
        "off|on", "resume even if options that define the run have changed"},
    {"output",     "max-hours",     "",   FLOAT_(max_hours),       0,    MANY_, ONCE_,            "0",
        "hours", "save and stop before this time is up; 0: no limit"},
    {"output",     "export-llmc",   "",   STRING_(export_llmc),    0,        0, ONCE_,            "",
        "FILE.bin", "write the final model in llm.c's format, and its tokenizer as FILE_tokenizer.bin; empty: no"},
    {"output",     "export-dtype",  "",   CHOICE_(export_dtype),   0,        0, ONCE_,            "fp32",
        WORDS_CHOICE(MODEL_DTYPE_WORDS), "precision of the weights in that file"},
    {"output",     "export-gguf",   "",   STRING_(export_gguf),    0,        0, ONCE_,            "",
        "FILE", "write the final model for llama.cpp; empty: no"},
    {"output",     "export-gguf-dtype", "", CHOICE_(export_gguf_dtype), 0,   0, ONCE_,            "f16",
        WORDS_CHOICE(GGUF_DTYPE_WORDS), "precision of the matrices in that file"},
    {"output",     "tensorboard",   "",   SWITCH_(tensorboard),    0,        0, 0,                "off",
        "off|on", "also log for TensorBoard, in a directory tensorboard in --out"},
    {"output",     "overfit",       "a",  SWITCH_(overfit),        0,        0, RUN_,             "off",
        "off|on", "train on the first batch only; the loss goes to 0"},

    {"memory, speed", "recompute",  "r",  CHOICE_(recompute),      0,        0, AUTO_,            "auto",
        WORDS_CHOICE(RECOMPUTE_WORDS), "activations to recompute instead of storing: 0 none, 1 GELU, 2 GELU and layernorm, "
        "mlp also the product before GELU, 3 whole blocks; "
        "auto: 1 on a CPU, the lowest that fits into memory on a GPU"},
    {"memory, speed", "fit",        "",   FLOAT_(fit),             0,    MANY_, AUTO_ | ONCE_,    "0",
        "GiB", "fit into this much memory: try --batch and what divides it, levels of --recompute, on a GPU also "
        "--offload-optimizer host, the fastest first; same updates, but for rounding; auto: what is free; 0: off"},
    {"memory, speed", "threads",    "",   INT_(threads),           0,     4096, CPU_ | ONCE_ | BOTH_, "0",
        "threads", "CPU threads of a process; 0: its share of the machine's"},
    {"memory, speed", "products",   "",   CHOICE_(products),       0,        0, CPU_ | RUN_ | BOTH_, "fp32",
        WORDS_CHOICE(PRODUCTS_WORDS), "factors of matrix products and of attention; bf16: rounded to bf16, with sums and all else "
        "in fp32; auto: bf16 where this machine has instructions for it"},
    {"memory, speed", "logits-chunk", "", INT_(logits_chunk),      1,    MANY_, AUTO_ | GPU_,     "auto",
        "tokens", "whose logits are in memory at a time; auto: a micro-batch, or the largest part of it that fits"},
    {"memory, speed", "offload-optimizer", "", CHOICE_(offload_optimizer), 0, 0, GPU_,           "off",
        WORDS_CHOICE(OFFLOAD_WORDS), "keep master weights, m and v in pinned memory of the host, or on a disk; same bits"},
    {"memory, speed", "offload-path", "", STRING_(offload_path),   0,        0, GPU_,             "",
        "DIR", "on a fast drive, for --offload-optimizer disk; nothing stays in it"},
    {"memory, speed", "offload-residuals", "", SWITCH_(offload_residuals), 0, 0, GPU_,            "off",
        "off|on", "with --recompute 3: keep the residual stream between blocks in pinned memory of the host; same bits"},
    {"memory, speed", "offload-params", "", SWITCH_(offload_params), 0,      0, GPU_,             "off",
        "off|on", "with --zero 3: keep this process's part of parameters and gradients in pinned memory of the host; same bits"},
    {"memory, speed", "update-in-backward", "", SWITCH_(update_in_backward), 0, 0, RUN_,          "off",
        "off|on", "update each block as soon as its gradient is there, and then forget that: gradients of two blocks instead of "
        "all; an update is one micro-batch, and is clipped block by block (dev/doc/memory.md)"},
    {"memory, speed", "gradients",  "",   CHOICE_(gradients),      0,        0, GPU_ | RUN_,      "model",
        "model|fp32", "dtype of the gradients: the weights' dtype, or fp32"},
    {"memory, speed", "master-weights", "w", CHOICE_(master_weights), 0,     0, GPU_ | RUN_,      "on",
        WORDS_CHOICE(MASTER_WEIGHTS_WORDS), "keep 16-bit weights as fp32 for the optimizer; 24: bf16 weights with 8 more "
        "bits; off: stochastic rounding"},
    {"memory, speed", "tf32",       "f",  SWITCH_(tf32),           0,        0, GPU_ | RUN_ | BOTH_, "on",
        "off|on", "compute fp32 products on TF32 tensor cores, with 10-bit mantissas"},
    {"memory, speed", "gelu-fusion", "ge", INT_(gelu_fusion),      0,        2, GPU_ | BOTH_,     "2",
        "", "fuse GELU into matrix products: 0 no, 1 forward, 2 forward and backward"},
    {"memory, speed", "bias-fusion", "",  SWITCH_(bias_fusion),    0,        0, GPU_,             "on",
        "off|on", "with --gelu-fusion 2: fuse the gradient of the bias before GELU into that product, where cuBLASLt can"},
    {"memory, speed", "autotune",   "",   SWITCH_(autotune),       0,        0, GPU_,             "on",
        "off|on", "time cuBLASLt's algorithms once per product, and keep the fastest"},
    {"memory, speed", "graph",      "",   SWITCH_(graph),          0,        0, GPU_ | BOTH_,     "on",
        "off|on", "replay a micro-step as one CUDA graph; off with --update-in-backward"},
    {"memory, speed", "device",     "",   INT_(device),            0,     1023, AUTO_ | GPU_ | ONCE_ | BOTH_, "auto",
        "", "index of the GPU; auto: one for each process of a machine"},
    {"memory, speed", "gpu-report", "lg", INT_(gpu_report),        0,    MANY_, GPU_ | ONCE_,     "0",
        "steps", "between lines on the GPU's temperature, power, clocks and memory; 0: none"},

    {"processes",  "num-processes", "pn", INT_(num_processes),     1,  1048576, AUTO_ | ONCE_,    "auto",
        "", "how many processes share the run; auto, here and below: what mpirun, srun or torchrun says, else one"},
    {"processes",  "rank",          "pr", INT_(rank),              0,  1048575, AUTO_ | ONCE_,    "auto",
        "", "which of them this one is"},
    {"processes",  "gpus-per-node", "pg", INT_(gpus_per_node),     1,     1024, AUTO_ | ONCE_,    "auto",
        "processes", "on each machine"},
    {"processes",  "init",          "pi", CHOICE_(init),           0,        0, ONCE_,            "auto",
        WORDS_CHOICE(LAUNCH_INIT_WORDS), "how they meet; auto: as their launcher has it, see dev/doc/processes.md; tcp and fs are for GPUs"},
    {"processes",  "server",        "ps", STRING_(server),         0,        0, ONCE_,            "",
        "HOST[:PORT]", "where the others reach rank 0, for --init tcp; port 29500 unless given"},
    {"processes",  "fs-path",       "pf", STRING_(fs_path),        0,        0, ONCE_,            "",
        "DIR", "on a file system that all machines share, for --init fs; empty: --out"},
    {"processes",  "zero",          "z",  INT_(zero),              0,        3, AUTO_ | ONCE_,    "auto",
        "", "divide among the processes: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also parameters; "
        "auto: 2 for several processes"},
    {"processes",  "shard-ranks",   "",   INT_(shard_ranks),       1,  1048576, AUTO_ | GPU_ | ONCE_, "auto",
        "processes", "which share one copy of what --zero divides; auto: those of a machine, all where machines differ"},
    {"processes",  "timeout",       "",   INT_(timeout),           1,    MANY_, ONCE_,            "50",
        "seconds", "without progress, after which a run of several processes ends; at least 5 times the longest step"},

    {"reports",    "report",        "",   STRING_(report),         0,        0, ONCE_,            "",
        "RUNS", "write a page about runs that exist, and exit: their directories or logs, with commas between; empty: no"},
    {"reports",    "out-html",      "",   STRING_(out_html),       0,        0, ONCE_,            "",
        "FILE", "that page; empty: report.html in the first run's directory"},
    {"reports",    "compare",       "",   STRING_(compare),        0,        0, ONCE_,            "",
        "RUNS", "print what runs achieved, a column for each, and exit; empty: no"},

    {"other",      "plan",          "",   FLAG_(plan),             0,        0, ONCE_,            "off",
        "off|on", "estimate memory, speed and time, and exit"},
    {"other",      "verify-data",   "",   FLAG_(verify_data),      0,        0, ONCE_,            "off",
        "off|on", "check every token of every file, and the checksum if FILE.xxh64 exists, and exit"},
    {"other",      "print-config",  "",   FLAG_(print_config),     0,        0, ONCE_,            "off",
        "off|on", "print every option with its value, and exit"},
    {"other",      "help",          "",   FLAG_(help),             0,        0, ONCE_ | BOTH_,    "off",
        "off|on", "print this help, and exit"},
    {"other",      "version",       "",   FLAG_(version),          0,        0, ONCE_ | BOTH_,    "off",
        "off|on", "print the version, and exit"},
};
// clang-format on
#endif

const int OPTION_ROWS = sizeof(OPTION_TABLE) / sizeof(OPTION_TABLE[0]);
static_assert(sizeof(OPTION_TABLE) / sizeof(OPTION_TABLE[0]) <= OPTION_ROWS_MAX, "enlarge OPTION_ROWS_MAX");

#undef INT_
#undef COUNT_
#undef SEED_
#undef FLOAT_
#undef SWITCH_
#undef CHOICE_
#undef STRING_
#undef LIST_
#undef FLAG_
#undef CPU_
#undef GPU_
#undef RUN_
#undef ONCE_
#undef TEXTS_
#undef BOTH_
#undef MANY_

#ifdef OPTION_TABLE_FILE
#define OPTION_EXAMPLES "" // of the trainers, for --help
#else
#define OPTION_EXAMPLES                                                                                      \
    "\nWithout options it trains a small model on built-in stories. To start with:\n"                        \
    "  --train-data 'books/*.txt' --tokenizer bpe:4096 --out out/books     your own text\n"                  \
    "  --out out/books --resume on                                         continue after an interruption\n" \
    "  --out out/books --resume on --steps 9000 --override                 train for longer\n"               \
    "  --model out/books --prompt 'It was'                                 generate text\n"                  \
    "  --model out/books --interactive                                     the same, line by line\n"         \
    "  --model DIR --train-data 'more/*.txt' --out out/more                finetune\n"                       \
    "  --model DIR --steps 0 --export-gguf model.gguf                      convert\n"                        \
    "  --report out/books                                                  a page of plots\n"                \
    "Step lines show the mean loss of the update in nats per token, the gradient norm before clipping,\n"    \
    "for both the distance from the mean of 128 updates in standard deviations (z), and MFU, the share\n"    \
    "of this machine's peak FLOP/s that the model uses.\n"                                                   \
    "SIGTERM and SIGINT save and stop; SIGUSR1 saves; SIGUSR2 saves and stops, for mpirun, which forwards\n" \
    "it to all processes but kills them two seconds after SIGTERM.\n"
#endif
#ifndef OPTION_ARGUMENTS
#define OPTION_ARGUMENTS "" // what a program takes besides options, for --help
#endif

int option_applies(const Options* options, const OptionRow* row) {
    return !(row->flags & (OPTION_CPU | OPTION_GPU)) || (row->flags & options->program.trainer);
}

#ifdef OPTION_TABLE_FILE
int option_counts(const Options* options, const OptionRow* row) { return (void)options, (void)row, 1; }
static void options_decide_(Options* options) { (void)options; }
#else
int option_counts(const Options* options, const OptionRow* row) {
    return (row->flags & OPTION_BOTH) || !(row->flags & OPTION_TEXTS) == !options->generates;
}

// Whether the program generates texts: --interactive and --prompts say so; --prompt does with the weights of a
// model, unless one of the options that every training run could be started with makes it the start of samples.
static int options_generate_(const Options* options) {
    static const char* const runs[] = {"train-data",  "out",         "steps",      "epochs",
                                       "resume",      "overfit",     "plan",       "print-config",
                                       "verify-data", "export-gguf", "export-llmc"};
    int is_run = 0;
    for (size_t i = 0; i < sizeof(runs) / sizeof(runs[0]); i++) {
        is_run |= options_given(options, runs[i]);
    }
    const int has_weights = options->model[0] && !gpt2_model_by_name(options->model);
    return options->interactive || options_given(options, "prompts") ||
           (options_given(options, "prompt") && has_weights && !is_run);
}

// Decides what the program does, and refuses options that do not count there.
static void options_decide_(Options* options) {
    options->generates = options_generate_(options);
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        if (options->given[i] && !option_counts(options, row)) {
            die_usage(options->generates
                          ? "--%s is for training, and this command generates text (--help: texts)"
                          : "--%s is for generating text: wanted --prompt TEXT, --interactive or --prompts "
                            "FILE, with "
                            "--model PATH and without --train-data, --steps or --out",
                      row->name);
        }
    }
}
#endif

// ---- values ----

// Returns where word number `index` of "zero|one|two" starts, and sets length to its length; NULL if the list
// is shorter.
static const char* option_word_(const char* words, int index, size_t* length) {
    for (; index > 0 && words; index--) {
        words = strchr(words, '|');
        words = words ? words + 1 : NULL;
    }
    *length = words ? strcspn(words, "|") : 0;
    return words;
}

// The field of an INT, CHOICE, COUNT or FLOAT row. A double holds every legal value of them exactly.
static double option_number_(const Options* options, const OptionRow* row) {
    const void* field = (const char*)options + row->offset;
    return row->type == OPTION_COUNT   ? (double)*(const int64_t*)field
           : row->type == OPTION_FLOAT ? (double)*(const float*)field
                                       : *(const int*)field;
}

const char* option_text(const Options* options, const OptionRow* row, char buffer[OPTION_TEXT_BYTES]) {
    const void* field = (const char*)options + row->offset;
    if ((row->flags & AUTO_) && option_number_(options, row) == OPTION_AUTO) {
        return "auto";
    }
    switch (row->type) {
    case OPTION_STRING:
        return *(const char* const*)field;
    case OPTION_LIST:
        return ((const OptionList*)field)->count ? ((const OptionList*)field)->text[0] : "";
    case OPTION_SEED:
        snprintf(buffer, OPTION_TEXT_BYTES, "%" PRIu64, *(const uint64_t*)field);
        return buffer;
    case OPTION_INT:
    case OPTION_COUNT:
        snprintf(buffer, OPTION_TEXT_BYTES, "%.0f", option_number_(options, row));
        return buffer;
    case OPTION_FLOAT: {
        const float value = (float)option_number_(options, row);
        int digits = 1; // nine are always enough
        do {
            snprintf(buffer, OPTION_TEXT_BYTES, "%.*g", digits, value);
        } while (++digits <= 9 && strtof(buffer, NULL) != value);
        return buffer;
    }
    default: { // a word of the list
        size_t length;
        const char* word = option_word_(row->unit, *(const int*)field, &length);
        assert(word && length < OPTION_TEXT_BYTES);
        snprintf(buffer, OPTION_TEXT_BYTES, "%.*s", (int)length, word);
        return buffer;
    }
    }
}

// The legal values in words: "1 to 1048576 sequences", "cosine|linear|constant|wsd", "FILE".
static const char* option_wanted_(const OptionRow* row, char buffer[OPTION_TEXT_BYTES]) {
    switch (row->type) {
    case OPTION_STRING:
    case OPTION_LIST:
        return *row->unit ? row->unit : "text";
    case OPTION_SEED:
        return "0 to 18446744073709551615";
    case OPTION_SWITCH:
    case OPTION_CHOICE:
        return row->unit;
    case OPTION_FLAG:
        return "";
    default:
        snprintf(buffer, OPTION_TEXT_BYTES, "%s%.15g to %s%.15g%s%s", row->flags & ABOVE_ ? "above " : "",
                 row->min, row->flags & BELOW_ ? "below " : "", row->max, *row->unit ? " " : "", row->unit);
        return buffer;
    }
}

// The same for --help, which leaves out limits that nobody reaches: "any", ">= 0 steps".
static const char* option_wanted_briefly_(const OptionRow* row, char buffer[OPTION_TEXT_BYTES]) {
    const int is_number = row->type == OPTION_INT || row->type == OPTION_COUNT || row->type == OPTION_FLOAT;
    if (row->type == OPTION_SEED) {
        return "any";
    }
    if (!is_number || (row->max != OPTION_UNLIMITED_ && row->max < 1e12)) {
        return option_wanted_(row, buffer);
    }
    snprintf(buffer, OPTION_TEXT_BYTES, "%s %.15g%s%s", row->flags & ABOVE_ ? ">" : ">=", row->min,
             *row->unit ? " " : "", row->unit);
    return buffer;
}

// Reads a number of an INT, COUNT or FLOAT row; 0 if it is none, or not a legal one. Only decimal digits: no
// blanks, hexadecimal, nan or inf. A float is judged as it will be stored, after rounding.
static int option_read_number_(const OptionRow* row, const char* text, double* value) {
    const char* legal = row->type == OPTION_FLOAT ? "0123456789+-.eE" : "0123456789-";
    char* end;
    errno = 0;
    *value = row->type == OPTION_FLOAT ? strtof(text, &end) : (double)strtoll(text, &end, 10);
    return *text && !*end && errno == 0 && strspn(text, legal) == strlen(text) &&
           (row->flags & ABOVE_ ? *value > row->min : *value >= row->min) &&
           (row->flags & BELOW_ ? *value < row->max : *value <= row->max);
}

static int option_is_auto_(const OptionRow* row, const char* text) {
    return ((row->flags & AUTO_) && strcmp(text, "auto") == 0) ||
           ((row->flags & MINUS_1_) && strcmp(text, "-1") == 0);
}

static int option_set_number_(Options* options, const OptionRow* row, const char* text) {
    void* field = (char*)options + row->offset;
    double value = OPTION_AUTO;
    if (!option_is_auto_(row, text) && !option_read_number_(row, text, &value)) {
        return 0;
    }
    switch (row->type) {
    case OPTION_INT:
        *(int*)field = (int)value;
        break;
    case OPTION_COUNT:
        *(int64_t*)field = (int64_t)value;
        break;
    default:
        *(float*)field = (float)value;
        break;
    }
    return 1;
}

static int option_set_seed_(uint64_t* field, const char* text) {
    errno = 0;
    *field = strtoull(text, NULL, 10);
    return *text && strspn(text, "0123456789") == strlen(text) && errno == 0;
}

static int option_set_word_(int* field, const char* words, const char* text) {
    const char* word;
    size_t length;
    for (int i = 0; (word = option_word_(words, i, &length)) != NULL; i++) {
        if (strlen(text) == length && memcmp(text, word, length) == 0) {
            *field = i;
            return 1;
        }
    }
    return 0;
}

// Whether a choice is a switch with more words.
static int option_is_switch_(const OptionRow* row) { return strncmp(row->unit, "off|on|", 7) == 0; }

// Appends to a list; 0 if the text is empty. The default, "", is the empty list.
static int option_add_(Options* options, const OptionRow* row, const char* text) {
    OptionList* list = (OptionList*)((char*)options + row->offset);
    if (list->count == OPTION_LIST_MAX) {
        die_usage("--%s is given more than %d times", row->name, OPTION_LIST_MAX);
    }
    list->text[list->count] = text;
    list->count += text[0] != '\0';
    return text[0] != '\0';
}

int option_set(Options* options, const OptionRow* row, const char* text) {
    void* field = (char*)options + row->offset;
    switch (row->type) {
    case OPTION_STRING:
        *(const char**)field = text;
        return 1;
    case OPTION_LIST:
        return option_add_(options, row, text) || !options->given[row - OPTION_TABLE];
    case OPTION_SEED:
        return option_set_seed_((uint64_t*)field, text);
    case OPTION_SWITCH:
        return option_set_word_((int*)field, row->unit, text) || option_set_word_((int*)field, "0|1", text);
    case OPTION_CHOICE:
    case OPTION_FLAG:
        if (option_is_auto_(row, text)) {
            *(int*)field = OPTION_AUTO;
            return 1;
        }
        return option_set_word_((int*)field, row->unit, text) ||
               (option_is_switch_(row) && option_set_word_((int*)field, "0|1", text));
    default:
        return option_set_number_(options, row, text);
    }
}

// ---- parsing ----

// Is this argument an option, and not a value? A dash alone and a negative number are values.
static int option_is_name_(const char* arg) {
    return arg[0] == '-' && arg[1] && !isdigit((unsigned char)arg[1]) && arg[1] != '.';
}

const OptionRow* option_find(const char* arg, size_t length) {
    const size_t dashes = arg[1] == '-' ? 2 : 1;
    for (int i = 0; i < OPTION_ROWS; i++) {
        const char* name = dashes == 2 ? OPTION_TABLE[i].name : OPTION_TABLE[i].alias;
        if (*name && strlen(name) == length - dashes && memcmp(name, arg + dashes, length - dashes) == 0) {
            return &OPTION_TABLE[i];
        }
    }
    return NULL;
}

// The edit distance of Levenshtein: insertions, deletions and changes of a byte that turn text into name.
static int option_distance_(const char* text, size_t length, const char* name) {
    int distance[OPTION_NAME_BYTES]; // from text[0 .. i) to each beginning of the name
    const int name_length = (int)strlen(name);
    assert(name_length < OPTION_NAME_BYTES);
    for (int j = 0; j <= name_length; j++) {
        distance[j] = j;
    }
    for (size_t i = 0; i < length; i++) {
        int diagonal = distance[0];
        distance[0]++;
        for (int j = 1; j <= name_length; j++) {
            const int change = diagonal + (text[i] != name[j - 1]);
            const int gap = 1 + (distance[j] < distance[j - 1] ? distance[j] : distance[j - 1]);
            diagonal = distance[j];
            distance[j] = change < gap ? change : gap;
        }
    }
    return distance[name_length];
}

// Names the nearest option, if one is near enough to be what was meant: at most every other letter is wrong.
__attribute__((noreturn)) static inline void option_unknown_(const Options* options, const char* arg,
                                                             size_t length) {
    const size_t dashes = arg[1] == '-' ? 2 : 1;
    const char* nearest = NULL;
    size_t best = (length - dashes) / 2 + 1;
    for (int i = 0; i < OPTION_ROWS; i++) {
        const char* name = OPTION_TABLE[i].name;
        if (!option_applies(options, &OPTION_TABLE[i])) {
            continue;
        }
        const size_t distance = (size_t)option_distance_(arg + dashes, length - dashes, name);
        if (distance < best) {
            best = distance;
            nearest = name;
        }
    }
    if (nearest) {
        die_usage("unknown option %.*s; did you mean --%s? (--help lists all)", (int)length, arg, nearest);
    }
    die_usage("unknown option %.*s (--help lists all)", (int)length, arg);
}

__attribute__((noreturn)) static inline void option_refuse_(const OptionRow* row, const char* found) {
    char buffer[OPTION_TEXT_BYTES];
    die_usage("--%s is %s; wanted %s%s", row->name, found, option_wanted_(row, buffer),
              row->flags & AUTO_ ? ", or auto" : "");
}

// Takes the option `arg` and its value, which may be the next argument (NULL at the end). Returns how many of
// the arguments after `arg` it used: 0 or 1.
static int option_take_(Options* options, const char* arg, const char* next) {
    if (!option_is_name_(arg)) {
        die_usage("stray argument %s; wanted --name value (--help lists all)%s", *arg ? arg : "''",
                  access(arg, F_OK) == 0
                      ? "; quote a pattern of files, 'books/*.txt', or the shell expands it"
                      : "");
    }
    if (strcmp(arg, "-h") == 0 && (!next || option_is_name_(next))) {
        options->help = 1;
        return 0;
    }
    const size_t length = strcspn(arg, "=");
    const int joined = arg[length] == '=';
    const OptionRow* row = option_find(arg, length);
    if (!row) {
        option_unknown_(options, arg, length);
    }
    if (!option_applies(options, row)) {
        die_usage("--%s is an option of the %s", row->name,
                  row->flags & OPTION_GPU ? "GPU trainer (make train_gpt2cu)"
                                          : "CPU trainer (make train_gpt2)");
    }
    char* given = &options->given[row - OPTION_TABLE];
    if (*given && row->type != OPTION_LIST) {
        die_usage("--%s is given twice", row->name);
    }
    *given = 1;
    if (row->type == OPTION_FLAG) {
        if (joined) {
            die_usage("--%s takes no value", row->name);
        }
        option_set(options, row, "on");
        return 0;
    }
    const char* value = joined ? arg + length + 1 : next && !option_is_name_(next) ? next : NULL;
    if (!value || !option_set(options, row, value)) {
        option_refuse_(row, !value ? "missing its value" : *value ? value : "''");
    }
    return !joined;
}

// ---- printing ----

// Prints a word as the shell reads it: as it is, or in single quotes.
static void option_print_quoted_(FILE* file, const char* text) {
    const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./,:+@";
    if (*text && strspn(text, plain) == strlen(text)) {
        fputs(text, file);
        return;
    }
    fputc('\'', file);
    for (; *text; text++) {
        if (*text == '\'') {
            fputs("'\\''", file); // close, a quote of its own, open again
        } else {
            fputc(*text, file);
        }
    }
    fputc('\'', file);
}

// Prints --name value, or --name=value where the value would be taken for an option.
static void option_print_setting_(FILE* file, const OptionRow* row, const char* value) {
    fprintf(file, "--%s", row->name);
    if (row->type != OPTION_FLAG) {
        fputc(option_is_name_(value) ? '=' : ' ', file);
        option_print_quoted_(file, value);
    }
}

static const char* options_program_name_(const char* program) {
    const char* slash = strrchr(program, '/');
    return slash ? slash + 1 : program;
}

void options_version(char* text, size_t room, const Options* options, const char* name) {
#ifdef __clang__
    const char* compiler = __VERSION__;
#else
    const char* compiler = "gcc " __VERSION__;
#endif
    snprintf(text, room, "%s %s, Unicode %s, compiled by %s", options_program_name_(name),
             options->program.version, UNICODE_VERSION, compiler);
}

static void options_print_version_(FILE* file, const Options* options, const char* name) {
    char text[512];
    options_version(text, sizeof(text), options, name);
    fprintf(file, "%s\n", text);
}

// Prints text in lines of at most OPTION_HELP_WIDTH, broken at blanks, each after the first indented.
static void option_print_wrapped_(FILE* file, const char* text) {
    while (strlen(text) > OPTION_HELP_WIDTH) {
        int length = OPTION_HELP_WIDTH;
        while (text[length] != ' ') {
            length--;
            assert(length > 0);
        }
        fprintf(file, "%.*s\n%*s", length, text, OPTION_HELP_COLUMN, "");
        text += length + 1;
    }
    fprintf(file, "%s\n", text);
}

void options_print_help(FILE* file, const Options* options, const char* program) {
    fprintf(file,
            "usage: %s [--name value]...%s\nAlso --name=value, and -alias value with the short "
            "names.\n" OPTION_EXAMPLES,
            program, OPTION_ARGUMENTS);
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char name[OPTION_NAME_BYTES + 2], alias[8], buffer[OPTION_TEXT_BYTES];
        if (!option_applies(options, row)) {
            continue;
        }
        if (i == 0 || strcmp(row->group, row[-1].group) != 0) {
            fprintf(file, "\n%-26s%-30s%s\n", row->group, "value", "default");
        }
        snprintf(name, sizeof(name), "--%s", row->name);
        snprintf(alias, sizeof(alias), "%s%s", *row->alias ? "-" : "", row->alias);
        const char* wanted = option_wanted_briefly_(row, buffer);
        const int fits = strlen(wanted) < OPTION_WANTED_WIDTH; // else the rest is on a line of its own
        fprintf(file, "  %-*s%-*s%-*s", *alias ? 20 : 24, name, *alias ? 4 : 0, alias, OPTION_WANTED_WIDTH,
                wanted);
        fprintf(file, "%s%*s%-8s ", fits ? "" : "\n", fits ? 0 : OPTION_HELP_COLUMN - 9, "",
                row->type == OPTION_FLAG ? ""
                : *row->fallback         ? row->fallback
                                         : "''");
        option_print_wrapped_(file, row->help);
    }
}

void options_print_banner(FILE* file, const Options* options, const char* program) {
    const size_t width = 100;
    size_t column = strlen(program);
    option_print_quoted_(file, program);
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char buffer[OPTION_TEXT_BYTES];
        if (!option_applies(options, row) || !option_counts(options, row)) {
            continue;
        }
        const char* value = option_text(options, row, buffer);
        if (strcmp(value, row->fallback) == 0) {
            continue;
        }
        const size_t length = strlen(" --") + strlen(row->name) + strlen(" ''") + strlen(value);
        const int wrap = column + length + strlen(" \\") > width;
        fputs(wrap ? " \\\n    " : " ", file);
        column = length + (wrap ? strlen("   ") : column);
        option_print_setting_(file, row, value);
    }
    fputc('\n', file);
}

void options_print_config(FILE* file, const Options* options) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char buffer[OPTION_TEXT_BYTES];
        if (row->type == OPTION_FLAG || !option_applies(options, row) || !option_counts(options, row)) {
            continue;
        }
        if (i == 0 || strcmp(row->group, row[-1].group) != 0) {
            fprintf(file, "%s# %s\n", i ? "\n" : "", row->group);
        }
        option_print_setting_(file, row, option_text(options, row, buffer));
        fputc('\n', file);
    }
}

// Whether the value of a choice is no number.
static int option_is_word_(const OptionRow* row, const char* value) {
    return row->type == OPTION_CHOICE && value[strspn(value, "0123456789")] != '\0';
}

void options_print_json(FILE* file, const Options* options) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char buffer[OPTION_TEXT_BYTES];
        const char* value = option_text(options, row, buffer);
        if (row->type == OPTION_FLAG || !option_applies(options, row) || !option_counts(options, row)) {
            continue;
        }
        fprintf(file, "%s\"%s\":", i ? "," : "{", row->name);
        if ((row->flags & AUTO_) && strcmp(value, "auto") == 0) {
            fputs("null", file);
        } else if (row->type == OPTION_STRING || option_is_word_(row, value)) {
            json_print_string(file, value, strlen(value));
        } else if (row->type == OPTION_SWITCH) {
            fputs(strcmp(value, "on") == 0 ? "true" : "false", file);
        } else {
            fputs(value, file);
        }
    }
    fputc('}', file);
}

// ---- the whole ----

int options_parse_arguments(Options* options, int argc, char** argv, OptionsProgram program,
                            const char** arguments) {
    int num_arguments = 0;
    const char* name = argc > 0 ? argv[0] : "train_gpt2";
    memset(options, 0, sizeof(*options));
    options->program = program;
#ifndef OPTION_TABLE_FILE
    options->processes = options->shards = 1; // until launch.h has asked
#endif
    for (int i = 0; i < OPTION_ROWS; i++) {
        const int legal = option_set(options, &OPTION_TABLE[i], OPTION_TABLE[i].fallback);
        assert(legal);
        (void)legal;
    }
    int only_arguments = 0; // behind --
    for (int i = 1; i < argc; i++) {
        if (arguments && !only_arguments && strcmp(argv[i], "--") == 0) {
            only_arguments = 1;
        } else if (arguments && (only_arguments || !option_is_name_(argv[i]))) {
            arguments[num_arguments++] = argv[i];
        } else {
            i += option_take_(options, argv[i], i + 1 < argc ? argv[i + 1] : NULL);
        }
    }
    options_decide_(options);
    if (options->help) {
        options_print_help(stdout, options, options_program_name_(name));
        exit(EXIT_SUCCESS);
    }
    if (options->version) {
        options_print_version_(stdout, options, name);
        exit(EXIT_SUCCESS);
    }
    return num_arguments;
}

void options_parse(Options* options, int argc, char** argv, OptionsProgram program) {
    options_parse_arguments(options, argc, argv, program, NULL);
}

int options_changed(const Options* options, const char* name) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        char buffer[OPTION_TEXT_BYTES];
        if (strcmp(OPTION_TABLE[i].name, name) == 0) {
            return strcmp(option_text(options, &OPTION_TABLE[i], buffer), OPTION_TABLE[i].fallback) != 0;
        }
    }
    assert(!"no such option");
    return 0;
}

int options_given(const Options* options, const char* name) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        if (strcmp(OPTION_TABLE[i].name, name) == 0) {
            return options->given[i];
        }
    }
    assert(!"no such option");
    return 0;
}

#endif // OPTIONS_IMPLEMENTATION

#endif
