"""Autoscaling of a replica set: start one if all are full for some time, stop one if not needed.

The count stays between `min_count`, which on-demand engines keep warm by themselves, and all
replicas. New replicas use free memory only and never evict another model. A replica to be stopped
gets no new sequences and is stopped when empty; a set that is completely idle is left to the idle
timeouts of its engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from common.incidents import IncidentTaskGroup, Retries
from common.settings import number, setting, whole
from inference.engine import EngineState, EngineStatistics, ModelInfo
from inference.errors import EngineError
from inference.routing.placement import PlacementPolicy
from inference.routing.replica import Replica
from inference.routing.replica_set import RECOVERY_WAIT_S, ReplicaSet

INTERVAL_S = 0.5  # seconds between checks
FULL_S = 2.0  # seconds for which all replicas are full before another is started; ignores bursts
ROOM_SHARE = 0.5  # load of the remaining replicas at which one is stopped; avoids flapping
_log = logging.getLogger("weir.inference.routing")


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Numbers of engines, their memory, and the time after which an idle one stops."""

    # How many engines of each model stay loaded. With 0, the first request starts one.
    count_min: int = setting("WEIR_MIN_REPLICAS", 1, whole(0, 64))
    # How many engines a model may have. Another one starts when all have been full for some seconds
    # and memory is free.
    count_max: int = setting("WEIR_MAX_REPLICAS", 1, whole(1, 64))
    # How long an engine beyond the minimum may be without a request before it stops. 0: for ever.
    idle_timeout_s: float = setting("WEIR_MODEL_IDLE_TIMEOUT_S", 0.0, number(0, 86_400))
    # How many engine workers wait for a model with torch imported, so that it starts faster. Some
    # 130 MB each.
    spare_workers: int = setting("WEIR_SPARE_WORKERS", 0, whole(0, 16))
    # How much memory all engines of a machine may take together; 0: as much as there is. If one
    # does not fit, it waits until idle ones have stopped. Processes with one
    # WEIR_ENGINE_DIRECTORY share it.
    memory_bytes: int = setting("WEIR_ENGINE_MEMORY_BYTES", 0, whole(0, 2**50))


@dataclass(slots=True)
class Scaler:
    """Autoscaler that starts and stops replicas by their statistics. Times are seconds of one
    clock.

    The first `min_count` replicas are never stopped. Another is stopped after `idle_timeout_s`
    seconds without need; 0 stops none.
    """

    min_count: int
    idle_timeout_s: float
    _full_since_s: float | None = None
    _roomy_since_s: float | None = None
    _leaving: set[str] = field(default_factory=set)  # names of replicas being stopped

    def poll(self, replicas: Sequence[Replica], now_s: float) -> Replica | None:
        """Stop a replica if it is time; return the replica to start, or None."""
        self._leaving &= {replica.name for replica in replicas if replica.is_leaving}
        self._finish_stops(replicas)
        serving = [replica for replica in replicas if replica.takes(now_s)]
        statistics = [replica.engine.statistics() for replica in serving]
        self._full_since_s = since(
            self._full_since_s, bool(statistics) and all(map(is_full, statistics)), now_s
        )
        self._roomy_since_s = since(
            self._roomy_since_s, self._others_would_do(serving, statistics), now_s
        )
        if self.min_count and not serving and any(replica.is_drained for replica in replicas):
            return self._one_more(replicas)  # replaces a drained warm replica
        if self._full_since_s is not None and now_s - self._full_since_s >= FULL_S:
            self._full_since_s = None  # wait the full time again before the next start
            return self._one_more(replicas)
        if (
            self._roomy_since_s is not None
            and self.idle_timeout_s
            and now_s - self._roomy_since_s >= self.idle_timeout_s
        ):
            self._roomy_since_s = None
            self._begin_stop(serving[-1])
        return None

    def _others_would_do(
        self, serving: Sequence[Replica], statistics: Sequence[EngineStatistics]
    ) -> bool:
        """Return whether the other replicas could take over the load of the last one."""
        if len(serving) < 2 or len(serving) <= self.min_count or serving[-1].stoppable is None:
            return False
        load = sum(each.running_sequence_count + each.waiting_sequence_count for each in statistics)
        return load <= ROOM_SHARE * sum(each.running_sequence_count_max for each in statistics[:-1])

    def _one_more(self, replicas: Sequence[Replica]) -> Replica | None:
        """Keep a replica that is being stopped, or choose a cold one, unless one is loading."""
        for replica in replicas:
            if (
                replica.name in self._leaving
                and replica.engine.healthy()
                and not replica.is_drained
            ):
                self._leaving.discard(replica.name)
                replica.is_leaving = False
                return None
        usable = [replica for replica in replicas if not replica.is_drained]
        states = [replica.engine.condition().state for replica in usable]
        if EngineState.LOADING in states:
            return None
        cold = (
            replica
            for replica, state in zip(usable, states, strict=True)
            if state is EngineState.COLD
        )
        return next(
            (each for each in cold if each.stoppable is not None and each.stoppable.fits_now()),
            None,
        )

    def _begin_stop(self, replica: Replica) -> None:
        _log.info("stopping replica %s: the others have room for the load", replica.name)
        replica.is_leaving = True
        self._leaving.add(replica.name)

    def _finish_stops(self, replicas: Sequence[Replica]) -> None:
        """Stop marked replicas that are empty, and make stopped ones available again."""
        for replica in replicas:
            if replica.name not in self._leaving:
                continue
            assert replica.stoppable is not None, "only stoppable engines are marked"
            if replica.stoppable.idle_since_s() is not None:
                replica.stoppable.evict()
            if not replica.engine.healthy():
                self._leaving.discard(replica.name)
                replica.is_leaving = False


class ScaledReplicaSet(ReplicaSet):
    """Replica set that starts and stops replicas by load. Implements `Engine`."""

    def __init__(
        self,
        model: ModelInfo,
        replicas: Sequence[Replica],
        policy: PlacementPolicy,
        *,
        scaler: Scaler,
        recovery_wait_s: float = RECOVERY_WAIT_S,
    ) -> None:
        """Create the set, with the scaler's `min_count` replicas warm. See `ReplicaSet`."""
        super().__init__(
            model, replicas, policy, warm_count=scaler.min_count, recovery_wait_s=recovery_wait_s
        )
        self.scaler = scaler

    async def serve(self) -> None:
        """Implement `Engine.serve`."""
        async with IncidentTaskGroup() as tasks:
            loop = Retries("replica_scaling").keep_running(partial(self._scale, tasks))
            scaling = tasks.create_task(loop, name=f"scaling of {self.model.name}")
            await super().serve()
            scaling.cancel()

    async def _scale(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            if len(self.replicas) == 1:
                continue  # its own idle timeout suffices
            chosen = self.scaler.poll(self.replicas, self.clock())
            if chosen is not None and not self.is_closing:
                _log.info("starting replica %s: the others are full", chosen.name)
                tasks.create_task(start(chosen), name=f"replica start {chosen.name}")


async def start(replica: Replica) -> None:
    """Start a replica's engine, ignoring errors: the replica reports its own failure."""
    with contextlib.suppress(EngineError):
        await replica.engine.start()


def is_full(statistics: EngineStatistics) -> bool:
    """Return whether an engine has no free place, or sequences that wait."""
    running_max = statistics.running_sequence_count_max
    return (
        statistics.waiting_sequence_count > 0
        or 0 < running_max <= statistics.running_sequence_count
    )


def since(before_s: float | None, holds: bool, now_s: float) -> float | None:
    """Return when a condition began to hold without a break; None if it does not hold now."""
    if not holds:
        return None
    return now_s if before_s is None else before_s
