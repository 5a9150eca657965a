/*
run_tokens.h -- the tokens of a run: its tokenizer, and prompts.

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
#ifndef LLMC_RUN_TOKENS_H
#define LLMC_RUN_TOKENS_H

#include <stdint.h>

#include "llmc/data/encoded_text.h"
#include "llmc/data/fill_in_middle.h"
#include "llmc/data/mixture.h"
#include "llmc/data/stories.h"
#include "llmc/data/target_mask.h"
#include "llmc/setup/options.h"
#include "llmc/setup/settled.h"
#include "llmc/tokenizer/chat_marks.h"
#include "llmc/tokenizer/date.h"
#include "llmc/tokenizer/model_card.h"
#include "llmc/tokenizer/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { DATA_STORIES, DATA_TEXT, DATA_SHARDS, DATA_NONE } DataKind;

typedef struct {
    DataKind kind;
    int has_tokenizer; // without one, samples are printed as token ids
    Tokenizer tokenizer;
    int is_extended;         // the model's own tokenizer has only the first ids of `tokenizer`
    Tokenizer own_tokenizer; // then open
    int is_encoded;          // the data are text whose files are encoded into shards first
    int is_unknown;          // the data are not encoded, and nothing may be written: none are open
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
    ChatMarks marks;            // of the chats that the run learns; no layout: it learns none
    char* chat_template;        // written for them; NULL: the model's own stays
    char chat_date[DATE_BYTES]; // the run's first day, if chats have it; else ""
} RunData;

// Returns true if the run has data to train on or to validate with.
static inline int run_data_has_tokens(const RunData* data) { return data->kind != DATA_NONE; }

// Returns true if the command line asks for validations. A run that does not train makes no others.
static inline int run_data_is_asked_for(const Options* options) {
    return options->data.train[0] || (options->eval.every > 0 && options_given(options, "eval-every"));
}

// Opens the tokenizer of the data, or of the model in `model_path` if the run generates text.
// run_data_open opens the data once V and T are known.
void run_data_open_tokenizer(RunData* data, const Settled* s, const char* model_path);

// Returns true if a model's vocabulary fits a tokenizer: it has the same size, or that size rounded
// up to a multiple of 64 or 128.
static inline int run_data_fits(int model_V, int V) {
    return model_V == V || model_V == (V + 63) / 64 * 64 || model_V == model_padded_vocab(V);
}

// Compares the tokenizer of the run with the model's own, which stays open if the run's extends it.
// Ends the program if their tokens differ. With --vocab-size, a tokenizer of a fitting size is not
// compared: it may replace files that cannot be read.
void run_data_open_own_tokenizer(RunData* data, const Options* options, const char* model_path, int model_V);

// Ends the program if the files of another model have a tokenizer with other tokens than the run's.
void run_data_check_tokens(const RunData* data, const Options* options, const char* model_path);

// Returns the id that separates documents: the tokenizer's, or without one the last of the
// vocabulary.
int run_data_eot(const RunData* data, int V);

// Returns the model card for the model's files: the tokenizer's card, plus what the run teaches the
// model. It borrows texts of `data`.
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

// The tokens of a prompt; `ids` has room for max + 1.
typedef struct {
    int *ids, max, count;
} PromptIds;

// Implements run_data_prompt for `text` of `bytes`. Returns 0 with the reason in `error` if it
// cannot be encoded or is too long.
int run_data_try_prompt(PromptIds* prompt, const RunData* data, const Options* options, int V,
                        const char* text, size_t bytes, char* error);

// Returns the bytes of the text of the targets. End-of-text and -1 have none. Returns 0 without a
// tokenizer.
double run_data_target_bytes(const RunData* data, const int* targets, size_t count);

// True if the run learns chats whose format it knows.
static inline int run_data_learns_chats(const RunData* data) { return data->marks.format.layout != NULL; }

// Returns how text is read and encoded, into shards in `directory`.
EncodedText run_data_text(const Options* options, const Bpe* bpe, const char* directory);

// Returns the tokenizer's marks to fill in the middle, for an option. Refuses a tokenizer without
// them, and a model of V tokens that lacks them.
FillInMiddle run_data_marks(const RunData* data, const Options* options, int V, const char* what);

#ifdef __cplusplus
}
#endif

#ifdef RUN_TOKENS_IMPLEMENTATION

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/shell_word.h"
#include "llmc/data/opening.h"
#include "llmc/data/token_files.h"
#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_encode.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/bpe_train.h"

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

EncodedText run_data_text(const Options* options, const Bpe* bpe, const char* directory) {
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
        const EncodedText text = run_data_text(options, NULL, NULL);
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

// Opens the data of a run without --train-data: the built-in stories, or no data for a model with
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

// Ends the program: the run's tokenizer differs from the model's own.
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

int run_data_try_prompt(PromptIds* prompt, const RunData* data, const Options* options, int V,
                        const char* text, size_t bytes, char* error) {
    const size_t start = options->samples.start_token || bytes == 0 ? 1 : 0;
    size_t tokens;
    int* encoded = (int*)check_alloc(tokenizer_most_ids(&data->tokenizer, bytes), sizeof(int), "prompt");
    int ok = tokenizer_try_encode(&data->tokenizer, text, bytes, encoded, &tokens, error);
    if (!ok) {
        opening_add_known(error, &data->tokenizer);
    } else if (tokens + start > (size_t)prompt->max) {
        ok = error_set(error, "prompt", "%zu tokens; wanted at most %d, %s", tokens, prompt->max - (int)start,
                       start ? "one less than the sequence length" : "the sequence length");
    }
    if (ok) {
        prompt->ids[0] = run_data_eot(data, V);
        memcpy(prompt->ids + start, encoded, tokens * sizeof(int));
        prompt->count = (int)(tokens + start);
    }
    free(encoded);
    return ok;
}

int run_data_prompt(int* ids, int max, const RunData* data, const Options* options, int V) {
    char error[ERROR_BYTES];
    const char* text = options->samples.prompt;
    PromptIds prompt = {ids, max, 1};
    ids[0] = run_data_eot(data, V);
    if (text[0] && !data->has_tokenizer) {
        die_usage("--prompt needs --tokenizer: this data is only token ids");
    }
    const int ok = !text[0] || run_data_try_prompt(&prompt, data, options, V, text, strlen(text), error);
    if (!ok) {
        die_usage("--%s", error);
    }
    return prompt.count;
}

FillInMiddle run_data_marks(const RunData* data, const Options* options, int V, const char* what) {
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
    const FillInMiddle fim = run_data_marks(data, options, V, "--suffix");
    const char* text = options->texts.suffix;
    int* suffix =
        (int*)check_alloc(tokenizer_most_ids(&data->tokenizer, strlen(text)) + 1, sizeof(int), "suffix");
    const size_t n = tokenizer_encode_rest(&data->tokenizer, text, strlen(text), suffix);
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

#endif // RUN_TOKENS_IMPLEMENTATION

#endif
