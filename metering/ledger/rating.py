"""Rating: posting of usage events to the ledger, each exactly once, with any number of workers and
retries.

Work is found by a query, never by a message: an event is pending while it is in `unrated_usage`,
and the statement that posts it removes it there. A worker skips rows locked by another one; a
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
from metering.core.errors import InvariantViolated, StoreAway
from metering.core.money import exact_text
from metering.ledger.ledger import LANE_OF, POSTING_MONTH, AccountKind, TransactionKind, try_lanes
from metering.pricing.prices import COUNTS_OF_EVENT
from metering.store.db import Sessions
from metering.tenants.tenants import as_uuid

log = logging.getLogger(__name__)

MONTHS_AHEAD = 3  # so long no worker may run before the first row lands in the default partition
# Making one waits for whoever reads all months, and others wait behind: better try again an hour
# later.
LOCK_TIMEOUT = "2s"

CREATE = text("SELECT to_char(month, 'YYYY-MM') FROM create_usage_partitions(:months_ahead) AS month")
STRAY = text("""
SELECT to_char(settled_at AT TIME ZONE 'UTC', 'YYYY-MM') AS month, count(*) AS event_count
FROM usage_events_default GROUP BY 1 ORDER BY 1
""")


@dataclass(frozen=True, slots=True)
class UsagePartitions:
    """What `keep_ahead` did. created: months, as `YYYY-MM`. stray: usage events still in the
    default partition, by month.
    """

    created: tuple[str, ...]
    stray: dict[str, int]


async def keep_ahead(session: AsyncSession) -> UsagePartitions:
    """Make the partitions of this month and the next ones, and of months before that have rows in
    the default partition.

    Logs what it makes, and what it leaves as an error. Raises: sqlalchemy.exc.OperationalError
    where a lock is not had in time.
    """
    await session.execute(text("SELECT set_config('lock_timeout', :timeout, true)"), {"timeout": LOCK_TIMEOUT})
    created = tuple((await session.execute(CREATE, {"months_ahead": MONTHS_AHEAD})).scalars())
    stray = {row.month: row.event_count for row in await session.execute(STRAY)}
    if created:
        log.info("partitions of usage events made for %s", ", ".join(created))
    if stray:
        found = ", ".join(f"{count} of {month}" for month, count in stray.items())
        log.error("usage events are dated far ahead of the database's clock, and stay in usage_events_default: %s", found)
    return UsagePartitions(created, stray)


# Events per transaction; more is hardly faster per event, and a transaction should stay far below a
# second.
BATCH_SIZE = 5_000
# Per run: bounds one task to some seconds; what is left waits for the next, a second later.
BATCHES_MAX = 100
BATCH_DIVISOR = 10  # of a batch that fails, and of the growth afterwards
NAMED_MAX = 20  # events that an error message names

# In the statement, the tokens of a kind are a column named after it. A wrong count times a price
# may pass 64 bits: so numeric.
COUNTS = ", ".join(f"{count} AS {kind}" for kind, (count, _) in COUNTS_OF_EVENT.items())
RIGHT_COST = " + ".join(f"CAST({count} AS numeric) * p.{price}" for count, price in COUNTS_OF_EVENT.values())
SUMS = ", ".join(f"sum({kind}) AS {kind}" for kind in COUNTS_OF_EVENT)
BY_KIND = "LATERAL (VALUES {}) AS of_kind (token_kind, token_count, amount_picos)".format(
    ", ".join(f"('{kind}', {kind}, {kind} * {price})" for kind, (_, price) in COUNTS_OF_EVENT.items())
)

# Up to :batch_size pending events after position :after. Every event is read once and written once,
# when it is marked, provided that its cost is that of its tokens; the sums are over marked events.
# Other events stay and are reported.
RATE = text(f"""
WITH waiting AS MATERIALIZED (
    SELECT ctid AS place, event_id, hold_id, part, settled_at, organization_id, CAST(settled_at AT TIME ZONE 'UTC' AS date) AS day
    FROM unrated_usage
    WHERE ctid > CAST(:after AS tid) AND event_id <> ALL(CAST(:resting AS bigint[]))
      AND (CAST(:organization_id AS uuid) IS NULL OR organization_id = :organization_id)
    LIMIT :batch_size FOR UPDATE SKIP LOCKED
), customers AS MATERIALIZED (
    SELECT o.id AS organization_id, o.currency_code, {LANE_OF.format(organization_id="o.id")} = ANY(:lanes) AS may_post,
           r.id AS receivable_id, v.id AS revenue_id
    FROM (SELECT DISTINCT organization_id FROM waiting) w JOIN organizations o ON o.id = w.organization_id
    LEFT JOIN ledger_accounts r
        ON (r.organization_id, r.kind, r.currency_code) = (o.id, '{AccountKind.RECEIVABLE}', o.currency_code)
    LEFT JOIN ledger_accounts v
        ON (v.organization_id, v.kind, v.currency_code) = (o.id, '{AccountKind.REVENUE}', o.currency_code)
), days AS MATERIALIZED (
    SELECT d.*, nextval(pg_get_serial_sequence('ledger_transactions', 'id')) AS transaction_id
    FROM (SELECT DISTINCT w.day, c.organization_id, c.currency_code, c.receivable_id, c.revenue_id
          FROM waiting w JOIN customers c USING (organization_id)
          WHERE c.may_post AND c.receivable_id IS NOT NULL AND c.revenue_id IS NOT NULL
          ORDER BY c.organization_id, w.day) d
), taken AS MATERIALIZED (
    SELECT w.place, w.event_id, w.hold_id, w.part, w.settled_at, d.transaction_id, d.currency_code
    FROM waiting w JOIN days d USING (organization_id, day)
), marked AS (
    UPDATE usage_events u SET rated_at = now(), ledger_transaction_id = t.transaction_id
    FROM taken t, price_versions p
    WHERE (u.hold_id, u.part, u.settled_at) = (t.hold_id, t.part, t.settled_at)
      AND p.id = u.price_version_id AND p.currency_code = t.currency_code AND u.cost_picos = {RIGHT_COST}
    RETURNING t.place, t.event_id, t.transaction_id, u.price_version_id, {COUNTS}
), sums AS MATERIALIZED (
    SELECT transaction_id, price_version_id, {SUMS} FROM marked GROUP BY transaction_id, price_version_id
), posted AS (
    INSERT INTO ledger_transactions (id, organization_id, kind, billing_month, effective_at, description) OVERRIDING SYSTEM VALUE
    SELECT d.transaction_id, d.organization_id, '{TransactionKind.USAGE}', m.month, d.day AT TIME ZONE 'UTC', 'usage'
    FROM days d,
         LATERAL ({POSTING_MONTH.format(organization_id="d.organization_id", month="date_trunc('month', d.day)::date")}) m (month)
    WHERE d.transaction_id IN (SELECT transaction_id FROM sums) ORDER BY d.transaction_id
), kinds AS MATERIALIZED (
    SELECT sums.transaction_id, d.receivable_id, d.revenue_id, sums.price_version_id, of_kind.*
    FROM sums JOIN days d USING (transaction_id) JOIN price_versions p ON p.id = sums.price_version_id, {BY_KIND}
), legs AS (
    INSERT INTO ledger_entries (transaction_id, account_id, amount_picos, token_kind, token_count, price_version_id)
    SELECT transaction_id, receivable_id, sum(amount_picos), NULL, NULL, NULL FROM kinds GROUP BY transaction_id, receivable_id
    UNION ALL
    SELECT transaction_id, revenue_id, -amount_picos, token_kind, token_count, price_version_id FROM kinds WHERE token_count > 0
), cleared AS (
    DELETE FROM unrated_usage q USING marked WHERE q.ctid = marked.place
)
SELECT (SELECT count(*) FROM waiting) AS seen_count, (SELECT count(*) FROM marked) AS rated_count,
       (SELECT CAST(max(place) AS text) FROM waiting) AS last_place,
       ARRAY(SELECT event_id FROM taken WHERE event_id NOT IN (SELECT event_id FROM marked) ORDER BY event_id) AS misstated,
       (SELECT array_agg(organization_id) FROM customers WHERE may_post AND (receivable_id IS NULL OR revenue_id IS NULL))
           AS without_accounts
""")
LOCK_CUSTOMER = text("""
SELECT count(*) FROM (SELECT FROM unrated_usage WHERE organization_id = :organization_id FOR UPDATE) waiting
""")
# Uses indexes: a table that the planner takes for small may hold a month of events without
# statistics. The batch stays in memory, where the trigger sees its rows whole.
BY_INDEX_IN_MEMORY = text("SELECT set_config('enable_seqscan', 'off', true), set_config('work_mem', '64MB', true)")
AS_BEFORE = text("SELECT set_config(name, reset_val, true) FROM pg_settings WHERE name IN ('enable_seqscan', 'work_mem')")
# In sorted order, so that concurrent calls do not deadlock.
OPEN_ACCOUNTS = text(f"""
INSERT INTO ledger_accounts (organization_id, kind, currency_code)
SELECT o.id, needed.kind, o.currency_code
FROM organizations o, (VALUES ('{AccountKind.RECEIVABLE}'), ('{AccountKind.REVENUE}')) AS needed (kind)
WHERE o.id = ANY(:organization_ids) ORDER BY 1, 2, 3
ON CONFLICT DO NOTHING
""")
# The event that a batch of one takes. Read without locks: a concurrent worker can make the wrong
# event pause for a while.
NEXT = text("""
SELECT event_id FROM unrated_usage WHERE ctid > CAST(:after AS tid) AND event_id <> ALL(CAST(:resting AS bigint[])) LIMIT 1
""")
FRONT = "(0,0)"  # start of the list
retries = Retries("rating", passing=(StoreAway,))  # by usage event


@dataclass(frozen=True, slots=True)
class RatedBatch:
    """Result of one batch. misstated: events whose stored cost differs from that of their tokens;
    they stay unrated.

    last_place: position in the list at which the next batch continues.
    """

    seen_count: int
    rated_count: int
    misstated: tuple[int, ...]
    last_place: str


async def rate_all_pending(sessions: Sessions) -> int:
    """Rate all pending events, one transaction per batch; return their number.

    An event that makes its batch fail is retried later, and the others are rated.
    Raises: InvariantViolated at the end, naming misstated events; all others are rated by then.
    """
    rated_count = 0
    misstated: list[int] = []
    place, size = FRONT, BATCH_SIZE
    for _ in range(BATCHES_MAX):
        resting = [item for item in retries.resting() if isinstance(item, int)]
        try:
            async with sessions.begin() as session:
                batch = await rate_batch(session, limit=size, after=place, resting=resting)
        except StoreAway:
            raise
        except Exception as error:  # retry with smaller batches to isolate the failing event
            if size > 1:
                size = max(size // BATCH_DIVISOR, 1)
                continue
            async with sessions() as session:
                event_id = await session.scalar(NEXT, {"after": place, "resting": resting})
            retries.failed(error, event_id)
            continue
        rated_count += batch.rated_count
        misstated += batch.misstated
        place = batch.last_place
        if batch.seen_count < size:
            break
        size = min(size * BATCH_DIVISOR, BATCH_SIZE)
    if misstated:
        named = ", ".join(map(str, misstated[:NAMED_MAX]))
        raise InvariantViolated(f"{len(misstated)} usage events differ in cost from their tokens and stay unrated: {named}")
    return rated_count


async def rate_customer(session: AsyncSession, organization_id: uuid.UUID) -> bool:
    """Rate one customer's pending events in the caller's transaction, which holds its lane; return
    whether all were rated.

    Unlike other functions it waits for concurrent workers: on return each event is rated or
    misstated.
    """
    await session.execute(LOCK_CUSTOMER, {"organization_id": organization_id})
    place = FRONT
    for _ in range(BATCHES_MAX):
        batch = await rate_batch(session, limit=BATCH_SIZE, after=place, organization_id=organization_id)
        place = batch.last_place
        if batch.seen_count < BATCH_SIZE:
            return True
    return False


async def rate_batch(
    session: AsyncSession,
    *,
    limit: int,
    after: str = FRONT,
    organization_id: uuid.UUID | None = None,
    resting: Sequence[int] = (),
) -> RatedBatch:
    """Price, post and mark pending events that no other worker has locked, from a position in the
    list on.

    organization_id: events of one customer only. resting: events to leave out.
    """
    await session.execute(BY_INDEX_IN_MEMORY)
    lanes = await try_lanes(session)
    parameters = {"batch_size": limit, "after": after, "organization_id": organization_id, "lanes": lanes, "resting": [*resting]}
    # A separate statement after the locks, which sees every month closed before them.
    batch = (await session.execute(RATE, parameters)).one()
    rated_count, misstated = batch.rated_count, batch.misstated
    if batch.without_accounts:  # a customer's first usage: process the rest of the batch again
        await session.execute(OPEN_ACCOUNTS, {"organization_ids": batch.without_accounts})
        again = (await session.execute(RATE, parameters | {"batch_size": batch.seen_count - rated_count})).one()
        rated_count, misstated = rated_count + again.rated_count, again.misstated
    await session.execute(AS_BEFORE)
    return RatedBatch(batch.seen_count, rated_count, tuple(misstated), batch.last_place or after)


MISSTATED = text(f"""
SELECT e.id, {RIGHT_COST} AS right_picos, p.currency_code FROM unrated_usage w JOIN usage_events e USING (hold_id, part, settled_at)
JOIN price_versions p ON p.id = e.price_version_id
WHERE w.organization_id = :organization_id AND settled_at < :ends AND e.cost_picos <> {RIGHT_COST} ORDER BY e.id
""")
UNRATABLE = text("""
SELECT w.event_id FROM unrated_usage w JOIN organizations o ON o.id = w.organization_id
LEFT JOIN usage_events e USING (hold_id, part, settled_at) LEFT JOIN price_versions p ON p.id = e.price_version_id
WHERE w.organization_id = :organization_id AND settled_at < :ends AND p.currency_code IS DISTINCT FROM o.currency_code
ORDER BY w.event_id
""")
ADJUSTMENT = text("""
SELECT a.organization_id, a.currency_code, a.amount_picos, a.invoice_id IS NOT NULL AS is_credit_note,
       coalesce(d.approved, false) AS approved,
       EXISTS (SELECT FROM usage_corrections c WHERE c.adjustment_id = a.id) AS is_used
FROM adjustments a LEFT JOIN adjustment_decisions d ON d.adjustment_id = a.id WHERE a.id = :adjustment_id
""")
CORRECT = text("""
WITH taken AS (DELETE FROM unrated_usage WHERE organization_id = :organization_id AND event_id = ANY(:ids)
               RETURNING hold_id, part, settled_at)
INSERT INTO usage_corrections (hold_id, part, settled_at, adjustment_id, corrected_by)
SELECT hold_id, part, settled_at, :adjustment_id, :actor FROM taken
""")


@dataclass(frozen=True, slots=True)
class Misstated:
    """Misstated usage events by id, and the cost of their tokens."""

    ids: tuple[int, ...]
    right_picos: int
    currency_code: str

    @property
    def right_cost(self) -> str:
        """Cost as text with its currency."""
        return f"{exact_text(self.right_picos, self.currency_code)} {self.currency_code}"


async def misstated_usage(session: AsyncSession, organization_id: uuid.UUID, ends: datetime) -> Misstated | None:
    """Return a customer's misstated usage before a time; None if there is none."""
    rows = (await session.execute(MISSTATED, {"organization_id": organization_id, "ends": ends})).all()
    if not rows:
        return None
    return Misstated(tuple(row.id for row in rows), sum(int(row.right_picos) for row in rows), rows[0].currency_code)


async def unratable_usage(session: AsyncSession, organization_id: uuid.UUID, ends: datetime) -> list[int]:
    """Return the ids of events before a time whose price is in another currency than the
    customer's, or missing.
    """
    return list((await session.execute(UNRATABLE, {"organization_id": organization_id, "ends": ends})).scalars())


async def why_not(session: AsyncSession, organization_id: uuid.UUID, usage: Misstated, adjustment: str) -> str:
    """Return the reason for which an adjustment cannot correct the usage; empty if it can."""
    number = as_uuid(adjustment)
    row = None if number is None else (await session.execute(ADJUSTMENT, {"adjustment_id": number})).one_or_none()
    if row is None:
        return f"there is no adjustment {adjustment!r}"
    if row.organization_id != organization_id or row.is_credit_note:
        return f"adjustment {number} belongs to another customer, or is a credit note"
    if not row.approved:
        return f"adjustment {number} is not approved: another person has to approve it"
    if row.is_used:
        return f"adjustment {number} has already corrected other usage"
    if row.amount_picos != usage.right_picos:
        amount = exact_text(int(row.amount_picos), row.currency_code)
        return f"adjustment {number} is of {amount} {row.currency_code}, not of {usage.right_cost}"
    return ""


async def correct(session: AsyncSession, organization_id: uuid.UUID, usage: Misstated, adjustment: str, actor: str) -> None:
    """Bill the usage by the adjustment, and exclude it from rating permanently."""
    parameters = {
        "organization_id": organization_id,
        "ids": list(usage.ids),
        "adjustment_id": uuid.UUID(adjustment),
        "actor": actor,
    }
    await session.execute(CORRECT, parameters)
