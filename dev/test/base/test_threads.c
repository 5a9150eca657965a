// test_threads.c -- threads.h: the number of threads of a process that shares its cores with
// others.
#include "llmc/base/threads.h"

#include "dev/test/lib/test.h"

TEST(threads) {
    const struct {
        int cores, bound;
        double quota;
        int processes, wanted;
    } rows[] = {
        {64, 64, INFINITY, 1, 64}, {64, 64, INFINITY, 4, 16}, {64, 8, INFINITY, 4, 8}, {2, 1, INFINITY, 1, 1},
        {64, 64, 2, 1, 2},         {64, 64, 0.5, 1, 1},       {64, 64, 2.5, 1, 3},     {64, 64, 8, 4, 2},
        {64, 64, 100, 1, 64},      {64, 64, 2, 8, 1},         {4, 4, INFINITY, 9, 1},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const int threads = threads_share_(rows[i].cores, rows[i].bound, rows[i].quota, rows[i].processes);
        EXPECT(threads == rows[i].wanted, "row %zu: %d threads, wanted %d", i, threads, rows[i].wanted);
    }
    unsetenv("OMP_NUM_THREADS");
    threads_open(3, 1, "");
    EXPECT(threads_max() == 3);
}
