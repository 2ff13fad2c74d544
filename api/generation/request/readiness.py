"""Waiting for an engine to start, and the error of a request whose engine has failed."""

from __future__ import annotations

import asyncio

from api.core.errors import ApiError, EngineLost, EngineLostMidway
from inference.engine import Backend
from inference.errors import EngineStartFailed
from metering.holds.operations import Settled

# In seconds; a shorter retry-after would bring clients back before the failure is detected.
RETRY_S_MIN = 0.1


async def wait_until_ready(backend: Backend, model: str, wait_s: float) -> None:
    """Start a backend and wait up to `wait_s` until it is ready.

    `model` is for error messages. Raises: EngineStartFailed, EngineUnavailable.
    """
    try:
        async with asyncio.timeout(wait_s):
            await backend.start()
    except TimeoutError:
        condition = backend.condition()
        raise EngineStartFailed(
            f"The engine of the model {model!r} is still not ready:"
            f" {condition.client_message or condition.reason or condition.state.value}.",
            max(condition.retry_after_s, RETRY_S_MIN),
        ) from None


def engine_lost(backend: Backend, settled: Settled | None = None) -> ApiError:
    """Build the error of a request whose engine failed.

    `settled` is the final charge, or None. A client that was charged must retry with a new id.
    """
    if settled is not None:
        return EngineLostMidway(settled.delivered_token_count)
    return EngineLost(max(backend.condition().retry_after_s, RETRY_S_MIN))
