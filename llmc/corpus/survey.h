/*
survey.h -- a first pass over the inputs, which decides what documents the second one leaves out:
contaminated ones (decontaminate.h), and all duplicates but the first (dedup_keys.h).

    survey_open(&survey, &settings, path);          continues an earlier one
    survey_run(&survey, &source, threads, ...);     keys of every document, on all cores
    survey_decide(&survey, bytes, ...);             survey.dropped, a bit for each document

The file `path` has a chunk for every 16384 documents, with a checksum: their places, their keys,
and the documents that filters dropped, if they are to be listed. After an interruption the survey
continues behind the last whole chunk. The keys are on disk, so that memory is only needed for
groups (dedup_groups.h). Contaminated documents have no duplicates: they are not compared.

The documents that are dropped depend neither on the number of threads nor on the memory.
*/
#ifndef LLMC_SURVEY_H
#define LLMC_SURVEY_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/corpus/decontaminate.h"
#include "llmc/corpus/dedup_groups.h"
#include "llmc/data/documents.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    Dedup dedup;
    const TestTexts* tests; // NULL: none
    int lists_filtered;     // documents that filters dropped are listed, too
} SurveySettings;

// Chunk of the file.
typedef struct {
    uint64_t at; // its start
    uint64_t documents, filtered;
} SurveyChunk;

typedef struct {
    SurveySettings settings;
    BpeRules rules;
    DedupFunctions functions;
    char path[PATH_MAX];
    int fd;
    uint64_t bytes; // of the file
    SurveyChunk* chunks;
    size_t num_chunks, chunks_room;
    uint64_t documents;
    TextPosition next; // first document that is in no chunk
    int is_complete;

    // the current chunk
    TextPlace* places; // reason: 1 + the run that it shares with a test, 0: none
    DedupKey* keys;    // number k of document i: keys[k * SURVEY_CHUNK + i]
    size_t count;
    TextPlace* filtered;
    size_t num_filtered, filtered_room;

    // the decision
    DedupGroups groups;
    uint64_t* dropped; // bits
    uint64_t contaminated, duplicates;
    uint64_t shared[DECONTAMINATE_FILES]; // contaminated documents by file
} Survey;

enum { SURVEY_CHUNK = 1 << 14 };

// Opens the file, or makes it. It must be of the same inputs and settings; one without the
// documents that filters dropped is started over if they are to be listed.
void survey_open(Survey* survey, const SurveySettings* settings, const char* path);

// Returns the bytes of a document in the file.
uint64_t survey_document_bytes(const Survey* survey);

// Called after each block.
typedef void (*SurveyShow)(void* context, const TextBlock* block);

// Reads the source, with whole documents, to its end, but ends the program after more than `most`
// documents. Returns 0 with source->error after an error.
int survey_run(Survey* survey, Documents* source, int threads, uint64_t most, SurveyShow show, void* context);

// Called before each pass over the keys.
typedef void (*SurveyPass)(void* context, int pass, int passes);

// Return the most documents whose groups fit into so much memory, and into one part.
uint64_t survey_most_documents(uint64_t bytes);
uint64_t survey_most_in_one_part(uint64_t bytes);

void survey_decide(Survey* survey, uint64_t bytes, SurveyPass pass, void* context);

// Prints every dropped document as a line of JSON, in the order of the inputs.
void survey_list(const Survey* survey, FILE* file, const char* const* inputs, const Filters* filters);

// Frees what only survey_list needs. The bits stay.
void survey_end_list(Survey* survey);

void survey_close(Survey* survey);

#ifdef __cplusplus
}
#endif

#ifdef SURVEY_IMPLEMENTATION

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/json.h"
#include "llmc/base/xxh64.h"
#include "llmc/data/encode_threads.h"

#define SURVEY_MAGIC_ UINT64_C(0x3230594556525553) // "SURVEY02"
#define SURVEY_BUFFERS_ ((uint64_t)8 << 20)        // bytes of memory besides groups

// Start of a chunk; the places, the keys by their numbers, and the filtered documents follow.
typedef struct {
    uint64_t magic, checksum; // of everything after it
    uint64_t documents, filtered, num_keys, lists_filtered, is_last;
    TextPosition next; // first document after the chunk
} SurveyHead_;

// ---- the file ----

static int survey_num_keys_(const Survey* survey) { return dedup_num_keys(survey->settings.dedup); }

uint64_t survey_document_bytes(const Survey* survey) {
    return sizeof(TextPlace) + (uint64_t)survey_num_keys_(survey) * sizeof(DedupKey);
}

static void survey_read_(const Survey* survey, void* data, size_t bytes, uint64_t at) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = pread(survey->fd, (char*)data + done, bytes - done, (off_t)(at + done));
        CHECK(n > 0 || (n < 0 && errno == EINTR), "%s: cannot read: %s", survey->path,
              n == 0 ? "the file became shorter" : strerror(errno));
        done += n > 0 ? (size_t)n : 0;
    }
}

static void survey_write_(Survey* survey, const void* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n =
            pwrite(survey->fd, (const char*)data + done, bytes - done, (off_t)(survey->bytes + done));
        CHECK(n > 0 || (n < 0 && errno == EINTR), "%s: cannot write: %s", survey->path, strerror(errno));
        done += n > 0 ? (size_t)n : 0;
    }
    survey->bytes += bytes;
}

static uint64_t survey_chunk_bytes_(const Survey* survey, const SurveyHead_* head) {
    return head->documents * survey_document_bytes(survey) + head->filtered * sizeof(TextPlace);
}

static void survey_add_chunk_(Survey* survey, const SurveyHead_* head, uint64_t at) {
    const SurveyChunk chunk = {at, head->documents, head->filtered};
    survey->chunks = (SurveyChunk*)check_reserve(survey->chunks, &survey->chunks_room, survey->num_chunks + 1,
                                                 sizeof(SurveyChunk), survey->path);
    survey->chunks[survey->num_chunks++] = chunk;
    survey->documents += head->documents;
    survey->next = head->next;
    survey->is_complete = (int)head->is_last;
}

// Returns the checksum of a head after its own, and of `bytes` of the file behind it.
static uint64_t survey_checksum_(const Survey* survey, const SurveyHead_* head, uint64_t at, uint64_t bytes) {
    static const size_t skipped = 2 * sizeof(uint64_t), part_bytes = 1 << 20;
    char* part = (char*)check_alloc_unset(part_bytes, 1, survey->path);
    Xxh64 sum;
    xxh64_open(&sum);
    xxh64_add(&sum, (const char*)head + skipped, sizeof(*head) - skipped);
    for (uint64_t done = 0; done < bytes;) {
        const size_t n = bytes - done < part_bytes ? (size_t)(bytes - done) : part_bytes;
        survey_read_(survey, part, n, at + sizeof(*head) + done);
        xxh64_add(&sum, part, n);
        done += n;
    }
    free(part);
    return xxh64_value(&sum);
}

// Finds the whole chunks, and cuts off the rest of the file.
static void survey_scan_(Survey* survey) {
    const off_t end = lseek(survey->fd, 0, SEEK_END);
    SurveyHead_ head;
    CHECK(end >= 0, "%s: cannot read: %s", survey->path, strerror(errno));
    while (!survey->is_complete && survey->bytes + sizeof(head) <= (uint64_t)end) {
        survey_read_(survey, &head, sizeof(head), survey->bytes);
        const uint64_t left = (uint64_t)end - survey->bytes - sizeof(head);
        const int fits = head.magic == SURVEY_MAGIC_ && head.documents <= SURVEY_CHUNK &&
                         head.num_keys == (uint64_t)survey_num_keys_(survey) &&
                         head.lists_filtered >= (uint64_t)survey->settings.lists_filtered &&
                         head.filtered <= left / sizeof(TextPlace) &&
                         survey_chunk_bytes_(survey, &head) <= left;
        const uint64_t bytes = fits ? survey_chunk_bytes_(survey, &head) : 0;
        if (!fits || survey_checksum_(survey, &head, survey->bytes, bytes) != head.checksum) {
            break;
        }
        survey_add_chunk_(survey, &head, survey->bytes);
        survey->bytes += sizeof(head) + bytes;
    }
    CHECK(ftruncate(survey->fd, (off_t)survey->bytes) == 0, "%s: cannot write: %s", survey->path,
          strerror(errno));
}

void survey_open(Survey* survey, const SurveySettings* settings, const char* path) {
    const BpePattern pattern = {.style = BPE_GPT2, .normalizes = 1};
    memset(survey, 0, sizeof(*survey));
    survey->settings = *settings;
    bpe_rules_open(&survey->rules, pattern);
    dedup_functions(&survey->functions);
    snprintf(survey->path, sizeof(survey->path), "%s", path);
    survey->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    CHECK(survey->fd >= 0, "%s: cannot write: %s", path, strerror(errno));
    survey_scan_(survey);
    survey->places = (TextPlace*)check_alloc(SURVEY_CHUNK, sizeof(TextPlace), path);
    survey->keys =
        (DedupKey*)check_alloc((size_t)survey_num_keys_(survey) * SURVEY_CHUNK, sizeof(DedupKey), path);
}

// Writes the current chunk, which ends before the document at `next`.
static void survey_flush_(Survey* survey, TextPosition next, int is_last) {
    SurveyHead_ head;
    const uint64_t at = survey->bytes;
    memset(&head, 0, sizeof(head)); // all bytes are in the checksum
    head.documents = survey->count;
    head.filtered = survey->num_filtered;
    head.num_keys = (uint64_t)survey_num_keys_(survey);
    head.lists_filtered = (uint64_t)survey->settings.lists_filtered;
    head.is_last = (uint64_t)is_last;
    head.next = next;
    survey->bytes += sizeof(head);
    survey_write_(survey, survey->places, survey->count * sizeof(TextPlace));
    for (int k = 0; k < survey_num_keys_(survey); k++) {
        survey_write_(survey, survey->keys + (size_t)k * SURVEY_CHUNK, survey->count * sizeof(DedupKey));
    }
    survey_write_(survey, survey->filtered, survey->num_filtered * sizeof(TextPlace));
    head.checksum = survey_checksum_(survey, &head, at, survey_chunk_bytes_(survey, &head));
    head.magic = SURVEY_MAGIC_;
    const uint64_t end = survey->bytes;
    survey->bytes = at;
    survey_write_(survey, &head, sizeof(head));
    survey->bytes = end;
    survey_add_chunk_(survey, &head, at);
    survey->count = survey->num_filtered = 0;
}

// ---- the keys of documents ----

// Tool of a thread.
typedef struct {
    const Survey* survey;
    Words words;
} SurveyTool_;

// Sets the results: for each document a key whose `low` is the reason, and its own keys.
static void survey_work_(const TextBlock* text, PipelineResults* results, void* argument) {
    SurveyTool_* tool = (SurveyTool_*)argument;
    const Survey* survey = tool->survey;
    const SurveySettings* settings = &survey->settings;
    const size_t stride = (size_t)survey_num_keys_(survey) + 1;
    results->count = text->num_documents * stride;
    results->data = check_reserve(results->data, &results->room, results->count, sizeof(DedupKey), "keys");
    DedupKey* keys = (DedupKey*)results->data;
    for (size_t i = 0; i < text->num_documents; i++, keys += stride) {
        const size_t begin = text->documents[i];
        const size_t bytes = (i + 1 < text->num_documents ? text->documents[i + 1] : text->bytes) - begin;
        if (settings->tests || settings->dedup == DEDUP_NEAR) {
            words_split(&tool->words, &survey->rules, text->text + begin, bytes);
        }
        keys->low = settings->tests ? test_texts_find(settings->tests, &tool->words) : 0;
        keys->high = 0;
        dedup_keys(keys + 1, settings->dedup, &survey->functions, &tool->words, text->text + begin, bytes);
    }
}

typedef struct {
    Survey* survey;
    TextPosition at; // of the next document
    uint64_t most;
    SurveyShow show;
    void* context;
} SurveySink_;

static int survey_is_before_(const TextPlace* a, const TextPlace* b) {
    return a->file < b->file || (a->file == b->file && a->document < b->document);
}

// Adds the filtered documents of a block from number `from` on that come before a place, NULL: all.
static size_t survey_add_filtered_(SurveySink_* sink, const TextBlock* text, size_t from,
                                   const TextPlace* place) {
    Survey* survey = sink->survey;
    for (; from < text->num_filtered && (!place || survey_is_before_(&text->filtered[from], place)); from++) {
        sink->at.missing += text->filtered[from].reason & 1;
        sink->at.failed += !(text->filtered[from].reason & 1);
        if (survey->settings.lists_filtered) {
            survey->filtered =
                (TextPlace*)check_reserve(survey->filtered, &survey->filtered_room, survey->num_filtered + 1,
                                          sizeof(TextPlace), "documents");
            survey->filtered[survey->num_filtered++] = text->filtered[from];
        }
    }
    return from;
}

static void survey_add_document_(SurveySink_* sink, TextPlace place, const DedupKey* results) {
    Survey* survey = sink->survey;
    sink->at.file = place.file;
    sink->at.document = place.document;
    if (survey->count == SURVEY_CHUNK) {
        survey_flush_(survey, sink->at, 0);
    }
    CHECK(sink->at.number < sink->most,
          "the inputs have more than %" PRIu64 " documents, the most for --dedup-memory; wanted more of it",
          sink->most);
    survey->places[survey->count] = place;
    survey->places[survey->count].reason = (uint32_t)results->low;
    for (int k = 0; k < survey_num_keys_(survey); k++) {
        survey->keys[(size_t)k * SURVEY_CHUNK + survey->count] = results[k + 1];
    }
    survey->count++;
    sink->at.number++;
}

static int survey_sink_(void* context, const TextBlock* text, const PipelineResults* results) {
    SurveySink_* sink = (SurveySink_*)context;
    const size_t stride = (size_t)survey_num_keys_(sink->survey) + 1;
    size_t filtered = 0;
    for (size_t i = 0; i < text->num_documents; i++) {
        filtered = survey_add_filtered_(sink, text, filtered, &text->places[i]);
        survey_add_document_(sink, text->places[i], (const DedupKey*)results->data + i * stride);
    }
    survey_add_filtered_(sink, text, filtered, NULL);
    sink->show(sink->context, text);
    return 1;
}

int survey_run(Survey* survey, Documents* source, int threads, uint64_t most, SurveyShow show,
               void* context) {
    SurveySink_ sink = {survey, survey->next, most, show, context};
    const size_t n = (size_t)threads;
    if (survey->is_complete) {
        return 1;
    }
    if (survey->num_chunks > 0 && !documents_seek(source, survey->next)) {
        return 0;
    }
    SurveyTool_* tools = (SurveyTool_*)check_alloc(n, sizeof(SurveyTool_), "threads");
    void** pointers = (void**)check_alloc(n, sizeof(void*), "threads");
    for (size_t i = 0; i < n; i++) {
        tools[i].survey = survey;
        pointers[i] = &tools[i];
    }
    const int ok = pipeline_work(source, survey_work_, pointers, n, survey_sink_, &sink);
    if (ok) {
        survey_flush_(survey, sink.at, 1);
    }
    for (size_t i = 0; i < n; i++) {
        words_close(&tools[i].words);
    }
    free(pointers);
    free(tools);
    return ok;
}

// ---- the decision ----

// Returns the memory for groups: they need 32 of 33 bits, the dropped bits one.
static uint64_t survey_group_bytes_(uint64_t bytes) {
    return bytes < SURVEY_BUFFERS_ ? 0 : (bytes - SURVEY_BUFFERS_) / 33 * 32;
}

uint64_t survey_most_documents(uint64_t bytes) { return dedup_most_documents(survey_group_bytes_(bytes)); }

uint64_t survey_most_in_one_part(uint64_t bytes) {
    return dedup_most_in_one_part(survey_group_bytes_(bytes));
}

static int survey_is_dropped_(const Survey* survey, uint64_t i) {
    return (int)(survey->dropped[i / 64] >> i % 64 & 1);
}

static void survey_drop_(Survey* survey, uint64_t i) { survey->dropped[i / 64] |= UINT64_C(1) << i % 64; }

static void survey_read_places_(const Survey* survey, const SurveyChunk* chunk, TextPlace* places) {
    survey_read_(survey, places, chunk->documents * sizeof(TextPlace), chunk->at + sizeof(SurveyHead_));
}

static void survey_drop_contaminated_(Survey* survey) {
    uint64_t document = 0;
    for (size_t c = 0; c < survey->num_chunks; c++) {
        survey_read_places_(survey, &survey->chunks[c], survey->places);
        for (uint64_t i = 0; i < survey->chunks[c].documents; i++, document++) {
            const uint32_t reason = survey->places[i].reason;
            if (reason) {
                survey_drop_(survey, document);
                survey->contaminated++;
                survey->shared[survey->settings.tests->runs[reason - 1].file]++;
            }
        }
    }
}

// Adds key number k of all documents.
static void survey_add_keys_(Survey* survey, int k) {
    uint64_t document = 0;
    for (size_t c = 0; c < survey->num_chunks; c++) {
        const SurveyChunk* chunk = &survey->chunks[c];
        const uint64_t at = chunk->at + sizeof(SurveyHead_) +
                            chunk->documents * (sizeof(TextPlace) + (uint64_t)k * sizeof(DedupKey));
        survey_read_(survey, survey->keys, chunk->documents * sizeof(DedupKey), at);
        for (uint64_t i = 0; i < chunk->documents; i++, document++) {
            if (!survey_is_dropped_(survey, document)) {
                dedup_groups_add(&survey->groups, (uint32_t)document, survey->keys[i]);
            }
        }
    }
}

static void survey_drop_duplicates_(Survey* survey, uint64_t bytes, SurveyPass pass, void* context) {
    DedupGroups* groups = &survey->groups;
    dedup_groups_open(groups, survey->documents, survey_group_bytes_(bytes));
    for (int k = 0; k < survey_num_keys_(survey); k++) {
        for (uint64_t part = 0; part < groups->parts; part++) {
            pass(context, k * (int)groups->parts + (int)part, survey_num_keys_(survey) * (int)groups->parts);
            dedup_groups_start(groups, part);
            survey_add_keys_(survey, k);
        }
    }
    dedup_groups_finish(groups);
    for (uint64_t i = 0; i < survey->documents; i++) {
        if (groups->first[i] != i) {
            survey_drop_(survey, i);
            survey->duplicates++;
        }
    }
}

void survey_decide(Survey* survey, uint64_t bytes, SurveyPass pass, void* context) {
    const size_t words = (size_t)(survey->documents / 64 + 1);
    assert(survey->is_complete);
    survey->dropped = (uint64_t*)check_alloc(words, sizeof(uint64_t), "dropped documents");
    if (survey->settings.tests) {
        survey_drop_contaminated_(survey);
    }
    if (survey->settings.dedup != DEDUP_NONE) {
        CHECK(survey->documents <= survey_most_documents(bytes),
              "the inputs have %" PRIu64 " documents, wanted at most %" PRIu64 ", or more --dedup-memory",
              survey->documents, survey_most_documents(bytes));
        survey_drop_duplicates_(survey, bytes, pass, context);
    }
}

// ---- the list of dropped documents ----

typedef struct {
    const Survey* survey;
    FILE* file;
    const char* const* inputs;
    const Filters* filters;
} SurveyList_;

// Prints a document. It has the number that errors have: of a line, a row or a part, from 1.
static void survey_print_place_(const SurveyList_* list, const TextPlace* place) {
    fputs("{\"path\":", list->file);
    json_print_bytes(list->file, list->inputs[place->file], strlen(list->inputs[place->file]));
    fprintf(list->file, ",\"document\":%" PRIu64, place->document + 1);
}

static void survey_print_filtered_(const SurveyList_* list, const TextPlace* place) {
    const char* condition = list->filters->list[place->reason / 2].condition;
    survey_print_place_(list, place);
    fprintf(list->file, ",\"reason\":\"%s\",\"filter\":", place->reason & 1 ? "missing" : "filter");
    json_print_string(list->file, condition, strlen(condition));
    fputs("}\n", list->file);
}

static void survey_print_contaminated_(const SurveyList_* list, const TextPlace* place) {
    const TestTexts* tests = list->survey->settings.tests;
    const TestRun* run = &tests->runs[place->reason - 1];
    survey_print_place_(list, place);
    fputs(",\"reason\":\"contaminated\",\"by\":", list->file);
    json_print_bytes(list->file, tests->files[run->file].path, strlen(tests->files[run->file].path));
    fputs(",\"words\":", list->file);
    json_print_string(list->file, tests->texts + run->text, run->bytes);
    fputs("}\n", list->file);
}

static void survey_print_duplicate_(const SurveyList_* list, const TextPlace* place, uint32_t first) {
    const Survey* survey = list->survey;
    TextPlace origin; // all chunks but the last are full
    survey_read_(survey, &origin, sizeof(origin),
                 survey->chunks[first / SURVEY_CHUNK].at + sizeof(SurveyHead_) +
                     first % SURVEY_CHUNK * sizeof(TextPlace));
    survey_print_place_(list, place);
    fputs(",\"reason\":\"duplicate\",\"first\":", list->file);
    survey_print_place_(list, &origin);
    fputs("}}\n", list->file);
}

// Prints what is dropped of a chunk, whose first document is number `document`.
static void survey_list_chunk_(const SurveyList_* list, const SurveyChunk* chunk, uint64_t document) {
    const Survey* survey = list->survey;
    TextPlace* places = (TextPlace*)check_alloc(chunk->documents, sizeof(TextPlace), "a list");
    TextPlace* filtered = (TextPlace*)check_alloc(chunk->filtered, sizeof(TextPlace), "a list");
    survey_read_places_(survey, chunk, places);
    survey_read_(survey, filtered, chunk->filtered * sizeof(TextPlace),
                 chunk->at + sizeof(SurveyHead_) + chunk->documents * survey_document_bytes(survey));
    uint64_t f = 0;
    for (uint64_t i = 0; i <= chunk->documents; i++) {
        const int is_end = i == chunk->documents;
        for (; f < chunk->filtered && (is_end || survey_is_before_(&filtered[f], &places[i])); f++) {
            survey_print_filtered_(list, &filtered[f]);
        }
        if (!is_end && places[i].reason) {
            survey_print_contaminated_(list, &places[i]);
        } else if (!is_end && survey_is_dropped_(survey, document + i)) {
            survey_print_duplicate_(list, &places[i], survey->groups.first[document + i]);
        }
    }
    free(filtered);
    free(places);
}

void survey_list(const Survey* survey, FILE* file, const char* const* inputs, const Filters* filters) {
    const SurveyList_ list = {survey, file, inputs, filters};
    uint64_t document = 0;
    for (size_t c = 0; c < survey->num_chunks; c++) {
        survey_list_chunk_(&list, &survey->chunks[c], document);
        document += survey->chunks[c].documents;
    }
}

void survey_end_list(Survey* survey) {
    dedup_groups_close(&survey->groups);
    free(survey->places);
    free(survey->keys);
    free(survey->filtered);
    survey->places = survey->filtered = NULL;
    survey->keys = NULL;
}

void survey_close(Survey* survey) {
    survey_end_list(survey);
    bpe_rules_close(&survey->rules);
    free(survey->chunks);
    free(survey->dropped);
    if (survey->fd >= 0) {
        close(survey->fd);
    }
    memset(survey, 0, sizeof(*survey));
    survey->fd = -1;
}

#endif // SURVEY_IMPLEMENTATION

#endif
