#!/usr/bin/env python3
"""lint_rooms.py -- the headers of llmc/ keep to their rooms; for lint.sh.

    dev/test/lint_rooms.py          one line for each problem; the exit status is 1 if there is any
    dev/test/lint_rooms.py --graph  which room includes which, and how often

It checks that no file includes a room above its own; that at least one name of every included header is used; that
a .cuh includes, itself or through others, every header whose functions, types and macros with arguments it uses; that
only intrinsics.h includes the headers of the processor's instructions; that names ending in `_` are used only in their
file and its twin (x.h and x.cuh); that the README of each room names every file in it; and that design.md has the training
loop.
"""
import re
import sys
from pathlib import Path

# The rooms of llmc/, from the ground up. A room may include itself and all rooms on the storeys
# before its own.
STOREYS = [
    ["base"],
    ["gpu"],
    ["comm", "tokenizer"],
    ["ops", "data"],
    ["bf16", "model", "log"],
    ["parallel", "formats"],
    ["layers", "report"],
    ["optim"],
    ["setup"],
    ["checkpoint", "generate", "cost"],
    ["plan"],
    ["run"],
]
STOREY = {room: number for number, storey in enumerate(STOREYS) for room in storey}
# the pages that explain the mathematics: no room includes them
ALONE = [Path("llmc/reference.h"), Path("llmc/reference_model.h"), Path("llmc/reference_latent.h"),
         Path("llmc/reference_recurrent.h")]
TRAINERS = ["train_gpt2.c", "train_gpt2.cu", "dev/data/tokenize.c"]
NOT_NAMES = {"if", "for", "while", "switch", "return", "sizeof", "defined", "__attribute__", "__launch_bounds__",
             "alignas", "decltype", "static_assert", "_Static_assert", "__align__"}


def without_comments(text):
    """The code; strings become empty, lines stay."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
    return token.sub(lambda m: '""' if m[0][0] == '"' else "\n" * m[0].count("\n"), text)


def top_level(code):
    """The declarations of a file, each up to its body."""
    lines, declarations = code.split("\n"), []
    for number, line in enumerate(lines):
        if not re.match(r"[A-Za-z_]", line):
            continue
        declaration = line
        while not re.search(r"[{;]", declaration) and number + 1 < len(lines) and lines[number + 1].strip():
            number += 1
            declaration += " " + lines[number].strip()
        declarations.append(declaration)
    return declarations


class Header:
    def __init__(self, path):
        self.path, self.text = path, path.read_text()
        self.code = without_comments(self.text)
        self.room = path.parent.name
        self.includes = [Path(name) for name in re.findall(r'^ *#include "(llmc/[^"]*)"', self.text, re.M)]
        self.words = set(re.findall(r"\w+", re.sub(r"^ *#include.*", "", self.code, flags=re.M)))
        self.functions, self.types, self.others = set(), set(), set()
        if "llmc" in path.parts[:1]:
            self.find_names()

    def find_names(self):
        code = self.code
        self.others |= set(re.findall(r"^ *# *define (\w+)", code, re.M)) - {self.guard()}
        self.types |= set(re.findall(r"^} (\w+);", code, re.M))
        self.types |= set(re.findall(r"^typedef [^{;]*?(\w+);", code, re.M))
        self.types |= set(re.findall(r"^typedef \w+ [^;]*\(\*(\w+)\)\(", code, re.M))
        self.types |= set(re.findall(r"^typedef (?:enum|struct)[^;{]*\{[^}]*\} (\w+);", code, re.M))
        self.types |= set(re.findall(r"^(?:template <[^{;]*> )?struct (?:alignas\(\d+\) )?(\w+)\b[^;(]*\{", code, re.M))
        for constants in re.findall(r"enum\s*\w*\s*\{([^}]*)\}", code):
            self.others |= set(re.findall(r"(?:^|,)\s*(\w+)", constants))
        self.others |= set(re.findall(r"\bX\(([A-Z]\w+), \"", code))  # constants of a list of words
        for declaration in top_level(code):
            if declaration.startswith(("typedef", "struct", "enum", "union", "extern")):
                continue
            head = re.sub(r"__\w+__\([^()]*\)|__attribute__\(\(.*?\)\)", "", declaration.split("{")[0].split("=")[0])
            call = [name for name in re.findall(r"(\w+)\(", head) if name not in NOT_NAMES and not name.isupper()]
            if call:
                self.functions.add(call[0])
            else:
                self.others |= set(re.findall(r"(\w+)(?:\[[^\]]*\])*\s*$", head))

    def guard(self):
        return (re.search(r"#ifndef (\w+)", self.text) or ["", ""])[1]

    def names(self):
        return (self.functions | self.types | self.others) - {"struct"}

    def twin(self, other):
        return self.path.with_suffix("") == other.path.with_suffix("") or \
            other.path.stem.startswith(self.path.stem + "_")


def may_include(user, header):
    if user.path in ALONE or header.path in ALONE:
        return user.path in ALONE
    return header.room == user.room or STOREY[header.room] < STOREY[user.room]


def lint(headers, users):
    for user in users:
        for include in user.includes:
            header = headers.get(include)
            if header is None:
                yield f"{user.path}: {include} is not in llmc"
                continue
            if user.path in headers and not may_include(user, header):
                yield f"{user.path}: {include} is in {header.room}, which {user.room} may not include"
            if not header.names() & user.words and not header.twin(user):
                yield f"{user.path}: nothing of {include} is used"
        for header in headers.values():
            private = {name for name in header.names() if name.endswith("_")} - user.names()
            if header is not user and not header.twin(user) and not user.twin(header):
                for name in sorted(private & user.words):
                    yield f"{user.path}: {name} is private to {header.path}"


def reached(header, headers, found):
    """Adds what the header includes, and what that includes."""
    for include in header.includes:
        if include in headers and include not in found:
            found.add(include)
            reached(headers[include], headers, found)
    return found


def lint_includes(headers):
    owners = {}
    for header in headers.values():
        macros = set(re.findall(r"^ *# *define (\w+)\(", header.code, re.M))
        for name in header.functions | header.types | macros:
            owners.setdefault(name, set()).add(header.path)
    types = set().union(*(header.types for header in headers.values()))
    for user in headers.values():
        if user.path.suffix != ".cuh" or user.path.stem.endswith("_cudnn"):  # part of its twin
            continue
        found = reached(user, headers, {user.path})
        called = set(re.findall(r"(?<![.>\w])(\w+)\(", user.code))
        own = set(re.findall(r"(?:class|typename) (\w+)|typedef .*?(\w+);", user.code))
        for name in sorted(owners.keys() & (called | (user.words & types)) - {name for pair in own for name in pair}):
            if not owners[name] & found:
                yield f"{user.path}: {name} is used; wanted an include of {min(owners[name])}"


def lint_intrinsics(headers):
    """Elsewhere nvcc would see them: the reason is in that file."""
    for header in headers.values():
        if header.path.name != "intrinsics.h":
            for name in re.findall(r"^ *# *include <(\w*intrin\.h|arm_\w+\.h)>", header.text, re.M):
                yield f"{header.path}: includes {name}; wanted llmc/base/intrinsics.h"


def lint_readmes(headers):
    for header in headers.values():
        readme = header.path.parent / "README.md"
        if f"`{header.path.name}`" not in readme.read_text():
            yield f"{readme}: lacks {header.path.name}"


def lint_loop():
    """design.md prints the training loop as it is."""
    trainer = Path("train_gpt2.c").read_text()
    loop = re.search(r"^static void train\(.*?^}$", trainer, re.M | re.S)
    if not loop or loop[0] not in Path("dev/doc/design.md").read_text():
        yield "dev/doc/design.md: its training loop is not train() of train_gpt2.c"


def graph(headers):
    arrows = {}
    for header in headers.values():
        for include in header.includes:
            pair = header.room, headers[include].room
            arrows[pair] = arrows.get(pair, 0) + 1
    for (user, used), count in sorted(arrows.items()):
        print(f"{user:10} -> {used:10} {count}")


def main():
    paths = sorted(path for path in Path("llmc").rglob("*") if path.suffix in (".h", ".cuh"))
    headers = {path: Header(path) for path in paths}
    if "--graph" in sys.argv:
        return graph(headers)
    problems = list(lint(headers, [*headers.values(), *(Header(Path(path)) for path in TRAINERS)]))
    problems += lint_includes(headers)
    problems += lint_readmes(headers)
    problems += lint_intrinsics(headers)
    problems += lint_loop()
    for problem in problems:
        print(problem)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
