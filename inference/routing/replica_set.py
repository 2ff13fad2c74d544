"""Model served by several replicas, each a separate engine: placement, failover, draining.

Implements `Engine`. `ReplicaSet` decides only where a sequence runs; replicas start, restart and
stop by themselves. `RoutedSequence` is the sequence that callers see, and updates the load of its
replica. When its engine is lost, it continues on another: from the prompt before the first token,
afterwards from the prompt and the reported tokens. Either way its events are those of one sequence:
`Scheduled` once, every token once, counts and times of the whole. A partial character or stop
sequence that the lost engine withheld is withheld by the next one, which reads the same tokens.

Only `serve` runs in the background.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from common.backoff import Backoff
from common.incidents import log_incident
from inference.capabilities import Capabilities, combined
from inference.engine import (
    ChoiceFinished,
    EngineCondition,
    EngineFinishReason,
    EngineState,
    EngineStatistics,
    EngineTimings,
    EventSink,
    GenerationRequest,
    ModelInfo,
    Scheduled,
    SequenceEvent,
    SequenceFinished,
    SequenceHandle,
    TokensGenerated,
    ignore_event,
)
from inference.errors import (
    EngineError,
    EngineFailed,
    EngineOverloaded,
    EngineStartFailed,
    EngineUnavailable,
    RequestImpossible,
)
from inference.routing.placement import PlacementPolicy, PrefixAware, Work
from inference.routing.replica import (
    NOTHING_FOUND,
    Replica,
    Replicas,
    absent,
    unavailable,
)

RECOVERY_WAIT_S = 10.0  # restart time of a small model; clients prefer waiting to a retry
OUTPUT_TOKENS_FIRST = 128  # expected output length before any sequence has ended
OUTPUT_MEMORY = 32  # sequences in the moving average of output lengths
START_PAUSE_S = 0.05  # seconds between checks of replicas that are ready but tripped

LOSS_COUNT_MAX = 2  # engines that may fail under one sequence, which may be the cause
PAUSE_S_MIN, PAUSE_S_MAX = 0.02, 0.5  # seconds between searches for a place
_log = logging.getLogger("weir.inference.routing")


class ReplicaSet(Replicas[Replica]):
    """Several replicas as one engine. Implements `Engine`.

    `start` starts the first `warm_count` replicas, and returns when one of them takes requests. A
    sequence that loses its replica waits up to `recovery_wait_s` seconds for another one.
    """

    def __init__(
        self,
        model: ModelInfo,
        replicas: Sequence[Replica],
        policy: PlacementPolicy | None = None,
        *,
        warm_count: int | None = None,
        recovery_wait_s: float = RECOVERY_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the set. `warm_count` is None for all replicas.

        Callers see `model`, with the capabilities of the replicas.
        """
        super().__init__(
            model, replicas, len(replicas) if warm_count is None else warm_count, clock
        )
        assert len({replica.name for replica in replicas}) == len(replicas), (
            "names of replicas are unique"
        )
        self._combined_model = model
        self._capabilities: tuple[Capabilities, ...] = ()  # of the replicas, combined in the model
        self._policy: PlacementPolicy = policy or PrefixAware()
        self.recovery_wait_s = recovery_wait_s
        self.moving: set[RoutedSequence] = set()  # cancelled by a drain, not yet placed again
        self.sequences: set[RoutedSequence] = set()  # that have not ended
        self.placement_count = 0
        self.mean_output_token_count = float(OUTPUT_TOKENS_FIRST)
        self._migration_count = 0

    @property
    def model(self) -> ModelInfo:
        """Implement `Backend.model`. A connection to a server may change its capabilities."""
        found = []
        for replica in self._replicas:
            found.append(replica.engine.model.capabilities)
        each = tuple(found)
        if each != self._capabilities:
            every = combined(each)
            defaults, _ = every.honoured(self._model.default_sampling)
            self._combined_model = replace(
                self._model, capabilities=every, default_sampling=defaults
            )
            self._capabilities = each
        return self._combined_model

    def place_by(self, policy: type[PlacementPolicy], recovery_wait_s: float) -> None:
        """Place sequences by another policy, and let them wait as long after a loss."""
        if type(self._policy) is not policy:
            self._policy = policy()
        self.recovery_wait_s = recovery_wait_s

    async def _first_start(self, usable: Sequence[Replica]) -> None:
        await super()._first_start(usable)
        if not self.any_takes(usable):  # ready, but its breaker is still open
            waits = [
                replica.breaker.wait_s(self.clock())
                for replica in usable
                if replica.engine.healthy()
            ]
            await asyncio.sleep(max(min(waits, default=0.0), START_PAUSE_S))

    def submit(self, request: GenerationRequest, sink: EventSink) -> RoutedSequence:
        """Implement `Engine.submit`."""
        sequence = RoutedSequence(self, request, sink)
        self.place(sequence, request)
        self.sequences.add(sequence)
        return sequence

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """Implement `Engine.predict_cached_token_count` by the replica that would be chosen now."""
        chosen = self._replicas[0]
        if len(self._replicas) > 1:
            now_s = self.clock()
            candidates = [replica for replica in self._replicas if replica.takes(now_s)] or list(
                self._replicas
            )
            chosen = self._policy.choose(
                candidates, self._policy.work_of(prompt_token_ids, cache_salt)
            )
        return chosen.engine.predict_cached_token_count(prompt_token_ids, cache_salt)

    def statistics(self) -> EngineStatistics:
        """Implement `Engine.statistics` by sums; steps are averaged."""
        if (
            len(self._replicas) == 1
            and not self._replacement_count
            and not self._migration_count
            and not self.has_changed
        ):
            return self._replicas[0].engine.statistics()
        ready_count, statistics = 0, []
        for replica in self._replicas:
            ready_count += replica.engine.healthy()
            statistics.append(replica.engine.statistics())
        return self._statistics.sum_of(
            statistics, ready_count, (self._migration_count, self._replacement_count)
        )

    def move_out(self, name: str) -> int:
        """Move sequences from a drained replica to others with free places; return their number.

        Call it again for the rest. For an unknown name, it returns 0.
        """
        return sum(sequence.move_from(name) for sequence in tuple(self.sequences))

    def has_room(self, request: GenerationRequest) -> bool:
        """Return whether a replica has a free place that is not kept for moving sequences."""
        now_s, free_count = self.clock(), 0
        for replica in {
            replica for tier in self._tiers(request, ()) for replica in tier if replica.takes(now_s)
        }:
            free_count += replica.free_row_count
        return free_count > len(self.moving)

    def could_continue(self, request: GenerationRequest) -> bool:
        """Return whether any replica, available or not, could continue the request's output."""
        return any(replica.engine.model.can_continue(request) for replica in self._replicas)

    def place(
        self, sequence: RoutedSequence, request: GenerationRequest, avoided: Sequence[Replica] = ()
    ) -> None:
        """Submit a sequence to a replica, or to another if it refuses; `avoided` ones are last.

        Raises like `Engine.submit`.
        """
        work = self._work_of(request)
        refusals: list[EngineError] = []
        impossible: RequestImpossible | None = None
        for tier in self._tiers(request, avoided):
            tried: list[Replica] = []
            while True:
                left, now_s = [], self.clock()
                for replica in tier:
                    if replica not in tried and replica.takes(now_s):
                        left.append(replica)
                if not left:
                    break
                replica = left[0] if len(left) == 1 else self._choose(left, request, work)
                tried.append(replica)
                try:
                    return sequence.enter(replica, request, work, self._expected_output(request))
                except (EngineOverloaded, EngineUnavailable, EngineStartFailed) as refusal:
                    refusals.append(refusal)
                except RequestImpossible as fault:  # replicas of a model may be of different kinds
                    impossible = impossible or fault
        if impossible is not None and not refusals:
            raise impossible
        raise self._refusal(request, refusals)

    def place_at(
        self, sequence: RoutedSequence, replica: Replica, request: GenerationRequest
    ) -> None:
        """Submit a sequence to this replica, even a drained one. Raises like `Engine.submit`."""
        if not (replica.engine.healthy() and replica.breaker.admits(self.clock())):
            raise EngineUnavailable(f"replica {replica.name} is not available", retry_after_s=0.0)
        sequence.enter(replica, request, self._work_of(request), self._expected_output(request))

    def note_moved(self, *, migrated: bool) -> None:
        """Count a sequence that moved; `migrated` tells whether it had produced a token."""
        if migrated:
            self._migration_count += 1
        else:
            self._replacement_count += 1

    def _work_of(self, request: GenerationRequest) -> Work:
        if len(self._replicas) == 1:  # no choice: skip the keys that the policy would compute
            return Work(len(request.prompt_token_ids) + len(request.output_token_ids))
        return self._policy.work_of(
            request.prompt_token_ids, request.cache_salt, request.output_token_ids
        )

    def _choose(self, candidates: list[Replica], request: GenerationRequest, work: Work) -> Replica:
        """Choose a replica by the policy, after updating its view of the chosen engine's cache."""
        token_ids = (*request.prompt_token_ids, *request.output_token_ids)
        while True:
            chosen = self._policy.choose(candidates, work)
            found = chosen.prefixes.find(work.keys)
            if len(candidates) == 1 or not found.computed:
                return chosen
            cached_count = chosen.engine.predict_cached_token_count(token_ids, request.cache_salt)
            if not chosen.prefixes.found_missing(found, cached_count):
                return chosen

    def _expected_output(self, request: GenerationRequest) -> int:
        """Estimate the output tokens of a request by the mean of recent sequences."""
        left = request.stop.max_output_tokens - len(request.output_token_ids)
        output = min(max(round(self.mean_output_token_count), 1), max(left, 1))
        return output * (
            request.choice_count if request.beam_search is None else request.beam_search.width
        )

    def _tiers(
        self, request: GenerationRequest, avoided: Sequence[Replica]
    ) -> Iterable[Sequence[Replica]]:
        """Group the allowed replicas by preferred region, with avoided ones last."""
        if not (avoided or request.regions or request.output_token_ids):
            return (self._replicas,)
        return self._chosen_tiers(request, avoided)

    def _chosen_tiers(
        self, request: GenerationRequest, avoided: Sequence[Replica]
    ) -> Iterator[list[Replica]]:
        begun = bool(request.output_token_ids)
        allowed = [
            replica
            for replica in self._replicas
            if not begun or replica.engine.model.can_continue(request)
        ]
        for is_avoided in (False, True):
            rest = [replica for replica in allowed if (replica in avoided) is is_avoided]
            if request.is_bound:
                yield [each for each in rest if each.serves(request.regions, is_bound=True)]
                continue
            if not request.regions:
                yield rest
            for region in request.regions:
                # A replica without a region belongs to the first region only, so it is tried once.
                near = (region, "") if region == request.regions[0] else (region,)
                yield [replica for replica in rest if replica.region in near]

    def _refusal(self, request: GenerationRequest, refusals: Sequence[EngineError]) -> EngineError:
        """Build the error for a request that no replica took."""
        overloads = [
            refusal.retry_after_s for refusal in refusals if isinstance(refusal, EngineOverloaded)
        ]
        if overloads:
            full = (
                "the queues of all replicas are full"
                if len(self._replicas) > 1
                else "the engine's queue is full"
            )
            return EngineOverloaded(full, min(overloads))
        allowed = {replica for tier in self._tiers(request, ()) for replica in tier}
        if not allowed and not request.output_token_ids:
            return absent(self._model, request.regions, is_bound=request.is_bound)
        if not allowed:
            return EngineUnavailable(
                f"no replica in {', '.join(request.regions) or 'this set'} can continue the"
                " sequence",
                0.0,
            )
        return unavailable(self._conditions(allowed), len(self._replicas))

    def _condition_of(self, replica: Replica) -> EngineCondition:
        """Determine a replica's condition, which is READY only if it takes sequences."""
        condition, now_s = replica.engine.condition(), self.clock()
        if condition.state is not EngineState.READY or replica.takes(now_s):
            return condition
        wait_s = replica.breaker.wait_s(now_s)
        reason = (
            "it is being stopped"
            if replica.is_leaving
            else "several sequences in a row have failed on it"
        )
        return EngineCondition(EngineState.RESTARTING, retry_after_s=wait_s, reason=reason)


@dataclass(slots=True)
class Recovery:
    """State of the search for another replica, which runs as event-loop callbacks with growing
    pauses.

    `home` is a drained replica that could still run the sequence. The search ends at `give_up_at_s`
    on the set's clock. `next_poll` is the pending callback.
    """

    loss: EngineError
    home: Replica | None
    give_up_at_s: float
    next_poll: asyncio.Handle
    pauses: Backoff = field(default_factory=lambda: Backoff(PAUSE_S_MIN, PAUSE_S_MAX))


class RoutedSequence:
    """Sequence that may move between replicas. Implements `SequenceHandle`."""

    # State of the whole sequence.
    _is_cancelled = False
    _has_output = False  # reported to the caller, so it cannot start over
    _cached_token_count: int | None = None
    _is_cached_final = False
    _scheduled_at_s: float | None = None
    _first_token_at_s: float | None = None
    # State on its current or last replica.
    _replica: Replica
    _sequence: SequenceHandle  # in its engine
    _is_placed = False
    _is_continuation = False  # the prompt was computed by an earlier replica
    _work: Work
    _found = NOTHING_FOUND
    _began_at_s: float
    _is_probe = False
    _shows_health = False  # whether it has shown that the replica works
    _output_left = 0  # expected output tokens
    _charged = 0  # its part of the replica's outstanding tokens
    # Losses.
    _lost_on: tuple[Replica, ...] = ()
    _refused_by: frozenset[Replica] = frozenset()  # reported as full after they had accepted it
    _failure_count = 0
    _migration_count = 0
    _moved = False
    _recovery: Recovery | None = None  # while it searches for another replica

    def __init__(
        self, replica_set: ReplicaSet, request: GenerationRequest, sink: EventSink
    ) -> None:
        self._replica_set = replica_set
        self._request = request
        self._sink = sink
        self._opened_at_s = replica_set.clock()

    @property
    def outputs(self) -> list[list[int]]:
        """Implement `SequenceHandle.outputs`."""
        return self._sequence.outputs

    def cancel(self) -> None:
        """Implement `SequenceHandle.cancel`."""
        self._is_cancelled = True
        if self._is_placed:
            self._sequence.cancel()
        elif (recovery := self._recovery) is not None:
            recovery.next_poll.cancel()
            recovery.next_poll = asyncio.get_running_loop().call_soon(self._poll)

    def close(self) -> None:
        """Implement `SequenceHandle.close`."""
        if self in self._replica_set.sequences:
            self._end(None)

    def enter(
        self, replica: Replica, request: GenerationRequest, work: Work, output_token_count: int
    ) -> None:
        """Begin on a replica and add to its load. Raises like `Engine.submit`.

        `output_token_count` is the expected length of the output.
        """
        replica_set = self._replica_set
        replica_set.placement_count += 1
        replica.placed_at = replica_set.placement_count
        self._sequence = replica.engine.submit(request, self._take)
        self._replica, self._work, self._is_placed = replica, work, True
        self._is_continuation = bool(request.output_token_ids)
        self._began_at_s = replica_set.clock()
        self._is_probe = not replica.breaker.is_closed and replica.breaker.begun(self._began_at_s)
        self._shows_health = False
        self._output_left = output_token_count
        self._charged = work.prompt_token_count + output_token_count
        if work.keys:
            replica.refresh()
            self._found = replica.prefixes.find(work.keys)
            replica.prefixes.sent(work.keys, is_private=request.is_bound)
            self._charged -= self._found.token_count
        replica.live_sequence_count += 1
        replica.outstanding_token_count += self._charged
        if replica.stoppable is not None:
            replica.stoppable.begin_use()

    def move_from(self, name: str) -> bool:
        """Begin to move away from this replica. Return False if the sequence cannot move or no
        place is free.

        The engine is asked to cancel it. That end is not reported; the sequence continues as after
        a loss.
        """
        if not self._is_placed or self._replica.name != name or self in self._replica_set.moving:
            return False
        if (
            self._is_cancelled
            or not self._may_go_on
            or not self._replica_set.has_room(self._continued())
        ):
            return False
        self._replica_set.moving.add(self)
        self._sequence.cancel()
        return True

    @property
    def _may_go_on(self) -> bool:
        """True if another engine could run it, from the start or from its output so far."""
        return not self._has_output or self._replica_set.could_continue(self._continued())

    def _continued(self) -> GenerationRequest:
        """Build the request for another engine, with the output so far."""
        if not (self._has_output and self._request.may_be_continued):
            return self._request
        return replace(self._request, output_token_ids=tuple(self.outputs[0]))

    def _take(self, event: SequenceEvent | EngineError) -> None:
        """Handle an event of the engine: update the replica's load, and report to the caller."""
        if isinstance(event, TokensGenerated):
            count = len(event.token_ids)
            if self._shows_health and self._output_left > count:
                self._output_left -= count
                self._charged -= count
                self._replica.outstanding_token_count -= count
            else:
                self._generated(count)
            self._sink(event)
        elif isinstance(event, Scheduled):
            if self._begun(event):
                self._sink(event)
        elif isinstance(event, SequenceFinished):
            self._finished(event)
        elif isinstance(event, ChoiceFinished):
            self._has_output = True
            self._sink(event)
        else:
            self._lost(event)

    def _begun(self, event: Scheduled) -> bool:
        """Record that an engine has scheduled it; return True only the first time."""
        cached_token_count = event.cached_token_count
        if self._work.keys and (event.is_final or cached_token_count):  # else it is unknown yet
            self._replica.prefixes.found_missing(self._found, cached_token_count)
        charged, self._charged = (
            self._charged,
            self._work.prompt_token_count - cached_token_count + self._output_left,
        )
        self._replica.outstanding_token_count += self._charged - charged
        if self._cached_token_count is not None:
            return False
        self._cached_token_count, self._scheduled_at_s = (
            cached_token_count,
            self._replica_set.clock(),
        )
        self._is_cached_final = event.is_final
        return True

    def _generated(self, token_count: int) -> None:
        """Update the load, for the first tokens and for more tokens than expected."""
        if not self._shows_health:
            self._shows_health = True
            if self._work.keys:
                self._replica.prefixes.computed(self._work.keys)
            if self._replica.breaker.failure_count and self._replica.breaker.is_news(
                self._began_at_s
            ):
                self._replica.breaker.succeeded()
        if not self._has_output:
            self._has_output, self._first_token_at_s = True, self._replica_set.clock()
        charged, self._charged = self._charged, max(self._output_left - token_count, 1)
        self._output_left = self._charged
        self._replica.outstanding_token_count += self._charged - charged

    def _finished(self, event: SequenceFinished) -> None:
        if (
            event.reason is EngineFinishReason.CANCELLED
            and not self._is_cancelled
            and not self._replica_set.is_closing
        ):
            self._lost(EngineUnavailable("the replica was closed or drained", retry_after_s=0.0))
            return
        replica_set = self._replica_set
        replica_set.mean_output_token_count += (
            event.generated_token_count - replica_set.mean_output_token_count
        ) / OUTPUT_MEMORY
        if self._moved:
            # A replica that continues an output reports another prompt than the billed one.
            is_known = self._is_cached_final or self._is_continuation
            event = msgspec.structs.replace(
                event,
                cached_token_count=(
                    self._cached_token_count or 0 if is_known else event.cached_token_count
                ),
                timings=self._timings(),
                migration_count=self._migration_count,
            )
        self._end(event)

    def _end(self, last: SequenceFinished | EngineError | None) -> None:
        """Leave the replica, or end the search for one; report the last event unless it is None."""
        sink, self._sink = self._sink, ignore_event
        self._replica_set.sequences.discard(self)
        if self._is_placed:
            self._leave()
        if self._recovery is not None or self in self._replica_set.moving:
            self._stop_looking()
        if last is not None:
            sink(last)

    def _lost(self, loss: EngineError) -> None:
        """Start to search for another replica, or end with the loss if none could continue."""
        if isinstance(loss, RequestImpossible):
            if self._migration_count:
                # Its first engine accepted it, so this is not a mistake of the client.
                loss = EngineFailed(f"no other engine can continue the sequence: {loss}")
            self._end(loss)
            return
        replica, now_s = self._replica, self._replica_set.clock()
        has_failed = isinstance(loss, EngineFailed)
        if has_failed:
            # A second failure on an engine that survives is probably caused by the request.
            # Counting it would let three such requests trip all replicas.
            if not (self._failure_count and replica.engine.healthy()):
                self._shows_health = True
                replica.breaker.failed(self._began_at_s, now_s)
            self._failure_count += 1
        self._leave()
        # Remote servers accept a sequence before refusing it. A second refusal means that all were
        # tried.
        is_full = isinstance(loss, EngineOverloaded)
        all_refused = is_full and replica in self._refused_by
        if is_full:
            self._refused_by |= {replica}
        self._lost_on += (replica,)
        if self._is_cancelled:
            self._end(self._cancelled_end())
        elif (
            not self._may_go_on
            or all_refused
            or self._replica_set.is_closing
            or self._failure_count > LOSS_COUNT_MAX
        ):
            self._end(loss)
        else:
            # A full queue is reported at once; a lost sequence gets time to find another place.
            wait_s = 0.0 if is_full and not self._has_output else self._replica_set.recovery_wait_s
            home = replica if self in self._replica_set.moving and not has_failed else None
            self._recovery = Recovery(
                loss, home, now_s + wait_s, asyncio.get_running_loop().call_soon(self._poll)
            )

    def _poll(self) -> None:
        """Try to enter another replica, or the same one when it is back."""
        recovery = self._recovery
        assert recovery is not None, "ending a recovery cancels its callback"
        try:
            if self._is_cancelled:
                self._end(self._cancelled_end())
            elif self._found_room(recovery.home):
                self._stop_looking()
                self._note_moved()
            elif self._replica_set.is_closing or self._replica_set.clock() >= recovery.give_up_at_s:
                self._end(recovery.loss)
            else:
                recovery.next_poll = asyncio.get_running_loop().call_later(
                    recovery.pauses.next_s(), self._poll
                )
        except RequestImpossible:
            self._end(recovery.loss)
        except Exception as error:
            log_incident(error, source="replica set")
            self._end(EngineFailed("an unexpected error"))

    def _found_room(self, home: Replica | None) -> bool:
        """Enter a replica, or else `home`, drained or not; return whether that succeeded."""
        request = self._continued()
        try:
            self._replica_set.place(self, request, self._lost_on)
        except (EngineUnavailable, EngineOverloaded, EngineStartFailed):
            if home is None:
                return False
            try:
                self._replica_set.place_at(self, home, request)
            except EngineError:
                return False
        return True

    def _stop_looking(self) -> None:
        self._replica_set.moving.discard(self)
        if self._recovery is not None:
            self._recovery.next_poll.cancel()
            self._recovery = None

    def _note_moved(self) -> None:
        self._moved = True
        if self._has_output:
            self._migration_count += 1
        self._replica_set.note_moved(migrated=self._has_output)
        token_count, lost = sum(map(len, self.outputs)), self._lost_on[-1]
        _log.info(
            "moved a sequence of %d tokens from replica %s to %s",
            token_count,
            lost.name,
            self._replica.name,
        )

    def _leave(self) -> None:
        """Leave the replica and remove it from its load."""
        replica, self._is_placed = self._replica, False
        replica.outstanding_token_count -= self._charged
        replica.live_sequence_count -= 1
        assert replica.live_sequence_count >= 0, "a sequence leaves only a replica it entered"
        if self._is_probe and not self._shows_health:
            replica.breaker.probe_ended()
        self._sequence.close()
        if replica.stoppable is not None:
            replica.stoppable.end_use()

    def _cancelled_end(self) -> SequenceFinished:
        """Build the last event of a cancelled sequence that is not on an engine."""
        return SequenceFinished(
            reason=EngineFinishReason.CANCELLED,
            text="",
            prompt_token_count=len(self._request.prompt_token_ids),
            cached_token_count=self._cached_token_count or 0,
            generated_token_count=sum(map(len, self.outputs)),
            timings=self._timings(),
            migration_count=self._migration_count,
        )

    def _timings(self) -> EngineTimings:
        """Compute timings by the set's clock. Time between replicas counts as the later phase."""
        now_s = self._replica_set.clock()
        scheduled_s = now_s if self._scheduled_at_s is None else self._scheduled_at_s
        first_token_s = now_s if self._first_token_at_s is None else self._first_token_at_s
        return EngineTimings(
            queue_ms=(scheduled_s - self._opened_at_s) * 1e3,
            prefill_ms=(first_token_s - scheduled_s) * 1e3,
            decode_ms=(now_s - first_token_s) * 1e3,
        )
