"""Tokenizer and chat template of the demo model, trained on the corpus, in Hugging Face layout.

Three decisions make copying easy for a small model: a listing number with its brackets is one
token, a frequent number with at most one decimal is one token, and every other text falls back to
bytes, so that no text is unknown.
"""

import json
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.corpus import Message, draw_case
from demo.hotels import Split

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

CHAT_TEMPLATE = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ('system', 'user', 'assistant') -%}
{{- raise_exception('A message needs the role system, user or assistant, not ' ~ \
message['role'] ~ '.') -}}
{%- endif -%}
{%- if message['role'] == 'system' and not loop.first -%}
{{- raise_exception('A system message is only allowed at the beginning.') -}}
{%- endif -%}
{{- '<|' ~ message['role'] ~ '|>' ~ (message['content'] | trim) ~ '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}"""


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
                "special": True,
            }
            for token in SPECIAL_TOKENS
        },
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
