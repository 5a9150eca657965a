// test_units.c -- units.h: each unit, and where one ends and the next starts.
#include "llmc/base/units.h"
#include "dev/test/lib/test.h"

#include <string.h>

static void expect_text(const char* got, const char* want) {
    EXPECT(strcmp(got, want) == 0, "%s, wanted %s", got, want);
}

TEST(units) {
    expect_text(units_parameters(16e3).text, "0.02M");
    expect_text(units_parameters(124439808).text, "124.44M");
    expect_text(units_parameters(8030261248).text, "8.03B");
    expect_text(units_rate(3.2e9, "FLOP").text, "3.2 GFLOP/s");
    expect_text(units_rate(270.4e9, "FLOP").text, "270 GFLOP/s");
    expect_text(units_rate(989.4e12, "FLOP").text, "989 TFLOP/s");
    expect_text(units_rate(4.8e12, "B").text, "4.8 TB/s");
    expect_text(units_time(0.25).text, "0.2 s");
    expect_text(units_time(119).text, "119 s");
    expect_text(units_time(120).text, "2.0 minutes");
    expect_text(units_time(3 * 3600).text, "3.0 hours");
    expect_text(units_time(20865.49 * 3600).text, "869.4 days");
}
