"""A customer with a price, for tests of money."""

from __future__ import annotations

import pytest

from metering.pricing.prices import ModelPrice
from metering.store.db import Sessions
from tests.metering.usage import Customer, new_customer, new_price


@pytest.fixture
async def customer(sessions: Sessions) -> Customer:
    """Create the organization `acme` with the project `search` and a key with all rights."""
    async with sessions.begin() as session:
        return await new_customer(session, "acme")


@pytest.fixture
async def price(sessions: Sessions) -> ModelPrice:
    """Return a price in USD: picos per token 150,000 input, 15,000 cached, 600,000 output."""
    async with sessions.begin() as session:
        return await new_price(session)
