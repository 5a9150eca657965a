/*
text_data.h -- text as the data of a run: encoded once, by all cores, into shards that are kept.

A list of sources (sources.h) that names text becomes one that names shards, with the same weights. Those of
a source are

    DIRECTORY/<key>_train_000000.bin, ...     its tokens, each document after an end-of-text token
    DIRECTORY/<key>.json                      written last: without it the shards are not whole

where the key is a checksum of the vocabulary and of the names, sizes and times of change of the files: a run
that finds its shards takes them, and encodes anew what has changed.

needs:   bpe_files.h bpe_train.h check.h file.h peak.h shard_writer.h sources.h tokenize.h xxh64.h
defines: TextData, text_data_shards, text_data_train, text_data_require_plain, text_data_remove
*/
#ifndef LLMC_TEXT_DATA_H
#define LLMC_TEXT_DATA_H

#include "bpe_files.h"
#include "bpe_train.h"
#include "file.h"
#include "peak.h"
#include "shard_writer.h"
#include "sources.h"
#include "tokenize.h"
#include "xxh64.h"

#define TEXT_DATA_SHARD_TOKENS_ 100000000

typedef struct {
    const Bpe* bpe;
    const char* field;     // of JSON lines and Parquet files (text_source.h)
    const char* directory; // of the shards; it is there
    FILE* screen;          // where to say what is done
} TextData;

// What the sinks know of a source that is being read.
typedef struct {
    const char* name;
    FILE* screen;
    TextSource source;
    ShardWriter shards;
    uint64_t text_bytes;
    double start_s, shown_s;
} TextReading_;

// ---- reading

static inline void text_data_open_(TextReading_* reading, const char* name, const glob_t* files,
                                   const char* field, FILE* screen) {
    const TextOptions options = {TEXT_BY_NAME, field, "", TEXT_BLOCK_BYTES};
    memset(reading, 0, sizeof(*reading));
    reading->name = name;
    reading->screen = screen;
    reading->start_s = reading->shown_s = time_now_s();
    text_source_open(&reading->source, &options, (const char* const*)files->gl_pathv, files->gl_pathc);
}

// A line every few seconds.
static inline void text_data_show_(TextReading_* reading, const TokenBlock* block) {
    const double now_s = time_now_s();
    reading->text_bytes += block->text->bytes;
    if (now_s - reading->shown_s >= 5) {
        reading->shown_s = now_s;
        fprintf(reading->screen, "%s: %.0f of %.0f MB read, %.1f MB/s of text\n", reading->name,
                1e-6 * (double)block->text->read_bytes, 1e-6 * (double)reading->source.total_bytes,
                1e-6 * (double)reading->text_bytes / (now_s - reading->start_s));
        fflush(reading->screen);
    }
}

static inline int text_data_store_(void* context, const TokenBlock* block) {
    TextReading_* reading = (TextReading_*)context;
    for (size_t at = 0; at < block->count;) {
        at += shard_writer_add(&reading->shards, block->ids + at, block->count - at);
    }
    text_data_show_(reading, block);
    return 1;
}

static inline int text_data_count_(void* context, const TokenBlock* block) {
    text_data_show_((TextReading_*)context, block);
    return 1;
}

// ---- shards

// What the tokens depend on.
static inline uint64_t text_data_key_(const TextData* text, const glob_t* files) {
    Xxh64 hash;
    const uint64_t vocabulary = bpe_checksum(text->bpe);
    xxh64_open(&hash);
    xxh64_add(&hash, &vocabulary, sizeof(vocabulary));
    xxh64_add(&hash, text->field, strlen(text->field) + 1);
    for (size_t i = 0; i < files->gl_pathc; i++) {
        struct stat info;
        const char* path = files->gl_pathv[i];
        CHECK(stat(path, &info) == 0, "%s: cannot open the data: %s", path, strerror(errno));
        const int64_t facts[3] = {info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec};
        xxh64_add(&hash, path, strlen(path) + 1);
        xxh64_add(&hash, facts, sizeof(facts));
    }
    return xxh64_value(&hash);
}

// Whether all shards that the file names are there.
static inline int text_data_is_kept_(const char* path, const ShardWriter* shards) {
    unsigned long long count = 0;
    FILE* file = fopen(path, "rb");
    int ok = file && fscanf(file, "{\"shards\":%llu,", &count) == 1 && count > 0;
    for (uint64_t i = 0; ok && i < count; i++) {
        char shard[PATH_MAX];
        shard_writer_path(shards, i, shard);
        ok = access(shard, R_OK) == 0;
    }
    if (file) {
        fclose(file);
    }
    return ok;
}

static inline void text_data_finish_(TextReading_* reading, const char* path) {
    FileWriter file;
    file_open(&file, path);
    fprintf(file.file,
            "{\"shards\":%llu,\"tokens\":%llu,\"source\":", (unsigned long long)reading->shards.number,
            (unsigned long long)reading->shards.tokens);
    json_print_string(file.file, reading->name, strlen(reading->name));
    fputs("}\n", file.file);
    file_commit(&file);
    const double spent_s = time_now_s() - reading->start_s;
    fprintf(reading->screen, "%s: %llu tokens of %.1f MB of text in %.1f s (%.1f MB/s)\n", reading->name,
            (unsigned long long)reading->shards.tokens, 1e-6 * (double)reading->text_bytes, spent_s,
            1e-6 * (double)reading->text_bytes / spent_s);
}

// Encodes a source, if it is not there already. Sets prefix (PATH_MAX) to that of its shards.
static inline void text_data_encode_(const TextData* text, const char* name, char* prefix) {
    glob_t files = tokens_list(name);
    TextReading_ reading;
    char path[PATH_MAX];
    const unsigned long long key = text_data_key_(text, &files);
    const int length = snprintf(prefix, PATH_MAX, "%s/%016llx", text->directory, key);
    CHECK(length + 32 < PATH_MAX, "%s: the name is too long", text->directory);
    snprintf(path, sizeof(path), "%.*s.json", length, prefix);
    text_data_open_(&reading, name, &files, text->field, text->screen);
    shard_writer_open(&reading.shards, prefix, text->bpe->vocab_size, TEXT_DATA_SHARD_TOKENS_, 0);
    if (text_data_is_kept_(path, &reading.shards)) {
        fprintf(text->screen, "%s: tokens of an earlier run, %s_train_*.bin\n", name, prefix);
    } else {
        CHECK(text_source_check(&reading.source), "%s", reading.source.error);
        CHECK(tokenize_run(&reading.source, text->bpe, tokenize_cores(), text_data_store_, &reading), "%s",
              reading.source.error);
        shard_writer_close(&reading.shards);
        CHECK(reading.shards.tokens > 0, "%s: no text in it", name);
        text_data_finish_(&reading, path);
    }
    text_source_close(&reading.source);
    globfree(&files);
}

// The list of shards for a list of text, encoded now where they are not there. The caller frees it.
static inline char* text_data_shards(const TextData* text, const char* list) {
    SourceList sources;
    char *shards = NULL, prefix[PATH_MAX];
    size_t bytes = 0;
    if (strpbrk(text->directory, ",*?[\\")) {
        die_usage("--out %s: wanted a name without , * ? [ \\ where text is encoded", text->directory);
    }
    sources_read_list(&sources, list);
    FILE* out = open_memstream(&shards, &bytes);
    CHECK(out, "no memory for the names of %d sources", sources.count);
    for (int i = 0; i < sources.count; i++) {
        text_data_encode_(text, sources.names[i], prefix);
        fprintf(out, "%s%s_train_*.bin", i ? "," : "", prefix);
        if (sources.count > 1) {
            fprintf(out, ":%.6f", 1e-6 * (double)sources.weights[i]);
        }
    }
    fclose(out);
    free(sources.text);
    return shards;
}

// Removes shards that nothing needs any more: the run has mapped them.
static inline void text_data_remove(const char* directory) {
    char path[PATH_MAX + 2];
    glob_t files;
    file_join(path, directory, "*");
    if (glob(path, 0, NULL, &files) == 0) {
        for (size_t i = 0; i < files.gl_pathc; i++) {
            unlink(files.gl_pathv[i]);
        }
        globfree(&files);
    }
    rmdir(directory);
}

// ---- vocabularies

// Trains a vocabulary of so many ids on all sources of the list, whatever their weights.
static inline void text_data_train(Bpe* bpe, const char* list, const char* field, int vocab_size,
                                   FILE* screen) {
    SourceList sources;
    BpeTrainer trainer;
    uint64_t bytes = 0;
    const double start_s = time_now_s();
    sources_read_list(&sources, list);
    bpe_trainer_open(&trainer, tokenize_cores());
    for (int i = 0; i < sources.count; i++) {
        TextReading_ reading;
        glob_t files = tokens_list(sources.names[i]);
        text_data_open_(&reading, sources.names[i], &files, field, screen);
        CHECK(text_source_check(&reading.source), "%s", reading.source.error);
        CHECK(tokenize_train(&reading.source, &trainer, text_data_count_, &reading), "%s",
              reading.source.error);
        bytes += reading.text_bytes;
        text_source_close(&reading.source);
        globfree(&files);
    }
    bpe_trainer_run(&trainer, vocab_size, NULL, NULL, bpe);
    bpe_trainer_close(&trainer);
    fprintf(screen, "%s: a vocabulary of %d tokens from %.1f MB of text in %.1f s\n", list, vocab_size,
            1e-6 * (double)bytes, time_now_s() - start_s);
    free(sources.text);
}

// ---- bytes

// Ends the program if the list names text that has to be taken out of its file first: bytes are read as they
// are.
static inline void text_data_require_plain(const char* list) {
    SourceList sources;
    sources_read_list(&sources, list);
    for (int i = 0; i < sources.count; i++) {
        glob_t files = tokens_list(sources.names[i]);
        for (size_t k = 0; k < files.gl_pathc; k++) {
            if (!text_source_is_plain(files.gl_pathv[k])) {
                die_usage("%s: needs a vocabulary: --tokenizer FILE, or --tokenizer bpe:8192 to train one",
                          files.gl_pathv[k]);
            }
        }
        globfree(&files);
    }
    free(sources.text);
}

#endif
