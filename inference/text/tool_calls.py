"""Tool calls in a model's output, found as the text arrives: the readers, what they have found, and the JSON that they follow."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from inference.text.tools import CALL_SHAPES, CallFormat

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


HELD_CHARS_MAX = 16_384  # of what is neither text nor call yet: beyond it it is text, whatever follows

# What an object may have, and what it means. The last two are what some models write beside, and are read over.
KEYS: Mapping[str, str] = {"name": "name", "arguments": "arguments", "parameters": "arguments", "id": "id", "type": "type"}
State = Callable[[str], None]


def _behind_blanks(held: str, marker: str) -> str:
    """What is held of a marker behind any number of blanks, which are not looked at again for each character."""
    return held[-max(len(marker), 1) :].lstrip(BLANKS)


class ToolCallParser:
    """One output of one request. complete_count: calls whose arguments are whole."""

    def __init__(
        self, form: CallFormat, names: Collection[str], new_id: Callable[[], str] = new_call_id, *, single: bool = False
    ) -> None:
        """names: of the tools; other names are no calls. single: behind the first call there is nothing but text."""
        self.complete_count = 0
        self._shape = CALL_SHAPES[form]
        self._names = frozenset(names)
        self._single = single
        self._found = Findings(new_id)
        self._held = ""  # was read, and is neither text nor call yet; in a call that has begun: what is neither argument nor text
        self._word = ""  # a key or a name as far as it was read
        self._is_list = False
        self._seen: set[str] = set()  # keys of the object that is read
        self._name: str | None = None  # of the call that is read
        self._early = ""  # its arguments, if they stand before its name
        self._has_begun = False  # whether what is read belongs to a call that was given out
        self._scanner = JsonScanner()
        self._between = self._fresh if self._shape.bare else self._outside
        self._state: State = self._between

    @property
    def call_count(self) -> int:
        return self._found.call_count

    def push(self, text: str) -> Parsed:
        """Take more of the output; what became final."""
        place = 0
        while place < len(text):
            place = self._skip_plain(text, place)
            if place < len(text):
                self._state(text[place])
                place += 1
            if len(self._held) > HELD_CHARS_MAX:
                self._found.add_text(self._held)
                self._held = ""
                self._leave(self._outside)
        return self._found.taken()

    def finish(self) -> Parsed:
        """The rest, at the end; nothing may be pushed afterwards."""
        held, self._held = self._held, ""
        if self._state == self._broken:
            self._found.add_arguments(held)
        elif not self._shape.textless and not self._has_begun and (held.strip(BLANKS) or not self.call_count):
            self._found.add_text(held)
        return self._found.taken()

    def _skip_plain(self, text: str, place: int) -> int:
        """Take plain text at once up to where a call may begin: the same as character by character, in a fraction of the time."""
        if self._held or self._state != self._outside:
            return place
        found = text.find(self._shape.opening[0], place) if self._shape.opening else -1
        plain = text[place : len(text) if found < 0 else found].rstrip(BLANKS)
        self._found.add_text(plain)
        return place + len(plain)

    def _again(self, character: str) -> None:
        """Look once more, in the present state, at what was held, and at one character more."""
        held, self._held = self._held, ""
        for each in held + character:
            self._state(each)

    def _go(self, character: str, wanted: str, state: State) -> None:
        """Take the one character that may come here but for blanks."""
        if character == wanted:
            self._state = state
        elif character not in BLANKS:
            self._fail(character)
            return
        self._held += character

    def _fail(self, character: str) -> None:
        """It is no call: what was held is text. Behind a call that has begun it is what follows it, an opening perhaps."""
        if self._has_begun and self._shape.closing:
            self._state = self._closing
        elif self._has_begun:
            self._leave(self._outside)
        else:
            self._found.add_text(self._held)
            self._held = ""
            self._state = self._outside
        self._again(character)

    def _leave(self, state: State) -> None:
        self._has_begun = self._is_list = False
        self._state = state

    # Outside of calls.

    def _fresh(self, character: str) -> None:
        """Where a call may stand without an opening: at the beginning, or behind another one."""
        if character in "{[":
            self._state = self._opened
            self._opened(character)
        elif character in BLANKS or (character == ";" and self.call_count and ";" not in self._held):
            self._held += character
        else:
            self._state = self._outside
            self._again(character)

    def _outside(self, character: str) -> None:
        """In text. Blanks, and what may be the beginning of an opening, are held."""
        opening, held = self._shape.opening, self._held + character
        part = _behind_blanks(held, opening)
        if opening.startswith(part):
            self._held = held
            if part and part == opening:
                self._state = self._opened
            return
        self._found.add_text(held[: len(held) - len(part)])
        while not opening.startswith(part.lstrip(BLANKS)):
            self._found.add_text(part[0])
            part = part[1:]
        self._held = part

    # From an opening to an object.

    def _opened(self, character: str) -> None:
        if character == "[" and not self._is_list:
            self._held += character
            self._is_list = True
        else:
            self._next_object(character)

    def _next_object(self, character: str) -> None:
        if self._single and self.call_count:
            self._fail(character)
            return
        self._go(character, "{", self._first_key)
        if self._state == self._first_key:
            self._seen, self._name, self._early, self._has_begun = set(), None, "", False

    # In an object.

    def _first_key(self, character: str) -> None:
        if character == "}":
            self._end_object(character)
        else:
            self._key(character)

    def _key(self, character: str) -> None:
        self._word = ""
        self._go(character, '"', self._in_key)

    def _in_key(self, character: str) -> None:
        word = self._word + character
        if character == '"' and self._word in KEYS:
            self._seen.add(KEYS[self._word])
            self._state = self._colon
        elif not any(key.startswith(word) and meaning not in self._seen for key, meaning in KEYS.items()):
            self._fail(character)
            return
        else:
            self._word = word
        self._held += character

    def _colon(self, character: str) -> None:
        meaning = KEYS[self._word]
        states = {"name": self._before_name, "arguments": self._before_arguments}
        self._go(character, ":", states.get(meaning, self._before_aside))

    def _before_name(self, character: str) -> None:
        self._word = ""
        self._go(character, '"', self._in_name)

    def _in_name(self, character: str) -> None:
        self._word += character
        if character == '"' and self._word[:-1] in self._names:
            self._held += character
            self._name = self._word[:-1]
            self._state = self._after_value
            if self._early:
                self._begin_call(self._early)
                self.complete_count += 1
        elif any(name.startswith(self._word) for name in self._names):
            self._held += character
        else:
            self._fail(character)

    def _before_aside(self, character: str) -> None:
        self._go(character, '"', self._in_aside)

    def _in_aside(self, character: str) -> None:
        if character in "<[{\\" or character < " ":  # what an id has not, and what may begin a call
            self._fail(character)
            return
        self._held += character
        if character == '"':
            self._state = self._after_value

    def _before_arguments(self, character: str) -> None:
        if character != "{":
            self._go(character, "{", self._in_arguments)
            return
        self._scanner = JsonScanner()
        self._state = self._in_arguments
        if self._name is not None:
            self._begin_call("")
        self._in_arguments(character)

    def _in_arguments(self, character: str) -> None:
        right = self._scanner.push(character)
        if self._has_begun:
            if not right:
                self._state = self._broken
                self._broken(character)
                return
            self._found.add_arguments(character)
        elif right:
            self._held += character
            self._early += character
        else:
            self._fail(character)
            return
        if self._scanner.complete:
            self.complete_count += self._has_begun
            self._state = self._after_value

    def _after_value(self, character: str) -> None:
        if character == "}":
            self._end_object(character)
        else:
            self._go(character, ",", self._key)

    def _end_object(self, character: str) -> None:
        if self._name is None:
            self._fail(character)
            return
        if not self._has_begun:
            self._begin_call("{}")
            self.complete_count += 1
        self._held = ""
        if self._is_list:
            self._state = self._after_object
        else:
            self._close()

    def _begin_call(self, arguments: str) -> None:
        assert self._name is not None, "a call has a name"
        self._has_begun = True
        self._held = ""
        self._found.begin_call(self._name, arguments)

    def _broken(self, character: str) -> None:
        """Arguments that are no JSON: all up to the closing, and where there is none to the end."""
        closing, held = self._shape.closing, self._held + character
        while held and not closing.startswith(held):
            self._found.add_arguments(held[0])
            held = held[1:]
        self._held = held
        if held and held == closing:
            self._held = ""
            self._leave(self._between)

    # Behind an object.

    def _after_object(self, character: str) -> None:
        if character == "]":
            self._held = ""
            self._close()
        else:
            self._go(character, ",", self._next_object)

    def _close(self) -> None:
        if self._shape.closing:
            self._state = self._closing
        else:
            self._leave(self._between)

    def _closing(self, character: str) -> None:
        held = self._held + character
        part = _behind_blanks(held, self._shape.closing)
        if not self._shape.closing.startswith(part):
            self._leave(self._between)
            self._again(character)
        elif part == self._shape.closing:
            self._held = ""
            self._leave(self._between)
        else:
            self._held = held
