"""Send queue of one stream and its subscriptions: the only way in which tokens reach a client.

When the writer can send, it collects the frames of all requests of the stream into one message,
since a message costs about a hundred times as much as a frame. Until then output stays in its
request's buffer (`output_buffer.py`). Tokens are written to the usage journal before their message
is handed to the transport, and count as delivered once the transport has taken it.

The writer also measures how long it has sent nothing. Whatever its requests wait for, a stream
sends something before a proxy on the way to the client would close it (ADR 0088).
"""

from __future__ import annotations

import asyncio
import math
import sys
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic
from typing import Protocol

import msgspec
from weir.v1 import inference_service_pb2 as pb

from api.generation.delivery.delta import Delta
from api.generation.delivery.encoding import (
    DELTAS_OF,
    FRAMES_OF,
    TEXTS_OF,
    TOKENS,
    VARINTS,
    delta_bytes,
    delta_frame,
    framed,
    varint,
)
from api.generation.endings import UsageSoFar
from metering.core.errors import JournalUnavailable
from metering.core.models import Outcome
from metering.holds.journal import Delivered, UsageJournal

# Some 10 MB; above it, reading from the client pauses until the client reads.
FRAMES_WAITING_MAX = 50_000
# Seconds of silence after which a stream sends something that keeps its connection alive: many
# proxies and balancers cut one after 60 s, some after 15 s.
SILENCE_S = 8.0
# A write that takes longer waits for the client. A shorter one may have waited for this process;
# a slow client blocks longer, since windows and buffers hold some thousand tokens.
SLOW_WRITE_S = 0.1
# Merged into one delta at most; keeps a frame at some kB even with log-probabilities.
TOKENS_PER_DELTA_MAX = 64


class Source(Protocol):
    """Request as its receiving stream sees it: running here or in another process, or ended.

    No method blocks.
    """

    def stop(self, outcome: Outcome) -> None:
        """End the request with this outcome."""
        ...

    def grant(self, token_count: int) -> None:
        """Permit this many more tokens to be sent."""
        ...

    def update(self, message: pb.UpdateFrame) -> None:
        """Change the limits of the request. The answer arrives as a frame."""
        ...

    def revoke(self, subscription: Subscription, error: Exception) -> None:
        """End the subscription with an error: the stream may no longer receive the request."""
        ...

    def leave(self, subscription: Subscription, outcome: Outcome) -> None:
        """Handle that the stream has closed; ignored if another stream receives the request."""
        ...

    def attach(self, subscription: Subscription, after_seq: int, credit_token_count: int) -> None:
        """Send output to this subscription from now on, starting after the delta `after_seq`.

        Raises OutputGone or RequestInFlight; then nothing has changed.
        """
        ...


class Flushing(Protocol):
    """Request that has ended and waits until the transport has taken its output."""

    def poll(self) -> None:
        """Handle that the transport took output, or that the client is gone."""
        ...


class Supply(Protocol):
    """Output of a request, from which the writer of its stream takes it.

    `subscription` receives the output. The `in_flight` counts are tokens in messages that are being
    written. `take` sets `has_more` if more can be sent. `flush` is set while the request waits for
    its client to take everything.
    """

    usage: UsageSoFar
    hold_id: uuid.UUID | None
    subscription: Subscription | None
    in_flight_token_count: int
    in_flight_reasoning_token_count: int
    has_more: bool

    @property
    def flush(self) -> Flushing | None:
        """Wait for the last output; None before the end of the request."""
        ...

    def take(self, subscription: Subscription, into: Collected, delta_max: int) -> None:
        """Move at most `delta_max` deltas that may be sent into a message, and set `has_more`."""
        ...

    def entry(self, token_count: int, reasoning_token_count: int = 0) -> Delivered:
        """Build the journal entry for this many more tokens, some of which are reasoning."""
        ...

    def was_taken(self, token_count: int, reasoning_token_count: int) -> None:
        """Count tokens that the transport has taken."""
        ...

    def lose(self, error: JournalUnavailable) -> None:
        """Fail the request: the journal cannot record tokens that were taken from it."""
        ...

    def count_write(self) -> None:
        """Count the current write as a stall if it is slow and tokens of this output wait."""
        ...


class Collected(msgspec.Struct, eq=False):
    """Message under construction.

    `entries` lists tokens that are not journalled yet: output, token count, reasoning count, and
    the range of `parts` that holds them. `replayed` lists journalled tokens that no transport has
    taken before. If `asks_fences`, the fence of each request must be checked; None until the first
    request with output has found out.
    """

    parts: list[bytes]
    token_room: int
    entries: list[tuple[Supply, int, int, int, int]]
    replayed: list[tuple[Supply, int, int]]
    asks_fences: bool | None = None


class Subscription(ABC):
    """Connection of one stream to one request. Encodes the output for the protocol of the stream.

    Nothing is pushed after `end`. `token` encodes the most common output, one token of the first
    choice, from its sequence number, text and id.
    """

    token: Callable[[int, str, int], bytes]

    def __init__(
        self, writer: StreamWriter, given_id: str, on_end: Callable[[Subscription], None]
    ) -> None:
        """`given_id` is the request id as this client writes it.

        `on_end` is called once, when the last frame has been pushed.
        """
        self.writer = writer
        self.given_id = given_id
        self.source: Source
        # Hash of the `start` frame, if the request was started on this stream.
        self.payload_hash: bytes | None = None
        self.is_refused = False  # refused before the request produced anything
        self.supply: Supply | None = None  # output; None: all frames are pushed
        self.is_waiting = False  # queued in the writer
        self.in_flight_count = 0  # parts of the message that is being written
        # Called when the transport takes frames; must not block.
        self.on_taken: Callable[[], None] | None = None
        self.frames: list[bytes] = []  # pushed, not sent yet; encoded
        self._on_end = on_end

    @abstractmethod
    def part(self, frame: pb.ServerFrame, encoded: bytes | None = None) -> bytes:
        """Encode a frame that carries no output; empty bytes if the protocol has no such frame.

        `frame` has no request id and may change after the call. `encoded` is the serialized frame
        if the caller has it already.
        """

    @abstractmethod
    def delta(self, seq: int, choice_index: int, delta: Delta) -> bytes:
        """Encode new output as a part of a message."""

    @property
    def unsent_frame_count(self) -> int:
        """Number of pushed frames that the transport has not taken."""
        return len(self.frames) + self.in_flight_count

    def push(self, frame: pb.ServerFrame, encoded: bytes | None = None) -> None:
        """Send a frame as soon as possible, unless the client is gone. Arguments as in `part`."""
        if not self.writer.is_abandoned and (part := self.part(frame, encoded)):
            self.frames.append(part)
            self.writer.frame_count += 1
            self.writer.add(self)

    def end(self, frame: pb.ServerFrame | None) -> None:
        """Push the last frame, if any: None means that the process shuts down without one."""
        self.supply = None
        if frame is not None:
            self.is_refused = frame.HasField("failed") and not frame.failed.HasField("usage")
            self.push(frame)
            if self.writer.is_whole:
                self.writer.ended(self, frame)
        self._on_end(self)

    def drop(self) -> None:
        """Discard pushed frames that are not in a message yet."""
        self.writer.frame_count -= len(self.frames)
        self.frames.clear()

    def withdraw(self, part_count: int) -> None:
        """Handle that parts of the message under construction are not sent after all."""
        self.in_flight_count -= part_count

    def was_taken(self) -> None:
        """Handle that the message has been written, or that the client is gone."""
        self.in_flight_count = 0
        if self.supply is not None and (flush := self.supply.flush) is not None:
            flush.poll()
        if self.on_taken is not None:
            self.on_taken()


class FrameSubscription(Subscription):
    """Subscription of a gRPC stream. Its parts are `ServerFrame`s within a `GenerateResponse`."""

    def __init__(
        self, writer: StreamWriter, given_id: str, on_end: Callable[[Subscription], None]
    ) -> None:
        super().__init__(writer, given_id, on_end)
        data = given_id.encode()
        self.head = b"\x0a%b%b" % (VARINTS[len(data)], data)  # an id is short
        self.token = partial(token_frame, self.head)

    def part(self, frame: pb.ServerFrame, encoded: bytes | None = None) -> bytes:
        body = encoded or frame.SerializeToString()
        size = len(self.head) + len(body)
        return b"\x0a%b%b%b" % (
            VARINTS[size] if size < 0x4000 else varint(size),
            self.head,
            body,
        )

    def delta(self, seq: int, choice_index: int, delta: Delta) -> bytes:
        return delta_frame(self.head, delta_bytes(seq, choice_index, delta))


def token_frame(head: bytes, seq: int, text: str, token_id: int) -> bytes:
    """Encode a frame with one token of the first choice, the most common part of a message."""
    data = text.encode()
    text_size = len(data)
    if seq < 0x4000 and token_id < 0x4000 and text_size < 0x40:
        number, token = VARINTS[seq], TOKENS[token_id]
        size = text_size + len(token) + len(number) + 3
        frame_size = size + len(head) + 2
        if frame_size < 0x80:
            frame, delta, before_text = FRAMES_OF[frame_size], DELTAS_OF[size], TEXTS_OF[text_size]
            return b"".join((frame, head, delta, number, before_text, data, token))
    return delta_frame(head, delta_bytes(seq, 0, Delta(text, (token_id,))))


def always() -> bool:
    """Return True: default that checks every fence."""
    return True


class StreamWriter:
    """Send queue of one stream: one writer for any number of requests."""

    is_whole = False  # whether the client gets each answer in one piece
    marks = True  # whether a message that the transport has taken is of use without later ones
    # Limits of one message. Frames: some 60 kB of deltas, below the receive limit of any client.
    # Tokens: some 1.2 MB with 20 log-probabilities each, below gRPC's default limit of 4 MB.
    # Deltas: per request, while other requests wait.
    frame_max, token_max, delta_max = 1000, 4000, 8
    tokens_per_delta_max = TOKENS_PER_DELTA_MAX

    def __init__(self, journal: UsageJournal, may_have_lapsed: Callable[[], bool] = always) -> None:
        """`may_have_lapsed` returns if any hold may have lapsed; called once per message."""
        self.may_have_lapsed = may_have_lapsed
        self.is_abandoned = False
        self.frame_count = 0  # pushed frames that wait; output waits in its buffer
        # Messages taken by the client; unchanged while a client stalls.
        self.message_count = 0
        self._journal = journal
        # Subscriptions with output, and frames without a request.
        self._queue: deque[Subscription | bytes] = deque()
        self._in_flight: list[Subscription] = []
        # With those of the tokens that are reasoning.
        self._in_flight_tokens: list[tuple[Supply, int, int]] = []
        # Set while the writer waits for something to send.
        self._idle: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None  # while the reader waits for room
        self._is_open = True  # frames may be sent
        self._closing = False
        # Writes a message and returns whether the transport has taken it. None: only `write_all`
        # writes messages.
        self.write_now: Callable[[bytes], bool] | None = None
        self._is_flushing = False  # `_flush` is scheduled
        # Longest silence, in seconds; the time of the last write; and the next check of it.
        self._silence_s = SILENCE_S
        self._written_at = -math.inf
        self._silence_timer: asyncio.TimerHandle | None = None
        self._is_silent = False  # for too long
        self.writing_since: float | None = None  # on the loop's clock, while a message is written

    def push(self, frame: pb.ServerFrame) -> None:
        """Send a frame of a request to which this stream has no subscription."""
        if not self.is_abandoned:
            self._queue.append(framed(frame.SerializeToString()))
            self.frame_count += 1
            self._note()

    def add(self, subscription: Subscription) -> None:
        """Queue a subscription that has something to send."""
        if not (subscription.is_waiting or self.is_abandoned):
            subscription.is_waiting = True
            self._queue.append(subscription)
            if self._idle is not None:
                self._note()

    def complete(self, subscription: Subscription) -> None:
        """Handle that a request has produced all its output."""

    def ended(self, subscription: Subscription, frame: pb.ServerFrame) -> None:
        """Handle that a request has ended with this frame."""

    def _note(self) -> None:
        """Send what is queued, by waking the writer if it is idle."""
        if self._idle is None or self._idle.done() or not self._is_open:
            return
        if self.write_now is None or self._closing:
            self._idle.set_result(None)
        elif not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def room(self) -> None:
        """Wait while more than `FRAMES_WAITING_MAX` frames are unsent, to slow the client down."""
        while self.frame_count > FRAMES_WAITING_MAX and not self.is_abandoned:
            self._room = asyncio.get_running_loop().create_future()
            try:
                await self._room
            finally:
                self._room = None

    def abandon(self, *, is_gone: bool = True) -> None:
        """Discard everything that is queued.

        If not `is_gone`, the client may still get the message that is being written, and its tokens
        are billed once the transport has taken them.
        """
        self._count_write()
        self.is_abandoned = True
        if is_gone:
            lost, self._in_flight_tokens = self._in_flight_tokens, []
            for output, token_count, reasoning_count in lost:
                output.in_flight_token_count -= token_count
                output.in_flight_reasoning_token_count -= reasoning_count
        gone = dict.fromkeys(
            [*self._in_flight, *(each for each in self._queue if isinstance(each, Subscription))]
        )
        self._queue.clear()
        self._in_flight = []
        for subscription in gone:
            subscription.is_waiting = False
            subscription.drop()
            subscription.was_taken()
        self.frame_count = 0
        self._make_room()
        self.close()

    def close(self) -> None:
        """End the writer once all frames are sent."""
        self._closing = True
        self._note()

    def break_silence_within(self, silence_s: float) -> None:
        """Shorten the time that the stream may send nothing to `silence_s`, starting now."""
        self._silence_s = silence_s
        if self._silence_timer is not None:
            self._silence_timer.cancel()
            self._written_at = monotonic()
            self._check_later(silence_s)

    def _check_later(self, after_s: float) -> None:
        self._silence_timer = asyncio.get_running_loop().call_later(after_s, self._check_silence)

    def _check_silence(self) -> None:
        """Wake the writer to send something if nothing was sent for too long.

        A writer that is not idle waits for its client to read: something is already being sent.
        """
        rest_s = self._written_at + self._silence_s - monotonic()
        if rest_s <= 0:
            self._written_at, rest_s = monotonic(), self._silence_s
            if self._idle is not None and not self._idle.done():
                self._is_silent = True
                self._idle.set_result(None)
        self._check_later(rest_s)

    def slow_write(self) -> tuple[float, float] | None:
        """Return start and current time of a write that waits for the client, or None."""
        since = self.writing_since
        if since is None:
            return None
        now = monotonic()
        return (since, now) if now - since > SLOW_WRITE_S else None

    def _count_write(self) -> None:
        """Count a slow write as a stall of each request with tokens in it or queued after it."""
        if self.slow_write() is None:
            return
        for output, *_ in self._in_flight_tokens:
            output.count_write()
        for subscription in self._queue:
            if isinstance(subscription, Subscription) and subscription.supply is not None:
                subscription.supply.count_write()

    async def write_all(
        self,
        write: Callable[[bytes], Awaitable[object]],
        on_gone: Callable[[], None] | None = None,
        gone: type[Exception] | tuple[()] = (),
        break_silence: Callable[[], Awaitable[object]] | None = None,
        silent_for_s: float = 0.0,
    ) -> None:
        """Send messages until the writer is closed and everything is sent.

        `write` sends a message and waits until the transport has taken it, and what `write_now`
        wrote; the message may be empty. If it raises `gone`, the client has disconnected and
        `on_gone` is called; other errors are raised. `break_silence` sends
        something that keeps the connection alive. `silent_for_s` is the time in seconds since the
        client sent its request.
        """
        if break_silence is not None:
            self._written_at = monotonic() - silent_for_s
            self._check_later(max(self._silence_s - silent_for_s, 0.0))
        try:
            await self._write_all(write, on_gone, gone, break_silence)
        finally:
            self.write_now = None  # breaks a reference cycle
            if self._silence_timer is not None:
                self._silence_timer.cancel()
                self._silence_timer = None

    async def _write_all(
        self,
        write: Callable[[bytes], Awaitable[object]],
        on_gone: Callable[[], None] | None,
        gone: type[Exception] | tuple[()],
        break_silence: Callable[[], Awaitable[object]] | None,
    ) -> None:
        now, loop = monotonic, asyncio.get_running_loop()
        while True:
            is_written = self.writing_since is not None  # by `_flush`
            if is_written or (self._queue and self._is_open):
                # Built as late as possible, since the process may be suspended at any earlier
                # point.
                if is_written or (message := self._message()) or self._in_flight:
                    self.writing_since = began_at = self.writing_since or now()
                    try:
                        await write(b"" if is_written else message)
                    except gone:
                        if on_gone is not None:
                            on_gone()
                        return
                    finally:
                        self._written_at = ended_at = now()
                        if ended_at - began_at > SLOW_WRITE_S:
                            self._count_write()
                        self.writing_since = None
                    self._was_taken()
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
                self._idle = loop.create_future()
                try:
                    await self._idle
                finally:
                    self._idle = None

    def _flush(self) -> None:
        """Send what is queued without `write_all`, whose wake-up costs as much as a token.

        It is woken by an error, and to wait until the transport has taken the message.
        """
        self._is_flushing = False
        idle, write_now = self._idle, self.write_now
        if idle is None or idle.done() or write_now is None:
            return
        try:
            while self._queue:
                if (message := self._message()) or self._in_flight:
                    self._written_at = self.writing_since = monotonic()
                    if not write_now(message):
                        idle.set_result(None)
                        return
                    self.writing_since = None
                    self._was_taken()
        except Exception as error:
            self.writing_since = None
            idle.set_exception(error)

    def _was_taken(self) -> None:
        """Count the message that was written: the transport has taken it."""
        self.message_count += 1
        tokens, self._in_flight_tokens = self._in_flight_tokens, []
        for output, token_count, reasoning_count in tokens:
            output.was_taken(token_count, reasoning_count)
            if output.hold_id is not None and self.marks:
                usage = output.usage
                self._journal.took(
                    output.hold_id,
                    usage.taken_token_count,
                    usage.taken_reasoning_token_count,
                )
            # Otherwise below, when its frames in this message are counted as taken too
            if (flush := output.flush) is not None and not (
                (receiver := output.subscription) and receiver.in_flight_count
            ):
                flush.poll()
        taken, self._in_flight = self._in_flight, []
        for subscription in taken:
            subscription.in_flight_count = 0
            if subscription.on_taken is not None or (
                subscription.supply is not None and subscription.supply.flush
            ):
                subscription.was_taken()

    def _message(self) -> bytes:
        """Build a message with at most `delta_max` deltas of each request, and journal its tokens.

        If the journal cannot be written, all requests with tokens in the message fail.
        """
        frame_max, delta_max = self.frame_max, self.delta_max
        collected = Collected([], self.token_max, [], [])
        queue, parts, in_flight, more = self._queue, collected.parts, self._in_flight, []
        entries = collected.entries
        while queue and collected.token_room > 0 and (count := len(parts)) < frame_max:
            one = queue.popleft()
            if isinstance(one, bytes):
                parts.append(one)
                self.frame_count -= 1
                continue
            has_more = False
            if pushed := one.frames:
                parts += pushed
                self.frame_count -= len(pushed)
                one.frames = []
            if (supply := one.supply) is not None:
                supply.take(one, collected, delta_max)
                has_more = supply.has_more
                if pushed := one.frames:  # the last frame follows the last output
                    parts += pushed
                    self.frame_count -= len(pushed)
                    one.frames = []
            if has_more:
                more.append(one)
            else:
                one.is_waiting = False
            if taken_count := len(parts) - count:
                one.in_flight_count += taken_count
                in_flight.append(one)
        if more:
            queue += more
        if entries:
            try:
                tokens = []
                for output, count, reasoning, _, _ in entries:
                    tokens.append(output.entry(count, reasoning))
                self._journal.record(tokens)
            except JournalUnavailable as error:
                self._withdraw(collected, error)
            else:
                for output, count, reasoning, _, _ in entries:
                    usage = output.usage
                    usage.journalled_token_count += count
                    output.in_flight_token_count += count
                    if reasoning:
                        usage.journalled_reasoning_token_count += reasoning
                        output.in_flight_reasoning_token_count += reasoning
                    self._in_flight_tokens.append((output, count, reasoning))
        for output, count, reasoning in collected.replayed:
            output.in_flight_token_count += count
            output.in_flight_reasoning_token_count += reasoning
            self._in_flight_tokens.append((output, count, reasoning))
        if self._room is not None:
            self._make_room()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _withdraw(self, collected: Collected, error: JournalUnavailable) -> None:
        """Remove tokens that could not be journalled from a message, and fail their requests."""
        for output, *_, first, end in reversed(collected.entries):
            del collected.parts[first:end]
            if output.subscription is not None:
                output.subscription.withdraw(end - first)
            output.lose(error)
        self._in_flight = [each for each in self._in_flight if each.in_flight_count]

    def _make_room(self) -> None:
        """Wake the reader that waits in `room`."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


class WholeAnswerWriter(StreamWriter):
    """Writer that sends one message with all frames.

    It does so once every request has all its output or has ended. The rest of the answer follows
    after settlement; without it, the client has an incomplete body.
    """

    is_whole, marks = True, False
    # Context windows bound the length of the answer.
    frame_max = token_max = delta_max = tokens_per_delta_max = sys.maxsize

    def __init__(
        self, journal: UsageJournal, request_count: int, on_failure: Callable[[str], None]
    ) -> None:
        """`request_count` is the number of requests that make up the answer.

        `on_failure` is called with the id of each request that fails.
        """
        super().__init__(journal)
        self._request_count = request_count
        self._on_failure = on_failure
        self._complete: set[Subscription] = set()  # requests that add no more output
        self._is_open = False

    def ended(self, subscription: Subscription, frame: pb.ServerFrame) -> None:
        if subscription.is_waiting:  # failures keep their order, since the first one is the answer
            self._queue.remove(subscription)
            self._queue.append(subscription)
        if frame.HasField("failed"):
            self._on_failure(subscription.given_id)
        self.complete(subscription)

    def complete(self, subscription: Subscription) -> None:
        self._complete.add(subscription)
        if len(self._complete) == self._request_count:
            self._is_open = True
            self._note()

    def close(self) -> None:
        self._is_open = True
        super().close()
