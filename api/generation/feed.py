"""What one request says, in order, to whoever receives it: one stream at a time, or nobody for a while.

Output that the receiver does not take, or has given no credit for, waits here and not among the frames of others: at most
`FRAMES_IN_OUTBOX_MAX` of a request's deltas are in its stream's outbox at a time. Where a client may come back the output stands in
a mailbox, from which it is sent, and sent again.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from weir.v1 import inference_service_pb2 as pb

from api.core.errors import AttachedElsewhere, OutputGone
from api.core.statuses import status_of
from api.generation import frames
from api.generation.mailbox import Mailbox
from api.generation.outbox import Delivery, Tally, do_nothing, no_fence
from api.generation.receiver import Receiver
from metering.core.models import Outcome
from metering.pricing.token_prices import TokenPrices

FRAMES_IN_OUTBOX_MAX = 8  # a client that reads has one or two there; beyond it steps are told together, in some bytes a token
TOKENS_PER_FRAME_MAX = 64  # of steps that are told together: a frame stays some kB, whatever it carries beside the tokens


@dataclass(frozen=True, slots=True)
class FlowControl:
    """credit_token_count: what may be sent at first; None: none is needed. on_stall: called when the client takes too little."""

    credit_token_count: int | None
    stall_max_s: float
    on_stall: Callable[[], None]


@dataclass(slots=True)
class UsageTelling:
    """Running counts every so many tokens."""

    interval_tokens: int
    prices: TokenPrices
    sent_token_count: int = 0  # by the deltas that the receiver was given


class Feed:
    """The output of one request. `mailbox`: where it is kept for clients that come back; None: it is not."""

    def __init__(self, receiver: Receiver, model: str, flow: FlowControl, mailbox: Mailbox | None) -> None:
        self.tally = Tally()
        self.model = model
        self.mailbox = mailbox
        self.receiver: Receiver | None = receiver
        self.usage_telling: UsageTelling | None = None
        self._stall_max_s = flow.stall_max_s
        self._on_stall = flow.on_stall
        self._credit = flow.credit_token_count
        self._grant_count = 0
        self._stall_timer: asyncio.TimerHandle | None = None
        self._waiting: dict[int, WaitingOutput] = {}  # by choice; never with a mailbox
        self._waiting_token_count = 0
        self._last_seq = 0
        self._next_seq = 1  # of the mailbox, the first that the receiver has not been given
        self._admitted: pb.AdmittedFrame | None = None
        self._end: pb.ServerFrame | None = None
        self._has_ended = False
        self._has_failed = False
        self._moved = asyncio.Event()
        self._bind(receiver)

    @property
    def credit(self) -> int:
        """Tokens that may be sent by what was granted; 0 where none is needed."""
        return self._credit or 0

    @property
    def queued_token_count(self) -> int:
        """Output tokens in all: delivered, or waiting for the client."""
        return self.tally.usage.delivered_token_count + self.unsent_token_count

    @property
    def unsent_token_count(self) -> int:
        """Tokens that wait for the client to read, and are not delivered until then."""
        in_outbox = self.receiver.delivery.unsent_token_count if self.receiver is not None and self.mailbox is None else 0
        return self._waiting_token_count + in_outbox

    @property
    def takes_whole(self) -> bool:
        """Whether the client wants the answer in one piece: then nothing waits here, and all of it in the outbox."""
        return self.receiver is not None and self.receiver.outbox.takes_whole

    @property
    def progress(self) -> tuple[int, int, int]:
        """Changes with everything that the client does to take more: it stalls only while this stands still."""
        return id(self.receiver), self.receiver.outbox.message_count if self.receiver else 0, self._grant_count

    def push(self, frame: pb.ServerFrame) -> None:
        """A frame without output, for whoever receives now."""
        if frame.HasField("admitted"):
            self._admitted = frame.admitted
        if self.receiver is not None:
            self.receiver.push(frame)

    def say(
        self,
        choice_index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs] = (),
        calls: Sequence[pb.ToolCallDelta] = (),
    ) -> None:
        """New output. Raises: OSError if it has to be journalled and cannot be."""
        if self.mailbox is not None:
            self._keep(self.mailbox, choice_index, text, token_ids, logprobs, calls)
            return
        if not self._waiting and self._may_send(len(token_ids)):
            self._send(choice_index, text, token_ids, logprobs, calls)
            return
        self._waiting.setdefault(choice_index, WaitingOutput()).add(text, token_ids, logprobs, calls)
        self._waiting_token_count += len(token_ids)
        self._pump()

    def grant(self, token_count: int) -> None:
        """The client takes so many more tokens."""
        self._grant_count += 1
        if self._credit is not None:
            self._credit += token_count
            self._watch_credit(granted=True)
            self._pump()

    def complete(self) -> None:
        """No more output comes."""
        if self.receiver is not None:
            self.receiver.outbox.complete(self.receiver.delivery)

    @property
    def is_taken(self) -> bool:
        """Whether nothing waits for the client. A mailbox has taken all of it."""
        receiver = self.receiver
        return self.mailbox is not None or receiver is None or not (self._waiting or receiver.delivery.unsent_frame_count)

    async def all_taken(self, within_s: float | None = None) -> bool:
        """Wait until nothing waits for the client any more, for ever or for so long; whether it came to that."""
        is_over = False

        def give_up() -> None:
            nonlocal is_over
            is_over = True
            self._moved.set()

        timer = None if within_s is None else asyncio.get_running_loop().call_later(within_s, give_up)
        try:
            while not (is_over or self.is_taken):
                self._moved.clear()
                await self._moved.wait()
        finally:
            if timer is not None:
                timer.cancel()
        return self.is_taken

    def discard(self, *, kept_too: bool = False) -> None:
        """Forget what was not handed to the transport. What a mailbox has is delivered: it is sent, as far as credit reaches.

        kept_too: the mailbox goes as well.
        """
        if self.mailbox is not None and self._credit is None and not kept_too:
            return
        self._waiting.clear()
        self._waiting_token_count = 0
        self._next_seq = self._last_seq + 1
        if self.receiver is not None:
            self.receiver.outbox.discard(self.receiver.delivery)
        self._watch_credit()
        self._moved.set()

    def fail(self) -> None:
        """The request is broken: what waits is sent as far as credit reaches, and no more credit is waited for."""
        self._has_failed = True
        self._pump()

    def attach(self, receiver: Receiver, after_seq: int, credit_token_count: int, *, running: bool = False) -> None:
        """From now on this one receives, from the delta after that one on. Raises: OutputGone; nothing has changed then."""
        oldest_seq, last_seq = self._there()
        if not oldest_seq - 1 <= after_seq <= last_seq:
            raise OutputGone(after_seq, oldest_seq, last_seq)
        if (old := self.receiver) is not None:
            old.delivery.on_change = do_nothing  # what is taken from it is not to be filled up
            self._unsay(old.outbox.take_back(old.delivery))
            if old.outbox is not receiver.outbox:
                old.end(frames.failed(status_of(AttachedElsewhere("another stream receives this request now")), None))
        if not running:
            receiver.source = self
        self.receiver, self._next_seq = receiver, after_seq + 1
        self._credit = None if self._credit is None else credit_token_count
        if self.usage_telling is not None and self.mailbox is not None:
            self.usage_telling.sent_token_count = self.mailbox.token_count_until(after_seq, self.tally)
        self._bind(receiver)
        receiver.push(frames.attached(after_seq, self._last_seq, self.tally.usage, running=running))
        if self._admitted is not None:
            receiver.push(pb.ServerFrame(admitted=self._admitted))
        self._moved.set()
        self._pump()

    def detach(self) -> Receiver | None:
        """Nobody receives it any more; who did. What waits in a mailbox waits on, the rest goes with the stream."""
        old, self.receiver = self.receiver, None
        if old is not None:
            old.delivery.on_change = do_nothing
            old.outbox.discard(old.delivery)
        self._watch_credit()
        self._moved.set()
        return old

    def end(self, frame: pb.ServerFrame | None) -> None:
        """The request has ended: its last frame follows what waits. None: this process ends, and tells nobody.

        Nothing is left to stall or to fence, and nothing here refers to the request any more: it goes at once, without a collector.
        """
        self._end, self._has_ended = frame, True
        self._on_stall, self.tally.fence = do_nothing, no_fence
        self._watch_credit()
        self._pump()

    # What a stream may do to a request that has ended and whose output is kept.

    def stop(self, outcome: Outcome) -> None:
        """It has ended."""

    def update(self, message: pb.UpdateFrame) -> None:
        """It has ended."""

    def shut_out(self, receiver: Receiver, error: Exception) -> None:
        """The stream gets no more of it; who comes from elsewhere does."""
        if self.receiver is receiver:
            self.detach()
            receiver.end(frames.failed(status_of(error), None))

    def leave(self, receiver: Receiver, outcome: Outcome) -> None:
        """The stream is gone."""
        if self.receiver is receiver:
            self.detach()

    def forget(self) -> None:
        """What is kept goes: who is still reading is told so."""
        if self.receiver is not None:
            receiver, self.receiver = self.receiver, None
            gone = OutputGone(self._next_seq - 1, self._last_seq + 1, self._last_seq)
            receiver.end(frames.failed(status_of(gone), None))

    def _bind(self, receiver: Receiver) -> None:
        receiver.delivery = Delivery(receiver.given_id, self.tally, counts=self.mailbox is None, on_change=self._on_change)

    def _there(self) -> tuple[int, int]:
        """The oldest and the last delta that another stream could be given; where there is none the last is before the oldest."""
        if self.mailbox is not None:
            return self.mailbox.first_seq, self._last_seq
        unsent_count = 0 if self.receiver is None else self.receiver.outbox.unsent_delta_count(self.receiver.delivery)
        return self._last_seq + 1 - unsent_count, self._last_seq - unsent_count

    def _unsay(self, taken: Iterable[pb.DeltaFrame]) -> None:
        """Put back in front what was not sent: nobody has seen these numbers."""
        if self.mailbox is not None:
            return
        later, self._waiting = self._waiting, {}
        for frame in taken:
            self._last_seq -= 1
            self._waiting_token_count += len(frame.token_ids)
            self._waiting.setdefault(frame.choice_index, WaitingOutput()).add(
                frame.text, frame.token_ids, frame.logprobs, frame.tool_calls
            )
            if self.usage_telling is not None:
                self.usage_telling.sent_token_count -= len(frame.token_ids)
        for choice_index, output in later.items():
            self._waiting.setdefault(choice_index, WaitingOutput()).append(output)

    def _may_send(self, token_count: int) -> bool:
        receiver = self.receiver
        if receiver is None or (not self.takes_whole and receiver.delivery.unsent_frame_count >= FRAMES_IN_OUTBOX_MAX):
            return False
        return self._credit is None or token_count <= self._credit

    def _on_change(self) -> None:
        """Less waits in the outbox than before."""
        if self._waiting or self._next_seq <= self._last_seq or self._end is not None:
            self._pump()
        self._moved.set()

    def _pump(self) -> None:
        """Give the receiver as much of what waits as it has room and credit for."""
        if self.mailbox is not None:
            self._pump_mailbox(self.mailbox)
        else:
            self._pump_waiting()
            if self._has_failed and self._credit == 0 and self._waiting:
                self._waiting.clear()
                self._waiting_token_count = 0
                self._moved.set()
        self._watch_credit()
        nothing_waits = not self._waiting and (self.mailbox is None or self._next_seq > self._last_seq)
        if self._has_ended and nothing_waits and self.receiver is not None:
            receiver, self.receiver = self.receiver, None
            receiver.end(self._end_frame())

    def _end_frame(self) -> pb.ServerFrame | None:
        """For one receiver: each sets its own spelling of the id."""
        if self._end is None:
            return None
        frame = pb.ServerFrame()
        frame.CopyFrom(self._end)
        return frame

    def _pump_waiting(self) -> None:
        for choice_index, output in list(self._waiting.items()):
            while not output.empty and self._may_send(0):
                text, token_ids, logprobs, calls = output.take(self._frame_token_count_max())
                if not token_ids and not text and not calls:
                    break  # the first token waits for credit
                self._waiting_token_count -= len(token_ids)
                self._send(choice_index, text, token_ids, logprobs, calls)
            if output.empty:
                del self._waiting[choice_index]

    def _frame_token_count_max(self) -> int:
        """Of steps that are told together: as far as credit reaches, and no further than to the next running counts."""
        count = TOKENS_PER_FRAME_MAX if self._credit is None else min(TOKENS_PER_FRAME_MAX, self._credit)
        telling = self.usage_telling
        if telling is None:
            return count
        return min(count, telling.interval_tokens - telling.sent_token_count % telling.interval_tokens)

    def _pump_mailbox(self, mailbox: Mailbox) -> None:
        while self._next_seq <= self._last_seq and self._may_send(0):
            frame, token_count = mailbox.get(self._next_seq)
            if not self._may_send(token_count):
                return
            self._next_seq += 1
            self._give(pb.ServerFrame(delta=frame), token_count)

    def _send(
        self,
        choice_index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs],
        calls: Sequence[pb.ToolCallDelta],
    ) -> None:
        self._last_seq += 1
        self._next_seq = self._last_seq + 1
        self._give(frames.delta(self._last_seq, choice_index, text, token_ids, logprobs, calls), len(token_ids))

    def _keep(
        self,
        mailbox: Mailbox,
        choice_index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[pb.TokenLogprobs],
        calls: Sequence[pb.ToolCallDelta],
    ) -> None:
        """Take delivery, and send it if the receiver has got all before it. With credit each token is a frame of its own."""
        if not self.tally.fence():
            return
        if token_ids:
            mailbox.take_delivery(self.tally, len(token_ids))
        step = 1 if self._credit is not None else TOKENS_PER_FRAME_MAX
        for first in range(0, max(len(token_ids), 1), step):
            is_last = first + step >= len(token_ids)
            part = slice(first, first + step)
            self._last_seq += 1
            told, called = (text, calls) if is_last else ("", ())
            frame = frames.delta(self._last_seq, choice_index, told, token_ids[part], logprobs[part], called)
            unread_seq = self._next_seq if self.receiver is not None else self._last_seq + 1
            if not mailbox.put(frame.delta, unread_seq):
                self._on_stall()
                self._next_seq = self._last_seq + 1  # the request is over; what is not kept cannot be sent
            elif self._next_seq == self._last_seq and self._may_send(len(frame.delta.token_ids)):
                self._next_seq += 1
                self._give(frame, len(frame.delta.token_ids))
        self._watch_credit()

    def _give(self, frame: pb.ServerFrame, token_count: int) -> None:
        """One more delta for the receiver."""
        assert self.receiver is not None, "whoever calls has looked"
        if self._credit is not None:
            self._credit -= token_count
        self.receiver.push(frame, token_count)
        telling = self.usage_telling
        if telling is not None and token_count:
            before, telling.sent_token_count = telling.sent_token_count, telling.sent_token_count + token_count
            if before // telling.interval_tokens != telling.sent_token_count // telling.interval_tokens:
                self.receiver.push(frames.usage(self.tally.usage, telling.sent_token_count, telling.prices))

    def _watch_credit(self, *, granted: bool = False) -> None:
        """Give a client that grants nothing so long, and no longer, while output waits for its credit."""
        waits = bool(self._waiting) or (self.mailbox is not None and self._next_seq <= self._last_seq)
        blocked = self._credit == 0 and self.receiver is not None and waits and not self._has_ended
        if self._stall_timer is not None and (granted or not blocked):
            self._stall_timer.cancel()
            self._stall_timer = None
        if blocked and self._stall_timer is None:
            loop = asyncio.get_running_loop()
            self._stall_timer = loop.call_later(self._stall_max_s, self._on_stall)


class WaitingOutput:
    """Tokens and text in order. What one `add` brought is given out with its text and calls at its last token."""

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._text = bytearray()
        self._calls = bytearray()  # new of tool calls as serialized frames, of which those that follow each other are one
        self._logprobs: list[bytes] = []  # as messages: with 20 alternatives a tenth of what the objects take
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
        self._logprobs += [each.SerializeToString() for each in logprobs]
        self._token_ends.append(self._taken_token_count + len(self._token_ids))
        self._text_ends.append(self._taken_byte_count + len(self._text))
        if calls:
            self._calls += pb.DeltaFrame(tool_calls=calls).SerializeToString()
        self._call_ends.append(self._taken_call_byte_count + len(self._calls))

    def append(self, later: WaitingOutput) -> None:
        """Put all of another behind what waits here."""
        token_base = self._taken_token_count + len(self._token_ids) - later._taken_token_count
        byte_base = self._taken_byte_count + len(self._text) - later._taken_byte_count
        call_base = self._taken_call_byte_count + len(self._calls) - later._taken_call_byte_count
        self._token_ids.extend(later._token_ids)
        self._text += later._text
        self._logprobs += later._logprobs
        self._token_ends.extend(end + token_base for end in later._token_ends)
        self._text_ends.extend(end + byte_base for end in later._text_ends)
        self._calls += later._calls
        self._call_ends.extend(end + call_base for end in later._call_ends)

    def take(self, token_count_max: int) -> tuple[str, list[int], list[pb.TokenLogprobs], list[pb.ToolCallDelta]]:
        """The first so many tokens at most, with the text, the log-probabilities and the pieces of calls that belong to them."""
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
        return (
            text.decode(),
            token_ids,
            [pb.TokenLogprobs.FromString(each) for each in logprobs],
            list(pb.DeltaFrame.FromString(calls).tool_calls),
        )
