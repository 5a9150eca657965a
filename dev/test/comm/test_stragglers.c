// test_stragglers.c -- stragglers.h: finds the slow rank, and reports it at the right time.
#include "llmc/comm/stragglers.h"

#include "dev/test/lib/test.h"

// The first of `steps` steps in which stragglers_add names a process; sets *rank. 0: in none.
static int named(Stragglers* p, const double* seconds, int steps, int* rank, double* ratio) {
    for (int step = 1; step <= steps; step++) {
        *rank = stragglers_add(p, seconds, ratio);
        if (*rank >= 0) {
            return step;
        }
    }
    return 0;
}

TEST(slow) {
    const double even[4] = {1, 1.19, 0.5, 1}, slow[4] = {1, 1.1, 1.5, 0.9}, both[4] = {1, 1, 1.5, 2};
    double ratio = 0;
    int rank;
    Stragglers p;
    stragglers_open(&p, 4, 4);
    EXPECT(named(&p, even, 200, &rank, &ratio) == 0, "rank %d", rank);
    EXPECT(named(&p, slow, 49, &rank, &ratio) == 0 && named(&p, even, 1, &rank, &ratio) == 0);
    EXPECT(named(&p, slow, 200, &rank, &ratio) == 50 && rank == 2, "in a row");
    EXPECT_NEAR(ratio, 1.5, 1e-9);
    EXPECT(named(&p, slow, 200, &rank, &ratio) == 0, "once");
    EXPECT(named(&p, both, 200, &rank, &ratio) == 50 && rank == 3);
    stragglers_close(&p);
}

TEST(few) {
    const double two[2] = {1, 1.3}, unknown[2] = {0, 0}, one[2] = {0, 9};
    double ratio = 0;
    int rank;
    Stragglers p;
    stragglers_open(&p, 2, 2);
    EXPECT(named(&p, unknown, 200, &rank, &ratio) == 0 && named(&p, one, 200, &rank, &ratio) == 0);
    EXPECT(named(&p, two, 200, &rank, &ratio) == 50 && rank == 1, "of two, the faster is the measure");
    stragglers_close(&p);
}

TEST(together) {
    const double slow[5] = {1, 2, 1, 2, 1};
    double ratio = 0;
    int rank;
    Stragglers p;
    stragglers_open(&p, 5, 5);
    EXPECT(named(&p, slow, 200, &rank, &ratio) == 50 && rank == 1);
    EXPECT(named(&p, slow, 200, &rank, &ratio) == 1 && rank == 3);
    EXPECT(named(&p, slow, 200, &rank, &ratio) == 0);
    stragglers_close(&p);
}

// A stage of other layers takes another time.
TEST(stages) {
    const double even[6] = {1, 1.1, 1, 4, 4, 4}, slow[6] = {1, 1.1, 1, 4, 4, 5};
    double ratio = 0;
    int rank;
    Stragglers p;
    stragglers_open(&p, 6, 3);
    EXPECT(named(&p, even, 200, &rank, &ratio) == 0, "rank %d", rank);
    EXPECT(named(&p, slow, 200, &rank, &ratio) == 50 && rank == 5, "rank %d", rank);
    EXPECT_NEAR(ratio, 1.25, 1e-9);
    stragglers_close(&p);
}
