"""Profile hook for `infra.walk`: counts calls of Python functions between two SIGUSR2 signals.

Every Python process that `infra.walk` starts imports this module first. It must not import the
product.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import sys
import threading
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parent.parent
OURS = ("api/", "common/", "inference/", "metering/")
COROUTINE = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
EVENT_LOOP = asyncio.Runner.run.__code__


class Notes:
    """Counter of calls by caller and callee in one process, in order of the first call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._calls: dict[tuple[CodeType | None, CodeType], int] | None = None

    def toggle(self, *_: object) -> None:
        """Begin to count. At the second call, write the counts into the directory."""
        if self._calls is None:
            self._calls = {}
            sys.setprofile(self.note)
            self._path("counting").touch()
        else:
            sys.setprofile(None)
            calls, self._calls = self._calls, None
            self._path("part").write_text(json.dumps(counts_of(calls)))
            self._path("part").rename(self._path("counted"))

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call. A coroutine that is resumed counts too, with the event loop as caller."""
        if event == "call" and (calls := self._calls) is not None:
            call = (frame.f_back.f_code if frame.f_back else None, frame.f_code)
            calls[call] = calls.get(call, 0) + 1

    def _path(self, suffix: str) -> Path:
        return self._directory / f"{os.getpid()}.{suffix}"


def counts_of(calls: dict[tuple[CodeType | None, CodeType], int]) -> dict[str, object]:
    """Convert counts for `infra.walk`: Weir's functions, and whether each called another one."""
    callers = {caller for caller, called in calls if caller and name_of(called)}
    return {
        "process": os.path.relpath(sys.argv[0], ROOT),
        "functions": {name: code in callers for _, code in calls if (name := name_of(code))},
        "call_count": sum(calls.values()),
        "wake_up_count": sum(
            n
            for (caller, code), n in calls.items()
            if caller is EVENT_LOOP and code.co_flags & COROUTINE
        ),
    }


@cache
def name_of(code: CodeType) -> str | None:
    """Format code of Weir as `path function`; None for other code, lambdas and comprehensions."""
    path = os.path.relpath(code.co_filename, ROOT)
    if not path.startswith(OURS) or code.co_name.startswith("<"):
        return None
    return f"{path} {code.co_qualname.replace('.<locals>', '')}"


def take_notes(directory: Path) -> None:
    """Install the profile hook and the signal handler, which writes counts into the directory."""
    notes = Notes(directory)
    signal.signal(signal.SIGUSR2, notes.toggle)
    threading.setprofile(notes.note)
