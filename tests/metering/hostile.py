"""A database with hostile defaults, as its operator may have set them for other programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import psycopg
from psycopg import sql
from sqlalchemy import make_url

from metering.store.db import psycopg_conninfo

# Each is allowed to the owner of a database; none may be noticed by Weir.
DEFAULTS = {
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
    "statement_timeout": "1",
    "lock_timeout": "1",
    "idle_in_transaction_session_timeout": "1",
    "idle_session_timeout": "50",
    "transaction_timeout": "500",
    "synchronous_commit": "off",
    "TimeZone": "Asia/Kathmandu",
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "sql_standard",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
    "client_encoding": "LATIN1",
    "standard_conforming_strings": "off",
    "array_nulls": "off",
    "transform_null_equals": "on",
}
# Of connections that tests make by themselves, by the options of the URL, which Weir replaces.
FRIENDLY = (
    *("default_transaction_isolation=read\\ committed", "default_transaction_read_only=off"),
    *("statement_timeout=0", "lock_timeout=0", "idle_in_transaction_session_timeout=0"),
    *("idle_session_timeout=0", "transaction_timeout=0", "timezone=UTC", "datestyle=ISO"),
    *("intervalstyle=postgres", "standard_conforming_strings=on", "array_nulls=on"),
)


@contextmanager
def hostile(
    database_url: str, isolation: str = "serializable", *, of_role: bool = False
) -> Iterator[str]:
    """Give the database hostile defaults, or its role in it; yield a URL for its connections."""
    name = make_url(database_url).database
    assert name is not None
    whose = sql.SQL("ROLE CURRENT_USER IN DATABASE" if of_role else "DATABASE")
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as connection:
        for setting, value in {**DEFAULTS, "default_transaction_isolation": isolation}.items():
            connection.execute(
                sql.SQL("ALTER {} {} SET {} = {}").format(
                    whose, sql.Identifier(name), sql.Identifier(setting), value
                )
            )
    options = " ".join(f"-c {setting}" for setting in FRIENDLY)
    separator = "&" if "?" in database_url else "?"
    yield f"{database_url}{separator}options={quote(options)}"
