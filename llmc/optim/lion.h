/*
lion.h -- the Lion update: the contract, and the CPU version.

    g = grad * grad_scale
    param -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay param)          sign(0) = 0
    m = beta2 m + (1 - beta2) g

    param, grad, m   (n)   fp32

Every step has the size lr, whatever the gradient. Chen et al., "Symbolic Discovery of Optimization
Algorithms", arXiv 2302.06675. 20 bytes move per parameter: memory bound.
*/
#ifndef LLMC_LION_H
#define LLMC_LION_H

#include "llmc/optim/adamw.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    float lr, beta1, beta2, weight_decay; // the paper's betas are 0.9 and 0.99
    float grad_scale;                     // factor of the gradient
    Decay decay;
} Lion;

static inline double lion_bytes(double n) { return 20 * n; } // read param, grad, m; write param, m

void lion_update_cpu(float* param, const float* grad, float* m, size_t n, Lion opt);

#ifdef __cplusplus
}
#endif

#ifdef LION_IMPLEMENTATION

#include "llmc/base/host_device.h"

void lion_update_cpu(float* param, const float* grad, float* m, size_t n, Lion opt) {
    const float keep = 1.0f - opt.lr * opt.weight_decay;
#pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) {
        const float g = grad[i] * opt.grad_scale;
        const float direction = multiply_add(opt.beta1, m[i], (1.0f - opt.beta1) * g);
        m[i] = multiply_add(opt.beta2, m[i], (1.0f - opt.beta2) * g);
        param[i] = multiply_add(decay_keep(keep, opt.decay, direction, param[i]), param[i],
                                -opt.lr * (float)((direction > 0) - (direction < 0)));
    }
}

#endif // LION_IMPLEMENTATION

#endif
