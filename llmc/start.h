/*
start.h -- what both trainers do before they have a model: from the command line to options, data and sizes.

    start_open     all of it, and the banner. Where the command line asks for something else than a run,
                   --verify-data or --print-config, that is done instead, and the exit status of it set
    start_close

needs:   clock.h options.h resume.h setup.h threads.h
defines: RunStart, start_open, start_close
*/
#ifndef LLMC_START_H
#define LLMC_START_H

#include "clock.h"
#include "options.h"
#include "resume.h"
#include "setup.h"
#include "threads.h"

typedef struct {
    Options options;
    RunData data;
    Resume resume;
    const char* model_path; // of the first weights, or of those to go on from; NULL: random ones
    GPT2Config cfg;
    double start_s; // when the program began, as time_now_s counts
    int is_answered;
    int status; // if is_answered
} RunStart;

static inline void start_open(RunStart* start, int argc, char** argv) {
    Options* options = &start->options;
    start->start_s = time_now_s();
    start->is_answered = 0;
    start->status = EXIT_SUCCESS;
    options_parse(options, argc, argv);
    if (options->threads) {
        threads_set(options->threads);
    }
    resume_open(&start->resume, options);
    setup_tokenizer(&start->data, options);
    start->model_path = start->resume.is_active ? start->resume.path : setup_model_path(options);
    start->cfg = resume_config(&start->resume, setup_model(options, &start->data, start->model_path));
    if (options->verify_data) {
        start->is_answered = 1;
        start->status = setup_verify_data(options);
        return;
    }
    setup_data(&start->data, options);
    setup_training(options);
    if (options->print_config) {
        start->is_answered = 1;
        options_print_config(stdout, options);
        return;
    }
    options_print_banner(stdout, options, argv[0]);
}

static inline void start_close(RunStart* start) {
    setup_close(&start->data);
    resume_close(&start->resume);
}

#endif
