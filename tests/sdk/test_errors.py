"""Errors of every kind, from `failed` frames and from broken calls alike."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
import weir_client
from google.rpc import error_details_pb2, status_pb2
from weir.v1 import inference_service_pb2 as pb
from weir_client import AsyncClient, Internal, InvalidRequest, QuotaExceeded, Unavailable, WeirError
from weir_client.prompt import conversation
from weir_client.status import error_from_rpc

from tests.sdk import scripted
from tests.sdk.scripted import ScriptedInference, ServerStream

pytestmark = pytest.mark.usefixtures("no_tasks_left")

BAD_REQUEST = error_details_pb2.BadRequest(
    field_violations=[
        error_details_pb2.BadRequest.FieldViolation(
            field="start.sampling.temperature", description="must be 0 to 2"
        )
    ]
)

TABLE = [
    ("UNAUTHENTICATED", "UNAUTHENTICATED", weir_client.Unauthenticated),
    ("PERMISSION_DENIED", "MODEL_NOT_ALLOWED", weir_client.PermissionDenied),
    ("INVALID_ARGUMENT", "CONTEXT_EXCEEDED", weir_client.InvalidRequest),
    ("NOT_FOUND", "MODEL_UNKNOWN", weir_client.NotFound),
    ("ALREADY_EXISTS", "REQUEST_ID_REUSED", weir_client.AlreadyExists),
    ("ABORTED", "REQUEST_IN_FLIGHT", weir_client.Aborted),
    ("FAILED_PRECONDITION", "INSUFFICIENT_CREDIT", weir_client.FailedPrecondition),
    ("RESOURCE_EXHAUSTED", "MESSAGE_TOO_LARGE", weir_client.ResourceExhausted),
    ("UNAVAILABLE", "DRAINING", weir_client.Unavailable),
    ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", weir_client.DeadlineExceeded),
    ("CANCELLED", "CANCELLED", weir_client.Cancelled),
    ("INTERNAL", "INTERNAL", weir_client.Internal),
    ("UNIMPLEMENTED", "UNIMPLEMENTED", WeirError),
]


def refusing(refusal: status_pb2.Status) -> ScriptedInference:
    """Return a server that answers every request with this failure."""

    async def script(stream: ServerStream) -> None:
        while (frame := await stream.read()) is not None:
            await stream.send(scripted.failed(frame.request_id, refusal))

    return ScriptedInference(script)


@pytest.mark.parametrize(("code", "reason", "kind"), TABLE, ids=[row[0] for row in TABLE])
async def test_each_code_has_its_one_class(code: str, reason: str, kind: type[WeirError]) -> None:
    refusal = scripted.status(code, "the server's sentence", reason, metadata={"key": "value"})
    server = refusing(refusal)
    server.refusals.append((refusal, True))

    async with (
        scripted.serve(server) as address,
        AsyncClient(address, "key", max_retries=0) as client,
    ):
        with pytest.raises(WeirError) as from_frame:
            await client.complete("demo", "Hi")
        with pytest.raises(WeirError) as from_call:
            await client.list_models()

    assert from_frame.value.request_id
    for error in (from_frame.value, from_call.value):
        assert type(error) is kind
        assert (error.code, error.reason, error.message) == (code, reason, "the server's sentence")
        assert error.metadata == {"key": "value"}


async def test_a_call_without_details_still_gives_its_class() -> None:
    server = ScriptedInference(scripted.answer)
    server.refusals.append((status_pb2.Status(code=16, message="no such key"), False))

    async with scripted.serve(server) as address, AsyncClient(address, "key") as client:
        with pytest.raises(weir_client.Unauthenticated, match="no such key") as caught:
            await client.get_quota()

    assert caught.value.reason == "UNAUTHENTICATED"


async def test_an_invalid_request_names_its_fields() -> None:
    refusal = scripted.status(
        "INVALID_ARGUMENT", "temperature must be 0 to 2", "FIELD_INVALID", BAD_REQUEST
    )

    async with scripted.serve(refusing(refusal)) as address, AsyncClient(address, "key") as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.complete("demo", "Hi", temperature=-1)

    violation = caught.value.field_violations[0]
    assert violation.field == "temperature"
    assert violation.description == "must be 0 to 2"


async def test_a_quota_error_reports_which_how_much_is_left_and_when_to_return() -> None:
    refusal = scripted.quota_status(retry_after_s=31.5)

    async with scripted.serve(refusing(refusal)) as address, AsyncClient(address, "key") as client:
        with pytest.raises(QuotaExceeded) as caught:
            await client.complete("demo", "Hi")

    error = caught.value
    assert error.retry_after_s == 31.5
    assert error.remaining == 40
    assert error.reset_time == datetime(2026, 11, 20, 10, 31, tzinfo=UTC)
    assert error.retry_helps
    assert error.quota is not None
    assert error.quota.limit == 1000
    assert error.quota.used == 900
    assert error.quota.held == 60
    assert error.quota.requested == 125
    assert error.violations[0].description == "tokens per minute: 40 of 1000 left"


async def test_an_internal_error_carries_its_incident() -> None:
    refusal = scripted.status(
        "INTERNAL", "internal error", "INTERNAL", metadata={"incident_id": "i-17"}
    )

    async with scripted.serve(refusing(refusal)) as address, AsyncClient(address, "key") as client:
        with pytest.raises(Internal) as caught:
            await client.complete("demo", "Hi")

    assert caught.value.incident_id == "i-17"


def test_a_status_that_grpcio_lost_counts_as_a_broken_stream_which_may_be_tried_again() -> None:
    lost = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(),
        "Internal error from Core",
    )
    reported = grpc.aio.AioRpcError(
        grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "internal error"
    )

    assert isinstance(error_from_rpc(lost), Unavailable)
    assert isinstance(error_from_rpc(reported), Internal)


async def test_a_failure_in_the_middle_keeps_the_text_and_its_usage() -> None:
    async def script(stream: ServerStream) -> None:
        request_id = (await stream.read_start()).request_id
        frame = scripted.failed(
            request_id, scripted.status("INTERNAL", "engine failed", "INTERNAL")
        )
        frame.failed.usage.CopyFrom(scripted.usage(1))
        frame.failed.cost.CopyFrom(scripted.COST)
        await stream.send(scripted.delta(request_id, 1, "a"), frame)
        await stream.read()

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        generation = client.generate("demo", "Hi")
        with pytest.raises(Internal) as caught:
            await generation.wait()

        assert caught.value.partial is not None
        assert caught.value.partial.text == "a"
        assert caught.value.partial.usage is not None
        with pytest.raises(Internal):
            _ = generation.result


async def test_one_failed_request_leaves_the_others_alone() -> None:
    async def script(stream: ServerStream) -> None:
        first, second = await stream.read_start(), await stream.read_start()
        await stream.send(
            scripted.failed(
                first.request_id, scripted.status("NOT_FOUND", "no model x", "MODEL_UNKNOWN")
            )
        )
        await stream.send(
            scripted.delta(second.request_id, 1, "a"), scripted.finished(second.request_id, 1)
        )
        await stream.read()

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        first, second = client.generate("x", "Hi"), client.generate("demo", "Hi")
        first.start()
        assert (await second.wait()).text == "a"
        with pytest.raises(weir_client.NotFound):
            await first.wait()


async def test_the_text_of_an_error_ends_with_the_request_to_quote() -> None:
    refusal = scripted.status("NOT_FOUND", "there is no model named x", "MODEL_UNKNOWN")

    async with scripted.serve(refusing(refusal)) as address, AsyncClient(address, "key") as client:
        with pytest.raises(weir_client.NotFound) as caught:
            await client.complete("x", "Hi")

    assert str(caught.value) == f"there is no model named x (request {caught.value.request_id})"


async def test_unknown_codes_details_and_frames_are_survived() -> None:
    """A newer server may send more than this client knows."""

    async def script(stream: ServerStream) -> None:
        request_id = (await stream.read_start()).request_id
        future = pb.ServerFrame.FromString(
            pb.ServerFrame(request_id=request_id).SerializeToString() + b"\xd2\x0f\x01x"
        )
        finish = scripted.finished(request_id, 0)
        finish.finished.reason = 4711  # type: ignore[assignment]  # a reason of the future
        await stream.send(future, finish)
        failure = scripted.status("NOT_FOUND", "?", "NEW", scripted.COST)
        failure.code = 4711
        await stream.send(scripted.failed((await stream.read_start()).request_id, failure))
        await stream.read()

    async with (
        scripted.serve(ScriptedInference(script)) as address,
        AsyncClient(address, "key") as client,
    ):
        assert (await client.complete("demo", "Hi")).finish_reason == "UNSPECIFIED"
        with pytest.raises(WeirError) as caught:
            await client.complete("demo", "Hi")

    assert (caught.value.code, caught.value.reason) == ("UNKNOWN", "NEW")


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("a\ud83d", "prompt: "),
        ([{"role": "user", "content": "a\ud83d"}], "prompt[0].content: "),
        ([{"role": "assistant", "content": "", "reasoning": "\ud83d"}], "prompt[0].reasoning: "),
        ({"role": "user", "content": "Hi"}, "prompt: must be a list"),
    ],
)
def test_a_prompt_that_cannot_be_sent_is_refused_by_name(prompt: Any, named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        conversation(prompt)

    assert str(caught.value).startswith(named)
