"""Keeps control tokens in the hands of the chat template: what a message spells out is text, whatever it looks like.

Special tokens are found in the text of a prompt, so `<|im_end|>` typed by a user would end the user's turn. A message that contains
such text, or could complete it where it meets the template, is rendered with that text hidden behind placeholders. The prompt's
remaining special tokens are then the template's own.

Encoding keeps every border where it is: special tokens separate a text before anything else looks at it, so each of the template's
is replaced by a twin that separates in the same way, in a copy of the tokenizer that takes special tokens for text. Between two of
them, template and message are one text, merged by the same rules as ever.
"""

from __future__ import annotations

import re
import secrets
import threading

import tokenizers
from tokenizers import AddedToken

from inference.errors import ChatTemplateFailed

# Private-use characters, one per hexadecimal digit: no template and no normalizer changes them, and no tokenizer knows them.
_DIGITS = tuple(chr(0xF0000 + digit) for digit in range(16))
_DIGIT = f"[{_DIGITS[0]}-{_DIGITS[15]}]"
_NONCE_DIGITS = 32  # 128 bits, new in each process: nobody can write one of these placeholders
_INDEX_DIGITS = 6


class ControlTokens:
    """The special tokens of one tokenizer. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        special = {token_id: token for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        self._tokens = {token.content: token for token in special.values()}
        self._id_by_text = {token.content: token_id for token_id, token in special.items()}
        self._heads = {text[:end] for text in self._tokens for end in range(1, len(text))}
        self._tails = {text[start:] for text in self._tokens for start in range(1, len(text))}
        self._length_max = max(map(len, self._tokens), default=0)
        # Longest first, as the tokenizer matches. A digit in a message could be taken for part of a placeholder: hidden too.
        alternatives = [re.escape(text) for text in sorted(self._tokens, key=len, reverse=True)]
        self._special = re.compile("|".join(alternatives))
        self._hideable = re.compile("|".join([*alternatives, _DIGIT]))
        parts = self._heads | self._tails | set("".join(self._tokens))
        self._hidden = [*self._tokens, *_DIGITS, *sorted(parts - self._tokens.keys())]
        self._index_by_text = {text: index for index, text in enumerate(self._hidden)}
        self._nonce = _digits(secrets.randbits(4 * _NONCE_DIGITS), _NONCE_DIGITS)
        self._placeholder = re.compile(f"{self._nonce}({_DIGIT}{{{_INDEX_DIGITS}}})")
        self._twin_nonce = _digits(secrets.randbits(4 * _NONCE_DIGITS), _NONCE_DIGITS)
        self._lock = threading.Lock()
        self._copy: tuple[tokenizers.Tokenizer, dict[int, int]] | None = None

    def hide(self, text: str) -> str:
        """A message with placeholders for special tokens, and for parts of one at its ends. Most messages have none."""
        if not self._tokens:
            return text
        stripped = text.strip()  # templates trim
        if 0 < len(stripped) < self._length_max and any(stripped in special for special in self._tokens):
            return text.replace(stripped, self._place(stripped[0]) + stripped[1:], 1)  # all of it could be the middle of one
        text = self._hideable.sub(lambda found: self._place(found[0]), text)
        begin = len(text) - len(text.lstrip())
        for end in range(min(begin + self._length_max, len(text)), begin, -1):
            if text[begin:end] in self._tails:
                text = text[:begin] + self._place(text[begin:end]) + text[end:]
                break
        end = len(text.rstrip())
        for begin in range(max(end - self._length_max, 0), end):
            if text[begin:end] in self._heads:
                return text[:begin] + self._place(text[begin:end]) + text[end:]
        return text

    def encode(self, rendered: str) -> tuple[int, ...]:
        """Token ids of a prompt whose messages were hidden: special tokens where the template wrote them, text elsewhere.

        Raises `ChatTemplateFailed` if the template has taken a placeholder apart.
        """
        if re.search(_DIGIT, self._placeholder.sub("", rendered)):
            raise ChatTemplateFailed("the chat template cuts a message within the text of a control token")
        copy, special_id_by_twin = self._twins()
        if self._tokens:
            rendered = self._special.sub(lambda found: self._twin(found[0]), rendered)
        revealed = self._placeholder.sub(lambda found: self._hidden[_number(found[1])], rendered)
        ids = copy.encode(revealed, add_special_tokens=False).ids
        return tuple(special_id_by_twin.get(token_id, token_id) for token_id in ids)

    def _place(self, text: str) -> str:
        return self._nonce + _digits(self._index_by_text[text], _INDEX_DIGITS)

    def _twin(self, special: str) -> str:
        return self._twin_nonce + _digits(self._index_by_text[special], _INDEX_DIGITS)

    def _twins(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The copy that takes special tokens for text, and which token each twin in it stands for. Made when first needed."""
        with self._lock:
            if self._copy is None:
                copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
                copy.encode_special_tokens = True
                copy.add_tokens(
                    [
                        AddedToken(
                            self._twin(text), lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized, special=False
                        )
                        for text, token in self._tokens.items()
                    ]
                )
                id_by_twin = {token.content: token_id for token_id, token in copy.get_added_tokens_decoder().items()}
                self._copy = copy, {id_by_twin[self._twin(text)]: token_id for text, token_id in self._id_by_text.items()}
            return self._copy


def _digits(value: int, count: int) -> str:
    return "".join(_DIGITS[int(digit, 16)] for digit in f"{value:0{count}x}")


def _number(digits: str) -> int:
    return int("".join(f"{_DIGITS.index(digit):x}" for digit in digits), 16)
