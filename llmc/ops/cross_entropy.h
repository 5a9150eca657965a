/*
cross_entropy.h -- softmax, cross-entropy and their gradient in one place: the contract, and the CPU
version.

    loss[n] = log(sum_v exp(logits[n][v])) - logits[n][target[n]]         v < V
    dlogits[n][v] = (softmax(logits[n])[v] - [v = target[n]]) * scale     and 0 for V <= v < Vp

    logits     (N, Vp)   columns from V on are padding: no probability, no gradient
    target     (N)       int32, each below V, or NO_TARGET
    loss       (N)       fp32, in nats
    is_top     (N)       int32, 1 if the target has the largest logit (of equal logits, the first
                         counts), else 0; 0 without a target

cross_entropy_backward sets loss and turns the logits into their gradient in place; probabilities
are stored nowhere else. cross_entropy_loss only sets loss (validation must not write gradients),
cross_entropy_top sets is_top. `scale` is 1 / (tokens of the whole update).

A row whose target is NO_TARGET, a padded position, does not count: its loss and its gradient are 0,
whatever its logits are, even NaN. With `scale` = 1 / (all tokens) the result is the loss over the
counted tokens times counted / all; targets_factor undoes that.
*/
#ifndef LLMC_CROSS_ENTROPY_H
#define LLMC_CROSS_ENTROPY_H

#include <math.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { NO_TARGET = -1 };

// Return the bytes of memory traffic; the second read of a row hits a cache.
static inline double cross_entropy_loss_bytes(double N, double V, double element_bytes) {
    return N * V * element_bytes + 8 * N;
}

static inline double cross_entropy_backward_bytes(double N, double Vp, double element_bytes) {
    return 2 * N * Vp * element_bytes + 8 * N;
}

// Returns the number of targets that count, of N.
int targets_count(const int* target, int N);

// Returns the factor from means over `all` tokens to means over the counted ones: exactly 1 if all
// count. The mean over none is NaN.
static inline double targets_factor(double all, double counted) {
    return counted > 0 ? all / counted : (double)NAN;
}

void cross_entropy_loss_cpu(float* loss, const float* logits, const int* target, int N, int V, int Vp);

void cross_entropy_top_cpu(int* is_top, const float* logits, const int* target, int N, int V, int Vp);

void cross_entropy_backward_cpu(float* loss, float* logits, const int* target, float scale, int N, int V,
                                int Vp);

#ifdef __cplusplus
}
#endif

#ifdef CROSS_ENTROPY_IMPLEMENTATION

#include "llmc/base/vec.h"

int targets_count(const int* target, int N) {
    int count = 0;
    for (int n = 0; n < N; n++) {
        count += target[n] != NO_TARGET;
    }
    return count;
}

static float cross_entropy_max_(const float* x, int V) {
    Vec max[4]; // four, so that no comparison waits for the one before
    int v = 0;
    for (int j = 0; j < 4; j++) {
        max[j] = vec_all(-INFINITY);
    }
    for (; v + 4 * LANES <= V; v += 4 * LANES) {
        for (int j = 0; j < 4; j++) {
            max[j] = vec_max(vec_load(x + v + (size_t)j * LANES), max[j]);
        }
    }
    float result = vec_hmax(vec_max(vec_max(max[0], max[1]), vec_max(max[2], max[3])));
    for (; v < V; v++) {
        result = x[v] > result ? x[v] : result;
    }
    return result;
}

// Returns sum_v exp(x[v] - max), and stores the exponentials in `keep` unless it is NULL. NaN in x
// gives NaN.
ALWAYS_INLINE float cross_entropy_exp_sum_(float* keep, const float* x, float max, int V) {
    Vec sum = vec_all(0.0f);
    int v = 0;
    for (; v + LANES <= V; v += LANES) {
        const Vec e = vec_exp(vec_load(x + v) - max);
        sum += e;
        if (keep) {
            vec_store(keep + v, e);
        }
    }
    float total = vec_hsum(sum);
    for (; v < V; v++) {
        const float e = expf(x[v] - max);
        total += e;
        if (keep) {
            keep[v] = e;
        }
    }
    return total;
}

void cross_entropy_loss_cpu(float* loss, const float* logits, const int* target, int N, int V, int Vp) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        const float* row = logits + (size_t)n * Vp;
        if (target[n] == NO_TARGET) {
            loss[n] = 0;
            continue;
        }
        const float max = cross_entropy_max_(row, V);
        loss[n] = logf(cross_entropy_exp_sum_(NULL, row, max, V)) + (max - row[target[n]]);
    }
}

void cross_entropy_top_cpu(int* is_top, const float* logits, const int* target, int N, int V, int Vp) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        const float* row = logits + (size_t)n * Vp;
        const int hit = target[n];
        int is_first = hit != NO_TARGET;
        for (int v = 0; v < V && is_first; v++) { // false for NaN
            is_first = row[v] < row[hit] || (row[v] == row[hit] && v >= hit);
        }
        is_top[n] = is_first;
    }
}

void cross_entropy_backward_cpu(float* loss, float* logits, const int* target, float scale, int N, int V,
                                int Vp) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        float* row = logits + (size_t)n * Vp;
        if (target[n] == NO_TARGET) {
            loss[n] = 0;
            memset(row, 0, (size_t)Vp * sizeof(float));
            continue;
        }
        const float max = cross_entropy_max_(row, V), target_logit = row[target[n]];
        const float sum = cross_entropy_exp_sum_(row, row, max, V);
        const float factor = scale / sum;
        loss[n] = logf(sum) + (max - target_logit);
        for (int v = 0; v < V; v++) {
            row[v] *= factor;
        }
        row[target[n]] -= scale;
        memset(row + V, 0, (size_t)(Vp - V) * sizeof(float));
    }
}

#endif // CROSS_ENTROPY_IMPLEMENTATION

#endif
