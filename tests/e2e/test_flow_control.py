"""Clients' flow control: credit, stalls, and thousands of random operations.

Each request is settled once, all resources are released, and no client delays another.
The whole search: `WEIR_TEST_CLIENT_STEPS=10000 pytest -s tests/e2e/test_flow_control.py -k random`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import uuid
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc
from weir.v1 import types_pb2

from tests.calls import calls
from tests.e2e.inside import inside_fixtures
from tests.metering.invariants import check_invariants
from tests.service import (
    SMALL_WINDOWS,
    Inside,
    Service,
    Stream,
    Tenant,
    attach,
    bearer,
    cancel,
    credit,
    start,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEPS = int(os.environ.get("WEIR_TEST_CLIENT_STEPS", "400"))
STALL_MAX_S = 60.0  # beyond every test, except for the one that lowers it
QUEUED_TOKENS = 400  # about 0.8 s of one request
TIME_SCALE = 0.25  # about 2 ms per token
KEEP_S = 0.5
DRIP_S = 0.004  # between grants: the engine is faster on every machine


inside, service, tenant = inside_fixtures(
    engine_device="simulated",
    simulated_time_scale=TIME_SCALE,
    client_stall_max_s=STALL_MAX_S,
    outbox_tokens_per_request_max=QUEUED_TOKENS,
    lease_slice_tokens=24,
)


@pytest.fixture
def less_patience(inside: Inside) -> Iterator[None]:
    """Shorten the timeout of clients that take nothing."""
    object.__setattr__(inside.process.admission.settings.delivery, "stall_max_s", 0.2)
    yield
    object.__setattr__(inside.process.admission.settings.delivery, "stall_max_s", STALL_MAX_S)


def generated(inside: Inside, tenant: Tenant, request_id: str) -> int:
    """Return the number of generated tokens so far."""
    request = inside.process.find((tenant.project_id, uuid.UUID(request_id)))
    return 10**9 if request is None else request.usage.generated_token_count


async def test_credit_is_not_exceeded(inside: Inside, service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=200, initial_credit_tokens=5)
        for granted, more in ((5, 7), (12, 1), (13, 30), (43, 1000)):
            await stream.received(request_id, granted)
            await until(
                lambda granted=granted: generated(inside, tenant, request_id) > granted + 20,  # type: ignore[misc]
                "more to be there",
            )
            assert len(stream.token_ids(request_id)) == granted
            await stream.credit(request_id, more)
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert len(stream.token_ids(request_id)) == finished.usage.delivered_token_count == 200
    assert stream.text(request_id) == service.tokenizer.decode(tuple(stream.token_ids(request_id)))
    seqs = [delta.seq for delta in stream.of(request_id, "delta")]
    assert seqs == list(range(1, len(seqs) + 1))
    assert len(seqs) < 200, "what waited was told together"


@pytest.mark.parametrize("how", ["cancel", "hang up"])
async def test_an_end_at_any_frame_is_settled_with_what_came_before(
    inside: Inside, service: Service, tenant: Tenant, how: str
) -> None:
    """Credit stops each request exactly there, while the engine goes on."""
    frames = [start(max_output_tokens=300, initial_credit_tokens=index) for index in range(25)]
    async with service.stream(tenant.secret) as stream:
        await stream.send(*frames)
        for index, frame in enumerate(frames):
            await stream.received(frame.request_id, index)
            await until(
                lambda id=frame.request_id, at=index: generated(inside, tenant, id) > at,  # type: ignore[misc]
                "more to wait",
            )
        if how == "cancel":
            await stream.cancel(*(frame.request_id for frame in frames))
            for frame in frames:
                await stream.finished(frame.request_id)
        else:
            await stream.hang_up()
    await inside.check_empty()

    for index, frame in enumerate(frames):
        event = service.database.event(tenant, frame.request_id)
        assert (event["outcome"], event["delivered_token_count"], event["billed_token_count"]) == (
            "cancelled",
            index,
            index,
        )


async def test_a_stalled_request_slows_no_other(service: Service, tenant: Tenant) -> None:
    """It is ended after the stall limit and settled with the tokens that its credit allowed."""
    async with service.stream(tenant.secret) as stream:
        stalled = await stream.begin(max_output_tokens=3000, initial_credit_tokens=3)
        await stream.received(stalled, 3)
        others = [start(max_output_tokens=40) for _ in range(99)]
        await stream.send(*others)
        for frame in others:
            finished = await stream.finished(frame.request_id)
            assert finished.reason == types_pb2.FINISH_REASON_LENGTH
        finished = await stream.finished(stalled)

    assert finished.reason == types_pb2.FINISH_REASON_SLOW_CONSUMER
    assert len(stream.token_ids(stalled)) == finished.usage.billed_token_count == 3
    event = service.database.event(tenant, stalled)
    assert (event["outcome"], event["delivered_token_count"]) == ("slow_consumer", 3)
    outcomes = {event["outcome"] for event in service.database.events(tenant)}
    assert outcomes == {"slow_consumer", "length"}


@pytest.mark.parametrize("token_count", [50, 3000], ids=["has ended", "runs"])
async def test_a_client_without_credit_grants_is_stopped_after_the_stall_time(
    inside: Inside, service: Service, tenant: Tenant, less_patience: None, token_count: int
) -> None:
    """Even after the engine has finished it."""
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=token_count, initial_credit_tokens=4)
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_SLOW_CONSUMER
    assert finished.usage.billed_token_count == 4


def has_more(stream: Stream, message_count: int) -> bool:
    """Return whether more than this many messages were received."""
    return len(stream.messages) > message_count


async def test_grants_by_drip_below_the_least_rate_keep_no_request(
    inside: Inside, service: Service, tenant: Tenant, less_patience: None
) -> None:
    """Each grant is a sign of life; the end names the limit, and the engine's slot is free."""
    settings = inside.process.admission.settings.delivery
    usual = settings.tokens_per_s_min
    object.__setattr__(settings, "tokens_per_s_min", 10_000.0)
    try:
        async with service.stream(tenant.secret) as stream:
            request_id = await stream.begin(max_output_tokens=3000, initial_credit_tokens=1)
            while not stream.ends(request_id):
                message_count = len(stream.messages)
                await asyncio.sleep(DRIP_S)
                await stream.credit(request_id, 1)
                await stream.wait(partial(has_more, stream, message_count))
            finished = await stream.finished(request_id)
    finally:
        object.__setattr__(settings, "tokens_per_s_min", usual)

    assert finished.reason == types_pb2.FINISH_REASON_SLOW_CONSUMER
    assert "fewer than 10000 tokens per second" in finished.detail
    assert "WEIR_CLIENT_TOKENS_PER_SECOND_MIN" in finished.detail
    assert finished.usage.billed_token_count == len(stream.token_ids(request_id)) < 3000


@pytest.mark.parametrize("token_count", [0, -1, -(2**63)])
async def test_invalid_credit_ends_its_request(
    inside: Inside, service: Service, tenant: Tenant, token_count: int
) -> None:
    """The request ends at once instead of waiting for more credit."""
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=3000, initial_credit_tokens=2)
        await stream.received(request_id, 2)
        await until(lambda: generated(inside, tenant, request_id) > 10, "more to be there")
        await stream.credit(request_id, token_count)
        refusal = await stream.failed(request_id)
        # It has ended: nothing happens.
        await stream.send(credit(request_id, 5), cancel(request_id))
        unknown = start().request_id
        await stream.credit(unknown, 5)
        assert (await stream.failed(unknown)).code is StatusCode.NOT_FOUND
        assert len(stream.ends(request_id)) == 1

    assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, ["credit.token_count"])
    assert refusal.frame is not None
    assert (
        refusal.frame.usage.billed_token_count
        == service.database.event(tenant, request_id)["billed_token_count"]
        == 2
    )


async def test_initial_credit_below_zero_is_refused(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        refusal = await stream.failed(await stream.begin(initial_credit_tokens=-1))
    assert refusal.code is StatusCode.INVALID_ARGUMENT
    assert refusal.fields == ["initial_credit_tokens"]


async def test_credit_that_needs_none_changes_nothing(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        frame = start(max_output_tokens=30)
        await stream.send(frame, credit(frame.request_id, 1))
        assert (await stream.finished(frame.request_id)).usage.delivered_token_count == 30


async def test_replays_use_credit(inside: Inside, service: Service, tenant: Tenant) -> None:
    frame = start(max_output_tokens=40, initial_credit_tokens=10, keep_on_disconnect=seconds(30))
    async with service.stream(tenant.secret) as stream, service.stream(tenant.secret) as other:
        await stream.send(frame)
        await stream.received(frame.request_id, 10)
        await until(lambda: service.database.events(tenant), "the end, which waits for nobody")
        await other.send(attach(frame.request_id), credit(frame.request_id, 15))
        await other.received(frame.request_id, 15)
        assert other.token_ids(frame.request_id)[:10] == stream.token_ids(frame.request_id)
        assert [delta.seq for delta in other.of(frame.request_id, "delta")] == list(range(1, 16))
        assert not other.ends(frame.request_id)
        await other.credit(frame.request_id, 25)
        finished = await other.finished(frame.request_id)
    assert finished.usage.delivered_token_count == len(other.token_ids(frame.request_id)) == 40
    assert service.database.event(tenant, frame.request_id)["billed_token_count"] == 40
    # Otherwise later tests would wait for it.
    inside.process.replays.forget((tenant.project_id, uuid.UUID(frame.request_id)))


def seconds(value: float) -> Duration:
    """Return a duration message."""
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=value))
    return duration


class Client(Stream):
    """Stream that may pause reading."""

    def __init__(self, call: Any) -> None:
        super().__init__(call)
        self.reads = asyncio.Event()
        self.reads.set()

    async def read_all(self) -> None:
        """Take frames until the stream ends, except during pauses."""
        try:
            while await self._reads_on():
                pass
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            if not self.call.done():
                raise
        finally:
            self.over = True
            self._wake()

    async def _reads_on(self) -> bool:
        await self.reads.wait()
        message = await self.call.read()
        if not isinstance(message, pb.GenerateResponse):
            return False
        self.take(message)
        return True


class Crowd:
    """Clients of one project that perform any operation of the protocol."""

    def __init__(
        self, service: Service, tenant: Tenant, rng: random.Random, tasks: asyncio.TaskGroup
    ) -> None:
        self.service = service
        self.tenant = tenant
        self.rng = rng
        self.tasks = tasks
        self.open: list[Client] = []
        self.all: list[Client] = []
        self.starts: list[pb.ClientFrame] = []
        self.counts: dict[str, int] = defaultdict(int)
        self.channels: list[grpc.aio.Channel] = []

    def join(self) -> None:
        """Open another stream on a new connection."""
        channel = grpc.aio.insecure_channel(
            self.service.address, options=[("grpc.use_local_subchannel_pool", 1), *SMALL_WINDOWS]
        )
        self.channels.append(channel)
        client = Client(
            pb_grpc.InferenceServiceStub(channel).Generate(metadata=bearer(self.tenant.secret))
        )
        self.tasks.create_task(client.read_all())
        self.open.append(client)
        self.all.append(client)

    def new_start(self) -> pb.ClientFrame:
        """Return a random start: short or long, kept or not, with credit or not."""
        fields: dict[str, Any] = {"max_output_tokens": self.rng.choice((3, 20, 60, 1500))}
        if self.rng.random() < 0.5:
            fields["keep_on_disconnect"] = seconds(KEEP_S)
        if self.rng.random() < 0.3:
            fields["initial_credit_tokens"] = self.rng.choice((0, 1, 10))
        if self.rng.random() < 0.2:
            fields["usage_interval_tokens"] = 7
        frame = start(**fields)
        self.starts = [*self.starts[-11:], frame]
        return frame

    def frames(self) -> list[pb.ClientFrame]:
        """Return a random message about a new request or one of the last dozen, of any stream."""
        rng = self.rng
        act = rng.choice(
            ("start", "start", "again", "other", "cancel", "attach", "attach", "credit", "both")
        )
        self.counts[act] += 1
        if act == "start" or not self.starts:
            return [self.new_start()]
        old = rng.choice(self.starts)
        match act:
            case "again":
                return [old]
            case "other":
                return [start(old.request_id, max_output_tokens=4)]
            case "cancel":
                return [cancel(old.request_id)]
            case "attach":
                seqs = [
                    d.seq for client in self.all[-8:] for d in client.of(old.request_id, "delta")
                ]
                after_seq = rng.choice(
                    (0, max(seqs, default=0), max(seqs, default=0), rng.randrange(60))
                )
                return [
                    attach(old.request_id, after_seq),
                    credit(old.request_id, rng.choice((1, 50, 2000))),
                ]
            case "credit":
                return [credit(old.request_id, rng.choice((1, 5, 500)))]
            case _:
                frame = self.new_start()
                return [frame, cancel(frame.request_id)]

    async def step(self) -> None:
        """Perform one operation of a client."""
        rng = self.rng
        if len(self.open) < 3 or (len(self.open) < 6 and rng.random() < 0.05):
            self.join()
        client = rng.choice(self.open)
        act = rng.random()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            if act < 0.80:
                # the server stops reading from a client that does not read
                async with asyncio.timeout(5):
                    await client.send(*self.frames())
            elif act < 0.88:
                self.counts["disconnect"] += 1
                client.call.cancel()
                client.reads.set()
                self.open.remove(client)
            elif act < 0.92:
                self.counts["half-close"] += 1
                client.reads.set()
                self.open.remove(client)
                await client.half_close()
            elif client.reads.is_set():
                self.counts["stall"] += 1
                client.reads.clear()
            else:
                client.reads.set()
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.002, 0.01)))  # delays of every kind

    async def leave(self) -> None:
        """Close all streams in various ways."""
        for client in self.all:
            client.reads.set()
            if client in self.open and self.rng.random() < 0.5:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await client.send(*(cancel(frame.request_id) for frame in self.starts))
                    await client.half_close()
        await asyncio.sleep(KEEP_S / 5)
        for client in self.all:
            client.call.cancel()
        for channel in self.channels:
            await channel.close()


async def test_random_clients_settle(inside: Inside, service: Service, tenant: Tenant) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}, {STEPS} steps")
    rng = random.Random(seed)
    async with asyncio.TaskGroup() as tasks:
        crowd = Crowd(service, tenant, rng, tasks)
        for _ in range(STEPS):
            await crowd.step()
        await crowd.leave()
    await inside.check_empty()
    replays = inside.process.replays
    await until(lambda: not replays.ended_count, "what is kept to be forgotten")

    assert replays.byte_count == 0
    assert inside.process.relays is not None
    assert inside.process.relays.running_count == 0
    events = service.database.events(tenant)
    billed = {str(event["request_id"]): event["delivered_token_count"] for event in events}
    assert len(billed) == len(events), "one settlement each"
    check_frames(crowd.all, billed)
    used, held = service.database.counters(tenant)["tokens_per_month"]
    total = sum(each["input_token_count"] + each["delivered_token_count"] for each in events)
    assert (used, held) == (total, 0)
    check_invariants(service.database_url, all_ended=True)
    print(
        dict(crowd.counts),
        f"{len(crowd.all)} streams, {len(events)} settled, {sum(billed.values())} tokens",
    )


def check_frames(clients: list[Client], billed: dict[str, int]) -> None:
    """Check that deltas are consecutive from the attach on, equal by number, and billed."""
    deltas: dict[str, dict[int, pb.DeltaFrame]] = defaultdict(dict)
    for client in clients:
        for request_id, received in client.frames.items():
            expected = 0  # none: nothing may arrive
            for frame in received:
                match frame.WhichOneof("kind"):
                    case "attached":
                        expected = frame.attached.after_seq + 1
                    case "admitted":
                        expected = expected or 1
                    case "delta":
                        assert frame.delta.seq == expected, "no gap, no repetition"
                        expected += 1
                        assert (
                            deltas[request_id].setdefault(frame.delta.seq, frame.delta)
                            == frame.delta
                        )
                    case "finished" | "failed" if not frame.failed.duplicate_start:
                        expected = 0
    for request_id, by_seq in deltas.items():
        assert sum(len(delta.token_ids) for delta in by_seq.values()) <= billed[request_id], (
            "billed"
        )


@pytest.mark.parametrize("how", ["does not read", "grants no credit"])
async def test_a_pause_of_the_client_is_a_stall_and_no_gap(
    inside: Inside, service: Service, tenant: Tenant, how: str
) -> None:
    """Every record of the request has the same figures."""
    by_credit = how == "grants no credit"
    async with service.stream(
        tenant.secret, reading=by_credit, options=() if by_credit else SMALL_WINDOWS
    ) as stream:
        request_id = await stream.begin(
            max_output_tokens=300, top_logprobs=20, initial_credit_tokens=5 if by_credit else None
        )

        def stalled_s() -> float:
            request = inside.process.find((tenant.project_id, uuid.UUID(request_id)))
            return 0.0 if request is None else request.output.stalled_s

        await until(lambda: stalled_s() > 1.0, "a second of stall")
        async with asyncio.TaskGroup() as tasks:
            if by_credit:
                await stream.credit(request_id, 1000)
            else:
                tasks.create_task(stream.read_all())
            finished = await stream.finished(request_id)
            stream.call.cancel()
    async with calls(service, tenant.secret) as call:
        found = (await call("GetGeneration", request_id=request_id)).generation

    timings = finished.timings
    assert finished.usage.billed_token_count == 300
    assert timings.client_stall_ms > 1000.0
    assert 0 < timings.itl_max_ms < timings.client_stall_ms
    assert found.timings.client_stall_ms == timings.client_stall_ms
    assert found.timings.itl_max_ms == timings.itl_max_ms
    assert timings.client_stall_ms < timings.total_ms
