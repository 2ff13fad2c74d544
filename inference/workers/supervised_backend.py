"""Lifecycle of backends: start, supervision, restart, close.

Each kind of backend defines its requests and answers. Everything runs on the caller's event loop;
only `serve` runs in the background, as a task of the caller's `TaskGroup`. Holds no model and
imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Protocol

from common.backoff import Backoff
from common.incidents import Retries
from inference.engine import EngineCondition, EngineState, EngineStatistics, ModelInfo
from inference.errors import EngineError, EngineFailed, EngineStartFailed, EngineUnavailable

# Python looks up a member of an enum each time in a function of `enum`.
READY = EngineState.READY
_CLOSED = EngineCondition(EngineState.CLOSED, reason="closed")
_log = logging.getLogger("weir.inference.workers")


class RestartPolicy(Protocol):
    """Timeouts and delays of a backend in seconds; part of its settings.

    When the engine is closed, running sequences have `close_timeout_s` to end. The first restart
    waits `restart_delay_s_min`; each failed one doubles the delay, and `stable_after_s` of service
    resets it.
    """

    @property
    def close_timeout_s(self) -> float: ...
    @property
    def restart_delay_s_min(self) -> float: ...
    @property
    def restart_delay_s_max(self) -> float: ...
    @property
    def stable_after_s(self) -> float: ...


class SupervisedBackend(ABC):
    """Backend that is restarted when it is lost. Implements `Backend`.

    `loss_message` is sent to clients instead of the reason of a loss, see `EngineError`.
    """

    loss_message = ""

    def __init__(self, model: ModelInfo, waits: RestartPolicy) -> None:
        """Create the backend without starting anything; `serve` runs it."""
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
        self._ready_at_s: float | None = None  # when the engine that runs became READY
        self._stall = ""  # why a READY engine takes no requests for the moment; empty if it does

    @property
    def model(self) -> ModelInfo:
        """Implement `Backend.model`."""
        return self._model

    def healthy(self) -> bool:
        """Implement `Backend.healthy`."""
        return self._condition.state is READY and not self._stall

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
                raise failed.with_client_message(condition.client_message)
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
                self._ready_at_s = None
                self._set_condition(
                    EngineCondition(
                        EngineState.LOADING, 0.0, "process", self._load_time_s, "loading"
                    )
                )
                reason = "an unexpected error"
                with retries.survive(self._model.name):
                    reason = await self._run()
                self._lost(reason)
                ready_at_s = self._ready_at_s
                if ready_at_s is not None and clock() - ready_at_s > self._waits.stable_after_s:
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
        """Start the engine, set it READY, and serve until it ends; return the reason of its end."""

    @abstractmethod
    def _begin_shutdown(self) -> None:
        """Ask the engine to end all sequences, and then itself. Never blocks."""

    @abstractmethod
    def _kill(self) -> None:
        """End the engine at once, so that `_run` returns."""

    @abstractmethod
    def _fail_waiting(self, reason: str) -> None:
        """Fail every waiting caller with a `_loss`, since the engine and its state are lost."""

    def _check_ready(self) -> None:
        """Raise EngineStartFailed if the engine has FAILED, or EngineUnavailable if not READY."""
        condition = self.condition()
        if condition.state is not EngineState.READY:
            raise condition.fault(condition.retry_after_s)

    def _now_ready(self, loading_time_s: float, kernels: str = "") -> None:
        """Set the engine READY, and record its load time."""
        self._load_time_s = loading_time_s
        self._ready_at_s = asyncio.get_running_loop().time()
        self._set_condition(
            EngineCondition(EngineState.READY, loading_fraction=1.0, kernels=kernels)
        )

    def _lost(self, reason: str) -> None:
        """Handle the end of the engine: set the condition RESTARTING, unless it is FAILED."""
        if self._condition.state is EngineState.LOADING:
            self._load_failure_count += 1
        if self._condition.state is not EngineState.FAILED:
            self._set_condition(
                EngineCondition(
                    EngineState.RESTARTING,
                    retry_after_s=self._load_time_s,
                    reason=reason,
                    client_message=self.loss_message,
                )
            )
        if not self._close_requested.is_set():
            _log.error("engine %s: %s", self._model.name, reason)
        self._statistics = EngineStatistics()
        self._fail_waiting(reason)

    async def _pause(self, delay_s: float) -> None:
        """Wait before the next start. Closing the backend ends the wait."""
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
        """Report the progress of loading in a stage, as a fraction from 0 to 1."""
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
        """Take no requests while the engine makes no progress. An empty reason ends the stall."""
        if reason and not self._stall:
            _log.warning("engine %s makes no progress: %s", self._model.name, reason)
        elif self._stall and not reason:
            _log.warning("engine %s makes progress again", self._model.name)
        self._stall = reason

    def cannot_start(self, reason: str) -> None:
        """Set the condition FAILED, since a retry would not help."""
        self._load_failure_count += 1
        self._set_condition(
            EngineCondition(EngineState.FAILED, reason=reason, client_message=self.loss_message)
        )

    def _loss(self, reason: str) -> EngineError:
        """Build the error for a caller whose request is lost with the engine."""
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
