"""Engine hosts that have imported torch and wait for a model: a cold start that takes one has that behind it.

A spare is a host like any other that was not told yet what to load; nothing is forked, so it shares no state with anybody. Each
takes the memory of an idle Python with torch (some 130 MB), which is why there is none unless asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping

from inference.hosts.host_process import CHILD_ENVIRONMENT, HostProcess, open_host

SPARE_MODULE = "inference.hosts.host"
REPLACE_AFTER_S = 5.0  # seconds after one was taken: it loads its model meanwhile, and is what is waited for
RETRY_AFTER_S = 30.0  # seconds after one could not be started: whoever needs a host then will be told why

_log = logging.getLogger("weir.inference.spare")


class SpareHosts:
    """A few of them. Everything runs on one event loop; `serve` is all that runs in the background."""

    def __init__(self, count: int) -> None:
        """Starts nothing. count: 0 keeps none, and every host is started when it is needed."""
        self._count = count
        self._ready: deque[tuple[HostProcess, contextlib.AsyncExitStack]] = deque()
        self._changed = asyncio.Event()

    @property
    def ready_count(self) -> int:
        """Spares that could be taken now."""
        return sum(host.exit_status is None for host, _ in self._ready)

    async def serve(self) -> None:
        """Keep so many until cancelled; then all that nobody has taken are gone."""
        try:
            while True:
                await self._drop_dead()
                if len(self._ready) >= self._count:
                    self._changed.clear()
                    await self._changed.wait()
                    await asyncio.sleep(REPLACE_AFTER_S)
                elif not await self._add():
                    await asyncio.sleep(RETRY_AFTER_S)
        finally:
            while self._ready:
                await self._ready.popleft()[1].aclose()

    @contextlib.asynccontextmanager
    async def open(self, module: str, environment: Mapping[str, str]) -> AsyncIterator[HostProcess]:
        """As `open_host`, with a spare where there is one of this kind."""
        taken = self._take() if (module, environment) == (SPARE_MODULE, CHILD_ENVIRONMENT) else None
        if taken is None:
            async with open_host(module, environment) as host:
                yield host
            return
        host, stack = taken
        async with stack:
            yield host

    def _take(self) -> tuple[HostProcess, contextlib.AsyncExitStack] | None:
        alive = next((spare for spare in self._ready if spare[0].exit_status is None), None)
        if alive is not None:
            self._ready.remove(alive)
            self._changed.set()
        return alive

    async def _add(self) -> bool:
        stack = contextlib.AsyncExitStack()
        try:
            host = await stack.enter_async_context(open_host(SPARE_MODULE, CHILD_ENVIRONMENT))
        except OSError as error:
            _log.warning("no spare engine host: %s", error)
            return False
        self._ready.append((host, stack))
        return True

    async def _drop_dead(self) -> None:
        for spare in [spare for spare in self._ready if spare[0].exit_status is not None]:
            self._ready.remove(spare)
            await spare[1].aclose()
