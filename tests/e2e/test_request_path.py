"""Path of a request through the code: ceilings of `infra.walk`, which may only be lowered."""

from __future__ import annotations

from infra import walk

RUNS_MAX = 3


async def test_a_request_passes_no_more_functions_than_before(database_url: str) -> None:
    walked = await walk.walk(database_url)

    shown = walk.text_of(walked)
    assert len(walked.processes) == 2, "an api process and its engine"
    assert all(any(function.is_step for function in each.functions) for each in walked.processes)
    assert len(walked.steps) <= walk.STEPS_MAX, shown
    assert len(walk.files_of(walked.steps)) <= walk.STEP_FILES_MAX, shown
    assert len(walked.functions) <= walk.FUNCTIONS_MAX, shown
    assert len(walk.files_of(walked.functions)) <= walk.FILES_MAX, shown


async def test_a_request_costs_no_more_calls_than_before(database_url: str) -> None:
    # A busy machine splits batches, which adds calls: the least of some runs is the code's own.
    for _ in range(RUNS_MAX):
        cost = await walk.cost(database_url)
        if cost.call_count <= walk.CALLS_MAX and cost.wake_up_count <= walk.WAKE_UPS_MAX:
            break

    assert 0 < cost.call_count <= walk.CALLS_MAX
    assert 0 < cost.wake_up_count <= walk.WAKE_UPS_MAX
