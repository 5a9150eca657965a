/*
log_step.h -- the line of a step: in the files, and on the screen with the time that is left.
*/
#ifndef LLMC_LOG_STEP_H
#define LLMC_LOG_STEP_H

#include <stdint.h>

#include "llmc/log/log_line.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sets the time that the run has waited for its data since it started. Call it before log_train.
static inline void log_data_wait(RunLog* log, double seconds) { log->data_wait_s = seconds; }

// Sets the tokens of a step, of all steps up to it, and of all steps left. Call it before
// log_train.
void log_tokens(RunLog* log, double step_tokens, double tokens, double left_tokens);

// Sets the load of the busiest expert, 1 if all are even, and the mean entropy of the routers in
// nats (router.h); a load of 0: no experts. Call it before log_train.
static inline void log_routing(RunLog* log, double load, double entropy) {
    log->load = load;
    log->entropy = entropy;
}

// Sets the losses of the sources of a mixture. Call it before log_train.
static inline void log_mixture(RunLog* log, LogMixture mixture) { log->mixture = mixture; }

// Sets the peak for the utilization, in FLOP/s. Call it before log_train.
static inline void log_peak(RunLog* log, double peak) { log->peak = peak; }

// Sets the mean divergence from the teacher, in nats; NAN: none. Call it before log_train.
static inline void log_divergence(RunLog* log, double divergence) { log->divergence = divergence; }

// Sets the largest attention score of a step (qk_clip.h); NAN: unknown. Call it before log_train.
static inline void log_score(RunLog* log, double score) { log->score = score; }

// Sets the power and clock that the device reports; NAN: unknown. Call it before log_train.
static inline void log_sensors(RunLog* log, double power_w, double clock_mhz) {
    log->power_w = power_w;
    log->clock_mhz = clock_mhz;
}

// A step: the mean loss of its batch, the norm of its gradient before clipping, both with their
// z-scores, the learning rate, its time without evaluation and the like, and the model flops
// utilization as a fraction. NAN: unknown score or utilization.
typedef struct {
    double loss, loss_z, norm, norm_z, lr, ms, mfu;
} LogUpdate;

// Logs a step of training.
void log_train(RunLog* log, int64_t step, LogUpdate u);

// Logs the loads of the experts in this step, if it ends a hundredth of the run. Row l of `tokens`
// (L, stride) starts with the number of tokens of each of the E experts in layer l.
void log_experts(RunLog* log, int64_t step, const double* tokens, int L, int E, int stride);

#ifdef __cplusplus
}
#endif

#ifdef LOG_STEP_IMPLEMENTATION

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "llmc/base/clock.h"
#include "llmc/base/json.h"
#include "llmc/log/log_history.h"

// Writes a number of the GPU, if it was measured.
static void log_gpu_number_(RunLog* log, const char* key, double* value) {
    char tag[64];
    if (isfinite(*value)) {
        fprintf(log->json.file, ",\"%s\":%.9g", key, *value);
        snprintf(tag, sizeof(tag), "gpu/%.40s", key);
        tensorboard_scalar(&log->board, tag, *value);
    }
    *value = NAN;
}

// Averages the time of a step: the mean of the first 20, then an exponential average over about 20.
static void log_time_(RunLog* log, double ms) {
    log->timed++;
    log->total_ms += ms;
    log->timed_tokens += log->step_tokens;
    log->smooth_ms += (ms - log->smooth_ms) * fmax(1.0 / (double)log->timed, 0.05);
    if (log->timed == 1) {
        log->first_ms = ms;
        log->first_s = time_now_s();
    }
}

// Counts the validations after this step.
static int64_t log_validations_left_(const RunLog* log, int64_t step) {
    const int64_t every = log->eval_every;
    return every ? log->steps / every - step / every + (log->steps % every != 0 && step < log->steps) : 0;
}

// Returns the seconds left: the remaining steps at the present speed, each with its share of the
// time between steps so far (samples, checkpoints), and the remaining validations, each as long as
// the last one. Larger steps than the present one take longer in proportion.
static double log_eta_s_(const RunLog* log, int64_t step) {
    const double left = (double)(log->steps - step),
                 like_this = log->tokens > 0 ? log->left_tokens / log->step_tokens : left;
    double between_ms = 0;
    if (log->timed > 1) {
        const double wall_ms = 1e3 * (time_now_s() - log->first_s - log->val_s_sum);
        between_ms = fmax(0, wall_ms - (log->total_ms - log->first_ms)) / (double)(log->timed - 1);
    }
    return 1e-3 * (like_this * log->smooth_ms + left * between_ms) +
           (double)log_validations_left_(log, step) * log->val_s;
}

// Part of the line of a step. On a narrow terminal the highest ranks are dropped first.
typedef struct {
    int rank;
    char text[64];
} LogField_;
enum { LOG_FIELDS_ = 13, LOG_RANKS_ = 7 };

__attribute__((format(printf, 3, 4))) static inline void log_field_(LogField_* field, int rank,
                                                                    const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(field->text, sizeof(field->text), format, args);
    va_end(args);
    field->rank = rank;
}

// Sets log->line to as many of the fields as fit.
static void log_join_(RunLog* log, const LogField_* fields) {
    const int columns = log_screen_columns(log);
    for (int most = LOG_RANKS_; most >= 0; most--) {
        size_t used = 0;
        log->line[0] = '\0';
        for (int i = 0; i < LOG_FIELDS_; i++) {
            if (fields[i].rank <= most && used < sizeof(log->line)) {
                used += (size_t)snprintf(log->line + used, sizeof(log->line) - used, "%s", fields[i].text);
            }
        }
        if (columns == 0 || used < (size_t)columns) {
            return;
        }
    }
}

// Formats the line of a step, without unknown scores and utilization.
static void log_format_step_(RunLog* log, int64_t step, LogUpdate u) {
    char count[64], eta[64];
    LogField_ f[LOG_FIELDS_];
    memset(f, 0, sizeof(f));
    log_field_(&f[0], 0, "%s", log_step_text(log, step, count));
    log_field_(&f[1], 0, " | loss %.4f", u.loss);
    if (isfinite(u.loss_z)) {
        log_field_(&f[2], 6, " (%+.2fz)", u.loss_z);
    }
    if (isfinite(log->divergence)) {
        log_field_(&f[3], 1, " | kl %.4f", log->divergence);
    }
    log_field_(&f[4], 3, " | norm %.4f", u.norm);
    if (isfinite(u.norm_z)) {
        log_field_(&f[5], 6, " (%+.2fz)", u.norm_z);
    }
    if (log->load > 0) {
        log_field_(&f[6], 5, " | load %.2f, entropy %.2f", log->load, log->entropy);
    }
    if (isfinite(log->score)) {
        log_field_(&f[7], 5, " | score %.1f", log->score);
    }
    log_field_(&f[8], 4, " | lr %.2e", u.lr);
    log_field_(&f[9], 1, " | %.1f ms", u.ms);
    if (isfinite(u.mfu)) {
        log_field_(&f[10], 5, " | %.1f%% MFU", 100 * u.mfu);
    }
    log_field_(&f[11], 2, " | %.0f tok/s", 1e3 * log->step_tokens / log->smooth_ms);
    log_field_(&f[12], 0, " | eta %s", log_duration(log_eta_s_(log, step), eta));
    log_join_(log, f);
}

// True if --log-every selects a step, or if it is the first or the last.
static int log_is_due_(const RunLog* log, int64_t step) {
    return step == log->start_step + 1 || step == log->steps || (log->every && step % log->every == 0);
}

// True if a step gets a line of its own on the screen, `pause_s` after the last one: see the head
// of this file.
static int log_keeps_line_(RunLog* log, int64_t step, double pause_s) {
    const int is_hundredth = 100 * (step - log->kept_step) >= log->steps;
    const int is_slow = log->is_terminal ? log->smooth_ms >= 100 : pause_s >= 0.5;
    const int is_silent = !log->is_terminal && pause_s >= LOG_SILENCE_S;
    const int is_kept = log_is_due_(log, step) ||
                        (!log->every && (log->smooth_ms >= 10e3 || is_silent || (is_slow && is_hundredth)));
    log->kept_step = is_kept ? step : log->kept_step;
    return is_kept;
}

// Shows the line of a step, if it is due.
static void log_show_step_(RunLog* log, int64_t step) {
    const double now_s = time_now_s(), pause_s = now_s - log->shown_s;
    const int is_kept = log_keeps_line_(log, step, pause_s);
    if (!is_kept && (log->every || !log->is_terminal || pause_s < 0.1)) {
        return;
    }
    fputs(log->open_line != LOG_LINE_NONE ? "\r\033[K" : "", log_details(log));
    // no automatic margins, in case the width is unknown: a wrapped line cannot be overwritten
    fprintf(log_details(log), is_kept ? "%s\n" : "\033[?7l%s\033[?7h", log->line);
    log->open_line = is_kept ? LOG_LINE_NONE : LOG_LINE_STEP;
    log->shown_s = now_s;
    log_screen_flush(log);
}

// A step with a larger batch takes longer in proportion.
void log_tokens(RunLog* log, double step_tokens, double tokens, double left_tokens) {
    log->smooth_ms *= step_tokens / log->step_tokens;
    log->step_tokens = step_tokens;
    log->tokens = tokens;
    log->left_tokens = left_tokens;
}

// Writes the loss of each source that has targets in the step.
static void log_write_mixture_(RunLog* log) {
    const LogMixture* mixture = &log->mixture;
    for (int s = 0, any = 0; mixture->sources && s <= mixture->sources->count; s++) {
        if (s == mixture->sources->count) {
            fputs(any ? "}" : "", log->json.file);
        } else if (mixture->targets[s] > 0) {
            const char* name = mixture->sources->source[s].name;
            const double loss = mixture->losses[s] / mixture->targets[s];
            char tag[128];
            fputs(any++ ? "," : ",\"source_loss\":{", log->json.file);
            json_print_string(log->json.file, name, strlen(name));
            fprintf(log->json.file, isfinite(loss) ? ":%.9g" : ":null", loss);
            snprintf(tag, sizeof(tag), "train/source_loss/%.90s", name);
            tensorboard_scalar(&log->board, tag, loss);
        }
    }
    memset(&log->mixture, 0, sizeof(log->mixture));
}

void log_train(RunLog* log, int64_t step, LogUpdate u) {
    log_line_begin(log, "train", step);
    log_line_number(log, "loss", u.loss);
    log_line_known(log, "kl", log->divergence);
    log_line_known(log, "score", log->score);
    log_line_number(log, "norm", u.norm);
    log_line_number(log, "lr", u.lr);
    log_line_number(log, "ms", u.ms);
    log_line_number(log, "data_ms", 1e3 * (log->data_wait_s - log->data_s));
    log_line_number(log, "tok_per_s", 1e3 * log->step_tokens / u.ms);
    log_line_number(log, "mfu", u.mfu);
    if (isfinite(log->peak)) {
        fprintf(log->json.file, ",\"peak\":%.4g", log->peak);
    }
    if (log->load > 0) {
        log_line_number(log, "expert_load", log->load);
        log_line_number(log, "router_entropy", log->entropy);
    }
    log_write_mixture_(log);
    log_gpu_number_(log, "power_w", &log->power_w);
    log_gpu_number_(log, "clock_mhz", &log->clock_mhz);
    fprintf(log->json.file, ",\"tokens\":%.0f",
            log->tokens > 0 ? log->tokens : (double)step * log->step_tokens);
    fprintf(log->json.file, ",\"elapsed_s\":%.3f", log->elapsed_s + time_now_s() - log->open_s);
    log_line_time(log);
    log_line_end(log);
    log->data_s = log->data_wait_s;
    if (!log->every || log_is_due_(log, step)) {
        fprintf(log->text.file, "s:%lld trl:%.4f lr:%.6f norm:%.2f\n", (long long)step, u.loss, u.lr, u.norm);
        log_file_flush(&log->text);
    }
    log_remember(log, log->train, step, u.loss);
    log_time_(log, u.ms);
    log_format_step_(log, step, u);
    log_show_step_(log, step);
}

// Writes the loads of a layer's experts; a step without tokens has none.
static void log_write_loads_(RunLog* log, int l, const double* tokens, int E) {
    double all = 0, most = 0;
    char tag[32];
    for (int e = 0; e < E; e++) {
        all += tokens[e];
        most = fmax(most, tokens[e]);
    }
    for (int e = 0; e < E; e++) {
        fprintf(log->json.file, "%s%.4g", e ? "," : l ? ",[" : "[", all > 0 ? tokens[e] * E / all : 0);
    }
    fputc(']', log->json.file);
    snprintf(tag, sizeof(tag), "experts/layer_%d", l);
    tensorboard_scalar(&log->board, tag, all > 0 ? most * E / all : 0);
}

void log_experts(RunLog* log, int64_t step, const double* tokens, int L, int E, int stride) {
    const int64_t steps = log->steps > 0 ? log->steps : 1;
    if (step * 100 / steps == (step - 1) * 100 / steps) {
        return;
    }
    log_line_begin(log, "experts", step);
    fputs(",\"load\":[", log->json.file);
    for (int l = 0; l < L; l++) {
        log_write_loads_(log, l, tokens + (size_t)l * (size_t)stride, E);
    }
    fputc(']', log->json.file);
    log_line_end(log);
}

#endif // LOG_STEP_IMPLEMENTATION

#endif
