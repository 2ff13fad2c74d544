"""The stack that is broken: two API processes with an engine each, a worker, an exporter, a broker, and PostgreSQL.

Whatever dies is started again at once, on the same ports and directories. What ends without having been killed is noted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from api.cli.connection import Connection
from api.cli.stack import Child, StackFailed, bootstrap, child_environment, ensure_receipt_key, is_serving
from api.core.settings import Settings
from api.fleet.fleet_file import model_names
from metering.receipts.signing import KEY_FILE
from metering.store import embedded_postgres
from metering.store.embedded_postgres import EmbeddedPostgres
from metering.store.migrations_runner import migrate
from metering.worker import worker_command

DEATH_TIMEOUT_S = 30.0  # children of a killed server notice within a second
CHILD_POLL_S = 0.01
PROC = Path("/proc")

# What has been committed must be there again after a crash of the server's processes, which fsync does not decide.
CRASH_SETTINGS = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "on", "max_connections": "200"}
API_COUNT = 2
READY_TIMEOUT_S = 120.0  # far above what a start takes on a busy machine
POLL_S = 0.05
RESTART_PAUSE_S = 0.2  # of a part that ended by itself: it may be waiting for another part

# Small slices and short lives: as many leases, expiries and recoveries as possible happen.
BOUNDS: Mapping[str, Any] = {"lease_slice_tokens": 16, "lease_margin_tokens": 8, "hold_expiry_s": 5.0, "recovery_interval_s": 0.5}
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "simulated": {"engine_device": "simulated", "simulated_time_scale": 0.5},
    "demo": {"engine_device": "cpu", "engine_thread_count": 1, "kv_cache_bytes": 64 << 20},
}


def parents() -> dict[int, int]:
    if PROC.is_dir():
        return {int(entry.name): parent for entry in PROC.iterdir() if entry.name.isdigit() and (parent := _parent_of(entry))}
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    return {int(pid): int(parent) for pid, parent, state in rows if state[0] not in "ZX"}


def children_of(pid: int) -> list[int]:
    return [child for child, parent in parents().items() if parent == pid]


def alive(pid: int) -> bool:
    if PROC.is_dir():
        return _parent_of(PROC / str(pid)) is not None
    return pid in parents()


def crash_postgres(server: EmbeddedPostgres) -> None:
    """As `kill -9` does to the postmaster; returns when its children have followed it. Does nothing if it does not run."""
    pid = server.pid
    if pid is None:
        return
    children = children_of(pid)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + DEATH_TIMEOUT_S
    while any(map(alive, children)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"children of the killed server {pid} are still there")
        time.sleep(CHILD_POLL_S)


def _parent_of(entry: Path) -> int | None:
    """The parent that a directory of /proc tells; None for a process that is gone or dead."""
    try:
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(parent)


LOGS, JOURNALS, EXPORT_FILE = "logs", "journal", "usage.jsonl"  # all processes share the journals' directory


@dataclass(slots=True)
class Part:
    """A process that is kept alive. up: whether it is ready. down_s: how long it took each time until it was again."""

    child: Child
    environment: Mapping[str, str]
    address: str = ""
    up: bool = True
    killed: bool = False
    down_s: list[float] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)

    @property
    def pid(self) -> int | None:
        process = self.child.process
        return process.pid if process is not None and process.returncode is None else None

    def kill(self) -> bool:
        """As `kill -9` does; whether there was anything to kill."""
        if (pid := self.pid) is None:
            return False
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    async def keep_alive(self) -> None:
        """Start it again whenever it ends, until cancelled."""
        while True:
            assert self.child.process is not None
            status = await self.child.process.wait()
            self.up = False
            if not self.killed:
                self.deaths.append(f"{self.child.name} ended with status {status}, unasked:\n{self.child.log_tail()}")
                await asyncio.sleep(RESTART_PAUSE_S)
            self.killed = False
            ended_at = time.monotonic()
            await self.child.start(self.environment)
            if self.address:
                await self.ready()
            self.up = self.pid is not None
            self.down_s.append(time.monotonic() - ended_at)

    async def ready(self) -> None:
        """Wait until it serves, or has ended."""
        while self.pid is not None:
            if await is_serving(self.address):
                return
            await asyncio.sleep(POLL_S)


@dataclass(slots=True)
class System:
    """All of it. `parts` are those that are processes of ours: `apis`, worker, exporter, and Redis if that is the broker."""

    directory: Path
    settings: Settings
    postgres: EmbeddedPostgres
    connection: Connection
    apis: list[Part]
    worker: Part
    exporter: Part
    redis: Part | None
    down_s: list[float] = field(default_factory=list)  # of PostgreSQL
    _restarting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def parts(self) -> list[Part]:
        return [*self.apis, self.worker, self.exporter, *([self.redis] if self.redis else [])]

    def engine_pid(self, index: int) -> int | None:
        """Of the engine host of an API process."""
        pid = self.apis[index].pid
        children = children_of(pid) if pid is not None else []
        return children[0] if children else None

    async def end_postgres(self, *, at_once: bool = False) -> bool:
        """Kill the database server and start it again; whether it ran. at_once: by a shutdown instead, which lets nobody finish."""
        if self.postgres.pid is None:
            return False
        async with self._restarting:
            began_at = time.monotonic()
            if at_once:
                await asyncio.to_thread(self.postgres.stop, "immediate")
            else:
                await asyncio.to_thread(crash_postgres, self.postgres)
            await asyncio.to_thread(embedded_postgres.start, self.postgres.data_dir, CRASH_SETTINGS)
            self.down_s.append(time.monotonic() - began_at)
        return True

    def lose_broker(self) -> None:
        """Every message that waits, and the broker itself."""
        if self.redis is not None:
            self.redis.kill()
        else:
            shutil.rmtree(self.directory / "broker", ignore_errors=True)

    async def all_ready(self) -> None:
        """Wait until every API process serves and the database is there. Raises: TimeoutError."""
        async with asyncio.timeout(READY_TIMEOUT_S), self._restarting:
            for api in self.apis:
                while True:
                    await api.ready()
                    if api.pid is not None:
                        break
                    await asyncio.sleep(POLL_S)


def free_port() -> int:
    """A port that nobody listens on now, and that one process after the other may listen on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def broker(directory: Path) -> Part:
    """Redis on a socket in the directory, remembering nothing. Raises: StackFailed if it is not installed."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise StackFailed("redis-server is not installed: leave --redis away, or install it")
    socket_path = str(directory / "redis.sock")
    command = [binary, "--port", "0", "--unixsocket", socket_path, "--save", "", "--dir", str(directory)]
    return Part(Child("Redis", command, directory / LOGS / "redis.log"), dict(os.environ))


def api_part(directory: Path, index: int, settings: Settings, environment: Mapping[str, str]) -> Part:
    """An API process with its own home, and the journals of all."""
    home = directory / f"api-{index}"
    home.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (home / "journal").symlink_to(directory / JOURNALS)
    address = f"127.0.0.1:{free_port()}"
    own = {"WEIR_HOME": str(home), "WEIR_LISTEN": address, "WEIR_OPENAI_LISTEN": "off"}
    log = directory / LOGS / f"api-{index}.log"
    return Part(Child(f"api process {index}", [sys.executable, "-m", "api"], log), {**environment, **own}, address)


@contextlib.asynccontextmanager
async def running_system(directory: Path, settings: Settings, *, with_redis: bool) -> AsyncIterator[System]:
    """Start everything in a directory, and keep it alive for the block.

    settings: of the API processes, but for database, home and address. Raises: StackFailed, PostgresNotStarted.
    """
    for name in (LOGS, JOURNALS):
        (directory / name).mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as cleanup:
        postgres = await asyncio.to_thread(embedded_postgres.start, directory / "postgres", CRASH_SETTINGS)
        cleanup.push_async_callback(asyncio.to_thread, postgres.stop)
        await asyncio.to_thread(migrate, postgres.url)
        settings = replace(settings, database_url=postgres.url, home=directory)
        ensure_receipt_key(settings)
        connection = await bootstrap(postgres.url, directory, *model_names(settings))
        redis = broker(directory) if with_redis else None
        environment = {**child_environment(settings), "WEIR_RECEIPT_KEY_FILE": str(directory / KEY_FILE)}
        environment |= {"WEIR_EXPORT": "file", "WEIR_EXPORT_FILE": str(directory / EXPORT_FILE)}
        if redis is not None:
            environment["WEIR_BROKER_URL"] = f"redis+socket://{directory / 'redis.sock'}"
        system = System(
            directory,
            settings,
            postgres,
            connection,
            [api_part(directory, index, settings, environment) for index in range(API_COUNT)],
            Part(Child("worker", worker_command(), directory / LOGS / "worker.log"), environment),
            Part(Child("exporter", [sys.executable, "-m", "api.chaos.exporter"], directory / LOGS / "exporter.log"), environment),
            redis,
        )
        for part in system.parts:
            await part.child.start(part.environment)
            cleanup.push_async_callback(part.child.stop)
        await system.all_ready()
        async with asyncio.TaskGroup() as tasks:
            keepers = [tasks.create_task(part.keep_alive(), name=part.child.name) for part in system.parts]
            try:
                yield system
            finally:
                for keeper in keepers:
                    keeper.cancel()
