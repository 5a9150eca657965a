"""Writes dev/ref/fixtures/sentencepiece: small tokenizers of SentencePiece's kind, and what their
libraries make of texts that are hard to tokenize.

    dev/ref/setup.sh && build/venv/bin/pip install sentencepiece protobuf
    TINY_TEXT=tinyshakespeare.txt build/venv/bin/python dev/ref/make_sentence_fixtures.py

NAME.model is a model that sentencepiece trained, NAME.json one in the form of a family of
tokenizers, made of such a model. cases.bin is little endian: "spmcases", uint32 number of
tokenizers, of cases; each tokenizer: 16 bytes of name; each case: uint32 bytes, uint32 repeats, the
bytes, and for each tokenizer the low 32 bits of FNV-1a over the ids as uint16, and over the decoded
text (0 where an id is unknown, which the libraries decode in their own ways). Special tokens are
read as text.
"""

import json
import os
import random
import struct
import sys
import tempfile
from pathlib import Path

import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))

ROOT = Path(__file__).parents[2]
OUT = ROOT / "dev" / "ref" / "fixtures" / "sentencepiece"
BLANK = "\u2581"
UNK = "<unk>"
# A text in many writings, ours.
MANY = """
Der Müller mahlt, die Mühle dreht sich; am Abend schläft das Dorf. Größe, Straße, Übung, ähnlich.
L'été dernier, nous avons mangé des crêpes près de la forêt; où êtes-vous allés, ma sœur et toi?
El niño pequeño comió una piña mañana por la mañana. ¿Dónde está la cigüeña? ¡Qué corazón!
Быстрый поезд идёт через лес, и старый мост дрожит под ним. Где моя тёплая шапка?
Το πλοίο φεύγει το πρωί από το λιμάνι· η θάλασσα είναι ήρεμη σήμερα.
今天的天气很好，我们去公园散步。孩子们在湖边放风筝，老人在树下下棋。你好世界！
明日は雨が降るでしょう。駅の前で友だちを待っています。カタカナとひらがな。
오늘은 날씨가 맑고 바람이 시원합니다. 우리는 강가를 걸었습니다.
الشمس مشرقة اليوم والأطفال يلعبون في الحديقة. أين الكتاب؟
वह हर सुबह नदी के किनारे टहलता है और पक्षियों को देखता है।
for (int i = 0; i < 128; i++) { sum += x[i] * 2.5e-3; }  // 1999, 2024, 31415926
    if value is None:\n        return "empty"\n\t\ttabs\n
"""


def corpus():
    text = Path(os.environ["TINY_TEXT"]).read_text()
    return text + (MANY + "\n\n") * 60


def trained(vocab_size, **settings):
    """Returns the bytes of a BPE model that sentencepiece trained on the corpus."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "text.txt"
        path.write_text(corpus())
        defaults = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "add_dummy_prefix": True,
                    "remove_extra_whitespaces": False, "split_digits": True, "character_coverage": 0.9995,
                    "allow_whitespace_only_pieces": True, "max_sentence_length": 1 << 20, "num_threads": 2}
        sentencepiece.SentencePieceTrainer.train(input=str(path), model_prefix=f"{directory}/m", vocab_size=vocab_size,
                                                 minloglevel=2, **{**defaults, **settings})
        model = sentencepiece_model_pb2.ModelProto()
        model.ParseFromString(Path(f"{directory}/m.model").read_bytes())
        model.trainer_spec.input[:] = []  # a directory that no longer exists
        model.trainer_spec.model_prefix = ""
        return model.SerializeToString()


def merges_of(vocab, scores):
    """Returns all ways to make each piece of two, the highest scores first, as transformers does."""
    merges = []
    for piece, score in scores.items():
        ways = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        ways = [(a, b, score) for a, b in ways if a in vocab and b in vocab]
        merges += sorted(ways, key=lambda way: (vocab[way[0]], vocab[way[1]]))
    merges = sorted(merges, key=lambda way: (way[2], len(way[0]), len(way[1])), reverse=True)
    return [[a, b] for a, b, _ in merges]


def added(id, content, special=True, **flags):
    return {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": special, **flags}


REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": BLANK}, REPLACE]}
UNSPELL = {"type": "Replace", "pattern": {"String": BLANK}, "content": " "}
DECODER = [UNSPELL, {"type": "ByteFallback"}, {"type": "Fuse"}]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def metaspace(scheme, split):
    return {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": scheme, "split": split}


def converted(model, normalizer=None, pre_tokenizer=None, decoder=None, words=(), start="<s>", **settings):
    """Returns the tokenizer.json of a model."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    vocab = {piece.piece: id for id, piece in enumerate(proto.pieces)}
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in (1, 4)}
    tokens = [added(id, piece.piece) for id, piece in enumerate(proto.pieces) if piece.type in (2, 3)]
    new = [word["content"] for word in words if word["content"] not in vocab]
    ids = vocab | {content: len(vocab) + i for i, content in enumerate(new)}
    tokens += [{**word, "id": ids[word["content"]]} for word in words]
    special = {"SpecialToken": {"id": start, "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [special, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {start: {"id": start, "ids": [vocab[start]], "tokens": [start]}}}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer, "post_processor": template,
            "decoder": decoder or {"type": "Sequence", "decoders": [*DECODER, STRIP]},
            "model": {"type": "BPE", "dropout": None, "unk_token": UNK, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                      "vocab": vocab, "merges": merges_of(vocab, scores), **settings}}


def word(content, **flags):
    return added(0, content, special=False, **flags)


def makers():
    """Returns the models by name, and the files of tokenizers."""
    size = 900
    llama = trained(size)
    user = [BLANK * n for n in range(2, 6)] + ["\n", "\n\n", "<table>", BLANK + "zebra", "ab"]
    gemma = trained(size, add_dummy_prefix=False, user_defined_symbols=user, control_symbols=["<start_of_turn>"],
                    pad_id=0, eos_id=1, bos_id=2, unk_id=3, pad_piece="<pad>", bos_piece="<bos>", eos_piece="<eos>")
    crossing = trained(600, split_by_whitespace=False, max_sentencepiece_length=12, character_coverage=0.98)
    models = {"llama2": llama, "gemma": gemma, "crossing": crossing}
    small = trained(600, character_coverage=0.98)
    gemma_words = [word(w) for w in user if w != BLANK + "zebra"]
    phi3_words = [word("</s>", rstrip=True), word("<|mark|>", rstrip=True), word("<tag>"), word("thou")]
    gemma_small = trained(600, character_coverage=0.98, add_dummy_prefix=False, user_defined_symbols=user, pad_id=0, eos_id=1, bos_id=2, unk_id=3,
                          pad_piece="<pad>", bos_piece="<bos>", eos_piece="<eos>")
    files = {
        "llama2": converted(small, PREPEND),
        "mistral": converted(small, None, metaspace("first", False), words=[word("thou"), word("[INST]", normalized=True)]),
        "always": converted(small, None, metaspace("always", False), words=[word("<x>"), word("thou")]),
        "never": converted(small, None, metaspace("never", False), {"type": "Sequence", "decoders": DECODER}),
        "gemma": converted(gemma_small, REPLACE,
                           {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
                           {"type": "Sequence", "decoders": DECODER}, words=[*gemma_words, word("<tag>", normalized=True)], start="<bos>"),
        "phi3": converted(small, PREPEND, words=phi3_words),
    }
    # its end of a text is a word
    tokens = [token for token in files["phi3"]["added_tokens"] if not (token["special"] and token["content"] == "</s>")]
    files["phi3"]["added_tokens"] = sorted(tokens, key=lambda token: token["id"])
    return models, files


def cases(rng):
    texts = ["", " ", "  ", "   ", "a", " a", "a ", "  a  b   c ", "\n", "\n\n", "\n\n\n a\n b \n", "\t", "\r\n", "Hello world",
             BLANK, BLANK + "a", " " + BLANK + " ", "a" + BLANK + "b", BLANK * 3 + "x", "a" + BLANK * 2 + " ",
             "a<s>", "=</s>", "a</s>   b", "=</s>\n\u3000 c</s>", "a<unk>", "a<0x41>", "<|mark|> \t x<|mark|>", "<tag>", " <tag>x",
             "a<tag> <tag>", "thou art", "thoughthou thou", "[INST] hi [/INST]", "<x> a<x>b <x>", "<table>ab zebra  zebra",
             "zebra zebra", "<bos><start_of_turn>user\nhi", "the the the", "I'll don't", "x" * 50, "\u00a0a\u00a0 b",
             "\u3000\u2003 q", "\x00\x01\x7f", "\U0001f600\U0001f601 \U0001f600", "e\u0301 \u00e9", "\ufffd", "\ufeffa", "\u0378"]
    for text in texts:
        yield text, 1
    kinds = ["a", "th", "the", "The", " ", "  ", "   ", "\n", "\n\n", "\t", "'s", "12", "!", "\u00e9", "\u6f22\u5b57", "\u0436",
             "\u4f60\u597d", BLANK, "\U0001f600", "\u00a0", "\u2019", "\u0301", "\x00", "=<s>", "=</s>", "<tag>", "thou", "ab",
             " zebra", "king", "shall", "\uac00", "\u0627\u0644", "\u0928", "<table>", "=<0x0A>", ",", ". "]
    for n in range(500):
        yield "".join(rng.choice(kinds) for _ in range(1 + n % 40)), 1
    lines = [line for line in (corpus()[:20000] + MANY * 2).split("\n") if line]
    for _ in range(60):
        i = rng.randrange(len(lines) - 3)
        yield "\n".join(lines[i : i + 3]), 1
    for unit in ["a", " ", "\n", "0", "\u6f22", "\U0001f600", "ab", "aab", "the", " a", "\n ", "th", BLANK, "la la", "e"]:
        for repeats in (15, 16, 17, 31, 32, 47, 48, 49, 64, 1000, 20000):
            yield unit, repeats


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value & 0xFFFFFFFF


def open_model(model):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return (lambda text: processor.encode(text)), processor.decode, processor.unk_id()


def open_file(content):
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.encode_special_tokens = True
    return (lambda text: tokenizer.encode(text, add_special_tokens=False).ids), tokenizer.decode, tokenizer.token_to_id(UNK)


def main():
    OUT.mkdir(exist_ok=True)
    models, files = makers()
    opened = []
    for name, model in models.items():
        (OUT / f"{name}.model").write_bytes(model)
        opened.append((f"{name}.model", *open_model(model)))
    for name, content in files.items():
        (OUT / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")))
        opened.append((f"{name}.json", *open_file(content)))
    records = []
    for text, repeats in cases(random.Random(20261129)):
        data = text.encode()
        record = struct.pack("<II", len(data), repeats) + data
        for name, encode, decode, unknown in opened:
            ids = encode(text * repeats)
            decoded = 0 if unknown in ids else fnv1a(decode(ids).encode())
            record += struct.pack("<II", fnv1a(struct.pack(f"<{len(ids)}H", *ids)), decoded)
        records.append(record)
    head = b"spmcases" + struct.pack("<II", len(opened), len(records))
    head += b"".join(name.encode().ljust(16, b"\0") for name, *_ in opened)
    (OUT / "cases.bin").write_bytes(head + b"".join(records))
    print(f"{OUT}: {len(records)} cases, sentencepiece {sentencepiece.__version__}, tokenizers {tokenizers.__version__}, "
          f"{sum(path.stat().st_size for path in OUT.iterdir()) >> 10} KiB")


if __name__ == "__main__":
    main()
