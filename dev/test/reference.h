/*
reference.h -- the CPU trainer as a library, for the test of the GPU trainer, which has the same names.

Parameters and gradients are fp32 and lie as the parameter rows of gpt2.h say for elements of 4 bytes.

defines: Reference, reference_open, reference_close, reference_gradients, reference_logits, reference_norm,
         reference_update, reference_grads, reference_params
*/
#ifndef DEV_REFERENCE_H
#define DEV_REFERENCE_H

#include "llmc/adamw.h"
#include "llmc/gpt2.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Reference Reference;

Reference* reference_open(GPT2Config cfg, int B, int T, const float* params);
void reference_close(Reference* reference);

// Forward and backward on a batch of up to B x T tokens: sets the gradients or adds to them; each token's
// loss counts 1 / loss_tokens. `starts` as in attention.h. Returns the sum of the losses divided by B * T.
double reference_gradients(Reference* reference, const int* tokens, const int* targets, const int* starts,
                           int batch_T, double loss_tokens, GradientMode mode);
const float* reference_logits(Reference* reference,
                              const int* tokens); // (B * T, Vp), valid until the next call
double reference_norm(Reference* reference);
void reference_update(Reference* reference, AdamW adamw);
const float* reference_grads(const Reference* reference);
const float* reference_params(const Reference* reference);

#ifdef __cplusplus
}
#endif
#endif
