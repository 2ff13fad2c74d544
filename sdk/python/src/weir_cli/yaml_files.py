"""Strict YAML reader that records every error with line, place and remedy, and continues."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml
from yaml.composer import ComposerError

MERGE = "tag:yaml.org,2002:merge"
LEVELS_MAX = 64  # readers are recursive; real files have ten
NODES_MAX = 200_000  # after aliases are followed: a short file can have billions
# Unknown names that are compared with the known ones, which takes 0.1 ms for each.
SIMILAR_COUNT_MAX, SIMILAR_CHARS_MAX = 20, 64
Value = TypeVar("Value")
Keys = dict[str, yaml.Node]


@dataclass(frozen=True, slots=True, order=True)
class FileError:
    """Error in a file, with line and remedy. `location` is as in `organizations[0].quotas[2]`."""

    line: int
    location: str
    message: str


class NotYaml(ValueError):
    """The text is not YAML. `line` has the error, counted from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class BoundedLoader(yaml.SafeLoader):
    """YAML loader that refuses files that would take too long or too much memory to read."""

    def __init__(self, content: str) -> None:
        super().__init__(content)
        self._open: list[str | None] = []  # anchors of the nodes around the next one
        self._counts: dict[int, int] = {}  # nodes of a node after aliases are followed, by id

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Implement `Composer.compose_node`. Raises: ComposerError."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent) and event.anchor in self._open:
            problem = f"`*{event.anchor}` is part of itself: write its value without the alias"
            raise ComposerError(None, None, problem, mark)
        if len(self._open) == LEVELS_MAX:
            problem = f"nested more than {LEVELS_MAX} levels deep: write fewer levels"
            raise ComposerError(None, None, problem, mark)
        self._open.append(event.anchor)
        node = super().compose_node(parent, index)
        self._open.pop()
        if (count := self._counts.get(id(node))) is None:
            parts = [] if node is None or isinstance(node.value, str) else node.value
            flat = [
                each for part in parts for each in (part if isinstance(part, tuple) else [part])
            ]
            count = self._counts[id(node)] = 1 + sum([self._counts[id(each)] for each in flat])
        if count > NODES_MAX:
            problem = f"has more than {NODES_MAX:,} values: split the file"
            raise ComposerError(None, None, problem, mark)
        return node


def similar_name(name: str, known: Iterable[str], error_count: int) -> str | None:
    """Find the known name that a wrong one resembles; None if there is none.

    `error_count` is the number of errors before it: the search is skipped after too many.
    """
    if error_count >= SIMILAR_COUNT_MAX or len(name) > SIMILAR_CHARS_MAX:
        return None
    return next(iter(difflib.get_close_matches(name, known, 1)), None)


def compose(content: str) -> yaml.Node | None:
    """Parse a file to its root node; None if it is empty. Raises: NotYaml."""
    try:
        root: yaml.Node | None = yaml.compose(content, Loader=BoundedLoader)
    except yaml.YAMLError as broken:
        mark = getattr(broken, "problem_mark", None)
        problem = getattr(broken, "problem", None) or str(broken)
        raise NotYaml(mark.line + 1 if mark else 1, f"not valid YAML: {problem}") from broken
    return root


class StrictReader:
    """Reader of YAML nodes that collects errors instead of raising them.

    `meant` has the places of keys for which a similar unknown key was found; these are not reported
    as missing as well.
    """

    def __init__(self) -> None:
        self.errors: list[FileError] = []
        self.meant: set[str] = set()

    def wrong(self, node: yaml.Node | None, location: str, message: str) -> None:
        self.errors.append(
            FileError(1 if node is None else node.start_mark.line + 1, location, message)
        )

    def mapping(
        self, node: yaml.Node | None, location: str, known: Collection[str] | None = None
    ) -> Keys:
        """Read a mapping to its value nodes by key. Its own keys override those merged in by `<<`.

        A key that is not in `known` is an error; None allows all.
        """
        if not isinstance(node, yaml.MappingNode):
            expected = (
                "of names to values" if known is None else f"with the keys {', '.join(known)}"
            )
            self.wrong(node, location, f"write a mapping {expected}")
            return {}
        found: Keys = {}
        for merged in (value for key, value in node.value if key.tag == MERGE):
            for source in merged.value if isinstance(merged, yaml.SequenceNode) else [merged]:
                found |= (
                    self.mapping(source, location, known)
                    if isinstance(source, yaml.MappingNode)
                    else {}
                )
        own: dict[str, int] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key.tag)
            if key.tag == MERGE:
                continue
            if known is not None and name not in known:
                near = similar_name(name, known, len(self.errors))
                if near is not None:
                    self.meant.add(joined(location, near))
                hint = f"did you mean `{near}`?" if near else f"known are {', '.join(known)}"
                self.wrong(key, joined(location, name), f"unknown key: {hint}")
            elif name in own:
                self.wrong(
                    key,
                    joined(location, name),
                    f"written before, in line {own[name]}: give it once",
                )
            else:
                own[name] = key.start_mark.line + 1
                found[name] = value
        return found

    def require(self, node: yaml.Node | None, location: str, keys: Keys, *names: str) -> None:
        """Record an error for each missing key of a mapping."""
        for name in names:
            if name not in keys and joined(location, name) not in self.meant:
                self.wrong(node, location, f"`{name}` is missing")

    def scalar(self, node: yaml.Node, location: str, parse: Callable[[str], Value]) -> Value | None:
        """Parse a scalar; None if it is wrong. `parse` raises ValueError with the remedy."""
        if not isinstance(node, yaml.ScalarNode):
            self.wrong(node, location, "write a single value")
        elif node.tag.endswith(":null"):
            self.wrong(node, location, "has no value: write one, or leave the key out")
        else:
            try:
                return parse(node.value)
            except ValueError as wrong:
                self.wrong(node, location, str(wrong))
        return None

    def value(
        self, node: yaml.Node | None, location: str, parse: Callable[[str], Value], default: Value
    ) -> Value:
        """Parse a scalar. Returns the default if the scalar is missing or invalid."""

        def parsed(text: str) -> Value:
            try:
                return parse(text)
            except ValueError as error:
                raise ValueError(f"{error}, not {text[:64]!r}") from None

        found = None if node is None else self.scalar(node, location, parsed)
        return default if found is None else found

    def value_of(
        self, keys: Keys, location: str, name: str, parse: Callable[[str], Value], default: Value
    ) -> Value:
        """Parse the scalar of a key. Returns the default if it is missing or invalid."""
        return self.value(keys.get(name), joined(location, name), parse, default)

    def items(self, node: yaml.Node, location: str) -> list[yaml.Node]:
        """Read the entries of a list."""
        if isinstance(node, yaml.SequenceNode):
            return list(node.value)
        self.wrong(
            node,
            location,
            "write a list: each entry in a line of its own that begins with `- `; `[]` for none",
        )
        return []


def joined(location: str, key: str) -> str:
    """Append a key to the place of its mapping."""
    return f"{location}.{key}" if location else key
