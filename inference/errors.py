"""Errors of engines, independent of gRPC: `api/core/statuses.py` maps each class to a status."""

from __future__ import annotations

from pathlib import Path
from typing import Self


class EngineError(Exception):
    """Base of all engine errors. `reason` is a machine-readable code; attributes carry the facts.

    client_message: text for clients, set if the error's own text is for operators: it may repeat
    text of a server or a library, or name an address.
    """

    reason = "ENGINE_FAILED"
    client_message = ""

    def with_client_message(self, client_message: str) -> Self:
        """Set `client_message`, and return the error."""
        self.client_message = client_message
        return self


class EngineStartFailed(EngineError):
    """The engine did not start: the checkpoint is unusable, or the worker died while loading.

    retry_after_s: seconds until the next attempt; None if an operator must act.
    """

    reason = "ENGINE_START_FAILED"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineFailed(EngineError):
    """A running engine failed; the sequence cannot continue."""

    reason = "ENGINE_FAILED"


class EngineUnavailable(EngineError):
    """The engine is down or restarting; the same request may succeed after `retry_after_s`."""

    reason = "ENGINE_UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineOverloaded(EngineError):
    """The engine's bounded queue is full; the same request may succeed after `retry_after_s`."""

    reason = "ENGINE_OVERLOADED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestImpossible(EngineError):
    """The request cannot run on this engine, for example because of its grammar or its length.

    field: name of the request field to correct. With `is_unstarted`, a server refused the request
    before it computed anything, even if the sequence was reported as scheduled.
    """

    reason = "REQUEST_IMPOSSIBLE"

    def __init__(
        self, message: str, field: str | None = None, *, is_unstarted: bool = False
    ) -> None:
        super().__init__(message)
        self.field = field
        self.is_unstarted = is_unstarted


class SafetyUnavailable(EngineError):
    """The safety classifiers that must check this text do not answer. Retry after the delay."""

    reason = "SAFETY_UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InvariantViolated(EngineError):
    """The engine found its own state inconsistent, such as blocks neither free nor held."""

    reason = "ENGINE_INVARIANT_VIOLATED"


class CheckpointInvalid(EngineError):
    """A checkpoint cannot be served. `path` is a file or directory; the message has the remedy."""

    reason = "CHECKPOINT_INVALID"

    def __init__(self, path: Path | str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = str(path)


class ChatTemplateFailed(EngineError):
    """The model's chat template refused the conversation; the message is the template's own.

    index: index of the message at fault; None if unknown.
    """

    reason = "CHAT_TEMPLATE_FAILED"

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index
