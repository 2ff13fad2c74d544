"""Cutting a request's task short from outside, but only where it says that it may be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator


class Interruption:
    """Of one task. Inside `possible` it can be interrupted; elsewhere it looks for itself whether it is to end."""

    def __init__(self, wanted: Callable[[], Exception | None]) -> None:
        """wanted: what the task is to end with; None while nobody wants it to end."""
        self._wanted = wanted
        self._task: asyncio.Task[object] | None = None  # inside a block

    def interrupt(self) -> None:
        """End the block that the task is in, if it is in one. Never blocks."""
        if self._task is not None:
            self._task.cancel()

    @contextlib.contextmanager
    def possible(self) -> Iterator[None]:
        """Let `interrupt` cancel the task inside this block, and turn that into the error that is wanted.

        Only here: a task that is cancelled before its first step never runs at all, and so would never end its request. Any other
        cancellation is the process ending.
        """
        if (error := self._wanted()) is not None:
            raise error
        task = self._task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            error = self._wanted()
            if error is None or task is None:
                raise
            task.uncancel()
            raise error from None
        finally:
            self._task = None
