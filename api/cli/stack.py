"""`weir up`, `serve`, `worker`, `migrate`, `init`, `doctor`: commands that run Weir, all of it or one process; and what they share.

`weir up` runs PostgreSQL, api server with its engines, Celery worker and beat on one machine: only the settings differ from a
deployment on many machines, never the code path. A process that dies is started again.
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
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, NoReturn, TypeVar

import psycopg
import sqlalchemy.exc
import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from weir_cli.commands import ExitCode
from weir_cli.connection import CONNECTION_FILE, Connection, ConnectionProblem, read_connection_file
from weir_cli.render import JsonOption, fail, note, print_json, show, table, wrong_use

from api.core.endpoint import Told, forget_endpoint, make_private, read_endpoint
from api.core.settings import SettingInvalid, Settings, listen_address
from api.fleet.fleet_file import model_names
from common.backoff import Backoff
from common.incidents import sole_cause
from inference.errors import CheckpointInvalid
from metering.core.errors import AlreadyExists, InvalidValue, KeyInvalid, MeteringError
from metering.export.export_settings import export_settings, webhook_settings
from metering.pricing.prices import list_current_prices, set_price
from metering.receipts.signing import ensure_key, key_path, replace_key
from metering.store import embedded_postgres
from metering.store.db import Sessions, create_engine, create_sessions
from metering.store.embedded_postgres import PostgresNotStarted
from metering.store.migrations_runner import PASSWORD_VARIABLE, RoleUnfit, SchemaUnknown, is_current, prepare_application_role
from metering.store.migrations_runner import migrate as upgrade
from metering.tenants.tenants import authenticate, create_api_key, create_organization, create_project
from metering.worker import READY_FILE, worker_command

if TYPE_CHECKING:
    from inference.adapters.findings import Observation

ListenOption = Annotated[str, typer.Option("--listen", help="Address and port; port 0 lets the system choose.", show_default=False)]
HomeOption = Annotated[
    Path | None, typer.Option("--home", help="Directory for everything that is kept. [default: WEIR_HOME or ~/.weir]")
]

stderr = Console(stderr=True, highlight=False)

ACTOR = "system"
ORGANIZATION = "demo"
PROJECT = "default"
ADMIN_SCOPES = ("admin", "billing", "inference")

# USD per million tokens: 0.15 input, half of it cached, 0.60 output; usual for a small hosted model.
MODEL_PICOS_PER_TOKEN = (150_000, 75_000, 600_000)
EMBEDDING_PICOS_PER_TOKEN = 20_000  # USD 0.02 per million tokens, for models that embed


def read_settings(home: Path | None = None, listen: str = "") -> Settings:
    """Settings of the environment, flags before them; absolute, so that child processes mean the same directory."""
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


def said(error: Exception) -> str:
    """What PostgreSQL or the way to it has said, in one line, without the wrapping of libraries."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


@contextlib.contextmanager
def clear_failures() -> Iterator[None]:
    """Errors of starting up, and what metering refuses, without a traceback."""
    try:
        try:
            yield
        except ExceptionGroup as group:
            raise sole_cause(group) from None
    except (StackFailed, PostgresNotStarted, CheckpointInvalid, SettingInvalid, SchemaUnknown, MeteringError) as error:
        fail(str(error))
    except (psycopg.OperationalError, sqlalchemy.exc.OperationalError) as error:
        fail(f"the database of WEIR_DATABASE_URL does not answer: {said(error)}")
    except OSError as error:
        fail(str(error))


def ensure_receipt_key(settings: Settings) -> Path | None:
    """Make the key that signs receipts where there is none; its file if one was made."""
    path = key_path(settings.to_environment())
    return path if path is not None and ensure_key(path) else None


async def bootstrap(database_url: str, home: Path, models: Collection[str], encoders: Collection[str] = ()) -> Connection:
    """Make sure that the local customer, its keys and a price for each model exist. The address is not known yet."""
    async with open_sessions(database_url) as sessions:
        await ensure_tenant(sessions, ORGANIZATION, PROJECT)
        await ensure_prices(sessions, models, encoders)
        with contextlib.suppress(ConnectionProblem):
            standing = read_connection_file(home / CONNECTION_FILE)
            if await keys_work(sessions, standing):
                return standing
        api_key = await create_key(sessions, ORGANIZATION, PROJECT, "local", ("inference",))
        admin_key = await create_key(sessions, ORGANIZATION, PROJECT, "local-admin", ADMIN_SCOPES)
        return Connection("", api_key, admin_key, ORGANIZATION, PROJECT)


async def create_admin(
    database_url: str, organization: str, project: str, models: Collection[str], encoders: Collection[str] = ()
) -> str:
    """Make sure that customer, project and prices exist, and create one more admin key; its secret."""
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


async def create_key(sessions: Sessions, organization: str, project: str, name: str, scopes: Collection[str]) -> str:
    async with sessions.begin() as session:
        _, secret = await create_api_key(session, organization=organization, project=project, name=name, scopes=scopes, actor=ACTOR)
    return secret


async def ensure_tenant(sessions: Sessions, organization: str, project: str) -> None:
    """The customer and its project, each created where it is missing."""
    with contextlib.suppress(AlreadyExists):
        async with sessions.begin() as session:
            await create_organization(session, name=organization, actor=ACTOR)
    with contextlib.suppress(AlreadyExists):
        async with sessions.begin() as session:
            await create_project(session, organization=organization, name=project, actor=ACTOR)


async def ensure_prices(sessions: Sessions, models: Collection[str], encoders: Collection[str]) -> None:
    """A price for each model that has none: without one it cannot be sold. encoders: those that embed."""
    async with sessions.begin() as session:
        priced = {price.model for price in await list_current_prices(session, currency_code="USD")}
        rates = dict.fromkeys(encoders, (0, 0, 0, EMBEDDING_PICOS_PER_TOKEN)) | dict.fromkeys(
            models, (*MODEL_PICOS_PER_TOKEN, None)
        )
        for model in sorted(rates.keys() - priced):
            asked, cached, answered, embedded = rates[model]
            await set_price(
                session,
                model=model,
                input_picos_per_token=asked,
                cached_input_picos_per_token=cached,
                output_picos_per_token=answered,
                embedding_picos_per_token=embedded,
                actor=ACTOR,
            )


async def keys_work(sessions: Sessions, connection: Connection) -> bool:
    """Whether the stored keys belong to this database and are good."""
    try:
        async with sessions() as session:
            for secret in (connection.api_key, connection.admin_key):
                await authenticate(session, secret)
    except KeyInvalid:
        return False
    return True


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

    with clear_failures():
        return asyncio.run(connected())


@contextlib.contextmanager
def local_database(home: HomeOption) -> Iterator[str]:
    """URL of the database of the settings; the embedded one is started for the block, if it does not run."""
    settings = read_settings(home)
    data_dir = settings.home / "postgres"
    if settings.database_url:
        yield settings.database_url
        return
    if not data_dir.exists():
        wrong_use(f"there is no database: set WEIR_DATABASE_URL, or start `weir up` once ({data_dir} is not there)")
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
        await asyncio.to_thread(upgrade, settings.database_url)
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
    command = [sys.executable, "-m", "weir_cli", "stripe", "webhooks"]
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


def up(listen: ListenOption = "", home: HomeOption = None) -> None:
    """Start everything on this machine: PostgreSQL, API server, engine, Celery worker and beat. Ctrl-C stops it all.

    Everything is kept in the home directory. With WEIR_DATABASE_URL or WEIR_BROKER_URL set, those servers are used instead of
    embedded ones.
    """
    with clear_failures():
        asyncio.run(run_until_stopped(listen, home))


async def run_until_stopped(listen: str, home: HomeOption) -> None:
    """Run the stack until SIGINT or SIGTERM."""
    settings = read_settings(home, listen)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, stopping.set)
    with stderr.status("Starting") as status:
        async with asyncio.TaskGroup() as tasks, run_stack(settings, status.update) as stack:
            status.stop()
            stderr.print(welcome(stack.connection.address, settings.home, read_endpoint(settings.home)))
            supervisor = tasks.create_task(stack.supervise(lambda message: stderr.print(f"[yellow]{message}[/yellow]")))
            await stopping.wait()
            supervisor.cancel()
            stderr.print("Stopping: running requests finish first")


def welcome(address: str, home: Path, told: Told) -> Panel:
    """What to do next. told: by the server, of its doors over HTTP."""
    openai = f"\nOpenAI's clients take [bold]base_url={told.openai_url}[/bold] with the same keys." if told.openai_url else ""
    metrics = f"\nPrometheus scrapes {told.metrics_url}." if told.metrics_url else ""
    weir = command_name()
    sign_in = f"sign in with a key of `{escape(weir)} env`"
    console = f"\nThe console is at [bold]{told.console_url}[/bold]: {sign_in}." if told.console_url else ""
    elsewhere = (
        ""
        if home == Path.home() / ".weir"
        else f"  export WEIR_HOME={shlex.quote(str(home))}   where the commands find this server\n"
    )
    return Panel(
        f"Weir listens on [bold]{address}[/bold].{openai}{console}{metrics} In another terminal:\n\n"
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
    """How this program is called from this directory: `weir`, or its path where a shell would not find it by that name."""
    called = sys.argv[0]
    known = Path(called).name != "weir" or shutil.which("weir") == called
    return "weir" if known else shlex.quote(called)


def console(
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
    home: HomeOption = None,
) -> None:
    """Print where the console of the server on this machine is.

    It asks for an API key and shows what that key may see. `weir env` prints the keys that `weir up` made.
    """
    settings = read_settings(home)
    told = read_endpoint(settings.home)
    if not told.serving:
        fail(f"no server of {settings.home} serves now: start one with `weir up`")
    if not told.console_url:
        fail("the server has no console: it was started with WEIR_CONSOLE=0 or WEIR_OPENAI_LISTEN=off")
    typer.echo(told.console_url)
    if open_browser and not webbrowser.open(told.console_url):
        note("no browser could be opened here: open the address in yours")


GRANT_HELP = (
    "Database role of api processes and workers: gets the rights that they need on every table, and loses all others. "
    "WEIR_APPLICATION_PASSWORD creates it where it is missing and sets its password."
)

doctor = typer.Typer(help="Look at what this machine really does.", no_args_is_help=True)


def serve(listen: ListenOption = "", home: HomeOption = None) -> None:
    """Start one API server on the database of WEIR_DATABASE_URL, until SIGTERM or Ctrl-C.

    `weir up` starts a whole installation on one machine instead. Migrate first: `weir migrate`.
    """
    from api.__main__ import main

    settings = read_settings(home, listen)
    if not settings.database_url:
        wrong_use("WEIR_DATABASE_URL is not set: name a PostgreSQL database, or start everything on this machine with `weir up`")
    with clear_failures():
        if not is_current(settings.database_url):
            fail("the database has not the schema of this version: run `weir migrate` first")
        main({**os.environ, **settings.to_environment()})


def worker(home: HomeOption = None) -> None:
    """Start one worker on the database of WEIR_DATABASE_URL: it rates, ends stuck holds and exports, until SIGTERM or Ctrl-C.

    Any number may run, on any machines. With WEIR_BROKER_URL (Redis) they share their messages. `weir up` starts one by itself.
    """
    settings = read_settings(home)
    if not settings.database_url:
        wrong_use("WEIR_DATABASE_URL is not set: name the database that the worker is to work on")
    command = worker_command()
    os.execve(command[0], command, {**os.environ, **settings.to_environment()})


def migrate(
    revision: Annotated[str, typer.Argument(help="Where to stop.")] = "head",
    home: HomeOption = None,
    grant: Annotated[str, typer.Option(metavar="ROLE", help=GRANT_HELP, show_default=False)] = "",
) -> None:
    """Bring the database of WEIR_DATABASE_URL to the schema of this version; without one, the embedded database of the home."""
    settings = read_settings(home)
    if grant and not settings.database_url:
        wrong_use("--grant is for a PostgreSQL of your own: set WEIR_DATABASE_URL; the embedded one has a single user")
    if grant and revision != "head":
        wrong_use(f"--grant {grant} needs the newest schema, revision `head`, got {revision!r}: leave the revision out")
    with clear_failures():
        if settings.database_url:
            upgrade(settings.database_url, revision)
            if grant:
                try:
                    prepare_application_role(settings.database_url, grant, os.environ.get(PASSWORD_VARIABLE, ""))
                except RoleUnfit as error:
                    fail(str(error))
        else:
            server = embedded_postgres.start(settings.home / "postgres")
            try:
                upgrade(server.url, revision)
            finally:
                server.stop()
    stderr.print("the database is at the schema of this version")
    if grant:
        stderr.print(f"role {grant} has the rights that api processes and workers need, and no others")


def init(
    organization: Annotated[str, typer.Option(help="Name of the first organization.")] = "main",
    project: Annotated[str, typer.Option(help="Name of its first project.")] = "default",
    json_output: JsonOption = False,
) -> None:
    """Create the first organization, project and admin key in the database of WEIR_DATABASE_URL, and prices for the models.

    On this machine it makes the key that signs receipts, where there is none and WEIR_RECEIPT_KEY_FILE does not say `off`.
    What exists stays as it is; each run makes one more admin key. Its secret is printed once and can never be shown again.
    """

    settings = read_settings()
    if not settings.database_url:
        wrong_use("WEIR_DATABASE_URL is not set: name the database of the installation")
    with clear_failures():
        if not is_current(settings.database_url):
            fail("the database has not the schema of this version: run `weir migrate` first")
        receipt_key = ensure_receipt_key(settings)
        secret = asyncio.run(create_admin(settings.database_url, organization, project, *model_names(settings)))
    if json_output:
        print_json({"organization": organization, "project": project, "admin_key": secret})
        return
    typer.echo(secret)
    stderr.print("This admin key is shown once. Keep it as WEIR_ADMIN_KEY where you run `weir`.")
    if receipt_key is not None:
        stderr.print(f"Receipts will be signed with {receipt_key}: copy it to the other machines that serve.")


def rotate_receipt_key() -> None:
    """Make a new key that signs receipts, in the place of the old one on this machine, which is deleted.

    Servers use it from their next start. Receipts that the old key signed stay valid: its public half is kept.
    """
    path = key_path(read_settings().to_environment())
    if path is None:
        wrong_use("WEIR_RECEIPT_KEY_FILE says off: name a file there to sign receipts")
    try:
        signer = replace_key(path)
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}")
    typer.echo(signer.key_id)
    note(f"{path} holds the new key: copy it to the other machines that serve, and restart the servers")


@doctor.command()
def tensorrt(
    model: Annotated[Path, typer.Option("--model", help="A checkpoint in Hugging Face layout.", exists=True, file_okay=False)],
    tensor_parallel: Annotated[int, typer.Option("--tensor-parallel", min=1, help="GPUs that share each matrix.")] = 1,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences at once.")] = 16,
    as_json: JsonOption = False,
) -> None:
    """Put a list of questions to TensorRT-LLM on this machine, and show the answers. Takes the GPU for a few minutes.

    Exit code 1 if something is so that the engine of Weir would not work here.
    """
    from inference.adapters.tensorrt_doctor import examine
    from inference.adapters.tensorrt_engine import TensorRtOptions
    from inference.checkpoint.checkpoint import read_config
    from inference.limits import EngineLimits

    with clear_failures():
        config = read_config(model)
        window = min(config.context_window_tokens, 8192)
        limits = EngineLimits(context_window_tokens=window, step_token_count_max=2048, running_sequence_count_max=batch)
        options = TensorRtOptions(tensor_parallel_size=tensor_parallel)
        found = examine(str(model), config.vocabulary_size, limits, options)
    report("TensorRT-LLM on this machine", found, as_json)


@doctor.command()
def remote(
    target: Annotated[str, typer.Argument(help="trtllm://host:port or vllm://host:port.")],
    model: Annotated[Path, typer.Option("--model", help="The directory with its tokenizer.", exists=True, file_okay=False)],
    share_prefixes: Annotated[bool, typer.Option("--share-prefixes", help="Tenants may share cached prefixes.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Put a list of questions to a server of `trtllm-serve --grpc` or `vllm serve --grpc`, and show the answers.

    Certificates are those of WEIR_REMOTE_TLS_*. Exit code 1 if something is so that Weir would not use the server.
    """
    from api.fleet.fleet import remote_settings
    from inference.adapters.remote_doctor import examine

    with clear_failures():
        settings = replace(remote_settings(Settings.from_environment(), "doctor", target, model), share_prefixes=share_prefixes)
        found = asyncio.run(examine(settings))
    report(f"{target}, as Weir sees it", found, as_json)


def report(title: str, found: Sequence[Observation], as_json: bool) -> NoReturn:
    """Show what was found; ends the command, with exit code 1 if anything is bad."""
    from inference.adapters.findings import Verdict

    if as_json:
        print_json(found)
    else:
        rows = ((each.question, each.verdict.value, each.seen) for each in found)
        show(table("question", "verdict", "seen", title=title, rows=rows))
    raise typer.Exit(ExitCode.FAILED if any(each.verdict is Verdict.BAD for each in found) else ExitCode.DONE)
