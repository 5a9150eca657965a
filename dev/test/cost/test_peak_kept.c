// test_peak_kept.c -- peak_kept.h: the largest peak counts, for a while; bad files are ignored.
#define PEAK_KEPT_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

#include "llmc/cost/peak_kept.h"
#include "dev/test/lib/test.h"

TEST(largest_counts) {
    const int64_t day = 24 * 3600, now = 1800000000;
    setenv("XDG_CACHE_HOME", test_path("cache"), 1);
    EXPECT(peak_keep(100, "one", now) == 100);
    EXPECT(peak_keep(15, "one", now + day) == 100, "a busy machine");
    EXPECT(peak_keep(50, "another", now + day) == 50, "another machine");
    EXPECT(peak_keep(110, "one", now + day) == 110, "a better measurement");
    EXPECT(peak_keep(90, "one", now + 30 * day) == 110, "within 30 days of the better one");
    EXPECT(peak_keep(90, "one", now + 31 * day) == 90, "a month later it is forgotten");
    EXPECT(peak_keep(80, "one", now + 32 * day) == 90, "and the new one is kept");
}

TEST(bad_files) {
    char path[PATH_MAX];
    const char* const texts[] = {"", "{\"peak\":", "{\"peak\":inf,\"time\":1800000000}",
                                 "{\"peak\":900,\"time\":1900000000}"};
    setenv("XDG_CACHE_HOME", test_path("cache"), 1);
    peak_keep(1, "one", 1700000000);
    EXPECT(cache_path(path, "peak", "one"));
    for (int i = 0; i < 4; i++) {
        FILE* file = fopen(path, "w");
        fputs(texts[i], file);
        fclose(file);
        EXPECT(peak_keep(5, "one", 1800000000) == 5, "%s", texts[i]);
    }
    setenv("XDG_CACHE_HOME", "/proc/none", 1); // cannot be made
    EXPECT(peak_keep(7, "one", 1800000000) == 7);
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    EXPECT(peak_keep(8, "one", 1800000000) == 8);
}
