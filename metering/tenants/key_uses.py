"""Last use of each key: collected in memory, and written for all keys by one statement per minute.

The table is written by nothing else: a statement that waits there delays no request and no change
of a key. Owns the uses not yet written. A killed process loses those, at most those of a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import OrderedDict
from collections.abc import Callable

import structlog
from sqlalchemy import text

from metering.core.errors import DatabaseUnavailable
from metering.store.db import Sessions, patience

KEYS_MAX = 10_000  # unwritten keys, some 200 bytes each; beyond it the oldest uses are dropped
# With this many different keys a write happens before the interval ends.
WRITE_EARLY_AT = KEYS_MAX // 2
INTERVAL_MIN_S = 1.0  # minimum between two writes
ANSWER_WAIT_S = 5.0  # far above the duration of the statement; the next one repeats the data

# Ages, not times, since only the database's clock counts. Sorted by id, so that two processes that
# write the same keys do not deadlock.
WRITE = text("""
INSERT INTO api_key_uses AS u (api_key_id, last_used_at)
SELECT used.api_key_id, now() - used.age_s * interval '1 second'
FROM unnest(CAST(:ids AS uuid[]), CAST(:ages AS float8[])) AS used(api_key_id, age_s)
ORDER BY used.api_key_id
ON CONFLICT (api_key_id) DO UPDATE
SET last_used_at = excluded.last_used_at
WHERE u.last_used_at < excluded.last_used_at
""")

log = structlog.get_logger(__name__)


class KeyUses:
    """Collector of the last uses of keys. `run` writes them regularly; `write` writes the rest."""

    def __init__(self, sessions: Sessions, interval_s: float, clock: Callable[[], float]) -> None:
        """Prepare; `run` writes every `interval_s`. `clock` is in seconds and runs during sleep."""
        self._sessions = sessions
        self._interval_s = interval_s
        self._clock = clock
        # Time by the key's id; the latest use last.
        self._noted: OrderedDict[uuid.UUID, float] = OrderedDict()
        self._many = asyncio.Event()
        self._dropped_count = 0

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, api_key_id: uuid.UUID) -> None:
        """Record a use of the key. Never blocks."""
        self._noted[api_key_id] = self._clock()
        self._noted.move_to_end(api_key_id)
        if len(self._noted) >= WRITE_EARLY_AT:
            self._many.set()
        if len(self._noted) > KEYS_MAX:  # the database is unavailable
            self._noted.popitem(last=False)
            self._dropped_count += 1

    async def run(self) -> None:
        """Write once per interval until cancelled."""
        while True:
            shortest_s = min(INTERVAL_MIN_S, self._interval_s)
            await asyncio.sleep(shortest_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s - shortest_s):
                    await self._many.wait()
            await self.write()

    async def write(self) -> None:
        """Write the collected uses. If that fails, they are kept for the next write."""
        self._many.clear()
        noted, self._noted = self._noted, OrderedDict()
        if not noted:
            return
        now = self._clock()
        try:
            with patience(ANSWER_WAIT_S):
                async with self._sessions.begin() as session:
                    await session.execute(
                        WRITE, {"ids": list(noted), "ages": [now - at for at in noted.values()]}
                    )
        except DatabaseUnavailable as away:
            self._keep(noted)
            log.info("key_uses_not_written", cause=str(away), key_count=len(self._noted))
        except BaseException:  # cancelled at the end: the last write includes them
            self._keep(noted)
            raise
        if self._dropped_count:
            log.warning("key_uses_lost", key_count=self._dropped_count)
            self._dropped_count = 0

    def _keep(self, noted: OrderedDict[uuid.UUID, float]) -> None:
        """Put unwritten uses back, before those recorded meanwhile."""
        later, self._noted = self._noted, noted
        for api_key_id, at in later.items():
            self._noted[api_key_id] = at
            self._noted.move_to_end(api_key_id)
        while len(self._noted) > KEYS_MAX:
            self._noted.popitem(last=False)
            self._dropped_count += 1
