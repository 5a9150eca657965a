/*
setup.h -- from the command line to a run: which data, which tokens, which model, and a value for every
"auto".

    data                        tokens                                   V of a new model
    none named                  words of the built-in stories            their number
    text files                  bytes                                    257
    text, --tokenizer           those of the tokenizer (text_data.h)     the tokenizer's
    .bin shards                 GPT-2's, or those of --tokenizer         50257, or the tokenizer's
    none, --steps 0, --model    those of the model's own tokenizer       the model's
    none, --steps 0, --tasks    those of --tokenizer, or none            the model's

A --model directory with a tokenizer's files supplies --tokenizer. A vocabulary whose size is not the model's
is refused: its tokens would be different ones. The model is a name, a file of llm.c's, a Hugging Face
directory (a checkpoint is one), or the sizes on the command line; options that are given override a name and
must agree with files. Everything is checked here, before any memory for the model is taken.

defines: RunData, setup_has_data, setup_tokenizer, setup_text_tokenizer, setup_texts, setup_check_quantize, setup_check_freeze, setup_check_share, setup_products, setup_try_prompt, setup_model_path,
         setup_model, setup_data, setup_open_text, setup_target_bytes, setup_loaders, setup_print_data, setup_verify_data,
         setup_training, setup_check_optimizer, setup_optimizer, setup_update, setup_eval_sequences,
         setup_floor, setup_eot, setup_saved_tokenizer, setup_check_exports, SetupExport, setup_exports, setup_export_open,
         setup_export_group, setup_export_close, setup_prompt,
         setup_asks_for_samples, setup_validates_first, setup_close, DataKind
*/
#ifndef LLMC_SETUP_H
#define LLMC_SETUP_H

#include <limits.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/data/dataloader.h"
#include "llmc/data/sources.h"
#include "llmc/data/stories.h"
#include "llmc/formats/gguf.h"
#include "llmc/formats/llmc_bin.h"
#include "llmc/run/options.h"
#include "llmc/tokenizer/tokenizer.h"
#include "llmc/gpt2.h"
#include "llmc/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sizes of a new model without a name, and of the run with it: they train on a laptop in minutes.
enum {
    SETUP_LAYERS = 2,
    SETUP_CHANNELS = 128,
    SETUP_HEADS = 4,
    SETUP_CONTEXT = 128,
    SETUP_BATCH_TOKENS = 1024, // of a micro-batch
    SETUP_FULL_BATCH =
        524288, // tokens of an update of GPT-3 125M and of llm.c's runs, for which rates are published
    SETUP_STORIES_STEPS = 3600,  // about a minute on two cores
    SETUP_STORIES_PAGE = 128,    // tokens: a story that crosses the end of a page is cut there
    SETUP_MAPPED_FILES = 10000,  // of text: Linux lets a program map 65530 (vm.max_map_count)
    SETUP_TEXTS_CPU = 8,         // at a time, of --prompts
    SETUP_TEXTS_GPU = 32,        //
    SETUP_STORIES_SEED = 271828, // validation stories: the same whatever the seed of the run
};
#define SETUP_MAX_STEPS 1e12                        // of --steps, too
#define SETUP_STORIES_MAX_TOKENS ((int64_t)1 << 27) // longer runs see the built-in text again

typedef enum { DATA_STORIES, DATA_TEXT, DATA_SHARDS, DATA_NONE } DataKind;

typedef struct {
    DataKind kind;
    int has_tokenizer; // without one, samples are printed as token ids
    Tokenizer tokenizer;
    int is_encoded; // text: its files are turned into shards first
    int is_unknown; // must be encoded, but nothing may be written: no data is open, --steps may be auto
    int is_warned;  // of what looks like a separator in the text
    DataSources train, val;
    Stories* stories; // the built-in corpus, NULL for other data:
    uint16_t *train_stories, *val_stories;
    float* val_nats; // entropy of each validation token, in nats
} RunData;

// ---- vocabulary and model ----

// Whether there are data to train on or to validate with.
static inline int setup_has_data(const RunData* data) { return data->kind != DATA_NONE; }

// Opens the tokenizer that goes with the data; the data itself is opened by setup_data, when V and T are
// known. `model_path` is the path of the model's files, or NULL.
void setup_tokenizer(RunData* data, Options* options, const char* model_path);

// The same for generating texts: there are no data.
void setup_text_tokenizer(RunData* data, Options* options, const char* model_path);

// The file or directory that --model names, or NULL when it names a size, or nothing. Of a run's directory it is the
// newest checkpoint, whose name is put into `path`.
const char* setup_model_path(const Options* options, char path[PATH_MAX]);

// Decides the model. `path` is the model file, or NULL for random weights.
GPT2Config setup_model(Options* options, const RunData* data, const char* path);

// ---- the run ----

// Sequences of a validation, of all processes: those of --eval-batches micro-batches, at most `epoch`.
int64_t setup_eval_sequences(const Options* options, uint64_t epoch);

// The id that separates documents: the last of every vocabulary.
int setup_eot(const RunData* data, int V);

// Opens the data and decides everything about the run that is still "auto"; after setup_model. Of --plan and
// --print-config the data may stay unknown (data->is_unknown): then --steps stays as it is.
void setup_data(RunData* data, Options* options);

// Opens files as tokens of the run, which may be text or shards; after setup_data. `data` and `list` stay.
void setup_open_text(DataSources* sources, const RunData* data, const Options* options, const char* list);

// Bytes of text that these targets stand for: those of end-of-text, and of -1, are 0. 0 without a tokenizer.
double setup_target_bytes(const RunData* data, const int* targets, size_t count);

// Opens the loaders of training and validation data, and says what they will read; after setup_data. `data`
// stays where it is until they are closed.
void setup_loaders(Dataloader* train, Dataloader* val, const RunData* data, const Options* options);

// Prints the start of a line about the run's data.
void setup_print_data(FILE* file, const RunData* data);

// --verify-data: checks all files and says so. Returns the exit status.
int setup_verify_data(const Options* options);

// Decides what is still "auto" about generating texts; after setup_model.
void setup_texts(Options* options);

// Refuses --quantize where the run cannot use it, and for a model whose rows are no whole blocks.
void setup_check_quantize(const Options* options, GPT2Config cfg);

// The same for --freeze, whose list needs the model; after the processes have met.
void setup_check_freeze(const Options* options, GPT2Config cfg);

// And for --share-layers with what takes the gradients of a block away before those of the next one are there.
void setup_check_share(const Options* options, GPT2Config cfg);

// Decides --products auto, and refuses bf16 where matrices are in 8 bits.
void setup_products(Options* options);

// The learning rate and all intervals; after setup_data. `has_weights`: the model is already trained. Values
// that depend on an unknown number of steps stay auto.
void setup_training(Options* options, int has_weights);

// Refuses --optimizer where the model or the run has no place for it.
void setup_check_optimizer(const Options* options, GPT2Config cfg);

// The optimizer of the run; a GPU's choice of master weights is not in it.
Optimizer setup_optimizer(const Options* options);

// Its settings for update number t (from 1) at `step`, for a gradient of this norm.
Update setup_update(const Options* options, int64_t step, int64_t t, double norm);

// The entropy, in nats per token, of the targets that a validation of `sequences` looks at; NAN
// if unknown.
double setup_floor(const RunData* data, int64_t sequences);

// The tokenizer that goes with the saved model, or NULL if the data are only token ids.
const Tokenizer* setup_saved_tokenizer(const RunData* data);

// Whether validation comes before the first step, too: but not if nobody asked for validations and this one
// would take a CPU long. `flops` are per token, forward and backward.
int setup_validates_first(const Options* options, double flops, int64_t sequences);

// Reports bad names of exports before training.
void setup_check_exports(const Options* options);

// The final model on its way into the files that --export-llmc and --export-gguf name, a group of parameters (gpt2.h)
// at a time.
typedef struct {
    const Options* options;
    const RunData* data;
    LlmcBinWriter llmc;
    GgufWriter gguf;
} SetupExport;

int setup_exports(const Options* options); // whether there is such a file

void setup_export_open(SetupExport* files, GPT2Config cfg, const Options* options, const RunData* data);

// Writes group g, fp32 in memory that has only this group, laid out by `rows`.
void setup_export_group(SetupExport* files, const TensorRow* rows, int g, const void* group);

// After all groups.
void setup_export_close(SetupExport* files);

// The tokens that samples start with: end-of-text, then --prompt. `ids` has room for max + 1; returns their
// number.
int setup_prompt(int* ids, int max, const RunData* data, const Options* options, int V);

// The same for any text of `bytes`. Returns 0 with the reason in `error` if it cannot be encoded or is too long; else sets
// *count.
int setup_try_prompt(int* ids, int* count, int max, const RunData* data, int V, const char* text,
                     size_t bytes, char* error);

// Whether the command line asks for samples, also of a finished run.
int setup_asks_for_samples(const Options* options);

void setup_close(RunData* data);

#ifdef __cplusplus
}
#endif

#ifdef SETUP_IMPLEMENTATION

#include <errno.h>
#include <glob.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/data/pack.h"
#include "llmc/data/text_data.h"
#include "llmc/data/tokens.h"
#include "llmc/formats/hf_model.h"
#include "llmc/run/checkpoint_directory.h"
#include "llmc/run/schedule.h"
#include "llmc/run/state.h"
#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/bf16_tile.h"
#include "llmc/freeze.h"
#include "llmc/share.h"
#include "llmc/linear.h"
#include "llmc/quantized.h"

// ---- vocabulary and model ----

static void setup_stories_tokenizer_(RunData* data) {
    data->stories = (Stories*)check_alloc(1, sizeof(Stories), "stories");
    stories_open(data->stories);
    const int words = data->stories->eot;
    const char** word = (const char**)check_alloc((size_t)words, sizeof(*word), "vocabulary");
    for (int i = 0; i < words; i++) {
        word[i] = data->stories->token[i];
    }
    tokenizer_open_words(&data->tokenizer, word, words);
    free(word);
}

// Whether the program only says what it would do, and writes nothing.
static int setup_is_dry_(const Options* options) {
    return options->plan || options->print_config || options->verify_data;
}

// How text is read and encoded.
static TextData setup_text_(const Options* options, const Bpe* bpe, const char* directory) {
    const TextDataMode mode = setup_is_dry_(options) ? TEXT_DATA_FIND : TEXT_DATA_ENCODE;
    const TextData text = {bpe, options->text_field, options->separator, directory, stdout, mode, 1};
    return text;
}

// --tokenizer bpe:N: sets path (PATH_MAX) to the vocabulary beside the run, which is trained on the text the
// first time; unless nothing may be written: then path is "". Returns N.
static int setup_own_vocabulary_(RunData* data, const Options* options, char* path) {
    char* end;
    const long V = strtol(options->tokenizer + strlen("bpe:"), &end, 10);
    if (*end || V < 257 || V > BPE_MAX_VOCAB) {
        die_usage("--tokenizer %s: wanted bpe:N with N tokens, from 257 to %d", options->tokenizer,
                  BPE_MAX_VOCAB);
    }
    if (!options->out[0] || sources_kind(options->train_data) != TOKENS_TEXT) {
        die_usage("--tokenizer %s needs text as --train-data, and --out to keep the vocabulary",
                  options->tokenizer);
    }
    file_join(path, options->out, "tokenizer.json");
    const int is_kept = access(path, F_OK) == 0;
    if (!is_kept && setup_is_dry_(options)) {
        path[0] = '\0';
        return (int)V;
    }
    if (!is_kept) {
        const TextData text = setup_text_(options, NULL, NULL);
        Bpe bpe;
        file_make_directory(options->out);
        text_data_train(&bpe, &text, options->train_data, (int)V);
        bpe_write(&bpe, path);
        bpe_close(&bpe);
        data->is_warned = 1;
    }
    Bpe kept;
    bpe_open(&kept, path);
    CHECK(kept.vocab_size == V, "%s: %d tokens, wanted %ld; remove it to train another", path,
          kept.vocab_size, V);
    bpe_close(&kept);
    return (int)V;
}

// A stand-in for a vocabulary of V tokens that is not trained yet: it has its size, and knows bytes.
static void setup_untrained_tokenizer_(Tokenizer* tokenizer, int V) {
    memset(tokenizer, 0, sizeof(*tokenizer));
    tokenizer->kind = "gpt2";
    tokenizer->bpe = (Bpe*)check_alloc(1, sizeof(Bpe), "tokenizer");
    bpe_open_bytes(tokenizer->bpe);
    tokenizer->encoder = (BpeEncoder*)check_alloc(1, sizeof(BpeEncoder), "tokenizer");
    bpe_encoder_open(tokenizer->encoder, tokenizer->bpe);
    tokenizer->vocab_size = V;
    tokenizer->eot = V - 1;
}

static void setup_file_tokenizer_(RunData* data, const Options* options) {
    char path[PATH_MAX];
    const int is_own = strncmp(options->tokenizer, "bpe:", 4) == 0;
    const int V = is_own ? setup_own_vocabulary_(data, options, path) : 0;
    data->is_unknown = is_own && !path[0];
    data->has_tokenizer = 1;
    if (data->is_unknown) {
        setup_untrained_tokenizer_(&data->tokenizer, V);
    } else {
        tokenizer_open_file(&data->tokenizer, is_own ? path : options->tokenizer);
    }
}

// A run that only evaluates: no data, and a tokenizer only if there is one.
static void setup_no_data_(RunData* data, const Options* options) {
    data->kind = DATA_NONE;
    data->has_tokenizer = options->tokenizer[0] != '\0';
    if (data->has_tokenizer) {
        tokenizer_open_file(&data->tokenizer, options->tokenizer);
    }
}

// Without --train-data: the built-in stories, or no data for a model with other tokens.
static void setup_no_files_(RunData* data, const Options* options) {
    RunData stories;
    if (options_only_evaluates(options)) {
        setup_no_data_(data, options);
        return;
    }
    memset(&stories, 0, sizeof(stories));
    setup_stories_tokenizer_(&stories);
    data->kind = DATA_STORIES;
    data->has_tokenizer = 1;
    if (options->tokenizer[0]) {
        tokenizer_open_file(&data->tokenizer, options->tokenizer); // in its place: it points into itself
        data->kind = tokenizer_is_same(&data->tokenizer, &stories.tokenizer) ? DATA_STORIES : DATA_NONE;
    }
    if (data->kind == DATA_STORIES) {
        tokenizer_close(&data->tokenizer);
        data->tokenizer = stories.tokenizer; // words do not
        data->stories = stories.stories;
        return;
    }
    tokenizer_close(&stories.tokenizer);
    free(stories.stories);
    if (options->steps != 0 || !options->model[0]) {
        die_usage(
            "%s %s has its own tokens, but the built-in stories are made of words; wanted --train-data%s",
            options_given(options, "tokenizer") ? "--tokenizer" : "--model", options->tokenizer,
            options->model[0] ? ", or --steps 0 to sample from the model" : "");
    }
}

void setup_tokenizer(RunData* data, Options* options, const char* model_path) {
    memset(data, 0, sizeof(*data));
    if (!options->tokenizer[0] && model_path && tokenizer_is_in(model_path)) {
        options->tokenizer = model_path;
    }
    const int is_text = options->train_data[0] && sources_kind(options->train_data) == TOKENS_TEXT;
    if (!options->train_data[0]) {
        setup_no_files_(data, options);
    } else if (is_text && !options->tokenizer[0]) {
        text_data_require_plain(options->train_data);
        data->kind = DATA_TEXT;
        tokenizer_open_bytes(&data->tokenizer);
        data->has_tokenizer = 1;
    } else {
        data->kind = DATA_SHARDS;
        data->is_encoded = is_text;
        if (options->tokenizer[0]) {
            setup_file_tokenizer_(data, options);
        }
        CHECK(!is_text || data->tokenizer.encoder, "text cannot be encoded%s%s",
              data->tokenizer.decode_only ? ", only decoded: "
                                          : ": the tokenizer only knows the words of its list",
              data->tokenizer.decode_only ? data->tokenizer.decode_only : "");
    }
}

void setup_text_tokenizer(RunData* data, Options* options, const char* model_path) {
    memset(data, 0, sizeof(*data));
    data->kind = DATA_NONE;
    if (!options->tokenizer[0] && tokenizer_is_in(model_path)) {
        options->tokenizer = model_path;
    }
    if (!options->tokenizer[0]) {
        die_usage("%s has no tokenizer; wanted --tokenizer FILE: the tokenizer.json, merges.txt or .tiktoken "
                  "that goes with "
                  "the model",
                  model_path);
    }
    tokenizer_open_file(&data->tokenizer, options->tokenizer);
    data->has_tokenizer = 1;
}

static int setup_is_directory_(const char* path) {
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

// Whether `directory` is one of a run, and no model. Sets path to its newest checkpoint.
static int setup_is_run_(char path[PATH_MAX], const char* directory) {
    char config[PATH_MAX];
    SavedState saved;
    if (!setup_is_directory_(directory)) {
        return 0;
    }
    file_join(config, directory, "config.json");
    const int found = access(config, F_OK) == 0 ? 0 : checkpoint_newest(path, &saved, directory, NULL, NULL);
    CHECK(found >= 0, "--model %s: every checkpoint is damaged", directory);
    if (found) {
        state_close(&saved);
    }
    return found;
}

const char* setup_model_path(const Options* options, char path[PATH_MAX]) {
    struct stat info;
    if (!options->model[0] || gpt2_model_by_name(options->model)) {
        return NULL;
    }
    const int found = stat(options->model, &info) == 0;
    if (!found && !strchr(options->model, '/') && !tokens_is_shard(options->model)) {
        die_usage("--model %s is neither a file nor a known size (d6 d12 d24 d36 d48 d60 d72 d84, gpt3:c384 "
                  "... c12288)",
                  options->model);
    }
    CHECK(found, "%s: cannot read the model: %s", options->model, strerror(errno));
    return setup_is_run_(path, options->model) ? path : options->model;
}

// The sizes of the model that setup_model_path found.
static GPT2Config setup_read_config_(const char* path) {
    return setup_is_directory_(path) ? hf_config_read(path) : llmc_bin_read_config(path);
}

// Puts the model's size where the option is "auto"; with a model file the two must agree.
static void setup_size_(int* option, int model, const char* name, const char* path) {
    if (*option == OPTION_AUTO) {
        *option = model;
    } else if (path && *option != model) {
        die_usage("--%s is %d, but the model in %s has %d", name, *option, path, model);
    }
}

// Whether a model's vocabulary fits a tokenizer: the same size, or rounded up to a multiple of 64 or 128.
static int setup_fits_(int model_V, int V) {
    return model_V == V || model_V == (V + 63) / 64 * 64 || model_V == gpt2_padded_vocab(V);
}

static int setup_share_layers_(const Options* options) {
    char error[ERROR_BYTES];
    int share;
    if (!share_parse(&share, options->layers, options->share_layers, error)) {
        die_usage("%s", error);
    }
    return share;
}

GPT2Config setup_model(Options* options, const RunData* data, const char* path) {
    const int insists = options->vocab_size != OPTION_AUTO; // or is a run that resumes
    const GPT2NamedModel unnamed = {"", SETUP_LAYERS, SETUP_CHANNELS, SETUP_HEADS,
                                    options->seq_len > 0 ? options->seq_len : SETUP_CONTEXT};
    const GPT2NamedModel* named = path ? NULL : gpt2_model_by_name(options->model);
    named = named ? named : &unnamed;
    const int V = data->has_tokenizer ? data->tokenizer.vocab_size : GPT2_VOCAB;
    GPT2Config cfg = {named->max_T, V, 0, named->L, named->NH, named->C, SHARE_OFF};
    if (path) {
        cfg = setup_read_config_(path);
    }
    setup_size_(&options->layers, cfg.L, "layers", path);
    setup_size_(&options->channels, cfg.C, "channels", path);
    setup_size_(&options->heads, cfg.NH, "heads", path);
    setup_size_(&options->context, cfg.max_T, "context", path);
    setup_size_(&options->vocab_size, cfg.V, "vocab-size", path);
    const GPT2Config chosen = {options->context,
                               options->vocab_size,
                               path ? cfg.Vp : gpt2_padded_vocab(options->vocab_size),
                               options->layers,
                               options->heads,
                               options->channels,
                               setup_share_layers_(options)};
    if (chosen.C % chosen.NH) {
        die_usage("--channels %d is not a multiple of --heads %d", chosen.C, chosen.NH);
    }
    if (data->has_tokenizer && chosen.V < V) {
        die_usage("the vocabulary is %d; wanted at least the %d tokens of the tokenizer (%s)", chosen.V, V,
                  data->tokenizer.kind);
    }
    if (data->has_tokenizer && path && !insists && !setup_fits_(chosen.V, V)) {
        die_usage("%s has a vocabulary of %d, the tokenizer has %d tokens (%s); wanted the model's own "
                  "--tokenizer, or --vocab-size %d to use this one anyway",
                  path, chosen.V, V, options->tokenizer[0] ? options->tokenizer : data->tokenizer.kind,
                  chosen.V);
    }
    return chosen;
}

// ---- the run ----

static void setup_seq_len_(Options* options) {
    if (options->seq_len == OPTION_AUTO) {
        options->seq_len = options->context;
    }
    if (options->seq_len > options->context) {
        die_usage("--seq-len is %d; wanted at most the model's context of %d tokens", options->seq_len,
                  options->context);
    }
}

// A micro-batch that fits into an update without a rest; with --update-in-backward it is all of it.
static int setup_auto_batch_(const Options* options) {
    const int64_t sequences = options->total_batch / options->seq_len;
    if (options->update_in_backward && 0 < sequences && sequences <= INT_MAX) {
        return (int)sequences;
    }
    int batch = SETUP_BATCH_TOKENS > options->seq_len ? SETUP_BATCH_TOKENS / options->seq_len : 1;
    while (options->total_batch != OPTION_AUTO && batch > 1 &&
           options->total_batch % ((int64_t)batch * options->seq_len)) {
        batch--;
    }
    return batch;
}

// Gives every process a micro-batch, if it can; as many sequences are validated as before.
static void setup_share_batch_(Options* options) {
    const int64_t sequences = options->total_batch / options->seq_len;
    const int64_t share = (sequences + options->processes - 1) / options->processes;
    const int whole = options->batch;
    for (int batch = whole; batch >= share; batch--) {
        options->batch = whole % batch == 0 ? batch : options->batch;
    }
    options->eval_batches *= whole / options->batch;
}

// Decides the sizes of batches; after setup_model. What an update is does not depend on the number of processes: they
// share it.
static void setup_batch_(Options* options) {
    const int is_auto = options->batch == OPTION_AUTO;
    setup_seq_len_(options);
    if (is_auto) {
        options->batch = setup_auto_batch_(options);
    }
    if (options->total_batch == OPTION_AUTO) {
        options->total_batch = (int64_t)options->batch * options->seq_len;
    }
    if (options->total_batch % options->seq_len) {
        die_usage("--total-batch is %lld tokens; wanted a multiple of --seq-len %d",
                  (long long)options->total_batch, options->seq_len);
    }
    if (is_auto) {
        setup_share_batch_(options);
    }
}

int64_t setup_eval_sequences(const Options* options, uint64_t epoch) {
    const int64_t most = (int64_t)options->eval_batches * options->batch, all = (int64_t)epoch;
    return most > 0 && most < all ? most : all;
}

// Tokens of n batches (at least one), up to a limit, and one more as the last target. The product may be too
// large for any integer, because users may ask for anything.
static size_t setup_stories_tokens_(int64_t batches, int64_t batch_tokens) {
    const int64_t max = SETUP_STORIES_MAX_TOKENS;
    batches = batches > 1 ? batches : 1;
    return (size_t)(batches <= max / batch_tokens ? batches * batch_tokens : max) + 1;
}

int setup_eot(const RunData* data, int V) { return data->has_tokenizer ? data->tokenizer.eot : V - 1; }

// Writes the built-in corpus: enough training text that nothing is read twice, up to a limit.
static void setup_stories_(RunData* data, Options* options) {
    if (options->steps == OPTION_AUTO) {
        options->steps = SETUP_STORIES_STEPS;
    }
    const size_t train = setup_stories_tokens_(options->steps, options->total_batch);
    const size_t val = setup_stories_tokens_(options->eval_batches ? options->eval_batches : 20,
                                             (int64_t)options->batch * options->seq_len);
    data->train_stories = (uint16_t*)check_alloc(train, sizeof(uint16_t), "stories");
    data->val_stories = (uint16_t*)check_alloc(val, sizeof(uint16_t), "stories");
    data->val_nats = (float*)check_alloc(val, sizeof(float), "stories");
    stories_generate(data->stories, data->train_stories, NULL, train, SETUP_STORIES_PAGE, options->seed);
    stories_generate(data->stories, data->val_stories, data->val_nats, val, SETUP_STORIES_PAGE,
                     SETUP_STORIES_SEED);
    sources_open_memory(&data->train, data->train_stories, train, options->vocab_size, "built-in stories");
    sources_open_memory(&data->val, data->val_stories, val, options->vocab_size, "built-in stories");
}

// Opens a list of files, or the shards of text that is encoded first. Returns whether they are known.
static int setup_sources_(DataSources* sources, const RunData* data, const Options* options, const char* list,
                          const char* directory) {
    const int is_text = sources_kind(list) == TOKENS_TEXT;
    if (!data->is_encoded || !is_text) {
        sources_open_files(sources, list, (TokensFormat)options->data_format, options->vocab_size);
        if (is_text) {
            text_data_warn(stdout, sources);
        }
        return 1;
    }
    Bpe bytes;
    bpe_open_bytes(&bytes);
    const Bpe* bpe = data->kind == DATA_TEXT ? &bytes : data->tokenizer.bpe;
    TextData text = setup_text_(options, bpe, directory);
    text.warns = !data->is_warned;
    char* shards = text_data_shards(&text, list);
    if (shards) {
        sources_open_files(sources, shards, TOKENS_AUTO, options->vocab_size);
        sources_rename(sources, list);
    }
    free(shards);
    bpe_close(&bytes);
    return shards != NULL;
}

// The number of files of a list, which must all exist: missing ones are reported before others are encoded.
static size_t setup_count_files_(const char* list) {
    SourceList sources;
    size_t count = 0;
    sources_read_list(&sources, list);
    for (int i = 0; i < sources.count && list[0]; i++) {
        glob_t files = tokens_list(sources.names[i]);
        count += files.gl_pathc;
        for (size_t k = 0; k < files.gl_pathc; k++) {
            CHECK(access(files.gl_pathv[k], R_OK) == 0, "%s: cannot open the data: %s", files.gl_pathv[k],
                  strerror(errno));
        }
        globfree(&files);
    }
    free(sources.text);
    return count;
}

// Where encoded text goes: beside the run or, without --out, into a directory that is removed as soon as it
// is mapped. Sets path (PATH_MAX). Returns 0 if there is no such directory and none may be created.
static int setup_encoded_directory_(const Options* options, char* path) {
    const int is_kept = options->out[0] != '\0';
    if (is_kept) {
        file_join(path, options->out, "tokens");
    }
    if (setup_is_dry_(options)) {
        return is_kept && setup_is_directory_(path);
    }
    if (is_kept) {
        file_make_directory(path);
    } else {
        text_data_make_temporary(path);
    }
    return 1;
}

// Refuses options that do not go together.
static void setup_check_files_(const RunData* data, const Options* options) {
    const int is_text = data->is_encoded || data->kind == DATA_TEXT;
    if (options->separator[0] && !is_text) {
        die_usage("--separator %s is only for text: --train-data %s is already split into documents",
                  options->separator, options->train_data);
    }
    if (options->val_data[0] && !data->is_encoded &&
        (sources_kind(options->val_data) == TOKENS_TEXT) != (data->kind == DATA_TEXT)) {
        die_usage("--val-data %s and --train-data %s: wanted both shards or both text", options->val_data,
                  options->train_data);
    }
}

// Opens the files. Returns whether the data is known.
static int setup_files_(RunData* data, const Options* options) {
    char directory[PATH_MAX] = "";
    setup_check_files_(data, options);
    const size_t files = setup_count_files_(options->train_data) + setup_count_files_(options->val_data);
    if (data->kind == DATA_TEXT) { // bytes, with a separator, or of more files than can be mapped
        data->is_encoded = options->separator[0] || files > SETUP_MAPPED_FILES;
    }
    if (data->is_unknown || (data->is_encoded && !setup_encoded_directory_(options, directory)) ||
        !setup_sources_(&data->train, data, options, options->train_data, directory)) {
        return 0;
    }
    if (!options->val_data[0]) {
        sources_split_tail(&data->train, &data->val, options->seq_len);
    } else if (!setup_sources_(&data->val, data, options, options->val_data, directory)) {
        return 0;
    }
    text_data_remove_temporary();
    return 1;
}

// Makes the rows. Validation reads in order, and rows sorted by length would start with short documents only.
static void setup_rows_(RunData* data, const Options* options) {
    const Packing pack = (Packing)options->pack, val_pack = pack == PACK_UNIFORM ? PACK_DYNAMIC : pack;
    const int eot = setup_eot(data, options->vocab_size);
    if (pack == PACK_UNIFORM && data->train.count > 1) {
        die_usage("--pack uniform needs one source; --train-data has %d sources", data->train.count);
    }
    sources_pack(&data->train, pack, options->seq_len, eot, (DocumentMask)options->doc_mask);
    sources_pack(&data->val, val_pack, options->seq_len, eot, (DocumentMask)options->doc_mask);
}

// --epochs and --steps: how long the run is, before the data is known. --epochs replaces a number of steps
// from a checkpoint.
static void setup_length_(const RunData* data, Options* options) {
    if (options->epochs <= 0) {
        return;
    }
    if (data->kind == DATA_STORIES) {
        die_usage("--epochs %g needs --train-data: the built-in stories are endless",
                  (double)options->epochs);
    }
    if (options_given(options, "steps") && options->steps != OPTION_AUTO) {
        die_usage("--epochs %g and --steps %lld: wanted only one of them", (double)options->epochs,
                  (long long)options->steps);
    }
    options->steps = OPTION_AUTO;
}

// The steps of an epoch, or of --epochs; from now on --steps has their number.
static void setup_epochs_(const RunData* data, Options* options) {
    const int64_t tokens = (int64_t)sources_epoch(&data->train) * options->seq_len;
    const int64_t steps = tokens > options->total_batch ? tokens / options->total_batch : 1;
    if (options->steps == OPTION_AUTO) {
        options->steps = steps;
    }
    if (options->epochs > 0) {
        const double wanted = (double)options->epochs * (double)tokens / (double)options->total_batch;
        if (wanted > SETUP_MAX_STEPS) {
            die_usage("--epochs %g is %.3g steps; wanted at most %.3g", (double)options->epochs, wanted,
                      SETUP_MAX_STEPS);
        }
        options->steps = wanted > 1 ? (int64_t)wanted : 1;
        options->epochs = 0;
    }
}

void setup_data(RunData* data, Options* options) {
    setup_batch_(options);
    if (!setup_has_data(data)) {
        return;
    }
    setup_length_(data, options);
    if (data->kind == DATA_STORIES && options->val_data[0]) {
        die_usage("--val-data %s needs --train-data: the built-in stories bring their own",
                  options->val_data);
    }
    if (data->kind == DATA_STORIES && options->separator[0]) {
        die_usage("--separator %s needs --train-data: the built-in stories are tokens", options->separator);
    }
    if (data->kind == DATA_STORIES) {
        setup_stories_(data, options);
    } else {
        data->is_unknown = !setup_files_(data, options);
    }
    if (!data->is_unknown) {
        setup_rows_(data, options);
        setup_epochs_(data, options);
    }
}

void setup_open_text(DataSources* sources, const RunData* data, const Options* options, const char* list) {
    char directory[PATH_MAX] = "";
    RunData text = *data;
    const int is_text = sources_kind(list) == TOKENS_TEXT;
    const int is_bytes = data->has_tokenizer && strcmp(data->tokenizer.kind, "bytes") == 0;
    CHECK(!is_text || is_bytes || (data->has_tokenizer && data->tokenizer.encoder),
          "%s: text, wanted a --tokenizer that encodes any text", list);
    text.kind = is_bytes ? DATA_TEXT : DATA_SHARDS;
    text.is_encoded = is_text && (!is_bytes || options->separator[0]);
    setup_count_files_(list);
    if (is_text && is_bytes) {
        text_data_require_plain(list);
    }
    if (text.is_encoded) {
        setup_encoded_directory_(options, directory);
    }
    setup_sources_(sources, &text, options, list, directory);
    text_data_remove_temporary();
}

double setup_target_bytes(const RunData* data, const int* targets, size_t count) {
    double bytes = 0;
    for (size_t i = 0; data->has_tokenizer && i < count; i++) {
        bytes += targets[i] < 0 ? 0 : tokenizer_bytes(&data->tokenizer, targets[i]);
    }
    return bytes;
}

// The loader of the validation data: a validation is one update.
static void setup_open_validation_(Dataloader* val, const RunData* data, const Options* options) {
    DataloaderSettings in_order;
    memset(&in_order, 0, sizeof(in_order));
    in_order.B = options->batch;
    in_order.sequences = setup_eval_sequences(options, sources_epoch(&data->val));
    in_order.shuffle = SHUFFLE_OFF;
    in_order.rank = options->process;
    in_order.num_processes = options->processes;
    dataloader_open(val, &data->val, in_order);
}

// Says how much of the work of an update would be done by processes that have nothing to do.
static void setup_print_batches_(const Options* options, int64_t sequences) {
    const int64_t micro_batches = (sequences + options->batch - 1) / options->batch, n = options->processes;
    const int64_t rows = (micro_batches + n - 1) / n * n * options->batch;
    if (rows > sequences) {
        printf("batches: %lld sequences an update in %lld micro-batches, %.1f %% empty\n",
               (long long)sequences, (long long)micro_batches,
               100.0 * (double)(rows - sequences) / (double)rows);
    }
}

void setup_loaders(Dataloader* train, Dataloader* val, const RunData* data, const Options* options) {
    const int64_t sequences = options->total_batch / options->seq_len; // of an update
    const int group = sequences < DATALOADER_GROUP ? (int)sequences : DATALOADER_GROUP;
    const DataloaderSettings settings = {options->batch,    sequences, (Shuffle)options->shuffle,
                                         options->seed,     group,     options->process,
                                         options->processes};
    dataloader_open(train, &data->train, settings);
    setup_open_validation_(val, data, options);
    setup_print_batches_(options, sequences);
    sources_print(stdout, &data->train, (uint64_t)options->steps * (uint64_t)sequences);
    if (options->pack == PACK_DYNAMIC || options->pack == PACK_UNIFORM) {
        const int batches = 1000;
        printf("padding of the first %d micro-batches: %.2f %%\n", batches,
               100 * dataloader_padding(train, batches));
    }
}

void setup_print_data(FILE* file, const RunData* data) {
    if (setup_has_data(data)) {
        fprintf(file, "data: %zu training tokens, %zu for validation; ", data->train.tokens,
                data->val.tokens);
    } else {
        fputs("data: none; ", file);
    }
}

int setup_verify_data(const Options* options) {
    const TokensFormat format = (TokensFormat)options->data_format;
    const TextData text = setup_text_(options, NULL, NULL);
    int bad = 0;
    if (!options->train_data[0]) {
        printf("ok   built-in stories: no files\n");
        return EXIT_SUCCESS;
    }
    bad += text_data_verify(stdout, options->train_data, format, options->vocab_size, &text);
    if (options->val_data[0]) {
        bad += text_data_verify(stdout, options->val_data, format, options->vocab_size, &text);
    }
    printf("%d bad file%s\n", bad, bad == 1 ? "" : "s");
    return bad ? EXIT_FAILURE : EXIT_SUCCESS;
}

// An interval in steps that is due only at the end.
static int64_t setup_only_at_end_(int64_t steps) {
    return steps < 1 ? 1 : steps < 1000000000 ? steps : 1000000000;
}

// GPT-3's rates (Brown et al., 2020, table 2.1) fall about as 1 / C, for batches of half a million tokens;
// smaller ones are noisier and need lower rates, by their fourth root as far as the built-in run shows
// (dev/LOG.md).
static float setup_lr_(int C, int64_t total_batch) {
    const double batch = fmin((double)total_batch / SETUP_FULL_BATCH, 1);
    return (float)fmin(6e-4 * 768 / C * sqrt(sqrt(batch)), 4e-3);
}

// The mean of squares should remember as many tokens whatever the batch (Marek et al., "Small batch size
// training for language models", 2025): GPT-3's 0.95 for its batch of half a million tokens, more for less.
// The limit keeps the memory, a thousand updates, shorter than a run.
static float setup_beta2_(int64_t total_batch) {
    const float beta2 = (float)pow(0.95, (double)total_batch / SETUP_FULL_BATCH);
    return beta2 > 0.95f ? fminf(beta2, 0.999f) : 0.95f;
}

// The intervals: after the number of steps is known.
static void setup_times_(Options* options) {
    if (options->save_every == OPTION_AUTO) {
        options->save_every = options->out[0] ? (int)setup_only_at_end_(options->steps) : 0;
    }
    if (options->warmup == OPTION_AUTO) {
        options->warmup = (int)(options->steps / 20 < 2000 ? options->steps / 20 : 2000);
    }
    if (options->eval_every == OPTION_AUTO) {
        const int64_t every = options->steps / 10;
        options->eval_every = (int)(every < 1 ? 1 : every > 1000 ? 1000 : every);
    }
    if (options->sample_every == OPTION_AUTO) { // at the end
        options->sample_every = (int)setup_only_at_end_(options->steps);
    }
    if (options->tasks_every == OPTION_AUTO) {
        options->tasks_every = options_has_tasks(options) ? (int)setup_only_at_end_(options->steps) : 0;
    }
}

// Refuses options of tasks without tasks; the values that --print-config prints then are none.
static void setup_check_tasks_(const Options* options) {
    if (!options_has_tasks(options) && options->tasks_every > 0) {
        die_usage("--tasks-every needs --tasks, --hellaswag or --perplexity");
    }
    if (!options_has_tasks(options) && options->tasks_max > 0) {
        die_usage("--tasks-max needs --tasks, --hellaswag or --perplexity");
    }
    if (options->stride != OPTION_AUTO && !options->perplexity[0]) {
        die_usage("--stride needs --perplexity");
    }
}

// A run that only evaluates: no optimizer, no samples unless they are asked for, and nothing to save.
static void setup_only_evaluate_(Options* options) {
    if (strcmp(options->resume, "off") != 0 && strcmp(options->resume, "0") != 0) {
        die_usage("--resume %s and --steps 0 with tasks: wanted --model with the directory of the checkpoint",
                  options->resume);
    }
    if (options->save_every > 0) {
        die_usage("--save-every %d and --steps 0 with tasks: there is nothing to save", options->save_every);
    }
    options->save_every = 0;
    options->master_weights = options->offload_optimizer = options->zero = 0;
    options->offload_params = options->offload_residuals = options->update_in_backward = 0;
    if (!setup_asks_for_samples(options)) {
        options->sample_every = options->sample_every == OPTION_AUTO ? 0 : options->sample_every;
        options->recompute = options->recompute == OPTION_AUTO ? RECOMPUTE_BLOCK : options->recompute;
    }
}

// Ends the program if options of offloading contradict each other, or others.
static void setup_check_offload_(const Options* o) {
    if (o->offload_optimizer == OFFLOAD_DISK && !o->offload_path[0]) {
        die_usage("--offload-optimizer disk needs a directory: --offload-path");
    }
    if (o->offload_optimizer != OFFLOAD_DISK && o->offload_path[0]) {
        die_usage("--offload-path %s without --offload-optimizer disk; wanted both", o->offload_path);
    }
    if (o->offload_params && o->zero != 3) {
        die_usage("--offload-params on, --zero %d; wanted --zero 3, which divides the parameters", o->zero);
    }
    if (o->offload_residuals && o->recompute != RECOMPUTE_BLOCK && o->recompute != OPTION_AUTO) {
        die_usage("--offload-residuals on, --recompute %s; wanted --recompute %s, which keeps nothing else "
                  "of a block",
                  gpt2_recompute_word(o->recompute), gpt2_recompute_word(RECOMPUTE_BLOCK));
    }
}

// Ends the program if updates cannot be made during the backward pass. CUDA graphs, whose kernels would all have the numbers
// of one update, are off.
static void setup_check_in_backward_(Options* o) {
    const int64_t sequences = o->total_batch / o->seq_len;
    if (!o->update_in_backward) {
        return;
    }
    if (o->processes > 1) {
        die_usage(
            "--update-in-backward on, %d processes; wanted one, or off with --zero 2, which divides the "
            "gradients among them",
            o->processes);
    }
    if (o->zero >= 2) {
        die_usage("--update-in-backward on, --zero %d, which keeps all gradients; wanted --zero 0", o->zero);
    }
    if (sequences > o->batch) {
        die_usage("--update-in-backward on: an update is one micro-batch; wanted --total-batch %lld, or a "
                  "--batch of %lld",
                  (long long)o->batch * o->seq_len, (long long)sequences);
    }
    if (o->skip_grad_z > 0) {
        die_usage("--update-in-backward on, --skip-grad-z %g: the norm is known after the update; wanted 0, "
                  "--skip-loss-z works",
                  (double)o->skip_grad_z);
    }
    if (o->offload_optimizer) {
        die_usage("--update-in-backward on, --offload-optimizer: wanted only one of them");
    }
    if (o->graph && options_given(o, "graph")) {
        die_usage("--update-in-backward on, --graph on; wanted --graph off");
    }
    o->graph = 0;
}

// The rate, the decay and beta2 that go with the optimizer. SGD divides by nothing: a gradient that is clipped to a norm of
// 1 needs 400 times AdamW's rate, and a decay of the usual size times that rate would be far too much. Lion's beta2 is its
// authors'.
static void setup_update_auto_(Options* options, int has_weights) {
    const int is_sgd = options->optimizer == OPTIMIZER_SGD;
    if (options->lr == OPTION_AUTO) {
        options->lr = setup_lr_(options->channels, options->total_batch) * (has_weights ? 0.1f : 1.0f) *
                      (is_sgd ? 400.0f : 1.0f);
    }
    if (options->weight_decay == OPTION_AUTO) {
        options->weight_decay = is_sgd ? 0.0f : 0.1f;
    }
    if (options->beta2 == OPTION_AUTO) {
        options->beta2 = options->optimizer == OPTIMIZER_LION ? 0.99f : setup_beta2_(options->total_batch);
    }
}

void setup_training(Options* options, int has_weights) {
    setup_check_tasks_(options);
    setup_check_offload_(options);
    if (options_only_evaluates(options)) {
        setup_only_evaluate_(options);
    }
    setup_check_in_backward_(options);
    if (options->steps != OPTION_AUTO) {
        setup_times_(options);
    }
    if (options->save_every > 0 && !options->out[0]) {
        die_usage("--save-every %d needs a directory: --out", options->save_every);
    }
    if (options->on_divergence == DIVERGENCE_ROLLBACK && !options->save_every) {
        die_usage("--on-divergence rollback needs checkpoints: --out and --save-every");
    }
    if (options->tensorboard && !options->out[0]) {
        die_usage("--tensorboard on writes into the directory of the run: give --out, too");
    }
    if (options->recompute == OPTION_AUTO && options->program.trainer == OPTION_CPU) {
        options->recompute = RECOMPUTE_GELU; // the GPU trainer asks its GPU
    }
    setup_update_auto_(options, has_weights);
    if (options->sample_tokens == OPTION_AUTO) {
        options->sample_tokens = options->seq_len < 256 ? options->seq_len : 256;
    }
}

void setup_texts(Options* options) {
    const int many = options->program.trainer == OPTION_GPU ? SETUP_TEXTS_GPU : SETUP_TEXTS_CPU;
    setup_seq_len_(options);
    if (options->batch == OPTION_AUTO) {
        options->batch = options->prompts[0] ? many : 1;
    }
    options->recompute = RECOMPUTE_NEVER;
    options->logits_chunk = options->batch;
}

void setup_products(Options* options) {
    const Products best = !options->quantize && bf16_kernel().is_hardware ? PRODUCTS_BF16 : PRODUCTS_FP32;
    if (options->products == PRODUCTS_AUTO) {
        options->products = best;
    }
    if (options->products == PRODUCTS_BF16 && options->quantize) {
        die_usage("--products bf16 with --quantize q8_0, whose products are those of 8 bits; wanted one of "
                  "the two");
    }
}

void setup_check_quantize(const Options* options, GPT2Config cfg) {
    if (!options->quantize) {
        return;
    }
    if (!options->generates && !options_only_evaluates(options)) {
        die_usage("--quantize q8_0 is for generating text, and for tasks with --steps 0; training needs "
                  "--quantize off");
    }
    if (options->export_llmc[0] || options->export_gguf[0]) {
        die_usage(
            "--quantize q8_0 has no weights to export; wanted off (--export-gguf-dtype q8_0 exports 8 bits)");
    }
    if (!quantized_fits((size_t)cfg.C)) {
        die_usage("--quantize q8_0: the model has %d channels, wanted a multiple of %d; --quantize off works",
                  cfg.C, QUANTIZED_BLOCK);
    }
}

void setup_check_freeze(const Options* o, GPT2Config cfg) {
    char error[ERROR_BYTES];
    Freeze freeze;
    if (!freeze_parse(&freeze, cfg.L, o->freeze, error) || !freeze_check_shared(&freeze, cfg, error)) {
        die_usage("%s", error);
    }
    if (freeze.first_block > 0 && o->zero == 3) {
        die_usage("--freeze %s, --zero 3; wanted --zero 2, since the backward pass ends at block %d",
                  o->freeze, freeze.first_block);
    }
    if (freeze.first_block > 0 && o->offload_residuals) {
        die_usage("--freeze %s, --offload-residuals on; wanted off, since the backward pass ends at block %d",
                  o->freeze, freeze.first_block);
    }
    const int in_lists = o->optimizer == OPTIMIZER_ADAFACTOR || o->optimizer == OPTIMIZER_MUON;
    if (o->program.trainer == OPTION_GPU && in_lists && !freeze_is_whole(&freeze, cfg.L)) {
        die_usage("--freeze %s, --optimizer %s; wanted all blocks of a parameter, or another optimizer: on "
                  "GPUs this "
                  "one updates all blocks of a parameter, or none",
                  o->freeze, optimizer_word((OptimizerName)o->optimizer));
    }
}

// In a loop of several blocks the gradients of all are there at the end, and not one after the other.
void setup_check_share(const Options* o, GPT2Config cfg) {
    if (!share_is_loop(cfg) || options_only_evaluates(o)) {
        return;
    }
    if (o->zero >= 2) {
        die_usage(
            "--share-layers %s, --zero %d; wanted --zero 1, or --share-layers all or pairs: here no block's "
            "gradients are complete before those of all are",
            o->share_layers, o->zero);
    }
    if (o->update_in_backward) {
        die_usage(
            "--share-layers %s, --update-in-backward on; wanted off, or --share-layers all or pairs: here no "
            "block's gradients are complete before those of all are",
            o->share_layers);
    }
}

// Of SGD and Adafactor: the share of the last update that is in the next one.
static float setup_momentum_(const Options* o) {
    return o->optimizer == OPTIMIZER_SGD         ? o->sgd_momentum
           : o->optimizer == OPTIMIZER_ADAFACTOR ? o->adafactor_beta1
                                                 : 0;
}

// Whether an option adds state to the optimizer.
static int setup_has_optional_(const Options* o) {
    return o->optimizer == OPTIMIZER_MUON ? o->muon_rows : setup_momentum_(o) > 0;
}

Optimizer setup_optimizer(const Options* options) {
    const Freeze freeze = freeze_of(options->layers, options->freeze);
    Optimizer optimizer =
        optimizer_of((OptimizerName)options->optimizer, setup_has_optional_(options), MASTER_NONE);
    optimizer.frozen = freeze.rows;
    optimizer.lr_scale[KIND_EMBEDDING] = options->embedding_lr_scale;
    optimizer.lr_scale[KIND_VECTOR] = options->vector_lr_scale;
    optimizer.sums_weights = options->adafactor_scale;
    optimizer.by_block = options->zero >= 2 || options->offload_optimizer || options->update_in_backward;
    return optimizer;
}

Update setup_update(const Options* options, int64_t step, int64_t t, double norm) {
    const float lr = schedule_lr((Schedule)options->schedule, step, options->steps, options->warmup,
                                 options->lr, options->final_lr_frac);
    const AdamW adamw = {
        lr,
        options->beta1,
        options->beta2,
        options->eps,
        options->weight_decay,
        options->grad_clip > 0 && norm > options->grad_clip ? (float)(options->grad_clip / norm) : 1.0f,
        t,
        options->cautious_decay ? DECAY_CAUTIOUS : DECAY_ALL,
    };
    const Update update = {adamw,
                           setup_momentum_(options),
                           options->adafactor_scale ? ADAFACTOR_RELATIVE : ADAFACTOR_FIXED,
                           options->matrix_lr * (lr / options->lr),
                           options->matrix_weight_decay,
                           (MuonScale)options->muon_scale};
    return update;
}

// Refuses options of another optimizer than the run's.
static void setup_check_rule_options_(const Options* o) {
    static const struct {
        const char* option;
        OptimizerName of;
    } rows[] = {{"sgd-momentum", OPTIMIZER_SGD},
                {"adafactor-beta1", OPTIMIZER_ADAFACTOR},
                {"adafactor-scale", OPTIMIZER_ADAFACTOR},
                {"matrix-lr", OPTIMIZER_MUON},
                {"matrix-weight-decay", OPTIMIZER_MUON},
                {"muon-scale", OPTIMIZER_MUON},
                {"muon-rows", OPTIMIZER_MUON}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (options_changed(o, rows[i].option) && o->optimizer != (int)rows[i].of) {
            die_usage("--%s is of --optimizer %s; this run has --optimizer %s", rows[i].option,
                      optimizer_word(rows[i].of), optimizer_word((OptimizerName)o->optimizer));
        }
    }
}

void setup_check_optimizer(const Options* o, GPT2Config cfg) {
    const char* word = optimizer_word((OptimizerName)o->optimizer);
    setup_check_rule_options_(o);
    if (o->cautious_decay && (o->optimizer == OPTIMIZER_ADAFACTOR || o->optimizer == OPTIMIZER_SGD)) {
        die_usage(
            "--cautious-decay on is not of --optimizer %s; wanted adamw, adamw8bit, muon or lion, or off",
            word);
    }
    if (o->optimizer == OPTIMIZER_ADAMW8BIT && cfg.C % OPTIMIZER_BLOCK) {
        die_usage(
            "--optimizer %s: the model has %d channels, wanted a multiple of %d; --optimizer adamw works",
            word, cfg.C, OPTIMIZER_BLOCK);
    }
}

double setup_floor(const RunData* data, int64_t sequences) {
    if (!data->val_nats) {
        return NAN;
    }
    const Rows* rows = &data->val.source[0].rows;
    uint64_t targets = 0;
    double sum = 0;
    for (uint64_t row = 0; row < (uint64_t)sequences && row < rows->count; row++) {
        sum += rows_sum_targets(rows, row, data->val_nats, &targets);
    }
    return sum / (double)targets;
}

const Tokenizer* setup_saved_tokenizer(const RunData* data) {
    return data->has_tokenizer ? &data->tokenizer : NULL;
}

int setup_validates_first(const Options* options, double flops, int64_t sequences) {
    const double max_flops = 3e12; // ten seconds of two cores
    const double forward_flops = flops / 3 * (double)sequences * options->seq_len;
    return options->steps == 0 || options_given(options, "eval-every") || forward_flops < max_flops;
}

// Whether two paths lead to the same file.
static int setup_is_same_file_(const char* a, const char* b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

// Ends the program if an export would overwrite a file that the run reads: `list` are names and patterns.
static void setup_spare_(const char* option, const char* path, const char* list) {
    SourceList sources;
    if (!list[0]) {
        return;
    }
    sources_read_list(&sources, list);
    for (int i = 0; i < sources.count; i++) {
        glob_t files = tokens_list(sources.names[i]);
        for (size_t k = 0; k < files.gl_pathc; k++) {
            if (setup_is_same_file_(path, files.gl_pathv[k])) {
                die_usage("%s %s: the run reads this file", option, path);
            }
        }
        globfree(&files);
    }
    free(sources.text);
}

// Ends the program if the file could not be written at the end.
static void setup_check_export_(const Options* options, const char* option, const char* path) {
    char directory[PATH_MAX];
    struct stat info;
    if (!path[0]) {
        return;
    }
    file_directory_of(directory, path);
    CHECK(access(directory, W_OK | X_OK) == 0, "%s %s: cannot write into %s: %s", option, path, directory,
          strerror(errno));
    CHECK(stat(path, &info) != 0 || S_ISREG(info.st_mode), "%s %s: %s", option, path,
          S_ISDIR(info.st_mode) ? "a directory, wanted the name of a file" : "not a regular file");
    setup_spare_(option, path, options->train_data);
    setup_spare_(option, path, options->val_data);
    if (setup_is_same_file_(path, options->model) || setup_is_same_file_(path, options->tokenizer)) {
        die_usage("%s %s: the run reads this file", option, path);
    }
}

void setup_check_exports(const Options* options) {
    const char *llmc = options->export_llmc, *gguf = options->export_gguf;
    if (llmc[0] && (strcmp(llmc, gguf) == 0 || setup_is_same_file_(llmc, gguf))) {
        die_usage("--export-llmc %s and --export-gguf %s: the same file", llmc, gguf);
    }
    setup_check_export_(options, "--export-llmc", llmc);
    setup_check_export_(options, "--export-gguf", gguf);
}

// Beside FILE.bin, a model of llm.c's, writes its tokenizer as FILE_tokenizer.bin, if that format can express
// it.
static void setup_export_tokenizer_(const char* file, const Tokenizer* tokenizer) {
    enum { MAX_BYTES = 255 }; // of a token, in that format
    char path[PATH_MAX];
    const int is_bin = file_ends_in(file, ".bin"), length = (int)strlen(file) - (is_bin ? 4 : 0);
    if (tokenizer_bpe(tokenizer) && tokenizer_longest(tokenizer) <= MAX_BYTES) {
        file_path(path, "%.*s_tokenizer.bin", length, file);
        bpe_write(tokenizer_bpe(tokenizer), path);
        printf("%s: the tokenizer; llm.c's programs expect it as gpt2_tokenizer.bin\n", path);
    }
}

int setup_exports(const Options* options) { return options->export_llmc[0] || options->export_gguf[0]; }

// The tokenizer that a GGUF file can have; NULL: none.
static const Bpe* setup_export_bpe_(const RunData* data) {
    return data->has_tokenizer ? tokenizer_bpe(&data->tokenizer) : NULL;
}

void setup_export_open(SetupExport* files, GPT2Config cfg, const Options* options, const RunData* data) {
    files->options = options;
    files->data = data;
    if (options->export_llmc[0]) {
        llmc_bin_create(&files->llmc, options->export_llmc, cfg, (ModelDtype)options->export_dtype);
    }
    if (options->export_gguf[0]) {
        gguf_create(&files->gguf, options->export_gguf, options->out[0] ? options->out : options->export_gguf,
                    cfg, (GgufDtype)options->export_gguf_dtype, setup_export_bpe_(data));
    }
}

void setup_export_group(SetupExport* files, const TensorRow* rows, int g, const void* group) {
    if (files->options->export_llmc[0]) {
        llmc_bin_put(&files->llmc, rows, g, group);
    }
    if (files->options->export_gguf[0]) {
        gguf_put(&files->gguf, rows, g, group);
    }
}

static void setup_export_close_gguf_(SetupExport* files) {
    const RunData* data = files->data;
    gguf_commit(&files->gguf);
    if (!setup_export_bpe_(data)) {
        fprintf(stderr, "warning: %s has no tokenizer (%s): llama.cpp cannot read or print text with it\n",
                files->options->export_gguf,
                !data->has_tokenizer          ? "the data are only token ids"
                : data->tokenizer.decode_only ? "no merges make these tokens"
                                              : "it knows no words");
    }
}

void setup_export_close(SetupExport* files) {
    if (files->options->export_llmc[0]) {
        llmc_bin_commit(&files->llmc);
        if (files->data->has_tokenizer) {
            setup_export_tokenizer_(files->options->export_llmc, &files->data->tokenizer);
        }
    }
    if (files->options->export_gguf[0]) {
        setup_export_close_gguf_(files);
    }
}

int setup_try_prompt(int* ids, int* count, int max, const RunData* data, int V, const char* text,
                     size_t bytes, char* error) {
    size_t tokens;
    int* encoded = (int*)check_alloc(bytes, sizeof(int), "prompt");
    int ok = tokenizer_try_encode(&data->tokenizer, text, bytes, encoded, &tokens, error);
    if (ok && tokens + 1 > (size_t)max) {
        ok = error_set(error, "prompt", "%zu tokens; wanted at most %d, one less than the sequence length",
                       tokens, max - 1);
    }
    if (ok) {
        ids[0] = setup_eot(data, V);
        memcpy(ids + 1, encoded, tokens * sizeof(int));
        *count = (int)tokens + 1;
    }
    free(encoded);
    return ok;
}

int setup_prompt(int* ids, int max, const RunData* data, const Options* options, int V) {
    char error[ERROR_BYTES];
    const char* text = options->prompt;
    int count = 1;
    ids[0] = setup_eot(data, V);
    if (text[0] && !data->has_tokenizer) {
        die_usage("--prompt needs --tokenizer: this data is only token ids");
    }
    const int ok = !text[0] || setup_try_prompt(ids, &count, max, data, V, text, strlen(text), error);
    CHECK(ok || !data->tokenizer.decode_only, "--%s", error); // the file is to blame, not the command line
    if (!ok) {
        die_usage("--%s", error);
    }
    return count;
}

int setup_asks_for_samples(const Options* options) {
    static const char* const names[] = {"prompt",      "samples", "sample-tokens",
                                        "temperature", "top-k",   "top-p"};
    int asks = 0;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        asks = asks || options_given(options, names[i]);
    }
    return asks && options->samples > 0;
}

void setup_close(RunData* data) {
    sources_close(&data->val);
    sources_close(&data->train);
    if (data->has_tokenizer) {
        tokenizer_close(&data->tokenizer);
    }
    free(data->val_nats);
    free(data->val_stories);
    free(data->train_stories);
    free(data->stories);
}

#endif // SETUP_IMPLEMENTATION

#endif
