"""Who comes back when told to. Promises put off everybody else, so whoever mints requests and does not come back gets few of them.

Counts are bounded and of this process alone. Pure: times are seconds of the database's clock, handed in.
"""

from __future__ import annotations

import heapq
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

KEY_PROMISES_MAX = 500  # outstanding ones of one key that keeps its word: a crowd of clients behind one key is no attack
ORGANIZATION_PROMISES_MAX = 2000  # of all its keys
BROKEN_PROMISES_MAX = 8  # of one key, beyond as many as it has kept
DOUBTED_PROMISES_MAX = 16  # outstanding ones of a key that has broken more
GRACE_S_MIN, GRACE_SHARE = 2.0, 0.5  # how late a client may be: clocks, jitter, the way of the message; and a share of the wait
REMEMBERED_MAX = 64  # returns of one key, after which older ones count half

RequestKey = tuple[uuid.UUID, uuid.UUID]  # project and request id


class Asker(NamedTuple):
    """Behind a request: whose promises are counted together."""

    organization_id: uuid.UUID
    api_key_id: uuid.UUID


@dataclass(slots=True)
class Record:
    """How often one key's requests came back when told, and did not."""

    kept: int = 0
    broken: int = 0

    @property
    def is_doubted(self) -> bool:
        """Whether it mostly does not come back."""
        return self.broken > self.kept + BROKEN_PROMISES_MAX


class PromiseKeeping:
    """Outstanding promises by request, and what became of earlier ones by key."""

    def __init__(self) -> None:
        self._outstanding: dict[RequestKey, tuple[float, Asker]] = {}
        self._due: list[tuple[float, float, RequestKey]] = []  # when it is broken, and the time told
        self._by_key: Counter[uuid.UUID] = Counter()
        self._by_organization: Counter[uuid.UUID] = Counter()
        self._records: dict[uuid.UUID, Record] = {}  # the latest to change last

    def may_have_one_more(self, asker: Asker, now_s: float) -> bool:
        """Whether room may be laid aside for another request of this key."""
        self._note_broken(now_s)
        most = DOUBTED_PROMISES_MAX if self.is_doubted(asker.api_key_id) else KEY_PROMISES_MAX
        within = self._by_organization[asker.organization_id] < ORGANIZATION_PROMISES_MAX
        return within and self._by_key[asker.api_key_id] < most

    def is_doubted(self, api_key_id: uuid.UUID) -> bool:
        """Whether this key's requests mostly do not come back: what is promised to them then puts nobody off."""
        record = self._records.get(api_key_id)
        return record is not None and record.is_doubted

    def made(self, request: RequestKey, asker: Asker, now_s: float, at_s: float) -> None:
        """A request was told to come then, with room laid aside."""
        self._forget(request)
        self._outstanding[request] = (at_s, asker)
        self._by_key[asker.api_key_id] += 1
        self._by_organization[asker.organization_id] += 1
        heapq.heappush(self._due, (at_s + max(GRACE_S_MIN, GRACE_SHARE * (at_s - now_s)), at_s, request))
        if len(self._due) > 2 * len(self._outstanding) + REMEMBERED_MAX:
            self._drop_past()

    def returned(self, request: RequestKey, now_s: float) -> None:
        """A request asks again, or was let in. Too early is not yet kept."""
        at_s, asker = self._outstanding.get(request, (None, None))
        if at_s is not None and asker is not None and now_s >= at_s:
            self._forget(request)
            self._count(asker.api_key_id, kept=True)

    def _note_broken(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            _, at_s, request = heapq.heappop(self._due)
            standing = self._outstanding.get(request)
            if standing is not None and standing[0] == at_s:
                self._forget(request)
                self._count(standing[1].api_key_id, kept=False)

    def _drop_past(self) -> None:
        """Of promises that were kept, or given again with another time, nothing is due: some would be so for a month only."""
        due: dict[RequestKey, tuple[float, float, RequestKey]] = {}
        for each in sorted(self._due):
            standing = self._outstanding.get(each[2])
            if standing is not None and standing[0] == each[1]:
                due.setdefault(each[2], each)
        self._due = list(due.values())  # sorted, and so a heap

    def _count(self, api_key_id: uuid.UUID, *, kept: bool) -> None:
        record = self._records.pop(api_key_id, None) or Record()
        self._records[api_key_id] = record
        record.kept += kept
        record.broken += not kept
        if record.kept + record.broken > REMEMBERED_MAX:
            record.kept, record.broken = record.kept // 2, record.broken // 2
        if len(self._records) > ORGANIZATION_PROMISES_MAX:
            del self._records[next(iter(self._records))]

    def _forget(self, request: RequestKey) -> None:
        standing = self._outstanding.pop(request, None)
        if standing is not None:
            for counts, key in ((self._by_key, standing[1].api_key_id), (self._by_organization, standing[1].organization_id)):
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]
