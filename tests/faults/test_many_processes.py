"""Four api processes on one database, more demand than the quotas allow, cancels, and a kill -9.

No limit is exceeded at any commit: a trigger checks every counter in each transaction, and a
second check computes the counters from the holds, snapshot after snapshot. No limit stays unused:
after a sweep, further requests get the rest.

The full test, in every dimension (some minutes):

    WEIR_TEST_DIMENSIONS=all WEIR_TEST_REQUESTS=2000 WEIR_TEST_TENANTS=1000 pytest
    tests/faults/test_many_processes.py
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from weir.v1 import inference_service_pb2_grpc as pb_grpc

from metering.core.models import QuotaDimension, QuotaKey, QuotaSubject, QuotaTerms
from metering.ledger.ledger import current_month, month_after
from metering.plans.prepaid import grant_credit, refresh, set_prepaid
from metering.quotas.quota_admin import set_quota
from metering.store.db import create_engine, create_sessions
from metering.tenants.api_keys import create_api_key
from metering.tenants.key_terms import KeyTerms
from metering.tenants.tenants import create_organization, create_project
from tests.conftest import new_database
from tests.metering.hold_world import HoldWorld
from tests.metering.invariants import check_invariants, find_violations
from tests.service import (
    INPUT_PICOS,
    OUTPUT_PICOS,
    PATIENCE_S,
    Service,
    Stream,
    Tenant,
    bearer,
    price_model,
    running,
    start,
    until,
)

pytestmark = pytest.mark.faults

PROCESS_COUNT = 4
# In each run; half of them of one tenant.
REQUEST_COUNT = int(os.environ.get("WEIR_TEST_REQUESTS", "400"))
SMALL_TENANT_COUNT = int(os.environ.get("WEIR_TEST_TENANTS", "20"))
INPUT_TOKENS, OUTPUT_TOKENS = 10, 4
CANCELLED_SHARE = 0.2
STREAMS_PER_CONNECTION = 100  # the service's own limit
ROUND = 10  # concurrent requests that use up the rest of a limit

# Amount of a limit that one request uses.
COST_PICOS = INPUT_TOKENS * INPUT_PICOS + OUTPUT_TOKENS * OUTPUT_PICOS
BY_MEASURE = {
    "concurrent_requests": 1,
    "requests": 1,
    "tokens": INPUT_TOKENS + OUTPUT_TOKENS,
    "input_tokens": INPUT_TOKENS,
    "output_tokens": OUTPUT_TOKENS,
    "cost_picos": COST_PICOS,
    "prepaid_credit_picos": COST_PICOS,
}
DEMAND = {each: BY_MEASURE[each.partition("_per_")[0]] for each in QuotaDimension}
USUAL = (
    QuotaDimension.CONCURRENT_REQUESTS,
    QuotaDimension.OUTPUT_TOKENS_PER_MINUTE,
    QuotaDimension.COST_PICOS_PER_MONTH,
    QuotaDimension.PREPAID_CREDIT_PICOS,
)
PROVED = tuple(DEMAND) if os.environ.get("WEIR_TEST_DIMENSIONS") == "all" else USUAL
WATCH = """
CREATE TABLE overdrawn (quota_id uuid, used bigint, held bigint, limit_value bigint);
CREATE FUNCTION note_overdrawn() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO overdrawn
    SELECT c.quota_id, c.used, c.held, q.limit_value FROM quota_counters c
    JOIN quotas q ON q.id = c.quota_id
    WHERE c.quota_id = NEW.quota_id AND c.window_start = NEW.window_start
    AND c.used + c.held > q.limit_value;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER note_overdrawn AFTER INSERT OR UPDATE ON quota_counters
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note_overdrawn();
"""


@pytest.fixture(scope="module")
def watched_database(postgres_server: str, template_database: str) -> Iterator[str]:
    """Yield a database with a frozen clock, so that no window ends, that notes exceeded limits."""
    with new_database(postgres_server, template=template_database) as url, HoldWorld(url) as world:
        world.execute(WATCH)
        asyncio.run(set_price_at(url))
        yield url


async def set_price_at(database_url: str) -> None:
    """Set a price for the model."""
    engine = create_engine(database_url, pool_size=1)
    async with create_sessions(engine).begin() as session:
        await price_model(session)
    await engine.dispose()


@pytest.fixture(scope="module")
def services(
    tmp_path_factory: pytest.TempPathFactory, watched_database: str, model: Path
) -> Iterator[list[Service]]:
    """Yield processes of one machine, which recover each other's journals."""
    directory = tmp_path_factory.mktemp("machine")
    (directory / "journal").mkdir()
    with ExitStack() as stack:

        def launch(index: int) -> Service:
            home = directory / f"home{index}"
            home.mkdir()
            (home / "journal").symlink_to(directory / "journal")
            service = Service(
                home, watched_database, model, engine_device="simulated", recovery_interval_s=0.2
            )
            return stack.enter_context(running(service))

        with ThreadPoolExecutor(PROCESS_COUNT) as threads:
            launched = list(threads.map(launch, range(PROCESS_COUNT)))
        yield launched


class SecondPoll:
    """Thread that checks the invariants on one snapshot after another during the block."""

    def __init__(self, database_url: str) -> None:
        self.found: list[str] = []
        self.poll_count = 0
        self._database_url = database_url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="second look")

    def __enter__(self) -> SecondPoll:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._over.wait(0.1):
            self.found += find_violations(self._database_url)
            self.poll_count += 1


@asynccontextmanager
async def streams(
    services: Sequence[Service], tenants: Sequence[Tenant]
) -> AsyncIterator[dict[tuple[int, str], Stream]]:
    """Open one stream per tenant and process, as many on one connection as it allows."""
    opened: dict[tuple[int, str], Stream] = {}
    async with AsyncExitStack() as stack:
        for service in services:
            for first in range(0, len(tenants), STREAMS_PER_CONNECTION):
                stub = pb_grpc.InferenceServiceStub(
                    await stack.enter_async_context(service.channel())
                )
                for tenant in tenants[first : first + STREAMS_PER_CONNECTION]:
                    opened[service.pid, tenant.name] = Stream(
                        stub.Generate(metadata=bearer(tenant.secret))
                    )
        readers = [asyncio.ensure_future(stream.read_all()) for stream in opened.values()]
        try:
            yield opened
        finally:
            for stream in opened.values():
                stream.call.cancel()
            await asyncio.wait(readers, timeout=PATIENCE_S)


@pytest.mark.parametrize("dimension", PROVED, ids=str)
async def test_four_processes_give_out_exactly_what_a_quota_allows(
    services: list[Service], watched_database: str, dimension: QuotaDimension
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    small_share = max(REQUEST_COUNT // SMALL_TENANT_COUNT // 4, 1)  # half of a tenant's requests
    hot_limit, small_limit = (
        share * DEMAND[dimension] for share in (REQUEST_COUNT // 8, small_share)
    )
    limits = [hot_limit] + [small_limit] * SMALL_TENANT_COUNT
    hot, *small = await tenants(services[0], dimension, limits)
    victim = rng.choice(services)

    with SecondPoll(watched_database) as second_poll:
        await storm(services, victim, hot, small, rng)
        await until(
            lambda: services[0].database.held_hold_count() == 0,
            "the others to end what the killed process held",
        )
        await asyncio.to_thread(victim.start)
        async with asyncio.TaskGroup() as tasks:
            for tenant, limit in (
                (hot, hot_limit),
                *((tenant, small_limit) for tenant in small[:4]),
            ):
                tasks.create_task(use_up(services, tenant, dimension, limit))

    assert services[0].database.rows("SELECT * FROM overdrawn") == []
    assert second_poll.found == []
    assert second_poll.poll_count > 1
    check_invariants(watched_database, all_ended=True)


async def tenants(
    service: Service, dimension: QuotaDimension, limits: Sequence[int]
) -> list[Tenant]:
    """Create a tenant for each limit, in one transaction: one by one would take too long."""
    made = []
    async with service.session() as session:
        for limit in limits:
            name = f"t{uuid.uuid4().hex[:20]}"
            organization = await create_organization(
                session, name=name, currency_code="USD", actor="test"
            )
            project = await create_project(session, organization=name, name="main", actor="test")
            key, secret = await create_api_key(
                session,
                organization=name,
                project="main",
                name="key",
                terms=KeyTerms(scopes=("inference",)),
                lifetime=None,
                actor="test",
            )
            if dimension is QuotaDimension.PREPAID_CREDIT_PICOS:
                await pay_in_advance(session, name, limit)
            else:
                of = QuotaSubject.ORGANIZATION
                await set_quota(
                    session,
                    subject=of,
                    subject_ref=name,
                    key=QuotaKey(dimension),
                    terms=QuotaTerms(limit),
                    actor="test",
                )
            made.append(Tenant(name, organization.id, project.id, key, secret))
    return made


async def pay_in_advance(session: AsyncSession, organization: str, amount_picos: int) -> None:
    """Limit an organization to prepaid credit that also covers the next month."""
    owner, _ = await set_prepaid(session, organization=organization, prepaid=True, actor="test")
    last = month_after(await current_month(session))
    await grant_credit(
        session,
        organization=organization,
        amount_picos=amount_picos,
        last_month=last,
        reason="paid",
        actor="test",
    )
    await refresh(session, owner.id, actor="test", granted_picos=amount_picos)


async def storm(
    services: list[Service], victim: Service, hot: Tenant, small: list[Tenant], rng: random.Random
) -> None:
    """Send all requests at once, cancel some, and kill one process when half have been sent."""
    requested: list[tuple[Stream, str]] = []
    async with streams(services, [hot, *small]) as by_process, asyncio.TaskGroup() as tasks:
        pids = {service.pid for service in services}
        for number in range(REQUEST_COUNT):
            if number == REQUEST_COUNT // 2:
                await until(
                    lambda: any(stream.ends(request_id) for stream, request_id in requested),
                    "the first answers",
                )
                pids.discard(victim.pid)
                victim.kill()
            tenant = hot if number % 2 else rng.choice(small)
            stream = by_process[rng.choice(sorted(pids)), tenant.name]
            request_id = await stream.begin(max_output_tokens=OUTPUT_TOKENS)
            requested.append((stream, request_id))
            if rng.random() < CANCELLED_SHARE / 2:
                await stream.cancel(request_id)
            elif rng.random() < CANCELLED_SHARE / 2:
                tasks.create_task(cancel_once_admitted(stream, request_id))
        await until(
            lambda: all(stream.over or stream.ends(request_id) for stream, request_id in requested),
            "every request to end",
        )
    reasons = [stream.ends(request_id) for stream, request_id in requested if not stream.over]
    assert all(len(ends) == 1 for ends in reasons), "each request has one end"


async def cancel_once_admitted(stream: Stream, request_id: str) -> None:
    """Cancel a request once it is admitted, if that happens."""
    await until(
        lambda: stream.over or stream.ends(request_id) or stream.of(request_id, "admitted"),
        "the admission",
    )
    if not stream.over and not stream.ends(request_id):
        # Its process may die at any moment.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await stream.cancel(request_id)


async def use_up(
    services: list[Service], tenant: Tenant, dimension: QuotaDimension, limit: int
) -> None:
    """Send requests until all are refused: the rest is then too small for one more."""
    async with streams(services, [tenant]) as by_process:
        connections = list(by_process.values())
        if dimension is QuotaDimension.CONCURRENT_REQUESTS:
            await fill_up(connections, limit)
            return
        refused = False
        while not refused:
            requested = [
                (connection, await connection.begin(max_output_tokens=OUTPUT_TOKENS))
                for connection in connections
                for _ in range(ROUND // len(connections) + 1)
            ]
            ends = [await connection.end(request_id) for connection, request_id in requested]
            refused = all(end.WhichOneof("kind") == "failed" for end in ends)
    [(used, held)] = services[0].database.counters(tenant).values()
    assert held == 0
    assert limit - DEMAND[dimension] < used <= limit


async def fill_up(connections: list[Stream], limit: int) -> None:
    """Start endless requests until exactly as many run as the limit allows."""
    frames = [start(max_output_tokens=3000) for _ in range(limit + 2 * len(connections))]
    requested = [
        (connections[index % len(connections)], frame.request_id)
        for index, frame in enumerate(frames)
    ]
    for (connection, _), frame in zip(requested, frames, strict=True):
        await connection.send(frame)
    for connection, request_id in requested:
        await connection.wait(
            lambda connection=connection, id=request_id: (
                connection.of(id, "admitted") or connection.ends(id) or None
            )  # type: ignore[misc]
        )
    admitted = [
        (connection, request_id)
        for connection, request_id in requested
        if connection.of(request_id, "admitted")
    ]
    assert len(admitted) == limit
    for connection, request_id in admitted:
        await connection.cancel(request_id)
    for connection, request_id in admitted:
        await connection.finished(request_id)
