"""Where the api process of this machine listens, and whether it serves: told to other local processes by a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENDPOINT_FILE = "serve.json"
LOOPBACK = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "[::]": "[::1]"}  # of those that listen everywhere


class Endpoint:
    """What this process tells."""

    def __init__(self, home: Path, listen_address: str, port: int, *, tls: bool, urls: Mapping[str, str]) -> None:
        """port: the one that it is bound to. urls: of the doors over HTTP, empty for those that there are not: openai_url, what
        OpenAI's clients take as base URL; console_url, for people; metrics_url, what Prometheus asks.
        """
        host = listen_address.rpartition(":")[0]
        local = listen_address if listen_address.startswith("unix") else f"{LOOPBACK.get(host, host)}:{port}"
        self.address = f"https://{local}" if tls else local
        self._urls = dict(urls)
        self._home = home
        self._serving: bool | None = None

    def tell(self, *, serving: bool) -> None:
        """Store it, whole or not at all, if it has changed."""
        if serving is self._serving:
            return
        self._serving = serving
        told = {"address": self.address, **self._urls, "pid": os.getpid(), "serving": serving}
        unfinished = self._home / f"{ENDPOINT_FILE}.{os.getpid()}"
        unfinished.write_text(json.dumps(told))
        unfinished.replace(self._home / ENDPOINT_FILE)


def read_endpoint(home: Path) -> str | None:
    """Where the process that wrote last listens; None if none has."""
    address = _told(home).get("address")
    return None if address is None else str(address)


def serving_endpoint(home: Path) -> str | None:
    """The same once it takes requests."""
    told = _told(home)
    return str(told["address"]) if told.get("serving") and "address" in told else None


def serving_pid(home: Path) -> int | None:
    """The process that has told last that it takes requests; None if the last to tell does not."""
    told = _told(home)
    return told["pid"] if told.get("serving") and isinstance(told.get("pid"), int) else None


def make_private(directory: Path) -> None:
    """Create a directory, or close one of ours, to everybody but its owner. Its group may pass: see `embedded_postgres.py`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o067:
        directory.chmod(status.st_mode & 0o710)


def read_openai_url(home: Path) -> str | None:
    """What OpenAI's clients take as base URL; None if there is no such door, or nobody has told of one."""
    return _told(home).get("openai_url") or None


def read_metrics_url(home: Path) -> str | None:
    """What Prometheus asks; None if it may not, or nobody has told."""
    return _told(home).get("metrics_url") or None


def read_console_url(home: Path) -> str | None:
    """Where people find the console; None if it is switched off, or nobody has told of one."""
    return _told(home).get("console_url") or None


def base_url(host: str, port: int, *, tls: bool) -> str:
    """The base URL of a door for OpenAI's clients, for somebody on this machine."""
    named = f"[{host}]" if ":" in host else host
    return f"http{'s' if tls else ''}://{LOOPBACK.get(named, named)}:{port}/v1"


def forget_endpoint(home: Path) -> None:
    """Before a start: what an earlier process wrote is not true any more."""
    (home / ENDPOINT_FILE).unlink(missing_ok=True)


def _told(home: Path) -> dict[str, Any]:
    try:
        told = json.loads((home / ENDPOINT_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}
