/*
resume_test.h -- a run that resumes from a checkpoint has the same bits as one that never stopped:
for both trainers.
*/
#ifndef DEV_TEST_RESUME_TEST_H
#define DEV_TEST_RESUME_TEST_H

#include <fcntl.h>
#include <stddef.h>

#include "llmc/base/check.h"
#include "llmc/base/xxh64.h"
#include "llmc/checkpoint/directory.h"
#include "llmc/checkpoint/run_state.h"
#include "llmc/run/start.h"
#include "dev/test/lib/test.h"

// Runs the trainer with a line of options; what it prints goes nowhere. Returns its exit status.
static inline int resume_run_(const char* line) {
    char words[2048 + sizeof("trainer ")], *argv[128], *save = NULL;
    int argc = 0;
    snprintf(words, sizeof(words), "trainer %s", line);
    for (char* word = strtok_r(words, " ", &save); word && argc < 127; word = strtok_r(NULL, " ", &save)) {
        argv[argc++] = word;
    }
    argv[argc] = NULL;
    fflush(stdout);
    const int screen = dup(STDOUT_FILENO), nowhere = open("/dev/null", O_WRONLY);
    dup2(nowhere, STDOUT_FILENO);
    const int status = run_program(argc, argv, &trainer, train);
    fflush(stdout);
    dup2(screen, STDOUT_FILENO);
    close(screen);
    close(nowhere);
    return status;
}

static inline SavedState resume_state_(const char* directory) {
    SavedState state;
    char error[ERROR_BYTES];
    CHECK(checkpoint_try_check(&state, directory, error), "%s", error);
    return state;
}

// The checksum of a file of a checkpoint, as its state says.
static inline uint64_t resume_checksum_(const SavedState* state, const char* name) {
    for (int i = 0; i < state->num_files; i++) {
        if (strcmp(state->files[i].name, name) == 0) {
            return state->files[i].xxh64;
        }
    }
    return 0;
}

// All that two checkpoints hold, but for options and names.
static inline void resume_expect_same_(const char* one, const char* other, const char* what) {
    SavedState a = resume_state_(one), b = resume_state_(other);
    static const char* const files[] = {"model.safetensors", "optimizer.1of1.safetensors", "config.json"};
    for (int i = 0; i < 3; i++) {
        const uint64_t sum = resume_checksum_(&a, files[i]);
        EXPECT(sum && sum == resume_checksum_(&b, files[i]), "%s: %s", what, files[i]);
    }
    const RunState *x = &a.run, *y = &b.run;
    EXPECT(x->step == y->step && x->updates == y->updates && x->tokens == y->tokens &&
               x->sequence == y->sequence && x->samples_at == y->samples_at && x->samples_at > 0,
           "%s: where it stands", what);
    EXPECT(x->val_loss == y->val_loss && x->validations.best == y->validations.best &&
               x->validations.best_step == y->validations.best_step &&
               x->validations.since == y->validations.since,
           "%s: validations", what);
    EXPECT(memcmp(&x->guard, &y->guard, sizeof(x->guard)) == 0 &&
               memcmp(&x->loss_scale, &y->loss_scale, sizeof(x->loss_scale)) == 0,
           "%s: guard and loss scale", what);
    state_close(&a);
    state_close(&b);
}

// Steps up to the checkpoint that is resumed, and as many after it.
enum { RESUME_HALF = 5 };

// A run at once, and in two halves; the second half also with other micro-batches, which read the
// same data.
static inline void test_resume(const char* options) {
    char line[2048], out[128], half[256], whole[256], again[256];
    static int count = 0;
    snprintf(out, sizeof(out), "%s/%d", test_tmpdir(), count++);
    snprintf(half, sizeof(half), "%s/a/step_%08d", out, RESUME_HALF);
    snprintf(whole, sizeof(whole), "%s/a/step_%08d", out, 2 * RESUME_HALF);
    snprintf(again, sizeof(again), "%s/b/step_%08d", out, 2 * RESUME_HALF);
    snprintf(
        line, sizeof(line),
        "--layers 2 --channels 16 --heads 2 --seq-len 16 --batch 2 --total-batch 64 --steps %d "
        "--eval-every %d "
        "--eval-batches 1 --sample-every 3 --sample-tokens 4 --samples 1 --skip-loss-z 2 --save-every %d "
        "--out %s/a %s",
        2 * RESUME_HALF, RESUME_HALF - 1, RESUME_HALF, out, options);
    EXPECT(resume_run_(line) == 0, "%s", line);
    snprintf(line, sizeof(line), "--resume %s --out %s/b", half, out);
    EXPECT(resume_run_(line) == 0, "%s", line);
    resume_expect_same_(whole, again, *options ? options : "resume");

    snprintf(line, sizeof(line), "--resume %s --batch 1 --out %s/c", half, out);
    EXPECT(resume_run_(line) == 0, "%s", line);
    snprintf(again, sizeof(again), "%s/c/step_%08d", out, 2 * RESUME_HALF);
    SavedState a = resume_state_(whole), c = resume_state_(again);
    EXPECT(a.run.sequence == c.run.sequence && a.run.sequence == 8 * RESUME_HALF,
           "data of other micro-batches");
    // measured on two sequences, and on one
    EXPECT_NEAR(a.run.val_loss, c.run.val_loss, 0.04 * a.run.val_loss, "their loss");
    state_close(&a);
    state_close(&c);
}

#endif
