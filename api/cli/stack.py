"""All of Weir on one machine: PostgreSQL, api server with its engines, Celery worker and beat.

Only the settings differ from a deployment on many machines, never the code path. A process that dies is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from api.cli.connection import Connection
from api.cli.local import HomeOption, bootstrap, clear_failures, ensure_receipt_key, open_sessions, read_settings
from api.cli.render import fail
from api.core.endpoint import forget_endpoint, make_private, read_endpoint
from api.core.settings import Settings
from api.fleet.fleet_file import model_names
from common.backoff import Backoff
from metering.core.errors import InvalidValue, MeteringError
from metering.export.export_settings import export_settings, webhook_settings
from metering.store import embedded_postgres
from metering.store.db import Sessions
from metering.store.migrations_runner import migrate
from metering.worker import READY_FILE, worker_command

Result = TypeVar("Result")
READY_TIMEOUT_S = 300.0  # a large checkpoint from a cold disk
STOP_TIMEOUT_S = 60.0  # the drain time of the api server and a task of the worker
RESTART_DELAY_S_MIN = 0.5
RESTART_DELAY_S_MAX = 30.0
STABLE_AFTER_S = 60.0  # of life, after which a process that does not tell when it is ready counts as one that was
READY_POLL_S = 0.1
LOG_TAIL_LINES = 20
WORKER_READY = "worker.pid"  # in the home directory
Report = Callable[[str], None]


def run(home: HomeOption, work: Callable[[Sessions], Awaitable[Result]]) -> Result:
    """Do the work on the database of the settings; errors in one line."""

    async def connected() -> Result:
        with local_database(home) as url:
            async with open_sessions(url) as sessions:
                return await work(sessions)

    with clear_failures(), domain_errors():
        return asyncio.run(connected())


@contextlib.contextmanager
def domain_errors() -> Iterator[None]:
    """Refusals of metering, without a traceback."""
    try:
        yield
    except MeteringError as error:
        fail(str(error))


@contextlib.contextmanager
def local_database(home: HomeOption) -> Iterator[str]:
    """URL of the database of the settings; the embedded one is started for the block, if it does not run."""
    settings = read_settings(home)
    data_dir = settings.home / "postgres"
    if settings.database_url:
        yield settings.database_url
        return
    if not data_dir.exists():
        fail(f"there is no database: set WEIR_DATABASE_URL, or start `weir up` once ({data_dir} is not there)", 2)
    ran = (data_dir / "postmaster.pid").exists()
    server = embedded_postgres.start(data_dir)
    try:
        yield server.url
    finally:
        if not ran:
            server.stop()


class StackFailed(Exception):
    """A part of the stack did not come up; the message says which, and ends with what it logged."""


@dataclass(slots=True)
class Child:
    """One process of ours: its command, and where its output goes."""

    name: str
    command: Sequence[str]
    log_path: Path
    ready_pid: Callable[[], int | None] = lambda: None  # the process that has said last that it is ready
    process: asyncio.subprocess.Process | None = None

    async def start(self, environment: Mapping[str, str]) -> None:
        """Start it in a session of its own, so that Ctrl-C at the terminal reaches us first."""
        with open_log(self.log_path) as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    async def stop(self) -> None:
        """Ask it to end, then make it."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()

    async def wait(self) -> tuple[int, bool]:
        """Wait until it ends: its status, and whether it was ready before."""
        assert self.process is not None
        started_at, ready = time.monotonic(), False
        while not ready:
            try:
                status = await asyncio.wait_for(self.process.wait(), READY_POLL_S)
                return status, self._is_ready(started_at)
            except TimeoutError:
                ready = self._is_ready(started_at)
        return await self.process.wait(), True

    def _is_ready(self, started_at: float) -> bool:
        assert self.process is not None
        return self.ready_pid() == self.process.pid or time.monotonic() - started_at > STABLE_AFTER_S

    def log_tail(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


class Stack:
    """A running stack. `connection` tells how to reach it."""

    def __init__(self, connection: Connection, children: Sequence[Child], environment: Mapping[str, str]) -> None:
        self.connection = connection
        self.children = children
        self._environment = environment

    async def supervise(self, report: Report) -> None:
        """Start children again when they die, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for child in self.children:
                tasks.create_task(self._keep_alive(child, report), name=f"keep {child.name} alive")

    async def _keep_alive(self, child: Child, report: Report) -> None:
        """Start it again at once if it was ready before it died; else after a delay, which doubles each time."""
        backoff = Backoff(RESTART_DELAY_S_MIN, RESTART_DELAY_S_MAX)
        while True:
            status, was_ready = await child.wait()
            if was_ready:
                backoff.reset()
                report(f"{child.name} ended with status {status}; starting it again (log: {child.log_path})")
            else:
                delay_s = backoff.next_s()
                report(
                    f"{child.name} ended with status {status} before it was ready; starting it again in {delay_s:g} s "
                    f"(log: {child.log_path})"
                )
                await asyncio.sleep(delay_s)
            await child.start(self._environment)


@contextlib.asynccontextmanager
async def run_stack(settings: Settings, report: Report) -> AsyncIterator[Stack]:
    """Start everything, hand it to the block when it takes requests, and stop it afterwards.

    settings: with an empty `database_url` PostgreSQL is started from the wheel, under `home`. Raises: StackFailed,
    PostgresNotStarted.
    """
    home = settings.home
    make_private(home)
    make_private(home / "logs")
    async with contextlib.AsyncExitStack() as cleanup:
        cleanup.enter_context(sole_stack(home))
        if not settings.database_url:
            report("Starting PostgreSQL")
            server = await asyncio.to_thread(embedded_postgres.start, home / "postgres")
            cleanup.push_async_callback(asyncio.to_thread, server.stop)
            settings = replace(settings, database_url=server.url)
        report("Preparing the database")
        await asyncio.to_thread(migrate, settings.database_url)
        ensure_receipt_key(settings)
        connection = await bootstrap(settings.database_url, home, *model_names(settings))
        environment = child_environment(settings) | {READY_FILE: str(home / WORKER_READY)}
        api = Child("api server", [sys.executable, "-m", "api"], home / "logs" / "api.log", lambda: serving_pid(home))
        worker = Child("billing worker", worker_command(), home / "logs" / "worker.log", lambda: written_pid(home / WORKER_READY))
        children = [api, worker, *optional_children(environment, home)]
        forget_endpoint(home)
        for child in children:
            report(f"Starting the {child.name}")
            await child.start(environment)
            cleanup.push_async_callback(child.stop)
        report("Loading the model")
        connection = replace(connection, address=await wait_until_serving(home, api))
        connection.write(home)
        yield Stack(connection, children, environment)


@contextlib.contextmanager
def sole_stack(home: Path) -> Iterator[None]:
    """Nobody else runs a stack in this directory during the block. Raises: StackFailed.

    A second one would start a second worker, and stop the first one's PostgreSQL when it ends. The lock goes with its process,
    however that ends, and no child has it.
    """
    with (home / ".up.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackFailed(
                f"`weir up` runs in {home} already: use it from other terminals, stop it with Ctrl-C where it runs, "
                "or give another directory with --home and another port with --listen"
            ) from None
        yield


def open_log(path: Path) -> IO[bytes]:
    """The end of a log that nobody else reads."""
    log = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
    os.fchmod(log.fileno(), 0o600)  # an earlier version may have made it
    return log


def serving_pid(home: Path) -> int | None:
    """The process that has told last that it takes requests; None if the last to tell does not."""
    told = read_endpoint(home)
    return told.pid if told.serving else None


def written_pid(path: Path) -> int | None:
    """The process id in a file; None if there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def optional_children(environment: Mapping[str, str], home: Path) -> list[Child]:
    """The endpoint for Stripe's events, where its secret is set. Raises: StackFailed for export settings that cannot be."""
    try:
        export_settings(environment)
        if webhook_settings(environment) is None:
            return []
    except InvalidValue as error:
        raise StackFailed(str(error)) from error
    command = [sys.executable, "-m", "api.cli.main", "stripe", "webhooks"]
    return [Child("endpoint for Stripe's events", command, home / "logs" / "webhooks.log")]


def child_environment(settings: Settings) -> dict[str, str]:
    """The environment that makes a child process read these settings."""
    return {**os.environ, **settings.to_environment()}


async def wait_until_serving(home: Path, api: Child) -> str:
    """Wait for the server's own word that it takes requests; its address. Raises: StackFailed."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if api.process is None or api.process.returncode is not None:
            raise StackFailed(f"the api server did not start:\n{api.log_tail()}")
        if (told := read_endpoint(home)).serving:
            return told.address
        await asyncio.sleep(0.05)
    raise StackFailed(f"the api server is not ready after {READY_TIMEOUT_S:.0f} s:\n{api.log_tail()}")


async def is_serving(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = await check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
