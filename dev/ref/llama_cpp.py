#!/usr/bin/env python3
"""llama_cpp.py -- speed and greedy texts of an 8-bit model here and in llama.cpp.

    python3 -m venv build/llama && build/llama/bin/pip install xllamacpp
    make train_gpt2 && build/llama/bin/python dev/ref/llama_cpp.py --model out/quickstart

The model is exported with --export-gguf-dtype q8_0, which has the blocks that --quantize q8_0
computes with. Each measurement is a process of its own; the programs take turns, round after round.
Prints tok/s of prompt and text, median and range over the rounds, for each number of threads; then
of how many prompts the greedy texts are the same. llama.cpp loses most of its speed where other
work keeps a core busy: time it on a quiet machine.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = ["ours", "llama.cpp"]
PROMPTS = ["One day", "The king", "Lily", "On a sunny", "The old", "He said", "She had a", "In the", "They saw", "What"]
OUR_SPEED = re.compile(r"prompt: (\d+) tokens, ([\d.]+) tok/s; text: (\d+) tokens, ([\d.]+) tok/s")


def run(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {command[0]}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")
    return done


def ours(args, prompts, tokens, threads, work):
    """Texts, and tok/s of prompts and texts."""
    file = work / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    done = run([args.program, "--model", args.model, "--prompts", file, "--batch", 1, "--temperature", 0, "--tokens",
                tokens, "--threads", threads, "--quantize", "q8_0"])
    found = OUR_SPEED.search(done.stderr)
    texts = [json.loads(line)["text"] for line in done.stdout.splitlines()]
    return texts, float(found[2]), float(found[4])


def llama(args, prompts, tokens, threads, work):
    """The same, by a process of its own."""
    request = {"gguf": str(work / "model.gguf"), "prompts": prompts, "tokens": tokens, "threads": threads}
    done = run([sys.executable, __file__, "--worker", json.dumps(request)])
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["texts"], answer["read"], answer["made"]


def worker(request):
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = request["gguf"]
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    params.warmup = True
    server = xllamacpp.Server(params)
    texts, sums = [], dict.fromkeys(["prompt_n", "prompt_ms", "predicted_n", "predicted_ms"], 0)
    for prompt in request["prompts"]:
        answer = server.handle_completions({"prompt": prompt, "max_tokens": request["tokens"],
                                            "temperature": 0, "cache_prompt": False})
        answer = json.loads(answer) if isinstance(answer, (str, bytes)) else answer
        texts.append(answer["choices"][0]["text"])
        for key in sums:
            sums[key] += answer["timings"][key]
    print(json.dumps({"texts": texts, "read": 1e3 * sums["prompt_n"] / sums["prompt_ms"],
                      "made": 1e3 * sums["predicted_n"] / sums["predicted_ms"]}))


# Instructions that make products of 8 bits faster: as Linux names them, and as llama.cpp names what
# it was built for.
INSTRUCTIONS = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_vnni": "AVX512_VNNI", "avx_vnni": "AVX_VNNI", "amx_int8": "AMX_INT8"}


def print_lacking(system_info):
    """A wheel is built for old processors: says what this one has and llama.cpp does not use."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(re.findall(r"\w+", cpuinfo.read_text())) if cpuinfo.exists() else set()
    lacking = [name for flag, name in INSTRUCTIONS.items() if flag in flags and f"{name} = 1" not in system_info]
    if lacking:
        print(f"warning: this llama.cpp was built without {', '.join(lacking)}, which this processor has and train_gpt2 may use:"
              " compare with one that was built here")


def spread(samples):
    return f"{statistics.median(samples):8.1f}  ({min(samples):.1f} - {max(samples):.1f})"


def compare_speed(args, work):
    prompt = " ".join(Path(args.text).read_text().split()[:args.words])
    samples = {}
    for _ in range(args.rounds):
        for threads in args.threads:
            for name, measure in zip(PROGRAMS, [ours, llama]):
                _, read, made = measure(args, [prompt], args.tokens, threads, work)
                samples.setdefault((threads, name), []).append((read, made))
    print(f"{'threads':>7}  {'program':10}  {'prompt, tok/s: median (range)':34}  text, tok/s: median (range)")
    for (threads, name), pairs in samples.items():
        read, made = zip(*pairs)
        print(f"{threads:7}  {name:10}  {spread(read):34}  {spread(made)}")


def compare_texts(args, work):
    """Ours may end before llama.cpp's, which counts the end of the document as a token."""
    pairs = list(zip(PROMPTS, *(measure(args, PROMPTS, 64, args.threads[-1], work)[0] for measure in [ours, llama])))
    same = [prompt for prompt, a, b in pairs if a == b]
    print(f"greedy texts of 64 tokens: the same for {len(same)} of {len(pairs)} prompts")
    for prompt, a, b in pairs:
        if a != b:
            print(f"  {prompt!r}: same for {len(os.path.commonprefix([a, b]))} of {len(a)} characters")


def main():
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a model whose tokenizer is a BPE: --out of a run, or a directory")
    parser.add_argument("--program", default="./train_gpt2")
    parser.add_argument("--text", default="README.md", help="its first words are the prompt that is timed")
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count()])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    import xllamacpp

    version = run([args.program, "--version"]).stdout.splitlines()[0]
    print(f"{version}; llama.cpp of xllamacpp {xllamacpp.__version__}; {platform.machine()}, {os.cpu_count()} cores")
    print(f"llama.cpp: {xllamacpp.get_system_info()}")
    print_lacking(xllamacpp.get_system_info())
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        run([args.program, "--model", args.model, "--steps", 0, "--eval-every", 0, "--samples", 0, "--export-gguf",
             work / "model.gguf", "--export-gguf-dtype", "q8_0"])
        compare_speed(args, work)
        compare_texts(args, work)


if __name__ == "__main__":
    main()
