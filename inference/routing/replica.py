"""Replica of a set, with circuit breaker and sent prefixes; base, statistics of sets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec

from common.backoff import Backoff
from common.incidents import IncidentTaskGroup
from inference.engine import (
    Backend,
    Engine,
    EngineCondition,
    EngineState,
    EngineStatistics,
    ModelInfo,
    Startable,
    pool_of,
)
from inference.errors import EngineError, EngineUnavailable
from inference.kv_blocks import KV_BLOCK_TOKENS, block_hashes

BLOCK_COUNT_MAX = 65_536  # for engines that do not report a number: a million tokens, 10 MB here
UNSHARED_MAX = 4096  # blocks that wait for a broadcast: seven seconds of full ones
RECALLED_MAX = 4096  # of the blocks that a process which asks is told, the newest ones
# Largest block of engines; a reported prefix may be shorter by this much.
ENGINE_BLOCK_TOKENS_MAX = 128
UNUSED_POLL_S = 0.1  # seconds between checks of whether a replica that was left out has work
# Retry-after while all replicas are drained, or none is in a region: an operator decides.
DRAINED_RETRY_S = 5.0
DRAINED = EngineCondition(
    EngineState.RESTARTING, retry_after_s=DRAINED_RETRY_S, reason="it is being drained"
)
# Ordered from the least to the most available state
_BEST_FIRST = (
    EngineState.CLOSED,
    EngineState.FAILED,
    EngineState.COLD,
    EngineState.RESTARTING,
    EngineState.LOADING,
    EngineState.READY,
)
SUMMED = tuple(
    name
    for name in EngineStatistics.__struct_fields__
    if name not in ("step_count", "replica_count", "migration_count", "replacement_count")
)


class BreakerState(StrEnum):
    """State of a breaker: CLOSED admits all sequences, OPEN none, HALF_OPEN one probe at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """Limits of a circuit breaker.

    `failure_count_max` consecutive failures open it, first for `pause_s_min` seconds; each failed
    probe doubles the time, up to `pause_s_max`.
    """

    failure_count_max: int = 3
    pause_s_min: float = 2.0
    pause_s_max: float = 60.0

    def __post_init__(self) -> None:
        """Raise ValueError for inconsistent limits."""
        if self.failure_count_max < 1 or not 0 < self.pause_s_min <= self.pause_s_max:
            raise ValueError(
                "failure_count_max must be at least 1, and pause_s_min above 0 and at most"
                " pause_s_max"
            )


class CircuitBreaker:
    """Circuit breaker of one replica. Times are seconds of one monotonic clock.

    A process that dies fails all of its sequences at once, which counts as one failure: that of a
    sequence that began before the last failure is ignored.
    """

    def __init__(self, limits: BreakerLimits) -> None:
        self.limits = limits
        self.failure_count = 0  # in a row
        self._failed_at_s: float | None = None
        self._open_until_s: float | None = None  # None: closed
        self.is_closed = True
        self._pauses = Backoff(limits.pause_s_min, limits.pause_s_max)
        self._probing = False

    def state(self, now_s: float) -> BreakerState:
        """Determine the state at `now_s`."""
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until_s else BreakerState.HALF_OPEN

    def admits(self, now_s: float) -> bool:
        """Return whether a sequence may begin now."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and not self._probing
        )

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until a sequence may begin; 0 if the breaker is not open."""
        return 0.0 if self._open_until_s is None else max(self._open_until_s - now_s, 0.0)

    def begun(self, now_s: float) -> bool:
        """Record that a sequence begins; return whether it is the probe."""
        if self.is_closed:
            return False
        assert self.admits(now_s), "the caller has checked `admits`"
        self._probing = self.state(now_s) is BreakerState.HALF_OPEN
        return self._probing

    def succeeded(self) -> None:
        """Close the breaker: a sequence newer than the last failure has produced a token."""
        self.failure_count = 0
        self._pauses.reset()
        self._open_until_s, self.is_closed = None, True
        self._probing = False

    def failed(self, began_at_s: float, now_s: float) -> None:
        """Record the failure of a sequence that began at `began_at_s`."""
        if self._failed_at_s is not None and began_at_s <= self._failed_at_s:
            return
        self._failed_at_s = now_s
        self.failure_count += 1
        if self._probing or self.failure_count >= self.limits.failure_count_max:
            self._open_until_s, self.is_closed = now_s + self._pauses.next_s(), False
        self._probing = False

    def probe_ended(self) -> None:
        """End a probe without a result: it was cancelled or refused."""
        self._probing = False

    def is_news(self, began_at_s: float) -> bool:
        """Return whether a sequence that began at `began_at_s` is newer than the last failure."""
        return self._failed_at_s is None or began_at_s > self._failed_at_s


Keys = tuple[int, ...]


def prefix_keys(token_ids: Sequence[int], cache_salt: str) -> Keys:
    """Compute the keys of the full blocks that a cache can serve: all before the last token."""
    return block_hashes(tuple(token_ids), cache_salt, KV_BLOCK_TOKENS)[
        : max(len(token_ids) - 1, 0) // KV_BLOCK_TOKENS
    ]


class Found(NamedTuple):
    """Leading blocks of a prompt that were sent before, and the last uses of computed ones."""

    block_count: int
    computed: tuple[int, ...]

    @property
    def token_count(self) -> int:
        """Length of the prefix in tokens."""
        return self.block_count * KV_BLOCK_TOKENS


NOTHING_FOUND = Found(0, ())


class SentPrefixes:
    """Prompt blocks that were sent to one replica. Each use has a number, in order.

    `unshared` are blocks that other processes do not know of; the oldest of too many are dropped.
    `recalled` are known blocks for a process that knows none, the newest first.
    """

    def __init__(self, block_count_max: int = BLOCK_COUNT_MAX) -> None:
        self.block_count_max = block_count_max
        self._uses: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._computed: set[int] = set()
        self._use = 0
        self._private: set[int] = set()
        self.unshared: deque[int] = deque(maxlen=UNSHARED_MAX)
        self.recalled: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def find(self, keys: Keys) -> Found:
        """Find the longest known prefix, without changing anything."""
        count = 0
        computed: list[int] = []
        for key in keys:
            if (use := self._uses.get(key)) is None:
                break
            if count == len(computed) and key in self._computed:
                computed.append(use)
            count += 1
        return Found(count, tuple(computed))

    def sent(self, keys: Keys, *, is_private: bool = False) -> None:
        """Add the blocks of a prompt when it is sent, so that prompts that share them follow it.

        Other processes never learn of those that are private.
        """
        if is_private:
            self._private.update(key for key in keys if key not in self._uses)
        self._touch(keys, None if is_private else self.unshared)
        self._forget_surplus()

    def sent_elsewhere(self, keys: Keys) -> None:
        """Add blocks that another process has sent, those that are evicted first before others."""
        self._touch(keys[::-1], None)
        self._forget_surplus()

    def recall(self) -> None:
        """Fill `recalled` with the newest blocks, except for private ones."""
        newest = itertools.islice(reversed(self._uses), RECALLED_MAX)
        self.recalled = dict.fromkeys(key for key in newest if key not in self._private)

    def sent_earlier(self, keys: Keys) -> None:
        """Add blocks that another process recalls, the newest first, as older than all known ones.

        They need not be recalled here any more.
        """
        oldest = next(iter(self._uses.values()), self._use + 1)
        for key in keys:
            self.recalled.pop(key, None)
            if key not in self._uses and len(self._uses) < self.block_count_max:
                oldest -= 1
                self._uses[key] = oldest
                self._uses.move_to_end(key, last=False)

    def _forget_surplus(self) -> None:
        while len(self._uses) > self.block_count_max:
            self._forget(next(iter(self._uses)))

    def _forget(self, key: int) -> None:
        del self._uses[key]
        self._computed.discard(key)
        self._private.discard(key)

    def computed(self, keys: Keys) -> None:
        """Mark those of these blocks that are still known as computed by the engine."""
        self._computed.update(key for key in keys if key in self._uses)

    def found_missing(self, found: Found, token_count: int) -> bool:
        """Forget blocks that the engine's cache has lost; return whether any were missing.

        `found` is the prefix when the prompt was sent, `token_count` the part of it, in tokens,
        that the engine served from its cache. Missing computed blocks and all blocks used less
        recently are forgotten; blocks that were not computed yet stay.
        """
        missing = found.computed[(token_count + ENGINE_BLOCK_TOKENS_MAX) // KV_BLOCK_TOKENS :]
        if missing:
            last_gone = max(missing)
            while self._uses and self._uses[key := next(iter(self._uses))] <= last_gone:
                self._forget(key)
        return bool(missing)

    def clear(self) -> None:
        """Forget all blocks, because the engine has lost its cache."""
        self._uses.clear()
        self._computed.clear()
        self._private.clear()
        self.unshared.clear()
        self.recalled.clear()

    def _touch(self, keys: Keys, unshared: deque[int] | None) -> None:
        # The tail first, as engines evict it, so that a shared prefix is forgotten last.
        for key in reversed(keys):
            if unshared is not None and (key not in self._uses or key in self._private):
                self._private.discard(key)
                unshared.append(key)
            self._use += 1
            self._uses[key] = self._use
            self._uses.move_to_end(key)


class ReplicaState(StrEnum):
    """State of a replica for operators: its engine's, or if that is ready, DRAINING or TRIPPED."""

    COLD = "cold"
    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"
    DRAINING = "draining"
    TRIPPED = "tripped"


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """State of a replica at one moment. `outstanding_token_count` counts the tokens still to
    compute, as known by the set.

    `statistics` are the last ones of its engine; None if they are part of another replica's. With
    `is_drained`, an operator has drained it, whatever its state. For `kernels` see
    `EngineCondition`.
    """

    name: str
    region: str
    state: ReplicaState
    live_sequence_count: int
    outstanding_token_count: int
    reason: str = ""
    statistics: EngineStatistics | None = None
    is_drained: bool = False
    kernels: str = ""


@runtime_checkable
class Stoppable(Protocol):
    """Interface of a backend that stops when idle and starts again, such as `ManagedEngine`."""

    def begin_use(self) -> None:
        """Keep the backend running until `end_use`, which is called as often."""

    def end_use(self) -> None:
        """End a use; without uses the backend is idle and may be stopped."""

    def idle_since_s(self) -> float | None:
        """Return the time of its last use; None while it is in use or does not run."""

    def evict(self) -> None:
        """Stop the backend. It must be idle."""

    def fits_now(self) -> bool:
        """Return whether the backend could be started without evicting another one."""


class Member:
    """Backend of a set under a unique name. `region` is empty if regions do not matter.

    `known_region` is where the backend is for certain, empty if the fleet does not say: requests
    that may not leave a region use it only there.
    """

    work = "sequences"  # plural noun for operators

    def __init__(
        self, name: str, backend: Backend, region: str = "", known_region: str | None = None
    ) -> None:
        """Create the member. `known_region` None is `region`."""
        self.name = name
        self.backend = backend
        self.region = region
        self.known_region = region if known_region is None else known_region
        self.is_drained = False  # by a command of an operator
        self.is_left_out = False  # by a change of the fleet
        self.outstanding_token_count = 0
        self.live_sequence_count = 0  # or calls

    @property
    def is_draining(self) -> bool:
        """True if the replica finishes its running work and gets no new work."""
        return self.is_drained or self.is_left_out

    def takes(self, now_s: float) -> bool:
        """Return whether the replica may get work now."""
        return self.backend.healthy() and not self.is_draining

    def serves(self, regions: Sequence[str], *, is_bound: bool) -> bool:
        """Return whether requests that may run in these regions only may use the replica.

        One without a region serves all but those that are bound.
        """
        if is_bound:
            return self.known_region in regions
        return not (regions and self.region) or self.region in regions

    def report(self, now_s: float) -> ReplicaReport:
        """Describe the state of the replica for operators."""
        condition = self.backend.condition()
        state, reason = ReplicaState(condition.state.value), condition.reason
        if condition.state is EngineState.READY and self.is_draining:
            state, reason = ReplicaState.DRAINING, f"{self.live_sequence_count} {self.work} running"
        return ReplicaReport(
            self.name,
            self.region,
            state,
            self.live_sequence_count,
            self.outstanding_token_count,
            reason,
            self.backend.statistics(),
            self.is_drained,
            condition.kernels,
        )


class Replica(Member):
    """Engine of a set, with a circuit breaker and the prefixes that were sent to it."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        region: str = "",
        breaker: BreakerLimits | None = None,
        *,
        known_region: str | None = None,
    ) -> None:
        super().__init__(name, engine, region, known_region)
        self.engine = engine
        self.stoppable = engine if isinstance(engine, Stoppable) else None
        self.breaker = CircuitBreaker(breaker or BreakerLimits())
        self.prefixes = SentPrefixes()
        self.is_leaving = False  # being stopped by autoscaling (`scaling.py`)
        self.placed_at = 0  # number of its last placement: equal replicas take turns
        self._was_ready = False

    @property
    def is_draining(self) -> bool:
        """True if the replica finishes its running sequences and gets no new ones."""
        return self.is_drained or self.is_leaving or self.is_left_out

    def limit(self, limits: BreakerLimits) -> None:
        """Use other limits of the circuit breaker, which begins anew if they differ."""
        if self.breaker.limits != limits:
            self.breaker = CircuitBreaker(limits)

    def takes(self, now_s: float) -> bool:
        """Return whether the replica may get a sequence now."""
        ready = self.engine.healthy()
        if not ready and self._was_ready:
            self.prefixes.clear()  # the cache is lost with the process
        self._was_ready = ready
        return (
            ready
            and not (self.is_drained or self.is_leaving or self.is_left_out)
            and (self.breaker.is_closed or self.breaker.admits(now_s))
        )

    def refresh(self) -> None:
        """Update the size of the engine's cache from its statistics."""
        block_count = self.engine.statistics().kv_block_count_total
        self.prefixes.block_count_max = block_count or BLOCK_COUNT_MAX

    @property
    def free_row_count(self) -> int:
        """Number of free places in its batch: 0 if sequences wait, 1 if the engine reports none."""
        statistics = self.engine.statistics()
        if statistics.waiting_sequence_count:
            return 0
        if not statistics.running_sequence_count_max:
            return 1
        return max(
            statistics.running_sequence_count_max
            - max(statistics.running_sequence_count, self.live_sequence_count),
            0,
        )

    def report(self, now_s: float) -> ReplicaReport:
        """Describe the state of the replica for operators."""
        report = super().report(now_s)
        is_ready = report.state is ReplicaState.READY
        if is_ready and self.breaker.state(now_s) is not BreakerState.CLOSED:
            reason = "several sequences in a row have failed"
            return replace(report, state=ReplicaState.TRIPPED, reason=reason)
        return report


def best_condition(conditions: Collection[EngineCondition], warm_count: int) -> EngineCondition:
    """Choose the condition of the replica that is likely to take requests first.

    `conditions` are those of the replicas that are not drained; empty if all are drained.
    """
    if not conditions:
        return DRAINED
    best = max(
        conditions,
        key=lambda each: (
            _BEST_FIRST.index(each.state),
            each.loading_fraction,
            -each.retry_after_s,
        ),
    )
    return replace(best, starts_on_demand=best.starts_on_demand and not warm_count)


def unavailable(conditions: Collection[EngineCondition], replica_count: int) -> EngineError:
    """Build the error for a request that no replica takes. Parameters as in `best_condition`."""
    best = best_condition(conditions, warm_count=0)
    wait_s = min(
        (each.retry_after_s for each in conditions if each.state is best.state),
        default=best.retry_after_s,
    )
    which = "no replica takes requests; the first" if replica_count > 1 else "the engine"
    return best.fault(wait_s, which)


def all_drained(replica_count: int) -> EngineUnavailable:
    """Build the error for starting a model whose replicas are all drained."""
    which = "all replicas are" if replica_count > 1 else "the engine is"
    return EngineUnavailable(f"{which} being drained", retry_after_s=DRAINED_RETRY_S)


class SetStatistics:
    """Statistics of a set: sums, except for steps, which are averaged over the running replicas."""

    def __init__(self, replica_count: int) -> None:
        self._last: list[EngineStatistics] = [EngineStatistics()] * replica_count
        self._ready_count = -1
        self._steps = 0.0
        self._sum = EngineStatistics()

    def sum_of(
        self, statistics: list[EngineStatistics], ready_count: int, moves: tuple[int, int]
    ) -> EngineStatistics:
        """Add up the statistics of each replica, given in the same order until `become`.

        `ready_count` is the number of replicas that take requests, `moves` are the numbers of
        migrations and of replacements.
        """
        if self._ready_count != ready_count or statistics != self._last:  # changes per step only
            self._count_steps(statistics)
            self._last, self._ready_count = statistics, ready_count
            sums = {name: sum(getattr(each, name) for each in statistics) for name in SUMMED}
            self._sum = EngineStatistics(
                **sums, step_count=int(self._steps), replica_count=max(ready_count, 1)
            )
        if (self._sum.migration_count, self._sum.replacement_count) != moves:
            self._sum = msgspec.structs.replace(
                self._sum, migration_count=moves[0], replacement_count=moves[1]
            )
        return self._sum

    def become(self, kept: Sequence[int | None]) -> None:
        """Continue with other replicas: each one's place before, or None for a new one."""
        new = EngineStatistics()
        self._last = [new if place is None else self._last[place] for place in kept]
        self._ready_count = -1

    def _count_steps(self, statistics: Sequence[EngineStatistics]) -> None:
        step_count, busy_count = 0, 0
        for new, old in zip(statistics, self._last, strict=True):
            # A restarted engine counts from 0.
            steps = (
                new.step_count - old.step_count
                if new.step_count >= old.step_count
                else new.step_count
            )
            step_count += steps
            busy_count += bool(steps or new.running_sequence_count or new.waiting_sequence_count)
        self._steps += step_count / max(busy_count, 1)


Each = TypeVar("Each", bound=Member)


class Replicas(Generic[Each]):
    """Base of sets of replicas: start, condition, draining, close. Implements most of `Backend`."""

    def __init__(
        self,
        model: ModelInfo,
        replicas: Sequence[Each],
        warm_count: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the set without starting any replica; `start` starts the first `warm_count`."""
        assert replicas, "a set has replicas"
        self._model = model
        self._replicas = tuple(replicas)
        self._warm_count = warm_count
        self.clock = clock
        self.is_closing = False
        self._start_requested = asyncio.Event()
        self._replacement_count = 0
        self._statistics = SetStatistics(len(replicas))
        self.drained: frozenset[str] = frozenset()  # names of the replicas to drain
        self.has_changed = False  # whether it had other replicas before
        self._left_out: list[Each] = []  # not yet closed
        self._tasks: asyncio.TaskGroup | None = None  # while it is served

    @property
    def model(self) -> ModelInfo:
        """Implement `Backend.model`."""
        return self._model

    @property
    def replicas(self) -> tuple[Each, ...]:
        """All replicas, the warm ones first."""
        return self._replicas

    @property
    def pool(self) -> str:
        """Implement `Pooled.pool`: the set of its replicas' pools, if each has one."""
        pools = {pool_of(replica.backend) for replica in self._replicas}
        return "" if "" in pools else " ".join(sorted(pools))

    def healthy(self) -> bool:
        """Implement `Backend.healthy`."""
        return self.any_takes(self._replicas)

    def any_takes(self, members: Iterable[Each]) -> bool:
        """Return whether one of these members takes requests."""
        if not self.is_closing:
            now_s = self.clock()
            for replica in members:
                if replica.takes(now_s):
                    return True
        return False

    def within(self, regions: tuple[str, ...], *, is_bound: bool) -> Startable:
        """Return the part of the set that requests of these regions may use; all without regions.

        See `GenerationRequest` for `is_bound`.
        """
        return Reach(self, regions, is_bound=is_bound) if regions else self

    def reports(self) -> list[ReplicaReport]:
        """Describe the state of each replica. Never blocks."""
        now_s = self.clock()
        return [replica.report(now_s) for replica in self._replicas]

    async def start(self) -> None:
        """Implement `Backend.start`; return when the first replica takes requests."""
        await self.start_one(lambda: self._replicas)

    async def start_one(self, members: Callable[[], Sequence[Each]]) -> None:
        """Start the set; return when one of the members at that time takes requests."""
        self._start_requested.set()
        while not self.any_takes(members()):
            await self._first_start([each for each in members() if not each.is_draining])

    def condition(self) -> EngineCondition:
        """Implement `Backend.condition` by the replica that is likely to take requests first."""
        return self.condition_among(self._replicas)

    def condition_among(self, members: Sequence[Each]) -> EngineCondition:
        """Determine the condition by that of these members."""
        if self.is_closing:
            return EngineCondition(EngineState.CLOSED, reason="closed")
        if self.any_takes(members):
            return EngineCondition(EngineState.READY, loading_fraction=1.0)
        warm_count = sum(each in members for each in self._replicas[: self._warm_count])
        return best_condition(self._conditions(members), warm_count)

    def drain(self, names: Collection[str]) -> None:
        """Drain exactly the replicas with these names; their running requests finish."""
        self.drained = frozenset(names)
        for replica in self._replicas:
            replica.is_drained = replica.name in self.drained

    def become(self, replicas: Sequence[Each], warm_count: int) -> None:
        """Continue with these replicas, of which the first `warm_count` stay warm.

        New ones are served. Those left out get no new work, and are closed when they have none.
        """
        assert replicas, "a set has replicas"
        before = self._replicas
        places = {replica: place for place, replica in enumerate(before)}
        kept = [places.get(replica) for replica in replicas]
        self._replicas, self._warm_count = tuple(replicas), warm_count
        if kept != list(range(len(before))):
            self._statistics.become(kept)
            self.has_changed = True
        for replica in set(before).difference(replicas):
            replica.is_left_out = True
            self._left_out.append(replica)
            if self._tasks is not None:
                name = f"replica close {replica.name}"
                self._tasks.create_task(self._close_unused(replica), name=name)
        self.drain(self.drained)
        if self._tasks is not None and not self.is_closing:
            for replica in replicas:
                if replica not in places:
                    self._serve(replica, self._tasks)
            for replica in replicas[:warm_count]:
                if not replica.backend.healthy():
                    name = f"replica start {replica.name}"
                    self._tasks.create_task(self._warm(replica), name=name)

    async def _close_unused(self, replica: Each) -> None:
        """Close a replica that was left out, when its work has ended."""
        while replica.live_sequence_count and not self.is_closing:  # noqa: ASYNC110
            await asyncio.sleep(UNUSED_POLL_S)
        await replica.backend.close()
        self._left_out.remove(replica)

    def _serve(self, replica: Each, tasks: asyncio.TaskGroup) -> None:
        tasks.create_task(replica.backend.serve(), name=f"replica {replica.name}")

    async def close(self) -> None:
        """Implement `Backend.close`."""
        self.is_closing = True
        self._start_requested.set()
        async with asyncio.TaskGroup() as tasks:
            for replica in (*self._replicas, *self._left_out):
                tasks.create_task(replica.backend.close(), name=f"replica close {replica.name}")

    def _conditions(self, replicas: Collection[Each]) -> list[EngineCondition]:
        """List the conditions of the replicas that are not drained."""
        return [self._condition_of(replica) for replica in replicas if not replica.is_drained]

    async def serve(self) -> None:
        """Serve all replicas and start the warm ones. An unexpected error ends one replica only."""
        async with IncidentTaskGroup() as tasks:
            self._tasks = tasks
            for replica in self._replicas:
                self._serve(replica, tasks)
            for replica in self._replicas[: self._warm_count]:
                tasks.create_task(self._warm(replica), name=f"replica start {replica.name}")

    def _condition_of(self, replica: Each) -> EngineCondition:
        """Determine a replica's condition, which is READY only if it takes requests."""
        return replica.backend.condition()

    async def _warm(self, replica: Each) -> None:
        """Start a replica when the set is started. The replica reports its own failure."""
        await self._start_requested.wait()
        if not self.is_closing:
            with contextlib.suppress(EngineError):
                await replica.backend.start()

    async def _first_start(self, usable: Sequence[Each]) -> None:
        """Start the usable warm replicas, or the first if none is warm; wait until one is ready.

        Raises the first error if all of them fail, or EngineUnavailable if none is usable.
        """
        if self.is_closing:
            raise EngineUnavailable("the engine is closed", retry_after_s=0.0)
        warm = self._replicas[: self._warm_count]
        waited_for = [replica for replica in usable if replica in warm] or usable[:1]
        if not waited_for:
            raise all_drained(len(self._replicas))
        errors: list[EngineError] = []
        decided = asyncio.Event()

        async def start(replica: Each) -> None:
            try:
                await replica.backend.start()
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


class Reach(Generic[Each]):
    """Part of a set: the replicas that requests with these regions may use.

    Requests wait for it instead of the set, whose other replicas they do not enter. Implements
    `Startable`.
    """

    def __init__(self, whole: Replicas[Each], regions: tuple[str, ...], *, is_bound: bool) -> None:
        self._whole = whole
        self._regions = regions
        self._is_bound = is_bound
        self._of: tuple[Each, ...] = ()  # the replicas of the set, of which `_found` is a part
        self._found: tuple[Each, ...] = ()

    def _members(self) -> tuple[Each, ...]:
        if (replicas := self._whole.replicas) is not self._of:
            self._of = replicas
            self._found = tuple(
                each for each in replicas if each.serves(self._regions, is_bound=self._is_bound)
            )
        return self._found

    def healthy(self) -> bool:
        """Implement `Startable.healthy`."""
        return self._whole.any_takes(self._members())

    def condition(self) -> EngineCondition:
        """Implement `Startable.condition`. Without a replica it is FAILED: an operator must act."""
        if not (members := self._members()):
            return EngineCondition(EngineState.FAILED, reason=str(self._absent()))
        return self._whole.condition_among(members)

    async def start(self) -> None:
        """Implement `Startable.start`, for one of the replicas."""
        if not self._members():
            raise self._absent()
        await self._whole.start_one(self._members)

    def _absent(self) -> EngineUnavailable:
        return absent(self._whole.model, self._regions, is_bound=self._is_bound)


def absent(model: ModelInfo, regions: Sequence[str], *, is_bound: bool) -> EngineUnavailable:
    """Build the error for a request whose regions have no replica of the model."""
    where = " or ".join(map(repr, regions))
    if not is_bound:
        return EngineUnavailable(f"no replica of {model.name} is in {where}", DRAINED_RETRY_S)
    return EngineUnavailable(
        f"no replica of {model.name} is known to be in {where}, where your text has to stay: ask"
        " the operator for one, whose target names its region",
        DRAINED_RETRY_S,
    )
