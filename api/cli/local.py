"""What the commands that run Weir itself share: settings from environment and flags, and failures in one line."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from api.cli.connection import CONNECTION_FILE, Connection, ConnectionProblem, read_connection_file
from api.cli.render import fail
from api.core.settings import SettingInvalid, Settings, listen_address
from inference.errors import CheckpointInvalid
from metering.core.errors import AlreadyExists, KeyInvalid
from metering.pricing.prices import list_current_prices, set_price
from metering.receipts.signing import ensure_key, key_path
from metering.store.db import Sessions, create_engine, create_sessions
from metering.store.embedded_postgres import PostgresNotStarted
from metering.tenants.tenants import authenticate, create_api_key, create_organization, create_project

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
        fail(str(error), 2)
    settings = replace(settings, home=(home or settings.home).expanduser().absolute())
    if not listen:
        return settings
    try:
        return replace(settings, listen_address=listen_address(listen))
    except ValueError as error:
        fail(f"--listen {error}, not {listen!r}", 2)


def said(error: Exception) -> str:
    """What PostgreSQL or the way to it has said, in one line, without the wrapping of libraries."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


@contextlib.contextmanager
def lone_errors() -> Iterator[None]:
    """An error that ends a task group alone leaves without the group; several stay together."""
    try:
        yield
    except ExceptionGroup as group:
        error: Exception = group
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if error is group:
            raise
        raise error from None


@contextlib.contextmanager
def clear_failures() -> Iterator[None]:
    """Errors of starting up, without a traceback."""
    import psycopg
    import sqlalchemy.exc

    from api.cli.stack import StackFailed

    try:
        with lone_errors():
            yield
    except (StackFailed, PostgresNotStarted, CheckpointInvalid, SettingInvalid) as error:
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
