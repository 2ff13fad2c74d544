"""Sequence of an engine as an async iterator, for benchmarks and tests.

The server consumes events by callback, without a buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from inference.engine import (
    Engine,
    GenerationRequest,
    SequenceEvent,
    SequenceFinished,
    SequenceHandle,
)
from inference.errors import EngineError


class SequenceStream:
    """Events of one sequence, for one reader. Iteration raises the `EngineError` that ends it."""

    def __init__(self) -> None:
        self.sequence: SequenceHandle  # set when submitted
        self._events: deque[SequenceEvent | EngineError] = deque()
        self._ended = False
        self._reader: asyncio.Future[None] | None = None  # set while it waits

    def __aiter__(self) -> AsyncIterator[SequenceEvent]:
        return self

    async def __anext__(self) -> SequenceEvent:
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        event = self._events.popleft()
        if isinstance(event, EngineError):
            raise event
        return event

    def cancel(self) -> None:
        """Implement `SequenceHandle.cancel`."""
        self.sequence.cancel()

    def put(self, event: SequenceEvent | EngineError) -> None:
        """Add an event. Called by the engine."""
        self._ended = isinstance(event, SequenceFinished | EngineError)
        self._events.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@contextlib.asynccontextmanager
async def stream(engine: Engine, request: GenerationRequest) -> AsyncIterator[SequenceStream]:
    """Run one sequence. Leaving the block cancels it. Raises: as `Engine.submit`."""
    events = SequenceStream()
    events.sequence = engine.submit(request, events.put)
    try:
        yield events
    finally:
        events.sequence.close()
