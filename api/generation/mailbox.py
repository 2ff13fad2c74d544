"""Replay buffers: output that is kept in memory for clients that may come back, bounded by request, by organization and in all.

A token that is put into a mailbox has been delivered: the client has asked the server to take delivery for it. It stands in the
usage journal before anybody can read it here, and reading it again counts nothing.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weir.v1 import inference_service_pb2 as pb

from api.generation.outbox import Tally, journal_entry
from metering.holds.journal import UsageJournal

if TYPE_CHECKING:
    from api.generation.feed import Feed

FRAME_BYTES = 48  # that a kept frame takes beside its own bytes, in CPython
DROPPED_SHARE = 8  # when a mailbox is full an eighth of it goes at once: shifting the rest costs more than a frame

Key = tuple[uuid.UUID, uuid.UUID]  # project and request: ids of requests are unique within a project


class Mailbox:
    """The deltas of one request, as bytes, from `first_seq` on. Made by `Mailboxes.open`."""

    def __init__(self, journal: UsageJournal, owner: Mailboxes, organization_id: uuid.UUID) -> None:
        """organization_id: whose share of the room it takes."""
        self.organization_id = organization_id
        self.first_seq = 1
        self.byte_count = 0
        self._frames: list[bytes] = []
        self._token_counts: list[int] = []
        self._journal = journal
        self._owner = owner

    @property
    def last_seq(self) -> int:
        """Of the newest delta."""
        return self.first_seq + len(self._frames) - 1

    def take_delivery(self, tally: Tally, token_count: int) -> None:
        """Count tokens that are about to be put here. Raises: OSError if the journal cannot be written; nothing is counted then."""
        total = tally.usage.delivered_token_count + token_count
        self._journal.record([journal_entry(tally, total)])
        tally.usage.delivered_token_count = total

    def put(self, frame: pb.DeltaFrame, unread_seq: int) -> bool:
        """Keep one more delta; drops the oldest where there is no room. unread_seq: the first that the reader has not got.

        What the reader has not got may take as much room again. Whether all of it could be kept.
        """
        data = frame.SerializeToString()
        self._frames.append(data)
        self._token_counts.append(len(frame.token_ids))
        self.byte_count += len(data) + FRAME_BYTES
        self._owner.note(self, len(data) + FRAME_BYTES)
        allowance = self._owner.allowance(self.organization_id)
        if self.byte_count <= allowance:
            return True
        self._drop(allowance, unread_seq)
        if self.byte_count <= 2 * allowance:
            return True
        self._drop(allowance, self.last_seq + 1)
        return False

    def get(self, seq: int) -> tuple[pb.DeltaFrame, int]:
        """A delta that is kept, and its tokens."""
        index = seq - self.first_seq
        return pb.DeltaFrame.FromString(self._frames[index]), self._token_counts[index]

    def token_count_until(self, seq: int, tally: Tally) -> int:
        """Tokens of all deltas up to this one, whether they are still here or not."""
        return tally.usage.delivered_token_count - sum(self._token_counts[seq + 1 - self.first_seq :])

    def forget(self) -> None:
        """Give all of it up."""
        self._cut(len(self._frames))

    def _drop(self, allowance: int, before_seq: int) -> None:
        """Drop the oldest, down to an eighth below the allowance, but none from `before_seq` on."""
        excess = self.byte_count - allowance + allowance // DROPPED_SHARE
        count, droppable_count = 0, min(before_seq - self.first_seq, len(self._frames) - 1)
        while excess > 0 and count < droppable_count:
            excess -= len(self._frames[count]) + FRAME_BYTES
            count += 1
        self._cut(count)

    def _cut(self, count: int) -> None:
        freed = sum(len(data) + FRAME_BYTES for data in self._frames[:count])
        del self._frames[:count], self._token_counts[:count]
        self.first_seq += count
        self.byte_count -= freed
        if freed:
            self._owner.note(self, -freed)


@dataclass(slots=True, eq=False)
class Share:
    """Replay buffers of one organization: of running requests, and of ended ones, oldest first."""

    live: set[Mailbox] = field(default_factory=set)
    ended: dict[Key, tuple[Feed, Mailbox, asyncio.TimerHandle]] = field(default_factory=dict)
    byte_count: int = 0


class Mailboxes:
    """All mailboxes of this process: those of requests that run, and for a while those of requests that have ended.

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
        """Mailboxes of requests that run."""
        return sum(len(share.live) for share in self._shares.values())

    @property
    def ended_count(self) -> int:
        """Requests that have ended and can still be received."""
        return len(self._ended)

    def open(self, organization_id: uuid.UUID) -> Mailbox:
        """For a request of the organization that begins; `close` or `keep` follows once."""
        mailbox = Mailbox(self._journal, self, organization_id)
        self._shares.setdefault(organization_id, Share()).live.add(mailbox)
        return mailbox

    def close(self, mailbox: Mailbox) -> None:
        """Its request has ended, and nobody can ask for its output."""
        mailbox.forget()
        self._shares[mailbox.organization_id].live.discard(mailbox)
        self._tidy(mailbox.organization_id)

    def keep(self, key: Key, feed: Feed, mailbox: Mailbox, seconds: float) -> None:
        """Its request has ended, and its output can be asked for so long, unless the organization keeps too much by then."""
        self.forget(key)  # an id may come again after an attempt that left no trace in the books
        timer = asyncio.get_running_loop().call_later(seconds, self._expire, key, seconds)
        share = self._shares[mailbox.organization_id]
        share.live.discard(mailbox)
        share.ended[key] = feed, mailbox, timer
        self._ended[key] = mailbox.organization_id
        self._make_room()

    def _expire(self, key: Key, seconds: float) -> None:
        """The time is over; whoever is just reading may read on."""
        ended = self._shares[self._ended[key]].ended
        feed, mailbox, _ = ended[key]
        if feed.receiver is None:
            self.forget(key)
        else:
            timer = asyncio.get_running_loop().call_later(seconds, self._expire, key, seconds)
            ended[key] = feed, mailbox, timer

    def find(self, key: Key) -> Feed | None:
        """What is kept of a request that has ended."""
        organization_id = self._ended.get(key)
        return None if organization_id is None else self._shares[organization_id].ended[key][0]

    def note(self, mailbox: Mailbox, byte_count: int) -> None:
        """So many more bytes are kept in a mailbox."""
        self.byte_count += byte_count
        self._shares[mailbox.organization_id].byte_count += byte_count
        if byte_count > 0:
            self._make_room()

    def _make_room(self) -> None:
        """Evict the oldest answers of the largest owner until the bound holds; an owner below an equal share loses none.

        What requests keep that run is no answer yet: their mailboxes drop the oldest by themselves when the next delta comes.
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
        feed, mailbox, timer = self._shares[organization_id].ended.pop(key)
        timer.cancel()
        feed.forget()
        mailbox.forget()
        self._tidy(organization_id)

    def forget_all(self) -> None:
        """The same for every request that has ended."""
        for key in tuple(self._ended):
            self.forget(key)

    def _tidy(self, organization_id: uuid.UUID) -> None:
        share = self._shares[organization_id]
        if not share.live and not share.ended:
            del self._shares[organization_id]
