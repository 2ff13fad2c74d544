"""Decisions of the scaler: which launched replicas to start, stop, wake or put to sleep. Pure.

Six rules:

1. A replica that a process wants is started or woken, the one wanted for longest first.
2. A failed start is repeated after its delay, if the replica is still wanted.
3. A replica that no process wants sleeps if it can, else it stops.
4. If a pool has no room, idle replicas leave, until what leaves suffices: those first whose idle
   time costs most compared with starting them again.
5. A replica that leaves is stopped when no process wants it, and stays if one uses it again.
6. A start that has begun is not broken off.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from metering.control.launches import (
    ENDED,
    SERVING,
    Demand,
    Key,
    LaunchedRow,
    LaunchState,
    Move,
)

IDLE_S_MIN = 1.0  # of a replica before it makes room: its next request may be on the way
LOAD_S_MIN = 1.0  # replicas that start faster than that cost the same
# Units that are about to be free.
FREEING = (LaunchState.LEAVING, LaunchState.PAUSING, LaunchState.STOPPING)


@dataclass(frozen=True, slots=True)
class Pool:
    """Room for replicas that share machines: the sum of their units is at most `unit_count_max`."""

    unit_count_max: int


@dataclass(frozen=True, slots=True)
class LaunchTerms:
    """Facts about a version that the scaler needs.

    A replica takes `units` of its pool, and `sleeping_units` asleep. It is stopped after
    `stop_after_s` seconds of sleep; 0: never.
    """

    pool: str = ""
    units: int = 1
    sleeping_units: int = 0
    cost_per_hour: Decimal = Decimal(0)
    can_sleep: bool = False
    stop_after_s: float = 0.0

    def units_in(self, state: LaunchState) -> int:
        """Units that a replica takes in a state."""
        if state in ENDED:
            return 0
        return self.sleeping_units if state is LaunchState.SLEEPING else self.units


@dataclass(slots=True)
class Wanted:
    """Demand of all processes for one replica."""

    wanted_s: float = 0.0
    idle_s: float | None = None  # None while a process uses it
    process_ids: list[uuid.UUID] = field(default_factory=list)


def merged(demands: Mapping[uuid.UUID, Sequence[Demand]]) -> dict[Key, Wanted]:
    """Merge the demands of all processes, the replica wanted for longest first."""
    found: dict[Key, Wanted] = {}
    for process_id, each in demands.items():
        for demand in each:
            wanted = found.get(demand.key)
            if wanted is None:
                found[demand.key] = Wanted(demand.wanted_s, demand.idle_s, [process_id])
                continue
            wanted.process_ids.append(process_id)
            wanted.wanted_s = max(wanted.wanted_s, demand.wanted_s)
            is_used = wanted.idle_s is None or demand.idle_s is None
            wanted.idle_s = None if is_used else min(wanted.idle_s or 0.0, demand.idle_s or 0.0)
    return dict(sorted(found.items(), key=lambda each: -each[1].wanted_s))


def plan(
    terms: Mapping[str, LaunchTerms],
    pools: Mapping[str, Pool],
    rows: Iterable[LaunchedRow],
    wanted: Mapping[Key, Wanted],
) -> list[Move]:
    """Decide what to change now. Rows and demands of models that are not in `terms` are ignored."""
    known = {row.key: row for row in rows if row.served in terms}
    moves = [
        move
        for row in known.values()
        if (move := _settled(row, terms[row.served], wanted.get(row.key))) is not None
    ]
    moved = {move.key for move in moves}
    room = _Room(terms, pools, known, moves)
    for key in wanted:
        served, number = key
        row = known.get(key)
        if served not in terms or key in moved or not _is_startable(row):
            continue
        if row is None:
            after, units = LaunchState.STARTING, terms[served].units
        else:
            is_asleep = row.state is LaunchState.SLEEPING
            after = LaunchState.WAKING if is_asleep else LaunchState.STARTING
            units = terms[served].units - terms[served].units_in(row.state)
        if room.takes(terms[served].pool, units):
            moves.append(
                Move(
                    served,
                    number,
                    None if row is None else row.lifetime,
                    None if row is None else row.state,
                    after,
                    cost_per_hour=terms[served].cost_per_hour,
                )
            )
        else:
            moves.extend(room.made(terms[served].pool, units, wanted))
    return moves


def _is_startable(row: LaunchedRow | None) -> bool:
    """Return whether a start or a wake of the replica may begin now."""
    if row is None or row.state in (LaunchState.STOPPED, LaunchState.SLEEPING):
        return True
    return row.state is LaunchState.FAILED and row.retry_in_s <= 0


def _settled(row: LaunchedRow, terms: LaunchTerms, wanted: Wanted | None) -> Move | None:
    """Decide on a replica by its own state and demand."""
    if row.state in SERVING and wanted is None:
        sleeps = terms.can_sleep and row.state is LaunchState.READY
        return moved(row, LaunchState.PAUSING if sleeps else LaunchState.STOPPING)
    if row.state is LaunchState.LEAVING and wanted is not None and wanted.idle_s is None:
        return moved(row, LaunchState.READY)
    if row.state is LaunchState.SLEEPING and wanted is None and 0 < terms.stop_after_s <= row.age_s:
        return moved(row, LaunchState.STOPPING)
    return None


def moved(row: LaunchedRow, after: LaunchState) -> Move:
    """Build the move of a row that keeps its address, error and failures."""
    return Move(
        row.served,
        row.number,
        row.lifetime,
        row.state,
        after,
        error=row.error,
        failure_count=row.failure_count,
    )


class _Room:
    """Room of the pools while moves are added."""

    def __init__(
        self,
        terms: Mapping[str, LaunchTerms],
        pools: Mapping[str, Pool],
        rows: Mapping[Key, LaunchedRow],
        moves: Iterable[Move],
    ) -> None:
        self._terms = terms
        self._pools = pools
        self._rows = rows
        self._states = {key: row.state for key, row in rows.items()}
        self._taken: dict[str, int] = {}
        for move in moves:
            self._states[move.key] = move.after
        for (served, _), state in self._states.items():
            pool = terms[served].pool
            self._taken[pool] = self._taken.get(pool, 0) + terms[served].units_in(state)

    def takes(self, pool: str, units: int) -> bool:
        """Take units of a pool, if it has as many left."""
        if pool in self._pools:
            taken = self._taken.get(pool, 0) + units
            if taken > self._pools[pool].unit_count_max:
                return False
            self._taken[pool] = taken
        return True

    def made(self, pool: str, units: int, wanted: Mapping[Key, Wanted]) -> Iterator[Move]:
        """Let idle replicas of the pool leave until their units suffice.

        The units of what leaves for one start are not there for another one.
        """
        missing = self._taken.get(pool, 0) + units - self._pools[pool].unit_count_max
        self._taken[pool] = self._taken.get(pool, 0) + units
        missing -= sum(
            self._terms[served].units
            for (served, _), state in self._states.items()
            if state in FREEING and self._terms[served].pool == pool
        )
        for row in sorted(self._victims(pool, wanted), key=lambda each: -self._score(each, wanted)):
            if missing <= 0:
                return
            is_asleep = row.state is LaunchState.SLEEPING
            after = LaunchState.STOPPING if is_asleep else LaunchState.LEAVING
            self._states[row.key] = after
            missing -= self._terms[row.served].units_in(row.state)
            yield moved(row, after)

    def _victims(self, pool: str, wanted: Mapping[Key, Wanted]) -> Iterator[LaunchedRow]:
        for key, row in self._rows.items():
            terms, state = self._terms[row.served], self._states[key]
            if terms.pool != pool or not terms.units_in(state):
                continue
            if state is LaunchState.SLEEPING and key not in wanted:
                yield row
            elif state is LaunchState.READY and key in wanted:
                idle_s = wanted[key].idle_s
                if idle_s is not None and idle_s >= IDLE_S_MIN:
                    yield row

    def _score(self, row: LaunchedRow, wanted: Mapping[Key, Wanted]) -> float:
        """Cost of the idle time, compared with the time that a new start takes."""
        idle_s = row.age_s if row.key not in wanted else wanted[row.key].idle_s or 0.0
        cost = float(self._terms[row.served].cost_per_hour) or 1.0
        return idle_s * cost / max(row.load_s or 0.0, LOAD_S_MIN)
