/*
source_order.h -- the order in which several sources give the sequences of a run.

The order consists of stretches. In each, every source has a constant share of the sequences.
Sequence p is row j of source s, where j counts all that s has given so far, across stretches;
(s, j) is found by bisection among the stretches, and then in O(1). After any n sequences of a
stretch, a source of weight w_s has given n w_s of them, to within less than one.

The order of a stretch repeats after `cycle` sequences, the smallest number of which every source
gives a whole number. Within a cycle, the next turn goes to the source that must have one soonest,
among those that it would not put more than one ahead: that always works (R. Tijdeman, "The chairman
assignment problem", Discrete Mathematics 32, 1980).
*/
#ifndef LLMC_SOURCE_ORDER_H
#define LLMC_SOURCE_ORDER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { SOURCES_MAX = 64 };
#define SOURCES_CYCLE_MAX ((uint64_t)1 << 20)

typedef struct {
    uint64_t first;              // first sequence
    uint64_t cycle;              // sequences until the order repeats
    uint64_t share[SOURCES_MAX]; // sequences of each source in a cycle
    uint64_t base[SOURCES_MAX];  // sequences that each source has given before `first`
    uint8_t* turn;               // (cycle) source of each sequence
    uint32_t* nth;               // (cycle) how many of that source come before it in the cycle
} Stretch;

typedef struct {
    int sources;
    Stretch* stretch; // (count) by `first`
    size_t count, room;
} SourceOrder;

// Reduces weights to lowest terms, in place. Returns their sum, the length of the cycle.
uint64_t source_order_reduce(uint64_t* weights, int sources);

// Opens an order without stretches.
void source_order_open(SourceOrder* order, int sources);

// Adds a stretch from sequence `first` on, with weights in lowest terms, whose sum is at most
// SOURCES_CYCLE_MAX. If the last stretch has the same weights, it continues instead.
void source_order_add(SourceOrder* order, uint64_t first, const uint64_t* weights);

// Sets the numbers of sequences that the sources have given before the only stretch.
void source_order_start(SourceOrder* order, const uint64_t* given);

void source_order_close(SourceOrder* order);

// Returns the stretch of sequence p; of sequences before the first stretch, that one.
const Stretch* source_order_at(const SourceOrder* order, uint64_t p);

// Returns the source of sequence p, and sets *j to how many of that source come before it.
int source_order_find(const SourceOrder* order, uint64_t p, uint64_t* j);

// Counts the sequences that each source has given before sequence p, which is not before the first
// stretch.
void source_order_given(const SourceOrder* order, uint64_t p, uint64_t given[SOURCES_MAX]);

// Returns the sequence in which source s gives its row `rows`; UINT64_MAX: none. Its earlier rows
// may have been given before the first stretch.
uint64_t source_order_reach(const SourceOrder* order, int s, uint64_t rows);

#ifdef __cplusplus
}
#endif

#ifdef SOURCE_ORDER_IMPLEMENTATION

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"

uint64_t source_order_reduce(uint64_t* weights, int sources) {
    uint64_t divisor = 0, sum = 0;
    for (int s = 0; s < sources; s++) {
        for (uint64_t rest = weights[s]; rest;) { // Euclid
            const uint64_t next = divisor % rest;
            divisor = rest;
            rest = next;
        }
    }
    for (int s = 0; s < sources; s++) {
        weights[s] /= divisor;
        sum += weights[s];
    }
    return sum;
}

// Assigns every sequence of the cycle to a source.
static void source_order_take_turns_(Stretch* stretch, int sources) {
    const uint64_t cycle = stretch->cycle;
    uint64_t given[SOURCES_MAX] = {0};
    stretch->turn = (uint8_t*)check_alloc(cycle, sizeof(uint8_t), "order of the sources");
    stretch->nth = (uint32_t*)check_alloc(cycle, sizeof(uint32_t), "order of the sources");
    for (uint64_t n = 0; n < cycle; n++) {
        int soonest = -1;
        uint64_t soonest_end = 0;
        for (int s = 0; s < sources; s++) {
            const uint64_t share = stretch->share[s];
            if (share == 0 || given[s] * cycle >= (n + 1) * share) {
                continue;
            }
            const uint64_t end =
                ((given[s] + 1) * cycle + share - 1) / share; // its next turn must come before this
            if (soonest < 0 || end < soonest_end) {
                soonest = s;
                soonest_end = end;
            }
        }
        assert(soonest >= 0 && soonest_end > n);
        stretch->turn[n] = (uint8_t)soonest;
        stretch->nth[n] = (uint32_t)given[soonest]++;
    }
}

void source_order_open(SourceOrder* order, int sources) {
    memset(order, 0, sizeof(*order));
    order->sources = sources;
}

void source_order_add(SourceOrder* order, uint64_t first, const uint64_t* weights) {
    const size_t bytes = (size_t)order->sources * sizeof(*weights);
    const Stretch* last = order->count ? &order->stretch[order->count - 1] : NULL;
    Stretch next;
    if (last && memcmp(last->share, weights, bytes) == 0) {
        return;
    }
    assert(!last || first > last->first);
    memset(&next, 0, sizeof(next));
    next.first = first;
    memcpy(next.share, weights, bytes);
    for (int s = 0; s < order->sources; s++) {
        next.cycle += weights[s];
    }
    assert(next.cycle > 0 && next.cycle <= SOURCES_CYCLE_MAX);
    if (last) {
        source_order_given(order, first, next.base);
    }
    source_order_take_turns_(&next, order->sources);
    order->stretch = (Stretch*)check_reserve(order->stretch, &order->room, order->count + 1, sizeof(Stretch),
                                             "order of the sources");
    order->stretch[order->count++] = next;
}

void source_order_start(SourceOrder* order, const uint64_t* given) {
    assert(order->count == 1);
    memcpy(order->stretch[0].base, given, (size_t)order->sources * sizeof(*given));
}

void source_order_close(SourceOrder* order) {
    for (size_t i = 0; i < order->count; i++) {
        free(order->stretch[i].nth);
        free(order->stretch[i].turn);
    }
    free(order->stretch);
    memset(order, 0, sizeof(*order));
}

const Stretch* source_order_at(const SourceOrder* order, uint64_t p) {
    size_t low = 0, high = order->count; // the stretch is in [low, high)
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (order->stretch[middle].first <= p) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return &order->stretch[low];
}

int source_order_find(const SourceOrder* order, uint64_t p, uint64_t* j) {
    const Stretch* stretch = source_order_at(order, p);
    const uint64_t n = p - stretch->first, at = n % stretch->cycle;
    const int s = stretch->turn[at];
    *j = stretch->base[s] + n / stretch->cycle * stretch->share[s] + stretch->nth[at];
    return s;
}

void source_order_given(const SourceOrder* order, uint64_t p, uint64_t given[SOURCES_MAX]) {
    const Stretch* stretch = source_order_at(order, p);
    const uint64_t n = p - stretch->first;
    assert(p >= stretch->first);
    for (int s = 0; s < order->sources; s++) {
        given[s] = stretch->base[s] + n / stretch->cycle * stretch->share[s];
    }
    for (uint64_t at = 0; at < n % stretch->cycle; at++) {
        given[stretch->turn[at]]++;
    }
}

uint64_t source_order_reach(const SourceOrder* order, int s, uint64_t rows) {
    for (size_t i = 0; i < order->count; i++) {
        const Stretch* stretch = &order->stretch[i];
        const uint64_t end = i + 1 < order->count ? order->stretch[i + 1].first : UINT64_MAX,
                       share = stretch->share[s],
                       rest = rows > stretch->base[s] ? rows - stretch->base[s] : 0;
        uint64_t at = 0;
        if (share == 0) {
            continue;
        }
        while (stretch->turn[at] != s || stretch->nth[at] != rest % share) {
            at++;
        }
        const uint64_t p = stretch->first + rest / share * stretch->cycle + at;
        if (p < end) {
            return p;
        }
    }
    return UINT64_MAX;
}

#endif // SOURCE_ORDER_IMPLEMENTATION

#endif
