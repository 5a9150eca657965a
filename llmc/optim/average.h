/*
average.h -- the average of a run's weights (--average): the contract, and the CPU version.

Training does not see it. w_n are the weights after update n of the average, from 1 on; the first
weights have no part in it.

    ema:D        a_n = sum of D^(n-i) w_i / sum of D^(n-i), for i = 1 ... n
    last:N:K     a_n = mean of w_i for i = kK, (k-1)K, ..., the last N / K multiples of K up to n,
                 fewer at the start

ema:D keeps a_n alone, as

    a_n = a_(n-1) + c_n (w_n - a_(n-1)),     c_n = (1 - D) / (1 - D^n)

This is a_n = D a_(n-1) + (1 - D) w_n from zero, with the correction of Adam's means for that start
(Kingma and Ba, arXiv:1412.6980). In fp32 a_n follows changes of w down to about 2^-24 / (1 - D) of
a weight's size.

last:N:K keeps the N / K snapshots themselves, so nothing drifts (LAWA: Kaddour, arXiv:2209.14981).

    average     (elements, snapshots)   fp32; element i has the places i snapshots + 0, 1, ...
    weights     (elements)              fp32: master weights, if any
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

enum { AVERAGE_MOST_SNAPSHOTS = 256 };

typedef enum { AVERAGE_NONE, AVERAGE_EMA, AVERAGE_LAST } AverageKind;

typedef struct {
    AverageKind kind;
    double decay;  // of AVERAGE_EMA
    int snapshots; // numbers that are kept for each weight
    int every;     // updates from one snapshot to the next
} Average;

// The average after some updates, and how the last of them entered.
typedef struct {
    int snapshots, filled; // places of an element; those that have a snapshot, the first ones
    int place;             // place of the newest
    float rate;            // c_n; 1: the weights themselves
} AverageStep;

// Sets the average from text: off, ema:D, last:N or last:N:K. Returns 0 if it is none of these.
int average_parse(Average* average, const char* text);

int average_is_same(Average a, Average b);

// True if update n, from 1, enters the average.
static inline int average_takes(Average average, int64_t n) {
    return average.kind != AVERAGE_NONE && n > 0 && n % average.every == 0;
}

// Returns the average after n updates; nothing is filled if there is none yet.
AverageStep average_step(Average average, int64_t n);

// Adds a weight to an element's average.
HOST_DEVICE void average_add_element(float* average, float weight, AverageStep step) {
    float* place = average + step.place;
    *place = step.rate == 1.0f ? weight : multiply_add(step.rate, weight - *place, *place);
}

// Returns an element's average.
HOST_DEVICE float average_of_element(const float* average, AverageStep step) {
    double sum = average[0];
    for (int k = 1; k < step.filled; k++) {
        sum += average[k];
    }
    return step.filled > 1 ? (float)(sum / step.filled) : average[0];
}

// Adds weights to their average.
void average_add_cpu(float* average, const float* weights, size_t elements, AverageStep step);

// Sets `mean` to the average.
void average_mean_cpu(float* mean, const float* average, size_t elements, AverageStep step);

#ifdef __cplusplus
}
#endif

#ifdef AVERAGE_IMPLEMENTATION

static int average_parse_ema_(Average* average, const char* text) {
    int end = 0;
    const int is_text = strspn(text, "0123456789.") == strlen(text);
    *average = (Average){AVERAGE_EMA, 0, 1, 1};
    return is_text && sscanf(text, "%lf%n", &average->decay, &end) == 1 && !text[end] && average->decay < 1;
}

static int average_parse_last_(Average* average, const char* text) {
    int updates = 0, every = 1, end = 0;
    const int is_text = strspn(text, "0123456789:") == strlen(text),
              found = sscanf(text, "%9d%n:%9d%n", &updates, &end, &every, &end);
    if (!is_text || found < 1 || text[end] || every < 1 || updates < every || updates % every) {
        return 0;
    }
    *average = (Average){AVERAGE_LAST, 0, updates / every, every};
    return average->snapshots <= AVERAGE_MOST_SNAPSHOTS;
}

int average_parse(Average* average, const char* text) {
    static const char ema[] = "ema:", last[] = "last:";
    memset(average, 0, sizeof(*average));
    if (!text || strcmp(text, "off") == 0) {
        return 1;
    }
    return strncmp(text, ema, strlen(ema)) == 0     ? average_parse_ema_(average, text + strlen(ema))
           : strncmp(text, last, strlen(last)) == 0 ? average_parse_last_(average, text + strlen(last))
                                                    : 0;
}

int average_is_same(Average a, Average b) {
    return a.kind == b.kind && a.decay == b.decay && a.snapshots == b.snapshots && a.every == b.every;
}

AverageStep average_step(Average average, int64_t n) {
    const int64_t taken = average.kind != AVERAGE_NONE && n > 0 ? n / average.every : 0;
    const AverageStep none = {average.snapshots, 0, 0, 1.0f};
    if (taken == 0) {
        return none;
    }
    const double decay = average.decay; // 0 for snapshots: their rate is 1
    const AverageStep step = {average.snapshots, (int)(taken < average.snapshots ? taken : average.snapshots),
                              (int)((taken - 1) % average.snapshots),
                              (float)((1 - decay) / (1 - pow(decay, (double)n)))};
    return step;
}

void average_add_cpu(float* average, const float* weights, size_t elements, AverageStep step) {
    const size_t snapshots = (size_t)step.snapshots;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < elements; i++) {
        average_add_element(average + i * snapshots, weights[i], step);
    }
}

void average_mean_cpu(float* mean, const float* average, size_t elements, AverageStep step) {
    const size_t snapshots = (size_t)step.snapshots;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < elements; i++) {
        mean[i] = average_of_element(average + i * snapshots, step);
    }
}

#endif // AVERAGE_IMPLEMENTATION

#endif
