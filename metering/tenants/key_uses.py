"""When each key was last used: gathered in memory, and written for all keys by one statement a minute.

A table of its own, which nothing else writes: a statement that waits there holds up nobody who comes in, and no change of a key.
Owns what this process has not written yet. What a process that is killed had gathered is lost, a minute of it at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import OrderedDict
from collections.abc import Callable

import structlog
from sqlalchemy import text

from metering.core.errors import StoreAway
from metering.store.db import Sessions, patience

KEYS_MAX = 10_000  # that wait to be written, of some 200 bytes each; beyond it those that were used longest ago are not told
WRITE_EARLY_AT = KEYS_MAX // 2  # so many different keys in one minute are written sooner than at its end
INTERVAL_MIN_S = 1.0  # between two writes, however many keys there are
ANSWER_WAIT_S = 5.0  # far above what so small a statement takes; the next one tells the same

# Ages, not times: the clock is the database's, whatever this machine's says. In the order of the ids, so that two processes that
# write the same keys wait for each other in turn, and never in a circle.
WRITE = text("""
INSERT INTO api_key_uses AS u (api_key_id, last_used_at)
SELECT used.api_key_id, now() - used.age_s * interval '1 second'
FROM unnest(CAST(:ids AS uuid[]), CAST(:ages AS float8[])) AS used(api_key_id, age_s) ORDER BY used.api_key_id
ON CONFLICT (api_key_id) DO UPDATE SET last_used_at = excluded.last_used_at WHERE u.last_used_at < excluded.last_used_at
""")

log = structlog.get_logger(__name__)


class KeyUses:
    """Those of one process. `run` must be running for any to be written, and `write` is called once more at its end."""

    def __init__(self, sessions: Sessions, interval_s: float, clock: Callable[[], float]) -> None:
        """interval_s: between two writes. clock: in seconds, of this machine, which goes on while it sleeps."""
        self._sessions = sessions
        self._interval_s = interval_s
        self._clock = clock
        self._noted: OrderedDict[uuid.UUID, float] = OrderedDict()  # when, by the key's id; used last stands last
        self._many = asyncio.Event()
        self._untold_count = 0

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, api_key_id: uuid.UUID) -> None:
        """The key is used now. Never blocks."""
        self._noted[api_key_id] = self._clock()
        self._noted.move_to_end(api_key_id)
        if len(self._noted) >= WRITE_EARLY_AT:
            self._many.set()
        if len(self._noted) > KEYS_MAX:  # the database is away
            self._noted.popitem(last=False)
            self._untold_count += 1

    async def run(self) -> None:
        """Write once in each interval, until cancelled."""
        while True:
            least_s = min(INTERVAL_MIN_S, self._interval_s)
            await asyncio.sleep(least_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s - least_s):
                    await self._many.wait()
            await self.write()

    async def write(self) -> None:
        """Write what was gathered. What cannot be written now is kept for the next time."""
        self._many.clear()
        noted, self._noted = self._noted, OrderedDict()
        if not noted:
            return
        now = self._clock()
        try:
            with patience(ANSWER_WAIT_S):
                async with self._sessions.begin() as session:
                    await session.execute(WRITE, {"ids": list(noted), "ages": [now - at for at in noted.values()]})
        except StoreAway as away:
            self._keep(noted)
            log.info("key_uses_not_written", cause=str(away), key_count=len(self._noted))
        except BaseException:  # cancelled, at the end: the last write tells them
            self._keep(noted)
            raise
        if self._untold_count:
            log.warning("key_uses_lost", key_count=self._untold_count)
            self._untold_count = 0

    def _keep(self, noted: OrderedDict[uuid.UUID, float]) -> None:
        """Put back what was not written, before what has come meanwhile."""
        later, self._noted = self._noted, noted
        for api_key_id, at in later.items():
            self._noted[api_key_id] = at
            self._noted.move_to_end(api_key_id)
        while len(self._noted) > KEYS_MAX:
            self._noted.popitem(last=False)
            self._untold_count += 1
