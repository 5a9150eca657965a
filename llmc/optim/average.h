/*
average.h -- the exponential average of a run's weights (--average ema:D): the contract, and the CPU
version.

Training does not use it. w_n are the weights after update n of the average, counted from 1; the
initial weights are not in it.

    a_n = sum of D^(n-i) w_i / sum of D^(n-i), for i = 1 ... n

a_n alone is kept, as

    a_n = a_(n-1) + c_n (w_n - a_(n-1)),     c_n = (1 - D) / (1 - D^n)

This is a_n = D a_(n-1) + (1 - D) w_n from zero, with the correction of Adam's means for that start
(Kingma and Ba, arXiv:1412.6980). In fp32 a_n follows changes of w down to about 2^-24 / (1 - D) of
a weight's size.

    average     (elements)   fp32
    weights     (elements)   fp32: master weights, if any
*/
#ifndef LLMC_AVERAGE_H
#define LLMC_AVERAGE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "llmc/base/host_device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int is_kept; // false: the run has no average
    double decay;
} Average;

// Sets the average from text: off or ema:D. Returns 0 if it is none of these.
int average_parse(Average* average, const char* text);

int average_is_same(Average a, Average b);

// Returns c_n, the share of the weights after update n; 1: the average is these weights.
float average_rate(Average average, int64_t n);

// Adds a weight to an element's average.
HOST_DEVICE void average_add_element(float* average, float weight, float rate) {
    *average = rate == 1.0f ? weight : multiply_add(rate, weight - *average, *average);
}

// Adds weights to their average.
void average_add_cpu(float* average, const float* weights, size_t elements, float rate);

#ifdef __cplusplus
}
#endif

#ifdef AVERAGE_IMPLEMENTATION

int average_parse(Average* average, const char* text) {
    static const char ema[] = "ema:";
    const char* decay = text ? text + strlen(ema) : NULL;
    int end = 0;
    memset(average, 0, sizeof(*average));
    if (!text || strcmp(text, "off") == 0) {
        return 1;
    }
    average->is_kept = 1;
    return strncmp(text, ema, strlen(ema)) == 0 && strspn(decay, "0123456789.") == strlen(decay) &&
           sscanf(decay, "%lf%n", &average->decay, &end) == 1 && !decay[end] && average->decay < 1;
}

int average_is_same(Average a, Average b) { return a.is_kept == b.is_kept && a.decay == b.decay; }

float average_rate(Average average, int64_t n) {
    return (float)((1 - average.decay) / (1 - pow(average.decay, (double)n)));
}

void average_add_cpu(float* average, const float* weights, size_t elements, float rate) {
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < elements; i++) {
        average_add_element(average + i, weights[i], rate);
    }
}

#endif // AVERAGE_IMPLEMENTATION

#endif
