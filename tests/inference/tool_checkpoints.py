"""Tiny checkpoints with tool templates, and one that writes scripted calls."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.inference.checkpoints import LlamaShape, make_checkpoint

# Like Qwen and Hermes, shortened: tools in the system turn, calls between markers, results in the
# user's turn.
TOOL_TEMPLATE = """\
{%- if tools -%}
{{ '<|system|>You may call <tools>' }}
{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}
{{ '</tools> by <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|end|>' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{{ '<|user|><tool_response>' + message['content'] + '</tool_response><|end|>' }}
{%- else -%}
{{ '<|' + message['role'] + '|>' + message['content'] }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>{"name": "' + call.function.name + '", "arguments": '
    + (call.function.arguments | tojson) + '}</tool_call>' }}
{%- endfor -%}
{{ '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
# Like Llama 3 and Mistral: one call per turn, without text, and ids of nine characters.
STRICT_TEMPLATE = TOOL_TEMPLATE.replace(
    "{{ '<|user|><tool_response>'",
    """{%- if message.tool_call_id | length != 9 -%}{{ raise_exception('nine!') }}{%- endif -%}
{{ '<|user|><tool_response>'""",
).replace(
    "{{ '<|' + message['role'] + '|>' + message['content'] }}",
    """{%- if message.tool_calls and message.tool_calls | length != 1 -%}
{{ raise_exception('one call!') }}{%- endif -%}
{{ '<|' + message['role'] + '|>' + ('' if message.tool_calls else message['content']) }}""",
)
END_ID, ASSISTANT_ID = 6, 5


def make_tool_checkpoint(directory: Path, *, shape: LlamaShape | None = None) -> Path:
    """Write a random one: it calls tools where forced, and writes noise otherwise."""
    make_checkpoint(directory, shape=shape, chat_template=TOOL_TEMPLATE)
    return directory


def make_scripted_checkpoint(
    directory: Path, script: Sequence[str], template: str = TOOL_TEMPLATE, *, weight: float = 100.0
) -> Path:
    """Write one that answers everything with these distinct tokens and its end.

    Its layers add nothing, and each token's embedding points to the next one. weight: of that, in
    eighths of a logit.
    """
    make_checkpoint(directory, shape=LlamaShape(layer_count=1), chat_template=template)
    first_id = _add_tokens(directory, script)
    write_chains(
        directory,
        [[ASSISTANT_ID, *range(first_id, first_id + len(script)), END_ID]],
        vocabulary_size=first_id + len(script),
        weight=weight,
    )
    return directory


def make_conversation_checkpoint(
    directory: Path, answers: Sequence[Sequence[str]], *, context_window_tokens: int
) -> Path:
    """Write one that has an answer for each number of results of tools, the last for all others.

    The template ends prompts with a token that the answer follows. Tokens must be distinct.
    """
    marks = [f"<answer {number}>" for number in range(len(answers))]
    chosen = (
        "{{ '<|assistant|>' }}{%- set results = messages | selectattr('role', 'equalto', 'tool')"
        " | list | length -%}"
        f"{{{{ '<answer ' + ([results, {len(answers) - 1}] | min | string) + '>' }}}}"
    )
    template = TOOL_TEMPLATE.replace("{{ '<|assistant|>' }}", chosen)
    shape = LlamaShape(layer_count=1, context_window_tokens=context_window_tokens)
    make_checkpoint(directory, shape=shape, chat_template=template)
    tokens = [*marks, *itertools.chain.from_iterable(answers)]
    assert len(set(tokens)) == len(tokens), "each token has one follower"
    ids = dict(zip(tokens, itertools.count(_add_tokens(directory, tokens)), strict=False))
    chains = [
        [ids[mark], *(ids[token] for token in answer), END_ID]
        for mark, answer in zip(marks, answers, strict=True)
    ]
    write_chains(directory, chains, vocabulary_size=max(ids.values()) + 1)
    return directory


def _add_tokens(directory: Path, tokens: Sequence[str]) -> int:
    """Add tokens to the tokenizer of a checkpoint. Return the id of the first; others follow."""
    tokenizer_path = directory / "tokenizer.json"
    tokenizer = json.loads(tokenizer_path.read_text(encoding="utf-8"))
    first_id = len(tokenizer["model"]["vocab"])
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    tokenizer["added_tokens"] += [
        {"id": first_id + index, "content": piece, **plain} for index, piece in enumerate(tokens)
    ]
    tokenizer_path.write_text(json.dumps(tokenizer), encoding="utf-8")
    assert tokenizer["model"]["vocab"].keys().isdisjoint(tokens), "these are tokens already"
    return first_id


def write_chains(
    directory: Path,
    chains: Sequence[Sequence[int]],
    *,
    vocabulary_size: int,
    alternatives: Mapping[int, Sequence[tuple[int, float]]] | None = None,
    weight: float = 100.0,
) -> None:
    """Rewrite the weights of a checkpoint with one layer: each token of a chain is followed by the
    next one.

    The tokens that others follow must be distinct, and fewer than the hidden size. alternatives:
    by token, further ones that may follow it, and their weights; those of the chains have `weight`.
    """
    shape = LlamaShape(layer_count=1)
    follows: dict[int, list[tuple[int, float]]] = {}
    for chain in chains:
        for token_id, next_id in itertools.pairwise(chain):
            assert token_id not in follows, "one token follows"
            follows[token_id] = [(next_id, weight), *(alternatives or {}).get(token_id, ())]
    assert len(follows) < shape.hidden_size
    tensors = load_file(directory / "model.safetensors")
    for name in list(tensors):
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    embeddings, head = (
        np.zeros((vocabulary_size, shape.hidden_size), np.float32) for _ in range(2)
    )
    for direction, (token_id, nexts) in enumerate(follows.items()):
        embeddings[token_id, direction] = 1.0
        for next_id, weight in nexts:
            head[next_id, direction] = weight  # no temperature changes its choice
    norm = np.ones_like(tensors["model.norm.weight"])
    tensors |= {"model.embed_tokens.weight": embeddings, "lm_head.weight": head}
    tensors["model.norm.weight"] = norm
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(
        json.dumps(config | {"vocab_size": vocabulary_size}), encoding="utf-8"
    )
