"""Output buffer of one request, with flow control, for one receiving stream or for none.

The subclasses differ in when a token counts as delivered: with `SendBuffer`, when the transport has
taken it; with `ReplayableBuffer`, when it is in a replay buffer, from which a reconnecting client
receives it again.

Token counts of a request, each at most the one before it, and what bounds each:

    generated   by the engine      `LiveRequest.take` reports them to the queue, several at once
    appended    to this buffer     `LiveRequest.take` appends without checks up to a count that
                                   lease, output limit and unread output all allow; above it,
                                   `OutputProcessor.take` checks each of them
    journalled  for a message      by `StreamWriter` before the message is written; `FlowControl`
                                   and the size of a message bound it
    in flight   in a message       until the transport has taken the message, or lost it
    taken       by the transport   marked in the journal

Unsent tokens are appended and not journalled. Delivered tokens, which are billed, are those taken;
with a replay buffer, those journalled.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from weir.v1 import inference_service_pb2 as pb

from api.core.errors import AttachedElsewhere, FieldViolation, InvalidRequest, OutputGone
from api.core.statuses import status_of
from api.generation.delivery import frames
from api.generation.delivery.delta import NO_THOUGHT, Delta, PackedOutput, Thought
from api.generation.delivery.stream_writer import Collected, Subscription
from api.generation.endings import UsageSoFar
from api.generation.state import EndDecision
from api.observability.observer import Gaps
from inference.engine import TokenLogprobs
from inference.text.call_parser import CallPiece
from metering.core.errors import JournalUnavailable, RequestInFlight
from metering.core.models import Outcome
from metering.holds.journal import Delivered
from metering.pricing.prices import TokenPrices

CLOCK_S = 0.001  # a timer may fire this much early
STOPPED_MAX_S = 1.0  # how long a stopped request waits for the message that is being written
# A short answer in one piece is not packed; more steps are, into a few bytes per token.
STEPS_UNPACKED_MAX = 16

# One step: choice, text, token ids, log-probabilities, pieces of tool calls, thinking.
Step = tuple[int, str, Sequence[int], Sequence[TokenLogprobs], Sequence[CallPiece], Thought]


def may_always_send() -> bool:
    """Return True: default fence, which lets every token be delivered."""
    return True


def end_slow_reader(decision: EndDecision, tokens_per_s_min: float, stall_max_s: float) -> None:
    """End a request whose client read more slowly than the minimum rate."""
    decision.stop(Outcome.SLOW_CONSUMER, detail=read_too_slowly(tokens_per_s_min, stall_max_s))


def read_too_slowly(tokens_per_s_min: float, stall_max_s: float) -> str:
    """Describe why a request ended: its client read more slowly than the minimum rate."""
    return (
        f"output waited for the client, which took fewer than {tokens_per_s_min:g} tokens per"
        f" second for more than {stall_max_s:g} s: read faster, or grant credit sooner; the"
        " server's limits are WEIR_CLIENT_TOKENS_PER_SECOND_MIN and WEIR_CLIENT_STALL_MAX_S"
    )


class FlowControl:
    """Flow control of one request: the credit that its client has granted, and its stalls.

    A client may stall for `stall_max_s` seconds. The allowance runs down while more tokens wait
    than the client has granted, and each token sent gives back the time that it takes at the
    minimum rate. A request therefore ends if its client takes nothing for the whole time, or less
    than that rate for longer; small grants give back only the time of the tokens they let through.

    `stalled_s` is how long tokens were ready so far and the client did not take them, because it
    granted too little or did not read.
    """

    grant_count = 0
    timer: asyncio.TimerHandle | None = None
    stalled_s = 0.0
    _counted_at = -math.inf  # up to this time, while the timer runs, `_left_s` is counted
    _stalled_at = -math.inf  # up to this time `stalled_s` is counted

    def __init__(
        self,
        credit: int | None,
        stall_max_s: float,
        on_stall: Callable[[], None],
        tokens_per_s_min: float = 1.0,
    ) -> None:
        """`credit` is the number of tokens that may be sent at first; None means unlimited.

        `on_stall` is called once the allowance for stalls is used up.
        """
        self.credit = credit
        self.tokens_per_s_min = tokens_per_s_min
        self._left_s = self.stall_max_s = stall_max_s
        self._on_stall: Callable[[], None] | None = on_stall

    def grant(self, token_count: int) -> None:
        """Add credit for more tokens."""
        self.grant_count += 1
        if self.credit is not None:
            self.credit += token_count

    def stalled(self, since: float, now: float) -> None:
        """Add a time in which ready tokens were not taken by the client; overlaps count once."""
        since = max(since, self._stalled_at)
        if since < now:
            self.stalled_s += now - since
            self._stalled_at = now

    def spend(self, token_count: int) -> None:
        """Use credit for tokens that are sent, and give back the stall time that they are worth."""
        if self.credit is not None:
            self.credit -= token_count
            self.count()
            left_s = self._left_s + token_count / self.tokens_per_s_min
            self._left_s = min(left_s, self.stall_max_s)

    def watch(self, waiting_token_count: int) -> None:
        """Run the stall timer while more tokens wait than the client has granted."""
        is_blocked = (
            self.credit is not None
            and waiting_token_count > self.credit
            and self._on_stall is not None
        )
        if not is_blocked:
            self._stop_timer()
        elif self.timer is None:
            loop = asyncio.get_running_loop()
            self._counted_at = loop.time()
            self.timer = loop.call_later(max(self._left_s, 0.0), self._check)

    def close(self) -> None:
        """Stop the timer for good."""
        self._on_stall = None
        if self.timer is not None:
            self._stop_timer()

    def _check(self) -> None:
        """Report a stall if the allowance is used up; otherwise check again when it may be."""
        self.count()
        if self._left_s > CLOCK_S:
            self.timer = asyncio.get_running_loop().call_later(self._left_s, self._check)
        elif self._on_stall is not None:
            self._on_stall()

    def count(self) -> None:
        """Deduct the time that the timer has run so far from the allowance."""
        if self.timer is not None:
            now = asyncio.get_running_loop().time()
            self._left_s -= now - self._counted_at
            self.stalled(self._counted_at, now)
            self._counted_at = now

    def _stop_timer(self) -> None:
        if self.timer is not None:
            self.count()
            self.timer.cancel()
            self.timer = None


@dataclass(slots=True)
class UsageInterval:
    """Schedule of usage frames: one is sent every `interval_tokens` tokens."""

    interval_tokens: int
    prices: TokenPrices
    sent_token_count: int = 0  # in deltas handed to the subscription
    sent_reasoning_token_count: int = 0

    @property
    def room(self) -> int:
        """Return the number of tokens until the next usage frame is due."""
        return self.interval_tokens - self.sent_token_count % self.interval_tokens

    def due(
        self, usage: UsageSoFar, token_count: int, reasoning_token_count: int
    ) -> pb.ServerFrame | None:
        """Count a delta with this many tokens; return the usage frame that is due after it."""
        is_due = token_count >= self.room
        self.sent_token_count += token_count
        self.sent_reasoning_token_count += reasoning_token_count
        if not is_due:
            return None
        return frames.usage(
            usage, self.sent_token_count, self.sent_reasoning_token_count, self.prices
        )


class Flush(msgspec.Struct, eq=False):
    """Wait for the transport to take, or lose, the last output of a request that has ended.

    Calls `then` in a later turn of the loop, once all waiting output is sent or discarded and the
    message that is being written is taken or lost. If the client takes nothing for `stall_max_s`
    seconds, the request is stopped and the rest is discarded; None: no limit. Progress is measured
    on the stream, which may send frames of other requests first. In total the client has this time,
    plus that of the minimum rate.
    """

    output: OutputBuffer
    decision: EndDecision
    then: Callable[[], None]
    timer: asyncio.TimerHandle | None = None
    taken_by: float = math.inf  # latest time to take the output, on the loop's clock
    is_stopped: bool = False  # only the message that is being written is still waited for

    def poll(self) -> None:
        """Handle that the transport took output, or that the client is gone: may call `then`."""
        output, discards = self.output, self.decision.discards
        subscription = output.subscription
        # A replay buffer takes delivery at once.
        if output.is_kept or (
            not output.in_flight_token_count
            and (
                (subscription is None or subscription.writer.is_abandoned)
                or discards
                or not (output.waits() or subscription.frames or subscription.in_flight_count)
            )
        ):
            asyncio.get_running_loop().call_soon(self.then)
            output.flush = None
            if self.timer is not None:
                self.timer.cancel()
        elif discards and not self.is_stopped:
            self.is_stopped = True
            if self.timer is not None:
                self.timer.cancel()
            self.timer = asyncio.get_running_loop().call_later(STOPPED_MAX_S, self._give_up)

    def progress(self) -> tuple[int, int, int]:
        """Return the client's progress: equal later only if the client took nothing."""
        subscription = self.output.subscription
        return (
            id(subscription),
            subscription.writer.message_count if subscription else 0,
            self.output.flow.grant_count,
        )

    def check_reading(
        self, stall_max_s: float, last: tuple[int, int, int], before: tuple[int, int, int] | None
    ) -> None:
        """Discard the rest if the client has taken nothing, or has used up its time."""
        loop = asyncio.get_running_loop()
        has_moved = (now := self.progress()) != last or last != before
        if has_moved and loop.time() < self.taken_by:
            # Polls twice: after a suspension of this process, the first poll precedes any progress
            # of the client.
            self.timer = loop.call_later(
                stall_max_s / 2, self.check_reading, stall_max_s, now, last
            )
            return
        flow = self.output.flow
        end_slow_reader(self.decision, flow.tokens_per_s_min, flow.stall_max_s)
        self.output.discard()
        self._give_up()

    def _give_up(self) -> None:
        """End the wait although the transport may still hold the last message.

        The tokens of a message that the transport holds for a stalled client count as taken: the
        message cannot be recalled, and the client can still read it.
        """
        output = self.output
        if not output.is_kept:
            if not output.is_whole:  # the rest of a whole answer is never sent
                output.was_taken(
                    output.in_flight_token_count, output.in_flight_reasoning_token_count
                )
            output.in_flight_token_count = output.in_flight_reasoning_token_count = 0
        if output.flush is self:
            self.poll()


class OutputBuffer(ABC):
    """Output buffer of one request, and its `Source` for streams, even after the request has ended.

    `appended_token_count` counts tokens journalled or waiting for the client,
    `in_flight_token_count` those in messages that are being written. `fence` returns whether tokens
    may be delivered; if not, it ends the request. `ready_at` is when the oldest waiting token was
    appended, on the loop's clock; None if none waits.
    """

    is_kept = False
    keep_s: float | None = (
        None  # how long the request runs without a subscription; None: not at all
    )
    end_user = ""
    hold_id: uuid.UUID | None = None
    appended_token_count = in_flight_token_count = in_flight_reasoning_token_count = 0
    ready_at: float | None = None
    usage_interval: UsageInterval | None = None
    flush: Flush | None = None  # while the request waits for its last output to be taken
    has_more = False  # more can be sent after `take`
    _last_seq = 0  # of the newest delta
    _end: pb.ServerFrame | None = None
    _has_failed = False
    _unattended: asyncio.TimerHandle | None = None

    def __init__(
        self,
        subscription: Subscription,
        model: str,
        flow: FlowControl,
        request_state: EndDecision,
        update: Callable[[pb.UpdateFrame], None],
    ) -> None:
        """`model` is its name as sent by the client, until a fallback has taken the request.
        `update` changes the limits of the request.
        """
        self.usage = UsageSoFar()
        self.gaps = Gaps()
        self.fence: Callable[[], bool] = may_always_send
        self.model = model
        self.flow = flow
        self.subscription: Subscription | None = subscription
        self._request_state: EndDecision | None = request_state  # until the request has ended
        self.update = update
        self._opening: list[bytes] = []  # frames that are sent again to a stream that attaches
        subscription.source = subscription.supply = self

    # Called by the request.

    @abstractmethod
    def append(
        self,
        choice_index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        calls: Sequence[CallPiece] = (),
        thought: Thought = NO_THOUGHT,
    ) -> None:
        """Append new output of a choice.

        Raises JournalUnavailable if the output must be journalled first and the journal cannot be
        written.
        """

    @abstractmethod
    def end_choice(self, end: pb.ChoiceEnd) -> None:
        """Append the end of one of several choices, after its output."""

    def push(self, frame: pb.ServerFrame) -> None:
        """Send a frame that carries no output to the current subscription."""
        encoded = None
        if frame.HasField("prompt") or (frame.HasField("admitted") and not self._opening):
            encoded = frame.SerializeToString()
            self._opening.append(encoded)
        if self.subscription is not None:
            self.subscription.push(frame, encoded)

    @property
    def unsent_token_count(self) -> int:
        """Number of tokens that wait for the client and are not in a message yet."""
        return self.appended_token_count - self.usage.journalled_token_count

    @property
    def stalled_s(self) -> float:
        """Seconds so far in which tokens were ready and the connected client did not take them.

        Nothing is counted while no client is connected.
        """
        flow = self.flow
        if self.subscription is not None and self.subscription.writer.writing_since is not None:
            self.count_write()
        if flow.timer is not None:
            flow.count()
        return flow.stalled_s

    def count_write(self) -> None:
        """Count the current write as a stall if it is slow and tokens of it are waiting."""
        if (
            self.subscription is not None
            and (slow := self.subscription.writer.slow_write()) is not None
        ):
            since, now = slow
            if self.in_flight_token_count:
                self.flow.stalled(since, now)
            elif self.ready_at is not None:
                self.flow.stalled(max(since, self.ready_at), now)

    @property
    def is_whole(self) -> bool:
        """True if the client receives the whole answer in one message."""
        return self.subscription is not None and self.subscription.writer.is_whole

    def complete(self) -> None:
        """Tell the writer that no more output will be appended."""
        if self.subscription is not None:
            self.subscription.writer.complete(self.subscription)

    def when_taken(self, then: Callable[[], None], stall_max_s: float | None) -> None:
        """Call `then` once the waiting output is taken or discarded. See `Flush`."""
        assert self._request_state is not None, "output is flushed before the end of the request"
        self.flush = flush = Flush(self, self._request_state, then)
        flush.poll()
        if stall_max_s is not None and self.flush is flush and flush.timer is None:
            waiting_count = self.appended_token_count - self.usage.journalled_token_count
            waiting_s = waiting_count / self.flow.tokens_per_s_min
            loop = asyncio.get_running_loop()
            flush.taken_by = loop.time() + stall_max_s + waiting_s
            flush.timer = loop.call_later(
                stall_max_s / 2, flush.check_reading, stall_max_s, flush.progress(), None
            )

    def lose(self, error: JournalUnavailable) -> None:
        """Fail the request and discard the rest: tokens that were taken cannot be journalled."""
        if self._request_state is not None:
            self._request_state.discards = True
            self._request_state.stop(Outcome.FAILED, error)
        self.discard()

    @abstractmethod
    def discard(self, *, kept_too: bool = False) -> None:
        """Drop output that was not handed to the transport.

        Output in a replay buffer counts as delivered, so it is still sent within the credit; with
        `kept_too` it is dropped as well.
        """

    def fail(self) -> None:
        """Handle a failure: send waiting output within the credit, but wait for no more credit."""
        self._has_failed = True
        self._note()

    def end(self, frame: pb.ServerFrame | None) -> None:
        """End the output with `frame`, sent after the waiting output; None sends no frame.

        Drops all references to the request, so that it is freed without a garbage collection.
        """
        self._end, self._request_state = frame, None
        self.fence, self.update = may_always_send, _ended
        self.flow.close()
        if self._unattended is not None:
            self._unattended.cancel()
            self._unattended = None
        if self.subscription is not None and not self.waits():
            self._send_end()

    # Called by its streams.

    def stop(self, outcome: Outcome) -> None:
        """Stop the request with this outcome."""
        if self._request_state is not None:
            self._request_state.stop(outcome)

    def grant(self, token_count: int) -> None:
        """Add credit. A number below 1 is invalid and ends the request."""
        if token_count < 1:
            wrong = FieldViolation("credit.token_count", f"must be at least 1, got {token_count}")
            if self._request_state is not None:
                self._request_state.stop(Outcome.CANCELLED, InvalidRequest([wrong]))
            return
        self.count_write()  # the write may have begun before the credit ran out
        self.flow.grant(token_count)
        self._watch_credit()
        self._note()

    def attach(self, subscription: Subscription, after_seq: int, credit_token_count: int) -> None:
        """Send output to this subscription from now on, starting after the delta `after_seq`.

        Raises OutputGone, or RequestInFlight if the request is just ending. Then nothing has
        changed.
        """
        is_running = self._request_state is not None
        if (
            self._request_state is not None
            and self._request_state.end is not None
            and not self.is_kept
        ):
            raise RequestInFlight(
                "The request with this request_id is just ending. Attach again in a moment."
            )
        oldest_seq = self._oldest_seq()
        if not oldest_seq - 1 <= after_seq <= self._last_seq:
            raise OutputGone(after_seq, oldest_seq, self._last_seq)
        self.count_write()
        if (old := self.subscription) is not None:
            old.supply = None
            old.drop()
            if old.writer is not subscription.writer:
                old.end(
                    frames.failed(
                        status_of(
                            AttachedElsewhere(
                                "Another stream has attached to your request and receives its"
                                " output now. Attach again to take it back."
                            )
                        ),
                        None,
                    )
                )
        subscription.source = subscription.supply = self
        self.subscription = subscription
        if self.flow.credit is not None:
            self.flow.credit = credit_token_count
        self._begin_after(after_seq)
        subscription.push(
            frames.attached(after_seq, self._last_seq, self.usage, running=is_running)
        )
        for encoded in self._opening:
            subscription.push(pb.ServerFrame.FromString(encoded), encoded)
        if self._unattended is not None:
            self._unattended.cancel()
            self._unattended = None
        if self.flush is not None:
            self.flush.poll()
        self._watch_credit()
        if not is_running and not self.waits():
            self._send_end()
        self._note()

    def detach(self) -> Subscription | None:
        """Remove the subscription and return it. Output in a replay buffer is kept."""
        self.count_write()
        old, self.subscription = self.subscription, None
        if old is not None:
            old.supply = None
            old.drop()
        self._watch_credit()
        if self.flush is not None:
            self.flush.poll()
        return old

    def revoke(self, subscription: Subscription, error: Exception) -> None:
        """Stop the request because its stream may no longer receive it.

        If the request has already ended, only the subscription is closed.
        """
        if self.subscription is not subscription:
            return
        if self._request_state is not None:
            self._request_state.stop(Outcome.CANCELLED, error)
        else:
            self.detach()
            subscription.end(frames.failed(status_of(error), None))

    def leave(self, subscription: Subscription, outcome: Outcome) -> None:
        """Handle that the receiving stream has closed: stop, or let it run on for `keep_s`."""
        if self.subscription is not subscription:
            return
        if self._request_state is None:
            self.detach()
        elif self.keep_s is None:
            self.stop(outcome)
        else:
            self.detach()
            self._unattended = asyncio.get_running_loop().call_later(
                self.keep_s, self.stop, Outcome.CANCELLED
            )

    # Called by the writer.

    @abstractmethod
    def take(self, subscription: Subscription, into: Collected, delta_max: int) -> None:
        """Move at most `delta_max` deltas that may be sent into a message, and set `has_more`."""

    def was_taken(self, token_count: int, reasoning_token_count: int) -> None:
        """Count tokens as delivered: the transport has taken them."""
        usage = self.usage
        # Less if a stalled request has ended, and was billed, meanwhile.
        if token_count > self.in_flight_token_count:
            token_count = self.in_flight_token_count
        self.in_flight_token_count -= token_count
        usage.taken_token_count += token_count
        if reasoning_token_count:
            reasoning_token_count = min(reasoning_token_count, self.in_flight_reasoning_token_count)
            self.in_flight_reasoning_token_count -= reasoning_token_count
            usage.taken_reasoning_token_count += reasoning_token_count
        if not self.is_kept:
            usage.delivered_token_count = usage.taken_token_count
            if reasoning_token_count:
                usage.delivered_reasoning_token_count = usage.taken_reasoning_token_count

    def entry(self, token_count: int, reasoning_token_count: int = 0) -> Delivered:
        """Build the journal entry for this many more tokens, some of which are reasoning."""
        assert self.hold_id is not None, "tokens are delivered only under a hold"
        usage = self.usage
        total = usage.journalled_token_count + token_count
        generated = usage.generated_token_count
        return Delivered(
            self.hold_id,
            usage.input_token_count,
            usage.cached_input_token_count,
            generated if generated > total else total,
            total,
            usage.journalled_reasoning_token_count + reasoning_token_count,
        )

    # Implemented by the subclasses.

    @abstractmethod
    def waits(self) -> bool:
        """Return whether output is waiting for the subscription."""

    @abstractmethod
    def _unread_token_count(self) -> int:
        """Return how many tokens are waiting for the subscription."""

    @abstractmethod
    def _oldest_seq(self) -> int:
        """Return the number of the oldest delta that a stream which attaches can still receive."""

    @abstractmethod
    def _begin_after(self, after_seq: int) -> None:
        """Continue sending with the delta after `after_seq`."""

    def _note(self) -> None:
        """Queue the subscription in its writer, since output may be ready to send."""
        if self.subscription is not None:
            self.subscription.writer.add(self.subscription)

    def _watch_credit(self) -> None:
        if self.flow.credit is not None:
            self.flow.watch(0 if self.subscription is None else self._unread_token_count())

    def _send_end(self) -> None:
        subscription, self.subscription = self.subscription, None
        if subscription is not None:
            subscription.end(self._end)


def _ended(message: pb.UpdateFrame) -> None:
    """Ignore a change of limits after the end of the request."""


class SendBuffer(OutputBuffer):
    """Output buffer whose tokens count as delivered when the transport has taken them."""

    def __init__(
        self,
        subscription: Subscription,
        model: str,
        flow: FlowControl,
        request_state: EndDecision,
        update: Callable[[pb.UpdateFrame], None],
    ) -> None:
        super().__init__(subscription, model, flow, request_state, update)
        self._steps: list[Step] = []  # waiting, after the packed ones
        self._packed: dict[int, PackedOutput] = {}  # by choice

    def append(
        self,
        choice_index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        calls: Sequence[CallPiece] = (),
        thought: Thought = NO_THOUGHT,
    ) -> None:
        if token_ids:
            now = self.gaps.note(choice_index)
            if self.ready_at is None:
                self.ready_at = now
            self.appended_token_count += len(token_ids)
        steps = self._steps
        steps.append((choice_index, text, token_ids, logprobs, calls, thought))
        if len(steps) > STEPS_UNPACKED_MAX:
            self._pack()
        subscription = self.subscription
        if subscription is not None and not subscription.is_waiting:
            subscription.writer.add(subscription)
        if self.flow.credit is not None:
            self._watch_credit()

    def end_choice(self, end: pb.ChoiceEnd) -> None:
        self._pack()
        self._packed.setdefault(end.choice_index, PackedOutput()).end = end
        self._note()

    def discard(self, *, kept_too: bool = False) -> None:
        self.count_write()
        self._steps.clear()
        self._packed.clear()
        self.ready_at = None
        self.appended_token_count = self.usage.journalled_token_count
        self._watch_credit()
        if self.flush is not None:
            self.flush.poll()

    def fail(self) -> None:
        super().fail()
        if self.flow.credit == 0:
            self.discard()

    def take(self, subscription: Subscription, into: Collected, delta_max: int) -> None:
        self.has_more = False
        if not (self._steps or self._packed):
            return
        if into.asks_fences is None:
            into.asks_fences = subscription.writer.may_have_lapsed()
        if into.asks_fences and not self.fence():
            self.discard()
            return
        if not self._packed and self.flow.credit is None and self.usage_interval is None:
            # Most output: one step, or tokens of the first choice with nothing beside them.
            steps = self._steps
            step = steps[0] if len(steps) == 1 else joined(steps)
            part = None
            if step is not None:
                choice_index, text, token_ids, logprobs, calls, thought = step
                count, seq = len(token_ids), self._last_seq + 1
                if count == 1 and thought is NO_THOUGHT and not (choice_index or logprobs or calls):
                    part = subscription.token(seq, text, token_ids[0])
                elif 0 < count <= subscription.writer.tokens_per_delta_max:
                    delta = Delta(text, token_ids, logprobs, calls, *thought)
                    part = subscription.delta(seq, choice_index, delta)
            if part is not None:
                steps.clear()
                self.ready_at = None
                self._last_seq = seq
                into.token_room -= count
                parts = into.parts
                parts.append(part)
                end = len(parts)
                into.entries.append((self, count, thought[1], end - 1, end))
                if self._request_state is None:
                    self._send_end()
                return
        self._take_packed(subscription, into, delta_max)

    def _take_packed(self, subscription: Subscription, into: Collected, delta_max: int) -> None:
        self._pack()
        flow, room, taken_count, delta_count = self.flow, into.token_room, 0, 0
        all_reasoning_count = 0
        first, count_most = len(into.parts), subscription.writer.tokens_per_delta_max
        for choice_index, output in list(self._packed.items()):
            while not (output.empty or self.has_more):
                if delta_count >= delta_max or taken_count >= room:
                    self.has_more = True
                    break
                count_max = count_most if flow.credit is None else min(count_most, flow.credit)
                if self.usage_interval is not None:
                    count_max = min(count_max, self.usage_interval.room)
                delta, reasoning_count = output.take(count_max)
                count = len(delta.token_ids)
                if not (count or delta.text) and delta.is_plain:
                    break  # the first token needs more credit
                all_reasoning_count += reasoning_count
                self._last_seq += 1
                delta_count += 1
                into.parts.append(subscription.delta(self._last_seq, choice_index, delta))
                taken_count += count
                if flow.credit is not None:
                    flow.spend(count)
                if self.usage_interval is not None and (
                    frame := self.usage_interval.due(self.usage, count, reasoning_count)
                ):
                    into.parts.append(subscription.part(frame))
            if output.empty:
                del self._packed[choice_index]
        if taken_count or all_reasoning_count:
            into.token_room -= taken_count
            into.entries.append((self, taken_count, all_reasoning_count, first, len(into.parts)))
        if self._has_failed and flow.credit == 0 and self._packed:
            # Not through `discard`, since the output just taken is not delivered yet.
            self.appended_token_count -= sum(map(len, self._packed.values()))
            self._packed.clear()
        if not self._packed:
            self.ready_at = None
        if self._request_state is None and not self._packed:
            self._send_end()

    def _pack(self) -> None:
        steps: Sequence[Step] = self._steps
        if self.is_whole and len(steps) > 1 and (step := joined(steps)) is not None:
            steps = (step,)
        for choice_index, text, token_ids, logprobs, calls, thought in steps:
            if (output := self._packed.get(choice_index)) is None:
                output = self._packed[choice_index] = PackedOutput()
            output.add(text, token_ids, logprobs, calls, thought)
        self._steps.clear()

    def waits(self) -> bool:
        return bool(self._steps or self._packed)

    def _unread_token_count(self) -> int:
        return self.unsent_token_count

    def _oldest_seq(self) -> int:
        return self._last_seq + 1

    def _begin_after(self, after_seq: int) -> None:
        """Do nothing: waiting output has no sequence numbers yet."""


def joined(steps: Sequence[Step]) -> Step | None:
    """Join steps into one; None unless all have only text and tokens of the first choice."""
    for choice_index, _, _, logprobs, calls, thought in steps:
        if choice_index or logprobs or calls or thought is not NO_THOUGHT:
            return None
    text = "".join([step[1] for step in steps])
    return 0, text, [token_id for step in steps for token_id in step[2]], (), (), NO_THOUGHT
