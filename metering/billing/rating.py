"""From usage events to the ledger: each event is priced and posted exactly once, whoever runs this and however often.

Work is found by a query, never by a message: an event is pending while it stands in `unrated_usage`, which it leaves in the
statement that posts it. Two workers skip what the other has locked; one that dies leaves its batch pending. Events of customers
whose month is being closed at the moment are passed over, and so is an event whose stored cost is not that of its tokens; the rest
of a batch waits for neither.

A batch is one statement. Postings are sums: one transaction per customer, billing month, day of use (UTC) and batch, with a leg per
price version and kind of token. Each event points to its transaction.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from common.incidents import Retries
from metering.billing.models import AccountKind, TransactionKind
from metering.billing.months import LANE_OF, POSTING_MONTH, try_lanes
from metering.billing.pricing import COUNTS_OF_EVENT
from metering.errors import InvariantViolated, StoreAway
from metering.store.db import Sessions

BATCH_SIZE = 5_000  # events per transaction; more is hardly faster per event, and a transaction should stay far below a second
BATCHES_MAX = 100  # per run: bounds one task to some seconds; what is left waits for the next, a second later
BATCH_DIVISOR = 10  # of a batch that fails, and of the growth afterwards
NAMED_MAX = 20  # events that an error message names

# In the statement, the tokens of a kind are a column named after it. A wrong count times a price may pass 64 bits: so numeric.
COUNTS = ", ".join(f"{count} AS {kind}" for kind, (count, _) in COUNTS_OF_EVENT.items())
RIGHT_COST = " + ".join(f"CAST({count} AS numeric) * p.{price}" for count, price in COUNTS_OF_EVENT.values())
SUMS = ", ".join(f"sum({kind}) AS {kind}" for kind in COUNTS_OF_EVENT)
BY_KIND = "LATERAL (VALUES {}) AS of_kind (token_kind, token_count, amount_picos)".format(
    ", ".join(f"('{kind}', {kind}, {kind} * {price})" for kind, (_, price) in COUNTS_OF_EVENT.items())
)

# Up to :batch_size of what waits beyond :after, a place in the list. Every event is read and written once, as it is marked, only
# if it costs what its tokens cost; the sums are of what was marked. What cannot be rated now stays in the list and is told.
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
# Tables are read by their indexes: what the planner takes for a small table may be a month of events that nobody has counted yet.
# And a batch stays in memory, where the trigger sees its rows whole.
BY_INDEX_IN_MEMORY = text("SELECT set_config('enable_seqscan', 'off', true), set_config('work_mem', '64MB', true)")
AS_BEFORE = text("SELECT set_config(name, reset_val, true) FROM pg_settings WHERE name IN ('enable_seqscan', 'work_mem')")
# In one order, so that two who open the same ones do not deadlock.
OPEN_ACCOUNTS = text(f"""
INSERT INTO ledger_accounts (organization_id, kind, currency_code)
SELECT o.id, needed.kind, o.currency_code
FROM organizations o, (VALUES ('{AccountKind.RECEIVABLE}'), ('{AccountKind.REVENUE}')) AS needed (kind)
WHERE o.id = ANY(:organization_ids) ORDER BY 1, 2, 3
ON CONFLICT DO NOTHING
""")
# The event that a batch of one takes. Read without locks: where another worker has it, the wrong event rests for a while.
NEXT = text("""
SELECT event_id FROM unrated_usage WHERE ctid > CAST(:after AS tid) AND event_id <> ALL(CAST(:resting AS bigint[])) LIMIT 1
""")
FRONT = "(0,0)"  # of the list
retries = Retries("rating", passing=(StoreAway,))  # by usage event


@dataclass(frozen=True, slots=True)
class RatedBatch:
    """What one batch did. misstated: events whose stored cost is not that of their tokens; they stay unrated.

    last_place: in the list, where the next batch goes on.
    """

    seen_count: int
    rated_count: int
    misstated: tuple[int, ...]
    last_place: str


async def rate_pending(session: AsyncSession, limit: int = BATCH_SIZE) -> int:
    """Rate at most `limit` events in the caller's transaction; tells how many. Misstated ones are passed over."""
    return (await rate_batch(session, limit=limit)).rated_count


async def rate_all_pending(sessions: Sessions) -> int:
    """Rate whatever is pending, a transaction per batch; tells how many.

    An event that makes its batch fail rests, and the others are rated.
    Raises: InvariantViolated at the end, naming the events that are misstated; all others are rated by then.
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
        except Exception as error:  # smaller batches find the event that breaks its batch
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
        raise InvariantViolated(f"{len(misstated)} usage events do not cost what their tokens cost and stay unrated: {named}")
    return rated_count


async def rate_customer(session: AsyncSession, organization_id: uuid.UUID) -> bool:
    """Rate what one customer has pending, in the caller's transaction, which has its lane alone; whether that was all there is.

    Unlike the others it waits for whoever works on these events: they are rated when it returns, or misstated.
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
    """Price, post and mark pending events that nobody else is working on, from a place in the list on.

    organization_id: only those of one customer. resting: events to leave out.
    """
    await session.execute(BY_INDEX_IN_MEMORY)
    lanes = await try_lanes(session)
    parameters = {"batch_size": limit, "after": after, "organization_id": organization_id, "lanes": lanes, "resting": [*resting]}
    # A statement of its own, after the locks: it sees every month that was closed before they were had.
    found = (await session.execute(RATE, parameters)).one()
    rated_count, misstated = found.rated_count, found.misstated
    if found.without_accounts:  # a customer's first usage: what the batch has left is looked at again
        await session.execute(OPEN_ACCOUNTS, {"organization_ids": found.without_accounts})
        again = (await session.execute(RATE, parameters | {"batch_size": found.seen_count - rated_count})).one()
        rated_count, misstated = rated_count + again.rated_count, again.misstated
    await session.execute(AS_BEFORE)
    return RatedBatch(found.seen_count, rated_count, tuple(misstated), found.last_place or after)
