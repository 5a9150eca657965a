// test_schedule.c -- schedule.h: end points, shapes, continuity, lengths that could divide by zero,
// and schedules that are the same up to some step.
#include "llmc/optim/schedule.h"
#include "dev/test/lib/test.h"

enum { STEPS = 1000, WARMUP = 100 };
static const Schedule all[] = {SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD};
static const float peak = 3e-4f, final_frac = 0.1f;

static ScheduleSettings settings(Schedule schedule, int64_t steps, int64_t warmup, float final) {
    const ScheduleSettings s = {schedule, steps, warmup, peak, final, steps / 5, DECAY_SQRT};
    return s;
}

static double at_of(ScheduleSettings s, int64_t step) { return schedule_lr(&s, step) / (double)peak; }

static double at(Schedule schedule, int64_t step) {
    return at_of(settings(schedule, STEPS, WARMUP, final_frac), step);
}

static void test_ends(Schedule schedule) {
    EXPECT_NEAR(at(schedule, 0), 1.0 / WARMUP, 1e-6, "first step of schedule %d", schedule);
    EXPECT_NEAR(at(schedule, WARMUP / 2 - 1), 0.5, 1e-6, "half of the warm-up of schedule %d", schedule);
    EXPECT_NEAR(at(schedule, WARMUP - 1), 1, 1e-6, "last step of the warm-up of schedule %d", schedule);
    EXPECT_NEAR(at(schedule, WARMUP), 1, 1e-6, "first step after the warm-up of schedule %d", schedule);
    const double end = schedule == SCHEDULE_CONSTANT ? 1 : final_frac;
    EXPECT_NEAR(at(schedule, STEPS), end, 1e-6, "end of schedule %d", schedule);
    EXPECT_NEAR(at(schedule, 5 * STEPS), end, 1e-6, "after the end of schedule %d", schedule);
}

// Up by 1/WARMUP a step, then never up, and never far down. The decay of WSD falls fastest at its
// start: sqrt(1/200) of the way in one step.
static void test_continuity(Schedule schedule) {
    const double fall = schedule == SCHEDULE_WSD ? 0.9 * sqrt(1.0 / 200) : 0.002;
    for (int64_t step = 1; step <= STEPS; step++) {
        const double change = at(schedule, step) - at(schedule, step - 1);
        if (step < WARMUP) {
            EXPECT_NEAR(change, 1.0 / WARMUP, 1e-6, "schedule %d, step %d", schedule, (int)step);
        } else {
            EXPECT(change <= 1e-7 && change >= -fall - 1e-6, "schedule %d, step %d: change %g", schedule,
                   (int)step, change);
        }
    }
}

static void test_shapes(void) {
    const int64_t quarter = WARMUP + (STEPS - WARMUP) / 4, middle = (STEPS + WARMUP) / 2;
    EXPECT_NEAR(at(SCHEDULE_COSINE, middle), 0.1 + 0.9 * 0.5, 1e-6, "middle");
    EXPECT_NEAR(at(SCHEDULE_COSINE, quarter), 0.1 + 0.9 * (0.5 + sqrt(0.125)), 1e-6, "quarter");
    EXPECT_NEAR(at(SCHEDULE_LINEAR, middle), 0.1 + 0.9 * 0.5, 1e-6, "middle");
    EXPECT_NEAR(at(SCHEDULE_LINEAR, quarter), 0.1 + 0.9 * 0.75, 1e-6, "quarter");
    EXPECT_NEAR(at(SCHEDULE_CONSTANT, 999), 1, 1e-6, "constant");
    EXPECT_NEAR(at(SCHEDULE_WSD, 799), 1, 1e-6, "last stable step");
    EXPECT_NEAR(at(SCHEDULE_WSD, 850), 0.1 + 0.9 * 0.5, 1e-6, "a quarter of the decay");
    EXPECT(at(SCHEDULE_WSD, 801) < 1, "the decay has begun");
}

static ScheduleSettings wsd(int64_t steps, int64_t decay_steps, DecayShape shape) {
    ScheduleSettings s = settings(SCHEDULE_WSD, steps, WARMUP, final_frac);
    s.decay_steps = decay_steps;
    s.decay_shape = shape;
    return s;
}

static void test_decay(void) {
    const ScheduleSettings linear = wsd(STEPS, 400, DECAY_LINEAR), sqrt_ = wsd(STEPS, 400, DECAY_SQRT);
    EXPECT_NEAR(at_of(linear, 600), 1, 1e-6, "first step of the decay");
    EXPECT_NEAR(at_of(linear, 700), 0.1 + 0.9 * 0.75, 1e-6, "a quarter of a linear decay");
    EXPECT_NEAR(at_of(sqrt_, 700), 0.1 + 0.9 * 0.5, 1e-6, "a quarter of the other");
    EXPECT_NEAR(at_of(wsd(STEPS, 0, DECAY_SQRT), STEPS - 1), 1, 1e-6, "no decay");
    for (int64_t step = 0; step <= STEPS; step++) {
        EXPECT(at_of(wsd(STEPS, 2 * STEPS, DECAY_LINEAR), step) == at(SCHEDULE_LINEAR, step),
               "step %d of a decay longer than the run, which starts after the warm-up", (int)step);
    }
}

// The last step that two schedules share is the first of the earlier decay, where t is 0.
static void test_same(void) {
    const ScheduleSettings stable = wsd(2 * STEPS, 0, DECAY_SQRT), decays = wsd(STEPS, 400, DECAY_LINEAR),
                           constant = settings(SCHEDULE_CONSTANT, 5 * STEPS, WARMUP, 0),
                           cosine = settings(SCHEDULE_COSINE, STEPS, WARMUP, final_frac),
                           later = settings(SCHEDULE_CONSTANT, STEPS, WARMUP + 1, 0);
    ScheduleSettings higher = stable;
    higher.lr *= 1.0001f;
    EXPECT(schedule_same_before(&decays, &decays, 2 * STEPS), "itself");
    EXPECT(schedule_same_before(&stable, &decays, 601) && !schedule_same_before(&stable, &decays, 602),
           "a decay that starts in step 600");
    EXPECT(schedule_same_before(&decays, &constant, 601) && !schedule_same_before(&decays, &constant, 602),
           "a constant rate");
    EXPECT(schedule_same_before(&cosine, &stable, WARMUP) &&
               !schedule_same_before(&cosine, &stable, WARMUP + 2),
           "a warm-up");
    EXPECT(schedule_same_before(&later, &constant, 0) && !schedule_same_before(&later, &constant, 1),
           "another warm-up");
    EXPECT(!schedule_same_before(&stable, &higher, 1), "another peak");
}

// No length divides by zero, and the first step of a run always moves the weights.
static void test_odd_lengths(Schedule schedule) {
    for (int64_t steps = 0; steps <= 12; steps++) {
        for (int64_t warmup = -1; warmup <= 14; warmup++) {
            for (int64_t step = 0; step <= steps + 1; step++) {
                const ScheduleSettings s = settings(schedule, steps, warmup, 0);
                const float lr = schedule_lr(&s, step);
                EXPECT(lr >= 0 && lr <= peak, "schedule %d: step %d of %d, warm-up %d: %g", schedule,
                       (int)step, (int)steps, (int)warmup, lr);
                EXPECT(step >= steps || lr > 0, "schedule %d: step %d of %d, warm-up %d wastes an update",
                       schedule, (int)step, (int)steps, (int)warmup);
            }
        }
    }
    EXPECT_NEAR(at_of(settings(schedule, 5, 10, 0), 4), 0.5, 1e-6, "the warm-up never ends");
    EXPECT_NEAR(at_of(settings(schedule, 1, 0, 0), 0), 1, 1e-6, "a run of one step");
    const int64_t far = (int64_t)1 << 40;
    EXPECT_NEAR(at_of(settings(schedule, far, far / 2, 0), far / 4 - 1), 0.5, 1e-6, "long runs");
}

TEST(schedule) {
    for (int i = 0; i < 4; i++) {
        test_ends(all[i]);
        test_continuity(all[i]);
        test_odd_lengths(all[i]);
    }
    test_shapes();
    test_decay();
    test_same();
}
