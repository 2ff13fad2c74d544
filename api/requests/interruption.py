"""Cutting a request's task short from outside, but only where it says that it may be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType


class Interruption:
    """Of one task. Inside `possible` it can be interrupted; elsewhere it looks for itself whether it is to end."""

    def __init__(self) -> None:
        self.task: asyncio.Task[object] | None = None  # inside a block

    def interrupt(self) -> None:
        """End the block that the task is in, if it is in one. Never blocks."""
        if self.task is not None:
            self.task.cancel()

    def possible(self, wanted: Callable[[], Exception | None]) -> Interruptible:
        """Let `interrupt` cancel the task inside this block, and turn that into the error that is wanted.

        wanted: what the task is to end with; None while nobody wants it to end. If it is to end already, this raises.
        """
        return Interruptible(self, wanted)


class Interruptible:
    """A block of `Interruption.possible`.

    Only inside it: a task that is cancelled before its first step never runs at all, and so would never end its request. Any other
    cancellation is the process ending.
    """

    __slots__ = ("_interruption", "_task", "_wanted")

    def __init__(self, interruption: Interruption, wanted: Callable[[], Exception | None]) -> None:
        self._interruption = interruption
        self._wanted = wanted
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> None:
        if (error := self._wanted()) is not None:
            raise error
        self._task = self._interruption.task = asyncio.current_task()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._interruption.task = None
        if not isinstance(error, asyncio.CancelledError):
            return
        wanted = self._wanted()
        if wanted is not None and self._task is not None:
            self._task.uncancel()
            raise wanted from None
