#!/usr/bin/env python3
"""lint_comments.py -- comments are narrow enough to read, and start like English; for lint.sh.

    dev/test/lint_comments.py       one line for each problem; the exit status is 1 if any

A comment on lines of its own reaches to column 100 at most, one behind code to column 110; tables between
`clang-format off` and `on` may be wider. No comment starts with a word that makes half a sentence of it: a
function's comment starts with a verb, a field's with a noun.
"""
import re
import sys
from pathlib import Path

COMMENT_COLUMNS, LINE_COLUMNS = 100, 110
HALF_SENTENCE = re.compile(r"(What|Of|And|Those|The same|Whether|As)\b")
# Rooms that are not checked yet.
LATER = set()
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
        limit = LINE_COLUMNS if lines[first][:column].strip() else COMMENT_COLUMNS
        for number in range(first, first + comment.count("\n") + 1):
            if len(lines[number]) > limit and number not in tables:
                yield f"{path}:{number + 1}: a comment reaches column {len(lines[number])}, wanted {limit}"


def main():
    paths = [path for path in sorted(Path("llmc").rglob("*")) if path.suffix in (".h", ".cuh")]
    problems = [problem for path in paths if path.parent.name not in LATER for problem in lint(path)]
    for problem in problems:
        print(problem)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
