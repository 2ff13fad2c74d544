"""What a request would be, without being it: prices, what to expect, and whether the quotas would let it in. Changes nothing.

The decision is that of an admission (`quotas.py`), taken on copies of the counters without locking any: true at its moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import Integer, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import ServiceTier, UsageEvent
from metering.pricing.prices import TokenPrices, embedding_terms, price_in_force
from metering.quotas import quotas
from metering.quotas.quota_rules import Claim, Payer, QuotaState
from metering.quotas.quota_states import quotas_for
from metering.quotas.quotas import Counter, Counters, QuotaExceeded
from metering.quotas.refusals import Refusals, Refused

RECENT_EVENT_COUNT = 1000  # of the organization: among so many the project's latest are looked for
EXPECTED_FROM_COUNT = 100  # requests of the project to the model


@dataclass(frozen=True, slots=True)
class Quote:
    """What a request would be at one moment.

    expected_token_count: output, by the project's latest requests to the model; None if there were none. refusal: why it would not
    be let in, with the hint when it will.
    """

    prices: TokenPrices
    expected_token_count: int | None
    quotas: tuple[QuotaState, ...]
    refusal: QuotaExceeded | None


async def quote(
    session: AsyncSession,
    *,
    payer: Payer,
    model: str,
    input_token_count: int,
    first_slice_token_count: int,
    least_slice_token_count: int,
    tier: ServiceTier = ServiceTier.INTERACTIVE,
    embedding: bool = False,
) -> Quote:
    """See `operations.Admit` for the arguments. Raises: PriceMissing."""
    prices = await price_in_force(
        session, model=model, currency_code=payer.currency_code, organization_id=payer.organization_id, tier=tier
    )
    if embedding:
        prices = embedding_terms(prices)
    states = await quotas_for(session, subject_ids=payer.subject_ids, model=model)
    refusal = None
    if states:
        now = states[0].now
        rows = {state.rule.key(now): Counter(state.used, state.held) for state in states}
        claim = Claim(prices, input_token_count, 0, 0, 0, now, now)
        rules = [state.rule for state in states]
        try:
            quotas.admit(Counters(now, rows), rules, claim, first_slice_token_count, least_slice_token_count)
        except QuotaExceeded as exceeded:
            refusal = exceeded
            # Apart from what this process has promised to others: a quote is not a place in the line.
            await Refusals().note(await raw_connection(session), now, [Refused(payer.organization_id, refusal)])
    expected = 0 if embedding else await expected_output(session, payer, model)
    return Quote(prices, expected, tuple(states), refusal)


async def expected_output(session: AsyncSession, payer: Payer, model: str) -> int | None:
    """Output tokens of the project's latest requests to the model, in the mean and rounded up; None if there were none."""
    of_organization = select(UsageEvent).where(UsageEvent.organization_id == payer.organization_id, UsageEvent.part == 0)
    recent = of_organization.order_by(UsageEvent.settled_at.desc()).limit(RECENT_EVENT_COUNT).subquery()
    of_project = (
        select(recent.c.delivered_token_count)
        .where(recent.c.project_id == payer.project_id, recent.c.model == model, recent.c.embedding_token_count == 0)
        .order_by(recent.c.settled_at.desc())
        .limit(EXPECTED_FROM_COUNT)
        .subquery()
    )
    mean: int | None = await session.scalar(select(func.ceil(func.avg(of_project.c.delivered_token_count)).cast(Integer)))
    return mean


async def raw_connection(session: AsyncSession) -> psycopg.AsyncConnection[tuple[Any, ...]]:
    """The driver's connection under a session, in its transaction."""
    connection = await (await session.connection()).get_raw_connection()
    driver = connection.driver_connection
    assert isinstance(driver, psycopg.AsyncConnection)
    return driver
