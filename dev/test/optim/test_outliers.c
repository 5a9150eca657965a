// test_outliers.c -- z-scores against their definition, NaN, constant windows, spikes and changes
// of regime.
#include "llmc/optim/outliers.h"
#include "llmc/base/rand.h"
#include "dev/test/lib/test.h"

static double noise(uint64_t i) { return rand_normal(1, 2, i); }

// A window of n values 4 + 0.1 noise.
static Outlier window_of(int n) {
    Outlier window;
    memset(&window, 0, sizeof(window));
    for (int i = 0; i < n; i++) {
        outlier_add(&window, 4 + 0.1 * noise((uint64_t)i));
    }
    return window;
}

TEST(definition) {
    for (int n = 128; n <= 400; n += 17) {
        const Outlier window = window_of(n);
        double sum = 0, squares = 0;
        for (int i = n - 128; i < n; i++) {
            const double x = 0.1 * noise((uint64_t)i);
            sum += x;
            squares += x * x;
        }
        const double mean = sum / 128, sd = sqrt(squares / 128 - mean * mean);
        EXPECT_NEAR(outlier_z(&window, 4.37), (0.37 - mean) / sd, 1e-6, "after %d values", n);
        EXPECT_NEAR(outlier_z(&window, 4 + mean), 0, 1e-6, "the mean, after %d values", n);
    }
    const Outlier almost = window_of(127), full = window_of(128);
    EXPECT(outlier_z(&almost, 1e9) == 0, "a window that is not full judges nothing");
    EXPECT(outlier_z(&full, 1e9) > 1e6, "a full one does");
}

TEST(nonfinite) {
    Outlier window = window_of(200);
    const Outlier before = window;
    EXPECT(isnan(outlier_z(&window, NAN)) && isnan(outlier_z(&window, INFINITY)), "z of NaN and inf is NaN");
    outlier_add(&window, NAN);
    outlier_add(&window, INFINITY);
    outlier_add(&window, -INFINITY);
    EXPECT(memcmp(&window, &before, sizeof(window)) == 0, "they do not enter");
}

TEST(constant) {
    Outlier window;
    memset(&window, 0, sizeof(window));
    for (int i = 0; i < 128; i++) {
        outlier_add(&window, 0.1); // sums of 0.1 are inexact: a careless sd is 1e-17, not 0
    }
    EXPECT(outlier_z(&window, 0.1) == 0 && outlier_z(&window, 5) == 0, "no scale, no z");
    outlier_add(&window, 0.2);
    EXPECT_NEAR(outlier_z(&window, 0.2), sqrt(127), 1e-6, "one value differs");
}

// A guard after 128 ordinary steps.
static UpdateGuard outliers_warm(double loss_limit, double norm_limit) {
    UpdateGuard guard = outliers_open(loss_limit, norm_limit);
    for (uint64_t i = 0; i < 128; i++) {
        const UpdateVerdict verdict = outliers_check(&guard, 4 + 0.1 * noise(i), 1 + 0.1 * noise(1000 + i));
        EXPECT(verdict == UPDATE_DO, "step %d of a new run", (int)i);
    }
    return guard;
}

TEST(guard_limits) {
    UpdateGuard guard = outliers_warm(3, 3);
    EXPECT(outliers_check(&guard, 4, 1) == UPDATE_DO, "ordinary");
    EXPECT(outliers_check(&guard, 1, 0.1) == UPDATE_DO, "low values are welcome");
    guard = outliers_warm(3, 3);
    EXPECT(outliers_check(&guard, 6, 1) == UPDATE_SKIP_OUTLIER, "loss");
    EXPECT(guard.loss_z > 15 && guard.loss_z < 25 && fabs(guard.norm_z) < 1, "z scores for the log");
    guard = outliers_warm(3, 3);
    EXPECT(outliers_check(&guard, 4, 3) == UPDATE_SKIP_OUTLIER, "norm");
    guard = outliers_warm(3, 0);
    EXPECT(outliers_check(&guard, 4, 1e6) == UPDATE_DO, "norm is off");
    guard = outliers_warm(0, 3);
    EXPECT(outliers_check(&guard, 1e6, 1) == UPDATE_DO, "loss is off");
    EXPECT(guard.consecutive == 0, "an outlier is not counted as not finite");
}

// Even a guard that is off, or whose window is not full, lets nothing through that is not finite.
TEST(guard_nonfinite) {
    UpdateGuard guard = outliers_open(0, 0);
    const double bad[][2] = {{NAN, 1}, {4, NAN}, {INFINITY, 1}, {4, INFINITY}, {-INFINITY, NAN}};
    for (int i = 0; i < 5; i++) {
        EXPECT(outliers_check(&guard, bad[i][0], bad[i][1]) == UPDATE_SKIP_NONFINITE, "row %d", i);
        EXPECT(guard.consecutive == i + 1, "counted %d, wanted %d", guard.consecutive, i + 1);
    }
    EXPECT(guard.losses.count == 0 && guard.norms.count == 0, "nothing entered");
    EXPECT(outliers_check(&guard, 4, 1) == UPDATE_DO && guard.consecutive == 0, "a good step ends the row");
    guard = outliers_warm(3, 3);
    outliers_check(&guard, NAN, NAN);
    EXPECT(outliers_check(&guard, 6, 1) == UPDATE_SKIP_OUTLIER, "a NaN does not blind the window");
}

// A lasting change of level is skipped as often as the head of outliers.h says, not for ever.
static void test_regime(double limit, int max) {
    UpdateGuard guard = outliers_warm(limit, limit);
    int skipped = 0;
    while (skipped < 1000 && outliers_check(&guard, 1e4, 1e4) == UPDATE_SKIP_OUTLIER) {
        skipped++;
    }
    EXPECT(skipped >= 1 && skipped <= max, "limit %g: skipped %d, wanted at most %d", limit, skipped, max);
}

// Diverged: too many in a row that are not finite, or a mean that rose too far above its lowest.
TEST(divergence) {
    char reason[256] = "";
    UpdateGuard guard = outliers_open(0, 0);
    for (int i = 0; i < 3; i++) {
        EXPECT(!outliers_divergence(&guard, 3, 0.5, reason), "after %d", i);
        outliers_check(&guard, NAN, 1);
    }
    EXPECT(outliers_divergence(&guard, 3, 0.5, reason) && strstr(reason, "not finite 3 times in a row"), "%s",
           reason);
    EXPECT(!outliers_divergence(&guard, 4, 0.5, reason), "more are allowed");
    guard = outliers_open(0, 0);
    for (int i = 0; i < 2 * OUTLIER_WINDOW; i++) {
        EXPECT(outliers_rise(&guard) == 0, "falling, step %d", i);
        outliers_check(&guard, 4 - i * 0.001, 1);
    }
    EXPECT_NEAR(guard.best_mean, 4 - 0.001 * 191.5, 1e-9, "the mean of the second half");
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        outliers_check(&guard, guard.best_mean + 2, 1);
        const int half_way =
            (i + 1) * 2.0 / OUTLIER_WINDOW > 1.07; // the old ones leave with their own differences
        EXPECT(!half_way || outliers_divergence(&guard, 3, 1, reason), "%d new ones: rise %g", i + 1,
               outliers_rise(&guard));
        EXPECT(!outliers_divergence(&guard, 3, 0, reason), "0 is never");
    }
    EXPECT_NEAR(outliers_rise(&guard), 2, 1e-9, "all are new");
    outliers_divergence(&guard, 3, 1, reason);
    EXPECT(strstr(reason, "2.000 above its minimum"), "%s", reason);
}

TEST(regimes) {
    test_regime(3, 13);
    test_regime(6, 4);
    test_regime(10, 2);
}

TEST(reasons) {
    EXPECT(strstr(outliers_reason(UPDATE_SKIP_OUTLIER), "outlier") &&
               strstr(outliers_reason(UPDATE_SKIP_NONFINITE), "finite"),
           "reasons");
}
