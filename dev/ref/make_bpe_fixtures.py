"""Writes dev/ref/fixtures/bpe_cases.bin: texts that are hard to tokenize, and their ids in
tiktoken.

    dev/ref/setup.sh
    GPT2_VOCAB=../shared/data/gpt2.tiktoken build/venv/bin/python dev/ref/make_bpe_fixtures.py

Little endian: "bpecases", uint32 number of cases; each: uint32 bytes, uint32 repeats, uint32 ids,
uint64 hash, and the bytes. The text is these bytes, `repeats` times; the hash is FNV-1a over the
ids as uint16.
"""

import base64
import itertools
import os
import random
import struct
import sys
from pathlib import Path

import tiktoken
from tiktoken_ext import openai_public

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from make_unicode_tables import CLASSES, characters, matcher, ranges  # noqa: E402

OUT = Path(__file__).parent / "fixtures" / "bpe_cases.bin"
BLANKS = [" ", "\n", "\t", "\r", "\x0b", "\x85", "\u00a0", "\u1680", "\u2003", "\u3000"]
# of each class characters of 1, 2, 3 and 4 bytes, and characters that are often misclassified:
# combining marks, joiners, a half, a Roman number, the long s, the blanks of Python, JavaScript or
# PCRE that are none here
MIXED = list("aZ09!'_-") + BLANKS[:5] + BLANKS[6:] + [
    "\u00e9", "\u0436", "\u6f22", "\U00020000", "\u0660", "\u00bd",
    "\u2165", "\u3007", "\U0001d7d8", "\u2014", "\U0001f600", "\u0301", "\u200d", "\u017f", "\u2019",
    "\x1c", "\u180e", "\u200b", "\ufeff", "\x00", "\x7f",
]  # fmt: skip


def gpt2(path):
    with open(path, "rb") as file:
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, file)}
    return tiktoken.Encoding(
        "gpt2",
        pat_str=openai_public.r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 50256},
    )


def borders():
    """Characters on both sides of each border of a class, each with neighbors of each class."""
    found = set()
    for _, pattern in CLASSES:
        matches = matcher(pattern)
        for first, last in ranges(c for c in characters() if matches(chr(c))):
            found |= {first - 1, first, last, last + 1}
    for c in sorted(found):
        if 0 <= c and not 0xD800 <= c <= 0xDFFF:
            yield "a{0}1{0} {0}!{0}".format(chr(c))


def blank_runs():
    for n in (1, 2, 3):
        for run in itertools.product(BLANKS if n < 3 else [" ", "\n", "\u3000"], repeat=n):
            for after in ("", "a", "'s", "7 ", "\u2014"):
                yield "x" + "".join(run) + after


def apostrophes(rng):
    ends = [*"sdmtlvreS1'", "ll", "ve", "re", "LL", "", "\u017f", "\u00e9"]
    for end in ends:
        for before in ("", "a", "1", " ", "  ", "\n", "!", "'", "\u00e9"):
            yield before + "'" + end + rng.choice(["", "s", " ", "'s", "x"])
    for _ in range(60):
        yield "".join(rng.choice(["'", "'", " ", "s", "l", "v", "e", "r", "t", "!"]) for _ in range(70))


def mixtures(rng):
    for n in range(160):
        yield "".join(rng.choice(MIXED) for _ in range(n))
    for _ in range(60):  # runs of one class, as in real text
        yield "".join(rng.choice(MIXED) * rng.randrange(1, 9) for _ in range(30))
    for _ in range(100):
        yield "".join(chr(rng.choice([rng.randrange(0x80), rng.randrange(0x800), rng.randrange(0xD800),
                                      rng.randrange(0xE000, 0x110000)])) for _ in range(40))  # fmt: skip


WORDS = [
    "hello world", "hello <|endoftext|>", "<|endoftext|>", "don't we've I'll they're he'd I'm 'twas DON'T",
    "def f(x):\n    return x**2  # comment\n\n\n\tif not x:\r\n\t\tpass\n",
    "\n\n#", "  leading and trailing  ",
    "antidisestablishmentarianism floccinaucinihilipilification supercalifragilisticexpialidocious",
    "https://example.org/a/b?c=d&e=%20f#g 3.14159 1,000,000 2024-01-01T00:00:00Z",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!"
    " \u0644\u063a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea"
    " \u4f60\u597d\u4e16\u754c"
    " \u3053\u3093\u306b\u3061\u306f \uc548\ub155 \u0928\u092e\u0938\u094d\u0924\u0947",
]  # fmt: skip


def cases(rng):
    for text in itertools.chain(
        WORDS, ["0" * n for n in range(1, 40)], borders(), blank_runs(), apostrophes(rng), mixtures(rng)
    ):
        yield text, 1
    for unit in [*"a \n0=\u6f22\u00a0\U0001f600", "ab", "aab", "abcab", "'s", " a", "\n "]:
        for repeats in (47, 48, 49, 50, 64, 127, 1000, 33333):
            yield unit, repeats


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def main():
    encoding = gpt2(os.environ["GPT2_VOCAB"])
    records = []
    for text, repeats in cases(random.Random(20240328)):
        ids = encoding.encode_ordinary(text * repeats)
        data = text.encode()
        hashed = fnv1a(struct.pack(f"<{len(ids)}H", *ids))
        records.append(struct.pack("<IIIQ", len(data), repeats, len(ids), hashed) + data)
    OUT.write_bytes(b"bpecases" + struct.pack("<I", len(records)) + b"".join(records))
    print(f"{OUT}: {len(records)} cases, {OUT.stat().st_size} bytes, tiktoken {tiktoken.__version__}")


if __name__ == "__main__":
    main()
