"""Cancel commands reach each process once, in any order and over lost connections."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import select
from structlog.testing import capture_logs

from metering.control import control_channel
from metering.control.control_channel import FAILURES, ControlChannel
from metering.control.live import (
    CancelCommand,
    DrainCommand,
    cancel_request,
    cancel_requests_of_key,
    drain_replica,
    end_drain,
    live_view,
)
from metering.core.models import AuditEntry
from metering.store.db import Sessions, psycopg_conninfo
from tests.metering.cutting_proxy import CuttingProxy
from tests.metering.queries import execute, fetch_column
from tests.metering.usage import Customer

PATIENCE_S = 180.0

# Answers as a standby does; the default of a database has no effect on Weir's connections.
READ_ONLY = """
CREATE FUNCTION refuse_writes() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE EXCEPTION 'cannot execute INSERT in a read-only transaction' USING ERRCODE = '25006';
END $$;
CREATE TRIGGER refuse_writes BEFORE INSERT ON live_reports EXECUTE FUNCTION refuse_writes();
"""


class Listener:
    """Channel of one process, and its received commands."""

    def __init__(self, url: str) -> None:
        self.commands: list[CancelCommand] = []
        self.process_id = uuid.uuid4()
        self.drains: list[DrainCommand] = []
        self.drain_fault: Exception | None = None
        self.replicas: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.channel = ControlChannel(
            url,
            self.process_id,
            "here:1",
            stop=self.commands.append,
            report=self._report,
            drain=self._drain,
            report_replicas=lambda: self.replicas,
            broadcasters={FAILURES: self},
        )
        self.to_report: list[str] = []
        self.has_heard: list[str] = []
        self.reported = 0

    def _drain(self, commands: Sequence[DrainCommand]) -> None:
        self.drains = list(commands)
        if self.drain_fault is not None:
            raise self.drain_fault

    def _report(self) -> list[dict[str, Any]]:
        self.reported += 1
        return self.requests

    def next_broadcast(self) -> str:
        """Implement `Broadcaster`."""
        return self.to_report.pop(0) if self.to_report else ""

    def receive(self, text: str) -> None:
        """Implement `Broadcaster`."""
        self.has_heard.append(text)

    async def got(self, count: int) -> None:
        """Wait for this many commands."""
        await until(lambda: len(self.commands) >= count, "the command")


async def until(condition: Any, what: str) -> None:
    """Wait for something that another task brings about."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110  # what it looks at is in the database
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"waited in vain for {what}") from None


@contextlib.asynccontextmanager
async def listening(url: str) -> AsyncIterator[Listener]:
    """Open the channel of a process."""
    listener = Listener(url)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(listener.channel.run())
        await until(lambda: listener.reported, "the connection")
        yield listener
        task.cancel()


async def send_command(sessions: Sessions, customer: Customer, reason: str = "") -> uuid.UUID:
    """Write a command to end one request; return its id."""
    request_id = uuid.uuid4()
    async with sessions.begin() as session:
        await cancel_request(
            session, project_id=customer.key.project_id, request_id=request_id, reason=reason
        )
    return request_id


async def test_a_command_arrives_once_with_its_fields(
    database_url: str, sessions: Sessions, customer: Customer
) -> None:
    async with listening(database_url) as listener:
        request_id = await send_command(sessions, customer, "it loops")
        async with sessions.begin() as session:
            await cancel_requests_of_key(session, customer.key.id)
        await listener.got(2)
        await send_command(sessions, customer)
        await listener.got(3)

    first, second, _ = listener.commands
    assert first.request_id == request_id
    assert first.project_id == customer.key.project_id
    assert first.api_key_id is None
    assert first.reason == "it loops"
    assert second.api_key_id == customer.key.id
    assert second.request_id is None
    assert len({each.command_id for each in listener.commands}) == 3


async def test_a_command_that_is_rolled_back_reaches_no_process(
    database_url: str, sessions: Sessions, customer: Customer
) -> None:
    async with listening(database_url) as listener:
        async with sessions() as session:
            await cancel_requests_of_key(session, customer.key.id)
            await session.rollback()
        await send_command(sessions, customer)
        await listener.got(1)

    assert [each.api_key_id for each in listener.commands] == [None]


async def test_a_command_committed_after_a_later_one_is_not_missed(
    database_url: str, sessions: Sessions, customer: Customer
) -> None:
    """Numbers are assigned before the commit, so later numbers may be seen first."""
    async with listening(database_url) as listener:
        async with sessions() as slow:
            await cancel_requests_of_key(slow, customer.key.id)
            await send_command(sessions, customer)
            await listener.got(1)
            await slow.commit()
        await listener.got(2)

    first, second = listener.commands
    assert first.command_id > second.command_id
    assert second.api_key_id == customer.key.id


async def test_commands_sent_without_a_connection_are_applied_when_it_is_back(
    database_url: str, sessions: Sessions, customer: Customer
) -> None:
    async with CuttingProxy(database_url).listening() as proxy, listening(proxy.url) as listener:
        await send_command(sessions, customer)
        await listener.got(1)
        proxy.refusing = True
        proxy.cut_now()
        await until(lambda: not listener.channel.connected, "the cut to be noticed")
        missed = await send_command(sessions, customer)
        proxy.refusing = False
        await listener.got(2)

    assert [each.request_id for each in listener.commands[1:]] == [missed]


async def test_a_server_that_is_read_only_for_now_ends_nothing(
    database_url: str, sessions: Sessions, customer: Customer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose slot went to another one does not block connections."""
    monkeypatch.setattr(control_channel, "RECONNECT_MAX_S", 0.01)
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as admin:
        admin.execute(READ_ONLY)
        async with listening(database_url) as listener:
            await until(lambda: listener.reported >= 3, "it to be asked again")
            admin.execute("DROP FUNCTION refuse_writes CASCADE")
            await until(
                lambda: admin.execute("SELECT 1 FROM live_reports").fetchone(),
                "a report to be written",
            )
            await send_command(sessions, customer)
            await listener.got(1)


async def test_a_connection_that_died_without_a_word_is_given_up(
    database_url: str, sessions: Sessions, customer: Customer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing arrives and nothing is answered: the poll of commands detects it."""
    monkeypatch.setattr(control_channel, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(control_channel, "ANSWER_TIMEOUT_S", 0.3)
    async with CuttingProxy(database_url).listening() as proxy, listening(proxy.url) as listener:
        proxy.deaf = True
        await send_command(sessions, customer)
        await until(lambda: not listener.channel.connected, "the silence to be noticed")
        proxy.deaf = False
        await listener.got(1)

    assert len(listener.commands) == 1


async def test_old_commands_are_not_read_repeatedly(
    database_url: str, sessions: Sessions, customer: Customer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old commands are skipped permanently, also by a new process."""
    monkeypatch.setattr(control_channel, "POLL_INTERVAL_S", 0.02)
    async with listening(database_url) as listener:
        for _ in range(3):
            await send_command(sessions, customer)
        await listener.got(3)
        await execute(
            sessions, "UPDATE cancel_commands SET created_at = created_at - interval '2 minutes'"
        )
        await until(
            lambda: listener.channel._floor == max(each.command_id for each in listener.commands),
            "the floor to rise",
        )
        await until(lambda: not listener.channel._applied, "what lies below it to be forgotten")
        async with listening(database_url) as newcomer:
            last = await send_command(sessions, customer)
            await newcomer.got(1)
            await listener.got(4)

    assert [each.request_id for each in newcomer.commands] == [last]
    assert len(listener.commands) == 4


async def test_a_drain_applies_to_later_processes(database_url: str, sessions: Sessions) -> None:
    """It moves running requests only when its time has come."""
    index = {"model": "chat@v1", "replica": "chat@v1#0"}

    async def drain(move_after_s: float | None) -> None:
        move_after = None if move_after_s is None else timedelta(seconds=move_after_s)
        async with sessions.begin() as session:
            await drain_replica(
                session, **index, reason="new disks", move_after=move_after, actor="ops"
            )

    async with listening(database_url) as first:
        await drain(3600.0)
        await until(lambda: first.drains, "the command")
        async with listening(database_url) as later:
            assert later.drains == first.drains == [DrainCommand(**index, is_moving=False)]
            await drain(0.0)
            await until(
                lambda: [each.is_moving for each in (*first.drains, *later.drains)] == [True, True],
                "the change",
            )
            await drain(0.0)
            async with sessions.begin() as session:
                assert await end_drain(session, **index, reason="done", actor="ops")
                assert not await end_drain(session, **index, reason="done", actor="ops")
            await until(lambda: first.drains == later.drains == [], "the end")
    async with sessions() as session:
        entries = list(await session.scalars(select(AuditEntry).order_by(AuditEntry.id)))
    assert [(each.action, each.subject_id) for each in entries] == [
        ("replica.drain", "chat@v1 chat@v1#0"),
        ("replica.drain", "chat@v1 chat@v1#0"),
        ("replica.undrain", "chat@v1 chat@v1#0"),
    ], "a repetition is no change"
    changed = [
        (
            each.before and each.before["move_after_ms"],
            each.after and each.after.get("move_after_ms"),
        )
        for each in entries
    ]
    assert changed == [(None, 3_600_000), (3_600_000, 0), (0, None)]


async def test_a_view_polls_the_processes_and_names_silent_ones(
    database_url: str, sessions: Sessions, customer: Customer
) -> None:
    """A silent process with holds is named; an ended one without is forgotten."""
    async with listening(database_url) as listener:
        before = listener.reported
        query = "INSERT INTO live_reports VALUES (:id, 'gone:1', now() - interval '1 hour', '[]')"
        await execute(sessions, query, {"id": uuid.uuid4()})
        view = await live_view(sessions)
        known = set(await fetch_column(sessions, "SELECT process_id FROM live_reports"))

    assert listener.reported == before + 1
    assert (view.requests, view.organizations, view.unresponsive_process_ids) == ((), (), ())
    assert known == {listener.process_id}


def live_request(customer: Customer, model: str) -> dict[str, Any]:
    """Return the report of a process about a waiting request without a hold."""
    return {
        "hold_id": None,
        "request_id": str(uuid.uuid4()),
        "organization_id": str(customer.organization_id),
        "project_id": str(customer.key.project_id),
        "api_key_id": str(customer.key.id),
        "model": model,
        "phase": "queued",
        "age_s": 1.0,
        "input_token_count": 1,
        "cached_input_token_count": 0,
        "delivered_token_count": 0,
        "tokens_per_second": 0.0,
    }


@pytest.mark.parametrize("hostile", ["x\0", "\ud800", object()])
async def test_a_request_that_postgresql_refuses_is_left_out_of_the_view_and_ends_nothing(
    database_url: str, sessions: Sessions, customer: Customer, hostile: Any
) -> None:
    async with listening(database_url) as listener, listening(database_url) as other:
        listener.requests = [live_request(customer, model) for model in ("first", hostile, "last")]
        other.requests = [live_request(customer, "elsewhere")]
        with capture_logs() as logs:
            views = [await live_view(sessions) for _ in range(3)]
        await send_command(sessions, customer)
        await listener.got(1)

    for view in views:
        assert sorted(row.model for row in view.requests) == ["elsewhere", "first", "last"]
        assert view.unresponsive_process_ids == ()
    incidents = [entry for entry in logs if entry["event"] == "incident"]
    assert {entry["item"] for entry in incidents} == {listener.requests[1]["request_id"]}
    assert len(incidents) < 3, "it rests between two looks"


async def test_an_unexpected_error_costs_a_connection_and_not_the_process(
    database_url: str, sessions: Sessions, customer: Customer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_channel, "POLL_INTERVAL_S", 0.01)
    serve, faults = (
        ControlChannel._serve,
        [psycopg.errors.UndefinedTable("planted"), ValueError("planted")],
    )

    async def breaks(self: ControlChannel, connection: Any) -> None:
        if faults:
            raise faults.pop()
        await serve(self, connection)

    monkeypatch.setattr(ControlChannel, "_serve", breaks)
    async with listening(database_url) as listener:
        await send_command(sessions, customer)
        await listener.got(1)

    assert not faults


async def test_a_failing_command_is_retried_and_delays_no_other(
    database_url: str, sessions: Sessions, customer: Customer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_channel, "POLL_INTERVAL_S", 0.02)
    async with listening(database_url) as listener:
        stop, tried = listener.channel._stop, []

        def fails_once(each: CancelCommand) -> None:
            tried.append(each.command_id)
            if len(tried) == 1:
                raise ValueError("planted")
            stop(each)

        listener.channel._stop = fails_once
        listener.drain_fault = ValueError("planted")
        await send_command(sessions, customer)
        await send_command(sessions, customer)
        await listener.got(2)

    assert len(tried) == 3
    assert sorted(each.command_id for each in listener.commands) == sorted(set(tried))


async def test_it_costs_two_database_connections(database_url: str, customer: Customer) -> None:
    """The listener's connection and the test's."""
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <>"
        " pg_backend_pid()"
    )
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as connection:
        before = connection.execute(query).fetchone()
        async with listening(database_url):
            after = connection.execute(query).fetchone()

    assert before is not None
    assert after is not None
    assert after[0] == before[0] + 1


async def test_messages_between_processes_reach_all_listeners_and_are_not_stored(
    database_url: str, sessions: Sessions, customer: Customer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_channel, "INTERVAL_S", 0.0)
    monkeypatch.setattr(control_channel, "POLL_INTERVAL_S", 0.01)
    async with listening(database_url) as here, listening(database_url) as there:
        reported = there.reported
        here.to_report += ["first", "second"]
        there.to_report += ["third"]
        await until(lambda: len(here.has_heard) == len(there.has_heard) == 3, "the texts")
        await send_command(sessions, customer)
        await there.got(1)

    assert [text for text in there.has_heard if text != "third"] == ["first", "second"]
    assert set(here.has_heard) == {"first", "second", "third"}
    assert there.reported == reported, "nobody has asked for a report"


async def test_a_process_reports_no_more_than_one_text_in_each_interval(
    database_url: str, sessions: Sessions, customer: Customer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_channel, "INTERVAL_S", 3600.0)
    async with listening(database_url) as here:
        here.to_report += ["first", "second"]
        await until(lambda: here.has_heard, "the first text")
        for _ in range(3):
            await send_command(sessions, customer)  # each wakes the channel
        await here.got(3)

    assert (here.has_heard, here.to_report) == (["first"], ["second"])
