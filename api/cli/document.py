"""Configuration files: YAML text to the JSON mapping of `weir.v1.Configuration` and back, by the tables of `document_format.py`.

Reading finds every mistake with its line and its place, and knows the line of every place, so that what the server finds wrong is
told by line too. Values are read by what they are for, not by what YAML takes them for: a project may be called `no`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from api.cli.document_format import DOCUMENT, Json, Nested, Scalar, Section, Sections, Thresholds, Words

NODES_MAX = 200_000  # what a file may come to once its aliases are followed; more is no configuration but an accident
VERSION = "1"
MERGE = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class FileMistake:
    """One thing that is wrong, where, and what would do. place: as in `organizations[0].quotas[2].limit`."""

    line: int
    place: str
    message: str


@dataclass(slots=True)
class Document:
    """A file that was read. lines: line and place in the file of each path of the contract."""

    configuration: dict[str, Json] = field(default_factory=dict)
    mistakes: list[FileMistake] = field(default_factory=list)
    lines: dict[str, tuple[int, str]] = field(default_factory=dict)

    def mistake_at(self, path: str, message: str) -> FileMistake:
        """What the server finds wrong at a path of the contract, at the nearest place that the file has."""
        found = path
        while found not in self.lines and found:
            found = found[: max(found.rfind("."), found.rfind("["), 0)]
        line, place = self.lines.get(found, (1, ""))
        return FileMistake(line, place, message)


def read_document(content: str, *, prune: bool, section: Section = DOCUMENT) -> Document:
    """What a file says. section: which kind of file it is.

    prune: ask for the removal of what its lists do not name; lists that it does not have are left alone.
    """
    document = Document()
    try:
        root = yaml.compose(content, Loader=yaml.SafeLoader)
    except yaml.YAMLError as broken:
        mark = getattr(broken, "problem_mark", None)
        what = getattr(broken, "problem", None) or str(broken)
        document.mistakes.append(FileMistake(mark.line + 1 if mark else 1, "", f"this is no YAML: {what}"))
        return document
    if root is None:
        document.mistakes.append(
            FileMistake(1, "", f"the file says nothing: begin with `{next(iter(section.keys))}:` or see `weir export`")
        )
        return document
    reader = Reader(document, prune)
    try:
        document.configuration = reader.mapping(root, section, "", "", is_root=True)
    except TooLarge:
        document.mistakes.append(FileMistake(1, "", f"it comes to more than {NODES_MAX:,} values: split it by organization"))
    document.mistakes.sort(key=lambda mistake: mistake.line)
    return document


class TooLarge(Exception):
    """The file has too many nodes."""


class Reader:
    """Walks the nodes of a file by the tables."""

    def __init__(self, document: Document, prune: bool) -> None:
        self._document = document
        self._prune = prune
        self._node_count = 0

    def mapping(self, node: yaml.Node, section: Section, path: str, place: str, *, is_root: bool = False) -> dict[str, Json]:
        """One mapping, by the contract's names. path: in the contract; place: in the file."""
        self._enter(node, path, place)
        if not isinstance(node, yaml.MappingNode):
            self._wrong(node, place, f"write a mapping with the keys {', '.join(section.keys)}")
            return {}
        meant: set[str] = set()
        nodes = dict(self._entries(node, section, place, meant, is_root=is_root))
        if is_root and (version := nodes.pop("version", None)) is not None and version.value != VERSION:
            self._wrong(version, "version", f"this program reads version {VERSION}")
        for key in section.required:
            if key not in nodes and key not in meant:
                self._wrong(node, place, f"`{key}` is missing")
        texts = {key: each.value for key, each in nodes.items() if isinstance(each, yaml.ScalarNode)}
        found: dict[str, Json] = {}
        for key, value in nodes.items():
            entry = section.keys[key]
            at, shown = joined(path, entry.name), joined(place, key)
            match entry:
                case Scalar():
                    if (scalar := self._scalar(value, entry, texts, at, shown)) is not None:
                        found[entry.name] = scalar
                case Words():
                    found[entry.name] = self._words(value, at, shown)
                case Thresholds():
                    found[entry.name] = {"values": self._thresholds(value, at, shown)}
                case Nested():
                    found[entry.name] = self.mapping(value, entry.section, at, shown)
                case Sections():
                    found[entry.name] = self._list(value, entry, at, shown)
                    if entry.prune and self._prune:
                        found[entry.prune] = True
        return found

    def _entries(
        self, node: yaml.MappingNode, section: Section, place: str, meant: set[str], *, is_root: bool
    ) -> Iterator[tuple[str, yaml.Node]]:
        """The known keys of a mapping, each once; those that `<<` brings in come first, so that its own replace them.

        meant: gets the keys that others are taken for.
        """
        known = [*section.keys, *(["version"] if is_root else [])]
        own: dict[str, int] = {}
        for merged in (value for key, value in node.value if key.tag == MERGE):
            for source in merged.value if isinstance(merged, yaml.SequenceNode) else [merged]:
                if isinstance(source, yaml.MappingNode):
                    yield from self._entries(source, section, place, meant, is_root=is_root)
        for key, value in node.value:
            if key.tag == MERGE:
                continue
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key.tag)
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                meant |= set(near)
                hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
                self._wrong(key, joined(place, name), f"unknown key: {hint}")
            elif name in own:
                self._wrong(key, joined(place, name), f"written before, in line {own[name]}: give it once")
            else:
                own[name] = key.start_mark.line + 1
                yield name, value

    def _scalar(self, node: yaml.Node, entry: Scalar, texts: Mapping[str, str], path: str, place: str) -> Json | None:
        self._enter(node, path, place)
        if not isinstance(node, yaml.ScalarNode):
            self._wrong(node, place, "write a single value")
        elif node.tag.endswith(":null"):
            self._wrong(node, place, "it has no value: write one, or leave the key out")
        else:
            try:
                return entry.read(node.value, texts)
            except ValueError as wrong:
                self._wrong(node, place, str(wrong))
        return None

    def _words(self, node: yaml.Node, path: str, place: str) -> list[str]:
        self._enter(node, path, place)
        if not isinstance(node, yaml.SequenceNode) or not all(isinstance(each, yaml.ScalarNode) for each in node.value):
            self._wrong(node, place, "write a list of words, such as [inference, admin]")
            return []
        return [each.value for each in node.value]

    def _thresholds(self, node: yaml.Node, path: str, place: str) -> list[str]:
        self._enter(node, path, place)
        parts = node.value if isinstance(node, yaml.SequenceNode) else None
        if parts is None or not all(isinstance(each, yaml.ScalarNode) and each.value.isdecimal() for each in parts):
            self._wrong(node, place, "write a list of whole percentages, such as [50, 80, 100]; `[]` for none")
            return []
        return [each.value for each in parts]

    def _list(self, node: yaml.Node, entry: Sections, path: str, place: str) -> list[dict[str, Json]]:
        self._enter(node, path, place)
        if not isinstance(node, yaml.SequenceNode):
            self._wrong(node, place, "write a list: each entry in a line of its own that begins with `- `; `[]` for none")
            return []
        return [self.mapping(each, entry.section, f"{path}[{index}]", f"{place}[{index}]") for index, each in enumerate(node.value)]

    def _enter(self, node: yaml.Node, path: str, place: str) -> None:
        self._node_count += 1
        if self._node_count > NODES_MAX:
            raise TooLarge
        self._document.lines[path] = (node.start_mark.line + 1, place)

    def _wrong(self, node: yaml.Node, place: str, message: str) -> None:
        self._document.mistakes.append(FileMistake(node.start_mark.line + 1, place, message))


def write_document(configuration: Mapping[str, Json]) -> str:
    """A configuration as the text of a file. What is as usual is left out."""
    node = mapping_node(configuration, DOCUMENT)
    node.value.insert(0, (scalar_node("version"), scalar_node(VERSION, "int")))
    written: str = yaml.serialize(node, Dumper=yaml.SafeDumper, allow_unicode=True, width=132)
    return written


def mapping_node(values: Mapping[str, Json], section: Section) -> yaml.MappingNode:
    """One mapping in the order of its table."""
    pairs: list[tuple[yaml.Node, yaml.Node]] = []
    for key, entry in section.keys.items():
        if entry.name not in values and key not in section.required:
            continue
        value = values.get(entry.name, 0)  # the JSON mapping leaves zeros out
        match entry:
            case Scalar():
                pairs.append((scalar_node(key), scalar_node(entry.show(value, values), entry.tag)))
            case Words():
                pairs.append((scalar_node(key), sequence_node([scalar_node(word) for word in value], flow=True)))
            case Thresholds():
                numbers = [scalar_node(str(each), "int") for each in value.get("values", [])]
                pairs.append((scalar_node(key), sequence_node(numbers, flow=True)))
            case Nested():
                pairs.append((scalar_node(key), mapping_node(value, entry.section)))
            case Sections():
                pairs.append((scalar_node(key), sequence_node([mapping_node(each, entry.section) for each in value])))
    return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=False)


def sequence_node(nodes: list[Any], *, flow: bool = False) -> yaml.SequenceNode:
    """A list."""
    return yaml.SequenceNode("tag:yaml.org,2002:seq", nodes, flow_style=flow or not nodes)


def scalar_node(value: str, tag: str = "str") -> yaml.ScalarNode:
    """A value. Numbers are of whatever type YAML reads from their text, so that they need no quotes."""
    if tag == "float":
        tag = "float" if "." in value else "int"
    return yaml.ScalarNode(f"tag:yaml.org,2002:{tag}", value)


def joined(place: str, key: str) -> str:
    """A place below another one."""
    return f"{place}.{key}" if place else key
