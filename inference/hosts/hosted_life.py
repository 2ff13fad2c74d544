"""A model in a child process, as the API process sees its life: started, loaded, watched, and started again.

For every backend that is spoken to by `host_protocol.py`; what differs is in a `HostKind`. Holds no model and imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from abc import abstractmethod

from inference.engine import EngineCondition, EngineState, ModelInfo
from inference.hosts.backend_life import BackendLife
from inference.hosts.host_process import HostKind, HostProcess, HostWaits
from inference.hosts.host_protocol import LoadFailed, Loading, ProtocolBroken, Ready, Shutdown, ToParent
from inference.hosts.watchdog import Watchdog

_log = logging.getLogger("weir.inference.engine")


class HostedLife(BackendLife):
    """One model in one child process. A class that has this among its bases sets `_kind` before it calls `__init__`."""

    _kind: HostKind

    def __init__(self, model: ModelInfo, waits: HostWaits) -> None:
        """Starts nothing."""
        super().__init__(model, waits)
        self._settings = waits
        self._host: HostProcess | None = None
        self._began_at_s = -math.inf
        self._hung = False
        self._watchdog = Watchdog(waits.step_timeout_s, self._kill_hanging_host)

    @property
    def host_pid(self) -> int | None:
        """The child's process id, for operators and tests; None while there is none."""
        return None if self._host is None else self._host.pid

    @abstractmethod
    def _host_ready(self, message: Ready, loading_time_s: float) -> None:
        """The child takes requests."""

    @abstractmethod
    def _receive(self, message: ToParent) -> None:
        """What the child says that is not about its life. Raises: ProtocolBroken."""

    @abstractmethod
    def _owes_answers(self) -> bool:
        """Whether the child's silence would be a fault."""

    def _reachable(self) -> bool:
        return self._host is not None

    def _say_farewell(self) -> None:
        if self._host is not None:
            self._host.send(Shutdown())

    def _end_at_once(self) -> None:
        if self._host is not None:
            self._host.kill()

    async def _run(self) -> str:
        """One life of a child: start, load, serve, until it is gone."""
        self._hung = False
        try:
            async with self._kind.opener(self._kind.module, self._kind.environment) as host:
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
        if self._hung:
            return "the engine process hung, and was ended"
        if host.exit_status == -signal.SIGKILL:
            return "the engine process was killed: the system ends so what takes more memory than there is"
        return f"the engine process ended with status {host.exit_status}"

    def _handle(self, message: ToParent) -> None:
        match message:
            case Loading():
                left_s = self._load_time_s * (1 - message.fraction)
                self._set_condition(EngineCondition(EngineState.LOADING, message.fraction, message.stage, left_s, "loading"))
            case Ready():
                self._host_ready(message, asyncio.get_running_loop().time() - self._began_at_s)
                self._watchdog.arm()
            case LoadFailed():
                self._cannot_start(message.message)
            case _:
                self._receive(message)

    def _kill_hanging_host(self, silence_s: float) -> None:
        """A host that owes events and sends none is killed; its end is then handled like any other crash."""
        if self._host is not None and self._owes_answers():
            _log.error("engine %s: no report for %.0f s, killing the process", self._model.name, silence_s)
            self._hung = True
            self._host.kill()
