"""Writes dev/ref/fixtures/dropout: a tiny GPT-2, and updates with dropout of it and of models of
make_model_fixtures.py.

    dev/ref/setup.sh && build/venv/bin/python dev/ref/make_dropout_fixtures.py

losses.txt is like that of make_update_fixtures.py, with the probability of --attention-dropout in each line. The masks are those of llmc/ops/dropout.h, from a
Philox of its own: they are hung into the models of transformers, which compute in float64.
"""

import itertools

import numpy as np
import torch
import transformers

from make_model_fixtures import B, T, read_back
from make_model_fixtures import OUT as MODELS
from make_update_fixtures import BETAS, CLIP, DECAY, EPS, LR, text

OUT = MODELS.parent / "dropout"
UPDATES, SEED, P, ATTENTION = 3, 42, 0.2, (0.3, 0.0)
OPTIONS = (f"--steps {UPDATES} --lr {LR} --schedule constant --warmup 0 --beta1 {BETAS[0]} --beta2 {BETAS[1]} --eps {EPS} "
           f"--weight-decay {DECAY} --grad-clip {CLIP} --shuffle off --seed {SEED} --dropout {P}")
# Both norms, biases; norms after branches, of two kinds; a factor; the norm of the embeddings;
# experts; latents; sinks; layers without attention.
NAMES = ["gpt2", "llama", "qwen3", "gemma2", "olmo2", "glm4", "granite", "nanochat", "mixtral", "deepseek3", "gptoss", "qwen35"]
# modules of a block whose outputs are added to the stream: for attention and for the MLP, the
# first one that a block has
ADDED = [["post_self_attn_layernorm", "post_attention_layernorm", "self_attn", "linear_attn", "attn"],
         ["post_mlp_layernorm", "post_feedforward_layernorm", "mlp", "block_sparse_moe"]]


def philox(key, counter):
    """Philox4x32-10 of 64-bit keys and 128-bit counters (..., 4): the words (..., 4)."""
    x = [np.asarray(counter[..., i], np.uint64) for i in range(4)]
    low, k0, k1 = np.uint64(0xFFFFFFFF), key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        a, b = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [(b >> np.uint64(32)) ^ x[1] ^ np.uint64(k0), b & low, (a >> np.uint64(32)) ^ x[3] ^ np.uint64(k1), a & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(x, -1)


def update_key(update):
    stream = 14695981039346656037
    for byte in b"dropout":
        stream = (stream ^ byte) * 1099511628211 % 2**64
    words = philox(SEED, np.array([update, 0, stream % 2**32, stream >> 32]))
    return int(words[0]) | int(words[1]) << 32


def mask(key, place, columns, p):
    """(B, T, columns): 0, or 1 / (1 - p)."""
    count = -(-columns // 4)
    counter = np.zeros((B, T, count, 4), np.uint64)
    counter[..., 0] = np.arange(count)
    counter[..., 1] = np.arange(T)[:, None]
    counter[..., 2] = np.arange(B)[:, None, None]
    counter[..., 3] = place
    words = philox(key, counter).reshape(B, T, -1)[..., :columns]
    return torch.tensor((words >= np.uint64(int(np.float32(p) * 2.0**32))) / (1 - np.float64(np.float32(p))))


class Masks:
    """Masks of a model's tensors, of the update `key`."""

    def __init__(self, model, is_gpt2, attention):
        self.attention = attention
        self.key = self.layer = 0
        layers = model.transformer.h if is_gpt2 else model.model.layers
        layers[0].register_forward_pre_hook(self.enter, with_kwargs=True)
        for l, layer in enumerate(layers):
            layer.register_forward_pre_hook(self.layer_setter(l))
            for branch, names in enumerate(ADDED):
                # a norm after a branch: in other models a norm of that name is before the MLP
                has_after = hasattr(layer, "post_feedforward_layernorm") or hasattr(layer, "post_mlp_layernorm")
                names = [x for x in names if hasattr(layer, x) and (has_after or "norm" not in x)]
                getattr(layer, names[0]).register_forward_hook(self.adder(1 + 2 * l + branch))

    def masked(self, x, place):
        return (x.view(B, T, -1) * mask(self.key, place, x.shape[-1], P)).view(x.shape)

    def enter(self, module, args, kwargs):
        return (self.masked(args[0], 0), *args[1:]), kwargs

    def layer_setter(self, l):
        def set_layer(module, args):
            self.layer = l
        return set_layer

    def adder(self, place):
        def add(module, args, output):
            return (self.masked(output[0], place), *output[1:]) if isinstance(output, tuple) else self.masked(output, place)
        return add

    def weights(self, x, p=0, training=True, inplace=False):
        """Stands in for torch.nn.functional.dropout: of the weights of attention (B, NH, T, T)."""
        if x.dim() != 4 or x.shape[-1] != T or x.shape[-2] != T:
            return x
        heads = [mask(self.key, (self.layer + 1) << 16 | h, T, self.attention) for h in range(x.shape[1])]
        return x * torch.stack(heads, 1)


def updates(name, attention, tokens):
    """The loss and the norm of each."""
    path = (OUT if name == "gpt2" else MODELS) / name
    model = read_back(path).to(torch.float64).eval()
    model.set_attn_implementation("eager")
    model.get_input_embeddings().padding_idx = None
    masks = Masks(model, name == "gpt2", attention)
    torch.nn.functional.dropout = masks.weights
    decays = {x: y.dim() > 1 and not x.endswith(("bias", "conv1d.weight")) for x, y in model.named_parameters()}
    weights = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([dict(params=[weights[x] for x in weights if decays[x]], weight_decay=DECAY),
                                   dict(params=[weights[x] for x in weights if not decays[x]], weight_decay=0.0)],
                                  lr=LR, betas=BETAS, eps=EPS)
    for update in range(UPDATES):
        masks.key = update_key(update)
        optimizer.zero_grad()
        logits = model(tokens[:-1].view(B, T), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), CLIP)
        optimizer.step()
        yield loss.item(), norm.item()


def make_gpt2():
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=61, n_embd=24, n_layer=2, n_head=4, n_positions=32, bos_token_id=60, eos_token_id=60)
    model = transformers.GPT2LMHeadModel(config)
    for x in model.parameters():
        torch.nn.init.normal_(x, 1.0 if x.dim() == 1 and x.mean() == 1 else 0.0, 0.1)
    model.save_pretrained(OUT / "gpt2")


def main():
    torch.set_num_threads(1)  # one order of summation
    # the first known answers of Salmon et al.
    assert [hex(x) for x in philox(0, np.zeros(4, np.uint64))] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    make_gpt2()
    tokens, lines = text(), [f"# {OPTIONS}", "# model attention-dropout update loss norm"]
    for name, p in itertools.product(NAMES, ATTENTION):
        lines += [f"{name} {p:g} {i} {loss:.9f} {norm:.9f}" for i, (loss, norm) in enumerate(updates(name, p, tokens), 1)]
    (OUT / "losses.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
