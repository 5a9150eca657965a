"""One training step on the CPU: this program beside PyTorch, same model, same threads, same data;
both in fp32, and both with matmuls in bf16 (--matmul bf16; PyTorch's autocast).

    dev/ref/setup.sh && make train_gpt2 && build/venv/bin/python dev/bench/pytorch_cpu.py
    build/venv/bin/python dev/bench/pytorch_cpu.py --model llama:135m

The model is GPT-2 124M unless --model names another, which PyTorch trains as transformers' class
of it with scaled_dot_product_attention.

A step is everything from the batch to the updated parameters: forward, backward, clipping at norm
1, AdamW. Every system is a separate process, which trains from random weights on a shard of
random tokens. Systems with the same matmuls take turns: each does one step while the others are
stopped by SIGSTOP, so a disturbance of the machine affects all of them. They are all in memory at
once; if that is too small, name fewer systems. The first steps of each process (page faults,
compilation) are left out. Writes a table and all samples to dev/bench/results.
"""

import argparse
import array
import datetime
import itertools
import json
import math
import os
import platform
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from ctypes.util import find_library
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Sizes of the models; the trainer's presets have the same (llmc/model/presets.h). `base` is that
# of rotary positions, `scaling` what Llama 3 changes in them, `own_head` an output layer that is
# not the embedding, `more` the values of the class's configuration that the others do not give.
MODELS = {
    "gpt2:d12": dict(L=12, C=768, NH=12, max_T=1024, V=50257),
    "llama:135m": dict(L=30, C=576, NH=9, KV=3, F=1536, max_T=8192, V=49152, base=1e5),
    "llama:360m": dict(L=32, C=960, NH=15, KV=5, F=2560, max_T=8192, V=49152, base=1e5),
    "llama:1.1b": dict(L=22, C=2048, NH=32, KV=4, F=5632, max_T=2048, V=32000, base=1e4, own_head=True),
    "llama:1b": dict(L=16, C=2048, NH=32, KV=8, F=8192, max_T=131072, V=128256, base=5e5,
                     scaling=dict(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                  original_max_position_embeddings=8192)),
    "gemma3:270m": dict(L=18, C=640, NH=4, KV=1, HS=256, F=2048, max_T=32768, V=262144, family="Gemma3",
                        more=dict(sliding_window=512, rms_norm_eps=1e-6)),
    "smollm3:3b": dict(L=36, C=2048, NH=16, KV=4, F=11008, max_T=65536, V=128256, base=5e6, family="SmolLM3",
                       more=dict(pad_token_id=0, rms_norm_eps=1e-6)),
}
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 6e-4, (0.9, 0.95), 1e-8, 0.1, 1.0

# Systems and, for PyTorch, their mode of torch.compile (None is eager). Those in BF16 have matmuls
# in bf16, the others are fp32 throughout.
TORCH_MODES = {"eager": None, "compile": "default", "max-autotune": "max-autotune-no-cudagraphs"}
BF16 = " bf16"
SYSTEMS = [name + matmuls for matmuls in ("", BF16) for name in ("ours", *TORCH_MODES)]

POLL_S = 0.005  # interval of checks for the end of a step

# Keeps freed tensors mapped, else every step pays their page faults again: 20 to 30 % of an eager
# step. The first is for jemalloc, which is preloaded if installed, the others for glibc's malloc.
TORCH_ENV = {
    "MALLOC_CONF": "oversize_threshold:1,background_thread:true,dirty_decay_ms:-1,muzzy_decay_ms:-1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}


class Sizes:
    """Sizes of a model, with those that its name leaves out, and the layers that the command line
    gives."""

    def __init__(self, name, layers=None):
        m = MODELS[name]
        self.name, self.arch = name, name.split(":")[0]
        self.L, self.C, self.NH, self.max_T, self.V = layers or m["L"], m["C"], m["NH"], m["max_T"], m["V"]
        self.KV, self.F = m.get("KV", self.NH), m.get("F", 4 * self.C)
        self.HS, self.family, self.more = m.get("HS", self.C // self.NH), m.get("family", "Llama"), m.get("more", {})
        self.base, self.scaling, self.own_head = m.get("base"), m.get("scaling"), m.get("own_head", False)
        self.Vp = -(-self.V // 128) * 128

    def matmul_weights(self):
        """Returns the weights of all matmuls: the blocks and the output layer."""
        heads, gates = self.HS * 2 * (self.NH + self.KV), 1 if self.arch == "gpt2" else 2
        return self.L * self.C * (heads + (gates + 1) * self.F) + self.Vp * self.C

    def flop_per_step(self, B, T):
        """Returns the FLOP of a step. Per token, 6 for each weight of a matmul (with the
        classifier, without the embeddings), and attention counted as causal, without windows:
        half of 12*L*T channels of heads."""
        return B * T * (6 * self.matmul_weights() + 6 * self.L * self.NH * self.HS * T)

    def config(self):
        """Returns the values of transformers' configuration. Its vocabulary has the trainer's
        padding."""
        rope = {"rope_type": "llama3" if self.scaling else "default", "rope_theta": self.base, **(self.scaling or {})}
        positions = {"rope_parameters": rope} if self.base else {}
        return dict(family=self.family, vocab_size=self.Vp, hidden_size=self.C, intermediate_size=self.F,
                    num_hidden_layers=self.L, num_attention_heads=self.NH, num_key_value_heads=self.KV,
                    head_dim=self.HS, max_position_embeddings=self.max_T, rms_norm_eps=1e-5,
                    tie_word_embeddings=not self.own_head) | positions | self.more


# ----------------------------------------------------------------------------------------------------
# The PyTorch side; only this part, in a separate process, imports torch.


def peak_mib():
    """Returns the largest resident size of this process so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def torch_worker(name, layers, system, B, T, steps, threads, shard):
    """Trains `steps` steps; prints a line of JSON for each, as in the trainer's log, and one at
    the end."""
    import numpy as np
    import torch
    from torch_model import GPT2, Published, adamw

    sizes = Sizes(name, layers)
    is_bf16, mode = system.endswith(BF16), TORCH_MODES[system.removesuffix(BF16)]
    import_mib = peak_mib()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")  # fp32 like ours, no bf16 inside matmuls
    torch.manual_seed(0)
    if sizes.arch == "gpt2":
        model = GPT2(sizes.L, sizes.NH, sizes.C, sizes.max_T, sizes.Vp)
    else:
        model = Published(sizes.config())
    optimizer = adamw(model, LR, BETAS, EPS, WEIGHT_DECAY)
    if mode:
        model = torch.compile(model, mode=mode, dynamic=False)

    tokens = np.fromfile(shard, dtype="<u2", offset=1024)
    for step in range(steps):
        start = time.perf_counter()
        batch = torch.from_numpy(tokens[step * B * T : (step + 1) * B * T + 1].astype(np.int64))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            loss = model(batch[:-1].view(B, T), batch[1:].view(B, T))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss.item()
        ms = (time.perf_counter() - start) * 1e3
        print(json.dumps({"kind": "train", "loss": loss, "ms": ms}), flush=True)
    transformers = sys.modules.get("transformers")
    print(json.dumps({"kind": "end", "peak_mib": peak_mib(), "import_mib": import_mib, "version": torch.__version__,
                      "transformers": transformers.__version__ if transformers else None}))


# ----------------------------------------------------------------------------------------------------
# Measuring


class Racer:
    """A training process. It does a step with each turn() and is stopped in between."""

    def __init__(self, command, env, out, log):
        """Prepares a process, which starts with its first turn; `out` is a directory for its
        output, `log` the file to which it writes a line of JSON for each step."""
        self.command, self.env, self.out, self.log = [str(word) for word in command], env, out, log
        self.process, self.stopped_at, self.ms, self.losses = None, None, [], []

    def start(self):
        with open(self.out / "stdout", "w") as out, open(self.out / "stderr", "w") as err:
            self.process = subprocess.Popen(self.command, stdout=out, stderr=err, env=self.env, start_new_session=True)

    def rows(self, kind):
        """Returns the complete lines of this kind in the log."""
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else []
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def turn(self):
        """Lets the process do one step, and keeps its loss and milliseconds."""
        if self.process:
            os.killpg(self.process.pid, signal.SIGCONT)
        else:
            self.start()
        begin = time.perf_counter()
        row = self.next_row()
        ran_ms = (time.perf_counter() - begin) * 1e3
        os.killpg(self.process.pid, signal.SIGSTOP)
        # The process also measured the time for which it was stopped, unless that was between two
        # steps.
        stopped_ms = (begin - self.stopped_at) * 1e3 if self.stopped_at else 0
        self.stopped_at = time.perf_counter()
        self.ms.append(min(row["ms"], row["ms"] - stopped_ms, key=lambda ms: abs(ms - ran_ms)))
        self.losses.append(row["loss"])

    def next_row(self):
        """Waits for the next step in the log."""
        while len(rows := self.rows("train")) == len(self.ms):
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self.finish()
                sys.exit(f"error: {shlex.join(self.command)}: ended after {len(self.ms)} steps")
            time.sleep(POLL_S)
        return rows[len(self.ms)]

    def finish(self):
        """Lets it end, and checks its status. Returns its largest resident size in MiB."""
        os.killpg(self.process.pid, signal.SIGCONT)
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            errors = (self.out / "stderr").read_text()[-2000:]
            sys.exit(f"error: {shlex.join(self.command)}: exit status {self.process.returncode}\n{errors}")
        return usage.ru_maxrss / 1024

    def kill(self):
        if self.process and self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()  # its output directory is removed next


def our_racer(args, system, B, T, steps, shard, out):
    command = [args.ours.resolve(), "--model", args.model, "--layers", args.sizes.L, "--vocab-size", args.sizes.V, "--train-data", shard, "--batch", B, "--seq-len", T,
               "--steps", steps, "--eval-every", 0, "--sample-every", 0, "--eval-batches", 1,
               "--threads", args.threads, "--recompute", 2, "--out", out / "run",
               "--matmul", "bf16" if system.endswith(BF16) else "fp32"]
    return Racer(command, os.environ, out, out / "run" / "log.jsonl")


def torch_racer(args, system, B, T, steps, shard, out):
    env = dict(os.environ, **TORCH_ENV, OMP_NUM_THREADS=str(args.threads), LD_PRELOAD=args.preload)
    worker = json.dumps([args.model, args.sizes.L, system, B, T, steps, args.threads, str(shard)])
    return Racer([sys.executable, __file__, "--worker", worker], env, out, out / "stdout")


def race(args, systems, B, T, shard):
    """Trains with these systems in turns, a new process each: {system: result}."""
    steps = args.warmup + args.steps
    with tempfile.TemporaryDirectory() as tmp:
        racers = {}
        for system in systems:
            out = Path(tempfile.mkdtemp(dir=tmp))
            racer = our_racer if system.startswith("ours") else torch_racer
            racers[system] = racer(args, system, B, T, steps, shard, out)
        try:
            for _ in range(steps):
                for racer in racers.values():
                    racer.turn()
            results = {}
            for system, racer in racers.items():
                results[system] = {"ms": racer.ms, "losses": racer.losses, "peak_mib": racer.finish()}
                for end in racer.rows("end"):
                    results[system] |= end
            return results
        finally:
            for racer in racers.values():
                racer.kill()


def write_shard(path, ntok, V):
    """Writes random tokens, which have 16 bits: magic 20240520, version 1, their number; 256
    int32 of header, then uint16 each."""
    with open(path, "wb") as file:
        array.array("i", [20240520, 1, ntok] + [0] * 253).tofile(file)
        array.array("H", random.Random(0).choices(range(min(V, 1 << 16)), k=ntok)).tofile(file)


def others_cpu_s():
    """Returns the CPU seconds that processes other than this one and its finished children have
    used since boot."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def measure(args):
    """Returns all samples: {(B, T): {system: [one result per round]}}."""
    results = {shape: {system: [] for system in args.systems} for shape in args.shapes}
    with tempfile.TemporaryDirectory() as tmp:
        shard = Path(tmp) / "random.bin"
        longest = max(B * T for B, T in args.shapes)
        write_shard(shard, max(1 << 20, (args.warmup + args.steps) * longest + 1), args.sizes.V)
        for (B, T), turn, matmuls in itertools.product(args.shapes, range(args.rounds), ("", BF16)):
            systems = [system for system in args.systems if system.endswith(BF16) == bool(matmuls)]
            for system, result in race(args, systems, B, T, shard).items():
                first_loss = result["losses"][0]
                if not abs(first_loss - math.log(args.sizes.V)) < 1:
                    sys.exit(f"error: {system}: first loss {first_loss}, wanted about ln {args.sizes.V} = "
                             f"{math.log(args.sizes.V):.1f}")
                results[B, T][system].append(result)
                median = statistics.median(result["ms"][args.warmup :])
                print(f"B={B} T={T} round {turn + 1}: {system} {median:.0f} ms", file=sys.stderr)
    return results


# ----------------------------------------------------------------------------------------------------
# Reporting


def machine():
    info = Path("/proc/cpuinfo").read_text()

    def field(name):
        return info.split(f"{name}\t")[1].split(":", 1)[1].split("\n")[0].strip()

    isas = [isa for isa in ("amx_tile", "avx512f", "avx2", "sse2") if isa in field("flags").split()]
    return {
        "cpu": f"{field('model name')}, family {field('cpu family')} model {field('model')}",
        "isa": isas[0].removesuffix("f").removesuffix("_tile"),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.freedesktop_os_release()["PRETTY_NAME"] + ", Linux " + platform.release(),
    }


def first_line(*command):
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.split("\n")[0]


def summarize(args, B, T, rounds):
    """Returns the figures of one row, over the steps after the warm-up of all rounds."""
    ms = sorted(sample for result in rounds for sample in result["ms"][args.warmup :])
    median = statistics.median(ms)
    last = len(ms) - 1
    return {"median_ms": median, "p10_ms": ms[round(0.1 * last)], "p90_ms": ms[round(0.9 * last)],
            "tok_per_s": B * T / median * 1e3, "gflop_per_s": args.sizes.flop_per_step(B, T) / median / 1e6,
            "peak_mib": max(result["peak_mib"] for result in rounds)}


def table(args, results):
    """Returns the table in Markdown; the last column is the time relative to ours with the same
    matmuls, if measured."""
    columns = ["shape", "system", "ms per step", "p10 to p90", "tok/s", "GFLOP/s", "of FMA peak",
               "peak RSS MiB", "time / ours"]
    lines = [f"| {' | '.join(columns)} |", "|---|---|" + "---:|" * 7]
    for (B, T), systems in results.items():
        rows = {system: summarize(args, B, T, rounds) for system, rounds in systems.items()}
        for system, row in rows.items():
            name = system if system.startswith("ours") else f"PyTorch {system}"
            share = f"{row['gflop_per_s'] / args.peak:.0%}" if args.peak else "-"
            ours = "ours" + BF16 if system.endswith(BF16) else "ours"
            ratio = f"{row['median_ms'] / rows[ours]['median_ms']:.2f}" if ours in rows else "-"
            cells = [f"B={B} T={T}", name, f"{row['median_ms']:.0f}",
                     f"{row['p10_ms']:.0f} to {row['p90_ms']:.0f}", f"{row['tok_per_s']:.0f}",
                     f"{row['gflop_per_s']:.1f}", share, f"{row['peak_mib']:.0f}", ratio]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def best_lines(args, results):
    """Returns a line for each shape and kind of matmuls: the fastest of PyTorch."""
    lines = []
    for (B, T), systems in results.items():
        for matmuls in ("", BF16):
            ms = {system: summarize(args, B, T, rounds)["median_ms"] for system, rounds in systems.items()
                  if not system.startswith("ours") and system.endswith(BF16) == bool(matmuls)}
            if ms:
                best = min(ms, key=ms.get)
                lines.append(f"PyTorch's best at B={B} T={T} in {matmuls.strip() or 'fp32'}: {best}, {ms[best]:.0f} ms.")
    return "\n".join(lines)


def report(args, results, others):
    """Writes the report. `others`: the share of the machine used by other processes, which should
    be near 0."""
    host = machine()
    torch_rounds = [r for rows in results.values() for name in rows if not name.startswith("ours") for r in rows[name]]
    versions = {"ours": first_line("git", "describe", "--always", "--dirty") or "no commit",
                "cc": first_line("gcc", "--version"), "python": platform.python_version(),
                "torch": torch_rounds[0]["version"] if torch_rounds else "not measured"}
    transformers = f", transformers {torch_rounds[0]['transformers']}" if torch_rounds and args.sizes.arch != "gpt2" else ""
    command = shlex.join(["build/venv/bin/python", "dev/bench/pytorch_cpu.py", *sys.argv[1:]])
    title = "GPT-2 124M" if args.model == "gpt2:d12" else args.model
    if args.sizes.L != MODELS[args.model]["L"]:
        title += f" with {args.sizes.L} layers"
    date = datetime.date.today().isoformat()
    flop = ", ".join(f"{args.sizes.flop_per_step(B, T) / 1e9:.1f} G at B={B} T={T}" for B, T in results)
    import_mib = max((r["import_mib"] for r in torch_rounds), default=0)
    text = f"""\
# One training step of {title} on {host['cores']} {host['isa']} cores

{table(args, results)}

{best_lines(args, results)}

{date}, {host['cpu']}, {host['cores']} cores, {host['ram_gib']} GiB, {host['system']}.
{args.threads} threads; this program at {versions['ours']}, {versions['cc']};
PyTorch {versions['torch']}{transformers}, Python {versions['python']}, {args.preload or 'glibc malloc'}.
{args.rounds} rounds with new processes, a step in turns; {args.steps} steps counted after {args.warmup} that are not.
Other processes used {others:.0%} of the machine meanwhile{'' if others < 0.05 else ': NOT A QUIET MACHINE'}.
FLOP per step: tokens * (6 * {args.sizes.matmul_weights() / 1e6:.2f}M weights of matmuls + 6*L*T*channels of heads), {flop}.
FMA peak: {f'{args.peak:.0f} GFLOP/s' if args.peak else 'not given'}. Peak RSS is the largest of all rounds;
PyTorch's was {import_mib:.0f} MiB after `import torch` (the build on PyPI loads the CUDA libraries too).

    {command}
"""
    samples = [{"model": args.model, "B": B, "T": T, "system": name, **summarize(args, B, T, rounds), "rounds": rounds}
               for (B, T), systems in results.items() for name, rounds in systems.items()]
    data = {"date": date, "command": command, "machine": host, "versions": versions,
            "others": others, "torch_env": TORCH_ENV | {"LD_PRELOAD": args.preload}, "results": samples}
    model = "" if args.model == "gpt2:d12" else args.model.replace(":", "-") + "-"
    stem = args.results / f"{model}{host['cores']}-core-{host['isa']}-cpu-{date}"
    args.results.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".md").write_text(text)
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    print(text)
    print(f"{stem}.md and .json written", file=sys.stderr)


def parse_shape(text):
    B, T = text.lower().split("x")
    return int(B), int(T)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ours", type=Path, default=ROOT / "train_gpt2", help="the trainer")
    parser.add_argument("--model", choices=MODELS, default="gpt2:d12")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to try the script")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=[(4, 64), (1, 1024)], metavar="BxT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="counted steps of each process")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peak", type=float, help="fp32 FMA peak of these threads, GFLOP/s")
    parser.add_argument("--preload", default=find_library("jemalloc") or "", help="allocator for PyTorch")
    parser.add_argument("--results", type=Path, default=ROOT / "dev/bench/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.sizes = Sizes(args.model, args.layers)
    if args.worker:
        torch_worker(*json.loads(args.worker))
    elif any(name.startswith("ours") for name in args.systems) and not args.ours.is_file():
        sys.exit(f"error: {args.ours}: no such file (make train_gpt2)")
    else:
        start, others = time.monotonic(), others_cpu_s()
        results = measure(args)
        report(args, results, (others_cpu_s() - others) / (time.monotonic() - start) / os.cpu_count())


if __name__ == "__main__":
    main()
