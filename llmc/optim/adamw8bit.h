/*
adamw8bit.h -- AdamW with its two moments in 8 bits: the contract, the code, and the CPU version.

    m = value(m_code) m_scale          v = value(v_code) v_scale
    m, v, param: as in adamw.h, in fp32
    m_scale = max |m|                  v_scale = max |v|               over a block of elements
    m_code = code(m / m_scale)         v_code = code(v / v_scale)

    param, grad        (n)                  fp32
    m_code, v_code     (n)                  uint8
    m_scale, v_scale   (ceil(n / block))    fp32; blocks from the first element, a shorter one last

The state may start as zeros: if the scale is 0, all values are 0. If a moment is not finite,
neither is its scale, so it does not go unnoticed.

Where v is 0, m counts as 0, whatever its code: the gradients there were tiny beside the others of
the block. Otherwise an old m would meet a v that has only the newest square, and updates would be
up to 1 / sqrt(1 - beta2) times too large. Without a gradient they would be m / eps, for ever, since
0.9 of the lowest code of m is rounded up to it again.

The code is dynamic: fine for large values, with decades to spare for small ones. Decade i = 0 ... 6
is [0.1, 1] 10^(i-6), cut into 2^i equal bins (2^(i+1) in the code without sign); its values are
their centers. With 0 and 1 this makes 256 values. code(x) is the code of the nearest value, at a
tie of positive numbers of the lower one; a negative m never becomes 0. Dettmers, Lewis, Shleifer
and Zettlemoyer, "8-bit optimizers via block-wise quantization", ICLR 2022; the values have the bits
of bitsandbytes'.

The codes in order of their values:

    signed, for m      0 ... 126 negative       127: 0      128 ... 254      255: 1
    unsigned, for v    0: 0                     1 ... 254                    255: 1

With blocks of 64, 16.25 bytes move per parameter. Muon can keep its momentum so (Moment).
*/
#ifndef LLMC_ADAMW8BIT_H
#define LLMC_ADAMW8BIT_H

#include <float.h>

#include "llmc/base/vec.h"
#include "llmc/optim/adamw.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- the code ----

// Number of bins in the first decade, from which everything else follows.
typedef enum { CODE8_SIGNED = 1, CODE8_UNSIGNED = 2 } Code8;

// Returns boundary k of n equal bins of [0.1, 1], from the nearer end and rounded once:
// torch.linspace's bits. The product is exact, so the bits do not depend on its fusion with the
// sum.
HOST_DEVICE float code8_boundary_(int k, int n) {
    const double width = (double)((1.0f - 0.1f) / (float)n);
    return (float)(2 * k < n ? (double)0.1f + width * k : 1 - width * (n - k));
}

// Returns a positive value by its number, from `kind` on: decade after decade, then 1.
HOST_DEVICE float code8_positive_(int at, Code8 kind) {
    int bins = kind;
    double decade = 1e-6;
    for (; at >= 2 * bins; bins *= 2) {
        decade *= 10;
    }
    const float center = (code8_boundary_(at - bins, bins) + code8_boundary_(at - bins + 1, bins)) * 0.5f;
    return at == 128 * (int)kind ? 1 : center * (float)decade;
}

// Returns the value of a code.
HOST_DEVICE float code8_value(int code, Code8 kind) {
    const int at = kind == CODE8_SIGNED ? code - 127 : code + 1;
    if (at < 0) {
        return -code8_positive_(-at, kind);
    }
    return at < (int)kind ? 0 : code8_positive_(at, kind);
}

// Return the start of a decade that ends at `decade`, between its first value and the last one
// before it; and its bins per unit.
HOST_DEVICE float code8_start_(double decade, double bins) { return (float)(decade * (0.1 + 0.18 / bins)); }

HOST_DEVICE float code8_per_unit_(double decade, double bins) { return (float)(bins / 0.9 / decade); }

// Return the bounds of the code: larger numbers are 1, and smaller ones 0.
HOST_DEVICE float code8_top_(Code8 kind) { return (float)(1 - 0.225 / (64 * (int)kind)); }

HOST_DEVICE float code8_bottom_(Code8 kind) { return (float)(0.5e-6 * (0.1 + 0.45 / kind)); }

// Returns the number of the value nearest to x, 0 <= x <= 1, among 0 (kind - 1) and the positive
// values (from kind on). It needs no search: a decade starts above the midpoint of its first value
// and the last one before it, and its bins are equal. The compiler knows all numbers but x, and
// vectorizes calls.
HOST_DEVICE int code8_nearest_(float x, Code8 kind) {
    double decade = 1e-6, bins = kind;
    int decades = 0; // decades below x
    float per_unit = code8_per_unit_(decade, bins);
    for (int i = 1; i < 7; i++) {
        decade *= 10;
        bins *= 2;
        const int above = x > code8_start_(decade, bins);
        decades += above;
        per_unit = above ? code8_per_unit_(decade, bins) : per_unit;
    }
    const float first = (float)((int)kind << decades); // value of x's decade
    // (x - 0.1 decade) per_unit
    float at = first - 1 + ceilf(x * per_unit - first * (float)(1 / 9.0));
    // between two decades; also NaN
    at = at > first ? at : first;
    at = at < 2 * first - 1 ? at : 2 * first - 1;
    at = x > code8_top_(kind) ? 2 * (float)bins : at;
    return (int)(x > code8_bottom_(kind) ? at : (float)kind - 1);
}

// Returns the factor of a block's values before they are encoded. If the block has only zeros and
// subnormals they become 0.
HOST_DEVICE float code8_inverse(float scale) { return scale >= FLT_MIN ? 1 / scale : 0; }

// Returns the code of x, |x| <= 1; for the code without sign x >= 0.
HOST_DEVICE int code8_encode(float x, Code8 kind) {
    const int at = code8_nearest_(fabsf(x), kind);
    const int negative = at < 1 ? 1 : at > 127 ? 127 : at;
    return kind == CODE8_UNSIGNED ? at - 1 : 127 + (x < 0 ? -negative : at);
}

// ---- blocks ----

// the optimizer's block; the largest of any caller
enum { ADAMW8BIT_BLOCK = 64, ADAMW8BIT_BLOCK_MOST = 256 };

typedef struct {
    uint8_t *m, *v;           // codes
    float *m_scale, *v_scale; // one for each block
} AdamW8bitState;

// Counts the bytes moved: read param, grad, and codes and scales of m and v; write all but grad.
static inline double adamw8bit_bytes(double n, double block) { return (12 + 4 + 16 / block) * n; }

// Constants of each decade: element -d mod 8 belongs to decade d.
typedef struct {
    VecTable next;                 // start of the next decade
    VecTable per_unit, bins_ninth; // as in code8_nearest_
    VecTable last;                 // last bin
} AdamW8bitDecades_;

static inline AdamW8bitDecades_ adamw8bit_decades_(Code8 kind) {
    float next[8] = {0}, per_unit[8] = {0}, bins_ninth[8] = {0}, last[8] = {0};
    double decade = 1e-6, bins = kind;
    for (int d = 0; d < 7; d++) {
        const int at = -d & 7;
        per_unit[at] = code8_per_unit_(decade, bins);
        bins_ninth[at] = (float)bins * (float)(1 / 9.0);
        last[at] = (float)bins - 1;
        decade *= 10;
        bins *= 2;
        next[at] = d < 6 ? code8_start_(decade, bins) : INFINITY;
    }
    const AdamW8bitDecades_ decades = {vec_table(next), vec_table(per_unit), vec_table(bins_ninth),
                                       vec_table(last)};
    return decades;
}

// Returns minus the decade of each lane, in its lowest three bits. The exponent and the mantissa as
// one number are nearly a logarithm: times 38 / 127, nearly log10(2), it rounds to the decade or to
// the one before.
ALWAYS_INLINE VecMask adamw8bit_decade_(Vec size, const AdamW8bitDecades_* decades) {
    const float round_magic = 12582912.0f; // 1.5 2^23
    const Vec usual = vec_max(size, vec_all(1e-6f));
    const VecMask guess =
        (VecMask)(vec_from_ints((VecMask)usual) * (float)(-38.0 / 127 / (1 << 23)) + round_magic);
    return guess + (VecMask)(size > vec_lookup(&decades->next, guess));
}

// Returns code8_encode of each lane. A bin is counted from the last float before the number, so a
// tie belongs to the lower one.
ALWAYS_INLINE VecMask adamw8bit_codes_(Vec x, Code8 kind, const AdamW8bitDecades_* decades) {
    const VecMask none = {0}, is_negative = kind == CODE8_SIGNED ? (VecMask)(x < 0) : none;
    const Vec size = (Vec)((VecMask)x & 0x7fffffff);
    const VecMask decade = adamw8bit_decade_(size, decades);
    const Vec in_bins =
        size * vec_lookup(&decades->per_unit, decade) - vec_lookup(&decades->bins_ninth, decade);
    const VecMask last = vec_to_ints(vec_lookup(&decades->last, decade));
    const VecMask bin = vec_to_ints((Vec)((VecMask)vec_max(in_bins, vec_all(1e-30f)) - 1));
    const VecMask is_past = bin > last;
    // one less than code8_nearest_ returns
    VecMask at = ((last & is_past) | (bin & ~is_past)) + last;
    // negative numbers have no such value
    at -= (VecMask)(x > code8_top_(kind));
    at += (VecMask)(size <= code8_bottom_(kind)) & ~is_negative;
    return kind == CODE8_UNSIGNED ? at : ((at + 1) ^ is_negative) - is_negative + 127;
}

// Sets the codes of n values, which have memory up to a whole vector. It computes them as integers
// first: with bytes beside them, vectors would be four times as wide and not fit into the
// registers.
ALWAYS_INLINE void adamw8bit_encode_(uint8_t* code, const float* x, size_t n, float scale, Code8 kind,
                                     const AdamW8bitDecades_* decades) {
    int32_t wide[ADAMW8BIT_BLOCK_MOST];
    const float inverse = code8_inverse(scale);
    if (inverse == 0) {
        memset(code, code8_encode(0, kind), n);
        return;
    }
    for (size_t i = 0; i < n; i += LANES) {
        const VecMask codes = adamw8bit_codes_(vec_load(x + i) * inverse, kind, decades);
        memcpy(wide + i, &codes, sizeof(codes));
    }
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        code[i] = (uint8_t)wide[i];
    }
}

// Returns max |x|. As integers, the bits of positive numbers have the same order, with infinity and
// NaN last.
ALWAYS_INLINE float adamw8bit_scale_(const float* x, size_t n) {
    int32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (size_t i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof(bits));
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float scale;
    memcpy(&scale, &largest, sizeof(scale));
    return scale;
}

// Sets the values of n codes; the rest of the last vector becomes 0. Lane by lane: a gather takes
// longer.
ALWAYS_INLINE void adamw8bit_decode_(float* x, const uint8_t* code, size_t n, float scale,
                                     const float values[256]) {
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        // else gcc at -O1 warns of lanes that are read before they are set
        Vec value = vec_all(0.0f);
#pragma GCC unroll 16
        for (int k = 0; k < LANES; k++) {
            value[k] = values[code[i + (size_t)k]];
        }
        vec_store(x + i, value * scale);
    }
    for (; i < n; i++) {
        x[i] = values[code[i]] * scale;
    }
    for (; i % LANES > 0; i++) {
        x[i] = 0;
    }
}

// ---- blocks of one moment, for other rules ----

// A moment in 8 bits, signed; or in fp32, if there are no codes.
typedef struct {
    float* m;     // (n) or NULL
    uint8_t* m8;  // (n) or NULL
    float* scale; // (ceil(n / ADAMW8BIT_BLOCK)) or NULL
} Moment;

// Returns the moment from element i on, which begins a block.
static inline Moment moment_from(Moment all, size_t i) {
    const Moment from = {all.m ? all.m + i : NULL, all.m8 ? all.m8 + i : NULL,
                         all.m8 ? all.scale + i / ADAMW8BIT_BLOCK : NULL};
    return from;
}

// Values of the codes, and constants to encode.
typedef struct {
    float values[256];
    AdamW8bitDecades_ decades;
} MomentTables;

static inline MomentTables moment_tables(void) {
    MomentTables tables;
    for (int code = 0; code < 256; code++) {
        tables.values[code] = code8_value(code, CODE8_SIGNED);
    }
    tables.decades = adamw8bit_decades_(CODE8_SIGNED);
    return tables;
}

// Sets the n values of a block, x, which has room for a whole one.
ALWAYS_INLINE void moment_read(float* x, Moment block, size_t n, const MomentTables* tables) {
    adamw8bit_decode_(x, block.m8, n, *block.scale, tables->values);
}

// Keeps the n values of a block, and sets x to the values as they are kept.
ALWAYS_INLINE void moment_write(Moment block, float* x, size_t n, const MomentTables* tables) {
    *block.scale = adamw8bit_scale_(x, n);
    adamw8bit_encode_(block.m8, x, n, *block.scale, CODE8_SIGNED, &tables->decades);
    moment_read(x, block, n, tables);
}

// ---- the update of AdamW ----

void adamw8bit_update_cpu(float* param, const float* grad, AdamW8bitState state, size_t n, size_t block,
                          AdamW opt);

#ifdef __cplusplus
}
#endif

#ifdef ADAMW8BIT_IMPLEMENTATION

#include <assert.h>

// Returns the values of all codes.
typedef struct {
    float m[256], v[256];
} AdamW8bitValues_;

static AdamW8bitValues_ adamw8bit_values_(void) {
    AdamW8bitValues_ values;
    for (int code = 0; code < 256; code++) {
        values.m[code] = code8_value(code, CODE8_SIGNED);
        values.v[code] = code8_value(code, CODE8_UNSIGNED);
    }
    return values;
}

// Numbers that all blocks share.
typedef struct {
    AdamWStep step;
    AdamW8bitValues_ values;
    AdamW8bitDecades_ m, v;
} AdamW8bitTables_;

// Updates one block of n elements, whose codes and scales `state` points to.
ALWAYS_INLINE void adamw8bit_block_(float* param, const float* grad, AdamW8bitState state, size_t n,
                                    const AdamW8bitTables_* tables) {
    float m[ADAMW8BIT_BLOCK_MOST], v[ADAMW8BIT_BLOCK_MOST];
    adamw8bit_decode_(m, state.m, n, *state.m_scale, tables->values.m);
    adamw8bit_decode_(v, state.v, n, *state.v_scale, tables->values.v);
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        m[i] = v[i] == 0 ? 0 : m[i];
        adamw_element(param + i, grad[i], m + i, v + i, tables->step);
    }
    *state.m_scale = adamw8bit_scale_(m, n);
    *state.v_scale = adamw8bit_scale_(v, n);
    adamw8bit_encode_(state.m, m, n, *state.m_scale, CODE8_SIGNED, &tables->m);
    adamw8bit_encode_(state.v, v, n, *state.v_scale, CODE8_UNSIGNED, &tables->v);
}

void adamw8bit_update_cpu(float* param, const float* grad, AdamW8bitState state, size_t n, size_t block,
                          AdamW opt) {
    assert(block > 0 && block <= ADAMW8BIT_BLOCK_MOST);
    const AdamW8bitTables_ tables = {adamw_step(opt), adamw8bit_values_(), adamw8bit_decades_(CODE8_SIGNED),
                                     adamw8bit_decades_(CODE8_UNSIGNED)};
#pragma omp parallel for schedule(static)
    for (size_t b = 0; b < (n + block - 1) / block; b++) {
        const size_t at = b * block;
        const AdamW8bitState part = {state.m + at, state.v + at, state.m_scale + b, state.v_scale + b};
        const size_t count = n - at < block ? n - at : block;
        if (count == ADAMW8BIT_BLOCK) { // the compiler uses the constant
            adamw8bit_block_(param + at, grad + at, part, ADAMW8BIT_BLOCK, &tables);
        } else {
            adamw8bit_block_(param + at, grad + at, part, count, &tables);
        }
    }
}

#endif // ADAMW8BIT_IMPLEMENTATION

#endif
