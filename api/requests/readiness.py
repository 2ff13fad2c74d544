"""Waiting for an engine that a request needs and that does not run: it is started, for so long as the deployment allows."""

from __future__ import annotations

import asyncio

from inference.engine import Backend
from inference.errors import EngineStartFailed

RETRY_S_MIN = 0.1  # seconds: below it a client that was told of a broken engine would be back before anybody noticed


async def wait_until_ready(backend: Backend, model: str, wait_s: float) -> None:
    """Start an engine, and return when it takes requests. model: as clients call it.

    Raises: EngineStartFailed, EngineUnavailable.
    """
    try:
        async with asyncio.timeout(wait_s):
            await backend.start()
    except TimeoutError:
        condition = backend.condition()
        raise EngineStartFailed(
            f"the engine of model {model!r} is still not ready: {condition.reason or condition.state.value}",
            max(condition.retry_after_s, RETRY_S_MIN),
        ) from None
