#!/usr/bin/env python3
"""llama_cpp.py -- llama.cpp opens the GGUF files of every architecture and computes what we compute;
and the speed of an 8-bit model here and there.

    dev/ref/setup.sh llama && make train_gpt2
    build/llama/bin/python dev/ref/llama_cpp.py --check fixtures tokenizers families
    build/llama/bin/python dev/ref/llama_cpp.py --model out/quickstart

--check: the exit status is the verdict.
    fixtures     logits of dev/ref/fixtures/models, which transformers computed
    tokenizers   ids of texts that are hard to tokenize, which the libraries tokenizers and
                 sentencepiece computed (dev/ref/fixtures)
    families     a model of each architecture, trained here for a few steps: the loss of a text in each
                 precision of --export-gguf-dtype, and greedy texts

--model: the model is exported with --export-gguf-dtype q8_0, which has the blocks that --quantize
q8_0 computes with. Each measurement is a process of its own; the programs take turns, round after
round. Prints tok/s of prompt and text, median and range over the rounds, for each number of threads;
then of how many prompts the greedy texts are the same. llama.cpp loses most of its speed where other
work keeps a core busy: time it on a quiet machine.
"""

import argparse
import ctypes
import functools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import types
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


# ---- llama.cpp's library ----


class Words(ctypes.Structure):
    """Parameters of a model or a context: more than their bytes. They are passed on the stack, where llama.cpp reads only its own."""
    _fields_ = [("word", ctypes.c_int32 * 256)]


class Batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)), ("embd", ctypes.c_void_p),
                ("pos", ctypes.POINTER(ctypes.c_int32)), ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
                ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))), ("logits", ctypes.POINTER(ctypes.c_int8))]


# Words of llama_context_params that are set: name, place, default, value. Attention without blocks and
# with fp32 keys and values, so that logits differ by rounding of fp32 only.
CONTEXT = [("n_ctx", 0, 512, 256), ("n_batch", 1, 2048, 256), ("n_ubatch", 2, 512, 256), ("n_threads", 7, None, 1),
           ("n_threads_batch", 8, None, 1), ("flash_attn_type", 13, -1, 0), ("type_k", 26, 1, 0), ("type_v", 27, 1, 0)]
FUNCTIONS = {  # name: result, arguments; p: pointer, i: int32, s: bytes, b: bool
    "llama_model_default_params": (Words, ""), "llama_context_default_params": (Words, ""),
    "llama_model_load_from_file": ("p", ["s", Words]), "llama_init_from_model": ("p", ["p", Words]),
    "llama_model_get_vocab": ("p", "p"), "llama_vocab_n_tokens": ("i", "p"), "llama_vocab_is_eog": ("b", "pi"),
    "llama_tokenize": ("i", ["p", "s", "i", ctypes.POINTER(ctypes.c_int32), "i", "b", "b"]),
    "llama_token_to_piece": ("i", "pisiib"), "llama_model_chat_template": ("s", "ps"),
    "llama_batch_init": (Batch, "iii"), "llama_batch_free": (None, [Batch]), "llama_decode": ("i", ["p", Batch]),
    "llama_get_logits": (ctypes.POINTER(ctypes.c_float), "p"), "llama_free": (None, "p"), "llama_model_free": (None, "p"),
}
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "s": ctypes.c_char_p, "b": ctypes.c_bool}


@functools.cache
def library():
    """The functions, by name without llama_; errors of llama.cpp are printed."""
    import xllamacpp

    opened = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
    found = types.SimpleNamespace()
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(opened, name)
        function.restype = TYPES.get(result, result)
        function.argtypes = [TYPES.get(argument, argument) for argument in arguments]
        setattr(found, name.removeprefix("llama_"), function)
    defaults = found.context_default_params().word
    for name, place, default, _ in CONTEXT:
        if default not in (None, defaults[place]):
            sys.exit(f"error: xllamacpp {xllamacpp.__version__}: {name} is {defaults[place]}, wanted {default}: "
                     "another llama.h; dev/ref/setup.sh llama installs the version that is meant")

    @ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    def log(level, text, _):
        if level == 4:
            print(f"    {text.decode(errors='replace').rstrip()}", flush=True)

    found.log = log  # kept alive
    opened.llama_log_set(log, None)
    opened.llama_backend_init()
    return found


class Llama:
    """A GGUF file, opened by llama.cpp."""

    def __init__(self, path):
        lib = library()
        self.model = lib.model_load_from_file(str(path).encode(), lib.model_default_params())
        if not self.model:
            raise ValueError("llama.cpp does not open it")
        self.vocab = lib.model_get_vocab(self.model)
        self.V = lib.vocab_n_tokens(self.vocab)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        library().model_free(self.model)

    def ids(self, text, start=True):
        """Special tokens are read as text."""
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        return list(ids[:library().tokenize(self.vocab, data, len(data), ids, len(ids), start, False)])

    def text(self, ids):
        pieces, buffer = [], ctypes.create_string_buffer(256)
        for id in ids:
            count = library().token_to_piece(self.vocab, id, buffer, len(buffer), 0, False)
            pieces.append(buffer.raw[:count])
        return b"".join(pieces).decode(errors="replace")

    def logits(self, ids):
        """(T, V)"""
        with Context(self) as context:
            return context.read(ids)

    def greedy(self, ids, count):
        made = []
        with Context(self) as context:
            logits = context.read(ids)[-1]
            while len(made) < count:
                id = max(range(self.V), key=logits.__getitem__)
                if library().vocab_is_eog(self.vocab, id):
                    break
                made.append(id)
                logits = context.read([id])[-1]
        return made


class Context:
    """Keys and values of one text."""

    def __init__(self, model):
        params = library().context_default_params()
        for _, place, _, value in CONTEXT:
            params.word[place] = value
        self.V, self.at = model.V, 0
        self.context = library().init_from_model(model.model, params)
        if not self.context:
            raise ValueError("llama.cpp makes no context")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        library().free(self.context)

    def read(self, ids):
        """Adds tokens, and returns the logits after each."""
        batch = library().batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, id in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = id, self.at + i, 1, 1
            batch.seq_id[i][0] = 0
        status = library().decode(self.context, batch)
        library().batch_free(batch)
        if status:
            raise ValueError(f"llama_decode: {status}")
        self.at += len(ids)
        logits = library().get_logits(self.context)
        return [logits[i * self.V:(i + 1) * self.V] for i in range(len(ids))]


# ---- speed ----


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
