"""Rating: every event priced and posted once, by concurrent workers."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from metering.core.errors import InvariantViolated
from metering.invoicing.month_report import Reconciliation
from metering.invoicing.months import month_report
from metering.ledger import rating
from metering.ledger.ledger import posting_lock_of, take_posting_lock
from metering.ledger.rating import rate_all_pending, rate_batch
from metering.pricing.prices import PRICE_MAX_PICOS
from metering.store.db import Sessions, create_engine, create_sessions
from tests.metering.queries import fetch_row, fetch_rows
from tests.metering.usage import (
    Acme,
    Consumed,
    Customer,
    add_usage,
    new_customer,
    new_price,
    rate_pending,
    rates_of,
)

EVENTS = text(
    "SELECT id, rated_at IS NOT NULL AS rated, ledger_transaction_id FROM usage_events ORDER BY id"
)
# Per transaction: the sums of its events and of its entries.
BALANCES = text("""
SELECT t.id, t.organization_id, t.billing_month, t.effective_at, u.organization_ids, u.days, u.used,
       u.cost_picos, e.posted, e.revenue, e.owed
FROM ledger_transactions t
LEFT JOIN LATERAL (
    SELECT array_agg(DISTINCT organization_id) AS organization_ids,
           array_agg(DISTINCT date_trunc('day', settled_at, 'UTC')) AS days,
           sum(input_token_count + billed_token_count) AS used, sum(cost_picos) AS cost_picos
    FROM usage_events WHERE ledger_transaction_id = t.id) u ON true
LEFT JOIN LATERAL (
    SELECT coalesce(sum(token_count), 0) AS posted,
           -coalesce(sum(amount_picos) FILTER (WHERE token_kind IS NOT NULL), 0) AS revenue,
           sum(amount_picos) FILTER (WHERE token_kind IS NULL) AS owed
    FROM ledger_entries WHERE transaction_id = t.id) e ON true
ORDER BY t.id
""")


async def assert_posted_once(sessions: Sessions, event_count: int) -> None:
    """Check that each event is in one transaction, of its organization and day, with equal sums."""
    async with sessions() as session:
        events = (await session.execute(EVENTS)).all()
        database = (await session.execute(BALANCES)).all()
    assert len(events) == event_count
    assert all(event.rated for event in events)
    assert {event.ledger_transaction_id for event in events} == {row.id for row in database}
    for row in database:
        assert (row.organization_ids, row.days) == ([row.organization_id], [row.effective_at])
        assert (row.posted, row.revenue, row.owed) == (row.used, row.cost_picos, row.cost_picos)


async def test_events_are_posted_by_the_price_of_their_admission(acme: Acme) -> None:
    async with acme.sessions.begin() as session:
        dearer = await new_price(session, **rates_of(1_000_000, 1, 0))
    await acme.use(Consumed(1025, 200, 150), Consumed(0, 0, 0), Consumed(7, 7, 0))
    await acme.use(Consumed(1025, 200, 150), price=dearer)

    assert await rate_all_pending(acme.sessions) == 4
    assert await rate_all_pending(acme.sessions) == 0

    await assert_posted_once(acme.sessions, 4)


async def test_free_tokens_are_in_the_ledger_too(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        free = await new_price(session, "free", **rates_of(0, 0, 0))
    async with sessions.begin() as session:
        await add_usage(session, customer, free, [Consumed(10, 5, 3)])
        await rate_pending(session)
    counted = await fetch_row(
        sessions, "SELECT sum(token_count), sum(abs(amount_picos)) FROM ledger_entries"
    )

    assert tuple(counted) == (13, 0)


async def test_rating_takes_no_more_than_its_limit_and_the_oldest_first(acme: Acme) -> None:
    async with acme.sessions.begin() as session:
        ids = await add_usage(session, acme.customer, acme.price, [Consumed(1)] * 10)
        assert await rate_pending(session, 4) == 4
        rated = await session.execute(
            text("SELECT id FROM usage_events WHERE rated_at IS NOT NULL ORDER BY id")
        )
        assert list(rated.scalars()) == ids[:4]


async def test_a_misstated_event_stops_none(acme: Acme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rating, "BATCH_SIZE", 2)
    async with acme.sessions.begin() as session:
        wrong = await add_usage(session, acme.customer, acme.price, [Consumed(1, cost_picos=1)] * 4)
        right = await add_usage(session, acme.customer, acme.price, [Consumed(1)] * 3)
        wrong += await add_usage(session, acme.customer, acme.price, [Consumed(0, cost_picos=5)])

    for _ in range(2):
        with pytest.raises(InvariantViolated) as error:
            await rate_all_pending(acme.sessions)
        assert all(str(event_id) in str(error.value) for event_id in wrong)

    async with acme.sessions() as session:
        events = (await session.execute(EVENTS)).all()
        posted = sum(row.posted for row in await session.execute(BALANCES))
    assert [event.id for event in events if event.rated] == right
    assert [event.id for event in events if not event.rated] == wrong
    assert posted == len(right)


async def test_a_cost_beyond_64_bits_is_misstated(sessions: Sessions, customer: Customer) -> None:
    async with sessions.begin() as session:
        dear = await new_price(
            session, "dear", **rates_of(PRICE_MAX_PICOS, PRICE_MAX_PICOS, PRICE_MAX_PICOS)
        )
    async with sessions.begin() as session:
        wrong, _ = await add_usage(
            session, customer, dear, [Consumed(2**40, 0, 2**40, cost_picos=7), Consumed(900_000)]
        )

    async with sessions.begin() as session:
        batch = await rate_batch(session, limit=10)

    assert (batch.rated_count, batch.misstated) == (1, (wrong,))


async def test_raters_at_the_same_time_share_the_work(acme: Acme) -> None:
    async with acme.sessions.begin() as session:
        other = await new_customer(session, "bolt")
        await add_usage(session, acme.customer, acme.price, [Consumed(3, 1, 2)] * 300)
        await add_usage(session, other, acme.price, [Consumed(5, 0, 1)] * 300)

    async def rate() -> int:
        total = 0
        while True:
            async with acme.sessions.begin() as session:
                count = await rate_pending(session, 50)
            total += count
            if not count:
                return total

    counts = await asyncio.gather(*(rate() for _ in range(4)))

    assert sum(counts) == 600
    await assert_posted_once(acme.sessions, 600)


async def test_a_batch_that_is_rolled_back_is_rated_later(acme: Acme) -> None:
    await acme.use(*([Consumed(3, 1, 2)] * 20))
    async with acme.sessions() as session:
        assert (await rate_batch(session, limit=100)).rated_count == 20
        assert await rate_all_pending(acme.sessions) == 0  # locked by the one that is about to fail
        await session.rollback()

    assert await rate_all_pending(acme.sessions) == 20
    await assert_posted_once(acme.sessions, 20)


async def test_a_transaction_of_a_customer_and_day_has_entries_by_price_kind(acme: Acme) -> None:
    async with acme.sessions.begin() as session:
        bolt, other_price = await new_customer(session, "bolt"), await new_price(session, "other")
        november = datetime(2026, 11, 1, tzinfo=UTC)
        days = (november - timedelta(microseconds=1), november, november + timedelta(hours=23))
        for day in days:
            await add_usage(
                session, acme.customer, acme.price, [Consumed(10, 4, 2, settled_at=day)] * 3
            )
            await add_usage(session, acme.customer, other_price, [Consumed(1, settled_at=day)])
        await add_usage(session, bolt, acme.price, [Consumed(settled_at=days[1])])

    assert await rate_all_pending(acme.sessions) == 13

    await assert_posted_once(acme.sessions, 13)
    transactions = await fetch_rows(
        acme.sessions,
        """SELECT o.name, t.kind, t.billing_month::text, t.effective_at::date::text,
                           (SELECT array_agg(p.model || ' ' || e.token_kind || ' ' || e.token_count)
                            FROM ledger_entries e JOIN price_versions p ON p.id = e.price_version_id
                            WHERE e.transaction_id = t.id) AS entries
                    FROM ledger_transactions t JOIN organizations o ON o.id = t.organization_id
                    ORDER BY 1, 4""",
    )
    reported = [
        (name, kind, month, day, sorted(entries or []))
        for name, kind, month, day, entries in transactions
    ]
    assert reported == [
        (
            "acme",
            "usage",
            "2026-10-01",
            "2026-10-31",
            ["demo cached_input 12", "demo input 18", "demo output 6", "other input 1"],
        ),
        (
            "acme",
            "usage",
            "2026-11-01",
            "2026-11-01",
            ["demo cached_input 24", "demo input 36", "demo output 12", "other input 2"],
        ),
        ("bolt", "usage", "2026-11-01", "2026-11-01", []),
    ]


async def test_late_usage_lands_in_the_month_after_the_last_that_is_closed(acme: Acme) -> None:
    async with acme.sessions.begin() as session:
        await session.execute(
            text("""INSERT INTO billing_months (organization_id, month, state, closed_at, closed_by)
                    SELECT :id, month, 'closed', now(), 'test'
                    FROM unnest('{2026-09-01,2026-10-01}'::date[]) AS month"""),
            {"id": acme.organization_id},
        )
        await session.execute(
            text(
                "INSERT INTO billing_months (organization_id, month, state) VALUES (:id,"
                " '2026-11-01', 'closing')"
            ),
            {"id": acme.organization_id},
        )
        for month in (8, 9, 10, 11, 12):
            await add_usage(
                session,
                acme.customer,
                acme.price,
                [Consumed(month, settled_at=datetime(2026, month, 5, 5, tzinfo=UTC))],
            )

    await rate_all_pending(acme.sessions)

    await assert_posted_once(acme.sessions, 5)
    landed = await fetch_rows(
        acme.sessions, "SELECT effective_at, billing_month FROM ledger_transactions ORDER BY 1"
    )
    assert [(at.month, month.month) for at, month in landed] == [
        (8, 11),
        (9, 11),
        (10, 11),
        (11, 11),
        (12, 12),
    ]


async def test_only_a_customer_whose_month_is_being_closed_waits(acme: Acme) -> None:
    async with acme.sessions.begin() as session:
        bolt = acme.customer
        while posting_lock_of(bolt.organization_id) == posting_lock_of(acme.organization_id):
            bolt = await new_customer(session, f"c{uuid.uuid4().hex}")
        await add_usage(session, acme.customer, acme.price, [Consumed(1)] * 3)
        await add_usage(session, bolt, acme.price, [Consumed(1)] * 4)

    async with acme.sessions.begin() as closing:
        await take_posting_lock(closing, acme.organization_id)
        assert await rate_all_pending(acme.sessions) == 4
    assert await rate_all_pending(acme.sessions) == 3

    await assert_posted_once(acme.sessions, 7)


@st.composite
def usages(draw: st.DrawFn) -> Consumed:
    input_token_count = draw(st.integers(min_value=0, max_value=2_000_000))
    cached = draw(st.integers(min_value=0, max_value=input_token_count))
    return Consumed(input_token_count, cached, draw(st.integers(min_value=0, max_value=200_000)))


@given(st.lists(usages(), max_size=20))
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_all_usage_is_in_the_ledger_once(database_url: str, batch: list[Consumed]) -> None:
    """Property of the real database, which grows from example to example."""
    asyncio.run(rate_and_check(database_url, batch))


async def rate_and_check(database_url: str, batch: list[Consumed]) -> None:
    engine = create_engine(database_url)
    sessions = create_sessions(engine)
    try:
        async with sessions.begin() as session:
            customer = await new_customer(session, f"c{uuid.uuid4().hex}")
            price = await new_price(
                session, f"m{uuid.uuid4().hex}", **rates_of(1_234_567, 7, 99_999_999)
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
