// The map agrees with the arithmetic of zero.h and optimizer.h about every place.
#include "dev/test/lib/map_test.h"
#include "dev/test/lib/test.h"
#include "llmc/model/map.h"
#include "llmc/optim/optimizer.h"
#include "llmc/parallel/zero.h"

static ZeroPlan plan_of(const MapOf* of, int rank) {
    const ModelConfig cfg = map_part(of, rank);
    const Freeze own = freeze_of_part(&of->freeze, cfg);
    ZeroPlan plan = zero_plan_two_levels(cfg, of->stage, rank / of->tensor % of->data, of->data, of->replica);
    plan.experts = of->experts;
    if (of->stage < 3) {
        zero_plan_freeze(&plan, cfg, own.rows, freeze_first_copy(&own, cfg));
    }
    if (of->pipeline > 1 && !freeze_has_classifier(&of->freeze, of->whole)) {
        zero_plan_apart(&plan, cfg);
    }
    plan.shares_buffer |= of->ring_gradients > 0;
    return plan;
}

static Optimizer random_optimizer(Rand* random, const MapOf* of) {
    static const OptimizerName by_element[] = {OPTIMIZER_ADAMW, OPTIMIZER_ADAMW8BIT, OPTIMIZER_LION,
                                               OPTIMIZER_SGD};
    const int has_optional = below(random, 2), any = below(random, OPTIMIZER_SGD + 1);
    // tensors of blocks that lie outside of them keep state of other sizes
    const OptimizerName name = of->experts > 1 || of->tensor > 1 ? by_element[any % 4] : (OptimizerName)any;
    Optimizer optimizer = optimizer_of(name, has_optional, MASTER_NONE);
    optimizer.frozen = of->freeze.rows;
    optimizer.soap_max_side = below(random, 2) ? INT_MAX : 60;
    optimizer.average.is_kept = below(random, 2);
    return optimizer;
}

static void check_sizes(const Map* m, const ZeroPlan* plan, const OptimizerState* state) {
    const size_t* elements = m->totals.elements;
    const int in_place = plan->size == 1 && plan->stage < 2;
    EXPECT(elements[MAP_OWNED] == zero_count(plan, ZERO_OWNED), "owned %zu", elements[MAP_OWNED]);
    EXPECT(elements[MAP_SUMS] == zero_count(plan, ZERO_SLICES), "sums %zu", elements[MAP_SUMS]);
    EXPECT(in_place || elements[MAP_REDUCED] == zero_count(plan, ZERO_SHARDS), "reduced %zu",
           elements[MAP_REDUCED]);
    EXPECT(elements[MAP_GRADIENTS] == zero_grads_elements(plan, m->of.ring_gradients),
           "gradients %zu and %zu", elements[MAP_GRADIENTS], zero_grads_elements(plan, m->of.ring_gradients));
    EXPECT(elements[MAP_PARAMETERS] == zero_params_elements(plan, m->of.ring_parameters), "parameters %zu",
           elements[MAP_PARAMETERS]);
    EXPECT(m->totals.largest_gradient == zero_largest_gradient(plan), "largest %zu",
           m->totals.largest_gradient);
    for (int slot = 0; slot < MAP_SLOTS; slot++) {
        EXPECT(m->totals.slots[slot] * state->slots[slot].element_bytes == state->slots[slot].bytes,
               "%s: %zu elements, %zu bytes", state->slots[slot].label, m->totals.slots[slot],
               state->slots[slot].bytes);
    }
}

// Returns the first shard of a tensor of a layer that this rank owns.
static const Shard* first_owned(const Map* m, int tensor, int layer) {
    const Shard* s = map_find(m, tensor, layer);
    while (s && !map_has(m, s, MAP_OWNED)) {
        s = s + 1 < m->shards + m->num_shards && s[1].tensor == tensor && s[1].layer == layer ? s + 1 : NULL;
    }
    return s;
}

static void check_ranges(const Map* m, const ZeroPlan* plan, const OptimizerState* state) {
    ZeroRange* ranges = (ZeroRange*)check_alloc((size_t)zero_max_ranges(m->cfg), sizeof(ZeroRange), "ranges");
    const int count = zero_ranges(plan, state->rows, m->cfg, ranges);
    for (int i = 0; i < count; i++) {
        const ZeroRange* r = &ranges[i];
        const TensorRow* row = &m->rows[r->row];
        const int layer = row->in_block ? tensor_lowest_layer(row, r->copy) : -1;
        const Shard* s = first_owned(m, r->row, layer);
        EXPECT(s != NULL, "%s of layer %d is not here", row->name, layer);
        if (!s) {
            break;
        }
        const Bucket* b = &m->buckets[s->bucket];
        // the frozen parts of blocks that are frozen as a whole are cut otherwise
        const int is_mixed =
            layer >= 0 && m->cfg.L > 0 && plan->first_block > 0 && b->kind == MAP_FROZEN && plan->frozen != 0;
        const MapSpace kept = m->of.ring_parameters > 0 ? MAP_OWNED : MAP_PARAMETERS;
        EXPECT(is_mixed || map_at(m, s, MAP_OWNED) == r->owned, "%s of layer %d: owned %zu and %zu",
               row->name, layer, map_at(m, s, MAP_OWNED), r->owned);
        EXPECT(is_mixed || kept == MAP_OWNED || map_at(m, s, kept) == r->full, "%s of layer %d: %zu and %zu",
               row->name, layer, map_at(m, s, kept), r->full);
        EXPECT(is_mixed || m->of.tensor > 1 || s->piece.first == r->before,
               "%s of layer %d: first %zu and %zu", row->name, layer, s->piece.first, r->before);
        for (int slot = 0; slot < MAP_SLOTS && b->kind == MAP_TRAINED; slot++) {
            const size_t begin = state_slot_has(state, slot, r->row) ? state_begin(state, slot, r) : MAP_NONE;
            EXPECT(s->slot[slot] == begin, "%s of layer %d, %s: %zu and %zu", row->name, layer,
                   state->slots[slot].label, s->slot[slot], begin);
        }
    }
    free(ranges);
}

static void check_gradients(const Map* m, const ZeroPlan* plan) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    zero_gradient_rows(rows, plan, m->cfg, 1);
    for (int i = 0; i < m->num_shards && m->of.experts == 1 && m->of.ring_gradients == 0; i++) {
        const Shard* s = &m->shards[i];
        if (m->buckets[s->bucket].kind == MAP_TRAINED && map_find(m, s->tensor, s->layer) == s) {
            const size_t k = s->layer < 0 ? 0 : (size_t)(model_copy(m->cfg, s->layer) - plan->first_block),
                         at = rows[s->tensor].offset_bytes + k * rows[s->tensor].layer_bytes;
            EXPECT(map_at(m, s, MAP_GRADIENTS) == at, "%s of layer %d: %zu and %zu", rows[s->tensor].name,
                   s->layer, map_at(m, s, MAP_GRADIENTS), at);
        }
    }
}

SERIAL_TEST(map_zero) {
    for (uint64_t seed = 1; seed <= 200 && !test_failures_; seed++) {
        Rand random = rand_open(seed, 1);
        MapOf of = random_of(&random);
        const Optimizer optimizer = random_optimizer(&random, &of);
        Memory memory = memory_on_host();
        optimizer_set_map(&of, optimizer);
        for (int rank = 0; rank < ranks_of(&of); rank++) {
            const ZeroPlan plan = plan_of(&of, rank);
            OptimizerState state;
            Map m;
            optimizer_state_open(&state, optimizer, &plan, map_part(&of, rank));
            map_open(&m, &memory, &of, rank);
            check_sizes(&m, &plan, &state);
            check_ranges(&m, &plan, &state);
            check_gradients(&m, &plan);
            if (test_failures_) {
                fprintf(stderr,
                        "seed %d, rank %d: %s, %d layers, t %d, W %d, P %d, e %d, replica %d, stage %d, %s\n",
                        (int)seed, rank, model_architecture(of.whole.arch)->word, of.whole.L, of.tensor,
                        of.data, of.pipeline, of.experts, of.replica, of.stage,
                        optimizer_word(optimizer.name));
                break;
            }
        }
        memory_close(&memory);
    }
}
