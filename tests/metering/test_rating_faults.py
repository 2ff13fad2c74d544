"""Faults during rating: random usage in random batches, by several raters at once, some of which
are cut.

Each event is posted once, the sums agree to the pico, and every transaction balances, as `weir
fsck` checks. WEIR_RATING_EXAMPLES sets the number of examples.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from metering.core.errors import DatabaseUnavailable, InvariantViolated
from metering.invoicing.month_report import Reconciliation
from metering.invoicing.months import month_report
from metering.ledger.rating import rate_all_pending, rate_batch
from metering.pricing.prices import ModelPrice
from metering.proof.fsck import fsck
from metering.proof.ledger_checks import LEDGER_CHECKS
from metering.store.db import Sessions, create_engine, create_sessions
from tests.metering.usage import Consumed, Customer, add_usage, new_customer, new_price, rates_of

EXAMPLES = int(os.environ.get("WEIR_RATING_EXAMPLES", "3"))
NOVEMBER = datetime(2026, 11, 1, tzinfo=UTC)
CUSTOMERS, PRICES = 3, 2
CHECKS = [check for check in LEDGER_CHECKS if check.name != "usage-is-rated"]


@dataclass(frozen=True, slots=True)
class Rater:
    """Rater of batches. dies_after: batches until its connection is cut, or None."""

    batch_size: int
    dies_after: int | None


@st.composite
def usages(draw: st.DrawFn) -> tuple[int, int, Consumed]:
    """Draw a customer, a price and a usage."""
    sent = draw(st.integers(0, 2_000_000))
    at = NOVEMBER + timedelta(hours=draw(st.integers(0, 29 * 24)))
    used = Consumed(sent, draw(st.integers(0, sent)), draw(st.integers(0, 200_000)), settled_at=at)
    return draw(st.integers(0, CUSTOMERS - 1)), draw(st.integers(0, PRICES - 1)), used


RATERS = st.lists(
    st.builds(Rater, st.integers(1, 15), st.none() | st.integers(0, 2)), min_size=1, max_size=4
)


@given(st.lists(usages(), min_size=1, max_size=60), RATERS)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_each_event_is_posted_once_with_concurrent_and_killed_raters(
    database_url: str, used: list[tuple[int, int, Consumed]], raters: list[Rater]
) -> None:
    asyncio.run(attack(database_url, used, raters))


async def attack(
    database_url: str, used: Sequence[tuple[int, int, Consumed]], raters: Sequence[Rater]
) -> None:
    """Run one example on a database that grows from example to example."""
    engine = create_engine(database_url, pool_size=len(raters) + 1)
    sessions = create_sessions(engine)
    customers, prices = await new_world(sessions)
    wrong = Consumed(1, cost_picos=0, settled_at=NOVEMBER)
    async with sessions.begin() as session:
        for whose, price in sorted({(whose, price) for whose, price, _ in used}):
            own = [consumed for *index, consumed in used if index == [whose, price]]
            await add_usage(session, customers[whose], prices[price], own)
        await add_usage(session, customers[0], prices[0], [wrong])

    async with asyncio.TaskGroup() as tasks:
        for rater in raters:
            tasks.create_task(rate(sessions, database_url, rater))
    with pytest.raises(InvariantViolated, match="usage events differ in cost"):
        await rate_all_pending(sessions)  # the work of cut raters

    for number, customer in enumerate(customers):
        his = [(price, consumed) for whose, price, consumed in used if whose == number]
        async with sessions() as session:
            report = await month_report(session, organization=customer.name, month="2026-11")
        token_count, left = sum(consumed.token_count for _, consumed in his), int(number == 0)
        assert report.total_picos == sum(consumed.cost(prices[price]) for price, consumed in his)
        assert report.reconciliation == Reconciliation(token_count + left, token_count, left)
    async with sessions.begin() as session:
        unrated = text("SELECT count(*) FROM unrated_usage WHERE organization_id = ANY(:ids)")
        assert (
            await session.scalar(
                unrated, {"ids": [customer.organization_id for customer in customers]}
            )
            == 1
        )
    await engine.dispose()
    found = [
        f"{verdict.check.name}: {verdict.sample}"
        for verdict in fsck(database_url, CHECKS)
        if verdict.violation_count
    ]
    assert all(each.startswith("all-usage-is-rated") for each in found), found


async def new_world(sessions: Sessions) -> tuple[list[Customer], list[ModelPrice]]:
    """Create customers and prices of this example."""
    async with sessions.begin() as session:
        customers = [await new_customer(session, f"c{uuid.uuid4().hex}") for _ in range(CUSTOMERS)]
        prices = [
            await new_price(
                session, f"m{uuid.uuid4().hex}", **rates_of(1_234_567 + number, 7, 99_999_999)
            )
            for number in range(PRICES)
        ]
    return customers, prices


async def rate(sessions: Sessions, database_url: str, rater: Rater) -> None:
    """Rate until nothing is left, or the connection is cut before a commit."""
    done = 0
    while True:
        try:
            async with sessions.begin() as session:
                found = await rate_batch(session, limit=rater.batch_size)
                if done == rater.dies_after:
                    await cut(database_url, await session.scalar(text("SELECT pg_backend_pid()")))
        except (DatabaseUnavailable, DBAPIError):
            return
        done += 1
        if not found.rated_count:
            return


async def cut(database_url: str, pid: int | None) -> None:
    """Cut a connection like the death of its process."""
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        await connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
