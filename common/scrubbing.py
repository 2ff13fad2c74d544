"""Removal of secrets and names of a machine from a report that its operator sends to others."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from typing import Any

from common.processes import inherited

VALUE_CHARS_MIN = 6  # a shorter value of a variable appears by chance
# Variables without secrets that a child process does not need.
HARMLESS = frozenset({"PWD", "OLDPWD", "SHELL", "HOSTNAME", "SHLVL", "_", "COLUMNS", "LINES"})
SECRET = re.compile(
    r"key|token$|secret|passw|credential|authorization|cookie|url$|dsn$", re.IGNORECASE
)
WORD = re.compile(r"[a-z0-9_.,+-]{1,16}")  # a value such as `tensorrt` or `0.9`
USER_OF_URL = re.compile(r"(?<=://)[^/\s@]+@")
KEY = re.compile(
    r"\b(?:sk|hf|weir|whsec|ghp|nvapi|rk|pk)[-_][A-Za-z0-9_-]{8,}|\beyJ[\w-]{8,}[.\w-]+"
)
DIRECTORIES = re.compile(r"(?<![\w.:/~\]-])/(?:[\w.@+-]+/)+")
IP_ADDRESS = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b")
HIDDEN = "[removed]"


class Scrubber:
    """Filter that replaces secrets in text and JSON values before a report leaves the machine.

    It removes the values of environment variables that a worker would not inherit, except for short
    words; users in URLs, keys of known formats, and text under a name such as `password`; IP
    addresses, this machine's name, directories of absolute paths, and the given words.
    """

    def __init__(
        self, words: Mapping[str, str] | None = None, environment: Mapping[str, str] = os.environ
    ) -> None:
        """Collect the secrets in `environment`. `words` maps further words to replacements."""
        harmless = inherited(environment).keys() | HARMLESS
        known = {
            value: f"[{name}]"
            for name, value in environment.items()
            if name not in harmless
            and len(value) >= VALUE_CHARS_MIN
            and (SECRET.search(name) or not WORD.fullmatch(value))
        }
        known |= {socket.gethostname(): "[host]"} | dict(words or {})
        # The longest first: a value may contain another.
        self._known = sorted(known.items(), key=lambda each: -len(each[0]))

    def text(self, value: str) -> str:
        """Replace the secrets in a text."""
        for word, replacement in self._known:
            value = value.replace(word, replacement) if word else value
        value = KEY.sub(HIDDEN, USER_OF_URL.sub("", value))
        return IP_ADDRESS.sub("[address]", DIRECTORIES.sub("", value))

    def json(self, value: Any, name: str = "") -> Any:
        """Replace the secrets in a JSON value. `name` is the value's key in its object."""
        if isinstance(value, str):
            return HIDDEN if value and SECRET.search(name) else self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.json(each, str(key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.json(each, name) for each in value]
        return value
