"""Lifecycle of backends, and of those in a worker process: start, supervision, restart, close.

Each kind of backend defines its requests and answers. Everything runs on the caller's event loop;
only `serve` runs in the background, as a task of the caller's `TaskGroup`. Holds no model and
imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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

LOG_LINES = 20  # in the report of a load that is given up
_CLOSED = EngineCondition(EngineState.CLOSED, reason="closed")


class LifeWaits(Protocol):
    """Timeouts and delays of a backend in seconds; part of its settings.

    close_timeout_s: for running sequences to end when the engine is closed. restart_delay_s_min:
    before the first restart; doubled by each failed one. stable_after_s: of service, after which
    the restart delay is reset.
    """

    @property
    def close_timeout_s(self) -> float: ...
    @property
    def restart_delay_s_min(self) -> float: ...
    @property
    def restart_delay_s_max(self) -> float: ...
    @property
    def stable_after_s(self) -> float: ...


class HostWaits(LifeWaits, Protocol):
    """Timeouts and delays of a backend in a worker process, in seconds; part of its settings.

    load_timeout_s: from the worker's start until it takes sequences. step_timeout_s: without a
    report while sequences run, after which the worker is killed.
    """

    @property
    def load_timeout_s(self) -> float: ...
    @property
    def step_timeout_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class HostKind:
    """Kind of worker: module to run with its environment, first message, and message decoder.

    block_tokens: tokens in a block of its prefix cache. opener: source of its processes.
    load_failure_count_max: consecutive failed loads after which no other is tried.
    """

    module: str
    environment: Mapping[str, str]
    load: Message
    block_tokens: int = 1
    opener: HostOpener = open_host
    decoder: MessageDecoder = COMMON_MESSAGES
    load_failure_count_max: float = math.inf


_log = logging.getLogger("weir.inference.workers")


class BackendLife(ABC):
    """One model on a backend that is restarted when lost. Implements `Backend`.

    told_loss: message to clients instead of the reason of a loss, see `EngineError`.
    """

    told_loss = ""

    def __init__(self, model: ModelInfo, waits: LifeWaits) -> None:
        """Start nothing; `serve` does."""
        self._model = model
        self._waits = waits
        self._condition = EngineCondition(EngineState.COLD, reason="not started yet")
        self._changed = asyncio.Event()
        self._start_requested = asyncio.Event()
        self._close_requested = asyncio.Event()
        self._served = asyncio.Event()
        self._serving = False
        self._load_failure_count = 0
        self._load_time_s = 2.0  # last duration of loading; at first, that of the demo model
        self._statistics = EngineStatistics()
        self._stall = ""  # why a READY engine takes no requests for the moment; empty if it does

    @property
    def model(self) -> ModelInfo:
        """Implement `Backend.model`."""
        return self._model

    def healthy(self) -> bool:
        """Implement `Backend.healthy`."""
        return self._condition.state is EngineState.READY and not self._stall

    def condition(self) -> EngineCondition:
        """Implement `Backend.condition`."""
        if self._stall and self._condition.state is EngineState.READY:
            return EngineCondition(
                EngineState.RESTARTING, retry_after_s=self._load_time_s, reason=self._stall
            )
        return self._condition

    def statistics(self) -> EngineStatistics:
        """Implement `Backend.statistics`."""
        return self._statistics

    async def start(self) -> None:
        """Implement `Backend.start`."""
        failures_before = self._load_failure_count
        self._start_requested.set()
        while self._condition.state is not EngineState.READY:
            if self._condition.state is EngineState.CLOSED:
                raise EngineUnavailable("the engine is closed", retry_after_s=0.0)
            condition = self._condition
            if condition.state is EngineState.FAILED:
                raise condition.fault(0.0)
            if self._load_failure_count > failures_before:
                failed = EngineStartFailed(condition.reason, condition.retry_after_s)
                raise failed.telling(condition.told)
            await self._changed.wait()

    async def close(self) -> None:
        """Implement `Backend.close`."""
        healthy, closing = self.healthy(), self._close_requested.is_set()
        self._set_condition(_CLOSED)  # before the first wait, so that no new request enters
        self._close_requested.set()
        self._start_requested.set()
        if not self._serving:
            return
        if healthy:
            self._begin_shutdown()
        if healthy or closing:  # a second close waits for the first one's shutdown
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._waits.close_timeout_s):
                    await self._served.wait()
        self._kill()
        await self._served.wait()

    async def serve(self) -> None:
        """Implement `Backend.serve`."""
        assert not self._serving, "an engine is served once"
        if self._close_requested.is_set():
            return
        self._serving = True
        backoff = Backoff(self._waits.restart_delay_s_min, self._waits.restart_delay_s_max)
        clock = asyncio.get_running_loop().time
        retries = Retries("engine")
        try:
            await self._start_requested.wait()
            while (
                not self._close_requested.is_set()
                and self._condition.state is not EngineState.FAILED
            ):
                started_at_s = clock()
                self._set_condition(
                    EngineCondition(
                        EngineState.LOADING, 0.0, "process", self._load_time_s, "loading"
                    )
                )
                reason = "an unexpected error"
                with retries.survive(self._model.name):
                    reason = await self._run()
                self._lost(reason)
                if clock() - started_at_s > self._waits.stable_after_s:
                    backoff.reset()
                if (
                    self._condition.state is EngineState.RESTARTING
                    and not self._close_requested.is_set()
                ):
                    await self._pause(backoff.next_s())
            await self._close_requested.wait()
        finally:
            self._set_condition(_CLOSED)
            self._fail_waiting("the engine was closed")
            self._served.set()

    @abstractmethod
    async def _run(self) -> str:
        """Start the engine, set it READY and serve until it ends; return the reason of the end."""

    @abstractmethod
    def _begin_shutdown(self) -> None:
        """Ask the engine to end all sequences and then itself. Never blocks."""

    @abstractmethod
    def _kill(self) -> None:
        """End the engine now, so that `_run` returns."""

    @abstractmethod
    def _fail_waiting(self, reason: str) -> None:
        """Fail all waiting callers with a `_loss` each: the engine and its state are lost."""

    def _check_ready(self) -> None:
        """Raise EngineStartFailed if the engine has FAILED, EngineUnavailable unless READY."""
        condition = self.condition()
        if condition.state is not EngineState.READY:
            raise condition.fault(condition.retry_after_s)

    def _now_ready(self, loading_time_s: float, kernels: str = "") -> None:
        """Set the engine READY."""
        self._load_time_s = loading_time_s
        self._set_condition(
            EngineCondition(EngineState.READY, loading_fraction=1.0, kernels=kernels)
        )

    def _lost(self, reason: str) -> None:
        """Handle the end of the engine; set the condition RESTARTING unless it is FAILED."""
        if self._condition.state is EngineState.LOADING:
            self._load_failure_count += 1
        if self._condition.state is not EngineState.FAILED:
            self._set_condition(
                EngineCondition(
                    EngineState.RESTARTING,
                    retry_after_s=self._load_time_s,
                    reason=reason,
                    told=self.told_loss,
                )
            )
        if not self._close_requested.is_set():
            _log.error("engine %s: %s", self._model.name, reason)
        self._statistics = EngineStatistics()
        self._fail_waiting(reason)

    async def _pause(self, delay_s: float) -> None:
        """Wait before the next start; a close ends the wait."""
        retry_after_s = delay_s + self._load_time_s
        self._set_condition(replace(self._condition, retry_after_s=retry_after_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._close_requested.wait()

    @property
    def is_closing(self) -> bool:
        """True once `close` was called."""
        return self._close_requested.is_set()

    def loading(self, stage: str, fraction: float) -> None:
        """Report the progress of loading. fraction: 0 to 1."""
        left_s = self._load_time_s * (1 - fraction)
        self._set_condition(
            EngineCondition(EngineState.LOADING, fraction, stage, left_s, "loading")
        )

    def unreachable(self) -> None:
        """Stop taking requests: the engine has ended or is about to. `_run` returns the reason."""
        if self._condition.state is EngineState.READY:
            reason = "it has just been lost"
            self._set_condition(
                EngineCondition(
                    EngineState.RESTARTING, retry_after_s=self._load_time_s, reason=reason
                )
            )

    def stalled(self, reason: str) -> None:
        """Take no requests while the engine makes no progress. An empty reason: it does again."""
        if reason and not self._stall:
            _log.warning("engine %s makes no progress: %s", self._model.name, reason)
        elif self._stall and not reason:
            _log.warning("engine %s makes progress again", self._model.name)
        self._stall = reason

    def cannot_start(self, reason: str) -> None:
        """Set the condition FAILED, since a retry would not help."""
        self._load_failure_count += 1
        self._set_condition(EngineCondition(EngineState.FAILED, reason=reason, told=self.told_loss))

    def _loss(self, reason: str) -> EngineError:
        """Return the error for a caller that will not get an answer."""
        closed = self._condition.state is EngineState.CLOSED
        if closed:
            return EngineUnavailable("the engine was closed", retry_after_s=0.0)
        return EngineFailed(reason)

    def _set_condition(self, condition: EngineCondition) -> None:
        if self._condition.state is EngineState.CLOSED:
            return  # final
        self._condition = condition
        self._changed.set()
        self._changed = asyncio.Event()


class Worker:
    """Worker process of one backend; `run` starts, loads and supervises a new one each time."""

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
        """Start nothing; `run` does.

        on_ready: called with its message and the load time in seconds. on_message: called with each
        message outside the lifecycle; may raise ProtocolBroken. owes_answers: returns whether
        silence of the worker is a fault.
        """
        self._life = life
        self._kind = kind
        self._waits = waits
        self._on_ready = on_ready
        self._on_message = on_message
        self._owes_answers = owes_answers
        self.process: HostProcess | None = None  # while `run` has one
        self._began_at_s = -math.inf
        self._hung = False
        self._load_failure_count = 0
        self._watchdog = Watchdog(waits.step_timeout_s, self._kill_hanging, life.stalled)
        self.heard, self.pulse = self._watchdog.heard, self._watchdog.pulse

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None without one."""
        return None if self.process is None else self.process.pid

    def send(self, message: Message) -> None:
        """Queue a message for the worker, if there is one. Never blocks."""
        if self.process is not None:
            self.process.send(message)

    def kill(self) -> None:
        """Kill the worker, if there is one."""
        if self.process is not None:
            self.process.kill()

    async def run(self) -> str:
        """Start a worker, load the model and serve until it ends; return the reason of the end."""
        self._hung = False
        log_lines: list[str] = []
        reason = await self._run(log_lines)
        if self._life.is_closing or self._life.condition().state is not EngineState.LOADING:
            self._load_failure_count = 0
            return reason
        self._load_failure_count += 1
        if self._load_failure_count >= self._kind.load_failure_count_max:
            reason = f"loading failed {self._load_failure_count} times, last because {reason}"
            _log.error(
                "engine %s: %s; its log ends:\n%s",
                self._life.model.name,
                reason,
                "\n".join(log_lines) or "(empty)",
            )
            self._life.cannot_start(f"{reason}: see the log of the server")
        return reason

    async def _run(self, log_lines: list[str]) -> str:
        """Implement `run`, without counting. log_lines: gets the end of the worker's log."""
        try:
            async with self._kind.opener(self._kind.module, self._kind.environment) as process:
                if self._life.is_closing:
                    return "the engine was closed"  # during the start: `close` could not kill it
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
                    log_lines += process.log_lines(LOG_LINES)
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
                    case message:
                        self._on_message(message)

    async def _exit_reason(self, process: HostProcess) -> str:
        """Return the reason of the worker's end by its exit status."""
        condition = self._life.condition()
        if condition.state is EngineState.FAILED:
            return condition.reason
        await process.wait_gone(self._waits.close_timeout_s)
        if self._hung:
            return "the engine process hung and was killed"
        if process.exit_status == -signal.SIGKILL:
            return (
                "the engine process was killed by SIGKILL, probably by the system because it ran"
                " out of memory"
            )
        return f"the engine process exited with status {process.exit_status}"

    def _kill_hanging(self, silence_s: float) -> None:
        """Kill a worker that owes answers or shows no sign of life, as if it had crashed."""
        if self.process is not None and (self._owes_answers() or not self._watchdog.is_alive):
            _log.error(
                "engine %s: no report for %.0f s, killing the process",
                self._life.model.name,
                silence_s,
            )
            self._hung = True
            self.process.kill()
