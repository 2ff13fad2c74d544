"""Launcher of kind `process`: a command on this machine, such as `vllm serve`.

A server outlives the api process that started it, and is adopted by the next one: the lock of its
folder shows that it runs, and a file there has its port. See `children.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from inference.adapters.remote_settings import parse_target
from inference.launchers.children import Folder
from inference.launchers.launcher import LaunchedId, LaunchFailed, filled
from inference.launchers.readiness import wait_ready
from inference.launchers.vllm_sleep import SleepTerms, fall_asleep, wake_up

PLACEHOLDERS = frozenset({"number", "port", "second_port"})
POLL_S = 0.05
KILL_TIMEOUT_S = 10.0
ADOPT_TIMEOUT_S = 5.0  # for a child to write its process id


@dataclass(frozen=True, slots=True)
class ProcessTerms:
    """Command line, with placeholders in its words. `address` is where the server listens then.

    `stop_timeout_s` is the time between SIGTERM and SIGKILL.
    """

    command: tuple[str, ...]
    address: str
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 30.0
    sleep: SleepTerms | None = None


@dataclass(frozen=True, slots=True)
class _Started:
    """Server that was started in a folder: its lifetime, and its ports."""

    lifetime: str
    port: int
    second_port: int


class ProcessLauncher:
    """Implement `Launcher` with processes of this machine."""

    def __init__(self, terms: ProcessTerms, directory: Path) -> None:
        """`directory` has the folders of all replicas; all api processes share it."""
        self._terms = terms
        self._directory = directory

    def expect(self, numbers: frozenset[int]) -> None:
        """Implement `Launcher.expect`: each replica is started by itself."""

    async def start(self, replica: LaunchedId) -> str:
        """Implement `Launcher.start`."""
        folder = self._folder(replica)
        try:
            folder.prepare()
            started = await self._started(folder, replica)
        except OSError as error:
            raise LaunchFailed(f"{self._terms.command[0]} cannot be started: {error}") from error
        values = self._values(replica, started)
        address = filled(self._terms.address, values)
        target, timeout_s = parse_target(address), self._terms.start_timeout_s
        await wait_ready(target, timeout_s, lambda: self._fault(folder))
        return address

    async def wake(self, replica: LaunchedId, address: str) -> str:
        """Implement `Launcher.wake`."""
        found = self._of_lifetime(replica)
        if self._terms.sleep is None or found is None:
            raise LaunchFailed("it does not sleep")
        await wake_up(filled(self._terms.sleep.url, self._values(replica, found)))
        return address

    async def _started(self, folder: Folder, replica: LaunchedId) -> _Started:
        """Adopt the server that runs in the folder, or start one."""
        give_up_at_s = time.monotonic() + ADOPT_TIMEOUT_S
        while True:
            with folder.lock() as lock:
                if lock is not None:
                    started = _Started(replica.lifetime, *free_ports())
                    self._write(folder, started)
                    values = self._values(replica, started)
                    command = [filled(word, values) for word in self._terms.command]
                    environment = {
                        name: filled(value, values)
                        for name, value in self._terms.environment.items()
                    }
                    folder.spawn(lock, command, environment | replica.environment())
                    return started
            found = self._read(folder)
            if found is not None and folder.pid() is not None:
                if found.lifetime == replica.lifetime:
                    return found
                await self._end(folder)  # of an earlier lifetime
            elif time.monotonic() > give_up_at_s:
                raise LaunchFailed(
                    f"a process that is not known keeps {folder.path} locked: end it first"
                )
            await asyncio.sleep(POLL_S)

    async def stop(self, replica: LaunchedId) -> None:
        """Implement `Launcher.stop`."""
        if self._of_lifetime(replica) is not None:
            await self._end(self._folder(replica))

    async def sleep(self, replica: LaunchedId) -> None:
        """Implement `Launcher.sleep`."""
        found = self._of_lifetime(replica)
        if self._terms.sleep is None or found is None:
            raise LaunchFailed("it cannot sleep")
        url = filled(self._terms.sleep.url, self._values(replica, found))
        await fall_asleep(url, self._terms.sleep.level)

    async def runs(self, replica: LaunchedId, address: str) -> bool:
        """Implement `Launcher.runs`."""
        return self._of_lifetime(replica) is not None and self._folder(replica).is_running()

    async def _end(self, folder: Folder) -> None:
        """End the server of a folder, and return when its lock is free. Raises: LaunchFailed."""
        for number, timeout_s in (
            (signal.SIGTERM, self._terms.stop_timeout_s),
            (signal.SIGKILL, KILL_TIMEOUT_S),
        ):
            folder.signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await folder.ended()
                    return
        raise LaunchFailed(
            f"the server in {folder.path} does not end, or has left a process in another session"
        )

    def _fault(self, folder: Folder) -> str:
        """Return why a server that was started does not run any more; empty if it runs."""
        if folder.is_running():
            return ""
        code = folder.exit_code()
        status = "" if code is None else f" with status {code}"
        return f"the server ended{status} before it was ready: {folder.tail() or 'no output'}"

    def _folder(self, replica: LaunchedId) -> Folder:
        return Folder(self._directory / f"{quote(replica.served, safe='@')}-{replica.number}")

    def _values(self, replica: LaunchedId, started: _Started) -> dict[str, object]:
        return {
            "number": replica.number,
            "port": started.port,
            "second_port": started.second_port,
        }

    def _of_lifetime(self, replica: LaunchedId) -> _Started | None:
        """Return the server of this lifetime; None if the last one had another."""
        found = self._read(self._folder(replica))
        return found if found is not None and found.lifetime == replica.lifetime else None

    def _write(self, folder: Folder, started: _Started) -> None:
        """Write the server that is about to be started, at once or not at all."""
        text = json.dumps([started.lifetime, started.port, started.second_port])
        new = folder.path / "started.new"
        new.write_text(text)
        os.replace(new, folder.path / "started")

    def _read(self, folder: Folder) -> _Started | None:
        try:
            lifetime, port, second_port = json.loads((folder.path / "started").read_text())
            return _Started(str(lifetime), int(port), int(second_port))
        except (OSError, ValueError, TypeError):
            return None


def free_ports() -> tuple[int, int]:
    """Return two ports of the loopback that no program listens on now."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]
