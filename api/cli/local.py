"""What the commands that run Weir itself share: settings from environment and flags, and failures in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from api.settings import SettingInvalid, Settings
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
    return replace(settings, listen_address=listen) if listen else settings


@contextlib.contextmanager
def clear_failures() -> Iterator[None]:
    """Errors of starting up, without a traceback."""
    import psycopg
    import sqlalchemy.exc

    from api.cli.stack import StackFailed

    try:
        yield
    except (StackFailed, PostgresNotStarted, CheckpointInvalid, SettingInvalid) as error:
        fail(str(error))
    except (psycopg.OperationalError, sqlalchemy.exc.OperationalError) as error:
        fail(f"the database of WEIR_DATABASE_URL does not answer: {str(error).strip()}")
    except OSError as error:
        fail(str(error))
