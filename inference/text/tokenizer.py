"""Tokenizer of a checkpoint: text to token ids and back, and conversations to prompts.

Reads tokenizer.json; `chat_template.py` renders templates, `control_tokens.py` keeps messages from
forging control tokens. Imports no torch: the API process tokenizes with it, and the engine worker
uses its decoder.

`TokenBound` computes a lower bound of the number of tokens of a text without encoding it. Each byte
has the weight 1/n, where n is the length of the longest token that contains it. A token of m bytes
weighs at most 1, so a text has at least as many tokens as its bytes weigh. This holds for
tokenizers that encode every byte and change the text only in the ways handled below; others have no
bound.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tokenizers
from tokenizers.models import BPE

from inference.errors import ChatTemplateFailed, CheckpointInvalid
from inference.text.chat_template import EFFORTS as EFFORTS
from inference.text.chat_template import NOT_THINKING as NOT_THINKING
from inference.text.chat_template import ChatTemplates
from inference.text.chat_template import Thinking as Thinking
from inference.text.control_tokens import ControlTokens, markers_of, written_markers
from inference.text.conversation import ChatMessage as ChatMessage
from inference.text.reasoning import Channels, reasoning_format
from inference.text.text_decoder import TextDecoder, byte_by_character, is_byte_level, token_bytes
from inference.text.text_decoder import TokenSpan as TokenSpan
from inference.text.text_decoder import TokenSpans as TokenSpans
from inference.text.tools import MARKERS, CallFormat, Tool, ToolCall
from inference.text.word_cache import WordCache, parts_of

# Only one prompt at a time is encoded: the library's thread pool would only add handover costs.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

HEAD_CHARS_PER_TOKEN = 16  # initial length of a head, when only the beginning of a text is needed
HEAD_TOKENS_MORE = 64  # tokens discarded at the end of a head, which the cut may have changed

NFC_CHARS_MAX = 4  # code points that NFC composes into one
PIECE_CHARS = 65_536  # processed at once: counting takes eight times their memory
# Whitespace that stripping tokens may swallow, besides non-ASCII characters.
WHITESPACE = frozenset(b"\t\n\v\f\r\x1c\x1d\x1e\x1f ")
# Maximum growth of an added token by normalization, for tokens matched in normalized text.
NORMALIZED_GROWTH = 3


class TokenLimitExceeded(Exception):
    """The text was not encoded: it has at least `least_token_count` tokens, more than the limit."""

    def __init__(self, least_token_count: int) -> None:
        super().__init__(f"at least {least_token_count} tokens")
        self.least_token_count = least_token_count


class Tokenizer:
    """The tokenizer and chat template of one checkpoint.

    Safe to use from several threads at once; encoding releases the GIL, so it can run in a thread.
    """

    def __init__(self, directory: Path, call_format: CallFormat | None = None) -> None:
        """Load the tokenizer. `call_format` is the model's tool call format; None detects it from
        the template.

        Raises CheckpointInvalid if tokenizer.json is missing or unreadable, or the template does
        not parse.
        """
        path = directory / "tokenizer.json"
        if not path.exists():
            raise CheckpointInvalid(str(path), "the file is missing")
        try:
            # The underlying tokenizer, for the detokenizer only; read only.
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every defect of the file
            raise CheckpointInvalid(str(path), f"not a tokenizer: {error}") from error
        # Stored truncation or padding would silently change the billed and computed tokens.
        self.backend.no_truncation()
        self.backend.no_padding()
        # Control tokens, which have no text. Tool call markers are not included.
        self.special_token_ids = frozenset(
            token_id
            for token_id, token in self.backend.get_added_tokens_decoder().items()
            if token.special and token.content not in MARKERS
        )
        self._is_byte_level = is_byte_level(self.backend)
        self._bound = TokenBound(self.backend)
        self.words = WordCache(self.backend)  # encodes plain prompts without a limit
        self._templates = ChatTemplates(directory)
        # `eos_token` of tokenizer_config.json; `end_token_ids` has it and others.
        eos_token = self._templates.eos_token
        self.eos_token_id = None if eos_token is None else self.backend.token_to_id(eos_token)
        self._path = path
        self._control_tokens_lock = threading.Lock()
        self._control_tokens_made: ControlTokens | None = None
        self.call_format = call_format or self._templates.call_format()
        self.reasoning = reasoning_format(self.backend, self._templates.sources())

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Ids of the tokens that end an answer, by the tokenizer and by the chat template.

        Fine-tunes often change the tokenizer or the template, and keep the config.json of the base
        model; several do not flag the token as special. A token that also ends thoughts, such as
        `<|end|>` of GPT-OSS, is left out.
        """
        ends = [] if self.eos_token_id is None else [self.eos_token_id]
        may_end = set(markers_of(self.backend))
        if isinstance(self.reasoning, Channels):
            may_end -= self.reasoning.inner_ids
        for texts in self._templates.turn_ends():
            ids = (
                self.backend.encode(text.lstrip(), add_special_tokens=False).ids for text in texts
            )
            ends += [first[0] for first in ids if first and first[0] in may_end][:1]
        return frozenset(ends)

    def check_fits(self, vocabulary_size: int) -> None:
        """Check that tokenizer, template and a model with `vocabulary_size` tokens belong together.

        A special token beyond the vocabulary that nothing writes is accepted: text models keep the
        image tokens of their multimodal variants. Prompts that spell it are refused. Raises
        CheckpointInvalid.
        """
        vocabulary = self.backend.get_vocab(with_added_tokens=False)
        if (largest := max(vocabulary.values(), default=0)) >= vocabulary_size:
            self._refuse_id(largest, vocabulary_size)
        for id_ in (*self.backend.encode("").ids, *self._written.values(), *self.end_token_ids):
            if id_ >= vocabulary_size:
                self._refuse_id(id_, vocabulary_size)
        for name, token in self._templates.needed_tokens():
            if self.backend.token_to_id(token) is None:
                raise CheckpointInvalid(
                    self._path,
                    f"token {token!r}, which tokenizer_config.json names ({name}), is missing; use"
                    " both files of the same checkpoint",
                )

    def _refuse_id(self, id_: int, vocabulary_size: int) -> NoReturn:
        raise CheckpointInvalid(
            self._path,
            f"token {self.backend.id_to_token(id_)!r} has the id {id_}, which is not within"
            f" vocab_size {vocabulary_size} of config.json; use the tokenizer of this model",
        )

    def template_faults(self) -> list[str]:
        """List the usual conversations that the chat template does not show, by their roles."""
        return self._templates.faults()

    def chars_max(self, token_count: int) -> int | None:
        """Compute the maximum length of `token_count` tokens in characters; None if unbounded."""
        return self._bound.chars_max(token_count)

    def check_limit(self, text: str, token_count_max: int) -> None:
        """Raise TokenLimitExceeded if the lower bound of the text's tokens exceeds the limit."""
        if (lower_bound := self._bound.least_token_count(text, token_count_max)) > token_count_max:
            raise TokenLimitExceeded(lower_bound)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, token_count_max: int | None = None
    ) -> tuple[int, ...]:
        """Encode a plain prompt. `add_special_tokens` adds BOS and the like, as the model expects.

        Raises TokenLimitExceeded if the text certainly has more than `token_count_max` tokens.
        """
        if token_count_max is not None:
            self.check_limit(text, token_count_max)
        return self.words.encode(text, add_special_tokens=add_special_tokens)

    def encode_within(self, text: str, token_count_max: int) -> tuple[tuple[int, ...], bool]:
        """Encode a text, truncated to `token_count_max` tokens. Return the ids, and whether text
        was cut.

        Special tokens around the text are never truncated.
        """
        added_count = self.backend.num_special_tokens_to_add(is_pair=False)
        encoding = self._head(text, token_count_max)
        if is_longer := len(encoding) + added_count > token_count_max:
            encoding.truncate(max(token_count_max - added_count, 0))
        return tuple(self.backend.post_process(encoding).ids), is_longer

    def _head(self, text: str, token_count: int) -> tokenizers.Encoding:
        """Encode the beginning of the text, with at least `token_count` tokens, or all of it."""
        chars = HEAD_CHARS_PER_TOKEN * (token_count + HEAD_TOKENS_MORE)
        while chars < len(text):
            head = self.backend.encode(text[:chars], add_special_tokens=False)
            if len(head) > token_count + HEAD_TOKENS_MORE:
                head.truncate(token_count + 1)
                return head
            chars *= 4
        return self.backend.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode a complete sequence. For streams use `inference.text.detokenizer`."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def decoder(self) -> TextDecoder:
        """Decoding tables for streams. Raises CheckpointInvalid if the tokenizer cannot stream."""
        return TextDecoder(self.backend, self.special_token_ids, str(self._path), self.reasoning)

    def token_bytes(self, token_id: int) -> bytes:
        """Convert a token to bytes, possibly a partial character; empty for an unknown id."""
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else token_bytes(token, self._is_byte_level)

    def token_id(self, text: str) -> int | None:
        """Look up the id of the token with this text; None if there is none."""
        return self.backend.token_to_id(text)

    def shows_tools(self) -> bool:
        """Return whether the chat template renders tools."""
        return self._templates.shows_tools()

    def takes_one_call_only(self) -> bool:
        """Return whether the chat template shows an answer with a call, but not with several."""
        return self._templates.takes_one_call_only()

    def takes_thinking(self, thinking: bool | str, *, has_tools: bool = False) -> bool:
        """Return whether the chat template accepts this switch or effort of thinking."""
        return self._templates.takes_thinking(thinking, has_tools=has_tools)

    @cached_property
    def thinks_by_default(self) -> bool:
        """True if the model begins to think by itself, unless the template's switch is off."""
        if isinstance(self.reasoning, Channels):
            return True
        if self.reasoning is None or not self.takes_thinking(False):
            return False
        messages = [ChatMessage("user", "?")]
        try:
            shown, off = [self.render_chat(messages, thinking=each) for each in (None, False)]
        except ChatTemplateFailed:
            return False
        return shown != off

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        thinking: Thinking = None,
    ) -> str:
        """Render a conversation as prompt text. `thinking` is None for the template's default.

        Raises ChatTemplateFailed if the template rejects the conversation, is missing, or does not
        render the tools and calls.
        """
        return self._templates.render(
            self._templates.arranged(messages, tools, thinking=thinking),
            tools,
            add_generation_prompt=add_generation_prompt,
            thinking=thinking,
        )

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        token_count_max: int | None = None,
        thinking: Thinking = None,
    ) -> tuple[int, ...]:
        """Encode a conversation. Only the template writes control tokens; those spelled in messages
        are text.

        Raises ChatTemplateFailed, or TokenLimitExceeded if the prompt certainly has more than
        `token_count_max` tokens.
        """
        arranged = self._templates.arranged(messages, tools, thinking=thinking)
        hidden = [self._hidden_message(message) for message in arranged]
        hidden_tools = [self._hidden_tool(tool) for tool in tools]
        rendered = self._templates.render(
            hidden, hidden_tools, add_generation_prompt=add_generation_prompt, thinking=thinking
        )
        is_hidden = hidden != arranged or hidden_tools != list(tools)
        if token_count_max is not None:
            self.check_limit(
                self._control_tokens.revealed(rendered) if is_hidden else rendered, token_count_max
            )
        return self._control_tokens.encode(rendered, hidden=is_hidden)

    @property
    def _control_tokens(self) -> ControlTokens:
        """Markers of this tokenizer and its templates; computed on first use."""
        with self._control_tokens_lock:
            if self._control_tokens_made is None:
                encode = partial(self.words.encode, add_special_tokens=False)
                self._control_tokens_made = ControlTokens(self.backend, self._written, encode)
            return self._control_tokens_made

    @cached_property
    def _written(self) -> dict[str, int]:
        """Markers that the templates write."""
        renderings, sources = self._templates.placeholder_renderings(), self._templates.sources()
        return written_markers(self.backend, renderings, sources)

    def _hidden_message(self, message: ChatMessage) -> ChatMessage:
        tokens = self._control_tokens
        content = (tokens.hide_answer if message.role == "assistant" else tokens.hide)(
            message.content
        )
        reasoning = message.reasoning and tokens.hide(message.reasoning)
        if not message.tool_calls and message.call is None:
            if content == message.content and reasoning == message.reasoning:
                return message  # nothing is hidden in most messages, and a copy takes longer
            return replace(message, content=content, reasoning=reasoning)
        calls = tuple(map(self._hidden_call, message.tool_calls))
        return replace(
            message,
            content=content,
            tool_calls=calls,
            call=self._hidden_call(message.call) if message.call else None,
            reasoning=reasoning,
        )

    def _hidden_call(self, call: ToolCall) -> ToolCall:
        hide = self._control_tokens.hide
        return ToolCall(hide(call.id), hide(call.name), self._hidden_json(call.arguments))

    def _hidden_tool(self, tool: Tool) -> Tool:
        hide = self._control_tokens.hide
        return Tool(
            hide(tool.name), hide(tool.description), self._hidden_json(tool.parameters), tool.strict
        )

    def _hidden_json(self, source: str) -> str:
        """Hide every string in a JSON document; without anything to hide, return it unchanged."""
        document = json.loads(source)
        hidden = self._hidden_value(document)
        return source if hidden == document else json.dumps(hidden, ensure_ascii=False)

    def _hidden_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._control_tokens.hide(value)
        if isinstance(value, list):
            return [self._hidden_value(each) for each in value]
        if isinstance(value, dict):
            return {
                self._control_tokens.hide(key): self._hidden_value(each)
                for key, each in value.items()
            }
        return value


SPACE, SPACE_MARK = " ", "▁"


class TokenBound:
    """Bounds of the token count for one tokenizer. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._marks_spaces = False
        self._composes = False
        self._weights = self._weights_of(backend)
        self._ascii_weight_max = 0.0 if self._weights is None else float(self._weights[:128].max())
        # Longest token in bytes; infinite if tokens swallow whitespace.
        self._longest = (
            math.inf
            if self._weights is None or not self._weights.all()
            else 1 / float(self._weights.min())
        )

    def chars_max(self, token_count: int) -> int | None:
        """Compute the maximum length of `token_count` tokens in characters; None if unbounded."""
        if math.isinf(self._longest):
            return None
        return round(token_count * self._longest * (NFC_CHARS_MAX if self._composes else 1))

    def least_token_count(self, text: str, enough: float = math.inf) -> int:
        """Compute a lower bound of the text's tokens; 0 without one. Stops early above `enough`."""
        if self._weights is None:
            return 0
        weight = 0.0
        for begin in range(0, len(text), PIECE_CHARS):
            weight += self._weight(text[begin : begin + PIECE_CHARS])
            if weight > enough:
                break
        return math.ceil(weight * (1 - 1e-9))

    def _weight(self, piece: str) -> float:
        """Compute the weight of a piece of text. Weights of pieces add up to that of the text."""
        assert self._weights is not None
        if self._marks_spaces:
            piece = piece.replace(SPACE, SPACE_MARK)
        content = np.frombuffer(piece.encode("utf-8", "surrogatepass"), np.uint8)
        counts = np.bincount(content, minlength=256)
        if not self._composes or piece.isascii():
            return float(counts @ self._weights)
        # Each non-ASCII character composes at most one ASCII character; at most four characters
        # become one.
        non_ascii_count = len(piece) - int(counts[:128].sum())
        ascii_weight = (
            float(counts[:128] @ self._weights[:128]) - non_ascii_count * self._ascii_weight_max
        )
        # The first character of a piece may compose with the last of the previous piece.
        return max(ascii_weight, len(piece) / NFC_CHARS_MAX / self._longest, 1.0) - 1.0

    def _weights_of(
        self, backend: tokenizers.Tokenizer
    ) -> np.ndarray[Any, np.dtype[np.float64]] | None:
        """Compute the weight of each byte; None if text is dropped or tokens are unbounded."""
        model = backend.model
        if (
            not isinstance(model, BPE)
            or model.continuing_subword_prefix
            or model.end_of_word_suffix
        ):
            return None
        normalizers, pre_tokenizers = parts_of(backend.normalizer), parts_of(backend.pre_tokenizer)
        if normalizers is None or pre_tokenizers is None:
            return None
        if not all(map(self._keeps_text, normalizers)) or not all(
            map(self._keeps_text, pre_tokenizers)
        ):
            return None
        vocabulary = backend.get_vocab(with_added_tokens=False)
        if any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers)):
            chars = byte_by_character()
            if not chars.keys() <= vocabulary.keys():
                return None
            tokens: Iterable[bytes] = (
                bytes(chars[char] for char in token)
                for token in vocabulary
                if all(char in chars for char in token)
            )
        elif model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
            tokens = (token.encode() for token in vocabulary)
        else:
            return None
        added = backend.get_added_tokens_decoder().values()
        longest = longest_with_each_byte([(len(token), token) for token in tokens])
        for token in added:
            content = (
                token.content.replace(SPACE, SPACE_MARK).encode()
                if self._marks_spaces
                else token.content.encode()
            )
            changes = bool(normalizers) and token.normalized
            length = NORMALIZED_GROWTH * (len(content) + 1) if changes else len(content)
            for byte in range(256) if changes else content:
                longest[byte] = max(longest[byte], length)
        weights: np.ndarray[Any, np.dtype[np.float64]] = 1 / np.maximum(longest, 1)
        if any(token.lstrip or token.rstrip for token in added):
            weights[[*WHITESPACE]] = 0.0
            weights[128:] = 0.0
        return weights

    def _keeps_text(self, part: dict[str, Any]) -> bool:
        """Return whether a step keeps all text, and record how it changes the text."""
        match part["type"]:
            case "NFC":
                self._composes = True
            case "Replace" if (
                part["pattern"] == {"String": SPACE} and part["content"] == SPACE_MARK
            ):
                self._marks_spaces = True
            case "Metaspace" if part["replacement"] == SPACE_MARK:
                self._marks_spaces = True
            case "ByteLevel" | "Digits" | "Prepend":
                pass
            case "Split" | "Punctuation":
                return bool(part["behavior"] != "Removed")
            case _:
                return False
        return True


def longest_with_each_byte(tokens: list[tuple[int, bytes]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Find the length in bytes of the longest token that contains each byte; 1 without any."""
    longest = np.ones(256, np.int64)
    missing = set(range(256))
    for length, token in sorted(tokens, reverse=True):
        if found := missing.intersection(token):
            longest[[*found]] = length
            missing -= found
            if not missing:
                break
    return longest
