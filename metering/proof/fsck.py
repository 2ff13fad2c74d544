"""`weir fsck`: every check on one snapshot of a database, read-only."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from metering.errors import InvalidValue
from metering.proof import (
    counter_checks,
    export_checks,
    hold_checks,
    invoice_checks,
    ledger_checks,
    receipt_checks,
    schema_checks,
    usage_checks,
)
from metering.proof.checks import Check, Moment
from metering.store.db import psycopg_conninfo
from metering.store.store_gate import CONNECT_TIMEOUT_S

CHECKS: tuple[Check, ...] = (
    *schema_checks.CHECKS,
    *hold_checks.CHECKS,
    *counter_checks.CHECKS,
    *usage_checks.CHECKS,
    *receipt_checks.CHECKS,
    *ledger_checks.CHECKS,
    *invoice_checks.CHECKS,
    *export_checks.CHECKS,
)
SAMPLE_MAX = 10  # violations told of each check; their number is always told
# Sums over millions of rows: in memory as far as it goes, and for as long as they take. Nothing waits for a reader.
SETTINGS = {"work_mem": "256MB", "statement_timeout": "0", "jit": "off", "max_parallel_workers_per_gather": "4"}
EVERYTHING = "-infinity"

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong, and of what."""

    subject: str
    problem: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one check found. sample: the first of `violation_count` violations."""

    check: Check
    violation_count: int
    sample: tuple[Violation, ...]
    duration_s: float


def chosen_checks(names: Collection[str] = (), moments: Collection[Moment] = (Moment.ALWAYS, Moment.SOON)) -> tuple[Check, ...]:
    """The checks of these names, whatever their moment; without names all of these moments. Raises: InvalidValue."""
    unknown = sorted(set(names) - {check.name for check in CHECKS})
    if unknown:
        raise InvalidValue("check", f"there is no check {unknown[0]!r}: the checks are {', '.join(c.name for c in CHECKS)}")
    return tuple(check for check in CHECKS if check.name in names or (not names and check.moment in moments))


def fsck(
    database_url: str, checks: Sequence[Check], *, since: datetime | None = None, sample_max: int = SAMPLE_MAX
) -> Iterator[Verdict]:
    """Run checks one after the other, all on the database as it is when the first begins.

    since: looks only at what was written from then on; sums begin with the month or hour of that time.
    Raises: psycopg.Error.
    """
    with psycopg.connect(psycopg_conninfo(database_url), connect_timeout=CONNECT_TIMEOUT_S) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        for name, value in SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, true)", (name, value))
        for check in checks:
            yield judge(connection, check, since=since, sample_max=sample_max)


def judge(connection: Connection, check: Check, *, since: datetime | None = None, sample_max: int = SAMPLE_MAX) -> Verdict:
    """Run one check as the connection's transaction sees the database."""
    began_at = time.monotonic()
    query = f"SELECT count(*) OVER (), subject, problem FROM ({check.sql}) AS found ORDER BY subject, problem LIMIT {sample_max}"
    parameters = {"since": EVERYTHING if since is None else since.isoformat()}
    rows = connection.execute(query.encode(), parameters).fetchall()
    sample = tuple(Violation(subject, problem) for _, subject, problem in rows)
    return Verdict(check, rows[0][0] if rows else 0, sample, time.monotonic() - began_at)
