"""The database of this installation, for commands that work on it directly. The API server need not run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

from api.cli.local import HomeOption, clear_failures, fail, read_settings
from metering.core.errors import MeteringError
from metering.store import embedded_postgres
from metering.store.db import Sessions, create_engine, create_sessions

Result = TypeVar("Result")


def run(home: HomeOption, work: Callable[[Sessions], Awaitable[Result]]) -> Result:
    """Do the work on the database of the settings; errors in one line."""

    async def connected() -> Result:
        async with local_sessions(home) as sessions:
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


@contextlib.asynccontextmanager
async def local_sessions(home: HomeOption) -> AsyncIterator[Sessions]:
    """On the database of the settings."""
    with local_database(home) as url:
        engine = create_engine(url)
        try:
            yield create_sessions(engine)
        finally:
            await engine.dispose()


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
