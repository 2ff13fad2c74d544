"""Tools that a model may call: their forms by family, the schemas and grammars that hold its answer to them, and the parser.

The parser finds calls in an output as the text arrives, character by character."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call. parameters: the JSON schema of an object, as JSON text.

    strict: the arguments of its calls are kept to the schema also where the model is free.
    """

    name: str
    description: str
    parameters: str
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model has made. arguments: a JSON object, as JSON text."""

    id: str
    name: str
    arguments: str


class CallFormat(StrEnum):
    """How a model writes a call among its text.

    HERMES: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, also Qwen's. LLAMA: `{"name": …, "parameters": {…}}` as the
    whole answer, or behind `<|python_tag|>`. MISTRAL: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`. JSON: what
    `strict_calls` makes of any model: such an object, or a list of them, and nothing else.
    """

    HERMES = "hermes"
    LLAMA = "llama"
    MISTRAL = "mistral"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class CallShape:
    """What a form has around its calls.

    opening, closing: around a call or a list of calls; empty if there is nothing. bare: one may begin the output without.
    textless: there is nothing beside calls, so what is left of one that the output's end has cut off is no text either.
    """

    opening: str
    closing: str = ""
    bare: bool = False
    textless: bool = False


CALL_SHAPES: Mapping[CallFormat, CallShape] = {
    CallFormat.HERMES: CallShape("<tool_call>", "</tool_call>"),
    CallFormat.LLAMA: CallShape("<|python_tag|>", bare=True),
    CallFormat.MISTRAL: CallShape("[TOOL_CALLS]"),
    CallFormat.JSON: CallShape("", bare=True, textless=True),
}

MODEL_CALL_FORMATS = (CallFormat.HERMES, CallFormat.LLAMA, CallFormat.MISTRAL)  # those that models know by themselves

# Where one of them is a special token of the tokenizer it is text all the same: without it a call could not be told from text.
MARKERS = frozenset({"<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"})


def format_in(template: str) -> CallFormat | None:
    """The form of calls that a chat template shows to its model; None if it is none of those that are known here."""
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return CallFormat.HERMES
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template and "[CALL_ID]" not in template:
        return CallFormat.MISTRAL
    if '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template):
        return CallFormat.LLAMA
    return None


CALL_COUNT_MAX = 16  # in one answer: a model that may go on would otherwise have no reason to end

# Keywords whose values hold schemas: by themselves, in a list, and by names that are the caller's.
_SCHEMA = frozenset(
    {"additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then", "unevaluatedProperties"}
)

_SCHEMAS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_SCHEMAS_BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def calls_schema(tools: Sequence[Tool], *, single: bool, arguments_key: str) -> str:
    """Of one call of these tools as an object, or if several are allowed of a list of them; JSON text.

    Each tool's schema stands under `$defs`, and its references are led there.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, arguments_key: {"$ref": f"#/$defs/tool_{index}"}},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    definitions = {
        f"tool_{index}": _moved(json.loads(tool.parameters), f"#/$defs/tool_{index}") for index, tool in enumerate(tools)
    }
    one: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if single:
        return json.dumps({**one, "$defs": definitions}, ensure_ascii=False)
    return json.dumps(
        {"type": "array", "items": one, "minItems": 1, "maxItems": CALL_COUNT_MAX, "$defs": definitions}, ensure_ascii=False
    )


def _moved(schema: Any, place: str) -> Any:
    """The same schema with its references to itself led to another place."""
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            moved[key] = {name: _moved(each, place) for name, each in value.items()}
        elif key in _SCHEMAS and isinstance(value, list):
            moved[key] = [_moved(each, place) for each in value]
        else:
            moved[key] = _moved(value, place) if key in _SCHEMA else value
    return moved


# Blanks between JSON's tokens: room for an indented answer, but an end to a model that would write blanks for ever.
JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A]{0,24}", "lenient": False}
ANYTHING = '{"type": "object"}'


def strict_calls(form: CallFormat, tools: Sequence[Tool], *, single: bool, token_id: Callable[[str], int | None]) -> str:
    """The grammar. single: at most one call, which ends the answer. token_id: of a marker, None if it is no token of its own."""
    kept = [tool if tool.strict else replace(tool, parameters=ANYTHING) for tool in tools]
    schema = calls_schema(kept, single=True, arguments_key="parameters" if form is CallFormat.LLAMA else "arguments")
    call = json.dumps({**json.loads(schema), "x-guidance": JSON_OPTIONS}, ensure_ascii=False)
    rest = CALL_COUNT_MAX - 1
    match form:
        case CallFormat.HERMES:
            opening, opening_rules = _opening("<tool_call>", token_id)
            closing = _marker("</tool_call>", token_id)
            more = "" if single else " TEXT"
            start = f"start: TEXT | called{more}\ncalled: one" + ("" if single else f" | one (one){{0,{rest}}}")
            rules = f"one: {opening} WS call WS {closing}\n{opening_rules}"
            first = ""
        case CallFormat.LLAMA:
            tag = token_id("<|python_tag|>")  # all of these models have it; where it is none it is no opening
            start = "start: TEXT | WS called" + ("" if tag is None else f" | TEXT <[{tag}]> WS called")
            rules = "called: call" + ("" if single else f' (WS ";" WS call){{0,{rest}}}') + "\n"
            first = r"[ \t\r\n]*[{\[](.|\n)*"  # what begins like this is a call in this form, or nothing
        case CallFormat.MISTRAL:
            opening, opening_rules = _opening("[TOOL_CALLS]", token_id)
            start = f"start: TEXT | {opening} WS called"
            rules = 'called: "[" WS call' + ("" if single else f' (WS "," WS call){{0,{rest}}}') + f' WS "]"\n{opening_rules}'
            first = ""
        case _:
            raise AssertionError(f"{form} is no form that a model writes by itself")
    return f"%llguidance {{}}\n{start}\n{rules}{_text(form, first)}call: %json {call}\nWS: /[ \\n]{{0,8}}/\n"


def _text(form: CallFormat, first: str) -> str:
    """Any text without an opening in it, and that does not begin as a call does."""
    marker = {CallFormat.HERMES: "<tool_call>", CallFormat.LLAMA: "<|python_tag|>", CallFormat.MISTRAL: "[TOOL_CALLS]"}[form]
    without = rf"~/(.|\n)*{_escaped(marker)}(.|\n)*/"
    return f"TEXT: /(.|\\n)*/ & {without}" + (f" & ~/{first}/" if first else "") + "\n"


def _opening(marker: str, token_id: Callable[[str], int | None]) -> tuple[str, str]:
    """What stands before a call, with the text in front of it, and the rules that this needs."""
    known = token_id(marker)
    if known is not None:
        return f"TEXT <[{known}]>", ""
    return "opened", f"opened[lazy]: /(.|\\n)*{_escaped(marker)}/\n"


def _marker(marker: str, token_id: Callable[[str], int | None]) -> str:
    known = token_id(marker)
    return json.dumps(marker) if known is None else f"<[{known}]>"


def _escaped(marker: str) -> str:
    return re.escape(marker).replace("/", r"\/")


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
