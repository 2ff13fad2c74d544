"""Processes of `weir up`, and code that the server's commands share.

`weir up` runs PostgreSQL, api server with its engines, Celery worker and beat on one machine; only
the settings differ from a deployment on many machines, not the code path. A process that dies is
restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeVar

import psycopg
import sqlalchemy.exc
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from weir_cli.connection import CONNECTION_FILE, Connection, ConnectionProblem, read_connection_file
from weir_cli.render import fail, wrong_use

from api.core.endpoint import (
    NOT_STARTED,
    ConnectionFile,
    forget_endpoint,
    make_private,
    read_endpoint,
)
from api.core.settings import SettingInvalid, Settings, listen_address
from api.fleet.fleet_file import model_names
from common.backoff import Backoff
from common.incidents import sole_cause
from inference.errors import CheckpointInvalid
from metering.core.errors import AlreadyExists, InvalidValue, KeyInvalid, MeteringError
from metering.export.export_settings import export_settings, webhook_settings
from metering.pricing.prices import list_current_prices, set_price
from metering.receipts.signing import ensure_key, key_path
from metering.store import embedded_postgres
from metering.store.db import Sessions, create_engine, create_sessions
from metering.store.embedded_postgres import PostgresNotStarted
from metering.store.migrations_runner import SchemaUnknown
from metering.store.migrations_runner import migrate as upgrade
from metering.tenants.tenants import (
    authenticate,
    create_api_key,
    create_organization,
    create_project,
)
from metering.worker import READY_FILE, worker_command

stderr = Console(stderr=True, highlight=False)

ACTOR = "system"
ORGANIZATION = "demo"
PROJECT = "default"
ADMIN_SCOPES = ("admin", "billing", "inference")

# USD per million tokens: 0.15 input, half of it cached, 0.60 output; usual for a small hosted
# model.
MODEL_PICOS_PER_TOKEN = (150_000, 75_000, 600_000)
EMBEDDING_PICOS_PER_TOKEN = 20_000  # USD 0.02 per million tokens, for embedding models


def read_settings(home: Path | None = None, listen: str = "") -> Settings:
    """Return settings from the environment and flags; home is absolute, for child processes."""
    try:
        settings = Settings.from_environment()
    except SettingInvalid as error:
        wrong_use(str(error))
    settings = replace(settings, home=(home or settings.home).expanduser().absolute())
    if not listen:
        return settings
    try:
        return replace(settings, listen_address=listen_address(listen))
    except ValueError as error:
        wrong_use(f"--listen {error}, not {listen!r}")


def error_text(error: Exception) -> str:
    """Return PostgreSQL's or the driver's message in one line, without the libraries' wrapping."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


@contextlib.contextmanager
def clear_failures() -> Iterator[None]:
    """Report errors of start-up and of metering in one line."""
    try:
        try:
            yield
        except ExceptionGroup as group:
            raise sole_cause(group) from None
    except (
        StackFailed,
        PostgresNotStarted,
        CheckpointInvalid,
        SettingInvalid,
        SchemaUnknown,
        MeteringError,
    ) as error:
        fail(str(error))
    except (psycopg.OperationalError, sqlalchemy.exc.OperationalError) as error:
        fail(f"the database of WEIR_DATABASE_URL does not answer: {error_text(error)}")
    except OSError as error:
        fail(str(error))


def ensure_receipt_key(settings: Settings) -> Path | None:
    """Create the signing key of receipts if there is none; return its file if created."""
    path = key_path(settings.to_environment())
    return path if path is not None and ensure_key(path) else None


async def bootstrap(
    database_url: str, home: Path, models: Collection[str], encoders: Collection[str] = ()
) -> Connection:
    """Create the local customer, its keys and a price for each model if missing.

    Returns the connection without its address, which is not known yet.
    """
    async with open_sessions(database_url) as sessions:
        await ensure_tenant(sessions, ORGANIZATION, PROJECT)
        await ensure_prices(sessions, models, encoders)
        with contextlib.suppress(ConnectionProblem):
            stored = read_connection_file(home / CONNECTION_FILE)
            if await keys_work(sessions, stored):
                return stored
        api_key = await create_key(sessions, ORGANIZATION, PROJECT, "local", ("inference",))
        admin_key = await create_key(sessions, ORGANIZATION, PROJECT, "local-admin", ADMIN_SCOPES)
        return Connection("", api_key, admin_key, ORGANIZATION, PROJECT)


async def create_admin(
    database_url: str,
    organization: str,
    project: str,
    models: Collection[str],
    encoders: Collection[str] = (),
) -> str:
    """Create customer, project and prices if missing, and one more admin key; return its secret."""
    async with open_sessions(database_url) as sessions:
        await ensure_tenant(sessions, organization, project)
        await ensure_prices(sessions, models, encoders)
        return await create_key(sessions, organization, project, "admin", ADMIN_SCOPES)


@contextlib.asynccontextmanager
async def open_sessions(database_url: str) -> AsyncIterator[Sessions]:
    engine = create_engine(database_url)
    try:
        yield create_sessions(engine)
    finally:
        await engine.dispose()


async def create_key(
    sessions: Sessions, organization: str, project: str, name: str, scopes: Collection[str]
) -> str:
    async with sessions.begin() as session:
        _, secret = await create_api_key(
            session,
            organization=organization,
            project=project,
            name=name,
            scopes=scopes,
            actor=ACTOR,
        )
    return secret


async def ensure_tenant(sessions: Sessions, organization: str, project: str) -> None:
    """Create the customer and its project if missing."""
    with contextlib.suppress(AlreadyExists):
        async with sessions.begin() as session:
            await create_organization(session, name=organization, actor=ACTOR)
    with contextlib.suppress(AlreadyExists):
        async with sessions.begin() as session:
            await create_project(session, organization=organization, name=project, actor=ACTOR)


async def ensure_prices(
    sessions: Sessions, models: Collection[str], encoders: Collection[str]
) -> None:
    """Set a price for each model without one, required for use. encoders: embedding models."""
    async with sessions.begin() as session:
        priced = {price.model for price in await list_current_prices(session, currency_code="USD")}
        rates = dict.fromkeys(encoders, (0, 0, 0, EMBEDDING_PICOS_PER_TOKEN)) | dict.fromkeys(
            models, (*MODEL_PICOS_PER_TOKEN, None)
        )
        for model in sorted(rates.keys() - priced):
            input_picos, cached_picos, output_picos, embedding_picos = rates[model]
            await set_price(
                session,
                model=model,
                input_picos_per_token=input_picos,
                cached_input_picos_per_token=cached_picos,
                output_picos_per_token=output_picos,
                embedding_picos_per_token=embedding_picos,
                actor=ACTOR,
            )


async def keys_work(sessions: Sessions, connection: Connection) -> bool:
    """Return whether the stored keys are valid in this database."""
    try:
        async with sessions() as session:
            for secret in (connection.api_key, connection.admin_key):
                await authenticate(session, secret)
    except KeyInvalid:
        return False
    return True


Result = TypeVar("Result")
READY_TIMEOUT_S = 300.0  # a large checkpoint from a cold disk
STOP_TIMEOUT_S = 60.0  # the api server's drain time, or a task of the worker
RESTART_DELAY_S_MIN = 0.5
RESTART_DELAY_S_MAX = 30.0
STABLE_AFTER_S = 60.0  # of uptime: a process without a readiness file then counts as ready
READY_POLL_S = 0.1
LOG_TAIL_LINES = 20
WORKER_READY = "worker.pid"  # in the home directory
Report = Callable[[str], None]


def run(home: Path | None, work: Callable[[Sessions], Awaitable[Result]]) -> Result:
    """Run `work` on the configured database; errors are reported in one line."""

    async def connected() -> Result:
        with local_database(home) as url:
            async with open_sessions(url) as sessions:
                return await work(sessions)

    with clear_failures():
        return asyncio.run(connected())


@contextlib.contextmanager
def local_database(home: Path | None) -> Iterator[str]:
    """Yield the URL of the configured database; start the embedded one if it does not run."""
    settings = read_settings(home)
    data_dir = settings.home / "postgres"
    if settings.database_url:
        yield settings.database_url
        return
    if not data_dir.exists():
        wrong_use(
            f"there is no database: set WEIR_DATABASE_URL, or start `weir up` once ({data_dir} does"
            " not exist)"
        )
    ran = (data_dir / "postmaster.pid").exists()
    server = embedded_postgres.start(data_dir)
    try:
        yield server.url
    finally:
        if not ran:
            server.stop()


class StackFailed(Exception):
    """A part of the stack did not start; the message names it and ends with its log."""


@dataclass(slots=True)
class Child:
    """One child process: its command and its log file."""

    name: str
    command: Sequence[str]
    log_path: Path
    # Id of the latest process that reported readiness.
    ready_pid: Callable[[], int | None] = lambda: None
    process: asyncio.subprocess.Process | None = None

    async def start(self, environment: Mapping[str, str]) -> None:
        """Start it in its own session, so that Ctrl-C in the terminal reaches the parent first."""
        with open_log(self.log_path) as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    async def stop(self) -> None:
        """Terminate it, then kill it after a timeout."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()

    async def wait(self) -> tuple[int, bool]:
        """Wait until it ends; return its status, and whether it was ready before."""
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
        return (
            self.ready_pid() == self.process.pid or time.monotonic() - started_at > STABLE_AFTER_S
        )

    def log_tail(self, line_count: int = LOG_TAIL_LINES) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-line_count:])


class Stack:
    """A running stack. `connection` has its address and keys."""

    def __init__(
        self, connection: Connection, children: Sequence[Child], environment: Mapping[str, str]
    ) -> None:
        self.connection = connection
        self.children = children
        self._environment = environment

    async def supervise(self, report: Report) -> None:
        """Restart children when they die, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for child in self.children:
                tasks.create_task(self._keep_alive(child, report), name=f"keep {child.name} alive")

    async def _keep_alive(self, child: Child, report: Report) -> None:
        """Restart at once if it was ready before, else after a delay that doubles each time."""
        backoff = Backoff(RESTART_DELAY_S_MIN, RESTART_DELAY_S_MAX)
        while True:
            status, was_ready = await child.wait()
            if was_ready:
                backoff.reset()
                report(
                    f"{child.name} ended with status {status}; starting it again (log:"
                    f" {child.log_path})"
                )
            else:
                delay_s = backoff.next_s()
                report(
                    f"{child.name} ended with status {status} before it was ready; starting it"
                    f" again in {delay_s:g} s (log: {child.log_path})"
                )
                await asyncio.sleep(delay_s)
            await child.start(self._environment)


@contextlib.asynccontextmanager
async def run_stack(settings: Settings, report: Report) -> AsyncIterator[Stack]:
    """Start everything, run the block when requests are accepted, and stop everything afterwards.

    settings: with an empty `database_url` the embedded PostgreSQL is started, under `home`. Raises:
    StackFailed, PostgresNotStarted.
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
        await asyncio.to_thread(upgrade, settings.database_url)
        ensure_receipt_key(settings)
        connection = await bootstrap(settings.database_url, home, *model_names(settings))
        environment = child_environment(settings) | {READY_FILE: str(home / WORKER_READY)}
        api = Child(
            "api server",
            [sys.executable, "-m", "api"],
            home / "logs" / "api.log",
            lambda: serving_pid(home),
        )
        worker = Child(
            "billing worker",
            worker_command(),
            home / "logs" / "worker.log",
            lambda: written_pid(home / WORKER_READY),
        )
        children = [api, worker, *optional_children(environment, home)]
        forget_endpoint(home)
        for child in children:
            report(f"Starting the {child.name}")
            await child.start(environment)
            cleanup.push_async_callback(child.stop)
        report("Loading the model")
        endpoint = await wait_until_serving(home, api)
        connection = replace(connection, address=endpoint.address, openai_url=endpoint.openai_url)
        connection.write(home)
        yield Stack(connection, children, environment)


@contextlib.contextmanager
def sole_stack(home: Path) -> Iterator[None]:
    """Allow only one stack in this directory during the block. Raises: StackFailed.

    A second one would start a second worker, and would stop the first one's PostgreSQL. The lock
    ends with its process, and children do not inherit it.
    """
    with (home / ".up.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackFailed(
                f"`weir up` is already running in {home}: use it from other terminals, stop it with"
                " Ctrl-C, or choose another directory with --home and another port with --listen"
            ) from None
        yield


def open_log(path: Path) -> IO[bytes]:
    """Open a log for appending, readable by its owner only."""
    log = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
    os.fchmod(log.fileno(), 0o600)  # an earlier version may have created it
    return log


def serving_pid(home: Path) -> int | None:
    """Return the id of the process that serves requests, or None."""
    endpoint = read_endpoint(home)
    return endpoint.pid if endpoint.serving else None


def written_pid(path: Path) -> int | None:
    """Return the process id in a file; None if there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def optional_children(environment: Mapping[str, str], home: Path) -> list[Child]:
    """Return the endpoint for Stripe's events, if its secret is set.

    Raises: StackFailed for invalid export settings.
    """
    try:
        export_settings(environment)
        if webhook_settings(environment) is None:
            return []
    except InvalidValue as error:
        raise StackFailed(str(error)) from error
    command = [sys.executable, "-m", "weir_cli", "stripe", "webhooks"]
    return [Child("endpoint for Stripe's events", command, home / "logs" / "webhooks.log")]


def child_environment(settings: Settings) -> dict[str, str]:
    """Return the environment that passes these settings to a child process."""
    return {**os.environ, **settings.to_environment()}


async def wait_until_serving(home: Path, api: Child) -> ConnectionFile:
    """Wait until the server accepts requests and return its addresses. Raises: StackFailed."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if api.process is None or api.process.returncode is not None:
            if api.process is not None and api.process.returncode == NOT_STARTED:
                raise StackFailed(api.log_tail(line_count=1))
            raise StackFailed(f"the api server did not start:\n{api.log_tail()}")
        if (endpoint := read_endpoint(home)).serving:
            return endpoint
        await asyncio.sleep(0.05)
    raise StackFailed(
        f"the api server is not ready after {READY_TIMEOUT_S:.0f} s:\n{api.log_tail()}"
    )


async def run_until_stopped(listen: str, home: Path | None) -> None:
    """Run the stack until SIGINT or SIGTERM."""
    settings = read_settings(home, listen)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, stopping.set)
    with stderr.status("Starting") as status:
        async with asyncio.TaskGroup() as tasks, run_stack(settings, status.update) as stack:
            status.stop()
            stderr.print(
                welcome(stack.connection.address, settings.home, read_endpoint(settings.home))
            )
            supervisor = tasks.create_task(
                stack.supervise(lambda message: stderr.print(f"[yellow]{message}[/yellow]"))
            )
            await stopping.wait()
            supervisor.cancel()
            stderr.print("Stopping: running requests finish first")


def welcome(address: str, home: Path, endpoint: ConnectionFile) -> Panel:
    """Return the panel with next steps. endpoint: the server's HTTP listeners."""
    openai = (
        f"\nOpenAI's clients take [bold]base_url={endpoint.openai_url}[/bold] with the same keys."
        if endpoint.openai_url
        else ""
    )
    metrics = f"\nPrometheus scrapes {endpoint.metrics_url}." if endpoint.metrics_url else ""
    weir = command_name()
    sign_in = f"sign in with a key of `{escape(weir)} env`"
    console = (
        f"\nThe console is at [bold]{endpoint.console_url}[/bold]: {sign_in}."
        if endpoint.console_url
        else ""
    )
    elsewhere = (
        ""
        if home == Path.home() / ".weir"
        else f"  export WEIR_HOME={shlex.quote(str(home))}   for the commands to find this server\n"
    )
    return Panel(
        f"Weir listens on [bold]{address}[/bold].{openai}{console}{metrics} In another"
        " terminal:\n\n"
        f"{escape(elsewhere)}"
        f'  {weir} generate "Hello"\n'
        f"  {weir} quota set tokens-per-month 1000000 --org demo\n"
        f"  {weir} month show --help\n"
        f'  eval "$({weir} env)"   for programs that use the SDKs\n\n'
        f"Keys are in {home}/connection.json, logs in {home}/logs. Ctrl-C stops everything.",
        title="weir up",
        expand=False,
    )


def command_name() -> str:
    """Return this program's name for the shell: `weir`, or its path if PATH has no such command."""
    called = sys.argv[0]
    known = Path(called).name != "weir" or shutil.which("weir") == called
    return "weir" if known else shlex.quote(called)
