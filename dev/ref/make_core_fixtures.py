"""Writes dev/ref/fixtures/core: a small made-up bundle of CORE, and what it gives with the model of
make_task_fixtures.py in transformers.

    dev/ref/setup.sh && build/venv/bin/python dev/ref/make_core_fixtures.py

Written from the description of CORE (Li et al., "DataComp-LM", 2024): each prompt goes through the
model alone, in float64. Tokens are bytes, end-of-text is 256.
"""

import csv
import json
import math
import random
import shutil
from pathlib import Path

import torch
import transformers

import make_task_fixtures as tasks

OUT = Path(__file__).parent / "fixtures" / "core"
T, EXAMPLES = tasks.CONFIG.maxT, 24
WORDS = "cat dog sun sea ant tea red old up été no yes".split()

# label, file, kind, examples before a question, delimiter (None: not in the table), percent right
# by guessing
TASKS = [
    ("choices_zero", "a/choices.jsonl", "multiple_choice", 0, None, 25),
    ("choices_two", "a/choices.jsonl", "multiple_choice", 2, "\nA: ", 33.3),
    ("schema_zero", "b/schema.jsonl", "schema", 0, None, 50),
    ("schema_six", "b/schema.jsonl", "schema", 6, " ", 50),
    ("language_zero", "b/answered.jsonl", "language_modeling", 0, "\nA:", 0),
    ("language_three", "b/language.jsonl", "language_modeling", 3, None, 0),
]


def make_lines(rng, model):
    """The examples of each file."""
    text = lambda least, most: " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))
    files = {path: [] for _, path, *_ in TASKS}
    for i in range(EXAMPLES):
        choices = [text(1, 3) for _ in range(2 + i % 3)]
        if i == 5:
            choices = ["cat", "cat dog"]  # the first has nothing of its own
        if i == 6:
            choices = ["sun sea", "sun"]  # the second has nothing of its own
        files["a/choices.jsonl"].append(
            {"query": text(1, 4) + " " * (i % 2), "choices": choices, "gold": i % len(choices), "category": "x"})
        options = [text(1, 4) + ".", text(1, 4) + "?"]
        files["b/schema.jsonl"].append({"context_options": options, "continuation": text(1, 2), "gold": i % 2})
        context = text(1, 6)
        with torch.no_grad():
            ids = torch.tensor([[tasks.EOT, *f"{context}\nA:".encode()]])
            best = model(ids).logits[0, -1].argmax().item()
        answer = chr(best) if i % 3 and chr(best).isascii() and chr(best).isalnum() else text(1, 1)
        files["b/answered.jsonl"].append({"context": f"\u2003{context} \n" if i % 4 else context, "continuation": answer})
        files["b/language.jsonl"].append({"context": text(1, 3) + ("\u00a0" if i % 2 else ""), "continuation": text(1, 1)})
    return files


def fields_of(kind, example, k):
    """Context and ending k of an example."""
    if kind == "multiple_choice":
        return example["query"], example["choices"][k]
    if kind == "schema":
        return example["context_options"][k], example["continuation"]
    return example["context"].strip(), example["continuation"]


def prompts_of(kind, question, shots, delimiter):
    """The prompts of a question, and for each the first byte that is scored, counted with end-of-text."""
    before = ""
    for shot in shots:
        context, ending = fields_of(kind, shot, shot.get("gold", 0))
        before += context + delimiter + ending + "\n\n"
    count = len(question.get("choices", question.get("context_options", [0])))
    prompts = []
    for k in range(count):
        context, ending = fields_of(kind, question, k)
        prompts.append([tasks.EOT, *(before + context + delimiter + ending).encode()])
    if kind == "language_modeling":
        asked = (before + fields_of(kind, question, 0)[0] + delimiter).rstrip()
        return prompts, [1 + len(asked.encode())]
    shortest = min(len(prompt) for prompt in prompts)
    shared = 0
    if kind == "schema":
        while shared < shortest and len({prompt[-1 - shared] for prompt in prompts}) == 1:
            shared += 1
        return prompts, [len(prompt) - shared for prompt in prompts]
    while shared < shortest and len({prompt[shared] for prompt in prompts}) == 1:
        shared += 1
    return prompts, [shared] * count


def score(model, prompt, first):
    """Sum of the losses from token `first` on, their number, and how many are not the most likely."""
    scored, prompt = len(prompt) - first, prompt[-T:]
    with torch.no_grad():
        logits = model(torch.tensor(prompt)[None]).logits[0, :-1]
    y = torch.tensor(prompt[1:])
    losses = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    if scored == 0:
        return 0.0, 0, 0
    return losses[-scored:].sum().item(), scored, (logits.argmax(-1) != y)[-scored:].sum().item()


def write_bundle(files):
    shutil.rmtree(OUT, ignore_errors=True)
    for path, lines in files.items():
        (OUT / "eval_data" / path).parent.mkdir(parents=True, exist_ok=True)
        (OUT / "eval_data" / path).write_text("".join(json.dumps(line) + "\n" for line in lines))
    yaml = "icl_tasks:\n"
    for label, path, kind, shots, delimiter, _ in TASKS:
        yaml += f"-\n  label: {label}\n  dataset_uri: {path} # in eval_data\n  num_fewshot: [{shots}]\n  icl_task_type: {kind}\n"
        if delimiter is not None:
            yaml += f"  continuation_delimiter: {json.dumps(delimiter)} # separates questions from answers\n"
    (OUT / "core.yaml").write_text(yaml + "  has_categories: true\n")
    with open(OUT / "eval_meta_data.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["Eval Task", "Task Category", "Random baseline", "Description"])
        for label, _, kind, _, _, baseline in TASKS:
            table.writerow([label, "made up", baseline, f'{kind}, with "quotes", commas\nand lines'])


def main():
    torch.set_num_threads(1)
    model = tasks.make_model(tasks.CONFIG)
    files = make_lines(random.Random(5), model)
    write_bundle(files)
    losses = [f"# task example ending nats tokens missed: transformers {transformers.__version__}, float64"]
    predictions, centered = ["# task example prediction: of a continuation 1 if right, else 0"], []
    for label, path, kind, shots, delimiter, baseline in TASKS:
        data = list(files[path])
        random.Random(1337).shuffle(data)
        right = 0
        for i, question in enumerate(data):
            others = [k for k in range(len(data)) if k != i]
            chosen = [data[k] for k in random.Random(1234 + i).sample(others, shots)]
            prompts, firsts = prompts_of(kind, question, chosen, " " if delimiter is None else delimiter)
            scores = [score(model, *pair) for pair in zip(prompts, firsts, strict=True)]
            losses += [f"core/{label} {i} {k} {nats:.17g} {n} {missed}" for k, (nats, n, missed) in enumerate(scores)]
            means = [nats / n if n else math.nan for nats, n, _ in scores]
            prediction = int(scores[0][2] == 0) if kind == "language_modeling" else means.index(min(means))
            right += prediction == question.get("gold", 1)
            predictions.append(f"core/{label} {i} {prediction}")
        accuracy = right / len(data)
        centered.append((accuracy - baseline / 100) / (1 - baseline / 100))
        predictions.append(f"# core/{label} acc {accuracy:.6f} centered {centered[-1]:.6f}")
    predictions.append(f"# CORE {sum(centered) / len(centered):.6f}")
    (OUT / "losses.txt").write_text("\n".join(losses) + "\n")
    (OUT / "predictions.txt").write_text("\n".join(predictions) + "\n")
    total = sum(path.stat().st_size for path in OUT.rglob("*") if path.is_file())
    print(f"{OUT}: {total / 1024:.0f} KiB; {predictions[-1]}")


if __name__ == "__main__":
    main()
