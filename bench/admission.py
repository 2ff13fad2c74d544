"""Admissions and settlements per second with exact quotas, against a transaction per request.

    .venv/bin/python -m bench.admission [--seconds 1.2] [--directory /dev/shm | --database-url URL]
    [--profile] [--end-users 100000]

One process drives one `HoldStore`, as an api process does. A pair is one admission and its
settlement. Each tenant has five quotas: concurrent requests, requests and tokens per minute, tokens
and money per month, on its key, its project and itself. Receipts are signed.

"Plain" locks the same counters, checks them and writes the same rows in a separate transaction for
each admission and each settlement. "pgbench" is PostgreSQL's load generator with the same
statements, which reports the time of both together. Either has one connection per concurrent
request, at most 64, as more would only wait.

All commit durably, so the disk's flush time counts: `--directory` selects another disk for the
server, for example one in memory. CPU times are per pair: of this process without the load
generator's own (measured first, with a store that answers at once), and of the server.

With `--end-users` it compares one tenant's requests with those of the same tenant that name one of
1000 end users in turn, of so many that have a limit from a selector.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import gc
import itertools
import pstats
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Protocol

import psycopg
import uvloop

from bench.admission_peers import (
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    Pair,
    pgbench_binary,
    plain_pair,
    run_pgbench,
)
from bench.harness import (
    MODEL,
    children_of,
    cpu_s,
    create_tenants,
    database,
    postgres_pid,
    quantile_ms,
)
from metering.core.models import Outcome
from metering.holds.holds import HoldStore
from metering.holds.operations import Admit, Admitted, Settle, Settled, new_hold_id
from metering.pricing.prices import TokenPrices
from metering.quotas.quota_rules import Payer, QuotaStates
from metering.receipts.signing import ensure_key, read_key
from metering.store.db import psycopg_conninfo
from metering.store.group_commit import awaited
from metering.store.migrations_runner import migrate
from metering.store.pipeline import Connection

CONNECTION_COUNT_MAX = 64


class Store(Protocol):
    """Protocol of the stores under test."""

    async def admit(self, op: Admit) -> Admitted:
        """Admit a request and take its hold."""
        ...

    async def settle(self, op: Settle) -> Settled:
        """Settle a hold."""
        ...


class AnsweringStore:
    """Store that answers at once, to measure the load generator's own cost."""

    async def admit(self, op: Admit) -> Admitted:
        """Implement `Store.admit`."""
        await asyncio.sleep(0)
        return Admitted(
            op.hold_id,
            OUTPUT_TOKENS,
            TokenPrices(1, "USD", 3, 1, 7),
            QuotaStates((), [], datetime.min),
            datetime.min,
        )

    async def settle(self, op: Settle) -> Settled:
        """Implement `Store.settle`."""
        await asyncio.sleep(0)
        return Settled(
            op.hold_id,
            INPUT_TOKENS,
            0,
            OUTPUT_TOKENS,
            OUTPUT_TOKENS,
            OUTPUT_TOKENS,
            0,
            "USD",
            Outcome.STOP,
        )


class AwaitedStore(HoldStore):
    """`HoldStore` with calls that can be awaited."""

    async def admit(self, op: Admit) -> Admitted:
        """Implement `Store.admit`."""
        admitted = await awaited(partial(self.begin_admit, op), lambda _: None)
        assert isinstance(admitted, Admitted)
        return admitted

    async def settle(self, op: Settle) -> Settled:
        """Implement `Store.settle`."""
        settled = await self._commits.submit(op)
        assert isinstance(settled, Settled)
        return settled


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one case, with times in seconds.

    `cpu_s` is the CPU time of this process, `database_cpu_s` that of the server, to the clock tick.
    If `settle_s` is empty, `admit_s` has the times of whole pairs.
    """

    pair_count: int
    wall_s: float
    cpu_s: float
    database_cpu_s: float
    admit_s: list[float]
    settle_s: list[float] = field(default_factory=list)

    @property
    def pairs_per_s(self) -> float:
        """Pairs of an admission and its settlement per second."""
        return self.pair_count / self.wall_s

    def row(self, generator_us: float) -> str:
        """Format a line of the table. `generator_us`, the generator's CPU per pair, is deducted."""
        times = (
            f"{quantile_ms(values, share):>9.2f}"
            for values in (self.admit_s, self.settle_s)
            for share in (0.5, 0.99)
        )
        cpu_us = self.cpu_s / max(self.pair_count, 1) * 1e6
        own = f"{max(cpu_us - generator_us, 0):>9.0f}" if self.cpu_s else f"{'':>9}"
        return (
            f"{self.pairs_per_s:>9,.0f} {' '.join(times)} {own}"
            f" {self.database_cpu_s / max(self.pair_count, 1) * 1e6:>9.0f}"
        )


def new_admit(payer: Payer, end_user: str = "") -> Admit:
    """Build a typical admission."""
    return Admit(
        new_hold_id(),
        payer,
        uuid.uuid4(),
        bytes(32),
        MODEL,
        INPUT_TOKENS,
        OUTPUT_TOKENS,
        1,
        end_user=end_user,
    )


def store_pair(store: Store, end_users: Iterator[str] | None = None) -> Pair:
    """Make a pair that admits and settles with a store, for these end users in turn."""

    async def pair(payer: Payer) -> tuple[float, float]:
        op = new_admit(payer, "" if end_users is None else next(end_users))
        begin = time.perf_counter()
        await store.admit(op)
        admitted = time.perf_counter()
        await store.settle(
            Settle(op.hold_id, INPUT_TOKENS, 0, OUTPUT_TOKENS, OUTPUT_TOKENS, Outcome.STOP)
        )
        return admitted - begin, time.perf_counter() - admitted

    return pair


async def measure(
    pair: Pair,
    tenants: list[Payer],
    concurrency: int,
    seconds: float,
    database: list[int],
    pair_count_min: int = 0,
) -> Result:
    """Run concurrent clients with pairs for tenants in turn, for a number of seconds.

    Completes at least `pair_count_min` pairs. `database` has the ids of the server's processes.
    """
    payers = itertools.cycle(tenants)
    admit_s: list[float] = []
    settle_s: list[float] = []
    database_cpu, begin, cpu = cpu_s(database), time.perf_counter(), time.process_time()

    async def client() -> None:
        while time.perf_counter() - begin < seconds or len(admit_s) < pair_count_min:
            admitted, settled = await pair(next(payers))
            admit_s.append(admitted)
            settle_s.append(settled)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(client())
    wall_s, own_s = time.perf_counter() - begin, time.process_time() - cpu
    return Result(len(admit_s), wall_s, own_s, cpu_s(database) - database_cpu, admit_s, settle_s)


class Cases:
    """The implementations of a pair under test, on one server. Each method measures one of them."""

    def __init__(self, database_url: str, seconds: float) -> None:
        self._url = database_url
        self._seconds = seconds
        self._postgres = postgres_pid(database_url)
        with tempfile.TemporaryDirectory() as directory:
            key_file = Path(directory) / "key.pem"
            ensure_key(key_file)
            self._signer = read_key(key_file)

    def _database(self) -> list[int]:
        return [self._postgres, *children_of(self._postgres)]

    async def generator(self, tenants: list[Payer]) -> Result:
        """Measure a store that answers at once, which shows the load generator's own cost."""
        return await measure(
            store_pair(AnsweringStore()), tenants, CONNECTION_COUNT_MAX, self._seconds / 3, []
        )

    async def group_commit(
        self, tenants: list[Payer], concurrency: int, end_users: Sequence[str] = ()
    ) -> Result:
        """Measure a `HoldStore` in this process."""
        store = AwaitedStore(self._url, uuid.uuid4(), signer=self._signer)
        pair = store_pair(store, itertools.cycle(end_users) if end_users else None)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(store.run())
            await self._warm_up(pair, tenants, concurrency)
            if end_users:  # until each is known
                await measure(
                    pair, tenants, concurrency, 0.0, [], pair_count_min=2 * len(end_users)
                )
            result = await measure(pair, tenants, concurrency, self._seconds, self._database())
            running.cancel()
        return result

    async def _warm_up(self, pair: Pair, tenants: list[Payer], concurrency: int) -> None:
        """Run pairs until plans and pages are cached and the store knows each tenant."""
        await measure(
            pair, tenants, concurrency, self._seconds / 5, [], pair_count_min=len(tenants)
        )

    async def plain(self, tenants: list[Payer], concurrency: int) -> Result:
        """Measure a separate transaction for each admission and each settlement."""
        idle: asyncio.Queue[Connection] = asyncio.Queue()
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(concurrency):
                connection = await psycopg.AsyncConnection.connect(
                    psycopg_conninfo(self._url), autocommit=True
                )
                idle.put_nowait(await stack.enter_async_context(connection))
            await self._warm_up(plain_pair(idle), tenants, concurrency)
            return await measure(
                plain_pair(idle), tenants, concurrency, self._seconds, self._database()
            )

    def pgbench(self, binary: Path, tenants: list[Payer], concurrency: int) -> Result:
        """Measure the same pairs, sent by pgbench."""
        before = cpu_s([self._postgres])
        ran = run_pgbench(binary, self._url, tenants, concurrency, self._seconds)
        # Its connections are closed, so their time is included in the server's.
        return Result(ran.pair_count, ran.wall_s, 0.0, cpu_s([self._postgres]) - before, ran.pair_s)


def print_table(runner: asyncio.Runner, cases: Cases, many: list[Payer]) -> None:
    """Print every case, with one hot tenant and with many."""
    generator = runner.run(cases.generator(many))
    generator_us = generator.cpu_s / generator.pair_count * 1e6
    binary = pgbench_binary()
    print(
        "no pgbench: neither the embedded server nor this system brings one"
        if binary is None
        else f"pgbench: {binary.parent}"
    )
    print(f"the load generator takes {generator_us:.0f} µs of CPU per pair, left out below")
    print(
        f"{'':35}{'pairs/s':>9} {'admit p50':>9} {'p99 ms':>9} {'end p50':>9} {'p99 ms':>9}"
        f" {'CPU µs':>9} {'server µs':>9}"
    )
    for tenants, title in ((many[:1], "hot tenant"), (many, f"{len(many)} tenants")):
        for concurrency in (1, 64, 1000):
            case = f"{concurrency:>4} at once, {title:<14}"
            if concurrency <= CONNECTION_COUNT_MAX:
                plain = runner.run(cases.plain(tenants, concurrency))
                print(f"{case}{'plain':<8}{plain.row(generator_us)}", flush=True)
                if binary is not None:
                    pgbench = cases.pgbench(binary, tenants, concurrency)
                    print(f"{case}{'pgbench':<8}{pgbench.row(0.0)}", flush=True)
            grouped = runner.run(cases.group_commit(tenants, concurrency))
            ratio = grouped.pairs_per_s / plain.pairs_per_s
            print(f"{case}{'store':<8}{grouped.row(generator_us)}   {ratio:.1f}x plain", flush=True)


# Every end user of the tenant with the limit that its selector gives.
END_USERS = """
WITH selector AS (
    INSERT INTO quotas (subject, subject_id, for_each, dimension, limit_value)
    VALUES ('organization', %(organization)s, 'end_user', 'cost_picos_per_month', 1000000000000000)
    RETURNING id, subject_id, dimension, limit_value
), members AS (
    INSERT INTO usage_subjects (organization_id, kind, name)
    SELECT %(organization)s, 'end_user', 'user-' || number FROM generate_series(1, %(count)s) number
    RETURNING id
)
SELECT selector.id, members.id FROM selector, members
"""
MEMBER_QUOTAS = """
INSERT INTO quotas (subject, subject_id, within_id, selector_id, dimension, limit_value)
SELECT 'end_user', u.id, s.subject_id, s.id, s.dimension, s.limit_value
FROM quotas s
JOIN usage_subjects u ON u.organization_id = s.subject_id
WHERE s.subject_id = %(organization)s AND s.for_each = 'end_user'
"""
ACTIVE_COUNT = 1000


def print_end_users(
    runner: asyncio.Runner, cases: Cases, url: str, tenants: list[Payer], count: int
) -> None:
    """Print the pairs per second of a tenant without end users, and of one with many, in turn."""
    values = {"organization": tenants[1].organization_id, "count": count}
    with psycopg.connect(psycopg_conninfo(url), autocommit=True) as connection:
        connection.execute(END_USERS, values)
        connection.execute(MEMBER_QUOTAS, values)
        connection.execute("ANALYZE")
    step = max(count // ACTIVE_COUNT, 1)
    active = [f"user-{number}" for number in range(1, count + 1, step)][:ACTIVE_COUNT]
    for concurrency in (64, 1000):
        without: list[Result] = []
        with_end_users: list[Result] = []
        for _ in range(3):
            without.append(runner.run(cases.group_commit(tenants[:1], concurrency)))
            with_end_users.append(runner.run(cases.group_commit(tenants[1:2], concurrency, active)))
        rates: list[float] = []
        for title, results in (
            ("without end users", without),
            (f"with {len(active)} of {count:,} end users", with_end_users),
        ):
            best = max(results, key=lambda each: each.pairs_per_s)
            least = min((each.cpu_s + each.database_cpu_s) / each.pair_count for each in results)
            rates.append(best.pairs_per_s)
            print(
                f"{concurrency:>4} at once, {title:<34}{best.pairs_per_s:>8,.0f} pairs/s,"
                f" {least * 1e6:>4.0f} µs of CPU at least",
                flush=True,
            )
        print(f"{'':14}{rates[1] / rates[0]:.0%}", flush=True)


def main() -> None:
    """Measure every case and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=1.2,
        help="seconds per case, of fourteen (default: %(default)s)",
    )
    parser.add_argument("--database-url", help="a migrated database to fill with tenants instead")
    parser.add_argument(
        "--directory", help="data directory of the temporary server (default: the system's)"
    )
    parser.add_argument(
        "--tenants",
        type=int,
        default=1000,
        help="number of tenants in the larger cases (default: %(default)s)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="profile 64 concurrent clients with many tenants instead",
    )
    parser.add_argument(
        "--end-users", type=int, metavar="COUNT", help="compare with requests of end users instead"
    )
    options = parser.parse_args()
    with (
        database(options.database_url, options.directory) as url,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        migrate(url)
        many = create_tenants(url, options.tenants)
        cases = Cases(url, options.seconds)
        gc.freeze()  # as in an api process
        if options.profile:
            with cProfile.Profile() as profile:
                runner.run(cases.group_commit(many, 64))
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        elif options.end_users:
            print_end_users(runner, cases, url, many, options.end_users)
        else:
            print_table(runner, cases, many)


if __name__ == "__main__":
    main()
