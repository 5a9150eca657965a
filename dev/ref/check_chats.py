#!/usr/bin/env python3
"""check_chats.py -- what a run teaches is what transformers asks: for each format of --chat, a tiny model learns chats;
their tokens and learned tokens in OUT/tokens are those that apply_chat_template makes of the saved model's template, and
the end of an answer is in all its files.

    build/venv/bin/python dev/ref/check_chats.py ./train_gpt2

Chats whose contents have marks are left out: transformers reads them as marks, this program as text.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import transformers

FIXTURES = Path(__file__).parent / "fixtures" / "chat_formats"
FORMATS = ["chatml", "llama2", "llama3", "mistral3", "mistral3-tekken", "mistral7", "mistral7-tekken", "gemma", "phi3", "phi4",
           "zephyr", "granite", "deepseek"]


def plain_chats(names):
    lines = (FIXTURES / "chats.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    return [chat for chat in chats if not any(name in m["content"] for m in chat for name in names)]


def learned(path, count):
    """A bit of the mask says that the next token is no target."""
    bits = np.unpackbits(np.frombuffer(path.read_bytes()[32:], np.uint8), bitorder="little")[:count]
    return [False, *(bits[:-1] == 0)]


def check(trainer, word, work):
    out = work / word
    tokenizer = work / "tok"
    names = [t["content"] for t in json.loads((tokenizer / "tokenizer.json").read_text())["added_tokens"]]
    chats = plain_chats(names)
    data = work / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    subprocess.run([trainer, "--arch", "llama", "--layers", "1", "--channels", "32", "--heads", "2", "--tokenizer", tokenizer, "--train-data", data,
                    "--val-data", data, "--chat", word, "--seq-len", "512", "--context", "512", "--pack", "pad", "--batch", "2", "--steps", "1", "--eval-every", "0",
                    "--samples", "0", "--out", out], check=True, stdout=subprocess.DEVNULL)
    saved = out / "step_00000001"
    fast = transformers.AutoTokenizer.from_pretrained(saved)
    start = json.loads((saved / "config.json").read_text())["bos_token_id"]
    ids, marks = [], []
    for chat in chats:
        got = fast.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        skipped = int(got["input_ids"][0] == start)
        if skipped == 0 and word != "llama2":
            return f"the template does not start with the start token: {chat}"
        ids += [start, *got["input_ids"][skipped:]]
        marks += [0, *got["assistant_masks"][skipped:]]
    shard = next((out / "tokens").glob("*.bin"))
    found = np.frombuffer(shard.read_bytes()[1024:], np.uint16).tolist()
    if found != ids:
        return f"{len(found)} ids, wanted {len(ids)}; the first other one is number {next((i for i, (a, b) in enumerate(zip(found, ids)) if a != b), -1)}"
    targets = learned(Path(f"{shard}.mask"), len(ids))
    if any(bool(a) != bool(b) for a, b in zip(targets, marks)):
        return f"another mask: {sum(targets)} learned tokens, wanted {sum(marks)}"
    ends = {json.dumps(json.loads((saved / name).read_text())["eos_token_id"]) for name in ["config.json", "generation_config.json"]}
    last = [i for i, mark in zip(ids, marks) if mark][-1]
    if len(ends) != 1 or last not in np.atleast_1d(json.loads(ends.pop())) or fast.eos_token_id != last:
        return f"{fast.convert_ids_to_tokens(last)} ends answers, but is not an end everywhere"
    return ""


def main():
    trainer, failed = Path(sys.argv[1]).resolve(), 0
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / "tok").mkdir()
        (work / "tok" / "tokenizer.json").write_bytes((FIXTURES / "qwen2.json").read_bytes())
        for word in FORMATS:
            problem = check(trainer, word, work)
            print(f"{word}: {problem or 'ok'}")
            failed += problem != ""
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
