/*
trainer.h -- what a trainer is to a run (run.h): a model, which is opaque here, and a table of functions that work on it.
*/
#ifndef LLMC_TRAINER_H
#define LLMC_TRAINER_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/wide_sum.h"
#include "llmc/data/dataloader.h"
#include "llmc/formats/safetensors.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/run/evaluation.h"
#include "llmc/generate/generator.h"
#include "llmc/optim/update_in_backward.h"
#include "llmc/optim/loss_scale.h"
#include "llmc/plan/mfu.h"
#include "llmc/setup/options.h"
#include "llmc/plan/plan.h"
#include "llmc/setup/run_data.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/comm/comm.h"
#include "llmc/model/freeze.h"
#include "llmc/model/model.h"
#include "llmc/optim/optimizer.h"

// The part of one rank in an update or a validation. Behind it lie the sums of its losses, one for each micro-step.
typedef struct {
    WideSum
        square_sum; // of the part of the gradient that the rank has after the reduction, times the loss scale
    double counted; // targets that count
    double flops;   // operations of the update
    double target_bytes; // text that the targets of a validation stand for
    double wait_s;       // time for which the rank has waited for data
    double pace_s;       // time for a token in forward passes that wait for no other rank; 0: unknown
    uint64_t agreement;  // hash of the verdict on the update before
} RankReport;

// The losses of a report, nats.
static inline double* rank_report_losses(RankReport* report) { return (double*)(report + 1); }

// Adds the work of a micro-batch.
static inline void rank_report_add(RankReport* report, ModelConfig cfg, const Freeze* freeze, Batch batch) {
    report->flops += freeze_flops_per_token(freeze, cfg, batch.T) * batch.B * batch.T;
    report->counted += batch.counted;
}

// NULL is allowed only where a comment says so.
typedef struct {
    const char* name;         // with its precision: "CPU FP32"; for the log and for checkpoints
    const char* program_name; // "train_gpt2"
    OptionsProgram program;   // its options and its version
    size_t model_bytes;       // sizeof(GPT2): the driver allocates it
    MfuMeasure measure_peak;  // NULL: the peak is known, no step shows that the device can do more

    // ---- before and after the run

    // First, sets options that are still `auto` because they depend on the device, and prints why. Then sets
    // *plan. Allocates nothing; a plan for another machine needs no device. Collective, like all that follows.
    void (*plan)(TrainerPlan* plan, ModelConfig cfg, Options* options, Comm* comm);
    // Allocates everything that training needs; all parameters are zero. Ends the program if it does not fit.
    // `comm` stays. Collective, as all that follows up to copy_out.
    void (*open)(Model* model, ModelConfig cfg, const Options* options, Comm* comm);
    void (*close)(Model* model);
    // Prints the end of the line on data and device; `peak` in FLOP/s.
    void (*print_device)(const Model* model, double peak);
    // Writes the files that --export-llmc and --export-gguf name, in rank 0. After the last step; collective.
    void (*export_model)(Model* model, const Options* options, const RunData* data);
    double (*peak_mib)(void); // the most memory that the device, or the process, ever held

    double (*beside_mib)(const Model* model); // that nobody planned, on the GPU; NULL: there is none

    // ---- a step

    // The loss scale of a new run; loss_scale_off where gradients need none.
    LossScale (*loss_scale)(void);
    // Forward and backward on the next total_batch tokens of `train`, one micro-batch after another: sets all
    // gradients, and of the report the losses (the sum of this rank's micro-batch in each micro-step), square_sum,
    // counted, flops and pace_s. The loss of each token counts loss_scale / total_batch.
    void (*gradients)(Model* model, Dataloader* train, int64_t total_batch, float loss_scale,
                      RankReport* report);
    // For --update-in-backward, in place of the two others: forward and backward on a batch that is an update, in which
    // `now` decides on each group of parameters as soon as its gradient is there.
    void (*update_in_backward)(Model* model, Batch batch, InBackward* now, RankReport* report);
    // One update of all parameters; its grad_scale applies to gradients as they are in memory.
    void (*update)(Model* model, Update update);
    // Prints what --gpu-report asks for, after step number `step` (from 1). NULL: nothing.
    void (*report)(Model* model, const Options* options, int64_t step);
    // Sets what the device says of itself at this moment; NAN: unknown. NULL: it says nothing.
    void (*sensors)(const Model* model, double* power_w, double* clock_mhz);

    // ---- between two steps

    // Whether to validate before the first update, too; as setup_validates_first. NULL: always.
    int (*validates_first)(const Options* options, double flops_per_token, int64_t sequences);
    // Forward on batch i of a validation, from 0 on, which may be empty: losses[i] is the sum of its losses, nats, once
    // `validated` has returned. Collective.
    void (*evaluate)(Model* model, Batch batch, int64_t i, double* losses);
    // After `batches` of them: waits for the device. NULL: evaluate does.
    void (*validated)(Model* model, int64_t batches, double* losses);
    TokenLosses token_losses; // evaluation.h
    PrefillSequence prefill;  // generator.h
    DecodeStep decode;

    // ---- weights and checkpoints

    // Weights of the model in `path`; random ones if it is NULL.
    void (*first_weights)(Model* model, const char* path, uint64_t seed);
    // Sets weights and optimizer state from the checkpoint in `path`, whose state is `saved`.
    void (*read_checkpoint)(Model* model, const char* path, const SavedState* saved);
    // The type of the weights in a checkpoint: of master weights if there are any.
    SafeTensorsDtype (*saved_dtype)(const Options* options);
    // Copies weights and optimizer state into memory of the trainer, and points params and optimizer of *copy
    // there. Returns 0 if these point to the model itself: then the save ends before the next step.
    int (*copy_out)(Model* model, Checkpoints* copy);
    // A checksum of the parameters that all processes have.
    uint64_t (*checksum)(Model* model);
    // Writes further small files into a checkpoint, in the thread that saves. NULL: none.
    void (*save_extra)(const void* model, const char* directory);
} Trainer;

#endif
