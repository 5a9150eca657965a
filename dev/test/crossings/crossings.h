/*
crossings.h -- relations between runs of the trainer: what crossings.c and its other files share.

A command is what a user types: settings of options, each one of the values of its row. A relation
starts a drawn command and a changed one, and compares what they leave.
*/
#ifndef DEV_TEST_CROSSINGS_H
#define DEV_TEST_CROSSINGS_H

#include <stdint.h>
#include <stdio.h>

#include "llmc/setup/options.h"

enum { SETTINGS_MAX = 48, VALUE_BYTES = 160, VALUES_MAX = 1024, ROWS_MAX = 160, SCRIPT_BYTES = 1 << 15 };

// ---- random numbers: the same for a seed on every machine ----

typedef struct {
    uint64_t state;
} Random;

int random_below(Random* r, int n); // 0 to n - 1
static inline int random_one_of(Random* r, int n) { return random_below(r, n) == 0; }
static inline const char* random_pick(Random* r, const char* const* texts, int count) {
    return texts[random_below(r, count)];
}
// One of the texts that follow.
#define PICK(r, ...)                                                                                         \
    random_pick(r, (const char* const[]){__VA_ARGS__},                                                       \
                (int)(sizeof((const char*[]){__VA_ARGS__}) / sizeof(char*)))

// ---- commands (commands.c) ----

// One of the values that an option has in draws.
typedef struct {
    int row;
    char text[VALUE_BYTES];
} Value;

typedef struct {
    Value value[VALUES_MAX];
    int count, first[OPTION_ROWS_MAX + 1]; // by row
} Values;

typedef struct {
    int row;
    int value; // index into Values; -1: text of a relation
    char text[VALUE_BYTES];
} Setting;

typedef struct {
    Setting setting[SETTINGS_MAX];
    int count;
    int ranks;
    uint64_t seed; // of what a relation draws
} Command;

int row_of(const char* name);
// Returns why an option is not drawn; NULL if it is.
const char* row_is_not_drawn(int row);
// Makes the values from the table. Returns the number of rows without values and without a reason.
int values_open(Values* values, int is_gpu);
// Returns the text of an option in a command, its default if it is not given.
const char* command_get(const Command* command, const char* name);
int command_gives(const Command* command, const char* name);
double command_number(const Command* command, const char* name);
void command_set(Command* command, const char* name, const char* text);
void command_set_value(Command* command, const Values* values, int value);
void command_drop(Command* command, const char* name);
void command_drop_all(Command* command, const char* names); // names: separated by blanks
// Sets `text` to the value as the trainer gets it: in lengths, x2 stands for 2 * --seq-len.
void command_text(const Command* command, const Setting* setting, char text[VALUE_BYTES]);
// Returns true if every drawn command has the option.
int row_is_core(int row);
// Returns true if the word is among `words`, which blanks separate.
int word_is_in(const char* word, const char* words);

// ---- runs (runs.c) ----

typedef struct {
    char kind[16], name[32];
    int step;
    char* line; // all of it
} LogRow;

typedef struct {
    int status; // of the first process that failed; 128 + signal; -1: it took too long
    const char* out;
    LogRow row[ROWS_MAX];
    int count;
    double peak_mb;    // of the process
    char error[512];   // its first line on standard error that is an error; "" if there is none
    char strange[512]; // what no accepted or refused command prints or does; "" if all is well
} Run;

enum { NOT_DRAWN_YET, ONLY_REFUSED, ACCEPTED }; // a pair of values

typedef struct {
    Values values;
    unsigned char pairs[VALUES_MAX][VALUES_MAX]; // what has become of two values in one command
    const char *trainer, *tokenize, *stand_in;   // paths; stand_in NULL: only one rank
    char work[256];                              // the directory in which commands run
    Random random;                               // of the relation that runs
    char what[1024];                             // what is wrong, or why a command was refused
    char script[SCRIPT_BYTES];                   // commands of this relation so far
    int is_gpu;
    double rounding; // relative, of a loss or a norm
    uint64_t inputs; // hash of all inputs
    Run runs[8];
    int num_runs;
} World;

typedef enum { HELD, REFUSED, FAILED, UNFIT } Verdict; // UNFIT: the relation does not apply

// Starts a command, with --out `out` unless it is NULL, and waits. NULL: it was not accepted, and
// *verdict says how.
const Run* run(World* world, const Command* command, const char* out, Verdict* verdict);
// Starts `count` words as a program; returns its status as in Run.
int run_words(World* world, char* const* words);
// Starts a command that is stopped: by a signal once the log has a line of this step.
int run_and_stop(World* world, const Command* command, const char* out, int signal, int step);
void runs_close(World* world);

// Compares the lines of training (and of validation) of two runs: relative difference of losses,
// norms and statistics up to `tolerance`; 0 wants the same digits. world->what says what differs.
enum { TRAIN_ROWS = 1, VAL_ROWS = 2, FIRST_ROWS = 4 };
Verdict runs_agree(World* world, const Run* a, const Run* b, double tolerance, int which);
// Compares the weights of the last checkpoints, and their averages, if both have them in one file.
Verdict runs_have_the_same_weights(World* world, const Run* a, const Run* b);

// Sets `path` to the last checkpoint in a run's directory, and returns it; NULL if there is none.
const char* last_checkpoint(const char* out, char path[512]);
// Returns a file's bytes with a zero after them, which the caller frees; NULL: it cannot be read.
char* read_file(const char* path, size_t* bytes);
uint64_t hash_file(const char* path);
uint64_t hash_tree(const char* path); // names and bytes of all files below a directory
Verdict failed(World* world, const char* format, ...) __attribute__((format(printf, 2, 3)));
// Sets *value to a number of a line of JSON. Returns false if it has no such key.
int line_number(const char* line, const char* key, double* value);

// ---- inputs (inputs.c) ----

void inputs_make(World* world);
// Restores them from their copy.
void inputs_restore(void);

// ---- relations (relations.c) ----

#define ARCHS_WITH_EXPERTS "mixtral qwen3moe olmoe glm4moe gptoss deepseek3"

typedef struct {
    const char* name;
    Verdict (*check)(World* world, const Command* drawn);
    int share; // of the draws
} Relation;
extern const Relation RELATIONS[];
extern const int NUM_RELATIONS;

// Makes the shards OUT_train_*.bin of a file with ./tokenize. UNFIT without that program.
Verdict make_shards(World* world, const char* data, const char* out);
// The first update of a saved model has the loss, the norm and the routing that llmc/reference.h
// computes (reference.c).
Verdict check_reference(World* world, const Command* drawn);

#endif
