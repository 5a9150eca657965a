"""Writes llmc/tokenizer/unicode_tables.h: which characters are letters, digits and blanks; capitals, minuscules, marks.

    dev/ref/setup.sh && build/venv/bin/python dev/data/make_unicode_tables.py

The classes come from tiktoken's own regular expressions, character by character, so they agree with
tiktoken by construction; the Unicode version is the newest whose \\p{Age} it knows. Python's
unicodedata, an older version, must agree on every character that it knows.
"""

import unicodedata
from pathlib import Path

import table_rows
import tiktoken

OUT = Path(__file__).parents[2] / "llmc" / "tokenizer" / "unicode_tables.h"
VERSIONS = ["14.0", "15.0", "15.1", "16.0", "17.0", "18.0", "19.0", "20.0"]
CLASSES = [("letter", r"\p{L}"), ("number", r"\p{N}"), ("blank", r"\s"), ("capital", r"[\p{Lu}\p{Lt}]"), ("minuscule", r"\p{Ll}"),
           ("mark", r"\p{M}")]
CATEGORIES = {"letter": ("L",), "number": ("N",), "capital": ("Lu", "Lt"), "minuscule": ("Ll",), "mark": ("M",)}

HEADER = """\
/*
unicode_tables.h -- letters, numbers and blanks of Unicode {version}: \\p{{L}}, \\p{{N}} and \\s (White_Space);
of letters capitals, \\p{{Lu}} and \\p{{Lt}}, and minuscules, \\p{{Ll}}; and marks, \\p{{M}}.

Made by dev/data/make_unicode_tables.py with tiktoken {tiktoken}; change the script, not this file. Each
row is the first and the last character of a range; rows ascend and do not touch.
{counts}.
*/
#ifndef LLMC_UNICODE_TABLES_H
#define LLMC_UNICODE_TABLES_H

#include <stdint.h>

#define UNICODE_VERSION "{version}"

{start}enum {{ {sizes} }};
"""


def matcher(pattern):
    """Returns a function that tells if the pattern matches in a text: matches become tokens."""
    single_bytes = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding("bytes", pat_str=pattern, mergeable_ranks=single_bytes, special_tokens={})
    return lambda text: bool(encoding.encode_ordinary(text))


def newest_version():
    known = None
    for version in VERSIONS:
        try:
            matcher(rf"\p{{Age={version}}}")
        except Exception:  # an error in the pattern
            break
        known = version
    assert known and known != VERSIONS[-1], "extend VERSIONS"
    return known


def characters():
    return (c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF)


def ranges(found):
    rows = []
    for c in found:
        if rows and rows[-1][1] == c - 1:
            rows[-1][1] = c
        else:
            rows.append([c, c])
    return rows


def check_against_python(name, found):
    """Checks that the characters Python knows are in the same class there. Its str.isspace is not
    White_Space: blanks are compared with the two parts of the category Z and the controls."""
    found = set(found)
    controls = {*range(0x09, 0x0E), 0x85}
    for c in characters():
        category = unicodedata.category(chr(c))
        if category != "Cn":
            if name == "blank":
                in_python = c in controls or category[0] == "Z"
            else:
                in_python = category.startswith(CATEGORIES[name])
            assert in_python == (c in found), f"U+{c:04X} is {category} in Python's Unicode"


def main():
    classes = {}
    for name, pattern in CLASSES:
        matches = matcher(pattern)
        classes[name] = [c for c in characters() if matches(chr(c))]
        check_against_python(name, classes[name])
    rows = {name: ranges(found) for name, found in classes.items()}
    text = HEADER.format(
        start=table_rows.START,
        version=newest_version(),
        tiktoken=tiktoken.__version__,
        counts=", ".join(f"{len(found)} {name}s" for name, found in classes.items()),
        sizes=",\n       ".join(f"UNICODE_{name.upper()}S = {len(r)}" for name, r in rows.items()),
    )
    for name, pairs in rows.items():
        text += table_rows.table(f"unicode_{name}s", pairs, f"UNICODE_{name.upper()}S")
    OUT.write_text(text + table_rows.END)
    print(f"{OUT}: Unicode {newest_version()}, agrees with Python's {unicodedata.unidata_version}")


if __name__ == "__main__":
    main()
