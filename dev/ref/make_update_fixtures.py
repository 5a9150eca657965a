"""Writes dev/ref/fixtures/models/losses.txt: twelve AdamW updates of each model of make_model_fixtures.py and own_models.py.

    dev/ref/setup.sh && build/venv/bin/python dev/ref/make_update_fixtures.py

Each line has a model, the number of an update, and the loss and the norm of the gradient before it. All updates are on the
same B sequences of tokens.bin. The first line has the trainer's options for them. As in the trainer, matrices decay, with
embeddings, routers and experts, but not norms, biases and the taps of convolutions; a longer gradient is scaled to the norm of --grad-clip. --eps is
large enough to count: with 1e-8, elements of the gradient that are all rounding would be steps of --lr.

transformers and PyTorch compute in float64; norms and rotary positions of transformers stay in float32.
"""

import struct

import torch

from make_model_fixtures import OUT, B, T, read_back
from own_models import read_own

UPDATES = 12
LR, BETAS, EPS, DECAY, CLIP = 0.0005, (0.9, 0.95), 0.001, 1.0, 1.0
OPTIONS = (f"--steps {UPDATES} --lr {LR} --schedule constant --warmup 0 --beta1 {BETAS[0]} "
           f"--beta2 {BETAS[1]} --eps {EPS} --weight-decay {DECAY} --grad-clip {CLIP}")


def text():
    shard = (OUT / "tokens.bin").read_bytes()
    return torch.tensor(struct.unpack_from(f"<{B * T + 1}H", shard, 1024))


def updates(name, tokens):
    """The loss and the norm of each."""
    model = (read_own if name.startswith("llmc_") else read_back)(OUT / name).to(torch.float64).eval()
    model.get_input_embeddings().padding_idx = None  # else that token has no gradient
    weights = list(model.parameters())
    decays = [x.dim() > 1 and not name.endswith(("bias", "conv1d.weight", "conv.conv.weight", "value_gate.weight")) for name, x in model.named_parameters()]
    optimizer = torch.optim.AdamW([dict(params=[x for x, yes in zip(weights, decays) if yes], weight_decay=DECAY),
                                   dict(params=[x for x, yes in zip(weights, decays) if not yes], weight_decay=0.0)],
                                  lr=LR, betas=BETAS, eps=EPS)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        logits = model(tokens[:-1].view(B, T)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        yield loss.item(), norm.item()


def main():
    torch.set_num_threads(1)  # one order of summation
    tokens, lines = text(), [f"# {OPTIONS}", "# model update loss norm"]
    for path in sorted(OUT.glob("*/config.json")):
        name = path.parent.name
        lines += [f"{name} {i} {loss:.9f} {norm:.9f}" for i, (loss, norm) in enumerate(updates(name, tokens), 1)]
    (OUT / "losses.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
