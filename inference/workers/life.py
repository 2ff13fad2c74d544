"""The life of every backend that may come and go, and of one in a child process: started, watched, lost, started again, closed.

What a backend is asked, and who waits for its answers, is each kind's own. Everything runs on the caller's event loop: `serve` is
all that runs in the background, a task of the caller's `TaskGroup`. Holds no model and imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from common.backoff import Backoff
from common.incidents import Retries
from inference.engine import EngineCondition, EngineState, EngineStatistics, ModelInfo
from inference.errors import EngineError, EngineFailed, EngineStartFailed, EngineUnavailable
from inference.workers.process import COMMON_MESSAGES, HostOpener, HostProcess, Watchdog, open_host
from inference.workers.protocol import (
    LoadFailed,
    Loading,
    Message,
    MessageDecoder,
    ProtocolBroken,
    Ready,
)


class LifeWaits(Protocol):
    """How long what may take, in seconds; part of every backend's settings."""

    @property
    def close_timeout_s(self) -> float:
        """For the running sequences to end when the engine is closed."""

    @property
    def restart_delay_s_min(self) -> float:
        """Before the first new start; doubled by each that fails."""

    @property
    def restart_delay_s_max(self) -> float:
        """The longest pause."""

    @property
    def stable_after_s(self) -> float:
        """Of service, after which the restart delay begins anew."""


class HostWaits(LifeWaits, Protocol):
    """How long what may take, in seconds; part of every such backend's settings."""

    @property
    def load_timeout_s(self) -> float:
        """From the child's start until it takes sequences."""

    @property
    def step_timeout_s(self) -> float:
        """Without a report while sequences run: the host hangs, and is killed."""


@dataclass(frozen=True, slots=True)
class HostKind:
    """What sets one backend apart: the module that is run and the environment it needs, its first message, the tokens of a block of
    its prefix cache, if it has one, where its processes come from, and what decodes their messages.
    """

    module: str
    environment: Mapping[str, str]
    load: Message
    block_tokens: int = 1
    opener: HostOpener = open_host
    decoder: MessageDecoder = COMMON_MESSAGES


_log = logging.getLogger("weir.inference.workers")
_CLOSED = EngineCondition(EngineState.CLOSED, reason="closed")


class BackendLife(ABC):
    """One model on a backend that is started, lost, and started again. See `Backend` for the contract."""

    def __init__(self, model: ModelInfo, waits: LifeWaits) -> None:
        """Starts nothing."""
        self._model = model
        self._waits = waits
        self._condition = EngineCondition(EngineState.COLD, reason="not started yet")
        self._changed = asyncio.Event()
        self._start_requested = asyncio.Event()
        self._close_requested = asyncio.Event()
        self._served = asyncio.Event()
        self._serving = False
        self._load_failure_count = 0
        self._load_time_s = 2.0  # seconds: what loading took last; before the first time, what the demo model takes
        self._statistics = EngineStatistics()

    @property
    def model(self) -> ModelInfo:
        """See `Backend.model`."""
        return self._model

    def healthy(self) -> bool:
        """See `Backend.healthy`."""
        return self._condition.state is EngineState.READY

    def condition(self) -> EngineCondition:
        """See `Backend.condition`."""
        return self._condition

    def statistics(self) -> EngineStatistics:
        """See `Backend.statistics`."""
        return self._statistics

    async def start(self) -> None:
        """See `Backend.start`."""
        failures_before = self._load_failure_count
        self._start_requested.set()
        while self._condition.state is not EngineState.READY:
            if self._condition.state is EngineState.CLOSED:
                raise EngineUnavailable("the engine is closed", retry_after_s=0.0)
            if self._condition.state is EngineState.FAILED:
                raise EngineStartFailed(self._condition.reason)
            if self._load_failure_count > failures_before:
                raise EngineStartFailed(self._condition.reason, self._condition.retry_after_s)
            await self._changed.wait()

    async def close(self) -> None:
        """See `Backend.close`."""
        healthy, closing = self.healthy(), self._close_requested.is_set()
        self._set_condition(_CLOSED)  # before the first wait, so that nobody enters any more
        self._close_requested.set()
        self._start_requested.set()
        if not self._serving:
            return
        if healthy:
            self._say_farewell()
        if healthy or closing:  # a second close gives the first one's farewell its time
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._waits.close_timeout_s):
                    await self._served.wait()
        self._end_at_once()
        await self._served.wait()

    async def serve(self) -> None:
        """See `Backend.serve`."""
        assert not self._serving, "an engine is served once"
        if self._close_requested.is_set():
            return
        self._serving = True
        backoff = Backoff(self._waits.restart_delay_s_min, self._waits.restart_delay_s_max)
        clock = asyncio.get_running_loop().time
        retries = Retries("engine")
        try:
            await self._start_requested.wait()
            while not self._close_requested.is_set() and self._condition.state is not EngineState.FAILED:
                started_at_s = clock()
                self._set_condition(EngineCondition(EngineState.LOADING, 0.0, "process", self._load_time_s, "loading"))
                reason = "an unexpected error"
                with retries.survive(self._model.name):
                    reason = await self._run()
                self._lost(reason)
                if clock() - started_at_s > self._waits.stable_after_s:
                    backoff.reset()
                if self._condition.state is EngineState.RESTARTING and not self._close_requested.is_set():
                    await self._pause(backoff.next_s())
            await self._close_requested.wait()
        finally:
            self._set_condition(_CLOSED)
            self._fail_waiting("the engine was closed")
            self._served.set()

    @abstractmethod
    async def _run(self) -> str:
        """One life of the engine: begin, say when it is ready, serve until it is gone. Returns why it is gone."""

    @abstractmethod
    def _say_farewell(self) -> None:
        """Ask the engine to end all sequences and then itself; never blocks."""

    @abstractmethod
    def _end_at_once(self) -> None:
        """`_run` must return now, whatever still runs."""

    @abstractmethod
    def _fail_waiting(self, reason: str) -> None:
        """The engine is gone, with all that it knew: whoever waits for it is told, by a `_loss` each."""

    def _check_ready(self) -> None:
        """Raises: EngineUnavailable while the engine is down, EngineStartFailed if it needs a person."""
        condition = self._condition
        if condition.state is EngineState.FAILED:
            raise EngineStartFailed(condition.reason)
        if condition.state is not EngineState.READY:
            raise EngineUnavailable(f"the engine is {condition.state.value}: {condition.reason}", condition.retry_after_s)

    def _now_ready(self, loading_time_s: float) -> None:
        """The engine takes requests."""
        self._load_time_s = loading_time_s
        self._set_condition(EngineCondition(EngineState.READY, loading_fraction=1.0))

    def _lost(self, reason: str) -> None:
        """A life of the engine is over. Leaves the condition FAILED or RESTARTING."""
        if self._condition.state is EngineState.LOADING:
            self._load_failure_count += 1
        if self._condition.state is not EngineState.FAILED:
            self._set_condition(EngineCondition(EngineState.RESTARTING, retry_after_s=self._load_time_s, reason=reason))
        if not self._close_requested.is_set():
            _log.error("engine %s: %s", self._model.name, reason)
        self._statistics = EngineStatistics()
        self._fail_waiting(reason)

    async def _pause(self, delay_s: float) -> None:
        """Wait before the next attempt; a close ends the wait."""
        self._set_condition(
            EngineCondition(EngineState.RESTARTING, retry_after_s=delay_s + self._load_time_s, reason=self._condition.reason)
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._close_requested.wait()

    @property
    def is_closing(self) -> bool:
        """Whether it was asked to close."""
        return self._close_requested.is_set()

    def loading(self, stage: str, fraction: float) -> None:
        """So much of the loading is done, 0 to 1."""
        left_s = self._load_time_s * (1 - fraction)
        self._set_condition(EngineCondition(EngineState.LOADING, fraction, stage, left_s, "loading"))

    def unreachable(self) -> None:
        """The engine has gone, or is about to; what becomes of it is told by `_run`."""
        if self._condition.state is EngineState.READY:
            reason = "it has just been lost"
            self._set_condition(EngineCondition(EngineState.RESTARTING, retry_after_s=self._load_time_s, reason=reason))

    def cannot_start(self, reason: str) -> None:
        """A person has to see to it: no retry would help."""
        self._load_failure_count += 1
        self._set_condition(EngineCondition(EngineState.FAILED, reason=reason))

    def _loss(self, reason: str) -> EngineError:
        """What one is told whose answer will never come."""
        closed = self._condition.state is EngineState.CLOSED
        return EngineUnavailable(reason, retry_after_s=0.0) if closed else EngineFailed(reason)

    def _set_condition(self, condition: EngineCondition) -> None:
        if self._condition.state is EngineState.CLOSED:
            return  # the end of a life; what the engine still does changes nothing
        self._condition = condition
        self._changed.set()
        self._changed = asyncio.Event()


class Worker:
    """The child process of one backend, in one life after the other: started, loaded, watched, until it is gone."""

    def __init__(
        self,
        life: BackendLife,
        kind: HostKind,
        waits: HostWaits,
        *,
        on_ready: Callable[[Ready, float], None],
        on_message: Callable[[Message], None],
        owes_answers: Callable[[], bool],
    ) -> None:
        """Starts nothing. on_ready: it takes requests, after so many seconds.

        on_message: called with each message that is not about its life. Raises `ProtocolBroken`. owes_answers: whether its silence
        would be a fault.
        """
        self._life = life
        self._kind = kind
        self._waits = waits
        self._on_ready = on_ready
        self._on_message = on_message
        self._owes_answers = owes_answers
        self.process: HostProcess | None = None  # while there is one
        self._began_at_s = -math.inf
        self._hung = False
        self._watchdog = Watchdog(waits.step_timeout_s, self._kill_hanging)
        self.heard = self._watchdog.heard

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        return None if self.process is None else self.process.pid

    def send(self, message: Message) -> None:
        """Queue a message for the child, if there is one; never blocks."""
        if self.process is not None:
            self.process.send(message)

    def kill(self) -> None:
        """End the child at once, if there is one."""
        if self.process is not None:
            self.process.kill()

    async def run(self) -> str:
        """One life of a child: start, load, serve, until it is gone. Returns why it is gone."""
        self._hung = False
        try:
            async with self._kind.opener(self._kind.module, self._kind.environment) as process:
                if self._life.is_closing:
                    return "the engine was closed"  # while the process started; nobody would kill it later
                self.process = process
                try:
                    await self._load(process)
                    if self._life.condition().state is not EngineState.FAILED:
                        await process.follow(self._kind.decoder, self._on_message)
                    return await self._exit_reason(process)
                except TimeoutError:
                    return f"loading took more than {self._waits.load_timeout_s:.0f} s"
                except ProtocolBroken as error:
                    return f"the engine process broke the protocol: {error}"
                finally:
                    self.process = None
                    self._life.unreachable()
                    self._watchdog.disarm()
        except OSError as error:
            return f"the engine process could not be started: {error}"

    async def _load(self, process: HostProcess) -> None:
        self._began_at_s = asyncio.get_running_loop().time()
        process.send(self._kind.load)
        async with asyncio.timeout(self._waits.load_timeout_s):
            while self._life.condition().state is EngineState.LOADING:
                match await process.receive(self._kind.decoder):
                    case Loading(stage=stage, fraction=fraction):
                        self._life.loading(stage, fraction)
                    case Ready() as ready:
                        self._on_ready(ready, asyncio.get_running_loop().time() - self._began_at_s)
                        self._watchdog.arm()
                    case LoadFailed(message=reason):
                        self._life.cannot_start(reason)
                    case None:
                        return
                    case other:
                        self._on_message(other)

    async def _exit_reason(self, process: HostProcess) -> str:
        """Why the child is gone, as far as its exit status tells."""
        condition = self._life.condition()
        if condition.state is EngineState.FAILED:
            return condition.reason
        await process.wait_gone(self._waits.close_timeout_s)
        if self._hung:
            return "the engine process hung, and was ended"
        if process.exit_status == -signal.SIGKILL:
            return "the engine process was killed: the system ends so what takes more memory than there is"
        return f"the engine process ended with status {process.exit_status}"

    def _kill_hanging(self, silence_s: float) -> None:
        """A child that owes events and sends none is killed; its end is then handled like any other crash."""
        if self.process is not None and self._owes_answers():
            _log.error("engine %s: no report for %.0f s, killing the process", self._life.model.name, silence_s)
            self._hung = True
            self.process.kill()
