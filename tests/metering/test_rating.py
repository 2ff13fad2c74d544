"""Rating: every event priced and posted once, by however many at once, and none lost for another's fault."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from metering.billing import rating
from metering.billing.ledger import AccountKey, UsagePosting, check_balanced, usage_legs
from metering.billing.month_reading import month_report
from metering.billing.prices import ModelPrice, set_price
from metering.billing.pricing import TokenPrices
from metering.billing.rating import rate_all_pending, rate_batch, rate_pending
from metering.billing.reports import Reconciliation
from metering.errors import InvariantViolated
from metering.models import AccountKind
from metering.store.db import Sessions, create_engine, create_sessions
from tests.metering.books import Consumed, Customer, add_usage, new_customer

# Per event: tokens and cost as recorded, tokens and revenue as posted, what the customer owes, and how often it was posted.
BOOKS = text("""
SELECT u.id, u.input_token_count + u.billed_token_count AS used, u.cost_picos, u.rated_at IS NOT NULL AS rated,
       coalesce(sum(e.token_count), 0) AS posted,
       -coalesce(sum(e.amount_picos) FILTER (WHERE e.token_kind IS NOT NULL), 0) AS revenue,
       coalesce(sum(e.amount_picos) FILTER (WHERE e.token_kind IS NULL), 0) AS owed, count(DISTINCT t.id) AS transaction_count
FROM usage_events u LEFT JOIN ledger_transactions t ON t.usage_event_id = u.id LEFT JOIN ledger_entries e ON e.transaction_id = t.id
GROUP BY u.id ORDER BY u.id
""")


async def assert_posted_once(sessions: Sessions, event_count: int) -> None:
    """Every event is rated, and its ledger legs add up to it."""
    async with sessions() as session:
        rows = (await session.execute(BOOKS)).all()
    assert len(rows) == event_count
    for row in rows:
        assert row.rated
        assert (row.posted, row.revenue, row.owed) == (row.used, row.cost_picos, row.cost_picos)
        assert row.transaction_count == (1 if row.used else 0)


async def test_events_are_posted_by_the_price_of_their_admission(sessions: Sessions, customer: Customer, price: ModelPrice) -> None:
    async with sessions.begin() as session:
        dearer = await set_price(
            session,
            model="demo",
            input_picos_per_token=1_000_000,
            cached_input_picos_per_token=1,
            output_picos_per_token=0,
            actor="test",
        )
    async with sessions.begin() as session:
        await add_usage(session, customer, price, [Consumed(1025, 200, 150), Consumed(0, 0, 0), Consumed(7, 7, 0)])
        await add_usage(session, customer, dearer, [Consumed(1025, 200, 150)])

    assert await rate_all_pending(sessions) == 4
    assert await rate_all_pending(sessions) == 0

    await assert_posted_once(sessions, 4)


async def test_tokens_that_cost_nothing_are_in_the_ledger_too(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        free = await set_price(
            session, model="free", input_picos_per_token=0, cached_input_picos_per_token=0, output_picos_per_token=0, actor="test"
        )
    async with sessions.begin() as session:
        await add_usage(session, customer, free, [Consumed(10, 5, 3)])
        await rate_pending(session)
    async with sessions() as session:
        counted = (await session.execute(text("SELECT sum(token_count), sum(abs(amount_picos)) FROM ledger_entries"))).one()

    assert tuple(counted) == (13, 0)


async def test_rating_takes_no_more_than_its_limit_and_the_oldest_first(
    sessions: Sessions, customer: Customer, price: ModelPrice
) -> None:
    async with sessions.begin() as session:
        ids = await add_usage(session, customer, price, [Consumed(1)] * 10)
        assert await rate_pending(session, 4) == 4
        rated = await session.execute(text("SELECT id FROM usage_events WHERE rated_at IS NOT NULL ORDER BY id"))
        assert list(rated.scalars()) == ids[:4]


async def test_a_misstated_event_is_named_and_holds_up_no_other(
    sessions: Sessions, customer: Customer, price: ModelPrice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rating, "BATCH_SIZE", 2)
    async with sessions.begin() as session:
        wrong = await add_usage(session, customer, price, [Consumed(1, cost_picos=1)] * 4)
        right = await add_usage(session, customer, price, [Consumed(1)] * 3)
        wrong += await add_usage(session, customer, price, [Consumed(0, cost_picos=5)])

    for _ in range(2):
        with pytest.raises(InvariantViolated) as error:
            await rate_all_pending(sessions)
        assert all(str(event_id) in str(error.value) for event_id in wrong)

    async with sessions() as session:
        rows = (await session.execute(BOOKS)).all()
    assert [row.id for row in rows if row.rated] == right
    assert [row.id for row in rows if not row.rated] == wrong
    assert all(row.posted == 0 for row in rows if not row.rated)


async def test_raters_at_the_same_time_share_the_work(sessions: Sessions, customer: Customer, price: ModelPrice) -> None:
    async with sessions.begin() as session:
        other = await new_customer(session, "bolt")
        await add_usage(session, customer, price, [Consumed(3, 1, 2)] * 300)
        await add_usage(session, other, price, [Consumed(5, 0, 1)] * 300)

    async def rate() -> int:
        total = 0
        while True:
            async with sessions.begin() as session:
                count = await rate_pending(session, 50)
            total += count
            if not count:
                return total

    counts = await asyncio.gather(*(rate() for _ in range(4)))

    assert sum(counts) == 600
    await assert_posted_once(sessions, 600)


async def test_a_batch_that_is_rolled_back_is_rated_later(sessions: Sessions, customer: Customer, price: ModelPrice) -> None:
    async with sessions.begin() as session:
        await add_usage(session, customer, price, [Consumed(3, 1, 2)] * 20)
    async with sessions() as session:
        assert (await rate_batch(session, limit=100)).rated_count == 20
        assert await rate_all_pending(sessions) == 0  # locked by the one that is about to fail
        await session.rollback()

    assert await rate_all_pending(sessions) == 20
    await assert_posted_once(sessions, 20)


RATES = st.integers(min_value=0, max_value=10**15)


@st.composite
def usages(draw: st.DrawFn) -> Consumed:
    input_token_count = draw(st.integers(min_value=0, max_value=2_000_000))
    cached = draw(st.integers(min_value=0, max_value=input_token_count))
    return Consumed(input_token_count, cached, draw(st.integers(min_value=0, max_value=200_000)))


@given(usages(), RATES, RATES, RATES)
def test_no_pico_and_no_token_is_lost_between_usage_and_legs(usage: Consumed, fresh: int, cached: int, output: int) -> None:
    prices = TokenPrices(1, "USD", fresh, cached, output)
    counts = (usage.input_token_count, usage.cached_input_token_count, usage.output_token_count)
    owner = uuid.uuid4()

    legs = usage_legs(owner, "USD", 1, tuple(prices.lines(*counts)))

    check_balanced(UsagePosting(1, owner, usage.settled_at, legs))
    assert legs[0].account == AccountKey(owner, AccountKind.RECEIVABLE, "USD")
    assert legs[0].amount_picos == prices.cost_picos(*counts) == -sum(leg.amount_picos for leg in legs[1:])
    assert sum(leg.token_count or 0 for leg in legs) == usage.token_count


@given(st.lists(usages(), max_size=20))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_was_used_is_in_the_books_once(database_url: str, batch: list[Consumed]) -> None:
    """The same law through the real database, on one that fills up from example to example."""
    asyncio.run(rate_and_check(database_url, batch))


async def rate_and_check(database_url: str, batch: list[Consumed]) -> None:
    engine = create_engine(database_url)
    sessions = create_sessions(engine)
    try:
        async with sessions.begin() as session:
            customer = await new_customer(session, f"c{uuid.uuid4().hex}")
            price = await set_price(
                session,
                model=f"m{uuid.uuid4().hex}",
                input_picos_per_token=1_234_567,
                cached_input_picos_per_token=7,
                output_picos_per_token=99_999_999,
                actor="test",
            )
            if batch:
                await add_usage(session, customer, price, batch)
        assert await rate_all_pending(sessions) == len(batch)
        async with sessions() as session:
            report = await month_report(session, organization=customer.name, month="2026-11")
    finally:
        await engine.dispose()
    assert report.total_picos == sum(usage.cost(price) for usage in batch)
    assert report.reconciliation == Reconciliation(
        sum(usage.token_count for usage in batch), sum(usage.token_count for usage in batch), 0
    )
