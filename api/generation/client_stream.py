"""The bidirectional stream: frames in, frames out, any number of requests at once.

One reader and one writer per stream. The stream owns nothing of its requests but the right to receive and to stop them; see
`Source`. They run in this process (`live.py`), have ended here (`replay.py`), or run in another one (`relay.py`).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import grpc
from weir.v1 import inference_service_pb2 as pb

from api.access.auth import StandingKey, check_model
from api.core.errors import (
    FieldViolation,
    InvalidRequest,
    KeepTooLong,
    Overloaded,
    PermissionDenied,
    RequestUnderWay,
    UnknownRequest,
    status_of,
)
from api.core.interceptor import READ_BYTES, READ_S, ReceivedMessages
from api.core.pace import BYTE_COST_S, LOOKUP_COST_S, MESSAGE_COST_S, REFUSAL_COST_S, START_FREE_S, VISIT
from api.core.wire import parse_request_id
from api.generation import frames
from api.generation.live import Caller, LiveRequest
from api.generation.outbox import Outbox, Receiver, Source
from api.generation.process import Process
from api.generation.replay import Key
from api.generation.start_frame import ValidStart, parse_start
from api.observability.spans import NO_TRACE, TraceContext, trace_of
from metering.core.errors import RequestInFlight
from metering.core.models import Outcome
from metering.tenants.tenants import as_uuid

DEADLINE_SLACK_S = 0.1  # by so much the ways of the start and of the hang-up may differ
DEADLINE_ROUNDING = 0.01  # gRPC sends a timeout rounded up by at most this share
SLICE_S = 0.002  # of work on one message before others have their turn: a message may hold thousands of frames, of 5 to 150 µs each
ENDED_IDS_REMEMBERED = 10_000  # so that a late cancel of a request that has just ended is no error

Context = grpc.aio.ServicerContext[pb.GenerateRequest, bytes]


class ClientStream:
    """One `Generate` call."""

    def __init__(
        self,
        process: Process,
        key: StandingKey,
        auth_ms: float,
        *,
        secret: str = "",
        is_relayed: bool = False,
        trace: TraceContext = NO_TRACE,
    ) -> None:
        """secret: the API key, for other processes. is_relayed: the client is one of them, and may attach only.

        trace: the one that those of the call's requests are in that name no other.
        """
        self._trace = trace
        self._process = process
        self._key = key
        self._secret = secret
        self._is_relayed = is_relayed
        self._auth_ms = auth_ms
        self._frames_max = process.admission.settings.frames_per_message_max
        self._outbox = Outbox(process.admission.journal, process.admission.holds.may_have_lapsed)
        self._running: dict[int, Receiver] = {}  # by the number of the request's id: UUIDs hash in Python
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._violation: Exception | None = None
        self._deadline: float | None = None  # of the call, on the monotonic clock
        self._begun_s = 0.0  # of processor time in this slice, for requests that began, as far as it is not counted
        self._lookup_s = 0.0  # of it behind this slice, for attaches that look into the books
        visit = VISIT.get()
        self._let_in: Callable[[], None] = (lambda: None) if visit is None else visit.let_in
        key.on_shut_out = self._shut_out

    async def serve(self, requests: AsyncIterator[pb.GenerateRequest], context: Context) -> None:
        """Serve until the client has half-closed and every request has ended.

        Raises: InvalidRequest for a message that is no batch of frames; on any exit what runs is stopped, or goes on unattended.
        """
        granted_s = remaining_s(context)
        self._deadline = None if granted_s is None else time.monotonic() + granted_s
        try:
            if isinstance(requests, ReceivedMessages):
                requests.before_large = partial(self._process.pace.turn, self._key.principal)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_on(requests), name="stream reader")
                # The client may go away in the middle of a write; that the call is cancelled is the next thing that is heard then.
                left = partial(self._left_midway, context, granted_s)
                tasks.create_task(self._outbox.write_all(context.write, left, grpc.aio.InternalError), name="stream writer")
        except asyncio.CancelledError:
            # gRPC cancels the handler both when the client goes away and when its deadline passes.
            self._leave(outcome_of_leaving(granted_s, remaining_s(context)))
            raise
        finally:
            self._leave(Outcome.CANCELLED)
        violation, self._violation = self._violation, None
        if violation is not None:
            try:
                raise violation
            finally:
                # The error refers to this frame and to the one that holds the message. Referring to
                # the error from here would keep all of them until a garbage collection.
                del violation

    async def _read_on(self, requests: AsyncIterator[pb.GenerateRequest]) -> None:
        """Read until the end, or until a message that ends the stream; the message that is being written is let go first.

        Cancelling a write leaves the call with an operation under way, behind which gRPC never sends the status.
        """
        try:
            async for message in requests:
                await self._work_off(message.frames)
                del message  # a stream that waits for the next message does not keep this one
            await self._all_ended.wait()
            self._outbox.close()
        except Exception as violation:
            self._violation = violation
            self._leave(Outcome.CANCELLED)

    def _left_midway(self, context: Context, granted_s: float | None) -> None:
        self._leave(outcome_of_leaving(granted_s, remaining_s(context)))

    async def _work_off(self, batch: Sequence[pb.ClientFrame]) -> None:
        """The frames of one message, in slices; between them the streams of others go on, however full it is.

        Whose frames have taken their share of the event loop's time waits before the next slice. A key that is revoked meanwhile is
        good for nothing more of the message. Raises: InvalidRequest.
        """
        received_at = time.monotonic() - self._auth_ms / 1000
        if not batch:
            raise InvalidRequest([FieldViolation("frames", "a message must hold at least one frame")])
        if len(batch) > self._frames_max:
            wrong = f"a message may hold {self._frames_max} frames, not {len(batch)}: send several messages"
            raise InvalidRequest([FieldViolation("frames", wrong)])
        await self._key.look_again()
        auth_ms = (time.monotonic() - received_at) * 1000
        self._auth_ms = 0.0  # only the requests of the first message waited for it
        pace, principal = self._process.pace, self._key.principal
        index = 0
        while index < len(batch):
            if await pace.turn(principal):
                await self._key.look_again()
            elif index:
                await asyncio.sleep(0)
            index = self._work_off_slice(batch, index, auth_ms, received_at)
            await self._outbox.room()

    def _work_off_slice(self, batch: Sequence[pb.ClientFrame], index: int, auth_ms: float, received_at: float) -> int:
        """The frames from this one on, as many as there is time for but at least one; the first that is left over."""
        self._lookup_s = self._begun_s = 0.0
        index_before, read_s = index, 0.0 if index else READ_S.get()
        slice_began_at, began_at = time.monotonic(), time.thread_time()
        try:
            while index < len(batch):
                self._obey(index, batch[index], auth_ms, received_at)
                index += 1
                if time.monotonic() - slice_began_at + self._lookup_s > SLICE_S:
                    break
        finally:
            held_s = read_s + time.thread_time() - began_at - self._begun_s
            transport_s = 0.0 if index_before else MESSAGE_COST_S + READ_BYTES.get() * BYTE_COST_S
            self._process.pace.spent(self._key.principal, self._lookup_s + transport_s, held_s)
        return index

    def _obey(self, index: int, frame: pb.ClientFrame, auth_ms: float, received_at: float) -> None:
        """One frame of a message. Raises: InvalidRequest for one that is of no kind."""
        match frame.WhichOneof("kind"):
            case "start":
                self._start(frame, auth_ms, received_at)
            case "cancel":
                if (receiver := self._known(frame.request_id)) is not None:
                    receiver.source.stop(Outcome.CANCELLED)
            case "attach":
                self._attach(frame)
            case "credit":
                if (receiver := self._known(frame.request_id)) is not None:
                    receiver.source.grant(frame.credit.token_count)
            case "update":
                if (receiver := self._known(frame.request_id)) is not None:
                    self._update(frame, receiver)
            case _:
                what = "must be start, cancel, attach, credit or update"
                raise InvalidRequest([FieldViolation(f"frames[{index}].kind", what)])

    def _start(self, frame: pb.ClientFrame, auth_ms: float, received_at: float) -> None:
        began_at = time.thread_time()
        try:
            if self._is_relayed:
                raise PermissionDenied("the peer port takes no `start`: send it to the port for clients (WEIR_LISTEN)")
            self._key.check()
            start = parse_start(frame.request_id, frame.start, self._process.window_tokens_max)
            if self._key.principal.models:
                check_model(self._key.principal, self._process.router.own_name(start.model))
            check_keep(start.keep_s, self._process.admission.settings.keep_max_s)
            here = self._process.find((self._key.principal.project_id, start.request_id))
            if self._is_answered(start, here):
                return

            def bind(receiver: Receiver) -> None:
                receiver.payload_hash = start.payload_hash
                if here is not None:
                    here.output.attach(receiver, 0, start.initial_credit_tokens or 0)
                else:
                    told = trace_of(frame.traceparent, frame.tracestate) if frame.traceparent else NO_TRACE
                    trace = told if told.traceparent else self._trace
                    principal = self._key.principal
                    caller = Caller(
                        self._key.payer,
                        auth_ms,
                        received_at,
                        self._deadline,
                        self._secret,
                        trace,
                        principal.bounds,
                        principal.address,
                        principal.secret_hash,
                        self._let_in,
                    )
                    read_at = time.thread_time()
                    LiveRequest(caller, start, self._process, receiver).begin()
                    # Quotas bound what is let in, and a request that is refused pays for its prompt by itself.
                    self._begun_s += min(read_at - began_at, START_FREE_S) + time.thread_time() - read_at

            self._receive(frame.request_id, start.request_id, bind)
        except Exception as error:
            self._process.observer.start_refused(error)
            self._refuse(frame.request_id, error)

    def _is_answered(self, start: ValidStart, here: LiveRequest | None) -> bool:
        """Whether it is the same as one that this stream receives. Raises: RequestUnderWay if one of this id is another one."""
        receiver = self._running.get(start.request_id.int)
        known = (
            here.start.payload_hash if here is not None else receiver.payload_hash if receiver is not None else start.payload_hash
        )
        if known is None:
            raise RequestInFlight("this stream has attached to a request with this request_id: wait for its end")
        if known != start.payload_hash:
            raise RequestUnderWay("a request with this request_id and another payload runs already")
        return receiver is not None

    def _attach(self, frame: pb.ClientFrame) -> None:
        try:
            self._key.check()
            request_id, after_seq = parse_request_id(frame.request_id), frame.attach.after_seq
            if after_seq < 0:
                raise InvalidRequest([FieldViolation("attach.after_seq", f"must be at least 0, not {after_seq}")])
            key = self._key.principal.project_id, request_id
            source, relays = self._source(key), None if self._is_relayed else self._process.relays

            def bind(receiver: Receiver) -> None:
                if source is not None:
                    source.attach(receiver, after_seq, 0)
                elif relays is None:
                    raise UnknownRequest(f"this server does not run a request {frame.request_id[:64]!r}")
                else:
                    self._lookup_s += LOOKUP_COST_S
                    relays.begin(
                        receiver, key, self._secret, after_seq=after_seq, credit_token_count=0, address=self._key.principal.address
                    )

            self._receive(frame.request_id, request_id, bind)
        except Exception as error:
            self._refuse(frame.request_id, error)

    def _update(self, frame: pb.ClientFrame, receiver: Receiver) -> None:
        """Change limits, unless the key is good for nothing that begins: a higher limit would spend more with it."""
        try:
            self._key.check()
        except Exception as refusal:
            self._answer(frame.request_id, frames.updated(None, status_of(refusal)))
        else:
            receiver.source.update(frame.update)

    def _source(self, key: Key) -> Source | None:
        """Who has the request, as far as this process knows. Raises: ModelNotAllowed."""
        if (here := self._process.find(key)) is not None:
            check_model(self._key.principal, self._process.router.own_name(here.start.model))
            return here.output
        if (kept := self._process.replays.find(key)) is not None:
            check_model(self._key.principal, self._process.router.own_name(kept.model))
            return kept
        receiver = self._running.get(key[1].int)  # through a relay
        return None if receiver is None else receiver.source

    def _receive(self, given_id: str, request_id: uuid.UUID, bind: Callable[[Receiver], None]) -> None:
        """Receive a request from what binds a receiver to it; if that fails, all is as before. Raises: Overloaded; as `bind`."""
        number = request_id.int
        before = self._running.get(number)
        limit = self._process.admission.settings.requests_per_stream_max
        if before is None and len(self._running) >= limit:
            raise Overloaded(f"this stream runs {limit} requests, as many as it may: wait for one to end")
        receiver = Receiver(self._outbox, given_id, lambda receiver: self._on_end(number, receiver))
        self._running[number] = receiver
        self._all_ended.clear()
        try:
            bind(receiver)
        except BaseException:
            if before is not None:
                self._running[number] = before
            else:
                self._forget(number)
            raise

    def _known(self, given_id: str) -> Receiver | None:
        """The request that a frame is about; None if it has ended, or is not known here, which its client is told."""
        receiver = self._find(given_id)
        if receiver is None and ((request_id := as_uuid(given_id)) is None or request_id.int not in self._ended):
            error = UnknownRequest(f"this stream has not started a request {given_id[:64]!r}")
            self._answer(given_id, frames.failed(status_of(error), None))
        return receiver

    def _find(self, given_id: str) -> Receiver | None:
        """The request of an id that runs on this stream, however the client spells it."""
        request_id = as_uuid(given_id)
        return None if request_id is None else self._running.get(request_id.int)

    def _on_end(self, number: int, receiver: Receiver) -> None:
        if self._running.get(number) is not receiver:
            return  # this stream receives it anew
        if receiver.is_refused and receiver.payload_hash is not None:
            self._process.pace.spent(self._key.principal, REFUSAL_COST_S)
        self._ended[number] = None
        if len(self._ended) > ENDED_IDS_REMEMBERED:
            self._ended.popitem(last=False)
        self._forget(number)

    def _forget(self, number: int) -> None:
        self._running.pop(number, None)
        if not self._running:
            self._all_ended.set()

    def _shut_out(self, refusal: Exception) -> None:
        """The key may not be used from here any more: nothing goes on, and what comes next is refused."""
        for receiver in list(self._running.values()):
            receiver.source.shut_out(receiver, refusal)

    def _leave(self, outcome: Outcome) -> None:
        """Deliver nothing more, and stop all requests, but for those that go on unattended."""
        self._outbox.abandon()  # first: then no request has to look for its own frames among those of all
        for receiver in list(self._running.values()):
            receiver.source.leave(receiver, outcome)

    def _refuse(self, given_id: str, error: Exception) -> None:
        """Answer a frame that changes nothing."""
        again = self._find(given_id) is not None
        self._answer(given_id, frames.failed(status_of(error), None, duplicate_start=again))

    def _answer(self, request_id: str, frame: pb.ServerFrame) -> None:
        frame.request_id = request_id
        self._outbox.push(frame)


def check_keep(keep_s: float | None, keep_max_s: float) -> None:
    """Raises: KeepTooLong if a request wants to go on unattended for longer than this server lets it."""
    if keep_s is not None and keep_s > keep_max_s:
        raise KeepTooLong(keep_s, keep_max_s)


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
