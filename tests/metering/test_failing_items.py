"""One bad item stops no background loop, and is retried after a delay."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text

from common.incidents import INCIDENT_COUNTS, Retries
from metering import celery_app, tasks
from metering.core.errors import InvariantViolated
from metering.export import deliveries, stripe_inbox
from metering.export.deliveries import deliver_pending, form_batches
from metering.export.exporting import DELIVERED, Answer, FileExporter, Quantity
from metering.export.stripe_gateway import StripeGateway
from metering.holds import recovery
from metering.holds.hold_connection import HoldConnection
from metering.holds.journal import AbandonedJournal
from metering.holds.operations import Expire, HoldOperation
from metering.holds.recovery import Recovered, recover_journals, sweep_expired_holds
from metering.ledger import rating
from metering.ledger.rating import rate_all_pending
from metering.plans import prepaid
from metering.store.db import Sessions, psycopg_conninfo
from metering.worker import record_worker_incidents
from tests.common.test_incidents import Clock
from tests.metering.exported_usage import hours_ago, states
from tests.metering.hold_world import HoldWorld, admit
from tests.metering.queries import execute, fetch_column, fetch_value
from tests.metering.test_recovery import dead_process
from tests.metering.usage import Acme, Consumed, Customer, add_usage, new_customer, new_price


def with_clock(monkeypatch: pytest.MonkeyPatch, retries: Retries) -> Clock:
    """Replace the clock of a module's retries; return it, for the test to move."""
    clock = Clock()
    monkeypatch.setattr(retries, "_clock", clock)
    monkeypatch.setattr(retries, "_failures", type(retries._failures)())
    return clock


def incident_count(retries: Retries) -> int:
    return INCIDENT_COUNTS[retries.source]


async def test_an_event_that_no_statement_can_rate_leaves_the_others_rated(
    acme: Acme, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = with_clock(monkeypatch, rating.retries)
    before = incident_count(rating.retries)
    async with acme.sessions.begin() as session:
        ids = await add_usage(session, acme.customer, acme.price, [Consumed(1, 0, 1)] * 25)
        bad = ids[12]
        await session.execute(
            text(f"""
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                IF NEW.id = {bad} AND NEW.rated_at IS NOT NULL THEN
                RAISE 'planted'; END IF; RETURN NEW; END $$
            """)
        )
        await session.execute(
            text(
                "CREATE TRIGGER refuse BEFORE UPDATE ON usage_events FOR EACH ROW EXECUTE FUNCTION"
                " refuse()"
            )
        )
    monkeypatch.setattr(rating, "BATCH_SIZE", 10)

    rated = [await rate_all_pending(acme.sessions) for _ in range(3)]

    left = list(await fetch_column(acme.sessions, "SELECT event_id FROM unrated_usage"))
    assert (sum(rated), left) == (24, [bad])
    assert incident_count(rating.retries) == before + 1, "while it rests it is not tried"
    await execute(acme.sessions, "DROP TRIGGER refuse ON usage_events")
    assert await rate_all_pending(acme.sessions) == 0
    clock.now_s += 60.0
    assert await rate_all_pending(acme.sessions) == 1


class RaisingExporter(FileExporter):
    """Fails unexpectedly for some batches."""

    def __init__(self, path: Path, bad: set[str]) -> None:
        super().__init__(path)
        self.bad = bad
        self.requested: list[str] = []

    async def deliver(self, quantity: Quantity) -> Answer:
        """Implement `Exporter.deliver`."""
        self.requested.append(quantity.identifier)
        if quantity.identifier in self.bad:
            raise ValueError("planted")
        return DELIVERED


async def test_a_batch_that_breaks_its_exporter_holds_up_no_other(
    acme: Acme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_clock(monkeypatch, deliveries.retries)
    await acme.use_and_rate(*(Consumed(9, 3, 5, settled_at=hours_ago(each)) for each in (3, 4, 5)))
    await form_batches(acme.sessions)
    bad = str(
        await fetch_value(
            acme.sessions, "SELECT id FROM meter_batches ORDER BY hour, token_kind LIMIT 1"
        )
    )
    exporter = RaisingExporter(tmp_path / "out", {bad})

    run = await deliver_pending(acme.sessions, exporter, budget_s=60)

    assert (run.delivered_count, run.failure) == (8, None)
    assert await states(acme.sessions) == {"delivered": 8, "sent": 1}
    assert exporter.requested.count(bad) == 1
    async with acme.sessions.begin() as session:
        error, rests = (
            await session.execute(
                text(
                    "SELECT last_error, next_attempt_at > now() FROM meter_batches WHERE state ="
                    " 'sent'"
                )
            )
        ).one()
        await session.execute(text("UPDATE meter_batches SET next_attempt_at = now()"))
    assert (error.startswith("incident "), rests) == (True, True)
    exporter.bad.clear()
    await deliver_pending(acme.sessions, exporter, budget_s=60)
    assert await states(acme.sessions) == {"delivered": 9}


async def test_a_stage_of_the_export_that_fails_holds_up_no_other(
    acme: Acme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = with_clock(monkeypatch, deliveries.export_retries)
    await acme.use_and_rate(Consumed(9, 3, 5, settled_at=hours_ago(3)))
    await form_batches(acme.sessions)
    attempts = 0

    async def fails(sessions: Sessions) -> int:
        nonlocal attempts
        attempts += 1
        raise ValueError("planted")

    monkeypatch.setattr(deliveries, "form_batches", fails)
    environment = {"WEIR_EXPORT": "file", "WEIR_EXPORT_FILE": str(tmp_path / "out")}
    for _ in range(2):
        await deliveries.export_usage(acme.sessions, environment)

    assert await states(acme.sessions) == {"delivered": 3}
    assert attempts == 1, "it rests"
    clock.now_s += 60.0
    await deliveries.export_usage(acme.sessions, environment)
    assert attempts == 2


async def test_an_event_of_stripe_that_breaks_its_handler_holds_up_no_other(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = with_clock(monkeypatch, stripe_inbox.retries)
    async with sessions.begin() as session:
        for name in ("evt_bad", "evt_good"):
            values = {"id": name, "payload": '{"id": "x"}'}
            await session.execute(
                text("INSERT INTO stripe_events (id, type, payload) VALUES (:id, 'x', :payload)"),
                values,
            )
    handle, tried = stripe_inbox._handle, []

    async def fails(session: object, event_id: str, kind: str, errors: None) -> int:
        tried.append(event_id)
        if event_id == "evt_bad" and len(tried) < 4:
            raise ArithmeticError("planted")
        return await handle(session, event_id, kind, errors)  # type: ignore[arg-type]

    monkeypatch.setattr(stripe_inbox, "_handle", fails)
    gateway = StripeGateway.__new__(StripeGateway)
    handled = [await stripe_inbox.handle_events(sessions, gateway) for _ in range(2)]
    clock.now_s += 1.0
    handled.append(await stripe_inbox.handle_events(sessions, gateway))
    clock.now_s += 2.0
    handled.append(await stripe_inbox.handle_events(sessions, gateway))

    assert (handled, tried) == ([1, 0, 0, 1], ["evt_bad", "evt_good", "evt_bad", "evt_bad"])


async def test_a_prepaid_organization_that_cannot_be_refreshed_holds_up_no_other(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = with_clock(monkeypatch, prepaid.retries)
    async with sessions.begin() as session:
        customers = [await new_customer(session, name) for name in ("first", "second", "third")]
        for each in customers:
            await prepaid.set_prepaid(session, organization=each.name, prepaid=True, actor="test")
        await session.execute(
            text("UPDATE prepaid_organizations SET month = month - interval '1 month'")
        )
    bad, refresh = min(each.organization_id for each in customers), prepaid.refresh
    is_broken = True

    async def fails(session: object, organization_id: uuid.UUID, *, actor: str) -> None:
        if organization_id == bad and is_broken:
            raise ValueError("planted")
        await refresh(session, organization_id, actor=actor)  # type: ignore[arg-type]

    monkeypatch.setattr(prepaid, "refresh", fails)
    refreshed = [await prepaid.refresh_for_the_month(sessions) for _ in range(2)]
    is_broken = False
    refreshed.append(await prepaid.refresh_for_the_month(sessions))
    clock.now_s += 1.0
    refreshed.append(await prepaid.refresh_for_the_month(sessions))

    assert refreshed == [2, 0, 0, 1]


async def test_a_hold_that_cannot_be_swept_holds_up_no_other(
    world: HoldWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = with_clock(monkeypatch, recovery.sweep_retries)
    payer = world.tenant("acme")
    requests = [admit(payer) for _ in range(3)]
    await world.run(*requests)
    world.advance(61)
    bad, execute = requests[0].hold_id, HoldConnection.execute

    async def fails(self: HoldConnection, batch: list[HoldOperation]) -> list[object]:
        answers = await execute(self, [op for op in batch if op.hold_id != bad])  # type: ignore[union-attr]
        for index, op in enumerate(batch):
            if isinstance(op, Expire) and op.hold_id == bad:
                answers.insert(index, InvariantViolated("planted"))
        return answers  # type: ignore[return-value]

    monkeypatch.setattr(HoldConnection, "execute", fails)
    before = incident_count(recovery.sweep_retries)
    swept = [await sweep_expired_holds(world.url, limit=2) for _ in range(3)]
    monkeypatch.undo()
    with_clock(monkeypatch, recovery.sweep_retries)
    swept.append(await sweep_expired_holds(world.url))

    assert (swept, clock.now_s) == ([1, 1, 0, 1], 0.0)
    assert incident_count(recovery.sweep_retries) == before + 1


async def test_a_journal_that_cannot_be_recovered_holds_up_no_other(
    world: HoldWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = with_clock(monkeypatch, recovery.retries)
    for _ in range(2):
        await dead_process(world, tmp_path, delivered=(3,))
    recover, tried = recovery.recover, []

    async def fails(holds: object, journal: AbandonedJournal) -> Recovered:
        tried.append(journal.process_id)
        if len(tried) == 1:
            raise ValueError("planted")
        return await recover(holds, journal)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery, "recover", fails)
    done = [await recover_journals(tmp_path, world.url) for _ in range(2)]
    clock.now_s += 1.0
    done.append(await recover_journals(tmp_path, world.url))

    assert [each.journal_count for each in done] == [1, 0, 1]
    assert tried[0] == tried[2] != tried[1]


def test_a_task_that_fails_is_counted_in_the_database_and_rests(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_DATABASE_URL", database_url)
    clock = Clock()
    monkeypatch.setattr(celery_app, "task_retries", Retries("worker_task", clock=clock))
    runs = {"bad": 0, "good": 0}

    def bad() -> None:
        runs["bad"] += 1
        raise ValueError("planted")

    def good() -> None:
        runs["good"] += 1

    for name, function in (("test.bad", bad), ("test.good", good)):
        celery_app.task(name)(function)
    record_worker_incidents({"WEIR_DATABASE_URL": database_url})
    count = (
        "SELECT coalesce(sum(incident_count), 0) FROM worker_incidents WHERE source = 'worker_task'"
    )
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as connection:
        [before] = connection.execute(count).fetchone() or (0,)
        for _ in range(3):
            for name in ("test.bad", "test.good"):
                celery_app.app.tasks[name]()
        [after] = connection.execute(count).fetchone() or (0,)
    for name in ("test.bad", "test.good"):
        celery_app.app.tasks.unregister(name)

    assert runs == {"bad": 1, "good": 3}
    assert after == before + 1
    clock.now_s += 1.0


async def test_events_that_are_misstated_are_an_incident_once_and_not_each_second(
    sessions: Sessions, customer: Customer, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIR_DATABASE_URL", database_url)
    async with sessions.begin() as session:
        price = await new_price(session)
        ids = await add_usage(session, customer, price, [Consumed(5, 0, 5)] * 2)
        await session.execute(text("ALTER TABLE usage_events DISABLE TRIGGER USER"))
        await session.execute(
            text("UPDATE usage_events SET cost_picos = cost_picos + 1 WHERE id = :id"),
            {"id": ids[0]},
        )
        await session.execute(text("ALTER TABLE usage_events ENABLE TRIGGER USER"))
    before = incident_count(tasks.misstated_retries)

    for _ in range(3):
        await asyncio.to_thread(tasks.rate_pending)

    assert incident_count(tasks.misstated_retries) == before + 1
    assert await fetch_value(sessions, "SELECT count(*) FROM unrated_usage") == 1
