"""Benchmark of placement policies: in virtual time, and it separates good placement from bad."""

from __future__ import annotations

import asyncio

from bench.router import POLICY_ORDER, make_trace, mean, measure, values_of
from bench.virtual_time import VirtualTimeLoop


def test_all_policies_have_the_same_to_do_and_prefixes_are_found_where_they_are() -> None:
    trace = make_trace(8, 8.0, seed=3)
    assert trace == make_trace(8, 8.0, seed=3)

    found = measure(trace, 2)

    assert tuple(found) == POLICY_ORDER
    turns = sum(len(dialogue.turns) for dialogue in trace)
    assert all(len(seen.ttfts_ms) == turns for seen in found.values())
    assert len({seen.prompt_token_count for seen in found.values()}) == 1, (
        "all policies had the same to do"
    )
    aware, turn_by_turn = found["prefix_aware"], found["round_robin"]
    assert aware.cached_token_count > turn_by_turn.cached_token_count
    assert mean(aware.ttfts_ms) < mean(turn_by_turn.ttfts_ms)
    assert values_of(aware)["hits"] > values_of(turn_by_turn)["hits"]


def test_virtual_time_jumps_to_what_is_due_in_order() -> None:
    async def run() -> list[float]:
        loop, seen = asyncio.get_running_loop(), list[float]()

        async def wake(after_s: float) -> None:
            await asyncio.sleep(after_s)
            seen.append(loop.time())

        async with asyncio.TaskGroup() as tasks:
            for after_s in (3600.0, 1.0, 60.0):
                tasks.create_task(wake(after_s))
        return seen

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(run()) == [1.0, 60.0, 3600.0]
