"""Waiting for an engine to start, and the errors of requests that the service has to end."""

from __future__ import annotations

import asyncio

from api.core.errors import ApiError, EngineLost, EngineLostMidway, Interrupted
from api.core.statuses import as_sentence, reason_of, retry_after_of, text_of
from inference.engine import Startable
from inference.errors import EngineStartFailed
from metering.holds.operations import Settled

# In seconds; a shorter retry-after would bring clients back before the failure is detected.
RETRY_S_MIN = 0.1


async def wait_until_ready(backend: Startable, model: str, wait_s: float) -> None:
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


def engine_lost(backend: Startable, settled: Settled | None = None) -> ApiError:
    """Build the error of a request whose engine failed.

    `settled` is the final charge, or None. A client that was charged must retry with a new id.
    """
    if settled is not None:
        return EngineLostMidway(settled.delivered_token_count)
    return EngineLost(max(backend.condition().retry_after_s, RETRY_S_MIN))


def interrupted(error: Exception, delivered_token_count: int) -> Exception:
    """Build the error of an admitted request that `error` ended, after these delivered tokens.

    A retry of the same request would only return its usage, so an error that advises one becomes
    an `Interrupted`, unless nothing was delivered.
    """
    if not delivered_token_count or retry_after_of(error) is None:
        return error
    happened = as_sentence(text_of(error).partition(". ")[0])  # without the remedy
    return Interrupted(happened, reason_of(error), delivered_token_count)
