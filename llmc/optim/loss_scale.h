/*
loss_scale.h -- dynamic loss scaling: the factor that keeps fp16 gradients inside fp16's narrow
range.

The gradient of the loss is multiplied by `scale` before the backward pass, and all gradients are
divided by it in the update (Update.grad_scale holds 1 / scale).

    gradients not finite    no update; scale = max(scale * backoff, min); counting starts again
    finite                  update; after growth_interval of them in a row scale = scale * growth

So the scale climbs until it overflows fp16, falls back one step, and tries again 2000 updates
later. The rule and its constants are those of Micikevicius et al., "Mixed precision training", ICLR
2018, as in PyTorch's GradScaler; but this scale stops at 1, below which scaling cannot prevent an
overflow. All scales are powers of two, so scaling and unscaling round nothing (short of underflow).

The scale does not depend on outliers.h, which may refuse an update with finite gradients.

All state is plain numbers without pointers: a checkpoint may store it as it is.
*/
#ifndef LLMC_LOSS_SCALE_H
#define LLMC_LOSS_SCALE_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    float scale;           // factor of this step's loss
    int good_steps;        // finite steps since the scale last changed
    float growth, backoff; // factors
    int growth_interval;   // finite steps in a row before it grows
    float min;
} LossScale;

LossScale loss_scale_open(void);

// Returns a scale that stays 1, for types that need none.
LossScale loss_scale_off(void);

// Adjusts the scale for the next step; call it once a step. `finite`: all scaled gradients are.
// Returns 1 if the update may be made.
int loss_scale_update(LossScale* s, int finite);

#ifdef __cplusplus
}
#endif

#ifdef LOSS_SCALE_IMPLEMENTATION

#include <math.h>

LossScale loss_scale_open(void) {
    const LossScale s = {65536, 0, 2, 0.5f, 2000, 1};
    return s;
}

LossScale loss_scale_off(void) {
    const LossScale s = {1, 0, 1, 1, 2000, 1};
    return s;
}

int loss_scale_update(LossScale* s, int finite) {
    if (!finite) {
        s->scale = fmaxf(s->scale * s->backoff, s->min);
        s->good_steps = 0;
        return 0;
    }
    s->good_steps++;
    if (s->good_steps >= s->growth_interval) {
        const float grown = s->scale * s->growth;
        // with gradients of 0, nothing else stops the growth
        s->scale = isinf(grown) ? s->scale : grown;
        s->good_steps = 0;
    }
    return 1;
}

#endif // LOSS_SCALE_IMPLEMENTATION

#endif
