"""Prints the table WANTED of dev/test/optim/test_soap.c: SOAP's updates in float64, by NumPy.

    python3 dev/ref/soap_numbers.py

The bases come from numpy.linalg.qr. The signs of their vectors are its own; no update depends on them.
"""

import numpy as np

from inputs import uniform

UPDATES, EVERY, KEPT = 12, 5, 6
LR, BETA1, BETA2, EPS, DECAY, GRAD_SCALE, SHIFT = (
    float(np.float32(x)) for x in (0.05, 0.9, 0.95, 1e-8, 0.1, 0.37, 1e-4))
# rows, cols, sides that are turned
CASES = [(9, 9, "LR"), (7, 20, "L"), (20, 7, "R"), (33, 33, "LR"), (5, 8, "")]


def gradient(shape, t):
    """Far from singular: noise, and a diagonal of different sizes."""
    g = uniform(shape, t) / 8
    for i in range(min(shape)):
        g[i, i] += 1 + i / 16
    return g


def renewed(basis, mean, is_first):
    """Rows are the vectors of the basis."""
    basis = np.eye(len(mean)) if is_first else basis
    power = basis @ (mean / (np.trace(mean) / len(mean)) + SHIFT * np.eye(len(mean)))
    return np.linalg.qr(power.T)[0].T


def soap(shape, sides):
    p, m, v = uniform(shape, 0) / 4, np.zeros(shape), np.zeros(shape)
    left, right = np.zeros((shape[0],) * 2), np.zeros((shape[1],) * 2)
    p_basis, q_basis = np.eye(shape[0]), np.eye(shape[1])
    for t in range(1, UPDATES + 1):
        g = gradient(shape, t) * GRAD_SCALE
        if t > 1:
            m = BETA1 * m + (1 - BETA1) * g
            v = BETA2 * v + (1 - BETA2) * (p_basis @ g @ q_basis.T) ** 2
            turned = p_basis @ m @ q_basis.T / (1 - BETA1 ** (t - 1))
            step = p_basis.T @ (turned / (np.sqrt(v / (1 - BETA2 ** (t - 1))) + EPS)) @ q_basis
            p -= LR * (step + DECAY * p)
        left = BETA2 * left + (1 - BETA2) * g @ g.T
        right = BETA2 * right + (1 - BETA2) * g.T @ g
        if (t - 1) % EVERY == 0:
            p_basis = renewed(p_basis, left, t == 1) if "L" in sides else p_basis
            q_basis = renewed(q_basis, right, t == 1) if "R" in sides else q_basis
    return p


def main():
    for rows, cols, sides in CASES:
        kept = soap((rows, cols), sides).ravel()[np.linspace(0, rows * cols - 1, KEPT).round().astype(int)]
        print(f"    {{{rows}, {cols}, {int('L' in sides)}, {int('R' in sides)}, {{{', '.join(f'{x:.9f}' for x in kept)}}}}},")


if __name__ == "__main__":
    main()
