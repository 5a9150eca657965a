/*
follow_view.h -- how a followed run looks: as a picture that fills a screen, and as lines.
*/
#ifndef LLMC_FOLLOW_VIEW_H
#define LLMC_FOLLOW_VIEW_H

#include <stdio.h>

#include "llmc/report/log_reader.h"

#ifdef __cplusplus
extern "C" {
#endif

// Prints update number `at` (an index of steps), the most important numbers first, without a line
// end. `is_now`: it is the last one of a run that continues, so the time left is known.
void follow_print_step(FILE* file, const Record* r, size_t at, int is_now);

// Prints a line about an event, with the text of a sample below it. Nothing for a start.
void follow_print_event(FILE* file, const Record* r, const RecordEvent* event, int columns);

// Prints a picture of `rows` lines: the title, the loss curve, the last update, validation and
// sample, and the last event that asks for attention. `state` says how the run has ended; NULL: it
// continues.
void follow_print_picture(FILE* file, const Record* r, const char* state, int columns, int rows);

#ifdef __cplusplus
}
#endif

#ifdef FOLLOW_VIEW_IMPLEMENTATION

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/number_text.h"
#include "llmc/base/printable.h"
#include "llmc/base/text_buffer.h"
#include "llmc/log/curve_terminal.h"
#include "llmc/log/log.h"
#include "llmc/log/text_wrap.h"

enum {
    FOLLOW_RECENT_ = 100,     // updates whose mean speed tells the time left
    FOLLOW_SAMPLE_ROWS_ = 10, // at most
    FOLLOW_CURVE_ROWS_ = 8,   // at least; a smaller screen has no curve
    FOLLOW_SILENCE_S_ = 30    // after which the time of the last update is shown
};

// ---- lines ----

// Prints "step   12/1000", equally wide at every step.
static void follow_step_(FILE* file, const Record* r, double step) {
    const char* steps = record_option(r, "steps");
    const int is_known = steps && steps[0] >= '0' && steps[0] <= '9';
    fprintf(file, "step %*.0f%s%s", is_known ? (int)strlen(steps) : 0, step, is_known ? "/" : "",
            is_known ? steps : "");
}

static void follow_number_(FILE* file, const char* format, double value) {
    char text[64];
    if (isfinite(value)) {
        snprintf(text, sizeof(text), format, value);
        fprintf(file, " | %s", text);
    }
}

// Returns the seconds that the remaining updates take at the speed of the last ones; NAN: unknown.
static double follow_left_s_(const Record* r) {
    const char* steps = record_option(r, "steps");
    const size_t n = r->num_steps;
    if (!steps || n < 2) {
        return NAN;
    }
    const RecordStep *now = &r->steps[n - 1], *then = &r->steps[n > FOLLOW_RECENT_ ? n - FOLLOW_RECENT_ : 0];
    const double step_s =
        (now->values[RECORD_ELAPSED_S] - then->values[RECORD_ELAPSED_S]) / (now->step - then->step);
    return (strtod(steps, NULL) - now->step) * step_s;
}

void follow_print_step(FILE* file, const Record* r, size_t at, int is_now) {
    const RecordStep* step = &r->steps[at];
    const double* values = step->values;
    char text[64];
    follow_step_(file, r, step->step);
    follow_number_(file, "loss %.4f", values[RECORD_LOSS]);
    const double left_s = is_now ? follow_left_s_(r) : NAN;
    if (left_s >= 0) {
        fprintf(file, " | eta %s", log_duration(left_s, text));
    }
    follow_number_(file, "%.0f tok/s", values[RECORD_TOK_PER_S]);
    follow_number_(file, "%.1f ms", values[RECORD_MS]);
    follow_number_(file, "kl %.4f", values[RECORD_KL]);
    follow_number_(file, "norm %.4f", values[RECORD_NORM]);
    follow_number_(file, "lr %.2e", values[RECORD_LR]);
    follow_number_(file, "%.1f%% MFU", 100 * values[RECORD_MFU]);
}

static void follow_val_(FILE* file, const RecordEvent* event, const char* name) {
    fprintf(file, "val%s%s loss %.4f", name[0] ? " " : "", name, event->values[RECORD_VALUE_LOSS]);
    follow_number_(file, "%.4f bpb", event->values[RECORD_BPB]);
}

static void follow_task_(FILE* file, const RecordEvent* event) {
    fputs(event->text, file);
    follow_number_(file, "acc %.4f", event->values[RECORD_ACC]);
    follow_number_(file, "acc_norm %.4f", event->values[RECORD_ACC_NORM]);
    follow_number_(file, "acc_bytes %.4f", event->values[RECORD_ACC_BYTES]);
    follow_number_(file, "loss %.4f", event->values[RECORD_VALUE_LOSS]);
    follow_number_(file, "%.4f bpb", event->values[RECORD_BPB]);
}

// Prints the words about an event that follow its step.
static void follow_words_(FILE* file, const RecordEvent* event) {
    switch (event->kind) {
    case RECORD_VAL:
        follow_val_(file, event, "");
        break;
    case RECORD_SET:
        follow_val_(file, event, event->text);
        break;
    case RECORD_SOURCE:
        fprintf(file, "%s %.4g %%, %.3g epochs", event->text, 100 * event->values[RECORD_SHARE],
                event->values[RECORD_EPOCHS]);
        break;
    case RECORD_TASK:
        follow_task_(file, event);
        break;
    case RECORD_SAMPLE:
        fputs("sample:", file);
        break;
    case RECORD_SAVE:
        fputs("saved", file);
        break;
    case RECORD_WARNING:
        fprintf(file, "warning: %s", event->text);
        break;
    case RECORD_SKIP:
        fprintf(file, "update skipped: %s", event->text);
        break;
    case RECORD_ROLLBACK:
        fprintf(file, "rolled back from step %.0f: %s", event->values[RECORD_FROM], event->text);
        break;
    case RECORD_STOP:
        fprintf(file, "stopped by %s", event->text);
        break;
    default:
        break;
    }
}

// Prints the line of an event, made safe for a terminal.
static void follow_event_line_(FILE* file, const Record* r, const RecordEvent* event) {
    TextBuffer line;
    text_buffer_open(&line, "a line about the run");
    follow_step_(line.file, r, event->step);
    fputs(" | ", line.file);
    follow_words_(line.file, event);
    char* text = text_buffer_close(&line);
    fprintf(file, "%s\n", printable(text));
    free(text);
}

void follow_print_event(FILE* file, const Record* r, const RecordEvent* event, int columns) {
    if (event->kind == RECORD_START) {
        return;
    }
    follow_event_line_(file, r, event);
    if (event->kind == RECORD_SAMPLE) {
        text_wrap_print(file, event->text, event->bytes, (size_t)columns);
    }
}

// ---- the picture ----

// Prints "out/books: running | 1.2M tokens in 3h05m | last update 2m ago".
static void follow_title_(FILE* file, const Record* r, const char* state) {
    char text[64], tokens[NUMBER_BYTES];
    const double* now = r->num_steps ? r->steps[r->num_steps - 1].values : NULL;
    const double silent_s = now ? time_unix_s() - now[RECORD_TIME] : NAN;
    fprintf(file, "%s: %s", r->name, state ? state : "running");
    if (now && isfinite(now[RECORD_TOKENS]) && isfinite(now[RECORD_ELAPSED_S])) {
        fprintf(file, " | %s tokens in %s", number_short(now[RECORD_TOKENS], tokens),
                log_duration(now[RECORD_ELAPSED_S], text));
    }
    if (!state && silent_s > FOLLOW_SILENCE_S_) {
        fprintf(file, " | last update %s ago", log_duration(silent_s, text));
    }
    fputc('\n', file);
}

// Sets points (n) to mean losses of neighboring updates; returns how many.
static int follow_train_points_(CurvePoint* points, int n, const Record* r) {
    const double last = r->num_steps ? r->steps[r->num_steps - 1].step : 1;
    int count = 0, bin = -1, of_bin = 0;
    for (size_t i = 0; i < r->num_steps; i++) {
        const double step = r->steps[i].step, loss = r->steps[i].values[RECORD_LOSS];
        const int here = (int)(step / last * (n - 1));
        if (!isfinite(loss)) {
            continue;
        }
        of_bin = here == bin ? of_bin + 1 : 1;
        count += of_bin == 1;
        bin = here;
        CurvePoint* point = &points[count - 1];
        *point = of_bin == 1 ? (CurvePoint){step, loss}
                             : (CurvePoint){point->step + (step - point->step) / of_bin,
                                            point->loss + (loss - point->loss) / of_bin};
    }
    return count;
}

static int follow_val_points_(CurvePoint* points, const Record* r) {
    int count = 0;
    for (size_t i = 0; i < r->num_events; i++) {
        const RecordEvent* event = &r->events[i];
        if (event->kind == RECORD_VAL && isfinite(event->values[RECORD_VALUE_LOSS])) {
            points[count++] = (CurvePoint){event->step, event->values[RECORD_VALUE_LOSS]};
        }
    }
    return count;
}

// Returns the floor, if the losses have come near: far below them it would squeeze the curve.
static double follow_floor_(const Record* r, const CurvePoint* train, int n) {
    return n > 0 && train[n - 1].loss < 2 * r->floor ? r->floor : NAN;
}

static void follow_curve_(FILE* file, const Record* r, int columns, int rows) {
    const int bins = 2 * columns;
    CurvePoint* train = (CurvePoint*)check_alloc((size_t)bins + 1, sizeof(CurvePoint), "loss curve");
    CurvePoint* val = (CurvePoint*)check_alloc(r->num_events + 1, sizeof(CurvePoint), "loss curve");
    const int n_train = follow_train_points_(train, bins, r), n_val = follow_val_points_(val, r);
    curve_draw(file, train, n_train, val, n_val, follow_floor_(r, train, n_train), columns, rows);
    free(val);
    free(train);
}

// Prints "val loss 3.2000 | 1.1000 bpb at step 900 | best 3.1900 at step 800 | saved at step 900".
static void follow_results_(FILE* file, const Record* r) {
    const RecordEvent *val = record_last(r, RECORD_VAL), *best = record_best(r, RECORD_VALUE_LOSS),
                      *save = record_last(r, RECORD_SAVE);
    if (val) {
        follow_val_(file, val, "");
        fprintf(file, " at step %.0f", val->step);
    } else {
        fputs("no validation yet", file);
    }
    if (best && best != val) {
        fprintf(file, " | best %.4f at step %.0f", best->values[RECORD_VALUE_LOSS], best->step);
    }
    if (save) {
        fprintf(file, " | saved at step %.0f", save->step);
    }
    fputc('\n', file);
}

// Returns the last event that asks for attention, NULL if there is none.
static const RecordEvent* follow_trouble_(const Record* r) {
    for (size_t i = r->num_events; i > 0; i--) {
        const RecordEvent* event = &r->events[i - 1];
        if (event->kind == RECORD_WARNING || event->kind == RECORD_SKIP || event->kind == RECORD_ROLLBACK) {
            return event;
        }
    }
    return NULL;
}

// Sets *rows to the lines of the last sample that the picture shows. Returns them with its title, a
// text for free().
static char* follow_sample_(const Record* r, int columns, int most, int* rows) {
    const RecordEvent* sample = record_last(r, RECORD_SAMPLE);
    TextBuffer text;
    text_buffer_open(&text, "a sample");
    if (sample && most > 1) {
        follow_print_event(text.file, r, sample, columns);
    }
    char* lines = text_buffer_close(&text);
    *rows = 0;
    for (char* at = lines; *at; at++) {
        *rows += *at == '\n';
        if (*rows == most) {
            at[1] = '\0';
        }
    }
    return lines;
}

void follow_print_picture(FILE* file, const Record* r, const char* state, int columns, int rows) {
    const RecordEvent* trouble = follow_trouble_(r);
    const int has_curve = r->num_steps > 1, fixed = 4 + (trouble != NULL);
    int sample_rows;
    const int most = rows - fixed - (has_curve ? 2 * FOLLOW_CURVE_ROWS_ : 0);
    char* sample =
        follow_sample_(r, columns, most < FOLLOW_SAMPLE_ROWS_ ? most : FOLLOW_SAMPLE_ROWS_, &sample_rows);
    const int curve_rows = rows - fixed - sample_rows;
    follow_title_(file, r, state);
    if (has_curve && curve_rows >= FOLLOW_CURVE_ROWS_) {
        follow_curve_(file, r, columns, curve_rows);
    }
    if (r->num_steps > 0) {
        follow_print_step(file, r, r->num_steps - 1, !state);
    } else {
        fputs("no update yet", file);
    }
    fputc('\n', file);
    follow_results_(file, r);
    if (trouble) {
        follow_event_line_(file, r, trouble);
    }
    fputs(sample, file);
    fputs("q leaves\n", file);
    free(sample);
}

#endif // FOLLOW_VIEW_IMPLEMENTATION

#endif
