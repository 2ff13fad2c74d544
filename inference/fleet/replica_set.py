"""One served model as several replicas, each an engine of its own: placing, losing, draining. Implements `Engine`.

It decides only where a sequence runs. How replicas are started, restarted and stopped is theirs; how many are kept warm is told.
Nothing here runs by itself but what `serve` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence

from common.incidents import IncidentTaskGroup
from inference.engine import (
    EngineCondition,
    EngineState,
    EngineStatistics,
    GenerationRequest,
    ModelInfo,
    SequenceEvent,
    SequenceStream,
)
from inference.errors import EngineError, EngineOverloaded, EngineStartFailed, EngineUnavailable, RequestImpossible
from inference.fleet.attempt import Attempt
from inference.fleet.fleet_stream import FleetStream
from inference.fleet.placement import PlacementPolicy, PrefixAware, Work
from inference.fleet.replica import Replica, ReplicaReport
from inference.fleet.set_statistics import SetStatistics
from inference.fleet.standing import all_drained, nobody_takes, standing

RECOVERY_WAIT_S = 10.0  # seconds: a small model's process is back by then, and a client would rather wait than ask anew
OUTPUT_TOKENS_FIRST = 128  # tokens: what an answer is taken to have before any has ended
OUTPUT_MEMORY = 32  # answers after which a change of their lengths is mostly noticed
START_PAUSE_S = 0.05  # seconds between looks at replicas that are ready and may not be used yet


class ReplicaSet:
    """Several replicas as one engine. See `Engine` for the contract.

    `start` returns as soon as one replica takes requests; the first `warm_count` are started by then or on their way, the others
    when somebody starts them. A sequence whose replica is lost waits up to `recovery_wait_s` for another place.
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
        """model: as it is called outside, whatever its replicas call it. warm_count: all of them if it is None."""
        assert replicas, "a set has replicas"
        assert len({replica.name for replica in replicas}) == len(replicas), "replicas have names of their own"
        self._model = model
        self._replicas = tuple(replicas)
        self._policy: PlacementPolicy = policy or PrefixAware()
        self._warm_count = len(replicas) if warm_count is None else warm_count
        self.recovery_wait_s = recovery_wait_s
        self.clock = clock
        self.is_closing = False
        self._start_requested = asyncio.Event()
        self.moving: set[FleetStream] = set()  # told to leave their replica for another, and not there yet
        self._streams: set[FleetStream] = set()
        self._placement_count = 0
        self._output_token_count = float(OUTPUT_TOKENS_FIRST)
        self._migration_count = self._replacement_count = 0
        self._statistics = SetStatistics(len(replicas))

    @property
    def model(self) -> ModelInfo:
        """See `Engine.model`."""
        return self._model

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All of them, the warm ones first."""
        return self._replicas

    def reports(self) -> list[ReplicaReport]:
        """How each replica stands; never blocks."""
        now_s = self.clock()
        return [replica.report(now_s) for replica in self._replicas]

    async def serve(self) -> None:
        """See `Engine.serve`: all replicas' lives. One that fails unexpectedly leaves the others alone."""
        async with IncidentTaskGroup() as tasks:
            for replica in self._replicas:
                tasks.create_task(replica.engine.serve(), name=f"replica {replica.name}")
            for replica in self._replicas[: self._warm_count]:
                tasks.create_task(self._warm(replica), name=f"replica start {replica.name}")

    async def start(self) -> None:
        """See `Engine.start`."""
        self._start_requested.set()
        while not self.healthy():
            await self._first_start()
            if not self.healthy():  # ready, and still kept out after it had failed
                waits = [replica.breaker.wait_s(self.clock()) for replica in self._replicas if replica.engine.healthy()]
                await asyncio.sleep(max(min(waits, default=0.0), START_PAUSE_S))

    @contextlib.asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[SequenceStream]:
        """See `Engine.generate`."""
        stream = FleetStream(self, request)
        self._streams.add(stream)
        try:
            await stream.open()
            yield stream
        finally:
            self._streams.discard(stream)
            self.moving.discard(stream)
            await stream.close()

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """See `Engine.predict_cached_token_count`: by the replica that a request would be given to now."""
        now_s = self.clock()
        candidates = [replica for replica in self._replicas if replica.takes(now_s)] or list(self._replicas)
        work = self._policy.work_of(prompt_token_ids, cache_salt)
        chosen = self._policy.choose(candidates, work)
        return chosen.engine.predict_cached_token_count(prompt_token_ids, cache_salt)

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`: sums, but for the steps."""
        ready_count = sum([replica.engine.healthy() for replica in self._replicas])
        told = [replica.engine.statistics() for replica in self._replicas]
        return self._statistics.sum_of(told, ready_count, (self._migration_count, self._replacement_count))

    def healthy(self) -> bool:
        """See `Engine.healthy`."""
        now_s = self.clock()
        return not self.is_closing and any(replica.takes(now_s) for replica in self._replicas)

    def condition(self) -> EngineCondition:
        """See `Engine.condition`: that of the replica that is likeliest to take requests first."""
        if self.is_closing:
            return EngineCondition(EngineState.CLOSED, reason="closed")
        if self.healthy():
            return EngineCondition(EngineState.READY, loading_fraction=1.0)
        return standing(self._conditions(self._replicas), self._warm_count)

    async def close(self) -> None:
        """See `Engine.close`."""
        self.is_closing = True
        self._start_requested.set()
        async with asyncio.TaskGroup() as tasks:
            for replica in self._replicas:
                tasks.create_task(replica.engine.close(), name=f"replica close {replica.name}")

    def drain(self, names: Collection[str]) -> None:
        """Give these replicas nothing new from now on, and the others what they take; what they run, they run to its end."""
        for replica in self._replicas:
            replica.is_drained = replica.name in names

    def move_out(self, name: str) -> int:
        """Let what a drained replica runs go on elsewhere, as far as it can and somebody has room; how many were told to.

        To be called again for those that had no place. An unknown name has nothing to move.
        """
        return sum(stream.move_from(name) for stream in tuple(self._streams))

    def has_place(self, request: GenerationRequest) -> bool:
        """Whether some replica has a place in its batch for it, beside those that are moving already."""
        now_s, free_count = self.clock(), 0
        for replica in {replica for tier in self._tiers(request, ()) for replica in tier if replica.takes(now_s)}:
            free_count += replica.free_place_count
        return free_count > len(self.moving)

    def could_continue(self, request: GenerationRequest) -> bool:
        """Whether some replica, were it there, could go on with it in mid-output."""
        return any(replica.engine.model.can_continue(request) for replica in self._replicas)

    async def enter(
        self, request: GenerationRequest, avoided: Sequence[Replica] = ()
    ) -> tuple[Attempt, AsyncIterator[SequenceEvent]]:
        """Place a sequence: the attempt and its events. avoided: replicas to be asked last.

        Raises as `Engine.generate`; a replica that refuses is passed over as long as there is another.
        """
        work = self._policy.work_of(request.prompt_token_ids, request.cache_salt, request.output_token_ids)
        refusals: list[EngineError] = []
        impossible: RequestImpossible | None = None
        for tier in self._tiers(request, avoided):
            left = list(tier)
            while left := [replica for replica in left if replica.takes(self.clock())]:
                replica = self._choose(left, request, work)
                left.remove(replica)
                try:
                    return await self._enter(replica, request, work)
                except (EngineOverloaded, EngineUnavailable, EngineStartFailed) as refusal:
                    refusals.append(refusal)
                except RequestImpossible as fault:  # servers of different kinds can stand behind one model
                    impossible = impossible or fault
        if impossible is not None and not refusals:
            raise impossible
        raise self._refusal(request, refusals)

    async def enter_at(self, replica: Replica, request: GenerationRequest) -> tuple[Attempt, AsyncIterator[SequenceEvent]]:
        """Place a sequence in this replica, be it drained. Raises as `Engine.generate`."""
        if not (replica.engine.healthy() and replica.breaker.admits(self.clock())):
            raise EngineUnavailable(f"replica {replica.name} does not work", retry_after_s=0.0)
        work = self._policy.work_of(request.prompt_token_ids, request.cache_salt, request.output_token_ids)
        return await self._enter(replica, request, work)

    def note_output(self, token_count: int) -> None:
        """A sequence has ended with so many tokens."""
        self._output_token_count += (token_count - self._output_token_count) / OUTPUT_MEMORY

    def note_moved(self, *, migrated: bool) -> None:
        """A sequence has found another place. migrated: after its first token."""
        if migrated:
            self._migration_count += 1
        else:
            self._replacement_count += 1

    def _choose(self, candidates: list[Replica], request: GenerationRequest, work: Work) -> Replica:
        """As the policy says; where the engine knows better what it has cached, what the policy knows is mended first."""
        token_ids = (*request.prompt_token_ids, *request.output_token_ids)
        while True:
            chosen = self._policy.choose(candidates, work)
            found = chosen.prefixes.find(work.keys)
            if len(candidates) == 1 or not found.computed:
                return chosen
            told = chosen.engine.predict_cached_token_count(token_ids, request.cache_salt)
            if not chosen.prefixes.found_missing(found, told):
                return chosen

    async def _enter(
        self, replica: Replica, request: GenerationRequest, work: Work
    ) -> tuple[Attempt, AsyncIterator[SequenceEvent]]:
        self._placement_count += 1
        replica.placed_at = self._placement_count
        replica.refresh()
        left = request.stop.max_output_tokens - len(request.output_token_ids)
        output = min(max(round(self._output_token_count), 1), max(left, 1))
        output *= request.choice_count if request.beam_search is None else request.beam_search.width
        attempt = Attempt(replica, request, work, output, self.clock())
        return attempt, await attempt.enter()

    def _tiers(self, request: GenerationRequest, avoided: Sequence[Replica]) -> Iterator[list[Replica]]:
        """Those that may be asked, in groups: by region in the order of preference, and all avoided ones after all others."""
        begun = bool(request.output_token_ids)
        allowed = [replica for replica in self._replicas if not begun or replica.engine.model.can_continue(request)]
        for is_avoided in (False, True):
            rest = [replica for replica in allowed if (replica in avoided) is is_avoided]
            if not request.regions:
                yield rest
            for region in request.regions:
                # One that is nowhere in particular is everywhere, and asked once.
                near = (region, "") if region == request.regions[0] else (region,)
                yield [replica for replica in rest if replica.region in near]

    def _refusal(self, request: GenerationRequest, refusals: Sequence[EngineError]) -> EngineError:
        """Why nobody took it."""
        overloads = [refusal.retry_after_s for refusal in refusals if isinstance(refusal, EngineOverloaded)]
        if overloads:
            full = "the queues of all replicas are full" if len(self._replicas) > 1 else "the engine's queue is full"
            return EngineOverloaded(full, min(overloads))
        allowed = {replica for tier in self._tiers(request, ()) for replica in tier}
        if not allowed:
            return EngineUnavailable(f"no replica in {', '.join(request.regions) or 'this set'} could go on with it", 0.0)
        return nobody_takes(self._conditions(allowed), len(self._replicas))

    def _conditions(self, replicas: Collection[Replica]) -> list[EngineCondition]:
        """Of those that no operator keeps out of use."""
        return [self._condition_of(replica) for replica in replicas if not replica.is_drained]

    def _condition_of(self, replica: Replica) -> EngineCondition:
        """A replica's condition, where READY means that it may be used."""
        condition, now_s = replica.engine.condition(), self.clock()
        if condition.state is not EngineState.READY or replica.takes(now_s):
            return condition
        wait_s = replica.breaker.wait_s(now_s)
        reason = "it is about to stop" if replica.is_leaving else "sequences were lost on it one after the other"
        return EngineCondition(EngineState.RESTARTING, retry_after_s=wait_s, reason=reason)

    async def _warm(self, replica: Replica) -> None:
        """Start a replica once the set is asked to start. Its failure is its own to tell."""
        await self._start_requested.wait()
        if not self.is_closing:
            with contextlib.suppress(EngineError):
                await replica.engine.start()

    async def _first_start(self) -> None:
        """Wait until the first of those that are to be warm is ready. Raises the first error once none of them can be."""
        if self.is_closing:
            raise EngineUnavailable("the engine is closed", retry_after_s=0.0)
        others = [replica for replica in self._replicas if not replica.is_draining]
        waited_for = [replica for replica in others if replica in self._replicas[: max(self._warm_count, 1)]] or others[:1]
        if not waited_for:
            raise all_drained(len(self._replicas))
        errors: list[EngineError] = []
        decided = asyncio.Event()

        async def start(replica: Replica) -> None:
            try:
                await replica.engine.start()
            except EngineError as error:
                errors.append(error)
                if len(errors) < len(waited_for):
                    return
            decided.set()

        async with asyncio.TaskGroup() as tasks:
            starting = [tasks.create_task(start(replica)) for replica in waited_for]
            await decided.wait()
            for task in starting:
                task.cancel()
        if len(errors) == len(waited_for):
            raise errors[0]
