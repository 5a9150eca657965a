// test_checkpoint.c -- checkpoints are whole, --keep removes the right ones and nothing else, and a save that
// fails leaves what was there.
#include <signal.h>
#include <sys/resource.h>

#include "llmc/checkpoint.h"
#include "test.h"

static const GPT2Config TINY = {.max_T = 6, .V = 5, .Vp = 128, .L = 1, .NH = 2, .C = 4};

// One run's directory and options.
typedef struct {
    char out[256];
    int keep, major;
} Run;

static Run run_open(const char* name, int keep, int major) {
    Run run;
    snprintf(run.out, sizeof(run.out), "%s", test_path(name));
    run.keep = keep;
    run.major = major;
    EXPECT(mkdir(run.out, 0777) == 0, "%s", run.out);
    return run;
}

// Saves a model whose weights are all `value`; path becomes what checkpoint_save says.
static void save_value(char path[PATH_MAX], const Run* run, int64_t step, float value) {
    TensorRow rows[GPT2_PARAMETER_ROWS];
    const size_t bytes = gpt2_parameter_rows(rows, TINY);
    float* memory = (float*)check_alloc(bytes, 1, "model");
    for (size_t i = 0; i < bytes / sizeof(float); i++) {
        memory[i] = value;
    }
    checkpoint_save(path, run->out, step, run->keep, run->major, TINY, rows, memory);
    free(memory);
}

static void save(const Run* run, int64_t step) {
    char path[PATH_MAX];
    save_value(path, run, step, (float)step);
}

// The value of the weights in a directory's model, or NAN if there is no directory.
static float value_in(const char* out, const char* directory) {
    char path[PATH_MAX];
    struct stat info;
    snprintf(path, sizeof(path), "%s/%s/model.bin", out, directory);
    if (stat(path, &info) != 0) {
        return NAN;
    }
    TensorRow rows[GPT2_PARAMETER_ROWS];
    float* memory = (float*)check_alloc(gpt2_parameter_rows(rows, TINY), 1, "model");
    model_file_read(path, rows, memory);
    const float value = memory[0];
    free(memory);
    return value;
}

static int compare_names(const void* a, const void* b) { return strcmp((const char*)a, (const char*)b); }

// The entries of a directory in order, separated by blanks, "step_" and leading zeros left out.
static const char* list_of(const char* directory) {
    static char list[4096];
    char names[64][256];
    int count = 0;
    struct dirent* entry;
    DIR* dir = opendir(directory);
    while (dir && count < 64 && (entry = readdir(dir))) {
        if (entry->d_name[0] != '.') {
            strcpy(names[count++], entry->d_name);
        }
    }
    if (dir) {
        closedir(dir);
    }
    qsort(names, (size_t)count, sizeof(names[0]), compare_names);
    list[0] = '\0';
    for (int i = 0; i < count; i++) {
        const char* name = names[i] + (strncmp(names[i], "step_0", 6) == 0 ? strspn(names[i], "step_0") : 0);
        snprintf(list + strlen(list), sizeof(list) - strlen(list), "%s%s", i ? " " : "", name);
    }
    return list;
}

static void expect_list(const Run* run, const char* wanted) {
    const char* list = list_of(run->out);
    EXPECT(strcmp(list, wanted) == 0, "%s has \"%s\", wanted \"%s\"", run->out, list, wanted);
}

// ---- saving ----

static void test_save(void) {
    const Run run = run_open("save", 0, 0);
    char path[PATH_MAX], wanted[PATH_MAX];
    save_value(path, &run, 1000, 0.5f);
    snprintf(wanted, sizeof(wanted), "%s/step_00001000", run.out);
    EXPECT(strcmp(path, wanted) == 0, "saved as %s", path);
    EXPECT(strcmp(list_of(path), "model.bin") == 0, "it holds \"%s\"", list_of(path));
    EXPECT(value_in(run.out, "step_00001000") == 0.5f, "the weights");
    save_value(path, &run, 123456789012, 2);
    EXPECT(value_in(run.out, "step_123456789012") == 2, "more than eight digits");
    save(&run, 7);
    save(&run, 3);
    expect_list(&run, "3 7 1000 step_123456789012"); // 0: all are kept
}

// A later run in the same place replaces what it finds, whole.
static void test_replace(void) {
    const Run run = run_open("replace", 0, 0);
    char path[PATH_MAX];
    save_value(path, &run, 10, 1);
    test_write("replace/step_00000010/notes.txt", "x", 1);
    save_value(path, &run, 10, 2);
    EXPECT(value_in(run.out, "step_00000010") == 2, "the new weights");
    EXPECT(strcmp(list_of(path), "model.bin") == 0, "it holds \"%s\"", list_of(path));
    expect_list(&run, "10");
}

// Of a run that was killed while it saved.
static void test_left_over(void) {
    const Run run = run_open("left_over", 1, 0);
    mkdir(test_path("left_over/step_00000005.part"), 0777);
    test_write("left_over/step_00000005.part/model.bin.part", "half", 4);
    test_write("left_over/step_00000005.part/other", "half", 4);
    mkdir(test_path("left_over/step_00000099.part"), 0777);
    save(&run, 5);
    EXPECT(value_in(run.out, "step_00000005") == 5, "saved");
    EXPECT(strcmp(list_of(test_path("left_over/step_00000005")), "model.bin") == 0, "without the rest");
    save(&run, 6);
    expect_list(&run, "6 99.part"); // not a checkpoint: not counted, not removed
}

// ---- keeping ----

static void test_keep(void) {
    const Run one = run_open("keep_1", 1, 0), three = run_open("keep_3", 3, 0);
    for (int64_t step = 5; step <= 25; step += 5) {
        save(&one, step);
        save(&three, step);
    }
    expect_list(&one, "25");
    expect_list(&three, "15 20 25");
    save(&three, 99999998);
    save(&three, 100000000); // by number, not by name
    save(&three, 100000001);
    expect_list(&three, "step_100000000 step_100000001 step_99999998");
}

static void test_keep_major(void) {
    const Run run = run_open("major", 2, 10), only_major = run_open("only_major", 0, 10);
    for (int64_t step = 2; step <= 32; step += 2) {
        save(&run, step);
        save(&only_major, step);
    }
    expect_list(&run, "10 20 28 30 32");
    expect_list(&only_major, "2 4 6 8 10 12 14 16 18 20 22 24 26 28 30 32"); // --keep 0: all
}

// Checkpoints of an earlier, longer run in the same place stay, and do not push out the new ones.
static void test_earlier_run(void) {
    const Run run = run_open("earlier", 1, 0);
    save(&run, 1000);
    save(&run, 10);
    expect_list(&run, "10 1000");
    save(&run, 20);
    expect_list(&run, "20 1000");
    save(&run, 1000);
    expect_list(&run, "1000");
}

// What only resembles a checkpoint is nobody's business.
static void test_other_entries(void) {
    static const char* const directories[] = {"step_3",         "step_",         "step_00000001.old",
                                              "step_00000001x", "step_-0000001", "steps",
                                              "xstep_00000001", "step_000000002"};
    const Run run = run_open("others", 1, 0);
    for (int i = 0; i < 8; i++) {
        char name[64];
        snprintf(name, sizeof(name), "others/%s", directories[i]);
        EXPECT(mkdir(test_path(name), 0777) == 0, "%s", name);
        snprintf(name, sizeof(name), "others/%s/model.bin", directories[i]);
        test_write(name, "mine", 4);
    }
    test_write("others/log.jsonl", "{}\n", 3);
    alarm(20); // a search for what cannot be removed must end
    save(&run, 10);
    save(&run, 20);
    alarm(0);
    for (int i = 0; i < 8; i++) {
        char name[64];
        struct stat info;
        snprintf(name, sizeof(name), "others/%s/model.bin", directories[i]);
        EXPECT(stat(test_path(name), &info) == 0 && info.st_size == 4, "%s is touched", name);
    }
    EXPECT(value_in(run.out, "step_00000020") == 20 && isnan(value_in(run.out, "step_00000010")), "kept");
    EXPECT(strncmp(list_of(run.out), "log.jsonl ", 10) == 0, "%s", list_of(run.out));
}

// A checkpoint that cannot be removed, here because of a directory in it, ends neither the run nor the save.
static void test_cannot_remove(void) {
    const Run run = run_open("stuck", 1, 0);
    save(&run, 1);
    mkdir(test_path("stuck/step_00000001/mine"), 0777);
    alarm(20);
    save(&run, 2);
    alarm(0);
    EXPECT(value_in(run.out, "step_00000002") == 2, "saved");
    expect_list(&run, "1 2");
}

// ---- failures ----

static void body_save(const void* run) {
    char path[PATH_MAX];
    save_value(path, (const Run*)run, 30, 30);
}

// As on a full disk: a file cannot grow beyond 2 KiB.
static void body_save_limited(const void* run) {
    const struct rlimit limit = {2048, 2048};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    body_save(run);
}

static void test_full_disk(void) {
    const Run run = run_open("full", 1, 0);
    save(&run, 20);
    EXPECT(test_dies(body_save_limited, &run, 1, "error: |step_00000030|model.bin|File too large"), "full");
    EXPECT(value_in(run.out, "step_00000020") == 20, "the older one stays");
    EXPECT(isnan(value_in(run.out, "step_00000030")), "the new one is not there");
    EXPECT(list_of(test_path("full/step_00000030.part"))[0] == '\0', "no half of it either");
    char path[PATH_MAX];
    save_value(path, &run, 30, 1);
    EXPECT(test_dies(body_save_limited, &run, 1, "error: |step_00000030|File too large"), "full again");
    EXPECT(value_in(run.out, "step_00000030") == 1, "an older one of the same step stays, too");
}

static void test_bad_places(void) {
    const Run run = run_open("bad", 1, 0);
    Run missing = run, file = run, long_name = run;
    snprintf(missing.out, sizeof(missing.out), "%s", test_path("bad/missing"));
    EXPECT(test_dies(body_save, &missing, 1, "error: |bad/missing/step_00000030|No such file"), "missing");
    snprintf(file.out, sizeof(file.out), "%s", test_write("bad/file", "x", 1));
    EXPECT(test_dies(body_save, &file, 1, "error: |bad/file/step_00000030|Not a directory"), "a file");
    memset(long_name.out, 'x', sizeof(long_name.out) - 1);
    EXPECT(test_dies(body_save, &long_name, 1, "error: |step_00000030|cannot make"), "a long name");
    test_write("bad/step_00000030", "mine", 4); // a file where the checkpoint should be
    EXPECT(test_dies(body_save, &run, 1, "error: |step_00000030|Not a directory"), "in the way");
    expect_list(&run, "file 30 30.part");
}

int main(void) {
    test_save();
    test_replace();
    test_left_over();
    test_keep();
    test_keep_major();
    test_earlier_run();
    test_other_entries();
    test_cannot_remove();
    test_full_disk();
    test_bad_places();
    return test_done("checkpoint");
}
