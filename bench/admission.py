"""Admissions and settlements per second with exact quotas, against a transaction per request.

    python -m bench.admission [--seconds 1.2] [--directory /dev/shm | --database-url URL]
    [--end-users 100000]

One process drives one `HoldStore`, as an api process does. A pair is one admission and its
settlement. Each tenant has five quotas: concurrent requests, requests and tokens per minute, tokens
and money per month, on its key, its project and itself. Receipts are signed.

"Plain" locks the same counters, checks them and writes the same rows in a separate transaction for
each admission and each settlement. It has one connection per concurrent request, at most 64, as
more would only wait.

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
import gc
import itertools
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psycopg
import uvloop

from api.serving import COLLECT_AFTER
from bench.admission_plain import INPUT_TOKENS, OUTPUT_TOKENS, Pair, plain_pair
from bench.harness import Bench, Case, Cases, Figure, Values, main, note
from bench.site import (
    MODEL,
    add_database_options,
    children_of,
    cpu_s,
    create_tenants,
    database,
    postgres_pid,
    quantile,
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

ACTIVE_COUNT = 1000  # end users
CONNECTION_COUNT_MAX = 64
SELECTOR = """
INSERT INTO quotas (subject, subject_id, for_each, dimension, limit_value)
VALUES ('organization', %s, 'end_user', 'cost_picos_per_month', 1000000000000000)
RETURNING id
"""
COPY_END_USERS = "COPY usage_subjects (id, organization_id, kind, name) FROM STDIN"
# Their terms are read from the selector.
COPY_MEMBER_QUOTAS = """
COPY quotas (id, subject, subject_id, within_id, selector_id, dimension, limit_value) FROM STDIN
"""


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
    """

    pair_count: int
    wall_s: float
    cpu_s: float
    database_cpu_s: float
    admit_s: list[float]
    settle_s: list[float]

    def values(self, generator_us: float) -> Values:
        """Compute the figures, less the load generator's CPU per pair."""
        times = {"admit": self.admit_s, "settle": self.settle_s}
        return {
            "pairs_per_s": self.pair_count / self.wall_s,
            "cpu_us": max(self.cpu_s / self.pair_count * 1e6 - generator_us, 0.0),
            "server_us": self.database_cpu_s / self.pair_count * 1e6,
            **{
                f"{name}_{percent}": quantile(values, percent / 100) * 1000
                for name, values in times.items()
                for percent in (50, 99)
            },
        }


def new_admit(payer: Payer, end_user: str = "") -> Admit:
    """Build a typical admission."""
    named: dict[str, Any] = {"end_user": end_user} if end_user else {}  # an older tree has none
    return Admit(
        new_hold_id(),
        payer,
        uuid.uuid4(),
        bytes(32),
        MODEL,
        INPUT_TOKENS,
        OUTPUT_TOKENS,
        1,
        **named,
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


class Stores:
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


def create_end_users(url: str, payer: Payer, count: int) -> list[str]:
    """Create end users of a tenant, each with the limit that a selector gives; return the names.

    Names and ids ascend together, so that every index grows at its end.
    """
    names = [f"user-{number:09}" for number in range(count)]
    ids, quota_ids = (sorted(uuid.uuid4().hex for _ in names) for _ in range(2))
    organization = payer.organization_id
    with psycopg.connect(psycopg_conninfo(url), autocommit=True) as connection:
        [selector] = connection.execute(SELECTOR, (organization,)).fetchone() or ()
        users = (
            f"{each}\t{organization}\tend_user\t{name}\n"
            for each, name in zip(ids, names, strict=True)
        )
        quotas = (
            f"{quota}\tend_user\t{each}\t{organization}\t{selector}\tcost_picos_per_month\t1\n"
            for quota, each in zip(quota_ids, ids, strict=True)
        )
        for statement, rows in ((COPY_END_USERS, users), (COPY_MEMBER_QUOTAS, quotas)):
            with connection.cursor().copy(statement) as copy:
                while lines := "".join(itertools.islice(rows, 10_000)):
                    copy.write(lines)
        connection.execute("VACUUM ANALYZE")
    return names


def end_user_cases(
    stores: Stores, url: str, tenants: list[Payer], generator_us: float, count: int
) -> Cases:
    """Create end users with limits; make the cases of one tenant without, and of one with them."""
    names = create_end_users(url, tenants[1], count)
    active = names[:: max(count // ACTIVE_COUNT, 1)][:ACTIVE_COUNT]

    def case(concurrency: int) -> Case:
        async def without() -> Values:
            return (await stores.group_commit(tenants[:1], concurrency)).values(generator_us)

        async def each() -> Values:
            found = await stores.group_commit(tenants[1:2], concurrency, active)
            return found.values(generator_us)

        title = f"{concurrency} at once, {len(active)} of {count:,} end users"
        return Case(title, {"without": without, "end users": each})

    return [case(64), case(1000)]


@contextlib.asynccontextmanager
async def prepare(options: argparse.Namespace) -> AsyncIterator[Cases]:
    """Fill a database, and yield the cases: with one hot tenant, and with many."""
    with database(options.database_url, options.directory) as url:
        migrate(url)
        many = create_tenants(url, options.tenants)
        stores = Stores(url, options.seconds)
        gc.freeze()  # as in an api process, like the thresholds
        gc.set_threshold(*COLLECT_AFTER)
        generator = await stores.generator(many)
        generator_us = generator.cpu_s / generator.pair_count * 1e6
        note(f"the load generator takes {generator_us:.0f} µs of CPU per pair, left out")

        def case(tenants: list[Payer], title: str, concurrency: int) -> Case:
            async def plain() -> Values:
                count = min(concurrency, CONNECTION_COUNT_MAX)
                return (await stores.plain(tenants, count)).values(generator_us)

            async def grouped() -> Values:
                return (await stores.group_commit(tenants, concurrency)).values(generator_us)

            return Case(f"{concurrency} at once, {title}", {"plain": plain, "Weir": grouped})

        if options.end_users:
            yield end_user_cases(stores, url, many, generator_us, options.end_users)
            return
        yield [
            case(tenants, title, concurrency)
            for tenants, title in ((many[:1], "hot tenant"), (many, f"{len(many)} tenants"))
            for concurrency in (1, 64, 1000)
        ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this driver."""
    add_database_options(parser)
    parser.add_argument(
        "--seconds", type=float, default=1.2, help="per measurement (default: %(default)s)"
    )
    parser.add_argument(
        "--tenants",
        type=int,
        default=1000,
        help="number of tenants in the larger cases (default: %(default)s)",
    )
    parser.add_argument(
        "--end-users", type=int, metavar="COUNT", help="compare with requests of end users instead"
    )


FIGURES = {
    "pairs_per_s": Figure("pairs/s"),
    "cpu_us": Figure("CPU of a pair, µs"),
    "server_us": Figure("PostgreSQL CPU, µs"),
    **{
        f"{name}_{percent}": Figure(f"{label} p{percent}, ms", ",.2f")
        for name, label in {"admit": "admission", "settle": "settlement"}.items()
        for percent in (50, 99)
    },
}
BENCH = Bench(__doc__, FIGURES, prepare, add_options, loop_factory=uvloop.new_event_loop)

if __name__ == "__main__":
    main(BENCH)
