"""What was found in an output: text, and calls piece by piece, gathered until somebody takes it.

Owns the numbers and ids of calls. Knows nothing of how they are found.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # what Mistral's templates ask for, and no other minds


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of one call. index: among the calls of the output, from 0. id and name: with the first piece, and empty later."""

    index: int
    id: str
    name: str
    arguments: str


class Parsed(NamedTuple):
    """What became final: text, and pieces of calls in their order."""

    text: str
    calls: tuple[CallPiece, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A `CallPiece` in the making."""

    index: int
    id: str
    name: str
    arguments: list[str]

    def joined(self) -> CallPiece:
        return CallPiece(self.index, self.id, self.name, "".join(self.arguments))


def new_call_id() -> str:
    """An id that no other call of a conversation has."""
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))


class Findings:
    """Of one output. call_count: calls that have begun."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.call_count = 0
        self._new_id = new_id
        self._text: list[str] = []
        self._pieces: list[_Piece] = []

    def add_text(self, text: str) -> None:
        """More text."""
        self._text.append(text)

    def begin_call(self, name: str, arguments: str) -> None:
        """A new call, and what is known of its arguments."""
        self._pieces.append(_Piece(self.call_count, self._new_id(), name, [arguments]))
        self.call_count += 1

    def add_arguments(self, arguments: str) -> None:
        """More arguments of the call that has begun last."""
        if not (self._pieces and self._pieces[-1].index == self.call_count - 1):
            self._pieces.append(_Piece(self.call_count - 1, "", "", []))
        self._pieces[-1].arguments.append(arguments)

    def taken(self) -> Parsed:
        """All that was found since the last time."""
        parsed = Parsed("".join(self._text), tuple(each.joined() for each in self._pieces))
        self._text, self._pieces = [], []
        return parsed
