// test_validations.c -- validations.h: the lowest validation loss, when patience ends, and when a
// run has diverged.
#include <string.h>

#include "llmc/optim/validations.h"
#include "dev/test/lib/test.h"

static Validations after(const double* losses, int n) {
    Validations v = validations_open();
    for (int i = 0; i < n; i++) {
        validations_add(&v, 10 * i, losses[i]);
    }
    return v;
}

TEST(patience) {
    const double losses[] = {4, 3, 3, NAN, 2.5, INFINITY, 2.5, 2.6};
    const int64_t best_step[] = {0, 10, 10, 10, 40, 40, 40, 40}, since[] = {0, 0, 1, 2, 0, 1, 2, 3};
    for (int n = 1; n <= 8; n++) {
        const Validations v = after(losses, n);
        EXPECT(v.best_step == best_step[n - 1] && v.since == since[n - 1] && v.first == 4,
               "after %d: best at %lld, %lld since", n, (long long)v.best_step, (long long)v.since);
        for (int patience = 0; patience < 5; patience++) {
            EXPECT(validations_are_over(&v, patience) == (patience > 0 && since[n - 1] >= patience),
                   "after %d, patience %d", n, patience);
        }
    }
    const double none[] = {NAN, INFINITY};
    const Validations v = after(none, 2);
    EXPECT(isnan(v.best) && v.since == 2, "no number");
}

TEST(divergence) {
    char reason[256];
    const double healthy[] = {log(500) + 0.1}, high[] = {30};
    const Validations usual = after(healthy, 1), bad_start = after(high, 1), unknown = validations_open();
    EXPECT(!validations_diverged(&usual, healthy[0], 500, reason), "the first");
    EXPECT(!validations_diverged(&usual, 1.4 * log(500), 500, reason), "not by far");
    EXPECT(validations_diverged(&usual, 1.6 * log(500), 500, reason), "far above");
    EXPECT(validations_diverged(&usual, 212.98, 500, reason) && strstr(reason, "212.9800") &&
               strstr(reason, "6.2146"),
           "%s", reason);
    EXPECT(!validations_diverged(&bad_start, 29, 500, reason), "below the start");
    EXPECT(validations_diverged(&bad_start, 31, 500, reason), "above the start");
    EXPECT(validations_diverged(&unknown, 31, 500, reason), "without a start");
    EXPECT(validations_diverged(&usual, NAN, 500, reason) &&
               validations_diverged(&bad_start, INFINITY, 500, reason),
           "no number");
}
