// test_reference_recurrent.c -- llmc/reference_recurrent.h against finite differences in double,
// and the delta rule against numbers of transformers (dev/ref/make_delta_fixtures.py).
#include "llmc/reference_recurrent.h"
#include "dev/test/lib/ops.h"

enum { B = 2, T = 5, N = B * T, C = 4, W = 3, Hk = 2, Hv = 4, dk = 3, dv = 2 };
enum { ROW = 2 * Hk * dk + Hv * dv, STATES = N * Hv * dk * dv };

static const int starts[N] = {0, 0, 2, 2, 2, 0, 1, 1, 1, 4}; // documents of one token and more

// An operation of up to four inputs, whose backward pass adds to dx. The loss is sum(out dout).
typedef struct Operation {
    const char* name;
    void (*pass)(const struct Operation* op, int is_backward);
    size_t out_n, x_n[4];
    const int* starts;
    int kind;
    double *out, *dout, *x[4], *dx[4], *kept, *scratch;
} Operation;

static double loss(const void* arg) {
    const Operation* op = arg;
    double sum = 0;
    op->pass(op, 0);
    for (size_t i = 0; i < op->out_n; i++) {
        sum += op->out[i] * op->dout[i];
    }
    return sum;
}

static void conv_pass(const Operation* op, int is_backward) {
    const RefConv x = {(ShortConvKind)op->kind, B, T, C, W, op->starts, op->x[0], op->x[1], op->x[2]};
    if (is_backward) {
        ref_conv_backward(op->dx[0], op->dx[1], op->dx[2], op->dout, &x);
    } else {
        ref_conv_forward(op->out, &x);
    }
}

static void delta_pass(const Operation* op, int is_backward) {
    const RefDelta x = {B, T, Hk, Hv, dk, dv, op->x[0], op->x[1], op->x[2], op->x[3], op->starts};
    if (is_backward) {
        ref_delta_backward(op->dx[0], op->dx[1], op->dx[2], op->dx[3], op->scratch, op->dout, op->kept, &x);
    } else {
        ref_delta_forward(op->out, op->kept, &x);
    }
}

static void gated_pass(const Operation* op, int is_backward) {
    const RefNorm norm = {NORM_RMS, op->x[2], NULL, NULL, op->kept, 1e-6, 1, N, C};
    if (is_backward) {
        ref_gated_norm_backward(op->dx[0], op->dx[1], op->dx[2], op->scratch, op->dout, op->x[0], op->x[1],
                                norm);
    } else {
        ref_gated_norm_forward(op->out, op->x[0], op->x[1], norm);
    }
}

// Every backward pass computes the gradient of the loss, and a second pass doubles it.
TEST(recurrent_operations) {
    // clang-format off
    const Operation operations[] = {
        {"conv, silu",        conv_pass,  N * C,       {N * C, C * W, C},     starts, SHORT_CONV_SILU},
        {"conv, no bias",     conv_pass,  N * C,       {N * C, C * W},        NULL,   SHORT_CONV_SILU},
        {"conv, gated",       conv_pass,  N * C,       {3 * N * C, C * W, C}, starts, SHORT_CONV_GATED},
        {"delta rule",        delta_pass, N * Hv * dv, {N * ROW, N * 2 * Hv, Hv, Hv}, NULL},
        {"delta, documents",  delta_pass, N * Hv * dv, {N * ROW, N * 2 * Hv, Hv, Hv}, starts},
        {"gated norm",        gated_pass, N * C,       {N * C, N * C, C}}};
    // clang-format on
    for (size_t i = 0; i < sizeof(operations) / sizeof(operations[0]); i++) {
        Operation op = operations[i];
        op.out = ops_doubles(op.out_n), op.dout = ops_widen(ops_normal(op.out_n, 1), op.out_n);
        op.kept = ops_doubles(STATES), op.scratch = ops_doubles(N * C);
        for (int j = 0; j < 4 && op.x_n[j]; j++) {
            op.x[j] = ops_widen(ops_normal(op.x_n[j], 1), op.x_n[j]), op.dx[j] = ops_doubles(op.x_n[j]);
        }
        for (int pass = 0; pass < 2; pass++) {
            op.pass(&op, 0);
            op.pass(&op, 1);
        }
        for (int j = 0; j < 4 && op.x_n[j]; j++) {
            for (size_t e = 0; e < op.x_n[j]; e++) {
                op.dx[j][e] /= 2;
            }
            ops_expect_gradient(op.name, loss, &op, op.x[j], op.dx[j], op.x_n[j]);
        }
        ops_close(op.name);
    }
}
