"""Admissions and settlements per second, exact against every quota, beside a plain transaction per request on the same server.

    .venv/bin/python -m bench.admission [--seconds 1.2] [--directory /dev/shm | --database-url URL] [--profile]

One process drives one `HoldStore`, as an api process does. A pair is one admission and its settlement. Each tenant has five quotas:
concurrent requests, requests and tokens per minute, tokens and money per month, on its key, its project and itself.

"Plain" locks the same counters, checks them and writes the same rows in a transaction of its own for each admission and each
settlement, on as many connections as there are requests at once, at most 64: more at once only wait for one of these.

Both commit durably, so what the disk takes for a flush counts: `--directory` names another disk for the server, one in memory to
see what remains without it. `CPU` is this process's time by the pairs, the load generator's share in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import gc
import itertools
import pstats
import shutil
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import uvloop

from metering import embedded_postgres
from metering.db import psycopg_conninfo
from metering.hold_rows import Connection
from metering.holds import HoldStore
from metering.migrations_runner import migrate
from metering.operations import Admit, Outcome, Payer, Settle

MODEL = "bench"
INPUT_TOKENS, OUTPUT_TOKENS = 100, 20
CONNECTION_COUNT_MAX = 64
QUOTAS = """
INSERT INTO quotas (subject, subject_id, dimension, limit_value)
SELECT subject, id, dimension, 1000000000000000
FROM (VALUES ('organization', %(organization)s::uuid, 'cost_picos_per_month'),
             ('organization', %(organization)s, 'tokens_per_month'), ('project', %(project)s, 'requests_per_minute'),
             ('api_key', %(key)s, 'tokens_per_minute'), ('api_key', %(key)s, 'concurrent_requests')) AS v(subject, id, dimension)
"""
Pair = Callable[[Payer], Awaitable[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Result:
    """One case. Times in seconds."""

    pair_count: int
    wall_s: float
    cpu_s: float
    admit_s: list[float]
    settle_s: list[float]

    @property
    def pairs_per_s(self) -> float:
        return self.pair_count / self.wall_s

    def row(self) -> str:
        """The numbers of one line of the table."""
        return (
            f"{self.pairs_per_s:>9,.0f} {quantile_ms(self.admit_s, 0.5):>9.2f} {quantile_ms(self.admit_s, 0.99):>9.2f} "
            f"{quantile_ms(self.settle_s, 0.5):>9.2f} {quantile_ms(self.settle_s, 0.99):>9.2f} "
            f"{self.cpu_s / max(self.pair_count, 1) * 1e6:>9.0f}"
        )


def quantile_ms(values_s: list[float], share: float) -> float:
    """The value below which a share of the values lies, in ms."""
    return sorted(values_s)[int(share * (len(values_s) - 1))] * 1000 if values_s else float("nan")


def create_tenants(database_url: str, count: int) -> list[Payer]:
    """Tenants with a key and five quotas each, and a price for the model."""
    tenants = []
    with psycopg.connect(psycopg_conninfo(database_url)) as connection:
        connection.execute(
            "INSERT INTO price_versions (model, currency_code, input_picos_per_token, cached_input_picos_per_token, "
            "output_picos_per_token, effective_at) VALUES (%s, 'USD', 3, 1, 7, now()) ON CONFLICT DO NOTHING",
            (MODEL,),
        )
        for _ in range(count):
            payer = Payer(uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), "USD")
            name = f"bench-{payer.organization_id.hex}"
            ids = {"organization": payer.organization_id, "project": payer.project_id, "key": payer.api_key_id}
            values = ids | {"name": name, "hash": payer.api_key_id.bytes * 2}
            connection.execute(
                "INSERT INTO organizations (id, name, currency_code) VALUES (%(organization)s, %(name)s, 'USD')", values
            )
            connection.execute(
                "INSERT INTO projects (id, organization_id, name) VALUES (%(project)s, %(organization)s, 'bench')", values
            )
            connection.execute(
                "INSERT INTO api_keys (id, project_id, name, prefix, secret_hash, scopes) "
                "VALUES (%(key)s, %(project)s, 'bench', %(name)s, %(hash)s, '{inference}')",
                values,
            )
            connection.execute(QUOTAS, ids)
            tenants.append(payer)
    return tenants


def new_admit(payer: Payer) -> Admit:
    """A request like all others."""
    return Admit(uuid.uuid4(), payer, uuid.uuid4(), bytes(32), MODEL, INPUT_TOKENS, OUTPUT_TOKENS, 1)


def group_commit_pair(store: HoldStore) -> Pair:
    """Through the store."""

    async def pair(payer: Payer) -> tuple[float, float]:
        op = new_admit(payer)
        begin = time.perf_counter()
        await store.admit(op)
        admitted = time.perf_counter()
        await store.settle(Settle(op.hold_id, INPUT_TOKENS, 0, OUTPUT_TOKENS, OUTPUT_TOKENS, Outcome.STOP))
        return admitted - begin, time.perf_counter() - admitted

    return pair


LOCK = """
SELECT c.quota_id, c.window_start, q.dimension, q.limit_value - c.used - c.held
FROM quota_counters c JOIN quotas q ON q.id = c.quota_id
WHERE q.subject_id = ANY(%s) AND c.window_start = CASE
    WHEN dimension = 'concurrent_requests' THEN 'epoch'
    ELSE date_trunc(CASE WHEN dimension LIKE '%%minute' THEN 'minute' ELSE 'month' END, %s::timestamptz, 'UTC') END
ORDER BY c.quota_id, c.window_start FOR UPDATE OF c
"""
OPEN_WINDOWS = """
INSERT INTO quota_counters (quota_id, window_start)
SELECT id, CASE WHEN dimension = 'concurrent_requests' THEN 'epoch'
           ELSE date_trunc(CASE WHEN dimension LIKE '%%minute' THEN 'minute' ELSE 'month' END, %s::timestamptz, 'UTC') END
FROM quotas WHERE subject_id = ANY(%s) ORDER BY id ON CONFLICT DO NOTHING
"""
CHARGE = """
UPDATE quota_counters c SET used = c.used + v.used, held = c.held + v.held
FROM unnest(%s::uuid[], %s::timestamptz[], %s::bigint[], %s::bigint[]) AS v(quota_id, window_start, used, held)
WHERE c.quota_id = v.quota_id AND c.window_start = v.window_start
"""
PLAIN_HOLD = """
INSERT INTO holds (id, organization_id, project_id, api_key_id, request_id, payload_hash, model, price_version_id, labels, owner_id,
                   input_token_count, leased_token_count, quota_ids, expires_at)
SELECT %s, %s, %s, %s, %s, %s, model, id, '{}', %s, %s, %s, %s, now() + interval '1 minute' FROM price_versions WHERE model = %s
"""
PLAIN_END = "UPDATE holds SET state = 'settled', delivered_token_count = %s, ended_at = now() WHERE id = %s AND state = 'held'"
PLAIN_EVENT = """
INSERT INTO usage_events (hold_id, organization_id, project_id, api_key_id, request_id, model, outcome, input_token_count,
    cached_input_token_count, generated_token_count, delivered_token_count, billed_token_count, price_version_id, cost_picos,
    labels, admitted_at)
SELECT id, organization_id, project_id, api_key_id, request_id, model, 'stop', input_token_count, 0, %s, %s, %s, price_version_id,
       %s, labels, admitted_at FROM holds WHERE id = %s
"""
AMOUNTS = {  # per dimension: held by a request, and used by it once it has ended
    "concurrent_requests": (1, 0),
    "requests_per_minute": (0, 0),
    "tokens_per_minute": (INPUT_TOKENS + OUTPUT_TOKENS,) * 2,
    "tokens_per_month": (INPUT_TOKENS + OUTPUT_TOKENS,) * 2,
    "cost_picos_per_month": (INPUT_TOKENS * 3 + OUTPUT_TOKENS * 7,) * 2,
}


def plain_pair(idle: asyncio.Queue[Connection]) -> Pair:
    """A transaction for the admission and one for the settlement, each on a connection of its own."""
    owner_id = uuid.uuid4()

    async def charge(connection: Connection, payer: Payer, now: object, *, ends: bool) -> list[uuid.UUID]:
        subjects = list(payer.subject_ids)
        async with connection.pipeline():
            await connection.execute("BEGIN")
            locked = await connection.execute(LOCK, (subjects, now))
        rows = await locked.fetchall()
        if not rows:
            await connection.execute(OPEN_WINDOWS, (now, subjects))
            rows = await (await connection.execute(LOCK, (subjects, now))).fetchall()
        assert all(room >= AMOUNTS[dimension][0] for _, _, dimension, room in rows)
        held = [-AMOUNTS[row[2]][0] if ends else AMOUNTS[row[2]][0] for row in rows]
        used = [AMOUNTS[row[2]][1] if ends else int(row[2] == "requests_per_minute") for row in rows]
        await connection.execute(CHARGE, ([row[0] for row in rows], [row[1] for row in rows], used, held))
        return [row[0] for row in rows]

    async def pair(payer: Payer) -> tuple[float, float]:
        op, now = new_admit(payer), time.strftime("%Y-%m-%d %H:%M:%S+00", time.gmtime())
        ids = (op.hold_id, payer.organization_id, payer.project_id, payer.api_key_id, op.request_id, op.payload_hash, owner_id)
        begin = time.perf_counter()
        connection = await idle.get()
        quota_ids = await charge(connection, payer, now, ends=False)
        async with connection.pipeline():
            await connection.execute(PLAIN_HOLD, (*ids, INPUT_TOKENS, OUTPUT_TOKENS, quota_ids, MODEL))
            await connection.execute("COMMIT")
        idle.put_nowait(connection)
        admitted = time.perf_counter()
        connection = await idle.get()
        await charge(connection, payer, now, ends=True)
        async with connection.pipeline():
            await connection.execute(PLAIN_END, (OUTPUT_TOKENS, op.hold_id))
            cost = AMOUNTS["cost_picos_per_month"][1]
            await connection.execute(PLAIN_EVENT, (OUTPUT_TOKENS, OUTPUT_TOKENS, OUTPUT_TOKENS, cost, op.hold_id))
            await connection.execute("COMMIT")
        idle.put_nowait(connection)
        return admitted - begin, time.perf_counter() - admitted

    return pair


async def measure(pair: Pair, tenants: list[Payer], concurrency: int, seconds: float) -> Result:
    """So many clients at once, each doing pairs for tenants in turn until the time is over."""
    payers = itertools.cycle(tenants)
    admit_s: list[float] = []
    settle_s: list[float] = []
    begin, cpu = time.perf_counter(), time.process_time()

    async def client() -> None:
        while time.perf_counter() - begin < seconds:
            admitted, settled = await pair(next(payers))
            admit_s.append(admitted)
            settle_s.append(settled)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(client())
    return Result(len(admit_s), time.perf_counter() - begin, time.process_time() - cpu, admit_s, settle_s)


async def measure_group_commit(database_url: str, tenants: list[Payer], concurrency: int, seconds: float) -> Result:
    """With a store of this process."""
    store = HoldStore(database_url, uuid.uuid4())
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(store.run())
        await measure(group_commit_pair(store), tenants, concurrency, seconds / 5)  # plans and pages are warm then
        result = await measure(group_commit_pair(store), tenants, concurrency, seconds)
        running.cancel()
    return result


async def measure_plain(database_url: str, tenants: list[Payer], concurrency: int, seconds: float) -> Result:
    """With a transaction for each request."""
    idle: asyncio.Queue[Connection] = asyncio.Queue()
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(min(concurrency, CONNECTION_COUNT_MAX)):
            connection = await psycopg.AsyncConnection.connect(psycopg_conninfo(database_url), autocommit=True)
            idle.put_nowait(await stack.enter_async_context(connection))
        await measure(plain_pair(idle), tenants, concurrency, seconds / 5)
        return await measure(plain_pair(idle), tenants, concurrency, seconds)


@contextlib.contextmanager
def server(database_url: str | None, directory: str | None) -> Iterator[str]:
    """The named database, or a server of our own in a new directory under the named one."""
    if database_url:
        yield database_url
        return
    home = Path(tempfile.mkdtemp(prefix="weir-bench-", dir=directory))
    running = embedded_postgres.start(home / "postgres")
    try:
        yield running.url
    finally:
        running.stop()
        shutil.rmtree(home, ignore_errors=True)


def main() -> None:
    """Measure every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.2, help="per case; there are ten (default: %(default)s)")
    parser.add_argument("--database-url", help="a migrated database may be named; it is filled with tenants")
    parser.add_argument("--directory", help="where a server of our own keeps its data (default: that of temporary files)")
    parser.add_argument("--tenants", type=int, default=1000, help="of the cases with many (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="profile 64 at once with many tenants instead")
    options = parser.parse_args()
    with server(options.database_url, options.directory) as url, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        migrate(url)
        many = create_tenants(url, options.tenants)
        gc.freeze()  # as an api process does
        if options.profile:
            with cProfile.Profile() as profile:
                runner.run(measure_group_commit(url, many, 64, options.seconds))
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            return
        print(f"{'':33}{'pairs/s':>9} {'admit p50':>9} {'p99 ms':>9} {'end p50':>9} {'p99 ms':>9} {'CPU µs':>9}")
        for tenants, title in ((many[:1], "hot tenant"), (many, f"{len(many)} tenants")):
            for concurrency in (1, 64, 1000):
                grouped = runner.run(measure_group_commit(url, tenants, concurrency, options.seconds))
                if concurrency <= CONNECTION_COUNT_MAX:
                    plain = runner.run(measure_plain(url, tenants, concurrency, options.seconds))
                    print(f"{concurrency:>4} at once, {title:<14}{'plain':<6}{plain.row()}", flush=True)
                ratio = grouped.pairs_per_s / plain.pairs_per_s
                print(f"{concurrency:>4} at once, {title:<14}{'store':<6}{grouped.row()}   {ratio:.1f}x plain", flush=True)


if __name__ == "__main__":
    main()
