// test_loss_scale.c -- loss_scale.h: when the scale falls, grows and stays; every scale is a power
// of two.
#include "llmc/optim/loss_scale.h"
#include "dev/test/lib/test.h"

static void good(LossScale* s, int steps) {
    for (int i = 0; i < steps; i++) {
        EXPECT(loss_scale_update(s, 1), "a finite step is an update");
    }
}

TEST(backoff) {
    LossScale s = loss_scale_open();
    EXPECT(s.scale == 65536, "starts at %g", s.scale);
    for (int i = 1; i <= 40; i++) {
        EXPECT(!loss_scale_update(&s, 0), "a step that is not finite is no update");
        const float wanted = i < 16 ? 65536 / (float)(1 << i) : 1; // from the 16th on the smallest
        EXPECT(s.scale == wanted, "after %d: %g, wanted %g", i, s.scale, wanted);
    }
    good(&s, 2000);
    EXPECT(s.scale == 2, "leaves the smallest: %g", s.scale);
}

TEST(growth) {
    LossScale s = loss_scale_open();
    good(&s, 1999);
    EXPECT(s.scale == 65536, "1999 good steps: %g", s.scale);
    good(&s, 1);
    EXPECT(s.scale == 2 * 65536, "2000: %g", s.scale);
    good(&s, 1999);
    EXPECT(s.scale == 2 * 65536, "3999: %g", s.scale);
    good(&s, 1);
    EXPECT(s.scale == 4 * 65536, "4000: %g", s.scale);
}

// One bad step and the count starts again.
TEST(interruption) {
    LossScale s = loss_scale_open();
    good(&s, 1999);
    loss_scale_update(&s, 0);
    EXPECT(s.scale == 32768, "halved: %g", s.scale);
    good(&s, 1999);
    EXPECT(s.scale == 32768, "1999 after it: %g", s.scale);
    good(&s, 1);
    EXPECT(s.scale == 65536, "2000 after it: %g", s.scale);
}

// Gradients that are all zero never overflow.
TEST(ceiling) {
    LossScale s = loss_scale_open();
    good(&s, 2000 * 200);
    EXPECT(s.scale == 0x1p127f, "%g, wanted the largest power of two", s.scale);
    EXPECT(!loss_scale_update(&s, 0) && s.scale == 0x1p126f, "falls from there: %g", s.scale);
}

TEST(off) {
    LossScale s = loss_scale_off();
    good(&s, 5000);
    EXPECT(s.scale == 1, "grew to %g", s.scale);
    EXPECT(!loss_scale_update(&s, 0) && s.scale == 1, "fell to %g; or updated", s.scale);
}
