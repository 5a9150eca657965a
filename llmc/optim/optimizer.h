/*
optimizer.h -- the optimizers as tables: which rule updates a parameter, which state each rule has,
and where that state lies in memory; and the update on the CPU.

An optimizer has a rule for each kind of parameter (model.h). A rule has some of the slots below for
every parameter that it updates. The array of a slot is compact: it holds only parameters whose rule
has the slot, and of these only what this rank updates, in the order of the map (map_walk.h), with
the padding behind a tensor. Master weights lie as owned elements do; frozen parameters have them,
too. Owned elements a ... b-1 have one interval in every slot.

Some rules sum up or multiply whole matrices, whose parts can belong to several ranks. One of these,
the owner (matrices.h), makes the update of a matrix (owners.h), and it alone keeps the state that
belongs to the matrix and not to its elements. A slot has either elements or matrices: those that a
rank owns, group after group, and in a group in the order of the table.

State starts as zeros. Padding stays zero: an update of zeros leaves zeros.
*/
#ifndef LLMC_OPTIMIZER_H
#define LLMC_OPTIMIZER_H

#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "llmc/base/memory.h"
#include "llmc/base/enum_words.h"
#include "llmc/optim/adafactor.h"
#include "llmc/optim/adamw.h"
#include "llmc/optim/adamw8bit.h"
#include "llmc/optim/average.h"
#include "llmc/model/map.h"
#include "llmc/model/model.h"
#include "llmc/model/part.h"
#include "llmc/optim/matrices.h"
#include "llmc/optim/muon.h"
#include "llmc/optim/mup.h"
#include "llmc/optim/soap.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- rules ----

// --optimizer
// clang-format off
#define OPTIMIZER_WORDS(X) \
    X(OPTIMIZER_ADAMW, "adamw") \
    X(OPTIMIZER_ADAMW8BIT, "adamw8bit") \
    X(OPTIMIZER_ADAFACTOR, "adafactor") \
    X(OPTIMIZER_MUON, "muon") \
    X(OPTIMIZER_SOAP, "soap") \
    X(OPTIMIZER_LION, "lion") \
    X(OPTIMIZER_SGD, "sgd")

// clang-format on
typedef enum { OPTIMIZER_WORDS(WORDS_VALUE) } OptimizerName;

// How an update changes a parameter.
typedef enum {
    RULE_ADAMW,    // adamw.h
    RULE_ADAMW8,   // adamw8bit.h
    RULE_FACTORED, // adafactor.h, for matrices
    RULE_FULL,     // adafactor.h, for vectors
    RULE_MUON,     // muon.h
    RULE_SOAP,     // soap.h
    RULE_LION,     // lion.h
    RULE_SGD,      // sgd.h
    RULE_NONE      // no update: parameters that are frozen (freeze.h) or absent
} UpdateRule;

// Master weights that a GPU keeps beside 16-bit weights (master_weights.cuh).
typedef enum { MASTER_NONE, MASTER_FP32, MASTER_SPLIT, MASTER_24 } MasterWeights;

typedef struct {
    OptimizerName name;
    // state that options add: momentum of SGD and Adafactor, means of rows of Muon
    int has_optional;
    MasterWeights master;
    TensorSet frozen;             // rows of the parameters that are not updated in any block
    float lr_scale[TENSOR_KINDS]; // factors of the learning rate
    Mup mup;                      // the small model whose settings the others follow
    int soap_max_side;            // SOAP: longer sides of matrices are not turned
    int sums_weights;             // Adafactor: the rate follows the size of a tensor's weights
    // blocks are updated one after the other: a GPU does not batch matmuls of several
    int by_block;
    Average average; // of the weights, beside the rules' own state
    MuonMomentum muon_momentum;
} Optimizer;

Optimizer optimizer_of(OptimizerName name, int has_optional, MasterWeights master);

const char* optimizer_word(OptimizerName name);

UpdateRule optimizer_rule(Optimizer optimizer, TensorKind kind);

// ---- slots ----

enum { OPTIMIZER_BLOCK = MAP_BLOCK };

// clang-format off
// Slots: the name in checkpoints, the type of the elements, the shape, a bound that no value is
// below, the name in the memory report. Checkpoints have all but the slots of weights, which come last.
//  slot              name        type      shape          least      label
#define STATE_TABLE_(X) \
  X(STATE_M,          "m",        float,    SLOT_ELEMENTS, -INFINITY, "m")  /* mean of the gradient */ \
  X(STATE_V,          "v",        float,    SLOT_ELEMENTS, 0,         "v")  /* mean of its square */ \
  X(STATE_M8,         "m8",       uint8_t,  SLOT_ELEMENTS, -INFINITY, "m in 8 bits") \
  X(STATE_V8,         "v8",       uint8_t,  SLOT_ELEMENTS, -INFINITY, "v in 8 bits") \
  X(STATE_M_SCALE,    "m_scale",  float,    SLOT_BLOCKS,   0,         "scales of m") \
  X(STATE_V_SCALE,    "v_scale",  float,    SLOT_BLOCKS,   0,         "scales of v") \
  X(STATE_ROWS,       "row_v",    float,    SLOT_ROWS,     0,         "v of rows") \
  X(STATE_COLS,       "col_v",    float,    SLOT_COLS,     0,         "v of columns") \
  X(STATE_MATRIX_M,   "matrix_m", float,    SLOT_MATRIX,   -INFINITY, "m of matrices") \
  X(STATE_MATRIX_V,   "matrix_v", float,    SLOT_MATRIX,   0,         "v of turned matrices") \
  X(STATE_LEFT,       "left",     float,    SLOT_ROWS_SQUARE, -INFINITY, "products of rows")    /* mean of G G^T */ \
  X(STATE_RIGHT,      "right",    float,    SLOT_COLS_SQUARE, -INFINITY, "products of columns") /* mean of G^T G */ \
  X(STATE_LEFT_BASIS, "left_basis", float,  SLOT_ROWS_SQUARE, -INFINITY, "bases of rows") \
  X(STATE_RIGHT_BASIS, "right_basis", float, SLOT_COLS_SQUARE, -INFINITY, "bases of columns") \
  X(STATE_AVERAGE,    "average",  float,    SLOT_ELEMENTS, -INFINITY, "average of the weights") \
  X(STATE_MASTER,     NULL,       float,    SLOT_ELEMENTS, -INFINITY, "master weights") \
  X(STATE_LOWER,      NULL,       uint16_t, SLOT_ELEMENTS, -INFINITY, "lower halves of weights") /* MASTER_SPLIT */ \
  X(STATE_LOWER_8,    NULL,       int8_t,   SLOT_ELEMENTS, -INFINITY, "lower 8 bits of weights") /* MASTER_24 */

// clang-format on

#define STATE_ID_(id, ...) id,

typedef enum { STATE_TABLE_(STATE_ID_) STATE_SLOTS } StateSlotId;

#undef STATE_ID_

typedef struct {
    const char *name, *label; // in checkpoints, NULL: not saved; in the memory report
    SlotShape shape;
    size_t element_bytes;
    float least; // no value is below it
    // place of its array in the allocation of all state; no bytes: unused
    size_t offset_bytes, bytes;
    size_t frozen; // master weights only: elements that are not updated, the last ones in the array
} StateSlot;

typedef struct {
    Optimizer optimizer;
    const Map* map; // of what this rank has
    ModelConfig cfg;
    UpdateRule rule[MODEL_PARAMETER_ROWS];
    MupFactors factors[MODEL_PARAMETER_ROWS]; // of the settings of an update; decay may be 0
    unsigned slots_of[MODEL_PARAMETER_ROWS];  // bit i: the row has slot i
    TensorRow rows[MODEL_PARAMETER_ROWS];     // of this rank's part; bytes are elements
    TensorRow whole[MODEL_PARAMETER_ROWS];    // sizes in the model of which `cfg` is a part
    Matrices matrices[MATRICES_MOST];         // what is updated as a whole, in table order
    int num_matrices;
    StateSlot slots[STATE_SLOTS];
    size_t bytes, saved_bytes; // size of all slots, and of those in checkpoints, which come first
    void* memory;              // of all slots; NULL: a layout alone, or offloaded
} OptimizerState;

// The slot of averages, as a bit.
#define SLOT_OF_AVERAGE (1u << STATE_AVERAGE)

// Returns the row of a slot in the table, without a place.
StateSlot state_slot_of(int slot);

// True if a row has a slot.
static inline int state_slot_has(const OptimizerState* s, int slot, int row) {
    return (s->slots_of[row] >> slot) & 1;
}

// Returns the slot elements that belong to `elements` of a parameter. Statistics of rows and
// columns exist for whole matrices only.
size_t state_slot_elements(const OptimizerState* s, int slot, int row, size_t elements);

// Returns the elements of a side's square, 0: it is too long.
size_t state_square(const OptimizerState* s, size_t side);

// Returns the begin of a run of matrices among the squares of a layer in files, which pad a run to
// a multiple of TENSOR_ALIGN.
size_t state_square_begin(const OptimizerState* s, SlotShape shape, int row, int run);

// True if a slot of a row belongs to whole matrices.
int state_slot_is_whole(const OptimizerState* s, int slot, int row);

// True if a rule updates whole matrices or tensors.
static inline int rule_is_whole(UpdateRule rule) {
    return rule == RULE_FACTORED || rule == RULE_FULL || rule == RULE_MUON || rule == RULE_SOAP;
}

// True if the update of group g needs whole tensors.
int state_needs_tensors(const OptimizerState* s, int g);

// Returns the slot of master weights; STATE_SLOTS if they have none.
int state_master_slot(MasterWeights master);

// Returns the bytes of an array in the allocation of all state, rounded up so that the next one
// starts aligned.
size_t state_slot_room(const StateSlot* slot);

// Sets the rules and slots of each row, without places: what follows from a model alone.
void optimizer_layout(OptimizerState* s, Optimizer optimizer, ModelConfig cfg);

// Places the state of what a rank has in one allocation of s->bytes. The map may be one of a dry
// run; it must outlive the state.
void optimizer_state_open(OptimizerState* s, Optimizer optimizer, const Map* map);

// Takes the block for all state, on the device; each slot is a kind.
void optimizer_state_take(OptimizerState* s, Memory* memory);

// Sets what a map must know of the optimizer: which slots each parameter has. `of` has all else.
void optimizer_set_map(MapOf* of, Optimizer optimizer);

// Returns the bytes of the state in files.
double optimizer_saved_bytes(Optimizer optimizer, ModelConfig cfg);

// Returns the bytes of a slot that an update reads and writes: all but the master weights of frozen
// parts.
static inline double state_moved_bytes(const StateSlot* slot) {
    return (double)slot->bytes - (double)slot->frozen * (double)slot->element_bytes;
}

// Returns the bytes that an update moves if it reads everything once: it reads gradients, slots,
// and parameters without master weights; it writes slots and parameters. The last two arguments are
// bytes of an element.
double optimizer_bytes(const OptimizerState* s, size_t param_bytes, size_t gradient_bytes);

// ---- places ----

// Returns the elements of a slot that each of some matrices has.
size_t state_matrix_elements(const OptimizerState* s, int slot, const Matrices* m);

// Returns the begin of a matrix that this rank owns in the array of a slot that it has, and the
// elements there; NULL if it has none.
size_t state_matrix_begin(const OptimizerState* s, int slot, OwnedMatrix x);
void* state_matrix(const OptimizerState* s, int slot, OwnedMatrix x);

// Return the layer and the group of a matrix.
static inline int state_matrix_layer(const OptimizerState* s, OwnedMatrix x) {
    const TensorRow* row = &s->rows[x.of->row];
    return row->in_block ? tensor_lowest_layer(row, x.copy) : -1;
}
static inline int state_matrix_group(const OptimizerState* s, OwnedMatrix x) {
    const TensorRow* row = &s->rows[x.of->row];
    return row->place == PLACE_BLOCK ? 1 + tensor_copy_block(row, x.copy) : 0;
}

// Returns the array of a slot; NULL if nothing has the slot, or without memory.
void* state_slot_array(const OptimizerState* s, int slot);

enum { STATE_WORD_LAYER = 40, STATE_WORD_RANK = 52 }; // lowest bits of these numbers

// Return the begin of owned elements of a tensor in the array of a slot that has them, and their
// array, NULL if they do not have the slot; and the number of their first random word
// (RoundingWords): the words of a tensor are numbered by its elements, its layer, and the tensor
// rank that has a part. So they do not depend on the layers, experts and other tensors that a rank
// has.
size_t state_range_begin(const OptimizerState* s, int slot, const MapRange* range);
void* state_range(const OptimizerState* s, int slot, const MapRange* range);
uint64_t state_range_word(const OptimizerState* s, const MapRange* range);

// ---- the update ----

// Settings of one update, for all rules. Each rule's own struct is derived from them.
typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float grad_scale; // factor of the gradient: clipping, loss scale, targets that do not count
    int64_t t;        // number of the update, from 1
    Decay decay;
    float momentum; // momentum of SGD, beta1 of Adafactor; 0: none
    AdafactorRate adafactor_rate;
    float muon_lr, muon_weight_decay; // Muon's, in place of lr and weight_decay
    MuonScale muon_scale;
    int soap_every;
    int64_t average_n;      // number of the update in the average of the weights, from 1
    float router_bias_rate; // of the biases of routers (router.h)
    MuonPolynomial muon_polynomial;
    float qk_clip; // limit of attention scores (qk_clip.h); 0: none
} Update;

// Returns the settings for one row: only some rows decay, and some have a rate of their own.
Update update_of_row(Update u, const OptimizerState* s, int row);

AdamW update_adamw(Update u);

Adafactor update_adafactor(Update u);

Muon update_muon(Update u);

Soap update_soap(Update u);

// Returns the bytes of scratch memory for the update on the CPU.
size_t optimizer_scratch_bytes(const OptimizerState* s);

// True if the rule of a parameter updates each element by itself, so that a range may be updated in
// parts.
int optimizer_is_elementwise(const OptimizerState* s, int row);

// Updates a range by such a rule, with parameters and gradients param and grad (range->count).
void optimizer_update_elements_cpu(const OptimizerState* s, const MapRange* range, float* param,
                                   const float* grad, Update u);

// Updates a range by any rule: a whole tensor if its rule needs one. `scratch` has
// optimizer_scratch_bytes.
void optimizer_update_cpu(const OptimizerState* s, const MapRange* range, float* param, const float* grad,
                          Update u, const MuonScratch* scratch);

// An update of a matrix whose parts belong to several ranks. Each sets the operand of its part, and
// updates the momentum that belongs to elements: the direction before orthogonalization with Muon,
// else the gradient. The owner replaces the operand of the whole matrix by the direction of its
// update, and returns the rate of Adafactor; `param` is only read if rates depend on the weights.
// Each then moves its part.
void optimizer_operand_cpu(const OptimizerState* s, const MapRange* range, float* operand, const float* grad,
                           Update u);

float optimizer_turn_cpu(const OptimizerState* s, OwnedMatrix x, float* operand, const float* param, Update u,
                         const MuonScratch* scratch);

void optimizer_move_cpu(const OptimizerState* s, OwnedMatrix x, const MapRange* range, float* param,
                        const float* direction, float rate, Update u);

// Adds the parameters of a range, just updated, to their average, if it has one.
void optimizer_average_cpu(const OptimizerState* s, const MapRange* range, const float* param, Update u);

// Sets the parameters of a range to their average, if it has one.
void optimizer_show_average_cpu(const OptimizerState* s, const MapRange* range, float* param);

#ifdef __cplusplus
}
#endif

#ifdef OPTIMIZER_IMPLEMENTATION

#include <assert.h>

#include "llmc/optim/lion.h"
#include "llmc/optim/sgd.h"

Optimizer optimizer_of(OptimizerName name, int has_optional, MasterWeights master) {
    const Optimizer optimizer = {name, has_optional, master,   0, {1, 1, 1, 1, 1, 1, 1}, {0, 0}, INT_MAX, 0,
                                 0,    {0, 0},       MUON_FP32};
    return optimizer;
}

const char* optimizer_word(OptimizerName name) {
    static const char* const words[] = {OPTIMIZER_WORDS(WORDS_NAME)};
    return words[name];
}

UpdateRule optimizer_rule(Optimizer optimizer, TensorKind kind) {
    static const UpdateRule rules[][TENSOR_KINDS] = {
        // clang-format off
        //                         matrices       embeddings     own head       router         vectors     never trained  adapters
        [OPTIMIZER_ADAMW]       = {RULE_ADAMW,    RULE_ADAMW,    RULE_ADAMW,    RULE_ADAMW,    RULE_ADAMW, RULE_NONE,     RULE_ADAMW},
        [OPTIMIZER_ADAMW8BIT]   = {RULE_ADAMW8,   RULE_ADAMW8,   RULE_ADAMW8,   RULE_ADAMW8,   RULE_ADAMW, RULE_NONE,     RULE_ADAMW8},
        [OPTIMIZER_ADAFACTOR]   = {RULE_FACTORED, RULE_FACTORED, RULE_FACTORED, RULE_FACTORED, RULE_FULL, RULE_NONE,     RULE_FACTORED},
        [OPTIMIZER_MUON]        = {RULE_MUON,     RULE_ADAMW,    RULE_ADAMW,    RULE_ADAMW,    RULE_ADAMW, RULE_NONE,     RULE_MUON},
        [OPTIMIZER_SOAP]        = {RULE_SOAP,     RULE_ADAMW,    RULE_ADAMW,    RULE_ADAMW,    RULE_ADAMW, RULE_NONE,     RULE_SOAP},
        [OPTIMIZER_LION]        = {RULE_LION,     RULE_LION,     RULE_LION,     RULE_LION,     RULE_LION, RULE_NONE,     RULE_LION},
        [OPTIMIZER_SGD]         = {RULE_SGD,      RULE_SGD,      RULE_SGD,      RULE_SGD,      RULE_SGD, RULE_NONE,     RULE_SGD},
        // clang-format on
    };
    return rules[optimizer.name][kind];
}

size_t state_square(const OptimizerState* s, size_t side) {
    return side <= (size_t)s->optimizer.soap_max_side ? side * side : 0;
}

size_t state_square_begin(const OptimizerState* s, SlotShape shape, int row, int run) {
    size_t begin = 0;
    for (int i = 0; i < run; i++) {
        const TensorRun matrices = tensor_run(&s->rows[row], i);
        const size_t side = shape == SLOT_ROWS_SQUARE ? matrices.rows : s->rows[row].cols,
                     squares = (size_t)matrices.count * state_square(s, side);
        begin += (squares + TENSOR_ALIGN - 1) / TENSOR_ALIGN * TENSOR_ALIGN;
    }
    return begin;
}

// Returns the elements of all squares of a layer.
static size_t state_squares_(const OptimizerState* s, SlotShape shape, int row) {
    return state_square_begin(s, shape, row, tensor_runs(&s->rows[row]));
}

size_t state_slot_elements(const OptimizerState* s, int slot, int row, size_t elements) {
    const TensorRow* r = &s->rows[row];
    const int is_whole = elements >= model_rows_in_files(r, s->cfg) * r->cols;
    if (!state_slot_has(s, slot, row)) {
        return 0;
    }
    switch (s->slots[slot].shape) {
    case SLOT_BLOCKS:
        return elements / OPTIMIZER_BLOCK;
    case SLOT_ROWS:
        return is_whole ? s->whole[row].rows : 0;
    case SLOT_COLS:
        return is_whole ? s->whole[row].cols : 0;
    case SLOT_ROWS_SQUARE:
    case SLOT_COLS_SQUARE:
        return is_whole ? state_squares_(s, s->slots[slot].shape, row) : 0;
    case SLOT_MATRIX:
    case SLOT_ELEMENTS:
        break;
    }
    return elements;
}

int state_slot_is_whole(const OptimizerState* s, int slot, int row) {
    return s->slots[slot].shape >= SLOT_MATRIX || (slot == STATE_V && s->rule[row] == RULE_FULL);
}

int state_needs_tensors(const OptimizerState* s, int g) {
    int needs = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        needs |= tensor_is_in_group(&s->rows[i], g) && rule_is_whole(s->rule[i]);
    }
    return needs;
}

#define SLOT_BIT_(slot) (1u << STATE_##slot)

int state_master_slot(MasterWeights master) {
    static const int slots[] = {STATE_SLOTS, STATE_MASTER, STATE_LOWER, STATE_LOWER_8};
    return slots[master];
}

// Returns the slots that a parameter has: those of its rule, some of them only with an option. Its
// master weight, and the average of trained ones, are the optimizer's choice, whatever the rule.
static unsigned state_slots_(Optimizer optimizer, UpdateRule rule) {
    static const struct {
        unsigned always, optional;
    } slots[] = {
        [RULE_ADAMW] = {SLOT_BIT_(M) | SLOT_BIT_(V), 0},
        [RULE_ADAMW8] = {SLOT_BIT_(M8) | SLOT_BIT_(V8) | SLOT_BIT_(M_SCALE) | SLOT_BIT_(V_SCALE), 0},
        [RULE_FACTORED] = {SLOT_BIT_(ROWS) | SLOT_BIT_(COLS), SLOT_BIT_(M)},
        [RULE_FULL] = {SLOT_BIT_(V), SLOT_BIT_(M)},
        [RULE_MUON] = {SLOT_BIT_(M), SLOT_BIT_(ROWS)},
        [RULE_SOAP] = {SLOT_BIT_(MATRIX_M) | SLOT_BIT_(MATRIX_V) | SLOT_BIT_(LEFT) | SLOT_BIT_(RIGHT) |
                           SLOT_BIT_(LEFT_BASIS) | SLOT_BIT_(RIGHT_BASIS),
                       0},
        [RULE_LION] = {SLOT_BIT_(M), 0},
        [RULE_SGD] = {0, SLOT_BIT_(M)},
        [RULE_NONE] = {0, 0},
    };
    const unsigned momentum = SLOT_BIT_(M) | SLOT_BIT_(M8) | SLOT_BIT_(M_SCALE);
    const int in_8 = rule == RULE_MUON && optimizer.muon_momentum == MUON_8BIT;
    const int master = state_master_slot(optimizer.master),
              has_average = rule != RULE_NONE && optimizer.average.is_kept;
    return (slots[rule].always ^ (in_8 ? momentum : 0)) |
           (optimizer.has_optional ? slots[rule].optional : 0) | (has_average ? SLOT_BIT_(AVERAGE) : 0) |
           (master < STATE_SLOTS ? 1u << master : 0);
}

StateSlot state_slot_of(int slot) {
#define STATE_SLOT_(id, name_, type_, shape_, least_, label_)                                                \
    [id] = {.name = name_, .label = label_, .shape = shape_, .element_bytes = sizeof(type_), .least = least_},
    static const StateSlot slots[STATE_SLOTS] = {STATE_TABLE_(STATE_SLOT_)};
#undef STATE_SLOT_
    return slots[slot];
}

// Returns the slots of squares that a row does not have, because all its sides are too long.
static unsigned state_too_long_(const OptimizerState* s, int row) {
    unsigned slots = 0;
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        const SlotShape shape = s->slots[slot].shape;
        const int is_square = shape == SLOT_ROWS_SQUARE || shape == SLOT_COLS_SQUARE;
        slots |= (unsigned)(is_square && state_squares_(s, shape, row) == 0) << slot;
    }
    return slots;
}

size_t state_matrix_elements(const OptimizerState* s, int slot, const Matrices* m) {
    if (!state_slot_has(s, slot, m->row) || !state_slot_is_whole(s, slot, m->row)) {
        return 0;
    }
    switch (s->slots[slot].shape) {
    case SLOT_ROWS:
        return m->rows;
    case SLOT_COLS:
        return m->cols;
    case SLOT_ROWS_SQUARE:
        return state_square(s, m->rows);
    case SLOT_COLS_SQUARE:
        return state_square(s, m->cols);
    case SLOT_MATRIX:
    case SLOT_ELEMENTS:
    case SLOT_BLOCKS:
        break;
    }
    return m->rows * m->cols;
}

// Returns the elements of `count` matrices that lie one after the other in a slot.
static size_t state_matrices_room_(const OptimizerState* s, int slot, const Matrices* m, size_t count) {
    const size_t elements = count * state_matrix_elements(s, slot, m);
    return (elements + TENSOR_ALIGN - 1) / TENSOR_ALIGN * TENSOR_ALIGN;
}

// Returns the elements of a slot that this rank has of the matrices of the first `copies` copies.
// The matrices of a copy lie together; ranks have equal numbers of them, or one more.
static size_t state_matrices_before_(const OptimizerState* s, int slot, const Matrices* m, size_t copies) {
    const size_t count = (size_t)m->count, least = count / (size_t)m->owners,
                 more = matrices_owned(m, copies * count) - copies * least;
    return (copies - more) * state_matrices_room_(s, slot, m, least) +
           more * state_matrices_room_(s, slot, m, least + 1);
}

// Returns how many copies of some matrices lie in the groups before g.
static size_t state_copies_before_(const OptimizerState* s, const Matrices* m, int g) {
    const TensorRow* row = &s->rows[m->row];
    const int is_once = row->place == PLACE_ONCE, copies = tensor_copies_before(row, g - 1) - m->first_copy;
    return is_once ? (size_t)(g > 0 ? m->copies : 0) : (size_t)(copies > 0 ? copies : 0);
}

size_t state_matrix_begin(const OptimizerState* s, int slot, OwnedMatrix x) {
    const int g = state_matrix_group(s, x);
    const size_t copy = (size_t)(x.copy - x.of->first_copy), count = (size_t)x.of->count;
    size_t begin =
        (matrices_owned(x.of, copy * count + (size_t)x.number) - matrices_owned(x.of, copy * count)) *
        state_matrix_elements(s, slot, x.of);
    for (const Matrices* m = s->matrices; m < s->matrices + s->num_matrices; m++) {
        const size_t copies = m == x.of ? copy : state_copies_before_(s, m, g + (m < x.of));
        begin += state_matrices_before_(s, slot, m, copies);
    }
    return begin;
}

void* state_matrix(const OptimizerState* s, int slot, OwnedMatrix x) {
    const StateSlot* of = &s->slots[slot];
    assert(matrix_is_owned(x));
    return state_matrix_elements(s, slot, x.of) > 0
               ? (char*)s->memory + of->offset_bytes + state_matrix_begin(s, slot, x) * of->element_bytes
               : NULL;
}

size_t state_slot_room(const StateSlot* slot) {
    const size_t align = TENSOR_ALIGN * sizeof(float);
    return (slot->bytes + align - 1) / align * align;
}

// Returns the elements of a slot that this rank has.
static size_t state_elements_(const OptimizerState* s, int slot) {
    const MapTotals* totals = &s->map->totals;
    if (slot >= STATE_MASTER) {
        return slot == state_master_slot(s->optimizer.master) ? totals->elements[MAP_OWNED] : 0;
    }
    size_t elements = totals->slots[slot];
    for (const Matrices* m = s->matrices; m < s->matrices + s->num_matrices; m++) {
        elements += state_matrices_before_(s, slot, m, (size_t)m->copies);
    }
    return elements;
}

// Places the array of a slot at `at`; returns its end.
static size_t state_place_slot_(OptimizerState* s, int slot, size_t at) {
    StateSlot* to = &s->slots[slot];
    const size_t elements = state_elements_(s, slot);
    to->frozen = slot >= STATE_MASTER && elements > 0 ? elements - s->map->totals.updated : 0;
    to->offset_bytes = at;
    to->bytes = array_bytes(elements, to->element_bytes);
    return at + state_slot_room(to);
}

static MupFactors state_factors_(Optimizer optimizer, ModelConfig cfg, const TensorRow* row) {
    MupFactors f = mup_factors(optimizer.mup, cfg, row);
    f.rate *= optimizer.lr_scale[row->kind];
    f.decay *= (float)row->decay;
    return f;
}

void optimizer_layout(OptimizerState* s, Optimizer optimizer, ModelConfig cfg) {
    TensorSet matrices = 0, tensors = 0;
    memset(s, 0, sizeof(*s));
    s->optimizer = optimizer;
    s->cfg = cfg;
    model_parameter_rows_of(s->rows, cfg, 1);
    model_parameter_rows_of(s->whole, model_of_part(cfg), 1);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        s->slots[slot] = state_slot_of(slot);
    }
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const int is_still = tensor_is_absent(&s->rows[i]) || tensor_is_in(optimizer.frozen, i);
        s->rule[i] = is_still ? RULE_NONE : optimizer_rule(optimizer, s->rows[i].kind);
        s->factors[i] = state_factors_(optimizer, cfg, &s->rows[i]);
        s->slots_of[i] = state_slots_(optimizer, s->rule[i]) & ~state_too_long_(s, i);
        matrices |= s->rule[i] == RULE_MUON || s->rule[i] == RULE_SOAP ? tensor_bit(i) : 0;
        tensors |= s->rule[i] == RULE_FACTORED || s->rule[i] == RULE_FULL ? tensor_bit(i) : 0;
    }
    s->num_matrices = matrices_open(s->matrices, cfg, s->rows, s->whole, matrices, tensors);
}

void optimizer_state_open(OptimizerState* s, Optimizer optimizer, const Map* map) {
    const Freeze own = freeze_of_part(&map->of.freeze, map->cfg);
    optimizer.frozen |= own.rows; // also what only this rank leaves to others
    optimizer_layout(s, optimizer, map->cfg);
    s->map = map;
    matrices_divide(s->matrices, s->num_matrices, map);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        s->bytes = state_place_slot_(s, slot, s->bytes);
        s->saved_bytes = s->slots[slot].name ? s->bytes : s->saved_bytes;
    }
}

_Static_assert((int)STATE_MASTER == (int)MAP_SLOTS && (int)ADAMW8BIT_BLOCK == (int)MAP_BLOCK,
               "slots of the map");

void optimizer_set_map(MapOf* of, Optimizer optimizer) {
    OptimizerState s;
    optimizer.frozen |= of->freeze.rows;
    optimizer_layout(&s, optimizer, of->whole);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int slot = 0; slot < MAP_SLOTS; slot++) {
            of->shapes[slot] = s.slots[slot].shape;
            of->slots[i] |= state_slot_is_whole(&s, slot, i) ? 0 : s.slots_of[i] & 1u << slot;
        }
    }
}

void optimizer_state_take(OptimizerState* s, Memory* memory) {
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        memory_count(memory, s->slots[slot].label, MEMORY_DEVICE, state_slot_room(&s->slots[slot]));
    }
    s->memory = memory_allocate(memory, "optimizer state", MEMORY_DEVICE, s->bytes);
}

double optimizer_saved_bytes(Optimizer optimizer, ModelConfig cfg) {
    OptimizerState s;
    double bytes = 0;
    optimizer_layout(&s, optimizer, cfg);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        for (int i = 0; i < MODEL_PARAMETER_ROWS && s.slots[slot].name; i++) {
            const size_t layer = model_rows_in_files(&s.rows[i], cfg) * s.rows[i].cols;
            bytes += (double)s.rows[i].layers * (double)state_slot_elements(&s, slot, i, layer) *
                     (double)s.slots[slot].element_bytes;
        }
    }
    return bytes;
}

double optimizer_bytes(const OptimizerState* s, size_t param_bytes, size_t gradient_bytes) {
    const size_t read = s->optimizer.master == MASTER_FP32 ? 0 : param_bytes;
    double bytes = (double)s->map->totals.updated * (double)(gradient_bytes + read + param_bytes);
    for (int slot = 0; slot < STATE_SLOTS; slot++) {
        bytes += 2 * state_moved_bytes(&s->slots[slot]);
    }
    return bytes;
}

void* state_slot_array(const OptimizerState* s, int slot) {
    const StateSlot* of = &s->slots[slot];
    return of->bytes && s->memory ? (char*)s->memory + of->offset_bytes : NULL;
}

size_t state_range_begin(const OptimizerState* s, int slot, const MapRange* range) {
    const size_t skips = map_range_skips(s->map, range);
    return slot >= STATE_MASTER                  ? map_range_at(s->map, range, MAP_OWNED)
           : s->slots[slot].shape == SLOT_BLOCKS ? range->shard->slot[slot] + skips / OPTIMIZER_BLOCK
                                                 : range->shard->slot[slot] + skips;
}

void* state_range(const OptimizerState* s, int slot, const MapRange* range) {
    const StateSlot* of = &s->slots[slot];
    const int has = state_slot_has(s, slot, range->shard->tensor) &&
                    (slot >= STATE_MASTER || range->shard->slot[slot] != MAP_NONE);
    return has ? (char*)s->memory + of->offset_bytes + state_range_begin(s, slot, range) * of->element_bytes
               : NULL;
}

uint64_t state_range_word(const OptimizerState* s, const MapRange* range) {
    const Shard* shard = range->shard;
    const TensorRow* row = &s->rows[shard->tensor];
    const ModelPart part = s->cfg.part;
    const int layer = row->in_block ? part.first_layer + shard->layer : 0,
              rank = row->split == SPLIT_NONE ? 0 : part.tensor_rank;
    const size_t experts =
        row->split == SPLIT_EXPERTS ? (size_t)part.expert_rank * tensor_layer_elements(row) : 0;
    return ((uint64_t)rank << STATE_WORD_RANK) + ((uint64_t)layer << STATE_WORD_LAYER) + experts +
           range->before;
}

Update update_of_row(Update u, const OptimizerState* s, int row) {
    const MupFactors* f = &s->factors[row];
    u.lr *= f->rate;
    u.weight_decay *= f->decay;
    u.eps *= f->eps;
    return u;
}

AdamW update_adamw(Update u) {
    const AdamW opt = {u.lr, u.beta1, u.beta2, u.eps, u.weight_decay, u.grad_scale, u.t, u.decay};
    return opt;
}

Adafactor update_adafactor(Update u) {
    const Adafactor opt = {u.lr, u.momentum, 1.0f, 1.0f, u.weight_decay, u.grad_scale, u.adafactor_rate, u.t};
    return opt;
}

Muon update_muon(Update u) {
    const Muon opt = {u.muon_lr,    muon_momentum(u.t), u.muon_weight_decay,
                      u.grad_scale, MUON_ROWS_BETA2,    u.muon_scale,
                      u.decay,      u.muon_polynomial};
    return opt;
}

Soap update_soap(Update u) {
    const Soap opt = {update_adamw(u), u.soap_every};
    return opt;
}

size_t optimizer_scratch_bytes(const OptimizerState* s) {
    size_t most = 0;
    for (int k = 0; k < s->num_matrices; k++) {
        const Matrices* m = &s->matrices[k];
        const UpdateRule rule = s->rule[m->row];
        const size_t bytes = rule == RULE_FACTORED ? adafactor_scratch_bytes(m->rows, m->cols)
                             : rule == RULE_MUON   ? muon_scratch_bytes(m->rows, m->cols)
                             : rule == RULE_SOAP   ? soap_scratch_bytes(m->rows, m->cols)
                                                   : 0;
        most = bytes > most ? bytes : most;
    }
    return most;
}

static void optimizer_adamw8bit_cpu_(const OptimizerState* s, const MapRange* range, float* param,
                                     const float* grad, AdamW opt) {
    const AdamW8bitState state = {
        (uint8_t*)state_range(s, STATE_M8, range), (uint8_t*)state_range(s, STATE_V8, range),
        (float*)state_range(s, STATE_M_SCALE, range), (float*)state_range(s, STATE_V_SCALE, range)};
    adamw8bit_update_cpu(param, grad, state, range->count, OPTIMIZER_BLOCK, opt);
}

// Returns the momentum of a range.
static Moment optimizer_moment_(const OptimizerState* s, const MapRange* range) {
    const Moment moment = {(float*)state_range(s, STATE_M, range), (uint8_t*)state_range(s, STATE_M8, range),
                           (float*)state_range(s, STATE_M_SCALE, range)};
    return moment;
}

void optimizer_operand_cpu(const OptimizerState* s, const MapRange* range, float* operand, const float* grad,
                           Update u) {
    if (s->rule[range->shard->tensor] == RULE_MUON) {
        muon_operand_cpu(operand, grad, optimizer_moment_(s, range), range->count, update_muon(u));
    } else {
        memcpy(operand, grad, range->count * sizeof(float));
    }
}

// Returns one side of a matrix that SOAP updates.
static SoapSide optimizer_soap_side_(const OptimizerState* s, OwnedMatrix x, int mean, int basis) {
    const SoapSide side = {(float*)state_matrix(s, mean, x), (float*)state_matrix(s, basis, x)};
    return side;
}

// Returns a matrix with the state of Adafactor.
static AdafactorMatrix optimizer_adafactor_(const OptimizerState* s, OwnedMatrix x) {
    const AdafactorMatrix matrix = {NULL,
                                    NULL,
                                    (float*)state_matrix(s, STATE_ROWS, x),
                                    (float*)state_matrix(s, STATE_COLS, x),
                                    NULL,
                                    x.of->rows,
                                    x.of->cols};
    return matrix;
}

// Returns a matrix with the state of SOAP.
static SoapMatrix optimizer_soap_(const OptimizerState* s, OwnedMatrix x) {
    const SoapMatrix matrix = {NULL,
                               NULL,
                               (float*)state_matrix(s, STATE_MATRIX_M, x),
                               (float*)state_matrix(s, STATE_MATRIX_V, x),
                               optimizer_soap_side_(s, x, STATE_LEFT, STATE_LEFT_BASIS),
                               optimizer_soap_side_(s, x, STATE_RIGHT, STATE_RIGHT_BASIS),
                               x.of->rows,
                               x.of->cols};
    return matrix;
}

float optimizer_turn_cpu(const OptimizerState* s, OwnedMatrix x, float* operand, const float* param, Update u,
                         const MuonScratch* scratch) {
    const int row = x.of->row;
    const Update of_row = update_of_row(u, s, row);
    float rate = 0;
    if (s->rule[row] == RULE_MUON) {
        const MuonMatrix matrix = {.row_squares = (float*)state_matrix(s, STATE_ROWS, x),
                                   .rows = x.of->rows,
                                   .cols = x.of->cols,
                                   .u = operand};
        memcpy(operand, muon_turn_cpu(matrix, update_muon(u), scratch), matrix_elements(x) * sizeof(float));
    } else if (s->rule[row] == RULE_SOAP) {
        SoapMatrix matrix = optimizer_soap_(s, x);
        matrix.grad = operand;
        soap_turn_cpu(matrix, operand, update_soap(of_row), scratch->memory, scratch->matmul);
    } else if (s->rule[row] == RULE_FACTORED) {
        AdafactorMatrix matrix = optimizer_adafactor_(s, x);
        matrix.param = (float*)param, matrix.grad = operand;
        rate = adafactor_turn_cpu(matrix, operand, update_adafactor(of_row), scratch->memory);
    } else {
        rate = adafactor_turn_vector_cpu(operand, param, (float*)state_matrix(s, STATE_V, x), x.of->cols,
                                         update_adafactor(of_row));
    }
    return rate;
}

void optimizer_move_cpu(const OptimizerState* s, OwnedMatrix x, const MapRange* range, float* param,
                        const float* direction, float rate, Update u) {
    const Update of_row = update_of_row(u, s, x.of->row);
    if (s->rule[x.of->row] == RULE_MUON) {
        const MuonMatrix matrix = {.param = param, .rows = x.of->rows, .cols = x.of->cols};
        muon_move_cpu(matrix, update_muon(u), direction, range->count);
    } else if (s->rule[x.of->row] == RULE_SOAP) {
        soap_move_cpu(param, direction, range->count, update_soap(of_row));
    } else {
        adafactor_move_cpu(param, direction, (float*)state_range(s, STATE_M, range), range->count, rate,
                           update_adafactor(of_row));
    }
}

// Updates a whole tensor by its rule: all matrices of a copy.
static void optimizer_matrices_cpu_(const OptimizerState* s, const Matrices* m, const MapRange* range,
                                    float* param, const float* grad, Update u, const MuonScratch* scratch) {
    const Update of_row = update_of_row(u, s, m->row);
    const int copy = tensor_copy(&s->rows[m->row], range->shard->layer);
    const Moment moment = optimizer_moment_(s, range);
    for (int k = 0; k < m->count; k++) {
        const OwnedMatrix x = {m, copy, k};
        const size_t at = matrix_part(x, &s->rows[m->row], s->cfg).begin;
        const Moment own = moment_from(moment, at);
        if (s->rule[m->row] == RULE_MUON) {
            const MuonMatrix matrix = {param + at, grad + at, own, (float*)state_matrix(s, STATE_ROWS, x),
                                       m->rows,    m->cols,   NULL};
            muon_update_cpu(matrix, update_muon(u), scratch);
        } else if (s->rule[m->row] == RULE_SOAP) {
            SoapMatrix matrix = optimizer_soap_(s, x);
            matrix.param = param + at, matrix.grad = grad + at;
            soap_update_cpu(matrix, update_soap(of_row), scratch->memory, scratch->matmul);
        } else if (s->rule[m->row] == RULE_FACTORED) {
            AdafactorMatrix matrix = optimizer_adafactor_(s, x);
            matrix.param = param, matrix.grad = grad, matrix.m = own.m;
            adafactor_update_cpu(matrix, update_adafactor(of_row), scratch->memory);
        } else {
            adafactor_vector_cpu(param, grad, (float*)state_matrix(s, STATE_V, x), own.m, m->cols,
                                 update_adafactor(of_row));
        }
    }
}

int optimizer_is_elementwise(const OptimizerState* s, int row) {
    const UpdateRule rule = s->rule[row];
    return rule == RULE_ADAMW || rule == RULE_LION || rule == RULE_SGD;
}

void optimizer_update_elements_cpu(const OptimizerState* s, const MapRange* range, float* param,
                                   const float* grad, Update u) {
    const int row = range->shard->tensor;
    const size_t count = range->count;
    float* m = (float*)state_range(s, STATE_M, range); // SGD may have none
    u = update_of_row(u, s, row);
    if (s->rule[row] == RULE_ADAMW) {
        adamw_update_cpu(param, grad, m, (float*)state_range(s, STATE_V, range), count, update_adamw(u));
    } else if (s->rule[row] == RULE_LION) {
        const Lion opt = {u.lr, u.beta1, u.beta2, u.weight_decay, u.grad_scale, u.decay};
        lion_update_cpu(param, grad, m, count, opt);
    } else {
        const Sgd opt = {u.lr, u.momentum, u.weight_decay, u.grad_scale, u.decay};
        assert(s->rule[row] == RULE_SGD);
        sgd_update_cpu(param, grad, m, count, opt);
    }
}

void optimizer_update_cpu(const OptimizerState* s, const MapRange* range, float* param, const float* grad,
                          Update u, const MuonScratch* scratch) {
    const int row = range->shard->tensor;
    switch (s->rule[row]) {
    case RULE_ADAMW:
    case RULE_LION:
    case RULE_SGD:
        optimizer_update_elements_cpu(s, range, param, grad, u);
        break;
    case RULE_ADAMW8:
        optimizer_adamw8bit_cpu_(s, range, param, grad, update_adamw(update_of_row(u, s, row)));
        break;
    case RULE_FACTORED:
    case RULE_FULL:
    case RULE_MUON:
    case RULE_SOAP:
        for (int k = 0; k < s->num_matrices; k++) {
            if (s->matrices[k].row == row) {
                optimizer_matrices_cpu_(s, &s->matrices[k], range, param, grad, u, scratch);
            }
        }
        break;
    case RULE_NONE:
        break;
    }
}

void optimizer_average_cpu(const OptimizerState* s, const MapRange* range, const float* param, Update u) {
    float* average = (float*)state_range(s, STATE_AVERAGE, range);
    if (average) {
        average_add_cpu(average, param, range->count, average_rate(s->optimizer.average, u.average_n));
    }
}

void optimizer_show_average_cpu(const OptimizerState* s, const MapRange* range, float* param) {
    const float* average = (const float*)state_range(s, STATE_AVERAGE, range);
    if (average) {
        memcpy(param, average, range->count * sizeof(float));
    }
}

#endif // OPTIMIZER_IMPLEMENTATION

#endif
