"""The TensorRT-LLM engine in its child process: restart after death, refusals, reported cache."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import engine_streams as streams
from common.processes import alive, command_line, descendants
from inference.adapters.kv_events import KvCacheChange, KvEventIndex
from inference.adapters.tensorrt_library import POLL_EVERY_S
from inference.adapters.tensorrt_settings import TENSORRT_LLM, TensorRtOptions
from inference.adapters.tensorrt_worker import KvEventReader
from inference.engine import (
    BeamSearchParams,
    EngineState,
    GenerationRequest,
    GrammarKind,
    ResponseFormat,
)
from inference.errors import EngineFailed, EngineStartFailed, RequestImpossible
from tests.inference.checkpoints import TinyCheckpoint
from tests.inference.running import make_request
from tests.inference.tensorrt_engines import find_double, tensorrt_settings
from tests.inference.worker_engines import LONG, first_tokens, prompt, read_all, run, serving, until


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    find_double(monkeypatch)


@pytest.mark.usefixtures("executed_workers")
async def test_a_dead_worker_fails_waiters_and_the_engine_returns(tiny: TinyCheckpoint) -> None:
    async with serving(tensorrt_settings(tiny)) as engine:
        whole = await run(engine, make_request(prompt(1), 5))
        pid = engine.worker_pid
        assert pid is not None
        (worker,) = ranks(pid)
        async with streams.stream(engine, make_request(prompt(1), LONG)) as stream:
            await first_tokens(stream, 2)
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(EngineFailed):
                await read_all(stream)
        await until(
            lambda: engine.condition().state is EngineState.READY and engine.worker_pid != pid
        )

        again = await run(engine, make_request(prompt(1), 5))

    assert again.token_ids == whole.token_ids
    assert again.cached_token_count == 0, "its cache went with it"


def ranks(pid: int) -> list[int]:
    return [each for each in descendants(pid) if "mpi4py.futures.server" in command_line(each)]


async def test_workers_do_not_outlive_a_worker_that_was_killed(tiny: TinyCheckpoint) -> None:
    """They run in sessions of their own, and would keep the GPU's memory from the next load."""
    async with serving(tensorrt_settings(tiny)) as engine:
        pid = engine.worker_pid
        assert pid is not None
        (worker,) = ranks(pid)
        assert os.getpgid(worker) != os.getpgid(pid)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: engine.worker_pid not in (None, pid))
        assert not alive(worker), "the next process starts after the end of all workers"
        await until(lambda: engine.condition().state is EngineState.READY)


async def test_a_helper_that_ends_is_not_taken_for_a_lost_worker(tiny: TinyCheckpoint) -> None:
    """Compilers and the like end when they are idle."""
    async with serving(tensorrt_settings(tiny)) as engine:
        pid = engine.worker_pid
        assert pid is not None
        await until(lambda: descendants(pid) == ranks(pid))
        await asyncio.sleep(3 * POLL_EVERY_S)
        await run(engine, make_request(prompt(1), 5))
        assert engine.worker_pid == pid


async def test_a_load_that_fails_three_times_is_given_up_with_the_end_of_its_log(
    tiny: TinyCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """MPI_Abort ends the process before it can say why it cannot load."""
    settings = tensorrt_settings(tiny, faults="abort_on_load")
    async with serving(settings, started=False) as engine:
        with contextlib.suppress(EngineStartFailed):
            await engine.start()
        await until(lambda: engine.condition().state is EngineState.FAILED)
        with pytest.raises(
            EngineStartFailed, match=r"loading failed 3 times, last because .*SIGKILL"
        ):
            await engine.start()

    assert "its log ends:" in caplog.text
    assert "MPI_ABORT was invoked on rank 0" in caplog.text


async def test_cached_tokens_come_from_events_and_beams_are_refused(tiny: TinyCheckpoint) -> None:
    tokens = tuple(prompt(1, 64))
    async with serving(tensorrt_settings(tiny)) as engine:
        assert engine.predict_cached_token_count(tokens, "") == 0
        await run(engine, make_request(tokens, 5))
        await until(lambda: engine.predict_cached_token_count(tokens, "") == 48)
        assert engine.predict_cached_token_count(tokens, "another tenant") == 0

        found = await run(engine, make_request(tokens, 5))
        with pytest.raises(RequestImpossible) as refused:
            async with streams.stream(engine, beams()):
                pass
        model, workers = engine.model, descendants(engine.worker_pid or 0)

    assert found.cached_token_count == 48
    assert refused.value.field == "beam_search"
    assert model.engine == "tensorrt_llm"
    assert not any(alive(pid) for pid in workers), (
        "a worker that outlives its worker keeps the GPU's memory"
    )


def beams() -> GenerationRequest:
    return replace(make_request(prompt(1), 5), beam_search=BeamSearchParams(width=2))


async def test_an_engine_that_cannot_start_reports_the_reason(tiny: TinyCheckpoint) -> None:
    settings = tensorrt_settings(tiny, options={"tensor_parallel_size": 2})
    async with serving(settings, started=False) as engine:
        with pytest.raises(EngineStartFailed, match="GPUs"):
            await engine.start()
        assert engine.condition().state is EngineState.FAILED


@pytest.mark.parametrize(
    "values",
    [
        {"tensor_parallel_size": 0},
        {"expert_parallel_size": 0},
        {"kv_cache_memory_fraction": 1.0},
        {"empty_answer_count_max": 0},
    ],
)
def test_options_that_no_engine_has_are_refused_by_name(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        TensorRtOptions(**values)  # type: ignore[arg-type]


def test_a_lark_grammar_is_honoured() -> None:
    TENSORRT_LLM["1.2.1"].check(
        make_request(
            prompt(1),
            5,
            ignore_eos=False,
            response_format=ResponseFormat(GrammarKind.LARK, "start: /a/"),
        ),
        "tensorrt_llm",
    )


def stored(event_id: int, parent: int | None, block: int, tokens: list[int]) -> dict[str, object]:
    blocks = [
        {
            "block_hash": block,
            "tokens": [{"token_id": token, "token_extra_id": 0} for token in tokens],
        }
    ]
    return {
        "event_id": event_id,
        "data": {"type": "stored", "parent_hash": parent, "blocks": blocks},
    }


def test_lost_events_empty_the_index() -> None:
    """The engine's buffer is bounded: a gap in the numbers means an overflow."""
    reader, index = KvEventReader(), KvEventIndex()
    first = [stored(0, None, 5, [1, 2]), stored(1, 5, 6, [3, 4])]
    for change in reader.read(first):
        index.apply(change)
    assert index.matched_token_count([1, 2, 3, 4, 5]) == 4

    for change in reader.read([stored(7, None, 8, [9, 9])]):
        index.apply(change)

    assert index.matched_token_count([1, 2, 3, 4, 5]) == 0
    assert index.matched_token_count([9, 9, 1]) == 2


def test_the_index_follows_each_of_several_tenants_from_where_their_prompts_part() -> None:
    """Salts separate blocks of equal tokens, and events have no salt."""
    index = KvEventIndex()
    index.apply(
        KvCacheChange(
            False, [(0, 11, [1, 2]), (11, 12, [3, 4]), (0, 21, [1, 2]), (21, 22, [5, 6])], []
        )
    )

    assert [index.matched_token_count([1, 2, *rest, 9]) for rest in ([3, 4], [5, 6], [7, 8])] == [
        4,
        4,
        2,
    ]
    index.apply(KvCacheChange(False, [], [21, 22]))
    assert [index.matched_token_count([1, 2, *rest, 9]) for rest in ([3, 4], [5, 6], [7, 8])] == [
        4,
        2,
        2,
    ]


blocks = st.lists(
    st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 12), st.integers(0, 2)), max_size=60
)


@given(blocks, st.lists(st.integers(0, 2), max_size=8))
def test_the_index_equals_a_walk_over_all_blocks(
    acts: list[tuple[bool, int, int, int]], token_ids: list[int]
) -> None:
    index = KvEventIndex()
    held: dict[int, tuple[int, int]] = {}
    for stores, block, parent, token in acts:
        if stores:
            held[block] = (parent, token)
            index.apply(KvCacheChange(False, [(parent, block, [token])], []))
        else:
            held.pop(block, None)
            index.apply(KvCacheChange(False, [], [block]))

    count, parents = 0, {0}
    while any(held) and count + 1 < len(token_ids):
        parents = {
            block
            for block, (parent, token) in held.items()
            if parent in parents and token == token_ids[count]
        }
        if not parents:
            break
        count += 1
    assert index.matched_token_count(token_ids) == count
    assert len(index) == len(held)
