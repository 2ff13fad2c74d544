"""Wait until a server takes requests, as far as its port shows. The engine examines it later."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from inference.adapters.remote_settings import Service, Target
from inference.launchers.http import send
from inference.launchers.launcher import LaunchFailed

POLL_S = 0.2
CONNECT_TIMEOUT_S = 2.0
# Of `/health`: 200 is ready; servers without that page answer 404 or 405, or ask for their key.
READY_STATUSES = (200, 401, 403, 404, 405)


async def is_ready(target: Target) -> bool:
    """Return whether the server accepts a connection and, over HTTP, reports itself healthy."""
    host, _, port = target.address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    if target.service is not Service.OPENAI_HTTP:
        return True
    try:
        answer = await send("GET", f"http://{target.address}/health", timeout_s=CONNECT_TIMEOUT_S)
    except LaunchFailed:
        return False
    return answer.status in READY_STATUSES


async def wait_ready(target: Target, timeout_s: float, fault: Callable[[], str]) -> None:
    """Wait until the server is ready.

    `fault` returns why it cannot become ready any more, or an empty text. Raises: LaunchFailed.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not await is_ready(target):
                if reason := fault():
                    raise LaunchFailed(reason)
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise LaunchFailed(
            f"{target} took no connection within {timeout_s:g} s: raise start_timeout_s, or find"
            " the reason in the server's own log"
        ) from error
