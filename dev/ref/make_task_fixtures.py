"""Writes dev/ref/fixtures/tasks: a tiny random GPT-2, tasks in every form, and transformers' losses
of every ending.

    dev/ref/setup.sh && build/venv/bin/python dev/ref/make_task_fixtures.py

Tokens are bytes, end-of-text is 256; tokenizer.json is what a run with plain bytes saves. Each
document goes through the model alone, in float64, without padding.
"""

import json
import random
from pathlib import Path

import torch
import transformers

import gpt2_reference as ref
from make_fixtures import hf_views

OUT = Path(__file__).parent / "fixtures" / "tasks"
CONFIG = ref.Config(maxT=64, V=257, L=2, NH=2, C=16)
EOT, EXAMPLES, STRIDE = 256, 20, 24
WORDS = "the cat sat on a mat and dogs ran over two hills while é birds sang ok".split()


def make_model(cfg):
    """Writes random weights, large enough that predictions differ, for llm.c and transformers."""
    rng = torch.Generator().manual_seed(7)
    p = {}
    for name, shape in cfg.shapes().items():
        noise = torch.randn(shape, generator=rng).double()
        is_norm_weight = name in ("ln1w", "ln2w", "lnfw")
        p[name] = (1 + 0.1 * noise if is_norm_weight else 0.4 * noise).float().double()
    p["wte"][cfg.V :] = 0
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=cfg.V, n_positions=cfg.maxT, n_embd=cfg.C, n_layer=cfg.L, n_head=cfg.NH,
            activation_function="gelu_new", layer_norm_epsilon=1e-5, bos_token_id=EOT, eos_token_id=EOT,
        )
    ).double().eval()
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        for name in cfg.shapes():
            views = hf_views(cfg, tensors, name)
            for view, values in zip(views, p[name] if len(views) > 1 else [p[name]], strict=True):
                view.copy_(values[: cfg.V] if name == "wte" else values)
    ref.save_model(OUT / "model.bin", cfg, p)
    return model


def score(model, tokens, scored):
    """Returns the loss of the last `scored` tokens, and how many were not the most likely."""
    tokens = tokens[-(CONFIG.maxT + 1) :]
    x, y = torch.tensor(tokens[:-1])[None], torch.tensor(tokens[1:])
    with torch.no_grad():
        logits = model(x).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    missed = (logits.argmax(-1) != y)[-scored:].sum().item()
    return losses[-scored:].sum().item(), missed


def pair(context, ending, as_it_is=False):
    """The tokens of a context, and of an ending behind it."""
    if as_it_is:
        ending = " " + ending
    else:
        context, ending = context.rstrip(" "), ending.lstrip(" ")
        if context and not context.endswith("\n"):
            ending = " " + ending
    return list(context.encode()) or [EOT], list(ending.encode())


def answered(model, make_context):
    """A context that the model continues with a letter, and that letter."""
    while True:
        context = make_context()
        with torch.no_grad():
            best = model(torch.tensor(list(context.encode()))[None]).logits[0, -1].argmax().item()
        if chr(best).isascii() and chr(best).isalnum():
            return context, chr(best)


def make_examples(rng, model):
    """For each file: its lines, and for each example its documents (context, ending)."""
    text = lambda least, most: " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))
    files = {name: ([], []) for name in ("hellaswag", "choices", "schema", "continuations")}

    def add(name, line, documents):
        files[name][0].append(line)
        files[name][1].append(documents)

    for i in range(EXAMPLES):
        context = text(2, 25)  # some are longer than the model's context
        endings = [text(1, 6) for _ in range(4)]
        label = i % 4
        add("hellaswag", {"ind": i, "ctx_a": "x", "ctx": context, "endings": endings,
                          "label": str(label) if i % 2 else label},
            [pair(context, ending, as_it_is=True) for ending in endings])
        query = ["", context + " ", context + ":\n", context][i % 4]
        choices = [("" if k % 2 else " ") + text(1, 4) for k in range(2 + i % 4)]
        add("choices", {"query": query, "choices": choices, "gold": i % len(choices)},
            [pair(query, choice) for choice in choices])
        options = [text(3, 9) for _ in range(2)]
        continuation = text(2, 8)
        add("schema", {"context_options": options, "continuation": continuation, "gold": i % 2},
            [pair(option, continuation) for option in options])
        context, continuation = (text(3, 9), text(1, 3)) if i % 2 else answered(model, lambda: text(3, 9) + "\n")
        add("continuations", {"context": context, "continuation": continuation}, [pair(context, continuation)])
    return files


def main():
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    model = make_model(CONFIG)
    rng = random.Random(3)
    results = ["# file example ending nats tokens missed: transformers %s, float64" % transformers.__version__]
    files = make_examples(rng, model)
    for name, (lines, examples) in files.items():
        with open(OUT / f"{name}.jsonl", "w") as file:
            file.writelines(json.dumps(line, ensure_ascii=len(name) % 2 == 0) + "\n" for line in lines)
        for i, documents in enumerate(examples):
            for k, (context, ending) in enumerate(documents):
                nats, missed = score(model, context + ending, len(ending))
                results.append(f"{name}.jsonl {i} {k} {nats:.17g} {len(ending)} {missed}")

    text = " ".join(rng.choice(WORDS) for _ in range(90)) + "\n"
    (OUT / "text.txt").write_text(text)
    stream, done, window = [EOT, *text.encode()], 0, 0
    while done + 1 < len(stream):
        last = min(done + (STRIDE if done else CONFIG.maxT), len(stream) - 1)
        nats, missed = score(model, stream[max(0, last - CONFIG.maxT) : last + 1], last - done)
        results.append(f"text.txt {window} 0 {nats:.17g} {last - done} {missed}")
        done, window = last, window + 1
    (OUT / "losses.txt").write_text("\n".join(results) + "\n")
    total = sum(path.stat().st_size for path in OUT.iterdir())
    print(f"{OUT}: {total / 1024:.0f} KiB; transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
