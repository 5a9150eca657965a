#!/usr/bin/env python3
"""check_safetensors.py -- safetensors.h against the reference implementation, both ways.

    dev/ref/setup.sh && make -s build/plain/test_formats
    build/venv/bin/python dev/ref/check_safetensors.py

The C program writes a file that the safetensors package and PyTorch read; they write files that the
C program prints. Names, dtypes, shapes, metadata and every bit of every number are compared, and
each side names what it refuses. Prints one line; the exit status is the verdict.
"""

import json
import os
import struct
import subprocess
import sys
import tempfile

import numpy as np
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

PROGRAM = "build/plain/test_formats"
NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.int64: "I64",
         torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
failures = 0


def expect(ok, what):
    global failures
    if not ok:
        failures += 1
        print(f"FAILED: {what}")


def run(*arguments):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True)


def bits(tensor):
    """The fp32 bits of a tensor's numbers, after widening."""
    return tensor.float().reshape(-1).view(torch.int32).numpy().view(np.uint32).tolist()


def expected_line(name, tensor):
    values = ""
    if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16):
        values = "".join(f" {value:08x}" for value in bits(tensor))
    elif tensor.numel():
        values = " " + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
    return f"{name} {NAMES[tensor.dtype]} ({', '.join(map(str, tensor.shape))}){values}"


def theirs_read_ours(path):
    done = run("--write_tensors", path)
    expect(done.returncode == 0, done.stderr)
    wanted = {
        "i64": torch.tensor([[0, 1, -1], [2**63 - 1, -(2**63), 42]]),
        "f32": torch.tensor([0.1, -0.0, float("inf"), 1e-45, 3.4e38]),
        "f16": torch.tensor([[[0.1, -65504], [65520, 1e-7]], [[5.9604645e-8, 2049], [2051, -0.0]]]).half(),
        "bf16": torch.tensor([0.1, 1e-40, -3.4e38]).bfloat16(),
        "u8": torch.zeros((0, 4), dtype=torch.uint8),
    }
    with safetensors.safe_open(path, "pt") as file:
        expect(set(file.keys()) == set(wanted) | {"u16"}, f"names {file.keys()}")
        expect(file.metadata() == {"format": "pt", 'quote"': "line\n\u00e9"}, f"metadata {file.metadata()}")
        for name, tensor in wanted.items():
            got = file.get_tensor(name)
            expect(got.dtype == tensor.dtype and got.shape == tensor.shape, f"{name} is {got.dtype} {got.shape}")
            same = bits(got) == bits(tensor) if got.is_floating_point() else torch.equal(got, tensor)
            expect(same, f"{name}: {got}, wanted {tensor}")
    with safetensors.safe_open(path, "np") as file:  # PyTorch has no U16 in older versions
        expect(file.get_tensor("u16") == np.uint16(50256), "u16")
    torch_all = safetensors.torch.load_file(path)
    expect(len(torch_all) == 6, "load_file")
    again = path + ".again"  # and back: what they write of it, we print as the same
    safetensors.torch.save_file(torch_all, again, {"format": "pt", 'quote"': "line\n\u00e9"})
    ours, theirs = run("--print_tensors", path), run("--print_tensors", again)
    expect(ours.returncode == 0 and ours.stdout == theirs.stdout, ours.stdout + theirs.stdout + theirs.stderr)


def ours_read_theirs(path):
    torch.manual_seed(1)
    all_bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    tensors = {
        "scalar": torch.tensor(-1.5),
        "empty": torch.zeros((3, 0, 2)),
        "all fp16": all_bits.view(torch.float16).reshape(256, 256),
        "all bf16": all_bits.clone().view(torch.bfloat16).reshape(2, 32768),
        "bool": torch.tensor([True, False, True]),
        "\u00e9 \U0001f30d \"quoted\\": torch.randn(2, 3, 4, 5, 1, 1, 1, 2),
        "rounded fp16": (torch.randn(50000) * 10.0 ** torch.randint(-9, 6, (50000,))).half(),
    }
    for dtype in (torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        tensors[f"odd {dtype}"] = (torch.randn(7) * 100).abs().to(dtype)
    metadata = {"format": "pt", "a key\u00e9": "\u00e9\n\t\U0001f30d\"", "empty": ""}
    safetensors.torch.save_file(tensors, path, metadata)
    done = run("--print_tensors", path)
    expect(done.returncode == 0, done.stderr)
    lines = sorted(line for line in done.stdout.split("\n") if line and not line.startswith("metadata "))
    wanted = sorted(expected_line(name, tensor) for name, tensor in tensors.items())
    expect(len(lines) == len(wanted), f"{len(lines)} tensors")
    for got, want in zip(lines, wanted):
        # widening a NaN may set its quiet bit in PyTorch
        expect(got == want or nan_only(got, want), f"{got[:100]}, wanted {want[:100]}")
    pairs = {}
    for line in done.stdout.split("\n"):
        if line.startswith("metadata "):
            key, end = json.JSONDecoder(strict=False).raw_decode(line[9:])
            pairs[key] = json.loads(line[9 + end + 1 :])
    expect(pairs == metadata, f"metadata {pairs}")


def nan_only(got, want):
    got, want = got.split(" "), want.split(" ")
    return len(got) == len(want) and all(
        a == b or (len(a) == len(b) == 8 and int(a, 16) | 0x400000 == int(b, 16) | 0x400000 and
                   int(a, 16) & 0x7FFFFFFF > 0x7F800000) for a, b in zip(got, want))


def both_refuse(path):
    """What the reference refuses, we refuse; where we are stricter is said."""
    entry = '"dtype":"F32","shape":[1],"data_offsets":[0,4]'
    cases = {  # header, bytes of data, whether we accept it
        "no tensors": ("{}", 0, True),
        "plain": ('{"a":{%s}}' % entry, 4, True),
        "trailing blanks": ('{"a":{%s}}   ' % entry, 4, True),
        "empty file": ("", 0, False),
        "hole": ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', 8, False),
        "overlap": ('{"a":{%s},"b":{%s}}' % (entry, entry), 4, False),
        "trailing data": ('{"a":{%s}}' % entry, 5, False),
        "truncated": ('{"a":{%s}}' % entry, 3, False),
        "wrong size": ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', 4, False),
        "overflow": ('{"a":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}}', 4, False),
        "negative": ('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', 4, False),
        "name twice": ('{"a":{%s},"a":{%s}}' % (entry, entry), 4, False),
        "key twice": ('{"a":{%s,"dtype":"F32"}}' % entry, 4, False),
        "unknown key": ('{"a":{%s,"strides":[1]}}' % entry, 4, False),
        "control character in a name": ('{"a\\n":{%s}}' % entry, 4, False),
        "blank before": (' {"a":{%s}}' % entry, 4, False),
        "metadata of numbers": ('{"__metadata__":{"a":1}}', 0, False),
        "unknown dtype": ('{"a":{"dtype":"X32","shape":[1],"data_offsets":[0,4]}}', 4, False),
        "lone surrogate": ('{"\\ud800":{%s}}' % entry, 4, False),
        "not JSON": ('{"a":{%s},}' % entry, 4, False),
    }
    for what, (header, data_bytes, wanted) in cases.items():
        text = header.encode()
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + bytes(data_bytes))
        try:
            safetensors.numpy.load_file(path)
            theirs = True
        except Exception:  # they raise several kinds
            theirs = False
        ours = run("--print_tensors", path).returncode == 0
        expect(ours == wanted, f"{what}: we {'accept' if ours else 'refuse'} it")
        if ours != theirs:
            print(f"note: {what}: the reference {'accepts' if theirs else 'refuses'} it, we do not")


def main():
    if not os.path.exists(PROGRAM):
        sys.exit(f"error: {PROGRAM} is missing: make -s {PROGRAM}")
    with tempfile.TemporaryDirectory() as directory:
        theirs_read_ours(os.path.join(directory, "ours.safetensors"))
        ours_read_theirs(os.path.join(directory, "theirs.safetensors"))
        both_refuse(os.path.join(directory, "bad.safetensors"))
    print(f"check_safetensors: {'FAILED' if failures else 'ok'}, safetensors {safetensors.__version__}, "
          f"torch {torch.__version__}")
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())
