"""Text to token ids and back, and conversations to prompts, as the checkpoint says.

Owns tokenizer.json; `chat_template.py` owns the templates, `control_tokens.py` keeps messages from imitating them. Imports no
torch: the API process tokenizes with it, and the engine host takes its decoder from it.

`TokenBound` is a lower bound of the number of tokens of a text, found without encoding it. Each byte of a text gets the weight
1/n, where n is the length of the longest token that contains the byte. A token of m bytes then weighs at most 1, so a text has at
least as many tokens as its bytes weigh. That holds for tokenizers that encode every byte of the text and change it in no way but
the ones below; for all others there is no bound."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers.models import BPE

from inference.errors import CheckpointInvalid
from inference.text.chat_template import ChatMessage as ChatMessage
from inference.text.chat_template import ChatTemplates
from inference.text.control_tokens import ControlTokens, written_markers
from inference.text.detokenizer import byte_by_character, is_byte_level, token_bytes
from inference.text.tools import MARKERS, CallFormat, Tool, ToolCall

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
            # The underlying tokenizer, for the detokenizer alone. Not to be changed.
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every defect of the file
            raise CheckpointInvalid(str(path), f"not a tokenizer: {error}") from error
        # Stored truncation or padding would silently change what is billed and computed.
        self.backend.no_truncation()
        self.backend.no_padding()
        # Control tokens: they add no text. Those that begin and end a tool call are not among them.
        self.special_token_ids = frozenset(
            token_id
            for token_id, token in self.backend.get_added_tokens_decoder().items()
            if token.special and token.content not in MARKERS
        )
        self._is_byte_level = is_byte_level(self.backend)
        self._bound = TokenBound(self.backend)
        self._templates = ChatTemplates(directory)
        self._control_tokens_lock = threading.Lock()
        self._control_tokens_made: ControlTokens | None = None
        self.call_format = call_format or self._templates.call_format()

    def chars_max(self, token_count: int) -> int | None:
        """The most characters that so many tokens can stand for; None if that cannot be told for this tokenizer."""
        return self._bound.chars_max(token_count)

    def check_limit(self, text: str, token_count_max: int) -> None:
        """Raises: TokenLimitExceeded if the text, by its bytes alone, has more tokens than that."""
        if (least := self._bound.least_token_count(text, token_count_max)) > token_count_max:
            raise TokenLimitExceeded(least)

    def encode(self, text: str, *, add_special_tokens: bool = True, token_count_max: int | None = None) -> tuple[int, ...]:
        """Token ids of a plain prompt, with what the model expects around it (a BOS token, say) unless told otherwise.

        Raises: TokenLimitExceeded where it is certain that there are more than `token_count_max`.
        """
        if token_count_max is not None:
            self.check_limit(text, token_count_max)
        # A batch of one: only for batches does the library leave out offsets, a quarter of the time, which nobody here asks for.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def encode_within(self, text: str, token_count_max: int) -> tuple[tuple[int, ...], bool]:
        """As `encode`, but the end of a longer text is left out; and whether it was.

        What the model expects around a text is never left out.
        """
        added_count = self.backend.num_special_tokens_to_add(is_pair=False)
        encoding = self._head(text, token_count_max)
        if is_longer := len(encoding) + added_count > token_count_max:
            encoding.truncate(max(token_count_max - added_count, 0))
        return tuple(self.backend.post_process(encoding).ids), is_longer

    def _head(self, text: str, token_count: int) -> tokenizers.Encoding:
        """As much of a text's beginning as has so many tokens, and some more; or all of it."""
        chars = HEAD_CHARS_PER_TOKEN * (token_count + HEAD_TOKENS_MORE)
        while chars < len(text):
            head = self.backend.encode(text[:chars], add_special_tokens=False)
            if len(head) > token_count + HEAD_TOKENS_MORE:
                head.truncate(token_count + 1)
                return head
            chars *= 4
        return self.backend.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence at once. For streams use `inference.text.detokenizer`."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, which may be less than a character; empty for an id that is not in the vocabulary."""
        token = self.backend.id_to_token(token_id)
        return b"" if token is None else token_bytes(token, self._is_byte_level)

    def token_id(self, text: str) -> int | None:
        """The token that is this text; None if there is none."""
        return self.backend.token_to_id(text)

    def shows_tools(self) -> bool:
        """Whether the chat template puts tools before the model."""
        return self._templates.shows_tools()

    def switches_thinking(self, *, has_tools: bool = False) -> bool:
        """Return whether the chat template has a switch for thinking."""
        return self._templates.switches_thinking(has_tools=has_tools)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
    ) -> str:
        """The conversation as the prompt text that the model was trained on. thinking: None leaves it to the template.

        Raises `ChatTemplateFailed` with the template's own words if it refuses the conversation, and if there is no template, or
        none that shows the model tools and calls where there are some.
        """
        return self._templates.render(messages, tools, add_generation_prompt=add_generation_prompt, thinking=thinking)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        token_count_max: int | None = None,
        thinking: bool | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation: control tokens where the template writes them, and nowhere else.

        The template has written the special tokens, so none are added. What a message, a call or a tool spells out is text.
        Raises `ChatTemplateFailed`; `TokenLimitExceeded` where it is certain that there are more than `token_count_max`.
        """
        hidden = [self._hidden_message(message) for message in messages]
        hidden_tools = [self._hidden_tool(tool) for tool in tools]
        rendered = self.render_chat(hidden, hidden_tools, add_generation_prompt=add_generation_prompt, thinking=thinking)
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
                self._control_tokens_made = ControlTokens(self.backend, written_markers(self.backend, renderings, sources))
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


SPACE, SPACE_MARK = " ", "▁"

NFC_CHARS_MAX = 4  # code points that NFC makes one of
PIECE_CHARS = 65_536  # looked at together: counting takes eight times their memory
WHITESPACE = frozenset(b"\t\n\v\f\r\x1c\x1d\x1e\x1f ")  # what tokens that strip may swallow, beside what is not ASCII

# Of an added token that is matched in normalized text: its own text may be longer there.
NORMALIZED_GROWTH = 3


class TokenBound:
    """The bound of one tokenizer. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._marks_spaces = False
        self._composes = False
        self._weights = self._weights_of(backend)
        self._ascii_weight_max = 0.0 if self._weights is None else float(self._weights[:128].max())
        # Of any token, in bytes; without an end where tokens swallow whitespace.
        self._longest = math.inf if self._weights is None or not self._weights.all() else 1 / float(self._weights.min())

    def chars_max(self, token_count: int) -> int | None:
        """The most characters that so many tokens can stand for; None if there is no bound."""
        if math.isinf(self._longest):
            return None
        return round(token_count * self._longest * (NFC_CHARS_MAX if self._composes else 1))

    def least_token_count(self, text: str, enough: float = math.inf) -> int:
        """The text has at least so many tokens; 0 if there is no bound. Stops as soon as there are more than enough."""
        if self._weights is None:
            return 0
        weight = 0.0
        for begin in range(0, len(text), PIECE_CHARS):
            weight += self._weight(text[begin : begin + PIECE_CHARS])
            if weight > enough:
                break
        return math.ceil(weight * (1 - 1e-9))

    def _weight(self, piece: str) -> float:
        """Of one piece of a text. Bytes are counted one by one, so the weights of pieces add up to that of the text."""
        assert self._weights is not None
        if self._marks_spaces:
            piece = piece.replace(SPACE, SPACE_MARK)
        content = np.frombuffer(piece.encode("utf-8", "surrogatepass"), np.uint8)
        counts = np.bincount(content, minlength=256)
        if not self._composes or piece.isascii():
            return float(counts @ self._weights)
        # Composing takes at most one ASCII character for each other one, and makes one character of at most four.
        others = len(piece) - int(counts[:128].sum())
        ascii_weight = float(counts[:128] @ self._weights[:128]) - others * self._ascii_weight_max
        # And the first of a piece may become one with the last of the piece before.
        return max(ascii_weight, len(piece) / NFC_CHARS_MAX / self._longest, 1.0) - 1.0

    def _weights_of(self, backend: tokenizers.Tokenizer) -> np.ndarray[Any, np.dtype[np.float64]] | None:
        """By byte; None if the tokenizer may drop a part of a text, or make one token of very much of it."""
        model = backend.model
        if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
            return None
        normalizers, pre_tokenizers = parts_of(backend.normalizer), parts_of(backend.pre_tokenizer)
        if normalizers is None or pre_tokenizers is None:
            return None
        if not all(map(self._keeps_text, normalizers)) or not all(map(self._keeps_text, pre_tokenizers)):
            return None
        vocabulary = backend.get_vocab(with_added_tokens=False)
        if any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers)):
            chars = byte_by_character()
            if not chars.keys() <= vocabulary.keys():
                return None
            tokens: Iterable[bytes] = (
                bytes(chars[char] for char in token) for token in vocabulary if all(char in chars for char in token)
            )
        elif model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
            tokens = (token.encode() for token in vocabulary)
        else:
            return None
        added = backend.get_added_tokens_decoder().values()
        longest = longest_with_each_byte([(len(token), token) for token in tokens])
        for token in added:
            content = token.content.replace(SPACE, SPACE_MARK).encode() if self._marks_spaces else token.content.encode()
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
        """Whether a step of the tokenizer leaves all of a text there; notes what it does to it otherwise."""
        match part["type"]:
            case "NFC":
                self._composes = True
            case "Replace" if part["pattern"] == {"String": SPACE} and part["content"] == SPACE_MARK:
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
    """The length of the longest token that contains each byte; 1 where there is none."""
    longest = np.ones(256, np.int64)
    missing = set(range(256))
    for length, token in sorted(tokens, reverse=True):
        if found := missing.intersection(token):
            longest[[*found]] = length
            missing -= found
            if not missing:
                break
    return longest


def parts_of(step: Any) -> list[dict[str, Any]] | None:
    """The steps of a normalizer or a pre-tokenizer as tokenizer.json has them; None for one that says nothing of itself."""
    if step is None:
        return []
    try:
        found = json.loads(step.__getstate__())
    except (AttributeError, TypeError, ValueError):
        return None
    nested = found.get("normalizers", found.get("pretokenizers"))
    return [found] if nested is None else [part for each in nested for part in flat(each)]


def flat(part: dict[str, Any]) -> list[dict[str, Any]]:
    """A step, or those of a sequence of steps."""
    nested = part.get("normalizers", part.get("pretokenizers"))
    return [part] if nested is None else [each for inner in nested for each in flat(inner)]
