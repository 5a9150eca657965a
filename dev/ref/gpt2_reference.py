"""GPT-2 in plain PyTorch: the formulas, for any dtype, with no concern for speed.

The parameters are a dict of tensors in the layout of llm.c's model files, as in the C code: every
per-layer tensor is stacked over the L layers, matrices are (out, in), and wte, which is both the
token embedding and the classifier, has Vp rows; only the first V are ever used.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

HEADER_WORDS = 256
MODEL_MAGIC = 20240326
MODEL_VERSION = {torch.float32: 3, torch.bfloat16: 5}


@dataclass(frozen=True)
class Config:
    maxT: int
    V: int
    L: int
    NH: int
    C: int

    @property
    def Vp(self):
        """V padded to a multiple of 128"""
        return -(-self.V // 128) * 128

    def shapes(self):
        """Name and shape of every parameter, in the order of the file."""
        L, C = self.L, self.C
        return {
            "wte": (self.Vp, C), "wpe": (self.maxT, C),
            "ln1w": (L, C), "ln1b": (L, C),
            "qkvw": (L, 3 * C, C), "qkvb": (L, 3 * C),
            "attprojw": (L, C, C), "attprojb": (L, C),
            "ln2w": (L, C), "ln2b": (L, C),
            "fcw": (L, 4 * C, C), "fcb": (L, 4 * C),
            "fcprojw": (L, C, 4 * C), "fcprojb": (L, C),
            "lnfw": (C,), "lnfb": (C,),
        }


# The tensors that weight decay pulls towards zero: embeddings and matrices, no biases and no norms.
DECAYED = ("wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw")


def attention(qkv, NH):
    """Causal multi-head attention; qkv (B, T, 3C) holds queries, keys and values side by side."""
    B, T, C = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = (t.view(B, T, NH, C // NH).transpose(1, 2) for t in qkv.split(C, dim=-1))  # (B, NH, T, HS)
    scores = q @ k.transpose(-1, -2) / math.sqrt(C // NH)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    return (weights @ v).transpose(1, 2).reshape(B, T, C)


def forward(p, cfg, x, y):
    """Returns logits (B, T, V) and mean cross-entropy of tokens x (B, T) and the next ones, y."""
    C = cfg.C
    h = p["wte"][x] + p["wpe"][: x.shape[1]]
    for l in range(cfg.L):
        a = F.layer_norm(h, (C,), p["ln1w"][l], p["ln1b"][l], eps=1e-5)
        a = attention(F.linear(a, p["qkvw"][l], p["qkvb"][l]), cfg.NH)
        h = h + F.linear(a, p["attprojw"][l], p["attprojb"][l])
        m = F.layer_norm(h, (C,), p["ln2w"][l], p["ln2b"][l], eps=1e-5)
        m = F.gelu(F.linear(m, p["fcw"][l], p["fcb"][l]), approximate="tanh")
        h = h + F.linear(m, p["fcprojw"][l], p["fcprojb"][l])
    h = F.layer_norm(h, (C,), p["lnfw"], p["lnfb"], eps=1e-5)
    logits = F.linear(h, p["wte"][: cfg.V])
    return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def gradients(p, cfg, x, y):
    """Logits, loss, and the gradient of the loss by every parameter."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in p.items()}
    logits, loss = forward(leaves, cfg, x, y)
    loss.backward()
    return logits.detach(), loss.item(), {name: t.grad for name, t in leaves.items()}


def global_norm(tensors):
    return math.sqrt(sum(t.square().sum().item() for t in tensors.values()))


def adamw(p, grads, m, v, step, lr, beta1, beta2, eps, weight_decay):
    """One AdamW step in place, counted from 1 (Loshchilov and Hutter, 2019)."""
    for name, g in grads.items():
        m[name] = beta1 * m[name] + (1 - beta1) * g
        v[name] = beta2 * v[name] + (1 - beta2) * g.square()
        m_hat, v_hat = m[name] / (1 - beta1**step), v[name] / (1 - beta2**step)
        decay = weight_decay if name in DECAYED else 0.0
        p[name] = p[name] - lr * (m_hat / (v_hat.sqrt() + eps) + decay * p[name])


def to_bytes(t):
    """The little-endian bytes of a tensor; bf16 has no numpy type."""
    t = t.contiguous()
    return (t.view(torch.int16) if t.dtype == torch.bfloat16 else t).numpy().tobytes()


def header(*words):
    return np.array(words + (0,) * (HEADER_WORDS - len(words)), dtype="<i4").tobytes()


def save_model(path, cfg, p, dtype=torch.float32):
    """llm.c's model file; rounds to nearest, ties to even."""
    with open(path, "wb") as file:
        file.write(header(MODEL_MAGIC, MODEL_VERSION[dtype], cfg.maxT, cfg.V, cfg.L, cfg.NH, cfg.C, cfg.Vp))
        for name, shape in cfg.shapes().items():
            assert p[name].shape == shape, f"{name} is {tuple(p[name].shape)}, wanted {shape}"
            file.write(to_bytes(p[name].to(dtype)))
