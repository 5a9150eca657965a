"""Numbers that Python and C make alike (dev/test/lib/inputs.h), as inputs of updates."""

import numpy as np


def mix(x):
    """A bijection of 32-bit numbers that looks random: multiplications and shifts."""
    x = np.asarray(x, np.uint64) & 0xFFFFFFFF
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 15)


def uniform(shape, stream):
    """Multiples of 2^-15 in [-1, 1)."""
    at = np.arange(np.prod(shape), dtype=np.uint64)
    return (mix(at + 1000003 * stream) >> np.uint64(16)).astype(np.float64).reshape(shape) * 2.0**-15 - 1
