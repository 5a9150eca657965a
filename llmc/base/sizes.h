/*
sizes.h -- integer arithmetic for sizes.
*/
#ifndef LLMC_SIZES_H
#define LLMC_SIZES_H

static inline int int_min(int a, int b) { return a < b ? a : b; }
static inline int int_max(int a, int b) { return a > b ? a : b; }

// For positive numbers.
static inline int int_ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline int int_round_up(int n, int unit) { return int_ceil_div(n, unit) * unit; }

#endif
