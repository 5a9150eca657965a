/*
optimizer.cuh -- the update of optimizer.h on the GPU: all parameters whose rule works element by
element in one launch; Adafactor, Muon and SOAP by their own (adafactor.cuh, muon.cuh, soap.cuh).

The map (map.h) says where a range of owned elements lies in each array. Updates cover the padding
behind a range up to the next tile. Arrays start at multiples of 16 bytes.

    params    (MAP_KEPT)           T      set; also read, except with MASTER_FP32
    grads     (map_update_space)   T or fp32
    slots                          updated

master_weights.cuh says how weights are read and rounded.

Matrices whose parts belong to several ranks are updated by their owners (owners.cuh).
*/
#ifndef LLMC_OPTIMIZER_CUH
#define LLMC_OPTIMIZER_CUH

#include <assert.h>

#include "llmc/optim/adafactor.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/model/map.h"
#include "llmc/model/model.h"
#include "llmc/ops/matmul_plans.cuh"
#include "llmc/optim/muon.cuh"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/owners.cuh"
#include "llmc/optim/soap.cuh"
#include "llmc/optim/update_elements.cuh"
#include "llmc/optim/master_weights.cuh"
#include "llmc/parallel/zero.cuh"

// The update's data for a map: its ranges, and the data of the rules' own kernels.
typedef struct {
    const OptimizerState* state;
    UpdateTiles tiles;
    Code8Table codes; // of state in 8 bits
    // those that this rank alone updates, and those that it owns and that travel
    AdafactorPlan adafactor, traveling;
    // as OptimizerState.matrices, without places; one matrix of those that travel
    MuonTensor muon[MATRICES_MOST];
    SoapTensor soap[MATRICES_MOST];
    int muon_tensors, soap_tensors;
    MuonGpu muon_memory;
    SoapGpu soap_memory;
    Owners owners; // of matrices whose parts belong to several ranks
} OptimizerPlan;

// ---- whole matrices ----

// First ... end - 1, of groups or of layers of a tensor.
typedef struct {
    int first, end;
} UpdateSpan_;

// Returns the range of copy k of a tensor, of which this rank updates all, from element `begin` on.
static inline MapRange update_tensor_(const OptimizerState* s, int i, int k, size_t begin) {
    const MapRange all = map_range(s->map, i, tensor_lowest_layer(&s->rows[i], k), MAP_OWNED);
    return map_part_of_range(all, begin, all.count - begin);
}

// Returns the place of a matrix in a slot of matrices, 0 if it has none.
static inline size_t update_matrix_begin_(const OptimizerState* s, int slot, OwnedMatrix x) {
    return state_matrix_elements(s, slot, x.of) > 0 ? state_matrix_begin(s, slot, x) : 0;
}

// Returns where the matrices of layers begin, of which this one and the next do at `at` and `next`.
static inline MuonPlace update_place_(int layer, size_t at, size_t next) {
    const MuonPlace place = {at - (size_t)layer * (next - at), next - at};
    return place;
}

// Returns the place of some matrices of these layers in a slot.
static inline MuonPlace update_matrix_place_(const OptimizerState* s, int slot, const Matrices* m,
                                             UpdateSpan_ layers) {
    const OwnedMatrix first = {m, layers.first, 0}, next = {m, int_min(layers.first + 1, layers.end - 1), 0};
    return update_place_(layers.first, update_matrix_begin_(s, slot, first),
                         update_matrix_begin_(s, slot, next));
}

// Returns the matrices of all layers without their places; or one matrix alone, if they travel.
static inline MuonTensor update_muon_tensor_(const OptimizerState* s, const Matrices* m) {
    const TensorRow* row = &s->rows[m->row];
    MuonTensor t = owners_tensor(m->rows, m->cols);
    if (!matrices_travel(m)) {
        t.layers = row->layers;
        t.parts = m->count;
        t.group = row->place == PLACE_BLOCK;
        t.stream = row->stream;
        t.decay = row->decay;
        t.by_layer = s->optimizer.by_block;
    }
    return t;
}

// Returns the first of these layers whose distances are equal in all arrays: blocks that follow one
// another and have the same tensors.
static inline UpdateSpan_ update_even_layers_(const OptimizerState* s, const Matrices* m,
                                              UpdateSpan_ layers) {
    const TensorRow* row = &s->rows[m->row];
    const int block = tensor_copy_block(row, layers.first);
    UpdateSpan_ even = {layers.first, layers.first + 1};
    for (int next = block + 1; even.end < layers.end && tensor_copy_block(row, even.end) == next; next++) {
        if (row->place == PLACE_BLOCK && !tensor_blocks_match(s->rows, MODEL_PARAMETER_ROWS, block, next)) {
            break;
        }
        even.end++;
    }
    return even;
}

// Returns the slot of a row's momentum, STATE_SLOTS without one.
static inline int update_momentum_slot_(const OptimizerState* s, int row) {
    return state_slot_has(s, STATE_M, row)    ? (int)STATE_M
           : state_slot_has(s, STATE_M8, row) ? (int)STATE_M8
                                              : (int)STATE_SLOTS;
}

// Sets the places of these layers, all trained, in the arrays of an update. Their distances are
// those of the first two.
static inline void update_set_places_(MuonTensor* t, const OptimizerState* s, const Matrices* m,
                                      UpdateSpan_ layers) {
    const Map* map = s->map;
    const OwnedMatrix x = {m, layers.first, 0};
    const int i = m->row, k = layers.first;
    const size_t begin = matrix_part(x, &s->rows[i], s->cfg).begin;
    const MapSpace space = map_update_space(map);
    const MapRange a = update_tensor_(s, i, k, begin),
                   b = update_tensor_(s, i, int_min(k + 1, layers.end - 1), begin);
    t->params = update_place_(k, map_range_at(map, &a, MAP_KEPT), map_range_at(map, &b, MAP_KEPT));
    t->master = update_place_(k, map_range_at(map, &a, MAP_OWNED), map_range_at(map, &b, MAP_OWNED));
    t->grads = update_place_(k, map_range_at(map, &a, space), map_range_at(map, &b, space));
    t->words = update_place_(k, state_range_word(s, &a), state_range_word(s, &b));
    const int moment = update_momentum_slot_(s, i);
    if (moment < STATE_SLOTS) {
        t->b = update_place_(k, state_range_begin(s, moment, &a), state_range_begin(s, moment, &b));
    }
    t->row_squares = update_matrix_place_(s, STATE_ROWS, m, layers);
}

// Returns such matrices for SOAP, without places.
static inline SoapTensor update_soap_tensor_(const OptimizerState* s, const Matrices* m) {
    SoapTensor t = {};
    t.matrices = update_muon_tensor_(s, m);
    t.has_left = state_square(s, m->rows) > 0;
    t.has_right = state_square(s, m->cols) > 0;
    t.row = m->row;
    return t;
}

static inline void update_set_soap_places_(SoapTensor* t, const OptimizerState* s, const Matrices* m,
                                           UpdateSpan_ layers) {
    update_set_places_(&t->matrices, s, m, layers);
    t->moments[0] = update_matrix_place_(s, STATE_MATRIX_M, m, layers);
    t->moments[1] = update_matrix_place_(s, STATE_MATRIX_V, m, layers);
    t->left = update_matrix_place_(s, STATE_LEFT, m, layers);
    t->right = update_matrix_place_(s, STATE_RIGHT, m, layers);
}

// Returns a tensor of Adafactor with the places of its own state.
static inline AdafactorTensor update_adafactor_tensor_(const OptimizerState* s, OwnedMatrix x) {
    AdafactorTensor t = {};
    t.row_sums = update_matrix_begin_(s, STATE_ROWS, x);
    t.col_sums = update_matrix_begin_(s, STATE_COLS, x);
    t.v = update_matrix_begin_(s, STATE_V, x);
    t.rows = (int)x.of->rows;
    t.cols = (int)x.of->cols;
    t.rate = s->factors[x.of->row].rate;
    t.decay = s->factors[x.of->row].decay;
    return t;
}

// Sets the places of its elements, all of which this rank updates.
static inline void update_set_elements_(AdafactorTensor* t, const OptimizerState* s, OwnedMatrix x) {
    const Map* map = s->map;
    const int i = x.of->row;
    const MapRange range = update_tensor_(s, i, x.copy, 0);
    t->params = map_range_at(map, &range, MAP_KEPT);
    t->master = map_range_at(map, &range, MAP_OWNED);
    t->grads = map_range_at(map, &range, map_update_space(map));
    t->m = state_slot_has(s, STATE_M, i) ? state_range_begin(s, STATE_M, &range) : 0;
    t->stream = s->rows[i].stream;
    t->first_word = state_range_word(s, &range);
}

// True with --update-in-backward: below stage 2 blocks take turns in the memory of gradients for no
// other reason.
static inline int update_is_in_backward_(const Map* map) {
    return map->of.ring_gradients > 0 && map->of.stage < 2;
}

static inline AdafactorTensor* update_adafactor_room_(const OptimizerState* s) {
    size_t most = 1;
    for (int k = 0; k < s->num_matrices; k++) {
        most += matrices_all(&s->matrices[k]);
    }
    return (AdafactorTensor*)check_alloc(most, sizeof(AdafactorTensor), "tensors of an update");
}

// Sets all tensors of Adafactor that this rank alone updates, group after group; returns their
// number. Groups that are updated in the backward pass are apart.
static inline int update_adafactor_tensors_(AdafactorTensor* tensors, const OptimizerState* s) {
    int count = 0;
    for (int g = 0; g < model_groups(s->cfg); g++) {
        const int begin = count;
        for (int k = 0; k < s->num_matrices; k++) {
            const TensorRow* row = &s->rows[s->matrices[k].row];
            const OwnedMatrix x = {&s->matrices[k], tensor_first_copy_in_group(row, g), 0};
            const int has =
                !matrices_travel(x.of) && tensor_is_in_group(row, g) && x.copy >= x.of->first_copy;
            if (has) {
                AdafactorTensor* t = &tensors[count];
                *t = update_adafactor_tensor_(s, x);
                t->is_apart = update_is_in_backward_(s->map) && count == begin;
                count++;
                if (s->map->shards) { // not in a dry run
                    update_set_elements_(t, s, x);
                }
            }
        }
    }
    return count;
}

// Sets the tensors of Adafactor that travel and that this rank owns; returns their number. Each is
// alone in a gradient.
static inline int update_traveling_tensors_(AdafactorTensor* tensors, const OptimizerState* s) {
    int count = 0;
    for (int k = 0; k < s->num_matrices; k++) {
        const Matrices* m = &s->matrices[k];
        for (int copy = m->first_copy; copy < m->first_copy + m->copies && matrices_travel(m); copy++) {
            const OwnedMatrix x = {m, copy, 0};
            if (matrix_is_owned(x)) {
                tensors[count] = update_adafactor_tensor_(s, x);
                tensors[count++].is_apart = 1;
            }
        }
    }
    return count;
}

// Returns how many elements Adafactor reads at a time, the same in all ranks.
static inline int update_adafactor_width_(const OptimizerState* s) {
    size_t cols = 0;
    for (int k = 0; k < s->num_matrices; k++) {
        cols |= s->matrices[k].rows > 1 ? s->matrices[k].cols : 0;
    }
    return cols % 4 == 0 ? 4 : 1;
}

static inline void update_open_adafactor_(OptimizerPlan* plan, Memory* memory) {
    AdafactorTensor* tensors = update_adafactor_room_(plan->state);
    adafactor_open(&plan->adafactor, memory, tensors, update_adafactor_tensors_(tensors, plan->state));
    adafactor_open(&plan->traveling, memory, tensors, update_traveling_tensors_(tensors, plan->state));
    free(tensors);
    plan->adafactor.width = plan->traveling.width = update_adafactor_width_(plan->state);
}

template <class T> static inline void update_open_rules_(OptimizerPlan* plan, Memory* memory) {
    const OptimizerState* s = plan->state;
    const OptimizerName name = s->optimizer.name;
    if (name == OPTIMIZER_ADAMW8BIT) {
        code8_table_open(&plan->codes, memory);
    } else if (name == OPTIMIZER_MUON) {
        for (int k = 0; k < s->num_matrices; k++) {
            plan->muon[k] = update_muon_tensor_(s, &s->matrices[k]);
        }
        plan->muon_tensors = s->num_matrices;
        if (s->optimizer.muon_momentum == MUON_8BIT) {
            code8_table_open(&plan->codes, memory);
        }
        muon_open<T>(&plan->muon_memory, memory, plan->muon, plan->muon_tensors);
    } else if (name == OPTIMIZER_SOAP) {
        for (int k = 0; k < s->num_matrices; k++) {
            plan->soap[k] = update_soap_tensor_(s, &s->matrices[k]);
        }
        plan->soap_tensors = s->num_matrices;
        soap_open(&plan->soap_memory, memory, plan->soap, plan->soap_tensors);
    } else if (name == OPTIMIZER_ADAFACTOR) {
        update_open_adafactor_(plan, memory);
    }
}

// Opens the plan for parameters of T. `state` has a map, and stays with the caller.
template <class T>
static inline void optimizer_open(OptimizerPlan* plan, Memory* memory, const OptimizerState* state) {
    memset((void*)plan, 0, sizeof(*plan));
    plan->state = state;
    update_open_tiles(&plan->tiles, memory, state);
    update_open_rules_<T>(plan, memory);
    owners_open(&plan->owners, memory, MEMORY_HOST, state);
}

// Chooses the algorithms of an update's matmuls, before the first update. All ranks choose
// together, though each updates other tensors.
template <class T> static inline void optimizer_choose_matmuls(OptimizerPlan* plan, MatmulGpu* matmul) {
    for (int i = 0; i < plan->muon_tensors; i++) {
        muon_choose_matmuls<T>(&plan->muon_memory, &plan->muon[i], matmul);
    }
    for (int i = 0; i < plan->soap_tensors; i++) {
        soap_choose_matmuls(&plan->soap_memory, &plan->soap[i], matmul);
    }
}

// ---- the update ----

static inline int update_is_aligned_(const void* array) { return (uintptr_t)array % 16 == 0; }

// Arguments of an update.
template <class T> struct OptimizerUpdate {
    T* params;
    Gradient grads;
    void* slots[STATE_SLOTS]; // NULL: unused
    const OptimizerPlan* plan;
    Update update;
    uint64_t seed;
    MatmulGpu* matmul; // Muon and SOAP only
    ZeroGpu* zero;
    int shows_average; // true: instead of an update, parameters are set to their average
};

// Returns the slots that an update reads or writes, or that show the average.
template <class T> static inline unsigned optimizer_uses(const OptimizerUpdate<T>& u) {
    return u.shows_average ? SLOT_OF_AVERAGE : ~0u;
}

// Returns the arguments of all updates, without the gradient and the settings of each.
template <class T>
static inline OptimizerUpdate<T> optimizer_update_open(const OptimizerPlan* plan, ZeroGpu* zero,
                                                       MatmulGpu* matmul, uint64_t seed) {
    OptimizerUpdate<T> u = {};
    u.params = (T*)zero_update_parameters(zero);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        u.slots[slot] = state_slot_array(plan->state, slot);
    }
    u.plan = plan;
    u.seed = seed;
    u.matmul = matmul;
    u.zero = zero;
    return u;
}

// Returns the weights of an update.
template <class T> static inline Weights<T> update_weights(const OptimizerUpdate<T>& u) {
    const MasterWeights master = u.plan->state->optimizer.master;
    const int slot = state_master_slot(master);
    const Weights<T> weights = {u.params, slot < STATE_SLOTS ? u.slots[slot] : NULL, master};
    return weights;
}

// ---- rules that need whole tensors

// Returns the groups with gradients within owned elements `first` ... first + count - 1. Frozen
// blocks may be among them.
static inline UpdateSpan_ update_groups_(const Map* map, size_t first, size_t count) {
    UpdateSpan_ groups = {0, 0};
    for (int g = 0; g < model_groups(map->cfg); g++) {
        const MapSpan own = update_owned(map, g);
        if (own.count > 0 && first <= own.begin && own.begin + own.count <= first + count) {
            groups.first = groups.end == 0 ? g : groups.first;
            groups.end = g + 1;
        }
    }
    return groups;
}

template <class T> static inline MuonUpdate<T> update_muon_of_(const OptimizerUpdate<T>& u) {
    const MuonUpdate<T> muon = {
        update_weights(u),
        u.grads,
        {(float*)u.slots[STATE_M], (uint8_t*)u.slots[STATE_M8], (float*)u.slots[STATE_M_SCALE]},
        (float*)u.slots[STATE_ROWS],
        (MuonGpu*)&u.plan->muon_memory,
        update_muon(u.update),
        u.update.t,
        u.seed,
        u.matmul,
        NULL,
        u.plan->codes.values};
    return muon;
}

// Returns the trained layers of some matrices in some groups: first < end if it has any.
static inline UpdateSpan_ update_layers_(const OptimizerState* s, const Matrices* m, UpdateSpan_ groups) {
    const int end = m->first_copy + m->copies;
    const TensorRow* row = &s->rows[m->row];
    const UpdateSpan_ layers = {int_max(tensor_copies_before(row, groups.first - 1), m->first_copy),
                                int_min(tensor_copies_before(row, groups.end - 1), end)},
                      once = {0, groups.first == 0 && groups.end > 0 ? end : 0}, none = {0, 0};
    return matrices_travel(m) ? none : row->place == PLACE_BLOCK ? layers : once;
}

template <class T>
static inline void update_muon_rows_(const OptimizerUpdate<T>& u, UpdateSpan_ groups, const Gpu* gpu) {
    const OptimizerState* s = u.plan->state;
    for (int i = 0; i < u.plan->muon_tensors; i++) {
        UpdateSpan_ layers = update_layers_(s, &s->matrices[i], groups);
        MuonTensor t = u.plan->muon[i];
        while (layers.first < layers.end) {
            const UpdateSpan_ even = update_even_layers_(s, &s->matrices[i], layers);
            update_set_places_(&t, s, &s->matrices[i], even);
            muon_update(&t, update_muon_of_(u), even.first, even.end, gpu);
            layers.first = even.end;
        }
    }
}

// Returns the arguments of SOAP for a row.
template <class T> static inline SoapUpdate<T> update_soap_of_(const OptimizerUpdate<T>& u, int row) {
    const SoapUpdate<T> soap = {update_weights(u),
                                u.grads,
                                (float*)u.slots[STATE_MATRIX_M],
                                (float*)u.slots[STATE_MATRIX_V],
                                {(float*)u.slots[STATE_LEFT], (float*)u.slots[STATE_LEFT_BASIS]},
                                {(float*)u.slots[STATE_RIGHT], (float*)u.slots[STATE_RIGHT_BASIS]},
                                (SoapGpu*)&u.plan->soap_memory,
                                update_soap(update_of_row(u.update, u.plan->state, row)),
                                u.seed,
                                u.matmul};
    return soap;
}

template <class T>
static inline void update_soap_rows_(const OptimizerUpdate<T>& u, UpdateSpan_ groups, const Gpu* gpu) {
    const OptimizerState* s = u.plan->state;
    for (int i = 0; i < u.plan->soap_tensors; i++) {
        UpdateSpan_ layers = update_layers_(s, &s->matrices[i], groups);
        SoapTensor t = u.plan->soap[i];
        while (layers.first < layers.end) {
            const UpdateSpan_ even = update_even_layers_(s, &s->matrices[i], layers);
            update_set_soap_places_(&t, s, &s->matrices[i], even);
            soap_update(&t, update_soap_of_(u, t.row), even.first, even.end, gpu);
            layers.first = even.end;
        }
    }
}

// Adds equal tensors of Adafactor.
static inline void update_count_adafactor_(AdafactorCount* sum, const Matrices* m, int count) {
    const int is_matrix = m->rows > 1;
    sum->vectors += is_matrix ? 0 : count;
    sum->matrices += is_matrix ? count : 0;
    sum->tiles += is_matrix ? count * ceil_div((int)m->rows, (int)ADAFACTOR_BAND) : 0;
}

// Counts the tensors of Adafactor before group g, among those that this rank alone updates.
static inline AdafactorCount update_adafactor_before_(const OptimizerState* s, int g) {
    AdafactorCount before = {0, 0, 0};
    for (int k = 0; k < s->num_matrices; k++) {
        const Matrices* m = &s->matrices[k];
        const UpdateSpan_ groups = {0, g}, layers = update_layers_(s, m, groups);
        update_count_adafactor_(&before, m, int_max(layers.end - layers.first, 0));
    }
    return before;
}

template <class T>
static inline void update_adafactor_rows_(const OptimizerUpdate<T>& u, UpdateSpan_ groups, const Gpu* gpu) {
    const OptimizerState* s = u.plan->state;
    const AdafactorCount begin = update_adafactor_before_(s, groups.first),
                         end = update_adafactor_before_(s, groups.end);
    const AdafactorCount these = {end.matrices - begin.matrices, end.vectors - begin.vectors,
                                  end.tiles - begin.tiles};
    assert(!update_is_in_backward_(s->map) || groups.end - groups.first == 1);
    adafactor_update(AdafactorUpdate<T>{update_weights(u), u.grads, (float*)u.slots[STATE_ROWS],
                                        (float*)u.slots[STATE_COLS], (float*)u.slots[STATE_V],
                                        (float*)u.slots[STATE_M], &u.plan->adafactor,
                                        update_adafactor(u.update), u.seed, begin, these, NULL, NULL},
                     gpu);
}

template <class T>
static inline void update_groups_rows_(const OptimizerUpdate<T>& u, UpdateSpan_ groups, const Gpu* gpu) {
    if (u.plan->state->optimizer.name == OPTIMIZER_MUON) {
        update_muon_rows_(u, groups, gpu);
    } else if (u.plan->state->optimizer.name == OPTIMIZER_SOAP) {
        update_soap_rows_(u, groups, gpu);
    } else {
        update_adafactor_rows_(u, groups, gpu);
    }
}

// ---- matrices whose parts belong to several ranks (owners.h)

// Returns this rank's part of a matrix as a tensor of Muon, with its places in all arrays.
static inline MuonTensor update_share_(const OptimizerState* s, const MapRange* range) {
    const Map* map = s->map;
    const int i = range->shard->tensor;
    MuonTensor t = owners_tensor(1, range->count);
    t.params.first = map_range_at(map, range, MAP_KEPT);
    t.master.first = map_range_at(map, range, MAP_OWNED);
    t.grads.first = map_range_at(map, range, map_update_space(map));
    const int moment = update_momentum_slot_(s, i);
    t.b.first = moment < STATE_SLOTS ? state_range_begin(s, moment, range) : 0;
    t.words.first = state_range_word(s, range);
    t.stream = s->rows[i].stream;
    return t;
}

// Returns a matrix's place in a slot that it has.
template <class T> static inline float* update_owned_(const OptimizerUpdate<T>& u, int slot, OwnedMatrix x) {
    const OptimizerState* s = u.plan->state;
    return state_matrix_elements(s, slot, x.of) > 0 ? (float*)u.slots[slot] + state_matrix_begin(s, slot, x)
                                                    : NULL;
}

// Returns the arguments of Muon for one matrix, or a part of it.
template <class T>
static inline MuonUpdate<T> update_muon_one_(const OptimizerUpdate<T>& u, float* data, float* row_squares) {
    MuonUpdate<T> muon = update_muon_of_(u);
    muon.row_squares = row_squares;
    muon.u = data;
    return muon;
}

template <class T>
static inline void update_operand_(const OptimizerUpdate<T>& u, const OwnersItem* item, const Gpu* gpu) {
    const Owners* o = &u.plan->owners;
    float* to = o->shares + item->share_at;
    if (item->share.count == 0) {
        return;
    }
    const MuonTensor t = update_share_(u.plan->state, &item->share);
    if (u.plan->state->rule[item->x.of->row] == RULE_MUON) {
        muon_operand(&t, update_muon_one_(u, to, NULL), 0, gpu);
        return;
    }
    const Weights<T> weights = weights_from(update_weights(u), t.params.first, t.master.first);
    GRADIENT_DISPATCH(u.grads, T,
                      owners_operand(to, o->has_weights ? to + o->shares_room : NULL,
                                     (const G*)u.grads.data + t.grads.first, weights, item->share.count,
                                     gpu));
}

// Returns Adafactor's tensors before a matrix that this rank owns, among those that travel.
static inline AdafactorCount update_traveling_before_(const OptimizerState* s, OwnedMatrix x) {
    AdafactorCount before = {0, 0, 0};
    for (const Matrices* m = s->matrices; m <= x.of; m++) {
        const size_t copies = m == x.of ? (size_t)(x.copy - m->first_copy) : (size_t)m->copies;
        update_count_adafactor_(&before, m, matrices_travel(m) ? (int)matrices_owned(m, copies) : 0);
    }
    return before;
}

template <class T>
static inline void update_turn_adafactor_(const OptimizerUpdate<T>& u, OwnedMatrix x, float* matrix,
                                          float* rate, const float* weights, const Gpu* gpu) {
    AdafactorCount one = {0, 0, 0};
    update_count_adafactor_(&one, x.of, 1);
    adafactor_update(AdafactorUpdate<T>{update_weights(u), Gradient{matrix, DTYPE_FP32},
                                        (float*)u.slots[STATE_ROWS], (float*)u.slots[STATE_COLS],
                                        (float*)u.slots[STATE_V], NULL, &u.plan->traveling,
                                        update_adafactor(u.update), u.seed,
                                        update_traveling_before_(u.plan->state, x), one, rate, weights},
                     gpu);
}

// Turns the matrix that this rank owns.
template <class T>
static inline void update_turn_(const OptimizerUpdate<T>& u, const OwnersItem* item, const Gpu* gpu) {
    const Owners* o = &u.plan->owners;
    const OptimizerState* s = u.plan->state;
    const OwnedMatrix x = item->x;
    const int k = (int)(x.of - s->matrices);
    float *matrix = owners_matrix(o, item), *rate = (item->is_cut ? o->parts : matrix) + matrix_elements(x);
    const size_t room = item->is_cut ? o->matrix_room : o->pieces_room;
    for (int half = 0; half <= o->has_weights && item->is_cut; half++) {
        owners_copy_runs_gpu(o, item, o->parts + half * room, matrix + half * room, OWNERS_THERE, gpu);
    }
    if (s->rule[x.of->row] == RULE_MUON) {
        muon_turn(&u.plan->muon[k], update_muon_one_(u, matrix, update_owned_(u, STATE_ROWS, x)), gpu);
    } else if (s->rule[x.of->row] == RULE_SOAP) {
        SoapUpdate<T> soap = update_soap_of_(u, x.of->row);
        soap.m = update_owned_(u, STATE_MATRIX_M, x), soap.v = update_owned_(u, STATE_MATRIX_V, x);
        soap.left = SoapSide{update_owned_(u, STATE_LEFT, x), update_owned_(u, STATE_LEFT_BASIS, x)};
        soap.right = SoapSide{update_owned_(u, STATE_RIGHT, x), update_owned_(u, STATE_RIGHT_BASIS, x)};
        soap_turn(&u.plan->soap[k], matrix, soap, gpu);
    } else {
        update_turn_adafactor_(u, x, matrix, rate, o->has_weights ? matrix + room : NULL, gpu);
    }
    if (item->is_cut) {
        owners_copy_runs_gpu(o, item, o->parts, matrix, OWNERS_BACK, gpu);
    }
}

template <class T>
static inline void update_move_adafactor_(const OptimizerUpdate<T>& u, const OwnersItem* item,
                                          const MuonTensor& part, const Gpu* gpu) {
    const OptimizerState* s = u.plan->state;
    const int row = item->x.of->row;
    const size_t count = item->share.count;
    const float* direction = u.plan->owners.shares + item->share_at;
    float* m = state_slot_has(s, STATE_M, row) ? (float*)u.slots[STATE_M] + part.b.first : NULL;
    AdafactorTensor t = {};
    t.stream = part.stream;
    t.first_word = part.words.first;
    t.rate = s->factors[row].rate;
    t.decay = s->factors[row].decay;
    adafactor_move(weights_from(update_weights(u), part.params.first, part.master.first), m, direction,
                   direction + count, count, t, update_adafactor(u.update), u.seed, gpu);
}

// Moves this rank's part of a matrix.
template <class T>
static inline void update_move_(const OptimizerUpdate<T>& u, const OwnersItem* item, const Gpu* gpu) {
    const OptimizerState* s = u.plan->state;
    const int row = item->x.of->row, decays = s->rows[row].decay;
    const UpdateRule rule = s->rule[row];
    if (item->share.count == 0 || (rule == RULE_SOAP && u.update.t == 1)) {
        return;
    }
    const MuonTensor t = update_share_(s, &item->share);
    if (rule == RULE_FACTORED || rule == RULE_FULL) {
        update_move_adafactor_(u, item, t, gpu);
        return;
    }
    const Muon muon = update_muon(u.update);
    const AdamW adam = update_soap(update_of_row(u.update, s, row)).adam;
    const float rate = rule == RULE_MUON ? muon.lr * muon_factor(muon, item->x.of->rows, item->x.of->cols)
                                         : adam.lr,
                keep = rule == RULE_MUON ? 1.0f - muon.lr * muon.weight_decay
                                         : 1.0f - adam.lr * adam.weight_decay;
    const MuonMove move = {rate, decays ? keep : 1.0f, rule == RULE_MUON ? muon.decay : adam.decay, u.seed,
                           u.update.t};
    muon_move(&t, update_weights(u), u.plan->owners.shares + item->share_at, move, 0, gpu);
}

template <class T>
static inline void update_owners_round_(const OptimizerUpdate<T>& u, Owners* o, int count, const Gpu* gpu) {
    const int g = o->items[0].group, rank = zero_peers(u.zero, g)->rank;
    const GroupGpu* tensor = &u.zero->groups->tensor;
    for (int i = 0; i < count; i++) {
        update_operand_(u, &o->items[i], gpu);
    }
    zero_exchange(u.zero, g, o->moves, owners_moves_of_data(o, count, OWNERS_THERE, rank));
    group_exchange(o->moves, owners_moves_of_tensor(o, count, OWNERS_THERE), tensor, gpu->stream);
    for (int i = 0; i < count; i++) {
        if (owners_owns(&o->items[i])) {
            update_turn_(u, &o->items[i], gpu);
        }
    }
    group_exchange(o->moves, owners_moves_of_tensor(o, count, OWNERS_BACK), tensor, gpu->stream);
    zero_exchange(u.zero, g, o->moves, owners_moves_of_data(o, count, OWNERS_BACK, rank));
    for (int i = 0; i < count; i++) {
        update_move_(u, &o->items[i], gpu);
    }
}

// Updates the matrices of these groups that travel. Collective.
template <class T>
static inline void update_owners_(const OptimizerUpdate<T>& u, UpdateSpan_ groups, const Gpu* gpu) {
    static const TensorPlace places[] = {PLACE_ONCE, PLACE_BLOCK};
    Owners* o = (Owners*)&u.plan->owners;
    for (int i = 0; i < 2 && o->most > 0; i++) {
        OwnersDeal deal = owners_deal(o, places[i], groups.first, groups.end);
        int count;
        while ((count = owners_round(o, &deal)) >= 0) {
            if (count > 0) {
                update_owners_round_(u, o, count, gpu);
            }
        }
    }
}

// Updates all rows of these groups whose rule needs whole tensors.
template <class T>
static inline void update_tensors_(const OptimizerUpdate<T>& u, UpdateSpan_ groups, const Gpu* gpu) {
    update_groups_rows_(u, groups, gpu);
    update_owners_(u, groups, gpu);
}

// ---- all rules

// Updates `count` elements from `first` on, both multiples of TENSOR_SHARD_UNIT, among those that
// this rank updates: whole groups if the update needs whole tensors (state_needs_tensors). The
// pointers to slots are those of whole arrays, of which only the part for these elements must
// exist.
template <class T>
static inline void optimizer_update_part(const OptimizerUpdate<T>& u, size_t first, size_t count,
                                         const Gpu* gpu) {
    assert(update_is_aligned_(u.params) && update_is_aligned_(u.grads.data) && first % UPDATE_TILE == 0 &&
           count % UPDATE_TILE == 0 && update_is_aligned_(u.slots[STATE_M]) &&
           update_is_aligned_(u.slots[STATE_V]) && update_is_aligned_(update_weights(u).master));
    assert(DTYPE_OF(T) == DTYPE_BF16 || u.plan->state->optimizer.master <= MASTER_FP32);
    const ElementsUpdate<T> elements = {u.plan->state, &u.plan->tiles,       update_weights(u), u.grads,
                                        u.slots,       u.plan->codes.values, u.update,          u.seed};
    const uint32_t tile = (uint32_t)(first / UPDATE_TILE), tiles = (uint32_t)(count / UPDATE_TILE);
    if (u.shows_average) {
        update_average<T, 1>(elements, tile, tiles, gpu);
        return;
    }
    update_elements(elements, tile, tiles, gpu);
    const OptimizerName name = u.plan->state->optimizer.name;
    if (name == OPTIMIZER_MUON || name == OPTIMIZER_SOAP || name == OPTIMIZER_ADAFACTOR) {
        update_tensors_(u, update_groups_(u.plan->state->map, first, count), gpu);
    }
    if (u.plan->state->optimizer.average.is_kept) {
        update_average<T, 0>(elements, tile, tiles, gpu);
    }
}

// Updates everything that this rank updates, and its average.
template <class T> static inline void optimizer_update(const OptimizerUpdate<T>& u, const Gpu* gpu) {
    optimizer_update_part(u, 0, u.plan->state->map->totals.updated, gpu);
}

#endif
