/*
rope.h -- rotary positions (Su et al., "RoFormer", 2021): the table of angles, and the turn.

    (e, o) -> (e cos a - o sin a, o cos a + e sin a)      a = t frequency

Columns 2i and 2i + 1 of a head are a pair (e, o), which turns by the angle a at position t. The
score of a query and a key then depends on the distance of their positions. Pair i < dims / 2 has
the frequency

    f = base^(-2i / dims)

and the others do not turn. A scaling of the frequencies makes a model's context longer than it was
in pretraining:

    linear    f / factor
    llama3    turns in the original context, r = f original_context / 2 pi:
                  r > high_freq_factor    f
                  r < low_freq_factor     f / factor
                  between                 s f + (1 - s) f / factor, s from 0 to 1 as r grows

Frequencies are computed in fp32 and rounded as Hugging Face's models round them: these were trained
with such angles. Angles and their cosines are computed in double.

    table     (T, HS/2, 2)   fp32: (cos a, sin a) of each position and pair; (1, 0): no turn
*/
#ifndef LLMC_ROPE_H
#define LLMC_ROPE_H

#include <math.h>
#include <stddef.h>

#include "llmc/base/host_device.h"
#include "llmc/base/memory.h"

typedef enum { ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3 } RopeScalingKind;

typedef struct {
    RopeScalingKind kind;
    float factor;                            // all but ROPE_PLAIN
    float low_freq_factor, high_freq_factor; // ROPE_LLAMA3
    int original_context;                    // ROPE_LLAMA3: tokens of a sequence in pretraining
} RopeScaling;

// Sizes of a table, and the frequencies of the `dims` channels of a head that turn.
typedef struct {
    int T, HS, dims;
    float base;
    RopeScaling scaling;
} RopeSettings;

typedef struct {
    const float* table; // NULL: no pair turns
    int HS;
} Rope;

static inline float rope_scaled_(float frequency, RopeScaling scaling) {
    const float pi = 3.14159265358979f, low = scaling.low_freq_factor, high = scaling.high_freq_factor;
    const float scaled = frequency / scaling.factor, wave = 2 * pi / frequency,
                context = (float)scaling.original_context;
    if (scaling.kind == ROPE_LINEAR || wave > context / low) {
        return scaled;
    }
    if (wave < context / high) {
        return frequency;
    }
    const float s = (context / wave - low) / (high - low);
    return (1 - s) * scaled + s * frequency;
}

// Returns the frequency of pair i of `dims` channels that turn.
static inline float rope_frequency(RopeScaling scaling, float base, int dims, int i) {
    const float power = (float)pow(base, 2.0f * (float)i / (float)dims), frequency = 1.0f / power;
    return scaling.kind == ROPE_PLAIN ? frequency : rope_scaled_(frequency, scaling);
}

static inline void rope_set_table(float* table, RopeSettings settings) {
    for (int i = 0; i < settings.HS / 2; i++) {
        const double frequency =
            2 * i < settings.dims ? rope_frequency(settings.scaling, settings.base, settings.dims, i) : 0.0;
        for (int t = 0; t < settings.T; t++) {
            float* to = table + (size_t)t * settings.HS + 2 * i;
            to[0] = (float)cos(t * frequency);
            to[1] = (float)sin(t * frequency);
        }
    }
}

static inline size_t rope_table_bytes(RopeSettings settings) {
    return (size_t)settings.T * settings.HS * sizeof(float);
}

static inline void rope_open(Rope* rope, Memory* memory, RopeSettings settings) {
    float* table = (float*)memory_take(memory, "rotary positions", MEMORY_DEVICE, rope_table_bytes(settings));
    rope->table = table;
    rope->HS = settings.HS;
    if (table) {
        rope_set_table(table, settings);
    }
}

// Returns (cos, sin) of the pairs at position t.
HOST_DEVICE const float* rope_at(Rope rope, int t) { return rope.table + (size_t)t * rope.HS; }

// Turns a head x (HS) by the angles (HS/2, 2), or back.
static inline void rope_turn(float* x, const float* angles, int HS) {
    for (int i = 0; i + 1 < HS; i += 2) {
        const float c = angles[i], s = angles[i + 1], e = x[i], o = x[i + 1];
        x[i] = e * c - o * s;
        x[i + 1] = o * c + e * s;
    }
}

static inline void rope_turn_back(float* x, const float* angles, int HS) {
    for (int i = 0; i + 1 < HS; i += 2) {
        const float c = angles[i], s = angles[i + 1], e = x[i], o = x[i + 1];
        x[i] = e * c + o * s;
        x[i + 1] = o * c - e * s;
    }
}

#endif
