// test_source_order.c -- source_order.h: turns of sources, against a loop that deals one by one.
#include "dev/test/lib/test.h"
#define SOURCE_ORDER_IMPLEMENTATION

#include "llmc/base/rand.h"
#include "llmc/data/source_order.h"

enum { STRETCHES = 6, LENGTH = 3000 };

typedef struct {
    uint64_t first[STRETCHES + 1], weights[STRETCHES][SOURCES_MAX];
    int sources;
} Plan;

static Plan random_plan(Rand* rng) {
    Plan plan;
    memset(&plan, 0, sizeof(plan));
    plan.sources = 1 + (int)rand_below(rng, 8);
    for (int i = 0; i < STRETCHES; i++) {
        plan.first[i + 1] = plan.first[i] + 1 + rand_below(rng, LENGTH / STRETCHES);
        for (int s = 0; s < plan.sources; s++) {
            plan.weights[i][s] = rand_below(rng, 3) ? rand_below(rng, 40) : 0;
        }
        plan.weights[i][rand_below(rng, (uint32_t)plan.sources)]++;
    }
    plan.first[STRETCHES] = LENGTH;
    return plan;
}

static void open_plan(SourceOrder* order, const Plan* plan) {
    source_order_open(order, plan->sources);
    for (int i = 0; i < STRETCHES; i++) {
        uint64_t weights[SOURCES_MAX];
        memcpy(weights, plan->weights[i], sizeof(weights));
        source_order_reduce(weights, plan->sources);
        source_order_add(order, plan->first[i], weights);
    }
}

// Returns true if stretches a and b of a plan have the same shares: then b continues a.
static int are_same_shares(const Plan* plan, int a, int b) {
    uint64_t sum[2] = {0};
    int same = 1;
    for (int s = 0; s < plan->sources; s++) {
        sum[0] += plan->weights[a][s];
        sum[1] += plan->weights[b][s];
    }
    for (int s = 0; s < plan->sources; s++) {
        same &= plan->weights[a][s] * sum[1] == plan->weights[b][s] * sum[0];
    }
    return same;
}

// Returns the source of turn n of a stretch: of those that would not be a whole sequence ahead, the
// one that is late first. No order repeats here.
static int deal(const uint64_t* weights, const uint64_t* dealt, int sources, uint64_t n) {
    uint64_t sum = 0, soonest = UINT64_MAX;
    int next = -1;
    for (int s = 0; s < sources; s++) {
        sum += weights[s];
    }
    for (int s = 0; s < sources; s++) {
        const int may = weights[s] && dealt[s] * sum < (n + 1) * weights[s];
        const uint64_t late = may ? ((dealt[s] + 1) * sum + weights[s] - 1) / weights[s] : UINT64_MAX;
        if (late < soonest) {
            soonest = late;
            next = s;
        }
    }
    return next;
}

static void expect_share(const Plan* plan, int i, const uint64_t* dealt, uint64_t n) {
    double sum = 0;
    for (int s = 0; s < plan->sources; s++) {
        sum += (double)plan->weights[i][s];
    }
    for (int s = 0; s < plan->sources; s++) {
        const double wanted = (double)n * (double)plan->weights[i][s] / sum;
        EXPECT(fabs((double)dealt[s] - wanted) < 1 - 1e-9, "source %d: %d of %g", s, (int)dealt[s], wanted);
    }
}

// Any sequence that is found is the one that a loop deals, and shares are within one sequence.
TEST(source_order) {
    Rand rng = rand_open(3, 1);
    for (int trial = 0; trial < 60; trial++) {
        const Plan plan = random_plan(&rng);
        uint64_t given[SOURCES_MAX] = {0}, dealt[SOURCES_MAX] = {0}, counted[SOURCES_MAX], start = 0;
        SourceOrder order;
        open_plan(&order, &plan);
        for (int i = 0; i < STRETCHES; i++) {
            if (i == 0 || !are_same_shares(&plan, i - 1, i)) {
                memset(dealt, 0, sizeof(dealt));
                start = plan.first[i];
            }
            for (uint64_t p = plan.first[i]; p < plan.first[i + 1]; p++) {
                uint64_t j;
                const int s = deal(plan.weights[i], dealt, plan.sources, p - start);
                EXPECT(source_order_find(&order, p, &j) == s && j == given[s], "trial %d, p %d", trial,
                       (int)p);
                source_order_given(&order, p, counted);
                EXPECT(memcmp(counted, given, sizeof(given[0]) * (size_t)plan.sources) == 0, "given");
                EXPECT(source_order_reach(&order, s, given[s]) == p, "reach");
                given[s]++;
                dealt[s]++;
                expect_share(&plan, i, dealt, p + 1 - start);
            }
        }
        source_order_close(&order);
    }
}

// An order may start late, after rows that were given before.
TEST(source_order_start) {
    const uint64_t given[] = {100, 7}, weights[] = {2, 1}, none[] = {0, 1};
    SourceOrder order;
    uint64_t j;
    source_order_open(&order, 2);
    source_order_add(&order, 50, weights);
    source_order_start(&order, given);
    source_order_add(&order, 80, weights); // nothing changes
    source_order_add(&order, 110, none);
    EXPECT(order.count == 2 && order.stretch[1].base[0] == 140 && order.stretch[1].base[1] == 27, "%d, %d",
           (int)order.stretch[1].base[0], (int)order.stretch[1].base[1]);
    EXPECT(source_order_find(&order, 50, &j) == 0 && j == 100, "%d", (int)j);
    EXPECT(source_order_find(&order, 115, &j) == 1 && j == 32, "%d", (int)j);
    EXPECT(source_order_reach(&order, 0, 140) == UINT64_MAX, "it gives no more");
    EXPECT(source_order_reach(&order, 1, 7) > 49 && source_order_reach(&order, 1, 40) == 123, "the other");
    source_order_close(&order);
}
