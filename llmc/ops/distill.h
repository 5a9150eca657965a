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

If the vocabulary is cut into slices (cross_entropy.h), the losses are known first. A slice then
keeps sums of its own words of each row (DistillSlice). With those of all slices, in their order,
each turns its logits into dlogits.
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

// The k tokens with the largest logits of each row, the largest first, of equal logits the first
// token; and the sum of exp((y - most) / t), with most the largest y. A slice with fewer words ends
// with logits of -infinity.
typedef struct {
    double sum;
    float most;
} DistillTopSum;
typedef struct {
    int N, k;
    int* ids;            // (slices, N, k) words of the whole vocabulary
    float* logits;       // (slices, N, k)
    DistillTopSum* sums; // (slices, N)
} DistillTop;

// Sets the rows from `n` on, of.N of them, of slice i, whose words start with `first`. z_loss is
// not used.
void distill_top_cpu(DistillTop* top, int i, int n, const float* logits, float temperature, int first,
                     CrossEntropy of);

// Sets ids and log_probs (N, k) from all slices.
void distill_top_combine_cpu(int* ids, float* log_probs, const DistillTop* top, int slices, float temperature,
                             float softcap);

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

// ---- slices of the vocabulary ----

// A teacher's logits of a slice (N, Vp), or, if they are NULL, its kept tokens of all words.
typedef struct {
    float* logits;
    int Vp;
    float softcap;
    KeptTokens kept;
} DistillTeacher;

// Sums of a row over the words of a slice, with e = exp((z - most) / t); or over its kept tokens,
// and over its other ones.
typedef struct {
    float most;       // the largest z
    float q;          // sum of e; of q of kept tokens
    float difference; // sum of e (z - y); of q (log q - (y - lse) / t) of kept tokens
    float sum_t;      // of exp((y - lse) / t); of tokens that are not kept
    float kept_t;     // of kept tokens
} DistillSlice;

// Rows of all slices (slices, N), and the losses (N) that follow from the first kind.
typedef struct {
    int slices;
    const CrossEntropySlice* rows;
    DistillSlice* sums;
    const float* loss;
    const int* target;
} DistillSlices;

// Set s->sums of slice i, whose words start with `first`, and turn its logits into y; then turn y
// into dlogits. The sizes in `of` are those of the slice.
void distill_slice_cpu(const DistillSlices* s, int i, float* logits, DistillTeacher teacher, int first,
                       CrossEntropy of, Distill how);
void distill_slice_backward_cpu(const DistillSlices* s, float* logits, DistillTeacher teacher, int first,
                                float scale, CrossEntropy of, Distill how);

// Sets kl (N) from the sums of all slices.
void distill_combine_cpu(float* kl, const DistillSlices* s, DistillTeacher teacher, CrossEntropy of,
                         Distill how);

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

void distill_top_cpu(DistillTop* top, int i, int n, const float* logits, float temperature, int first,
                     CrossEntropy of) {
    const int k = top->k;
#pragma omp parallel for schedule(static)
    for (int t = 0; t < of.N; t++) {
        const float* row = logits + (size_t)t * of.Vp;
        const size_t at = (size_t)i * top->N + n + t;
        int count = 0, *ids = top->ids + at * k;
        float* values = top->logits + at * k;
        for (int v = 0; v < of.V; v++) {
            count = distill_insert_(ids, values, count, k, first + v, row[v]);
        }
        for (; count < k; count++) {
            ids[count] = -1;
            values[count] = -INFINITY;
        }
        const float most = cross_entropy_cap(values[0], of.softcap);
        double sum = 0;
        for (int v = 0; v < of.V; v++) {
            sum += expf((cross_entropy_cap(row[v], of.softcap) - most) / temperature);
        }
        top->sums[at] = (DistillTopSum){sum, most};
    }
}

// Returns the sum of row n over all slices, and its largest y.
static DistillTopSum distill_top_sum_(const DistillTop* top, int slices, int n, float temperature) {
    DistillTopSum all = {0, -INFINITY};
    for (int i = 0; i < slices; i++) {
        all.most = fmaxf(all.most, top->sums[(size_t)i * top->N + n].most);
    }
    for (int i = 0; i < slices; i++) {
        const DistillTopSum part = top->sums[(size_t)i * top->N + n];
        all.sum += part.sum * exp((double)((part.most - all.most) / temperature));
    }
    return all;
}

void distill_top_combine_cpu(int* ids, float* log_probs, const DistillTop* top, int slices, float temperature,
                             float softcap) {
    const int k = top->k;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < top->N; n++) {
        const DistillTopSum all = distill_top_sum_(top, slices, n, temperature);
        float* values = log_probs + (size_t)n * k;
        int count = 0;
        for (int i = 0; i < slices * k; i++) {
            const size_t from = ((size_t)(i / k) * top->N + n) * k + i % k;
            if (top->ids[from] >= 0) {
                count =
                    distill_insert_(ids + (size_t)n * k, values, count, k, top->ids[from], top->logits[from]);
            }
        }
        for (int i = 0; i < k; i++) {
            values[i] =
                (cross_entropy_cap(values[i], softcap) - all.most) / temperature - (float)log(all.sum);
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

// ---- slices of the vocabulary ----

// A row of the whole vocabulary: y of the target, the numbers of a row of y; and of the teacher,
// q = exp(z / t + shift), or r, R and the logarithm of what kept q are divided by; kl.
typedef struct {
    float hit, shift, rest, own, log_all, kl;
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
    DistillSlice all = {-INFINITY, 0, 0, 0, 0};
    for (int i = 0; i < s->slices; i++) {
        all.most = fmaxf(all.most, s->sums[(size_t)i * N + n].most);
    }
    for (int i = 0; i < s->slices; i++) {
        const DistillSlice part = s->sums[(size_t)i * N + n];
        const float factor = part.most == all.most ? 1 : expf((part.most - all.most) * over_t);
        all.q += part.q * factor;
        all.difference += part.difference * factor;
        all.sum_t += part.sum_t;
        all.kept_t += part.kept_t;
    }
    return all;
}

static DistillWhole_ distill_whole_(const DistillSlices* s, DistillTeacher teacher, int n, float scale,
                                    CrossEntropy of, Distill how) {
    const float t = how.temperature, hit = distill_hit_(s, n, of.N), lse = s->loss[n] + hit;
    const DistillSlice all = distill_all_(s, n, of.N, 1 / t);
    const float sum_t = all.sum_t + all.kept_t;
    DistillWhole_ w = {.hit = hit, .row = distill_row_(lse, sum_t, scale, of, how)};
    if (teacher.logits) {
        w.shift = -all.most / t - logf(all.q);
        w.kl = (all.difference / all.q + (lse - all.most)) / t + logf(sum_t) - logf(all.q);
        return w;
    }
    const KeptTokens own = kept_tokens_from(teacher.kept, n);
    const float kept = distill_kept_sum_(own.log_probs, own.k);
    w.log_all = kept > 1 ? logf(kept) : 0;
    w.rest = kept < 1 ? 1 - kept : 0;
    w.own = fmaxf(all.sum_t / sum_t, FLT_MIN);
    w.kl = expf(-w.log_all) * (all.difference + all.q * (logf(sum_t) - w.log_all)) +
           (w.rest > 0 ? w.rest * logf(w.rest / w.own) : 0);
    return w;
}

// Kept tokens of a row in a slice.
typedef struct {
    int k, ids[DISTILL_MOST_KEPT]; // counted from the first word of the slice
    float log_probs[DISTILL_MOST_KEPT], y[DISTILL_MOST_KEPT];
} DistillOwn_;

// Finds the kept tokens of row n in a slice, and moves their y out of the row (distill_take_).
static void distill_own_(DistillOwn_* own, float* y, KeptTokens kept, int n, int first, int V) {
    const KeptTokens row = kept_tokens_from(kept, n);
    for (int i = 0; i < row.k; i++) {
        if (first <= row.ids[i] && row.ids[i] < first + V) {
            own->ids[own->k] = row.ids[i] - first;
            own->log_probs[own->k++] = row.log_probs[i];
        }
    }
    distill_take_(own->y, y, own->ids, own->k);
}

static DistillSlice distill_slice_logits_(const float* y, const float* z, int V, float lse, float over_t) {
    const float most = distill_max_(z, V);
    Vec difference = vec_all(0.0f);
    int v = 0;
    for (; v + LANES <= V; v += LANES) {
        const Vec x = vec_load(z + v);
        difference += vec_exp((x - most) * over_t) * (x - vec_load(y + v));
    }
    DistillSlice sums = {most, distill_sum_(z, V, most, over_t), vec_hsum(difference),
                         distill_sum_(y, V, lse, over_t), 0};
    for (; v < V; v++) {
        sums.difference += expf((z[v] - most) * over_t) * (z[v] - y[v]);
    }
    return sums;
}

static DistillSlice distill_slice_kept_(float* y, KeptTokens kept, int n, int first, int V, float lse,
                                        float over_t) {
    DistillOwn_ own = {0};
    distill_own_(&own, y, kept, n, first, V);
    DistillSlice sums = {0, 0, 0, distill_sum_(y, V, lse, over_t), distill_sum_(own.y, own.k, lse, over_t)};
    for (int i = 0; i < own.k; i++) {
        const float q = expf(own.log_probs[i]);
        sums.q += q;
        sums.difference += q * (own.log_probs[i] - (own.y[i] - lse) * over_t);
        y[own.ids[i]] = own.y[i];
    }
    return sums;
}

void distill_slice_cpu(const DistillSlices* s, int i, float* logits, DistillTeacher teacher, int first,
                       CrossEntropy of, Distill how) {
    const float over_t = 1 / how.temperature;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        float *y = logits + (size_t)n * of.Vp, lse = s->loss[n] + distill_hit_(s, n, of.N);
        DistillSlice* sums = &s->sums[(size_t)i * of.N + n];
        distill_cap_(y, of.V, of.softcap);
        if (s->target[n] == NO_TARGET) {
            memset(sums, 0, sizeof(*sums));
        } else if (teacher.logits) {
            float* z = teacher.logits + (size_t)n * teacher.Vp;
            distill_cap_(z, of.V, teacher.softcap);
            *sums = distill_slice_logits_(y, z, of.V, lse, over_t);
        } else {
            *sums = distill_slice_kept_(y, teacher.kept, n, first, of.V, lse, over_t);
        }
    }
}

void distill_combine_cpu(float* kl, const DistillSlices* s, DistillTeacher teacher, CrossEntropy of,
                         Distill how) {
#pragma omp parallel for schedule(static)
    for (int n = 0; n < of.N; n++) {
        kl[n] = s->target[n] == NO_TARGET ? 0 : distill_whole_(s, teacher, n, 1, of, how).kl;
    }
}

// Sets the gradients of a slice but for the target's part.
static void distill_slice_gradient_(float* y, const DistillWhole_* w, DistillTeacher teacher, int n,
                                    int first, int V) {
    DistillRow_ other = w->row;
    DistillOwn_ own = {0};
    if (teacher.logits) {
        distill_gradient_(y, teacher.logits + (size_t)n * teacher.Vp, w->row.of_pt, w->shift, w->row, V);
        return;
    }
    distill_own_(&own, y, teacher.kept, n, first, V);
    other.of_pt *= 1 - w->rest / w->own;
    distill_gradient_(y, NULL, 0, 0, other, V);
    distill_set_kept_(y, own.y, own.ids, own.log_probs, own.k, w->log_all, w->row);
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
        const DistillWhole_ w = distill_whole_(s, teacher, n, scale, of, how);
        distill_slice_gradient_(y, &w, teacher, n, first, of.V);
        memset(y + of.V, 0, (size_t)(of.Vp - of.V) * sizeof(float));
        if (0 <= hit && hit < of.V) {
            distill_end_(y, hit, w.hit, scale, of, how);
        }
    }
}

#endif // DISTILL_IMPLEMENTATION

#endif
