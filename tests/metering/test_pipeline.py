"""Pipeline with real workers, brokers and kills: each event in the ledger once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from pathlib import Path

import psycopg
import pytest
import redis

from metering.celery_app import RATE_EVERY_S, VISIBILITY_TIMEOUT_S, configuration
from metering.proof.fsck import fsck
from metering.proof.ledger_checks import LEDGER_CHECKS
from metering.store import embedded_postgres
from metering.store.db import create_engine, create_sessions
from metering.store.migrations_runner import migrate
from tests.conftest import ask
from tests.metering.usage import Acme, Consumed, add_usage, new_customer, new_price
from tests.metering.workers import Worker, redis_server, wait_until, worker

Broker = dict[str, str]


@pytest.fixture
def redis_home() -> Iterator[Path]:
    """Yield a short directory for Redis; skip without it, unless it is required."""
    if shutil.which("redis-server") is None:
        if os.environ.get("WEIR_REQUIRE_REDIS") == "1":
            pytest.fail("redis-server is not installed, and WEIR_REQUIRE_REDIS=1 asks for it")
        pytest.skip("redis-server is not installed")
    with tempfile.TemporaryDirectory(prefix="weir-redis-") as home:
        yield Path(home)


@pytest.fixture(params=["memory", "redis"])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """Environment of a worker for each broker that is supported."""
    if request.param == "memory":
        yield {}
        return
    with redis_server(request.getfixturevalue("redis_home")) as environment:
        yield environment


async def use(acme: Acme, event_count: int) -> None:
    """Write usage events as settlements would."""
    await acme.use(*([Consumed(1025, 200, 150)] * event_count))


class Ledger:
    """Current state of usage and ledger."""

    def __init__(self, database_url: str) -> None:
        self.url = database_url

    def ask(self, query: str) -> tuple[object, ...]:
        """Return the single row of a query."""
        [row] = ask(self.url, query)
        return row

    def drained(self) -> bool:
        """Return whether no event waits for rating."""
        return self.ask("SELECT count(*) FROM usage_events WHERE rated_at IS NULL") == (0,)

    def assert_posted_once(self, event_count: int) -> None:
        """Assert that every event is in one transaction, with equal tokens and money in both."""
        events = self.ask(
            """SELECT count(ledger_transaction_id), count(DISTINCT ledger_transaction_id),
                      sum(input_token_count + billed_token_count)::bigint, sum(cost_picos)::bigint
                      FROM usage_events"""
        )
        ledger = self.ask("""SELECT count(DISTINCT t.id), sum(token_count)::bigint,
                      -sum(amount_picos) FILTER (WHERE token_kind IS NOT NULL)
               FROM ledger_transactions t JOIN ledger_entries e ON e.transaction_id = t.id""")
        assert events == (event_count, *ledger)


async def test_a_worker_drains_what_it_finds_and_ends_when_requested(
    tmp_path: Path, broker: Broker, database_url: str, acme: Acme
) -> None:
    await use(acme, 1_000)
    database = Ledger(database_url)

    with worker(tmp_path, database_url, broker) as running:
        wait_until(database.drained, "the worker to rate everything")
        await use(acme, 10)
        wait_until(database.drained, "the worker to come round again")
        began = time.monotonic()
        assert running.stop() == 0
        stopped_after_s = time.monotonic() - began

    database.assert_posted_once(1_010)
    assert stopped_after_s < 10


@pytest.mark.faults
async def test_a_worker_keeps_its_connection_and_replaces_a_cut_one(
    tmp_path: Path, database_url: str, acme: Acme
) -> None:
    database = Ledger(database_url)
    await use(acme, 1)
    query = "SELECT pid, state_change FROM pg_stat_activity WHERE application_name = 'weir'"
    others = dict(ask(database_url, query))

    def used() -> dict[int, datetime]:
        """Return the server processes of the tasks, with the end of their newest statement.

        One that has only connected has none.
        """
        return {pid: at for pid, at in ask(database_url, query) if at and pid not in others}

    # A task that runs while its connection is cut says so and is repeated.
    with worker(tmp_path, database_url, {}, may_log=("the database is away",)):
        wait_until(lambda: bool(used()), "a first task")
        first = used()
        second = timedelta(seconds=2 * RATE_EVERY_S)
        wait_until(
            lambda: any(at - first.get(pid, at) > second for pid, at in used().items()),
            "later tasks on the same connection",
        )
        for pid in used():
            database.ask(f"SELECT pg_terminate_backend({pid})")
        await use(acme, 10)
        wait_until(database.drained, "the worker to rate on another connection")
    database.assert_posted_once(11)


def kill_at(table: str, database: Ledger, killed: AbstractContextManager[Worker]) -> None:
    """Kill a worker while it waits in the middle of a batch to write to the table."""
    waiting = f"SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = '{table}'::regclass"
    with psycopg.connect(database.url) as blocking, killed as running:
        blocking.execute(f"LOCK TABLE {table} IN SHARE MODE".encode())
        wait_until(lambda: database.ask(waiting) != (0,), "the worker to write a batch")
        running.kill()


@pytest.mark.faults
async def test_redis_gives_the_task_of_a_killed_worker_to_the_next_and_nothing_is_rated_twice(
    tmp_path: Path, redis_home: Path, database_url: str, acme: Acme
) -> None:
    """Messages are acknowledged after their tasks: Redis keeps them if the worker is killed."""
    await use(acme, 300)
    database = Ledger(database_url)

    with (
        redis_server(redis_home) as environment,
        redis.Redis(unix_socket_path=str(redis_home / "redis.sock")) as client,
    ):
        # Without a schedule, the only message is that of the running task.
        killed = worker(tmp_path, database_url, environment, "killed", clock=False)
        kill_at("ledger_entries", database, killed)
        left = {
            tag: json.loads(kept)[0]["headers"]["task"]
            for tag, kept in client.hgetall("unacked").items()
        }
        posted = database.ask("SELECT count(*) FROM ledger_transactions")
        # Longer ago than any task runs.
        client.zadd("unacked_index", dict.fromkeys(left, 0))
        with worker(tmp_path, database_url, environment, "next"):
            wait_until(database.drained, "the next worker to rate everything")
            wait_until(
                lambda: not any(client.hexists("unacked", tag) for tag in left),
                "the message to be delivered again",
            )

    assert set(left.values()) == {"weir.rate_pending"}
    assert posted == (0,)
    database.assert_posted_once(300)
    assert not [verdict for verdict in fsck(database_url, LEDGER_CHECKS) if verdict.violation_count]


async def test_two_workers_at_once_post_each_event_once(
    tmp_path: Path, broker: Broker, database_url: str, acme: Acme
) -> None:
    database = Ledger(database_url)

    with (
        worker(tmp_path, database_url, broker, "one"),
        worker(tmp_path, database_url, broker, "two"),
    ):
        for _ in range(3):
            await use(acme, 500)
            wait_until(database.drained, "the workers to rate everything")

    database.assert_posted_once(1_500)


@pytest.mark.faults
async def test_a_redis_that_dies_and_comes_back_empty_holds_up_nothing(
    tmp_path: Path, redis_home: Path, database_url: str, acme: Acme
) -> None:
    database = Ledger(database_url)

    with contextlib.ExitStack() as first_worker:
        environment = first_worker.enter_context(redis_server(redis_home))
        with worker(tmp_path, database_url, environment) as running:
            await use(acme, 10)
            wait_until(database.drained, "the worker to rate everything")
            first_worker.close()
            with redis_server(redis_home):
                await use(acme, 10)
                wait_until(database.drained, "the worker to find Redis and its work again")
                assert running.stop() == 0

    database.assert_posted_once(20)


@pytest.mark.faults
@pytest.mark.parametrize(
    "table", ["usage_events", "ledger_transactions", "ledger_entries", "unrated_usage"]
)
async def test_a_worker_killed_at_any_write_of_a_batch_loses_and_doubles_nothing(
    tmp_path: Path, database_url: str, acme: Acme, table: str
) -> None:
    await use(acme, 300)
    database = Ledger(database_url)

    kill_at(table, database, worker(tmp_path, database_url, {}, "killed"))
    posted = database.ask("SELECT count(*) FROM ledger_transactions")
    with worker(tmp_path, database_url, {}, "next"):
        wait_until(database.drained, "the next worker to rate everything")

    assert posted == (0,)
    database.assert_posted_once(300)
    assert not [verdict for verdict in fsck(database_url, LEDGER_CHECKS) if verdict.violation_count]


@pytest.mark.faults
async def test_a_database_that_goes_away_is_waited_for(tmp_path: Path, postgres_home: Path) -> None:
    server = embedded_postgres.start(postgres_home / "postgres")
    migrate(server.url)
    engine = create_engine(server.url)
    database = Ledger(server.url)

    with worker(tmp_path, server.url, {}) as running:
        async with create_sessions(engine).begin() as session:
            customer, price = await new_customer(session, "acme"), await new_price(session)
            await add_usage(session, customer, price, [Consumed(1, 0, 1)])
        wait_until(database.drained, "the worker to begin")
        server.stop()
        wait_until(
            lambda: "the database is away" in running.log.read_text(), "the worker to notice"
        )
        embedded_postgres.start(postgres_home / "postgres")
        async with create_sessions(engine).begin() as session:
            await add_usage(session, customer, price, [Consumed(1, 0, 1)] * 7)
        wait_until(database.drained, "the worker to go on")
        assert running.stop() == 0

    await engine.dispose()
    assert "Traceback" not in running.log.read_text()
    database.assert_posted_once(8)


def test_no_message_is_given_to_another_worker_while_its_task_can_still_run() -> None:
    assert configuration({"WEIR_BROKER_URL": "redis://"})["task_time_limit"] < VISIBILITY_TIMEOUT_S
