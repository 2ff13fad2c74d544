"""Bidirectional stream: client frames in, server frames out, for any number of requests.

Each stream has one reader and one writer. It does not own its requests; it may only receive and
stop them (see `Source`). A request runs in this process (`live_request.py`), has ended here
(`replay.py`), or runs in another process (`relay.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import grpc
from weir.v1 import inference_service_pb2 as pb

from api.access.auth import StreamKey, check_model
from api.core.errors import (
    FieldViolation,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    UnknownRequest,
)
from api.core.interceptor import IS_COSTLY, READ_BYTES, READ_S, ReceivedMessages
from api.core.rate_limiter import (
    BYTE_COST_S,
    CALL,
    LOOKUP_COST_S,
    MESSAGE_COST_S,
    START_FREE_S,
    Started,
    start_work,
    work_s,
)
from api.core.statuses import status_of
from api.core.wire import parse_request_id
from api.generation.delivery import frames
from api.generation.delivery.encoding import framed
from api.generation.delivery.replay import Key
from api.generation.delivery.stream_writer import (
    FRAMES_WAITING_MAX,
    FrameSubscription,
    Source,
    StreamWriter,
    Subscription,
)
from api.generation.parsing.start_frame import ValidStart, parse_start
from api.generation.request.caller import Caller, on_behalf
from api.generation.request.live_request import LiveRequest
from api.generation.request.registry import RequestRegistry
from api.observability.spans import NO_TRACE, TraceContext, trace_of
from common.loop_watch import CURRENT
from metering.core.models import Outcome
from metering.tenants.tenants import as_uuid

# Possible difference in latency between the start of a call and its cancellation.
DEADLINE_SLACK_S = 0.1
DEADLINE_ROUNDING = 0.01  # maximum share by which gRPC rounds a timeout up
# Seconds per message before other streams run: a message may hold thousands of frames of 5 to 150
# µs.
SLICE_S = 0.002
# Late cancels of a request that has just ended are not errors.
ENDED_IDS_REMEMBERED = 10_000
ECHOED_ID_CHARS_MAX = 64  # of an id that is not valid: every spelling of a UUID is shorter

RUNNING = frames.running().SerializeToString()

Context = grpc.aio.ServicerContext[pb.GenerateRequest, bytes]
Value = TypeVar("Value")


class ClientStream:
    """Stream of one `Generate` call."""

    def __init__(
        self,
        registry: RequestRegistry,
        key: StreamKey,
        auth_ms: float,
        *,
        secret: str = "",
        is_relayed: bool = False,
        trace: TraceContext = NO_TRACE,
    ) -> None:
        """`secret` is the API key, to be presented to other processes.

        If `is_relayed`, the client is another process, which may only attach. `trace` is the trace
        of its requests.
        """
        self._trace = trace
        self._registry = registry
        self._key = key
        self._secret = secret
        self._is_relayed = is_relayed
        self._auth_ms = auth_ms
        settings = registry.settings
        self._frames_max = settings.messages.frames_max
        self._requests_max = settings.requests.per_stream_max
        self._writer = StreamWriter(
            registry.admission.journal, registry.admission.holds.may_have_lapsed
        )
        # Keys: request ids as integers, because UUIDs are hashed in Python
        self._running: dict[int, FrameSubscription] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._violation: Exception | None = None
        self._deadline: float | None = None  # of the call, in seconds on the monotonic clock
        # Starts of a large message that are not begun yet, by index of the frame
        self._parsed: dict[int, ValidStart | Exception] = {}
        # Cost of database lookups by attaches in this slice, charged at its end.
        self._lookup_s = 0.0
        call = CALL.get()
        self._on_admitted: Callable[[], None] = (lambda: None) if call is None else call.on_admitted
        key.on_excluded = self._revoke

    async def serve(self, requests: AsyncIterator[pb.GenerateRequest], context: Context) -> None:
        """Serve until the client has half-closed the stream and every request has ended.

        On any exit, running requests are stopped, or continue unattended if their clients asked for
        it. Raises InvalidRequest if a message is not a valid batch of frames.
        """
        granted_s = remaining_s(context)
        self._deadline = None if granted_s is None else time.monotonic() + granted_s
        try:
            if isinstance(requests, ReceivedMessages):
                requests.read_large = self._read_large
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_all(requests), name="stream reader")
                # If the client disconnects during a write, gRPC cancels the call right after.
                left = partial(self._on_gone, context, granted_s)
                tasks.create_task(
                    self._writer.write_all(
                        context.write,
                        left,
                        grpc.aio.InternalError,
                        partial(self._break_silence, context.write),
                    ),
                    name="stream writer",
                )
        except asyncio.CancelledError:
            # gRPC cancels the handler both when the client disconnects and when its deadline
            # passes.
            self._leave(outcome_of_leaving(granted_s, remaining_s(context)))
            raise
        except Exception:  # of the writer: a fault of the service, which ends the call
            self._leave(Outcome.FAILED)
            raise
        finally:
            self._leave(Outcome.CANCELLED)
        violation, self._violation = self._violation, None
        if violation is not None:
            try:
                raise violation
            finally:
                # The error refers to this frame and to the frame that holds the message. A
                # reference to the error from here would keep all of them alive until a garbage
                # collection.
                del violation

    async def _break_silence(self, write: Callable[[bytes], Awaitable[object]]) -> None:
        """Send a progress frame of one request; without requests, HTTP/2 pings suffice."""
        for subscription in self._running.values():
            await write(framed(subscription.head + RUNNING))
            return

    async def _read_all(self, requests: AsyncIterator[pb.GenerateRequest]) -> None:
        """Read messages until the stream ends or one of them is invalid.

        Then wait for the current write: if it were cancelled, gRPC would never send the status.
        """
        try:
            async for message in requests:
                await self._handle_message(message.frames)
                # Otherwise a stream that waits for the next message would keep this one in memory.
                del message
            await self._all_ended.wait()
            self._writer.close()
        except Exception as violation:
            self._violation = violation
            self._leave(Outcome.CANCELLED, is_gone=False)

    async def _read_large(self, size: int, parse: Callable[[], Any]) -> Any:
        """Implement `ReadLarge`. A stream without requests loses nothing if it is refused.

        Raises: PreparationLimit, Overloaded, and the errors of parsing.
        """
        principal = self._key.principal
        permit = self._registry.text_work.permit(principal, size)
        with contextlib.nullcontext() if self._running else permit:
            return await self._registry.in_order(principal, size, parse)

    def _on_gone(self, context: Context, granted_s: float | None) -> None:
        self._leave(outcome_of_leaving(granted_s, remaining_s(context)))

    async def _handle_message(self, batch: Sequence[pb.ClientFrame]) -> None:
        """Handle the frames of one message in slices, so that other streams can run in between.

        If the key has used up its share of the event loop, the next slice waits. The rest of the
        message is dropped if the key is revoked meanwhile. Raises: InvalidRequest.
        """
        received_at = time.monotonic() - self._auth_ms / 1000
        if not batch:
            raise InvalidRequest(
                [FieldViolation("frames", "a message must hold at least one frame")]
            )
        if len(batch) > self._frames_max:
            wrong = (
                f"a message may hold {self._frames_max} frames, got {len(batch)}: split it into"
                " several messages"
            )
            raise InvalidRequest([FieldViolation("frames", wrong)])
        await self._key.refresh()
        auth_ms = (time.monotonic() - received_at) * 1000
        self._auth_ms = 0.0  # only requests of the first message waited for authentication
        pace, principal = self._registry.pace, self._key.principal
        if IS_COSTLY.get():
            parse = partial(starts_of, batch, self._registry.window_tokens_max)
            self._parsed = await self._registry.in_order(principal, READ_BYTES.get(), parse)
        index = 0
        while index < len(batch):
            if await pace.wait_for_share(principal):
                await self._key.refresh()
            elif index:
                await asyncio.sleep(0)
            index = self._handle_slice(batch, index, auth_ms, received_at)
            if self._writer.frame_count > FRAMES_WAITING_MAX:
                await self._writer.room()

    def _handle_slice(
        self, batch: Sequence[pb.ClientFrame], index: int, auth_ms: float, received_at: float
    ) -> int:
        """Handle frames from `index` on until the slice is used up; return the next index.

        Charges the key for its processor time, except for what quotas bound: admitted requests.
        """
        principal = self._key.principal
        caller = Caller(
            self._key.payer,
            auth_ms,
            received_at,
            self._deadline,
            self._secret,
            self._trace,
            principal.bounds,
            principal.address,
            principal.credentials,
            self._on_admitted,
            principal.models,
            principal.token,
            principal.region,
        )
        transport_s = held_s = self._lookup_s = 0.0
        if not index:
            transport_s, held_s = MESSAGE_COST_S + READ_BYTES.get() * BYTE_COST_S, READ_S.get()
        CURRENT.work, CURRENT.stage = CALL.get(), "frames"
        started, handled_s = start_work(), 0.0
        ends_at = started[0] + SLICE_S
        try:
            while index < len(batch):
                frame, before_s, read_s = batch[index], handled_s, None
                if frame.HasField("start"):
                    read_s = self._start(frame, self._parsed.pop(index, None), caller, started)
                else:
                    self._handle(index, frame)
                index, handled_s = index + 1, work_s(started)
                # A refused request charges for its prompt itself.
                if read_s is None:
                    held_s += handled_s - before_s
                else:
                    held_s += max(read_s - before_s - START_FREE_S, 0.0)
                if time.monotonic() + self._lookup_s > ends_at:
                    break
        finally:
            CURRENT.work, CURRENT.stage = None, ""
            self._registry.pace.charge(principal, self._lookup_s + transport_s, held_s)
        return index

    def _handle(self, index: int, frame: pb.ClientFrame) -> None:
        """Handle a frame that starts no request. Raises InvalidRequest if its kind is unknown."""
        match frame.WhichOneof("kind"):
            case "cancel":
                if (subscription := self._known(frame.request_id)) is not None:
                    subscription.source.stop(Outcome.CANCELLED)
            case "attach":
                self._attach(frame)
            case "credit":
                if (subscription := self._known(frame.request_id)) is not None:
                    subscription.source.grant(frame.credit.token_count)
            case "update":
                if (subscription := self._known(frame.request_id)) is not None:
                    self._update(frame, subscription)
            case _:
                what = "must be start, cancel, attach, credit or update"
                raise InvalidRequest([FieldViolation(f"frames[{index}].kind", what)])

    def _start(
        self,
        frame: pb.ClientFrame,
        parsed: ValidStart | Exception | None,
        caller: Caller,
        started: Started,
    ) -> float | None:
        """Start a request. `parsed` is from `starts_of`; None if the frame is not parsed yet.

        Returns the processor time of the slice, in seconds, when the frame was read and the request
        began. None if none began: it was refused, or is running already.
        """
        registry = self._registry
        try:
            if self._is_relayed:
                raise PermissionDenied(
                    "`start` is not accepted on the peer port. Send it to the client port"
                    " (WEIR_LISTEN)."
                )
            self._key.check()
            if isinstance(parsed, Exception):
                raise parsed
            start = parsed or parse_start(frame.request_id, frame.start, registry.window_tokens_max)
            start = on_behalf(caller.token, start)
            principal, number = self._key.principal, start.request_id.int
            if principal.models or start.keep_s is not None:
                registry.check_rights(principal, start)
            received = self._running.get(number)
            running = registry.same_request(principal.project_id, start, received)
            if received is not None:
                return None  # this stream receives the same request
            subscription = self._subscribe(frame.request_id, number)
            trace = trace_of(frame.traceparent, frame.tracestate) if frame.traceparent else NO_TRACE
            if trace.traceparent:
                caller = replace(caller, trace=trace)
            read_s = work_s(started)
            try:
                if running is None:
                    LiveRequest(caller, start, registry, subscription).begin()
                else:
                    subscription.payload_hash = start.payload_hash
                    running.output.attach(subscription, 0, start.initial_credit_tokens or 0)
            except BaseException:
                self._forget(number)
                raise
        except Exception as error:
            registry.observer.start_refused(error)
            self._refuse(frame.request_id, error)
            return None
        return read_s if running is None else None

    def _attach(self, frame: pb.ClientFrame) -> None:
        try:
            self._key.check()
            request_id, after_seq = parse_request_id(frame.request_id), frame.attach.after_seq
            if after_seq < 0:
                raise InvalidRequest(
                    [FieldViolation("attach.after_seq", f"must be at least 0, got {after_seq}")]
                )
            key = self._key.principal.project_id, request_id
            source, relays = self._source(key), None if self._is_relayed else self._registry.relays
            before = self._running.get(request_id.int)
            subscription = self._subscribe(frame.request_id, request_id.int)
            try:
                if source is not None:
                    source.attach(subscription, after_seq, 0)
                elif relays is None:
                    raise UnknownRequest(
                        f"This server does not run a request {frame.request_id[:64]!r}. Check the"
                        " id, or ask the server that you started it on."
                    )
                else:
                    self._lookup_s += LOOKUP_COST_S
                    relays.begin(
                        subscription,
                        key,
                        self._secret,
                        after_seq=after_seq,
                        credit_token_count=0,
                        address=self._key.principal.address,
                        end_user=self._key.principal.end_user,
                    )
            except BaseException:
                if before is not None:
                    self._running[request_id.int] = before
                else:
                    self._forget(request_id.int)
                raise
        except Exception as error:
            self._refuse(frame.request_id, error)

    def _update(self, frame: pb.ClientFrame, subscription: FrameSubscription) -> None:
        """Change limits. Refused if the key is no longer valid, because higher limits cost more."""
        try:
            self._key.check()
        except Exception as refusal:
            self._answer(frame.request_id, frames.updated(None, status_of(refusal)))
        else:
            subscription.source.update(frame.update)

    def _source(self, key: Key) -> Source | None:
        """Find the source of a request; None if it is unknown here, or of another end user.

        Raises: ModelNotAllowed.
        """
        principal, model_of = self._key.principal, self._registry.router.canonical_name
        running, kept = self._registry.find(key), self._registry.replays.find(key)
        if running is not None and principal.knows(running.start.end_user):
            check_model(principal, model_of(running.start.model))
            return running.output
        if kept is not None and principal.knows(kept.end_user):
            check_model(principal, model_of(kept.model))
            return kept
        subscription = self._running.get(key[1].int)  # set if it is relayed
        return None if subscription is None else subscription.source

    def _subscribe(self, given_id: str, number: int) -> FrameSubscription:
        """Create this stream's subscription to a request. Raises Overloaded above the limit."""
        limit = self._requests_max
        if number not in self._running and len(self._running) >= limit:
            raise Overloaded(
                f"This stream already has {limit} requests, which is its limit. Wait for one to"
                " end, or open another stream."
            )
        subscription = FrameSubscription(self._writer, given_id, partial(self._on_end, number))
        self._running[number] = subscription
        self._all_ended.clear()
        return subscription

    def _known(self, given_id: str) -> FrameSubscription | None:
        """Find the request that a frame names. If the id is unknown, report that to the client."""
        subscription = self._find(given_id)
        if subscription is None and (
            (request_id := as_uuid(given_id)) is None or request_id.int not in self._ended
        ):
            error = UnknownRequest(
                f"This stream has not started a request {given_id[:64]!r}. Check the id, or attach"
                " to it."
            )
            self._answer(given_id, frames.failed(status_of(error), None))
        return subscription

    def _find(self, given_id: str) -> FrameSubscription | None:
        """Find the request with this id on this stream, however the id is written."""
        request_id = as_uuid(given_id)
        return None if request_id is None else self._running.get(request_id.int)

    def _on_end(self, number: int, subscription: Subscription) -> None:
        if self._running.get(number) is not subscription:
            return  # this stream receives it again
        if subscription.is_refused:
            self._registry.charge_refusal(self._key.principal, subscription)
        self._ended[number] = None
        if len(self._ended) > ENDED_IDS_REMEMBERED:
            self._ended.popitem(last=False)
        del self._running[number]
        if not self._running:
            self._all_ended.set()

    def _forget(self, number: int) -> None:
        self._running.pop(number, None)
        if not self._running:
            self._all_ended.set()

    def _revoke(self, refusal: Exception) -> None:
        """Fail all running requests: the secret has ended, or the address is not allowed."""
        for subscription in list(self._running.values()):
            subscription.source.revoke(subscription, refusal)

    def _leave(self, outcome: Outcome, *, is_gone: bool = True) -> None:
        """Stop sending, and stop all requests except those that continue unattended.

        `is_gone` is passed to `StreamWriter.abandon`.
        """
        # First, so that requests need not search the queue for their own frames.
        self._writer.abandon(is_gone=is_gone)
        for subscription in list(self._running.values()):
            subscription.source.leave(subscription, outcome)

    def _refuse(self, given_id: str, error: Exception) -> None:
        """Refuse a frame, without an effect on running requests."""
        again = self._find(given_id) is not None
        self._answer(given_id, frames.failed(status_of(error), None, duplicate_start=again))

    def _answer(self, request_id: str, frame: pb.ServerFrame) -> None:
        frame.request_id = request_id[:ECHOED_ID_CHARS_MAX]
        self._writer.push(frame)


def starts_of(
    batch: Sequence[pb.ClientFrame], window_tokens_max: int
) -> dict[int, ValidStart | Exception]:
    """Parse the start frames of a message. Returns each frame, or its error, by its index."""
    parsed: dict[int, ValidStart | Exception] = {}
    for index, frame in enumerate(batch):
        if frame.WhichOneof("kind") == "start":
            try:
                parsed[index] = parse_start(frame.request_id, frame.start, window_tokens_max)
            except Exception as error:
                parsed[index] = error
    return parsed


def remaining_s(context: Context) -> float | None:
    """Return the seconds left until the deadline of the call; None if it has no deadline."""
    remaining: object = context.time_remaining()
    return float(remaining) if isinstance(remaining, int | float) else None


def outcome_of_leaving(granted_s: float | None, left_s: float | None) -> Outcome:
    """Return CANCELLED or DEADLINE for a client that left, from the time granted and the time left.

    Clients usually notice their deadline first, and cancel shortly before the server would.
    """
    if (
        granted_s is None
        or left_s is None
        or left_s > DEADLINE_SLACK_S + DEADLINE_ROUNDING * granted_s
    ):
        return Outcome.CANCELLED
    return Outcome.DEADLINE
