"""Failovers of a real Patroni under load: every request and every token is billed once.

Two api processes with the URL of all hosts, the application role, a billing worker and an exporter
that nothing restarts: each has to find the next primary by itself. With 30 kills (some minutes):

    WEIR_TEST_POSTGRES_KILLS=30 make test-peers PEERS=patroni
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from grpc import StatusCode

from api.cli.stack import child_environment
from chaos.rounds import (
    EXPORT_FILE,
    JOURNALS,
    REQUEST_TIMEOUT_S,
    WAITING,
    Load,
    Part,
    SentRequest,
    Wire,
    audit,
)
from metering.control.queue_reports import LOST, QueueReportRow, QueueReports
from metering.core.models import QuotaDimension
from metering.proof.fsck import CHECKS, fsck
from metering.store.db import psycopg_conninfo
from metering.store.migrations_runner import migrate, prepare_application_role
from metering.worker import worker_command
from tests.conftest import APPLICATION_ROLE, new_home, remove_home
from tests.faults.billed import rate
from tests.faults.patroni_cluster import Cluster, Node, patroni_cluster
from tests.inference.real_servers import needs
from tests.service import MODEL, Service, Stream, running, start, until

pytestmark = [*needs("patroni"), pytest.mark.faults]

# From the first write that the new primary takes to the first admission. Attempts of a process are
# at most 3 s apart.
BACK_MAX_S = 4.0
PROBE_S = 0.05
LEASES = {  # small, so that every failover meets extensions
    "lease_slice_tokens": 16,
    "lease_margin_tokens": 8,
    "hold_expiry_s": 5.0,
    "recovery_interval_s": 0.5,
}
TOKENS_BETWEEN = 500  # received between two failovers
POSTGRES_KILLS = int(os.environ.get("WEIR_TEST_POSTGRES_KILLS", "1"))
LIMITS = {QuotaDimension.TOKENS_PER_MONTH: 10**9, QuotaDimension.CONCURRENT_REQUESTS: 10_000}
FAILURES = {
    "",
    "DATABASE_UNAVAILABLE",  # of the probe
    "Unavailable: DATABASE_UNAVAILABLE",
    "Aborted: INTERRUPTED",  # no extension of the lease in time: billed what was delivered
    "Cancelled: CANCELLED",  # by its client
    "Unavailable: UNAVAILABLE",  # could not connect
}


def freeze(node: Node) -> None:
    """Suspend a machine: it accepts connections and answers nothing. Later it wakes as primary."""
    node.send(signal.SIGSTOP)


# PostgreSQL alone dies, which Patroni notices within a second; a machine dies or freezes with its
# Patroni, whose role ends 20 s later.
FAILOVERS: Sequence[Callable[[Node], None]] = (
    *(Node.kill_postgres,) * POSTGRES_KILLS,
    freeze,
    Node.kill,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a migrated cluster with the application role."""
    home = new_home()
    try:
        with patroni_cluster(home) as found:
            migrate(found.url())
            prepare_application_role(found.url(), APPLICATION_ROLE, password=APPLICATION_ROLE)
            yield found
    finally:
        remove_home(home)


@pytest.fixture(scope="module")
def services(
    tmp_path_factory: pytest.TempPathFactory, cluster: Cluster, model: Path
) -> Iterator[list[Service]]:
    """Yield two api processes of one machine."""
    directory = tmp_path_factory.mktemp("machine")
    (directory / JOURNALS).mkdir()
    with ExitStack() as stack:

        def launch(index: int) -> Service:
            home = directory / f"home{index}"
            home.mkdir()
            (home / "journal").symlink_to(directory / JOURNALS)
            service = Service(
                home,
                cluster.url(user=APPLICATION_ROLE),
                model,
                engine_device="simulated",
                simulated_time_scale=0.5,
                metrics_listen="127.0.0.1:0",
                **LEASES,
            )
            return stack.enter_context(running(service))

        with ThreadPoolExecutor() as threads:
            yield list(threads.map(launch, range(2)))


@contextlib.asynccontextmanager
async def billing(service: Service) -> AsyncIterator[list[Part]]:
    """Run a billing worker and an exporter, which nothing restarts."""
    directory = service.home.parent
    environment = {
        **child_environment(service.settings),
        "WEIR_EXPORT": "file",
        "WEIR_EXPORT_FILE": str(directory / EXPORT_FILE),
    }
    parts = [
        Part("worker", worker_command(), directory / "worker.log"),
        Part("exporter", [sys.executable, "-m", "chaos.exporter"], directory / "exporter.log"),
    ]
    try:
        for part in parts:
            await part.start(environment)
        yield parts
    finally:
        for part in parts:
            await part.stop()


class Probe:
    """Client that begins a short request every `PROBE_S`, and notes when one was admitted."""

    def __init__(self, stream: Stream, sent: list[SentRequest]) -> None:
        self._stream = stream
        self._sent = sent
        self._stopping = False
        self.admitted_at = 0.0
        self.refusals: Counter[tuple[StatusCode, str]] = Counter()
        self.without_delay: list[str] = []

    def stop(self) -> None:
        """Send no more requests."""
        self._stopping = True

    async def admitted_after(self, at: float) -> None:
        """Wait for an admission after this time."""
        await until(lambda: self.admitted_at > at, "an admission")

    async def run(self) -> None:
        """Probe until `stop` is called, then wait for the answers."""
        async with asyncio.TaskGroup() as tasks:
            while not self._stopping:
                tasks.create_task(self._ask())
                await asyncio.sleep(PROBE_S)

    async def _ask(self) -> None:
        frame = start(max_output_tokens=1)
        sent = SentRequest(frame.request_id, 0, time.monotonic())
        self._sent.append(sent)
        await self._stream.send(frame)
        end = await self._stream.end(frame.request_id)
        sent.received = len(self._stream.token_ids(frame.request_id))
        if end.WhichOneof("kind") == "finished":
            sent.reported = end.finished.usage.delivered_token_count
            self.admitted_at = time.monotonic()
        else:
            sent.reported = end.failed.usage.delivered_token_count
            refusal = await self._stream.failed(frame.request_id)
            sent.failure = refusal.reason
            self.refusals[refusal.code, refusal.reason] += 1
            if refusal.retry_after_s is None:
                self.without_delay.append(str(refusal.status))


async def writable(cluster: Cluster) -> float:
    """Wait until the cluster takes a write of another program; return the time."""
    while True:
        with contextlib.suppress(psycopg.OperationalError, TimeoutError):
            async with asyncio.timeout(5):
                connection = await psycopg.AsyncConnection.connect(
                    psycopg_conninfo(cluster.url()), connect_timeout=2, autocommit=True
                )
                async with connection:
                    await connection.execute("CREATE TABLE IF NOT EXISTS written ()")
                    await connection.execute("DROP TABLE written")
                    return time.monotonic()
        await asyncio.sleep(PROBE_S)


async def settled(cluster: Cluster) -> None:
    """Wait until every hold has ended, and all usage is rated and exported."""

    def nothing_left() -> bool:
        with (
            contextlib.suppress(psycopg.OperationalError),
            psycopg.connect(psycopg_conninfo(cluster.url()), autocommit=True) as connection,
        ):
            counts = {
                name: (connection.execute(query).fetchone() or [0])[0]
                for name, query in WAITING.items()
            }
            return not any(counts.values())
        return False

    await until(nothing_left, "all usage to be exported", poll_s=0.2)


async def test_failovers_lose_and_double_nothing(
    cluster: Cluster, services: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prints for each failover how long the cluster took no writes, and Weir no requests after.

    A client reads no more 2 s after a cancel. If its process is held up for longer, the transport
    takes tokens, which are billed, that it never reads. Here clients read on to the end, so that
    each billed token must have been received.
    """
    monkeypatch.setattr("weir_client.attempt.CANCEL_GRACE_S", REQUEST_TIMEOUT_S)
    tenant = await services[0].tenant(LIMITS)
    backs: list[float] = []
    async with contextlib.AsyncExitStack() as stack:
        parts = await stack.enter_async_context(billing(services[0]))
        wires = [
            await stack.enter_async_context(Wire(service.address).open()) for service in services
        ]
        load = Load(wires, tenant.secret, MODEL, random.Random(7))
        stream = await stack.enter_async_context(services[0].stream(tenant.secret))
        probe = Probe(stream, load.sent)
        async with asyncio.TaskGroup() as tasks:
            clients = tasks.create_task(load.run())
            tasks.create_task(probe.run())
            for fail in FAILOVERS:
                await load.reached(load.received + TOKENS_BETWEEN)
                await asyncio.to_thread(cluster.wait_complete)
                primary = await asyncio.to_thread(lambda: cluster.primary)
                began_at = time.monotonic()
                await asyncio.to_thread(fail, primary)
                writable_at = await writable(cluster)
                await probe.admitted_after(writable_at)
                backs.append(probe.admitted_at - writable_at)
                print(f"{fail.__name__}: {writable_at - began_at:.1f} s, {backs[-1]:.1f} s")
                primary.send(signal.SIGCONT)
                if primary.process is None:
                    cluster.start(primary)
            await load.reached(load.received + TOKENS_BETWEEN)
            load.stop()
            await clients
            probe.stop()
        await settled(cluster)
        assert all(part.pid is not None for part in parts), [part.log_tail() for part in parts]

    outcomes, wrong = await asyncio.to_thread(
        audit, cluster.url(), services[0].home.parent, load.sent
    )
    failures = Counter(outcome.sent.failure for outcome in outcomes)
    print(len(outcomes), "requests:", dict(failures))
    assert not wrong
    assert probe.refusals.keys() == {(StatusCode.UNAVAILABLE, "DATABASE_UNAVAILABLE")}
    assert not probe.without_delay
    assert failures.keys() <= FAILURES
    assert max(backs) <= BACK_MAX_S, backs


async def exchanged(reports: QueueReports) -> list[QueueReportRow]:
    """Exchange reports of a queue as a process does, which tries again while it cannot."""
    while True:
        with contextlib.suppress(*LOST):
            return await reports.exchange(["pool"], b"report", silent_s=600)
        await asyncio.sleep(PROBE_S)


async def test_an_asynchronous_failover_loses_settled_requests_unknown_to_fsck(
    cluster: Cluster, services: list[Service]
) -> None:
    """Lose requests as a whole. Customers can prove it: they have the receipts.

    Reports of queues, whose table is unlogged, are lost too. Processes write and read them again.
    """
    service = services[0]
    tenant = await service.tenant(LIMITS)
    await asyncio.to_thread(cluster.set_synchronous, False)
    await asyncio.to_thread(cluster.wait_complete)  # one that follows later gets everything
    primary = await asyncio.to_thread(lambda: cluster.primary)
    ids = [uuid.uuid4() for _ in range(2)]
    queues = [QueueReports(cluster.url(user=APPLICATION_ROLE), each) for each in ids]
    before = [[row.process_id for row in await exchanged(each)] for each in queues]
    async with service.stream(tenant.secret) as stream:
        senders = primary.senders()
        assert len(senders) == len(cluster.nodes) - 1
        for pid in senders:
            os.kill(pid, signal.SIGSTOP)
        lost = [await stream.finished(await stream.begin()) for _ in range(3)]
        await asyncio.to_thread(primary.kill_postgres)
        await writable(cluster)
        while (end := await stream.end(await stream.begin())).WhichOneof("kind") == "failed":
            pass
        after = [[row.process_id for row in await exchanged(each)] for each in queues]
        for each in queues:
            await each.close()
        await service.no_hold_left(tenant)
        await rate(service)

    assert before == after == [[], ids[:1]]
    receipts = [receipt for finished in (*lost, end.finished) for receipt in finished.receipts]
    assert [receipt.sequence for receipt in receipts] == [1, 2, 3, 1]
    assert len(service.database.events(tenant)) == 1
    assert not [each for each in fsck(cluster.url(), CHECKS) if each.violation_count]
