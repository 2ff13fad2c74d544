"""Text to token ids and back, and conversations to prompts, as the checkpoint says.

Owns tokenizer.json; `chat_template.py` owns the templates, `control_tokens.py` keeps messages from imitating them. Imports no
torch: the API process tokenizes with it, and the engine host takes its decoder from it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from inference.errors import CheckpointInvalid
from inference.text.chat_template import DEFAULT_TEMPLATE, ChatMessage, ChatTemplates
from inference.text.control_tokens import ControlTokens, written_markers
from inference.text.detokenizer import is_byte_level, token_bytes
from inference.text.token_bounds import TokenBound
from inference.text.tools import MARKERS, CallFormat, Tool, ToolCall

__all__ = ["ChatMessage", "Tokenizer"]

# One prompt at a time is all that is encoded here. The library's own threads would take each over and hand it back.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


HEAD_CHARS_PER_TOKEN = 16  # of a text of which only the beginning is wanted, looked at first
HEAD_TOKENS_MORE = 64  # tokens at the end of a head that are not relied on: what was cut off may change them


class TokenLimitExceeded(Exception):
    """A text was not encoded, since it has at least `least_token_count` tokens, more than asked for."""

    def __init__(self, least_token_count: int) -> None:
        super().__init__(f"at least {least_token_count} tokens")
        self.least_token_count = least_token_count


class Tokenizer:
    """The tokenizer and chat template of one checkpoint.

    Safe to use from several threads at once; encoding releases Python's lock, so a long prompt may be encoded in a thread.
    """

    def __init__(self, directory: Path, call_format: CallFormat | None = None) -> None:
        """Load. call_format: how the model writes tool calls; None: as its template shows.

        Raises `CheckpointInvalid` if tokenizer.json is absent or unreadable, or the template does not parse.
        """
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
            token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special and token.content not in MARKERS
        )
        self._is_byte_level = is_byte_level(self._backend)
        self._bound = TokenBound(self._backend)
        self._templates = ChatTemplates(directory)
        self._control_tokens_lock = threading.Lock()
        self._control_tokens_made: ControlTokens | None = None
        self.call_format = call_format or self._templates.call_format()

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The underlying tokenizer, for the detokenizer alone. Not to be changed."""
        return self._backend

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that are control tokens: they add no text. Those that begin and end a tool call are not among them."""
        return self._special_token_ids

    def chars_max(self, token_count: int) -> int | None:
        """The most characters that so many tokens can stand for; None if that cannot be told for this tokenizer."""
        return self._bound.chars_max(token_count)

    def check_limit(self, text: str, token_count_max: int | None) -> None:
        """Raises: TokenLimitExceeded if the text, by its bytes alone, has more tokens than that."""
        if token_count_max is not None:
            least = self._bound.least_token_count(text, token_count_max)
            if least > token_count_max:
                raise TokenLimitExceeded(least)

    def encode(self, text: str, *, add_special_tokens: bool = True, token_count_max: int | None = None) -> tuple[int, ...]:
        """Token ids of a plain prompt, with what the model expects around it (a BOS token, say) unless told otherwise.

        Raises: TokenLimitExceeded where it is certain that there are more than `token_count_max`.
        """
        self.check_limit(text, token_count_max)
        # A batch of one: only for batches does the library leave out offsets, a quarter of the time, which nobody here asks for.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def encode_within(self, text: str, token_count_max: int) -> tuple[tuple[int, ...], bool]:
        """As `encode`, but the end of a longer text is left out; and whether it was.

        What the model expects around a text is never left out.
        """
        added_count = self._backend.num_special_tokens_to_add(is_pair=False)
        encoding = self._head(text, token_count_max)
        if is_longer := len(encoding) + added_count > token_count_max:
            encoding.truncate(max(token_count_max - added_count, 0))
        return tuple(self._backend.post_process(encoding).ids), is_longer

    def _head(self, text: str, token_count: int) -> tokenizers.Encoding:
        """As much of a text's beginning as has so many tokens, and some more; or all of it."""
        chars = HEAD_CHARS_PER_TOKEN * (token_count + HEAD_TOKENS_MORE)
        while chars < len(text):
            head = self._backend.encode(text[:chars], add_special_tokens=False)
            if len(head) > token_count + HEAD_TOKENS_MORE:
                head.truncate(token_count + 1)
                return head
            chars *= 4
        return self._backend.encode(text, add_special_tokens=False)

    def count(self, text: str, *, add_special_tokens: bool = True) -> int:
        """How many tokens `encode` would return."""
        return len(self._backend.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence at once. For streams use `inference.text.detokenizer`."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, which may be less than a character; empty for an id that is not in the vocabulary."""
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else token_bytes(token, self._is_byte_level)

    def token_id(self, text: str) -> int | None:
        """The token that is this text; None if there is none."""
        return self._backend.token_to_id(text)

    def shows_tools(self, template_name: str = DEFAULT_TEMPLATE) -> bool:
        """Whether the chat template puts tools before the model."""
        return self._templates.shows_tools(template_name)

    def switches_thinking(self, *, has_tools: bool = False) -> bool:
        """Return whether the chat template has a switch for thinking."""
        return self._templates.switches_thinking(DEFAULT_TEMPLATE, has_tools=has_tools)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        template_name: str = DEFAULT_TEMPLATE,
        thinking: bool | None = None,
    ) -> str:
        """The conversation as the prompt text that the model was trained on. thinking: None leaves it to the template.

        Raises `ChatTemplateFailed` with the template's own words if it refuses the conversation, and if there is no template, or
        none that shows the model tools and calls where there are some.
        """
        return self._templates.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_name=template_name,
            thinking=thinking,
        )

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        template_name: str = DEFAULT_TEMPLATE,
        token_count_max: int | None = None,
        thinking: bool | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation: control tokens where the template writes them, and nowhere else.

        The template has written the special tokens, so none are added. What a message, a call or a tool spells out is text.
        Raises `ChatTemplateFailed`; `TokenLimitExceeded` where it is certain that there are more than `token_count_max`.
        """
        hidden = [self._hidden_message(message) for message in messages]
        hidden_tools = [self._hidden_tool(tool) for tool in tools]
        rendered = self.render_chat(
            hidden,
            hidden_tools,
            add_generation_prompt=add_generation_prompt,
            template_name=template_name,
            thinking=thinking,
        )
        is_hidden = hidden != list(messages) or hidden_tools != list(tools)
        if token_count_max is not None:
            self.check_limit(self._control_tokens.revealed(rendered) if is_hidden else rendered, token_count_max)
        return self._control_tokens.encode(rendered, hidden=is_hidden)

    @property
    def _control_tokens(self) -> ControlTokens:
        """The markers of this tokenizer and its templates. Found when first needed: engines only detokenize."""
        with self._control_tokens_lock:
            if self._control_tokens_made is None:
                renderings, sources = self._templates.placeholder_renderings(), self._templates.sources()
                self._control_tokens_made = ControlTokens(self._backend, written_markers(self._backend, renderings, sources))
            return self._control_tokens_made

    def _hidden_message(self, message: ChatMessage) -> ChatMessage:
        tokens = self._control_tokens
        content = (tokens.hide_answer if message.role == "assistant" else tokens.hide)(message.content)
        if not message.tool_calls and message.call is None:
            return replace(message, content=content)
        calls = tuple(map(self._hidden_call, message.tool_calls))
        return replace(message, content=content, tool_calls=calls, call=self._hidden_call(message.call) if message.call else None)

    def _hidden_call(self, call: ToolCall) -> ToolCall:
        hide = self._control_tokens.hide
        return ToolCall(hide(call.id), hide(call.name), self._hidden_json(call.arguments))

    def _hidden_tool(self, tool: Tool) -> Tool:
        hide = self._control_tokens.hide
        return Tool(hide(tool.name), hide(tool.description), self._hidden_json(tool.parameters), tool.strict)

    def _hidden_json(self, source: str) -> str:
        """The same document with every text in it hidden; the very same where nothing is to be hidden."""
        document = json.loads(source)
        hidden = self._hidden_value(document)
        return source if hidden == document else json.dumps(hidden, ensure_ascii=False)

    def _hidden_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._control_tokens.hide(value)
        if isinstance(value, list):
            return [self._hidden_value(each) for each in value]
        if isinstance(value, dict):
            return {self._control_tokens.hide(key): self._hidden_value(each) for key, each in value.items()}
        return value
