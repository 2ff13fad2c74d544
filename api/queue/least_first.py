"""The least of many whose keys change: a heap that is corrected when it is looked at. Pure data."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

Member = TypeVar("Member")
Key = tuple[float, int]


class LeastFirst(Generic[Member]):
    """Members in the order of their keys.

    A key that grows need not be told, since an outdated entry is too low and comes up early; one that shrinks must be (`note`).
    """

    def __init__(self, key: Callable[[Member], Key], counts: Callable[[Member], bool]) -> None:
        """counts: whether a member is to be found at the moment; who becomes one that is has to be told, too."""
        self._key = key
        self._counts = counts
        self._heap: list[tuple[Key, int, Member]] = []
        self._listed: dict[Member, Key] = {}  # the one valid entry of each
        self._number = 0  # breaks ties, so that members are never compared

    def note(self, member: Member) -> None:
        """A member counts from now on, or its key may have shrunk."""
        listed, key = self._listed.get(member), self._key(member)
        if listed is None or key < listed:
            self._number += 1
            self._listed[member] = key
            heapq.heappush(self._heap, (key, self._number, member))

    def first(self) -> Member | None:
        """The member with the least key of those that count; None if none does."""
        while self._heap:
            key, number, member = self._heap[0]
            if self._listed.get(member) != key:
                heapq.heappop(self._heap)  # another entry took its place
            elif not self._counts(member):
                heapq.heappop(self._heap)
                del self._listed[member]
            elif (present := self._key(member)) != key:
                self._listed[member] = present
                heapq.heapreplace(self._heap, (present, number, member))
            else:
                return member
        return None

    def __contains__(self, member: Member) -> bool:
        return member in self._listed
