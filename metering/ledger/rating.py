"""Rating: posting of usage events to the ledger, each exactly once, with any number of workers and
retries.

Work is found by a query, never by a message: an event is pending while it is in `unrated_usage`,
and the statement that posts it also removes it there. A worker skips rows locked by another one; a
worker that dies leaves its batch pending. Events of customers whose month is being closed are
skipped, and so are events whose stored cost differs from that of their tokens; the rest of a batch
waits for neither. A batch is one statement. Postings are sums: one transaction per customer,
billing month, day of use (UTC) and batch, with an entry per price version and token kind. Each
event refers to its transaction.

Misstated usage, whose cost differs from that of its tokens, cannot be rated, since either may be
wrong, and cannot be changed. Two people agree on an adjustment of exactly the cost of the tokens;
the close that names it removes the events from `unrated_usage` permanently.

Database functions create the monthly partitions (UTC) of usage events ahead of time. A row without
a partition is in the default one, counts like all others, and is moved as soon as its month's
partition exists.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from common.incidents import Retries
from metering.core.errors import DatabaseUnavailable, InvariantViolated
from metering.core.money import exact_text
from metering.ledger.ledger import (
    POSTING_LOCK_OF,
    POSTING_MONTH,
    AccountKind,
    TransactionKind,
    try_posting_locks,
)
from metering.pricing.prices import COUNTS_OF_EVENT, PRICES
from metering.store.db import Sessions
from metering.tenants.tenants import as_uuid

log = logging.getLogger(__name__)

MONTHS_AHEAD = 3  # months without a running worker before rows go to the default partition
# Creating a partition waits for queries over all months and blocks later ones meanwhile, so it
# fails early and is tried again an hour later.
LOCK_TIMEOUT = "2s"

CREATE = text(
    "SELECT to_char(month, 'YYYY-MM') FROM create_usage_partitions(:months_ahead) AS month"
)
IN_DEFAULT_PARTITION = text("""
SELECT to_char(settled_at AT TIME ZONE 'UTC', 'YYYY-MM') AS month, count(*) AS event_count
FROM usage_events_default GROUP BY 1 ORDER BY 1
""")

# Events per transaction; a larger batch is hardly faster per event, and a transaction should take
# far less than a second.
BATCH_SIZE = 5_000
BATCHES_MAX = (
    100  # per run of the task, which takes some seconds; the next run begins a second later
)
BATCH_DIVISOR = 10  # by which a failing batch shrinks, and grows again afterwards
NAMED_MAX = 20  # events that an error message names
# Column names are token kinds. Costs are numeric, since a misstated count times its price may
# exceed 64 bits.
KIND_COUNTS = ", ".join(f"{count} AS {kind}" for kind, (count, _) in COUNTS_OF_EVENT.items())
COST_OF_TOKENS = " + ".join(
    f"CAST({count} AS numeric) * {PRICES[kind]}" for kind, (count, _) in COUNTS_OF_EVENT.items()
)
KIND_SUMS = ", ".join(f"sum({kind}) AS {kind}" for kind in COUNTS_OF_EVENT)
BY_KIND = "LATERAL (VALUES {}) AS of_kind (token_kind, token_count, amount_picos)".format(
    ", ".join(f"('{kind}', {kind}, {kind} * {price})" for kind, price in PRICES.items())
)
# Late usage arises here: an event that is rated after the close of its month is posted to the month
# after the last closed one.
MONTH_OF_DAY = POSTING_MONTH.format(
    organization_id="d.organization_id", month="date_trunc('month', d.day)::date"
)
FIRST_POSITION = "(0,0)"


@dataclass(frozen=True, slots=True)
class UsagePartitions:
    """Result of `create_partitions`. `created` lists months as `YYYY-MM`.

    `in_default` counts, by month, the usage events still in the default partition.
    """

    created: tuple[str, ...]
    in_default: dict[str, int]


async def create_partitions(session: AsyncSession) -> UsagePartitions:
    """Create missing partitions: this month, the next ones, and months with rows in the default.

    Logs the created partitions, and as an error the rows that remain in the default one. Raises:
    sqlalchemy.exc.OperationalError if a lock is not acquired within `LOCK_TIMEOUT`.
    """
    await session.execute(
        text("SELECT set_config('lock_timeout', :timeout, true)"), {"timeout": LOCK_TIMEOUT}
    )
    created = tuple((await session.execute(CREATE, {"months_ahead": MONTHS_AHEAD})).scalars())
    rows = await session.execute(IN_DEFAULT_PARTITION)
    in_default = {row.month: row.event_count for row in rows}
    if created:
        log.info("created partitions of usage events for %s", ", ".join(created))
    if in_default:
        log.error(
            "usage events are dated far ahead of the database's clock, and stay in"
            " usage_events_default: %s",
            ", ".join(f"{count} of {month}" for month, count in in_default.items()),
        )
    return UsagePartitions(created, in_default)


# Rates up to :batch_size pending events after position :after. Each event is read once, and updated
# once if its cost is that of its tokens. Only updated events are summed and posted; the others stay
# pending and are returned.
RATE = text(f"""
WITH pending AS MATERIALIZED (
    SELECT ctid AS position, event_id, hold_id, part, settled_at, organization_id,
           CAST(settled_at AT TIME ZONE 'UTC' AS date) AS day
    FROM unrated_usage
    WHERE ctid > CAST(:after AS tid)
      AND event_id <> ALL(CAST(:paused AS bigint[]))
      AND (CAST(:organization_id AS uuid) IS NULL OR organization_id = :organization_id)
    LIMIT :batch_size
    FOR UPDATE SKIP LOCKED
), customers AS MATERIALIZED (
    SELECT o.id AS organization_id, o.currency_code,
           {POSTING_LOCK_OF.format(organization_id="o.id")} = ANY(:locks) AS may_post,
           r.id AS receivable_id, v.id AS revenue_id
    FROM (SELECT DISTINCT organization_id FROM pending) w
    JOIN organizations o ON o.id = w.organization_id
    LEFT JOIN ledger_accounts r
        ON (r.organization_id, r.kind, r.currency_code)
         = (o.id, '{AccountKind.RECEIVABLE}', o.currency_code)
    LEFT JOIN ledger_accounts v
        ON (v.organization_id, v.kind, v.currency_code)
         = (o.id, '{AccountKind.REVENUE}', o.currency_code)
), days AS MATERIALIZED (
    SELECT d.*, nextval(pg_get_serial_sequence('ledger_transactions', 'id')) AS transaction_id
    FROM (
        SELECT DISTINCT w.day, c.organization_id, c.currency_code, c.receivable_id, c.revenue_id
        FROM pending w
        JOIN customers c USING (organization_id)
        WHERE c.may_post AND c.receivable_id IS NOT NULL AND c.revenue_id IS NOT NULL
        ORDER BY c.organization_id, w.day
    ) d
), postable AS MATERIALIZED (
    SELECT w.position, w.event_id, w.hold_id, w.part, w.settled_at,
           d.transaction_id, d.currency_code
    FROM pending w
    JOIN days d USING (organization_id, day)
), marked AS (
    UPDATE usage_events u
    SET rated_at = now(), ledger_transaction_id = t.transaction_id
    FROM postable t, price_versions p
    WHERE (u.hold_id, u.part, u.settled_at) = (t.hold_id, t.part, t.settled_at)
      AND p.id = u.price_version_id
      AND p.currency_code = t.currency_code
      AND u.cost_picos = {COST_OF_TOKENS}
    RETURNING t.position, t.event_id, t.transaction_id, u.price_version_id, {KIND_COUNTS},
              CASE WHEN u.end_user_id IS NOT NULL OR u.labels <> '{{}}' THEN u.hold_id
              END AS hold_id
), scanned AS (
    -- Limits of end users and label values are scanned for alerts when their use has changed.
    INSERT INTO alert_scans (quota_id)
    SELECT DISTINCT q.id
    FROM marked
    JOIN holds h ON h.id = marked.hold_id
    CROSS JOIN unnest(h.quota_ids) AS c (quota_id)
    JOIN quotas q ON q.id = c.quota_id
    LEFT JOIN quotas s ON s.id = q.selector_id
    WHERE q.within_id IS NOT NULL AND coalesce(s.alert_at, q.alert_at) <> '{{}}'
    ORDER BY q.id
    ON CONFLICT DO NOTHING
), sums AS MATERIALIZED (
    SELECT transaction_id, price_version_id, {KIND_SUMS}
    FROM marked
    GROUP BY transaction_id, price_version_id
), posted AS (
    INSERT INTO ledger_transactions
        (id, organization_id, kind, billing_month, effective_at, description)
    OVERRIDING SYSTEM VALUE
    SELECT d.transaction_id, d.organization_id, '{TransactionKind.USAGE}', m.month,
           d.day AT TIME ZONE 'UTC', 'usage'
    FROM days d,
         LATERAL ({MONTH_OF_DAY}) m (month)
    WHERE d.transaction_id IN (SELECT transaction_id FROM sums)
    ORDER BY d.transaction_id
), kinds AS MATERIALIZED (
    SELECT sums.transaction_id, d.receivable_id, d.revenue_id, sums.price_version_id, of_kind.*
    FROM sums
    JOIN days d USING (transaction_id)
    JOIN price_versions p ON p.id = sums.price_version_id, {BY_KIND}
), entries AS (
    INSERT INTO ledger_entries
        (transaction_id, account_id, amount_picos, token_kind, token_count, price_version_id)
    SELECT transaction_id, receivable_id, sum(amount_picos), NULL, NULL, NULL
    FROM kinds
    GROUP BY transaction_id, receivable_id
    UNION ALL
    SELECT transaction_id, revenue_id, -amount_picos, token_kind, token_count, price_version_id
    FROM kinds
    WHERE token_count > 0
), cleared AS (
    DELETE FROM unrated_usage q USING marked WHERE q.ctid = marked.position
)
SELECT (SELECT count(*) FROM pending) AS seen_count,
       (SELECT count(*) FROM marked) AS rated_count,
       (SELECT CAST(max(position) AS text) FROM pending) AS last_position,
       ARRAY(
           SELECT event_id
           FROM postable
           WHERE event_id NOT IN (SELECT event_id FROM marked)
           ORDER BY event_id
       ) AS misstated,
       (SELECT array_agg(organization_id)
        FROM customers
        WHERE may_post AND (receivable_id IS NULL OR revenue_id IS NULL)) AS without_accounts
""")
LOCK_CUSTOMER = text("""
SELECT count(*)
FROM (SELECT FROM unrated_usage WHERE organization_id = :organization_id FOR UPDATE) pending
""")
# The planner may take a table for small that holds a month of events without statistics, so it must
# use indexes. With this work_mem the batch stays in memory, where the trigger reads its rows.
RATING_SETTINGS = text(
    "SELECT set_config('enable_seqscan', 'off', true), set_config('work_mem', '64MB', true)"
)
RESET_SETTINGS = text(
    "SELECT set_config(name, reset_val, true) FROM pg_settings WHERE name IN ('enable_seqscan',"
    " 'work_mem')"
)
# Sorted, so that concurrent calls do not deadlock.
OPEN_ACCOUNTS = text(f"""
INSERT INTO ledger_accounts (organization_id, kind, currency_code)
SELECT o.id, needed.kind, o.currency_code
FROM organizations o,
     (VALUES ('{AccountKind.RECEIVABLE}'), ('{AccountKind.REVENUE}')) AS needed (kind)
WHERE o.id = ANY(:organization_ids)
ORDER BY 1, 2, 3
ON CONFLICT DO NOTHING
""")
# The event that a batch of one takes. Read without locks: if another worker takes it first, the
# wrong event is paused, briefly.
NEXT_EVENT = text("""
SELECT event_id
FROM unrated_usage
WHERE ctid > CAST(:after AS tid) AND event_id <> ALL(CAST(:paused AS bigint[]))
LIMIT 1
""")
retries = Retries("rating", passing=(DatabaseUnavailable,))  # per usage event


@dataclass(frozen=True, slots=True)
class RatedBatch:
    """Result of one batch. The next batch continues after `last_position`.

    `misstated` has the ids of events whose stored cost is not that of their tokens; they stay
    unrated.
    """

    seen_count: int
    rated_count: int
    misstated: tuple[int, ...]
    last_position: str


async def rate_all_pending(sessions: Sessions) -> int:
    """Rate all pending events, one transaction per batch, and return how many were rated.

    If an event makes its batch fail, it is retried later and the others are rated. Raises:
    InvariantViolated at the end, naming misstated events; all others are rated by then.
    """
    rated_count = 0
    misstated: list[int] = []
    position, size = FIRST_POSITION, BATCH_SIZE
    for _ in range(BATCHES_MAX):
        paused = [item for item in retries.resting() if isinstance(item, int)]
        try:
            async with sessions.begin() as session:
                batch = await rate_batch(session, limit=size, after=position, paused=paused)
        except DatabaseUnavailable:
            raise
        except Exception as error:  # retry with smaller batches to isolate the failing event
            if size > 1:
                size = max(size // BATCH_DIVISOR, 1)
                continue
            async with sessions() as session:
                event_id = await session.scalar(NEXT_EVENT, {"after": position, "paused": paused})
            retries.failed(error, event_id)
            continue
        rated_count += batch.rated_count
        misstated += batch.misstated
        position = batch.last_position
        if batch.seen_count < size:
            break
        size = min(size * BATCH_DIVISOR, BATCH_SIZE)
    if misstated:
        named = ", ".join(map(str, misstated[:NAMED_MAX]))
        raise InvariantViolated(
            f"{len(misstated)} usage events differ in cost from their tokens and stay unrated:"
            f" {named}"
        )
    return rated_count


async def rate_customer(session: AsyncSession, organization_id: uuid.UUID) -> bool:
    """Rate a customer's events while holding its posting lock; return True if none is left.

    Waits for concurrent workers, unlike `rate_batch`. After True, each event is rated or misstated.
    """
    await session.execute(LOCK_CUSTOMER, {"organization_id": organization_id})
    position = FIRST_POSITION
    for _ in range(BATCHES_MAX):
        batch = await rate_batch(
            session, limit=BATCH_SIZE, after=position, organization_id=organization_id
        )
        position = batch.last_position
        if batch.seen_count < BATCH_SIZE:
            return True
    return False


async def rate_batch(
    session: AsyncSession,
    *,
    limit: int,
    after: str = FIRST_POSITION,
    organization_id: uuid.UUID | None = None,
    paused: Sequence[int] = (),
) -> RatedBatch:
    """Price, post and mark events after a position, except those locked by other workers.

    `organization_id` selects one customer's events. `paused` has ids of events to skip.
    """
    await session.execute(RATING_SETTINGS)
    parameters = {
        "batch_size": limit,
        "after": after,
        "organization_id": organization_id,
        "locks": await try_posting_locks(session),
        "paused": [*paused],
    }
    # A separate statement after the locks, which sees every month closed before them.
    batch = (await session.execute(RATE, parameters)).one()
    rated_count, misstated = batch.rated_count, batch.misstated
    if batch.without_accounts:  # a customer's first usage: process the rest of the batch again
        await session.execute(OPEN_ACCOUNTS, {"organization_ids": batch.without_accounts})
        again = (
            await session.execute(RATE, parameters | {"batch_size": batch.seen_count - rated_count})
        ).one()
        rated_count, misstated = rated_count + again.rated_count, again.misstated
    await session.execute(RESET_SETTINGS)
    return RatedBatch(batch.seen_count, rated_count, tuple(misstated), batch.last_position or after)


MISSTATED_USAGE = text(f"""
SELECT e.id, {COST_OF_TOKENS} AS token_cost_picos, p.currency_code
FROM unrated_usage w
JOIN usage_events e USING (hold_id, part, settled_at)
JOIN price_versions p ON p.id = e.price_version_id
WHERE w.organization_id = :organization_id
  AND settled_at < :ends
  AND e.cost_picos <> {COST_OF_TOKENS}
ORDER BY e.id
""")
UNRATABLE_USAGE = text("""
SELECT w.event_id
FROM unrated_usage w
JOIN organizations o ON o.id = w.organization_id
LEFT JOIN usage_events e USING (hold_id, part, settled_at)
LEFT JOIN price_versions p ON p.id = e.price_version_id
WHERE w.organization_id = :organization_id
  AND settled_at < :ends
  AND p.currency_code IS DISTINCT FROM o.currency_code
ORDER BY w.event_id
""")
ADJUSTMENT = text("""
SELECT a.organization_id, a.currency_code, a.amount_picos,
       a.invoice_id IS NOT NULL AS is_credit_note,
       coalesce(d.approved, false) AS approved,
       EXISTS (SELECT FROM usage_corrections c WHERE c.adjustment_id = a.id) AS is_used
FROM adjustments a
LEFT JOIN adjustment_decisions d ON d.adjustment_id = a.id
WHERE a.id = :adjustment_id
""")
CORRECT = text("""
WITH removed AS (
    DELETE FROM unrated_usage
    WHERE organization_id = :organization_id AND event_id = ANY(:ids)
    RETURNING hold_id, part, settled_at
)
INSERT INTO usage_corrections (hold_id, part, settled_at, adjustment_id, corrected_by)
SELECT hold_id, part, settled_at, :adjustment_id, :actor
FROM removed

""")


@dataclass(frozen=True, slots=True)
class Misstated:
    """Ids of misstated usage events, and what their tokens cost in total."""

    ids: tuple[int, ...]
    token_cost_picos: int
    currency_code: str

    @property
    def cost_of_tokens(self) -> str:
        """Cost of the tokens as text with its currency."""
        return f"{exact_text(self.token_cost_picos, self.currency_code)} {self.currency_code}"


async def misstated_usage(
    session: AsyncSession, organization_id: uuid.UUID, ends: datetime
) -> Misstated | None:
    """Find a customer's misstated usage before `ends`; None if there is none."""
    before = {"organization_id": organization_id, "ends": ends}
    rows = (await session.execute(MISSTATED_USAGE, before)).all()
    if not rows:
        return None
    cost_picos = sum(int(row.token_cost_picos) for row in rows)
    return Misstated(tuple(row.id for row in rows), cost_picos, rows[0].currency_code)


async def unratable_usage(
    session: AsyncSession, organization_id: uuid.UUID, ends: datetime
) -> list[int]:
    """Find the ids of events before `ends` that have no price in the customer's currency."""
    before = {"organization_id": organization_id, "ends": ends}
    return list(await session.scalars(UNRATABLE_USAGE, before))


async def correction_refusal(
    session: AsyncSession, organization_id: uuid.UUID, usage: Misstated, adjustment: str
) -> str:
    """Explain why an adjustment cannot correct the misstated usage; empty if it can."""
    number = as_uuid(adjustment)
    row = (
        None
        if number is None
        else (await session.execute(ADJUSTMENT, {"adjustment_id": number})).one_or_none()
    )
    if row is None:
        return f"there is no adjustment {adjustment!r}"
    if row.organization_id != organization_id or row.is_credit_note:
        return f"adjustment {number} belongs to another customer, or is a credit note"
    if not row.approved:
        return f"adjustment {number} is not approved: another person has to approve it"
    if row.is_used:
        return f"adjustment {number} has already corrected other usage"
    if row.amount_picos != usage.token_cost_picos:
        amount = exact_text(int(row.amount_picos), row.currency_code)
        return (
            f"adjustment {number} is of {amount} {row.currency_code}, not of {usage.cost_of_tokens}"
        )
    return ""


async def correct(
    session: AsyncSession, organization_id: uuid.UUID, usage: Misstated, adjustment: str, actor: str
) -> None:
    """Link misstated usage to the adjustment that bills it, and exclude it from rating for good."""
    parameters = {
        "organization_id": organization_id,
        "ids": list(usage.ids),
        "adjustment_id": uuid.UUID(adjustment),
        "actor": actor,
    }
    await session.execute(CORRECT, parameters)
