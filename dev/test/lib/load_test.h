/*
load_test.h -- loads weights into a model of the trainer whose source is included: for both
trainers.
*/
#ifndef DEV_TEST_LOAD_TEST_H
#define DEV_TEST_LOAD_TEST_H

#include "llmc/checkpoint/load_save.h"
#include "llmc/checkpoint/model_files.h"
#include "llmc/setup/options.h"

// Sets the weights of a model that is open from a file.
static inline void load_weights(Model* model, const char* path) {
    const ModelFiles files = {model,
                              trainer.access,
                              &model->map,
                              &model->state,
                              SAFETENSORS_F32,
                              trainer.program.trainer == OPTION_CPU,
                              NULL,
                              0};
    load_model(&files, (LoadFrom){.path = path, .which = HF_LAST}, NULL);
}

#endif
