"""Output buffers: the output of one request, for one receiving stream at a time or for none.

`LiveOutput` holds output until the stream can send it and the client has granted credit for it. `ReplayOutput` keeps output in a
replay buffer, so that a client that reconnects can receive it again.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from weir.v1 import inference_service_pb2 as pb

from api.core.errors import AttachedElsewhere, FieldViolation, InvalidRequest, OutputGone, status_of
from api.generation import frames
from api.generation.life import Life
from api.generation.outbox import Collected, Receiver, UsageSoFar, delta_bytes, delta_frame, framed, varint
from api.generation.replay import ReplayBuffer
from metering.core.errors import RequestInFlight
from metering.core.models import Outcome
from metering.holds.journal import Delivered
from metering.pricing.prices import TokenPrices

TOKENS_PER_DELTA_MAX = 64  # of steps that are told together: a frame stays some kB, whatever it carries beside the tokens
STEPS_UNPACKED_MAX = 4  # a client that reads leaves one or two; beyond it what waits takes some bytes a token


def may_always_send() -> bool:
    """Default fence: tokens may be sent."""
    return True


class Flow:
    """Flow control of one request: granted credit, and a timer for clients that grant none."""

    def __init__(self, credit: int | None, stall_max_s: float, on_stall: Callable[[], None]) -> None:
        """credit: tokens that may be sent at first; None: none is needed. on_stall: called when the client grants too little."""
        self.credit = credit
        self.grant_count = 0
        self._stall_max_s = stall_max_s
        self._on_stall: Callable[[], None] | None = on_stall
        self._timer: asyncio.TimerHandle | None = None

    def grant(self, token_count: int) -> None:
        """The client takes so many more tokens."""
        self.grant_count += 1
        if self.credit is not None:
            self.credit += token_count
            self._stop_timer()

    def watch(self, waiting_token_count: int) -> None:
        """Run the stall timer while more tokens wait than the client has granted."""
        is_blocked = self.credit is not None and waiting_token_count > self.credit and self._on_stall is not None
        if not is_blocked:
            self._stop_timer()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._stall_max_s, self.stalled)

    def stalled(self) -> None:
        """Report that the client does not keep up."""
        if self._on_stall is not None:
            self._on_stall()

    def close(self) -> None:
        """Stop the timer for good."""
        self._on_stall = None
        if self._timer is not None:
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@dataclass(slots=True)
class UsageTelling:
    """Usage frames at an interval in tokens."""

    interval_tokens: int
    prices: TokenPrices
    sent_token_count: int = 0  # by the deltas that the receiver was given

    @property
    def room(self) -> int:
        """Tokens until the next counts."""
        return self.interval_tokens - self.sent_token_count % self.interval_tokens


class Output(ABC):
    """Output buffer of one request, and its `Source` while it runs and after it has ended.

    said_token_count: delivered, or waiting for the client. fence: whether tokens may leave; where not, it ends the request.
    """

    is_kept = False
    keep_s: float | None = None  # how long the request goes on unattended; None: not at all

    def __init__(self, receiver: Receiver, model: str, flow: Flow, life: Life, update: Callable[[pb.UpdateFrame], None]) -> None:
        """model: as the client called it. update: changes the limits of the request."""
        self.usage = UsageSoFar()
        self.hold_id: uuid.UUID | None = None
        self.fence: Callable[[], bool] = may_always_send
        self.model = model
        self.said_token_count = 0
        self.usage_telling: UsageTelling | None = None
        self.flow = flow
        self.receiver: Receiver | None = receiver
        self._life: Life | None = life  # until the request has ended
        self._update = update
        self._last_seq = 0  # of the last delta that there is
        self._admitted: bytes | None = None  # for a stream that attaches
        self._end: pb.ServerFrame | None = None
        self._has_failed = False
        self._unattended: asyncio.TimerHandle | None = None
        self.then: Callable[[], None] | None = None  # see `when_taken`
        self._stall: asyncio.TimerHandle | None = None
        self.has_more = False  # whether something that may be sent now is left after `take`
        receiver.source = receiver.supply = self

    # What the request does.

    @abstractmethod
    def say(
        self,
        choice_index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs] = (),
        calls: Sequence[pb.ToolCallDelta] = (),
    ) -> None:
        """New output. Raises: OSError if it has to be journalled and cannot be."""

    def push(self, frame: pb.ServerFrame) -> None:
        """Send a frame without output to the current receiver."""
        data = frame.SerializeToString()
        if self._admitted is None and frame.HasField("admitted"):
            self._admitted = data
        if self.receiver is not None:
            self.receiver.push(data)

    @property
    def unsent_token_count(self) -> int:
        """Tokens that wait for the client to read, and are not delivered until then."""
        return self.said_token_count - self.usage.delivered_token_count

    @property
    def takes_whole(self) -> bool:
        """Whether the client wants the whole answer in one message."""
        return self.receiver is not None and self.receiver.outbox.takes_whole

    @property
    def progress(self) -> tuple[int, int, int]:
        """Changes with everything that the client does to take more: it stalls only while this stands still."""
        return id(self.receiver), self.receiver.outbox.message_count if self.receiver else 0, self.flow.grant_count

    def complete(self) -> None:
        """No more output comes."""
        if self.receiver is not None:
            self.receiver.outbox.complete(self.receiver)

    def when_taken(self, then: Callable[[], None], stall_max_s: float | None) -> None:
        """Call `then` in a later turn of the loop, once the client has taken everything or what waits was discarded.

        stall_max_s: how long the client may take nothing before the request is stopped, and the rest discarded; None: for ever.
        What it takes may be frames of other requests that came before, so the stream is watched and not the request.
        """
        self.then = then
        if stall_max_s is not None:
            self._watch_reading(stall_max_s, self.progress, None)
        self.moved()

    def _watch_reading(self, stall_max_s: float, progress: tuple[int, int, int], before: tuple[int, int, int] | None) -> None:
        # Two looks: where this process was stopped, the first one comes before anything that the client has done meanwhile.
        look = partial(self._look_at_reading, stall_max_s, progress, before)
        self._stall = asyncio.get_running_loop().call_later(stall_max_s / 2, look)

    def _look_at_reading(self, stall_max_s: float, last: tuple[int, int, int], before: tuple[int, int, int] | None) -> None:
        if (now := self.progress) != last or last != before:
            self._watch_reading(stall_max_s, now, last)
            return
        self._stall = None
        if self._life is not None:
            self._life.stop(Outcome.SLOW_CONSUMER)
        self.discard()
        self.moved()

    @abstractmethod
    def discard(self, *, kept_too: bool = False) -> None:
        """Forget what was not handed to the transport.

        What a replay buffer has is delivered: it is sent, as far as credit reaches. kept_too: the buffer goes as well.
        """

    def fail(self) -> None:
        """The request is broken: what waits is sent as far as credit reaches, and no more credit is waited for."""
        self._has_failed = True
        self._note()

    def end(self, frame: pb.ServerFrame | None) -> None:
        """The request has ended: its last frame follows what waits. None: this process ends, and tells nobody.

        Nothing here refers to the request any more: it goes at once, without a collector.
        """
        self._end, self._life = frame, None
        self.fence, self._update = may_always_send, _ended
        self.flow.close()
        if self._unattended is not None:
            self._attended()
        if self.receiver is not None and not self._waits():
            self._say_end()

    # What its streams do.

    def stop(self, outcome: Outcome) -> None:
        """End the request."""
        if self._life is not None:
            self._life.stop(outcome)

    def grant(self, token_count: int) -> None:
        """The client takes so many more tokens; a number below 1 ends the request as a cancellation does."""
        if token_count < 1:
            wrong = FieldViolation("credit.token_count", f"must be at least 1, not {token_count}")
            if self._life is not None:
                self._life.stop(Outcome.CANCELLED, InvalidRequest([wrong]))
            return
        self.flow.grant(token_count)
        self._watch_credit()
        self._note()

    def update(self, message: pb.UpdateFrame) -> None:
        """Change its limits, and tell the client what holds from now on."""
        self._update(message)

    def attach(self, receiver: Receiver, after_seq: int, credit_token_count: int) -> None:
        """From now on this one receives, from the delta after that one on.

        Raises: OutputGone; RequestInFlight if the request is just being ended. Nothing has changed then.
        """
        is_running = self._life is not None
        if self._life is not None and self._life.end is not None and not self.is_kept:
            raise RequestInFlight("the request with this request_id is just being ended: ask again in a moment")
        oldest_seq = self._oldest_seq()
        if not oldest_seq - 1 <= after_seq <= self._last_seq:
            raise OutputGone(after_seq, oldest_seq, self._last_seq)
        if (old := self.receiver) is not None:
            old.supply = None
            old.drop()
            if old.outbox is not receiver.outbox:
                old.end(frames.failed(status_of(AttachedElsewhere("another stream receives this request now")), None))
        receiver.source = receiver.supply = self
        self.receiver = receiver
        if self.flow.credit is not None:
            self.flow.credit = credit_token_count
        self._begin_after(after_seq)
        receiver.push(frames.attached(after_seq, self._last_seq, self.usage, running=is_running))
        if self._admitted is not None:
            receiver.push(self._admitted)
        self._attended()
        self.moved()
        self._watch_credit()
        if not is_running and not self._waits():
            self._say_end()
        self._note()

    def detach(self) -> Receiver | None:
        """Remove and return the receiver. A replay buffer keeps its output."""
        old, self.receiver = self.receiver, None
        if old is not None:
            old.supply = None
            old.drop()
        self._watch_credit()
        self.moved()
        return old

    def shut_out(self, receiver: Receiver, error: Exception) -> None:
        """Stop the request, since the receiver lost its right to it. After its end, only the reception ends."""
        if self.receiver is not receiver:
            return
        if self._life is not None:
            self._life.stop(Outcome.CANCELLED, error)
        else:
            self.detach()
            receiver.end(frames.failed(status_of(error), None))

    def leave(self, receiver: Receiver, outcome: Outcome) -> None:
        """Handle that the receiving stream closed: stop the request, or let it run for `keep_s` without a receiver."""
        if self.receiver is not receiver:
            return
        if self._life is None:
            self.detach()
        elif self.keep_s is None:
            self.stop(outcome)
        else:
            self.detach()
            self._unattended = asyncio.get_running_loop().call_later(self.keep_s, self.stop, Outcome.CANCELLED)

    # What the outbox does.

    @abstractmethod
    def take(self, receiver: Receiver, into: Collected, delta_max: int) -> None:
        """Put what may be sent now into a message, so many deltas at most; `has_more` tells whether some is left then."""

    def entry(self, token_count: int) -> Delivered:
        """Return the journal entry for the delivery of this many more tokens."""
        assert self.hold_id is not None, "tokens flow only under a hold"
        usage = self.usage
        total = usage.delivered_token_count + token_count
        generated = max(usage.generated_token_count, total)
        return Delivered(self.hold_id, usage.input_token_count, usage.cached_input_token_count, generated, total)

    def moved(self) -> None:
        """The transport has taken what it was given, or the client is gone."""
        then, life, receiver = self.then, self._life, self.receiver
        if then is None:
            return
        # A replay buffer takes all of it at once.
        if (
            (receiver is None or self.is_kept or receiver.outbox.is_abandoned)
            or (life is None or life.discards)
            or not (self._waits() or receiver.frames or receiver.in_flight_count)
        ):
            asyncio.get_running_loop().call_soon(then)
            self.then = None
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None

    # What the two differ in.

    @abstractmethod
    def _waits(self) -> bool:
        """Whether output waits for the receiver."""

    @abstractmethod
    def _unread_token_count(self) -> int:
        """Tokens that wait for the receiver."""

    @abstractmethod
    def _oldest_seq(self) -> int:
        """The first delta that another stream could be given."""

    @abstractmethod
    def _begin_after(self, after_seq: int) -> None:
        """The receiver gets what follows this delta."""

    def _note(self) -> None:
        """Something may be sent."""
        if self.receiver is not None:
            self.receiver.outbox.add(self.receiver)

    def _watch_credit(self) -> None:
        if self.flow.credit is not None:
            self.flow.watch(0 if self.receiver is None else self._unread_token_count())

    def _tell_usage(self, into: Collected, receiver: Receiver, token_count: int) -> None:
        """Running counts after a delta of so many tokens, if it is time."""
        telling = self.usage_telling
        if telling is not None and token_count:
            is_due = token_count >= telling.room
            telling.sent_token_count += token_count
            if is_due:
                frame = frames.usage(self.usage, telling.sent_token_count, telling.prices)
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


# Of a step: choice, text, token ids, log-probabilities, pieces of tool calls.
Step = tuple[int, str, Sequence[int], Sequence[pb.TokenLogprobs], Sequence[pb.ToolCallDelta]]


class LiveOutput(Output):
    """Output that counts as delivered when it is handed to the transport."""

    def __init__(self, receiver: Receiver, model: str, flow: Flow, life: Life, update: Callable[[pb.UpdateFrame], None]) -> None:
        super().__init__(receiver, model, flow, life, update)
        self._steps: list[Step] = []  # what waits, behind what is packed
        self._packed: dict[int, PackedOutput] = {}  # by choice

    def say(
        self,
        choice_index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs] = (),
        calls: Sequence[pb.ToolCallDelta] = (),
    ) -> None:
        """See `Output.say`."""
        self.said_token_count += len(token_ids)
        self._steps.append((choice_index, text, token_ids, logprobs, calls))
        if len(self._steps) > STEPS_UNPACKED_MAX:
            self._pack()
        receiver = self.receiver
        if receiver is not None and not receiver.is_waiting:
            receiver.outbox.add(receiver)
        if self.flow.credit is not None:
            self._watch_credit()

    def discard(self, *, kept_too: bool = False) -> None:
        """See `Output.discard`."""
        self._steps.clear()
        self._packed.clear()
        self.said_token_count = self.usage.delivered_token_count
        self._watch_credit()
        self.moved()

    def fail(self) -> None:
        """See `Output.fail`."""
        super().fail()
        if self.flow.credit == 0:
            self.discard()

    def take(self, receiver: Receiver, into: Collected, delta_max: int) -> None:
        """See `Output.take`."""
        self.has_more = False
        if not (self._steps or self._packed):
            return
        if into.asks_fences and not self.fence():
            self.discard()
            return
        if len(self._steps) == 1 and not self._packed and self.flow.credit is None and self.usage_telling is None:
            choice_index, text, token_ids, logprobs, calls = self._steps[0]
            if len(token_ids) == 1 and not (choice_index or logprobs or calls):
                self._steps.clear()
                self._last_seq += 1
                into.parts.append(receiver.token(self._last_seq, text.encode(), token_ids[0]))
                into.token_room -= 1
                into.entries.append((self, 1))
                if self._life is None:
                    self._say_end()
                return
        self._take_packed(receiver, into, delta_max)

    def _take_packed(self, receiver: Receiver, into: Collected, delta_max: int) -> None:
        self._pack()
        flow, room, taken_count, delta_count = self.flow, into.token_room, 0, 0
        for choice_index, output in list(self._packed.items()):
            while not (output.empty or self.has_more):
                if delta_count >= delta_max or taken_count >= room:
                    self.has_more = True
                    break
                most = TOKENS_PER_DELTA_MAX if flow.credit is None else min(TOKENS_PER_DELTA_MAX, flow.credit)
                if self.usage_telling is not None:
                    most = min(most, self.usage_telling.room)
                text, token_ids, rest = output.take(most)
                if not (token_ids or text or rest):
                    break  # the first token waits for credit
                self._last_seq += 1
                delta_count += 1
                into.parts.append(receiver.delta(self._last_seq, choice_index, text, token_ids, rest))
                taken_count += len(token_ids)
                if flow.credit is not None:
                    flow.credit -= len(token_ids)
                self._tell_usage(into, receiver, len(token_ids))
            if output.empty:
                del self._packed[choice_index]
        if taken_count:
            into.token_room -= taken_count
            into.entries.append((self, taken_count))
        if self._has_failed and flow.credit == 0 and self._packed:
            # Not by `discard`, since what was just taken is not delivered yet.
            self.said_token_count -= sum(map(len, self._packed.values()))
            self._packed.clear()
        if self._life is None and not self._packed:
            self._say_end()

    def _pack(self) -> None:
        for choice_index, text, token_ids, logprobs, calls in self._steps:
            if (output := self._packed.get(choice_index)) is None:
                output = self._packed[choice_index] = PackedOutput()
            output.add(text, token_ids, logprobs, calls)
        self._steps.clear()

    def _waits(self) -> bool:
        return bool(self._steps or self._packed)

    def _unread_token_count(self) -> int:
        return self.unsent_token_count

    def _oldest_seq(self) -> int:
        return self._last_seq + 1

    def _begin_after(self, after_seq: int) -> None:
        """Nothing to do: waiting output has no sequence number yet."""


class ReplayOutput(Output):
    """Output that a replay buffer takes delivery of, for a client that may come back.

    A token that is kept has been delivered: it stands in the usage journal before anybody can read it, and reading it again counts
    nothing.
    """

    is_kept = True

    def __init__(
        self,
        receiver: Receiver,
        model: str,
        flow: Flow,
        life: Life,
        update: Callable[[pb.UpdateFrame], None],
        keep_s: float,
        buffer: ReplayBuffer,
    ) -> None:
        super().__init__(receiver, model, flow, life, update)
        self.keep_s = keep_s
        self.buffer = buffer
        self._next_seq = 1  # the first that the receiver has not been given
        self._unread = 0  # tokens from there on

    def say(
        self,
        choice_index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs] = (),
        calls: Sequence[pb.ToolCallDelta] = (),
    ) -> None:
        """See `Output.say`. With credit each token is a frame of its own."""
        if not self.fence():
            return
        if token_ids:
            self.buffer.record(self.entry(len(token_ids)))
            self.usage.delivered_token_count += len(token_ids)
            self.said_token_count = self.usage.delivered_token_count
        step = 1 if self.flow.credit is not None else TOKENS_PER_DELTA_MAX
        for first in range(0, max(len(token_ids), 1), step):
            part = token_ids[first : first + step]
            is_last = first + step >= len(token_ids)
            rest = rest_of(logprobs[first : first + step], calls if is_last else ())
            self._last_seq += 1
            self._unread += len(part)
            delta = delta_bytes(self._last_seq, choice_index, text.encode() if is_last else b"", part, rest)
            unread_seq = self._next_seq if self.receiver is not None else self._last_seq + 1
            if not self.buffer.put(delta, len(part), unread_seq):
                self.flow.stalled()
                self._skip()  # the request is over; what is not kept cannot be sent
        self._note()
        self._watch_credit()

    def discard(self, *, kept_too: bool = False) -> None:
        """See `Output.discard`."""
        if self.flow.credit is None and not kept_too:
            return
        self._skip()
        self._watch_credit()
        self.moved()

    def take(self, receiver: Receiver, into: Collected, delta_max: int) -> None:
        """See `Output.take`."""
        flow, count = self.flow, 0
        self.has_more = False
        while self._next_seq <= self._last_seq:
            if count >= delta_max or into.token_room <= 0:
                self.has_more = True
                break
            delta, token_count = self.buffer.get(self._next_seq)
            if flow.credit is not None:
                if token_count > flow.credit:
                    break
                flow.credit -= token_count
            self._next_seq += 1
            self._unread -= token_count
            count += 1
            into.token_room -= token_count
            into.parts.append(delta_frame(receiver.head, delta))
            self._tell_usage(into, receiver, token_count)
        if self._life is None and not self._waits():
            self._say_end()

    def forget(self) -> None:
        """Give up the replay buffer, and tell the current receiver."""
        if self.receiver is not None:
            receiver, self.receiver = self.receiver, None
            gone = OutputGone(self._next_seq - 1, self._last_seq + 1, self._last_seq)
            receiver.end(frames.failed(status_of(gone), None))

    def _skip(self) -> None:
        self._next_seq, self._unread = self._last_seq + 1, 0

    def _waits(self) -> bool:
        return self._next_seq <= self._last_seq

    def _unread_token_count(self) -> int:
        return self._unread

    def _oldest_seq(self) -> int:
        return self.buffer.first_seq

    def _begin_after(self, after_seq: int) -> None:
        self._next_seq = after_seq + 1
        self._unread = self.buffer.token_count_after(after_seq)
        if self.usage_telling is not None:
            self.usage_telling.sent_token_count = self.usage.delivered_token_count - self._unread


def rest_of(logprobs: Sequence[pb.TokenLogprobs], calls: Sequence[pb.ToolCallDelta]) -> bytes:
    """The fields of a `DeltaFrame` that few requests have, serialized."""
    rest = b"".join(logprob_field(each) for each in logprobs)
    return rest + pb.DeltaFrame(tool_calls=calls).SerializeToString() if calls else rest


def logprob_field(logprobs: pb.TokenLogprobs) -> bytes:
    """One of `DeltaFrame.logprobs`."""
    data = logprobs.SerializeToString()
    return b"\x22%b%b" % (varint(len(data)), data)


class PackedOutput:
    """Tokens and text in order, in some bytes a token. Text and calls of one `add` are given out with its last token."""

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._text = bytearray()
        self._calls = bytearray()  # new of tool calls as serialized frames, of which those that follow each other are one
        self._logprobs: list[bytes] = []  # as fields: with 20 alternatives a tenth of what the objects take
        # One of each per `add`, counted from the first token and byte that were ever added: where it ends.
        self._token_ends = array("Q")
        self._text_ends = array("Q")
        self._call_ends = array("Q")
        self._taken_token_count = 0
        self._taken_byte_count = 0
        self._taken_call_byte_count = 0

    def __len__(self) -> int:
        """Tokens."""
        return len(self._token_ids)

    @property
    def empty(self) -> bool:
        """Whether neither a token nor a piece of text is left."""
        return not self._token_ends

    def add(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs] = (),
        calls: Sequence[pb.ToolCallDelta] = (),
    ) -> None:
        """Put behind what waits. logprobs: one for each token, or none."""
        self._token_ids.extend(token_ids)
        self._text += text.encode()
        self._logprobs += [logprob_field(each) for each in logprobs]
        self._token_ends.append(self._taken_token_count + len(self._token_ids))
        self._text_ends.append(self._taken_byte_count + len(self._text))
        if calls:
            self._calls += pb.DeltaFrame(tool_calls=calls).SerializeToString()
        self._call_ends.append(self._taken_call_byte_count + len(self._calls))

    def take(self, token_count_max: int) -> tuple[bytes, list[int], bytes]:
        """The first so many tokens at most: their text, their ids, and what else belongs to them as fields of a `DeltaFrame`."""
        token_count = min(token_count_max, len(self._token_ids))
        token_ids, self._token_ids = self._token_ids[:token_count].tolist(), self._token_ids[token_count:]
        logprobs, self._logprobs = self._logprobs[:token_count], self._logprobs[token_count:]
        self._taken_token_count += token_count
        whole_count = bisect_right(self._token_ends, self._taken_token_count)
        text, calls = b"", b""
        if whole_count:
            byte_count = self._text_ends[whole_count - 1] - self._taken_byte_count
            text, self._text = bytes(self._text[:byte_count]), self._text[byte_count:]
            self._taken_byte_count += byte_count
            byte_count = self._call_ends[whole_count - 1] - self._taken_call_byte_count
            calls, self._calls = bytes(self._calls[:byte_count]), self._calls[byte_count:]
            self._taken_call_byte_count += byte_count
            del self._token_ends[:whole_count], self._text_ends[:whole_count], self._call_ends[:whole_count]
        return text, token_ids, b"".join(logprobs) + calls
