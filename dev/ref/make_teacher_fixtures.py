"""Writes dev/ref/fixtures/models/teachers.txt: true numbers of an update that learns from a teacher (distill.h).

    dev/ref/setup.sh && build/venv/bin/python dev/ref/make_teacher_fixtures.py

Student and teacher are models of make_model_fixtures.py, on the text of tokens.bin. Each line has the weight and the
temperature of the teacher, and the mean loss, the mean divergence and the norm of the gradient. transformers and PyTorch
compute them with weights in float64.
"""

import math
from pathlib import Path

import numpy as np
import torch
import transformers

MODELS = Path(__file__).parent / "fixtures" / "models"
B, T = 2, 13
CASES = [("llama", "qwen3", 0.5, 1), ("qwen2", "llama", 0.75, 2), ("nanochat", "mistral", 0.25, 0.5),
         ("arcee", "nanochat", 1, 1.5)]


def model(name):
    return transformers.AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float64,
                                                             attn_implementation="eager")


def divergence(student, teacher, t):
    """The mean of kl."""
    q, p = torch.log_softmax(teacher / t, -1), torch.log_softmax(student / t, -1)
    return (q.exp() * (q - p)).sum(-1).mean()


def numbers(student, teacher, weight, t, inputs, targets):
    learns = model(student)
    logits = learns(inputs).logits
    with torch.no_grad():
        wanted = model(teacher)(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    kl = divergence(logits, wanted, t)
    ((1 - weight) * loss + weight * t * t * kl).backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in learns.parameters() if p.grad is not None))
    return f"{loss.item():.9f} {kl.item():.9f} {norm:.9f}"


def main():
    tokens = np.frombuffer((MODELS / "tokens.bin").read_bytes()[1024:], dtype=np.uint16)[: B * T + 1].astype(np.int64)
    inputs, targets = (torch.tensor(x).reshape(B, T) for x in (tokens[:-1], tokens[1:]))
    lines = ["# student teacher weight temperature loss kl norm"]
    lines += [" ".join(map(str, case)) + " " + numbers(*case, inputs, targets) for case in CASES]
    (MODELS / "teachers.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
