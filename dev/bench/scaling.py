#!/usr/bin/env python3
"""scaling.py -- memory per GPU, and the speed of a run on many GPUs, on paper. Needs no GPU.

    scaling.py memory [--world 8]            bytes per GPU of parameters, gradients and optimizer state, by ZeRO stage
    scaling.py speed  [--total-batch 524288] efficiency at 1, 8, 16 ... 512 GPUs
    scaling.py parallel --gpus 64,256        the fastest grids of tensor, context and pipeline groups
    scaling.py parallel --published          the same model of time beside published figures
    scaling.py offload                       the cost of offloading, and the total batch from which it is below 5 %

Memory is counted, and agrees with `--plan --num-processes N --zero S`. Speed is a model. In `speed`, a step is a timeline
of three resources, the GPU's compute, the links inside a node and the network between nodes; in `parallel` it is a sum
(grids.py). The assumptions are in hardware.py, and none of them was measured with this program: replace them with your
measurements, as in --hardware gemm=550,net_gbps=11.
"""
import argparse
import math

import grids
import published
from grids import Plan
from hardware import HARDWARE, MODELS


def memory(model, stage, W, t=1, c=1, P=1):
    """Returns the bytes per GPU without activations, and without replicas."""
    plan = Plan(t, c, P, W // (t * c * P), stage, W // (t * P))
    return sum(grids.memory(model, plan, model.seq_len, 1)[:3])


def wave_efficiency(tokens, C):
    """Returns the share of the multiprocessors' time that matmuls of this many tokens use: the last wave of tiles is not full."""
    work = used = 0.0
    for columns in (3 * C, C, 4 * C, C):
        tiles = math.ceil(tokens / 128) * math.ceil(columns / 256)
        weight = tokens * columns
        work += weight
        used += weight * math.ceil(tiles / HARDWARE["sms"]) * HARDWARE["sms"] / tiles
    return work / used


class Link:
    """A resource that does one thing at a time."""

    def __init__(self):
        self.free = 0.0

    def run(self, ready, seconds):
        self.free = max(self.free, ready) + seconds
        return self.free


def play(model, W, D, B, stage):
    """Returns the seconds of a step, and those of its waits for communication."""
    h = HARDWARE
    L, C, T, rate = model.layers, model.channels, model.seq_len, model.rate
    K, E = grids.weights(model, Plan())
    local = min(W, h["gpus_per_node"])
    nodes = W // local
    M = math.ceil(D / (W * B * T))
    tokens = B * T
    ideal = tokens / rate
    full = wave_efficiency(65536, C)
    micro = max(ideal * full / wave_efficiency(tokens, C), (L * h["kernels_per_layer"] + 20) * h["kernel_us"] * 1e-6)
    head = min(0.5, model.vocab * C / (model.vocab * C + L * model.block_weights))  # the classifier's share of the work
    layer_f, layer_b = micro * (1 - head) / 3 / L, micro * (1 - head) * 2 / 3 / L

    def node_s(bytes_):
        return 0.0 if local == 1 else bytes_ * (local - 1) / local / h["node_gbps"] / 1e9 + h["node_us"] * 1e-6

    def net_s(bytes_):
        return 0.0 if nodes == 1 else bytes_ / local * (nodes - 1) / nodes / h["net_gbps"] / 1e9 + h["net_us"](nodes) * 1e-6

    node, net = Link(), Link()
    now = 0.0
    # After an update the parameters are gathered in the order in which the forward pass needs them.
    ready = {}
    for name, n in [("outer", E)] + [(l, K) for l in range(L)]:
        ready[name] = node.run(net.run(0.0, net_s(2 * n)), node_s(2 * n) if stage < 3 or name == "outer" else 0.0)
    for m in range(M):
        last = m == M - 1
        here = {}  # stage 3: when a block's parameters are in one of the two buffers
        for l in range(L):
            if m == 0:
                now = max(now, ready["outer"], ready[l])
            if stage == 3:
                for k in range(l, min(l + 2, L)):  # this block's, if not requested yet, and the next one's
                    here[k] = here[k] if k in here else node.run(now, node_s(2 * K))
                now = max(now, here[l])
            now += layer_f
        now += micro * head
        here = {L - 1: now, L - 2: now}
        reduced = []
        for l in reversed(range(L)):
            if stage == 3:
                for k in range(l, max(l - 2, -1), -1):
                    here[k] = here[k] if k in here else node.run(now, node_s(2 * K))
                now = max(now, here[l])
            if len(reduced) >= 2:
                now = max(now, reduced[-2])  # its buffer is needed again
            now += layer_b
            end = now
            if stage >= 2 or last:
                end = node.run(now, node_s(2 * K))
            if last:
                net.run(end, net_s(4 * K))
            reduced.append(end)
        if stage >= 2 or last:
            end = node.run(now, node_s(2 * E))
            if last:
                net.run(end, net_s(4 * E))
    now = max(now, node.free, net.free)
    now += 32.0 * (E + L * K) / W / h["memory_gbps"] / 1e9 + h["update_us"] * 1e-6
    return now, now - M * micro


def print_memory(a):
    print(f"GiB per GPU at {a.world} GPUs, without activations (bf16 weights, split fp32 master)")
    if a.tensor * a.context * a.pipeline > 1:
        print(f"tensor {a.tensor}, context {a.context}, pipeline {a.pipeline}")
    print("model      parameters  stage 0      1      2      3   one GPU")
    for name, model in MODELS.items():
        K, E = grids.weights(model, Plan())
        row = [memory(model, stage, a.world, a.tensor, a.context, a.pipeline) / 2**30 for stage in range(4)]
        row.append(memory(model, 0, 1) / 2**30)
        print(f"{name:10s} {(E + model.layers * K) / 1e6:9.0f} M " + " ".join(f"{x:8.2f}" for x in row))


def print_speed(a):
    worlds = [1, 8, 16, 32, 64, 128, 256, 512]
    print(f"efficiency at {a.total_batch} tokens an update, stage {a.stage} (tokens per GPU and update below)")
    print("model  " + " ".join(f"{w:>13d}" for w in worlds))
    for name, model in MODELS.items():
        if not model.rate:
            continue
        cells = []
        sequences = a.total_batch // model.seq_len
        for W in worlds:
            if W > sequences:
                cells.append("-")
                continue
            most = {768: 64, 1024: 64, 1280: 32, 1600: 32, 4096: 8}[model.channels]
            B = max(1, min(most, sequences // W))
            step, wait = play(model, W, a.total_batch, B, a.stage)
            cells.append(f"{100 * a.total_batch / model.rate / W / step:.0f}% {1e3 * step:.1f} ms")
        print(f"{name:6s} " + " ".join(f"{c:>13s}" for c in cells))


def print_grids(a, name, model, W):
    """Prints the fastest grids, and marks the one that --fit auto takes."""
    T = a.seq_len or model.seq_len
    best = grids.best_of_each_grid(grids.ways(model, W, a.total_batch // T, T, most_batch=a.batch))
    if not best:
        print(f"{name} on {W} GPUs: nothing fits into {HARDWARE['memory_gib']:g} GiB, or too few sequences")
        return
    chosen = grids.choose(best)[1]
    for seconds, p in best[: a.show] + [way for way in best[a.show :] if way[1] == chosen]:
        M = math.ceil(a.total_batch // T / (p.D * p.B))
        gib = sum(grids.memory(model, p, T, M)) / 2**30
        mark = "  <-" if p == chosen else ""
        share = 100 * grids.mfu(model, a.total_batch, T, W, seconds)
        print(f"{name} on {W} GPUs: {seconds:.4g} s, MFU {share:.0f} %, {gib:.1f} GiB: {p.words()}{mark}")
    if a.parts:
        parts = grids.update_time(model, chosen, a.total_batch // T, T)
        print("  " + ", ".join(f"{kind} {seconds:.3g} s" for kind, seconds in parts.items()))


def print_parallel(a):
    if a.published:
        published.show()
        return
    for name, model in MODELS.items():
        if name in a.models.split(","):
            for W in a.gpus.split(","):
                print_grids(a, name, model, int(W))


def print_offload():
    h = HARDWARE
    print("seconds of an update, and the total batch from which it is below 5 % of a step")
    for name, model in MODELS.items():
        if not model.rate:
            continue
        K, E = grids.weights(model, Plan())
        N, rate = E + model.layers * K, model.rate
        for W in (1, 8):
            host = max(12 * N / W / h["pcie_gbps"] / 1e9, 24 * N / h["host_gbps"] / 1e9)
            nvme = 24 * N / h["nvme_gbps"] / 1e9
            batch = [seconds / 0.05 * rate * W for seconds in (host, nvme)]
            print(f"{name:6s} {W} GPU: host {host:6.2f} s {batch[0] / 1e6:7.2f}M tokens   nvme {nvme:6.1f} s {batch[1] / 1e6:7.1f}M tokens")


def set_hardware(text):
    """Replaces rates: NAME=NUMBER,NAME=NUMBER."""
    for pair in filter(None, text.split(",")):
        name, _, value = pair.partition("=")
        if not isinstance(HARDWARE.get(name), (int, float)):
            raise SystemExit(f"error: --hardware {pair}; wanted NAME=NUMBER with one of {', '.join(k for k in HARDWARE if k != 'net_us')}")
        HARDWARE[name] = float(value)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "speed", "parallel", "offload"])
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--total-batch", type=int, default=524288)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--gpus", default="8,64", help="of `parallel`: numbers of GPUs")
    parser.add_argument("--models", default="1558M,6.7B,13B,65B", help="of `parallel`")
    parser.add_argument("--seq-len", type=int, default=0, help="of `parallel`; 0: the model's context")
    parser.add_argument("--batch", type=int, default=32, help="of `parallel`: the largest micro-batch")
    parser.add_argument("--show", type=int, default=5, help="of `parallel`: how many grids to print")
    parser.add_argument("--parts", action="store_true", help="of `parallel`: also what the time of the chosen grid consists of")
    parser.add_argument("--published", action="store_true", help="of `parallel`: the model beside published figures")
    parser.add_argument("--hardware", default="", help="other rates: NAME=NUMBER,NAME=NUMBER")
    a = parser.parse_args()
    set_hardware(a.hardware)
    if a.world % (a.tensor * a.context * a.pipeline):
        raise SystemExit(f"error: --world {a.world}; wanted a multiple of {a.tensor * a.context * a.pipeline}, the processes of a grid")
    unknown = [name for name in a.models.split(",") if name not in MODELS]
    if unknown:
        raise SystemExit(f"error: --models {unknown[0]}; wanted some of {', '.join(MODELS)}")
    {"memory": print_memory, "speed": print_speed, "parallel": print_parallel, "offload": lambda _: print_offload()}[a.what](a)


if __name__ == "__main__":
    main()
