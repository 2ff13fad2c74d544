"""Where the api process of this machine listens: told to other local processes by a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

ENDPOINT_FILE = "serve.json"


def write_endpoint(home: Path, address: str) -> None:
    """Store the address, whole or not at all."""
    unfinished = home / f"{ENDPOINT_FILE}.{os.getpid()}"
    unfinished.write_text(json.dumps({"address": address, "pid": os.getpid()}))
    unfinished.replace(home / ENDPOINT_FILE)


def read_endpoint(home: Path) -> str | None:
    """Where the process that wrote last listens; None if none has."""
    try:
        return str(json.loads((home / ENDPOINT_FILE).read_text())["address"])
    except (OSError, ValueError, KeyError):
        return None


def forget_endpoint(home: Path) -> None:
    """Before a start: what an earlier process wrote is not true any more."""
    (home / ENDPOINT_FILE).unlink(missing_ok=True)
