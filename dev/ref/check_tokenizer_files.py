#!/usr/bin/env python3
"""check_tokenizer_files.py -- bpe_files.h against the libraries of its formats, in both directions.

    dev/ref/setup.sh && make -s build/plain/test_tokenizer
    GPT2_VOCAB=gpt2.tiktoken build/venv/bin/python dev/ref/check_tokenizer_files.py

tokenizers, transformers and tiktoken open our files and encode as we do; GPT-2's files have the
SHA-256 of those that OpenAI published. We open the files of tokenizers, also with a vocabulary that
it trained and with words that it cuts out of text, and encode as it does; we refuse those that cut
text in another way. Prints one line; the exit status is the verdict.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import tiktoken
import tokenizers
import transformers
from tiktoken.load import load_tiktoken_bpe
from tiktoken_ext import openai_public
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

PROGRAM = "build/plain/test_tokenizer"
PUBLISHED = {"merges.txt": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
             "vocab.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"}
EOT = "<|endoftext|>"
failures = 0


def expect(ok, what):
    global failures
    if not ok:
        failures += 1
        print(f"FAILED: {what}")


def run(*arguments, text=b""):
    return subprocess.run([PROGRAM, *map(str, arguments)], input=text, capture_output=True)


def our_ids(vocabulary, text):
    done = run("--bpe_ids", vocabulary, text=text.encode())
    return [int(line) for line in done.stdout.split()] if done.returncode == 0 else done.stderr.decode()


def texts():
    """Sources of this repository, and characters of all kinds at random. Unassigned ones are left
    out: each library has its own version of Unicode."""
    for path in ["README.md", "llmc/tokenizer/bpe.h", "dev/ref/check_tokenizer_files.py"]:
        yield Path(path).read_text()
    pick = random.Random(20240328)
    kinds = ["a", "th", "the", "The", " ", "  ", "\n", "\t", "'s", "'LL", "12", "!", "\u00e9", "\u6f22\u5b57", "\u0436",
             "\u00bd", "\U0001f600", "\u00a0", "\u3000", "\u2019", "\u0301", "\x00", "\x7f", "\u0120", "\u00ad", '"\\']
    for _ in range(20):
        yield "".join(pick.choice(kinds) for _ in range(300))


def same(ours, theirs, what):
    expect(ours == theirs, f"{what}: {str(ours)[:80]}, wanted {str(theirs)[:80]}")


def theirs_open_ours(vocabulary, directory):
    done = run("--write_bpe", vocabulary, directory)
    expect(done.returncode == 0, done.stderr.decode())
    for name, digest in PUBLISHED.items():
        expect(hashlib.sha256((directory / name).read_bytes()).hexdigest() == digest, f"{name} is not as published")
    fast = Tokenizer.from_file(str(directory / "tokenizer.json"))
    auto = transformers.AutoTokenizer.from_pretrained(str(directory))
    pair = Tokenizer(models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt")))
    pair.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ranks = load_tiktoken_bpe(str(vocabulary))
    tik = tiktoken.Encoding("x", pat_str=openai_public.r50k_pat_str, mergeable_ranks=ranks, special_tokens={EOT: 50256})
    expect((auto.eos_token_id, auto.bos_token_id, auto.vocab_size, auto.model_max_length) == (50256, 50256, 50257, 1024),
           f"AutoTokenizer: {auto}")
    expect(auto.decode(auto.encode(EOT)) == EOT and auto.encode(EOT) == [50256], "end-of-text in AutoTokenizer")
    expect(fast.encode(EOT).ids == [50256] and fast.token_to_id(EOT) == 50256, "end-of-text in tokenizer.json")
    for text in texts():
        wanted = tik.encode_ordinary(text)
        readers = ["tokenizer.json", "vocab.json", "merges.txt", "."]
        for name in readers[: 4 if len(text) < 1000 else 1]:
            same(our_ids(directory / name, text), wanted, f"ours with {name}")
        if EOT in text:
            continue  # there a special token, to the others
        same(fast.encode(text).ids, wanted, "tokenizers with tokenizer.json")
        same(pair.encode(text).ids, wanted, "tokenizers with vocab.json and merges.txt")
        same(auto.encode(text), wanted, "AutoTokenizer")
        expect(auto.decode(wanted) == text, "AutoTokenizer's decode")


def trained(kind):
    """A tokenizer that their library trained on our sources, end-of-text first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "add_prefix_space")
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "normalizer":
        tokenizer.normalizer = normalizers.NFKC()
    if kind == "Whitespace":
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [EOT, "<pad>"] if kind == "<pad>" else [EOT]
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def ours_open_theirs(directory):
    path = directory / "tokenizer.json"
    tokenizer = trained("plain")
    tokenizer.save(str(path))
    tokenizer.model.save(str(directory))  # vocab.json, merges.txt
    for text in texts():
        if EOT not in text:
            wanted = tokenizer.encode(text).ids
            same(our_ids(path, text), wanted, "their tokenizer.json")
            same(our_ids(directory / "vocab.json", text), wanted, "their vocab.json")
    written = json.loads(path.read_text())
    expect(isinstance(written["model"]["merges"][0], list), "merges as arrays")
    padded = trained("<pad>")
    padded.save(str(path))
    for text in texts():
        if EOT not in text:
            same(our_ids(path, text), padded.encode(text).ids, "their tokenizer.json with <pad>")
    tokenizer.add_tokens(["vector"])
    tokenizer.save(str(path))
    for text in texts():
        if EOT not in text:
            same(our_ids(path, text), tokenizer.encode(text).ids, "their tokenizer.json with an added word")
    for kind in ["normalizer", "Whitespace", "add_prefix_space"]:
        trained(kind).save(str(path))
        error = our_ids(path, "a")
        wanted = "NFKC" if kind == "normalizer" else kind
        expect(isinstance(error, str) and wanted in error, f"{kind}: {error}")


def transformers_round_trip(directory, again):
    """What transformers saves of our directory is again ours."""
    auto = transformers.AutoTokenizer.from_pretrained(str(directory))
    auto.save_pretrained(str(again))
    for text in texts():
        same(our_ids(again, text), our_ids(directory, text), "saved by transformers")


def main():
    vocabulary = os.environ.get("GPT2_VOCAB")
    if not os.path.exists(PROGRAM) or not vocabulary:
        sys.exit(f"error: wanted {PROGRAM} (make -s {PROGRAM}) and GPT2_VOCAB, a file of GPT-2's vocabulary")
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # no copies of temporary files
    with tempfile.TemporaryDirectory() as temporary:
        directories = [Path(temporary) / name for name in ("ours", "theirs", "again")]
        for directory in directories:
            directory.mkdir()
        theirs_open_ours(vocabulary, directories[0])
        ours_open_theirs(directories[1])
        transformers_round_trip(directories[0], directories[2])
    print(f"check_tokenizer_files: {'FAILED' if failures else 'ok'}, tokenizers {tokenizers.__version__}, "
          f"transformers {transformers.__version__}, tiktoken {tiktoken.__version__}")
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())
