"""Trains GPT-2, or a model of transformers, in PyTorch on a GPU and prints a line of JSON: the peer for measuring the trainer.

    python dev/bench/pytorch_gpt2.py --model d12 --batch 64 --data shard.bin --sdpa best --compile default,off

The same model, batches and optimizer as `train_gpt2cu --shuffle off --schedule constant --warmup 0`: bf16
autocast (or fp32 with TF32 matmuls), scaled_dot_product_attention, vocabulary padded to 50304, fused AdamW,
torch.compile. --sdpa names the attention (auto: PyTorch's choice), or best: each one in turn; --compile names one or more
modes of torch.compile, or off. Each combination is a line; one that fails or does not fit is a line with its
error. A step is everything from the batch on the host to the updated weights, timed with events; nothing is read
back in between. With --init both start from the same weights. Without a GPU, --device cpu tests the script.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import time

# A cached graph would bring the attention that it was compiled with.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_model import GPT2, PUBLISHED, Published, adamw

# name: layers, heads, channels
MODELS = {"d6": (6, 6, 384), "d12": (12, 12, 768), "d24": (24, 16, 1024), "d36": (36, 20, 1280),
          "d48": (48, 25, 1600),
          "toy": (1, 2, 32)}
VP = 50304
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=[*MODELS, *PUBLISHED], default="d12")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a micro-batch")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--total-batch", type=int, default=0, help="tokens of an update; 0: one micro-batch")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--data", required=True, help="a shard of uint16 tokens (.bin)")
    parser.add_argument("--init", default="", help="first weights: a model file (.bin, fp32)")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--sdpa", choices=["auto", *SDPA, "best"], default="auto")
    parser.add_argument("--compile", default="default", help="modes of torch.compile and off, separated by commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--beta2", type=float, default=0.95)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()
    micro = args.batch * args.seq_len
    args.total_batch = args.total_batch or micro
    if args.init and args.model in PUBLISHED:
        parser.error("--init: wanted a GPT-2")
    if args.total_batch % micro:
        parser.error(f"--total-batch {args.total_batch}: wanted a multiple of {micro}")
    return args


class Batches:
    """Micro-batches in order, from pinned memory; each epoch starts over."""

    def __init__(self, args):
        self.B, self.T, self.device, self.next = args.batch, args.seq_len, args.device, 0
        self.tokens = np.memmap(args.data, dtype="<u2", mode="r", offset=1024)
        self.sequences = (len(self.tokens) - 1) // self.T
        if self.sequences < 1:
            raise SystemExit(f"error: {args.data}: {len(self.tokens)} tokens, wanted {self.T + 1}")

    def __call__(self):
        rows = [(self.next + b) % self.sequences * self.T for b in range(self.B)]
        self.next += self.B
        batch = torch.from_numpy(np.stack([self.tokens[r : r + self.T + 1] for r in rows]).astype(np.int64))
        if self.device == "cuda":
            batch = batch.pin_memory().to("cuda", non_blocking=True)
        return batch[:, :-1], batch[:, 1:]


class Clock:
    """Marks in the stream of the GPU, or points in time on the CPU; their distances in milliseconds."""

    def __init__(self, device):
        self.is_cuda, self.marks = device == "cuda", []

    def mark(self):
        if self.is_cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def ms(self):
        if self.is_cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:])]
        return [1e3 * (b - a) for a, b in zip(self.marks, self.marks[1:])]


def open_model(args):
    if args.model in PUBLISHED:
        return Published(PUBLISHED[args.model])
    model = GPT2(*MODELS[args.model], max(1024, args.seq_len), VP)
    if args.init:
        model.load(args.init)
    return model


def measure(args, sdpa, mode):
    """Trains with one attention and one mode of torch.compile; returns the fields that the line of JSON adds to their names."""
    torch.manual_seed(0)
    model = open_model(args)
    model.to(args.device)
    optimizer = adamw(model, args.lr, (0.9, args.beta2), 1e-8, args.weight_decay)
    compiled = model if mode == "off" else torch.compile(model, mode=mode, dynamic=False)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]
    autocast = torch.autocast(args.device, dtype=dtype, enabled=dtype != torch.float32)
    scaler = torch.amp.GradScaler(args.device, enabled=dtype == torch.float16)

    batches, clock, losses = Batches(args), Clock(args.device), []
    micro_steps = args.total_batch // (args.batch * args.seq_len)
    clock.mark()
    with contextlib.nullcontext() if sdpa == "auto" else sdpa_kernel(SDPA[sdpa]):
        for _ in range(args.steps):
            total = torch.zeros((), device=args.device)
            for _ in range(micro_steps):
                x, y = batches()
                torch.compiler.cudagraph_mark_step_begin()
                with autocast:
                    loss = compiled(x, y)
                scaler.scale(loss / micro_steps).backward()
                total += loss.detach() / micro_steps
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            losses.append(total)
            clock.mark()
    ms = clock.ms()
    peak_mb = torch.cuda.max_memory_reserved() / 2**20 if args.device == "cuda" else None
    return {"ms": ms, "losses": [loss.item() for loss in losses], "peak_mb": peak_mb}


def forget():
    """Frees what the last combination left, so that the next one starts as in a new process."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main():
    args = parse()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    medians = []
    for mode in args.compile.split(","):
        for sdpa in SDPA if args.sdpa == "best" else [args.sdpa]:
            line = {"system": "PyTorch " + torch.__version__, "sdpa": sdpa, "compile": mode, "dtype": args.dtype,
                    "model": args.model}
            try:
                line |= measure(args, sdpa, mode)
                medians.append(statistics.median(line["ms"]))
            except Exception as error:  # does not fit, does not exist, does not compile: the next one may
                line["error"] = f"{type(error).__name__}: {error}".split("\n")[0].replace('"', "'")[:200]
            print(json.dumps(line), flush=True)
            forget()
    if not medians:
        raise SystemExit("error: no combination ran")


if __name__ == "__main__":
    main()
