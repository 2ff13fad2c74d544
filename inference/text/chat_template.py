"""Conversations to prompts, by the checkpoint's own Jinja templates.

A template comes from whoever made the checkpoint, so it runs in a sandbox (`template_sandbox.py`). It finds
there what published templates expect: `raise_exception`, `strftime_now`, `tojson` without HTML escapes, loop controls, `generation`
blocks, the special tokens by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from inference.checkpoint.checkpoint import read_json
from inference.errors import ChatTemplateFailed, CheckpointInvalid
from inference.text.template_sandbox import LOOK_AT_CLOCK, BoundedEnvironment, Budget

DEFAULT_TEMPLATE = "default"

# A role is put into the prompt beside control tokens; more than a name could imitate them.
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. Which roles exist is the template's business; it refuses the others."""

    role: str
    content: str


class ChatTemplates:
    """The templates of one checkpoint by name; "default" is the one for plain conversations."""

    def __init__(self, directory: Path) -> None:
        """Load. Raises `CheckpointInvalid` if a file is unreadable or a template does not parse."""
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        special_tokens = _special_tokens(directory, config)
        self._by_name = {
            name: _ChatTemplate(source, special_tokens, path) for name, (source, path) in _sources(directory, config).items()
        }

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool, template_name: str) -> str:
        """The conversation as text. Raises `ChatTemplateFailed` if the template refuses it, or is not there."""
        template = self._by_name.get(template_name)
        if template is None and self._by_name:
            names = ", ".join(self._by_name)
            raise ChatTemplateFailed(f"this model has no chat template named {template_name}; it has: {names}")
        if template is None:
            raise ChatTemplateFailed("this model has no chat template; send a prompt instead of messages")
        for message in messages:
            if not _ROLE.fullmatch(message.role):
                raise ChatTemplateFailed(f"role {message.role!r} is not a name")
        return template.render(messages, add_generation_prompt=add_generation_prompt)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what training counts; when a prompt is made it is nothing but its content."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]  # an instance variable in the stubs

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """See `Extension.parse`."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str], path: Path) -> None:
        environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointInvalid(str(path), f"the chat template does not parse: {error}") from error
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
                **{LOOK_AT_CLOCK: Budget().look_at_clock},
            )
        except RecursionError as error:
            raise ChatTemplateFailed("the chat template calls itself without end") from error
        except MemoryError as error:
            raise ChatTemplateFailed("the chat template wants more memory than there is") from error
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            raise ChatTemplateFailed(str(error)) from error


def _sources(directory: Path, config: Mapping[str, Any]) -> dict[str, tuple[str, Path]]:
    """Every template's text and file by name. Files win over tokenizer_config.json, as in transformers."""
    config_path = directory / "tokenizer_config.json"
    entry = config.get("chat_template") or {}
    if isinstance(entry, str):
        entry = {DEFAULT_TEMPLATE: entry}
    try:
        named = {one["name"]: one["template"] for one in entry} if isinstance(entry, list) else dict(entry)
    except (KeyError, TypeError, ValueError):
        named = {"": None}
    if not all(isinstance(name, str) and isinstance(source, str) for name, source in named.items()):
        raise CheckpointInvalid(str(config_path), "chat_template is neither a template nor templates by name")
    sources = {name: (source, config_path) for name, source in named.items()}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = (_read_text(path), path)
    path = directory / "chat_template.jinja"
    if path.exists():
        sources[DEFAULT_TEMPLATE] = (_read_text(path), path)
    return sources


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointInvalid(str(path), f"the chat template cannot be read: {error}") from error


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like by name: tokenizer_config.json wins over the older special_tokens_map.json."""
    path = directory / "special_tokens_map.json"
    entries = (read_json(path) if path.exists() else {}) | dict(config)
    tokens = {}
    for name, entry in entries.items():
        if name.endswith("_token") and entry and isinstance(entry, str | dict):
            token = entry.get("content") if isinstance(entry, dict) else entry
            if not isinstance(token, str):
                raise CheckpointInvalid(str(directory / "tokenizer_config.json"), f"{name} = {entry!r} has no content")
            tokens[name] = token
    return tokens


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would put "\u003c" in front of the model.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
