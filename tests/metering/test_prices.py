"""Price versions: in force from a moment on, never changed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select

from metering.core.audit import list_audit_entries
from metering.core.errors import AlreadyExists, InvalidValue, NotFound, PriceMissing
from metering.pricing.prices import (
    ModelPrice,
    get_price,
    list_current_prices,
    price_in_force,
)
from metering.store.db import Sessions
from tests.metering.usage import new_price, rates_of

RATES = rates_of(3, 2, 5)


async def test_a_later_version_starts_at_its_time(sessions: Sessions, price: ModelPrice) -> None:
    async with sessions.begin() as session:
        now = (await session.scalars(select(func.now()))).one()
        tomorrow = await new_price(session, **RATES, effective_at=now + timedelta(days=1))
        euros = await new_price(session, currency_code="EUR", **RATES)
    async with sessions() as session:
        today = await price_in_force(session, model="demo", currency_code="USD")
        then = await price_in_force(
            session, model="demo", currency_code="USD", at=now + timedelta(days=1)
        )
        listed = await list_current_prices(session)
        by_number = await get_price(session, price.prices.version)
        entries = await list_audit_entries(session)

        with pytest.raises(PriceMissing):
            await price_in_force(
                session,
                model="demo",
                currency_code="USD",
                at=price.effective_at - timedelta(seconds=1),
            )
        with pytest.raises(PriceMissing):
            await price_in_force(session, model="other", currency_code="USD")
        with pytest.raises(NotFound):
            await get_price(session, 10**9)

    assert today == price.prices
    assert then == tomorrow.prices
    assert listed == [euros, price]
    assert by_number == price
    assert [entry.action for entry in entries] == ["price.set"] * 3


async def test_the_past_is_not_repriced(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        now = (await session.scalars(select(func.now()))).one()
        with pytest.raises(InvalidValue, match="effective_time"):
            await new_price(session, **RATES, effective_at=now - timedelta(microseconds=1))
        await new_price(session, **RATES, effective_at=now)
        with pytest.raises(AlreadyExists):
            await new_price(session, **RATES, effective_at=now)


async def test_bad_values_are_named(sessions: Sessions) -> None:
    async with sessions.begin() as session:
        for value in (-1, 10**16):
            for field in RATES:
                bad: dict[str, Any] = {**RATES, field: value}
                with pytest.raises(InvalidValue, match=field):
                    await new_price(session, **bad)
        for model in ("", "=1+1", "a b", "m" * 201):
            with pytest.raises(InvalidValue, match="model"):
                await new_price(session, model, **RATES)
        with pytest.raises(InvalidValue, match="currency_code"):
            await new_price(session, currency_code="XXX", **RATES)
