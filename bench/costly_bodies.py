"""The costliest JSON bodies and protobuf messages of a size, generated from the types of an API.

Each place of a type gets values of every kind that it takes: many elements, long texts, deep
nesting, a repeated name, similar names, alternating elements. `bench.adversary` sends them, and
`tests/api/test_growth.py` holds the time of each parser linear. A new parameter or field is
included at once.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from msgspec import Struct, inspect

from api.openai.dialects import FIELDS, field_of
from api.openai.effects import Effect

LEVELS = 900  # below the limit of most parsers
TURN_COUNT = 4096
BYTES_MAX = 4 * 2**20
GRAMMAR_CHARS_MAX = 65_536
PADDING = b"x" * 960  # the most turns then fill the largest body
Build = Callable[[int], bytes]  # from a size in bytes to a body of about that size
Wrap = Callable[[bytes], bytes]

TEXTS = ("long text", "quotes")
CALL = b'{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}'
GRAMMARS: Mapping[str, Callable[[int], str]] = {
    "counts": lambda size: 'root ::= "a"' + "*" * size,
    "counts of a long text": lambda size: f'root ::= "{"a" * (size // 2)}"' + "?" * (size // 2),
    "a set": lambda size: f"root ::= [{'a' * size}]",
    "a set of escapes": lambda size: "root ::= [" + r"\x61" * (size // 4) + "]",
    "blanks": lambda size: f"root ::= a{{{' ' * size}1}}",
    "rules": lambda size: (
        "root ::= r0\n"
        + "".join(f"r{number} ::= r{number + 1}\n" for number in range(size // 16))
        + f'r{size // 16} ::= "x"'
    ),
}
VARINTS = frozenset(
    {
        FieldDescriptor.TYPE_BOOL,
        FieldDescriptor.TYPE_ENUM,
        FieldDescriptor.TYPE_INT32,
        FieldDescriptor.TYPE_INT64,
        FieldDescriptor.TYPE_SINT32,
        FieldDescriptor.TYPE_SINT64,
        FieldDescriptor.TYPE_UINT32,
        FieldDescriptor.TYPE_UINT64,
    }
)


@dataclass(frozen=True, slots=True)
class Costly:
    """Costly body or message. `name` says which place has which kind of value."""

    name: str
    build: Build


def filled(unit: bytes, size: int) -> bytes:
    """Repeat an element of a JSON list or object, with commas, up to `size` bytes."""
    return b",".join([unit] * max(size // (len(unit) + 1), 1))


@functools.cache
def pool(name: str = "") -> bytes:
    """Build members of a JSON object with different names, as many as the largest body takes.

    The names have the letters of `name`, so that only a full comparison can tell them apart.
    """
    if name:
        rest = name[8:][::-1]
        orders = itertools.permutations(name[:8][::-1])
        names = ("".join(order) + rest for order in orders)
    else:
        names = (f"p{number:x}" for number in itertools.count())
    size = len(f'"{name or "p12345"}":1,')
    return b",".join(
        b'"%s":1' % each.encode() for each in itertools.islice(names, BYTES_MAX // size)
    )


def members(size: int, name: str = "") -> bytes:
    """Build up to `size` bytes of members of a JSON object with different names, as in `pool`."""
    found = pool(name)
    return found if len(found) <= size else found[: max(found.rfind(b",", 0, size), 0)] or b'"p":1'


# Values of any JSON type, by kind
FREE: Mapping[str, Build] = {
    "many lists": lambda size: b"[" + filled(b"[]", size) + b"]",
    "many objects": lambda size: b"[" + filled(b"{}", size) + b"]",
    "many texts": lambda size: b"[" + filled(b'"a"', size) + b"]",
    "many numbers": lambda size: b"[" + filled(b"1.5e9", size) + b"]",
    "many members": lambda size: b"{" + members(size) + b"}",
    "repeated member": lambda size: b"{" + filled(b'"a":1', size) + b"}",
    "deep lists": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "deep in parts": lambda size: b"[" + filled(b"[" * LEVELS + b"]" * LEVELS, size) + b"]",
    "long text": lambda size: b'"' + b"x" * size + b'"',
    "escapes": lambda size: b'"' + b"\\u00e9" * (size // 6) + b'"',
    "quotes": lambda size: b'"' + b'\\"' * (size // 2) + b'"',
    "long number": lambda size: b"9" * size,
}


def minimal(info: inspect.Type) -> bytes:
    """Build a small valid value of a type."""
    match info:
        case inspect.StructType(fields=fields):
            required = [
                b'"%s":%s' % (each.encode_name.encode(), minimal(each.type))
                for each in fields
                if each.required
            ]
            return b"{" + b",".join(required) + b"}"
        case inspect.UnionType(types=types):
            return minimal(types[0])
        case inspect.ListType(item_type=item):
            return b"[" + minimal(item) + b"]"
        case inspect.LiteralType(values=values):
            return json.dumps(values[0]).encode()
        case inspect.StrType():
            return b'"user"'
        case inspect.IntType() | inspect.FloatType():
            return b"1"
        case inspect.BoolType():
            return b"true"
        case inspect.DictType():
            return b"{}"
    return b"null"


def values_of(info: inspect.Type) -> Iterator[tuple[str, Build]]:
    """Yield costly values of a type, each with its kind."""
    match info:
        case inspect.StructType(fields=fields):
            own = minimal(info)[1:-1]
            start = b"{" + (own + b"," if own else b"")
            similar = max((each.encode_name for each in fields), key=len)
            yield "many unknown members", lambda size: start + members(size) + b"}"
            yield (
                "similar unknown members",
                lambda size: start + members(size, similar) + b"}",
            )
            yield (
                "repeated unknown member",
                lambda size: start + filled(b'"unknown":1', size) + b"}",
            )
            yield "long unknown member", lambda size: start + b'"' + b"n" * size + b'":1}'
        case inspect.ListType(item_type=item):
            one = minimal(item)
            yield "many elements", lambda size: b"[" + filled(one, size) + b"]"
            yield (
                "few elements",
                lambda size: b"[" + filled(one, min(size, TURN_COUNT * (len(one) + 1))) + b"]",
            )
        case inspect.DictType(key_type=keys):
            yield "many members", lambda size: b"{" + members(size) + b"}"
            yield "repeated member", lambda size: b"{" + filled(b'"1":1', size) + b"}"
            if isinstance(keys, inspect.IntType):
                yield (
                    "many numbers",
                    lambda size: (
                        b"{" + b",".join([b'"%d":1' % key for key in range(size // 10 + 1)]) + b"}"
                    ),
                )
        case inspect.StrType() | inspect.LiteralType():
            for kind in TEXTS:
                yield kind, FREE[kind]
        case inspect.IntType() | inspect.FloatType():
            yield "long number", FREE["long number"]
        case inspect.AnyType() | inspect.RawType():
            yield from FREE.items()


def value_in(wrap: Wrap, value_of: Build, size: int) -> bytes:
    return wrap(value_of(size))


def member_in(wrap: Wrap, before: bytes, value: bytes) -> bytes:
    return wrap(before + value + b"}")


def locations(
    info: inspect.Type, path: str, wrap: Wrap, seen: set[tuple[str, str]]
) -> Iterator[tuple[str, inspect.Type, Wrap]]:
    """Yield the places of a type: path, type, and the function that wraps a body around a value.

    One member of each type stands for all of that type in its object.
    """
    match info:
        case inspect.UnionType(types=types):
            for each in types:
                yield from locations(each, path, wrap, seen)
            return
        case inspect.StructType(cls=kind, fields=fields):
            yield path, info, wrap
            for field in fields:
                mark = (kind.__name__, repr(field.type))
                if mark in seen:
                    continue
                seen.add(mark)
                others = [
                    b'"%s":%s,' % (other.encode_name.encode(), minimal(other.type))
                    for other in fields
                    if other.required and other is not field
                ]
                before = b"{" + b"".join(others) + b'"%s":' % field.encode_name.encode()
                inside = functools.partial(member_in, wrap, before)
                yield from locations(field.type, f"{path}.{field.encode_name}", inside, seen)
        case inspect.ListType(item_type=item):
            yield path, info, wrap
            yield from locations(item, f"{path}[]", lambda value: wrap(b"[" + value + b"]"), seen)
        case _:
            yield path, info, wrap


def turns(*units: bytes) -> Build:
    """Make a builder of conversations whose roles alternate, as many turns as the size allows."""

    def build(size: int) -> bytes:
        one = b",".join(units).replace(b"PADDING", PADDING)
        count = max(min(size // (len(one) + 1), TURN_COUNT // len(units)), 1)
        return b",".join([one] * count)

    return build


# Conversations by member, beside the generated ones
CONVERSATIONS: Mapping[str, Mapping[str, Build]] = {
    "messages": {
        "turns of one role": turns(b'{"role":"user","content":"PADDING"}'),
        "short turns of one role": turns(b'{"role":"user","content":"x"}'),
        "alternating turns": turns(
            b'{"role":"user","content":"PADDING"}', b'{"role":"assistant","content":"x"}'
        ),
        "turns of one role in blocks": turns(
            b'{"role":"user","content":[{"type":"text","text":"PADDING"}]}'
        ),
        "calls and results": turns(
            b'{"role":"assistant","tool_calls":[' + CALL + b"]}",
            b'{"role":"tool","tool_call_id":"c","content":"PADDING"}',
        ),
        "uses and results": turns(
            b'{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":{}}]}',
            b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"c",'
            b'"content":"PADDING"},{"type":"text","text":"x"}]}',
        ),
        "blocks of one turn": lambda size: (
            b'{"role":"user","content":[' + filled(b'{"type":"text","text":""}', size) + b"]}"
        ),
        "reasoning blocks": lambda size: (
            b'{"role":"user","content":[' + filled(b'{"type":"thinking"}', size) + b"]}"
        ),
    },
    "input": {
        "turns of one role": turns(b'{"role":"user","content":"PADDING"}'),
        "reasoning items": lambda size: filled(b'{"type":"reasoning","summary":[]}', size),
        "calls": turns(b'{"type":"function_call","call_id":"c","name":"f","arguments":"PADDING"}'),
        "parts": turns(b'{"role":"user","content":[{"type":"input_text","text":"PADDING"}]}'),
    },
    "prompt": {"many prompts": lambda size: filled(b'"x"', size)},
}


def tools(size: int) -> bytes:
    """Build as many tools as fit, with schemas of many members."""
    schema = b'{"type":"object","properties":{' + members(size // 256) + b"}}"
    return b",".join(
        b'{"type":"function","name":"f%d","parameters":%s,"function":'
        b'{"name":"f%d","parameters":%s}}' % (number, schema, number, schema)
        for number in range(128)
    )


def of_other_servers(api: str) -> Iterator[tuple[str, str, Build]]:
    """Yield the fields of other servers that an API applies, with kinds of values and builders.

    One alias of a parameter stands for all, beside one for a list.
    """
    seen: set[object] = set()
    for name, field in FIELDS.items():
        is_alias = field.effect is Effect.ALIAS
        mark: object = "stop" in field.means if is_alias else name
        if field.effect in (Effect.REFUSED, Effect.HINT) or mark in seen:
            continue
        seen.add(mark)
        for what in ("many numbers", "many texts", "many members", "deep lists", "long text"):
            yield name, what, FREE[what]
        if "grammar" in name:
            for what, rule in GRAMMARS.items():
                yield name, f"grammar, {what}", functools.partial(grammar, rule)
    if field_of("context_management", api) is not None:
        edit = b'{"type":"clear_thinking_20251015","keep":"all"}'
        yield "context_management", "edits", lambda size: b'{"edits":[' + filled(edit, size) + b"]}"


def grammar(rule: Callable[[int], str], size: int) -> bytes:
    """Build a GBNF grammar as JSON, no larger than the server converts."""
    return json.dumps(rule(min(size, GRAMMAR_CHARS_MAX) - 200)).encode()


def bodies_of(kind: type[Struct], plain: Mapping[str, Any]) -> Iterator[Costly]:
    """Yield costly bodies for each parameter of an API. `plain` is a valid body to start from."""
    base = {name: json.dumps(value).encode() for name, value in plain.items()}

    def around(name: str, value: bytes) -> bytes:
        others = [
            b'"%s":%s,' % (each.encode(), text) for each, text in base.items() if each != name
        ]
        return b"{" + b"".join(others) + b'"%s":' % name.encode() + value + b"}"

    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    rest = json.dumps(plain).encode()[1:-1]
    for name, value_of in values_of(info):
        start = minimal(info)[1:-1]

        def top(size: int, value_of: Build = value_of, start: bytes = start) -> bytes:
            comma = b"" if start else b","  # of a body without required members
            return b"{" + rest + comma + value_of(size)[1 + len(start) :]

        yield Costly(name, top)
    seen: set[tuple[str, str]] = set()
    for each in info.fields:
        mark = (kind.__name__, repr(each.type))
        if mark in seen:
            continue
        seen.add(mark)
        name = each.encode_name
        for path, location, wrap in locations(each.type, name, lambda value: value, seen):
            for what, value_of in values_of(location):

                def build(
                    size: int, name: str = name, wrap: Wrap = wrap, value_of: Build = value_of
                ) -> bytes:
                    return around(name, wrap(value_of(size)))

                yield Costly(f"{path}: {what}", build)
    for name, conversations in CONVERSATIONS.items():
        if name not in kind.__struct_fields__:
            continue
        for what, value_of in conversations.items():

            def talk(size: int, name: str = name, value_of: Build = value_of) -> bytes:
                return around(name, b"[" + value_of(size) + b"]")

            yield Costly(f"{name}: {what}", talk)
    api: str = getattr(kind, "api", "")
    for name, what, value_of in of_other_servers(api):
        if api and name not in kind.__struct_fields__:
            other = functools.partial(value_in, functools.partial(around, name), value_of)
            yield Costly(f"{name}: {what}", other)
    if "tools" in kind.__struct_fields__:
        yield Costly("tools: many", lambda size: around("tools", b"[" + tools(size) + b"]"))


# Protobuf


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def delimited(number: int, content: bytes) -> bytes:
    """Encode a length-delimited protobuf field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def times(unit: bytes, size: int) -> bytes:
    return unit * max(size // len(unit), 1)


def fields_with_cost(field: FieldDescriptor) -> Iterator[tuple[str, Build]]:
    """Yield costly encodings of a field, each with its kind."""
    number = field.number
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            yield (
                "many keys",
                lambda size: b"".join(
                    delimited(number, delimited(1, b"%x" % key) + delimited(2, b""))
                    for key in range(max(size // 12, 1))
                ),
            )
        if field.is_repeated:
            yield "many messages", lambda size: times(delimited(number, b""), size)
        else:
            yield "repeated message", lambda size: times(delimited(number, b""), size)
    elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        yield "long text", lambda size: delimited(number, b"x" * size)
        yield "many texts", lambda size: times(delimited(number, b"x"), size)
        if field.type == FieldDescriptor.TYPE_STRING:
            yield "wide text", lambda size: delimited(number, "é".encode() * (size // 2))
    elif field.type in VARINTS:
        yield "many numbers", lambda size: times(varint(number << 3) + b"\1", size)
        if field.is_repeated:
            yield "packed numbers", lambda size: delimited(number, b"\1" * size)


def wrapped(wrap: Wrap, build: Build, size: int) -> bytes:
    return wrap(build(size))


def field_in(wrap: Wrap, number: int, value: bytes) -> bytes:
    return wrap(delimited(number, value))


def messages_of(kind: Descriptor) -> Iterator[Costly]:
    """Yield costly messages of a type. One field of each type stands for all in its message."""
    yield Costly("unknown fields", lambda size: times(varint(2047 << 3) + b"\1", size))
    seen: set[tuple[str, int, bool]] = set()

    def walk(message: Descriptor, path: str, wrap: Wrap) -> Iterator[Costly]:
        for field in message.fields:
            inner = field.message_type
            mark = (
                message.full_name,
                field.type if inner is None else hash(inner.full_name),
                field.is_repeated,
            )
            if mark in seen:
                continue
            seen.add(mark)
            location = f"{path}{field.name}"
            for what, build in fields_with_cost(field):
                yield Costly(f"{location}: {what}", functools.partial(wrapped, wrap, build))
            if inner is not None:
                inside = functools.partial(field_in, wrap, field.number)
                yield from walk(inner, f"{location}.", inside)

    yield from walk(kind, "", lambda value: value)
