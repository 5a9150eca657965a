#!/usr/bin/env python3
"""check_tensorboard.py RUN -- TensorBoard's own reader finds the numbers of RUN/log.jsonl in RUN/tensorboard.

Every number of the lines of training, validations and tasks must appear once, at its step, and nothing else; the
texts must be those of the samples, besides those that were dropped from the log. For test_report.sh.
"""
import json
import math
import sys
from collections import defaultdict

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

NOT_SCALARS = {"kind", "step", "name", "tokens", "elapsed_s", "time", "sequences", "all_sequences", "peak"}


def wanted(run):
    scalars, texts = defaultdict(dict), []
    for line in open(f"{run}/log.jsonl", encoding="utf-8"):
        line = json.loads(line)
        if line["kind"] == "sample":
            texts.append((line["step"], line["text"]))
        if line["kind"] not in ("train", "val", "task"):
            continue
        for key, value in line.items():
            if key not in NOT_SCALARS:
                kind = "gpu" if key in ("power_w", "clock_mhz") else "/".join([line["kind"], line.get("name", "")]).strip("/")
                scalars[f"{kind}/{key}"][line["step"]] = math.nan if value is None else value
    return scalars, texts


def main():
    run = sys.argv[1]
    board = EventAccumulator(f"{run}/tensorboard", size_guidance={"scalars": 0, "tensors": 0})
    board.Reload()
    scalars, texts = wanted(run)
    assert sorted(board.Tags()["scalars"]) == sorted(scalars), (board.Tags()["scalars"], sorted(scalars))
    for tag, values in scalars.items():
        events = board.Scalars(tag)
        steps = [event.step for event in events]
        assert steps == sorted(values), f"{tag}: steps {steps}, wanted {sorted(values)}"
        for event in events:
            got, want = event.value, values[event.step]
            assert got == want or abs(got - want) <= 1e-6 * abs(want) or (got != got and want != want), (tag, event.step, got, want)
    found = [(event.step, event.tensor_proto.string_val[0].decode()) for event in board.Tensors("sample")]
    missing = [text for text in texts if text not in found]
    assert not missing, missing
    print(f"{len(scalars)} tags, {sum(map(len, scalars.values()))} values, {len(found)} texts")


if __name__ == "__main__":
    main()
