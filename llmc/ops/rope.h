/*
rope.h -- rotary positions (Su et al., "RoFormer", 2021).

Pair i of a head, (x_2i, x_2i+1), turns by the angle t base^(-2i / dims) at position t. A scaling of
the frequencies makes a model's context longer than that of its pretraining.
*/
#ifndef LLMC_ROPE_H
#define LLMC_ROPE_H

typedef enum { ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3 } RopeScalingKind;

typedef struct {
    RopeScalingKind kind;
    float factor;                            // all but ROPE_PLAIN
    float low_freq_factor, high_freq_factor; // ROPE_LLAMA3
    int original_context;                    // ROPE_LLAMA3: tokens of a sequence in pretraining
} RopeScaling;

#endif
