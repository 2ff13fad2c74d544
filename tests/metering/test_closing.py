"""Closing a month: once, in order, refused with reasons; later usage is late."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import insert, text
from sqlalchemy.exc import DBAPIError

from metering.core.errors import InvalidValue, MonthNotClosable, MonthOpen, NotFound, ObstacleKind
from metering.core.models import Hold, TokenKind
from metering.export.reconciliation import conclude, our_month
from metering.invoicing.adjustments import approve, create_adjustment
from metering.invoicing.closing import check_month, close_month
from metering.invoicing.invoices import find_invoice_row, read_invoice
from metering.invoicing.month_report import PrepaidCredit, ReportLine, to_csv, to_json
from metering.invoicing.months import list_months, verify_month
from metering.ledger.rating import rate_all_pending
from metering.plans.plans import LineKind
from metering.plans.prepaid import grant_credit
from metering.proof.check import Moment
from metering.proof.fsck import fsck
from metering.proof.ledger_checks import LEDGER_CHECKS
from metering.store.db import Sessions
from metering.tenants.tenants import find_organization, rename_organization
from tests.metering.closing_world import ClosingWorld
from tests.metering.invariants import check_invariants
from tests.metering.planted_faults import faults, unseen
from tests.metering.queries import execute, fetch_value
from tests.metering.usage import Consumed, Customer, add_usage, new_customer, new_price, rates_of

SEPTEMBER, OCTOBER, NOVEMBER = (datetime(2025, month, 10, 12, tzinfo=UTC) for month in (9, 10, 11))


@pytest.fixture
async def world(sessions: Sessions, customer: Customer) -> ClosingWorld:
    """Customer `acme` in December 2025."""
    return ClosingWorld(sessions, customer)


async def refused(
    world: ClosingWorld, month: str, *, leave_running: bool = False
) -> list[ObstacleKind]:
    """Return the reason that a month cannot be closed; the check gives the same."""
    with pytest.raises(MonthNotClosable) as refusal:
        await world.close(month, leave_running=leave_running)
    found = await check_month(
        world.sessions,
        organization="acme",
        month=month,
        leave_running=leave_running,
        clock=world.clock,
        issuer=world.issuer,
    )
    assert tuple(found) == refusal.value.obstacles
    return [each.kind for each in found]


async def test_a_month_is_rated_invoiced_closed_and_keeps_its_bytes(world: ClosingWorld) -> None:
    price = await world.price(SEPTEMBER)
    await world.use(
        price,
        Consumed(1_000_003, 1_000, 10_007, "stop", OCTOBER),
        Consumed(5, 0, 1, "cancelled", OCTOBER),
    )

    result = await world.close("2025-10")
    await world.use(price, Consumed(7, 0, 7, "stop", OCTOBER))
    before_rating = await world.report("2025-10")
    await rate_all_pending(world.sessions)
    again = await world.report("2025-10")

    report = result.report
    assert not result.already_closed
    assert report.closed is not None
    assert (report.closed.closed_by, report.closed.closed_at) == ("finance", world.clock.now)
    assert report.closed.invoice_number == "INV-000001"
    assert report.total_picos == 999_008 * 150_000 + 1_000 * 15_000 + 10_008 * 600_000
    assert report.total_rounded_picos == 16 * 10**10
    assert (to_json(again), to_csv(again)) == (to_json(report), to_csv(report))
    assert before_rating == report
    assert (await world.verify("2025-10")).differences == ()
    async with world.sessions() as session:
        invoice = await read_invoice(session, await find_invoice_row(session, "INV-000001"))
    assert (
        sum(line.amount_picos for line in invoice.lines)
        == invoice.total_picos
        == report.total_rounded_picos
    )
    assert (
        invoice.total_picos + invoice.carried_out_picos
        == invoice.exact_picos + invoice.carried_in_picos
    )


async def test_late_usage_is_a_labelled_line_of_the_next_month(world: ClosingWorld) -> None:
    price = await world.price(SEPTEMBER)
    await world.use(price, Consumed(10, 0, 0, settled_at=OCTOBER))
    await world.close("2025-10")
    await world.use(
        price, Consumed(3, 0, 0, settled_at=OCTOBER), Consumed(4, 0, 0, settled_at=NOVEMBER)
    )

    report = (await world.close("2025-11")).report

    version = price.prices.version
    assert report.lines == (
        ReportLine("demo", version, TokenKind.INPUT, 1, 4, 0, 150_000, 600_000),
        ReportLine(
            "demo", version, TokenKind.INPUT, 1, 3, 0, 150_000, 450_000, late_month="2025-10"
        ),
    )
    assert report.request_counts.total_count == 2
    assert report.reconciliation.balanced
    async with world.sessions() as session:
        invoice = await read_invoice(session, await find_invoice_row(session, "INV-000002"))
    assert [(line.kind, line.usage_month) for line in invoice.lines] == [
        (LineKind.USAGE, "2025-11"),
        (LineKind.LATE_USAGE, "2025-10"),
    ]
    assert invoice.lines[1].description.startswith("late usage of 2025-10: demo, input tokens")


async def test_an_empty_month_is_closed_without_invoice_and_number(world: ClosingWorld) -> None:
    price = await world.price(SEPTEMBER)
    await world.use(price, Consumed(33_334, 0, 0, settled_at=SEPTEMBER))
    september = (await world.close("2025-09")).report
    october = (await world.close("2025-10")).report
    await world.use(price, Consumed(1, 0, 0, settled_at=NOVEMBER))
    november = (await world.close("2025-11")).report

    assert september.carried_out_picos == 33_334 * 150_000 - 10**10 < 0
    assert october.closed is not None
    assert (october.closed.invoice_number, october.lines) == ("", ())
    assert (october.carried_in_picos, october.carried_out_picos) == (
        september.carried_out_picos,
    ) * 2
    assert november.closed is not None
    assert november.closed.invoice_number == "INV-000002"
    assert november.carried_in_picos == september.carried_out_picos
    assert (await world.verify("2025-10")).differences == ()


async def test_a_month_is_refused_until_it_is_over_by_the_clock(world: ClosingWorld) -> None:
    world.clock.now = datetime(2025, 12, 1, 0, 59, 59, tzinfo=UTC)

    assert await refused(world, "2025-11") == [ObstacleKind.MONTH_NOT_OVER]

    world.clock.now += timedelta(seconds=1)
    assert not (await world.close("2025-11")).already_closed


async def test_the_databases_clock_counts_where_no_other_is_given(world: ClosingWorld) -> None:
    present = f"{await fetch_value(world.sessions, 'SELECT now()'):%Y-%m}"

    found = await check_month(
        world.sessions, organization="acme", month=present, issuer=world.issuer
    )

    assert [each.kind for each in found] == [ObstacleKind.MONTH_NOT_OVER]


async def test_months_are_closed_in_order(world: ClosingWorld) -> None:
    price = await world.price(SEPTEMBER)
    await world.use(price, Consumed(1, settled_at=SEPTEMBER), Consumed(1, settled_at=NOVEMBER))

    assert await refused(world, "2025-11") == [ObstacleKind.EARLIER_MONTH_OPEN]

    await world.close("2025-09")
    assert await refused(world, "2025-11") == [ObstacleKind.EARLIER_MONTH_OPEN]
    # Months without usage: the plan and the credit may still have lines.
    await world.close("2025-10")
    await world.close("2025-11")
    assert await refused(world, "2025-08") == [ObstacleKind.LATER_MONTH_CLOSED]


async def test_usage_before_closed_months_goes_to_the_open_one(world: ClosingWorld) -> None:
    price = await world.price(SEPTEMBER)
    await world.close("2025-10")
    await world.use(price, Consumed(1, settled_at=SEPTEMBER))

    report = (await world.close("2025-11")).report

    assert [line.late_month for line in report.lines] == ["2025-09"]


async def test_misstated_usage_is_named_and_keeps_its_own_customers_months_open_only(
    world: ClosingWorld, sessions: Sessions
) -> None:
    async with sessions.begin() as session:
        other = ClosingWorld(sessions, await new_customer(session, "bolt"), world.clock)
    price = await world.price(SEPTEMBER)
    await other.use(price, Consumed(1, settled_at=OCTOBER))
    (event_id,) = await world.use(price, Consumed(10, settled_at=OCTOBER, cost_picos=1))

    with pytest.raises(
        MonthNotClosable,
        match=f"differs from their tokens: {event_id}; .* 0.0000015 USD, the cost of the tokens",
    ):
        await world.close("2025-10")
    assert await refused(world, "2025-10") == [ObstacleKind.USAGE_MISSTATED]
    assert (await other.close("2025-10")).report.total_picos == 150_000


async def test_a_running_request_keeps_a_month_open_by_default(world: ClosingWorld) -> None:
    price = await world.price(SEPTEMBER)
    common = {
        "organization_id": world.customer.organization_id,
        "project_id": world.customer.key.project_id,
        "api_key_id": world.customer.key.id,
        "payload_hash": bytes(32),
        "model": "demo",
        "price_version_id": price.prices.version,
        "labels": {},
        "process_id": uuid.uuid4(),
        "input_token_count": 1,
        "leased_token_count": 1,
        "quota_ids": [],
        "admitted_at": OCTOBER,
        "expires_at": OCTOBER,
    }
    running, standing = uuid.uuid4(), uuid.uuid4()
    async with world.sessions.begin() as session:
        holds = [
            {"id": uuid.uuid4(), "request_id": running},
            {"id": standing, "request_id": standing},
        ]
        await session.execute(insert(Hold), [common | each for each in holds])

    with pytest.raises(MonthNotClosable, match=f"1 requests .* still running: {running};"):
        await world.close("2025-10")

    assert await refused(world, "2025-10") == [ObstacleKind.REQUESTS_RUNNING]
    assert not (await world.close("2025-10", leave_running=True)).already_closed


async def test_a_closed_month_stays_closed_after_any_later_close(
    world: ClosingWorld,
) -> None:
    price = await world.price(SEPTEMBER)
    await world.use(price, Consumed(1, settled_at=SEPTEMBER), Consumed(2, settled_at=OCTOBER))
    first = await world.close("2025-09")
    await world.close("2025-10")

    again = await world.close("2025-09", actor="another")

    assert again == replace(first, already_closed=True)


async def test_all_obstacles_are_reported_at_once(world: ClosingWorld) -> None:
    price = await world.price(SEPTEMBER)
    await world.use(
        price, Consumed(1, settled_at=OCTOBER), Consumed(10, settled_at=NOVEMBER, cost_picos=1)
    )
    world.clock.now = NOVEMBER

    assert await refused(world, "2025-11") == [
        ObstacleKind.MONTH_NOT_OVER,
        ObstacleKind.EARLIER_MONTH_OPEN,
        ObstacleKind.USAGE_MISSTATED,
    ]


async def test_closing_again_changes_nothing_and_answers_the_same(world: ClosingWorld) -> None:
    await world.use(await world.price(SEPTEMBER), Consumed(1, settled_at=OCTOBER))

    first = await world.close("2025-10", "ann")
    second = await world.close("2025-10", "bob")

    assert (first.already_closed, second.already_closed) == (False, True)
    assert second.report == first.report
    assert await world.ask("SELECT count(*) FROM invoices") == (1,)


async def test_two_closers_at_once_issue_one_invoice(world: ClosingWorld) -> None:
    await world.use(await world.price(SEPTEMBER), *[Consumed(1, settled_at=OCTOBER)] * 50)

    results = await asyncio.gather(
        *(world.close("2025-10", actor) for actor in ("ann", "bob", "cid", "dan"))
    )

    assert sorted(result.already_closed for result in results) == [False, True, True, True]
    assert len({to_json(result.report) for result in results}) == 1
    assert await world.ask("SELECT count(*), max(ordinal) FROM invoices") == (1, 1)


async def test_many_customers_numbers_have_no_gaps(sessions: Sessions, world: ClosingWorld) -> None:
    price = await world.price(SEPTEMBER)
    worlds = []
    for name in ("bolt", "cart", "dove", "echo"):
        async with sessions.begin() as session:
            worlds.append(ClosingWorld(sessions, await new_customer(session, name), world.clock))
        await worlds[-1].use(price, Consumed(1, settled_at=OCTOBER))

    await asyncio.gather(*(each.close("2025-10") for each in worlds))

    assert await world.ask("SELECT array_agg(ordinal ORDER BY ordinal) FROM invoices") == (
        [1, 2, 3, 4],
    )


async def test_months_are_listed_with_their_states_and_digests(world: ClosingWorld) -> None:
    price = await world.price(SEPTEMBER)
    await world.use(price, Consumed(100_000, settled_at=SEPTEMBER), Consumed(1, settled_at=OCTOBER))
    await world.close("2025-09")
    verification = await world.verify("2025-09")

    async with world.sessions() as session:
        months = {
            each.month: each
            for each in await list_months(session, await find_organization(session, "acme"))
        }

    assert list(months)[-2:] == ["2025-10", "2025-09"]
    closed = months["2025-09"]
    assert closed.state == "closed"
    assert closed.invoice_number == "INV-000001"
    assert closed.total_picos == 2 * 10**10
    assert closed.json_sha256 == verification.digests.json_sha256.hex()
    assert (months["2025-10"].state, months["2025-10"].json_sha256) == ("open", "")


async def test_only_closed_months_are_verified_and_known_ones_closed(world: ClosingWorld) -> None:
    with pytest.raises(MonthOpen, match="not closed"):
        await world.verify("2025-10")
    world.customer = Customer(uuid.uuid4(), "nobody", world.customer.key, "")
    with pytest.raises(NotFound):
        await world.close("2025-10")


async def test_a_renamed_customer_keeps_its_old_name_in_closed_months(world: ClosingWorld) -> None:
    await world.use(await world.price(SEPTEMBER), Consumed(1, settled_at=OCTOBER))
    before = (await world.close("2025-10")).report
    async with world.sessions.begin() as session:
        await rename_organization(session, organization="acme", name="zenith", actor="test")

    world.customer = Customer(world.customer.organization_id, "zenith", world.customer.key, "")

    assert await world.report("2025-10") == before
    assert (await world.verify("2025-10")).differences == ()


REFUSED = (
    "UPDATE invoices SET total_picos = total_picos",
    "DELETE FROM invoices",
    "UPDATE invoice_lines SET description = 'x'",
    "DELETE FROM invoice_lines",
    "UPDATE month_closings SET organization_name = 'x'",
    "DELETE FROM month_closings",
    "DELETE FROM billing_months",
    "UPDATE billing_months SET state = 'open', closed_at = NULL, closed_by = NULL",
    "DELETE FROM document_series",
    "UPDATE document_series SET last_ordinal = 7",
    "TRUNCATE invoices CASCADE",
    (
        "INSERT INTO ledger_transactions (organization_id, kind, billing_month, effective_at,"
        " description) SELECT organization_id, 'adjustment', month, now(), 'late' FROM"
        " billing_months"
    ),
    (
        "INSERT INTO ledger_transactions (organization_id, kind, billing_month, effective_at,"
        " description) SELECT organization_id, 'adjustment', month - interval '3 months', now(),"
        " 'very late' FROM billing_months"
    ),
    (
        "INSERT INTO invoice_lines (invoice_id, position, kind, description, exact_picos,"
        " amount_picos, model, usage_month) SELECT id, 99, 'usage', 'one more', 1, 0, 'demo', ''"
        " FROM invoices"
    ),
)


async def test_the_database_refuses_to_change_what_is_closed(world: ClosingWorld) -> None:
    await world.use(await world.price(SEPTEMBER), Consumed(1_000_000, settled_at=OCTOBER))
    await world.close("2025-10")

    for statement in REFUSED:
        with pytest.raises(DBAPIError, match=r"append-only|closed|must be consecutive|add up"):
            await execute(world.sessions, statement)

    assert (await world.verify("2025-10")).differences == ()


TAMPERINGS = (
    ("invoice_lines", "UPDATE invoice_lines SET description = 'nothing'", "lines of the invoice"),
    (
        "month_closings",
        "UPDATE month_closings SET organization_name = 'zenith'",
        "as JSON has the SHA-256",
    ),
    (
        "ledger_entries",
        "UPDATE ledger_entries SET amount_picos = 1 - amount_picos WHERE token_kind IS NULL",
        "on the customer's account",
    ),
    (
        "ledger_entries",
        "UPDATE ledger_entries SET amount_picos = amount_picos - 1 WHERE token_kind = 'input'",
        "as CSV",
    ),
)


async def test_verification_finds_what_was_changed_behind_the_triggers(world: ClosingWorld) -> None:
    await world.use(await world.price(SEPTEMBER), Consumed(1_000_000, settled_at=OCTOBER))
    await world.close("2025-10")

    for table, change, found in TAMPERINGS:
        async with world.sessions() as session:
            for statement in (f"ALTER TABLE {table} DISABLE TRIGGER USER", change):
                await session.execute(text(statement))
            verification = await verify_month(
                session, await find_organization(session, "acme"), "2025-10"
            )
            await session.rollback()
        assert any(found in each for each in verification.differences), (
            change,
            verification.differences,
        )
    assert (await world.verify("2025-10")).differences == ()


async def test_credit_granted_late_is_in_its_month(sessions: Sessions, customer: Customer) -> None:
    """Otherwise the month would spend credit that its report never had."""
    world = ClosingWorld(sessions, customer)
    world.clock.now = datetime.now(UTC)
    this_month = world.clock.now.date().replace(day=1)
    last_month = (this_month - timedelta(days=1)).replace(day=1)
    used_at = datetime(last_month.year, last_month.month, 10, tzinfo=UTC)
    await world.use(await world.price(used_at), Consumed(1_000_000, settled_at=used_at))
    await rate_all_pending(sessions)
    async with sessions.begin() as session:
        months = {
            "first_month": last_month.replace(year=last_month.year - 1),
            "last_month": this_month,
        }
        await grant_credit(
            session,
            organization="acme",
            amount_picos=10**12,
            reason="goodwill",
            actor="ann",
            **months,
        )

    month = f"{last_month:%Y-%m}"
    closed = await close_month(
        sessions,
        organization="acme",
        month=month,
        actor="ann",
        clock=world.clock,
        grace=timedelta(0),
        issuer=world.issuer,
    )

    assert closed.report.credit == PrepaidCredit(
        granted_picos=10**12, remaining_picos=10**12 - 150_000_000_000
    )
    assert closed.report.total_picos == 0


async def test_an_invoice_may_have_very_many_lines(sessions: Sessions, customer: Customer) -> None:
    world = ClosingWorld(sessions, customer)
    price = await world.price(OCTOBER - timedelta(days=30))
    version_count = 1_700
    async with sessions.begin() as session:
        columns = (
            "currency_code, input_picos_per_token, cached_input_picos_per_token,"
            " output_picos_per_token, effective_at, tier"
        )
        copies = text(f"""
            INSERT INTO price_versions (model, {columns})
            SELECT 'demo-' || n, {columns} FROM price_versions, generate_series(1, :count) n
            RETURNING id
        """)
        versions = (await session.scalars(copies, {"count": version_count})).all()
        each_at = [replace(price, prices=replace(price.prices, version=each)) for each in versions]
        used = [Consumed(100, 10, 5, settled_at=OCTOBER, price=each) for each in each_at]
        await add_usage(session, customer, price, used)

    closed = await world.close("2025-10")

    assert len(closed.report.lines) == 3 * version_count
    assert not (await world.verify("2025-10")).differences


async def test_a_month_before_the_first_is_closed_only_on_request(world: ClosingWorld) -> None:
    """Otherwise a mistyped year would close every empty month up to the first one."""
    price = await world.price(SEPTEMBER)
    await world.use(price, Consumed(10, 0, 0, settled_at=OCTOBER))

    with pytest.raises(
        MonthNotClosable, match=r"first month, 2025-10: .* and 12 empty months, .* --before-first"
    ):
        await world.close("2024-10")
    assert await refused(world, "2025-09") == [ObstacleKind.MONTH_BEFORE_FIRST]
    with pytest.raises(MonthNotClosable, match="and 1 empty month, from this one on"):
        await world.close("2025-09")
    await world.close("2025-09", before_first=True)

    assert (await world.close("2025-10")).report.closed is not None
    assert await refused(world, "2024-10") == [ObstacleKind.LATER_MONTH_CLOSED]


async def test_misstated_usage_is_billed_by_an_adjustment_that_two_people_agreed_on(
    world: ClosingWorld, database_url: str
) -> None:
    price = await world.price(SEPTEMBER)
    await world.use(price, Consumed(1, settled_at=OCTOBER))
    ids = await world.use(
        price, *(Consumed(10, 0, 5, settled_at=OCTOBER, cost_picos=each) for each in (1, 10**9))
    )
    right = 2 * (10 * 150_000 + 5 * 600_000)
    async with world.sessions.begin() as session:
        proposed = await create_adjustment(
            session,
            organization="acme",
            amount_picos=right,
            currency_code="USD",
            reason="usage of October",
            actor="ann",
        )
    wrong = await world.adjust(right - 1)

    for adjustment, reported in (
        (str(proposed.id), "another person has to approve it"),
        (str(wrong.id), "is of 0.000008999999 USD, not of 0.000009 USD"),
        (str(uuid.uuid4()), "there is no adjustment"),
        ("everything", "there is no adjustment 'everything'"),
    ):
        with pytest.raises(MonthNotClosable, match=reported):
            await world.close("2025-10", correcting=adjustment)
    async with world.sessions.begin() as session:
        approved = await approve(
            session, adjustment_id=str(proposed.id), actor="bob", now=world.clock.now
        )
    report = (await world.close("2025-10", correcting=str(approved.id))).report

    # The wrong one is also in the month with pending usage.
    assert report.total_picos == 150_000 + right + (right - 1)
    assert (await world.verify("2025-10")).differences == ()
    await rate_all_pending(world.sessions)  # raises while a wrong event is pending
    check_invariants(database_url)
    check_at_rest(database_url)
    async with world.sessions.begin() as session:
        assert conclude("2025-10", await our_month(session, "2025-10")).balanced
        rows = await session.execute(
            text(
                "SELECT e.id FROM usage_corrections JOIN usage_events e USING (hold_id, part,"
                " settled_at) ORDER BY 1"
            )
        )
        assert [row.id for row in rows] == ids
    await world.use(price, Consumed(10, 0, 5, settled_at=NOVEMBER, cost_picos=right - 1))
    with pytest.raises(MonthNotClosable, match="has already corrected other usage"):
        await world.close("2025-11", correcting=str(approved.id))
    assert unseen(database_url, CORRECTION_FAULTS, Moment.ALWAYS, Moment.AT_REST) == []


async def test_misstated_usage_that_should_be_free_is_removed_by_an_adjustment_of_zero(
    world: ClosingWorld, database_url: str
) -> None:
    price = await world.price(SEPTEMBER)
    with pytest.raises(InvalidValue, match="amount: must not be zero"):
        await world.adjust(0)
    await world.use(price, Consumed(0, settled_at=OCTOBER, cost_picos=10**9))

    assert await refused(world, "2025-10") == [ObstacleKind.USAGE_MISSTATED]
    nothing = await world.adjust(0)
    report = (await world.close("2025-10", correcting=str(nothing.id))).report

    assert (report.total_picos, [charge.amount_picos for charge in report.charges]) == (0, [0])
    assert (await world.verify("2025-10")).differences == ()
    await rate_all_pending(world.sessions)  # raises while a wrong event is pending
    check_invariants(database_url)
    check_at_rest(database_url)


async def test_usage_that_can_never_be_rated_keeps_the_month_open(world: ClosingWorld) -> None:
    """A price in another currency, which admission refuses, could never be billed."""
    await world.price(SEPTEMBER)
    async with world.sessions.begin() as session:
        foreign = await new_price(session, currency_code="EUR", **rates_of(1, 1, 1))
    (event_id,) = await world.use(foreign, Consumed(10, settled_at=OCTOBER))

    with pytest.raises(MonthNotClosable, match=f"1 usage events cannot be rated: {event_id}; "):
        await world.close("2025-10")
    assert await refused(world, "2025-10") == [ObstacleKind.USAGE_UNRATED]


CORRECTION_FAULTS = faults("""
    is not rated         | DELETE FROM usage_corrections
    by its price version | DELETE FROM usage_corrections
    but the tokens cost  | UPDATE adjustments SET amount_picos = amount_picos + 1
    is not approved      | DELETE FROM adjustment_decisions
    but the tokens cost  | UPDATE usage_events SET input_token_count = 11 WHERE cost_picos = 1
    another customer     | UPDATE adjustments SET organization_id = gen_random_uuid()
    also rated           | UPDATE usage_events SET rated_at = now(), ledger_transaction_id = 1 WHERE
                         | cost_picos = 1
""")


def check_at_rest(database_url: str) -> None:
    """Raises: AssertionError if anything is not rated that should be."""
    assert [v for v in fsck(database_url, LEDGER_CHECKS) if v.violation_count] == []
