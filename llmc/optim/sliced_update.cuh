/*
sliced_update.cuh -- sliced_update.h on GPUs, for Muon: the rounds of a layer's matrices.

Slices travel in fp32. All is queued on the main stream.
*/
#ifndef LLMC_SLICED_UPDATE_CUH
#define LLMC_SLICED_UPDATE_CUH

#include "llmc/comm/comm_nccl.cuh"
#include "llmc/gpu/gpu.cuh"
#include "llmc/optim/muon.cuh"
#include "llmc/optim/sliced_update.h"

enum { SLICED_THREADS_ = 256 };

// A thread copies an element of a matrix (rows, cols) from slices of `of_slice` columns, one after
// the other.
// grid   ceil(rows cols / 256)      block   256      shared   none
// moves  8 bytes an element. Bound by memory.
// order  every element on its own
static __global__ void __launch_bounds__(SLICED_THREADS_)
    sliced_rows_kernel(float* matrix, const float* slices, size_t rows, size_t cols, size_t of_slice) {
    const size_t i = (size_t)blockIdx.x * SLICED_THREADS_ + threadIdx.x;
    if (i < rows * cols) {
        const size_t row = i / cols, col = i % cols;
        matrix[i] = slices[(col / of_slice * rows + row) * of_slice + col % of_slice];
    }
}

// Returns a matrix as a tensor of its own.
static inline MuonTensor sliced_muon_tensor(size_t rows, size_t cols) {
    MuonTensor t = {};
    t.end = rows * cols;
    t.layers = t.parts = t.by_layer = 1;
    t.rows = (int)rows, t.cols = (int)cols;
    return t;
}

// Replaces the slices of a matrix, which this process owns, by those of its orthogonalization.
template <class T> static inline void sliced_turn(const SlicedMatrix* x, MuonUpdate<T> u, const Gpu* gpu) {
    const size_t rows = x->whole.rows, cols = x->t.whole->cols, of_slice = x->t.row->cols;
    const MuonTensor t = sliced_muon_tensor(rows, cols);
    u.u = x->t.u->slices;
    u.row_squares = sliced_squares(x);
    if (sliced_by_cols(x)) {
        u.u = x->t.u->matrix;
        launch(sliced_rows_kernel, (unsigned)ceil_div(rows * cols, (size_t)SLICED_THREADS_), SLICED_THREADS_,
               0, gpu, u.u, (const float*)x->t.u->slices, rows, cols, of_slice);
    }
    muon_turn<T>(x->t.u->slices, of_slice, &t, u, gpu);
}

// Replaces the operands of a layer by the directions of its matrices. Collective.
template <class T>
static inline void sliced_muon(const SlicedUpdate* s, int group, const MuonUpdate<T>& u,
                               const GroupGpu* tensor, const Gpu* gpu) {
    SlicedMatrix matrices[SLICED_MATRICES];
    GroupMove moves[SLICED_MOVES];
    const int count = sliced_matrices(s, group, matrices), rank = tensor->rank;
    for (int first = 0; first < count; first += tensor->size) {
        const SlicedMatrix* round = matrices + first;
        const int owned = int_min(tensor->size, count - first);
        group_exchange(moves, sliced_moves(s, round, owned, SLICED_TO_OWNER, rank, moves), tensor,
                       gpu->stream);
        if (rank < owned) {
            sliced_turn(&round[rank], u, gpu);
        }
        group_exchange(moves, sliced_moves(s, round, owned, SLICED_BACK, rank, moves), tensor, gpu->stream);
    }
}

#endif
