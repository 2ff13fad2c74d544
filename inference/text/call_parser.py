"""Streaming parser that finds the tool calls in an output, character by character."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from inference.text.tools import CALL_SHAPES, WITHOUT_MARKS, CallFormat

BLANKS = " \t\r\n"  # as defined by JSON
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARACTERS = frozenset("+-.0123456789Eaeflnrstu")
_VALUE_STARTS = '{["-0123456789tfn'
ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # required by Mistral's templates, accepted by all
HELD_CHARS_MAX = 16_384  # characters held back as undecided, beyond which they become text
NAME_CHARS_MAX = 128  # of a function that was not offered
# Keys of a call object and their meaning. Some models write "id" and "type", which are ignored.
# Behind an opening all other keys are, too.
KEYS: Mapping[str, str] = {
    "name": "name",
    "function": "name",
    "arguments": "arguments",
    "parameters": "arguments",
    "id": "id",
    "type": "type",
}
State = Callable[[str], None]


class JsonScanner:
    """Streaming scanner of one JSON object, from its first character. Not recursive."""

    def __init__(self) -> None:
        self.complete = False
        self._open: list[str] = []  # closing characters still expected
        self._expected = "{"  # characters that may come next, beside blanks within the object
        self._is_string = False
        self._escape = ""  # the current escape in a string, as read so far
        # The current number or literal, which may be as long as the output.
        self._scalar: list[str] = []

    @property
    def is_between(self) -> bool:
        """True between two members of the outermost object."""
        return len(self._open) == 1 and not self._is_string

    def push(self, character: str) -> bool:
        """Read one character of an incomplete object; return whether the text may still be one."""
        if self._is_string:
            return self._push_to_string(character)
        if self._scalar:
            if character in _SCALAR_CHARACTERS:
                self._scalar.append(character)
                return True
            if _SCALAR.fullmatch("".join(self._scalar)) is None:
                return False
            self._scalar = []
        if character not in self._expected:
            return character in BLANKS and self._open != []
        match character:
            case "{":
                self._open.append("}")
                self._expected = '"}'
            case "[":
                self._open.append("]")
                self._expected = _VALUE_STARTS + "]"
            case "}" | "]":
                self._open.pop()
                self.complete = not self._open
                self._end_value()
            case ",":
                self._expected = '"' if self._open[-1] == "}" else _VALUE_STARTS
            case ":":
                self._expected = _VALUE_STARTS
            case '"':
                self._is_string = True
            case _:
                self._scalar = [character]
                self._end_value()
        return True

    def _end_value(self) -> None:
        self._expected = "," + "".join(self._open[-1:])

    def _push_to_string(self, character: str) -> bool:
        if self._escape:
            is_unicode = self._escape.startswith("\\u")
            escape = self._escape + character
            is_last = len(escape) == 6 if is_unicode else character != "u"
            self._escape = "" if is_last else escape
            return character in (string.hexdigits if is_unicode else '"\\/bfnrtu')
        if character == "\\":
            self._escape = character
        elif character == '"':
            self._is_string = False
            if self._expected.startswith("{"):
                self._end_value()
            else:  # it is a key
                self._expected = ":"
        return character >= " "


def is_json_object(text: str) -> bool:
    """Return whether a text is one JSON object, without blanks around it."""
    scanner = JsonScanner()
    return all(not scanner.complete and scanner.push(each) for each in text) and scanner.complete


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Part of one call. `index` counts the output's calls from 0; `id` and `name` come first."""

    index: int
    id: str
    name: str
    arguments: str


class Parsed(NamedTuple):
    """Final text, and the parts of calls in order."""

    text: str
    calls: tuple[CallPiece, ...]


def new_call_id() -> str:
    """Generate a random id, which is unique within a conversation."""
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))


class Findings:
    """Collector of the text and calls of one output.

    `call_count` counts calls that have begun, `complete_count` those with complete arguments.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.call_count = self.complete_count = 0
        self._new_id = new_id
        self._text: list[str] = []
        # index, id, name and parts of the arguments
        self._pieces: list[tuple[int, str, str, list[str]]] = []

    def add_text(self, text: str) -> None:
        self._text.append(text)

    def begin_call(self, name: str, arguments: str) -> None:
        """Begin a call, with the arguments read so far."""
        self._pieces.append((self.call_count, self._new_id(), name, [arguments]))
        self.call_count += 1

    def add_arguments(self, arguments: str) -> None:
        """Append to the arguments of the last call."""
        if not self._pieces:
            self._pieces.append((self.call_count - 1, "", "", []))
        self._pieces[-1][-1].append(arguments)

    def taken(self) -> Parsed:
        """Take everything added since the previous call. The text is free of marks of calls."""
        calls = [
            CallPiece(index, call_id, name, "".join(arguments))
            for index, call_id, name, arguments in self._pieces
        ]
        parsed = Parsed("".join(self._text).translate(WITHOUT_MARKS), tuple(calls))
        self._text, self._pieces = [], []
        return parsed


def _is_plain(character: str) -> bool:
    """Return whether a character may be part of a name or key; others may begin a call."""
    return character >= " " and character not in '"<[{\\'


def _behind_blanks(held: str, marker: str) -> str:
    """Strip leading blanks from the held text's end that may begin a marker."""
    return held[-max(len(marker), 1) :].lstrip(BLANKS)


class CallObject:
    """Streaming reader of one call: a JSON object with the name of a function and its arguments.

    `state` reads the next character, and returns whether the text may still be a call. `held` is
    undecided text, with that before the object; once the call has begun, text that is not part of
    its arguments. If `is_broken`, the arguments of a call that has begun are not valid JSON.
    """

    def __init__(
        self, names: Collection[str], found: Findings, held: str, *, is_marked: bool
    ) -> None:
        """Create a reader for the characters after the opening brace.

        With `is_marked`, an opening precedes the call, which may then name any function.
        """
        self.held = held
        self.has_begun = self.is_complete = self.is_broken = False
        self.state: Callable[[str], bool] = self._first_key
        self._names = names
        self._found = found
        self._is_marked = is_marked
        self._word = ""  # the current key or name, as read so far
        self._seen: set[str] = set()  # keys of the object
        self._name: str | None = None  # of the function
        self._early = ""  # arguments that precede the name
        self._is_escaped = False  # within arguments in a string, the next character
        self._scanner = JsonScanner()

    def _go(self, character: str, expected: str, state: Callable[[str], bool]) -> bool:
        """Expect one character and then another state, skipping blanks."""
        if character == expected:
            self.state = state
        elif character not in BLANKS:
            return False
        self.held += character
        return True

    def _first_key(self, character: str) -> bool:
        if character == "}":
            return self._end_object()
        return self._key(character)

    def _key(self, character: str) -> bool:
        self._word = ""
        return self._go(character, '"', self._in_key)

    def _in_key(self, character: str) -> bool:
        meaning = KEYS.get(self._word)
        if character == '"' and (self._is_marked if meaning is None else meaning not in self._seen):
            self._seen.add(meaning or self._word)
            self.state = self._colon
        elif not self._may_be_key(self._word + character):
            return False
        else:
            self._word += character
        self.held += character
        return True

    def _may_be_key(self, word: str) -> bool:
        """Return whether a call's key may begin with this word; behind an opening any word may."""
        if self._is_marked:
            return _is_plain(word[-1]) and len(word) <= NAME_CHARS_MAX
        return any(
            key.startswith(word) and meaning not in self._seen for key, meaning in KEYS.items()
        )

    def _colon(self, character: str) -> bool:
        meaning = KEYS.get(self._word, "")
        states = {"name": self._before_name, "arguments": self._before_arguments}
        return self._go(character, ":", states.get(meaning, self._before_aside))

    def _before_name(self, character: str) -> bool:
        self._word = ""
        return self._go(character, '"', self._in_name)

    def _in_name(self, character: str) -> bool:
        self._word += character
        is_name = self._word[:-1] in self._names or (self._is_marked and self._word != '"')
        if character == '"' and is_name:
            self.held += character
            self._name = self._word[:-1]
            self.state = self._after_value
            if self._early:
                self._begin_call(self._early)
                self._found.complete_count += 1
        elif self._may_be_name():
            self.held += character
        else:
            return False
        return True

    def _may_be_name(self) -> bool:
        """Return whether a function's name may begin with the current word."""
        if any(name.startswith(self._word) for name in self._names):
            return True
        right = _is_plain(self._word[-1]) and len(self._word) <= NAME_CHARS_MAX
        return self._is_marked and right

    def _before_aside(self, character: str) -> bool:
        if not self._is_marked:
            return self._go(character, '"', self._in_aside)
        self._scanner = JsonScanner()
        for each in '{"":':
            self._scanner.push(each)
        self.state = self._in_any_value
        return self._in_any_value(character)

    def _in_any_value(self, character: str) -> bool:
        is_between = self._scanner.is_between
        if not self._scanner.push(character):
            return False
        if is_between and character in ",}":
            return self._after_value(character)
        self.held += character
        return True

    def _in_aside(self, character: str) -> bool:
        if character in "<[{\\" or character < " ":  # not in ids, and may begin a call
            return False
        self.held += character
        if character == '"':
            self.state = self._after_value
        return True

    def _before_arguments(self, character: str) -> bool:
        if character in '"n':  # JSON text in a string, as Granite 4 writes it, or null
            self._word, self._is_escaped = "", False
            self.state = self._in_quoted if character == '"' else self._in_null
        if character != "{":
            return self._go(character, character if character in '"n' else "{", self.state)
        self._scanner = JsonScanner()
        self.state = self._in_arguments
        if self._name is not None:
            self._begin_call("")
        return self._in_arguments(character)

    def _in_arguments(self, character: str) -> bool:
        right = self._scanner.push(character)
        if self.has_begun:
            if not right:
                self.is_broken = True
                return False
            self._found.add_arguments(character)
        elif right:
            self.held += character
            self._early += character
        else:
            return False
        if self._scanner.complete:
            self._found.complete_count += self.has_begun
            self.state = self._after_value
        return True

    def _in_quoted(self, character: str) -> bool:
        self.held += character
        if character != '"' or self._is_escaped:
            self._is_escaped = character == "\\" and not self._is_escaped
            self._word += character
            return True
        with suppress(ValueError):
            arguments = json.loads(f'"{self._word}"', strict=False).strip(BLANKS) or "{}"
            if is_json_object(arguments):
                self._take_arguments(arguments)
                return True
        self.held = self.held[:-1]
        return False

    def _in_null(self, character: str) -> bool:
        self._word += character
        if not "ull".startswith(self._word):
            return False
        self.held += character
        if self._word == "ull":
            self._take_arguments("{}")
        return True

    def _take_arguments(self, arguments: str) -> None:
        """Take complete arguments, which wait for the name if that follows."""
        self.state = self._after_value
        if self._name is None:
            self._early = arguments
        else:
            self._begin_call(arguments)
            self._found.complete_count += 1

    def _after_value(self, character: str) -> bool:
        if character == "}":
            return self._end_object()
        return self._go(character, ",", self._key)

    def _end_object(self) -> bool:
        if self._name is None:
            return False
        if not self.has_begun:
            self._begin_call("{}")
            self._found.complete_count += 1
        self.held = ""
        self.is_complete = True
        return True

    def _begin_call(self, arguments: str) -> None:
        assert self._name is not None, "a call has a name"
        self.has_begun = True
        self.held = ""
        self._found.begin_call(self._name, arguments)


class ToolCallParser:
    """Parser of the text and the calls in one output."""

    def __init__(
        self,
        form: CallFormat,
        names: Collection[str],
        new_id: Callable[[], str] = new_call_id,
        *,
        single: bool = False,
    ) -> None:
        """Create a parser. `names` are the offered tools. A call behind an opening may name any
        other function; JSON without an opening that does so is text, since it may be an answer.

        With `single`, only text may follow the first call.
        """
        self._shape = CALL_SHAPES[form]
        self._names = frozenset(names)
        self._single = single
        self._found = Findings(new_id)
        self._held = ""  # undecided text; within a call, that of its `CallObject`
        self._is_list = False
        self._is_marked = False  # whether an opening precedes the current call or list
        self._call: CallObject | None = None  # the current call, or the last one of a list
        self._between = self._fresh if self._shape.bare else self._plain
        self._state: State = self._between

    @property
    def call_count(self) -> int:
        """Number of calls that have begun."""
        return self._found.call_count

    @property
    def complete_count(self) -> int:
        """Number of calls with complete arguments."""
        return self._found.complete_count

    @property
    def _has_begun(self) -> bool:
        """True if the current call was emitted."""
        return self._call is not None and self._call.has_begun

    def push(self, text: str) -> Parsed:
        """Parse more output and return the part that became final."""
        position = 0
        while position < len(text):
            if self._state == self._plain and not self._held:
                position = self._skip_plain(text, position)
            if position < len(text):
                self._state(text[position])
                position += 1
            if len(self._held) > HELD_CHARS_MAX:
                self._found.add_text(self._held)
                self._held = ""
                self._leave(self._plain)
        return self._found.taken()

    def finish(self) -> Parsed:
        """Parse the end of the output and return the rest. `push` must not follow."""
        held, self._held = self._held, ""
        if self._state == self._broken:
            self._found.add_arguments(held)
        elif (
            not self._shape.textless
            and not self._has_begun
            and (held.strip(BLANKS) or not self.call_count)
        ):
            self._found.add_text(held)
        return self._found.taken()

    def _skip_plain(self, text: str, position: int) -> int:
        """Add plain text up to a possible call at once, much faster than character by character."""
        found = text.find(self._shape.opening[0], position) if self._shape.opening else -1
        plain = text[position : len(text) if found < 0 else found].rstrip(BLANKS)
        self._found.add_text(plain)
        return position + len(plain)

    def _again(self, character: str) -> None:
        """Parse the held text and one more character again, in the current state."""
        held, self._held = self._held, ""
        for each in held + character:
            self._state(each)

    def _fail(self, character: str) -> None:
        """Handle a syntax error: the held text becomes text, or follows a call that has begun."""
        if self._has_begun and self._shape.closing:
            self._state = self._closing
        elif self._has_begun:
            self._leave(self._plain)
        else:
            self._found.add_text(self._held)
            self._held = ""
            self._leave(self._plain)
        self._again(character)

    def _leave(self, state: State) -> None:
        self._call, self._is_list = None, False
        self._is_marked &= state != self._plain
        self._state = state

    # Outside of calls.

    def _fresh(self, character: str) -> None:
        """Parse a place where a call may begin without an opening: the start, or after a call."""
        if character in "{[":
            self._state = self._opened
            self._opened(character)
        elif character in BLANKS or (
            character == ";" and self.call_count and ";" not in self._held
        ):
            self._held += character
        else:
            self._leave(self._plain)
            self._again(character)

    def _plain(self, character: str) -> None:
        """Parse text, holding back blanks and a possible opening."""
        opening, held = self._shape.opening, self._held + character
        part = _behind_blanks(held, opening)
        if opening.startswith(part):
            self._held = held
            if part and part == opening:
                self._state, self._is_marked = self._opened, True
            return
        self._found.add_text(held[: len(held) - len(part)])
        while not opening.startswith(part.lstrip(BLANKS)):
            self._found.add_text(part[0])
            part = part[1:]
        self._held = part

    # Around an object.

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
        if character == "{":
            self._call = CallObject(
                self._names, self._found, self._held + character, is_marked=self._is_marked
            )
            self._state = self._in_object
        elif character not in BLANKS:
            self._fail(character)
            return
        self._held += character

    def _in_object(self, character: str) -> None:
        call = self._call
        assert call is not None, "set by `_next_object`"
        is_call = call.state(character)
        self._held = call.held
        if not is_call and call.is_broken:
            self._state = self._broken
            self._broken(character)
        elif not is_call:
            self._fail(character)
        elif call.is_complete and self._is_list:
            self._state = self._after_object
        elif call.is_complete:
            self._close()

    def _broken(self, character: str) -> None:
        """Read arguments that are not valid JSON, up to the closing or the end of the output."""
        closing, held = self._shape.closing, self._held + character
        while held and not closing.startswith(held):
            self._found.add_arguments(held[0])
            held = held[1:]
        self._held = held
        if held and held == closing:
            self._held = ""
            self._leave(self._between)

    def _after_object(self, character: str) -> None:
        if character == "]":
            self._held = ""
            self._close()
            return
        if character == ",":
            self._state = self._next_object
        elif character not in BLANKS:
            self._fail(character)
            return
        self._held += character

    def _close(self) -> None:
        if self._shape.closing:
            self._state = self._closing
        else:
            self._leave(self._between)

    def _closing(self, character: str) -> None:
        if character in "}{" and not self._held.strip(BLANKS):
            if character == "}":  # one more than were opened
                self._held = ""
                return
            if not self._single:  # another call before the closing
                self._next_object(character)
                return
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
