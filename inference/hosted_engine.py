"""An engine in a child process as the API process sees it: started, watched, and started again.

For every backend that is spoken to by `host_protocol.py`; what differs is in a `HostKind`. Holds no model and imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import assert_never

from inference.engine import EngineCondition, EngineState, EngineStatistics, ModelInfo
from inference.engine_life import EngineLife
from inference.errors import EngineError, EngineFailed, EngineOverloaded, RequestImpossible
from inference.host_process import HostKind, HostProcess, HostWaits, open_host
from inference.host_protocol import (
    CancelSequence,
    Event,
    LoadFailed,
    Loading,
    ProtocolBroken,
    Ready,
    RefusedEvent,
    Shutdown,
    StepReport,
    ToParent,
    sequence_event,
    start_message,
)
from inference.kv_event_index import KvCacheChange
from inference.limits import EngineLimits
from inference.prefix_hint import PrefixHint
from inference.sequence_stream import BufferedStream
from inference.watchdog import Watchdog

_log = logging.getLogger("weir.inference.engine")


class HostedEngine(EngineLife):
    """One model in one child process. See `Engine` for the contract."""

    def __init__(self, model: ModelInfo, limits: EngineLimits, waits: HostWaits, kind: HostKind) -> None:
        """Starts nothing."""
        super().__init__(replace(model, continues_output=True), limits, waits, kind.block_tokens)
        self._settings = waits
        self._kind = kind
        self._host: HostProcess | None = None
        self._began_at_s = 0.0
        self._watchdog = Watchdog(waits.step_timeout_s, self._kill_hanging_host)

    @property
    def host_pid(self) -> int | None:
        """The child's process id, for operators and tests; None while there is none."""
        return None if self._host is None else self._host.pid

    def _reachable(self) -> bool:
        return self._host is not None

    def _submit(self, stream: BufferedStream) -> None:
        assert self._host is not None, "the engine is ready"
        if len(self._streams) == 1:
            self._watchdog.heard()  # an idle host had no reason to report
        self._host.send(start_message(stream.number, stream.request))

    def _send_cancel(self, stream: BufferedStream) -> None:
        if self._host is not None:
            self._host.send(CancelSequence(stream.number))

    def _say_farewell(self) -> None:
        if self._host is not None:
            self._host.send(Shutdown())

    def _end_at_once(self) -> None:
        if self._host is not None:
            self._host.kill()

    async def _run(self) -> str:
        """One life of a child: start, load, serve, until it is gone."""
        try:
            async with open_host(self._kind.module, self._kind.environment) as host:
                if self._close_requested.is_set():
                    return "the engine was closed"  # while the process started; nobody would kill it later
                self._host = host
                try:
                    await self._load(host)
                    while self._condition.state is not EngineState.FAILED and (message := await host.receive()) is not None:
                        self._handle(message)
                    return await self._exit_reason(host)
                except TimeoutError:
                    return f"loading took more than {self._settings.load_timeout_s:.0f} s"
                except ProtocolBroken as error:
                    return f"the engine process broke the protocol: {error}"
                finally:
                    self._host = None
                    self._watchdog.disarm()
        except OSError as error:
            return f"the engine process could not be started: {error}"

    async def _load(self, host: HostProcess) -> None:
        self._began_at_s = asyncio.get_running_loop().time()
        host.send(self._kind.load)
        async with asyncio.timeout(self._settings.load_timeout_s):
            while self._condition.state is EngineState.LOADING:
                message = await host.receive()
                if message is None:
                    return
                self._handle(message)

    async def _exit_reason(self, host: HostProcess) -> str:
        """Why the child is gone, as far as its exit status tells."""
        if self._condition.state is EngineState.FAILED:
            return self._condition.reason
        await host.wait_gone(self._settings.close_timeout_s)
        return f"the engine process ended with status {host.exit_status}"

    def _handle(self, message: ToParent) -> None:
        match message:
            case StepReport():
                self._watchdog.heard()
                self._statistics = EngineStatistics(*message.statistics)
                for event in message.events:
                    self._dispatch(event)
            case Loading():
                self._set_condition(
                    EngineCondition(
                        EngineState.LOADING, message.fraction, message.stage, self._load_time_s * (1 - message.fraction), "loading"
                    )
                )
            case Ready():
                self._hint = PrefixHint(message.kv_block_count, self._block_tokens)
                self._ready(message.kv_block_count, asyncio.get_running_loop().time() - self._began_at_s)
                self._watchdog.arm()
            case LoadFailed():
                self._cannot_start(message.message)
            case KvCacheChange():
                pass  # of a backend that does not tell whose blocks they are
            case _:
                assert_never(message)

    def _dispatch(self, event: Event) -> None:
        stream = self._streams.get(event.number)
        if stream is None:
            return  # its caller has left
        if isinstance(event, RefusedEvent):
            refused: EngineError = RequestImpossible(event.message, event.field)
            if event.failed:
                refused = EngineFailed(event.message)
            elif event.overloaded:
                refused = EngineOverloaded(event.message, self._overload_wait_s())
            stream.fail(refused)
            return
        self._take(stream, sequence_event(event))

    def _kill_hanging_host(self, silence_s: float) -> None:
        """A host that owes events and sends none is killed; its end is then handled like any other crash."""
        if self._host is not None and any(not stream.ended for stream in self._streams.values()):
            _log.error("engine %s: no report for %.0f s, killing the process", self._model.name, silence_s)
            self._host.kill()
