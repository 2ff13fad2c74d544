"""Price of a request by model, currency, customer, tier and time."""

from __future__ import annotations

import asyncio
import math
import random
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select

from metering.core.audit import list_audit_entries
from metering.core.errors import AlreadyExists, InvalidValue, NotFound, PriceMissing
from metering.core.models import ServiceTier
from metering.holds.operations import Admitted
from metering.pricing.prices import (
    ModelPrice,
    customer_prices,
    multiplied_rates,
    price_history,
    price_in_force,
    versions_in_force,
    withdraw_price,
)
from metering.quotas.quota_rules import Payer
from metering.store.db import Sessions, create_engine, create_sessions
from tests.metering.hold_world import MODEL, NOON, HoldWorld, admit
from tests.metering.queries import execute
from tests.metering.usage import Customer, Rates, new_customer, new_price

INTERACTIVE, BATCH = ServiceTier.INTERACTIVE, ServiceTier.BATCH


def rates(output: int) -> Rates:
    """Return prices that differ in their last number."""
    return Rates(
        input_picos_per_token=2_000,
        cached_input_picos_per_token=1_000,
        output_picos_per_token=output,
    )


async def paid(
    sessions: Sessions, customer: Customer | None, tier: ServiceTier = INTERACTIVE
) -> int:
    async with sessions() as session:
        owner = None if customer is None else customer.organization_id
        found = await price_in_force(
            session, model="demo", currency_code="USD", organization_id=owner, tier=tier
        )
    return found.output_picos_per_token


async def test_an_own_price_wins_until_withdrawn(sessions: Sessions, customer: Customer) -> None:
    """A tier without its own row uses the interactive price."""
    async with sessions.begin() as session:
        other = await new_customer(session, "other")
        await new_price(session, **rates(8_000))
    assert (await paid(sessions, customer), await paid(sessions, customer, BATCH)) == (8_000, 8_000)

    async with sessions.begin() as session:
        await new_price(session, **rates(10_000), batch_multiplier_milli=500)
    assert await paid(sessions, customer) == 10_000
    assert await paid(sessions, customer, BATCH) == 5_000

    async with sessions.begin() as session:
        await new_price(session, organization="acme", **rates(6_000))
    # The batch tier's discount is kept: an own price must not raise it unnoticed.
    assert (await paid(sessions, customer), await paid(sessions, customer, BATCH)) == (6_000, 3_000)
    assert (await paid(sessions, other), await paid(sessions, None, BATCH)) == (10_000, 5_000)

    async with sessions.begin() as session:
        ended = await withdraw_price(session, model="demo", organization="acme", actor="test")
    assert await paid(sessions, customer) == 10_000
    assert await paid(sessions, customer, BATCH) == 5_000
    async with sessions.begin() as session:
        with pytest.raises(NotFound, match="own price"):
            await withdraw_price(session, model="demo", organization="acme", actor="test")
        history = await price_history(
            session, model="demo", organization_id=customer.organization_id
        )
        entries = await list_audit_entries(session, action_prefix="price.")
    assert [each.tier for each in ended] == [INTERACTIVE, BATCH]
    assert len(history) == 3 + 4
    assert [entry.action for entry in entries] == ["price.withdraw"] * 2 + ["price.set"] * 5


async def test_the_past_stays_and_errors_are_named(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        now = (await session.scalars(select(func.now()))).one()
        first = await new_price(session, **rates(8_000), effective_at=now + timedelta(days=1))
        with pytest.raises(AlreadyExists, match="choose another time"):
            await new_price(session, **rates(9_000), effective_at=now + timedelta(days=1))
        with pytest.raises(InvalidValue, match="acme is billed in USD"):
            await new_price(session, organization="acme", currency_code="EUR", **rates(1))
        with pytest.raises(NotFound, match="nobody"):
            await new_price(session, organization="nobody", **rates(1))
        with pytest.raises(InvalidValue, match=r"batch_multiplier_milli: 333 .* use 300 or 400"):
            await new_price(session, **rates(10), batch_multiplier_milli=333)
        with pytest.raises(
            InvalidValue, match="batch_multiplier_milli: must be between 0 and 1000000"
        ):
            await new_price(session, **rates(10), batch_multiplier_milli=-1)
    for statement in (
        "UPDATE price_versions SET output_picos_per_token = 0",
        "DELETE FROM price_versions",
    ):
        with pytest.raises(Exception, match="append-only"):
            await execute(sessions, statement)
    assert first.effective_at > now


@given(st.lists(st.integers(0, 10**13), min_size=1, max_size=4), st.integers(0, 1_000_000))
def test_a_multiplier_is_exact_or_refused_with_the_nearest(prices: list[int], milli: int) -> None:
    try:
        multiplied = multiplied_rates(prices, milli)
    except InvalidValue as refused:
        below, above = (
            int(word) for word in refused.remedy.split(": use ")[1].split(",")[0].split(" or ")
        )
        assert below < milli < above
        step = math.lcm(*(1000 // math.gcd(price, 1000) for price in prices))
        assert above - below == step
        assert multiplied_rates(prices, below)
    else:
        assert [price * 1000 for price in multiplied] == [price * milli for price in prices]


def in_force(
    versions: list[ModelPrice], customer: Customer, tier: ServiceTier, at: object
) -> ModelPrice | None:
    """Return the price by the model, which follows the rule sentence by sentence."""
    for owner in (customer.organization_id, None):
        for each in dict.fromkeys((tier, INTERACTIVE)):
            by_key = [
                v
                for v in versions
                if v.organization_id == owner and v.tier is each and v.effective_at <= at  # type: ignore[operator]
            ]
            if by_key:
                last = max(by_key, key=lambda version: version.effective_at)
                if last.withdrawn:
                    break
                return last
    return None


async def test_holds_and_lookups_agree_with_a_model(world: HoldWorld, database_url: str) -> None:
    """Random lists, own prices, withdrawals and tiers at random times."""
    chance = random.Random(20)
    engine = create_engine(database_url)
    sessions = create_sessions(engine)
    async with sessions.begin() as session:
        customers = [await new_customer(session, name) for name in ("acme", "other")]
        for _ in range(40):
            at = NOON + timedelta(minutes=chance.randrange(60))
            owner = chance.choice(["", "", "acme", "other"])
            multiplier = chance.choice([None, None, 500, 1_000])
            try:
                async with session.begin_nested():
                    if owner and chance.random() < 0.4:
                        await withdraw_price(
                            session, model=MODEL, organization=owner, effective_at=at, actor="test"
                        )
                    else:
                        values = rates(chance.randrange(1_000) * 2_000)
                        await new_price(
                            session,
                            MODEL,
                            organization=owner,
                            **values,
                            batch_multiplier_milli=multiplier,
                            effective_at=at,
                        )
            except (AlreadyExists, NotFound):
                continue
        versions = [
            version
            for customer in customers
            for version in await price_history(
                session, model=MODEL, organization_id=customer.organization_id
            )
        ]
    own_count = 0
    for minute in range(0, 60, 3):
        world.set_time(NOON + timedelta(minutes=minute, seconds=1))
        wanted = [(customer, tier) for customer in customers for tier in ServiceTier]
        ops = [admit(payer_of(customer), tier=tier) for customer, tier in wanted]
        answers = await world.run(*ops)
        async with sessions() as session:
            for (customer, tier), op, answer in zip(wanted, ops, answers, strict=True):
                expected = in_force(versions, customer, tier, world.now)
                assert expected is not None
                found = await versions_in_force(
                    session, model=MODEL, organization_id=customer.organization_id
                )
                reported = {
                    each.tier: each.price
                    for each in customer_prices(found, customer.organization_id)
                }
                assert isinstance(answer, Admitted)
                assert (
                    answer.prices.version
                    == expected.prices.version
                    == reported[tier].prices.version
                )
                held = world.one("SELECT price_version_id FROM holds WHERE id = %s", op.hold_id)
                assert held == expected.prices.version
                own_count += expected.organization_id is not None
    await engine.dispose()
    assert 10 < own_count < 70


def payer_of(customer: Customer) -> Payer:
    """Return the payer with its only key."""
    return Payer(customer.organization_id, customer.key.project_id, customer.key.id, "USD")


async def test_an_own_price_serves_nobody_else(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        other = await new_customer(session, "other")
        await new_price(session, organization="acme", **rates(6_000))

    assert await paid(sessions, customer, BATCH) == 6_000
    with pytest.raises(PriceMissing):
        await paid(sessions, other)


async def test_concurrent_price_changes_make_one_version(sessions: Sessions) -> None:
    async with sessions() as session:
        at = (await session.scalars(select(func.now()))).one() + timedelta(hours=1)

    async def set_it(output: int) -> None:
        async with sessions.begin() as session:
            await new_price(session, **rates(output), effective_at=at)

    done = await asyncio.gather(set_it(1_000), set_it(2_000), return_exceptions=True)

    assert sorted(type(each).__name__ for each in done) == ["AlreadyExists", "NoneType"]
