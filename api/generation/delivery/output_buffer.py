"""Output buffers: the output of one request, for one receiving stream at a time or for none.

`LiveOutput` holds output until the stream can send it and the client has granted credit for it.
`ReplayOutput` keeps output in a replay buffer, so that a client that reconnects can receive it
again.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic

from weir.v1 import inference_service_pb2 as pb

from api.core.errors import AttachedElsewhere, FieldViolation, InvalidRequest, OutputGone
from api.core.statuses import status_of
from api.generation.delivery import frames
from api.generation.delivery.replay import ReplayBuffer
from api.generation.delivery.stream_writer import (
    Collected,
    Receiver,
    delta_bytes,
    delta_frame,
    framed,
    varint,
)
from api.generation.endings import UsageSoFar
from api.generation.state import EndDecision
from api.observability.observer import Gaps
from metering.core.errors import JournalUnavailable, RequestInFlight
from metering.core.models import Outcome
from metering.holds.journal import Delivered
from metering.pricing.prices import TokenPrices

# Text of thinking, and the number of tokens now known to be thinking.
Thought = tuple[str, int]
NO_THOUGHT: Thought = ("", 0)
# Steps merged into one delta; keeps a frame at some kB even with log-probabilities.
TOKENS_PER_DELTA_MAX = 64
CLOCK_S = 0.001  # a timer may fire this much early
STOPPED_MAX_S = 1.0  # how long a stopped request waits for the message that is being written
# A short answer in one piece is not packed; more steps are, into a few bytes per token.
STEPS_UNPACKED_MAX = 16


UNREAD_TOO_MUCH = (
    "the unread output exceeds the replay buffer: read faster; the server's limit is"
    " WEIR_REPLAY_BYTES_PER_REQUEST_MAX, and less while many requests keep output"
)


def read_too_slowly(tokens_per_s_min: float, stall_max_s: float) -> str:
    """Return the detail of an end by the least rate."""
    return (
        f"output waited for the client, which took fewer than {tokens_per_s_min:g} tokens per"
        f" second for more than {stall_max_s:g} s: read faster, or grant credit sooner; the"
        " server's limits are WEIR_CLIENT_TOKENS_PER_SECOND_MIN and WEIR_CLIENT_STALL_MAX_S"
    )


def may_always_send() -> bool:
    """Return True: tokens may be delivered."""
    return True


class Flow:
    """Flow control of one request: granted credit, and the time that its client may make it wait.

    The time is an allowance of `stall_max_s`: it runs while more tokens wait than the client has
    granted, and each token sent gives back the share of it that the least rate allows. So a client
    is ended that takes nothing for the whole time, or takes less than that rate for longer; signs
    of life alone, such as small grants, give back only what they let through.

    stalled_s: time so far in which tokens were ready and the client did not take them, because it
    granted too little or did not read.
    """

    def __init__(
        self,
        credit: int | None,
        stall_max_s: float,
        on_stall: Callable[[], None],
        tokens_per_s_min: float = 1.0,
    ) -> None:
        """credit: tokens that may be sent at first; None: unlimited.

        on_stall: called if the client grants too little.
        """
        self.credit = credit
        self.grant_count = 0
        self.tokens_per_s_min = tokens_per_s_min
        self._left_s = self.stall_max_s = stall_max_s
        self._on_stall: Callable[[], None] | None = on_stall
        self._timer: asyncio.TimerHandle | None = None
        self._counted_at = -math.inf  # up to this time, while the timer runs, `_left_s` is counted
        self.stalled_s = 0.0
        self._stalled_at = -math.inf  # up to this time `stalled_s` is counted

    def grant(self, token_count: int) -> None:
        """Add credit for this many tokens."""
        self.grant_count += 1
        if self.credit is not None:
            self.credit += token_count

    def stalled(self, since: float, now: float) -> None:
        """Count a time in which the client did not take ready tokens, each moment once."""
        since = max(since, self._stalled_at)
        if since < now:
            self.stalled_s += now - since
            self._stalled_at = now

    def spend(self, token_count: int) -> None:
        """Take credit for tokens that are sent, and give back time for them."""
        if self.credit is not None:
            self.credit -= token_count
            self.count()
            left_s = self._left_s + token_count / self.tokens_per_s_min
            self._left_s = min(left_s, self.stall_max_s)

    def watch(self, waiting_token_count: int) -> None:
        """Count the time while more tokens wait than the client has granted."""
        is_blocked = (
            self.credit is not None
            and waiting_token_count > self.credit
            and self._on_stall is not None
        )
        if not is_blocked:
            self._stop_timer()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._counted_at = loop.time()
            self._timer = loop.call_later(max(self._left_s, 0.0), self._look)

    def close(self) -> None:
        """Stop the timer permanently."""
        self._on_stall = None
        if self._timer is not None:
            self._stop_timer()

    def _look(self) -> None:
        """Report a stall if no time is left; otherwise look again when it may be used up."""
        self.count()
        if self._left_s > CLOCK_S:
            self._timer = asyncio.get_running_loop().call_later(self._left_s, self._look)
        elif self._on_stall is not None:
            self._on_stall()

    def count(self) -> None:
        """Count the time up to now in which more tokens wait than the client has granted."""
        if self._timer is not None:
            now = asyncio.get_running_loop().time()
            self._left_s -= now - self._counted_at
            self.stalled(self._counted_at, now)
            self._counted_at = now

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self.count()
            self._timer.cancel()
            self._timer = None


@dataclass(slots=True)
class UsageTelling:
    """Usage frames, sent at an interval in tokens."""

    interval_tokens: int
    prices: TokenPrices
    sent_token_count: int = 0  # in deltas handed to the receiver
    sent_reasoning_token_count: int = 0

    @property
    def room(self) -> int:
        """Return the tokens until the next usage frame."""
        return self.interval_tokens - self.sent_token_count % self.interval_tokens


class Output(ABC):
    """Output buffer of one request, and its `Source` while it runs and after it has ended.

    said_token_count: tokens journalled or waiting for the client. in_flight_token_count: tokens in
    messages that are being written. fence: returns whether tokens may be delivered; otherwise it
    ends the request. ready_at: when the oldest token that waits for the client was said, on the
    loop's clock; None if none waits.
    """

    is_kept = False
    keep_s: float | None = None  # how long the request runs without a receiver; None: not at all

    def __init__(
        self,
        receiver: Receiver,
        model: str,
        flow: Flow,
        life: EndDecision,
        update: Callable[[pb.UpdateFrame], None],
    ) -> None:
        """model: name as sent by the client. update: changes the limits of the request."""
        self.usage = UsageSoFar()
        self.gaps = Gaps()
        self.hold_id: uuid.UUID | None = None
        self.fence: Callable[[], bool] = may_always_send
        self.model = model
        self.said_token_count = 0
        self.in_flight_token_count = 0
        self.in_flight_reasoning_token_count = 0
        self.ready_at: float | None = None
        self.usage_telling: UsageTelling | None = None
        self.flow = flow
        self.receiver: Receiver | None = receiver
        self._life: EndDecision | None = life  # until the request has ended
        self._update = update
        self._last_seq = 0  # of the newest delta
        self._opening: list[bytes] = []  # frames that are sent again to a stream that attaches
        self._end: pb.ServerFrame | None = None
        self._has_failed = False
        self._unattended: asyncio.TimerHandle | None = None
        self.then: Callable[[], None] | None = None  # see `when_taken`
        self._stall: asyncio.TimerHandle | None = None
        self._is_stopped = False  # only the message that is being written is still waited for
        self._taken_by = -math.inf  # latest time to take what waits at the end, on the loop's clock
        self.has_more = False  # more can be sent after `take`
        receiver.source = receiver.supply = self

    # Called by the request.

    @abstractmethod
    def say(
        self,
        choice_index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs] = (),
        calls: Sequence[pb.ToolCallDelta] = (),
        thought: Thought = NO_THOUGHT,
    ) -> None:
        """Add new output.

        Raises: JournalUnavailable if it must be journalled and the journal cannot be written.
        """

    @abstractmethod
    def end_choice(self, end: pb.ChoiceEnd) -> None:
        """Add that one of several choices has ended, behind its output."""

    def push(self, frame: pb.ServerFrame) -> None:
        """Send a frame without output to the current receiver."""
        data = frame.SerializeToString()
        if frame.HasField("prompt") or (frame.HasField("admitted") and not self._opening):
            self._opening.append(data)
        if self.receiver is not None:
            self.receiver.push(data)

    @property
    def unsent_token_count(self) -> int:
        """Tokens that wait for the client, not in a message yet."""
        return self.said_token_count - self.usage.journalled_token_count

    @property
    def stalled_s(self) -> float:
        """Seconds so far in which tokens were ready that the client did not take.

        Nothing is counted while no client is connected.
        """
        self.count_write()
        self.flow.count()
        return self.flow.stalled_s

    def count_write(self) -> None:
        """Count the write that is going on as stall, if it is slow and tokens wait for it."""
        if self.receiver is not None and (slow := self.receiver.outbox.slow_write()) is not None:
            since, now = slow
            if self.in_flight_token_count:
                self.flow.stalled(since, now)
            elif self.ready_at is not None:
                self.flow.stalled(max(since, self.ready_at), now)

    @property
    def takes_whole(self) -> bool:
        """True if the client gets the whole answer in one message."""
        return self.receiver is not None and self.receiver.outbox.takes_whole

    @property
    def progress(self) -> tuple[int, int, int]:
        """Progress of the client. Unchanged only while the client takes nothing."""
        return (
            id(self.receiver),
            self.receiver.outbox.message_count if self.receiver else 0,
            self.flow.grant_count,
        )

    def complete(self) -> None:
        """Mark the output as complete."""
        if self.receiver is not None:
            self.receiver.outbox.complete(self.receiver)

    def when_taken(self, then: Callable[[], None], stall_max_s: float | None) -> None:
        """Call `then` in a later turn of the loop, once all waiting output is sent or discarded,
        and the transport has taken, or lost, the message that is being written.

        stall_max_s: how long the client may take nothing before the request is stopped and the rest
        discarded; None: unlimited. Progress is measured on the stream, which may send frames of
        other requests first; in all the client has this time and that of the least rate.
        """
        self.then = then
        if stall_max_s is not None:
            waiting_count = self.said_token_count - self.usage.journalled_token_count
            waiting_s = waiting_count / self.flow.tokens_per_s_min
            self._taken_by = asyncio.get_running_loop().time() + stall_max_s + waiting_s
            self._watch_reading(stall_max_s, self.progress, None)
        self.moved()

    def _watch_reading(
        self,
        stall_max_s: float,
        progress: tuple[int, int, int],
        before: tuple[int, int, int] | None,
    ) -> None:
        # Polls twice: after a suspension of this process, the first poll precedes any progress of
        # the client.
        look = partial(self._look_at_reading, stall_max_s, progress, before)
        self._stall = asyncio.get_running_loop().call_later(stall_max_s / 2, look)

    def _look_at_reading(
        self, stall_max_s: float, last: tuple[int, int, int], before: tuple[int, int, int] | None
    ) -> None:
        has_moved = (now := self.progress) != last or last != before
        if has_moved and asyncio.get_running_loop().time() < self._taken_by:
            self._watch_reading(stall_max_s, now, last)
            return
        self._stall = None
        if self._life is not None:
            rate, time_s = self.flow.tokens_per_s_min, self.flow.stall_max_s
            self._life.stop(Outcome.SLOW_CONSUMER, detail=read_too_slowly(rate, time_s))
        self.discard()
        self._bill_stalled()
        self.moved()

    def _bill_stalled(self) -> None:
        """Count tokens as taken whose message waits in the transport for a client that does not
        read: it cannot be recalled, and the client can still read it."""
        if not self.is_kept:
            if not self.takes_whole:  # the rest of a whole answer is never sent
                self.was_taken(self.in_flight_token_count, self.in_flight_reasoning_token_count)
            self.in_flight_token_count = self.in_flight_reasoning_token_count = 0

    def lose(self, error: JournalUnavailable) -> None:
        """Fail the request: tokens were taken that cannot be journalled. The rest is discarded."""
        if self._life is not None:
            self._life.discards = True
            self._life.stop(Outcome.FAILED, error)
        self.discard()

    @abstractmethod
    def discard(self, *, kept_too: bool = False) -> None:
        """Drop output that was not handed to the transport.

        A replay buffer has been delivered, so it is still sent within the credit. kept_too: drop it
        as well.
        """

    def fail(self) -> None:
        """Handle a failure: waiting output is sent within the credit, and no more credit is
        awaited."""
        self._has_failed = True
        self._note()

    def end(self, frame: pb.ServerFrame | None) -> None:
        """End the output: the last frame follows the waiting output.

        None: shutdown without a last frame. Drops all references to the request, so that it is
        freed without a garbage collection.
        """
        self._end, self._life = frame, None
        self.fence, self._update = may_always_send, _ended
        self.flow.close()
        if self._unattended is not None:
            self._attended()
        if self.receiver is not None and not self._waits():
            self._say_end()

    # Called by its streams.

    def stop(self, outcome: Outcome) -> None:
        """Stop the request."""
        if self._life is not None:
            self._life.stop(outcome)

    def grant(self, token_count: int) -> None:
        """Add credit. A number below 1 ends the request like a cancellation."""
        if token_count < 1:
            wrong = FieldViolation("credit.token_count", f"must be at least 1, got {token_count}")
            if self._life is not None:
                self._life.stop(Outcome.CANCELLED, InvalidRequest([wrong]))
            return
        self.count_write()  # the write may have begun before the credit ran out
        self.flow.grant(token_count)
        self._watch_credit()
        self._note()

    def update(self, message: pb.UpdateFrame) -> None:
        """Change the limits of the request, and send the client those in force."""
        self._update(message)

    def attach(self, receiver: Receiver, after_seq: int, credit_token_count: int) -> None:
        """Send output to this receiver from now on, starting after the delta `after_seq`.

        Raises: OutputGone; RequestInFlight if the request is just ending. Nothing has changed then.
        """
        is_running = self._life is not None
        if self._life is not None and self._life.end is not None and not self.is_kept:
            raise RequestInFlight(
                "the request with this request_id is just ending; retry in a moment"
            )
        oldest_seq = self._oldest_seq()
        if not oldest_seq - 1 <= after_seq <= self._last_seq:
            raise OutputGone(after_seq, oldest_seq, self._last_seq)
        self.count_write()
        if (old := self.receiver) is not None:
            old.supply = None
            old.drop()
            if old.outbox is not receiver.outbox:
                old.end(
                    frames.failed(
                        status_of(AttachedElsewhere("another stream receives this request now")),
                        None,
                    )
                )
        receiver.source = receiver.supply = self
        self.receiver = receiver
        if self.flow.credit is not None:
            self.flow.credit = credit_token_count
        self._begin_after(after_seq)
        receiver.push(frames.attached(after_seq, self._last_seq, self.usage, running=is_running))
        for data in self._opening:
            receiver.push(data)
        self._attended()
        self.moved()
        self._watch_credit()
        if not is_running and not self._waits():
            self._say_end()
        self._note()

    def detach(self) -> Receiver | None:
        """Remove and return the receiver. A replay buffer keeps its output."""
        self.count_write()
        old, self.receiver = self.receiver, None
        if old is not None:
            old.supply = None
            old.drop()
        self._watch_credit()
        self.moved()
        return old

    def shut_out(self, receiver: Receiver, error: Exception) -> None:
        """Stop the request, because its receiver may no longer receive it.

        After the end, close only the receiver.
        """
        if self.receiver is not receiver:
            return
        if self._life is not None:
            self._life.stop(Outcome.CANCELLED, error)
        else:
            self.detach()
            receiver.end(frames.failed(status_of(error), None))

    def leave(self, receiver: Receiver, outcome: Outcome) -> None:
        """Handle the close of the receiving stream: stop, or run on for `keep_s`."""
        if self.receiver is not receiver:
            return
        if self._life is None:
            self.detach()
        elif self.keep_s is None:
            self.stop(outcome)
        else:
            self.detach()
            self._unattended = asyncio.get_running_loop().call_later(
                self.keep_s, self.stop, Outcome.CANCELLED
            )

    # Called by the outbox.

    @abstractmethod
    def take(self, receiver: Receiver, into: Collected, delta_max: int) -> None:
        """Move at most `delta_max` deltas that may be sent into a message; sets `has_more`."""

    def was_taken(self, token_count: int, reasoning_token_count: int) -> None:
        """Handle that the transport has taken tokens: they are delivered."""
        usage = self.usage
        # Less if a stalled request has ended, and was billed, meanwhile.
        token_count = min(token_count, self.in_flight_token_count)
        self.in_flight_token_count -= token_count
        usage.taken_token_count += token_count
        if reasoning_token_count:
            reasoning_token_count = min(reasoning_token_count, self.in_flight_reasoning_token_count)
            self.in_flight_reasoning_token_count -= reasoning_token_count
            usage.taken_reasoning_token_count += reasoning_token_count
        if not self.is_kept:
            usage.delivered_token_count = usage.taken_token_count
            usage.delivered_reasoning_token_count = usage.taken_reasoning_token_count

    def entry(self, token_count: int, reasoning_token_count: int = 0) -> Delivered:
        """Return the journal entry for this many more tokens, some of them reasoning."""
        assert self.hold_id is not None, "tokens are delivered only under a hold"
        usage = self.usage
        total = usage.journalled_token_count + token_count
        generated = max(usage.generated_token_count, total)
        return Delivered(
            self.hold_id,
            usage.input_token_count,
            usage.cached_input_token_count,
            generated,
            total,
            usage.journalled_reasoning_token_count + reasoning_token_count,
        )

    def moved(self) -> None:
        """Handle that the transport took the output, or that the client is gone."""
        then, life, receiver = self.then, self._life, self.receiver
        if then is None:
            return
        # A replay buffer takes delivery at once.
        if self.is_kept or (
            not self.in_flight_token_count
            and (
                (receiver is None or receiver.outbox.is_abandoned)
                or (life is None or life.discards)
                or not (self._waits() or receiver.frames or receiver.in_flight_count)
            )
        ):
            asyncio.get_running_loop().call_soon(then)
            self.then = None
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None
            self._is_stopped = False
        elif life is not None and life.discards and not self._is_stopped:
            self._is_stopped = True
            if self._stall is not None:
                self._stall.cancel()
            self._stall = asyncio.get_running_loop().call_later(STOPPED_MAX_S, self._give_up)

    def _give_up(self) -> None:
        """End a stopped request whose last message the transport still has."""
        self._stall = None
        self._bill_stalled()
        self.moved()

    # Implemented by the subclasses.

    @abstractmethod
    def _waits(self) -> bool:
        """Return whether output waits for the receiver."""

    @abstractmethod
    def _unread_token_count(self) -> int:
        """Return the number of tokens that wait for the receiver."""

    @abstractmethod
    def _oldest_seq(self) -> int:
        """Return the first delta that another stream could receive."""

    @abstractmethod
    def _begin_after(self, after_seq: int) -> None:
        """Continue with the delta after this one."""

    def _note(self) -> None:
        """Queue the receiver, since output may be ready to send."""
        if self.receiver is not None:
            self.receiver.outbox.add(self.receiver)

    def _watch_credit(self) -> None:
        if self.flow.credit is not None:
            self.flow.watch(0 if self.receiver is None else self._unread_token_count())

    def _tell_usage(
        self, into: Collected, receiver: Receiver, token_count: int, reasoning_token_count: int
    ) -> None:
        """Append a usage frame after a delta of this many tokens, if one is due."""
        telling = self.usage_telling
        if telling is not None and (token_count or reasoning_token_count):
            is_due = token_count >= telling.room
            telling.sent_token_count += token_count
            telling.sent_reasoning_token_count += reasoning_token_count
            if is_due:
                sent = telling.sent_token_count, telling.sent_reasoning_token_count
                frame = frames.usage(self.usage, *sent, telling.prices)
                frame.request_id = receiver.given_id
                into.parts.append(framed(frame.SerializeToString()))

    def _say_end(self) -> None:
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.end(self._end)

    def _attended(self) -> None:
        if self._unattended is not None:
            self._unattended.cancel()
            self._unattended = None


def _ended(message: pb.UpdateFrame) -> None:
    """Ignore a change of limits after the end."""


# One step: choice, text, token ids, log-probabilities, pieces of tool calls, thinking.
Step = tuple[
    int, str, Sequence[int], Sequence[pb.TokenLogprobs], Sequence[pb.ToolCallDelta], Thought
]


class LiveOutput(Output):
    """Output that counts as delivered when the transport has taken it."""

    def __init__(
        self,
        receiver: Receiver,
        model: str,
        flow: Flow,
        life: EndDecision,
        update: Callable[[pb.UpdateFrame], None],
    ) -> None:
        super().__init__(receiver, model, flow, life, update)
        self._steps: list[Step] = []  # waiting, after the packed ones
        self._packed: dict[int, PackedOutput] = {}  # by choice

    def say(
        self,
        choice_index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs] = (),
        calls: Sequence[pb.ToolCallDelta] = (),
        thought: Thought = NO_THOUGHT,
    ) -> None:
        """Implement `Output.say`."""
        if token_ids:
            now = self.gaps.note(choice_index)
            if self.ready_at is None:
                self.ready_at = now
        self.said_token_count += len(token_ids)
        self._steps.append((choice_index, text, token_ids, logprobs, calls, thought))
        if len(self._steps) > STEPS_UNPACKED_MAX:
            self._pack()
        receiver = self.receiver
        if receiver is not None and not receiver.is_waiting:
            receiver.outbox.add(receiver)
        if self.flow.credit is not None:
            self._watch_credit()

    def end_choice(self, end: pb.ChoiceEnd) -> None:
        """Implement `Output.end_choice`."""
        self._pack()
        self._packed.setdefault(end.choice_index, PackedOutput()).end = end_field(end)
        self._note()

    def discard(self, *, kept_too: bool = False) -> None:
        """Implement `Output.discard`."""
        self.count_write()
        self._steps.clear()
        self._packed.clear()
        self.ready_at = None
        self.said_token_count = self.usage.journalled_token_count
        self._watch_credit()
        self.moved()

    def fail(self) -> None:
        """Implement `Output.fail`."""
        super().fail()
        if self.flow.credit == 0:
            self.discard()

    def take(self, receiver: Receiver, into: Collected, delta_max: int) -> None:
        """Implement `Output.take`."""
        self.has_more = False
        if not (self._steps or self._packed):
            return
        if into.asks_fences and not self.fence():
            self.discard()
            return
        if not self._packed and self.flow.credit is None and self.usage_telling is None:
            # Most output: tokens of the first choice with nothing beside them.
            choice_index, text, token_ids, logprobs, calls, thought = self._steps[0]
            is_plain = not (choice_index or logprobs or calls)
            if len(self._steps) > 1:
                is_plain = not any(
                    step[0] or step[3] or step[4] or step[5] is not NO_THOUGHT
                    for step in self._steps
                )
                text = "".join([step[1] for step in self._steps])
                token_ids = [token_id for step in self._steps for token_id in step[2]]
            count = len(token_ids)
            if is_plain and 0 < count <= TOKENS_PER_DELTA_MAX:
                self._steps.clear()
                self.ready_at = None
                self._last_seq += 1
                rest = b""
                if thought is not NO_THOUGHT:
                    rest = thought_fields(thought[0].encode(), thought[1])
                into.parts.append(
                    receiver.token(self._last_seq, text.encode(), token_ids[0])
                    if count == 1 and not rest
                    else receiver.delta(self._last_seq, 0, text.encode(), token_ids, rest)
                )
                into.token_room -= count
                end = len(into.parts)
                into.entries.append((self, count, thought[1], end - 1, end))
                if self._life is None:
                    self._say_end()
                return
        self._take_packed(receiver, into, delta_max)

    def _take_packed(self, receiver: Receiver, into: Collected, delta_max: int) -> None:
        self._pack()
        flow, room, taken_count, delta_count = self.flow, into.token_room, 0, 0
        all_reasoning_count = 0
        first = len(into.parts)
        for choice_index, output in list(self._packed.items()):
            while not (output.empty or self.has_more):
                if delta_count >= delta_max or taken_count >= room:
                    self.has_more = True
                    break
                count_max = (
                    TOKENS_PER_DELTA_MAX
                    if flow.credit is None
                    else min(TOKENS_PER_DELTA_MAX, flow.credit)
                )
                if self.usage_telling is not None:
                    count_max = min(count_max, self.usage_telling.room)
                text, token_ids, rest, reasoning_count = output.take(count_max)
                if not (token_ids or text or rest):
                    break  # the first token needs more credit
                all_reasoning_count += reasoning_count
                self._last_seq += 1
                delta_count += 1
                into.parts.append(
                    receiver.delta(self._last_seq, choice_index, text, token_ids, rest)
                )
                taken_count += len(token_ids)
                if flow.credit is not None:
                    flow.spend(len(token_ids))
                self._tell_usage(into, receiver, len(token_ids), reasoning_count)
            if output.empty:
                del self._packed[choice_index]
        if taken_count or all_reasoning_count:
            into.token_room -= taken_count
            into.entries.append((self, taken_count, all_reasoning_count, first, len(into.parts)))
        if self._has_failed and flow.credit == 0 and self._packed:
            # Not through `discard`, since the output just taken is not delivered yet.
            self.said_token_count -= sum(map(len, self._packed.values()))
            self._packed.clear()
        if not self._packed:
            self.ready_at = None
        if self._life is None and not self._packed:
            self._say_end()

    def _pack(self) -> None:
        for choice_index, text, token_ids, logprobs, calls, thought in self._steps:
            if (output := self._packed.get(choice_index)) is None:
                output = self._packed[choice_index] = PackedOutput()
            output.add(text, token_ids, logprobs, calls, thought)
        self._steps.clear()

    def _waits(self) -> bool:
        return bool(self._steps or self._packed)

    def _unread_token_count(self) -> int:
        return self.unsent_token_count

    def _oldest_seq(self) -> int:
        return self._last_seq + 1

    def _begin_after(self, after_seq: int) -> None:
        """Do nothing: waiting output has no sequence numbers yet."""


class ReplayOutput(Output):
    """Output that is delivered into a replay buffer, for a client that may reconnect.

    A kept token is delivered: it is in the usage journal before any client can read it, and any
    client of the project can. Reading it again is not counted. If this process dies, the buffer is
    lost, and only the tokens are billed that a transport had taken.
    """

    is_kept = True

    def __init__(
        self,
        receiver: Receiver,
        model: str,
        flow: Flow,
        life: EndDecision,
        update: Callable[[pb.UpdateFrame], None],
        keep_s: float,
        buffer: ReplayBuffer,
    ) -> None:
        super().__init__(receiver, model, flow, life, update)
        self.keep_s = keep_s
        self.buffer = buffer
        self._next_seq = 1  # first delta that was not handed to the receiver
        self._unread = 0  # tokens from `_next_seq` on
        self._unread_reasoning = 0

    def say(
        self,
        choice_index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs] = (),
        calls: Sequence[pb.ToolCallDelta] = (),
        thought: Thought = NO_THOUGHT,
    ) -> None:
        """Implement `Output.say`. With flow control, each token is a frame."""
        if not self.fence():
            return
        if token_ids or thought[1]:
            self.buffer.record(self.entry(len(token_ids), thought[1]))
        if token_ids:
            now = self.gaps.note(choice_index)
            if self.ready_at is None:
                self.ready_at = now
            self.usage.journalled_token_count += len(token_ids)
            self.said_token_count = self.usage.journalled_token_count
            self.usage.delivered_token_count = self.said_token_count
        self.usage.journalled_reasoning_token_count += thought[1]
        self.usage.delivered_reasoning_token_count = self.usage.journalled_reasoning_token_count
        reasoning_left = thought[1]
        step = 1 if self.flow.credit is not None else TOKENS_PER_DELTA_MAX
        for first in range(0, max(len(token_ids), 1), step):
            part = token_ids[first : first + step]
            is_last = first + step >= len(token_ids)
            rest = rest_of(
                logprobs[first : first + step],
                calls if is_last else (),
                thought if is_last else NO_THOUGHT,
            )
            reasoning = reasoning_left if is_last else min(len(part), reasoning_left)
            reasoning_left -= reasoning
            self._keep(choice_index, text if is_last else "", part, rest, reasoning)
        self._note()
        self._watch_credit()

    def end_choice(self, end: pb.ChoiceEnd) -> None:
        """Implement `Output.end_choice`."""
        if self.fence():
            self._keep(end.choice_index, "", (), end_field(end))
            self._note()

    def discard(self, *, kept_too: bool = False) -> None:
        """Implement `Output.discard`."""
        if self.flow.credit is None and not kept_too:
            return
        self._skip()
        self._watch_credit()
        self.moved()

    def take(self, receiver: Receiver, into: Collected, delta_max: int) -> None:
        """Implement `Output.take`."""
        flow, count = self.flow, 0
        self.has_more = False
        while self._next_seq <= self._last_seq:
            if count >= delta_max or into.token_room <= 0:
                self.has_more = True
                break
            delta, token_count, reasoning_count = self.buffer.get(self._next_seq)
            if flow.credit is not None:
                if token_count > flow.credit:
                    break
                flow.spend(token_count)
            self._next_seq += 1
            self._unread -= token_count
            self._unread_reasoning -= reasoning_count
            count += 1
            into.token_room -= token_count
            into.parts.append(delta_frame(receiver.head, delta))
            self._tell_usage(into, receiver, token_count, reasoning_count)
        if not self._unread:
            self.ready_at = None
        usage = self.usage
        new_count = (
            usage.journalled_token_count
            - self._unread
            - usage.taken_token_count
            - self.in_flight_token_count
        )
        new_reasoning_count = (
            usage.journalled_reasoning_token_count
            - self._unread_reasoning
            - usage.taken_reasoning_token_count
            - self.in_flight_reasoning_token_count
        )
        if count and (new_count > 0 or new_reasoning_count > 0):
            into.replayed.append((self, max(new_count, 0), max(new_reasoning_count, 0)))
        if self._life is None and not self._waits():
            self._say_end()

    def forget(self) -> None:
        """End the current reception, since the replay buffer is dropped."""
        if self.receiver is not None:
            receiver, self.receiver = self.receiver, None
            gone = OutputGone(self._next_seq - 1, self._last_seq + 1, self._last_seq)
            receiver.end(frames.failed(status_of(gone), None))

    def _keep(
        self,
        choice_index: int,
        text: str,
        token_ids: Sequence[int],
        rest: bytes,
        reasoning_token_count: int = 0,
    ) -> None:
        """Put a delta into the buffer. rest: its other fields, serialized."""
        self._last_seq += 1
        self._unread += len(token_ids)
        self._unread_reasoning += reasoning_token_count
        delta = delta_bytes(self._last_seq, choice_index, text.encode(), token_ids, rest)
        unread_seq = self._next_seq if self.receiver is not None else self._last_seq + 1
        if not self.buffer.put(delta, len(token_ids), unread_seq, reasoning_token_count):
            if self._life is not None:
                self._life.stop(Outcome.SLOW_CONSUMER, detail=UNREAD_TOO_MUCH)
            self._skip()  # the request is over; output outside the buffer cannot be sent

    def _skip(self) -> None:
        self.count_write()
        self._next_seq, self._unread, self._unread_reasoning = self._last_seq + 1, 0, 0
        self.ready_at = None

    def _waits(self) -> bool:
        return self._next_seq <= self._last_seq

    def _unread_token_count(self) -> int:
        return self._unread

    def _oldest_seq(self) -> int:
        return self.buffer.first_seq

    def _begin_after(self, after_seq: int) -> None:
        self._next_seq = after_seq + 1
        self._unread, self._unread_reasoning = self.buffer.token_counts_after(after_seq)
        self.ready_at = monotonic() if self._unread else None
        if (telling := self.usage_telling) is not None:
            usage = self.usage
            telling.sent_token_count = usage.delivered_token_count - self._unread
            telling.sent_reasoning_token_count = (
                usage.delivered_reasoning_token_count - self._unread_reasoning
            )


def rest_of(
    logprobs: Sequence[pb.TokenLogprobs],
    calls: Sequence[pb.ToolCallDelta],
    thought: Thought = NO_THOUGHT,
) -> bytes:
    """Serialize the optional fields of a `DeltaFrame`."""
    rest = b"".join(logprob_field(each) for each in logprobs)
    if calls:
        rest += pb.DeltaFrame(tool_calls=calls).SerializeToString()
    return rest + thought_fields(thought[0].encode(), thought[1])


def thought_fields(text: bytes, token_count: int) -> bytes:
    """Serialize `DeltaFrame.reasoning` and `reasoning_token_count`."""
    fields = b"\x3a%b%b" % (varint(len(text)), text) if text else b""
    return fields + b"\x40" + varint(token_count) if token_count else fields


def end_field(end: pb.ChoiceEnd) -> bytes:
    """Serialize `DeltaFrame.end`."""
    return pb.DeltaFrame(end=end).SerializeToString()


def joined_calls(calls: Sequence[pb.ToolCallDelta]) -> list[pb.ToolCallDelta]:
    """Return increments with those of one call joined, in the order of their first ones."""
    joined: dict[int, pb.ToolCallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for each in calls:
        joined.setdefault(each.index, each)
        arguments.setdefault(each.index, []).append(each.arguments_json)
    for index, pieces in arguments.items():
        if len(pieces) > 1:
            joined[index].arguments_json = "".join(pieces)
    return list(joined.values())


def logprob_field(logprobs: pb.TokenLogprobs) -> bytes:
    """Serialize one entry of `DeltaFrame.logprobs`."""
    data = logprobs.SerializeToString()
    return b"\x22%b%b" % (varint(len(data)), data)


class PackedOutput:
    """Tokens and text in order, packed into a few bytes per token.

    The text, calls and thinking of one `add` are taken with its last token. What precedes the rest
    of a delta is not taken together with earlier output that it would then precede: thinking after
    text or calls, and text after calls. end: `DeltaFrame.end`, taken with the last output.
    """

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._text = bytearray()
        self._calls = bytearray()  # tool calls as serialized frames, adjacent ones merged
        # Serialized: with 20 alternatives, a tenth of the size of the objects.
        self._logprobs: list[bytes] = []
        # End offset of each `add`, counted from the first token and byte ever added.
        self._token_ends = array("Q")
        self._text_ends = array("Q")
        self._call_ends = array("Q")
        self._taken_token_count = 0
        self._taken_byte_count = 0
        self._taken_call_byte_count = 0
        self._thoughts = bytearray()
        self._thought_ends = array("Q")
        self._taken_thought_byte_count = 0
        self._thought_token_counts = array("I")  # of each `add`
        # Tokens before the first `add` that is not taken as a whole, and its thinking counted yet.
        self._begun_token_count = self._counted_thought_count = 0
        self._has_text = self._has_calls = False  # since the last turn
        self._add_count = self._taken_add_count = 0
        self._turns: deque[int] = deque()  # calls of `add` before output that begins a delta
        self.end = b""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self._token_ids)

    @property
    def empty(self) -> bool:
        """True if nothing is left."""
        return not (self._token_ends or self.end)

    def add(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs] = (),
        calls: Sequence[pb.ToolCallDelta] = (),
        thought: Thought = NO_THOUGHT,
    ) -> None:
        """Append output. logprobs: one entry per token, or none."""
        if (thought[0] and (self._has_text or self._has_calls)) or (text and self._has_calls):
            self._turns.append(self._add_count)
            self._has_text = self._has_calls = False
        self._add_count += 1
        self._has_text |= bool(text)
        self._has_calls |= bool(calls)
        self._thoughts += thought[0].encode()
        self._thought_ends.append(self._taken_thought_byte_count + len(self._thoughts))
        self._thought_token_counts.append(thought[1])
        self._token_ids.extend(token_ids)
        self._text += text.encode()
        self._logprobs += [logprob_field(each) for each in logprobs]
        self._token_ends.append(self._taken_token_count + len(self._token_ids))
        self._text_ends.append(self._taken_byte_count + len(self._text))
        if calls:
            self._calls += pb.DeltaFrame(tool_calls=calls).SerializeToString()
        self._call_ends.append(self._taken_call_byte_count + len(self._calls))

    def take(self, token_count_max: int) -> tuple[bytes, list[int], bytes, int]:
        """Remove at most this many tokens.

        Returns text, ids, other `DeltaFrame` fields, and the number of tokens known to be thinking.
        Of an `add` that is taken in parts, the first tokens are its thinking; the fields have its
        number with its text.
        """
        add_count_max = len(self._token_ends)
        if self._turns:
            add_count_max = self._turns[0] - self._taken_add_count
            end = self._token_ends[add_count_max - 1]
            token_count_max = min(token_count_max, end - self._taken_token_count)
        token_count = min(token_count_max, len(self._token_ids))
        token_ids, self._token_ids = (
            self._token_ids[:token_count].tolist(),
            self._token_ids[token_count:],
        )
        logprobs, self._logprobs = self._logprobs[:token_count], self._logprobs[token_count:]
        self._taken_token_count += token_count
        whole_count = min(bisect_right(self._token_ends, self._taken_token_count), add_count_max)
        self._taken_add_count += whole_count
        if self._turns and self._turns[0] == self._taken_add_count:
            self._turns.popleft()
        text, calls, thought, thought_token_count = b"", b"", b"", 0
        reasoning_count = self._count_thoughts(whole_count)
        if whole_count:
            byte_count = self._thought_ends[whole_count - 1] - self._taken_thought_byte_count
            thought, self._thoughts = (
                bytes(self._thoughts[:byte_count]),
                self._thoughts[byte_count:],
            )
            self._taken_thought_byte_count += byte_count
            thought_token_count = sum(self._thought_token_counts[:whole_count])
            byte_count = self._text_ends[whole_count - 1] - self._taken_byte_count
            text, self._text = bytes(self._text[:byte_count]), self._text[byte_count:]
            self._taken_byte_count += byte_count
            byte_count = self._call_ends[whole_count - 1] - self._taken_call_byte_count
            calls, self._calls = bytes(self._calls[:byte_count]), self._calls[byte_count:]
            if calls and whole_count > 1:
                joined = joined_calls(pb.DeltaFrame.FromString(calls).tool_calls)
                calls = pb.DeltaFrame(tool_calls=joined).SerializeToString()
            self._taken_call_byte_count += byte_count
            del (
                self._token_ends[:whole_count],
                self._text_ends[:whole_count],
                self._call_ends[:whole_count],
                self._thought_ends[:whole_count],
                self._thought_token_counts[:whole_count],
            )
        rest = b"".join(logprobs) + calls + thought_fields(thought, thought_token_count)
        if self.end and not self._token_ends:
            rest, self.end = rest + self.end, b""
        return text, token_ids, rest, reasoning_count

    def _count_thoughts(self, whole_count: int) -> int:
        """Return how many of the tokens now taken are thinking. whole_count: `add`s that end."""
        counts, before = self._thought_token_counts, self._counted_thought_count
        if whole_count:
            self._begun_token_count = self._token_ends[whole_count - 1]
        self._counted_thought_count = 0
        if whole_count < len(counts):
            taken_count = self._taken_token_count - self._begun_token_count
            self._counted_thought_count = min(counts[whole_count], taken_count)
        return sum(counts[:whole_count]) + self._counted_thought_count - before
