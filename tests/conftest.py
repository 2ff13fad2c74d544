"""Shared fixtures: one PostgreSQL server per run, and a new migrated database per test.

The server is the embedded one, in a temporary directory and without durability.
`WEIR_TEST_DATABASE_URL` names another one, whose role must be allowed to create databases.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpcore2
import hypothesis
import psycopg
import pytest
import structlog
from psycopg import sql
from sqlalchemy import make_url
from sqlalchemy.dialects.postgresql.psycopg import PGDialectAsync_psycopg
from sqlalchemy.util import LRUCache
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from inference.workers import process
from metering.store import db, embedded_postgres
from metering.store.db import (
    Sessions,
    create_engine,
    create_sessions,
    psycopg_conninfo,
    sqlalchemy_url,
)
from metering.store.migrations_runner import migrate, prepare_application_role
from tests.forked_workers import execute_worker, fork_workers
from tests.forks import shared_directory

# Files by how their names begin, in the order in which they are begun: one that is begun last would
# keep a single worker busy at the end. Every other worker takes the first kind, which mostly waits
# for processes, the others compute meanwhile; each helps out when its own kind is used up.
WAITING = (
    *("tests/faults/", "tests/sdk/", "tests/e2e/test_key_access", "tests/e2e/test_loop_blocks"),
    *("tests/e2e/test_roles", "tests/e2e/test_sign_in", "tests/e2e/test_console_browser"),
    "tests/e2e/",
)
COMPUTING = (
    *("tests/api/", "tests/bench/", "tests/cli/test_deep_files"),
    *("tests/metering/test_hold", "tests/metering/test_stripe", "tests/metering/test_closing"),
    *("tests/metering/test_quota_recount", "tests/metering/test_reasoning_prices"),
    *("tests/metering/test_pipeline", "tests/metering/test_refused_exports"),
    *("tests/inference/test_cuda_kernels", "tests/inference/", "tests/test_", "tests/infra/"),
    "tests/",  # the other files of tests/metering/ and tests/cli/, all short
)

# A test's database need not survive a crash of the machine. Tests that kill one start their own.
WITHOUT_DURABILITY = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "max_connections": "200",
}
APPLICATION_ROLE = "weir_test_application"
COMPILED_MAX = 5000  # statements, several times as many as there are
SCRATCH_MIN_BYTES = 2 * 1024**3  # the server, WAL, and some databases of 8 MB each

PARSE = ast.parse

Connection = psycopg.Connection[tuple[Any, ...]]
Value = TypeVar("Value")
KEPT: dict[tuple[str, Callable[[str], Connection]], Connection] = {}  # by URL and way to connect


def pytest_configure(config: pytest.Config) -> None:
    """Log exceptions without local variables, which cost 0.5 s of CPU each; patch `ast.parse`.

    No property test may fail because the machine is slow.
    """
    shared_directory()
    share_compiled_statements()
    share_certificates()
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.args[:] = collection_order(
            Path(__file__).parent, getattr(config, "workerinput", {"workerid": "gw0"})
        )
    ast.parse = parse_without_collecting
    hypothesis.settings.register_profile(
        "weir", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("weir")
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], renderer])


def share_compiled_statements() -> None:
    """Compile each statement once in a process, not once for each engine: each test has its own.

    The caches of SQLAlchemy have the engine's dialect in their keys.
    """
    kind: Any = PGDialectAsync_psycopg
    kind.__eq__ = lambda one, other: type(one) is type(other)
    kind.__hash__ = lambda one: hash(type(one))
    shared = {"compiled_cache": LRUCache[Any, Any](COMPILED_MAX)}
    engines: Any = db
    engines.create_async_engine = functools.partial(
        engines.create_async_engine, execution_options=shared
    )


def share_certificates() -> None:
    """Read the authorities' certificates once in a process: each HTTP client would do it again."""
    package: Any = httpcore2
    package.default_ssl_context = functools.cache(package.default_ssl_context)


def collection_order(tests: Path, worker: Mapping[str, Any]) -> list[str]:
    """Return the folders and files of the tests, from another one on in each worker.

    Each worker then rewrites the assertions of other files and finds those of the others compiled,
    which saves 7 s of CPU a worker in a new checkout.
    """
    files = sorted(tests.rglob("test_*.py"))
    locations = [tests / each.relative_to(tests).parts[0] for each in files]
    first = len(locations) * int(worker["workerid"][2:]) // worker.get("workercount", 1)
    return [str(location) for location in dict.fromkeys(locations[first:] + locations[:first])]


@functools.wraps(PARSE)
def parse_without_collecting(*args: Any, **options: Any) -> Any:
    """Run `ast.parse` without garbage collection.

    In CPython 3.11 parses must not nest. A collection inside one runs finalizers; that of a failed
    task logs a traceback, which parses the line to mark the position, and the test fails with a
    SystemError, "AST constructor recursion depth mismatch".
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return PARSE(*args, **options)
    finally:
        if collects:
            gc.enable()


def pytest_collection_finish() -> None:
    """Collect garbage less often and skip imported objects, which saves 10 % of the CPU."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files; the order within a file is kept."""
    order = (*WAITING, *COMPUTING)

    @functools.cache
    def position(file: str) -> tuple[int, str]:
        ranks = (rank for rank, start in enumerate(order) if file.startswith(start))
        return next(ranks, len(order)), file

    items.sort(key=lambda item: position(item.nodeid.partition("::")[0]))


class Alternating(LoadFileScheduling):
    """Shares out files of both kinds among the workers."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        file = next_file(self.workqueue, int(node.gateway.id.removeprefix("gw")))
        self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)


def next_file(queue: Iterable[str], worker: int) -> str:
    """Return the first file of the kind that a worker prefers; the first of all if none is left."""
    files = list(queue)
    waiting = worker % 2 == 0
    return next((file for file in files if file.startswith(WAITING) is waiting), files[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Alternating | None:
    return Alternating(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print one line for programs: the number of tests that need a second, lone run, and their ids.

    After tests in several processes, these are the failed ones; in a run of failed tests, all.
    """
    outcomes = ["failed", "error"]
    if config.getoption("lf", False):
        outcomes += ["passed", "skipped"]
    elif not config.getoption("numprocesses", None):
        return
    tests = {report.nodeid for each in outcomes for report in terminalreporter.stats.get(each, ())}
    terminalreporter.write_line(" ".join([f"second runs: {len(tests)}", *sorted(tests)]))


def scratch() -> Path | None:
    """Return a large file system in memory, or None; it copies a database in 20 ms, not 300 ms."""
    memory = Path("/dev/shm")
    roomy = (
        memory.is_dir()
        and os.access(memory, os.W_OK)
        and shutil.disk_usage(memory).free > SCRATCH_MIN_BYTES
    )
    return memory if roomy else None


def new_home() -> Path:
    """Create a directory for a server; remove those of killed test runs, with their servers."""
    parent = scratch() or Path(tempfile.gettempdir())
    for left in parent.glob("weir-test-*-*"):
        try:
            os.kill(int(left.name.split("-")[2]), 0)
        except (ProcessLookupError, ValueError):
            with contextlib.suppress(OSError):  # of another user, or removed by another worker
                stop_server(left)
                # One worker succeeds.
                remove = left.rename(left.with_name(f"weir-test-{os.getpid()}-{uuid.uuid4().hex}"))
                shutil.rmtree(remove, ignore_errors=True)
        except PermissionError:
            pass  # another user's run
    return Path(tempfile.mkdtemp(prefix=f"weir-test-{os.getpid()}-", dir=parent))


def stop_server(home: Path) -> None:
    """Stop the server in a directory, if one runs."""
    embedded_postgres.EmbeddedPostgres(home / "postgres", home / "postgres").stop()


def remove_home(home: Path) -> None:
    """Stop the server in a directory, then delete both."""
    stop_server(home)
    shutil.rmtree(home)


@contextlib.contextmanager
def new_database(server_url: str, template: str = "template0") -> Iterator[str]:
    """Yield the URL of a database that exists during the block, a copy of the template."""
    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(psycopg_conninfo(server_url), autocommit=True) as connection:
        # Copying files takes half the time of the default, which writes each page to the WAL.
        create = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy")
        connection.execute(create.format(sql.Identifier(name), sql.Identifier(template)))
        url = (
            sqlalchemy_url(server_url)
            .set(drivername="postgresql", database=name)
            .render_as_string(hide_password=False)
        )
        try:
            yield url
        finally:
            close_kept(url)
            connection.execute(
                sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name))
            )


def on_kept_connection(
    database_url: str, connect: Callable[[str], Connection], use: Callable[[Connection], Value]
) -> Value:
    """Call `use` with a connection, which is kept for the next call with the same `connect`."""
    connection = KEPT.pop((database_url, connect), None)
    kept = connection is not None
    if connection is None:
        connection = connect(database_url)
    try:
        value = use(connection)
    except BaseException:
        lost = connection.closed
        connection.close()
        if kept and lost:  # the test has stopped or killed the server
            return on_kept_connection(database_url, connect, use)
        raise
    if KEPT.setdefault((database_url, connect), connection) is not connection:
        connection.close()  # another thread kept one
    return value


def connect_to_ask(database_url: str) -> Connection:
    """Connect for statements that are transactions of their own."""
    return psycopg.connect(psycopg_conninfo(database_url), autocommit=True, prepare_threshold=None)


def ask(database_url: str, query: str, *values: object) -> psycopg.Cursor[tuple[Any, ...]]:
    """Run a statement in its own transaction and return the result.

    The connection is kept: tests poll every few milliseconds, and connecting takes 10 ms.
    """
    return on_kept_connection(
        database_url, connect_to_ask, lambda kept: kept.execute(query.encode(), values)
    )


def close_kept(*database_urls: str) -> None:
    """Close the kept connections to these databases."""
    for key in [key for key in KEPT if key[0] in database_urls]:
        if (connection := KEPT.pop(key, None)) is not None:
            connection.close()


def pytest_unconfigure() -> None:
    """Close the remaining kept connections."""
    close_kept(*(url for url, _ in KEPT))


@pytest.fixture(scope="session", autouse=True)
def _forked_workers() -> None:
    """Fork the engine workers of this process."""
    process.start_process = fork_workers()


@pytest.fixture
def executed_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the engine workers of this process as in production."""
    monkeypatch.setattr(process, "start_process", execute_worker)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """Yield the URL of a server's maintenance database."""
    if url := os.environ.get("WEIR_TEST_DATABASE_URL"):
        yield url
        return
    home = new_home()
    yield embedded_postgres.start(home / "postgres", WITHOUT_DURABILITY).url
    remove_home(home)


@pytest.fixture
def postgres_home() -> Iterator[Path]:
    """Yield an empty directory for a server that a test starts, kills and restarts.

    Not `tmp_path`: the account that the server gets if tests run as root cannot enter it.
    """
    home = new_home()
    yield home
    remove_home(home)


@pytest.fixture(scope="session")
def template_database(postgres_server: str) -> Iterator[str]:
    """Yield the name of a migrated, empty database that others are copied from."""
    with new_database(postgres_server) as url:
        migrate(url)
        prepare_application_role(url, APPLICATION_ROLE, password=APPLICATION_ROLE)
        yield str(make_url(url).database)


@pytest.fixture
def database_url(postgres_server: str, template_database: str) -> Iterator[str]:
    """Yield the URL of a migrated, empty database for this test only."""
    with new_database(postgres_server, template=template_database) as url:
        yield url


@pytest.fixture(scope="module")
def module_database(postgres_server: str, template_database: str) -> Iterator[str]:
    """Yield the URL of a migrated, empty database for the tests of a module."""
    with new_database(postgres_server, template=template_database) as url:
        yield url


def as_application(database_url: str) -> str:
    """Return the database's URL for the role that api processes and workers use."""
    url = sqlalchemy_url(database_url).set(
        drivername="postgresql", username=APPLICATION_ROLE, password=APPLICATION_ROLE
    )
    return url.render_as_string(hide_password=False)


@pytest.fixture
async def sessions(database_url: str) -> AsyncIterator[Sessions]:
    """Yield sessions on the test's database."""
    engine = create_engine(database_url)
    yield create_sessions(engine)
    await engine.dispose()
