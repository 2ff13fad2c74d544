"""Spans of real requests at a collector."""

from __future__ import annotations

import asyncio
import itertools
import json
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from opentelemetry.proto.trace.v1 import trace_pb2
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc
from weir_client import wire
from weir_client.receipts import content_hash

from metering.core.models import QuotaDimension
from tests.calls import calls
from tests.e2e.conftest import Serve
from tests.otlp_receiver import ReceivedSpan, Receiver, receiving
from tests.scraped import scrape
from tests.service import MODEL, Refusal, Service, Stream, bearer, conversation, start, until

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
OTHER_TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "b7ad6b7169203331"
SECRET_WORDS = "nobody-but-the-model"
US = 1000  # ns: timings have a resolution of a microsecond
Facts = dict[str, float]

MESSAGES = [{"role": "user", "content": "Go"}]
BODIES: dict[str, dict[str, object]] = {
    "chat/completions": {"messages": MESSAGES, "max_tokens": 15, "ignore_eos": True},
    "completions": {"prompt": "Go", "max_tokens": 15, "ignore_eos": True},
    "responses": {"input": "Go", "max_output_tokens": 15, "ignore_eos": True},
    "messages": {"messages": MESSAGES, "max_tokens": 15},  # answers of random length
}
PACE = {  # names in the timings, in a receipt and in a span, where the unit is a second
    "ttft_ms": ("ttft_us", "gen_ai.server.time_to_first_token", 1000),
    "tokens_per_second": ("tokens_per_second_milli", "weir.tokens_per_second", 1),
    "itl_p50_ms": ("itl_p50_us", "weir.inter_token.p50", 1000),
    "itl_p99_ms": ("itl_p99_us", "weir.inter_token.p99", 1000),
    "itl_max_ms": ("itl_max_us", "weir.inter_token.max", 1000),
    "client_stall_ms": ("client_stall_us", "weir.client_stall", 1000),
}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    """Yield a collector."""
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def traced(serve: Serve, receiver: Receiver, model: Path) -> Service:
    """Return a service that sends its spans to the collector."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.address)
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=tests")
        return serve(model, is_drained=True)


def traceparent(flags: str) -> tuple[tuple[str, str], ...]:
    """Return a client's metadata."""
    return (("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-{flags}"), ("tracestate", "vendor=1"))


async def spans_of(receiver: Receiver, request_id: str) -> tuple[ReceivedSpan, list[ReceivedSpan]]:
    """Return the span of a request and those of its stages, in order."""
    await until(lambda: request_id in receiver.traces(), "its spans to come")
    metrics = receiver.traces()[request_id]
    [root] = [each for each in metrics if "gen_ai.response.id" in each.attributes]
    stages = sorted(
        (each for each in metrics if each is not root),
        key=lambda each: each.span.start_time_unix_nano,
    )
    return root, stages


async def ask(
    service: Service, secret: str, metadata: tuple[tuple[str, str], ...], frame: pb.ClientFrame
) -> pb.ServerFrame:
    """Run one request with this metadata; return its end."""
    async with service.channel() as channel, asyncio.TaskGroup() as tasks:
        call = pb_grpc.InferenceServiceStub(channel).Generate(metadata=(*bearer(secret), *metadata))
        stream = Stream(call)
        tasks.create_task(stream.read_all())
        await stream.send(frame)
        await stream.half_close()
        return await stream.end(frame.request_id)


async def test_a_trace_gets_a_span_per_stage(traced: Service, receiver: Receiver) -> None:
    tenant = await traced.tenant()
    frame = start(conversation=conversation(SECRET_WORDS), max_output_tokens=15)

    finished = (await ask(traced, tenant.secret, traceparent("01"), frame)).finished
    root, stages = await spans_of(receiver, frame.request_id)

    assert root.span.trace_id.hex() == TRACE_ID
    assert root.span.parent_span_id.hex() == SPAN_ID
    assert root.span.trace_state == "vendor=1"
    assert (root.span.name, root.span.kind) == (f"chat {MODEL}", trace_pb2.Span.SPAN_KIND_SERVER)
    facts = root.attributes
    assert facts["gen_ai.operation.name"] == "chat"
    assert facts["gen_ai.provider.name"] == "weir"
    assert facts["gen_ai.request.model"] == facts["gen_ai.response.model"] == MODEL
    assert facts["gen_ai.usage.input_tokens"] == finished.usage.input_token_count
    assert facts["gen_ai.usage.output_tokens"] == 15
    assert facts["gen_ai.response.finish_reasons"] == ["length"]
    ttft_s = finished.timings.ttft_ms / 1000
    assert facts["gen_ai.response.time_to_first_chunk"] == pytest.approx(ttft_s)
    assert facts["weir.inter_token.max"] == pytest.approx(finished.timings.itl_max_ms / 1000)
    assert facts["gen_ai.server.time_per_output_token"] == pytest.approx(
        1 / finished.timings.tokens_per_second
    )
    assert facts["weir.organization_id"] == str(tenant.organization_id)
    assert root.resource["service.name"] == "weir"
    assert root.resource["deployment.environment.name"] == "tests"
    lengths_ms = {
        each.span.name: (each.span.end_time_unix_nano - each.span.start_time_unix_nano) / 1e6
        for each in stages
    }
    assert {"auth", "tokenize", "admission", "prefill", "decode", "settle"} <= lengths_ms.keys()
    for name, length_ms in lengths_ms.items():
        assert length_ms == pytest.approx(getattr(finished.timings, f"{name}_ms"), abs=0.001), name
    assert all(each.span.parent_span_id == root.span.span_id for each in stages)
    for earlier, later in itertools.pairwise(stages):
        assert earlier.span.end_time_unix_nano <= later.span.start_time_unix_nano + US
    assert stages[0].span.start_time_unix_nano >= root.span.start_time_unix_nano
    assert stages[-1].span.end_time_unix_nano <= root.span.end_time_unix_nano + len(stages) * US


async def test_a_refusal_is_a_span_with_its_reason(traced: Service, receiver: Receiver) -> None:
    tenant = await traced.tenant({QuotaDimension.TOKENS_PER_MONTH: 25})
    frame = start(prompt=range(7, 60))

    await ask(traced, tenant.secret, traceparent("01"), frame)
    root, stages = await spans_of(receiver, frame.request_id)

    assert root.attributes["error.type"] == root.span.status.message == "QUOTA_EXCEEDED"
    assert root.span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert "gen_ai.usage.output_tokens" not in root.attributes
    assert {each.span.name for each in stages} <= {"auth", "tokenize", "admission"}


async def test_spans_of_unsampled_traces_are_not_sent(traced: Service, receiver: Receiver) -> None:
    """Sampled spans contain no prompts or outputs either."""
    tenant = await traced.tenant()
    unsampled, sampled = start(), start(conversation=conversation(SECRET_WORDS))

    await ask(traced, tenant.secret, traceparent("00"), unsampled)
    await ask(traced, tenant.secret, traceparent("01"), sampled)
    await spans_of(receiver, sampled.request_id)
    metrics = await scrape(traced.metrics_url)

    assert unsampled.request_id not in receiver.traces()
    assert SECRET_WORDS.encode() not in receiver.data
    assert tenant.secret.encode() not in receiver.data
    assert metrics.value("weir_traces_dropped_total") == 0


async def test_requests_without_a_trace_are_recorded(traced: Service, receiver: Receiver) -> None:
    tenant, request_id, frame = await traced.tenant(), str(uuid.uuid4()), start()
    headers = {
        "authorization": f"Bearer {tenant.secret}",
        "content-type": "application/json",
        "idempotency-key": request_id,
    }
    headers |= dict(traceparent("01"))
    body = json.dumps({"model": MODEL, "prompt": "a b c", "max_tokens": 3}).encode()
    request = urllib.request.Request(f"{traced.openai_url}/completions", data=body, headers=headers)

    def post() -> None:
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()

    await asyncio.to_thread(post)
    await ask(traced, tenant.secret, (), frame)
    over_http, _ = await spans_of(receiver, request_id)
    alone, _ = await spans_of(receiver, frame.request_id)

    assert over_http.span.trace_id.hex() == TRACE_ID
    assert over_http.span.name == f"text_completion {MODEL}"
    assert alone.span.trace_id.hex() != TRACE_ID
    assert not alone.span.parent_span_id


async def test_each_request_may_have_its_own_trace(traced: Service, receiver: Receiver) -> None:
    """Start frames may name traces, which do not change the request; others use the call's."""
    tenant = await traced.tenant()
    own, wrong = start(), start()
    own.traceparent, wrong.traceparent = (
        f"00-{OTHER_TRACE_ID}-{SPAN_ID}-01",
        "no traceparent, and no reason to refuse anybody",
    )
    async with traced.channel() as channel, asyncio.TaskGroup() as tasks:
        call = pb_grpc.InferenceServiceStub(channel).Generate(
            metadata=(*bearer(tenant.secret), *traceparent("01"))
        )
        stream = Stream(call)
        tasks.create_task(stream.read_all())
        await stream.send(own, wrong)
        await stream.finished(own.request_id)
        await stream.finished(wrong.request_id)
        await stream.half_close()
    own.traceparent = f"00-{TRACE_ID}-{SPAN_ID}-00"
    again = Refusal((await ask(traced, tenant.secret, (), own)).failed.status)

    in_own, _ = await spans_of(receiver, own.request_id)
    in_that_of_the_call, _ = await spans_of(receiver, wrong.request_id)

    assert in_own.span.trace_id.hex() == OTHER_TRACE_ID
    assert in_that_of_the_call.span.trace_id.hex() == TRACE_ID
    assert again.reason == "REQUEST_SETTLED", "the same payload, not another one"


async def test_the_clients_of_the_sdk_forward_a_trace(traced: Service, receiver: Receiver) -> None:
    tenant, request_id = await traced.tenant(), str(uuid.uuid4())

    async with traced.client(tenant.secret) as client:
        await client.complete(
            MODEL,
            "a b c",
            max_output_tokens=3,
            request_id=request_id,
            traceparent=traceparent("01")[0][1],
        )
    root, _ = await spans_of(receiver, request_id)

    assert root.span.trace_id.hex() == TRACE_ID


async def answered(service: Service, secret: str, path: str, streams: bool) -> tuple[str, Facts]:
    """Return the id of a request over HTTP, and the timings of its answer."""
    body = {"model": MODEL, "temperature": 0, "stream": streams} | BODIES[path]
    headers = {"authorization": f"Bearer {secret}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{service.openai_url}/{path}", json=body, headers=headers) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    reported = [json.loads(each) for each in (lines if streams else [text])]
    reported += [each["response"] for each in reported if "response" in each]
    [timings] = [
        each["weir"]["timings"][0] for each in reported if "timings" in each.get("weir", {})
    ]
    return response.headers["x-request-id"], timings


@pytest.mark.parametrize(
    ("path", "streams"), [("grpc", True), *itertools.product(BODIES, (False, True))]
)
async def test_every_record_of_a_request_has_the_same_pace(
    traced: Service, receiver: Receiver, path: str, streams: bool
) -> None:
    tenant = await traced.tenant()
    if path == "grpc":
        frame = start(conversation=conversation("Go"), max_output_tokens=15)
        end = await ask(traced, tenant.secret, (), frame)
        request_id = frame.request_id
        reported = {name: getattr(end.finished.timings, name) for name in PACE}
        [sent] = end.finished.receipts
    else:
        request_id, reported = await answered(traced, tenant.secret, path, streams)
    async with calls(traced, tenant.secret) as call:
        found = (await call("GetGeneration", request_id=request_id)).generation
    root, _ = await spans_of(receiver, request_id)

    [receipt] = found.receipts
    if path == "grpc":
        assert receipt == sent
    kept = wire.receipt(receipt)
    assert kept.version == 3
    assert content_hash(kept) == kept.hash
    assert found.timings.ttft_ms > 0
    for name, (in_receipt, attribute, unit) in PACE.items():
        value = getattr(found.timings, name)
        assert reported[name] == pytest.approx(value, abs=0.001), name
        assert getattr(receipt.timings, in_receipt) == pytest.approx(value * 1000, abs=0.51), name
        if value:
            assert root.attributes[attribute] == pytest.approx(value / unit), name
    if path != "messages":
        assert all(getattr(found.timings, name) > 0 for name in PACE if name != "client_stall_ms")
