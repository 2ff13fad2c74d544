"""A customer with a price, a database with a clock, and a double of Stripe."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from sqlalchemy import make_url

from metering.export.export_settings import StripeSettings
from metering.export.stripe_gateway import StripeGateway
from metering.holds import read as reading
from metering.holds import slow_path
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Admit
from metering.pricing.prices import ModelPrice
from metering.store.db import Sessions, create_engine, create_sessions
from tests.conftest import new_database
from tests.metering.hold_scenarios import Play, run
from tests.metering.hold_world import HoldWorld
from tests.metering.usage import Acme, Customer, new_customer, new_price
from tests.stripe_double.server import KEY, StripeDouble, stripe_double


@pytest.fixture(scope="session")
def acme_template(postgres_server: str, template_database: str) -> Iterator[tuple[str, Customer]]:
    """Yield the name of a database with the organization `acme`, and its customer.

    A copy of it saves each test that begins with a customer 50 ms of CPU.
    """
    with new_database(postgres_server, template=template_database) as url:
        yield str(make_url(url).database), asyncio.run(create_acme(url))


async def create_acme(database_url: str) -> Customer:
    """Create the organization `acme` with the project `search` and a key with all rights."""
    engine = create_engine(database_url, pool_size=1)
    async with create_sessions(engine).begin() as session:
        customer = await new_customer(session, "acme")
    await engine.dispose()
    return customer


@pytest.fixture
def database_url(
    request: pytest.FixtureRequest, postgres_server: str, template_database: str
) -> Iterator[str]:
    """Yield the URL of a migrated database for this test only, with `acme` if it has a customer."""
    template = template_database
    if "customer" in request.fixturenames:
        template, _ = request.getfixturevalue("acme_template")
    with new_database(postgres_server, template=template) as url:
        yield url


@pytest.fixture
def customer(acme_template: tuple[str, Customer], database_url: str) -> Customer:
    """Return the customer of `acme`, which is in the test's database."""
    return acme_template[1]


@pytest.fixture
async def price(sessions: Sessions) -> ModelPrice:
    """Return a price in USD: picos per token 150,000 input, 15,000 cached, 600,000 output."""
    async with sessions.begin() as session:
        return await new_price(session)


@pytest.fixture
def acme(sessions: Sessions, customer: Customer, price: ModelPrice) -> Acme:
    """Return the customer with its price."""
    return Acme(sessions, customer, price)


@pytest.fixture
def world(database_url: str) -> Iterator[HoldWorld]:
    """Yield the test's database with a clock at `NOON`."""
    with HoldWorld(database_url) as world:
        yield world


@pytest.fixture
def play(world: HoldWorld) -> Play:
    """Return a function that plays a table of holds in the world."""
    return partial(run, world)


@pytest.fixture
async def holds(world: HoldWorld) -> AsyncIterator[HoldConnection]:
    """Yield the connection of an api process to the world's database."""
    async with HoldConnection(world.url, uuid.uuid4()) as opened:
        yield opened


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the holds and admissions of each batch on the slow path."""
    counts: list[int] = []
    read_and_lock = reading.read_and_lock

    async def counted(
        connection: Any, hold_ids: Any, admits: Sequence[Admit] = (), *others: Any
    ) -> object:
        counts.append(len(hold_ids) + len(admits))
        return await read_and_lock(connection, hold_ids, admits, *others)

    monkeypatch.setattr(slow_path, "read_and_lock", counted)
    return counts


@pytest.fixture
def double() -> Iterator[StripeDouble]:
    """Yield a double of Stripe."""
    with stripe_double() as running:
        yield running


@pytest.fixture
def gateway(double: StripeDouble) -> StripeGateway:
    """Return a gateway to the double."""
    return StripeGateway(StripeSettings(KEY, api_base=double.url))
