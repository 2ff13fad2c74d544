"""One engine of several, and what several stand as together: breaker, sent prefixes, load, state, sums of statistics."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import msgspec

from common.backoff import Backoff
from inference.engine import Engine, EngineCondition, EngineState, EngineStatistics
from inference.errors import EngineError, EngineStartFailed, EngineUnavailable
from inference.kv_blocks import KV_BLOCK_TOKENS, block_hashes


class BreakerState(StrEnum):
    """CLOSED lets everybody through, OPEN nobody, HALF_OPEN one at a time until that one tells."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """failure_count_max: failures in a row that open it. pause_s_min: its first time open; doubled by each probe that fails."""

    failure_count_max: int = 3
    pause_s_min: float = 2.0
    pause_s_max: float = 60.0

    def __post_init__(self) -> None:
        """Raises ValueError for bounds that mean nothing."""
        if self.failure_count_max < 1 or not 0 < self.pause_s_min <= self.pause_s_max:
            raise ValueError("failure_count_max must be at least 1, and pause_s_min above 0 and at most pause_s_max")


class CircuitBreaker:
    """Of one replica. Times are seconds of one monotonic clock.

    A process that dies fails all of its sequences at once, and that is one failure: a sequence that began before the last failure
    says nothing new by failing too.
    """

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self.failure_count = 0  # in a row
        self._failed_at_s: float | None = None
        self._open_until_s: float | None = None  # None: closed
        self.is_closed = True  # lets everybody through
        self._pauses = Backoff(limits.pause_s_min, limits.pause_s_max)
        self._probing = False

    def state(self, now_s: float) -> BreakerState:
        """As it is now."""
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until_s else BreakerState.HALF_OPEN

    def admits(self, now_s: float) -> bool:
        """Whether a sequence may be begun now."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._probing)

    def wait_s(self, now_s: float) -> float:
        """Until it may admit one; 0 if it is not open."""
        return 0.0 if self._open_until_s is None else max(self._open_until_s - now_s, 0.0)

    def begun(self, now_s: float) -> bool:
        """A sequence begins; whether it is the probe."""
        if self.is_closed:
            return False
        assert self.admits(now_s), "whoever begins has asked"
        self._probing = self.state(now_s) is BreakerState.HALF_OPEN
        return self._probing

    def succeeded(self) -> None:
        """A sequence that began after the last failure has had a token."""
        self.failure_count = 0
        self._pauses.reset()
        self._open_until_s, self.is_closed = None, True
        self._probing = False

    def failed(self, began_at_s: float, now_s: float) -> None:
        """A sequence that began then was lost."""
        if self._failed_at_s is not None and began_at_s <= self._failed_at_s:
            return
        self._failed_at_s = now_s
        self.failure_count += 1
        if self._probing or self.failure_count >= self._limits.failure_count_max:
            self._open_until_s, self.is_closed = now_s + self._pauses.next_s(), False
        self._probing = False

    def told_nothing(self) -> None:
        """The probe ended without showing anything: it was cancelled, or found no place."""
        self._probing = False

    def is_news(self, began_at_s: float) -> bool:
        """Whether a sequence that began then says anything about the time since the last failure."""
        return self._failed_at_s is None or began_at_s > self._failed_at_s


BLOCK_COUNT_MAX = 65_536  # blocks: of an engine that does not tell how many it has; a million tokens, some 10 MB here
ENGINE_BLOCK_TOKENS_MAX = 128  # tokens: engines count in blocks of up to so many, and so may tell that much less than is there
Keys = tuple[int, ...]


def prefix_keys(token_ids: Sequence[int], cache_salt: str) -> Keys:
    """Of the full blocks of a prompt that a cache could serve: never its last token."""
    return block_hashes(tuple(token_ids), cache_salt, KV_BLOCK_TOKENS)[: max(len(token_ids) - 1, 0) // KV_BLOCK_TOKENS]


class Found(NamedTuple):
    """The leading blocks of a prompt that were sent before. computed: when each was last used, for those known to be computed."""

    block_count: int
    computed: tuple[int, ...]

    @property
    def token_count(self) -> int:
        """In tokens."""
        return self.block_count * KV_BLOCK_TOKENS


NOTHING_FOUND = Found(0, ())


class SentPrefixes:
    """The blocks of one replica. Uses are numbered in order."""

    def __init__(self, block_count_max: int = BLOCK_COUNT_MAX) -> None:
        self.block_count_max = block_count_max
        self._uses: OrderedDict[int, int] = OrderedDict()  # the least recently used first
        self._computed: set[int] = set()
        self._use = 0

    def __len__(self) -> int:
        return len(self._uses)

    def find(self, keys: Keys) -> Found:
        """The longest known beginning. Looks only."""
        count = 0
        computed: list[int] = []
        for key in keys:
            if (use := self._uses.get(key)) is None:
                break
            if count == len(computed) and key in self._computed:
                computed.append(use)
            count += 1
        return Found(count, tuple(computed))

    def sent(self, keys: Keys) -> None:
        """A prompt is on its way; it counts at once, so that those who share it follow it."""
        self._touch(keys)
        while len(self._uses) > self.block_count_max:
            key, _ = self._uses.popitem(last=False)
            self._computed.discard(key)

    def computed(self, keys: Keys) -> None:
        """The engine has computed these blocks, as far as they are still known."""
        self._computed.update(key for key in keys if key in self._uses)

    def found_missing(self, found: Found, token_count: int) -> bool:
        """The engine has served so many tokens of what was found: what it lacked, and all that was used less recently, is gone.

        found: as it was when the prompt was sent. Only blocks that had been computed show anything: others may not be there yet.
        Returns whether anything was missing.
        """
        missing = found.computed[(token_count + ENGINE_BLOCK_TOKENS_MAX) // KV_BLOCK_TOKENS :]
        last_gone = max(missing, default=0)
        while self._uses and self._uses[key := next(iter(self._uses))] <= last_gone:
            del self._uses[key]
            self._computed.discard(key)
        return bool(missing)

    def clear(self) -> None:
        """The engine has lost its cache."""
        self._uses.clear()
        self._computed.clear()

    def _touch(self, keys: Keys) -> None:
        # The tail first, as engines free it: a shared head is then the last to be forgotten.
        for key in reversed(keys):
            self._use += 1
            self._uses[key] = self._use
            self._uses.move_to_end(key)


class ReplicaState(StrEnum):
    """What an operator is told of a replica: its engine's state, unless it is kept out although that is ready."""

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
    """One replica at one moment. outstanding_token_count: tokens still to be computed, by the set's own account.

    statistics: what its engine told last; None of one that is counted with another.
    is_drained: an operator wants it to be given nothing new, whatever its state.
    """

    name: str
    region: str
    state: ReplicaState
    live_sequence_count: int
    outstanding_token_count: int
    reason: str = ""
    statistics: EngineStatistics | None = None
    is_drained: bool = False


class Replica:
    """An engine as one of several. name: unique among them. region: where it is; empty where that does not matter."""

    def __init__(self, name: str, engine: Engine, region: str = "", breaker: BreakerLimits | None = None) -> None:
        self.name = name
        self.engine = engine
        self.region = region
        self.breaker = CircuitBreaker(breaker or BreakerLimits())
        self.prefixes = SentPrefixes()
        self.is_drained = False  # by an operator's order
        self.is_leaving = False  # because it is not needed: see `scaling.py`
        self.outstanding_token_count = 0
        self.live_sequence_count = 0
        self.placed_at = 0  # number of the last placement, so that equal ones take turns
        self._was_ready = False

    @property
    def is_draining(self) -> bool:
        """Whether it is given nothing new, and runs what it has to its end."""
        return self.is_drained or self.is_leaving

    def takes(self, now_s: float) -> bool:
        """Whether a sequence may be placed here now."""
        ready = self.engine.healthy()
        if not ready and self._was_ready:
            self.prefixes.clear()  # the cache went with the process
        self._was_ready = ready
        return ready and not (self.is_drained or self.is_leaving) and (self.breaker.is_closed or self.breaker.admits(now_s))

    def refresh(self) -> None:
        """Take over what the engine tells of its cache's size."""
        told = self.engine.statistics().kv_block_count_total
        self.prefixes.block_count_max = told or BLOCK_COUNT_MAX

    @property
    def free_place_count(self) -> int:
        """Places in its batch that nobody has or waits for; one of an engine that does not tell how many it has."""
        told = self.engine.statistics()
        if told.waiting_sequence_count:
            return 0
        if not told.running_sequence_count_max:
            return 1
        return max(told.running_sequence_count_max - max(told.running_sequence_count, self.live_sequence_count), 0)

    def report(self, now_s: float) -> ReplicaReport:
        """For operators."""
        condition = self.engine.condition()
        state, reason = ReplicaState(condition.state.value), condition.reason
        if condition.state is EngineState.READY:
            if self.is_draining:
                state, reason = ReplicaState.DRAINING, f"{self.live_sequence_count} sequences to go"
            elif self.breaker.state(now_s) is not BreakerState.CLOSED:
                state, reason = ReplicaState.TRIPPED, "sequences were lost one after the other"
        counts = self.live_sequence_count, self.outstanding_token_count
        return ReplicaReport(self.name, self.region, state, *counts, reason, self.engine.statistics(), self.is_drained)


DRAINED_RETRY_S = 5.0  # seconds: when it is worth asking again for a model whose replicas are all drained; a person decides it
DRAINED = EngineCondition(EngineState.RESTARTING, retry_after_s=DRAINED_RETRY_S, reason="it is being drained")

# The more a state promises, the later it stands.
_PROMISE = (
    EngineState.CLOSED,
    EngineState.FAILED,
    EngineState.COLD,
    EngineState.RESTARTING,
    EngineState.LOADING,
    EngineState.READY,
)


def standing(told: Collection[EngineCondition], warm_count: int) -> EngineCondition:
    """That of the replica which is likeliest to take requests first. told: of those in use; none if all are drained."""
    if not told:
        return DRAINED
    best = max(told, key=lambda each: (_PROMISE.index(each.state), each.loading_fraction, -each.retry_after_s))
    return replace(best, starts_on_demand=best.starts_on_demand and not warm_count)


def nobody_takes(told: Collection[EngineCondition], replica_count: int) -> EngineError:
    """Why a request finds no place. told: as above. replica_count: of the model."""
    best = standing(told, warm_count=0)
    if best.state is EngineState.FAILED:
        return EngineStartFailed(best.reason)
    wait_s = min((each.retry_after_s for each in told if each.state is best.state), default=best.retry_after_s)
    who = "no replica takes requests; the first" if replica_count > 1 else "the engine"
    return EngineUnavailable(f"{who} is {best.state.value}: {best.reason}", wait_s)


def all_drained(replica_count: int) -> EngineUnavailable:
    """Why a model cannot be started."""
    who = "all replicas are" if replica_count > 1 else "the engine is"
    return EngineUnavailable(f"{who} being drained", retry_after_s=DRAINED_RETRY_S)


SUMMED = tuple(
    name
    for name in EngineStatistics.__struct_fields__
    if name not in ("step_count", "replica_count", "migration_count", "replacement_count")
)


class SetStatistics:
    """Adds up. Steps are counted by the mean pace of those that take some, so that one step of waiting is one step of an engine."""

    def __init__(self, replica_count: int) -> None:
        self._told: list[EngineStatistics] = [EngineStatistics()] * replica_count
        self._ready_count = -1
        self._steps = 0.0
        self._sum = EngineStatistics()

    def sum_of(self, told: list[EngineStatistics], ready_count: int, moves: tuple[int, int]) -> EngineStatistics:
        """told: of each replica, always in the same order. ready_count: that take requests. moves: migrations, replacements."""
        if self._ready_count != ready_count or told != self._told:  # asked several times for a request, and changes with a step
            self._count_steps(told)
            self._told, self._ready_count = told, ready_count
            sums = {name: sum(getattr(each, name) for each in told) for name in SUMMED}
            self._sum = EngineStatistics(**sums, step_count=int(self._steps), replica_count=max(ready_count, 1))
        if (self._sum.migration_count, self._sum.replacement_count) != moves:
            self._sum = msgspec.structs.replace(self._sum, migration_count=moves[0], replacement_count=moves[1])
        return self._sum

    def _count_steps(self, told: Sequence[EngineStatistics]) -> None:
        step_count, busy_count = 0, 0
        for new, old in zip(told, self._told, strict=True):
            # An engine that was started anew counts from 0.
            steps = new.step_count - old.step_count if new.step_count >= old.step_count else new.step_count
            step_count += steps
            busy_count += bool(steps or new.running_sequence_count or new.waiting_sequence_count)
        self._steps += step_count / max(busy_count, 1)
