"""Launcher of kind `command`: scripts that start and stop servers anywhere.

A script gets the replica in `WEIR_REPLICA_ID`, `_NUMBER`, `_MODEL` and `_LIFETIME`. It may run
again for the same lifetime, so it must accept what it finds. Two scripts of one replica never run
together on one machine: the first keeps the lock of its folder even if the api process that started
it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from inference.adapters.remote_settings import Service, parse_target
from inference.launchers.children import AWAIT, Folder
from inference.launchers.launcher import LaunchedId, LaunchFailed, filled
from inference.launchers.readiness import is_ready, wait_ready

PLACEHOLDERS = frozenset({"number"})
POLL_S = 0.05
UNANSWERED_MAX, UNANSWERED_PAUSE_S = 3, 1.0  # a busy server may miss a connection


@dataclass(frozen=True, slots=True)
class CommandTerms:
    """Scripts, each a command line. Without `address`, `start` prints it as its last line; it must
    be of this `service`.

    `sleep` and `wake` are both there, or neither. Without `status`, a server runs while it accepts
    connections.
    """

    start: tuple[str, ...]
    stop: tuple[str, ...]
    sleep: tuple[str, ...] = ()
    wake: tuple[str, ...] = ()
    status: tuple[str, ...] = ()
    address: str = ""
    service: Service = Service.VLLM
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 60.0


class CommandLauncher:
    """Implement `Launcher` with scripts."""

    def __init__(self, terms: CommandTerms, directory: Path) -> None:
        """`directory` has locks and outputs of the scripts."""
        self._terms = terms
        self._directory = directory

    def expect(self, numbers: frozenset[int]) -> None:
        """Implement `Launcher.expect`: each replica is started by itself."""

    async def start(self, replica: LaunchedId) -> str:
        """Implement `Launcher.start`."""
        terms = self._terms
        output = await self._run("start", terms.start, replica, terms.start_timeout_s)
        address = filled(terms.address, {"number": replica.number}) or last_line(output)
        return await self._ready(address)

    async def wake(self, replica: LaunchedId, address: str) -> str:
        """Implement `Launcher.wake`."""
        await self._run("wake", self._terms.wake, replica, self._terms.start_timeout_s)
        return await self._ready(address)

    async def stop(self, replica: LaunchedId) -> None:
        """Implement `Launcher.stop`."""
        await self._run("stop", self._terms.stop, replica, self._terms.stop_timeout_s)

    async def sleep(self, replica: LaunchedId) -> None:
        """Implement `Launcher.sleep`."""
        await self._run("sleep", self._terms.sleep, replica, self._terms.stop_timeout_s)

    async def runs(self, replica: LaunchedId, address: str) -> bool:
        """Implement `Launcher.runs`. The script `status` says yes with exit code 0, no with 1."""
        if not self._terms.status:
            for _ in range(UNANSWERED_MAX):
                if await is_ready(parse_target(address)):
                    return True
                await asyncio.sleep(UNANSWERED_PAUSE_S)
            return False
        code, output = await self._code(self._terms.status, replica, self._terms.stop_timeout_s)
        if code not in (0, 1):
            raise LaunchFailed(f"status ended with {code}: {output}")
        return code == 0

    async def _ready(self, address: str) -> str:
        try:
            target = parse_target(address)
        except ValueError as error:
            raise LaunchFailed(f"start must print the server's address last: {error}") from error
        if target.service is not self._terms.service:
            raise LaunchFailed(f"{target}: must be {self._terms.service.value}://, see `service`")
        await wait_ready(target, self._terms.start_timeout_s, lambda: "")
        return address

    async def _run(
        self, name: str, script: tuple[str, ...], replica: LaunchedId, timeout_s: float
    ) -> str:
        """Run a script to its end; return its output. Raises: LaunchFailed."""
        if not script:
            raise LaunchFailed(f"the launcher has no command {name}")
        code, output = await self._code(script, replica, timeout_s)
        if code != 0:
            raise LaunchFailed(f"{name} ended with {code}: {output or 'no output'}")
        return output

    async def _code(
        self, script: tuple[str, ...], replica: LaunchedId, timeout_s: float
    ) -> tuple[int, str]:
        """Run a script to its end; return its exit code and the end of its output.

        Raises: LaunchFailed.
        """
        name = f"{quote(replica.served, safe='@')}-{replica.number}"
        folder = Folder(self._directory / name)
        words = [filled(word, {"number": replica.number}) for word in script]
        environment = dict(self._terms.environment) | replica.environment()
        try:
            folder.prepare()
            async with asyncio.timeout(timeout_s):
                async with locked(folder) as lock:
                    folder.spawn(lock, words, environment, AWAIT)
                code = await folder.exited()
                return code, folder.tail()
        except TimeoutError as error:
            folder.signal(signal.SIGKILL)
            raise LaunchFailed(f"{words[0]} did not end within {timeout_s:g} s") from error
        except OSError as error:
            raise LaunchFailed(f"{words[0]} cannot be run: {error}") from error


@contextlib.asynccontextmanager
async def locked(folder: Folder) -> AsyncIterator[int]:
    """Wait until no earlier script runs, and yield the lock."""
    while True:
        with folder.lock() as lock:
            if lock is not None:
                yield lock
                return
        await asyncio.sleep(POLL_S)


def last_line(output: str) -> str:
    """Return the last line of an output, as `Folder.tail` joins them."""
    return output.rpartition(" | ")[2].strip()
