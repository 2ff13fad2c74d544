"""What one stream still has to send: the only place from which tokens reach a client.

All frames that wait at one moment go out in one message, because a message costs some hundred times what a frame in it costs.
Tokens are written to the usage journal before the message that carries them is handed to the transport; from then on they count as
delivered.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from weir.v1 import inference_service_pb2 as pb

from metering.holds.journal import Delivered, UsageJournal

FRAMES_WAITING_MAX = 50_000  # some 10 MB: beyond it nothing more is read from a client that does not read itself
FRAMES_PER_MESSAGE_MAX = 1000  # some 60 kB of deltas: below any receive limit a client may have


@dataclass(slots=True)
class UsageSoFar:
    """The tokens of one request while it runs. input_token_count is 0 until the engine has begun."""

    input_token_count: int = 0
    cached_input_token_count: int = 0
    generated_token_count: int = 0
    delivered_token_count: int = 0


@dataclass(slots=True, eq=False)
class Delivery:
    """One request's part of an outbox: what waits, and whom to tell when nothing does any more."""

    request_id: str
    usage: UsageSoFar
    hold_id: uuid.UUID | None = None
    queued_token_count: int = 0
    unsent_frame_count: int = 0
    unsent_since: float = 0.0
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    fence: Callable[[], bool] = lambda: True  # whether tokens may leave; where it says no it has ended the request

    @property
    def unsent_token_count(self) -> int:
        """Tokens that wait for the client to read."""
        return self.queued_token_count - self.usage.delivered_token_count


class Pending(NamedTuple):
    """One frame that waits."""

    delivery: Delivery
    frame: pb.ServerFrame
    token_count: int


class Outbox:
    """Frames of one stream in the order in which they were pushed. One writer, any number of requests."""

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
        if not delivery.unsent_frame_count:
            delivery.unsent_since = time.monotonic()
            delivery.sent.clear()
        delivery.unsent_frame_count += 1
        delivery.queued_token_count += token_count
        self._pending.append(Pending(delivery, frame, token_count))
        self._arrived.set()

    async def room(self) -> None:
        """Wait while so many frames wait that to read more from the client would only add to them."""
        while len(self._pending) > FRAMES_WAITING_MAX:
            self._taken.clear()
            await self._taken.wait()

    async def flushed(self, delivery: Delivery) -> None:
        """Wait until nothing of the request waits any more: sent, discarded or abandoned."""
        if delivery.unsent_frame_count:
            await delivery.sent.wait()

    def discard(self, delivery: Delivery) -> None:
        """Forget what of the request has not been handed to the transport: it was not delivered.

        But for its admission: whoever hears of an end has heard of that first.
        """
        before = len(self._pending)
        self._pending = deque(
            pending for pending in self._pending if pending.delivery is not delivery or pending.frame.HasField("admitted")
        )
        delivery.unsent_frame_count -= before - len(self._pending)
        self._taken.set()
        delivery.queued_token_count = delivery.usage.delivered_token_count
        if not delivery.unsent_frame_count:
            delivery.sent.set()

    def abandon(self) -> None:
        """The client is gone: nothing more is delivered."""
        self._abandoned = True
        for pending in (*self._in_flight, *self._pending):
            pending.delivery.unsent_frame_count = 0
            pending.delivery.queued_token_count = pending.delivery.usage.delivered_token_count
            pending.delivery.sent.set()
        self._pending.clear()
        self._taken.set()
        self.close()

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
            batch = [self._pending.popleft() for _ in range(min(len(self._pending), FRAMES_PER_MESSAGE_MAX))]
            self._taken.set()
            if not batch:
                if self._closing:
                    return
                self._arrived.clear()
                continue
            batch = self._without_fenced(batch)
            self._in_flight = batch  # before anything can fail, so that `abandon` reaches these too
            self._count_as_delivered(batch)
            await write(pb.GenerateResponse(frames=[pending.frame for pending in batch]))
            self._in_flight = []
            self._message_count += 1
            for pending in batch:
                pending.delivery.unsent_frame_count -= 1
                if pending.delivery.unsent_frame_count <= 0:
                    pending.delivery.sent.set()

    def _without_fenced(self, batch: list[Pending]) -> list[Pending]:
        """Leave out the tokens of requests whose holds are not theirs any more, and forget what else of them waits.

        Looked at here, since a process may be stopped anywhere before, for any time.
        """
        fenced = {delivery for delivery in {pending.delivery for pending in batch if pending.token_count} if not delivery.fence()}
        if not fenced:
            return batch
        kept = [pending for pending in batch if pending.delivery not in fenced]
        for pending in batch:
            if pending.delivery in fenced:
                pending.delivery.unsent_frame_count -= 1
        for delivery in fenced:
            self.discard(delivery)
        return kept

    def _count_as_delivered(self, batch: list[Pending]) -> None:
        totals: dict[Delivery, int] = {}
        for pending in batch:
            if pending.token_count:
                before = totals.get(pending.delivery, pending.delivery.usage.delivered_token_count)
                totals[pending.delivery] = before + pending.token_count
        if not totals:
            return
        self._journal.record([journal_entry(delivery, total) for delivery, total in totals.items()])
        for delivery, total in totals.items():
            delivery.usage.delivered_token_count = total


def journal_entry(delivery: Delivery, delivered_token_count: int) -> Delivered:
    """What the journal has to know of a request to settle it without this process."""
    assert delivery.hold_id is not None, "tokens flow only under a hold"
    usage = delivery.usage
    return Delivered(
        delivery.hold_id,
        usage.input_token_count,
        usage.cached_input_token_count,
        max(usage.generated_token_count, delivered_token_count),
        delivered_token_count,
    )
