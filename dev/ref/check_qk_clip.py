"""Checks --qk-clip (qk_clip.h) with attention scores of transformers in float64.

    build/venv/bin/python dev/ref/check_qk_clip.py TRAINER MODEL OUT [OPTIONS OF THE TRAINER...]

MODEL is a fixture of make_model_fixtures.py; its text is tokens.bin. The trainer makes one update in OUT, without and with
the clip. The largest score of each head comes from MODEL's own forward pass in transformers, which calls the attention
function below. The limit is their median, so some heads are clipped. Every weight after the clip must be the weight without
it, times what the formula says for its head.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

B, T = 2, 13
largest = {}  # (NH) of each layer


def attention(module, query, key, value, attention_mask, scaling, s_aux=None, **_):
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    scores = scores + attention_mask
    largest[module.layer_idx] = scores.amax((0, 2, 3)).numpy()
    if s_aux is not None:  # sinks: a column without a value
        sinks = s_aux.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., :T] @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None


def set_largest(path):
    transformers.AttentionInterface.register("recorded", attention)
    transformers.AttentionMaskInterface.register("recorded", transformers.masking_utils.eager_mask)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="recorded",
                                                              experts_implementation="eager")
    tokens = np.frombuffer((path.parent / "tokens.bin").read_bytes()[1024:], dtype=np.uint16)[: B * T]
    with torch.no_grad():
        model(torch.tensor(tokens.astype(np.int64)).reshape(B, T))
    return model.config


def train(trainer, path, out, options):
    data = path.parent / "tokens.bin"
    subprocess.run([trainer, "--model", path, "--train-data", data, "--val-data", data, "--seq-len", str(T), "--total-batch",
                    str(B * T), "--steps", "1", "--samples", "0", "--eval-every", "0", "--lr", "0.001", "--out", out,
                    *options], check=True, stdout=subprocess.DEVNULL)
    score = [json.loads(line).get("score") for line in (out / "log.jsonl").open() if '"train"' in line][0]
    return load_file(out / "step_00000001" / "model.safetensors"), score


def factors(name, shape, config, shrink):
    """The factor of each row of a tensor, in Hugging Face's layout; None: it is not clipped."""
    heads, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    of_keys = np.sqrt(shrink.reshape(keys, -1).max(1))
    of_queries = shrink / np.repeat(of_keys, heads // keys)
    rows = shape[0]
    if ".q_b_proj." in name or (".q_proj." in name and hasattr(config, "kv_lora_rank")):
        nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        return np.concatenate([np.r_[np.full(nope, r**0.5), np.full(rope, r)] for r in shrink])
    if ".kv_b_proj." in name:
        nope, value = config.qk_nope_head_dim, config.v_head_dim
        return np.concatenate([np.r_[np.full(nope, r**0.5), np.ones(value)] for r in shrink])
    if ".q_proj." in name:
        return np.repeat(of_queries, rows // heads)
    if ".k_proj." in name:
        return np.repeat(of_keys, rows // keys)
    return None


def main():
    trainer, path, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    options = sys.argv[4:]
    config = set_largest(path)
    limit = float(np.median(np.concatenate(list(largest.values()))))
    assert limit > 0, limit
    plain, _ = train(trainer, path, out / "plain", options)
    clipped, score = train(trainer, path, out / "clipped", [*options, "--qk-clip", repr(limit)])
    most = max(scores.max() for scores in largest.values())
    assert abs(score / most - 1) < 1e-5, (score, most)
    changed = 0
    for name, weights in clipped.items():
        layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else None
        shrink = np.minimum(1, limit / np.maximum(largest[layer], 1e-30)) if layer is not None else np.ones(1)
        rows = factors(name, weights.shape, config, shrink) if layer is not None else None
        want = plain[name].astype(np.float64)
        if rows is not None:
            want = (want.T * rows).T
            changed += (rows != 1).sum()
        # scores in fp32, and a rounding of the factor and of the product
        error = np.abs(weights - want).max() / np.abs(want).max()
        assert error < 2e-6, f"{name}: off by {error:.2e}"
    assert changed > 0
    print(f"{path.name}: limit {limit:.4f}, largest score {most:.4f}, {changed} rows clipped")


if __name__ == "__main__":
    main()
