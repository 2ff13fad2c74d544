"""Streaming detokenization, and the search for stop sequences.

Text that was emitted is final: the pieces joined equal the text of all ids decoded at once. So text
is held back only while a later token could change it (half an emoji) or complete a stop sequence.

Llama-like models have two families of tokenizers, with different rules for final text:
- byte-level BPE: tokens are byte strings, so text is final up to the last complete UTF-8 character;
- sentencepiece-like: tokens are text, but unknown characters are encoded as byte tokens. A run of
  byte tokens is decoded as a whole, since one invalid byte turns all of it into replacement
  characters, so a run is final when another token follows.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import tokenizers

from inference.errors import CheckpointInvalid

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
UTF_8 = codecs.getincrementaldecoder("utf-8")
_TEXT_DECODERS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


class TextDecoder:
    """Decoding tables of a tokenizer, built once per model; opens a `Detokenizer` per sequence."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special_token_ids: frozenset[int], path: str
    ) -> None:
        """Raises: CheckpointInvalid (for `path`) if the tokenizer's decoder cannot be streamed."""
        self._backend = backend
        self._special_token_ids = special_token_ids
        decoder_types = _decoder_types(backend)
        self._bytes_by_id: list[bytes | None] | None = None
        self._byte_token_ids: frozenset[int] = frozenset()
        if decoder_types == ["ByteLevel"]:
            self._bytes_by_id = _byte_level_table(backend)
        elif decoder_types and set(decoder_types) <= _TEXT_DECODERS:
            vocabulary = backend.get_vocab(with_added_tokens=True)
            self._byte_token_ids = frozenset(
                id_ for token, id_ in vocabulary.items() if _BYTE_TOKEN.fullmatch(token)
            )
        else:
            raise CheckpointInvalid(
                path, f"decoder {decoder_types or 'none'} is not supported for streaming"
            )

    def open(self, stop_sequences: Sequence[str] = ()) -> Detokenizer:
        """Open a detokenizer. stop_sequences: must not be empty strings."""
        assert all(stop_sequences), "the caller has refused empty stop sequences"
        stops = tuple(stop_sequences)
        if self._bytes_by_id is not None:
            return _ByteLevelDetokenizer(stops, self._special_token_ids, self._bytes_by_id)
        return _TextTokenDetokenizer(
            stops, self._special_token_ids, self._backend, self._byte_token_ids
        )


class TextPiece(NamedTuple):
    """Final text, and whether a stop sequence followed it."""

    text: str
    stopped: bool = False


@dataclass(slots=True, eq=False)
class Detokenizer(ABC):
    """Output text of one sequence: decoded, searched for stop sequences, held back where necessary.

    The stop sequence completed first wins, or the longer one if two end at the same character,
    however the text is split into tokens. No text follows it.
    """

    stops: tuple[str, ...]
    special_token_ids: frozenset[int]
    held: str = field(default="", init=False)  # text whose end could begin a stop sequence

    @abstractmethod
    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        """Return the text released by `token_id`. may_stop: search for stops; never False again."""

    @abstractmethod
    def finish(self) -> TextPiece:
        """Return the held-back text at the end; it may contain a stop sequence."""

    def _search(self, new_text: str) -> TextPiece:
        if not new_text:
            return TextPiece("")
        text = self.held + new_text
        start = _first_completed(text, self.stops)
        if start is not None:
            self.held = ""
            return TextPiece(text[:start], stopped=True)
        kept = _held_length(text, self.stops)
        self.held = text[len(text) - kept :]
        return TextPiece(text[: len(text) - kept])

    def _search_rest(self, new_text: str) -> TextPiece:
        piece = self._search(new_text)
        rest, self.held = ("" if piece.stopped else self.held), ""
        return TextPiece(piece.text + rest, piece.stopped)


@dataclass(slots=True, eq=False)
class GivenText(Detokenizer):
    """Text that the engine has decoded. Each message is fed, then its tokens are pushed as unknown
    ones; the last of them releases the text.
    """

    fed: str = field(default="", init=False)
    token_count: int = field(default=0, init=False)  # tokens of `fed` that are not pushed yet

    def feed(self, text: str, token_count: int) -> None:
        """Add a message. Text without tokens waits for the next one, or for the end."""
        self.fed += text
        self.token_count += token_count

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        self.token_count -= 1
        if self.token_count > 0:
            return TextPiece("")
        text, self.fed = self.fed, ""
        return self._search(text) if may_stop and self.stops else TextPiece(text)

    def finish(self) -> TextPiece:
        text, self.fed = self.fed, ""
        return self._search_rest(text) if self.stops else TextPiece(text)


class GivenTextDecoder:
    """Opens a `GivenText` per sequence."""

    def open(self, stop_sequences: Sequence[str] = ()) -> GivenText:
        """Implement `TextDecoder.open` without ids of special tokens."""
        return GivenText(tuple(stop_sequences), frozenset())


@dataclass(slots=True, eq=False)
class _ByteLevelDetokenizer(Detokenizer):
    bytes_by_id: list[bytes | None]
    decoder: codecs.IncrementalDecoder = field(
        init=False, default_factory=partial(UTF_8, errors="replace")
    )

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        if token_id in self.special_token_ids or token_id >= len(self.bytes_by_id):
            return TextPiece("")
        text = self.decoder.decode(self.bytes_by_id[token_id] or b"")
        return self._search(text) if may_stop and self.stops else TextPiece(text)

    def finish(self) -> TextPiece:
        text = self.decoder.decode(b"", final=True)
        return self._search_rest(text) if self.stops else TextPiece(text)


@dataclass(slots=True, eq=False)
class _TextTokenDetokenizer(Detokenizer):
    """Decodes pending tokens with the last final one, which determines their leading space."""

    backend: tokenizers.Tokenizer
    byte_token_ids: frozenset[int]
    # the last final token with text, if any
    context: list[int] = field(init=False, default_factory=list)
    pending: list[int] = field(init=False, default_factory=list)

    def push(self, token_id: int, *, may_stop: bool = True) -> TextPiece:
        if token_id in self.special_token_ids:
            return TextPiece("")
        self.pending.append(token_id)
        if token_id in self.byte_token_ids:
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
        text = self.backend.decode(self.context + self.pending, skip_special_tokens=False)
        self.context, self.pending = self.pending[-1:], []
        return text[len(known) :]


def _first_completed(text: str, stops: Sequence[str]) -> int | None:
    """Return the start of the stop sequence that is completed first."""
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def _held_length(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that begins a stop sequence."""
    longest = min(len(text), max(map(len, stops)) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0


def _decoder_types(backend: tokenizers.Tokenizer) -> list[str]:
    decoder = json.loads(backend.to_str()).get("decoder")
    if decoder is None:
        return []
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [str(part["type"]) for part in parts]


def _byte_level_table(backend: tokenizers.Tokenizer) -> list[bytes | None]:
    """Return the bytes of each id; an added token, outside the byte alphabet, is its own UTF-8."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = token_bytes(token, True)
    return table


def token_bytes(token: str, byte_level: bool) -> bytes:
    """Return the text bytes of a vocabulary token. byte_level: the tokenizer is byte-level BPE."""
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
    return _decoder_types(backend) == ["ByteLevel"]


@cache
def byte_by_character() -> dict[str, int]:
    return {character: byte for byte, character in _byte_alphabet().items()}


def _byte_alphabet() -> dict[int, str]:
    """Return byte-level BPE's character of each byte: itself if printable, else from U+0100 on."""
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
