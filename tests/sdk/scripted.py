"""Scripted server on loopback, for tests of the client."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import inference_service_pb2_grpc, types_pb2
from weir.v1 import tokens_pb2 as token_pb
from weir.v1 import usage_reports_pb2 as usage_pb
from weir_client.loop_thread import LoopThread

_Reply = TypeVar("_Reply", bound=Message)

COST = types_pb2.Money(currency_code="USD", units=0, picos=1_840_000_000)


class ServerStream:
    """Server's side of a `Generate` call, which records every message."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.messages: list[pb.GenerateRequest] = []
        self._frames: list[pb.ClientFrame] = []

    async def read(self) -> pb.ClientFrame | None:
        """Return the client's next frame, or None after its half-close."""
        while not self._frames:
            message = await self.context.read()
            if message is grpc.aio.EOF:
                return None
            self.messages.append(message)
            self._frames.extend(message.frames)
        return self._frames.pop(0)

    async def read_start(self) -> pb.ClientFrame:
        """Return the next frame, which must be a start."""
        frame = await self.read()
        assert frame is not None
        assert frame.WhichOneof("kind") == "start"
        return frame

    async def read_cancel(self) -> pb.ClientFrame:
        """Return the next frame, which must be a cancel."""
        frame = await self.read()
        assert frame is not None
        assert frame.WhichOneof("kind") == "cancel"
        return frame

    async def send(self, *frames: pb.ServerFrame) -> None:
        """Write frames in one message."""
        await self.context.write(pb.GenerateResponse(frames=frames))

    async def read_to_end(self) -> list[pb.ClientFrame]:
        """Return all frames until the client half-closes."""
        frames = []
        while (frame := await self.read()) is not None:
            frames.append(frame)
        return frames


Script = Callable[[ServerStream], Awaitable[None]]


class ScriptedInference(inference_service_pb2_grpc.InferenceServiceServicer):
    """Service that runs one script per stream, the last one repeatedly; prepared look-ups."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.streams: list[ServerStream] = []
        self.metadata: dict[str, str | bytes] = {}
        self.replies: dict[str, Message] = {}
        self.requests: list[Message] = []
        # For look-ups, with or without details.
        self.refusals: list[tuple[status_pb2.Status, bool]] = []

    async def Generate(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # read/write style
        self.metadata = dict(context.invocation_metadata())
        stream = ServerStream(context)
        self.streams.append(stream)
        await self.scripts[min(len(self.streams), len(self.scripts)) - 1](stream)

    async def CountTokens(
        self, request: pb.CountTokensRequest, context: Any
    ) -> pb.CountTokensResponse:
        return await self._answer(request, context, pb.CountTokensResponse())

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        return await self._answer(request, context, pb.ListModelsResponse())

    async def GetQuota(self, request: pb.GetQuotaRequest, context: Any) -> pb.GetQuotaResponse:
        return await self._answer(request, context, pb.GetQuotaResponse())

    async def Quote(self, request: pb.QuoteRequest, context: Any) -> pb.QuoteResponse:
        return await self._answer(request, context, pb.QuoteResponse())

    async def GetGeneration(
        self, request: pb.GetGenerationRequest, context: Any
    ) -> pb.GetGenerationResponse:
        return await self._answer(request, context, pb.GetGenerationResponse())

    async def GetOwnUsage(
        self, request: usage_pb.GetOwnUsageRequest, context: Any
    ) -> usage_pb.GetOwnUsageResponse:
        return await self._answer(request, context, usage_pb.GetOwnUsageResponse())

    async def CreateClientToken(
        self, request: token_pb.CreateClientTokenRequest, context: Any
    ) -> token_pb.CreateClientTokenResponse:
        return await self._answer(request, context, token_pb.CreateClientTokenResponse())

    async def RevokeClientTokens(
        self, request: token_pb.RevokeClientTokensRequest, context: Any
    ) -> token_pb.RevokeClientTokensResponse:
        return await self._answer(request, context, token_pb.RevokeClientTokensResponse())

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        return await self._answer(request, context, pb.EmbedResponse())

    async def _answer(self, request: Message, context: Any, empty: _Reply) -> _Reply:
        self.metadata = dict(context.invocation_metadata())
        self.requests.append(request)
        if self.refusals:
            await abort(context, *self.refusals.pop(0))
        reply = self.replies.get(type(request).__name__, empty)
        assert isinstance(reply, type(empty))
        return reply


async def abort(context: Any, status: status_pb2.Status, with_details: bool = True) -> None:
    """End a call with a status like the real server: details in the trailing metadata."""
    trailers = (("grpc-status-details-bin", status.SerializeToString()),) if with_details else ()
    code = next(each for each in grpc.StatusCode if each.value[0] == status.code)
    await context.abort(code, status.message, trailers)


@asynccontextmanager
async def serve(
    inference: ScriptedInference,
    *services: Callable[[grpc.aio.Server], None],
    address: str = "127.0.0.1:0",
) -> AsyncIterator[str]:
    """Serve on loopback with these services; yield the address."""
    server = grpc.aio.server()
    for add in services:
        add(server)
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(inference, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextmanager
def serve_in_thread(
    inference: ScriptedInference, *services: Callable[[grpc.aio.Server], None]
) -> Iterator[str]:
    """Serve from a thread with its own event loop, for tests that block theirs."""
    serving = LoopThread(serve(inference, *services))
    address = serving.open()
    assert address is not None
    try:
        yield address
    finally:
        serving.close()


def admitted(request_id: str, input_token_count: int = 5, cached: int = 0) -> pb.ServerFrame:
    """Return the frame that admits a request."""
    frame = pb.AdmittedFrame(
        input_token_count=input_token_count, predicted_cached_token_count=cached, price_version=1
    )
    return pb.ServerFrame(request_id=request_id, admitted=frame)


def delta(request_id: str, seq: int, text: str) -> pb.ServerFrame:
    """Return one token of text whose id is its number."""
    return pb.ServerFrame(
        request_id=request_id, delta=pb.DeltaFrame(seq=seq, text=text, token_ids=[seq])
    )


def usage(output_token_count: int, input_token_count: int = 5) -> types_pb2.Usage:
    """Return counts of a request that delivered all generated tokens."""
    return types_pb2.Usage(
        input_token_count=input_token_count,
        generated_token_count=output_token_count,
        delivered_token_count=output_token_count,
        billed_token_count=output_token_count,
    )


def finished(
    request_id: str,
    output_token_count: int,
    reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_STOP,
) -> pb.ServerFrame:
    """Return the end of a request that ran."""
    timings = types_pb2.Timings(prefill_ms=30, decode_ms=60, ttft_ms=40, total_ms=100)
    frame = pb.FinishedFrame(
        reason=reason, usage=usage(output_token_count), cost=COST, timings=timings
    )
    return pb.ServerFrame(request_id=request_id, finished=frame)


def failed(request_id: str, refusal: status_pb2.Status) -> pb.ServerFrame:
    """Return the end of a request that did not run."""
    return pb.ServerFrame(request_id=request_id, failed=pb.FailedFrame(status=refusal))


def status(
    code: str,
    message: str,
    reason: str,
    *details: Message,
    metadata: dict[str, str] | None = None,
    retry_after_s: float | None = None,
) -> status_pb2.Status:
    """Return a status with its details, as the server composes it."""
    info = error_details_pb2.ErrorInfo(reason=reason, domain="weir", metadata=metadata or {})
    parts: list[Message] = [info, *details]
    if retry_after_s is not None:
        delay = duration_pb2.Duration(
            seconds=int(retry_after_s), nanos=int(retry_after_s % 1 * 1e9)
        )
        parts.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for part in parts:
        detail = any_pb2.Any()
        detail.Pack(part)
        packed.append(detail)
    return status_pb2.Status(code=code_pb2.Code.Value(code), message=message, details=packed)


def quota_status(
    retry_after_s: float | None = None,
    *,
    dimension: str = "tokens-per-minute",
    retry_helps: bool = True,
) -> status_pb2.Status:
    """Return a refusal by a quota, with the server's numbers."""
    metadata = {
        "quota_id": "5b1f4c1e-0000-4000-8000-000000000001",
        "subject": "project",
        "subject_id": "5b1f4c1e-0000-4000-8000-000000000002",
        "model": "",
        "dimension": dimension,
        "limit": "1000",
        "used": "900",
        "held": "60",
        "remaining": "40",
        "requested": "125",
        "reset_time": "2026-11-20T10:31:00Z",
        "retry_helps": "true" if retry_helps else "false",
    }
    violation = error_details_pb2.QuotaFailure.Violation(
        subject="project:5b1f4c1e-0000-4000-8000-000000000002",
        description="tokens per minute: 40 of 1000 left",
    )
    failure = error_details_pb2.QuotaFailure(violations=[violation])
    if not retry_helps:
        end = "Send a smaller request, or ask an administrator to raise the limit."
    else:
        end = "" if retry_after_s is None else f"Try again in {math.ceil(retry_after_s)} s."
    return status(
        "RESOURCE_EXHAUSTED",
        f"Your project may use 1,000 tokens per minute and has 40 left; this request needs 125."
        f" {end}",
        "QUOTA_EXCEEDED",
        failure,
        metadata=metadata,
        retry_after_s=retry_after_s,
    )


async def answer(stream: ServerStream, *texts: str) -> None:
    """Run the script that answers every request with these texts."""
    while (frame := await stream.read()) is not None:
        if frame.WhichOneof("kind") == "start":
            request_id = frame.request_id
            await stream.send(admitted(request_id))
            for seq, text in enumerate(texts, 1):
                await stream.send(delta(request_id, seq, text))
            await stream.send(finished(request_id, len(texts)))
