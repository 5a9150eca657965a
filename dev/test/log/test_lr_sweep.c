// test_lr_sweep.c -- lr_sweep.h: the rate with the lowest loss is found in noise, the rate to take
// follows the length of the run, a sweep ends when the loss rises, and the drawings show the rate.
#define LR_SWEEP_IMPLEMENTATION

#include "llmc/log/lr_sweep.h"
#include "dev/test/lib/test.h"

static double rate_of(int i) { return 1e-5 * pow(1.05, i); }

// A loss that falls to 2 at `lowest` and rises to both sides, by `slope` for each factor of e, with
// noise. Adds updates until the sweep is over.
static LrSweep sweep_of(double lowest, double slope, double noise, int64_t updates) {
    LrSweep s = {.updates = updates};
    unsigned seed = 1;
    for (int i = 0; i < LR_SWEEP_UPDATES && !lr_sweep_is_over(&s); i++) {
        seed = seed * 1664525u + 1013904223u;
        lr_sweep_add(&s, rate_of(i),
                     2 + slope * fabs(log(rate_of(i) / lowest)) + noise * (seed / 4294967296.0 - 0.5));
    }
    return s;
}

TEST(lowest) {
    for (double lowest = 1e-4; lowest < 3e-3; lowest *= 1.3) {
        const LrSweep clean = sweep_of(lowest, 1, 0, 300), noisy = sweep_of(lowest, 1, 0.3, 300);
        EXPECT(fabs(log(lr_sweep_lowest(&clean) / lowest)) < 0.05, "%g: %g", lowest, lr_sweep_lowest(&clean));
        EXPECT(fabs(log(lr_sweep_lowest(&noisy) / lowest)) < 0.3, "%g: %g", lowest, lr_sweep_lowest(&noisy));
    }
}

TEST(rate) {
    const LrSweep brief = sweep_of(1e-3, 1, 0, 10), medium = sweep_of(1e-3, 1, 0, 1000),
                  lengthy = sweep_of(1e-3, 1, 0, 4000);
    LrSweep longest = lengthy;
    longest.updates = 1000000;
    longest.long_run = 1e-4;
    EXPECT_NEAR(lr_sweep_rate(&brief), lr_sweep_lowest(&brief) * 2 / 3, 1e-12, "a third below");
    EXPECT(lr_sweep_rate(&medium) == lr_sweep_rate(&brief), "up to 1000 updates");
    EXPECT_NEAR(lr_sweep_rate(&lengthy), lr_sweep_rate(&brief) / 4, 1e-12, "1 / updates");
    EXPECT(lr_sweep_rate(&longest) == 1e-4, "a long run's");
    longest.long_run = 1;
    EXPECT(lr_sweep_rate(&longest) == lr_sweep_rate(&brief), "but never above");
}

// Over as soon as the smoothed loss is 1 above its lowest, which takes a factor of e, or at a NaN.
TEST(end) {
    LrSweep s = sweep_of(1e-3, 1, 0, 300);
    const double last = s.point[s.count - 1].step;
    EXPECT(s.count < LR_SWEEP_UPDATES && last > 1e-3 * M_E && last < 2e-3 * M_E, "%d updates, up to %g",
           s.count, last);
    s.count -= 20;
    EXPECT(!lr_sweep_is_over(&s), "not yet");
    const double lowest = lr_sweep_lowest(&s);
    lr_sweep_add(&s, last, NAN);
    EXPECT(lr_sweep_is_over(&s) && lr_sweep_lowest(&s) == lowest, "a NaN: %g", lr_sweep_lowest(&s));
}

// No rate: a loss that only rises, no finite loss, too few updates to smooth.
TEST(none) {
    const LrSweep rising = sweep_of(1e-9, 0.1, 0, 300), empty = {.updates = 300};
    LrSweep broken = empty;
    lr_sweep_add(&broken, 1e-5, NAN);
    EXPECT(isnan(lr_sweep_rate(&rising)) && isnan(lr_sweep_rate(&empty)) && isnan(lr_sweep_rate(&broken)),
           "%g %g %g", lr_sweep_rate(&rising), lr_sweep_rate(&empty), lr_sweep_rate(&broken));
    EXPECT(!lr_sweep_is_over(&empty) && lr_sweep_is_over(&broken), "nothing, and a NaN");
}

static const char* drawn(void (*draw)(FILE*, const LrSweep*), const LrSweep* s) {
    static char text[1 << 16];
    FILE* file = fopen(test_path("sweep"), "w+");
    draw(file, s);
    rewind(file);
    text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
    fclose(file);
    return text;
}

TEST(drawings) {
    const LrSweep s = sweep_of(1e-3, 1, 0.1, 300), rising = sweep_of(1e-9, 0.1, 0, 300),
                  empty = {.updates = 300};
    double x = 0, y = 0, left, right;
    setenv("LC_ALL", "C", 1);
    const char* text = drawn(lr_sweep_draw, &s);
    EXPECT(strstr(text, "at each learning rate") && strchr(strchr(text, '\n'), 'o') &&
               strstr(text, "0.0001 ") && strstr(text, "0.001"),
           "%s", text);
    text = drawn(lr_sweep_svg, &s);
    EXPECT(strstr(text, ">0.0001<") && strstr(text, ">0.001<") && strstr(text, ">learning rate<") &&
               strstr(text, ">the rate to take<"),
           "%s", text);
    const char *line = strstr(text, "points=\""), *dot = strstr(strstr(text, "<g fill"), "<circle");
    EXPECT(sscanf(line, "points=\"%lf", &left) == 1 &&
               sscanf(dot, "<circle cx=\"%lf\" cy=\"%lf", &x, &y) == 2,
           "%s", text);
    right = 740; // the line starts at the left edge and ends at this one
    const double across = (x - left) / (right - left),
                 wanted = log(lr_sweep_rate(&s) / s.point[0].step) /
                          log(s.point[s.count - 1].step / s.point[0].step);
    EXPECT_NEAR(across, wanted, log(1.05) / log(s.point[s.count - 1].step / s.point[0].step),
                "the dot is at the last update below the rate");
    EXPECT(!strstr(drawn(lr_sweep_svg, &rising), "the rate to take"), "no rate");
    EXPECT(!drawn(lr_sweep_draw, &empty)[0] && !drawn(lr_sweep_svg, &empty)[0], "nothing to draw");
}
