"""A month in every state: each kind of difference is found, with age and remedy."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from metering.core.models import TokenKind
from metering.export.deliveries import deliver_pending, form_batches
from metering.export.exporting import FileExporter, Stream, counted
from metering.export.reconciliation import (
    MonthReconciliation,
    Stage,
    conclude,
    local_differences,
    our_month,
    reconcile_locally,
)
from metering.store.db import Sessions
from tests.metering.closing_world import ClosingWorld
from tests.metering.exported_usage import hours_ago
from tests.metering.queries import execute, execute_unguarded
from tests.metering.usage import Acme, Consumed, Customer, new_customer

# 600 uncached, 400 cached, 50 output tokens: 126 dollars of picos per million.
USED = Consumed(1_000, 400, 50, settled_at=hours_ago(3))
COST_PICOS = 600 * 150_000 + 400 * 15_000 + 50 * 600_000


@pytest.fixture
def month() -> str:
    """Return the month of the usage."""
    return f"{USED.settled_at:%Y-%m}"


@pytest.fixture
async def exported(acme: Acme, tmp_path: Path) -> Path:
    """Return the exporter's file with all usage."""
    await acme.use_and_rate(USED)
    await form_batches(acme.sessions)
    file = tmp_path / "usage.jsonl"
    await deliver_pending(acme.sessions, FileExporter(file))
    return file


async def reconciled(sessions: Sessions, month: str, file: Path) -> MonthReconciliation:
    """Reconcile as the command does."""
    async with sessions() as session:
        ours = await our_month(session, month)
        here = await local_differences(session, ours)
    totals = counted(file, ours.begins, ours.until)
    counts = [
        totals[Stream(each.organization_id, each.price_version, TokenKind(each.token_kind))]
        for each in ours.sums
    ]
    return conclude(month, ours, here, counts, "file")


async def test_a_month_that_is_in_order_has_no_difference_at_any_stage(
    sessions: Sessions, month: str, exported: Path
) -> None:
    found = await reconciled(sessions, month, exported)

    assert found.balanced
    assert [
        (each.token_kind, each.used, each.posted, each.due, each.delivered)
        for each in found.ours.sums
    ] == [
        ("cached_input", 400, 400, 400, 400),
        ("input", 600, 600, 600, 600),
        ("output", 50, 50, 50, 50),
    ]
    assert found.counted == (400, 600, 50)


async def test_unrated_usage_is_shown_with_its_age(acme: Acme, month: str, exported: Path) -> None:
    late = Consumed(output_token_count=7, settled_at=USED.settled_at + timedelta(minutes=1))
    await acme.use(late)

    found = await reconciled(acme.sessions, month, exported)

    assert [(each.stage, each.token_kind, each.token_count) for each in found.differences] == [
        (Stage.RATING, "output", 7),
        (Stage.BATCHING, "output", 7),
    ]
    assert found.differences[0].since == late.settled_at


PLANTED = [
    (
        "UPDATE ledger_entries SET token_count = token_count - 5 WHERE token_kind = 'output'",
        Stage.RATING,
        5,
        "weir fsck",
    ),
    (
        "UPDATE meter_batches SET state = 'cancelled' WHERE token_kind = 'output'",
        Stage.BATCHING,
        50,
        "worker forms batches",
    ),
    (
        "UPDATE meter_batches SET token_count = token_count + 5 WHERE token_kind = 'output'",
        Stage.BATCHING,
        -5,
        "weir fsck",
    ),
    (
        "UPDATE meter_batches SET state = 'pending' WHERE token_kind = 'output'",
        Stage.DELIVERY,
        50,
        "WEIR_EXPORT",
    ),
    (
        "UPDATE meter_batches SET state = 'parked' WHERE token_kind = 'output'",
        Stage.DELIVERY,
        50,
        "weir stripe settle",
    ),
    (
        "UPDATE meter_batches SET state = 'rejected' WHERE token_kind = 'output'",
        Stage.DELIVERY,
        50,
        "weir stripe resend",
    ),
]


@pytest.mark.parametrize(("fault", "stage", "token_count", "remedy"), PLANTED)
async def test_each_planted_difference_is_reported_at_its_stage_with_a_remedy(
    sessions: Sessions,
    month: str,
    exported: Path,
    fault: str,
    stage: Stage,
    token_count: int,
    remedy: str,
) -> None:
    await execute_unguarded(sessions, fault)

    found = await reconciled(sessions, month, exported)

    first = found.differences[0]
    assert (first.stage, first.token_kind, first.token_count) == (stage, "output", token_count)
    assert remedy in first.remedy
    assert (first.since is not None) is (stage is Stage.DELIVERY)


def drop_first_line(file: Path) -> None:
    """Delete the first line, as if it had never been written."""
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[1:]))


async def test_counted_tokens_are_compared_with_delivered_ones(
    sessions: Sessions, month: str, exported: Path
) -> None:
    drop_first_line(exported)

    found = await reconciled(sessions, month, exported)

    assert [each.stage for each in found.differences] == [Stage.COUNTING]
    assert found.differences[0].token_count in (50, 400, 600)


async def test_without_the_biller_everything_is_compared_that_is_kept_here(
    sessions: Sessions, month: str, exported: Path, customer: Customer
) -> None:
    await execute_unguarded(
        sessions, "UPDATE meter_batches SET state = 'parked' WHERE token_kind = 'output'"
    )

    async with sessions() as session:
        found, is_exported = await reconcile_locally(session, month, customer.organization_id)

    assert is_exported
    assert [(each.stage, each.token_count) for each in found.differences] == [(Stage.DELIVERY, 50)]
    assert found.counted is None


async def test_without_any_export_nothing_is_missing_in_batches(acme: Acme, month: str) -> None:
    await acme.use_and_rate(USED)
    await acme.use(Consumed(output_token_count=7, settled_at=USED.settled_at))

    async with acme.sessions() as session:
        found, is_exported = await reconcile_locally(session, month, acme.customer.organization_id)

    assert not is_exported
    assert [(each.stage, each.token_kind, each.token_count) for each in found.differences] == [
        (Stage.RATING, "output", 7)
    ]


async def test_only_the_organization_that_was_requested_is_compared(
    sessions: Sessions, month: str, exported: Path
) -> None:
    async with sessions.begin() as session:
        other = await new_customer(session, "other")
        ours = await our_month(session, month, (other.organization_id,))

    assert ours.sums == ()


async def invoice(
    sessions: Sessions, customer: Customer, cents: int, finalized_at: datetime, name: str = "in_1"
) -> None:
    """Insert an invoice of Stripe for the month of the usage."""
    begins = USED.settled_at.replace(day=1, hour=0, minute=0)
    await execute(
        sessions,
        """
            INSERT INTO stripe_invoices (id, organization_id, customer_id, currency_code,
                                         period_start, period_end, amount_due_minor,
                                         amount_paid_minor, finalized_at, last_event_at)
            VALUES (:id, :organization_id, 'cus_1', 'USD', :begins, :ends, :cents, 0, :finalized_at,
                now())
            """,
        {
            "id": name,
            "organization_id": customer.organization_id,
            "begins": begins,
            "ends": begins + timedelta(days=31),
            "cents": cents,
            "finalized_at": finalized_at,
        },
    )


async def test_invoices_of_a_period_are_compared_in_sum_up_to_the_rounding_of_their_lines(
    sessions: Sessions, month: str, exported: Path, customer: Customer
) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    # 1.26 dollars in three lines.
    await execute_unguarded(sessions, "UPDATE meter_batches SET token_count = token_count * 10000")
    await invoice(sessions, customer, 100, later)
    await invoice(sessions, customer, 27, later, "in_2")
    within = [
        each
        for each in (await reconciled(sessions, month, exported)).differences
        if each.stage is Stage.INVOICE
    ]
    await execute_unguarded(
        sessions, "UPDATE stripe_invoices SET amount_due_minor = 28 WHERE id = 'in_2'"
    )

    beyond = [
        each
        for each in (await reconciled(sessions, month, exported)).differences
        if each.stage is Stage.INVOICE
    ]

    assert within == []
    assert [each.amount_picos for each in beyond] == [COST_PICOS * 10_000 - 128 * 10**10]
    assert (
        "1.26 USD of usage were counted in time, and 1.28 were invoiced (in_1, in_2"
        in beyond[0].detail
    )


async def test_usage_after_the_billers_invoice_is_reported_with_the_amount_to_invoice(
    sessions: Sessions, month: str, exported: Path, customer: Customer
) -> None:
    await invoice(sessions, customer, 0, datetime.now(UTC) - timedelta(hours=1))

    found = await reconciled(sessions, month, exported)

    [late] = found.differences
    assert (late.stage, late.token_count, late.amount_picos) == (Stage.LATE, 1_050, COST_PICOS)
    assert "0.000126 USD" in late.remedy
    assert late.since is not None


async def test_invoices_of_closed_months_equal_their_postings(
    sessions: Sessions, customer: Customer
) -> None:
    """Usage of September: in its own month, and late in the next one."""
    world = ClosingWorld(sessions, customer)
    september = datetime(2025, 9, 10, 12, tzinfo=UTC)
    price = await world.price(september)
    await world.use(price, Consumed(1_000, 0, 50, settled_at=september))
    await world.close("2025-09")
    await world.use(price, Consumed(7, 0, 0, settled_at=september))
    async with sessions() as session:
        open_yet = conclude("2025-09", await our_month(session, "2025-09"))
    await world.close("2025-10")
    async with sessions() as session:
        closed = conclude("2025-09", await our_month(session, "2025-09"))
    await execute_unguarded(
        sessions, "UPDATE invoice_lines SET token_count = token_count - 3 WHERE kind = 'late_usage'"
    )

    async with sessions() as session:
        changed = conclude("2025-09", await our_month(session, "2025-09"))

    assert {each.stage for each in open_yet.differences} == {Stage.RATING}
    assert [(each.token_kind, each.billed, each.invoiced) for each in closed.ours.sums] == [
        ("input", 1_007, 1_007),
        ("output", 50, 50),
    ]
    assert closed.balanced
    assert [(each.stage, each.token_kind, each.token_count) for each in changed.differences] == [
        (Stage.INVOICING, "input", 3)
    ]
