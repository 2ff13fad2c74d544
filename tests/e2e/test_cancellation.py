"""Requests that end early: delivered tokens are billed, and all resources are released.

The server runs in this process, so that tests can inspect it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import signal
import subprocess
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc
from weir.v1 import types_pb2

from api import process as statistics_log
from metering.core.models import QuotaDimension
from metering.holds.lease_clock import boot_time_s
from tests.e2e.inside import inside_fixtures
from tests.service import (
    PLAIN_IDS,
    SMALL_WINDOWS,
    Inside,
    Service,
    Stream,
    Tenant,
    bearer,
    cancel,
    start,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

STALL_MAX_S = 1.0
QUEUED_TOKENS = 400
PERMITS = 220
SLICE_TOKENS = 24
RUNNING_MAX = 8  # sequences that the engine runs at once; others are queued

CLIENT = """
import sys, grpc
from weir.v1 import inference_service_pb2 as pb, inference_service_pb2_grpc as stubs
start = pb.ClientFrame.FromString(bytes.fromhex(sys.argv[3]))
with grpc.insecure_channel(sys.argv[1]) as channel:
    def requests():
        yield pb.GenerateRequest(frames=[start])
        import threading; threading.Event().wait()
    metadata = [("authorization", "Bearer " + sys.argv[2])]
    stub = stubs.InferenceServiceStub(channel)
    for message in stub.Generate(requests(), metadata=metadata):
        for frame in message.frames:
            for token_id in frame.delta.token_ids:
                print(token_id, flush=True)
"""


inside, service, tenant = inside_fixtures(
    running_max=RUNNING_MAX,
    client_stall_max_s=STALL_MAX_S,
    outbox_tokens_per_request_max=QUEUED_TOKENS,
    requests_per_process_max=PERMITS,
    lease_slice_tokens=SLICE_TOKENS,
    lease_margin_tokens=8,
    progress_interval_s=0.05,
)


async def check_settled(
    service: Service, tenant: Tenant, stream: Stream, request_id: str, outcome: str
) -> None:
    """Check that usage event, client and last frame agree exactly."""
    finished = await stream.finished(request_id)
    event = service.database.event(tenant, request_id)
    assert event["outcome"] == outcome
    delivered = event["delivered_token_count"]
    assert delivered == finished.usage.delivered_token_count == len(stream.token_ids(request_id))
    assert event["generated_token_count"] >= event["delivered_token_count"]
    assert event["billed_token_count"] == event["delivered_token_count"]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 15, 16, 17, 23, 24, 25, 47, 48, 49, 96, 200])
async def test_a_cancel_at_token_k_settles_what_was_delivered(
    inside: Inside, service: Service, tenant: Tenant, k: int
) -> None:
    """Also around the ends of leased slices; when the client sees the end, KV blocks are free."""
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=3000)
        await stream.received(request_id, k)
        await stream.cancel(request_id)
        finished = await stream.finished(request_id)

        assert finished.reason == types_pb2.FINISH_REASON_CANCELLED
        assert inside.engine.statistics().kv_block_count_held == 0
        assert inside.engine.statistics().running_sequence_count == 0
    assert len(stream.token_ids(request_id)) >= k
    await check_settled(service, tenant, stream, request_id, "cancelled")


async def test_nothing_follows_the_end_of_a_cancel(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=3000)
        await stream.received(request_id, 1)
        await stream.cancel(request_id, request_id, request_id)
        await stream.finished(request_id)
        other = await stream.begin()
        await stream.finished(other)

    assert stream.frames[request_id][-1].WhichOneof("kind") == "finished"
    assert len(stream.ends(request_id)) == 1


async def test_a_cancel_beside_its_start_ends_the_request(service: Service, tenant: Tenant) -> None:
    """Although nothing has begun, exactly one end arrives, and the stream can be closed."""
    frame = start()
    async with service.stream(tenant.secret) as stream:
        await stream.send(frame, cancel(frame.request_id))
        refusal = await stream.failed(frame.request_id)
        await stream.half_close()
        assert await stream.closed() is grpc.StatusCode.OK

    assert (refusal.code, refusal.reason) == (grpc.StatusCode.CANCELLED, "CANCELLED")
    assert service.database.events(tenant) == []
    assert service.database.counters(tenant) == {}


async def test_a_cancel_before_a_token_bills_no_output(service: Service, tenant: Tenant) -> None:
    """The client's delay before the cancel sweeps arrival, tokenizing, admission and engine."""
    async with service.stream(tenant.secret) as stream:
        for wait_ms in (0, 0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30):
            prompt = random.Random(wait_ms).choices(PLAIN_IDS, k=3000)
            request_id = await stream.begin(prompt=prompt, max_output_tokens=500)
            await asyncio.sleep(wait_ms / 1000)
            await stream.cancel(request_id)
            end = await stream.end(request_id)

            received = len(stream.token_ids(request_id))
            events = [
                event
                for event in service.database.events(tenant)
                if str(event["request_id"]) == request_id
            ]
            assert sum(event["delivered_token_count"] for event in events) == received
            if end.WhichOneof("kind") == "failed":
                assert events == []
                assert end.failed.status.code == grpc.StatusCode.CANCELLED.value[0]
            elif not end.finished.usage.input_token_count:
                assert [(event["input_token_count"], event["cost_picos"]) for event in events] == [
                    (0, 0)
                ], "it had only waited"
    await service.no_hold_left(tenant)


async def test_ended_requests_leave_no_garbage(service: Service, tenant: Tenant) -> None:
    """No request leaves reference cycles, however it ends: collecting those stops all streams."""
    async with service.stream(tenant.secret) as stream:
        # Imports and caches of the first request are created before the measurement.
        await stream.finished(await stream.begin(max_output_tokens=2))
        gc.collect()
        gc.disable()
        try:
            kept = await stream.begin(max_output_tokens=3, keep_on_disconnect=Duration(seconds=60))
            await stream.finished(await stream.begin(max_output_tokens=3))
            await stream.finished(kept)
            cancelled = await stream.begin(max_output_tokens=3000)
            await stream.received(cancelled, 1)
            await stream.cancel(cancelled)
            await stream.finished(cancelled)
            await stream.failed(await stream.begin(prompt=[10**6]))
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
        finally:
            gc.set_debug(0)
            gc.enable()
        garbage = [type(each) for each in gc.garbage]
        gc.garbage.clear()

    assert [kind for kind in garbage if kind.__module__.startswith(("api.", "inference."))] == []


async def test_failed_calls_leave_no_garbage(inside: Inside, tenant: Tenant) -> None:
    """Freeing thousands of frames at once would block all streams for tens of milliseconds."""
    count = 10
    async with inside.service.channel() as channel:
        generate: Any = channel.stream_stream("/weir.v1.InferenceService/Generate")
        unknown: Any = channel.unary_unary("/weir.v1.InferenceService/GetGeneration")

        async def refused_and_cancelled() -> None:
            for _ in range(count):
                with pytest.raises(grpc.aio.AioRpcError):
                    await unknown(b"", metadata=bearer(tenant.secret))
                with pytest.raises(grpc.aio.AioRpcError):
                    await unknown(b"", metadata=bearer("wk_wrong"))
                call = generate(metadata=bearer(tenant.secret))
                await asyncio.sleep(0.01)
                call.cancel()
            await until(lambda: not inside.process.running(), "streams to be closed")
            await asyncio.sleep(0.2)

        await refused_and_cancelled()
        gc.collect()
        gc.disable()
        try:
            await refused_and_cancelled()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
        finally:
            gc.set_debug(0)
            gc.enable()
        frames = [
            getattr(each.f_code, "co_qualname", each.f_code.co_name)
            for each in gc.garbage
            if isinstance(each, FrameType)
        ]
        gc.garbage.clear()

    assert [
        name
        for name in frames
        if name.startswith(("guarded", "visiting", "measured", "abort", "ClientStream"))
    ] == []


async def test_a_queued_cancel_is_free(inside: Inside, service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        crowd = [start(max_output_tokens=2400) for _ in range(RUNNING_MAX)]
        await stream.send(*crowd)
        for frame in crowd:
            await stream.received(frame.request_id, 1)
        waiting = [start(max_output_tokens=50) for _ in range(5)]
        await stream.send(*waiting)
        for frame in waiting:
            progress = await stream.first(frame.request_id, "progress")
            assert progress.stage == pb.ProgressFrame.STAGE_QUEUED

        await stream.cancel(*(frame.request_id for frame in waiting))
        for frame in waiting:
            finished = await stream.finished(frame.request_id)
            assert finished.reason == types_pb2.FINISH_REASON_CANCELLED
            assert finished.usage == types_pb2.Usage()
            assert finished.cost.picos == finished.cost.units == 0
        await stream.cancel(*(frame.request_id for frame in crowd))
        for frame in crowd:
            await stream.finished(frame.request_id)

    events = service.database.events(tenant)
    billed = {str(event["request_id"]) for event in events if event["input_token_count"]}
    assert billed == {frame.request_id for frame in crowd}
    assert service.database.holds(tenant) == {"settled": len(crowd) + 5}, "all count"


async def test_waiting_requests_do_not_begin_after_their_holds_lapsed_in_a_pause(
    inside: Inside, service: Service, tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All holds lapse at once, as after a pause. Neither queued nor handed-over requests begin."""
    [queue] = inside.process.queues.values()
    leases = inside.process.admission.holds._leases
    async with service.stream(tenant.secret) as stream:
        crowd = [start(max_output_tokens=4000) for _ in range(RUNNING_MAX)]
        await stream.send(*crowd)
        for frame in crowd:
            await stream.received(frame.request_id, 1)
        waiting = [
            start(max_output_tokens=50, prompt=random.Random(index).choices(PLAIN_IDS, k=500))
            for index in range(40)
        ]
        await stream.send(*waiting)
        for frame in waiting:
            await stream.first(frame.request_id, "progress")
        assert queue.statistics().waiting_count > 0
        assert queue.statistics().engine_pending_count > 0
        computed = inside.engine.statistics().prompt_token_count

        with monkeypatch.context() as awake:
            awake.setattr(leases, "now", lambda: boot_time_s() + 3600)
            for frame in (*crowd, *waiting):
                refusal = await stream.failed(frame.request_id)
                assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "HOLD_ENDED")

    assert inside.engine.statistics().prompt_token_count == computed
    await service.no_hold_left(tenant)


async def test_the_log_reports_admissions_refusals_and_what_waits(
    inside: Inside, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per change, with the limit that caused it."""
    one_at_once = await service.tenant({QuotaDimension.CONCURRENT_REQUESTS: 1})
    reported: list[dict[str, Any]] = []
    monkeypatch.setattr(
        statistics_log, "log", SimpleNamespace(info=lambda event, **facts: reported.append(facts))
    )
    before = statistics_log.statistics_of(inside.process)
    limit = "concurrent_requests/organization"

    async with service.stream(one_at_once.secret) as stream:
        running = await stream.begin(max_output_tokens=3000)
        await stream.received(running, 1)
        await stream.failed(await stream.begin())
        reporting = asyncio.ensure_future(
            statistics_log.log_statistics_regularly(inside.process, interval_s=0.001)
        )
        await until(lambda: bool(reported), "the event")
        await stream.cancel(running)
        await stream.finished(running)
        reporting.cancel()

    assert reported[0]["admitted_count"] == before["admitted_count"] + 1
    assert reported[0]["quota_refusals"][limit] == before["quota_refusals"].get(limit, 0) + 1
    assert reported[0]["live_request_count"] == 1
    assert reported[0]["queues"]["tiny"]["waiting_count"] == 0
    assert all(now != then for then, now in itertools.pairwise(reported))


async def test_a_request_cancelled_early_may_come_again(service: Service, tenant: Tenant) -> None:
    frame = start()
    async with service.stream(tenant.secret) as stream:
        await stream.send(frame, cancel(frame.request_id))
        await stream.end(frame.request_id)
        stream.frames.clear()
        await stream.send(frame)

        assert (await stream.finished(frame.request_id)).usage.delivered_token_count == 20


@pytest.mark.parametrize("token_count", [0, 1, 40])
async def test_a_client_that_hangs_up_is_settled_with_what_it_got(
    inside: Inside, service: Service, tenant: Tenant, token_count: int
) -> None:
    async with service.stream(tenant.secret) as stream:
        starts = [start(max_output_tokens=3000) for _ in range(5)]
        await stream.send(*starts)
        for frame in starts:
            await stream.received(frame.request_id, token_count)
        await stream.hang_up()
    await inside.check_empty()

    delivered = service.database.delivered(tenant)
    for frame in starts:
        assert delivered.get(frame.request_id, 0) >= len(stream.token_ids(frame.request_id))
    assert {event["outcome"] for event in service.database.events(tenant)} <= {"cancelled"}
    assert service.database.counters(tenant).get("concurrent_requests", (0, 0)) == (0, 0)


async def test_closing_ends_streams(inside: Inside, service: Service, tenant: Tenant) -> None:
    async with asyncio.TaskGroup() as tasks, service.channel() as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        streams = [Stream(stub.Generate(metadata=bearer(tenant.secret))) for _ in range(3)]
        for stream in streams:
            tasks.create_task(stream.read_all())
        ids = [await stream.begin(max_output_tokens=3000) for stream in streams]
        for stream, request_id in zip(streams, ids, strict=True):
            await stream.received(request_id, 2)
    await inside.check_empty()

    delivered = service.database.delivered(tenant)
    for stream, request_id in zip(streams, ids, strict=True):
        assert delivered[request_id] >= len(stream.token_ids(request_id))


async def test_a_killed_client_process_ends_its_request(
    inside: Inside, service: Service, tenant: Tenant
) -> None:
    frame = start(max_output_tokens=3900)
    arguments = (service.address, tenant.secret, frame.SerializeToString().hex())
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, *arguments, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    received = 0
    while received < 20 and await process.stdout.readline():
        received += 1
    process.send_signal(signal.SIGKILL)
    received += len((await process.stdout.read()).split())
    await process.wait()
    await inside.check_empty()

    event = service.database.event(tenant, frame.request_id)
    assert event["outcome"] == "cancelled"
    assert 3900 > event["delivered_token_count"] >= received >= 20


async def test_requests_of_a_half_closed_stream_finish(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        starts = [start(max_output_tokens=30 + n) for n in range(5)]
        await stream.send(*starts)
        await stream.half_close()
        assert await stream.closed() is grpc.StatusCode.OK

    for frame in starts:
        assert len(stream.token_ids(frame.request_id)) == frame.start.max_output_tokens
        assert len(stream.ends(frame.request_id)) == 1


async def test_a_half_close_ends_an_idle_stream(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        await stream.half_close()
        assert await stream.closed() is grpc.StatusCode.OK


async def test_a_deadline_ends_requests(inside: Inside, service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret, timeout=1.0) as stream:
        starts = [start(max_output_tokens=3900) for _ in range(8)]
        await stream.send(*starts)
        assert await stream.closed() is grpc.StatusCode.DEADLINE_EXCEEDED
    await inside.check_empty()

    events = {str(event["request_id"]): event for event in service.database.events(tenant)}
    for frame in starts:
        assert events[frame.request_id]["outcome"] == "deadline"
        received = len(stream.token_ids(frame.request_id))
        assert events[frame.request_id]["delivered_token_count"] >= received > 0


async def test_many_cancels_leave_nothing(inside: Inside, service: Service, tenant: Tenant) -> None:
    """Triton segfaulted and TensorRT-LLM stopped answering under 200 cancels in random order."""
    rng = random.Random(11)
    async with service.stream(tenant.secret) as stream:
        starts = [
            start(prompt=rng.choices(PLAIN_IDS, k=rng.randrange(5, 60)), max_output_tokens=2000)
            for _ in range(200)
        ]
        order = [frame.request_id for frame in rng.sample(starts, len(starts))]
        for index in range(0, 200, 20):
            await stream.send(*starts[index : index + 20])
            await stream.cancel(*rng.sample(order, 30))
        await stream.cancel(*order)
        for frame in starts:
            await stream.end(frame.request_id)
        assert (await stream.finished(await stream.begin())).usage.delivered_token_count == 20
    await inside.check_empty()

    delivered = service.database.delivered(tenant)
    for frame in starts:
        ends = [
            end
            for end in stream.ends(frame.request_id)
            if end.failed.status.code != grpc.StatusCode.NOT_FOUND.value[0]
        ]
        assert len(ends) == 1
        assert delivered.get(frame.request_id, 0) == len(stream.token_ids(frame.request_id))
    assert service.database.counters(tenant)["concurrent_requests"] == (0, 0)
    used, held = service.database.counters(tenant)["tokens_per_month"]
    events = service.database.events(tenant)
    total = sum(e["input_token_count"] + e["delivered_token_count"] for e in events)
    assert (used, held) == (total, 0)


async def test_a_stalled_client_is_ended(inside: Inside, service: Service, tenant: Tenant) -> None:
    async with (
        service.stream(tenant.secret, reading=False, options=SMALL_WINDOWS) as deaf,
        service.stream(tenant.secret) as other,
    ):
        starts = [start(max_output_tokens=1500) for _ in range(6)]
        await deaf.send(*starts)
        beside = await other.begin(max_output_tokens=300)
        assert len(other.token_ids(beside)) < 300
        finished = await other.finished(beside)
        assert finished.reason == types_pb2.FINISH_REASON_LENGTH
        await until(lambda: len(service.database.events(tenant)) == 7, "the settlements")
        assert inside.engine.statistics().kv_block_count_held == 0

        async with asyncio.TaskGroup() as tasks:  # the client reads at last
            tasks.create_task(deaf.read_all())
            for frame in starts:
                finished = await deaf.finished(frame.request_id)
                assert finished.reason == types_pb2.FINISH_REASON_SLOW_CONSUMER
                await check_settled(service, tenant, deaf, frame.request_id, "slow_consumer")
            again = await deaf.begin()
            await deaf.finished(again)
            await deaf.half_close()


async def test_a_client_that_reads_slowly_gets_everything(service: Service, tenant: Tenant) -> None:
    """Slower than the engine, and longer than the stall limit of clients that read nothing."""
    async with service.stream(tenant.secret, reading=False, options=SMALL_WINDOWS) as slow:
        frames = [start(max_output_tokens=QUEUED_TOKENS - 50) for _ in range(12)]
        await slow.send(*frames)
        await slow.half_close()
        pauses = 60  # fewer if it all comes in fewer messages, some 25 to 45
        while message := await slow.call.read():
            slow.take(message)
            if pauses:
                pauses -= 1
                # The server's writes go on only after several messages are read.
                await asyncio.sleep(STALL_MAX_S / 25)

    ends = [await slow.finished(frame.request_id) for frame in frames]
    assert {end.reason for end in ends} == {types_pb2.FINISH_REASON_LENGTH}
    assert all(len(slow.token_ids(frame.request_id)) == QUEUED_TOKENS - 50 for frame in frames)


async def test_a_full_server_refuses(inside: Inside, service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        crowd = [start(max_output_tokens=3000) for _ in range(PERMITS)]
        await stream.send(*crowd)
        await until(lambda: inside.capacity.taken_count == PERMITS, "all permits to be taken")

        refusal = await stream.failed(await stream.begin())

        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "OVERLOADED")
        assert refusal.retry_after_s is not None
        await stream.cancel(*(frame.request_id for frame in crowd))
        for frame in crowd:
            await stream.end(frame.request_id)
        assert (await stream.finished(await stream.begin())).usage.delivered_token_count == 20


async def test_leases_come_in_slices(inside: Inside, service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=1000)
        await stream.received(request_id, 500)
        _, held = service.database.counters(tenant)["tokens_per_month"]
        assert held < 10 + 3 * SLICE_TOKENS, "never far more than the slice that is being used"
        await stream.finished(request_id)

    counted = {"tokens_per_month": (1010, 0), "concurrent_requests": (0, 0)}
    assert service.database.counters(tenant) == counted
