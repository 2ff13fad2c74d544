"""A customer with a price, for tests of money."""

from __future__ import annotations

import pytest

from metering.pricing.prices import ModelPrice
from metering.store.db import Sessions
from tests.metering.books import Customer, new_customer, new_price


@pytest.fixture
async def customer(sessions: Sessions) -> Customer:
    """Organization `acme` with the project `search` and a key for everything."""
    async with sessions.begin() as session:
        return await new_customer(session, "acme")


@pytest.fixture
async def price(sessions: Sessions) -> ModelPrice:
    """Of the model `demo`, in USD: 150,000 picos per input token, 15,000 cached, 600,000 output."""
    async with sessions.begin() as session:
        return await new_price(session)
