"""Writes dev/ref/fixtures/fp8: E4M3 as PyTorch's float8_e4m3fn has it, rows with scales, a linear layer
and twelve AdamW steps of the tiny GPT-2 with matmuls in fp8.

    dev/ref/setup.sh && build/venv/bin/python dev/ref/make_fp8_fixtures.py

codes.bin, little endian: float32 (256), the value of each code; uint8 (65536), the code of each bf16
number; int32 count; float32 (count) and uint8 (count): numbers between two codes, and their codes.
rows.bin: int32 rows, cols; float32 (rows, cols); int32 (rows), exponents of scales, 128 for NaN;
uint8 (rows, cols), codes.
linear.bin: float64 out (13, 37), dinp (13, 31), of inputs that dev/test/ops/test_matmul_fp8.c has, too.
gpt2_tiny.txt: step, loss, gradient norm, as in ../gpt2_tiny_adamw.txt; gpt2_tiny_grads.bin: float32,
every seventh element of each gradient of the first step, in the order of the model's file.

The model and the linear layer are computed in float64; only what fp8 rounds is rounded.
"""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import gpt2_reference as ref
import make_fixtures
from inputs import uniform

OUT = Path(__file__).parent / "fixtures" / "fp8"
LARGEST, LEAST = 448, -116
N, C, OC = 13, 31, 37
STEPS = 12


# ---- the format ----

def encode(x):
    """The codes of float32 numbers. float8_e4m3fn makes what is larger than 448 NaN; fp8 saturates."""
    x = torch.as_tensor(x, dtype=torch.float32)
    codes = x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), torch.tensor(0x7F, dtype=torch.uint8), codes).numpy()


def between_codes():
    """Midpoints of neighboring codes, and the float32 numbers next to them; then the largest."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    up, down = (np.nextafter(middle, np.float32(to)) for to in (np.inf, 0))
    edges = np.array([448, 463.99997, 464, 464.00003, 480, 3e38, np.inf, 2**-10, 1e-40, 0], np.float32)
    positive = np.concatenate([middle, up, down, edges])
    return np.concatenate([positive, -positive]).astype("<f4")


def write_codes(path):
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    bf16 = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    between = between_codes()
    path.write_bytes(values.astype("<f4").tobytes() + encode(bf16).tobytes() +
                     np.int32(len(between)).tobytes() + between.tobytes() + encode(between).tobytes())


# ---- rows ----

def exponent(row):
    """The smallest k >= LEAST with max |x| <= 448 * 2^k, tried one after the other; 128: NaN."""
    if not np.isfinite(row).all():
        return 128
    k, most = LEAST, Fraction(float(np.abs(row).max()))
    while most > LARGEST * Fraction(2) ** k:
        k += 1
    return k


def make_rows():
    """Rows of many sizes, some at the edge of a scale, zeros, tiny and huge numbers, inf and NaN."""
    x = np.ldexp(uniform((40, 33), 7), (np.arange(40)[:, None] * 7 - 140).clip(-140, 120)).astype(np.float32)
    x[:, 5] = np.ldexp(x[:, 5], -9)
    for row, most in ((10, 448), (11, np.nextafter(np.float32(448), np.float32(500))), (12, 447.9), (13, 3.5),
                      (14, np.nextafter(np.float32(3.5), np.float32(4))), (15, 2.0**-116 * 448)):
        x[row] = uniform((33,), row) * most
        x[row, row] = -most
    x[16] = 0
    x[17, 3], x[18, 4], x[19, 5] = np.inf, np.nan, -np.inf
    x[20] = 1e-40
    x[21, 32] = np.finfo(np.float32).max
    return x


def write_rows(path):
    x = make_rows()
    k = np.array([exponent(row) for row in x], "<i4")
    scaled = np.where(k[:, None] == 128, np.nan, np.ldexp(x.astype(np.float64), -k[:, None].clip(-127, 127)))
    codes = encode(scaled.astype(np.float32))
    path.write_bytes(np.array(x.shape, "<i4").tobytes() + x.astype("<f4").tobytes() + k.tobytes() +
                     codes.tobytes())


# ---- matmuls ----

def rounded(t):
    """The values that the rows of a matrix have in fp8."""
    mantissa, exponent = torch.frexp(t.abs().amax(1, keepdim=True))  # mantissa in [0.5, 1)
    k = (exponent - 9 + (mantissa > 0.875)).clamp(min=LEAST)
    return torch.ldexp(torch.ldexp(t, -k).to(torch.float8_e4m3fn).to(t.dtype), k)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return rounded(x) @ rounded(weight).T

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        return rounded(dout) @ rounded(weight.T).T, dout.T @ x


def linear(x, weight, bias):
    return Linear.apply(x.flatten(0, -2), weight).view(*x.shape[:-1], -1) + bias


def forward(p, cfg, x, y):
    """ref.forward, with qkv, fc and fcproj in fp8."""
    h = p["wte"][x] + p["wpe"][: x.shape[1]]
    for l in range(cfg.L):
        a = F.layer_norm(h, (cfg.C,), p["ln1w"][l], p["ln1b"][l], eps=1e-5)
        a = ref.attention(linear(a, p["qkvw"][l], p["qkvb"][l]), cfg.NH)
        h = h + F.linear(a, p["attprojw"][l], p["attprojb"][l])
        m = F.layer_norm(h, (cfg.C,), p["ln2w"][l], p["ln2b"][l], eps=1e-5)
        m = F.gelu(linear(m, p["fcw"][l], p["fcb"][l]), approximate="tanh")
        h = h + linear(m, p["fcprojw"][l], p["fcprojb"][l])
    h = F.layer_norm(h, (cfg.C,), p["lnfw"], p["lnfb"], eps=1e-5)
    return None, F.cross_entropy(F.linear(h, p["wte"][: cfg.V]).flatten(0, 1), y.flatten())


def write_linear(path):
    sizes = np.arange(N)[:, None] * 3 - 20
    x = torch.tensor(np.ldexp(uniform((N, C), 1), sizes), requires_grad=True)
    weight = torch.tensor(np.ldexp(uniform((OC, C), 2), -(np.arange(OC)[:, None] % 5)), requires_grad=True)
    out = linear(x, weight, torch.tensor(uniform((OC,), 3)))
    out.backward(torch.tensor(np.ldexp(uniform((N, OC), 4), -sizes)))
    path.write_bytes(out.detach().numpy().astype("<f8").tobytes() + x.grad.numpy().astype("<f8").tobytes())


def gradients(p, cfg, x, y):
    leaves = {name: t.detach().clone().requires_grad_() for name, t in p.items()}
    loss = forward(leaves, cfg, x, y)[1]
    loss.backward()
    return loss.item(), {name: t.grad for name, t in leaves.items()}


def history(p, cfg, x, y):
    """(loss, norm) of each step of AdamW, in the dtype of p."""
    p, steps = dict(p), []
    m, v = ({name: torch.zeros_like(t) for name, t in p.items()} for _ in range(2))
    for step in range(1, STEPS + 1):
        loss, grads = gradients(p, cfg, x, y)
        norm = ref.global_norm(grads)
        grads = {name: g * min(1.0, make_fixtures.CLIP / norm) for name, g in grads.items()}
        ref.adamw(p, grads, m, v, step, **make_fixtures.ADAMW)
        steps.append((loss, norm))
    return steps


def write_model(path, of_gradients):
    cfg = make_fixtures.CONFIG
    p, (x, y) = make_fixtures.make_parameters(cfg), make_fixtures.make_batch(cfg)
    grads = gradients(p, cfg, x, y)[1]
    of_gradients.write_bytes(b"".join(ref.to_bytes(grads[name].flatten()[::7].float()) for name in cfg.shapes()))
    exact = history(p, cfg, x, y)
    fp32 = history({name: t.float() for name, t in p.items()}, cfg, x, y)
    apart = [max(abs(a[i] / b[i] - 1) for a, b in zip(fp32, exact, strict=True)) for i in range(2)]
    with open(path, "w") as file:
        file.write(f"# step loss norm; in fp32 PyTorch the same steps come within {apart[0]:.1e} and {apart[1]:.1e}\n")
        for step, (loss, norm) in enumerate(exact, 1):
            file.write(f"{step} {loss:.17g} {norm:.17g}\n")


def main():
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    write_codes(OUT / "codes.bin")
    write_rows(OUT / "rows.bin")
    write_linear(OUT / "linear.bin")
    write_model(OUT / "gpt2_tiny.txt", OUT / "gpt2_tiny_grads.bin")


if __name__ == "__main__":
    main()
