// test_filters.c -- filters.h: each order against each kind of value; conditions that are refused.
#define FILTERS_IMPLEMENTATION
#include "llmc/data/filters.h"
#include "dev/test/lib/test.h"

static FilterResult result_of(const char* condition, FieldValue value) {
    Filters filters = {.count = 0};
    char error[ERROR_BYTES] = "";
    EXPECT(filters_add(&filters, condition, error), "%s", error);
    const FilterResult result = filter_result(&filters.list[0], &value);
    filters_close(&filters);
    return result;
}

static FieldValue number(double x) { return (FieldValue){FIELD_NUMBER, NULL, 0, x}; }
static FieldValue text(const char* s) { return (FieldValue){FIELD_TEXT, s, strlen(s), 0}; }

// For values below, equal to and above 2, and below, equal to and above "en".
TEST(orders) {
    static const char* const orders[] = {"<", "<=", "=", "!=", ">=", ">"};
    static const int wanted[6][3] = {{1, 0, 0}, {1, 1, 0}, {0, 1, 0}, {1, 0, 1}, {0, 1, 1}, {0, 0, 1}};
    const FieldValue numbers[] = {number(-3.5), number(2), number(2.0000001)};
    const FieldValue texts[] = {text("e"), text("en"), text("en-GB")};
    for (int i = 0; i < 6; i++) {
        for (int j = 0; j < 3; j++) {
            char condition[32];
            snprintf(condition, sizeof(condition), " x%s2 ", orders[i]);
            EXPECT((result_of(condition, numbers[j]) == FILTER_HOLDS) == wanted[i][j], "%s, %d", condition,
                   j);
            snprintf(condition, sizeof(condition), "x %s \"en\"", orders[i]);
            EXPECT((result_of(condition, texts[j]) == FILTER_HOLDS) == wanted[i][j], "%s, %d", condition, j);
        }
    }
    EXPECT(result_of("x < 0", text("")) == FILTER_MISSING &&
               result_of("x != en", number(1)) == FILTER_MISSING,
           "");
    EXPECT(result_of("x != 1", number((double)NAN)) == FILTER_MISSING, "NaN");
    EXPECT(result_of("x = \"1\"", text("1")) == FILTER_HOLDS &&
               result_of("x = -1e-3", number(-0.001)) == FILTER_HOLDS,
           "");
    EXPECT(result_of("x = \"\"", text("")) == FILTER_HOLDS &&
               result_of("x != two words", text("two words")) == FILTER_FAILS,
           "");
    EXPECT(result_of("x = nan", text("nan")) == FILTER_HOLDS &&
               result_of("x = 0x10", text("0x10")) == FILTER_HOLDS,
           "");
}

TEST(refused) {
    static const char* const bad[] = {"",        "x",        "x >",       "> 3",   "x == 3", "x => 3",
                                      "x > \"a", "x = a\"b", "x = 1e999", "x ! 3", "x =< 3"};
    Filters filters = {.count = 0};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        char error[ERROR_BYTES] = "";
        EXPECT(!filters_add(&filters, bad[i], error) && strstr(error, "wanted FIELD"), "'%s': %s", bad[i],
               error);
    }
    char longest[FILTER_BYTES + 8], error[ERROR_BYTES];
    memset(longest, 'x', sizeof(longest));
    memcpy(longest + FILTER_BYTES - 1, " > 1", 5);
    EXPECT(!filters_add(&filters, longest, error) && strstr(error, "wanted at most 500"), "%s", error);
    EXPECT(filters.count == 0, "");
}
