/*
load_test.h -- loads weights into a model of the trainer whose source is included: for both
trainers.
*/
#ifndef DEV_TEST_LOAD_TEST_H
#define DEV_TEST_LOAD_TEST_H

#include "llmc/checkpoint/load_save.h"
#include "llmc/checkpoint/model_files.h"
#include "llmc/parallel/zero.h"
#include "llmc/setup/options.h"

// Sets the weights of a model that is open from a file.
static inline void load_weights(Model* model, const char* path) {
    const ZeroPlan* own = &model->zero.plan;
    const ZeroPlan plan = own->groups ? *own : zero_plan(model->cfg, 0, 0, 1);
    const ModelFiles files = {model,
                              trainer.access,
                              rank_part_of_data(model->cfg, plan, 0),
                              model->state.optimizer,
                              SAFETENSORS_F32,
                              trainer.program.trainer == OPTION_CPU,
                              NULL,
                              NULL};
    load_model(&files, path, HF_LAST, 0, NULL, NULL);
}

#endif
