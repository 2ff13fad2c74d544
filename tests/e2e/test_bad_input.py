"""Invalid input: each mistake has its status, reason and details, and affects no other client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import grpc
import psycopg
import pytest
from grpc import StatusCode
from weir.v1 import admin_service_pb2_grpc as admin_pb_grpc
from weir.v1 import billing_service_pb2_grpc as billing_pb_grpc
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc as pb_grpc
from weir.v1 import live_requests_pb2, months_pb2, types_pb2
from weir.v1 import usage_reports_pb2 as usage_pb

from api.generation.endings import UsageSoFar
from api.generation.request.control import record
from api.generation.request.phases import Received
from api.generation.state import Stopwatch
from metering.core.models import QuotaDimension
from metering.store.db import psycopg_conninfo
from tests.forked_workers import children_of
from tests.service import (
    CONTEXT_WINDOW_TOKENS,
    MODEL,
    PLAIN_IDS,
    Refusal,
    Service,
    Stream,
    Tenant,
    bearer,
    cancel,
    conversation,
    log_events,
    picos,
    refused,
    start,
    until,
)

HUNDRED_MB = 100_000_000
UNKNOWN_KEY = "wk_abcdefgh_" + "x" * 43
SOME_UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"

LONG = [PLAIN_IDS[i % 300] for i in range(CONTEXT_WINDOW_TOKENS + 7)]
TOO_LONG = {
    "input_token_count": str(CONTEXT_WINDOW_TOKENS + 7),
    "context_window_tokens": str(CONTEXT_WINDOW_TOKENS),
}
UNREAL: dict[str, tuple[Any, str, str]] = {
    "an invoice number with a NUL": (
        months_pb2.GetInvoiceRequest(number="a\0"),
        "GetInvoice",
        "number",
    ),
    "an invoice number of 60 kB": (
        months_pb2.GetInvoiceRequest(number="x" * 60_000),
        "GetInvoice",
        "number",
    ),
    "a month with a NUL": (usage_pb.GetUsageRequest(month="2026-1\0"), "GetUsage", "month"),
    "a page token of nested lists": (
        usage_pb.GetUsageRequest(
            month="2026-11",
            group_by=[usage_pb.USAGE_GROUPING_DAY],
            page_token=base64.b64encode(b"[" * 1400).decode(),
        ),
        "GetUsage",
        "page_token",
    ),
    "a page token of 52 kB": (
        usage_pb.GetUsageRequest(
            month="2026-11", page_token=base64.b64encode(b"[" * 39_000).decode()
        ),
        "GetUsage",
        "page_token",
    ),
    "a day that is none": (
        usage_pb.GetUsageRequest(month="2026-11", day="9999-12-32"),
        "GetUsage",
        "day",
    ),
}
KEYS = {
    "no key": None,
    "unknown key": UNKNOWN_KEY,
    "empty key": "",
    "no secret": "hello",
    "very long": "x" * 4000,
}
STREAM_FAULTS = {
    "no frames": (pb.GenerateRequest(), "frames"),
    "frame without kind": (
        pb.GenerateRequest(frames=[pb.ClientFrame(request_id=str(uuid.uuid4()))]),
        "frames[0].kind",
    ),
    "the second frame": (pb.GenerateRequest(frames=[start(), pb.ClientFrame()]), "frames[1].kind"),
}


@pytest.fixture
async def tenant(service: Service) -> AsyncIterator[Tenant]:
    """Yield a tenant without holds at the end, on a service without incidents."""
    incidents = len(log_events(service.log, "incident"))
    tenant = await service.tenant()
    yield tenant
    await service.no_hold_left(tenant)
    assert service.serving()
    assert log_events(service.log, "incident")[incidents:] == []


@dataclass(frozen=True, slots=True)
class Bad:
    """Invalid start frame, with the expected invalid fields."""

    fields: dict[str, Any]
    wrong: list[str]
    code: StatusCode = StatusCode.INVALID_ARGUMENT
    reason: str = "FIELD_INVALID"
    metadata: dict[str, str] = field(default_factory=dict)


def turns(*roles: pb.Role.ValueType) -> pb.Conversation:
    """Return messages with these roles."""
    return pb.Conversation(messages=[pb.Message(role=role, content="x") for role in roles])


BAD = {
    "unknown model": Bad(
        {"model": "gpt"}, [], StatusCode.NOT_FOUND, "MODEL_UNKNOWN", {"model": "gpt"}
    ),
    "no model": Bad({"model": ""}, ["model"]),
    "model with a NUL": Bad({"model": "a\0b"}, ["model"]),
    "model with a line": Bad({"model": "a\nb"}, ["model"]),
    "model of 257 characters": Bad({"model": "x" * 257}, ["model"]),
    "model of 3 MB": Bad({"model": "x" * 3_000_000}, ["model"]),
    "region with a NUL": Bad({"region": "a\0b"}, ["region"]),
    "region of 3 MB": Bad({"region": "x" * 3_000_000}, ["region"]),
    "currency of 3 MB": Bad(
        {"max_cost": types_pb2.Money(currency_code="x" * 3_000_000, units=1)},
        ["max_cost.currency_code"],
    ),
    "no prompt": Bad({"token_ids": pb.TokenIds(), "prompt": None}, ["token_ids.ids"]),
    "empty conversation": Bad({"conversation": pb.Conversation()}, ["conversation.messages"]),
    "empty text": Bad({"text": ""}, ["text"]),
    "role unset": Bad(
        {"conversation": turns(pb.ROLE_USER, pb.ROLE_UNSPECIFIED)},
        ["conversation.messages[1].role"],
    ),
    "role unknown": Bad(
        {"conversation": pb.Conversation.FromString(b"\n\x02\x08\x63")},
        ["conversation.messages[0].role"],
    ),
    "negative temperature": Bad(
        {"sampling": pb.Sampling(temperature=-0.1)}, ["sampling.temperature"]
    ),
    "temperature too high": Bad(
        {"sampling": pb.Sampling(temperature=2.01)}, ["sampling.temperature"]
    ),
    "temperature NaN": Bad(
        {"sampling": pb.Sampling(temperature=float("nan"))}, ["sampling.temperature"]
    ),
    "temperature infinite": Bad(
        {"sampling": pb.Sampling(temperature=float("inf"))}, ["sampling.temperature"]
    ),
    "top_p negative": Bad({"sampling": pb.Sampling(top_p=-0.1)}, ["sampling.top_p"]),
    "top_p above 1": Bad({"sampling": pb.Sampling(top_p=1.001)}, ["sampling.top_p"]),
    "top_p NaN": Bad({"sampling": pb.Sampling(top_p=float("nan"))}, ["sampling.top_p"]),
    "top_k negative": Bad({"sampling": pb.Sampling(top_k=-2)}, ["sampling.top_k"]),
    "no output": Bad({"max_output_tokens": 0}, ["max_output_tokens"]),
    "negative output": Bad({"max_output_tokens": -1}, ["max_output_tokens"]),
    "interval 0": Bad({"usage_interval_tokens": 0}, ["usage_interval_tokens"]),
    "17 stop sequences": Bad({"stop_sequences": ["x"] * 17}, ["stop_sequences"]),
    "empty stop sequence": Bad({"stop_sequences": ["x", ""]}, ["stop_sequences[1]"]),
    "long stop sequence": Bad({"stop_sequences": ["x" * 257]}, ["stop_sequences[0]"]),
    "17 labels": Bad({"labels": {str(n): "" for n in range(17)}}, ["labels"]),
    "label without a key": Bad({"labels": {"": "x"}}, ["labels['']"]),
    "label key too long": Bad({"labels": {"k" * 65: "x"}}, [f"labels['{'k' * 64}']"]),
    "label value too long": Bad({"labels": {"k": "x" * 513}}, ["labels['k']"]),
    "label with a NUL": Bad({"labels": {"k": "a\0b"}}, ["labels['k']"]),
    "label with a control character": Bad({"labels": {"k": "a\x1bb"}}, ["labels['k']"]),
    "token outside the vocabulary": Bad({"prompt": [7, 400]}, ["token_ids.ids"]),
    "negative token": Bad({"prompt": [7, -1]}, ["token_ids.ids"]),
    "prompt too long": Bad(
        {"prompt": LONG, "max_output_tokens": None},
        ["prompt"],
        reason="CONTEXT_EXCEEDED",
        metadata=TOO_LONG | {"excess_token_count": "8"},
    ),
    "prompt and output too long": Bad(
        {"prompt": LONG[:1000], "max_output_tokens": CONTEXT_WINDOW_TOKENS - 1000 + 1},
        ["prompt"],
        reason="CONTEXT_EXCEEDED",
        metadata={"excess_token_count": "1"},
    ),
    "output beyond any window": Bad(
        {"max_output_tokens": 2**63 - 1}, ["prompt"], reason="CONTEXT_EXCEEDED"
    ),
    "everything at once": Bad(
        {
            "model": "",
            "text": "",
            "max_output_tokens": 0,
            "sampling": pb.Sampling(temperature=-1, top_p=2),
        },
        ["model", "text", "sampling.temperature", "sampling.top_p", "max_output_tokens"],
    ),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
async def test_a_bad_start_is_refused_alone(service: Service, tenant: Tenant, bad: Bad) -> None:
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin(**bad.fields)
        refusal = await stream.failed(request_id)
        await check_serves(stream)

    assert (refusal.code, refusal.reason) == (bad.code, bad.reason)
    assert refusal.fields == bad.wrong
    assert bad.metadata.items() <= dict(refusal.info.metadata).items()
    assert refusal.frame is not None
    assert not refusal.frame.HasField("usage")
    assert service.database.holds(tenant) == {"settled": 1}, "only the good one was ever held"


async def test_unstorable_names_do_no_harm_to_an_admin(service: Service, tenant: Tenant) -> None:
    """Admins see running requests, which once included the model's name as sent by the client."""
    admin = await service.tenant(scopes=("admin",))
    hostile = [start(model=f"x\0{number}", text="hello") for number in range(200)]
    async with service.stream(tenant.secret) as stream, service.channel() as channel:
        looking = admin_pb_grpc.AdminServiceStub(channel)
        for _ in range(5):
            await stream.send(*hostile)
            shown = await looking.ListLiveRequests(
                live_requests_pb2.ListLiveRequestsRequest(), metadata=bearer(admin.secret)
            )
            assert not shown.unresponsive_process_ids
        for frame in hostile:
            refusal = await stream.failed(frame.request_id)
            assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, ["model"])
        await check_serves(stream)


async def test_admins_see_unrouted_requests_without_a_model() -> None:
    request = SimpleNamespace(
        caller=SimpleNamespace(
            payer=SimpleNamespace(organization_id=1, project_id=2, api_key_id=3), received_at=0.0
        ),
        usage=UsageSoFar(),
        start=SimpleNamespace(request_id=SOME_UUID, model="as it was sent"),
        phase=Received(),
        watch=Stopwatch(0.0, 0.0),
    )

    assert record(cast(Any, request), 1.0)["model"] == ""


@pytest.mark.parametrize("name", UNREAL)
async def test_a_bad_query_names_its_field(service: Service, tenant: Tenant, name: str) -> None:
    _, secret = await service.new_key(tenant, "billing")
    requested, call, field = UNREAL[name]
    async with service.channel() as channel:
        stub = billing_pb_grpc.BillingServiceStub(channel)
        refusal = await refused(getattr(stub, call)(requested, metadata=bearer(secret)))

    assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, [field])


async def test_a_message_above_its_calls_bound_is_refused(service: Service, tenant: Tenant) -> None:
    _, secret = await service.new_key(tenant, "billing")
    async with service.channel() as channel:
        stub = billing_pb_grpc.BillingServiceStub(channel)
        refusal = await refused(
            stub.GetInvoice(
                months_pb2.GetInvoiceRequest(number="x" * 100_000), metadata=bearer(secret)
            )
        )

    assert (refusal.code, refusal.info.reason) == (StatusCode.INVALID_ARGUMENT, "MESSAGE_TOO_LARGE")


async def test_the_last_day_of_the_calendar_is_a_day(service: Service, tenant: Tenant) -> None:
    _, secret = await service.new_key(tenant, "billing")
    requested = usage_pb.GetUsageRequest(
        month="2026-11", day="9999-12-31", group_by=[usage_pb.USAGE_GROUPING_DAY]
    )
    async with service.channel() as channel:
        answer = await billing_pb_grpc.BillingServiceStub(channel).GetUsage(
            requested, metadata=bearer(secret)
        )

    assert not answer.rows


async def test_the_excess_of_a_long_prompt_is_named(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        refusal = await stream.failed(
            await stream.begin(text="word " * CONTEXT_WINDOW_TOKENS, max_output_tokens=None)
        )

    facts = refusal.info.metadata
    assert (
        int(facts["input_token_count"]) + 1 - CONTEXT_WINDOW_TOKENS
        == int(facts["excess_token_count"])
        > 0
    )
    assert facts["excess_token_count"] in refusal.status.message


@pytest.mark.parametrize(
    "request_id", ["", "x", "1234", SOME_UUID[:-1], SOME_UUID + "0", "🙂" * 36]
)
async def test_a_malformed_id_is_refused(service: Service, tenant: Tenant, request_id: str) -> None:
    frame = start()
    frame.request_id = request_id

    async with service.stream(tenant.secret) as stream:
        await stream.send(frame)
        refusal = await stream.failed(request_id)
        await check_serves(stream)

    assert (refusal.code, refusal.fields) == (StatusCode.INVALID_ARGUMENT, ["request_id"])


@pytest.mark.parametrize("secret", KEYS.values(), ids=KEYS.keys())
async def test_without_a_good_key_nothing_is_served(service: Service, secret: str | None) -> None:
    async with service.channel() as channel:
        inference = pb_grpc.InferenceServiceStub(channel)
        for call in (
            inference.CountTokens,
            inference.ListModels,
            inference.GetQuota,
            inference.Quote,
            inference.GetGeneration,
        ):
            refusal = await refused(call(request_of(call), metadata=bearer(secret)))
            assert (refusal.code, refusal.reason) == (StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    async with service.stream(secret) as stream:
        assert await stream.closed() is StatusCode.UNAUTHENTICATED
        assert stream.error is not None
        assert Refusal.of(stream.error).reason == "UNAUTHENTICATED"


def request_of(call: Any) -> Any:
    """Return an empty request for a call of the inference service."""
    name = call._method.decode().rpartition("/")[2]
    return getattr(pb, f"{name}Request")()


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", "Basic dXNlcjpwYXNz"),),
        (("authorization", "Bearer"),),
        (("authorization", "{secret}"),),
        (("x-api-key", "{secret}"),),
    ],
    ids=str,
)
async def test_a_malformed_header_is_answered_with_the_right_form(
    service: Service, tenant: Tenant, metadata: tuple[tuple[str, str], ...]
) -> None:
    sent = tuple((key, value.format(secret=tenant.secret)) for key, value in metadata)

    async with service.channel() as channel:
        refusal = await refused(
            pb_grpc.InferenceServiceStub(channel).ListModels(pb.ListModelsRequest(), metadata=sent)
        )

    assert refusal.code is StatusCode.UNAUTHENTICATED
    assert "authorization: Bearer" in refusal.status.message
    assert tenant.secret not in service.log


async def test_the_scheme_may_be_written_in_any_case(service: Service, tenant: Tenant) -> None:
    async with service.channel() as channel:
        metadata = (("authorization", f"bEARER  {tenant.secret} "),)
        models = await pb_grpc.InferenceServiceStub(channel).ListModels(
            pb.ListModelsRequest(), metadata=metadata
        )

    assert [model.name for model in models.models] == [MODEL]


async def test_a_revoked_key_is_refused_on_an_open_stream(service: Service, tenant: Tenant) -> None:
    key, secret = await service.new_key(tenant)
    async with service.stream(secret) as stream:
        await stream.end(await stream.begin())
        running = await stream.begin(max_output_tokens=1500)
        await stream.received(running, 1)

        await service.revoke(key)

        refusal = await stream.failed(await stream.begin())
        assert refusal.code is StatusCode.UNAUTHENTICATED
        assert refusal.reason in ("UNAUTHENTICATED", "KEY_REVOKED"), (
            "whether it was let in for a moment or not"
        )
        ended = await stream.failed(running)
        assert (ended.code, ended.reason) == (StatusCode.UNAUTHENTICATED, "KEY_REVOKED"), (
            "what was admitted before ends too"
        )
    async with service.stream(secret) as stream:
        assert await stream.closed() is StatusCode.UNAUTHENTICATED


async def test_an_expired_key_is_refused(service: Service, tenant: Tenant) -> None:
    _, secret = await service.new_key(tenant, lifetime=timedelta(milliseconds=1))

    async with service.stream(secret) as stream:
        assert await stream.closed() is StatusCode.UNAUTHENTICATED


async def test_an_expired_key_starts_nothing_more(service: Service, tenant: Tenant) -> None:
    key, secret = await service.new_key(tenant)
    async with service.stream(secret) as stream:
        await stream.end(await stream.begin())
        with psycopg.connect(psycopg_conninfo(service.database_url), autocommit=True) as connection:
            connection.execute("UPDATE api_keys SET expires_at = now() WHERE id = %s", [key.id])

        assert (await stream.failed(await stream.begin())).code is StatusCode.UNAUTHENTICATED


async def test_a_missing_scope_is_named(service: Service, tenant: Tenant) -> None:
    record, secret = await service.new_key(tenant, "billing")

    async with service.stream(secret) as stream:
        assert await stream.closed() is StatusCode.PERMISSION_DENIED
        assert stream.error is not None
        refusal = Refusal.of(stream.error)
    assert refusal.reason == "PERMISSION_DENIED"
    assert record.prefix in refusal.status.message
    assert "inference" in refusal.status.message
    assert secret not in refusal.status.message


async def test_a_model_without_a_price_cannot_be_sold(service: Service) -> None:
    tenant = await service.tenant(currency_code="EUR")

    async with service.stream(tenant.secret) as stream:
        refusal = await stream.failed(await stream.begin())

    assert (refusal.code, refusal.reason) == (StatusCode.FAILED_PRECONDITION, "PRICE_MISSING")
    assert refusal.info.metadata["model"] == MODEL
    assert service.database.holds(tenant) == {}


async def test_an_exhausted_quota_is_reported_with_its_numbers(service: Service) -> None:
    tenant = await service.tenant({QuotaDimension.TOKENS_PER_MONTH: 100})
    async with service.stream(tenant.secret) as stream:
        await stream.end(await stream.begin(max_output_tokens=75))

        refusal = await stream.failed(await stream.begin())

    facts = refusal.info.metadata
    assert (refusal.code, refusal.reason) == (StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    assert (facts["limit"], facts["used"], facts["held"], facts["remaining"]) == (
        "100",
        "85",
        "0",
        "15",
    )
    assert facts["reset_time"].endswith("Z")
    assert "may use 100 tokens per month and has 15 left" in refusal.status.message


async def test_the_same_start_twice_is_answered_once(service: Service, tenant: Tenant) -> None:
    frame = start(max_output_tokens=200)
    async with service.stream(tenant.secret) as stream:
        await stream.send(frame, frame)
        await stream.received(frame.request_id, 1)
        await stream.send(frame)
        await stream.finished(frame.request_id)
        await stream.half_close()
        assert await stream.closed() is StatusCode.OK

    assert len(stream.ends(frame.request_id)) == 1
    assert len(stream.token_ids(frame.request_id)) == 200
    assert len(service.database.events(tenant)) == 1


async def test_a_running_id_refuses_another_payload(service: Service, tenant: Tenant) -> None:
    frame = start(max_output_tokens=600)
    other = start(frame.request_id, max_output_tokens=5)
    invalid = start(frame.request_id, max_output_tokens=0)
    async with service.stream(tenant.secret) as stream:
        await stream.send(frame)
        await stream.received(frame.request_id, 1)
        await stream.send(other, invalid)
        await stream.finished(frame.request_id)

    refusals = [Refusal(failed.status, failed) for failed in stream.of(frame.request_id, "failed")]
    assert [refusal.code for refusal in refusals] == [
        StatusCode.ALREADY_EXISTS,
        StatusCode.INVALID_ARGUMENT,
    ]
    assert refusals[0].reason == "REQUEST_ID_REUSED"
    assert all(refusal.frame is not None and refusal.frame.duplicate_start for refusal in refusals)
    assert len(stream.token_ids(frame.request_id)) == 600
    assert service.database.event(tenant, frame.request_id)["delivered_token_count"] == 600


async def test_a_running_id_without_replay_is_refused(service: Service, tenant: Tenant) -> None:
    """Without a replay buffer a second stream would get a part; the first keeps the request."""
    frame = start(max_output_tokens=3000)
    async with service.stream(tenant.secret) as stream, service.stream(tenant.secret) as other:
        await stream.send(frame)
        await stream.received(frame.request_id, 1)

        await other.send(frame)
        same = await other.failed(frame.request_id)
        other.frames.clear()
        await other.send(start(frame.request_id, max_output_tokens=5))
        different = await other.failed(frame.request_id)

        await stream.cancel(frame.request_id)
        await stream.finished(frame.request_id)
    assert (same.code, same.reason) == (StatusCode.OUT_OF_RANGE, "OUTPUT_GONE")
    assert (different.code, different.reason) == (StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
    assert same.frame is not None
    assert not same.frame.duplicate_start
    assert len(service.database.events(tenant)) == 1


@pytest.mark.parametrize("on_same_stream", [True, False])
async def test_a_settled_id_is_answered_with_its_usage_and_billed_once(
    service: Service, tenant: Tenant, on_same_stream: bool
) -> None:
    frame = start(max_output_tokens=30)
    async with service.stream(tenant.secret) as first, service.stream(tenant.secret) as second:
        await first.send(frame)
        finished = await first.finished(frame.request_id)
        again = first if on_same_stream else second
        again.frames.clear()
        await again.send(frame)
        refusal = await again.failed(frame.request_id)
        again.frames.clear()
        await again.send(start(frame.request_id, max_output_tokens=31))
        reused = await again.failed(frame.request_id)

    assert (refusal.code, refusal.reason) == (StatusCode.ALREADY_EXISTS, "REQUEST_SETTLED")
    assert refusal.frame is not None
    assert refusal.frame.usage == finished.usage
    assert refusal.frame.cost == finished.cost
    assert refusal.info.metadata["delivered_token_count"] == "30"
    assert refusal.info.metadata["cost_picos"] == str(picos(finished.cost))
    assert refusal.info.metadata["outcome"] == "length"
    assert (reused.code, reused.reason) == (StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
    assert len(service.database.events(tenant)) == 1


async def test_an_id_belongs_to_one_project(service: Service, tenant: Tenant) -> None:
    other = await service.tenant()
    frame = start()

    for secret in (tenant.secret, other.secret):
        async with service.stream(secret) as stream:
            await stream.send(frame)
            assert (await stream.finished(frame.request_id)).usage.delivered_token_count == 20


async def test_a_cancel_of_an_unknown_request_is_refused(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        for request_id in (str(uuid.uuid4()), "nonsense", ""):
            await stream.cancel(request_id)
            refusal = await stream.failed(request_id)
            assert (refusal.code, refusal.reason) == (StatusCode.NOT_FOUND, "REQUEST_UNKNOWN")
        await check_serves(stream)


async def test_a_cancel_after_the_end_changes_nothing(service: Service, tenant: Tenant) -> None:
    async with service.stream(tenant.secret) as stream:
        request_id = await stream.begin()
        await stream.finished(request_id)
        await stream.cancel(request_id, request_id)
        await check_serves(stream)

    assert len(stream.ends(request_id)) == 1


@pytest.mark.parametrize(("message", "field"), STREAM_FAULTS.values(), ids=STREAM_FAULTS.keys())
async def test_an_invalid_message_ends_the_stream(
    service: Service, tenant: Tenant, message: pb.GenerateRequest, field: str
) -> None:
    async with service.stream(tenant.secret) as stream:
        running = await stream.begin(max_output_tokens=3000)
        await stream.received(running, 1)

        await stream.call.write(message)

        assert await stream.closed() is StatusCode.INVALID_ARGUMENT
        assert stream.error is not None
        assert Refusal.of(stream.error).fields == [field]
    await service.no_hold_left(tenant)
    event = service.database.event(tenant, running)
    assert event["outcome"] == "cancelled"
    assert event["delivered_token_count"] >= len(stream.token_ids(running))


async def test_a_stream_ended_during_an_answer_has_a_reason(
    service: Service, tenant: Tenant
) -> None:
    """The violation is read while the answer to the previous message is being written."""
    for _ in range(10):
        async with service.stream(tenant.secret) as stream:
            await stream.cancel(*(str(uuid.uuid4()) for _ in range(50)))
            await stream.call.write(pb.GenerateRequest())

            assert await stream.closed() is StatusCode.INVALID_ARGUMENT


async def test_a_message_of_100_mb_ends_its_own_stream(service: Service, tenant: Tenant) -> None:
    """The server refuses an oversized message by its length, without reading it."""
    async with (
        service.stream(tenant.secret) as other,
        service.channel(("grpc.max_send_message_length", -1)) as channel,
    ):
        await other.begin(max_output_tokens=3000)
        call: Any = pb_grpc.InferenceServiceStub(channel).Generate(metadata=bearer(tenant.secret))
        stream = Stream(call)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stream.read_all())
            running = await stream.begin(max_output_tokens=3000)
            await stream.received(running, 1)
            before = resident_bytes(service.pid)

            tasks.create_task(
                send_anyway(call, pb.GenerateRequest(frames=[start(text="x" * HUNDRED_MB)]))
            )

            assert await stream.closed() is StatusCode.RESOURCE_EXHAUSTED
        assert str(service.settings.messages.bytes_max) in await call.details(), (
            "how large it may be"
        )
        assert resident_bytes(service.pid) - before < HUNDRED_MB / 2
        await check_serves(other)
    await service.no_hold_left(tenant)
    assert service.database.event(tenant, running)["outcome"] == "cancelled"


async def send_anyway(call: Any, message: pb.GenerateRequest) -> None:
    """Send a message; the end of the call may interrupt it."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(message)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


async def test_bytes_that_are_no_message_are_refused(service: Service, tenant: Tenant) -> None:
    async with service.channel() as channel:
        count: Any = channel.unary_unary("/weir.v1.InferenceService/CountTokens")
        unary = await refused(count(b"\xff" * 20, metadata=bearer(tenant.secret)))
        generate: Any = channel.stream_stream("/weir.v1.InferenceService/Generate")
        call = generate(metadata=bearer(tenant.secret))
        await call.write(b"\xff\x00garbage")
        streamed = await refused(call.read())

    for refusal in (unary, streamed):
        assert (refusal.code, refusal.reason) == (StatusCode.INVALID_ARGUMENT, "MESSAGE_UNREADABLE")


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 5000, bytes(range(256)) * 20],
    ids=lambda d: repr(d[:9]),
)
async def test_bytes_that_are_not_http2_only_close_their_connection(
    service: Service, tenant: Tenant, data: bytes
) -> None:
    host, _, port = service.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    async with asyncio.timeout(20):
        while await reader.read(65_536):
            pass
    writer.close()

    async with service.stream(tenant.secret) as stream:
        await check_serves(stream)


async def test_an_unknown_method_is_unimplemented(service: Service, tenant: Tenant) -> None:
    async with service.channel() as channel:
        for method in ("/weir.v1.InferenceService/Nonsense", "/weir.v9.Nothing/At.All"):
            call: Any = channel.unary_unary(method)
            assert (
                await refused(call(b"", metadata=bearer(tenant.secret)))
            ).code is StatusCode.UNIMPLEMENTED


async def test_lookups_refuse_what_is_malformed(service: Service, tenant: Tenant) -> None:
    metadata = bearer(tenant.secret)
    async with service.channel() as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        malformed = await refused(
            stub.GetGeneration(pb.GetGenerationRequest(request_id="x"), metadata=metadata)
        )
        unknown = await refused(
            stub.GetGeneration(
                pb.GetGenerationRequest(request_id=str(uuid.uuid4())), metadata=metadata
            )
        )
        no_prompt = await refused(
            stub.CountTokens(pb.CountTokensRequest(model=MODEL), metadata=metadata)
        )
        empty = await refused(
            stub.CountTokens(pb.CountTokensRequest(conversation=conversation()), metadata=metadata)
        )
        no_model = await refused(
            stub.CountTokens(pb.CountTokensRequest(model="gpt", text="x"), metadata=metadata)
        )
        quota = await refused(stub.GetQuota(pb.GetQuotaRequest(model="gpt"), metadata=metadata))

    assert (malformed.code, malformed.fields) == (StatusCode.INVALID_ARGUMENT, ["request_id"])
    assert (unknown.code, unknown.reason) == (StatusCode.NOT_FOUND, "NOT_FOUND")
    assert (no_prompt.code, no_prompt.fields) == (StatusCode.INVALID_ARGUMENT, ["prompt"])
    assert (empty.code, empty.fields) == (
        StatusCode.INVALID_ARGUMENT,
        ["model", "conversation.messages"],
    )
    assert (no_model.code, no_model.reason) == (StatusCode.NOT_FOUND, "MODEL_UNKNOWN")
    assert (quota.code, quota.reason) == (StatusCode.NOT_FOUND, "MODEL_UNKNOWN")


async def test_each_bad_frame_of_a_flood_is_answered(service: Service, tenant: Tenant) -> None:
    """Especially for unknown models, whose requests end between two ticks of the progress clock."""
    async with service.stream(tenant.secret) as stream:
        ids = []
        for _ in range(30):
            starts = [start(model="gpt") for _ in range(50)]
            ids += [frame.request_id for frame in starts]
            await stream.send(*starts, *(cancel(frame.request_id) for frame in starts[::2]))
        await until(lambda: all(stream.ends(request_id) for request_id in ids), "all to be refused")
        await check_serves(stream)

    assert all(len(stream.ends(request_id)) == 1 for request_id in ids)
    assert children_of(service.pid), "the engine lives"


async def test_nothing_that_was_refused_is_in_the_log(service: Service, tenant: Tenant) -> None:
    """The log contains neither prompts nor secrets."""
    word = "zephyrqwertz"
    async with service.stream(tenant.secret) as stream:
        await stream.end(await stream.begin(text=word, max_output_tokens=5))
        await stream.end(await stream.begin(text=word, max_output_tokens=0))
        await stream.end(await stream.begin(text=word * 2000))
    assert word not in service.log
    assert tenant.secret not in service.log


async def check_serves(stream: Stream) -> None:
    """Check that a valid request on the same stream runs."""
    request_id = await stream.begin()
    assert (await stream.finished(request_id)).reason == types_pb2.FINISH_REASON_LENGTH
    assert len(stream.token_ids(request_id)) == 20


@pytest.mark.parametrize("value", ["x" * 600, "é" * 600])
async def test_a_client_reads_any_number_of_violations(service: Service, value: str) -> None:
    """gRPC refuses metadata above 8 KiB as a whole, with the error in it."""
    tenant = await service.tenant()
    labels = {f"{index:03}{'k' * 60}": value for index in range(100)}

    async with service.channel() as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        request = pb.EmbedRequest(request_id=str(uuid.uuid4()), model=MODEL, labels=labels)
        refusal = await refused(stub.Embed(request, metadata=bearer(tenant.secret)))

    assert refusal.code == grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.status.message.endswith(" more")
    assert refusal.fields[0].startswith("labels[")
