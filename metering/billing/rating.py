"""From usage events to the ledger: each event is priced and posted exactly once, whoever runs this and however often.

Work is found by a query, never by a message: an event is pending until `rated_at` is set, in the statement that posts it. Two
workers skip what the other has locked; one that dies leaves its batch pending. Events of customers whose month is being closed at
the moment are passed over, and so is an event whose stored cost is not that of its tokens; the rest of a batch waits for neither.

A batch is one statement. Postings are sums: one transaction per customer, billing month, day of use (UTC) and batch, with a leg per
price version and kind of token. Each event points to its transaction.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.models import AccountKind, TransactionKind
from metering.billing.months import LANE_OF, POSTING_MONTH, try_lanes
from metering.billing.pricing import COUNTS_OF_EVENT
from metering.errors import InvariantViolated
from metering.store.db import Sessions

BATCH_SIZE = 5_000  # events per transaction; more is hardly faster per event, and a transaction should stay far below a second
BATCHES_MAX = 100  # per run: bounds one task to some seconds; what is left waits for the next, a second later
NAMED_MAX = 20  # events that an error message names

# In the statement, the tokens of a kind are a column named after it. A wrong count times a price may pass 64 bits: hence numeric.
COUNTS = ", ".join(f"{count} AS {kind}" for kind, (count, _) in COUNTS_OF_EVENT.items())
SUMS = ", ".join(f"sum({kind}) AS {kind}" for kind in COUNTS_OF_EVENT)
RIGHT_COST = " + ".join(f"CAST({kind} AS numeric) * {price}" for kind, (_, price) in COUNTS_OF_EVENT.items())
BY_KIND = "LATERAL (VALUES {}) AS of_kind (token_kind, token_count, amount_picos)".format(
    ", ".join(f"('{kind}', {kind}, {kind} * {price})" for kind, (_, price) in COUNTS_OF_EVENT.items())
)

# Pending events, oldest first, up to :batch_size beyond :after_event_id. What cannot be rated now is counted and left.
RATE = text(f"""
WITH pending AS MATERIALIZED (
    SELECT id, organization_id, CAST(settled_at AT TIME ZONE 'UTC' AS date) AS day, price_version_id, cost_picos, {COUNTS}
    FROM usage_events WHERE rated_at IS NULL AND id > :after_event_id
      AND (CAST(:organization_id AS uuid) IS NULL OR organization_id = :organization_id)
    ORDER BY id LIMIT :batch_size FOR NO KEY UPDATE SKIP LOCKED
), customers AS MATERIALIZED (
    SELECT organization_id, currency_code, {LANE_OF.format(organization_id="organization_id")} = ANY(:lanes) AS may_post,
           min(a.id) FILTER (WHERE a.kind = '{AccountKind.RECEIVABLE}') AS receivable_id,
           min(a.id) FILTER (WHERE a.kind = '{AccountKind.REVENUE}') AS revenue_id
    FROM (SELECT DISTINCT e.organization_id, p.currency_code FROM pending e JOIN price_versions p ON p.id = e.price_version_id) c
    LEFT JOIN ledger_accounts a USING (organization_id, currency_code)
    GROUP BY organization_id, currency_code
), priced AS MATERIALIZED (
    SELECT e.*, p.currency_code, c.may_post, c.receivable_id IS NOT NULL AND c.revenue_id IS NOT NULL AS has_accounts,
           e.cost_picos = {RIGHT_COST} AS is_right
    FROM pending e JOIN price_versions p ON p.id = e.price_version_id
    JOIN customers c ON (c.organization_id, c.currency_code) = (e.organization_id, p.currency_code)
), rated AS MATERIALIZED (
    SELECT * FROM priced WHERE is_right AND may_post AND has_accounts
), sums AS MATERIALIZED (
    SELECT organization_id, day, price_version_id, {SUMS} FROM rated GROUP BY organization_id, day, price_version_id
), posted AS (
    INSERT INTO ledger_transactions (organization_id, kind, billing_month, effective_at, description)
    SELECT d.organization_id, '{TransactionKind.USAGE}', m.month, d.day AT TIME ZONE 'UTC', 'usage'
    FROM (SELECT DISTINCT organization_id, day FROM sums) d,
         LATERAL ({POSTING_MONTH.format(organization_id="d.organization_id", month="date_trunc('month', d.day)::date")}) m (month)
    ORDER BY d.organization_id, d.day
    RETURNING id, organization_id, CAST(effective_at AT TIME ZONE 'UTC' AS date) AS day
), kinds AS MATERIALIZED (
    SELECT posted.id AS transaction_id, c.receivable_id, c.revenue_id, sums.price_version_id, of_kind.*
    FROM sums JOIN posted USING (organization_id, day)
    JOIN price_versions p ON p.id = sums.price_version_id
    JOIN customers c ON (c.organization_id, c.currency_code) = (sums.organization_id, p.currency_code), {BY_KIND}
), legs AS (
    INSERT INTO ledger_entries (transaction_id, account_id, amount_picos, token_kind, token_count, price_version_id)
    SELECT transaction_id, receivable_id, sum(amount_picos), NULL, NULL, NULL FROM kinds GROUP BY transaction_id, receivable_id
    UNION ALL
    SELECT transaction_id, revenue_id, -amount_picos, token_kind, token_count, price_version_id FROM kinds WHERE token_count > 0
), marked AS (
    UPDATE usage_events u SET rated_at = now(), ledger_transaction_id = posted.id
    FROM rated JOIN posted USING (organization_id, day) WHERE u.id = rated.id
    RETURNING u.id
)
SELECT count(*) AS seen_count, (SELECT count(*) FROM marked) AS rated_count, coalesce(max(id), :after_event_id) AS last_event_id,
       coalesce(array_agg(id ORDER BY id) FILTER (WHERE NOT is_right), '{{}}') AS misstated,
       count(*) FILTER (WHERE is_right AND may_post AND NOT has_accounts) AS without_accounts_count
FROM priced
""")
LOCK_CUSTOMER = text("""
SELECT count(*) FROM (
    SELECT FROM usage_events WHERE rated_at IS NULL AND organization_id = :organization_id FOR NO KEY UPDATE
) pending
""")
# In one order, so that two who open the same ones do not deadlock.
OPEN_ACCOUNTS = text(f"""
INSERT INTO ledger_accounts (organization_id, kind, currency_code)
SELECT organization_id, kind, currency_code
FROM (SELECT DISTINCT e.organization_id, p.currency_code FROM (
          SELECT organization_id, price_version_id FROM usage_events
          WHERE rated_at IS NULL AND id > :after_event_id AND id <= :last_event_id) e
      JOIN price_versions p ON p.id = e.price_version_id) c,
     (VALUES ('{AccountKind.RECEIVABLE}'), ('{AccountKind.REVENUE}')) AS needed (kind)
ORDER BY 1, 2, 3
ON CONFLICT DO NOTHING
""")


@dataclass(frozen=True, slots=True)
class RatedBatch:
    """What one batch did. misstated: events whose stored cost is not that of their tokens; they stay unrated."""

    seen_count: int
    rated_count: int
    misstated: tuple[int, ...]
    last_event_id: int


async def rate_pending(session: AsyncSession, limit: int = BATCH_SIZE) -> int:
    """Rate at most `limit` events in the caller's transaction; tells how many. Misstated ones are passed over."""
    return (await rate_batch(session, limit=limit)).rated_count


async def rate_all_pending(sessions: Sessions) -> int:
    """Rate whatever is pending, a transaction per batch; tells how many.

    Raises: InvariantViolated at the end, naming the events that are misstated; all others are rated by then.
    """
    rated_count = 0
    misstated: list[int] = []
    last_event_id = 0
    for _ in range(BATCHES_MAX):
        async with sessions.begin() as session:
            batch = await rate_batch(session, limit=BATCH_SIZE, after_event_id=last_event_id)
        rated_count += batch.rated_count
        misstated += batch.misstated
        last_event_id = batch.last_event_id
        if batch.seen_count < BATCH_SIZE:
            break
    if misstated:
        named = ", ".join(map(str, misstated[:NAMED_MAX]))
        raise InvariantViolated(f"{len(misstated)} usage events do not cost what their tokens cost and stay unrated: {named}")
    return rated_count


async def rate_customer(session: AsyncSession, organization_id: uuid.UUID) -> bool:
    """Rate what one customer has pending, in the caller's transaction, which has its lane alone; whether that was all there is.

    Unlike the others it waits for whoever works on these events: they are rated when it returns, or misstated.
    """
    await session.execute(LOCK_CUSTOMER, {"organization_id": organization_id})
    last_event_id = 0
    for _ in range(BATCHES_MAX):
        batch = await rate_batch(session, limit=BATCH_SIZE, after_event_id=last_event_id, organization_id=organization_id)
        last_event_id = batch.last_event_id
        if batch.seen_count < BATCH_SIZE:
            return True
    return False


async def rate_batch(
    session: AsyncSession, *, limit: int, after_event_id: int = 0, organization_id: uuid.UUID | None = None
) -> RatedBatch:
    """Price, post and mark the oldest pending events beyond `after_event_id` that nobody else is working on.

    organization_id: only those of one customer.
    """
    parameters = {
        "batch_size": limit,
        "after_event_id": after_event_id,
        "organization_id": organization_id,
        "lanes": await try_lanes(session),
    }
    # A statement of its own, after the locks: it sees every month that was closed before they were had.
    found = (await session.execute(RATE, parameters)).one()
    rated_count = found.rated_count
    if found.without_accounts_count:  # a customer's first usage
        await session.execute(OPEN_ACCOUNTS, {"after_event_id": after_event_id, "last_event_id": found.last_event_id})
        rated_count += (await session.execute(RATE, parameters | {"batch_size": found.seen_count - rated_count})).one().rated_count
    return RatedBatch(found.seen_count, rated_count, tuple(found.misstated), found.last_event_id)
