/*
trainer.h -- what a trainer is to a run (run.h): a model, which is opaque here, and a table of functions that work on it.

The training loop stands in the trainer and calls the trainer's own functions. The table has only what others call: the
plan, tasks, samples, loading and saving.
*/
#ifndef LLMC_TRAINER_H
#define LLMC_TRAINER_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/base/wide_sum.h"
#include "llmc/data/dataloader.h"
#include "llmc/checkpoint/load_save.h"
#include "llmc/run/evaluation.h"
#include "llmc/generate/generator.h"
#include "llmc/setup/settled.h"
#include "llmc/plan/plan.h"
#include "llmc/comm/comm.h"
#include "llmc/model/freeze.h"
#include "llmc/model/model.h"

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

typedef struct {
    const char* name;         // with its precision: "CPU FP32"; for the log and for checkpoints
    const char* program_name; // "train_gpt2"
    OptionsProgram program;   // its options and its version
    SafeTensorsDtype dtype;   // of parameters in memory

    // Returns the settings with what depends on the device decided, prints why, and sets *plan.
    // Allocates nothing; a plan for another machine needs no device. Collective, like all that
    // follows.
    Settled (*plan)(TrainerPlan* plan, const Settled* s, Comm* comm);
    // Sets the most memory that the device, or the process, ever held; and what is held on a GPU beside what was
    // planned, NAN on a CPU.
    void (*memory)(double* peak_mib, double* beside_mib);

    TokenLosses token_losses; // evaluation.h
    PrefillSequence prefill;  // generator.h
    DecodeStep decode;

    ModelAccess access; // load_save.h

    // Returns a checksum of the parameters that all ranks have.
    uint64_t (*checksum)(Model* model);
    // Writes further small files into a checkpoint, in the thread that saves. NULL: none.
    void (*save_extra)(const void* model, const char* directory);
} Trainer;

#endif
