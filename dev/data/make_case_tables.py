"""Writes llmc/tokenizer/case_tables.h: how Unicode's case folding changes characters.

    python3 dev/data/make_case_tables.py

The facts come from Python's str.casefold, which is the full case folding of its version of Unicode.
"""

import unicodedata
from pathlib import Path

OUT = Path(__file__).parents[2] / "llmc" / "tokenizer" / "case_tables.h"

HEADER = """\
/*
case_tables.h -- full case folding of Unicode {unicode}.

Made by dev/data/make_case_tables.py; change the script, not this file. Rows ascend.
*/
#ifndef LLMC_CASE_TABLES_H
#define LLMC_CASE_TABLES_H

#include <stdint.h>

// clang-format off
enum {{ CASE_RANGES = {ranges}, CASE_STRINGS = {strings} }};
"""


def ranges(folded):
    """Joins characters that are one or two apart and move by the same distance."""
    rows = []
    for c, to in folded:
        last = rows[-1] if rows else None
        step = c - last[1] if last else 0
        if last and last[3] == to - c and step in (1, 2) and (last[2] == 0 or last[2] == step):
            last[1], last[2] = c, step
        else:
            rows.append([c, c, 0, to - c])
    return [[first, last, step or 1, distance] for first, last, step, distance in rows]


def table(name, rows, kind, width, per_line):
    text = f"\n__attribute__((unused)) static const {kind} case_{name.lower()}[CASE_{name}][{width}] = {{\n"
    cells = ["{" + ", ".join(row) + "}" for row in rows]
    for i in range(0, len(cells), per_line):
        text += "    " + ", ".join(cells[i : i + per_line]) + ",\n"
    return text + "};\n"


def main():
    folded = [(c, chr(c).casefold()) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF and chr(c).casefold() != chr(c)]
    one = ranges([(c, ord(to)) for c, to in folded if len(to) == 1])
    several = [(c, [ord(x) for x in to]) for c, to in folded if len(to) > 1]
    text = HEADER.format(unicode=unicodedata.unidata_version, ranges=len(one), strings=len(several))
    text += "\n// the first and the last character of a range, the step from one to the next, and how far they move"
    text += table("RANGES", [[f"0x{a:X}", f"0x{b:X}", str(step), str(d)] for a, b, step, d in one], "int32_t", 4, 6)
    text += "\n// a character that becomes two or three; 0: no third one"
    text += table("STRINGS", [[f"0x{x:X}" for x in [c, *to, 0][:4]] for c, to in several], "uint32_t", 4, 6)
    OUT.write_text(text + "// clang-format on\n\n#endif\n")
    print(f"{OUT}: {len(one)} ranges, {len(several)} strings")


if __name__ == "__main__":
    main()
