"""tokenizers.py -- this program's tokenizer beside others from PyPI: one text, GPT-2's vocabulary, the same ids.

    make build/plain/bench_tokenizer
    python3 -m venv /tmp/peers && /tmp/peers/bin/pip install numpy tiktoken tokenizers gigatoken riptoken tokie
    /tmp/peers/bin/python dev/bench/tokenizers.py --vocabulary gpt2.tiktoken --text TEXT

Every figure comes from a separate process. The first pass over the text is cold, the second has seen all of it.
Each system gets the text in blocks of about 1 MiB, cut where tokens end; one block at a time on one core, as batches
on all cores. The hash of the ids must equal ours, or the system is reported as different. Beside the wall-clock time
it shows the CPU time of the process (of all its threads): on a machine with other work, that is the better figure.
The systems take turns. Left out are bpe-openai, which downloads its vocabulary from elsewhere, tuetoken, which does
not open GPT-2's tokenizer.json, and quicktok-v1, which does not know GPT-2's pattern. The result goes to
dev/bench/results.
"""

import argparse
import base64
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
EOT = "<|endoftext|>"
BATCH = 32  # blocks handed over together on all cores


def read_ranks(path):
    with open(path, "rb") as file:
        return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, file)}


def split_token(token, rank, ranks):
    """Returns the two tokens of lower ranks that merge into the token."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def write_tokenizer_json(path, ranks):
    """Writes the file for systems that read only Hugging Face's files."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in seen]
    spell = {byte: chr(byte) for byte in seen} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    spelled = {token: "".join(spell[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    merges = [[spelled[part] for part in split_token(token, rank, ranks)]
              for token, rank in sorted(ranks.items(), key=lambda item: item[1]) if len(token) > 1]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    eot = {"id": len(ranks), "content": EOT, "single_word": False, "lstrip": False, "rstrip": False,
           "normalized": False, "special": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
             "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
             "vocab": vocabulary | {EOT: len(ranks)}, "merges": merges}
    Path(path).write_text(json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": [eot],
                                      "normalizer": None, "pre_tokenizer": level, "post_processor": level,
                                      "decoder": level, "model": model}))


# ----------------------------------------------------------------------------------------------------
# The others. Each opens a tokenizer and returns two functions: the ids of one block, and those of a
# list of blocks on all cores, by the fastest way of its interface.


def open_tiktoken(vocabulary, hf_json, threads):
    import tiktoken

    encoding = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=read_ranks(vocabulary),
                                 special_tokens={EOT: 50256})
    return encoding.encode_ordinary, lambda blocks: encoding.encode_ordinary_batch(blocks, num_threads=threads)


def open_tokenizers(vocabulary, hf_json, threads):
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(hf_json)
    return (lambda block: tokenizer.encode_batch_fast([block])[0].ids,
            lambda blocks: [encoding.ids for encoding in tokenizer.encode_batch_fast(blocks)])


def open_gigatoken(vocabulary, hf_json, threads):
    import gigatoken

    tokenizer = gigatoken.Tokenizer.from_tiktoken(vocabulary, pretokenizer="gpt2", special_tokens={EOT: 50256})
    return tokenizer.encode, lambda blocks: tokenizer.encode_batch(blocks, parallel=True)


def open_riptoken(vocabulary, hf_json, threads):
    import riptoken

    core = riptoken.CoreBPE(read_ranks(vocabulary), {EOT: 50256}, PATTERN)
    return core.encode_ordinary, core.encode_ordinary_batch


def open_tokie(vocabulary, hf_json, threads):
    import tokie

    tokenizer = tokie.Tokenizer.from_json(hf_json)
    return (lambda block: tokenizer.encode_batch_flat([block], add_special_tokens=False)[0],
            lambda blocks: [tokenizer.encode_batch_flat(blocks, add_special_tokens=False)[0]])


PEERS = {"tiktoken": open_tiktoken, "tokenizers": open_tokenizers, "gigatoken": open_gigatoken,
         "riptoken": open_riptoken, "tokie": open_tokie}  # fmt: skip
SLOW = {"tiktoken", "tokenizers", "riptoken", "tokie"}  # they get only the first --slow-mb, or they would need hours


def blocks_of(data):
    """Returns blocks of about 1 MiB each, cut before a blank that follows another character."""
    border = re.compile(rb"[!-~](?=[ \n])")
    blocks, begin = [], 0
    while begin < len(data):
        found = border.search(data, begin + (1 << 20))
        end = found.end() if found else len(data)
        blocks.append(data[begin:end].decode())
        begin = end
    return blocks


def worker(name, threads, text, vocabulary, hf_json, passes):
    """Measures one other system and prints one line of JSON."""
    import numpy

    data = Path(text).read_bytes()
    blocks = blocks_of(data)
    encode, encode_batch = PEERS[name](vocabulary, hf_json, threads)
    groups = [[block] for block in blocks]
    if threads > 1:
        groups = [blocks[i : i + BATCH] for i in range(0, len(blocks), BATCH)]
    rates, tokens, digest = {}, 0, hashlib.sha256()
    for number in range(passes):
        wall_s = cpu_s = 0
        for group in groups:
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            results = [encode(group[0])] if threads == 1 else encode_batch(group)
            wall_s += time.perf_counter() - start_s
            cpu_s += time.process_time() - start_cpu_s
            for ids in results if number == 0 else ():
                array = numpy.asarray(ids).astype("<u2")
                tokens += len(array)
                digest.update(array.tobytes())
        for key, seconds in ((f"{'warm' if number else 'cold'}", wall_s), (f"{'warm' if number else 'cold'}_cpu", cpu_s)):
            rates[key] = len(data) / seconds * 1e-6
    print(json.dumps(rates | {"tokens": tokens, "hash": digest.hexdigest()}))


# ----------------------------------------------------------------------------------------------------
# Measuring


def run(command, threads):
    env = dict(os.environ, RAYON_NUM_THREADS=str(threads), OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive",
               TOKENIZERS_PARALLELISM="true" if threads > 1 else "false")
    cores = sorted(os.sched_getaffinity(0))[-threads:]
    return subprocess.run([str(word) for word in command], env=env, capture_output=True, text=True,
                          preexec_fn=lambda: os.sched_setaffinity(0, cores))


def measure_ours(args, threads, text, tmp):
    ids = Path(tmp) / "ids.bin"
    result = run([args.ours, "--text", text, "--vocabulary", args.vocabulary, "--threads", threads, "--passes", 2,
                  "--ids", ids], threads)
    if result.returncode:
        sys.exit(f"error: {args.ours}: {result.stderr}")
    values = dict(line.split() for line in result.stdout.splitlines())
    rates = {key: float(values[f"{key.split('_')[0]}_mb_per_{'cpu_' if 'cpu' in key else ''}s"])
             for key in ("cold", "warm", "cold_cpu", "warm_cpu")}
    return rates | {"tokens": int(values["tokens"]), "letter_ms": float(values["letter_ms"]),
                    "letter_cpu_ms": float(values["letter_cpu_ms"]), "open_ms": float(values["open_ms"])}


def measure_peer(args, name, threads, text, tmp):
    parameters = [name, threads, f"{tmp}/slow_text" if name in SLOW else str(text), args.vocabulary, f"{tmp}/tokenizer.json", 2]
    # -P: `import tokenizers` must not find this file
    result = run([sys.executable, "-P", __file__, "--worker", json.dumps(parameters)], threads)
    if result.returncode:
        return {"error": result.stderr.strip().split("\n")[-1][:200]}
    values = json.loads(result.stdout.splitlines()[-1])
    ids = (Path(tmp) / "ids.bin").read_bytes()[: 2 * values["tokens"]]
    return values | {"same": values["hash"] == hashlib.sha256(ids).hexdigest()}


def measure_training(args, text):
    result = run([args.ours, "--text", text, "--train", 50257, "--passes", 0], os.cpu_count())
    return {key: float(value) for key, value in map(str.split, result.stdout.splitlines())}


def others_cpu_s():
    """Returns the CPU seconds that processes other than this one and its finished children have used since boot."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def spread(results, key):
    values = sorted(result[key] for result in results)
    return f"{statistics.median(values):.0f} ({values[0]:.0f} to {values[-1]:.0f})"


def table(results, threads):
    lines = ["| system | cold MB/s | warm MB/s | cold MB per CPU s | warm MB per CPU s | ids |", "|---|---|---|---|---|---|"]
    for name, runs in results.items():
        if "error" in runs[0]:
            lines.append(f"| {name} | {runs[0]['error']} | | | | |")
            continue
        same = "the same" if all(r.get("same", True) for r in runs) else f"different, {runs[0]['tokens']}"
        cells = [spread(runs, key) for key in ("cold", "warm", "cold_cpu", "warm_cpu")]
        version = "" if name == "ours" else " " + importlib.metadata.version(name)
        lines.append(f"| {name}{version}{' *' if name in SLOW else ''} | {' | '.join(cells)} | {same} |")
    return f"## {threads} {'core' if threads == 1 else 'cores'}\n\n" + "\n".join(lines) + "\n"


def report(args, results, training, text_bytes, others):
    info = Path("/proc/cpuinfo").read_text()
    cpu = info.split("model name\t")[1].split(":", 1)[1].split("\n")[0].strip()
    family = [info.split(f"{field}\t")[1].split(":", 1)[1].split("\n")[0].strip() for field in ("cpu family", "model")]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT).stdout
    cc = subprocess.run(["cc", "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    date = datetime.date.today().isoformat()
    ours = results[1]["ours"]
    tables = "\n".join(table(rows, threads) for threads, rows in results.items())
    command = shlex.join(["dev/bench/tokenizers.py", *sys.argv[1:]])
    text = f"""\
# Text to GPT-2's tokens, {date}

{tables}
Median (lowest to highest) of {args.rounds} rounds, in turn, each a new process. {text_bytes / 1e6:.0f} MB of text, {ours[0]['tokens']} tokens
({text_bytes / ours[0]['tokens']:.2f} bytes each): {args.text_is}

\\* on the first {args.slow_mb} MB only.

A megabyte of one letter: {spread(ours, 'letter_ms')} ms, {spread(ours, 'letter_cpu_ms')} ms of CPU. Opening gpt2.tiktoken: {spread(ours, 'open_ms')} ms.
Training 50,257 ids on {training['text_bytes'] / 1e6:.0f} MB of text, {training['threads']:.0f} threads: {training['train_count_s']:.1f} s counting pieces, {training['train_merge_s']:.1f} s merging.

{cpu}, family {family[0]} model {family[1]}, {os.cpu_count()} cores, Linux {platform.release()}; this program at {commit.strip()}, {cc}; Python {platform.python_version()}.
Other processes used {others:.0%} of the machine meanwhile{'' if others < 0.05 else ': NOT A QUIET MACHINE, wall clock figures are too low'}.

    {command}
"""
    path = args.results / f"tokenizer-{date}.md"
    path.write_text(text)
    path.with_suffix(".json").write_text(json.dumps({"results": results, "training": training, "others": others}, indent=1) + "\n")
    print(text)
    print(f"{path} and .json written", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ours", type=Path, default=ROOT / "build/plain/bench_tokenizer")
    parser.add_argument("--vocabulary", default=os.environ.get("GPT2_VOCAB"), help="gpt2.tiktoken")
    parser.add_argument("--text", type=Path, help="UTF-8")
    parser.add_argument("--text-is", default="not described", help="for the report: what the text is")
    parser.add_argument("--train-text", type=Path, help="for the training; otherwise the same text")
    parser.add_argument("--mb", type=int, default=100, help="how much of the text")
    parser.add_argument("--slow-mb", type=int, default=10, help="how much for those below 50 MB/s")
    parser.add_argument("--systems", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=ROOT / "dev/bench/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(*json.loads(args.worker))
    if not args.vocabulary or not args.text:
        parser.error("wanted --vocabulary (or GPT2_VOCAB) and --text")
    start, others = time.monotonic(), others_cpu_s()
    results = {}
    with tempfile.TemporaryDirectory() as tmp:
        write_tokenizer_json(f"{tmp}/tokenizer.json", read_ranks(args.vocabulary))
        with open(args.text, "rb") as file:  # whole characters
            data = file.read(args.mb * 10**6).decode("utf-8", "ignore").encode()
        text = Path(tmp) / "text"
        text.write_bytes(data)
        slow = re.compile(rb"[!-~](?=[ \n])").search(data, min(args.slow_mb * 10**6, len(data) - 1000))
        (Path(tmp) / "slow_text").write_bytes(data[: slow.end()])
        for threads in sorted({1, os.cpu_count()}):
            results[threads] = {name: [] for name in ["ours", *args.systems]}
            for turn in range(args.rounds):
                for name, runs in results[threads].items():
                    if runs and "error" in runs[0]:
                        continue
                    result = measure_ours(args, threads, text, tmp) if name == "ours" else \
                        measure_peer(args, name, threads, text, tmp)
                    runs.append(result)
                    print(f"{threads} cores, round {turn + 1}: {name} "
                          + result.get("error", f"{result.get('cold', 0):.0f} MB/s cold"), file=sys.stderr)
        training = measure_training(args, args.train_text or text)
        report(args, results, training, len(data), (others_cpu_s() - others) / (time.monotonic() - start) / os.cpu_count())


if __name__ == "__main__":
    main()
