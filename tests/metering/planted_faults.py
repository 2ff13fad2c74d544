"""Faults planted in the database, written as tables, and those that no check reports.

    is missing             | DELETE FROM quota_counters WHERE held > 0
    live holds reserve     | UPDATE holds SET leased_token_count = leased_token_count + 1
                           | WHERE state = 'held'

Left: a part of the violation that a check must report, or the name of the check. Right: the
statement, which may take several lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from metering.proof.check import Moment
from metering.proof.fsck import run_check, select_checks
from metering.store.db import psycopg_conninfo

# Of tables whose rows a fault makes contradict each other. Each exists before a fault is planted.
UNGUARDED = (
    "SET LOCAL session_replication_role = replica",  # without triggers and foreign keys
    "DROP INDEX IF EXISTS uq_holds_request",
    "ALTER TABLE usage_events DROP CONSTRAINT ck_usage_events_rated_and_posted",
    "ALTER TABLE ledger_transactions DROP CONSTRAINT ck_ledger_transactions_usage_not_before",
    "ALTER TABLE invoices DROP CONSTRAINT ck_invoices_adds_up",
)


def faults(table: str) -> list[tuple[str, str]]:
    """Return the statement and the expected report of each fault of a table."""
    found: list[tuple[str, str]] = []
    for line in filter(None, map(str.strip, table.splitlines())):
        reported, _, statement = line.partition("|")
        if reported.strip():
            found.append((statement.strip(), reported.strip()))
        else:
            begun, expected = found.pop()
            found.append((f"{begun} {statement.strip()}", expected))
    return found


def unseen(
    database_url: str, planted: Sequence[tuple[str, str]], *moments: Moment
) -> list[tuple[str, object]]:
    """Return planted faults that no check found, each rolled back."""
    missed: list[tuple[str, object]] = []
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        for fault, reported in planted:
            for statement in (*UNGUARDED, fault):
                connection.execute(statement.encode())
            found = [
                f"{check.name}: {each}"
                for check in select_checks(moments=moments)
                for each in run_check(connection, check, sample_max=1000).sample
            ]
            connection.rollback()
            if not any(reported in violation for violation in found):
                missed.append((fault, found))
    return missed
