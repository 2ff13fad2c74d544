"""How a setting is declared, and the parsers of its values. `settings.py` is made of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from metering.tenants.networks import parse_network

Value = TypeVar("Value")


class SettingInvalid(ValueError):
    """An environment variable holds something that cannot be used; the message names it and says what would do."""


class Unshown(ValueError):
    """A value that cannot be used, and that no message may repeat."""


def setting(variable: str, default: Value, parse: Callable[[str], Value]) -> Any:
    """A field that `from_environment` fills from the variable."""
    return field(default=default, metadata={"variable": variable, "parse": parse})


def whole(least: int, most: int) -> Callable[[str], int]:
    """Parser of a whole number between two bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("must be a whole number") from None
        if not least <= value <= most:
            raise ValueError(f"must be between {least} and {most}")
        return value

    return parse


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number") from None


def seconds(most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = number(text)
        if not 0 < value <= most:
            raise ValueError(f"must be more than 0 and at most {most}")
        return value

    return parse


def scale(most: float) -> Callable[[str], float]:
    """Parser of a factor, which may be 0."""

    def parse(text: str) -> float:
        value = number(text)
        if not 0 <= value <= most:
            raise ValueError(f"must be between 0 and {most}")
        return value

    return parse


def share(text: str) -> float:
    """Parser of a part of a whole: more than nothing, at most all of it."""
    value = number(text)
    if not 0 < value <= 1:
        raise ValueError("must be more than 0 and at most 1")
    return value


def one_of(*choices: str) -> Callable[[str], str]:
    """Parser of one word among several."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def address_or_off(text: str) -> str:
    """Parser of `host:port`, or of the word that there is to be none."""
    host, _, port = text.rpartition(":")
    if text != "off" and not (host and port.isdecimal() and int(port) < 65_536):
        raise ValueError("must be host:port, or off")
    return text


def networks(text: str) -> str:
    """Parser of networks, separated by commas."""
    return ",".join(str(parse_network(each.strip())) for each in text.split(",") if each.strip())


def listen_address(text: str) -> str:
    """Parser of where gRPC listens: `host:port`, `[IPv6]:port` or `unix:/path`."""
    host, _, port = text.rpartition(":")
    if not text.startswith(("unix:", "unix-abstract:")) and not (host and port.isdecimal() and int(port) < 65_536):
        raise ValueError("must be host:port, such as 127.0.0.1:8443, or unix:/path")
    return text


def postgres_url(text: str) -> str:
    """Parser of a database. What is refused is not repeated: it may hold a password."""
    try:
        parts = urlsplit(text)
        known = parts.scheme.partition("+")[0] in ("postgresql", "postgres") and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise Unshown("must be a PostgreSQL database, written as postgresql://user:password@host:5432/name")
    return text


def truth(text: str) -> bool:
    if text.lower() not in ("1", "true", "0", "false"):
        raise ValueError("must be 1 or 0")
    return text.lower() in ("1", "true")
