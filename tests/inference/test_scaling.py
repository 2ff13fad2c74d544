"""Number of running replicas, decided from their reports: tables of load over time."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from inference.engine import EngineCondition, EngineState, EngineStatistics, ModelInfo
from inference.routing.replica import Replica
from inference.routing.scaling import FULL_S, Scaler

RUNNING_MAX = 4
IDLE_S = 60.0


@dataclass
class FakeEngine:
    """Engine of a replica with scripted reports."""

    state: EngineState = EngineState.COLD
    running: int = 0
    waiting: int = 0
    has_room: bool = True
    stopped_count: int = 0
    model: ModelInfo = field(
        default_factory=lambda: ModelInfo("m", "fake", "fake", 100, 100, "/nowhere")
    )

    def healthy(self) -> bool:
        return self.state is EngineState.READY

    def condition(self) -> EngineCondition:
        return EngineCondition(self.state)

    def statistics(self) -> EngineStatistics:
        reported = EngineStatistics(running_sequence_count_max=RUNNING_MAX)
        return msgspec.structs.replace(
            reported, running_sequence_count=self.running, waiting_sequence_count=self.waiting
        )

    def begin_use(self) -> None:
        """Implement `Stoppable.begin_use`: it is not stopped in use here."""

    def end_use(self) -> None:
        """Implement `Stoppable.end_use`."""

    def fits_now(self) -> bool:
        return self.has_room

    def idle_since_s(self) -> float | None:
        return 0.0 if self.healthy() and not self.running else None

    def evict(self) -> None:
        assert self.idle_since_s() is not None, "one in use is not stopped"
        self.state = EngineState.COLD
        self.stopped_count += 1


class World:
    """Three slots, of which one is kept."""

    def __init__(self, min_count: int = 1) -> None:
        self.engines = [
            FakeEngine(EngineState.READY if index == 0 else EngineState.COLD) for index in range(3)
        ]
        self.replicas = [Replica(f"m#{index}", engine) for index, engine in enumerate(self.engines)]  # type: ignore[arg-type]  # tells enough
        self.scaler = Scaler(min_count, IDLE_S)
        self.now_s = 0.0

    def load(self, *counts: int) -> None:
        """Set the number of sequences on each replica; the excess is queued."""
        for engine, replica, count in zip(self.engines, self.replicas, counts, strict=True):
            engine.running, engine.waiting = min(count, RUNNING_MAX), max(count - RUNNING_MAX, 0)
            replica.live_sequence_count = count

    def after(self, seconds: float) -> str | None:
        """Scale twice a second for this time; return the name of the replica to start."""
        chosen = None
        for _ in range(round(seconds * 2)):
            self.now_s += 0.5
            found = self.scaler.poll(self.replicas, self.now_s)
            if found is not None:
                assert chosen is None, "one at a time"
                chosen = found.name
        return chosen

    def ready(self, *names: str) -> None:
        for replica, engine in zip(self.replicas, self.engines, strict=True):
            if replica.name in names:
                engine.state = EngineState.READY


def test_one_more_is_started_when_all_are_full_for_some_time() -> None:
    world = World()
    world.load(6, 0, 0)
    assert world.after(FULL_S - 0.5) is None
    world.load(2, 0, 0)
    assert world.after(0.5) is None
    world.load(6, 0, 0)
    assert world.after(FULL_S) is None, "it began anew"
    assert world.after(0.5) == "m#1"

    world.engines[1].state = EngineState.LOADING
    assert world.after(5 * FULL_S) is None, "one is on its way"
    world.ready("m#1")
    world.load(6, 1, 0)
    assert world.after(5 * FULL_S) is None, "there is room on the new one"
    world.load(6, 5, 0)
    assert world.after(FULL_S + 1) == "m#2"


def test_one_more_needs_free_memory() -> None:
    world = World()
    world.load(6, 0, 0)
    world.engines[1].has_room = world.engines[2].has_room = False
    assert world.after(5 * FULL_S) is None


def test_the_last_one_goes_when_the_others_would_do_and_only_when_it_is_empty() -> None:
    world = World()
    world.ready("m#1", "m#2")
    world.load(1, 1, 1)
    world.after(IDLE_S)
    assert not world.replicas[2].is_draining
    world.after(0.5)
    assert world.replicas[2].is_draining, "it gets nothing new"
    assert not world.replicas[1].is_draining, "one at a time"
    world.after(2.0)
    assert world.engines[2].healthy(), "it still has a sequence"

    world.load(2, 1, 0)
    world.after(1.0)
    assert world.engines[2].stopped_count == 1
    assert not world.replicas[2].is_draining, "it may come back"

    world.load(1, 1, 0)
    world.after(IDLE_S + 1.5)
    assert world.replicas[1].is_draining
    world.load(1, 0, 0)
    world.after(1.0)
    assert world.engines[1].stopped_count == 1
    world.load(0, 0, 0)
    world.after(3 * IDLE_S)
    assert world.engines[0].healthy(), "the least stay"


def test_the_least_may_be_several() -> None:
    world = World(min_count=2)
    world.ready("m#1", "m#2")
    world.load(0, 0, 0)
    world.after(10 * IDLE_S)
    assert [engine.stopped_count for engine in world.engines] == [0, 0, 1]


def test_one_that_was_to_go_stays_when_it_is_needed() -> None:
    world = World()
    world.ready("m#1")
    world.load(0, 1, 0)
    world.after(IDLE_S + 1)
    assert world.replicas[1].is_draining
    world.load(9, 1, 0)
    assert world.after(FULL_S + 1) is None, "instead of a cold one"
    assert not world.replicas[1].is_draining


def test_a_load_that_needs_both_keeps_both_and_what_an_operator_drains_is_left_alone() -> None:
    world = World()
    world.ready("m#1")
    world.load(2, 2, 0)
    world.after(10 * IDLE_S)
    assert not world.replicas[1].is_draining

    world.replicas[1].is_drained = True
    world.load(0, 0, 0)
    world.after(10 * IDLE_S)
    assert world.engines[1].stopped_count == 0
    assert world.replicas[1].is_draining


def test_one_takes_the_place_of_a_warm_one_that_is_drained() -> None:
    world = World()
    world.replicas[0].is_drained = True
    assert world.after(0.5) == "m#1"
    world.engines[1].state = EngineState.LOADING
    assert world.after(1.0) is None, "one is enough"
    world.ready("m#1")
    assert world.after(10 * FULL_S) is None


def test_nothing_is_stopped_without_an_idle_time() -> None:
    world = World()
    world.scaler = Scaler(1, 0.0)
    world.ready("m#1", "m#2")
    world.load(0, 0, 0)
    world.after(1000.0)
    assert all(engine.healthy() for engine in world.engines)
