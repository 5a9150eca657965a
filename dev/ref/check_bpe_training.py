"""check_bpe_training.py -- the merges of bpe_train.h against two trainers from PyPI on one text.

    dev/ref/setup.sh && build/venv/bin/pip install rustbpe
    make -s build/plain/test_tokenizer
    build/venv/bin/python dev/ref/check_bpe_training.py TEXT [VOCAB_SIZE]

tokenizers breaks ties as bpe_train.h does (the lowest left id, then the lowest right id, and its
bytes have the same ids), so the merges must be the same ones in the same order. rustbpe numbers its
bytes by value and so takes another of several pairs that are equally frequent: most of its tokens
must be ours, the first ones in the same order. The first two that differ are printed.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import rustbpe
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

PROGRAM = "build/plain/test_tokenizer"
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_of_character():
    """GPT-2's spelling of bytes, in the order of the ids."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTES = byte_of_character()


def ours(path, vocab_size):
    """Merges as pairs of bytes, in order."""
    output = subprocess.run([PROGRAM, "--bpe_merges", path, str(vocab_size)], capture_output=True, text=True, check=True)
    tokens = [bytes([byte]) for byte in BYTES.values()]
    merges = []
    for id_, left, right in sorted(tuple(map(int, line.split())) for line in output.stdout.splitlines()):
        assert id_ == len(tokens), f"id {id_}, wanted {len(tokens)}"
        merges.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    return merges


def hugging_face(text, vocab_size):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # without end-of-text
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [tuple(bytes(BYTES[c] for c in side) for side in merge) for merge in merges]


def rust(text, vocab_size):
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(iter([text]), vocab_size - 1, pattern=PATTERN)
    return [token for token, _ in sorted(tokenizer.get_mergeable_ranks(), key=lambda item: item[1])][256:]


def main():
    path = sys.argv[1]
    vocab_size = int(sys.argv[2]) if len(sys.argv) > 2 else 5000
    text = Path(path).read_bytes().decode()
    mine = ours(path, vocab_size)
    failed = False
    theirs = hugging_face(text, vocab_size)
    for i, (a, b) in enumerate(itertools.zip_longest(mine, theirs)):
        if a != b:
            print(f"tokenizers {tokenizers.__version__}: merge {i} of {len(mine)}: {a} here, {b} there")
            failed = True
            break
    else:
        print(f"tokenizers {tokenizers.__version__}: the same {len(mine)} merges")
    tokens, others = [a + b for a, b in mine], rust(text, vocab_size)
    first = next((i for i, (a, b) in enumerate(zip(tokens, others)) if a != b), len(tokens))
    print(f"rustbpe: {len(others)} merges, the first {first} the same, {len(set(tokens) & set(others))} in both"
          + (f"; {tokens[first]} here, {others[first]} there" if first < len(tokens) else ""))
    failed |= len(others) != len(tokens) or len(set(tokens) & set(others)) < 0.99 * len(tokens)
    print(f"check_bpe_training: {'FAILED' if failed else 'ok'}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
