"""grids.py -- grids of processes on paper: memory per GPU, the time of an update, and the fastest grids that fit.

    t, c, P, D   processes of a tensor, context, pipeline and data group; D is what the others leave
    N            tokens of a micro-batch in a context group's process, B T / c

The formulas are those of llmc/cost/links.h and cost.h, with fewer small terms; `--plan` of the trainer counts memory and
work exactly. test_scaling.sh compares them.
"""
import itertools
import math
from dataclasses import dataclass

from hardware import HARDWARE

LEVELS = ["0", "1", "2", "mlp", "3"]  # of --recompute
BLOCK = 4  # the last one
ELEMENT = 2  # bytes of a weight, a gradient and an activation
STATE = 10  # bytes of the optimizer's state of a weight: AdamW with split master weights
NEAR = 1.03  # a simpler grid that is slower by less wins


@dataclass(frozen=True)
class Plan:
    t: int = 1
    c: int = 1
    P: int = 1
    D: int = 1
    zero: int = 2
    shards: int = 1  # processes that share one copy of what ZeRO divides
    B: int = 1
    recompute: int = 0
    chunks: int = 1  # ranges of layers of a stage, in an interleaved pipeline; our program has one

    @property
    def grid(self):
        return self.t, self.c, self.P

    @property
    def kinds(self):
        """Returns how far a grid is from none: tensor parallelism counts least, pipelines most."""
        return (self.t > 1) + 2 * (self.c > 1) + 4 * (self.P > 1)

    @property
    def Z(self):
        """Returns the processes of the group in which ZeRO divides."""
        return self.D * self.c

    def words(self):
        kinds = [f"--{name}-parallel {n}" for name, n in (("tensor", self.t), ("context", self.c), ("pipeline", self.P)) if n > 1]
        return " ".join(kinds + [f"--zero {self.zero}", f"--shard-ranks {self.shards}", f"--batch {self.B}", f"--recompute {LEVELS[self.recompute]}"])


# ---- links ----


class Group:
    """Processes that communicate: `size` of them, whose ranks are `stride` apart. Times are in seconds."""

    def __init__(self, size, stride):
        h = HARDWARE
        self.size = size
        self.near = min(size, max(1, h["gpus_per_node"] // stride))
        inside = self.near == size
        self.start = (h["node_us"] if inside else h["net_us"](math.ceil(size / self.near))) * 1e-6
        self.node_rate, self.net_rate = h["node_gbps"] * 1e9, h["net_gbps"] * 1e9
        self.send_rate = self.node_rate if inside else self.net_rate

    def _time(self, nbytes, cards):
        """Links in a machine and cards work at the same time; what comes from other machines passes these cards."""
        if self.size == 1:
            return 0.0
        one = nbytes / self.size
        return max(one * (self.size - 1) / self.node_rate, one * (self.size - self.near) / (cards * self.net_rate)) + self.start

    def gather(self, nbytes):
        """Each ends with all `nbytes`; over machines each byte enters a machine once, by any of its cards."""
        return self._time(nbytes, self.near)

    def exchange(self, nbytes):
        """Each sends an equal part of `nbytes` to each."""
        return self._time(nbytes, 1)

    def send(self, nbytes):
        return nbytes / self.send_rate + self.start if self.size > 1 else 0.0


# ---- sizes ----


def stage_layers(model, P):
    """Returns the layers of the stage with the most work, as a number of blocks: the classifier weighs as some, too."""
    head = model.vocab * model.channels / model.block_weights
    if P == 1:
        return model.layers, model.layers + head
    loads = [(max(math.ceil((model.layers - last) / (P - 1)), last + head), math.ceil((model.layers - last) / (P - 1))) for last in range(1, model.layers - P + 2)]
    load, layers = min(loads)
    return layers, load


def weights(model, p):
    """Returns the elements of a block, and of the tensors outside of blocks, in one process."""
    C, F = model.channels, model.F
    small = model.biases * ((C + 2 * model.KV + F) / p.t + 2 * C) + (4 if model.biases else 2) * C
    outside = (1 + model.own_head) * model.vocab * C / p.t + model.biases * (model.seq_len * C) + 2 * C
    return model.block_weights / p.t + small, outside


def memory(model, p, seq_len, micro_steps, gradient=ELEMENT):
    """Returns the bytes per GPU of parameters, gradients, state and activations."""
    K, E = weights(model, p)
    layers, _ = stage_layers(model, p.P)
    all_, most = E + layers * K, max(E, K)
    two_blocks = E + 2 * K
    receive = gradient * most if p.Z > 1 else 0
    parameters = ELEMENT * (all_ if p.zero < 3 else two_blocks + all_ / p.shards)
    gradients = gradient * (all_ if p.zero < 2 else two_blocks) + receive
    # fp32 sums of gradients: slices, and shards if there are replicas
    sums = 0 if p.Z == 1 else 4 * all_ / p.Z + (4 * all_ / p.shards if p.shards < p.Z and p.zero > 0 else 0)
    state = STATE * all_ / (p.Z if p.zero > 0 else 1) + (sums if p.zero > 0 else 0)
    return parameters, gradients, state, activations(model, p, seq_len, micro_steps)


def activations(model, p, seq_len, micro_steps):
    C, F, G, t = model.channels, model.F, model.gates, p.t
    N = p.B * seq_len / p.c
    layers, _ = stage_layers(model, p.P)
    norms, attention, hidden = 2 * C, C + 2 * model.KV + C + C, G * F
    elements = [norms + attention + hidden + F, norms + attention + hidden, attention + hidden, attention, 0][p.recompute] + C
    kept = N * layers * elements / t * min(p.P, micro_steps)
    shared = N * ([0, F, norms + F, norms + hidden + F, norms + attention + hidden + F][p.recompute] + C + 2 * model.KV + G * F + 4 * C) / t
    chunk = max(1024, N / 8) if N > 1024 else N  # tokens of the classifier at a time
    logits = chunk * model.vocab / t
    gathered = 4 * N * C if t > 1 else 0  # two gathered, parts, and parts that arrive
    context = 4 * p.B * seq_len * model.KV / t if p.c > 1 else 0  # keys and values of all, and their gradients
    return ELEMENT * (kept + max(shared, logits) + gathered + context)


# ---- the time of an update ----


def passes(model, p, seq_len):
    """Returns the seconds of the forward and the backward pass of a micro-batch in the slowest stage, without transfers."""
    h = HARDWARE
    C, F, G, t = model.channels, model.F, model.gates, p.t
    N = p.B * seq_len / p.c
    layers, load = stage_layers(model, p.P)
    head = load - layers if p.P == 1 else 0  # the load of the slowest stage says it all
    blocks = layers if p.P == 1 else load
    gemm = 2 * N * model.block_weights / t / h["gemm"] / 1e12
    attention = 2 * N * seq_len * C / t / h["attention"] / 1e12
    # bytes of norms, the activation function and the residual stream, each way
    small = N / t / h["memory_gbps"] / 1e9
    norms, activation = 10 * C * ELEMENT, (G + 1) * F * ELEMENT
    launches = h["kernels_per_layer"] * h["kernel_us"] * 1e-6
    share = {3: G * C * F, BLOCK: model.block_weights - C * F}.get(p.recompute, 0) / model.block_weights
    again = gemm * share + (attention if p.recompute == BLOCK else 0) + small * (activation * (p.recompute >= 1) + norms * (p.recompute == 2 or p.recompute == BLOCK))
    forward = blocks * (gemm + attention + small * (norms + activation) + launches / 3)
    backward = blocks * (2 * gemm + 2.5 * attention + small * (2 * norms + 2 * activation) + again + launches * 2 / 3)
    return forward + head * gemm, backward + 2 * head * gemm


def tensor_time(model, p, seq_len):
    """Returns the seconds of the tensor group's transfers in a forward and a backward pass: 4 and 6 of 2 N C bytes a block."""
    if p.t == 1:
        return 0.0, 0.0
    group, nbytes = Group(p.t, 1), ELEMENT * p.B * seq_len / p.c * model.channels
    layers, _ = stage_layers(model, p.P)
    again = 2 if p.recompute == BLOCK else 0
    one = group.gather(nbytes)
    return (4 * layers + 2) * one, ((6 + again) * layers + 2) * one


def context_time(model, p, seq_len):
    """Returns the same of keys and values, and of their gradients."""
    if p.c == 1:
        return 0.0, 0.0
    group, nbytes = Group(p.c, p.t), 2 * ELEMENT * p.B * seq_len * model.KV / p.t
    layers, _ = stage_layers(model, p.P)
    return layers * group.gather(nbytes), layers * (group.gather(nbytes) + group.exchange(nbytes))


def data_time(model, p, forward, backward, micro_steps):
    """Returns the seconds of ZeRO's transfers that passes of this length do not hide."""
    if p.Z == 1:
        return 0.0
    K, E = weights(model, p)
    layers, _ = stage_layers(model, p.P)
    within, between = Group(p.shards, p.t), Group(p.Z // p.shards, p.t * p.shards)

    def start(group):
        return (layers - 1) * group.start if group.size > 1 else 0.0  # a message for each block

    def both(node, net):
        return max(node, net)  # they use other links

    blocks = ELEMENT * layers * K
    gather = within.gather(blocks) + start(within)
    reduce = within.exchange(blocks) + start(within)
    gather_net = between.gather(blocks / p.shards) + start(between)
    reduce_net = between.exchange(4 / ELEMENT * blocks / p.shards) + start(between)
    again = gather if p.zero == 3 else 0.0
    every = reduce if p.zero >= 2 else 0.0
    exposed = (micro_steps - 1) * (max(0, again - forward) + max(0, again + every - backward))
    exposed += max(0, both(gather, gather_net) - forward) + max(0, both(again + reduce, reduce_net) - backward)
    # outside of blocks nothing hides them
    outside = ELEMENT * E
    exposed += within.gather(outside) + within.exchange(outside)
    return exposed + between.gather(outside / p.shards) + between.exchange(4 / ELEMENT * outside / p.shards)


def update_time(model, p, sequences, seq_len):
    """Returns the seconds of an update, by kind."""
    h = HARDWARE
    M = math.ceil(sequences / (p.D * p.B))
    forward, backward = passes(model, p, seq_len)
    tensor = tensor_time(model, p, seq_len)
    context = context_time(model, p, seq_len)
    sends = 2 * Group(p.P, p.t * p.c * p.D).send(ELEMENT * p.B * seq_len / p.c * model.channels / p.t)
    data = data_time(model, p, forward + tensor[0] + context[0], backward + tensor[1] + context[1], M)
    micro = forward + backward + (1 - h["hidden_tp"]) * sum(tensor) + sum(context) + sends
    K, E = weights(model, p)
    layers, _ = stage_layers(model, p.P)
    owned = (E + layers * K) / (p.Z if p.zero > 0 else 1)
    return dict(
        passes=M * (forward + backward),
        tensor=M * (1 - h["hidden_tp"]) * sum(tensor),
        context=M * sum(context),
        pipeline=(p.P - 1) * micro / p.chunks + M * sends * p.chunks,
        data=data,
        update=32 * owned / h["memory_gbps"] / 1e9 + h["update_us"] * 1e-6,
    )


# ---- the search ----


def divisors(n, most=None):
    return [i for i in range(1, min(n, most or n) + 1) if n % i == 0]


def powers_of_2(first, last):
    return [first * 2**i for i in range(int(math.log2(last / first)) + 1)] if last >= first else []


def legal(model, W, seq_len, t, c, P):
    """Returns 1 if a run can be divided so."""
    heads = model.NH % t == 0 and (model.kv_heads or model.NH) % t == 0 and model.F % t == 0
    rows = t == 1 or (model.channels // t % 8 == 0 and model.F // t % 8 == 0)
    return heads and rows and W % (t * c * P) == 0 and model.layers % P == 0 and seq_len % (t * (2 * c if c > 1 else 1)) == 0


def shard_sizes(p):
    """Returns the processes that may share a copy: those of a machine, twice as many, ..., all."""
    first = max(1, min(p.Z, HARDWARE["gpus_per_node"] // p.t))
    return sorted(set([n for n in powers_of_2(first, p.Z) if p.Z % n == 0] + [p.Z]))


def grids(model, W, seq_len, kinds):
    machine = min(W, HARDWARE["gpus_per_node"])
    tensor = divisors(machine) if "t" in kinds else [1]
    context = powers_of_2(1, W) if "c" in kinds else [1]
    pipeline = divisors(model.layers, W) if "P" in kinds else [1]
    for P, c, t in itertools.product(pipeline, context, tensor):
        if legal(model, W, seq_len, t, c, P):
            yield t, c, P, W // (t * c * P)


def ways(model, W, sequences, seq_len, kinds="tcP", most_batch=32):
    """Yields (seconds, plan) of each way that fits into memory."""
    for t, c, P, D in grids(model, W, seq_len, kinds):
        for B in powers_of_2(1, most_batch):
            M = math.ceil(sequences / (D * B))
            if D > sequences or D * B > sequences or (P > 1 and M < 4 * P):
                continue
            stages = (2, 3) if P == 1 else (1,)
            for zero, recompute in itertools.product(stages, range(len(LEVELS))):
                for shards in shard_sizes(Plan(t, c, P, D)):
                    p = Plan(t, c, P, D, zero, shards, B, recompute)
                    if sum(memory(model, p, seq_len, M)) <= HARDWARE["memory_gib"] * 2**30:
                        yield sum(update_time(model, p, sequences, seq_len).values()), p


def best_of_each_grid(found):
    """Returns the fastest way of each grid, fastest first."""
    best = {}
    for seconds, p in found:
        if p.grid not in best or seconds < best[p.grid][0]:
            best[p.grid] = seconds, p
    return sorted(best.values(), key=lambda way: way[0])


def choose(best):
    """Returns the fastest, or a simpler grid that is almost as fast."""
    near = [way for way in best if way[0] <= NEAR * best[0][0]]
    return min(near, key=lambda way: (way[1].kinds, way[0]))


def mfu(model, tokens, seq_len, W, seconds):
    per_token, per_context = model.flops
    return (per_token + per_context * seq_len) * tokens / W / seconds / 989e12
