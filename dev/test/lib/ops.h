/*
ops.h -- helpers for tests of operations: arrays that notice reads and writes out of bounds, random
contents, the distance to a reference in double, and finite differences.

How an operation is tested: llmc/reference.h has both of its passes in double, as plain loops from
the formulas. test_reference.c compares that backward pass with central differences of that forward
pass; the other tests compare fp32 code with the two.
*/
#ifndef DEV_OPS_H
#define DEV_OPS_H

#include <float.h>
#include <sys/mman.h>

#include "llmc/base/check.h"
#include "llmc/base/rand.h"
#include "dev/test/lib/test.h"

// An array ends where a page ends, and the next page may be neither read nor written. In front of
// it is a margin of at least OPS_MARGIN bytes, NaN if read as floats, where a write is found by
// ops_close.
#define OPS_MARGIN 256
typedef struct {
    unsigned char* memory;
    size_t margin_bytes, mapped_bytes;
} OpsArray_;

static OpsArray_ ops_arrays_[256]; // all since the last ops_close
static int ops_arrays_count_ = 0;
static uint64_t ops_stream_ = 0; // every random array has a stream of its own

static inline void* ops_array_(size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t usable = (bytes + OPS_MARGIN + page - 1) / page * page;
    const OpsArray_ array = {
        (unsigned char*)mmap(NULL, usable + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
        usable - bytes, usable + page};
    CHECK(array.memory != MAP_FAILED && mprotect(array.memory + usable, page, PROT_NONE) == 0,
          "no memory for a guarded array of %zu bytes", bytes);
    CHECK(ops_arrays_count_ < 256, "more than 256 guarded arrays at a time");
    memset(array.memory, 0xFF, array.margin_bytes);
    ops_arrays_[ops_arrays_count_++] = array;
    return array.memory + array.margin_bytes;
}

// Checks the margins of all arrays and frees them; `what` names the case that used them.
static inline void ops_close(const char* what) {
    while (ops_arrays_count_ > 0) {
        const OpsArray_ array = ops_arrays_[--ops_arrays_count_];
        size_t intact = 0;
        while (intact < array.margin_bytes && array.memory[intact] == 0xFF) {
            intact++;
        }
        EXPECT(intact == array.margin_bytes, "%s: array %d was written to %zu bytes in front of it", what,
               ops_arrays_count_, array.margin_bytes - intact);
        munmap(array.memory, array.mapped_bytes);
    }
}

static inline float* ops_floats(size_t n) { // all NaN, so that unset elements show
    float* x = (float*)ops_array_(n * sizeof(float));
    for (size_t i = 0; i < n; i++) {
        x[i] = NAN;
    }
    return x;
}

// all 0
static inline double* ops_doubles(size_t n) { return (double*)ops_array_(n * sizeof(double)); }

static inline unsigned char* ops_bytes(size_t n) { return (unsigned char*)ops_array_(n); } // all 0

static inline float* ops_normal(size_t n, float scale) { // normal random numbers times `scale`
    float* x = ops_floats(n);
    ops_stream_++;
    for (size_t i = 0; i < n; i++) {
        x[i] = scale * rand_normal(1, ops_stream_, i);
    }
    return x;
}

static inline int* ops_below(size_t n, int limit) { // uniform on 0 ... limit-1
    int* x = (int*)ops_array_(n * sizeof(int));
    Rand rng = rand_open(1, ++ops_stream_);
    for (size_t i = 0; i < n; i++) {
        x[i] = (int)rand_below(&rng, (uint32_t)limit);
    }
    return x;
}

static inline float* ops_copy(const float* x, size_t n) {
    return (float*)memcpy(ops_floats(n), x, n * sizeof(float));
}

static inline double* ops_widen(const float* x, size_t n) {
    double* wide = ops_doubles(n);
    for (size_t i = 0; i < n; i++) {
        wide[i] = x[i];
    }
    return wide;
}

static inline void ops_narrow(float* to, const double* x, size_t n) { // rounded to nearest
    for (size_t i = 0; i < n; i++) {
        to[i] = (float)x[i];
    }
}

static inline double* ops_absolute(const double* x, size_t n) {
    double* absolute = ops_doubles(n);
    for (size_t i = 0; i < n; i++) {
        absolute[i] = fabs(x[i]);
    }
    return absolute;
}

static inline double* ops_sum(const double* x, const double* y, size_t n) {
    double* sum = ops_doubles(n);
    for (size_t i = 0; i < n; i++) {
        sum[i] = x[i] + y[i];
    }
    return sum;
}

// The largest |got - want| / magnitude, in units of FLT_EPSILON; NaN if anything is NaN. The
// magnitude of an element is the magnitude of its terms; NULL stands for the largest |want|.
static inline double ops_error(const float* got, const double* want, const double* magnitude, size_t n) {
    double worst = 0, largest = DBL_MIN;
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs(want[i]));
    }
    for (size_t i = 0; i < n; i++) {
        const double error = fabs(got[i] - want[i]);
        const double relative = error == 0 ? 0 : error / (magnitude ? magnitude[i] : largest) / FLT_EPSILON;
        if (!(relative <= worst)) {
            worst = relative;
        }
        if (isnan(worst)) {
            break;
        }
    }
    return worst;
}

static inline int ops_same_bits(const float* a, const float* b, size_t n) {
    return memcmp(a, b, n * sizeof(float)) == 0;
}

// Central differences of loss(arg), which reads x, against `gradient`, element by element. With
// steps of 1e-5 the third derivative adds about 1e-10 and the rounding of a loss below 1e3 adds
// 1e-8.
static inline void ops_expect_gradient(const char* what, double (*loss)(const void*), const void* arg,
                                       double* x, const double* gradient, size_t n) {
    const double step = 1e-5;
    for (size_t i = 0; i < n; i++) {
        const double at = x[i];
        x[i] = at + step;
        const double above = loss(arg);
        x[i] = at - step;
        const double below = loss(arg);
        x[i] = at;
        EXPECT_NEAR(gradient[i], (above - below) / (2 * step), 1e-7 * (1 + fabs(gradient[i])),
                    "reference of %s, element %zu", what, i);
    }
}

#endif
