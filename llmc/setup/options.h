/*
options.h -- the command line: one table of rows; every use of it is a loop over the rows.

The parser, --help, the start-up banner, --print-config and the JSON of the log header all come from
OPTION_TABLE (options_table.h). To add an option, add one field to Options and one row to the table.

Options are written `--name value` or `--name=value`, or by alias, `-b value` (llm.c's letters, so
that its run scripts work). If an option accepts any text, the next word is its value, even if it
starts with a dash, unless it is the name of an option. For other options, a value that starts like
an option needs the equals sign. An option that is unknown, malformed, out of range or without its
value ends the program with status 2 before any work. So does an empty path, which usually comes
from an unset variable of the shell. Of an option that is given several times the last value counts.

--config names a file with more settings (options_config.h), which count as given; the command line
wins.

A program with its own options defines OPTION_TABLE_FILE, a file like options_table.h, and
OPTION_ARGUMENTS, the help text for other arguments, before it includes this file
(dev/data/tokenize.c). Its table has the rows `config` and `help`.

An option with the value "auto" holds OPTION_AUTO; settle() decides it, in a copy (settled.h).
*/
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "llmc/setup/options_names.h"

#ifdef __cplusplus
extern "C" {
#endif

#define OPTION_AUTO (-1)            // value of an option that is "auto"
#define OPTION_ROWS_MAX 192         // maximum number of rows
#define OPTION_UNLIMITED 1000000000 // more tokens, steps or files than this is a typo
#define OPTION_TEXT_BYTES 64        // longest number, word or range, with its zero

#ifdef GIT_COMMIT // the Makefile defines it for programs
#define LLMC_VERSION "0.1.0 (" GIT_COMMIT ")"
#else
#define LLMC_VERSION "0.1.0"
#endif

// The program that reads the options: its version, and OPTION_CPU or OPTION_GPU for rows that only
// one trainer has.
typedef struct {
    int trainer;
    const char* version;
} OptionsProgram;

static inline OptionsProgram options_program(int trainer) {
    const OptionsProgram program = {trainer, LLMC_VERSION};
    return program;
}

typedef enum {
    OPTION_INT,    // int
    OPTION_COUNT,  // int64_t
    OPTION_SEED,   // uint64_t, any
    OPTION_FLOAT,  // float
    OPTION_SWITCH, // int, 0 or 1, written off or on (or 0 or 1)
    OPTION_CHOICE, // int, the index of the word in the row's list; a word can be a number
    OPTION_STRING, // const char *, pointing into argv; never NULL
    // OptionList, strings that point into argv; the option may be given several times
    OPTION_LIST,
    // int, 1 if given; an action, not a setting: it has no value, but may have a word that comes
    // after "off|on" in its list, and is its index then
    OPTION_FLAG
} OptionType;

enum { OPTION_LIST_MAX = 16 };
typedef struct {
    int count;
    const char* text[OPTION_LIST_MAX];
} OptionList;

// Flags of a row. An option counts in training only, unless OPTION_TEXTS or OPTION_BOTH says
// otherwise.
enum {
    AUTO_ = 1,               // may be "auto"
    MINUS_1_ = 2,            // -1 means auto, as in llm.c
    ABOVE_ = 4,              // must be above its minimum
    BELOW_ = 8,              // must be below its maximum
    OPTION_CPU = 16,         // only the CPU trainer has it
    OPTION_GPU = 32,         // only the GPU trainer has it
    OPTION_CHANGES_RUN = 64, // defines the run: resuming with another value needs --override
    OPTION_NOT_SAVED = 128,  // for one start of the program: a resumed run does not inherit it
    OPTION_TEXTS = 256,      // counts only if the program generates text (options_generate_)
    OPTION_BOTH = 512,       // counts in training and in generation
    OPTION_READS = 1024,     // names files that are read (OptionFiles)
    OPTION_WRITES = 4096,    // names files that are written
    OPTION_EACH = 8192,      // the ranks of a run may have different values
    // only on the command line: not in files, nor in commands that repeat a run
    OPTION_LINE = 16384,
    OPTION_FOLLOWS = 32768, // its auto follows from options in the banner, which omits this one
    // lowest bit of what the option needs (OptionNeed of the trainers' table); 0: nothing
    OPTION_NEED_BIT = 16,
    OPTION_NEED_BITS = 8,
    OPTION_FILES_BIT = 24,  // lowest bit of OptionFiles, which has 4
    OPTION_BASIC = 1 << 28, // in --help basic
    OPTION_WORK = 1 << 29,  // asks for more or other work than training, so --find-lr refuses it
};

// Files that an option names, if it reads or writes any (option_files.h).
typedef enum {
    FILES_NONE,
    FILES_ONE,       // a file
    FILES_PATTERNS,  // patterns of files (token_files.h)
    FILES_DATA,      // the same, perhaps with names and weights (mixture.h)
    FILES_TOKENIZER, // a tokenizer: its file or directory (bpe_files.h)
    FILES_MODEL,     // a model: its file or directory (hf_model.h), or the directory of its run
    FILES_ADAPTER,   // the directory of an adapter (hf_adapter.h), or of its run
    FILES_RUNS,      // directories of runs, or their logs (log_reader.h)
    FILES_PREFIX,    // files whose names start with it
    FILES_SCRATCH    // a directory for temporary files
} OptionFiles;

typedef struct {
    const char *group, *name;
    const char* alias; // one or two letters; "" if it has none
    OptionType type;
    size_t offset;        // offset of its field in Options
    double min, max;      // bounds of a number
    int flags;            // AUTO_ and so on
    const char* fallback; // default, as the command line and the banner write it
    // unit of a number; words of a choice, "zero|one|two"; or kind of string, "FILE"
    const char* unit;
    const char* help;
} OptionRow;

static inline OptionFiles option_files(const OptionRow* row) {
    return (OptionFiles)(row->flags >> OPTION_FILES_BIT & 15);
}

// The options of a program. Every program's struct has `program`, `given`, `help` and `version`.
typedef struct Options Options;

#ifndef OPTION_TABLE_FILE
#define OPTION_TABLE_FILE "llmc/setup/options_table.h"
#endif
#include OPTION_TABLE_FILE

extern const OptionRow OPTION_TABLE[];
extern const int OPTION_ROWS; // number of rows in OPTION_TABLE

// Returns true if this trainer has the option.
int option_applies(const Options* options, const OptionRow* row);

// Returns true if the option matters for what the program does: training or generating text.
int option_counts(const Options* options, const OptionRow* row);

// ---- parsing ----

// Returns the row named by the first `length` bytes of arg, dashes included; NULL if unknown.
const OptionRow* option_find(const char* arg, size_t length);

// Returns the row of an option that earlier versions had, without dashes (options_removed.h); NULL
// if none had it.
const RemovedOption* option_removed(const char* name, size_t length);

// ---- printing ----

// Sets `text` to the program's name, its version and its compiler.
void options_version(char* text, size_t room, const Options* options, const char* name);

enum { OPTION_WANTED_WIDTH = 30, OPTION_WORDS_WIDTH = 84, OPTION_HELP_COLUMN = 65, OPTION_HELP_WIDTH = 45 };

void options_print_help(FILE* file, const Options* options, const char* program);

// Prints the part of the help about a group of options or one option. Ends the program if `topic`
// is neither.
void options_print_help_on(FILE* file, const Options* options, const char* topic);

// Marks the options of OPTION_FOLLOWS that are "auto". Call it before they are decided.
void options_mark_following(Options* options);

// Marks an option that can have only one value here, so that the banner omits it.
void options_mark_fixed(Options* options, const char* name);

// Prints a command line that repeats this run and can be pasted back: the program and every option
// that is not at its default, even if it was "auto" and has been decided, except OPTION_FOLLOWS.
void options_print_banner(FILE* file, const Options* options, const char* program);

// Prints the settings that come from the recipe of --model on one line, without those that settle()
// has dropped; nothing if the model has no recipe.
void options_print_recipe(FILE* file, const Options* options);

// Prints an option as a part of a command that can be pasted.
void options_print_setting(FILE* file, const Options* options, const char* name);

// Prints every setting, one `name = value` per line, in groups. --config reads it back.
void options_print_config(FILE* file, const Options* options);

// Prints every setting as one JSON object, without a newline: numbers as numbers, "auto" as null,
// switches as true or false, the rest as strings (json_print_bytes, because names of files may not
// be UTF-8).
void options_print_json(FILE* file, const Options* options);

// ---- the whole ----

// Sets every option to its default, which may come from the recipe of --model, then to its value in
// the file of --config, then to that on the command line. --help and --version print and end the
// program. The strings point into argv and the text of the file, which options_close frees. Sets
// `arguments` (argc) to the arguments that are not options or that follow --, and returns their
// number. NULL means that none are allowed.
int options_parse_arguments(Options* options, int argc, char** argv, OptionsProgram program,
                            const char** arguments);

void options_parse(Options* options, int argc, char** argv, OptionsProgram program);

void options_close(Options* options);

// Returns true if the option was on the command line or in the file of --config. `name` is the long
// name without dashes.
int options_given(const Options* options, const char* name);

// Prints a line for each option that was on the command line several times.
void options_note_repeated(FILE* file, const Options* options);

// Returns true if the option's value is not its default.
int options_changed(const Options* options, const char* name);

#ifdef __cplusplus
}
#endif

#ifdef OPTIONS_IMPLEMENTATION

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/printable.h"
#include "llmc/base/shell_word.h"
#include "llmc/tokenizer/unicode_tables.h"
#include "llmc/setup/options_config.h"
#include "llmc/setup/options_values.h"
#include "llmc/log/text_wrap.h"

enum { OPTION_AGAIN_ = 2 }; // in `given`: several times on the command line

// Type and offset of a row. A field of another C type does not compile: the comparison is never
// evaluated.
#define OPTION_AT_(ctype, field)                                                                             \
    (offsetof(Options, field) + 0 * sizeof((const ctype*)0 == &((const Options*)0)->field))
#define INT_(field) OPTION_INT, OPTION_AT_(int, field)
#define COUNT_(field) OPTION_COUNT, OPTION_AT_(int64_t, field)
#define SEED_(field) OPTION_SEED, OPTION_AT_(uint64_t, field)
#define FLOAT_(field) OPTION_FLOAT, OPTION_AT_(float, field)
#define SWITCH_(field) OPTION_SWITCH, OPTION_AT_(int, field)
#define CHOICE_(field) OPTION_CHOICE, OPTION_AT_(int, field)
#define STRING_(field) OPTION_STRING, OPTION_AT_(char* const, field)
#define LIST_(field) OPTION_LIST, OPTION_AT_(OptionList, field)
#define FLAG_(field) OPTION_FLAG, OPTION_AT_(int, field)
// Short names of flags for the table.
#define CPU_ OPTION_CPU
#define GPU_ OPTION_GPU
#define RUN_ OPTION_CHANGES_RUN
#define ONCE_ OPTION_NOT_SAVED
#define TEXTS_ OPTION_TEXTS
#define BOTH_ OPTION_BOTH
#define READS_(files) (OPTION_READS | FILES_##files << OPTION_FILES_BIT)
#define WRITES_(files) (OPTION_WRITES | FILES_##files << OPTION_FILES_BIT)
#define EACH_ OPTION_EACH
#define LINE_ OPTION_LINE
#define FOLLOWS_ OPTION_FOLLOWS
#define BASIC_ OPTION_BASIC
#define WORK_ OPTION_WORK
#define MANY_ OPTION_UNLIMITED
#define NEEDS_(name) (NEED_##name << OPTION_NEED_BIT)

#define OPTION_TABLE_ROWS_
// the table, OPTION_SYNONYMS, OPTION_REMOVED, option_counts, option_default_, option_may_be_empty_,
// options_decide_
#include OPTION_TABLE_FILE

const int OPTION_ROWS = sizeof(OPTION_TABLE) / sizeof(OPTION_TABLE[0]);
static_assert(sizeof(OPTION_TABLE) / sizeof(OPTION_TABLE[0]) <= OPTION_ROWS_MAX, "enlarge OPTION_ROWS_MAX");

#ifndef OPTION_EXAMPLES
#define OPTION_EXAMPLES "" // command lines to start with, for --help
#endif
#ifndef OPTION_BASICS
#define OPTION_BASICS "" // what --help basic prints, if the table has OPTION_BASIC
#endif
#ifndef OPTION_ARGUMENTS
#define OPTION_ARGUMENTS "" // arguments besides options, for --help
#endif

int option_applies(const Options* options, const OptionRow* row) {
    return !(row->flags & (OPTION_CPU | OPTION_GPU)) || (row->flags & options->program.trainer);
}

// ---- parsing ----

// Returns true if the argument is an option and not a value. A single dash and a negative number
// are values.
static int option_is_name_(const char* arg) {
    return arg[0] == '-' && arg[1] && !isdigit((unsigned char)arg[1]) && arg[1] != '.';
}

// Returns the row of a name or of an alias, without dashes.
static const OptionRow* option_named_(const char* name, size_t length, int is_alias) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const char* own = is_alias ? OPTION_TABLE[i].alias : OPTION_TABLE[i].name;
        if (*own && strlen(own) == length && memcmp(own, name, length) == 0) {
            return &OPTION_TABLE[i];
        }
    }
    return NULL;
}

const OptionRow* option_find(const char* arg, size_t length) {
    const size_t dashes = arg[1] == '-' ? 2 : 1;
    return option_named_(arg + dashes, length - dashes, dashes == 1);
}

const RemovedOption* option_removed(const char* name, size_t length) {
    return option_removed_named(OPTION_REMOVED, name, length);
}

// Returns true if the option accepts any text, even if it is empty or starts with a dash.
static int option_is_text_(const OptionRow* row) { return strcmp(row->unit, "TEXT") == 0; }

static int option_is_topic_(const OptionRow* row) { return row->offset == offsetof(Options, help); }

// Returns the name that was probably meant, or NULL: the nearest one if at most a third of its
// letters are wrong, else the only one that starts like this. `name` has no dashes.
static const char* option_nearest_(const Options* options, const char* name, size_t length) {
    const char *nearest = NULL, *start = NULL;
    int starts = 0;
    size_t best = length / 3 + 1;
    for (int i = 0; i < OPTION_ROWS; i++) {
        const char* candidate = OPTION_TABLE[i].name;
        if (!option_applies(options, &OPTION_TABLE[i])) {
            continue;
        }
        const size_t distance = (size_t)option_distance(name, length, candidate);
        nearest = distance < best ? candidate : nearest;
        best = distance < best ? distance : best;
        if (length > 2 && strncmp(candidate, name, length) == 0) {
            start = candidate;
            starts++;
        }
    }
    return nearest ? nearest : starts == 1 ? start : NULL;
}

// Ends the program, with advice if `arg` is a name of an earlier version or of another program, a
// switch with no- before it, or close to a name. `place` precedes the message: "" or "FILE:LINE: ".
__attribute__((noreturn)) static void option_unknown_(const Options* options, const char* place,
                                                      const char* arg, size_t length) {
    const size_t dashes = arg[1] == '-' ? 2 : 1, bytes = length - dashes;
    const char* name = arg + dashes;
    const RemovedOption* removed = option_removed(name, bytes);
    const char* advice = option_synonym(OPTION_SYNONYMS, name, bytes);
    const char* nearest = option_nearest_(options, name, bytes);
    const OptionRow* off = strncmp(name, "no-", 3) == 0 ? option_named_(name + 3, bytes - 3, 0) : NULL;
    if (removed) {
        die_usage("%s--%s was removed: %s", place, removed->name, removed->advice);
    }
    if (advice) {
        die_usage("%sunknown option %.*s: %s", place, (int)length, arg, advice);
    }
    if (off && off->type == OPTION_SWITCH) {
        die_usage("%sunknown option %.*s; did you mean --%s off?", place, (int)length, arg, off->name);
    }
    if (nearest) {
        die_usage("%sunknown option %.*s; did you mean --%s? (--help lists all)", place, (int)length, arg,
                  nearest);
    }
    die_usage("%sunknown option %.*s (--help lists all)", place, (int)length, arg);
}

// Returns the row of an option. Ends the program if it does not have this option.
static const OptionRow* option_known_(const Options* options, const char* place, const char* arg,
                                      size_t length) {
    const OptionRow* row = option_find(arg, length);
    if (!row) {
        option_unknown_(options, place, arg, length);
    }
    if (!option_applies(options, row)) {
        die_usage("%s--%s is an option of the %s", place, row->name,
                  row->flags & OPTION_GPU ? "GPU trainer (make train_gpt2cu)"
                                          : "CPU trainer (make train_gpt2)");
    }
    return row;
}

// Sets an option from a value, or ends the program.
static void option_give_(Options* options, const char* place, const OptionRow* row, const char* value) {
    char buffer[OPTION_TEXT_BYTES];
    const int is_empty = row->type == OPTION_LIST && !*value; // only a default may be empty
    if (is_empty || !option_set(options, row, value)) {
        die_usage("%s--%s %s: wanted %s%s%s", place, row->name, *value ? value : "''",
                  option_is_whole(row) && !option_is_digits(value) ? "a whole number, " : "",
                  option_wanted(row, buffer), row->flags & AUTO_ ? ", or auto" : "");
    }
}

// Ends the program: the option has no value. `next` is the next argument, NULL at the end.
__attribute__((noreturn)) static void option_lacks_value_(const OptionRow* row, const char* next) {
    char buffer[OPTION_TEXT_BYTES];
    const char* wanted = option_wanted(row, buffer);
    if (next && (row->type == OPTION_STRING || row->type == OPTION_LIST)) {
        die_usage("--%s is missing its value; wanted %s; --%s=%s if %s is the value", row->name, wanted,
                  row->name, shell_word(next).text, next);
    }
    die_usage("--%s is missing its value; wanted %s%s", row->name, wanted,
              row->flags & AUTO_ ? ", or auto" : "");
}

// Returns true if the argument `next` is the value of the option before it. `is_last`: no argument
// follows.
static int option_is_value_(const OptionRow* row, const char* next, int is_last) {
    const int is_option = next[0] == '-' && next[1] == '-' && option_find(next, strcspn(next, "=")) != NULL;
    return option_is_text_(row)    ? !is_option
           : option_is_topic_(row) ? !option_is_name_(next) || (is_last && is_option)
                                   : !option_is_name_(next);
}

// Returns true if the argument `next` is a word of the action before it.
static int option_is_flag_word_(const OptionRow* row, const char* next) {
    Options scratch;
    return option_set(&scratch, row, next) && *(const int*)((const char*)&scratch + row->offset) > 1;
}

__attribute__((noreturn)) static void option_stray_(const char* arg) {
    die_usage("unexpected argument '%s'; options are written --name value (--help lists all)%s", arg,
              access(arg, F_OK) == 0 ? "; quote a pattern of files, 'books/*.txt', or the shell expands it"
                                     : "");
}

// Reads the option `arg` and its value, which may be the next of the `left` arguments. Returns how
// many of these it used: 0 or 1.
static int option_take_(Options* options, const char* arg, char** next, int left) {
    if (!option_is_name_(arg)) {
        option_stray_(arg);
    }
    const size_t length = strcspn(arg, "=");
    const int joined = arg[length] == '=';
    const int is_help = strcmp(arg, "-h") == 0 && (!left || option_is_name_(next[0]));
    const OptionRow* row = is_help ? option_find("--help", 6) : option_known_(options, "", arg, length);
    char* given = &options->given[row - OPTION_TABLE];
    *given = *given && row->type != OPTION_LIST && row->type != OPTION_FLAG ? OPTION_AGAIN_ : 1;
    if (row->type == OPTION_FLAG && joined) {
        die_usage("--%s takes no value", row->name);
    }
    const int is_next = !joined && left &&
                        (row->type == OPTION_FLAG ? option_is_flag_word_(row, next[0])
                                                  : option_is_value_(row, next[0], left == 1));
    if (row->type != OPTION_FLAG && !joined && !is_next && !option_is_topic_(row)) {
        option_lacks_value_(row, left ? next[0] : NULL);
    }
    option_give_(options, "", row,
                 joined                     ? arg + length + 1
                 : is_next                  ? next[0]
                 : row->type == OPTION_FLAG ? "on"
                                            : "");
    return is_next;
}

// Refuses an empty path or name: most likely an unset variable of the shell.
static void options_check_empty_(const Options* options) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char buffer[OPTION_TEXT_BYTES];
        if (options->given[i] && row->type == OPTION_STRING && !option_is_text_(row) &&
            !option_is_topic_(row) && !*option_text(options, row, buffer) &&
            !option_may_be_empty_(options, row)) {
            die_usage("--%s is empty; wanted %s, or no --%s at all", row->name, option_wanted(row, buffer),
                      row->name);
        }
    }
}

// ---- the file of --config ----

// Returns true if the last setting only says that it does not use an option that was removed.
static int config_is_unused_(const ConfigFile* config) {
    const RemovedOption* removed = option_removed(config->name, strlen(config->name));
    return removed && option_removed_is_unused(removed, config->value);
}

// Reads the file of --config. A setting that is also on the command line is only checked.
static void options_read_config_(Options* options) {
    char on_line[OPTION_ROWS_MAX], in_file[OPTION_ROWS_MAX] = {0}, name[OPTION_NAME_BYTES + 96];
    Options passed_over = *options;
    ConfigFile config;
    int settings = 0;
    memcpy(on_line, options->given, sizeof(on_line));
    config_open(&config, options->config);
    options->config_text = config.text;
    while (config_next(&config)) {
        settings++;
        if (config_is_unused_(&config)) {
            continue;
        }
        snprintf(name, sizeof(name), "--%s", config.name);
        const OptionRow* row = option_known_(options, config.place, name, strlen(name));
        const long i = row - OPTION_TABLE;
        if (row->flags & OPTION_LINE) {
            die_usage("%s--%s is for the command line, and not for a file", config.place, row->name);
        }
        if (in_file[i] && row->type != OPTION_LIST) {
            die_usage("%s--%s is set twice in this file", config.place, row->name);
        }
        in_file[i] = options->given[i] = 1;
        option_give_(on_line[i] ? &passed_over : options, config.place, row, config.value);
    }
    if (settings == 0) {
        die_usage("--config %s: no settings; wanted lines of name = value", options->config);
    }
}

// ---- defaults that depend on other options ----

// Returns true if the option's default is a setting of the model's recipe.
static int option_is_of_recipe_(const Options* options, const OptionRow* row) {
    return option_default_(options, row) != row->fallback;
}

static void options_follow_recipe_(Options* options) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        if (!options->given[i] && option_is_of_recipe_(options, row)) {
            option_give_(options, "", row, option_default_(options, row));
        }
    }
}

// ---- printing ----

// Prints --name value, or --name=value if the value could be mistaken for an option.
static void option_print_setting_(FILE* file, const OptionRow* row, const char* value) {
    fprintf(file, "--%s", row->name);
    if (row->type != OPTION_FLAG) {
        fputc(option_is_name_(value) ? '=' : ' ', file);
        shell_print(file, value);
    }
}

void options_print_setting(FILE* file, const Options* options, const char* name) {
    char dashed[OPTION_NAME_BYTES + 2], buffer[OPTION_TEXT_BYTES];
    snprintf(dashed, sizeof(dashed), "--%s", name);
    const OptionRow* row = option_find(dashed, strlen(dashed));
    option_print_setting_(file, row, option_text(options, row, buffer));
}

static const char* options_program_name_(const char* program) {
    const char* slash = strrchr(program, '/');
    return slash ? slash + 1 : program;
}

void options_version(char* text, size_t room, const Options* options, const char* name) {
#ifdef __clang__
    const char* compiler = __VERSION__;
#else
    const char* compiler = "gcc " __VERSION__;
#endif
    snprintf(text, room, "%s %s, Unicode %s, compiled by %s", options_program_name_(name),
             options->program.version, UNICODE_VERSION, compiler);
}

static void options_print_version_(FILE* file, const Options* options, const char* name) {
    char text[512];
    options_version(text, sizeof(text), options, name);
    fprintf(file, "%s\n", text);
}

// Prints text in lines of at most OPTION_HELP_WIDTH, broken at blanks and indented after the first.
static void option_print_wrapped_(FILE* file, const char* text) {
    while (strlen(text) > OPTION_HELP_WIDTH) {
        int length = OPTION_HELP_WIDTH;
        while (text[length] != ' ') {
            length--;
            assert(length > 0);
        }
        fprintf(file, "%.*s\n%*s", length, text, OPTION_HELP_COLUMN, "");
        text += length + 1;
    }
    fprintf(file, "%s\n", text);
}

static int option_starts_group_(int i) {
    return i == 0 || strcmp(OPTION_TABLE[i].group, OPTION_TABLE[i - 1].group) != 0;
}

static void option_print_group_(FILE* file, const OptionRow* row) {
    fprintf(file, "\n%-26s%-30s%s\n", row->group, "value", "default");
}

// Prints the start of a line: the option, and a part of what it wants.
static void option_print_names_(FILE* file, const char* name, const char* alias, int length,
                                const char* wanted) {
    fprintf(file, "  %-*s%-*s%-*.*s", *alias ? 20 : 24, name, *alias ? 4 : 0, alias, OPTION_WANTED_WIDTH,
            length, wanted);
}

static void option_print_help_(FILE* file, const OptionRow* row) {
    char name[OPTION_NAME_BYTES + 2], alias[8], buffer[OPTION_TEXT_BYTES];
    snprintf(name, sizeof(name), "--%s", row->name);
    snprintf(alias, sizeof(alias), "%s%s", *row->alias ? "-" : "", row->alias);
    const char* wanted = option_wanted_briefly(row, buffer);
    const int fits = strlen(wanted) < OPTION_WANTED_WIDTH; // else the rest goes on its own line
    for (size_t length; (length = strlen(wanted)) > OPTION_WORDS_WIDTH; wanted += length) {
        for (length = OPTION_WORDS_WIDTH; wanted[length - 1] != '|'; length--) {
            assert(length > 1);
        }
        option_print_names_(file, name, alias, (int)length, wanted);
        fputc('\n', file);
        name[0] = alias[0] = '\0';
    }
    option_print_names_(file, name, alias, (int)strlen(wanted), wanted);
    fprintf(file, "%s%*s%-8s ", fits ? "" : "\n", fits ? 0 : OPTION_HELP_COLUMN - 9, "",
            row->type == OPTION_FLAG ? "" : row->fallback);
    option_print_wrapped_(file, row->help);
}

// Sets `text` to the groups in the order of the table, separated by commas.
static void option_list_groups_(char* text, size_t room) {
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < OPTION_ROWS && used < room; i++) {
        if (option_starts_group_(i)) {
            used += (size_t)snprintf(text + used, room - used, "%s%s", i ? ", " : "", OPTION_TABLE[i].group);
        }
    }
}

void options_print_help(FILE* file, const Options* options, const char* program) {
    char groups[512];
    option_list_groups_(groups, sizeof(groups));
    fprintf(file,
            "usage: %s [--name value]...%s\nAlso --name=value, and -alias value with the short "
            "names.\n--help GROUP or --help OPTION prints a part of this" OPTION_BASICS
            ". Groups:\n  %s.\n" OPTION_EXAMPLES,
            program, OPTION_ARGUMENTS, groups);
    for (int i = 0; i < OPTION_ROWS; i++) {
        if (option_applies(options, &OPTION_TABLE[i])) {
            if (option_starts_group_(i)) {
                option_print_group_(file, &OPTION_TABLE[i]);
            }
            option_print_help_(file, &OPTION_TABLE[i]);
        }
    }
}

// Returns true if the row is a part of --help `topic`: "basic", a group, one word of a group
// ("memory, speed"), or the option itself, with or without its dashes.
static int option_is_about_(const Options* options, const OptionRow* row, const char* topic) {
    const char* name = topic + strspn(topic, "-");
    const size_t length = strlen(topic);
    for (const char* word = row->group; *word && option_applies(options, row); word += strspn(word, ", ")) {
        const size_t bytes = strcspn(word, ",");
        if (bytes == length && memcmp(word, topic, bytes) == 0) {
            return 1;
        }
        word += bytes;
    }
    const int is_basic = (row->flags & OPTION_BASIC) && strcmp(topic, "basic") == 0;
    return is_basic || strcmp(name, row->name) == 0 || (*name && strcmp(name, row->alias) == 0);
}

void options_print_help_on(FILE* file, const Options* options, const char* topic) {
    char groups[512];
    const char* name = topic + strspn(topic, "-");
    const RemovedOption* removed = option_removed(name, strlen(name));
    const OptionRow* last = NULL;
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        if (option_is_about_(options, row, topic)) {
            if (!last || strcmp(last->group, row->group) != 0) {
                option_print_group_(file, row);
            }
            option_print_help_(file, row);
            last = row;
        }
    }
    if (removed) {
        die_usage("--help %s: --%s was removed: %s", topic, removed->name, removed->advice);
    }
    if (!last) {
        option_list_groups_(groups, sizeof(groups));
        die_usage("--help %s: wanted an option, or a group: %s", topic, groups);
    }
}

// Returns true if a command or a file that repeats the run includes the option.
static int option_repeats_(const Options* options, const OptionRow* row) {
    return option_applies(options, row) && option_counts(options, row) && !(row->flags & OPTION_LINE);
}

void options_mark_following(Options* options) {
    char text[OPTION_TEXT_BYTES];
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        options->follows[i] =
            (row->flags & OPTION_FOLLOWS) && strcmp(option_text(options, row, text), row->fallback) == 0;
    }
}

void options_mark_fixed(Options* options, const char* name) {
    int i = 0;
    while (strcmp(OPTION_TABLE[i].name, name) != 0) {
        i++;
    }
    options->follows[i] = 1;
}

void options_print_banner(FILE* file, const Options* options, const char* program) {
    const size_t screen = text_wrap_columns(file), width = screen ? screen : 100;
    size_t column = strlen(program);
    shell_print(file, program);
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char buffer[OPTION_TEXT_BYTES];
        const char* value = option_text(options, row, buffer);
        const int is_default = strcmp(value, row->fallback) == 0 && !option_is_of_recipe_(options, row);
        if (!option_repeats_(options, row) || is_default || options->follows[i]) {
            continue;
        }
        const size_t length = strlen(" --") + strlen(row->name) + strlen(" ''") + strlen(value);
        const int wrap = column + length + strlen(" \\") > width;
        fputs(wrap ? " \\\n    " : " ", file);
        column = length + (wrap ? strlen("   ") : column);
        option_print_setting_(file, row, value);
    }
    fputc('\n', file);
}

void options_print_recipe(FILE* file, const Options* options) {
    const char* before = "recipe:";
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char buffer[OPTION_TEXT_BYTES];
        const char* value = option_text(options, row, buffer);
        const int is_kept = !options->given[i] && strcmp(value, option_default_(options, row)) == 0;
        if (is_kept && option_repeats_(options, row) && option_is_of_recipe_(options, row)) {
            fprintf(file, "%s ", before);
            option_print_setting_(file, row, value);
            before = "";
        }
    }
    fputs(*before ? "" : "\n", file);
}

void options_print_config(FILE* file, const Options* options) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char buffer[OPTION_TEXT_BYTES];
        if (option_starts_group_(i)) {
            fprintf(file, "%s# %s\n", i ? "\n" : "", row->group);
        }
        if (row->type != OPTION_FLAG && option_repeats_(options, row)) {
            config_print(file, row->name, option_text(options, row, buffer));
        }
    }
}

// Returns true if the value of a choice is not a number.
static int option_is_word_(const OptionRow* row, const char* value) {
    return row->type == OPTION_CHOICE && value[strspn(value, "0123456789")] != '\0';
}

void options_print_json(FILE* file, const Options* options) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char buffer[OPTION_TEXT_BYTES];
        const char* value = option_text(options, row, buffer);
        if (row->type == OPTION_FLAG || !option_repeats_(options, row)) {
            continue;
        }
        fprintf(file, "%s\"%s\":", i ? "," : "{", row->name);
        if ((row->flags & AUTO_) && strcmp(value, "auto") == 0) {
            fputs("null", file);
        } else if (row->type == OPTION_STRING || option_is_word_(row, value)) {
            json_print_bytes(file, value, strlen(value));
        } else if (row->type == OPTION_SWITCH) {
            fputs(strcmp(value, "on") == 0 ? "true" : "false", file);
        } else {
            fputs(value, file);
        }
    }
    fputc('}', file);
}

// ---- the whole ----

// Exits after the output of --help or --version.
static void options_exit_(void) {
    file_flush_standard();
    exit(EXIT_SUCCESS);
}

int options_parse_arguments(Options* options, int argc, char** argv, OptionsProgram program,
                            const char** arguments) {
    int num_arguments = 0;
    const char* name = argc > 0 ? argv[0] : "train_gpt2";
    memset(options, 0, sizeof(*options));
    options->program = program;
    for (int i = 0; i < OPTION_ROWS; i++) {
        const int legal = option_set(options, &OPTION_TABLE[i], OPTION_TABLE[i].fallback);
        assert(legal);
        (void)legal;
    }
    int only_arguments = 0; // after --
    for (int i = 1; i < argc; i++) {
        if (arguments && !only_arguments && strcmp(argv[i], "--") == 0) {
            only_arguments = 1;
        } else if (arguments && (only_arguments || !option_is_name_(argv[i]))) {
            arguments[num_arguments++] = argv[i];
        } else {
            i += option_take_(options, argv[i], argv + i + 1, argc - i - 1);
        }
    }
    options_check_empty_(options);
    if (options->config[0]) {
        options_read_config_(options);
    }
    options_follow_recipe_(options);
    options_decide_(options);
    if (options->help[0]) {
        options_print_help_on(stdout, options, options->help);
        options_exit_();
    }
    if (options_given(options, "help")) {
        options_print_help(stdout, options, options_program_name_(name));
        options_exit_();
    }
    if (options->version) {
        options_print_version_(stdout, options, name);
        options_exit_();
    }
    return num_arguments;
}

void options_parse(Options* options, int argc, char** argv, OptionsProgram program) {
    options_parse_arguments(options, argc, argv, program, NULL);
}

void options_close(Options* options) { free(options->config_text); }

void options_note_repeated(FILE* file, const Options* options) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        char buffer[OPTION_TEXT_BYTES];
        if (options->given[i] == OPTION_AGAIN_) {
            printable_line(file, "note: --%s is given several times; the last one counts: %s",
                           OPTION_TABLE[i].name, option_text(options, &OPTION_TABLE[i], buffer));
        }
    }
}

int options_changed(const Options* options, const char* name) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        char buffer[OPTION_TEXT_BYTES];
        if (strcmp(OPTION_TABLE[i].name, name) == 0) {
            return strcmp(option_text(options, &OPTION_TABLE[i], buffer), OPTION_TABLE[i].fallback) != 0;
        }
    }
    assert(!"no such option");
    return 0;
}

int options_given(const Options* options, const char* name) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        if (strcmp(OPTION_TABLE[i].name, name) == 0) {
            return options->given[i] != 0;
        }
    }
    assert(!"no such option");
    return 0;
}

#endif // OPTIONS_IMPLEMENTATION

#endif
