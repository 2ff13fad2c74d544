"""Successful requests through the generated stub and the SDK."""

from __future__ import annotations

import asyncio
import random
from datetime import datetime

import pytest
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc
from weir.v1 import types_pb2
from weir_client import FinishReason, GenerationState

from metering.core.models import QuotaDimension
from tests.calls import calls
from tests.service import (
    CACHED_PICOS,
    CONTEXT_WINDOW_TOKENS,
    INPUT_PICOS,
    MODEL,
    OUTPUT_PICOS,
    PLAIN_IDS,
    Service,
    Stream,
    Tenant,
    bearer,
    conversation,
    cost_picos,
    picos,
    start,
)

STAGES = (
    *("auth", "tokenize", "admission", "queue", "cold_start"),
    *("prefill", "decode", "client_stall", "settle"),
)
UNACCOUNTED_MS = 1.0  # no waiting between two stages


async def test_the_frames_of_a_request_are_consistent(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 10_000})

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=60)
        finished = await stream.finished(request_id)

    kinds = [frame.WhichOneof("kind") for frame in stream.frames[request_id]]
    kinds = [kind for kind in kinds if kind != "progress"]  # sent if the machine is slow
    assert kinds[0] == "admitted"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) == {"delta"}
    assert [delta.seq for delta in stream.of(request_id, "delta")] == list(range(1, len(kinds) - 1))
    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert len(stream.token_ids(request_id)) == finished.usage.delivered_token_count == 60
    assert finished.usage.billed_token_count == finished.usage.generated_token_count == 60
    assert stream.text(request_id) == service.tokenizer.decode(tuple(stream.token_ids(request_id)))


async def test_the_usage_event_equals_the_usage_sent_to_the_client(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 10_000})

    async with service.stream(tenant.secret) as stream:
        labels = {"team": "search", "ünïcode": "✓"}
        request_id = await stream.begin(max_output_tokens=40, labels=labels)
        finished = await stream.finished(request_id)
        [admitted] = stream.of(request_id, "admitted")

    event = service.database.event(tenant, request_id)
    for name in ("input", "cached_input", "generated", "delivered", "billed"):
        assert event[f"{name}_token_count"] == getattr(finished.usage, f"{name}_token_count"), name
    assert event["cost_picos"] == picos(finished.cost) == cost_picos(finished.usage)
    assert event["outcome"] == "length"
    assert event["labels"] == {"team": "search", "ünïcode": "✓"}
    assert event["price_version_id"] == admitted.price_version
    assert service.database.counters(tenant) == {"tokens_per_month": (50, 0)}


async def test_the_price_of_a_cached_prompt_is_exact(service: Service, tenant: Tenant) -> None:
    """The engine reports cached tokens, which have their own price."""
    prompt = random.Random(1).sample(PLAIN_IDS, 200)

    async with service.stream(tenant.secret) as stream:
        first = await stream.finished(await stream.begin(prompt=prompt))
        second_id = await stream.begin(prompt=prompt)
        second = await stream.finished(second_id)

    cached = second.usage.cached_input_token_count
    assert first.usage.cached_input_token_count == 0
    assert 0 < cached < 200
    assert stream.of(second_id, "admitted")[0].predicted_cached_token_count == cached
    cost = (200 - cached) * INPUT_PICOS + cached * CACHED_PICOS + 20 * OUTPUT_PICOS
    assert picos(second.cost) == cost
    assert picos(first.cost) - picos(second.cost) == cached * (INPUT_PICOS - CACHED_PICOS)


async def test_the_stages_add_up_to_the_total(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        timings = (await stream.finished(await stream.begin(max_output_tokens=30))).timings

    stages = {stage: getattr(timings, f"{stage}_ms") for stage in STAGES}
    assert all(ms >= 0 for ms in stages.values())
    assert sum(stages.values()) == pytest.approx(timings.total_ms, abs=UNACCOUNTED_MS)
    assert stages["prefill"] > 0
    assert stages["decode"] > 0
    assert stages["settle"] > 0
    assert stages["auth"] < timings.ttft_ms < timings.total_ms


async def test_the_admitted_frame_counts_this_very_request(service: Service) -> None:
    limits = {QuotaDimension.TOKENS_PER_MONTH: 10_000, QuotaDimension.CONCURRENT_REQUESTS: 7}
    tenant = await service.tenant(limits)

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=30)
        admitted = await stream.first(request_id, "admitted")
        await stream.end(request_id)

    concurrent, tokens = admitted.quotas
    assert concurrent.dimension == types_pb2.QUOTA_DIMENSION_CONCURRENT_REQUESTS
    assert concurrent.limit_value == 7
    assert (concurrent.used_value, concurrent.held_value, concurrent.remaining_value) == (0, 1, 6)
    assert not concurrent.HasField("reset_time")
    assert tokens.dimension == types_pb2.QUOTA_DIMENSION_TOKENS_PER_MONTH
    assert (tokens.used_value, tokens.held_value, tokens.remaining_value) == (0, 40, 9_960)
    assert tokens.reset_time.ToDatetime() > datetime(2020, 1, 1)
    assert tokens.subject == types_pb2.QUOTA_SUBJECT_ORGANIZATION
    assert tokens.subject_id == str(tenant.organization_id)


async def test_a_later_lookup_equals_the_last_frame(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(labels={"a": "b"})
        finished = await stream.finished(request_id)

    async with calls(service, tenant.secret) as call:
        found = (await call("GetGeneration", request_id=request_id)).generation

    assert found.state == pb.Generation.STATE_SETTLED
    assert (found.request_id, found.model, dict(found.labels)) == (request_id, MODEL, {"a": "b"})
    assert found.usage == finished.usage
    assert found.cost == finished.cost
    assert found.outcome == "LENGTH"
    assert found.timings.decode_ms == finished.timings.decode_ms
    for name in ("ttft_ms", "tokens_per_second", "itl_p50_ms", "itl_p99_ms", "itl_max_ms"):
        assert getattr(found.timings, name) == getattr(finished.timings, name) > 0, name
    assert found.admit_time.ToDatetime() < found.settle_time.ToDatetime()


async def test_a_request_that_runs_can_be_looked_up(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream, service.client(tenant.secret) as client:
        request_id = await stream.begin(max_output_tokens=2000)
        await stream.received(request_id, 1)

        running = await client.get_generation(request_id)

        assert running.state is GenerationState.RUNNING
        assert running.settle_time is None
        assert running.outcome == ""
        await stream.cancel(request_id)
        await stream.end(request_id)


async def test_a_seed_repeats_an_answer_beside_other_requests(service: Service) -> None:
    tenant = await service.tenant()
    sampling = pb.Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=7)

    async with service.stream(tenant.secret) as stream:
        alone = await stream.begin(sampling=sampling)
        await stream.end(alone)
        crowd = [start(sampling=pb.Sampling(temperature=1.0, seed=n)) for n in range(8)]
        again = start(sampling=sampling)
        await stream.send(*crowd, again)
        for frame in (*crowd, again):
            await stream.end(frame.request_id)

    assert stream.token_ids(again.request_id) == stream.token_ids(alone)
    assert len({tuple(stream.token_ids(frame.request_id)) for frame in crowd}) > 1


async def test_a_stop_sequence_ends_the_answer_and_is_cut_off(service: Service) -> None:
    tenant = await service.tenant()
    async with service.stream(tenant.secret) as stream:
        whole = await stream.begin(max_output_tokens=80)
        await stream.end(whole)
        text = stream.text(whole)
        stop = text[30:34]

        request_id = await stream.begin(max_output_tokens=80, stop_sequences=[stop])
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_STOP_SEQUENCE
    assert stream.text(request_id) == text[: text.index(stop)]
    assert finished.usage.delivered_token_count == len(stream.token_ids(request_id)) < 80


async def test_the_count_is_the_admitted_one(service: Service, tenant: Tenant) -> None:
    turns = conversation("Which hotel is near the sea?", "The second one.", "And allows dogs? 🙂")
    async with calls(service, tenant.secret) as call, service.stream(tenant.secret) as stream:
        for prompt in ({"conversation": turns}, {"text": "A weir regulates a stream. " * 30}):
            counted = await call("CountTokens", model=MODEL, **prompt)

            request_id = await stream.begin(**prompt)
            admitted = await stream.first(request_id, "admitted")

            assert counted.input_token_count == admitted.input_token_count > 10
            assert counted.context_window_tokens == CONTEXT_WINDOW_TOKENS


async def test_models_are_listed_with_their_price(service: Service, tenant: Tenant) -> None:
    foreign = await service.tenant(currency_code="EUR")
    async with service.client(tenant.secret) as client, service.client(foreign.secret) as in_euros:
        [model] = await client.list_models()
        [unpriced] = await in_euros.list_models()

    assert (model.name, model.engine) == (MODEL, "torch")
    assert (model.context_window_tokens, model.vocabulary_size) == (CONTEXT_WINDOW_TOKENS, 400)
    assert model.price is not None
    assert model.price.input_picos_per_token == INPUT_PICOS
    assert model.price.output_picos_per_token == OUTPUT_PICOS
    assert unpriced.price is None


async def test_without_max_tokens_an_answer_ends_with_the_window(service: Service) -> None:
    """Its lease is extended many times on the way."""
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 1_000_000})
    prompt = [PLAIN_IDS[i % 300] for i in range(CONTEXT_WINDOW_TOKENS - 600)]

    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(prompt=prompt, max_output_tokens=None)
        finished = await stream.finished(request_id)

    assert finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert finished.usage.delivered_token_count == 600 == len(stream.token_ids(request_id))
    assert service.database.counters(tenant) == {"tokens_per_month": (CONTEXT_WINDOW_TOKENS, 0)}


async def test_running_counts_come_at_the_interval(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(max_output_tokens=50, usage_interval_tokens=20)
        await stream.end(request_id)

    received = 0
    reported = []
    for frame in stream.frames[request_id]:
        received += len(frame.delta.token_ids)
        if frame.WhichOneof("kind") == "usage":
            reported.append(frame.usage.usage.delivered_token_count)
            assert frame.usage.usage.delivered_token_count == received, (
                "the counts are those at this point of the stream"
            )
            assert picos(frame.usage.cost) == cost_picos(frame.usage.usage)
    assert reported == [20, 40]


async def test_a_hundred_requests_share_a_stream_and_do_not_mix(service: Service) -> None:
    tenant = await service.tenant()
    rng = random.Random(3)
    starts = {}
    for index in range(100):
        frame = start(prompt=rng.sample(PLAIN_IDS, 5 + index % 7), max_output_tokens=3 + index % 11)
        starts[frame.request_id] = frame

    async with service.stream(tenant.secret) as stream:
        for some in batches(list(starts.values()), 25):
            await stream.send(*some)
        for request_id in starts:
            await stream.finished(request_id)
        alone = random.Random(4).sample(sorted(starts), 5)
        for request_id in alone:
            repeated = start()
            repeated.start.CopyFrom(starts[request_id].start)
            await stream.send(repeated)
            await stream.end(repeated.request_id)
            assert stream.token_ids(repeated.request_id) == stream.token_ids(request_id), "as alone"

    for request_id, frame in starts.items():
        assert len(stream.token_ids(request_id)) == frame.start.max_output_tokens
        assert [delta.seq for delta in stream.of(request_id, "delta")] == list(
            range(1, len(stream.of(request_id, "delta")) + 1)
        )
        assert len(stream.ends(request_id)) == 1
    assert len(service.database.events(tenant)) == 105
    await service.no_hold_left(tenant)


async def test_the_frames_of_one_moment_travel_in_one_message(service: Service) -> None:
    """In Python a message costs far more than a frame in it."""
    tenant = await service.tenant()
    starts = [start(max_output_tokens=40) for _ in range(20)]

    async with service.stream(tenant.secret) as stream:
        await stream.send(*starts)
        for frame in starts:
            await stream.end(frame.request_id)

    frame_count = sum(len(message.frames) for message in stream.messages)
    assert len(stream.messages) < frame_count / 3


async def test_streams_of_one_connection_do_not_disturb_each_other(service: Service) -> None:
    tenant = await service.tenant()

    async with service.channel() as channel, asyncio.TaskGroup() as tasks:
        stub = pb_grpc.InferenceServiceStub(channel)
        streams = [Stream(stub.Generate(metadata=bearer(tenant.secret))) for _ in range(6)]
        for stream in streams:
            tasks.create_task(stream.read_all())
        request_ids = [
            await stream.begin(max_output_tokens=2000 if n == 0 else 20)
            for n, stream in enumerate(streams)
        ]
        await streams[0].received(request_ids[0], 1)
        streams[0].call.cancel()
        for stream, request_id in list(zip(streams, request_ids, strict=True))[1:]:
            assert (await stream.finished(request_id)).reason == types_pb2.FINISH_REASON_LENGTH
            await stream.half_close()

    await service.no_hold_left(tenant)
    outcomes = sorted(event["outcome"] for event in service.database.events(tenant))
    assert outcomes == ["cancelled", *["length"] * 5]


async def test_the_sdk_streams_and_reports_usage_and_cost(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 10_000})

    async with service.client(tenant.secret) as client:
        async with client.generate(
            MODEL, "Which hotel is near the harbour?", max_output_tokens=24, ignore_eos=True
        ) as answer:
            pieces = [delta.text async for delta in answer]
        result = answer.result
        [quota] = await client.get_quota()
        recorded = await client.get_generation(result.request_id)

    assert "".join(pieces) == result.text
    assert result.finish_reason is FinishReason.LENGTH
    assert result.usage.delivered_token_count == len(result.token_ids) == 24
    cached = result.usage.cached_input_token_count
    uncached = result.usage.input_token_count - cached
    cost = uncached * INPUT_PICOS + cached * CACHED_PICOS + 24 * OUTPUT_PICOS
    assert (result.cost.currency_code, result.cost.picos) == ("USD", cost)
    assert recorded.cost == result.cost
    assert quota.used_value == result.usage.input_token_count + 24
    assert quota.held_value == 0


async def test_leaving_the_block_of_the_sdk_cancels(service: Service, tenant: Tenant) -> None:
    async with (
        service.client(tenant.secret) as client,
        client.generate(MODEL, "Tell me more.", max_output_tokens=3000, ignore_eos=True) as answer,
    ):
        await anext(answer)

    assert answer.result.finish_reason is FinishReason.CANCELLED
    event = service.database.event(tenant, answer.request_id)
    assert event["delivered_token_count"] == len(answer.result.token_ids) < 3000


async def test_a_request_id_is_answered_in_the_spelling_of_the_client(service: Service) -> None:
    tenant = await service.tenant()
    frame = start()
    spelt = frame.request_id.upper()
    frame.request_id = spelt

    async with service.stream(tenant.secret) as stream:
        await stream.send(frame)
        await stream.finished(spelt)

    assert list(stream.frames) == [spelt]
    assert service.database.event(tenant, spelt.lower())["delivered_token_count"] == 20


def batches(items: list[pb.ClientFrame], size: int) -> list[list[pb.ClientFrame]]:
    """Yield consecutive parts."""
    return [items[i : i + size] for i in range(0, len(items), size)]
