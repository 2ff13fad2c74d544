"""Encoding of ASCII text word by word, with a cache of words.

A byte-level BPE tokenizer splits text by a regular expression and encodes each word independently,
so the ids of a word can be looked up. The library does not do that, and follows every character's
offset through all steps: a lookup takes about a quarter of its time.

In ASCII, Unicode's character classes are known sets, normalization changes nothing, and Python's
`re` splits as the library does. Other text, long text and other tokenizers are left to the library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any

import tokenizers
from tokenizers.models import BPE

from inference.text.control_tokens import longest_of
from inference.text.text_decoder import byte_by_character

# Longer text is left to the library, which releases the GIL: it would hold up the event loop for
# over a millisecond.
TEXT_CHARS_MAX = 16_384
WORDS_MAX = 50_000  # some 10 MB; at this number the cache is cleared
WORD_CHARS_MAX = 64  # longer words are encoded each time

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Unicode properties in regular expressions of tokenizers, as parts of a set in ASCII.
ASCII_SETS = {
    "L": "A-Za-z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "Lt": "",
    "Lm": "",
    "Lo": "",
    "M": "",
    "N": "0-9",
    "Nd": "0-9",
}
PROPERTY = re.compile(r"\\p\{(\w+)\}")
# Parts that mean the same in Oniguruma and in `re`. `{1,3}+` is possessive in one of them only.
PART = re.compile(
    r"(?P<set>\[\^?(?:\\p\{\w+\}|\\[srnt/.\-]|(?!--|\|\||&&|~~)[^\[\]\\])+\])"
    r"|\\p\{\w+\}|\\[sSrnt\[\](){}.|?*+/\-]|\(\?(?:i:|:|!|=)|\{\d+(?:,\d*)?\}(?!\+)"
    r"|[)|?*+]|[^\\\[\](){}^$.|?*+]"
)


class WordCache:
    """Cache of the token ids of words, for one tokenizer. Thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend, self._model = backend, backend.model
        self._words = words_of(backend)
        self._ids: dict[str, tuple[int, ...]] = {}
        self._character_by_byte = {byte: char for char, byte in byte_by_character().items()}
        added = backend.get_added_tokens_decoder()
        self._id_by_marker = {token.content: id_ for id_, token in added.items()}
        marker = longest_of(self._id_by_marker)
        self._marker = re.compile(f"({marker})") if marker else None
        self._around = self._special_around() if self._words is not None else ((), ())

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Encode a text to the ids that the library would return. Added tokens are recognized."""
        if self._words is not None and text.isascii() and len(text) <= TEXT_CHARS_MAX:
            known, ids = self._ids, list[int]()
            for number, part in enumerate(self._marker.split(text) if self._marker else (text,)):
                if number % 2:
                    ids.append(self._id_by_marker[part])
                    continue
                words = self._words.findall(part)
                if len("".join(words)) != len(part):  # the library keeps text between words
                    break
                try:
                    ids += [*chain.from_iterable(map(known.__getitem__, words))]
                except KeyError:
                    ids += chain.from_iterable(map(self._encoded, words))
            else:
                before, after = self._around
                return (*before, *ids, *after) if add_special_tokens else tuple(ids)
        # A batch of one: only batch calls can omit offsets, which take a quarter of the time.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def _encoded(self, word: str) -> tuple[int, ...]:
        """Encode a word and cache its ids."""
        if (known := self._ids.get(word)) is not None:
            return known
        tokens = self._model.tokenize(word.translate(self._character_by_byte))
        ids = tuple([token.id for token in tokens])
        if len(word) <= WORD_CHARS_MAX:
            if len(self._ids) >= WORDS_MAX:
                self._ids.clear()
            self._ids[word] = ids
        return ids

    def _special_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Find the ids that the library adds before and after a text."""
        whole = self._backend.encode("a").ids
        own = self._backend.encode("a", add_special_tokens=False).ids
        for begin in range(len(whole) - len(own) + 1):
            if whole[begin : begin + len(own)] == own:
                return tuple(whole[:begin]), tuple(whole[begin + len(own) :])
        self._words = None  # it changes the ids of the text as well
        return (), ()


def words_of(backend: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """Build the expression that splits ASCII text into words; None for unsupported tokenizers."""
    model: Any = backend.model
    if (
        not isinstance(model, BPE)
        or model.dropout
        or model.unk_token
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
        or model.byte_fallback
    ):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(each.lstrip or each.rstrip or each.single_word or each.normalized for each in added):
        return None
    normalizers, splits = parts_of(backend.normalizer), parts_of(backend.pre_tokenizer)
    around = parts_of(backend.post_processor)
    if normalizers is None or splits is None or around is None:
        return None
    if any(step["type"] not in ("NFC", "NFKC") for step in normalizers) or any(
        step["type"] not in ("ByteLevel", "TemplateProcessing") for step in around
    ):
        return None
    return ascii_pattern(pattern_of(splits))


def pattern_of(splits: Sequence[dict[str, Any]]) -> str:
    """Find the regular expression of these pre-tokenizers; empty if they do anything else."""
    *before, last = splits or [{"type": "none"}]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return ""
    if not before:
        return GPT2_PATTERN if last["use_regex"] else ""
    split = before[0]
    if len(before) > 1 or last["use_regex"] or split["type"] != "Split":
        return ""
    if split["behavior"] != "Isolated" or split["invert"]:
        return ""
    return str(split["pattern"].get("Regex", ""))


def ascii_pattern(source: str) -> re.Pattern[str] | None:
    """Translate an expression for ASCII text from Oniguruma to `re`; None if unsupported.

    Text between its matches is a word as well.
    """
    pieces, index = list[str](), 0
    while index < len(source):
        part = PART.match(source, index)
        if part is None or any(name not in ASCII_SETS for name in PROPERTY.findall(part[0])):
            return None
        own = PROPERTY.sub(lambda found: ASCII_SETS[found[1]], part[0])
        if own != part[0] and part["set"] is None:
            own = f"[{own}]" if own else r"[^\s\S]"
        pieces.append(own)
        index = part.end()
    try:
        return re.compile("".join(pieces), re.ASCII) if pieces else None
    except re.error:  # a set without ASCII characters
        return None


def parts_of(step: Any) -> list[dict[str, Any]] | None:
    """List the steps of a normalizer or pre-tokenizer as in tokenizer.json; None if unknown."""
    if step is None:
        return []
    try:
        found = json.loads(step.__getstate__())
    except (AttributeError, TypeError, ValueError):
        return None
    return flat(found)


def flat(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Flatten a step that is a sequence of steps."""
    for name in ("normalizers", "pretokenizers", "processors"):
        if name in part:
            return [each for inner in part[name] for each in flat(inner)]
    return [part]
