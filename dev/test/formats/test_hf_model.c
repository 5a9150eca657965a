// test_hf_model.c -- hf_model.h: a model in a Hugging Face directory reads back with the same bits,
// also from several files, 16-bit weights and other names. Files have GPT-2's layout; other models
// are refused.
#include <sys/stat.h>

#include "llmc/base/float16.h"
#include "llmc/formats/hf_config.h"
#include "llmc/formats/hf_config_write.h"
#include "llmc/formats/hf_model.h"
#include "dev/test/lib/test.h"
#include "dev/test/lib/whole_model.h"
#include "dev/test/lib/test_element.h"

static const ModelConfig CFG = {.max_T = 6, .V = 5, .Vp = 128, .L = 2, .NH = 2, .C = 4};
static const ModelConfig LARGE = {
    .max_T = 3, .V = 200, .Vp = 256, .L = 1, .NH = 1, .C = 300}; // several pieces

typedef struct {
    ModelConfig cfg;
    TensorRow rows[MODEL_PARAMETER_ROWS];
    size_t bytes;
    void* memory;
} TestModel;

static TestModel test_model_open(ModelConfig cfg, size_t element_bytes) {
    TestModel model;
    model.cfg = cfg;
    model.bytes = model_parameter_rows_of(model.rows, cfg, element_bytes);
    model.memory = check_alloc(model.bytes, 1, "model");
    return model;
}

// Numbers that all differ, in the given type; the vocabulary's padding is zero.
static TestModel test_model_random(ModelConfig cfg, SafeTensorsDtype dtype) {
    const TestModel model = test_model_open(cfg, safetensors_dtype_bytes(dtype));
    uint64_t index = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &model.rows[i];
        for (size_t k = 0; k < row->layers * model_rows_in_files(row, cfg) * row->cols; k++) {
            const float x = rand_normal(1, 2, index++);
            const uint16_t narrow = dtype == SAFETENSORS_BF16 ? bf16_from_float(x) : fp16_from_float(x);
            memcpy(test_element(row, model.memory, k),
                   dtype == SAFETENSORS_F32 ? (const void*)&x : (const void*)&narrow, row->element_bytes);
        }
    }
    return model;
}

static const char* directory_of(const char* name) {
    const char* path = test_path(name);
    mkdir(path, 0777);
    return path;
}

static void write_model(const TestModel* model, const char* directory, SafeTensorsDtype dtype) {
    uint64_t checksum = 0;
    char file[PATH_MAX], error[ERROR_BYTES];
    hf_config_write(directory, model->cfg, dtype, model_card_of(model->cfg.V - 1), NULL);
    const uint64_t said = whole_model_write(directory, model->cfg, model->rows, model->memory, dtype);
    snprintf(file, sizeof(file), "%s/model.safetensors", directory);
    EXPECT(file_checksum(file, &checksum, error) && checksum == said, "the checksum of %s", file);
    struct stat info;
    EXPECT(stat(file, &info) == 0 && (double)info.st_size <= hf_model_bytes(model->cfg, dtype), "its size");
}

// The model in a directory, which must have the sizes of `cfg`.
static TestModel read_model(const char* directory, ModelConfig cfg) {
    const ModelConfig found = hf_config_read(directory);
    EXPECT(memcmp(&found, &cfg, sizeof(cfg)) == 0, "%d %d %d %d %d %d", found.max_T, found.V, found.Vp,
           found.L, found.NH, found.C);
    TestModel model = test_model_open(cfg, sizeof(float));
    memset(model.memory, 0x55, model.bytes);
    whole_model_read(directory, cfg, model.rows, model.memory);
    return model;
}

// Every element of `got`, fp32, equals the one of `want`, which has the given type.
static void expect_model(const TestModel* got, const TestModel* want, SafeTensorsDtype dtype,
                         const char* what) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorRow* row = &want->rows[i];
        size_t wrong = 0;
        for (size_t k = 0; k < tensor_elements(row); k++) {
            const void* from = test_element(row, want->memory, k);
            const float x = *(const float*)test_element(&got->rows[i], got->memory, k);
            float y = 0;
            uint16_t narrow;
            memcpy(&y, from, dtype == SAFETENSORS_F32 ? 4 : 0);
            memcpy(&narrow, from, 2);
            y = dtype == SAFETENSORS_BF16  ? bf16_to_float(narrow)
                : dtype == SAFETENSORS_F16 ? fp16_to_float(narrow)
                                           : y;
            wrong += float_bits(x) != float_bits(y);
        }
        EXPECT(wrong == 0, "%s: %zu elements of %s", what, wrong, row->name);
    }
}

// Reads a model in parts: each of several ranks reads and gets its part of every group.
static TestModel read_parts(const char* directory, ModelConfig cfg, size_t parts) {
    const TestModel model = test_model_open(cfg, sizeof(float));
    float* group = (float*)check_alloc(model.bytes, 1, "a group");
    FirstWeights weights;
    weights_open(&weights, cfg, directory, HF_LAST, 0, (Mup){0, 0});
    for (int g = 0; g < model_groups(cfg); g++) {
        const size_t at = tensor_group_offset_bytes(model.rows, g) / sizeof(float);
        const size_t next =
            g + 1 < model_groups(cfg) ? tensor_group_offset_bytes(model.rows, g + 1) : model.bytes;
        const size_t elements = next / sizeof(float) - at;
        for (size_t p = 0; p < parts; p++) {
            const size_t first = elements * p / parts, end = elements * (p + 1) / parts;
            memset(group, 0x55, elements * sizeof(float));
            weights_read_part(&weights, model.rows, g, first, end, group);
            memcpy((float*)model.memory + at + first, group + first, (end - first) * sizeof(float));
        }
    }
    weights_close(&weights);
    free(group);
    return model;
}

static void test_round_trip(ModelConfig cfg, SafeTensorsDtype dtype) {
    char name[64];
    snprintf(name, sizeof(name), "round_%d_%s", cfg.C, safetensors_dtype_name(dtype));
    const char* directory = directory_of(name);
    TestModel model = test_model_random(cfg, dtype);
    write_model(&model, directory, dtype);
    TestModel again = read_model(directory, cfg);
    expect_model(&again, &model, dtype, name);
    free(again.memory);
    for (size_t parts = 2; parts <= 7; parts += 5) {
        again = read_parts(directory, cfg, parts);
        expect_model(&again, &model, dtype, "in parts");
        free(again.memory);
    }
    free(model.memory);
}

// Files have the layout of GPT-2 in transformers: names, (in, out) matrices, no padding.
TEST(layout) {
    const char* directory = directory_of("layout");
    TestModel model = test_model_random(CFG, SAFETENSORS_F32);
    write_model(&model, directory, SAFETENSORS_F32);
    SafeTensorsSet set;
    safetensors_set_open(&set, directory, "model");
    EXPECT(set.files[0].num_tensors == 2 * 12 + 4, "%zu tensors", set.files[0].num_tensors);
    const SafeTensorsView* wte = safetensors_find(&set.files[0], "transformer.wte.weight");
    EXPECT(wte && wte->shape[0] == 5 && wte->shape[1] == 4 && memcmp(wte->data, model.memory, 80) == 0,
           "wte");
    const SafeTensorsView* qkv = safetensors_find(&set.files[0], "transformer.h.1.attn.c_attn.weight");
    EXPECT(qkv && qkv->shape[0] == 4 && qkv->shape[1] == 12, "c_attn");
    const TensorRow* row = row_called(model.rows, MODEL_PARAMETER_ROWS, "qkvw");
    const float* ours = (const float*)tensor_at_layer(row, model.memory, 1);
    for (size_t i = 0; qkv && i < 4 * 12; i++) {
        float x;
        memcpy(&x, qkv->data + 4 * i, 4);
        EXPECT(x == ours[i % 12 * 4 + i / 12], "c_attn, element %zu", i);
    }
    EXPECT(safetensors_find(&set.files[0], "transformer.ln_f.bias") != NULL, "ln_f.bias");
    EXPECT(strcmp(safetensors_metadata(&set.files[0], "format"), "pt") == 0, "metadata");
    safetensors_set_close(&set);
    free(model.memory);
}

// Copies the tensors of one file whose index is `part` modulo `parts` into another, under names
// without "transformer."; adds `extra`, a copy of wte or not, if it is not NULL.
static void copy_part(const SafeTensors* from, const char* path, int part, int parts, const char* extra) {
    SafeTensorsWriter writer;
    const SafeTensorsView* wte = safetensors_find(from, "transformer.wte.weight");
    safetensors_writer_open(&writer, path);
    for (size_t i = (size_t)part; i < from->num_tensors; i += (size_t)parts) {
        const SafeTensorsView* view = &from->tensors[i];
        safetensors_writer_declare(&writer, view->name + strlen("transformer."), view->dtype, view->ndim,
                                   view->shape);
    }
    if (extra) {
        safetensors_writer_declare(&writer, extra, wte->dtype, 2, wte->shape);
    }
    safetensors_writer_begin(&writer);
    for (size_t i = (size_t)part; i < from->num_tensors; i += (size_t)parts) {
        safetensors_write_raw(&writer, from->tensors[i].data, from->tensors[i].bytes);
    }
    if (extra) {
        safetensors_write_raw(&writer, wte->data, wte->bytes);
    }
    safetensors_writer_commit(&writer);
}

TEST(several_files) {
    const char *one = directory_of("one"), *two = directory_of("two");
    TestModel model = test_model_random(CFG, SAFETENSORS_F32);
    write_model(&model, one, SAFETENSORS_F32);
    hf_config_write(two, CFG, SAFETENSORS_F32, model_card_of(4), NULL);
    SafeTensors from;
    safetensors_open(&from, test_path("one/model.safetensors"));
    char index[8192] = "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {";
    for (size_t i = 0; i < from.num_tensors; i++) {
        snprintf(index + strlen(index), sizeof(index) - strlen(index), "%s\"%s\": \"%c.safetensors\"",
                 i ? ", " : "", from.tensors[i].name + strlen("transformer."), i % 2 ? 'b' : 'a');
    }
    strcat(index, "}}");
    test_write("two/model.safetensors.index.json", index, strlen(index));
    copy_part(&from, test_path("two/a.safetensors"), 0, 2, NULL);
    copy_part(&from, test_path("two/b.safetensors"), 1, 2, NULL);
    TestModel again = read_model(two, CFG);
    expect_model(&again, &model, SAFETENSORS_F32, "two files");
    free(again.memory);

    copy_part(&from, test_path("two/model.safetensors"), 0, 1,
              "lm_head.weight"); // as tied models may be saved
    again = read_model(two, CFG);
    expect_model(&again, &model, SAFETENSORS_F32, "without a prefix");
    free(again.memory);
    safetensors_close(&from);
    free(model.memory);
}

// ---- a model in files of groups ----

// Every cut is between groups; a file has as many as fit, but at least one.
TEST(cuts) {
    const double once = 2 * CFG.C + (CFG.V + CFG.max_T) * CFG.C, block = 12 * CFG.C * CFG.C + 13 * CFG.C;
    const struct {
        double max_bytes;
        int count, ends[3];
    } cases[] = {
        {1e9, 1, {3}},
        {4 * (once + 2 * block), 1, {3}},
        {4 * (once + 2 * block) - 1, 2, {2, 3}},
        {4 * (once + block), 2, {2, 3}},
        {4 * (once + block) - 1, 3, {1, 2, 3}},
        {0, 3, {1, 2, 3}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        HfModelFile files[3];
        const int count = hf_model_files(files, CFG, SAFETENSORS_F32, cases[i].max_bytes);
        EXPECT(count == cases[i].count, "%g bytes: %d files", cases[i].max_bytes, count);
        for (int f = 0; f < count; f++) {
            EXPECT(files[f].first == (f ? files[f - 1].end : 0) && files[f].end == cases[i].ends[f],
                   "%g bytes: file %d has groups %d to %d", cases[i].max_bytes, f, files[f].first,
                   files[f].end);
        }
    }
    HfModelFile files[3];
    EXPECT(hf_model_files(files, CFG, SAFETENSORS_BF16, 2 * (once + 2 * block)) == 1, "16 bits");
}

// Writes a model as three processes would: each has only its groups in memory, padded for them,
// with wte and qkvw last.
static void write_cut(const TestModel* model, const char* directory) {
    HfModelFile files[3];
    TensorRow rows[MODEL_PARAMETER_ROWS];
    char name[64];
    const size_t bytes = model_sharded_rows_of(rows, CFG, sizeof(float), 3, 1 << 0 | 1 << 4);
    const int count = hf_model_files(files, CFG, SAFETENSORS_F32, 0);
    char* padded = (char*)check_alloc(bytes, 1, "model");
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int l = 0; l < rows[i].layers; l++) {
            memcpy(tensor_at_layer(&rows[i], padded, l), tensor_at_layer(&model->rows[i], model->memory, l),
                   tensor_layer_elements(&rows[i]) * sizeof(float));
        }
    }
    for (int f = 0; f < count; f++) {
        const size_t begin = tensor_group_offset_bytes(rows, f),
                     end = f + 1 < count ? tensor_group_offset_bytes(rows, f + 1) : bytes;
        void* group = check_alloc(end - begin, 1, "group");
        memcpy(group, padded + begin, end - begin);
        hf_model_file_name(name, HF_LAST, f, count);
        hf_model_write(directory, name, files[f], CFG, rows, group, SAFETENSORS_F32);
        free(group);
    }
    hf_model_write_index(directory, HF_LAST, files, count, CFG, SAFETENSORS_F32);
    hf_config_write(directory, CFG, SAFETENSORS_F32, model_card_of(4), NULL);
    free(padded);
}

static void expect_refused(const char* directory, const char* words);

TEST(files_of_groups) {
    const char* directory = directory_of("cut");
    char command[PATH_MAX];
    TestModel model = test_model_random(CFG, SAFETENSORS_F32);
    write_cut(&model, directory);
    TestModel again = read_model(directory, CFG);
    expect_model(&again, &model, SAFETENSORS_F32, "three files");
    EXPECT(truncate(test_path("cut/model-00002-of-00003.safetensors"), 2000) == 0, "truncate");
    expect_refused(directory,
                   "cut/model-00002-of-00003.safetensors: tensor transformer.h.0.|truncated or damaged");
    unlink(test_path("cut/model-00002-of-00003.safetensors"));
    expect_refused(directory, "cut/model-00002-of-00003.safetensors: cannot read: No such file");
    snprintf(command, sizeof(command),
             "cd '%s' && cp model-00003-of-00003.safetensors model-00002-of-00003.safetensors", directory);
    EXPECT(system(command) == 0, "%s", command);
    expect_refused(directory, "cut/model.safetensors.index.json: tensor transformer.h.0.|"
                              " is not in |cut/model-00002-of-00003.safetensors");
    free(again.memory);
    free(model.memory);
}

// ---- refused models ----

static void body_read(const void* directory) {
    TestModel model = read_model((const char*)directory, CFG);
    free(model.memory);
}

static void expect_refused(const char* directory, const char* words) {
    char wanted[512];
    snprintf(wanted, sizeof(wanted), "error: |%s", words);
    EXPECT(test_dies(body_read, directory, 1, wanted), "%s", words);
}

// Replaces text in config.json.
static void change_config(const char* directory, const char* from, const char* to) {
    char *text, *at, error[ERROR_BYTES], changed[4096], path[PATH_MAX];
    size_t bytes;
    hf_config_write(directory, CFG, SAFETENSORS_F32, model_card_of(4), NULL);
    snprintf(path, sizeof(path), "%s/config.json", directory);
    CHECK(file_try_read(path, sizeof(changed), &text, &bytes, error), "%s", error);
    at = strstr(text, from);
    CHECK(at, "config.json: no %s", from);
    const int length =
        snprintf(changed, sizeof(changed), "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    file_write_text(path, changed, (size_t)length);
    free(text);
}

TEST(other_configs) {
    static const char* const cases[][3] = {
        {"\"gpt2\"", "\"bert\"", "config.json|model_type is bert|gpt2"},
        {"\"model_type\": \"gpt2\",", "", "no model_type"},
        {"\"gelu_new\"", "\"relu\"", "activation_function is relu|gelu_new"},
        {"\"n_inner\": null", "\"n_inner\": 17", "n_inner is 17|16"},
        {"1e-05", "1e-06", "layer_norm_epsilon is 1e-06"},
        {"\"n_head\": 2", "\"n_head\": 3", "4 channels in 3 heads"},
        {"\"n_layer\": 2", "\"n_layer\": 0", "layers of 0"},
        {"\"n_layer\": 2", "\"n_layer\": -2", "config.json|whole number"},
        {"\"n_layer\": 2,", "", "layers of 0"},
        {"\"vocab_size\": 5", "\"vocab_size\": 99999999999999", "vocabulary of"},
        {"true", "false", "tie_word_embeddings is false"},
        {"\"n_ctx\": 6", "\"scale_attn_by_inverse_layer_idx\": true", "scale_attn_by_inverse_layer_idx"},
        {"}", "", "config.json|end of the text"},
        {"{", "[", "config.json|byte 0"},
        {"\"n_ctx\": 6", "\"n_layer\": 2", "config.json: key n_layer appears twice"},
        {"\"n_ctx\": 6", "\"a\": 1, \"a\": 1", "config.json: key a appears twice"},
        {"\"resid_pdrop\": 0.0", "\"resid_pdrop\": \"x\"", "config.json: byte"},
    };
    const char* directory = directory_of("configs");
    TestModel model = test_model_random(CFG, SAFETENSORS_F32);
    write_model(&model, directory, SAFETENSORS_F32);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        change_config(directory, cases[i][0], cases[i][1]);
        expect_refused(directory, cases[i][2]);
    }
    change_config(directory, "\"n_inner\": null", "\"n_inner\": 16");
    body_read(directory);
    change_config(directory, "gelu_new", "gelu_fast");
    body_read(directory);
    change_config(directory, "\"embd_pdrop\": 0.0", "\"embd_pdrop\": 0.125");
    EXPECT(test_dies(body_read, directory, 0, ""));
    EXPECT_NEAR(hf_config_dropout(directory), 0.125, 1e-12, "the largest");
    change_config(directory, "\"n_ctx\": 6", "\"task_specific_params\": {\"a\": [1, {\"b\": null}]}");
    body_read(directory);
    free(model.memory);
    unlink(test_path("configs/config.json"));
    expect_refused(directory, "configs/config.json|No such file");
}

TEST(bad_weights) {
    static const ModelConfig other = {.max_T = 6, .V = 5, .Vp = 128, .L = 3, .NH = 2, .C = 4},
                             longer = {.max_T = 7, .V = 5, .Vp = 128, .L = 2, .NH = 2, .C = 4};
    const char* directory = directory_of("bad");
    TestModel model = test_model_random(CFG, SAFETENSORS_F32);
    float* qkvw =
        (float*)tensor_at_layer(row_called(model.rows, MODEL_PARAMETER_ROWS, "qkvw"), model.memory, 1);
    qkvw[7 * 4 + 3] = NAN; // layer 1, row 7, column 3
    write_model(&model, directory, SAFETENSORS_F32);
    // 3 x 12 + 7
    expect_refused(directory, "model.safetensors|h.1.attn.c_attn.weight|element 43|nan");
    qkvw[7 * 4 + 3] = 0;
    ((float*)model.memory)[6] = INFINITY;
    write_model(&model, directory, SAFETENSORS_F32);
    expect_refused(directory, "wte.weight|element 6|inf");
    ((float*)model.memory)[6] = 0;
    write_model(&model, directory, SAFETENSORS_F32);
    hf_config_write(directory, longer, SAFETENSORS_F32, model_card_of(4), NULL);
    SafeTensors from;
    safetensors_open(&from, test_path("bad/model.safetensors"));
    free(model.memory);
    hf_config_write(directory, CFG, SAFETENSORS_F32, model_card_of(4), NULL);
    copy_part(&from, test_path("bad/x"), 0, 2, NULL); // every other tensor is missing
    rename(test_path("bad/x"), test_path("bad/model.safetensors"));
    expect_refused(directory, "no tensor");
    copy_part(&from, test_path("bad/x"), 0, 1, NULL);
    rename(test_path("bad/x"), test_path("bad/model.safetensors"));
    safetensors_close(&from);
    body_read(directory);

    model = test_model_random(other, SAFETENSORS_F32); // another model's weights beside this config
    whole_model_write(directory, other, model.rows, model.memory, SAFETENSORS_F32);
    expect_refused(directory, "unexpected tensors: transformer.h.2.|, ... (12; the model has 2 layers)");
    free(model.memory);
    model = test_model_random(longer, SAFETENSORS_F32);
    whole_model_write(directory, longer, model.rows, model.memory, SAFETENSORS_F32);
    expect_refused(directory, "wpe.weight is (7, 4), wanted (6, 4)");
    free(model.memory);
    unlink(test_path("bad/model.safetensors"));
    expect_refused(directory, "no model.safetensors");
    test_write("bad/pytorch_model.bin", "x", 1);
    expect_refused(directory, "no model.safetensors|pytorch_model.bin is not read|save_pretrained");
    EXPECT(mkfifo(test_path("bad/model.safetensors"), 0666) == 0, "a FIFO");
    expect_refused(directory, "model.safetensors: not a regular file");
}

// Tensors that no layer asks for.
TEST(other_tensors) {
    static const char* const cases[][2] = {
        {"h.1.attn.bias", ""},
        {"transformer.h.0.attn.masked_bias", ""},
        {"score.weight", "note: |ignored heads for other tasks: score.weight"},
        {"h.0.attn.biases", "unexpected tensors: h.0.attn.biases (1"},
        {"h.0.attn.c_attn.lora", "unexpected tensors: h.0.attn.c_attn.lora (1"},
        {"transformer.wte.weight", "unexpected tensors: wte.weight (1"}, // twice, under both names
        {"extra", "unexpected tensors: extra (1"},
    };
    const char* directory = directory_of("others");
    TestModel model = test_model_random(CFG, SAFETENSORS_F32);
    write_model(&model, directory, SAFETENSORS_F32);
    SafeTensors from;
    safetensors_open(&from, test_path("others/model.safetensors"));
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        copy_part(&from, test_path("others/model.safetensors"), 0, 1, cases[i][0]);
        const int is_refused = strncmp(cases[i][1], "unexpected", 10) == 0;
        EXPECT(test_dies(body_read, directory, is_refused, cases[i][1]), "%s", cases[i][0]);
    }
    safetensors_close(&from);
    free(model.memory);
}

// Fields of config.json that only others read are kept. The type has the names of transformers 4
// and 5.
TEST(kept_config) {
    static const char extra[] =
        "\"initializer_range\": 0.05, \"task_specific_params\": {\"a\": [\"\\u00e9 }\", null]},\n"
        "\"auto_map\": {}, \"torch_dtype\"";
    const char* directory = directory_of("kept");
    char *text, error[ERROR_BYTES];
    size_t bytes;
    hf_config_write(directory, CFG, SAFETENSORS_BF16, model_card_of(4), NULL);
    EXPECT(file_try_read(test_path("kept/config.json"), 1 << 16, &text, &bytes, error), "%s", error);
    char* at = strstr(text, "\"torch_dtype\"");
    EXPECT(at && strstr(text, "\"dtype\": \"bfloat16\"") && strstr(at, "\"bfloat16\""), "both names");
    char longer[4096];
    const int length = snprintf(longer, sizeof(longer), "%.*s%s%.*s", (int)(at - text), text, extra,
                                (int)(text + bytes - at) - 13, at + 13);
    test_write("kept/config.json", longer, (size_t)length);
    free(text);
    char* kept = hf_config_kept(directory);
    hf_config_write(directory, CFG, SAFETENSORS_F32, model_card_of(4), kept);
    free(kept);
    EXPECT(file_try_read(test_path("kept/config.json"), 1 << 16, &text, &bytes, error), "%s", error);
    EXPECT(strstr(text, "\"initializer_range\": 0.05") && strstr(text, "{\"a\": [\"\\u00e9 }\", null]}") &&
               !strstr(text, "auto_map") && !strstr(text, "bfloat16"),
           "%.*s", (int)bytes, text);
    free(text);
    EXPECT(hf_config_read(directory).C == CFG.C, "is read");
}

// lm_head.weight is here a copy of another tensor: a classifier of its own.
TEST(own_classifier) {
    const char* directory = directory_of("head");
    TestModel model = test_model_random(CFG, SAFETENSORS_F32);
    write_model(&model, directory, SAFETENSORS_F32);
    SafeTensors from;
    safetensors_open(&from, test_path("head/model.safetensors"));
    copy_part(&from, test_path("head/x"), 0, 1, "lm_head.weight");
    safetensors_close(&from);
    rename(test_path("head/x"), test_path("head/model.safetensors"));
    body_read(directory);
    safetensors_open(&from, test_path("head/model.safetensors"));
    const SafeTensorsView* head = safetensors_find(&from, "lm_head.weight");
    const long place = (long)(head->data - from.map);
    safetensors_close(&from);
    FILE* file = fopen(test_path("head/model.safetensors"), "r+b");
    fseek(file, place, SEEK_SET);
    fputc(0x11, file);
    fclose(file);
    expect_refused(directory, "lm_head.weight is not the token embedding");
    free(model.memory);
}

// The classifier alone, under its own name: the blanks behind it keep the length of the header.
TEST(only_classifier) {
    static const char old[] = "\"transformer.wte.weight\"", name[] = "\"lm_head.weight\"        ";
    const char* directory = directory_of("only");
    TestModel model = test_model_random(CFG, SAFETENSORS_F32);
    write_model(&model, directory, SAFETENSORS_F32);
    char *text, error[ERROR_BYTES];
    size_t bytes;
    EXPECT(file_try_read(test_path("only/model.safetensors"), (size_t)1 << 30, &text, &bytes, error), "%s",
           error);
    char* at = (char*)memmem(text, bytes, old, strlen(old));
    EXPECT(at && strlen(old) == strlen(name), "");
    memcpy(at, name, strlen(name));
    test_write("only/model.safetensors", text, bytes);
    TestModel again = read_model(directory, CFG);
    expect_model(&again, &model, SAFETENSORS_F32, "lm_head.weight alone");
    free(again.memory);
    memcpy(at, "\"lm_read.weight\"", strlen("\"lm_read.weight\""));
    test_write("only/model.safetensors", text, bytes);
    expect_refused(directory, "no tensor transformer.wte.weight");
    free(text);
    free(model.memory);
}

TEST(round_trips) {
    static const SafeTensorsDtype dtypes[3] = {SAFETENSORS_F32, SAFETENSORS_F16, SAFETENSORS_BF16};
    for (int i = 0; i < 3; i++) {
        test_round_trip(CFG, dtypes[i]);
        test_round_trip(LARGE, dtypes[i]);
    }
}
