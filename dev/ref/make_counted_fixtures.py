"""Writes dev/ref/fixtures/counted: documents with and without hidden targets, and the true numbers of an update on them in
models with experts (counted.h).

    dev/ref/setup.sh && build/venv/bin/python dev/ref/make_counted_fixtures.py

The models are those of make_model_fixtures.py. text.bin and answers.bin are the same documents as shards, the second with a
mask. expected.txt has a line for each shard, model, and weights of the router's two losses and of the classifier's z-loss: the
mean loss of the targets, the norm of the gradient, the load of the busiest expert, and the mean entropy of the routers. transformers and PyTorch compute
them with weights in float64, each document alone, a longer one than ROW in pieces. So no sequence has padding, and no
document sees another. The first line has the number of pieces with a target, and of the rows that best fit makes of them.
"""

import math
import struct
from pathlib import Path

import torch
import transformers

MODELS = Path(__file__).parent / "fixtures" / "models"
OUT = Path(__file__).parent / "fixtures" / "counted"
EOT, ROW = 60, 16
LENGTHS = [9, 3, 21, 1, 16, 5, 12, 33, 2, 7, 4, 10]
WEIGHTS = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0.25, 0.125, 0.125)]
NAMES = ["mixtral", "qwen3moe", "olmoe", "glm4moe"]


def documents():
    """The tokens of each, and whether the token after each is hidden: some have a prompt, one is nothing else."""
    rng = torch.Generator().manual_seed(20261128)
    for i, n in enumerate(LENGTHS):
        tokens = [EOT] + torch.randint(EOT, (n - 1,), generator=rng).tolist()
        prompt = n if i == 5 else [0, n // 2, 3 * n // 4][i % 3]
        yield tokens, [t < prompt for t in range(n)]


def xxh64(data):
    """The checksum of less than 32 bytes."""
    bits, (p1, p2, p3, p4, p5) = 2**64 - 1, (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                             0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
    rotate = lambda x, r: (x << r | x >> 64 - r) & bits
    h, at = (p5 + len(data)) & bits, 0
    for width, add in ((8, lambda h, x: rotate(h ^ rotate(x * p2 & bits, 31) * p1 & bits, 27) * p1 + p4),
                       (4, lambda h, x: rotate(h ^ x * p1 & bits, 23) * p2 + p3),
                       (1, lambda h, x: rotate(h ^ x * p5 & bits, 11) * p1)):
        for _ in range((len(data) - at) // width):
            h = add(h, int.from_bytes(data[at : at + width], "little")) & bits
            at += width
    for shift, factor in ((33, p2), (29, p3), (32, 1)):
        h = (h ^ h >> shift) * factor & bits
    return h


def write_shard(name, tokens, hidden):
    shard = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens)
    (OUT / name).write_bytes(shard)
    if any(hidden):
        bits = bytes(sum(bit << i for i, bit in enumerate(hidden[at : at + 8])) for at in range(0, len(hidden), 8))
        (OUT / (name + ".mask")).write_bytes(struct.pack("<8s3Q", b"LLMCMASK", len(tokens), sum(hidden), xxh64(bits)) + bits)


def pieces(with_mask):
    """The inputs of each piece, its targets, and which count. The end of a document is end-of-text."""
    for tokens, hidden in documents():
        following = tokens[1:] + [EOT]
        for at in range(0, len(tokens), ROW):
            part = slice(at, at + ROW)
            counts = [not (h and with_mask) for h in hidden[part]]
            if any(counts):
                yield tokens[part], following[part], counts


def best_fit(lengths):
    room = []
    for n in sorted(lengths, reverse=True):
        fitting = [i for i, left in enumerate(room) if left >= n]
        if fitting:
            room[min(fitting, key=lambda i: room[i])] -= n
        else:
            room.append(ROW - n)
    return len(room)


def experts_of(model):
    return next(getattr(model.config, name) for name in ("num_local_experts", "n_routed_experts", "num_experts")
                if hasattr(model.config, name))


def probabilities(name, logits):
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True) if name == "glm4moe" else logits.softmax(-1)


def numbers(name, rows, balance, z, z_head):
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float64, attn_implementation="eager",
                                                              experts_implementation="eager")
    model.model.embed_tokens.padding_idx = None  # else OLMoE's token 1 has no gradient
    E, routed = experts_of(model), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, inputs, out: routed.append((out[0].double(), out[2])))
    N, targets = sum(len(row[0]) for row in rows), sum(sum(row[2]) for row in rows)
    loss = more = entropy = 0
    load = torch.zeros(len(model.model.layers), E)
    for inputs, following, counts in rows:
        routed.clear()
        logits = model(torch.tensor([inputs])).logits[0]
        each = torch.nn.functional.cross_entropy(logits, torch.tensor(following), reduction="none")
        loss = loss + (each * torch.tensor(counts)).sum() / targets
        more = more + z_head * (logits.logsumexp(-1) ** 2 * torch.tensor(counts)).sum() / targets
        for l, (router, chosen) in enumerate(routed):
            q, taken = probabilities(name, router), torch.zeros_like(router).scatter(1, chosen, 1.0)
            more = more + balance * E * (taken.mean(0) * q.mean(0)).sum() * len(inputs) / N
            more = more + z * (router.logsumexp(-1) ** 2).sum() / N
            load[l] += taken.sum(0)
            entropy -= (q * q.log()).sum().item() / N / len(load)
    (loss + more).backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None))
    busiest = (load.amax(1) / load.mean(1)).max().item()
    return f"{loss.item():.9f} {norm:.9f} {busiest:.9f} {entropy:.9f}"


def main():
    torch.set_num_threads(1)  # one order of summation
    OUT.mkdir(exist_ok=True)
    tokens, hidden = (sum(x, []) for x in zip(*documents()))
    lines = []
    for shard, with_mask in (("text.bin", False), ("answers.bin", True)):
        write_shard(shard, tokens, hidden if with_mask else [])
        rows = list(pieces(with_mask))
        lines.append(f"# {shard}: pieces {len(rows)} rows {best_fit([len(row[0]) for row in rows])}")
        for name in NAMES:
            for weights in WEIGHTS:
                lines.append(" ".join([shard, name, *map(str, weights), numbers(name, rows, *weights)]))
                print(lines[-1])
    (OUT / "expected.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
