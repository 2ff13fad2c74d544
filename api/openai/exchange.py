"""One HTTP request that generates: its live requests, their one outbox, and what is written of them.

It starts requests in the same way as `ClientStream` does, and owns nothing of them but the right to stop them. The task of the
HTTP request is the outbox's writer. Tokens count as delivered when they are handed to the connection, as on every wire.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from aiohttp import HttpVersion11, web
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core.errors import Cause, InvalidRequest, RequestUnderWay, SiblingEnded, status_of
from api.core.pace import REFUSAL_COST_S
from api.core.wire import finish_reason
from api.generation.endings import OUTCOMES
from api.generation.live import Caller, LiveRequest
from api.generation.outbox import Outbox, Receiver, WholeOutbox
from api.generation.process import Process
from api.generation.start_frame import ValidStart, parse_start
from api.openai import answers
from api.openai.answers import Answer, Bill, Output
from api.openai.parameters import Asked
from api.openai.refusals import CLIENT_CLOSED, Refusal, headers_of, refusal_of
from metering.core.errors import RequestInFlight
from metering.core.models import Outcome
from metering.tenants.tenants import Principal

PING_INTERVAL_S = 10.0  # seconds of waiting after which a stream begins, and then tells that it lives: proxies cut after a minute
EVENT_STREAM, JSON = "text/event-stream; charset=utf-8", "application/json"
# How a request ends that no client of ours waits for any more; where one reads on, it is told that its answer is not whole.
CUT_OFF = frozenset({types_pb2.FINISH_REASON_SLOW_CONSUMER, types_pb2.FINISH_REASON_CANCELLED, types_pb2.FINISH_REASON_DEADLINE})

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """An HTTP request. request_id: of the whole, and of its first request. look_up: looks its key up again."""

    caller: Caller
    request_id: uuid.UUID
    look_up: Callable[[], Awaitable[Principal]]


class AnswerReceiver(Receiver):
    """Receives one request of an exchange. What comes becomes bytes of the answer, instead of frames that would be parsed again."""

    def __init__(self, exchange: Exchange, outbox: Outbox, given_id: str, index: int) -> None:
        """index: of the request among those of the exchange."""
        super().__init__(outbox, given_id, exchange.on_end)
        self.index = index
        self.token = partial(exchange.note_token, index)
        self._exchange = exchange

    def push(self, frame: pb.ServerFrame | bytes) -> None:
        """See `Receiver.push`. A frame of which the answer says nothing wakes nobody."""
        if not self.outbox.is_abandoned:
            event = self._exchange.note(self, pb.ServerFrame.FromString(frame) if isinstance(frame, bytes) else frame)
            if event:
                self.frames.append(event)
                self.outbox.frame_count += 1
                self.outbox.add(self)

    def delta(self, seq: int, choice_index: int, text: bytes, token_ids: Sequence[int], rest: bytes) -> bytes:
        """See `Receiver.delta`."""
        new = pb.DeltaFrame.FromString(rest)
        new.text = text.decode()
        return self._exchange.note_delta(self.index, choice_index, new)


class Exchange:
    """One HTTP request that generates."""

    def __init__(self, process: Process, http: web.BaseRequest, arrival: Arrival, asked: Asked, answer: Answer) -> None:
        self._process = process
        self._http = http
        self._arrival = arrival
        self._asked = asked
        self._answer = answer
        journal = process.admission.journal
        whole = None if asked.streams else WholeOutbox(journal, len(asked.starts), self._stop_others)
        self._outbox: Outbox = whole or Outbox(journal, process.admission.holds.may_have_lapsed)
        self._starts: list[ValidStart] = []
        self._live: list[LiveRequest] = []
        self._receivers: dict[str, AnswerReceiver] = {}  # of requests that have not ended, by their id as text
        self._outputs = [Output(index) for index in range(len(asked.starts) * asked.choice_count)]
        # The same again where the whole is sent again.
        first, self._bill = arrival.request_id, Bill(request_ids=[str(arrival.request_id)])
        for index in range(1, len(asked.starts)):
            self._bill.request_ids.append(str(uuid.uuid5(first, str(index))))
        self._headers: dict[str, str] = {}
        self._refusal: Refusal | None = None  # the first failure, which is the answer's
        self._response: web.StreamResponse | None = None  # once anything has been written
        self._is_open = False  # whether a stream's opening has been said
        self._has_output = False  # whether an answer in one piece has begun
        self._silent_since = time.monotonic()

    def parse(self) -> web.Response | None:
        """Check what is asked for. Returns the refusal if that is not valid."""
        window = self._process.window_tokens_max
        try:
            for request_id, start in zip(self._bill.request_ids, self._asked.starts, strict=True):
                self._starts.append(parse_start(request_id, start, window))
        except InvalidRequest as error:
            self._process.observer.start_refused(error)
            return refused(refusal_of(status_of(error), self._asked.names), self._arrival.request_id)
        return None

    async def serve(self) -> web.StreamResponse:
        """Run what was parsed to its end; on any exit nothing of it runs any more. Raises: RequestInFlight, RequestUnderWay."""
        try:
            self._begin(self._starts)
            await self._outbox.write_all(self._take)
            return await self._close()
        except TimeoutError:
            log.info("http_client_stalled", request_id=str(self._arrival.request_id))
            self._leave(Outcome.SLOW_CONSUMER)
            if self._http.transport is not None:
                self._http.transport.abort()
            return self._response or web.Response(status=CLIENT_CLOSED)
        except ConnectionError:
            return self._response or web.Response(status=CLIENT_CLOSED)
        finally:
            if self._receivers:
                self._leave(Outcome.CANCELLED)
            # Its outbox leads back to it: a cycle, which would keep body and prompts until a garbage collection.
            self._live.clear()
            self._starts.clear()
            del self._asked, self._answer, self._http

    def _begin(self, starts: Sequence[ValidStart]) -> None:
        """Start all requests, or none. Raises: RequestInFlight, RequestUnderWay."""
        caller = self._arrival.caller
        for index, start in enumerate(starts):
            if (here := self._process.find((caller.payer.project_id, start.request_id))) is not None:
                check_same(here, start)
            self._receivers[start.given_id] = AnswerReceiver(self, self._outbox, start.given_id, index)
        for start in starts:
            request = LiveRequest(caller, start, self._process, self._receivers[start.given_id])
            self._live.append(request)
            request.begin()

    def on_end(self, receiver: Receiver) -> None:
        """Handle that a request has ended."""
        del self._receivers[receiver.given_id]
        if receiver.is_refused:
            self._process.pace.spent(self._arrival.caller.payer, REFUSAL_COST_S)
        if not self._receivers:
            self._outbox.close()

    def _leave(self, outcome: Outcome) -> None:
        """Deliver nothing more, and stop all requests."""
        self._outbox.abandon()
        for receiver in list(self._receivers.values()):
            receiver.source.leave(receiver, outcome)

    def _stop_others(self, ended_id: str) -> None:
        """One of several prompts has ended without an answer: the others end by the same cause, and are charged by that."""
        if not self._live:
            return  # all were left before this one ended
        ended = self._live[self._receivers[ended_id].index]
        cause = ended.end_cause or Cause.SERVICE
        for request in self._live:
            if request is not ended and request.start.given_id in self._receivers:
                request.stop(OUTCOMES[cause], SiblingEnded(cause))

    async def _take(self, data: bytes) -> None:
        """Write what a message of the outbox says, or the body of a whole answer, which begins when all output is there.

        Raises: ConnectionError if the connection is gone, TimeoutError if it takes nothing for too long.
        """
        if self._has_output and self._response is None:
            data = self._body_without_end()
        if not data:
            return
        if self._response is None:
            await self._opened()
        self._silent_since = time.monotonic()
        # `StreamResponse.write` may wait by itself, and a clock for each token costs as much as the token.
        writer: Any = self._http.writer
        await writer.write(data, drain=False)
        connection: Any = self._http.protocol
        if connection.writing_paused:
            await connection.drained()

    def note(self, receiver: AnswerReceiver, frame: pb.ServerFrame) -> bytes:
        """Note a frame without output. Returns the events that a stream says of it."""
        kind = frame.WhichOneof("kind")
        if kind == "admitted":
            self._headers = headers_of(frame.admitted.quotas)
            self._bill.price_version = frame.admitted.price_version
        elif kind == "progress":
            return self._ping()
        elif kind == "finished":
            return self._finished(receiver, frame.finished)
        elif kind == "failed":
            return self._fail(receiver, refusal_of(frame.failed.status, self._asked.names))
        return b""

    def note_token(self, index: int, seq: int, text: bytes, token_id: int) -> bytes:
        """Note a token of the first choice; see `Receiver.token`."""
        return self.note_delta(index, 0, pb.DeltaFrame(text=text.decode()))

    def note_delta(self, index: int, choice_index: int, delta: pb.DeltaFrame) -> bytes:
        """Note new output of a request. Returns the events that a stream says of it."""
        output = self._outputs[index * self._asked.choice_count + choice_index]
        if not self._asked.streams:
            output.add(delta)
            self._has_output = True
            return b""
        if self._answer.tells_all_again:
            output.add(delta)  # a client that reads slowly must not cost memory for what it was told
        if self._refusal is not None or not (delta.text or delta.logprobs or delta.tool_calls):
            return b""
        return self._opening() + self._answer.delta(output, delta)

    def _opening(self) -> bytes:
        """What stands before the first event that is more than a sign of life."""
        if self._is_open:
            return b""
        self._is_open = True
        return self._answer.opening(self._outputs)

    def _ping(self) -> bytes:
        """A sign of life for whoever waits long. Before it the status is open: a request that fails early has one of its own."""
        if not self._asked.streams or time.monotonic() - self._silent_since < PING_INTERVAL_S:
            return b""
        return answers.PING

    def _finished(self, receiver: AnswerReceiver, finished: pb.FinishedFrame) -> bytes:
        self._bill.add(finished.usage, finished.cost)
        first = receiver.index * self._asked.choice_count
        self._outputs[first].reason = finished.reason
        for offset, choice in enumerate(finished.choices):
            self._outputs[first + offset].reason = choice.reason
        cut = None
        for output in self._outputs[first : first + self._asked.choice_count]:
            if cut is None and output.reason in CUT_OFF:
                cut = output.reason
        if cut is None or self._refusal is not None:
            return b""
        name = answers.REASON_NAMES[cut]
        refusal = Refusal(CLIENT_CLOSED, f"the answer was cut off: {name}", "invalid_request_error", name.lower())
        return self._fail(receiver, refusal)

    def _fail(self, receiver: AnswerReceiver, refusal: Refusal) -> bytes:
        """Note the first failure; what a stream that has begun says of it."""
        if self._refusal is not None:
            return b""
        self._refusal = refusal
        if not self._asked.streams:
            return b""
        self._stop_others(receiver.given_id)
        if self._response is None and not self._is_open:
            return b""
        return self._opening() + self._answer.failure(refusal, self._outputs)

    def _body_without_end(self) -> bytes:
        """The whole answer but for usage and cost, which are known when it has been delivered and settled."""
        for index, request in enumerate(self._live):
            for choice, outcome in request.ends().items():
                output = self._outputs[index * self._asked.choice_count + choice]
                if outcome is not Outcome.FAILED:
                    output.reason = finish_reason(outcome, called=bool(output.calls))
        return answers.encode(self._answer.body(self._outputs))[:-1]

    async def _close(self) -> web.StreamResponse:
        """The end of the answer, once everything is settled."""
        if self._response is None and self._refusal is not None:
            return refused(self._refusal, self._arrival.request_id, closing=self._process.admission.capacity.is_draining)
        if self._asked.streams:
            end = self._stream_end()
        elif self._response is None:  # an answer without a token
            end = answers.encode(self._answer.body(self._outputs) | self._answer.tail(self._outputs, self._bill))
        else:
            end = b"," + answers.encode(self._body_end())[1:]
        response = await self._opened()
        await self._http.writer.write_eof(end)
        return response

    def _stream_end(self) -> bytes:
        if self._refusal is not None:
            return b""
        done = answers.DONE if self._answer.streams_done else b""
        return self._opening() + self._answer.closing(self._outputs, self._bill) + done

    def _body_end(self) -> dict[str, object]:
        """The rest of the body. Where settling failed the answer is whole, and only what it comes to is not known yet."""
        if self._refusal is None:
            return self._answer.tail(self._outputs, self._bill)
        return {"usage": None, **self._refusal.body()}

    async def _opened(self) -> web.StreamResponse:
        """The response, of which at least the head is about to be sent: with what is written first, in one piece."""
        if self._response is not None:
            return self._response
        is_chunked = self._http.version >= HttpVersion11
        headers = self._response_headers()
        self._response = response = web.Response(headers=headers) if is_chunked else web.StreamResponse(headers=headers)
        if is_chunked:
            response.enable_chunked_encoding()
        # Before HTTP/1.1 nothing but the end of the connection tells where such a body ends.
        if self._process.admission.capacity.is_draining or not is_chunked:
            response.force_close()
        await response.prepare(self._http)
        return response

    def _response_headers(self) -> dict[str, str]:
        kind = {"content-type": EVENT_STREAM, "x-accel-buffering": "no"} if self._asked.streams else {"content-type": JSON}
        took_ms = (time.monotonic() - self._arrival.caller.received_at) * 1000
        return {
            **kind,
            **plain_headers(self._bill.request_ids[0]),
            "openai-processing-ms": f"{took_ms:.0f}",
            **self._headers,
        }


def check_same(here: LiveRequest, start: ValidStart) -> None:
    """Refuse a request whose id is taken by one that runs. Raises: RequestInFlight if that is the same, RequestUnderWay if not."""
    if here.start.payload_hash != start.payload_hash:
        raise RequestUnderWay("a request with this id and another payload is running")
    raise RequestInFlight("this request is running already: its answer goes to whoever has asked first")


def refused(refusal: Refusal, request_id: uuid.UUID, *, closing: bool = False) -> web.Response:
    """The response to a request that was refused. closing: the connection is of no more use."""
    headers = {"content-type": JSON, **plain_headers(request_id), **refusal.headers}
    response = web.Response(status=refusal.http_status, body=answers.encode(refusal.body()), headers=headers)
    if closing:
        response.force_close()
    return response


def plain_headers(request_id: uuid.UUID | str) -> dict[str, str]:
    """What every response has."""
    return {"cache-control": "no-store", "server": "weir", "x-request-id": str(request_id)}
