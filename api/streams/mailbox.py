"""What the server keeps of requests for clients that may come back: their output, in memory, bounded by the request and in all.

A token that is put into a mailbox has been delivered: the client has asked the server to take delivery for it. It stands in the
usage journal before anybody can read it here, and reading it again counts nothing.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from weir.v1 import inference_service_pb2 as pb

from api.streams.outbox import Tally, journal_entry
from metering.holds.journal import UsageJournal

if TYPE_CHECKING:
    from api.streams.feed import Feed

FRAME_BYTES = 48  # that a kept frame takes beside its own bytes, in CPython
DROPPED_SHARE = 8  # when a mailbox is full an eighth of it goes at once: shifting the rest costs more than a frame

Key = tuple[uuid.UUID, uuid.UUID]  # project and request: ids of requests are unique within a project


class Mailbox:
    """The deltas of one request, as bytes, from `first_seq` on. Made by `Mailboxes.open`."""

    def __init__(self, journal: UsageJournal, owner: Mailboxes) -> None:
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
        self._owner.note(len(data) + FRAME_BYTES)
        allowance = self._owner.allowance
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
        self._owner.note(-freed)


class Mailboxes:
    """All mailboxes of this process: those of requests that run, and for a while those of requests that have ended."""

    def __init__(self, journal: UsageJournal, *, bytes_max: int, bytes_per_request_max: int) -> None:
        self.byte_count = 0
        self._journal = journal
        self._bytes_max = bytes_max
        self._bytes_per_request_max = bytes_per_request_max
        self._live_count = 0
        self._ended: dict[Key, tuple[Feed, Mailbox, asyncio.TimerHandle]] = {}  # the one that ended first stands first

    @property
    def allowance(self) -> int:
        """Bytes that each request may keep: less where so many run that all of them would not find room otherwise."""
        return min(self._bytes_per_request_max, self._bytes_max // max(self._live_count, 1))

    @property
    def ended_count(self) -> int:
        """Requests that have ended and can still be received."""
        return len(self._ended)

    def open(self) -> Mailbox:
        """For a request that begins; `close` or `keep` follows once."""
        self._live_count += 1
        return Mailbox(self._journal, self)

    def close(self, mailbox: Mailbox) -> None:
        """Its request has ended, and nobody can ask for its output."""
        self._live_count -= 1
        mailbox.forget()

    def keep(self, key: Key, feed: Feed, mailbox: Mailbox, seconds: float) -> None:
        """Its request has ended, and its output can be asked for so long, if nobody else needs the room before."""
        self._live_count -= 1
        self._forget(key)  # an id may come again after an attempt that left no trace in the books
        timer = asyncio.get_running_loop().call_later(seconds, self._expire, key, seconds)
        self._ended[key] = feed, mailbox, timer
        self.note(0)

    def _expire(self, key: Key, seconds: float) -> None:
        """The time is over; whoever is just reading may read on."""
        feed, mailbox, _ = self._ended[key]
        if feed.receiver is None:
            self._forget(key)
        else:
            timer = asyncio.get_running_loop().call_later(seconds, self._expire, key, seconds)
            self._ended[key] = feed, mailbox, timer

    def find(self, key: Key) -> Feed | None:
        """What is kept of a request that has ended."""
        kept = self._ended.get(key)
        return None if kept is None else kept[0]

    def note(self, byte_count: int) -> None:
        """So many more bytes are kept. Beyond the bound the requests that ended first are forgotten."""
        self.byte_count += byte_count
        while self.byte_count > self._bytes_max and self._ended and byte_count >= 0:
            self._forget(next(iter(self._ended)))

    def _forget(self, key: Key) -> None:
        if (kept := self._ended.pop(key, None)) is not None:
            feed, mailbox, timer = kept
            timer.cancel()
            feed.forget()
            mailbox.forget()
