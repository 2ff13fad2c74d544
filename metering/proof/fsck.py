"""`weir fsck`: read-only checks of a database, all on one snapshot, including its triggers and
constraints.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from metering.core.errors import InvalidValue
from metering.proof.check import Check, Moment
from metering.proof.counter_checks import COUNTER_CHECKS
from metering.proof.export_checks import EXPORT_CHECKS
from metering.proof.hold_checks import HOLD_CHECKS
from metering.proof.invoice_checks import INVOICE_CHECKS
from metering.proof.ledger_checks import LEDGER_CHECKS
from metering.proof.receipt_checks import RECEIPT_CHECKS
from metering.proof.schema_checks import SCHEMA_CHECKS
from metering.proof.tenant_checks import TENANT_CHECKS
from metering.proof.usage_checks import USAGE_CHECKS
from metering.store.db import (
    CONNECT_TIMEOUT_S,
    connection_options,
    psycopg_conninfo,
    settle_statement,
)

CHECKS: tuple[Check, ...] = (
    *SCHEMA_CHECKS,
    *TENANT_CHECKS,
    *HOLD_CHECKS,
    *COUNTER_CHECKS,
    *USAGE_CHECKS,
    *RECEIPT_CHECKS,
    *LEDGER_CHECKS,
    *INVOICE_CHECKS,
    *EXPORT_CHECKS,
)

SAMPLE_MAX = 10  # violations reported per check, next to their total number

# Sums over millions of rows: in memory where possible, without a time limit, since a read-only
# transaction blocks no writer.
SETTINGS = {
    "work_mem": "256MB",
    "statement_timeout": "0",
    "jit": "off",
    "max_parallel_workers_per_gather": "4",
}

ALL_TIME = "-infinity"
Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Violation:
    """Row that violates an invariant, and a description of the problem."""

    subject: str
    problem: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one check. `sample` has the first of `violation_count` violations."""

    check: Check
    violation_count: int
    sample: tuple[Violation, ...]
    duration_s: float


def select_checks(
    names: Collection[str] = (), moments: Collection[Moment] = (Moment.ALWAYS, Moment.SOON)
) -> tuple[Check, ...]:
    """Select the checks with these names or, without names, those of these moments.

    Raises: InvalidValue if a name is unknown.
    """
    unknown = sorted(set(names) - {check.name for check in CHECKS})
    if unknown:
        raise InvalidValue(
            "check",
            f"there is no check {unknown[0]!r}: the checks are {', '.join(c.name for c in CHECKS)}",
        )
    return tuple(
        check for check in CHECKS if check.name in names or (not names and check.moment in moments)
    )


def fsck(
    database_url: str,
    checks: Sequence[Check],
    *,
    since: datetime | None = None,
    sample_max: int = SAMPLE_MAX,
) -> Iterator[Verdict]:
    """Run checks one after the other on one snapshot of the database; yield each result.

    With `since`, reads only rows written from then on; sums begin with that month or hour. Raises:
    psycopg.Error.
    """
    with connect(database_url) as connection:
        yield from run_checks(connection, checks, since=since, sample_max=sample_max)


def connect(database_url: str, settings: Sequence[str] = ()) -> Connection:
    """Connect for read-only transactions with a snapshot each. Raises: psycopg.Error.

    settings: of the connection, as for `connection_options`.
    """
    connection = psycopg.connect(
        psycopg_conninfo(database_url),
        connect_timeout=CONNECT_TIMEOUT_S,
        options=connection_options(settings),
    )
    connection.execute(settle_statement(settings).encode())
    connection.commit()
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    connection.read_only = True
    return connection


def run_checks(
    connection: Connection,
    checks: Sequence[Check],
    *,
    since: datetime | None = None,
    sample_max: int = SAMPLE_MAX,
) -> Iterator[Verdict]:
    """Run checks one after the other in a new transaction of the connection, left open."""
    # Retention cannot exchange events for sums, of which the snapshot has only one.
    connection.execute("LOCK TABLE usage_events IN ACCESS SHARE MODE")
    for name, value in SETTINGS.items():
        connection.execute("SELECT set_config(%s, %s, true)", (name, value))
    for check in checks:
        yield run_check(connection, check, since=since, sample_max=sample_max)


def run_check(
    connection: Connection,
    check: Check,
    *,
    since: datetime | None = None,
    sample_max: int = SAMPLE_MAX,
) -> Verdict:
    """Run one check in the connection's transaction, with at most `sample_max` samples."""
    began_at = time.monotonic()
    query = f"""
        SELECT count(*) OVER (), subject, problem
        FROM ({check.sql}) AS violations
        ORDER BY subject, problem
        LIMIT {sample_max}
    """
    parameters = {"since": ALL_TIME if since is None else since.isoformat()}
    rows = connection.execute(query.encode(), parameters).fetchall()
    sample = tuple(Violation(subject, problem) for _, subject, problem in rows)
    return Verdict(check, rows[0][0] if rows else 0, sample, time.monotonic() - began_at)
