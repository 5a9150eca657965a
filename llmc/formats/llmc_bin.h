/*
llmc_bin.h -- llm.c's model .bin: a header of 256 int32, then every parameter in the order of the
table in model.h.

    header [0] 20240326   [1] 3: fp32, 5: bf16   [2] max_T   [3] V   [4] L   [5] NH   [6] C   [7] Vp
           rest 0

Little endian. Parameters are fp32 in memory here; reading widens bf16 files, writing rounds to
nearest, ties to even. The padding rows of the vocabulary, which no token uses, become zero, as in a
model made here. The header is not trusted: sizes are checked against each other and against the
file's length before anything is allocated, and a weight that is not finite is an error that names
its tensor.
*/
#ifndef LLMC_LLMC_BIN_H
#define LLMC_LLMC_BIN_H

#include <stdio.h>

#include "llmc/base/file.h"
#include "llmc/base/enum_words.h"
#include "llmc/model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

// --export-dtype
#define MODEL_DTYPE_WORDS(X) X(MODEL_FP32, "fp32") X(MODEL_BF16, "bf16")
typedef enum { MODEL_DTYPE_WORDS(WORDS_VALUE) } ModelDtype;

// Returns 1 if llm.c has such a model; if not, 0 and the reason in `error`.
int llmc_bin_check(ModelConfig cfg, char* error);

// Reads the sizes of the model in a file, and checks them against its length.
ModelConfig llmc_bin_read_config(const char* path);

// File read a group of parameters at a time.
typedef struct {
    const char* path; // the caller's
    FILE* file;
    ModelConfig cfg;
    ModelDtype dtype;
} LlmcBin;

void llmc_bin_open(LlmcBin* bin, const char* path);

// Sets the tensors of group g (model.h), in memory that has only this group, laid out by `rows` for
// the file's own configuration. The file has every layer; layers that share a tensor in memory must
// have equal ones in the file.
void llmc_bin_read(LlmcBin* bin, const TensorRow* rows, int g, void* group);

void llmc_bin_close(LlmcBin* bin);

// File written a group of parameters at a time, in any order; complete or absent.
typedef struct {
    FileWriter file;
    ModelDtype dtype;
} LlmcBinWriter;

void llmc_bin_create(LlmcBinWriter* writer, const char* path, ModelConfig cfg, ModelDtype dtype);

// Writes the tensors of group g, as in llmc_bin_read.
void llmc_bin_put(LlmcBinWriter* writer, const TensorRow* rows, int g, const void* group);

// Completes the file; call it after all groups.
void llmc_bin_commit(LlmcBinWriter* writer);

#ifdef __cplusplus
}
#endif

#ifdef LLMC_BIN_IMPLEMENTATION

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "llmc/base/check.h"
#include "llmc/base/float16.h"

#define LLMC_BIN_MAGIC_ 20240326
#define LLMC_BIN_HEADER_ 256   // int32 of the header
#define LLMC_BIN_CHUNK_ 65536u // elements converted at a time

int llmc_bin_check(ModelConfig cfg, char* error) {
    if (cfg.attention_scale > 0 || cfg.attention_softcap > 0) {
        return error_set(error, "--export-llmc", "llm.c divides scores by sqrt(%d), without a cap",
                         model_head_size(cfg));
    }
    return cfg.arch == ARCH_GPT2 ||
           error_set(error, "--export-llmc",
                     "llm.c has no %s, only gpt2; --export-gguf FILE and --out DIR work",
                     model_architecture(cfg.arch)->word);
}

static int llmc_bin_version_(ModelDtype dtype) { return dtype == MODEL_BF16 ? 5 : 3; }
static size_t llmc_bin_element_bytes_(ModelDtype dtype) { return dtype == MODEL_BF16 ? 2 : 4; }

// Returns the bytes of a file of this model.
static double llmc_bin_bytes_(ModelConfig cfg, ModelDtype dtype) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows(rows, cfg);
    double elements = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        elements += (double)rows[i].uses * (double)tensor_layer_elements(&rows[i]);
    }
    return 4.0 * LLMC_BIN_HEADER_ + elements * (double)llmc_bin_element_bytes_(dtype);
}

static ModelConfig llmc_bin_config_(const int32_t* header) {
    const ModelConfig cfg = {
        .max_T = header[2], .V = header[3], .Vp = header[7], .L = header[4], .NH = header[5], .C = header[6]};
    return cfg;
}

static void llmc_bin_check_header_(const char* path, const int32_t* header, double file_bytes) {
    CHECK(header[0] == LLMC_BIN_MAGIC_, "%s: magic number %d, wanted %d for a model", path, header[0],
          LLMC_BIN_MAGIC_);
    CHECK(header[1] == 3 || header[1] == 5, "%s: version %d, wanted 3 (fp32) or 5 (bf16)", path, header[1]);
    const ModelConfig cfg = llmc_bin_config_(header);
    char error[ERROR_BYTES];
    CHECK(model_check_config(cfg, path, error), "%s", error);
    const double wanted = llmc_bin_bytes_(cfg, header[1] == 5 ? MODEL_BF16 : MODEL_FP32);
    CHECK(file_bytes == wanted, "%s: %.0f bytes, wanted %.0f for its %d layers of %d channels", path,
          file_bytes, wanted, header[4], header[6]);
}

static FILE* llmc_bin_open_(const char* path, int32_t header[LLMC_BIN_HEADER_]) {
    struct stat info;
    char error[ERROR_BYTES];
    const int fd = file_open_regular(path, error);
    CHECK(fd >= 0, "%s", error);
    FILE* file = fdopen(fd, "rb");
    CHECK(file && fstat(fd, &info) == 0, "%s: cannot read: %s", path, strerror(errno));
    CHECK(fread(header, sizeof(int32_t), LLMC_BIN_HEADER_, file) == LLMC_BIN_HEADER_,
          "%s: %.0f bytes, wanted at least a header of %d", path, (double)info.st_size, 4 * LLMC_BIN_HEADER_);
    llmc_bin_check_header_(path, header, (double)info.st_size);
    return file;
}

ModelConfig llmc_bin_read_config(const char* path) {
    int32_t header[LLMC_BIN_HEADER_];
    fclose(llmc_bin_open_(path, header));
    return llmc_bin_config_(header);
}

// Reads `count` elements of layer l of a tensor.
static void llmc_bin_read_layer_(const LlmcBin* bin, const TensorRow* row, int l, float* tensor,
                                 size_t count) {
    const size_t element_bytes = llmc_bin_element_bytes_(bin->dtype);
    uint16_t chunk[LLMC_BIN_CHUNK_];
    for (size_t at = 0; at < count; at += LLMC_BIN_CHUNK_) {
        const size_t n = count - at < LLMC_BIN_CHUNK_ ? count - at : LLMC_BIN_CHUNK_;
        void* to = bin->dtype == MODEL_BF16 ? (void*)chunk : (void*)(tensor + at);
        CHECK(fread(to, element_bytes, n, bin->file) == n, "%s: cannot read tensor %s", bin->path, row->name);
        for (size_t i = 0; i < n; i++) {
            if (bin->dtype == MODEL_BF16) {
                tensor[at + i] = bf16_to_float(chunk[i]);
            }
            CHECK(isfinite(tensor[at + i]),
                  "%s: tensor %s, layer %d, row %zu, column %zu is %f, wanted a finite number", bin->path,
                  row->name, l, (at + i) / row->cols, (at + i) % row->cols, (double)tensor[at + i]);
        }
    }
}

// Zeroes the rows of the vocabulary without a token.
static void llmc_bin_clear_padding_(const TensorRow* row, ModelConfig cfg, float* tensor) {
    const size_t used = model_rows_in_files(row, cfg);
    memset(tensor + used * row->cols, 0, (row->rows - used) * row->cols * sizeof(float));
}

void llmc_bin_open(LlmcBin* bin, const char* path) {
    int32_t header[LLMC_BIN_HEADER_];
    bin->path = path;
    bin->file = llmc_bin_open_(path, header);
    bin->cfg = llmc_bin_config_(header);
    bin->dtype = header[1] == 5 ? MODEL_BF16 : MODEL_FP32;
}

// Returns the offset of layer l of parameter i.
static size_t llmc_bin_at_(const TensorRow* rows, int i, int l, ModelDtype dtype) {
    size_t elements = (size_t)l * tensor_layer_elements(&rows[i]);
    while (i-- > 0) {
        elements += (size_t)rows[i].uses * tensor_layer_elements(&rows[i]);
    }
    return 4 * LLMC_BIN_HEADER_ + elements * llmc_bin_element_bytes_(dtype);
}

// Reads layer l of parameter i. The vocabulary may have another padding in memory.
static void llmc_bin_read_tensor_(const LlmcBin* bin, const TensorRow* rows, int i, int l, float* tensor) {
    TensorRow of_file[MODEL_PARAMETER_ROWS];
    model_parameter_rows_of(of_file, bin->cfg, sizeof(float));
    const size_t at = llmc_bin_at_(of_file, i, l, bin->dtype), room = tensor_layer_elements(&rows[i]),
                 count = tensor_layer_elements(&of_file[i]);
    CHECK(fseeko(bin->file, (off_t)at, SEEK_SET) == 0, "%s: cannot read tensor %s: %s", bin->path,
          rows[i].name, strerror(errno));
    llmc_bin_read_layer_(bin, &rows[i], l, tensor, count < room ? count : room);
    llmc_bin_clear_padding_(&rows[i], bin->cfg, tensor);
}

// Checks that layer l has the same values as the lowest layer of its group, `tensor`.
static void llmc_bin_check_equal_(const LlmcBin* bin, const TensorRow* rows, int i, int l,
                                  const float* tensor) {
    const size_t count = tensor_layer_elements(&rows[i]);
    float* other = (float*)check_alloc(count, sizeof(float), "a layer to compare");
    llmc_bin_read_tensor_(bin, rows, i, l, other);
    CHECK(memcmp(other, tensor, count * sizeof(float)) == 0,
          "%s: tensor %s, layer %d differs from layer %d, wanted equal ones, as --share-layers says",
          bin->path, rows[i].name, l, tensor_lowest_layer(&rows[i], tensor_copy(&rows[i], l)));
    free(other);
}

void llmc_bin_read(LlmcBin* bin, const TensorRow* rows, int g, void* group) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (!tensor_is_in_group(&rows[i], g)) {
            continue;
        }
        float* tensor = (float*)tensor_in_group(&rows[i], group);
        const int lowest = tensor_lowest_layer(&rows[i], tensor_first_copy_in_group(&rows[i], g));
        llmc_bin_read_tensor_(bin, rows, i, lowest, tensor);
        for (int l = lowest + 1; l < rows[i].uses; l++) {
            if (tensor_group(&rows[i], l) == g) {
                llmc_bin_check_equal_(bin, rows, i, l, tensor);
            }
        }
    }
}

void llmc_bin_close(LlmcBin* bin) { fclose(bin->file); }

static void llmc_bin_put_layer_(LlmcBinWriter* writer, const TensorRow* row, const float* tensor,
                                size_t count) {
    const ModelDtype dtype = writer->dtype;
    const size_t bad = dtype == MODEL_BF16 ? float16_find_beyond(tensor, count, BF16_OVERFLOW) : count;
    if (bad < count) {
        file_discard(&writer->file);
        CHECK(0, "%s: tensor %s, element %zu is %g, wanted less than %g; --export-dtype fp32 works",
              writer->file.path, row->name, bad, (double)tensor[bad], (double)BF16_OVERFLOW);
    }
    uint16_t chunk[LLMC_BIN_CHUNK_];
    for (size_t at = 0; at < count; at += LLMC_BIN_CHUNK_) {
        const size_t n = count - at < LLMC_BIN_CHUNK_ ? count - at : LLMC_BIN_CHUNK_;
        for (size_t i = 0; dtype == MODEL_BF16 && i < n; i++) {
            chunk[i] = bf16_from_float(tensor[at + i]);
        }
        file_put(&writer->file, dtype == MODEL_BF16 ? (const void*)chunk : (const void*)(tensor + at),
                 n * llmc_bin_element_bytes_(dtype));
    }
}

void llmc_bin_create(LlmcBinWriter* writer, const char* path, ModelConfig cfg, ModelDtype dtype) {
    const int32_t sizes[8] = {
        LLMC_BIN_MAGIC_, llmc_bin_version_(dtype), cfg.max_T, cfg.V, cfg.L, cfg.NH, cfg.C, cfg.Vp};
    int32_t header[LLMC_BIN_HEADER_] = {0};
    char error[ERROR_BYTES];
    CHECK(llmc_bin_check(cfg, error), "%s", error);
    memcpy(header, sizes, sizeof(sizes));
    writer->dtype = dtype;
    file_open(&writer->file, path);
    file_put(&writer->file, header, sizeof(header));
}

void llmc_bin_put(LlmcBinWriter* writer, const TensorRow* rows, int g, const void* group) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int l = 0; l < rows[i].uses; l++) {
            if (tensor_group(&rows[i], l) == g) {
                file_seek(&writer->file, llmc_bin_at_(rows, i, l, writer->dtype));
                llmc_bin_put_layer_(writer, &rows[i], (const float*)tensor_in_group(&rows[i], group),
                                    tensor_layer_elements(&rows[i]));
            }
        }
    }
}

void llmc_bin_commit(LlmcBinWriter* writer) { file_commit(&writer->file); }

#endif // LLMC_BIN_IMPLEMENTATION

#endif
