/*
fuzz.h -- lets fuzz targets test code that ends the program on an error: the error is returned
instead.

Include it first. Memory that is allocated when an error occurs is lost: give the code nothing to
allocate.
*/
#ifndef DEV_TEST_FUZZ_H
#define DEV_TEST_FUZZ_H

#include <setjmp.h>
#include <stdlib.h>

static jmp_buf fuzz_place_;

__attribute__((noreturn, unused)) static void fuzz_exit_(int status) {
    if (status != EXIT_FAILURE) {
        abort();
    }
    longjmp(fuzz_place_, 1);
}

#define exit(status) fuzz_exit_(status)

// Runs body(arg): 1, or 0 if a CHECK failed in it.
__attribute__((unused)) static int fuzz_survives(void (*body)(void*), void* arg) {
    if (setjmp(fuzz_place_)) {
        return 0;
    }
    body(arg);
    return 1;
}

#endif
