/*
mlp_case.h -- the MLP of a block by reference.h, for tests of MLPs: parameters, inputs, results, and
how far roundings can move the results.
*/
#ifndef DEV_MLP_CASE_H
#define DEV_MLP_CASE_H

#include "llmc/reference.h"
#include "dev/test/lib/ops.h"

// Parameters, inputs and results. The size of a result is the most by which it can change, per
// relative change of all factors.
typedef struct {
    ActivationKind kind;
    int N, C, F, H;                                    // H: columns of the hidden layer, gates F
    float *inp, *dout, *fcw, *fcb, *fcprojw, *fcprojb; // biases may be NULL
    double *out, *dinp, *dfcw, *dfcb, *dfcprojw, *dfcprojb;
    double *out_size, *dinp_size, *dfcw_size, *dfcb_size, *dfcprojw_size, *dfcprojb_size;
} MlpCase;

static inline MlpCase mlp_case_open(ActivationKind kind, int N, int C, int F, int has_bias) {
    MlpCase p;
    p.kind = kind, p.N = N, p.C = C, p.F = F, p.H = activation_gates(kind) * F;
    const size_t nc = (size_t)N * C, hc = (size_t)p.H * C, cf = (size_t)C * F;
    p.inp = ops_normal(nc, 1), p.dout = ops_normal(nc, 1);
    p.fcw = ops_normal(hc, 1 / sqrtf((float)C)), p.fcprojw = ops_normal(cf, 1 / sqrtf((float)F));
    p.fcb = has_bias ? ops_normal(p.H, 1) : NULL, p.fcprojb = has_bias ? ops_normal(C, 1) : NULL;
    p.out = ops_doubles(nc), p.out_size = ops_doubles(nc);
    p.dinp = ops_doubles(nc), p.dinp_size = ops_doubles(nc);
    p.dfcw = ops_doubles(hc), p.dfcw_size = ops_doubles(hc);
    p.dfcprojw = ops_doubles(cf), p.dfcprojw_size = ops_doubles(cf);
    p.dfcb = ops_doubles(p.H), p.dfcb_size = ops_doubles(p.H);
    p.dfcprojb = ops_doubles(C), p.dfcprojb_size = ops_doubles(C);
    return p;
}

static inline double* mlp_widen_(const float* x, size_t n) { return x ? ops_widen(x, n) : NULL; }
static inline double* mlp_absolute_(const float* x, size_t n) {
    return x ? ops_absolute(ops_widen(x, n), n) : NULL;
}

// The results, and the sizes: the same sums over absolute values, where an activation passes on how
// far its input can move times its derivative, and a derivative moves by at most 2 (1 + |up|) of
// that.
static inline void mlp_case_expect(const MlpCase* p) {
    const size_t N = p->N, C = p->C, F = p->F, H = p->H, gates = H / F;
    double *pre = ops_doubles(N * H), *act = ops_doubles(N * F), *dact = ops_doubles(N * F),
           *dpre = ops_doubles(N * H), *inp = ops_widen(p->inp, N * C), *dout = ops_widen(p->dout, N * C);
    const double *fcw = ops_widen(p->fcw, H * C), *fcprojw = ops_widen(p->fcprojw, C * F);
    ref_linear_forward(pre, inp, fcw, mlp_widen_(p->fcb, H), (RefLinear){N, C, H});
    ref_activation_forward(act, pre, N, F, p->kind);
    ref_linear_forward(p->out, act, fcprojw, mlp_widen_(p->fcprojb, C), (RefLinear){N, F, C});
    ref_linear_backward(dact, p->dfcprojw, p->dfcprojb, dout, act, fcprojw, (RefLinear){N, F, C});
    ref_activation_backward(dpre, dact, pre, N, F, p->kind);
    ref_linear_backward(p->dinp, p->dfcw, p->dfcb, dpre, inp, fcw, (RefLinear){N, C, H});

    double *pre_size = ops_doubles(N * H), *act_size = ops_absolute(act, N * F),
           *dact_size = ops_doubles(N * F), *slope = ops_doubles(N * H), *one = ops_doubles(N * F),
           *dpre_size = ops_absolute(dpre, N * H);
    const double *a_inp = mlp_absolute_(p->inp, N * C), *a_dout = mlp_absolute_(p->dout, N * C),
                 *a_fcw = mlp_absolute_(p->fcw, H * C), *a_fcprojw = mlp_absolute_(p->fcprojw, C * F);
    for (size_t i = 0; i < N * F; i++) {
        one[i] = 1;
    }
    ref_activation_backward(slope, one, pre, N, F, p->kind);
    ref_linear_forward(pre_size, a_inp, a_fcw, mlp_absolute_(p->fcb, H), (RefLinear){N, C, H});
    for (size_t i = 0; i < N * H; i++) {
        // the square counts where the slope is about 0
        act_size[i / H * F + i % F] += fabs(slope[i]) * pre_size[i] + 0x1p-7 * pre_size[i] * pre_size[i];
    }
    ref_linear_forward(p->out_size, act_size, a_fcprojw, mlp_absolute_(p->fcprojb, C), (RefLinear){N, F, C});
    ref_linear_backward(dact_size, p->dfcprojw_size, p->dfcprojb_size, a_dout, act_size, a_fcprojw,
                        (RefLinear){N, F, C});
    for (size_t i = 0; i < N * H; i++) {
        const size_t gate = i / H * H + i % F, up = gate + (gates - 1) * F, a = i / H * F + i % F;
        const double curve = 2 * (1 + (gates == 2 ? fabs(pre[up]) : 0));
        dpre_size[i] +=
            dact_size[a] * fabs(slope[i]) + fabs(dact[a]) * curve * (pre_size[gate] + pre_size[up]);
    }
    ref_linear_backward(p->dinp_size, p->dfcw_size, p->dfcb_size, dpre_size, a_inp, a_fcw,
                        (RefLinear){N, C, H});
}

#endif
