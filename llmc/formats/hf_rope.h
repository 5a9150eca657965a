/*
hf_rope.h -- rotary positions in config.json: transformers 5 writes them as rope_parameters, for the
whole model or for each type of layers, transformers 4 as rope_theta and rope_scaling.

    hf_rope_read      one such object
    hf_rope_complete  sets what it leaves out to what transformers makes of it
*/
#ifndef LLMC_HF_ROPE_H
#define LLMC_HF_ROPE_H

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/json.h"
#include "llmc/ops/rope.h"

// Rotary positions of one object; 0: not given.
typedef struct {
    int is_given;
    RopeScaling scaling;
    float base;
    double turned; // part of a head's channels that turns
    float mscale, mscale_all;
    RopeFactors factors;
    int near, far;                   // numbers in these lists
    const char* unknown[ROPE_KINDS]; // a key that this kind does not know, in the text
} HfRope;

enum { HF_ROPE_ALL_ = (1 << ROPE_KINDS) - 1, HF_ROPE_YARN_ = 1 << ROPE_YARN, HF_ROPE_LONG_ = 1 << ROPE_LONG };

// Number of such an object.
typedef struct {
    const char* key;
    size_t member;
    int kinds; // bits of the kinds that know it
    int may_be_zero;
} HfRopeNumber_;

// Words of RopeScalingKind.
static const char* const hf_rope_kinds[ROPE_KINDS] = {"default", "linear", "llama3", "yarn", "longrope"};

// Reads the part of a head's channels that turns.
static inline int hf_rope_read_part(JsonReader* text, const char* key, double* turned) {
    if (json_peek(text) == 'n') {
        return json_skip(text);
    }
    return json_number(text, turned) &&
           ((*turned > 0 && *turned <= 1) ||
            error_set(text->error, text->path, "%s is %g, wanted above 0 and up to 1", key, *turned));
}

static inline int hf_rope_read_kind_(JsonReader* text, RopeScalingKind* kind) {
    const char* word;
    if (!json_name(text, &word)) {
        return 0;
    }
    for (int i = 0; i < ROPE_KINDS; i++) {
        if (strcmp(word, hf_rope_kinds[i]) == 0 || (i == ROPE_LONG && strcmp(word, "su") == 0)) {
            *kind = (RopeScalingKind)i;
            return 1;
        }
    }
    return error_set(text->error, text->path,
                     "rope_type is %s, wanted default, linear, llama3, yarn or longrope", word);
}

static inline int hf_rope_read_number_(JsonReader* text, const HfRopeNumber_* of, HfRope* rope) {
    double number;
    float* value = (float*)(void*)((char*)rope + of->member);
    if (json_peek(text) == 'n') {
        return json_skip(text);
    }
    if (!json_number(text, &number)) {
        return 0;
    }
    *value = (float)number;
    return (isfinite(*value) && (*value > 0 || (*value == 0 && of->may_be_zero))) ||
           error_set(text->error, text->path, "%s is %g, wanted a positive number", of->key, number);
}

// Reads the divisors of longrope.
static inline int hf_rope_read_factors_(JsonReader* text, const char* key, float* factors, int* count) {
    double number = 0;
    JsonWalk walk = json_walk(text, '[');
    for (*count = 0; json_step(&walk, NULL); ++*count) {
        if (!json_number(text, &number)) {
            return 0;
        }
        if (*count == ROPE_MAX_FACTORS || !(number > 0) || !isfinite((float)number)) {
            return error_set(text->error, text->path,
                             "%s has %g in place %d, wanted up to %d positive numbers", key, number,
                             *count + 1, ROPE_MAX_FACTORS);
        }
        factors[*count] = (float)number;
    }
    return walk.ok;
}

static inline int hf_rope_read_size_(JsonReader* text, int* size) {
    size_t value;
    if (json_peek(text) == 'n') {
        return json_skip(text);
    }
    if (!json_natural(text, &value)) {
        return 0;
    }
    *size = value < INT_MAX ? (int)value : INT_MAX;
    return 1;
}

// Returns what is known of a key whose value is a number; NULL: nothing.
static inline const HfRopeNumber_* hf_rope_number_(const char* key) {
    static const HfRopeNumber_ numbers[] = {
        {"rope_theta", offsetof(HfRope, base), HF_ROPE_ALL_, 0},
        {"factor", offsetof(HfRope, scaling.factor), HF_ROPE_ALL_, 0},
        {"low_freq_factor", offsetof(HfRope, scaling.low_freq_factor), HF_ROPE_ALL_ & ~HF_ROPE_YARN_, 0},
        {"high_freq_factor", offsetof(HfRope, scaling.high_freq_factor), HF_ROPE_ALL_ & ~HF_ROPE_YARN_, 0},
        {"beta_slow", offsetof(HfRope, scaling.low_freq_factor), HF_ROPE_YARN_, 1},
        {"beta_fast", offsetof(HfRope, scaling.high_freq_factor), HF_ROPE_YARN_, 1},
        {"attention_factor", offsetof(HfRope, scaling.attention), HF_ROPE_YARN_ | HF_ROPE_LONG_, 0},
        {"mscale", offsetof(HfRope, mscale), HF_ROPE_YARN_, 1},
        {"mscale_all_dim", offsetof(HfRope, mscale_all), HF_ROPE_YARN_, 1}};
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        if (strcmp(key, numbers[i].key) == 0) {
            return &numbers[i];
        }
    }
    return NULL;
}

// Reads a switch of yarn: whether the ends are rounded.
static inline int hf_rope_read_truncate_(JsonReader* text, HfRope* rope) {
    int truncates;
    const int ok = json_bool(text, &truncates);
    rope->scaling.is_exact = ok && !truncates;
    return ok;
}

// Reads the value of a key, and sets the kinds that know it.
static inline int hf_rope_read_value_(JsonReader* text, const char* key, HfRope* rope, int* kinds) {
    const HfRopeNumber_* number = hf_rope_number_(key);
    const int is_none = json_peek(text) == 'n' || json_peek(text) == 'f',
              is_far = strcmp(key, "long_factor") == 0;
    *kinds = HF_ROPE_ALL_;
    if (strcmp(key, "rope_type") == 0 || strcmp(key, "type") == 0) {
        return hf_rope_read_kind_(text, &rope->scaling.kind);
    }
    if (strcmp(key, "partial_rotary_factor") == 0) {
        return hf_rope_read_part(text, key, &rope->turned);
    }
    if (strcmp(key, "original_max_position_embeddings") == 0) {
        return hf_rope_read_size_(text, &rope->scaling.original_context);
    }
    if (strncmp(key, "mrope_", strlen("mrope_")) == 0) { // of pictures
        return json_skip(text);
    }
    if (strcmp(key, "truncate") == 0) {
        *kinds = HF_ROPE_YARN_;
        return hf_rope_read_truncate_(text, rope);
    }
    if (is_far || strcmp(key, "short_factor") == 0) {
        *kinds = HF_ROPE_YARN_ | HF_ROPE_LONG_; // old files of Phi 3 call it yarn
        return hf_rope_read_factors_(text, key, is_far ? rope->factors.far : rope->factors.near,
                                     is_far ? &rope->far : &rope->near);
    }
    *kinds = is_none ? HF_ROPE_ALL_ : number ? number->kinds : 0;
    return number ? hf_rope_read_number_(text, number, rope) : json_skip(text);
}

// Reads the value of a key of an object of rotary positions. `key` must outlive `rope`.
static inline int hf_rope_read(JsonReader* text, const char* key, HfRope* rope) {
    int kinds;
    rope->is_given = 1;
    const int ok = hf_rope_read_value_(text, key, rope, &kinds);
    for (int i = 0; i < ROPE_KINDS; i++) {
        rope->unknown[i] = kinds >> i & 1 ? rope->unknown[i] : key;
    }
    return ok;
}

// Returns yarn's factor of rotated pairs for a context that is `factor` times the original one.
static inline double hf_rope_mscale(double factor, double mscale) {
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

// Returns the factor of scores in DeepSeek's models with yarn.
static inline float hf_rope_score_scale(int HS, float factor, float mscale_all) {
    const double m = hf_rope_mscale((double)factor, (double)mscale_all);
    return (float)(m * m / sqrt((double)HS));
}

// Returns the factor of rotated pairs of an object that does not have it.
static inline double hf_rope_attention_(const HfRope* rope) {
    const double factor = rope->scaling.factor;
    if (rope->scaling.kind == ROPE_LONG) {
        return factor <= 1 ? 1 : sqrt(1 + log(factor) / log(rope->scaling.original_context));
    }
    return rope->mscale > 0 && rope->mscale_all > 0
               ? hf_rope_mscale(factor, rope->mscale) / hf_rope_mscale(factor, rope->mscale_all)
               : hf_rope_mscale(factor, 1);
}

// Sets what yarn and longrope leave out.
static inline int hf_rope_complete_ends_(HfRope* rope, const char* path, char* error) {
    RopeScaling* scaling = &rope->scaling;
    if (scaling->kind == ROPE_YARN) {
        scaling->low_freq_factor = scaling->low_freq_factor > 0 ? scaling->low_freq_factor : 1;
        scaling->high_freq_factor = scaling->high_freq_factor > 0 ? scaling->high_freq_factor : 32;
    }
    scaling->attention = scaling->attention > 0 ? scaling->attention : (float)hf_rope_attention_(rope);
    return scaling->kind == ROPE_LONG || scaling->low_freq_factor <= scaling->high_freq_factor ||
           error_set(error, path, "beta_slow of rope_parameters is %g, wanted at most beta_fast, %g",
                     (double)scaling->low_freq_factor, (double)scaling->high_freq_factor);
}

static inline int hf_rope_check_llama3_(RopeScaling s, const char* path, char* error) {
    return (0 < s.low_freq_factor && s.low_freq_factor < s.high_freq_factor) ||
           error_set(error, path,
                     "low_freq_factor of rope_parameters is %g and high_freq_factor %g, wanted the first "
                     "positive and below the other",
                     (double)s.low_freq_factor, (double)s.high_freq_factor);
}

// Completes an object of a model with a context of max_T, and clears the numbers that its kind does
// not use; `original` is the context that another key gives, or 0.
static inline int hf_rope_complete(HfRope* rope, int max_T, int original, const char* path, char* error) {
    RopeScaling* scaling = &rope->scaling;
    const RopeScaling s = *scaling;
    const int is_long = s.kind == ROPE_LONG || (s.kind == ROPE_YARN && (rope->near > 0 || rope->far > 0));
    memset(scaling, 0, sizeof(*scaling));
    if (rope->unknown[s.kind]) {
        return error_set(error, path, "%s changes what the model computes, which is not supported",
                         rope->unknown[s.kind]);
    }
    if (s.kind == ROPE_PLAIN) {
        return 1;
    }
    scaling->kind = is_long ? ROPE_LONG : s.kind;
    scaling->factor = s.factor;
    if (s.kind >= ROPE_LLAMA3) {
        scaling->original_context = original ? original : s.original_context ? s.original_context : max_T;
    }
    if (s.kind >= ROPE_YARN && s.factor == 0) {
        scaling->factor = (float)max_T / (float)scaling->original_context;
    }
    if (scaling->factor < 1 && !is_long) {
        return error_set(error, path, "the factor of rope_parameters is %g, wanted at least 1",
                         (double)s.factor);
    }
    if (s.kind == ROPE_LINEAR) {
        return 1;
    }
    if (!is_long) {
        scaling->low_freq_factor = s.low_freq_factor, scaling->high_freq_factor = s.high_freq_factor;
        scaling->is_exact = s.is_exact;
    }
    scaling->attention = s.attention;
    return s.kind == ROPE_LLAMA3 ? hf_rope_check_llama3_(*scaling, path, error)
                                 : hf_rope_complete_ends_(rope, path, error);
}

// Returns 1 if both mean the same.
static inline int hf_rope_is_same(const HfRope* a, const HfRope* b) {
    return memcmp(&a->scaling, &b->scaling, sizeof(a->scaling)) == 0 && a->mscale_all == b->mscale_all &&
           memcmp(&a->factors, &b->factors, sizeof(a->factors)) == 0;
}

#endif
