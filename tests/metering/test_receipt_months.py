"""Receipts of a month: their root, their pages, and the seal after which none is added."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from weir_cli.receipts import read_report
from weir_client import verify_receipts, wire

from api.core.messages import receipt_message
from metering.core.errors import InvalidValue
from metering.core.pages import page_token, page_values, row_id, utc_time
from metering.holds.hold_connection import HoldConnection
from metering.holds.operations import Settled
from metering.invoicing.closing import close_month
from metering.invoicing.month_report import to_json
from metering.invoicing.months import verify_month
from metering.quotas.quota_rules import Payer
from metering.receipts.chaining import IssuedReceipt
from metering.receipts.encoding import micros
from metering.receipts.merkle import EMPTY_ROOT
from metering.receipts.months import month_root, receipt_month, receipts_page, seal_month
from metering.store.db import Sessions
from metering.tenants.tenants import find_organization
from tests.metering.closing_world import ISSUER
from tests.metering.hold_world import HoldWorld, admit, settle
from tests.metering.invariants import check_invariants
from tests.metering.receipt_invariants import root
from tests.metering.receipt_reading import decode

NOVEMBER, DECEMBER = date(2026, 11, 1), date(2026, 12, 1)
NOVEMBER_ENDS = datetime(2026, 12, 1, tzinfo=UTC)

BEFORE_THE_CALENDAR = "0001-01-01T00:00:00+23:59_00000000-0000-0000-0000-000000000000_1"


async def used(world: HoldWorld, payer: Payer, *times: datetime) -> list[IssuedReceipt]:
    """Settle a request at each of the times."""
    receipts: list[IssuedReceipt] = []
    for time in times:
        op = admit(payer)
        await world.run(op)
        world.set_time(time)
        [done] = await world.run(settle(op.hold_id, 1))
        assert isinstance(done, Settled)
        receipts += done.receipts
    return receipts


async def test_the_root_is_over_all_ordered_receipts(world: HoldWorld, sessions: Sessions) -> None:
    payer, stranger = world.tenant(), world.tenant("stranger")
    project = world.one(
        "INSERT INTO projects (organization_id, name) VALUES (%s, 'other') RETURNING id",
        payer.organization_id,
    )
    second = Payer(payer.organization_id, project, world.key(project), "USD")
    before = NOVEMBER_ENDS - timedelta(microseconds=1)
    kept = await used(world, payer, world.now, world.now + timedelta(days=1))
    kept += await used(world, second, world.now + timedelta(hours=1))
    await used(world, stranger, world.now)
    kept += await used(world, payer, before)
    later = await used(world, payer, NOVEMBER_ENDS)

    async with sessions() as session:
        found = await receipt_month(session, payer.organization_id, NOVEMBER)
        december = await month_root(session, payer.organization_id, date(2026, 12, 24))

    by_index = sorted(
        kept, key=lambda receipt: (decode(receipt.encoded).project_id.bytes, receipt.sequence)
    )
    assert found.root == root([receipt.hash for receipt in by_index])
    assert december == later[0].hash
    assert (found.receipt_count, found.missing_receipt_count) == (4, 0)
    spans = {
        piece.project_id: (piece.first_sequence, piece.last_sequence, piece.receipt_count)
        for piece in found.chains
    }
    assert spans == {payer.project_id: (1, 3, 3), second.project_id: (1, 1, 1)}
    assert later[0].previous_hash == next(
        piece.last_hash for piece in found.chains if piece.project_id == payer.project_id
    )


async def test_no_receipts_make_the_empty_root(world: HoldWorld, sessions: Sessions) -> None:
    async with sessions() as session:
        found = await receipt_month(session, world.tenant().organization_id, NOVEMBER)

    assert (found.root, found.receipt_count, found.chains) == (EMPTY_ROOT, 0, [])


async def test_pages_hold_each_receipt_once_in_order(world: HoldWorld, sessions: Sessions) -> None:
    """Many have the same time."""
    payer = world.tenant()
    requests = [admit(payer) for _ in range(11)]
    await world.run(*requests)
    await world.run(*(settle(op.hold_id, 1) for op in requests))

    async with sessions() as session:
        for page_size in (1, 4, 11, 12):
            found: list[IssuedReceipt] = []
            token = page_token(datetime(2026, 11, 1, tzinfo=UTC), uuid.UUID(int=0), 0)
            while token:
                page, token = await receipts_page(
                    session, payer.organization_id, NOVEMBER, page_token=token, page_size=page_size
                )
                found += page
            assert [receipt.sequence for receipt in found] == list(range(1, 12))


@pytest.mark.parametrize(
    "token",
    ["x", "a_b_c", "2026-11-01_00000000-0000-0000-0000-000000000000_1", "1_2", BEFORE_THE_CALENDAR],
)
def test_a_forged_page_token_is_refused(token: str) -> None:
    for each in (token, page_token(*token.split("_"))):
        with pytest.raises(InvalidValue, match="page_token"):
            page_values(each, utc_time, uuid.UUID, row_id)


async def test_a_sealed_month_settles_nothing(world: HoldWorld, sessions: Sessions) -> None:
    """Also not by a transaction that began before the seal and waited."""
    payer, stranger = world.tenant(), world.tenant("stranger")
    late, other = admit(payer), admit(stranger)
    await world.run(late, other)
    await used(world, payer, NOVEMBER_ENDS - timedelta(seconds=10))
    world.set_time(NOVEMBER_ENDS + timedelta(hours=1))

    async with sessions.begin() as session:
        await seal_month(session, payer.organization_id, NOVEMBER)
        before = await month_root(session, payer.organization_id, NOVEMBER)
    world.set_time(NOVEMBER_ENDS - timedelta(seconds=1))  # as in a transaction that began then
    [done, of_other] = await world.run(settle(late.hold_id, 5), settle(other.hold_id, 5))

    assert isinstance(done, Settled)
    assert isinstance(of_other, Settled)
    assert decode(done.receipts[0].encoded).settled_at_us == micros(NOVEMBER_ENDS)
    assert decode(of_other.receipts[0].encoded).settled_at_us == micros(NOVEMBER_ENDS) - 1_000_000
    async with sessions() as session:
        assert await month_root(session, payer.organization_id, NOVEMBER) == before
        assert await month_root(session, payer.organization_id, DECEMBER) == done.receipts[0].hash
    check_invariants(world.url, all_ended=True)


async def test_a_month_that_is_not_over_is_not_sealed(world: HoldWorld, sessions: Sessions) -> None:
    payer = world.tenant()
    async with sessions.begin() as session:
        await seal_month(session, payer.organization_id, NOVEMBER)

    [receipt] = await used(world, payer, world.now)

    assert decode(receipt.encoded).settled_at_us == micros(world.now)


async def test_a_seal_waits_for_settlements_and_settlements_wait_for_it(
    world: HoldWorld, sessions: Sessions
) -> None:
    payer = world.tenant()
    requests = [admit(payer) for _ in range(20)]
    await world.run(*requests)
    world.set_time(NOVEMBER_ENDS)

    async def settle_one(hold_id: uuid.UUID) -> None:
        async with HoldConnection(world.url, uuid.uuid4()) as holds:
            await holds.execute([settle(hold_id, 1)])

    async def seal() -> bytes:
        async with sessions.begin() as session:
            await seal_month(session, payer.organization_id, NOVEMBER)
        async with sessions() as session:
            return await month_root(session, payer.organization_id, NOVEMBER)

    async with asyncio.TaskGroup() as tasks:
        for op in requests:
            tasks.create_task(settle_one(op.hold_id))
        sealing = tasks.create_task(seal())

    async with sessions() as session:
        assert await month_root(session, payer.organization_id, NOVEMBER) == sealing.result()
    check_invariants(world.url, all_ended=True)


async def test_a_closed_month_has_root_and_sums_of_its_receipts(
    world: HoldWorld, sessions: Sessions, tmp_path: Path
) -> None:
    """They are final: requests that run into the next month are settled there."""
    payer, late = world.tenant(), None
    kept = await used(world, payer, world.now, world.now + timedelta(days=1))
    late = admit(payer)
    await world.run(late)
    world.set_time(NOVEMBER_ENDS + timedelta(days=2))

    closed = await close_month(
        sessions,
        organization="acme",
        month="2026-11",
        actor="ann",
        leave_running=True,
        issuer=ISSUER,
    )
    world.set_time(NOVEMBER_ENDS - timedelta(seconds=1))
    await world.run(settle(late.hold_id, 5))

    report = tmp_path / "report.json"
    report.write_text(to_json(closed.report))
    reported = read_report(report)
    assert closed.report.closed is not None
    assert closed.report.closed.receipts_root == root([receipt.hash for receipt in kept]).hex()
    async with sessions() as session:
        assert await month_root(session, payer.organization_id, NOVEMBER) == reported.root
        receipts, _ = await receipts_page(session, payer.organization_id, NOVEMBER)
    verdict = verify_receipts(
        [wire.receipt(receipt_message(each)) for each in receipts],
        {},
        month=reported.month,
        organization_id=reported.organization_id,
        root=reported.root,
        totals=reported.totals,
    )
    assert verdict.problems == (), "not signed, but the root vouches for all"
    assert verdict.receipt_count == 2
    check_invariants(world.url, all_ended=True)

    async with sessions() as session:
        owner = await find_organization(session, "acme")
        assert (await verify_month(session, owner, "2026-11")).differences == ()
    world.execute("SET session_replication_role = replica")  # without triggers
    world.execute(
        "UPDATE usage_events SET receipt_hash = previous_receipt_hash WHERE receipt_sequence = 2"
    )
    async with sessions() as session:
        [difference] = (await verify_month(session, owner, "2026-11")).differences
    assert difference.startswith("the root of the receipts is ")


async def test_a_close_without_receipts_has_no_root(world: HoldWorld, sessions: Sessions) -> None:
    world.tenant()
    world.set_time(NOVEMBER_ENDS + timedelta(days=2))

    closed = await close_month(sessions, organization="acme", month="2026-11", actor="ann")

    assert closed.report.closed is not None
    assert closed.report.closed.receipts_root == ""
