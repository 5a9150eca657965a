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

With a z-loss, the gradient belongs to loss + z_loss lse^2: in dy, exp(...) gets the factor
1 + 2 z_loss lse[n]. The losses stay cross-entropy.

cross_entropy_backward sets loss and turns the logits into their gradient in place; probabilities
are stored nowhere else. cross_entropy_loss only sets loss (validation must not write gradients),
cross_entropy_top sets is_top. `scale` is 1 / (tokens of the whole step).

If the vocabulary is cut into slices (part.h), each has its own logits (N, rows of the slice). For
each token a slice keeps its largest logit, the sum of the exponentials relative to it, and y of the
target if the target is in the slice. With max_i and sum_i of slice i, in their order,

    max = the largest max_i        sum = sum_0 exp(max_0 - max) + sum_1 exp(max_1 - max) + ...

and lse = max + log(sum). A slice of nothing but padding has max_i = -inf and sum_i = 0.

A row whose target is NO_TARGET, a padded position, does not count: its loss and its gradient are 0,
whatever its logits are, even NaN. With `scale` = 1 / (all tokens) the result is the loss over the
counted tokens times counted / all; targets_factor undoes that.
*/
#ifndef LLMC_CROSS_ENTROPY_H
#define LLMC_CROSS_ENTROPY_H

#include <math.h>
#include <stddef.h>

#include "llmc/base/vec.h"
#include "llmc/ops/softcap.h"

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

void cross_entropy_loss_cpu(float* loss, const float* logits, const int* target, CrossEntropy of);

void cross_entropy_top_cpu(int* is_top, const float* logits, const int* target, CrossEntropy of);

void cross_entropy_backward_cpu(float* loss, float* logits, const int* target, float scale, CrossEntropy of);

// ---- slices of the vocabulary ----

// Numbers that a slice keeps of a row.
typedef struct {
    float largest; // logit, not capped
    float sum;     // of exp(y - largest y)
    float target;  // y; 0 in slices that do not have it
    int top;       // token of the largest logit, the first of equal ones
} CrossEntropySlice;

// Processes a slice: logits (N, Vp) of the tokens from `first` on; the first V columns are real,
// the rest padding. CrossEntropy has the sizes of the slice.
void cross_entropy_slice_cpu(CrossEntropySlice* rows, float* logits, const int* target, int first,
                             CrossEntropy of);

// Also turns the logits into exponentials in place, for cross_entropy_slice_backward_cpu.
void cross_entropy_slice_exp_cpu(CrossEntropySlice* rows, float* logits, const int* target, int first,
                                 CrossEntropy of);

// Sets loss (N), and is_top (N) unless it is NULL, from the rows (slices, N) of all slices.
void cross_entropy_combine_cpu(float* loss, int* is_top, const CrossEntropySlice* rows, int slices,
                               const int* target, CrossEntropy of);

// Turns the exponentials of slice i into dlogits.
void cross_entropy_slice_backward_cpu(float* logits, const CrossEntropySlice* rows, int slices, int i,
                                      const int* target, int first, float scale, CrossEntropy of);

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
        const Vec t = softcap_tanh_vec(vec_load(x + v), softcap), e = vec_exp(softcap * t - max);
        sum += e;
        if (keep) {
            vec_store(keep + v, e * softcap_slope_vec(t));
        }
    }
    float total = vec_hsum(sum);
    for (; v < V; v++) {
        const float t = tanhf(x[v] / softcap), e = expf(softcap * t - max);
        total += e;
        if (keep) {
            keep[v] = e * softcap_slope(t);
        }
    }
    return total;
}

// A row: the largest y, the sum of exp(y - max), y of the target, and dy / dlogit of the target.
typedef struct {
    float max, sum, target, slope;
} CrossEntropyRow_;

// Returns dy / dlogit, given y.
static float cross_entropy_slope_(float y, float softcap) {
    return softcap > 0 ? softcap_slope(y / softcap) : 1;
}

// Keeps the exponentials, times dy / dlogit, in `keep` unless it is NULL; it may be x. Compiled
// once, so that losses have the same bits with gradients and without.
static __attribute__((noinline)) CrossEntropyRow_ cross_entropy_row_(float* keep, const float* x, int target,
                                                                     CrossEntropy of) {
    const float largest = cross_entropy_max_(x, of.V), max = softcap_of(largest, of.softcap);
    CrossEntropyRow_ row = {max, 0, softcap_of(x[target], of.softcap), 1};
    row.slope = cross_entropy_slope_(row.target, of.softcap);
    if (of.softcap > 0) {
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

// ---- slices of the vocabulary ----

static int cross_entropy_has_(int target, int first, CrossEntropy of) {
    return target != NO_TARGET && first <= target && target < first + of.V;
}

// Returns the first of the largest logits of a row; 0 if it is empty.
static int cross_entropy_first_top_(const float* x, float largest, int V) {
    int v = 0;
    while (v < V - 1 && x[v] != largest) {
        v++;
    }
    return v;
}

// Keeps the exponentials in `keep` unless it is NULL; it may be x.
static CrossEntropySlice cross_entropy_slice_row_(float* keep, const float* x, int target, int first,
                                                  CrossEntropy of) {
    const int has_target = cross_entropy_has_(target, first, of);
    const float largest = cross_entropy_max_(x, of.V);
    const int top = first + cross_entropy_first_top_(x, largest, of.V);
    const CrossEntropyRow_ row = cross_entropy_row_(keep, x, has_target ? target - first : 0, of);
    const CrossEntropySlice slice = {largest, row.sum, has_target ? row.target : 0, top};
    return slice;
}

void cross_entropy_slice_cpu(CrossEntropySlice* rows, float* logits, const int* target, int first,
                             CrossEntropy of) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        rows[n] = cross_entropy_slice_row_(NULL, logits + (size_t)n * of.Vp, target[n], first, of);
    }
}

void cross_entropy_slice_exp_cpu(CrossEntropySlice* rows, float* logits, const int* target, int first,
                                 CrossEntropy of) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        float* row = logits + (size_t)n * of.Vp;
        rows[n] = cross_entropy_slice_row_(row, row, target[n], first, of);
    }
}

// A row of the whole vocabulary: its largest y, the sum of exp(y - max), y of the target, and the
// token of the largest logit.
typedef struct {
    float max, sum, target;
    int top;
} CrossEntropyWhole_;

// Combines row n of all slices, in their order.
static CrossEntropyWhole_ cross_entropy_whole_(const CrossEntropySlice* rows, int slices, int n,
                                               CrossEntropy of) {
    const CrossEntropySlice* first = &rows[n];
    float largest = first->largest;
    CrossEntropyWhole_ whole = {0, 0, 0, first->top};
    for (int i = 1; i < slices; i++) {
        const CrossEntropySlice* row = &rows[(size_t)i * of.N + n];
        whole.top = row->largest > largest ? row->top : whole.top;
        largest = row->largest > largest ? row->largest : largest;
    }
    whole.max = softcap_of(largest, of.softcap);
    for (int i = 0; i < slices; i++) {
        const CrossEntropySlice* row = &rows[(size_t)i * of.N + n];
        whole.sum += row->sum * expf(softcap_of(row->largest, of.softcap) - whole.max);
        whole.target += row->target;
    }
    return whole;
}

void cross_entropy_combine_cpu(float* loss, int* is_top, const CrossEntropySlice* rows, int slices,
                               const int* target, CrossEntropy of) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        const CrossEntropyWhole_ row = cross_entropy_whole_(rows, slices, n, of);
        loss[n] = target[n] == NO_TARGET ? 0 : logf(row.sum) + (row.max - row.target);
        if (is_top) { // with a NaN among them, no logit is the largest
            is_top[n] = target[n] != NO_TARGET && row.top == target[n] && !isnan(row.sum);
        }
    }
}

void cross_entropy_slice_backward_cpu(float* logits, const CrossEntropySlice* rows, int slices, int i,
                                      const int* target, int first, float scale, CrossEntropy of) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        float* dlogits = logits + (size_t)n * of.Vp;
        if (target[n] == NO_TARGET) {
            memset(dlogits, 0, (size_t)of.Vp * sizeof(float));
            continue;
        }
        const CrossEntropyWhole_ row = cross_entropy_whole_(rows, slices, n, of);
        const float max = softcap_of(rows[(size_t)i * of.N + n].largest, of.softcap);
        const float factor =
            scale / row.sum * (1 + 2 * of.z_loss * (logf(row.sum) + row.max)) * expf(max - row.max);
        for (int v = 0; v < of.V; v++) {
            dlogits[v] *= factor;
        }
        if (cross_entropy_has_(target[n], first, of)) {
            dlogits[target[n] - first] -= scale * cross_entropy_slope_(row.target, of.softcap);
        }
        memset(dlogits + of.V, 0, (size_t)(of.Vp - of.V) * sizeof(float));
    }
}

#endif // CROSS_ENTROPY_IMPLEMENTATION

#endif
