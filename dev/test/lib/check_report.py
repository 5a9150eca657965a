#!/usr/bin/env python3
"""check_report.py PAGE RUN... -- the page of --report is well-formed and agrees with the logs. For test_report.sh.

Checked: it is XML; ids are unique and each reference finds its own; nothing is loaded from elsewhere, and there is no
script; no coordinate is NaN or infinite; each picture has a title and a description; each curve has at most two points
a column; the best and last validation losses, and all options, are those in the logs.
"""
import json
import re
import sys
import xml.etree.ElementTree as ET

page_path, runs = sys.argv[1], sys.argv[2:]
source = open(page_path, encoding="utf-8").read()
root = ET.fromstring(source)
elements = list(root.iter())
names = [element.tag.split("}")[-1] for element in elements]
text = " ".join(" ".join(root.itertext()).split())

ids = [element.get("id") for element in elements if element.get("id")]
assert len(ids) == len(set(ids)), "ids come twice"
for element in elements:
    for key in ("href", "aria-labelledby", "for"):
        for name in (element.get(key) or "").split():
            assert name.lstrip("#") in ids, f"{key}={name} leads nowhere"
assert not {"script", "link", "img", "iframe", "object"} & set(names), "something is loaded"
assert not re.search(r"https?://(?!www\.w3\.org/1999/xhtml)|url\(|@import", source), "a link to elsewhere"
assert not re.search(r'="[^"]*\b(nan|inf)', source), "a number that is not finite"

# <use> takes no style that depends on an ancestor: the curve would become a black shape
assert not re.search(r"[\w\]] +\.(raw|line|val|skip|rollback)\b", source.split("</style>")[0]), "a curve's style has an ancestor"

plots = [element for element in elements if element.get("class") == "plot"]
assert len(plots) >= 5, f"{len(plots)} plots"
for plot in plots:
    children = {child.tag.split("}")[-1]: child.text for child in plot}
    assert children.get("title") and children.get("desc"), "a plot without title or description"
for path in root.iter("{http://www.w3.org/1999/xhtml}path"):
    numbers = re.findall(r"-?\d+", path.get("d"))
    assert len(numbers) // 2 <= 2 * 1000 + 10 or "M" in path.get("d")[1:], f"a path of {len(numbers) // 2} points"

for run in runs:
    lines = [json.loads(line) for line in open(f"{run}/log.jsonl", encoding="utf-8")]
    losses = [line["loss"] for line in lines if line["kind"] == "val"]
    for loss in (min(losses), losses[-1]):
        assert f"{loss:.4f}" in text, f"{run}: validation loss {loss:.4f} is not there"
    options = [line for line in lines if line["kind"] == "config"][-1]["options"]
    for name, value in options.items():
        word = {True: "on", False: "off", None: "auto"}.get(value, value) if not isinstance(value, (int, float)) or isinstance(value, bool) else value
        assert f"--{name}" in text, f"{run}: --{name} is not there"
        if isinstance(word, str):
            assert " ".join(word.split()) in text, f"{run}: --{name} {word} is not there"
print(f"{len(plots)} plots, {len(source) // 1024} KiB")
