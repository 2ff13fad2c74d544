"""Export of usage: hourly batches, each counted once in spite of failures."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import uuid
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from metering.core.models import TokenKind
from metering.export import deliveries, stripe_gateway
from metering.export.deliveries import deliver_pending, form_batches
from metering.export.export_settings import StripeSettings
from metering.export.exporting import (
    Answer,
    BatchState,
    Exporter,
    FileExporter,
    Quantity,
    Stream,
    Verdict,
)
from metering.export.stripe_gateway import StripeGateway
from metering.ledger.ledger import take_posting_lock
from metering.ledger.rating import rate_customer
from metering.store.db import Sessions, create_engine, create_sessions
from tests.metering.exported_usage import (
    check_delivered,
    hours_ago,
    known_to_stripe,
    states,
)
from tests.metering.invariants import check_export
from tests.metering.queries import execute, fetch_rows, fetch_value
from tests.metering.usage import Acme, Consumed, new_customer, new_price
from tests.metering.workers import wait_until
from tests.stripe_double.server import KEY, Fault, StripeDouble

DELIVERED = {"delivered": 3}  # token kinds of a request

FAULTS = {
    "accepted, then the connection drops": (Fault(accepted=True), "sent", 3),
    "dropped before it was counted": (Fault(), "sent", 3),
    "accepted, then a server error": (Fault(accepted=True, status=500), "sent", 3),
    "a server error": (Fault(status=503), "sent", 3),
    "too many requests": (Fault(status=429, headers={"Retry-After": "7"}), "pending", 3),
}
STEP = st.one_of(
    st.tuples(st.just("use"), st.integers(2, 5), st.integers(0, 30), st.integers(0, 9)),
    st.just(("form",)),
    st.just(("deliver",)),
)


def gateway(double: StripeDouble) -> StripeGateway:
    """Return a gateway to the double."""
    return StripeGateway(StripeSettings(KEY, api_base=double.url))


async def ready(acme: Acme, double: StripeDouble, *events: Consumed) -> str:
    """Yield batches that wait for their customer at Stripe; return the customer's id there."""
    async with acme.sessions.begin() as session:
        stripe_id = await known_to_stripe(session, double.account, acme.customer, acme.price)
    await acme.use_and_rate(*(events or (Consumed(100, 30, 20, settled_at=hours_ago(3)),)))
    await form_batches(acme.sessions)
    return stripe_id


async def let_time_pass(sessions: Sessions) -> None:
    """Let every wait end."""
    await execute(sessions, "UPDATE meter_batches SET next_attempt_at = now()")
    await execute(sessions, "UPDATE export_progress SET paused_until = NULL")


async def test_a_batch_lost_by_a_failover_is_counted_once(acme: Acme, double: StripeDouble) -> None:
    stripe_id = await ready(acme, double)
    await deliver_pending(acme.sessions, gateway(double), budget_s=60)
    names = (
        "SELECT id, organization_id, price_version_id, token_kind, hour, part FROM meter_batches"
        " ORDER BY token_kind"
    )
    async with acme.sessions.begin() as session:
        before = (await session.execute(text(names))).all()
        await session.execute(text("ALTER TABLE meter_batches DISABLE TRIGGER USER"))
        await session.execute(text("DELETE FROM meter_batches"))
        await session.execute(
            text("UPDATE export_progress SET closed_until = closed_until - interval '6 hours'")
        )

    await form_batches(acme.sessions)
    await deliver_pending(acme.sessions, gateway(double), budget_s=60)

    after = await fetch_rows(acme.sessions, names)
    assert after == before
    assert len(double.account.meter_events) == 3
    assert await states(acme.sessions) == DELIVERED
    assert (
        sum(
            double.account.total(f"weir_{acme.price.prices.version}_{kind}", stripe_id)
            for kind in TokenKind
        )
        == 120
    )


async def test_of_a_lost_batch_that_comes_back_larger_the_biller_keeps_what_it_counted(
    acme: Acme, double: StripeDouble
) -> None:
    """Never more than the usage: `weir reconcile` names the difference."""
    stripe_id = await ready(acme, double)
    await deliver_pending(acme.sessions, gateway(double), budget_s=60)
    await execute(acme.sessions, "ALTER TABLE meter_batches DISABLE TRIGGER USER")
    await execute(acme.sessions, "DELETE FROM meter_batches")
    await execute(
        acme.sessions, "UPDATE export_progress SET closed_until = closed_until - interval '6 hours'"
    )
    await acme.use_and_rate(Consumed(100, 30, 20, settled_at=hours_ago(3)))

    await form_batches(acme.sessions)
    await deliver_pending(acme.sessions, gateway(double), budget_s=60)

    assert await states(acme.sessions) == DELIVERED
    assert (
        sum(
            double.account.total(f"weir_{acme.price.prices.version}_{kind}", stripe_id)
            for kind in TokenKind
        )
        == 120
    )


async def test_an_hour_that_is_over_is_one_batch_per_kind_and_what_comes_late_is_another(
    acme: Acme, database_url: str
) -> None:
    at = hours_ago(3)
    await acme.use_and_rate(Consumed(100, 30, 20, settled_at=at), Consumed(7, 0, 1, settled_at=at))
    # Its hour is not over.
    await acme.use_and_rate(Consumed(5, 0, 5, settled_at=hours_ago(-1)))

    first = await form_batches(acme.sessions)
    again = await form_batches(acme.sessions)
    await acme.use_and_rate(Consumed(3, 0, 0, settled_at=at))
    late = await form_batches(acme.sessions)

    async with acme.sessions() as session:
        query = text(
            "SELECT token_kind, part, token_count FROM meter_batches ORDER BY token_kind, part"
        )
        rows = [tuple(row) for row in await session.execute(query)]
    assert (first, again, late) == (3, 0, 1)
    assert rows == [("cached_input", 0, 30), ("input", 0, 77), ("input", 1, 3), ("output", 0, 21)]
    check_export(database_url)


async def test_after_a_time_without_a_worker_each_used_hour_is_a_statement_that_has_time(
    acme: Acme, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement over a whole day would exceed its timeout each time."""
    await acme.use_and_rate(
        *(Consumed(10, settled_at=hours_ago(hour)) for hour in (900, 800, 30, 3))
    )
    spans: list[tuple[datetime, timedelta, str]] = []
    real = deliveries.form

    async def form(
        session: AsyncSession, begins: datetime, ends: datetime, of: uuid.UUID | None = None
    ) -> int:
        if of is None:  # otherwise it is late usage, which also has an hour
            spans.append(
                (begins, ends - begins, str(await session.scalar(text("SHOW statement_timeout"))))
            )
        return await real(session, begins, ends, of)

    monkeypatch.setattr(deliveries, "form", form)
    await form_batches(acme.sessions)

    # A batch that is 900 hours old is too late now.
    hours = [hours_ago(hour).replace(minute=0) for hour in (800, 30, 3)]
    assert [span for span in spans if span[1]] == [
        (begins, timedelta(hours=1), "30s") for begins in hours
    ]
    check_export(database_url)


async def test_concurrent_formations_make_each_batch_once(acme: Acme, database_url: str) -> None:
    events = [Consumed(10, 1, 2, settled_at=hours_ago(hour)) for hour in range(2, 40)]
    await acme.use_and_rate(*events)

    await asyncio.gather(*(form_batches(acme.sessions) for _ in range(4)))
    await form_batches(acme.sessions)

    check_export(database_url)
    assert await states(acme.sessions) == {"pending": 3 * 38}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE meter_batches SET token_count = token_count - 1",
        "UPDATE meter_batches SET hour = hour - interval '1 hour'",
        "UPDATE meter_batches SET state = 'cancelled'",
        "DELETE FROM meter_batches",
        "TRUNCATE meter_batches",
    ],
)
async def test_no_token_of_a_batch_is_ever_changed_away(statement: str, acme: Acme) -> None:
    await acme.use_and_rate(Consumed(10, 0, 0, settled_at=hours_ago(3)))
    await form_batches(acme.sessions)

    with pytest.raises(DBAPIError, match=r"never change|cannot change|append-only"):
        await execute(acme.sessions, statement)


async def test_stripe_counts_what_was_used_at_a_moment_inside_its_hour(
    acme: Acme, double: StripeDouble, database_url: str
) -> None:
    stripe_id = await ready(acme, double)

    run = await deliver_pending(acme.sessions, gateway(double))

    hour = hours_ago(3).replace(minute=0)
    assert run.delivered_count == 3
    assert double.account.total(f"weir_{acme.price.prices.version}_input", stripe_id) == 70
    assert {each["timestamp"] for each in double.account.meter_events} == {
        int((hour + timedelta(minutes=30)).timestamp())
    }
    check_delivered(database_url, double.account)


@pytest.mark.faults
@pytest.mark.parametrize("name", FAULTS)
async def test_a_call_that_fails_is_repeated_until_it_counts_once(
    name: str, acme: Acme, double: StripeDouble, database_url: str
) -> None:
    fault, state, _ = FAULTS[name]
    await ready(acme, double, Consumed(0, 0, 20, settled_at=hours_ago(3)))
    double.faults.append(fault)

    failed = await deliver_pending(acme.sessions, gateway(double))
    after_failure = await states(acme.sessions)
    paused = await deliver_pending(acme.sessions, gateway(double))
    await let_time_pass(acme.sessions)
    await deliver_pending(acme.sessions, gateway(double))

    assert failed.failure is not None
    assert failed.failure.retry_after_s == (7 if "Retry-After" in fault.headers else None)
    assert after_failure == {state: 1}
    assert (paused.delivered_count, paused.failure) == (0, None)
    assert await states(acme.sessions) == {"delivered": 1}
    check_delivered(database_url, double.account)


@pytest.mark.faults
async def test_an_answer_that_never_comes_is_waited_for_so_long_and_then_requested_again(
    acme: Acme, double: StripeDouble, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ready(acme, double, Consumed(0, 0, 20, settled_at=hours_ago(3)))
    answer = threading.Event()
    double.faults.append(Fault(accepted=True, wait=answer))
    with monkeypatch.context() as impatient:
        impatient.setattr(stripe_gateway, "READ_TIMEOUT_S", 0.3)
        hasty = gateway(double)

    failed = await deliver_pending(acme.sessions, hasty)
    answer.set()
    await asyncio.to_thread(wait_until, lambda: not double.busy, "the double to be done")
    await let_time_pass(acme.sessions)
    await deliver_pending(acme.sessions, gateway(double))

    assert failed.failure is not None
    assert not failed.failure.certain
    assert await states(acme.sessions) == {"delivered": 1}
    check_delivered(database_url, double.account)


async def test_a_wrong_key_stops_the_export_with_its_reason_and_loses_nothing(
    acme: Acme, double: StripeDouble, database_url: str
) -> None:
    await ready(acme, double)
    double.bad_key = True

    run = await deliver_pending(acme.sessions, gateway(double))

    assert run.failure is not None
    assert run.failure.verdict is Verdict.BLOCKED
    assert "Invalid API Key" in run.failure.reason
    assert KEY not in run.failure.reason
    assert await states(acme.sessions) == {"pending": 3}
    double.bad_key = False
    await let_time_pass(acme.sessions)
    await deliver_pending(acme.sessions, gateway(double))
    assert await states(acme.sessions) == DELIVERED
    check_delivered(database_url, double.account)


async def test_a_refused_connection_counted_nothing(acme: Acme, double: StripeDouble) -> None:
    await ready(acme, double)
    nobody = StripeGateway(StripeSettings(KEY, api_base="http://127.0.0.1:1"))

    run = await deliver_pending(acme.sessions, nobody)

    assert run.failure is not None
    assert run.failure.certain
    assert await states(acme.sessions) == {"pending": 3}


async def test_a_batch_that_stripe_refuses_is_rejected_with_its_message_and_delays_no_other(
    acme: Acme, double: StripeDouble
) -> None:
    await ready(acme, double)
    meters = double.account.of("billing/meters")
    del meters[next(id for id, each in meters.items() if each["event_name"].endswith("_output"))]

    await deliver_pending(acme.sessions, gateway(double))

    error = await fetch_value(
        acme.sessions, "SELECT last_error FROM meter_batches WHERE state = 'rejected'"
    )
    assert await states(acme.sessions) == {"delivered": 2, "rejected": 1}
    assert "No active meter found" in str(error)


async def test_a_batch_too_long_in_doubt_is_not_resent(acme: Acme, double: StripeDouble) -> None:
    await ready(acme, double, Consumed(0, 0, 20, settled_at=hours_ago(3)))
    double.faults.append(Fault(accepted=True))
    await deliver_pending(acme.sessions, gateway(double))
    await let_time_pass(acme.sessions)
    await execute(
        acme.sessions, "UPDATE meter_batches SET sent_at = now() - interval '23 hours 1 second'"
    )

    run = await deliver_pending(acme.sessions, gateway(double))

    assert run.parked_count == 1
    assert await states(acme.sessions) == {"parked": 1}
    assert double.calls["POST /v1/billing/meter_events"] == 1


@pytest.mark.parametrize(
    ("was", "answer", "state"),
    [
        ("pending", Answer(Verdict.REFUSED), "rejected"),
        ("sent", Answer(Verdict.REFUSED), "parked"),
        ("pending", Answer(Verdict.LATER), "pending"),
        ("sent", Answer(Verdict.LATER), "sent"),
        ("pending", Answer(Verdict.LATER, certain=False), "sent"),
        ("sent", Answer(Verdict.BLOCKED), "sent"),
    ],
)
def test_doubt_about_an_attempt_outlives_the_next(was: str, answer: Answer, state: str) -> None:
    from metering.export.deliveries import state_after

    assert state_after(was, answer) is BatchState(state)


@pytest.mark.faults
async def test_many_workers_never_call_twice_at_once_for_one_customer_and_meter(
    acme: Acme, double: StripeDouble, database_url: str
) -> None:
    events = [Consumed(0, 0, 2, settled_at=hours_ago(hour)) for hour in range(2, 12)]
    await ready(acme, double, *events)
    engine = create_engine(database_url, pool_size=12)
    several, exporter = create_sessions(engine), gateway(double)
    answer = threading.Event()
    double.faults.append(Fault(accepted=True, status=500, wait=answer))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(deliver_pending(several, exporter, 30))
        await asyncio.to_thread(wait_until, double.reached.is_set, "a call to be under way")
        others = [await deliver_pending(several, exporter, 30) for _ in range(2)]
        answer.set()
    await let_time_pass(acme.sessions)
    await asyncio.gather(*(deliver_pending(several, exporter, 30) for _ in range(3)))

    await engine.dispose()
    assert [each.delivered_count for each in others] == [0, 0]
    assert double.clashes == 0
    assert await states(acme.sessions) == {"delivered": 10}
    check_delivered(database_url, double.account)


def exporting(database_url: str, double: StripeDouble) -> subprocess.Popen[bytes]:
    """Start a process that runs the worker's task once."""
    environment = {**os.environ, **double.environment, "WEIR_DATABASE_URL": database_url}
    return subprocess.Popen(
        [sys.executable, "-c", "from metering import tasks; tasks.export()"], env=environment
    )


@pytest.mark.faults
async def test_a_worker_killed_between_the_call_and_its_record_bills_nothing_twice(
    database_url: str, acme: Acme, double: StripeDouble
) -> None:
    await ready(acme, double)
    answer = threading.Event()
    double.faults.append(Fault(accepted=True, wait=answer))
    first = exporting(database_url, double)
    await asyncio.to_thread(
        wait_until, double.reached.is_set, "the worker to be in the middle of a call"
    )
    first.kill()
    first.wait()
    answer.set()
    left = await states(acme.sessions)
    await asyncio.to_thread(wait_until, lambda: not double.busy, "the double to be done")
    next_ones = [exporting(database_url, double) for _ in range(2)]
    statuses = [process.wait(60) for process in next_ones]

    assert statuses == [0, 0]
    assert await states(acme.sessions) == DELIVERED
    assert left.get("sent", 0) >= 1
    check_export(database_url)
    check_delivered(database_url, double.account)


async def test_a_file_has_each_quantity_once_despite_torn_lines(tmp_path: Path, acme: Acme) -> None:
    path = tmp_path / "usage.jsonl"
    await acme.use_and_rate(Consumed(100, 30, 20, settled_at=hours_ago(3)))
    await form_batches(acme.sessions)
    path.write_bytes(b'{"identifier": "torn')

    await deliver_pending(acme.sessions, FileExporter(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    quantity = Quantity(
        lines[0]["identifier"],
        Stream(
            acme.organization_id,
            acme.price.prices.version,
            TokenKind(lines[0]["token_kind"]),
        ),
        hours_ago(3),
        lines[0]["token_count"],
        2,
    )
    again = await FileExporter(path).deliver(quantity)

    assert sorted((line["token_kind"], line["token_count"]) for line in lines) == [
        ("cached_input", 30),
        ("input", 70),
        ("output", 20),
    ]
    assert again.verdict is Verdict.DELIVERED
    assert len(path.read_text().splitlines()) == 3
    assert await states(acme.sessions) == DELIVERED


class Careless:
    """Exporter that loses answers at random, and counts by identifier."""

    account = ""
    remembers_for = timedelta(days=1)

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.counted: dict[str, int] = {}

    async def deliver(self, quantity: Quantity) -> Answer:
        """Count the batch or not, and confirm it or not, at random."""
        if self.random.random() < 0.7:
            assert (
                self.counted.setdefault(quantity.identifier, quantity.token_count)
                == quantity.token_count
            )
            return (
                Answer(Verdict.DELIVERED)
                if self.random.random() < 0.7
                else Answer(Verdict.LATER, "lost", certain=False)
            )
        return Answer(Verdict.LATER, "busy")


@settings(
    max_examples=int(os.environ.get("WEIR_EXPORT_EXAMPLES", "8")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=st.lists(STEP, max_size=12), seed=st.integers(0, 2**32))
def test_each_token_is_exported_once_for_any_order_of_usage(
    steps: list[tuple[object, ...]], seed: int, database_url: str
) -> None:
    async def play() -> None:
        engine = create_engine(database_url)
        sessions, exporter = create_sessions(engine), Careless(seed)
        checked: Exporter = exporter
        async with sessions.begin() as session:
            await session.execute(text("UPDATE export_progress SET paused_until = NULL"))
            name = f"org-{await session.scalar(text('SELECT count(*) FROM organizations'))}"
            customer, price = await new_customer(session, name), await new_price(session)
        used = 0
        for step in steps:
            match step:
                case ("use", int(hour), int(tokens), int(output)):
                    acme = Acme(sessions, customer, price)
                    at = hours_ago(hour)
                    await acme.use_and_rate(Consumed(tokens, tokens // 2, output, settled_at=at))
                    used += tokens + output
                case ("form",):
                    await form_batches(sessions)
                case _:
                    await deliver_pending(sessions, checked)
                    await let_time_pass(sessions)
        await form_batches(sessions)
        while set(await states(sessions)) - {"delivered"}:
            await deliver_pending(sessions, checked)
            await let_time_pass(sessions)
        await engine.dispose()
        assert sum(exporter.counted.values()) == used

    asyncio.run(play())
    check_export(database_url)


async def test_usage_rated_by_a_long_close_is_exported(
    acme: Acme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a margin, every close takes longer than it."""
    monkeypatch.setattr(deliveries, "SCAN_MARGIN", timedelta(0))
    await form_batches(acme.sessions)
    await acme.use(Consumed(100, 10, 5, settled_at=hours_ago(3)))

    async with acme.sessions.begin() as closing:
        await take_posting_lock(closing, acme.organization_id)
        await rate_customer(closing, acme.organization_id)
        assert await form_batches(acme.sessions) == 0

    assert await form_batches(acme.sessions) == 3
