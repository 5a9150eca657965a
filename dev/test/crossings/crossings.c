// crossings.c -- draws runs of the trainer, changes one thing, and checks what must hold between
// them.
//
//     crossings --trainer build/plain/train_gpt2 [--tokenize PATH] [--seed N] [--seconds S]
//               [--draws N] [--stop-at FAILURES] [--only RELATION] [--gpu PATH] [--keep DIR]
//
// Options and their values come from the option table (commands.c), relations from relations.c. A
// command that the trainer refuses with one clear line is no failure; options that the line names
// are left out, and it is tried again. Each failure is one line, and its commands; the first of a
// kind is shrunk, and kept in build/crossings with its inputs. The last line counts. With --gpu,
// each tenth draw runs on that trainer instead.
#include <ctype.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "dev/test/crossings/crossings.h"

enum { KINDS_MAX = 256, TRIES = 8, SHRINK_S = 30 };

typedef struct {
    uint64_t seed;
    double seconds;
    int draws, stop_at;
    const char *only, *trainer, *tokenize, *gpu, *keep;
} Arguments;

typedef struct {
    int draws, refused, failed, unfit;
    uint64_t kinds[KINDS_MAX]; // of failures
    int num_kinds;
} Counts;

// ---- drawing ----

static void mark_pairs(World* w, const Command* c, int of_row, int state) {
    for (int i = 0; i < c->count; i++) {
        for (int j = 0; j < c->count; j++) {
            const int a = c->setting[i].value, b = c->setting[j].value;
            const int is_of = of_row < 0 || c->setting[i].row == of_row || c->setting[j].row == of_row;
            if (a >= 0 && b >= 0 && is_of && w->pairs[a][b] < state) {
                w->pairs[a][b] = (unsigned char)state;
            }
        }
    }
}

static double share_of_pairs(const World* w) {
    const Values* values = &w->values;
    double accepted = 0, all = 0;
    for (int a = 0; a < values->count; a++) {
        for (int b = 0; b < a; b++) {
            const int is_pair = values->value[a].row != values->value[b].row;
            accepted += is_pair && w->pairs[a][b] == ACCEPTED;
            all += is_pair && w->pairs[a][b] != ONLY_REFUSED;
        }
    }
    return all > 0 ? 100 * accepted / all : 0;
}

// Returns how many pairs of a value with those of a command were not drawn yet; -1 if the command
// has the option.
static int new_pairs(const World* w, const Command* c, int value) {
    int count = 0;
    for (int i = 0; i < c->count; i++) {
        if (c->setting[i].row == w->values.value[value].row) {
            return -1;
        }
        count += c->setting[i].value >= 0 && w->pairs[value][c->setting[i].value] == NOT_DRAWN_YET;
    }
    return count;
}

// Gives a command with an option of adapters a base, and drops the sizes, which this has.
static void draw_base(Command* c) {
    if (!command_gives(c, "lora-rank") && !command_gives(c, "lora-alpha") &&
        !command_gives(c, "lora-targets")) {
        return;
    }
    for (int i = c->count - 1; i >= 0; i--) {
        const OptionRow* row = &OPTION_TABLE[c->setting[i].row];
        if (strcmp(row->group, "model") == 0 && strncmp(row->name, "lora-", strlen("lora-")) != 0) {
            command_drop(c, row->name);
        }
    }
    command_set(c, "model", "in/model");
    if (!command_gives(c, "lora-rank")) {
        command_set(c, "lora-rank", "3");
    }
}

static Command draw(const World* w, uint64_t seed) {
    const Values* values = &w->values;
    Command c = {.ranks = 1, .seed = seed};
    Random r = {seed};
    for (int row = 0; row < OPTION_ROWS; row++) {
        const int count = values->first[row + 1] - values->first[row];
        if (count > 0 && row_is_core(row)) {
            command_set_value(&c, values, values->first[row] + random_below(&r, count));
        }
    }
    if (strncmp(command_get(&c, "train-data"), "in/shard", strlen("in/shard")) == 0) {
        command_set(&c, "tokenizer", "in/model"); // which knows where documents end
    }
    for (int more = 3 + random_below(&r, 10); more > 0; more--) {
        int best = -1, most = -1;
        for (int tries = 0; tries < 6; tries++) {
            const int value = random_below(&r, values->count), fresh = new_pairs(w, &c, value);
            if (fresh > most) {
                most = fresh;
                best = value;
            }
        }
        if (best >= 0) {
            command_set_value(&c, values, best);
        }
    }
    draw_base(&c);
    return c;
}

// ---- one draw ----

static void clear(World* w) {
    runs_close(w);
    w->what[0] = '\0';
    if (system("rm -rf a b a.* b.* none* shards* more* model.* scores* link disk du shown settings.txt "
               "other.*") != 0) {
        exit(2);
    }
}

static Verdict try_once(World* w, const Relation* relation, const Command* c) {
    clear(w);
    w->random.state = c->seed ^ 0x5DEECE66D;
    return relation->check(w, c);
}

// Drops the option that the refusal names. Returns false if it names none that can be left out.
static int drop_named(World* w, Command* c) {
    for (int i = c->count - 1; i >= 0; i--) {
        char name[64];
        const OptionRow* row = &OPTION_TABLE[c->setting[i].row];
        snprintf(name, sizeof(name), "--%s", row->name);
        const char* at = strstr(w->what, name);
        const int ends = at && !isalnum((unsigned char)at[strlen(name)]) && at[strlen(name)] != '-';
        if (ends && !row_is_core(c->setting[i].row)) {
            mark_pairs(w, c, c->setting[i].row, ONLY_REFUSED);
            command_drop(c, row->name);
            return 1;
        }
    }
    return 0;
}

// Leaves out settings while it still fails.
static void shrink(World* w, const Relation* relation, Command* c) {
    const time_t end = time(NULL) + SHRINK_S;
    for (int i = c->count - 1; i >= 0 && time(NULL) < end; i--) {
        const int is_needed = row_is_core(c->setting[i].row) &&
                              strcmp(OPTION_TABLE[c->setting[i].row].name, "arch") != 0 &&
                              strcmp(OPTION_TABLE[c->setting[i].row].name, "train-data") != 0;
        Command less = *c;
        command_drop(&less, OPTION_TABLE[c->setting[i].row].name);
        if (!is_needed && try_once(w, relation, &less) == FAILED) {
            *c = less;
        }
    }
    try_once(w, relation, c);
}

// Hashes a failure without its numbers: failures of one kind.
static uint64_t kind_of(const char* relation, const char* what) {
    uint64_t hash = 5381;
    for (; *relation; relation++) {
        hash = hash * 33 ^ (unsigned char)*relation;
    }
    for (; *what; what++) {
        hash =
            isdigit((unsigned char)*what) || strchr(".-+e", *what) ? hash : hash * 33 ^ (unsigned char)*what;
    }
    return hash;
}

static void keep(World* w, const char* directory, const char* name) {
    char shell[2 * PATH_MAX], path[PATH_MAX];
    snprintf(path, sizeof(path), "%s/%s/commands.sh", directory, name);
    snprintf(shell, sizeof(shell), "mkdir -p '%s/%s' && cp -a in '%s/%s'", directory, name, directory, name);
    FILE* file = system(shell) == 0 ? fopen(path, "w") : NULL;
    if (file) {
        fprintf(file, "# %s\n%s", w->what, w->script);
        fclose(file);
    }
}

static void report(World* w, const Relation* relation, Command* c, const Arguments* arguments,
                   Counts* counts) {
    const uint64_t kind = kind_of(relation->name, w->what);
    char what[sizeof(w->what)], name[64];
    int is_new = counts->num_kinds < KINDS_MAX;
    for (int i = 0; i < counts->num_kinds; i++) {
        is_new &= counts->kinds[i] != kind;
    }
    snprintf(name, sizeof(name), "%s_%016llx", relation->name, (unsigned long long)c->seed);
    if (is_new) {
        counts->kinds[counts->num_kinds++] = kind;
        snprintf(what, sizeof(what), "%s", w->what);
        shrink(w, relation, c);
        if (!w->what[0]) {
            snprintf(w->what, sizeof(w->what), "%.900s (not when tried again)", what);
        }
        keep(w, arguments->keep, name);
    }
    printf("crossings: FAILED: %s: %.*s%s%s\n", relation->name, (int)strcspn(w->what, "\n"), w->what,
           is_new ? "; kept in " : "", is_new ? name : "");
    for (const char* line = w->script; *line;
         line += strcspn(line, "\n") + (line[strcspn(line, "\n")] != '\0')) {
        printf("    %.*s\n", (int)strcspn(line, "\n"), line);
    }
    fflush(stdout);
}

static void draw_one(World* w, const Relation* relation, uint64_t seed, const Arguments* arguments,
                     Counts* counts) {
    Command c = draw(w, seed);
    if (chdir(w->work) != 0) {
        exit(2);
    }
    Verdict verdict = try_once(w, relation, &c);
    for (int tries = 0; verdict == REFUSED && tries < TRIES && drop_named(w, &c); tries++) {
        verdict = try_once(w, relation, &c);
    }
    counts->draws++;
    counts->refused += verdict == REFUSED;
    counts->unfit += verdict == UNFIT;
    counts->failed += verdict == FAILED;
    if (verdict == REFUSED && getenv("CROSSINGS_SHOW_REFUSED")) {
        printf("refused: %s: %s\n", relation->name, w->what);
    }
    if (verdict == HELD || verdict == FAILED) {
        mark_pairs(w, &c, -1, ACCEPTED);
    }
    if (verdict == FAILED) {
        report(w, relation, &c, arguments, counts);
    }
}

// ---- the whole ----

static Arguments arguments_of(int argc, char** argv) {
    Arguments a = {.seed = 1, .seconds = 60, .draws = INT_MAX, .stop_at = INT_MAX, .keep = "build/crossings"};
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        const struct {
            const char* name;
            const char** field;
        } texts[] = {{"--only", &a.only},
                     {"--trainer", &a.trainer},
                     {"--tokenize", &a.tokenize},
                     {"--gpu", &a.gpu},
                     {"--keep", &a.keep}};
        int known = 0;
        for (size_t j = 0; j < sizeof(texts) / sizeof(texts[0]); j++) {
            if (strcmp(name, texts[j].name) == 0) {
                *texts[j].field = value;
                known = 1;
            }
        }
        a.seed = strcmp(name, "--seed") == 0 ? strtoull(value, NULL, 0) : a.seed;
        a.seconds = strcmp(name, "--seconds") == 0 ? atof(value) : a.seconds;
        a.draws = strcmp(name, "--draws") == 0 ? atoi(value) : a.draws;
        a.stop_at = strcmp(name, "--stop-at") == 0 ? atoi(value) : a.stop_at;
        if (!known && strcmp(name, "--seed") != 0 && strcmp(name, "--seconds") != 0 &&
            strcmp(name, "--draws") != 0 && strcmp(name, "--stop-at") != 0) {
            a.trainer = NULL;
            break;
        }
    }
    if (!a.trainer || argc % 2 == 0) {
        fprintf(stderr,
                "usage: crossings --trainer PATH [--tokenize PATH] [--seed N] [--seconds S] [--draws N] "
                "[--only RELATION] [--gpu PATH] [--keep DIR]\n");
        exit(2);
    }
    return a;
}

static void absolute(const char** path) {
    const char* found = *path ? realpath(*path, NULL) : NULL;
    if (*path && !found) {
        perror(*path);
        exit(2);
    }
    *path = found;
}

// Compiles what starts ranks without MPI's launcher. Returns its path, NULL if there is no MPI.
static const char* make_stand_in(void) {
    static char path[] = "/tmp/mpi_stand_in_XXXXXX.so";
    char shell[256];
    const int file = mkstemps(path, 3);
    snprintf(shell, sizeof(shell), "mpicc -O1 -shared -fPIC dev/test/lib/mpi_stand_in.c -o %s 2>/dev/null",
             path);
    if (file >= 0 && system(shell) == 0) {
        return path;
    }
    printf("skipped: crossings of ranks: mpicc is missing (scripts/install_deps.sh --test)\n");
    return NULL;
}

// Opens a directory for the runs of a trainer, with all inputs.
static void world_open(World* w, const Arguments* arguments, const char* trainer, const char* stand_in) {
    w->is_gpu = trainer == arguments->gpu;
    w->trainer = trainer;
    w->tokenize = arguments->tokenize;
    w->stand_in = stand_in;
    w->rounding = w->is_gpu ? 2e-2 : 2e-5;
    snprintf(w->work, sizeof(w->work), "%s/llmc_crossings_XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (!mkdtemp(w->work) || chdir(w->work) != 0) {
        perror(w->work);
        exit(2);
    }
    if (values_open(&w->values, w->is_gpu) > 0) {
        exit(1);
    }
    inputs_make(w);
}

static void world_close(World* w) {
    char shell[512];
    runs_close(w);
    snprintf(shell, sizeof(shell), "rm -rf '%s'", w->work);
    if (chdir("/") != 0 || system(shell) != 0) {
        exit(2);
    }
}

// Draws a relation by its share.
static const Relation* draw_relation(Random* r, const char* only) {
    int all = 0, i = 0;
    for (int j = 0; j < NUM_RELATIONS; j++) {
        all += RELATIONS[j].share;
        if (only && strcmp(RELATIONS[j].name, only) == 0) {
            return &RELATIONS[j];
        }
    }
    if (only) {
        fprintf(stderr, "crossings: no relation %s\n", only);
        exit(2);
    }
    for (int at = random_below(r, all); at >= RELATIONS[i].share; i++) {
        at -= RELATIONS[i].share;
    }
    return &RELATIONS[i];
}

int main(int argc, char** argv) {
    static World worlds[2]; // on the CPU, and with --gpu
    static char kept[PATH_MAX];
    Arguments arguments = arguments_of(argc, argv);
    Counts counts = {0};
    Random r = {arguments.seed};
    const char* stand_in = make_stand_in();
    if (arguments.keep[0] != '/' && getcwd(kept, sizeof(kept) - 256)) {
        snprintf(kept + strlen(kept), 256, "/%s", arguments.keep);
        arguments.keep = kept;
    }
    absolute(&arguments.trainer);
    absolute(&arguments.tokenize);
    absolute(&arguments.gpu);
    setenv("OMP_WAIT_POLICY", "passive", 1);
    setenv("OMP_NUM_THREADS", "1", 1);
    setenv("LC_ALL", "C", 1);
    world_open(&worlds[0], &arguments, arguments.trainer, stand_in);
    if (arguments.gpu) {
        world_open(&worlds[1], &arguments, arguments.gpu, stand_in);
    }
    for (const time_t end = time(NULL) + (time_t)arguments.seconds;
         time(NULL) < end && counts.draws < arguments.draws && counts.failed < arguments.stop_at;) {
        const Relation* relation = draw_relation(&r, arguments.only);
        const uint64_t seed =
            ((uint64_t)random_below(&r, INT_MAX) << 32) + (uint64_t)random_below(&r, INT_MAX);
        draw_one(&worlds[arguments.gpu && counts.draws % 10 == 9], relation, seed, &arguments, &counts);
    }
    world_close(&worlds[0]);
    if (arguments.gpu) {
        world_close(&worlds[1]);
    }
    if (stand_in) {
        unlink(stand_in);
    }
    printf("crossings: seed %llu: %d draws, %d refused, %d failed, %.1f %% of pairs\n",
           (unsigned long long)arguments.seed, counts.draws, counts.refused, counts.failed,
           share_of_pairs(&worlds[0]));
    return counts.failed > 0;
}
