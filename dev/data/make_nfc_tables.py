"""Writes llmc/tokenizer/nfc_tables.h: how Unicode's normalization form C changes text.

    dev/ref/setup.sh && build/venv/bin/python dev/data/make_nfc_tables.py

The facts come from Python's unicodedata. The package tokenizers, whose ids we give, knows another
version of Unicode: a character that it does not treat as Python does is left out if it leaves it
alone, and an error otherwise.
"""

import unicodedata
from pathlib import Path

import table_rows
import tokenizers
from tokenizers.normalizers import NFC, NFD

OUT = Path(__file__).parents[2] / "llmc" / "tokenizer" / "nfc_tables.h"
OVERLAY, IOTA = "\u0334", "\u0345"  # combining classes 1 and 240, the lowest and the highest
HANGUL = range(0xAC00, 0xAC00 + 11172)

HEADER = """\
/*
nfc_tables.h -- how Unicode's normalization form C changes text, without Hangul: it is arithmetic.

Made by dev/data/make_nfc_tables.py with tokenizers {tokenizers} and Unicode {unicode} of Python; change the
script, not this file. Rows ascend.
*/
#ifndef LLMC_NFC_TABLES_H
#define LLMC_NFC_TABLES_H

#include <stdint.h>

{start}enum {{ NFC_PAIRS = {pairs}, NFC_SINGLES = {singles}, NFC_CLASSES = {classes} }};
"""


def characters():
    return (c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF and c not in HANGUL)


def theirs(normalizer, text):
    return normalizer.normalize_str(text)


def decompositions():
    """Yields each character, the one or two it decomposes into, and whether these compose it."""
    for c in characters():
        text, full = chr(c), theirs(NFD(), chr(c))
        if full == text:
            assert theirs(NFC(), text) == text
            continue
        parts = unicodedata.decomposition(text).split()
        assert parts and not parts[0].startswith("<"), f"U+{c:04X}: Python does not decompose it"
        parts = [int(part, 16) for part in parts]
        assert unicodedata.normalize("NFD", text) == full and len(parts) <= 2, f"U+{c:04X}"
        composes = theirs(NFC(), full) == text
        assert composes == (unicodedata.normalize("NFC", text) == text), f"U+{c:04X}"
        yield c, parts, composes


def classes():
    """Yields each character that moves past others: tokenizers knows its combining class."""
    for c in characters():
        order = unicodedata.combining(chr(c))
        if order:
            moved = chr(c) != OVERLAY and theirs(NFD(), chr(c) + OVERLAY) == OVERLAY + chr(c)
            pushed = chr(c) != IOTA and theirs(NFD(), IOTA + chr(c)) == chr(c) + IOTA
            decomposes = theirs(NFD(), chr(c)) != chr(c)
            if moved or pushed or decomposes:
                assert decomposes or (moved, pushed) == (order > 1, order < 240), f"U+{c:04X}"
                yield c, order


def ranges(found):
    rows = []
    for c, order in found:
        if rows and rows[-1][1] == c - 1 and rows[-1][2] == order:
            rows[-1][1] = c
        else:
            rows.append([c, c, order])
    return rows


def main():
    pairs, singles = [], []
    for c, parts, composes in decompositions():
        if composes:
            assert len(parts) == 2
            pairs.append([c, *parts])
        else:
            singles.append([c, *[*parts, 0][:2]])
    orders = ranges(classes())
    text = HEADER.format(start=table_rows.START, tokenizers=tokenizers.__version__, unicode=unicodedata.unidata_version, pairs=len(pairs),
                         singles=len(singles), classes=len(orders))
    text += "\n// a character, and the two that compose it"
    text += table_rows.table("nfc_pairs", pairs, "NFC_PAIRS")
    text += "\n// a character that is always decomposed, and what into: one character and 0, or two"
    text += table_rows.table("nfc_singles", singles, "NFC_SINGLES")
    text += "\n// the first and the last character of a range, and its combining class; all others have 0"
    text += table_rows.table("nfc_classes", orders, "NFC_CLASSES")
    OUT.write_text(text + table_rows.END)
    print(f"{OUT}: {len(pairs)} pairs, {len(singles)} singles, {len(orders)} ranges of classes")


if __name__ == "__main__":
    main()
