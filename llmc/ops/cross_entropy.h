/*
cross_entropy.h -- softmax, cross-entropy and their gradient in one place: the contract, and the CPU
version.

    y       = logits, or softcap tanh(logits / softcap)
    lse[n]  = log(sum_v exp(y[n][v]))                                     v < V
    loss[n] = lse[n] - y[n][target[n]]

    dy[n][v]      = (exp(y[n][v] - lse[n]) - [v = target[n]]) * scale     and 0 for V <= v < Vp
    dlogits[n][v] = dy[n][v] (1 - (y[n][v] / softcap)^2)

    logits     (N, Vp)   columns from V on are padding: no probability, no gradient
    target     (N)       int32, each below V, or NO_TARGET
    loss       (N)       fp32, in nats
    is_top     (N)       int32, 1 if the target has the largest logit (of equal logits, the first
                         counts), else 0; 0 without a target

With a z-loss, the gradient is that of loss + z_loss lse^2: in dy, exp(...) gets the factor
1 + 2 z_loss lse[n]. The losses stay cross-entropy.

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

#include "llmc/base/host_device.h"
#include "llmc/base/vec.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { NO_TARGET = -1 };

// Sizes of the logits, and the two numbers of the formulas; 0: none.
typedef struct {
    int N, V, Vp;
    float softcap, z_loss;
} CrossEntropy;

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

// Returns y, capped, of a logit.
HOST_DEVICE float cross_entropy_cap(float x, float softcap) {
    return softcap > 0 ? softcap * tanhf(x / softcap) : x;
}

// Return y / softcap and y of LANES logits, with softcap above 0, wrong by a few roundings.
ALWAYS_INLINE Vec cross_entropy_tanh_vec(Vec x, float softcap) {
    const Vec e = vec_exp2(vec_min(vec_all(126.0f), x * (-2.0f * LOG2_E / softcap))); // finite
    return (1.0f - e) / (1.0f + e);
}
ALWAYS_INLINE Vec cross_entropy_cap_vec(Vec x, float softcap) {
    return softcap * cross_entropy_tanh_vec(x, softcap);
}

void cross_entropy_loss_cpu(float* loss, const float* logits, const int* target, CrossEntropy of);

void cross_entropy_top_cpu(int* is_top, const float* logits, const int* target, CrossEntropy of);

void cross_entropy_backward_cpu(float* loss, float* logits, const int* target, float scale, CrossEntropy of);

#ifdef __cplusplus
}
#endif

#ifdef CROSS_ENTROPY_IMPLEMENTATION

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

// Returns sum_v exp(y[v] - max) with y capped; keeps exp(y[v] - max) (1 - (y[v] / softcap)^2) in
// `keep` unless it is NULL.
ALWAYS_INLINE float cross_entropy_capped_sum_(float* keep, const float* x, float max, float softcap, int V) {
    Vec sum = vec_all(0.0f);
    int v = 0;
    for (; v + LANES <= V; v += LANES) {
        const Vec t = cross_entropy_tanh_vec(vec_load(x + v), softcap), e = vec_exp(softcap * t - max);
        sum += e;
        if (keep) {
            vec_store(keep + v, e * (1.0f - t * t));
        }
    }
    float total = vec_hsum(sum);
    for (; v < V; v++) {
        const float t = tanhf(x[v] / softcap), e = expf(softcap * t - max);
        total += e;
        if (keep) {
            keep[v] = e * (1.0f - t * t);
        }
    }
    return total;
}

// A row: the largest y, the sum of exp(y - max), y of the target, and dy / dlogit of the target.
typedef struct {
    float max, sum, target, slope;
} CrossEntropyRow_;

// Keeps the exponentials, times dy / dlogit, in `keep` unless it is NULL; it may be x. Compiled
// once, so that losses have the same bits with gradients and without.
static __attribute__((noinline)) CrossEntropyRow_ cross_entropy_row_(float* keep, const float* x, int target,
                                                                     CrossEntropy of) {
    const float largest = cross_entropy_max_(x, of.V), max = cross_entropy_cap(largest, of.softcap);
    CrossEntropyRow_ row = {max, 0, cross_entropy_cap(x[target], of.softcap), 1};
    if (of.softcap > 0) {
        row.slope = 1 - (row.target / of.softcap) * (row.target / of.softcap);
        row.sum = cross_entropy_capped_sum_(keep, x, max, of.softcap, of.V);
    } else {
        row.sum = cross_entropy_exp_sum_(keep, x, max, of.V);
    }
    return row;
}

void cross_entropy_loss_cpu(float* loss, const float* logits, const int* target, CrossEntropy of) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        if (target[n] == NO_TARGET) {
            loss[n] = 0;
            continue;
        }
        const CrossEntropyRow_ row = cross_entropy_row_(NULL, logits + (size_t)n * of.Vp, target[n], of);
        loss[n] = logf(row.sum) + (row.max - row.target);
    }
}

void cross_entropy_top_cpu(int* is_top, const float* logits, const int* target, CrossEntropy of) {
    const int V = of.V;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        const float* row = logits + (size_t)n * of.Vp; // y rises with the logits
        const int hit = target[n];
        int is_first = hit != NO_TARGET;
        for (int v = 0; v < V && is_first; v++) { // false for NaN
            is_first = row[v] < row[hit] || (row[v] == row[hit] && v >= hit);
        }
        is_top[n] = is_first;
    }
}

void cross_entropy_backward_cpu(float* loss, float* logits, const int* target, float scale, CrossEntropy of) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        float* dlogits = logits + (size_t)n * of.Vp;
        if (target[n] == NO_TARGET) {
            loss[n] = 0;
            memset(dlogits, 0, (size_t)of.Vp * sizeof(float));
            continue;
        }
        const CrossEntropyRow_ row = cross_entropy_row_(dlogits, dlogits, target[n], of);
        const float log_sum = logf(row.sum);
        const float factor = scale / row.sum * (1 + 2 * of.z_loss * (log_sum + row.max));
        loss[n] = log_sum + (row.max - row.target);
        for (int v = 0; v < of.V; v++) {
            dlogits[v] *= factor;
        }
        dlogits[target[n]] -= scale * row.slope;
        memset(dlogits + of.V, 0, (size_t)(of.Vp - of.V) * sizeof(float));
    }
}

#endif // CROSS_ENTROPY_IMPLEMENTATION

#endif
