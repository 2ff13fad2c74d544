"""Send queue of one stream: the only way in which tokens reach a client.

When the writer can send, it collects the frames of all requests of the stream into one message,
since a message costs about a hundred times as much as a frame. Until then output stays in its
request's `Output` (`output.py`). Tokens are written to the usage journal before their message is
handed to the transport, and count as delivered once the transport has taken it.

Silence is measured here, since its last write: whatever its requests wait for, a stream sends
something before what stands between it and the client cuts it off (ADR 0088).
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import msgspec
from weir.v1 import inference_service_pb2 as pb

from metering.core.errors import JournalUnavailable
from metering.core.models import Outcome
from metering.holds.journal import UsageJournal

if TYPE_CHECKING:
    from api.generation.delivery.output_buffer import Output

# Some 10 MB; above it, reading from the client pauses until the client reads.
FRAMES_WAITING_MAX = 50_000
# Seconds of silence after which a stream sends something that keeps its connection alive: many
# proxies and balancers cut one after 60 s, some after 15 s.
SILENCE_S = 8.0
# A write that takes longer waits for the client. A shorter one may have waited for this process;
# a slow client blocks longer, since windows and buffers hold some thousand tokens.
SLOW_WRITE_S = 0.1


class Source(Protocol):
    """A request as seen by a receiving stream: running here or in another process, or ended.

    No method blocks.
    """

    def stop(self, outcome: Outcome) -> None:
        """End the request."""
        ...

    def grant(self, token_count: int) -> None:
        """Allow this many more tokens to be sent."""
        ...

    def update(self, message: pb.UpdateFrame) -> None:
        """Change its limits. The answer arrives as a frame."""
        ...

    def shut_out(self, receiver: Receiver, error: Exception) -> None:
        """End the reception with an error: the stream lost its right to receive."""
        ...

    def leave(self, receiver: Receiver, outcome: Outcome) -> None:
        """Handle the close of the stream; ignored if another stream receives the request now."""
        ...

    def attach(self, receiver: Receiver, after_seq: int, credit_token_count: int) -> None:
        """Send output to this receiver from now on.

        Raises: OutputGone, RequestInFlight; nothing has changed then.
        """
        ...


class Collected(msgspec.Struct, eq=False):
    """Message under construction.

    entries: tokens in it that are not journalled yet, and those of them that are reasoning, by
    output, with the parts that hold them from one index to another. replayed: the same of tokens
    that no transport has taken before; they are journalled. asks_fences: whether the fence of each
    request must be checked.
    """

    parts: list[bytes]
    token_room: int
    entries: list[tuple[Output, int, int, int, int]]
    replayed: list[tuple[Output, int, int]]
    asks_fences: bool = True


class Receiver:
    """Connection of one stream to one request. Nothing is pushed after `end`."""

    def __init__(self, outbox: Outbox, given_id: str, on_end: Callable[[Receiver], None]) -> None:
        """given_id: the request id as this client spells it. on_end: called once, when the last
        frame has been pushed.
        """
        self.outbox = outbox
        self.given_id = given_id
        self.source: Source
        # Hash of the `start` frame, if the request was started on this stream.
        self.payload_hash: bytes | None = None
        self.is_refused = False  # refused before the request produced anything
        self.supply: Output | None = None  # output source; None: all frames are pushed
        self.head = frame_head(given_id)
        # Builds the part of a message for one token of the first choice from sequence number, text,
        # id.
        self.token: Callable[[int, bytes, int], bytes] = partial(token_frame, self.head)
        self.is_waiting = False  # queued in the outbox
        self.in_flight_count = 0  # frames of the message that is being written
        # Called when the transport takes frames; must not block.
        self.on_taken: Callable[[], None] | None = None
        self.frames: list[bytes] = []  # pushed, not sent yet
        self._on_end = on_end

    @property
    def unsent_frame_count(self) -> int:
        """Pushed frames that the transport has not taken."""
        return len(self.frames) + self.in_flight_count

    def push(self, frame: pb.ServerFrame | bytes) -> None:
        """Send a frame as soon as possible; dropped if the client is gone.

        frame: without request id; may be serialized.
        """
        if not self.outbox.is_abandoned:
            body = frame if isinstance(frame, bytes) else frame.SerializeToString()
            size = len(self.head) + len(body)
            self.frames.append(
                b"\x0a%b%b%b" % (VARINTS[size] if size < 0x4000 else varint(size), self.head, body)
            )
            self.outbox.frame_count += 1
            self.outbox.add(self)

    def delta(
        self, seq: int, choice_index: int, text: bytes, token_ids: Sequence[int], rest: bytes
    ) -> bytes:
        """Return new output as part of a message.

        rest: the other fields of its `DeltaFrame`, serialized.
        """
        return delta_frame(self.head, delta_bytes(seq, choice_index, text, token_ids, rest))

    def end(self, frame: pb.ServerFrame | None) -> None:
        """Push the last frame; None if the process shuts down without one."""
        self.supply = None
        if frame is not None:
            self.is_refused = frame.HasField("failed") and not frame.failed.HasField("usage")
            self.push(frame)
            self.outbox.ended(self, frame)
        self._on_end(self)

    def drop(self) -> None:
        """Discard pushed frames that were not written."""
        self.outbox.frame_count -= len(self.frames)
        self.frames.clear()

    def withdraw(self, part_count: int) -> None:
        """Handle that parts of the message under construction will not be sent."""
        self.in_flight_count -= part_count

    def take_pushed(self, parts: list[bytes]) -> None:
        """Move waiting frames into a message."""
        parts += self.frames
        self.outbox.frame_count -= len(self.frames)
        self.frames = []

    def was_taken(self) -> None:
        """Handle that the message was written, or that the client is gone."""
        self.in_flight_count = 0
        if self.supply is not None and self.supply.then is not None:
            self.supply.moved()
        if self.on_taken is not None:
            self.on_taken()


def always() -> bool:
    """Return True: check every fence."""
    return True


class Outbox:
    """Send queue of one stream, with one writer and any number of requests."""

    takes_whole = False  # whether the client gets each answer in one piece; see `WholeOutbox`
    marks = True  # whether a message that the transport has taken is of use without later ones
    # Limits of one message. Frames: some 60 kB of deltas, below the receive limit of any client.
    # Tokens: some 1.2 MB with 20 log-probabilities each, below gRPC's default limit of 4 MB.
    # Deltas: per request, while other requests wait.
    frame_max, token_max, delta_max = 1000, 4000, 8

    def __init__(self, journal: UsageJournal, may_have_lapsed: Callable[[], bool] = always) -> None:
        """may_have_lapsed: whether any hold may have lapsed; called once per message."""
        self._may_have_lapsed = may_have_lapsed
        self.is_abandoned = False
        self.frame_count = 0  # pushed frames that wait; output waits in its `Output`
        # Messages taken by the client; unchanged while a client stalls.
        self.message_count = 0
        self._journal = journal
        # Receivers with output, and frames without a request.
        self._line: deque[Receiver | bytes] = deque()
        self._in_flight: list[Receiver] = []
        # With those of the tokens that are reasoning.
        self._in_flight_tokens: list[tuple[Output, int, int]] = []
        # Set while the writer waits for something to send.
        self._idle: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None  # while the reader waits for room
        self._is_open = True  # frames may be sent
        self._closing = False
        # Longest silence, in seconds; the time of the last write; and the next look at it.
        self._silence_s = SILENCE_S
        self._written_at = -math.inf
        self._look: asyncio.TimerHandle | None = None
        self._is_silent = False  # for too long
        self._writing_since = math.inf  # on the loop's clock, while a message is written

    def push(self, frame: pb.ServerFrame) -> None:
        """Send a frame of a request that this stream does not receive."""
        if not self.is_abandoned:
            self._line.append(framed(frame.SerializeToString()))
            self.frame_count += 1
            self._note()

    def add(self, receiver: Receiver) -> None:
        """Queue a receiver that has something to send."""
        if not (receiver.is_waiting or self.is_abandoned):
            receiver.is_waiting = True
            self._line.append(receiver)
            if self._idle is not None:
                self._note()

    def complete(self, receiver: Receiver) -> None:
        """Note that a request has all its output."""

    def ended(self, receiver: Receiver, frame: pb.ServerFrame) -> None:
        """Note that a request has ended with this frame."""

    def _note(self) -> None:
        """Wake the writer if it is idle."""
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def room(self) -> None:
        """Wait while more than `FRAMES_WAITING_MAX` frames wait, to slow the client down."""
        while self.frame_count > FRAMES_WAITING_MAX and not self.is_abandoned:
            self._room = asyncio.get_running_loop().create_future()
            try:
                await self._room
            finally:
                self._room = None

    def abandon(self, *, is_gone: bool = True) -> None:
        """Discard everything. is_gone: the client is; otherwise it may still get the message that
        is being written, whose tokens are billed once the transport has taken them."""
        self._count_write()
        self.is_abandoned = True
        if is_gone:
            lost, self._in_flight_tokens = self._in_flight_tokens, []
            for output, token_count, reasoning_count in lost:
                output.in_flight_token_count -= token_count
                output.in_flight_reasoning_token_count -= reasoning_count
        gone = dict.fromkeys(
            [*self._in_flight, *(each for each in self._line if isinstance(each, Receiver))]
        )
        self._line.clear()
        self._in_flight = []
        for receiver in gone:
            receiver.is_waiting = False
            receiver.drop()
            receiver.was_taken()
        self.frame_count = 0
        self._make_room()
        self.close()

    def close(self) -> None:
        """Let the writer end once all frames are sent."""
        self._closing = True
        self._note()

    def break_silence_within(self, silence_s: float) -> None:
        """Shorten the silence that is allowed, from the next one on."""
        self._silence_s = silence_s
        if self._look is not None:
            self._look.cancel()
            self._written_at = monotonic()
            self._look_later(silence_s)

    def _look_later(self, after_s: float) -> None:
        self._look = asyncio.get_running_loop().call_later(after_s, self._look_at_silence)

    def _look_at_silence(self) -> None:
        """Let the writer break the silence if it has lasted long enough.

        A writer that is not idle waits for the client to read: there is something on its way.
        """
        rest_s = self._written_at + self._silence_s - monotonic()
        if rest_s <= 0:
            self._written_at, rest_s = monotonic(), self._silence_s
            if self._idle is not None and not self._idle.done():
                self._is_silent = True
                self._idle.set_result(None)
        self._look_later(rest_s)

    def slow_write(self) -> tuple[float, float] | None:
        """Return start and present of the current write if it waits for the client."""
        now = monotonic()
        return (self._writing_since, now) if now - self._writing_since > SLOW_WRITE_S else None

    def _count_write(self) -> None:
        """Count the current write as stall of each request with tokens in it or behind it."""
        if self.slow_write() is None:
            return
        for output, *_ in self._in_flight_tokens:
            output.count_write()
        for receiver in self._line:
            if isinstance(receiver, Receiver) and receiver.supply is not None:
                receiver.supply.count_write()

    async def write_all(
        self,
        write: Callable[[bytes], Awaitable[object]],
        on_gone: Callable[[], None] | None = None,
        gone: type[Exception] | tuple[()] = (),
        break_silence: Callable[[], Awaitable[object]] | None = None,
        silent_for_s: float = 0.0,
    ) -> None:
        """Send until closed and empty. write: sends a serialized `GenerateResponse`.

        on_gone: called when `write` raises `gone`, which means that the client has disconnected.
        break_silence: sends what keeps the connection alive. silent_for_s: time since the client
        sent its request. Raises: other errors of `write`.
        """
        if break_silence is not None:
            self._written_at = monotonic() - silent_for_s
            self._look_later(max(self._silence_s - silent_for_s, 0.0))
        try:
            await self._write_all(write, on_gone, gone, break_silence)
        finally:
            if self._look is not None:
                self._look.cancel()
                self._look = None

    async def _write_all(
        self,
        write: Callable[[bytes], Awaitable[object]],
        on_gone: Callable[[], None] | None,
        gone: type[Exception] | tuple[()],
        break_silence: Callable[[], Awaitable[object]] | None,
    ) -> None:
        journal, now = self._journal, monotonic
        while True:
            if self._line and self._is_open:
                # Built as late as possible, since the process may be suspended at any earlier
                # point.
                if (message := self._message()) or self._in_flight:
                    self._writing_since = monotonic()
                    try:
                        await write(message)
                    except gone:
                        if on_gone is not None:
                            on_gone()
                        return
                    finally:
                        if now() - self._writing_since > SLOW_WRITE_S:
                            self._count_write()
                        self._writing_since = math.inf
                    self.message_count += 1
                    self._written_at = now()
                    tokens, self._in_flight_tokens = self._in_flight_tokens, []
                    for output, token_count, reasoning_count in tokens:
                        output.was_taken(token_count, reasoning_count)
                        if output.hold_id is not None and self.marks:
                            usage = output.usage
                            journal.took(
                                output.hold_id,
                                usage.taken_token_count,
                                usage.taken_reasoning_token_count,
                            )
                        if output.then is not None:
                            output.moved()
                    taken, self._in_flight = self._in_flight, []
                    for receiver in taken:
                        receiver.in_flight_count = 0
                        if receiver.on_taken is not None or (
                            receiver.supply is not None and receiver.supply.then is not None
                        ):
                            receiver.was_taken()
            elif self._closing:
                return
            elif self._is_silent and break_silence is not None:
                self._is_silent = False
                try:
                    await break_silence()
                except gone:
                    if on_gone is not None:
                        on_gone()
                    return
            else:
                self._idle = asyncio.get_running_loop().create_future()
                try:
                    await self._idle
                finally:
                    self._idle = None

    def _message(self) -> bytes:
        """Build a message, with at most `delta_max` deltas of each request; journal its tokens.

        If the journal cannot be written, the requests with tokens in the message fail.
        """
        frame_max, delta_max = self.frame_max, self.delta_max
        collected = Collected([], self.token_max, [], [], self._may_have_lapsed())
        line, parts, in_flight, more = self._line, collected.parts, self._in_flight, []
        entries, sent = collected.entries, []
        while line and collected.token_room > 0 and (count := len(parts)) < frame_max:
            one = line.popleft()
            if isinstance(one, bytes):
                parts.append(one)
                self.frame_count -= 1
                continue
            has_more = False
            if one.frames:
                one.take_pushed(parts)
            if (supply := one.supply) is not None:
                supply.take(one, collected, delta_max)
                has_more = supply.has_more
                if one.frames:  # the last frame follows the last output
                    one.take_pushed(parts)
            if has_more:
                more.append(one)
            else:
                one.is_waiting = False
            if taken_count := len(parts) - count:
                one.in_flight_count += taken_count
                in_flight.append(one)
        line += more
        if entries:
            try:
                self._journal.record(
                    [output.entry(count, reasoning) for output, count, reasoning, *_ in entries]
                )
            except JournalUnavailable as error:
                self._withdraw(collected, error)
            else:
                for output, count, reasoning, *_ in entries:
                    output.usage.journalled_token_count += count
                    output.usage.journalled_reasoning_token_count += reasoning
                    sent.append((output, count, reasoning))
        sent += collected.replayed
        for output, count, reasoning in sent:
            output.in_flight_token_count += count
            output.in_flight_reasoning_token_count += reasoning
        self._in_flight_tokens += sent
        if self._room is not None:
            self._make_room()
        return b"".join(parts)

    def _withdraw(self, collected: Collected, error: JournalUnavailable) -> None:
        """Remove tokens that cannot be journalled from a message, and fail their requests."""
        for output, *_, first, end in reversed(collected.entries):
            del collected.parts[first:end]
            if output.receiver is not None:
                output.receiver.withdraw(end - first)
            output.lose(error)
        self._in_flight = [each for each in self._in_flight if each.in_flight_count]

    def _make_room(self) -> None:
        """Wake the reader that waits in `room`."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


class WholeOutbox(Outbox):
    """Sends one message with all frames, once every request has all its output or has ended.

    The rest of the answer follows its settlement: without it the client has an incomplete body.
    """

    takes_whole, marks = True, False
    # Context windows bound the length of the answer.
    frame_max = token_max = delta_max = sys.maxsize

    def __init__(
        self, journal: UsageJournal, request_count: int, on_failure: Callable[[str], None]
    ) -> None:
        """request_count: requests that make up the answer.

        on_failure: called with the id of each failed one.
        """
        super().__init__(journal)
        self._request_count = request_count
        self._on_failure = on_failure
        self._complete: set[Receiver] = set()  # requests that add no more output
        self._is_open = False

    def ended(self, receiver: Receiver, frame: pb.ServerFrame) -> None:
        """Implement `Outbox.ended`."""
        if receiver.is_waiting:  # failures keep their order, since the first one is the answer
            self._line.remove(receiver)
            self._line.append(receiver)
        if frame.HasField("failed"):
            self._on_failure(receiver.given_id)
        self.complete(receiver)

    def complete(self, receiver: Receiver) -> None:
        """Implement `Outbox.complete`."""
        self._complete.add(receiver)
        if len(self._complete) == self._request_count:
            self._is_open = True
            self._note()

    def close(self) -> None:
        """Implement `Outbox.close`."""
        self._is_open = True
        super().close()

    def _note(self) -> None:
        if self._is_open:
            super()._note()


# Frames are assembled from bytes: assigning a message object copies it, and one copy per token
# costs more than all other work on it. Field numbers are those of
# `weir/v1/inference_service.proto`.


def encoded_varint(number: int) -> bytes:
    """Encode a non-negative integer in the wire format of Protocol Buffers."""
    if number < 0x80:
        return bytes((number,))
    return bytes((number & 0x7F | 0x80,)) + encoded_varint(number >> 7)


# 0.6 MB: for most tokens, and lengths of small frames.
VARINTS = [encoded_varint(number) for number in range(1 << 14)]


def varint(number: int) -> bytes:
    """Encode a non-negative integer, from the table if it has it."""
    return VARINTS[number] if number < 0x4000 else encoded_varint(number)


def frame_head(request_id: str) -> bytes:
    """Return the first field of a `ServerFrame`, serialized."""
    data = request_id.encode()
    return b"\x0a%b%b" % (VARINTS[len(data)], data)  # an id is short


def framed(frame: bytes) -> bytes:
    """Return a serialized `ServerFrame` as part of a `GenerateResponse`."""
    return b"\x0a%b%b" % (varint(len(frame)), frame)


# Fields with a size below 128, by size: tag, size, and the tag of the next field if it is fixed.
FRAMES_OF = [b"\x0a" + size for size in VARINTS[:0x80]]
DELTAS_OF = [b"\x22%b\x08" % size for size in VARINTS[:0x80]]
TEXTS_OF = [b"\x12" + size for size in VARINTS[:0x80]]
TOKENS = [b"\x1a%b%b" % (VARINTS[len(token)], token) for token in VARINTS]  # by token id


def token_frame(head: bytes, seq: int, text: bytes, token_id: int) -> bytes:
    """Return a frame with one token of the first choice, the most common part of a message."""
    text_size = len(text)
    if seq < 0x4000 and token_id < 0x4000 and text_size < 0x40:
        number, token = VARINTS[seq], TOKENS[token_id]
        size = text_size + len(token) + len(number) + 3
        frame_size = size + len(head) + 2
        if frame_size < 0x80:
            frame, delta, before_text = FRAMES_OF[frame_size], DELTAS_OF[size], TEXTS_OF[text_size]
            return b"".join((frame, head, delta, number, before_text, text, token))
    return delta_frame(head, delta_bytes(seq, 0, text, (token_id,)))


def delta_frame(head: bytes, delta: bytes) -> bytes:
    """Return a serialized `DeltaFrame` as part of a `GenerateResponse`. head: see `frame_head`."""
    length = varint(len(delta))
    return framed(b"%b\x22%b%b" % (head, length, delta))


def delta_bytes(
    seq: int, choice_index: int, text: bytes, token_ids: Sequence[int], rest: bytes = b""
) -> bytes:
    """Serialize a `DeltaFrame`. rest: its other fields, serialized."""
    ids = b"".join(map(varint, token_ids))
    return b"".join(
        (
            b"\x08" + varint(seq),
            b"\x12" + varint(len(text)) + text if text else b"",
            b"\x1a" + varint(len(ids)) + ids if ids else b"",
            b"\x28" + varint(choice_index) if choice_index else b"",
            rest,
        )
    )
