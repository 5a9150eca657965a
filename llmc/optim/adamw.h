/*
adamw.h -- the AdamW update: the contract, and the CPU version.

    g = grad * grad_scale
    m = beta1 m + (1 - beta1) g            v = beta2 v + (1 - beta2) g^2
    param -= lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay param)

    param, grad, m, v   (n)   fp32; t counts from 1

DECAY_CAUTIOUS: an element decays only if the rest of the update moves it towards zero. It means the
same in other rules.

Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019. 28 bytes move per
parameter: memory bound.
*/
#ifndef LLMC_ADAMW_H
#define LLMC_ADAMW_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "llmc/base/host_device.h"

#ifdef __cplusplus
extern "C" {
#endif

// Selects the weights that decay.
typedef enum { DECAY_ALL, DECAY_CAUTIOUS } Decay;

// Returns the factor of a weight for its decay, if the rule subtracts a positive multiple of `step`
// from it; 1 where cautious decay leaves the weight alone.
HOST_DEVICE float decay_keep(float keep, Decay decay, float step, float param) {
    return decay == DECAY_ALL || step * param > 0 ? keep : 1.0f;
}

typedef struct {
    float lr, beta1, beta2, eps, weight_decay;
    float grad_scale; // factor of the gradient
    int64_t t;        // number of the update, from 1
    Decay decay;
} AdamW;

// read param, grad, m, v; write param, m, v
static inline double adamw_bytes(double n) { return 28 * n; }

// Numbers that all elements of an update share.
typedef struct {
    AdamW opt;
    float m_correction, v_correction, keep;
} AdamWStep;

AdamWStep adamw_step(AdamW opt);

// Elements of a cache line, and the prefetch distance: 2 KiB. The processor's own prefetcher stops
// at the end of a page (LOG.md).
#define ADAMW_LINE 16

#define ADAMW_AHEAD 512

// Updates one element.
HOST_DEVICE void adamw_element(float* param, float grad, float* m, float* v, AdamWStep step) {
    const float g = grad * step.opt.grad_scale;
    *m = multiply_add(step.opt.beta1, *m, (1.0f - step.opt.beta1) * g);
    *v = multiply_add(step.opt.beta2, *v, (1.0f - step.opt.beta2) * g * g);
    const float keep = decay_keep(step.keep, step.opt.decay, *m, *param);
    *param = multiply_add(keep, *param,
                          -step.opt.lr * (*m * step.m_correction) /
                              (sqrtf(*v * step.v_correction) + step.opt.eps));
}

void adamw_update_cpu(float* param, const float* grad, float* m, float* v, size_t n, AdamW opt);

#ifdef __cplusplus
}
#endif

#ifdef ADAMW_IMPLEMENTATION

AdamWStep adamw_step(AdamW opt) {
    const AdamWStep step = {opt, (float)(1 / (1 - pow(opt.beta1, (double)opt.t))),
                            (float)(1 / (1 - pow(opt.beta2, (double)opt.t))),
                            1.0f - opt.lr * opt.weight_decay};
    return step;
}

void adamw_update_cpu(float* param, const float* grad, float* m, float* v, size_t n, AdamW opt) {
    const AdamWStep step = adamw_step(opt);
#pragma omp parallel for schedule(static)
    for (size_t line = 0; line < n; line += ADAMW_LINE) {
        const size_t end = line + ADAMW_LINE < n ? line + ADAMW_LINE : n;
        __builtin_prefetch(param + line + ADAMW_AHEAD);
        __builtin_prefetch(grad + line + ADAMW_AHEAD);
        __builtin_prefetch(m + line + ADAMW_AHEAD);
        __builtin_prefetch(v + line + ADAMW_AHEAD);
#pragma omp simd
        for (size_t i = line; i < end; i++) {
            adamw_element(param + i, grad[i], m + i, v + i, step);
        }
    }
}

#endif // ADAMW_IMPLEMENTATION

#endif
