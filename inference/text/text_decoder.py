"""Decoding tables of a tokenizer, and the detokenizers that it opens, one per output.

Llama-like models have two families of tokenizers, with different rules for final text:
- byte-level BPE: tokens are byte strings, so text is final up to the last complete UTF-8 character;
- sentencepiece-like: tokens are text, but unknown characters are encoded as byte tokens. A run of
  byte tokens is decoded as a whole, since one invalid byte turns all of it into replacement
  characters, so a run is final when another token follows.

Prompt and output are one sequence, as in vLLM: the first word of a sentencepiece-like output keeps
its blank, unless no text precedes it. Only a character that is torn between them is decoded apart.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import tokenizers

from inference.errors import CheckpointInvalid
from inference.text.control_tokens import longest_of
from inference.text.detokenizer import (
    MARK_FIRST,
    Detokenizer,
    GivenParts,
    GivenText,
    Stops,
    TextPiece,
)
from inference.text.reasoning import ReasoningFormat

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Each changes tokens one by one, or by whether they are the first.
_TEXT_DECODERS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"})
CHARACTER_TOKENS_MAX = 4  # parts of a character are bytes
CACHED_TOKENS_MAX = 16_384  # texts of single tokens
UTF_8 = codecs.getincrementaldecoder("utf-8")


class TextDecoder:
    """Decoding tables of a tokenizer, built once per model; opens a `Detokenizer` per sequence."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_token_ids: frozenset[int],
        path: str,
        reasoning: ReasoningFormat | None = None,
    ) -> None:
        """Build the tables. Raises CheckpointInvalid (for `path`) if text cannot be streamed."""
        self.reasoning = reasoning
        self._backend = backend
        self._special_token_ids = special_token_ids
        self._bytes_by_id: list[bytes] | None = None
        self._byte_by_id: dict[int, int] = {}  # of byte tokens
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._text_ids = frozenset(vocabulary.values()) - special_token_ids
        steps = _decoder_steps(backend)
        kinds = [str(step["type"]) for step in steps]
        # After Fuse, all text is one token, whose beginning alone may change.
        fused = steps[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
        cuts_ends = any(step["type"] == "Strip" and step["stop"] for step in steps)
        self._depth = max([1, *(step["start"] for step in fused if step["type"] == "Strip")])
        if kinds == ["ByteLevel"]:
            self._bytes_by_id = _byte_level_table(vocabulary)
        elif (
            kinds
            and set(kinds) <= _TEXT_DECODERS
            and not cuts_ends
            and all(map(_keeps_pieces, fused))
        ):
            self._byte_by_id = {
                id_: int(token[3:5], 16)
                for token, id_ in vocabulary.items()
                if "ByteFallback" in kinds
                and _BYTE_TOKEN.fullmatch(token)
                and id_ in self._text_ids
            }
        else:
            raise CheckpointInvalid(
                path, f"decoder {kinds or 'none'} is not supported for streaming"
            )
        # A token that stands for text of byte tokens, whatever it is.
        letters = (id_ for id_, byte in self._byte_by_id.items() if byte == ord("a"))
        self._letter = [*letters][:1] * self._depth
        contents = {backend.id_to_token(id_): id_ for id_ in special_token_ids}
        self._control_ids = {content: id_ for content, id_ in contents.items() if content}
        self._control = re.compile(longest_of(self._control_ids)) if self._control_ids else None
        self.token_text: Callable[[int, bool], str | None]
        self.token_text = lru_cache(maxsize=CACHED_TOKENS_MAX)(self._token_text)

    def open(
        self,
        stop_sequences: Sequence[str] = (),
        prompt_token_ids: Sequence[int] = (),
        *,
        splits: bool = False,
        begun: bool | None = None,
        marked_functions: tuple[str, ...] = (),
    ) -> Detokenizer:
        """Open a detokenizer of the output that follows a prompt.

        `stop_sequences` must not be empty strings; one that names control tokens also matches the
        tokens themselves. With `splits`, the output is split into thinking and answer if the
        model's format is known. `begun` tells whether the prompt opened thinking that the output
        continues; None to search the prompt. For `marked_functions` see `GenerationRequest`.
        """
        assert all(stop_sequences), "the caller has refused empty stop sequences"
        stops, marks = self._marked(stop_sequences) if stop_sequences else ({}, {})
        reasoning = self.reasoning if splits else None
        searched = stops if reasoning is None else {}  # otherwise only the answer is searched
        opened: Detokenizer
        if self._bytes_by_id is not None:
            opened = ByteLevelDetokenizer(searched, self._special_token_ids, self._bytes_by_id)
        else:
            opened = TextTokenDetokenizer(
                searched,
                self._special_token_ids,
                self._backend,
                self._text_ids,
                self._byte_by_id,
                self._depth,
            )
            opened.context = self._context(prompt_token_ids)
        opened.marks = marks
        opened.is_torn = bool(stops) and self._ends_torn(prompt_token_ids)
        if reasoning is None:
            return opened
        begun = reasoning.opens(prompt_token_ids) if begun is None else begun
        split = reasoning.split(opened, stops, begun=begun, has_ids=True)
        split.marked_functions = marked_functions
        return split

    def control_token_in(self, text: str) -> str | None:
        """Find a control token that a text names; None if it does not name any."""
        found = None if self._control is None else self._control.search(text)
        return None if found is None else found[0]

    def text_of(self, prompt_token_ids: Sequence[int]) -> str:
        """Decode a prompt, leaving out control tokens."""
        ids = [id_ for id_ in prompt_token_ids if id_ in self._text_ids]
        return self._backend.decode(ids, skip_special_tokens=False)

    def _token_text(self, token_id: int, follows: bool) -> str | None:
        """Decode one token: empty for control tokens, None for a part of a character.

        `follows` tells whether text precedes the token.
        """
        if token_id not in self._text_ids:
            return ""
        try:
            if self._bytes_by_id is not None:
                return self._bytes_by_id[token_id].decode()
            if (byte := self.byte_token(token_id)) is not None:
                text = byte.decode()
                if follows:
                    return text
        except UnicodeDecodeError:
            return None
        alone = self._backend.decode([token_id], skip_special_tokens=False)
        if not follows:
            return alone
        return self._backend.decode([token_id] * 2, skip_special_tokens=False)[len(alone) :]

    def spans(self, prompt_token_ids: Sequence[int] = ()) -> TokenSpans:
        """Open the spans of the tokens that follow a prompt; add the tokens one by one."""
        return TokenSpans(
            self,
            self.open((), prompt_token_ids),
            follows=any(map(self.has_text, prompt_token_ids)),
        )

    def has_text(self, token_id: int) -> bool:
        """Return whether a token is part of the text, even if it does not add any."""
        return token_id in self._text_ids

    def byte_token(self, token_id: int) -> bytes | None:
        """Decode a byte token to its byte; None for other tokens."""
        byte = self._byte_by_id.get(token_id)
        return None if byte is None else bytes((byte,))

    def _marked(self, stops: Sequence[str]) -> tuple[Stops, dict[int, str]]:
        """Replace control tokens in stop sequences by marks; return them, and the marks by id."""
        marks: dict[int, str] = {}
        if self._control is None:
            return as_given(stops), marks

        def mark(found: re.Match[str]) -> str:
            token_id = self._control_ids[found[0]]
            return marks.setdefault(token_id, chr(MARK_FIRST + len(marks)))

        marked = {self._control.sub(mark, stop): stop for stop in stops}
        return marked | as_given(stops), marks

    def _ends_torn(self, prompt_token_ids: Sequence[int]) -> bool:
        tail = list(prompt_token_ids[-CHARACTER_TOKENS_MAX:])
        return self._backend.decode(tail, skip_special_tokens=False).endswith("\ufffd")

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Select the last tokens with text. Byte tokens are left out: their run would go on."""
        ids: list[int] = []
        has_bytes = False
        for token_id in reversed(prompt_token_ids):
            if token_id in self._byte_by_id:
                has_bytes = True
            elif token_id in self._text_ids:
                ids.append(token_id)
                if len(ids) == self._depth:
                    break
        return ids[::-1] or self._letter * has_bytes


@dataclass(slots=True, eq=False)
class ByteLevelDetokenizer(Detokenizer):
    bytes_by_id: list[bytes]
    decoder: codecs.IncrementalDecoder = field(
        init=False, default_factory=partial(UTF_8, errors="replace")
    )

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        if token_id in self.special_token_ids or token_id >= len(self.bytes_by_id):
            return self._search(self._mark(token_id, may_stop))
        text = self.decoder.decode(self.bytes_by_id[token_id])
        return self._search(text) if may_stop and self.stops else TextPiece(text)

    def push_all(self, token_ids: Sequence[int]) -> str | None:
        table = self.bytes_by_id
        if self.stops or max(token_ids, default=0) >= len(table):
            return None
        if not self.special_token_ids.isdisjoint(token_ids):
            return None
        return self.decoder.decode(b"".join(map(table.__getitem__, token_ids)))

    def finish(self) -> TextPiece:
        text = self.decoder.decode(b"", final=True)
        return self._search_rest(text) if self.stops else TextPiece(text)


@dataclass(slots=True, eq=False)
class TextTokenDetokenizer(Detokenizer):
    """Detokenizer that decodes pending tokens after the last final one, for their leading space."""

    backend: tokenizers.Tokenizer
    text_ids: frozenset[int]
    byte_by_id: Mapping[int, int]
    depth: int  # tokens that determine the text of the next one
    # the last final tokens with text, if any
    context: list[int] = field(init=False, default_factory=list)
    pending: list[int] = field(init=False, default_factory=list)

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        if token_id not in self.text_ids:
            mark = self._mark(token_id, may_stop)
            return self._search(self._emit() + mark) if mark else TextPiece("")
        self.pending.append(token_id)
        if token_id in self.byte_by_id:
            return TextPiece("")
        text = self._emit()
        return self._search(text) if may_stop and self.stops else TextPiece(text)

    def finish(self) -> TextPiece:
        text = self._emit()
        return self._search_rest(text) if self.stops else TextPiece(text)

    def _emit(self) -> str:
        if not self.pending:
            return ""
        # Control tokens are filtered out before; a special token here counts as text.
        known = self.backend.decode(self.context, skip_special_tokens=False) if self.context else ""
        both = self.context + self.pending
        text = self.backend.decode(both, skip_special_tokens=False)
        self.context, self.pending = both[-self.depth :], []
        return text[len(known) :]


class GivenTextDecoder:
    """Factory of a `GivenParts` per sequence, for engines that decode their output."""

    def __init__(self, reasoning: ReasoningFormat | None = None) -> None:
        self.reasoning = reasoning

    def open(
        self,
        stop_sequences: Sequence[str] = (),
        prompt_token_ids: Sequence[int] = (),
        *,
        splits: bool = False,
        begun: bool | None = None,
        marked_functions: tuple[str, ...] = (),
    ) -> Detokenizer:
        """Implement `TextDecoder.open` without ids of special tokens."""
        stops = as_given(stop_sequences)
        if self.reasoning is None or not splits:
            return GivenParts({}, frozenset(), GivenText(stops, frozenset()))
        begun = self.reasoning.opens(prompt_token_ids) if begun is None else begun
        given = GivenText({}, frozenset())
        split = self.reasoning.split(given, stops, begun=begun, has_ids=False)
        return GivenParts({}, frozenset(), split)


class TokenSpan(NamedTuple):
    """Part of a text that a token adds, in code points from its start.

    `text` is empty for a control token and for a part of a character; the last part adds the
    character. `follows` tells whether text precedes the token.
    """

    text: str
    offset: int
    follows: bool


class TokenSpans:
    """Mapping of consecutive tokens to spans of the text that a `Detokenizer` releases for them."""

    def __init__(self, decoder: TextDecoder, detokenizer: Detokenizer, *, follows: bool) -> None:
        """Use `TextDecoder.spans` to create the spans."""
        self._decoder = decoder
        self._detokenizer = detokenizer
        self._follows = follows
        self._char_count = 0
        self._run = UTF_8(errors="replace")  # of byte tokens that are not released yet
        self._held_char_count = 0

    def add(self, token_id: int) -> TokenSpan:
        """Decode the next token and return its span."""
        follows, released = self._follows, self._detokenizer.push(token_id).text
        if (byte := self._decoder.byte_token(token_id)) is None:
            text = self._added(released)
        else:
            text = self._run.decode(byte)
            if not follows:  # a blank at the beginning may be dropped
                text = text and (self._decoder.token_text(token_id, False) or "")
            self._held_char_count += len(text)
        self._follows = follows or self._decoder.has_text(token_id)
        self._char_count += len(text)
        return TokenSpan(text, self._char_count - len(text), follows)

    def finish(self) -> str:
        """Return the text that the end of the sequence adds, for a torn character."""
        return self._added(self._detokenizer.finish().text)

    def _added(self, released: str) -> str:
        """Cut off the text of byte tokens whose spans were returned before."""
        if released:
            released = released[self._held_char_count :]
            self._held_char_count = 0
            self._run.reset()
        return released


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(backend.to_str()).get("decoder")
    if decoder is None:
        return []
    steps: list[dict[str, Any]] = (
        decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    )
    return steps


def _keeps_pieces(step: Mapping[str, Any]) -> bool:
    """Return whether a decoder step, run on all text at once, leaves earlier text final."""
    is_per_character = len(step.get("pattern", {}).get("String", "")) == 1
    return bool(step["type"] in ("Fuse", "Strip") or is_per_character)


def _byte_level_table(vocabulary: Mapping[str, int]) -> list[bytes]:
    """Build a table of bytes by id. An added token outside the byte alphabet is its own UTF-8."""
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = token_bytes(token, True)
    return table


def token_bytes(token: str, byte_level: bool) -> bytes:
    """Convert a vocabulary token to bytes. `byte_level` is for byte-level BPE tokenizers."""
    if byte_level:
        bytes_by_character = byte_by_character()
        known = all(character in bytes_by_character for character in token)
        return (
            bytes(bytes_by_character[character] for character in token) if known else token.encode()
        )
    if _BYTE_TOKEN.fullmatch(token):
        return bytes((int(token[3:5], 16),))
    return token.replace("\u2581", " ").encode()


def is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Return whether the tokenizer is byte-level BPE."""
    return [step["type"] for step in _decoder_steps(backend)] == ["ByteLevel"]


@cache
def byte_by_character() -> dict[str, int]:
    return {character: byte for byte, character in _byte_alphabet().items()}


def _byte_alphabet() -> dict[int, str]:
    """Map each byte to byte-level BPE's character: itself if printable, else from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in alphabet:
            alphabet[byte] = chr(256 + len(alphabet) - len(printable))
    return alphabet


def as_given(stops: Sequence[str]) -> dict[str, str]:
    """Map stop sequences to themselves: the text is searched for them as the request has them."""
    return {stop: stop for stop in stops}
