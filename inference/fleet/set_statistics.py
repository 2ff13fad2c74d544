"""The statistics of several engines as those of one: what a queue before all of them can steer by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inference.engine import EngineStatistics

SUMMED = tuple(
    name
    for name in EngineStatistics.__dataclass_fields__
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
            self._sum = replace(self._sum, migration_count=moves[0], replacement_count=moves[1])
        return self._sum

    def _count_steps(self, told: Sequence[EngineStatistics]) -> None:
        step_count, busy_count = 0, 0
        for new, old in zip(told, self._told, strict=True):
            # An engine that was started anew counts from 0.
            steps = new.step_count - old.step_count if new.step_count >= old.step_count else new.step_count
            step_count += steps
            busy_count += bool(steps or new.running_sequence_count or new.waiting_sequence_count)
        self._steps += step_count / max(busy_count, 1)
