/*
summary.h -- the results of a run in words: rows for the table of a report and for a comparison.
*/
#ifndef LLMC_SUMMARY_H
#define LLMC_SUMMARY_H

#include "llmc/report/log_reader.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FACT_BYTES = 512, FACTS_OPTIONS = 256 };

typedef struct {
    const char* name;
    void (*tell)(char text[FACT_BYTES], const Record* run); // sets text; "": unknown
} Fact;

extern const Fact FACTS[];
extern const int FACTS_COUNT;

// True if any of the runs has this fact.
int facts_are_told(const Fact* fact, const Record* runs, int count);

// Chooses the number of a validation by which runs can be compared: the loss per token if their
// tokens are the same, else the bits per byte if all have them. Sets `note` to why it is not the
// loss, or to "". Returns 0 if they cannot be compared.
int facts_measure(RecordValue* measure, char note[FACT_BYTES], const Record* runs, int count);

// Sets name to "To val loss 3.2801 (best of A)", the title of a row about the best validation of
// the run called `run`.
void facts_target_name(char name[FACT_BYTES], RecordValue measure, double value, const char* run);

// Sets text to the cost of the run's first validation that is at least as good: "1.2B tokens,
// 3h05m"; "" if none is.
void facts_reach(char text[FACT_BYTES], const Record* run, RecordValue measure, double value);

// Names of all options of the runs, in their order; those that differ are marked.
typedef struct {
    const char* name[FACTS_OPTIONS];
    char differs[FACTS_OPTIONS];
    int count, differing;
} FactsOptions;

// Collects the options. Paths of files always differ, so they do not count.
void facts_options(FactsOptions* options, const Record* runs, int count);

#ifdef __cplusplus
}
#endif

#ifdef SUMMARY_IMPLEMENTATION

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "llmc/base/number_text.h"
#include "llmc/log/log.h"

static const RecordStep* fact_now_(const Record* run) { return &run->steps[run->num_steps - 1]; }

static void fact_state_(char text[FACT_BYTES], const Record* run) {
    const RecordEvent* stop = record_last(run, RECORD_STOP);
    snprintf(text, FACT_BYTES, "%s%.100s",
             run->end == RECORD_FINISHED  ? "finished"
             : run->end == RECORD_STOPPED ? "stopped by "
                                          : "running, or interrupted",
             run->end == RECORD_STOPPED ? stop->text : "");
}

static void fact_updates_(char text[FACT_BYTES], const Record* run) {
    char done[NUMBER_BYTES], all[NUMBER_BYTES];
    double steps;
    const char* wanted = record_option(run, "steps");
    number_grouped(fact_now_(run)->step, done);
    if (wanted && sscanf(wanted, "%lf", &steps) == 1) {
        snprintf(text, FACT_BYTES, "%s of %s", done, number_grouped(steps, all));
    } else {
        snprintf(text, FACT_BYTES, "%s", done);
    }
}

static void fact_tokens_(char text[FACT_BYTES], const Record* run) {
    const double tokens = fact_now_(run)->values[RECORD_TOKENS];
    if (isfinite(tokens)) {
        number_grouped(tokens, text);
    }
}

static void fact_time_(char text[FACT_BYTES], const Record* run) {
    const double elapsed_s = fact_now_(run)->values[RECORD_ELAPSED_S];
    if (isfinite(elapsed_s)) {
        log_duration(elapsed_s, text);
    }
}

static void fact_train_loss_(char text[FACT_BYTES], const Record* run) {
    snprintf(text, FACT_BYTES, "%.4f", fact_now_(run)->values[RECORD_LOSS]);
}

static void fact_val_(char text[FACT_BYTES], const RecordEvent* val, RecordValue value) {
    char step[NUMBER_BYTES];
    if (val && isfinite(val->values[value])) {
        snprintf(text, FACT_BYTES, "%.4f at %s", val->values[value], number_grouped(val->step, step));
    }
}

static void fact_best_(char text[FACT_BYTES], const Record* run) {
    fact_val_(text, record_best(run, RECORD_VALUE_LOSS), RECORD_VALUE_LOSS);
}

static void fact_last_(char text[FACT_BYTES], const Record* run) {
    fact_val_(text, record_last(run, RECORD_VAL), RECORD_VALUE_LOSS);
}

static void fact_best_bpb_(char text[FACT_BYTES], const Record* run) {
    fact_val_(text, record_best(run, RECORD_BPB), RECORD_BPB);
}

static void fact_last_bpb_(char text[FACT_BYTES], const Record* run) {
    fact_val_(text, record_last(run, RECORD_VAL), RECORD_BPB);
}

static void fact_floor_(char text[FACT_BYTES], const Record* run) {
    if (isfinite(run->floor)) {
        snprintf(text, FACT_BYTES, "%.4f", run->floor);
    }
}

static void fact_speed_(char text[FACT_BYTES], const Record* run) {
    char speed[NUMBER_BYTES];
    const double tok_per_s = record_tok_per_s(run);
    if (isfinite(tok_per_s)) {
        snprintf(text, FACT_BYTES, "%s tok/s", number_grouped(tok_per_s, speed));
    }
}

// Sets text to the ratio of two sums over all updates, in percent.
static void fact_share_(char text[FACT_BYTES], const Record* run, RecordSeries part, RecordSeries whole) {
    double parts = 0, wholes = 0;
    for (size_t i = 0; i < run->num_steps; i++) {
        const double* values = run->steps[i].values;
        if (isfinite(values[part]) && isfinite(values[whole])) {
            parts += part == RECORD_MFU ? values[part] * values[whole] : values[part];
            wholes += values[whole];
        }
    }
    if (wholes > 0) {
        snprintf(text, FACT_BYTES, "%.1f%%", 100 * parts / wholes);
    }
}

static void fact_mfu_(char text[FACT_BYTES], const Record* run) {
    fact_share_(text, run, RECORD_MFU, RECORD_MS);
}

static void fact_data_(char text[FACT_BYTES], const Record* run) {
    fact_share_(text, run, RECORD_DATA_MS, RECORD_MS);
}

static void fact_mib_(char text[FACT_BYTES], double value) {
    char mib[NUMBER_BYTES];
    if (isfinite(value)) {
        snprintf(text, FACT_BYTES, "%s MiB", number_grouped(value, mib));
    }
}

static void fact_planned_(char text[FACT_BYTES], const Record* run) { fact_mib_(text, run->planned_mib); }
static void fact_peak_(char text[FACT_BYTES], const Record* run) { fact_mib_(text, run->peak_mib); }

// Sets text to the number of sequences in the last validation.
static void fact_covers_(char text[FACT_BYTES], const Record* run) {
    char some[NUMBER_BYTES], all[NUMBER_BYTES];
    const RecordEvent* val = record_last(run, RECORD_VAL);
    if (val && isfinite(val->values[RECORD_SEQUENCES])) {
        snprintf(text, FACT_BYTES, "%s of %s sequences", number_grouped(val->values[RECORD_SEQUENCES], some),
                 number_grouped(val->values[RECORD_ALL_SEQUENCES], all));
    }
}

static void fact_count_(char text[FACT_BYTES], const Record* run, RecordKind kind, int least) {
    int count = 0;
    for (size_t i = 0; i < run->num_events; i++) {
        count += run->events[i].kind == kind;
    }
    if (count >= least) {
        number_grouped(count, text);
    }
}

static void fact_skips_(char text[FACT_BYTES], const Record* run) { fact_count_(text, run, RECORD_SKIP, 1); }
static void fact_rollbacks_(char text[FACT_BYTES], const Record* run) {
    fact_count_(text, run, RECORD_ROLLBACK, 1);
}
static void fact_starts_(char text[FACT_BYTES], const Record* run) {
    fact_count_(text, run, RECORD_START, 2);
}
static void fact_damaged_(char text[FACT_BYTES], const Record* run) {
    if (run->num_damaged > 0) {
        number_grouped((double)run->num_damaged, text);
    }
}
static void fact_device_(char text[FACT_BYTES], const Record* run) {
    snprintf(text, FACT_BYTES, "%s", run->device);
}
static void fact_trainer_(char text[FACT_BYTES], const Record* run) {
    const char* blank = strchr(run->trainer, ' '); // "CPU FP32"
    snprintf(text, FACT_BYTES, blank ? "%.*s, weights in %s" : "%.*s", (int)strcspn(run->trainer, " "),
             run->trainer, blank ? blank + 1 : "");
}
static void fact_host_(char text[FACT_BYTES], const Record* run) {
    snprintf(text, FACT_BYTES, "%s", run->host);
}

const Fact FACTS[] = {
    {"Best validation loss", fact_best_},
    {"Last validation loss", fact_last_},
    {"Bits per byte, best", fact_best_bpb_},
    {"Bits per byte, last", fact_last_bpb_},
    {"Validated on", fact_covers_},
    {"Floor", fact_floor_},
    {"Last training loss", fact_train_loss_},
    {"Updates", fact_updates_},
    {"Tokens", fact_tokens_},
    {"Time", fact_time_},
    {"Speed", fact_speed_},
    {"MFU", fact_mfu_},
    {"Waiting for data", fact_data_},
    {"Planned memory", fact_planned_},
    {"Peak memory", fact_peak_},
    {"Skipped updates", fact_skips_},
    {"Rollbacks", fact_rollbacks_},
    {"Starts", fact_starts_},
    {"Damaged lines of the log", fact_damaged_},
    {"State", fact_state_},
    {"Trainer", fact_trainer_},
    {"Device", fact_device_},
    {"Host", fact_host_},
};
const int FACTS_COUNT = sizeof(FACTS) / sizeof(FACTS[0]);

int facts_are_told(const Fact* fact, const Record* runs, int count) {
    for (int i = 0; i < count; i++) {
        char text[FACT_BYTES] = "";
        fact->tell(text, &runs[i]);
        if (text[0]) {
            return 1;
        }
    }
    return 0;
}

// True if an option has the same value in all runs, or is known in none.
static int facts_agree_(const char* name, const Record* runs, int count) {
    int agree = 1;
    for (int i = 1; i < count; i++) {
        const char *first = record_option(&runs[0], name), *other = record_option(&runs[i], name);
        agree &= strcmp(first ? first : "", other ? other : "") == 0;
    }
    return agree;
}

static int facts_have_bytes_(const Record* runs, int count) {
    int have = 1;
    for (int i = 0; i < count; i++) {
        const RecordEvent* best = record_best(&runs[i], RECORD_VALUE_LOSS);
        have &= !best || isfinite(best->values[RECORD_BPB]);
    }
    return have;
}

int facts_measure(RecordValue* measure, char note[FACT_BYTES], const Record* runs, int count) {
    const int same_size = facts_agree_("vocab-size", runs, count),
              same = same_size && facts_agree_("tokenizer", runs, count);
    const int have_bytes = facts_have_bytes_(runs, count);
    *measure = !same && have_bytes ? RECORD_BPB : RECORD_VALUE_LOSS;
    note[0] = '\0';
    if (!same && have_bytes) {
        snprintf(note, FACT_BYTES,
                 "The runs have different tokenizers: bits per byte compare them, losses per token do not.");
    } else if (!same_size) {
        snprintf(note, FACT_BYTES,
                 "The runs have different vocabularies: their losses per token are not comparable.");
    }
    return same_size || have_bytes;
}

void facts_target_name(char name[FACT_BYTES], RecordValue measure, double value, const char* run) {
    snprintf(name, FACT_BYTES,
             measure == RECORD_BPB ? "To %.4f bits per byte (best of %.300s)"
                                   : "To val loss %.4f (best of %.300s)",
             value, run);
}

void facts_reach(char text[FACT_BYTES], const Record* run, RecordValue measure, double value) {
    char tokens[NUMBER_BYTES], duration[64];
    text[0] = '\0';
    for (size_t i = 0; i < run->num_events && !text[0]; i++) {
        const RecordEvent* event = &run->events[i];
        if (event->kind == RECORD_VAL && event->values[measure] <= value) {
            number_short(record_place(run, RECORD_TOKENS, event->step), tokens);
            log_duration(record_place(run, RECORD_ELAPSED_S, event->step), duration);
            snprintf(text, FACT_BYTES, "%s tokens, %s", tokens, duration);
        }
    }
}

// ---- options ----

static int facts_is_known_(const FactsOptions* options, const char* name) {
    for (int i = 0; i < options->count; i++) {
        if (strcmp(options->name[i], name) == 0) {
            return 1;
        }
    }
    return 0;
}

static int facts_is_place_(const char* name) {
    static const char* const places[] = {"out", "resume", "export-llmc", "export-gguf"};
    int is_place = 0;
    for (int i = 0; i < 4; i++) {
        is_place |= strcmp(name, places[i]) == 0;
    }
    return is_place;
}

static int facts_differ_(const char* name, const Record* runs, int count) {
    const char* first = record_option(&runs[0], name);
    for (int i = 1; i < count; i++) {
        const char* other = record_option(&runs[i], name);
        if (!first || !other ? first != other : strcmp(first, other) != 0) {
            return 1;
        }
    }
    return 0;
}

void facts_options(FactsOptions* options, const Record* runs, int count) {
    memset(options, 0, sizeof(*options));
    for (int i = 0; i < count; i++) {
        for (size_t k = 0; k < runs[i].num_options && options->count < FACTS_OPTIONS; k++) {
            const char* name = runs[i].options[k].name;
            if (!facts_is_known_(options, name)) {
                const int differs = !facts_is_place_(name) && facts_differ_(name, runs, count);
                options->name[options->count] = name;
                options->differs[options->count++] = (char)differs;
                options->differing += differs;
            }
        }
    }
}

#endif // SUMMARY_IMPLEMENTATION

#endif
