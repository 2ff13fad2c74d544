"""Tokenizer and chat template of the demo model, trained on the corpus, in Hugging Face layout.

Three decisions make copying easy for a small model: a listing number with its brackets is one
token, a frequent number with at most one decimal is one token, and every other text falls back to
bytes, so that no text is unknown.
"""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.corpus import draw_case
from demo.hotels import Split
from demo.messages import TOOLS_BEGIN, TOOLS_END, Message
from demo.structured import draw_structured
from demo.tool_talk import draw_tool_talk

PAD, BEGIN, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = (
    "<|pad|>", "<|begin|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
)  # fmt: skip

_PIECES = (
    r" ?\[\p{N}{1,2}\]"  # the number of a listing
    r"| ?\p{L}+(?:-\p{L}+)?"
    r"| ?\p{N}{1,3}(?:\.\p{N}(?!\p{N}))?"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Around calls and their results; no control tokens, since they are part of the text.
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
JSON_TOKENS = 188  # further tokens for keys and punctuation of JSON


def _quoted(text: str) -> str:
    """Quote a text as a string literal of Jinja."""
    return "'" + text.replace("\n", "\\n") + "'"


CHAT_TEMPLATE = """{{- bos_token -}}
{%- set first = messages[0] -%}
{%- set system = first['content'] | trim if first['role'] == 'system' else none -%}
{%- if tools or system is not none -%}
{{- '<|system|>' ~ (system or '') -}}
{%- if tools -%}
{%- if system is not none -%}
{{- '\\n\\n' -}}
{%- endif -%}
{{- TOOLS_BEGIN -}}
{%- for tool in tools -%}
{{- (tool.function if tool.function is defined else tool) | tojson -}}
{%- if not loop.last -%}
{{- '\\n' -}}
{%- endif -%}
{%- endfor -%}
{{- TOOLS_END -}}
{%- endif -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- if not loop.first -%}
{{- raise_exception('A system message is only allowed at the beginning.') -}}
{%- endif -%}
{%- elif message['role'] == 'tool' -%}
{{- '<|user|><tool_response>' ~ (message['content'] | trim) ~ '</tool_response><|end|>' -}}
{%- elif message['role'] in ('user', 'assistant') -%}
{{- '<|' ~ message['role'] ~ '|>' ~ ((message['content'] or '') | trim) -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function if call.function is defined else call -%}
{{- '<tool_call>{"name": "' ~ call.name ~ '", "arguments": ' -}}
{{- call.arguments if call.arguments is string else call.arguments | tojson -}}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- else -%}
{{- raise_exception('A message needs the role system, user, assistant or tool, not ' ~ \
message['role'] ~ '.') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}""".replace("TOOLS_BEGIN", _quoted(TOOLS_BEGIN)).replace(
    "TOOLS_END", _quoted(TOOLS_END)
)


def train_tokenizer(seed: int, vocab_size: int, case_count: int = 5000) -> Tokenizer:
    """Learn a byte-level vocabulary from newly drawn cases."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = Random(f"tokenizer {seed}")
    texts = (
        message["content"]
        for _ in range(case_count)
        for message in draw_case(rng, Split.TRAIN).messages()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _pieces_of(tokenizer: Tokenizer, texts: list[str]) -> Counter[tuple[str, ...]]:
    """Return the pieces that the tokenizer splits texts into, as tokens, with their frequency."""
    split = tokenizer.pre_tokenizer.pre_tokenize_str
    pieces = Counter(piece for text in texts for piece, _ in split(text))
    return Counter(
        {
            tuple(token.value for token in tokenizer.model.tokenize(piece)): count
            for piece, count in pieces.items()
        }
    )


def _merged(tokens: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    for token in tokens:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return tuple(merged)


def extend_tokenizer(tokenizer: Tokenizer, seed: int, case_count: int = 1500) -> Tokenizer:
    """Add the markers of calls and the most frequent tokens of JSON answers and functions.

    Text of the hotel corpus keeps its tokens: no pair that occurs in it is merged.
    """
    rng = Random(f"extension {seed}")
    hotels = _pieces_of(
        tokenizer,
        [
            message["content"]
            for _ in range(case_count)
            for message in draw_case(rng, Split.TRAIN).messages()
        ],
    )
    kept = {pair for tokens in hotels for pair in pairwise(tokens)}
    talks = [
        talk for _ in range(case_count) for talk in (draw_structured(rng), draw_tool_talk(rng))
    ]
    pieces = _pieces_of(
        tokenizer, [message["content"] for talk in talks for message in talk.messages()]
    )
    merges: list[tuple[str, str]] = []
    while len(merges) < JSON_TOKENS:
        counts: Counter[tuple[str, str]] = Counter()
        for tokens, count in pieces.items():
            for pair in pairwise(tokens):
                if pair not in kept:
                    counts[pair] += count
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        merges.append(best)
        merged: Counter[tuple[str, ...]] = Counter()
        for tokens, count in pieces.items():
            merged[_merged(tokens, best)] += count
        pieces = merged
    raw = json.loads(tokenizer.to_str())
    vocabulary = raw["model"]["vocab"]
    for pair in merges:
        vocabulary.setdefault("".join(pair), len(vocabulary))
        raw["model"]["merges"].append(list(pair))
    extended = Tokenizer.from_str(json.dumps(raw))
    extended.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return extended


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a special token, which every tokenizer trained here has."""
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(f"the tokenizer has no {token}")
    return token_id


def token_ids_of(
    tokenizer: Tokenizer, messages: list[Message], generation_prompt: bool
) -> list[int]:
    """Return the tokens of the messages after the chat template, without building one string."""
    end = special_id(tokenizer, END)
    ids = [special_id(tokenizer, BEGIN)]
    for message in messages:
        ids.append(special_id(tokenizer, f"<|{message['role']}|>"))
        ids += tokenizer.encode(message["content"].strip(), add_special_tokens=False).ids
        ids.append(end)
    if generation_prompt:
        ids.append(special_id(tokenizer, ASSISTANT))
    return ids


def write_tokenizer(tokenizer: Tokenizer, directory: Path, position_count_max: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": position_count_max,
        "added_tokens_decoder": {
            str(special_id(tokenizer, token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token in SPECIAL_TOKENS,
            }
            for token in (*SPECIAL_TOKENS, *MARKERS)
        },
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
