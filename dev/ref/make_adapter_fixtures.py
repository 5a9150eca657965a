#!/usr/bin/env python3
"""make_adapter_fixtures.py -- low-rank adapters that peft has written, and updates of them in float64.

    dev/ref/make_adapter_fixtures.py                makes dev/ref/fixtures/adapters
    dev/ref/make_adapter_fixtures.py loss BASE DIR  prints the loss that peft computes with another adapter,
                                                    on the first two sequences

adapters/NAME has the adapter. A line of adapters/losses.txt has its name, the directory of its base in
fixtures/models, and the losses before each of 12 updates of AdamW, on models/tokens.bin in order. The first loss
is also peft's own. Here, the products are written again beside transformers' model: only that is trained.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file

FIXTURES = Path(__file__).resolve().parent / "fixtures"
T, BATCH, STEPS = 13, 2, 12
ADAMW = dict(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

# name, base, settings of peft
ADAPTERS = [
    ("llama", "llama", dict(r=4, lora_alpha=12, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"],
                            rank_pattern={"down_proj": 6}, alpha_pattern={"down_proj": 5})),
    ("all", "qwen3", dict(r=3, lora_alpha=6, target_modules="all-linear")),
    ("phi3", "phi3", dict(r=4, lora_alpha=8, target_modules=["qkv_proj", "gate_up_proj"])),
]


def sequences(first):
    data = (FIXTURES / "models/tokens.bin").read_bytes()
    tokens = torch.from_numpy(np.frombuffer(data[1024:], dtype="<u2").astype(np.int64))
    count = (len(tokens) - 1) // T
    at = [(first + i) % count * T for i in range(BATCH)]
    return torch.stack([tokens[a:a + T] for a in at]), torch.stack([tokens[a + 1:a + T + 1] for a in at])


def loss_of(model, step):
    inputs, targets = sequences(step * BATCH)
    return torch.nn.functional.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())


def base_of(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64,
                                                             attn_implementation="eager")


def loss_by_peft(base, adapter):
    with torch.no_grad():
        return loss_of(peft.PeftModel.from_pretrained(base_of(base), str(adapter)).double(), 0).item()


class Adapted(torch.nn.Module):
    """A frozen linear layer with a low-rank product."""

    def __init__(self, linear, a, b, factor):
        super().__init__()
        self.linear, self.factor = linear, factor
        self.a, self.b = torch.nn.Parameter(a.double()), torch.nn.Parameter(b.double())

    def forward(self, x):
        return self.linear(x) + self.factor * ((x @ self.a.T) @ self.b.T)


def adapt(model, directory):
    """Gives layers the products in a directory's files."""
    settings = json.loads((directory / "adapter_config.json").read_text())
    weights = load_file(directory / "adapter_model.safetensors")
    for name in [n[:-len(".lora_A.weight")] for n in weights if n.endswith(".lora_A.weight")]:
        parent, last = name[len("base_model.model."):].rsplit(".", 1)
        a, b = weights[name + ".lora_A.weight"], weights[name + ".lora_B.weight"]
        alpha = settings["alpha_pattern"].get(last, settings["lora_alpha"])
        factor = alpha / (len(a) ** 0.5 if settings["use_rslora"] else len(a))
        setattr(model.get_submodule(parent), last, Adapted(model.get_submodule(parent + "." + last), a, b, factor))


def train(base, directory):
    model = base_of(base)
    model.requires_grad_(False)
    adapt(model, directory)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make(name, base, settings):
    directory, path = FIXTURES / "adapters" / name, FIXTURES / "models" / base
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(path), config).save_pretrained(directory)
    (directory / "README.md").unlink()
    written = directory / "adapter_config.json"
    written.write_text(written.read_text().replace(f'"{path}"', f'"../../models/{base}"'))
    losses = train(path, directory)
    assert abs(losses[0] - loss_by_peft(path, directory)) < 1e-9
    return " ".join([name, base] + [f"{loss:.8f}" for loss in losses])


def main():
    if sys.argv[1:2] == ["loss"]:
        print(f"{loss_by_peft(*map(Path, sys.argv[2:])):.6f}")
        return
    shutil.rmtree(FIXTURES / "adapters", ignore_errors=True)
    lines = [make(*adapter) for adapter in ADAPTERS]
    text = "# name, base, losses before each update; made by dev/ref/make_adapter_fixtures.py\n"
    (FIXTURES / "adapters" / "losses.txt").write_text(text + "\n".join(lines) + "\n")


main()
