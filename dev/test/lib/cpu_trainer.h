/*
cpu_trainer.h -- the CPU trainer as a library, for the test of the GPU trainer, which has the same
names.

Parameters and gradients are fp32, in the layout that the parameter rows of model.h give for
elements of 4 bytes.
*/
#ifndef DEV_TEST_CPU_TRAINER_H
#define DEV_TEST_CPU_TRAINER_H

#include "llmc/optim/optimizer.h"
#include "llmc/model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CpuTrainer CpuTrainer;

CpuTrainer* cpu_trainer_open(ModelConfig cfg, int B, int T, const float* params);
// With --matmul fp8.
CpuTrainer* cpu_trainer_open_fp8(ModelConfig cfg, int B, int T, const float* params);
void cpu_trainer_close(CpuTrainer* trainer);

// Forward and backward on a batch of up to B x T tokens: sets the gradients or adds to them; each
// token's loss counts 1 / loss_tokens. `starts` as in attention.h. Returns the sum of the losses.
double cpu_trainer_gradients(CpuTrainer* trainer, const int* tokens, const int* targets, const int* starts,
                             int batch_B, int batch_T, double loss_tokens, GradientMode mode);
const float* cpu_trainer_logits(CpuTrainer* trainer,
                                const int* tokens); // (B * T, Vp), valid until the next call
double cpu_trainer_norm(CpuTrainer* trainer);
void cpu_trainer_update(CpuTrainer* trainer, Update update);
const float* cpu_trainer_grads(const CpuTrainer* trainer);
const float* cpu_trainer_params(const CpuTrainer* trainer);

#ifdef __cplusplus
}
#endif
#endif
