// tokenize.c -- from text to shards of tokens, or to a vocabulary.
//
//     make tokenize
//     ./tokenize --tokenizer gpt2.tiktoken --out data/books books/*.txt
//     ./tokenize --tokenizer gpt2.tiktoken --out data/fineweb 10BT/*.parquet
//     ./tokenize --train-bpe 32768 --out data/books books/*.jsonl.gz
//
// To resume an interrupted run, start it again with the same arguments: it continues after its last
// finished shard. PREFIX.progress.json keeps the arguments, the number of finished shards, and the
// start of the next one in the inputs. The shards are bitwise what an uninterrupted run writes.
// Checksums detect inputs and shards that have changed since. PREFIX.lock admits one run at a time.
#define OPTION_TABLE_FILE "dev/data/tokenize_options.h"
#define OPTION_ARGUMENTS                                                                                     \
    " INPUT...\nINPUT: text or .jsonl, also .gz or .zst of them; .parquet; - is standard input. "            \
    "Put names that start with - after --.\n"
#define OPTIONS_IMPLEMENTATION

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/lock.h"
#include "llmc/base/file_list.h"
#include "llmc/base/outputs.h"
#include "llmc/data/documents.h"
#include "llmc/data/fill_in_middle.h"
#include "llmc/setup/option_files.h"
#include "llmc/setup/options.h"
#include "llmc/setup/options_values.h"
#include "llmc/tokenizer/bpe.h"
#include "llmc/tokenizer/bpe_parts.h"
#include "llmc/tokenizer/bpe_train.h"
#include "llmc/tokenizer/chat_format.h"
#include "llmc/tokenizer/chat_marks.h"
#include "llmc/tokenizer/date.h"

#include "llmc/tokenizer/bpe_files.h"
#include "llmc/log/log_line.h"
#include "llmc/data/shard_writer.h"
#include "llmc/data/target_mask.h"
#include "llmc/base/limits.h"
#include "llmc/base/processor.h"
#include "llmc/base/signals.h"
#include "llmc/base/enum_words.h"
#include "llmc/base/terminal.h"
#include "llmc/data/encode_threads.h"

#include <dirent.h>

#define PROGRESS_ENDING ".progress.json"
enum { PROGRESS_MAX_BYTES = 1 << 30, LOCK_WAIT_S = 10 };

typedef struct {
    double start_s, shown_s; // times of the clock
    uint64_t start_bytes;    // bytes of the inputs, read by earlier runs
    uint64_t text_bytes, documents;
    uint64_t ids; // ids encoded by this run
    int is_terminal;
    const char* doing;
} Screen;

typedef struct {
    Options options;
    const char** inputs;
    uint64_t num_inputs;
    int threads;
    Documents source;
    Bpe bpe;
    ShardWriter shards;
    char progress_path[PATH_MAX];
    uint64_t* input_sums; // (num_inputs) checksums; 0 for streams
    uint64_t* shard_sums; // (shards.number) checksums of finished shards
    size_t shard_sums_room;
    TextPosition start; // position in the inputs from which they are read
    uint64_t skip_ids;  // ids from there on that are in finished shards already
    int is_finished;
    Screen screen;
} Run;

// ---- the screen ----

static void screen_open(Screen* screen, const char* doing, uint64_t start_bytes) {
    memset(screen, 0, sizeof(*screen));
    screen->doing = doing;
    screen->start_s = screen->shown_s = time_now_s();
    screen->start_bytes = start_bytes;
    screen->is_terminal = terminal_rewrites(STDERR_FILENO);
}

// Shows one line from time to time; on a terminal always the same one.
static void screen_show(Screen* screen, const Documents* source, uint64_t read_bytes) {
    const double now_s = time_now_s(), spent_s = now_s - screen->start_s;
    if (now_s - screen->shown_s < (screen->is_terminal ? 0.2 : 5)) {
        return;
    }
    screen->shown_s = now_s;
    const double read = (double)(read_bytes - screen->start_bytes);
    char of_all[64] = "", tokens[64] = "", eta[64] = "?";
    if (0 < read && read_bytes <= source->total_bytes) { // not from standard input
        snprintf(of_all, sizeof(of_all), " of %.1f", 1e-6 * (double)source->total_bytes);
        log_duration((double)(source->total_bytes - read_bytes) / read * spent_s, eta);
    }
    if (screen->ids) {
        snprintf(tokens, sizeof(tokens), " | %.2f M tokens", 1e-6 * (double)screen->ids);
    }
    fprintf(stderr, "%s%.1f%s MB %s | %.1f MB/s of text%s | eta %s%s", screen->is_terminal ? "\r" : "",
            1e-6 * (double)read_bytes, of_all, screen->doing, 1e-6 * (double)screen->text_bytes / spent_s,
            tokens, eta, screen->is_terminal ? "\033[K" : "\n");
}

static void screen_add(Screen* screen, const Documents* source, const TextBlock* text, size_t ids) {
    screen->text_bytes += text->bytes;
    screen->documents += text->num_documents;
    screen->ids += ids;
    screen_show(screen, source, text->read_bytes);
}

static void screen_close(Screen* screen) {
    if (screen->is_terminal) {
        fprintf(stderr, "\r\033[K");
    }
}

// ---- the progress file of an interrupted run ----

// Returns 1 if the shards depend on this option.
static int is_kept(const OptionRow* row) {
    return strcmp(row->group, "input") == 0 || strcmp(row->group, "shards") == 0;
}

static void progress_put_inputs(const Run* run, FILE* file) {
    fputs("{\n\"inputs\":[", file);
    for (uint64_t i = 0; i < run->num_inputs; i++) {
        fputs(i ? ",\n{\"path\":" : "\n{\"path\":", file);
        json_print_string(file, run->inputs[i], strlen(run->inputs[i]));
        fprintf(file, ",\"bytes\":%" PRIu64 ",\"checksum\":\"%016" PRIx64 "\"}", run->source.file_bytes[i],
                run->input_sums[i]);
    }
    fputs("],\n", file);
}

static void progress_put_options(const Run* run, FILE* file) {
    fprintf(file, "\"options\":{\"tokenizer\":\"%016" PRIx64 "\"", bpe_checksum(&run->bpe));
    for (int i = 0; i < OPTION_ROWS; i++) {
        char buffer[OPTION_TEXT_BYTES];
        if (is_kept(&OPTION_TABLE[i])) {
            const char* text = option_text(&run->options, &OPTION_TABLE[i], buffer);
            fprintf(file, ",\"%s\":", OPTION_TABLE[i].name);
            json_print_string(file, text, strlen(text));
        }
    }
    fputs("},\n", file);
}

static void progress_put_shards(const Run* run, FILE* file) {
    fprintf(file, "\"shards\":%" PRIu64 ",\"tokens\":%" PRIu64 ",\"checksums\":[", run->shards.number,
            run->shards.tokens);
    for (uint64_t i = 0; i < run->shards.number; i++) {
        fprintf(file, "%s\"%016" PRIx64 "\"", i ? "," : "", run->shard_sums[i]);
    }
    fputs("],\n", file);
}

// Saves the state: all shards so far are complete, and the next starts `skip` ids after the
// position.
static void progress_save(const Run* run, TextPosition at, uint64_t skip, int is_finished) {
    FileWriter file;
    file_open(&file, run->progress_path);
    progress_put_inputs(run, file.file); // first: the meaning of "auto" depends on them
    progress_put_options(run, file.file);
    fprintf(file.file,
            "\"file\":%" PRIu64 ",\"document\":%" PRIu64 ",\"offset\":%" PRIu64 ",\"skip_ids\":%" PRIu64
            ",\n",
            at.file, at.document, at.offset, skip);
    progress_put_shards(run, file.file);
    fprintf(file.file, "\"finished\":%s\n}\n", is_finished ? "true" : "false");
    file_commit(&file);
}

__attribute__((noreturn)) static void progress_refuse(const Run* run, const char* what, const char* now,
                                                      const char* then) {
    die_usage("%s is %s, but %s says %s: other arguments need --restart", what, now, run->progress_path,
              then);
}

static int progress_read_options(const Run* run, JsonReader* reader) {
    const char *key, *value;
    JsonWalk walk = json_walk(reader, '{');
    while (json_step(&walk, &key)) {
        char name[OPTION_NAME_BYTES + 2], buffer[OPTION_TEXT_BYTES], sum[17];
        const int ok = walk.ok = json_string(reader, &value);
        snprintf(name, sizeof(name), "--%s", key);
        snprintf(sum, sizeof(sum), "%016" PRIx64, bpe_checksum(&run->bpe));
        const OptionRow* row = option_find(name, strlen(name));
        const RemovedOption* removed = option_removed(key, strlen(key));
        if (ok && strcmp(key, "tokenizer") == 0 && strcmp(value, sum) != 0) {
            progress_refuse(run, "--tokenizer: the checksum of the vocabulary", sum, value);
        } else if (ok && removed && !option_removed_is_unused(removed, value)) {
            progress_refuse(run, name, "removed", value);
        } else if (ok && row && is_kept(row)) {
            const char* now = option_text(&run->options, row, buffer);
            if (strcmp(value, now) != 0) {
                progress_refuse(run, name, *now ? now : "''", *value ? value : "''");
            }
        }
    }
    return walk.ok;
}

static void progress_check_input(const Run* run, uint64_t i, const char* path, size_t bytes, uint64_t sum) {
    char now[64], then[64];
    if (i >= run->num_inputs || strcmp(path, run->inputs[i]) != 0) {
        snprintf(now, sizeof(now), "input %" PRIu64, i + 1);
        progress_refuse(run, now, i < run->num_inputs ? run->inputs[i] : "missing", path);
    }
    if (bytes != run->source.file_bytes[i]) {
        snprintf(now, sizeof(now), "%" PRIu64 " bytes long", run->source.file_bytes[i]);
        snprintf(then, sizeof(then), "%zu bytes", bytes);
        progress_refuse(run, path, now, then);
    }
    if (sum != run->input_sums[i]) {
        snprintf(now, sizeof(now), "another file, with the checksum %016" PRIx64, run->input_sums[i]);
        snprintf(then, sizeof(then), "%016" PRIx64, sum);
        progress_refuse(run, path, now, then);
    }
}

// Reads a checksum of 16 digits.
static int progress_read_sum(JsonReader* reader, uint64_t* sum) {
    const char* digits;
    char* end;
    if (!json_string(reader, &digits)) {
        return 0;
    }
    *sum = strtoull(digits, &end, 16);
    return (*digits && !*end) || json_unexpected(reader, "a checksum before it");
}

// Reads a member of an object that must have this name.
static int progress_take_member(JsonReader* reader, JsonPlace place, const char* name) {
    const char* key;
    const int more = json_member(reader, place, &key);
    return more >= 0 && ((more > 0 && strcmp(key, name) == 0) || json_unexpected(reader, name));
}

static int progress_read_inputs(const Run* run, JsonReader* reader) {
    uint64_t n = 0, sum = 0;
    JsonWalk walk = json_walk(reader, '[');
    for (; json_step(&walk, NULL); n++) {
        const char* path;
        size_t bytes = 0;
        walk.ok = json_take(reader, '{') && progress_take_member(reader, JSON_FIRST, "path") &&
                  json_string(reader, &path) && progress_take_member(reader, JSON_NEXT, "bytes") &&
                  json_natural(reader, &bytes) && progress_take_member(reader, JSON_NEXT, "checksum") &&
                  progress_read_sum(reader, &sum) && json_take(reader, '}');
        if (walk.ok) {
            progress_check_input(run, n, path, bytes, sum);
        }
    }
    if (walk.ok && n < run->num_inputs) {
        progress_check_input(run, n, "nothing", 0, 0);
    }
    return walk.ok;
}

// Returns the checksum of a shard, with room for it if it is new.
static uint64_t* shard_sum(Run* run, uint64_t number) {
    run->shard_sums = (uint64_t*)check_reserve(run->shard_sums, &run->shard_sums_room, (size_t)number + 1,
                                               sizeof(uint64_t), "checksums of shards");
    return &run->shard_sums[number];
}

// Reads the checksums; sets *count to their number.
static int progress_read_sums(Run* run, JsonReader* reader, uint64_t* count) {
    JsonWalk walk = json_walk(reader, '[');
    for (*count = 0; json_step(&walk, NULL); ++*count) {
        walk.ok = progress_read_sum(reader, shard_sum(run, *count));
    }
    return walk.ok;
}

// Continues the run that wrote the file.
static int progress_read(Run* run, JsonReader* reader) {
    const char* key;
    size_t shards = 0, tokens = 0, skip = 0, file = 0, document = 0, offset = 0;
    uint64_t num_sums = 0;
    JsonWalk walk = json_walk(reader, '{');
    while (json_step(&walk, &key)) {
        walk.ok = strcmp(key, "options") == 0     ? progress_read_options(run, reader)
                  : strcmp(key, "inputs") == 0    ? progress_read_inputs(run, reader)
                  : strcmp(key, "finished") == 0  ? json_bool(reader, &run->is_finished)
                  : strcmp(key, "file") == 0      ? json_natural(reader, &file)
                  : strcmp(key, "document") == 0  ? json_natural(reader, &document)
                  : strcmp(key, "offset") == 0    ? json_natural(reader, &offset)
                  : strcmp(key, "skip_ids") == 0  ? json_natural(reader, &skip)
                  : strcmp(key, "shards") == 0    ? json_natural(reader, &shards)
                  : strcmp(key, "tokens") == 0    ? json_natural(reader, &tokens)
                  : strcmp(key, "checksums") == 0 ? progress_read_sums(run, reader, &num_sums)
                                                  : json_skip(reader);
    }
    run->start = (TextPosition){file, document, offset};
    run->skip_ids = skip;
    if (!run->is_finished) {
        shard_writer_resume(&run->shards, shards);
    } else {
        run->shards.number = shards;
        run->shards.tokens = tokens;
    }
    return walk.ok && json_end(reader) &&
           (num_sums == shards ||
            error_set(reader->error, reader->path, "%" PRIu64 " checksums of %zu shards", num_sums, shards));
}

static void progress_load(Run* run) {
    char error[ERROR_BYTES], *text;
    size_t bytes;
    CHECK(file_try_read(run->progress_path, PROGRESS_MAX_BYTES, &text, &bytes, error), "%s", error);
    JsonReader reader = json_reader(run->progress_path, text, bytes, error);
    CHECK(progress_read(run, &reader), "%s; --restart starts over", error);
    free(text);
}

// ---- files that exist already ----

// Sets *sum to a checksum of a shard and its mask. Returns 0 with the error.
static int fingerprint(const char* path, uint64_t* sum, char* error) {
    return file_fingerprint(path, sum, error) && target_mask_mix(sum, path, file_fingerprint, error);
}

// Refuses to continue unless all shards are as the run left them.
static void check_shards(const Run* run) {
    for (uint64_t i = 0; i < run->shards.number; i++) {
        char path[PATH_MAX], error[ERROR_BYTES];
        struct stat info;
        uint64_t sum;
        shard_writer_path(&run->shards, i, path);
        const uint64_t wanted = shard_writer_bytes(&run->shards, i, run->shards.tokens);
        CHECK(stat(path, &info) == 0, "%s: %s, but %s says it is finished; --restart starts over", path,
              strerror(errno), run->progress_path);
        CHECK((uint64_t)info.st_size == wanted,
              "%s: %lld bytes, wanted %" PRIu64 " of a finished shard; --restart starts over", path,
              (long long)info.st_size, wanted);
        CHECK(fingerprint(path, &sum, error), "%s", error);
        CHECK(sum == run->shard_sums[i],
              "%s: its checksum is %016" PRIx64 ", but %s says %016" PRIx64 "; --restart starts over", path,
              sum, run->progress_path, run->shard_sums[i]);
    }
}

// Refuses streams: standard input and other files that can be read only once are lost.
static void refuse_streams(const Run* run) {
    for (uint64_t i = 0; i < run->num_inputs; i++) {
        if (run->source.is_stream[i] && (run->shards.number > 0 || run->is_finished)) {
            die_usage("%s: cannot be read again, and %s has %" PRIu64
                      " shards of an earlier run; --restart starts over",
                      strcmp(run->inputs[i], "-") == 0 ? "standard input" : run->inputs[i],
                      run->progress_path, run->shards.number);
        }
    }
}

// Returns the text after "PREFIX_train_000001.bin" or "PREFIX_val_000001.bin", and after the ending
// of its mask, in a file name; NULL if the name starts otherwise. `base` is the prefix without the
// directory.
static const char* behind_shard(const char* name, const char* base) {
    const size_t length = strlen(base);
    if (strncmp(name, base, length) != 0) {
        return NULL;
    }
    const char* rest = name + length;
    rest += strncmp(rest, "_val_", 5) == 0 ? 5 : strncmp(rest, "_train_", 7) == 0 ? 7 : strlen(rest);
    const size_t digits = strspn(rest, "0123456789");
    if (digits < 6 || strncmp(rest + digits, ".bin", 4) != 0) {
        return NULL;
    }
    rest += digits + 4;
    const size_t mask = strlen(TARGET_MASK_ENDING);
    return rest + (strncmp(rest, TARGET_MASK_ENDING, mask) == 0 ? mask : 0);
}

typedef enum { UNFINISHED_SHARDS, ALL_SHARDS } Removed;

// Removes shards of earlier runs, whatever their number: a pattern of names must find only this
// run's.
static void remove_shards(const char* out, Removed which) {
    char directory[PATH_MAX];
    file_directory_of(directory, out);
    DIR* entries = opendir(directory);
    CHECK(entries, "%s: cannot open: %s", directory, strerror(errno));
    for (struct dirent* entry; (entry = readdir(entries)) != NULL;) {
        const char* rest = behind_shard(entry->d_name, file_name_in(out));
        if (rest && (*rest ? file_is_part(entry->d_name) : which == ALL_SHARDS)) {
            CHECK(unlinkat(dirfd(entries), entry->d_name, 0) == 0, "%s/%s: cannot remove: %s", directory,
                  entry->d_name, strerror(errno));
        }
    }
    closedir(entries);
}

// Continues an earlier run, if any.
static void resume(Run* run) {
    if (run->options.restart) {
        remove_shards(run->options.out, ALL_SHARDS);
        unlink(run->progress_path);
    }
    if (file_exists(run->progress_path)) {
        progress_load(run);
        refuse_streams(run);
        check_shards(run);
        return;
    }
    char path[PATH_MAX];
    shard_writer_path(&run->shards, 0, path);
    CHECK(!file_exists(path), "%s: exists, but no %s; --restart overwrites it", path, run->progress_path);
    progress_save(run, run->start, 0, 0); // output that cannot be written shows before any work
}

// ---- one run at a time ----

// Takes the lock, or ends the program. The process holds it until it ends.
static void lock(const char* out) {
    char path[PATH_MAX];
    const LockPlace place = {path, path, "./tokenize", LOCK_WAIT_S};
    file_path(path, "%s.lock", out);
    lock_take(&place);
}

// ---- shards ----

// Records the checksum of a finished shard.
static void add_shard_sum(Run* run, uint64_t number) {
    char path[PATH_MAX], error[ERROR_BYTES];
    shard_writer_path(&run->shards, number, path);
    CHECK(fingerprint(path, shard_sum(run, number), error), "%s", error);
}

static int sink_shards(void* context, const TokenBlock* block) {
    Run* run = (Run*)context;
    const size_t skipped = block->count < run->skip_ids ? block->count : (size_t)run->skip_ids;
    run->skip_ids -= skipped;
    for (size_t at = skipped; at < block->count;) {
        const uint64_t number = run->shards.number;
        at += shard_writer_add(&run->shards, block->ids + at, block->count - at);
        if (run->shards.number > number) {
            add_shard_sum(run, number);
            progress_save(run, block->text->start, at, 0);
        }
    }
    screen_add(&run->screen, &run->source, block->text, block->count);
    return 1;
}

// Returns the size of a shard, but for small inputs about 5 % of English text.
static int64_t auto_val_tokens(const Run* run) {
    const int64_t part = (int64_t)(run->source.total_bytes / 100);
    return run->source.total_bytes > 0 && part < run->options.shard_tokens ? part : run->options.shard_tokens;
}

static void print_summary(const Run* run) {
    const Screen* screen = &run->screen;
    const double spent_s = time_now_s() - screen->start_s;
    char first[PATH_MAX], last[PATH_MAX];
    const uint64_t n = run->shards.number;
    shard_writer_path(&run->shards, 0, first);
    shard_writer_path(&run->shards, n - 1, last);
    printf("%" PRIu64 " tokens in %" PRIu64 " shard%s, %s%s%s\n", run->shards.tokens, n, words_s((double)n),
           first, n > 1 ? " to " : "", n > 1 ? last : "");
    printf("%" PRIu64
           " documents, %.1f MB of text, %.2f bytes per token, %.1f s, %.1f MB/s, %.2f M tokens/s\n",
           screen->documents, 1e-6 * (double)screen->text_bytes,
           (double)screen->text_bytes / (double)screen->ids, spent_s,
           1e-6 * (double)screen->text_bytes / spent_s, 1e-6 * (double)screen->ids / spent_s);
    if (run->shards.tokens <= (uint64_t)run->options.val_tokens) {
        fprintf(stderr, "warning: all tokens went to validation; --val-tokens limits them\n");
    }
}

#define VOCABULARY_ENDING ".tokenizer.json"

// Adds existing shards: they may be removed or replaced.
static void add_shard_outputs(Outputs* outputs, const char* out) {
    char directory[PATH_MAX], path[PATH_MAX];
    struct stat info;
    file_directory_of(directory, out);
    DIR* entries = opendir(directory);
    CHECK(entries, "%s: cannot open: %s", directory, strerror(errno));
    for (struct dirent* entry; (entry = readdir(entries)) != NULL;) {
        file_join(path, directory, entry->d_name);
        if (behind_shard(entry->d_name, file_name_in(out)) && lstat(path, &info) == 0 &&
            S_ISREG(info.st_mode)) {
            outputs_add(outputs, "out", path);
        }
    }
    closedir(entries);
}

// Adds the vocabulary of an earlier run, with which its shards can be decoded.
static void add_vocabulary_output(Outputs* outputs, const Options* options) {
    char path[PATH_MAX];
    file_path(path, "%s" VOCABULARY_ENDING, options->out);
    CHECK(options->restart || !file_exists(path), "%s: exists; --restart replaces the vocabulary", path);
    outputs_add(outputs, "out", path);
}

// Adds the files that the program reads.
static void list_inputs(const Run* run, FileList* files) {
    char buffer[OPTION_TEXT_BYTES];
    for (uint64_t i = 0; i < run->num_inputs; i++) {
        file_list_add(files, "", run->inputs[i]);
    }
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        if (row->type == OPTION_STRING) {
            option_list_files(files, row, option_text(&run->options, row, buffer));
        }
    }
}

// Ends the program if one of its outputs would replace one of its inputs, or cannot be written.
static void check_outputs(const Run* run) {
    static const char* const endings[] = {".lock", PROGRESS_ENDING};
    Outputs outputs;
    outputs_open(&outputs);
    list_inputs(run, &outputs.reads);
    for (int i = 0; i < 2; i++) {
        char path[PATH_MAX];
        file_path(path, "%s%s", run->options.out, endings[i]);
        outputs_add(&outputs, "out", path);
    }
    if (run->options.train_bpe) {
        add_vocabulary_output(&outputs, &run->options);
    } else {
        add_shard_outputs(&outputs, run->options.out);
    }
    outputs_check(&outputs);
    outputs_close(&outputs);
}

// Creates the directory of the files, and cleans up after killed runs, before any work.
static void make_place(const Run* run) {
    const char* out = run->options.out;
    char directory[PATH_MAX];
    struct stat info;
    file_directory_of(directory, out);
    file_make_directory(directory);
    CHECK(stat(directory, &info) == 0 && S_ISDIR(info.st_mode), "%s: a file, wanted a directory", directory);
    check_outputs(run);
    lock(out);
    remove_shards(out, UNFINISHED_SHARDS);
}

// Removes what killed runs left of the file PREFIX + ending.
static void remove_parts(const char* out, const char* ending) {
    char directory[PATH_MAX], beginning[PATH_MAX];
    file_directory_of(directory, out);
    snprintf(beginning, sizeof(beginning), "%s%s.", file_name_in(out), ending);
    file_remove_parts(directory, beginning);
}

static void sum_inputs(Run* run) {
    char error[ERROR_BYTES];
    run->input_sums = (uint64_t*)check_alloc(run->num_inputs, sizeof(uint64_t), "checksums of inputs");
    for (uint64_t i = 0; i < run->num_inputs; i++) {
        if (!run->source.is_stream[i]) {
            CHECK(file_fingerprint(run->inputs[i], &run->input_sums[i], error), "%s", error);
        }
    }
}

// Sets the date in chats, if the format has one: shards must be the same tomorrow.
static void date_chats(Run* run) {
    const char* date = run->options.chat_date;
    char today[DATE_BYTES];
    date_today(today);
    if (chat_has_date(&run->bpe) && !date[0]) {
        die_usage("--tokenizer %s: its chat_template prints today's date; wanted --chat-date %s, for example",
                  run->options.tokenizer, today);
    }
    if (date[0] && (!date_is(date) || !chat_has_date(&run->bpe))) {
        die_usage("--chat-date %s; wanted %s", date,
                  date_is(date) ? "none: no chat_template prints the date" : "a date, YYYY-MM-DD");
    }
    if (date[0]) {
        bpe_date_chats(&run->bpe, date);
    }
}

// Decides the format of chats, if an input has any.
static void open_chats(Run* run) {
    char error[ERROR_BYTES];
    const int chat = run->options.chat;
    int has_chats = 0;
    for (uint64_t i = 0; i < run->num_inputs && !has_chats; i++) {
        has_chats = !run->source.is_stream[i] &&
                    documents_answers(run->inputs[i], run->options.field) == ANSWERS_CHATS;
    }
    if (chat == CHAT_OFF || chat == CHAT_ON) {
        die_usage("--chat %s: wanted a format, chatml for example", chat_word(chat));
    }
    if (chat != OPTION_AUTO) {
        chat_choose(&run->bpe, (ChatWord)chat);
    } else if (has_chats && !chat_check(&run->bpe, "--chat chatml", error)) {
        die_usage("--tokenizer %s: %s", run->options.tokenizer, error);
    }
    if (has_chats) {
        date_chats(run);
    }
}

// Opens the output of a new run, or continues an earlier one's.
static void open_shards(Run* run) {
    bpe_open(&run->bpe, run->options.tokenizer);
    open_chats(run);
    make_place(run);
    remove_parts(run->options.out, PROGRESS_ENDING);
    if (run->options.val_tokens == OPTION_AUTO) {
        run->options.val_tokens = auto_val_tokens(run);
    }
    shard_writer_open(&run->shards, run->options.out, run->bpe.vocab_size,
                      (uint64_t)run->options.shard_tokens, (uint64_t)run->options.val_tokens);
    sum_inputs(run);
    resume(run);
}

static void finish_shards(Run* run) {
    const TextPosition end = run->source.at;
    const uint64_t number = run->shards.number;
    shard_writer_close(&run->shards);
    if (run->shards.number > number) {
        add_shard_sum(run, number);
    }
    CHECK(run->shards.number > 0, "the inputs contain no text");
    progress_save(run, end, 0, 1);
}

static void write_shards(Run* run) {
    open_shards(run);
    if (run->is_finished) {
        printf("already finished: %" PRIu64 " tokens in %" PRIu64 " shards; --restart starts over\n",
               run->shards.tokens, run->shards.number);
        return;
    }
    if (run->shards.number > 0) {
        printf("continuing after %" PRIu64 " tokens in %" PRIu64 " shards\n", run->shards.tokens,
               run->shards.number);
        fflush(stdout);
        CHECK(documents_seek(&run->source, run->start), "%s", run->source.error);
    }
    screen_open(&run->screen, "read", documents_read_bytes(&run->source));
    if (!pipeline_run(&run->source, &run->bpe, run->threads, sink_shards, run)) {
        shard_writer_discard(&run->shards);
        CHECK(0, "%s", run->source.error);
    }
    finish_shards(run);
    screen_close(&run->screen);
    print_summary(run);
}

// ---- vocabularies ----

static int sink_training(void* context, const TokenBlock* block) {
    Run* run = (Run*)context;
    screen_add(&run->screen, &run->source, block->text, block->count);
    return 1;
}

static void show_merges(void* context, int merges, int wanted) {
    Screen* screen = (Screen*)context;
    const double now_s = time_now_s();
    if (now_s - screen->shown_s >= (screen->is_terminal ? 0.2 : 5)) {
        screen->shown_s = now_s;
        fprintf(stderr, "%s%d of %d merges%s", screen->is_terminal ? "\r" : "", merges, wanted,
                screen->is_terminal ? "\033[K" : "\n");
    }
}

static void train_vocabulary(Run* run) {
    BpeTrainer trainer;
    char path[PATH_MAX];
    make_place(run);
    remove_parts(run->options.out, VOCABULARY_ENDING);
    Bpe old;
    const int marks = run->options.fim_marks ? FIM_MARKS : 0, ids = run->options.train_bpe - marks;
    memset(&old, 0, sizeof(old));
    bpe_trainer_open(&trainer, run->threads);
    if (*run->options.extend_bpe) {
        bpe_open(&old, run->options.extend_bpe);
        CHECK(old.vocab_size < ids, "%s has %d ids; wanted more than these: --train-bpe %d or above",
              run->options.extend_bpe, old.vocab_size, old.vocab_size + 1 + marks);
        bpe_trainer_split_as(&trainer, &old);
    }
    screen_open(&run->screen, "read", 0);
    CHECK(pipeline_train(&run->source, &trainer, sink_training, run), "%s", run->source.error);
    if (*run->options.extend_bpe) {
        bpe_trainer_extend(&trainer, &old, ids, show_merges, &run->screen, &run->bpe);
    } else {
        bpe_trainer_run(&trainer, ids, show_merges, &run->screen, &run->bpe);
    }
    bpe_add_names(&run->bpe, fim_names().of, marks);
    bpe_trainer_close(&trainer);
    bpe_close(&old); // closing one that was never opened does nothing
    screen_close(&run->screen);
    printf("%d ids from %" PRIu64 " documents, %.1f MB of text, in %.1f s\n", run->bpe.vocab_size,
           run->screen.documents, 1e-6 * (double)run->screen.text_bytes, time_now_s() - run->screen.start_s);
    file_path(path, "%s" VOCABULARY_ENDING, run->options.out);
    bpe_write(&run->bpe, path);
    puts(path);
}

// ---- the program ----

static void check_options(const Run* run) {
    const Options* options = &run->options;
    if (run->num_inputs == 0) {
        die_usage("no input; wanted files of text, or - for standard input (--help)");
    }
    const int least = 257 + (options->fim_marks ? FIM_MARKS : 0);
    if (options->train_bpe && options->train_bpe < least) {
        die_usage("--train-bpe is %d; wanted at least %d: %s", options->train_bpe, least,
                  options->fim_marks ? "the bytes, end-of-text and three marks"
                                     : "the bytes and end-of-text");
    }
    if (options->fim_marks && !options->train_bpe) {
        die_usage("--fim-marks is given without --train-bpe; wanted the size of a new vocabulary");
    }
    if (*options->extend_bpe && !options->train_bpe) {
        die_usage("--extend-bpe is given without --train-bpe; wanted the size of the new vocabulary");
    }
    if (!options->train_bpe && !*options->tokenizer) {
        die_usage("--tokenizer is missing; wanted a vocabulary, gpt2.tiktoken for example, or --train-bpe");
    }
    if (options->train_bpe && *options->tokenizer) {
        die_usage("--tokenizer and --train-bpe: wanted only one of them");
    }
    if (!*options->out) {
        die_usage("--out is empty; wanted a prefix for file names");
    }
}

PROCESSOR_CHECK

int main(int argc, char** argv) {
    static Run run; // 30 KB of paths
    file_open_standard();
    signals_open_writes();
    run.inputs = (const char**)check_alloc((size_t)argc + 1, sizeof(char*), "inputs");
    run.num_inputs =
        (uint64_t)options_parse_arguments(&run.options, argc, argv, options_program(OPTION_CPU), run.inputs);
    options_note_repeated(stderr, &run.options);
    check_options(&run);
    run.threads = run.options.threads ? run.options.threads : limits_threads("");
    file_path(run.progress_path, "%s" PROGRESS_ENDING, run.options.out);
    const TextOptions text = {(TextFormat)run.options.format, run.options.field, run.options.separator,
                              TEXT_BLOCK_BYTES};
    documents_open(&run.source, &text, run.inputs, run.num_inputs);
    CHECK(documents_check(&run.source), "%s", run.source.error);
    if (run.options.train_bpe) {
        train_vocabulary(&run);
    } else {
        write_shards(&run);
    }
    documents_close(&run.source);
    bpe_close(&run.bpe);
    free(run.input_sums);
    free(run.shard_sums);
    free(run.inputs);
    options_close(&run.options);
    file_flush_standard();
    return EXIT_SUCCESS;
}
