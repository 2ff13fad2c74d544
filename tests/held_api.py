"""An api process whose event loop a test can hold: `python -m tests.held_api SOCKET...`.

Functions that run on the loop are held while a file of their name is in `WEIR_HOME`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from api.openai import gateway
from api.rpc import client_stream
from tests.forked_workers import main

HELD = ".held"  # ending of the files
# The first is called for each HTTP request once its key is known, the other for each start frame.
HTTP, FRAME = "trace_of", "LiveRequest"


def holding(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a wait before it that holds the loop."""
    held = Path(os.environ["WEIR_HOME"]) / f"{name}{HELD}"

    def hold(*arguments: Any, **options: Any) -> Any:
        while held.exists():
            pass
        return function(*arguments, **options)

    return hold


if __name__ == "__main__":
    for module, name in ((gateway, HTTP), (client_stream, FRAME)):
        setattr(module, name, holding(name, getattr(module, name)))
    main()
