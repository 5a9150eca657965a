"""Writes dev/ref/fixtures: a tiny GPT-2 and the true numbers of one pass and of ten AdamW steps.

    dev/ref/setup.sh && build/venv/bin/python dev/ref/make_fixtures.py

Everything is computed in float64 from float32 parameters and rounded to float32 once, at the end.
"""

import platform
from pathlib import Path

import torch

import gpt2_reference as ref

OUT = Path(__file__).parent / "fixtures"
CONFIG = ref.Config(maxT=40, V=157, L=2, NH=3, C=36)
B, T = 3, 31
ADAMW = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
CLIP, STEPS = 1.0, 10
STATE_MAGIC, STATE_VERSION = 20240327, 2

README = """\
# Fixtures: a tiny GPT-2 and its true numbers

Made by `dev/ref/setup.sh && build/venv/bin/python dev/ref/make_fixtures.py` with {versions}; {agrees}

Little endian, llm.c's layouts: 256 int32 of header, then the body. Rows V.. of wte and its gradient are zero.
maxT={cfg.maxT} V={cfg.V} Vp={cfg.Vp} L={cfg.L} NH={cfg.NH} C={cfg.C}.

| file | content |
|---|---|
| gpt2_tiny.bin | the parameters, fp32 (model version 3) |
| gpt2_tiny_bf16.bin | the same rounded to nearest even, bf16 (model version 5) |
| gpt2_tiny_state.bin | debug state, B={B} T={T}: x, y, logits (B,T,V), loss, gradient of every parameter |
| gpt2_tiny_adamw.bin | the parameters after {STEPS} AdamW steps on that same batch |
| gpt2_tiny_adamw.txt | step, loss and gradient norm (before clipping and before the update) of these steps |
| bpe_cases.bin | texts that are hard to tokenize, and tiktoken's ids of them (dev/ref/make_bpe_fixtures.py) |
| parquet/*.parquet | one table as several programs write it; bad_*: what must be refused (dev/ref/make_parquet_fixtures.py) |
| parquet/texts.bin | the texts of that table |
| optimizers/updates.bin | twenty updates by the optimizers of torch, transformers and bitsandbytes (dev/ref/make_optimizer_fixtures.py) |
| fp8/ | E4M3, rows of it with scales, and the tiny model with matmuls in fp8 (dev/ref/make_fp8_fixtures.py) |
| models/ | a tiny model of each family but GPT-2, as transformers saves it, its logits, loss and gradient norm (dev/ref/make_model_fixtures.py), and those of twelve updates (dev/ref/make_update_fixtures.py) |
| tasks/ | tasks in every form, a tiny model for them, and the loss of each ending (dev/ref/make_task_fixtures.py) |

The numbers were computed in float64 and rounded once to float32: the truth that fp32 code comes close to.
AdamW: {adamw}; weight decay only on {decayed};
gradients scaled by min(1, {CLIP}/norm).

A key's bias shifts all scores of a query alike, so the true gradient of qkvb[C:2C] is zero. In fp32 it is
noise, which AdamW turns into steps of up to lr: compare gpt2_tiny_adamw.bin without these {C} per layer. The
others come within {fp32:.0e} in fp32 PyTorch, after moving by up to {moved:.0e}.
"""


def make_parameters(cfg):
    """Larger than a real start, with biases and norms that are not trivial, so that every gradient
    counts; wte such that the norm of the gradient starts above CLIP and falls below it."""
    rng = torch.Generator().manual_seed(20240326)
    p = {}
    for name, shape in cfg.shapes().items():
        noise = torch.randn(shape, generator=rng).double()
        is_norm_weight = name in ("ln1w", "ln2w", "lnfw")
        p[name] = 1 + 0.1 * noise if is_norm_weight else (0.08 if name == "wte" else 0.15) * noise
        p[name] = p[name].float().double()
    p["wte"][cfg.V :] = 0
    return p


def make_batch(cfg):
    rng = torch.Generator().manual_seed(20240327)
    stream = torch.randint(cfg.V, (B, T + 1), generator=rng)
    return stream[:, :-1], stream[:, 1:]


def train(cfg, p, x, y):
    """The parameters after STEPS steps, and (loss, norm) of each."""
    p = dict(p)
    m, v = ({name: torch.zeros_like(t) for name, t in p.items()} for _ in range(2))
    history = []
    for step in range(1, STEPS + 1):
        _, loss, grads = ref.gradients(p, cfg, x, y)
        norm = ref.global_norm(grads)
        grads = {name: g * min(1.0, CLIP / norm) for name, g in grads.items()}
        ref.adamw(p, grads, m, v, step, **ADAMW)
        history.append((loss, norm))
    return p, history


def check_adamw(cfg, p, x, y, want, history):
    """The same steps by torch.optim.AdamW must end at the same parameters."""
    p = {name: t.clone().requires_grad_() for name, t in p.items()}
    groups = [
        {"params": [p[name] for name in p if name in ref.DECAYED], "weight_decay": ADAMW["weight_decay"]},
        {"params": [p[name] for name in p if name not in ref.DECAYED], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, ADAMW["lr"], (ADAMW["beta1"], ADAMW["beta2"]), ADAMW["eps"])
    for _, norm in history:
        optimizer.zero_grad()
        ref.forward(p, cfg, x, y)[1].backward()
        for t in p.values():
            t.grad *= min(1.0, CLIP / norm)
        optimizer.step()
    for name in p:
        torch.testing.assert_close(p[name].detach(), want[name], rtol=0, atol=1e-9, msg=f"AdamW: {name}")


HF_NAMES = {
    "wte": "wte.weight", "wpe": "wpe.weight",
    "ln1w": "h.{}.ln_1.weight", "ln1b": "h.{}.ln_1.bias",
    "qkvw": "h.{}.attn.c_attn.weight", "qkvb": "h.{}.attn.c_attn.bias",
    "attprojw": "h.{}.attn.c_proj.weight", "attprojb": "h.{}.attn.c_proj.bias",
    "ln2w": "h.{}.ln_2.weight", "ln2b": "h.{}.ln_2.bias",
    "fcw": "h.{}.mlp.c_fc.weight", "fcb": "h.{}.mlp.c_fc.bias",
    "fcprojw": "h.{}.mlp.c_proj.weight", "fcprojb": "h.{}.mlp.c_proj.bias",
    "lnfw": "ln_f.weight", "lnfb": "ln_f.bias",
}


def hf_views(cfg, tensors, name):
    """Parameter `name` among Hugging Face's tensors: one per layer, in our orientation."""
    layers = [tensors["transformer." + HF_NAMES[name].format(layer)] for layer in range(cfg.L)]
    layers = layers if "{}" in HF_NAMES[name] else layers[:1]
    is_matrix = layers[0].dim() == 2 and name not in ("wte", "wpe")
    return [t.T if is_matrix else t for t in layers]  # Conv1D weights are (in, out)


def fp32_distance(cfg, p, x, y, trained):
    """How far the same steps in fp32 end from the truth, the biases of the keys left out."""
    fp32, _ = train(cfg, {name: t.float() for name, t in p.items()}, x, y)
    distance = {name: (fp32[name] - trained[name]).abs() for name in p}
    distance["qkvb"][:, cfg.C : 2 * cfg.C] = 0
    return max(t.max().item() for t in distance.values())


def check_transformers(cfg, p, x, y, logits, loss, grads):
    """Compares with GPT2LMHeadModel in float64; returns what can be said of it."""
    try:
        import transformers
    except ImportError:
        return "transformers is not installed: not compared with its GPT2LMHeadModel."
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=cfg.V, n_positions=cfg.maxT, n_embd=cfg.C, n_layer=cfg.L, n_head=cfg.NH,
            activation_function="gelu_new", layer_norm_epsilon=1e-5, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        )
    ).double()
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        for name in cfg.shapes():
            views = hf_views(cfg, tensors, name)
            for view, values in zip(views, p[name] if len(views) > 1 else [p[name]], strict=True):
                view.copy_(values[: cfg.V] if name == "wte" else values)
    hf_logits = model(x).logits
    hf_loss = torch.nn.functional.cross_entropy(hf_logits.flatten(0, 1), y.flatten())
    hf_loss.backward()
    hf_grads = {name: t.grad for name, t in tensors.items()}

    worst = max((hf_logits - logits).abs().max().item(), abs(hf_loss.item() - loss))
    for name in cfg.shapes():
        views = hf_views(cfg, hf_grads, name)
        for view, values in zip(views, grads[name] if len(views) > 1 else [grads[name]], strict=True):
            worst = max(worst, (view - (values[: cfg.V] if name == "wte" else values)).abs().max().item())
    assert worst < 1e-10, f"transformers differs by {worst:.1e}"
    return f"agrees with GPT2LMHeadModel of transformers {transformers.__version__} to {worst:.0e}."


def main():
    torch.set_num_threads(1)  # one order of summation
    cfg = CONFIG
    p = make_parameters(cfg)
    x, y = make_batch(cfg)
    logits, loss, grads = ref.gradients(p, cfg, x, y)
    agrees = check_transformers(cfg, p, x, y, logits, loss, grads)
    trained, history = train(cfg, p, x, y)
    check_adamw(cfg, p, x, y, trained, history)
    assert any(norm > CLIP for _, norm in history) and any(norm < CLIP for _, norm in history), history

    OUT.mkdir(exist_ok=True)
    ref.save_model(OUT / "gpt2_tiny.bin", cfg, p)
    ref.save_model(OUT / "gpt2_tiny_bf16.bin", cfg, p, torch.bfloat16)
    ref.save_model(OUT / "gpt2_tiny_adamw.bin", cfg, trained)
    with open(OUT / "gpt2_tiny_state.bin", "wb") as file:
        file.write(ref.header(STATE_MAGIC, STATE_VERSION, B, T))
        for tokens in (x, y):
            file.write(ref.to_bytes(tokens.int()))
        for values in (logits, torch.tensor(loss, dtype=torch.float64), *grads.values()):
            file.write(ref.to_bytes(values.float()))
    with open(OUT / "gpt2_tiny_adamw.txt", "w") as file:
        file.write("# step loss norm: before the update of that step, the norm before clipping\n")
        for step, (step_loss, norm) in enumerate(history, 1):
            file.write(f"{step} {step_loss:.17g} {norm:.17g}\n")

    versions = f"Python {platform.python_version()} and PyTorch {torch.__version__}"
    adamw = ", ".join(f"{name} {value}" for name, value in ADAMW.items())
    moved = max((trained[name] - p[name]).abs().max().item() for name in p)
    text = README.format(versions=versions, agrees=agrees, cfg=cfg, B=B, T=T, STEPS=STEPS, CLIP=CLIP, C=cfg.C,
                         adamw=adamw, decayed=" ".join(ref.DECAYED), moved=moved,
                         fp32=fp32_distance(cfg, p, x, y, trained))
    (OUT / "README.md").write_text(text)
    total = sum(path.stat().st_size for path in OUT.iterdir())
    print(f"{OUT}: {total / 1024:.0f} KiB; {agrees}")


if __name__ == "__main__":
    main()
