#!/usr/bin/env python3
"""check_sentence.py -- tokenizers of SentencePiece's kind beside sentencepiece and tokenizers: all of
Unicode, a megabyte of noise, runs of blanks, a corpus, and special tokens as text.

    dev/ref/setup.sh && build/venv/bin/pip install sentencepiece protobuf
    make -s build/plain/test_tokenizer build/plain/bench_tokenizer
    TINY_TEXT=tinyshakespeare.txt build/venv/bin/python dev/ref/check_sentence.py [--speed]

The tokenizers are the fixtures and larger ones, trained here, with 32,000 tokens. --speed compares
the speed of these instead: one core, the corpus 20 times, in turns. BUILD names another directory
than build/plain.
"""

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import make_sentence_fixtures as fixtures  # noqa: E402

BUILD = os.environ.get("BUILD", "build/plain")
failures = checks = 0


def run(*arguments, text):
    done = subprocess.run([f"{BUILD}/test_tokenizer", *map(str, arguments)], input=text, capture_output=True)
    if done.returncode:
        sys.exit(done.stderr.decode())
    return done.stdout


def check(path, encode, decode, unknown, text, what):
    global failures, checks
    ours = [int(id) for id in run("--bpe_ids", path, text=text.encode()).split()]
    theirs = encode(text)
    checks += 1
    if ours != theirs:
        failures += 1
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        print(f"FAILED: {path.name}, {what}: token {at} is {ours[at:at + 6]}, wanted {theirs[at:at + 6]} of {len(theirs)}", flush=True)
    elif unknown not in ours:
        if run("--decode", path, text=" ".join(map(str, ours)).encode()).decode() != decode(theirs):
            failures += 1
            print(f"FAILED: {path.name}, {what}: decoded", flush=True)


def noise(rng, bytes_wanted, kinds):
    out = bytearray()
    while len(out) < bytes_wanted:
        out += rng.choice(kinds)(rng).encode(errors="ignore")
    return out[:bytes_wanted].decode(errors="ignore")


def texts():
    """Yields a name and a text."""
    rng = random.Random(1)
    unicode = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for i in range(0, len(unicode), 65536):
        yield f"characters from {i:x}", "".join(unicode[i : i + 65536])
        yield f"characters from {i:x} with blanks", " ".join(unicode[i : i + 65536])
    anything = [lambda r: chr(r.randrange(0x80)), lambda r: chr(r.randrange(0x800)), lambda r: chr(r.randrange(0xD800)),
                lambda r: chr(r.randrange(0xE000, 0x110000))]
    yield "noise", noise(rng, 1000000, anything)
    yield "noise of ASCII", noise(rng, 1000000, anything[:1])
    yield "noise of bytes", rng.randbytes(400000).decode(errors="replace")
    yield "letters without blanks", noise(rng, 1000000, [lambda r: r.choice("etaoinshrdlu")])
    yield "blanks", noise(rng, 300000, [lambda r: " " * r.randrange(1, 60), lambda r: r.choice("ab.\n\t" + fixtures.BLANK)])
    yield "only blanks", " " * 100000
    corpus = fixtures.corpus()
    yield "corpus", corpus
    yield "corpus without blanks", corpus.replace(" ", "")[:1000000]
    names = ["a<s>", "=</s>", "a<unk>", "=<pad>", "a<bos>", "=<0x0A>", "<|mark|>", "<tag>", "[INST]", " hello", "\n", "the king"]
    yield "special tokens", noise(rng, 100000, [lambda r: r.choice(names)])


def large():
    """Returns models and files of 32,000 tokens."""
    size = 32000
    llama = fixtures.trained(size)
    user = [fixtures.BLANK * n for n in range(2, 16)] + ["\n" * n for n in range(1, 6)] + ["<table>"]
    gemma = fixtures.trained(size, add_dummy_prefix=False, user_defined_symbols=user, pad_id=0, eos_id=1, bos_id=2, unk_id=3,
                             pad_piece="<pad>", bos_piece="<bos>", eos_piece="<eos>")
    files = {"large_llama2": fixtures.converted(llama, fixtures.PREPEND),
             "large_mistral": fixtures.converted(llama, None, fixtures.metaspace("first", False)),
             "large_gemma": fixtures.converted(gemma, fixtures.REPLACE, None, {"type": "Sequence", "decoders": fixtures.DECODER},
                                               start="<bos>")}
    return {"large_llama2": llama, "large_gemma": gemma}, files


def opened(directory):
    """Yields a path, and its library's functions."""
    models, files = large()
    for name, model in models.items():
        (directory / f"{name}.model").write_bytes(model)
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False))
    for path in [*sorted(directory.glob("*")), *sorted(fixtures.OUT.glob("*"))]:
        if path.suffix == ".model":
            yield path, *fixtures.open_model(path.read_bytes())
        elif path.suffix == ".json":
            yield path, *fixtures.open_file(json.loads(path.read_text()))


def speed(directory):
    """Prints MB/s of one core: ours new and seen before, and the libraries'."""
    text = Path(os.environ["TINY_TEXT"]).read_text() * 20
    blocks = ["".join(lines) for lines in itertools.batched(text.splitlines(keepends=True), 40000)] if sys.version_info >= (
        3, 12) else [text[i : i + 1100000] for i in range(0, len(text), 1100000)]
    corpus = directory / "corpus.txt"
    corpus.write_text(text)
    for path, encode, _, _ in opened(directory):
        if not path.name.startswith("large"):
            continue
        ours, theirs = [], []
        for _ in range(5):
            done = subprocess.run([f"{BUILD}/bench_tokenizer", "--text", corpus, "--vocabulary", path, "--train", "0", "--passes",
                                   "2", "--threads", "1"], capture_output=True, text=True, check=True)
            named = dict(line.split() for line in done.stdout.splitlines())
            ours.append([float(value) for name, value in named.items() if name.endswith("_mb_per_cpu_s")])
            start_s = time.process_time()
            for block in blocks[:4]:
                encode(block)
            theirs.append(1e-6 * sum(len(block.encode()) for block in blocks[:4]) / (time.process_time() - start_s))
        first, seen = (statistics.median(values) for values in zip(*ours))
        print(f"{path.name}: theirs {statistics.median(theirs):.1f} MB/s of CPU time; ours {first:.1f}, then {seen:.1f}", flush=True)


def main():
    with tempfile.TemporaryDirectory() as name:
        if "--speed" in sys.argv:
            speed(Path(name))
            return
        everything = list(texts())
        for path, encode, decode, unknown in opened(Path(name)):
            print(path.name, flush=True)
            for what, text in everything:
                check(path, encode, decode, unknown, text, what)
        print(f"check_sentence: {checks} texts, {failures} failed")
        sys.exit(failures > 0)


if __name__ == "__main__":
    main()
