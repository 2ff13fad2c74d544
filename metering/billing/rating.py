"""From usage events to the ledger: each event is priced and posted exactly once, whoever runs this and however often.

Work is found by a query, never by a message: an event is pending until `rated_at` is set, in the transaction that posts it. Two
workers skip what the other has locked; one that dies leaves its batch pending.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import BigInteger, any_, func, literal, select, update
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncSession

from metering.billing.ledger import UsagePosting, post, usage_legs
from metering.billing.prices import token_prices
from metering.billing.pricing import TokenPrices
from metering.errors import InvariantViolated
from metering.models import PriceVersion, UsageEvent
from metering.store.db import Sessions

BATCH_SIZE = 1_000  # events per transaction; more is hardly faster per event, and a transaction should stay far below a second
BATCHES_MAX = 100  # per run: bounds one task to some seconds; what is left waits for the next, a second later
NAMED_MAX = 20  # events that an error message names


class PendingEvent(NamedTuple):
    """What rating reads of a usage event."""

    id: int
    organization_id: uuid.UUID
    settled_at: datetime
    price_version_id: int
    input_token_count: int
    cached_input_token_count: int
    billed_token_count: int
    cost_picos: int


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


async def rate_batch(session: AsyncSession, *, limit: int, after_event_id: int = 0) -> RatedBatch:
    """Price, post and mark the oldest pending events beyond `after_event_id` that nobody else is working on."""
    events = await _lock_pending(session, limit, after_event_id)
    prices = await _prices(session, {event.price_version_id for event in events})
    postings: list[UsagePosting] = []
    rated: list[int] = []
    misstated: list[int] = []
    for event in events:
        version = prices[event.price_version_id]
        lines = tuple(version.lines(event.input_token_count, event.cached_input_token_count, event.billed_token_count))
        if sum(line.amount_picos for line in lines) != event.cost_picos:
            misstated.append(event.id)
            continue
        rated.append(event.id)
        if lines:
            legs = usage_legs(event.organization_id, version.currency_code, version.version, lines)
            postings.append(UsagePosting(event.id, event.organization_id, event.settled_at, legs))
    await post(session, postings)
    if rated:
        ids = literal(rated, ARRAY(BigInteger()))
        mark = update(UsageEvent).where(UsageEvent.id == any_(ids)).values(rated_at=func.now())
        await session.execute(mark.execution_options(synchronize_session=False))
    return RatedBatch(len(events), len(rated), tuple(misstated), events[-1].id if events else after_event_id)


async def _lock_pending(session: AsyncSession, limit: int, after_event_id: int) -> list[PendingEvent]:
    query = (
        select(*(getattr(UsageEvent, name) for name in PendingEvent._fields))
        .where(UsageEvent.rated_at.is_(None), UsageEvent.id > after_event_id)
        .order_by(UsageEvent.id)
        .limit(limit)
        .with_for_update(skip_locked=True, key_share=True)
    )
    return [PendingEvent(*row) for row in await session.execute(query)]


async def _prices(session: AsyncSession, versions: Collection[int]) -> dict[int, TokenPrices]:
    rows = await session.scalars(select(PriceVersion).where(PriceVersion.id.in_(versions)))
    return {row.id: token_prices(row) for row in rows}
