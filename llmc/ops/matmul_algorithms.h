/*
matmul_algorithms.h -- the algorithms that were chosen for matmuls, and the files that keep them.

They are chosen by time, and times differ from run to run. Algorithms add in different orders, so
another choice gives other bits. A run that must have the bits of an earlier one adopts its choices:

    OUT/step_.../matmul.json     choices of a run, in each of its checkpoints
    ${XDG_CACHE_HOME:-$HOME/.cache}/pretrain.c/matmul-<hash of the machine>.json (cache.h)
                                 choices of all runs

    {"format":"pretrain.c matmuls","version":1,"machine":"...","matmuls":[
    {"key":[10 or 11 numbers],"algorithm":"128 hexadecimal digits","chosen":0,
     "candidates":8,"ms":0.25}, ...],
    "xxh64":"16 hexadecimal digits"}

`machine` describes in words what an algorithm depends on besides the matmul: the card, the library,
its settings. A file from another machine does not apply. The eleventh number of a key is its
`batch`, if that is not 1. A key without an alignment is not about an algorithm: `chosen` is then
the way of an operation whose first way is that matmul, or of attention (attention_race.cuh). xxh64
is the checksum of all bytes before its value.

The cache is a convenience: it needs a home directory, and failing to read or write it is no error.
Programs that write it at the same time take turns; existing entries never change.
*/
#ifndef LLMC_MATMUL_ALGORITHMS_H
#define LLMC_MATMUL_ALGORITHMS_H

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MATMUL_PLANS_FILE "matmul.json" // in a checkpoint

enum {
    MATMUL_CHOICES = 4096, // entries of a list: a model of one batch size makes about 40
    MATMUL_ALGORITHM_BYTES = 64,
    MATMUL_KEY_NUMBERS_ = 11,
    MATMUL_PLANS_VERSION_ = 1,
    MATMUL_OTHER = 1 << 20,
    MATMUL_PLANS_MAX_BYTES_ = 4 << 20,
};

// A matmul: out (rows, cols) = left (rows, depth) right (depth, cols). A transposed factor lies in
// memory as (depth, rows) or (cols, depth). All members are ints: keys are compared as memory.
typedef struct {
    int rows, cols, depth;
    int left_transposed, right_transposed;
    int type, out_type; // DType of the factors, and of the result
    int epilogue;       // cublasLtEpilogue_t; from MATMUL_OTHER on: another operation than a matmul
    int adds;           // out = add + ...
    // alignment of all matrices in bytes; 0: the choice is about the way of an operation
    int alignment;
    int batch; // number of matmuls of this shape, whose matrices lie one after the other
} MatmulKey;

typedef struct {
    MatmulKey key;
    // index and count in the order of the library's guesses
    int chosen, candidates;
    float ms;                                        // measured time
    unsigned char algorithm[MATMUL_ALGORITHM_BYTES]; // cublasLtMatmulAlgo_t, opaque
} MatmulChoice;

// A list that only grows, so a thread may write it into a file while others use it.
typedef struct {
    MatmulChoice* list; // (MATMUL_CHOICES)
    int count;
} MatmulChoices;

void matmul_choices_open(MatmulChoices* choices);

static inline void matmul_choices_close(MatmulChoices* choices) { free(choices->list); }

// Returns the choice for a matmul, or NULL.
const MatmulChoice* matmul_choices_find(const MatmulChoices* choices, const MatmulKey* key);

// Returns the number of choices, for another thread than the one that adds.
static inline int matmul_choices_count(const MatmulChoices* choices) {
    return __atomic_load_n(&choices->count, __ATOMIC_ACQUIRE);
}

// Adds a choice. Returns 0 if the list already has one for this matmul, or is full.
int matmul_choices_add(MatmulChoices* choices, const MatmulChoice* choice);

// ---- writing ----

// Writes the file, all of it or nothing.
void matmul_choices_write(const MatmulChoices* choices, const char* machine, const char* path);

// ---- reading ----

// Adds the choices of a file to the list; a missing file has none. Returns 0, with nothing added
// and the reason in `error`, if the file is damaged, not of this format, or from another machine.
int matmul_choices_try_read(MatmulChoices* choices, const char* machine, const char* path, char* error);

// ---- the cache ----

// Sets path to the cache's file for a machine. Returns 0 if the environment has no place for a
// cache.
int matmul_cache_path(char path[PATH_MAX], const char* machine);

// Adds choices to the cache's file; replaces a damaged one. Returns 0 with the reason in `error` if
// that fails.
int matmul_cache_try_write(const MatmulChoices* choices, const char* machine, const char* path, char* error);

#ifdef __cplusplus
}
#endif

#ifdef MATMUL_ALGORITHMS_IMPLEMENTATION

#include <assert.h>
#include <stdio.h>

#include "llmc/base/cache.h"
#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/text_buffer.h"
#include "llmc/base/xxh64.h"

#define MATMUL_PLANS_FORMAT_ "pretrain.c matmuls"

static_assert(sizeof(MatmulKey) == MATMUL_KEY_NUMBERS_ * sizeof(int), "a key is an array of its members");

void matmul_choices_open(MatmulChoices* choices) {
    choices->list =
        (MatmulChoice*)check_alloc_unset(MATMUL_CHOICES, sizeof(MatmulChoice), "algorithms of matmuls");
    choices->count = 0;
}

const MatmulChoice* matmul_choices_find(const MatmulChoices* choices, const MatmulKey* key) {
    for (int i = 0; i < choices->count; i++) {
        if (memcmp(&choices->list[i].key, key, sizeof(*key)) == 0) {
            return &choices->list[i];
        }
    }
    return NULL;
}

int matmul_choices_add(MatmulChoices* choices, const MatmulChoice* choice) {
    const int count = choices->count;
    if (count == MATMUL_CHOICES || matmul_choices_find(choices, &choice->key)) {
        return 0;
    }
    choices->list[count] = *choice;
    __atomic_store_n(&choices->count, count + 1, __ATOMIC_RELEASE);
    return 1;
}

static void matmul_choice_print_(FILE* file, const MatmulChoice* choice) {
    int numbers[MATMUL_KEY_NUMBERS_];
    const int count = choice->key.batch == 1 ? MATMUL_KEY_NUMBERS_ - 1 : MATMUL_KEY_NUMBERS_;
    memcpy(numbers, &choice->key, sizeof(numbers));
    for (int i = 0; i < count; i++) {
        fprintf(file, i ? ",%d" : "{\"key\":[%d", numbers[i]);
    }
    fputs("],\"algorithm\":\"", file);
    for (int i = 0; i < MATMUL_ALGORITHM_BYTES; i++) {
        fprintf(file, "%02x", choice->algorithm[i]);
    }
    fprintf(file, "\",\"chosen\":%d,\"candidates\":%d,\"ms\":%.6g}", choice->chosen, choice->candidates,
            choice->ms);
}

// Returns the text of a file; the caller frees it.
static char* matmul_choices_text_(const MatmulChoices* choices, const char* machine, size_t* bytes) {
    const int count = matmul_choices_count(choices);
    TextBuffer buffer;
    text_buffer_open(&buffer, "algorithms of matmuls");
    FILE* file = buffer.file;
    fprintf(file,
            "{\"format\":\"" MATMUL_PLANS_FORMAT_ "\",\"version\":%d,\"machine\":", MATMUL_PLANS_VERSION_);
    json_print_string(file, machine, strlen(machine));
    fputs(",\"matmuls\":[", file);
    for (int i = 0; i < count; i++) {
        fputs(i ? ",\n" : "\n", file);
        matmul_choice_print_(file, &choices->list[i]);
    }
    fputs("],\n\"xxh64\":\"", file);
    fflush(file);
    fprintf(file, "%016" PRIx64 "\"}\n", xxh64(buffer.text, buffer.bytes));
    char* text = text_buffer_close(&buffer);
    *bytes = buffer.bytes;
    return text;
}

void matmul_choices_write(const MatmulChoices* choices, const char* machine, const char* path) {
    size_t bytes;
    char* text = matmul_choices_text_(choices, machine, &bytes);
    file_write_text(path, text, bytes);
    free(text);
}

// Reads a whole number that fits into an int.
static int matmul_int_(JsonReader* reader, int* value) {
    size_t number;
    if (!json_natural(reader, &number)) {
        return 0;
    }
    *value = (int)number;
    return number <= INT_MAX || json_unexpected(reader, "a number below 2^31");
}

static int matmul_key_read_(JsonReader* reader, MatmulKey* key) {
    size_t numbers[MATMUL_KEY_NUMBERS_];
    int ints[MATMUL_KEY_NUMBERS_], count = 0;
    if (!json_naturals(reader, numbers, MATMUL_KEY_NUMBERS_, &count)) {
        return 0;
    }
    if (count == MATMUL_KEY_NUMBERS_ - 1) {
        numbers[count++] = 1; // batch
    }
    if (count != MATMUL_KEY_NUMBERS_) {
        return json_unexpected(reader, "a key of 10 or 11 numbers before it");
    }
    for (int i = 0; i < MATMUL_KEY_NUMBERS_; i++) {
        if (numbers[i] > INT_MAX) {
            return json_unexpected(reader, "numbers below 2^31 before it");
        }
        ints[i] = (int)numbers[i];
    }
    memcpy(key, ints, sizeof(ints));
    return 1;
}

static int matmul_algorithm_read_(JsonReader* reader, unsigned char bytes[MATMUL_ALGORITHM_BYTES]) {
    const char* digits;
    if (!json_string(reader, &digits)) {
        return 0;
    }
    if (strlen(digits) != 2 * MATMUL_ALGORITHM_BYTES ||
        strspn(digits, "0123456789abcdef") != strlen(digits)) {
        return json_unexpected(reader, "128 hexadecimal digits before it");
    }
    for (int i = 0; i < MATMUL_ALGORITHM_BYTES; i++) {
        const char pair[3] = {digits[2 * i], digits[2 * i + 1], '\0'};
        bytes[i] = (unsigned char)strtoul(pair, NULL, 16);
    }
    return 1;
}

static int matmul_choice_member_(JsonReader* reader, const char* name, MatmulChoice* choice) {
    double ms;
    if (strcmp(name, "key") == 0) {
        return matmul_key_read_(reader, &choice->key);
    }
    if (strcmp(name, "algorithm") == 0) {
        return matmul_algorithm_read_(reader, choice->algorithm);
    }
    if (strcmp(name, "ms") == 0 && json_number(reader, &ms)) {
        choice->ms = (float)ms;
        return 1;
    }
    return strcmp(name, "chosen") == 0       ? matmul_int_(reader, &choice->chosen)
           : strcmp(name, "candidates") == 0 ? matmul_int_(reader, &choice->candidates)
                                             : json_unexpected(reader, "a member of a product");
}

// Reads an object with all five members.
static int matmul_choice_read_(JsonReader* reader, MatmulChoice* choice) {
    int more, members = 0;
    const char* name;
    memset(choice, 0, sizeof(*choice));
    if (!json_take(reader, '{')) {
        return 0;
    }
    while ((more = json_member(reader, members ? JSON_NEXT : JSON_FIRST, &name)) > 0) {
        members++;
        if (!matmul_choice_member_(reader, name, choice)) {
            return 0;
        }
    }
    return more == 0 && (members == 5 || json_unexpected(reader, "a product of five members before it"));
}

static int matmul_choices_list_read_(JsonReader* reader, MatmulChoices* choices) {
    int more;
    MatmulChoice choice;
    if (!json_take(reader, '[')) {
        return 0;
    }
    for (int n = 0; (more = json_element(reader, n ? JSON_NEXT : JSON_FIRST)) > 0; n++) {
        if (!matmul_choice_read_(reader, &choice)) {
            return 0;
        }
        matmul_choices_add(choices, &choice);
    }
    return more == 0;
}

// Reads a member of the file with this name; strings must have the wanted values.
static int matmul_plans_member_(JsonReader* reader, const char* name, const char* machine,
                                MatmulChoices* choices) {
    const char* text;
    int version;
    if (strcmp(name, "matmuls") == 0) {
        return matmul_choices_list_read_(reader, choices);
    }
    if (strcmp(name, "version") == 0) {
        return matmul_int_(reader, &version) &&
               (version == MATMUL_PLANS_VERSION_ ||
                error_set(reader->error, reader->path, "version %d, wanted %d", version,
                          MATMUL_PLANS_VERSION_));
    }
    const char* wanted = strcmp(name, "format") == 0    ? MATMUL_PLANS_FORMAT_
                         : strcmp(name, "machine") == 0 ? machine
                                                        : NULL;
    return json_string(reader, &text) &&
           (!wanted || strcmp(text, wanted) == 0 ||
            error_set(reader->error, reader->path, "of %s; this is %s", text, wanted));
}

static int matmul_plans_parse_(MatmulChoices* choices, const char* machine, JsonReader* reader) {
    int more, members = 0;
    const char* name;
    if (!json_take(reader, '{')) {
        return 0;
    }
    while ((more = json_member(reader, members ? JSON_NEXT : JSON_FIRST, &name)) > 0) {
        members++;
        if (!matmul_plans_member_(reader, name, machine, choices)) {
            return 0;
        }
    }
    return more == 0 && json_end(reader) && (members == 5 || json_unexpected(reader, "five members"));
}

// Returns 1 if the checksum at the end of the file is right; if not, 0 and the reason in `error`.
static int matmul_plans_check_sum_(const char* path, const char* text, size_t bytes, char* error) {
    char wanted[32];
    const size_t tail = 16 + strlen("\"}\n");
    snprintf(wanted, sizeof(wanted), "%016" PRIx64 "\"}\n", xxh64(text, bytes > tail ? bytes - tail : 0));
    return (bytes > tail && memcmp(text + bytes - tail, wanted, tail) == 0) ||
           error_set(error, path, "damaged, or not a list of matmuls: its checksum does not match");
}

int matmul_choices_try_read(MatmulChoices* choices, const char* machine, const char* path, char* error) {
    char* text;
    size_t bytes;
    if (access(path, F_OK) != 0 && (errno == ENOENT || errno == ENOTDIR)) {
        return 1;
    }
    if (!file_try_read(path, MATMUL_PLANS_MAX_BYTES_, &text, &bytes, error)) {
        return 0;
    }
    MatmulChoices read;
    matmul_choices_open(&read);
    JsonReader reader = json_reader(path, text, bytes, error);
    const int ok =
        matmul_plans_check_sum_(path, text, bytes, error) && matmul_plans_parse_(&read, machine, &reader);
    for (int i = 0; ok && i < read.count; i++) {
        matmul_choices_add(choices, &read.list[i]);
    }
    matmul_choices_close(&read);
    free(text);
    return ok;
}

int matmul_cache_path(char path[PATH_MAX], const char* machine) {
    return cache_path(path, "matmul", machine);
}

// Makes room for `count` more entries by dropping the oldest.
static void matmul_choices_make_room_(MatmulChoices* choices, int count) {
    const int excess = choices->count + count - MATMUL_CHOICES;
    if (excess > 0) {
        choices->count -= excess < choices->count ? excess : choices->count;
        memmove(choices->list, choices->list + excess, (size_t)choices->count * sizeof(MatmulChoice));
    }
}

// Merges choices into the cache's file; the caller has the lock.
static int matmul_cache_merge_(const MatmulChoices* choices, const char* machine, const char* path,
                               char* error) {
    MatmulChoices all;
    char ignored[ERROR_BYTES];
    size_t bytes;
    matmul_choices_open(&all);
    matmul_choices_try_read(&all, machine, path, ignored);
    matmul_choices_make_room_(&all, choices->count);
    for (int i = 0; i < choices->count; i++) {
        matmul_choices_add(&all, &choices->list[i]);
    }
    char* text = matmul_choices_text_(&all, machine, &bytes);
    const int ok = file_try_write_text(path, text, bytes, error);
    free(text);
    matmul_choices_close(&all);
    return ok;
}

int matmul_cache_try_write(const MatmulChoices* choices, const char* machine, const char* path, char* error) {
    char directory[PATH_MAX];
    const int fd = cache_open_directory(directory, path);
    const FileLock lock = fd >= 0 ? file_try_lock(fd, 2) : FILE_LOCK_HELD;
    if (lock == FILE_LOCK_HELD) {
        error_set(error, directory, "cannot %s: %s", fd < 0 ? "open" : "lock", strerror(errno));
        if (fd >= 0) {
            close(fd);
        }
        return 0;
    }
    if (lock == FILE_LOCK_TAKEN) {
        file_remove_parts(directory, "matmul-"); // left by killed programs: the lock is ours
    } // without locks, two programs may lose each other's choices, and measure them again
    const int ok = matmul_cache_merge_(choices, machine, path, error);
    close(fd);
    return ok;
}

#endif // MATMUL_ALGORITHMS_IMPLEMENTATION

#endif
