"""Writes dev/ref/fixtures/chat_formats: the tokens of odd chats in the formats of chat_format.h.

    build/venv/bin/python dev/ref/make_chat_format_fixtures.py

chats.jsonl has 300 chats: empty contents, blanks, marks of all formats, characters that normalization changes,
messages of the system anywhere, two in a row of one role, a last question without an answer. templates.json has a
template of each format, written from the format's documentation, with the marks of transformers around answers; and
templates that differ from these in what may differ. VOCABULARY.json are tokenizers: with the marks of all formats as
special tokens, and with ChatML's only. expected_VOCABULARY.txt has a line for each template: a checksum for each chat, of its
tokens after the start token and of which are learned.

The tokens are those of apply_chat_template where no content has a mark. Where one has, its first character is replaced
while the template is rendered, and put back before the text between the marks is encoded: contents are data.
"""

import datetime
import json
import random
import shutil
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template



class Day(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 2, 9)


chat_template_utils.datetime = Day
FIXTURES = Path(__file__).parent / "fixtures"
OUT = FIXTURES / "chat_formats"
EOS = "</s>"
DEEPSEEK = ["<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"]
MARKS = ["<|im_start|>", "<|im_end|>", "<|im_sep|>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
         "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|system|>",
         "<|user|>", "<|assistant|>", "<|end|>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>",
         "[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]", *DEEPSEEK]
HARMONY = ["<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
# name: tokenizer, start token, whether the marks are special tokens
VOCABULARIES = {"qwen2": ("<|endoftext|>", True), "llama3": ("<|begin_of_text|>", True), "smollm2": ("<|endoftext|>", False)}


def turns(before, roles, after, end, answer_end=None, trim="", bos="", tail="", prompt=None, lead=""):
    """A template whose messages are all alike: before, role, after, content, end."""
    def header(role):
        return before + roles[role] + after
    answer_end = end if answer_end is None else answer_end
    prompt = header("assistant") if prompt is None else prompt
    text = "{{ bos_token }}" if bos else ""
    text += "{% for m in messages %}"
    for number, role in enumerate(["system", "user"]):
        text += f"{{% {'elif' if number else 'if'} m['role'] == '{role}' %}}{{{{ {quoted(header(role))} + m['content']{trim} + {end} }}}}"
    text += f"{{% else %}}{{{{ {quoted(header('assistant'))} }}}}{{% generation %}}{{{{ {quoted(lead)} + m['content']{trim} + {answer_end[0] if isinstance(answer_end, tuple) else answer_end} }}}}{{% endgeneration %}}"
    if isinstance(answer_end, tuple):
        text += f"{{{{ {answer_end[1]} }}}}"
    return text + f"{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {quoted(prompt)} }}}}{{% else %}}{tail}{{% endif %}}"


def harmony(name, effort, after):
    """`after`: what stands behind the first message of the system. The opening is a macro, as in the published template."""
    return ("{% macro opening(name, effort='" + effort + "') %}{{ name + '\\nKnowledge cutoff: 2024-06\\nCurrent date: ' + strftime_now('%Y-%m-%d') }}"
            "{{ '\\n\\nReasoning: ' + effort + '\\n\\n# Valid channels: analysis, commentary, final. Channel must be included for every message.' }}"
            "{% endmacro %}{{ '<|start|>system<|message|>' + opening('" + name + "') + '<|end|>' }}{% for m in messages %}"
            "{% if m['role'] == 'system' %}{{ '<|start|>developer<|message|># Instructions\\n\\n' + m['content'] }}"
            "{% if loop.first %}{{ '" + after + "' }}{% endif %}{{ '<|end|>' }}"
            "{% elif m['role'] == 'user' %}{{ '<|start|>user<|message|>' + m['content'] + '<|end|>' }}"
            "{% else %}{{ '<|start|>assistant' }}{% generation %}{{ '<|channel|>final<|message|>' + m['content'] }}"
            "{% if loop.last and not add_generation_prompt %}{{ '<|return|>' }}{% endif %}{% endgeneration %}"
            "{% if not loop.last or add_generation_prompt %}{{ '<|end|>' }}{% endif %}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}")


def quoted(text):
    return "'" + text.replace("\n", "\\n") + "'"


SAME = {role: role for role in ["system", "user", "assistant"]}
CHATML = turns("<|im_start|>", SAME, "\n", "'<|im_end|>\\n'", ("'<|im_end|>'", "'\\n'"))
DEFAULT = ("{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
           "{% endif %}")
LLAMA2 = """{% for m in messages %}
    {%- if m['role'] == 'system' %}
        {%- if loop.last or messages[loop.index0 + 1]['role'] != 'user' %}
            {{- bos_token + '[INST] <<SYS>>\\n' + m['content'] + '\\n<</SYS>>\\n\\n' }}
        {%- endif %}
    {%- elif m['role'] == 'user' %}
        {%- if loop.index0 > 0 and messages[loop.index0 - 1]['role'] == 'system' %}
            {%- set text = '<<SYS>>\\n' + messages[loop.index0 - 1]['content'] + '\\n<</SYS>>\\n\\n' + m['content'] %}
        {%- else %}
            {%- set text = m['content'] %}
        {%- endif %}
        {{- bos_token + '[INST] ' + text.strip() + ' [/INST]' }}
    {%- else %}
        {%- generation %}
            {{- ' ' + m['content'].strip() + ' ' + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """{{ bos_token }}
{%- for m in messages %}
    {%- if m['role'] == 'system' %}
        {{- '<start_of_turn>user\\n' + m['content'] }}
        {%- if loop.last or messages[loop.index]['role'] != 'user' %}
            {{- '\\n\\n' }}
        {%- endif %}
    {%- elif m['role'] == 'user' %}
        {{- '\\n\\n' if loop.index0 and messages[loop.index0 - 1]['role'] == 'system' else '<start_of_turn>user\\n' }}
        {{- m['content'] | trim + '<end_of_turn>\\n' }}
    {%- else %}
        {{- '<start_of_turn>model\\n' }}
        {%- generation %}
            {{- m['content'] | trim + '<end_of_turn>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""


def mistral3(blank, trim):
    return f"""{{%- set ns = namespace(last=-1) %}}
{{%- for m in messages %}}
    {{%- if m['role'] == 'user' %}}
        {{%- set ns.last = loop.index0 %}}
    {{%- endif %}}
{{%- endfor %}}
{{{{- bos_token }}}}
{{%- for m in messages %}}
    {{%- if m['role'] == 'user' %}}
        {{{{- '[INST]{blank}' }}}}
        {{%- if loop.index0 == ns.last %}}
            {{%- for s in messages[:ns.last] %}}
                {{%- if s['role'] == 'system' %}}
                    {{{{- s['content'] + '\\n\\n' }}}}
                {{%- endif %}}
            {{%- endfor %}}
        {{%- endif %}}
        {{{{- m['content'] + '[/INST]' }}}}
    {{%- elif m['role'] == 'system' %}}
        {{%- if loop.index0 > ns.last %}}
            {{{{- '[INST]{blank}' + m['content'] + '[/INST]' }}}}
        {{%- endif %}}
    {{%- else %}}
        {{%- generation %}}
            {{{{- '{blank}' + m['content']{trim} + eos_token }}}}
        {{%- endgeneration %}}
    {{%- endif %}}
{{%- endfor %}}
"""


def mistral7(blank):
    return ("{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
            f"{{{{ '[SYSTEM_PROMPT]{blank}' + m['content'] + '[/SYSTEM_PROMPT]' }}}}"
            f"{{% elif m['role'] == 'user' %}}{{{{ '[INST]{blank}' + m['content'] + '[/INST]' }}}}"
            f"{{% else %}}{{% generation %}}{{{{ '{blank}' + m['content'] + eos_token }}}}{{% endgeneration %}}"
            "{% endif %}{% endfor %}")


LLAMA3 = turns("<|start_header_id|>", SAME, "<|end_header_id|>\n\n", "'<|eot_id|>'", trim=" | trim", bos=1)
PHI3 = turns("<|", SAME, "|>\n", "'<|end|>\\n'", ("'<|end|>'", "'\\n'"))
GRANITE = turns("<|start_of_role|>", SAME, "<|end_of_role|>", "'<|end_of_text|>\\n'", ("'<|end_of_text|>'", "'\\n'"))
GRANITE4_SYSTEM = "You are a helpful assistant. Please ensure responses are professional, accurate, and safe."
DATED = "{% if messages[0]['role'] != 'system' %}{{ '<|start_of_role|>system<|end_of_role|>Today\\'s Date: ' + strftime_now('%B %d, %Y') + '.\\nBe helpful.<|end_of_text|>\\n' }}{% endif %}"
LLAMA32 = """{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- bos_token + "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system + "<|eot_id|>" }}
"""
OLMO3 = """{%- set has_system = messages[0]['role'] == 'system' -%}
{%- if not has_system -%}
    {{- '<|im_start|>system\\nYou are a helpful function-calling AI assistant. ' -}}
    {%- if tools is not defined or tools is none -%}
        {{- 'You do not currently have access to any functions. <functions></functions><|im_end|>\\n' -}}
    {%- endif -%}
{%- endif -%}
"""
# name: format, template
TEMPLATES = {
    "chatml": ("chatml", CHATML),
    "chatml with a default": ("chatml", DEFAULT + CHATML),
    "chatml of olmo3": ("chatml", OLMO3 + CHATML),
    "chatml with a start": ("chatml", "{{ bos_token }}" + CHATML),
    "chatml trimmed": ("chatml", CHATML.replace("m['content']", "m['content'].strip()")),
    "llama2": ("llama2", LLAMA2),
    "llama3": ("llama3", LLAMA3),
    "llama3 with a date": ("llama3", LLAMA32.rstrip() + LLAMA3.replace("{{ bos_token }}", "", 1)),
    "llama3 untrimmed": ("llama3", LLAMA3.replace(" | trim", "")),
    "mistral3": ("mistral3", mistral3(" ", " | trim")),
    "mistral3-tekken": ("mistral3-tekken", mistral3("", "")),
    "mistral7": ("mistral7", mistral7(" ")),
    "mistral7-tekken": ("mistral7-tekken", mistral7("")),
    "gemma": ("gemma", GEMMA),
    "phi3": ("phi3", PHI3),
    "phi3 with an end": ("phi3", turns("<|", SAME, "|>\n", "'<|end|>\\n'", ("'<|end|>'", "'\\n'"), tail="{{ eos_token }}")),
    "phi4-mini": ("phi4-mini", turns("<|", SAME, "|>", "'<|end|>'")),
    "phi4": ("phi4", turns("<|im_start|>", SAME, "<|im_sep|>", "'<|im_end|>'")),
    "zephyr": ("zephyr", turns("<|", SAME, "|>\n", "eos_token + '\\n'", ("eos_token", "'\\n'"))),
    "granite": ("granite", GRANITE),
    "granite with a date": ("granite", DATED + GRANITE),
    "granite 4": ("granite", "{% if messages[0]['role'] != 'system' %}{{ '<|start_of_role|>system<|end_of_role|>" + GRANITE4_SYSTEM
                  + "<|end_of_text|>\\n' }}{% endif %}" + GRANITE),
    "exaone": ("exaone", turns("[|", SAME, "|]\n", "'[|endofturn|]\\n'", ("'[|endofturn|]'", "'\\n'"))),
    "glm4": ("glm4", "[gMASK]<sop>" + turns("<|", SAME, "|>\n", "''").replace(
        "{{ '<|user|>\\n' + m['content'] + '' }}",
        "{% if not loop.first and loop.previtem['role'] == 'assistant' %}{% generation %}{{ '<|user|>\\n' }}{% endgeneration %}"
        "{% else %}{{ '<|user|>\\n' }}{% endif %}{{ m['content'] }}")),
    "deepseek": ("deepseek", "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
                 f"{{% elif m['role'] == 'user' %}}{{{{ '{DEEPSEEK[0]}' + m['content'] }}}}{{% else %}}{{{{ '{DEEPSEEK[1]}' }}}}"
                 f"{{% generation %}}{{{{ m['content'] + '{DEEPSEEK[2]}' }}}}{{% endgeneration %}}{{% endif %}}{{% endfor %}}"
                 f"{{% if add_generation_prompt %}}{{{{ '{DEEPSEEK[1]}' }}}}{{% endif %}}"),
    "harmony": ("harmony", harmony("You are ChatGPT, a large language model trained by OpenAI.", "medium", "")),
    "harmony of another name": ("harmony", harmony("You are Ada.", "low", "\\n\\n")),
}
CONTENTS = ["", " ", "\n", "\t\n ", "  a blank before", "blanks after \n", "\n\nlines\n\n", "Hello!", "What is 2 + 3?", "5.",
            "caf\u00e9 na\u00efve", "e\u0301 is two characters", "\u0301 starts with half a character", "\u4f60\u597d\uff0c\u4e16\u754c", "\u00a0no-break\u2003",
            "1234567 and 89", "don't, we'll", "{{ messages }} {% if %}", "a\\nb 'quoted' \"twice\"", "\U0001f600\U0001f44d\U0001f3fd", "x = [1, 2]\n\n    y",
            "<think>a thought</think>", "a b  c   d", "\u2028", "\x1c"]


def chats():
    rng = random.Random(20261128)

    def content():
        kind = rng.random()
        if kind < 0.2:
            return rng.choice(["", "a", " ", "\n"]) + rng.choice([*MARKS, EOS, "<|endoftext|>", "<|begin_of_text|>"]) + rng.choice(["", " b", "\n"])
        return rng.choice(CONTENTS) + (rng.choice(CONTENTS) if kind > 0.7 else "")

    for number in range(300):
        roles = ["system"] if rng.random() < 0.4 else []
        for _ in range(rng.randint(1, 4)):
            roles += ["user", "assistant"]
        if number % 10 == 7:  # any order
            roles = [rng.choice(["system", "user", "assistant"]) for _ in range(rng.randint(1, 6))] + ["assistant"]
        if number % 5 == 3:
            roles.append("user")
        yield [{"role": role, "content": content()} for role in roles]


def checksum(ids, learned):
    """FNV-1a of 32 bits, over the ids with the highest bit where they are learned."""
    value = 0x811C9DC5
    for i, learn in zip(ids, learned):
        for byte in (i | (learn << 31)).to_bytes(4, "little"):
            value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


class Oracle:
    def __init__(self, path, start, template):
        self.start, self.template = start, template
        self.fast = PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=template, bos_token=start, eos_token=EOS)
        self.raw = Tokenizer.from_file(str(path))
        self.names = {t.content: i for i, t in self.raw.get_added_tokens_decoder().items()}
        self.raw.encode_special_tokens = True

    def hidden(self, text):
        """The text with a private character in place of the first one of each special token in it."""
        for name in self.names:
            text = text.replace(name, chr(0xE000 + ord(name[0]) % 0x1000) + name[1:])
        return text

    def pieces(self, text):
        """Special tokens, and the texts between them, with the offset of each."""
        at = begin = 0
        while at < len(text):
            name = max((n for n in self.names if text.startswith(n, at)), key=len, default=None)
            if name:
                yield begin, text[begin:at], None
                yield at, name, self.names[name]
                at = begin = at + len(name)
            else:
                at += 1
        yield begin, text[begin:], None

    def tokens(self, messages):
        messages = [{**m, "content": self.hidden(m["content"])} for m in messages]
        (text,), (spans,) = render_jinja_template([messages], chat_template=self.template, return_assistant_tokens_mask=True,
                                                  bos_token=self.start, eos_token=EOS)
        firsts = {0xE000 + ord(name[0]) % 0x1000: name[0] for name in self.names}
        ids, learned = [], []
        for begin, piece, mark in self.pieces(text):
            if mark is not None:
                found = [(mark, (0, len(piece)))]
            else:
                encoded = self.raw.encode(piece.translate(firsts), add_special_tokens=False)
                found = list(zip(encoded.ids, encoded.offsets))
            for i, (first, end) in found:
                ids.append(i)
                learned.append(int(any(begin + first < b and a < begin + end for a, b in spans)))
        return ids, learned

    def document(self, messages):
        """Tokens after the start token, which the document has in any case."""
        ids, learned = self.tokens(messages)
        if not any(name in m["content"] for m in messages for name in self.names):
            got = self.fast.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            assert ids == got["input_ids"], (self.template, messages)
            if learned != got["assistant_masks"]:
                print("another mask:", self.template[:60], messages)
        skipped = int(ids[:1] == [self.names[self.start]])
        return ids[skipped:], learned[skipped:]


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    lines = list(chats())
    (OUT / "chats.jsonl").write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    (OUT / "templates.json").write_text(json.dumps({name: {"format": word, "template": text} for name, (word, text) in TEMPLATES.items()}, indent=1))
    for name, (start, has_marks) in VOCABULARIES.items():
        tokenizer = Tokenizer.from_file(str(FIXTURES / "tokenizers" / f"{name}.json"))
        tokenizer.add_special_tokens([EOS, *([*MARKS, "[gMASK]", "<sop>", *HARMONY] if has_marks else [])])
        tokenizer.save(str(OUT / f"{name}.json"), pretty=False)
        made = {}
        for title, (_, template) in TEMPLATES.items():
            oracle = Oracle(OUT / f"{name}.json", start, template)
            made[title] = [checksum(*oracle.document(line)) for line in lines]
        (OUT / f"expected_{name}.txt").write_text("".join(" ".join(f"{s:08x}" for s in sums) + "\n" for sums in made.values()))
    for path in OUT.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    main()
