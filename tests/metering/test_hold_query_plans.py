"""Every statement of a batch uses indexes, even if planned on empty tables."""

from __future__ import annotations

import re
from types import ModuleType

import psycopg
import pytest

from metering.holds import (
    fast_path,
    hold_cache,
    hold_connection,
    preauthorized_holds,
    read,
    slow_path,
    write,
)
from metering.holds.hold_connection import PLANS
from metering.store.db import connection_options, psycopg_conninfo
from metering.store.pipeline import _query

STATEMENT = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b[^;]*\bFROM\b", re.DOTALL)

MODULES = (read, write, preauthorized_holds, hold_cache, fast_path, slow_path, hold_connection)


def statements(module: ModuleType) -> list[tuple[str, str]]:
    """Return a module's SQL constants that read or write rows of a table."""
    constants = (
        (name, value)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    )
    return [(name, value) for name, value in constants if STATEMENT.match(value)]


ALL = [case for module in MODULES for case in statements(module)]


def plan(database_url: str, sql: str, options: tuple[str, ...]) -> str:
    with psycopg.connect(
        psycopg_conninfo(database_url), options=connection_options(options)
    ) as connection:
        rows = connection.execute(b"EXPLAIN (GENERIC_PLAN) " + _query(sql)).fetchall()
    return "\n".join(row[0] for row in rows)


@pytest.mark.parametrize(("name", "sql"), ALL, ids=[name for name, _ in ALL])
def test_no_statement_reads_a_whole_table(module_database: str, name: str, sql: str) -> None:
    planned = plan(module_database, sql, PLANS)

    lines = planned.splitlines()
    assert "Seq Scan" not in planned, planned
    for scan, below in zip(lines, [*lines[1:], ""], strict=True):
        if "Index Scan" in scan or "Index Only Scan" in scan:
            assert below.lstrip().startswith("Index Cond"), planned


def test_the_statements_are_planned_otherwise_without_the_settings(module_database: str) -> None:
    assert len(ALL) >= 15
    assert any("Seq Scan" in plan(module_database, sql, ()) for _, sql in ALL)
