/*
sampler.h -- draws the next token from logits: temperature, then top-k, then top-p (nucleus).

    weight_i = exp((logit_i - max) / temperature)      never above 1, so nothing overflows
    top-k    keeps the k largest logits
    top-p    keeps, of those, the fewest largest whose weight is at least p of their total
             (Holtzman et al., arXiv:1904.09751)

    logits   (V)   -inf forbids a token; NaN and +inf are errors

Temperature 0 takes the largest logit. Among equal logits the lower id comes first. A token of
weight 0 is never drawn. The same logits, coin and libm give the same token.
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Working memory for vocabularies up to V.
typedef struct {
    int V;
    float* weights; // (V)
    int32_t* ids;   // (V)
} Sampler;

void sampler_open(Sampler* sampler, int V);

void sampler_close(Sampler* sampler);

// True if a token can be drawn: the logits of a diverged run have none.
int sampler_can_draw(const float* logits, int V);

// Returns the next token, for a coin from [0, 1]. top_k off: 0 or at least V; top_p off: 0 or 1.
int sampler_next(const float* logits, int V, float temperature, int top_k, float top_p, float coin,
                 Sampler* sampler);

#ifdef __cplusplus
}
#endif

#ifdef SAMPLER_IMPLEMENTATION

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#include "llmc/base/check.h"

void sampler_open(Sampler* sampler, int V) {
    sampler->V = V;
    sampler->weights = (float*)check_alloc((size_t)V, sizeof(float), "sampler weights");
    sampler->ids = (int32_t*)check_alloc((size_t)V, sizeof(int32_t), "sampler ids");
}

void sampler_close(Sampler* sampler) {
    free(sampler->weights);
    free(sampler->ids);
    sampler->weights = NULL;
    sampler->ids = NULL;
}

// True if token a is preferred to token b.
static int sampler_before_(const float* logits, int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

int sampler_can_draw(const float* logits, int V) {
    int finite = 0;
    for (int i = 0; i < V; i++) {
        if (!(logits[i] < INFINITY)) {
            return 0;
        }
        finite += logits[i] > -INFINITY;
    }
    return finite > 0;
}

static int sampler_argmax_(const float* logits, int V) {
    int best = 0;
    for (int i = 0; i < V; i++) {
        CHECK(logits[i] < INFINITY, "sampler: the logit of token %d is %g", i, (double)logits[i]);
        best = logits[i] > logits[best] ? i : best;
    }
    CHECK(logits[best] > -INFINITY, "sampler: all %d logits are -inf, nothing can be drawn", V);
    return best;
}

// Restores the heap of n ids (the most preferred on top) below position i.
static void sampler_sift_(int32_t* heap, int n, int i, const float* logits) {
    for (int child = 2 * i + 1; child < n; child = 2 * i + 1) {
        if (child + 1 < n && sampler_before_(logits, heap[child + 1], heap[child])) {
            child++;
        }
        if (!sampler_before_(logits, heap[child], heap[i])) {
            return;
        }
        const int32_t parent = heap[i];
        heap[i] = heap[child];
        heap[child] = parent;
        i = child;
    }
}

// Moves the most preferred tokens to the end of ids, the very first to ids[V-1]: at most `max` of
// them, or fewer that have the weight `enough`. Sets *mass to their weight and returns their number
// n. O(V + n log V).
static int sampler_select_(Sampler* sampler, const float* logits, int V, int max, double enough,
                           double* mass) {
    int32_t* heap = sampler->ids;
    for (int i = V / 2 - 1; i >= 0; i--) {
        sampler_sift_(heap, V, i, logits);
    }
    int n = 0;
    for (*mass = 0; n < max && *mass < enough; n++) {
        const int left = V - 1 - n;
        const int32_t first = heap[0];
        heap[0] = heap[left];
        heap[left] = first;
        sampler_sift_(heap, left, 0, logits);
        *mass += sampler->weights[first];
    }
    return n;
}

// Returns the token of ids (n) at which the running sum of the weights exceeds coin * mass. If
// rounding leaves the sum short of that, returns the last one of any weight.
static int sampler_draw_(const float* weights, const int32_t* ids, int n, double mass, float coin) {
    const double target = coin * mass;
    double sum = 0;
    int token = -1;
    for (int i = 0; i < n && (token < 0 || sum <= target); i++) {
        if (weights[ids[i]] > 0) {
            token = ids[i];
            sum += weights[token];
        }
    }
    return token;
}

int sampler_next(const float* logits, int V, float temperature, int top_k, float top_p, float coin,
                 Sampler* sampler) {
    assert(V >= 1 && V <= sampler->V && coin >= 0 && coin <= 1);
    CHECK(temperature >= 0 && temperature < INFINITY, "sampler: temperature is %g, wanted 0 or more",
          (double)temperature);
    const int best = sampler_argmax_(logits, V);
    if (temperature == 0) {
        return best;
    }
    double mass = 0;
    for (int i = 0; i < V; i++) {
        sampler->weights[i] = expf((logits[i] - logits[best]) / temperature);
        sampler->ids[i] = i;
        mass += sampler->weights[i];
    }
    const int has_top_k = top_k > 0 && top_k < V;
    const int has_top_p = top_p > 0 && top_p < 1;
    int kept = V; // tokens kept at the end of ids
    if (has_top_k) {
        kept = sampler_select_(sampler, logits, V, top_k, INFINITY, &mass);
    }
    if (has_top_p) { // again from the top: p is a share of what top-k has left
        kept = sampler_select_(sampler, logits, V, kept, top_p * mass, &mass);
    }
    return sampler_draw_(sampler->weights, sampler->ids + V - kept, kept, mass, coin);
}

#endif // SAMPLER_IMPLEMENTATION

#endif
