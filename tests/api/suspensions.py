"""Stops the world at each `await` in turn: every suspension of the tasks that are watched is counted, and every event of the state
machines that are; at one of them something is done.

A suspension is met twice: while its task is asleep, and when what it waited for has come and the task has not been told yet. What
goes wrong between the two (an answer that nobody takes) is found by no test that only waits for things to happen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from enum import StrEnum
from types import TracebackType
from typing import Any, cast

import pytest


class Moment(StrEnum):
    """Of a suspension."""

    ASLEEP = "asleep"
    WAKING = "waking"


class Suspensions:
    """The task factory of a loop. Watches the tasks whose coroutines have one of these qualified names."""

    def __init__(self, watched: frozenset[str]) -> None:
        self.count = 0
        self.tasks: list[asyncio.Task[Any]] = []  # those that were watched since `arm`
        self._watched = watched
        self._at: int | None = None
        self._moment = Moment.ASLEEP
        self._act: Callable[[], None] = lambda: None

    def arm(self, at: int, moment: Moment, act: Callable[[], None]) -> None:
        """Count anew, and act at the suspension of this number, from 1."""
        self.count, self.tasks = 0, []
        self._at, self._moment, self._act = at, moment, act

    def disarm(self) -> bool:
        """Do nothing any more; whether that suspension was met."""
        was_met, self._at = self._at is None, None
        return was_met

    def of(self, name: str) -> list[asyncio.Task[Any]]:
        """The tasks of this name that have begun and have not ended."""
        found = []
        for task in self.tasks:
            coro = task.get_coro()
            if isinstance(coro, Watched) and coro.has_begun and coro.__qualname__ == name and not task.done():
                found.append(task)
        return found

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """See `loop.set_task_factory`."""
        if getattr(coro, "__qualname__", "") not in self._watched:
            return asyncio.Task(coro, loop=loop, **options)
        task = asyncio.Task(Watched(coro, self.met), loop=loop, **options)
        self.tasks.append(task)
        return task

    def watch_events(self, monkeypatch: pytest.MonkeyPatch, machine: type, *names: str) -> None:
        """Count the end of each call of these methods, too: what they belong to waits for the next of them."""
        for name in names:
            monkeypatch.setattr(machine, name, self._watched_event(getattr(machine, name)))

    def _watched_event(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **named: Any) -> Any:
            answer = method(*values, **named)
            self.met(None)
            return answer

        return call

    def met(self, awaited: Any) -> None:
        """A watched task has just been suspended, or an event been handled."""
        self.count += 1
        if self.count != self._at:
            return
        self._at = None
        if self._moment is Moment.ASLEEP:
            self._act()
        elif awaited is None:  # it only lets others go first
            asyncio.get_running_loop().call_soon(self._act)
        else:
            awaited.add_done_callback(lambda _: self._act())  # before the one with which the task is woken


class Watched(Coroutine[Any, Any, Any]):
    """A coroutine that tells of each of its suspensions."""

    def __init__(self, inner: Coroutine[Any, Any, Any], met: Callable[[Any], None]) -> None:
        self.__qualname__ = str(cast(Any, inner).__qualname__)
        self.has_begun = False
        self._inner = inner
        self._met = met

    def send(self, value: Any) -> Any:
        """See `Coroutine`."""
        self.has_begun = True
        awaited = self._inner.send(value)
        self._met(awaited)
        return awaited

    def throw(self, kind: Any, value: BaseException | object | None = None, trace: TracebackType | None = None) -> Any:
        """See `Coroutine`."""
        awaited = self._inner.throw(kind)
        self._met(awaited)
        return awaited

    def close(self) -> None:
        """See `Coroutine`."""
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("only tasks run it")
