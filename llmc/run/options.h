/*
options.h -- the command line: one table of rows, and every use of it a loop over the rows.

The parser, --help, the start-up banner, --print-config and the JSON of the log header all come from
OPTION_TABLE (options_table.h), so an option is added by one field of Options and one row. Options are written `--name
value` or `--name=value`, or by alias, `-b value` (llm.c's letters, so that its run scripts work). A value
that starts like an option needs the equals sign. Everything is strict: an option that is unknown, malformed,
out of range, missing its value or given twice ends the program with status 2 before any work.

A program with its own options defines OPTION_TABLE_FILE, a file like options_table.h, and OPTION_ARGUMENTS, the help text
for other arguments, before it includes this file (dev/data/tokenize.c).

An option whose value may be "auto" holds OPTION_AUTO until the trainer has put the resolved value there.

defines: Options, OPTION_AUTO, OPTION_UNLIMITED, LLMC_VERSION, options_parse, options_parse_arguments, options_given,
         options_changed, options_version, options_print_help, options_print_banner, options_print_config,
         options_print_json, OptionType, OptionList, OptionRow, option_applies, option_counts, option_find, OptionsProgram,
         options_program
*/
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OPTION_AUTO (-1)            // the value of an option that the trainer chooses
#define OPTION_ROWS_MAX 128         // maximum number of rows
#define OPTION_NAME_BYTES 32        // the longest name, including the zero
#define OPTION_UNLIMITED 1000000000 // more tokens, steps or files than this is a typo
#define OPTION_TEXT_BYTES 64        // the longest number or word, or range, including the zero

#ifdef GIT_COMMIT // the Makefile's, in the programs
#define LLMC_VERSION "0.1.0 (" GIT_COMMIT ")"
#else
#define LLMC_VERSION "0.1.0"
#endif

// Which program reads the options: OPTION_CPU or OPTION_GPU, for rows that only one trainer has, and its
// version.
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
    OPTION_CHOICE, // int, the place of the word in the row's list; a word can be a number
    OPTION_STRING, // const char *, pointing into argv; never NULL
    OPTION_LIST,   // OptionList: texts, each pointing into argv; the option may be given several times
    OPTION_FLAG    // int, 1 if given; takes no value: an action, not a setting
} OptionType;

enum { OPTION_LIST_MAX = 16 };
typedef struct {
    int count;
    const char* text[OPTION_LIST_MAX];
} OptionList;

// Flags of a row. An option counts in training runs only, unless OPTION_TEXTS or OPTION_BOTH says otherwise.
enum {
    AUTO_ = 1,                // may be "auto"
    MINUS_1_ = 2,             // -1 means auto, as in llm.c
    ABOVE_ = 4,               // must be above its minimum
    BELOW_ = 8,               // must be below its maximum
    OPTION_CPU = 16,          // only the CPU trainer has it
    OPTION_GPU = 32,          // only the GPU trainer has it
    OPTION_CHANGES_RUN = 64,  // defines the run: resuming with another value needs --override
    OPTION_NOT_SAVED = 128,   // for one start of the program; a resumed run does not inherit it
    OPTION_TEXTS = 256,       // counts where the program only generates texts (options_generate)
    OPTION_BOTH = 512,        // counts there and in training
    OPTION_READS = 1024,      // names a file that is read, or a directory of files
    OPTION_READS_LIST = 2048, // names files that are read: a list of patterns
    OPTION_WRITES = 4096,     // names a file that is written (run_outputs.h)
    OPTION_EACH = 8192,       // the processes of a run may have different values
};

typedef struct {
    const char *group, *name;
    const char* alias; // one or two letters; "" if it has none
    OptionType type;
    size_t offset;        // of its field in Options
    double min, max;      // of a number
    int flags;            // AUTO_ and so on
    const char* fallback; // the default, as the command line and the banner would write it
    const char* unit;     // of a number; or the words of a choice, "zero|one|two"; or what a text is, "FILE"
    const char* help;
} OptionRow;

// The options of a program. Each has `program`, `given` and the flags help and version.
typedef struct Options Options;

#ifndef OPTION_TABLE_FILE
#define OPTION_TABLE_FILE "llmc/run/options_table.h"
#endif
#include OPTION_TABLE_FILE

extern const OptionRow OPTION_TABLE[];
extern const int OPTION_ROWS; // of the table

// Does the row belong to this trainer?
int option_applies(const Options* options, const OptionRow* row);

// Does the row count in what the program does: training, or generating texts?
int option_counts(const Options* options, const OptionRow* row);

// ---- parsing ----

// The row named by the first `length` bytes of arg, dashes included; NULL if unknown.
const OptionRow* option_find(const char* arg, size_t length);

// ---- printing ----

// The program's name, its version and its compiler.
void options_version(char* text, size_t room, const Options* options, const char* name);

enum { OPTION_WANTED_WIDTH = 30, OPTION_HELP_COLUMN = 65, OPTION_HELP_WIDTH = 45 };

void options_print_help(FILE* file, const Options* options, const char* program);

// Prints a command line that repeats this run and can be pasted back: the program and every option that is
// not at its default, also one that was "auto" and has been resolved.
void options_print_banner(FILE* file, const Options* options, const char* program);

// Prints every setting, one `--name value` on a line, in groups; a shell reads it back.
void options_print_config(FILE* file, const Options* options);

// Prints every setting as one JSON object on one line, without a newline after it: numbers as numbers, an
// unresolved "auto" as null, switches as true or false, the rest as strings.
void options_print_json(FILE* file, const Options* options);

// ---- the whole ----

// Sets every option to its default, then to its value on the command line. --help and --version print and end
// the program. The strings point into argv. Sets `arguments` (argc) to the arguments that are not options, or
// that follow --, and returns their number; NULL: none are allowed.
int options_parse_arguments(Options* options, int argc, char** argv, OptionsProgram program,
                            const char** arguments);

void options_parse(Options* options, int argc, char** argv, OptionsProgram program);

// Was this option on the command line? `name` is the long name, without dashes.
int options_given(const Options* options, const char* name);

// Whether it has another value than its default.
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
#include "llmc/base/json.h"
#include "llmc/tokenizer/unicode_tables.h"
#include "llmc/run/options_values.h"

// A row's type and offset. A field of another C type does not compile: the comparison is never evaluated.
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
// Short names of flags, for the table.
#define CPU_ OPTION_CPU
#define GPU_ OPTION_GPU
#define RUN_ OPTION_CHANGES_RUN
#define ONCE_ OPTION_NOT_SAVED
#define TEXTS_ OPTION_TEXTS
#define BOTH_ OPTION_BOTH
#define READS_ OPTION_READS
#define FILES_ OPTION_READS_LIST
#define WRITES_ OPTION_WRITES
#define EACH_ OPTION_EACH
#define MANY_ OPTION_UNLIMITED

#define OPTION_TABLE_ROWS_
#include OPTION_TABLE_FILE // OPTION_TABLE, option_counts, options_decide_

const int OPTION_ROWS = sizeof(OPTION_TABLE) / sizeof(OPTION_TABLE[0]);
static_assert(sizeof(OPTION_TABLE) / sizeof(OPTION_TABLE[0]) <= OPTION_ROWS_MAX, "enlarge OPTION_ROWS_MAX");

#undef INT_
#undef COUNT_
#undef SEED_
#undef FLOAT_
#undef SWITCH_
#undef CHOICE_
#undef STRING_
#undef LIST_
#undef FLAG_
#undef CPU_
#undef GPU_
#undef RUN_
#undef ONCE_
#undef TEXTS_
#undef BOTH_
#undef READS_
#undef FILES_
#undef WRITES_
#undef EACH_
#undef MANY_

#ifndef OPTION_EXAMPLES
#define OPTION_EXAMPLES "" // command lines to start with, for --help
#endif
#ifndef OPTION_ARGUMENTS
#define OPTION_ARGUMENTS "" // what a program takes besides options, for --help
#endif

int option_applies(const Options* options, const OptionRow* row) {
    return !(row->flags & (OPTION_CPU | OPTION_GPU)) || (row->flags & options->program.trainer);
}

// ---- parsing ----

// Is this argument an option, and not a value? A dash alone and a negative number are values.
static int option_is_name_(const char* arg) {
    return arg[0] == '-' && arg[1] && !isdigit((unsigned char)arg[1]) && arg[1] != '.';
}

const OptionRow* option_find(const char* arg, size_t length) {
    const size_t dashes = arg[1] == '-' ? 2 : 1;
    for (int i = 0; i < OPTION_ROWS; i++) {
        const char* name = dashes == 2 ? OPTION_TABLE[i].name : OPTION_TABLE[i].alias;
        if (*name && strlen(name) == length - dashes && memcmp(name, arg + dashes, length - dashes) == 0) {
            return &OPTION_TABLE[i];
        }
    }
    return NULL;
}

// The edit distance of Levenshtein: insertions, deletions and changes of a byte that turn text into name.
static int option_distance_(const char* text, size_t length, const char* name) {
    int distance[OPTION_NAME_BYTES]; // from text[0 .. i) to each beginning of the name
    const int name_length = (int)strlen(name);
    assert(name_length < OPTION_NAME_BYTES);
    for (int j = 0; j <= name_length; j++) {
        distance[j] = j;
    }
    for (size_t i = 0; i < length; i++) {
        int diagonal = distance[0];
        distance[0]++;
        for (int j = 1; j <= name_length; j++) {
            const int change = diagonal + (text[i] != name[j - 1]);
            const int gap = 1 + (distance[j] < distance[j - 1] ? distance[j] : distance[j - 1]);
            diagonal = distance[j];
            distance[j] = change < gap ? change : gap;
        }
    }
    return distance[name_length];
}

// Names the nearest option, if one is near enough to be what was meant: at most every other letter is wrong.
__attribute__((noreturn)) static inline void option_unknown_(const Options* options, const char* arg,
                                                             size_t length) {
    const size_t dashes = arg[1] == '-' ? 2 : 1;
    const char* nearest = NULL;
    size_t best = (length - dashes) / 2 + 1;
    for (int i = 0; i < OPTION_ROWS; i++) {
        const char* name = OPTION_TABLE[i].name;
        if (!option_applies(options, &OPTION_TABLE[i])) {
            continue;
        }
        const size_t distance = (size_t)option_distance_(arg + dashes, length - dashes, name);
        if (distance < best) {
            best = distance;
            nearest = name;
        }
    }
    if (nearest) {
        die_usage("unknown option %.*s; did you mean --%s? (--help lists all)", (int)length, arg, nearest);
    }
    die_usage("unknown option %.*s (--help lists all)", (int)length, arg);
}

__attribute__((noreturn)) static inline void option_refuse_(const OptionRow* row, const char* found) {
    char buffer[OPTION_TEXT_BYTES];
    die_usage("--%s is %s; wanted %s%s", row->name, found, option_wanted(row, buffer),
              row->flags & AUTO_ ? ", or auto" : "");
}

// Takes the option `arg` and its value, which may be the next argument (NULL at the end). Returns how many of
// the arguments after `arg` it used: 0 or 1.
static int option_take_(Options* options, const char* arg, const char* next) {
    if (!option_is_name_(arg)) {
        die_usage("stray argument %s; wanted --name value (--help lists all)%s", *arg ? arg : "''",
                  access(arg, F_OK) == 0
                      ? "; quote a pattern of files, 'books/*.txt', or the shell expands it"
                      : "");
    }
    if (strcmp(arg, "-h") == 0 && (!next || option_is_name_(next))) {
        options->help = 1;
        return 0;
    }
    const size_t length = strcspn(arg, "=");
    const int joined = arg[length] == '=';
    const OptionRow* row = option_find(arg, length);
    if (!row) {
        option_unknown_(options, arg, length);
    }
    if (!option_applies(options, row)) {
        die_usage("--%s is an option of the %s", row->name,
                  row->flags & OPTION_GPU ? "GPU trainer (make train_gpt2cu)"
                                          : "CPU trainer (make train_gpt2)");
    }
    char* given = &options->given[row - OPTION_TABLE];
    if (*given && row->type != OPTION_LIST) {
        die_usage("--%s is given twice", row->name);
    }
    *given = 1;
    if (row->type == OPTION_FLAG) {
        if (joined) {
            die_usage("--%s takes no value", row->name);
        }
        option_set(options, row, "on");
        return 0;
    }
    const char* value = joined ? arg + length + 1 : next && !option_is_name_(next) ? next : NULL;
    const int is_empty = row->type == OPTION_LIST && value && !*value; // as only a default may be
    if (!value || is_empty || !option_set(options, row, value)) {
        option_refuse_(row, !value ? "missing its value" : *value ? value : "''");
    }
    return !joined;
}

// ---- printing ----

// Prints a word as the shell reads it: as it is, or in single quotes.
static void option_print_quoted_(FILE* file, const char* text) {
    const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./,:+@";
    if (*text && strspn(text, plain) == strlen(text)) {
        fputs(text, file);
        return;
    }
    fputc('\'', file);
    for (; *text; text++) {
        if (*text == '\'') {
            fputs("'\\''", file); // close, a quote of its own, open again
        } else {
            fputc(*text, file);
        }
    }
    fputc('\'', file);
}

// Prints --name value, or --name=value where the value would be taken for an option.
static void option_print_setting_(FILE* file, const OptionRow* row, const char* value) {
    fprintf(file, "--%s", row->name);
    if (row->type != OPTION_FLAG) {
        fputc(option_is_name_(value) ? '=' : ' ', file);
        option_print_quoted_(file, value);
    }
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

// Prints text in lines of at most OPTION_HELP_WIDTH, broken at blanks, each after the first indented.
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

void options_print_help(FILE* file, const Options* options, const char* program) {
    fprintf(file,
            "usage: %s [--name value]...%s\nAlso --name=value, and -alias value with the short "
            "names.\n" OPTION_EXAMPLES,
            program, OPTION_ARGUMENTS);
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char name[OPTION_NAME_BYTES + 2], alias[8], buffer[OPTION_TEXT_BYTES];
        if (!option_applies(options, row)) {
            continue;
        }
        if (i == 0 || strcmp(row->group, row[-1].group) != 0) {
            fprintf(file, "\n%-26s%-30s%s\n", row->group, "value", "default");
        }
        snprintf(name, sizeof(name), "--%s", row->name);
        snprintf(alias, sizeof(alias), "%s%s", *row->alias ? "-" : "", row->alias);
        const char* wanted = option_wanted_briefly(row, buffer);
        const int fits = strlen(wanted) < OPTION_WANTED_WIDTH; // else the rest is on a line of its own
        fprintf(file, "  %-*s%-*s%-*s", *alias ? 20 : 24, name, *alias ? 4 : 0, alias, OPTION_WANTED_WIDTH,
                wanted);
        fprintf(file, "%s%*s%-8s ", fits ? "" : "\n", fits ? 0 : OPTION_HELP_COLUMN - 9, "",
                row->type == OPTION_FLAG ? ""
                : *row->fallback         ? row->fallback
                                         : "''");
        option_print_wrapped_(file, row->help);
    }
}

void options_print_banner(FILE* file, const Options* options, const char* program) {
    const size_t width = 100;
    size_t column = strlen(program);
    option_print_quoted_(file, program);
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char buffer[OPTION_TEXT_BYTES];
        if (!option_applies(options, row) || !option_counts(options, row)) {
            continue;
        }
        const char* value = option_text(options, row, buffer);
        if (strcmp(value, row->fallback) == 0) {
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

void options_print_config(FILE* file, const Options* options) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char buffer[OPTION_TEXT_BYTES];
        if (row->type == OPTION_FLAG || !option_applies(options, row) || !option_counts(options, row)) {
            continue;
        }
        if (i == 0 || strcmp(row->group, row[-1].group) != 0) {
            fprintf(file, "%s# %s\n", i ? "\n" : "", row->group);
        }
        option_print_setting_(file, row, option_text(options, row, buffer));
        fputc('\n', file);
    }
}

// Whether the value of a choice is no number.
static int option_is_word_(const OptionRow* row, const char* value) {
    return row->type == OPTION_CHOICE && value[strspn(value, "0123456789")] != '\0';
}

void options_print_json(FILE* file, const Options* options) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char buffer[OPTION_TEXT_BYTES];
        const char* value = option_text(options, row, buffer);
        if (row->type == OPTION_FLAG || !option_applies(options, row) || !option_counts(options, row)) {
            continue;
        }
        fprintf(file, "%s\"%s\":", i ? "," : "{", row->name);
        if ((row->flags & AUTO_) && strcmp(value, "auto") == 0) {
            fputs("null", file);
        } else if (row->type == OPTION_STRING || option_is_word_(row, value)) {
            json_print_string(file, value, strlen(value));
        } else if (row->type == OPTION_SWITCH) {
            fputs(strcmp(value, "on") == 0 ? "true" : "false", file);
        } else {
            fputs(value, file);
        }
    }
    fputc('}', file);
}

// ---- the whole ----

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
    int only_arguments = 0; // behind --
    for (int i = 1; i < argc; i++) {
        if (arguments && !only_arguments && strcmp(argv[i], "--") == 0) {
            only_arguments = 1;
        } else if (arguments && (only_arguments || !option_is_name_(argv[i]))) {
            arguments[num_arguments++] = argv[i];
        } else {
            i += option_take_(options, argv[i], i + 1 < argc ? argv[i + 1] : NULL);
        }
    }
    options_decide_(options);
    if (options->help) {
        options_print_help(stdout, options, options_program_name_(name));
        exit(EXIT_SUCCESS);
    }
    if (options->version) {
        options_print_version_(stdout, options, name);
        exit(EXIT_SUCCESS);
    }
    return num_arguments;
}

void options_parse(Options* options, int argc, char** argv, OptionsProgram program) {
    options_parse_arguments(options, argc, argv, program, NULL);
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
            return options->given[i];
        }
    }
    assert(!"no such option");
    return 0;
}

#endif // OPTIONS_IMPLEMENTATION

#endif
