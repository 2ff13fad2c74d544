"""One generating HTTP request: its live requests, their shared writer, and the response.

Starts requests like `ClientStream`, and may stop them. The task of the HTTP request runs the
writer. Tokens count as delivered when they are handed to the connection, as over gRPC.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from aiohttp import HttpVersion11, web
from weir.v1 import inference_service_pb2 as pb
from weir.v1 import types_pb2

from api.core.errors import Cause, InvalidRequest, SiblingEnded
from api.core.wire import finish_reason
from api.generation.delivery.delta import Delta
from api.generation.delivery.frames import stop_of
from api.generation.delivery.output_buffer import read_too_slowly
from api.generation.delivery.stream_writer import StreamWriter, Subscription, WholeAnswerWriter
from api.generation.endings import OUTCOMES
from api.generation.parsing.start_frame import ValidStart, parse_start
from api.generation.request.caller import Caller
from api.generation.request.live_request import LiveRequest
from api.generation.request.phases import Ended, Held
from api.generation.request.registry import RequestRegistry
from api.openai import answers
from api.openai.answers import Answer, Bill, Output
from api.openai.error_responses import (
    CLIENT_CLOSED,
    ErrorResponse,
    error_response,
    http_refusal,
    quota_headers,
)
from api.openai.listener import Connection, WholeResponse
from api.openai.parameters import ParsedRequest
from inference.routing.router import Route
from metering.core.errors import RequestInFlight
from metering.core.models import Outcome
from metering.tenants.authentication import Principal

# A blank before a JSON text changes nothing.
PADDING = b" "
# Seconds of silence after which something is sent to a client that has half-closed: only its
# reaction shows whether it is still there.
HALF_CLOSED_SILENCE_S = 1.0
HELD_BYTES_MAX = 16_384  # of a short body; far less than the kernel's buffer
LOGPROBS_AT_ONCE = 200  # tokens whose log-probabilities become JSON on the event loop
LOGPROB_COST = 50  # characters of text to encode that cost as much as one of them
MODEL, REQUESTED_MODEL = "weir-model", "weir-requested-model"  # headers after a fallback
EVENT_STREAM, JSON = "text/event-stream; charset=utf-8", "application/json"
# Reasons for an end in the middle of the output: a client that still reads gets an error.
# Ends of an answer that is not whole, which are errors in HTTP.
CUT_OFF: Mapping[int, str] = {
    types_pb2.FINISH_REASON_SLOW_CONSUMER: "it was read too slowly. Read it as it arrives",
    types_pb2.FINISH_REASON_CANCELLED: "you cancelled it. Send the request again if you need it",
    types_pb2.FINISH_REASON_DEADLINE: "its deadline has passed. Allow more time",
}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """HTTP request after authentication.

    `request_id` is also the id of its first prompt. `look_up` authenticates the API key again.
    """

    caller: Caller
    request_id: uuid.UUID
    look_up: Callable[[], Awaitable[Principal]]


# Parsed start frames of a request, or the error of the first invalid one.
Starts = list[ValidStart] | InvalidRequest


def valid_starts(parsed: ParsedRequest, first: uuid.UUID, window_tokens_max: int) -> Starts:
    """Parse the start frames of a request. `first` is the id of the first prompt.

    The other ids are derived from it, so that they are the same if the client repeats the request.
    """
    starts: list[ValidStart] = []
    try:
        for index, start in enumerate(parsed.starts):
            request_id = first if index == 0 else uuid.uuid5(first, str(index))
            starts.append(parse_start(str(request_id), start, window_tokens_max))
    except InvalidRequest as error:
        return error
    return starts


class AnswerSubscription(Subscription):
    """Subscription of an exchange to one of its requests. Its parts are bytes of the response."""

    def __init__(self, exchange: Exchange, writer: StreamWriter, given_id: str, index: int) -> None:
        """`index` is the position of the request in the exchange."""
        super().__init__(writer, given_id, exchange.on_end)
        self.index = index
        self.token = partial(exchange.note_token, index)
        self._exchange = exchange

    def part(self, frame: pb.ServerFrame, encoded: bytes | None = None) -> bytes:
        return self._exchange.note(self, frame)

    def delta(self, seq: int, choice_index: int, delta: Delta) -> bytes:
        return self._exchange.note_delta(self.index, choice_index, delta)

    def withdraw(self, part_count: int) -> None:
        super().withdraw(part_count)
        self._exchange.withdraw()


class Exchange:
    """Generating HTTP request that is being served, with one live request for each prompt."""

    def __init__(
        self,
        registry: RequestRegistry,
        http: web.BaseRequest,
        arrival: Arrival,
        parsed: ParsedRequest,
        starts: list[ValidStart],
        answer: Answer,
        headers: Mapping[str, str],
        answer_of: Callable[[Route], Answer],
    ) -> None:
        """`starts` has one start frame per prompt. `headers` are added to the response.

        `answer_of` makes the answer of another model, which takes the request as a fallback.
        """
        self._registry = registry
        settings = registry.settings
        self._delivery, self._padding_after_s = settings.delivery, settings.http.padding_after_s
        self._http = http
        self._arrival = arrival
        self.parsed = parsed
        self._answer = answer
        self._answer_of = answer_of
        journal = registry.admission.journal
        whole = (
            None
            if parsed.streams
            else WholeAnswerWriter(journal, len(parsed.starts), self._stop_siblings)
        )
        self._writer: StreamWriter = whole or StreamWriter(
            journal, registry.admission.holds.may_have_lapsed
        )
        self._starts = starts
        self._live: list[LiveRequest] = []
        # Subscriptions to requests that have not ended, by request id.
        self._subscriptions: dict[str, AnswerSubscription] = {}
        self._outputs = [Output(index) for index in range(len(parsed.starts) * parsed.choice_count)]
        self._bill = Bill(request_ids=[start.given_id for start in starts])
        self._headers = dict(headers)
        self._refusal: ErrorResponse | None = (
            None  # the first failure; it becomes that of the response
        )
        self._response: web.StreamResponse | None = None  # None until something is written
        self._is_chunked = False
        # Whether the opening events of a stream, or anything but blanks of a body, were written.
        self._is_open = False
        self._has_output = False  # whether an unstreamed response has output
        self._held = b""  # short body that is sent together with its end
        # Whether the response shows nothing of a token but its text, and that only once.
        self._sends_text_only = parsed.streams and not (
            parsed.shows_token_ids or answer.repeats_output
        )
        self._admitted_count = 0
        connection = http.protocol
        assert isinstance(connection, Connection)
        self._connection = connection

    async def serve(self) -> web.StreamResponse:
        """Run the requests to their end and send the response. On any exit, all are stopped.

        Raises: RequestInFlight, RequestUnderWay.
        """
        left_as = Outcome.FAILED  # any other exception is a fault of the service
        try:
            self._begin(self._starts)
            self._connection.watch_half_close(self._on_half_close)
            await self._writer.write_all(
                self._send if self.parsed.streams else self._write,
                break_silence=self._break_silence,
                silent_for_s=time.monotonic() - self._arrival.caller.received_at,
            )
            return await self._close()
        except asyncio.CancelledError:
            left_as = Outcome.CANCELLED
            raise
        except TimeoutError:
            limits = self._delivery
            detail = read_too_slowly(limits.tokens_per_s_min, limits.stall_max_s)
            request_id = str(self._arrival.request_id)
            log.info("http_client_stalled", request_id=request_id, detail=detail)
            self._leave(Outcome.SLOW_CONSUMER)
            if self._http.transport is not None:
                self._http.transport.abort()
            return self._response or web.Response(status=CLIENT_CLOSED)
        except ConnectionError:
            left_as = Outcome.CANCELLED
            return self._response or web.Response(status=CLIENT_CLOSED)
        finally:
            if self._subscriptions:
                self._leave(left_as)
            # Break the reference cycle through the writer, which would keep body and prompts in
            # memory until a garbage collection.
            self._live.clear()
            self._starts.clear()
            self._connection.watch_half_close(None)
            del self.parsed, self._answer, self._answer_of, self._http, self._connection

    def _begin(self, starts: Sequence[ValidStart]) -> None:
        """Start all requests, or none. Raises: RequestInFlight, RequestUnderWay."""
        caller = self._arrival.caller
        for start in starts:
            if self._registry.same_request(caller.payer.project_id, start) is not None:
                raise RequestInFlight(
                    "This request is already running, and its output goes to the first client that"
                    " sent it. Use another Idempotency-Key to run it again."
                )
        for index, start in enumerate(starts):
            self._subscriptions[start.given_id] = AnswerSubscription(
                self, self._writer, start.given_id, index
            )
        for start in starts:
            subscription = self._subscriptions[start.given_id]
            live = LiveRequest(caller, start, self._registry, subscription)
            self._live.append(live)
            live.begin()

    def on_end(self, subscription: Subscription) -> None:
        """Handle the end of one of the requests."""
        del self._subscriptions[subscription.given_id]
        if subscription.is_refused:
            self._registry.charge_refusal(self._arrival.caller.payer, subscription)
        if not self._subscriptions:
            self._writer.close()

    def _leave(self, outcome: Outcome) -> None:
        """Drop the output and stop all requests."""
        self._writer.abandon()
        for subscription in list(self._subscriptions.values()):
            subscription.source.leave(subscription, outcome)

    def _stop_siblings(self, ended_id: str) -> None:
        """Stop the other prompts after one has failed; they end and are charged by its cause."""
        if not self._live:
            return  # `_leave` stopped all of them before
        ended = self._live[self._subscriptions[ended_id].index]
        cause = ended.phase.cause if isinstance(ended.phase, Ended) else Cause.SERVICE
        for request in self._live:
            if request is not ended and request.start.given_id in self._subscriptions:
                request.stop(OUTCOMES[cause], SiblingEnded(cause))

    async def _write(self, data: bytes) -> None:
        """Write the body of an unstreamed response once all output has arrived.

        A short one, which the kernel would take at once, is kept until its end follows it. Raises:
        ConnectionError if the connection is closed, TimeoutError if the client stalls.
        """
        if self._has_output and not self._is_open:
            self._is_open = True
            data = await self._body_without_end()
            unsent_bytes = self._connection.unsent_bytes
            if self._response is None and unsent_bytes + len(data) <= HELD_BYTES_MAX:
                self._connection.open_transport()
                self._held, data = data, b""
        await self._send(data)

    async def _send(self, data: bytes) -> None:
        """Write events, or a part of a body. Raises: ConnectionError, TimeoutError."""
        if data and self._response is None:
            self._connection.open_transport()
            await self._open_response()
            writer: Any = self._http.writer
            await writer.write(data, drain=False)
            if self.parsed.streams:
                self._writer.write_now = self._send_now
        elif data:
            self._send_now(data)
        if self._connection.writing_paused:
            await self._connection.drained()

    def _send_now(self, data: bytes) -> bool:
        """Write events, or a part of a body, after the head of the response.

        Returns whether the kernel has accepted everything. Raises: ConnectionError.
        """
        if not data:
            return True
        transport = self._connection.open_transport()
        assert self._response is not None, "the head is sent with the first data"
        # `StreamResponse.write` takes four times as many steps, and may block without a timeout; a
        # timeout per token costs as much as the token.
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        return not self._connection.writing_paused

    async def _break_silence(self) -> None:
        """Send a ping event, or a blank before a body.

        The first one sends the HTTP status. Failures before that have an HTTP status of their own.
        A body without streaming therefore sends none until its requests are admitted, and then only
        after `WEIR_HTTP_PADDING_AFTER_S`.
        """
        if self.parsed.streams:
            await self._send(self._answer.ping)
            return
        waited_s = time.monotonic() - self._arrival.caller.received_at
        after_s = self._padding_after_s
        is_due = waited_s >= after_s > 0 or self._connection.is_half_closed
        if is_due and self._admitted_count == len(self._live) and not self._is_open:
            await self._send(PADDING)

    def _on_half_close(self) -> None:
        if self.parsed.streams or self._padding_after_s:
            self._writer.break_silence_within(HALF_CLOSED_SILENCE_S)
        else:  # it cannot be told from a disconnect
            self._connection.force_close()

    def note(self, subscription: AnswerSubscription, frame: pb.ServerFrame) -> bytes:
        """Record a frame without output. Returns the events to send for it."""
        kind = frame.WhichOneof("kind")
        if kind == "admitted":
            self._headers |= quota_headers(frame.admitted.quotas)
            self._bill.price_version = frame.admitted.price_version
            self._admitted_count += 1
            if frame.admitted.requested_model:
                self._fell_back(self._live[subscription.index], frame.admitted)
            for output in self._outputs_of(subscription):
                output.input_token_count = frame.admitted.input_token_count
                if self.parsed.shows_token_ids:
                    output.prompt_token_ids = self._live[subscription.index].prompt_token_ids
        elif kind == "prompt":
            for output in self._outputs_of(subscription):
                output.prompt_logprobs.extend(frame.prompt.logprobs)
        elif kind == "finished":
            return self._finished(subscription, frame.finished)
        elif kind == "failed":
            return self._fail(subscription, error_response(frame.failed.status, self.parsed.names))
        return b""

    def _fell_back(self, request: LiveRequest, admitted: pb.AdmittedFrame) -> None:
        """Answer for the model that has taken the request, before any of its output."""
        phase = request.phase
        assert isinstance(phase, Held), "an admitted request has a hold"
        self._answer = self._answer_of(phase.admitted.route)
        self._bill.requested_model = admitted.requested_model
        self._headers |= {MODEL: admitted.model, REQUESTED_MODEL: admitted.requested_model}

    def _outputs_of(self, subscription: AnswerSubscription) -> Sequence[Output]:
        """Return the outputs of the choices of one prompt."""
        count = self.parsed.choice_count
        return self._outputs[subscription.index * count : (subscription.index + 1) * count]

    def note_token(self, index: int, seq: int, text: str, token_id: int) -> bytes:
        """Record one token of the first choice, and return the events to send for it."""
        if not self._sends_text_only or self._refusal is not None:
            return self.note_delta(index, 0, Delta(text, (token_id,)))
        output = self._outputs[index * self.parsed.choice_count]
        output.token_count += 1
        if not text:
            return b""
        opening = b"" if self._is_open else self._opening()
        return opening + self._answer.token(output, text)

    def note_delta(self, index: int, choice_index: int, delta: Delta) -> bytes:
        """Record new output of a request, and return the events to send for it."""
        output = self._outputs[index * self.parsed.choice_count + choice_index]
        output.token_count += len(delta.token_ids)
        if not self.parsed.shows_token_ids:
            delta.token_ids = ()
        if delta.end is not None:
            output.reason, output.stopped_by = delta.end.reason, stop_of(delta.end)
        if delta.reasoning_token_count:  # log-probabilities are of the answer's tokens
            delta.logprobs = delta.logprobs[delta.reasoning_token_count :]
        delta = self._answer.kept(delta)
        if not self.parsed.streams:
            output.add(delta)
            self._has_output = True
            return b""
        if self._answer.repeats_output:
            # Merged, so that a slow client does not cost memory for text that was sent.
            output.add(delta)
        if self._refusal is not None:
            return b""
        events = b""
        if delta.text or delta.logprobs or delta.calls or delta.reasoning or delta.token_ids:
            events = self._opening() + self._answer.delta(output, delta)
        return events + self._choice_ended(output) if delta.end is not None else events

    def _choice_ended(self, output: Output) -> bytes:
        """Return the events for the end of a choice. Empty if the API has none."""
        events = self._answer.choice_ended(output)
        return self._opening() + events if events else b""

    def withdraw(self) -> None:
        """Record that recorded output will not be sent, since its request fails."""
        self._has_output = False
        self._is_open = self._is_open and self._response is not None

    def _opening(self) -> bytes:
        """Return the opening events if they were not sent yet. Comments may precede them."""
        if self._is_open:
            return b""
        self._is_open = True
        return self._answer.opening(self._outputs)

    def _finished(self, subscription: AnswerSubscription, finished: pb.FinishedFrame) -> bytes:
        self._bill.add(finished.usage, finished.cost)
        outputs = self._outputs_of(subscription)
        outputs[0].reason, outputs[0].timings = finished.reason, finished.timings
        outputs[0].stopped_by = stop_of(finished)
        for output, choice in zip(outputs, finished.choices, strict=False):
            output.reason, output.stopped_by = choice.reason, stop_of(choice)
        cut = None
        for output in outputs:
            if cut is None and output.reason in CUT_OFF:
                cut = output.reason
        if cut is None and self._refusal is None and self.parsed.streams:
            return b"".join(map(self._choice_ended, outputs))
        if cut is None or self._refusal is not None:
            return b""
        name = answers.REASON_NAMES[cut]
        why = finished.detail or CUT_OFF[cut]
        refusal = http_refusal(CLIENT_CLOSED, f"the answer was cut off: {why}", name.lower())
        return self._fail(subscription, refusal)

    def _fail(self, subscription: AnswerSubscription, refusal: ErrorResponse) -> bytes:
        """Record the first failure. Returns the events for it if the stream has begun."""
        if self._refusal is not None:
            return b""
        self._refusal = refusal
        if not self.parsed.streams:
            return b""
        self._stop_siblings(subscription.given_id)
        if self._response is None and not self._is_open:
            return b""
        return self._opening() + self._answer.failure(refusal, self._outputs)

    async def _body_without_end(self) -> bytes:
        """Encode the body without usage and cost, which are known only after settlement.

        A body with many log-probabilities is encoded in a thread.
        """
        for index, request in enumerate(self._live):
            for choice, outcome in request.ends().items():
                output = self._outputs[index * self.parsed.choice_count + choice]
                if outcome is not Outcome.FAILED:
                    output.reason = finish_reason(outcome, called=bool(output.calls))
                    output.stopped_by = request.stops.get(choice)
        make = partial(body_of, self._answer, self._outputs)
        count = sum(len(each.logprobs) + len(each.prompt_logprobs) for each in self._outputs)
        if count <= LOGPROBS_AT_ONCE:
            return make()
        payer = self._arrival.caller.payer
        body, work_s = await self._registry.text_work.run(
            payer.organization_id, LOGPROB_COST * count, make
        )
        self._registry.pace.charge(payer, work_s)
        return body

    async def _close(self) -> web.StreamResponse:
        """Send the end of the response after settlement, and return the response."""
        if self._response is None and not self._held and self._refusal is not None:
            return refused(
                self._refusal,
                self._arrival.request_id,
                form=self._answer.error_body,
            )
        if self.parsed.streams:
            end = self._stream_end()
        elif not self._is_open and self._refusal is not None:  # only blanks were sent
            return await self._cut_off(self._refusal)
        elif not self._is_open:  # no token was generated
            end = answers.encode(
                self._answer.body(self._outputs) | self._answer.tail(self._outputs, self._bill)
            )
        else:
            end = b"%b,%b" % (self._held, answers.encode(self._body_end())[1:])
        if self._response is None and not self.parsed.streams:
            return WholeResponse(end, self._response_headers())
        response = await self._open_response()
        await self._http.writer.write_eof(end)
        return response

    async def _cut_off(self, refusal: ErrorResponse) -> web.StreamResponse:
        """Send an error after the status 200, then close without the last chunk.

        Clients treat this as a lost connection and retry, and do not take the error for an answer.
        Raises: ConnectionError.
        """
        await self._send(answers.encode(self._answer.error_body(refusal)))
        self._connection.end_incomplete()
        raise ConnectionResetError("the answer ends without its last chunk")

    def _stream_end(self) -> bytes:
        if self._refusal is not None:
            return b""
        done = answers.DONE if self._answer.streams_done else b""
        return self._opening() + self._answer.closing(self._outputs, self._bill) + done

    def _body_end(self) -> dict[str, object]:
        """Build the rest of the body. The output is complete even if it could not be settled."""
        if self._refusal is None:
            return self._answer.tail(self._outputs, self._bill)
        return self._answer.failed_tail(self._outputs, self._refusal)

    async def _open_response(self) -> web.StreamResponse:
        """Prepare the response, so that its head is sent together with the first data."""
        if self._response is not None:
            return self._response
        self._is_chunked = is_chunked = self._http.version >= HttpVersion11
        headers = self._response_headers()
        self._response = response = (
            web.Response(headers=headers) if is_chunked else web.StreamResponse(headers=headers)
        )
        if is_chunked:
            response.enable_chunked_encoding()
        # Before HTTP/1.1 only the end of the connection marks the end of such a body.
        if not is_chunked:
            response.force_close()
        await response.prepare(self._http)
        return response

    def _response_headers(self) -> dict[str, str]:
        kind = (
            {"content-type": EVENT_STREAM, "x-accel-buffering": "no"}
            if self.parsed.streams
            else {"content-type": JSON}
        )
        took_ms = (time.monotonic() - self._arrival.caller.received_at) * 1000
        return {
            **kind,
            **plain_headers(self._bill.request_ids[0]),
            "openai-processing-ms": f"{took_ms:.0f}",
            **self._headers,
        }


def body_of(answer: Answer, outputs: Sequence[Output]) -> bytes:
    """Encode a whole body, up to its last brace."""
    return answers.encode(answer.body(outputs))[:-1]


def refused(
    refusal: ErrorResponse,
    request_id: uuid.UUID,
    *,
    closing: bool = False,
    form: Callable[[ErrorResponse, str], dict[str, Any]] = ErrorResponse.body,
) -> web.Response:
    """Build the response to a refused request.

    With `closing`, the connection closes afterwards. `form` builds the body.
    """
    headers = {"content-type": JSON, **plain_headers(request_id), **refusal.headers}
    response = web.Response(
        status=refusal.http_status,
        body=answers.encode(form(refusal, str(request_id))),
        headers=headers,
    )
    if closing:
        response.force_close()
    return response


def plain_headers(request_id: uuid.UUID | str) -> dict[str, str]:
    """Build the headers of every response; the id has the names of Weir, OpenAI, Anthropic.

    If the client sent an `X-Request-Id`, `TracedRequest` puts it in the place of OpenAI's.
    """
    known = dict.fromkeys(("weir-request-id", "x-request-id", "request-id"), str(request_id))
    return {"cache-control": "no-store", "server": "weir", **known}
