/*
encoded_text.h -- text as the data of a run: encoded once, by all cores, into shards that are kept.

A list of sources (mixture.h) that names text becomes one that names shards, with the same weights.
A source becomes

    DIRECTORY/<key>_train_000000.bin, ...     its tokens, each document after an end-of-text token
    DIRECTORY/<key>_train_000000.bin.mask     which are answers, if some are not (target_mask.h)
    DIRECTORY/<key>.json                      their sizes and checksums, written last

where the key is a checksum of everything that the tokens depend on: the vocabulary, the separator,
the names and the contents of the files (file_fingerprint). A run that finds intact shards uses
them. If the text or the tokenizer has changed, the text is encoded again, and the source's former
shards are removed. Every start reads all shards to compare their checksums. At 5 GB/s that delays
nothing: the start reads them anyway to check their tokens.

Without a directory of the run's own, the shards go into a temporary one. It is removed as soon as
they are mapped, and however the program ends before, unless it is killed.
*/
#ifndef LLMC_ENCODED_TEXT_H
#define LLMC_ENCODED_TEXT_H

#include <limits.h>
#include <stdio.h>

#include "llmc/data/mixture.h"
#include "llmc/data/target_mask.h"
#include "llmc/data/token_files.h"
#include "llmc/tokenizer/bpe.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    TEXT_DATA_ENCODE, // encodes text whose shards are not kept
    TEXT_DATA_FIND    // writes nothing
} TextDataMode;

typedef struct {
    const Bpe* bpe;
    const char *field, *separator; // of JSON lines and Parquet files; of plain text (documents.h)
    const char* directory;         // directory of the shards, which exists
    FILE* screen;                  // for progress
    TextDataMode mode;
    int warns;   // warns about text that seems to have a separator
    int threads; // encoder threads; 0: as many as this process may use
} EncodedText;

// ---- the temporary directory ----

// Removes the temporary directory with its shards; existing mappings stay valid.
void encoded_text_remove_temporary(void);

// Creates it in TMPDIR or /tmp, to be removed at exit. Sets path.
void encoded_text_make_temporary(char path[PATH_MAX]);

// ---- separators ----

// Warns, once per source, if text that is read as bytes seems to have a separator.
void encoded_text_warn(FILE* screen, const DataSources* sources);

// ---- shards ----

// Returns the list of shards for a list of text, and encodes text whose shards are not kept. The
// caller holds the lock of the directory, and frees the list. With TEXT_DATA_FIND, returns NULL if
// some are not kept.
char* encoded_text_shards(const EncodedText* text, const char* list);

// ---- vocabularies ----

// Trains a vocabulary of vocab_size ids on all sources of the list, whatever their weights. `text`
// needs no vocabulary and no directory.
void encoded_text_train(Bpe* bpe, const EncodedText* text, const char* list, int vocab_size);

// ---- answers ----

// Returns the answers of the sources of a list, as the start of each one shows them.
Answers encoded_text_answers(const char* list, const char* field);

// ---- bytes ----

// True if all files of the list are plain text that can be mapped as bytes: nothing has to be
// decompressed or taken out of fields.
int encoded_text_is_plain(const char* list);

// True if a file of the list has text in fields.
int encoded_text_has_fields(const char* list);

#ifdef __cplusplus
}
#endif

#ifdef ENCODED_TEXT_IMPLEMENTATION

#include <dirent.h>
#include <errno.h>
#include <glob.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/limits.h"
#include "llmc/base/mapped_file.h"
#include "llmc/base/printable.h"
#include "llmc/base/signals.h"
#include "llmc/base/text_buffer.h"
#include "llmc/base/xxh64.h"
#include "llmc/data/compressed_file.h"
#include "llmc/data/shard_writer.h"
#include "llmc/data/encode_threads.h"
#include "llmc/data/documents.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/chat_marks.h"
#include "llmc/tokenizer/bpe_train.h"

#define TEXT_DATA_SHARD_TOKENS_ 100000000
#define TEXT_DATA_MAX_KEPT_ ((size_t)64 << 20) // largest .json of a source's shards

// Source being read, as the sinks see it.
typedef struct {
    const char* name;
    const EncodedText* text;
    Documents source;
    ShardWriter shards;
    uint64_t text_bytes;
    double start_s, shown_s;
    int warns;
} TextReading_;

// ---- the temporary directory ----

// Its name, or "". Global because functions called by exit() take no arguments.
static char encoded_text_temporary_[PATH_MAX] = "";

void encoded_text_remove_temporary(void) {
    struct dirent* entry;
    DIR* entries = encoded_text_temporary_[0] ? opendir(encoded_text_temporary_) : NULL;
    while (entries && (entry = readdir(entries))) {
        unlinkat(dirfd(entries), entry->d_name, 0); // fails for "." and ".."
    }
    if (entries) {
        closedir(entries);
        rmdir(encoded_text_temporary_);
    }
    encoded_text_temporary_[0] = '\0';
}

void encoded_text_make_temporary(char path[PATH_MAX]) {
    const char *set = getenv("TMPDIR"), *parent = set && *set ? set : "/tmp";
    file_path(path, "%s/tokens-XXXXXX", parent);
    CHECK(mkdtemp(path), "TMPDIR %s: cannot make a directory: %s", parent, strerror(errno));
    strcpy(encoded_text_temporary_, path);
    atexit(encoded_text_remove_temporary);
}

// ---- separators ----

static void encoded_text_say_mark_(FILE* screen, const char* path) {
    printable_line(screen,
                   "warning: %s contains " BPE_EOT_TEXT
                   ", read as plain text; if they separate documents, use --separator '" BPE_EOT_TEXT "'",
                   path);
    fflush(screen);
}

// True if a separator could divide the text of this file: compressed or not, it has no fields.
static int encoded_text_is_one_text_(const char* path) {
    char name[PATH_MAX];
    snprintf(name, sizeof(name), "%.*s", (int)compressed_name_bytes(path), path);
    return documents_is_plain(name);
}

static int encoded_text_has_mark_(const char* text, size_t bytes) {
    return bytes && memmem(text, bytes, BPE_EOT_TEXT, strlen(BPE_EOT_TEXT)) != NULL;
}

// First part of a mapped text, for mapped_try.
typedef struct {
    const char* text;
    size_t bytes;
    int found;
} TextSearch_;

static void encoded_text_search_(void* search_) {
    TextSearch_* search = (TextSearch_*)search_;
    search->found = encoded_text_has_mark_(search->text, search->bytes);
}

void encoded_text_warn(FILE* screen, const DataSources* sources) {
    // first bytes of a file that are searched: that is many documents
    const size_t max = (size_t)8 << 20;
    for (int s = 0; s < sources->count; s++) {
        const TokenStream* stream = &sources->source[s].stream;
        TextSearch_ search = {NULL, 0, 0};
        for (size_t i = 0; i < stream->num_spans && !search.found; i++) {
            const TokenSpan* span = &stream->spans[i];
            const void* where;
            search.text = (const char*)span->tokens;
            search.bytes = span->width > 1 ? 0 : span->count < max ? span->count : max;
            mapped_try(encoded_text_search_, &search, &where); // a missing file is reported later
            if (search.found) {
                encoded_text_say_mark_(screen, span->path);
            }
        }
    }
}

// ---- reading ----

static void encoded_text_open_(TextReading_* reading, const char* name, const glob_t* files,
                               const EncodedText* text) {
    const TextOptions options = {TEXT_BY_NAME, text->field, text->separator, TEXT_BLOCK_BYTES};
    memset(reading, 0, sizeof(*reading));
    reading->name = name;
    reading->text = text;
    reading->start_s = reading->shown_s = time_now_s();
    reading->warns = text->warns && !text->separator[0];
    documents_open(&reading->source, &options, (const char* const*)files->gl_pathv, files->gl_pathc);
}

// Prints a line every few seconds, and a warning if one is due.
static void encoded_text_print_progress_(TextReading_* reading, const TokenBlock* block) {
    const TextBlock* text = block->text;
    const char* path = reading->source.paths[text->start.file];
    const double now_s = time_now_s();
    reading->text_bytes += text->bytes;
    if (reading->warns && encoded_text_is_one_text_(path) &&
        encoded_text_has_mark_(text->text, text->bytes)) {
        reading->warns = 0;
        encoded_text_say_mark_(reading->text->screen, path);
    }
    if (now_s - reading->shown_s >= 5) {
        reading->shown_s = now_s;
        printable_line(reading->text->screen, "%s: %.0f of %.0f MB read, %.1f MB/s of text", reading->name,
                       1e-6 * (double)text->read_bytes, 1e-6 * (double)reading->source.total_bytes,
                       1e-6 * (double)reading->text_bytes / (now_s - reading->start_s));
        fflush(reading->text->screen);
    }
}

// Removes what was written so far: without its .json, nothing would use it.
static void encoded_text_abandon_(TextReading_* reading) {
    char path[PATH_MAX];
    shard_writer_discard(&reading->shards);
    for (uint64_t i = 0; i < reading->shards.number; i++) {
        shard_writer_path(&reading->shards, i, path);
        unlink(path);
        target_mask_remove(path);
    }
}

static int encoded_text_store_(void* context, const TokenBlock* block) {
    TextReading_* reading = (TextReading_*)context;
    for (size_t at = 0; at < block->count;) {
        at += shard_writer_add(&reading->shards, block->ids + at, block->count - at);
    }
    encoded_text_print_progress_(reading, block);
    return !signals_stop();
}

static int encoded_text_count_(void* context, const TokenBlock* block) {
    encoded_text_print_progress_((TextReading_*)context, block);
    return !signals_stop();
}

// ---- kept shards ----

// Adds the format of chats, if the vocabulary has one.
static void encoded_text_add_chats_(const Bpe* bpe, Xxh64* hash) {
    ChatMarks marks;
    chat_marks_open(&marks, bpe);
    const uint64_t chats = chat_signature(&marks);
    if (!marks.is_text || bpe->card.chat.layout) {
        xxh64_add(hash, &chats, sizeof(chats));
    }
}

// Returns the key: a checksum of everything that the tokens depend on.
static uint64_t encoded_text_key_(const EncodedText* text, const char* name, const glob_t* files) {
    Xxh64 hash;
    TokensProgress progress = {0, 0};
    const uint64_t vocabulary = bpe_checksum(text->bpe);
    xxh64_open(&hash);
    xxh64_add(&hash, &vocabulary, sizeof(vocabulary));
    xxh64_add(&hash, text->field, strlen(text->field) + 1);
    xxh64_add(&hash, text->separator, strlen(text->separator) + 1);
    xxh64_add(&hash, name, strlen(name) + 1);
    encoded_text_add_chats_(text->bpe, &hash);
    for (size_t i = 0; i < files->gl_pathc; i++) {
        const char* path = files->gl_pathv[i];
        char error[ERROR_BYTES];
        uint64_t contents;
        struct stat info;
        tokens_progress(&progress, stat(path, &info) == 0 ? (size_t)info.st_size : 0, path);
        CHECK(file_fingerprint(path, &contents, error), "%s", error);
        xxh64_add(&hash, path, strlen(path) + 1);
        xxh64_add(&hash, &contents, sizeof(contents));
    }
    return xxh64_value(&hash);
}

typedef struct {
    size_t bytes;
    uint64_t sum; // of the whole file and its mask
} TextShard_;

// Contents of the .json of a source's shards.
typedef struct {
    char* source;       // name of the source
    TextShard_* shards; // (count)
    size_t count, tokens;
} TextKept_;

static void encoded_text_free_kept_(TextKept_* kept) {
    free(kept->source);
    free(kept->shards);
    memset(kept, 0, sizeof(*kept));
}

static int encoded_text_read_shards_(JsonReader* reader, TextKept_* kept) {
    JsonWalk walk = json_walk(reader, '[');
    while (json_step(&walk, NULL)) {
        const char *key, *sum;
        kept->shards =
            (TextShard_*)check_grow(kept->shards, kept->count, sizeof(TextShard_), "list of shards");
        walk.ok = json_take(reader, '{') && json_member(reader, JSON_FIRST, &key) > 0 &&
                  json_natural(reader, &kept->shards[kept->count].bytes) &&
                  json_member(reader, JSON_NEXT, &key) > 0 && json_string(reader, &sum) &&
                  json_take(reader, '}');
        if (walk.ok) {
            kept->shards[kept->count++].sum = strtoull(sum, NULL, 16);
        }
    }
    return walk.ok;
}

// Reads such a file. Returns 0 if it does not exist or is not ours. An unreadable one is an error:
// its shards may be good. encoded_text_free_kept_ frees it.
static int encoded_text_read_kept_(TextKept_* kept, const char* path) {
    char *text, error[ERROR_BYTES];
    const char *key, *source;
    size_t bytes;
    memset(kept, 0, sizeof(*kept));
    if (!file_exists(path)) {
        return 0;
    }
    CHECK(file_try_read(path, TEXT_DATA_MAX_KEPT_, &text, &bytes, error), "%s", error);
    JsonReader reader = json_reader(path, text, bytes, error);
    JsonWalk walk = json_walk(&reader, '{');
    while (json_step(&walk, &key)) {
        if (strcmp(key, "source") == 0 && !kept->source) {
            walk.ok = json_string(&reader, &source) && (kept->source = strdup(source)) != NULL;
        } else if (strcmp(key, "shards") == 0 && !kept->shards && json_peek(&reader) == '[') {
            walk.ok = encoded_text_read_shards_(&reader, kept);
        } else {
            walk.ok = strcmp(key, "tokens") == 0 ? json_natural(&reader, &kept->tokens) : json_skip(&reader);
        }
    }
    free(text);
    return walk.ok && kept->source;
}

// Sets *sum to the checksum of a shard and its mask. Returns 0 with the error.
static int encoded_text_sum_(const char* path, uint64_t* sum, char* error) {
    return file_checksum(path, sum, error) && target_mask_mix(sum, path, file_checksum, error);
}

// True if a shard is as it was written.
static int encoded_text_check_shard_(const char* path, size_t bytes, uint64_t wanted, char* error) {
    struct stat info;
    uint64_t sum = 0;
    if (stat(path, &info) != 0) {
        return error_set(error, path, "%s", strerror(errno));
    }
    if ((size_t)info.st_size != bytes) {
        return error_set(error, path, "%zu bytes, wanted %zu", (size_t)info.st_size, bytes);
    }
    if (!encoded_text_sum_(path, &sum, error)) {
        return 0;
    }
    return sum == wanted || error_set(error, path, "checksum %016llx, wanted %016llx",
                                      (unsigned long long)sum, (unsigned long long)wanted);
}

// True if all shards that the .json names are intact. Prints which one is not.
static int encoded_text_is_kept_(const EncodedText* text, const char* name, const char* json,
                                 const ShardWriter* shards) {
    TokensProgress progress = {0, 0};
    TextKept_ kept;
    char path[PATH_MAX], error[ERROR_BYTES];
    int ok = encoded_text_read_kept_(&kept, json) && kept.count > 0;
    for (size_t i = 0; ok && i < kept.count; i++) {
        shard_writer_path(shards, i, path);
        tokens_progress(&progress, kept.shards[i].bytes, path);
        ok = encoded_text_check_shard_(path, kept.shards[i].bytes, kept.shards[i].sum, error);
        if (!ok) {
            printable_line(text->screen, "%s; %s is encoded again", error, name);
        }
    }
    encoded_text_free_kept_(&kept);
    return ok;
}

enum { TEXT_DATA_KEY_DIGITS_ = 16 };

// True if a file of this name is a shard, a mask or a .json that we wrote; sets key to its key.
static int encoded_text_is_ours_(const char* file, char key[TEXT_DATA_KEY_DIGITS_ + 1]) {
    const char* rest = file + TEXT_DATA_KEY_DIGITS_;
    unsigned long long number;
    int length = 0;
    if (strspn(file, "0123456789abcdef") != TEXT_DATA_KEY_DIGITS_) {
        return 0;
    }
    memcpy(key, file, TEXT_DATA_KEY_DIGITS_);
    key[TEXT_DATA_KEY_DIGITS_] = '\0';
    return strcmp(rest, ".json") == 0 ||
           (sscanf(rest, "_train_%6llu.bin%n", &number, &length) == 1 && length > 0 &&
            (!rest[length] || strcmp(rest + length, TARGET_MASK_ENDING) == 0));
}

// True if the files of this key are obsolete: made from an earlier state of the source, or never
// finished.
static int encoded_text_is_old_(const EncodedText* text, const char* key, const char* source) {
    TextKept_ kept;
    char json[PATH_MAX], name[TEXT_DATA_KEY_DIGITS_ + 8];
    snprintf(name, sizeof(name), "%s.json", key);
    file_join(json, text->directory, name);
    const int old = !encoded_text_read_kept_(&kept, json) || strcmp(kept.source, source) == 0;
    encoded_text_free_kept_(&kept);
    return old;
}

// Removes everything older than the shards of this key. If a .json comes before its shards in the
// directory, they then count as unfinished.
static void encoded_text_remove_old_(const EncodedText* text, const char* source, const char* key) {
    struct dirent** entries;
    const int count = scandir(text->directory, &entries, NULL, alphasort);
    for (int i = 0; i < count; i++) {
        char other[TEXT_DATA_KEY_DIGITS_ + 1], path[PATH_MAX];
        const char* file = entries[i]->d_name;
        if (encoded_text_is_ours_(file, other) && strcmp(other, key) != 0 &&
            encoded_text_is_old_(text, other, source)) {
            file_join(path, text->directory, file);
            unlink(path);
        }
        free(entries[i]);
    }
    if (count >= 0) {
        free(entries);
    }
}

// ---- shards ----

// Writes the .json of the shards, which completes them.
static void encoded_text_finish_(TextReading_* reading, const char* json) {
    const ShardWriter* shards = &reading->shards;
    FILE* screen = reading->text->screen;
    FileWriter file;
    file_open(&file, json);
    fputs("{\"source\":", file.file);
    json_print_string(file.file, reading->name, strlen(reading->name));
    fprintf(file.file, ",\"tokens\":%llu,\"shards\":[", (unsigned long long)shards->tokens);
    for (uint64_t i = 0; i < shards->number; i++) {
        char path[PATH_MAX], error[ERROR_BYTES];
        struct stat info;
        uint64_t sum = 0;
        shard_writer_path(shards, i, path);
        if (!encoded_text_sum_(path, &sum, error) || // usually from the cache
            (stat(path, &info) != 0 &&
             !error_set(error, path, "cannot read its attributes: %s", strerror(errno)))) {
            file_discard(&file);
            CHECK(0, "%s", error);
        }
        fprintf(file.file, "%s{\"bytes\":%llu,\"xxh64\":\"%016llx\"}", i ? "," : "",
                (unsigned long long)info.st_size, (unsigned long long)sum);
    }
    fputs("]}\n", file.file);
    file_commit(&file);
    const double spent_s = time_now_s() - reading->start_s;
    printable_line(screen, "%s: %llu tokens of %.1f MB of text in %.1f s (%.1f MB/s)", reading->name,
                   (unsigned long long)shards->tokens, 1e-6 * (double)reading->text_bytes, spent_s,
                   1e-6 * (double)reading->text_bytes / spent_s);
    fflush(screen);
}

static int encoded_text_threads_(const EncodedText* text) {
    return text->threads ? text->threads : limits_threads("");
}

// Encodes a source into shards; removes them if that fails or a signal stops it.
static void encoded_text_write_(TextReading_* reading, const char* json) {
    const EncodedText* text = reading->text;
    const int ok =
        pipeline_run(&reading->source, text->bpe, encoded_text_threads_(text), encoded_text_store_, reading);
    if (!ok || signals_stop()) {
        encoded_text_abandon_(reading);
        signals_end("encoding text");
        CHECK(ok, "%s", reading->source.error);
    }
    shard_writer_close(&reading->shards);
    CHECK(reading->shards.tokens > 0, "%s: no text in it", reading->name);
    encoded_text_finish_(reading, json);
}

// Sets prefix (PATH_MAX) to the prefix of a source's shards, which are encoded if they are not
// kept. Returns 0 if it has none.
static int encoded_text_encode_(const EncodedText* text, const char* name, char* prefix) {
    glob_t files = tokens_list(name);
    TextReading_ reading;
    char json[PATH_MAX];
    file_path(prefix, "%s/%016llx", text->directory,
              (unsigned long long)encoded_text_key_(text, name, &files));
    file_path(json, "%s.json", prefix);
    encoded_text_open_(&reading, name, &files, text);
    shard_writer_open(&reading.shards, prefix, text->bpe->vocab_size, TEXT_DATA_SHARD_TOKENS_, 0);
    const int is_kept = encoded_text_is_kept_(text, name, json, &reading.shards);
    if (is_kept) {
        printable_line(text->screen, "%s: reusing tokens from an earlier run, %s_train_*.bin", name, prefix);
    } else if (text->mode == TEXT_DATA_ENCODE) {
        CHECK(documents_check(&reading.source), "%s", reading.source.error);
        encoded_text_write_(&reading, json);
        encoded_text_remove_old_(text, name, strrchr(prefix, '/') + 1);
    }
    documents_close(&reading.source);
    globfree(&files);
    return is_kept || text->mode == TEXT_DATA_ENCODE;
}

char* encoded_text_shards(const EncodedText* text, const char* list) {
    SourceList sources;
    TextBuffer names;
    char prefix[PATH_MAX];
    int found = 1;
    if (text->mode == TEXT_DATA_ENCODE) {
        file_remove_parts(text->directory, "");
    }
    mixture_read_list(&sources, list);
    text_buffer_open(&names, "names of sources");
    for (int i = 0; i < sources.count && found; i++) {
        found = encoded_text_encode_(text, sources.patterns[i], prefix);
        char* escaped = tokens_escape(prefix);
        fprintf(names.file, "%s%s_train_*.bin", i ? "," : "", escaped);
        free(escaped);
        if (sources.count > 1) {
            fprintf(names.file, ":%.6f", 1e-6 * (double)sources.weights[i]);
        }
    }
    free(sources.text);
    char* shards = text_buffer_close(&names);
    if (!found) {
        free(shards);
        shards = NULL;
    }
    return shards;
}

// ---- vocabularies ----

// Prints the progress of merging from time to time.
typedef struct {
    FILE* screen;
    double shown_s;
} TextMerging_;

static void encoded_text_merge_(void* context, int merges, int wanted) {
    TextMerging_* merging = (TextMerging_*)context;
    signals_end("training a vocabulary");
    if (time_now_s() - merging->shown_s >= 5) {
        merging->shown_s = time_now_s();
        fprintf(merging->screen, "training a vocabulary: %d of %d merges\n", merges, wanted);
        fflush(merging->screen);
    }
}

void encoded_text_train(Bpe* bpe, const EncodedText* text, const char* list, int vocab_size) {
    SourceList sources;
    BpeTrainer trainer;
    uint64_t bytes = 0;
    const double start_s = time_now_s();
    TextMerging_ merging = {text->screen, start_s};
    mixture_read_list(&sources, list);
    bpe_trainer_open(&trainer, encoded_text_threads_(text));
    for (int i = 0; i < sources.count; i++) {
        TextReading_ reading;
        glob_t files = tokens_list(sources.patterns[i]);
        encoded_text_open_(&reading, sources.patterns[i], &files, text);
        CHECK(documents_check(&reading.source), "%s", reading.source.error);
        CHECK(pipeline_train(&reading.source, &trainer, encoded_text_count_, &reading), "%s",
              reading.source.error);
        signals_end("training a vocabulary");
        bytes += reading.text_bytes;
        documents_close(&reading.source);
        globfree(&files);
    }
    bpe_trainer_run(&trainer, vocab_size, encoded_text_merge_, &merging, bpe);
    bpe_trainer_close(&trainer);
    printable_line(text->screen, "%s: trained a vocabulary of %d tokens on %.1f MB of text in %.1f s", list,
                   vocab_size, 1e-6 * (double)bytes, time_now_s() - start_s);
    fflush(text->screen);
    free(sources.text);
}

// ---- answers ----

static Answers encoded_text_file_answers_(const char* path, const char* field) {
    const Answers shard = target_mask_exists(path) ? ANSWERS_MASK : ANSWERS_NONE;
    return tokens_is_shard(path) ? shard : documents_answers(path, field);
}

Answers encoded_text_answers(const char* list, const char* field) {
    SourceList sources;
    Answers most = ANSWERS_NONE;
    mixture_read_list(&sources, list);
    for (int i = 0; i < sources.count; i++) {
        glob_t files = tokens_list(sources.patterns[i]);
        Answers one = ANSWERS_NONE;
        for (size_t k = 0; k < files.gl_pathc && one == ANSWERS_NONE; k++) {
            one = encoded_text_file_answers_(files.gl_pathv[k], field);
        }
        most = one > most ? one : most;
        globfree(&files);
    }
    free(sources.text);
    return most;
}

// ---- bytes ----

// Returns the number of files in a list, and sets how many of them `is` says yes to.
static size_t encoded_text_files_(const char* list, int (*is)(const char* path), size_t* count) {
    SourceList sources;
    size_t all = 0;
    *count = 0;
    mixture_read_list(&sources, list);
    for (int i = 0; i < sources.count; i++) {
        glob_t files = tokens_list(sources.patterns[i]);
        for (size_t k = 0; k < files.gl_pathc; k++) {
            *count += (size_t)is(files.gl_pathv[k]);
        }
        all += files.gl_pathc;
        globfree(&files);
    }
    free(sources.text);
    return all;
}

int encoded_text_is_plain(const char* list) {
    size_t plain;
    return encoded_text_files_(list, documents_is_plain, &plain) == plain;
}

int encoded_text_has_fields(const char* list) {
    size_t with_fields = 0;
    if (list[0]) {
        encoded_text_files_(list, documents_has_fields, &with_fields);
    }
    return with_fields > 0;
}

#endif // ENCODED_TEXT_IMPLEMENTATION

#endif
