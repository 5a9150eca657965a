// reference.c -- see reference.h.
#define TRAIN_GPT2_NO_MAIN
#include "../../train_gpt2.c"

#include "reference.h"

struct Reference {
    GPT2 model;
};

Reference* reference_open(GPT2Config cfg, int B, int T, const float* params) {
    Reference* reference = (Reference*)check_alloc(1, sizeof(Reference), "reference");
    const Options options = {.batch = B, .seq_len = T, .recompute = RECOMPUTE_NONE};
    gpt2_open(&reference->model, cfg, &options);
    memcpy(reference->model.params_memory, params, reference->model.parameter_bytes);
    return reference;
}

void reference_close(Reference* reference) {
    gpt2_close(&reference->model);
    free(reference);
}

double reference_gradients(Reference* reference, const int* tokens, const int* targets, const int* starts,
                           int batch_T, double loss_tokens, GradientMode mode) {
    GPT2* model = &reference->model;
    const Batch batch = {tokens,   targets, starts,
                         model->B, batch_T, targets_count(targets, model->B * batch_T)};
    gpt2_forward(model, batch, 0);
    gpt2_backward(model, batch, (float)(1 / loss_tokens), mode);
    return batch_loss(model, batch);
}

const float* reference_logits(Reference* reference, const int* tokens) {
    GPT2* model = &reference->model;
    const int N = model->B * model->T;
    assert((int)gpt2_classifier_chunk(model->cfg, (size_t)N) == N);
    const Batch batch = {tokens, NULL, NULL, model->B, model->T, 0};
    gpt2_forward(model, batch, 0);
    gpt2_logits(model, 0, N);
    return model->acts.logits;
}

double reference_norm(Reference* reference) { return gpt2_gradient_norm(&reference->model); }
void reference_update(Reference* reference, AdamW adamw) { gpt2_update(&reference->model, adamw); }
const float* reference_grads(const Reference* reference) {
    return (const float*)reference->model.grads_memory;
}
const float* reference_params(const Reference* reference) {
    return (const float*)reference->model.params_memory;
}
