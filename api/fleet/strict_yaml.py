"""YAML of an operator's file, read strictly: every key must be known and every value right. Mistakes are collected, not raised."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection
from typing import TypeVar

import yaml

SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|B|)")
UNITS: dict[str, int] = {"": 1, "B": 1} | {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}

Value = TypeVar("Value")
Keys = dict[str, yaml.Node]


class StrictReader:
    """Reads nodes into values. mistakes: line, place and what would be right."""

    def __init__(self) -> None:
        self.mistakes: list[tuple[int, str, str]] = []

    def wrong(self, node: yaml.Node | None, place: str, what: str) -> None:
        """Note a mistake."""
        self.mistakes.append((node.start_mark.line + 1 if node is not None else 1, place or "the file", what))

    def mapping(self, node: yaml.Node | None, place: str, known: Collection[str]) -> Keys:
        """The values of the keys that are known; every other key is a mistake."""
        found: Keys = {}
        for name, value in self._pairs(node, place).items():
            if name in known:
                found[name] = value
                continue
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(sorted(known))}"
            self.wrong(value, f"{place}.{name}".lstrip("."), f"is no key of this place; {hint}")
        return found

    def named(self, node: yaml.Node | None, place: str, pattern: re.Pattern[str], what: str) -> Keys:
        """The values of keys that are names of the file's own; none of what is not there."""
        if node is None:
            return {}
        found = self._pairs(node, place)
        for name, value in found.items():
            if not pattern.fullmatch(name):
                self.wrong(value, f"{place}.{name}", f"cannot be the name of {what}: it must match {pattern.pattern}")
        if not found:
            self.wrong(node, place, f"is empty: name {what}, or leave it out")
        return found

    def items(self, node: yaml.Node | None, place: str) -> list[yaml.Node]:
        """The entries of a list; none of what is not there."""
        if node is None:
            return []
        if isinstance(node, yaml.SequenceNode):
            return list(node.value)
        self.wrong(node, place, "must be a list")
        return []

    def value(self, node: yaml.Node | None, place: str, parse: Callable[[str], Value], default: Value) -> Value:
        """A single value; the default of what is not there, and of what is wrong."""
        if node is None:
            return default
        if not isinstance(node, yaml.ScalarNode):
            self.wrong(node, place, "must be a single value")
            return default
        try:
            return parse(str(node.value))
        except ValueError as error:
            self.wrong(node, place, f"{error}, not {str(node.value)[:64]!r}")
            return default

    def _pairs(self, node: yaml.Node | None, place: str) -> Keys:
        if not isinstance(node, yaml.MappingNode):
            self.wrong(node, place, "must be a mapping of keys to values")
            return {}
        found: Keys = {}
        for key, value in node.value:
            name = str(key.value)
            if name in found:
                self.wrong(key, f"{place}.{name}".lstrip("."), "stands here twice: keep one")
            found[name] = value
        return found


def text(value: str) -> str:
    """Parser of text that is not empty."""
    if not value:
        raise ValueError("must not be empty")
    return value


def word(*choices: str) -> Callable[[str], str]:
    """Parser of one word among several."""

    def parse(value: str) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value

    return parse


def whole(least: int, most: int) -> Callable[[str], int]:
    """Parser of a whole number."""

    def parse(value: str) -> int:
        if not re.fullmatch(r"-?\d+", value) or not least <= int(value) <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return int(value)

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """Parser of a number."""

    def parse(value: str) -> float:
        try:
            found = float(value)
        except ValueError:
            found = math.nan
        if not least <= found <= most:
            raise ValueError(f"must be a number from {least:g} to {most:g}")
        return found

    return parse


def size(value: str) -> int:
    """Parser of a number of bytes."""
    found = SIZE.fullmatch(value)
    if found is None:
        raise ValueError("must be a number of bytes, such as 24GiB")
    return int(float(found[1]) * UNITS[found[2]])


def target(value: str) -> str:
    """Parser of a remote engine's address: service and host:port."""
    service, _, address = value.partition("://")
    host, _, port = address.rpartition(":")
    if service not in ("trtllm", "vllm") or not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError("must be trtllm://host:port or vllm://host:port")
    return value
