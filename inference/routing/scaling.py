"""How many replicas of a set run: one more when all of them are full for some time, one less when the others would do.

Between the least, which slots keep warm by themselves, and all there are. More replicas take free memory only: they never push out
another model. A replica that is to go is given nothing new, and is stopped when it is empty; a set that is idle altogether is left
to the slots' own idle time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

from common.incidents import IncidentTaskGroup, Retries
from inference.engine import EngineState, EngineStatistics, ModelInfo
from inference.errors import EngineError
from inference.routing.placement import PlacementPolicy
from inference.routing.replica import Replica
from inference.routing.replica_set import RECOVERY_WAIT_S, ReplicaSet

INTERVAL_S = 0.5  # seconds between looks
FULL_S = 2.0  # seconds for which all replicas are full before another is started: a burst that is over sooner needs none
ROOM_SHARE = 0.5  # of the places of the others, that may be taken if one is to go: so much load more does not bring it back
_log = logging.getLogger("weir.inference.routing")


@runtime_checkable
class Stoppable(Protocol):
    """An engine that can be stopped and started again, as `OnDemandEngine` can."""

    def idle_since_s(self) -> float | None:
        """When it was last used; None while it is in use or does not run."""

    def evict(self) -> None:
        """Stop it, if it is idle."""

    def fits_now(self) -> bool:
        """Whether it could be started without anybody giving way."""


@dataclass(slots=True)
class Scaler:
    """Decides, from what the replicas tell, at the times at which it is asked. Times in seconds of one clock.

    min_count: so many, the first ones, are none of its business. idle_timeout_s: for which one must not have been needed; 0 stops
    none.
    """

    min_count: int
    idle_timeout_s: float
    _full_since_s: float | None = None
    _roomy_since_s: float | None = None
    _leaving: set[str] = field(default_factory=set)  # names, of those that were told to go

    def look(self, replicas: Sequence[Replica], now_s: float) -> Replica | None:
        """Let one go if it is time; the replica that is to be started, if one is."""
        self._see_off(replicas)
        serving = [replica for replica in replicas if replica.takes(now_s)]
        told = [replica.engine.statistics() for replica in serving]
        self._full_since_s = since(self._full_since_s, bool(told) and all(map(is_full, told)), now_s)
        self._roomy_since_s = since(self._roomy_since_s, self._others_would_do(serving, told), now_s)
        if self.min_count and not serving and any(replica.is_drained for replica in replicas):
            return self._one_more(replicas)  # the place of one that was kept warm
        if self._full_since_s is not None and now_s - self._full_since_s >= FULL_S:
            self._full_since_s = None  # the next one only after another such time
            return self._one_more(replicas)
        if self._roomy_since_s is not None and self.idle_timeout_s and now_s - self._roomy_since_s >= self.idle_timeout_s:
            self._roomy_since_s = None
            self._let_go(serving[-1])
        return None

    def _others_would_do(self, serving: Sequence[Replica], told: Sequence[EngineStatistics]) -> bool:
        """Whether the last one is beyond the least, and the load would leave the others with room."""
        if len(serving) < 2 or len(serving) <= self.min_count or not isinstance(serving[-1].engine, Stoppable):
            return False
        load = sum(each.running_sequence_count + each.waiting_sequence_count for each in told)
        return load <= ROOM_SHARE * sum(each.running_sequence_count_max for each in told[:-1])

    def _one_more(self, replicas: Sequence[Replica]) -> Replica | None:
        """One that was to go stays; else a cold one for which there is memory, unless one is on its way."""
        for replica in replicas:
            if replica.name in self._leaving and replica.engine.healthy() and not replica.is_drained:
                self._leaving.discard(replica.name)
                replica.is_leaving = False
                return None
        usable = [replica for replica in replicas if not replica.is_drained]
        states = [replica.engine.condition().state for replica in usable]
        if EngineState.LOADING in states:
            return None
        cold = (replica for replica, state in zip(usable, states, strict=True) if state is EngineState.COLD)
        return next((each for each in cold if isinstance(each.engine, Stoppable) and each.engine.fits_now()), None)

    def _let_go(self, replica: Replica) -> None:
        _log.info("replica %s is stopped: the others have room for all", replica.name)
        replica.is_leaving = True
        self._leaving.add(replica.name)

    def _see_off(self, replicas: Sequence[Replica]) -> None:
        """Stop those that were told to go and are empty; one that has gone may come back when it is needed."""
        for replica in replicas:
            if replica.name not in self._leaving:
                continue
            engine = replica.engine
            assert isinstance(engine, Stoppable), "no other is let go"
            if engine.idle_since_s() is not None:
                engine.evict()
            if not engine.healthy():
                self._leaving.discard(replica.name)
                replica.is_leaving = False


class ScaledReplicaSet(ReplicaSet):
    """A set of which as many replicas run as are needed. See `Engine` for the contract."""

    def __init__(
        self,
        model: ModelInfo,
        replicas: Sequence[Replica],
        policy: PlacementPolicy,
        *,
        scaler: Scaler,
        recovery_wait_s: float = RECOVERY_WAIT_S,
    ) -> None:
        """See `ReplicaSet`; as many as the scaler's least are warm."""
        super().__init__(model, replicas, policy, warm_count=scaler.min_count, recovery_wait_s=recovery_wait_s)
        self._scaler = scaler

    async def serve(self) -> None:
        """See `Engine.serve`."""
        async with IncidentTaskGroup() as tasks:
            loop = Retries("replica_scaling").keep_running(partial(self._scale, tasks))
            scaling = tasks.create_task(loop, name=f"scaling of {self.model.name}")
            await super().serve()
            scaling.cancel()

    async def _scale(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            chosen = self._scaler.look(self.replicas, self.clock())
            if chosen is not None and not self.is_closing:
                _log.info("replica %s is started: the others are full", chosen.name)
                tasks.create_task(start(chosen), name=f"replica start {chosen.name}")


async def start(replica: Replica) -> None:
    """Load it. Its failure is its own to tell."""
    with contextlib.suppress(EngineError):
        await replica.engine.start()


def is_full(told: EngineStatistics) -> bool:
    """Whether an engine has sequences waiting for a place."""
    places = told.running_sequence_count_max
    return told.waiting_sequence_count > 0 or 0 < places <= told.running_sequence_count


def since(before_s: float | None, holds: bool, now_s: float) -> float | None:
    """Since when something holds without a break; None while it does not."""
    if not holds:
        return None
    return now_s if before_s is None else before_s
