// test_automatic_rate.c -- automatic_rate.h: published recipes keep their rates, short runs get
// more, and no width, batch or length jumps.
#include "llmc/optim/automatic_rate.h"
#include "dev/test/lib/test.h"
#include "llmc/model/presets.h"

// GPT-3's rule, at a length of 10 billion tokens and at any other.
TEST(presets) {
    int count;
    const ModelPreset* models = model_presets(&count);
    EXPECT_NEAR(automatic_rate(768, 524288, 19560), 6e-4, 1e-12, "GPT-2 124M");
    for (int i = 0; i < count; i++) {
        const int C = models[i].C;
        EXPECT_NEAR(automatic_rate(C, 524288, 19560), 6e-4 * 768 / C, 1e-12, "%s", models[i].name);
        EXPECT_NEAR(automatic_rate(C, 524288, 1), 6e-4 * 768 / C, 1e-12, "%s, one update", models[i].name);
    }
}

TEST(lengths) {
    static const int widths[] = {1, 16, 64, 128, 1600};
    for (int w = 0; w < 5; w++) {
        for (int64_t tokens = 16; tokens <= 1 << 20; tokens *= 4) {
            const double long_run = automatic_rate_long(widths[w], tokens);
            double before = INFINITY;
            for (int64_t updates = 1; updates <= 1 << 20; updates *= 2) {
                const double rate = automatic_rate(widths[w], tokens, updates);
                EXPECT(rate <= before && rate >= long_run && (before == INFINITY || rate >= before / 2.0001),
                       "%d, %d, %d: %g, before %g", widths[w], (int)tokens, (int)updates, rate,
                       before == INFINITY ? rate : before);
                before = rate;
            }
            EXPECT(before == long_run && automatic_rate(widths[w], tokens, 0) == long_run, "a long run");
        }
    }
}
