"""Writes dev/ref/fixtures/chats: prompts and chats, their tokens, and the loss of their answers.

    dev/ref/setup.sh && build/venv/bin/python dev/ref/make_chat_fixtures.py

documents.jsonl has prompts with completions, and chats. expected_FAMILY.txt has a line for each: its
tokens, with a star at those that are learned, as transformers' apply_chat_template makes them of the
tokenizer of this family (fixtures/tokenizers, or FAMILY.json here). model is a tiny random Llama with
the tokenizer of qwen2, and loss.txt the mean loss of all learned tokens and the norm of its gradient,
with weights in float64 and each document alone.
"""

import json
import shutil
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

FIXTURES = Path(__file__).parent / "fixtures"
OUT = FIXTURES / "chats"
GENERATION = "{% generation %}{{ m['content'] + END }}{% endgeneration %}"
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}" +
          GENERATION.replace("END", "'<|im_end|>'") +
          "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}")
LLAMA3 = ("{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
          "{% if m['role'] == 'assistant' %}" + GENERATION.replace("END", "'<|eot_id|>'") +
          "{% else %}{{ m['content'] + '<|eot_id|>' }}{% endif %}{% endfor %}")
# name: tokenizer, end-of-text, template
FAMILIES = {
    "qwen2": (FIXTURES / "tokenizers" / "qwen2.json", "<|endoftext|>", CHATML),
    "smollm2": (FIXTURES / "tokenizers" / "smollm2.json", "<|endoftext|>", CHATML),
    "llama3": (OUT / "llama3.json", "<|begin_of_text|>", LLAMA3),
}


def message(role, content):
    return {"role": role, "content": content}


def documents():
    yield {"prompt": "The capital of France is", "completion": " Paris."}
    yield {"messages": [message("user", "What is 2 + 3?"), message("assistant", "5.")]}
    yield {"messages": [message("system", "Answer in one word."), message("user", "How do you say caf\u00e9 in English?"),
                        message("assistant", "Coffee"), message("user", "And th\u00e9?"), message("assistant", "Tea")]}
    yield {"id": 7, "completion": "y = x ** 2\n", "prompt": "# squares\n"}
    yield {"prompt": "", "completion": "A text without a prompt."}
    yield {"messages": [message("assistant", "I speak first."), message("assistant", "And again."), message("user", "Why?")]}
    for n in range(6):
        yield {"messages": [message("user", f"Count to {n + 2}, please."),
                            message("assistant", ", ".join(str(i + 1) for i in range(n + 2)) + ".")]}


def llama3():
    tokenizer = Tokenizer.from_file(str(FIXTURES / "tokenizers" / "llama3.json"))
    tokenizer.add_special_tokens(["<|start_header_id|>", "<|end_header_id|>"])
    tokenizer.save(str(OUT / "llama3.json"))


def encoded(tokenizer, document, eot):
    """Returns the tokens from end-of-text to the next document's, and which are learned."""
    if "messages" in document:
        got = tokenizer.apply_chat_template(document["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, learned, ends = got["input_ids"], got["assistant_masks"], 0
    else:
        prompt, completion = (tokenizer.encode(document[key], add_special_tokens=False) for key in ("prompt", "completion"))
        ids, learned, ends = prompt + completion, [0] * len(prompt) + [1] * len(completion), 1
    return [eot, *ids, eot], [0, *learned, ends]


def expected(name, lines):
    path, eot, template = FAMILIES[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=template)
    made = [encoded(tokenizer, line, tokenizer.convert_tokens_to_ids(eot)) for line in lines]
    text = "".join(" ".join(f"{i}{'*' if learn else ''}" for i, learn in zip(*one)) + "\n" for one in made)
    (OUT / f"expected_{name}.txt").write_text(text)
    return made


def model():
    config = transformers.LlamaConfig(vocab_size=648, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                                      num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=128,
                                      bos_token_id=640, eos_token_id=640, tie_word_embeddings=True)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    rng = torch.Generator().manual_seed(20261126)
    with torch.no_grad():
        for name, x in made.named_parameters():
            noise = torch.randn(x.shape, generator=rng)
            x.copy_(1 + 0.2 * noise if "norm" in name else 0.3 * noise)
    made.to(torch.bfloat16).save_pretrained(OUT / "model")
    shutil.copy(FIXTURES / "tokenizers" / "qwen2.json", OUT / "model" / "tokenizer.json")
    for path in (OUT / "model").iterdir():
        path.chmod(0o644)


def loss(made):
    """Returns the mean loss of the learned tokens, and the norm of its gradient."""
    net = transformers.AutoModelForCausalLM.from_pretrained(OUT / "model", attn_implementation="eager").double().eval()
    total, count = 0, 0
    for ids, learned in made:
        logits = net(torch.tensor([ids[:-1]])).logits[0]
        labels = torch.tensor([i if learn else -100 for i, learn in zip(ids[1:], learned[1:])])
        total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        count += sum(learned)
    (total / count).backward()
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x.grad) for x in net.parameters()]))
    return (total / count).item(), norm.item(), count


def main():
    torch.set_num_threads(1)  # one order of summation
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    lines = list(documents())
    (OUT / "documents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    llama3()
    model()
    made = {name: expected(name, lines) for name in FAMILIES}
    value, norm, count = loss(made["qwen2"])
    (OUT / "loss.txt").write_text(f"# loss norm learned tokens\n{value:.9f} {norm:.9f} {count}\n")
    print(f"loss {value:.6f}, norm {norm:.6f}, {count} learned tokens, longest {max(len(i) for i, _ in made['qwen2'])}")


if __name__ == "__main__":
    main()
