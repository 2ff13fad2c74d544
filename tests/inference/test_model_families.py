"""Prompts in the manner of published model families equal those of transformers, token by token.

Templates and tokenizers are small ones of the same manner, written from facts about public
configuration files: markers, order, blanks, roles that are refused or folded, forms of calls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from inference.errors import ChatTemplateFailed
from inference.text.tokenizer import ChatMessage, Tokenizer
from inference.text.tools import Tool, ToolCall
from tests.inference import family_templates as templates

CONVERSATION_COUNT = 50
TEXT = [
    "The hotel near the old harbour has a quiet garden, breakfast until ten.",
    "Zoë's café naïvely served 北京 dumplings 🙂 and crème brûlée — 25 % off, 3 for 2!",
    'def step(batch):\n    return {"tokens": [1, 2, 3], "done": False}\n',
]

GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
CL100K_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

HERMES_CALLS = """
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif -%}
# Tools
<tools>{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
</tools>
Call by <tool_call></tool_call>.<|im_end|>
{% elif messages[0].role == 'system' -%}
{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first)
    or (m.role == 'assistant' and not m.tool_calls) -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' -%}
{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls -%}{%- set call = call.function -%}
{{ '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{ call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{ '<|im_start|>user' }}{% endif -%}
{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{% endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
LLAMA3_CALLS = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start|>system<|head|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Date: 1\\n\\n' + system_message + '<|eot|>' }}
{%- if tools is not none %}
    {{- '<|start|>user<|head|>\\n\\nGiven {"name": function name, "parameters": values}.\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- messages[0]['content'] | trim + '<|eot|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}
        {{- '<|start|>' + m['role'] + '<|head|>\\n\\n' + m['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if not m.tool_calls | length == 1 %}
            {{- raise_exception('one call per turn') }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start|>assistant<|head|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot|>' }}
    {%- else %}
        {{- '<|start|>ipython<|head|>\\n\\n' }}
        {%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}
        {%- else %}{{- m.content }}{%- endif %}
        {{- '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|head|>\\n\\n' }}{%- endif %}
"""
MISTRAL_CALLS = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for m in loop_messages %}
    {%- if not (m.role == 'tool' or m.tool_calls is defined) %}
        {%- if (m['role'] == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('turns must alternate') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in loop_messages %}
    {%- if m['role'] == 'user' %}
        {%- if tools is not none and m == user_messages[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + m['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + m['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if call.id | length != 9 %}{{- raise_exception('length 9!') }}{%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif m['role'] == 'assistant' %}
        {{- ' ' + m['content'] | trim + eos_token }}
    {%- elif m['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', ' }}
        {%- if m.tool_call_id | length != 9 %}{{- raise_exception('length 9!') }}{%- endif %}
        {{- '"call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user, assistant and tool roles') }}{%- endif %}
{%- endfor %}
"""
DEEPSEEK_CALLS = """
{%- set ns = namespace(system='', is_tool=false) -%}
{%- for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}
{%- endif %}{% endfor -%}
{{ bos_token }}{{ ns.system }}
{%- for m in messages -%}
{%- if m['role'] == 'user' -%}{%- set ns.is_tool = false -%}{{ '<U>' + m['content'] }}
{%- elif m['role'] == 'assistant' and m['tool_calls'] is defined -%}
{%- set ns.is_tool = false -%}
{%- for call in m['tool_calls'] -%}
{{ ('<A><calls>' if loop.first else '\\n') + '<call>' + call['type'] + '<sep>'
   + call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```</call>' }}
{%- endfor -%}
{{ '</calls>' + eos_token }}
{%- elif m['role'] == 'assistant' -%}
{{ ('' if ns.is_tool else '<A>') + m['content'] + eos_token }}{%- set ns.is_tool = false -%}
{%- elif m['role'] == 'tool' -%}
{{ ('' if ns.is_tool else '<outs>') + '<out>' + m['content'] + '</out>' }}
{%- set ns.is_tool = true -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.is_tool -%}{{ '<A>' }}{%- endif -%}
"""
PARTS = """
{%- for m in messages -%}
<|im_start|>{{ m.role }}{{ '\\n' }}
{%- for part in m.content -%}
{%- if part.type == 'image' -%}<image>{%- elif part.type == 'text' -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
<end_of_utterance>{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}
"""
LLAMA2 = """
{%- if messages[0]['role'] == 'system' -%}
{%- set rest = messages[1:] -%}{%- set system = messages[0]['content'] -%}
{%- else -%}{%- set rest = messages -%}{%- set system = false -%}{%- endif -%}
{%- for m in rest -%}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('turns must alternate') }}
{%- endif -%}
{%- if loop.index0 == 0 and system != false -%}
{%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + m['content'] -%}
{%- else -%}{%- set content = m['content'] -%}{%- endif -%}
{%- if m['role'] == 'user' -%}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif m['role'] == 'assistant' -%}{{ ' ' + content.strip() + ' ' + eos_token }}{%- endif -%}
{%- endfor -%}
"""
QWEN3 = HERMES_CALLS.replace(
    "{%- if m.role == 'user'",
    "{%- if m.role == 'assistant' and not m.tool_calls and '</think>' in m.content -%}"
    "{{ '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].lstrip('\\n')"
    " + '<|im_end|>\\n' }}{%- elif m.role == 'user'",
)
IM = "<|im_start|> <|im_end|>"
ZEPHYR = ("<|system|>\nX</s>\n", "<|user|>\nX</s>\n", "<|assistant|>\nX</s>\n", "<|assistant|>\n")
TURN = ("<start_of_turn>user\nX<end_of_turn>\n", "<start_of_turn>model\nX<end_of_turn>\n")
HEAD = "<|start|>{}<|head|>\n\nX<|eot|>"
HEADS = [*map(HEAD.format, ("system", "user", "assistant")), "<|start|>assistant<|head|>\n\n"]
PHI3 = ("<|system|>\nX<|end|>\n", "<|user|>\nX<|end|>\n", "<|assistant|>\nX<|end|>\n")
COMMAND = "<|START|><|{}|>X<|END|>"
TEXTS = [
    "Hi",
    "  Which hotel allows dogs? ",
    "Zoë & <b>北京</b> 🙂",
    "a\n\n  b\tc\n",
    "{{ messages }}",
    "25 % of 1,234.5",
    "e\u0301 ﬁ ½",
    "x" * 40,
    "'quoted' \"twice\"",
    "\n",
    "def f(x):\n    return x",
    "Ünïcödé — naïve",
]
THINKING: dict[str, tuple[bool | str | None, ...]] = {
    "": (None,),
    "enable_thinking": (None, True, False),
    "thinking": (None, True, False),
    "reasoning_effort": (None, "low", "high"),
}
TOOL = Tool(
    "find", "Finds <hotels>", '{"type": "object", "properties": {"near": {"type": "string"}}}'
)
# Tokens that a tokenizer adds to its model's vocabulary, and what surrounds a text.
ADDED: dict[str, Callable[[], list[AddedToken]]] = {
    "plain": lambda: [AddedToken("<x>", normalized=False), AddedToken("naïve", normalized=False)],
    "normalized": lambda: [AddedToken("<x>", normalized=True), AddedToken("25 %")],
    "lstrip": lambda: [AddedToken("<x>", lstrip=True, normalized=False)],
    "rstrip": lambda: [AddedToken("<x>", rstrip=True, normalized=False)],
    "both strips": lambda: [AddedToken("<x>", lstrip=True, rstrip=True, normalized=False)],
    "whole words": lambda: [AddedToken("or", single_word=True, normalized=False)],
    "special": lambda: [AddedToken("<x>", special=True, normalized=False)],
    "special, strips": lambda: [AddedToken("<x>", special=True, lstrip=True, rstrip=True)],
}
AROUND: dict[str, str] = {"begin": "<s> $A", "both": "<s> $A </s>", "end": "$A </s>", "none": "$A"}
STREAMED = [
    *TEXTS,
    *TEXT,
    "a <x> b<x>c  <x>\n<x>",
    " <x> or for <x> or.",
    "  two  blanks ",
    "don't DON'T I'll 12345 1,234.5",
    "1. Ein Satz. 2. Noch einer!",
    "<0x41> ▁ ▁▁",
    "",
]
# What a server can write, and a client sends back.
ONE, OTHER = (
    ToolCall(f"call_{name * 20}", "find", json.dumps({"near": f"Near{name}"})) for name in "AB"
)
ANSWERS = {
    "text": ChatMessage("assistant", "Said0"),
    "nothing": ChatMessage("assistant", ""),
    "thinking and text": ChatMessage("assistant", "Said0", reasoning="Thought0"),
    "thinking only": ChatMessage("assistant", "", reasoning="Thought0"),
    "a call": ChatMessage("assistant", "", (ONE,)),
    "two calls": ChatMessage("assistant", "", (ONE, OTHER)),
    "text and a call": ChatMessage("assistant", "Said0", (ONE,)),
    "text and two calls": ChatMessage("assistant", "Said0\n", (ONE, OTHER)),
    "thinking and a call": ChatMessage("assistant", "", (ONE,), reasoning="Thought0"),
    "thinking, text and two calls": ChatMessage(
        "assistant", "Said0", (ONE, OTHER), reasoning="Thought0"
    ),
}


def byte_level(words: str = "", *, nfc: bool = False, prefix: bool = False) -> Backend:
    """Return a byte-level BPE, untrained. words: expression that splits text, as in tiktoken.

    prefix: texts begin with a blank.
    """
    backend = Backend(models.BPE(ignore_merges=bool(words)))
    if nfc:
        backend.normalizer = normalizers.NFC()
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not words)
    split = [pre_tokenizers.Split(Regex(words), "isolated")] * bool(words)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, last]) if split else last
    backend.decoder = decoders.ByteLevel()
    return backend


def split_digits() -> Backend:
    """Return a byte-level BPE in the manner of DeepSeek: digits, then ideographs, then words."""
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex(r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+"), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return backend


def blanks(*, prefix: bool, scheme: str = "", split: bool = False) -> Backend:
    """Return a sentencepiece-like BPE, untrained.

    prefix: the normalizer adds a blank. scheme: the pre-tokenizer adds one instead.
    """
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if scheme:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    else:
        steps = [normalizers.Prepend("▁")] if prefix else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix or scheme in ("first", "always") else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def unigram() -> Backend:
    """Return a sentencepiece-like Unigram with bytes, untrained, in the manner of T5 and Gemma."""
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return backend


def wordpiece() -> Backend:
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


TOKENIZERS: dict[str, Callable[[], Backend]] = {
    "gpt2": byte_level,
    "gpt2-prefix": lambda: byte_level(prefix=True),
    "llama3": lambda: byte_level(LLAMA3_WORDS),
    "qwen": lambda: byte_level(LLAMA3_WORDS, nfc=True),
    "cl100k": lambda: byte_level(CL100K_WORDS),
    "o200k": lambda: byte_level(O200K_WORDS),
    "gpt2-words": lambda: byte_level(GPT2_WORDS),
    "deepseek": split_digits,
    "llama2": lambda: blanks(prefix=True),
    "gemma": lambda: blanks(prefix=False),
    "mistral": lambda: blanks(prefix=False, scheme="first"),
    "metaspace-always": lambda: blanks(prefix=False, scheme="always"),
    "metaspace-never": lambda: blanks(prefix=False, scheme="never"),
    "metaspace-words": lambda: blanks(prefix=False, scheme="first", split=True),
    "unigram": unigram,
    "wordpiece": wordpiece,
}


@lru_cache
def trained(kind: str) -> str:
    """Return a small tokenizer of this kind as JSON."""
    backend = TOKENIZERS[kind]()
    is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
    byte_tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet() if is_byte_level else ["▁"])
    trainer: Any
    match backend.model:
        case models.Unigram():
            trainer = trainers.UnigramTrainer(
                vocab_size=400, special_tokens=["<unk>"], unk_token="<unk>"
            )
        case models.WordPiece():
            trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>"])
        case _:
            trainer = trainers.BpeTrainer(
                vocab_size=900,
                special_tokens=[] if is_byte_level else byte_tokens,
                initial_alphabet=alphabet,
            )
    backend.train_from_iterator(TEXT * 2, trainer=trainer)
    raw = json.loads(backend.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] == "<unk>"]
    return json.dumps(raw)


@dataclass(frozen=True)
class Family:
    """One family. template: its manner. tokens: markers that are tokens, beside bos and eos.

    plain, rstrip: whether markers are flagged special, and swallow blanks behind them. calls: the
    form of calls and results that its template has, as transformers gets it; empty without tools.
    thoughts: name by which the template reads thinking. switch: its variable of thinking.
    """

    tokenizer: str
    template: str
    tokens: str
    bos: str = "<s>"
    eos: str = "</s>"
    plain: bool = False
    rstrip: bool = False
    calls: str = ""
    parts: bool = False
    thoughts: str = ""
    switch: str = ""


def turns(
    *layouts: str,
    start: str = "",
    trim: bool = False,
    default: str = "",
) -> str:
    """Return a template of turns. default: turn without a system message.

    layouts: of system, user and assistant, where X stands for the text, and the generation prompt.
    """
    system, user, answer, begin = layouts
    text = "m['content'] | trim" if trim else "m['content']"

    def shown(layout: str) -> str:
        before, _, after = layout.partition("X")
        return f"{{{{ {before!r} + ({text}) + {after!r} }}}}"

    without = f"{{% if messages[0]['role'] != 'system' %}}{{{{ {default!r} }}}}{{% endif %}}"
    return (
        f"{{{{ {start} }}}}" * bool(start)
        + without * bool(default)
        + "{% for m in messages %}{% if m['role'] == 'system' %}"
        + (shown(system) if system else "{{ raise_exception('System role not supported') }}")
        + "{% elif m['role'] == 'user' %}"
        + shown(user)
        + "{% elif m['role'] == 'assistant' %}"
        + shown(answer)
        + "{% else %}{{ raise_exception('Unknown role') }}{% endif %}{% endfor %}"
        + f"{{% if add_generation_prompt %}}{{{{ {begin!r} }}}}{{% endif %}}"
    )


def chatml(**options: Any) -> str:
    """Return a template of turns between <|im_start|> and <|im_end|>."""
    layout = "<|im_start|>{}\nX<|im_end|>\n"
    return turns(
        *map(layout.format, ("system", "user", "assistant")), "<|im_start|>assistant\n", **options
    )


FAMILIES: dict[str, Family] = {
    "qwen1.5": Family("qwen", chatml(default="<|im_start|>system\nHelp.<|im_end|>\n"), IM),
    "qwen2": Family("qwen", chatml(default="<|im_start|>system\nHelp.<|im_end|>\n"), IM),
    "qwen2.5": Family("qwen", HERMES_CALLS, IM, eos="<|im_end|>", calls="objects"),
    "qwen2.5-coder": Family("qwen", HERMES_CALLS, IM + " <|fim|>", calls="objects"),
    "qwen3": Family("qwen", QWEN3, IM + " <think> </think>", plain=True, calls="objects"),
    "qwq": Family(
        "qwen",
        QWEN3.replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif"),
        IM,
        calls="objects",
    ),
    "hermes-2-pro": Family("llama3", HERMES_CALLS, IM, calls="objects"),
    "hermes-3": Family(
        "llama3", HERMES_CALLS, IM + " <tool_call> </tool_call>", plain=True, calls="objects"
    ),
    "smollm2": Family("gpt2", chatml(default="<|im_start|>system\nSmol.<|im_end|>\n"), IM),
    "smolvlm": Family("gpt2", PARTS, IM + " <image> <end_of_utterance>", parts=True),
    "yi": Family("llama2", chatml(), IM, bos="<|startoftext|>"),
    "internlm2": Family("llama2", chatml(start="bos_token"), IM, plain=True),
    "dolphin": Family("mistral", chatml(), IM),
    "openhermes": Family("llama2", chatml(), IM),
    "mpt-chat": Family("gpt2", chatml(), IM),
    "minicpm3": Family("llama2", chatml(start="bos_token", trim=True), IM),
    "lfm2": Family("llama3", chatml(start="bos_token"), IM),
    "olmo2": Family("gpt2", turns(*ZEPHYR, start="bos_token"), "<|x|>"),
    "tulu": Family("llama2", turns(*ZEPHYR), "<|x|>"),
    "zephyr": Family("mistral", turns(*ZEPHYR), "<|x|>"),
    "tinyllama": Family("llama2", turns(*ZEPHYR), "<|x|>"),
    "stablelm-zephyr": Family("gpt2", turns(*ZEPHYR), "<|user|> <|assistant|> <|system|>"),
    "falcon": Family("gpt2", turns("System: X\n", "User: X\n", "Falcon: X\n", "Falcon:"), "<|x|>"),
    "vicuna": Family(
        "llama2",
        turns("X ", "USER: X ", "ASSISTANT: X</s>", "ASSISTANT:", start="bos_token"),
        "<|x|>",
    ),
    "solar": Family(
        "llama2",
        turns(
            "### System:\nX\n\n", "### User:\nX\n\n", "### Assistant:\nX\n\n", "### Assistant:\n"
        ),
        "<|x|>",
    ),
    "alpaca": Family(
        "llama2",
        turns("X\n\n", "### Instruction:\nX\n\n", "### Response:\nX</s>\n\n", "### Response:\n"),
        "<|x|>",
    ),
    "openchat": Family(
        "mistral",
        turns(
            "GPT4 Correct System: X<|eot|>",
            "GPT4 Correct User: X<|eot|>",
            "GPT4 Correct Assistant: X<|eot|>",
            "GPT4 Correct Assistant:",
            start="bos_token",
        ),
        "<|eot|>",
    ),
    "gemma": Family(
        "gemma",
        turns("", *TURN, "<start_of_turn>model\n", start="bos_token", trim=True),
        "<start_of_turn> <end_of_turn>",
    ),
    "gemma2": Family(
        "gemma",
        turns("", *TURN, "<start_of_turn>model\n", start="bos_token", trim=True),
        "<start_of_turn> <end_of_turn>",
        plain=True,
    ),
    "llama2": Family("llama2", LLAMA2, "<|x|>"),
    "codellama": Family("mistral", LLAMA2, "<|x|>"),
    "llama3": Family(
        "llama3", turns(*HEADS, start="bos_token", trim=True), "<|start|> <|head|> <|eot|>"
    ),
    "llama3.1": Family("llama3", LLAMA3_CALLS, "<|start|> <|head|> <|eot|>", calls="single"),
    "llama3.2": Family(
        "llama3", LLAMA3_CALLS, "<|start|> <|head|> <|eot|> <|python_tag|>", calls="single"
    ),
    "mistral-v1": Family("llama2", LLAMA2.replace("[INST] ", " [INST] "), "<|x|>"),
    "mistral-v3": Family(
        "mistral",
        MISTRAL_CALLS,
        "[INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS]"
        " [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        calls="nine",
    ),
    "mistral-nemo": Family(
        "llama3",
        MISTRAL_CALLS.replace("[INST] ", "[INST]"),
        "[INST] [/INST] [TOOL_CALLS]",
        calls="nine",
    ),
    "mixtral": Family("llama2", MISTRAL_CALLS, "<|x|>", calls="nine"),
    "phi3": Family(
        "llama2",
        turns(*PHI3, "<|assistant|>\n"),
        "<|system|> <|user|> <|assistant|> <|end|>",
        rstrip=True,
    ),
    "phi3.5": Family(
        "mistral",
        turns(*PHI3, "<|assistant|>\n"),
        "<|system|> <|user|> <|assistant|> <|end|>",
        rstrip=True,
    ),
    "phi4": Family("gpt2", chatml().replace("\\n", "<|im_sep|>", 1), IM + " <|im_sep|>"),
    "phi4-mini": Family(
        "gpt2",
        turns(*(each.replace("\n", "") for each in PHI3), "<|assistant|>"),
        "<|system|> <|user|> <|assistant|> <|end|>",
    ),
    "deepseek-v2": Family(
        "gpt2",
        turns("X\n\n", "User: X\n\n", "Assistant: X</s>", "Assistant:", start="bos_token"),
        "<|x|>",
    ),
    "deepseek-v3": Family(
        "llama3", DEEPSEEK_CALLS, "<U> <A> <calls> </calls> <outs>", calls="text"
    ),
    "deepseek-r1-distill": Family(
        "qwen", DEEPSEEK_CALLS, "<U> <A> <think>", plain=True, calls="text"
    ),
    "command-r": Family(
        "llama3",
        turns(
            *(COMMAND.format(role) for role in ("SYSTEM", "USER", "BOT")),
            "<|START|><|BOT|>",
            start="bos_token",
            trim=True,
        ),
        "<|START|> <|END|> <|SYSTEM|> <|USER|> <|BOT|>",
    ),
    "granite3": Family(
        "gpt2",
        turns(
            *(f"<|role|>{role}<|of|>X<|eot|>\n" for role in ("system", "user", "assistant")),
            "<|role|>assistant<|of|>",
        ),
        "<|role|> <|of|> <|eot|>",
    ),
    "glm4": Family(
        "llama3",
        turns(
            "<|system|>\nX",
            "<|user|>\nX",
            "<|assistant|>\nX",
            "<|assistant|>",
            start="'[gMASK]<sop>'",
        ),
        "[gMASK] <sop> <|system|> <|user|> <|assistant|>",
    ),
    "exaone": Family(
        "gpt2",
        turns("[|system|]X[|end|]\n", "[|user|]X\n", "[|assistant|]X[|end|]\n", "[|assistant|]"),
        "[|system|] [|user|] [|assistant|] [|end|]",
    ),
    "nemotron": Family(
        "gemma",
        turns(
            "<extra>System\nX\n\n",
            "<extra>User\nX\n",
            "<extra>Assistant\nX\n",
            "<extra>Assistant\n",
        ),
        "<extra>",
    ),
    "baichuan2": Family("llama2", turns("X", "<u>X", "<a>X</s>", "<a>"), "<u> <a>"),
    "gpt-oss": Family(
        "o200k",
        templates.GPT_OSS,
        "<|start|> <|message|> <|channel|> <|end|> <|call|> <|return|>",
        eos="<|return|>",
        calls="single",
        thoughts="thinking",
        switch="reasoning_effort",
    ),
    "llama4": Family(
        "o200k",
        templates.LLAMA4,
        "<|header_start|> <|header_end|> <|eot|> <|python_start|> <|python_end|>",
        bos="<|begin_of_text|>",
        calls="objects",
    ),
    "kimi-k2": Family(
        "cl100k",
        templates.KIMI_K2,
        "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|im_end|>"
        " <|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|>"
        " <|tool_call_argument_begin|> <|tool_call_end|>",
        calls="named",
    ),
    "minimax-m1": Family(
        "gpt2",
        templates.MINIMAX_M1,
        "<begin_of_document> <beginning_of_sentence> <end_of_sentence>",
        parts=True,
    ),
    "minimax-m2": Family(
        "cl100k",
        templates.MINIMAX_M2,
        "]~!b[ ]~b] [e~[ <minimax:tool_call> </minimax:tool_call> <think> </think>",
        eos="[e~[",
        calls="objects",
        thoughts="reasoning_content",
    ),
    "glm4.5": Family(
        "cl100k",
        templates.GLM45,
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think>",
        plain=True,
        calls="objects",
        thoughts="reasoning_content",
        switch="enable_thinking",
    ),
    "deepseek-v3.1": Family(
        "deepseek",
        templates.DEEPSEEK_V31,
        "<U> <A> <calls> </calls> <think> </think>",
        calls="text",
        switch="thinking",
    ),
    "hunyuan": Family(
        "cl100k",
        templates.HUNYUAN,
        "<|extra_0|> <|extra_4|>",
        bos="<|startoftext|>",
        switch="enable_thinking",
    ),
    "ernie4.5": Family(
        "llama2",
        turns("X\n", "User: X\n", "Assistant: X</s>", "Assistant: ", start="bos_token"),
        "<|x|>",
    ),
    "seed-oss": Family(
        "deepseek",
        templates.SEED_OSS,
        "<seed:think> </seed:think> <seed:tool_call> </seed:tool_call>",
        bos="<seed_bos>",
        eos="<seed_eos>",
        calls="objects",
        thoughts="reasoning_content",
    ),
    "granite3.3": Family("gpt2", templates.GRANITE33, "<|role|> <|of|> <|eot|>"),
    "granite4": Family(
        "cl100k",
        HERMES_CALLS.replace("<|im_start|>", "<|role|>").replace("<|im_end|>", "<|eot|>"),
        "<|role|> <|eot|>",
        calls="objects",
    ),
    "nemotron-nano": Family(
        "mistral",
        templates.NEMOTRON_NANO,
        "<SPECIAL_10> <SPECIAL_11> <SPECIAL_12>",
        calls="objects",
    ),
    "command-a": Family(
        "llama3",
        templates.COMMAND_A,
        "<|START|> <|END|> <|SYSTEM|> <|USER|> <|BOT|> <|ACTION|> <|/ACTION|>",
        calls="objects",
    ),
    "gemma3": Family("gemma", templates.GEMMA3, "<start_of_turn> <end_of_turn>"),
    "smollm3": Family("llama3", templates.SMOLLM3, IM, calls="objects", switch="enable_thinking"),
    "apertus": Family(
        "llama3",
        templates.APERTUS,
        "<|system_start|> <|system_end|> <|developer_start|> <|developer_end|> <|user_start|>"
        " <|user_end|> <|assistant_start|> <|assistant_end|> <|tools_prefix|> <|tools_suffix|>",
        calls="text",
        switch="enable_thinking",
    ),
    "mistral-small3": Family(
        "llama3",
        templates.MISTRAL_V11,
        "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [INST] [/INST] [TOOL_CALLS] [CALL_ID] [ARGS]",
        calls="nine",
    ),
    "qwen3-coder": Family("qwen", templates.QWEN3_CODER, IM, calls="objects"),
}


def write(directory: Path, family: Family) -> None:
    """Write tokenizer and template of a family."""
    backend = Backend.from_str(trained(family.tokenizer))
    markers = [
        AddedToken(text, special=not family.plain, rstrip=family.rstrip, normalized=False)
        for text in family.tokens.split()
    ]
    backend.add_special_tokens([family.bos, family.eos])
    add = backend.add_tokens if family.plain else backend.add_special_tokens
    add(markers)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{family.bos} $A", special_tokens=[(family.bos, backend.token_to_id(family.bos))]
    )
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.bos,
        "eos_token": family.eos,
        "chat_template": family.template,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def conversation(rng: random.Random, family: Family) -> list[ChatMessage]:
    """Return a conversation that the family's chat template might get."""
    talk = [ChatMessage("system", rng.choice(TEXTS))] * (rng.random() < 0.4)
    for _ in range(rng.randint(1, 3)):
        talk.append(ChatMessage("user", rng.choice(TEXTS)))
        if family.calls and rng.random() < 0.5:
            count = 1 if family.calls == "single" else rng.randint(1, 2)
            made = sum(len(message.tool_calls) for message in talk)
            calls = tuple(
                ToolCall(
                    f"functions.find:{made + index}"
                    if family.calls == "named"
                    else f"a1B2c3D{rng.randrange(10, 99)}",
                    "find",
                    json.dumps({"near": "Ulm"}),
                )
                for index in range(count)
            )
            talk.append(ChatMessage("assistant", "", calls))
            talk += [ChatMessage("tool", rng.choice(TEXTS), (), call) for call in calls]
        thought = rng.choice(TEXTS) * bool(family.thoughts)
        talk.append(ChatMessage("assistant", rng.choice(TEXTS), reasoning=thought))
    return talk if rng.random() < 0.1 else talk[:-1]


def as_transformers_takes_it(message: ChatMessage, family: Family) -> dict[str, Any]:
    content: Any = [{"type": "text", "text": message.content}] if family.parts else message.content
    turn: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        is_text = family.calls == "text"
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if is_text else json.loads(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if message.call is not None:
        turn |= {"tool_call_id": message.call.id, "name": message.call.name}
    if message.reasoning:
        turn[family.thoughts] = message.reasoning
    return turn


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    from jinja2 import TemplateError
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    write(tmp_path, family)
    reference: Any = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    tokenizer = Tokenizer(tmp_path)
    tokenizer.check_fits(tokenizer.backend.get_vocab_size())
    function = {
        "name": TOOL.name,
        "description": TOOL.description,
        "parameters": json.loads(TOOL.parameters),
    }
    rng, equal_count = random.Random(name), 0

    for _ in range(CONVERSATION_COUNT):
        talk = conversation(rng, family)
        tools = [TOOL] * (tokenizer.shows_tools() and rng.random() < 0.5)
        options: dict[str, Any] = {"add_generation_prompt": rng.random() < 0.9}
        thinking = rng.choice(THINKING[family.switch])
        shown = talk
        has_system = talk[0].role == "system" and not talk[0].content.isspace()
        if "loop.last and system" in family.template and has_system and talk[-1].role != "user":
            # The template shows it with a last question only.
            first = replace(talk[1], content=f"{talk[0].content}\n\n{talk[1].content}")
            shown = [first, *talk[2:]]
        requested = options | {
            "conversation": [as_transformers_takes_it(message, family) for message in shown],
            "tools": [{"type": "function", "function": function}] if tools else None,
        }
        if thinking is not None:
            requested[family.switch], options["thinking"] = thinking, thinking
        try:
            expected = reference.apply_chat_template(**requested, tokenize=False)
        except TemplateError:
            with pytest.raises(ChatTemplateFailed):
                tokenizer.render_chat(talk, tools, **options)
            continue
        assert tokenizer.render_chat(talk, tools, **options) == expected
        ids = reference.apply_chat_template(**requested, tokenize=True, return_dict=False)
        assert list(tokenizer.encode_chat(talk, tools, **options)) == ids
        equal_count += 1

    assert equal_count >= CONVERSATION_COUNT // 3


def write_kind(directory: Path, kind: str, added: str, around: str, *, hole: int) -> None:
    """Write a tokenizer of this kind. hole: ids that are missing before the last added token."""
    backend = Backend.from_str(trained(kind))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(ADDED[added]())
    backend.post_processor = processors.TemplateProcessing(
        single=AROUND[around],
        pair=f"{AROUND[around]} $B",
        special_tokens=[(each, backend.token_to_id(each)) for each in ("<s>", "</s>")],
    )
    raw = json.loads(backend.to_str())
    raw["added_tokens"][-1]["id"] += hole
    (directory / "tokenizer.json").write_text(json.dumps(raw))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers_behave_as_those_of_transformers(kind: str, added: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(f"{kind} {added}")
    hole = 0 if added == "plain" else 7
    write_kind(tmp_path, kind, added, rng.choice(list(AROUND)), hole=hole)
    reference: Any = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    tokenizer = Tokenizer(tmp_path)
    largest = max(tokenizer.backend.get_vocab().values())
    tokenizer.check_fits(largest + 1)
    tokenizer.check_fits(largest + 65)  # the embeddings of a model may have more rows

    def text_of(ids: list[int]) -> str:
        text = reference.decode(ids, skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    for text in STREAMED:
        ids = list(reference(text)["input_ids"])
        assert list(tokenizer.encode(text)) == ids
        assert tokenizer.decode(ids) == text_of(ids)
        plain = list(reference(text, add_special_tokens=False)["input_ids"])
        assert list(tokenizer.encode(text, add_special_tokens=False)) == plain
        cut = rng.randint(0, len(ids))
        while cut and "\ufffd" in text_of(ids[:cut]):
            cut -= 1  # a character that a prompt begins is not completed
        opened = tokenizer.decoder.open((), ids[:cut])
        pieces = [opened.push(id_).text for id_ in ids[cut:]]
        assert text_of(ids[:cut]) + "".join([*pieces, opened.finish().text]) == text_of(ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_template_reads_what_the_server_writes_with_it(name: str, tmp_path: Path) -> None:
    """Answers, results and questions reach the next prompt: each word once, thinking at most."""
    family = FAMILIES[name]
    write(tmp_path, family)
    tokenizer = Tokenizer(tmp_path)
    system = [ChatMessage("system", "System0")] if shows_system(tokenizer) else []

    for answer in ANSWERS.values():
        tools = [TOOL] if answer.tool_calls and tokenizer.shows_tools() else []
        if answer.tool_calls and not family.calls:
            continue  # no such answer is written, or the client forced it
        results = [
            ChatMessage("tool", f"Result{index}", (), call)
            for index, call in enumerate(answer.tool_calls)
        ]
        requested, done = ChatMessage("user", "Asked9"), ChatMessage("assistant", "Said9")
        begun = [*system, ChatMessage("user", "Asked0"), answer, *results]
        talks = [[*begun, requested], [*begun, requested, done, requested]]
        if results:
            talks += [begun, [*begun, done, requested], [*begun, done, requested, answer, *results]]
            talks += [[*begun, *begun[-1 - len(results) :], done, requested]]
        for talk in talks:
            check_words(tokenizer.render_chat(talk, tools), talk)


def shows_system(tokenizer: Tokenizer) -> bool:
    try:
        tokenizer.render_chat([ChatMessage("system", "S"), ChatMessage("user", "U")])
    except ChatTemplateFailed:
        return False
    return True


def check_words(rendered: str, talk: list[ChatMessage]) -> None:
    """Check that the prompt has each word as often as the conversation."""
    words = [word for each in talk for word in each.content.split()]
    words += [json.loads(call.arguments)["near"] for each in talk for call in each.tool_calls]
    for word in words:
        assert rendered.count(word) == words.count(word), (word, rendered)
    assert rendered.count("Thought0") <= sum(bool(each.reasoning) for each in talk), rendered


def test_there_are_enough_families() -> None:
    assert len(FAMILIES) >= 70
