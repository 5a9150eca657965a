/*
distill.h -- cross-entropy together with the divergence from a teacher, and the gradient of both:
the contract, and the CPU version. The notation is that of cross_entropy.h.

    p         = softmax(y)             pt = softmax(y / t)         t: the temperature
    loss[n]   = lse[n] - y[n][target[n]]
    kl[n]     = sum_v q[v] log(q[v] / pt[v])                       q: the teacher, at temperature t

    dy[n][v]  = scale ((1 - a) (p[v] - [v = target[n]]) + 2 z_loss lse[n] p[v] + a t (pt[v] - q[v]))

This is the gradient of (1 - a) loss + z_loss lse^2 + a t^2 kl, with a the weight of the teacher.
The factor t^2 keeps its size the same for all temperatures (Hinton, Vinyals and Dean, "Distilling
the knowledge in a neural network", 2015).

A teacher is a row of logits of a model, or the k most likely tokens, whose log-probabilities at
temperature t are kept. The other tokens then are one more outcome, of probability

    r = 1 - sum of the kept q     for the teacher       R = 1 - sum of those tokens' pt   for y

and kl = sum over kept tokens of q log(q / pt) + r log(r / R); q[v] = r pt[v] / R for a token that
is not kept, so among these the student keeps its own proportions. If rounding makes the kept q add
up to more than 1, they are divided by their sum.

    logits     (N, Vp)   turned into dlogits in place
    teacher    (N, Vp of the teacher)   scratch afterwards; columns from V on are left out
    kept       (N, k)    ids, each below V and only once in a row, and log-probabilities
    target     (N)       as in cross_entropy.h: a row of NO_TARGET does not count, its kl is 0
    loss, kl   (N)       fp32, in nats; loss has the bits of cross_entropy_loss
*/
#ifndef LLMC_DISTILL_H
#define LLMC_DISTILL_H

#include "llmc/ops/cross_entropy.h"

#ifdef __cplusplus
extern "C" {
#endif

// How much a teacher counts: a and t.
typedef struct {
    float weight, temperature;
} Distill;

// The k most likely tokens of each row, and their log-probabilities.
enum { DISTILL_MOST_KEPT = 256 };
typedef struct {
    const int* ids;
    const float* log_probs;
    int k;
} KeptTokens;

// Returns the tokens of row `first` and of those after it.
static inline KeptTokens kept_tokens_from(KeptTokens kept, int first) {
    const size_t at = (size_t)first * (size_t)kept.k;
    const KeptTokens rows = {kept.ids + at, kept.log_probs + at, kept.k};
    return rows;
}

// Sets ids and log_probs (N, k) to the k most likely tokens of each row of logits, the most likely
// first; of equal logits the first token. z_loss is not used.
void distill_keep_cpu(int* ids, float* log_probs, const float* logits, int k, float temperature,
                      CrossEntropy of);

// Returns the bytes of memory traffic beside those of cross_entropy_backward.
static inline double distill_bytes(double N, double V, double element_bytes) {
    return N * V * element_bytes + 4 * N;
}

// Sets loss and kl, and turns logits into dlogits. The teacher's logits have rows of `Vp` and its
// own softcap; the student's are in `of`.
void distill_logits_cpu(float* loss, float* kl, float* logits, float* teacher, int teacher_Vp,
                        float teacher_softcap, const int* target, float scale, CrossEntropy of, Distill how);
void distill_kept_cpu(float* loss, float* kl, float* logits, KeptTokens kept, const int* target, float scale,
                      CrossEntropy of, Distill how);

#ifdef __cplusplus
}
#endif

#ifdef DISTILL_IMPLEMENTATION

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "llmc/base/vec.h"

// Numbers of a row of y: p = exp(y - lse), pt = exp(y / t + shift), and dy without the teacher and
// the target = of_p p + of_pt pt.
typedef struct {
    float lse, over_t, shift, of_p, of_pt, softcap;
} DistillRow_;

// Turns logits into y, in place.
static void distill_cap_(float* row, int V, float softcap) {
    int v = 0;
    for (; v + LANES <= V && softcap > 0; v += LANES) {
        vec_store(row + v, cross_entropy_cap_vec(vec_load(row + v), softcap));
    }
    for (; v < V; v++) {
        row[v] = cross_entropy_cap(row[v], softcap);
    }
}

static float distill_max_(const float* row, int V) {
    Vec most = vec_all(-INFINITY);
    int v = 0;
    for (; v + LANES <= V; v += LANES) {
        most = vec_max(vec_load(row + v), most);
    }
    float max = vec_hmax(most);
    for (; v < V; v++) {
        max = row[v] > max ? row[v] : max;
    }
    return max;
}

// Returns the sum of exp((row[v] - from) / t).
static float distill_sum_(const float* row, int V, float from, float over_t) {
    Vec sum = vec_all(0.0f);
    int v = 0;
    for (; v + LANES <= V; v += LANES) {
        sum += vec_exp((vec_load(row + v) - from) * over_t);
    }
    float total = vec_hsum(sum);
    for (; v < V; v++) {
        total += expf((row[v] - from) * over_t);
    }
    return total;
}

// Returns sum_v q[v] (log q[v] - log pt[v]), with q = exp(z / t + shift).
static float distill_divergence_(const float* z, float shift, const float* y, DistillRow_ r, int V) {
    Vec sum = vec_all(0.0f);
    int v = 0;
    for (; v + LANES <= V; v += LANES) {
        const Vec log_q = vec_load(z + v) * r.over_t + shift;
        sum += vec_exp(log_q) * (log_q - (vec_load(y + v) * r.over_t + r.shift));
    }
    float total = vec_hsum(sum);
    for (; v < V; v++) {
        const float log_q = z[v] * r.over_t + shift;
        total += expf(log_q) * (log_q - (y[v] * r.over_t + r.shift));
    }
    return total;
}

static float distill_slope_(float y, float softcap) {
    return softcap > 0 ? 1 - (y / softcap) * (y / softcap) : 1;
}

static float distill_dy_(float y, DistillRow_ r) {
    return r.of_p * expf(y - r.lse) + r.of_pt * expf(y * r.over_t + r.shift);
}

// Turns y into dlogits but for the target's part: minus of_q exp(z / t + shift), unless z is NULL.
static void distill_gradient_(float* y, const float* z, float of_q, float shift, DistillRow_ r, int V) {
    int v = 0;
    for (; v + LANES <= V; v += LANES) {
        const Vec x = vec_load(y + v), capped = x / r.softcap;
        Vec dy = r.of_p * vec_exp(x - r.lse) + r.of_pt * vec_exp(x * r.over_t + r.shift);
        if (z) {
            dy -= of_q * vec_exp(vec_load(z + v) * r.over_t + shift);
        }
        vec_store(y + v, r.softcap > 0 ? dy * (1.0f - capped * capped) : dy);
    }
    for (; v < V; v++) {
        const float of_teacher = z ? of_q * expf(z[v] * r.over_t + shift) : 0;
        y[v] = (distill_dy_(y[v], r) - of_teacher) * distill_slope_(y[v], r.softcap);
    }
}

// Returns the numbers of a row of y whose loss is known. sum_t is the sum of exp((y - lse) / t).
static DistillRow_ distill_row_(float lse, float sum_t, float scale, CrossEntropy of, Distill how) {
    const float a = how.weight, t = how.temperature;
    return (DistillRow_){.lse = lse,
                         .over_t = 1 / t,
                         .shift = -lse / t - logf(sum_t),
                         .of_p = scale * (1 - a + 2 * of.z_loss * lse),
                         .of_pt = scale * a * t,
                         .softcap = of.softcap};
}

// Sets the gradient of a row that does not count.
static void distill_skip_(float* kl, float* row, int Vp) {
    *kl = 0;
    memset(row, 0, (size_t)Vp * sizeof(float));
}

// Adds the target's part to a row of gradients, and clears its padding.
static void distill_end_(float* row, int target, float y, float scale, CrossEntropy of, Distill how) {
    row[target] -= scale * (1 - how.weight) * distill_slope_(y, of.softcap);
    memset(row + of.V, 0, (size_t)(of.Vp - of.V) * sizeof(float));
}

void distill_logits_cpu(float* loss, float* kl, float* logits, float* teacher, int teacher_Vp,
                        float teacher_softcap, const int* target, float scale, CrossEntropy of, Distill how) {
    cross_entropy_loss_cpu(loss, logits, target, of);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        float *y = logits + (size_t)n * of.Vp, *z = teacher + (size_t)n * teacher_Vp;
        if (target[n] == NO_TARGET) {
            distill_skip_(kl + n, y, of.Vp);
            continue;
        }
        distill_cap_(y, of.V, of.softcap);
        distill_cap_(z, of.V, teacher_softcap);
        const float hit = y[target[n]], lse = loss[n] + hit, over_t = 1 / how.temperature,
                    most = distill_max_(z, of.V);
        const DistillRow_ row = distill_row_(lse, distill_sum_(y, of.V, lse, over_t), scale, of, how);
        const float shift = -most * over_t - logf(distill_sum_(z, of.V, most, over_t));
        kl[n] = distill_divergence_(z, shift, y, row, of.V);
        distill_gradient_(y, z, row.of_pt, shift, row, of.V);
        distill_end_(y, target[n], hit, scale, of, how);
    }
}

// ---- kept tokens ----

// Inserts token v, of value y, into a list of `count` tokens in falling order, of which at most k
// stay. Returns the new count.
static int distill_insert_(int* ids, float* values, int count, int k, int v, float y) {
    int at = count < k ? count : k - 1;
    if (count == k && !(y > values[k - 1])) {
        return count;
    }
    for (; at > 0 && y > values[at - 1]; at--) {
        ids[at] = ids[at - 1];
        values[at] = values[at - 1];
    }
    ids[at] = v;
    values[at] = y;
    return count < k ? count + 1 : k;
}

void distill_keep_cpu(int* ids, float* log_probs, const float* logits, int k, float temperature,
                      CrossEntropy of) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        const float* row = logits + (size_t)n * of.Vp;
        float* values = log_probs + (size_t)n * k;
        double sum = 0;
        int count = 0;
        for (int v = 0; v < of.V; v++) {
            count = distill_insert_(ids + (size_t)n * k, values, count, k, v, row[v]);
        }
        const float most = cross_entropy_cap(values[0], of.softcap);
        for (int v = 0; v < of.V; v++) {
            sum += expf((cross_entropy_cap(row[v], of.softcap) - most) / temperature);
        }
        for (int i = 0; i < k; i++) {
            values[i] = (cross_entropy_cap(values[i], of.softcap) - most) / temperature - (float)log(sum);
        }
    }
}

// Returns the sum of the kept probabilities.
static float distill_kept_sum_(const float* log_probs, int k) {
    float sum = 0;
    for (int i = 0; i < k; i++) {
        sum += expf(log_probs[i]);
    }
    return sum;
}

// Moves y of the kept tokens into `kept_y`, and leaves -infinity, which has no probability.
static void distill_take_(float* kept_y, float* y, const int* ids, int k) {
    for (int i = 0; i < k; i++) {
        kept_y[i] = y[ids[i]];
        y[ids[i]] = -INFINITY;
    }
}

// Sets the gradients of the kept tokens, and returns their part of kl. log_all: the logarithm of
// what their probabilities are divided by.
static float distill_set_kept_(float* row, const float* kept_y, const int* ids, const float* log_probs, int k,
                               float log_all, DistillRow_ r) {
    float kl = 0;
    for (int i = 0; i < k; i++) {
        const float log_q = log_probs[i] - log_all, q = expf(log_q), y = kept_y[i];
        kl += q * (log_q - (y * r.over_t + r.shift));
        row[ids[i]] = (distill_dy_(y, r) - r.of_pt * q) * distill_slope_(y, r.softcap);
    }
    return kl;
}

// Turns row n into dlogits, and returns its kl, with room for k logits.
static float distill_kept_row_(float* y, float loss, int target, const int* ids, const float* log_probs,
                               int k, float* kept_y, float scale, CrossEntropy of, Distill how) {
    distill_cap_(y, of.V, of.softcap);
    const float hit = y[target], lse = loss + hit, over_t = 1 / how.temperature,
                kept = distill_kept_sum_(log_probs, k), log_all = kept > 1 ? logf(kept) : 0;
    distill_take_(kept_y, y, ids, k);
    const float others = distill_sum_(y, of.V, lse, over_t),
                sum_t = others + distill_sum_(kept_y, k, lse, over_t),
                rest = kept < 1 ? 1 - kept : 0, // r
        own = fmaxf(others / sum_t, FLT_MIN);   // R
    const DistillRow_ row = distill_row_(lse, sum_t, scale, of, how);
    DistillRow_ other = row;
    other.of_pt *= 1 - rest / own;
    distill_gradient_(y, NULL, 0, 0, other, of.V);
    const float kl = distill_set_kept_(y, kept_y, ids, log_probs, k, log_all, row) +
                     (rest > 0 ? rest * logf(rest / own) : 0);
    distill_end_(y, target, hit, scale, of, how);
    return kl;
}

void distill_kept_cpu(float* loss, float* kl, float* logits, KeptTokens kept, const int* target, float scale,
                      CrossEntropy of, Distill how) {
    cross_entropy_loss_cpu(loss, logits, target, of);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        const KeptTokens own = kept_tokens_from(kept, n);
        float *row = logits + (size_t)n * of.Vp, kept_y[DISTILL_MOST_KEPT];
        if (target[n] == NO_TARGET) {
            distill_skip_(kl + n, row, of.Vp);
            continue;
        }
        kl[n] = distill_kept_row_(row, loss[n], target[n], own.ids, own.log_probs, kept.k, kept_y, scale, of,
                                  how);
    }
}

#endif // DISTILL_IMPLEMENTATION

#endif
