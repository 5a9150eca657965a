#!/usr/bin/env python3
"""check_checkpoint.py -- checkpoints and exports against transformers, safetensors and gguf.

    dev/ref/setup.sh && make train_gpt2
    build/venv/bin/python dev/ref/check_checkpoint.py [--arch qwen3 | all] [gpt2.tiktoken]

Trains a small model on random token shards and opens its checkpoint with transformers:
- the validation loss is the trainer's, also in bf16 if `make sim PRECISION=BF16` has been run;
- a checkpoint with its weights in two files has the same tensors;
- the trainer opens the model as transformers saves it: in one file or several, in fp32, bf16 and
  fp16, and without "transformer." in its names;
- the GGUF files have the same tensors;
- the tokenizers of bytes and of the built-in stories encode as ours do, and that of GPT-2 if its
  vocabulary is given.

With --arch, checks models of this architecture, or of all but GPT-2: transformers has the loss of
our checkpoint, we have the loss of what transformers saves, and GGUF files have the tensors as
llama.cpp orders them. Prints one line; the exit status is the verdict.
"""

import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

TRAINER = os.path.abspath("./train_gpt2")
SIMULATED = os.path.abspath("./build/sim/BF16/train_gpt2cu")
V, T = 300, 24
failures = 0


def expect(ok, what):
    global failures
    if not ok:
        failures += 1
        print(f"FAILED: {what}")


def train(*arguments, trainer=TRAINER):
    done = subprocess.run([trainer, *map(str, arguments)], capture_output=True, text=True)
    expect(done.returncode == 0, f"{arguments}: {done.stderr}")
    return done.stdout


def log_of(out):
    with open(f"{out}/log.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def last_val(out):
    return [line["loss"] for line in log_of(out) if line["kind"] == "val"][-1]


FAMILIES = {
    "llama": ["--kv-heads", 2, "--head-size", 16, "--hidden", 80],
    "mistral": ["--kv-heads", 1, "--hidden", 80, "--window", 7],
    "qwen2": ["--kv-heads", 2, "--hidden", 80, "--own-head", "on"],
    "qwen3": ["--kv-heads", 2, "--head-size", 16, "--hidden", 80, "--window", 7, "--window-pattern", "SL"],
    "arcee": ["--rope-base", 50000, "--own-head", "on"],
    "nanochat": ["--kv-heads", 2, "--hidden", 80, "--softcap", 12],
    "mixtral": ["--kv-heads", 2, "--hidden", 64, "--window", 7, "--experts", 4, "--experts-used", 2],
    "qwen3moe": ["--kv-heads", 2, "--head-size", 16, "--hidden", 32, "--experts", 6, "--experts-used", 3],
    "olmoe": ["--hidden", 32, "--experts", 6, "--experts-used", 2, "--own-head", "on"],
    "glm4moe": ["--kv-heads", 2, "--hidden", 32, "--experts", 4, "--experts-used", 2, "--shared-hidden", 64],
    "deepseek3": ["--head-size", 16, "--hidden", 80, "--experts", 4, "--experts-used", 2, "--dense-layers", 1, "--expert-hidden", 32, "--shared-hidden", 64],
}


def write_shard(path, tokens):
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
        file.write(np.asarray(tokens, dtype=np.uint16).tobytes())


def loss_by_transformers(model, tokens, sequences):
    """The mean loss of the first sequences, computed in fp32."""
    with torch.no_grad():
        x = torch.tensor(tokens[: sequences * T]).long().view(sequences, T)
        y = torch.tensor(tokens[1 : sequences * T + 1]).long().view(sequences, T)
        logits = model(x).logits.float()
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1)).item()


def check_files(sizes, model):
    """Reads the same tensors from one file of weights and from a file for each group."""
    train(*sizes, "--train-data", "tokens.bin", "--val-data", "tokens.bin", "--batch", 2, "--seq-len", T, "--steps", 20,
          "--lr", 0.01, "--eval-batches", 4, "--samples", 0, "--model-file-gb", 0.0002, "--out", "cut")
    directory = "cut/step_00000020"
    expect(len(model_files(directory)) == 2 and not os.path.exists(f"{directory}/model.safetensors"), f"{model_files(directory)}")
    cut = transformers.AutoModelForCausalLM.from_pretrained(directory)
    ours, theirs = model.state_dict(), cut.state_dict()
    expect(ours.keys() == theirs.keys(), "names in two files")
    expect(all(torch.equal(ours[name], theirs[name]) for name in ours), "tensors in two files")
    check_gguf(directory)


def check_bf16(tokens):
    """Without master weights a checkpoint holds the 16-bit weights."""
    if not os.path.exists(SIMULATED):
        print("skipped: bf16: no build/sim/BF16/train_gpt2cu (make sim PRECISION=BF16)")
        return
    train("--layers", 2, "--channels", 48, "--heads", 3, "--context", 32, "--vocab-size", V, "--train-data", "tokens.bin",
          "--val-data", "tokens.bin", "--batch", 2, "--seq-len", T, "--steps", 5, "--lr", 0.01, "--eval-batches", 4, "--samples", 0,
          "--master-weights", "off", "--autotune", "off", "--out", "bf16_run", trainer=SIMULATED)
    model = transformers.AutoModelForCausalLM.from_pretrained("bf16_run/step_00000005")
    expect(model.dtype == torch.bfloat16, f"{model.dtype}")
    loss = loss_by_transformers(model.float().eval(), tokens, 8)
    expect(abs(loss - last_val("bf16_run")) < 2e-2, f"bf16: loss {loss}, the trainer's is {last_val('bf16_run')}")


def check_imports(model, tokens_file, wanted, prefix=""):
    """The trainer opens what transformers and others write."""
    cases = {"fp32": (torch.float32, "5GB", 1e-6), "sharded": (torch.float32, "40KB", 1e-6),
             "bf16": (torch.bfloat16, "5GB", 3e-3), "fp16": (torch.float16, "5GB", 5e-4)}
    for case, (dtype, shard_size, tolerance) in cases.items():
        name = prefix + case
        model.to(dtype).save_pretrained(name, max_shard_size=shard_size)
        if case == "sharded":
            expect(os.path.exists(f"{name}/model.safetensors.index.json"), "several files")
        train("--model", name, "--train-data", tokens_file, "--val-data", tokens_file, "--batch", 2, "--seq-len", T, "--steps", 0,
              "--eval-batches", 4, "--samples", 0, "--out", f"again_{name}", "--save-every", 0)
        expect(abs(last_val(f"again_{name}") - wanted) < tolerance * 10, f"{name}: {last_val(f'again_{name}')}, wanted {wanted}")
    bare = f"{prefix}bare"
    os.makedirs(bare, exist_ok=True)
    tensors = {name.removeprefix("transformer.").removeprefix("model."): x
               for name, x in load_file(f"{prefix}fp32/model.safetensors").items()}
    save_file(tensors, f"{bare}/model.safetensors")
    shutil.copy(f"{prefix}fp32/config.json", bare)
    train("--model", bare, "--train-data", tokens_file, "--val-data", tokens_file, "--batch", 2, "--seq-len", T, "--steps", 0,
          "--eval-batches", 4, "--samples", 0, "--out", f"again_{bare}", "--save-every", 0)
    expect(abs(last_val(f"again_{bare}") - wanted) < 1e-5, "names without a prefix")


def model_files(directory):
    """The files of a model: those that the index names, if there is one."""
    index = f"{directory}/model.safetensors.index.json"
    if not os.path.exists(index):
        return [f"{directory}/model.safetensors"]
    with open(index, encoding="utf-8") as file:
        return [f"{directory}/{name}" for name in sorted(set(json.load(file)["weight_map"].values()))]


def check_gguf(checkpoint):
    try:
        import gguf
    except ImportError:
        print("skipped: gguf is not installed")
        return
    names = {"attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
             "attn_norm": "ln_1", "ffn_norm": "ln_2"}
    tensors = {name: x for file in model_files(checkpoint) for name, x in load_file(file).items()}
    for dtype, tolerance in {"f32": 0, "f16": 1e-3, "bf16": 5e-3, "q8_0": 1e-2}.items():
        train("--model", checkpoint, "--train-data", "tokens.bin", "--batch", 2, "--seq-len", T, "--steps", 0, "--eval-every", 0, "--samples", 0,
              "--export-gguf", f"{dtype}.gguf", "--export-gguf-dtype", dtype)
        reader = gguf.GGUFReader(f"{dtype}.gguf")
        expect(len(reader.tensors) == len(tensors), f"{dtype}: {len(reader.tensors)} tensors")
        for tensor in reader.tensors:
            name = (tensor.name.replace("token_embd", "wte").replace("position_embd", "wpe").replace("output_norm", "ln_f")
                    .replace("blk.", "h."))
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            want = tensors[f"transformer.{name}"].float().numpy()
            want = want.T if want.ndim == 2 and name.startswith("h.") else want
            got = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(want.shape)
            expect(np.abs(got - want).max() <= tolerance * np.abs(want).max(), f"{dtype}: {tensor.name}")


def in_pairs(x, heads):
    """Orders the rows of each head: halves in transformers, pairs in llama.cpp's llama."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def with_stacked_experts(tensors):
    """The matrices of all experts of a layer as one array, under their name without a number; and the bias of a
    router as one of a module."""
    stacked = {}
    for name, x in tensors.items():
        stacked.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), {})[int((re.search(r"experts\.(\d+)\.", name) or [0, 0])[1])] = x
    return {name.replace("correction_bias", "correction.bias"):
            np.stack([parts[e] for e in range(len(parts))]) if ".experts." in name else parts[0] for name, parts in stacked.items()}


def check_family_gguf(arch, checkpoint, config):
    """GGUF has the tensors under the names that llama.cpp's own package gives them."""
    import gguf
    name = {"mistral": "llama", "mixtral": "llama"}.get(arch, arch)
    known = next(number for number, word in gguf.MODEL_ARCH_NAMES.items() if word == name)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    tensors = with_stacked_experts({name: x.float().numpy() for file in model_files(checkpoint) for name, x in load_file(file).items()})
    for dtype, tolerance in {"f32": 0, "f16": 1e-3, "bf16": 5e-3, "q8_0": 1e-2}.items():
        file = f"{arch}_{dtype}.gguf"
        train("--model", checkpoint, "--train-data", "tokens.bin", "--batch", 2, "--seq-len", T, "--steps", 0, "--eval-every", 0, "--samples", 0,
              "--export-gguf", file, "--export-gguf-dtype", dtype)
        reader = gguf.GGUFReader(file)
        expect(reader.fields["general.architecture"].contents() == name, f"{file}: architecture")
        expect(reader.fields[f"{name}.attention.head_count_kv"].contents() == config.num_key_value_heads, f"{file}: key heads")
        if "num_experts_per_tok" in config.to_dict():
            expect(reader.fields[f"{name}.expert_used_count"].contents() == config.num_experts_per_tok, f"{file}: experts of a token")
        found = {tensor.name: tensor for tensor in reader.tensors}
        expect(len(found) == len(tensors), f"{file}: {len(found)} tensors, wanted {len(tensors)}")
        for hf_name, want in tensors.items():
            base, ending = hf_name.rsplit(".", 1)
            tensor = found[f"{names.get_name(base)}.{ending}"]
            if name in ("llama", "arcee") and "q_proj" in hf_name:
                want = in_pairs(want, config.num_attention_heads)
            if name in ("llama", "arcee") and "k_proj" in hf_name:
                want = in_pairs(want, config.num_key_value_heads)
            expect(tuple(reversed(tensor.shape.tolist())) == want.shape, f"{file}: {hf_name} is {tensor.shape}, wanted {want.shape}")
            got = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(want.shape)
            expect(np.abs(got - want).max() <= tolerance * np.abs(want).max(), f"{file}: {hf_name}")


def check_family(arch, tokens):
    out = f"{arch}_run"
    train("--arch", arch, "--layers", 2, "--channels", 48, "--heads", 4, "--context", 32, "--vocab-size", V, *FAMILIES[arch], "--train-data",
          "tokens.bin", "--val-data", "tokens.bin", "--batch", 2, "--seq-len", T, "--steps", 20, "--lr", 0.01, "--eval-batches", 4,
          "--samples", 0, "--out", out)
    checkpoint = f"{out}/step_00000020"
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    model_type = {"qwen3moe": "qwen3_moe", "glm4moe": "glm4_moe", "deepseek3": "deepseek_v3"}.get(arch, arch)
    expect(model.config.model_type == model_type and model.dtype == torch.float32, f"{arch}: the model's type")
    loss = loss_by_transformers(model, tokens, 8)
    expect(abs(loss - last_val(out)) < 1e-5, f"{arch}: loss {loss}, the trainer's is {last_val(out)}")
    if arch not in ("nanochat", "deepseek3"):  # one has no GGUF, the other other matrices there
        check_family_gguf(arch, checkpoint, model.config)
    check_imports(model, "tokens.bin", loss, f"{arch}_")


def check_tokenizer(vocabulary):
    """A checkpoint with GPT-2's tokenizer, opened as transformers' users do."""
    write_shard("gpt2.bin", np.random.default_rng(2).integers(0, 50257, 2000))
    train("--layers", 1, "--channels", 16, "--heads", 2, "--context", 32, "--train-data", "gpt2.bin", "--tokenizer", vocabulary,
          "--batch", 2, "--seq-len", T, "--steps", 1, "--eval-batches", 1, "--samples", 0, "--out", "gpt2")
    directory = "gpt2/step_00000001"
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    expect(tokenizer("hello world<|endoftext|>")["input_ids"] == [31373, 995, 50256], "ids of the tokenizer")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    text = tokenizer.decode(model.generate(**tokenizer("hello", return_tensors="pt"), max_new_tokens=3)[0])
    expect(text.startswith("hello"), text)
    train("--model", directory, "--train-data", "gpt2.bin", "--tokenizer", directory, "--batch", 2, "--seq-len", T, "--steps", 0,
          "--eval-batches", 1, "--prompt", "hello", "--out", "from_directory", "--save-every", 0)
    train("--model", directory, "--train-data", "gpt2.bin", "--tokenizer", directory, "--batch", 2, "--seq-len", T, "--steps", 0,
          "--eval-every", 0, "--samples", 0, "--export-gguf", "gpt2.gguf")
    import gguf
    fields = gguf.GGUFReader("gpt2.gguf").fields
    tokens, merges = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.merges"].contents()
    expect(len(tokens) == 50257 and tokens[31373] == "hello" and tokens[995] == "Ġworld", "tokens in GGUF")
    expect(len(merges) == 50000 and merges[0] == "Ġ t", "merges in GGUF")


def check_own_tokenizer(name, data, prompt, refused):
    """For bytes and the built-in stories, transformers writes the same greedy text."""
    sizes = ("--layers", 1, "--channels", 64, "--heads", 2, "--context", 64, "--batch", 8, "--steps", 100, "--samples", 1)
    train(*sizes, *data, "--temperature", 0, "--sample-tokens", 16, "--prompt", prompt, "--out", name)
    ours = [line["text"] for line in log_of(name) if line["kind"] == "sample"][-1]
    directory = f"{name}/step_00000100"
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = [tokenizer.eos_token_id, *tokenizer(prompt)["input_ids"]]
    out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=16)[0]
    theirs = tokenizer.decode(out, skip_special_tokens=True)
    expect(tokenizer.decode(tokenizer(prompt)["input_ids"]).strip() == prompt, f"{name}: decoding {prompt}")
    expect(ours.strip().startswith(theirs.strip()[: len(prompt) + 4]) and len(theirs) > len(prompt), f"{name}: {ours!r}, {theirs!r}")
    expect(theirs.strip().startswith(ours.strip()) or ours.strip().startswith(theirs.strip()), f"{name}: {ours!r}, {theirs!r}")
    tokenizer.save_pretrained(f"{name}_again")  # by transformers, for us
    train("--model", directory, "--train-data", "text.txt" if data else "words.bin", "--tokenizer", f"{name}_again", "--batch", 2,
          "--seq-len", T, "--steps", 0, "--eval-batches", 1, "--prompt", prompt, "--out", f"{name}_from", "--save-every", 0)
    if refused:
        try:
            expect(tokenizer(refused)["input_ids"] is None, f"{name}: {refused!r} has no ids with us")
        except Exception as error:  # the tokenizers package raises no narrower one
            expect("UNK" in str(error), f"{name}: {error}")


def check_gpt2(tokens, vocabulary):
    sizes = ("--layers", 2, "--channels", 48, "--heads", 3, "--context", 32, "--vocab-size", V)
    train(*sizes, "--train-data", "tokens.bin", "--val-data", "tokens.bin", "--batch", 2, "--seq-len", T, "--steps", 20,
          "--lr", 0.01, "--eval-batches", 4, "--samples", 0, "--out", "run")
    model = transformers.AutoModelForCausalLM.from_pretrained("run/step_00000020")
    expect(model.dtype == torch.float32 and type(model).__name__ == "GPT2LMHeadModel", "the model's type")
    loss = loss_by_transformers(model.eval(), tokens, 8)
    expect(abs(loss - last_val("run")) < 1e-5, f"loss {loss}, the trainer's is {last_val('run')}")
    check_bf16(tokens)
    check_files(sizes, model)
    check_gguf("run/step_00000020")
    check_imports(model, "tokens.bin", loss)
    with open("text.txt", "w", encoding="utf-8") as file:
        file.writelines(f"{i} bottles of beer on the wall, \u00e9t\u00e9 {i}.\n" for i in range(300))
    write_shard("words.bin", np.arange(1000) % 300)
    check_own_tokenizer("bytes", ("--train-data", "text.txt"), "7 bottles, \u00e9t", None)
    check_own_tokenizer("stories", (), "Tom was happy. He went", "Tom was unhappy")
    if vocabulary:
        check_tokenizer(vocabulary)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="gpt2", choices=["gpt2", "all", *FAMILIES])
    parser.add_argument("vocabulary", nargs="?", type=os.path.abspath)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        tokens = np.random.default_rng(1).integers(0, V, 1000) ** 2 % V
        write_shard("tokens.bin", tokens)
        if args.arch == "gpt2":
            check_gpt2(tokens, args.vocabulary)
        for arch in FAMILIES if args.arch == "all" else [args.arch] if args.arch in FAMILIES else []:
            check_family(arch, tokens)
    print("check_checkpoint:", f"{failures} failures" if failures else "ok")
    sys.exit(failures > 0)


main()
