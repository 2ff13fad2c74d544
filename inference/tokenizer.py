"""Text to token ids and back, and conversations to prompts, as the checkpoint says.

Owns tokenizer.json and the chat template. Imports no torch: the API process tokenizes with it, and the engine host takes its
decoder from it. A template comes from whoever made the checkpoint, so it runs in a sandbox that can neither reach Python's
attributes nor change what it is given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inference.checkpoint import read_json
from inference.errors import ChatTemplateFailed, CheckpointInvalid


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation. Which roles exist is the template's business; it refuses the others."""

    role: str
    content: str


class Tokenizer:
    """The tokenizer and chat template of one checkpoint.

    Safe to use from several threads at once; encoding releases Python's lock, so a long prompt may be encoded in a thread.
    """

    def __init__(self, directory: Path) -> None:
        """Load. Raises `CheckpointInvalid` if tokenizer.json is absent or unreadable, or the template does not parse."""
        path = directory / "tokenizer.json"
        if not path.exists():
            raise CheckpointInvalid(str(path), "the file is missing")
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every defect of the file
            raise CheckpointInvalid(str(path), f"not a tokenizer: {error}") from error
        # Stored truncation or padding would silently change what is billed and computed.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special_token_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self._template = _load_chat_template(directory)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The underlying tokenizer, for the detokenizer alone. Not to be changed."""
        return self._backend

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that are control tokens: they add no text."""
        return self._special_token_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a plain prompt, with what the model expects around it (a BOS token, say) unless told otherwise."""
        return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def count(self, text: str, *, add_special_tokens: bool = True) -> int:
        """How many tokens `encode` would return."""
        return len(self._backend.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence at once. For streams use `inference.detokenizer`."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the prompt text that the model was trained on.

        Raises `ChatTemplateFailed` with the template's own words if it refuses the conversation, or if there is no template.
        """
        if self._template is None:
            raise ChatTemplateFailed("this model has no chat template; send a prompt instead of messages")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> tuple[int, ...]:
        """Token ids of a conversation. The template has written the special tokens, so none are added."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt), add_special_tokens=False)


class _ChatTemplate:
    def __init__(self, source: str, special_tokens: dict[str, str], path: Path) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
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
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            raise ChatTemplateFailed(str(error)) from error


def _load_chat_template(directory: Path) -> _ChatTemplate | None:
    """From chat_template.jinja if there is one, else from tokenizer_config.json; None if the model is not for chat."""
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    special_tokens = {name: _token_text(config[name]) for name in config if name.endswith("_token") and config[name]}
    file_path = directory / "chat_template.jinja"
    if file_path.exists():
        return _ChatTemplate(file_path.read_text(encoding="utf-8"), special_tokens, file_path)
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates; "default" is the one for plain conversations
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    return _ChatTemplate(source, special_tokens, config_path) if source else None


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which would put "\u003c" in front of the model.
    return json.dumps(value, ensure_ascii=False, indent=indent)
