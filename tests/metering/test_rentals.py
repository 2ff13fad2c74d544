"""Rented replicas: seconds at the price per hour, months, prices that change, and refusals."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from metering.core.errors import AlreadyExists, InvalidValue, NotFound
from metering.export.reconciliation import conclude, our_month
from metering.invoicing.invoice_document import Issuer
from metering.invoicing.invoice_pdf import render_pdf
from metering.invoicing.rentals import (
    RentalTerms,
    ReplicaRental,
    end_rental,
    list_rentals,
    rent_replicas,
)
from metering.invoicing.resale import (
    Statement,
    find_statement,
    statement_document,
    statement_page,
    to_csv,
    to_json,
)
from metering.ledger.rating import rate_all_pending
from metering.pricing.resale_prices import ResalePrice
from metering.store.db import Sessions
from metering.tenants.tenants import find_organization
from tests.metering.closing_world import ClosingWorld
from tests.metering.queries import execute, execute_unguarded
from tests.metering.usage import Consumed, Customer

SEEDS = [int(seed) for seed in os.environ.get("WEIR_TEST_SEEDS", "1,2,3").split(",")]
BEGINNING = datetime(2023, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
CENT = 10**10


@pytest.fixture
async def world(sessions: Sessions, customer: Customer) -> ClosingWorld:
    """Customer `acme`, which rents replicas of `demo` for 4.00 an hour."""
    world = ClosingWorld(sessions, customer)
    await resale_price(world, BEGINNING, replica_hour_picos=400 * CENT)
    return world


async def resale_price(world: ClosingWorld, begins: datetime, **terms: Any) -> None:
    """Insert a version that may have begun in the past."""
    values: dict[str, Any] = {"model": "", "markup_milli": 1000, "request_picos": 0} | terms
    of = {"organization_id": world.customer.organization_id, "effective_at": begins}
    async with world.sessions.begin() as session:
        session.add(ResalePrice(**values | of))


async def rent(
    world: ClosingWorld,
    starts_at: datetime | None,
    ends_at: datetime | None,
    *,
    end_user: str = "ada",
    model: str = "demo",
    count: int = 1,
) -> ReplicaRental:
    terms = RentalTerms(end_user, model, count, starts_at, ends_at)
    async with world.sessions.begin() as session:
        owner = await find_organization(session, world.customer.name)
        return await rent_replicas(session, owner, terms, actor="test")


async def end(world: ClosingWorld, rental: int, at: datetime | None) -> ReplicaRental:
    async with world.sessions.begin() as session:
        owner = await find_organization(session, world.customer.name)
        return await end_rental(session, owner, rental, at, actor="test")


async def statement(world: ClosingWorld, month: str, end_user: str = "ada") -> Statement:
    async with world.sessions() as session:
        owner = await find_organization(session, world.customer.name)
        return await find_statement(session, owner, month, end_user)


async def differences(world: ClosingWorld, month: str) -> list[str]:
    """Reconcile a month; return the text of each difference."""
    async with world.sessions() as session:
        return [
            each.detail for each in conclude(month, await our_month(session, month)).differences
        ]


def lines(statement: Statement) -> list[tuple[str, int, int]]:
    return [
        (line.model, line.quantity, line.amount_picos)
        for line in statement.lines
        if line.item == "replica_seconds"
    ]


async def test_a_rental_is_charged_by_the_second_and_cut_at_the_borders_of_months(
    world: ClosingWorld,
) -> None:
    starts_at = datetime(2024, 2, 28, 23, 59, 58, tzinfo=UTC)
    await rent(world, starts_at, datetime(2024, 3, 1, 0, 0, 1, tzinfo=UTC), count=3)

    february, march = [await statement(world, month) for month in ("2024-02", "2024-03")]

    seconds = 3 * (2 + 86_400)  # February had 29 days
    assert lines(february) == [("demo", seconds, (seconds * 400 * CENT * 2 + 3600) // 7200)]
    assert lines(march) == [("demo", 3, (3 * 400 * CENT * 2 + 3600) // 7200)]
    assert (february.replica_second_count, february.token_count, february.cost_picos) == (
        seconds,
        0,
        0,
    )
    with pytest.raises(NotFound):
        await statement(world, "2024-04")


async def test_ending_a_rental_again_does_not_charge_more(world: ClosingWorld) -> None:
    starts_at = datetime.now(UTC).replace(microsecond=0) - 3 * HOUR
    rental = await rent(world, starts_at, starts_at + HOUR)
    running = await rent(world, starts_at, starts_at + 30 * HOUR, end_user="bob")

    assert (await end(world, rental.id, None)).ends_at == starts_at + HOUR
    assert (await end(world, rental.id, starts_at + 2 * HOUR)).ends_at == starts_at + 2 * HOUR
    ended = (await end(world, running.id, None)).ends_at
    assert ended is not None
    assert ended < starts_at + 30 * HOUR


async def test_each_second_pays_the_price_in_force_when_it_starts(world: ClosingWorld) -> None:
    day = datetime(2025, 10, 10, tzinfo=UTC)
    half = timedelta(microseconds=500_000)
    await resale_price(world, day + HOUR - half, model="demo", replica_hour_picos=1000 * CENT)
    await resale_price(world, day + 2 * HOUR, model="demo", withdrawn=True)
    await resale_price(world, day + 3 * HOUR, replica_hour_picos=1)
    await rent(world, day, day + 4 * HOUR, count=2)

    found = await statement(world, "2025-10")

    assert sorted(lines(found)) == [
        ("demo", 7200, 2),
        ("demo", 7200, 2 * 1000 * CENT),
        ("demo", 14_400, 4 * 400 * CENT),
    ]


async def test_an_open_rental_runs_until_it_is_ended(world: ClosingWorld) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    rental = await rent(world, None, None)
    other = await rent(world, now - timedelta(seconds=1), now + HOUR, end_user="bob")
    assert rental.starts_at > now
    await execute_unguarded(
        world.sessions,
        "UPDATE replica_rentals SET starts_at = starts_at - interval '3 s' WHERE ends_at IS NULL",
    )
    ended = await end(world, rental.id, None)
    assert ended.ends_at is not None
    month = f"{now:%Y-%m}"
    found = await statement(world, month)
    assert found.replica_second_count == (ended.ends_at - ended.starts_at).total_seconds()
    assert found.replica_second_count >= 2
    assert (await statement(world, month, "bob")).replica_second_count < 600, "only until now"

    cancelled = await end(world, other.id, other.starts_at)
    assert cancelled.ends_at == cancelled.starts_at
    with pytest.raises(NotFound):
        await statement(world, month, "bob")
    await rent(world, now, now + HOUR, end_user="bob")
    async with world.sessions() as session:
        owner = await find_organization(session, "acme")
        first, token = await list_rentals(session, owner, page_size=2)
        rest, last = await list_rentals(session, owner, page_size=2, page_token=token)
        of_ada, _ = await list_rentals(session, owner, end_user="ada")
    assert [each.end_user for each in (*first, *rest)] == ["bob", "bob", "ada"]
    assert (last, [each.rental.id for each in of_ada]) == ("", [rental.id])


async def test_a_closed_month_keeps_its_rentals_and_is_reconciled(world: ClosingWorld) -> None:
    price = await world.price(datetime(2025, 9, 1, tzinfo=UTC))
    starts_at = datetime(2025, 10, 31, 22, tzinfo=UTC)
    rental = await rent(world, starts_at, None, count=2)
    await world.use(price, Consumed(10, 0, 5, settled_at=starts_at))
    await rate_all_pending(world.sessions)
    await world.close("2025-10")

    found = await statement(world, "2025-10")

    assert (found.state, lines(found)) == ("closed", [("demo", 4 * 3600, 1600 * CENT)])
    assert found.total_rounded_picos == 1600 * CENT
    assert await differences(world, "2025-10") == []
    rows = list(csv.DictReader(io.StringIO(to_csv(found))))
    assert [(row["record_type"], row["item"], row["cost"]) for row in rows[:1]] == [
        ("rental", "replica_seconds", "0.00")
    ]
    assert json.loads(to_json(found))["lines"][0]["quantity"] == 14_400
    document = statement_document(found, Issuer())
    assert document.sections[0][1][0].description == "4 h of dedicated replicas"
    assert render_pdf(document).startswith(b"%PDF")

    refused = "2025-11-01 00:00:00 UTC"
    for at in (starts_at, starts_at + HOUR):
        with pytest.raises(InvalidValue, match=refused):
            await end(world, rental.id, at)
        with pytest.raises(InvalidValue, match=refused):
            await rent(world, at, None, end_user="bob")
    await end(world, rental.id, datetime(2025, 11, 1, tzinfo=UTC))
    await rent(world, datetime(2025, 11, 1, tzinfo=UTC), datetime(2025, 11, 2, tzinfo=UTC))
    await world.close("2025-11")
    with pytest.raises(InvalidValue, match="closed and never changes"):
        await end(world, rental.id, datetime(2025, 12, 1, tzinfo=UTC))
    assert await statement(world, "2025-10") == found

    await execute_unguarded(world.sessions, "UPDATE replica_rentals SET replica_count = 3")
    [difference] = await differences(world, "2025-10")
    assert "rentals of replicas, which have no cost, come to 24.00 USD" in difference


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"end_user": ""}, "end_user"),
        ({"end_user": "a\nb"}, "end_user"),
        ({"model": "="}, "model"),
        ({"model": "unpriced"}, "model"),
        ({"count": 0}, "replica_count"),
        ({"count": 1001}, "replica_count"),
        ({"starts_at": datetime(2025, 10, 1, 0, 0, 0, 1, tzinfo=UTC)}, "start_time"),
        ({"starts_at": datetime(1999, 1, 1, tzinfo=UTC)}, "start_time"),
        ({"starts_at": datetime(2022, 1, 1, tzinfo=UTC)}, "model"),  # before the price
        ({"ends_at": datetime(2025, 10, 1, tzinfo=UTC)}, "end_time"),
        ({"ends_at": datetime(2025, 10, 2, 0, 0, 0, 1, tzinfo=UTC)}, "end_time"),
    ],
    ids=str,
)
async def test_a_bad_rental_is_refused_and_leaves_nothing(
    world: ClosingWorld, values: dict[str, Any], field: str
) -> None:
    await resale_price(world, BEGINNING, model="unpriced", markup_milli=2000)
    usual = {"starts_at": datetime(2025, 10, 1, tzinfo=UTC), "ends_at": None}

    with pytest.raises(InvalidValue) as refused:
        await rent(world, **usual | values)

    assert refused.value.field == field
    async with world.sessions() as session:
        owner = await find_organization(session, "acme")
        assert (await list_rentals(session, owner))[0] == []


async def test_of_rentals_that_overlap_only_one_is_recorded(world: ClosingWorld) -> None:
    day = datetime(2025, 10, 10, tzinfo=UTC)
    answers = await asyncio.gather(
        *(rent(world, day + n * HOUR, day + (n + 5) * HOUR) for n in range(5)),
        return_exceptions=True,
    )
    assert [type(each) for each in answers].count(AlreadyExists) == 4
    [first] = [each for each in answers if isinstance(each, ReplicaRental)]
    assert first.ends_at is not None

    after = await rent(world, first.ends_at, None)
    before = await rent(world, first.starts_at - HOUR, first.starts_at)
    await rent(world, first.starts_at, None, model="other")
    with pytest.raises(AlreadyExists, match="open: end it first"):
        await rent(world, first.ends_at + HOUR, None)
    with pytest.raises(AlreadyExists):
        await end(world, before.id, first.ends_at)
    assert after.ends_at is None
    with pytest.raises(NotFound):
        await end(world, 10**9, None)


@pytest.mark.parametrize("seed", SEEDS)
async def test_statements_of_random_rentals_have_each_second_once(
    world: ClosingWorld, seed: int
) -> None:
    """An independent count, second by second where prices change, over months that close."""
    chance, begin = random.Random(seed), datetime(2025, 10, 1, tzinfo=UTC)
    prices = [(BEGINNING, 400 * CENT)]
    for _ in range(3):
        at = begin + timedelta(seconds=chance.randrange(90 * 86_400))
        prices.append((at, chance.randrange(10**13)))
        await resale_price(world, at, replica_hour_picos=prices[-1][1])
    prices.sort()
    recorded: list[ReplicaRental] = []
    for _ in range(12):
        starts_at = begin + timedelta(seconds=chance.randrange(80 * 86_400))
        ends_at = starts_at + timedelta(seconds=chance.randrange(1, 20 * 86_400))
        user, count = chance.choice("ab"), chance.randrange(1, 5)
        try:
            recorded.append(await rent(world, starts_at, ends_at, end_user=user, count=count))
        except AlreadyExists:
            continue
    borders = [at for at, _ in prices] + [datetime(9999, 1, 1, tzinfo=UTC)]

    for number, month in enumerate(("2025-10", "2025-11", "2025-12")):
        from_month = datetime(2025, 10 + number, 1, tzinfo=UTC)
        until = (from_month + timedelta(days=32)).replace(day=1)
        if number < 2:
            await world.close(month)
        async with world.sessions() as session:
            owner = await find_organization(session, "acme")
            found, _ = await statement_page(session, owner, month)
        expected: dict[tuple[str, int], int] = {}
        for rental in recorded:
            for index, (since, picos) in enumerate(prices):
                first = max(rental.starts_at, from_month, since)
                last = min(rental.ends_at or until, until, borders[index + 1])
                if first < last:
                    key = str(rental.end_user_id), picos
                    seconds = round((last - first).total_seconds()) * rental.replica_count
                    expected[key] = expected.get(key, 0) + seconds
        amounts = [
            (user, seconds, (seconds * picos * 2 + 3600) // 7200)
            for (user, picos), seconds in expected.items()
        ]
        assert sorted(amounts) == sorted(
            (str(each.end_user.id), line.quantity, line.amount_picos)
            for each in found
            for line in each.lines
        )
        assert await differences(world, month) == []


async def test_the_table_refuses_other_changes_of_a_rental(world: ClosingWorld) -> None:
    await rent(world, datetime(2025, 10, 1, tzinfo=UTC), None)

    for change in ("SET replica_count = 2", "SET starts_at = starts_at + interval '1 day'"):
        with pytest.raises(Exception, match="only its end may change"):
            await execute(world.sessions, f"UPDATE replica_rentals {change}")
    with pytest.raises(Exception, match="replica_rentals"):
        await execute(world.sessions, "DELETE FROM replica_rentals")
