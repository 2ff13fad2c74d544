"""Adjustments: proposed, approved by another person, posted once to the next invoice."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, date, datetime

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from metering.core.errors import ApprovalRefused, InvalidValue, NotFound
from metering.core.money import PICOS_PER_UNIT, minor_unit
from metering.invoicing.adjustments import (
    AdjustmentRecord,
    approve,
    create_adjustment,
    create_credit_note,
    find_adjustment,
    list_adjustments,
    reject,
)
from metering.invoicing.invoices import find_invoice_row, read_invoice
from metering.ledger.rating import rate_all_pending
from metering.plans.prepaid import credit_balance, grant_credit, refresh, set_prepaid
from metering.store.db import Sessions
from metering.tenants.api_keys import create_api_key
from metering.tenants.key_terms import KeyTerms
from metering.tenants.tenants import find_organization
from tests.metering.closing_world import ClosingWorld
from tests.metering.queries import execute
from tests.metering.usage import Consumed, Customer

SEPTEMBER, OCTOBER, NOVEMBER = (datetime(2025, month, 10, 12, tzinfo=UTC) for month in (9, 10, 11))
CENT = PICOS_PER_UNIT // 100
FAR = date(2099, 12, 1)


@pytest.fixture
async def world(sessions: Sessions, customer: Customer) -> ClosingWorld:
    """Yield `acme` in December 2025, with its October closed at 0.15 USD."""
    world = ClosingWorld(sessions, customer)
    price = await world.price(SEPTEMBER)
    await world.use(
        price, Consumed(1_000_000, settled_at=OCTOBER), Consumed(5, settled_at=NOVEMBER)
    )
    await world.close("2025-10")
    await rate_all_pending(sessions)
    return world


async def proposed(
    world: ClosingWorld, amount_picos: int, *, invoice: str = ""
) -> AdjustmentRecord:
    """Propose an adjustment, or a credit note for an invoice, as ann."""
    async with world.sessions.begin() as session:
        if invoice:
            return await create_credit_note(
                session,
                invoice_number=invoice,
                amount_picos=amount_picos,
                currency_code="USD",
                reason="an outage",
                actor="ann",
            )
        return await create_adjustment(
            session,
            organization="acme",
            amount_picos=amount_picos,
            currency_code="USD",
            reason="an outage",
            actor="ann",
        )


async def decided(
    world: ClosingWorld, adjustment: AdjustmentRecord, actor: str, *, how: object = approve
) -> AdjustmentRecord:
    """Approve or reject at the clock's time."""
    async with world.sessions.begin() as session:
        assert how in (approve, reject)
        decide = approve if how is approve else reject
        return await decide(
            session, adjustment_id=str(adjustment.id), actor=actor, now=world.clock.now
        )


async def posted(world: ClosingWorld) -> tuple[object, ...]:
    """Return number and sum of the adjustments in the ledger."""
    return await world.ask("""
        SELECT count(DISTINCT t.id), coalesce(sum(e.amount_picos), 0)::bigint
        FROM ledger_transactions t
        JOIN ledger_entries e ON e.transaction_id = t.id
        JOIN ledger_accounts a ON a.id = e.account_id AND a.kind = 'receivable'
        WHERE t.kind = 'adjustment'
    """)


async def test_no_author_approves_and_approval_posts_once(world: ClosingWorld) -> None:
    adjustment = await proposed(world, -7)

    with pytest.raises(ApprovalRefused, match="Another person"):
        await decided(world, adjustment, "ann")
    assert await posted(world) == (0, 0)
    first = await decided(world, adjustment, "bob")
    again = await decided(world, adjustment, "bob")

    assert first == again
    assert (first.state, first.decided_by, first.billing_month) == ("approved", "bob", "2025-11")
    assert await posted(world) == (1, -7)
    for how in (approve, reject):
        with pytest.raises(ApprovalRefused, match="approved by bob"):
            await decided(world, adjustment, "cid", how=how)


async def test_rejected_adjustments_are_never_posted(world: ClosingWorld) -> None:
    adjustment = await proposed(world, 7)

    first = await decided(world, adjustment, "ann", how=reject)

    assert (first.state, first.billing_month) == ("rejected", "")
    assert await decided(world, adjustment, "bob", how=reject) == first
    with pytest.raises(ApprovalRefused, match="rejected by ann"):
        await decided(world, adjustment, "bob")
    assert await posted(world) == (0, 0)


async def key_by(world: ClosingWorld, creator: str, name: str) -> str:
    """Create another admin key with the key of this prefix; return its prefix."""
    async with world.sessions.begin() as session:
        key, _ = await create_api_key(
            session,
            organization="acme",
            project="search",
            name=name,
            terms=KeyTerms(scopes=("admin",)),
            actor=creator,
        )
    return key.prefix


async def test_two_keys_of_one_person_are_not_two_people(world: ClosingWorld) -> None:
    root = await key_by(world, "test", "root")
    ann, bob = await key_by(world, root, "ann"), await key_by(world, root, "bob")
    anns = await key_by(world, ann, "ann 2")
    anns_third = await key_by(world, anns, "ann 3")

    async def propose() -> str:
        async with world.sessions.begin() as session:
            made = await create_adjustment(
                session,
                organization="acme",
                amount_picos=CENT,
                currency_code="USD",
                reason="an outage",
                actor=ann,
            )
        return str(made.id)

    adjustment_id = await propose()
    late = await key_by(world, root, "late")
    for approver in (ann, anns, anns_third, root, late):
        async with world.sessions.begin() as session:
            with pytest.raises(ApprovalRefused, match=r"[Aa]pprove"):
                await approve(session, adjustment_id=adjustment_id, actor=approver)
    async with world.sessions.begin() as session:
        approved = await approve(session, adjustment_id=adjustment_id, actor=bob)
    other_id = await propose()
    async with world.sessions.begin() as session:
        await approve(session, adjustment_id=other_id, actor=late)

    assert approved.decided_by == bob


async def test_approvers_at_once_post_once_and_one_of_them_did_it(world: ClosingWorld) -> None:
    adjustment = await proposed(world, 9)

    outcomes = await asyncio.gather(
        *(decided(world, adjustment, name) for name in ("bob", "cid", "dan")),
        return_exceptions=True,
    )

    assert sorted(type(each).__name__ for each in outcomes) == [
        "AdjustmentRecord",
        "ApprovalRefused",
        "ApprovalRefused",
    ]
    assert await posted(world) == (1, 9)


async def test_it_is_on_the_invoice_that_comes_next_and_on_no_other(world: ClosingWorld) -> None:
    """An adjustment of December is on November's invoice until that is closed."""
    before = await decided(world, await proposed(world, 2 * CENT), "bob")
    november = (await world.close("2025-11")).report
    after = await decided(world, await proposed(world, 3 * CENT), "bob")
    world.clock.now = datetime(2026, 1, 2, tzinfo=UTC)
    december = (await world.close("2025-12")).report

    assert (before.billing_month, after.billing_month) == ("2025-11", "2025-12")
    assert [(c.description, c.amount_picos) for c in november.charges] == [
        ("adjustment: an outage", 2 * CENT)
    ]
    assert [c.source_id for c in november.charges] == [before.id]
    assert [(c.amount_picos, c.source_id) for c in december.charges] == [(3 * CENT, after.id)]
    assert december.total_rounded_picos == 3 * CENT


async def test_a_close_and_an_approval_at_once_leave_it_on_one_invoice(world: ClosingWorld) -> None:
    adjustments = [await proposed(world, CENT) for _ in range(4)]
    world.clock.now = datetime(2026, 1, 2, tzinfo=UTC)

    closing = asyncio.gather(
        world.close("2025-11"), *(decided(world, each, "bob") for each in adjustments)
    )
    await closing
    world.clock.now = datetime(2026, 2, 2, tzinfo=UTC)
    # An adjustment after the close belongs to the month of its approval: December has none.
    for month in ("2025-12", "2026-01"):
        await world.close(month)

    assert await world.ask(
        "SELECT count(*), count(DISTINCT source_id) FROM invoice_lines WHERE kind = 'adjustment'"
    ) == (4, 4)
    for month in ("2025-11", "2025-12", "2026-01"):
        assert (await world.verify(month)).differences == ()


async def test_credit_notes_are_numbered_and_return_no_more_than_paid(world: ClosingWorld) -> None:
    first = await world.give_back("INV-000001", 10 * CENT)
    rivals = [await proposed(world, 4 * CENT, invoice="INV-000001") for _ in range(2)]

    outcomes = await asyncio.gather(
        *(decided(world, each, "bob") for each in rivals), return_exceptions=True
    )
    [second] = [each for each in outcomes if isinstance(each, AdjustmentRecord)]
    november = (await world.close("2025-11")).report

    assert [type(each).__name__ for each in outcomes if each is not second] == ["InvalidValue"]
    assert (first.credit_note_number, second.credit_note_number) == ("CN-000001", "CN-000002")
    assert november.charges == ()
    assert [
        (note.number, note.invoice_number, note.amount_picos) for note in november.credit_notes
    ] == [
        ("CN-000001", "INV-000001", 10 * CENT),
        ("CN-000002", "INV-000001", 4 * CENT),
    ]
    async with world.sessions() as session:
        invoice = await read_invoice(session, await find_invoice_row(session, "INV-000001"))
        listed = (
            await list_adjustments(session, world.customer.organization_id, undecided_only=True)
        )[0]
    assert (invoice.total_picos, invoice.credited_picos) == (15 * CENT, 14 * CENT)
    assert [each.id for each in listed] == [each.id for each in rivals if each.id != second.id]
    assert (await world.verify("2025-11")).differences == ()
    with pytest.raises(InvalidValue, match=r"must be at most 0\.01: invoice INV-000001 is 0\.15"):
        await proposed(world, 2 * CENT, invoice="INV-000001")


async def test_unknown_adjustments_and_invoices_are_not_found(world: ClosingWorld) -> None:
    async with world.sessions() as session:
        for call in (
            find_adjustment(session, uuid.uuid4()),
            approve(session, adjustment_id=str(uuid.uuid4()), actor="bob"),
            reject(session, adjustment_id="no id", actor="bob"),
            find_invoice_row(session, "INV-999999"),
        ):
            with pytest.raises(NotFound):
                await call


REFUSED = (
    "UPDATE adjustments SET amount_picos = -1",
    "DELETE FROM adjustments",
    "UPDATE adjustment_decisions SET decided_by = 'eve'",
    "DELETE FROM adjustment_decisions",
    (
        "INSERT INTO adjustment_decisions (adjustment_id, author, approved, decided_by,"
        " billing_month) SELECT id, author, true, author, '2025-11-01' FROM adjustments a WHERE NOT"
        " EXISTS (SELECT FROM adjustment_decisions d WHERE d.adjustment_id = a.id)"
    ),
    (
        "INSERT INTO adjustment_decisions (adjustment_id, author, approved, decided_by,"
        " billing_month) SELECT id, 'somebody', true, author, '2025-11-01' FROM adjustments a WHERE"
        " NOT EXISTS (SELECT FROM adjustment_decisions d WHERE d.adjustment_id = a.id)"
    ),
)


async def test_the_database_refuses_to_change_or_to_approve_alone(world: ClosingWorld) -> None:
    await world.adjust(-5)
    await proposed(world, 6)

    for statement in REFUSED:
        with pytest.raises(DBAPIError, match=r"append-only|four_eyes|author"):
            await execute(world.sessions, statement)


@pytest.mark.parametrize(
    ("currency_code", "picos"), [("USD", 10**10), ("JPY", 10**12), ("KWD", 10**9), ("CLF", 10**8)]
)
def test_the_smallest_coin_of_a_currency(currency_code: str, picos: int) -> None:
    assert minor_unit(currency_code) == picos


async def test_a_refund_is_not_also_prepaid_credit(
    world: ClosingWorld,
) -> None:
    await world.close("2025-11")
    world.clock.now = datetime.now(UTC)
    async with world.sessions.begin() as session:
        await set_prepaid(session, organization="acme", prepaid=True, actor="ann")
        await grant_credit(
            session,
            organization="acme",
            amount_picos=100 * CENT,
            last_month=FAR,
            reason="paid",
            actor="ann",
        )
    before = await credit_left(world)

    await world.give_back("INV-000001", 10 * CENT)
    with_note = await credit_left(world)
    await world.adjust(-10 * CENT)

    assert with_note == before
    assert await credit_left(world) == (
        before[0] + 10 * CENT,
        before[1] + 10 * CENT,
    ), "an adjustment is on the next invoice"


async def credit_left(world: ClosingWorld) -> tuple[int, object]:
    """Return the reported available credit, and the limit without credit that ends this month."""
    async with world.sessions.begin() as session:
        owner = (await find_organization(session, "acme")).id
        await refresh(session, owner, actor="ann")
        available = (await credit_balance(session, organization="acme")).available_picos
        limit = await session.scalar(
            text("SELECT limit_value FROM quotas WHERE dimension = 'prepaid_credit_picos'")
        )
    return available, limit
