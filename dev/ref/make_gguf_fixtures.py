#!/usr/bin/env python3
"""make_gguf_fixtures.py -- a small llama that gguf-py wrote, with a tensor of each type that we read.

    build/venv/bin/python dev/ref/make_gguf_fixtures.py

dev/ref/fixtures/gguf/mixed.gguf is the file, sums.txt has of each tensor gguf-py's own numbers:
their count, and the sum of number i times i % 7 + 1. small.gguf has a tokenizer and lists of other
types, and one tensor: dev/test/fuzz/fuzz_gguf.c begins with it.
"""

from pathlib import Path

import gguf
import numpy as np

DIRECTORY = Path(__file__).parent / "fixtures" / "gguf"
C, F, V, LAYERS, HEADS, KEY_HEADS = 64, 64, 48, 1, 2, 1
Type = gguf.GGMLQuantizationType


def tensors():
    """Name, rows and type of each tensor; rows of 0: a vector."""
    keys = C // HEADS * KEY_HEADS
    return [
        ("token_embd", V, C, Type.Q8_0),
        ("blk.0.attn_norm", 0, C, Type.F32),
        ("blk.0.attn_q", C, C, Type.BF16),
        ("blk.0.attn_k", keys, C, Type.F16),
        ("blk.0.attn_v", keys, C, Type.F32),
        ("blk.0.attn_output", C, C, Type.Q4_0),
        ("blk.0.ffn_norm", 0, C, Type.F32),
        ("blk.0.ffn_gate", F, C, Type.Q4_0),
        ("blk.0.ffn_up", F, C, Type.MXFP4),
        ("blk.0.ffn_down", C, F, Type.Q4_0),
        ("output_norm", 0, C, Type.F32),
    ]


def main():
    DIRECTORY.mkdir(exist_ok=True)
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(DIRECTORY / "mixed.gguf", "llama")
    writer.add_name("mixed")
    writer.add_context_length(32)
    writer.add_embedding_length(C)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(F)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(C // HEADS)
    writer.add_vocab_size(V)
    writer.add_tokenizer_model("no_vocab")
    lines = []
    for name, rows, cols, kind in tensors():
        values = random.normal(0, 0.1, (rows, cols) if rows else cols).astype(np.float32)
        data = gguf.quantize(values, kind)
        own = gguf.dequantize(data, kind).astype(np.float64).ravel()
        lines.append(f"{name}.weight {own.size} {(own * (np.arange(own.size) % 7 + 1)).sum():.17g}\n")
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (DIRECTORY / "sums.txt").write_text("".join(lines))


def write_small():
    writer = gguf.GGUFWriter(DIRECTORY / "small.gguf", "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", "<|endoftext|>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(3)
    writer.add_array("other.numbers", [1.5, 2.5])
    writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float32))
    writer.add_tensor("rope_freqs.weight", np.ones(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
    write_small()
