#!/usr/bin/env python3
"""lint_pages.py -- the pages say what is there; for lint.sh.

    dev/test/lint_pages.py       one line for each problem; the exit status is 1 if any

Every option in a page or in an example is one of the programs', or of another program that OTHERS names; every link
leads to a file, and its anchor to a heading; the messages that troubleshooting.md explains are in the sources; the
tables of architectures.md have each family, with its names, and formats of chats and tokenizers that are known; the README has
at most README_WORDS words.
"""
import json
import re
import sys
from pathlib import Path

README_WORDS = 1200
PAGES = [Path("README.md"), Path("dev/CONTRIBUTING.md"), *sorted(Path("dev/doc").glob("*.md"))]
EXAMPLES = sorted(Path("scripts/examples").glob("*.sh"))
# of crossings, gdb, docker, podman, mpirun, torchrun, pip, git, loginctl, compute-sanitizer, TensorBoard
OTHERS = set("""args build-arg ignorefile shm-size gpus ipc rm user nproc-per-node nproc_per_node no-python hostfile
    map-by bind-to logdir tool always mpi bacth trainer tokenize tensor-slices""".split())
OPTION = r"(?<![\w/-])--([a-z][a-z0-9_-]+)"
CODE = re.compile(r"``[^`]+``|`[^`\n]+`")


def known_options():
    """Names in the tables of options, and the options of our scripts."""
    names = set()
    for table in ["llmc/setup/options_table.h", "dev/data/tokenize_options.h"]:
        names |= set(re.findall(r'\{"[a-z, ]*", *"([a-z0-9-]+)",', Path(table).read_text(), re.M))
    for script in [*Path("scripts").rglob("*.sh"), *Path("dev/bench").glob("*.*"), *Path("dev/ref").glob("*.*")]:
        if script not in EXAMPLES:
            names |= set(re.findall(OPTION, script.read_text(errors="replace")))
    return names


def lint_options(path, text, known):
    for number, line in enumerate(text.split("\n"), 1):
        for name in re.findall(OPTION, line):
            if name not in known and name not in OTHERS:
                yield f"{path}:{number}: --{name} is no option; wanted one of --help, or a word in OTHERS of lint_pages.py"


def anchors(text):
    """GitHub's names of a page's headings."""
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def lint_links(path, text):
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", text)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        if not page.exists():
            yield f"{path}: a link to {target}, which does not exist"
        elif anchor and page.suffix == ".md" and anchor not in anchors(page.read_text()):
            yield f"{path}: a link to {target}, which has no such heading"


def messages():
    """All texts in the sources, each on a line of its own: adjacent strings are one."""
    joined = []
    for source in [*Path("llmc").rglob("*.h"), *Path("llmc").rglob("*.cuh"), *Path("dev").glob("*.mk")]:
        text = re.sub(r'"\s*\n\s*"', "", source.read_text())
        joined += re.findall(r'"((?:[^"\\\n]|\\.)*)"', text)
    return "\n".join(joined).replace('\\"', '"')


def lint_messages():
    """The first column of a table in troubleshooting.md, and its headings; ... stands for what differs."""
    path = Path("dev/doc/troubleshooting.md")
    sources = messages()
    for line in path.read_text().split("\n"):
        quoted = re.match(r"\| (`.*?`) \||#+ .*(`.*`)", line)
        for code in CODE.findall(quoted[0]) if quoted else []:
            for part in code.strip("`").split("..."):
                if not code.startswith("`--") and len(part.strip()) > 4 and part.strip() not in sources:
                    yield f"{path}: no message has \"{part.strip()}\""


def table(page, header):
    """The cells of the rows of a table, whose first line starts so; without backticks."""
    lines = page.read_text().split(f"\n{header}")[1].split("\n")[2:]
    return [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines[: lines.index("")]]


def hugging_face_families():
    """The class of each architecture in transformers, and the words of model_type."""
    words = dict(re.findall(r'X\((ARCH_\w+), +"(\w+)"', Path("llmc/model/config.h").read_text()))
    source = Path("llmc/formats/hf_config_families.h").read_text()
    rows = {arch: (name, [kind]) for arch, kind, name in re.findall(r'\[(ARCH_\w+)\] = +\{"(\w+)", +"(\w+)"', source)}
    for arch, wrapper in re.findall(r'\[(ARCH_\w+)\] = \{\.wrapper = "(\w+)"', source):
        rows[arch][1].append(wrapper)
    return {word: rows[arch] for arch, word in words.items()}


def compared_classes():
    """Classes of transformers whose updates the trainers are compared with (dev/test/cli/test_families.sh)."""
    models = Path("dev/ref/fixtures/models")
    for name in {line.split()[0] for line in (models / "losses.txt").read_text().split("\n") if line[:1] not in ("", "#")}:
        yield from json.loads((models / name / "config.json").read_text())["architectures"]


def lint_families():
    """Both tables of the families; test_families.sh looks at the column about GGUF."""
    path, tokenizers = Path("dev/doc/architectures.md"), Path("dev/doc/tokenizer.md").read_text()
    families, compared = hugging_face_families(), set(compared_classes()) | {"GPT2LMHeadModel"}
    chats = set(re.findall(r'X\(CHAT_\w+, "([\w-]+)"\)', Path("llmc/tokenizer/chat_format.h").read_text())) - {"off", "on"}
    rows, unused = table(path, "| `--arch` | `model_type` |"), set(chats)
    for what, found in (("operations", table(path, "| `--arch` | positions |")), ("families", rows)):
        if [row[0] for row in found] != list(families):
            yield f"{path}: the table of {what} has {' '.join(row[0] for row in found)}; wanted {' '.join(families)}"
    for arch, kinds, name, _, formats, patterns in rows:
        class_name, types = families.get(arch, ("", []))
        if class_name not in compared:
            yield f"{path}: {arch}: no updates of {class_name} in losses.txt (dev/ref/make_update_fixtures.py)"
        if re.findall(r"\w+", kinds) != types or class_name not in name:
            yield f"{path}: {arch} is {kinds}, {name}; wanted {' '.join(types)}, {class_name}"
        for word in filter(None, formats.split(", ")):
            unused.discard(word)
            if word not in chats:
                yield f"{path}: {arch}: {word} is no --chat"
        for word in filter(None, patterns.split(", ")):
            if word not in tokenizers:
                yield f"{path}: {arch}: tokenizer.md does not know {word}"
    if unused:
        yield f"{path}: no family has --chat {', '.join(sorted(unused))}"


def lint():
    known = known_options()
    for path in PAGES + EXAMPLES:
        text = path.read_text()
        yield from lint_options(path, text, known)
        if path.suffix == ".md":
            yield from lint_links(path, text)
    yield from lint_messages()
    yield from lint_families()
    words = len(Path("README.md").read_text().split())
    if words > README_WORDS:
        yield f"README.md: {words} words; wanted at most {README_WORDS}: what else is worth saying belongs to a page"


problems = list(lint())
print(*problems, sep="\n", end="\n" if problems else "")
sys.exit(1 if problems else 0)
