"""Writes dev/ref/fixtures/case_folding.txt: words that differ in case or in how their accents are written,
and what Python makes of them.

    dev/ref/setup.sh && build/venv/bin/python dev/ref/make_case_fixtures.py

A line is a word and the same word in Unicode's normalization form C, folded, and in that form again, of
which only letters and digits are left.
"""

import unicodedata
from pathlib import Path

OUT = Path(__file__).parent / "fixtures" / "case_folding.txt"
BLANKLESS = [(0xE00, 0xEFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0xA4CF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)]


def normal(text):
    return unicodedata.normalize("NFC", text)


def folded(text):
    text = normal(normal(text).casefold())
    return "".join(c for c in text if unicodedata.category(c)[0] in "LN")


def ways(c):
    """Returns the ways to write a character that count as one."""
    return [w for w in {c, c.upper(), c.lower(), unicodedata.normalize("NFD", c), unicodedata.normalize("NFD", c.upper())}
            if folded(w) == folded(c)]


def main():
    lines = []
    for code in range(0x80, 0x110000):
        c = chr(code)
        changes = c.casefold() != c or unicodedata.normalize("NFD", c) != c
        blankless = any(first <= code <= last for first, last in BLANKLESS)
        hangul = 0xAC00 <= code < 0xAC00 + 11172 and code % 97  # a few of them
        if changes and not blankless and not hangul and unicodedata.category(c)[0] in "LN":
            lines += [f"a{way}z\ta{folded(way)}z" for way in sorted(ways(c))]
    lines = sorted(set(lines))
    OUT.write_text("\n".join(lines) + "\n")
    print(f"{OUT}: {len(lines)} words, Unicode {unicodedata.unidata_version}")


if __name__ == "__main__":
    main()
