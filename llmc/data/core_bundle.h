/*
core_bundle.h -- reads which tasks DCLM's CORE has, from the two tables of its bundle:

    core.yaml             icl_tasks:
                          -
                            label: jeopardy
                            dataset_uri: world_knowledge/jeopardy_all.jsonl    in eval_data/
                            num_fewshot: [10]
                            icl_task_type: language_modeling    or multiple_choice, schema
                            continuation_delimiter: "\nAnswer: "    a blank without it
    eval_meta_data.csv    Eval Task,...,Random baseline,...    in percent

Of YAML this reads that list only: comments, keys that a task may have, and texts that are plain or
in quotes. Of a table it reads these two columns, found by their names. Everything else ends the
program, with file and line.
*/
#ifndef LLMC_CORE_BUNDLE_H
#define LLMC_CORE_BUNDLE_H

#include <limits.h>
#include <stddef.h>

#include "llmc/base/file_list.h"
#include "llmc/data/task_records.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    char *label, *file; // file: below the bundle's eval_data
    char* delimiter;    // between a context and its ending
    size_t shots;       // examples before the one that is asked
    TaskForm form;
    double baseline; // accuracy of guessing
    int line;        // in core.yaml
} CoreTask;

typedef struct {
    CoreTask* tasks;
    int count;
} CoreBundle;

void core_bundle_open(CoreBundle* bundle, const char* directory);

void core_bundle_close(CoreBundle* bundle);

// Sets path to the file of a task.
void core_bundle_path(char path[PATH_MAX], const char* directory, const CoreTask* task);

// Adds the files of the bundle in a directory: its tables, and its tasks.
void core_bundle_list_files(FileList* files, const char* option, const char* directory);

#ifdef __cplusplus
}
#endif

#ifdef CORE_BUNDLE_IMPLEMENTATION

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/python_random.h"

enum { CORE_MAX_BYTES_ = 1 << 24, CORE_COLUMNS_ = 64 };

static char* core_copy_(const char* text) {
    char* copy = strdup(text);
    CHECK(copy, "%s: no memory", text);
    return copy;
}

// Reads a text file whole; ends the program if it cannot.
static char* core_read_(const char* path) {
    char *text, error[ERROR_BYTES];
    size_t bytes;
    CHECK(byte_order_text(path, CORE_MAX_BYTES_, &text, &bytes, error), "%s", error);
    CHECK(strlen(text) == bytes, "%s: a zero byte, wanted text", path);
    return text;
}

// ---- core.yaml ----

// A place in core.yaml.
typedef struct {
    const char* path;
    int line;
    size_t dash, keys; // columns of the dashes, and of the keys of the current task
} CoreYaml_;

// Ends the program at the current line.
#define CORE_CHECK_(yaml, ok, format, ...)                                                                   \
    CHECK(ok, "%s:%d: " format, (yaml)->path, (yaml)->line, __VA_ARGS__)

static int core_is_comment_(const char* text) {
    text += strspn(text, " ");
    return !*text || *text == '#';
}

// Returns the character that \c means in double quotes, 0 if none.
static char core_escape_(char c) {
    return c == 'n' ? '\n' : c == 't' ? '\t' : c == '"' || c == '\\' ? c : '\0';
}

// Decodes a text in quotes in place. Returns what follows it.
static char* core_unquote_(const CoreYaml_* yaml, char* text) {
    const char quote = *text;
    char *in = text + 1, *out = text;
    for (; *in && (*in != quote || (quote == '\'' && in[1] == quote)); in++) {
        if (quote == '"' && *in == '\\') {
            in++;
            CORE_CHECK_(yaml, core_escape_(*in), "found \\%.1s, wanted \\n, \\t, \\\" or \\\\", in);
            *out++ = core_escape_(*in);
            continue;
        }
        in += *in == quote; // of two, one remains
        *out++ = *in;
    }
    CORE_CHECK_(yaml, *in, "a text without its closing %c", quote);
    *out = '\0';
    return in + 1;
}

// Decodes a value in place: a text, plain or in quotes.
static char* core_value_(const CoreYaml_* yaml, const char* key, char* text) {
    CORE_CHECK_(yaml, *text, "%s has no value", key);
    if (*text == '"' || *text == '\'') {
        const char* rest = core_unquote_(yaml, text);
        CORE_CHECK_(yaml, core_is_comment_(rest), "found \"%s\" after a text, wanted the end of the line",
                    rest);
        return text;
    }
    char* comment = strstr(text, " #");
    if (comment) {
        *comment = '\0';
    }
    for (size_t n = strlen(text); n > 0 && text[n - 1] == ' '; n--) {
        text[n - 1] = '\0';
    }
    CORE_CHECK_(yaml, !strchr("&*!|>%@`{}[],?#", *text) && !strstr(text, ": "),
                "found \"%s\", wanted a text: in quotes, if it is no plain word", text);
    return text;
}

// Reads "[10]".
static size_t core_shots_(const CoreYaml_* yaml, const char* text) {
    unsigned shots = 0;
    int end = 0;
    const int read = sscanf(text, "[%3u ]%n", &shots, &end);
    CORE_CHECK_(yaml, read == 1 && end > 0 && core_is_comment_(text + end) && shots <= PYTHON_SAMPLE_MAX,
                "num_fewshot is \"%s\", wanted one number in brackets, up to %d", text, PYTHON_SAMPLE_MAX);
    return shots;
}

static TaskForm core_form_(const CoreYaml_* yaml, const char* type) {
    static const char* const types[TASK_FORMS] = {[TASK_QUERIES] = "multiple_choice",
                                                  [TASK_SCHEMA] = "schema",
                                                  [TASK_CONTINUATIONS] = "language_modeling"};
    int form = 0;
    while (form < TASK_FORMS && (!types[form] || strcmp(types[form], type) != 0)) {
        form++;
    }
    CORE_CHECK_(yaml, form < TASK_FORMS,
                "icl_task_type is \"%s\", wanted multiple_choice, schema or language_modeling", type);
    return (TaskForm)form;
}

// Sets a text of a task, which must not have it yet.
static void core_set_(const CoreYaml_* yaml, const char* key, char** member, char* text) {
    CORE_CHECK_(yaml, !*member, "%s for the second time", key);
    *member = core_copy_(core_value_(yaml, key, text));
}

static void core_read_key_(const CoreYaml_* yaml, CoreTask* task, const char* key, char* text) {
    if (strcmp(key, "label") == 0) {
        core_set_(yaml, key, &task->label, text);
    } else if (strcmp(key, "dataset_uri") == 0) {
        core_set_(yaml, key, &task->file, text);
    } else if (strcmp(key, "continuation_delimiter") == 0) {
        core_set_(yaml, key, &task->delimiter, text);
    } else if (strcmp(key, "num_fewshot") == 0) {
        CORE_CHECK_(yaml, task->shots == SIZE_MAX, "%s for the second time", key);
        task->shots = core_shots_(yaml, text);
    } else if (strcmp(key, "icl_task_type") == 0) {
        CORE_CHECK_(yaml, task->form == TASK_FORMS, "%s for the second time", key);
        task->form = core_form_(yaml, core_value_(yaml, key, text));
    } else {
        CORE_CHECK_(yaml, strcmp(key, "has_categories") == 0,
                    "found the key \"%s\", wanted label, dataset_uri, num_fewshot, icl_task_type, "
                    "continuation_delimiter or has_categories",
                    key);
    }
}

// Reads "key: value" at column `column` of a line, in the current task.
static void core_read_pair_(CoreYaml_* yaml, CoreBundle* bundle, char* line, size_t column) {
    char *key = line + column, *colon = key + strspn(key, "abcdefghijklmnopqrstuvwxyz_");
    CORE_CHECK_(yaml,
                bundle->count > 0 && column > yaml->dash && colon > key && *colon == ':' &&
                    (!colon[1] || colon[1] == ' '),
                "found \"%s\", wanted a task: \"-\", then \"key: value\" further to the right", line);
    yaml->keys = yaml->keys ? yaml->keys : column;
    CORE_CHECK_(yaml, column == yaml->keys, "%zu blanks before \"%s\", wanted %zu as on the lines before",
                column, key, yaml->keys);
    *colon = '\0';
    core_read_key_(yaml, &bundle->tasks[bundle->count - 1], key, colon + 1 + strspn(colon + 1, " "));
}

static void core_bundle_add_(const CoreYaml_* yaml, CoreBundle* bundle) {
    const CoreTask none = {.shots = SIZE_MAX, .form = TASK_FORMS, .baseline = NAN, .line = yaml->line};
    bundle->tasks =
        (CoreTask*)check_grow(bundle->tasks, (size_t)bundle->count, sizeof(CoreTask), "tasks of CORE");
    bundle->tasks[bundle->count++] = none;
}

// Reads a line below "icl_tasks:".
static void core_read_line_(CoreYaml_* yaml, CoreBundle* bundle, char* line) {
    size_t column = strspn(line, " ");
    if (line[column] == '-' && (!line[column + 1] || line[column + 1] == ' ')) {
        CORE_CHECK_(yaml, bundle->count == 0 || column == yaml->dash,
                    "%zu blanks before \"-\", wanted %zu as before the first", column, yaml->dash);
        core_bundle_add_(yaml, bundle);
        yaml->dash = column;
        yaml->keys = 0;
        column += 1 + strspn(line + column + 1, " ");
        if (core_is_comment_(line + column)) {
            return;
        }
    }
    core_read_pair_(yaml, bundle, line, column);
}

// Ends the program if a task lacks something, or has another one's label.
static void core_check_task_(const CoreYaml_* yaml, CoreBundle* bundle, int which) {
    CoreTask* task = &bundle->tasks[which];
    const char* missing = !task->label               ? "label"
                          : !task->file              ? "dataset_uri"
                          : task->shots == SIZE_MAX  ? "num_fewshot"
                          : task->form == TASK_FORMS ? "icl_task_type"
                                                     : NULL;
    CHECK(!missing, "%s:%d: a task without %s", yaml->path, task->line, missing);
    for (int i = 0; i < which; i++) {
        CHECK(strcmp(bundle->tasks[i].label, task->label) != 0, "%s:%d: a second task %s", yaml->path,
              task->line, task->label);
    }
    task->delimiter = task->delimiter ? task->delimiter : core_copy_(" ");
}

static void core_read_yaml_(CoreBundle* bundle, const char* path) {
    CoreYaml_ yaml = {path, 0, 0, 0};
    char *text = core_read_(path), *next = text, *line;
    int has_list = 0;
    while ((line = strsep(&next, "\n")) != NULL) {
        yaml.line++;
        line[strcspn(line, "\r")] = '\0';
        if (core_is_comment_(line)) {
            continue;
        }
        if (has_list) {
            core_read_line_(&yaml, bundle, line);
            continue;
        }
        CORE_CHECK_(&yaml, strncmp(line, "icl_tasks:", 10) == 0 && core_is_comment_(line + 10),
                    "found \"%s\", wanted \"icl_tasks:\"", line);
        has_list = 1;
    }
    CHECK(bundle->count > 0, "%s: no tasks", path);
    for (int i = 0; i < bundle->count; i++) {
        core_check_task_(&yaml, bundle, i);
    }
    free(text);
}

// ---- eval_meta_data.csv ----

// Decodes the field at *next in place, and moves *next to the next one. Returns NULL at the end of
// the row; then *next is the next row, or NULL. Counts the lines.
static char* core_field_(char** next, int* has_more, int* line) {
    char *field = *next, *in = field, *out = field;
    int is_quoted = 0;
    if (!*has_more) {
        return NULL;
    }
    for (; *in && (is_quoted || (*in != ',' && *in != '\n')); in++) {
        *line += *in == '\n';
        if (*in == '"' && !(is_quoted && in[1] == '"')) {
            is_quoted = !is_quoted;
            continue;
        }
        in += *in == '"';
        *out++ = *in;
    }
    *has_more = *in == ',';
    *line += *in == '\n';
    *next = *in ? in + 1 : in;
    out -= out > field && out[-1] == '\r';
    *out = '\0';
    return field;
}

// Splits the row at *next. Returns the number of fields.
static int core_row_(char** next, char* fields[CORE_COLUMNS_], int* line) {
    int count = 0, has_more = 1;
    char* field;
    while ((field = core_field_(next, &has_more, line)) != NULL) {
        if (count < CORE_COLUMNS_) {
            fields[count++] = field;
        }
    }
    return count;
}

// Returns the column of this name.
static int core_column_(char* const* fields, int count, const char* name, const char* path) {
    int i = 0;
    while (i < count && strcmp(fields[i], name) != 0) {
        i++;
    }
    CHECK(i < count, "%s:1: no column \"%s\"", path, name);
    return i;
}

// Sets the baseline of the tasks with this label, if any.
static void core_set_baseline_(CoreBundle* bundle, const char* label, const char* percent, const char* path,
                               int line) {
    char* end;
    const double value = strtod(percent, &end);
    for (int i = 0; i < bundle->count; i++) {
        if (strcmp(bundle->tasks[i].label, label) == 0) {
            CHECK(end > percent && !*end && value >= 0 && value < 100,
                  "%s:%d: the random baseline of %s is \"%s\", wanted a number of percent below 100", path,
                  line, label, percent);
            bundle->tasks[i].baseline = 0.01 * value;
        }
    }
}

static void core_read_csv_(CoreBundle* bundle, const char* path) {
    char *text = core_read_(path), *next = text, *fields[CORE_COLUMNS_];
    int line = 1, columns = core_row_(&next, fields, &line);
    const int label = core_column_(fields, columns, "Eval Task", path),
              baseline = core_column_(fields, columns, "Random baseline", path);
    while (*next) {
        const int first = line, count = core_row_(&next, fields, &line);
        if (count == 1 && !fields[0][0]) {
            continue; // an empty line
        }
        CHECK(count == columns, "%s:%d: %d fields, wanted %d as on line 1", path, first, count, columns);
        core_set_baseline_(bundle, fields[label], fields[baseline], path, first);
    }
    free(text);
}

// ---- the bundle ----

#define CORE_YAML_ "core.yaml"
#define CORE_CSV_ "eval_meta_data.csv"

void core_bundle_open(CoreBundle* bundle, const char* directory) {
    char yaml[PATH_MAX], csv[PATH_MAX];
    memset(bundle, 0, sizeof(*bundle));
    file_join(yaml, directory, CORE_YAML_);
    file_join(csv, directory, CORE_CSV_);
    core_read_yaml_(bundle, yaml);
    core_read_csv_(bundle, csv);
    for (int i = 0; i < bundle->count; i++) {
        const CoreTask* task = &bundle->tasks[i];
        CHECK(isfinite(task->baseline), "%s: no line about %s, a task of %s:%d", csv, task->label, yaml,
              task->line);
    }
}

void core_bundle_close(CoreBundle* bundle) {
    for (int i = 0; i < bundle->count; i++) {
        free(bundle->tasks[i].label);
        free(bundle->tasks[i].file);
        free(bundle->tasks[i].delimiter);
    }
    free(bundle->tasks);
    memset(bundle, 0, sizeof(*bundle));
}

void core_bundle_path(char path[PATH_MAX], const char* directory, const CoreTask* task) {
    file_path(path, "%s/eval_data/%s", directory, task->file);
}

void core_bundle_list_files(FileList* files, const char* option, const char* directory) {
    CoreBundle bundle;
    char path[PATH_MAX];
    core_bundle_open(&bundle, directory);
    file_list_add_in(files, option, directory, CORE_YAML_);
    file_list_add_in(files, option, directory, CORE_CSV_);
    for (int i = 0; i < bundle.count; i++) {
        core_bundle_path(path, directory, &bundle.tasks[i]);
        file_list_add(files, option, path);
    }
    core_bundle_close(&bundle);
}

#endif // CORE_BUNDLE_IMPLEMENTATION

#endif
