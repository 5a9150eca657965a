#!/usr/bin/env python3
"""usage: wandb_follow.py RUN [PROJECT]

Sends RUN/log.jsonl to Weights & Biases, during the run or after it; PROJECT is pretrain.c unless given. The trainer
knows nothing of it and never waits for it. It ends at the run's summary. You can restart it at any
time: RUN/wandb.json records its progress, and nothing is sent twice. If the run is resumed from an
earlier step, or rolled back, the run at Weights & Biases is rewound to that step (resume_from, which
needs their preview of it); where that fails, repeated steps keep their first values. Needs
`pip install wandb`; WANDB_MODE=offline only writes to disk.
"""
import json
import os
import sys
import time
from pathlib import Path


def fail(message, status=1):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


START = {"kind": "start of the log"}


def row_of(line):
    """Returns the row in a line of the log, None if it is damaged."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "kind" in row else None


def log_rows(path):
    """Yields START, the rows of a log as they appear, and None at its current end. A resumed run
    truncates it, a new one replaces it: then it is read from the start."""
    log, line, number = None, "", 0
    while True:
        if log is None:
            log, line, number = open(path, encoding="utf-8", errors="replace"), "", 0
            yield START
        line += log.readline()
        if line.endswith("\n"):
            number += 1
            row = row_of(line)
            if row:
                yield row
            else:
                print(f"warning: {path}: line {number} is damaged and left out", file=sys.stderr)
            line = ""
            continue
        yield None
        now, then = os.stat(path), os.fstat(log.fileno())
        if now.st_ino != then.st_ino or now.st_size < log.tell():
            log.close()
            log = None


def rows_until(path, time_s):
    """Returns the number of rows with a step that were logged until this time, and the time of the
    last of them. If they are fewer than were sent, the log was cut after them."""
    count, before, last = 0, None, 0
    with open(path, encoding="utf-8", errors="replace") as log:
        for line in log:
            row = row_of(line) if line.endswith("\n") else None
            if row and row.get("time", 0) > time_s:
                break
            if row:
                count += "step" in row
                last = max(last, row.get("time", 0))
                before = row["kind"]
    # a rollback has no time, and belongs to the rows after it
    return count - (before == "rollback"), last


class Sent:
    """Rows of a run that were sent: those with a step, up to a time. Kept beside the log."""

    def __init__(self, path, run):
        self.path, self.run = path, run
        self.rows, self.time_s = 0, 0
        kept = json.loads(path.read_text()) if path.exists() else {}
        if kept.get("run") == run and "time" in kept:
            self.rows, self.time_s = kept["rows"], kept["time"]

    def keep(self):
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"run": self.run, "rows": self.rows, "time": self.time_s}) + "\n")
        part.replace(self.path)


def numbers_of(row):
    """Returns the row with the names for Weights & Biases: train/loss, task/NAME/acc."""
    prefix = "/".join(filter(None, [row["kind"], row.get("name", "")]))
    numbers = {key: value for key, value in row.items() if key not in ("kind", "name", "step", "load", "source_loss") and value is not None}
    numbers |= {f"source_loss/{name}": loss for name, loss in row.get("source_loss", {}).items() if loss is not None}
    numbers |= {f"layer_{layer}": max(loads) for layer, loads in enumerate(row.get("load", []))}  # the busiest expert of each layer
    return {"step": row["step"], **{f"{prefix}/{key}": value for key, value in numbers.items()}}


class Board:
    """A run of Weights & Biases, whose _step counts the rows of the log that have a step."""

    def __init__(self, wandb, run, project, identity):
        # logs from before runs had identities: the name of the directory
        self.wandb, self.run, self.project, self.id = wandb, run, project, identity or run.name
        self.sent = Sent(run / "wandb.json", identity)
        self.board = None
        self.start()

    def open(self, **how):
        self.board = self.wandb.init(project=self.project, name=self.run.name, **how)
        self.board.define_metric("*", step_metric="step")

    def start(self):
        """Starts at the first row of the log. If it was cut, rewinds to the rows that are left."""
        self.seen = 0
        rows, time_s = rows_until(self.run / "log.jsonl", self.sent.time_s)
        if rows < self.sent.rows:
            self.rewind(rows, time_s)
        elif self.board is None:
            self.open(id=self.id, resume="allow")

    def rewind(self, rows, time_s):
        if self.board:
            self.board.finish()
        try:
            self.open(resume_from=f"{self.id}?_step={rows - 1}")
            self.sent.rows, self.sent.time_s = rows, time_s
        except Exception as error:  # of any kind: the feature is a preview
            print(f"warning: cannot rewind to row {rows}: {error}; steps that are repeated keep their first values",
                  file=sys.stderr)
            self.open(id=self.id, resume="allow")

    def tell(self, row):
        self.sent.time_s = max(self.sent.time_s, row.get("time", 0))
        if row["kind"] == "config":
            self.board.config.update(row["options"], allow_val_change=True)
        elif "step" in row:
            if self.seen >= self.sent.rows:
                self.board.log(numbers_of(row), step=self.seen)
                self.sent.rows = self.seen + 1
            self.seen += 1

    def close(self):
        self.board.finish()
        self.sent.keep()


def follow(wandb, run, project):
    board, last, is_start = None, "", False
    try:
        for row in log_rows(run / "log.jsonl"):
            if row is START:
                is_start = True
                continue
            if row is None:
                if last == "summary":
                    return
                if board:
                    board.sent.keep()
                time.sleep(1)
                continue
            if row["kind"] == "config" and board and board.sent.run != row.get("run"):
                board.close()  # a new run in the same directory
                board = None
            if board is None:
                board = Board(wandb, run, project, row.get("run"))
            elif is_start:
                board.start()
            is_start = False
            board.tell(row)
            last = row["kind"]
    except KeyboardInterrupt:
        pass
    finally:
        if board:
            board.close()


def main(arguments):
    if arguments == ["--help"]:
        print(__doc__.strip())
        return
    if len(arguments) not in (1, 2):
        print(__doc__.strip(), file=sys.stderr)
        sys.exit(2)
    run = Path(arguments[0]).resolve()
    if not (run / "log.jsonl").is_file():
        fail(f"{run / 'log.jsonl'}: no such file; wanted the --out of a run")
    try:
        import wandb
    except ImportError:
        fail("wandb is not installed for this Python: pip install wandb")
    follow(wandb, run, arguments[1] if len(arguments) == 2 else "pretrain.c")


if __name__ == "__main__":
    main(sys.argv[1:])
