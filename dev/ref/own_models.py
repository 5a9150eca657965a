"""Writes dev/ref/fixtures/models/llmc_*: tiny random models that no class of transformers has, and their true numbers.

    dev/ref/setup.sh && build/venv/bin/python dev/ref/own_models.py

Llama and nanochat with scales of the residual stream, and with value embeddings, in float64 from their formulas; files as in
make_model_fixtures.py. make_update_fixtures.py reads these models, too.
"""

import json
import types

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from make_model_fixtures import OUT, B, T, numbers

COMMON = dict(vocab_size=61, max_position_embeddings=128, hidden_size=40, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
              num_key_value_heads=2, head_dim=8, attention_dropout=0.0, rope_theta=10000.0, residual_scales=True, value_embeddings=True,
              bos_token_id=60, eos_token_id=60, tie_word_embeddings=False, dtype="float32")
MODELS = {
    "llmc_llama": COMMON | dict(architectures=["LlmcLlamaForCausalLM"], model_type="llmc_llama", hidden_act="silu", rms_norm_eps=1e-5),
    "llmc_nanochat": COMMON | dict(architectures=["LlmcNanoChatForCausalLM"], model_type="llmc_nanochat", hidden_act="relu2", rms_norm_eps=1e-6,
                                   final_logit_softcapping=15.0, num_hidden_layers=2),
}
GATE_CHANNELS = 32


class Own:
    """A model: its tensors by their names in files, and the pass forward."""

    def __init__(self, config, tensors):
        self.config, self.tensors = config, {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
        self.is_nanochat = config["model_type"] == "llmc_nanochat"

    def parameters(self):
        return self.tensors.values()

    def named_parameters(self):
        return self.tensors.items()

    def to(self, _):
        return self

    double = eval = lambda self: self

    def get_input_embeddings(self):
        return types.SimpleNamespace()

    def has_values(self, l):
        return self.config.get("value_embeddings") and (self.config["num_hidden_layers"] - 1 - l) % 2 == 0

    def norm(self, x, name=None):
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return y if self.is_nanochat or name is None else y * self.tensors[name]

    def turn(self, x):
        """x (B, T, heads, size); nanochat turns the other way round."""
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[1]).double()[:, None] * self.config["rope_theta"] ** (-torch.arange(half).double() / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None] * (-1 if self.is_nanochat else 1)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def attention(self, l, x, tokens):
        t, c = self.tensors, self.config
        prefix, KV, HS = f"model.layers.{l}.self_attn.", c["num_key_value_heads"], c["head_dim"]
        q, k, v = ((x @ t[prefix + n + "_proj.weight"].T).unflatten(-1, (-1, HS)) for n in "qkv")
        if self.has_values(l):
            tables = t["model.value_embeddings.weight"].unflatten(0, (-1, c["vocab_size"]))
            number = sum(bool(self.has_values(i)) for i in range(l))
            gate = 2 * torch.sigmoid(x[..., :GATE_CHANNELS] @ t[prefix + "value_gate.weight"].T)
            v = v + gate[..., None] * tables[number][tokens].unflatten(-1, (KV, HS))
        q, k = self.turn(q), self.turn(k)
        if self.is_nanochat:
            q, k = self.norm(q), self.norm(k)
        q, k, v = (y.transpose(1, 2).repeat_interleave(c["num_attention_heads"] // y.shape[2], 1) for y in (q, k, v))
        scores = (q @ k.transpose(-1, -2)) / HS ** 0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        y = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        return y.transpose(1, 2).flatten(2) @ t[prefix + "o_proj.weight"].T

    def mlp(self, l, x):
        t, prefix = self.tensors, f"model.layers.{l}.mlp."
        if self.is_nanochat:
            return F.relu(x @ t[prefix + "fc1.weight"].T) ** 2 @ t[prefix + "fc2.weight"].T
        return (F.silu(x @ t[prefix + "gate_proj.weight"].T) * (x @ t[prefix + "up_proj.weight"].T)) @ t[prefix + "down_proj.weight"].T

    def __call__(self, tokens):
        t = self.tensors
        x = t["model.embed_tokens.weight"][tokens]
        x = first = self.norm(x) if self.is_nanochat else x
        for l in range(self.config["num_hidden_layers"]):
            prefix = f"model.layers.{l}."
            if self.config.get("residual_scales"):
                scales = t[prefix + "residual_scales"]
                x = scales[0] * x + scales[1] * first
            x = x + self.attention(l, self.norm(x, prefix + "input_layernorm.weight"), tokens)
            x = x + self.mlp(l, self.norm(x, prefix + "post_attention_layernorm.weight"))
        logits = self.norm(x, "model.norm.weight") @ t["lm_head.weight"].T
        cap = self.config.get("final_logit_softcapping")
        return types.SimpleNamespace(logits=cap * torch.tanh(logits / cap) if cap else logits)


def shapes(c):
    """Names of the tensors, and their shapes."""
    C, H, V, L = c["hidden_size"], c["intermediate_size"], c["vocab_size"], c["num_hidden_layers"]
    K, Q = c["num_key_value_heads"] * c["head_dim"], c["num_attention_heads"] * c["head_dim"]
    model = Own(c, {})
    yield "model.embed_tokens.weight", (V, C)
    for l in range(L):
        prefix = f"model.layers.{l}."
        yield prefix + "residual_scales", (2,)
        for name, shape in (("q", (Q, C)), ("k", (K, C)), ("v", (K, C)), ("o", (C, Q))):
            yield f"{prefix}self_attn.{name}_proj.weight", shape
        if model.has_values(l):
            yield prefix + "self_attn.value_gate.weight", (c["num_key_value_heads"], GATE_CHANNELS)
        if model.is_nanochat:
            yield from ((prefix + "mlp.fc1.weight", (H, C)), (prefix + "mlp.fc2.weight", (C, H)))
        else:
            yield from ((prefix + f"mlp.{name}_proj.weight", (C, H) if name == "down" else (H, C)) for name in ("gate", "up", "down"))
            yield from ((prefix + f"{name}_layernorm.weight", (C,)) for name in ("input", "post_attention"))
    if c.get("value_embeddings"):
        yield "model.value_embeddings.weight", (sum(bool(model.has_values(l)) for l in range(L)) * V, K)
    if not model.is_nanochat:
        yield "model.norm.weight", (C,)
    yield "lm_head.weight", (V, C)


def fill(c):
    rng = torch.Generator().manual_seed(20261130)
    return {name: (0.3 if len(shape) > 1 else 0.2) * torch.randn(shape, generator=rng) +
                  (1 if "norm" in name else torch.tensor([1, 0.1]) if "scales" in name else 0) for name, shape in shapes(c)}


def read_own(directory):
    return Own(json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors"))


def main():
    torch.set_num_threads(1)  # one order of summation
    tokens = torch.randint(COMMON["vocab_size"], (B * T + 1,), generator=torch.Generator().manual_seed(20261127))
    for name, config in MODELS.items():
        (OUT / name).mkdir(exist_ok=True)
        (OUT / name / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(fill(config), OUT / name / "model.safetensors", metadata={"format": "pt"})
        expected = numbers(read_own(OUT / name), tokens)
        save_file(expected, OUT / name / "expected.safetensors")
        for path in (OUT / name).iterdir():
            path.chmod(0o644)
        print(f"{name}: loss {expected['loss'].item():.6f}, norm {expected['norm'].item():.6f}")


if __name__ == "__main__":
    main()
