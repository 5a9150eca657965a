/*
rope.h -- rotary positions (Su et al., "RoFormer", 2021): the table of angles, and the turn.

    (e, o) -> a (e cos x - o sin x, o cos x + e sin x)      x = t frequency

Columns 2i and 2i + 1 of a head are a pair (e, o), which turns by the angle x at position t. The
score of a query and a key then depends on the distance of their positions. Pair i < dims / 2 has
the frequency

    f = base^(-2i / dims)

and the others do not change. A scaling of the frequencies makes a model's context longer than it
was in pretraining, where it had `original_context` tokens:

    linear      f / factor
    llama3      turns in the original context, r = f original_context / 2 pi:
                    r > high_freq_factor    f
                    r < low_freq_factor     f / factor
                    between                 s f + (1 - s) f / factor, s from 0 to 1 as r grows
    yarn        (Peng et al., 2023) the same two ends, but between them s falls evenly from pair to
                pair; the pairs of the ends are rounded outward, unless `is_exact`
    longrope    (Ding et al., 2024) f / near[i], or f / far[i] for all positions of a pass that
                reaches beyond the original context

The last two multiply rotated pairs by the attention factor a, so that scores grow by a^2.

Frequencies are computed in fp32 and rounded as Hugging Face's models round them: these were trained
with such angles. Angles and their cosines are computed in double.

    table     (T, HS/2, 2)   fp32: a (cos x, sin x) of each position and pair; (1, 0): no turn

With longrope, the table of a pass that stays in the original context also serves decoding, row by
row: from position original_context on, it has the far angles. A sequence that gets there is read
again, because the keys in its cache have the others (generator.h).
*/
#ifndef LLMC_ROPE_H
#define LLMC_ROPE_H

#include <limits.h>
#include <math.h>
#include <stddef.h>

#include "llmc/base/host_device.h"
#include "llmc/base/memory.h"

typedef enum { ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN, ROPE_LONG, ROPE_KINDS } RopeScalingKind;

typedef struct {
    RopeScalingKind kind;
    float factor; // all but ROPE_PLAIN
    // turns in the original context, ROPE_LLAMA3; and yarn's beta_slow and beta_fast
    float low_freq_factor, high_freq_factor;
    int original_context; // tokens of a sequence in pretraining, from ROPE_LLAMA3 on
    float attention;      // factor of rotated pairs, from ROPE_YARN on; 0: 1
    int is_exact;         // ROPE_YARN: the ends are not rounded to pairs
} RopeScaling;

enum { ROPE_MAX_FACTORS = 128 }; // of ROPE_LONG: heads up to 256 channels

// Divisors of the frequencies of each pair, ROPE_LONG.
typedef struct {
    float near[ROPE_MAX_FACTORS], far[ROPE_MAX_FACTORS];
} RopeFactors;

// Sizes of a table, and the frequencies of the `dims` channels of a head that turn.
typedef struct {
    int T, HS, dims;
    float base;
    RopeScaling scaling;
    const RopeFactors* factors; // ROPE_LONG; must outlive the call
} RopeSettings;

typedef struct {
    const float* table; // NULL: no pair turns
    int HS;
} Rope;

// Tables of layers with the same settings: for passes that stay in the original context and for
// decoding, and for passes beyond. But for ROPE_LONG they are the same.
typedef struct {
    Rope near, far;
    int original_context;
} RopeTables;

static inline float rope_mix_(float frequency, float scaled, float s) {
    return (1 - s) * scaled + s * frequency;
}

static inline float rope_llama3_(float frequency, RopeScaling scaling) {
    const float pi = 3.14159265358979f, low = scaling.low_freq_factor, high = scaling.high_freq_factor;
    const float scaled = frequency / scaling.factor, wave = 2 * pi / frequency,
                context = (float)scaling.original_context;
    if (wave > context / low) {
        return scaled;
    }
    if (wave < context / high) {
        return frequency;
    }
    return rope_mix_(frequency, scaled, (context / wave - low) / (high - low));
}

// Returns the pair, with a fraction, that turns so often in the original context.
static inline double rope_yarn_pair_(RopeSettings s, double turns) {
    const double pi = 3.14159265358979323846;
    return s.dims * log(s.scaling.original_context / (turns * 2 * pi)) / (2 * log(s.base));
}

// Sets the last pair that keeps its frequency, and the first that is divided by the whole factor.
static inline void rope_yarn_ends(RopeSettings s, double* low, double* high) {
    *low = rope_yarn_pair_(s, s.scaling.high_freq_factor);
    *high = rope_yarn_pair_(s, s.scaling.low_freq_factor);
    if (!s.scaling.is_exact) {
        *low = floor(*low), *high = ceil(*high);
    }
    *low = *low > 0 ? *low : 0;
    *high = *high < s.dims - 1 ? *high : s.dims - 1;
    *high += *high == *low ? 0.001 : 0;
}

static inline float rope_yarn_(RopeSettings s, float power, int i) {
    double low, high;
    rope_yarn_ends(s, &low, &high);
    const float rise = ((float)i - (float)low) / (float)(high - low);
    return rope_mix_(1.0f / power, 1.0f / (s.scaling.factor * power), 1 - fminf(fmaxf(rise, 0), 1));
}

// Returns the frequency of pair i, of `dims` channels that turn, at position t of a table.
static inline float rope_frequency(RopeSettings s, int i, int t) {
    const float power = (float)pow(s.base, 2.0f * (float)i / (float)s.dims), frequency = 1.0f / power;
    switch (s.scaling.kind) {
    case ROPE_LINEAR:
        return frequency / s.scaling.factor;
    case ROPE_LLAMA3:
        return rope_llama3_(frequency, s.scaling);
    case ROPE_YARN:
        return rope_yarn_(s, power, i);
    case ROPE_LONG:
        return 1.0f / ((t < s.scaling.original_context ? s.factors->near : s.factors->far)[i] * power);
    case ROPE_PLAIN:
    case ROPE_KINDS:
        break;
    }
    return frequency;
}

static inline float rope_attention(RopeScaling scaling) {
    return scaling.attention > 0 ? scaling.attention : 1;
}

static inline void rope_set_table(float* table, RopeSettings settings) {
    const double a = rope_attention(settings.scaling);
    for (int i = 0; i < settings.HS / 2; i++) {
        const int turns = 2 * i < settings.dims;
        const double near = turns ? rope_frequency(settings, i, 0) : 0.0,
                     far = turns ? rope_frequency(settings, i, INT_MAX) : 0.0, scale = turns ? a : 1;
        for (int t = 0; t < settings.T; t++) {
            const double x = t * (t < settings.scaling.original_context ? near : far);
            float* to = table + (size_t)t * settings.HS + 2 * i;
            to[0] = (float)(scale * cos(x));
            to[1] = (float)(scale * sin(x));
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

// Opens the tables of layers with the same settings, each by `open`, which is rope_open on the CPU.
static inline void rope_tables_open(RopeTables* tables, Memory* memory, RopeSettings settings,
                                    void (*open)(Rope* rope, Memory* memory, RopeSettings settings)) {
    const int has_far = settings.scaling.kind == ROPE_LONG && settings.T > settings.scaling.original_context;
    open(&tables->near, memory, settings);
    tables->far = tables->near;
    tables->original_context = settings.scaling.original_context;
    if (has_far) {
        settings.scaling.original_context = 0;
        open(&tables->far, memory, settings);
    }
}

// Returns the table for a pass whose sequences have `tokens` tokens; 0: a step of decoding.
static inline Rope rope_of_pass(const RopeTables* tables, int tokens) {
    return tokens > tables->original_context ? tables->far : tables->near;
}

// Returns (cos, sin) of the pairs at position t.
HOST_DEVICE const float* rope_at(Rope rope, int t) { return rope.table + (size_t)t * rope.HS; }

// Turns a head x (HS) by the angles (HS/2, 2), or back; both multiply by the attention factor, as
// the gradient needs it.
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
