// runs.c -- see crossings.h: starts the trainer as a user would, and compares what runs leave.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "dev/test/crossings/crossings.h"

enum { RANKS_MAX = 8, WORDS_MAX = SETTINGS_MAX + 4, WAIT_S = 100, CPU_S = 50 };

Verdict failed(World* world, const char* format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(world->what, sizeof(world->what), format, list);
    va_end(list);
    return FAILED;
}

// ---- starting processes ----

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void become(World* world, char* const* words, const char* name, int rank, int ranks) {
    const struct rlimit cpu = {CPU_S, CPU_S}, core = {0, 0};
    char path[512], number[16], of[16];
    snprintf(path, sizeof(path), "%s.txt", name);
    const int out = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    snprintf(path, sizeof(path), "%s.err", name);
    const int err = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    const int in = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (in < 0 || out < 0 || err < 0 || dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0) {
        _exit(126);
    }
    setrlimit(RLIMIT_CPU, &cpu);
    setrlimit(RLIMIT_CORE, &core);
    if (ranks > 1) {
        snprintf(number, sizeof(number), "%d", rank);
        snprintf(of, sizeof(of), "%d", ranks);
        snprintf(path, sizeof(path), "%s/messages", world->work);
        setenv("OMPI_COMM_WORLD_RANK", number, 1);
        setenv("OMPI_COMM_WORLD_LOCAL_RANK", number, 1);
        setenv("OMPI_COMM_WORLD_SIZE", of, 1);
        setenv("OMPI_COMM_WORLD_LOCAL_SIZE", of, 1);
        setenv("LLMC_RANKS_FILE", path, 1);
        setenv("LD_PRELOAD", world->stand_in, 1);
    }
    execv(words[0], words);
    _exit(126);
}

// Processes of one command.
typedef struct {
    pid_t pid[RANKS_MAX]; // 0: has ended
    int count, running, status;
    int is_told; // a rank has failed, and the others got SIGTERM
    double peak_mb, end_s;
} Job;

// Times after the failure of a rank: a launcher ends the others at once, but not before they can
// handle it; who stays too long is killed. Ranks that refuse a command hold their message for 2 s.
#define TELL_S 0.1
#define KILL_S 4

static Job job_start(World* world, char* const* words, const char* name, int ranks) {
    Job job = {.count = ranks, .running = ranks, .end_s = now_s() + WAIT_S};
    char path[512];
    snprintf(path, sizeof(path), "%s.txt", name);
    unlink(path);
    snprintf(path, sizeof(path), "%s.err", name);
    unlink(path);
    unlink("messages");
    fflush(stdout);
    for (int rank = 0; rank < ranks; rank++) {
        job.pid[rank] = fork();
        if (job.pid[rank] == 0) {
            become(world, words, name, rank, ranks);
        }
    }
    return job;
}

static void job_signal(const Job* job, int signal) {
    for (int rank = 0; rank < job->count; rank++) {
        if (job->pid[rank] > 0) {
            kill(job->pid[rank], signal);
        }
    }
}

// Collects the ranks that have ended. If one has failed, ends the others, as a launcher does.
static void job_look(Job* job) {
    for (int rank = 0; rank < job->count; rank++) {
        struct rusage usage;
        int status;
        if (job->pid[rank] > 0 && wait4(job->pid[rank], &status, WNOHANG, &usage) == job->pid[rank]) {
            const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
            job->pid[rank] = 0;
            job->running--;
            job->peak_mb = fmax(job->peak_mb, (double)usage.ru_maxrss / 1024);
            if (code != 0 && job->status == 0) {
                job->status = code;
                job->end_s = fmin(job->end_s, now_s() + KILL_S);
            }
        }
    }
    if (job->running > 0 && job->status != 0 && !job->is_told && now_s() > job->end_s - KILL_S + TELL_S) {
        job_signal(job, SIGTERM);
        job->is_told = 1;
    }
    if (job->running > 0 && now_s() > job->end_s) {
        job_signal(job, SIGKILL);
        job->status = job->status ? job->status : -1;
        job->end_s = INFINITY;
    }
}

static void job_wait(Job* job) {
    while (job->running > 0) {
        job_look(job);
        usleep(300);
    }
}

int run_words(World* world, char* const* words) {
    Job job = job_start(world, words, "other", 1);
    job_wait(&job);
    return job.status;
}

// ---- what a run leaves ----

char* read_file(const char* path, size_t* bytes) {
    FILE* file = fopen(path, "rb");
    char* text = NULL;
    size_t room = 0;
    *bytes = 0;
    while (file && !feof(file)) {
        room = room ? 2 * room : 4096;
        text = (char*)realloc(text, room + 1);
        *bytes += fread(text + *bytes, 1, room - *bytes, file);
        text[*bytes] = '\0';
        if (ferror(file)) {
            break;
        }
    }
    if (file) {
        fclose(file);
    }
    return text;
}

uint64_t hash_file(const char* path) {
    size_t bytes;
    char* text = read_file(path, &bytes);
    uint64_t hash = 0xCBF29CE484222325u; // FNV-1a
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ (unsigned char)text[i]) * 0x100000001B3u;
    }
    free(text);
    return hash;
}

uint64_t hash_tree(const char* path) {
    struct dirent** entries;
    const int count = scandir(path, &entries, NULL, alphasort);
    uint64_t hash = (uint64_t)(count + 1);
    for (int i = 0; i < count; i++) {
        char below[512];
        struct stat is;
        snprintf(below, sizeof(below), "%s/%s", path, entries[i]->d_name);
        if (entries[i]->d_name[0] != '.' && lstat(below, &is) == 0) {
            const uint64_t part = S_ISDIR(is.st_mode) ? hash_tree(below) : hash_file(below);
            for (const char* at = entries[i]->d_name; *at; at++) {
                hash = (hash ^ (unsigned char)*at) * 0x100000001B3u;
            }
            hash = (hash ^ part) * 0x9E3779B97F4A7C15u;
        }
        free(entries[i]);
    }
    if (count >= 0) {
        free(entries);
    }
    return hash;
}

int line_number(const char* line, const char* key, double* value) {
    char quoted[48];
    snprintf(quoted, sizeof(quoted), "\"%s\":", key);
    const char* at = strstr(line, quoted);
    if (at) {
        char* end;
        *value = strtod(at + strlen(quoted), &end);
        if (end == at + strlen(quoted)) {
            *value = NAN; // null
        }
    }
    return at != NULL;
}

static void run_read_log(Run* run) {
    char path[512];
    size_t bytes;
    snprintf(path, sizeof(path), "%s/log.jsonl", run->out);
    char* text = read_file(path, &bytes);
    for (char* line = text; line && *line && run->count < ROWS_MAX;) {
        char* end = strchr(line, '\n');
        LogRow row = {"", "", 0, NULL};
        if (end) {
            *end = '\0';
        }
        const char* name = strstr(line, "\"name\":\"");
        if (sscanf(line, "{\"kind\":\"%15[a-z]\",\"step\":%d", row.kind, &row.step) == 2) {
            snprintf(row.name, sizeof(row.name), "%s", name ? name + 8 : "");
            row.name[strcspn(row.name, "\"")] = '\0';
            row.line = strdup(line);
            run->row[run->count++] = row;
        }
        line = end ? end + 1 : NULL;
    }
    free(text);
}

// Finds the line with the error, and anything that no run should print.
static void run_read_errors(Run* run, const char* name) {
    char path[512];
    size_t bytes;
    int errors = 0, repeated = 0;
    snprintf(path, sizeof(path), "%s.err", name);
    char* text = read_file(path, &bytes);
    for (char* line = text; line && *line;) {
        char* end = strchr(line, '\n');
        if (end) {
            *end = '\0';
        }
        if (strncmp(line, "error: ", 7) == 0 && errors++ == 0) {
            snprintf(run->error, sizeof(run->error), "%s", line);
        }
        repeated += errors > 1 && strncmp(line, run->error, sizeof(run->error) - 1) == 0;
        if (strstr(line, "Sanitizer") || strstr(line, "runtime error:") || strstr(line, "Assertion")) {
            snprintf(run->strange, sizeof(run->strange), "%s", line);
        }
        line = end ? end + 1 : NULL;
    }
    if (run->status == -1) {
        snprintf(run->strange, sizeof(run->strange), "has not ended after %d s", WAIT_S);
    } else if (run->status > 2) {
        snprintf(run->strange, sizeof(run->strange), "status %d: %.400s", run->status, text ? text : "");
    } else if (run->status != 0 && errors == 0) {
        snprintf(run->strange, sizeof(run->strange), "status %d without an error: %.400s", run->status, text);
    } else if (repeated < errors - 1 || (run->status == 0 && errors > 0)) {
        // ranks that end late repeat the error of a wrong command line
        snprintf(run->strange, sizeof(run->strange), "status %d and %d errors: %.400s", run->status, errors,
                 text ? text : "");
    }
    free(text);
}

// ---- runs ----

static void script_add(World* world, const char* format, ...) {
    const size_t used = strlen(world->script);
    va_list list;
    va_start(list, format);
    vsnprintf(world->script + used, sizeof(world->script) - used, format, list);
    va_end(list);
}

// Words of a command, in `text`; adds them to the script.
static void command_words(World* world, const Command* command, const char* out,
                          char text[WORDS_MAX][VALUE_BYTES + 32], char** words) {
    int count = 0;
    words[count++] = (char*)world->trainer;
    if (command->ranks > 1) {
        script_add(world, "mpirun --oversubscribe -n %d ", command->ranks);
    }
    script_add(world, "%s", world->trainer);
    for (int i = 0; i < command->count; i++) {
        const Setting* setting = &command->setting[i];
        const OptionRow* row = &OPTION_TABLE[setting->row];
        char value[VALUE_BYTES];
        command_text(command, setting, value);
        if (*value || strcmp(row->name, "train-data") != 0) { // which has no name for the stories
            const int is_flag = row->type == OPTION_FLAG;
            snprintf(text[count], sizeof(text[0]), is_flag ? "--%s" : "--%s=%s", row->name, value);
            script_add(world, is_flag ? " --%s" : " --%s='%s'", row->name, value);
            words[count] = text[count];
            count++;
        }
    }
    if (out) {
        snprintf(text[count], sizeof(text[0]), "--out=%s", out);
        script_add(world, " --out %s", out);
        words[count] = text[count];
        count++;
    }
    script_add(world, "\n");
    words[count] = NULL;
}

static Job command_start(World* world, const Command* command, const char* out) {
    char text[WORDS_MAX][VALUE_BYTES + 32], *words[WORDS_MAX + 1];
    command_words(world, command, out, text, words);
    return job_start(world, words, out ? out : "none", command->ranks > 1 ? command->ranks : 1);
}

static Verdict inputs_are_untouched(World* world) {
    if (hash_tree("in") == world->inputs) {
        return HELD;
    }
    FILE* differ = popen("diff -rq in kept | tr '\\n' ' '", "r");
    char line[512] = "";
    if (differ) {
        if (!fgets(line, sizeof(line), differ)) {
            line[0] = '\0';
        }
        pclose(differ);
    }
    inputs_restore();
    return failed(world, "an input was changed: %s", line);
}

const Run* run(World* world, const Command* command, const char* out, Verdict* verdict) {
    Job job = command_start(world, command, out);
    Run* run = &world->runs[world->num_runs++];
    job_wait(&job);
    memset(run, 0, sizeof(*run));
    run->status = job.status;
    run->peak_mb = job.peak_mb;
    run->out = out ? out : "none";
    run_read_errors(run, run->out);
    run_read_log(run);
    *verdict = HELD;
    if (run->strange[0]) {
        *verdict = failed(world, "%s", run->strange);
    } else if (run->status != 0) {
        snprintf(world->what, sizeof(world->what), "%s", run->error);
        *verdict = REFUSED;
    }
    *verdict = inputs_are_untouched(world) == FAILED ? FAILED : *verdict;
    return *verdict == HELD ? run : NULL;
}

// Returns true once the log has a line of training of this step.
static int has_reached(const char* out, int step) {
    char path[512], wanted[64];
    size_t bytes;
    snprintf(path, sizeof(path), "%s/log.jsonl", out);
    snprintf(wanted, sizeof(wanted), "{\"kind\":\"train\",\"step\":%d,", step);
    char* text = read_file(path, &bytes);
    const int found = text && strstr(text, wanted) != NULL;
    free(text);
    return found;
}

int run_and_stop(World* world, const Command* command, const char* out, int signal, int step) {
    Job job = command_start(world, command, out);
    script_add(world, "# signal %d after step %d\n", signal, step);
    while (job.running > 0 && !has_reached(out, step)) {
        job_look(&job);
        usleep(100);
    }
    job_signal(&job, signal);
    job_wait(&job);
    return job.status;
}

void runs_close(World* world) {
    for (int i = 0; i < world->num_runs; i++) {
        for (int j = 0; j < world->runs[i].count; j++) {
            free(world->runs[i].row[j].line);
        }
    }
    world->num_runs = 0;
    world->script[0] = '\0';
}

// ---- comparing ----

static const LogRow* row_like(const Run* run, const LogRow* row) {
    const LogRow* found = NULL; // the last one: a resumed run repeats some
    for (int i = 0; i < run->count; i++) {
        const LogRow* r = &run->row[i];
        if (r->step == row->step && strcmp(r->kind, row->kind) == 0 && strcmp(r->name, row->name) == 0) {
            found = r;
        }
    }
    return found;
}

static Verdict rows_agree(World* world, const LogRow* a, const LogRow* b, double tolerance) {
    static const char* const keys[] = {"loss", "norm", "kl", "expert_load", "router_entropy", "average_loss"};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        double x = 0, y = 0;
        const int has = line_number(a->line, keys[i], &x), has_too = line_number(b->line, keys[i], &y);
        const double most = tolerance * fmax(fmax(fabs(x), fabs(y)), 1e-3);
        if (has && has_too && !(fabs(x - y) <= most) && !(isnan(x) && isnan(y))) {
            return failed(world, "%s %s of step %d: %s %.9g and %.9g", a->kind, a->name, a->step, keys[i], x,
                          y);
        }
    }
    return HELD;
}

Verdict runs_agree(World* world, const Run* a, const Run* b, double tolerance, int which) {
    for (int i = 0; i < a->count; i++) {
        const LogRow* row = &a->row[i];
        const int is_train = strcmp(row->kind, "train") == 0,
                  is_val = strcmp(row->kind, "val") == 0 || strcmp(row->kind, "set") == 0;
        const LogRow* other = row_like(b, row);
        const int is_meant = (is_train && (which & TRAIN_ROWS)) || (is_val && (which & VAL_ROWS));
        if (!is_meant || ((which & FIRST_ROWS) && row->step > is_train)) {
            continue;
        }
        if (!other && is_train) {
            return failed(world, "step %d is only in %s", row->step, a->out);
        }
        if (other && rows_agree(world, row, other, tolerance) == FAILED) {
            return FAILED;
        }
    }
    return HELD;
}

const char* last_checkpoint(const char* out, char path[512]) {
    struct dirent** entries;
    const int count = scandir(out, &entries, NULL, alphasort);
    path[0] = '\0';
    for (int i = 0; i < count; i++) {
        if (strncmp(entries[i]->d_name, "step_", 5) == 0) {
            snprintf(path, 512, "%s/%s", out, entries[i]->d_name);
        }
        free(entries[i]);
    }
    if (count >= 0) {
        free(entries);
    }
    return path[0] ? path : NULL;
}

Verdict runs_have_the_same_weights(World* world, const Run* a, const Run* b) {
    static const char* const files[] = {"model.safetensors", "adapter_model.safetensors",
                                        "model_average.safetensors"};
    char of_a[512], of_b[512], path_a[600], path_b[600];
    struct stat is;
    if (!last_checkpoint(a->out, of_a) || !last_checkpoint(b->out, of_b) ||
        strcmp(strchr(of_a, '/'), strchr(of_b, '/')) != 0) {
        return HELD;
    }
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        snprintf(path_a, sizeof(path_a), "%s/%s", of_a, files[i]);
        snprintf(path_b, sizeof(path_b), "%s/%s", of_b, files[i]);
        if (stat(path_a, &is) == 0 && stat(path_b, &is) == 0 && hash_file(path_a) != hash_file(path_b)) {
            return failed(world, "%s and %s differ", path_a, path_b);
        }
    }
    return HELD;
}
