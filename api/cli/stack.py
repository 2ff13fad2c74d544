"""Processes of `weir up`, and code that the server's commands share.

`weir up` runs PostgreSQL, api server with its engines, Celery worker and beat on one machine; only
the settings differ from a deployment on many machines, not the code path. A process that dies is
restarted, PostgreSQL too. Processes that a killed supervisor left are adopted by the one that its
guard starts (`guard.py`); those of a `weir up` killed as a whole are ended by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TypeVar

import psycopg
import sqlalchemy.exc
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from weir_cli.connection import CONNECTION_FILE, Connection, ConnectionProblem, read_connection_file
from weir_cli.render import fail, wrong_use
from weir_cli.texts import counted
from weir_client import AdminClient, WeirError

from api.cli.guard import AlreadyRunning, Role, lock_home, stop_signals
from api.core.endpoint import (
    HELD,
    NOT_STARTED,
    ConnectionFile,
    forget_endpoint,
    make_private,
    read_endpoint,
)
from api.core.settings import Settings, listen_address
from api.fleet.fleet_file import model_names
from common.backoff import Backoff
from common.cpus import usable_cpus
from common.incidents import sole_cause
from common.processes import alive, started_with
from common.settings import SettingInvalid
from inference.errors import CheckpointInvalid
from metering.core.errors import (
    AlreadyExists,
    DatabaseUnavailable,
    InvalidValue,
    KeyInvalid,
    MeteringError,
    NotFound,
)
from metering.core.models import Person
from metering.export.export_settings import (
    STRIPE_SECRETS,
    WEBHOOK_SECRETS,
    export_settings,
    webhook_settings,
)
from metering.invoicing.invoice_document import Issuer
from metering.pricing.prices import PriceTerms, list_current_prices, set_price
from metering.receipts.signing import ensure_key, key_path
from metering.store import embedded_postgres
from metering.store.db import Sessions, create_engine, create_sessions
from metering.store.embedded_postgres import EmbeddedPostgres, PostgresNotStarted
from metering.store.migrations_runner import SchemaUnknown
from metering.store.migrations_runner import migrate as upgrade
from metering.store.refusals import cause_of, is_conflict, refusal_of
from metering.tenants.api_keys import create_api_key
from metering.tenants.authentication import authenticate
from metering.tenants.key_groups import lock_groups
from metering.tenants.key_terms import KeyTerms
from metering.tenants.members import OPERATOR, add_member, find_person
from metering.tenants.sign_in import LINK_LIFETIME_MAX, create_link, link_url
from metering.tenants.tenants import create_organization, create_project, find_project
from metering.worker import READY_FILE, worker_command

stderr = Console(stderr=True, highlight=False)

ACTOR = "system"
OPERATOR_EMAIL = "operator@localhost"  # of the user of `weir up`
ORGANIZATION = "demo"
PROJECT = "default"
ADMIN_SCOPES = ("admin", "billing", "inference")

# USD per million tokens: 0.15 input, half of it cached, 0.60 output; usual for a small hosted
# model.
MODEL_PICOS_PER_TOKEN = (150_000, 75_000, 600_000)
EMBEDDING_PICOS_PER_TOKEN = 20_000  # USD 0.02 per million tokens, for embedding models

READY_TIMEOUT_S = 300.0  # a large checkpoint from a cold disk
STOP_TIMEOUT_S = 60.0  # the api server's drain time, or a task of the worker
RESTART_DELAY_S_MIN = 0.5
RESTART_DELAY_S_MAX = 30.0  # of a process that ends by itself, for example without its port
KILLED_DELAY_S_MAX = 2.0  # of a process that was killed: nothing says that it would fail again
POSTGRES_POLL_S = 0.1  # between two looks for the postmaster: two small files
DATABASE_TRIES_MAX = 5  # preparations of a database whose server is killed meanwhile
ORPHAN_STOP_S = 5.0  # for processes of a killed `weir up` to finish, before they are killed
# Variable of all children with the home directory: finds those that a killed `weir up` left.
STACK_HOME = "WEIR_STACK_HOME"
STACK_PART = "WEIR_STACK_PART"  # with the home directory and the child's name: finds one of them
# Api processes by default, on a machine with more cores; and those for which PostgreSQL's 100
# connections are enough.
PROCESSES_DEFAULT_MAX, EMBEDDED_PROCESSES_MAX = 4, 6
STABLE_AFTER_S = 60.0  # of uptime: a process without a readiness file then counts as ready
READY_POLL_S = 0.1
LOG_TAIL_LINES = 20
WORKER_READY = "worker.pid"  # in the home directory


def read_settings(home: Path | None = None, listen: str = "") -> Settings:
    """Read settings from the environment and flags. `home` is absolute, for child processes."""
    try:
        settings = Settings.from_environment()
    except SettingInvalid as error:
        wrong_use(str(error))
    settings = settings.having(home=(home or settings.home).expanduser().absolute())
    if not listen:
        return settings
    try:
        return settings.having(listen=listen_address(listen))
    except ValueError as error:
        wrong_use(f"--listen {error}, not {listen!r}")


def error_text(error: Exception) -> str:
    """Format PostgreSQL's or the driver's message in one line, without the text libraries add."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


@contextlib.contextmanager
def clear_failures() -> Iterator[None]:
    """Turn errors of start-up and of metering into one-line messages."""
    try:
        try:
            yield
        except ExceptionGroup as group:
            raise sole_cause(group) from None
    except (
        AlreadyRunning,
        StackFailed,
        PostgresNotStarted,
        CheckpointInvalid,
        SettingInvalid,
        SchemaUnknown,
        MeteringError,
    ) as error:
        fail(str(error))
    except (psycopg.OperationalError, sqlalchemy.exc.OperationalError) as error:
        origin = (
            error.orig if isinstance(error, sqlalchemy.exc.OperationalError) else None
        ) or error
        conflict = refusal_of(origin) if is_conflict(error) else None
        cause = str(conflict or cause_of(origin))
        named = cause.replace("the database ", "the database of WEIR_DATABASE_URL ", 1)
        fail(f"{named}: {error_text(error)}")
    except OSError as error:
        fail(str(error))


def ensure_receipt_key(settings: Settings) -> Path | None:
    """Create the signing key of receipts if there is none. Return its file if it was created."""
    path = key_path(settings.to_environment())
    return path if path is not None and ensure_key(path) else None


async def bootstrap(
    database_url: str, home: Path, models: Collection[str], encoders: Collection[str] = ()
) -> Connection:
    """Create the local customer, its keys and a price for each model, unless they exist.

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
    """Create an admin key and return its secret; add customer, project and prices if missing."""
    async with open_sessions(database_url) as sessions:
        await ensure_tenant(sessions, organization, project)
        await ensure_prices(sessions, models, encoders)
        return await create_key(sessions, organization, project, "admin", ADMIN_SCOPES)


def operator_link(home: Path) -> str:
    """Ask the server of `weir up` for a link that signs in its operator; empty if it gives none."""
    try:
        connection = read_connection_file(home / CONNECTION_FILE)
        with AdminClient(connection.address, connection.admin_key) as admin:
            return admin.create_sign_in_link(OPERATOR_EMAIL)
    except (ConnectionProblem, WeirError):
        return ""


async def print_sign_in_link(database_url: str, console_url: str) -> None:
    """Print a link to sign in with, or why there is none: the server runs without it."""
    try:
        link = await sign_in_link(database_url, console_url)
    except MeteringError as refused:
        stderr.print(f"[yellow]No link to sign in to the console: {escape(str(refused))}[/yellow]")
    else:
        stderr.print(f"Sign in to the console, once: {link}", soft_wrap=True)


async def sign_in_link(database_url: str, console_url: str) -> str:
    """Create a link that signs the operator of this machine in to the console, once.

    The person is created at the first time. A user that may read the home directory has the
    administrator's key anyway. Raises: InvalidValue for a deactivated person, DatabaseUnavailable.
    """
    async with open_sessions(database_url) as sessions, sessions.begin() as session:
        project = await find_project(session, PROJECT, organization=ORGANIZATION)
        await lock_groups(session, project.organization_id)
        try:
            person = await find_person(session, OPERATOR_EMAIL)
        except NotFound:
            person = Person(email=OPERATOR_EMAIL, display_name="Operator")
            session.add(person)
            await session.flush()
            await session.refresh(person)
            await add_member(session, person=person, project=project, role=OPERATOR, actor=ACTOR)
        secret = await create_link(session, person, lifetime=LINK_LIFETIME_MAX, actor=ACTOR)
    return link_url(console_url, secret)


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
            terms=KeyTerms(scopes=tuple(scopes)),
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
    """Set a price, without which no request runs, for each model that has none."""
    async with sessions.begin() as session:
        priced = {price.model for price in await list_current_prices(session, currency_code="USD")}
        rates = dict.fromkeys(encoders, (0, 0, 0, EMBEDDING_PICOS_PER_TOKEN)) | dict.fromkeys(
            models, (*MODEL_PICOS_PER_TOKEN, None)
        )
        for model in sorted(rates.keys() - priced):
            input_picos, cached_picos, output_picos, embedding_picos = rates[model]
            await set_price(
                session,
                PriceTerms(
                    model=model,
                    input_picos_per_token=input_picos,
                    cached_input_picos_per_token=cached_picos,
                    output_picos_per_token=output_picos,
                    embedding_picos_per_token=embedding_picos,
                ),
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
Report = Callable[[str], None]


def run(home: Path | None, work: Callable[[Sessions], Awaitable[Result]]) -> Result:
    """Run `work` on the configured database. Errors are reported in one line."""

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
    if settings.database.url:
        yield settings.database.url
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


class Adopted:
    """Process that a killed supervisor started. Its exit status cannot be known."""

    def __init__(self, pid: int) -> None:
        """Watch a running process. Raises: ProcessLookupError if it has ended."""
        self.pid = pid
        self.returncode: int | None = None
        self._fd = os.pidfd_open(pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._fd, self._end)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self.returncode = -signal.SIGKILL
        self._ended.set()

    async def wait(self) -> int:
        """Wait until the process ends. The result says that it was killed."""
        await self._ended.wait()
        return -signal.SIGKILL

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


@dataclass(slots=True)
class Child:
    """Child process of the stack, with its command and log file.

    `secrets` names the environment variables that are for other children only, `own` are those that
    it has for itself.
    """

    name: str
    command: Sequence[str]
    log_path: Path
    # Id of the latest process that reported readiness.
    ready_pid: Callable[[], int | None] = lambda: None
    secrets: Collection[str] = ()
    own: Mapping[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | Adopted | None = None
    _held_by: int | None = None  # pipe to a process that waits for its last settings

    def left(self, home: str) -> int | None:
        """Find the process of this name that another supervisor left in a home directory."""
        each = started_with(STACK_PART, f"{home} {self.name}")
        return next((pid for pid in each if alive(pid)), None)

    def adopt(self, home: str) -> bool:
        """Take over the process that another supervisor left. Return whether there was one."""
        with contextlib.suppress(ProcessLookupError):
            if (pid := self.left(home)) is not None:
                self.process = Adopted(pid)
                return True
        return False

    async def start(self, environment: Mapping[str, str], stdin: int = subprocess.DEVNULL) -> None:
        """Start the process in its own session, so that Ctrl-C reaches only the parent."""
        with open_log(self.log_path) as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=stdin,
                stdout=log,
                stderr=log,
                env={name: value for name, value in environment.items() if name not in self.secrets}
                | dict(self.own)
                | {STACK_PART: f"{environment.get(STACK_HOME, '')} {self.name}"},
                start_new_session=True,
            )

    async def start_held(self, environment: Mapping[str, str]) -> None:
        """Start an api process that imports its modules, and waits until it is released."""
        stdin, self._held_by = os.pipe()
        try:
            await self.start({**environment, HELD: "1"}, stdin)
        finally:
            os.close(stdin)

    def release(self, settings: Mapping[str, str]) -> bool:
        """Let a held process continue with these variables. Return whether it was held."""
        if self._held_by is None:
            return False
        pipe, self._held_by = self._held_by, None
        with contextlib.suppress(BrokenPipeError), open(pipe, "w") as file:  # it may be dead
            json.dump(dict(settings), file)
        return True

    async def stop(self) -> None:
        """Terminate the process, and kill it if it still runs after a timeout."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()

    async def wait(self) -> tuple[int, bool]:
        """Wait until the process ends. Return its status, and whether it had been ready."""
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
        """Read the last lines of the log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-line_count:])


class Stack:
    """Running stack. `connection` has its address and keys."""

    def __init__(
        self,
        connection: Connection,
        children: Sequence[Child],
        environment: Mapping[str, str],
        database_url: str,
        database: EmbeddedPostgres | None = None,
    ) -> None:
        """Take over started children. `database` is the embedded server, None for another one."""
        self.database_url = database_url
        self.connection = connection
        self.children = children
        self._environment = environment
        self._database = database

    async def supervise(self, report: Report) -> None:
        """Restart children and the embedded server when they die, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for child in self.children:
                tasks.create_task(self._keep_alive(child, report), name=f"keep {child.name} alive")
            if self._database is not None:
                tasks.create_task(
                    keep_database(self._database, report), name="keep PostgreSQL alive"
                )

    async def _keep_alive(self, child: Child, report: Report) -> None:
        """Restart a child at once if it had been ready, else after a delay that doubles each time.

        The first restart of a process that was killed before it was ready is immediate as well.
        """
        failures = Backoff(RESTART_DELAY_S_MIN, RESTART_DELAY_S_MAX)
        kills = Backoff(RESTART_DELAY_S_MIN, KILLED_DELAY_S_MAX)
        was_killed_early = False
        while True:
            status, was_ready = await child.wait()
            if was_ready:
                failures.reset()
                kills.reset()
            is_killed = status < 0
            if was_ready or (is_killed and not was_killed_early):
                delay_s, when = 0.0, ""
            else:
                delay_s = (kills if is_killed else failures).next_s()
                when = f" in {delay_s:g} s"
            was_killed_early = is_killed and not was_ready
            early = "" if was_ready else " before it was ready"
            report(
                f"{child.name} ended with status {status}{early}; starting it again{when} (log:"
                f" {child.log_path})"
            )
            while True:
                await asyncio.sleep(delay_s)
                try:
                    await child.start(self._environment)
                    break
                except OSError as error:  # memory, processes, or the log's disk
                    delay_s = failures.next_s()
                    report(f"{child.name}: {error}; trying again in {delay_s:g} s")


async def keep_database(database: EmbeddedPostgres, report: Report) -> None:
    """Restart the embedded server whenever its postmaster ends, until cancelled."""
    backoff = Backoff(RESTART_DELAY_S_MIN, KILLED_DELAY_S_MAX)
    log_path = database.data_dir / "server.log"
    while True:
        await asyncio.sleep(POSTGRES_POLL_S)
        if database.pid is not None:
            continue
        report(f"PostgreSQL ended; starting it again (log: {log_path})")
        try:
            await asyncio.to_thread(embedded_postgres.start, database.data_dir)
            backoff.reset()
        except (PostgresNotStarted, OSError) as error:
            delay_s = backoff.next_s()
            report(f"{error}; trying again in {delay_s:g} s")
            await asyncio.sleep(delay_s)


def process_count(settings: Settings, requested: int | None) -> int:
    """Choose the number of api processes. Raises: StackFailed if they cannot share what they need.

    By default one core is left for the engines, and no process is added to a port that the system
    chooses.
    """
    has_port = not settings.listen.address.startswith("unix") and not (
        settings.listen.address.endswith(":0")
    )
    if requested is None:
        return min(max(usable_cpus().count - 1, 1), PROCESSES_DEFAULT_MAX) if has_port else 1
    if requested > 1 and not has_port:
        raise StackFailed(
            f"--processes {requested}: several processes share one port, so --listen must name it,"
            f" as in 127.0.0.1:8443, not {settings.listen.address}"
        )
    if requested > EMBEDDED_PROCESSES_MAX and not settings.database.url:
        raise StackFailed(
            f"--processes {requested}: the PostgreSQL of `weir up` has connections for"
            f" {EMBEDDED_PROCESSES_MAX} api processes: set WEIR_DATABASE_URL to use another one"
        )
    return requested


def with_shared_port(settings: Settings) -> Settings:
    """Let further processes of this machine use the port and the engine workers."""
    return settings.having(share_port=True, engine_directory=str(settings.engine_directory))


def further_api(settings: Settings, number: int) -> Child:
    """Build the api process of this number, from 2. It has a connection file and a peer port of its
    own. `settings` are those of the first one.

    All keep their journals in one directory: each recovers those of dead ones.
    """
    home = settings.home / f"api-{number}"
    make_private(home)
    journals = settings.journal_directory
    make_private(journals)
    with contextlib.suppress(FileExistsError):
        (home / journals.name).symlink_to(Path("..", journals.name))
    key = key_path(settings.to_environment())
    own = settings.having(
        home=home,
        receipt_key_file="off" if key is None else str(key),
        peer_listen=settings.listen.peer and f"{settings.listen.peer.rpartition(':')[0]}:0",
        advertise_address=settings.listen.advertised.partition(":")[0],
    )
    return Child(
        f"api server {number}",
        [sys.executable, "-m", "api"],
        settings.home / "logs" / f"api-{number}.log",
        lambda: serving_pid(home),
        {*STRIPE_SECRETS, *WEBHOOK_SECRETS},
        own.to_environment(),
    )


@contextlib.asynccontextmanager
async def run_stack(
    settings: Settings, report: Report, role: Role | None = None, api_count: int = 1
) -> AsyncIterator[Stack]:
    """Start everything, run the block when requests are accepted, and stop everything afterwards.

    If `database_url` is empty, an embedded PostgreSQL is started under `home`. `role` is that of a
    supervisor, which adopts what another one left; None locks the directory. Api processes beyond
    the first start when that accepts requests. Raises: StackFailed, AlreadyRunning,
    PostgresNotStarted.
    """
    if api_count > 1:
        settings = with_shared_port(settings)
    home = settings.home
    make_private(home)
    make_private(home / "logs")
    api = Child(
        "api server",
        [sys.executable, "-m", "api"],
        home / "logs" / "api.log",
        lambda: serving_pid(home),
        {*STRIPE_SECRETS, *WEBHOOK_SECRETS},
    )
    async with contextlib.AsyncExitStack() as cleanup:
        if role is None:
            cleanup.callback(os.close, lock_home(home))
        adopts = role is not None and role.adopts and api.left(str(home)) is not None
        own = {READY_FILE: str(home / WORKER_READY), STACK_HOME: str(home)}
        if not adopts:
            await end_orphans(home, report)
            forget_endpoint(home)
            # Its imports take as long as the preparation of the database.
            await api.start_held(child_environment(settings) | own)
            cleanup.push_async_callback(api.stop)  # if the database does not start
        server = None
        if not settings.database.url:
            report("Starting PostgreSQL")
            server = await asyncio.to_thread(embedded_postgres.start, home / "postgres")
            cleanup.push_async_callback(asyncio.to_thread, server.stop)
            settings = with_issuer(settings.having(database_url=server.url))
        report("Preparing the database")
        ensure_receipt_key(settings)
        connection = await prepare_database(settings, server)
        environment = child_environment(settings) | own
        worker = Child(
            "billing worker",
            worker_command(),
            home / "logs" / "worker.log",
            lambda: written_pid(home / WORKER_READY),
            WEBHOOK_SECRETS,
        )
        children = [api, worker, *optional_children(environment, home)]
        cleanup.push_async_callback(stop_all, children)
        for child in children:
            if adopts and child.adopt(str(home)):
                continue
            report(f"Starting the {child.name}")
            if not child.release(settings.to_environment()):
                await child.start(environment)
        report("Loading the model")
        stack = Stack(connection, children, environment, settings.database.url, server)
        endpoint = await supervised_start(stack, home, api, report)
        stack.connection = replace(
            connection, address=endpoint.address, openai_url=endpoint.openai_url
        )
        stack.connection.write(home)
        for number in range(2, api_count + 1):
            further = further_api(settings, number)
            if not (adopts and further.adopt(str(home))):
                forget_endpoint(Path(further.own["WEIR_HOME"]))
                await further.start(environment)
            children.append(further)  # which are stopped, and supervised
        yield stack


async def stop_all(children: Sequence[Child]) -> None:
    """Stop all children at once: none waits for another one."""
    async with asyncio.TaskGroup() as tasks:
        for child in children:
            tasks.create_task(child.stop(), name=f"stop the {child.name}")


async def prepare_database(settings: Settings, server: EmbeddedPostgres | None) -> Connection:
    """Migrate the database and create missing objects; repeat if its server dies meanwhile."""
    for tries_left in reversed(range(DATABASE_TRIES_MAX)):
        try:
            await asyncio.to_thread(upgrade, settings.database.url)
            return await bootstrap(settings.database.url, settings.home, *model_names(settings))
        except (
            psycopg.OperationalError,
            sqlalchemy.exc.OperationalError,
            DatabaseUnavailable,
        ):
            if server is None or not tries_left:
                raise
            await asyncio.to_thread(embedded_postgres.start, server.data_dir)
    raise AssertionError("the last try returns or raises")


async def supervised_start(stack: Stack, home: Path, api: Child, report: Report) -> ConnectionFile:
    """Wait until the server accepts requests and return its addresses.

    Restarts processes that are killed meanwhile. Raises: StackFailed.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            supervisor = tasks.create_task(stack.supervise(report), name="supervisor")
            try:
                return await wait_until_serving(home, api)
            finally:
                supervisor.cancel()
    except ExceptionGroup as group:
        raise sole_cause(group) from None


async def end_orphans(home: Path, report: Report) -> None:
    """End the processes that a killed `weir up` left in this directory, if any.

    The caller has the directory's lock, so they have no parent. They hold ports and the journal.
    Their PostgreSQL is not one of them: it is found running.
    """
    for signal_number, patience_s in (
        (signal.SIGTERM, ORPHAN_STOP_S),
        (signal.SIGKILL, STOP_TIMEOUT_S),
    ):
        deadline = time.monotonic() + patience_s
        orphans = await asyncio.to_thread(started_with, STACK_HOME, str(home))
        if orphans:
            ended = counted(len(orphans), "process", "processes")
            report(f"Ending {ended} that a killed `weir up` left")
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        while orphans and time.monotonic() < deadline:
            await asyncio.sleep(READY_POLL_S)
            orphans = [pid for pid in orphans if alive(pid)]


def end_left(home: Path) -> None:
    """End everything that a killed supervisor left, PostgreSQL too."""
    asyncio.run(end_orphans(home, lambda text: stderr.print(f"[yellow]{text}[/yellow]")))
    EmbeddedPostgres(home / "postgres", home / "postgres").stop()


def open_log(path: Path) -> IO[bytes]:
    """Open a log file for appending. Only its owner can read it."""
    log = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
    os.fchmod(log.fileno(), 0o600)  # an earlier version may have created it
    return log


def serving_pid(home: Path) -> int | None:
    """Find the id of the process that serves requests; None if there is none."""
    endpoint = read_endpoint(home)
    return endpoint.pid if endpoint.serving else None


def written_pid(path: Path) -> int | None:
    """Read a process id from a file; None if there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def optional_children(environment: Mapping[str, str], home: Path) -> list[Child]:
    """Build the endpoint for Stripe's events if its secret is set, else an empty list.

    Raises: StackFailed for invalid export settings.
    """
    try:
        export_settings(environment)
        if webhook_settings(environment) is None:
            return []
    except InvalidValue as error:
        raise StackFailed(str(error)) from error
    command = [sys.executable, "-m", "weir_cli", "stripe", "webhooks"]
    log_path = home / "logs" / "webhooks.log"
    return [Child("endpoint for Stripe's events", command, log_path, secrets=STRIPE_SECRETS)]


def with_issuer(settings: Settings) -> Settings:
    """Add a sample invoice issuer to settings without one, so that you can close a month."""
    if settings.issuer.build() != Issuer():
        return settings
    return settings.having(
        issuer_name="SAMPLE ISSUER, not a company",
        issuer_address="Set WEIR_ISSUER_NAME, WEIR_ISSUER_ADDRESS and WEIR_ISSUER_PAYMENT",
        issuer_payment="Do not pay: this is a sample",
    )


def child_environment(settings: Settings) -> dict[str, str]:
    """Build the environment that passes these settings to a child process."""
    return {**os.environ, **settings.to_environment()}


async def wait_until_serving(home: Path, api: Child) -> ConnectionFile:
    """Wait until the server accepts requests and return its addresses. Raises: StackFailed."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        status = None if api.process is None else api.process.returncode
        if status == NOT_STARTED:
            raise StackFailed(api.log_tail(line_count=1))
        if status is not None and status >= 0:  # one that was killed is started again
            raise StackFailed(f"the api server did not start:\n{api.log_tail()}")
        endpoint = read_endpoint(home)
        if endpoint.serving and api.process is not None and endpoint.pid == api.process.pid:
            return endpoint
        await asyncio.sleep(0.05)
    raise StackFailed(
        f"the api server is not ready after {READY_TIMEOUT_S:.0f} s:\n{api.log_tail()}"
    )


async def run_until_stopped(
    listen: str, home: Path | None, role: Role, processes: int | None = None
) -> None:
    """Run and supervise the stack until a signal ends it. `processes` is None for the default."""
    settings = read_settings(home, listen)
    api_count = process_count(settings, processes)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in stop_signals():
        loop.add_signal_handler(signal_number, stopping.set)
    loop.add_reader(role.guard_fd, role.lose_guard)
    with stderr.status("Starting") as status:
        report = status.update if stderr.is_terminal else stderr.print
        async with (
            asyncio.TaskGroup() as tasks,
            run_stack(settings, report, role, api_count) as stack,
        ):
            status.stop()
            endpoint = read_endpoint(settings.home)
            stderr.print(welcome(stack.connection.address, settings.home, endpoint))
            if endpoint.console_url:
                await print_sign_in_link(stack.database_url, endpoint.console_url)
            supervisor = tasks.create_task(
                stack.supervise(lambda message: stderr.print(f"[yellow]{message}[/yellow]"))
            )
            role.supervises()
            await stopping.wait()
            loop.remove_reader(role.guard_fd)
            supervisor.cancel()
            stderr.print("Stopping: running requests finish first")


def welcome(address: str, home: Path, endpoint: ConnectionFile) -> Panel:
    """Build the panel with next steps. `endpoint` has the server's HTTP addresses."""
    openai = (
        f"\nOpenAI's clients take [bold]base_url={endpoint.openai_url}[/bold] with the same keys."
        if endpoint.openai_url
        else ""
    )
    metrics = f"\nPrometheus scrapes {endpoint.metrics_url}." if endpoint.metrics_url else ""
    weir = command_name()
    sign_in = f"`{escape(weir)} person sign-in {OPERATOR_EMAIL}` makes a link to sign in"
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
        f"Keys are in {home}/connection.json, logs in {home}/logs. Ctrl-C stops everything, as"
        " `weir down` does.",
        title="weir up",
        expand=False,
    )


def command_name() -> str:
    """Return this program's name in the shell: `weir`, or its path if that is not in PATH."""
    called = sys.argv[0]
    known = Path(called).name != "weir" or shutil.which("weir") == called
    return "weir" if known else shlex.quote(called)
