"""Replay buffers: output that is kept in memory for clients that may come back, bounded by request, by organization and in all."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from metering.holds.journal import Delivered, UsageJournal

if TYPE_CHECKING:
    from api.generation.output import ReplayOutput

FRAME_BYTES = 48  # that a kept frame takes beside its own bytes, in CPython
DROPPED_SHARE = 8  # when a buffer is full an eighth of it goes at once: shifting the rest costs more than a frame

Key = tuple[uuid.UUID, uuid.UUID]  # project and request: ids of requests are unique within a project


class ReplayBuffer:
    """The deltas of one request, as bytes, from `first_seq` on. Made by `ReplayBuffers.open`."""

    def __init__(self, journal: UsageJournal, owner: ReplayBuffers, organization_id: uuid.UUID) -> None:
        """organization_id: whose share of the room it takes."""
        self.organization_id = organization_id
        self.first_seq = 1
        self.byte_count = 0
        self._deltas: list[bytes] = []
        self._token_counts: list[int] = []
        self._journal = journal
        self._owner = owner

    @property
    def last_seq(self) -> int:
        """Of the newest delta."""
        return self.first_seq + len(self._deltas) - 1

    def record(self, delivered: Delivered) -> None:
        """Journal tokens that are about to be put here. Raises: OSError if the journal cannot be written; none are then."""
        self._journal.record([delivered])

    def put(self, delta: bytes, token_count: int, unread_seq: int) -> bool:
        """Keep one more delta; drops the oldest where there is no room. unread_seq: the first that the reader has not got.

        What the reader has not got may take as much room again. Whether all of it could be kept.
        """
        self._deltas.append(delta)
        self._token_counts.append(token_count)
        self.byte_count += len(delta) + FRAME_BYTES
        self._owner.note(self, len(delta) + FRAME_BYTES)
        allowance = self._owner.allowance(self.organization_id)
        if self.byte_count <= allowance:
            return True
        self._drop(allowance, unread_seq)
        if self.byte_count <= 2 * allowance:
            return True
        self._drop(allowance, self.last_seq + 1)
        return False

    def get(self, seq: int) -> tuple[bytes, int]:
        """A delta that is kept, and its tokens."""
        index = seq - self.first_seq
        return self._deltas[index], self._token_counts[index]

    def token_count_after(self, seq: int) -> int:
        """Tokens of all deltas behind this one; those up to it may be gone."""
        return sum(self._token_counts[seq + 1 - self.first_seq :])

    def forget(self) -> None:
        """Give all of it up."""
        self._cut(len(self._deltas))

    def _drop(self, allowance: int, before_seq: int) -> None:
        """Drop the oldest, down to an eighth below the allowance, but none from `before_seq` on."""
        excess = self.byte_count - allowance + allowance // DROPPED_SHARE
        count, droppable_count = 0, min(before_seq - self.first_seq, len(self._deltas) - 1)
        while excess > 0 and count < droppable_count:
            excess -= len(self._deltas[count]) + FRAME_BYTES
            count += 1
        self._cut(count)

    def _cut(self, count: int) -> None:
        freed = sum(len(data) + FRAME_BYTES for data in self._deltas[:count])
        del self._deltas[:count], self._token_counts[:count]
        self.first_seq += count
        self.byte_count -= freed
        if freed:
            self._owner.note(self, -freed)


@dataclass(slots=True, eq=False)
class Share:
    """Replay buffers of one organization: of running requests, and of ended ones, oldest first."""

    live: set[ReplayBuffer] = field(default_factory=set)
    ended: dict[Key, tuple[ReplayOutput, ReplayBuffer, asyncio.TimerHandle]] = field(default_factory=dict)
    byte_count: int = 0


class ReplayBuffers:
    """All buffers of this process: those of requests that run, and for a while those of requests that have ended.

    The room is shared fairly between organizations: where there is too little, the one that keeps the most bytes loses its oldest
    answer. So an organization that keeps less than its equal share loses nothing to others.
    """

    def __init__(self, journal: UsageJournal, *, bytes_max: int, bytes_per_request_max: int) -> None:
        self.byte_count = 0
        self._journal = journal
        self._bytes_max = bytes_max
        self._bytes_per_request_max = bytes_per_request_max
        self._shares: dict[uuid.UUID, Share] = {}  # by organization; none that keeps nothing
        self._ended: dict[Key, uuid.UUID] = {}  # the organization of each request that has ended and is kept

    def allowance(self, organization_id: uuid.UUID) -> int:
        """Bytes that each running request of it may keep: less where its share would not hold all of them otherwise."""
        live_count = len(self._shares[organization_id].live) if organization_id in self._shares else 0
        return min(self._bytes_per_request_max, self._bytes_max // max(len(self._shares), 1) // max(live_count, 1))

    @property
    def live_count(self) -> int:
        """ReplayBuffers of requests that run."""
        return sum(len(share.live) for share in self._shares.values())

    @property
    def ended_count(self) -> int:
        """Requests that have ended and can still be received."""
        return len(self._ended)

    def open(self, organization_id: uuid.UUID) -> ReplayBuffer:
        """For a request of the organization that begins; `close` or `keep` follows once."""
        buffer = ReplayBuffer(self._journal, self, organization_id)
        self._shares.setdefault(organization_id, Share()).live.add(buffer)
        return buffer

    def close(self, buffer: ReplayBuffer) -> None:
        """Its request has ended, and nobody can ask for its output."""
        buffer.forget()
        self._shares[buffer.organization_id].live.discard(buffer)
        self._tidy(buffer.organization_id)

    def keep(self, key: Key, output: ReplayOutput, seconds: float) -> None:
        """A request has ended, and its output can be asked for so long, unless the organization keeps too much by then."""
        buffer = output.buffer
        self.forget(key)  # an id may come again after an attempt that left no trace in the books
        timer = asyncio.get_running_loop().call_later(seconds, self._expire, key, seconds)
        share = self._shares[buffer.organization_id]
        share.live.discard(buffer)
        share.ended[key] = output, buffer, timer
        self._ended[key] = buffer.organization_id
        self._make_room()

    def _expire(self, key: Key, seconds: float) -> None:
        """The time is over; whoever is just reading may read on."""
        ended = self._shares[self._ended[key]].ended
        output, buffer, _ = ended[key]
        if output.receiver is None:
            self.forget(key)
        else:
            timer = asyncio.get_running_loop().call_later(seconds, self._expire, key, seconds)
            ended[key] = output, buffer, timer

    def find(self, key: Key) -> ReplayOutput | None:
        """What is kept of a request that has ended."""
        organization_id = self._ended.get(key)
        return None if organization_id is None else self._shares[organization_id].ended[key][0]

    def note(self, buffer: ReplayBuffer, byte_count: int) -> None:
        """So many more bytes are kept in a buffer."""
        self.byte_count += byte_count
        self._shares[buffer.organization_id].byte_count += byte_count
        if byte_count > 0:
            self._make_room()

    def _make_room(self) -> None:
        """Evict the oldest answers of the largest owner until the bound holds; an owner below an equal share loses none.

        What requests keep that run is no answer yet: their buffers drop the oldest by themselves when the next delta comes.
        """
        while self.byte_count > self._bytes_max:
            equal_share = self._bytes_max // len(self._shares)
            above = [share for share in self._shares.values() if share.ended and share.byte_count > equal_share]
            if not above:
                return
            self.forget(next(iter(max(above, key=lambda share: share.byte_count).ended)))

    def forget(self, key: Key) -> None:
        """Give up what is kept of a request that has ended, if anything is."""
        organization_id = self._ended.pop(key, None)
        if organization_id is None:
            return
        output, buffer, timer = self._shares[organization_id].ended.pop(key)
        timer.cancel()
        output.forget()
        buffer.forget()
        self._tidy(organization_id)

    def forget_all(self) -> None:
        """The same for every request that has ended."""
        for key in tuple(self._ended):
            self.forget(key)

    def _tidy(self, organization_id: uuid.UUID) -> None:
        share = self._shares[organization_id]
        if not share.live and not share.ended:
            del self._shares[organization_id]
