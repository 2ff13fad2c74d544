"""The bidirectional stream: frames in, frames out, any number of requests at once.

One reader and one writer per stream. The stream owns nothing of its requests but the right to stop them; see `live.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator

import grpc
from weir.v1 import inference_service_pb2 as pb

from api import frames
from api.auth import payer
from api.errors import FieldViolation, InvalidRequest, Overloaded, RequestUnderWay, UnknownRequest, status_of
from api.live import Caller, LiveRequest, Process
from api.outbox import Delivery, Outbox, UsageSoFar
from api.wire import ValidStart, parse_start
from metering.operations import Outcome
from metering.tenants import Principal

ENDED_IDS_REMEMBERED = 10_000  # so that a late cancel of a request that has just ended is no error

Context = grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]


class ClientStream:
    """One `Generate` call."""

    def __init__(self, process: Process, principal: Principal, auth_ms: float) -> None:
        self._process = process
        self._principal = principal
        self._auth_ms = auth_ms
        self._outbox = Outbox(process.admission.journal)
        self._running: dict[str, LiveRequest] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    async def serve(self, requests: AsyncIterator[pb.GenerateRequest], context: Context) -> None:
        """Serve until the client has half-closed and every request has ended.

        Raises: InvalidRequest for a message that is no batch of frames; on any exit running requests are stopped.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read(requests), name="stream reader")
                tasks.create_task(self._outbox.write_all(context.write), name="stream writer")
        except asyncio.CancelledError:
            # gRPC cancels the handler both when the client goes away and when its deadline passes.
            self._stop_all(Outcome.DEADLINE if deadline_passed(context) else Outcome.CANCELLED)
            raise
        finally:
            self._stop_all(Outcome.CANCELLED)
            self._outbox.abandon()

    async def _read(self, requests: AsyncIterator[pb.GenerateRequest]) -> None:
        auth_ms = self._auth_ms
        async for message in requests:
            received_at = time.monotonic() - auth_ms / 1000
            if not message.frames:
                raise InvalidRequest([FieldViolation("frames", "a message must hold at least one frame")])
            for index, frame in enumerate(message.frames):
                match frame.WhichOneof("kind"):
                    case "start":
                        self._start(frame, Caller(payer(self._principal), self._outbox, auth_ms, received_at))
                    case "cancel":
                        self._cancel(frame.request_id)
                    case _:
                        raise InvalidRequest([FieldViolation(f"frames[{index}].kind", "must be start or cancel")])
            auth_ms = 0.0  # only the requests of the first message waited for it
        await self._all_ended.wait()
        self._outbox.close()

    def _start(self, frame: pb.ClientFrame, caller: Caller) -> None:
        request_id = frame.request_id
        try:
            start = parse_start(request_id, frame.start)
            if (running := self._running.get(request_id)) is not None:
                self._start_again(running, start)
                return
            limit = self._process.admission.settings.requests_per_stream_max
            if len(self._running) >= limit:
                raise Overloaded(f"this stream runs {limit} requests, as many as it may: wait for one to end")
        except Exception as error:
            self._answer(request_id, frames.failed(status_of(error), None, duplicate_start=request_id in self._running))
            return
        self._all_ended.clear()
        self._running[request_id] = self._process.begin(caller, start, lambda _: self._on_end(request_id))

    def _start_again(self, running: LiveRequest, start: ValidStart) -> None:
        """The same request once more is already under way, and so answered; another one under its id is refused."""
        if running.start.payload_hash != start.payload_hash:
            raise RequestUnderWay("a request with this request_id and another payload runs on this stream")

    def _cancel(self, request_id: str) -> None:
        if (request := self._running.get(request_id)) is not None:
            request.stop(Outcome.CANCELLED)
        elif request_id not in self._ended:
            error = UnknownRequest(f"this stream has not started a request {request_id[:64]!r}")
            self._answer(request_id, frames.failed(status_of(error), None))

    def _on_end(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._ended[request_id] = None
        if len(self._ended) > ENDED_IDS_REMEMBERED:
            self._ended.popitem(last=False)
        if not self._running:
            self._all_ended.set()

    def _stop_all(self, outcome: Outcome) -> None:
        for request in list(self._running.values()):
            request.stop(outcome)

    def _answer(self, request_id: str, frame: pb.ServerFrame) -> None:
        frame.request_id = request_id
        self._outbox.push(Delivery(request_id, UsageSoFar()), frame)


def deadline_passed(context: Context) -> bool:
    """Whether the deadline of the call, if it has one, is over."""
    remaining_s: object = context.time_remaining()  # None without a deadline, whatever the stubs say
    return isinstance(remaining_s, float) and remaining_s <= 0
