"""Strict YAML reader that records every error with line, place and remedy, and continues."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import yaml

MERGE = "tag:yaml.org,2002:merge"
Value = TypeVar("Value")
Keys = dict[str, yaml.Node]


@dataclass(frozen=True, slots=True, order=True)
class FileError:
    """One error with its line and remedy. place: as in `organizations[0].quotas[2].limit`."""

    line: int
    place: str
    message: str


class NotYaml(ValueError):
    """The text is not YAML. line: of the error, from 1 on."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


def compose(content: str) -> yaml.Node | None:
    """Return the root of a file; None for an empty one. Raises: NotYaml."""
    try:
        root: yaml.Node | None = yaml.compose(content, Loader=yaml.SafeLoader)
    except yaml.YAMLError as broken:
        mark = getattr(broken, "problem_mark", None)
        problem = getattr(broken, "problem", None) or str(broken)
        raise NotYaml(mark.line + 1 if mark else 1, f"not valid YAML: {problem}") from broken
    return root


class StrictReader:
    """Reads nodes into values.

    meant: places of the keys that unknown keys resemble; these are not reported as missing as well.
    """

    def __init__(self) -> None:
        self.errors: list[FileError] = []
        self.meant: set[str] = set()

    def wrong(self, node: yaml.Node | None, place: str, message: str) -> None:
        self.errors.append(
            FileError(1 if node is None else node.start_mark.line + 1, place, message)
        )

    def mapping(
        self, node: yaml.Node | None, place: str, known: Collection[str] | None = None
    ) -> Keys:
        """Return the values of a mapping by key; keys merged in by `<<` are overridden by its own.

        known: the allowed keys; None if the file chooses them.
        """
        if not isinstance(node, yaml.MappingNode):
            expected = (
                "of names to values" if known is None else f"with the keys {', '.join(known)}"
            )
            self.wrong(node, place, f"write a mapping {expected}")
            return {}
        found: Keys = {}
        for merged in (value for key, value in node.value if key.tag == MERGE):
            for source in merged.value if isinstance(merged, yaml.SequenceNode) else [merged]:
                found |= (
                    self.mapping(source, place, known)
                    if isinstance(source, yaml.MappingNode)
                    else {}
                )
        own: dict[str, int] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else str(key.tag)
            if key.tag == MERGE:
                continue
            if known is not None and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                self.meant |= {joined(place, each) for each in near}
                hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
                self.wrong(key, joined(place, name), f"unknown key: {hint}")
            elif name in own:
                self.wrong(
                    key, joined(place, name), f"written before, in line {own[name]}: give it once"
                )
            else:
                own[name] = key.start_mark.line + 1
                found[name] = value
        return found

    def require(self, node: yaml.Node | None, place: str, keys: Keys, *names: str) -> None:
        """Record missing keys of a mapping."""
        for name in names:
            if name not in keys and joined(place, name) not in self.meant:
                self.wrong(node, place, f"`{name}` is missing")

    def scalar(self, node: yaml.Node, place: str, parse: Callable[[str], Value]) -> Value | None:
        """Return a parsed scalar; None if it is wrong. parse: raises ValueError with the remedy."""
        if not isinstance(node, yaml.ScalarNode):
            self.wrong(node, place, "write a single value")
        elif node.tag.endswith(":null"):
            self.wrong(node, place, "has no value: write one, or leave the key out")
        else:
            try:
                return parse(node.value)
            except ValueError as wrong:
                self.wrong(node, place, str(wrong))
        return None

    def items(self, node: yaml.Node, place: str) -> list[yaml.Node]:
        """Return the entries of a list."""
        if isinstance(node, yaml.SequenceNode):
            return list(node.value)
        self.wrong(
            node,
            place,
            "write a list: each entry in a line of its own that begins with `- `; `[]` for none",
        )
        return []


def joined(place: str, key: str) -> str:
    """Return the place of a key below another place."""
    return f"{place}.{key}" if place else key
