/*
update_in_backward.h -- decides on the update of each group of parameters (model.h) during the
backward pass (--update-in-backward), before the gradients of the others are complete.

A group is updated as soon as its gradient is complete, and its gradient is then dropped. The groups
come in the order of the backward pass: the last block first, and group 0 at the end.

Clipping: the norm of the whole gradient is not known in time, so each group is clipped to its share
of the limit c,

    |gradient of group g| <= c sqrt(share_g)

where share_g is the group's usual part of the squared norm: the mean over the earlier updates, an
exponential one (0.99) after the first 100. In the first update it is the group's part of all
parameters. While the shares stay the same, this clips as the whole norm would; a spike is clipped
in its own group only.

No group is updated if the loss forbids it (outliers.h). A group whose gradient is not finite is not
updated, and neither are those after it, whose gradients come from the same numbers.

ClipShares is plain numbers without pointers: a checkpoint may store it as it is.
*/
#ifndef LLMC_UPDATE_IN_BACKWARD_H
#define LLMC_UPDATE_IN_BACKWARD_H

#include <stdint.h>
#include <string.h>

#include "llmc/optim/outliers.h"
#include "llmc/base/wide_sum.h"
#include "llmc/ops/cross_entropy.h"
#include "llmc/model/model.h"
#include "llmc/optim/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- shares ----

enum { CLIP_MAX_GROUPS = MODEL_MAX_LAYERS + 1 };

typedef struct {
    int64_t updates; // updates in the mean
    int groups;
    double share[CLIP_MAX_GROUPS];
} ClipShares;

ClipShares clip_shares_open(ModelConfig cfg);

// Adds the square sums of an update's groups to the mean, unless they are zero or not finite.
void clip_shares_add(ClipShares* shares, const double* squares);

// Returns the factor that clips the gradient of group g, which has this norm. `limit` holds for the
// whole gradient; 0: none.
float clip_shares_scale(const ClipShares* shares, int g, double norm, float limit);

// ---- an update ----

typedef struct {
    const ClipShares* shares;
    const UpdateGuard* guard;
    Update update;      // settings before clipping
    float grad_clip;    // --grad-clip
    double total_batch; // tokens
    double factor;      // factor of loss and gradient, which count 1 / total_batch for each token
    double losses;      // sum of the losses
    int is_damaged;     // true if the batch is
    int may_update;     // true if the next groups may be updated
    int updated;        // groups updated so far
    int stopped_at;     // first group whose gradient was not finite, -1: none
    WideSum square_sum; // sum of squares of the groups so far
    double squares[CLIP_MAX_GROUPS];
} InBackward;

void in_backward_open(InBackward* u, const ClipShares* shares, const UpdateGuard* guard, Update update,
                      float grad_clip, double total_batch);

// Before the pass: `counted` targets of the batch count. Damaged data make no update. Does nothing
// without a hook.
static inline void in_backward_batch(InBackward* hook, double counted, int is_damaged) {
    if (hook) {
        hook->factor = targets_factor(hook->total_batch, counted);
        hook->is_damaged = is_damaged;
    }
}

// Decides by the sum of the losses, before the first group.
void in_backward_losses(InBackward* u, double losses);

// Decides on group g, whose gradient is complete; square_sum is its sum of squares. Sets *update;
// returns 1 if it is to be made.
int in_backward_group(InBackward* u, int g, WideSum square_sum, Update* update);

// Adds this update to the shares, after the pass.
void in_backward_end(const InBackward* u, ClipShares* shares);

#ifdef __cplusplus
}
#endif

#ifdef UPDATE_IN_BACKWARD_IMPLEMENTATION

#include <assert.h>
#include <math.h>

// Counts the parameters of group g, without padding.
static double clip_elements_(const TensorRow* rows, ModelConfig cfg, int g) {
    double elements = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        elements +=
            tensor_is_in_group(&rows[i], g) ? (double)(model_rows_in_files(&rows[i], cfg) * rows[i].cols) : 0;
    }
    return elements;
}

ClipShares clip_shares_open(ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    ClipShares shares;
    memset(&shares, 0, sizeof(shares));
    model_parameter_rows_of(rows, cfg, 1);
    shares.groups = model_groups(cfg);
    double all = 0;
    for (int g = 0; g < shares.groups; g++) {
        shares.share[g] = clip_elements_(rows, cfg, g);
        all += shares.share[g];
    }
    for (int g = 0; g < shares.groups; g++) {
        shares.share[g] /= all;
    }
    return shares;
}

void clip_shares_add(ClipShares* shares, const double* squares) {
    double all = 0;
    for (int g = 0; g < shares->groups; g++) {
        all += squares[g];
    }
    if (!(all > 0 && isfinite(all))) {
        return;
    }
    shares->updates++;
    const double weight = fmax(1.0 / (double)shares->updates, 0.01);
    for (int g = 0; g < shares->groups; g++) {
        shares->share[g] += weight * (squares[g] / all - shares->share[g]);
    }
}

float clip_shares_scale(const ClipShares* shares, int g, double norm, float limit) {
    const double of_group = limit * sqrt(shares->share[g]);
    return limit > 0 && norm > of_group ? (float)(of_group / norm) : 1.0f;
}

void in_backward_open(InBackward* u, const ClipShares* shares, const UpdateGuard* guard, Update update,
                      float grad_clip, double total_batch) {
    memset(u, 0, sizeof(*u));
    u->shares = shares;
    u->guard = guard;
    u->update = update;
    u->grad_clip = grad_clip;
    u->total_batch = total_batch;
    u->stopped_at = -1;
}

void in_backward_losses(InBackward* u, double losses) {
    u->losses = losses;
    u->may_update = !u->is_damaged && outliers_allows_loss(u->guard, losses / u->total_batch * u->factor);
}

int in_backward_group(InBackward* u, int g, WideSum square_sum, Update* update) {
    const double square = wide_sum_value(square_sum);
    wide_sum_merge(&u->square_sum, square_sum);
    u->squares[g] = square;
    if (u->may_update && !isfinite(square)) {
        u->may_update = 0;
        u->stopped_at = g;
    }
    u->updated += u->may_update;
    *update = u->update;
    update->grad_scale =
        clip_shares_scale(u->shares, g, sqrt(square) * u->factor, u->grad_clip) * (float)u->factor;
    return u->may_update;
}

void in_backward_end(const InBackward* u, ClipShares* shares) {
    if (u->may_update) {
        clip_shares_add(shares, u->squares);
    }
}

#endif // UPDATE_IN_BACKWARD_IMPLEMENTATION

#endif
