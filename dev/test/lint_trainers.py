#!/usr/bin/env python3
"""lint_trainers.py -- the two trainers are twins: the same functions, in the same order; for lint.sh.

A function that only one of them has is listed below with its reason.
"""
import re
import sys
from pathlib import Path

CPU, GPU = "train_gpt2.c", "train_gpt2.cu"
ONLY = {
    CPU: {
        "parameters_kind": "the memory report begins with it, before the map's scratch memory",
         "open_matmuls": "matmuls may read packed copies, which come before attention's memory",
        "recompute_level": "an MLP in bf16 computes GELU again",
    },
    GPU: {
        "update_micro_steps": "each micro-step moves what is offloaded",
        "open_state": "the optimizer's state may be offloaded",
        "open_decoder": "a step of decoding may be a graph",
        "open_update": "updates may run beside the backward pass",
        "open_operations": "operations have scratch memory of their own",
        "open_linear": "libraries have workspaces",
        "open_device": "clocks, caches and sensors need a GPU",
        "close_parts": "the teacher works on the GPU of its student",
        "parameters_at_layer": "ZeRO-3 gathers blocks into a few places",
        "stream_bytes": "residuals may be offloaded",
        "stream_codes": "matmuls in fp8 take codes that norms make",
        "model_push": "batches move to the GPU",
        "wait_for_buffer": "the reduction runs beside the backward pass",
        "bias_grad_into": "the gradient of a bias comes from another kernel",
        "fetch_residual": "residuals may be offloaded",
        "micro_step_begin": "a micro-step may be a graph",
        "last_bias_backward": "the gradient of a bias comes from another kernel",
        "choose_matmuls": "cuBLASLt's algorithms are timed",
        "model_square_sum": "the host reads it with the losses",
        "save_matmuls": "a checkpoint keeps the algorithms",
        "model_statistics": "the host reads them with the losses",
        "trainer_open": "C++17 has no designated initializers",
    },
}


def functions(path):
    """The names of the functions that a file defines, in order."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", Path(path).read_text(), flags=re.S)
    return re.findall(r"^(?:static |int |void )[^;={}()]*?\b(\w+)\([^;{}]*\) \{", text, re.M)


def problems():
    found = {path: functions(path) for path in ONLY}
    common = {}
    for path, other in ((CPU, GPU), (GPU, CPU)):
        own = set(ONLY[path])
        for name in own - set(found[path]):
            yield f"{path}: {name} is absent, but listed in dev/test/lint_trainers.py"
        for name in own & set(found[other]):
            yield f"{other}: {name} is listed as only in {path} in dev/test/lint_trainers.py"
        for name in set(found[path]) - set(found[other]) - own:
            yield f"{path}: {name} is not in {other}; wanted there, or in the list of dev/test/lint_trainers.py"
        common[path] = [name for name in found[path] if name in found[other]]
    for first, second in zip(common[CPU], common[GPU]):
        if first != second:
            yield f"{GPU}: {second} stands where {CPU} has {first}"
            break


def main():
    lines = sorted(problems())
    for line in lines:
        print(line)
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
