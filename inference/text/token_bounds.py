"""Lower bound of the number of tokens that a text encodes to, found without encoding it.

Each byte of a text gets the weight 1/n, where n is the length of the longest token that contains the byte. A token of m bytes then
weighs at most 1, so a text has at least as many tokens as its bytes weigh. That holds for tokenizers that encode every byte of
the text and change it in no way but the ones below; for all others there is no bound.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import tokenizers
from tokenizers.models import BPE

from inference.text.detokenizer import byte_by_character

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
