/*
update_elements.cuh -- the update of all parameters whose rule works element by element, in one
launch; and the average of the weights (average.h).

A block of threads has a tile of owned elements. A table in device memory says to which range of the
map (map.h) it belongs, and where that lies in each array. Tiles have the order of owned elements,
so a launch takes any interval of them. The padding behind a range belongs to its last tile: it is
zero, and stays zero.
*/
#ifndef LLMC_UPDATE_ELEMENTS_CUH
#define LLMC_UPDATE_ELEMENTS_CUH

#include <limits.h>

#include "llmc/gpu/gpu.cuh"
#include "llmc/model/map.h"
#include "llmc/optim/adamw.cuh"
#include "llmc/optim/adamw8bit.cuh"
#include "llmc/optim/lion.cuh"
#include "llmc/optim/master_weights.cuh"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/sgd.cuh"

#define RULE_BIT_(rule) (1u << RULE_##rule)

// ---- ranges ----

// Elements of a tile, which a thread block updates, four elements a thread. All belong to one
// range: ranges of owned elements begin at multiples of it.
enum { UPDATE_TILE = TENSOR_SHARD_UNIT, UPDATE_THREADS = UPDATE_TILE / 4 };

// Returns the owned elements of group g that are trained.
static inline MapSpan update_owned(const Map* map, int g) {
    const Bucket* b = map_trained(map, g);
    const MapSpan none = {0, 0, 0};
    return b ? b->in[MAP_OWNED] : none;
}

// A range of owned elements. Owned element i is element i + `params` of the parameters, and so on;
// these distances may be below 0, and then wrap around. MAP_NONE: the range has no such elements.
typedef struct {
    uint64_t params, grads, m, v, average;
    uint64_t word, stream; // RoundingWords
    uint32_t tensor, rule; // row of the parameters; RULE_NONE: it is not updated
} UpdateRow;

// The ranges that are updated, in device memory.
typedef struct {
    const UpdateRow* rows; // the first one is that of tiles without elements
    const int* row_of;     // (tiles) in the order of owned elements
} UpdateTiles;

// Return the slots of a rule's moments. ADAMW8's scales lie as its codes do, divided by the size of
// a block.
static inline int update_slot_of_m_(UpdateRule rule) { return rule == RULE_ADAMW8 ? STATE_M8 : STATE_M; }
static inline int update_slot_of_v_(UpdateRule rule) { return rule == RULE_ADAMW8 ? STATE_V8 : STATE_V; }

// Returns the distance of a range in a slot of elements.
static inline uint64_t update_slot_(const OptimizerState* s, int slot, const MapRange* range) {
    const int has = range->shard->slot[slot] != MAP_NONE;
    return has ? state_range_begin(s, slot, range) - map_range_at(s->map, range, MAP_OWNED) : MAP_NONE;
}

static inline UpdateRow update_row_(const OptimizerState* s, const MapRange* range) {
    const Map* map = s->map;
    const int i = range->shard->tensor;
    const UpdateRule rule = range->shard->flags & SHARD_FROZEN ? RULE_NONE : s->rule[i];
    const size_t owned = map_range_at(map, range, MAP_OWNED);
    const UpdateRow row = {map_range_at(map, range, MAP_KEPT) - owned,
                           map_range_at(map, range, map_update_space(map)) - owned,
                           update_slot_(s, update_slot_of_m_(rule), range),
                           update_slot_(s, update_slot_of_v_(rule), range),
                           update_slot_(s, STATE_AVERAGE, range),
                           state_range_word(s, range) - owned,
                           s->rows[i].stream,
                           (uint32_t)i,
                           (uint32_t)rule};
    return row;
}

// Sets the rows of all ranges, after the first one, and the tiles, which are zero.
static inline void update_set_rows_(UpdateRow* rows, int* row_of, const OptimizerState* s) {
    const Map* map = s->map;
    int count = 0;
    rows[0].rule = RULE_NONE;
    rows[0].average = MAP_NONE;
    for (int g = 0; g < model_groups(s->cfg); g++) {
        const Bucket* b = map_trained(map, g);
        MapRange range = {};
        while (b && map_next_range(map, b, MAP_OWNED, &range)) {
            const size_t first = map_range_at(map, &range, MAP_OWNED) / UPDATE_TILE,
                         tiles = ceil_div(range.count, (size_t)UPDATE_TILE);
            rows[++count] = update_row_(s, &range);
            for (size_t k = first; k < first + tiles; k++) {
                row_of[k] = count;
            }
        }
    }
}

static inline void update_open_tiles(UpdateTiles* tiles, Memory* memory, const OptimizerState* s) {
    const MapTotals* totals = &s->map->totals;
    const size_t count = totals->updated / UPDATE_TILE, bytes = count * sizeof(int),
                 rows_bytes = ((size_t)totals->shards + 1) * sizeof(UpdateRow);
    const char* kind = "scratch: ranges of an update";
    CHECK(count <= INT_MAX, "%zu tiles of parameters are too many for a launch", count);
    UpdateRow* on_gpu = (UpdateRow*)memory_take(memory, kind, MEMORY_DEVICE, rows_bytes);
    int* row_of_on_gpu = (int*)memory_take(memory, kind, MEMORY_DEVICE, bytes);
    if (!memory_is_dry(memory)) {
        UpdateRow* rows = (UpdateRow*)check_alloc(rows_bytes, 1, "ranges of an update");
        int* row_of = (int*)check_alloc(bytes, 1, "ranges of an update");
        update_set_rows_(rows, row_of, s);
        gpu_upload(on_gpu, rows, rows_bytes);
        gpu_upload(row_of_on_gpu, row_of, bytes);
        free(row_of);
        free(rows);
    }
    tiles->rows = on_gpu;
    tiles->row_of = row_of_on_gpu;
}

// ---- the kernel ----

// Arrays of an update, or four elements of them.
template <class T, class G> struct UpdateArrays_ {
    Weights<T> weights;
    const G* grads;
    float *m, *v;        // NULL if no rule has them
    AdamW8bitState in_8; // pointers are NULL if no rule has them
};

// Numbers of an update, and those of each row.
typedef struct {
    UpdateScalars scalars;
    UpdateRates rates[MODEL_PARAMETER_ROWS];
} UpdateNumbers_;

static inline UpdateNumbers_ update_numbers_(const OptimizerState* state, Update update) {
    UpdateNumbers_ n;
    n.scalars.beta1 = update.beta1, n.scalars.beta2 = update.beta2;
    n.scalars.grad_scale = update.grad_scale, n.scalars.momentum = update.momentum;
    n.scalars.decay = update.decay;
    n.scalars.v_correction = (float)(1 / (1 - pow(update.beta2, (double)update.t)));
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const Update of_row = update_of_row(update, state, i);
        const int is_adamw = state->rule[i] == RULE_ADAMW || state->rule[i] == RULE_ADAMW8;
        const double corrected = is_adamw ? 1 - pow(update.beta1, (double)update.t) : 1;
        n.rates[i].keep = (float)(1 - (double)of_row.lr * of_row.weight_decay);
        n.rates[i].step = (float)(of_row.lr / corrected);
        n.rates[i].eps = of_row.eps;
    }
    return n;
}

// Returns four of these weights. The compiler knows the kind of master weights, so the others take
// no registers.
template <MasterWeights MASTER, class T>
__device__ inline Weights<T> update_four_of_(const Weights<T>& w, const UpdateRow& row, size_t owned) {
    const Weights<T> four = {w.params + (row.params + owned), (char*)w.master + owned * master_bytes(MASTER),
                             MASTER};
    return four;
}

// Updates four parameters x whose moments are in 8 bits.
template <class G>
__device__ inline void adamw8bit_four_(Elements<float, 4>* x, const Elements<G, 4>& g,
                                       const AdamW8bitState& state, size_t at, const Code8Pair* codes,
                                       UpdateRates rates, const UpdateScalars& s) {
    AdamW8bitFour four = adamw8bit_load(state, at, codes);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        (*x)[k] = adamw_element_gpu((*x)[k], to_float(g[k]), &four.m[k], &four.v[k], rates, s);
    }
    adamw8bit_store(state, at, four);
}

// A thread updates four elements, a block of threads a tile: 16-byte accesses to fp32 data, 8-byte
// to 16-bit data, coalesced. Everything is loaded before anything is computed. Tiles whose rule is
// not one of RULES are skipped: other kernels update them, or they are frozen.
// grid   tiles, from tile `first` on      block   256      shared   2 KiB with moments in 8 bits
// moves  optimizer_bytes, less the tiles that it skips. Bound by memory: Philox takes some 30
//        instructions an element, the rest some 50, together less than half of what an H100 can
//        issue in the time. In 8 bits encoding takes some 40 more, an element and moment.
// order  every element, or block of 64 in 8 bits, on its own
template <class T, class G, unsigned RULES, MasterWeights MASTER>
__global__ void __launch_bounds__(UPDATE_THREADS)
    update_kernel_(const __grid_constant__ UpdateArrays_<T, G> a, UpdateTiles tiles, uint32_t first,
                   const __grid_constant__ UpdateNumbers_ numbers, const Code8Pair* table, uint64_t seed,
                   int64_t t) {
    constexpr bool IN_8 = (RULES & RULE_BIT_(ADAMW8)) != 0;
    SMEM_ARRAY(Code8Pair, codes, [IN_8 ? 256 : 1]);
    const size_t tile = first + blockIdx.x, owned = tile * UPDATE_TILE + 4 * threadIdx.x;
    const UpdateRow& row = tiles.rows[tiles.row_of[tile]];
    const uint32_t rule = row.rule;
    if (IN_8) {
        code8_table_load(codes, table);
    }
    if (!(RULES >> rule & 1)) {
        return; // the whole block
    }
    const UpdateRates rates = numbers.rates[row.tensor];
    const Weights<T> weights = update_four_of_<MASTER>(a.weights, row, owned);
    const size_t m = row.m + owned, v = row.v + owned;
    const Elements<G, 4> g = elements_load<4>(a.grads + (row.grads + owned));
    Elements<float, 4> x = weights_load<4>(weights, 0);
    if ((RULES & RULE_BIT_(ADAMW)) && rule == RULE_ADAMW) {
        adamw_four(&x, g, a.m + m, a.v + v, rates, numbers.scalars);
    } else if (IN_8) {
        adamw8bit_four_(&x, g, a.in_8, m, codes, rates, numbers.scalars);
    } else if (RULES & RULE_BIT_(LION)) {
        lion_four(&x, g, a.m + m, rates, numbers.scalars);
    } else if (RULES & RULE_BIT_(SGD)) {
        sgd_four(&x, g, a.m ? a.m + m : NULL, rates, numbers.scalars);
    }
    weights_store(weights, 0, x, rounding_words(seed, row.stream, t, row.word + owned));
}

// ---- the average of the weights ----

// Arrays of an average, of which only a part may exist.
template <class T> struct AverageArrays_ {
    Weights<T> weights;
    float* average;
};

// A thread adds four weights to their average, or sets the parameters to it (SHOWS).
// grid   tiles, from tile `first` on      block   256      shared   none
// moves  the weights in and the average in and out; SHOWS: the average in, T out. Bound by memory.
// order  every element on its own
template <class T, int SHOWS>
__global__ void __launch_bounds__(UPDATE_THREADS)
    average_kernel_(const __grid_constant__ AverageArrays_<T> a, UpdateTiles tiles, uint32_t first,
                    float rate) {
    const size_t tile = first + blockIdx.x, owned = tile * UPDATE_TILE + 4 * threadIdx.x;
    const UpdateRow& row = tiles.rows[tiles.row_of[tile]];
    if (row.average == MAP_NONE) {
        return; // the whole block
    }
    const Weights<T> four = weights_from(a.weights, row.params + owned, owned);
    float* at = a.average + (row.average + owned);
    Elements<float, 4> average = elements_load<4>(at);
    if (SHOWS) {
        weights_store_params(four, average);
        return;
    }
    const Elements<float, 4> x = weights_load<4>(four, 0);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        average_add_element(&average[k], x[k], rate);
    }
    elements_store(at, average);
}

// ---- launches ----

// Arguments of an update of elements.
template <class T> struct ElementsUpdate {
    const OptimizerState* state;
    const UpdateTiles* tiles;
    Weights<T> weights;
    Gradient grads;
    void* const* slots;     // (STATE_SLOTS)
    const Code8Pair* codes; // adamw8bit
    Update update;
    uint64_t seed;
};

template <class T, class G> static inline UpdateArrays_<T, G> update_arrays_(const ElementsUpdate<T>& u) {
    const UpdateArrays_<T, G> arrays = {u.weights,
                                        (const G*)u.grads.data,
                                        (float*)u.slots[STATE_M],
                                        (float*)u.slots[STATE_V],
                                        {(uint8_t*)u.slots[STATE_M8], (uint8_t*)u.slots[STATE_V8],
                                         (float*)u.slots[STATE_M_SCALE], (float*)u.slots[STATE_V_SCALE]}};
    return arrays;
}

template <class T, class G, unsigned RULES, MasterWeights MASTER>
static inline void update_launch_(const ElementsUpdate<T>& u, uint32_t first, unsigned count,
                                  const Gpu* gpu) {
    launch(update_kernel_<T, G, RULES, MASTER>, count, UPDATE_THREADS, 0, gpu, update_arrays_<T, G>(u),
           *u.tiles, first, update_numbers_(u.state, u.update), u.codes, u.seed, u.update.t);
}

template <class T, class G, MasterWeights MASTER>
static inline void update_launch_rules_(const ElementsUpdate<T>& u, uint32_t first, unsigned count,
                                        const Gpu* gpu) {
    switch (u.state->optimizer.name) {
    case OPTIMIZER_ADAMW:
        update_launch_<T, G, RULE_BIT_(ADAMW), MASTER>(u, first, count, gpu);
        break;
    case OPTIMIZER_LION:
        update_launch_<T, G, RULE_BIT_(LION), MASTER>(u, first, count, gpu);
        break;
    case OPTIMIZER_SGD:
        update_launch_<T, G, RULE_BIT_(SGD), MASTER>(u, first, count, gpu);
        break;
    case OPTIMIZER_ADAMW8BIT:
        update_launch_<T, G, RULE_BIT_(ADAMW) | RULE_BIT_(ADAMW8), MASTER>(u, first, count, gpu);
        break;
    case OPTIMIZER_MUON:
    case OPTIMIZER_SOAP:
        update_launch_<T, G, RULE_BIT_(ADAMW), MASTER>(u, first, count, gpu);
        break;
    case OPTIMIZER_ADAFACTOR: // no rule works on elements
        break;
    }
}

template <class T, class G>
static inline void update_launch_master_(const ElementsUpdate<T>& u, uint32_t first, unsigned count,
                                         const Gpu* gpu) {
    const MasterWeights master = u.state->optimizer.master;
    if (master == MASTER_NONE) {
        update_launch_rules_<T, G, MASTER_NONE>(u, first, count, gpu);
    } else if (master == MASTER_FP32) {
        update_launch_rules_<T, G, MASTER_FP32>(u, first, count, gpu);
    } else if constexpr (DTYPE_OF(T) == DTYPE_BF16) {
        if (master == MASTER_SPLIT) {
            update_launch_rules_<T, G, MASTER_SPLIT>(u, first, count, gpu);
        } else {
            update_launch_rules_<T, G, MASTER_24>(u, first, count, gpu);
        }
    }
}

// Updates tiles first ... first + count - 1.
template <class T>
static inline void update_elements(const ElementsUpdate<T>& u, uint32_t first, unsigned count,
                                   const Gpu* gpu) {
    GRADIENT_DISPATCH(u.grads, T, (update_launch_master_<T, G>(u, first, count, gpu)));
}

// Adds these weights to their average, or sets the parameters to it.
template <class T, int SHOWS>
static inline void update_average(const ElementsUpdate<T>& u, uint32_t first, unsigned count,
                                  const Gpu* gpu) {
    const AverageArrays_<T> arrays = {u.weights, (float*)u.slots[STATE_AVERAGE]};
    launch(average_kernel_<T, SHOWS>, count, UPDATE_THREADS, 0, gpu, arrays, *u.tiles, first,
           average_rate(u.state->optimizer.average, u.update.average_n));
}

#endif
