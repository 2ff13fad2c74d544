"""Interruption of tasks at each `await` in turn, for tests of cancellation.

Counts suspensions of the watched tasks and events of the watched state machines, and runs an action
at one of them. A suspension counts twice: while its task sleeps, and when its result is there but
the task has not resumed. Only the second reveals results that are lost between the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from enum import StrEnum
from types import TracebackType
from typing import Any, cast

import pytest


class Moment(StrEnum):
    """Moment of a suspension."""

    ASLEEP = "asleep"
    WAKING = "waking"


class Suspensions:
    """Task factory of a loop that watches tasks by the qualified names of their coroutines."""

    def __init__(self, watched: frozenset[str]) -> None:
        self.count = 0
        self.tasks: list[asyncio.Task[Any]] = []  # watched tasks since `arm`
        self._watched = watched
        self._at: int | None = None
        self._moment = Moment.ASLEEP
        self._act: Callable[[], None] = lambda: None

    def arm(self, at: int, moment: Moment, act: Callable[[], None]) -> None:
        """Restart counting, and act at the suspension of this number, from 1."""
        self.count, self.tasks = 0, []
        self._at, self._moment, self._act = at, moment, act

    def disarm(self) -> bool:
        """Stop acting; return whether that suspension was reached."""
        was_met, self._at = self._at is None, None
        return was_met

    def of(self, name: str) -> list[asyncio.Task[Any]]:
        """Return the tasks of this name that have begun and not ended."""
        found = []
        for task in self.tasks:
            coro = task.get_coro()
            if (
                isinstance(coro, Watched)
                and coro.has_begun
                and coro.__qualname__ == name
                and not task.done()
            ):
                found.append(task)
        return found

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any
    ) -> asyncio.Task[Any]:
        """Implement the signature of `loop.set_task_factory`."""
        if getattr(coro, "__qualname__", "") not in self._watched:
            return asyncio.Task(coro, loop=loop, **options)
        task = asyncio.Task(Watched(coro, self.met), loop=loop, **options)
        self.tasks.append(task)
        return task

    def watch_events(self, monkeypatch: pytest.MonkeyPatch, machine: type, *names: str) -> None:
        """Count the end of each call of these methods too: their object then waits for the next."""
        for name in names:
            monkeypatch.setattr(machine, name, self._watched_event(getattr(machine, name)))

    def _watched_event(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **named: Any) -> Any:
            answer = method(*values, **named)
            self.met(None)
            return answer

        return call

    def met(self, awaited: Any) -> None:
        """Count a suspension of a watched task, or a handled event."""
        self.count += 1
        if self.count != self._at:
            return
        self._at = None
        if self._moment is Moment.ASLEEP:
            self._act()
        elif awaited is None:  # only yields to other tasks
            asyncio.get_running_loop().call_soon(self._act)
        else:
            # Runs before the callback that wakes the task.
            awaited.add_done_callback(lambda _: self._act())


class Watched(Coroutine[Any, Any, Any]):
    """Coroutine that reports each of its suspensions."""

    def __init__(self, inner: Coroutine[Any, Any, Any], met: Callable[[Any], None]) -> None:
        self.__qualname__ = str(cast(Any, inner).__qualname__)
        self.has_begun = False
        self._inner = inner
        self._met = met

    def send(self, value: Any) -> Any:
        """Implement `Coroutine.send`."""
        self.has_begun = True
        awaited = self._inner.send(value)
        self._met(awaited)
        return awaited

    def throw(
        self,
        kind: Any,
        value: BaseException | object | None = None,
        trace: TracebackType | None = None,
    ) -> Any:
        """Implement `Coroutine.throw`."""
        awaited = self._inner.throw(kind)
        self._met(awaited)
        return awaited

    def close(self) -> None:
        """Implement `Coroutine.close`."""
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("only tasks run it")
