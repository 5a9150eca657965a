/*
wide_sum.h -- sums of doubles with twice the digits, so that neither the order of the terms nor how
they are grouped shows in the result.

The rounding error of each addition is known exactly (Knuth's TwoSum) and summed separately: the
result is off by about n^2 2^-106 of a sum of n terms of one sign. Neumaier, ZAMM 54, 1974.

Also for kernels.
*/
#ifndef LLMC_WIDE_SUM_H
#define LLMC_WIDE_SUM_H

#include <math.h>

#include "llmc/base/host_device.h"

// Starts as zero.
typedef struct {
    double high, low; // rounded sum, and its error
} WideSum;

HOST_DEVICE void wide_sum_add(WideSum* sum, double x) {
    const double high = sum->high + x, of_x = high - sum->high;
    sum->low += (sum->high - (high - of_x)) + (x - of_x);
    sum->high = high;
}

// Adds another sum. The error term of a sum that is not finite is meaningless.
HOST_DEVICE void wide_sum_merge(WideSum* sum, WideSum other) {
    wide_sum_add(sum, other.high);
    wide_sum_add(sum, isfinite(other.high) ? other.low : 0);
}

// Returns the sum. Infinity and NaN in any term survive.
HOST_DEVICE double wide_sum_value(WideSum sum) { return isfinite(sum.high) ? sum.high + sum.low : sum.high; }

#endif
