#!/usr/bin/env python3
"""wandb_follow.py RUN [PROJECT] -- sends what RUN/log.jsonl says to Weights & Biases, while the run goes on or afterwards.

The trainer knows nothing of it and never waits for it. Ends at the run's summary; start it again after a resume.
Wants `pip install wandb`; WANDB_MODE=offline writes to the disk only.
"""
import json
import sys
import time
from pathlib import Path

import wandb

if len(sys.argv) not in (2, 3):
    sys.exit(__doc__)
run = Path(sys.argv[1])
board = wandb.init(project=sys.argv[2] if len(sys.argv) > 2 else "pretrain.c", name=run.name, id=run.name, resume="allow")
board.define_metric("*", step_metric="step")
with open(run / "log.jsonl", encoding="utf-8") as log:
    line, kind = "", ""
    while kind != "summary":
        line += log.readline()
        if not line.endswith("\n"):  # not written yet
            time.sleep(1)
            continue
        told, line = json.loads(line), ""
        kind = told.pop("kind")
        if kind == "config":
            board.config.update(told["options"], allow_val_change=True)
        elif "step" in told:
            prefix = "/".join(filter(None, [kind, told.pop("name", "")]))
            numbers = {f"{prefix}/{key}": value for key, value in told.items() if key != "step" and value is not None}
            board.log({"step": told["step"], **numbers})
board.finish()
