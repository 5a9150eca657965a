// test_log.c -- log.h: the files parse back to what was logged, a resumed log equals an
// uninterrupted one, the screen shows the right lines at the right rate, and a full disk or an
// unusable directory is a clear error.
#define LOG_IMPLEMENTATION

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include "llmc/log/log.h"
#include "dev/test/lib/test.h"

enum { STEP_TOKENS = 4096 };

// A validation on a part of the data.
static void say_val(RunLog* log, int64_t step, double loss, double bpb) {
    const LogVal val = {NULL, 1, loss, bpb, 20, 75};
    log_val(log, step, &val);
}

// ---- reading back ----

// A file as one string; static, for one caller at a time.
static char* slurp(const char* path) {
    static char text[1 << 20];
    FILE* file = fopen(path, "rb");
    const size_t bytes = file ? fread(text, 1, sizeof(text) - 1, file) : 0;
    text[bytes] = '\0';
    if (file) {
        fclose(file);
    }
    return text;
}

// Skips one JSON value; NULL if it is none. Whitespace is not allowed: we write none.
static const char* value_end(const char* s) {
    if (*s == '"') {
        for (s++; *s && *s != '"' && (unsigned char)*s >= ' '; s++) {
            if (*s == '\\') {
                s++;
                if (*s == 'u' && strspn(s + 1, "0123456789abcdefABCDEF") < 4) {
                    return NULL;
                }
                if (!*s || !strchr("\"\\/bfnrtu", *s)) {
                    return NULL;
                }
            }
        }
        return *s == '"' ? s + 1 : NULL;
    }
    if (*s == '{') {
        for (s++; *s == '"';) {
            s = value_end(s);
            if (!s || *s != ':' || !(s = value_end(s + 1)) || (*s != ',' && *s != '}')) {
                return NULL;
            }
            if (*s++ == '}') {
                return s;
            }
        }
        return *s == '}' && s[-1] == '{' ? s + 1 : NULL;
    }
    if (strncmp(s, "null", 4) == 0 || strncmp(s, "true", 4) == 0) {
        return s + 4;
    }
    char* end;
    strtod(s, &end);
    // strtod also takes nan and inf
    return end != s && (*s == '-' || (*s >= '0' && *s <= '9')) ? end : NULL;
}

// Where the value of `key` in a flat object starts.
static const char* json_value(const char* line, const char* key) {
    char quoted[64];
    snprintf(quoted, sizeof(quoted), "\"%s\":", key);
    const char* at = strstr(line, quoted);
    return at ? at + strlen(quoted) : NULL;
}

static double number_of(const char* line, const char* key) {
    const char* value = json_value(line, key);
    return value && strncmp(value, "null", 4) != 0 ? strtod(value, NULL) : NAN;
}

static int json_is(const char* line, const char* key, const char* wanted) {
    const char* value = json_value(line, key);
    return value && strncmp(value, wanted, strlen(wanted)) == 0;
}

// Line number i of a text, without its newline; "" if the text is shorter.
static const char* line_of(const char* text, int i) {
    static char line[8192];
    while (i-- > 0 && text) {
        text = strchr(text, '\n');
        text = text ? text + 1 : NULL;
    }
    snprintf(line, sizeof(line), "%.*s", text ? (int)strcspn(text, "\n") : 0, text ? text : "");
    return line;
}

static int count_of(const char* text, const char* word) {
    int n = 0;
    for (; (text = strstr(text, word)); text += strlen(word)) {
        n++;
    }
    return n;
}

static void print_options(FILE* file, const void* what) { fprintf(file, "{\"lr\":%s}", (const char*)what); }

static const LogIdentity who = {"train 1.0", "CPU FP32", "2 threads", "./train --steps 5 'a b'",
                                NAN,         NULL,       NULL};

// A log with its files in the directory `name` and its screen in the file name.screen.
static RunLog open_log_for(const char* name, LogStart start, int64_t start_step, int64_t steps,
                           int tensorboard) {
    RunLog log;
    char screen[300];
    snprintf(screen, sizeof(screen), "%s.screen", test_path(name));
    const LogSettings settings = {
        test_path(name), start, start_step, steps, STEP_TOKENS, 0, fopen(screen, "w"), tensorboard, 0, 0, 0};
    log_open(&log, &settings);
    return log;
}

static RunLog open_log_as(const char* name, LogStart start, int64_t start_step, int64_t steps) {
    return open_log_for(name, start, start_step, steps, 0);
}

// Opens the log of a new run, or of one that continues after some steps.
static RunLog open_log(const char* name, int64_t start_step, int64_t steps) {
    return open_log_as(name, start_step > 0 ? LOG_CONTINUE : LOG_NEW, start_step, steps);
}

// A log of ten steps, in a directory or without files ("").
static RunLog open_log_in(const char* directory, FILE* screen) {
    RunLog log;
    const LogSettings settings = {directory, LOG_NEW, 0, 10, 1, 0, screen, 0, 0, 0, 0};
    log_open(&log, &settings);
    return log;
}

// ---- the files ----

static void print_memory(FILE* file, const void* mib) {
    fprintf(file, ",\"mem_mb\":{\"weights\":%s}", (const char*)mib);
}

// Returns true if a file contains this text. Its other bytes may be zero.
static int holds(const TestFile* file, const char* text) {
    return memmem(file->data, file->bytes, text, strlen(text)) != NULL;
}

// TensorBoard gets the facts known before the first step, the GPU's line, and the right tags.
TEST(board) {
    const LogIdentity known = {"train 1.0", "GPU BF16", "a GPU", NULL, 0.875, print_memory, "12.5"};
    RunLog log = open_log_for("board", LOG_NEW, 0, 10, 1);
    char path[PATH_MAX];
    strcpy(path, log.board.path);
    log_config(&log, print_options, "1", known);
    log_sensors(&log, 612.5, NAN);
    log_train(&log, 1, 4, NAN, 0.5, NAN, 3e-4, 800, 0.4);
    log_train(&log, 2, 4, NAN, 0.5, NAN, 3e-4, 800, 0.4);
    say_val(&log, 2, 3.5, NAN);
    log_sample(&log, 2, "Once", 4);
    log_skip(&log, 2, "unwanted", "");
    log_close(&log);
    const char* jsonl = slurp(test_path("board/log.jsonl"));
    EXPECT(strstr(line_of(jsonl, 0), ",\"floor\":0.875,\"mem_mb\":{\"weights\":12.5},\"time\":"), "%s",
           line_of(jsonl, 0));
    EXPECT(number_of(line_of(jsonl, 1), "power_w") == 612.5 && !strstr(line_of(jsonl, 1), "clock_mhz"), "%s",
           line_of(jsonl, 1));
    EXPECT(!strstr(line_of(jsonl, 2), "power_w"), "measured once: %s", line_of(jsonl, 2));
    TestFile events = test_read(path);
    EXPECT(holds(&events, "train/loss") && holds(&events, "val/loss") && holds(&events, "gpu/power_w"), "");
    EXPECT(holds(&events, "Once") && !holds(&events, "unwanted") && !holds(&events, "floor"), "");
    free(events.data);
    log = open_log("board", 0, 10);
    log_close(&log);
    struct stat info;
    EXPECT(stat(test_path("board/tensorboard.1"), &info) == 0 &&
               stat(test_path("board/tensorboard"), &info) != 0,
           "a new run leaves the old files aside");
}

static LogSummary summary_of(int64_t steps, double val_loss, double floor, double peak_mib) {
    const LogSummary end = {steps, val_loss, val_loss - 1, steps / 2, floor, 32, 250, peak_mib};
    return end;
}

// The loads of experts after each hundredth of a run; the losses of the sources that have targets.
TEST(parts) {
    const double tokens[2][3] = {{6, 2, 0.5}, {4, 4, 0.25}}, losses[3] = {8, 0, 3}, targets[3] = {4, 0, 2};
    DataSource sources[3] = {{.name = "web"}, {.name = "none"}, {.name = "a \"b\""}};
    const DataSources mixture = {.source = sources, .count = 3};
    RunLog log = open_log("parts", 0, 200);
    for (int step = 1; step <= 3; step++) {
        if (step == 1) {
            log_mixture(&log, (LogMixture){&mixture, losses, targets});
        }
        log_train(&log, step, 3, NAN, 1, NAN, 3e-4, 10, NAN);
        log_experts(&log, step, &tokens[0][0], 2, 2, 3);
    }
    log_close(&log);
    const char* jsonl = slurp(test_path("parts/log.jsonl"));
    EXPECT(count_of(jsonl, "\n") == 4, "%s", jsonl);
    EXPECT(json_is(line_of(jsonl, 0), "source_loss", "{\"web\":2,\"a \\\"b\\\"\":1.5},\"tokens\""), "%s",
           line_of(jsonl, 0));
    EXPECT(!strstr(line_of(jsonl, 1), "source_loss"), "%s", line_of(jsonl, 1));
    EXPECT(strcmp(line_of(jsonl, 2), "{\"kind\":\"experts\",\"step\":2,\"load\":[[1.5,0.5],[1,1]]}") == 0,
           "%s", line_of(jsonl, 2));
}

TEST(files) {
    const char text[] = "He said \"no\".\n\tThen\0 \x01 \xC3 \xE2\x82\xAC";
    RunLog log = open_log("files", 0, 1000);
    log_config(&log, print_options, "0.0003", who);
    say_val(&log, 0, 10.9876543, 1.23456789);
    log_data_wait(&log, 0.0125);
    log_divergence(&log, 0.75);
    log_train(&log, 1, 4.12345678, 0.12, 0.567812345, -0.31, 3e-4, 812.3, 0.412);
    EXPECT(!strstr(log.line, "load"), "no experts: %s", log.line);
    log_data_wait(&log, 0.5);
    log_routing(&log, 1.25, 1.953125);
    log_divergence(&log, NAN);
    log_train(&log, 2, NAN, NAN, INFINITY, NAN, 3e-4, 800, NAN);
    EXPECT(strstr(log.line, " | load 1.25, entropy 1.95 | "), "%s", log.line);
    log_skip(&log, 2, "it is \"bad\"", "sequence 3: a.bin tokens 0-7");
    log_sample(&log, 2, text, sizeof(text) - 1);
    log_save(&log, 2, "out/a\\b");
    log_summary(&log, summary_of(2, 3.14159265, 1.0833, 345.5));
    log_close(&log);

    const char* const kinds[] = {"config", "val", "train", "train", "skip", "sample", "save", "summary"};
    const char* jsonl = slurp(test_path("files/log.jsonl"));
    EXPECT(count_of(jsonl, "\n") == 8, "8 lines, found %d", count_of(jsonl, "\n"));
    for (int i = 0; i < 8; i++) {
        const char *line = line_of(jsonl, i), *end = value_end(line);
        char start[32];
        snprintf(start, sizeof(start), "{\"kind\":\"%s\",", kinds[i]);
        EXPECT(end && *end == '\0', "line %d is not JSON: %s", i, line);
        EXPECT(strncmp(line, start, strlen(start)) == 0, "line %d: %s", i, line);
    }
    EXPECT(
        json_is(
            line_of(jsonl, 0), "options",
            "{\"lr\":0.0003},\"command\":\"./train --steps 5 'a b'\",\"program\":\"train 1.0\",\"trainer\":"
            "\"CPU FP32\","),
        "config");
    EXPECT(json_is(line_of(jsonl, 0), "device", "\"2 threads\",\"time\":"), "config");
    EXPECT(number_of(line_of(jsonl, 1), "step") == 0, "the first evaluation is at step 0");
    EXPECT_NEAR(number_of(line_of(jsonl, 1), "loss"), 10.9876543, 1e-7, "digits of a loss");
    EXPECT_NEAR(number_of(line_of(jsonl, 1), "bpb"), 1.23456789, 1e-8, "bits per byte");
    EXPECT(number_of(line_of(jsonl, 1), "sequences") == 20 &&
               number_of(line_of(jsonl, 1), "all_sequences") == 75,
           "what it covers");
    const char* train = line_of(jsonl, 2);
    EXPECT(number_of(train, "step") == 1 && number_of(train, "ms") == 812.3, "%s", train);
    EXPECT_NEAR(number_of(train, "loss"), 4.12345678, 1e-8, "digits of a loss");
    EXPECT(number_of(train, "kl") == 0.75, "divergence: %s", train);
    EXPECT_NEAR(number_of(train, "norm"), 0.567812345, 1e-9, "digits of a norm");
    EXPECT_NEAR(number_of(train, "lr"), 3e-4, 1e-12, "learning rate");
    EXPECT_NEAR(number_of(train, "mfu"), 0.412, 1e-9, "a fraction");
    EXPECT_NEAR(number_of(train, "data_ms"), 12.5, 1e-6, "of this step");
    EXPECT_NEAR(number_of(train, "tok_per_s"), STEP_TOKENS / 0.8123, 1e-3, "of this step");
    EXPECT(number_of(train, "tokens") == STEP_TOKENS, "of all steps: %s", train);
    EXPECT_NEAR(number_of(train, "elapsed_s"), 0, 5, "since the log was opened");
    EXPECT_NEAR(number_of(train, "time"), (double)time(NULL), 5, "now");
    EXPECT(!strstr(train, "expert_load") && !strstr(train, "router_entropy"), "no experts: %s", train);
    const char* bad = line_of(jsonl, 3);
    EXPECT(number_of(bad, "expert_load") == 1.25 && number_of(bad, "router_entropy") == 1.953125, "%s", bad);
    EXPECT(!strstr(bad, "\"kl\""), "no teacher: %s", bad);
    EXPECT_NEAR(number_of(bad, "data_ms"), 487.5, 1e-6, "of this step alone");
    EXPECT(json_is(bad, "loss", "null,") && json_is(bad, "norm", "null,") && json_is(bad, "mfu", "null,"),
           "%s", bad);
    EXPECT(json_is(line_of(jsonl, 4), "reason",
                   "\"it is \\\"bad\\\"\",\"where\":\"sequence 3: a.bin tokens 0-7\"}"),
           "skip");
    EXPECT(json_is(line_of(jsonl, 5), "text",
                   "\"He said \\\"no\\\".\\n\\tThen\\u0000 \\u0001 \\ufffd \xE2\x82\xAC\"}"),
           "%s", line_of(jsonl, 5));
    EXPECT(json_is(line_of(jsonl, 6), "path", "\"out/a\\\\b\"}"), "save");
    const char* summary = line_of(jsonl, 7);
    EXPECT(number_of(summary, "steps") == 2 && number_of(summary, "peak_mb") == 345.5, "%s", summary);
    EXPECT_NEAR(number_of(summary, "val_loss"), 3.14159265, 1e-8, "summary");
    EXPECT_NEAR(number_of(summary, "best_val_loss"), 2.14159265, 1e-8, "summary");
    EXPECT(number_of(summary, "best_step") == 1, "summary");
    EXPECT_NEAR(number_of(summary, "floor"), 1.0833, 1e-9, "summary");
    EXPECT_NEAR(number_of(summary, "data_s"), 0.5, 1e-9, "all steps");
    EXPECT_NEAR(number_of(summary, "tok_per_s"), 2 * STEP_TOKENS / 1.6123, 1e-3, "all steps, their time");

    EXPECT(strcmp(slurp(test_path("files/main.log")), "s:0 tel:10.9877\n"
                                                      "s:1 trl:4.1235 lr:0.000300 norm:0.57\n"
                                                      "s:2 trl:nan lr:0.000300 norm:inf\n") == 0,
           "main.log is\n%s", slurp(test_path("files/main.log")));
    EXPECT(strstr(slurp(test_path("files.screen")), "val loss 10.9877 | 1.2346 bpb (20 of 75 sequences)\n"),
           "on the screen");
}

// Without a floor and an evaluation; and each line is in the file before the next call.
TEST(partial) {
    RunLog log = open_log("partial", 0, 10);
    say_val(&log, 0, 5, NAN);
    EXPECT(count_of(slurp(test_path("partial/log.jsonl")), "\n") == 1, "the line is in the file at once");
    EXPECT(count_of(slurp(test_path("partial/main.log")), "\n") == 1, "the line is in the file at once");
    log_summary(&log, summary_of(0, NAN, NAN, log_peak_mib()));
    log_close(&log);
    const char* summary = line_of(slurp(test_path("partial/log.jsonl")), 1);
    EXPECT(json_is(summary, "val_loss", "null,") && !strstr(summary, "floor"), "%s", summary);
    log = open_log("partial", 0, 10);
    log_close(&log);
    EXPECT(!slurp(test_path("partial/log.jsonl"))[0] && !slurp(test_path("partial/main.log"))[0],
           "a new run starts with empty files");
    EXPECT(count_of(slurp(test_path("partial/log.jsonl.1")), "\n") == 2,
           "those of the earlier run have another name");
    EXPECT(count_of(slurp(test_path("partial/main.log.1")), "\n") == 1,
           "those of the earlier run have another name");
    log = open_log("partial", 0, 10);
    say_val(&log, 0, 6, NAN);
    log_close(&log);
    EXPECT(access(test_path("partial/log.jsonl.2"), F_OK) != 0, "empty logs are not kept");
    log = open_log("partial", 0, 10);
    log_close(&log);
    EXPECT(count_of(slurp(test_path("partial/log.jsonl.2")), "\n") == 1, "the next number");
    log = open_log_in("", NULL);
    log_train(&log, 1, 4, 0, 1, 0, 1, 1, NAN);
    log_summary(&log, summary_of(1, NAN, NAN, 1));
    log_close(&log); // no directory, no screen: no file, no crash
}

// Each kind of task has its line, and so has one of a model that diverged.
TEST(task_lines) {
    const TaskShare none = {NAN, NAN}, half = {0.5, 0.1}, third = {0.25, 0.05};
    const TaskScore choice = {TASK_CHOICE, half, third, none, NAN, NAN, 12},
                    continuation = {TASK_CONTINUATION, half, none, none, 2, 3, 4},
                    text = {TASK_TEXT, none, none, none, NAN, NAN, 7};
    RunLog log = open_log("tasks", 0, 10);
    log_task(&log, 5, "choice", &choice);
    log_task(&log, 5, "con\"tinuation", &continuation);
    log_task(&log, 5, "text", &text);
    log_close(&log);
    const char* jsonl = slurp(test_path("tasks/log.jsonl"));
    EXPECT(
        strcmp(
            jsonl,
            "{\"kind\":\"task\",\"step\":5,\"name\":\"choice\",\"acc\":0.5,\"acc_err\":0.1,"
            "\"acc_norm\":0.25,\"acc_norm_err\":0.05,\"tokens\":12}\n"
            "{\"kind\":\"task\",\"step\":5,\"name\":\"con\\\"tinuation\",\"acc\":0.5,\"acc_err\":0.1,"
            "\"loss\":2,\"ppl\":7.3890561,\"bpb\":3,\"tokens\":4}\n"
            "{\"kind\":\"task\",\"step\":5,\"name\":\"text\",\"loss\":null,\"ppl\":null,\"tokens\":7}\n") ==
            0,
        "log.jsonl is\n%s", jsonl);
    EXPECT(strcmp(slurp(test_path("tasks/main.log")), "s:5 eval:0.2500\n") == 0, "main.log");
    const char* screen = slurp(test_path("tasks.screen"));
    EXPECT(strstr(screen, "step  5/10 | choice | acc 0.5000 +- 0.1000 | acc_norm 0.2500 +- 0.0500 | "
                          "12 tokens\n"),
           "%s", screen);
    EXPECT(strstr(screen, "acc 0.5000 +- 0.1000 | loss 2.0000 | perplexity 7.3891 | 3.0000 bpb | 4 tokens\n"),
           "%s", screen);
}

// A validation set with a name has a line of its own; the first one is also the validation.
TEST(set_lines) {
    const LogVal web = {"web", 1, 2, 0.5, 3, 4}, books = {"books", 0, 1.5, NAN, 5, 5};
    RunLog log = open_log("sets", 0, 10);
    log_val(&log, 5, &web);
    log_val(&log, 5, &books);
    log_close(&log);
    const char* jsonl = slurp(test_path("sets/log.jsonl"));
    EXPECT(strcmp(jsonl,
                  "{\"kind\":\"set\",\"step\":5,\"name\":\"web\",\"loss\":2,\"bpb\":0.5,\"sequences\":3,"
                  "\"all_sequences\":4}\n"
                  "{\"kind\":\"val\",\"step\":5,\"loss\":2,\"bpb\":0.5,\"sequences\":3,\"all_sequences\":4}\n"
                  "{\"kind\":\"set\",\"step\":5,\"name\":\"books\",\"loss\":1.5,\"sequences\":5,"
                  "\"all_sequences\":5}\n") == 0,
           "log.jsonl is\n%s", jsonl);
    EXPECT(strcmp(slurp(test_path("sets/main.log")), "s:5 tel:2.0000\n") == 0, "main.log");
    const char* screen = slurp(test_path("sets.screen"));
    EXPECT(strstr(screen, "val web loss 2.0000 | 0.5000 bpb (3 of 4 sequences)\n"), "%s", screen);
    EXPECT(strstr(screen, "val books loss 1.5000 (all 5 sequences)\n"), "%s", screen);
}

// A mixture of web, which gives 3 of 4 sequences, and books; both have 10 rows of 8 tokens.
static const DataSources* two_sources(void) {
    static DataSource source[2];
    static DataSources sources = {.source = source, .count = 2};
    const uint64_t weights[] = {3, 1};
    if (sources.order.count == 0) {
        source[0].name = strdup("web");
        source[1].name = strdup("books");
        source[0].rows.count = source[1].rows.count = 10;
        source[0].rows.tokens = source[1].rows.tokens = 80;
        source_order_open(&sources.order, 2);
        source_order_add(&sources.order, 0, weights);
    }
    return &sources;
}

TEST(sources) {
    RunLog log = open_log("sources", 0, 10);
    log_sources(&log, 5, two_sources(), 20);
    log_close(&log);
    const char* jsonl = slurp(test_path("sources/log.jsonl"));
    EXPECT(strcmp(jsonl, "{\"kind\":\"source\",\"step\":5,\"name\":\"web\",\"share\":0.75,\"tokens\":120,"
                         "\"epochs\":1.5}\n"
                         "{\"kind\":\"source\",\"step\":5,\"name\":\"books\",\"share\":0.25,\"tokens\":40,"
                         "\"epochs\":0.5}\n") == 0,
           "%s", jsonl);
    const char* screen = slurp(test_path("sources.screen"));
    EXPECT(strstr(screen, "step  5/10 | web 75 %, 1.5 epochs | books 25 %, 0.5 epochs\n"), "%s", screen);
}

// The trainer's loop from update `start` to `end`, ended as by a power failure unless that is the
// last one.
static void run_part(RunLog* log, int start, int end) {
    for (int step = start;; step++) {
        if (step % 2 == 0) {
            say_val(log, step, 5 - 0.1 * step, NAN);
            log_sources(log, step, two_sources(), (uint64_t)step);
        }
        if (step % 4 == 0) {
            const TaskScore score = {TASK_CHOICE, {0.5, 0}, {0.01 * step, 0}, {NAN, NAN}, NAN, NAN, 1};
            log_task(log, step, "one", &score);
            log_task(log, step, "two", &score);
            log_sample(log, step, "s:99 {\"kind\":\"val\",\"step\":99", 28);
            log_save(log, step, "ckpt");
        }
        if (step == end) {
            return;
        }
        log_train(log, step + 1, 5 - 0.1 * step, 0, 1, 0, 1e-3, 10 + step, NAN);
    }
}

// Cuts out what depends on the clock.
static char* without_times(char* text) {
    static const char* const keys[] = {",\"elapsed_s\":", ",\"time\":"};
    for (int i = 0; i < 2; i++) {
        for (char* at; (at = strstr(text, keys[i]));) {
            char* end = at + strcspn(at + 1, ",}") + 1;
            memmove(at, end, strlen(end) + 1);
        }
    }
    return text;
}

TEST(resume) {
    static char whole[1 << 16], whole_text[1 << 16];
    RunLog log = open_log("whole", 0, 12);
    log_config(&log, print_options, "1", who);
    run_part(&log, 0, 12);
    log_close(&log);
    strcpy(whole, without_times(slurp(test_path("whole/log.jsonl"))));
    strcpy(whole_text, slurp(test_path("whole/main.log")));

    log = open_log("parts", 0, 12);
    log_config(&log, print_options, "1", who);
    run_part(&log, 0, 7);
    fputs("{\"kind\":\"train\",\"step\":8,\"lo", log.json.file); // a torn line
    log_close(&log);
    for (int crash = 0; crash < 2; crash++) { // twice from step 4; the first time dies at once
        log = open_log("parts", 4, 12);
        log_config(&log, print_options, "2", who);
        run_part(&log, 4, crash == 0 ? 4 : 12);
        log_close(&log);
    }
    char* parts = without_times(slurp(test_path("parts/log.jsonl")));
    char* config = strstr(parts, "{\"kind\":\"config\",\"options\":{\"lr\":2},");
    EXPECT(config && number_of(strchr(config, '\n') + 1, "step") == 5, "the resumed run says its options");
    if (config) {
        const char* after = strchr(config, '\n') + 1;
        memmove(config, after, strlen(after) + 1);
    }
    EXPECT(strcmp(parts, whole) == 0, "resumed:\n%s\nuninterrupted:\n%s", parts, whole);
    EXPECT(strcmp(slurp(test_path("parts/main.log")), whole_text) == 0, "main.log of the resumed run:\n%s",
           slurp(test_path("parts/main.log")));

    // a finished run that continues: the curve knows what came before
    log = open_log("parts", 12, 20);
    CurvePoint points[LOG_BINS_];
    EXPECT(log_recall_(log.train, points) == 12 && points[11].step == 12, "training losses are read again");
    EXPECT_NEAR(points[11].loss, 5 - 0.1 * 11, 1e-6, "training losses are read again");
    EXPECT(log_recall_(log.val, points) == 7 && points[6].step == 12, "validation losses are read again");
    EXPECT(strcmp(slurp(test_path("parts/main.log")), whole_text) == 0, "and nothing is cut off");
    log_close(&log);
    log = open_log("torn", 0, 20);
    log_train(&log, 1, 4, 0, 1, 0, 1e-3, 1, NAN);
    fputs("{\"kind\":\"train\",\"step\":1", log.json.file); // the beginning of step 12
    log_close(&log);
    log = open_log("torn", 5, 20);
    log_close(&log);
    EXPECT(strlen(slurp(test_path("torn/log.jsonl"))) ==
               strcspn(slurp(test_path("torn/log.jsonl")), "\n") + 1,
           "a torn line is cut off: %s", slurp(test_path("torn/log.jsonl")));
    log = open_log("zero", 0, 20); // stopped after the first validation, and resumed
    say_val(&log, 0, 5, NAN);
    log_stop(&log, 0, "SIGTERM", "");
    log_close(&log);
    log = open_log_as("zero", LOG_CONTINUE, 0, 20);
    say_val(&log, 0, 5, NAN);
    log_close(&log);
    EXPECT(count_of(slurp(test_path("zero/log.jsonl")), "\n") == 1, "step 0 is kept, its stop is not: %s",
           slurp(test_path("zero/log.jsonl")));
    log = open_log("time", 0, 20); // the time of the run is the sum of its parts
    log.open_s -= 100;
    log_train(&log, 1, 4, 0, 1, 0, 1e-3, 1, NAN);
    log_close(&log);
    log = open_log("time", 1, 20);
    log_train(&log, 2, 4, 0, 1, 0, 1e-3, 1, NAN);
    log_close(&log);
    EXPECT_NEAR(number_of(line_of(slurp(test_path("time/log.jsonl")), 1), "elapsed_s"), 100, 5, "both parts");
    log = open_log("elsewhere", 12, 20); // resumes with no log to continue from
    run_part(&log, 12, 12);
    log_close(&log);
    EXPECT(count_of(slurp(test_path("elsewhere/log.jsonl")), "\n") == 7, "val, tasks, sample, save");
}

// ---- the screen ----

// A run that goes back has the log of one that never went there, and a line that says so; then it
// may resume.
TEST(rollback) {
    RunLog log = open_log("back", 0, 12);
    log_config(&log, print_options, "1", who);
    run_part(&log, 0, 7);
    log_rollback(&log, 7, 4, "because");
    CurvePoint points[LOG_BINS_];
    EXPECT(log_recall_(log.train, points) == 4, "the curve forgets, too");
    run_part(&log, 4, 12);
    log_close(&log);
    const char* line = "{\"kind\":\"rollback\",\"step\":4,\"from\":7,\"reason\":\"because\"}\n";
    char *text = slurp(test_path("back/log.jsonl")), *at = strstr(text, line);
    EXPECT(at && number_of(at + strlen(line), "step") == 5, "%s", text);
    EXPECT(count_of(text, "\"kind\":\"train\"") == 12, "%s", text);
    EXPECT(count_of(slurp(test_path("back/main.log")), "trl:") == 12, "%s",
           slurp(test_path("back/main.log")));
    log = open_log("back", 9, 12);
    log_stop(&log, 9, "SIGTERM", "; continue");
    log_close(&log);
    text = slurp(test_path("back/log.jsonl"));
    EXPECT(strstr(text, line) && count_of(text, "\"kind\":\"train\"") == 9, "resumed: %s", text);
    EXPECT(strstr(text, "{\"kind\":\"stop\",\"step\":9,\"reason\":\"SIGTERM\"}\n"), "%s", text);
    log = open_log_in("", NULL); // no files
    log_rollback(&log, 7, 4, "because");
    log_close(&log);
}

TEST(step_line) {
    RunLog log = open_log("line", 0, 1000);
    log_train(&log, 12, 4.12341, 0.123, 0.56783, -0.314, 3e-4, 812.3, 0.4118);
    log_divergence(&log, 0.25);
    log_train(&log, 1000, 1.5, NAN, 0.5, NAN, 3e-5, 812.3, NAN); // unknown values are left out
    log_close(&log);
    const char* screen = slurp(test_path("line.screen"));
    const char* want =
        "step   12/1000 | loss 4.1234 (+0.12z) | norm 0.5678 (-0.31z) | lr 3.00e-04 | 812.3 ms | "
        "41.2% MFU | 5042 tok/s | eta 13m23s";
    EXPECT(strcmp(line_of(screen, 0), want) == 0, "%s", line_of(screen, 0));
    want = "step 1000/1000 | loss 1.5000 | kl 0.2500 | norm 0.5000 | lr 3.00e-05 | 812.3 ms | 5042 tok/s | "
           "eta 0s";
    EXPECT(strcmp(line_of(screen, 1), want) == 0, "%s", line_of(screen, 1));
}

TEST(messages) {
    // 100 columns: 4 of indentation, 11 words, and their blanks
    const char* long_text =
        "12345678 12345678 12345678 12345678 12345678 12345678 12345678 12345678 12345678 12345678 "
        "123456 next";
    RunLog log = open_log("messages", 0, 50);
    say_val(&log, 0, 3.25, NAN);
    log_sample(&log, 10, "a\nb\x1b[2J", 7);
    log_sample(&log, 10,
               "\xC2\x9B"
               "31m\xC3\xA9\x9B\xE2\x82",
               10); // U+009B, e acute, and halves of characters
    log_sample(&log, 10, long_text, strlen(long_text));
    log_save(&log, 10, "out/step_10");
    log_skip(&log, 11, "why", "");
    log_close(&log);
    const char* screen = slurp(test_path("messages.screen"));
    EXPECT(strcmp(screen,
                  "step  0/50 | val loss 3.2500 (20 of 75 sequences)\n"
                  "step 10/50 | sample:\n    a\n    b?[2J\n"
                  "step 10/50 | sample:\n    ??31m\xC3\xA9???\n"
                  "step 10/50 | sample:\n    12345678 12345678 12345678 12345678 12345678 12345678 12345678 "
                  "12345678 12345678 12345678 123456\n    next\n"
                  "step 10/50 | saved out/step_10\n"
                  "step 11/50 | update skipped: why\n") == 0,
           "%s", screen);
}

static void train_fast(RunLog* log, int64_t steps) {
    for (int64_t step = 1; step <= steps; step++) {
        log_train(log, step, 4, 0, 1, 0, 1e-3, 0.1, NAN);
    }
}

// Into a file: the first and the last of many fast steps, and between them each hundredth of the
// run, but at most two a second, and one after half a minute.
TEST(rate) {
    RunLog log = open_log("rate", 0, 2000);
    const double start = time_now_s();
    train_fast(&log, 2000);
    const int max = 2 + (int)(2 * (time_now_s() - start));
    log.kept_step = 1960;
    log.shown_s -= 0.6; // as if time had passed
    log_train(&log, 1990, 4, 0, 1, 0, 1e-3, 0.1, NAN);
    log_train(&log, 1999, 4, 0, 1, 0, 1e-3, 0.1, NAN);
    log.shown_s -= LOG_SILENCE_S_;
    log_train(&log, 1998, 4, 0, 1, 0, 1e-3, 0.1, NAN);
    log_close(&log);
    const char* screen = slurp(test_path("rate.screen"));
    const int lines = count_of(screen, "\n");
    EXPECT(lines >= 4 && lines <= max + 2, "%d lines, wanted at most %d", lines, max + 2);
    EXPECT(strstr(screen, "step    1/2000") && strstr(screen, "step 2000/2000"), "first and last");
    EXPECT(strstr(screen, "1990/2000") && strstr(screen, "1998/2000"), "after a pause");
    EXPECT(!strstr(screen, "1999/2000"), "too soon");
    EXPECT(!strchr(screen, '\r') && !strchr(screen, '\033'), "nothing for terminals in a file");
    EXPECT(count_of(slurp(test_path("rate/log.jsonl")), "\n") == 2003, "the files have every step");
}

// --log-every N: its multiples, the first and the last step, on the screen, also a terminal, and in
// main.log.
TEST(every) {
    for (int is_terminal = 0; is_terminal < 2; is_terminal++) {
        RunLog log = open_log("every", 0, 200);
        log.is_terminal = is_terminal;
        log.every = 30;
        train_fast(&log, 200);
        log_close(&log);
        const char* screen = slurp(test_path("every.screen"));
        EXPECT(count_of(screen, "\n") == 8 && !strchr(screen, '\r'), "1, 30, 60 ... 180, 200: %s", screen);
        EXPECT(strstr(screen, "step  30/200") && strstr(screen, "step 180/200"), "%s", screen);
        EXPECT(count_of(slurp(test_path("every/main.log")), "\n") == 8, "%s",
               slurp(test_path("every/main.log")));
        EXPECT(count_of(slurp(test_path("every/log.jsonl")), "\n") == 200, "all steps");
    }
}

// A quiet run prints what it achieved and why it did not, and nothing else; its files have
// everything.
TEST(quiet) {
    const TaskScore score = {TASK_CHOICE, {0.5, 0.1}, {NAN, NAN}, {NAN, NAN}, NAN, NAN, 12};
    const LogSummary end = {10, 3, 2, 5, NAN, 8, 1, 2};
    FILE* screen = fopen(test_path("quiet.screen"), "w");
    const LogSettings settings = {test_path("quiet"), LOG_NEW, 0, 10, 1, 0, screen, 0, 0, 0, 1};
    RunLog log;
    log_open(&log, &settings);
    train_fast(&log, 10);
    say_val(&log, 10, 3, NAN);
    log_note(&log, "a note");
    log_sample(&log, 10, "text", 4);
    log_save(&log, 10, "path");
    log_task(&log, 10, "task", &score);
    log_skip(&log, 10, "why", "");
    log_summary(&log, end);
    log_close(&log);
    fclose(screen);
    const char* text = slurp(test_path("quiet.screen"));
    EXPECT(strncmp(text, "step 10/10 | task | acc 0.5000 +- 0.1000", 40) == 0, "%s", text);
    EXPECT(strcmp(line_of(text, 1), "step 10/10 | update skipped: why") == 0, "%s", text);
    EXPECT(strncmp(line_of(text, 2), "10 steps | ", 11) == 0 && count_of(text, "\n") == 3, "%s", text);
    EXPECT(count_of(slurp(test_path("quiet/log.jsonl")), "\n") == 16, "%s",
           slurp(test_path("quiet/log.jsonl")));
}

// On a terminal: fast steps rewrite one line, and the latest step stands above a message.
TEST(terminal) {
    RunLog log = open_log("terminal", 0, 2000);
    log.is_terminal = 1;
    const double start = time_now_s();
    train_fast(&log, 1000);
    const int max = 1 + (int)(10 * (time_now_s() - start));
    say_val(&log, 1000, 3, NAN);
    log_close(&log);
    const char* screen = slurp(test_path("terminal.screen"));
    EXPECT(count_of(screen, "\r") <= max + 1, "rewritten %d times", count_of(screen, "\r"));
    EXPECT(strncmp(screen, "step    1/2000", 14) == 0, "the first step has a line of its own");
    log = open_log("terminal", 0, 2000);
    log.is_terminal = 1;
    train_fast(&log, 1);
    log.shown_s -= 0.2;
    log_train(&log, 2, 4, 0, 1, 0, 1e-3, 0.1, NAN);
    log_train(&log, 3, 4, 0, 1, 0, 1e-3, 0.1, NAN); // too soon to show
    EXPECT(log.open_line == LOG_LINE_STEP_, "the line may be rewritten");
    say_val(&log, 3, 3, NAN);
    log_close(&log);
    screen = slurp(test_path("terminal.screen"));
    EXPECT(count_of(screen, "\n") == 3, "step 1, step 3, val:\n%s", screen);
    EXPECT(strncmp(line_of(screen, 1), "\033[?7lstep    2/2000", 19) == 0, "step 2 was shown: %s",
           line_of(screen, 1));
    EXPECT(strstr(screen, "\r\033[Kstep    3/2000") && strstr(screen, "s\nstep    3/2000 | val loss"),
           "step 3 was completed: %s", screen);
    const double ms[] = {150, 20e3};
    const int lines[] = {1 + 3 + 1, 60}; // the first, steps 21, 41 and 61 of 2000, and the last
    for (int i = 0; i < 2; i++) {
        log = open_log("terminal", 0, 2000);
        log.is_terminal = 1;
        for (int64_t step = 1; step <= 61 - i; step++) {
            log_train(&log, step, 4, 0, 1, 0, 1e-3, ms[i], NAN);
        }
        log_train(&log, 2000, 4, 0, 1, 0, 1e-3, ms[i], NAN);
        log_close(&log);
        const int found = count_of(slurp(test_path("terminal.screen")), "\n");
        EXPECT(found == lines[i] + i, "steps of %g ms: %d lines", ms[i], found);
    }
    log = open_log("terminal", 0, 2000);
    log.is_terminal = 1;
    log_progress(&log, 0, "validating", 0, 20);
    log.progress_s -= 1;
    log_progress(&log, 0, "validating", 7, 20);
    say_val(&log, 0, 3, NAN);
    log_close(&log);
    screen = slurp(test_path("terminal.screen"));
    EXPECT(strcmp(screen, "step    0/2000 | validating 7/20\r\033[Kstep    0/2000 | val loss 3.0000 (20 of "
                          "75 sequences)\n") == 0,
           "%s", screen);
}

TEST(is_terminal) {
    const int master = posix_openpt(O_RDWR | O_NOCTTY);
    if (master < 0 || grantpt(master) != 0 || unlockpt(master) != 0) {
        return; // no pseudo terminals here
    }
    FILE* slave = fopen(ptsname(master), "w");
    RunLog log;
    if (slave) {
        const struct winsize narrow = {24, 60, 0, 0};
        ioctl(master, TIOCSWINSZ, &narrow);
        log = open_log_in("", slave);
        EXPECT(log.is_terminal, "a terminal is recognized");
        log_train(&log, 1, 4.12341, 0.123, 0.56783, -0.314, 3e-4, 812.3, 0.4118);
        EXPECT(strcmp(log.line, "step  1/10 | loss 4.1234 | 812.3 ms | 1 tok/s | eta 7s") == 0,
               "a line is not wider than the terminal: %s", log.line);
        log_close(&log);
        fclose(slave);
    }
    close(master);
}

TEST(eta) {
    RunLog log = open_log("eta", 0, 1000);
    char text[64];
    log_time_(&log, 100);
    EXPECT_NEAR(log_eta_s_(&log, 1), 99.9, 1e-6, "after one step");
    for (int i = 0; i < 99; i++) {
        log_time_(&log, 100);
    }
    log.first_s = time_now_s() - 0.2 * 99; // half of the time went elsewhere
    EXPECT_NEAR(log_eta_s_(&log, 100), 180, 0.1, "samples count");
    log.eval_every = 300; // validations after 300, 600, 900 and 1000 steps
    log.val_s = 50;
    EXPECT_NEAR(log_eta_s_(&log, 100), 180 + 4 * 50, 0.1, "validations to come count");
    log.first_s -= 50; // one of them is over
    log.val_s_sum = 50;
    EXPECT_NEAR(log_eta_s_(&log, 300), 140 + 3 * 50, 0.1, "and those that were do not count twice");
    // the last 600 updates are three times as large
    log_tokens(&log, STEP_TOKENS, 300.0 * STEP_TOKENS, (100 + 3 * 600.0) * STEP_TOKENS);
    EXPECT_NEAR(log_eta_s_(&log, 300), 70 + 190 + 3 * 50, 0.1, "larger updates take longer");
    log_tokens(&log, STEP_TOKENS, 0, 0);
    log.eval_every = 0;
    log.val_s_sum = 0;
    log.first_s = time_now_s();
    for (int i = 0; i < 200; i++) {
        log_time_(&log, 10);
    }
    EXPECT_NEAR(log.smooth_ms, 10, 0.1, "the average forgets");
    log_time_(&log, 1000);
    EXPECT(log.smooth_ms < 70, "one slow step moves it little: %g", log.smooth_ms);
    EXPECT_NEAR(log_tok_per_s(&log), STEP_TOKENS * 301 / 13.0, 1e-6, "all steps");
    log_close(&log);
    const double seconds[] = {0, 45.2, 59.6, 730, 11100, 187200, 1e30};
    const char* const texts[] = {"0s", "45s", "1m00s", "12m10s", "3h05m", "2d04h", "11574074d01h"};
    for (int i = 0; i < 7; i++) {
        EXPECT(strcmp(log_duration(seconds[i], text), texts[i]) == 0, "%g s is %s", seconds[i], text);
    }
}

TEST(summary) {
    RunLog log = open_log("summary", 0, 5000);
    double sum = 0;
    for (int64_t step = 1; step <= 5000; step++) {
        log_train(&log, step, 1.2 + 4.8 * exp(-(double)step / 500), 0, 1, 0, 1e-3, 2, NAN);
        sum += 1.2 + 4.8 * exp(-(double)step / 500);
    }
    log_train(&log, 5000, NAN, 0, 1, 0, 1e-3, 2, NAN);
    CurvePoint points[LOG_BINS_];
    double total = 0, count = 0;
    const int n = log_recall_(log.train, points);
    for (int i = 0; i < n; i++) {
        total += points[i].loss * (double)log.train[i].count;
        count += (double)log.train[i].count;
        EXPECT(i == 0 || points[i].step > points[i - 1].step, "point %d is out of order", i);
    }
    EXPECT(n == LOG_BINS_ && count == 5000, "%d points of %g steps", n, count);
    EXPECT_NEAR(total, sum, 1e-6, "no loss is lost in averaging");
    log_summary(&log, summary_of(5000, 1.2345, 1.1, 300));
    log_close(&log);
    const char* screen = slurp(test_path("summary.screen"));
    EXPECT(strstr(screen, " floor 1.1000 "), "the curve is drawn:\n%s", screen);
    const char* picture = slurp(test_path("summary/curve.svg"));
    EXPECT(strncmp(picture, "<svg ", 5) == 0 && strstr(picture, "</svg>\n"), "and as a picture:\n%s",
           picture);
    screen = slurp(test_path("summary.screen"));
    // then the time, which is the machine's
    const char* summary = strstr(screen, "\n5000 steps | ");
    EXPECT(summary && strstr(summary, "s | val loss 1.2345 | best 0.2345 at step 2500 | floor 1.1000 | "
                                      "2048000 tok/s | 64000 sequences/s | "
                                      "peak memory 300 MiB, 250 of them planned\n"),
           "%s", screen);
}

// A picture that cannot be written is a warning; the logs of an earlier run keep theirs.
TEST(picture) {
    for (int start = 0; start < 3; start++) {
        RunLog log = open_log("picture", 0, 2);
        if (start == 2) {
            mkdir(test_path("picture/curve.svg"), 0777);
        }
        log_train(&log, 1, 5, 0, 1, 0, 1e-3, 2, NAN);
        log_train(&log, 2, 4 - start, 0, 1, 0, 1e-3, 2, NAN);
        log_summary(&log, summary_of(2, NAN, NAN, 1));
        log_close(&log);
        EXPECT(count_of(slurp(test_path("picture/log.jsonl")), "summary") == 1, "start %d", start);
    }
    EXPECT(slurp(test_path("picture/curve.svg.1"))[0] == '<', "the picture of the first run");
    EXPECT(slurp(test_path("picture/curve.svg.2"))[0] == '<', "the picture of the second run");
}

TEST(peak) {
    const double before = log_peak_mib();
    const size_t bytes = (size_t)64 << 20;
    volatile char* memory = (volatile char*)malloc(bytes);
    for (size_t i = 0; memory && i < bytes; i += 1024) {
        memory[i] = 1;
    }
    free((void*)memory);
    EXPECT(before > 0.1 && log_peak_mib() >= before + 40, "%g MiB, then %g MiB", before, log_peak_mib());
}

// ---- errors ----

static void open_in(const void* path) { open_log_in((const char*)path, NULL); }

// The disk is full for a file of the log.
static void write_to_full_file(const void* path) {
    const int full = open("/dev/full", O_WRONLY), is_text = strstr((const char*)path, LOG_TEXT) != NULL;
    char directory[PATH_MAX];
    RunLog log;
    file_directory_of(directory, (const char*)path);
    log = open_log_in(directory, NULL);
    dup2(full, fileno(is_text ? log.text.file : log.json.file));
    log_train(&log, 1, 4, 0, 1, 0, 1e-3, 1, NAN);
}

static void write_to_full_screen(const void* unused) {
    (void)unused;
    RunLog log;
    log = open_log_in("", fopen("/dev/full", "w"));
    say_val(&log, 0, 4, NAN);
}

TEST(errors) {
    test_write("file", "x", 1);
    EXPECT(test_dies(open_in, test_path("file/out"), EXIT_FAILURE,
                     "file/out: cannot make the directory|Not a dir"),
           "below a file");
    EXPECT(test_dies(open_in, test_path("file"), EXIT_FAILURE, "file/log.jsonl: cannot open: Not a dir"),
           "a file of that name");
    char longest[2000];
    memset(longest, 'a', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = '\0';
    EXPECT(test_dies(open_in, longest, EXIT_FAILURE, "longer than"), "a path too long");
    RunLog log;
    log = open_log_in(test_path("deep/er/still/"), NULL);
    log_close(&log);
    EXPECT(access(test_path("deep/er/still/log.jsonl"), R_OK) == 0, "parents are made");
    if (access("/dev/full", W_OK) != 0) {
        return; // only Linux has it
    }
    const char* const names[] = {"full/log.jsonl", "full2/main.log"};
    for (int i = 0; i < 2; i++) {
        char path[300], wanted[400];
        snprintf(path, sizeof(path), "%s", test_path(names[i]));
        snprintf(wanted, sizeof(wanted), "error: %s: cannot write: No space left", path);
        EXPECT(test_dies(write_to_full_file, path, EXIT_FAILURE, wanted), "a full disk at %s", names[i]);
    }
    EXPECT(
        test_dies(write_to_full_screen, NULL, EXIT_FAILURE, "standard output: cannot write: No space left"),
        "standard output on a full disk");
    // whose files tell everything
    log = open_log_in(test_path("no_screen"), fopen("/dev/full", "w"));
    say_val(&log, 0, 4, NAN);
    say_val(&log, 1, 4, NAN);
    log_close(&log);
    EXPECT(count_of(slurp(test_path("no_screen/log.jsonl")), "\n") == 2, "a run without a screen");
    EXPECT(mkdir(test_path("fifo"), 0777) == 0 && mkfifo(test_path("fifo/log.jsonl"), 0600) == 0, "a FIFO");
    EXPECT(test_dies(open_in, test_path("fifo"), EXIT_FAILURE, "fifo/log.jsonl: not a regular file"),
           "a FIFO");
}

// ---- logs that are links, or cannot be read ----

// A log of 8 updates in a directory, whose two files are put elsewhere and linked to.
static void make_linked_log(const char* directory) {
    const char* const names[] = {LOG_JSON, LOG_TEXT};
    RunLog log;
    log = open_log_as(directory, LOG_NEW, 0, 20);
    for (int step = 1; step <= 8; step++) {
        log_train(&log, step, 4, 0, 1, 0, 1e-3, 1, NAN);
    }
    log_close(&log);
    for (int i = 0; i < 2; i++) {
        char here[PATH_MAX], there[PATH_MAX];
        file_join(here, test_path(directory), names[i]);
        file_path(there, "%s.elsewhere", here);
        EXPECT(rename(here, there) == 0 && symlink(there, here) == 0, "%s", here);
    }
}

static int lines_of(const char* name) { return count_of(slurp(test_path(name)), "\n"); }

static int is_link(const char* name) {
    struct stat info;
    return lstat(test_path(name), &info) == 0 && S_ISLNK(info.st_mode);
}

// Nothing is cut where a link leads to: a new run puts the link aside, one that continues gets a
// file of its own.
TEST(links) {
    RunLog log;
    make_linked_log("linked");
    log = open_log_as("linked", LOG_CONTINUE, 5, 20);
    log_train(&log, 6, 4, 0, 1, 0, 1e-3, 1, NAN);
    log_close(&log);
    EXPECT(lines_of("linked/log.jsonl") == 6 && lines_of("linked/main.log") == 6, "continued");
    EXPECT(!is_link("linked/log.jsonl") && !is_link("linked/main.log"), "files of its own");
    EXPECT(lines_of("linked/log.jsonl.elsewhere") == 8 && lines_of("linked/main.log.elsewhere") == 8,
           "whole");
    make_linked_log("linked_2");
    log = open_log_as("linked_2", LOG_NEW, 0, 20);
    log_train(&log, 1, 4, 0, 1, 0, 1e-3, 1, NAN);
    log_close(&log);
    EXPECT(lines_of("linked_2/log.jsonl") == 1 && !is_link("linked_2/log.jsonl"), "a new log");
    EXPECT(lines_of("linked_2/log.jsonl.1") == 8 && is_link("linked_2/log.jsonl.1"), "the old one");
    EXPECT(lines_of("linked_2/main.log.1") == 8 && is_link("linked_2/main.log.1"), "the old one");
}

static void continue_in(const void* name) {
    RunLog log;
    log = open_log_as((const char*)name, LOG_CONTINUE, 5, 20);
    log_close(&log);
}

static void continue_without_descriptors(const void* name) {
    const struct rlimit none = {3, 3};
    setrlimit(RLIMIT_NOFILE, &none);
    continue_in(name);
}

// A log that cannot be read is an error, and none is cut: neither this one nor the other. A link to
// what is no log of the run is refused.
TEST(unreadable) {
    RunLog log;
    test_write("victim", "precious\n", 9);
    mkdir(test_path("hostile"), 0777);
    EXPECT(symlink("../victim", test_path("hostile/log.jsonl")) == 0, "a link");
    EXPECT(test_dies(continue_in, "hostile", EXIT_FAILURE, "hostile/log.jsonl: a symbolic link"), "");
    EXPECT(strcmp(slurp(test_path("victim")), "precious\n") == 0, "the victim");
    log = open_log_as("unreadable", LOG_NEW, 0, 20);
    for (int step = 1; step <= 8; step++) {
        log_train(&log, step, 4, 0, 1, 0, 1e-3, 1, NAN);
    }
    log_close(&log);
    EXPECT(test_dies(continue_without_descriptors, "unreadable", EXIT_FAILURE,
                     "unreadable/log.jsonl: cannot read: Too many open files"),
           "");
    EXPECT(lines_of("unreadable/log.jsonl") == 8 && lines_of("unreadable/main.log") == 8, "nothing is cut");
    if (access("/proc/self/mem", R_OK) == 0) { // a regular file whose first byte cannot be read
        unlink(test_path("unreadable/main.log"));
        EXPECT(symlink("/proc/self/mem", test_path("unreadable/main.log")) == 0, "a link");
        EXPECT(test_dies(continue_in, "unreadable", EXIT_FAILURE,
                         "unreadable/main.log: cannot read: Input/output error"),
               "");
        EXPECT(lines_of("unreadable/log.jsonl") == 8, "nothing is cut");
    }
}
