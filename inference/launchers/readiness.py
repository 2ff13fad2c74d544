"""Wait until a server takes requests, as far as its port shows. The engine examines it later."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from http import HTTPStatus

from inference.adapters.remote_settings import Service, Target
from inference.launchers.http import send
from inference.launchers.launcher import LaunchFailed

POLL_S = 0.2
CONNECT_TIMEOUT_S = 2.0
LIST_TIMEOUT_S = 10.0
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


async def serves_a_model(target: Target) -> bool:
    """Return false if the server lists its models over HTTP, and has none yet.

    A frontend can be healthy before its workers have joined it. The engine examines the rest.
    """
    if target.service is not Service.OPENAI_HTTP:
        return True
    try:
        answer = await send("GET", f"http://{target.address}/v1/models", timeout_s=LIST_TIMEOUT_S)
    except LaunchFailed:
        return False
    if answer.status != HTTPStatus.OK:
        return True
    try:
        return bool(json.loads(answer.body)["data"] != [])
    except (ValueError, KeyError, TypeError):
        return True


async def wait_ready(target: Target, timeout_s: float, fault: Callable[[], str]) -> None:
    """Wait until the server is ready.

    `fault` returns why it cannot become ready any more, or an empty text. Raises: LaunchFailed.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not (await is_ready(target) and await serves_a_model(target)):
                if reason := fault():
                    raise LaunchFailed(reason)
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise LaunchFailed(
            f"{target} took no connection, or had no model, within {timeout_s:g} s: raise"
            " start_timeout_s, or find the reason in the server's own log"
        ) from error
