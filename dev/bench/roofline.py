"""The least time of a training step on a card, kernel by kernel; only the standard library.

    python dev/bench/roofline.py --model d12 --batch 64 --card h200
    python dev/bench/roofline.py --model d12 --batch 64 --card h200 --measured step-kernels.csv

Nothing here is measured except the times of --measured. The program does a dry step on the simulated GPU (CUSIM_DRY,
CUSIM_TRACE of dev/cusim): train_gpt2cu shows which kernels and matmuls it launches at that size, `bench_gpu --list`
which launches an operation consists of and its bytes and FLOP by the functions in llmc/ (matmuls: every matrix read
or written once). The floor of an operation is the larger of bytes / bandwidth and FLOP / peak of the card. A kernel
that belongs to no operation ends the program.

--measured is the step-kernels.csv of gpu_report.sh (item `step`), with the same model, batch and --recompute. Its last
step is matched with the simulated one: our own kernels must be the same in the same order; the others between them
are cublasLt's.
"""

import argparse
import csv
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter, namedtuple

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")

CARDS = {"a100": "A100", "h100": "H100", "h200": "H200", "b200": "B200"}  # names in llmc's gpu_report.cuh
MEMORY_MIB = 1 << 20  # of the simulated card: more than any model here needs

STEP_ENDS_WITH = "update_kernel_"  # the last kernel of a step

Operation = namedtuple("Operation", "name shape flop bytes launches")
Row = namedtuple("Row", "name kernels shape kind count flop bytes members")  # members: indexes of the launches in the step


def fail(message):
    sys.exit(f"error: {message}")


# ---- the simulated step ----


def random_shard(path, tokens):
    """Writes a shard of random tokens (format: token_files.h)."""
    ids = os.urandom(2 * tokens)
    with open(path, "wb") as file:
        file.write(struct.pack("<3i", 20240520, 1, tokens) + bytes(1012))
        file.write(bytes(b & 127 if i % 2 else b for i, b in enumerate(ids)))


def program(precision, name):
    return os.path.join("build", "sim", precision, name)


def build(precision):
    commands = (["make", "-s", "sim", f"PRECISION={precision}"],
                ["dev/cusim/build.sh", "dev/bench/bench_gpu.cu", "plain", program(precision, "bench_gpu")])
    for command in commands:
        environment = dict(os.environ, CUSIM_FLAGS=f"-DPRECISION_{precision}")
        if subprocess.run(command, cwd=TOP, env=environment, check=False).returncode:
            fail(" ".join(command))


def simulate(args, directory):
    """Writes run.jsonl, two steps of training, and operations.jsonl into the directory."""
    shard = os.path.join(directory, "random.bin")
    random_shard(shard, 3 * args.batch * args.seq_len + 2)
    sizes = ["--model", args.model, "--batch", str(args.batch), "--seq-len", str(args.seq_len)]
    sizes += ["--logits-chunk", str(args.logits_chunk or args.batch * args.seq_len)]
    training = ["--train-data", shard, "--total-batch", str(args.batch * args.seq_len), "--steps", "2",
                "--recompute", str(args.recompute), "--graph", "off", "--autotune", "off", "--shuffle", "off",
                "--eval-every", "0", "--sample-every", "0", "--save-every", "0"]
    operations = os.path.join(directory, "operations.jsonl")
    commands = (("run.jsonl", ["train_gpt2cu", *sizes, *training]),
                ("operations.jsonl", ["bench_gpu", *sizes, "--list", operations]))
    for trace, command in commands:
        environment = dict(os.environ, CUSIM_DRY="1", CUSIM_MEMORY_MIB=str(MEMORY_MIB), XDG_CACHE_HOME=directory,
                           CUSIM_TRACE=os.path.join(directory, trace))
        command[0] = os.path.join(TOP, program(args.precision, command[0]))
        result = subprocess.run(command, env=environment, check=False, cwd=directory,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if result.returncode:
            fail(f"{' '.join(command)}:\n{result.stdout.decode()}")
    os.remove(shard)


def read_lines(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def short_name(kernel):
    """Returns the name without return type, template arguments and parameters, the form common to ncu and the simulator."""
    return re.split(r"[<(]", kernel.removeprefix("void "))[0].strip()


def signature(launch):
    """Returns what two launches of the same work have in common; None for copies."""
    if "kernel" in launch:
        return launch["kernel"], tuple(launch["grid"]), tuple(launch["block"])
    if "matmul" in launch:
        return ("matmul", tuple(launch["matmul"]), launch["order"], launch["epilogue"])
    return None


def read_operations(path):
    """Returns the operations of `bench_gpu --list`, each with the kernels and matmuls between it and the one before."""
    operations, launches = [], []
    for line in read_lines(path):
        if "operation" in line:
            operations.append(Operation(line["operation"], line["shape"], line["flop"], line["bytes"], tuple(launches)))
            launches = []
        elif signature(line):
            launches.append(signature(line))
    return operations


def read_step(path):
    """Returns the launches, copies and memsets of the last step."""
    lines = read_lines(path)
    ends = [i for i, line in enumerate(lines) if short_name(line.get("kernel", "")) == STEP_ENDS_WITH]
    if len(ends) < 2:
        fail(f"{path}: wanted two steps, each ending with {STEP_ENDS_WITH}, found {len(ends)}")
    return lines[ends[-2] + 1:ends[-1] + 1]


# ---- the rows ----


def matmul_rows(step, operations):
    """Returns a row for each shape, with bench_gpu's name of the operation that has only this matmul."""
    names = {}
    for operation in sorted(operations, key=lambda o: len(o.launches)):
        for launch in operation.launches:
            if launch[0] == "matmul":
                names.setdefault(launch, operation.name)
    rows = {}
    for i, line in enumerate(step):
        if "matmul" in line:
            key = (signature(line), line["adds"])
            rows.setdefault(key, []).append(i)
    made = []
    for (sign, adds), members in rows.items():
        line = step[members[0]]
        name = names.get(sign, "matmul") + (", added" if adds and "dweight" in names.get(sign, "") else "")
        shape = "{} x {} -> {}".format(*line["matmul"])
        made.append(Row(name, "cublasLt", shape, "matmul", len(members), line["flop"], line["bytes"], members))
    return made


def kernel_rows(step, operations):
    """Returns a row for each operation whose kernels are in the step."""
    of_launch, work, names, shapes = {}, {}, {}, {}
    for operation in operations:
        key = operation.launches
        if any(launch[0] == "matmul" for launch in key):
            continue
        if work.setdefault(key, (operation.flop, operation.bytes)) != (operation.flop, operation.bytes):
            fail(f"{operation.name} is launched as {names[key][0]}, but its work is another")
        names.setdefault(key, []).append(operation.name)
        shapes.setdefault(key, operation.shape)
        for launch in set(key):
            of_launch.setdefault(launch, []).append(key)
    members = {}
    for i, line in enumerate(step):
        if "kernel" in line:
            keys = set(of_launch.get(signature(line), []))
            if len(keys) != 1:
                where = f"grid {line['grid']}, block {line['block']}: {line['kernel']}"
                fail(f"bench_gpu --list has {'no' if not keys else 'more than one'} operation with this kernel: {where}")
            members.setdefault(keys.pop(), []).append(i)
    rows = []
    for key, found in members.items():
        counts, wanted = Counter(signature(step[i]) for i in found), Counter(key)
        times = {counts[launch] / wanted[launch] for launch in wanted}
        if len(times) != 1 or not times.copy().pop().is_integer():
            fail(f"{names[key][0]}: a step has not the same number of all of its kernels: {dict(counts)}")
        kernels = ", ".join(dict.fromkeys(short_name(launch[0]) for launch in key))
        flop, size = work[key]
        rows.append(Row(" / ".join(names[key]), kernels, shapes[key], "attention" if flop else "memory", int(times.pop()),
                        flop, size, found))
    return rows


def copy_rows(step):
    """Returns rows of copies and memsets inside the card's memory; those over the bus run beside the kernels."""
    found = {}
    for i, line in enumerate(step):
        if line.get("copy") == "on the device":
            found.setdefault(("copy", 2 * line["bytes"]), []).append(i)
        elif "memset" in line:
            found.setdefault(("memset", line["memset"]), []).append(i)
    return [Row(name, "", f"{size} bytes", "memory", len(members), 0, size, members)
            for (name, size), members in found.items()]


# ---- measured times ----


def read_ncu(path):
    """Returns the kernels of the last step that ncu measured: their short names and seconds, in order."""
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        lines = list(csv.DictReader(line for line in file if line.startswith('"')))
    kernels = [(short_name(line["Kernel Name"]), float(line["Metric Value"].replace(",", "")) * 1e-9)
               for line in lines if line["Metric Name"] == "gpu__time_duration.sum"]
    ends = [i for i, (name, _) in enumerate(kernels) if name == STEP_ENDS_WITH]
    if not ends:
        fail(f"{path}: no {STEP_ENDS_WITH}: not a whole step")
    return kernels[ends[-2] + 1 if len(ends) > 1 else 0:ends[-1] + 1]


def share_out(seconds, matmuls, step, floor):
    """Assigns times of cublasLt's kernels to the matmuls between two kernels of our own. A sum of parts (split-K)
    belongs to the matmul before it; if the numbers still differ, the matmuls share the time by their floors."""
    parts = []
    for name, s in seconds:
        if parts and len(seconds) > len(matmuls) and re.search("reduce|splitk", name, re.IGNORECASE):
            parts[-1] += s
        else:
            parts.append(s)
    if len(parts) == len(matmuls):
        return dict(zip(matmuls, parts))
    floors = [floor(step[i]["flop"], step[i]["bytes"]) for i in matmuls]
    return {i: sum(parts) * f / sum(floors) for i, f in zip(matmuls, floors)}


def measured_times(step, kernels, floor):
    """Returns the seconds by index in the step."""
    own = {short_name(line["kernel"]) for line in step if "kernel" in line}
    times, matmuls, foreign, at = {}, [], [], 0
    for i, line in enumerate(step):
        if "matmul" in line:
            matmuls.append(i)
        if "kernel" not in line:
            continue
        while at < len(kernels) and kernels[at][0] not in own:
            foreign.append(kernels[at])
            at += 1
        name = short_name(line["kernel"])
        if at == len(kernels) or kernels[at][0] != name:
            fail(f"ncu's kernel {at + 1} is {kernels[at][0] if at < len(kernels) else 'missing'}, the simulator's {name}")
        if foreign and not matmuls:
            fail(f"ncu's kernel {foreign[0][0]} before {name} is neither ours nor of a matmul")
        times.update(share_out(foreign, matmuls, step, floor))
        times[i] = kernels[at][1]
        matmuls, foreign, at = [], [], at + 1
    return times


# ---- the table ----


def datasheet(name, precision):
    """Returns the dense FLOP/s of a card and its bytes/s, from the trainer's own table. TF32 is half as fast as 16 bits."""
    with open(os.path.join(TOP, "llmc", "plan", "gpu_report.cuh"), encoding="utf-8") as file:
        found = re.search(r'\{"%s",\s*([0-9.]+),\s*([0-9.]+)\}' % re.escape(name), file.read())
    if not found:
        fail(f"gpu_report.cuh has no {name}")
    return float(found[1]) * (0.5e12 if precision == "FP32" else 1e12), float(found[2]) * 1e12


def print_table(args, rows, times, bandwidth, peak, floor):
    total = sum(row.count * floor(row.flop, row.bytes) for row in rows)
    measured_head = " measured us | ms | of the floor |" if times else ""
    print(f"| operation | shape | launches | MB | GFLOP | floor us | bound by | ms | share |{measured_head} kernels |")
    print("|---|---|---:|---:|---:|---:|---|---:|---:|" + ("---:|---:|---:|" if times else "") + "---|")
    for row in sorted(rows, key=lambda r: -r.count * floor(r.flop, r.bytes)):
        each = floor(row.flop, row.bytes)
        bound = "FLOP" if row.flop / peak > row.bytes / bandwidth else "bytes"
        cells = [row.name, row.shape, str(row.count), f"{row.bytes * 1e-6:.1f}", f"{row.flop * 1e-9:.1f}" if row.flop else "",
                 f"{each * 1e6:.1f}", bound, f"{row.count * each * 1e3:.3f}", f"{100 * row.count * each / total:.1f} %"]
        if times:
            s = sum(times.get(i, 0) for i in row.members)
            cells += [f"{s / row.count * 1e6:.1f}", f"{s * 1e3:.3f}", f"{100 * row.count * each / s:.0f} %"] if s else [""] * 3
        print("| " + " | ".join(cells + [row.kernels]) + " |")
    print("\n| | launches | GB | TFLOP | ms | share |" + (" measured ms | of the floor |" if times else ""))
    print("|---|---:|---:|---:|---:|---:|" + ("---:|---:|" if times else ""))
    for kind in ("matmul", "attention", "memory", "all"):
        some = [row for row in rows if kind in (row.kind, "all")]
        s = sum(row.count * floor(row.flop, row.bytes) for row in some)
        launches = sum(len(row.members) for row in some)
        took = sum(times.get(i, 0) for row in some for i in row.members) if times else 0
        print(f"| {kind} | {launches} | {sum(r.count * r.bytes for r in some) * 1e-9:.3f} "
              f"| {sum(r.count * r.flop for r in some) * 1e-12:.6f} | {s * 1e3:.3f} | {100 * s / total:.1f} % |"
              + (f" {took * 1e3:.3f} | {100 * s / took:.0f} % |" if took else ""))
    tokens = args.batch * args.seq_len
    print("\nTokens/s if every operation ran at this share of its ceiling: "
          + ", ".join(f"{percent} %: {tokens / total * percent / 100:,.0f}" for percent in args.efficiency) + ".")
    if times:
        took = sum(times.values())
        print(f"Measured, kernels alone: {took * 1e3:.3f} ms, {tokens / took:,.0f} tokens/s.")


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="d12")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--precision", choices=["BF16", "FP16", "FP32"], default="BF16")
    parser.add_argument("--recompute", type=int, choices=range(4), default=0)
    parser.add_argument("--card", choices=CARDS, default="h200")
    parser.add_argument("--bandwidth", type=float, help="TB/s instead of the data sheet's: bench_gpu's ceiling, for example")
    parser.add_argument("--tflops", type=float, help="instead of the data sheet's")
    parser.add_argument("--efficiency", type=int, nargs="+", default=[100, 90, 80, 70, 60], help="percent")
    parser.add_argument("--measured", help="step-kernels.csv of gpu_report.sh")
    parser.add_argument("--logits-chunk", type=int, help="tokens; a micro-batch if not given")
    parser.add_argument("--traces", help="folder with run.jsonl and operations.jsonl; created there if missing")
    return parser.parse_args()


def main():
    args = parse()
    name = CARDS[args.card]
    peak, bandwidth = datasheet(name, args.precision)
    bandwidth = args.bandwidth * 1e12 if args.bandwidth else bandwidth
    peak = args.tflops * 1e12 if args.tflops else peak
    with tempfile.TemporaryDirectory() as temporary:
        directory = os.path.abspath(args.traces or temporary)
        if not os.path.exists(os.path.join(directory, "operations.jsonl")):
            os.makedirs(directory, exist_ok=True)
            build(args.precision)
            simulate(args, directory)
        operations = read_operations(os.path.join(directory, "operations.jsonl"))
        step = read_step(os.path.join(directory, "run.jsonl"))

    def floor(flop, size):
        return max(flop / peak, size / bandwidth)

    rows = matmul_rows(step, operations) + kernel_rows(step, operations) + copy_rows(step)
    times = measured_times(step, read_ncu(args.measured), floor) if args.measured else {}
    print(f"## {args.model}, B={args.batch}, T={args.seq_len}, {args.precision}, --recompute {args.recompute}, {name}: one micro-step and "
          "its update\n")
    print(f"{bandwidth * 1e-12:g} TB/s, {peak * 1e-12:g} TFLOP/s. Arithmetic, not measured"
          + (", but for the columns that say so" if times else "") + ". MB, GFLOP and floor are of one launch.\n")
    print_table(args, rows, times, bandwidth, peak, floor)


if __name__ == "__main__":
    main()
