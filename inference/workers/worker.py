"""Engine worker of a backend, and its watchdog.

The process of a worker is started, loaded and supervised anew after each loss.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from inference.engine import EngineState
from inference.workers.process import COMMON_MESSAGES, WorkerOpener, WorkerProcess, open_worker
from inference.workers.protocol import (
    Joined,
    LoadFailed,
    Loading,
    Message,
    MessageDecoder,
    ProtocolBroken,
    Pulse,
    Ready,
)
from inference.workers.supervised_backend import RestartPolicy, SupervisedBackend

LOG_LINES = 20  # in the report of a load that is given up
_log = logging.getLogger("weir.inference.workers")
RETRY_S = 0.02  # after a worker that ended as this process connected to it
WATCH_INTERVAL_S = 0.5  # between two polls of a watchdog
POLL_LATE_S = 0.5  # of a poll that judges nothing
PULSE_LOST_S = 3.0  # three pulses
# A stalled step is longer than both. Steps aim at 0.1 s; a long prefill on a slow CPU, or another
# process on its cores, makes one ten times longer than its predecessors at most.
STEP_S_MIN, STEP_FACTOR = 5.0, 10.0


def overdue(pulse: Pulse) -> str:
    """Explain why the current step takes too long; empty if it does not."""
    if pulse.step_s <= max(STEP_S_MIN, STEP_FACTOR * pulse.usual_s):
        return ""
    return f"a step has run for {pulse.step_s:.0f} s, the longest recent one {pulse.usual_s:.2g} s"


class Watchdog:
    """Watchdog timer of a worker. Used on one event loop.

    A worker is stalled, until its next progress, if its pulse is absent for some seconds, or if a
    step takes many times longer than usual. It hangs if it is silent beyond the timeout. A worker
    without a pulse can only be found hanging.
    """

    def __init__(
        self,
        timeout_s: float,
        on_silence: Callable[[float], None],
        on_stall: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Create the watchdog disarmed.

        After `timeout_s` seconds of silence, `on_silence` is called with the silence in seconds and
        decides what to do. `on_stall` is called with the reason of a stall, and with an empty text
        once it is over.
        """
        self._timeout_s = timeout_s
        self._on_silence, self._on_stall = on_silence, on_stall
        self._heard_at_s = -math.inf
        self._pulse: tuple[float, Pulse] | None = None  # the last one, and when it came
        self._timer: asyncio.TimerHandle | None = None
        self._poll_every_s = min(timeout_s / 4, WATCH_INTERVAL_S)

    def heard(self) -> None:
        """Record a sign of life."""
        self._heard_at_s = asyncio.get_running_loop().time()

    def pulse(self, pulse: Pulse) -> None:
        """Record a pulse, from which stalls and silence are measured."""
        self._pulse = asyncio.get_running_loop().time(), pulse

    @property
    def is_alive(self) -> bool:
        """True unless pulses have been absent for the timeout."""
        limit_s = self._timeout_s + PULSE_LOST_S
        return self._pulse is None or self._now_s() - self._pulse[0] <= limit_s

    def arm(self) -> None:
        """Start watching; counts as a sign of life."""
        self.heard()
        self._schedule()

    def disarm(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._pulse = None
        self._on_stall("")

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._poll_every_s, self._poll)

    def _poll(self) -> None:
        assert self._timer is not None, "only an armed watchdog looks"
        now_s = self._now_s()
        # After a block of this loop, messages may wait that it has not read yet.
        if now_s - self._timer.when() < POLL_LATE_S:
            self._on_stall(self._stall(now_s))
            silence_s = now_s - self._heard_at_s
            if silence_s > self._timeout_s:
                self._on_silence(silence_s)
        self._schedule()

    def _stall(self, now_s: float) -> str:
        """Explain why the worker is stalled; empty if it is not."""
        if self._pulse is None:
            return ""
        pulse_at_s, pulse = self._pulse
        silence_s = now_s - max(pulse_at_s, self._heard_at_s)
        if silence_s > PULSE_LOST_S:
            return f"no sign of life for {silence_s:.0f} s"
        return overdue(pulse)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


class WorkerPolicy(RestartPolicy, Protocol):
    """Timeouts and delays of a backend in a worker process, in seconds; part of its settings.

    `load_timeout_s` limits the time from the worker's start until it takes sequences. The worker is
    killed after `step_timeout_s` without a report while sequences run.
    """

    @property
    def load_timeout_s(self) -> float: ...
    @property
    def step_timeout_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Kind of worker: module to run with its environment, first message, and message decoder.

    `block_tokens` is the number of tokens per block of its prefix cache. `opener` starts its
    processes. After `load_failure_count_max` consecutive failed loads, no other is tried.
    """

    module: str
    environment: Mapping[str, str]
    load: Message
    block_tokens: int = 1
    opener: WorkerOpener = open_worker
    decoder: MessageDecoder = COMMON_MESSAGES
    load_failure_count_max: float = math.inf


def _discard(message: Message) -> None:
    """Discard a message, since no process runs."""


class Worker:
    """Worker process of one backend. `run` starts, loads and supervises a new one each time."""

    def __init__(
        self,
        supervised: SupervisedBackend,
        kind: WorkerKind,
        waits: WorkerPolicy,
        *,
        on_ready: Callable[[Ready, float], None],
        on_message: Callable[[Message], None],
        owes_answers: Callable[[], bool],
    ) -> None:
        """Create the worker without starting a process, which `run` does.

        `on_ready` is called with the `Ready` message and the load time in seconds, `on_message`
        with each message outside the lifecycle; it may raise ProtocolBroken. `owes_answers` returns
        whether silence of the worker is a fault.
        """
        self._supervised = supervised
        self._kind = kind
        self._waits = waits
        self._on_ready = on_ready
        self._on_message = on_message
        self._owes_answers = owes_answers
        self.process: WorkerProcess | None = None  # while `run` has one
        # Queues a message for the process, if there is one. Never blocks.
        self.send: Callable[[Message], None] = _discard
        self._began_at_s = -math.inf
        self._hung = False
        self._load_failure_count = 0
        self._watchdog = Watchdog(waits.step_timeout_s, self._kill_hanging, supervised.stalled)
        self.heard, self.pulse = self._watchdog.heard, self._watchdog.pulse

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None without one."""
        return None if self.process is None else self.process.pid

    @property
    def is_shared(self) -> bool:
        """True while other processes can use the worker too."""
        return self.process is not None and self.process.is_shared

    def leave(self) -> None:
        """End the use of the worker at once, if there is one. If no other process uses it, it is
        killed.
        """
        if self.process is not None:
            self.process.leave()

    async def run(self) -> str:
        """Start a worker, load the model, and serve until it ends; return the reason of its end."""
        self._hung = False
        log_lines: list[str] = []
        while (reason := await self._run(log_lines)) is None:  # noqa: ASYNC110  # another process
            await asyncio.sleep(RETRY_S)
        if (
            self._supervised.is_closing
            or self._supervised.condition().state is not EngineState.LOADING
        ):
            self._load_failure_count = 0
            return reason
        self._load_failure_count += 1
        if self._load_failure_count >= self._kind.load_failure_count_max:
            reason = f"loading failed {self._load_failure_count} times, last because {reason}"
            _log.error(
                "engine %s: %s; its log ends:\n%s",
                self._supervised.model.name,
                reason,
                "\n".join(log_lines) or "(empty)",
            )
            self._supervised.cannot_start(f"{reason}: see the log of the server")
        return reason

    async def _run(self, log_lines: list[str]) -> str | None:
        """Implement `run` without counting. `log_lines` receives the end of the worker's log.

        Return None if the worker of another process ended as this one connected.
        """
        try:
            async with self._kind.opener(self._kind.module, self._kind.environment) as process:
                if self._supervised.is_closing:  # during the start: `close` could not end it
                    process.is_unneeded = True
                    return "the engine was closed"
                self.process, self.send = process, process.send
                try:
                    await self._load(process)
                    if process.is_joining and not self._supervised.is_closing:
                        return None
                    if self._supervised.condition().state is not EngineState.FAILED:
                        await process.follow(self._kind.decoder, self._on_message)
                    return await self._exit_reason(process)
                except TimeoutError:
                    process.kill()
                    return f"loading took more than {self._waits.load_timeout_s:.0f} s"
                except ProtocolBroken as error:
                    process.kill()
                    return f"the engine process broke the protocol: {error}"
                finally:
                    process.is_unneeded = self._is_unneeded()
                    log_lines += process.log_lines(LOG_LINES)
                    self.process, self.send = None, _discard
                    self._supervised.unreachable()
                    self._watchdog.disarm()
        except OSError as error:
            return f"the engine process could not be started: {error}"

    async def _load(self, process: WorkerProcess) -> None:
        self._began_at_s = asyncio.get_running_loop().time()
        process.send(self._kind.load)
        async with asyncio.timeout(self._waits.load_timeout_s):
            while self._supervised.condition().state is EngineState.LOADING:
                match await process.receive(self._kind.decoder):
                    case Joined() as joined:
                        process.joined(joined)
                    case Loading(stage=stage, fraction=fraction):
                        self._supervised.loading(stage, fraction)
                    case Ready() as ready:
                        self._on_ready(ready, asyncio.get_running_loop().time() - self._began_at_s)
                        self._watchdog.arm()
                    case LoadFailed(message=reason):
                        self._supervised.cannot_start(reason)
                    case None:
                        return
                    case message:
                        self._on_message(message)

    async def _exit_reason(self, process: WorkerProcess) -> str:
        """Explain the worker's end by its exit status."""
        condition = self._supervised.condition()
        if condition.state is EngineState.FAILED:
            return condition.reason
        process.is_unneeded = self._is_unneeded()
        await process.wait_gone(self._waits.close_timeout_s)
        if self._hung:
            return "the engine process hung and was killed"
        if process.exit_status == -signal.SIGKILL:
            return (
                "the engine process was killed by SIGKILL, probably by the system because it ran"
                " out of memory"
            )
        if process.exit_status is None:  # another process started it
            return "the engine process ended"
        return f"the engine process exited with status {process.exit_status}"

    def _is_unneeded(self) -> bool:
        failed = self._supervised.condition().state is EngineState.FAILED
        return self._supervised.is_closing or failed

    def _kill_hanging(self, silence_s: float) -> None:
        """Kill a worker that owes answers, or shows no sign of life, as if it had crashed."""
        if self.process is not None and (self._owes_answers() or not self._watchdog.is_alive):
            _log.error(
                "engine %s: no report for %.0f s, killing the process",
                self._supervised.model.name,
                silence_s,
            )
            self._hung = True
            self.process.kill()
