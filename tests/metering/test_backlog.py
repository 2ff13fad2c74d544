"""Backlog of the database, counted from pending rows only."""

from __future__ import annotations

from sqlalchemy import text

from metering.backlog import BACKLOG, read_backlog
from metering.store.db import create_engine, create_sessions


async def test_a_backlog_is_read_from_indexes_and_lists_alone(database_url: str) -> None:
    """An operator polls it every few seconds, however many holds and batches the tables have."""
    engine = create_engine(database_url, pool_size=1)
    try:
        async with create_sessions(engine)() as session:
            await session.execute(text("SET LOCAL enable_seqscan = off"))
            plan = "\n".join((await session.execute(text(f"EXPLAIN {BACKLOG.text}"))).scalars())
    finally:
        await engine.dispose()

    for index in (
        "ix_holds_process_held",
        "ix_meter_batches_waiting",
        "ix_stripe_events_unhandled",
        "ix_alert_deliveries_pending",
    ):
        assert index in plan, plan
    assert "Seq Scan on holds" not in plan
    assert "Seq Scan on meter_batches" not in plan


async def test_an_empty_database_has_no_backlog(database_url: str) -> None:
    engine = create_engine(database_url, pool_size=1)
    try:
        backlog = await read_backlog(create_sessions(engine))
    finally:
        await engine.dispose()

    assert backlog.unrated_event_count == backlog.hold_count == backlog.unexported_batch_count == 0
    assert backlog.unrated_age_s == backlog.unexported_age_s == 0.0
    assert not backlog.export_is_paused
