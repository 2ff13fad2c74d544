"""Encoding of conversations, so that only the chat template writes control tokens.

A tokenizer finds its added tokens in the text of a prompt, so `<|im_end|>` typed by a user would
end the user's turn. A message that contains such text, or could complete it where it meets the
template, is rendered with that text hidden behind placeholders. What then looks like a control
token in the rendered prompt was written by the template.

Markers are the special tokens, and the other added tokens that the template writes
(`written_markers`): several checkpoints ship their role markers without the flag `special`.

The tokenizer may also find a marker in text that does not spell it: a normalizer that folds width
or case, or a model whose own vocabulary holds the marker, makes it from other characters. So the
ids are compared with the markers that the prompt spells. If they differ, the prompt is encoded with
a copy of the tokenizer that knows no markers, only their twins: unguessable tokens that replace the
template's markers and separate the text as those do. Between two of them, template and message are
one text, merged by the same rules.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from inference.errors import ChatTemplateFailed

# Private-use characters, one per hexadecimal digit: unknown to tokenizers and unchanged by
# templates and normalizers.
_DIGITS = tuple(chr(0xF0000 + digit) for digit in range(16))
_DIGIT = f"[{_DIGITS[0]}-{_DIGITS[15]}]"
_NONCE_DIGITS = 32  # 128 random bits per process, so that placeholders cannot be guessed
_INDEX_DIGITS = 6
_NEVER = "(?!)"  # matches nothing


# Markers that clients send back in assistant turns, as part of an earlier answer. Templates look
# for them there to leave earlier reasoning out of the prompt.
THINKING_MARKERS = ("<think>", "</think>")
# minimum length of a marker not flagged special: shorter ones are runs of spaces
PLAIN_MARKER_CHARS_MIN = 3
_THINKING = re.compile(f"({'|'.join(map(re.escape, THINKING_MARKERS))})")


def markers_of(backend: tokenizers.Tokenizer) -> dict[int, AddedToken]:
    """Find the added tokens that templates write as marks, by id: several are not special."""
    return {
        id_: token
        for id_, token in backend.get_added_tokens_decoder().items()
        if token.special or len(token.content.strip(" \t\r\n▁")) >= PLAIN_MARKER_CHARS_MIN
    }


def written_markers(
    backend: tokenizers.Tokenizer, renderings: Iterable[str], sources: Iterable[str]
) -> dict[str, int]:
    """Find the added tokens that a chat template writes; return their ids by text.

    `renderings` are placeholder conversations rendered by the template, `sources` its code and
    named tokens. An added token whose text is in a source counts as written, as do the markers
    around reasoning.
    """
    added = markers_of(backend)
    written = {
        token.content: id_
        for id_, token in added.items()
        if token.content in THINKING_MARKERS or any(token.content in source for source in sources)
    }
    for rendering in renderings:
        encoding = backend.encode(rendering, add_special_tokens=False)
        for id_, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if id_ in added and (text := rendering[start:end].strip()):
                written[text] = id_
    return written


class ControlTokens:
    """Encoder that lets only the chat template write a tokenizer's control tokens. Thread-safe."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        written: Mapping[str, int] | None = None,
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        """`written` are the template's markers from `written_markers`, besides special tokens.

        `encode` converts a text with markers to ids; None for the tokenizer itself.
        """
        self._backend = backend
        self._encode_text = encode or partial(_encoded, backend)
        added = backend.get_added_tokens_decoder()
        self._id_by_text = {
            token.content: id_ for id_, token in added.items() if token.special
        } | dict(written or {})
        self._tokens = {text: added[id_] for text, id_ in self._id_by_text.items()}
        unknown = _unknown_id(backend)
        # Models emit the unknown token for unknown characters, so it is not a marker.
        self._marker_ids = frozenset(self._id_by_text.values()) - {unknown}
        heads = {text[:end] for text in self._tokens for end in range(1, len(text))}
        tails = {text[start:] for text in self._tokens for start in range(1, len(text))}
        # The longest head at the end of a text is searched in the reversed text.
        self._reversed_head = re.compile(longest_of(head[::-1] for head in heads) or _NEVER)
        self._tail = re.compile(longest_of(tails) or _NEVER)
        self._all_markers = "\n".join(self._tokens)
        self._length_max = max(map(len, self._tokens), default=0)
        marker = longest_of(self._tokens)
        self._marker = re.compile(marker)
        # A digit in a message could complete a placeholder, so digits are hidden too.
        self._hideable = re.compile(f"{marker}|{_DIGIT}" if marker else _DIGIT)
        parts = heads | tails | set("".join(self._tokens))
        self._hidden = [*self._tokens, *_DIGITS, *sorted(parts - self._tokens.keys())]
        self._index_by_text = {text: index for index, text in enumerate(self._hidden)}
        self._nonce = _digits(secrets.randbits(4 * _NONCE_DIGITS), _NONCE_DIGITS)
        self._placeholder = re.compile(f"{self._nonce}({_DIGIT}{{{_INDEX_DIGITS}}})")
        self._escaped = [
            (escape, re.compile(f"{re.escape(escape(self._nonce))}({_escaped_digits(escape)})"))
            for escape in _ESCAPES
        ]
        self._twin_nonce = _digits(secrets.randbits(4 * _NONCE_DIGITS), _NONCE_DIGITS)
        self._lock = threading.Lock()
        self._copy: tuple[tokenizers.Tokenizer, dict[int, int]] | None = None

    def hide_answer(self, text: str) -> str:
        """Hide an assistant turn like `hide`, but leave the markers around reasoning.

        Templates that drop reasoning split the text at these markers, so each part is hidden
        separately.
        """
        if "think>" not in text:
            return self.hide(text)
        return "".join(
            part if part in THINKING_MARKERS else self.hide(part) for part in _THINKING.split(text)
        )

    def hide(self, text: str) -> str:
        """Replace special tokens in a message, and parts of them at its ends, by placeholders."""
        if not self._tokens:
            return text
        stripped = text.strip()  # templates strip messages
        if 0 < len(stripped) < self._length_max and stripped in self._all_markers:
            # the whole text could be the middle of a marker
            return text.replace(stripped, self._insert(stripped[0]) + stripped[1:], 1)
        text = self._hideable.sub(lambda found: self._insert(found[0]), text)
        begin = len(text) - len(text.lstrip())
        if (tail := self._tail.match(text, begin)) is not None:
            text = text[:begin] + self._insert(tail[0]) + text[tail.end() :]
        end = len(text.rstrip())
        ending = text[max(end - self._length_max, 0) : end][::-1]
        if (head := self._reversed_head.match(ending)) is not None:
            begin = end - head.end()
            return text[:begin] + self._insert(text[begin:end]) + text[end:]
        return text

    def revealed(self, rendered: str) -> str:
        """Replace the placeholders in a rendered prompt by their text, escaped where the template
        escapes.
        """
        for escape, pattern in self._escaped:
            rendered = pattern.sub(partial(self._revealed_escaped, escape), rendered)
        return self._placeholder.sub(lambda found: self._hidden[_number(found[1])], rendered)

    def encode(self, rendered: str, *, hidden: bool = True) -> tuple[int, ...]:
        """Encode a rendered prompt whose messages were hidden.

        `hidden` tells whether the prompt may contain placeholders. Raises ChatTemplateFailed if the
        template split a placeholder, or if a message encodes to a marker.
        """
        if not hidden:
            ids = self._encode_text(rendered)
            if self._markers_in(ids) == self._spelled_markers(rendered):
                return tuple(ids)
        return self._encode_apart(rendered)

    def _markers_in(self, ids: Iterable[int]) -> list[int]:
        return list(filter(self._marker_ids.__contains__, ids))

    def _spelled_markers(self, rendered: str) -> list[int]:
        if not self._tokens:
            return []
        return self._markers_in([self._id_by_text[text] for text in self._marker.findall(rendered)])

    def _encode_apart(self, rendered: str) -> tuple[int, ...]:
        """Encode with a copy of the tokenizer that recognizes no markers in text."""
        if re.search(_DIGIT, self._placeholder.sub("", rendered)):
            raise ChatTemplateFailed(
                "the chat template cuts a message within the text of a control token: remove that"
                " token from your messages"
            )
        copy, marker_id_by_twin = self._twins()
        if self._tokens:
            rendered = self._marker.sub(lambda found: self._twin(found[0]), rendered)
        ids = _encoded(copy, self.revealed(rendered))
        if forged := self._markers_in(ids):
            token = self._backend.id_to_token(forged[0])
            raise ChatTemplateFailed(
                "a message contains text that this model's tokenizer encodes as its control token"
                f" {token!r}: remove that text"
            )
        return tuple(marker_id_by_twin.get(token_id, token_id) for token_id in ids)

    def _revealed_escaped(self, escape: Callable[[str], str], found: re.Match[str]) -> str:
        digits = found[1]
        for digit in _DIGITS:
            digits = digits.replace(escape(digit), digit)
        return escape(self._hidden[_number(digits)])

    def _insert(self, text: str) -> str:
        return self._nonce + _digits(self._index_by_text[text], _INDEX_DIGITS)

    def _twin(self, special: str) -> str:
        return self._twin_nonce + _digits(self._index_by_text[special], _INDEX_DIGITS)

    def _twins(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """Build the copy that treats markers as text, and map its twins to the markers."""
        with self._lock:
            if self._copy is None:
                copy = tokenizers.Tokenizer.from_str(
                    _with_special(self._backend, self._id_by_text.values())
                )
                copy.encode_special_tokens = True
                copy.add_tokens(
                    [
                        AddedToken(
                            self._twin(text),
                            lstrip=token.lstrip,
                            rstrip=token.rstrip,
                            normalized=token.normalized,
                            special=False,
                        )
                        for text, token in self._tokens.items()
                    ]
                )
                id_by_twin = {
                    token.content: token_id
                    for token_id, token in copy.get_added_tokens_decoder().items()
                }
                self._copy = (
                    copy,
                    {
                        id_by_twin[self._twin(text)]: token_id
                        for text, token_id in self._id_by_text.items()
                    },
                )
            return self._copy


def _encoded(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    # A batch of one: only batch calls can omit offsets, which take a quarter of the time.
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
    return encoding.ids


def longest_of(texts: Iterable[str]) -> str:
    """Build a regular expression that matches the longest of the texts, as the tokenizer does.

    Common prefixes are shared: an alternation of hundreds of markers would try each of them at
    every `<`.
    """
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern(root)


def _pattern(node: Mapping[str, Any]) -> str:
    branches = [
        re.escape(character) + _pattern(child) for character, child in node.items() if character
    ]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return f"{pattern}?" if "" in node else pattern


def _with_special(backend: tokenizers.Tokenizer, ids: Iterable[int]) -> str:
    """Flag these tokens as special in the tokenizer's JSON, so that encoding can ignore them."""
    raw = json.loads(backend.to_str())
    flagged = frozenset(ids)
    for entry in raw.get("added_tokens", ()):
        entry["special"] = entry["special"] or entry["id"] in flagged
    return json.dumps(raw)


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    """Look up the id of the model's unknown token; None if it has none."""
    unknown = getattr(backend.model, "unk_token", None)
    if isinstance(unknown, str):
        return backend.token_to_id(unknown)
    if isinstance(backend.model, models.Unigram):  # the class has no such attribute
        unknown = json.loads(backend.to_str())["model"].get("unk_id")
    return unknown if isinstance(unknown, int) else None


def _as_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _as_python(text: str) -> str:
    return repr(text)[1:-1]


_ESCAPES = (_as_json, _as_python)  # with which templates print arguments and tools


def _escaped_digits(escape: Callable[[str], str]) -> str:
    """Build a regular expression that matches the escaped index of a placeholder."""
    digit = "|".join(re.escape(escape(each)) for each in _DIGITS)
    return f"(?:{digit}){{{_INDEX_DIGITS}}}"


def _digits(value: int, count: int) -> str:
    return "".join(_DIGITS[int(digit, 16)] for digit in f"{value:0{count}x}")


def _number(digits: str) -> int:
    return int("".join(f"{_DIGITS.index(digit):x}" for digit in digits), 16)
