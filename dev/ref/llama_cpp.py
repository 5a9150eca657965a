#!/usr/bin/env python3
"""llama_cpp.py -- llama.cpp opens our GGUF files and computes what we compute; and how fast it is.

    dev/ref/setup.sh llama && make train_gpt2
    build/llama/bin/python dev/ref/llama_cpp.py --check fixtures tokenizers chats families
    build/llama/bin/python dev/ref/llama_cpp.py --model out/quickstart

--check: the exit status is the verdict.
    fixtures    logits of dev/ref/fixtures/models, which transformers computed
    tokenizers  ids of the texts in dev/ref/fixtures that are hard to tokenize, which the libraries
                tokenizers and sentencepiece computed
    chats       templates of chats
    families    a model of each architecture that is trained here for a few steps: the loss of a text,
                in each precision of --export-gguf-dtype, and greedy texts; of gptoss also the loss of
                a file whose experts llama.cpp has made MXFP4, as published files are

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
import math
import os
import platform
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import types
import unicodedata
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"
PROGRAMS = ["ours", "llama.cpp"]
PROMPTS = ["One day", "The king", "Lily", "On a sunny", "The old", "He said", "She had a", "In the", "They saw", "What"]
OUR_SPEED = re.compile(r"prompt: (\d+) tokens, ([\d.]+) tok/s; text: (\d+) tokens, ([\d.]+) tok/s")


def run(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {command[0]}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")
    return done


def ours(args, prompts, tokens, threads, work, quantize="q8_0"):
    """Texts, and tok/s of prompts and texts."""
    file = work / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    done = run([args.program, "--model", args.model, "--prompts", file, "--batch", 1, "--temperature", 0, "--tokens",
                tokens, "--threads", threads, "--quantize", quantize])
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
    """Parameters of a model or a context, with room to spare: they are passed in memory, of which llama.cpp reads its own part."""

    _fields_ = [("word", ctypes.c_int32 * 256)]


class Batch(ctypes.Structure):
    """llama_batch"""

    _fields_ = [("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)), ("embd", ctypes.c_void_p),
                ("pos", ctypes.POINTER(ctypes.c_int32)), ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
                ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))), ("logits", ctypes.POINTER(ctypes.c_int8))]


class Init(ctypes.Structure):
    """gguf_init_params"""

    _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]


# Words of llama_context_params that are set: name, place, default, value. Attention without blocks and
# with fp32 keys and values, so that logits differ by rounding of fp32 only.
CONTEXT = [("n_ctx", 0, 512, 256), ("n_batch", 1, 2048, 256), ("n_ubatch", 2, 512, 256), ("n_threads", 7, None, 1),
           ("n_threads_batch", 8, None, 1), ("flash_attn_type", 13, -1, 0), ("type_k", 26, 1, 0), ("type_v", 27, 1, 0)]
FUNCTIONS = {  # name: result, arguments; p: pointer, i: int32, l: int64, s: bytes, b: bool
    "llama_model_default_params": (Words, ""), "llama_context_default_params": (Words, ""),
    "llama_model_load_from_file": ("p", ["s", Words]), "llama_init_from_model": ("p", ["p", Words]),
    "llama_model_get_vocab": ("p", "p"), "llama_model_n_ctx_train": ("i", "p"), "llama_vocab_n_tokens": ("i", "p"), "llama_vocab_is_eog": ("b", "pi"),
    "llama_tokenize": ("i", ["p", "s", "i", ctypes.POINTER(ctypes.c_int32), "i", "b", "b"]),
    "llama_token_to_piece": ("i", "pisiib"), "llama_model_chat_template": ("s", "ps"),
    "llama_batch_init": (Batch, "iii"), "llama_batch_free": (None, [Batch]), "llama_decode": ("i", ["p", Batch]),
    "llama_get_logits": (ctypes.POINTER(ctypes.c_float), "p"), "llama_free": (None, "p"), "llama_model_free": (None, "p"),
    "gguf_init_from_file": ("p", ["s", Init]), "gguf_free": (None, "p"), "gguf_write_to_file": ("b", "psb"),
    "gguf_get_n_tensors": ("l", "p"), "gguf_get_tensor_name": ("s", "pl"), "gguf_get_data_offset": ("l", "p"),
    "gguf_get_tensor_offset": ("l", "pl"), "gguf_get_tensor_size": ("l", "pl"), "gguf_set_tensor_type": (None, "psi"),
    "ggml_quantize_chunk": ("l", "isplllp"),
}
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_int64, "s": ctypes.c_char_p, "b": ctypes.c_bool}


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
        self.context = lib.model_n_ctx_train(self.model)
        self.vocab = lib.model_get_vocab(self.model)
        self.V = lib.vocab_n_tokens(self.vocab)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        library().model_free(self.model)

    @property
    def template(self):
        return library().model_chat_template(self.model, None).decode()

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


# ---- checks ----

failures = 0


def expect(ok, what):
    global failures
    if not ok:
        failures += 1
        print(f"FAILED: {what}", flush=True)


def export(args, path, dtype, *options):
    """Writes a GGUF file; returns what was said about it, None if the model was refused."""
    command = [args.program, *options, "--steps", 0, "--samples", 0, "--export-gguf", path, "--export-gguf-dtype", dtype]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode and "error: --export-gguf: " not in done.stderr:
        sys.exit(done.stderr)
    return done.stderr if done.returncode == 0 else None


def tensors(path):
    """Numbers of a safetensors file, by name."""
    data = path.read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, tensor in json.loads(data[8:begin]).items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            found[name] = memoryview(data)[begin + start:begin + end].cast({"F32": "f", "I32": "i", "F64": "d"}[tensor["dtype"]])
    return found


# llama.cpp has other layers than these fixtures, and the exporter says so; `families` has such models in its form.
REFUSED = {"deepseek3_plain", "exaone4", "gemma2", "gemma3", "glm4moe_groups", "gptoss", "gptoss_mxfp4", "llmc_llama", "llmc_nanochat", "longrope_near", "nanochat", "olmo3", "olmoe", "qwen35", "smollm3", "yarn_exact"}


def check_fixtures(args, work):
    worst, names = 0, sorted(path.parent.name for path in (FIXTURES / "models").glob("*/config.json"))
    for name in names:
        path = work / f"{name}.gguf"
        if export(args, path, "f32", "--model", FIXTURES / "models" / name) is None:
            expect(name in REFUSED, f"fixture {name} is refused")
            continue
        expect(name not in REFUSED, f"fixture {name} is not refused: take it off the list REFUSED")
        expected = tensors(FIXTURES / "models" / name / "expected.safetensors")
        with Llama(path) as model:
            T = len(expected["tokens"]) // 2
            for b in range(2):  # llama.cpp knows no windows of most models: up to there
                rows = model.logits(expected["tokens"][b * T:(b + 1) * T].tolist()[:model.context])
                found = [x for row in rows for x in row]
                wanted = expected["logits"][b * T * model.V:][:len(found)].tolist()
                error = max(abs(x - y) for x, y in zip(found, wanted)) / max(map(abs, wanted))
                worst = max(worst, error)
                expect(error < 5e-6, f"fixture {name}, text {b}: logits differ by {error:.1e} of the largest")
    print(f"fixtures: {len(names) - len(REFUSED)} models, logits differ by at most {worst:.1e} of the largest")


# Texts of which llama.cpp makes other ids: it does not normalize (NFC), puts a blank before a text that starts with one
# and after each word that is cut out, cuts the longest of overlapping words, does not know words that remove the blanks
# after them, takes </s> for an end, and with gpt-4o other capitals than A to Z for letters without a case.
OTHER_TEXTS = {"qwen2": "NFC", "olmo": "NFC", "gptoss": "[a-z][\u00c0-\u00de]", "gemma.model": "\u2581|  zebra", "gemma.json": "\u2581", "mistral.json": r"^[ \u2581]|thou|\[INST\]",
               "always.json": r"^[ \u2581]|thou|<x>", "phi3.json": r"</s>|<\|mark\|>|<tag>|thou"}
NO_TOKENIZER = {"shuffled", "nanochat"}  # llama.cpp has no such pattern


def differs(rule, text):
    return unicodedata.normalize("NFC", text) != text if rule == "NFC" else bool(rule and re.search(rule, text))


def cases(directory, sums):
    """Names of tokenizers, and texts with a checksum of the ids of each (make_tokenizer_fixtures.py); `sums`: how many each has."""
    data = (FIXTURES / directory / "cases.bin").read_bytes()
    names, count = struct.unpack_from("<II", data, 8)
    at, found = 16 + 16 * names, []
    for _ in range(count):
        size, repeats = struct.unpack_from("<II", data, at)
        words = struct.unpack_from(f"<{names * sums}I", data, at + 8 + size)
        found.append((data[at + 8:at + 8 + size].decode() * repeats, words[::sums]))
        at += 8 + size + 4 * names * sums
    return [data[16 + 16 * i:32 + 16 * i].rstrip(b"\0").decode() for i in range(names)], found


def checksum(ids):
    value = 0xCBF29CE484222325
    for byte in struct.pack(f"<{len(ids)}H", *ids):
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value & 0xFFFFFFFF


SMALL = "--arch llama --layers 1 --channels 32 --heads 1 --seq-len 128 --batch 1".split()


def check_tokenizers(args, work):
    compared = []
    for directory, sums in (("tokenizers", 1), ("sentencepiece", 2)):
        names, texts = cases(directory, sums)
        for i, name in enumerate(names):
            path, file = work / "tokenizer.gguf", FIXTURES / directory / (name if "." in name else f"{name}.json")
            said = export(args, path, "f32", "--tokenizer", file, "--train-data", args.text, *SMALL)
            expect(("has no tokenizer" in said) == (name in NO_TOKENIZER), f"tokenizer {name}: {said}")
            if name in NO_TOKENIZER:
                continue
            with Llama(path) as model:
                good = [(text, sums) for text, sums in texts if len(text) < 3000 and not differs(OTHER_TEXTS.get(name), text)]
                bad = [text for text, sums in good if checksum(model.ids(text, start=False)) != sums[i]]
            expect(not bad, f"tokenizer {name}: other ids of {len(bad)} of {len(good)} texts, as of {bad[:1]!r}")
            compared.append(len(good))
    print(f"tokenizers: {len(compared)}, of {min(compared)} to {max(compared)} texts each")


def check_chats(args, work):
    formats = {template["format"] for template in json.loads((FIXTURES / "chat_formats" / "templates.json").read_text()).values()}
    for name in formats:
        out, path = work / f"chat_{name}", work / "chat.gguf"
        run([args.program, "--train-data", FIXTURES / "chats" / "documents.jsonl", "--val-data", FIXTURES / "chats" / "documents.jsonl",
             "--tokenizer", FIXTURES / "chat_formats" / "qwen2.json", "--chat", name, *SMALL, "--steps", 1, "--eval-every", 0,
             "--samples", 0, "--out", out, "--export-gguf", path])
        with Llama(path) as model:
            expect(model.template == (out / "step_00000001" / "chat_template.jinja").read_text(), f"template of {name}")
    print(f"chats: templates of {len(formats)} formats")


# ---- models of each architecture ----

TINY = "--layers 4 --channels 64 --heads 4 --seq-len 96 --batch 4 --total-batch 384 --steps 60 --lr 0.01".split()
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}


def long(original, pairs):
    return {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": original,
            "short_factor": [1 + i / 8 for i in range(pairs)], "long_factor": [2 + i for i in range(pairs)]}


FACTORS = {"attention_multiplier": 0.4, "embedding_multiplier": 2.0, "residual_multiplier": 0.6, "logits_scaling": 0.7}
# Name, tokenizer, options of the run that trains it, changes of its config.json after that. Each has the windows, layers
# without positions, bases, scalings and factors that llama.cpp knows of its architecture.
FAMILIES = [
    ("gpt2", "tokenizers/gpt2", "", {}),
    ("llama", "sentencepiece/llama2", "--kv-heads 2 --head-size 32 --own-head on --rope-base 500", {}),
    ("llama llama3", "tokenizers/llama3", "--kv-heads 2", {"rope_parameters": LLAMA3}),
    ("llama yarn", "tokenizers/smollm2", "", {"rope_parameters": YARN | {"attention_factor": 1.5, "beta_fast": 4.0}}),
    ("llama longrope", "bpe:400", "", {"rope_parameters": long(32, 8)}),
    ("llama longrope near", "bpe:400", "", {"rope_parameters": long(512, 8)}),
    ("mistral", "sentencepiece/never", "--kv-heads 2", {"rope_parameters": YARN}),
    ("qwen2", "tokenizers/qwen2", "--kv-heads 1", {"rope_parameters": YARN}),
    ("qwen3", "tokenizers/qwen2", "--kv-heads 2 --head-size 32", {"rope_parameters": YARN}),
    ("arcee", "tokenizers/olmo", "", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    ("mixtral", "sentencepiece/llama2", "--experts 4 --kv-heads 2", {}),
    ("qwen3moe", "tokenizers/qwen2", "--experts 4 --experts-used 3 --kv-heads 2 --head-size 32", {"rope_parameters": YARN}),
    ("olmoe", "tokenizers/olmo", "--experts 4 --own-head on", {}),
    ("glm4moe", "tokenizers/glm4", "--experts 4 --shared-hidden 256 --own-head on --head-size 32", {}),
    ("deepseek3", "tokenizers/qwen2", "--experts 4 --dense-layers 1 --head-size 32", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("olmo2", "tokenizers/olmo", "", {"rope_parameters": YARN}),
    ("olmo3", "tokenizers/olmo", "--window 9", {"rope_parameters": {
        "full_attention": YARN | {"rope_theta": 5e5}, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}}),
    ("granite", "tokenizers/gpt2", "--kv-heads 2 --head-size 32 --own-head on", FACTORS | {"rope_parameters": LLAMA3}),
    ("granite4", "tokenizers/gpt2", "--kv-heads 2", FACTORS),
    ("smollm3", "tokenizers/llama3", "--kv-heads 2", {"rope_parameters": YARN}),
    ("exaone4", "tokenizers/llama3", "--kv-heads 2", {"rope_parameters": LLAMA3}),
    ("exaone4 windows", "tokenizers/llama3", "--layers 64 --channels 32 --steps 20 --lr 0.002 --window 9", {"rope_parameters": LLAMA3}),
    ("gemma2", "sentencepiece/gemma", "--kv-heads 2 --head-size 32 --window 9 --window-pattern SL",
     {"attn_logit_softcapping": 5.0}),
    ("gemma3", "sentencepiece/gemma", "--layers 7 --kv-heads 2 --head-size 32 --window 9", {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}),
    ("gemma3 of 62", "sentencepiece/gemma", "--layers 62 --channels 32 --steps 20 --heads 2 --head-size 32 --window 9",
     {"query_pre_attn_scalar": 16}),
    ("phi3", "sentencepiece/llama2", "", {"rope_parameters": long(32, 6) | {"partial_rotary_factor": 0.75}}),
    ("glm4", "tokenizers/glm4", "--kv-heads 2 --own-head off", {}),
    ("gptoss", "tokenizers/gptoss", "--experts 4 --kv-heads 2 --head-size 32 --window 9", {"rope_parameters": YARN}),
    ("qwen35", "tokenizers/qwen2", "--kv-heads 2 --head-size 32", {}),
    ("qwen35 heads", "tokenizers/qwen2", "--model qwen35:4b --kv-heads 2 --head-size 64 --layer-types delta,full",
     {"max_position_embeddings": 96}),
    ("lfm2", "tokenizers/llama3", "--kv-heads 2 --layer-types 2xconv,full,conv", {"rope_parameters": YARN}),
]


NOT_WRITTEN = {"nanochat"}
# Largest relative difference of losses. llama.cpp rounds inputs of matmuls as it rounds their matrices, which may choose
# other experts (1e-4 of a loss was seen in f16); its GELU is a table in fp16 (5e-6).
DTYPES = {"f32": 2e-5, "f16": 1e-3, "bf16": 3e-3, "q8_0": 1e-2}


def trained(args, name, tokenizer, options, changes, work):
    """Trains a model; returns its directory."""
    out, named = work / name.replace(" ", "_"), tokenizer if ":" in tokenizer else FIXTURES / f"{tokenizer}.json"
    hidden = [] if name == "gpt2" else ["--hidden", 128]  # rows of whole blocks in q8_0
    run([args.program, "--arch", name.split()[0], *TINY, *hidden, *options.split(), "--train-data", args.text, "--tokenizer", named,
         "--eval-every", 0, "--samples", 0, "--threads", args.threads[-1], "--out", out])
    directory = next(out.glob("step_*"))
    config = json.loads((directory / "config.json").read_text())
    kept = {key: value for key, value in config.items() if "rope_parameters" not in changes or not key.startswith("rope_")}
    (directory / "config.json").write_text(json.dumps(kept | changes))
    return directory


def our_loss(args, work):
    """The loss of the text's first 96 tokens."""
    scores = work / "scores.jsonl"
    run([args.program, "--model", args.model, "--steps", 0, "--perplexity", args.text, "--out-scores", scores])
    return json.loads(scores.read_text().splitlines()[0])["endings"][0]["loss"]


def their_loss(model, text):
    ids = model.ids(text)[:97]
    return sum(math.log(sum(math.exp(x - row[id]) for x in row)) for row, id in zip(model.logits(ids[:-1]), ids[1:]))


def write_mxfp4(path, to):
    """Copies a file in fp32, its experts in MXFP4, by llama.cpp."""
    lib, data, kept = library(), path.read_bytes(), []
    file = lib.gguf_init_from_file(str(path).encode(), Init(True, None))
    first = lib.gguf_get_data_offset(file)
    places = [(lib.gguf_get_tensor_name(file, i), first + lib.gguf_get_tensor_offset(file, i), lib.gguf_get_tensor_size(file, i))
              for i in range(lib.gguf_get_n_tensors(file))]  # another type moves the tensors after it
    for name, begin, size in places:
        kept.append(data[begin:begin + size])
        if name.endswith(b"_exps.weight"):
            numbers, blocks = kept[-1], ctypes.create_string_buffer(size // 128 * 17)  # of 32 numbers, 17 bytes each
            expect(lib.ggml_quantize_chunk(39, numbers, ctypes.addressof(blocks), 0, 1, size // 4, None) == len(blocks), "MXFP4")
            lib.gguf_set_tensor_type(file, name, 39)
            kept[-1] = blocks.raw
    expect(lib.gguf_write_to_file(file, str(to).encode(), True), "llama.cpp writes the head of a file")
    lib.gguf_free(file)
    with open(to, "ab") as out:
        for tensor in kept:
            out.write(tensor + bytes(-len(tensor) % 32))


def check_mxfp4(args, work):
    path, made = work / "model.gguf", work / "mxfp4.gguf"
    export(args, path, "f32", "--model", args.model)
    write_mxfp4(path, made)
    before, args.model = our_loss(args, work), made
    loss = our_loss(args, work)
    with Llama(made) as model:
        error = abs(their_loss(model, Path(args.text).read_text()[:4000]) / loss - 1)
    expect(error < DTYPES["f16"] and loss != before, f"MXFP4: the loss {loss:.5f} differs by {error:.1e}; in f32 it is {before:.5f}")
    print(f"families: MXFP4: the loss is {loss:.4f}, in f32 {before:.4f}; llama.cpp's differs by {error:.1e}", flush=True)


def check_family(args, family, work):
    name, path, errors = family[0], work / "model.gguf", []
    args.model = trained(args, *family, work)
    loss = our_loss(args, work)
    for dtype, limit in DTYPES.items():
        expect(export(args, path, dtype, "--model", args.model) is not None, f"{name} is refused")
        with Llama(path) as model:
            errors.append(abs(their_loss(model, Path(args.text).read_text()[:4000]) / loss - 1))
            expect(errors[-1] < limit, f"{name}, {dtype}: the loss differs by {errors[-1]:.1e}, wanted below {limit}")
            if dtype == "f32" and name != "llama longrope":  # of short texts llama.cpp has the factors of long ones
                texts = ours(args, PROMPTS, 24, 1, work, "off")[0]
                others = [model.text(model.greedy(model.ids(prompt), 24)) for prompt in PROMPTS]
                differ = [pair for pair in zip(texts, others) if pair[0] != pair[1]]
                expect(len(differ) < 2, f"{name}: {len(differ)} greedy texts differ: {differ[:1]}")  # one: two tokens as likely
    if name == "gptoss":
        check_mxfp4(args, work)
    print(f"families: {name}: losses differ by", ", ".join(f"{error:.1e} ({dtype})" for dtype, error in zip(DTYPES, errors)), flush=True)


def check_families(args, work):
    words = re.search(r"--arch +([\w|\s]+?)\s+auto ", run([args.program, "--help", "arch"]).stdout)[1]
    absent = set(re.sub(r"\s", "", words).split("|")) - {name.split()[0] for name, *_ in FAMILIES} - NOT_WRITTEN
    expect(not absent, f"no family has --arch {', '.join(absent)}")
    for family in FAMILIES:
        check_family(args, family, work)


def check(args, work):
    for name in args.check:
        {"fixtures": check_fixtures, "tokenizers": check_tokenizers, "chats": check_chats, "families": check_families}[name](args, work)
    sys.exit(failures > 0)


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
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", nargs="+", choices=["fixtures", "tokenizers", "chats", "families"])
    what.add_argument("--model", help="a model whose tokenizer is a BPE: --out of a run, or a directory")
    parser.add_argument("--program", default="./train_gpt2")
    parser.add_argument("--text", default="README.md", help="what is trained on; its first words are the prompt that is timed")
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count()])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.check:
        with tempfile.TemporaryDirectory() as name:
            check(args, Path(name))
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
