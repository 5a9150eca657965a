/*
in_backward_test.h -- updates during the backward pass, for both trainers: without clipping a run has the bits of one that
updates after the pass; with clipping a resumed run has the same bits; and what is refused.

defines: test_in_backward
*/
#ifndef DEV_TEST_IN_BACKWARD_TEST_H
#define DEV_TEST_IN_BACKWARD_TEST_H

#include <sys/wait.h>
#include <unistd.h>

#include "resume_test.h"

// An update is one micro-batch. With three blocks, two share a buffer of gradients.
#define IN_BACKWARD_RUN_                                                                                     \
    "--layers %d --channels 64 --heads 2 --seq-len 16 --batch 4 --eval-every 2 --eval-batches 1 "            \
    "--sample-every 2 --sample-tokens 2 --samples 1 --lr 0.01 --steps 4 --save-every 2"

// The two runs have the same bits, logged norms included.
static inline void in_backward_same_bits_(const Trainer* trainer, int layers, const char* options) {
    char line[2][1024], whole[2][256];
    static int count = 0;
    count++;
    for (int i = 0; i < 2; i++) {
        snprintf(whole[i], sizeof(whole[i]), "%s/same%d%c/step_00000004", test_tmpdir(), count, "ab"[i]);
        snprintf(line[i], sizeof(line[i]),
                 IN_BACKWARD_RUN_ " --grad-clip 0 --update-in-backward %s --out %s/same%d%c %s", layers,
                 i ? "on" : "off", test_tmpdir(), count, "ab"[i], options);
        EXPECT(resume_run_(trainer, line[i]) == 0, "%s", line[i]);
    }
    resume_expect_same_(whole[0], whole[1], line[1]);
}

// Clipped in every update, so that the shares matter; they are in the checkpoint.
static inline void in_backward_resume_(const Trainer* trainer, const char* options) {
    char line[1024], out[128], whole[256], again[256];
    static int count = 0;
    snprintf(out, sizeof(out), "%s/shares%d", test_tmpdir(), count++);
    snprintf(whole, sizeof(whole), "%s/a/step_00000004", out);
    snprintf(again, sizeof(again), "%s/b/step_00000004", out);
    snprintf(line, sizeof(line),
             IN_BACKWARD_RUN_ " --grad-clip 0.1 --optimizer sgd --update-in-backward on --out %s/a %s", 3,
             out, options);
    EXPECT(resume_run_(trainer, line) == 0, "%s", line);
    snprintf(line, sizeof(line), "--resume %s/a/step_00000002 --out %s/b", out, out);
    EXPECT(resume_run_(trainer, line) == 0, "%s", line);
    resume_expect_same_(whole, again, "resumed with shares");
    SavedState a = resume_state_(whole), b = resume_state_(again);
    EXPECT(a.run.shares.updates == 4 && memcmp(&a.run.shares, &b.run.shares, sizeof(ClipShares)) == 0,
           "%lld updates in the shares, and %lld", (long long)a.run.shares.updates,
           (long long)b.run.shares.updates);
    state_close(&a);
    state_close(&b);
}

// `optimizers` is a list that ends with NULL.
static inline void test_in_backward(const Trainer* trainer, const char* const* optimizers,
                                    const char* options) {
    char line[512];
    for (int i = 0; optimizers[i]; i++) {
        snprintf(line, sizeof(line), "--optimizer %s %s", optimizers[i], options);
        in_backward_same_bits_(trainer, 3, line);
    }
    in_backward_resume_(trainer, options);
}

#endif
