"""`weir fsck`: every check on one snapshot of a database, read-only; and the checks of its guards and constraints."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from metering.core.errors import InvalidValue
from metering.proof.billing_checks import EXPORT_CHECKS, INVOICE_CHECKS, LEDGER_CHECKS
from metering.proof.checks import Check, Moment
from metering.proof.hold_checks import COUNTER_CHECKS, HOLD_CHECKS
from metering.proof.usage_checks import RECEIPT_CHECKS, USAGE_CHECKS
from metering.store.db import CONNECT_TIMEOUT_S, psycopg_conninfo

# Each guard with its function. A migrated database has exactly these; a test compares them.
GUARDS = {
    "adjustment_decisions_append_only": "refuse_change",
    "adjustments_append_only": "refuse_change",
    "alerts_append_only": "refuse_change",
    "api_keys_are_kept": "refuse_deletion",
    "api_keys_update_told": "api_keys_update_told",
    "audit_log_append_only": "refuse_change",
    "billing_months_append_only": "refuse_change",
    "billing_months_close_in_order": "billing_months_close_in_order",
    "billing_months_close_once": "billing_month_closes_once",
    "document_series_append_only": "refuse_change",
    "document_series_count_on": "document_series_counts_on",
    "credit_applications_append_only": "refuse_change",
    "credit_applications_within_grant": "credit_within_grant",
    "credit_grants_append_only": "refuse_change",
    "holds_are_kept": "refuse_deletion",
    "holds_belong_together": "holds_belong_together",
    "holds_end_once": "hold_ends_once",
    "invoice_lines_add_up": "invoice_adds_up",
    "invoice_letterheads_append_only": "refuse_change",
    "invoice_lines_append_only": "refuse_change",
    "invoices_append_only": "refuse_change",
    "ledger_accounts_append_only": "refuse_change",
    "ledger_entries_append_only": "refuse_change",
    "ledger_entries_balanced": "ledger_balanced",
    "ledger_months_open": "ledger_months_open",
    "ledger_transactions_append_only": "refuse_change",
    "meter_batches_append_only": "refuse_change",
    "meter_batches_guarded": "meter_batch_keeps_tokens",
    "month_closings_append_only": "refuse_change",
    "meter_batches_invoiced_once": "meter_batch_invoiced_once",
    "organizations_are_kept": "refuse_deletion",
    "plan_assignments_append_only": "refuse_change",
    "plan_versions_append_only": "refuse_change",
    "price_versions_append_only": "refuse_change",
    "price_versions_insert_told": "price_versions_insert_told",
    "projects_are_kept": "refuse_deletion",
    "projects_have_receipt_chains": "create_receipt_chain",
    "quotas_delete_told": "quotas_delete_told",
    "quotas_insert_told": "quotas_insert_told",
    "quotas_tell_when": "quotas_tell_when",
    "quotas_update_told": "quotas_update_told",
    "receipt_batches_append_only": "refuse_change",
    "receipt_chains_go_forward": "refuse_chain_going_back",
    "receipt_chains_kept": "refuse_change",
    "receipt_keys_append_only": "refuse_change",
    "stripe_events_append_only": "refuse_change",
    "stripe_events_guarded": "stripe_event_keeps_payload",
    "stripe_late_items_append_only": "refuse_change",
    "stripe_late_items_guarded": "stripe_late_item_keeps_amount",
    "stripe_month_items_append_only": "refuse_change",
    "stripe_month_items_guarded": "stripe_month_item_keeps_amount",
    "stripe_month_settlements_append_only": "refuse_change",
    "stripe_month_settlements_guarded": "stripe_month_settled_once",
    "usage_corrections_append_only": "refuse_change",
    "usage_events_append_only": "refuse_change",
    "usage_events_are_of_their_holds": "usage_events_are_of_their_holds",
    "usage_events_partition": "refuse_partition",
    "usage_events_posted": "usage_events_posted",
    "usage_events_rated_once": "usage_event_changed",
}
EXPECTED = ", ".join(f"('{trigger}', '{function}')" for trigger, function in GUARDS.items())

GUARDS_STAND = Check(
    "guards-stand",
    "The triggers that keep journals append-only, holds ended and transactions balanced, and tell of changes, are there and on.",
    f"""
    SELECT concat('trigger ', g.name) AS subject,
           CASE WHEN t.tgname IS NULL THEN 'is missing' WHEN t.tgenabled NOT IN ('O', 'A') THEN 'is switched off'
                ELSE concat('calls ', f.proname, ' instead of ', g.function) END AS problem
    FROM (VALUES {EXPECTED}) AS g (name, function)
    LEFT JOIN pg_trigger t ON t.tgname = g.name AND t.tgparentid = 0 LEFT JOIN pg_proc f ON f.oid = t.tgfoid
    WHERE t.tgname IS NULL OR t.tgenabled NOT IN ('O', 'A') OR f.proname <> g.function
    """,
)

CONSTRAINTS_APPLY = Check(
    "constraints-apply",
    "Every constraint holds for the rows that were there before it, and every index covers them all.",
    """
    SELECT concat('constraint ', conname, ' of ', conrelid::regclass) AS subject, 'is not validated' AS problem
    FROM pg_constraint WHERE NOT convalidated AND connamespace = 'public'::regnamespace
    UNION ALL
    SELECT concat('index ', indexrelid::regclass), 'is not valid' FROM pg_index JOIN pg_class c ON c.oid = indexrelid
    WHERE NOT (indisvalid AND indisready) AND c.relnamespace = 'public'::regnamespace
    """,
)

PARTITIONS_ARE_GUARDED = Check(
    "partitions-are-guarded",
    "No partition of the usage events can be written by its own name, past the guards of the whole.",
    """
    SELECT concat('partition ', inhrelid::regclass) AS subject, 'has no guard, or it is switched off' AS problem
    FROM pg_inherits WHERE inhparent = 'usage_events'::regclass AND NOT EXISTS (
        SELECT FROM pg_trigger WHERE tgrelid = inhrelid AND tgname = 'usage_events_partition' AND tgenabled IN ('O', 'A'))
    """,
)

PARTITIONS_ARE_AHEAD = Check(
    "partitions-are-ahead",
    "Every usage event is in the partition of its month, and there is one for this month and the next.",
    """
    SELECT concat('usage events of ', to_char(settled_at AT TIME ZONE 'UTC', 'YYYY-MM')) AS subject,
           concat(count(*), ' are in the default partition') AS problem FROM usage_events_default GROUP BY 1
    UNION ALL
    SELECT concat('partition usage_events_', to_char(month, 'YYYY_MM')), 'is missing'
    FROM (SELECT date_trunc('month', now() AT TIME ZONE 'UTC') + ahead * interval '1 month' AS month
          FROM generate_series(0, 1) ahead) m
    WHERE NOT EXISTS (SELECT FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid
                      WHERE inhparent = 'usage_events'::regclass AND relname = 'usage_events_' || to_char(month, 'YYYY_MM'))
    """,
    Moment.SOON,
)

SCHEMA_CHECKS = (GUARDS_STAND, CONSTRAINTS_APPLY, PARTITIONS_ARE_GUARDED, PARTITIONS_ARE_AHEAD)


CHECKS: tuple[Check, ...] = (
    *SCHEMA_CHECKS,
    *HOLD_CHECKS,
    *COUNTER_CHECKS,
    *USAGE_CHECKS,
    *RECEIPT_CHECKS,
    *LEDGER_CHECKS,
    *INVOICE_CHECKS,
    *EXPORT_CHECKS,
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
