/*
options_removed.h -- options that the trainers no longer have, and what to use instead.

On a command line such an option ends the program with its advice. The configuration files and
checkpoints of earlier versions name every option, so there the former default is ignored; another
value ends the program, except that a resumed run never inherits an option of OPTION_NOT_SAVED.
*/
#ifndef LLMC_OPTIONS_REMOVED_H
#define LLMC_OPTIONS_REMOVED_H

#include <stddef.h>

#include "llmc/setup/options.h"

// To remove an option, delete its row in options_table.h, and add one here.
// clang-format off
__attribute__((unused)) static const RemovedOption OPTION_TRAINER_REMOVED[] = {
    // name, values that mean the same as its absence, flags
    //     advice
    {"products", "fp32", 0,
        "use --matmul"},
    {"teacher-logits", "", 0,
        "use --teacher, the model itself; with --teacher-quantize q8_0 in 8 bits"},
    {"write-logits", "0", OPTION_NOT_SAVED,
        "the training run takes the model itself, --teacher; with --teacher-quantize q8_0 in 8 bits"},
    {"tensor-slices", "auto|1", OPTION_NOT_SAVED,
        "each of the ranks of --tensor-parallel has one part of every matrix"},
    {"detach", "off", OPTION_NOT_SAVED,
        "start the run with nohup or in tmux (dev/doc/report.md); --follow and --stop-run work for any run"},
    {"report-every", "0", OPTION_NOT_SAVED,
        "use --report, the --out of a run, at any time while it trains"},
    {"embedding-gradient", "auto|joined", OPTION_NOT_SAVED,
        "the two gradients of a token embedding that is also the output layer are added up apart with "
        "--pipeline-parallel, and together without"},
    {"verify-data", "off", OPTION_NOT_SAVED, "a run checks all of its data before the first step"},
    {"core", "", 0,
        "nanochat's scripts/base_eval.py computes DCLM's CORE of any checkpoint; --tasks evaluates single tasks"},
    {NULL, NULL, 0, NULL},
};
// clang-format on

#endif
