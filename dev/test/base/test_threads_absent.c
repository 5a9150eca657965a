// test_threads_absent.c -- threads.h without OpenMP: one thread, a message that says so, and more
// are refused.
#undef _OPENMP
#include "llmc/base/threads.h"

#include "dev/test/lib/test.h"

static void open_body(const void* threads) { threads_open(*(const int*)threads, 1, ""); }

TEST(threads_absent) {
    const int many = 4;
    char text[64];
    threads_open(0, 1, "");
    threads_open(1, 1, "");
    EXPECT(test_dies(open_body, &many, EXIT_USAGE,
                     "--threads 4: this program was built without OpenMP|--threads 1"));
    threads_describe(text, sizeof(text));
    EXPECT(strcmp(text, "1 thread (built without OpenMP)") == 0, "%s", text);
}
