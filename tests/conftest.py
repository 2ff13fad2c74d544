"""What tests of all packages share: one PostgreSQL server per run, and a fresh migrated database for each test that asks for one.

The server is the embedded one, in a temporary directory and without durability; `WEIR_TEST_DATABASE_URL` names another one, whose
role must be allowed to create databases.
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
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import structlog
from psycopg import sql
from sqlalchemy import make_url

from inference.workers import process
from metering.store import embedded_postgres
from metering.store.db import Sessions, create_engine, create_sessions, psycopg_conninfo, sqlalchemy_url
from metering.store.migrations_runner import migrate, prepare_application_role
from tests.forked_hosts import execute_host, fork_hosts

# Files whose tests mostly wait for processes come first: shared out last, one of them would keep a single worker busy at the end.
LONG_FILES_FIRST = ("tests/faults/", "tests/e2e/", "tests/api/", "tests/sdk/")

# A test's database need not survive a crash of the machine. Tests that kill the server start one of their own.
WITHOUT_DURABILITY = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "max_connections": "200"}
APPLICATION_ROLE = "weir_test_application"
SCRATCH_MIN_BYTES = 2 * 1024**3  # the server, WAL, and some databases of 8 MB each

PARSE = ast.parse

ASKING: dict[str, psycopg.Connection[tuple[Any, ...]]] = {}  # by URL of the database; connections that `ask` keeps


def pytest_configure() -> None:
    """Log exceptions without the local variables of all frames: to draw them takes half a second of CPU each. Parse as below."""
    ast.parse = parse_without_collecting
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], renderer])


@functools.wraps(PARSE)
def parse_without_collecting(*args: Any, **options: Any) -> Any:
    """`ast.parse`, which leaves garbage to be collected after it.

    In CPython 3.11 no parse may run inside another. A collection inside one runs finalizers; that of a failed task logs a
    traceback, and to mark the place in a line the traceback parses it: the test in which this happens fails with a SystemError,
    "AST constructor recursion depth mismatch".
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return PARSE(*args, **options)
    finally:
        if collects:
            gc.enable()


def pytest_collection_finish() -> None:
    """Collect garbage less often, and not among what is imported: else 10 % of the CPU goes into it."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order tests by how long their files take. Sorting is stable, so the order within a file stays."""
    items.sort(key=lambda item: [not item.nodeid.startswith(start) for start in LONG_FILES_FIRST])


def scratch() -> Path | None:
    """A roomy file system in memory, if there is one: copying a database takes 20 ms there and 300 ms on a disk."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > SCRATCH_MIN_BYTES
    return memory if roomy else None


def new_home() -> Path:
    """A directory for a server. Removes those that killed test runs have left behind, servers included."""
    parent = scratch() or Path(tempfile.gettempdir())
    for left in parent.glob("weir-test-*-*"):
        try:
            os.kill(int(left.name.split("-")[2]), 0)
        except (ProcessLookupError, ValueError):
            with contextlib.suppress(OSError):  # another user's, or another worker of this run was faster
                stop_server(left)
                remove = left.rename(left.with_name(f"weir-test-{os.getpid()}-{uuid.uuid4().hex}"))  # one worker succeeds
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
    """URL of a database that exists inside the block, a copy of the template."""
    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(psycopg_conninfo(server_url), autocommit=True) as connection:
        # Copying files takes half the time of the default, which writes each page to the WAL.
        create = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy")
        connection.execute(create.format(sql.Identifier(name), sql.Identifier(template)))
        url = sqlalchemy_url(server_url).set(drivername="postgresql", database=name).render_as_string(hide_password=False)
        try:
            yield url
        finally:
            end_asking(url)
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def ask(database_url: str, query: str, *values: object) -> psycopg.Cursor[tuple[Any, ...]]:
    """The result of a statement, each in a transaction of its own.

    The connection is kept for the next one: tests ask every few milliseconds while they wait, and a new one costs both sides 10 ms.
    """
    connection = ASKING.pop(database_url, None)
    kept = connection is not None
    if connection is None:
        connection = psycopg.connect(psycopg_conninfo(database_url), autocommit=True, prepare_threshold=None)
    try:
        answer = connection.execute(query.encode(), values)
    except BaseException:
        lost = connection.closed
        connection.close()
        if kept and lost:  # with its server, which a test has stopped or killed since
            return ask(database_url, query, *values)
        raise
    if ASKING.setdefault(database_url, connection) is not connection:  # another thread has asked meanwhile
        connection.close()
    return answer


def end_asking(*database_urls: str) -> None:
    """Close the connections that `ask` has kept."""
    for url in database_urls:
        if (connection := ASKING.pop(url, None)) is not None:
            connection.close()


def pytest_unconfigure() -> None:
    """Close those to servers that a test had for itself."""
    end_asking(*ASKING)


@pytest.fixture(scope="session", autouse=True)
def _forked_hosts() -> None:
    """Engine hosts of this process are forked."""
    process.start_process = fork_hosts()


@pytest.fixture
def executed_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine hosts of this process are started as in production."""
    monkeypatch.setattr(process, "start_process", execute_host)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a server's maintenance database."""
    if url := os.environ.get("WEIR_TEST_DATABASE_URL"):
        yield url
        return
    home = new_home()
    yield embedded_postgres.start(home / "postgres", WITHOUT_DURABILITY).url
    remove_home(home)


@pytest.fixture
def postgres_home() -> Iterator[Path]:
    """An empty directory in which a test may start, kill and restart a server of its own, as `postgres`.

    Not pytest's `tmp_path`: its parents are closed to the account that the server gets if we are root.
    """
    home = new_home()
    yield home
    remove_home(home)


@pytest.fixture(scope="session")
def template_database(postgres_server: str) -> Iterator[str]:
    """Name of a migrated, empty database that others are copied from."""
    with new_database(postgres_server) as url:
        migrate(url)
        prepare_application_role(url, APPLICATION_ROLE, password=APPLICATION_ROLE)
        yield str(make_url(url).database)


@pytest.fixture
def database_url(postgres_server: str, template_database: str) -> Iterator[str]:
    """URL of a migrated, empty database of this test's own."""
    with new_database(postgres_server, template=template_database) as url:
        yield url


def as_application(database_url: str) -> str:
    """URL of the same database for the role that api processes and workers connect as."""
    url = sqlalchemy_url(database_url).set(drivername="postgresql", username=APPLICATION_ROLE, password=APPLICATION_ROLE)
    return url.render_as_string(hide_password=False)


@pytest.fixture
async def sessions(database_url: str) -> AsyncIterator[Sessions]:
    """Sessions on the test's database."""
    engine = create_engine(database_url)
    yield create_sessions(engine)
    await engine.dispose()
