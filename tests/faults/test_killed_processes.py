"""Killed processes: no hold remains, and what the transport had taken is billed once.

At most one message of each request is free: it was sent, and not marked when its process died.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from grpc import StatusCode
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from chaos.rounds import Wire
from common.processes import alive
from metering.core.models import QuotaDimension
from metering.holds.journal import FORMAT, AbandonedJournal
from metering.pricing.prices import PriceTerms, set_price
from tests.faults.billed import Received, check_charged, check_ledger, lossless_stream, rate
from tests.faults.conftest import Start
from tests.inference.tool_checkpoints import make_scripted_checkpoint
from tests.metering.invariants import check_invariants
from tests.service import (
    MODEL,
    PATIENCE_S,
    SMALL_WINDOWS,
    Service,
    Stream,
    Tenant,
    conversation,
    running,
    start,
    until,
)

pytestmark = pytest.mark.faults

LIMITS = {QuotaDimension.TOKENS_PER_MONTH: 10**9, QuotaDimension.CONCURRENT_REQUESTS: 10_000}
ROUNDS, CONNECTIONS = 8, 2  # rounds of kills, processes at a time; each lives a second or two
EXPIRY_S = 5.0  # ends holds whose first token was not recorded yet
LITTLE = 4096  # unread bytes that the kernel of a client buffers
# A request without an end: it has credit for fewer tokens, so that a fast processor that generates
# all of them within the moment before a kill does not end it.
ENDLESS: dict[str, Any] = {"max_output_tokens": 3500, "initial_credit_tokens": 1000}


async def under_load(stream: Stream, count: int, token_count: int) -> list[str]:
    """Start long requests, wait until each has this many tokens, and return their ids."""
    starts = [start(**ENDLESS) for _ in range(count)]
    await stream.send(*starts)
    for frame in starts:
        await stream.received(frame.request_id, token_count)
    return [frame.request_id for frame in starts]


@pytest.mark.parametrize("with_engine", [False, True], ids=["api", "api and engine"])
async def test_a_killed_server_bills_what_it_had_sent(launch: Start, with_engine: bool) -> None:
    service = launch()
    tenant = await service.tenant(LIMITS)
    worker_pid = service.worker_pid
    assert worker_pid is not None
    async with lossless_stream(service, tenant.secret) as stream:
        request_ids = await under_load(stream, 12, 40)

        if with_engine:
            os.kill(worker_pid, signal.SIGKILL)
        service.kill()

        assert await stream.closed() is StatusCode.UNAVAILABLE
    await until(lambda: not alive(worker_pid), "the engine worker to follow its parent")
    assert service.database.holds(tenant) == {"held": 12}, "nobody is there to end them yet"

    service.start()

    assert service.database.holds(tenant) == {"settled": 12}, (
        "all are ended before the server takes requests"
    )
    assert all(held == 0 for _, held in service.database.counters(tenant).values())
    check_charged(service, tenant, [Received.of(stream, each) for each in request_ids])
    assert {
        (event["outcome"], event["recovered"]) for event in service.database.events(tenant)
    } == {("failed", True)}
    check_invariants(service.database_url, all_ended=True)
    assert list(service.settings.journal_directory.glob("*.refused")) == []
    async with service.stream(tenant.secret) as again:
        assert (await again.finished(await again.begin())).usage.delivered_token_count == 20


def journalled_and_taken(service: Service) -> tuple[int, int]:
    """Return the tokens of the only request in the files of a running server."""
    [path] = service.settings.journal_directory.glob(f"*{FORMAT.suffix}")
    with AbandonedJournal(path, os.open(path, os.O_RDONLY)) as journal:
        counts = journal.delivered()
        if not counts:
            return 0, 0
        [entry] = counts
        return entry.delivered_token_count, journal.taken().get(entry.hold_id, (0, 0))[0]


@contextlib.asynccontextmanager
async def deaf_grpc_client(
    service: Service, secret: str
) -> AsyncIterator[Callable[[], Awaitable[Received]]]:
    """Start a request, and read nothing of it."""
    async with (
        Wire(service.address).open() as address,
        service.stream(secret, address=address, reading=False, options=SMALL_WINDOWS) as stream,
    ):
        frame = start(max_output_tokens=3500, top_logprobs=20)
        await stream.send(frame)

        async def read_rest() -> Received:
            await stream.read_all()
            return Received.of(stream, frame.request_id)

        yield read_rest


@contextlib.asynccontextmanager
async def deaf_http_client(
    service: Service, secret: str
) -> AsyncIterator[Callable[[], Awaitable[Received]]]:
    """Start a streamed chat, and read nothing of it."""
    request_id = str(uuid.uuid4())
    chat = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 3500}
    chat |= {"model": MODEL, "stream": True, "ignore_eos": True}
    chat |= {"logprobs": True, "top_logprobs": 20}
    body = json.dumps(chat).encode()
    url = urlsplit(service.openai_url)
    head = (
        f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: weir\r\n"
        f"authorization: Bearer {secret}\r\nidempotency-key: {request_id}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LITTLE)
        connection.setblocking(False)
        await loop.sock_connect(connection, (url.hostname, url.port))
        await loop.sock_sendall(connection, head.encode() + body)

        async def read_rest() -> Received:
            data = bytearray()
            with contextlib.suppress(ConnectionResetError):
                while piece := await loop.sock_recv(connection, 1 << 16):
                    data += piece
            events = [each for each in bytes(data).split(b"data: ")[1:] if b"\n\n" in each]
            choices = [json.loads(event.split(b"\n")[0])["choices"][0] for event in events]
            counts = [len((each.get("logprobs") or {}).get("content", ())) for each in choices]
            return Received(request_id, sum(counts), counts[-1])

        yield read_rest


@pytest.mark.parametrize("client", [deaf_grpc_client, deaf_http_client], ids=["grpc", "http"])
async def test_what_waited_for_a_client_that_did_not_read_is_not_billed_after_a_kill(
    launch: Start, client: Callable[..., contextlib.AbstractAsyncContextManager[Any]]
) -> None:
    """The journal is ahead of the transport then; the smaller number is billed.

    The engine stops early, so that a slow machine sees it before the stalled client is given up.
    """
    service = launch(outbox_tokens_per_request_max=400)
    tenant = await service.tenant(LIMITS)
    async with client(service, tenant.secret) as read_rest:
        stalled = (0, 0)

        def is_stalled() -> bool:
            nonlocal stalled
            before, stalled = stalled, journalled_and_taken(service)
            return before == stalled and 0 < stalled[1] < stalled[0]

        await until(is_stalled, "a message that waits")
        service.kill()
        journalled, taken = journalled_and_taken(service)
        received = await read_rest()
    service.start()

    [event] = service.database.events(tenant)
    assert 0 < taken < journalled
    assert event["billed_token_count"] == event["delivered_token_count"] == taken
    assert event["journalled_token_count"] == journalled
    check_charged(service, tenant, [received])
    check_invariants(service.database_url, all_ended=True)


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("sent", [5, 26], ids=["thinking", "answering"])
async def test_a_request_killed_while_it_thinks_or_answers_is_billed_at_both_prices(
    tmp_path: Path, database_url: str, choices: int, sent: int
) -> None:
    """With several choices, thoughts and answers interleave."""
    pieces = ["<think>", *(f"Hm-{index} " for index in range(10)), "</think>"]
    model = make_scripted_checkpoint(
        tmp_path / "thinks", [*pieces, *(f"so-{index} " for index in range(40))]
    )
    with running(Service(tmp_path / "home", database_url, model)) as service:
        tenant = await service.tenant(LIMITS)
        async with service.session() as session:
            await set_price(
                session,
                PriceTerms(
                    model=MODEL,
                    organization=tenant.name,
                    input_picos_per_token=1,
                    cached_input_picos_per_token=1,
                    output_picos_per_token=100,
                    reasoning_picos_per_token=7,
                ),
                actor="test",
            )
        frame = start(
            conversation=conversation("2+2?"),
            choice_count=choices,
            sampling=pb.Sampling(temperature=1.0, seed=11) if choices > 1 else None,
            initial_credit_tokens=sent * choices,
        )
        frame.start.max_output_tokens = 50 * choices
        async with lossless_stream(service, tenant.secret) as stream:
            await stream.send(frame)
            await stream.received(frame.request_id, sent * choices)
            await until(
                lambda: journalled_and_taken(service) == (sent * choices,) * 2,
                "the transport to take all that was granted",
            )
            frames = stream.frames[frame.request_id]
            reported = sum(each.delta.reasoning_token_count for each in frames)
            service.kill()
            await stream.closed()
        service.start()

        [event] = service.database.events(tenant)
        known = event["billed_reasoning_token_count"]
        assert known == event["reasoning_token_count"] == reported > 0
        assert event["recovered"]
        assert event["billed_token_count"] == sent * choices
        cost = event["input_token_count"] + (sent * choices - known) * 100 + known * 7
        assert event["cost_picos"] == cost
        check_invariants(service.database_url, all_ended=True)


async def test_the_id_of_a_killed_request_is_not_run_again(launch: Start) -> None:
    service = launch()
    tenant = await service.tenant(LIMITS)
    frame = start(**ENDLESS)
    async with lossless_stream(service, tenant.secret) as stream:
        await stream.send(frame)
        await stream.received(frame.request_id, 30)
        service.kill()
        await stream.closed()
    service.start()

    async with service.stream(tenant.secret) as again:
        await again.send(frame)
        refusal = await again.failed(frame.request_id)

    assert (refusal.code, refusal.reason) == (StatusCode.ALREADY_EXISTS, "REQUEST_SETTLED")
    assert refusal.frame is not None
    [event] = service.database.events(tenant)
    assert refusal.frame.usage.delivered_token_count == event["delivered_token_count"]
    check_charged(service, tenant, [Received.of(stream, frame.request_id)])


async def test_a_killed_engine_ends_its_requests_settled_and_comes_back(launch: Start) -> None:
    service = launch()
    tenant = await service.tenant(LIMITS)
    worker_pid = service.worker_pid
    assert worker_pid is not None
    async with service.stream(tenant.secret) as stream:
        request_ids = await under_load(stream, 12, 20)

        os.kill(worker_pid, signal.SIGKILL)

        for request_id in request_ids:
            refusal = await stream.failed(request_id)
            assert (refusal.code, refusal.reason) == (StatusCode.ABORTED, "ENGINE_FAILED_MIDWAY")
            assert refusal.info.metadata["retry_with"] == "new_request_id"
            received = len(stream.token_ids(request_id))
            assert refusal.info.metadata["delivered_token_count"] == str(received)
            assert refusal.frame is not None
            assert refusal.frame.usage.delivered_token_count == len(stream.token_ids(request_id))
            event = service.database.event(tenant, request_id)
            assert (event["outcome"], event["delivered_token_count"]) == (
                "failed",
                len(stream.token_ids(request_id)),
            )
        assert service.database.holds(tenant) == {"settled": 12}

        # The next request waits for the engine and gets a progress frame that says so.
        waiting = await stream.begin()
        assert (await stream.finished(waiting)).reason == types_pb2.FINISH_REASON_LENGTH
        assert pb.ProgressFrame.STAGE_ENGINE_LOADING in {
            progress.stage for progress in stream.of(waiting, "progress")
        }
    assert service.worker_pid not in (None, worker_pid)
    check_invariants(service.database_url, all_ended=True)


async def test_an_engine_killed_before_the_first_token_allows_a_retry(launch: Start) -> None:
    service = launch()
    tenant = await service.tenant(LIMITS)
    async with service.stream(tenant.secret) as stream:
        worker_pid = service.worker_pid
        assert worker_pid is not None
        os.kill(worker_pid, signal.SIGSTOP)
        started = [start() for _ in range(5)]
        await stream.send(*started)
        for frame in started:
            await stream.first(frame.request_id, "admitted")

        os.kill(worker_pid, signal.SIGKILL)

        for frame in started:
            refusal = await stream.failed(frame.request_id)
            assert (refusal.code, refusal.reason) == (StatusCode.UNAVAILABLE, "ENGINE_FAILED")
            assert refusal.info.metadata["retry_with"] == "same_request_id"
            assert refusal.retry_after_s is not None
            assert refusal.retry_after_s > 0
    assert service.database.holds(tenant) == {"voided": 5}
    assert service.database.events(tenant) == []
    async with service.stream(tenant.secret) as again:
        await again.send(*started)
        for frame in started:
            await again.finished(frame.request_id)
    assert len(service.database.events(tenant)) == 5
    check_invariants(service.database_url, all_ended=True)


async def test_the_client_library_retries_after_an_engines_death(launch: Start) -> None:
    service = launch()
    tenant = await service.tenant(LIMITS)
    worker_pid = service.worker_pid
    assert worker_pid is not None
    os.kill(worker_pid, signal.SIGSTOP)
    async with (
        service.client(tenant.secret) as client,
        client.generate(
            MODEL, token_ids=[9] * 20, max_output_tokens=5, max_retries=2
        ) as generation,
    ):

        async def read() -> int:
            return sum([len(delta.token_ids) async for delta in generation])

        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(read())
            await until(lambda: service.database.holds(tenant) == {"held": 1}, "its hold")
            os.kill(worker_pid, signal.SIGKILL)

    assert reading.result() >= 1
    assert service.database.holds(tenant) == {"settled": 1, "voided": 1}
    check_invariants(service.database_url, all_ended=True)


async def test_a_starting_server_settles_for_a_killed_one(launch: Start) -> None:
    """Any server that shares the home recovers a dead one's journal, even while running."""
    first = launch()
    second = launch()
    tenant = await first.tenant(LIMITS)
    async with lossless_stream(first, tenant.secret) as stream:
        request_ids = await under_load(stream, 3, 10)
        first.kill()
        await stream.closed()

    await until(lambda: first.database.holds(tenant) == {"settled": 3}, "the settlements")

    check_charged(second, tenant, [Received.of(stream, each) for each in request_ids])


async def test_random_kills_lose_nothing(launch: Start, tmp_path: Path) -> None:
    """Servers and engines die at random moments, even while they start or recover."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    homes = [tmp_path / f"home{connection}" for connection in range(CONNECTIONS)]
    services = [launch(home=home, lease_slice_tokens=16, hold_expiry_s=EXPIRY_S) for home in homes]
    tenant = await services[0].tenant(LIMITS)
    received: list[Received] = []

    async with asyncio.TaskGroup() as tasks:
        for index, service in enumerate(services):
            tasks.create_task(
                kill_again_and_again(service, tenant, received, random.Random(seed + index))
            )

    service = services[0]
    await until(lambda: "held" not in service.database.holds(tenant), "every hold to end")
    received_count = sum(one.token_count for one in received)
    delivered_count = sum(service.database.delivered(tenant).values())
    print(f"{received_count} tokens received, {delivered_count} billed, {len(received)} requests")
    assert received_count > 0
    check_charged(service, tenant, received)
    check_invariants(service.database_url, all_ended=True)
    await rate(service)
    check_ledger(service)


async def kill_again_and_again(
    service: Service, tenant: Tenant, received: list[Received], rng: random.Random
) -> None:
    """Run rounds of load that each end with a kill; note the tokens that the client received."""
    for _ in range(ROUNDS):
        async with lossless_stream(service, tenant.secret) as stream:
            starts = [
                start(max_output_tokens=rng.choice((5, 50, 500)))
                for _ in range(rng.randrange(1, 12))
            ]
            await stream.send(*starts)
            wanted = rng.choice((0, 1, 5, 20, 100))
            await enough(stream, starts, wanted)
            if rng.random() < 0.4 and service.worker_pid is not None:
                os.kill(service.worker_pid, signal.SIGKILL)
                await enough(stream, starts, wanted + rng.randrange(3))
            service.kill()
            await stream.closed()
        received += [Received.of(stream, frame.request_id) for frame in starts]
        await asyncio.to_thread(service.start)


async def enough(stream: Stream, starts: Sequence[pb.ClientFrame], token_count: int) -> None:
    """Wait for this many tokens in total, or for the end of all requests."""

    def arrived() -> bool:
        got = sum(len(stream.token_ids(frame.request_id)) for frame in starts)
        return got >= token_count or all(stream.ends(frame.request_id) for frame in starts)

    async with asyncio.timeout(PATIENCE_S):
        await stream.wait(arrived)
