"""Response formats: the ways in which clients can request one, and their conversion.

A format is a JSON schema, a regular expression, a list of texts, or a grammar. Grammars in GBNF,
the notation of llama.cpp, are converted to Lark, which the engines use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct
from weir.v1 import inference_service_pb2 as pb

from api.generation.parsing.decoding import RESPONSE_FORMAT_BYTES_MAX
from api.openai.error_responses import check_count, invalid_parameter

ANY_OBJECT = '{"type": "object"}'
ABSENT = Raw(b"null")
CHAT_FIELD = "response_format"  # of the chat API, which nests the schema
NOTHING = frozenset({b"null", b"{}", b"[]", b'""'})  # JSON of members that request nothing
CHOICE_COUNT_MAX = 4096  # texts of which the answer is one
Value = TypeVar("Value")

# Members of each type beside those that only describe it. `choice` comes from other parameters.
MEMBERS: Mapping[str, frozenset[str]] = {
    "text": frozenset(),
    "json_object": frozenset({"schema", "value"}),
    "json_schema": frozenset({"json_schema", "schema", "value"}),
    "json": frozenset({"value", "schema"}),
    "regex": frozenset({"value"}),
    "regex_schema": frozenset({"regex_schema"}),
    "grammar": frozenset({"grammar", "value"}),
    "choice": frozenset({"value"}),
}
DIRECTING = ("json_schema", "schema", "value", "regex_schema", "grammar")
SHOWN_TYPES = ", ".join(each for each in MEMBERS if each != "choice")
REGEX_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")
TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|\#[^\r\n]*)
    |(?P<rule>[A-Za-z0-9_-]+)[ \t\r\n]*::=
    |(?P<name>[A-Za-z0-9_-]+)
    |"(?P<text>(?:[^"\\\r\n]|\\.)*+)"
    |\[(?P<set>(?:[^\]\\\r\n]|\\.)++)\]
    |(?P<counts>(?:[*+?]|\{[ ]*(?:\d{1,4})[ ]*(?:,[ ]*(?:\d{1,4})?[ ]*)?\})++)
    |(?P<mark>[()|.])""",
    re.VERBOSE,
)
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
SHORT = {"n": "\n", "r": "\r", "t": "\t"}
MINUS = r"\x{2d}"
ANY_CHARACTER = r"/[\x{0}-\x{10ffff}]/"
LARK = "use Lark, or GBNF with rules such as root ::= [0-9]+"


class Schema(Struct, forbid_unknown_fields=True):
    """JSON schema with its name. It is always enforced, even without `strict`."""

    name: str | None = None
    description: str | None = None
    schema: Raw = ABSENT
    strict: bool | None = None


class Format(Struct, forbid_unknown_fields=True):
    """Response format of any API. The chat API nests the schema in `json_schema`.

    Extensions: `schema` with `json_object` (llama.cpp, Together, Fireworks), the types `json` and
    `regex` with a `value` (TGI), `regex_schema` (LMDeploy) and `grammar` (Fireworks).
    """

    type: str
    json_schema: Schema | None = None
    name: str | None = None
    description: str | None = None
    schema: Raw = ABSENT
    strict: bool | None = None
    value: Raw = ABSENT
    regex_schema: str | None = None
    grammar: str | None = None


def fill_format(start: pb.StartFrame, requested: Format | None, field: str) -> dict[str, str]:
    """Set the format in a start frame; return which parameter each field came from.

    `field` is the parameter that contains the format. Raises: InvalidRequest.
    """
    if requested is None:
        return {}
    members = MEMBERS.get(requested.type)
    if members is None:
        raise invalid_parameter(f"{field}.type", f"must be one of {SHOWN_TYPES}")
    given = [name for name in DIRECTING if _is_given(getattr(requested, name))]
    for name in given:
        if name not in members:
            raise invalid_parameter(
                f"{field}.{name}", f"does not belong to the type {requested.type}: leave it out"
            )
    location = field
    match requested.type:
        case "text":
            return {}
        case "json_object" | "json":
            if len(given) > 1:
                raise invalid_parameter(
                    f"{field}.{given[1]}", f"cannot be combined with {given[0]}: leave one out"
                )
            if not given and requested.type == "json":
                raise invalid_parameter(f"{field}.value", "is required: a JSON schema")
            location = f"{field}.{given[0]}" if given else field
            start.response_format.json_schema = (
                _schema_text(getattr(requested, given[0]), location) if given else ANY_OBJECT
            )
        case "json_schema":
            schema, location = _schema(requested, field)
            start.response_format.json_schema = _schema_text(schema, location)
        case "regex":
            location = f"{field}.value"
            start.response_format.regex = _text(requested.value, location, "a regular expression")
        case "regex_schema":
            location = f"{field}.regex_schema"
            if not requested.regex_schema:
                raise invalid_parameter(location, "is required: a regular expression")
            start.response_format.regex = requested.regex_schema
        case "choice":
            location = f"{field}.value"
            start.response_format.regex = regex_of_choices(requested.value, location)
        case _:
            location = f"{field}.grammar" if requested.grammar else f"{field}.value"
            text = requested.grammar or _text(requested.value, location, "a grammar")
            start.response_format.lark = lark_of(text, location)
    return {f"response_format.{kind}": location for kind in ("json_schema", "regex", "lark")}


def _is_given(value: object) -> bool:
    return bytes(value) not in NOTHING if isinstance(value, Raw) else bool(value)


def _schema(requested: Format, field: str) -> tuple[Raw, str]:
    """Find the schema and its path in the request. Raises: InvalidRequest."""
    wrapped = requested.json_schema
    if _is_given(requested.value):  # of TGI
        wrapped, location = _decoded(requested.value, Schema, f"{field}.value"), f"{field}.value"
    elif field == CHAT_FIELD:
        if wrapped is None:
            raise invalid_parameter(
                f"{field}.json_schema", "is required: an object with name and schema"
            )
        if bytes(requested.schema) != bytes(ABSENT):
            raise invalid_parameter(f"{field}.schema", "must be in json_schema: leave it out here")
        location = f"{field}.json_schema"
    else:
        if wrapped is not None:
            raise invalid_parameter(
                f"{field}.json_schema", "is of the chat API: put name and schema beside type"
            )
        location = field
    schema = requested.schema if wrapped is None else wrapped.schema
    if bytes(schema) == bytes(ABSENT):
        raise invalid_parameter(f"{location}.schema", "is required")
    return schema, f"{location}.schema"


def _schema_text(schema: Raw, location: str) -> str:
    """Decode a schema, which some servers take as JSON within a string. Raises: InvalidRequest."""
    source = bytes(schema)
    if source.startswith(b'"'):
        return _text(schema, location, "a JSON schema")
    return source.decode()


def _text(value: Raw, location: str, what: str) -> str:
    """Decode a required string. Raises: InvalidRequest."""
    if not _is_given(value):
        raise invalid_parameter(location, f"is required: {what}")
    return _decoded(value, str, location)


def _decoded(value: Raw, kind: type[Value], location: str) -> Value:
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.DecodeError as error:
        raise invalid_parameter(location, str(error)[:200].lower()) from None


def regex_of_choices(value: Raw, location: str) -> str:
    """Build a regular expression that matches one of several strings. Raises: InvalidRequest."""
    choices = _decoded(value, list[str], location)
    check_count(choices, location, CHOICE_COUNT_MAX)
    return "|".join(REGEX_SPECIAL.sub(r"\\\g<0>", each) for each in choices)


# Grammars


def lark_of(grammar: str, location: str) -> str:
    """Convert a grammar in GBNF to Lark, in linear time. Raises: InvalidRequest."""
    if "::=" not in grammar:
        return grammar
    if len(grammar) > RESPONSE_FORMAT_BYTES_MAX:
        raise invalid_parameter(
            location,
            f"must have 1 to {RESPONSE_FORMAT_BYTES_MAX} bytes, got {len(grammar)} or more",
        )
    rules = _rules(grammar, location)
    if "root" not in rules:
        raise invalid_parameter(location, "has no rule root, with which the answer begins")
    for parts in rules.values():
        for part in parts:
            if isinstance(part, Reference) and part.name not in rules:
                raise invalid_parameter(location, f"has no rule {part.name[:64]}, which is used")
    numbers = {name: number for number, name in enumerate(rules)}
    terminals = _terminals(rules)

    def shown(name: str) -> str:
        return f"T{numbers[name]}" if name in terminals else f"r{numbers[name]}"

    lines = ["%llguidance {}", f"start: {shown('root')}"]
    for name, parts in rules.items():
        body = " ".join(shown(each.name) if isinstance(each, Reference) else each for each in parts)
        lines.append(f"{shown(name)}: {body}")
    return "\n".join(lines) + "\n"


class Reference(Struct, frozen=True):
    """Reference to another rule of a grammar."""

    name: str


def _rules(grammar: str, location: str) -> dict[str, list[str | Reference]]:
    """Parse a grammar's rules into parts, in Lark except for names. Raises: InvalidRequest."""
    rules: dict[str, list[str | Reference]] = {}
    parts: list[str | Reference] = []
    depth, position, is_bare = 0, 0, False  # is_bare: nothing since the last ( or |

    def end() -> None:
        if is_bare:
            parts.append('""')
        if depth:
            raise invalid_parameter(location, "has a ( without its )")

    while position < len(grammar):
        found = TOKEN.match(grammar, position)
        kind = found.lastgroup if found is not None else None
        if found is None or (not rules and kind not in ("rule", "blank")):
            shown = " ".join(grammar[position : position + 20].split())
            line = grammar.count("\n", 0, position) + 1
            raise invalid_parameter(location, f"cannot be read in line {line} at {shown!r}: {LARK}")
        position, text = found.end(), found[kind or 0]
        match kind:
            case "blank":
                continue
            case "rule":
                if rules:
                    end()
                if text in rules:
                    raise invalid_parameter(location, f"has the rule {text[:64]} twice")
                parts = rules[text] = []
                depth, is_bare = 0, True
                continue
            case "name":
                parts.append(Reference(text))
            case "text":
                parts.append(msgspec.json.encode(ESCAPE.sub(_character, text)).decode())
            case "set":
                parts.append(_set(text))
            case "counts":
                if is_bare:
                    first = text[: text.find("}") + 1] if text[0] == "{" else text[0]
                    raise invalid_parameter(location, f"has {first} after nothing")
                parts.append(str(parts.pop()) + text if isinstance(parts[-1], str) else text)
            case _ if text == ".":
                parts.append(ANY_CHARACTER)
            case _:
                if is_bare and text != "(":
                    parts.append('""')
                depth += {"(": 1, ")": -1}.get(text, 0)
                if depth < 0:
                    raise invalid_parameter(location, "has a ) without its (")
                parts.append(text)
                is_bare = text != ")"
                continue
        is_bare = False
    end()
    return rules


def _character(found: re.Match[str]) -> str:
    """Decode an escape sequence in a string or a character set."""
    short, middle, long, escaped = found.groups()
    if escaped:
        return SHORT.get(escaped, escaped)
    code = int(short or middle or long, 16)
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else "\ufffd"


class _SetCharacters(dict[int, str]):
    """Translation of the characters of a set to Lark's escapes, by code point.

    Keeps a minus between two characters, which is a range.
    """

    def __init__(self) -> None:
        super().__init__({ord("-"): "-"})

    def __missing__(self, code: int) -> str:
        self[code] = shown = f"\\x{{{code:x}}}"
        return shown


def _set(text: str) -> str:
    """Convert a character set to a regular expression of Lark."""
    negated, text = ("^", text[1:]) if text.startswith("^") and len(text) > 1 else ("", text)
    characters, pieces, end = _SetCharacters(), [], 0
    for found in ESCAPE.finditer(text):
        pieces.append(text[end : found.start()].translate(characters))
        pieces.append(f"\\x{{{ord(_character(found)):x}}}")
        end = found.end()
    shown = "".join((*pieces, text[end:].translate(characters)))
    # A minus at the beginning or at the end is a character.
    if shown.startswith("-"):
        shown = f"{MINUS}{shown[1:]}"
    if shown.endswith("-"):
        shown = f"{shown[:-1]}{MINUS}"
    return f"/[{negated}{shown}]/"


def _terminals(rules: Mapping[str, Sequence[str | Reference]]) -> frozenset[str]:
    """Find the rules without recursion. As Lark terminals, one automaton matches them."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    open_counts = dict.fromkeys(rules, 0)
    for name, parts in rules.items():
        for part in parts:
            if isinstance(part, Reference):
                users[part.name].append(name)
                open_counts[name] += 1
    found = [name for name, count in open_counts.items() if count == 0]
    for name in found:  # grows meanwhile
        for user in users[name]:
            open_counts[user] -= 1
            if open_counts[user] == 0:
                found.append(user)
    return frozenset(found)


def echoed_format(requested: Format | None) -> object:
    """Convert the format to what a response repeats."""
    if requested is None:
        return {"type": "text"}
    fields = {
        "type": requested.type,
        "name": requested.name,
        "description": requested.description,
        "strict": requested.strict,
    }
    echoed: dict[str, object] = {name: value for name, value in fields.items() if value is not None}
    if bytes(requested.schema) != bytes(ABSENT):
        echoed["schema"] = msgspec.json.decode(requested.schema)
    if bytes(requested.value) != bytes(ABSENT):
        echoed["value"] = msgspec.json.decode(requested.value)
    return echoed
