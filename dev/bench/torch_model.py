"""Models in PyTorch as their users have them: the peers of the benchmarks. GPT-2 as one would
write it to be fast; others by transformers."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, C, NH):
        super().__init__()
        self.NH = NH
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.attproj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, h):
        B, T, C = h.shape
        q, k, v = self.qkv(self.ln1(h)).view(B, T, 3, self.NH, C // self.NH).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.attproj(a.transpose(1, 2).reshape(B, T, C))
        return h + self.fcproj(F.gelu(self.fc(self.ln2(h)), approximate="tanh"))


class GPT2(nn.Module):
    """Vp is the vocabulary with its padding; the classifier's weights are the token embedding's."""

    def __init__(self, L, NH, C, maxT, Vp):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(Vp, C), nn.Embedding(maxT, C)
        self.blocks = nn.ModuleList(Block(C, NH) for _ in range(L))
        self.lnf = nn.LayerNorm(C)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (2 * L) ** 0.5 if "proj" in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x, y):
        """Returns the mean loss of the tokens x (B, T) against their successors y (B, T)."""
        h = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = F.linear(self.lnf(h), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))

    def load(self, path):
        """Loads the weights of a model file (.bin, fp32)."""
        with open(path, "rb") as file:
            header = torch.frombuffer(bytearray(file.read(1024)), dtype=torch.int32).tolist()
            magic, version, maxT, _, L, NH, C, Vp = header[:8]
            if (magic, version) != (20240326, 3):
                raise SystemExit(f"error: {path}: magic {magic}, version {version}, wanted 20240326 and 3 (fp32)")
            if (L, C, Vp) != (len(self.blocks), self.wte.weight.shape[1], self.wte.weight.shape[0]):
                raise SystemExit(f"error: {path}: {L} layers of {C} channels, vocabulary {Vp}: another model")

            def read(*shape):
                count = torch.Size(shape).numel()
                return torch.frombuffer(bytearray(file.read(4 * count)), dtype=torch.float32).view(shape)

            shapes = {"ln1.weight": (C,), "ln1.bias": (C,), "qkv.weight": (3 * C, C), "qkv.bias": (3 * C,),
                      "attproj.weight": (C, C), "attproj.bias": (C,), "ln2.weight": (C,), "ln2.bias": (C,),
                      "fc.weight": (4 * C, C), "fc.bias": (4 * C,), "fcproj.weight": (C, 4 * C),
                      "fcproj.bias": (C,)}
            state = {"wte.weight": read(Vp, C), "wpe.weight": read(maxT, C)}
            for name, shape in shapes.items():
                for layer, tensor in enumerate(read(L, *shape)):
                    state[f"blocks.{layer}.{name}"] = tensor
            state |= {"lnf.weight": read(C), "lnf.bias": read(C)}
        self.load_state_dict(state)


# Sizes as in llmc/model/presets.h. What speed does not depend on, such as the base of rotary
# positions, is left out.
PUBLISHED = {
    "llama:1b": dict(family="Llama", num_hidden_layers=16, hidden_size=2048, num_attention_heads=32,
                     num_key_value_heads=8, intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True),
    "qwen3:0.6b": dict(family="Qwen3", num_hidden_layers=28, hidden_size=1024, num_attention_heads=16,
                       num_key_value_heads=8, head_dim=128, intermediate_size=3072, vocab_size=151936,
                       tie_word_embeddings=True),
    "toy-llama": dict(family="Llama", num_hidden_layers=1, hidden_size=32, num_attention_heads=2,
                      intermediate_size=64, vocab_size=50257, tie_word_embeddings=True),
}


class Published(nn.Module):
    """A model of transformers with the attention that PyTorch chooses; `config` holds the values of
    its configuration, and the family as the name of its class has it."""

    def __init__(self, config):
        super().__init__()
        # This directory has a tokenizers.py, which is not the library that transformers imports.
        sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
        import transformers

        values = {name: value for name, value in config.items() if name != "family"}
        model_class = getattr(transformers, config["family"] + "ForCausalLM")
        self.model = model_class(model_class.config_class(**values, attn_implementation="sdpa", use_cache=False))

    def forward(self, x, y):
        """Returns the mean loss of the tokens x (B, T) against their successors y (B, T)."""
        logits = self.model(input_ids=x).logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))


def adamw(model, lr, betas, eps, weight_decay):
    """Returns AdamW with decay on matrices and embeddings only; one fused kernel for all
    tensors."""
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() == 2], "weight_decay": weight_decay},
              {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
