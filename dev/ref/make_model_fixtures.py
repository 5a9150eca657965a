"""Writes dev/ref/fixtures/models: a tiny random model of each family, as transformers saves it, and
its true numbers.

    dev/ref/setup.sh && build/venv/bin/python dev/ref/make_model_fixtures.py

Each directory has config.json, the weights in one file or several, and expected.safetensors: a text
of B T + 1 tokens, the logits (B, T, V) of all but its last token in B sequences, the mean loss of
the next tokens, and the norm of the gradient of that loss. transformers computes them with weights
in float64; its norms and rotary positions stay in float32. positions.txt: the loss and the norm of
two of these models with other rotary positions in one layer. tokens.bin is the same text as a shard.
make_update_fixtures.py and make_teacher_fixtures.py read these models.
"""

import json
import shutil
import struct
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OUT = Path(__file__).parent / "fixtures" / "models"
B, T = 2, 13
SIZES = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, bos_token_id=60, eos_token_id=60)
WIDE = dict(hidden_size=32, intermediate_size=32)  # matrices of experts have multiples of 32 in bf16
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=64)
LONG = dict(rope_type="longrope", rope_theta=10000.0, factor=4.0, short_factor=[1.0, 1.25, 1.5, 2.0], long_factor=[1.5, 3.0, 6.0, 20.0])
OSS = dict(hidden_size=32, intermediate_size=64, head_dim=12, num_local_experts=5, num_experts_per_tok=2, sliding_window=5,
           pad_token_id=0, rope_parameters=YARN | dict(rope_theta=150000.0, truncate=False))
LATENT = WIDE | dict(intermediate_size=40, moe_intermediate_size=32, num_hidden_layers=3, num_key_value_heads=4, kv_lora_rank=20, qk_rope_head_dim=6,
                     qk_nope_head_dim=10, v_head_dim=12, first_k_dense_replace=1, routed_scaling_factor=1.5)

# name: class of the configuration, its arguments, type of the saved weights, largest file
MODELS = {
    "llama": (transformers.LlamaConfig, dict(head_dim=8, rms_norm_eps=1e-5), torch.float32, "5GB"),
    "llama3": (transformers.LlamaConfig, dict(head_dim=8, rope_parameters=LLAMA3, tie_word_embeddings=True), torch.bfloat16, "5GB"),
    "mistral": (transformers.MistralConfig, dict(head_dim=8, sliding_window=5), torch.float16, "5GB"),
    "qwen2": (transformers.Qwen2Config, dict(use_sliding_window=True, sliding_window=5, max_window_layers=1,
                                             rope_parameters=dict(rope_type="default", rope_theta=1e6)),
              torch.float32, "20KB"),
    "qwen3": (transformers.Qwen3Config, dict(head_dim=8, use_sliding_window=True, sliding_window=4,
                                             layer_types=["sliding_attention", "full_attention"]),
              torch.float32, "5GB"),
    "qwen3_tied": (transformers.Qwen3Config, dict(head_dim=4, num_key_value_heads=4, tie_word_embeddings=True),
                   torch.bfloat16, "5GB"),
    "arcee": (transformers.ArceeConfig, dict(head_dim=8, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)),
              torch.float32, "5GB"),
    "nanochat": (transformers.NanoChatConfig, dict(head_dim=8), torch.float32, "5GB"),
    "mixtral": (transformers.MixtralConfig, WIDE | dict(sliding_window=5, num_local_experts=4, num_experts_per_tok=2),
                torch.bfloat16, "5GB"),
    "qwen3moe": (transformers.Qwen3MoeConfig, WIDE | dict(head_dim=16, moe_intermediate_size=32, num_experts=4,
                                                          num_experts_per_tok=3, norm_topk_prob=True),
                 torch.float32, "80KB"),
    "olmoe": (transformers.OlmoeConfig, WIDE | dict(num_experts=4, num_experts_per_tok=2), torch.float32, "5GB"),
    "glm4moe": (transformers.Glm4MoeConfig,
                WIDE | dict(head_dim=8, moe_intermediate_size=32, n_routed_experts=4, n_shared_experts=2,
                            num_experts_per_tok=2, routed_scaling_factor=1.5, first_k_dense_replace=0,
                            attention_bias=True, use_qk_norm=True), torch.float32, "5GB"),
    "glm4moe_dense": (transformers.Glm4MoeConfig,
                      WIDE | dict(head_dim=8, intermediate_size=48, moe_intermediate_size=32, num_hidden_layers=3, n_routed_experts=4,
                                  num_experts_per_tok=2, routed_scaling_factor=1.5, first_k_dense_replace=1,
                                  attention_bias=True, use_qk_norm=True), torch.bfloat16, "5GB"),
    "glm4moe_groups": (transformers.Glm4MoeConfig,
                       WIDE | dict(head_dim=8, moe_intermediate_size=32, num_hidden_layers=2, n_routed_experts=8, n_group=4, topk_group=2,
                                   num_experts_per_tok=3, routed_scaling_factor=1.5, first_k_dense_replace=0,
                                   attention_bias=True, use_qk_norm=True), torch.bfloat16, "5GB"),
    "yarn": (transformers.LlamaConfig, dict(head_dim=16, rope_parameters=YARN), torch.bfloat16, "5GB"),
    "yarn_exact": (transformers.Qwen3Config, dict(head_dim=16, rope_parameters=YARN | dict(truncate=False, beta_fast=4.0, mscale=1.5, mscale_all_dim=0.75)),
                   torch.bfloat16, "5GB"),
    "longrope": (transformers.LlamaConfig, dict(head_dim=8, rope_parameters=LONG | dict(original_max_position_embeddings=12)), torch.bfloat16, "5GB"),
    "longrope_near": (transformers.Qwen3Config, dict(head_dim=8, rope_parameters=LONG | dict(original_max_position_embeddings=13, attention_factor=1.125)),
                      torch.bfloat16, "5GB"),
    "olmo2": (transformers.Olmo2Config, dict(pad_token_id=0), torch.float32, "5GB"),
    "granite": (transformers.GraniteConfig, dict(tie_word_embeddings=True, attention_multiplier=0.25, embedding_multiplier=3.0,
                                                 residual_multiplier=0.22, logits_scaling=1.5), torch.bfloat16, "5GB"),
    "smollm3": (transformers.SmolLM3Config, dict(use_sliding_window=True, sliding_window=5, no_rope_layers=[1, 0], tie_word_embeddings=True,
                                                 pad_token_id=0), torch.bfloat16, "5GB"),
    "olmo3": (transformers.Olmo3Config, dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"], pad_token_id=0,
                                             rope_parameters=dict(full_attention=YARN | dict(rope_theta=500000.0),
                                                                  sliding_attention=dict(rope_type="default", rope_theta=500000.0))),
              torch.bfloat16, "5GB"),
    "exaone4": (transformers.Exaone4Config, dict(head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"],
                                                 rope_parameters=LLAMA3, tie_word_embeddings=True), torch.bfloat16, "5GB"),
    "granite4": (transformers.GraniteMoeHybridConfig,
                 dict(num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=36, layer_types=["full_attention"] * 2,
                      position_embedding_type="rope", mamba_n_heads=1, attention_multiplier=0.25, embedding_multiplier=3.0,
                      residual_multiplier=0.22, logits_scaling=1.5, tie_word_embeddings=True), torch.bfloat16, "5GB"),
    "gemma2": (transformers.Gemma2Config, dict(head_dim=8, sliding_window=5, query_pre_attn_scalar=6, attn_logit_softcapping=2.0,
                                               final_logit_softcapping=3.0, pad_token_id=0), torch.float32, "5GB"),  # bf16 would round the root of 24
    "gemma3": (transformers.Gemma3TextConfig, dict(head_dim=8, num_hidden_layers=3, sliding_window=5, query_pre_attn_scalar=24, pad_token_id=0,
                                                   layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                                                   rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                                                                        sliding_attention=dict(rope_type="default", rope_theta=100.0))),
               torch.float32, "5GB"),
    "phi3": (transformers.Phi3Config, dict(sliding_window=7, pad_token_id=0, original_max_position_embeddings=12,
                                           rope_parameters=LONG | dict(partial_rotary_factor=0.7, short_factor=[1.0, 1.25], long_factor=[1.5, 3.0])),
             torch.bfloat16, "5GB"),
    "gptoss": (transformers.GptOssConfig, OSS, torch.bfloat16, "5GB"),
    "gptoss_mxfp4": (transformers.GptOssConfig, OSS, torch.bfloat16, "5GB"),  # see quantize
    "glm4": (transformers.Glm4Config, dict(head_dim=12, pad_token_id=0, rms_norm_eps=1e-5), torch.bfloat16, "5GB"),
    "qwen35": (transformers.Qwen3_5TextConfig,
               dict(head_dim=12, num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], rms_norm_eps=0.01,
                    linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=16,
                    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)), torch.bfloat16, "5GB"),
    "lfm2": (transformers.Lfm2Config, dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"],
                                           block_auto_adjust_ff_dim=False, pad_token_id=None), torch.bfloat16, "5GB"),
    "deepseek3": (transformers.DeepseekV3Config, LATENT | dict(q_lora_rank=28, n_routed_experts=5, num_experts_per_tok=2, n_group=1, topk_group=1,
                                                               rope_parameters=YARN | dict(mscale=0.75, mscale_all_dim=0.75)), torch.bfloat16, "5GB"),
    "deepseek3_plain": (transformers.DeepseekV3Config,
                        LATENT | dict(q_lora_rank=None, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, rope_interleave=False,
                                      tie_word_embeddings=True, rms_norm_eps=0.001, rope_parameters=YARN | dict(factor=4.0, mscale=1.5, mscale_all_dim=0.5)),
                        torch.bfloat16, "5GB"),
}


def fill(model):
    """Weights larger than at a real start, and random norms and biases: everything counts."""
    rng = torch.Generator().manual_seed(20261126)
    with torch.no_grad():
        for name, x in model.named_parameters():
            noise = torch.randn(x.shape, generator=rng)
            large = 3 if "gate_up_proj_bias" in name or "sinks" in name else 0  # some hidden units beyond the limit
            start = x if model.config.model_type == "qwen3_5_text" else 1  # its large gradients would make errors of rounding larger
            x.copy_(start + 0.2 * noise if "norm" in name else (large or (0.3 if x.dim() > 1 else 0.2)) * noise)
        for name, x in model.named_buffers():
            if "correction_bias" in name:
                x.copy_(0.2 * torch.randn(x.shape, generator=rng))


def quantize(directory):
    """Rewrites a model's experts in MXFP4, as gpt-oss is published: (E, in, out) become blocks and scales (E, out, in)."""
    tensors = load_file(directory / "model.safetensors")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks = tensors.pop(name).float().transpose(1, 2).unflatten(-1, (-1, 32))
        exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2  # the largest number is 4 or 6
        scaled = blocks * torch.exp2(-exponents)[..., None]
        codes = (scaled[..., None] - values).abs().argmin(-1).to(torch.uint8)
        tensors[name + "_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).contiguous()
        tensors[name + "_scales"] = (exponents + 127).to(torch.uint8).contiguous()
        rounded = (values[codes.int()] * torch.exp2(exponents)[..., None]).flatten(2).transpose(1, 2)
        assert torch.equal(convert_moe_packed_tensors(tensors[name + "_blocks"], tensors[name + "_scales"], dtype=torch.float32), rounded)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4",
                                     "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                                "model.embed_tokens", "lm_head"]}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def read_back(directory):
    """The weights as they were rounded. For MXFP4 transformers wants a GPU, or accelerate: so its conversion is called here."""
    if not (directory / "model.safetensors").exists() or "quantization_config" not in (directory / "config.json").read_text():
        return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", experts_implementation="eager")
    tensors = load_file(directory / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        tensors[name] = convert_moe_packed_tensors(tensors.pop(name + "_blocks"), tensors.pop(name + "_scales"), dtype=torch.float32)
    config = transformers.AutoConfig.from_pretrained(directory, attn_implementation="eager", experts_implementation="eager")
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(tensors)
    return model


def numbers(model, tokens):
    model = model.double().eval()
    logits = model(tokens[:-1].view(B, T)).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:])
    loss.backward()
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x.grad) for x in model.parameters()]))
    return {"tokens": tokens.int(), "logits": logits.detach().float().contiguous(), "loss": loss.detach().reshape(1),
            "norm": norm.reshape(1)}


def with_positions(model, l, cos_sin):
    """Layer l gets these cosines and sines."""
    def replace(module, args, kwargs):
        return args, kwargs | dict(position_embeddings=cos_sin(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]))
    return model.model.layers[l].self_attn.register_forward_pre_hook(replace, with_kwargs=True)


def positions_by_layer(tokens):
    """Models whose layers have different rotary positions: a Llama without any in layer 1, which is a SmolLM3; a
    Qwen 3 whose layer 0, the one with a window, has another base and linear scaling."""
    lines = ["# name: loss norm\n"]
    llama = transformers.AutoModelForCausalLM.from_pretrained(OUT / "llama")
    config = {k: v for k, v in llama.config.to_dict().items() if k in SIZES or k in ("head_dim", "rms_norm_eps", "rope_parameters")}
    smol = transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(
        **config, pad_token_id=0, no_rope_layers=[1, 0], tie_word_embeddings=False, attn_implementation="eager"))
    smol.load_state_dict(llama.state_dict())
    expected = numbers(smol, tokens)
    lines.append(f"unrotated: {expected['loss'].item():.9f} {expected['norm'].item():.9f}\n")
    qwen = transformers.AutoModelForCausalLM.from_pretrained(OUT / "qwen3", attn_implementation="eager")
    other = transformers.Qwen3Config(**qwen.config.to_dict() | dict(rope_parameters=dict(rope_type="linear", rope_theta=100.0, factor=2.0)))
    rotary = type(qwen.model.rotary_emb)(other)
    with_positions(qwen, 0, lambda x: rotary(x, torch.arange(T)[None]))
    expected = numbers(qwen, tokens)
    lines.append(f"by window: {expected['loss'].item():.9f} {expected['norm'].item():.9f}\n")
    (OUT / "positions.txt").write_text("".join(lines))
    print("".join(lines))


def main():
    torch.set_num_threads(1)  # one order of summation
    OUT.mkdir(exist_ok=True)
    tokens = torch.randint(SIZES["vocab_size"], (B * T + 1,), generator=torch.Generator().manual_seed(20261127))
    shard = struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens.tolist())
    (OUT / "tokens.bin").write_bytes(shard)
    for name, (config_class, arguments, dtype, shard_size) in MODELS.items():
        config = config_class(**(SIZES | arguments), attn_implementation="eager")
        model = transformers.AutoModelForCausalLM.from_config(config)
        fill(model)
        shutil.rmtree(OUT / name, ignore_errors=True)
        model.to(dtype).save_pretrained(OUT / name, max_shard_size=shard_size)
        if name == "gptoss_mxfp4":
            quantize(OUT / name)
        expected = numbers(read_back(OUT / name), tokens)
        save_file(expected, OUT / name / "expected.safetensors")
        for path in (OUT / name).iterdir():
            path.chmod(0o644)
        size = sum(path.stat().st_size for path in (OUT / name).iterdir())
        print(f"{name}: {size / 1024:.0f} KiB, loss {expected['loss'].item():.6f}, norm {expected['norm'].item():.6f}")
    positions_by_layer(tokens)


if __name__ == "__main__":
    main()
