/*
hf_model.h -- the weights of a model as Hugging Face stores them, in a directory with config.json
(hf_config.h).

    model.safetensors    the tensors in the table of families.h, one per layer
    model-00001-of-00002.safetensors, ..., model.safetensors.index.json    the same in several files
    model_average.safetensors, ...    other weights of the same model: their average (average.h)
    NAME.gguf            reading only: the same from a GGUF file (gguf_config.h)

The matrices of GPT-2's blocks are (in, out) there, the transpose of ours; other families have a
tensor for each part of our qkvw and fcw, and another order of the channels that rotary positions
turn. gpt-oss has one tensor for all experts of a layer, transposed, with gate and up in turns. The
vocabulary has no padding there: writing drops it, and reading sets it to zero. A tensor that
config.json does not account for is refused by name; heads for other tasks are ignored with a note
on stderr.

GGUF has the matrices as ours, other names and another order of channels and of heads of values,
the sum where a norm adds a number to its weights, and decays in the place of their logarithms.

Models are read in fp32, fp16 or bf16, with and without the prefix of their names, into fp32,
exactly. Experts of gpt-oss may also be in MXFP4 (mxfp4.h), as *_blocks and *_scales, which are not
transposed. A weight that is not finite is an error that names its tensor. Groups of parameters
(model.h) are read one at a time, and a file is written from memory that has only its groups. A
tensor that layers share (model.h) is written once per layer, so files have every layer; when a
model is read, these layers must be equal.

    rows    of the parameters in memory, in one part or more (model_sharded_rows_of), with elements
            of the file's type when writing, fp32 when reading
*/
#ifndef LLMC_HF_MODEL_H
#define LLMC_HF_MODEL_H

#include <stdint.h>

#include "llmc/base/enum_words.h"
#include "llmc/base/file_list.h"
#include "llmc/formats/safetensors.h"
#include "llmc/model/families.h"
#include "llmc/model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

// --weights
// clang-format off
#define HF_WEIGHTS_WORDS(X) \
    X(HF_LAST, "last") \
    X(HF_AVERAGE, "average")
// clang-format on
typedef enum { HF_WEIGHTS_WORDS(WORDS_VALUE) } HfWeights;

// Returns the name of all files of these weights, up to its ending.
static inline const char* hf_model_stem(HfWeights which) {
    return which == HF_AVERAGE ? "model_average" : "model";
}

// ---- writing the weights ----

// Groups [first, end) of a file.
typedef struct {
    int first, end;
} HfModelFile;

// Divides a model into files of at most max_bytes of data, but at least one group. Returns their
// number, the same for every writer. `files` has room for model_groups.
int hf_model_files(HfModelFile* files, ModelConfig cfg, SafeTensorsDtype dtype, double max_bytes);

// Sets name to model.safetensors, or to the name of file `file` (from 0) of `count`.
void hf_model_file_name(char name[64], HfWeights which, int file, int count);

// Writes the file directory/name, complete or not at all. `memory` starts with the file's first
// group; `dtype` is the dtype in memory. Returns the file's checksum (xxh64).
uint64_t hf_model_write(const char* directory, const char* name, HfModelFile file, ModelConfig cfg,
                        const TensorRow* rows, const void* memory, SafeTensorsDtype dtype);

// Writes model.safetensors.index.json, which maps tensors to files.
void hf_model_write_index(const char* directory, HfWeights which, const HfModelFile* files, int count,
                          ModelConfig cfg, SafeTensorsDtype dtype);

// Returns about the bytes of these files: the data, and room for headers and index.
double hf_model_bytes(ModelConfig cfg, SafeTensorsDtype dtype);

// ---- reading the weights ----

// Format of the files: GGUF has its own names, parts and order of heads (families.h).
typedef enum { HF_SAFETENSORS, HF_GGUF } HfFormat;

typedef struct {
    SafeTensorsSet set;
    HfFormat format;
    ModelConfig cfg;
    Arch arch;    // of the files
    float* chunk; // part of a matrix
} HfModel;

// Adds the files of a model: of a directory its configuration, tokenizer and weights, or one file.
void hf_model_list_files(FileList* files, const char* option, const char* path);

// True if a directory has a file of these weights.
int hf_model_has(const char* directory, HfWeights which);

// Opens the model of a directory, or of a GGUF file, with the configuration `cfg`. All tensors must
// exist, and no others. The files have the tensors of `arch`: cfg.arch, or its dense form; then
// each expert gets the MLP of the files, and routers are not set.
void hf_model_open(HfModel* model, const char* path, HfWeights which, ModelConfig cfg, Arch arch);

// Sets elements [first, end) of group g, as far as tensors cover them, in memory that has only this
// group. May set more of the group, but reads little more of the files.
void hf_model_read(HfModel* model, const TensorRow* rows, int g, size_t first, size_t end, void* group);

void hf_model_close(HfModel* model);

#ifdef __cplusplus
}
#endif

#ifdef HF_MODEL_IMPLEMENTATION

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/gguf_file.h"
#include "llmc/formats/gguf_tensors.h"
#include "llmc/formats/hf_config_families.h"
#include "llmc/formats/hf_others.h"
#include "llmc/formats/mxfp4.h"
#include "llmc/tokenizer/bpe_files.h"

// elements transposed at a time, or one row if that is more
#define HF_CHUNK_ ((size_t)1 << 16)

// ---- the weights ----

// One tensor of the files: of a layer, and perhaps of an expert of it.
typedef struct {
    const FileTensor* tensor; // NULL: before the first
    const TensorRow* row;
    int n, l, expert; // layer l is number n of those that have the tensor
    HfFormat format;  // of the files
} HfTensor_;

static HfTensor_ hf_before_first_(HfFormat format) { return (HfTensor_){NULL, NULL, 0, 0, 0, format}; }

static const char* hf_pattern_(const HfTensor_* t) {
    return t->format == HF_GGUF ? t->tensor->gguf_name : t->tensor->hf_name;
}

// Returns the layers whose tensor the files have.
static int hf_layers_(const HfTensor_* t, const TensorRow* rows, Arch arch) {
    return file_tensor_layers(t->tensor, hf_pattern_(t), rows, arch);
}

// Moves to the next tensor that files of an architecture have, in their order; returns 0 after the
// last.
static int hf_next_(HfTensor_* at, const TensorRow* rows, Arch arch) {
    const FileTensor* end = file_tensors() + FILE_TENSOR_ROWS;
    if (at->tensor && ++at->expert < file_tensor_parts(at->tensor, at->row)) {
        return 1;
    }
    at->expert = 0;
    if (at->tensor && ++at->n < hf_layers_(at, rows, arch)) {
        at->l = tensor_layer(at->row, at->n);
        return 1;
    }
    at->n = 0;
    at->tensor = at->tensor ? at->tensor + 1 : file_tensors();
    while (at->tensor < end && hf_layers_(at, rows, arch) == 0) {
        at->tensor++;
    }
    at->row = at->tensor < end ? file_tensor_row(at->tensor, rows, arch) : NULL;
    at->l = at->row ? tensor_layer(at->row, 0) : 0;
    return at->tensor < end;
}

static size_t hf_count_(const TensorRow* rows, Arch arch, HfFormat format) {
    size_t count = 0;
    for (HfTensor_ t = hf_before_first_(format); hf_next_(&t, rows, arch);) {
        count++;
    }
    return count;
}

static FileTensorName hf_name_(const HfTensor_* t) {
    return file_tensor_name(hf_pattern_(t), t->l, t->expert);
}

static FileLines hf_lines_(const HfTensor_* t, ModelConfig cfg) {
    return file_tensor_lines(t->tensor, t->row, cfg, t->expert);
}

static FileOrder hf_order_(const HfTensor_* t, ModelConfig cfg) {
    return t->format == HF_GGUF   ? gguf_order(cfg)
           : cfg.latent.in_halves ? (FileOrder){ORDER_HALVES, 0}
                                  : (FileOrder){hf_families[cfg.arch].order, 0};
}

// Returns the line in memory for line i of the file.
static size_t hf_memory_line_(const HfTensor_* t, ModelConfig cfg, size_t i) {
    const FileLines lines = hf_lines_(t, cfg);
    return lines.first + file_tensor_line(t->tensor, hf_order_(t, cfg), cfg, lines.count, i);
}

static int hf_is_turned_(const HfTensor_* t) {
    return t->tensor->form == FILE_STACK || (t->tensor->form == FILE_CONV1D && t->format != HF_GGUF);
}

// Shape of a tensor, as the file has it.
typedef struct {
    int ndim;
    size_t sizes[3];
} HfShape_;

static HfShape_ hf_shape_(const HfTensor_* t, ModelConfig cfg) {
    const FileLines lines = hf_lines_(t, cfg);
    const int is_vector = file_is_vector(t->row);
    const size_t experts = (size_t)t->row->experts;
    if (t->tensor->form == FILE_STACK) {
        return is_vector ? (HfShape_){2, {experts, lines.count}}
                         : (HfShape_){3, {experts, lines.width, lines.count}};
    }
    if (t->tensor->form == FILE_TAPS && t->format != HF_GGUF) {
        return (HfShape_){3, {lines.count, 1, lines.width}};
    }
    if (file_tensor_is_half(t->tensor)) {
        return (HfShape_){2, {2 * lines.count, lines.width}};
    }
    if (file_tensor_is_by_head(t->tensor)) {
        const size_t NH = (size_t)cfg.NH;
        return (HfShape_){3, {NH, lines.count / NH, lines.width}};
    }
    const int is_of_all = t->format == HF_GGUF && file_tensor_is_of_expert(t->tensor);
    if (is_of_all) {
        return is_vector ? (HfShape_){2, {experts, lines.count}}
                         : (HfShape_){3, {experts, lines.count, lines.width}};
    }
    return is_vector          ? (HfShape_){1, {lines.count}}
           : hf_is_turned_(t) ? (HfShape_){2, {lines.width, lines.count}}
                              : (HfShape_){2, {lines.count, lines.width}};
}

// A matrix whose transpose a file has: its rows in memory, and how many matrices these are, whose
// rows the file has in turns. A vector of each expert counts as one column.
typedef struct {
    FileLines rows;
    size_t turns;
} HfTurned_;

// Returns the matrix of an expert, or with expert 0 the only one.
static HfTurned_ hf_turned_(const HfTensor_* t, ModelConfig cfg, int expert) {
    return (HfTurned_){file_tensor_lines(t->tensor, t->row, cfg, expert),
                       t->tensor->rows == ROWS_TURNS ? (size_t)model_gates(cfg) : 1};
}

// Sets out (n, rows) to the columns first ... first + n - 1 of a matrix `in`, with elements of 2 or
// 4 bytes.
static void hf_turn_(void* out, const void* in, HfTurned_ of, size_t first, size_t n, size_t element_bytes) {
    const size_t rows = of.rows.count, cols = of.rows.width;
    for (size_t r = 0; r < rows; r++) {
        const size_t to = file_turns_line(rows, of.turns, r);
        for (size_t j = 0; j < n; j++) {
            if (element_bytes == 4) {
                ((uint32_t*)out)[j * rows + to] = ((const uint32_t*)in)[r * cols + first + j];
            } else {
                ((uint16_t*)out)[j * rows + to] = ((const uint16_t*)in)[r * cols + first + j];
            }
        }
    }
}

// Returns the number of columns of a matrix that are transposed at a time.
static size_t hf_chunk_columns_(size_t rows) {
    const size_t columns = HF_CHUNK_ / rows;
    return columns ? columns : 1;
}

// Allocates room for hf_chunk_columns_ of any matrix, with elements of 4 bytes.
static void* hf_chunk_open_(const TensorRow* rows) {
    size_t max = HF_CHUNK_;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        max = rows[i].rows > max ? rows[i].rows : max;
        max = file_is_vector(&rows[i]) && rows[i].cols > max ? rows[i].cols : max;
    }
    return check_alloc(max, sizeof(float), "a piece of a matrix");
}

static void hf_write_turned_(SafeTensorsWriter* writer, HfTurned_ of, const char* layer, size_t element_bytes,
                             void* chunk) {
    const size_t rows = of.rows.count, cols = of.rows.width, columns = hf_chunk_columns_(rows);
    const char* matrix = layer + of.rows.first * cols * element_bytes;
    for (size_t at = 0; at < cols; at += columns) {
        const size_t n = cols - at < columns ? cols - at : columns;
        hf_turn_(chunk, matrix, of, at, n, element_bytes);
        safetensors_write_raw(writer, chunk, n * rows * element_bytes);
    }
}

// True for tensors that are read and written line by line: these have an order of their own.
static int hf_has_lines_(const HfTensor_* t) {
    switch (t->tensor->form) {
    case FILE_HEADS:
    case FILE_QKV:
    case FILE_QUERIES:
    case FILE_GATES:
    case FILE_TURNS_LAST:
    case FILE_KEY_TURNS:
    case FILE_HEAD_VALUES:
        return 1;
    case FILE_TAPS:
    case FILE_VALUES:
    case FILE_VALUE_COLS:
    case FILE_DECAY:
        return t->format == HF_GGUF;
    case FILE_PLAIN:
    case FILE_CONV1D:
    case FILE_STACK:
    case FILE_HEAD_KEYS:
        break;
    }
    return 0;
}

static void hf_write_line_(SafeTensorsWriter* writer, const HfTensor_* t, ModelConfig cfg, const char* layer,
                           size_t i) {
    const size_t line_bytes = hf_lines_(t, cfg).width * t->row->element_bytes;
    safetensors_write_raw(writer, layer + hf_memory_line_(t, cfg, i) * line_bytes, line_bytes);
}

// Writes a tensor of two parameters: of each head the rows of queries, then those of gates, whose
// row of the table is the next one.
static void hf_write_gated_(SafeTensorsWriter* writer, HfTensor_ t, const TensorRow* rows, ModelConfig cfg,
                            const char* group) {
    HfTensor_ halves[2] = {t, t};
    halves[1].tensor++;
    assert(halves[1].tensor->form == FILE_GATES);
    halves[1].row = &rows[halves[1].tensor->row];
    const size_t HS = (size_t)model_head_size(cfg);
    for (size_t i = 0; i < 2 * hf_lines_(&t, cfg).count; i++) {
        const HfTensor_* half = &halves[i / HS % 2];
        hf_write_line_(writer, half, cfg, (const char*)tensor_in_group(half->row, group),
                       i / HS / 2 * HS + i % HS);
    }
}

static void hf_write_layer_(SafeTensorsWriter* writer, const HfTensor_* t, ModelConfig cfg, const char* layer,
                            void* chunk) {
    const FileLines lines = hf_lines_(t, cfg);
    const size_t line_bytes = lines.width * t->row->element_bytes;
    const char* first = layer + lines.first * line_bytes;
    for (int e = 0; e < t->row->experts && hf_is_turned_(t); e++) {
        hf_write_turned_(writer, hf_turned_(t, cfg, e), layer, t->row->element_bytes, chunk);
    }
    if (!hf_is_turned_(t) && !hf_has_lines_(t)) {
        safetensors_write_raw(writer, first, lines.count * line_bytes);
    }
    for (size_t i = 0; i < lines.count && hf_has_lines_(t); i++) {
        hf_write_line_(writer, t, cfg, layer, i);
    }
}

// ---- writing the weights ----

// Returns the bytes of a group in files: of all layers that have it.
static double hf_group_bytes_(const TensorRow* rows, ModelConfig cfg, int g) {
    double bytes = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int n = 0; n < rows[i].uses; n++) {
            const double elements = (double)(model_rows_in_files(&rows[i], cfg) * rows[i].cols);
            bytes += tensor_group(&rows[i], tensor_layer(&rows[i], n)) == g
                         ? elements * (double)rows[i].element_bytes
                         : 0;
        }
    }
    return bytes;
}

int hf_model_files(HfModelFile* files, ModelConfig cfg, SafeTensorsDtype dtype, double max_bytes) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    int count = 0;
    double bytes = 0; // of the last file
    model_parameter_rows_of(rows, cfg, safetensors_dtype_bytes(dtype));
    for (int g = 0; g < model_groups(cfg); g++) {
        const double more = hf_group_bytes_(rows, cfg, g);
        if (count == 0 || bytes + more > max_bytes) {
            files[count++].first = g;
            bytes = 0;
        }
        files[count - 1].end = g + 1;
        bytes += more;
    }
    return count;
}

void hf_model_file_name(char name[64], HfWeights which, int file, int count) {
    if (count == 1) {
        snprintf(name, 64, "%s.safetensors", hf_model_stem(which));
    } else {
        snprintf(name, 64, "%s-%05d-of-%05d.safetensors", hf_model_stem(which), file + 1, count);
    }
}

// Returns the group of a tensor, if the file has it; else -1, also for gates: they are written with
// the queries.
static int hf_group_in_file_(HfModelFile file, const HfTensor_* t) {
    const int g = tensor_group(t->row, t->l), is_written = t->tensor->form != FILE_GATES;
    return is_written && file.first <= g && g < file.end ? g : -1;
}

uint64_t hf_model_write(const char* directory, const char* name, HfModelFile file, ModelConfig cfg,
                        const TensorRow* rows, const void* memory, SafeTensorsDtype dtype) {
    char path[PATH_MAX];
    SafeTensorsWriter writer;
    void* chunk = hf_chunk_open_(rows);
    assert(rows[0].element_bytes == safetensors_dtype_bytes(dtype));
    file_join(path, directory, name);
    safetensors_writer_open(&writer, path);
    for (HfTensor_ t = hf_before_first_(HF_SAFETENSORS); hf_next_(&t, rows, cfg.arch);) {
        const HfShape_ shape = hf_shape_(&t, cfg);
        if (hf_group_in_file_(file, &t) >= 0) {
            safetensors_writer_declare(&writer, hf_name_(&t).text, dtype, shape.ndim, shape.sizes);
        }
    }
    safetensors_writer_begin(&writer);
    const size_t first = tensor_group_offset_bytes(rows, file.first);
    for (HfTensor_ t = hf_before_first_(HF_SAFETENSORS); hf_next_(&t, rows, cfg.arch);) {
        const int g = hf_group_in_file_(file, &t);
        if (g >= 0) {
            const char* group = (const char*)memory + (tensor_group_offset_bytes(rows, g) - first);
            if (t.tensor->form == FILE_QUERIES) {
                hf_write_gated_(&writer, t, rows, cfg, group);
            } else {
                hf_write_layer_(&writer, &t, cfg, (const char*)tensor_in_group(t.row, group), chunk);
            }
        }
    }
    free(chunk);
    return safetensors_writer_commit(&writer);
}

static double hf_data_bytes_(ModelConfig cfg, SafeTensorsDtype dtype) {
    return model_count_parameters(cfg) * (double)safetensors_dtype_bytes(dtype);
}

void hf_model_write_index(const char* directory, HfWeights which, const HfModelFile* files, int count,
                          ModelConfig cfg, SafeTensorsDtype dtype) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    char path[PATH_MAX], name[64];
    const char* separator = "";
    FileWriter writer;
    model_parameter_rows_of(rows, cfg, safetensors_dtype_bytes(dtype));
    snprintf(name, sizeof(name), "%s.safetensors.index.json", hf_model_stem(which));
    file_join(path, directory, name);
    file_open(&writer, path);
    fprintf(writer.file, "{\n  \"metadata\": {\"total_size\": %.0f},\n  \"weight_map\": {\n",
            hf_data_bytes_(cfg, dtype));
    for (int f = 0; f < count; f++) {
        hf_model_file_name(name, which, f, count);
        for (HfTensor_ t = hf_before_first_(HF_SAFETENSORS); hf_next_(&t, rows, cfg.arch);) {
            if (hf_group_in_file_(files[f], &t) >= 0) {
                fprintf(writer.file, "%s    \"%s\": \"%s\"", separator, hf_name_(&t).text, name);
                separator = ",\n";
            }
        }
    }
    fprintf(writer.file, "\n  }\n}\n");
    file_commit(&writer);
}

double hf_model_bytes(ModelConfig cfg, SafeTensorsDtype dtype) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows_of(rows, cfg, safetensors_dtype_bytes(dtype));
    const double names =
        (double)hf_count_(rows, cfg.arch, HF_SAFETENSORS) * (160 + 128) + 4096 * (double)model_groups(cfg);
    return hf_data_bytes_(cfg, dtype) + names;
}

// ---- reading the weights ----

static void hf_check_finite_(const SafeTensorsView* view, const float* values, size_t first, size_t n) {
    for (size_t i = 0; i < n; i++) {
        CHECK(isfinite(values[i]), "%s: tensor %s, element %zu is %f, wanted a finite number", view->path,
              view->name, first + i, (double)values[i]);
    }
}

static void hf_read_part_(const SafeTensorsView* view, size_t start, size_t count, float* to) {
    safetensors_read_f32_part(view, start, count, to);
    hf_check_finite_(view, to, start, count);
}

// Sets rows [r0, r1) of a layer (rows, cols) whose transpose the file has.
static void hf_read_turned_(const SafeTensorsView* view, const TensorRow* row, float* layer, size_t r0,
                            size_t r1, float* chunk) {
    const size_t columns = hf_chunk_columns_(row->rows), count = r1 - r0;
    for (size_t at = 0; at < row->cols; at += columns) {
        const size_t n = row->cols - at < columns ? row->cols - at : columns;
        if (count == row->rows) {
            hf_read_part_(view, at * count, n * count, chunk);
        }
        for (size_t j = 0; j < n && count < row->rows; j++) {
            hf_read_part_(view, (at + j) * row->rows + r0, count, chunk + j * count);
        }
        for (size_t r = 0; r < count; r++) {
            for (size_t j = 0; j < n; j++) {
                layer[(r0 + r) * row->cols + at + j] = chunk[j * count + r];
            }
        }
    }
}

// Sets the matrix of expert e in a layer, from a stack in a file.
static void hf_read_stacked_(const SafeTensorsView* view, HfTurned_ of, int e, float* layer, float* chunk) {
    const size_t rows = of.rows.count, cols = of.rows.width, columns = hf_chunk_columns_(rows);
    float* matrix = layer + of.rows.first * cols;
    for (size_t at = 0; at < cols; at += columns) {
        const size_t n = cols - at < columns ? cols - at : columns;
        hf_read_part_(view, ((size_t)e * cols + at) * rows, n * rows, chunk);
        for (size_t r = 0; r < rows; r++) {
            const size_t from = file_turns_line(rows, of.turns, r);
            for (size_t j = 0; j < n; j++) {
                matrix[r * cols + at + j] = chunk[j * rows + from];
            }
        }
    }
}

// Sets it from blocks in MXFP4.
static void hf_read_blocks_(const SafeTensorsView* blocks, const SafeTensorsView* scales, HfTurned_ of, int e,
                            float* layer) {
    const size_t rows = of.rows.count, cols = of.rows.width, count = cols / MXFP4_BLOCK;
    for (size_t r = 0; r < rows; r++) {
        const size_t from = (size_t)e * rows + file_turns_line(rows, of.turns, r);
        float* row = layer + (of.rows.first + r) * cols;
        mxfp4_decode(row, blocks->data + from * count * MXFP4_BLOCK_BYTES, scales->data + from * count,
                     count);
        hf_check_finite_(scales, row, from * cols, cols);
    }
}

// Elements [first, end) of a layer.
typedef struct {
    size_t first, end;
} HfRange_;

// Returns what two ranges have in common; first >= end: nothing.
static HfRange_ hf_common_(HfRange_ a, HfRange_ b) {
    return (HfRange_){a.first > b.first ? a.first : b.first, a.end < b.end ? a.end : b.end};
}

// Sets a line in memory from line i of a file, of which lines in memory may have the columns in
// another order.
static void hf_read_line_(const SafeTensorsView* view, const HfTensor_* t, ModelConfig cfg, size_t i,
                          float* line) {
    const size_t width = hf_lines_(t, cfg).width, from = file_half_line(t->tensor, cfg, i) * width,
                 n = t->tensor->form == FILE_VALUE_COLS ? (size_t)cfg.mixer.value_size : width;
    for (size_t col = 0; col < width; col += n) {
        hf_read_part_(view, from + col, n, line + (n < width ? file_value_line(cfg, width, col) : col));
    }
}

// Sets elements of a layer from lines in the order of a file, one by one; whole lines that have any
// of them.
static void hf_read_heads_(const SafeTensorsView* view, const HfTensor_* t, ModelConfig cfg, float* layer,
                           HfRange_ range) {
    const FileLines lines = hf_lines_(t, cfg);
    for (size_t i = 0; i < lines.count; i++) {
        const size_t at = hf_memory_line_(t, cfg, i) * lines.width;
        if (at < range.end && range.first < at + lines.width) {
            hf_read_line_(view, t, cfg, i, layer + at);
        }
    }
}

// Sets them from a part of the rows of each head, or from their transpose.
static void hf_read_by_head_(const SafeTensorsView* view, const HfTensor_* t, ModelConfig cfg, float* layer,
                             HfRange_ range, float* chunk) {
    const FileLines lines = hf_lines_(t, cfg);
    if (t->tensor->form == FILE_HEAD_VALUES) {
        hf_read_heads_(view, t, cfg, layer, range);
        return;
    }
    for (size_t i = 0; i < lines.count; i++) {
        hf_read_part_(view, i * lines.width, lines.width, chunk);
        for (size_t j = 0; j < lines.width; j++) {
            const size_t at = file_key_element(cfg, i, j);
            if (range.first <= at && at < range.end) {
                layer[at] = chunk[j];
            }
        }
    }
}

// Sets elements of a layer (rows, cols) from a tensor of the file, as far as it has them; for a
// matrix, it may set whole rows.
static void hf_read_layer_(const SafeTensorsView* view, const HfTensor_* t, ModelConfig cfg, float* layer,
                           HfRange_ range, float* chunk) {
    const TensorRow* row = t->row;
    const FileLines lines = hf_lines_(t, cfg);
    const size_t begin = lines.first * lines.width;
    if (file_tensor_is_by_head(t->tensor)) {
        hf_read_by_head_(view, t, cfg, layer, range, chunk);
        return;
    }
    range = hf_common_(range, (HfRange_){begin, begin + lines.count * lines.width});
    if (range.first >= range.end) {
        return;
    }
    if (hf_is_turned_(t)) {
        hf_read_turned_(view, row, layer, range.first / row->cols, (range.end + row->cols - 1) / row->cols,
                        chunk);
    } else if (hf_has_lines_(t)) {
        hf_read_heads_(view, t, cfg, layer, range);
    } else {
        hf_read_part_(view, range.first - begin, range.end - range.first, layer + range.first);
    }
    for (size_t i = range.first; i < range.end && t->format == HF_GGUF && row->init == INIT_ONE; i++) {
        layer[i] -= model_norm_offset(cfg); // GGUF has the sum
    }
    for (size_t i = range.first; i < range.end && hf_has_lines_(t) && t->tensor->form == FILE_DECAY; i++) {
        CHECK(layer[i] < 0, "%s: tensor %s has %g, wanted negative numbers", view->path, view->name,
              (double)layer[i]);
        layer[i] = (float)log(-(double)layer[i]);
    }
}

// Refuses separate classifier weights in a model whose classifier is the token embedding, unless
// they are a copy of it.
static void hf_check_classifier_(const SafeTensorsSet* set, const SafeTensorsView* embedding) {
    const SafeTensorsView* head = safetensors_set_find(set, HF_CLASSIFIER);
    CHECK(!head || (head->dtype == embedding->dtype && head->bytes == embedding->bytes &&
                    memcmp(head->data, embedding->data, head->bytes) == 0),
          "%s: tensor " HF_CLASSIFIER " is not the token embedding, wanted a model with tied embeddings",
          set->path);
}

// Returns the name that the files have for a tensor: with or without the model's prefix, perhaps
// inside a model that also sees pictures. If only the classifier was saved, it stands for the token
// embedding: they are tied.
static FileTensorName hf_name_in_files_(const HfModel* model, const char* name, const TensorRow* row) {
    const char* bare = file_tensor_bare_name(name);
    const int is_tied = row->init == INIT_VOCAB && !model->cfg.has_head;
    const char* const names[][2] = {{"", name},
                                    {"", bare},
                                    {"language_model.", name},
                                    {"model.language_model.", bare},
                                    {"", is_tied ? HF_CLASSIFIER : name},
                                    {"", name}};
    enum { LAST = sizeof(names) / sizeof(names[0]) - 1 };
    FileTensorName found;
    int i = 0;
    do {
        snprintf(found.text, sizeof(found.text), "%s%s", names[i][0], names[i][1]);
    } while (i++ < LAST && !safetensors_set_find(&model->set, found.text));
    return found;
}

// Returns the tensor that has all experts of a layer, as transformers 5 has them in memory; NULL:
// the files have one for each.
static const SafeTensorsView* hf_find_fused_(const HfModel* model, const HfTensor_* t) {
    const char* pattern = t->tensor->rows == ROWS_ALL ? "model.layers.%d.mlp.experts.down_proj"
                                                      : "model.layers.%d.mlp.experts.gate_up_proj";
    const FileTensorName fused = file_tensor_name(pattern, t->l, 0);
    const FileTensorName name = hf_name_in_files_(model, fused.text, t->row);
    if (!file_tensor_is_of_expert(t->tensor) || !safetensors_set_find(&model->set, name.text)) {
        return NULL;
    }
    const size_t experts = (size_t)t->row->experts, shape[] = {experts, t->row->rows / experts, t->row->cols};
    return safetensors_set_require(&model->set, name.text, 3, shape);
}

// Returns the blocks, or the scales, that the files have for a stack in the place of its elements.
static const SafeTensorsView* hf_find_mxfp4_(const HfModel* model, const HfTensor_* t, const char* part) {
    const FileLines lines = hf_lines_(t, model->cfg);
    const size_t shape[] = {(size_t)t->row->experts, lines.count, lines.width / MXFP4_BLOCK,
                            MXFP4_BLOCK_BYTES};
    FileTensorName name = hf_name_(t);
    snprintf(name.text + strlen(name.text), sizeof(name.text) - strlen(name.text), "_%s", part);
    name = hf_name_in_files_(model, name.text, t->row);
    const SafeTensorsView* view =
        safetensors_set_require(&model->set, name.text, strcmp(part, "blocks") == 0 ? 4 : 3, shape);
    CHECK(view->dtype == SAFETENSORS_U8 && lines.width % MXFP4_BLOCK == 0,
          "%s: tensor %s has %s for rows of %zu, wanted U8 and multiples of %d", view->path, view->name,
          safetensors_dtype_name(view->dtype), lines.width, (int)MXFP4_BLOCK);
    return view;
}

static int hf_is_mxfp4_(const HfModel* model, const HfTensor_* t) {
    FileTensorName name = hf_name_(t);
    snprintf(name.text + strlen(name.text), sizeof(name.text) - strlen(name.text), "_blocks");
    name = hf_name_in_files_(model, name.text, t->row);
    return t->tensor->form == FILE_STACK && safetensors_set_find(&model->set, name.text);
}

// Returns the name of a tensor in transformers 5, where experts are part of the MLP.
static FileTensorName hf_newer_name_(FileTensorName name) {
    static const char old[] = "block_sparse_moe";
    const char* at = strstr(name.text, old);
    FileTensorName newer = name;
    if (at) {
        snprintf(newer.text, sizeof(newer.text), "%.*smlp%s", (int)(at - name.text), name.text,
                 at + strlen(old));
    }
    return newer;
}

// Returns the tensor of the files that has t.
static const SafeTensorsView* hf_find_whole_(const HfModel* model, const HfTensor_* t) {
    if (hf_is_mxfp4_(model, t)) {
        return hf_find_mxfp4_(model, t, "blocks");
    }
    const HfShape_ shape = hf_shape_(t, model->cfg);
    if (t->format == HF_GGUF) {
        return safetensors_set_require(&model->set, hf_name_(t).text, shape.ndim, shape.sizes);
    }
    const SafeTensorsView* fused = hf_find_fused_(model, t);
    const FileTensorName name = hf_name_(t), newer = hf_newer_name_(name);
    const FileTensorName first = hf_name_in_files_(model, name.text, t->row),
                         second = hf_name_in_files_(model, newer.text, t->row);
    const int is_newer =
        !safetensors_set_find(&model->set, first.text) && safetensors_set_find(&model->set, second.text);
    return fused ? fused
                 : safetensors_set_require(&model->set, is_newer ? second.text : first.text, shape.ndim,
                                           shape.sizes);
}

// Returns t in the files: a tensor, or its part of one with all experts. They lie there as in
// memory; GGUF has one such tensor for each part of an MLP.
static SafeTensorsView hf_find_(const HfModel* model, const HfTensor_* t) {
    SafeTensorsView view = *hf_find_whole_(model, t);
    if (view.ndim == 3 - file_is_vector(t->row) && file_tensor_is_of_expert(t->tensor)) {
        const FileLines lines = hf_lines_(t, model->cfg);
        const size_t first = t->format == HF_GGUF ? (size_t)t->expert * lines.count : lines.first;
        view.data += safetensors_bytes(view.dtype, first * lines.width);
        view.elements = lines.count * lines.width;
        view.bytes = safetensors_bytes(view.dtype, view.elements);
    }
    return view;
}

// True for the names of files of weights, and of their index.
static int hf_is_weights_(const struct dirent* entry) {
    return file_ends_in(entry->d_name, ".safetensors") ||
           file_ends_in(entry->d_name, ".safetensors.index.json");
}

static int hf_entry_by_name_(const struct dirent** a, const struct dirent** b) {
    return strcmp((*a)->d_name, (*b)->d_name); // in any locale
}

void hf_model_list_files(FileList* files, const char* option, const char* path) {
    struct dirent** entries;
    if (!file_is_directory(path)) {
        file_list_add(files, option, path);
        return;
    }
    file_list_add_in(files, option, path, "config.json");
    bpe_list_files(files, option, path);
    const int count = scandir(path, &entries, hf_is_weights_, hf_entry_by_name_);
    CHECK(count >= 0, "%s: cannot read: %s", path, strerror(errno));
    for (int i = 0; i < count; i++) {
        file_list_add_in(files, option, path, entries[i]->d_name);
        free(entries[i]);
    }
    free(entries);
}

int hf_model_has(const char* directory, HfWeights which) {
    char path[PATH_MAX], name[64];
    hf_model_file_name(name, which, 0, 1);
    file_join(path, directory, name);
    if (file_exists(path)) {
        return 1;
    }
    snprintf(name, sizeof(name), "%s.safetensors.index.json", hf_model_stem(which));
    file_join(path, directory, name);
    return file_exists(path);
}

void hf_model_open(HfModel* model, const char* path, HfWeights which, ModelConfig cfg, Arch arch) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    size_t num_used = 0;
    model->cfg = cfg;
    model->arch = arch;
    model->format = gguf_is_file(path) ? HF_GGUF : HF_SAFETENSORS;
    model_parameter_rows_of(rows, cfg, sizeof(float));
    const SafeTensorsView** used = (const SafeTensorsView**)check_alloc(
        2 * hf_count_(rows, arch, model->format), sizeof(*used), "tensors of a model");
    model->chunk = (float*)hf_chunk_open_(rows);
    if (model->format == HF_GGUF) {
        gguf_tensors_open(&model->set, path);
    } else {
        safetensors_set_open(&model->set, path, hf_model_stem(which));
    }
    for (HfTensor_ t = hf_before_first_(model->format); hf_next_(&t, rows, arch);) {
        used[num_used++] = hf_find_whole_(model, &t);
        if (hf_is_mxfp4_(model, &t)) {
            used[num_used++] = hf_find_mxfp4_(model, &t, "scales");
        }
        if (t.row->init == INIT_VOCAB && !cfg.has_head) {
            hf_check_classifier_(&model->set, used[num_used - 1]);
        }
    }
    hf_check_others(&model->set, cfg, used, num_used);
    free(used);
}

static void hf_check_same_(const SafeTensorsView* view, const SafeTensorsView* lowest) {
    CHECK(view->dtype == lowest->dtype && view->bytes == lowest->bytes &&
              memcmp(view->data, lowest->data, lowest->bytes) == 0,
          "%s: tensor %s differs from %s, wanted equal ones, as --share-layers says", view->path, view->name,
          lowest->name);
    safetensors_release(view, 0, view->elements);
}

// Checks that the other layers of group g have the same bits as the lowest one.
static void hf_check_equal_(const HfModel* model, HfTensor_ t, int g, const SafeTensorsView* lowest) {
    const SafeTensorsView* scales = hf_is_mxfp4_(model, &t) ? hf_find_mxfp4_(model, &t, "scales") : NULL;
    for (t.n++; t.n < t.row->uses; t.n++) {
        t.l = tensor_layer(t.row, t.n);
        if (tensor_group(t.row, t.l) == g) {
            const SafeTensorsView view = hf_find_(model, &t);
            hf_check_same_(&view, lowest);
            if (scales) {
                hf_check_same_(hf_find_mxfp4_(model, &t, "scales"), scales);
            }
        }
    }
}

// Sets elements of a layer from a stack of the files: all of each expert that has any of them.
static void hf_read_stack_(const HfModel* model, const SafeTensorsView* view, const HfTensor_* t,
                           float* layer, HfRange_ range) {
    const SafeTensorsView* scales = hf_is_mxfp4_(model, t) ? hf_find_mxfp4_(model, t, "scales") : NULL;
    for (int e = 0; e < t->row->experts; e++) {
        const HfTurned_ of = hf_turned_(t, model->cfg, e);
        const size_t first = of.rows.first * of.rows.width, end = first + of.rows.count * of.rows.width;
        if (first >= range.end || end <= range.first) {
            continue;
        }
        if (scales) {
            hf_read_blocks_(view, scales, of, e, layer);
        } else {
            hf_read_stacked_(view, of, e, layer, model->chunk);
        }
    }
}

// Sets elements of group g from a tensor of the files: the one of the group's lowest layer.
static void hf_read_tensor_(const HfModel* model, const HfTensor_* t, int g, HfRange_ range, float* group) {
    float* layer = (float*)tensor_in_group(t->row, group);
    const size_t at = (size_t)(layer - group);
    range = hf_common_(range, (HfRange_){at, at + tensor_layer_elements(t->row)});
    if (range.first < range.end) {
        const SafeTensorsView view = hf_find_(model, t);
        hf_check_equal_(model, *t, g, &view);
        const HfRange_ of_layer = {range.first - at, range.end - at};
        if (t->tensor->form == FILE_STACK) {
            hf_read_stack_(model, &view, t, layer, of_layer);
        } else {
            hf_read_layer_(&view, t, model->cfg, layer, of_layer, model->chunk);
        }
        safetensors_release(&view, 0, view.elements);
    }
}

// Zeroes the rows of the vocabulary without a token.
static void hf_clear_padding_(const TensorRow* row, ModelConfig cfg, void* group) {
    const size_t used = model_rows_in_files(row, cfg);
    memset((float*)tensor_in_group(row, group) + used * row->cols, 0,
           (row->rows - used) * row->cols * sizeof(float));
}

void hf_model_read(HfModel* model, const TensorRow* rows, int g, size_t first, size_t end, void* group) {
    for (HfTensor_ t = hf_before_first_(model->format); hf_next_(&t, rows, model->arch);) {
        assert(t.row->element_bytes == sizeof(float));
        if (tensor_is_in_group(t.row, g) && t.l == model_group_layer(model->cfg, g)) {
            hf_read_tensor_(model, &t, g, (HfRange_){first, end}, (float*)group);
            hf_clear_padding_(t.row, model->cfg, group);
        }
    }
}

void hf_model_close(HfModel* model) {
    safetensors_set_close(&model->set);
    free(model->chunk);
}

#endif // HF_MODEL_IMPLEMENTATION

#endif
