#!/usr/bin/env python3
"""lint_comments.py -- comments are narrow enough to read, and start like English; for lint.sh.

    dev/test/lint_comments.py       one line for each problem; the exit status is 1 if any

A comment reaches column 100 at most, also behind code; tables between `clang-format off` and `on` may be
wider. No comment starts with a word that makes half a sentence of it: a
function's comment starts with a verb, a field's with a noun.
"""
import re
import sys
from pathlib import Path

COLUMNS = 100
HALF_SENTENCE = re.compile(r"(What|Of|And|Those|The same|Whether|As)\b")
TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//[^\n]*|/\*.*?\*/', re.S)
TABLE = re.compile(r"clang-format off.*?clang-format on", re.S)


def comments(text):
    """Each comment, with the line and column of its start."""
    for match in TOKEN.finditer(text):
        if match[0][0] == "/":
            yield match[0], text.count("\n", 0, match.start()), match.start() - text.rfind("\n", 0, match.start()) - 1


def lint(path):
    text = path.read_text()
    lines = text.split("\n")
    tables = {number for table in TABLE.finditer(text)
              for number in range(text.count("\n", 0, table.start()), text.count("\n", 0, table.end()))}
    above = None  # where the last line of // was: the next one there goes on with its sentence
    for comment, first, column in comments(text):
        half = HALF_SENTENCE.match(comment.lstrip("/* \n"))
        if half and above != (first - 1, column):
            yield f"{path}:{first + 1}: a comment starts with {half[0]}"
        above = first, column
        for number, part in enumerate(comment.split("\n"), first):
            end = len(part) + (column if number == first else 0)
            if end > COLUMNS and number not in tables:
                yield f"{path}:{number + 1}: a comment reaches column {end}, wanted {COLUMNS}"


def main():
    sources = [*Path(".").glob("*.c*"), *Path("llmc").rglob("*"), *Path("dev").rglob("*")]
    paths = [path for path in sorted(sources) if path.suffix in (".c", ".h", ".cu", ".cuh", ".cpp")]
    problems = [problem for path in paths for problem in lint(path)]
    for problem in problems:
        print(problem)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
