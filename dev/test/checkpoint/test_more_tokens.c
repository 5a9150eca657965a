/*
test_more_tokens.c -- initial weights of a model whose tokenizer was extended: its rows have the
same bits, those of new tokens are means.
*/
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "llmc/checkpoint/load_save.h"
#include "llmc/checkpoint/more_tokens.h"
#include "llmc/formats/hf_config_write.h"
#include "llmc/tokenizer/bpe_files.h"
#include "llmc/tokenizer/bpe_train.h"
#include "dev/test/lib/test.h"
#include "dev/test/lib/whole_model.h"

enum { OWN_V = 270, EXTENDED_V = 290, TEXT_BYTES = 4000 };

static const ModelConfig SMALL = {
    .max_T = 8, .V = OWN_V, .Vp = 384, .L = 2, .NH = 2, .C = 8, .arch = ARCH_LLAMA, .has_head = 1};

// Parameters, laid out by a map.
struct Model {
    Map map;
    float* memory;
};

static float* group_at(const Model* model, int g) {
    return model->memory + map_trained(&model->map, g)->in[MAP_PARAMETERS].begin;
}

static void* group_of(Model* model, int g, void* group) {
    EXPECT(!group, "in place");
    return group_at(model, g);
}

static void keep_group(Model* model, int g, const float* group) {
    float* place = group_at(model, g);
    if (place != group) {
        memcpy(place, group, map_group_elements(&model->map, g) * sizeof(float));
    }
}

static void is_loaded(Model* model, const char* checkpoint) { EXPECT(model && !checkpoint, "a new model"); }

// Opens a vocabulary of OWN_V ids, and one that extends it.
static void tokenizers_open(Tokenizer* own, Tokenizer* extended) {
    Bpe bpe, larger;
    BpeTrainer trainer;
    char text[TEXT_BYTES];
    for (uint32_t i = 0; i < TEXT_BYTES; i++) {
        text[i] = " abcd"[i * 2654435761u / 65536 % 5];
    }
    bpe_trainer_open(&trainer, 1);
    bpe_trainer_add(&trainer, 0, text, sizeof(text));
    bpe_trainer_run(&trainer, OWN_V, NULL, NULL, &bpe);
    bpe_trainer_extend(&trainer, &bpe, EXTENDED_V, NULL, NULL, &larger);
    bpe_trainer_close(&trainer);
    EXPECT(mkdir(test_path("own"), 0777) == 0 && mkdir(test_path("extended"), 0777) == 0, "directories");
    bpe_write(&bpe, test_path("own/tokenizer.json"));
    bpe_write(&larger, test_path("extended/tokenizer.json"));
    bpe_close(&bpe);
    bpe_close(&larger);
    tokenizer_open_file(own, test_path("own"));
    tokenizer_open_file(extended, test_path("extended"));
}

// Writes random weights of SMALL, and returns them.
static float* write_weights(const char* directory, TensorRow* rows) {
    float* memory = (float*)check_alloc(model_parameter_rows_of(rows, SMALL, sizeof(float)), 1, "model");
    for (int g = 0; g < model_groups(SMALL); g++) {
        model_random_group(rows, SMALL, 7, g, (char*)memory + tensor_group_offset_bytes(rows, g));
    }
    hf_config_write(directory, SMALL, SAFETENSORS_F32, model_card_of(OWN_V - 1), NULL);
    whole_model_write(directory, SMALL, rows, memory, SAFETENSORS_F32);
    return memory;
}

// Checks the rows of the vocabulary against the model's own. A new token is the mean of
// those that spell it, two at least.
static void expect_vocab(const float* got, const float* own_rows, const Tokenizer* own,
                         const Tokenizer* extended, size_t rows) {
    const size_t C = (size_t)SMALL.C;
    EXPECT(memcmp(got, own_rows, OWN_V * C * sizeof(float)) == 0, "old rows have other bits");
    for (int id = OWN_V; id < EXTENDED_V; id++) {
        int length, ids[64];
        const char* text = tokenizer_decode(extended, id, &length);
        const size_t count = tokenizer_encode(own, text, (size_t)length, ids);
        int wrong = 0;
        for (size_t c = 0; c < C; c++) {
            float mean = 0, largest = 0;
            for (size_t i = 0; i < count; i++) {
                const float weight = own_rows[(size_t)ids[i] * C + c];
                mean += weight / (float)count;
                largest = fmaxf(largest, fabsf(weight));
            }
            // each of `count` sums and quotients rounds to 24 bits
            wrong += !(fabsf(got[(size_t)id * C + c] - mean) <= (float)count * largest * 0x1p-23f);
        }
        EXPECT(count >= 2 && wrong == 0, "token %d of %zu others: %d channels are not the mean", id, count,
               wrong);
    }
    for (size_t i = EXTENDED_V * C; i < rows * C; i++) {
        EXPECT(got[i] == 0, "padding %zu is %g", i, (double)got[i]);
    }
}

// Checks that all other tensors are the files'.
static void expect_others(const TensorRow* rows, const float* got, const TensorRow* own_rows,
                          const float* own) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int l = 0; l < rows[i].layers && rows[i].init != INIT_VOCAB; l++) {
            EXPECT(memcmp(tensor_at_layer(&rows[i], got, l), tensor_at_layer(&own_rows[i], own, l),
                          tensor_layer_elements(&rows[i]) * sizeof(float)) == 0,
                   "%s, layer %d", rows[i].name, l);
        }
    }
}

static void test_load(const MoreTokens* more, MapOf of, int rank, int in_place, const TensorRow* own_rows,
                      const float* own) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    int tensors = 0;
    Model model;
    Memory memory = memory_on_host();
    OptimizerState state;
    map_open(&model.map, &memory, MEMORY_HOST, &of, rank);
    optimizer_state_open(&state, optimizer_of(OPTIMIZER_ADAMW, 0, MASTER_NONE), &model.map);
    model.memory = (float*)memory_take(&memory, "model", MEMORY_HOST,
                                       map_parameter_rows(&model.map, rows, sizeof(float)));
    const ModelFiles files = {.model = &model,
                              .access = {.get_group = group_of, .set_group = keep_group, .loaded = is_loaded},
                              .map = &model.map,
                              .state = &state,
                              .in_place = in_place};
    load_model(&files, (LoadFrom){.path = test_path("own"), .which = HF_LAST, .more = more}, NULL);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (rows[i].init == INIT_VOCAB && rows[i].layers > 0) {
            expect_vocab((const float*)tensor_at_layer(&rows[i], model.memory, 0),
                         (const float*)tensor_at_layer(&own_rows[i], own, 0), more->own, more->extended,
                         rows[i].rows);
            tensors++;
        }
    }
    EXPECT(tensors == 2, "%d tensors of the vocabulary", tensors);
    expect_others(rows, model.memory, own_rows, own);
    memory_close(&memory);
}

TEST(more_tokens) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    Tokenizer own, extended;
    ModelConfig cfg = SMALL;
    tokenizers_open(&own, &extended);
    EXPECT(tokenizer_extends(&extended, &own) && !tokenizer_extends(&own, &extended) &&
               !tokenizer_extends(&own, &own),
           "which extends which");
    float* memory = write_weights(test_path("own"), rows);
    cfg.V = EXTENDED_V;
    cfg.Vp = model_padded_vocab(EXTENDED_V);
    const MoreTokens more = {OWN_V, &own, &extended};
    MapOf of = map_of_model(cfg);
    test_load(&more, of, 0, 1, rows, memory);
    of.stage = 3;
    of.data = of.replica = 2;
    for (int rank = 0; rank < 2; rank++) {
        test_load(&more, of, rank, 0, rows, memory);
    }
    free(memory);
    tokenizer_close(&own);
    tokenizer_close(&extended);
}
