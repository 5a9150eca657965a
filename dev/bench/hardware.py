"""hardware.py -- the machines and the models of scaling.py and grids.py.

None of these rates was measured with this program. Replace them with your measurements, here or by --hardware.
"""
from dataclasses import dataclass

HARDWARE = dict(
    gpus_per_node=8,
    sms=132,
    node_gbps=300.0,  # GB/s per GPU and direction, all-gather or all-to-all inside a node (NVLink 4), large messages
    node_us=25.0,  # latency of these
    net_gbps=42.0,  # GB/s per GPU: 400 Gb/s InfiniBand at 85 %
    net_us=lambda nodes: 30.0 + 2.0 * nodes,  # all-to-all or all-gather over this many nodes
    gemm=600.0,  # TFLOP/s in matmuls
    attention=450.0,  # TFLOP/s in attention, without what a causal mask leaves out
    hidden_tp=0.0,  # share of the time of the tensor group's transfers that computation hides
    kernel_us=2.0,  # shortest interval between two kernels of a graph
    kernels_per_layer=27,
    memory_gbps=2700.0,  # of the GPU
    memory_gib=74.0,  # of the GPU, for a run: 80 GB less CUDA, NCCL and a reserve
    update_us=150.0,  # norm, agreement, one wait of the host
    pcie_gbps=50.0,  # GB/s each way, gen 5 x16
    host_gbps=200.0,  # of a node's memory
    nvme_gbps=6.0,  # of a node, for reading and for writing
)


@dataclass(frozen=True)
class Model:
    """Sizes of a model; by default a GPT-2. rate: tokens/s that one GPU is assumed to reach with a large micro-batch, if known."""

    layers: int
    channels: int
    seq_len: int
    rate: float = 0.0
    heads: int = 0  # 0: of 64 channels
    kv_heads: int = 0  # 0: as many
    hidden: int = 0  # 0: 4 C
    gates: int = 1  # matrices into the hidden layer
    vocab: int = 50304  # padded
    own_head: bool = False
    biases: bool = True

    @property
    def NH(self):
        return self.heads or self.channels // 64

    @property
    def KV(self):
        """Returns the columns of keys; those of values are as many."""
        return self.channels * (self.kv_heads or self.NH) // self.NH

    @property
    def F(self):
        return self.hidden or 4 * self.channels

    @property
    def block_weights(self):
        """Returns the elements of a block's matrices."""
        C = self.channels
        return C * (C + 2 * self.KV) + C * C + (self.gates + 1) * C * self.F

    @property
    def flops(self):
        """Returns the model's FLOP per token and token of context: 6 per weight, and attention's."""
        return 6 * (self.layers * self.block_weights + self.vocab * self.channels), 6 * self.layers * self.channels


def llama(layers, channels, heads, hidden):
    return Model(layers, channels, 8192, 0.0, heads, 8, hidden, 2, 128256, True, False)


MODELS = {
    "124M": Model(12, 768, 1024, 620e3),
    "350M": Model(24, 1024, 1024, 225e3),
    "774M": Model(36, 1280, 1024, 105e3),
    "1558M": Model(48, 1600, 1024, 54e3),
    "6.7B": Model(32, 4096, 2048, 13.1e3, 32),
    "13B": Model(40, 5120, 2048, 0.0, 40),
    "65B": Model(80, 8192, 2048, 0.0, 64),
    "llama-8B": llama(32, 4096, 32, 14336),
    "llama-70B": llama(80, 8192, 64, 28672),
    "llama-405B": llama(126, 16384, 128, 53248),
    "gpt3-175B": Model(96, 12288, 2048, 0.0, 96),
}
