"""Small decisions of the stream that are hard to time from outside."""

from __future__ import annotations

import asyncio
import uuid
from types import SimpleNamespace
from typing import Any, cast

import pytest
from weir.v1 import inference_service_pb2 as pb

from api.access.auth import StreamKey
from api.core.errors import Cause, MessageUnreadable
from api.core.interceptor import Context, ReceivedMessages, checked, first_error, tolerant
from api.core.rate_limiter import RateLimiter
from api.core.settings import Settings
from api.generation.delivery.stream_writer import FrameSubscription, StreamWriter
from api.generation.parsing.start_frame import parse_start
from api.generation.request.caller import Caller
from api.generation.request.live_request import LiveRequest
from api.generation.request.phases import Ended, Received
from api.rpc.client_stream import ClientStream, outcome_of_leaving
from inference.routing.router import ModelUnknown, Router
from metering.core.models import Outcome
from metering.quotas.quota_rules import Payer
from metering.tenants.authentication import NO_BOUNDS


@pytest.mark.parametrize(
    ("granted_s", "left_s", "outcome"),
    [
        (None, None, Outcome.CANCELLED),
        (10.0, 0.0, Outcome.DEADLINE),
        (10.0, 0.15, Outcome.DEADLINE),  # the client's clock expired first
        (10.0, 3.0, Outcome.CANCELLED),
        (1.0, 0.5, Outcome.CANCELLED),
        (100.0, 1.0, Outcome.DEADLINE),  # sent rounded up
    ],
)
def test_a_deadline_is_distinguished_from_a_cancel(
    granted_s: float | None, left_s: float | None, outcome: Outcome
) -> None:
    assert outcome_of_leaving(granted_s, left_s) is outcome


@pytest.mark.parametrize("phase", [Received(), Ended(Cause.CLIENT)])
def test_progress_survives_a_request_for_an_unknown_model(phase: Received | Ended) -> None:
    """The tick may come before the model is looked up, and runs in the server's only task group."""
    router = Router({})
    with pytest.raises(ModelUnknown):
        router.find("gpt")
    process = cast(Any, SimpleNamespace(router=router, settings=Settings()))
    payer = Payer(uuid.uuid4(), uuid.uuid4(), uuid.uuid4(), "USD")
    caller = Caller(payer, 0.0, 0.0)
    start = parse_start(str(uuid.uuid4()), pb.StartFrame(model="gpt", text="x"))
    request = LiveRequest(
        caller,
        start,
        process,
        FrameSubscription(StreamWriter(cast(Any, None)), start.given_id, lambda _: None),
    )
    vars(request)["phase"] = phase

    request.report_progress(None)


def test_bytes_that_are_no_message_are_forwarded_as_their_error() -> None:
    attempt = tolerant(pb.GenerateRequest.FromString)
    assert attempt is not None

    assert attempt(b"") == pb.GenerateRequest()
    broken = attempt(b"\xff\xff")
    assert isinstance(broken, MessageUnreadable)
    with pytest.raises(MessageUnreadable):
        checked(broken)


async def test_a_stream_is_read_up_to_the_broken_message() -> None:
    messages = iter([1, 2, MessageUnreadable("x"), 3])

    class Received:
        async def read(self) -> object:
            return next(messages)

    stream = ReceivedMessages(cast(Context, Received()))

    assert [await anext(stream), await anext(stream)] == [1, 2]
    with pytest.raises(MessageUnreadable):
        await anext(stream)


def test_the_first_plain_error_of_nested_groups_is_found() -> None:
    inner = ValueError("x")

    assert first_error(ExceptionGroup("a", [ExceptionGroup("b", [inner]), TypeError()])) is inner


class DeafContext:
    """Call whose client reads nothing until told to."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.frame_count = 0

    async def write(self, data: bytes) -> None:
        await self.reads.wait()
        self.frame_count += len(pb.GenerateResponse.FromString(data).frames)

    def time_remaining(self) -> None:
        return None


async def test_a_client_that_never_reads_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the unread answers would fill the server's memory."""
    for module in ("api.generation.delivery.stream_writer", "api.rpc.client_stream"):
        monkeypatch.setattr(f"{module}.FRAMES_WAITING_MAX", 50)
    process = cast(
        Any,
        SimpleNamespace(
            settings=Settings(),
            admission=SimpleNamespace(journal=None, holds=SimpleNamespace(may_have_lapsed=bool)),
            pace=RateLimiter(1.0),
        ),
    )
    context = DeafContext()
    taken = 0

    async def messages() -> Any:
        nonlocal taken
        for _ in range(100):
            taken += 1
            unknown = [
                pb.ClientFrame(request_id=str(uuid.uuid4()), cancel=pb.CancelFrame())
                for _ in range(10)
            ]
            yield pb.GenerateRequest(frames=unknown)
            await asyncio.sleep(0)  # like a message from a socket

    ids = {name: uuid.uuid4() for name in ("api_key_id", "project_id", "organization_id")}
    principal = cast(
        Any,
        SimpleNamespace(
            **ids,
            currency_code="USD",
            bounds=NO_BOUNDS,
            address=None,
            credentials=frozenset(),
            token=None,
            region="",
            models=frozenset(),
        ),
    )
    key = StreamKey(principal, cast(Any, None), 60.0)  # which it has no time to read
    async with asyncio.TaskGroup() as tasks:
        stream = ClientStream(process, key, 0.0)
        serving = tasks.create_task(stream.serve(messages(), cast(Any, context)))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert 5 <= taken <= 8, "what waits, and what is being written"
        assert not serving.done()
        context.reads.set()

    assert (taken, context.frame_count) == (100, 1000), "and once it reads, it is read"
