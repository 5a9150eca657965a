/*
safetensors.h -- tensors in files, in Hugging Face's format: reading, writing, and models in several
files.

    u64 n     length of the header: a multiple of 8 in our files, so that the data is aligned to 64
              bytes
    n bytes   JSON: {"__metadata__": {"format": "pt", ...}, "wte.weight": {"dtype": "F32",
              "shape": [50257, 768], "data_offsets": [begin, end]}, ...}
              then blanks; offsets count from the end of the header
    data      little endian, last dimension fastest; the tensors fill it without gaps or overlaps

A file is mapped and checked as a whole before any of it is used. Nothing in it is trusted: lengths,
offsets, products of sizes, UTF-8, numbers, repeated names. Beyond the format's own rules, names and
keys must have 1 to 511 bytes and no control characters (they are printed in errors), no string may
contain a zero, and a tensor has at most 8 dimensions. The names in the header
may come in any order.

A reader that must survive a damaged file (to find the newest valid checkpoint) uses the _try_
functions, which return 0 and leave the message in `error`; the others end the program with it.
*/
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/xxh64.h"
#include "llmc/formats/tensor_types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SAFETENSORS_MAX_DIMS 8

// ---- files in memory ----

typedef struct {
    const char* path; // path of its file, for errors
    const char* name;
    SafeTensorsDtype dtype;
    int ndim; // 0: one element
    size_t shape[SAFETENSORS_MAX_DIMS];
    size_t elements, bytes;
    const unsigned char* data; // in the mapped file; in foreign files not aligned to the element
} SafeTensorsView;

typedef struct {
    const char *key, *value;
} SafeTensorsPair;

typedef struct {
    char* path;
    unsigned char* map;
    size_t map_bytes;
    unsigned char* header;    // a copy, in which strings are decoded in place
    SafeTensorsView* tensors; // sorted by name
    size_t num_tensors;
    SafeTensorsPair* metadata; // sorted by key
    size_t num_metadata;
    char error[ERROR_BYTES]; // reason why it could not be opened
} SafeTensors;

// ---- the header ----

void safetensors_sort(void* items, size_t count, size_t item_bytes, int (*compare)(const void*, const void*));

// Sets elements and bytes of a tensor from its shape; 0 if they exceed what can be addressed.
int safetensors_set_sizes(SafeTensorsView* view);

// Sorts the tensors by name. Returns 0 with the reason in st->error if a name comes twice.
int safetensors_sort_names(SafeTensors* st);

// ---- reading ----

// Closes the file; `error` stays.
void safetensors_close(SafeTensors* st);

// Maps the file and checks its whole header. Returns 1; or 0 with the reason in st->error and
// nothing to close.
int safetensors_try_open(SafeTensors* st, const char* path);

// Maps a file, which must not become shorter while it is open: the system kills whoever reads
// beyond its end.
void safetensors_open(SafeTensors* st, const char* path);

// Returns the tensor of this name, or NULL.
const SafeTensorsView* safetensors_find(const SafeTensors* st, const char* name);

// Returns the tensor of this name; ends the program if it is missing or has another shape.
const SafeTensorsView* safetensors_require(const SafeTensors* st, const char* name, int ndim,
                                           const size_t* shape);

// Returns the value of a key of __metadata__, or NULL.
const char* safetensors_metadata(const SafeTensors* st, const char* key);

// Sets out (count) to the elements [start, start + count) of an F32, F16 or BF16 tensor.
void safetensors_read_f32_part(const SafeTensorsView* view, size_t start, size_t count, float* out);

// Sets out (elements of the view) to all of an F32, F16 or BF16 tensor.
void safetensors_read_f32(const SafeTensorsView* view, float* out);

// Lets the system drop the pages of elements [start, start + count), which will not be read again,
// from this process's memory.
void safetensors_release(const SafeTensorsView* view, size_t start, size_t count);

// ---- a model in one file or in several ----

// Location of a tensor according to an index.
typedef struct {
    const char* name;
    const SafeTensorsView* view;
} SafeTensorsPlace_;

typedef struct {
    char* path;         // path of the directory, or of the one file
    SafeTensors* files; // each opened once
    size_t num_files;
    // text of the index, which contains the names; NULL: one file, without an index
    unsigned char* index;
    SafeTensorsPlace_* places; // sorted by name
    size_t num_places;
    char error[ERROR_BYTES]; // reason why it could not be opened
} SafeTensorsSet;

// Closes the files; `error` stays.
void safetensors_set_close(SafeTensorsSet* set);

// Opens a model as safetensors_set_open does, but returns 0 with the reason in set->error and
// nothing to close if it cannot.
int safetensors_set_try_open(SafeTensorsSet* set, const char* path, const char* stem);

// Opens a model: a file, a directory with STEM.safetensors, or one with STEM.safetensors.index.json
// and the files that it names. Checks all of them.
void safetensors_set_open(SafeTensorsSet* set, const char* path, const char* stem);

// Returns the tensor of this name, or NULL.
const SafeTensorsView* safetensors_set_find(const SafeTensorsSet* set, const char* name);

// Returns the tensor, or ends the program, as safetensors_require does.
const SafeTensorsView* safetensors_set_require(const SafeTensorsSet* set, const char* name, int ndim,
                                               const size_t* shape);

// ---- writing: open, metadata and declarations, begin, the data, commit ----

typedef struct {
    FileWriter file;
    Xxh64 hash;
    SafeTensorsView* tensors; // in the order of the file; without data
    size_t num_tensors;
    SafeTensorsPair* metadata;
    size_t num_metadata;
    size_t data_bytes; // bytes of all tensors
    size_t current;    // tensor being written,
    size_t written;    // and its bytes so far
} SafeTensorsWriter;

// Adds metadata. Copies the strings. A key may not come twice: readers would refuse the file.
void safetensors_writer_metadata(SafeTensorsWriter* writer, const char* key, const char* value);

// Starts the file `path`, which gets this name when it is complete (file.h). Its metadata start
// with "format": "pt", without which transformers does not read it.
void safetensors_writer_open(SafeTensorsWriter* writer, const char* path);

// Declares the next tensor of the file. Its data must start at a multiple of its element's size, as
// PyTorch demands: in files of mixed types, declare the wide ones first.
void safetensors_writer_declare(SafeTensorsWriter* writer, const char* name, SafeTensorsDtype dtype, int ndim,
                                const size_t* shape);

// Writes the header; all tensors must be declared.
void safetensors_writer_begin(SafeTensorsWriter* writer);

// Writes the next bytes of the data as they are; not beyond the end of a tensor.
void safetensors_write_raw(SafeTensorsWriter* writer, const void* data, size_t bytes);

// Syncs the file and renames it into place, after all data. Returns its checksum (file_checksum).
uint64_t safetensors_writer_commit(SafeTensorsWriter* writer);

#ifdef __cplusplus
}
#endif

#ifdef SAFETENSORS_IMPLEMENTATION

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/base/json.h"
#include "llmc/base/mapped_file.h"
#include "llmc/base/text_buffer.h"

// largest header, as in the reference implementation
#define SAFETENSORS_MAX_HEADER_ ((size_t)100000000)
// alignment of the data in files that we write, in bytes
#define SAFETENSORS_ALIGN_ 64

#define SAFETENSORS_METADATA_ "__metadata__"

// ---- files in memory ----

static char* safetensors_copy_(const char* string) {
    char* copy = strdup(string);
    CHECK(copy, "no memory for a name");
    return copy;
}

// ---- the header ----

static int safetensors_by_name_(const void* a, const void* b) {
    return strcmp(((const SafeTensorsView*)a)->name, ((const SafeTensorsView*)b)->name);
}

static int safetensors_by_key_(const void* a, const void* b) {
    return strcmp(((const SafeTensorsPair*)a)->key, ((const SafeTensorsPair*)b)->key);
}

// Orders tensors by their data; one without elements comes before the one that starts at the same
// offset.
static int safetensors_by_place_(const void* a, const void* b) {
    const SafeTensorsView *x = (const SafeTensorsView*)a, *y = (const SafeTensorsView*)b;
    return x->data != y->data ? (x->data < y->data ? -1 : 1) : (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

void safetensors_sort(void* items, size_t count, size_t item_bytes,
                      int (*compare)(const void*, const void*)) {
    if (count > 1) { // an empty array is NULL, which qsort does not take
        qsort(items, count, item_bytes, compare);
    }
}

// Reads an object of strings, sorted by key; the caller frees *pairs, also after an error.
static int safetensors_pairs_(JsonReader* text, SafeTensorsPair** pairs, size_t* count) {
    SafeTensorsPair pair = {NULL, NULL};
    JsonWalk walk = json_walk(text, '{');
    while (json_step(&walk, &pair.key)) {
        if (!json_string(text, &pair.value)) {
            return 0;
        }
        *pairs = (SafeTensorsPair*)check_grow(*pairs, *count, sizeof(pair), "list of tensors");
        (*pairs)[(*count)++] = pair;
    }
    safetensors_sort(*pairs, *count, sizeof(pair), safetensors_by_key_);
    for (size_t i = 1; walk.ok && i < *count; i++) {
        if (strcmp((*pairs)[i - 1].key, (*pairs)[i].key) == 0) {
            return error_set(text->error, text->path, "key %s appears twice", (*pairs)[i].key);
        }
    }
    return walk.ok;
}

static int safetensors_dtype_(JsonReader* text, SafeTensorsView* view) {
    const char* name;
    if (!json_name(text, &name)) {
        return 0;
    }
    for (int i = 0; i < SAFETENSORS_DTYPES; i++) {
        if (strcmp(name, safetensors_dtype_name((SafeTensorsDtype)i)) == 0) {
            view->dtype = (SafeTensorsDtype)i;
            return 1;
        }
    }
    return error_set(
        text->error, text->path,
        "tensor %s: dtype %s, wanted F32, F16 or BF16 (of buffers that nobody reads also F64, BOOL "
        "and whole numbers)",
        view->name, name);
}

// Reads {"dtype": ..., "shape": ..., "data_offsets": ...} in any order; skips other keys.
static int safetensors_entry_(JsonReader* text, SafeTensorsView* view, size_t offsets[2]) {
    static const char* const keys[3] = {"dtype", "shape", "data_offsets"};
    const char* key;
    int seen[3] = {0, 0, 0}, count = 2;
    JsonWalk walk = json_walk(text, '{');
    while (json_step(&walk, &key)) {
        int i = 0;
        while (i < 3 && strcmp(key, keys[i]) != 0) {
            i++;
        }
        if (i < 3 && seen[i]++) {
            return error_set(text->error, text->path,
                             "tensor %s: key %s appears twice, wanted dtype, shape and data_offsets",
                             view->name, key);
        }
        walk.ok = i == 0   ? safetensors_dtype_(text, view)
                  : i == 1 ? json_naturals(text, view->shape, SAFETENSORS_MAX_DIMS, &view->ndim)
                  : i == 2 ? json_naturals(text, offsets, 2, &count)
                           : json_skip(text);
    }
    for (int i = 0; walk.ok && i < 3; i++) {
        if (!seen[i]) {
            return error_set(text->error, text->path, "tensor %s: no %s", view->name, keys[i]);
        }
    }
    if (walk.ok && count != 2) {
        return error_set(text->error, text->path, "tensor %s: %d data_offsets, wanted 2", view->name, count);
    }
    return walk.ok;
}

// Shape as text, "(768, 2304)", for messages.
typedef struct {
    char text[SAFETENSORS_MAX_DIMS * 22 + 3];
} SafeTensorsShapeText_;

static SafeTensorsShapeText_ safetensors_shape_text_(int ndim, const size_t* shape) {
    SafeTensorsShapeText_ out;
    int n = snprintf(out.text, sizeof(out.text), "(");
    for (int i = 0; i < ndim; i++) {
        n += snprintf(out.text + n, sizeof(out.text) - (size_t)n, "%s%zu", i ? ", " : "", shape[i]);
    }
    snprintf(out.text + n, sizeof(out.text) - (size_t)n, ")");
    return out;
}

int safetensors_set_sizes(SafeTensorsView* view) {
    view->elements = 1;
    for (int i = 0; i < view->ndim; i++) {
        if (__builtin_mul_overflow(view->elements, view->shape[i], &view->elements)) {
            return 0;
        }
    }
    const int fits =
        !__builtin_mul_overflow(view->elements, safetensors_dtype_bytes(view->dtype), &view->bytes);
    view->bytes /= safetensors_dtype_block(view->dtype);
    return fits;
}

// Locates a tensor's data in the file; `begin` is the start of the data of all tensors.
static int safetensors_place_(SafeTensors* st, SafeTensorsView* view, size_t begin, const size_t offsets[2]) {
    const size_t data_bytes = st->map_bytes - begin;
    const SafeTensorsShapeText_ shape = safetensors_shape_text_(view->ndim, view->shape);
    if (!safetensors_set_sizes(view)) {
        return error_set(st->error, st->path, "tensor %s: shape %s is too large", view->name, shape.text);
    }
    if (offsets[0] > offsets[1] || offsets[1] > data_bytes) {
        return error_set(st->error, st->path,
                         "tensor %s: data_offsets [%zu, %zu] in %zu bytes of data: the file is "
                         "truncated or damaged",
                         view->name, offsets[0], offsets[1], data_bytes);
    }
    if (offsets[1] - offsets[0] != view->bytes) {
        return error_set(st->error, st->path, "tensor %s: %zu bytes, wanted %zu for %s of shape %s",
                         view->name, offsets[1] - offsets[0], view->bytes,
                         safetensors_dtype_name(view->dtype), shape.text);
    }
    view->data = st->map + begin + offsets[0];
    return 1;
}

// Reads the object that is the header.
static int safetensors_entries_(SafeTensors* st, JsonReader* text) {
    const char* name;
    int has_metadata = 0;
    JsonWalk walk = json_walk(text, '{');
    while (json_step(&walk, &name)) {
        if (strcmp(name, SAFETENSORS_METADATA_) == 0) {
            if (has_metadata++) {
                return error_set(st->error, st->path, "%s appears twice", SAFETENSORS_METADATA_);
            }
            walk.ok = json_peek(text) == 'n' ? json_skip(text)
                                             : safetensors_pairs_(text, &st->metadata, &st->num_metadata);
            continue;
        }
        SafeTensorsView view;
        size_t offsets[2];
        memset(&view, 0, sizeof(view));
        view.path = st->path;
        view.name = name;
        if (!safetensors_entry_(text, &view, offsets) ||
            !safetensors_place_(st, &view, text->first + text->bytes, offsets)) {
            return 0;
        }
        st->tensors = (SafeTensorsView*)check_grow(st->tensors, st->num_tensors, sizeof(SafeTensorsView),
                                                   "list of tensors");
        st->tensors[st->num_tensors++] = view;
    }
    return walk.ok && json_end(text);
}

// Checks that the tensors fill the data, from `at` to the end of the file.
static int safetensors_check_places_(SafeTensors* st, const unsigned char* at) {
    const unsigned char* const begin = at;
    safetensors_sort(st->tensors, st->num_tensors, sizeof(SafeTensorsView), safetensors_by_place_);
    for (size_t i = 0; i < st->num_tensors; i++) {
        const SafeTensorsView* view = &st->tensors[i];
        if (view->data != at) {
            return error_set(st->error, st->path, "tensor %s: starts at byte %zu of the data, wanted %zu: %s",
                             view->name, (size_t)(view->data - begin), (size_t)(at - begin),
                             view->data > at ? "a hole" : "an overlap");
        }
        at += view->bytes;
    }
    const size_t left = (size_t)(st->map + st->map_bytes - at);
    if (left) {
        return error_set(st->error, st->path, "%zu bytes after the last tensor, wanted none", left);
    }
    return 1;
}

int safetensors_sort_names(SafeTensors* st) {
    safetensors_sort(st->tensors, st->num_tensors, sizeof(SafeTensorsView), safetensors_by_name_);
    for (size_t i = 1; i < st->num_tensors; i++) {
        if (strcmp(st->tensors[i - 1].name, st->tensors[i].name) == 0) {
            return error_set(st->error, st->path, "tensor %s appears twice", st->tensors[i].name);
        }
    }
    return 1;
}

// Reads and checks the header of the file at st->map.
static int safetensors_parse_(SafeTensors* st) {
    uint64_t header_bytes;
    const size_t first = sizeof(header_bytes);
    if (st->map_bytes < first) {
        return error_set(st->error, st->path, "%zu bytes, wanted a safetensors file", st->map_bytes);
    }
    memcpy(&header_bytes, st->map, first);
    if (header_bytes > SAFETENSORS_MAX_HEADER_ || header_bytes > st->map_bytes - first) {
        return error_set(st->error, st->path,
                         "a header of %llu bytes, wanted at most %zu, in a file of %zu: truncated, or "
                         "not a safetensors file",
                         (unsigned long long)header_bytes, SAFETENSORS_MAX_HEADER_, st->map_bytes);
    }
    const size_t bytes = (size_t)header_bytes;
    st->header =
        // exact size, so that tools detect every access beyond it
        (unsigned char*)malloc(bytes ? bytes : 1);
    CHECK(st->header, "%s: no memory for a header of %zu bytes", st->path, bytes);
    memcpy(st->header, st->map + first, bytes);
    JsonReader text = {st->path, st->error, st->header, bytes, 0, first};
    return safetensors_entries_(st, &text) && safetensors_check_places_(st, st->map + first + bytes) &&
           safetensors_sort_names(st);
}

static void safetensors_unmap_(unsigned char* map, size_t bytes) {
    if (map) {
        munmap(map, bytes);
    }
}

// ---- reading ----

void safetensors_close(SafeTensors* st) {
    safetensors_unmap_(st->map, st->map_bytes);
    free(st->path);
    free(st->header);
    free(st->tensors);
    free(st->metadata);
    memset(st, 0, offsetof(SafeTensors, error));
}

int safetensors_try_open(SafeTensors* st, const char* path) {
    memset(st, 0, sizeof(*st));
    st->path = safetensors_copy_(path);
    const int ok = mapped_path(path, &st->map, &st->map_bytes, st->error) && safetensors_parse_(st);
    if (!ok) {
        safetensors_close(st);
    }
    return ok;
}

void safetensors_open(SafeTensors* st, const char* path) {
    CHECK(safetensors_try_open(st, path), "%s", st->error);
}

const SafeTensorsView* safetensors_find(const SafeTensors* st, const char* name) {
    SafeTensorsView key;
    memset(&key, 0, sizeof(key));
    key.name = name;
    return st->num_tensors ? (const SafeTensorsView*)bsearch(&key, st->tensors, st->num_tensors, sizeof(key),
                                                             safetensors_by_name_)
                           : NULL;
}

static const SafeTensorsView* safetensors_check_shape_(const SafeTensorsView* view, const char* path,
                                                       const char* name, int ndim, const size_t* shape) {
    const SafeTensorsShapeText_ wanted = safetensors_shape_text_(ndim, shape);
    CHECK(view, "%s: no tensor %s, wanted one of shape %s", path, name, wanted.text);
    CHECK(view->ndim == ndim && (ndim == 0 || memcmp(view->shape, shape, (size_t)ndim * sizeof(*shape)) == 0),
          "%s: tensor %s is %s, wanted %s", view->path, view->name,
          safetensors_shape_text_(view->ndim, view->shape).text, wanted.text);
    return view;
}

const SafeTensorsView* safetensors_require(const SafeTensors* st, const char* name, int ndim,
                                           const size_t* shape) {
    return safetensors_check_shape_(safetensors_find(st, name), st->path, name, ndim, shape);
}

const char* safetensors_metadata(const SafeTensors* st, const char* key) {
    const SafeTensorsPair wanted = {key, NULL};
    const SafeTensorsPair* pair =
        st->num_metadata ? (const SafeTensorsPair*)bsearch(&wanted, st->metadata, st->num_metadata,
                                                           sizeof(wanted), safetensors_by_key_)
                         : NULL;
    return pair ? pair->value : NULL;
}

// Lets the system take back the pages of the mapped file within the range: data is rarely read
// twice.
static void safetensors_release_(const unsigned char* from, size_t bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = ((uintptr_t)from + page - 1) / page * page,
                    end = ((uintptr_t)from + bytes) / page * page;
    if (begin < end) {
        madvise((void*)begin, end - begin, MADV_DONTNEED);
    }
}

static void safetensors_read_piece_(const SafeTensorsView* view, size_t start, size_t count, float* out) {
    CHECK(safetensors_dtype_is_real(view->dtype), "%s: tensor %s is %s, wanted F32, F16 or BF16", view->path,
          view->name, safetensors_dtype_name(view->dtype));
    assert(start <= view->elements && count <= view->elements - start);
    safetensors_decode(out, view->data, view->dtype, start, count);
    safetensors_release_(view->data + safetensors_bytes(view->dtype, start),
                         safetensors_bytes(view->dtype, count));
}

void safetensors_read_f32_part(const SafeTensorsView* view, size_t start, size_t count, float* out) {
    const size_t most = (size_t)1 << 20; // read at a time: no more of the file need be in memory
    for (size_t at = 0; at < count || at == 0; at += most) {
        const size_t left = count - at;
        safetensors_read_piece_(view, start + at, left < most ? left : most, out + at);
    }
}

void safetensors_read_f32(const SafeTensorsView* view, float* out) {
    safetensors_read_f32_part(view, 0, view->elements, out);
}

void safetensors_release(const SafeTensorsView* view, size_t start, size_t count) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const uintptr_t data = (uintptr_t)view->data,
                    begin = (data + safetensors_bytes(view->dtype, start)) / page * page,
                    end = data + safetensors_bytes(view->dtype, start + count);
    if (end > begin) { // only advice: if it fails, the pages stay
        madvise((void*)begin, end - begin, MADV_DONTNEED);
    }
}

// ---- a model in one file or in several ----

static int safetensors_by_file_(const void* a, const void* b) {
    return strcmp(((const SafeTensorsPair*)a)->value, ((const SafeTensorsPair*)b)->value);
}

static int safetensors_by_place_name_(const void* a, const void* b) {
    return strcmp(((const SafeTensorsPlace_*)a)->name, ((const SafeTensorsPlace_*)b)->name);
}

void safetensors_set_close(SafeTensorsSet* set) {
    for (size_t i = 0; i < set->num_files; i++) {
        safetensors_close(&set->files[i]);
    }
    free(set->path);
    free(set->files);
    free(set->index);
    free(set->places);
    memset(set, 0, offsetof(SafeTensorsSet, error));
}

// Opens one more file.
static int safetensors_set_add_(SafeTensorsSet* set, const char* path) {
    set->files = (SafeTensors*)check_grow(set->files, set->num_files, sizeof(SafeTensors), "list of tensors");
    SafeTensors* file = &set->files[set->num_files];
    if (!safetensors_try_open(file, path)) {
        memcpy(set->error, file->error, sizeof(set->error));
        return 0;
    }
    set->num_files++;
    return 1;
}

// Reads {"metadata": anything, "weight_map": {tensor: file, ...}}.
static int safetensors_index_(JsonReader* text, SafeTensorsPair** pairs, size_t* count) {
    const char* key;
    int has_map = 0;
    JsonWalk walk = json_walk(text, '{');
    while (json_step(&walk, &key)) {
        const int is_map = strcmp(key, "weight_map") == 0;
        if (is_map && has_map++) {
            return error_set(text->error, text->path, "weight_map appears twice");
        }
        walk.ok = is_map ? safetensors_pairs_(text, pairs, count) : json_skip(text);
    }
    return walk.ok && json_end(text) &&
           (*count > 0 ||
            error_set(text->error, text->path, "no weight_map, wanted the files of the tensors"));
}

// Opens the files of an index, which are beside it, and finds each tensor.
static int safetensors_set_files_(SafeTensorsSet* set, const char* index, SafeTensorsPair* pairs,
                                  size_t count) {
    char path[PATH_MAX];
    safetensors_sort(pairs, count, sizeof(*pairs), safetensors_by_file_);
    set->places = (SafeTensorsPlace_*)check_alloc(count, sizeof(SafeTensorsPlace_), index);
    for (size_t i = 0; i < count; i++) {
        const char* file = pairs[i].value;
        if (i == 0 || strcmp(file, pairs[i - 1].value) != 0) {
            if (!file[0] || strchr(file, '/') || strlen(file) > NAME_MAX) {
                return error_set(set->error, index,
                                 "tensor %s: a file called \"%.100s\", wanted one "
                                 "beside the index",
                                 pairs[i].key, file);
            }
            if (snprintf(path, sizeof(path), "%s/%s", set->path, file) >= (int)sizeof(path)) {
                return error_set(set->error, index, "the name is too long");
            }
            if (!safetensors_set_add_(set, path)) {
                return 0;
            }
        }
        const SafeTensorsView* view = safetensors_find(&set->files[set->num_files - 1], pairs[i].key);
        if (!view) {
            return error_set(set->error, index, "tensor %s is not in %s", pairs[i].key, path);
        }
        set->places[set->num_places].name = pairs[i].key;
        set->places[set->num_places++].view = view;
    }
    safetensors_sort(set->places, set->num_places, sizeof(*set->places), safetensors_by_place_name_);
    return 1;
}

static int safetensors_set_index_(SafeTensorsSet* set, const char* path) {
    unsigned char* map = NULL;
    size_t bytes = 0, count = 0;
    SafeTensorsPair* pairs = NULL;
    if (!mapped_path(path, &map, &bytes, set->error)) {
        return 0;
    }
    if (bytes > SAFETENSORS_MAX_HEADER_) {
        safetensors_unmap_(map, bytes);
        return error_set(set->error, path, "%zu bytes, wanted at most %zu", bytes, SAFETENSORS_MAX_HEADER_);
    }
    set->index = (unsigned char*)malloc(bytes + 1);
    CHECK(set->index, "%s: no memory for %zu bytes", path, bytes);
    if (bytes) {
        memcpy(set->index, map, bytes);
    }
    safetensors_unmap_(map, bytes);
    JsonReader text = {path, set->error, set->index, bytes, 0, 0};
    const int ok =
        safetensors_index_(&text, &pairs, &count) && safetensors_set_files_(set, path, pairs, count);
    free(pairs);
    return ok;
}

// True if a directory has a model as PyTorch saved it before safetensors existed, and its path is
// not too long.
static int safetensors_has_pickle_(const char* directory) {
    char one[PATH_MAX], index[PATH_MAX];
    file_join(one, directory, "pytorch_model.bin");
    file_join(index, directory, "pytorch_model.bin.index.json");
    return file_exists(one) || file_exists(index);
}

int safetensors_set_try_open(SafeTensorsSet* set, const char* path, const char* stem) {
    char one[PATH_MAX], index[PATH_MAX];
    memset(set, 0, sizeof(*set));
    set->path = safetensors_copy_(path);
    int ok = 1;
    if (!file_is_directory(path)) {
        ok = safetensors_set_add_(set, path);
    } else if (snprintf(one, sizeof(one), "%s/%s.safetensors", path, stem) >= (int)sizeof(one) ||
               snprintf(index, sizeof(index), "%s/%s.safetensors.index.json", path, stem) >=
                   (int)sizeof(index)) {
        ok = error_set(set->error, path, "the name is too long");
    } else if (file_exists(one)) {
        ok = safetensors_set_add_(set, one);
    } else if (file_exists(index)) {
        ok = safetensors_set_index_(set, index);
    } else {
        ok = error_set(set->error, path,
                       "no %s.safetensors and no %s.safetensors.index.json in this directory%s", stem, stem,
                       safetensors_has_pickle_(path) ? "; its pytorch_model.bin is not read: save_pretrained "
                                                       "of transformers writes model.safetensors"
                                                     : "");
    }
    if (!ok) {
        safetensors_set_close(set);
    }
    return ok;
}

void safetensors_set_open(SafeTensorsSet* set, const char* path, const char* stem) {
    CHECK(safetensors_set_try_open(set, path, stem), "%s", set->error);
}

const SafeTensorsView* safetensors_set_find(const SafeTensorsSet* set, const char* name) {
    const SafeTensorsPlace_ key = {name, NULL};
    const SafeTensorsPlace_* place =
        set->num_places ? (const SafeTensorsPlace_*)bsearch(&key, set->places, set->num_places, sizeof(key),
                                                            safetensors_by_place_name_)
                        : NULL;
    return set->index ? (place ? place->view : NULL) : safetensors_find(&set->files[0], name);
}

const SafeTensorsView* safetensors_set_require(const SafeTensorsSet* set, const char* name, int ndim,
                                               const size_t* shape) {
    return safetensors_check_shape_(safetensors_set_find(set, name), set->path, name, ndim, shape);
}

// ---- writing: open, metadata and declarations, begin, the data, commit ----

static void safetensors_put_(SafeTensorsWriter* writer, const void* data, size_t bytes) {
    file_put(&writer->file, data, bytes);
    xxh64_add(&writer->hash, data, bytes);
}

void safetensors_writer_metadata(SafeTensorsWriter* writer, const char* key, const char* value) {
    SafeTensorsPair pair = {safetensors_copy_(key), safetensors_copy_(value)};
    for (size_t i = 0; i < writer->num_metadata; i++) {
        assert(strcmp(writer->metadata[i].key, key) != 0);
    }
    writer->metadata =
        (SafeTensorsPair*)check_grow(writer->metadata, writer->num_metadata, sizeof(pair), "list of tensors");
    writer->metadata[writer->num_metadata++] = pair;
}

void safetensors_writer_open(SafeTensorsWriter* writer, const char* path) {
    memset(writer, 0, sizeof(*writer));
    file_open(&writer->file, path);
    xxh64_open(&writer->hash);
    safetensors_writer_metadata(writer, "format", "pt");
}

void safetensors_writer_declare(SafeTensorsWriter* writer, const char* name, SafeTensorsDtype dtype, int ndim,
                                const size_t* shape) {
    SafeTensorsView view;
    const size_t length = strlen(name);
    assert(0 <= ndim && ndim <= SAFETENSORS_MAX_DIMS && 0 < length && length <= JSON_MAX_NAME);
    assert(strcmp(name, SAFETENSORS_METADATA_) != 0 && writer->hash.bytes == 0);
    memset(&view, 0, sizeof(view));
    view.name = safetensors_copy_(name);
    view.dtype = dtype;
    view.ndim = ndim;
    for (int i = 0; i < ndim; i++) {
        view.shape[i] = shape[i];
    }
    CHECK(safetensors_set_sizes(&view) && view.bytes <= SIZE_MAX / 2 - writer->data_bytes,
          "%s: tensor %s of shape %s is too large", writer->file.path, name,
          safetensors_shape_text_(ndim, shape).text);
    assert(writer->data_bytes % safetensors_dtype_bytes(dtype) == 0);
    writer->data_bytes += view.bytes;
    writer->tensors = (SafeTensorsView*)check_grow(writer->tensors, writer->num_tensors,
                                                   sizeof(SafeTensorsView), "list of tensors");
    writer->tensors[writer->num_tensors++] = view;
}

static void safetensors_print_header_(const SafeTensorsWriter* writer, FILE* out) {
    size_t at = 0;
    fputs("{\"" SAFETENSORS_METADATA_ "\":{", out);
    for (size_t i = 0; i < writer->num_metadata; i++) {
        const SafeTensorsPair pair = writer->metadata[i];
        fputs(i ? "," : "", out);
        json_print_string(out, pair.key, strlen(pair.key));
        fputc(':', out);
        json_print_string(out, pair.value, strlen(pair.value));
    }
    fputc('}', out);
    for (size_t i = 0; i < writer->num_tensors; i++) {
        const SafeTensorsView* view = &writer->tensors[i];
        fputc(',', out);
        json_print_string(out, view->name, strlen(view->name));
        fprintf(out, ":{\"dtype\":\"%s\",\"shape\":[", safetensors_dtype_name(view->dtype));
        for (int k = 0; k < view->ndim; k++) {
            fprintf(out, "%s%zu", k ? "," : "", view->shape[k]);
        }
        fprintf(out, "],\"data_offsets\":[%zu,%zu]}", at, at + view->bytes);
        at += view->bytes;
    }
    fputc('}', out);
}

// Moves past complete tensors, also those without elements.
static void safetensors_advance_(SafeTensorsWriter* writer) {
    while (writer->current < writer->num_tensors &&
           writer->written == writer->tensors[writer->current].bytes) {
        writer->current++;
        writer->written = 0;
    }
}

void safetensors_writer_begin(SafeTensorsWriter* writer) {
    static const char blanks[SAFETENSORS_ALIGN_ + 1] =
        "                                                                ";
    TextBuffer buffer;
    text_buffer_open(&buffer, writer->file.path);
    safetensors_print_header_(writer, buffer.file);
    char* text = text_buffer_close(&buffer);
    const size_t bytes = buffer.bytes;
    const size_t padding = (SAFETENSORS_ALIGN_ - (8 + bytes) % SAFETENSORS_ALIGN_) % SAFETENSORS_ALIGN_;
    const uint64_t header_bytes = bytes + padding;
    CHECK(header_bytes <= SAFETENSORS_MAX_HEADER_, "%s: a header of %zu bytes, wanted at most %zu",
          writer->file.path, bytes + padding, SAFETENSORS_MAX_HEADER_);
    safetensors_put_(writer, &header_bytes, sizeof(header_bytes));
    safetensors_put_(writer, text, bytes);
    safetensors_put_(writer, blanks, padding);
    free(text);
}

void safetensors_write_raw(SafeTensorsWriter* writer, const void* data, size_t bytes) {
    safetensors_advance_(writer);
    assert(bytes == 0 || (writer->current < writer->num_tensors &&
                          bytes <= writer->tensors[writer->current].bytes - writer->written));
    safetensors_put_(writer, data, bytes);
    writer->written += bytes;
}

uint64_t safetensors_writer_commit(SafeTensorsWriter* writer) {
    safetensors_advance_(writer);
    assert(writer->hash.bytes > 0 && writer->current == writer->num_tensors && writer->written == 0);
    file_commit(&writer->file);
    for (size_t i = 0; i < writer->num_tensors; i++) {
        free((char*)writer->tensors[i].name);
    }
    for (size_t i = 0; i < writer->num_metadata; i++) {
        free((char*)writer->metadata[i].key);
        free((char*)writer->metadata[i].value);
    }
    free(writer->tensors);
    free(writer->metadata);
    return xxh64_value(&writer->hash);
}

#endif // SAFETENSORS_IMPLEMENTATION

#endif
