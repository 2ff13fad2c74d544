"""Brings a database to the schema of this code. The revisions are in `migrations/`, beside the package also when installed."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

import metering
from metering.store.db import sqlalchemy_url

MIGRATION_LOCK_ID = 7_355_608  # any fixed number; it only has to be ours
SCRIPTS = Path(metering.__file__).resolve().parent.parent / "migrations"


def migrate(database_url: str, revision: str = "head") -> None:
    """Upgrade to a revision; does nothing where it is reached. Several processes may call it at once: they take turns."""
    command.upgrade(config(database_url), revision)


def is_current(database_url: str) -> bool:
    """Whether the database has the schema of this version. Raises: sqlalchemy.exc.OperationalError if it is away."""
    engine = create_engine(sqlalchemy_url(database_url), poolclass=NullPool)
    with engine.connect() as connection:
        current = MigrationContext.configure(connection).get_current_heads()
    engine.dispose()
    return set(current) == set(ScriptDirectory.from_config(config(database_url)).get_heads())


def config(database_url: str) -> Config:
    """Alembic's configuration for any of its commands, without `alembic.ini` and without logging set up."""
    result = Config()
    result.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    result.set_main_option("path_separator", "os")
    result.attributes["database_url"] = database_url
    return result
