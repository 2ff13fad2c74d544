"""`fsck` on closed months: each check of invoices detects planted faults."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
import pytest

from metering.invoicing.months import changed_months
from metering.proof.check import Moment
from metering.proof.fsck import fsck, select_checks
from metering.store.db import Sessions, psycopg_conninfo
from tests.metering.closing_world import ClosingWorld
from tests.metering.planted_faults import faults, unseen
from tests.metering.usage import Consumed, Customer

SEPTEMBER, OCTOBER = (datetime(2025, month, 10, 12, tzinfo=UTC) for month in (9, 10))
OF_OCTOBER = "WHERE invoice_id = (SELECT id FROM invoices WHERE ordinal = 2)"
FAULTS = faults(f"""
    is closed but has no digests      | DELETE FROM month_closings WHERE month = '2025-10-01'
    is open but has digests           | UPDATE billing_months SET state = 'open', closed_at = NULL,
                                      | closed_by = NULL
    invoices-match-ledger             | UPDATE ledger_entries SET token_count = token_count + 1
                                      | WHERE token_kind = 'output'
    invoices-match-ledger             | UPDATE invoice_lines SET usage_month = '2025-10'
                                      | {OF_OCTOBER}
    0 tokens for 0 picos posted       | UPDATE ledger_transactions SET billing_month = '2025-11-01'
                                      | WHERE billing_month = '2025-10-01'
    invoices-match-receivables | UPDATE invoices SET total_picos = total_picos + 10000000000,
                                      | carried_out_picos = carried_out_picos - 10000000000
    invoices-match-receivables | UPDATE adjustments SET amount_picos = amount_picos - 1 WHERE
                                      | invoice_id IS NOT NULL
    lines of                          | DELETE FROM invoice_lines {OF_OCTOBER} AND position = 0
    its lines are                     | UPDATE invoice_lines SET amount_picos = amount_picos + 1
                                      | {OF_OCTOBER} AND position = 0
    the previous invoice carried out  | UPDATE invoices SET carried_in_picos = carried_in_picos + 1,
                                      | exact_picos = exact_picos - 1
    from 1 to 30                      | UPDATE invoices SET ordinal = 30 WHERE ordinal = 2
    its counter is 7                  | UPDATE document_series SET last_ordinal = 7 WHERE series =
                                      | 'CN'
    document 2025-10: has the SHA-256 | UPDATE issued_documents SET pdf = pdf || '!' WHERE name =
                                      | '2025-10'
""")


@pytest.fixture
async def world(sessions: Sessions, customer: Customer) -> ClosingWorld:
    """Closed months with usage, late usage, a correction, and a credit note."""
    world = ClosingWorld(sessions, customer)
    price = await world.price(SEPTEMBER)
    await world.use(price, Consumed(1_033_334, 1_000, 77, settled_at=SEPTEMBER))
    await world.close("2025-09")
    await world.use(
        price,
        Consumed(12_345, 0, 5, settled_at=SEPTEMBER),
        Consumed(500_001, 0, 9_999, settled_at=OCTOBER),
    )
    await world.adjust(-123_456_789)
    await world.give_back("INV-000001", 10**10)
    await world.close("2025-10")
    world.clock.now = datetime(2026, 1, 15, tzinfo=UTC)
    await world.close("2025-11")
    await world.close("2025-12")  # includes the correction and the credit note
    return world


async def test_closed_months_have_no_violations(world: ClosingWorld, database_url: str) -> None:
    found = [
        f"{verdict.check.name}: {each}"
        for verdict in fsck(database_url, select_checks())
        for each in verdict.sample
    ]

    assert [
        each for each in found if "invoice" in each or "month" in each or "number" in each
    ] == []
    async with world.sessions() as session:
        assert [each async for each in changed_months(session)] == []


async def test_each_fault_of_a_closed_month_is_seen(world: ClosingWorld, database_url: str) -> None:
    assert unseen(database_url, FAULTS, Moment.ALWAYS) == []


async def test_a_month_that_differs_is_named(world: ClosingWorld, database_url: str) -> None:
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        connection.execute("SET LOCAL session_replication_role = replica")
        connection.execute("UPDATE usage_events SET outcome = 'cancelled'")

    async with world.sessions() as session:
        found = [each async for each in changed_months(session)]

    assert {(name, month) for name, month, _ in found} == {("acme", "2025-09"), ("acme", "2025-10")}
    assert all("SHA-256" in problem for _, _, problem in found)
