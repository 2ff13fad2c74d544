"""One attempt at a request on a stream, as a state machine: frames in, events and outcome out.

Owned by the event loop; nothing here waits for the network. Memory is bounded: at most `EVENTS_MAX`
unread events, far fewer with a `prefetch`, and text no longer than the request's own output.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

from weir.v1 import inference_service_pb2 as pb

from weir_client import errors, wire
from weir_client.connection import log
from weir_client.generated_values import FinishReason, Usage
from weir_client.output import Received
from weir_client.status import error_from_status
from weir_client.values import (
    Admitted,
    Event,
    Limits,
    Partial,
    Progress,
    Result,
    Resumed,
    UsageUpdate,
)

EVENTS_MAX = 65_536  # one delta per token: more than any context window in use
# The relaying server lost the request's owner; the request itself continues.
PROCESS_UNAVAILABLE = "PROCESS_UNAVAILABLE"
# Wait for the final frame after a cancel: one engine step and one settlement, with room.
CANCEL_GRACE_S = 2.0
EVERYTHING = 2**40  # tokens, above any request's, for requests that need credit but no limit
# Seconds, for a slow reader: far below a server's stall time (60 s), with few frames.
GRANT_INTERVAL_S = 5.0


class Carrier(Protocol):
    """Stream on which an attempt sends its frames."""

    def send_cancel(self, attempt: Attempt) -> None:
        """Queue a cancel frame; never blocks."""

    def send_update(self, attempt: Attempt, update: pb.UpdateFrame) -> None:
        """Queue an update frame; never blocks. Raises: Unavailable if there is no stream."""

    def send_credit(self, attempt: Attempt, token_count: int) -> None:
        """Queue a frame that grants credit for more output tokens; never blocks."""

    def release(self, attempt: Attempt) -> None:
        """Remove an attempt that has ended from the stream. Its later frames are ignored."""


class Continuation(Protocol):
    """Handler that moves an attempt to another stream when its stream breaks.

    `broken` and `refused` return the final error, or None if the attempt will continue.
    """

    def broken(self, cause: errors.WeirError) -> errors.WeirError | None:
        """Look for another stream after the current one has ended with `cause`."""

    def refused(self, error: errors.WeirError) -> errors.WeirError | None:
        """Look for another stream after the server has refused to continue on this one."""

    def resumed(self) -> None:
        """Stop looking for a stream: the server continues the request on the new one."""

    def stop(self) -> None:
        """Stop looking for a stream: the attempt has ended."""


class Prefetch:
    """Credit of a request: at most `limit` output tokens are granted or unread at any time.

    More is granted when half of the limit is free, or when any of it is free and the last grant is
    old enough.
    """

    def __init__(self, limit: int) -> None:
        """Start without granted credit. `limit` is a number of output tokens, at least 1."""
        self.limit = limit
        self._outstanding = 0  # granted on this stream, not arrived
        self._unread = 0  # arrived, not read
        self._granted_at = time.monotonic()

    def begin(self, granted: int) -> None:
        """Start anew on another stream, with `granted` tokens of credit; earlier credit is void."""
        self._outstanding = granted
        self._granted_at = time.monotonic()

    def arrived(self, token_count: int) -> None:
        """Record that this many tokens have arrived."""
        self._outstanding -= token_count
        self._unread += token_count

    def read(self, token_count: int) -> None:
        """Record that the caller has read this many tokens."""
        self._unread -= token_count

    def grant(self, *, at_once: bool = False) -> int:
        """Return the number of tokens to grant now, or 0. `at_once` grants every free token."""
        room = self.limit - self._outstanding - self._unread
        is_due = (
            at_once
            or 2 * room >= self.limit
            or time.monotonic() - self._granted_at >= GRANT_INTERVAL_S
        )
        if room < 1 or not is_due:
            return 0
        self._outstanding += room
        self._granted_at = time.monotonic()
        return room


class LimitChanges:
    """Changes of limits that the server has not answered yet, oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[Limits]] = deque()

    def expect(self) -> asyncio.Future[Limits]:
        """Create the future for the server's answer to the change that is being sent."""
        answer: asyncio.Future[Limits] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        return answer

    def answer(self, frame: pb.UpdatedFrame, request_id: str) -> None:
        """Resolve the oldest pending change with the new limits, or with the server's refusal."""
        answer = self._waiting.popleft() if self._waiting else None
        if answer is None or answer.done():
            return
        if frame.HasField("refusal"):
            answer.set_exception(error_from_status(frame.refusal, request_id=request_id))
        else:
            max_cost = wire.money(frame.max_cost) if frame.HasField("max_cost") else None
            answer.set_result(Limits(frame.max_output_tokens, max_cost))

    def fail(self, error: errors.WeirError) -> None:
        """Fail all pending changes with `error`."""
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(error)


class Attempt:
    """State of one request on a stream: received frames, and the outcome.

    `outcome` is set once: a `Result`, or the error to raise. After a cancel it is set within
    `CANCEL_GRACE_S`, even if the server does not answer, so that a caller that waits for the end
    never hangs. With a `continuation` the attempt can move from stream to stream.
    """

    def __init__(
        self, request_id: str, model: str, after_seq: int = 0, prefetch: Prefetch | None = None
    ) -> None:
        """Prepare an attempt that is not on a stream yet.

        `prefetch` is the credit to grant to the server; None if the request needs no credit.
        """
        self.request_id = request_id
        self.outcome: Result | errors.WeirError | None = None
        self.begun = False  # a frame of this request has arrived
        self.cancelled = False
        self.expired = False  # the caller's timeout passed
        self._timeout_s: float | None = None
        self._events: deque[Event] = deque()
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self.suspended = False  # moving to another stream, which has not answered yet
        self.resume_count = 0
        self.refusal = ""  # reason of the server's refusal on this stream
        self.continuation: Continuation | None = None
        self._after_seq = after_seq
        self._received = Received(request_id, model, after_seq)
        self._prefetch = prefetch
        self._lost = ""  # message about output that is no longer available
        self._lost_cause: errors.WeirError | None = None
        self._limit_changes = LimitChanges()
        self._carrier: Carrier | None = None
        self._timers: list[asyncio.TimerHandle] = []

    def ride(self, carrier: Carrier, credit_token_count: int = 0) -> None:
        """Bind to a stream, or to its replacement while there is none.

        `credit_token_count` is the number of tokens of credit granted to that stream.
        """
        self._carrier = carrier
        if self._prefetch is not None:
            self._prefetch.begin(credit_token_count)

    def expire_at(self, deadline: float, timeout_s: float) -> None:
        """End the request at `deadline` (time of the event loop) if it still runs.

        The error names `timeout_s`.
        """
        self._timeout_s = timeout_s
        if self.outcome is None:
            self._timers.append(asyncio.get_running_loop().call_at(deadline, self._expire))

    @property
    def admitted(self) -> Admitted | None:
        """Admission, or None before it arrives."""
        return self._received.admitted

    @property
    def seq(self) -> int:
        """Sequence number of the last frame of output."""
        return self._received.seq

    @property
    def delivered(self) -> bool:
        """True if any output has arrived."""
        return self.seq > self._after_seq

    def take(self) -> list[Event]:
        """Remove and return all pending events. Call `read` for those that the caller consumes."""
        events = list(self._events)
        self._events.clear()
        return events

    def read(self, token_count: int) -> None:
        """Record that the caller has consumed this many more tokens of output."""
        if self._prefetch is not None:
            self._prefetch.read(token_count)
            self._grant(self._prefetch.grant())

    async def wait(self) -> None:
        """Wait until there are events to take, or the outcome is known."""
        while not self._events and self.outcome is None:
            self._changed.clear()
            await self._changed.wait()

    async def wait_ended(self) -> None:
        """Wait until the outcome is known."""
        await self._ended.wait()

    async def update(self, update: pb.UpdateFrame) -> Limits:
        """Ask the server for other limits and return the new ones. Raises: WeirError if refused."""
        if self.outcome is not None or self._carrier is None:
            raise errors.FailedPrecondition(
                "the request has ended", reason="REQUEST_ENDED", request_id=self.request_id
            )
        self._carrier.send_update(self, update)
        return await self._limit_changes.expect()

    def cancel(self) -> None:
        """Ask the server to stop. The outcome follows within `CANCEL_GRACE_S`. Idempotent."""
        if self.cancelled or self.outcome is not None:
            return
        self.cancelled = True
        if self._carrier is not None:
            self._carrier.send_cancel(self)
        self._timers.append(asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._give_up))

    def resend_cancel(self) -> None:
        """Send the cancel again, on the new stream, as the previous one did not deliver it."""
        if self.cancelled and self._carrier is not None:
            self._carrier.send_cancel(self)

    def receive(self, frame: pb.ServerFrame) -> None:
        """Process one frame of the server. Unknown kinds, and frames after the end, are ignored."""
        if self.outcome is not None:
            return
        kind = frame.WhichOneof("kind")
        if self.suspended and kind == "failed":
            self._receive_refusal(frame.failed)
            return
        if self.suspended and kind is not None:
            self._resume()
        self.begun = True
        match kind:
            case "updated":
                self._limit_changes.answer(frame.updated, self.request_id)
            case "attached":
                self._push(
                    Resumed(
                        frame.attached.after_seq, frame.attached.last_seq, frame.attached.running
                    )
                )
                if self._prefetch is not None:
                    self._grant(self._prefetch.grant(at_once=True))
            case "delta":
                self._receive_delta(frame.delta)
            case "admitted":
                is_news = self.admitted is None
                admitted = self._received.admit(frame.admitted)
                if is_news:  # each stream repeats it
                    self._push(admitted)
            case "progress":
                self._push(wire.read(Progress, frame.progress))
            case "usage":
                usage, cost = wire.read(Usage, frame.usage.usage), wire.money(frame.usage.cost)
                self._received.usage, self._received.cost = usage, cost
                self._push(UsageUpdate(usage, cost))
            case "finished":
                self._receive_finished(frame.finished)
            case "failed":
                self._receive_failed(frame.failed)

    def break_off(self, cause: errors.WeirError) -> None:
        """Handle the end of the stream.

        A request that had begun continues on another stream or ends as incomplete; any other ends
        with `cause`.
        """
        if self.outcome is not None:
            return
        self._carrier = None
        if not self.begun and not self.suspended:
            self._end(cause)
        elif self.continuation is None:
            self._end(
                self.incomplete(f"the stream ended before the request did: {cause.message}", cause)
            )
        elif (error := self.continuation.broken(cause)) is not None:
            self._end(error)

    def fail(self, error: errors.WeirError) -> None:
        """End with `error`, or with DeadlineExceeded if the caller's time limit has passed."""
        self._end(self._deadline_error() if self.expired else error)

    def lose(self, message: str, cause: errors.WeirError) -> None:
        """Cancel because output is missing, and end as incomplete with the settled usage."""
        self._lost, self._lost_cause = message, cause
        self.cancel()

    def release(self) -> None:
        """Leave the current stream, so that the attempt can continue on another one."""
        self._limit_changes.fail(
            errors.Unavailable("no answer came before the stream ended", request_id=self.request_id)
        )
        if self._carrier is not None:
            self._carrier.release(self)
        self._carrier = None

    def incomplete(
        self, message: str, cause: errors.WeirError | None = None
    ) -> errors.IncompleteGeneration:
        """Build the error for a request whose final frame never came."""
        error = errors.IncompleteGeneration(
            message,
            code=cause.code if cause else None,
            reason="INCOMPLETE",
            request_id=self.request_id,
            partial=self.partial(),
        )
        error.__cause__ = cause
        return error

    def partial(self) -> Partial:
        """Return output and usage received so far."""
        return self._received.partial()

    def _grant(self, token_count: int) -> None:
        if token_count and self._carrier is not None and self.outcome is None:
            self._carrier.send_credit(self, token_count)

    def _receive_delta(self, frame: pb.DeltaFrame) -> None:
        if frame.seq <= self.seq or self._lost:
            return  # a repetition already counted, or output after a gap
        if frame.seq != self.seq + 1:
            self.cancel()
            self._end(
                self.incomplete(f"output is missing between frame {self.seq} and frame {frame.seq}")
            )
            return
        if self._prefetch is not None:
            self._prefetch.arrived(len(frame.token_ids))
        self._push(self._received.add(frame))

    def _receive_finished(self, frame: pb.FinishedFrame) -> None:
        reason = self._received.finish(frame)
        if reason is FinishReason.DEADLINE or (self.expired and reason is FinishReason.CANCELLED):
            self._end(self._deadline_error())
        elif self._lost:
            self._end(self.incomplete(self._lost, self._lost_cause))
        else:
            self._end(self._received.result(frame))

    def _failure(self, frame: pb.FailedFrame) -> errors.WeirError:
        if frame.HasField("usage"):
            self._received.bill(frame)
        error = error_from_status(frame.status, request_id=self.request_id, partial=self.partial())
        self.refusal = error.reason
        return error

    def _receive_refusal(self, frame: pb.FailedFrame) -> None:
        """Handle the server's refusal to resume. The request ends if `continuation` gives up."""
        error = self._failure(frame)
        verdict = self.continuation.refused(error) if self.continuation else error
        if verdict is not None:
            self.fail(verdict)

    def _resume(self) -> None:
        self.suspended = False
        self.resume_count += self.begun
        if self.continuation is not None:
            self.continuation.resumed()

    def _receive_failed(self, frame: pb.FailedFrame) -> None:
        error = self._failure(frame)
        if error.reason == PROCESS_UNAVAILABLE and self.continuation is not None:
            if (verdict := self.continuation.broken(error)) is not None:
                self.fail(verdict)
            return
        self._end(
            self._deadline_error()
            if self.expired and isinstance(error, errors.Cancelled)
            else error
        )

    def _push(self, event: Event) -> None:
        if len(self._events) >= EVENTS_MAX:
            self.cancel()
            text = f"{EVENTS_MAX} events of this request were waiting to be read"
            self._end(
                errors.Aborted(
                    text, reason="SLOW_CONSUMER", request_id=self.request_id, partial=self.partial()
                )
            )
            return
        self._events.append(event)
        self._changed.set()

    def _expire(self) -> None:
        self.expired = True
        self.cancel()

    def _give_up(self) -> None:
        if self.expired:
            self._end(self._deadline_error())
        else:
            message = (
                self._lost
                or f"cancelled, but the server did not confirm it within {CANCEL_GRACE_S:g} s"
            )
            self._end(self.incomplete(message, self._lost_cause))

    def _deadline_error(self) -> errors.DeadlineExceeded:
        given = "its deadline" if self._timeout_s is None else f"{self._timeout_s:g} s (timeout)"
        return errors.DeadlineExceeded(
            f"the request did not end within {given} and was cancelled",
            request_id=self.request_id,
            partial=self.partial(),
        )

    def _end(self, outcome: Result | errors.WeirError) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        how = outcome.finish_reason if isinstance(outcome, Result) else outcome.message
        log.debug("request %s: ended: %s", self.request_id, how)
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.release()
        if self.continuation is not None:
            self.continuation.stop()
        self._changed.set()
        self._ended.set()
