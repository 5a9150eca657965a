/*
run.h -- what both trainers do around a run: from the command line to options, data and sizes of the model,
and to the run, or to what the command line asks for instead of one (--verify-data, --print-config, --plan).

defines: RunStart, StartPlan, StartTraining, start_run
*/
#ifndef LLMC_RUN_H
#define LLMC_RUN_H

#include "llmc/base/clock.h"
#include "llmc/base/signals.h"
#include "llmc/base/threads.h"
#include "llmc/run/options.h"
#include "llmc/run/resume.h"
#include "llmc/run/setup.h"

typedef struct {
    Options options;
    RunData data;
    Resume resume;
    const char* model_path; // of the first weights, or of those to go on from; NULL: random ones
    GPT2Config cfg;
    double start_s; // when the program began, as time_now_s counts
} RunStart;

typedef void (*StartPlan)(GPT2Config cfg, const Options* options); // prints what --plan shows
typedef int (*StartTraining)(RunStart* start);                     // the run; returns its exit status

// With options that are known. Returns the exit status.
static inline int start_go_on_(RunStart* start, const char* program, const char* trainer,
                               StartPlan print_plan, StartTraining train) {
    Options* options = &start->options;
    if (options->verify_data) {
        return setup_verify_data(options);
    }
    setup_check_exports(options);
    setup_data(&start->data, options);
    setup_training(options, start->model_path != NULL);
    if (options->print_config) {
        options_print_config(stdout, options);
        return EXIT_SUCCESS;
    }
    options_print_banner(stdout, options, program);
    fflush(stdout); // what follows may take long
    if (options->plan) {
        print_plan(start->cfg, options);
        return EXIT_SUCCESS;
    }
    resume_check(&start->resume, options, stdout, trainer, start->data.train.tokens,
                 start->data.train.fingerprint);
    signals_end("setting up the run");
    return train(start);
}

// The program, by the name of its trainer. Returns its exit status.
static inline int start_run(int argc, char** argv, OptionsProgram program, const char* trainer,
                            StartPlan print_plan, StartTraining train) {
    RunStart start;
    check_stack();
    start.start_s = time_now_s();
    options_parse(&start.options, argc, argv, program);
    if (start.options.threads) {
        threads_set(start.options.threads);
    }
    resume_open(&start.resume, &start.options);
    start.model_path = start.resume.is_active ? start.resume.path : setup_model_path(&start.options);
    setup_tokenizer(&start.data, &start.options, start.resume.is_active ? NULL : start.model_path);
    start.cfg = resume_config(&start.resume, setup_model(&start.options, &start.data, start.model_path));
    const int status = start_go_on_(&start, argv[0], trainer, print_plan, train);
    setup_close(&start.data);
    resume_close(&start.resume);
    return status;
}

#endif
