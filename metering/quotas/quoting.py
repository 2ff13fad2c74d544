"""Quotes: prices, expected output and quota decision of a request that is not made. Changes
nothing.

The decision is that of an admission (`quotas.py`), made on copies of the counters without locks:
valid at its time only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import Integer, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import ServiceTier, UsageEvent
from metering.pricing.prices import TokenPrices, embedding_terms, price_in_force
from metering.quotas import quotas
from metering.quotas.quota_rules import Charge, Payer, QuotaState
from metering.quotas.quota_states import member_quotas_for, quotas_for
from metering.quotas.quotas import Counter, Counters, QuotaExceeded
from metering.quotas.refusals import Refusals, Refused

# Latest events of the organization, among which the project's latest are searched.
RECENT_EVENT_COUNT = 1000
EXPECTED_FROM_COUNT = 100  # requests of the project to the model


@dataclass(frozen=True, slots=True)
class Quote:
    """Prices, expected output and quota decision of a request at one time.

    `expected_token_count` is the mean output of the project's latest requests to the model, None if
    there were none; `expected_reasoning_token_count` is the reasoning in it. `refusal` is the error
    with which it would be refused, with its retry-after.
    """

    prices: TokenPrices
    expected_token_count: int | None
    expected_reasoning_token_count: int
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
    end_user: str = "",
    labels: Mapping[str, str] | None = None,
) -> Quote:
    """Quote a request, described as in `Admit`, without admitting it. Raises: PriceMissing."""
    prices = await price_in_force(
        session,
        model=model,
        currency_code=payer.currency_code,
        organization_id=payer.organization_id,
        tier=tier,
    )
    if embedding:
        prices = embedding_terms(prices)
    states = [
        *await quotas_for(session, subject_ids=payer.subject_ids, model=model),
        *await member_quotas_for(
            session,
            organization_id=payer.organization_id,
            scopes=(payer.organization_id, payer.project_id),
            model=model,
            end_user=end_user,
            labels=labels,
        ),
    ]
    refusal = None
    if states:
        now = states[0].now
        rows = {state.rule.key(now): Counter(state.used, state.held) for state in states}
        charge = Charge(prices, input_token_count, 0, 0, 0, now, now)
        rules = [state.rule for state in states]
        try:
            quotas.admit(
                Counters(now, rows), rules, charge, first_slice_token_count, least_slice_token_count
            )
        except QuotaExceeded as exceeded:
            refusal = exceeded
            buckets = {state.rule.number: state.buckets for state in states}
            refusal.met = tuple(
                (state._replace(buckets=buckets[state.rule.number]), minimum)
                for state, minimum in refusal.met
            )
            # A quote reserves no room, and does not count what is reserved for other requests.
            await Refusals().note(
                await raw_connection(session),
                now,
                [Refused(payer.organization_id, refusal, payer.api_key_id, None)],
            )
    expected, reasoning = (0, 0) if embedding else await expected_output(session, payer, model)
    return Quote(prices, expected, reasoning, tuple(states), refusal)


async def expected_output(
    session: AsyncSession, payer: Payer, model: str
) -> tuple[int | None, int]:
    """Compute the mean output (None without requests) and reasoning of the latest requests."""
    of_organization = select(UsageEvent).where(
        UsageEvent.organization_id == payer.organization_id, UsageEvent.part == 0
    )
    recent = (
        of_organization.order_by(UsageEvent.settled_at.desc()).limit(RECENT_EVENT_COUNT).subquery()
    )
    of_project = (
        select(recent.c.delivered_token_count, recent.c.reasoning_token_count)
        .where(
            recent.c.project_id == payer.project_id,
            recent.c.model == model,
            recent.c.embedding_token_count == 0,
        )
        .order_by(recent.c.settled_at.desc())
        .limit(EXPECTED_FROM_COUNT)
        .subquery()
    )
    means = select(
        func.ceil(func.avg(of_project.c.delivered_token_count)).cast(Integer),
        func.round(func.coalesce(func.avg(of_project.c.reasoning_token_count), 0)).cast(Integer),
    )
    mean, reasoning = (await session.execute(means)).one()
    return mean, reasoning


async def raw_connection(session: AsyncSession) -> psycopg.AsyncConnection[tuple[Any, ...]]:
    """Return the psycopg connection under a session, in its transaction."""
    connection = await (await session.connection()).get_raw_connection()
    driver = connection.driver_connection
    assert isinstance(driver, psycopg.AsyncConnection)
    return driver
