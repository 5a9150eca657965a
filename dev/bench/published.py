"""published.py -- the model of time of grids.py beside figures that others have measured and published.

The rate of matmuls is fitted to one figure of each source and precision (*); the others follow from it. Attention has three
quarters of the rate in bf16, as in hardware.py. Where a source interleaves its pipeline or hides the transfers of tensor
groups, so does the model here, by 70 % and with 4 chunks where it does not say how many; our program does neither.
"""
from dataclasses import dataclass, replace

import grids
from grids import Plan
from hardware import HARDWARE, MODELS

SOURCES = {
    1: "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (500 W H100); tokens/s per GPU",
    2: "The Llama 3 Herd of Models, table 4 (bf16, 700 W H100); MFU in %",
    3: "Megatron-LM, README: strong scaling of GPT-3 175B, 1152 sequences (bf16 H100); MFU in %",
    4: "Megatron Bridge, performance summary 25.11 (fp8, DGX-H100); tokens/s per GPU",
}


@dataclass(frozen=True)
class Row:
    source: int
    what: str
    fit: str  # the rate that it uses; the first row of a rate is fitted
    published: float
    model: str
    seq_len: int
    sequences: int  # of an update
    plan: Plan
    hidden: float = 0.0

    @property
    def gpus(self):
        return self.plan.t * self.plan.c * self.plan.P * self.plan.D

    def predicted(self):
        """Returns tokens/s per GPU, or for a source of MFU that in %."""
        HARDWARE["hidden_tp"] = self.hidden
        model, tokens = MODELS[self.model], self.sequences * self.seq_len
        if self.source == 3:
            model = replace(model, vocab=131072)
        seconds = sum(grids.update_time(model, self.plan, self.sequences, self.seq_len).values())
        if self.source in (2, 3):
            return 100 * grids.mfu(model, tokens, self.seq_len, self.gpus, seconds)
        return tokens / self.gpus / seconds


def fsdp(D, B, recompute):
    return Plan(D=D, zero=3, shards=D, B=B, recompute=recompute)


def pipeline(t, c, P, D, zero=1, chunks=1, recompute=0):
    return Plan(t, c, P, D, zero, max(1, min(c * D, 8 // t)), 1, recompute, chunks)


ROWS = [
    Row(1, "8B FSDP, bf16", "torchtitan bf16", 6667, "llama-8B", 8192, 16, fsdp(8, 2, 2)),
    Row(1, "8B FSDP, bf16", "torchtitan bf16", 6514, "llama-8B", 8192, 256, fsdp(128, 2, 2)),
    Row(1, "8B FSDP, fp8", "torchtitan fp8", 8532, "llama-8B", 8192, 16, fsdp(8, 2, 2)),
    Row(1, "8B FSDP, fp8", "torchtitan fp8", 8380, "llama-8B", 8192, 256, fsdp(128, 2, 2)),
    Row(1, "70B TP 8 FSDP 32, fp8", "torchtitan fp8", 829, "llama-70B", 8192, 512, Plan(8, 1, 1, 32, 3, 32, 16, 4)),
    Row(1, "the same, async TP", "torchtitan fp8", 876, "llama-70B", 8192, 512, Plan(8, 1, 1, 32, 3, 32, 16, 4), 0.7),
    Row(1, "405B TP 8 PP 8 FSDP 8, 1F1B, async TP", "torchtitan fp8", 100, "llama-405B", 8192, 256, pipeline(8, 1, 8, 8, recompute=4), 0.7),
    Row(1, "8B CP 1, T 32k, fp8", "torchtitan fp8", 3890, "llama-8B", 32768, 8, fsdp(8, 1, 4)),
    Row(1, "8B CP 2, T 65k, fp8", "torchtitan fp8", 2540, "llama-8B", 65536, 4, replace(fsdp(4, 1, 4), c=2, shards=8)),
    Row(1, "8B CP 4, T 131k, fp8", "torchtitan fp8", 1071, "llama-8B", 131072, 2, replace(fsdp(2, 1, 4), c=4, shards=8)),
    Row(1, "8B CP 8, T 262k, fp8", "torchtitan fp8", 548, "llama-8B", 262144, 1, replace(fsdp(1, 1, 4), c=8, shards=8)),
    Row(2, "405B TP 8 PP 16 DP 64", "Llama 3", 43, "llama-405B", 8192, 2048, pipeline(8, 1, 16, 64, chunks=4)),
    Row(2, "the same, DP 128", "Llama 3", 41, "llama-405B", 8192, 2048, pipeline(8, 1, 16, 128, chunks=4)),
    Row(2, "CP 16, DP 8, T 131k", "Llama 3", 38, "llama-405B", 131072, 128, pipeline(8, 16, 16, 8, chunks=4)),
    Row(3, "175B TP 8 PP 12 DP 1", "Llama 3", 47, "gpt3-175B", 4096, 1152, pipeline(8, 1, 12, 1, chunks=4), 0.7),
    Row(3, "the same, DP 48", "Llama 3", 42, "gpt3-175B", 4096, 1152, pipeline(8, 1, 12, 48, chunks=4), 0.7),
    Row(4, "8B FSDP", "Megatron fp8", 14451, "llama-8B", 8192, 128, fsdp(8, 1, 0)),
    Row(4, "70B TP 4 PP 8, interleaved", "Megatron fp8", 1602, "llama-70B", 8192, 128, pipeline(4, 1, 8, 2, chunks=5), 0.7),
    Row(4, "405B TP 8 PP 8 CP 2, interleaved", "Megatron fp8", 292, "llama-405B", 8192, 512, pipeline(8, 2, 8, 8, chunks=8), 0.7),
]


ATTENTION = 0.75  # its rate in matmuls' bf16 rate
BF16 = {"torchtitan fp8": "torchtitan bf16", "Megatron fp8": "hardware.py"}  # rate that attention has where matmuls are in fp8


def use_rate(gemm, row, rates):
    HARDWARE["gemm"] = gemm
    HARDWARE["attention"] = ATTENTION * rates.get(BF16.get(row.fit), gemm)


def fitted_rate(row, rates):
    """Returns the rate of matmuls in TFLOP/s at which the model gives the published figure."""
    low, high = 10.0, 5000.0
    for _ in range(60):
        middle = (low + high) / 2
        use_rate(middle, row, rates)
        low, high = (middle, high) if row.predicted() < row.published else (low, middle)
    return low


def show():
    rates = {"hardware.py": HARDWARE["gemm"]}
    print(f"{'':46s}  GPUs published    model")
    for row in ROWS:
        is_fitted = row.fit not in rates
        if is_fitted:
            rates[row.fit] = fitted_rate(row, rates)
        use_rate(rates[row.fit], row, rates)
        ours = row.predicted()
        note = f"  * fitted: {rates[row.fit]:.0f} TFLOP/s in matmuls" if is_fitted else f"  {100 * (ours / row.published - 1):+.0f} %"
        print(f"[{row.source}] {row.what:41s} {row.gpus:6d} {row.published:9.0f} {ours:8.0f}{note}")
    for number, source in SOURCES.items():
        print(f"[{number}] {source}")
