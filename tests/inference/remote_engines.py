"""Remote engines over a server of `tests/remote_servers`, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from inference.adapters.remote_engine import RemoteEngine
from inference.adapters.remote_settings import RemoteSettings, Service
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.worker_engines import served, until
from tests.remote_servers.serving import ServerProcess


@dataclass(frozen=True)
class RemoteWorld:
    """A server, and the settings of an engine that uses it."""

    server: ServerProcess
    settings: RemoteSettings


def remote_settings(
    tiny: TinyCheckpoint, server: ServerProcess, service: Service, **changes: Any
) -> RemoteSettings:
    """Return settings with short waits."""
    quick: dict[str, Any] = {
        "poll_interval_s": 0.05,
        "restart_delay_s_min": 0.05,
        "restart_delay_s_max": 0.2,
    }
    target = changes.pop("target", server.target(service))
    return RemoteSettings(directory=tiny.directory, name="tiny", target=target, **(quick | changes))


@contextlib.asynccontextmanager
async def connected(world: RemoteWorld) -> AsyncIterator[RemoteEngine]:
    """Yield a ready engine; at the end the server holds no block."""
    async with remote_engine(world.settings) as engine:
        yield engine
    await until(lambda: world.server.idle)


def remote_engine(
    settings: RemoteSettings, *, started: bool = True
) -> AbstractAsyncContextManager[RemoteEngine]:
    """Serve an engine during the block."""
    return served(RemoteEngine(settings), started=started)
