"""Engine on a server that a launcher starts: waits for its address, then is a remote engine."""

from __future__ import annotations

import time
from dataclasses import replace

from inference.adapters.launched_replica import LaunchedReplica
from inference.adapters.remote_connection import Link
from inference.adapters.remote_engine import RemoteEngine
from inference.adapters.remote_settings import RemoteSettings, parse_target

PROGRESS_S = 0.5  # between two reports of progress
FRACTION_MAX = 0.95  # of a start that takes longer than the last one
UNKNOWN_LOAD_S = 60.0  # the first estimate, for a model of some billions of parameters


class LaunchedEngine(RemoteEngine):
    """Remote engine whose server runs while an api process wants it."""

    def __init__(self, settings: RemoteSettings, launched: LaunchedReplica) -> None:
        """`settings.target` has the kind of server; `launched` will know its address.

        Raises like `RemoteEngine`.
        """
        super().__init__(settings)
        self._launched = launched
        self._has_connected = False

    async def serve(self) -> None:
        """Implement `Engine.serve`. The server is wanted from the start of the engine on."""
        try:
            await super().serve()
        finally:
            self._launched.leave()

    async def _run(self) -> str:
        self._launched.want()
        while not self.is_closing:
            standing = self._launched.standing
            if standing.address:
                self._settings = replace(self._settings, target=parse_target(standing.address))
                self._link = Link(self._settings)
                self._has_connected = True
                return await super()._run()
            if standing.failure:
                if not self._has_connected:
                    self.cannot_start(standing.failure)
                return standing.failure
            self._load_time_s = standing.load_time_s or UNKNOWN_LOAD_S
            since_s = standing.loading_since_s
            if since_s is None:
                self.loading("memory", 0.0)
            else:
                fraction = (time.monotonic() - since_s) / self._load_time_s
                self.loading("process", min(max(fraction, 0.0), FRACTION_MAX))
            await self._launched.changes(PROGRESS_S)
        return "closed"

    def _kill(self) -> None:
        self._launched.wake()
        super()._kill()
