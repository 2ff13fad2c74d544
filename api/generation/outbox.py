"""What one stream still has to send: the only place from which tokens reach a client.

All frames that wait at one moment go out in one message, because a message costs some hundred times what a frame in it costs.
Tokens are written to the usage journal before the message that carries them is handed to the transport; from then on they count as
delivered.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from weir.v1 import inference_service_pb2 as pb

from metering.holds.journal import Delivered, UsageJournal

FRAMES_WAITING_MAX = 50_000  # some 10 MB: beyond it nothing more is read from a client that does not read itself
FRAMES_PER_MESSAGE_MAX = 1000  # some 60 kB of deltas: below any receive limit a client may have
TOKENS_PER_MESSAGE_MAX = 4000  # some 1.2 MB with 20 log-probabilities each: below the 4 MB that clients take unless told otherwise
LASTING_KINDS = frozenset({"admitted", "attached"})  # whoever hears of an end has heard of these first


@dataclass(slots=True)
class UsageSoFar:
    """The tokens of one request while it runs. input_token_count is 0 until the engine has begun."""

    input_token_count: int = 0
    cached_input_token_count: int = 0
    generated_token_count: int = 0
    delivered_token_count: int = 0


def no_fence() -> bool:
    """Tokens may leave."""
    return True


@dataclass(slots=True, eq=False)
class Tally:
    """What a request has come to, whichever stream receives it. fence: whether tokens may leave; where not, it ends the request."""

    usage: UsageSoFar = field(default_factory=UsageSoFar)
    hold_id: uuid.UUID | None = None
    fence: Callable[[], bool] = no_fence


def do_nothing() -> None:
    """For deliveries whose progress nobody follows."""


@dataclass(slots=True, eq=False)
class Delivery:
    """One request's part of an outbox: what waits, and whom to tell when less does.

    counts: its tokens count as delivered when they are handed to the transport; else they did before, or another process counts.
    on_change: called whenever less waits than before; must not block.
    """

    request_id: str
    tally: Tally = field(default_factory=Tally)
    counts: bool = True
    unsent_frame_count: int = 0
    unsent_token_count: int = 0
    on_change: Callable[[], None] = do_nothing
    sent: asyncio.Event | None = None  # made by whoever waits until nothing does any more

    def left(self, frame_count: int, token_count: int) -> None:
        """So much waits no longer: it was sent, or will not be."""
        self.unsent_frame_count = max(self.unsent_frame_count - frame_count, 0)
        self.unsent_token_count = max(self.unsent_token_count - token_count, 0)
        if self.sent is not None and not self.unsent_frame_count:
            self.sent.set()
        self.on_change()


class Pending(NamedTuple):
    """One frame that waits."""

    delivery: Delivery
    frame: pb.ServerFrame
    token_count: int


class Outbox:
    """Frames of one stream in the order in which they were pushed. One writer, any number of requests."""

    takes_whole = False  # whether the client wants each answer in one piece; see `outbox.py`

    def __init__(self, journal: UsageJournal) -> None:
        self._journal = journal
        self._pending: deque[Pending] = deque()
        self._in_flight: list[Pending] = []
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._closing = False
        self._abandoned = False
        self._message_count = 0

    @property
    def message_count(self) -> int:
        """Messages that the client has taken: it stalls only while this stands still."""
        return self._message_count

    def push(self, delivery: Delivery, frame: pb.ServerFrame, token_count: int = 0) -> None:
        """Add a frame; dropped if the client is gone. token_count: output tokens that it carries."""
        if self._abandoned:
            return
        delivery.unsent_frame_count += 1
        delivery.unsent_token_count += token_count
        self._pending.append(Pending(delivery, frame, token_count))
        self._note_arrival()

    def complete(self, delivery: Delivery) -> None:
        """A request adds no more output."""

    def _note_arrival(self) -> None:
        """Wake the writer: something may go out."""
        self._arrived.set()

    async def room(self) -> None:
        """Wait while so many frames wait that to read more from the client would only add to them."""
        while len(self._pending) > FRAMES_WAITING_MAX:
            self._taken.clear()
            await self._taken.wait()

    async def flushed(self, delivery: Delivery) -> None:
        """Wait until nothing of the request waits any more: sent, discarded or abandoned."""
        while delivery.unsent_frame_count:
            delivery.sent = delivery.sent or asyncio.Event()
            delivery.sent.clear()
            await delivery.sent.wait()

    def discard(self, delivery: Delivery) -> None:
        """Forget what of the request has not been handed to the transport: it was not delivered. But for its admission."""
        self._remove(delivery, LASTING_KINDS)

    def take_back(self, delivery: Delivery) -> list[pb.DeltaFrame]:
        """Forget the same and its admission, too; the output among it, in order, which another stream may be given."""
        return [pending.frame.delta for pending in self._remove(delivery, frozenset()) if pending.frame.HasField("delta")]

    def unsent_delta_count(self, delivery: Delivery) -> int:
        """Deltas of the request that have not been handed to the transport."""
        return sum(pending.delivery is delivery and pending.frame.HasField("delta") for pending in self._pending)

    def _remove(self, delivery: Delivery, but: frozenset[str]) -> list[Pending]:
        kept: deque[Pending] = deque()
        removed = []
        for pending in self._pending:
            if pending.delivery is not delivery or pending.frame.WhichOneof("kind") in but:
                kept.append(pending)
            else:
                removed.append(pending)
        if removed:
            self._pending = kept
            self._taken.set()
        delivery.left(len(removed), sum(pending.token_count for pending in removed))
        return removed

    def abandon(self) -> None:
        """The client is gone: nothing more is delivered."""
        self._abandoned = True
        gone = [*self._in_flight, *self._pending]
        self._pending.clear()
        self._taken.set()
        self.close()
        for pending in gone:
            pending.delivery.left(1, pending.token_count)

    def close(self) -> None:
        """No more frames come; the writer ends when what waits is sent."""
        self._closing = True
        self._arrived.set()

    async def write_all(self, write: Callable[[pb.GenerateResponse], Awaitable[None]]) -> None:
        """Send until closed and empty.

        Raises: OSError if the journal cannot be written (nothing of that message was sent), and whatever `write` raises.
        """
        while True:
            await self._arrived.wait()
            batch = self._take_batch()
            self._taken.set()
            if not batch:
                if self._closing:
                    return
                self._arrived.clear()
                continue
            token_counts = counts_of(batch)
            # Looked at here, since a process may be stopped anywhere before, for any time.
            if token_counts and (fenced := {each for each in token_counts if not each.tally.fence()}):
                batch = self._without(batch, fenced)
                token_counts = counts_of(batch)
            self._in_flight = batch  # before anything can fail, so that `abandon` reaches these too
            if token_counts:
                self._count_as_delivered(token_counts)
            await write(pb.GenerateResponse(frames=[pending.frame for pending in batch]))
            self._message_count += 1
            if not self._abandoned:
                self._in_flight = []
                for pending in batch:
                    pending.delivery.left(1, 0 if pending.delivery.counts else pending.token_count)

    def _take_batch(self) -> list[Pending]:
        """What goes into the next message."""
        batch: list[Pending] = []
        room = TOKENS_PER_MESSAGE_MAX
        while self._pending and len(batch) < FRAMES_PER_MESSAGE_MAX and (not batch or self._pending[0].token_count <= room):
            batch.append(self._pending.popleft())
            room -= batch[-1].token_count
        return batch

    def _without(self, batch: list[Pending], fenced: set[Delivery]) -> list[Pending]:
        """Leave out the frames of requests whose holds are not theirs any more, and forget what else of them waits."""
        kept = [pending for pending in batch if pending.delivery not in fenced]
        for pending in batch:
            if pending.delivery in fenced:
                pending.delivery.left(1, pending.token_count)
        for delivery in fenced:
            self.discard(delivery)
        return kept

    def _count_as_delivered(self, token_counts: dict[Delivery, int]) -> None:
        totals = [(each.tally, each.tally.usage.delivered_token_count + token_count) for each, token_count in token_counts.items()]
        self._journal.record([journal_entry(tally, total) for tally, total in totals])
        for delivery, token_count in token_counts.items():
            delivery.tally.usage.delivered_token_count += token_count
            delivery.unsent_token_count -= token_count  # now, so that no token is in two counts at once, or in none


def counts_of(batch: Iterable[Pending]) -> dict[Delivery, int]:
    """The tokens that a message delivers, by request."""
    token_counts: dict[Delivery, int] = {}
    for delivery, _, token_count in batch:
        if token_count and delivery.counts:
            token_counts[delivery] = token_counts.get(delivery, 0) + token_count
    return token_counts


def journal_entry(tally: Tally, delivered_token_count: int) -> Delivered:
    """What the journal has to know of a request to settle it without this process."""
    assert tally.hold_id is not None, "tokens flow only under a hold"
    usage = tally.usage
    return Delivered(
        tally.hold_id,
        usage.input_token_count,
        usage.cached_input_token_count,
        max(usage.generated_token_count, delivered_token_count),
        delivered_token_count,
    )


class WholeOutbox(Outbox):
    """Holds all frames back until each of its requests has generated everything, or has ended; then they go out as one message."""

    takes_whole = True

    def __init__(self, journal: UsageJournal, request_count: int, on_failure: Callable[[str], None]) -> None:
        """request_count: so many requests make up the answer. on_failure: called with the id of each that has failed."""
        super().__init__(journal)
        self._request_count = request_count
        self._on_failure = on_failure
        self._complete: set[Delivery] = set()  # those that add no more output
        self._is_open = False

    def push(self, delivery: Delivery, frame: pb.ServerFrame, token_count: int = 0) -> None:
        """See `Outbox.push`."""
        super().push(delivery, frame, token_count)
        if frame.HasField("failed"):
            self._on_failure(delivery.request_id)
        if frame.HasField("failed") or frame.HasField("finished"):
            self.complete(delivery)

    def complete(self, delivery: Delivery) -> None:
        """See `Outbox.complete`."""
        self._complete.add(delivery)
        if len(self._complete) == self._request_count:
            self._is_open = True
            self._arrived.set()

    def close(self) -> None:
        """See `Outbox.close`."""
        self._is_open = True
        super().close()

    def _note_arrival(self) -> None:
        if self._is_open:
            super()._note_arrival()

    def _take_batch(self) -> list[Pending]:
        """All of it: the answer's length is bounded by the context windows of its requests."""
        batch = list(self._pending)
        self._pending.clear()
        return batch
