/*
bf16_kernels.h -- the kernels of tile_kernels.h that this machine runs. Where instructions are
emulated (emulated_x86.h), they are all of x86.
*/
#ifndef DEV_BF16_KERNELS_H
#define DEV_BF16_KERNELS_H

#include "llmc/bf16/tile_kernels.h"
#include "dev/test/lib/test.h"

// Sets the kernels to test, and returns their number. Says which are left out.
static inline int tested_kernels(Bf16Kernel kernels[BF16_KERNELS]) {
    Bf16Kernel known[BF16_KERNELS];
    const int count = bf16_kernels(known);
    int n = 0;
    for (int k = 0; k < count; k++) {
        if (known[k].runs) {
            kernels[n++] = known[k];
        } else {
            printf("skipped: bf16: this machine has no %s\n", known[k].name);
        }
    }
    return n;
}

#endif
