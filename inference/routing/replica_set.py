"""One served model as several replicas, each an engine of its own: placing, losing, draining. Implements `Engine`.

`ReplicaSet` decides only where a sequence runs; how replicas are started, restarted and stopped is theirs. `Attempt` is one try
on one replica, and keeps that replica's account. `FleetStream` is the sequence as its caller sees it: when its engine is lost, it
goes on elsewhere. Before the first token it begins anew; after that it is continued from its prompt and the tokens that were told.
The events are those of one sequence either way: `Scheduled` once, every token once, counts and times of the whole. Half of a
character or of a stop sequence that the lost engine held back is held back by the next one, which reads the same tokens.

Nothing here runs by itself but what `serve` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec

from common.backoff import Backoff
from common.incidents import IncidentTaskGroup
from inference.engine import (
    ChoiceFinished,
    EngineCondition,
    EngineFinishReason,
    EngineState,
    EngineStatistics,
    EngineTimings,
    GenerationRequest,
    ModelInfo,
    Scheduled,
    SequenceEvent,
    SequenceFinished,
    SequenceStream,
    TokensGenerated,
)
from inference.errors import EngineError, EngineFailed, EngineOverloaded, EngineStartFailed, EngineUnavailable, RequestImpossible
from inference.routing.placement import PlacementPolicy, PrefixAware, Work
from inference.routing.replica import NOTHING_FOUND, Replica, ReplicaReport, SetStatistics, all_drained, nobody_takes, standing

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
        self.model = model
        self._replicas = tuple(replicas)
        self._policy: PlacementPolicy = policy or PrefixAware()
        self._warm_count = len(replicas) if warm_count is None else warm_count
        self.recovery_wait_s = recovery_wait_s
        self.clock = clock
        self.is_closing = False
        self._start_requested = asyncio.Event()
        self.moving: set[FleetStream] = set()  # told to leave their replica for another, and not there yet
        self.streams: set[FleetStream] = set()
        self._placement_count = 0
        self._output_token_count = float(OUTPUT_TOKENS_FIRST)
        self._migration_count = self._replacement_count = 0
        self._statistics = SetStatistics(len(replicas))

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

    def generate(self, request: GenerationRequest) -> FleetStream:
        """See `Engine.generate`."""
        return FleetStream(self, request)

    def predict_cached_token_count(self, prompt_token_ids: tuple[int, ...], cache_salt: str) -> int:
        """See `Engine.predict_cached_token_count`: by the replica that a request would be given to now."""
        now_s = self.clock()
        candidates = [replica for replica in self._replicas if replica.takes(now_s)] or list(self._replicas)
        work = self._policy.work_of(prompt_token_ids, cache_salt)
        chosen = self._policy.choose(candidates, work)
        return chosen.engine.predict_cached_token_count(prompt_token_ids, cache_salt)

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`: sums, but for the steps."""
        ready_count, told = 0, []
        for replica in self._replicas:
            ready_count += replica.engine.healthy()
            told.append(replica.engine.statistics())
        return self._statistics.sum_of(told, ready_count, (self._migration_count, self._replacement_count))

    def healthy(self) -> bool:
        """See `Engine.healthy`."""
        if not self.is_closing:
            now_s = self.clock()
            for replica in self._replicas:
                if replica.takes(now_s):
                    return True
        return False

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
        return sum(stream.move_from(name) for stream in tuple(self.streams))

    def has_place(self, request: GenerationRequest) -> bool:
        """Whether some replica has a place in its batch for it, beside those that are moving already."""
        now_s, free_count = self.clock(), 0
        for replica in {replica for tier in self._tiers(request, ()) for replica in tier if replica.takes(now_s)}:
            free_count += replica.free_place_count
        return free_count > len(self.moving)

    def could_continue(self, request: GenerationRequest) -> bool:
        """Whether some replica, were it there, could go on with it in mid-output."""
        return any(replica.engine.model.can_continue(request) for replica in self._replicas)

    async def enter(self, request: GenerationRequest, avoided: Sequence[Replica] = ()) -> Attempt:
        """Place a sequence. avoided: replicas to be asked last.

        Raises as `Engine.generate`; a replica that refuses is passed over as long as there is another.
        """
        work = self._work_of(request)
        refusals: list[EngineError] = []
        impossible: RequestImpossible | None = None
        for tier in self._tiers(request, avoided):
            asked: list[Replica] = []
            while True:
                left, now_s = [], self.clock()
                for replica in tier:
                    if replica not in asked and replica.takes(now_s):
                        left.append(replica)
                if not left:
                    break
                replica = left[0] if len(left) == 1 else self._choose(left, request, work)
                asked.append(replica)
                try:
                    return await self._enter(replica, request, work)
                except (EngineOverloaded, EngineUnavailable, EngineStartFailed) as refusal:
                    refusals.append(refusal)
                except RequestImpossible as fault:  # servers of different kinds can stand behind one model
                    impossible = impossible or fault
        if impossible is not None and not refusals:
            raise impossible
        raise self._refusal(request, refusals)

    async def enter_at(self, replica: Replica, request: GenerationRequest) -> Attempt:
        """Place a sequence in this replica, be it drained. Raises as `Engine.generate`."""
        if not (replica.engine.healthy() and replica.breaker.admits(self.clock())):
            raise EngineUnavailable(f"replica {replica.name} does not work", retry_after_s=0.0)
        return await self._enter(replica, request, self._work_of(request))

    def note_output(self, token_count: int) -> None:
        """A sequence has ended with so many tokens."""
        self._output_token_count += (token_count - self._output_token_count) / OUTPUT_MEMORY

    def note_moved(self, *, migrated: bool) -> None:
        """A sequence has found another place. migrated: after its first token."""
        if migrated:
            self._migration_count += 1
        else:
            self._replacement_count += 1

    def _work_of(self, request: GenerationRequest) -> Work:
        if len(self._replicas) == 1:  # nothing is chosen: what the policy wants to know would be computed for nothing
            return Work(len(request.prompt_token_ids) + len(request.output_token_ids))
        return self._policy.work_of(request.prompt_token_ids, request.cache_salt, request.output_token_ids)

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

    async def _enter(self, replica: Replica, request: GenerationRequest, work: Work) -> Attempt:
        self._placement_count += 1
        replica.placed_at = self._placement_count
        replica.refresh()
        left = request.stop.max_output_tokens - len(request.output_token_ids)
        output = min(max(round(self._output_token_count), 1), max(left, 1))
        output *= request.choice_count if request.beam_search is None else request.beam_search.width
        attempt = Attempt(replica, request, work, output, self.clock())
        await attempt.enter()
        return attempt

    def _tiers(self, request: GenerationRequest, avoided: Sequence[Replica]) -> Iterable[Sequence[Replica]]:
        """Those that may be asked, in groups: by region in the order of preference, and all avoided ones after all others."""
        if not (avoided or request.regions or request.output_token_ids):
            return (self._replicas,)
        return self._chosen_tiers(request, avoided)

    def _chosen_tiers(self, request: GenerationRequest, avoided: Sequence[Replica]) -> Iterator[list[Replica]]:
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


class Attempt:
    """One try. Counts from the moment it is made, so that whoever is placed next knows of it; `leave` takes all of it back."""

    def __init__(self, replica: Replica, request: GenerationRequest, work: Work, output_token_count: int, now_s: float) -> None:
        """output_token_count: what its output is expected to be. now_s: of the set's clock."""
        self.replica = replica
        self._sequence = replica.engine.generate(request)
        self.stream: SequenceStream  # from when it was entered
        self.events: AsyncIterator[SequenceEvent]
        self._work = work
        self._began_at_s = now_s
        self._has_entered = False
        self._found = NOTHING_FOUND
        if work.keys:
            self._found = replica.prefixes.find(work.keys)
            replica.prefixes.sent(work.keys)
        self._is_probe = replica.breaker.begun(now_s)
        self._has_told = False  # whether it has shown if the replica works
        self._has_left = False
        self._output_left = output_token_count
        self._charged = 0
        replica.live_sequence_count += 1
        self._charge(work.prompt_token_count - self._found.token_count + output_token_count)

    async def enter(self) -> None:
        """Begin it there. Raises as `Engine.generate` does, and has left then."""
        try:
            self.stream = await self._sequence.__aenter__()
        except BaseException:
            await self.leave()
            raise
        self._has_entered = True
        self.events = aiter(self.stream)

    def scheduled(self, cached_token_count: int) -> None:
        """The engine has begun with it, and says what it had cached."""
        if self._work.keys:
            self.replica.prefixes.found_missing(self._found, cached_token_count)
        self._charge(self._work.prompt_token_count - cached_token_count + self._output_left)

    def generated(self, token_count: int) -> None:
        """Tokens have come."""
        if not self._has_told:
            self._has_told = True
            if self._work.keys:
                self.replica.prefixes.computed(self._work.keys)
            if self.replica.breaker.is_news(self._began_at_s):
                self.replica.breaker.succeeded()
        self._output_left = max(self._output_left - token_count, 1)
        self._charge(self._output_left)

    def goes_on(self, token_count: int) -> bool:
        """`generated` for most tokens; False, and nothing was done, for the others."""
        if not self._has_told or self._output_left <= token_count:
            return False
        self._output_left -= token_count
        self._charged -= token_count
        self.replica.outstanding_token_count -= token_count
        return True

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
        if self._has_entered:
            self._has_entered = False
            await self._sequence.__aexit__(None, None, None)
            del self._sequence, self.stream, self.events  # they may refer to whoever is told of tokens, and so to this attempt

    def _charge(self, token_count: int) -> None:
        """Set what of the replica's outstanding tokens is this one's."""
        self.replica.outstanding_token_count += token_count - self._charged
        self._charged = token_count


LOSS_COUNT_MAX = 2  # engines that may break under one sequence: it may be what breaks them, and is not to break all of them

PAUSE_S_MIN, PAUSE_S_MAX = 0.02, 0.5  # seconds between looks for a place while there is none

_log = logging.getLogger("weir.inference.routing")


class FleetStream:
    """Implements `SequenceStream` over one replica after the other. One reader."""

    def __init__(self, fleet: ReplicaSet, request: GenerationRequest) -> None:
        self._fleet = fleet
        self._request = request
        self._attempt: Attempt | None = None
        self._take: Callable[[SequenceEvent], bool] | None = None
        self._loss: EngineError | None = None  # that an event showed
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

    async def __aenter__(self) -> FleetStream:
        """Find the first place. Raises as `Engine.generate` does."""
        self._fleet.streams.add(self)
        try:
            self._entered(await self._fleet.enter(self._request))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel what still runs and forget it."""
        self._ended = True
        self._fleet.streams.discard(self)
        self._fleet.moving.discard(self)
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            await attempt.leave()

    def __aiter__(self) -> AsyncIterator[SequenceEvent]:
        return self

    async def __anext__(self) -> SequenceEvent:
        while not self._ended:
            assert self._attempt is not None, "only what is open is read"
            loss: EngineError
            try:
                event = await anext(self._attempt.events)
            except StopAsyncIteration:
                loss = EngineFailed("the engine's events ended without a last one")
            except EngineError as error:
                loss = error
            else:
                if (told := self._tell(event)) is not None:
                    return told
                if self._loss is None:
                    continue
                loss = self._loss
            if (end := await self._go_on(loss)) is not None:
                return end
        raise StopAsyncIteration

    def cancel(self) -> None:
        """See `SequenceStream.cancel`."""
        self._cancelled = True
        self._cancel_asked.set()
        if self._attempt is not None:
            self._attempt.stream.cancel()

    def deliver_to(self, take: Callable[[SequenceEvent], bool]) -> None:
        """See `SequenceStream.deliver_to`."""
        self._take = take
        if self._attempt is not None:
            self._attempt.stream.deliver_to(self._deliver)

    def _deliver(self, event: SequenceEvent) -> bool:
        """Let events of the engine that has it now take the short way."""
        if type(event) is Scheduled and self._cached_token_count is not None:
            self._tell(event)  # it is told once, whatever engine begins
            return True
        if self._take is None or not self._take(event):
            return False
        if type(event) is not TokensGenerated:
            self._tell(event)
            return True
        attempt, count = self._attempt, len(event.token_ids)
        if self._is_told and attempt is not None and attempt.goes_on(count):
            self._token_count += count
            if self._request.may_be_continued:
                self._output += event.token_ids
        else:
            self._tell(event)
        return True

    def move_from(self, name: str) -> bool:
        """Leave the replica of this name for another, if it runs there, can go on elsewhere, and there is a place.

        The engine is told to end it; that end is then not told, and it goes on from there as after a loss.
        """
        attempt = self._attempt
        if attempt is None or attempt.replica.name != name or self in self._fleet.moving:
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

    def _is_closed_under_it(self, event: SequenceFinished) -> bool:
        """Whether its engine was closed while the set goes on: nobody has cancelled the sequence."""
        return event.reason is EngineFinishReason.CANCELLED and not self._cancelled and not self._fleet.is_closing

    def _tell(self, event: SequenceEvent) -> SequenceEvent | None:
        """An event as one of the whole sequence; None for one that was told before, and for one that shows a loss."""
        attempt = self._attempt
        assert attempt is not None, "only what is open is read"
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
                if self._is_closed_under_it(event):
                    self._loss = EngineUnavailable("the replica was closed, or drained", retry_after_s=0.0)
                    return None
                self._ended = True
                self._fleet.note_output(event.generated_token_count)
                if self._moved:
                    return msgspec.structs.replace(
                        event,
                        cached_token_count=self._cached_token_count or 0,
                        timings=self._timings(),
                        migration_count=self._migration_count,
                    )
        return event

    async def _go_on(self, loss: EngineError) -> SequenceFinished | None:
        """Find another place after a loss; the last event if it was cancelled meanwhile. Raises the loss if there is no place."""
        if isinstance(loss, RequestImpossible):
            self._ended = True
            if not self._migration_count:
                raise loss
            # It was possible where it began: that nobody else can go on with it is not its client's mistake.
            raise EngineFailed(f"no other engine can go on with it: {loss}") from loss
        attempt, self._attempt, self._loss = self._attempt, None, None
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
        request, give_up_at_s = self._continued(), self._fleet.clock() + wait_s
        pauses = Backoff(PAUSE_S_MIN, PAUSE_S_MAX)
        while not self._cancelled:
            try:
                self._entered(await self._fleet.enter(request, self._lost_on))
                return
            except RequestImpossible:
                raise loss from None
            except (EngineUnavailable, EngineOverloaded, EngineStartFailed):
                if home is not None and await self._returned_to(home, request):
                    return
                if self._fleet.is_closing or self._fleet.clock() >= give_up_at_s:
                    raise loss from None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pauses.next_s()):
                    await self._cancel_asked.wait()

    async def _returned_to(self, home: Replica, request: GenerationRequest) -> bool:
        try:
            self._entered(await self._fleet.enter_at(home, request))
        except EngineError:
            return False
        return True

    def _entered(self, attempt: Attempt) -> None:
        self._attempt = attempt
        if self._take is not None:
            attempt.stream.deliver_to(self._deliver)
        if self._cancelled:  # while the engine was taking it
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
