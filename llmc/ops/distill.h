/*
distill.h -- cross-entropy together with the divergence from a teacher, and the gradient of both:
the contract, and the CPU version. The notation is as in cross_entropy.h.

    p         = softmax(y)             pt = softmax(y / t)         t: the temperature
    loss[n]   = lse[n] - y[n][target[n]]
    kl[n]     = sum_v q[v] log(q[v] / pt[v])                       q: the teacher, at temperature t

    dy[n][v]  = scale ((1 - a) (p[v] - [v = target[n]]) + 2 z_loss lse[n] p[v] + a t (pt[v] - q[v]))

This is the gradient of (1 - a) loss + z_loss lse^2 + a t^2 kl, with a the weight of the teacher.
The factor t^2 keeps its size the same for all temperatures (Hinton, Vinyals and Dean, "Distilling
the knowledge in a neural network", 2015).

    logits     (N, Vp)   turned into dlogits in place
    teacher    (N, Vp of the teacher)   scratch afterwards; columns from V on are left out
    target     (N)       as in cross_entropy.h: a row of NO_TARGET does not count, its kl is 0
    loss, kl   (N)       fp32, in nats; loss has the bits of cross_entropy_loss

If the vocabulary is cut into slices (cross_entropy.h), the losses are known first. Each slice then
sums over its own part of each row (DistillSlice). From the sums of all slices, in their order, each
turns its logits into dlogits.
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

// Returns the bytes of memory traffic in addition to cross_entropy_backward's.
static inline double distill_bytes(double N, double V, double element_bytes) {
    return N * V * element_bytes + 4 * N;
}

// A teacher's logits (N, Vp), of the whole vocabulary or of a slice.
typedef struct {
    float* logits;
    int Vp;
    float softcap;
} DistillTeacher;

// Tokens that learn.
typedef struct {
    const int* target; // (N)
    float scale;       // weight of a token in the gradient
    CrossEntropy of;
    Distill how;
} DistillTokens;

// Sets loss and kl, and turns logits into dlogits.
void distill_logits_cpu(float* loss, float* kl, float* logits, DistillTeacher teacher, DistillTokens x);

// ---- slices of the vocabulary ----

// Sums of a row over a slice, with e = exp((z - most) / t).
typedef struct {
    float most;       // the largest z
    float q;          // sum of e
    float difference; // sum of e (z - y)
    float sum_t;      // sum of exp((y - lse) / t)
} DistillSlice;

// Rows of all slices (slices, N), and the losses (N) that follow from the first kind.
typedef struct {
    int slices;
    const CrossEntropySlice* rows;
    DistillSlice* sums;
    const float* loss;
    const int* target;
} DistillSlices;

// Set s->sums of slice i and turn its logits into y; then turn y into dlogits. The slice starts
// with token `first`, and `of` has its sizes.
void distill_slice_cpu(const DistillSlices* s, int i, float* logits, DistillTeacher teacher, CrossEntropy of,
                       Distill how);
void distill_slice_backward_cpu(const DistillSlices* s, float* logits, DistillTeacher teacher, int first,
                                float scale, CrossEntropy of, Distill how);

// Sets kl (N) from the sums of all slices.
void distill_combine_cpu(float* kl, const DistillSlices* s, CrossEntropy of, Distill how);

#ifdef __cplusplus
}
#endif

#ifdef DISTILL_IMPLEMENTATION

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
        vec_store(row + v, softcap_vec(vec_load(row + v), softcap));
    }
    for (; v < V; v++) {
        row[v] = softcap_of(row[v], softcap);
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

static float distill_slope_(float y, float softcap) { return softcap > 0 ? softcap_slope(y / softcap) : 1; }

static float distill_dy_(float y, DistillRow_ r) {
    return r.of_p * expf(y - r.lse) + r.of_pt * expf(y * r.over_t + r.shift);
}

// Turns y into dlogits without the target's part: subtracts of_q exp(z / t + shift).
static void distill_gradient_(float* y, const float* z, float of_q, float shift, DistillRow_ r, int V) {
    int v = 0;
    for (; v + LANES <= V; v += LANES) {
        const Vec x = vec_load(y + v), capped = x / r.softcap;
        Vec dy = r.of_p * vec_exp(x - r.lse) + r.of_pt * vec_exp(x * r.over_t + r.shift);
        dy -= of_q * vec_exp(vec_load(z + v) * r.over_t + shift);
        vec_store(y + v, r.softcap > 0 ? dy * softcap_slope_vec(capped) : dy);
    }
    for (; v < V; v++) {
        const float of_teacher = of_q * expf(z[v] * r.over_t + shift);
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

void distill_logits_cpu(float* loss, float* kl, float* logits, DistillTeacher teacher, DistillTokens x) {
    cross_entropy_loss_cpu(loss, logits, x.target, x.of);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < x.of.N; n++) {
        float *y = logits + (size_t)n * x.of.Vp, *z = teacher.logits + (size_t)n * teacher.Vp;
        if (x.target[n] == NO_TARGET) {
            distill_skip_(kl + n, y, x.of.Vp);
            continue;
        }
        distill_cap_(y, x.of.V, x.of.softcap);
        distill_cap_(z, x.of.V, teacher.softcap);
        const float hit = y[x.target[n]], lse = loss[n] + hit, over_t = 1 / x.how.temperature,
                    most = distill_max_(z, x.of.V);
        const DistillRow_ row = distill_row_(lse, distill_sum_(y, x.of.V, lse, over_t), x.scale, x.of, x.how);
        const float shift = -most * over_t - logf(distill_sum_(z, x.of.V, most, over_t));
        kl[n] = distill_divergence_(z, shift, y, row, x.of.V);
        distill_gradient_(y, z, row.of_pt, shift, row, x.of.V);
        distill_end_(y, x.target[n], hit, x.scale, x.of, x.how);
    }
}

// ---- slices of the vocabulary ----

// A row of the whole vocabulary: y of the target, the numbers of a row of y; kl; and of the
// teacher, q = exp(z / t + shift).
typedef struct {
    float hit, shift, kl;
    DistillRow_ row;
} DistillWhole_;

// Returns y of the target of row n.
static float distill_hit_(const DistillSlices* s, int n, int N) {
    float hit = 0;
    for (int i = 0; i < s->slices; i++) {
        hit += s->rows[(size_t)i * N + n].target;
    }
    return hit;
}

// Returns the sums of row n over all slices, in their order.
static DistillSlice distill_all_(const DistillSlices* s, int n, int N, float over_t) {
    DistillSlice all = {-INFINITY, 0, 0, 0};
    for (int i = 0; i < s->slices; i++) {
        all.most = fmaxf(all.most, s->sums[(size_t)i * N + n].most);
    }
    for (int i = 0; i < s->slices; i++) {
        const DistillSlice part = s->sums[(size_t)i * N + n];
        const float factor = part.most == all.most ? 1 : expf((part.most - all.most) * over_t);
        all.q += part.q * factor;
        all.difference += part.difference * factor;
        all.sum_t += part.sum_t;
    }
    return all;
}

static DistillWhole_ distill_whole_(const DistillSlices* s, int n, float scale, CrossEntropy of,
                                    Distill how) {
    const float t = how.temperature, hit = distill_hit_(s, n, of.N), lse = s->loss[n] + hit;
    const DistillSlice all = distill_all_(s, n, of.N, 1 / t);
    const float log_q = logf(all.q);
    const DistillWhole_ whole = {.hit = hit,
                                 .shift = -all.most / t - log_q,
                                 .kl = (all.difference / all.q + (lse - all.most)) / t + logf(all.sum_t) -
                                       log_q,
                                 .row = distill_row_(lse, all.sum_t, scale, of, how)};
    return whole;
}

static DistillSlice distill_slice_sums_(const float* y, const float* z, int V, float lse, float over_t) {
    const float most = distill_max_(z, V);
    Vec difference = vec_all(0.0f);
    int v = 0;
    for (; v + LANES <= V; v += LANES) {
        const Vec x = vec_load(z + v);
        difference += vec_exp((x - most) * over_t) * (x - vec_load(y + v));
    }
    DistillSlice sums = {most, distill_sum_(z, V, most, over_t), vec_hsum(difference),
                         distill_sum_(y, V, lse, over_t)};
    for (; v < V; v++) {
        sums.difference += expf((z[v] - most) * over_t) * (z[v] - y[v]);
    }
    return sums;
}

void distill_slice_cpu(const DistillSlices* s, int i, float* logits, DistillTeacher teacher, CrossEntropy of,
                       Distill how) {
    const float over_t = 1 / how.temperature;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        float *y = logits + (size_t)n * of.Vp, lse = s->loss[n] + distill_hit_(s, n, of.N);
        DistillSlice* sums = &s->sums[(size_t)i * of.N + n];
        distill_cap_(y, of.V, of.softcap);
        if (s->target[n] == NO_TARGET) {
            memset(sums, 0, sizeof(*sums));
        } else {
            float* z = teacher.logits + (size_t)n * teacher.Vp;
            distill_cap_(z, of.V, teacher.softcap);
            *sums = distill_slice_sums_(y, z, of.V, lse, over_t);
        }
    }
}

void distill_combine_cpu(float* kl, const DistillSlices* s, CrossEntropy of, Distill how) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        kl[n] = s->target[n] == NO_TARGET ? 0 : distill_whole_(s, n, 1, of, how).kl;
    }
}

void distill_slice_backward_cpu(const DistillSlices* s, float* logits, DistillTeacher teacher, int first,
                                float scale, CrossEntropy of, Distill how) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        float* y = logits + (size_t)n * of.Vp;
        const int hit = s->target[n] - first;
        if (s->target[n] == NO_TARGET) {
            memset(y, 0, (size_t)of.Vp * sizeof(float));
            continue;
        }
        const DistillWhole_ w = distill_whole_(s, n, scale, of, how);
        distill_gradient_(y, teacher.logits + (size_t)n * teacher.Vp, w.row.of_pt, w.shift, w.row, of.V);
        memset(y + of.V, 0, (size_t)(of.Vp - of.V) * sizeof(float));
        if (0 <= hit && hit < of.V) {
            distill_end_(y, hit, w.hit, scale, of, how);
        }
    }
}

#endif // DISTILL_IMPLEMENTATION

#endif
