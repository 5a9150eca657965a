"""Writes dev/ref/fixtures/tokenizers: small tokenizers in the form of each family, and what their
library makes of texts that are hard to tokenize.

    dev/ref/setup.sh
    build/venv/bin/python dev/ref/make_tokenizer_fixtures.py

FAMILY.json is a tokenizer.json that the package tokenizers trained on sources of this repository.
cases.bin is little endian: "tokcases", uint32 number of families, of cases; each family: 16 bytes
of name; each case: uint32 bytes, uint32 repeats, the bytes, and for each family the low 32 bits of
FNV-1a over the ids as uint16. The text is these bytes, `repeats` times. Special tokens are read as
text.
"""

import json
import random
import struct
import sys
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

sys.path.insert(0, str(Path(__file__).parent))
from make_bpe_fixtures import CLASSES, cases, characters, fnv1a, matcher  # noqa: E402

ROOT = Path(__file__).parents[2]
OUT = ROOT / "dev" / "ref" / "fixtures" / "tokenizers"
SOURCES = ["README.md", "llmc/reference.h", "llmc/base/json.h", "dev/ref/make_bpe_fixtures.py"]
EOT = "<|endoftext|>"
CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{0}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
NANOCHAT = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
            r"|\s+(?!\S)|\s+")
UPPER, LOWER, ENDING = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}|\p{{N}}{{1,3}}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CASES = [*CLASSES, ("capital", r"[\p{Lu}\p{Lt}]"), ("minuscule", r"\p{Ll}"), ("mark", r"\p{M}")]
GPT2_FORM = pre_tokenizers.ByteLevel(add_prefix_space=False)


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated", False),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def cl100k(digits):
    return split(CL100K.format(digits))


def texts():
    for path in SOURCES:
        yield (ROOT / path).read_text()
    yield "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m \uac00\ub098\ub2e4 \u4f60\u597d\u4e16\u754c 1999 2024 31415926 " * 40


def trained(pre_tokenizer, first=(), size=640, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(first), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def template(tokenizer, names):
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(names) + " $A", pair=None, special_tokens=[(n, tokenizer.token_to_id(n)) for n in names])


def with_model(tokenizer, change):
    """Returns the tokenizer after a change of its model's JSON."""
    content = json.loads(tokenizer.to_str())
    change(content["model"])
    return Tokenizer.from_str(json.dumps(content))


def gpt2():
    """Fine-tuned: with words that are cut out of the text, one of which is a token already."""
    tokenizer = trained(GPT2_FORM, [EOT])
    word = max((t for t in tokenizer.get_vocab() if t.isalpha() and t.isascii()), key=len)
    tokenizer.add_tokens(["vector", "vec", "<think>", "caf\u00e9", word])
    return tokenizer


def smollm2():
    names = [EOT, "<|im_start|>", "<|im_end|>"] + [f"<reserved_{i}>" for i in range(14)]
    return trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_FORM]), names)


def qwen2():
    tokenizer = trained(cl100k(""), normalizer=normalizers.NFC())
    tokenizer.add_special_tokens([EOT, "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ["<tool_call>", "</tool_call>", "e\u0301e"]])
    tokenizer.add_tokens(["\u00e9!", "<think>"])
    return tokenizer


def olmo():
    """GPT-NeoX's, where runs of spaces are words."""
    tokenizer = trained(GPT2_FORM, [EOT, "<|padding|>"], normalizer=normalizers.NFC())
    tokenizer.add_tokens([" " * n for n in (24, 8, 4, 3, 2)] + ["|||IP_ADDRESS|||"])
    return tokenizer


def llama3():
    """As converted from a .tiktoken file: all ways to split a token are merges, and a piece that is
    a token is not merged. Some tokens cannot be merged."""
    tokenizer = trained(cl100k("{1,3}"))

    def convert(model):
        ranks = model["vocab"]
        merges = []
        for token in ranks:
            halves = [(token[:i], token[i:]) for i in range(1, len(token))]
            halves = [(a, b) for a, b in halves if a in ranks and b in ranks]
            merges += sorted(halves, key=lambda half: (ranks[half[0]], ranks[half[1]]))
        for word in ["\u0120xylophone", "qzqzqz", "12z", "!=!=", "\u010a\u010a\u010a\u0120\u0120"]:
            ranks[word] = len(ranks)
        model["merges"] = sorted(merges, key=lambda half: ranks["".join(half)])
        model["ignore_merges"] = True

    tokenizer = with_model(tokenizer, convert)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    template(tokenizer, ["<|begin_of_text|>"])
    return tokenizer


def shuffled():
    """Merges in any order, some tokens made by several."""
    def shuffle(model):
        ranks = model["vocab"]
        merges = [tuple(merge) for merge in model["merges"]]
        for token in list(ranks)[::3]:
            halves = [(token[:i], token[i:]) for i in range(1, len(token))]
            merges += [half for half in halves if half[0] in ranks and half[1] in ranks and half not in merges]
        random.Random(3).shuffle(merges)
        model["merges"] = merges

    return with_model(trained(cl100k("+"), [EOT]), shuffle)


def nanochat():
    tokenizer = trained(split(NANOCHAT))
    tokenizer.add_special_tokens(["<|bos|>", "<|user_start|>", "<|user_end|>"])
    return tokenizer


def glm4():
    tokenizer = trained(cl100k("{1,3}"))
    tokenizer.add_special_tokens([EOT, "[MASK]", "[gMASK]", "<sop>"])
    template(tokenizer, ["[gMASK]", "<sop>"])
    return tokenizer


def gptoss():
    tokenizer = trained(split(O200K))
    tokenizer.add_special_tokens(["<|startoftext|>", EOT, "<|return|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>"])
    return with_model(tokenizer, lambda model: model.update(ignore_merges=True))


FAMILIES = {maker.__name__: maker for maker in (gpt2, smollm2, qwen2, olmo, llama3, shuffled, nanochat, glm4, gptoss)}


def composing(rng):
    """Yields texts that normalization changes: marks in any order, parts of Hangul, other forms."""
    marks = ["\u0301", "\u0323", "\u0327", "\u0345", "\u0334", "\u0300", "\u0338", "\u3099", "\u05b4", "\u0344"]
    others = ["e", "A", "\u00e9", "\u1e69", "\u1100", "\u1161", "\u11a8", "\uac00", "\uac01", "\u212b", "\u2126", "\u0958",
              "\U0001d15e", "\U0001d160", "\uf900", "\ufb1d", "\u2000", "\u2001", " ", "\n", "1", "\u0660", "!", "\u037e",
              "\u0374", "\u1fef", "\u0b47\u0b3e", "\u0dd9\u0dcf\u0dca", "\u304b", "\u6f22", "\u09c7", "\u09be"]
    for c in [*marks, *others]:
        for d in [*marks, *others]:
            yield c + d
            yield f"a{c}{d} {c}{d}e\u0301"
    for n in range(300):
        yield "".join(rng.choice(marks if rng.random() < 0.5 else others) for _ in range(1 + n % 60))
    for c in range(0x110000):  # every character that changes
        if not 0xD800 <= c <= 0xDFFF and normalizers.NFD().normalize_str(chr(c)) != chr(c) and c % 7 == n % 7:
            yield f"x{chr(c)} {normalizers.NFD().normalize_str(chr(c))}"


WORDS = [
    "a vector, vectors, vec vecvector <think>caf\u00e9</think>cafe\u0301", 
    "<tool_call>{}</tool_call> e\u0301e ee\u0301!",
    "  two   three    four     five" + " " * 8 + "eight" + " " * 50 + "\n    \t  |||IP_ADDRESS|||",
    " xylophone xylophones qzqzqz qzqzqzq",
    "12z 12zz 1212z!=!= !=!=!", "\n\n\n  a \n\n\n  \n\n\n  b", "<|im_start|>user\nhi<|im_end|>",
    "It'S HE'LL we'Re I\u2019m '\u017ft '\u017f", "HTTPServer camelCase XMLHttpRequest ABC\u4f60D \u4f60ABCd \u4f60ABC",
    "!\n/\n//\n a/b/ //\r\n/ \u0301A \u0301Ab A\u0301B !\u0301 !!\u0301a don't'll DON'Ts 'S \u01c5x\u01c5 \u02b0A\u02b0",
]  # fmt: skip


def other_characters():
    """Returns the characters whose class is another one in the library's version of Unicode."""
    matches = {name: matcher(pattern) for name, pattern in CASES}
    theirs = {name: pre_tokenizers.Split(Regex(pattern), "removed") for name, pattern in CASES}
    digits = pre_tokenizers.Digits()
    found = set()
    for c in characters():
        text = chr(c)
        for name in matches:
            if matches[name](text) != (not theirs[name].pre_tokenize_str(text)):
                found.add(text)
        if matches["number"](text) != (len(digits.pre_tokenize_str("a" + text)) == 2):
            found.add(text)
    return found


def main():
    OUT.mkdir(exist_ok=True)
    made = {}
    for name, maker in FAMILIES.items():
        maker().save(str(OUT / f"{name}.json"), pretty=False)
        made[name] = Tokenizer.from_file(str(OUT / f"{name}.json"))
        made[name].encode_special_tokens = True
    rng, others, skipped = random.Random(20240328), other_characters(), 0
    records = []
    for text, repeats in [*((t, 1) for t in WORDS), *cases(rng), *((t, 1) for t in composing(rng))]:
        if others & set(text):
            skipped += 1
            continue
        data = text.encode()
        record = struct.pack("<II", len(data), repeats) + data
        for tokenizer in made.values():
            ids = tokenizer.encode(text * repeats, add_special_tokens=False).ids
            record += struct.pack("<I", fnv1a(struct.pack(f"<{len(ids)}H", *ids)) & 0xFFFFFFFF)
        records.append(record)
    head = b"tokcases" + struct.pack("<II", len(made), len(records)) + b"".join(n.encode().ljust(16, b"\0") for n in made)
    (OUT / "cases.bin").write_bytes(head + b"".join(records))
    print(f"{OUT}: {len(records)} cases, tokenizers {tokenizers.__version__}; {skipped} cases left out for {len(others)} "
          "characters of another Unicode version")


if __name__ == "__main__":
    main()
