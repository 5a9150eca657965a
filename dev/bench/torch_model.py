"""Models in PyTorch as their users have them: the peers of the benchmarks. GPT-2 as one would
write it to be fast; others by transformers."""

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


class Llama(nn.Module):
    """transformers' LlamaForCausalLM with the attention that PyTorch chooses; `config` holds the
    values of LlamaConfig."""

    def __init__(self, config):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="sdpa", use_cache=False))

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
