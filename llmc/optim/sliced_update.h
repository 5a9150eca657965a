/*
sliced_update.h -- updates of matrices that tensor ranks cut into slices (part.h), on the CPU, by
rules that need whole ones.

    Muon        matrix k of a layer goes to process k mod t of the tensor group, which
                orthogonalizes it and sends the slices of the result back: u there, X back (muon.h)
    Adafactor   the processes gather the sums of squares of the rows and columns of all slices,
                then those of the update and of the weights; no matrix travels

Meanwhile each other process of the group has a matrix of its own to orthogonalize.

Each matrix is made of its slices in the order of the ranks, and sums are added up in that order.

All processes of a tensor group have the same shards of their slices (zero.h), so they take part in
the same matrices. The operands of a group are complete first (update_groups.h).
*/
#ifndef LLMC_SLICED_UPDATE_H
#define LLMC_SLICED_UPDATE_H

#include "llmc/base/memory.h"
#include "llmc/comm/group.h"
#include "llmc/optim/optimizer.h"
#include "llmc/parallel/zero.h"

#ifdef __cplusplus
extern "C" {
#endif

// The slice of a process, and memory. A GPU has no `zero`, `group` and `scratch` here.
typedef struct {
    const OptimizerState* state;
    ZeroPlan plan;
    ModelConfig whole;
    Zero* zero;
    Group* group; // processes that cut the matrices
    MuonScratch scratch;
    float* operands;        // of the group
    float *slices, *matrix; // Muon: a whole matrix, slice by slice and row by row
    float *sums, *means;    // Adafactor: (t, rows + cols) of slices; of one of them
    size_t sums_room;       // rows + cols of the largest slice
} SlicedUpdate;

// Opens the updates; the arguments must outlive them.
void sliced_update_open(SlicedUpdate* u, Memory* memory, const OptimizerState* state, const ZeroPlan* plan);

// True if a row is updated here.
int sliced_update_has(const OptimizerState* state, int row);

// Updates such rows of a group, whose operands are set. Collective in the tensor group.
void sliced_update_cpu(SlicedUpdate* u, int group, Update update);

// ---- Muon, for both trainers ----

// A row in one group.
typedef struct {
    const SlicedUpdate* u;
    const TensorRow *row, *whole;
    int i, group; // number of the row
} SlicedTensor;

// Matrix m of a tensor: elements of a slice from `begin` on.
typedef struct {
    SlicedTensor t;
    TensorRun whole; // rows in the whole tensor
    size_t begin, count;
} SlicedMatrix;

typedef enum { SLICED_TO_OWNER, SLICED_BACK } SlicedWay;

enum { SLICED_MATRICES = 16, SLICED_MOVES = 4 * MODEL_MAX_TENSOR_RANKS }; // at most; of a group

// Returns matrix m of a row in a group.
SlicedMatrix sliced_matrix(const SlicedUpdate* u, int row, int group, int m);

// Sets the matrices of a group in which this rank takes part, and returns their number. Processes
// 0, 1, ... of the tensor group own as many of them at a time.
int sliced_matrices(const SlicedUpdate* u, int group, SlicedMatrix* matrices);

// Sets the messages that bring the slices of up to t matrices to their owners, or back, for this
// process of the tensor group, and returns their number.
int sliced_moves(const SlicedUpdate* u, const SlicedMatrix* matrices, int count, SlicedWay way, int rank,
                 GroupMove* moves);

// Returns the mean squares of a matrix's rows; NULL: it has none.
float* sliced_squares(const SlicedMatrix* x);

// True if a matrix is cut by columns: then its slices are not its rows.
static inline int sliced_by_cols(const SlicedMatrix* x) { return x->t.row->split == SPLIT_COLS; }

#ifdef __cplusplus
}
#endif

#ifdef SLICED_UPDATE_IMPLEMENTATION

#include <assert.h>
#include <math.h>
#include <string.h>

#include "llmc/base/sizes.h"
#include "llmc/model/part.h"

int sliced_update_has(const OptimizerState* state, int row) {
    const UpdateRule rule = state->rule[row];
    return model_is_cut(state->cfg) && state->rows[row].split != SPLIT_NONE &&
           (rule == RULE_MUON || rule == RULE_FACTORED || rule == RULE_FULL);
}

// Takes the memory that a row needs.
static void sliced_update_measure_(SlicedUpdate* u, int row, size_t* matrix) {
    const TensorRow *whole = &u->state->whole[row], *own = &u->state->rows[row];
    for (int m = 0; m < tensor_matrices(whole) && u->state->rule[row] == RULE_MUON; m++) {
        const size_t elements = tensor_matrix(whole, m).rows * whole->cols;
        *matrix = elements > *matrix ? elements : *matrix;
    }
    if (u->state->rule[row] == RULE_FACTORED && own->rows + own->cols > u->sums_room) {
        u->sums_room = own->rows + own->cols;
    }
}

void sliced_update_open(SlicedUpdate* u, Memory* memory, const OptimizerState* state, const ZeroPlan* plan) {
    size_t matrix = 0;
    memset(u, 0, sizeof(*u));
    u->state = state;
    u->plan = *plan;
    u->whole = model_of_part(state->cfg);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (sliced_update_has(state, i)) {
            sliced_update_measure_(u, i, &matrix);
        }
    }
    if (matrix > 0) {
        u->slices = (float*)memory_take(memory, "scratch: slices of a matrix", MEMORY_DEVICE,
                                        2 * matrix * sizeof(float));
        u->matrix = u->slices + matrix;
    }
    if (u->sums_room > 0) {
        const size_t sums = (size_t)(model_tensor_ranks(state->cfg) + 1) * u->sums_room;
        u->sums = (float*)memory_take(memory, "scratch: sums of slices", MEMORY_DEVICE, sums * sizeof(float));
        u->means = u->sums + (size_t)model_tensor_ranks(state->cfg) * u->sums_room;
    }
}

// ---- slices of a tensor ----

static SlicedTensor sliced_tensor_(const SlicedUpdate* u, int row, int group) {
    const SlicedTensor t = {u, &u->state->rows[row], &u->state->whole[row], row, group};
    return t;
}

// Returns the copy of the tensor.
static int sliced_copy_(const SlicedTensor* t) { return tensor_first_copy_in_group(t->row, t->group); }

static float* sliced_operand_(const SlicedTensor* t) {
    return t->u->operands + tensor_offset_in_group(t->row);
}

static float* sliced_param_(const SlicedTensor* t) {
    const Zero* z = t->u->zero;
    return z->params + zero_group_begin(&z->plan, t->group) + tensor_offset_in_group(t->row);
}

// Returns a slot that this process keeps whole: of rows and columns those of the whole matrix, of v
// that of its slice.
static float* sliced_state_(const SlicedTensor* t, int slot) {
    const ZeroRange range = {0, 0, 0, 0, 0, 0, t->i, sliced_copy_(t), t->group};
    return (float*)state_array(t->u->state, slot, &range);
}

// True if this rank updates any of `count` elements from `begin` on of its slice. The processes of
// a tensor group agree.
static int sliced_takes_part_(const SlicedTensor* t, size_t begin, size_t count) {
    const ZeroPlan* plan = &t->u->plan;
    const ZeroPiece piece = zero_piece(plan, t->group, ZERO_TRAINED);
    const size_t from = zero_group_begin(plan, t->group) + tensor_offset_in_group(t->row) + begin;
    return from < piece.full + piece.count && from + count > piece.full;
}

// Returns the rows of slice j that count: not the padding of the vocabulary.
static size_t sliced_counted_(const SlicedTensor* t, int j) {
    ModelConfig cfg = t->u->state->cfg;
    cfg.part.tensor_rank = j;
    return model_rows_of_part(t->row, cfg);
}

// ---- Muon ----

SlicedMatrix sliced_matrix(const SlicedUpdate* u, int row, int group, int m) {
    const SlicedTensor t = sliced_tensor_(u, row, group);
    const TensorRun own = tensor_matrix(t.row, m);
    const SlicedMatrix x = {t, tensor_matrix(t.whole, m), own.first * t.row->cols, own.rows * t.row->cols};
    return x;
}

int sliced_matrices(const SlicedUpdate* u, int group, SlicedMatrix* matrices) {
    int count = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const SlicedTensor t = sliced_tensor_(u, i, group);
        const int is_here = sliced_update_has(u->state, i) && u->state->rule[i] == RULE_MUON &&
                            tensor_is_in_group(t.row, group);
        for (int m = 0; m < tensor_matrices(t.row) && is_here; m++) {
            assert(count < SLICED_MATRICES);
            matrices[count] = sliced_matrix(u, i, group, m);
            count += sliced_takes_part_(&t, matrices[count].begin, matrices[count].count);
        }
    }
    return count;
}

float* sliced_squares(const SlicedMatrix* x) {
    float* squares = sliced_state_(&x->t, STATE_ROWS);
    return squares ? squares + x->whole.first : NULL;
}

// Messages of an exchange.
typedef struct {
    GroupMove* moves;
    int count;
} SlicedMoves_;

static void sliced_add_move_(SlicedMoves_* to, int peer, void* data, size_t elements, int sends) {
    const GroupMove move = {peer, data, elements * sizeof(float), sends};
    to->moves[to->count++] = move;
}

// Adds the messages of this process's slice to or from the owner of a matrix.
static void sliced_moves_of_slice_(const SlicedMatrix* x, SlicedWay way, int owner, SlicedMoves_* to) {
    const int is_own = owner == x->t.u->state->cfg.part.tensor_rank;
    sliced_add_move_(to, owner, sliced_operand_(&x->t) + x->begin, x->count, way == SLICED_TO_OWNER);
    if (way == SLICED_BACK && !is_own && sliced_squares(x)) {
        sliced_add_move_(to, owner, sliced_squares(x), x->whole.rows, 0);
    }
}

// Adds the messages of a matrix that this process owns to or from all slices.
static void sliced_moves_of_owner_(const SlicedMatrix* x, SlicedWay way, SlicedMoves_* to) {
    const ModelPart part = x->t.u->state->cfg.part;
    for (int j = 0; j < part.tensor_ranks; j++) {
        sliced_add_move_(to, j, x->t.u->slices + (size_t)j * x->count, x->count, way == SLICED_BACK);
        if (way == SLICED_BACK && j != part.tensor_rank && sliced_squares(x)) {
            sliced_add_move_(to, j, sliced_squares(x), x->whole.rows, 1);
        }
    }
}

int sliced_moves(const SlicedUpdate* u, const SlicedMatrix* matrices, int count, SlicedWay way, int rank,
                 GroupMove* moves) {
    SlicedMoves_ to = {moves, 0};
    for (int q = 0; q < count; q++) {
        sliced_moves_of_slice_(&matrices[q], way, q, &to);
    }
    if (rank < count) {
        sliced_moves_of_owner_(&matrices[rank], way, &to);
    }
    assert(to.count <= SLICED_MOVES && u->slices);
    return to.count;
}

static void sliced_exchange_(const SlicedUpdate* u, const SlicedMatrix* matrices, int count, SlicedWay way) {
    GroupMove moves[SLICED_MOVES];
    group_exchange_cpu(u->group, moves, sliced_moves(u, matrices, count, way, u->group->rank, moves));
}

// Copies a matrix cut by columns between its slices and its rows.
static void sliced_arrange_(const SlicedMatrix* x, const float* from, float* to, SlicedWay way) {
    const size_t rows = x->whole.rows, all = x->t.whole->cols, cols = x->t.row->cols, s = all / cols;
#pragma omp parallel for schedule(static)
    for (size_t r = 0; r < rows; r++) {
        for (size_t j = 0; j < s; j++) {
            const size_t in_slices = (j * rows + r) * cols, in_rows = r * all + j * cols;
            memcpy(to + (way == SLICED_TO_OWNER ? in_rows : in_slices),
                   from + (way == SLICED_TO_OWNER ? in_slices : in_rows), cols * sizeof(float));
        }
    }
}

// Replaces the slices of a matrix by those of its orthogonalization.
static void sliced_turn_(const SlicedMatrix* x, Muon opt) {
    const SlicedUpdate* u = x->t.u;
    const int by_cols = sliced_by_cols(x);
    const size_t rows = x->whole.rows, cols = x->t.whole->cols;
    if (by_cols) {
        sliced_arrange_(x, u->slices, u->matrix, SLICED_TO_OWNER);
    }
    const MuonMatrix whole = {
        NULL, NULL, NULL, sliced_squares(x), 1, rows, cols, by_cols ? u->matrix : u->slices, 0, rows * cols};
    const float* turned = muon_turn_cpu(whole, opt, &u->scratch);
    if (by_cols) {
        sliced_arrange_(x, turned, u->slices, SLICED_BACK);
    } else {
        memcpy(u->slices, turned, rows * cols * sizeof(float));
    }
}

// Moves this rank's part of a matrix.
static void sliced_muon_move_(const SlicedMatrix* x, const ZeroRange* range, Muon opt) {
    const size_t end = range->before + range->count,
                 from = range->before > x->begin ? range->before : x->begin,
                 to = end < x->begin + x->count ? end : x->begin + x->count;
    const MuonMatrix part = {sliced_param_(&x->t) + x->begin,
                             NULL,
                             NULL,
                             NULL,
                             1,
                             x->whole.rows,
                             x->t.whole->cols,
                             NULL,
                             from - x->begin,
                             to - x->begin};
    if (from < to) {
        muon_move_cpu(part, opt, sliced_operand_(&x->t) + x->begin);
    }
}

// True if a range is part of a tensor of this process.
static int sliced_is_range_(const SlicedTensor* t, const ZeroRange* range) {
    return range->row == t->i && range->group == t->group && range->copy == sliced_copy_(t);
}

static void sliced_muon_move_all_(const SlicedMatrix* x, Muon opt) {
    const Zero* z = x->t.u->zero;
    for (int r = 0; r < z->num_ranges; r++) {
        if (sliced_is_range_(&x->t, &z->ranges[r])) {
            sliced_muon_move_(x, &z->ranges[r], opt);
        }
    }
}

static void sliced_muon_(const SlicedUpdate* u, int group, Muon opt) {
    SlicedMatrix matrices[SLICED_MATRICES];
    const int count = sliced_matrices(u, group, matrices), t = u->group->size;
    for (int first = 0; first < count; first += t) {
        const int owned = int_min(t, count - first);
        sliced_exchange_(u, matrices + first, owned, SLICED_TO_OWNER);
        if (u->group->rank < owned) {
            sliced_turn_(&matrices[first + u->group->rank], opt);
        }
        sliced_exchange_(u, matrices + first, owned, SLICED_BACK);
    }
    for (int k = 0; k < count; k++) {
        sliced_muon_move_all_(&matrices[k], opt);
    }
}

// ---- Adafactor ----

// Gathers `floats` of each slice in `all`, where this process has set its own.
static void sliced_gather_(const SlicedUpdate* u, void* all, size_t floats) {
    float* to = (float*)all;
    group_all_gather_cpu(to, to + (size_t)u->group->rank * floats, floats, u->group);
}

// Returns this process's slice; with the rows that count, and with means in `row` and `col`.
static AdafactorMatrix sliced_adafactor_(const SlicedTensor* t, float* row, float* col) {
    const int j = t->u->state->cfg.part.tensor_rank;
    const AdafactorMatrix x = {sliced_param_(t),      sliced_operand_(t), row, col, NULL,
                               sliced_counted_(t, j), t->row->cols,       0,   0};
    return x;
}

// Returns where row r of slice j lies in the whole matrix, and how many rows from there on are
// neighbors in both.
static PartRun sliced_rows_(const SlicedTensor* t, int j, size_t r) {
    const size_t cols = t->row->cols;
    ModelPart part = t->u->state->cfg.part;
    part.tensor_rank = j;
    PartRun run = part_run(t->row, t->u->whole, part, r * cols);
    if (t->row->split == SPLIT_COLS) {
        const PartRun all = {r, r, t->row->rows - r};
        return all;
    }
    run.part = r, run.whole /= cols, run.count /= cols;
    return run;
}

// Copies the means of a slice's rows out of those of the whole matrix.
static void sliced_rows_of_(const SlicedTensor* t, int j, const float* whole, float* rows) {
    for (size_t r = 0; r < t->row->rows;) {
        const PartRun run = sliced_rows_(t, j, r);
        memcpy(rows + r, whole + run.whole, run.count * sizeof(float));
        r += run.count;
    }
}

// Sets the means of the squares of all rows of the gathered sums, slice by slice; those that slices
// have together are the mean over these.
static void sliced_merge_rows_(const SlicedTensor* t, float* row, float beta2) {
    const SlicedUpdate* u = t->u;
    const int s = model_tensor_ranks(u->state->cfg), by_cols = t->row->split == SPLIT_COLS;
    for (int j = 0; j < (by_cols ? 1 : s); j++) {
        const float* sums = u->sums + (size_t)j * u->sums_room;
        const size_t counted = sliced_counted_(t, j);
        for (size_t r = 0; r < counted; r++) {
            const size_t to = sliced_rows_(t, j, r).whole;
            double mean = sums[r];
            for (int k = 1; k < s && by_cols; k++) {
                mean += sums[(size_t)k * u->sums_room + r];
            }
            mean /= by_cols ? s : 1;
            row[to] = beta2 * row[to] + (1.0f - beta2) * (float)mean;
        }
    }
}

static void sliced_merge_cols_(const SlicedTensor* t, float* col, float beta2, size_t rows) {
    const SlicedUpdate* u = t->u;
    const int s = model_tensor_ranks(u->state->cfg), by_cols = t->row->split == SPLIT_COLS;
    const size_t cols = t->row->cols;
    for (size_t c = 0; c < t->whole->cols; c++) {
        double sum = 0;
        for (int j = by_cols ? (int)(c / cols) : 0; j < (by_cols ? (int)(c / cols) + 1 : s); j++) {
            sum += u->sums[(size_t)j * u->sums_room + t->row->rows + c % cols];
        }
        col[c] = beta2 * col[c] + (1.0f - beta2) * (float)(sum / (double)rows);
    }
}

// Updates the means of rows and columns. Returns mean(row).
static double sliced_merge_(const SlicedTensor* t, Adafactor opt) {
    float *row = sliced_state_(t, STATE_ROWS), *col = sliced_state_(t, STATE_COLS);
    const size_t rows = model_rows_in_files(t->whole, t->u->whole);
    double mean = 0;
    sliced_merge_rows_(t, row, adafactor_beta2(opt));
    sliced_merge_cols_(t, col, adafactor_beta2(opt), rows);
    for (size_t r = 0; r < rows; r++) {
        mean += row[r] / (double)rows;
    }
    return mean;
}

// Updates the means from the gradients of all slices. Returns mean(row).
static double sliced_squares_of_all_(const SlicedTensor* t, Adafactor opt) {
    const SlicedUpdate* u = t->u;
    float* sums = u->sums + (size_t)u->group->rank * u->sums_room;
    memset(sums, 0, u->sums_room * sizeof(float));
    adafactor_slice_squares_cpu(sliced_adafactor_(t, sums, sums + t->row->rows), opt, u->scratch.memory);
    sliced_gather_(u, u->sums, u->sums_room);
    return sliced_merge_(t, opt);
}

// Returns this process's slice with the means of its rows and columns.
static AdafactorMatrix sliced_with_means_(const SlicedTensor* t) {
    const int j = t->u->group->rank;
    float* cols = sliced_state_(t, STATE_COLS);
    sliced_rows_of_(t, j, sliced_state_(t, STATE_ROWS), t->u->means);
    return sliced_adafactor_(t, t->u->means,
                             cols + (t->row->split == SPLIT_COLS ? (size_t)j * t->row->cols : 0));
}

// Returns the sums of this process's slice.
static AdafactorSums sliced_sums_(const SlicedTensor* t, double row_mean, Adafactor opt) {
    const size_t n = t->row->cols;
    if (t->u->state->rule[t->i] == RULE_FACTORED) {
        return adafactor_slice_sums_cpu(sliced_with_means_(t), row_mean, opt, t->u->scratch.memory);
    }
    return adafactor_vector_sums_cpu(sliced_param_(t), sliced_operand_(t), sliced_state_(t, STATE_V), n, n,
                                     opt);
}

// Returns the means of the whole tensor.
static AdafactorMeans sliced_means_(const SlicedTensor* t, double row_mean, Adafactor opt) {
    const Group* group = t->u->group;
    const double elements = (double)model_rows_in_files(t->whole, t->u->whole) * (double)t->whole->cols;
    AdafactorSums sums[MODEL_MAX_TENSOR_RANKS], all = {0, 0};
    sums[group->rank] = sliced_sums_(t, row_mean, opt);
    sliced_gather_(t->u, sums, sizeof(AdafactorSums) / sizeof(float));
    for (int j = 0; j < group->size; j++) {
        all.u += sums[j].u;
        all.param += sums[j].param;
    }
    const AdafactorMeans means = {row_mean, sqrt(all.u / elements), sqrt(all.param / elements)};
    return means;
}

static void sliced_adafactor_move_(const SlicedTensor* t, const ZeroRange* range, AdafactorMeans means,
                                   Adafactor opt) {
    const size_t begin = range->before, end = begin + range->count;
    float* m = (float*)state_array(t->u->state, STATE_M, range);
    if (t->u->state->rule[t->i] == RULE_FACTORED) {
        AdafactorMatrix x = sliced_with_means_(t);
        x.m = m, x.rows = t->row->rows, x.begin = begin, x.end = end;
        adafactor_slice_move_cpu(x, means, opt, t->u->scratch.memory);
    } else {
        adafactor_vector_move_cpu(sliced_param_(t), sliced_operand_(t), sliced_state_(t, STATE_V), m, begin,
                                  end, means, opt);
    }
}

static void sliced_adafactor_update_(const SlicedTensor* t, Adafactor opt) {
    const Zero* z = t->u->zero;
    const int is_matrix = t->u->state->rule[t->i] == RULE_FACTORED;
    const AdafactorMeans means = sliced_means_(t, is_matrix ? sliced_squares_of_all_(t, opt) : 0, opt);
    for (int r = 0; r < z->num_ranges; r++) {
        if (sliced_is_range_(t, &z->ranges[r])) {
            sliced_adafactor_move_(t, &z->ranges[r], means, opt);
        }
    }
}

void sliced_update_cpu(SlicedUpdate* u, int group, Update update) {
    u->operands = zero_operands_cpu(u->zero, group);
    sliced_muon_(u, group, update_muon(update));
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const SlicedTensor t = sliced_tensor_(u, i, group);
        if (sliced_update_has(u->state, i) && u->state->rule[i] != RULE_MUON &&
            tensor_is_in_group(t.row, group) && sliced_takes_part_(&t, 0, tensor_layer_elements(t.row))) {
            sliced_adafactor_update_(&t, update_adafactor(update_of_row(update, u->state, i)));
        }
    }
}

#endif // SLICED_UPDATE_IMPLEMENTATION

#endif
