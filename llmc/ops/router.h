/*
router.h -- which experts each token takes, and with which weight: the contract, and the CPU
version.

    logits l (N, E) = inp routerw^T, always in fp32; p = softmax of l, s = sigmoid of l

    ROUTER_CHOSEN    the `used` largest l; weights w: softmax of l over these
    ROUTER_SOFTMAX   the `used` largest l; w = p, not divided again
    ROUTER_SIGMOID   the `used` largest s + bias; w = factor s / S, with S the sum of s over these

Of equal scores the lower expert comes first, so the choice is the same on every platform. With
`groups` of consecutive experts, a token takes experts of only `groups_used` groups: those in which
the two largest s + bias have the largest sum; of equal sums the lower group's.

The rows of the experts' matrices are sorted by expert, and by token within an expert. Each expert's
rows are filled up to a multiple of ROUTER_TILE; such padding has the place -1 and the scale 0.

    chosen    (N, used)   experts of a token, the best one first
    rows      (N, used)   the row of each of them
    order     (M)         place in `chosen` that a row comes from: token * used + slot
    first     (E + 1)     first row of each expert; the last one is the end of all rows
    scale     (M)         w of a row

The forward pass sets these five from logits. The backward pass sets dlogits (N, E) from dscale (M),
the gradient dw of scale:

    ROUTER_CHOSEN    dl = w (dw - sum w dw)                   on the chosen, else 0
    ROUTER_SOFTMAX   dl = p (dw - sum w dw)                   dw is 0 for the others
    ROUTER_SIGMOID   dl = (1 - s) w (dw - sum w dw / factor)  on the chosen, else 0

and adds the gradients of two losses, which the loss that is printed does not contain. Both are
means over all tokens but padding (counted.h). The first one is a sum within each document, so that
neither micro-batches nor the neighbors in a row change it: with q = p, or of ROUTER_SIGMOID
q = s / sum of s,

    balance E sum_e f_e (mean of q_e)     f_e = share of the document's tokens that take e, constant
    z_loss lse^2                          lse = log sum_e exp(l_e)

A padding token also takes experts, but its dlogits are 0 and statistics leave it out.

The bias has no gradient. It can balance experts without a loss: after each update
bias += rate sign(mean load - load). The load of an expert is how many tokens of the update take it.

Softmax over the chosen, and dropless experts: Jiang et al., "Mixtral of experts", 2024; balance:
Fedus et al., "Switch transformers", 2021; z-loss: Zoph et al., "ST-MoE", 2022; sigmoid:
DeepSeek-AI, "DeepSeek-V3", 2024.
*/
#ifndef LLMC_ROUTER_H
#define LLMC_ROUTER_H

#include <stddef.h>

#include "llmc/ops/counted.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { ROUTER_NONE, ROUTER_CHOSEN, ROUTER_SOFTMAX, ROUTER_SIGMOID } RouterKind;

enum { ROUTER_TILE = 32, ROUTER_MAX_USED = 16, ROUTER_MAX_EXPERTS = 1024, ROUTER_MAX_GROUPS = 32 };

// keeps w finite if all s are 0
#define ROUTER_TINY 1e-20f

// Returns the most rows that N tokens have in all experts, a multiple of ROUTER_TILE.
static inline size_t router_rows(size_t N, int E, int used) {
    const size_t rows = N * (size_t)used, padding = (size_t)E * (ROUTER_TILE - 1);
    return (rows + padding) / ROUTER_TILE * ROUTER_TILE;
}

// A router of B sequences of T tokens, with what its forward pass sets.
typedef struct {
    RouterKind kind;
    int B, T, E, used;
    int groups, groups_used; // ROUTER_SIGMOID; groups divide E evenly; 0 or 1: all are one group
    float factor;            // ROUTER_SIGMOID
    const float* bias;       // (E), ROUTER_SIGMOID; or NULL
    float* logits;           // (N, E)
    int *chosen, *rows, *order, *first;
    float* scale;
    Counted counted; // which of its tokens are no padding
} Router;

void router_forward_cpu(const Router* router);

// Weights of the two losses; dloss: of a target (counted.h). The balance needs whole sequences.
typedef struct {
    float balance, z_loss, dloss;
} RouterLosses;

void router_backward_cpu(float* dlogits, const float* dscale, const Router* router, RouterLosses losses);

// Returns the rows of expert e without padding: they follow first[e].
static inline int router_count(const Router* router, int e) {
    int end = router->first[e + 1];
    while (end > router->first[e] && router->order[end - 1] < 0) {
        end--;
    }
    return end - router->first[e];
}

// Statistics of a layer, summed over all tokens but padding: for each expert the tokens that take
// it; the entropy of q in nats. Return the number of statistics, and the statistics of layer l
// (NULL if they are not counted).
static inline int router_statistics(int E) { return E > 0 ? E + 1 : 0; }
static inline double* router_statistics_of(double* all, int l, int E) {
    return all ? all + (size_t)l * (size_t)router_statistics(E) : NULL;
}

// Load of the busiest expert of all layers, 1 if all are even; mean entropy of q in nats.
typedef struct {
    double load, entropy;
} RouterSummary;

// Sums up the statistics of L layers; those without tokens do not count.
static inline RouterSummary router_summary(const double* statistics, int L, int E, int used) {
    RouterSummary sum = {0, 0};
    double all = 0;
    for (int l = 0; l < L; l++) {
        const double* of = statistics + (size_t)l * (size_t)router_statistics(E);
        double taken = 0, most = 0;
        for (int e = 0; e < E; e++) {
            taken += of[e];
            most = of[e] > most ? of[e] : most;
        }
        const double load = taken > 0 ? most * E / taken : 0;
        sum.load = load > sum.load ? load : sum.load;
        sum.entropy += of[E];
        all += taken / used;
    }
    sum.entropy = all > 0 ? sum.entropy / all : 0;
    return sum;
}

// Moves the bias (E) after an update in which `taken` (E) tokens took each expert, whole numbers.
static inline void router_move_bias(float* bias, const double* taken, int E, float rate) {
    double all = 0;
    for (int e = 0; e < E; e++) {
        all += taken[e];
    }
    for (int e = 0; e < E; e++) {
        const double load = taken[e] * E;
        bias[e] += load < all ? rate : load > all ? -rate : 0;
    }
}

// Adds the statistics of a pass; bitwise independent of the thread count.
void router_statistics_add_cpu(double* statistics, const Router* router);

#ifdef __cplusplus
}
#endif

#ifdef ROUTER_IMPLEMENTATION

#include <assert.h>
#include <math.h>
#include <string.h>

enum { ROUTER_BLOCK_ = 64 }; // tokens that a thread does one after the other

static int router_tokens_(const Router* r) { return r->B * r->T; }

static int router_is_token_(const Router* r, int n) {
    return counted_is_token(&r->counted, n / r->T, n % r->T, r->T);
}

static float router_sigmoid_(float x) { return 1.0f / (1.0f + expf(-x)); }

static const float* router_logits_(const Router* r, int n) { return r->logits + (size_t)n * r->E; }

// Sets p (E), the softmax of l; returns lse.
static float router_softmax_(float* p, const float* l, int E) {
    float max = l[0], sum = 0;
    for (int e = 1; e < E; e++) {
        max = l[e] > max ? l[e] : max;
    }
    for (int e = 0; e < E; e++) {
        p[e] = expf(l[e] - max);
        sum += p[e];
    }
    for (int e = 0; e < E; e++) {
        p[e] /= sum;
    }
    return max + logf(sum);
}

// Sets q (E) of token n.
static void router_distribution_(float* q, const Router* r, int n) {
    const float* l = router_logits_(r, n);
    float sum = ROUTER_TINY;
    if (r->kind != ROUTER_SIGMOID) {
        router_softmax_(q, l, r->E);
        return;
    }
    for (int e = 0; e < r->E; e++) {
        q[e] = router_sigmoid_(l[e]);
        sum += q[e];
    }
    for (int e = 0; e < r->E; e++) {
        q[e] /= sum;
    }
}

// ---- forward ----

static float router_score_(const Router* r, const float* l, int e) {
    return r->kind == ROUTER_SIGMOID ? router_sigmoid_(l[e]) + (r->bias ? r->bias[e] : 0.0f) : l[e];
}

// Returns the sum of the two largest of the `count` scores of a group.
static float router_group_score_(const float* score, int count) {
    float first = -INFINITY, second = -INFINITY;
    for (int e = 0; e < count; e++) {
        second = score[e] > first ? first : score[e] > second ? score[e] : second;
        first = score[e] > first ? score[e] : first;
    }
    return first + second;
}

// Marks the experts of groups that a token does not use as taken.
static void router_choose_groups_(const Router* r, const float* score, unsigned char* is_taken) {
    const int count = r->groups > 1 ? r->E / r->groups : 0;
    float sums[ROUTER_MAX_GROUPS];
    for (int g = 0; g < r->groups && count > 0; g++) {
        sums[g] = router_group_score_(score + g * count, count);
        memset(is_taken + g * count, 1, (size_t)count);
    }
    for (int k = 0; k < r->groups_used && count > 0; k++) {
        int best = -1;
        for (int g = 0; g < r->groups; g++) {
            best = is_taken[g * count] && (best < 0 || sums[g] > sums[best]) ? g : best;
        }
        memset(is_taken + best * count, 0, (size_t)count);
    }
}

// Chooses the experts of token n. NaN is never the larger one, but may be taken.
static void router_choose_(const Router* r, int n) {
    const float* l = router_logits_(r, n);
    float score[ROUTER_MAX_EXPERTS];
    unsigned char is_taken[ROUTER_MAX_EXPERTS];
    for (int e = 0; e < r->E; e++) {
        score[e] = router_score_(r, l, e);
        is_taken[e] = 0;
    }
    router_choose_groups_(r, score, is_taken);
    for (int k = 0; k < r->used; k++) {
        int best = -1;
        for (int e = 0; e < r->E; e++) {
            best = !is_taken[e] && (best < 0 || score[e] > score[best]) ? e : best;
        }
        is_taken[best] = 1;
        r->chosen[(size_t)n * r->used + k] = best;
    }
}

// Sets `first`, and makes all rows padding.
static void router_clear_rows_(const Router* r) {
    int count[ROUTER_MAX_EXPERTS] = {0};
    for (int i = 0; i < router_tokens_(r) * r->used; i++) {
        count[r->chosen[i]]++;
    }
    r->first[0] = 0;
    for (int e = 0; e < r->E; e++) {
        r->first[e + 1] = r->first[e] + (count[e] + ROUTER_TILE - 1) / ROUTER_TILE * ROUTER_TILE;
    }
    for (int m = 0; m < r->first[r->E]; m++) {
        r->order[m] = -1;
        r->scale[m] = 0;
    }
}

// Gives each place in `chosen` a row.
static void router_sort_(const Router* r) {
    int next[ROUTER_MAX_EXPERTS];
    router_clear_rows_(r);
    memcpy(next, r->first, (size_t)r->E * sizeof(int));
    for (int i = 0; i < router_tokens_(r) * r->used; i++) {
        r->rows[i] = next[r->chosen[i]]++;
        r->order[r->rows[i]] = i;
    }
}

// Sets the weights of token n.
static void router_weigh_(const Router* r, int n) {
    const float* l = router_logits_(r, n);
    const int* chosen = r->chosen + (size_t)n * r->used;
    float w[ROUTER_MAX_USED], p[ROUTER_MAX_EXPERTS], sum = ROUTER_TINY;
    for (int k = 0; k < r->used; k++) {
        w[k] = l[chosen[k]];
    }
    if (r->kind == ROUTER_CHOSEN) {
        router_softmax_(w, w, r->used);
    } else if (r->kind == ROUTER_SOFTMAX) {
        router_softmax_(p, l, r->E);
    }
    for (int k = 0; k < r->used && r->kind == ROUTER_SIGMOID; k++) {
        w[k] = router_sigmoid_(w[k]);
        sum += w[k];
    }
    for (int k = 0; k < r->used; k++) {
        const int row = r->rows[(size_t)n * r->used + k];
        r->scale[row] = r->kind == ROUTER_CHOSEN    ? w[k]
                        : r->kind == ROUTER_SOFTMAX ? p[chosen[k]]
                                                    : r->factor * w[k] / sum;
    }
}

void router_forward_cpu(const Router* router) {
    const int N = router_tokens_(router);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        router_choose_(router, n);
    }
    router_sort_(router);
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        router_weigh_(router, n);
    }
}

// ---- backward ----

// Sets dl (E) of token n from the gradients of its weights.
static void router_weigh_backward_(float* dl, const float* dscale, const Router* r, int n) {
    const float* l = router_logits_(r, n);
    const int *chosen = r->chosen + (size_t)n * r->used, *rows = r->rows + (size_t)n * r->used;
    float sum = 0;
    for (int k = 0; k < r->used; k++) {
        sum += r->scale[rows[k]] * dscale[rows[k]];
    }
    if (r->kind == ROUTER_SOFTMAX) {
        router_softmax_(dl, l, r->E);
    }
    for (int e = 0; e < r->E; e++) {
        dl[e] = r->kind == ROUTER_SOFTMAX ? -dl[e] * sum : 0.0f;
    }
    for (int k = 0; k < r->used; k++) {
        const int e = chosen[k];
        const float w = r->scale[rows[k]], dw = dscale[rows[k]];
        dl[e] = r->kind == ROUTER_CHOSEN    ? w * (dw - sum)
                : r->kind == ROUTER_SOFTMAX ? w * (dw - sum)
                                            : (1.0f - router_sigmoid_(l[e])) * w * (dw - sum / r->factor);
    }
}

// Adds the gradient of the balance to dl (E) of token n, f (E); dloss: of a token.
static void router_balance_backward_(float* dl, const float* f, const Router* r, int n, RouterLosses of) {
    const float *l = router_logits_(r, n), scale = of.dloss * of.balance * r->E;
    float q[ROUTER_MAX_EXPERTS], mean = 0;
    router_distribution_(q, r, n);
    for (int e = 0; e < r->E; e++) {
        mean += q[e] * f[e];
    }
    for (int e = 0; e < r->E; e++) {
        const float slope = r->kind == ROUTER_SIGMOID ? q[e] * (1.0f - router_sigmoid_(l[e])) : q[e];
        dl[e] += scale * slope * (f[e] - mean);
    }
}

// Adds the gradient of the z-loss to dl (E) of token n.
static void router_z_backward_(float* dl, const Router* r, int n, RouterLosses of) {
    float p[ROUTER_MAX_EXPERTS];
    const float lse = router_softmax_(p, router_logits_(r, n), r->E);
    for (int e = 0; e < r->E; e++) {
        dl[e] += of.dloss * 2.0f * of.z_loss * lse * p[e];
    }
}

// Sets f (E) of a document of sequence b.
static void router_load_(float* f, const Router* r, int b, CountedSpan document) {
    const int* chosen = r->chosen + ((size_t)b * r->T + document.begin) * r->used;
    const int tokens = document.end - document.begin;
    for (int e = 0; e < r->E; e++) {
        f[e] = 0;
    }
    for (int i = 0; i < tokens * r->used; i++) {
        f[chosen[i]] += 1.0f / (float)tokens;
    }
}

// Sets dlogits of up to ROUTER_BLOCK_ tokens of sequence b, from token `begin` on. A document that
// spans several blocks is counted by each of them.
static void router_block_backward_(float* dlogits, const float* dscale, const Router* r, int b, int begin,
                                   RouterLosses of) {
    const int end = begin + ROUTER_BLOCK_ < r->T ? begin + ROUTER_BLOCK_ : r->T;
    CountedSpan document = {0, 0}; // of f
    float f[ROUTER_MAX_EXPERTS];
    for (int t = begin; t < end; t++) {
        const int n = b * r->T + t;
        float* dl = dlogits + (size_t)n * r->E;
        if (!counted_is_token(&r->counted, b, t, r->T)) {
            memset(dl, 0, (size_t)r->E * sizeof(float));
            continue;
        }
        if (of.balance > 0 && t >= document.end) {
            document = counted_document(&r->counted, b, t, r->T);
            router_load_(f, r, b, document);
        }
        router_weigh_backward_(dl, dscale, r, n);
        if (of.balance > 0) {
            router_balance_backward_(dl, f, r, n, of);
        }
        if (of.z_loss > 0) {
            router_z_backward_(dl, r, n, of);
        }
    }
}

void router_backward_cpu(float* dlogits, const float* dscale, const Router* router, RouterLosses losses) {
    const int blocks = (router->T + ROUTER_BLOCK_ - 1) / ROUTER_BLOCK_;
    assert(losses.balance == 0 || router->counted.chunks.last == 0);
    losses.dloss = counted_token_weight(&router->counted, losses.dloss);
#pragma omp parallel for schedule(static)
    for (int i = 0; i < router->B * blocks; i++) {
        router_block_backward_(dlogits, dscale, router, i / blocks, i % blocks * ROUTER_BLOCK_, losses);
    }
}

// ---- statistics ----

// Returns the sum of the entropies of tokens [begin, end).
static double router_entropy_(const Router* r, int begin, int end) {
    double sum = 0;
    for (int n = begin; n < end; n++) {
        float q[ROUTER_MAX_EXPERTS];
        router_distribution_(q, r, n);
        for (int e = 0; e < r->E && router_is_token_(r, n); e++) {
            sum -= q[e] > 0 ? q[e] * logf(q[e]) : 0.0f;
        }
    }
    return sum;
}

void router_statistics_add_cpu(double* statistics, const Router* router) {
    enum { PARTS = 64 }; // of the tokens, whose sums are added in order
    const int N = router_tokens_(router);
    double parts[PARTS];
#pragma omp parallel for schedule(static)
    for (int i = 0; i < PARTS; i++) {
        parts[i] =
            router_entropy_(router, (int)((long long)N * i / PARTS), (int)((long long)N * (i + 1) / PARTS));
    }
    for (int i = 0; i < PARTS; i++) {
        statistics[router->E] += parts[i];
    }
    for (int i = 0; i < N * router->used; i++) {
        statistics[router->chosen[i]] += router_is_token_(router, i / router->used);
    }
}

#endif // ROUTER_IMPLEMENTATION

#endif
