"""Replay buffers: output kept in memory for clients that may reconnect, limited per request,
organization and process.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from metering.holds.journal import Delivered, UsageJournal

FRAME_BYTES = 48  # memory overhead of a kept frame in CPython
# A full buffer drops an eighth at once, since shifting the rest costs more than a frame.
DROPPED_SHARE = 8

Key = tuple[uuid.UUID, uuid.UUID]  # project and request; request ids are unique within a project


class KeptOutput(Protocol):
    """Kept output of an ended request. `subscription` is the stream that receives it, or None."""

    @property
    def buffer(self) -> ReplayBuffer: ...

    @property
    def subscription(self) -> object | None: ...

    def forget(self) -> None:
        """End the current subscription, because the replay buffer is dropped."""
        ...


Kept = TypeVar("Kept", bound=KeptOutput)


class ReplayBuffer:
    """Encoded deltas of one request, from `first_seq` on. Created by `ReplayBuffers.open`."""

    def __init__(
        self, journal: UsageJournal, owner: ReplayBuffers[Any], organization_id: uuid.UUID
    ) -> None:
        """The buffer uses memory from the share of the organization `organization_id`."""
        self.organization_id = organization_id
        self.first_seq = 1
        self.byte_count = 0
        self._deltas: list[bytes] = []
        self._token_counts: list[tuple[int, int]] = []  # with those of reasoning
        self._journal = journal
        self._owner = owner

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest delta."""
        return self.first_seq + len(self._deltas) - 1

    def record(self, delivered: Delivered) -> None:
        """Journal tokens before `put`. Raises JournalUnavailable; then they must not be put."""
        self._journal.record([delivered])

    def put(
        self, delta: bytes, token_count: int, unread_seq: int, reasoning_token_count: int = 0
    ) -> bool:
        """Append a delta, and drop the oldest ones if there is no room.

        Returns False if deltas from `unread_seq` on, which the reader has not received, were
        dropped; unread deltas may take twice the room first.
        """
        self._deltas.append(delta)
        self._token_counts.append((token_count, reasoning_token_count))
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

    def get(self, seq: int) -> tuple[bytes, int, int]:
        """Return a kept delta, its number of tokens, and how many of them are reasoning."""
        index = seq - self.first_seq
        return self._deltas[index], *self._token_counts[index]

    def token_counts_after(self, seq: int) -> tuple[int, int]:
        """Count the tokens of all kept deltas after `seq`, and how many of them are reasoning."""
        after = self._token_counts[seq + 1 - self.first_seq :]
        return sum(count for count, _ in after), sum(count for _, count in after)

    def forget(self) -> None:
        """Drop all deltas."""
        self._cut(len(self._deltas))

    def _drop(self, allowance: int, before_seq: int) -> None:
        """Drop the oldest deltas before `before_seq` until an eighth of the allowance is free."""
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
class Share(Generic[Kept]):
    """Replay buffers of one organization: of running requests, and kept ones, oldest first."""

    live: set[ReplayBuffer] = field(default_factory=set)
    ended: dict[Key, tuple[Kept, ReplayBuffer, asyncio.TimerHandle]] = field(default_factory=dict)
    byte_count: int = 0


class ReplayBuffers(Generic[Kept]):
    """All replay buffers of a process: of running requests, and of ended ones that are kept.

    Memory is shared fairly between organizations: when it is full, the organization with the most
    bytes loses its oldest kept answer. An organization below its equal share loses nothing.
    """

    def __init__(
        self, journal: UsageJournal, *, bytes_max: int, bytes_per_request_max: int
    ) -> None:
        self.byte_count = 0
        self._journal = journal
        self._bytes_max = bytes_max
        self._bytes_per_request_max = bytes_per_request_max
        self._shares: dict[uuid.UUID, Share[Kept]] = {}  # by organization; no entry if empty
        self._ended: dict[Key, uuid.UUID] = {}  # organization of each ended request that is kept

    def allowance(self, organization_id: uuid.UUID) -> int:
        """Return how many bytes each running request of the organization may keep."""
        live_count = (
            len(self._shares[organization_id].live) if organization_id in self._shares else 0
        )
        return min(
            self._bytes_per_request_max,
            self._bytes_max // max(len(self._shares), 1) // max(live_count, 1),
        )

    @property
    def live_count(self) -> int:
        """Number of replay buffers of running requests."""
        return sum(len(share.live) for share in self._shares.values())

    @property
    def ended_count(self) -> int:
        """Number of ended requests whose output is kept."""
        return len(self._ended)

    def open(self, organization_id: uuid.UUID) -> ReplayBuffer:
        """Create a buffer for a request that starts. The caller must `close` or `keep` it once."""
        buffer = ReplayBuffer(self._journal, self, organization_id)
        self._shares.setdefault(organization_id, Share()).live.add(buffer)
        return buffer

    def close(self, buffer: ReplayBuffer) -> None:
        """Release the buffer of a request that has ended and whose output is not kept."""
        buffer.forget()
        self._shares[buffer.organization_id].live.discard(buffer)
        self._tidy(buffer.organization_id)

    def keep(self, key: Key, output: Kept, seconds: float) -> None:
        """Keep the output of an ended request for `seconds`, unless the memory is needed sooner."""
        buffer = output.buffer
        self.forget(key)  # an id may return after an attempt that left no trace in the database
        timer = asyncio.get_running_loop().call_later(seconds, self._expire, key, seconds)
        share = self._shares[buffer.organization_id]
        share.live.discard(buffer)
        share.ended[key] = output, buffer, timer
        self._ended[key] = buffer.organization_id
        self._make_room()

    def _expire(self, key: Key, seconds: float) -> None:
        """Drop expired output, but let a client that is reading it finish."""
        ended = self._shares[self._ended[key]].ended
        output, buffer, _ = ended[key]
        if output.subscription is None:
            self.forget(key)
        else:
            timer = asyncio.get_running_loop().call_later(seconds, self._expire, key, seconds)
            ended[key] = output, buffer, timer

    def find(self, key: Key) -> Kept | None:
        """Return the kept output of an ended request; None if none is kept."""
        organization_id = self._ended.get(key)
        return None if organization_id is None else self._shares[organization_id].ended[key][0]

    def note(self, buffer: ReplayBuffer, byte_count: int) -> None:
        """Count bytes that a buffer has added or, if negative, dropped."""
        self.byte_count += byte_count
        self._shares[buffer.organization_id].byte_count += byte_count
        if byte_count > 0:
            self._make_room()

    def _make_room(self) -> None:
        """Drop the oldest kept answers of the largest organization until the memory limit is met.

        Organizations below an equal share lose none. Running requests drop old deltas when they add
        the next one.
        """
        while self.byte_count > self._bytes_max:
            equal_share = self._bytes_max // len(self._shares)
            above = [
                share
                for share in self._shares.values()
                if share.ended and share.byte_count > equal_share
            ]
            if not above:
                return
            self.forget(next(iter(max(above, key=lambda share: share.byte_count).ended)))

    def forget(self, key: Key) -> None:
        """Drop the kept output of an ended request, if there is any."""
        organization_id = self._ended.pop(key, None)
        if organization_id is None:
            return
        output, buffer, timer = self._shares[organization_id].ended.pop(key)
        timer.cancel()
        output.forget()
        buffer.forget()
        self._tidy(organization_id)

    def _tidy(self, organization_id: uuid.UUID) -> None:
        share = self._shares[organization_id]
        if not share.live and not share.ended:
            del self._shares[organization_id]
