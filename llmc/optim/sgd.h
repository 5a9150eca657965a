/*
sgd.h -- stochastic gradient descent with momentum: the contract, and the CPU version.

    g = grad * grad_scale
    m = momentum m + g                 without momentum there is no m: g takes its place
    param -= lr (m + weight_decay param)

    param, grad   (n)   fp32
    m             (n)   fp32; NULL: no momentum

This is torch.optim.SGD (dampening 0), except that the decay does not enter m. 20 bytes move per
parameter, 12 without momentum: memory bound.
*/
#ifndef LLMC_SGD_H
#define LLMC_SGD_H

#include "llmc/optim/adamw.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    float lr, momentum, weight_decay;
    float grad_scale; // factor of the gradient
    Decay decay;
} Sgd;

// Counts the bytes moved: read param and grad, write param; with momentum, read and write m.
static inline double sgd_bytes(double n, float momentum) { return (momentum ? 20 : 12) * n; }

void sgd_update_cpu(float* param, const float* grad, float* m, size_t n, Sgd opt);

#ifdef __cplusplus
}
#endif

#ifdef SGD_IMPLEMENTATION

#include "llmc/base/host_device.h"

void sgd_update_cpu(float* param, const float* grad, float* m, size_t n, Sgd opt) {
    const float keep = 1.0f - opt.lr * opt.weight_decay, rate = opt.lr * opt.grad_scale;
    if (!m) {
#pragma omp parallel for simd schedule(static)
        for (size_t i = 0; i < n; i++) {
            param[i] =
                multiply_add(decay_keep(keep, opt.decay, grad[i], param[i]), param[i], -rate * grad[i]);
        }
        return;
    }
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        m[i] = multiply_add(opt.momentum, m[i], opt.grad_scale * grad[i]);
        param[i] = multiply_add(decay_keep(keep, opt.decay, m[i], param[i]), param[i], -opt.lr * m[i]);
    }
}

#endif // SGD_IMPLEMENTATION

#endif
