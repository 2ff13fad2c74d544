"""Known faults of TensorRT-LLM 1.2.1 and their handling, on a double that has them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from inference.engine import (
    EngineFinishReason,
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
    SamplingParams,
    StopCriteria,
)
from inference.errors import EngineStartFailed
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import make_core, make_request, run_all
from tests.inference.tensorrt_queue import LIMITS, double_imported, queue_world, until
from tests.inference.worker_engines import LONG, prompt

SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, top_k=1, logit_bias=((33, 4.0), (34, -9.0)))


def beginning_with(token_id: int, max_output_tokens: int = 30, **changes: Any) -> GenerationRequest:
    """Return a request that a planted fault hits."""
    return make_request([token_id, *prompt(4, 30)], max_output_tokens, **changes)


async def test_parameters_arrive_in_the_engine_and_tokens_are_those_of_the_torch_engine(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = ResponseFormat(GrammarKind.REGEX, "[0-9]{3}")
    requests = [
        make_request(prompt(1), 20),
        make_request(prompt(2), 20, sampling=SAMPLED),
        make_request(prompt(3), 12, sampling=SamplingParams(top_logprobs=3)),
        make_request(prompt(4), 20, ignore_eos=False, sampling=SAMPLED),
        make_request(prompt(5), 40, ignore_eos=False, response_format=digits),
    ]
    expected = run_all(make_core(tiny.directory), requests)

    async with queue_world(tiny.directory, monkeypatch) as world:
        outcomes = [await world.run(number, request) for number, request in enumerate(requests)]

    for outcome, own in zip(outcomes, expected, strict=True):
        assert outcome.finished is not None
        assert own.finished is not None
        assert (outcome.token_ids, outcome.text) == (own.token_ids, own.text)
        assert outcome.finished.reason is own.finished.reason
        assert outcome.finished.generated_token_count == own.finished.generated_token_count
    assert [len(each.top) for each in outcomes[2].logprobs] == [3] * 12
    assert [each.chosen for each in outcomes[2].logprobs] == [
        each.chosen for each in expected[2].logprobs
    ]
    assert len(outcomes[4].text) == 3


@pytest.mark.parametrize("faults", ["lonely", "lonely,end_omitted"])
async def test_an_end_token_is_counted_whether_the_engine_lists_it_or_not(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, faults: str
) -> None:
    free = run_all(make_core(tiny.directory), [make_request(prompt(1), 20)])[0]
    end, other_end = free.token_ids[5], free.token_ids[7]

    async with queue_world(tiny.directory, monkeypatch, faults=faults) as world:
        ended = await world.run(
            0, make_request(prompt(1), 20, stop_token_ids=frozenset({end, other_end}))
        )

    assert ended.finished is not None
    assert ended.finished.reason is EngineFinishReason.STOP
    first = min(free.token_ids.index(end), free.token_ids.index(other_end))
    assert ended.token_ids == free.token_ids[: first + 1]
    assert ended.finished.generated_token_count == first + 1


async def test_a_stop_sequence_ends_the_sequence_in_the_engine_too(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would mark the result finished and let the engine run to its limit."""
    free = run_all(make_core(tiny.directory), [make_request(prompt(1), 30)])[0]

    async with queue_world(tiny.directory, monkeypatch) as world:
        stopped = await world.run(
            0, make_request(prompt(1), LONG, stop_sequences=(free.text[5:9],))
        )
        await until(lambda: world.llm._core.idle, "the engine to be told")
        steps = world.llm._core.statistics().step_count

    assert stopped.text == free.text[: free.text.index(free.text[5:9])]
    assert steps < LONG / 2


async def test_a_cancel_before_the_first_token_is_answered_at_once_and_aborts_at_that_token(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborts during prefill have hung engines (ai-dynamo/dynamo#4177)."""
    limits = replace(LIMITS, step_token_count_max=16)
    async with queue_world(tiny.directory, monkeypatch, limits=limits) as world:
        world.add(0, make_request(prompt(1, 1900), 100))
        world.queue.cancel(0)

        cancelled = world.outcomes[0].finished  # nothing was waited for
        assert not next(world.queue.inside).aborted
        await until(lambda: world.queue.idle, "the engine to give the sequence up")

    assert cancelled is not None
    assert (cancelled.reason, cancelled.generated_token_count) == (EngineFinishReason.CANCELLED, 0)


async def test_an_abort_that_is_never_answered_is_waited_for_only_so_long(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_world(
        tiny.directory, monkeypatch, faults="lonely,mute_abort,stuck:9", abort_drain_s=0.2
    ) as world:
        world.add(0, beginning_with(9, LONG))
        await world.first_token(0)
        world.queue.cancel(0)
        ended = await world.end(0)
        await until(lambda: world.queue.idle, "its place to be free")

    assert ended.finished is not None
    assert ended.finished.reason is EngineFinishReason.CANCELLED
    assert ended.finished.generated_token_count == len(ended.token_ids) > 0


@pytest.mark.parametrize(
    ("options", "sampling"),
    [({}, SamplingParams(top_logprobs=2)), ({"abort_running": False}, SamplingParams())],
    ids=["logprobs", "off"],
)
async def test_where_an_abort_could_crash_the_engine_the_sequence_runs_on_unseen(
    tiny: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    sampling: SamplingParams,
) -> None:
    """NVIDIA/TensorRT-LLM#10810: abort, streaming and log-probabilities together."""
    async with queue_world(tiny.directory, monkeypatch, **options) as world:
        world.add(0, make_request(prompt(1), 200, sampling=sampling))
        await world.first_token(0)
        world.queue.cancel(0)

        finished = world.outcomes[0].finished
        assert finished is not None
        assert finished.reason is EngineFinishReason.CANCELLED
        assert not next(world.queue.inside).aborted
        await until(lambda: world.queue.idle, "it to run out")

    assert world.outcomes[0].finished is finished


async def test_a_failed_request_leaves_the_others_alone(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_world(
        tiny.directory, monkeypatch, faults="lonely,error:9,swallow_logprobs:11"
    ) as world:
        world.add(0, make_request(prompt(1), 60))
        world.add(1, beginning_with(9))
        world.add(2, beginning_with(11, sampling=SamplingParams(top_logprobs=1)))
        fine = await world.end(0)
        await until(lambda: {1, 2} <= set(world.failures), "the failures")

    assert len(fine.token_ids) == 60
    assert "the worker failed this request" in world.failures[1]
    assert "log-probabilities" in world.failures[2]
    assert world.broken == []


async def test_an_error_that_ends_the_engine_is_noticed_by_its_first_reader(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request gets the error; the others would wait for ever."""
    async with queue_world(tiny.directory, monkeypatch, faults="lonely,fatal:9") as world:
        world.add(0, make_request(prompt(1), LONG))
        world.add(1, beginning_with(9))
        await until(lambda: bool(world.broken), "the engine to be given up")

    assert "illegal memory access" in world.broken[0]


async def test_a_sequence_that_sticks_fails_alone_while_others_go_on(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_world(
        tiny.directory, monkeypatch, faults="lonely,stuck:9", inter_token_timeout_s=4.0
    ) as world:
        world.add(1, beginning_with(9, 1000))
        await world.first_token(1)
        watching = world.tasks.create_task(world.watch().run())
        number = 10
        while 1 not in world.failures:
            await world.run(number, make_request([20, *prompt(number)], 200))
            number += 1
        watching.cancel()

    assert "stopped generating" in world.failures[1]
    assert world.broken == []


async def test_an_engine_that_does_nothing_is_given_up_though_its_health_is_good(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA/TensorRT-LLM#10663: requests hang, health says 200."""
    async with queue_world(
        tiny.directory, monkeypatch, faults="lonely,wedge:9", inter_token_timeout_s=0.5
    ) as world:
        world.add(1, beginning_with(9))
        await asyncio.wait_for(world.watch().run(), 30)
        assert world.llm._check_health()

    assert "silent" in world.broken[0]


async def test_an_idle_engine_is_requested_a_token_now_and_then(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_world(
        tiny.directory, monkeypatch, canary_interval_s=0.1, canary_timeout_s=1.0
    ) as world:
        watch = world.watch()
        assert await watch.canary_fault() is None
        world.llm._wedged = True
        await asyncio.wait_for(watch.run(), 30)

    assert "no token within" in world.broken[0]


async def test_a_dead_worker_process_is_noticed(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA/TensorRT-LLM#12868, #16338: clients get nothing, health stays green."""
    async with queue_world(tiny.directory, monkeypatch, faults="") as world:
        watch = world.watch()
        world.llm._worker.kill()
        await asyncio.wait_for(watch.run(), 30)
        assert world.llm._check_health()

    assert "is gone" in world.broken[0]


async def test_one_empty_answer_after_the_other_is_a_broken_cache(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA/TensorRT-LLM#12933, #15018: orphaned blocks make every answer empty."""
    empty = beginning_with(9, ignore_eos=False)
    async with queue_world(
        tiny.directory, monkeypatch, faults="lonely,empty:9", empty_answer_count_max=4
    ) as world:
        for number in range(3):
            await world.run(number, empty)
        await world.run(3, make_request(prompt(1), 5))
        assert world.broken == [], "one that says something breaks the row"
        for number in range(4, 8):
            await world.run(number, empty)

    assert world.broken == ["4 answers in a row were empty"]


async def test_no_more_are_submitted_than_have_a_row_in_the_batch(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborts in the engine's queue are unanswered (NVIDIA/TensorRT-LLM#9628)."""
    async with queue_world(tiny.directory, monkeypatch) as world:
        for number in range(12):
            world.add(number, make_request(prompt(number), 40))
        assert world.queue.statistics().running_sequence_count == LIMITS.running_sequence_count_max
        assert world.queue.statistics().waiting_sequence_count == 8
        world.queue.cancel(11)
        assert world.outcomes[11].finished is not None, "one that waits here is gone at once"
        for number in range(11):
            assert len((await world.end(number)).token_ids) == 40
        assert world.llm.kwargs["max_batch_size"] > LIMITS.running_sequence_count_max


async def test_the_next_sequence_is_chosen_by_rank_with_bounded_overtaking(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(LIMITS, running_sequence_count_max=1, waiting_sequence_count_max=3)
    async with queue_world(tiny.directory, monkeypatch, limits=limits) as world:
        ends: list[int] = []
        emit = world.emit

        def note(number: int, event: Any) -> None:
            emit(number, event)
            if world.outcomes[number].finished is not None:
                ends.append(number)
                if number < 9:  # a flood of sequences that would always be next
                    world.add(number + 10, replace(make_request(prompt(number), 4), rank=-1.0))

        world.queue._sink = note
        world.add(0, make_request(prompt(0), 60))
        world.add(1, replace(make_request(prompt(1), 4), rank=5.0))
        world.add(2, replace(make_request(prompt(2), 4), rank=1.0))
        for number in range(3, 9):
            world.add(number, replace(make_request(prompt(number), 4), rank=0.0))
        await world.end(1)
        overtaken = ends.index(1) - 1

    assert ends[:4] == [0, 3, 4, 5] or ends[1] == 10, ends
    assert overtaken <= 3 + 2, "three may wait at once, and those that came before count for none"


async def test_choices_follow_the_first_and_have_its_prompt_in_the_cache(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(
        prompt(1), 10, choice_count=3, sampling=SamplingParams(temperature=1.0, seed=5)
    )
    async with queue_world(tiny.directory, monkeypatch) as world:
        finished = (await world.run(0, request)).finished
        world.add(1, replace(request, stop=StopCriteria(LONG, ignore_eos=True)))
        await world.first_token(1)
        world.queue.cancel(1)
        cancelled = (await world.end(1)).finished

    assert finished is not None
    assert (finished.generated_token_count, finished.cached_token_count) == (30, 0)
    assert sorted(world.ends_of_choices[0]) == sorted(world.ends_of_choices[1]) == [0, 1, 2]
    assert cancelled is not None
    assert cancelled.reason is EngineFinishReason.CANCELLED


@pytest.mark.parametrize("version", ["1.2.0", "1.3.0rc1"])
def test_another_release_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """1.2.0 corrupts its KV cache (NVIDIA/TensorRT-LLM#12770); later interfaces differ."""
    from inference.adapters.tensorrt_library import TensorRtLibrary

    monkeypatch.setenv("TENSORRT_DOUBLE_VERSION", version)
    with (
        double_imported(monkeypatch),
        pytest.raises(EngineStartFailed, match=r"Weir needs 1\.2\.1"),
    ):
        TensorRtLibrary()


def test_without_the_library_the_error_says_what_to_install() -> None:
    from inference.adapters.tensorrt_library import TensorRtLibrary

    with pytest.raises(EngineStartFailed, match="name an interpreter that has"):
        TensorRtLibrary()
