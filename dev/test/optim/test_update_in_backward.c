/*
test_update_in_backward.c -- update_in_backward.h: shares, clipping by shares, and which parameters
stay unchanged if a gradient or the loss is not finite.
*/
#include "llmc/optim/update_in_backward.h"

#include "dev/test/lib/test.h"

static const ModelConfig THREE = {8, 30, 128, 3, 2, 16, SHARE_OFF};
enum { GROUPS = 4 };

static ClipShares new_shares(void) { return clip_shares_open(THREE); }

static double sum_of(const ClipShares* shares) {
    double sum = 0;
    for (int g = 0; g < shares->groups; g++) {
        sum += shares->share[g];
    }
    return sum;
}

// Parts of the parameters, then means of what was seen, then exponential ones.
TEST(shares) {
    ClipShares shares = new_shares();
    const double first[GROUPS] = {4, 3, 2, 1}, second[GROUPS] = {0, 0, 0, 7}, bad[GROUPS] = {1, NAN, 1, 1},
                 none[GROUPS] = {0, 0, 0, 0};
    EXPECT(shares.groups == GROUPS && shares.share[1] == shares.share[3], "%d groups", shares.groups);
    EXPECT_NEAR(sum_of(&shares), 1, 1e-12, "parts of all parameters");
    clip_shares_add(&shares, first);
    EXPECT_NEAR(shares.share[0], 0.4, 1e-12, "after one update");
    EXPECT_NEAR(shares.share[3], 0.1, 1e-12, "after one update");
    clip_shares_add(&shares, second);
    EXPECT_NEAR(shares.share[3], 0.55, 1e-12, "after two updates");
    clip_shares_add(&shares, bad);
    clip_shares_add(&shares, none);
    EXPECT(shares.updates == 2, "%lld updates say something", (long long)shares.updates);
    for (int i = 2; i < 200; i++) {
        clip_shares_add(&shares, first);
    }
    const double before = shares.share[3];
    clip_shares_add(&shares, second);
    EXPECT_NEAR(shares.share[3] - before, 0.01 * (1 - before), 1e-12, "after two hundred");
    EXPECT_NEAR(sum_of(&shares), 1, 1e-12, "all shares");
}

static InBackward started(const ClipShares* shares, const UpdateGuard* guard, double losses) {
    InBackward u;
    Update update;
    memset(&update, 0, sizeof(update));
    in_backward_open(&u, shares, guard, update, 1, 10);
    // half of the targets count: the gradient is half of what it should be
    in_backward_batch(&u, 5, 0);
    in_backward_losses(&u, losses);
    return u;
}

static int put(InBackward* u, int g, double square, Update* update) {
    const WideSum sum = {square, 0};
    return in_backward_group(u, g, sum, update);
}

// Where groups have their shares, each is clipped as the norm of the whole would clip it.
TEST(clipping) {
    ClipShares shares = new_shares();
    const double squares[GROUPS] = {4, 3, 2, 1};
    const UpdateGuard guard = outliers_open(0, 0);
    Update update;
    clip_shares_add(&shares, squares);
    InBackward u = started(&shares, &guard, 7);
    for (int g = GROUPS - 1; g >= 0; g--) {
        EXPECT(put(&u, g, squares[g], &update), "group %d", g);
        EXPECT_NEAR(update.grad_scale, 1 / sqrt(10), 1e-6, "a scale of 1 / norm in group %d", g);
    }
    EXPECT(u.updated == GROUPS && u.stopped_at < 0, "%d groups", u.updated);
    EXPECT_NEAR(wide_sum_value(u.square_sum), 10, 0, "the norm of all");
    in_backward_end(&u, &shares);
    EXPECT(shares.updates == 2, "%lld updates", (long long)shares.updates);

    u = started(&shares, &guard, 7); // a spike in one group; the others are small
    put(&u, 3, 1e-4, &update);
    EXPECT_NEAR(update.grad_scale, 2, 0, "a small gradient");
    put(&u, 2, 200, &update);
    EXPECT_NEAR(update.grad_scale * sqrt(200), sqrt(0.2), 1e-6, "a spike is cut to its share");
    u.grad_clip = 0;
    put(&u, 1, 1e9, &update);
    EXPECT_NEAR(update.grad_scale, 2, 0, "no limit");
}

TEST(not_finite) {
    ClipShares shares = new_shares();
    UpdateGuard guard = outliers_open(3, 0);
    Update update;
    InBackward u = started(&shares, &guard, 7);
    EXPECT(put(&u, 3, 1, &update) && !put(&u, 2, INFINITY, &update) && !put(&u, 1, 1, &update) &&
               !put(&u, 0, 1, &update),
           "what comes after a gradient that is not finite");
    EXPECT(u.updated == 1 && u.stopped_at == 2, "%d groups, stopped at %d", u.updated, u.stopped_at);
    in_backward_end(&u, &shares);
    EXPECT(shares.updates == 0, "shares of a part");

    in_backward_open(&u, &shares, &guard, update, 1, 10);
    in_backward_batch(&u, 5, 1);
    in_backward_losses(&u, 7);
    EXPECT(!put(&u, 3, 1, &update) && u.updated == 0, "damaged data");

    u = started(&shares, &guard, NAN);
    EXPECT(!put(&u, 3, 1, &update) && u.updated == 0 && u.stopped_at < 0, "a loss that is not finite");
    for (int i = 0; i < OUTLIER_WINDOW; i++) {
        outliers_check(&guard, 1 + 0.01 * (i % 2), 1);
    }
    u = started(&shares, &guard, 5.0); // a mean of 1
    EXPECT(put(&u, 3, 1, &update), "a usual loss");
    u = started(&shares, &guard, 6.0);
    EXPECT(!put(&u, 3, 1, &update), "an outlier");
    in_backward_end(&u, &shares);
    EXPECT(shares.updates == 0, "shares of no update");
}
