"""Writes dev/ref/fixtures/optimizers/updates.bin: weights after the updates of other
libraries' optimizers.

    dev/ref/setup.sh && build/venv/bin/python dev/ref/make_optimizer_fixtures.py

Parameters and gradients are a formula that dev/test/optim/test_optimizers.c has, too; they span six
decades. Twenty updates are done in float64 (bitsandbytes' Lion: in float32), and some of the final
parameters kept.

Little endian. 256 float32: the values of bitsandbytes' signed code; 256 of the unsigned one; int32:
the number of cases. A case: 32 bytes of name; int32 rows, cols, parts, block, count; float32 lr,
beta1, beta2, eps, weight_decay, grad_scale; uint16 index (count); float32 param (count); with
block > 0 also uint8 codes of m (count) and of v (count).
"""

from pathlib import Path
from unittest import mock

import bitsandbytes
import numpy as np
import torch
import transformers

from inputs import mix, uniform

OUT = Path(__file__).parent / "fixtures" / "optimizers" / "updates.bin"
SHAPES = [(64, 130), (130, 64), (1, 37), (33, 384), (1, 1), (1, 31), (33, 1), (31, 33), (41, 25)]
UPDATES, KEPT = 20, 150  # of each case
OPTIONS = ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_scale")


# ---- the inputs ----

def first_params(shape):
    return uniform(shape, 0) / 4


def gradient(shape, t):
    """Of update t, from 1. Rows and columns have a size of their own, which lasts."""
    row, col = (mix(np.arange(n, dtype=np.uint64) + k) % 11 for n, k in zip(shape, (500, 900), strict=True))
    return np.ldexp(uniform(shape, t), -(row[:, None] + col[None, :]).astype(int))


# ---- by other libraries ----

def optimize(param, options, make, decay_first=False, vectors=False, dtype=torch.float64):
    """Returns the final parameters. decay_first: decays here, as the library does not decouple it;
    vectors: each row is one."""
    p = torch.nn.Parameter(torch.tensor(param[0] if vectors and len(param) == 1 else param, dtype=dtype))
    optimizer = make(p)
    for t in range(1, UPDATES + 1):
        p.grad = torch.tensor(gradient(param.shape, t) * options["grad_scale"], dtype=dtype).view_as(p)
        if decay_first:
            p.data.mul_(1 - options["lr"] * options["weight_decay"])
        optimizer.step()
    return p.detach().double().numpy().reshape(param.shape)


def adamw(param, o):
    return optimize(param, o, lambda p: torch.optim.AdamW(
        [p], o["lr"], (o["beta1"], o["beta2"]), o["eps"], o["weight_decay"]))


def lion(param, o):
    return optimize(param, o, lambda p: bitsandbytes.optim.Lion(
        [p], o["lr"], (o["beta1"], o["beta2"]), o["weight_decay"], optim_bits=32), dtype=torch.float32)


def sgd(param, o):
    return optimize(param, o, lambda p: torch.optim.SGD([p], o["lr"], momentum=o["beta1"]), decay_first=True)


def adafactor(param, o):
    return optimize(param, o, lambda p: transformers.Adafactor(
        [p], o["lr"], beta1=o["beta1"] or None, weight_decay=o["weight_decay"], scale_parameter=False,
        relative_step=False), vectors=True)


def adafactor_relative(param, o):
    return optimize(param, o, lambda p: torch.optim.Adafactor(
        [p], o["lr"], eps=(1e-30, 1e-3), weight_decay=o["weight_decay"]), vectors=True)


def torch_muon(param, o, scale, inside):
    """torch computes the iteration in bfloat16; `inside` takes its place."""
    with mock.patch.object(torch, "bfloat16", inside):
        return optimize(param, o, lambda p: torch.optim.Muon(
            [p], o["lr"], o["weight_decay"], o["beta1"], adjust_lr_fn=scale))


def muon_spectral(param, o):
    in_bf16 = torch_muon(param, o, "original", torch.bfloat16) - param
    exact = torch_muon(param, o, "original", torch.float64)
    cosine = (in_bf16 * (exact - param)).sum() / np.linalg.norm(in_bf16) / np.linalg.norm(exact - param)
    assert cosine > 0.999, cosine
    return exact


def muon_rms(param, o):
    return torch_muon(param, o, "match_rms_adamw", torch.float64)


# ---- by the formula, in float64, where no library has it ----

def adafactor_capped(param, o):
    """beta2 is at most o["beta2"]; no momentum, no decay."""
    row, col, v, p = 0.0, 0.0, 0.0, param.copy()
    for t in range(1, UPDATES + 1):
        g = gradient(p.shape, t) * o["grad_scale"]
        beta2 = min(1 - t**-0.8, o["beta2"])
        row = beta2 * row + (1 - beta2) * (g * g + 1e-30).mean(axis=1)
        col = beta2 * col + (1 - beta2) * (g * g + 1e-30).mean(axis=0)
        v = beta2 * v + (1 - beta2) * (g * g + 1e-30)
        u = g / np.sqrt(v if len(p) == 1 else np.outer(row, col) / row.mean())
        p -= o["lr"] * u / max(1, np.sqrt((u * u).mean()))
    return p


def nearest_to_one(low, high):
    """Coefficients of the odd polynomial of degree 5 that is nearest to 1 on [low, high], by Remez' exchange."""
    at = np.linspace(low, high, 4)
    for _ in range(50):
        a, b, c, _ = np.linalg.solve(np.stack([at, at**3, at**5, np.array([1, -1, 1, -1])], axis=1), np.ones(4))
        at[1:3] = np.sqrt((-3 * b + np.array([-1, 1]) * np.sqrt(9 * b * b - 20 * a * c)) / (10 * c))
    return np.array([a, b, c])


def polar_express(steps=5, low=1e-3, safety=1.02):
    """Coefficients of the steps of Polar Express. Lower ends are at least 1/50 of the upper ones."""
    high, all_steps = 1.0, []
    for _ in range(steps):
        k = nearest_to_one(max(low, high / 50), high)
        ends = [k @ [x, x**3, x**5] for x in (low, high)]
        k *= 2 / sum(ends) if low < high / 50 else 1
        all_steps.append(k / [safety, safety**3, safety**5])
        low = all_steps[-1] @ [low, low**3, low**5]
        high = 2 - low
    return [*all_steps[:-1], k]


def muon_polar(param, o):
    return muon_options(param, o, polar_express(), 1.02)


def muon_options(param, o, steps=5 * [(3.4445, -4.7750, 2.0315)], margin=1.0):
    """Cautious decay and NorMuon's rows."""
    p, b, mean_squares, mu = param.copy(), 0.0, 0.0, o["beta1"]
    for t in range(1, UPDATES + 1):
        g = gradient(p.shape, t) * o["grad_scale"]
        b = mu * b + (1 - mu) * g
        x = mu * b + (1 - mu) * g
        x /= margin * np.linalg.norm(x) + 1e-7
        for of_x, of_a, of_aa in steps:
            a = x @ x.T
            x = of_x * x + (of_a * a + of_aa * a @ a) @ x
        mean_squares = o["beta2"] * mean_squares + (1 - o["beta2"]) * (x * x).mean(axis=1, keepdims=True)
        balanced = x / np.sqrt(np.maximum(mean_squares, 1e-10))
        x = balanced * (np.linalg.norm(x) / np.linalg.norm(balanced))
        p -= o["lr"] * o["weight_decay"] * p * (x * p > 0) + o["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5 * x
    return p


def encode(values, scale, book, terms, doubtful):
    """Nearest codes of a block. Values whose code float32 may well not find are marked."""
    middles = (book[:-1] + book[1:]) / 2
    code = np.searchsorted(middles, values / scale if scale else values * 0, side="left")
    distance = np.abs(values[:, None] - middles[None, :] * scale).min(axis=1)
    doubtful |= distance < 2.0**-21 * (terms + np.abs(values))
    return np.where((values < 0) & (book[code] == 0), code - 1, code)


def adamw8bit(param, o, block):
    """Parameters, codes of m and of v, and which elements are doubtful."""
    books = [bitsandbytes.functional.create_dynamic_map(signed).numpy().astype(np.float64) for signed in (True, False)]
    p, n = param.reshape(-1).copy(), param.size
    state, doubtful = [np.zeros(n), np.zeros(n)], np.zeros(n, bool)
    codes = [np.zeros(n, np.uint8), np.zeros(n, np.uint8)]
    b1, b2, lr = o["beta1"], o["beta2"], o["lr"]
    for t in range(1, UPDATES + 1):
        g = gradient(param.shape, t).reshape(-1) * o["grad_scale"]
        new = b1 * state[0] + (1 - b1) * g, b2 * state[1] + (1 - b2) * g * g
        terms = b1 * np.abs(state[0]) + (1 - b1) * np.abs(g), new[1]
        step = new[0] / (1 - b1**t) / (np.sqrt(new[1] / (1 - b2**t)) + o["eps"])
        p = (1 - lr * o["weight_decay"]) * p - lr * step
        for k in (0, 1):
            for at in range(0, n, block):
                part = slice(at, at + block)
                scale = np.abs(new[k][part]).max()
                codes[k][part] = encode(new[k][part], scale, books[k], terms[k][part], doubtful[part])
                state[k][part] = books[k][codes[k][part]] * scale
        state[0][state[1] == 0] = 0  # the codes stay
    return p.reshape(param.shape), codes, doubtful


def muon_8bit(param, o, block=64):
    """The momentum is kept in 8 bits, and the direction is made of it as it is kept."""
    book = bitsandbytes.functional.create_dynamic_map(True).numpy().astype(np.float64)
    p, n, mu = param.copy(), param.size, o["beta1"]
    b, codes, doubtful = np.zeros(n), np.zeros(n, np.uint8), np.zeros(n, bool)
    for t in range(1, UPDATES + 1):
        g = gradient(param.shape, t).reshape(-1) * o["grad_scale"]
        new, terms = mu * b + (1 - mu) * g, mu * np.abs(b) + (1 - mu) * np.abs(g)
        for at in range(0, n, block):
            part = slice(at, at + block)
            scale = np.abs(new[part]).max()
            codes[part] = encode(new[part], scale, book, terms[part], doubtful[part])
            b[part] = book[codes[part]] * scale
        x = (mu * b + (1 - mu) * g).reshape(p.shape)
        x /= np.linalg.norm(x) + 1e-7
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        p = (1 - o["lr"] * o["weight_decay"]) * p - o["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5 * x
    return p, codes, doubtful


# ---- the file ----

def exact(**options):
    """float32's values of the options, which both sides compute with."""
    return {name: float(np.float32(options.get(name, 0))) for name in OPTIONS}


# Large rates, so that changes stand out from the roundings of parameters.
ADAM = exact(lr=0.05, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_scale=0.37)
FACTOR = exact(lr=0.05, weight_decay=0.1, grad_scale=0.37)
# Large gradients: torch's 1e-7 is the least norm, ours is added to it.
MUON = exact(lr=0.02, beta1=0.95, beta2=0.95, weight_decay=0.05, grad_scale=1e6)
CASES = [
    ("adamw", adamw, ADAM),
    ("lion", lion, {**ADAM, "beta2": exact(eps=0.99)["eps"]}),
    ("sgd", sgd, exact(lr=0.1, beta1=0.9, weight_decay=0.1, grad_scale=0.37)),
    ("sgd without momentum", sgd, exact(lr=0.3, grad_scale=1)),
    ("adafactor", adafactor, FACTOR),
    ("adafactor with momentum", adafactor, {**FACTOR, "beta1": ADAM["beta1"]}),
    ("adafactor relative", adafactor_relative, exact(lr=0.4, weight_decay=0.1, grad_scale=0.37)),
    ("adafactor capped", adafactor_capped, exact(lr=0.05, beta2=0.7, grad_scale=1)),
    ("muon", muon_spectral, MUON),
    ("muon rms", muon_rms, MUON),
    ("muon options", muon_options, MUON),
    ("muon polar options", muon_polar, MUON),
]


def kept_elements(allowed):
    """About KEPT of the allowed elements, in order, the last one too."""
    at = np.flatnonzero(allowed)
    return at[np.unique(np.linspace(0, len(at) - 1, KEPT).round().astype(int))]


def case_bytes(name, shape, o, param, at, parts=1, block=0, codes=()):
    numbers = np.array([*shape, parts, block, len(at)], "<i4"), np.array([o[k] for k in OPTIONS], "<f4")
    arrays = [at.astype("<u2"), param.reshape(-1)[at].astype("<f4"), *(code[at] for code in codes)]
    return b"".join([name.encode().ljust(32, b"\0"), *(x.tobytes() for x in (*numbers, *arrays))])


def main():
    torch.manual_seed(0)
    cases = []
    for shape in SHAPES:
        first = first_params(shape)
        everything = kept_elements(np.ones(first.size))
        for name, function, o in CASES:
            cases.append(case_bytes(name, shape, o, function(first, o), everything))
        for block in (64, 256):
            param, codes, doubtful = adamw8bit(first, ADAM, block)
            print(f"adamw8bit {shape}, blocks of {block}: {doubtful.mean():.4f} of the elements are left out")
            assert doubtful.sum() <= 0.01 * doubtful.size + 1
            kept = kept_elements(~doubtful)
            cases.append(case_bytes("adamw8bit", shape, ADAM, param, kept, 1, block, codes))
    for shape in [(33, 384), (160, 64), (1, 64)]:
        first = first_params(shape)
        param, codes, doubtful = muon_8bit(first, MUON)
        print(f"muon in 8 bits {shape}: {doubtful.mean():.4f} of the elements are left out")
        kept = kept_elements(~doubtful)
        cases.append(case_bytes("muon 8bit", shape, MUON, param, kept, 1, 64, (codes, np.zeros_like(codes))))
    cases.append(muon_parts((33, 384)))
    books = [bitsandbytes.functional.create_dynamic_map(signed).numpy().tobytes() for signed in (True, False)]
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_bytes(b"".join([*books, np.array([len(cases)], "<i4").tobytes(), *cases]))
    print(f"{OUT}: {len(cases)} cases, {OUT.stat().st_size / 1024:.0f} KiB; torch {torch.__version__}, "
          f"transformers {transformers.__version__}, bitsandbytes {bitsandbytes.__version__}")


def muon_parts(shape):
    """Three matrices, one below the other, that torch updates one by one."""
    first, rows = first_params(shape), shape[0] // 3
    whole = gradient
    parts = []
    for k in range(3):
        part = slice(k * rows, (k + 1) * rows)
        with mock.patch(f"{__name__}.gradient", lambda _, t, part=part: whole(shape, t)[part]):
            parts.append(muon_spectral(first[part], MUON))
    return case_bytes("muon", shape, MUON, np.concatenate(parts), kept_elements(np.ones(first.size)), parts=3)


if __name__ == "__main__":
    main()
