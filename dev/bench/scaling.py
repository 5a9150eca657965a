#!/usr/bin/env python3
"""scaling.py -- memory per GPU, and the speed of a run on many GPUs, on paper. Needs no GPU.

    scaling.py memory [--world 8]            bytes per GPU of parameters, gradients and optimizer state, by ZeRO stage
    scaling.py speed  [--total-batch 524288] efficiency at 1, 8, 16 ... 512 GPUs
    scaling.py offload                       the cost of offloading, and the total batch from which it is below 5 %

Memory is counted, and agrees with `--plan --num-processes N --zero S`. Speed is a model: a step is a timeline of three
resources, the GPU's compute, the links inside a node and the network between nodes. All its assumptions are in
HARDWARE and MODELS, and none of them was measured here: replace them with your measurements.
"""
import argparse
import math

HARDWARE = dict(
    gpus_per_node=8,
    sms=132,
    node_gbps=300.0,  # GB/s per GPU and direction, all-gather or all-to-all inside a node (NVLink 4), large messages
    node_us=25.0,  # latency of these
    net_gbps=42.0,  # GB/s per GPU: 400 Gb/s InfiniBand at 85 %
    net_us=lambda nodes: 30.0 + 2.0 * nodes,  # all-to-all or all-gather over this many nodes
    kernel_us=2.0,  # shortest interval between two kernels of a graph
    kernels_per_layer=27,
    memory_gbps=2700.0,  # of the GPU
    update_us=150.0,  # norm, agreement, one wait of the host
    pcie_gbps=50.0,  # GB/s each way, gen 5 x16
    host_gbps=200.0,  # of a node's memory
    nvme_gbps=6.0,  # of a node, for reading and for writing
)

# name: layers, channels, context, and tokens/s that one GPU is assumed to reach with a large
# micro-batch
MODELS = {
    "124M": (12, 768, 1024, 620e3),
    "350M": (24, 1024, 1024, 225e3),
    "774M": (36, 1280, 1024, 105e3),
    "1558M": (48, 1600, 1024, 54e3),
    "6.7B": (32, 4096, 2048, 13.1e3),
}
VP = 50304


def sizes(model):
    """Returns the elements of a block, and of the tensors outside of blocks."""
    L, C, T, _ = MODELS[model]
    return L, 12 * C * C + 13 * C, VP * C + T * C + 2 * C


def memory(model, stage, W, p=2, g=2, master=2):
    """Returns the bytes per GPU without activations: parameters of p bytes, gradients of g, fp32 state."""
    L, K, E = sizes(model)
    N = E + L * K
    state = 8 + master
    receive = g * max(E, K) if W > 1 else 0
    if stage == 0:
        return (p + g + state) * N + receive
    if stage == 1:
        return (p + g) * N + (state + 4) * N / W + receive
    working = g * (E + 2 * K)
    if stage == 2:
        return p * N + working + (state + 4) * N / W + receive
    return p * (E + 2 * K) + p * N / W + working + (state + 4) * N / W + receive


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
    L, C, T, rate = MODELS[model]
    _, K, E = sizes(model)
    local = min(W, h["gpus_per_node"])
    nodes = W // local
    M = math.ceil(D / (W * B * T))
    tokens = B * T
    ideal = tokens / rate
    full = wave_efficiency(65536, C)
    micro = max(ideal * full / wave_efficiency(tokens, C), (L * h["kernels_per_layer"] + 20) * h["kernel_us"] * 1e-6)
    head = min(0.5, VP * C / (VP * C + L * 12 * C * C))  # the classifier's share of the work
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "speed", "offload"])
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--total-batch", type=int, default=524288)
    parser.add_argument("--stage", type=int, default=2)
    a = parser.parse_args()
    if a.what == "memory":
        print(f"GiB per GPU at {a.world} GPUs, without activations (bf16 weights, split fp32 master)")
        print("model   parameters  stage 0      1      2      3   one GPU")
        for model in MODELS:
            L, K, E = sizes(model)
            row = [memory(model, s, a.world) / 2**30 for s in range(4)] + [memory(model, 0, 1) / 2**30]
            print(f"{model:6s} {(E + L * K) / 1e6:9.0f} M " + " ".join(f"{x:8.2f}" for x in row))
    elif a.what == "speed":
        worlds = [1, 8, 16, 32, 64, 128, 256, 512]
        print(f"efficiency at {a.total_batch} tokens an update, stage {a.stage} (tokens per GPU and update below)")
        print("model  " + " ".join(f"{w:>13d}" for w in worlds))
        for model in MODELS:
            cells = []
            for W in worlds:
                L, C, T, rate = MODELS[model]
                sequences = a.total_batch // T
                if W > sequences:
                    cells.append("-")
                    continue
                most = {768: 64, 1024: 64, 1280: 32, 1600: 32, 4096: 8}[C]
                B = max(1, min(most, sequences // W))
                step, wait = play(model, W, a.total_batch, B, a.stage)
                cells.append(f"{100 * a.total_batch / rate / W / step:.0f}% {1e3 * step:.1f} ms")
            print(f"{model:6s} " + " ".join(f"{c:>13s}" for c in cells))
    else:
        h = HARDWARE
        print("seconds of an update, and the total batch from which it is below 5 % of a step")
        for model in MODELS:
            L, K, E = sizes(model)
            N, rate = E + L * K, MODELS[model][3]
            for W in (1, 8):
                host = max(12 * N / W / h["pcie_gbps"] / 1e9, 24 * N / h["host_gbps"] / 1e9)
                nvme = 24 * N / h["nvme_gbps"] / 1e9
                batch = [seconds / 0.05 * rate * W for seconds in (host, nvme)]
                print(f"{model:6s} {W} GPU: host {host:6.2f} s {batch[0] / 1e6:7.2f}M tokens   nvme {nvme:6.1f} s {batch[1] / 1e6:7.1f}M tokens")


if __name__ == "__main__":
    main()
