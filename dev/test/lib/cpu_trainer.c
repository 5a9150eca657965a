// cpu_trainer.c -- see cpu_trainer.h.
#define TRAIN_GPT2_NO_MAIN
#include "train_gpt2.c"

#include "dev/test/lib/cpu_trainer.h"
#include "dev/test/lib/settled_alone.h"
#include "dev/test/lib/test_element.h"

struct CpuTrainer {
    Model model;
    Comm comm;
};

// Copies parameters that are laid out without frozen ones: a router's bias is always frozen.
static void copy_parameters(Model* model, const float* params) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows(rows, model->cfg);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (size_t j = 0; j < tensor_elements(&rows[i]); j++) {
            *(float*)test_element(&model->parameter_rows[i], model->params_memory, j) =
                *(const float*)test_element(&rows[i], params, j);
        }
    }
}

static CpuTrainer* open_trainer(ModelConfig cfg, int B, int T, const float* params, MatmulPrecision matmul) {
    CpuTrainer* trainer = (CpuTrainer*)check_alloc(1, sizeof(CpuTrainer), "CPU trainer");
    const Options options = {.batch.size = B,
                             .batch.seq_len = T,
                             .batch.steps = 1,
                             .memory.recompute = RECOMPUTE_NONE,
                             .memory.matmul = matmul,
                             .optimizer.router_balance = 0.01f,
                             .optimizer.router_z = 0.001f,
                             .optimizer.embedding_lr_scale = 1,
                             .optimizer.vector_lr_scale = 1};
    trainer->comm.size = 1;
    const Settled s = settled_alone(&options, cfg, USE_TRAIN, SAFETENSORS_F32);
    model_open(&trainer->model, &s, memory_on_host(), &trainer->comm);
    copy_parameters(&trainer->model, params);
    linear_trains(&trainer->model.linear);
    return trainer;
}

CpuTrainer* cpu_trainer_open(ModelConfig cfg, int B, int T, const float* params) {
    return open_trainer(cfg, B, T, params, MATMUL_FP32);
}
CpuTrainer* cpu_trainer_open_fp8(ModelConfig cfg, int B, int T, const float* params) {
    return open_trainer(cfg, B, T, params, MATMUL_FP8);
}

void cpu_trainer_close(CpuTrainer* trainer) {
    model_close(&trainer->model);
    free(trainer);
}

double cpu_trainer_gradients(CpuTrainer* trainer, const int* tokens, const int* targets, const int* starts,
                             int batch_B, int batch_T, double loss_tokens, GradientMode mode) {
    Model* model = &trainer->model;
    const Batch batch = {tokens,  targets, starts,
                         batch_B, batch_T, targets_count(targets, batch_B * batch_T)};
    const MicroStep only = {0, 1, 1, 1};
    model_forward(model, batch);
    model_backward(model, batch, (float)(1 / loss_tokens), mode, only, NULL);
    return batch_loss(model, batch);
}

const float* cpu_trainer_logits(CpuTrainer* trainer, const int* tokens) {
    Model* model = &trainer->model;
    const int N = model->B * model->T;
    assert((int)model_classifier_chunk(model->cfg, (size_t)N) == N);
    const Batch batch = {tokens, NULL, NULL, model->B, model->T, 0};
    model_forward(model, batch);
    const Pass pass = batch_pass(model, batch);
    const LmHead head = lm_head(model, &pass);
    lm_head_logits_cpu(&head, 0, N);
    return model->acts.logits;
}

double cpu_trainer_norm(CpuTrainer* trainer) {
    WideSum sum = {0, 0};
    zero_square_sum_cpu(&trainer->model.zero, &sum, trainer->model.update.partial);
    return sqrt(wide_sum_value(sum));
}

void cpu_trainer_update(CpuTrainer* trainer, Update update) { model_update(&trainer->model, update); }
const float* cpu_trainer_grads(const CpuTrainer* trainer) {
    return (const float*)trainer->model.grads_memory;
}
const float* cpu_trainer_params(const CpuTrainer* trainer) {
    return (const float*)trainer->model.params_memory;
}
