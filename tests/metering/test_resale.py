"""Resale: price lists of customers, statements of end users, and their sum beside the invoice."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert

from metering.core.errors import AlreadyExists, InvalidValue, NotFound
from metering.core.models import UsageSubject
from metering.core.pages import page_token
from metering.export.reconciliation import Stage, conclude, our_month
from metering.invoicing.invoice_document import Issuer
from metering.invoicing.invoice_pdf import render_pdf
from metering.invoicing.resale import (
    Statement,
    find_statement,
    statement_document,
    statement_page,
    to_csv,
    to_json,
)
from metering.ledger.rating import rate_all_pending
from metering.pricing.resale_prices import (
    ResalePrice,
    ResaleTerms,
    list_resale_prices,
    set_resale_price,
)
from metering.store.db import Sessions
from metering.tenants.tenants import find_organization
from tests.metering.closing_world import ClosingWorld
from tests.metering.queries import execute, execute_unguarded, fetch_value
from tests.metering.usage import Consumed, Customer

BEGINNING = datetime(2025, 9, 1, tzinfo=UTC)
OCTOBER = datetime(2025, 10, 10, 12, tzinfo=UTC)


@pytest.fixture
async def world(sessions: Sessions, customer: Customer) -> ClosingWorld:
    """Customer `acme` in December 2025."""
    return ClosingWorld(sessions, customer)


async def end_users(world: ClosingWorld, *names: str) -> list[uuid.UUID]:
    """Create end users, as their first requests do; return their ids."""
    rows = [
        {"organization_id": world.customer.organization_id, "kind": "end_user", "name": name}
        for name in names
    ]
    statement = insert(UsageSubject).returning(UsageSubject.id, sort_by_parameter_order=True)
    async with world.sessions.begin() as session:
        return list(await session.scalars(statement, rows))


async def resale_price(world: ClosingWorld, begins: datetime, **terms: Any) -> int:
    """Insert a version that began in the past; return its number."""
    values: dict[str, Any] = {"model": "", "markup_milli": 1000, "request_picos": 0} | terms
    of = {"organization_id": world.customer.organization_id, "effective_at": begins}
    async with world.sessions.begin() as session:
        statement = insert(ResalePrice).values(values | of).returning(ResalePrice.id)
        return int((await session.scalars(statement)).one())


async def statements(world: ClosingWorld, month: str, page_size: int = 1000) -> list[Statement]:
    """Read all statements of a month, page by page."""
    found: list[Statement] = []
    token = ""
    async with world.sessions() as session:
        owner = await find_organization(session, world.customer.name)
        while True:
            page, token = await statement_page(
                session, owner, month, page_size=page_size, page_token=token
            )
            found += page
            if not token:
                return found


async def statement(world: ClosingWorld, month: str, end_user: str) -> Statement:
    async with world.sessions() as session:
        owner = await find_organization(session, world.customer.name)
        return await find_statement(session, owner, month, end_user)


async def differences(world: ClosingWorld, month: str) -> list[tuple[Stage, int]]:
    """Reconcile a month; return the stage and the amount of each difference."""
    async with world.sessions() as session:
        found = conclude(month, await our_month(session, month))
    return [(each.stage, each.amount_picos) for each in found.differences]


def amounts(statement: Statement) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Return quantity, cost and amount of each line by model and item."""
    return {
        (line.model, line.item): (line.quantity, line.cost_picos, line.amount_picos)
        for line in statement.lines
    }


async def test_a_statement_has_the_cost_and_the_resale_amount_of_each_kind_of_token(
    world: ClosingWorld,
) -> None:
    price = await world.price(BEGINNING)
    other = await world.price(BEGINNING, model="large", input_picos=1_001, output_picos=7)
    ada, _ = await end_users(world, "ada", "idle")
    await resale_price(world, BEGINNING, markup_milli=1_250)
    await resale_price(
        world, BEGINNING, model="large", output_picos_per_token=20, request_picos=5_000,
        markup_milli=1_500,
    )  # fmt: skip
    await world.use(
        price,
        Consumed(1_000, 400, 50, settled_at=OCTOBER, end_user_id=ada, reasoning_token_count=20),
        Consumed(7, 0, 1, settled_at=OCTOBER),
    )
    await world.use(
        other,
        Consumed(3, 0, 4, settled_at=OCTOBER, end_user_id=ada, reasoning_token_count=1),
        Consumed(0, 0, 1, settled_at=OCTOBER, end_user_id=ada),
    )
    await rate_all_pending(world.sessions)

    nobody, of_ada = await statements(world, "2025-10")

    assert of_ada.end_user.name == "ada"
    assert amounts(of_ada) == {
        ("demo", "requests"): (1, 0, 0),
        ("demo", "input"): (600, 600 * 150_000, 600 * 187_500),
        ("demo", "cached_input"): (400, 400 * 15_000, 400 * 18_750),
        ("demo", "output"): (30, 30 * 600_000, 30 * 750_000),
        ("demo", "reasoning"): (20, 20 * 600_000, 20 * 750_000),
        ("large", "requests"): (2, 0, 10_000),
        ("large", "input"): (3, 3_003, 4_505),  # 4504.5 picos: half up
        ("large", "output"): (4, 28, 80),
        ("large", "reasoning"): (1, 7, 20),
    }
    assert nobody.end_user.shown == "usage without an end user"
    assert amounts(nobody)["demo", "input"] == (7, 7 * 150_000, 7 * 187_500)
    assert await differences(world, "2025-10") == []


async def test_a_request_pays_the_resale_price_in_force_when_it_starts(
    world: ClosingWorld,
) -> None:
    price = await world.price(BEGINNING)
    [ada] = await end_users(world, "ada")
    instant = timedelta(microseconds=1)
    await resale_price(world, OCTOBER, markup_milli=2_000)
    own = await resale_price(world, OCTOBER + timedelta(days=1), model="demo", markup_milli=3_000)
    await resale_price(world, OCTOBER + timedelta(days=2), model="demo", withdrawn=True)
    moments = {  # thousandths of the cost
        OCTOBER - instant: 1_000,
        OCTOBER: 2_000,
        OCTOBER + timedelta(days=1) - instant: 2_000,
        OCTOBER + timedelta(days=1): 3_000,
        OCTOBER + timedelta(days=2): 2_000,
    }
    for at in moments:
        await world.use(price, Consumed(10, 0, 0, settled_at=at, end_user_id=ada))
    await rate_all_pending(world.sessions)

    found = await statement(world, "2025-10", "ada")

    assert found.amount_picos == sum(10 * 150_000 * each // 1000 for each in moments.values())
    assert {line.resale_price_version for line in found.lines} >= {0, own}


async def test_a_closed_statement_keeps_its_bytes_and_is_shown_by_id_once_erased(
    world: ClosingWorld,
) -> None:
    price = await world.price(BEGINNING)
    [ada] = await end_users(world, "ada")
    await resale_price(world, BEGINNING, markup_milli=1_333)
    await world.use(
        price,
        Consumed(12_345, 0, 678, settled_at=OCTOBER, end_user_id=ada),
        Consumed(5, 0, 5, settled_at=OCTOBER),
    )
    await world.close("2025-10")
    before = await statement(world, "2025-10", "ada")
    assert before.state == "closed"

    async with world.sessions.begin() as session:
        owner = await find_organization(session, "acme")
        await set_resale_price(session, owner, ResaleTerms(markup_milli=9_000), actor="test")
    await execute(world.sessions, "UPDATE organizations SET name = 'renamed'")
    await world.use(price, Consumed(1, 0, 1, settled_at=OCTOBER, end_user_id=ada))
    await rate_all_pending(world.sessions)
    async with world.sessions() as session:
        owner = await find_organization(session, "renamed")
        again = await find_statement(session, owner, "2025-10", "ada")
        late = await find_statement(session, owner, "2025-11", "ada")

    assert (to_json(again), to_csv(again)) == (to_json(before), to_csv(before))
    pdf = render_pdf(statement_document(before, Issuer()))
    assert render_pdf(statement_document(again, Issuer())) == pdf
    formula = replace(before, end_user=replace(before.end_user, name="=1+1"))
    assert ",'=1+1," in to_csv(formula), "a spreadsheet would compute the name of an end user"
    assert [line.late_month for line in late.lines] == ["2025-10"] * 3

    await execute(
        world.sessions,
        "UPDATE usage_subjects SET name = NULL, erased_at = now(), archived_at = now()",
    )
    async with world.sessions() as session:
        erased = await find_statement(session, owner, "2025-10", str(ada))
        with pytest.raises(NotFound):
            await find_statement(session, owner, "2025-10", "ada")
    assert erased.end_user.shown == str(ada)
    assert (erased.lines, erased.total_rounded_picos) == (before.lines, before.total_rounded_picos)
    assert "ada" not in to_json(erased)


async def test_the_remainder_of_rounding_goes_to_the_next_statement_of_the_end_user(
    world: ClosingWorld,
) -> None:
    price = await world.price(BEGINNING)  # 15 cents per million input tokens
    ada, bob = await end_users(world, "ada", "bob")
    for number in (9, 10, 11):
        at = datetime(2025, number, 5, tzinfo=UTC)
        await world.use(price, Consumed(30_000, settled_at=at, end_user_id=ada))
    await world.use(price, Consumed(30_000, settled_at=OCTOBER, end_user_id=bob))
    totals: dict[str, list[int]] = {"ada": [], "bob": []}
    for month in ("2025-09", "2025-10", "2025-11"):
        await world.close(month)
        for each in await statements(world, month):
            totals[each.end_user.name].append(each.total_rounded_picos)
            stored = await fetch_value(
                world.sessions,
                "SELECT total_rounded_picos FROM resale_statements"
                f" WHERE end_user_id = '{each.end_user.id}' AND month = '{month}-01'",
            )
            assert stored == each.total_rounded_picos

    cent = 10**10
    assert totals == {"ada": [0, cent, 0], "bob": [0]}  # 0.45 cents a month: 0.45, 0.9, 0.35


@pytest.mark.parametrize("page_size", [1, 2, 7])
async def test_pages_have_each_statement_once_by_name_with_erased_ones_last(
    world: ClosingWorld, page_size: int
) -> None:
    price = await world.price(BEGINNING)
    names = ["zoe", "ada", "élise", "bob", "idle"]
    ids = dict(zip(names, await end_users(world, *names), strict=True))
    events = [
        Consumed(5, settled_at=OCTOBER, end_user_id=each)
        for name, each in ids.items()
        if name != "idle"
    ]
    await world.use(price, *events, Consumed(1, settled_at=OCTOBER))
    await execute(
        world.sessions,
        "UPDATE usage_subjects SET name = NULL, erased_at = now(), archived_at = now()"
        " WHERE name IN ('ada', 'bob')",
    )
    await rate_all_pending(world.sessions)

    opened = [each.end_user.shown for each in await statements(world, "2025-10", page_size)]
    await world.close("2025-10")
    closed = [each.end_user.shown for each in await statements(world, "2025-10", page_size)]

    erased = sorted(str(ids[name]) for name in ("ada", "bob"))
    assert opened == closed
    assert opened[0] == "usage without an end user"
    assert sorted(opened[1:3]) == sorted(["zoe", "élise"])
    assert opened[3:] == erased


FAULTS = [
    ("UPDATE resale_statement_lines SET cost_picos = cost_picos - 3 WHERE item = 'output'", 2),
    ("DELETE FROM resale_statement_lines WHERE item = 'input'", 2),
    ("UPDATE resale_statements SET amount_picos = amount_picos + 1", 1),
    ("UPDATE resale_statement_lines SET amount_picos = amount_picos + 1 WHERE item = 'input'", 1),
    (
        "DELETE FROM resale_statement_lines; DELETE FROM resale_statements"
        " WHERE end_user_id IS NOT NULL",
        2,
    ),
    ("UPDATE ledger_entries SET amount_picos = amount_picos - 1 WHERE token_kind = 'output'", 1),
]


@pytest.mark.parametrize(("fault", "count"), FAULTS)
async def test_reconciliation_finds_statements_that_do_not_add_up(
    world: ClosingWorld, fault: str, count: int
) -> None:
    price = await world.price(BEGINNING)
    [ada] = await end_users(world, "ada")
    await world.use(
        price,
        Consumed(10, 0, 7, settled_at=OCTOBER, end_user_id=ada),
        Consumed(11, 0, 5, settled_at=OCTOBER),
    )
    await world.close("2025-10")
    assert await differences(world, "2025-10") == []

    await execute_unguarded(world.sessions, *fault.split("; "))

    found = await differences(world, "2025-10")
    assert [stage for stage, _ in found] == [Stage.STATEMENTS] * count
    assert all(picos for _, picos in found)


async def test_frozen_statements_cannot_be_changed(world: ClosingWorld) -> None:
    price = await world.price(BEGINNING)
    [ada] = await end_users(world, "ada")
    await resale_price(world, BEGINNING)
    await world.use(price, Consumed(10, settled_at=OCTOBER, end_user_id=ada))
    await world.close("2025-10")

    for table in ("resale_prices", "resale_statements", "resale_statement_lines"):
        for change in (f"DELETE FROM {table}", f"TRUNCATE {table} CASCADE"):
            with pytest.raises(Exception, match=r"append-only|immutable|refuse|never"):
                await execute(world.sessions, change)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "markup_milli"),
    ({"markup_milli": -1}, "markup_milli"),
    ({"markup_milli": 1_000_001}, "markup_milli"),
    ({"model": "a b", "markup_milli": 1}, "model"),
    ({"input_picos_per_token": -1}, "input_picos_per_token"),
    ({"reasoning_picos_per_token": 10**13 + 1}, "reasoning_picos_per_token"),
    ({"request_picos": 10**15 + 1}, "request_picos"),
    ({"withdrawn": True, "markup_milli": 1}, "withdrawn"),
    ({"markup_milli": 1, "effective_at": OCTOBER}, "effective_time"),
]


@pytest.mark.parametrize(("terms", "field"), WRONG)
async def test_a_wrong_resale_price_names_its_field(
    world: ClosingWorld, terms: dict[str, Any], field: str
) -> None:
    async with world.sessions.begin() as session:
        owner = await find_organization(session, "acme")
        with pytest.raises(InvalidValue) as wrong:
            await set_resale_price(session, owner, ResaleTerms(**terms), actor="test")
    assert wrong.value.field == field


async def test_the_list_has_prices_in_force_and_the_history_all(world: ClosingWorld) -> None:
    later = datetime(2999, 1, 1, tzinfo=UTC)
    async with world.sessions.begin() as session:
        owner = await find_organization(session, "acme")
        terms = ResaleTerms(markup_milli=1_200, effective_at=later)
        await set_resale_price(session, owner, terms, actor="test")
        with pytest.raises(AlreadyExists):
            await set_resale_price(session, owner, terms, actor="test")
        with pytest.raises(NotFound):
            await set_resale_price(session, owner, ResaleTerms(withdrawn=True), actor="test")
    old = await resale_price(world, OCTOBER, model="demo", markup_milli=1_100)
    new = await resale_price(world, OCTOBER + timedelta(1), model="demo", markup_milli=1_300)
    await resale_price(world, OCTOBER, model="gone")
    await resale_price(world, OCTOBER + timedelta(1), model="gone", withdrawn=True)

    async with world.sessions() as session:
        now, _ = await list_resale_prices(session, owner.id, history=False)
        seen: list[ResalePrice] = []
        token = ""
        while token or not seen:
            page, token = await list_resale_prices(
                session, owner.id, history=True, page_size=2, page_token=token
            )
            seen += page

    assert [each.id for each in now] == [new]
    assert [(each.model, each.effective_at.year) for each in seen] == [
        ("", 2999), ("demo", 2025), ("demo", 2025), ("gone", 2025), ("gone", 2025)
    ]  # fmt: skip
    assert old in {each.id for each in seen}


@pytest.mark.parametrize("token", ["x", "WyJhIl0=", page_token("a", "b")])
async def test_a_forged_page_token_is_refused(world: ClosingWorld, token: str) -> None:
    async with world.sessions() as session:
        owner = await find_organization(session, "acme")
        with pytest.raises(InvalidValue):
            await statement_page(session, owner, "2025-10", page_token=token)
