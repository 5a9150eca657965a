/*
sinks.h -- attention sinks: a learned logit of each head in the sum of its softmax, without a value;
the contract, and the CPU version.

With lse and out of attention.h, and the sink a of a head:

    lse'[t] = log(exp(lse[t]) + exp(a))        out'[t] = out[t] exp(lse[t] - lse'[t])
    da      = - sum_t exp(a - lse'[t]) (dout[t] . out'[t])

The forward pass changes out and lse in place. The probabilities of the keys are exp(s - lse'), so
the backward pass of attention is right as it is: it reads lse' and out'.

    out, dout    (B, T, NH*HS)
    lse          (B, NH, T)       fp32
    sinks        (NH)

Agarwal et al., "gpt-oss-120b & gpt-oss-20b model card", 2025; Xiao et al., "Efficient streaming
language models with attention sinks", 2023.
*/
#ifndef LLMC_SINKS_H
#define LLMC_SINKS_H

#include <math.h>
#include <stddef.h>

#include "llmc/base/host_device.h"
#include "llmc/ops/attention_sizes.h"
#include "llmc/ops/gradient.h"

#ifdef __cplusplus
extern "C" {
#endif

// Return log(exp(lse) + exp(sink)), and exp(lse) / (exp(lse) + exp(sink)).
HOST_DEVICE float sinks_lse(float lse, float sink) {
    const float high = fmaxf(lse, sink), low = fminf(lse, sink);
    return high + log1pf(expf(low - high));
}
HOST_DEVICE float sinks_share(float lse, float sink) { return 1.0f / (1.0f + expf(sink - lse)); }

// Returns the row of lse for head h of token n of all B T.
HOST_DEVICE size_t sinks_at(AttentionSizes sizes, size_t n, int h) {
    const size_t T = (size_t)sizes.T;
    return (n / T * (size_t)sizes.NH + (size_t)h) * T + n % T;
}

void sinks_forward_cpu(float* out, float* lse, const float* sinks, AttentionSizes sizes);

// Sets or adds to dsinks (NH). The bits do not depend on the number of threads.
void sinks_backward_cpu(float* dsinks, const float* dout, const float* out, const float* lse,
                        const float* sinks, AttentionSizes sizes, GradientMode mode);

#ifdef __cplusplus
}
#endif

#ifdef SINKS_IMPLEMENTATION

#include "llmc/base/vec.h"

void sinks_forward_cpu(float* out, float* lse, const float* sinks, AttentionSizes sizes) {
    const size_t N = (size_t)sizes.B * (size_t)sizes.T, NH = (size_t)sizes.NH, HS = (size_t)sizes.HS;
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < N * NH; i++) {
        const int h = (int)(i % NH);
        const size_t at = sinks_at(sizes, i / NH, h);
        const float share = sinks_share(lse[at], sinks[h]);
        for (size_t d = 0; d < HS; d++) {
            out[i * HS + d] *= share;
        }
        lse[at] = sinks_lse(lse[at], sinks[h]);
    }
}

// A head is summed by one thread, in the order of the tokens.
void sinks_backward_cpu(float* dsinks, const float* dout, const float* out, const float* lse,
                        const float* sinks, AttentionSizes sizes, GradientMode mode) {
    const size_t N = (size_t)sizes.B * (size_t)sizes.T, NH = (size_t)sizes.NH, HS = (size_t)sizes.HS;
#pragma omp parallel for schedule(static)
    for (size_t h = 0; h < NH; h++) {
        double sum = 0;
        for (size_t n = 0; n < N; n++) {
            const size_t row = (n * NH + h) * HS;
            const float p = expf(sinks[h] - lse[sinks_at(sizes, n, (int)h)]);
            sum -= p * vec_dot(dout + row, out + row, sizes.HS);
        }
        dsinks[h] = (mode == GRADIENT_ADD ? dsinks[h] : 0.0f) + (float)sum;
    }
}

#endif // SINKS_IMPLEMENTATION

#endif
