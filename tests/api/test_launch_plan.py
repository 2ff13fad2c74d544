"""Decisions of the scaler of launched replicas, as tables and as rules that always hold."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.fleet.launch_plan import LaunchTerms, Pool, Wanted, merged, plan
from metering.control.launches import Demand, Key, LaunchedRow, LaunchState

LIFETIME = uuid.UUID(int=1)
POOLS = {"gpus": Pool(2)}
TERMS = {
    "a": LaunchTerms("gpus"),
    "b": LaunchTerms("gpus", can_sleep=True, stop_after_s=60.0),
    "c": LaunchTerms("gpus", units=2),
    "dear": LaunchTerms("gpus", cost_per_hour=Decimal(10)),
}


def row(served: str, state: str, number: int = 0, **values: float) -> LaunchedRow:
    return LaunchedRow(
        served,
        number,
        LaunchState(state),
        LIFETIME,
        host="here",
        address="",
        error="",
        failure_count=0,
        age_s=values.get("age", 100.0),
        ready_s=100.0,
        retry_in_s=values.get("retry", 0.0),
        load_s=values.get("load", 10.0),
    )


USED, IDLE = Wanted(5.0, None), Wanted(5.0, 50.0)
CASES: dict[str, tuple[list[LaunchedRow], dict[str, Wanted], list[str]]] = {
    "a first start": ([], {"a": USED}, ["a: None > starting"]),
    "a start again": ([row("a", "stopped")], {"a": USED}, ["a: stopped > starting"]),
    "a start that is under way": ([row("a", "starting")], {"a": USED}, []),
    "a start that nobody waits for": ([row("a", "starting")], {}, []),
    "a failure that still rests": ([row("a", "failed", retry=3.0)], {"a": USED}, []),
    "a failure that is over": ([row("a", "failed")], {"a": USED}, ["a: failed > starting"]),
    "a failure that nobody wants": ([row("a", "failed")], {}, []),
    "no demand": ([row("a", "ready")], {}, ["a: ready > stopping"]),
    "no demand, and sleep": ([row("b", "ready")], {}, ["b: ready > pausing"]),
    "a wake": ([row("b", "sleeping")], {"b": USED}, ["b: sleeping > waking"]),
    "a sleep that ends": ([row("b", "sleeping")], {}, ["b: sleeping > stopping"]),
    "a sleep that is young": ([row("b", "sleeping", age=59.0)], {}, []),
    "a stop is finished first": ([row("a", "stopping")], {"a": USED}, []),
    "room is made by the idle": (
        [row("a", "ready"), row("b", "ready")],
        {"a": IDLE, "b": USED, "dear": USED},
        ["a: ready > leaving"],
    ),
    "nobody is idle": (
        [row("a", "ready"), row("b", "ready")],
        {"a": USED, "b": USED, "dear": USED},
        [],
    ),
    "the last request was just now": (
        [row("a", "ready"), row("b", "ready")],
        {"a": Wanted(5.0, 0.5), "b": USED, "dear": USED},
        [],
    ),
    "room is being made": (
        [row("a", "leaving"), row("b", "ready")],
        {"a": IDLE, "b": IDLE, "dear": USED},
        [],
    ),
    "two leave for a large one": (
        [row("a", "ready"), row("b", "ready")],
        {"a": IDLE, "b": IDLE, "c": USED},
        ["a: ready > leaving", "b: ready > leaving"],
    ),
    "what costs most leaves": (
        [row("a", "ready"), row("dear", "ready")],
        {"a": IDLE, "dear": IDLE, "b": USED},
        ["dear: ready > leaving"],
    ),
    "what is slow to start stays": (
        [row("a", "ready", load=600.0), row("b", "ready")],
        {"a": IDLE, "b": IDLE, "dear": USED},
        ["b: ready > leaving"],
    ),
    "what leaves is used again": (
        [row("a", "leaving"), row("b", "ready")],
        {"a": USED, "b": USED},
        ["a: leaving > ready"],
    ),
    "what leaves is left": ([row("a", "leaving")], {}, ["a: leaving > stopping"]),
    "a model that this fleet does not have": ([row("x", "ready")], {"y": USED}, []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_scaler_does(name: str) -> None:
    rows, wanted, expected = CASES[name]
    moves = plan(TERMS, POOLS, rows, {(served, 0): each for served, each in wanted.items()})
    assert [
        f"{move.served}: {move.before and move.before.value} > {move.after.value}" for move in moves
    ] == expected


def test_the_one_that_waited_longest_gets_the_room() -> None:
    first, second = uuid.uuid4(), uuid.uuid4()
    demands = {
        first: [Demand("a", 0, 1.0, None), Demand("a", 1, 3.0, None)],
        second: [Demand("a", 2, 2.0, None), Demand("a", 0, 0.5, 4.0)],
    }

    moves = plan(TERMS, POOLS, [], merged(demands))

    assert [move.number for move in moves] == [1, 2]


def test_a_replica_is_idle_only_if_it_is_for_all() -> None:
    one, other = uuid.uuid4(), uuid.uuid4()

    def idle_s(*each: float | None) -> float | None:
        demands = [[Demand("a", 0, 1.0, value)] for value in each]
        return merged(dict(zip((one, other), demands, strict=True)))["a", 0].idle_s

    assert idle_s(5.0, None) is None
    assert idle_s(None, 5.0) is None
    assert idle_s(7.0, 5.0) == 5.0


names = st.tuples(st.sampled_from(sorted(TERMS)), st.integers(0, 2))
wanteds = st.builds(
    Wanted, st.floats(0, 100), st.one_of(st.none(), st.floats(0, 100)), st.just([LIFETIME])
)


@given(
    st.dictionaries(names, st.sampled_from([state.value for state in LaunchState]), max_size=6),
    st.dictionaries(names, wanteds, max_size=6),
)
def test_no_move_overfills_a_pool_or_stops_what_is_used(
    states: Mapping[Key, str], wanted: Mapping[Key, Wanted]
) -> None:
    rows = [row(served, state, number) for (served, number), state in states.items()]
    before = {each.key: each.state for each in rows}

    moves = plan(TERMS, POOLS, rows, wanted)

    assert len({move.key for move in moves}) == len(moves), "one move each"
    for move in moves:
        assert move.before == before.get(move.key)
        is_used = move.key in wanted and wanted[move.key].idle_s is None
        if move.after in (LaunchState.STOPPING, LaunchState.LEAVING, LaunchState.PAUSING):
            assert not is_used or move.before is LaunchState.SLEEPING
        if move.after is LaunchState.STARTING:
            assert move.key in wanted

    def taken(states: Mapping[Key, LaunchState]) -> int:
        return sum(TERMS[served].units_in(state) for (served, _), state in states.items())

    begun = {LaunchState.STARTING, LaunchState.WAKING}
    after = before | {move.key: move.after for move in moves if move.after in begun}
    assert taken(after) <= max(taken(before), POOLS["gpus"].unit_count_max)
