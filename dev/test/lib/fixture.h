/*
fixture.h -- results of other programs, arrays of fp32 one after the other in a file, for tests of
operations on inputs that both programs make (inputs.h).
*/
#ifndef DEV_FIXTURE_H
#define DEV_FIXTURE_H

#include "dev/test/lib/inputs.h"
#include "dev/test/lib/ops.h"

typedef struct {
    FILE* file;
    const char* path;
} Fixture;

static inline Fixture fixture_open(const char* path) {
    const Fixture fixture = {fopen(path, "rb"), path};
    CHECK(fixture.file, "%s: cannot read", path);
    return fixture;
}

// Compares the next n numbers, within `tolerance` of the largest.
static inline void fixture_expect(Fixture* fixture, const float* got, size_t n, double tolerance,
                                  const char* what) {
    float* want = ops_floats(n);
    EXPECT(fread(want, sizeof(float), n, fixture->file) == n, "%s ends before %s", fixture->path, what);
    EXPECT_NEAR(ops_error(got, ops_widen(want, n), NULL, n) * FLT_EPSILON, 0, tolerance, "%s of %s", what,
                fixture->path);
}

static inline void fixture_close(Fixture* fixture) {
    EXPECT(fgetc(fixture->file) == EOF, "%s: too long", fixture->path);
    fclose(fixture->file);
}

// Returns n numbers of a stream.
static inline float* fixture_input(size_t n, int stream) {
    float* x = ops_floats(n);
    for (size_t i = 0; i < n; i++) {
        x[i] = uniform(i, stream);
    }
    return x;
}

#endif
