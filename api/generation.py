"""The bidirectional stream: frames in, frames out, any number of requests at once.

One reader and one writer per stream. The stream owns nothing of its requests but the right to stop them; see `live.py`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator

import grpc
from weir.v1 import inference_service_pb2 as pb

from api import frames
from api.auth import check_model, payer
from api.errors import FieldViolation, InvalidRequest, Overloaded, RequestUnderWay, UnknownRequest, status_of
from api.live import Caller, LiveRequest
from api.outbox import Delivery, Outbox, UsageSoFar
from api.process import Process
from api.standing_key import StandingKey
from api.wire import ValidStart, parse_start
from metering.operations import Outcome
from metering.tenants.tenants import as_uuid

DEADLINE_SLACK_S = 0.1  # by so much the ways of the start and of the hang-up may differ
DEADLINE_ROUNDING = 0.01  # gRPC sends a timeout rounded up by at most this share
ENDED_IDS_REMEMBERED = 10_000  # so that a late cancel of a request that has just ended is no error

Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class ClientStream:
    """One `Generate` call."""

    def __init__(self, process: Process, key: StandingKey, auth_ms: float) -> None:
        self._process = process
        self._key = key
        self._auth_ms = auth_ms
        self._frames_max = process.admission.settings.frames_per_message_max
        self._outbox = Outbox(process.admission.journal)
        self._running: dict[uuid.UUID, LiveRequest] = {}
        self._ended: OrderedDict[uuid.UUID, None] = OrderedDict()
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._violation: Exception | None = None
        self._deadline: float | None = None  # of the call, on the monotonic clock

    async def serve(self, requests: AsyncIterator[pb.GenerateRequest], context: Context) -> None:
        """Serve until the client has half-closed and every request has ended.

        Raises: InvalidRequest for a message that is no batch of frames; on any exit running requests are stopped.
        """
        granted_s = remaining_s(context)
        self._deadline = None if granted_s is None else time.monotonic() + granted_s
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_on(requests), name="stream reader")
                tasks.create_task(self._write(context, granted_s), name="stream writer")
        except asyncio.CancelledError:
            # gRPC cancels the handler both when the client goes away and when its deadline passes.
            self._leave(outcome_of_leaving(granted_s, remaining_s(context)))
            raise
        finally:
            self._leave(Outcome.CANCELLED)
        if self._violation is not None:
            raise self._violation

    async def _read_on(self, requests: AsyncIterator[pb.GenerateRequest]) -> None:
        """Read until the end, or until a message that ends the stream; the message that is being written is let go first.

        Cancelling a write leaves the call with an operation under way, behind which gRPC never sends the status.
        """
        try:
            await self._read(requests)
        except Exception as violation:
            self._violation = violation
            self._leave(Outcome.CANCELLED)

    async def _write(self, context: Context, granted_s: float | None) -> None:
        try:
            await self._outbox.write_all(context.write)
        except grpc.aio.InternalError:
            # The client went away in the middle of a write; that the call is cancelled will be the next thing we hear.
            self._leave(outcome_of_leaving(granted_s, remaining_s(context)))

    async def _read(self, requests: AsyncIterator[pb.GenerateRequest]) -> None:
        auth_ms = self._auth_ms
        async for message in requests:
            received_at = time.monotonic() - auth_ms / 1000
            if not message.frames:
                raise InvalidRequest([FieldViolation("frames", "a message must hold at least one frame")])
            if len(message.frames) > self._frames_max:
                wrong = f"a message may hold {self._frames_max} frames, not {len(message.frames)}: send several messages"
                raise InvalidRequest([FieldViolation("frames", wrong)])
            await self._key.look_again()
            for index, frame in enumerate(message.frames):
                match frame.WhichOneof("kind"):
                    case "start":
                        self._start(frame, Caller(payer(self._key.principal), self._outbox, auth_ms, received_at, self._deadline))
                    case "cancel":
                        self._cancel(frame.request_id)
                    case _:
                        raise InvalidRequest([FieldViolation(f"frames[{index}].kind", "must be start or cancel")])
            await self._outbox.room()
            auth_ms = 0.0  # only the requests of the first message waited for it
        await self._all_ended.wait()
        self._outbox.close()

    def _start(self, frame: pb.ClientFrame, caller: Caller) -> None:
        try:
            self._key.check()
            start = parse_start(frame.request_id, frame.start)
            check_model(self._key.principal, self._process.router.own_name(start.model))
            request_id = start.request_id
            if (running := self._running.get(request_id)) is not None:
                self._start_again(running, start)
                return
            limit = self._process.admission.settings.requests_per_stream_max
            if len(self._running) >= limit:
                raise Overloaded(f"this stream runs {limit} requests, as many as it may: wait for one to end")
        except Exception as error:
            duplicate_start = self._find(frame.request_id) is not None
            self._answer(frame.request_id, frames.failed(status_of(error), None, duplicate_start=duplicate_start))
            return
        self._all_ended.clear()
        self._running[request_id] = self._process.begin(caller, start, lambda _: self._on_end(request_id))

    def _start_again(self, running: LiveRequest, start: ValidStart) -> None:
        """The same request once more is already under way, and so answered; another one under its id is refused."""
        if running.start.payload_hash != start.payload_hash:
            raise RequestUnderWay("a request with this request_id and another payload runs on this stream")

    def _cancel(self, given_id: str) -> None:
        if (request := self._find(given_id)) is not None:
            request.stop(Outcome.CANCELLED)
        elif as_uuid(given_id) not in self._ended:
            error = UnknownRequest(f"this stream has not started a request {given_id[:64]!r}")
            self._answer(given_id, frames.failed(status_of(error), None))

    def _find(self, given_id: str) -> LiveRequest | None:
        """The request of an id that runs on this stream, however the client spells it."""
        request_id = as_uuid(given_id)
        return None if request_id is None else self._running.get(request_id)

    def _on_end(self, request_id: uuid.UUID) -> None:
        self._running.pop(request_id, None)
        self._ended[request_id] = None
        if len(self._ended) > ENDED_IDS_REMEMBERED:
            self._ended.popitem(last=False)
        if not self._running:
            self._all_ended.set()

    def _leave(self, outcome: Outcome) -> None:
        """Deliver nothing more, and stop all requests."""
        self._outbox.abandon()  # first: then no request has to look for its own frames among those of all
        for request in list(self._running.values()):
            request.stop(outcome)

    def _answer(self, request_id: str, frame: pb.ServerFrame) -> None:
        frame.request_id = request_id
        self._outbox.push(Delivery(request_id, UsageSoFar()), frame)


def remaining_s(context: Context) -> float | None:
    """Time until the deadline of the call; None if it has none, whatever the stubs say."""
    remaining: object = context.time_remaining()
    return float(remaining) if isinstance(remaining, int | float) else None


def outcome_of_leaving(granted_s: float | None, left_s: float | None) -> Outcome:
    """How a call ended that was granted so much time and is gone with so much of it left.

    Mostly it is the client that looks at the clock, and its hanging up arrives a little before our own deadline.
    """
    if granted_s is None or left_s is None or left_s > DEADLINE_SLACK_S + DEADLINE_ROUNDING * granted_s:
        return Outcome.CANCELLED
    return Outcome.DEADLINE
