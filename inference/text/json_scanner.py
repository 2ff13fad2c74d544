"""Follows one JSON object character by character: whether it can still be one, and whether it is complete."""

from __future__ import annotations

import re
from collections.abc import Callable

BLANKS = " \t\r\n"  # JSON's
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_CHARACTERS = frozenset("+-.0123456789eE")
_LITERALS = {"t": "true", "f": "false", "n": "null"}


class JsonScanner:
    """Reads one object, which begins with the first character that is given. No recursion: depth costs a list entry."""

    def __init__(self) -> None:
        self.complete = False
        self._open: list[str] = []  # the closing characters that are still to come
        self._word = ""  # of a literal: what is still to come
        self._digits: list[str] = []  # of a number, which may be as long as the output
        self._digits_left = 0  # of an escape by number
        self._is_key = False
        self._step: Callable[[str], bool] = self._begin

    def push(self, character: str) -> bool:
        """Take one more character, not after the last one; whether what was given can still be an object."""
        return self._step(character)

    def _begin(self, character: str) -> bool:
        return character == "{" and self._enter("}")

    def _enter(self, closing: str) -> bool:
        self._open.append(closing)
        self._step = self._first_key if closing == "}" else self._first_value
        return True

    def _leave(self, character: str) -> bool:
        if character != self._open[-1]:
            return False
        self._open.pop()
        self.complete = not self._open
        self._step = self._after_value
        return True

    def _first_key(self, character: str) -> bool:
        return self._leave(character) if character == "}" else self._key(character)

    def _key(self, character: str) -> bool:
        if character == '"':
            self._is_key = True
            self._step = self._string
            return True
        return character in BLANKS

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._step = self._value
            return True
        return character in BLANKS

    def _first_value(self, character: str) -> bool:
        return self._leave(character) if character == "]" else self._value(character)

    def _value(self, character: str) -> bool:
        if character in "{[":
            return self._enter("}" if character == "{" else "]")
        if character == '"':
            self._is_key = False
            self._step = self._string
        elif character in _LITERALS:
            self._word = _LITERALS[character][1:]
            self._step = self._literal
        elif character in "-0123456789":
            self._digits = [character]
            self._step = self._number
        else:
            return character in BLANKS
        return True

    def _string(self, character: str) -> bool:
        if character == '"':
            self._step = self._colon if self._is_key else self._after_value
        elif character == "\\":
            self._step = self._escape
        return character >= " "

    def _escape(self, character: str) -> bool:
        if character == "u":
            self._digits_left = 4
            self._step = self._hexadecimal
            return True
        self._step = self._string
        return character in '"\\/bfnrt'

    def _hexadecimal(self, character: str) -> bool:
        self._digits_left -= 1
        if not self._digits_left:
            self._step = self._string
        return character in "0123456789abcdefABCDEF"

    def _literal(self, character: str) -> bool:
        expected, self._word = self._word[0], self._word[1:]
        if not self._word:
            self._step = self._after_value
        return character == expected

    def _number(self, character: str) -> bool:
        if character in _NUMBER_CHARACTERS:
            self._digits.append(character)
            return True
        self._step = self._after_value
        return _NUMBER.fullmatch("".join(self._digits)) is not None and self._after_value(character)

    def _after_value(self, character: str) -> bool:
        if character == ",":
            self._step = self._key if self._open[-1] == "}" else self._value
            return True
        return character in BLANKS or self._leave(character)
