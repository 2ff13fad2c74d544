"""What the commands that run Weir itself share: settings from environment and flags, and failures in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from api.core.setting_values import SettingInvalid, listen_address
from api.core.settings import Settings
from inference.errors import CheckpointInvalid
from metering.store.embedded_postgres import PostgresNotStarted

ListenOption = Annotated[str, typer.Option("--listen", help="Address and port; port 0 lets the system choose.", show_default=False)]
HomeOption = Annotated[
    Path | None, typer.Option("--home", help="Directory for everything that is kept. [default: WEIR_HOME or ~/.weir]")
]

stderr = Console(stderr=True, highlight=False)


def fail(message: str, status: int = 1) -> NoReturn:
    """End the command with one clear message."""
    stderr.print(f"[red]error:[/red] {message}", soft_wrap=True)
    raise typer.Exit(status)


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
