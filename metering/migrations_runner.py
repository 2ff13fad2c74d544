"""Brings a database to the schema of this code. The revisions are in `migrations/`, beside the package also when installed."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config

import metering

SCRIPTS = Path(metering.__file__).resolve().parent.parent / "migrations"


def migrate(database_url: str, revision: str = "head") -> None:
    """Upgrade to a revision; does nothing where it is reached. Several processes may call it at once: they take turns."""
    command.upgrade(config(database_url), revision)


def config(database_url: str) -> Config:
    """Alembic's configuration for any of its commands, without `alembic.ini` and without logging set up."""
    result = Config()
    result.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    result.set_main_option("path_separator", "os")
    result.attributes["database_url"] = database_url
    return result
