"""Remote engines over a server of `tests/remote_servers`, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from inference.adapters.remote_engine import RemoteEngine
from inference.adapters.remote_settings import RemoteSettings, Service
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.worker_engines import WAIT_S, until
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


@contextlib.asynccontextmanager
async def remote_engine(
    settings: RemoteSettings, *, started: bool = True
) -> AsyncIterator[RemoteEngine]:
    """Yield an engine with its task, closed at the end."""
    engine = RemoteEngine(settings)
    async with asyncio.timeout(4 * WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.serve())
        try:
            if started:
                await engine.start()
            yield engine
        finally:
            await engine.close()
