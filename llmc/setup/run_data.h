/*
run_data.h -- the data of a run: its files, its tokens, and its data loaders.

    data                        tokens                               V of a new model
    none                        words of the built-in stories        their number
    text of any kind            bytes                                257
    text, --tokenizer           the tokenizer's (encoded_text.h)     the tokenizer's
    .bin shards                 GPT-2's, or the tokenizer's          50257, or the tokenizer's
    none, --steps 0, --model    the model's own                      the model's
    none, --steps 0, --tasks    the tokenizer's, or none             the model's
    none, --steps 0, --export-  the tokenizer's, or none             the model's

If a --model directory has a tokenizer's files, they are the default of --tokenizer.
*/
#ifndef LLMC_RUN_DATA_H
#define LLMC_RUN_DATA_H

#include <stdint.h>
#include <stdio.h>

#include "llmc/model/presets.h"
#include "llmc/data/dataloader.h"
#include "llmc/data/fill_in_middle.h"
#include "llmc/data/mixture.h"
#include "llmc/data/stories.h"
#include "llmc/data/target_mask.h"
#include "llmc/setup/options.h"
#include "llmc/setup/settled.h"
#include "llmc/tokenizer/chat_format.h"
#include "llmc/tokenizer/chat_marks.h"
#include "llmc/tokenizer/model_card.h"
#include "llmc/tokenizer/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    RUN_DATA_STORIES_STEPS = 3600, // about a minute on two cores
    RUN_DATA_STORIES_PAGE = 128,   // tokens; a story that crosses the end of a page is cut there
    RUN_DATA_MAPPED_FILES = 10000, // text files that are mapped at most; Linux allows 65530 maps
                                   // (vm.max_map_count)
    // seed of the validation stories, the same for every seed of the run
    RUN_DATA_STORIES_SEED = 271828,
    RUN_DATA_EVAL_CPU = 20 * 1024, // tokens of a validation: takes a small model seconds on a CPU
    // with fewer, the losses of large models are too noisy to compare
    RUN_DATA_EVAL_GPU = 1 << 20,
};
// most steps of --epochs; --steps has the same limit
#define RUN_DATA_MAX_STEPS 1e12
#define RUN_DATA_STORIES_MAX_TOKENS ((int64_t)1 << 27) // longer runs read the built-in text again

// A set of validations. Losses of sets with other checksums are not comparable.
typedef struct {
    const char* name; // "": the only one, without a name
    // of its files, of which sequences of them a validation reads, and of how these are packed
    uint64_t checksum;
} ValidationSet;

typedef enum { DATA_STORIES, DATA_TEXT, DATA_SHARDS, DATA_NONE } DataKind;

typedef struct {
    DataKind kind;
    int has_tokenizer; // without one, samples are printed as token ids
    Tokenizer tokenizer;
    int is_extended;         // the model's own tokenizer has only the first ids of `tokenizer`
    Tokenizer own_tokenizer; // then open
    int is_encoded;          // the data are text whose files are encoded into shards first
    int is_unknown;          // the data must be encoded, but nothing may be written: none are open
    int is_warned;           // true once the user is warned of a likely separator in the text
    FillInMiddle fim;        // of the training data
    DataSources train, val;
    DataSources* val_sets; // (num_val_sets) sets of --val-data with names; NULL: val is one set
    int num_val_sets;
    Stories* stories; // the built-in corpus; NULL for other data
    uint16_t *train_stories, *val_stories;
    float* val_nats; // entropy of each validation token, in nats
    // passes over the training data that the run makes; 0: unknown, or the data are endless
    double epochs;
    Answers answers;
    ChatMarks marks;     // of the chats that the run learns; without a layout: it learns none
    char* chat_template; // written for them; NULL: the model's own stays
} RunData;

// Returns true if the run has data to train on or to validate with.
static inline int run_data_has_tokens(const RunData* data) { return data->kind != DATA_NONE; }

// Returns true if the command line asks for validations. A run that does not train makes no others.
static inline int run_data_is_asked_for(const Options* options) {
    return options->data.train[0] || (options->eval.every > 0 && options_given(options, "eval-every"));
}

// ---- tokens ----

// Opens the tokenizer of the data, or of the model in `model_path` if the run generates text.
// run_data_open opens the data once V and T are known.
void run_data_open_tokenizer(RunData* data, const Settled* s, const char* model_path);

// Returns true if a model's vocabulary fits a tokenizer: the same size, or that rounded up to a
// multiple of 64 or 128.
static inline int run_data_fits(int model_V, int V) {
    return model_V == V || model_V == (V + 63) / 64 * 64 || model_V == model_padded_vocab(V);
}

// Compares the tokenizer of the run with the model's own, which stays open if the other extends it.
// Ends the program if they have other tokens, unless --vocab-size is given. Then one that fits is
// not compared: it may replace files that cannot be read.
void run_data_open_own_tokenizer(RunData* data, const Options* options, const char* model_path, int model_V);

// Ends the program if the files of another model have a tokenizer with other tokens than the run's.
void run_data_check_tokens(const RunData* data, const Options* options, const char* model_path);

// Returns the id that separates documents: the tokenizer's, or without one the last of the
// vocabulary.
int run_data_eot(const RunData* data, int V);

// Returns what the model's files say of it: the tokenizer's card, with what the run learns. It
// borrows texts of `data`.
ModelCard run_data_card(const RunData* data, int V);

// Returns the tokenizer to save with the model; NULL if the data are only token ids.
const Tokenizer* run_data_saved_tokenizer(const RunData* data);

// Sets `ids` to the tokens that samples start with: end-of-text, unless --start-token is off, then
// --prompt. An empty prompt always means end-of-text. `ids` has room for max + 1. Returns the
// number of tokens.
int run_data_prompt(int* ids, int max, const RunData* data, const Options* options, int V);

// Sets `ids` to the tokens before the middle between --prompt and --suffix (fill_in_middle.h), as
// run_data_prompt does.
int run_data_infill(int* ids, int max, const RunData* data, const Options* options, int V);

// Does the work of run_data_prompt for `text` of `bytes`, and sets *count to the number of tokens.
// Returns 0 with the reason in `error` if it cannot be encoded or is too long.
int run_data_try_prompt(int* ids, int* count, int max, const RunData* data, const Options* options, int V,
                        const char* text, size_t bytes, char* error);

// Returns the bytes of text that the targets stand for. End-of-text and -1 have none. Returns 0
// without a tokenizer.
double run_data_target_bytes(const RunData* data, const int* targets, size_t count);

// True if the run learns chats whose format it knows.
static inline int run_data_learns_chats(const RunData* data) { return data->marks.format.layout != NULL; }

// ---- files ----

// Finds out whether the training data have answers, and the marks of their chats; before
// run_data_open.
Answers run_data_find_answers(RunData* data, const Options* options);

// Opens the data, and returns the steps of the run: --steps, or what --epochs or one epoch come to.
// With --plan and --print-config the data may stay unknown (data->is_unknown), and the steps "auto".
int64_t run_data_open(RunData* data, const Options* options);

// Sets the place that the schedule of the training data counts from, and the first sequences of its
// lines, but not the order (mixture_continue).
void run_data_place(RunData* data, const Options* options, DataPlace from);

// Opens text or shards as tokens of the run, after run_data_open. `data` and `list` must outlive
// `sources`.
void run_data_open_text(DataSources* sources, const RunData* data, const Options* options, const char* list);

// Returns the number of sequences in a validation, on all ranks: those of --eval-batches
// micro-batches, or with "auto" a number that does not depend on the batch; at most `epoch`, all of
// the data.
int64_t run_data_eval_sequences(const Options* options, uint64_t epoch);

// Returns a validation set, from 0 to num_val_sets. The first one decides about the run.
static inline const DataSources* run_data_val_set(const RunData* data, int set) {
    return data->val_sets ? &data->val_sets[set] : &data->val;
}

// Returns the number of sequences in the validations of all sets.
int64_t run_data_all_eval_sequences(const RunData* data, const Options* options);

// Sets sets (SOURCES_MAX) to the validation sets, and returns their number. The names are the
// data's.
int run_data_list_sets(ValidationSet* sets, const RunData* data, const Options* options);

// Opens the loaders of the training data and of each validation set, and prints what they will
// read; after run_data_open. `data` must stay in place until they are closed.
void run_data_open_loaders(Dataloader* train, Dataloader* val, const RunData* data, const Settled* s);

// Prints the sources of the training data, and their schedule.
void run_data_print_mixture(FILE* file, const RunData* data, const Options* options);

// Prints the start of a line about the run's data.
void run_data_print(FILE* file, const RunData* data);

// Returns the entropy, in nats per token, of the targets of a validation of `sequences`; NAN if
// unknown.
double run_data_floor(const RunData* data, int64_t sequences);

void run_data_close(RunData* data);

#ifdef __cplusplus
}
#endif

#ifdef RUN_DATA_IMPLEMENTATION

#include <errno.h>
#include <glob.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"
#include "llmc/base/shell_word.h"
#include "llmc/base/xxh64.h"
#include "llmc/data/packing.h"
#include "llmc/data/encoded_text.h"
#include "llmc/data/opening.h"
#include "llmc/data/token_files.h"
#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/bpe_train.h"

// ---- tokens ----

static void run_data_stories_tokenizer_(RunData* data) {
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

// Returns how text is read and encoded.
static EncodedText run_data_text_(const Options* options, const Bpe* bpe, const char* directory) {
    const TextDataMode mode = options_only_look(options) ? TEXT_DATA_FIND : TEXT_DATA_ENCODE;
    const EncodedText text = {bpe, options->data.text_field, options->data.separator, directory, stdout, mode,
                              1,   options->memory.threads};
    return text;
}

// Sets path (PATH_MAX) to the vocabulary of --tokenizer bpe:N in --out. Trains it on the text if it
// does not exist yet, with marks for --fim-rate; if nothing may be written, path is "" instead.
// Returns N.
static int run_data_own_vocabulary_(RunData* data, const Options* options, char* path) {
    char* end;
    const long V = strtol(options->data.tokenizer + strlen("bpe:"), &end, 10);
    const int marks = options->data.fim_rate > 0 ? FIM_MARKS : 0;
    if (*end || V < 257 + marks || V > BPE_MAX_VOCAB) {
        die_usage("--tokenizer %s: wanted bpe:N with N tokens, from %d to %d", options->data.tokenizer,
                  257 + marks, BPE_MAX_VOCAB);
    }
    if (mixture_kind(options->data.train) != TOKENS_TEXT) {
        die_usage("--tokenizer %s trains a vocabulary on text; --train-data %s is already tokens",
                  options->data.tokenizer, options->data.train);
    }
    if (!options->output.dir[0]) {
        die_usage("--tokenizer %s: add --out DIR: the vocabulary is kept there", options->data.tokenizer);
    }
    file_join(path, options->output.dir, "tokenizer.json");
    const int is_kept = file_exists(path);
    if (!is_kept && options_only_look(options)) {
        path[0] = '\0';
        return (int)V;
    }
    if (!is_kept) {
        const EncodedText text = run_data_text_(options, NULL, NULL);
        Bpe bpe;
        file_make_directory(options->output.dir);
        encoded_text_train(&bpe, &text, options->data.train, (int)V - marks);
        bpe_add_names(&bpe, fim_names().of, marks);
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

// Opens a stand-in for a vocabulary of V tokens that is not trained yet: it has that size and
// encodes bytes.
static void run_data_untrained_tokenizer_(Tokenizer* tokenizer, int V) {
    memset(tokenizer, 0, sizeof(*tokenizer));
    tokenizer->kind = "gpt2";
    tokenizer->bpe = (Bpe*)check_alloc(1, sizeof(Bpe), "tokenizer");
    bpe_open_bytes(tokenizer->bpe);
    tokenizer->encoder = (BpeEncoder*)check_alloc(1, sizeof(BpeEncoder), "tokenizer");
    bpe_encoder_open(tokenizer->encoder, tokenizer->bpe);
    tokenizer->vocab_size = V;
    tokenizer->eot = V - 1;
}

static int run_data_trains_vocabulary_(const Options* options) {
    return strncmp(options->data.tokenizer, "bpe:", strlen("bpe:")) == 0;
}

static void run_data_file_tokenizer_(RunData* data, const Options* options) {
    char path[PATH_MAX];
    const int is_own = run_data_trains_vocabulary_(options);
    const int V = is_own ? run_data_own_vocabulary_(data, options, path) : 0;
    data->is_unknown = is_own && !path[0];
    data->has_tokenizer = 1;
    if (data->is_unknown) {
        run_data_untrained_tokenizer_(&data->tokenizer, V);
    } else {
        tokenizer_open_file(&data->tokenizer, is_own ? path : options->data.tokenizer);
    }
}

// Opens no data, for a run that only evaluates or converts, and only the tokenizer that is named.
static void run_data_no_data_(RunData* data, const Options* options) {
    data->kind = DATA_NONE;
    data->has_tokenizer = options->data.tokenizer[0] != '\0';
    if (data->has_tokenizer) {
        tokenizer_open_file(&data->tokenizer, options->data.tokenizer);
    }
}

// Opens the data of a run without --train-data: the built-in stories, or none for a model with
// other tokens.
static void run_data_no_files_(RunData* data, const Settled* s) {
    const Options* options = &s->options;
    RunData stories;
    if (s->use == USE_EVALUATE && !run_data_is_asked_for(options)) {
        run_data_no_data_(data, options);
        return;
    }
    memset(&stories, 0, sizeof(stories));
    run_data_stories_tokenizer_(&stories);
    data->kind = DATA_STORIES;
    data->has_tokenizer = 1;
    if (options->data.tokenizer[0]) {
        // opened in place: it points into itself
        tokenizer_open_file(&data->tokenizer, options->data.tokenizer);
        data->kind = tokenizer_is_same(&data->tokenizer, &stories.tokenizer) ? DATA_STORIES : DATA_NONE;
    }
    if (data->kind == DATA_STORIES) {
        tokenizer_close(&data->tokenizer);
        data->tokenizer = stories.tokenizer; // a tokenizer of words does not point into itself
        data->stories = stories.stories;
        return;
    }
    tokenizer_close(&stories.tokenizer);
    free(stories.stories);
    if (options->batch.steps != 0 || !options->model.path[0]) {
        die_usage(
            "%s %s uses its own tokenizer, so it cannot train on the built-in stories; wanted --train-data%s",
            options_given(options, "tokenizer") ? "--tokenizer" : "--model", options->data.tokenizer,
            options->model.path[0] ? ", or --steps 0 to sample from the model" : "");
    }
}

// Opens the tokenizer of the model that generates text, without data.
static void run_data_text_tokenizer_(RunData* data, const Options* options, const char* model_path) {
    data->kind = DATA_NONE;
    if (!options->data.tokenizer[0]) {
        die_usage("%s has no tokenizer; wanted --tokenizer FILE: the tokenizer.json, merges.txt or .tiktoken "
                  "that goes with "
                  "the model",
                  model_path);
    }
    tokenizer_open_file(&data->tokenizer, options->data.tokenizer);
    data->has_tokenizer = 1;
}

void run_data_open_tokenizer(RunData* data, const Settled* s, const char* model_path) {
    const Options* options = &s->options;
    memset(data, 0, sizeof(*data));
    const int is_text = options->data.train[0] && mixture_kind(options->data.train) == TOKENS_TEXT;
    if (run_data_trains_vocabulary_(options) && (s->use == USE_GENERATE || !options->data.train[0])) {
        die_usage("--tokenizer %s trains a vocabulary on text, and there is none; wanted --train-data, or a "
                  "tokenizer's file",
                  options->data.tokenizer);
    }
    if (s->use == USE_GENERATE) {
        run_data_text_tokenizer_(data, options, model_path);
    } else if (!options->data.train[0]) {
        run_data_no_files_(data, s);
    } else if (is_text && !options->data.tokenizer[0]) {
        data->kind = DATA_TEXT;
        tokenizer_open_bytes(&data->tokenizer);
        data->has_tokenizer = 1;
    } else {
        data->kind = DATA_SHARDS;
        data->is_encoded = is_text;
        if (options->data.tokenizer[0]) {
            run_data_file_tokenizer_(data, options);
        }
        CHECK(!is_text || data->tokenizer.encoder,
              "text cannot be encoded: the tokenizer knows only the words of its list");
    }
}

// Ends the program: the tokenizer of the run is another than the model's own.
static void run_data_refuse_tokenizer_(const RunData* data, const Options* options, const char* model_path,
                                       int model_V) {
    const Tokenizer *own = &data->own_tokenizer, *other = &data->tokenizer;
    char own_text[64], other_text[64];
    const int id = tokenizer_first_other(own, other);
    tokenizer_describe(own, id, own_text, sizeof(own_text));
    tokenizer_describe(other, id, other_text, sizeof(other_text));
    die_usage("--tokenizer %s has other tokens than the model's own in %s: token %d is %s, not %s; wanted "
              "that one, one that extends it, or --vocab-size %d to use this one anyway",
              options->data.tokenizer, model_path, id, other_text, own_text, model_V);
}

void run_data_open_own_tokenizer(RunData* data, const Options* options, const char* model_path, int model_V) {
    const Tokenizer* run = &data->tokenizer;
    const int insists = options_given(options, "vocab-size");
    const int is_other =
        data->has_tokenizer && !data->is_unknown && strcmp(options->data.tokenizer, model_path) != 0;
    if (!is_other || !tokenizer_is_in(model_path) || (insists && run_data_fits(model_V, run->vocab_size))) {
        return;
    }
    tokenizer_open_file(&data->own_tokenizer, model_path);
    data->is_extended = tokenizer_extends(run, &data->own_tokenizer);
    if (!insists && !tokenizer_starts_like(run, &data->own_tokenizer)) {
        run_data_refuse_tokenizer_(data, options, model_path, model_V);
    }
    if (data->is_extended || tokenizer_is_same(run, &data->own_tokenizer)) {
        tokenizer_take_roles(&data->tokenizer, &data->own_tokenizer);
    }
    if (!data->is_extended) {
        tokenizer_close(&data->own_tokenizer);
    }
}

void run_data_check_tokens(const RunData* data, const Options* options, const char* model_path) {
    Tokenizer own;
    if (!data->has_tokenizer || data->is_unknown || !tokenizer_is_in(model_path)) {
        return;
    }
    tokenizer_open_file(&own, model_path);
    if (!tokenizer_is_same(&own, &data->tokenizer)) {
        die_usage("--teacher %s has other tokens than the run: %d (%s), and %d (%s); wanted the same "
                  "tokenizer: --tokenizer %s",
                  options->teacher.path, own.vocab_size, own.kind, data->tokenizer.vocab_size,
                  options->data.tokenizer[0] ? options->data.tokenizer : data->tokenizer.kind,
                  shell_word(model_path).text);
    }
    tokenizer_close(&own);
}

int run_data_eot(const RunData* data, int V) { return data->has_tokenizer ? data->tokenizer.eot : V - 1; }

ModelCard run_data_card(const RunData* data, int V) {
    ModelCard card = data->has_tokenizer ? tokenizer_card(&data->tokenizer) : model_card_of(V - 1);
    if (run_data_learns_chats(data)) {
        card.chat_template = data->chat_template ? data->chat_template : card.chat_template;
    }
    if (run_data_learns_chats(data) && data->marks.turn_end >= 0) {
        model_card_learn_chat(&card, data->marks.turn_end);
    }
    return card;
}

const Tokenizer* run_data_saved_tokenizer(const RunData* data) {
    return data->has_tokenizer ? &data->tokenizer : NULL;
}

int run_data_try_prompt(int* ids, int* count, int max, const RunData* data, const Options* options, int V,
                        const char* text, size_t bytes, char* error) {
    const size_t start = options->samples.start_token || bytes == 0 ? 1 : 0; // tokens before the text
    size_t tokens;
    int* encoded = (int*)check_alloc(tokenizer_most_ids(&data->tokenizer, bytes), sizeof(int), "prompt");
    int ok = tokenizer_try_encode(&data->tokenizer, text, bytes, encoded, &tokens, error);
    if (!ok) {
        opening_add_known(error, &data->tokenizer);
    } else if (tokens + start > (size_t)max) {
        ok = error_set(error, "prompt", "%zu tokens; wanted at most %d, %s", tokens, max - (int)start,
                       start ? "one less than the sequence length" : "the sequence length");
    }
    if (ok) {
        ids[0] = run_data_eot(data, V);
        memcpy(ids + start, encoded, tokens * sizeof(int));
        *count = (int)(tokens + start);
    }
    free(encoded);
    return ok;
}

int run_data_prompt(int* ids, int max, const RunData* data, const Options* options, int V) {
    char error[ERROR_BYTES];
    const char* text = options->samples.prompt;
    int count = 1;
    ids[0] = run_data_eot(data, V);
    if (text[0] && !data->has_tokenizer) {
        die_usage("--prompt needs --tokenizer: this data is only token ids");
    }
    const int ok =
        !text[0] || run_data_try_prompt(ids, &count, max, data, options, V, text, strlen(text), error);
    if (!ok) {
        die_usage("--%s", error);
    }
    return count;
}

// Returns the tokenizer's marks to fill in the middle, for an option. Refuses a tokenizer without
// them, and a model of V tokens that lacks them.
static FillInMiddle run_data_marks_(const RunData* data, const Options* options, int V, const char* what) {
    const FimNames names = fim_names();
    FillInMiddle fim = {0, 0, 0, 0, 0, 0};
    if (!data->has_tokenizer || !fim_find_marks(&fim, &data->tokenizer)) {
        die_usage("%s needs marks; %s%s has none; wanted three special tokens, %s, %s and %s, or those of "
                  "another family (dev/doc/data.md)",
                  what, options->data.tokenizer[0] ? "--tokenizer " : "the tokenizer of these data",
                  options->data.tokenizer, names.of[0], names.of[1], names.of[2]);
    }
    if (fim_largest_mark(&fim) >= V) {
        die_usage("%s: a mark for it is token %d; wanted a --vocab-size above that, not %d", what,
                  fim_largest_mark(&fim), V);
    }
    return fim;
}

int run_data_infill(int* ids, int max, const RunData* data, const Options* options, int V) {
    const FillInMiddle fim = run_data_marks_(data, options, V, "--suffix");
    const char* text = options->texts.suffix;
    int* suffix =
        (int*)check_alloc(tokenizer_most_ids(&data->tokenizer, strlen(text)) + 1, sizeof(int), "suffix");
    const size_t n = tokenizer_encode(&data->tokenizer, text, strlen(text), suffix);
    const int count = run_data_prompt(ids, max, data, options, V), start = ids[0] == run_data_eot(data, V);
    if ((size_t)count + n + FIM_MARKS > (size_t)max) {
        die_usage("--suffix: %zu tokens, with %d of the prompt and %d marks; wanted at most %d, the sequence "
                  "length",
                  n, count, FIM_MARKS, max);
    }
    memmove(ids + start + 1, ids + start, (size_t)(count - start) * sizeof(int));
    ids[start] = fim.prefix;
    ids[count + 1] = fim.suffix;
    memcpy(ids + count + 2, suffix, n * sizeof(int));
    ids[count + 2 + (int)n] = fim.middle;
    free(suffix);
    return count + (int)n + FIM_MARKS;
}

double run_data_target_bytes(const RunData* data, const int* targets, size_t count) {
    double bytes = 0;
    for (size_t i = 0; data->has_tokenizer && i < count; i++) {
        bytes += targets[i] < 0 ? 0 : tokenizer_bytes(&data->tokenizer, targets[i]);
    }
    return bytes;
}

// ---- files ----

// Decides the format of the chats that the run learns.
static void run_data_settle_chats_(RunData* data, const Options* options) {
    Bpe* bpe = data->tokenizer.bpe;
    char error[ERROR_BYTES];
    const int is_named = options->texts.chat >= (int)CHAT_CHATML;
    if (!is_named && options->texts.chat != OPTION_AUTO) {
        die_usage("--chat %s is for --interactive; wanted a format, --chat chatml for example",
                  chat_word(options->texts.chat));
    }
    if (is_named && chat_choose(bpe, (ChatWord)options->texts.chat)) {
        printable_line(stdout, "chats: --chat %s replaces the model's own chat_template, which is another",
                       chat_word(options->texts.chat));
    } else if (!chat_check(bpe, "--chat chatml", error)) {
        die_usage("--train-data %s has %s", options->data.train, error);
    }
    chat_marks_open(&data->marks, bpe);
    if (!bpe->card.chat_template || bpe->card.is_chosen) {
        data->chat_template = chat_new_template(&data->marks, bpe);
    }
}

Answers run_data_find_answers(RunData* data, const Options* options) {
    const int are_files = data->kind == DATA_TEXT || data->kind == DATA_SHARDS;
    data->answers =
        are_files ? encoded_text_answers(options->data.train, options->data.text_field) : ANSWERS_NONE;
    const int is_named = options->texts.chat >= (int)CHAT_CHATML;
    if (data->answers == ANSWERS_CHATS ||
        (data->answers == ANSWERS_MASK && is_named && data->tokenizer.bpe)) {
        run_data_settle_chats_(data, options);
    } else if (options->texts.chat != OPTION_AUTO && are_files) {
        die_usage("--chat %s, but --train-data %s has no chats", chat_word(options->texts.chat),
                  options->data.train);
    }
    return data->answers;
}

// Returns this number of tokens, up to a limit, and one more as the last target. Users may ask for
// anything, so the number may overflow any integer.
static size_t run_data_stories_tokens_(double tokens) {
    const int64_t max = RUN_DATA_STORIES_MAX_TOKENS;
    return (size_t)(tokens < (double)max ? (int64_t)tokens : max) + 1;
}

// Returns the number of sequences of validation stories.
static int64_t run_data_stories_validated_(const Options* options) {
    return options->eval.batches > 0 ? (int64_t)options->eval.batches * options->batch.size
                                     : RUN_DATA_EVAL_CPU / options->batch.seq_len;
}

// Generates the built-in corpus: enough training text that nothing is read twice, up to a limit.
static void run_data_stories_(RunData* data, const Options* options, int64_t steps) {
    const Stages batches = settled_batches(options);
    const int64_t validated = run_data_stories_validated_(options);
    const size_t train = run_data_stories_tokens_(stages_sum(&batches, steps > 1 ? steps : 1));
    const size_t val =
        run_data_stories_tokens_((double)(validated > 1 ? validated : 1) * (double)options->batch.seq_len);
    data->train_stories = (uint16_t*)check_alloc(train, sizeof(uint16_t), "stories");
    data->val_stories = (uint16_t*)check_alloc(val, sizeof(uint16_t), "stories");
    data->val_nats = (float*)check_alloc(val, sizeof(float), "stories");
    stories_generate(data->stories, data->train_stories, NULL, train, RUN_DATA_STORIES_PAGE,
                     options->data.seed);
    stories_generate(data->stories, data->val_stories, data->val_nats, val, RUN_DATA_STORIES_PAGE,
                     RUN_DATA_STORIES_SEED);
    mixture_open_memory(&data->train, data->train_stories, train, options->model.vocab_size,
                        "built-in stories");
    mixture_open_memory(&data->val, data->val_stories, val, options->model.vocab_size, "built-in stories");
}

// ---- the mixture ----

// Returns the sequence in which a step starts, at the batches of the options after `from`.
static int64_t run_data_step_(const Options* options, DataPlace from, int64_t step) {
    const Stages batches = settled_batches(options);
    const double sequences =
        (stages_sum(&batches, step) - stages_sum(&batches, from.step)) / options->batch.seq_len;
    return from.sequence + (int64_t)fmin(sequences, 2.0 * SCHEDULE_SEQUENCES_MAX);
}

// Finds the first sequence of each line of the schedule. Tokens are rounded up to sequences.
static void run_data_place_(DataSchedule* schedule, const Options* options, DataPlace from) {
    const int64_t T = options->batch.seq_len;
    for (int i = 0; i < schedule->count; i++) {
        ScheduleLine* line = &schedule->line[i];
        const int64_t tokens = line->from - from.tokens;
        line->first = line->unit == SCHEDULE_STEPS ? run_data_step_(options, from, line->from)
                                                   : from.sequence + (tokens + (tokens > 0 ? T - 1 : 0)) / T;
    }
    data_schedule_check_order(schedule);
}

// Refuses sources of the training data without weights, unless a schedule has them.
static void run_data_check_weights_(const Options* options) {
    SourceList list;
    mixture_read_list(&list, options->data.train);
    const int has_none = list.is_named && !list.is_weighted && list.count > 1;
    if (has_none && !options->data.schedule[0]) {
        die_usage("--train-data: source %s has no weight; wanted %s=%s:WEIGHT, or the weights in "
                  "--data-schedule",
                  list.names[0], list.names[0], list.patterns[0]);
    }
    free(list.text);
}

// Reads --data-schedule.
static DataSchedule run_data_schedule_(const Options* options) {
    const DataPlace start = {0, 0, 0};
    DataSchedule schedule;
    SourceList list;
    mixture_read_list(&list, options->data.train);
    if (!list.is_named || list.is_weighted) {
        die_usage("--data-schedule %s: --train-data %s; wanted sources with names and without weights: "
                  "NAME=FILES,NAME=FILES",
                  options->data.schedule, options->data.train);
    }
    if (options->output.overfit) {
        die_usage("--overfit on reads one batch; wanted no --data-schedule");
    }
    data_schedule_read(&schedule, options->data.schedule, list.names, list.count);
    run_data_place_(&schedule, options, start);
    free(list.text);
    return schedule;
}

// ---- opening files ----

// Opens a list of files, or the shards of text that is encoded first. Returns 0 if the shards are
// unknown.
static int run_data_sources_(DataSources* sources, const RunData* data, const Options* options,
                             const char* list, const char* directory) {
    const int is_text = mixture_kind(list) == TOKENS_TEXT;
    if (!data->is_encoded || !is_text) {
        mixture_open_files(sources, list, (TokensFormat)options->data.format, options->model.vocab_size);
        if (is_text) {
            encoded_text_warn(stdout, sources);
        }
        return 1;
    }
    Bpe bytes;
    bpe_open_bytes(&bytes);
    if (data->kind == DATA_TEXT) {
        bytes.card.chat = data->tokenizer.bpe->card.chat; // of --chat, without texts
        bytes.card.is_chosen = data->tokenizer.bpe->card.is_chosen;
    }
    const Bpe* bpe = data->kind == DATA_TEXT ? &bytes : data->tokenizer.bpe;
    EncodedText text = run_data_text_(options, bpe, directory);
    text.warns = !data->is_warned;
    char* shards = encoded_text_shards(&text, list);
    if (shards) {
        mixture_open_files(sources, shards, TOKENS_AUTO, options->model.vocab_size);
        mixture_rename(sources, list);
    }
    free(shards);
    bpe_close(&bytes);
    return shards != NULL;
}

// Returns the number of files in a list. Reports missing files now, before others are encoded.
static size_t run_data_count_files_(const char* list) {
    SourceList sources;
    size_t count = 0;
    mixture_read_list(&sources, list);
    for (int i = 0; i < sources.count && list[0]; i++) {
        glob_t files = tokens_list(sources.patterns[i]);
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

// Sets path (PATH_MAX) to the directory for encoded text: in --out, or a temporary one that is
// removed once its files are mapped. Returns 0 if it does not exist and may not be created.
static int run_data_encoded_directory_(const Options* options, char* path) {
    const int is_kept = options->output.dir[0] != '\0';
    if (is_kept) {
        file_join(path, options->output.dir, "tokens");
    }
    if (options_only_look(options)) {
        return is_kept && file_is_directory(path);
    }
    if (is_kept) {
        file_make_directory(path);
    } else {
        encoded_text_make_temporary(path);
    }
    return 1;
}

// Refuses options and lists that do not fit the data.
static void run_data_check_files_(const RunData* data, const Options* options) {
    const int is_text = data->is_encoded || data->kind == DATA_TEXT;
    run_data_check_weights_(options);
    if (options->data.separator[0] && !is_text) {
        die_usage("--separator %s is only for text: --train-data %s is already split into documents",
                  options->data.separator, options->data.train);
    }
    if (options->data.val[0] && !data->is_encoded &&
        (mixture_kind(options->data.val) == TOKENS_TEXT) != (data->kind == DATA_TEXT)) {
        die_usage("--val-data %s and --train-data %s: wanted both shards or both text", options->data.val,
                  options->data.train);
    }
}

// Opens the files. Returns 0 if the data are unknown.
static int run_data_files_(RunData* data, const Options* options) {
    char directory[PATH_MAX] = "";
    DataSchedule schedule;
    const int has_schedule = options->data.schedule[0] != '\0';
    run_data_check_files_(data, options);
    if (has_schedule) {
        schedule = run_data_schedule_(options);
    }
    const size_t files =
        run_data_count_files_(options->data.train) + run_data_count_files_(options->data.val);
    // Bytes cannot be mapped if the text is split, compressed, in fields or in too many files.
    if (data->kind == DATA_TEXT) {
        data->is_encoded = options->data.separator[0] || files > RUN_DATA_MAPPED_FILES ||
                           !encoded_text_is_plain(options->data.train) ||
                           (options->data.val[0] && !encoded_text_is_plain(options->data.val));
    }
    if (data->is_unknown || (data->is_encoded && !run_data_encoded_directory_(options, directory)) ||
        !run_data_sources_(&data->train, data, options, options->data.train, directory)) {
        return 0;
    }
    if (!options->data.val[0]) {
        mixture_split_tail(&data->train, &data->val, options->batch.seq_len,
                           run_data_eot(data, options->model.vocab_size));
    } else if (!run_data_sources_(&data->val, data, options, options->data.val, directory)) {
        return 0;
    }
    encoded_text_remove_temporary();
    if (has_schedule) {
        mixture_set_schedule(&data->train, schedule);
    }
    return 1;
}

// ---- the whole ----

// Opens the sets of --val-data: sources with names and without weights are one set each.
static void run_data_open_sets_(RunData* data, const Options* options) {
    SourceList list;
    mixture_read_list(&list, options->data.val);
    const int are_sets = list.is_named && !list.is_weighted;
    free(list.text);
    data->num_val_sets = are_sets ? data->val.count : 1;
    if (!are_sets) {
        return;
    }
    data->val_sets =
        (DataSources*)check_alloc((size_t)data->num_val_sets, sizeof(DataSources), "validation sets");
    for (int i = 0; i < data->num_val_sets; i++) {
        mixture_open_view(&data->val_sets[i], &data->val, i);
    }
}

// Packs the documents into rows. Validation reads in order, and rows sorted by length would start
// with short documents only.
static void run_data_rows_(RunData* data, const Options* options) {
    const Packing pack = (Packing)options->data.pack, val_pack = pack == PACK_UNIFORM ? PACK_DYNAMIC : pack;
    const int eot = run_data_eot(data, options->model.vocab_size);
    if (pack == PACK_UNIFORM && data->train.count > 1) {
        die_usage("--pack uniform needs one source; --train-data has %d sources", data->train.count);
    }
    data->train.fim = data->fim;
    mixture_pack(&data->train, pack, options->batch.seq_len, eot, (DocumentMask)options->data.doc_mask);
    mixture_pack(&data->val, val_pack, options->batch.seq_len, eot, (DocumentMask)options->data.doc_mask);
    run_data_open_sets_(data, options);
}

// Refuses --epochs for endless data, or together with --steps, and a schedule without --steps: with
// other weights, an epoch has another length.
static void run_data_check_epochs_(const RunData* data, const Options* options) {
    if (options->data.schedule[0] && (options->batch.epochs > 0 || options->batch.steps == OPTION_AUTO)) {
        die_usage("--data-schedule %s needs --steps: an epoch has no fixed length", options->data.schedule);
    }
    if (options->batch.epochs <= 0) {
        return;
    }
    if (data->kind == DATA_STORIES) {
        die_usage("--epochs %g needs --train-data: the built-in stories are endless",
                  (double)options->batch.epochs);
    }
    if (options_given(options, "steps") && options->batch.steps != OPTION_AUTO) {
        die_usage("--epochs %g and --steps %lld: wanted only one of them", (double)options->batch.epochs,
                  (long long)options->batch.steps);
    }
}

// Sets how training documents are rearranged.
static void run_data_fim_(RunData* data, const Options* options) {
    if (options->data.fim_rate > 0 && data->answers != ANSWERS_NONE) {
        die_usage("--fim-rate %g, but --train-data %s has prompts or chats; wanted 0: rearranged, an answer "
                  "would precede its question",
                  (double)options->data.fim_rate, options->data.train);
    }
    if (options->data.fim_rate > 0 && !data->is_unknown) {
        char what[OPTION_TEXT_BYTES];
        snprintf(what, sizeof(what), "--fim-rate %g", (double)options->data.fim_rate);
        data->fim = run_data_marks_(data, options, options->model.vocab_size, what);
        data->fim.rate = options->data.fim_rate;
        data->fim.spm_rate = options->data.fim_spm_rate;
        data->fim.seed = options->data.seed;
    }
}

// Returns the steps that --epochs, or one epoch, come to. A step that would not be whole is left out.
static int64_t run_data_steps_(const Options* options, const Stages* batches, double epoch_tokens) {
    const double epochs = options->batch.epochs > 0 ? (double)options->batch.epochs : 1,
                 steps = stages_steps(batches, epochs * epoch_tokens);
    if (options->batch.epochs > 0 && steps > RUN_DATA_MAX_STEPS) {
        die_usage("--epochs %g is %.3g steps; wanted at most %.3g", epochs, steps, RUN_DATA_MAX_STEPS);
    }
    return steps > 1 ? (int64_t)steps : 1;
}

// Sets the epochs of the run, and returns its steps. `steps` may be "auto".
static int64_t run_data_epochs_(RunData* data, const Options* options, int64_t steps) {
    const Stages batches = settled_batches(options);
    const double tokens = (double)mixture_epoch(&data->train) * options->batch.seq_len;
    const int has_epochs = data->kind != DATA_STORIES && !options->data.schedule[0];
    if (steps == OPTION_AUTO || options->batch.epochs > 0) {
        steps = run_data_steps_(options, &batches, tokens);
    }
    data->epochs = has_epochs ? stages_sum(&batches, steps) / tokens : 0;
    return steps;
}

// Warns if the vocabulary is GPT-2's by default and seems far too large. Shards do not state
// theirs.
static void run_data_check_vocabulary_(const RunData* data, const Options* options) {
    const int is_default = data->kind == DATA_SHARDS && !data->has_tokenizer &&
                           options->model.vocab_size == GPT2_VOCAB && !options_given(options, "vocab-size") &&
                           (!options->model.path[0] || model_preset_by_name(options->model.path));
    const int largest = mixture_largest_token(&data->train);
    if (is_default && largest < GPT2_VOCAB / 2) {
        printable_line(stdout,
                       "warning: the vocabulary is GPT-2's, of %d tokens, but the largest token of %s is %d; "
                       "--vocab-size %d is "
                       "enough for these data, and faster",
                       GPT2_VOCAB, options->data.train, largest, largest + 1);
    }
}

int64_t run_data_open(RunData* data, const Options* options) {
    const int is_auto = options->batch.steps == OPTION_AUTO && data->kind == DATA_STORIES;
    const int64_t steps = is_auto ? RUN_DATA_STORIES_STEPS : options->batch.steps;
    if (!run_data_has_tokens(data)) {
        return steps;
    }
    run_data_check_epochs_(data, options);
    if (data->kind == DATA_STORIES && options->data.schedule[0]) {
        die_usage("--data-schedule %s needs --train-data NAME=FILES,NAME=FILES", options->data.schedule);
    }
    if (data->kind == DATA_STORIES && options->data.val[0]) {
        die_usage("--val-data %s needs --train-data: the built-in stories bring their own",
                  options->data.val);
    }
    if (data->kind == DATA_STORIES && options->data.separator[0]) {
        die_usage("--separator %s needs --train-data: the built-in stories are tokens",
                  options->data.separator);
    }
    run_data_fim_(data, options);
    if (data->kind == DATA_STORIES) {
        run_data_stories_(data, options, steps);
    } else {
        data->is_unknown = !run_data_files_(data, options);
    }
    if (data->is_unknown) {
        return steps;
    }
    run_data_check_vocabulary_(data, options);
    run_data_rows_(data, options);
    return run_data_epochs_(data, options, steps);
}

void run_data_place(RunData* data, const Options* options, DataPlace from) {
    data->train.from = from;
    if (data->train.schedule.path) {
        run_data_place_(&data->train.schedule, options, from);
    }
}

void run_data_open_text(DataSources* sources, const RunData* data, const Options* options, const char* list) {
    char directory[PATH_MAX] = "";
    RunData text = *data;
    const int is_text = mixture_kind(list) == TOKENS_TEXT;
    const int is_bytes = data->has_tokenizer && strcmp(data->tokenizer.kind, "bytes") == 0;
    CHECK(!is_text || is_bytes || (data->has_tokenizer && data->tokenizer.encoder),
          "%s: text, wanted a --tokenizer that encodes any text", list);
    text.kind = is_bytes ? DATA_TEXT : DATA_SHARDS;
    text.is_encoded = is_text && (!is_bytes || options->data.separator[0] || !encoded_text_is_plain(list));
    run_data_count_files_(list);
    if (text.is_encoded) {
        run_data_encoded_directory_(options, directory);
    }
    run_data_sources_(sources, &text, options, list, directory);
    encoded_text_remove_temporary();
}

// ---- reading ----

// Returns the sequences of a validation for --eval-batches auto.
static int64_t run_data_usual_sequences_(const Options* options) {
    const int tokens = options->program.trainer == OPTION_GPU ? RUN_DATA_EVAL_GPU : RUN_DATA_EVAL_CPU;
    return tokens > options->batch.seq_len ? tokens / options->batch.seq_len : 1;
}

int64_t run_data_eval_sequences(const Options* options, uint64_t epoch) {
    const int64_t wanted = options->eval.batches == OPTION_AUTO
                               ? run_data_usual_sequences_(options)
                               : (int64_t)options->eval.batches * options->batch.size;
    return wanted > 0 && (uint64_t)wanted < epoch ? wanted : (int64_t)epoch;
}

int64_t run_data_all_eval_sequences(const RunData* data, const Options* options) {
    int64_t sequences = 0;
    for (int i = 0; i < data->num_val_sets; i++) {
        sequences += run_data_eval_sequences(options, mixture_epoch(run_data_val_set(data, i)));
    }
    return sequences;
}

static uint64_t run_data_set_checksum_(const DataSources* set, const Options* options) {
    const uint64_t how[] = {mixture_checksum(set), (uint64_t)set->T, (uint64_t)set->pack, (uint64_t)set->mask,
                            (uint64_t)run_data_eval_sequences(options, mixture_epoch(set))};
    Xxh64 hash;
    xxh64_open(&hash);
    xxh64_add(&hash, how, sizeof(how));
    for (int s = 0; s < set->count; s++) {
        const TokenStream* stream = &set->source[s].stream;
        const uint64_t tokens[] = {stream->fingerprint, stream->begin,
                                   stream->fingerprint ? stream->count : 0};
        xxh64_add(&hash, tokens, sizeof(tokens));
    }
    return xxh64_value(&hash);
}

int run_data_list_sets(ValidationSet* sets, const RunData* data, const Options* options) {
    for (int i = 0; i < data->num_val_sets; i++) {
        const DataSources* set = run_data_val_set(data, i);
        const ValidationSet it = {data->val_sets ? set->source[0].name : "",
                                  run_data_set_checksum_(set, options)};
        sets[i] = it;
    }
    return data->num_val_sets;
}

// Opens the loader of a validation set, where a validation counts as one update.
static void run_data_open_validation_(Dataloader* val, const DataSources* set, const Settled* s) {
    const Options* options = &s->options;
    DataloaderSettings in_order;
    memset(&in_order, 0, sizeof(in_order));
    in_order.B = options->batch.size;
    in_order.sequences = run_data_eval_sequences(options, mixture_epoch(set));
    in_order.shuffle = SHUFFLE_OFF;
    in_order.rank = s->ranks.grid.data_rank;
    in_order.num_processes = s->ranks.grid.shape.data;
    in_order.chunks = grid_chunks(&s->ranks.grid);
    dataloader_open(val, set, in_order);
}

// Prints the share of an update that is empty: rows of micro-batches without a sequence.
static void run_data_print_batches_(const Settled* s) {
    const int64_t n = s->ranks.grid.shape.data,
                  rows = (s->micro_batches + n - 1) / n * n * s->options.batch.size;
    if (rows > s->sequences) {
        printf("batches: %lld sequences an update in %lld micro-batches, %.1f %% empty\n",
               (long long)s->sequences, (long long)s->micro_batches,
               100.0 * (double)(rows - s->sequences) / (double)rows);
    }
}

// Says which tokens the losses count, if not all.
static void run_data_print_answers_(const RunData* data) {
    if (!mixture_has_mask(&data->train)) {
        return;
    }
    printf("answers: of prompts and chats only answers count in the loss%s",
           mixture_has_mask(&data->val) ? ", in training and in validation"
                                        : "; all tokens of the validation data count");
    if (data->answers == ANSWERS_CHATS) {
        printf("; chats are %s, %s", data->marks.format.layout->name,
               data->marks.is_text
                   ? "whose marks are plain text: the tokenizer has no special tokens for them"
                   : "whose marks are special tokens of the tokenizer");
    }
    putchar('\n');
}

void run_data_open_loaders(Dataloader* train, Dataloader* val, const RunData* data, const Settled* s) {
    const Options* options = &s->options;
    const int group = s->sequences < DATALOADER_GROUP ? (int)s->sequences : DATALOADER_GROUP;
    const DataloaderSettings settings = {.B = options->batch.size,
                                         .sequences = s->sequences,
                                         .shuffle = (Shuffle)options->data.shuffle,
                                         .seed = options->data.seed,
                                         .group = group,
                                         .rank = s->ranks.grid.data_rank,
                                         .num_processes = s->ranks.grid.shape.data,
                                         .earlier = model_places(s->part) - 1,
                                         .counts_updates = s->cfg.E > 0,
                                         .chunks = grid_chunks(&s->ranks.grid)};
    dataloader_open(train, &data->train, settings);
    for (int i = 0; i < data->num_val_sets; i++) {
        run_data_open_validation_(&val[i], run_data_val_set(data, i), s);
    }
    run_data_print_batches_(s);
    run_data_print_answers_(data);
    run_data_print_mixture(stdout, data, options);
    if (options->data.pack == PACK_DYNAMIC || options->data.pack == PACK_UNIFORM) {
        const int batches = 1000;
        printf("padding of the first %d micro-batches: %.2f %%\n", batches,
               100 * dataloader_padding(train, batches));
    }
}

void run_data_print_mixture(FILE* file, const RunData* data, const Options* options) {
    mixture_print(file, &data->train,
                  (uint64_t)run_data_step_(options, data->train.from, options->batch.steps));
}

// Prints the share of the tokens of all rows that are answers, if not all are.
static void run_data_print_share_(FILE* file, const DataSources* sources) {
    double targets = 0, tokens = 0;
    for (int s = 0; s < sources->count; s++) {
        const Rows* rows = &sources->source[s].rows;
        targets += (double)(rows->has_mask ? rows->targets : rows->tokens);
        tokens += (double)rows->tokens;
    }
    if (mixture_has_mask(sources)) {
        fprintf(file, " (%.1f %% count in the loss)", 100 * targets / tokens);
    }
}

void run_data_print(FILE* file, const RunData* data) {
    if (run_data_has_tokens(data)) {
        fprintf(file, "data: %zu training tokens", data->train.tokens);
        run_data_print_share_(file, &data->train);
        fprintf(file, ", %zu for validation; ", data->val.tokens);
        if (data->epochs > 0) {
            fprintf(file, "%.3g epochs; ", data->epochs);
        }
    } else {
        fputs("data: none; ", file);
    }
}

double run_data_floor(const RunData* data, int64_t sequences) {
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

void run_data_close(RunData* data) {
    for (int i = 0; data->val_sets && i < data->num_val_sets; i++) {
        mixture_close_view(&data->val_sets[i]);
    }
    free(data->val_sets);
    mixture_close(&data->val);
    mixture_close(&data->train);
    if (data->has_tokenizer) {
        tokenizer_close(&data->tokenizer);
    }
    if (data->is_extended) {
        tokenizer_close(&data->own_tokenizer);
    }
    free(data->chat_template);
    free(data->val_nats);
    free(data->val_stories);
    free(data->train_stories);
    free(data->stories);
}

#endif // RUN_DATA_IMPLEMENTATION

#endif
