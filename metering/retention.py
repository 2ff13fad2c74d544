"""Retention: removes the details of old usage, and old audit entries, month by month.

A month of usage is removed only if it is older than the setting, all its usage is billed by closed
months and exported, and all earlier months are removed. The steps are functions of the database,
which refuse anything else; each is a short transaction, and an interrupted removal continues where
it stopped:

1. Sum the usage events by day, and keep the hashes of their receipts.
2. Delete the holds that have ended, some pages at a time; their usage is added to the checkpoints
   of lifetime limits and prepaid credit.
3. Exchange the events for their sums: detach their partition. Readers see one or the other.
4. Drop the detached table.

Ledger, invoices, documents of closed months, statements of end users and receipt hashes stay for
ever. Never removes anything that has no setting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from common.settings import setting, whole
from metering.core.audit import record_change
from metering.export.exporting import BatchState
from metering.invoicing.months import LONG_READ_S, allow_long_reads
from metering.invoicing.resale import freeze_statements
from metering.ledger.ledger import MonthState, TransactionKind, month_end, month_text
from metering.ledger.rating import create_partitions
from metering.store.db import Sessions, lock_holder, patience, try_lock

log = logging.getLogger(__name__)

MONTHS_MIN = 3  # recounts, late reports and the first run of the export read so far back
MONTHS_MAX = 1200
HOLD_PAGES = 1_000  # of 8 KiB, per transaction: some 25,000 holds, about a second
AUDIT_ROWS = 5_000  # per transaction
NAMED_MAX = 5  # organizations named in an obstacle
LOCK = "retention"


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """For how many whole months details are kept after their own; None keeps them for ever."""

    usage_months: int | None = setting(
        "WEIR_USAGE_RETENTION_MONTHS", None, whole(MONTHS_MIN, MONTHS_MAX)
    )
    audit_months: int | None = setting(
        "WEIR_AUDIT_RETENTION_MONTHS", None, whole(MONTHS_MIN, MONTHS_MAX)
    )


class MonthRetention(StrEnum):
    """State of a month's usage details."""

    KEPT = "kept"
    DUE = "due"
    BLOCKED = "blocked"
    REMOVING = "removing"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class UsageMonth:
    """A month of usage. Obstacles say why it is due and cannot be removed, and what to do.

    `event_count` is an estimate, and `size_bytes` the space on disk, until the month is removed.
    """

    month: str
    state: MonthRetention
    event_count: int
    size_bytes: int = 0
    obstacles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Retention:
    """Months by state, and audit entries that are due. `audit_before` is None without a setting."""

    settings: RetentionSettings
    months: tuple[UsageMonth, ...]
    audit_before: datetime | None = None
    audit_entry_count: int = 0


@dataclass(slots=True)
class Removal:
    """Result of a run; `is_busy` if another one was running. Obstacles are of the next month."""

    months: list[str]
    audit_entry_count: int = 0
    obstacles: tuple[str, ...] = ()
    is_busy: bool = False
    is_done: bool = True


PARTITIONS = text("""
SELECT coalesce(p.month, r.month) AS month, coalesce(p.event_count, 0)::bigint AS estimate,
       coalesce(p.size_bytes, 0) AS size_bytes, r.begun_at, r.detached_at, r.dropped_at,
       r.kept_months, r.event_count
FROM (
    SELECT to_date(substr(c.relname, 14), 'YYYY_MM') AS month,
           greatest(c.reltuples, 0) AS event_count, pg_total_relation_size(c.oid) AS size_bytes
    FROM pg_inherits
    JOIN pg_class c ON c.oid = inhrelid
    WHERE inhparent = 'usage_events'::regclass
      AND c.relname ~ '^usage_events_[0-9]{4}_[0-9]{2}$'
) AS p
FULL JOIN retired_months r USING (month)
ORDER BY 1
""")
THIS_MONTH = text("SELECT date_trunc('month', now() AT TIME ZONE 'UTC')::date")
OPEN = text(f"""
SELECT DISTINCT o.name, t.billing_month
FROM ledger_transactions t
JOIN organizations o ON o.id = t.organization_id
LEFT JOIN billing_months b
    ON b.organization_id = t.organization_id
   AND b.month = t.billing_month
   AND b.state = '{MonthState.CLOSED}'
WHERE t.kind = '{TransactionKind.USAGE}'
  AND t.effective_at >= :begins
  AND t.effective_at < :ends
  AND b.month IS NULL
ORDER BY 2, 1
""")
COUNTS = text(f"""
SELECT (SELECT count(*) FROM unrated_usage WHERE settled_at < :ends) AS unrated_count,
       (SELECT count(*) FROM holds WHERE state = 'held' AND admitted_at < :ends) AS held_count,
       (SELECT closed_until FROM export_progress) AS exported_until,
       (
           SELECT count(*)
           FROM meter_batches
           WHERE hour >= :begins
             AND hour < :ends
             AND state NOT IN ('{BatchState.DELIVERED}', '{BatchState.CANCELLED}')
       ) AS undelivered_count,
       (
           SELECT count(*)
           FROM stripe_month_settlements
           WHERE month = :month AND settled_at IS NULL
       ) AS unsettled_count
""")
# Months closed before statements were frozen, which bill usage of the month.
UNFROZEN = text(f"""
SELECT DISTINCT t.organization_id, t.billing_month, c.currency_code
FROM ledger_transactions t
JOIN month_closings c ON c.organization_id = t.organization_id AND c.month = t.billing_month
WHERE t.kind = '{TransactionKind.USAGE}'
  AND t.effective_at >= :begins
  AND t.effective_at < :ends
  AND NOT EXISTS (
      SELECT
      FROM resale_statements s
      WHERE s.organization_id = t.organization_id AND s.month = t.billing_month
  )
ORDER BY 2, 1
""")
REMOVED = text("""
SELECT r.kept_months, r.hold_count,
       (SELECT coalesce(sum(event_count), 0) FROM usage_days WHERE month = :month) AS event_count,
       (SELECT coalesce(sum(receipt_count), 0) FROM retired_receipts WHERE month = :month)
           AS receipt_count
FROM retired_months r
WHERE r.month = :month AND r.detached_at IS NULL
""")
BEGIN = text("SELECT begin_usage_retirement(:month, :kept_months)")
SUM_DAY = text("SELECT sum_retiring_day(:month)")
RETIRE_HOLDS = text("SELECT retire_holds(:month, :page_count)")
DETACH = text("SELECT detach_retired_usage(:month)")
DROP = text("SELECT drop_retired_usage(:month)")
AUDIT_BEFORE = text("""
SELECT (date_trunc('month', now() AT TIME ZONE 'UTC') - make_interval(months => :months))
       AT TIME ZONE 'UTC'
""")
AUDIT_COUNT = text("""
SELECT count(*)
FROM audit_log
WHERE created_at < :before AND NOT audit_entry_decides(action, subject_id)
""")
BEGIN_AUDIT = text("SELECT begin_audit_retention(:before, :kept_months)")
DELETE_ENTRIES = text("SELECT last_id, deleted_count FROM delete_expired_entries(:after, :rows)")


async def read_retention(sessions: Sessions, settings: RetentionSettings) -> Retention:
    """Read which months are kept, due and removed, and how many audit entries are due."""
    with patience(LONG_READ_S):
        async with sessions.begin() as session:
            await allow_long_reads(session)
            months = await _months(session, settings)
            if settings.audit_months is None:
                return Retention(settings, months)
            before = await session.scalar(AUDIT_BEFORE, {"months": settings.audit_months})
            assert isinstance(before, datetime)
            count = int(await session.scalar(AUDIT_COUNT, {"before": before}) or 0)
            return Retention(settings, months, before.astimezone(UTC), count)


async def _months(session: AsyncSession, settings: RetentionSettings) -> tuple[UsageMonth, ...]:
    this_month = await session.scalar(THIS_MONTH)
    assert isinstance(this_month, date)
    found = []
    is_blocked = False
    for row in await session.execute(PARTITIONS):
        month = month_text(row.month)
        if row.dropped_at is not None:
            found.append(UsageMonth(month, MonthRetention.REMOVED, row.event_count))
        elif row.begun_at is not None:
            count = row.event_count or row.estimate
            found.append(UsageMonth(month, MonthRetention.REMOVING, count, row.size_bytes))
        elif settings.usage_months is None or row.month > _months_before(
            this_month, settings.usage_months + 1
        ):
            found.append(UsageMonth(month, MonthRetention.KEPT, row.estimate, row.size_bytes))
        else:
            obstacles = await _obstacles(session, row.month)
            if is_blocked and not obstacles:
                obstacles = ("an earlier month must be removed first",)
            is_blocked = bool(obstacles)
            state = MonthRetention.BLOCKED if is_blocked else MonthRetention.DUE
            found.append(UsageMonth(month, state, row.estimate, row.size_bytes, obstacles))
    return tuple(found)


def _months_before(month: date, count: int) -> date:
    number = month.year * 12 + month.month - 1 - count
    return date(number // 12, number % 12 + 1, 1)


async def _obstacles(session: AsyncSession, month: date) -> tuple[str, ...]:
    """Say why the usage of a month cannot be removed yet, each with its remedy."""
    of_month = _bounds(month)
    reasons = []
    if months := (await session.execute(OPEN, of_month)).all():
        named = ", ".join(f"{name} {month_text(billed)}" for name, billed in months[:NAMED_MAX])
        more = f" and {len(months) - NAMED_MAX} more" if len(months) > NAMED_MAX else ""
        reasons.append(f"its usage is billed by open months: close {named}{more}")
    counts = (await session.execute(COUNTS, of_month)).one()
    if counts.unrated_count:
        reasons.append(f"{counts.unrated_count} usage events wait to be rated: run a worker")
    if counts.held_count:
        reasons.append(
            f"{counts.held_count} requests of the month still run: end them (`weir requests stuck`)"
        )
    if counts.exported_until is not None and counts.exported_until < of_month["ends"]:
        reasons.append(
            f"usage is exported until {counts.exported_until:%Y-%m-%d %H:%M} UTC only: run a worker"
            " with WEIR_EXPORT"
        )
    if counts.undelivered_count:
        reasons.append(
            f"{counts.undelivered_count} batches of the export are not delivered: see `weir stripe"
            " status`"
        )
    if counts.unsettled_count:
        reasons.append(
            f"{counts.unsettled_count} closed months are not settled with Stripe: see `weir stripe"
            " status`"
        )
    return tuple(reasons)


def _bounds(month: date) -> dict[str, datetime | date]:
    begins = datetime(month.year, month.month, 1, tzinfo=UTC)
    return {"month": month, "begins": begins, "ends": month_end(month)}


async def apply_retention(
    sessions: Sessions, settings: RetentionSettings, *, actor: str, budget_s: float | None = None
) -> Removal:
    """Remove what is due. Begins no further step after `budget_s`; the next run continues.

    Does nothing while another run works. Raises: DatabaseUnavailable if the events of a month are
    in use for so long that they cannot be exchanged.
    """
    ends_at = None if budget_s is None else time.monotonic() + budget_s
    removal = Removal([])
    async with lock_holder(sessions) as locks:
        if not await try_lock(locks, LOCK):
            removal.is_busy = True
            return removal
        async with sessions.begin() as session:
            await create_partitions(session)  # events of a month without one would stay
        with patience(LONG_READ_S):
            await _remove_usage(sessions, settings, actor, removal, ends_at)
            if settings.audit_months is not None:
                await _remove_entries(sessions, settings.audit_months, actor, removal, ends_at)
    return removal


def _is_over(ends_at: float | None) -> bool:
    return ends_at is not None and time.monotonic() >= ends_at


async def _remove_usage(
    sessions: Sessions,
    settings: RetentionSettings,
    actor: str,
    removal: Removal,
    ends_at: float | None,
) -> None:
    """Remove the months that are due in order, up to the first obstacle. Finishes begun ones."""
    for each in (await read_retention(sessions, settings)).months:
        month = date.fromisoformat(f"{each.month}-01")
        match each.state:
            case MonthRetention.BLOCKED:
                removal.obstacles = each.obstacles
                return
            case MonthRetention.DUE:
                assert settings.usage_months is not None
                await _begin(sessions, month, settings.usage_months)
            case MonthRetention.KEPT | MonthRetention.REMOVED:
                continue
        if not await _remove_month(sessions, month, actor, ends_at):
            removal.is_done = False
            return
        removal.months.append(each.month)


async def _begin(sessions: Sessions, month: date, kept_months: int) -> None:
    """Freeze statements that would be computed from the events, and mark the month."""
    async with sessions.begin() as session:
        await allow_long_reads(session)
        for row in (await session.execute(UNFROZEN, _bounds(month))).all():
            await freeze_statements(
                session, row.organization_id, row.billing_month, row.currency_code
            )
        await session.execute(BEGIN, {"month": month, "kept_months": kept_months})


async def _remove_month(sessions: Sessions, month: date, actor: str, ends_at: float | None) -> bool:
    """Take the steps that are left for a month; False if the time was over before."""
    of_month = {"month": month}
    for step, values in ((SUM_DAY, {}), (RETIRE_HOLDS, {"page_count": HOLD_PAGES})):
        is_left = True
        while is_left:
            if _is_over(ends_at):
                return False
            async with sessions.begin() as session:
                await allow_long_reads(session)
                is_left = await session.scalar(step, of_month | values) is not None
    if _is_over(ends_at):
        return False
    await exchange(sessions, month, actor)
    async with sessions.begin() as session:
        await session.execute(DROP, of_month)
    log.info("details of the usage of %s are removed", month_text(month))
    return True


async def exchange(sessions: Sessions, month: date, actor: str) -> None:
    """Exchange the events of a month for their sums, with its audit entry, unless it is done."""
    async with sessions.begin() as session:
        await allow_long_reads(session)
        row = (await session.execute(REMOVED, {"month": month})).one_or_none()
        if row is None:
            return
        counts = {name: int(value) for name, value in row._mapping.items()}
        await record_change(session, actor, "retention.usage", month_text(month), after=counts)
        # Last, since every request waits for the end of the transaction.
        await session.execute(DETACH, {"month": month})


async def _remove_entries(
    sessions: Sessions, kept_months: int, actor: str, removal: Removal, ends_at: float | None
) -> None:
    """Delete expired audit entries, each batch with an entry that says how many."""
    async with sessions.begin() as session:
        before = await session.scalar(AUDIT_BEFORE, {"months": kept_months})
        if not await session.scalar(AUDIT_COUNT, {"before": before}):
            return
        await session.execute(BEGIN_AUDIT, {"before": before, "kept_months": kept_months})
    assert isinstance(before, datetime)
    after: int | None = 0
    while after is not None:
        if _is_over(ends_at):
            removal.is_done = False
            return
        async with sessions.begin() as session:
            given = {"after": after, "rows": AUDIT_ROWS}
            after, deleted_count = (await session.execute(DELETE_ENTRIES, given)).one()
            if deleted_count:
                facts = {
                    "before": before.astimezone(UTC).isoformat(),
                    "kept_months": kept_months,
                    "deleted_count": deleted_count,
                }
                await record_change(session, actor, "retention.audit", "audit_log", after=facts)
                removal.audit_entry_count += deleted_count


def blocked(months: Sequence[UsageMonth]) -> list[UsageMonth]:
    """Select the months that are due and have an obstacle."""
    return [each for each in months if each.state is MonthRetention.BLOCKED]
