"""Rating of usage events per second and core, against plain multi-row inserts of the same rows.

    python -m bench.billing [--events 200000] [--organizations 1 10 1000]
        [--directory /dev/shm | --database-url URL]

A case writes usage events as settlements would, then rates and posts all of them, like consecutive
tasks of a worker. "Plain" copies the same rows into a table with the same indexes, a thousand rows
per INSERT and commit: PostgreSQL's cost of storing them once, without a ledger. Rates are by wall
time and by CPU time of server and this process together; the latter is the capacity of one core,
and meaningful on a busy machine too.

Then one worker without a broker: seconds from the end of a request to its ledger row, while the
worker is idle, with the notice that an api process sends. Finally the export: seconds from a closed
hour of usage to its meter events in a file, in addition to the two minutes after which an hour is
closed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import uvloop
from psycopg.types.json import Json

from bench.admission import AwaitedStore, Stores, new_admit
from bench.admission_plain import INPUT_TOKENS, OUTPUT_TOKENS
from bench.harness import Bench, Case, Cases, Figure, Measure, Values, main
from bench.site import (
    add_database_options,
    children_of,
    cpu_s,
    create_tenants,
    database,
    postgres_pid,
    quantile,
)
from metering.core.models import Outcome
from metering.export.deliveries import export_usage
from metering.holds.operations import Settle
from metering.holds.usage_notices import NOTICE_INTERVAL_S, UsageNotices
from metering.ledger.rating import rate_all_pending
from metering.quotas.quota_rules import Payer
from metering.store.db import create_engine, create_sessions, psycopg_conninfo
from metering.store.migrations_runner import migrate
from metering.worker import APPLICATION, worker_command

PLAIN_ROWS = 1_000  # rows of one INSERT
POLL_S = 0.002
PATIENCE_S = 60.0

COLUMNS = """hold_id, organization_id, project_id, api_key_id, request_id, model, outcome,
    input_token_count, cached_input_token_count, generated_token_count, delivered_token_count,
    billed_token_count, price_version_id, cost_picos, timings, labels, admitted_at, settled_at"""
TIMINGS = (
    '{"auth_ms": 0.1, "admission_ms": 0.9, "queue_ms": 0.2, "prefill_ms": 33.1, "decode_ms": 812.5,'
    ' "ttft_ms": 41.5}'
)
# Requests of all tenants in turn, as settled holds with their usage events.
HOLDS = """
INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id, payload_hash, model,
                   price_version_id, labels, state, process_id, input_token_count,
                   cached_input_token_count, leased_token_count, delivered_token_count, quota_ids,
                   admitted_at, expires_at, ended_at)
SELECT gen_random_uuid(), k.organization_id, k.project_id, k.id, gen_random_uuid(), sha256(''),
       p.model, p.id, '{}', 'settled', gen_random_uuid(), 800 + i %% 400, i %% 200, 100 + i %% 100,
       100 + i %% 100, '{}', %(at)s, %(at)s, %(at)s
FROM generate_series(1, %(count)s) i
JOIN (SELECT a.id, a.project_id, j.organization_id, row_number() OVER (ORDER BY a.id) - 1 AS number
      FROM api_keys a JOIN projects j ON j.id = a.project_id
      WHERE j.organization_id = ANY(%(owners)s)) k
    ON k.number = i %% %(owner_count)s
CROSS JOIN (SELECT id, model FROM price_versions ORDER BY id LIMIT 1) p
"""
EVENTS = f"""
INSERT INTO usage_events ({COLUMNS})
SELECT h.id, h.organization_id, h.project_id, h.api_key_id, h.request_id, h.model, 'stop',
       h.input_token_count, h.cached_input_token_count, h.delivered_token_count,
       h.delivered_token_count, h.delivered_token_count, p.id,
       (h.input_token_count - h.cached_input_token_count) * p.input_picos_per_token
           + h.cached_input_token_count * p.cached_input_picos_per_token + h.delivered_token_count *
           p.output_picos_per_token,
       '{TIMINGS}', h.labels, h.admitted_at, h.ended_at
FROM holds h JOIN price_versions p ON p.id = h.price_version_id
WHERE h.state = 'settled' AND NOT EXISTS (SELECT FROM usage_events u WHERE u.hold_id = h.id)
ORDER BY h.request_id
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a number of rows. `cpu_s` is the CPU time of the server and this process together."""

    row_count: int
    wall_s: float
    cpu_s: float

    @property
    def per_core_s(self) -> float:
        """Rows per second of CPU time."""
        return self.row_count / max(self.cpu_s, 1e-9)

    def values(self) -> Values:
        """Return the figures."""
        return {
            "per_core_s": self.per_core_s,
            "per_s": self.row_count / self.wall_s,
            "wall_s": self.wall_s,
        }


class Meter:
    """Stopwatch for the elapsed time and the CPU time of a block."""

    def __init__(self, database_url: str) -> None:
        self._postgres = postgres_pid(database_url)

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time() + cpu_s(
            [self._postgres, *children_of(self._postgres)]
        )

    @contextlib.contextmanager
    def costs(self, row_count: int) -> Iterator[list[Cost]]:
        """Yield a list, and append the cost of the block to it when the block ends."""
        found: list[Cost] = []
        wall_s, cpu = self._now()
        yield found
        ends_s, cpu_ends = self._now()
        found.append(Cost(row_count, ends_s - wall_s, cpu_ends - cpu))


def use(database_url: str, owners: list[Payer], count: int, at: str) -> None:
    """Write usage events of these customers, settled at the time `at`, an SQL expression."""
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        row = connection.execute(f"SELECT {at}".encode()).fetchone()
        assert row is not None
        ids = [payer.organization_id for payer in owners]
        connection.execute(
            HOLDS.encode(), {"count": count, "owners": ids, "owner_count": len(ids), "at": row[0]}
        )
        connection.execute(EVENTS.encode())
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE usage_events")  # as autovacuum does after so many rows


def insert_plainly(database_url: str, meter: Meter) -> Cost:
    """Copy the unrated `usage_events` into a separate table."""
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS bench_plain")
        connection.execute(
            "CREATE TABLE bench_plain (LIKE usage_events INCLUDING DEFAULTS INCLUDING CONSTRAINTS)"
        )
        connection.execute(
            "ALTER TABLE bench_plain ADD id_plain bigint GENERATED ALWAYS AS IDENTITY, ALTER id"
            " DROP NOT NULL"
        )
        connection.execute("ALTER TABLE bench_plain ADD PRIMARY KEY (hold_id, part, settled_at)")
        connection.execute("CREATE INDEX ON bench_plain (organization_id, settled_at)")
        cursor = connection.execute(
            f"SELECT {COLUMNS} FROM usage_events WHERE rated_at IS NULL".encode()
        )
        rows = [tuple(Json(v) if isinstance(v, dict) else v for v in row) for row in cursor]
        with psycopg.ClientCursor(connection) as literal:
            width = "(" + ", ".join(["%s"] * len(rows[0])) + ")"
            # Without the client's cost of formatting values.
            written = [literal.mogrify(width, row) for row in rows]
        batches = [
            ",".join(written[start : start + PLAIN_ROWS])
            for start in range(0, len(written), PLAIN_ROWS)
        ]
        with meter.costs(len(rows)) as found:
            for batch in batches:
                connection.execute(f"INSERT INTO bench_plain ({COLUMNS}) VALUES {batch}".encode())
        connection.execute("DROP TABLE bench_plain")
    return found[0]


async def drain(database_url: str, meter: Meter, count: int) -> Cost:
    """Rate and post all pending events."""
    engine = create_engine(database_url, pool_size=1)
    sessions, rated = create_sessions(engine), 0
    with meter.costs(count) as found:
        while (done := await rate_all_pending(sessions)) > 0:
            rated += done
    await engine.dispose()
    assert rated == count, f"{rated} of {count} events were rated"
    return found[0]


def count_of(connection: psycopg.Connection[tuple[int]], query: str) -> int:
    """Run a query that returns a single number."""
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def wait_until(connection: psycopg.Connection[tuple[int]], query: str, expected: int) -> None:
    """Poll until a query returns the number `expected`. Raises: TimeoutError."""
    deadline = time.monotonic() + PATIENCE_S
    while count_of(connection, query) != expected:
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out: {query} did not become {expected}")
        time.sleep(POLL_S)


@contextlib.contextmanager
def idle_worker(database_url: str) -> Iterator[None]:
    """Run a worker without a broker, which is idle and listens when the block begins."""
    listening = f"SELECT count(*) FROM pg_stat_activity WHERE application_name = '{APPLICATION}'"
    with (
        tempfile.TemporaryDirectory() as home,
        psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as looking,
    ):
        environment = {
            **os.environ,
            "WEIR_HOME": home,
            "WEIR_DATABASE_URL": database_url,
            "WEIR_BROKER_URL": "",
        }
        worker = subprocess.Popen(
            worker_command(), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_until(looking, listening, 1)
            yield
        finally:
            worker.terminate()
            worker.wait()


async def seconds_to_ledger(database_url: str, payer: Payer, request_count: int) -> list[float]:
    """Measure the time from settlement to rating, one request at a time."""
    engine = create_engine(database_url, pool_size=2)
    notices, waits = UsageNotices(create_sessions(engine)), []
    store = AwaitedStore(database_url, uuid.uuid4(), used=notices.used)
    with psycopg.connect(psycopg_conninfo(database_url), autocommit=True) as looking:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(store.run()), tasks.create_task(notices.run())]
            for _ in range(request_count):
                op = new_admit(payer)
                await store.admit(op)
                await store.settle(
                    Settle(op.hold_id, INPUT_TOKENS, 0, OUTPUT_TOKENS, OUTPUT_TOKENS, Outcome.STOP)
                )
                begin = time.perf_counter()
                await asyncio.to_thread(
                    wait_until, looking, "SELECT count(*) FROM unrated_usage", 0
                )
                waits.append(time.perf_counter() - begin)
                # The next request finds the worker idle and a notice due at once.
                await asyncio.sleep(2 * NOTICE_INTERVAL_S)
            for task in running:
                task.cancel()
    await engine.dispose()
    return waits


async def seconds_to_meter_events(database_url: str) -> tuple[float, int]:
    """Measure the time from rated usage of past hours to its meter events, and count these."""
    engine = create_engine(database_url, pool_size=3)
    with tempfile.TemporaryDirectory() as home:
        target = Path(home) / "usage.jsonl"
        begin = time.perf_counter()
        await export_usage(
            create_sessions(engine),
            {"WEIR_EXPORT": "file", "WEIR_EXPORT_FILE": str(target), "WEIR_HOME": home},
        )
        took_s = time.perf_counter() - begin
        written = len(target.read_text().splitlines()) if target.exists() else 0
    await engine.dispose()
    return took_s, written


async def settle(database_url: str, payers: list[Payer], seconds: float) -> tuple[Cost, int]:
    """Admit and settle, 64 concurrently. Return the cost of a pair and the usage event count."""
    result = await Stores(database_url, seconds).group_commit(payers, 64)
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        written = count_of(connection, "SELECT count(*) FROM unrated_usage")
    return Cost(result.pair_count, result.wall_s, result.cpu_s + result.database_cpu_s), written


def case_of(database_url: str, meter: Meter, payers: list[Payer], event_count: int) -> Case:
    """Build the case of these customers. All events are written before each way."""
    costs: dict[str, Cost] = {}

    def plain() -> Values:
        use(database_url, payers, event_count, "now()")
        return insert_plainly(database_url, meter).values()

    async def rated() -> Values:
        with psycopg.connect(psycopg_conninfo(database_url)) as connection:
            pending = count_of(connection, "SELECT count(*) FROM unrated_usage")
        if not pending:
            use(database_url, payers, event_count, "now()")
        costs["rated"] = await drain(database_url, meter, pending or event_count)
        return costs["rated"].values()

    async def settled() -> Values:
        cost, written = await settle(database_url, payers, 1.0)
        await drain(database_url, meter, written)
        found = dict(cost.values())
        if "rated" in costs:
            found["whole_per_core_s"] = 1 / (1 / cost.per_core_s + 1 / costs["rated"].per_core_s)
        return found

    ways: dict[str, Measure] = {"plain inserts": plain, "rated": rated, "settled": settled}
    return Case(f"{event_count:,} events of {len(payers)} organizations", ways)


@contextlib.asynccontextmanager
async def prepare(options: argparse.Namespace) -> AsyncIterator[Cases]:
    """Fill a database with customers, and yield the cases."""
    with database(options.database_url, options.directory) as url:
        migrate(url)
        meter, counts = Meter(url), sorted(options.organizations)
        payers = create_tenants(url, counts[-1])

        async def to_ledger() -> Values:
            with idle_worker(url):
                waits_s = await seconds_to_ledger(url, payers[0], options.requests)
            return {
                f"ledger_p{percent}_ms": quantile(waits_s, percent / 100) * 1000
                for percent in (50, 90)
            }

        async def to_export() -> Values:
            count = min(options.events, 10_000)
            use(url, payers, count, "date_trunc('hour', now()) - interval '90 minutes'")
            await drain(url, meter, count)
            took_s, made = await seconds_to_meter_events(url)
            return {"export_s": took_s, "exported": made}

        yield [
            *(case_of(url, meter, payers[:count], options.events) for count in counts),
            Case("from a request's end to its ledger row", {"Weir": to_ledger}),
            Case("from closed hours to meter events in a file", {"Weir": to_export}),
        ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    add_database_options(parser)
    parser.add_argument(
        "--events", type=int, default=200_000, help="per case (default: %(default)s)"
    )
    parser.add_argument(
        "--organizations",
        type=int,
        nargs="+",
        default=[1, 10, 1000],
        help="numbers of organizations, by case",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=20,
        help="requests timed until their ledger row (default: %(default)s)",
    )


FIGURES = {
    "per_core_s": Figure("events/s of a core"),
    "whole_per_core_s": Figure("settled and rated"),
    "per_s": Figure("events/s"),
    "wall_s": Figure("seconds", ",.2f", "no"),
    "ledger_p50_ms": Figure("p50, ms"),
    "ledger_p90_ms": Figure("p90, ms"),
    "export_s": Figure("seconds of export", ",.2f"),
    "exported": Figure("meter events"),
}
BENCH = Bench(__doc__, FIGURES, prepare, add_options, rounds=1, loop_factory=uvloop.new_event_loop)

if __name__ == "__main__":
    main(BENCH)
