"""Random HTTP bodies and gRPC messages, each reproducible from a seed and an index.

A body is a mutation of a known one: of the bodies and messages that `bench/costly_bodies.py` builds
at a small size from the types of an API, and of random values of these types. A body takes some
50 us to make.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message_factory import GetMessageClass
from msgspec import Struct, inspect

from api.core.interceptor import varint_at
from bench.adversary_attacks import FRACTIONS, NUMBERS, TEXTS, fill
from bench.costly_bodies import bodies_of, messages_of, varint

HTTP_SHARE = 0.6
CORPUS_BYTES, CORPUS_BYTES_MAX = 300, 2000  # of a known body: requested, and accepted
RANDOM_COUNT, FILLED_COUNT = 40, 6  # random values of each type, of parameters and of messages
CHANGES_MAX = 3
NESTING_MAX = 250  # each change can put one value into another; Python writes fewer than 1000
UNCHANGED_SHARE, DAMAGED_SHARE = 0.15, 0.1
PLAIN = ("user", "assistant", "tool", "text", "function", "tiny", "auto", "\ud800", "x")
WORDS = [*TEXTS[:20], *PLAIN]
ODD: list[Any] = [*WORDS, *NUMBERS, *FRACTIONS, 10**30, 1e300, -0.0, True, None, [], {}, [[]] * 9]
DEEP = [[[[[[[[[[[[[[[[{"a": [1]}]]]]]]]]]]]]]]]]
Path = tuple[str | int, ...]


class Node:
    """Field of a message: its number, wire type, bytes or fields, and all of it serialized."""

    __slots__ = ("content", "data", "number", "wire")

    def __init__(self, number: int, wire: int, content: bytes | tuple[Node, ...]) -> None:
        value = content if isinstance(content, bytes) else serialized(content)
        size = varint(len(value)) if wire == 2 else b""
        self.number, self.wire, self.content = number, wire, content
        self.data = varint(number << 3 | wire) + size + value


def any_value(chance: random.Random, depth: int = 3) -> Any:
    """Return any JSON value."""
    kind = chance.randrange(6 if depth else 4)
    if kind == 4:
        return [any_value(chance, depth - 1) for _ in range(chance.randrange(4))]
    if kind == 5:
        return {chance.choice(WORDS): any_value(chance, depth - 1) for _ in range(2)}
    return chance.choice(ODD) if kind else DEEP


def value_of(info: inspect.Type, chance: random.Random) -> Any:
    """Return a value of a type, sometimes of another one."""
    if chance.random() < 0.02:
        return any_value(chance)
    match info:
        case inspect.StructType(fields=fields):
            return {
                each.encode_name: value_of(each.type, chance)
                for each in fields
                if each.required or chance.random() < 0.12
            }
        case inspect.UnionType(types=types):
            return value_of(chance.choice(types), chance)
        case inspect.ListType(item_type=item):
            return [value_of(item, chance) for _ in range(chance.randrange(4))]
        case inspect.DictType(key_type=keys, value_type=held):
            return {str(value_of(keys, chance)): value_of(held, chance) for _ in range(2)}
        case inspect.LiteralType(values=values):
            return chance.choice(values)
        case inspect.StrType():
            return chance.choice(PLAIN)
        case inspect.IntType() | inspect.FloatType():
            return chance.choice((0, 1, -1, 2, 16, 0.5, 2**31, 2**63))
        case inspect.BoolType():
            return chance.random() < 0.5
        case inspect.NoneType():
            return None
    return any_value(chance)


def paths_of(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of each value in a JSON value, the outermost first."""
    yield path
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_of(each, (*path, key))


def nodes_of(data: bytes, kind: Descriptor | None) -> tuple[Node, ...]:
    """Return the fields of a serialized message. kind: None if it is not known."""
    found, position = [], 0
    while position < len(data):
        tag, position = varint_at(data, position)
        number, wire = tag >> 3, tag & 7
        field = None if kind is None else kind.fields_by_number.get(number)
        size = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            size, position = varint_at(data, position)
        elif wire == 0:
            size = varint_at(data, position)[1] - position
        content = data[position : position + size]
        position += size
        inner = None if field is None else field.message_type
        is_message = wire == 2 and inner is not None
        found.append(Node(number, wire, nodes_of(content, inner) if is_message else content))
    return tuple(found)


def indexes_of(nodes: Sequence[Node], path: Path = ()) -> Iterator[Path]:
    """Yield the path of each field of a message."""
    for index, node in enumerate(nodes):
        yield (*path, index)
        if isinstance(node.content, tuple):
            yield from indexes_of(node.content, (*path, index))


def serialized(nodes: Sequence[Node]) -> bytes:
    """Return the message with these fields."""
    return b"".join([node.data for node in nodes])


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return bytes that are cut, doubled or changed in a place."""
    entry = chance.randrange(len(data) + 1)
    match chance.randrange(4):
        case 0:
            return data[:entry]
        case 1:
            return data[:entry] + chance.randbytes(3) + data[entry:]
        case 2:
            return data[:entry] + data[entry // 2 :]
    return data[:entry] + chance.randbytes(1) + data[entry + 1 :]


class Bodies:
    """Fuzzed bodies of one seed."""

    def __init__(
        self,
        http: Mapping[str, tuple[type[Struct], Mapping[str, Any]]],
        calls: Mapping[str, Descriptor],
        seed: int,
    ) -> None:
        """http: parameters and a valid body of each path. calls: request type of each RPC."""
        chance = random.Random(seed)
        self._seed = seed
        self._bodies = [(path, list(json_corpus(*each, chance))) for path, each in http.items()]
        self._messages = [
            (path, list(message_corpus(kind, chance))) for path, kind in calls.items()
        ]
        self._names = sorted(
            {
                key
                for _, corpus in self._bodies
                for _, paths in corpus
                for path in paths
                for key in path
                if isinstance(key, str)
            }
        )

    def body(self, index: int) -> tuple[str, bytes]:
        """Return a path and a body or message for it."""
        chance = random.Random(self._seed << 40 | index)
        if chance.random() < HTTP_SHARE:
            path, corpus = chance.choice(self._bodies)
            data = self._body(*chance.choice(corpus), chance)
        else:
            path, messages = chance.choice(self._messages)
            data = self._message(*chance.choice(messages), messages, chance)
        return path, damaged(data, chance) if chance.random() < DAMAGED_SHARE else data

    def _body(self, value: Any, paths: Sequence[Path], chance: random.Random) -> bytes:
        if chance.random() >= UNCHANGED_SHARE:
            for _ in range(chance.randint(1, CHANGES_MAX)):
                value = self._changed(value, chance.choice(paths), chance)
        data = json.dumps(value).encode()
        if chance.random() < 0.05:  # which no object of Python has
            name = json.dumps(chance.choice(self._names)).encode()
            data = data.replace(b"{", b"{%s:1,%s:[]," % (name, name), 1)
        return data

    def _changed(self, value: Any, path: Path, chance: random.Random) -> Any:
        """Return a copy of a value with another value, name or member at a path."""
        if path and isinstance(value, dict | list):
            key, *rest = path
            try:
                inside = value[key]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                return value  # changed before
            copied = value.copy()
            if rest or chance.random() < 0.5:
                copied[key] = self._changed(inside, tuple(rest), chance)  # type: ignore[index]
            elif isinstance(copied, dict):
                name = chance.choice(self._names) if chance.random() < 0.8 else str(key)[::-1]
                if chance.random() < 0.5:
                    del copied[key]
                copied[name] = inside
            else:
                copied[chance.randrange(len(copied) + 1) :] = [inside] * chance.choice(
                    (0, 1, 2, 40)
                )
            return copied
        if chance.random() < 0.7:
            return any_value(chance, 1)
        _, corpus = chance.choice(self._bodies)
        found, paths = chance.choice(corpus)
        for key in chance.choice(paths):
            found = found[key]
        return found

    def _message(
        self,
        nodes: tuple[Node, ...],
        entries: Sequence[Path],
        others: Sequence[tuple[tuple[Node, ...], Sequence[Path]]],
        chance: random.Random,
    ) -> bytes:
        if entries and chance.random() >= UNCHANGED_SHARE:
            for _ in range(chance.randint(1, CHANGES_MAX)):
                other = chance.choice(others)
                nodes = self._replaced(nodes, chance.choice(entries), other, chance)
        return serialized(nodes)

    def _replaced(
        self,
        nodes: tuple[Node, ...],
        entry: Path,
        other: tuple[tuple[Node, ...], Sequence[Path]],
        chance: random.Random,
    ) -> tuple[Node, ...]:
        """Return a copy of fields, with other ones at a place."""
        index, *rest = entry
        assert isinstance(index, int)
        if index >= len(nodes):
            return nodes  # changed before
        node = nodes[index]
        if rest and isinstance(node.content, tuple):
            inside = self._replaced(node.content, tuple(rest), other, chance)
            return (*nodes[:index], Node(node.number, node.wire, inside), *nodes[index + 1 :])
        number = node.number
        put: tuple[Node, ...]
        match chance.randrange(6):
            case 0:
                put = ()
            case 1:
                put = (node,) * chance.choice((2, 3, 40))
            case 2:
                put = (Node(chance.randrange(1, 40), node.wire, node.content),)
            case 3 if other[1]:
                found, path = other[0], chance.choice(other[1])
                for each in path[:-1]:
                    found = found[each].content  # type: ignore[index, assignment]
                put = (node, found[path[-1]])  # type: ignore[index]
            case 4:
                put = (Node(number, 0, varint(chance.choice(NUMBERS) % 2**64)),)
            case _:
                content = chance.choice(WORDS).encode("utf-8", "surrogatepass")
                put = (Node(number, 2, content),)
        return (*nodes[:index], *put, *nodes[index + 1 :])


def json_corpus(
    kind: type[Struct], plain: Mapping[str, Any], chance: random.Random
) -> Iterator[tuple[Any, Sequence[Path]]]:
    """Yield JSON values for a type, with the paths in each."""
    yield plain, list(paths_of(plain))
    made = [json.dumps(value_of(type_info(kind), chance)).encode() for _ in range(RANDOM_COUNT)]
    for data in (*made, *[costly.build(CORPUS_BYTES) for costly in bodies_of(kind, plain)]):
        if len(data) <= CORPUS_BYTES_MAX and data.count(b"[") <= NESTING_MAX:
            value = json.loads(data)
            yield value, list(paths_of(value))


@functools.cache
def type_info(kind: type[Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def message_corpus(
    kind: Descriptor, chance: random.Random
) -> Iterator[tuple[tuple[Node, ...], Sequence[Path]]]:
    """Yield messages of a type, with the places in each."""
    made = [fill(GetMessageClass(kind)(), chance).SerializeToString() for _ in range(FILLED_COUNT)]
    for data in (*made, *[costly.build(CORPUS_BYTES) for costly in messages_of(kind)]):
        if len(data) <= CORPUS_BYTES_MAX:
            nodes = nodes_of(data, kind)
            yield nodes, list(indexes_of(nodes))
