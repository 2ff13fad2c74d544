"""A customer with a price, for tests of money."""

from __future__ import annotations

import pytest

from metering.db import Sessions
from metering.prices import ModelPrice, set_price
from tests.metering.books import Customer, new_customer


@pytest.fixture
async def customer(sessions: Sessions) -> Customer:
    """Organization `acme` with the project `search` and a key for everything."""
    async with sessions.begin() as session:
        return await new_customer(session, "acme")


@pytest.fixture
async def price(sessions: Sessions) -> ModelPrice:
    """Of the model `demo`, in USD: 150,000 picos per input token, 15,000 cached, 600,000 output."""
    async with sessions.begin() as session:
        return await set_price(
            session,
            model="demo",
            input_picos_per_token=150_000,
            cached_input_picos_per_token=15_000,
            output_picos_per_token=600_000,
            actor="test",
        )
