"""One engine of several: where it is, whether it may be given anything, and how much work it has been given."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from inference.engine import Engine, EngineState, EngineStatistics
from inference.fleet.breaker import BreakerLimits, BreakerState, CircuitBreaker
from inference.fleet.prefixes import BLOCK_COUNT_MAX, SentPrefixes


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
        return ready and not self.is_draining and self.breaker.admits(now_s)

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

    def entered(self) -> None:
        """A sequence more."""
        self.live_sequence_count += 1

    def left(self) -> None:
        """A sequence less."""
        self.live_sequence_count -= 1
        assert self.live_sequence_count >= 0, "whoever leaves has entered"
