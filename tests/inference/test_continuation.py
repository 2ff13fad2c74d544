"""A sequence whose engine is lost continues elsewhere, from any position."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from bench import engine_streams as streams
from inference.core.engine_core import EngineCore
from inference.core.options import CostModel, EngineOptions
from inference.engine import (
    EngineFinishReason,
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
    SamplingParams,
    Scheduled,
    SequenceFinished,
    TokensGenerated,
)
from inference.errors import EngineFailed, EngineOverloaded
from inference.limits import EngineLimits, external_continuation_fault
from inference.routing.replica import Replica
from inference.routing.replica_set import ReplicaSet
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.core_engine import CoreEngine
from tests.inference.running import Outcome, make_core, make_request, run_all
from tests.inference.worker_engines import LONG, first_tokens, prompt, read_all, until

TOKENS = 12
SAMPLED = SamplingParams(temperature=1.0, seed=5, top_p=0.95)
PENALISED = SamplingParams(
    temperature=0.8, seed=9, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.2
)
REQUESTS = {
    "greedy": make_request(prompt(1), TOKENS),
    "seeded": make_request(prompt(2), TOKENS, sampling=SAMPLED),
    "penalised": make_request(prompt(3), TOKENS, sampling=PENALISED),
    "log-probabilities": make_request(prompt(4), TOKENS, sampling=replace(SAMPLED, top_logprobs=2)),
    "not before": make_request(
        prompt(5), TOKENS, sampling=SAMPLED, ignore_eos=False, min_output_tokens=TOKENS - 2
    ),
}


@pytest.fixture(params=["torch", "simulated"])
def core(request: pytest.FixtureRequest, tiny: TinyCheckpoint) -> EngineCore:
    """Return a core that replicas share; the shared cache changes only the speed."""
    if request.param == "torch":
        return make_core(tiny.directory)
    limits = EngineLimits(context_window_tokens=2048, step_token_count_max=256)
    return EngineCore(
        EngineOptions(str(tiny.directory), limits, simulation=CostModel(time_scale=0))
    )


@contextlib.asynccontextmanager
async def serving_set(engines: Sequence[CoreEngine], **options: Any) -> AsyncIterator[ReplicaSet]:
    """Yield a started set."""
    replicas = [Replica(f"r{index}", engine) for index, engine in enumerate(engines)]
    replica_set = ReplicaSet(engines[0].model, replicas, **options)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(replica_set.serve())
        await replica_set.start()
        for engine in engines:
            await engine.start()
        failure = None
        try:
            yield replica_set
        except Exception as error:  # raised as itself, not in a group
            failure = error
        await replica_set.close()
    if failure is not None:
        raise failure


async def run_losing(
    tiny: TinyCheckpoint,
    core: EngineCore,
    request: GenerationRequest,
    lose_at: Sequence[int | None],
    **options: Any,
) -> tuple[Outcome, ReplicaSet, list[CoreEngine]]:
    """Run on one replica per entry, each of which is lost after this many tokens."""
    engines = [CoreEngine(tiny, lambda: core) for _ in lose_at]
    for engine, tokens in zip(engines, lose_at, strict=True):
        engine.lose_at = tokens
    async with serving_set(engines, **options) as replica_set:
        async with streams.stream(replica_set, request) as stream:
            outcome = await read_all(stream)
        assert [report.outstanding_token_count for report in replica_set.reports()] == [0] * len(
            engines
        )
    return outcome, replica_set, engines


def same(outcome: Outcome, undisturbed: Outcome) -> None:
    """Check that all events are equal, except times and moves."""
    assert (outcome.token_ids, outcome.text) == (undisturbed.token_ids, undisturbed.text)
    assert outcome.finished is not None
    assert undisturbed.finished is not None
    for name in ("reason", "prompt_token_count", "generated_token_count"):
        assert getattr(outcome.finished, name) == getattr(undisturbed.finished, name), name
    assert outcome.finished.cached_token_count == outcome.cached_token_count, (
        "as the first engine counted"
    )


@pytest.mark.parametrize("kind", REQUESTS)
async def test_a_sequence_that_is_lost_after_any_token_is_the_same(
    tiny: TinyCheckpoint, core: EngineCore, kind: str
) -> None:
    request = REQUESTS[kind]
    undisturbed, _, _ = await run_losing(tiny, core, request, [None])
    assert undisturbed.finished is not None
    count = len(undisturbed.token_ids)

    for lost_at in range(count + 1):
        outcome, replica_set, engines = await run_losing(tiny, core, request, [lost_at, None])

        same(outcome, undisturbed)
        assert outcome.finished is not None
        # After the last token, its end was not reported yet.
        assert outcome.finished.migration_count == (lost_at > 0)
        assert replica_set.statistics().replacement_count == (lost_at == 0)
        assert [request.output_token_ids for request in engines[1].requests] == [
            tuple(undisturbed.token_ids[:lost_at])
        ]


@pytest.mark.parametrize(
    ("lose_at", "late", "known"),
    [
        ([None], [True], 32),
        ([0, None], [True, True], 32),  # computed by the second replica alone
        ([4, None], [True, True], 0),  # by the first one, which did not say
        ([4, None], [False, True], 32),
        ([4, None], [True, False], 0),
        ([4, 4, None], [False, True, True], 32),
    ],
)
async def test_cached_tokens_are_those_of_the_replica_that_computed_the_prompt(
    tiny: TinyCheckpoint, lose_at: list[int | None], late: list[bool], known: int
) -> None:
    """A replica that continues an output reports the cached part of another prompt."""
    core = make_core(tiny.directory)
    request = make_request(prompt(1), TOKENS)
    run_all(core, [request])
    engines = [CoreEngine(tiny, lambda: core) for _ in lose_at]
    for engine, tokens, is_late in zip(engines, lose_at, late, strict=True):
        engine.lose_at, engine.counts_late = tokens, is_late
    async with serving_set(engines) as replica_set, streams.stream(replica_set, request) as stream:
        outcome = await read_all(stream)

    assert outcome.cached_token_count == known
    assert outcome.finished is not None
    assert outcome.finished.migration_count == sum(bool(each) for each in lose_at)


@pytest.mark.parametrize("continues_exactly", [True, False], ids=["as output", "as prompt"])
@pytest.mark.parametrize("kind", ["greedy", "log-probabilities", "seeded", "penalised"])
async def test_a_drained_replica_releases_requests_that_another_can_continue(
    tiny: TinyCheckpoint, kind: str, continues_exactly: bool
) -> None:
    """Outputs are equal and counted as migrated; the rest stays."""
    request = REQUESTS[kind]
    if kind == "log-probabilities":
        request = replace(request, sampling=replace(request.sampling, temperature=0.0))
    moves = continues_exactly or kind in ("greedy", "log-probabilities")
    [undisturbed] = run_all(make_core(tiny.directory), [request])
    engines = [
        CoreEngine(tiny, lambda: make_core(tiny.directory), continues_exactly=continues_exactly)
        for _ in range(2)
    ]
    async with serving_set(engines) as replica_set, streams.stream(replica_set, request) as stream:
        replica_set.drain(["r0", "r1"])
        assert replica_set.move_out("r0") == 0, "there is no place"
        replica_set.drain(["r0"])
        assert replica_set.move_out("r1") == 0, "it runs elsewhere"
        outcome = Outcome()
        async for event in stream:
            if isinstance(event, TokensGenerated):
                outcome.token_ids += event.token_ids
                if len(outcome.token_ids) == 3:
                    assert replica_set.move_out("r0") == moves
                    assert replica_set.move_out("r0") == 0, "it is on its way"
            elif isinstance(event, SequenceFinished):
                outcome.finished = event

    assert outcome.token_ids == undisturbed.token_ids
    assert outcome.finished is not None
    assert undisturbed.finished is not None
    assert outcome.finished.reason is undisturbed.finished.reason
    assert outcome.finished.migration_count == moves
    assert len(engines[1].requests) == moves


async def test_a_drain_moves_what_there_is_room_for_and_fails_nothing(tiny: TinyCheckpoint) -> None:
    """Five run and two places are free: the rest stays, even if those are taken meanwhile."""
    index_counts = (8, 2)
    engines = [
        CoreEngine(tiny, partial(make_core, tiny.directory, running_sequence_count_max=each))
        for each in index_counts
    ]
    requests = [
        make_request(prompt(seed), 40, sampling=replace(SAMPLED, seed=seed)) for seed in range(5)
    ]
    undisturbed = run_all(make_core(tiny.directory), requests)
    async with (
        serving_set(engines, recovery_wait_s=0.0) as replica_set,
        contextlib.AsyncExitStack() as stack,
    ):
        replica_set.drain(["r1"])
        running = [
            await stack.enter_async_context(streams.stream(replica_set, request))
            for request in requests
        ]
        outcomes = [asyncio.create_task(read_all(stream)) for stream in running]
        await until(lambda: engines[0].token_count >= 10)
        replica_set.drain(["r0"])

        engines[1].queue_is_full = True
        refused_count = replica_set.move_out("r0")
        await until(lambda: not replica_set.moving)
        engines[1].queue_is_full = False
        moved_count = replica_set.move_out("r0")
        await until(lambda: not replica_set.moving)

        assert (refused_count, moved_count, replica_set.move_out("r0")) == (2, 2, 0)
        assert [(await outcome).token_ids for outcome in outcomes] == [
            each.token_ids for each in undisturbed
        ]
    assert len(engines[1].requests) == 2
    assert [report.live_sequence_count for report in replica_set.reports()] == [0, 0]


async def test_a_stop_sequence_is_found_at_the_seam(tiny: TinyCheckpoint, core: EngineCore) -> None:
    """Wherever a loss cuts the output, also within a stop sequence or a character."""
    plain, _, _ = await run_losing(tiny, core, make_request(prompt(6), 30), [None])
    for begin in range(2, 20, 3):
        stops = (plain.text[begin : begin + 7], plain.text[begin + 1 : begin + 4] + "never")
        request = make_request(prompt(6), 30, stop_sequences=stops)
        undisturbed, _, _ = await run_losing(tiny, core, request, [None])
        assert undisturbed.finished is not None
        assert undisturbed.finished.reason is EngineFinishReason.STOP_SEQUENCE
        for lost_at in range(1, len(undisturbed.token_ids) + 1):
            outcome, _, _ = await run_losing(tiny, core, request, [lost_at, None])

            same(outcome, undisturbed)


async def test_a_sequence_survives_one_loss_after_the_other_up_to_a_bound(
    tiny: TinyCheckpoint, core: EngineCore
) -> None:
    """The sequence may be the cause, so it must not break all engines."""
    request = make_request(prompt(1), TOKENS)
    undisturbed, _, _ = await run_losing(tiny, core, request, [None])

    outcome, _, _ = await run_losing(tiny, core, request, [3, 4, None])

    same(outcome, undisturbed)
    assert outcome.finished is not None
    assert outcome.finished.migration_count == 2
    engines = [CoreEngine(tiny, lambda: core) for _ in range(4)]
    async with serving_set(engines) as replica_set:
        for engine in engines:
            engine.lose_at = 1
        with pytest.raises(EngineFailed):
            async with streams.stream(replica_set, request) as stream:
                await read_all(stream)
    assert [len(engine.requests) for engine in engines] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    "request_",
    [
        make_request(
            prompt(1),
            TOKENS,
            ignore_eos=False,
            response_format=ResponseFormat(GrammarKind.REGEX, "[a-z ]{30,60}"),
        ),
        make_request(prompt(1), TOKENS, choice_count=2, sampling=SAMPLED),
    ],
    ids=["response format", "choices"],
)
async def test_an_uncontinuable_request_fails_after_its_first_token_and_is_replaced_before(
    tiny: TinyCheckpoint, request_: GenerationRequest
) -> None:
    core = make_core(tiny.directory)
    with pytest.raises(EngineFailed):
        await run_losing(tiny, core, request_, [2, None])

    engines = [CoreEngine(tiny, lambda: core) for _ in range(2)]
    engines[0].lose_at = 0
    async with serving_set(engines) as replica_set, streams.stream(replica_set, request_) as stream:
        events = [event async for event in stream]
    assert len([event for event in events if isinstance(event, Scheduled)]) == 1
    assert isinstance(events[-1], SequenceFinished)
    assert replica_set.statistics().replacement_count == 1


async def test_a_cancelled_sequence_whose_engine_is_lost_is_cancelled(tiny: TinyCheckpoint) -> None:
    core = make_core(tiny.directory)
    engines = [CoreEngine(tiny, lambda: core) for _ in range(2)]
    async with (
        serving_set(engines) as replica_set,
        streams.stream(replica_set, make_request(prompt(1), LONG)) as stream,
    ):
        await first_tokens(stream, 3)
        engines[0].lose()
        stream.cancel()
        outcome = await read_all(stream)

    assert outcome.finished is not None
    assert outcome.finished.reason is EngineFinishReason.CANCELLED
    assert outcome.finished.generated_token_count == 3 + len(outcome.token_ids)
    assert not engines[1].requests


async def test_a_closed_replicas_sequence_continues_and_may_end(tiny: TinyCheckpoint) -> None:
    core = make_core(tiny.directory)
    engines = [CoreEngine(tiny, lambda: core) for _ in range(2)]
    async with (
        serving_set(engines) as replica_set,
        streams.stream(replica_set, make_request(prompt(1), LONG)) as stream,
    ):
        await first_tokens(stream, 3)
        await engines[0].close()
        await first_tokens(stream, 3)
        await replica_set.close()
        outcome = await read_all(stream)

    assert outcome.finished is not None
    assert outcome.finished.reason is EngineFinishReason.CANCELLED
    assert outcome.finished.migration_count == 1


async def test_a_sequence_waits_for_its_own_replica(tiny: TinyCheckpoint, core: EngineCore) -> None:
    request = make_request(prompt(1), TOKENS)
    undisturbed, _, _ = await run_losing(tiny, core, request, [None])
    engine = CoreEngine(tiny, lambda: core)

    async def restart() -> None:
        await until(lambda: engine.core is None)
        engine.lose_at = None
        await engine.start()

    engine.lose_at = 5
    async with serving_set([engine]) as replica_set, asyncio.TaskGroup() as tasks:
        tasks.create_task(restart())
        async with streams.stream(replica_set, request) as stream:
            outcome = await read_all(stream)
    same(outcome, undisturbed)

    with pytest.raises(EngineFailed):
        await run_losing(tiny, core, request, [5], recovery_wait_s=0.0)


async def test_full_queues_are_skipped_or_reported(tiny: TinyCheckpoint, core: EngineCore) -> None:
    engines = [CoreEngine(tiny, lambda: core) for _ in range(2)]
    async with serving_set(engines) as replica_set:
        engines[0].queue_is_full = True
        async with streams.stream(replica_set, make_request(prompt(1), 3)) as stream:
            await read_all(stream)
        engines[1].queue_is_full = True
        with pytest.raises(EngineOverloaded):
            async with streams.stream(replica_set, make_request(prompt(1), 3)):
                pass

    assert [len(engine.requests) for engine in engines] == [0, 1]


@pytest.mark.parametrize(
    ("sampling", "continues"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=1.0), True),
        (SamplingParams(repetition_penalty=1.3), True),
        (SamplingParams(temperature=1.0, seed=1), False),
        (SamplingParams(seed=1), True),
        (SamplingParams(presence_penalty=0.1), False),
        (SamplingParams(frequency_penalty=0.1), False),
    ],
)
def test_an_engine_that_sees_output_as_prompt_refuses_what_would_come_out_otherwise(
    sampling: SamplingParams, continues: bool
) -> None:
    request = make_request(prompt(1), TOKENS, sampling=sampling)

    assert external_continuation_fault(request) is None
    assert (
        external_continuation_fault(replace(request, output_token_ids=(9,))) is None
    ) == continues
