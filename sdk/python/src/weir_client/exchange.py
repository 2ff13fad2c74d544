"""One attempt at one request on a stream, as a state machine: frames in, events and exactly one outcome out.

Owned by the event loop; nothing here waits for the network. Memory is bounded: at most `EVENTS_MAX` unread events, and text
no longer than the request's own output.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

from weir.v1 import inference_service_pb2 as pb

from weir_client import errors, wire
from weir_client.receipts import Receipt
from weir_client.status import error_from_status
from weir_client.values import (
    Admitted,
    Choice,
    Delta,
    Event,
    FinishReason,
    Money,
    Partial,
    Result,
    Timings,
    TokenLogprobs,
    Usage,
    UsageUpdate,
)
from weir_client.wire_receipts import receipts

EVENTS_MAX = 65_536  # one delta per token: more than any context window in use; a reader that far behind is gone
CHOICES_MAX = 1024  # far above what a server allows: a wrong index must not take all memory
CANCEL_GRACE_S = 2.0  # how long the final frame may take after a cancel: one engine step and one settlement, with room


class Output:
    """What has arrived of one choice."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []

    def add(self, frame: pb.DeltaFrame, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """One more frame of it."""
        self.texts.append(frame.text)
        self.token_ids.extend(frame.token_ids)
        self.logprobs.extend(logprobs)

    def choice(self, index: int, reason: FinishReason) -> Choice:
        """All of it."""
        return Choice(index, reason, "".join(self.texts), tuple(self.token_ids), tuple(self.logprobs))


class Carrier(Protocol):
    """The stream that an exchange runs on, as far as the exchange needs it."""

    def send_cancel(self, exchange: Exchange) -> None:
        """Writes a cancel frame, soon; never blocks."""

    def release(self, exchange: Exchange) -> None:
        """Forgets an exchange that has ended; its later frames are strays."""


class Exchange:
    """What has arrived for one request, and how it ended.

    `outcome` is set once: a `Result`, or the error to raise. After a cancel it is set within `CANCEL_GRACE_S`, whatever the
    server does, so that whoever waits for the end never hangs.
    """

    def __init__(self, request_id: str, model: str) -> None:
        self.request_id = request_id
        self.model = model
        self.admitted: Admitted | None = None
        self.outcome: Result | errors.WeirError | None = None
        self.begun = False  # the server has said anything at all about this request
        self.cancelled = False
        self.expired = False  # the caller's timeout passed
        self._events: deque[Event] = deque()
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._seq = 0
        self._outputs = [Output()]  # by choice; the server says by its frames how many there are
        self._usage: Usage | None = None
        self._cost: Money | None = None
        self._timings: Timings | None = None
        self._receipts: tuple[Receipt, ...] = ()
        self._carrier: Carrier | None = None
        self._timers: list[asyncio.TimerHandle] = []

    def attach(self, carrier: Carrier, deadline: float | None) -> None:
        """Binds it to the stream it was started on; `deadline` is in the loop's time."""
        self._carrier = carrier
        if deadline is not None:
            self._timers.append(asyncio.get_running_loop().call_at(deadline, self._expire))

    @property
    def delivered(self) -> bool:
        """Whether any output has arrived."""
        return self._seq > 0

    def take(self) -> list[Event]:
        """All events that nobody has taken yet."""
        events = list(self._events)
        self._events.clear()
        return events

    async def wait(self) -> None:
        """Returns when there is an event to take or the outcome is known."""
        while not self._events and self.outcome is None:
            self._changed.clear()
            await self._changed.wait()

    async def wait_ended(self) -> None:
        """Returns when the outcome is known."""
        await self._ended.wait()

    def cancel(self) -> None:
        """Asks the server to stop; the outcome follows within `CANCEL_GRACE_S`. Nothing happens after the end or twice."""
        if self.cancelled or self.outcome is not None:
            return
        self.cancelled = True
        if self._carrier is not None:
            self._carrier.send_cancel(self)
        self._timers.append(asyncio.get_running_loop().call_later(CANCEL_GRACE_S, self._give_up))

    def receive(self, frame: pb.ServerFrame) -> None:
        """Takes one frame of the server. Kinds that are newer than this client are ignored, and so is all after the end."""
        if self.outcome is not None:
            return
        self.begun = True
        match frame.WhichOneof("kind"):
            case "delta":
                self._receive_delta(frame.delta)
            case "admitted":
                self.admitted = wire.admitted(frame.admitted)
                self._push(self.admitted)
            case "progress":
                self._push(wire.progress(frame.progress))
            case "usage":
                self._usage, self._cost = wire.usage(frame.usage.usage), wire.money(frame.usage.cost)
                self._push(UsageUpdate(self._usage, self._cost))
            case "finished":
                self._receive_finished(frame.finished)
            case "failed":
                self._receive_failed(frame.failed)

    def break_off(self, cause: errors.WeirError) -> None:
        """The stream ended. A request that had begun is incomplete; one that had not failed as the stream did."""
        if self.outcome is not None:
            return
        error = cause
        if self.begun:
            message = f"the stream ended before the request did: {cause.message}"
            error = self._incomplete(message, code=cause.code)
            error.__cause__ = cause
        self._end(error)

    def partial(self) -> Partial:
        """What is known so far."""
        return Partial(
            request_id=self.request_id,
            model=self.model,
            text="".join(self._outputs[0].texts),
            token_ids=tuple(self._outputs[0].token_ids),
            usage=self._usage,
            cost=self._cost,
            timings=self._timings,
            admitted=self.admitted,
            receipts=self._receipts,
        )

    def _receive_delta(self, frame: pb.DeltaFrame) -> None:
        if frame.seq <= self._seq:
            return  # a repetition: already counted
        if frame.seq != self._seq + 1:
            self.cancel()
            self._end(self._incomplete(f"output is missing between frame {self._seq} and frame {frame.seq}"))
            return
        self._seq = frame.seq
        logprobs = wire.logprobs(frame)
        self._output(frame.choice_index).add(frame, logprobs)
        self._push(Delta(frame.seq, frame.text, tuple(frame.token_ids), time.monotonic(), logprobs, frame.choice_index))

    def _output(self, choice_index: int) -> Output:
        while len(self._outputs) <= min(choice_index, CHOICES_MAX):
            self._outputs.append(Output())
        return self._outputs[choice_index]

    def _receive_finished(self, frame: pb.FinishedFrame) -> None:
        self._usage, self._cost = wire.usage(frame.usage), wire.money(frame.cost)
        reason = wire.finish_reason(frame.reason)
        timings = self._timings = wire.timings(frame.timings)
        self._receipts = receipts(frame.receipts)
        if reason is FinishReason.DEADLINE or (self.expired and reason is FinishReason.CANCELLED):
            self._end(self._deadline_error())
            return
        reasons = {each.choice_index: wire.finish_reason(each.reason) for each in frame.choices} or {0: reason}
        choices = tuple(self._output(index).choice(index, reasons[index]) for index in sorted(reasons))
        exhausted = tuple(wire.quota(each) for each in frame.exhausted_quotas)
        self._end(
            Result(
                request_id=self.request_id,
                model=self.model,
                finish_reason=reason,
                text=choices[0].text,
                token_ids=choices[0].token_ids,
                usage=self._usage,
                cost=self._cost,
                timings=timings,
                admitted=self.admitted,
                exhausted_quotas=exhausted,
                logprobs=choices[0].logprobs,
                choices=choices,
                receipts=self._receipts,
                migration_count=frame.migration_count,
            )
        )

    def _receive_failed(self, frame: pb.FailedFrame) -> None:
        if frame.HasField("usage"):
            self._usage, self._cost = wire.usage(frame.usage), wire.money(frame.cost)
            self._receipts = receipts(frame.receipts)
        error = error_from_status(frame.status, request_id=self.request_id, partial=self.partial())
        self._end(self._deadline_error() if self.expired and isinstance(error, errors.Cancelled) else error)

    def _push(self, event: Event) -> None:
        if len(self._events) >= EVENTS_MAX:
            self.cancel()
            text = f"{EVENTS_MAX} events of this request were waiting to be read"
            self._end(errors.Aborted(text, reason="SLOW_CONSUMER", request_id=self.request_id, partial=self.partial()))
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
            self._end(self._incomplete(f"cancelled, but the server did not confirm it within {CANCEL_GRACE_S:g} s"))

    def _deadline_error(self) -> errors.DeadlineExceeded:
        return errors.DeadlineExceeded(
            "the request was not done in the time given and was cancelled",
            request_id=self.request_id,
            partial=self.partial(),
        )

    def _incomplete(self, message: str, code: str | None = None) -> errors.IncompleteGeneration:
        return errors.IncompleteGeneration(
            message, code=code, reason="INCOMPLETE", request_id=self.request_id, partial=self.partial()
        )

    def _end(self, outcome: Result | errors.WeirError) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._carrier is not None:
            self._carrier.release(self)
        self._changed.set()
        self._ended.set()
