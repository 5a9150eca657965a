/*
decontaminate.h -- which documents share a run of words with the texts of a test?

A document is contaminated if 13 words in a row (words.h: without case and punctuation) are also in
one of the files. Their texts:

    JSON lines of a task (eval_task_files.h)   each context with each of its endings, as one text
    any other file that documents.h reads      its documents

A text of fewer than 13 words is not looked for; how many there are is counted.
*/
#ifndef LLMC_DECONTAMINATE_H
#define LLMC_DECONTAMINATE_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/corpus/words.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { DECONTAMINATE_WORDS = 13, DECONTAMINATE_FILES = 64 };

typedef struct {
    char* path;
    uint64_t texts, short_texts; // those of fewer than 13 words
} TestedFile;

// A run of words.
typedef struct {
    uint64_t hash;
    uint64_t text;  // offset of its text in `texts`
    uint32_t bytes; // its length
    uint32_t file;
} TestRun;

typedef struct {
    TestedFile files[DECONTAMINATE_FILES];
    int num_files;
    TestRun* runs; // (num_runs) different
    uint32_t num_runs;
    uint32_t* table; // (slots) numbers of runs plus 1, by hash; 0: free
    uint64_t slots;  // power of two
    char* texts;
    size_t texts_bytes, texts_room, runs_room;
    BpeRules rules;
    Words words;
} TestTexts;

// Reads the files, whose names are separated by commas; `field` names the text of JSON lines that
// are no task, and of Parquet. A bad file ends the program.
void test_texts_open(TestTexts* tests, const char* paths, const char* field);

// Returns 1 + the number of the first run of the words that is in one of the files, else 0.
uint32_t test_texts_find(const TestTexts* tests, Words* words);

// Returns a checksum of all runs.
uint64_t test_texts_checksum(const TestTexts* tests);

void test_texts_close(TestTexts* tests);

#ifdef __cplusplus
}
#endif

#ifdef DECONTAMINATE_IMPLEMENTATION

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/xxh64.h"
#include "llmc/data/documents.h"
#include "llmc/data/eval_task_files.h"
#include "llmc/data/task_records.h"

#define TEST_MAX_BYTES_ ((size_t)1 << 31) // largest file of a task

// ---- runs ----

// Returns the slot of a hash: its run's, or a free one.
static uint32_t* test_slot_(const TestTexts* tests, uint64_t hash) {
    uint64_t slot = (hash ^ hash >> 32) & (tests->slots - 1);
    while (tests->table[slot] && tests->runs[tests->table[slot] - 1].hash != hash) {
        slot = (slot + 1) & (tests->slots - 1);
    }
    return &tests->table[slot];
}

static void test_grow_(TestTexts* tests) {
    tests->slots = tests->slots ? 2 * tests->slots : 1 << 10;
    free(tests->table);
    tests->table = (uint32_t*)check_alloc(tests->slots, sizeof(uint32_t), "--decontaminate: words");
    for (uint32_t i = 0; i < tests->num_runs; i++) {
        *test_slot_(tests, tests->runs[i].hash) = i + 1;
    }
}

// Adds the run with the words from number `first` on, unless it is there already.
static void test_add_run_(TestTexts* tests, size_t first, size_t text_at) {
    const Word* word = &tests->words.list[first];
    const uint64_t hash = tests->words.runs[first];
    uint32_t* slot = test_slot_(tests, hash);
    if (*slot) {
        return;
    }
    CHECK(tests->num_runs < UINT32_MAX / 2, "--decontaminate: more than %u runs of words", UINT32_MAX / 2);
    const TestRun run = {hash, text_at + word->begin,
                         (uint32_t)(word[DECONTAMINATE_WORDS - 1].end - word->begin),
                         (uint32_t)tests->num_files - 1};
    tests->runs = (TestRun*)check_reserve(tests->runs, &tests->runs_room, (size_t)tests->num_runs + 1,
                                          sizeof(TestRun), "--decontaminate: words");
    tests->runs[tests->num_runs++] = run;
    *slot = tests->num_runs;
    if (2 * (uint64_t)tests->num_runs > tests->slots) {
        test_grow_(tests);
    }
}

// Adds the text at the end of tests->texts.
static void test_add_text_(TestTexts* tests, size_t bytes) {
    TestedFile* file = &tests->files[tests->num_files - 1];
    const size_t at = tests->texts_bytes;
    const uint32_t before = tests->num_runs;
    words_split(&tests->words, &tests->rules, tests->texts + at, bytes);
    words_runs(&tests->words, DECONTAMINATE_WORDS);
    for (size_t i = 0; i < tests->words.num_runs; i++) {
        test_add_run_(tests, i, at);
    }
    file->texts++;
    file->short_texts += tests->words.num_runs == 0;
    // a text without new runs is not kept
    tests->texts_bytes += tests->num_runs > before ? bytes : 0;
}

static void test_append_(TestTexts* tests, size_t at, const char* text, size_t bytes) {
    tests->texts =
        (char*)check_reserve(tests->texts, &tests->texts_room, at + bytes + 1, 1, "--decontaminate: texts");
    memcpy(tests->texts + at, text, bytes);
}

// ---- files ----

static int test_pair_(void* context, const char* text, size_t bytes, const char* ending, size_t ending_bytes,
                      char* error) {
    TestTexts* tests = (TestTexts*)context;
    (void)error;
    test_append_(tests, tests->texts_bytes, text, bytes);
    test_append_(tests, tests->texts_bytes + bytes, " ", 1);
    test_append_(tests, tests->texts_bytes + bytes + 1, ending, ending_bytes);
    test_add_text_(tests, bytes + 1 + ending_bytes);
    return 1;
}

static void test_read_documents_(TestTexts* tests, const char* path, const char* field) {
    const TextOptions options = {TEXT_BY_NAME, field, "", TEXT_BLOCK_BYTES, NULL, 1};
    Documents source;
    TextBlock block;
    int more;
    memset(&block, 0, sizeof(block));
    documents_open(&source, &options, &path, 1);
    while ((more = documents_next(&source, &block)) > 0) {
        for (size_t i = 0; i < block.num_documents; i++) {
            const size_t begin = block.documents[i];
            const size_t end = i + 1 < block.num_documents ? block.documents[i + 1] : block.bytes;
            test_append_(tests, tests->texts_bytes, block.text + begin, end - begin);
            test_add_text_(tests, end - begin);
        }
    }
    CHECK(more == 0, "--decontaminate: %s", source.error);
    text_block_close(&block);
    documents_close(&source);
}

// Adds the texts of a task. Returns 0 if the file is none.
static int test_read_task_(TestTexts* tests, const char* path) {
    char error[ERROR_BYTES], *text;
    size_t bytes;
    if (!file_ends_in(path, ".jsonl") && !file_ends_in(path, ".json")) {
        return 0;
    }
    CHECK(byte_order_text(path, TEST_MAX_BYTES_, &text, &bytes, error), "--decontaminate: %s", error);
    const int is_task = task_records_is_task(text, bytes);
    CHECK(!is_task || task_files_texts(path, text, bytes, test_pair_, tests, error), "--decontaminate: %s",
          error);
    free(text);
    return is_task;
}

static void test_read_file_(TestTexts* tests, const char* path, size_t length, const char* field) {
    CHECK(tests->num_files < DECONTAMINATE_FILES, "--decontaminate: more than %d files", DECONTAMINATE_FILES);
    CHECK(length > 0, "--decontaminate: an empty name between commas");
    TestedFile* file = &tests->files[tests->num_files++];
    file->path = strndup(path, length);
    CHECK(file->path, "no memory for a name");
    CHECK(!file_ends_in(file->path, ".bin"),
          "--decontaminate: %s: token ids, wanted the text that they were made from", file->path);
    if (!test_read_task_(tests, file->path)) {
        test_read_documents_(tests, file->path, field);
    }
    CHECK(file->texts > file->short_texts, "--decontaminate: %s: no text of %d words or more", file->path,
          DECONTAMINATE_WORDS);
}

// ---- the whole ----

void test_texts_open(TestTexts* tests, const char* paths, const char* field) {
    const BpePattern pattern = {.style = BPE_GPT2, .normalizes = 1};
    memset(tests, 0, sizeof(*tests));
    bpe_rules_open(&tests->rules, pattern);
    test_grow_(tests);
    for (const char* at = paths; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        test_read_file_(tests, at, strcspn(at, ","), field);
    }
}

uint32_t test_texts_find(const TestTexts* tests, Words* words) {
    words_runs(words, DECONTAMINATE_WORDS);
    for (size_t i = 0; i < words->num_runs; i++) {
        const uint32_t found = *test_slot_(tests, words->runs[i]);
        if (found) {
            return found;
        }
    }
    return 0;
}

uint64_t test_texts_checksum(const TestTexts* tests) {
    Xxh64 sum;
    xxh64_open(&sum);
    for (uint32_t i = 0; i < tests->num_runs; i++) {
        xxh64_add(&sum, &tests->runs[i].hash, sizeof(uint64_t));
        xxh64_add(&sum, &tests->runs[i].file, sizeof(uint32_t));
    }
    return xxh64_value(&sum);
}

void test_texts_close(TestTexts* tests) {
    for (int i = 0; i < tests->num_files; i++) {
        free(tests->files[i].path);
    }
    bpe_rules_close(&tests->rules);
    words_close(&tests->words);
    free(tests->runs);
    free(tests->table);
    free(tests->texts);
    memset(tests, 0, sizeof(*tests));
}

#endif // DECONTAMINATE_IMPLEMENTATION

#endif
