#!/usr/bin/env python3
"""usage: wandb_follow.py RUN [PROJECT]

Sends RUN/log.jsonl to Weights & Biases, during the run or after it; PROJECT is pretrain.c unless given. The trainer
knows nothing of it and never waits for it. It ends at the run's summary. You can restart it at any time: RUN/wandb.json
records its progress, and nothing is sent twice. Steps that a resumed run repeats were sent already, and have the same
values. Needs `pip install wandb`; WANDB_MODE=offline only writes to disk.
"""
import json
import os
import sys
import time
from pathlib import Path


def fail(message, status=1):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


def log_rows(path):
    """Yields the rows of a log as they appear, and None at its current end. A resumed run truncates it, a new one replaces
    it: then it is read from the start."""
    log, line, number = None, "", 0
    while True:
        if log is None:
            log, line, number = open(path, encoding="utf-8", errors="replace"), "", 0
        line += log.readline()
        if line.endswith("\n"):
            number += 1
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and "kind" in row:
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


class Sent:
    """Position up to which a run has been sent: some rows of a step. Kept beside the log, for the next start."""

    def __init__(self, path, run):
        self.path, self.run = path, run
        self.step, self.rows = -1, 0
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["run"] == run:
                self.step, self.rows = kept["step"], kept["rows"]
        self.at, self.seen = None, 0  # step of the previous row, and the rows of this step so far

    def is_new(self, step):
        """Returns True if a row of this step, the next one of the log, has not been sent; then it counts as sent."""
        self.seen = self.seen + 1 if step == self.at else 1
        self.at = step
        if (step, self.seen) <= (self.step, self.rows):
            return False
        self.step, self.rows = step, self.seen
        return True

    def keep(self):
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"run": self.run, "step": self.step, "rows": self.rows}) + "\n")
        part.replace(self.path)


def numbers_of(row):
    """Returns the row with the names for Weights & Biases: train/loss, task/NAME/acc."""
    prefix = "/".join(filter(None, [row["kind"], row.get("name", "")]))
    left_out = ("kind", "name", "step")
    return {"step": row["step"], **{f"{prefix}/{key}": value for key, value in row.items() if key not in left_out and value is not None}}


class Board:
    """A run of Weights & Biases, and what it has received."""

    def __init__(self, wandb, run, project, identity):
        # logs from before runs had identities: the name of the directory
        self.board = wandb.init(project=project, name=run.name, id=identity or run.name, resume="allow")
        self.board.define_metric("*", step_metric="step")
        self.sent = Sent(run / "wandb.json", identity)

    def tell(self, row):
        if row["kind"] == "config":
            self.board.config.update(row["options"], allow_val_change=True)
        elif "step" in row and self.sent.is_new(row["step"]):
            self.board.log(numbers_of(row))

    def close(self):
        self.board.finish()
        self.sent.keep()


def follow(wandb, run, project):
    board, last = None, ""
    try:
        for row in log_rows(run / "log.jsonl"):
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
            board = board or Board(wandb, run, project, row.get("run"))
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
