/*
matrices.h -- what an update needs as a whole, and which rank updates it.

Some rules (optimizer.h) update whole matrices, or whole tensors. Of several ranks that have parts
of them, one makes the update of a matrix and keeps its state: its owner. The ranks are those that
divide the bucket of the matrix (map.h), times those that cut its tensor (part.h): owner number
d t + j is rank j, of t, of the tensor group of rank d. Where each rank has and updates everything
it owns everything.

The matrices of all layers are numbered by size, the largest first, and dealt in turn: matrix n has
owner n mod `owners`. So no rank has more than the mean and one matrix. Those outside of blocks and
those of blocks, which other ranks may divide, are dealt apart.
*/
#ifndef LLMC_MATRICES_H
#define LLMC_MATRICES_H

#include <stddef.h>

#include "llmc/model/map.h"
#include "llmc/model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MATRICES_MOST = MODEL_PARAMETER_ROWS * TENSOR_RUNS };

// Equal matrices of a tensor, in all its layers: a run of them (tensors.h), or the whole tensor.
typedef struct {
    int row, run;           // of the parameters; -1: the whole tensor
    int count;              // in a layer
    size_t first;           // row of the whole tensor with which the first one begins
    size_t rows, cols;      // of each, in files
    int first_copy, copies; // of the tensor in this rank's memory, that are trained
    size_t before;          // number of the first one
    int owners, owner;      // ranks, and this one's number among them
} Matrices;

// One of them: number `number` of a copy of the tensor.
typedef struct {
    const Matrices* of;
    int copy, number;
} OwnedMatrix;

// Sets the matrices of these rows of the parameters, as one rank owns them all: `matrices` (bits)
// are updated matrix by matrix, `tensors` as a whole. Returns their number. `rows` and `whole` are
// the rows of this rank's part, and of the model.
int matrices_open(Matrices all[MATRICES_MOST], ModelConfig cfg, const TensorRow* rows, const TensorRow* whole,
                  TensorSet matrices, TensorSet tensors);

// Divides the matrices of trained blocks among the ranks of a map.
void matrices_divide(Matrices* all, int count, const Map* map);

static inline size_t matrices_all(const Matrices* m) { return (size_t)m->count * (size_t)m->copies; }

// True if several ranks own these matrices, so that operands travel.
static inline int matrices_travel(const Matrices* m) { return m->owners > 1; }

// Returns how many of the first n of these matrices this rank owns.
static inline size_t matrices_owned(const Matrices* m, size_t n) {
    const size_t owners = (size_t)m->owners, skipped = owners - 1 - (size_t)m->owner;
    return (m->before + n + skipped) / owners - (m->before + skipped) / owners;
}

// Returns the number of a matrix in the deal, and its owner.
static inline size_t matrix_number(OwnedMatrix x) {
    return x.of->before + (size_t)(x.copy - x.of->first_copy) * (size_t)x.of->count + (size_t)x.number;
}
static inline int matrix_owner(OwnedMatrix x) { return (int)(matrix_number(x) % (size_t)x.of->owners); }
static inline int matrix_is_owned(OwnedMatrix x) { return matrix_owner(x) == x.of->owner; }

static inline size_t matrix_elements(OwnedMatrix x) { return x.of->rows * x.of->cols; }

// The elements of this rank's part of a copy of the tensor that belong to a matrix.
typedef struct {
    size_t begin, count;
} MatrixPart;

// Returns them for the rank of the tensor group whose part is `cfg`.
MatrixPart matrix_part(OwnedMatrix x, const TensorRow* row, ModelConfig cfg);

#ifdef __cplusplus
}
#endif

#ifdef MATRICES_IMPLEMENTATION

#include <stdlib.h>

static Matrices matrices_of_(int i, int run, ModelConfig cfg, const TensorRow* row, const TensorRow* whole) {
    const TensorRow* all = row->split == SPLIT_EXPERTS ? row : whole; // each rank has whole experts
    const TensorRun all_rows = {0, model_rows_in_files(all, cfg), 1},
                    of = run < 0 ? all_rows : tensor_run(all, run);
    const Matrices m = {i, run, of.count, of.first, of.rows, all->cols, 0, row->layers, 0, 1, 0};
    return m;
}

static int matrices_by_size_(const void* a, const void* b) {
    const Matrices *x = *(const Matrices*const*)a, *y = *(const Matrices*const*)b;
    const size_t m = x->rows * x->cols, n = y->rows * y->cols;
    return m != n ? (m < n ? 1 : -1) : (x > y) - (x < y);
}

// Numbers the matrices of one place.
static void matrices_deal_(Matrices* all, int count, const TensorRow* rows, TensorPlace place) {
    Matrices* sorted[MATRICES_MOST];
    size_t before = 0;
    int n = 0;
    for (int k = 0; k < count; k++) {
        if (rows[all[k].row].place == place) {
            sorted[n++] = &all[k];
        }
    }
    qsort(sorted, (size_t)n, sizeof(sorted[0]), matrices_by_size_);
    for (int k = 0; k < n; k++) {
        sorted[k]->before = before;
        before += matrices_all(sorted[k]);
    }
}

int matrices_open(Matrices all[MATRICES_MOST], ModelConfig cfg, const TensorRow* rows, const TensorRow* whole,
                  TensorSet matrices, TensorSet tensors) {
    int count = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int run = 0; run < tensor_runs(&whole[i]) && tensor_is_in(matrices, i); run++) {
            all[count++] = matrices_of_(i, run, cfg, &rows[i], &whole[i]);
        }
        if (tensor_is_in(tensors, i)) {
            all[count++] = matrices_of_(i, -1, cfg, &rows[i], &whole[i]);
        }
    }
    matrices_deal_(all, count, rows, PLACE_ONCE);
    matrices_deal_(all, count, rows, PLACE_BLOCK);
    return count;
}

void matrices_divide(Matrices* all, int count, const Map* map) {
    const MapOf* of = &map->of;
    const MapPlace at = map_place(of, map->rank);
    for (Matrices* m = all; m < all + count; m++) {
        const int is_block = map->rows[m->row].place == PLACE_BLOCK,
                  share = is_block ? of->experts : 1, // neighbors that divide it as one
            is_divided = map_is_divided(map);
        m->owners = (is_divided ? of->data / share : 1) * of->tensor;
        m->owner = (is_divided ? at.data / share : 0) * of->tensor + at.tensor;
        m->first_copy = is_block ? tensor_copies_before(&map->rows[m->row], map->totals.first_block) : 0;
        m->copies = map->rows[m->row].layers - m->first_copy;
        m->copies = m->copies > 0 ? m->copies : 0;
    }
    matrices_deal_(all, count, map->rows, PLACE_ONCE);
    matrices_deal_(all, count, map->rows, PLACE_BLOCK);
}

MatrixPart matrix_part(OwnedMatrix x, const TensorRow* row, ModelConfig cfg) {
    const TensorRun all = {0, model_rows_of_part(row, cfg), 1},
                    run = x.of->run < 0 ? all : tensor_run(row, x.of->run);
    const MatrixPart part = {(run.first + (size_t)x.number * run.rows) * row->cols, run.rows * row->cols};
    return part;
}

#endif // MATRICES_IMPLEMENTATION

#endif
