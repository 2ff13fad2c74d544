"""A sequence as its caller sees it, wherever it runs: when its engine is lost, it goes on elsewhere.

Before the first token it begins anew; after that it is continued from its prompt and the tokens that were told. The events are
those of one sequence either way: `Scheduled` once, every token once, counts and times of the whole. Half of a character or of a
stop sequence that the lost engine held back is held back by the next one, which reads the same tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from inference.engine import (
    ChoiceFinished,
    EngineFinishReason,
    EngineTimings,
    GenerationRequest,
    Scheduled,
    SequenceEvent,
    SequenceFinished,
    TokensGenerated,
)
from inference.errors import EngineError, EngineFailed, EngineOverloaded, EngineStartFailed, EngineUnavailable, RequestImpossible

if TYPE_CHECKING:
    from inference.fleet.attempt import Attempt
    from inference.fleet.replica import Replica
    from inference.fleet.replica_set import ReplicaSet

LOSS_COUNT_MAX = 2  # engines that may break under one sequence: it may be what breaks them, and is not to break all of them
PAUSE_S_MIN, PAUSE_S_MAX = 0.02, 0.5  # seconds between looks for a place while there is none

_log = logging.getLogger("weir.inference.fleet")


class FleetStream:
    """Implements `SequenceStream` over one replica after the other. One reader."""

    def __init__(self, fleet: ReplicaSet, request: GenerationRequest) -> None:
        self._fleet = fleet
        self._request = request
        self._attempt: Attempt | None = None
        self._events: AsyncIterator[SequenceEvent] | None = None
        self._cancelled = False
        self._cancel_asked = asyncio.Event()
        self._ended = False
        self._lost_on: list[Replica] = []
        self._refused_by: set[Replica] = set()  # full, as they said after they had taken it
        self._failure_count = 0
        self._migration_count = 0
        self._moved = False
        self._cached_token_count: int | None = None
        self._output: list[int] = []
        self._token_count = 0
        self._is_told = False  # whether output was told, so that it cannot begin anew
        self._opened_at_s = fleet.clock()
        self._scheduled_at_s: float | None = None
        self._first_token_at_s: float | None = None

    async def open(self) -> None:
        """Find the first place. Raises as `Engine.generate` does."""
        await self._enter(self._request)

    async def close(self) -> None:
        """Cancel what still runs and forget it."""
        self._ended = True
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            await attempt.leave()

    def __aiter__(self) -> AsyncIterator[SequenceEvent]:
        return self

    async def __anext__(self) -> SequenceEvent:
        while not self._ended:
            assert self._attempt is not None, "only what is open is read"
            assert self._events is not None
            try:
                event = await anext(self._events)
            except StopAsyncIteration:
                loss: EngineError = EngineFailed("the engine's events ended without a last one")
            except RequestImpossible as error:
                self._ended = True
                if not self._migration_count:
                    raise
                # It was possible where it began: that nobody else can go on with it is not its client's mistake.
                raise EngineFailed(f"no other engine can go on with it: {error}") from error
            except (EngineFailed, EngineUnavailable, EngineOverloaded, EngineStartFailed) as error:
                loss = error
            else:
                if not self._is_closed_under_it(event):
                    if (told := self._tell(self._attempt, event)) is not None:
                        return told
                    continue
                loss = EngineUnavailable("the replica was closed, or drained", retry_after_s=0.0)
            if (end := await self._go_on(loss)) is not None:
                return end
        raise StopAsyncIteration

    def cancel(self) -> None:
        """See `SequenceStream.cancel`."""
        self._cancelled = True
        self._cancel_asked.set()
        if self._attempt is not None and self._attempt.stream is not None:
            self._attempt.stream.cancel()

    def move_from(self, name: str) -> bool:
        """Leave the replica of this name for another, if it runs there, can go on elsewhere, and there is a place.

        The engine is told to end it; that end is then not told, and it goes on from there as after a loss.
        """
        attempt = self._attempt
        if attempt is None or attempt.stream is None or attempt.replica.name != name or self in self._fleet.moving:
            return False
        if self._ended or self._cancelled or not self._may_go_on or not self._fleet.has_place(self._continued()):
            return False
        self._fleet.moving.add(self)
        attempt.stream.cancel()
        return True

    @property
    def _may_go_on(self) -> bool:
        """Whether another engine could have it as it stands: from its beginning, or from where it is."""
        return not self._is_told or self._fleet.could_continue(self._request)

    def _continued(self) -> GenerationRequest:
        """What another engine would be asked now."""
        if not self._output:
            return self._request
        return replace(self._request, output_token_ids=(*self._request.output_token_ids, *self._output))

    def _is_closed_under_it(self, event: SequenceEvent) -> bool:
        """Whether its engine was closed while the set goes on: nobody has cancelled the sequence."""
        cancelled = isinstance(event, SequenceFinished) and event.reason is EngineFinishReason.CANCELLED
        return cancelled and not self._cancelled and not self._fleet.is_closing

    def _tell(self, attempt: Attempt, event: SequenceEvent) -> SequenceEvent | None:
        """An event as one of the whole sequence; None for one that was told before."""
        match event:
            case Scheduled():
                attempt.scheduled(event.cached_token_count)
                if self._cached_token_count is not None:
                    return None
                self._cached_token_count, self._scheduled_at_s = event.cached_token_count, self._fleet.clock()
            case TokensGenerated():
                attempt.generated(len(event.token_ids))
                if not self._is_told:
                    self._is_told, self._first_token_at_s = True, self._fleet.clock()
                self._token_count += len(event.token_ids)
                if self._request.may_be_continued:
                    self._output += event.token_ids
            case ChoiceFinished():
                self._is_told = True
            case SequenceFinished():
                self._ended = True
                self._fleet.note_output(event.generated_token_count)
                if self._moved:
                    return replace(
                        event,
                        cached_token_count=self._cached_token_count or 0,
                        timings=self._timings(),
                        migration_count=self._migration_count,
                    )
        return event

    async def _go_on(self, loss: EngineError) -> SequenceFinished | None:
        """Find another place after a loss; the last event if it was cancelled meanwhile. Raises the loss if there is no place."""
        attempt, self._attempt, self._events = self._attempt, None, None
        assert attempt is not None
        has_failed = isinstance(loss, EngineFailed)
        if has_failed:
            # An engine that lives on says little by failing what has failed elsewhere: three such requests would trip them all.
            if not (self._failure_count and attempt.replica.engine.healthy()):
                attempt.failed(self._fleet.clock())
            self._failure_count += 1
        await attempt.leave()
        # Remote servers take a sequence and refuse it then. All have been asked once one of them refuses again.
        all_refused = isinstance(loss, EngineOverloaded) and attempt.replica in self._refused_by
        if isinstance(loss, EngineOverloaded):
            self._refused_by.add(attempt.replica)
        self._lost_on.append(attempt.replica)
        if self._cancelled:
            return self._cancelled_end()
        if not self._may_go_on or all_refused or self._fleet.is_closing or self._failure_count > LOSS_COUNT_MAX:
            self._ended = True
            raise loss
        # A queue that is full is told at once; whoever has lost a place gets some time to find another.
        wait_s = 0.0 if isinstance(loss, EngineOverloaded) and not self._is_told else self._fleet.recovery_wait_s
        home = attempt.replica if self in self._fleet.moving and not has_failed else None
        try:
            await self._find_place(loss, wait_s, home)
        except EngineError:
            self._ended = True
            raise
        finally:
            self._fleet.moving.discard(self)
        if self._cancelled and self._attempt is None:
            return self._cancelled_end()
        self._note_moved(attempt.replica)
        return None

    async def _find_place(self, loss: EngineError, wait_s: float, home: Replica | None) -> None:
        """Enter another replica, or the same one when it is back; returns without a place once it is cancelled.

        home: where it could have stayed. If nobody else takes it after all, it goes on there, drained or not.
        """
        request, give_up_at_s, pause_s = self._continued(), self._fleet.clock() + wait_s, PAUSE_S_MIN
        while not self._cancelled:
            try:
                await self._enter(request)
                return
            except RequestImpossible:
                raise loss from None
            except (EngineUnavailable, EngineOverloaded, EngineStartFailed):
                if home is not None and await self._returned_to(home, request):
                    return
                if self._fleet.is_closing or self._fleet.clock() >= give_up_at_s:
                    raise loss from None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._cancel_asked.wait()
            pause_s = min(pause_s * 2, PAUSE_S_MAX)

    async def _returned_to(self, home: Replica, request: GenerationRequest) -> bool:
        try:
            self._entered(*await self._fleet.enter_at(home, request))
        except EngineError:
            return False
        return True

    async def _enter(self, request: GenerationRequest) -> None:
        self._entered(*await self._fleet.enter(request, self._lost_on))

    def _entered(self, attempt: Attempt, events: AsyncIterator[SequenceEvent]) -> None:
        self._attempt, self._events = attempt, events
        if self._cancelled and attempt.stream is not None:  # while the engine was taking it
            attempt.stream.cancel()

    def _note_moved(self, lost: Replica) -> None:
        assert self._attempt is not None
        self._moved = True
        if self._is_told:
            self._migration_count += 1
        self._fleet.note_moved(migrated=self._is_told)
        _log.info("a sequence of %d tokens went from %s to %s", self._token_count, lost.name, self._attempt.replica.name)

    def _cancelled_end(self) -> SequenceFinished:
        """Of a sequence that was cancelled, and whose engine cannot tell any more."""
        self._ended = True
        return SequenceFinished(
            reason=EngineFinishReason.CANCELLED,
            text="",
            prompt_token_count=len(self._request.prompt_token_ids),
            cached_token_count=self._cached_token_count or 0,
            generated_token_count=len(self._request.output_token_ids) + self._token_count,
            timings=self._timings(),
            migration_count=self._migration_count,
        )

    def _timings(self) -> EngineTimings:
        """By the set's own clock, since each engine knows a part only; the time between two places is the later phase's."""
        now_s = self._fleet.clock()
        scheduled_s = now_s if self._scheduled_at_s is None else self._scheduled_at_s
        first_token_s = now_s if self._first_token_at_s is None else self._first_token_at_s
        return EngineTimings(
            queue_ms=(scheduled_s - self._opened_at_s) * 1e3,
            prefill_ms=(first_token_s - scheduled_s) * 1e3,
            decode_ms=(now_s - first_token_s) * 1e3,
        )
