"""Which keys have changed lately: so that a look-up which was under way meanwhile is done again."""

from __future__ import annotations

import uuid
from collections import OrderedDict

KEYS_MAX = 10_000  # that are remembered; a look-up that is older than the oldest of them counts as one of a changed key


class KeyChanges:
    """Those that this process has heard of. count: how many that are."""

    def __init__(self) -> None:
        self.count = 0
        self._last: OrderedDict[uuid.UUID, int] = OrderedDict()  # the number of its last change, by key
        self._forgotten = 0  # the number up to which changes are not remembered any more

    def note(self, api_key_id: uuid.UUID) -> None:
        """The key has changed."""
        self.count += 1
        self._last[api_key_id] = self.count
        self._last.move_to_end(api_key_id)
        if len(self._last) > KEYS_MAX:
            self._forgotten = self._last.popitem(last=False)[1]

    def since(self, count: int, api_key_id: uuid.UUID) -> bool:
        """Whether the key may have changed since there were so many."""
        return self._last.get(api_key_id, self._forgotten) > count
