"""Requests across streams, connections and processes: continued without a gap, billed once.

One server runs in this process, so that tests can inspect it; another one shares its database.
Their engines are simulated with a fixed time per token, so that an answer of some hundred tokens is
still running on any machine.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration
from grpc import StatusCode
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from metering.core.models import QuotaDimension
from tests.conftest import new_database
from tests.service import (
    Inside,
    Service,
    Stream,
    Tenant,
    attach,
    cancel,
    credit,
    run_inside,
    start,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEPT_BYTES = 30_000  # about 480 tokens
TIME_SCALE = 0.25  # about 2 ms per token
KEEP_MAX_S = 60.0


def seconds(value: float) -> Duration:
    """Return a duration message."""
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=value))
    return duration


def kept(token_count: int, keep_s: float = 30.0, **fields: Any) -> pb.ClientFrame:
    """Return the start of a request that survives its client."""
    return start(max_output_tokens=token_count, keep_on_disconnect=seconds(keep_s), **fields)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    postgres_server: str,
    template_database: str,
) -> AsyncIterator[tuple[Inside, Service]]:
    """Yield two processes of one machine, each of which recovers the other's journal."""
    directory = tmp_path_factory.mktemp("machine")
    (directory / "journal").mkdir()
    settings: dict[str, Any] = {
        "engine_device": "simulated",
        "simulated_time_scale": TIME_SCALE,
        "replay_bytes_per_request_max": KEPT_BYTES,
        "keep_on_disconnect_max_s": KEEP_MAX_S,
        "recovery_interval_s": 0.2,
        "lease_slice_tokens": 24,
    }
    with (
        new_database(postgres_server, template=template_database) as url,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        services = []
        for name in ("here", "beside"):
            (directory / name).mkdir()
            (directory / name / "journal").symlink_to(directory / "journal")
            services.append(Service(directory / name, url, model, **settings))
        here, beside = services
        beside.spawn()
        async with run_inside(here, monkeypatch) as inside:
            beside.address = str(await wait_for_endpoint(beside))
            await asyncio.to_thread(beside.wait_serving)
            try:
                yield inside, beside
            finally:
                print(beside.log[-4000:])
                if beside.process is not None and beside.process.poll() is None:
                    beside.kill()


async def wait_for_endpoint(service: Service) -> str:
    """Return the address of a spawned process."""
    await until(lambda: service._endpoint() is not None, "the process beside to listen")
    return str(service._endpoint())


@pytest_asyncio.fixture(loop_scope="module")
async def inside(both: tuple[Inside, Service]) -> AsyncIterator[Inside]:
    """Yield the process in this interpreter; each test leaves it empty."""
    yield both[0]
    await both[0].check_empty()


@pytest.fixture
def here(inside: Inside) -> Service:
    """Return the service of the process in this interpreter."""
    return inside.service


@pytest.fixture
def beside(both: tuple[Inside, Service]) -> Service:
    """Return the other process, restarted if a test has killed it."""
    service = both[1]
    if service.process is None or service.process.poll() is not None:
        service.start()
    return service


@pytest_asyncio.fixture(loop_scope="module")
async def tenant(here: Service) -> Tenant:
    """Return a tenant with quotas, which reveal leaks."""
    return await here.tenant(
        {QuotaDimension.TOKENS_PER_MONTH: 10**9, QuotaDimension.CONCURRENT_REQUESTS: 10_000}
    )


def seqs(stream: Stream, request_id: str) -> list[int]:
    """Return the numbers of the received deltas."""
    return [delta.seq for delta in stream.of(request_id, "delta")]


async def whole(service: Service, tenant: Tenant, token_count: int) -> list[int]:
    """Return an uninterrupted answer of this length."""
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=token_count)
        await stream.finished(request_id)
        return stream.token_ids(request_id)


async def check_billed_once(
    service: Service, tenant: Tenant, request_id: str, token_count: int
) -> None:
    """Check that there is one event, with every token once."""
    await service.no_hold_left(tenant)
    event = service.database.event(tenant, request_id)
    assert event["delivered_token_count"] == event["billed_token_count"] == token_count


async def test_a_finished_answer_is_replayed_from_any_seq(here: Service, tenant: Tenant) -> None:
    frame = kept(12, usage_interval_tokens=5)
    async with here.stream(tenant.secret) as stream:
        await stream.send(frame)
        finished = await stream.finished(frame.request_id)
        last_seq = seqs(stream, frame.request_id)[-1]
        tokens = stream.token_ids(frame.request_id)

    async with here.stream(tenant.secret) as other:
        for after_seq in range(last_seq + 1):
            other.frames.clear()
            await other.attach(frame.request_id, after_seq)
            assert await other.finished(frame.request_id) == finished
            attached = await other.first(frame.request_id, "attached")
            assert attached == pb.AttachedFrame(
                after_seq=after_seq, last_seq=last_seq, delivered_token_count=12
            )
            assert seqs(other, frame.request_id) == list(range(after_seq + 1, last_seq + 1))
            if not after_seq:
                assert other.token_ids(frame.request_id) == tokens
                updates = other.of(frame.request_id, "usage")
                assert [each.usage.delivered_token_count for each in updates] == [5, 10]
                assert len(other.of(frame.request_id, "admitted")) == 1
    await check_billed_once(here, tenant, frame.request_id, 12)


async def test_the_prompts_logprobs_are_sent_again(here: Service, tenant: Tenant) -> None:
    frame = kept(3, prompt_logprobs=1)
    async with here.stream(tenant.secret) as stream:
        await stream.send(frame)
        await stream.finished(frame.request_id)
        kinds = [each.WhichOneof("kind") for each in stream.frames[frame.request_id]]
        [prompt] = stream.of(frame.request_id, "prompt")
        [admitted] = stream.of(frame.request_id, "admitted")

    async with here.stream(tenant.secret) as other:
        await other.attach(frame.request_id)
        await other.finished(frame.request_id)

    assert kinds.index("prompt") < kinds.index("delta")
    assert len(prompt.logprobs) == admitted.input_token_count
    assert [len(each.top) for each in prompt.logprobs] == [0] + [1] * (len(prompt.logprobs) - 1)
    assert other.of(frame.request_id, "prompt") == [prompt]


@pytest.mark.parametrize("goes", ["hangs up", "stays"])
@pytest.mark.parametrize("on", ["the same process", "another process"])
async def test_a_running_answer_is_continued_from_another_stream(
    here: Service, beside: Service, tenant: Tenant, goes: str, on: str
) -> None:
    """Ten streams in turn together receive the answer.

    Each grants credit for a little more than it receives, so that the answer still runs at the
    last turn on any machine.
    """
    frame = kept(900, initial_credit_tokens=60)
    tokens: list[int] = []
    async with AsyncExitStack() as stack:
        stream = await stack.enter_async_context(here.stream(tenant.secret))
        await stream.send(frame)
        for turn in range(10):
            await stream.received(frame.request_id, 10)
            services = [here] if on == "the same process" else [beside, here]
            next_stream = services[turn % len(services)].stream(tenant.secret)
            following = await stack.enter_async_context(next_stream)
            if goes == "hangs up":
                await stream.hang_up()
            has = seqs(stream, frame.request_id)[-1]
            tokens += stream.token_ids(frame.request_id)
            await following.send(attach(frame.request_id, has), credit(frame.request_id, 60))
            attached = await following.first(frame.request_id, "attached")
            assert (attached.after_seq, attached.running) == (has, True)
            if goes == "stays":
                end = await stream.failed(frame.request_id)
                assert (end.code, end.reason) == (StatusCode.ABORTED, "ATTACHED_ELSEWHERE")
            stream = following
        await stream.credit(frame.request_id, 1000)
        finished = await stream.finished(frame.request_id)
        tokens += stream.token_ids(frame.request_id)

    token_count = finished.usage.delivered_token_count
    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert token_count == 900
    if goes == "hangs up":  # the remaining stream gets more before the other one has attached
        assert tokens == await whole(here, tenant, token_count)
    await check_billed_once(here, tenant, frame.request_id, token_count)


async def test_the_same_start_attaches(here: Service, beside: Service, tenant: Tenant) -> None:
    expected = await whole(here, tenant, 300)
    frame = kept(300)
    async with (
        here.stream(tenant.secret) as first,
        beside.stream(tenant.secret) as second,
        here.stream(tenant.secret) as third,
    ):
        await first.send(frame)
        await first.received(frame.request_id, 5)
        await second.send(frame)
        await second.received(frame.request_id, 5)
        assert (await first.failed(frame.request_id)).reason == "ATTACHED_ELSEWHERE"
        await third.send(frame)
        await third.finished(frame.request_id)
        assert (await second.failed(frame.request_id)).reason == "ATTACHED_ELSEWHERE"
        assert third.token_ids(frame.request_id) == expected
        kinds = [each.WhichOneof("kind") for each in third.frames[frame.request_id]]
        assert kinds[:2] == ["attached", "admitted"]

        third.frames.clear()
        await third.send(frame)
        over = await third.failed(frame.request_id)
        assert (over.code, over.reason) == (StatusCode.ALREADY_EXISTS, "REQUEST_SETTLED")
        assert over.frame is not None
        assert over.frame.usage.delivered_token_count == 300
    await check_billed_once(here, tenant, frame.request_id, 300)


async def test_another_payload_is_refused(here: Service, beside: Service, tenant: Tenant) -> None:
    frame = kept(600)
    async with (
        here.stream(tenant.secret) as stream,
        here.stream(tenant.secret) as near,
        beside.stream(tenant.secret) as far,
    ):
        await stream.send(frame)
        await stream.received(frame.request_id, 1)
        for other in (near, far):
            await other.send(kept(601, request_id=frame.request_id))
            refusal = await other.failed(frame.request_id)
            assert refusal.code is StatusCode.ALREADY_EXISTS
            assert refusal.reason == "REQUEST_ID_REUSED"
        assert (await stream.finished(frame.request_id)).usage.delivered_token_count == 600
    await check_billed_once(here, tenant, frame.request_id, 600)


async def test_many_starts_are_billed_once(here: Service, beside: Service, tenant: Tenant) -> None:
    """Fifty at once to two processes: each stream gets one end, one gets the whole answer."""
    expected = await whole(here, tenant, 60)
    frame = kept(60)
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context((here, beside)[number % 2].stream(tenant.secret))
            for number in range(50)
        ]
        await asyncio.gather(*(stream.send(frame) for stream in streams))
        ends = await asyncio.gather(*(stream.end(frame.request_id) for stream in streams))
        pairs = list(zip(streams, ends, strict=True))
        finished = [stream for stream, end in pairs if end.HasField("finished")]
        for stream, end in zip(streams, ends, strict=True):
            assert len(stream.ends(frame.request_id)) == 1
            if end.HasField("failed"):
                codes = StatusCode.ABORTED.value[0], StatusCode.ALREADY_EXISTS.value[0]
                assert end.failed.status.code in codes, end
        answers = [stream.token_ids(frame.request_id) for stream in finished]
        assert answers == [expected] * len(finished)
    await check_billed_once(here, tenant, frame.request_id, 60)
    assert here.database.counters(tenant)["concurrent_requests"] == (0, 0)


@pytest.mark.parametrize("through", ["here", "beside"])
async def test_a_client_that_attaches_may_cancel(
    here: Service, beside: Service, tenant: Tenant, through: str
) -> None:
    frame = kept(3000)
    async with here.stream(tenant.secret) as stream:
        await stream.send(frame)
        await stream.received(frame.request_id, 3)
        await stream.hang_up()
    async with (here if through == "here" else beside).stream(tenant.secret) as other:
        await other.send(attach(frame.request_id), cancel(frame.request_id))
        finished = await other.finished(frame.request_id)

    assert finished.reason == types_pb2.FINISH_REASON_CANCELLED
    await check_billed_once(here, tenant, frame.request_id, finished.usage.delivered_token_count)


async def test_credit_crosses_processes(here: Service, beside: Service, tenant: Tenant) -> None:
    """From an attaching client, and from one whose start finds the request in the other process."""
    frame = kept(200, initial_credit_tokens=4)
    async with (
        here.stream(tenant.secret) as first,
        beside.stream(tenant.secret) as second,
        beside.stream(tenant.secret) as third,
    ):
        await first.send(frame)
        await first.received(frame.request_id, 4)
        await second.send(attach(frame.request_id), credit(frame.request_id, 6))
        await second.received(frame.request_id, 6)
        await second.credit(frame.request_id, 1)
        await second.received(frame.request_id, 7)
        await third.send(frame)
        await third.received(frame.request_id, 4)
        assert (await second.failed(frame.request_id)).reason == "ATTACHED_ELSEWHERE"
        received = [len(each.token_ids(frame.request_id)) for each in (first, second)]
        assert received == [4, 7]
        assert len(third.token_ids(frame.request_id)) == 4
        await third.credit(frame.request_id, 1000)
        assert (await third.finished(frame.request_id)).usage.delivered_token_count == 200
    await check_billed_once(here, tenant, frame.request_id, 200)


async def test_a_lost_client_may_return(inside: Inside, here: Service, tenant: Tenant) -> None:
    frame = kept(3900, keep_s=0.3)
    async with here.stream(tenant.secret) as stream:
        await stream.send(frame)
        await stream.received(frame.request_id, 3)
        await stream.hang_up()
    assert inside.left_over(), "it runs on"
    await inside.check_empty()

    event = here.database.event(tenant, frame.request_id)
    assert event["outcome"] == "cancelled"
    assert event["delivered_token_count"] == event["billed_token_count"] < 3900
    key = tenant.project_id, uuid.UUID(frame.request_id)
    await until(lambda: inside.process.replays.find(key) is None, "it to be forgotten")


async def test_kept_output_expires(inside: Inside, here: Service, tenant: Tenant) -> None:
    frame = kept(10, keep_s=0.2)
    async with here.stream(tenant.secret) as stream:
        await stream.send(frame)
        await stream.finished(frame.request_id)
        key = tenant.project_id, uuid.UUID(frame.request_id)
        await until(lambda: inside.process.replays.find(key) is None, "it to be forgotten")
        stream.frames.clear()
        await stream.attach(frame.request_id)
        over = await stream.failed(frame.request_id)

    assert (over.code, over.reason) == (StatusCode.ALREADY_EXISTS, "REQUEST_SETTLED")
    assert over.info.metadata["outcome"] == "length"
    assert over.frame is not None
    assert over.frame.usage.delivered_token_count == 10
    assert over.frame.HasField("cost")


async def test_too_long_answers_lose_their_beginning(here: Service, tenant: Tenant) -> None:
    frame = kept(700)
    async with here.stream(tenant.secret) as stream:
        await stream.send(frame)
        await stream.received(frame.request_id, 1)
        await stream.hang_up()
    await until(lambda: here.database.events(tenant), "the end of the request")
    async with here.stream(tenant.secret) as other:
        await other.attach(frame.request_id)
        gone = await other.failed(frame.request_id)
        assert (gone.code, gone.reason) == (StatusCode.OUT_OF_RANGE, "OUTPUT_GONE")
        facts = gone.info.metadata
        oldest_seq, last_seq = int(facts["oldest_seq"]), int(facts["last_seq"])
        assert 1 < oldest_seq <= last_seq
        other.frames.clear()
        await other.attach(frame.request_id, oldest_seq - 1)
        assert (await other.finished(frame.request_id)).usage.delivered_token_count == 700
        assert seqs(other, frame.request_id) == list(range(oldest_seq, last_seq + 1))
    await check_billed_once(here, tenant, frame.request_id, 700)


async def test_a_wrong_attach_is_refused(here: Service, beside: Service, tenant: Tenant) -> None:
    stranger = await here.tenant()
    frame = kept(3000)
    async with (
        here.stream(tenant.secret) as stream,
        beside.stream(tenant.secret) as far,
        here.stream(stranger.secret) as strange,
    ):
        await stream.send(frame)
        await stream.received(frame.request_id, 1)
        unknown = start().request_id
        for other, requested, code, reason in (
            (stream, attach(unknown), StatusCode.NOT_FOUND, "REQUEST_UNKNOWN"),
            (far, attach(unknown), StatusCode.NOT_FOUND, "REQUEST_UNKNOWN"),
            (strange, attach(frame.request_id), StatusCode.NOT_FOUND, "REQUEST_UNKNOWN"),
            (far, attach(frame.request_id, 10**6), StatusCode.OUT_OF_RANGE, "OUTPUT_GONE"),
            (far, attach(frame.request_id, -1), StatusCode.INVALID_ARGUMENT, "FIELD_INVALID"),
            (far, attach("no id"), StatusCode.INVALID_ARGUMENT, "FIELD_INVALID"),
            (far, kept(10, KEEP_MAX_S + 1), StatusCode.INVALID_ARGUMENT, "FIELD_INVALID"),
            (far, kept(10, 0), StatusCode.INVALID_ARGUMENT, "FIELD_INVALID"),
        ):
            other.frames.pop(requested.request_id, None)
            await other.send(requested)
            refusal = await other.failed(requested.request_id)
            assert (refusal.code, refusal.reason) == (code, reason), requested
            assert refusal.frame is not None
            assert not refusal.frame.duplicate_start
        await stream.attach(frame.request_id, 10**6)
        [refusal] = await stream.wait(lambda: stream.of(frame.request_id, "failed") or None)
        assert refusal.duplicate_start, "the request goes on here"
        await stream.cancel(frame.request_id)
        await stream.finished(frame.request_id)


async def test_unkept_output_moves(inside: Inside, here: Service, tenant: Tenant) -> None:
    """Without credit the first stream gets nothing, so the second one gets all."""
    frame = start(max_output_tokens=3000, initial_credit_tokens=0)
    async with here.stream(tenant.secret) as stream, here.stream(tenant.secret) as other:
        await stream.send(frame)
        await stream.first(frame.request_id, "admitted")
        await other.send(frame)
        await other.first(frame.request_id, "attached")
        assert (await stream.failed(frame.request_id)).reason == "ATTACHED_ELSEWHERE"
        stream.call.cancel()
        await other.credit(frame.request_id, 20)
        await other.received(frame.request_id, 20)
        assert seqs(other, frame.request_id)[0] == 1
        await other.hang_up()
        await inside.check_empty()
    event = here.database.event(tenant, frame.request_id)
    assert (event["outcome"], event["delivered_token_count"]) == ("cancelled", 20)


async def test_a_killed_request_settles(here: Service, beside: Service, tenant: Tenant) -> None:
    """At first its owner is unavailable; later the database has the delivered tokens.

    The last message may have been sent, and not marked as taken, when the process died.
    """
    frame = kept(3900)
    async with beside.stream(tenant.secret) as first, here.stream(tenant.secret) as other:
        await first.send(frame)
        await first.received(frame.request_id, 5)
        await other.attach(frame.request_id)
        await other.received(frame.request_id, 5)
        beside.kill()
        lost = await other.failed(frame.request_id)
        received_count = len(other.token_ids(frame.request_id))
        unmarked_count = other.last_token_count(frame.request_id)
        if lost.reason != "REQUEST_SETTLED":  # the database may have been faster
            assert (lost.code, lost.reason) == (StatusCode.UNAVAILABLE, "PROCESS_UNAVAILABLE")
            assert lost.retry_after_s
        over = await attach_until_settled(other, frame.request_id)

    assert over.frame is not None
    assert over.info.metadata["outcome"] == "failed"
    assert "The server died before" in over.status.message
    assert "its output is not kept" in over.status.message
    assert over.frame.usage.delivered_token_count >= received_count - unmarked_count
    await check_billed_once(here, tenant, frame.request_id, over.frame.usage.delivered_token_count)


async def attach_until_settled(stream: Stream, request_id: str) -> Any:
    """Retry as a client does after `PROCESS_UNAVAILABLE`."""
    while True:
        stream.frames.clear()
        await stream.attach(request_id)
        refusal = await stream.failed(request_id)
        if refusal.reason == "REQUEST_SETTLED":
            return refusal
        assert refusal.reason == "PROCESS_UNAVAILABLE"
        await asyncio.sleep(0.1)
