/*
optimizer.cuh -- the update of optimizer.h on the GPU: all parameters whose rule works element by
element in one launch; Adafactor, Muon and SOAP by their own (adafactor.cuh, muon.cuh, soap.cuh).

Parameters are a full array, laid out by zero_parameter_rows; in stage 3 only the kept part of it
(zero_kept_cut). Gradients hold what this rank updates of each group (zero.h), group after group:
the first owned elements. With one rank and nothing frozen these are all. The slots lie as
optimizer.h says. Updates cover the padding. Arrays start at multiples of 16 bytes.

    params    (full)      T      set; also read, except with MASTER_FP32
    grads     (updated)   T or fp32
    slots                 updated

master_weights.cuh says how weights are read and rounded.

If a rule needs whole tensors and each rank has only a part, the operands of a group (optimizer.h)
are gathered in scratch memory in fp32, group after group. With a relative rate of Adafactor, the
weights are, too.
*/
#ifndef LLMC_OPTIMIZER_CUH
#define LLMC_OPTIMIZER_CUH

#include <assert.h>
#include <limits.h>

#include "llmc/optim/adafactor.cuh"
#include "llmc/optim/adamw.cuh"
#include "llmc/optim/adamw8bit.cuh"
#include "llmc/model/freeze.h"
#include "llmc/model/model.h"
#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/lion.cuh"
#include "llmc/ops/matmul_plans.cuh"
#include "llmc/optim/muon.cuh"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/sliced_update.cuh"
#include "llmc/optim/sgd.cuh"
#include "llmc/optim/soap.cuh"
#include "llmc/optim/master_weights.cuh"
#include "llmc/parallel/zero.cuh"

#define RULE_BIT_(rule) (1u << RULE_##rule)

// ---- places ----

// Elements of a piece, which a thread block updates, four elements a thread. All are of one tensor.
// Parts of groups and their shards are whole pieces.
enum { UPDATE_PIECE_ = TENSOR_SHARD_UNIT, UPDATE_THREADS_ = UPDATE_PIECE_ / 4 };

enum { UPDATE_MATRICES_ = MODEL_PARAMETER_ROWS * TENSOR_RUNS }; // tensors of Muon or SOAP, at most

// Pieces of a group that are updated here: part number `part` of equal ones, and of the kept
// trained parameters number `in_kept`.
typedef struct {
    uint32_t count, part, in_kept;
} UpdatePart_;

// Layout in numbers of pieces.
typedef struct {
    UpdatePart_ once, block;            // of group 0, of each other group
    uint32_t trained_once;              // those of group 0 that any rank updates
    uint32_t count;                     // all that is updated here
    uint32_t first;                     // blocks without gradients
    uint32_t params_once, params_block; // kept parameters of group 0, of each other group
    uint32_t repeats;                   // consecutive layers that share a block
} UpdatePieces_;

// A piece: the row of the parameters, and the random word (state_word) of its first element, in a
// block that of block 0.
typedef struct {
    uint64_t word;
    uint64_t row;
} UpdatePieceRow_;

// The update's data for a layout of parameters: the place and the tensor of each piece, and the data of the rules' own kernels.
typedef struct {
    const OptimizerState* state;
    ZeroPlan zero;
    UpdatePieces_ pieces;
    int shares_buffer;     // only one group is updated at a time
    UpdatePieceRow_* rows; // on the GPU: pieces of group 0's trained part, then of any block's
    uint32_t* frozen;      // (groups) on the GPU: bit i, row i is not updated there; NULL: all are
    Code8Table codes;      // adamw8bit
    AdafactorPlan adafactor;
    // Adafactor's tensors in group 0, and in each other group
    AdafactorCount adafactor_once, adafactor_block;
    MuonTensor muon[UPDATE_MATRICES_];
    SlicedUpdate sliced; // Muon with tensor ranks
    SoapTensor soap[UPDATE_MATRICES_];
    int muon_tensors, soap_tensors;
    MuonGpu muon_memory;
    SoapGpu soap_memory;
    // gathered operands and weights of the group being updated; NULL: not gathered
    float *operands, *weights;
} OptimizerPlan;

static inline size_t update_rows_count_(const ZeroPlan* zero) {
    return (zero->trained_once + zero->trained_block) / UPDATE_PIECE_;
}

// Sets the pieces that begin with row i. A later row of the same group takes its part of them, so
// padding belongs to the tensor before it.
static inline void update_set_row_(UpdatePieceRow_* rows, const OptimizerState* s, const ZeroPlan* zero,
                                   const TensorRow* gradient, int i) {
    const int is_once = gradient->place == PLACE_ONCE;
    const size_t begin = gradient->offset_bytes / UPDATE_PIECE_,
                 room = tensor_room_(gradient) / UPDATE_PIECE_,
                 end = is_once ? zero->trained_once / UPDATE_PIECE_ : update_rows_count_(zero);
    assert(gradient->offset_bytes % UPDATE_PIECE_ == 0);
    for (size_t p = 0; p < end - begin; p++) {
        const size_t copy = is_once ? p / room : 0;
        rows[begin + p].row = (uint64_t)i;
        rows[begin + p].word = state_word(s, i, (int)copy) + (p - copy * room) * UPDATE_PIECE_;
    }
}

static inline void update_set_rows_(UpdatePieceRow_* rows, const OptimizerState* s, const ZeroPlan* zero) {
    TensorRow gradients[MODEL_PARAMETER_ROWS];
    zero_gradient_rows(gradients, zero, s->cfg, 1);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (zero_has_row(zero, i) && !tensor_is_absent(&gradients[i])) {
            update_set_row_(rows, s, zero, &gradients[i], i);
        }
    }
}

// Returns the part that is updated here of groups like g, with so many trained elements.
static inline UpdatePart_ update_part_(const ZeroPlan* zero, int g, size_t trained) {
    const ZeroCut own = zero_owned_cut(zero, g);
    const UpdatePart_ part = {(uint32_t)(trained / ((size_t)own.parts * UPDATE_PIECE_)), (uint32_t)own.part,
                              (uint32_t)zero_owned_in_kept(zero, g).part};
    return part;
}

static inline UpdatePieces_ update_pieces_(const ZeroPlan* zero, ModelConfig cfg) {
    const size_t kept = (size_t)zero_kept_cut(zero).parts * UPDATE_PIECE_,
                 count = zero_count(zero, ZERO_UPDATED) / UPDATE_PIECE_;
    CHECK(count <= INT_MAX, "%zu pieces of parameters are too many for a launch", count);
    const UpdatePieces_ pieces = {update_part_(zero, 0, zero->trained_once),
                                  update_part_(zero, 1, zero->trained_block),
                                  (uint32_t)(zero->trained_once / UPDATE_PIECE_),
                                  (uint32_t)count,
                                  (uint32_t)zero->first_block,
                                  (uint32_t)(zero->once / kept),
                                  (uint32_t)(zero->block / kept),
                                  (uint32_t)model_copy_repeats(cfg)};
    return pieces;
}

// A row in group g: its start in the group; the elements that this rank updates; the place of the
// first of them in the kept parameters, and in owned arrays such as the gradient.
typedef struct {
    size_t start, begin, end, kept, owned;
} UpdateTensorPlace_;

static inline UpdateTensorPlace_ update_tensor_place_(const OptimizerState* s, const ZeroPlan* zero, int i,
                                                      int g) {
    const TensorRow* row = &s->rows[i];
    const ZeroPiece piece = zero_piece(zero, g, ZERO_TRAINED);
    const size_t at = row->offset_bytes + (size_t)tensor_group_copy(g) * row->layer_bytes,
                 elements = model_rows_in_files(row, s->cfg) * row->cols, in_piece = s->span[i].begin;
    const size_t begin = piece.full + in_piece > at ? piece.full + in_piece - at : 0,
                 end = begin + s->span[i].count;
    const UpdateTensorPlace_ place = {at - zero_group_begin(zero, g), begin < elements ? begin : elements,
                                      end < elements ? end : elements, piece.kept + in_piece,
                                      piece.owned + in_piece};
    return place;
}

// Returns the place of a row in group g in a slot.
static inline size_t update_slot_place_(const OptimizerState* s, int slot, int i, int g) {
    return state_group_begin(&s->slots[slot], g) + s->slots[slot].begin[i];
}

static inline AdafactorTensor update_adafactor_tensor_(const OptimizerState* s, const ZeroPlan* zero, int i,
                                                       int g) {
    const TensorRow* row = &s->rows[i];
    const UpdateTensorPlace_ place = update_tensor_place_(s, zero, i, g);
    const AdafactorTensor tensor = {place.begin,
                                    place.end,
                                    place.kept,
                                    place.owned,
                                    update_slot_place_(s, STATE_M, i, g),
                                    zero_is_divided(zero) ? place.start : place.owned,
                                    update_slot_place_(s, STATE_ROWS, i, g),
                                    update_slot_place_(s, STATE_COLS, i, g),
                                    update_slot_place_(s, STATE_V, i, g),
                                    row->stream,
                                    state_word(s, i, tensor_group_copy(g)),
                                    (int)model_rows_in_files(row, s->cfg),
                                    (int)row->cols,
                                    s->factors[i].rate,
                                    s->factors[i].decay,
                                    0};
    return tensor;
}

// True with --update-in-backward: below stage 2 blocks share a buffer of gradients for no other
// reason.
static inline int update_is_in_backward_(const ZeroPlan* zero) {
    return zero->shares_buffer && zero->stage < 2;
}

// True if this rank updates any part of a row in group g by Adafactor.
static inline int update_has_adafactor_(const OptimizerState* s, const ZeroPlan* zero, int i, int g) {
    return tensor_is_in_group(&s->rows[i], g) && s->rule[i] != RULE_NONE && s->span[i].count > 0 &&
           zero_has_gradient(zero, g);
}

// Allocates and sets all tensors of Adafactor, group after group; returns their number. Groups that
// are updated in the backward pass are apart.
static inline int update_adafactor_tensors_(AdafactorTensor** tensors, const OptimizerState* s,
                                            const ZeroPlan* zero) {
    int count = 0;
    *tensors = (AdafactorTensor*)check_alloc((size_t)zero_max_ranges(s->cfg), sizeof(AdafactorTensor),
                                             "tensors of an update");
    for (int g = 0; g < model_groups(s->cfg); g++) {
        const int begin = count;
        for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
            if (update_has_adafactor_(s, zero, i, g)) {
                (*tensors)[count] = update_adafactor_tensor_(s, zero, i, g);
                (*tensors)[count].is_apart = update_is_in_backward_(zero) && count == begin;
                count++;
            }
        }
    }
    return count;
}

// Returns the place of a row's first layer in a slot, as if it existed; each next layer is one
// block further.
static inline size_t update_slot_first_(const OptimizerState* s, int slot, int i) {
    const StateSlot* of = &s->slots[slot];
    return (s->rows[i].place == PLACE_BLOCK ? state_blocks_begin(of) : 0) + of->begin[i];
}

// Maps an element of a row (`begin` or `end`) to the run of `count` elements that starts at `at`.
static inline size_t update_in_run_(size_t element, size_t at, size_t count) {
    const size_t in_run = element > at ? element - at : 0;
    return in_run < count ? in_run : count;
}

// Returns equal matrices of a row, of all layers, with the places of Muon's state.
static inline MuonTensor update_muon_tensor_(const OptimizerState* s, const ZeroPlan* zero, int i,
                                             TensorRun run) {
    const TensorRow* row = &s->rows[i];
    const int is_block = row->place == PLACE_BLOCK,
              frozen = is_block ? zero->first_block : 0; // layers
    const UpdateTensorPlace_ place = update_tensor_place_(s, zero, i, is_block + frozen);
    const size_t kept = zero->block / (size_t)zero_kept_cut(zero).parts,
                 owned = zero->trained_block / (size_t)zero_owned_cut(zero, 1).parts;
    // of the run in the row; of what this rank updates of it, in the run and in the row's
    const size_t at = run.first * row->cols, count = (size_t)run.count * run.rows * row->cols,
                 begin = update_in_run_(place.begin, at, count), end = update_in_run_(place.end, at, count),
                 skipped = at + begin - place.begin;
    // of layer 0 as if it existed
    const MuonPlace of_owned = {place.owned - (size_t)frozen * owned + skipped, owned};
    const MuonTensor tensor = {begin,
                               end,
                               {place.kept - (size_t)frozen * kept + skipped, kept},
                               of_owned,
                               of_owned,
                               {update_slot_first_(s, STATE_M, i) + skipped, s->slots[STATE_M].block},
                               {update_slot_first_(s, STATE_ROWS, i) + run.first, s->slots[STATE_ROWS].block},
                               row->layers,
                               run.count,
                               (int)run.rows,
                               (int)row->cols,
                               is_block,
                               place.start + at,
                               {state_word(s, i, 0) + at, (size_t)row->repeats << STATE_WORD_LAYER},
                               row->stream,
                               row->decay,
                               s->optimizer.by_block || zero_is_divided(zero)};
    return tensor;
}

// Returns the same for SOAP: run `run` of row i. A gathered gradient has one layer at a time.
static inline SoapTensor update_soap_tensor_(const OptimizerState* s, const ZeroPlan* zero, int i, int run) {
    SoapTensor t;
    const TensorRun matrices = tensor_run(&s->rows[i], run);
    const size_t at = matrices.first * s->rows[i].cols,
                 left = state_square_begin(s, SLOT_ROWS_SQUARE, i, run),
                 right = state_square_begin(s, SLOT_COLS_SQUARE, i, run);
    t.row = i;
    t.matrices = update_muon_tensor_(s, zero, i, matrices);
    if (zero_is_divided(zero)) {
        t.matrices.grads = MuonPlace{t.matrices.start, 0};
    }
    t.moments[0] = MuonPlace{update_slot_first_(s, STATE_M, i) + at, s->slots[STATE_M].block};
    t.moments[1] = MuonPlace{update_slot_first_(s, STATE_V, i) + at, s->slots[STATE_V].block};
    t.left = MuonPlace{update_slot_first_(s, STATE_LEFT, i) + left, s->slots[STATE_LEFT].block};
    t.right = MuonPlace{update_slot_first_(s, STATE_RIGHT, i) + right, s->slots[STATE_RIGHT].block};
    t.has_left = state_square(s, SLOT_ROWS_SQUARE, i, run) > 0;
    t.has_right = state_square(s, SLOT_COLS_SQUARE, i, run) > 0;
    return t;
}

// Sets all tensors of SOAP; returns their number.
static inline int update_soap_tensors_(SoapTensor tensors[UPDATE_MATRICES_], const OptimizerState* s,
                                       const ZeroPlan* zero) {
    int count = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int run = 0; run < tensor_runs(&s->rows[i]) && s->rule[i] == RULE_SOAP; run++) {
            tensors[count++] = update_soap_tensor_(s, zero, i, run);
        }
    }
    return count;
}

// Sets a tensor for each matrix of Muon in this rank, or for each whole matrix; returns their
// number.
static inline int update_sliced_tensors_(MuonTensor tensors[UPDATE_MATRICES_], const OptimizerState* s,
                                         const ZeroPlan* zero, int is_whole) {
    int count = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int m = 0; m < tensor_matrices(&s->rows[i]) && s->rule[i] == RULE_MUON; m++) {
            const TensorRun whole = tensor_matrix(&s->whole[i], m);
            tensors[count++] = is_whole ? sliced_muon_tensor(whole.rows, s->whole[i].cols)
                                        : update_muon_tensor_(s, zero, i, tensor_matrix(&s->rows[i], m));
        }
    }
    return count;
}

// Sets all tensors of Muon; returns their number.
static inline int update_muon_tensors_(MuonTensor tensors[UPDATE_MATRICES_], const OptimizerState* s,
                                       const ZeroPlan* zero) {
    int count = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int run = 0; run < tensor_runs(&s->rows[i]) && s->rule[i] == RULE_MUON; run++) {
            tensors[count++] = update_muon_tensor_(s, zero, i, tensor_run(&s->rows[i], run));
        }
    }
    return count;
}

// Returns the elements of the largest operand of a group.
static inline size_t update_operand_elements_(const OptimizerState* state, const ZeroPlan* zero) {
    size_t most = 0;
    for (int g = 0; g < zero->groups; g++) {
        const size_t all = zero_trained_elements(zero, g),
                     elements = optimizer_needs_slices(state, zero, g) || optimizer_gathers(state, zero, g)
                                    ? all
                                    : 0;
        most = elements > most ? elements : most;
    }
    return most;
}

template <class T>
static inline void update_open_rules_(OptimizerPlan* plan, Memory* memory, const ZeroPlan* zero) {
    const OptimizerName name = plan->state->optimizer.name;
    AdafactorTensor* tensors;
    if (name == OPTIMIZER_ADAMW8BIT) {
        code8_table_open(&plan->codes, memory);
    } else if (name == OPTIMIZER_MUON && model_is_cut(plan->state->cfg)) {
        MuonTensor whole[UPDATE_MATRICES_];
        plan->muon_tensors = update_sliced_tensors_(plan->muon, plan->state, zero, 0);
        muon_open<T>(&plan->muon_memory, memory, whole, update_sliced_tensors_(whole, plan->state, zero, 1));
        sliced_update_open(&plan->sliced, memory, plan->state, zero);
    } else if (name == OPTIMIZER_MUON) {
        plan->muon_tensors = update_muon_tensors_(plan->muon, plan->state, zero);
        muon_open<T>(&plan->muon_memory, memory, plan->muon, plan->muon_tensors);
    } else if (name == OPTIMIZER_SOAP) {
        plan->soap_tensors = update_soap_tensors_(plan->soap, plan->state, zero);
        soap_open(&plan->soap_memory, memory, plan->soap, plan->soap_tensors);
    } else if (name == OPTIMIZER_ADAFACTOR) {
        const int count = update_adafactor_tensors_(&tensors, plan->state, zero),
                  blocks = zero->groups - 1 - zero->first_block;
        int once = 0; // how many are in group 0
        for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
            once += update_has_adafactor_(plan->state, zero, i, 0);
        }
        plan->adafactor_once = adafactor_count(tensors, once);
        plan->adafactor_block = adafactor_count(tensors + once, blocks > 0 ? (count - once) / blocks : 0);
        adafactor_open(&plan->adafactor, memory, tensors, count);
        free(tensors);
    }
}

static inline void update_open_operands_(OptimizerPlan* plan, Memory* memory) {
    const size_t bytes = update_operand_elements_(plan->state, &plan->zero) * sizeof(float);
    if (bytes > 0) {
        plan->operands = (float*)memory_take(memory, "scratch: operands of an update", MEMORY_DEVICE, bytes);
    }
    if (bytes > 0 && plan->state->optimizer.sums_weights) {
        plan->weights = (float*)memory_take(memory, "scratch: weights of an update", MEMORY_DEVICE, bytes);
    }
}

static inline void update_open_rows_(OptimizerPlan* plan, Memory* memory) {
    const size_t bytes = update_rows_count_(&plan->zero) * sizeof(UpdatePieceRow_);
    plan->rows = (UpdatePieceRow_*)memory_take(memory, "scratch: tensors of an update", MEMORY_DEVICE, bytes);
    if (!memory_is_dry(memory)) {
        UpdatePieceRow_* rows = (UpdatePieceRow_*)check_alloc(bytes, 1, "tensors of an update");
        update_set_rows_(rows, plan->state, &plan->zero);
        gpu_upload(plan->rows, rows, bytes);
        free(rows);
    }
}

// Opens the plan for parameters of T. `state` has the same shards, and stays with the caller.
template <class T>
static inline void optimizer_open(OptimizerPlan* plan, Memory* memory, const ZeroPlan* zero,
                                  const OptimizerState* state) {
    memset((void*)plan, 0, sizeof(*plan));
    plan->state = state;
    plan->zero = *zero;
    plan->pieces = update_pieces_(zero, state->cfg);
    plan->shares_buffer = update_is_in_backward_(zero);
    update_open_rows_(plan, memory);
    update_open_operands_(plan, memory);
    update_open_rules_<T>(plan, memory, zero);
}

// Makes updates leave frozen parameters unchanged. Call it after optimizer_open.
static inline void optimizer_freeze(OptimizerPlan* plan, Memory* memory, const Freeze* freeze) {
    const ModelConfig cfg = plan->state->cfg;
    const size_t bytes = (size_t)model_groups(cfg) * sizeof(uint32_t);
    plan->frozen = (uint32_t*)memory_take(memory, "scratch: frozen parameters", MEMORY_DEVICE, bytes);
    if (memory_is_dry(memory)) {
        return;
    }
    uint32_t* frozen = (uint32_t*)check_alloc(bytes, 1, "frozen parameters");
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int l = 0; l < cfg.L; l++) {
            const int g = plan->state->rows[i].place == PLACE_BLOCK ? model_group(cfg, l) : 0;
            frozen[g] |= (uint32_t)freeze_has(freeze, i, l) << i;
        }
    }
    gpu_upload(plan->frozen, frozen, bytes);
    free(frozen);
}

// Chooses the algorithms of an update's matmuls, before the first update. All ranks choose
// together, though each updates other tensors.
template <class T> static inline void optimizer_choose_matmuls(OptimizerPlan* plan, MatmulGpu* matmul) {
    MuonTensor whole[UPDATE_MATRICES_];
    const MuonTensor* muon = plan->muon;
    if (model_is_cut(plan->state->cfg)) {
        update_sliced_tensors_(whole, plan->state, &plan->zero, 1);
        muon = whole;
    }
    for (int i = 0; i < plan->muon_tensors; i++) {
        muon_choose_matmuls<T>(&plan->muon_memory, &muon[i], matmul);
    }
    for (int i = 0; i < plan->soap_tensors; i++) {
        soap_choose_matmuls(&plan->soap_memory, &plan->soap[i], matmul);
    }
}

// The place of a piece of the owned arrays.
typedef struct {
    uint32_t full; // number of the piece in the parameters
    uint32_t group;
    uint32_t own;   // pieces of this rank before it in its group
    uint32_t rows;  // pieces before it in OptimizerPlan.rows
    uint64_t words; // random words: distance from block 0 to this one
} UpdatePlace_;

__device__ inline UpdatePlace_ update_place_(const UpdatePieces_& p, uint32_t piece) {
    // among those with gradients
    const int is_once = piece < p.once.count;
    const UpdatePart_ part = is_once ? p.once : p.block;
    const uint32_t block = is_once ? 0 : (piece - p.once.count) / p.block.count;
    const uint32_t group = is_once ? 0 : 1 + p.first + block;
    const uint32_t own = is_once ? piece : piece - p.once.count - block * p.block.count;
    const uint32_t kept = is_once ? 0 : p.params_once + (group - 1) * p.params_block;
    const uint64_t words = is_once ? 0 : (uint64_t)((group - 1) * p.repeats) << STATE_WORD_LAYER;
    const UpdatePlace_ place = {kept + part.in_kept * part.count + own, group, own,
                                (is_once ? 0 : p.trained_once) + part.part * part.count + own, words};
    return place;
}

// Locates a row's elements in a slot. `first` is the position of the first element of this rank's
// part of group 0 or 1, as if it belonged to the row; `step` is the distance to the next group.
// `first` may be below 0: it then wraps around, and its sum with an element is right again.
typedef struct {
    size_t first, step;
} UpdateShift_;

// Return the slots of a rule's moments. ADAMW8's scales lie as its codes do, divided by the size of
// a block.
static inline int update_slot_of_m_(UpdateRule rule) { return rule == RULE_ADAMW8 ? STATE_M8 : STATE_M; }
static inline int update_slot_of_v_(UpdateRule rule) { return rule == RULE_ADAMW8 ? STATE_V8 : STATE_V; }

static inline UpdateShift_ update_shift_(const OptimizerState* s, int row, int slot) {
    const UpdateShift_ shift = {update_slot_first_(s, slot, row) - s->span[row].begin, s->slots[slot].block};
    return shift;
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

// Rules of rows, and the places of their moments.
typedef struct {
    uint8_t rule[MODEL_PARAMETER_ROWS];
    UpdateShift_ m[MODEL_PARAMETER_ROWS], v[MODEL_PARAMETER_ROWS];
    uint64_t streams[MODEL_PARAMETER_ROWS]; // of random words
} UpdateSlots_;

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

static inline UpdateSlots_ update_slots_(const OptimizerState* state) {
    UpdateSlots_ slots;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        slots.rule[i] = (uint8_t)state->rule[i];
        slots.m[i] = update_shift_(state, i, update_slot_of_m_(state->rule[i]));
        slots.v[i] = update_shift_(state, i, update_slot_of_v_(state->rule[i]));
        slots.streams[i] = state->rows[i].stream;
    }
    return slots;
}

// Returns the weights and gradients of a thread's four elements. The compiler knows the kind of
// master weights, so the others take no registers.
template <class T, class G, MasterWeights MASTER>
__device__ inline UpdateArrays_<T, G> update_four_of_(const UpdateArrays_<T, G>& a, const UpdatePlace_& place,
                                                      size_t owned) {
    const size_t full = (size_t)place.full * UPDATE_PIECE_ + 4 * threadIdx.x;
    UpdateArrays_<T, G> four = a;
    four.weights.kind = MASTER;
    four.weights.params += full;
    four.weights.master = (char*)a.weights.master + owned * master_bytes(MASTER);
    four.grads += owned;
    return four;
}

// Returns the words for the stochastic rounding of four elements of a piece, in a block `words`
// after those of block 0.
__device__ inline RoundingWords update_words_(const UpdatePieceRow_& piece, uint64_t words,
                                              const UpdateSlots_& slots, uint64_t seed, int64_t t) {
    return rounding_words(seed, slots.streams[piece.row], t, piece.word + words + 4 * threadIdx.x);
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

// A thread updates four elements, a block of threads a piece: 16-byte accesses to fp32 data, 8-byte
// to 16-bit data, coalesced. Everything is loaded before anything is computed. Rows whose rule is not one of RULES are skipped: other
// kernels update them, or they are frozen.
// grid   pieces, from piece `first` on      block   256      shared   2 KiB with moments in 8 bits
// moves  optimizer_bytes, less the rows that it skips. Bound by memory: Philox takes some 30
//        instructions an element, the rest some 50, together less than half of what an H100 can
//        issue in the time. In 8 bits encoding takes some 40 more, an element and moment.
// order  every element, or block of 64 in 8 bits, on its own
template <class T, class G, unsigned RULES, MasterWeights MASTER>
__global__ void __launch_bounds__(UPDATE_THREADS_)
    update_kernel_(const __grid_constant__ UpdateArrays_<T, G> a, const UpdatePieceRow_* rows,
                   const uint32_t* frozen, const __grid_constant__ UpdatePieces_ pieces, uint32_t first,
                   const __grid_constant__ UpdateNumbers_ numbers, const __grid_constant__ UpdateSlots_ slots,
                   const Code8Pair* table, uint64_t seed, int64_t t) {
    constexpr bool IN_8 = (RULES & RULE_BIT_(ADAMW8)) != 0;
    SMEM_ARRAY(Code8Pair, codes, [IN_8 ? 256 : 1]);
    const uint32_t piece = first + blockIdx.x;
    const UpdatePlace_ place = update_place_(pieces, piece);
    const size_t in_piece = 4 * threadIdx.x, owned = (size_t)piece * UPDATE_PIECE_ + in_piece,
                 own = (size_t)place.own * UPDATE_PIECE_ + in_piece;
    const UpdatePieceRow_ of = rows[place.rows];
    const int row = (int)of.row, rule = slots.rule[row];
    const size_t groups = place.group > 0 ? place.group - 1 : 0;
    if (IN_8) {
        code8_table_load(codes, table);
    }
    if (!(RULES >> rule & 1) || (frozen && frozen[place.group] >> row & 1)) {
        return; // the whole block
    }
    const UpdateRates rates = numbers.rates[row];
    const UpdateArrays_<T, G> four = update_four_of_<T, G, MASTER>(a, place, owned);
    const size_t m = slots.m[row].first + groups * slots.m[row].step + own,
                 v = slots.v[row].first + groups * slots.v[row].step + own;
    const Elements<G, 4> g = elements_load<4>(four.grads);
    Elements<float, 4> x = weights_load<4>(four.weights, 0);
    if ((RULES & RULE_BIT_(ADAMW)) && rule == RULE_ADAMW) {
        adamw_four(&x, g, a.m + m, a.v + v, rates, numbers.scalars);
    } else if (IN_8) {
        adamw8bit_four_(&x, g, a.in_8, m, codes, rates, numbers.scalars);
    } else if (RULES & RULE_BIT_(LION)) {
        lion_four(&x, g, a.m + m, rates, numbers.scalars);
    } else if (RULES & RULE_BIT_(SGD)) {
        sgd_four(&x, g, a.m ? a.m + m : NULL, rates, numbers.scalars);
    }
    weights_store(four.weights, 0, x, update_words_(of, place.words, slots, seed, t));
}

// ---- the average of the weights ----

// Rows that have an average, and its places.
typedef struct {
    uint8_t has[MODEL_PARAMETER_ROWS];
    UpdateShift_ at[MODEL_PARAMETER_ROWS];
} UpdateAverage_;

static inline UpdateAverage_ update_average_(const OptimizerState* s) {
    UpdateAverage_ average = {};
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        average.has[i] = (uint8_t)state_slot_has(s, STATE_AVERAGE, i);
        if (average.has[i]) {
            average.at[i] = update_shift_(s, i, STATE_AVERAGE);
        }
    }
    return average;
}

// Arrays of an average, of which only a part may exist.
template <class T> struct AverageArrays_ {
    Weights<T> weights;
    float* average;
};

// A thread adds four weights to their average, or sets the parameters to it (SHOWS). Pieces and
// rows are those of update_kernel_.
// grid   pieces, from piece `first` on      block   256      shared   none
// moves  the weights in and the average in and out; SHOWS: the average in, T out. Bound by memory.
// order  every element on its own
template <class T, int SHOWS>
__global__ void __launch_bounds__(UPDATE_THREADS_)
    average_kernel_(const __grid_constant__ AverageArrays_<T> a, const UpdatePieceRow_* rows,
                    const __grid_constant__ UpdatePieces_ pieces, uint32_t first,
                    const __grid_constant__ UpdateAverage_ places, float rate) {
    const uint32_t piece = first + blockIdx.x;
    const UpdatePlace_ place = update_place_(pieces, piece);
    const size_t in_piece = 4 * threadIdx.x, own = (size_t)place.own * UPDATE_PIECE_ + in_piece,
                 groups = place.group > 0 ? place.group - 1 : 0;
    const int row = (int)rows[place.rows].row;
    if (!places.has[row]) {
        return; // the whole block
    }
    const Weights<T> four = weights_from(a.weights, (size_t)place.full * UPDATE_PIECE_ + in_piece,
                                         (size_t)piece * UPDATE_PIECE_ + in_piece);
    float* at = a.average + (places.at[row].first + groups * places.at[row].step + own);
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
    ZeroGpu* zero;     // gathers operands
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

template <class T> static inline Weights<T> update_weights_(const OptimizerUpdate<T>& u) {
    const MasterWeights master = u.plan->state->optimizer.master;
    const int slot = state_master_slot(master);
    const Weights<T> weights = {u.params, slot < STATE_SLOTS ? u.slots[slot] : NULL, master};
    return weights;
}

template <class T, class G> static inline UpdateArrays_<T, G> update_arrays_(const OptimizerUpdate<T>& u) {
    const UpdateArrays_<T, G> arrays = {update_weights_(u),
                                        (const G*)u.grads.data,
                                        (float*)u.slots[STATE_M],
                                        (float*)u.slots[STATE_V],
                                        {(uint8_t*)u.slots[STATE_M8], (uint8_t*)u.slots[STATE_V8],
                                         (float*)u.slots[STATE_M_SCALE], (float*)u.slots[STATE_V_SCALE]}};
    return arrays;
}

template <class T, class G, unsigned RULES, MasterWeights MASTER>
static inline void update_launch_(const OptimizerUpdate<T>& u, uint32_t first, unsigned count,
                                  const Gpu* gpu) {
    launch(update_kernel_<T, G, RULES, MASTER>, count, UPDATE_THREADS_, 0, gpu, update_arrays_<T, G>(u),
           u.plan->rows, u.plan->frozen, u.plan->pieces, first, update_numbers_(u.plan->state, u.update),
           update_slots_(u.plan->state), u.plan->codes.values, u.seed, u.update.t);
}

// ---- rules that need whole tensors

// Groups first ... end-1.
typedef struct {
    int first, end;
} UpdateGroups_;

// Returns the groups within owned elements `first` ... first + count - 1. Frozen blocks may be
// among them.
static inline UpdateGroups_ update_groups_(const OptimizerPlan* plan, size_t first, size_t count) {
    UpdateGroups_ groups = {0, 0};
    for (int g = 0; g < plan->zero.groups; g++) {
        const ZeroPiece piece = zero_piece(&plan->zero, g, ZERO_TRAINED);
        if (piece.count > 0 && first <= piece.owned && piece.owned + piece.count <= first + count) {
            groups.first = groups.end == 0 ? g : groups.first;
            groups.end = g + 1;
        }
    }
    return groups;
}

template <class T> static inline MuonUpdate<T> update_muon_of_(const OptimizerUpdate<T>& u) {
    const MuonUpdate<T> muon = {update_weights_(u),
                                u.grads,
                                (float*)u.slots[STATE_M],
                                (float*)u.slots[STATE_ROWS],
                                (MuonGpu*)&u.plan->muon_memory,
                                update_muon(u.update),
                                u.update.t,
                                u.seed,
                                u.matmul,
                                u.plan->operands};
    return muon;
}

// Returns the trained layers of some matrices in some groups: first < end if it has any.
static inline UpdateGroups_ update_layers_(const OptimizerPlan* plan, const MuonTensor* t,
                                           UpdateGroups_ groups) {
    const int trained = t->group > 0 ? plan->zero.first_block : 0;
    const UpdateGroups_ layers = {int_max(groups.first - t->group, trained),
                                  int_min(groups.end - t->group, t->layers)};
    return layers;
}

template <class T>
static inline void update_muon_rows_(const OptimizerUpdate<T>& u, UpdateGroups_ groups, const Gpu* gpu) {
    for (int i = 0; i < u.plan->muon_tensors; i++) {
        const UpdateGroups_ layers = update_layers_(u.plan, &u.plan->muon[i], groups);
        if (layers.first < layers.end) {
            muon_update(&u.plan->muon[i], update_muon_of_(u), layers.first, layers.end, gpu);
        }
    }
}

// ---- Muon with tensor ranks ----

// Sets the operands of group g at `operands`.
template <class T>
static inline void update_sliced_operands_(OptimizerUpdate<T> u, int g, float* operands, const Gpu* gpu) {
    MuonUpdate<T> muon = update_muon_of_(u);
    muon.u = operands;
    for (int i = 0; i < u.plan->muon_tensors; i++) {
        muon_operand(&u.plan->muon[i], muon, g - u.plan->muon[i].group, gpu);
    }
    if (zero_is_divided(&u.plan->zero)) {
        zero_gather_operands(u.zero, operands, g);
    }
}

// Moves this rank's part of a matrix.
template <class T>
static inline void update_sliced_move_(const OptimizerUpdate<T>& u, const MuonTensor* t,
                                       const SlicedMatrix* x, const Gpu* gpu) {
    const MuonUpdate<T> muon = update_muon_of_(u);
    const float rate = muon.opt.lr * muon_factor(muon.opt, x->whole.rows, x->t.whole->cols);
    const MuonMove move = {rate, t->decay ? 1.0f - muon.opt.lr * muon.opt.weight_decay : 1.0f, muon.opt.decay,
                           u.seed, muon.t};
    if (t->begin < t->end) {
        muon_move(t, muon.weights, (const float*)u.plan->sliced.operands + t->start, move,
                  x->t.group - t->group, gpu);
    }
}

// Updates the matrices of group g by Muon.
template <class T>
static inline void update_sliced_layer_(const OptimizerUpdate<T>& u, int g, const Gpu* gpu) {
    SlicedUpdate* sliced = (SlicedUpdate*)&u.plan->sliced;
    int k = 0;
    sliced->operands = u.plan->operands;
    update_sliced_operands_(u, g, sliced->operands, gpu);
    sliced_muon(sliced, g, update_muon_of_(u), &u.zero->groups->tensor, gpu);
    for (int row = 0; row < MODEL_PARAMETER_ROWS; row++) {
        for (int m = 0;
             m < tensor_matrices(&sliced->state->rows[row]) && sliced->state->rule[row] == RULE_MUON; m++) {
            const SlicedMatrix x = sliced_matrix(sliced, row, g, m);
            update_sliced_move_(u, &u.plan->muon[k++], &x, gpu);
        }
    }
}

template <class T> static inline void update_sliced_layers_(const OptimizerUpdate<T>& u, const Gpu* gpu) {
    const ZeroPlan* zero = &u.plan->zero;
    for (int g = 1; g < zero->groups; g++) {
        if (optimizer_needs_slices(u.plan->state, zero, g)) {
            update_sliced_layer_(u, g, gpu);
        }
    }
}

// Returns the gradient of whole tensors: gathered, or this rank's own.
template <class T> static inline Gradient update_whole_gradient_(const OptimizerUpdate<T>& u) {
    const Gradient operands = {u.plan->operands, DTYPE_FP32};
    return u.plan->operands ? operands : u.grads;
}

// Returns the arguments of SOAP for a row.
template <class T> static inline SoapUpdate<T> update_soap_of_(const OptimizerUpdate<T>& u, int row) {
    const SoapUpdate<T> soap = {update_weights_(u),
                                update_whole_gradient_(u),
                                (float*)u.slots[STATE_M],
                                (float*)u.slots[STATE_V],
                                {(float*)u.slots[STATE_LEFT], (float*)u.slots[STATE_LEFT_BASIS]},
                                {(float*)u.slots[STATE_RIGHT], (float*)u.slots[STATE_RIGHT_BASIS]},
                                (SoapGpu*)&u.plan->soap_memory,
                                update_soap(update_of_row(u.update, u.plan->state, row)),
                                u.seed,
                                u.matmul};
    return soap;
}

template <class T>
static inline void update_soap_rows_(const OptimizerUpdate<T>& u, UpdateGroups_ groups, const Gpu* gpu) {
    for (int i = 0; i < u.plan->soap_tensors; i++) {
        const SoapTensor* t = &u.plan->soap[i];
        const UpdateGroups_ layers = update_layers_(u.plan, &t->matrices, groups);
        soap_update(t, update_soap_of_(u, t->row), layers.first, layers.end, gpu);
    }
}

template <class T>
static inline void update_muon_operands_(const OptimizerUpdate<T>& u, int g, const Gpu* gpu) {
    for (int i = 0; i < u.plan->muon_tensors; i++) {
        const UpdateGroups_ group = {g, g + 1}, layers = update_layers_(u.plan, &u.plan->muon[i], group);
        if (layers.first < layers.end) {
            muon_operand(&u.plan->muon[i], update_muon_of_(u), layers.first, gpu);
        }
    }
}

// Counts the tensors of Adafactor before group g.
static inline AdafactorCount update_adafactor_before_(const OptimizerPlan* plan, int g) {
    const AdafactorCount once = plan->adafactor_once, block = plan->adafactor_block, none = {0, 0, 0};
    const int blocks = int_max(g - 1 - plan->zero.first_block, 0);
    const AdafactorCount before = {once.matrices + blocks * block.matrices,
                                   once.vectors + blocks * block.vectors, once.tiles + blocks * block.tiles};
    return g == 0 ? none : before;
}

template <class T>
static inline void update_adafactor_rows_(const OptimizerUpdate<T>& u, UpdateGroups_ groups, const Gpu* gpu) {
    const AdafactorCount begin = update_adafactor_before_(u.plan, groups.first),
                         end = update_adafactor_before_(u.plan, groups.end);
    const AdafactorCount these = {end.matrices - begin.matrices, end.vectors - begin.vectors,
                                  end.tiles - begin.tiles};
    assert(!u.plan->shares_buffer || groups.end - groups.first == 1);
    adafactor_update(AdafactorUpdate<T>{update_weights_(u), update_whole_gradient_(u),
                                        (float*)u.slots[STATE_ROWS], (float*)u.slots[STATE_COLS],
                                        (float*)u.slots[STATE_V], (float*)u.slots[STATE_M],
                                        &u.plan->adafactor, update_adafactor(u.update), u.seed, begin, these,
                                        u.plan->weights},
                     gpu);
}

// Sets this rank's part of the operands of group g for Adafactor and SOAP: the gradient, and the
// weights if they are summed up.
template <class T>
static inline void update_gradient_operands_(const OptimizerUpdate<T>& u, int g, const Gpu* gpu) {
    const ZeroPiece piece = zero_piece(&u.plan->zero, g, ZERO_TRAINED);
    const size_t in_group = piece.full - zero_group_begin(&u.plan->zero, g);
    CUDA_CHECK(cudaMemcpyAsync(u.plan->operands + in_group, (const float*)u.grads.data + piece.owned,
                               piece.count * sizeof(float), cudaMemcpyDefault, gpu->stream));
    if (u.plan->weights) {
        const Weights<T> own = weights_from(update_weights_(u), piece.kept, piece.owned);
        weights_widen(u.plan->weights + in_group, own, piece.count, gpu);
    }
}

// Gathers the operands of group g from all ranks.
template <class T> static inline void update_gather_(const OptimizerUpdate<T>& u, int g, const Gpu* gpu) {
    assert(u.grads.dtype == DTYPE_FP32 && gpu->stream == u.zero->main.stream);
    if (u.plan->state->optimizer.name == OPTIMIZER_MUON) {
        update_muon_operands_(u, g, gpu);
    } else {
        update_gradient_operands_(u, g, gpu);
    }
    zero_gather_operands(u.zero, u.plan->operands, g);
    if (u.plan->weights) {
        zero_gather_operands(u.zero, u.plan->weights, g);
    }
}

template <class T>
static inline void update_groups_rows_(const OptimizerUpdate<T>& u, UpdateGroups_ groups, const Gpu* gpu) {
    if (u.plan->state->optimizer.name == OPTIMIZER_MUON) {
        update_muon_rows_(u, groups, gpu);
    } else if (u.plan->state->optimizer.name == OPTIMIZER_SOAP) {
        update_soap_rows_(u, groups, gpu);
    } else {
        update_adafactor_rows_(u, groups, gpu);
    }
}

// Updates all rows of these groups whose rule needs whole tensors: all together, or group after
// group if operands are gathered.
template <class T>
static inline void update_tensors_(const OptimizerUpdate<T>& u, UpdateGroups_ groups, const Gpu* gpu) {
    if (model_is_cut(u.plan->state->cfg)) {
        update_sliced_layers_(u, gpu);
        return;
    }
    if (!u.plan->operands) {
        update_groups_rows_(u, groups, gpu);
        return;
    }
    for (int g = groups.first; g < groups.end; g++) {
        const UpdateGroups_ group = {g, g + 1};
        if (optimizer_gathers(u.plan->state, &u.plan->zero, g)) {
            update_gather_(u, g, gpu);
            update_groups_rows_(u, group, gpu);
        }
    }
}

// ---- all rules

template <class T, class G, MasterWeights MASTER>
static inline void update_launch_rules_(const OptimizerUpdate<T>& u, uint32_t first, unsigned count,
                                        const Gpu* gpu) {
    switch (u.plan->state->optimizer.name) {
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
static inline void update_launch_master_(const OptimizerUpdate<T>& u, uint32_t first, unsigned count,
                                         const Gpu* gpu) {
    const MasterWeights master = u.plan->state->optimizer.master;
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

// Adds these weights to their average, or sets the parameters to it.
template <class T, int SHOWS>
static inline void update_average_launch_(const OptimizerUpdate<T>& u, uint32_t first, unsigned count,
                                          const Gpu* gpu) {
    const AverageArrays_<T> arrays = {update_weights_(u), (float*)u.slots[STATE_AVERAGE]};
    const OptimizerState* state = u.plan->state;
    launch(average_kernel_<T, SHOWS>, count, UPDATE_THREADS_, 0, gpu, arrays, u.plan->rows, u.plan->pieces,
           first, update_average_(state), average_rate(state->optimizer.average, u.update.average_n));
}

// Updates `count` elements from `first` on, both multiples of TENSOR_SHARD_UNIT, among those that
// this rank updates: whole groups if the update needs whole tensors (state_needs_tensors). The
// pointers to slots are those of whole arrays, of which only the part for these elements must
// exist.
template <class T>
static inline void optimizer_update_part(const OptimizerUpdate<T>& u, size_t first, size_t count,
                                         const Gpu* gpu) {
    assert(update_is_aligned_(u.params) && update_is_aligned_(u.grads.data) && first % UPDATE_PIECE_ == 0 &&
           count % UPDATE_PIECE_ == 0 && update_is_aligned_(u.slots[STATE_M]) &&
           update_is_aligned_(u.slots[STATE_V]) && update_is_aligned_(update_weights_(u).master));
    assert(DTYPE_OF(T) == DTYPE_BF16 || u.plan->state->optimizer.master <= MASTER_FP32);
    const uint32_t piece = (uint32_t)(first / UPDATE_PIECE_), pieces = (uint32_t)(count / UPDATE_PIECE_);
    if (u.shows_average) {
        update_average_launch_<T, 1>(u, piece, pieces, gpu);
        return;
    }
    GRADIENT_DISPATCH(u.grads, T, (update_launch_master_<T, G>(u, piece, pieces, gpu)));
    const OptimizerName name = u.plan->state->optimizer.name;
    if (name == OPTIMIZER_MUON || name == OPTIMIZER_SOAP || name == OPTIMIZER_ADAFACTOR) {
        update_tensors_(u, update_groups_(u.plan, first, count), gpu);
    }
    if (u.plan->state->optimizer.average.is_kept) {
        update_average_launch_<T, 0>(u, piece, pieces, gpu);
    }
}

// Updates everything that this rank updates, and its average.
template <class T> static inline void optimizer_update(const OptimizerUpdate<T>& u, const Gpu* gpu) {
    optimizer_update_part(u, 0, (size_t)u.plan->pieces.count * UPDATE_PIECE_, gpu);
}

#endif
