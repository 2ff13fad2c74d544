"""How an api process ends: it takes nothing new, sends clients to other processes, and lets finish what runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import grpc.aio
import structlog

from api.core.errors import Draining
from api.core.settings import Settings
from api.generation.admission import Capacity
from api.generation.process import Process
from api.openai.listener import Listener

SETTLE_GRACE_S = 10.0  # after the drain time, for the settlement of what was still running

log = structlog.get_logger(__name__)


async def drain(settings: Settings, capacity: Capacity, process: Process, server: grpc.aio.Server, listener: Listener) -> None:
    """Let running requests finish within the drain time; the rest ends settled. Clients are sent to other servers meanwhile."""
    capacity.drain()
    async with asyncio.TaskGroup() as tasks:
        sending_away = tasks.create_task(send_away(settings, server, listener), name="sending away")
        await finish(settings, capacity, process)
        sending_away.cancel()


async def send_away(settings: Settings, server: grpc.aio.Server, listener: Listener) -> None:
    """Take no connections any more, and no calls on those there are. Streams go on; what they begin is refused."""
    await asyncio.sleep(settings.drain_notice_s)
    listener.send_away()
    await server.stop(grace=settings.drain_s + SETTLE_GRACE_S)


async def finish(settings: Settings, capacity: Capacity, process: Process) -> None:
    """Wait for what runs, and end what takes too long."""
    try:
        async with asyncio.timeout(settings.drain_s):
            await capacity.idle()
            if process.relays is not None:
                await process.relays.idle()
    except TimeoutError:
        log.warning("drain_time_over", running_request_count=capacity.taken_count)
        process.fail_all(Draining("this server has shut down before the request was done; what was delivered is settled"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_GRACE_S):
                await capacity.idle()


@contextlib.contextmanager
def stop_signals(stopping: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT begin the drain."""
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stopping.set)
    yield
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(signal_number)
