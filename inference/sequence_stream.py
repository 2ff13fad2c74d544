"""The caller's end of a running sequence: a buffer of events between the engine and one reader.

The buffer needs no bound of its own: a choice has at most max_output_tokens + 2 events, and a slow reader delays nobody else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from inference.engine import ChoiceFinished, GenerationRequest, Scheduled, SequenceEvent, SequenceFinished, TokensGenerated
from inference.errors import EngineError


class BufferedStream:
    """Implements `SequenceStream`. One reader; the engine puts events from the same event loop."""

    def __init__(self, number: int, request: GenerationRequest, cancel: Callable[[BufferedStream], None]) -> None:
        self.number = number
        self.request = request
        self.scheduled = False
        self.ended = False
        self.has_output = False
        # Token ids by choice, those from before a continuation included.
        self.outputs: list[list[int]] = [list(request.output_token_ids) for _ in range(request.choice_count)]
        self._cancel = cancel
        self._cancel_sent = False
        self._events: deque[SequenceEvent] = deque()
        self._failure: EngineError | None = None
        self._reader: asyncio.Future[None] | None = None  # while it waits; an `asyncio.Event` costs three times as much per token

    def __aiter__(self) -> AsyncIterator[SequenceEvent]:
        return self

    async def __anext__(self) -> SequenceEvent:
        while not self._events:
            if self._failure is not None:
                raise self._failure
            if self.ended:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._events.popleft()

    def cancel(self) -> None:
        """See `SequenceStream.cancel`."""
        if not self.ended and not self._cancel_sent:
            self._cancel_sent = True
            self._cancel(self)

    def put(self, event: SequenceEvent) -> None:
        """Called by the engine: the sequence's next event."""
        match event:
            case TokensGenerated():
                self.has_output = True
                self.outputs[event.choice_index] += event.token_ids
            case Scheduled():
                self.scheduled = True
            case ChoiceFinished():
                pass
            case SequenceFinished():
                self.ended = True
        self._events.append(event)
        self._wake()

    def fail(self, error: EngineError) -> None:
        """Called by the engine: no more events will come. What came before is still read first."""
        if not self.ended:
            self.ended = True
            self._failure = error
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
