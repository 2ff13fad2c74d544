"""A sequence on one replica: from when it is placed there until it ends, is lost, or is left. Keeps that replica's books."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

from inference.engine import GenerationRequest, SequenceEvent, SequenceStream
from inference.fleet.placement import Work
from inference.fleet.replica import Replica


class Attempt:
    """One try. Counts from the moment it is made, so that whoever is placed next knows of it; `leave` takes all of it back."""

    def __init__(self, replica: Replica, request: GenerationRequest, work: Work, output_token_count: int, now_s: float) -> None:
        """output_token_count: what its output is expected to be. now_s: of the set's clock."""
        self.replica = replica
        self.stream: SequenceStream | None = None
        self._request = request
        self._work = work
        self._began_at_s = now_s
        self._stack = AsyncExitStack()
        self._found = replica.prefixes.find(work.keys)
        replica.prefixes.sent(work.keys)
        self._is_probe = replica.breaker.begun(now_s)
        self._has_told = False  # whether it has shown if the replica works
        self._has_left = False
        self._output_left = output_token_count
        self._charged = 0
        replica.entered()
        self._charge(work.prompt_token_count - self._found.token_count + output_token_count)

    async def enter(self) -> AsyncIterator[SequenceEvent]:
        """Begin it there; its events. Raises as `Engine.generate` does, and has left then."""
        try:
            self.stream = await self._stack.enter_async_context(self.replica.engine.generate(self._request))
        except BaseException:
            await self.leave()
            raise
        return aiter(self.stream)

    def scheduled(self, cached_token_count: int) -> None:
        """The engine has begun with it, and says what it had cached."""
        self.replica.prefixes.found_missing(self._found, cached_token_count)
        self._charge(self._work.prompt_token_count - cached_token_count + self._output_left)

    def generated(self, token_count: int) -> None:
        """Tokens have come."""
        if not self._has_told:
            self._has_told = True
            self.replica.prefixes.computed(self._work.keys)
            if self.replica.breaker.is_news(self._began_at_s):
                self.replica.breaker.succeeded()
        self._output_left = max(self._output_left - token_count, 1)
        self._charge(self._output_left)

    def failed(self, now_s: float) -> None:
        """The engine has broken under it."""
        self._has_told = True
        self.replica.breaker.failed(self._began_at_s, now_s)

    async def leave(self) -> None:
        """It runs here no more; idempotent."""
        if not self._has_left:
            self._has_left = True
            self._charge(0)
            self.replica.left()
            if self._is_probe and not self._has_told:
                self.replica.breaker.told_nothing()
        await self._stack.aclose()

    def _charge(self, token_count: int) -> None:
        """Set what of the replica's outstanding tokens is this one's."""
        self.replica.outstanding_token_count += token_count - self._charged
        self._charged = token_count
