"""Writes dev/ref/fixtures/delta: the short convolution, the gated delta rule and the gated norm by transformers' functions,
with gradients by PyTorch's automatic differentiation.

    dev/ref/setup.sh && build/venv/bin/python dev/ref/make_delta_fixtures.py

Inputs are streams of uniform() (inputs.py). qwen3_5.bin has the layer of Qwen 3.5 between its linear layers, of T tokens; the
recurrence and the chunks of transformers must agree. lfm2.bin has the convolution of LFM 2 with its first linear layer. All
numbers are fp32, the results first, then the gradients in the order of the inputs.
"""

from pathlib import Path

import torch
from transformers.models.lfm2.modeling_lfm2 import Lfm2Config, Lfm2ShortConv
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from inputs import uniform

OUT = Path(__file__).parent / "fixtures" / "delta"


def tensor(shape, stream, scale=1.0):
    return (torch.tensor(uniform(shape, stream), dtype=torch.float32) * scale).requires_grad_()


def write(name, results):
    with open(OUT / name, "wb") as file:
        for x in results:
            file.write(x.detach().contiguous().numpy().astype("<f4").tobytes())


def qwen3_5(rule, T=70, Hk=1, Hv=2, dk=8, dv=8):
    channels = 2 * Hk * dk + Hv * dv
    x, taps, b, a = tensor((T, channels), 1), tensor((channels, 4), 2), tensor((T, Hv), 3), tensor((T, Hv), 4)
    A_log, dt_bias, z, weight = tensor((Hv,), 5), tensor((Hv,), 6), tensor((T, Hv * dv), 7), tensor((dv,), 8)
    conv = qwen.causal_conv1d_fn(x.T[None], taps, None, "silu")[0].T
    q, k, v = torch.split(conv, [Hk * dk, Hk * dk, Hv * dv], dim=-1)
    g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    out, _ = rule(q.view(1, T, Hk, dk), k.view(1, T, Hk, dk), v.view(1, T, Hv, dv), g[None], b.sigmoid()[None],
                  use_qk_l2norm_in_kernel=True)
    norm = qwen.Qwen3_5RMSNormGated(dv)
    norm.weight.data = weight.data
    out = norm(out.reshape(T * Hv, dv), z.reshape(T * Hv, dv)).reshape(T, Hv * dv)
    out.backward(torch.tensor(uniform((T, Hv * dv), 9), dtype=torch.float32))
    return [out, x.grad, taps.grad, b.grad, a.grad, A_log.grad, dt_bias.grad, z.grad, norm.weight.grad]


def lfm2(T=9, C=4, taps=3):
    layer = Lfm2ShortConv(Lfm2Config(hidden_size=C, conv_L_cache=taps, conv_bias=True, num_hidden_layers=1, layer_types=["conv"]), 0)
    layer.in_proj.weight.data, layer.in_proj.bias.data = tensor((3 * C, C), 1).data, tensor((3 * C,), 2).data
    layer.conv.weight.data, layer.conv.bias.data = tensor((C, 1, taps), 3).data, tensor((C,), 4).data
    layer.out_proj.weight.data, layer.out_proj.bias.data = torch.eye(C), torch.zeros(C)
    h = tensor((T, C), 5)
    out = layer(h[None])[0]
    out.backward(torch.tensor(uniform((T, C), 6), dtype=torch.float32))
    return [out, layer.in_proj.weight.grad, layer.in_proj.bias.grad, layer.conv.weight.grad, layer.conv.bias.grad, h.grad]


def main():
    OUT.mkdir(exist_ok=True)
    chunks, steps = qwen3_5(qwen.torch_chunk_gated_delta_rule), qwen3_5(qwen.torch_recurrent_gated_delta_rule)
    for x, y in zip(chunks, steps):
        assert torch.allclose(x, y, rtol=0, atol=5e-5 * y.abs().max().item()), (x - y).abs().max()
    write("qwen3_5.bin", steps)
    write("lfm2.bin", lfm2())


if __name__ == "__main__":
    main()
