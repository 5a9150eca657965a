/*
linear_reference.h -- a linear layer and its gradients by reference.h, for tests of matmuls.
*/
#ifndef LINEAR_REFERENCE_H
#define LINEAR_REFERENCE_H

#include "llmc/reference.h"
#include "dev/test/lib/ops.h"

// Results of the reference, for the inputs or their absolute values.
typedef struct {
    double *out, *dinp, *dweight, *dbias;
} Results;

static Results reference(int N, int C, int OC, const double* inp, const double* weight, const double* bias,
                         const double* dout) {
    const Results r = {ops_doubles((size_t)N * OC), ops_doubles((size_t)N * C), ops_doubles((size_t)OC * C),
                       ops_doubles(OC)};
    ref_linear_forward(r.out, inp, weight, bias, (RefLinear){N, C, OC});
    ref_linear_backward(r.dinp, r.dweight, r.dbias, dout, inp, weight, (RefLinear){N, C, OC});
    return r;
}

#endif
