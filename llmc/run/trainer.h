/*
trainer.h -- the functions of a trainer that a run calls (run.h); its model is opaque here.

The training loop is in the trainer and calls the trainer's own functions. The table has only the
functions that others call: for the plan, tasks, samples, loading and saving.
*/
#ifndef LLMC_TRAINER_H
#define LLMC_TRAINER_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llmc/base/wide_sum.h"
#include "llmc/data/dataloader.h"
#include "llmc/checkpoint/model_files.h"
#include "llmc/run/evaluation.h"
#include "llmc/generate/generator.h"
#include "llmc/setup/settled.h"
#include "llmc/plan/plan.h"
#include "llmc/comm/comm.h"
#include "llmc/model/freeze.h"
#include "llmc/model/model.h"
#include "llmc/ops/router.h"

// One rank's numbers of an update or a validation. In memory the largest scores of its heads follow
// it (qk_clip.h), then the statistics of its routers (router.h), both layer after layer, then the
// losses and the targets of each source of a mixture, then the losses of its micro-steps.
typedef struct {
    // Sum of squares of this rank's part of the reduced gradient, which still has the loss scale.
    WideSum square_sum;
    WideSum divergence;  // sum over tokens of the divergence from the teacher
    double counted;      // targets that count
    double flops;        // floating-point operations of the update
    double target_bytes; // bytes of text that the targets of a validation stand for
    double wait_s;       // time spent waiting for data
    double pace_s;       // time per token in forward passes that wait for no other rank; 0: unknown
    uint64_t agreement;  // hash of the verdict on the previous update
    size_t scores;       // heads of all layers; 0 without --qk-clip
    size_t statistics;   // numbers of its routers' statistics; 0 without experts
    size_t sources;      // of a mixture; else 0
} RankReport;

// Returns the numbers of the statistics of all routers.
static inline size_t rank_report_all_statistics_(const Settled* s) {
    return (size_t)s->cfg.L * (size_t)router_statistics(s->cfg.E);
}

// Returns the numbers of the largest scores.
static inline size_t rank_report_all_scores(const Settled* s) {
    return s->options.optimizer.qk_clip > 0 ? (size_t)s->cfg.L * (size_t)s->cfg.NH : 0;
}

// Returns the bytes of a report.
static inline size_t rank_report_bytes(const Settled* s, int64_t micro_steps) {
    const size_t numbers = rank_report_all_scores(s) + rank_report_all_statistics_(s) +
                           2 * (size_t)s->sources + (size_t)micro_steps;
    return sizeof(RankReport) + numbers * sizeof(double);
}

// Starts a report of zeros.
static inline void rank_report_open(RankReport* report, const Settled* s, int64_t micro_steps) {
    memset(report, 0, rank_report_bytes(s, micro_steps));
    report->scores = rank_report_all_scores(s);
    report->statistics = rank_report_all_statistics_(s);
    report->sources = (size_t)s->sources;
}

// Returns the largest scores of a report; NULL without --qk-clip.
static inline double* rank_report_scores(RankReport* report) {
    return report->scores > 0 ? (double*)(report + 1) : NULL;
}

// Returns the statistics of the routers of a report; NULL without experts.
static inline double* rank_report_statistics(RankReport* report) {
    return report->statistics > 0 ? (double*)(report + 1) + report->scores : NULL;
}

// Returns the losses of each source of a report, in nats; the sources' targets follow them.
static inline double* rank_report_sources(RankReport* report) {
    return (double*)(report + 1) + report->scores + report->statistics;
}

// Returns the losses of a report, in nats.
static inline double* rank_report_losses(RankReport* report) {
    return rank_report_sources(report) + 2 * report->sources;
}

// Adds the operations and targets of a micro-batch, with the windows of `cfg`.
static inline void rank_report_add(RankReport* report, const Settled* s, ModelConfig cfg, Batch batch) {
    double* counted = rank_report_sources(report) + report->sources;
    report->flops += freeze_flops_per_token(&s->freeze, cfg, batch_length(batch)) * batch.B * batch.T;
    report->counted += batch.counted;
    for (size_t i = 0; i < report->sources && batch.B > 0; i++) {
        counted[i] += batch.counted_of_source[i];
    }
}

// Bytes of the parameters in memory, multiples of 8, and the number of their first 8 bytes in a
// checksum; zeros: all parameters that the ranks of a data group have.
typedef struct {
    size_t begin, count, number;
} ParameterBytes;

static inline ParameterBytes all_parameters(void) {
    const ParameterBytes all = {0, 0, 0};
    return all;
}

typedef struct {
    const char* name;         // trainer and precision, for the log and checkpoints: "CPU FP32"
    const char* program_name; // "train_gpt2"
    OptionsProgram program;   // its version, and the kind of options it has
    SafeTensorsDtype dtype;   // type of the parameters in memory

    size_t model_bytes;     // sizeof(Model)
    Memory (*ledger)(void); // the empty ledger of a model that is used
    // Opens the model with all parameters zero; with a dry ledger, which only counts, without a
    // `comm`. Returns its ledger.
    const Memory* (*open)(Model* model, const Settled* s, Memory memory, Comm* comm);
    void (*close)(Model* model);
    PlanModel model; // opens the model with a dry ledger
    // Returns the settings with everything that depends on the device decided, prints the reasons,
    // and sets *plan. Allocates nothing; a plan for another machine needs no device. Collective,
    // like all functions below.
    Settled (*plan)(TrainerPlan* plan, const Settled* s, PlanModel model, Comm* comm);
    // Sets *peak_mib to the most memory that the device, or the process, ever held, and *beside_mib
    // to the memory held on a GPU in addition to the plan; NAN on a CPU.
    void (*memory)(double* peak_mib, double* beside_mib);

    TokenLosses token_losses; // evaluation.h
    PrefillSequence prefill;  // generator.h
    DecodeStep decode;

    ModelAccess access; // model_files.h

    // Set the parameters to the average of the weights, and set the weights again.
    void (*show_average)(Model* model);
    void (*hide_average)(Model* model);
    // Returns the teacher of a model; NULL: none.
    Model* (*teacher)(Model* model);
    // Returns the frozen base of a model with an adapter; NULL: it has none.
    Model* (*base)(Model* model);
    // Returns a checksum of some of the parameters that all ranks of a data group have.
    uint64_t (*checksum)(Model* model, ParameterBytes of);
    // Writes more small files into a checkpoint, in the thread that saves. NULL: none.
    void (*save_extra)(const void* model, const char* directory);
} Trainer;

#endif
