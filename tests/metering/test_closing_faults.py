"""Closes that fail, are killed, or race with rating are complete or absent."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

from metering.invoicing.month_report import to_json
from metering.ledger.rating import rate_all_pending
from metering.store.db import Sessions, create_engine, create_sessions
from tests.forks import Forked
from tests.metering import closing_process
from tests.metering.closing_world import ClosingWorld
from tests.metering.usage import Consumed, Customer
from tests.metering.workers import FORKED_WORKERS, wait_until

SEPTEMBER, OCTOBER, NOVEMBER = (datetime(2025, month, 10, 12, tzinfo=UTC) for month in (9, 10, 11))
STATEMENTS_MAX = 200  # far above the statements of a close, so that the test ends


class Planted(Exception):
    """Planted fault."""


@contextmanager
def fault_at(engine: AsyncEngine, position: int) -> Iterator[list[str]]:
    """Fail the statement of this number before it is sent; collect the sent ones."""
    sent: list[str] = []

    def count(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if len(sent) == position:
            raise Planted(statement)
        sent.append(statement)

    event.listen(engine.sync_engine, "before_cursor_execute", count)
    try:
        yield sent
    finally:
        event.remove(engine.sync_engine, "before_cursor_execute", count)


async def database(world: ClosingWorld) -> tuple[object, ...]:
    """Return all rows that a close writes."""
    return await world.ask("""
        SELECT (SELECT count(*) FROM billing_months WHERE state = 'closed'),
               (SELECT count(*) FROM month_closings), (SELECT count(*) FROM invoices),
               (SELECT count(*) FROM invoice_lines), (SELECT count(*) FROM ledger_transactions
               WHERE kind = 'rounding'),
               (SELECT count(*) FROM audit_log WHERE action = 'month.close'),
               (SELECT coalesce(max(last_ordinal), 0) FROM document_series)
    """)


async def assert_each_event_invoiced_once(world: ClosingWorld) -> None:
    """Check that each event of a closed month is on exactly one invoice."""
    used = await world.ask("""
        SELECT coalesce(sum(e.input_token_count + e.billed_token_count), 0) FROM usage_events e
        JOIN ledger_transactions t ON t.id = e.ledger_transaction_id
        JOIN billing_months b ON (b.organization_id, b.month) = (t.organization_id, t.billing_month)
        WHERE b.state = 'closed'
    """)
    invoiced = await world.ask(
        "SELECT coalesce(sum(token_count), 0) FROM invoice_lines WHERE kind IN ('usage',"
        " 'late_usage')"
    )
    assert used == invoiced


async def test_a_close_that_fails_at_any_statement_changes_nothing_and_can_be_repeated(
    sessions: Sessions, customer: Customer, database_url: str
) -> None:
    world = ClosingWorld(sessions, customer)
    await world.use(await world.price(SEPTEMBER), Consumed(1_000_001, 7, 3, settled_at=OCTOBER))
    await rate_all_pending(sessions)
    await world.adjust(-5)
    engine = create_engine(database_url)
    faulty = ClosingWorld(create_sessions(engine), customer)
    failed: list[str] = []

    for position in range(STATEMENTS_MAX):
        before = await database(world)
        with fault_at(engine, position) as sent:
            try:
                closed = await faulty.close("2025-10")
            except Planted as fault:
                failed.append(str(fault))
                assert await database(world) == before == (0, 0, 0, 0, 0, 0, 0)
                continue
        break
    else:
        pytest.fail("the close never got through")
    await engine.dispose()

    assert len(failed) == len(sent) > 20
    assert any("INSERT INTO invoice_lines" in statement for statement in failed)
    assert any("UPDATE billing_months" in statement for statement in failed)
    assert await database(world) == (1, 1, 1, 4, 1, 1, 1)
    assert closed.report.closed is not None
    assert closed.report.closed.invoice_number == "INV-000001"
    assert (await world.verify("2025-10")).differences == ()
    await assert_each_event_invoiced_once(world)


BLOCKED = {
    "before anything is posted": "LOCK TABLE ledger_accounts IN SHARE MODE",
    "before the invoice": "LOCK TABLE invoices IN SHARE MODE",
    "before the state": "LOCK TABLE month_closings IN SHARE MODE",
}


@pytest.mark.faults
@pytest.mark.parametrize("lock", BLOCKED.values(), ids=BLOCKED)
async def test_a_killed_close_leaves_nothing_behind_and_blocks_no_caller(
    sessions: Sessions, customer: Customer, database_url: str, lock: str, tmp_path: Path
) -> None:
    world = ClosingWorld(sessions, customer)
    await world.use(await world.price(SEPTEMBER), Consumed(1_000_001, 7, 3, settled_at=OCTOBER))
    await rate_all_pending(sessions)
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'relation'"
    log = tmp_path / "log"

    def begin_close() -> Forked:
        command = [sys.executable, "-m", closing_process.__name__, database_url, customer.name]
        process = FORKED_WORKERS.start([*command, "2025-10"], os.environ, log)
        assert process is not None
        return process

    with (
        psycopg.connect(database_url) as blocking,
        psycopg.connect(database_url, autocommit=True) as watching,
    ):
        blocking.execute(lock.encode())
        killed = begin_close()
        try:
            await asyncio.to_thread(
                wait_until,
                lambda: watching.execute(waiting.encode()).fetchone() != (0,),
                "the close to be in the middle",
            )
        finally:
            killed.kill()
            killed.wait()
    left = await database(world)
    [state] = await world.ask("SELECT state FROM billing_months")
    begin_close().wait()

    assert left == (0, 0, 0, 0, 0, 0, 0)
    assert state == "closing"
    assert log.read_text() == "closed\n"
    assert (await world.verify("2025-10")).differences == ()
    await assert_each_event_invoiced_once(world)


async def test_usage_and_rating_continue_during_a_year_of_closes(
    sessions: Sessions, customer: Customer, database_url: str
) -> None:
    """Usage during the closes is on one invoice: of its month, or late."""
    world = ClosingWorld(sessions, customer)
    price = await world.price(SEPTEMBER)
    engine = create_engine(database_url)
    rating = create_sessions(engine)
    over = asyncio.Event()
    world.clock.now = datetime(2026, 10, 1, tzinfo=UTC)
    months = [
        datetime(2025 + index // 12, index % 12 + 1, 10, tzinfo=UTC) for index in range(8, 16)
    ]

    async def keep_rating() -> int:
        rounds = 0
        while not over.is_set():
            await rate_all_pending(rating)
            rounds += 1
        return rounds

    async def keep_using() -> None:
        for index in range(40):
            settled = [
                months[(index + step) % len(months)] + timedelta(minutes=index) for step in (0, 3)
            ]
            await world.use(
                price, *(Consumed(1_000 + index, 10, index, settled_at=at) for at in settled)
            )

    async def close_all() -> None:
        for month in months:
            await asyncio.gather(
                *(world.close(f"{month:%Y-%m}", actor) for actor in ("ann", "bob"))
            )

    async with asyncio.TaskGroup() as group:
        raters = [group.create_task(keep_rating()) for _ in range(2)]
        await asyncio.gather(keep_using(), close_all())
        over.set()
    await engine.dispose()
    await world.use(price, Consumed(1, settled_at=months[0]))
    last = await world.close("2026-05")

    assert all(rater.result() for rater in raters)
    assert last.report.lines[0].late_month == "2025-09"
    assert await world.ask("SELECT count(*) FROM usage_events WHERE rated_at IS NULL") == (0,)
    await assert_each_event_invoiced_once(world)
    assert await world.ask(
        "SELECT sum(input_token_count + billed_token_count) FROM usage_events"
    ) == await world.ask(
        "SELECT sum(token_count) FROM invoice_lines WHERE kind IN ('usage', 'late_usage')"
    )
    assert await world.ask("SELECT count(*) = max(ordinal) FROM invoices") == (True,)
    for month in months:
        verification = await world.verify(f"{month:%Y-%m}")
        assert verification.differences == ()
        assert to_json(verification.report) == to_json(await world.report(f"{month:%Y-%m}"))
