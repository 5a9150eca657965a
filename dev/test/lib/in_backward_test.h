/*
in_backward_test.h -- tests updates during the backward pass, for both trainers.

Without clipping, a run has the bits of one that updates after the pass. With clipping, a resumed
run has the same bits. Combinations that cannot work are refused.
*/
#ifndef DEV_TEST_IN_BACKWARD_TEST_H
#define DEV_TEST_IN_BACKWARD_TEST_H

#include <sys/wait.h>
#include <unistd.h>

#include "dev/test/lib/resume_test.h"

// Steps up to the checkpoint that is resumed, and as many after it.
#ifdef SANITIZED
enum { IN_BACKWARD_HALF = 1 };
#else
enum { IN_BACKWARD_HALF = 2 };
#endif

// Makes a line of options. An update is one micro-batch. With three blocks, two share a buffer of
// gradients.
static inline void in_backward_line_(char line[1024], int layers, const char* options) {
    snprintf(
        line, 1024,
        "--layers %d --channels 64 --heads 2 --seq-len 16 --batch 2 --lr 0.01 --samples 1 --sample-tokens 2 "
        "--eval-batches 1 --eval-every %d --sample-every %d --steps %d --save-every %d --out %s",
        layers, IN_BACKWARD_HALF, IN_BACKWARD_HALF, 2 * IN_BACKWARD_HALF, IN_BACKWARD_HALF, options);
}

// The two runs have the same bits, logged norms included.
static inline void in_backward_same_bits_(int layers, const char* options) {
    char rest[640], line[1024], whole[2][256];
    static int count = 0;
    count++;
    for (int i = 0; i < 2; i++) {
        const char* out = test_path(i ? "in_backward" : "after");
        snprintf(whole[i], sizeof(whole[i]), "%s%d/step_%08d", out, count, 2 * IN_BACKWARD_HALF);
        snprintf(rest, sizeof(rest), "%s%d --grad-clip 0 --update-in-backward %s %s", out, count,
                 i ? "on" : "off", options);
        in_backward_line_(line, layers, rest);
        EXPECT(resume_run_(line) == 0, "%s", line);
    }
    resume_expect_same_(whole[0], whole[1], line);
}

// Clipped in every update, so that the shares matter; they are in the checkpoint.
static inline void in_backward_resume_(const char* options) {
    const char* out = test_path("shares");
    char rest[512], line[1024], whole[256], again[256];
    snprintf(whole, sizeof(whole), "%s/a/step_%08d", out, 2 * IN_BACKWARD_HALF);
    snprintf(again, sizeof(again), "%s/b/step_%08d", out, 2 * IN_BACKWARD_HALF);
    snprintf(rest, sizeof(rest), "%s/a --grad-clip 0.1 --optimizer sgd --update-in-backward on %s", out,
             options);
    in_backward_line_(line, 3, rest);
    EXPECT(resume_run_(line) == 0, "%s", line);
    snprintf(line, sizeof(line), "--resume %s/a/step_%08d --out %s/b", out, IN_BACKWARD_HALF, out);
    EXPECT(resume_run_(line) == 0, "%s", line);
    resume_expect_same_(whole, again, "resumed with shares");
    SavedState a = resume_state_(whole), b = resume_state_(again);
    EXPECT(a.run.shares.updates == 2 * IN_BACKWARD_HALF &&
               memcmp(&a.run.shares, &b.run.shares, sizeof(ClipShares)) == 0,
           "%lld updates in the shares, and %lld", (long long)a.run.shares.updates,
           (long long)b.run.shares.updates);
    state_close(&a);
    state_close(&b);
}

// `optimizers` is a list that ends with NULL.
static inline void test_in_backward(const char* const* optimizers, const char* options) {
    char line[512];
    for (int i = 0; optimizers[i]; i++) {
        snprintf(line, sizeof(line), "--optimizer %s %s", optimizers[i], options);
        in_backward_same_bits_(3, line);
    }
    in_backward_resume_(options);
}

#endif
