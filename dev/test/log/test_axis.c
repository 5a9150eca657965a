// test_axis.c -- axis.h: places of values, and labels that are round, inside and apart.
#include <math.h>

#include "llmc/log/axis.h"

#include "dev/test/lib/test.h"

TEST(depth) {
    const Axis log = {1, 16, 1}, linear = {-1, 3, 0};
    EXPECT_NEAR(axis_depth(&log, 4), 0.5, 1e-12, "logarithmic");
    EXPECT_NEAR(axis_depth(&linear, 0), 0.75, 1e-12, "linear");
    EXPECT(axis_depth(&log, 0) == 1 && axis_depth(&log, 99) == 0, "beyond a logarithmic axis");
    EXPECT(axis_depth(&linear, -5) == 1 && axis_depth(&linear, 5) == 0, "beyond a linear axis");
}

TEST(unit) {
    const double cases[][2] = {{1, 1}, {1.1, 2}, {3, 5}, {6, 10}, {0.02, 0.02}, {0.3, 0.5}, {4000, 5000}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        EXPECT_NEAR(axis_unit(cases[i][0]) / cases[i][1], 1, 1e-12, "of %g", cases[i][0]);
    }
}

// Two digits are enough for the labels of a narrow axis, one for those of a wide one.
static void check_labels(const Axis* axis, double gap) {
    AxisLabels labels;
    const int is_wide = axis->is_log && axis->high > 3 * axis->low;
    axis_labels(&labels, axis, gap);
    EXPECT(labels.count > 1 && labels.count <= 1 + 1 / gap, "%g to %g: %d labels", axis->low, axis->high,
           labels.count);
    for (int i = 0; i < labels.count; i++) {
        const double value = labels.value[i], unit = pow(10, floor(log10(fabs(value)) + 1e-9));
        EXPECT(axis->low * (1 - 1e-6) <= value && value <= axis->high * (1 + 1e-6), "%g is outside", value);
        EXPECT(!is_wide || fabs(value / unit - round(value / unit)) < 1e-6, "%g has more digits", value);
        EXPECT_NEAR(labels.depth[i], axis_depth(axis, value), 1e-12, "the place of %g", value);
        for (int j = 0; j < i; j++) {
            EXPECT(fabs(labels.depth[i] - labels.depth[j]) > gap * (1 - 1e-6), "%g and %g", value,
                   labels.value[j]);
        }
    }
}

TEST(axis_labels) {
    for (double low = 0.011; low < 100; low *= 1.7) {
        for (double factor = 1.01; factor < 1e6; factor *= 1.3) {
            for (int is_log = 0; is_log < 2; is_log++) {
                const Axis axis = {low, low * factor, is_log};
                check_labels(&axis, 0.1);
            }
        }
    }
}
