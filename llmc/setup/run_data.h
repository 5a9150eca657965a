/*
run_data.h -- the data of a run: its files, their encoding, the validation sets and the loaders.
run_tokens.h has the tokenizer.
*/
#ifndef LLMC_RUN_DATA_H
#define LLMC_RUN_DATA_H

#include <stdint.h>
#include <stdio.h>

#include "llmc/data/dataloader.h"
#include "llmc/data/mixture.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_tokens.h"
#include "llmc/setup/settled.h"

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
// share of rearranged documents in the order suffix, prefix, middle
#define RUN_DATA_SPM_RATE 0.5f
// most steps of --epochs; --steps has the same limit
#define RUN_DATA_MAX_STEPS 1e12
#define RUN_DATA_STORIES_MAX_TOKENS ((int64_t)1 << 27) // longer runs read the built-in text again

// A set of validations. Losses of sets with other checksums are not comparable.
typedef struct {
    const char* name; // "": the only one, without a name
    // of its files, of which sequences a validation reads, and of their packing
    uint64_t checksum;
} ValidationSet;

// ---- files ----

// Finds out whether the training data have answers, and with which marks the chats are written.
// Call it before run_data_open.
Answers run_data_find_answers(RunData* data, const Options* options);

// Sets the date of a template's chats to the one of --chat-date; says so if it has none.
void run_data_date_chats(Bpe* bpe, const char* date);

// Opens the data, and returns the steps of the run: --steps, or the length of --epochs or one
// epoch. With --plan and --print-config the data may stay unknown (data->is_unknown), and the steps
// "auto".
int64_t run_data_open(RunData* data, const Options* options);

// Sets the position that the schedule of the training data counts from, and the first sequence of
// each of its lines, but not the order (mixture_continue).
void run_data_place(RunData* data, const Options* options, DataPlace from);

// Opens text or shards as tokens of the run, after run_data_open. `data` and `list` must outlive
// `sources`.
void run_data_open_text(DataSources* sources, const RunData* data, const Options* options, const char* list);

// Returns the number of sequences in a validation, on all ranks: --eval-batches micro-batches, or
// with "auto" a number that does not depend on the batch; at most `epoch`, all of the data.
int64_t run_data_eval_sequences(const Options* options, uint64_t epoch);

// Returns a validation set, from 0 to num_val_sets. The first one decides about the run.
static inline const DataSources* run_data_val_set(const RunData* data, int set) {
    return data->val_sets ? &data->val_sets[set] : &data->val;
}

// Returns the number of sequences in the validations of all sets.
int64_t run_data_all_eval_sequences(const RunData* data, const Options* options);

// Sets `sets` (SOURCES_MAX) to the validation sets, and returns their number. The names belong to
// `data`.
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
#include "llmc/base/xxh64.h"
#include "llmc/data/packing.h"
#include "llmc/data/encoded_text.h"
#include "llmc/data/token_files.h"
#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_parts.h"
#include "llmc/tokenizer/date.h"

// ---- files ----

void run_data_date_chats(Bpe* bpe, const char* date) {
    if (!date_is(date)) {
        die_usage("--chat-date %s; wanted a date, YYYY-MM-DD", date);
    }
    if (!chat_has_date(bpe)) {
        fprintf(stderr, "note: --chat-date has no effect: no chat_template prints the date\n");
    }
    bpe_date_chats(bpe, date);
}

// Decides the date in the chats that the run learns.
static void run_data_settle_date_(RunData* data, const Options* options) {
    if (options->texts.chat_date[0]) {
        run_data_date_chats(data->tokenizer.bpe, options->texts.chat_date);
    } else if (chat_has_date(data->tokenizer.bpe)) {
        date_today(data->chat_date);
        bpe_date_chats(data->tokenizer.bpe, data->chat_date);
    }
}

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
    run_data_settle_date_(data, options);
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
    } else if (options->texts.chat_date[0] && are_files) {
        fprintf(stderr, "note: --chat-date has no effect: --train-data %s has no chats\n",
                options->data.train);
    }
    return data->answers;
}

// Returns this number of tokens, up to a limit, plus one for the last target. Users may ask for any
// number, so it may overflow an integer.
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

// Returns the sequence in which a step starts, with the options' batches after `from`.
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
    EncodedText text = run_data_text(options, bpe, directory);
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
    // Text cannot be mapped as bytes if it is split, compressed, in fields or in too many files.
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

// Refuses --epochs for endless data, or together with --steps. Refuses a schedule without --steps:
// the length of an epoch depends on the weights.
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
        data->fim = run_data_marks(data, options, options->model.vocab_size, what);
        data->fim.rate = options->data.fim_rate;
        data->fim.spm_rate = RUN_DATA_SPM_RATE;
        data->fim.seed = options->data.seed;
    }
}

// Returns the number of steps in --epochs, or in one epoch. An incomplete last step is left out.
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

// Warns if the vocabulary is GPT-2's by default and seems far too large. Shards do not state their
// vocabulary.
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

// Opens the loader of a validation set, where a validation counts as one step.
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

// Prints which share of a step is empty: rows of micro-batches without a sequence.
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
