"""Whether a connection is of use: it is there, and its server is well. Calls back once with the reason when it is not any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from inference.remote.dialect import Dialect
from inference.remote.settings import RemoteSettings

UNANSWERED_MAX = 2  # looks in a row that may go unanswered: one may be lost in a moment of load

_log = logging.getLogger("weir.inference.remote")


class ConnectionWatch:
    """Looks after one connection. lost: called with why it is of no use any more."""

    def __init__(self, dialect: Dialect, channel: grpc.aio.Channel, settings: RemoteSettings, lost: Callable[[str], None]) -> None:
        self._dialect = dialect
        self._channel = channel
        self._settings = settings
        self._lost = lost

    async def watch_channel(self) -> None:
        """Until the connection is lost."""
        while (state := self._channel.get_state()) is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)
        self._lost(f"the connection to {self._settings.target} was lost")

    async def look_often(self) -> None:
        """Ask the server for its health, until it is ill or does not answer."""
        unanswered_count = 0
        while unanswered_count < UNANSWERED_MAX:
            await asyncio.sleep(self._settings.poll_interval_s)
            try:
                fault = await self._dialect.health_fault()
                if fault is not None:
                    self._lost(f"{self._settings.target} says of its health: {fault}")
                    return
                unanswered_count = 0
                await self._read_load()
            except grpc.aio.AioRpcError as error:
                _log.warning("%s does not tell its health: %s", self._settings.target, error.code().name)
                unanswered_count += 1
        self._lost(f"{self._settings.target} does not answer when it is asked for its health")

    async def _read_load(self) -> None:
        """Beside its health."""
